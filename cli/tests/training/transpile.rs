//! `pserver transpile` as a user runs it: its output equals the committed pictures and texts, and its refusals.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Set to write the committed files anew.
const WRITE: &str = "PSERVER_WRITE_DOCS";

fn documents() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/programs")
}

fn transpile(folder: &Path, arguments: &[&str]) -> Result<String, String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pserver"));
    let output = command.current_dir(folder).arg("transpile").args(arguments).output().expect("the program starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("it prints UTF-8");
    if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
}

#[test]
fn the_pages_show_the_printed_programs() {
    let divided = ["example.program", "--trainers", "2", "--servers", "1"];
    let columns = ["example.program", "--trainers", "2", "--strategy", "columns"];
    let whole = ["example.program", "--strategy", "whole"];
    let documents_of = [("before", whole.as_slice()), ("after", &divided), ("columns", &columns)];
    for (name, arguments) in documents_of {
        for (kind, option) in [("txt", None), ("dot", Some("--dot")), ("svg", Some("--svg"))] {
            let arguments: Vec<&str> = arguments.iter().copied().chain(option).collect();
            let printed = transpile(&documents(), &arguments).expect("the example can be divided");
            let path = documents().join(format!("example-{name}.{kind}"));
            if std::env::var_os(WRITE).is_some() {
                std::fs::write(&path, &printed).expect("the documents can be written");
            }
            let committed = std::fs::read_to_string(&path).expect("the document is there");
            assert!(committed == printed, "{} is not what is printed; {WRITE}=1 writes it", path.display());
        }
    }
}

#[test]
fn a_forward_part_is_divided_with_the_optimizer_that_is_given() {
    let optimizer = "const_lr { learning_rate: 0.2 }";
    let printed = transpile(&documents(), &["mlp.program", "--optimizer", optimizer]).expect("it can be divided");
    assert!(printed.contains("# server:0\n"), "{printed}");
    assert!(printed.contains("= update(") && printed.contains("learning_rate: 0.2"), "{printed}");
    let refused = transpile(&documents(), &["mlp.program"]).expect_err("servers would have nothing to do");
    assert!(refused.contains("mlp.program: found no optimizer and no op of the role optimize"), "{refused}");
    let twice = transpile(&documents(), &["example.program", "--optimizer", optimizer]).expect_err("it has one");
    assert!(
        twice.contains("found an optimizer beside a program that has ops of the roles backward and optimize"),
        "{twice}"
    );
    let unknown = ["mlp.program", "--optimizer", optimizer, "--loss", "losss"];
    let refused = transpile(&documents(), &unknown).expect_err("there is no such variable");
    assert!(refused.contains("\"losss\""), "{refused}");
}

#[test]
fn a_printed_program_is_parsed_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let printed = transpile(&documents(), &["example.program", "--strategy", "whole"]).expect("it is printed");
    std::fs::write(folder.path().join("again.program"), &printed).expect("a file");
    assert_eq!(transpile(folder.path(), &["again.program", "--strategy", "whole"]), Ok(printed));
}

#[test]
fn a_page_is_written_to_a_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let program = documents().join("example.program");
    let program = program.to_str().expect("a path of UTF-8");
    let printed = transpile(folder.path(), &[program, "--html", "picture.html"]);
    assert_eq!(printed, Ok(String::new()));
    let page = std::fs::read_to_string(folder.path().join("picture.html")).expect("the page is there");
    assert!(page.starts_with("<!DOCTYPE html>") && page.contains("<svg "));
    let refused = transpile(folder.path(), &[program, "--html", "nowhere/picture.html"]).expect_err("no such folder");
    assert!(refused.contains("nowhere/picture.html"), "{refused}");
}

#[test]
fn costs_are_a_table_of_all_processes() {
    let arguments = ["example.program", "--trainers", "4", "--servers", "2", "--costs"];
    let table = transpile(&documents(), &arguments).expect("it is printed");
    let rows: Vec<&str> = table.lines().filter_map(|line| line.split_whitespace().next()).collect();
    let peers = ["trainer:0", "trainer:1", "trainer:2", "trainer:3", "server:0", "server:1"];
    assert_eq!(rows, [&["process"], peers.as_slice(), &["step"]].concat());
}

