//! `pserver needs`: the memory, disk and descriptors of servers, before a job runs.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use pserver_client::console;
use pserver_core::checkpoint::RESERVE_BYTES;
use pserver_core::checkpoint::storage::Directory;
use pserver_core::config::OptimizerSettings;
use pserver_core::limits::{CHUNK_BYTES_DEFAULT, SERVERS_MAX, SHARDS_DEFAULT, SHARDS_MAX, TRAINERS_MAX};
use pserver_core::optim::Prepared;
use pserver_core::server::{Holdings, Needs, survey_holdings};

use crate::quickstart::{self, Optimizer};
use crate::top::text::real_bytes;
use crate::{descriptors, program_file};

/// Bytes of an element.
const ELEMENT_BYTES: u64 = 4;

/// Arguments of `pserver needs`.
#[derive(clap::Args)]
pub(crate) struct NeedsArgs {
    /// A checkpoint directory of a job: its parameters, servers, shards and trainers count where no option says others.
    #[arg(conflicts_with_all = ["elements", "table", "optimizer"], required_unless_present_any = ["elements", "table"])]
    checkpoint_dir: Option<PathBuf>,
    /// Elements of all dense parameters together, of float32, such as 25e6.
    #[arg(long, value_name = "N", value_parser = count)]
    elements: Option<u64>,
    /// A table: its rows and their width in elements of float32, such as 1e6x64. May be given again.
    #[arg(long, value_name = "ROWSxWIDTH", value_parser = table)]
    table: Vec<Table>,
    /// The rule of the servers: sgd, momentum, nesterov, adagrad, adadelta, rmsprop, adam, adamw, ftrl, or a
    /// configuration or its file.
    #[arg(long, default_value = "sgd", value_parser = states)]
    optimizer: States,
    /// Trainers of the job [default: 1, or those of the checkpoint].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=i64::from(TRAINERS_MAX)))]
    trainers: Option<u32>,
    /// Servers of the job [default: 1, or those of the checkpoint].
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=i64::from(SERVERS_MAX)))]
    servers: Option<u16>,
    /// Shards of each server [default: 4, or those of the checkpoint].
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=i64::from(SHARDS_MAX)))]
    shards: Option<u16>,
    /// Servers keep no journal (--journal off).
    #[arg(long)]
    no_journal: bool,
}

/// A table's rows, and the elements of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Table {
    rows: u64,
    width: u64,
}

/// The number of states of a rule, and how it was given.
#[derive(Clone, Debug, PartialEq, Eq)]
struct States {
    text: String,
    count: u64,
}

/// Prints what each server needs.
///
/// # Errors
/// When a checkpoint directory cannot be read.
pub(crate) fn run(args: &NeedsArgs) -> Result<()> {
    let found = args.checkpoint_dir.as_deref().map(of_checkpoints).transpose()?.unwrap_or_default();
    let mut all = of_options(args);
    found.iter().flatten().for_each(|shard| all.extend(shard));
    let count = |given: Option<u16>, found: usize| given.map_or(found.max(1) as u64, u64::from);
    let servers = count(args.servers, found.len());
    let shards = count(args.shards, found.iter().map(Vec::len).max().unwrap_or(SHARDS_DEFAULT.into()));
    let trainers = args.trainers.map_or(all.trainers(), u64::from).max(1);
    let rule = match &args.checkpoint_dir {
        Some(_) => "the rules of the checkpoint".to_owned(),
        None => format!("{} ({} states)", args.optimizer.text, args.optimizer.count),
    };
    let head = format!("{servers} servers with {shards} shards each, {trainers} trainers, {rule}");
    let part = match (args.servers, args.shards) {
        // The fullest shard that was found.
        (None, None) if !found.is_empty() => {
            found.into_iter().flatten().max_by_key(|shard| shard.needs(true).least()).unwrap_or_default()
        }
        _ => all.divided(servers.saturating_mul(shards)),
    };
    let part = part.with_trainers(u32::try_from(trainers).unwrap_or(u32::MAX));
    let needs = part.needs(!args.no_journal);
    Ok(console::print(text(&head, &needs, shards, descriptors::needs(trainers, shards)))?)
}

