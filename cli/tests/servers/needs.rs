//! `pserver needs`: sizes of servers before a job runs, and from the files of one.

use std::path::Path;
use std::process::Command;

use crate::cluster::job::{Job, Local, client, folder};
use crate::cluster::training::{Tensor, begin, given};
use pserver_core::checkpoint::storage::Directory;
use pserver_core::dtype::ElementType::Float32;
use pserver_core::server::{Holdings, survey_holdings};

const ADAM: &str = "optimizer: Adam adam { } const_lr { learning_rate: 1.0 }";

fn needs(arguments: &[&str]) -> (bool, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_pserver")).arg("needs").args(arguments).output().expect("it runs");
    let words = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(words).expect("text"))
}

/// The command of the page and its output, as the page has it.
#[test]
fn the_page_has_what_the_command_prints() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/OPERATING.md");
    let page = std::fs::read_to_string(page).expect("the page");
    let (_, block) = page.split_once("    $ pserver needs ").expect("the page has the command");
    let block = block.split("\n\n").next().expect("the block ends");
    let (command, expected) = block.split_once('\n').expect("the command has output");
    let (is_well, found) = needs(&command.split_whitespace().collect::<Vec<_>>());
    assert!(is_well, "{found}");
    let expected: Vec<&str> = expected.lines().map(|line| line.strip_prefix("    ").unwrap_or(line)).collect();
    assert_eq!(found.lines().collect::<Vec<_>>(), expected);
}

/// The memory needs that are computed from the files of a job equal those of its declaration and checkpoints.
#[test]
fn needs_computes_the_memory_of_the_job_in_a_directory() {
    let folder = folder();
    let servers = Local::start(&Job::new(2, 2).with_checkpoints(folder.path()));
    let tensors = [Tensor::new("large", Float32, 3 << 20, ADAM), Tensor::new("small", Float32, 5, ADAM)];
    let ranks = [0, 1].map(|rank| client(&servers.coordinator(), rank));
    begin(&ranks[0], &tensors).expect("the tensors are initialised");
    let ones: Vec<Vec<u8>> = tensors.iter().map(|tensor| tensor.constant(1.0)).collect();
    ranks.iter().for_each(|rank| rank.push(&given(&tensors, &ones), None).expect("a gradient is taken"));
    drop(ranks);
    servers.stop();

    let found = survey_holdings(&Directory::open(folder.path()).expect("the folder")).expect("checkpoints");
    assert_eq!(found.iter().map(Vec::len).collect::<Vec<_>>(), [1, 1]);
    let mut all = Holdings::default();
    found.iter().flatten().for_each(|shard| all.extend(shard));
    let values = 4 * ((3 << 20) + 5);
    let needs_of_all = all.needs(true);
    assert_eq!((needs_of_all.values, needs_of_all.states, all.trainers()), (values, 2 * values, 2));
    for (server, shards) in found.iter().enumerate() {
        let files = std::fs::read_dir(folder.path().join(format!("server-{server}/shard-0"))).expect("the files");
        let (mut bytes, mut checkpoints) = (0, 0);
        for file in files.map(|entry| entry.expect("a file")) {
            let name = file.file_name().into_string().expect("UTF-8");
            if name.starts_with("checkpoint-") {
                bytes += file.metadata().expect("its length").len();
                checkpoints += u64::from(name.ends_with(".json"));
            }
        }
        let bytes = bytes / checkpoints;
        let (least, most) = (bytes, bytes + bytes / 10 + 4096);
        let estimate = shards[0].needs(true).checkpoint;
        assert!((least..most).contains(&(estimate + 4096)), "{estimate} bytes are estimated, a checkpoint has {bytes}");
    }

    let (is_well, text) = needs(&[folder.path().to_str().expect("UTF-8")]);
    assert!(
        is_well && text.starts_with("2 servers with 1 shards each, 2 trainers, the rules of the checkpoint"),
        "{text}"
    );
    let (is_well, text) = needs(&[folder.path().to_str().expect("UTF-8"), "--servers", "1", "--trainers", "8"]);
    assert!(is_well && text.starts_with("1 servers with 1 shards each, 8 trainers"), "{text}");
    assert!(text.contains("a gradient of each trainer 96.0 MiB"), "{text}");

    std::fs::remove_dir_all(folder.path().join("server-1")).expect("the files of a server");
    let (is_well, text) = needs(&[folder.path().to_str().expect("UTF-8")]);
    assert!(
        !is_well && text.contains("\"server-1/shard-0\" has no checkpoint; expected one of each shard of 2 servers"),
        "{text}"
    );
}

#[test]
fn needs_refuses_arguments_without_a_job() {
    let folder = folder();
    let path = folder.path().to_str().expect("UTF-8");
    for (arguments, expected) in [
        (vec![], "required"),
        (vec![path], "no shard has a checkpoint"),
        (vec!["--elements", "0"], "expected a whole number above 0"),
        (vec!["--elements", "1e6", "--optimizer", "adams"], "found neither a configuration"),
        (vec![path, "--elements", "1e6"], "cannot be used with"),
        (vec![path, "--optimizer", "adam"], "cannot be used with"),
        (vec!["--elements", "1e6", "--trainers", "0"], "0 is not in 1..=4096"),
    ] {
        let (is_well, text) = needs(&arguments);
        assert!(!is_well && text.contains(expected), "{arguments:?}: {text}");
    }
}
