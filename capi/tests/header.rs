//! The C headers: made from the Rust declarations, checked in, compared.
//!
//! `PSERVER_HEADERS=write cargo test --package pserver-capi --test header` writes them.

use std::path::{Path, PathBuf};

use cbindgen::{Builder, Config};
use pserver_core::dtype::ElementType;

/// The headers, and the Rust files whose declarations each has.
const HEADERS: [(&str, &[&str]); 2] = [
    (
        "paddle_pserver.h",
        &["sys", "shared", "rows", "program", "batch", "started", "memory", "edition1", "edition2", "edition3"],
    ),
    ("libpaddle_pserver_cclient.h", &["go"]),
];

fn package() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The text of a header: its template with the declarations in it.
fn header(name: &str, sources: &[&str]) -> String {
    let template = package().join("include").join(format!("{name}.in"));
    let mut text = std::fs::read_to_string(template).expect("the template is there");
    for source in sources {
        text = text.replace(&format!("@{source}@"), declarations(source).trim());
    }
    let last = ElementType::ALL.len() - 1;
    let types = |line: &dyn Fn(usize, String, u8) -> String| {
        let one = |(index, each): (usize, &ElementType)| line(index, each.name().to_uppercase(), each.number());
        ElementType::ALL.iter().enumerate().map(one).collect::<Vec<_>>().join("\n")
    };
    let comma = |index| if index == last { "" } else { "," };
    let enumerators = types(&|index, name, number| format!("  PADDLE_ELEMENT_TYPE_{name} = {number}{}", comma(index)));
    let defines = types(&|_, name, number| format!("#define PADDLE_ELEMENT_TYPE_{name} {number}"));
    text.replace("@enumerators@", &enumerators).replace("@defines@", &defines)
}

/// The C declarations of one Rust file.
fn declarations(source: &str) -> String {
    let config = Config::from_file(package().join("cbindgen.toml")).expect("cbindgen.toml is right");
    let file = package().join("src/api").join(format!("{source}.rs"));
    let bindings = Builder::new().with_config(config).with_src(file).generate().expect("the declarations are C's");
    let mut text = Vec::new();
    bindings.write(&mut text);
    String::from_utf8(text).expect("a header is UTF-8")
}

/// Compares a header with the one checked in, or writes it.
fn check(path: &Path, text: &str) {
    if std::env::var_os("PSERVER_HEADERS").is_some_and(|wish| wish == "write") {
        std::fs::write(path, text).expect("the header can be written");
    }
    let found = std::fs::read_to_string(path).unwrap_or_default();
    let differs = found.lines().zip(text.lines()).position(|(found, expected)| found != expected);
    let line = differs.unwrap_or(found.lines().count().min(text.lines().count())) + 1;
    assert!(
        found == text,
        "{} differs from the Rust code at line {line}; PSERVER_HEADERS=write writes it",
        path.display()
    );
}

#[test]
fn the_headers_are_those_of_the_code() {
    for (name, sources) in HEADERS {
        let text = header(name, sources);
        assert!(!text.contains('@') || !text.lines().any(|line| line.starts_with('@')), "{name}: a place is left over");
        check(&package().join("include").join(name), &text);
    }
}
