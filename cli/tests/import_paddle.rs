//! `pserver import-paddle` as its users meet it: what it prints is what `pserver transpile` divides.

use std::path::Path;
use std::process::{Command, Output};

fn pserver(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pserver")).args(arguments).output().expect("the program starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("it prints UTF-8")
}

fn data(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../program/tests/paddle").join(name);
    path.to_str().expect("a path in UTF-8").to_owned()
}

#[test]
fn an_imported_program_can_be_divided() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("program.txt");
    let file = file.to_str().expect("a path in UTF-8");
    for name in ["fc_sgd", "wide_deep"] {
        let [main, startup] = ["main", "startup"].map(|part| data(&format!("{name}.{part}.pb")));
        let printed = pserver(&["import-paddle", &main, &startup]);
        assert!(printed.status.success(), "{}", text(&printed.stderr));
        assert!(text(&printed.stderr).contains("dropped: "), "{}", text(&printed.stderr));
        let written = pserver(&["import-paddle", &main, &startup, "-o", file]);
        assert_eq!((written.status.success(), text(&written.stdout)), (true, String::new()));
        assert_eq!(std::fs::read_to_string(file).expect("it is written"), text(&printed.stdout));
        let divided = pserver(&["transpile", file, "--trainers", "2", "--servers", "2"]);
        assert!(divided.status.success(), "{}", text(&divided.stderr));
    }
}

#[test]
fn refusals_name_the_file_and_nothing_is_printed() {
    let [main, startup] = ["embedding_lazy_adam.main.pb", "embedding_lazy_adam.startup.pb"].map(data);
    let check = |main: &str, startup: &str, expected: &str| {
        let output = pserver(&["import-paddle", main, startup]);
        assert_eq!((output.status.success(), text(&output.stdout)), (false, String::new()));
        assert!(text(&output.stderr).contains(expected), "{}\nexpected: {expected}", text(&output.stderr));
    };
    check(&main, &startup, "embedding_lazy_adam.main.pb: main program, block 0, op 13 adam: found lazy_mode true");
    check(&data("make.py"), &startup, "make.py: the main program is no ProgramDesc");
    check(&data("none.pb"), &startup, "none.pb: ");
}
