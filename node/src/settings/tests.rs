//! Precedence of settings, refused values, and error texts.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use clap::{CommandFactory, Parser};
use pserver_client::environment::SERVER_SETTINGS;
use pserver_core::config::{Merge, Mode, ParameterConfig};
use pserver_core::limits::SHARDS_DEFAULT;
use pserver_core::optim::Rule;
use pserver_core::server::NonFinite;
use pserver_core::wire::{FirstServerMessage, JobMessage, Joined};
use tempfile::TempDir;

use super::{DeviceSetting, JournalSetting, LogFormat, LogLevel, ServeArgs, Settings};

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    args: ServeArgs,
}

/// A command line, an environment and a file, each as words separated by spaces or lines.
struct GivenSettings {
    args: ServeArgs,
    environment: Vec<(String, String)>,
    file: PathBuf,
    _folder: TempDir,
}

fn given(flags: &str, environment: &str, file: &str) -> GivenSettings {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("pserver.toml");
    fs::write(&path, file).unwrap();
    let mut args = Line::parse_from(["serve"].into_iter().chain(flags.split_whitespace())).args;
    args.config = Some(path.clone());
    let pairs = environment.split_whitespace().map(|pair| pair.split_once('=').unwrap());
    let environment = pairs.map(|(name, text)| (name.to_owned(), text.to_owned())).collect();
    GivenSettings { args, environment, file: path, _folder: folder }
}

fn load(flags: &str, environment: &str, file: &str) -> Result<Settings, String> {
    let given = given(flags, environment, file);
    let found = Settings::load(&given.args, &given.environment);
    found.map_err(|error| format!("{error:#}").replace(given.file.to_str().unwrap(), "FILE"))
}

fn check_refused(flags: &str, environment: &str, file: &str, expected: &str) {
    let error = load(flags, environment, file).expect_err("something is wrong with it");
    assert_eq!(error, expected.replace("WRONG ", "the configuration is wrong:\n  "));
}

#[test]
fn flags_beat_the_environment_which_beats_the_file_which_beats_the_defaults() {
    let check = |flags, environment, file, expected: u32| {
        assert_eq!(load(flags, environment, file).unwrap().job.trainers, expected);
    };
    check("", "", "", 1);
    check("", "", "trainers = 2", 2);
    check("", "PSERVER_TRAINERS=3", "trainers = 2", 3);
    check("--trainers 4", "PSERVER_TRAINERS=3", "trainers = 2", 4);
    check("--trainers 4", "", "trainers = 2", 4);
    check("", "PSERVER_REQUIRE=rdma TRAINERS=9", "", 1);
}

#[test]
fn shards_share_threads_unless_each_is_to_have_one() {
    let check = |flags, shards, threads| {
        let found = load(flags, "", "").unwrap();
        assert_eq!((found.shards, found.threads()), (shards, threads), "{flags}");
    };
    let half = std::thread::available_parallelism().map_or(1, |processors| processors.get() / 2);
    let by_default = |shards: u16| u16::try_from(half).unwrap_or(u16::MAX).clamp(1, shards);
    check("", SHARDS_DEFAULT, by_default(SHARDS_DEFAULT));
    check("--shards 1", 1, 1);
    check("--shards 200", 200, by_default(200));
    check("--shards 8 --threads 3", 8, 3);
    check("--shards 2 --threads 3", 2, 2);
}

#[test]
fn help_has_every_setting_in_a_group_with_its_variable() {
    let command = Line::command();
    for key in ServeArgs::default().keys() {
        let arg = command.get_arguments().find(|arg| arg.get_id() == key.name).expect("a setting has an option");
        let help = arg.get_help().expect("an option has help").to_string();
        assert!(help.ends_with(&format!(" [env: PSERVER_{}]", key.name.to_uppercase())), "{}: {help}", key.name);
        assert!(arg.get_help_heading().is_some(), "{} is in no group of the help: help_heading", key.name);
    }
    let shown = Line::command().render_help().to_string();
    let headings: Vec<&str> = shown.lines().filter(|line| !line.starts_with(' ') && line.ends_with(':')).collect();
    let expected = [
        "Options:",
        "Configuration:",
        "The job:",
        "Shards and processor cores:",
        "Addresses and transports:",
        "Checkpoints and saved models:",
        "Time limits:",
        "Admission of clients:",
        "CUDA devices:",
        "Logs and readiness:",
    ];
    assert_eq!(headings, expected, "{shown}");
}