#[test]
fn the_way_of_each_part_is_explained() {
    let folder = tempfile::tempdir().expect("a folder");
    let explained = |program: &str| {
        std::fs::write(folder.path().join("net.program"), program).expect("a file");
        transpile(folder.path(), &["net.program", "--trainers", "2", "--explain"]).expect("it is explained")
    };
    let example = std::fs::read_to_string(documents().join("example.program")).expect("the example is there");
    assert_eq!(explained(&example), "server:0  w  flow: rounds\n");
    let line = example.lines().find(|line| line.contains("optimize w, w@count")).expect("it has an update");
    let descent = "optimize move = scale(w@gradient, factor=-0.1)\n optimize w = add(w, move)";
    assert_eq!(explained(&example.replace(line, descent)), "server:0  w  flow: rounds\n");
    let weighted = format!("optimize weighted = softmax(w)\n{descent}").replace("w@gradient", "weighted");
    let weighted = weighted.replace("softmax(w)", "softmax(w@gradient)");
    let found = explained(&example.replace(line, &weighted));
    let expected =
        "server:0  w@program  executor: server 0: block 1, op 4 softmax: found softmax, which has no form in";
    assert!(found.starts_with(expected), "{found}");
}

#[test]
fn a_placement_is_printed_changed_and_given_again() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::copy(documents().join("mlp.program"), folder.path().join("net.program")).expect("a file");
    let run = |optimizer: &str, more: &[&str]| {
        let all = ["net.program", "--servers", "2", "--optimizer", optimizer];
        transpile(folder.path(), &[&all[..], more].concat())
    };
    let descent = "const_lr { learning_rate: 0.1 }";
    let printed = run(descent, &["--placed", "--balance", "memory"]).expect("it is printed");
    assert!(printed.contains("layer1/weight "), "{printed}");
    let changed: String =
        printed.lines().map(|line| format!("{} 1\n", line.split(' ').next().expect("a name"))).collect();
    std::fs::write(folder.path().join("placed.txt"), &changed).expect("a file");
    assert_eq!(run(descent, &["--placed", "--placement", "placed.txt"]).expect("it is printed"), changed);
    let explained = run(descent, &["--explain", "--placement", "placed.txt"]).expect("it is explained");
    assert!(explained.starts_with("server:1  layer1/weight  flow: rounds\n") && !explained.contains("server:0"));
    let refused = run(descent, &["--placement", "placed.txt", "--balance", "time"]).expect_err("one of them");
    assert!(refused.contains("cannot be used with"), "{refused}");
    let refused = run(descent, &["--placement", "no.txt"]).expect_err("there is none");
    assert!(refused.contains("--placement no.txt"), "{refused}");
    let explained = run(&format!("{descent} clip_norm: 1"), &["--explain"]).expect("it is explained");
    assert!(explained.contains("\nlayer1/bias  on one server: block 0, op 27 update is not element-wise\n"));
}

#[test]
fn refusals_name_the_file_and_the_place() {
    let folder = tempfile::tempdir().expect("a folder");
    let check = |text: &str, arguments: &[&str], expected: &str| {
        std::fs::write(folder.path().join("bad.program"), text).expect("a file");
        let arguments: Vec<&str> = std::iter::once("bad.program").chain(arguments.iter().copied()).collect();
        let said = transpile(folder.path(), &arguments).expect_err("this is refused");
        assert!(said.contains(expected), "{said}\nexpected: {expected}");
    };
    check("block 0 {\n    forward y = relu(x\n}", &[], "bad.program:3:1: found '}'");
    check("block 0 { forward y = relu(x) }", &[], "bad.program:1:11: block 0, op 0 relu: ");
    let example = std::fs::read_to_string(documents().join("example.program")).expect("the example is there");
    check(&example, &["--trainers", "0"], "0 trainers; expected 1 to 4096");
    let uninitialised = example.replace("    initialise w = uniform(low=-0.3, high=0.3, seed=7)\n", "");
    let expected = "bad.program:5:5: block 0, variable \"w\": found no initialise op that writes it";
    check(&uninitialised, &[], expected);
    check(
        &example.replace("optimize w, w@count", "optimize w@count, w"),
        &[],
        "bad.program:18:5: block 0, op 9 update: ",
    );
    let is_read_late = "forward twice = scale(w, factor=2.0)\n}";
    let is_read_late = example.trim_end().trim_end_matches('}').to_owned() + is_read_late;
    check(&is_read_late, &[], "bad.program:19:1: block 0, op 10 scale: found \"w\" read after its update");
    check(&example, &["--batch", "0"], "batch is 0; expected 1 or more");
    check(&example, &["--strategy", "columns", "--trainers", "2", "--servers", "0"], "0 servers for queues");
    check(&example, &["--async", "--staleness", "2"], "cannot be used with");
    check(&example, &["--staleness", "0"], "'0' for '--staleness <STEPS>': 0 is not in 1..");
}
