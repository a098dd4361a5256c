//! `pserver env`: how a process of a job finds its rank, the sizes and server 0, and from where.

use anyhow::Result;
use pserver_client::console;
use pserver_client::environment::{self, Environment, SettingChoice};
use pserver_client::launchers::{LauncherVariable, Launchers};
use pserver_client::setting_file;
use serde_json::json;

/// Arguments of `pserver env`.
#[derive(clap::Args, Clone, Debug)]
pub struct EnvArgs {
    /// A client's options, such as trainer=3 coordinator=node1:7164.
    options: Vec<String>,
    /// Print one line of JSON.
    #[arg(long)]
    json: bool,
}

/// Prints each setting of a trainer with its origin, then the variables of launchers that are set.
///
/// # Errors
/// As for a trainer here: a wrong value, or two that contradict each other. The variables are printed before.
pub fn run(args: &EnvArgs) -> Result<()> {
    let process = environment::of_process();
    let variable = |name: &str| process.iter().find(|(key, _)| key == name).map(|(_, text)| text.clone());
    let launchers = Launchers::new(&variable);
    let found =
        environment::find(&args.options.join(" "), &Environment { variable: &variable, file: &setting_file::open });
    let choices: &[SettingChoice] = found.as_ref().map_or(&[], |found| &found.choices);
    let variables = launchers.variables();
    let text = if args.json { in_json(choices, &variables) } else { in_lines(choices, &variables) };
    console::print(text)?;
    Ok(found.map(drop)?)
}

/// Whether a setting's value is from this variable.
fn is_used(choices: &[SettingChoice], variable: &LauncherVariable) -> bool {
    choices.iter().any(|choice| {
        let mut words = choice.origin.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
        words.any(|word| word == variable.name)
    })
}

fn in_lines(choices: &[SettingChoice], variables: &[LauncherVariable]) -> String {
    let chosen = choices.iter().map(|choice| format!("{choice}\n"));
    let set = variables.iter().map(|variable| {
        let LauncherVariable { launcher, setting, name, text } = variable;
        let state = if is_used(choices, variable) { "used" } else { "not used" };
        format!("# {launcher}: {name} = {} ({setting}, {state})\n", text.replace(char::is_control, "?"))
    });
    chosen.chain(set).collect()
}

fn in_json(choices: &[SettingChoice], variables: &[LauncherVariable]) -> String {
    let chosen = choices.iter().map(|choice| {
        let SettingChoice { setting, text, origin } = choice;
        json!({ "setting": setting, "value": text, "from": origin })
    });
    let set = variables.iter().map(|variable| {
        let LauncherVariable { launcher, setting, name, text } = variable;
        let used = is_used(choices, variable);
        json!({ "launcher": launcher, "setting": setting, "variable": name, "value": text, "used": used })
    });
    let all = json!({ "settings": chosen.collect::<Vec<_>>(), "variables": set.collect::<Vec<_>>() });
    format!("{all}\n")
}
