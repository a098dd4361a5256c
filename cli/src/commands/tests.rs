//! The tables of `docs/SETTINGS.md` have every setting, and say of each what becomes of it.

use std::collections::BTreeSet;

use clap::CommandFactory;
use pserver_client::environment::{SERVER_SETTINGS, client_settings};
use pserver_core::config::OptimizerSettings;

use super::Cli;
use settings_page::{Outcome, rows};

#[path = "../../tests/cluster/settings_page.rs"]
#[allow(dead_code, reason = "tests of processes use the rest")]
mod settings_page;

/// Checks that a section has exactly these settings, each once, and that each cell says what becomes of it.
fn check(section: &str, expected: impl Iterator<Item = String>) {
    let rows = rows(section);
    let names: Vec<&str> = rows.iter().flat_map(|(names, _)| names.iter().copied()).collect();
    let found: BTreeSet<String> = names.iter().map(|name| (*name).to_owned()).collect();
    assert_eq!(found.len(), names.len(), "{section}: a setting stands once in {names:?}");
    assert_eq!(found, expected.collect(), "{section}: docs/SETTINGS.md has the settings that exist");
    for cell in rows.iter().flat_map(|(_, cells)| cells) {
        assert!(Outcome::of_cell(cell).next().is_some(), "{section}: {cell:?} says what becomes of it");
    }
}

#[test]
fn every_setting_has_a_row() {
    let dashed = |name: &&str| format!("--{}", name.replace('_', "-"));
    check("`pserver serve`", SERVER_SETTINGS.iter().map(dashed));

    let command = Cli::command();
    let train = command.find_subcommand("train").expect("it is there");
    let shown = train.get_arguments().filter(|arg| !arg.is_hide_set());
    let named = |arg: &clap::Arg| arg.get_long().map_or_else(|| arg.get_id().to_string(), |long| format!("--{long}"));
    check("`pserver train`", shown.map(named));

    check("Clients", client_settings().map(str::to_owned));

    // A new field does not compile here before it has a name, and so a row.
    let OptimizerSettings {
        rule: _,
        mode: _,
        merge: _,
        sparse: _,
        owner: _,
        sender: _,
        total_part: _,
        backup_trainers: _,
        // No text has it.
        hosted: _,
    } = OptimizerSettings::default();
    let names = ["optimizer", "mode", "merge", "sparse", "home", "sender", "total_part", "backup_trainers"];
    check("`paddle_begin_init_params`, `begin_init`, `init_all`", names.into_iter().map(str::to_owned));
}
