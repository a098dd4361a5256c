use super::*;

/// A rule, a path, a text, and the lines on which the rule must refuse it.
type Example = (&'static str, &'static str, &'static str, &'static [usize]);

const FLOORS: &[Example] = &[
    ("floors", "core/src/wire/frame.rs", "use crate::{ids::PeerId, limits};\nuse super::header;", &[]),
    ("floors", "core/src/ids.rs", "// crate::memory\nlet text = \"crate::memory::Lease\";", &[]),
    ("floors", "core/src/client/lane.rs", "use crate::server::Session;\nuse crate::memory::Lease;", &[]),
    ("floors", "core/src/ids.rs", "use crate::memory::Lease;", &[1]),
    ("floors", "core/src/wire/frame.rs", "use crate::{\n    ids::PeerId,\n    memory::{Arena, Lease},\n};", &[3, 3]),
    ("floors", "core/src/port/mod.rs", "fn f() {\n    crate::server::run();\n}", &[2]),
    ("floors", "core/src/ids.rs", "use super::memory::Lease;", &[1]),
    ("floors", "core/src/ids.rs", "mod inner {\n    use super::memory;\n    use super::super::memory::Lease;\n}", &[3]),
    ("floors", "core/src/cellar.rs", "", &[1]),
    ("floors", "core/src/server/mod.rs", "use pserver_transport::Tcp;", &[1]),
    ("floors", "core/tests/rounds.rs", "use pserver_core::server;", &[]),
    ("floors", "transport/src/network.rs", "use pserver_core::port::Transport;\nuse crate::shm;", &[]),
    ("floors", "transport/src/network.rs", "use pserver_kernels::cpu;", &[1]),
    ("floors", "kernels/src/cpu.rs", "use pserver_transport as wire;\nuse pserver_transport::network;", &[2]),
    ("floors", "kernels/src/cpu.rs", "paddle_pserver::client();", &[1]),
    ("floors", "capi/src/main.rs", "use pserver_kernels::cpu;\nuse pserver_core::server;", &[]),
    ("floors", "ci/src/main.rs", "use crate::tidy;\nuse pserver_core::ids::PeerId;", &[2]),
    ("floors", "attic/src/lib.rs", "", &[1]),
];

const REACH: &[Example] = &[
    ("purity", "core/src/server/mod.rs", "use std::time::Duration;\nuse crate::time::Now;", &[]),
    ("purity", "transport/src/network.rs", "use std::{net::TcpStream, time::Instant};", &[]),
    ("purity", "core/src/server/mod.rs", "use std::time::{Duration, Instant};\nstd::time::SystemTime::now();", &[1, 2]),
    ("purity", "core/src/server/mod.rs", "use std::time;\nlet now = time::Instant::now();", &[2]),
    ("purity", "core/src/server/mod.rs", "use std::time::*;", &[1]),
    ("purity", "core/src/server/mod.rs", "use std::{net, thread::{self}};\nstd::process::exit(1);", &[1, 1, 2]),
    ("purity", "core/src/memory/loan.rs", "std::process::abort()", &[]),
    ("purity", "core/src/server/mod.rs", "std::process::abort()", &[1]),
    ("purity", "core/src/memory/loan.rs", "std::process::exit(1)", &[1]),
    ("purity", "core/src/checkpoint/storage.rs", "use std::fs::File;\nuse cap_std::fs::Dir;", &[]),
    ("purity", "core/src/checkpoint/storage/door.rs", "use std::fs::File;", &[]),
    ("purity", "core/src/checkpoint/manifest.rs", "use std::fs::File;\nuse cap_std::fs::Dir;", &[1, 2]),
    ("purity", "core/src/server/mod.rs", "#[cfg(test)]\nmod tests {\n    use std::thread;\n}", &[]),
    ("purity", "core/src/server/tests.rs", "use std::thread;\nuse std::time::Instant;", &[2]),
    ("purity", "core/src/server/mod.rs", "#[cfg(test)]\nmod tests {}\nuse std::thread;", &[3]),
    ("environment", "capi/src/main.rs", "std::env::var(\"A\")", &[]),
    ("environment", "kernels/build.rs", "std::env::var(\"OUT_DIR\")", &[]),
    ("environment", "transport/src/conformance.rs", "std::env::var_os(\"PSERVER_REQUIRE\")", &[]),
    ("environment", "transport/src/network.rs", "env!(\"CARGO_PKG_VERSION\")", &[]),
    ("environment", "transport/src/network.rs", "let a = 1;\nstd::env::var(\"A\")", &[2]),
    ("environment", "core/src/config/mod.rs", "use std::env;", &[1]),
    ("unsafe", "capi/src/sys.rs", "// SAFETY: a fact.\nlet a =\n    unsafe { b() };", &[]),
    ("unsafe", "core/src/memory/loan.rs", "// SAFETY: a fact\n// of two lines.\nunsafe impl Send for A {}", &[]),
    ("unsafe", "core/src/memory/loan.rs", "#![deny(unsafe_op_in_unsafe_fn)]\n// unsafe {}", &[]),
    ("unsafe", "core/src/memory/loan.rs", "// A fact.\nunsafe { b() }", &[2]),
    ("unsafe", "core/src/memory/loan.rs", "// SAFETY: a fact.\nunsafe { b() }\nunsafe { c() }", &[3]),
    ("unsafe", "core/src/memory/loan.rs", "// SAFETY: of another statement.\na();\nunsafe { b() }", &[3]),
    ("unsafe", "core/src/memory_map.rs", "// SAFETY: a fact.\nunsafe { b() }", &[2]),
    ("unsafe", "transport/src/network.rs", "// SAFETY: a fact.\nunsafe { b() }", &[2]),
];