#[test]
fn a_device_is_the_processor_or_a_number() {
    let check = |flags, expected| assert_eq!(load(flags, "", "").unwrap().device.processor, expected);
    check("", DeviceSetting::Auto);
    check("--device auto", DeviceSetting::Auto);
    check("--device cpu", DeviceSetting::Cpu);
    check("--device cuda:3", DeviceSetting::Cuda { ordinal: 3 });
}

#[test]
fn limits_of_device_memory_are_sizes() {
    let check = |flags, memory, gradients, least| {
        let found = load(flags, "", "").unwrap();
        assert_eq!((found.device.memory, found.device.gradients, found.device.least), (memory, gradients, least));
    };
    check("", None, None, 64 << 10);
    check("--device-memory 2GiB --device-gradients 64MiB", Some(2 << 30), Some(64 << 20), 64 << 10);
    check("--device-memory 1000000 --device-least 4KiB", Some(1_000_000), None, 4096);
    let sizes = "a size above 0, in bytes or with KiB, MiB or GiB";
    for size in ["0", "-1", "1TiB", "many", "18446744073709551615KiB"] {
        let expected = format!("WRONG device_memory (from --device-memory) is \"{size}\"; expected {sizes}");
        check_refused(&format!("--device-memory={size}"), "", "", &expected);
    }
    let expected = "WRONG device_gradients (from --device-gradients) is \"7MiB\"; expected 8388608 bytes or more: room \
                    for four chunks of each shard";
    check_refused("--device-gradients 7MiB --shards 2", "", "", expected);
}

#[test]
fn compiled_rules_are_kept_in_the_users_cache_by_default() {
    let check = |flags, environment, file, expected: Option<&str>| {
        let found = load(flags, environment, file).unwrap().device.cache;
        assert_eq!(found, expected.map(PathBuf::from), "{flags} {environment} {file}");
    };
    check("", "HOME=/h", "", Some("/h/.cache/pserver/rules"));
    check("", "HOME=/h XDG_CACHE_HOME=/c", "", Some("/c/pserver/rules"));
    check("", "", "", None);
    check("", "HOME=/h", "device_cache = \"/f\"", Some("/f"));
    check("", "HOME=/h PSERVER_DEVICE_CACHE=/e", "device_cache = \"/f\"", Some("/e"));
    check("--device-cache /a", "HOME=/h PSERVER_DEVICE_CACHE=/e", "", Some("/a"));
    check("--device-cache=", "HOME=/h", "", None);
    check("", "HOME=/h", "device_cache = \"\"", None);
    let printed = given("", "HOME=/h", "");
    let printed = Settings::print(&printed.args, &printed.environment).unwrap();
    assert!(printed.contains("device_cache = \"/h/.cache/pserver/rules\" # default\n"), "{printed}");
}

#[test]
fn every_setting_of_a_file_is_read() {
    let file = r#"
        index = 1
        servers = 3
        trainers = 8
        shards = 4
        bind = "tcp://0.0.0.0:0"
        advertise = "tcp://node1:7164"
        coordinator = "tcp://node0:7164"
        chunk_bytes = "64KiB"
        mode = "bounded"
        staleness = 4
        merge = "sum"
        nonfinite = "skip"
        checkpoint_dir = "/ckpt"
        checkpoint_interval_seconds = 30
        journal = "sync"
        model_dir = "/models"
        round_timeout_seconds = 5
        lease_seconds = 2
        rank_grace_seconds = 3
        insecure = true
        token_file = "/run/token"
        http = "10.0.0.1:9464"
        http_token_file = "/run/http"
        log_level = "debug"
        log_format = "json"
        ready_fd = 3
    "#;
    let found = load("", "", file).unwrap();
    let numbers = (
        found.index,
        found.job.servers,
        found.job.trainers,
        found.shards,
        found.job.chunk_bytes,
        found.output.ready_fd,
    );
    assert_eq!(numbers, (1, 3, 8, 4, 65536, Some(3)));
    assert_eq!(found.addresses.bind.to_string(), "tcp://0.0.0.0:0");
    assert_eq!(found.addresses.advertise.map(|address| address.to_string()).unwrap(), "tcp://node1:7164");
    assert_eq!(found.addresses.coordinator.map(|address| address.to_string()).unwrap(), "tcp://node0:7164");
    assert_eq!((found.job.mode, found.job.merge), (Mode::Staleness { bound: 4 }, Merge::Sum));
    assert_eq!(found.job.nonfinite, NonFinite::Skip);
    assert_eq!((found.storage.checkpoint_dir, found.storage.model_dir), (Some("/ckpt".into()), "/models".into()));
    assert_eq!((found.storage.journal, found.admission.insecure), (JournalSetting::Sync, true));
    assert_eq!(found.admission.token_file, Some("/run/token".into()));
    assert_eq!(found.addresses.http, "10.0.0.1:9464".parse().ok());
    assert_eq!(found.admission.http_token_file, Some("/run/http".into()));
    let times =
        [found.storage.checkpoint_interval, found.times.round_timeout, found.times.lease, found.times.rank_grace];
    assert_eq!(times, [30, 5, 2, 3].map(Duration::from_secs));
    assert_eq!((found.output.log_level, found.output.log_format), (LogLevel::Debug, LogFormat::Json));
}

