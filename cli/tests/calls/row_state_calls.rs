//! Export and import of the optimizer's state of rows in pieces, and loading of given rows.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::cluster::job::{Job, Local, TCP, client, client_with, folder, reader};
use crate::cluster::process::Processes;
use crate::cluster::rows::{Matrix, bytes, pull_rows};
use pserver_client::{Client, GivenValue, GradientRows, RowStates, StateSlice, TableProgress};
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType::Float32;
use pserver_core::error::Failure;

const SHM: &str = "shm://127.0.0.1:0";
/// Steps before the export of a state, and after its import.
const STEPS: u64 = 4;
/// Rows of a piece of a table.
const PIECE: usize = 37;
/// More rows than are pushed, so that some are absent from an exported state, and are created in a later step.
const HEIGHT: usize = 400;
/// Initial values that a wrong computation does not produce by chance.
const BEGIN: &str = "uniform { low: -0.5 high: 0.5 } seed: 7";

/// A table of each kind of rule: missed updates change no row, change it once for all of them, or change it one by one.
fn tables() -> Vec<Matrix> {
    let rate = "const_lr { learning_rate: 0.05 }";
    let linear = "lr_policy: Linear linear_lr { learning_rate: 0.01 lr_decay_a: 0.001 lr_decay_b: 0.0001 }";
    let table = |name: &str, optimizer: &str, sparse: &str| {
        let settings = format!("{optimizer} {}", if optimizer.contains("lr_policy") { "" } else { rate });
        let mut table = Matrix::new(name, HEIGHT, 3, &settings);
        table.sparse = format!("{BEGIN} {sparse}");
        table
    };
    vec![
        table("adagrad", "optimizer: Adagrad adagrad { }", ""),
        table("adam", &format!("optimizer: Adam adam {{ }} {linear}"), ""),
        table("lazy adam", &format!("optimizer: Adam adam {{ }} {linear}"), "lazy: true"),
        table("decayed", "optimizer: Adam adam { } l2: 0.1", ""),
        table("momentum", "sgd { momentum: 0.9 }", "buckets: 7"),
        table(
            "ftrl",
            "rule: 'state z = 0; state q = 0; z = z + g - (sqrt(q + g*g) - sqrt(q))*w/lr; \
                       q = q + g*g; w = -z*lr/(1 + sqrt(q))'",
            "",
        ),
        table("plain", "optimizer: SGD", ""),
    ]
}

fn job(bind: &'static str) -> Job {
    Job { bind, shards: 2, ..Job::new(2, 1) }
}

fn begin(client: &Client, tables: &[Matrix]) {
    assert!(client.begin_init(&OptimizerSettings::default()).expect("a trainer is elected"));
    tables.iter().for_each(|table| table.declare_sparse(client, &[]).expect("it is declared"));
    client.finish_init().expect("the initialisation ends");
}

/// Rounds, each with a rate of its own.
fn train(client: &Client, tables: &[Matrix], rounds: std::ops::RangeInclusive<u64>) {
    for round in rounds {
        for table in tables {
            let rows = table.rows(0, round);
            // The height is more than the ids that are pushed in early rounds.
            let ids: Vec<u64> = rows.ids.iter().map(|id| id * round.min(2 * STEPS) / (2 * STEPS)).collect();
            let values = bytes(&rows.values);
            let given = GradientRows { name: &table.name, element_type: Float32, ids: &ids, values: &values };
            let rate = if table.name == "plain" { None } else { Some(0.1 / (1.0 + (round / 2) as f64)) };
            client.push_rows(&[given], rate).expect("rows are taken");
        }
    }
}

fn slices(state: &RowStates) -> Vec<StateSlice<'_>> {
    state.tensors.iter().rev().map(|one| StateSlice { name: &one.name, content: &one.content }).collect()
}

/// Ids, weights and states of a piece of a table.
type Piece = (Vec<u64>, Vec<u8>, RowStates);

fn pieces_out(client: &Client, table: &Matrix) -> Vec<Piece> {
    let ids = client.list_rows(&table.name).expect("it is a table");
    let pieces = ids.chunks(PIECE).map(|ids| {
        let weights = pull_rows(client, &table.name, ids, table.width).expect("they are there");
        (ids.to_vec(), weights, client.row_states(&table.name, ids).expect("they have a state"))
    });
    pieces.collect()
}

