//! `pserver env`: the settings that a trainer takes from an environment, their origins, and contradictions.

use std::process::Command;

/// Standard output and error of `pserver env` in an environment of `NAME=value` words, and whether it succeeded.
fn env(arguments: &[&str], variables: &str) -> (String, String, bool) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pserver"));
    command.env_clear().envs(variables.split_whitespace().filter_map(|word| word.split_once('=')));
    let ended = command.arg("env").args(arguments).output().expect("the program can be run");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    (text(ended.stdout), text(ended.stderr), ended.status.success())
}

#[test]
fn settings_are_printed_with_their_origins_and_the_variables_of_launchers() {
    let slurm = "SLURM_PROCID=1 SLURM_NTASKS=4 SLURM_JOB_NODELIST=n[01-03,7],gpu-1 PMI_RANK=1";
    let (output, errors, is_found) = env(&["deadline=30s"], slurm);
    assert!(is_found && errors.is_empty(), "{errors}");
    let expected = [
        "coordinator = n01:7164 (from SLURM_JOB_NODELIST)",
        "trainer = 1 (from PMI_RANK)",
        "deadline = 30s (from the options)",
        "poll = adaptive (default)",
        "# MPICH: PMI_RANK = 1 (trainer, used)",
        "# Slurm: SLURM_JOB_NODELIST = n[01-03,7],gpu-1 (coordinator, used)",
        "# Slurm: SLURM_PROCID = 1 (trainer, not used)",
        "# Slurm: SLURM_NTASKS = 4 (trainers, not used)",
    ];
    expected.iter().for_each(|line| assert!(output.lines().any(|found| found == *line), "{line}:\n{output}"));
}

#[test]
fn the_same_is_printed_as_json() {
    let (output, _, is_found) = env(&["--json"], "PSERVER_TRAINER=2 PSERVER_TRAINERS=3 DMLC_PS_ROOT_URI=d");
    let all: serde_json::Value = serde_json::from_str(&output).expect("it is JSON");
    assert!(is_found);
    let setting = |name: &str| {
        let found = all["settings"].as_array().and_then(|all| all.iter().find(|one| one["setting"] == name));
        let found = found.unwrap_or_else(|| panic!("{name} in {output}"));
        (found["value"].as_str(), found["from"].as_str())
    };
    assert_eq!(setting("trainer"), (Some("2"), Some("PSERVER_TRAINER")));
    assert_eq!(setting("trainers"), (Some("3"), Some("PSERVER_TRAINERS")));
    assert_eq!(setting("coordinator"), (Some("d:7164"), Some("DMLC_PS_ROOT_URI")));
    assert_eq!(all["variables"][0]["variable"], "PSERVER_TRAINER");
    assert_eq!(all["variables"][0]["used"], true);
}

#[test]
fn contradicting_ranks_end_with_an_error_that_names_both_after_the_settings() {
    let (output, errors, is_found) = env(&[], "RANK=1 WORLD_SIZE=2 SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_STEP_ID=0");
    assert!(!is_found && output.contains("# torchrun: RANK = 1 (trainer, not used)"), "{output}");
    let expected = "pserver: trainer (from RANK) is \"1\" and (from SLURM_PROCID) \"0\", each of 2: expected one rank";
    assert!(errors.starts_with(expected), "{errors}");
}