#[test]
fn a_checkpoint_dir_turns_the_journal_on_by_default() {
    let check = |flags, environment, file, expected| {
        assert_eq!(load(flags, environment, file).unwrap().storage.journal, expected, "{flags} {environment} {file}");
    };
    check("", "", "", JournalSetting::Off);
    check("", "", "checkpoint_dir = \"\"", JournalSetting::Off);
    check("--checkpoint-dir a", "", "", JournalSetting::On);
    check("", "PSERVER_CHECKPOINT_DIR=a", "", JournalSetting::On);
    check("", "", "checkpoint_dir = \"a\"", JournalSetting::On);
    check("--checkpoint-dir a", "", "journal = \"off\"", JournalSetting::Off);
    check("--checkpoint-dir a --journal sync", "PSERVER_JOURNAL=off", "", JournalSetting::Sync);
    check("--journal off", "", "", JournalSetting::Off);
}

#[test]
fn times_may_be_fractions_of_a_second() {
    let found = load("--lease-seconds 0.1", "PSERVER_ROUND_TIMEOUT_SECONDS=2.25", "").unwrap();
    assert_eq!(
        (found.times.lease, found.times.round_timeout),
        (Duration::from_millis(100), Duration::from_millis(2250))
    );
    assert_eq!(load("", "", "lease_seconds = 0.5").unwrap().times.lease, Duration::from_millis(500));
    assert_eq!(load("--rank-grace-seconds 0", "", "").unwrap().times.rank_grace, Duration::ZERO);
    assert_eq!(load("", "PSERVER_RANK_GRACE_SECONDS=0.25", "").unwrap().times.rank_grace, Duration::from_millis(250));
}