fn pieces_in(client: &Client, table: &Matrix, pieces: &[Piece]) {
    let name = table.name.as_str();
    for (at, (ids, values, state)) in pieces.iter().enumerate() {
        let rows = GradientRows { name, element_type: Float32, ids, values };
        client.load_with_rows(&[], &[rows]).expect("they are taken");
        let progress = (at + 1 == pieces.len()).then_some(&state.progress);
        client.set_row_states(name, ids, &slices(state), progress).expect("they are taken");
    }
}

/// All rows of a table with their states, absent rows too.
fn all_of(client: &Client, table: &Matrix) -> (Vec<u8>, RowStates) {
    let ids: Vec<u64> = (0..HEIGHT as u64).collect();
    (table.pull_sparse(client).expect("rows are there"), client.row_states(&table.name, &ids).expect("they are there"))
}

fn check(outcome: Result<impl Sized, Failure>, expected: &str) {
    let text = outcome.err().expect(expected).to_string();
    assert!(text.contains(expected), "{text}; expected {expected}");
}

#[test]
fn a_table_goes_on_from_the_state_of_another_to_the_bit() {
    for bind in [TCP, SHM] {
        let tables = tables();
        let first = Local::start(&job(bind));
        let trainer = client(&first.coordinator(), 0);
        begin(&trainer, &tables);
        train(&trainer, &tables, 1..=STEPS);
        let out: Vec<Vec<Piece>> = tables.iter().map(|table| pieces_out(&trainer, table)).collect();
        for (table, pieces) in tables.iter().zip(&out) {
            assert!(pieces.len() > 1 && pieces.iter().map(|one| one.0.len()).sum::<usize>() < HEIGHT, "{}", table.name);
            let progress = &pieces[0].2.progress;
            assert!(pieces.iter().all(|one| one.2.progress == *progress && progress.updates == STEPS));
            let has_rates = matches!(table.name.as_str(), "decayed" | "ftrl");
            assert_eq!(!progress.rates.is_empty(), has_rates, "{}: {progress:?}", table.name);
        }
        let at_once: Vec<_> = tables.iter().map(|table| all_of(&trainer, table)).collect();
        train(&trainer, &tables, STEPS + 1..=2 * STEPS);
        let expected: Vec<_> = tables.iter().map(|table| all_of(&trainer, table)).collect();
        drop(trainer);
        first.stop();

        for elsewhere in [0, 1] {
            // The job has other buckets, and its rows have other values before the import.
            let second = Local::start(&Job { chunk_bytes: 64 * 1024, shards: 1 + elsewhere, ..job(bind) });
            let trainer = client(&second.coordinator(), 0);
            begin(&trainer, &tables);
            train(&trainer, &tables, 1..=u64::from(elsewhere));
            tables.iter().zip(&out).for_each(|(table, pieces)| pieces_in(&trainer, table, pieces));
            for (table, expected) in tables.iter().zip(&at_once) {
                assert!(all_of(&trainer, table) == *expected, "{bind}: what went into \"{}\" comes out", table.name);
            }
            train(&trainer, &tables, STEPS + 1..=2 * STEPS);
            for (table, expected) in tables.iter().zip(&expected) {
                assert!(all_of(&trainer, table) == *expected, "{bind}: \"{}\" goes on as in the other job", table.name);
            }
            second.stop();
        }
    }
}

#[test]
fn rows_without_a_given_state_keep_their_state() {
    let (folder, table) = (folder(), &tables()[1..2]);
    let undisturbed = Local::start(&job(TCP));
    let mut processes = Processes::start(job(TCP).with_checkpoints(folder.path()).with("--journal", "on"));
    let [other, trainer] = [undisturbed.coordinator(), processes.coordinator()].map(|address| client(&address, 0));
    for client in [&other, &trainer] {
        begin(client, table);
        train(client, table, 1..=STEPS);
    }
    let (ids, content) = ((0..5).collect::<Vec<u64>>(), [0x35; 60]);
    let progress = TableProgress { updates: 1000, rates: Vec::new() };
    let states = ["first_moment", "second_moment"].map(|name| StateSlice { name, content: &content });
    trainer.set_row_states("adam", &ids, &states, Some(&progress)).expect("they are taken");
    let (weights, before) = all_of(&other, &table[0]);
    for what in ["when they are set", "after a kill"] {
        let (found, after) = all_of(&trainer, &table[0]);
        assert!(found == weights, "weights stay, also of rows that had missed updates: {what}");
        assert_eq!(after.progress, progress);
        for (one, other) in after.tensors.iter().zip(&before.tensors) {
            assert!(one.content[..60] == content && one.content[60..] == other.content[60..], "{what}");
        }
        for server in 0..2 {
            processes.kill(server);
            processes.start_again(server);
        }
    }
    processes.terminate();
    undisturbed.stop();
}

