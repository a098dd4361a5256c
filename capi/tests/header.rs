//! Test of the C headers: the committed headers equal those generated from the Rust declarations. The list of exported
//! symbols, the C++ header and the Fortran module have the functions of the C headers.
//!
//! `PSERVER_HEADERS=write cargo test --package pserver-capi --test header` writes the headers.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use cbindgen::{Builder, Config};
use pserver_core::dtype::ElementType;

/// The headers, and the Rust files whose declarations each has.
const HEADERS: [(&str, &[&str]); 2] = [
    (
        "paddle_pserver.h",
        &[
            "sys", "shared", "rows", "tensors", "states", "program", "batch", "started", "memory", "edition1",
            "edition2", "edition3",
        ],
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

/// The functions that a C text declares or calls.
fn functions(text: &str) -> BTreeSet<&str> {
    let is_word = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    let before = text.match_indices('(').map(|(at, _)| &text[..at]);
    let names = before.map(|text| &text[text.trim_end_matches(is_word).len()..]);
    names.filter(|name| name.starts_with("paddle_")).collect()
}

fn read(path: &str) -> String {
    std::fs::read_to_string(package().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

#[test]
fn the_exported_symbols_are_the_functions_of_the_headers() {
    let texts = HEADERS.map(|(name, _)| read(&format!("include/{name}")));
    let declared: BTreeSet<&str> = texts.iter().flat_map(|text| functions(text)).collect();
    let list = read("symbols.txt");
    let listed: Vec<&str> = list.lines().collect();
    assert_eq!(listed, declared.into_iter().collect::<Vec<_>>(), "symbols.txt, sorted, and the headers");
}

/// Functions of edition 3 that C++ does without: paddle_init_tensor has any length, texts know their lengths, and
/// fetches fill the caller's memory.
const NOT_IN_CPP: [&str; 7] = [
    "paddle_begin_init_params_n",
    "paddle_get_params_view_as",
    "paddle_init_param",
    "paddle_init_param_n",
    "paddle_init_param_shaped",
    "paddle_parameter_release",
    "paddle_strerror",
];

#[test]
fn cpp_and_fortran_have_every_function_of_edition_3() {
    let sources = ["shared", "rows", "tensors", "states", "program", "batch", "started", "memory", "edition3"];
    let texts = sources.map(declarations);
    let (cpp, fortran) = (read("include/paddle_pserver.hpp"), read("include/paddle_pserver.f90"));
    let has = |text: &str, name: &str| {
        text.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_').any(|word| word == name)
    };
    for name in texts.iter().flat_map(|text| functions(text)) {
        assert_eq!(has(&cpp, name), !NOT_IN_CPP.contains(&name), "{name} in paddle_pserver.hpp");
        assert!(has(&fortran, name), "{name} is not in paddle_pserver.f90");
    }
}