#[test]
fn a_bad_value_is_refused_by_key_source_value_and_expectation() {
    let sizes = "a power of two from 4KiB to 16MiB, in bytes or with KiB or MiB";
    for size in ["2KiB", "32MiB", "65537", "1GiB", "-4096", "4294967296KiB"] {
        let expected = format!("WRONG chunk_bytes (from --chunk-bytes) is \"{size}\"; expected {sizes}");
        check_refused(&format!("--chunk-bytes={size}"), "", "", &expected);
    }
    let table = [
        ("servers = 0", "servers (from FILE) is \"0\"; expected a whole number from 1 to 4096"),
        ("servers = 1.5", "servers (from FILE) is \"1.5\"; expected a whole number from 1 to 4096"),
        ("index = -1", "index (from FILE) is \"-1\"; expected a whole number from 0 to 4095"),
        (
            "device = \"cuda\"",
            "device (from FILE) is \"cuda\"; expected auto, cpu or cuda:N with the number of a device",
        ),
        ("trainers = \"many\"", "trainers (from FILE) is \"many\"; expected a whole number from 1 to 4096"),
        ("shards = 257", "shards (from FILE) is \"257\"; expected a whole number from 1 to 256"),
        ("mode = \"Sync\"", "mode (from FILE) is \"Sync\"; expected one of sync, async, bounded, delta"),
        ("merge = \"max\"", "merge (from FILE) is \"max\"; expected one of mean, sum"),
        ("nonfinite = \"zero\"", "nonfinite (from FILE) is \"zero\"; expected one of refuse, skip, accept"),
        ("journal = \"yes\"", "journal (from FILE) is \"yes\"; expected one of off, on, sync"),
        ("model_dir = \"\"", "model_dir (from FILE) is \"\"; expected a path"),
        (
            "lease_seconds = 0.09",
            "lease_seconds (from FILE) is \"0.09\"; expected a number of seconds from 0.1 to 31622400",
        ),
        (
            "rank_grace_seconds = -1",
            "rank_grace_seconds (from FILE) is \"-1\"; expected a number of seconds from 0 to 31622400",
        ),
        (
            "round_timeout_seconds = nan",
            "round_timeout_seconds (from FILE) is \"NaN\"; expected a number of seconds from 0.1 to 31622400",
        ),
        (
            "checkpoint_interval_seconds = -1",
            "checkpoint_interval_seconds (from FILE) is \"-1\"; expected a number of seconds from 0.1 to 31622400",
        ),
        ("insecure = 1", "insecure (from FILE) is \"1\"; expected true or false"),
        (
            "log_level = \"loud\"",
            "log_level (from FILE) is \"loud\"; expected one of off, error, warn, info, debug, trace",
        ),
        ("log_format = \"xml\"", "log_format (from FILE) is \"xml\"; expected one of text, json"),
        ("ready_fd = 2", "ready_fd (from FILE) is \"2\"; expected a whole number from 3 to 65535"),
        ("advertise = \"a:0\"", "advertise (from FILE) is \"a:0\"; expected an address with a port above 0"),
    ];
    for (file, expected) in table {
        check_refused("", "", file, &format!("WRONG {expected}"));
    }
    let expected = "bind (from PSERVER_BIND) is \"node1\"; expected an address (address \"node1\": no port; ";
    assert!(load("", "PSERVER_BIND=node1", "").unwrap_err().contains(expected));
    assert!(load("--optimizer=nonsense", "", "").unwrap_err().contains("optimizer (from --optimizer) is \"nonsense\""));
}

#[test]
fn an_empty_variable_or_option_is_refused_by_name() {
    let text = |name| format!("{name} is set and empty; expected a value, or no such variable (unset {name})");
    check_refused("", "PSERVER_INDEX=", "", &text("PSERVER_INDEX"));
    check_refused("--index 1", "PSERVER_INDEX=", "", &text("PSERVER_INDEX"));
    check_refused("", "PSERVER_CHECKPOINT_DIR= PSERVER_TRAINERS=2", "", &text("PSERVER_CHECKPOINT_DIR"));
    check_refused("", "PSERVER_CONFIG=", "", &text("PSERVER_CONFIG"));
    let option = "--checkpoint-dir is empty; expected a value, or no such option";
    check_refused("--checkpoint-dir=", "", "", option);
    assert!(load("", "PSERVER_DEADLINE= OTHER= SLURM_PROCID=", "").is_ok(), "these are not a server's");
}

#[test]
fn a_long_value_is_shown_by_its_beginning() {
    let long = format!("PSERVER_OPTIMIZER={}", "x".repeat(9_000_000));
    let refusal = load("", &long, "").expect_err("it is no optimizer");
    assert!(refusal.len() < 1000 && refusal.contains("configuration of 9000000 bytes; expected at most"), "{refusal}");
}

#[test]
fn all_bad_values_are_named_at_once() {
    let expected = "WRONG servers (from --servers) is \"x\"; expected a whole number from 1 to 4096\n  \
                    merge (from PSERVER_MERGE) is \"y\"; expected one of mean, sum";
    check_refused("--servers x", "PSERVER_MERGE=y", "", expected);
}

