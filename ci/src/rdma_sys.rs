//! `cargo ci rdma-sys`: our bindings of libibverbs agree with those of the crate `rdma-sys`, type by type. The package
//! `ci/rdma-sys-check` compares them while it compiles.
//!
//! Not here: the bindings ([`crate::verbs_bindings`]). The package is outside the workspace, because `rdma-sys` builds
//! only with the headers of rdma-core and a libclang up to version 15; Debian's packages have both.

use std::process::{Child, Command};

use anyhow::{Context, Result};

use crate::verbs_bindings::PACKAGES;
use crate::workspace::{Ending, Tally, Workspace};

/// Starts the compiler. A machine that cannot have the packages of Debian skips.
pub(crate) fn begin(workspace: &Workspace) -> Result<Ending> {
    match check(workspace).and_then(|mut check| check.spawn().context("cannot start cargo")) {
        Ok(child) => Ok(Box::new(|_| end(child))),
        Err(error) => Ok(Box::new(move |workspace| {
            workspace.skip("rdma-sys", &format!("{error:#}"))?;
            Ok(Tally::default())
        })),
    }
}

fn end(mut child: Child) -> Result<Tally> {
    Ok(Tally::of_step(child.wait().context("cannot learn how cargo ended")?.success()))
}

/// The call of the compiler. An error is a machine that cannot have the packages of Debian.
fn check(workspace: &Workspace) -> Result<Command> {
    let root = PACKAGES.unpack(workspace)?;
    let mut cargo = workspace.cargo();
    cargo.args(["check", "--quiet", "--locked", "--manifest-path", "ci/rdma-sys-check/Cargo.toml"]);
    cargo.args(["--target-dir", "target/rdma-sys"]);
    let (clang, include) = (root.join("usr/lib/llvm-14/lib"), root.join("usr/include"));
    cargo.env("LIBCLANG_PATH", &clang).env("LD_LIBRARY_PATH", root.join("usr/lib/x86_64-linux-gnu"));
    let own = clang.join("clang/14.0.6/include");
    cargo.env("BINDGEN_EXTRA_CLANG_ARGS", format!("-isystem {} -I{}", own.display(), include.display()));
    // Nothing is linked, and bindgen has been told the headers: of pkg-config any answer will do.
    cargo.env("PKG_CONFIG", "echo");
    Ok(cargo)
}
