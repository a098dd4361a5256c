//! `cargo ci deny`: the rules of `deny.toml` for packages of others, checked by cargo-deny.

use anyhow::Result;

use crate::workspace::{Tally, Workspace};

/// Licences, bans and sources need the lock file only. Advisories need a list from the network; a machine that cannot
/// fetch the list skips them.
pub(crate) fn run(workspace: &Workspace) -> Result<Tally> {
    if !workspace.has_cargo_tool("deny") {
        workspace.skip("deny", "cargo-deny is not installed; `cargo install --locked cargo-deny` installs it")?;
        return Ok(Tally::default());
    }
    let check = |what: &[&str]| {
        workspace.step(workspace.cargo().args(["deny", "--offline", "check", "--hide-inclusion-graph"]).args(what))
    };
    let mut total = check(&["licenses", "bans", "sources"])?;
    if workspace.step(workspace.cargo().args(["deny", "fetch", "db"]))?.failed == 0 {
        total += check(&["advisories"])?;
    } else {
        workspace.skip("advisories", "the list of RustSec cannot be fetched")?;
    }
    Ok(total)
}