#[test]
fn values_that_contradict_each_other_are_refused() {
    let table = [
        (
            "--index 2 --servers 2 --coordinator a:1",
            "index (from --index) is \"2\"; expected an index below servers, which is 2",
        ),
        ("--index 1 --servers 2", "coordinator (from default) is \"\"; expected the address of server 0"),
        (
            "--coordinator a:1",
            "coordinator (from --coordinator) is \"a:1\"; expected none or this server's own address, as this is \
             server 0",
        ),
        ("--staleness 3", "staleness (from --staleness) is \"3\"; expected 0, or mode bounded with it"),
        ("--mode bounded", "staleness (from default) is \"0\"; expected 1 or more with mode bounded"),
        ("--mode bounded --staleness 0", "staleness (from --staleness) is \"0\"; expected 1 or more with mode bounded"),
        (
            "--optimizer home:1",
            "optimizer (from --optimizer) is \"home:1\"; expected no home in it, which is a setting of one parameter",
        ),
        (
            "--optimizer sparse{height:9}",
            "optimizer (from --optimizer) is \"sparse{height:9}\"; expected no sparse in it, which is a setting of one \
             parameter",
        ),
        (
            "--optimizer merge:Sum",
            "optimizer (from --optimizer) is \"merge:Sum\"; expected no merge in it, or the same as the setting merge",
        ),
        ("--journal on", "journal (from --journal) is \"on\"; expected off, or a checkpoint_dir with it"),
        ("--journal sync", "journal (from --journal) is \"sync\"; expected off, or a checkpoint_dir with it"),
        (
            "--bind 10.0.0.1:7",
            "bind (from --bind) is \"10.0.0.1:7\"; expected a loopback address, a token_file, or \
             insecure = true, with which any client may join",
        ),
        (
            "--http 0.0.0.0:9464",
            "http (from --http) is \"0.0.0.0:9464\"; expected a loopback address, or an http_token_file with it",
        ),
        (
            "--bind [::]:7 --insecure",
            "advertise (from default) is \"\"; expected the address at which other hosts reach this server, as bind is \
             every address of this machine",
        ),
    ];
    for (flags, expected) in table {
        check_refused(flags, "", "", &format!("WRONG {expected}"));
    }
    assert!(load("--bind 10.0.0.1:7 --insecure", "", "").is_ok());
    assert!(load("--bind 10.0.0.1:7 --token-file t", "", "").is_ok());
}

#[test]
fn a_coordinator_address_shared_by_all_does_not_keep_server_0_from_starting() {
    for (flags, environment, file) in [
        ("", "PSERVER_COORDINATOR=node0:7164", ""),
        ("", "", "coordinator = \"node0:7164\""),
        ("--bind node0:7164 --insecure --coordinator tcp://node0:7164", "", ""),
        ("--bind 0.0.0.0:7164 --insecure --advertise node0:7164 --coordinator node0:7164", "", ""),
        ("--bind node0:7164 --insecure --coordinator node0:7164", "PSERVER_COORDINATOR=node1:7164", ""),
    ] {
        let found = load(flags, environment, file).unwrap();
        assert_eq!(found.index, 0, "{flags} {environment} {file}");
    }
    for flags in ["--coordinator node0:7164", "--bind node0:7165 --insecure --coordinator node0:7164"] {
        let expected = "the configuration is wrong:\n  coordinator (from --coordinator) is \"node0:7164\"; expected \
                        none or this server's own address, as this is server 0";
        check_refused(flags, "PSERVER_COORDINATOR=node0:7165", "", expected);
    }
}

#[test]
fn an_unknown_key_is_refused_with_the_nearest_setting() {
    check_refused(
        "",
        "",
        "trainer = 2",
        "trainer (from FILE) is no setting; the nearest is trainers; pserver serve --help lists all",
    );
    check_refused(
        "",
        "",
        "chunk-bytes = 1",
        "chunk-bytes (from FILE) is no setting; the nearest is chunk_bytes; pserver serve --help lists all",
    );
    check_refused(
        "",
        "",
        "[bnd]\nx = 1",
        "bnd (from FILE) is no setting; the nearest is bind; pserver serve --help lists all",
    );
    let error = load("", "", "bind = [\"a\", \"b\"]").unwrap_err();
    assert!(error.ends_with("expected one text, number or boolean"), "{error}");
    assert!(load("", "", "bind = ").unwrap_err().starts_with("the configuration file FILE is not TOML"));
}