const SHAPE: &[Example] = &[
    ("layout", "core/src/a.rs", "fn a() {}\n\nconst B: &str = \"\\t\";\n", &[]),
    ("layout", "core/src/a.rs", "fn a() {} \n\tb();\nc();\n", &[1, 2]),
    ("names", "core/src/client/retry.rs", "mod commonplace;", &[]),
    ("names", "core/src/client/helpers.rs", "", &[1]),
    ("names", "core/src/utils/mod.rs", "", &[1]),
    ("names", "capi/src/signal_handler.rs", "", &[1]),
    ("names", "core/src/a.rs", "mod b;\nmod common {}", &[2]),
    ("ignored-test", "core/src/a.rs", "#[test]\nfn ignore() {}\n/// ```compile_fail\n/// #[ignore]", &[]),
    ("ignored-test", "core/src/a.rs", "#[test]\n#[ignore = \"slow\"]\nfn a() {}", &[2]),
    ("ignored-test", "core/src/a.rs", "#[cfg_attr(miri, ignore)]\nfn a() {}", &[1]),
    ("ignored-test", "core/src/a.rs", "/// ```rust,ignore\n/// a();\n/// ```", &[1]),
    ("unfinished", "core/src/a.rs", "// todo!()\nlet todo = 1;\nif todo != 2 {}", &[]),
    ("unfinished", "core/src/a.rs", "todo!()\nunimplemented!(\"later\")\nlet a = dbg!(b);", &[1, 2, 3]),
    ("sleeping-test", "transport/src/network.rs", "fn back_off() { std::thread::sleep(a) }", &[]),
    ("sleeping-test", "core/tests/a.rs", "// tidy: allow sleep: the child shows no event\nstd::thread::sleep(a);", &[]),
    ("sleeping-test", "core/tests/a.rs", "std::thread::sleep(a); // tidy: allow sleep: no event", &[]),
    ("sleeping-test", "core/tests/a.rs", "// tidy: allow sleep:\nthread::sleep(a);", &[2]),
    ("sleeping-test", "core/src/a.rs", "#[test]\nfn a() {\n    thread::sleep(b);\n}", &[3]),
];

const MANIFEST: &[Example] = &[
    (
        "manifest",
        "core/fuzz/Cargo.toml",
        "[workspace]\n[dependencies]\na = \"=1.2.3\"\nb = \"1\"\npserver-core = { path = \"..\" }\n[profile.a]\nb = 1",
        &[4],
    ),
    ("manifest", "Cargo.toml", "[workspace]\nmembers = [\"core\", \"ci\"]\n", &[]),
    ("manifest", "Cargo.toml", "[workspace]\nmembers = [\"core\", \"attic\"]\n", &[1]),
    (
        "manifest",
        "capi/Cargo.toml",
        "[lints]\nworkspace = true\n[dependencies]\nclap.workspace = true\npserver-core = { workspace = true }\n",
        &[],
    ),
    ("manifest", "core/Cargo.toml", "[dependencies]\nhalf.workspace = true\n", &[1]),
    ("manifest", "core/Cargo.toml", "[lints]\nworkspace = true\n[dev-dependencies]\nhalf = \"2\"\n", &[4]),
    ("manifest", "core/Cargo.toml", "[lints]\nworkspace = true\n[dependencies.half]\nworkspace = true\n", &[3]),
    (
        "manifest",
        "transport/Cargo.toml",
        "[lints]\nworkspace = true\n[dependencies]\npserver-core.workspace = true\npserver-kernels.workspace = true\n",
        &[5],
    ),
];

fn check(name: &str, path: &str, text: &str, expected: &[usize]) {
    let rules = RULES.iter().filter(|rule| rule.name == name);
    let file = SourceFile::new(path, text);
    let mut findings = Vec::new();
    for rule in rules {
        (rule.look)(&file, &mut Report { path, rule: rule.name, findings: &mut findings });
    }
    let lines: Vec<_> = findings.iter().filter(|finding| !finding.excused).map(|finding| finding.line).collect();
    assert_eq!(lines, expected, "{name} on {path}:\n{text}\nfound {findings:#?}");
}

fn check_all(examples: &[Example]) {
    for (rule, path, text, expected) in examples {
        check(rule, path, text, expected);
    }
}

#[test]
fn a_module_imports_only_floors_beneath_it() {
    check_all(FLOORS);
}

#[test]
fn the_world_is_reached_only_through_its_doors() {
    check_all(REACH);
}