fn text(head: &str, shard: &Needs, shards: u64, [tcp, shared]: [u64; 2]) -> String {
    let of = |bytes: u64| real_bytes(bytes.saturating_mul(shards));
    let mut text = format!("{head}\neach server needs\n");
    let mut line = |what: &str, figure: &str, reason: &str| {
        let _ = writeln!(text, "  {what:<17} {figure:>11}   {reason}");
    };
    let gradients = of(shard.gradients);
    let least =
        format!("values {}, states {}, a gradient of each trainer {gradients}", of(shard.values), of(shard.states));
    line("memory, at least", &of(shard.least()), &least);
    line("memory, at most", &of(shard.most), "every trainer a round ahead, while all of them read");
    if shard.rows > 0 {
        line("memory of rows", &of(shard.rows), "when tables have all their rows; payloads come on top");
    }
    let journal = if shard.journal > 0 { format!(", three journals of {}", of(shard.journal)) } else { String::new() };
    let reserve = of(RESERVE_BYTES);
    let disk = format!("three checkpoints of {}{journal}, {reserve} in reserve", of(shard.checkpoint));
    line("disk", &of(shard.disk), &disk);
    line("descriptors", &tcp.to_string(), &format!("over TCP; {shared} through shared memory"));
    text
}

/// Parameters in chunks of the default size; the last one may be shorter.
fn of_options(args: &NeedsArgs) -> Holdings {
    let states = args.optimizer.count;
    let mut all = Holdings::new(1);
    let bytes = args.elements.unwrap_or(0).saturating_mul(ELEMENT_BYTES);
    let chunk = u64::from(CHUNK_BYTES_DEFAULT);
    all.add_chunks(CHUNK_BYTES_DEFAULT, states, bytes / chunk);
    if !bytes.is_multiple_of(chunk) {
        all.add_chunks(u32::try_from(bytes % chunk).unwrap_or(CHUNK_BYTES_DEFAULT), states, 1);
    }
    for table in &args.table {
        all.add_rows(table.width.saturating_mul(ELEMENT_BYTES), states, table.rows, 1);
    }
    all
}

/// The parameters of each server's shards.
fn of_checkpoints(path: &Path) -> Result<Vec<Vec<Holdings>>> {
    let storage = Directory::open(path).with_context(|| path.display().to_string())?;
    let servers = survey_holdings(&storage).with_context(|| path.display().to_string())?;
    ensure!(
        !servers.is_empty(),
        "{}: no shard has a checkpoint; expected a checkpoint directory of a job, with folders such as server-0",
        path.display()
    );
    Ok(servers)
}

/// A whole number, also with a fraction or an exponent.
fn count(text: &str) -> Result<u64, String> {
    let refused = || "expected a whole number above 0, such as 1300000000 or 1.3e9".to_owned();
    if let Ok(number) = text.parse() {
        return if number > 0 { Ok(number) } else { Err(refused()) };
    }
    let number: f64 = text.parse().map_err(|_| refused())?;
    let is_whole = number.fract() == 0.0 && (1.0..=2f64.powi(62)).contains(&number);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it was just looked at")]
    if is_whole { Ok(number as u64) } else { Err(refused()) }
}

fn table(text: &str) -> Result<Table, String> {
    let (rows, width) = text.split_once('x').ok_or("expected rows and width, such as 1e6x64")?;
    Ok(Table { rows: count(rows)?, width: count(width)? })
}

/// A rule by its word, or by its configuration.
fn states(text: &str) -> Result<States, String> {
    let config = match Optimizer::from_str(text, true) {
        Ok(word) => quickstart::optimizer_text(word, 1.0),
        Err(_) => program_file::optimizer_text(text).map_err(|error| format!("{error:#}"))?,
    };
    let settings = OptimizerSettings::from_text(&config).map_err(|failure| failure.to_string())?;
    let rule = settings.rule.ok_or("expected a configuration with a rule, such as \"adam { }\"")?;
    let rule = Prepared::new(rule).map_err(|failure| failure.to_string())?;
    Ok(States { text: text.to_owned(), count: rule.states().len() as u64 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_rules_are_read_or_refused() {
        assert_eq!(count("1.3e9"), Ok(1_300_000_000));
        assert_eq!(count("18446744073709551615"), Ok(u64::MAX));
        for text in ["0", "-1", "1.5", "1e30", "nan", "1B", ""] {
            assert!(count(text).is_err(), "{text}");
        }
        assert_eq!(table("1e6x64"), Ok(Table { rows: 1_000_000, width: 64 }));
        assert!(table("64").is_err() && table("x64").is_err());
        for (text, expected) in [("sgd", 0), ("momentum", 1), ("Adam", 2), ("optimizer: Adam adam { beta_1: 0.8 }", 2)]
        {
            assert_eq!(states(text).map(|states| states.count), Ok(expected), "{text}");
        }
        assert!(states("adams").is_err() && states("lr_policy: \"const\"").is_err());
    }
}
