//! A second opinion on the bindings of libibverbs: `rdma-sys` describes the same headers by another version of bindgen,
//! and its requests and completions by hand. Every size, alignment, offset and constant that our file asserts is
//! asserted of its types.
//!
//! Not here: the bindings themselves ([`crate::verbs_bindings`]). `rdma-sys` is no dependency of the workspace, not
//! even of its tests, because it builds only with libclang up to 15 and the headers of rdma-core: `cargo ci
//! verbs-bindings --check` has both.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::workspace::{Tally, Workspace};

const VERSION: &str = "=0.3.0";
/// The pkg-config names of libibverbs and librdmacm, and versions. Their own dependencies are left out: nothing is
/// linked.
const LIBRARIES: &[(&str, &str)] = &[("libibverbs", "1.14.44.0"), ("librdmacm", "1.3.44.0")];
/// Types of constants that `rdma-sys` has as structures around a number, to be joined by "or".
const BITS: &[&str] = &[
    "ibv_access_flags",
    "ibv_device_cap_flags",
    "ibv_qp_attr_mask",
    "ibv_send_flags",
    "ibv_srq_attr_mask",
    "ibv_wc_flags",
];
/// Those that it has as modules or enumerations: a constant is `type::NAME`.
const NAMES: &[&str] = &[
    "ibv_atomic_cap",
    "ibv_event_type",
    "ibv_mig_state",
    "ibv_mtu",
    "ibv_mw_type",
    "ibv_node_type",
    "ibv_port_state",
    "ibv_qp_state",
    "ibv_qp_type",
    "ibv_transport_type",
    "ibv_wc_opcode",
    "ibv_wc_status",
    "ibv_wq_state",
    "ibv_wr_opcode",
];
/// Its own names are others for what has none in C, and it has no members of opaque types.
const NAMELESS: &[&str] = &["__bindgen_", "_bindgen_", "pthread_"];

/// Compiles what our bindings say of the types of `rdma-sys`, whose build reads the headers under `root`.
pub(crate) fn agrees(workspace: &Workspace, bindings: &str, root: &Path) -> Result<Tally> {
    let folder = workspace.root().join("target/rdma-sys");
    let places = folder.join("pkgconfig");
    for path in [&folder.join("src"), &places] {
        fs::create_dir_all(path).with_context(|| format!("cannot make {}", path.display()))?;
    }
    let write =
        |path: &Path, text: &str| fs::write(path, text).with_context(|| format!("cannot write {}", path.display()));
    for (name, version) in LIBRARIES {
        let include = root.join("usr/include");
        let text =
            format!("Name: {name}\nDescription: headers\nVersion: {version}\nCflags: -I{}\nLibs:\n", include.display());
        write(&places.join(format!("{name}.pc")), &text)?;
    }
    let package = "[workspace]\n[package]\nname = \"second-opinion\"\nversion = \"0.0.0\"\nedition = \"2024\"\n";
    write(&folder.join("Cargo.toml"), &format!("{package}[dependencies]\nrdma-sys = \"{VERSION}\"\n"))?;
    let (layouts, constants) = (layouts(bindings), constants(bindings));
    let claims = layouts.iter().chain(&constants).map(|claim| format!("    {claim};\n")).collect::<String>();
    let head = "#![allow(deprecated)]\nuse rdma_sys::*;\n";
    write(&folder.join("src/lib.rs"), &format!("{head}const _: () = {{\n{claims}}};\n"))?;
    let mut cargo = workspace.cargo();
    cargo.args(["check", "--quiet", "--manifest-path"]).arg(folder.join("Cargo.toml"));
    cargo.env("CARGO_TARGET_DIR", folder.join("target")).env("PKG_CONFIG_PATH", &places);
    let clang = root.join("usr/lib/llvm-14/lib");
    cargo.env("LIBCLANG_PATH", &clang).env("LD_LIBRARY_PATH", root.join("usr/lib/x86_64-linux-gnu"));
    cargo.env("BINDGEN_EXTRA_CLANG_ARGS", format!("-isystem {}", clang.join("clang/14.0.6/include").display()));
    let status = cargo.status().context("cannot start cargo")?;
    println!(
        "verbs-bindings: rdma-sys {VERSION} {} {} layouts and {} constants",
        if status.success() { "agrees on" } else { "does not agree on" },
        layouts.len(),
        constants.len()
    );
    // A text from which nothing is read would agree with everything.
    Ok(Tally::of_step(status.success() && layouts.len() > 100 && constants.len() > 100))
}

/// The bindings' assertions about types and members that have a name in C.
fn layouts(bindings: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut lines = bindings.lines().map(str::trim);
    while let Some(line) = lines.next() {
        let is_layout =
            ["[\"Size of ", "[\"Alignment of ", "[\"Offset of "].iter().any(|start| line.starts_with(start));
        if !is_layout {
            continue;
        }
        let mut claim = line.to_owned();
        while !claim.ends_with(';') {
            claim.push_str(lines.next().unwrap_or(";"));
        }
        if !NAMELESS.iter().any(|name| claim.contains(name)) && !claim.contains("_ibv_device_ops>") {
            found.push(claim.trim_end_matches(';').to_owned());
        }
    }
    found
}

/// `pub const NAME: type = value;` as an assertion.
fn constants(bindings: &str) -> Vec<String> {
    let read = |line: &str| {
        let (name, rest) = line.strip_prefix("pub const ")?.split_once(": ")?;
        let (of, value) = rest.strip_suffix(';')?.split_once(" = ")?;
        let number = match (BITS.contains(&of), NAMES.contains(&of)) {
            (true, _) => format!("{of}::{name}.0 as i64"),
            (_, true) => format!("{of}::{name} as i64"),
            _ => return None,
        };
        Some(format!("assert!({number} == {value}, \"{name}\")"))
    };
    bindings.lines().filter_map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_a_name_in_c_is_claimed_again() {
        let bindings = "
const _: () = {
    [\"Size of ibv_wc\"][::core::mem::size_of::<ibv_wc>() - 48usize];
    [\"Offset of field: ibv_wc::qp_num\"]
        [::core::mem::offset_of!(ibv_wc, qp_num) - 32usize];
    [\"Offset of field: ibv_wc::__bindgen_anon_1\"][::core::mem::offset_of!(ibv_wc, __bindgen_anon_1) - 28usize];
    [\"Size of pthread_cond_t\"][::core::mem::size_of::<pthread_cond_t>() - 48usize];
};
pub const IBV_SEND_FENCE: ibv_send_flags = 1;
pub const IBV_NODE_UNKNOWN: ibv_node_type = -1;
pub const IBV_LINK_LAYER_ETHERNET: _bindgen_ty_13 = 2;
";
        let layouts = layouts(bindings);
        assert_eq!(layouts[0], "[\"Size of ibv_wc\"][::core::mem::size_of::<ibv_wc>() - 48usize]");
        assert!(layouts[1].ends_with("[::core::mem::offset_of!(ibv_wc, qp_num) - 32usize]"), "{layouts:?}");
        assert_eq!(layouts.len(), 2);
        let expected = [
            "assert!(ibv_send_flags::IBV_SEND_FENCE.0 as i64 == 1, \"IBV_SEND_FENCE\")",
            "assert!(ibv_node_type::IBV_NODE_UNKNOWN as i64 == -1, \"IBV_NODE_UNKNOWN\")",
        ];
        assert_eq!(constants(bindings), expected);
    }
}