#[test]
fn what_has_no_place_in_a_finished_source_is_refused() {
    check_all(SHAPE);
}

#[test]
fn a_package_inherits_lints_and_versions() {
    check_all(MANIFEST);
}

#[test]
fn a_function_of_71_lines_is_refused() {
    let function = |lines: usize, body: &str| format!("\nfn long(a: [u8; 2])\n{{{}}}\n", body.repeat(lines - 1));
    check("function-length", "core/src/a.rs", &function(70, "a();\n"), &[]);
    check("function-length", "core/src/a.rs", &function(71, "a();\n"), &[2]);
    check("function-length", "core/tests/a.rs", &function(71, "// }\n"), &[2]);
    check("function-length", "core/src/a.rs", &function(71, "let a = (\"}\", '}', b'\\'', r#\"\"}\"#);\n"), &[2]);
    check("function-length", "core/src/a.rs", &format!("fn a();\nconst A: fn(u8) = b;{}", function(70, "\n")), &[]);
}

#[test]
fn a_line_of_121_columns_is_refused() {
    check("layout", "core/src/a.rs", &"ä".repeat(120), &[]);
    check("layout", "core/src/a.rs", &"ä".repeat(121), &[1]);
}

#[test]
fn only_what_a_program_wrote_may_look_as_it_likes() {
    let long = format!("unsafe fn a()\n{{{}unsafe {{ b() }} }}", "// ä\n".repeat(100) + &"c(); ".repeat(30));
    let (generated, written) = (format!("// @generated by a program\n{long}"), format!("// by hand\n{long}"));
    for rule in ["unsafe", "function-length", "layout"] {
        check(rule, "transport/src/verbs/sys/bindings.rs", &generated, &[]);
    }
    // Neither the name alone nor the line alone is enough, and the doors are for everybody.
    for (path, text) in
        [("transport/src/verbs/sys/bindings.rs", &written), ("transport/src/verbs/sys/mod.rs", &generated)]
    {
        check("unsafe", path, text, &[103]);
        check("function-length", path, text, &[2]);
        check("layout", path, text, &[103]);
    }
    check("unsafe", "transport/src/network/bindings.rs", &generated, &[2, 103]);
}

#[test]
fn a_line_of_prose_of_121_columns_is_wrapped() {
    let line = |columns: usize| format!("{} ä", "ä".repeat(columns - 2));
    check("prose", "docs/WIRE.md", &line(120), &[]);
    check("prose", "docs/WIRE.md", &format!("a\n\n- {}\n", line(120)), &[3]);
    check("prose", "README.md", &line(121), &[1]);
    check("prose", "core/src/a.rs", &line(121), &[]);
    check("prose", "docs/WIRE.md", &format!("| a |\n| --- |\n| {} |", line(121)), &[]);
    check("prose", "docs/WIRE.md", &format!("    {}", line(121)), &[]);
    check("prose", "docs/WIRE.md", &format!("```\n{0}\n```\n{0}", line(121)), &[4]);
    check("prose", "docs/WIRE.md", &"ä".repeat(121), &[]);
}

#[test]
fn literals_and_comments_are_not_code() {
    let part = |text: &str| lexer::part(text).code;
    assert_eq!(part("a /* b /* c */ d */ e"), "a                   e");
    assert_eq!(part("f('\"', \"\\\"g\") // h"), "f(\"  , \"    )     ");
    assert_eq!(part("br##\"a\"#b\"##c r#fn"), "\"           c r#fn");
    assert_eq!(part("x: &'a str, '\\u{7d}'"), "x: &\"  str, \"       ");
}

#[test]
fn an_excused_sleep_is_counted() {
    let file = SourceFile::new("core/tests/a.rs", "thread::sleep(a); // tidy: allow sleep: no event");
    let findings = inspect(&[file], RULES);
    assert_eq!(findings.iter().map(|finding| finding.excused).collect::<Vec<_>>(), [true]);
    assert_eq!(findings[0].to_string(), "core/tests/a.rs:1: sleeping-test: no event");
}

#[test]
fn every_rule_has_an_example_that_passes_and_one_that_fails() {
    let examples = [FLOORS, REACH, SHAPE, MANIFEST].concat();
    // Lengths are shown with texts that are made, above.
    for rule in RULES.iter().filter(|rule| !matches!(rule.name, "function-length" | "prose")) {
        let mut own = examples.iter().filter(|(name, ..)| *name == rule.name).map(|(.., lines)| lines.is_empty());
        assert!(own.clone().any(|passes| passes) && own.any(|passes| !passes), "{} lacks an example", rule.name);
    }
}

#[test]
fn the_workspace_is_tidy() {
    let files = read(Workspace::of_this_program().root()).unwrap();
    assert!(files.iter().any(|file| file.path == "ci/src/tidy/tests.rs"), "the sources were not found");
    let findings = inspect(&files, RULES).into_iter().filter(|finding| !finding.excused);
    let lines: Vec<_> = findings.map(|finding| finding.to_string()).collect();
    assert!(lines.is_empty(), "{}", lines.join("\n"));
}