#[test]
fn variables_and_settings_without_an_effect_are_warned_about_by_name() {
    let check = |flags, environment, expected: &[&str]| {
        let given = given(flags, environment, "");
        let found = Settings::load(&given.args, &given.environment).unwrap().warnings(&given.environment);
        assert_eq!(found, expected, "{flags} {environment}");
    };
    check("", "", &[]);
    check("", "PSERVER_TRAINERS=3 PSERVER_DEADLINE=3s PSERVER_REQUIRE=rdma PSERVER_TRAINRES= OTHER=1", &[]);
    let unknown = "(in the environment) is no setting and has no effect";
    check("", "PSERVER_TRAINRES=3", &[&format!("PSERVER_TRAINRES {unknown}; the nearest is PSERVER_TRAINERS")]);
    check("", "PSERVER_WHATEVER=3", &[&format!("PSERVER_WHATEVER {unknown}")]);
    let rounds = "has no effect: merging is for rounds, which only mode sync has";
    check("--mode async --merge sum", "", &[&format!("merge = sum (from --merge) {rounds}")]);
    check("--mode sync --merge sum", "", &[]);
    let delta = "has no effect: in mode delta trainers optimize, and servers add what they send";
    check("--mode delta --optimizer l2:1", "", &[&format!("optimizer = l2:1 (from --optimizer) {delta}")]);
    check(
        "",
        "PSERVER_CHECKPOINT_INTERVAL_SECONDS=3",
        &["checkpoint_interval_seconds = 3 (from PSERVER_CHECKPOINT_INTERVAL_SECONDS) has no effect: there is no \
         checkpoint_dir"],
    );
    let cpu = "has no effect: the setting device is cpu";
    check("--device cpu --device-memory 1GiB", "", &[&format!("device_memory = 1GiB (from --device-memory) {cpu}")]);
    check("--device cpu", "HOME=/h", &[]);
    let scheme =
        "has no effect: the scheme before bind's host excludes RDMA; expected host:port without one, or verbs://";
    let name = "rdma_device = mlx5_0 (from --rdma-device)";
    check("--rdma-device mlx5_0 --bind tcp://127.0.0.1:1", "", &[&format!("{name} {scheme}")]);
    check("--rdma-device mlx5_0", "", &[]);
    check("--insecure", "", &[]);
    let shown = "insecure = true (from --insecure) has no effect: every client must show the token of token_file";
    check("--insecure --token-file t", "", &[shown]);
}

#[test]
fn job_settings_that_differ_from_those_of_server_0_are_warned_about() {
    let config = ParameterConfig::of(Rule::default());
    let joined = Joined {
        job: Some(JobMessage { mode: 1, staleness: 0, merge: 0, trainers: 2, chunk_bytes: 1 << 20 }),
        default_config: config.encode(),
        first_server: Some(FirstServerMessage { lease_millis: 10_000, model_dir: "models".to_owned() }),
        ..Joined::default()
    };
    let optimizer = format!("the job's optimizer is `{}`", config.to_text());
    let check = |flags: &str, expected: &[&str]| {
        let settings = load(&format!("--index 1 --servers 2 --coordinator a:1 {flags}"), "", "").unwrap();
        let expected: Vec<String> = expected.iter().map(|one| (*one).to_owned()).collect();
        assert_eq!(settings.overruled(&joined), expected, "{flags}");
    };
    let counts = "has no effect on server 1: server 0's setting counts, and";
    check("", &[]);
    check("--trainers 2 --mode async --merge mean --chunk-bytes 1MiB", &[]);
    check("--trainers 3", &[&format!("trainers = 3 (from --trainers) {counts} the job has 2 trainers")]);
    check("--mode delta", &[&format!("mode = delta (from --mode) {counts} the job's mode is async")]);
    check("--merge sum", &[&format!("merge = sum (from --merge) {counts} the job's merge is mean")]);
    check("--optimizer l2:1", &[&format!("optimizer = l2:1 (from --optimizer) {counts} {optimizer}")]);
    check("--model-dir m", &[&format!("model_dir = m (from --model-dir) {counts} it saves models in models")]);
    check("--model-dir models --lease-seconds 10", &[]);
    check("--lease-seconds 7.5", &[&format!("lease_seconds = 7.5 (from --lease-seconds) {counts} its lease has 10 s")]);
    let [mode, staleness] = ["mode = bounded (from --mode)", "staleness = 3 (from --staleness)"]
        .map(|shown| format!("{shown} {counts} the job's mode is async"));
    check("--mode bounded --staleness 3", &[&mode, &staleness]);
}

#[test]
fn an_unresolvable_host_is_refused_without_mention_of_tokens() {
    let error = load("--bind host.invalid:7164", "", "").unwrap_err();
    let expected = "bind (from --bind) is \"host.invalid:7164\"; expected a host that this machine can resolve (";
    assert!(error.contains(expected) && !error.contains("token_file"), "{error}");
}

