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
    ("floors", "kernels/src/cpu.rs", "pserver_client::connect();", &[1]),
    ("floors", "program/src/graph.rs", "use pserver_core::rows;\nuse pserver_kernels::cpu;", &[2]),
    ("floors", "core/src/server/shard.rs", "use pserver_program::Graph;", &[1]),
    ("floors", "capi/src/main.rs", "use pserver_kernels::cpu;\nuse pserver_core::server;", &[]),
    ("floors", "ci/src/main.rs", "use crate::tidy;\nuse pserver_core::ids::PeerId;", &[2]),
    ("floors", "attic/src/lib.rs", "", &[1]),
];

const REACH: &[Example] = &[
    ("purity", "core/src/server/mod.rs", "use std::time::Duration;\nuse crate::time::Now;", &[]),
    ("purity", "program/src/executor/run.rs", "use std::time::Instant;", &[1]),
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
    ("output", "cli/src/a.rs", "console::print(a)?;\n// println!()\nlet a = \"print!()\";", &[]),
    ("output", "cli/src/a.rs", "print!(\"a\");\nstd::eprintln!();\ndbg!(a);", &[1, 2, 3]),
    ("output", "cli/tests/a.rs", "println!(\"a\");", &[]),
    ("output", "kernels/build.rs", "println!(\"cargo::rerun-if-changed=a\");", &[]),
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

const LANGUAGE: &[Example] = &[
    ("sentences", "core/src/a.rs", "/// The server, and\n/// What it sends. Which one? Who knows?\nfn a() {}", &[]),
    ("sentences", "core/src/a.rs", "let text = \"Who\"; // Whosoever", &[]),
    (
        "sentences",
        "core/src/a.rs",
        "/// Whoever\n/// is late waits.\nfn a() {} // Who waits.\n// A fact. What waits.",
        &[1, 3, 4],
    ),
    ("sentences", "core/src/a.rs", "/// ```\n/// What\n/// ```\n/// A fact, see [1.\n/// Whose it is].", &[5]),
    ("sentences", "docs/A.md", "# Names\n\nThe server, for\nWho\n\n| What |\n\n    What is code\n\nWhat is it?", &[]),
    ("sentences", "docs/A.md", "# What it is\n\n- Who waits.\n\nA fact (a). Whose\nit is.", &[1, 3, 5]),
    ("old-names", "core/src/prng.rs", "", &[]),
    ("old-names", "transport/src/luck.rs", "", &[]),
    ("old-names", "core/src/luck.rs", "", &[1]),
    ("old-names", "bench/src/straight/mod.rs", "", &[1]),
    ("fields", "core/src/a.rs", TWELVE_FIELDS, &[]),
    ("fields", "core/src/a.rs", THIRTEEN_FIELDS, &[2]),
    ("fields", "core/src/a.rs", EXCUSED_FIELDS, &[]),
    ("fields", "core/tests/a.rs", THIRTEEN_FIELDS, &[]),
    ("parameters", "core/src/a.rs", "fn a(&self, a: [u8; 2], b: B<C, D>, c: fn(a: u8), d: (u8, u8), e: u8) {}", &[]),
    ("parameters", "core/src/a.rs", "fn a<T: B>(\n    a: T, b: T, c: T, d: T, e: T, f: T,\n);", &[1]),
    ("parameters", "core/src/a.rs", "// tidy: allow parameters:\nfn a(a: T, b: T, c: T, d: T, e: T, f: T) {}", &[2]),
    (
        "parameters",
        "core/src/a.rs",
        "// tidy: allow parameters: C\n#[b]\nfn a(a: T, b: T, c: T, d: T, e: T, f: T);",
        &[],
    ),
];

const TWELVE_FIELDS: &str =
    "struct A<T: B> { a: T, b: T, c: T, d: T, e: T, f: T, g: T, h: T, i: T, j: T, k: T, l: b::T }";
const THIRTEEN_FIELDS: &str =
    "\nstruct A { a: T, b: T, c: T, d: T, e: T, f: T, g: T, h: T, i: T, j: T, k: T, l: T, m: fn(a: u8) }";
const EXCUSED_FIELDS: &str = "// tidy: allow fields: the header.\n/// A fact.\nstruct A { a: T, b: T, c: T, d: T, \
                              e: T, f: T, g: T, h: T, i: T, j: T, k: T, l: T, m: T }";

fn check(name: &str, path: &str, text: &str, expected: &[usize]) {
    let rules = RULES.iter().filter(|rule| rule.name == name);
    let file = SourceFile::new(path, text);
    let mut findings = Vec::new();
    for rule in rules {
        (rule.look)(&file, &mut Report { path, rule: rule.name, findings: &mut findings });
    }
    let lines: Vec<_> =
        findings.iter().filter(|finding| finding.standing != Standing::Excused).map(|finding| finding.line).collect();
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
fn unfinished_code_is_refused() {
    check_all(SHAPE);
}

#[test]
fn a_package_inherits_lints_and_versions() {
    check_all(MANIFEST);
}

#[test]
fn a_sentence_names_its_subject_and_a_type_is_small() {
    check_all(LANGUAGE);
}

#[test]
fn a_name_is_the_name_of_one_type() {
    let twice = |first: &str, second: &str| {
        let files = [SourceFile::new("core/src/a.rs", first), SourceFile::new("capi/src/b.rs", second)];
        census::type_names(&files).iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let found = ["capi/src/b.rs:2: type-names: `Line` is also a type in core/src/a.rs:1"];
    assert_eq!(twice("struct Line;", "\nenum Line {}"), found);
    assert_eq!(twice("struct Line;", "\npub trait Line<T> {}"), found);
    assert!(twice("struct Line;", "struct Row; impl Line {} // struct Line").is_empty());
    assert!(twice("struct Line;", "#[cfg(test)]\nmod tests {\n    struct Line;\n}").is_empty());
    assert!(twice("struct Args;", "struct Args;").is_empty(), "a shared name has a reason");
}

#[test]
fn a_file_in_an_import_cycle_is_found() {
    let check = |files: &[(&str, &str)], expected: &[&str]| {
        let files: Vec<SourceFile> = files.iter().map(|(path, text)| SourceFile::new(path, text)).collect();
        let found = circles::circles(&files);
        let found: Vec<String> = found.iter().map(|finding| format!("{}:{}", finding.path, finding.line)).collect();
        assert_eq!(found, expected);
    };
    let (a, b) = ("core/src/a.rs", "core/src/b.rs");
    check(&[(a, "\nuse super::b::B;"), (b, "use crate::{a::A, limits};")], &["core/src/a.rs:2", "core/src/b.rs:1"]);
    check(&[(a, "fn f() { crate::b::g() }"), (b, "fn g() { crate::a::f() }")], &["core/src/a.rs:1", "core/src/b.rs:1"]);
    let over_another = [(a, "use super::b;"), (b, "use super::c::d;"), ("core/src/c/d.rs", "use super::super::a;")];
    check(&over_another, &["core/src/a.rs:1", "core/src/b.rs:1", "core/src/c/d.rs:1"]);
    check(&[(a, "use super::b::B;"), (b, "// use super::a::A;\npub(in crate::a) use other::a;")], &[]);
    check(&[(a, "use super::b::B;"), (b, "#[cfg(test)]\nmod tests {\n    use crate::a::A;\n}")], &[]);
    check(&[(a, "use super::b::B;"), ("capi/src/b.rs", "use crate::a::A;"), ("capi/src/a.rs", "")], &[]);
    check(&[("core/src/a/mod.rs", "use b::B;"), ("core/src/a/b.rs", "use super::A;")], &[]);
    let (parent, c) = ("core/src/p/mod.rs", "core/src/p/c.rs");
    let of_c = |import| [(a, import), (parent, "mod c;\npub(crate) use c::{C as D, E};"), (c, "use crate::a::A;")];
    check(&of_c("use super::p::D;"), &["core/src/a.rs:1", "core/src/p/c.rs:1"]);
    check(&of_c("use super::p::C;"), &[]);
    let siblings = [("core/src/p/b.rs", "use super::c::C;"), (c, "use super::B;"), (parent, "pub use b::*;")];
    check(&siblings, &["core/src/p/b.rs:1", "core/src/p/c.rs:1"]);
    check(&[(a, "mod inner {\n    use super::B;\n    use super::super::b::B;\n}"), (b, "")], &[]);
    let each_other = [(a, "pub use super::b::*;"), (b, "pub use super::a::*;"), ("core/src/c.rs", "use crate::a::A;")];
    check(&each_other, &["core/src/a.rs:1", "core/src/b.rs:1"]);
}

#[test]
fn a_file_in_a_large_call_cycle_is_counted() {
    let check = |texts: &[String], expected: usize| {
        let paths = (0..texts.len()).map(|number| format!("core/src/f{number}.rs"));
        let files: Vec<SourceFile> = paths.zip(texts).map(|(path, text)| SourceFile::new(&path, text)).collect();
        let found = circles::circles(&files);
        assert!(found.iter().all(|finding| finding.rule == "call-circles"), "no file imports another");
        assert_eq!(found.len(), expected, "{}", texts[0]);
    };
    // Each file has a method of one type, which calls that of the next file.
    let files = |count: usize, call: &str, block: &str| {
        let text = |at: usize| {
            let call = call.replace("NEXT", &format!("m{}", (at + 1) % count));
            format!("{block} {{ fn m{at}(&mut self, big_state: &BigState) {{ {call} }} }}")
        };
        (0..count).map(text).collect::<Vec<_>>()
    };
    check(&files(5, "self.NEXT(big_state);", "impl BigState"), 5);
    check(&files(4, "self.NEXT(big_state);", "impl BigState"), 0);
    check(&files(6, "big_state.NEXT();", "impl<'a, T: Into<u8>> BigState<'a, T>"), 6);
    check(&files(5, "self.other.NEXT();", "impl BigState"), 0);
    check(&files(5, "other.NEXT();", "impl BigState"), 0);
    check(&files(5, "self.NEXT();", "impl Turn for BigState"), 0);
    check(&files(5, "// self.NEXT();", "impl BigState"), 0);
    check(&files(5, "self.NEXT();", "#[cfg(test)]\nimpl BigState"), 0);
}

#[test]
fn a_counted_rule_fails_above_its_ceiling_only() {
    let finding =
        |rule| Finding { path: String::new(), line: 1, rule, text: String::new(), standing: Standing::Counted };
    for (rule, ceiling) in CEILINGS {
        let findings: Vec<Finding> = (0..=*ceiling).map(|_| finding(*rule)).collect();
        assert!(excess(&findings[1..]).is_empty());
        assert_eq!(excess(&findings).len(), 1);
    }
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
fn only_generated_files_are_exempt_from_the_layout_rules() {
    let long = format!("unsafe fn a()\n{{{}unsafe {{ b() }} }}", "// ä\n".repeat(100) + &"c(); ".repeat(30));
    let (generated, written) = (format!("// @generated by a program\n{long}"), format!("// by hand\n{long}"));
    for rule in ["unsafe", "function-length", "layout"] {
        check(rule, "transport/src/verbs/sys/bindings.rs", &generated, &[]);
    }
    // Neither the file name alone nor the line alone makes a file generated, and generated files obey the door rules.
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
    assert_eq!(findings.iter().map(|finding| finding.standing).collect::<Vec<_>>(), [Standing::Excused]);
    assert_eq!(findings[0].to_string(), "core/tests/a.rs:1: sleeping-test: no event");
}

#[test]
fn every_rule_has_an_example_that_passes_and_one_that_fails() {
    let examples = [FLOORS, REACH, SHAPE, MANIFEST, LANGUAGE].concat();
    // The rules on lengths have generated examples above.
    for rule in RULES.iter().filter(|rule| !matches!(rule.name, "function-length" | "prose")) {
        let mut own = examples.iter().filter(|(name, ..)| *name == rule.name).map(|(.., lines)| lines.is_empty());
        assert!(own.clone().any(|passes| passes) && own.any(|passes| !passes), "{} lacks an example", rule.name);
    }
}

#[test]
fn the_workspace_is_tidy() {
    let workspace = Workspace::of_this_program();
    let files = read(workspace.root()).unwrap();
    assert!(files.iter().any(|file| file.path == "ci/src/tidy/tests.rs"), "the sources were not found");
    let findings = look(workspace.root(), &files).unwrap();
    let refused = findings.iter().filter(|finding| finding.standing == Standing::Refused);
    let lines: Vec<_> = refused.map(ToString::to_string).chain(excess(&findings)).collect();
    assert!(lines.is_empty(), "{}", lines.join("\n"));
}

#[test]
fn names_that_a_page_mentions_are_in_the_repository() {
    let mut repository = mentions::Repository::default();
    repository.add("core/Cargo.toml", "");
    repository.add("core/src/limits.rs", "pub const PEERS_MAX: u32 = 1;\nfn proof() {}\n");
    repository.add("core/src/server/shard.rs", "impl Shard { fn handle(&self) {} }");
    repository.add("core/src/client/shard.rs", "fn other() {}");
    repository.add("capi/src/settings/args.rs", "pub chunk_bytes: u32, // (\"chunk_bytes\", \"1MiB\")");
    repository.add("docs/STYLE.md", "--absent ABSENT_MAX");
    let check = |page: &str, text: &str, expected: &[&str]| {
        let found: Vec<String> = mentions::look(page, text, &repository).into_iter().map(|one| one.text).collect();
        assert_eq!(found, expected, "{text}");
    };
    let right = [
        "`core/src/limits.rs`: `PEERS_MAX`, `proof`; `shard.rs`: `Shard::handle`, `other`",
        "`core/src/server`, `core/src/{server,client}/shard.rs`, `STYLE.md`, `limits::PEERS_MAX`, `TCP_NODELAY`",
        "`--chunk-bytes 4KiB`, `PSERVER_CHUNK_BYTES=1`, `cargo ci tidy`, cargo ci whatever in prose, `cargo ci <task>`",
        "`a/b`, `https://host/x.rs?`, `std::fs`, `.rs`, `-x`",
    ];
    right.into_iter().for_each(|text| check("docs/A.md", text, &[]));
    check(
        "docs/A.md",
        "`core/src/limit.rs` and `absent.md`",
        &["there is no core/src/limit.rs", "there is no absent.md"],
    );
    check("docs/A.md", "`core/src/{server,absent}/shard.rs`", &["there is no core/src/absent/shard.rs"]);
    check("docs/A.md", "`core/absent`", &["there is no core/absent"]);
    check("docs/A.md", "`core/src/limits.rs`: `absent`", &["core/src/limits.rs has no absent"]);
    check("docs/A.md", "`server/shard.rs`: `handle`, `Shard::other`", &["server/shard.rs has no other"]);
    check("docs/A.md", "`ABSENT_MAX`, `limits::ABSENT`", &["there is no ABSENT_MAX", "there is no ABSENT"]);
    check("docs/A.md", "```\npeers * ABSENT_MIN + PEERS_MAX\n```", &["there is no ABSENT_MIN"]);
    check("docs/A.md", "`--absent yes`", &["nothing has an option --absent"]);
    check("docs/A.md", "    PSERVER_ABSENT=1 pserver", &["no source reads PSERVER_ABSENT"]);
    check("docs/A.md", "    cargo ci absent", &["cargo ci has no task absent"]);
    check("docs/A.md", "`src/tidy.zig.rs`", &["there is no src/tidy.zig.rs"]);
}

/// The refusals of a list of these items below the heading of a trainer's or a server's call path.
fn refused_ways(heading: &str, items: &[&str]) -> Vec<String> {
    let mut repository = mentions::Repository::default();
    let client = "impl A {\n fn push(&mut self) { self.cut(\"call(\"); self.queue.push(pack()); }\n fn cut(&self) {} }";
    repository.add("core/src/a.rs", &format!("{client}\nfn pack() {{ push() }}\nfn idle() {{}}"));
    repository.add("core/src/b.rs", "fn take() { queue.pop(); // pack()\n write() }\nfn write() { loop_back() }");
    let list: String = items.iter().zip(1..).map(|(item, number)| format!("{number}. {item}\n")).collect();
    let page = format!("# A\n\n### {heading}\n\nText.\n\n{list}\n## B\n\n1. `no/list.rs`\n");
    ways::look("docs/A.md", &page, &repository).iter().map(|one| format!("{}: {}", one.line, one.text)).collect()
}

const TRAINER: &str = "The way of a gradient, trainer";
const SERVER: &str = "The way of a gradient, server";
const PUSH: &str = "`core/src/a.rs`: `A::push`: begins.";
const PACK: &str = "`core/src/a.rs`: `pack`: packs,\n   in two lines. Queue: `queue`.";

#[test]
fn a_list_of_functions_follows_the_calls() {
    let right = [PUSH, "`core/src/a.rs`: `cut`: returns.", "`core/src/a.rs`: `pack`: is called by push."];
    assert!(refused_ways(TRAINER, &right).is_empty());
    let hop = ["`core/src/a.rs`: `push`. Queue: `queue`.", "`core/src/b.rs`: `take`.", "`core/src/b.rs`: `write`."];
    assert!(refused_ways(TRAINER, &hop).is_empty());
    assert_eq!(refused_ways(TRAINER, &[]), ["3: expected a numbered list below this heading"]);
    let wrong = [
        ([PUSH, "`core/src/a.rs`: `absent`."], "8: core/src/a.rs has no function absent"),
        ([PUSH, "`core/src/absent.rs`: `pack`."], "8: there is no core/src/absent.rs"),
        ([PUSH, "`core/src/a.rs`, `pack`."], "8: expected a file and a function: `a/b.rs`: `c`"),
        ([PUSH, "`core/src/a.rs`: `idle`."], "8: no function before it calls idle of core/src/a.rs"),
        (
            ["`core/src/a.rs`: `cut`.", "`core/src/a.rs`: `pack`."],
            "8: no function before it calls pack of core/src/a.rs",
        ),
        (
            ["`core/src/b.rs`: `take`.", "`core/src/a.rs`: `pack`."],
            "8: no function before it calls pack of core/src/a.rs",
        ),
        (
            ["`core/src/a.rs`: `push`. Queue: `queue`.", "`core/src/b.rs`: `write`."],
            "7: no later function names the queue queue",
        ),
    ];
    for (items, expected) in wrong {
        assert_eq!(refused_ways(TRAINER, &items), [expected]);
    }
    let unnamed = [PACK, "`core/src/b.rs`: `take`."];
    assert_eq!(refused_ways(TRAINER, &unnamed), ["7: pack does not name the queue queue"]);
}

#[test]
fn a_list_of_functions_has_limits() {
    let functions = |count: usize| ["`core/src/a.rs`: `push`.", "`core/src/a.rs`: `pack`."].repeat(count / 2);
    assert!(refused_ways(TRAINER, &functions(20)).is_empty());
    let more = [functions(20), vec!["`core/src/a.rs`: `push`."]].concat();
    assert_eq!(refused_ways(TRAINER, &more), ["3: 21 functions, at most 20"]);
    assert!(refused_ways(SERVER, &more).is_empty());
    let queues =
        |count: usize| [vec!["`core/src/a.rs`: `push`. Queue: `queue`."; count], vec!["`core/src/b.rs`: `take`."]];
    assert!(refused_ways(TRAINER, &queues(2).concat()).is_empty());
    assert_eq!(refused_ways(TRAINER, &queues(3).concat()), ["3: 3 queues, at most 2"]);
}

#[test]
fn a_list_of_a_server_reads_each_file_once() {
    let push = "`core/src/a.rs`: `push`. Queue: `queue`.";
    let again = [push, "`core/src/a.rs`: `pack`.", push, "`core/src/b.rs`: `take`. Queue: `queue`.", push];
    assert!(refused_ways(SERVER, &again[..4]).iter().all(|text| text.contains("no later")));
    let found = refused_ways(SERVER, &again);
    assert_eq!(
        found,
        ["11: no later function names the queue queue", "11: core/src/a.rs occurs again after other files"]
    );
}

#[test]
fn the_way_of_a_gradient_is_listed() {
    let page = fs::read_to_string(Workspace::of_this_program().root().join("docs/ARCHITECTURE.md")).unwrap();
    assert!([TRAINER, SERVER].iter().all(|heading| page.contains(&format!("# {heading}\n"))));
}