#[test]
fn states_of_rows_are_of_one_version_while_others_push() {
    // Each element of the state counts the updates, with gradients and without.
    let counting = "rule: 'state c = 0; c = c + 1; w -= lr*g' const_lr { learning_rate: 1 }";
    let table = [Matrix::new("table", HEIGHT, 3, counting)];
    let servers = Local::start(&Job { mode: "async", shards: 2, ..Job::new(2, 2) });
    let [reading, pushing] = [0, 1].map(|trainer| client(&servers.coordinator(), trainer));
    begin(&reading, &table);
    let is_over = AtomicBool::new(false);
    let ids: Vec<u64> = (0..HEIGHT as u64).rev().collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            (1..)
                .take_while(|_| !is_over.load(Ordering::Relaxed))
                .for_each(|round| train(&pushing, &table, round..=round));
        });
        let found: Vec<_> = (0..20).map(|_| reading.row_states("table", &ids)).collect();
        is_over.store(true, Ordering::Relaxed);
        for found in found {
            match found {
                Ok(state) => {
                    let count = (state.progress.updates as f32).to_le_bytes();
                    assert!(state.tensors[0].content.chunks(4).all(|element| element == count));
                }
                Err(failure) => check(Err::<(), _>(failure), "expected no gradients of other trainers meanwhile"),
            }
        }
    });
    assert!(reading.row_states("table", &ids).expect("nobody pushes").progress.updates > 0);
    servers.stop();
}

#[test]
fn states_of_rows_are_set_though_servers_are_killed_meanwhile() {
    for has_checkpoint in [false, true] {
        let (folder, tables) = (folder(), tables());
        let mut processes = Processes::start(job(TCP).with_checkpoints(folder.path()).with("--journal", "on"));
        let trainer = client_with(&processes.coordinator(), 0, Duration::from_secs(30));
        begin(&trainer, &tables);
        train(&trainer, &tables, 1..=2);
        let ids: Vec<u64> = (0..HEIGHT as u64).collect();
        for (round, table) in (0..).zip(&tables) {
            let mut wanted = trainer.row_states(&table.name, &ids).expect("they are there");
            wanted.progress = TableProgress { updates: 1000, rates: vec![(3, Some(0.25)), (9, None)] };
            wanted.tensors.iter_mut().for_each(|one| one.content.fill(0x3D));
            let weights = table.pull_sparse(&trainer).expect("they are there");
            std::thread::scope(|scope| {
                let set = || trainer.set_row_states(&table.name, &ids, &slices(&wanted), Some(&wanted.progress));
                let setting = scope.spawn(set);
                processes.kill(round % 2);
                processes.start_again(round % 2);
                setting.join().expect("the call does not panic").expect("the servers are there again");
            });
            if has_checkpoint {
                trainer.checkpoint().expect("it is on disk");
            }
            for server in 0..2 {
                processes.kill(server);
                processes.start_again(server);
            }
            let mut found = trainer.row_states(&table.name, &ids).expect("they are there");
            if found.progress.rates.is_empty() {
                found.progress.rates.clone_from(&wanted.progress.rates);
            }
            assert!(found == wanted, "\"{}\" with a checkpoint: {has_checkpoint}", table.name);
            assert!(table.pull_sparse(&trainer).expect("they are there") == weights, "\"{}\" stays", table.name);
        }
        train(&trainer, &tables, 3..=3);
        for table in &tables {
            assert_eq!(trainer.row_states(&table.name, &[]).expect("it is there").progress.updates, 1001);
        }
        processes.terminate();
    }
}