#[test]
fn a_missing_configuration_file_is_named() {
    let environment = [("PSERVER_CONFIG".to_owned(), "/nowhere/pserver.toml".to_owned())];
    let error = Settings::load(&ServeArgs::default(), &environment).unwrap_err().to_string();
    assert_eq!(error, "the configuration file /nowhere/pserver.toml cannot be read");
}

#[test]
fn printed_settings_name_their_sources_and_load_as_the_same_settings() {
    let flags = "--trainers 4 --model-dir=a\"\\b --lease-seconds 0.25 --checkpoint-dir c";
    let first = given(flags, "PSERVER_MODE=async", "chunk_bytes = \"64KiB\"");
    let printed = Settings::print(&first.args, &first.environment).unwrap();
    let lines: Vec<&str> = printed.lines().collect();
    for expected in [
        "index = 0 # default",
        "trainers = 4 # --trainers",
        "mode = \"async\" # PSERVER_MODE",
        "model_dir = \"a\\\"\\\\b\" # --model-dir",
        "advertise = \"\" # default",
        "lease_seconds = 0.25 # --lease-seconds",
        "journal = \"on\" # default",
        "insecure = false # default",
    ] {
        assert!(lines.contains(&expected), "{expected} is not in\n{printed}");
    }
    assert!(printed.contains(&format!("chunk_bytes = \"64KiB\" # {}", first.file.display())));
    let expected = Settings::load(&first.args, &first.environment).unwrap();
    let again = Settings { made: expected.made.clone(), ..load("", "", &printed).unwrap() };
    assert_eq!(again, expected);
}

#[test]
fn trainers_know_the_names_of_all_settings_of_servers() {
    let settings = ServeArgs::default();
    let names: Vec<&str> = settings.keys().iter().map(|key| key.name).collect();
    assert_eq!(SERVER_SETTINGS, names);
}

#[test]
fn a_server_without_settings_of_its_own_is_placed_by_its_launcher() {
    let check_bind = |flags, environment, bind: &str| {
        let found = load(flags, environment, "").unwrap();
        assert_eq!(found.addresses.bind.to_string(), bind, "{flags} {environment}");
    };
    let check = |flags, environment, expected: (u16, u16, u32, Option<&str>)| {
        let found = load(flags, environment, "").unwrap();
        let coordinator = found.addresses.coordinator.map(|address| address.to_string());
        let found = (found.index, found.job.servers, found.job.trainers, coordinator.as_deref());
        assert_eq!(found, expected, "{flags} {environment}");
    };
    let slurm = "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_JOB_NODELIST=n[01-03,7],gpu-1";
    check("--trainers 4", slurm, (0, 1, 4, None));
    check("--servers 2 --trainers 4", slurm, (1, 2, 4, Some("n01:7164")));
    check("--servers 2 --index 0", slurm, (0, 2, 1, None));
    let lite = "DMLC_ROLE=server DMLC_SERVER_ID=1 DMLC_NUM_SERVER=2 DMLC_NUM_WORKER=4 \
                DMLC_PS_ROOT_URI=127.0.0.1 DMLC_PS_ROOT_PORT=9";
    check("", lite, (1, 2, 4, Some("127.0.0.1:9")));
    check("--coordinator c:1", lite, (1, 2, 4, Some("c:1")));
    check_bind("", lite, "127.0.0.1:0");
    check_bind("--index 0", lite, "127.0.0.1:9");
    check_bind("--bind [::1]:8", lite, "[::1]:8");
    check_bind("--coordinator c:1", lite, "127.0.0.1:7164");
    check_bind("--servers 2", slurm, "127.0.0.1:7164");
    let beyond = "the configuration is wrong:\n  index (from SLURM_PROCID) is \"2\"; expected an index below servers, \
                  which is 2";
    check_refused("--servers 2 --coordinator c:1", "SLURM_PROCID=2", "", beyond);
    check_refused(
        "",
        "DMLC_ROLE=scheduler DMLC_NUM_SERVER=2",
        "",
        "DMLC_ROLE is \"scheduler\"; expected server in this process; server 0 is the scheduler too, so none is \
         started",
    );
}