#[test]
fn wrong_states_of_rows_are_refused_and_change_nothing() {
    let (servers, tables) = (Local::start(&job(TCP)), tables());
    let trainer = client(&servers.coordinator(), 0);
    begin(&trainer, &tables);
    train(&trainer, &tables, 1..=2);
    let before: Vec<_> = tables.iter().map(|table| all_of(&trainer, table)).collect();
    let whole = [0; 24];
    let one = |name, content| StateSlice { name, content };
    let right = [one("first_moment", &whole[..]), one("second_moment", &whole)];
    let set = |ids: &[u64], states: &[StateSlice<'_>], progress: Option<&TableProgress>| {
        trainer.set_row_states("adam", ids, states, progress)
    };
    check(trainer.row_states("none", &[1]), "unknown parameter \"none\"");
    check(trainer.row_states("adam", &[1, 400]), "row 400 at place 1 of 2; expected ids below 400");
    check(set(&[1, 400], &right, None), "row 400 at place 1 of 2; expected ids below 400");
    check(set(&[1, 1], &right, None), "row 1 is there twice; expected each once");
    check(set(&[1, 2], &right[..1], None), "states [\"first_moment\"]; expected [\"first_moment\", \"second_moment\"]");
    check(set(&[1], &right, None), "24 bytes of state \"first_moment\"; expected 12");
    let progress = |updates, rates| TableProgress { updates, rates };
    let much = progress(u64::MAX, Vec::new());
    check(set(&[1, 2], &right, Some(&much)), "a state after 18446744073709551615 updates; expected at most");
    let late = progress(5, vec![(6, Some(0.1))]);
    check(set(&[1, 2], &right, Some(&late)), "rates of ascending updates up to 5 are expected");
    let wrong = progress(5, vec![(1, Some(f64::NAN))]);
    check(set(&[1, 2], &right, Some(&wrong)), "rate NaN from update 1 on; expected a finite number");
    check(
        reader(&servers.coordinator()).set_row_states("adam", &[1, 2], &right, None),
        "a reader may pull and nothing",
    );
    let rows = |ids, values| [GradientRows { name: "adam", element_type: Float32, ids, values }];
    check(trainer.load_with_rows(&[], &rows(&[3, 3], &whole)), "row 3 is there twice");
    check(trainer.load_with_rows(&[], &rows(&[3], &whole)), "24 bytes");
    let dense = GivenValue { name: "adam", element_type: Float32, shape: &[2, 3], content: &whole };
    check(trainer.load_with_rows(&[dense], &rows(&[3, 4], &whole)), "\"adam\" is sparse");
    for (table, before) in tables.iter().zip(&before) {
        assert!(all_of(&trainer, table) == *before, "\"{}\"", table.name);
    }
    let seen = reader(&servers.coordinator()).row_states("adam", &[7]).expect("a reader may pull");
    assert_eq!(seen.progress.updates, 2);
    servers.stop();
}

#[test]
fn saved_tables_are_loaded_in_both_forms() {
    let folder = folder();
    let servers = Local::start(&job(TCP).with("--model-dir", folder.path().display()));
    let trainer = client(&servers.coordinator(), 0);
    let mut endless = Matrix::new("endless", HEIGHT, 3, "optimizer: Adagrad adagrad { } const_lr { learning_rate: 1 }");
    let tables = [tables().remove(0), endless.clone()];
    assert!(trainer.begin_init(&OptimizerSettings::default()).expect("a trainer is elected"));
    tables[0].declare_sparse(&trainer, &[]).expect("it is declared");
    // Without a height it is saved as ids and rows.
    endless.settings = format!("{} sparse {{ rows: 1000 width: 3 {BEGIN} }}", endless.settings);
    let settings = crate::cluster::rows::settings(&endless.settings);
    trainer.init_param("endless", Float32, &[], &[], &settings).expect("it is declared");
    trainer.finish_init().expect("the initialisation ends");
    train(&trainer, &tables, 1..=2);
    let saved = tables.each_ref().map(|table| all_of(&trainer, table).0);
    let (path, _) = trainer.save_model("tables.safetensors").expect("it is on disk");
    train(&trainer, &tables, 3..=STEPS);
    let later = tables.each_ref().map(|table| all_of(&trainer, table).1);
    assert!(saved != tables.each_ref().map(|table| all_of(&trainer, table).0));
    let mut names = trainer.load_file(Path::new(&path)).expect("it is the job's model");
    names.sort_unstable();
    assert_eq!(names, ["adagrad", "endless"]);
    for (at, table) in tables.iter().enumerate() {
        let (found, states) = all_of(&trainer, table);
        let ids = trainer.list_rows(&table.name).expect("it is a table");
        for id in ids.iter().map(|id| usize::try_from(*id).expect("it is small")) {
            // A row of the third round is not in a list of rows that was saved before, and stays.
            let is_same = found[12 * id..][..12] == saved[at][12 * id..][..12];
            assert!(is_same || table.name == "endless", "row {id} of \"{}\" is as it was saved", table.name);
        }
        assert!(states == later[at], "states stay");
    }
    servers.stop();
}
