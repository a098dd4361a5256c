//! Calls by rows that are started alone, and pushes of rows that fetch, do what blocking calls do, each exactly once.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::cluster::job::{DEADLINE, Job, Local, TCP, client, client_with, folder, reader};
use crate::cluster::process::Processes;
use crate::cluster::rows::{Matrix, bytes, floats, pull_rows};
use crate::cluster::seeded::SeededPrng;
use pserver_client::{Client, DestinationRows, GradientRows};
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType::Float32;
use pserver_core::error::{CallEnd, Failure};

const TRAINERS: u32 = 2;
const ROUNDS: u64 = 5;
const SHM: &str = "shm://127.0.0.1:0";
/// The deadline of a call that is meant to fail.
const SHORT: Duration = Duration::from_secs(2);
/// A rule whose result depends on the order of the rounds, and whose rows change without gradients too.
const MOMENTUM: &str = "sgd { momentum: 0.9 } const_lr { learning_rate: 0.05 }";
/// Every pushed element is added.
const COUNT: &str = "const_lr { learning_rate: 1.0 }";

fn tables(optimizer: &str) -> Vec<Matrix> {
    let sizes = [("narrow", 40, 3), ("wide", 300, 16), ("one row", 1, 5)];
    sizes.into_iter().map(|(name, height, width)| Matrix::new(name, height, width, optimizer)).collect()
}

fn begin(client: &Client, tables: &[Matrix], is_zero: bool) {
    if client.begin_init(&OptimizerSettings::default()).expect("a trainer is elected") {
        for table in tables {
            let initial = table.initial();
            let initial = if is_zero { vec![0; initial.len()] } else { initial };
            table.declare_sparse(client, &initial).expect("it is declared");
        }
        client.finish_init().expect("the initialisation ends");
    }
}

/// Rows to push of every table, their values in bytes.
type Given = Vec<(Vec<u64>, Vec<u8>)>;

fn step(tables: &[Matrix], trainer: u32, round: u64) -> Given {
    let rows = tables.iter().map(|table| table.rows(trainer, round));
    rows.map(|rows| (rows.ids, bytes(&rows.values))).collect()
}

fn gradients<'a>(tables: &'a [Matrix], given: &'a Given) -> Vec<GradientRows<'a>> {
    let row = |(table, (ids, values)): (&'a Matrix, &'a (Vec<u64>, Vec<u8>))| GradientRows {
        name: &table.name,
        element_type: Float32,
        ids,
        values,
    };
    tables.iter().zip(given).map(row).collect()
}

/// Ids to fetch of every table, some of them twice, and room for their rows.
fn wanted(tables: &[Matrix], round: u64) -> Given {
    let mut prng = SeededPrng::new(round);
    let one = |table: &Matrix| {
        let ids: Vec<u64> = (0..table.height + 3).map(|_| prng.below(table.height) as u64).collect();
        let room = vec![0xAA; ids.len() * table.width * 4];
        (ids, room)
    };
    tables.iter().map(one).collect()
}

fn places<'a>(tables: &'a [Matrix], wanted: &'a mut Given) -> Vec<DestinationRows<'a>> {
    let row = |(table, (ids, values)): (&'a Matrix, &'a mut (Vec<u64>, Vec<u8>))| DestinationRows {
        name: &table.name,
        ids,
        values,
    };
    tables.iter().zip(wanted).map(row).collect()
}

/// A step of a trainer: pushes rows of a round, and returns the rows of that round.
type Step = fn(&Client, &[Matrix], u32, u64) -> Given;

fn blocking(client: &Client, tables: &[Matrix], trainer: u32, round: u64) -> Given {
    let (given, mut rows) = (step(tables, trainer, round), wanted(tables, round));
    client.push_rows(&gradients(tables, &given), None).expect("rows are taken");
    client.pull_rows(&mut places(tables, &mut rows)).expect("rows are there");
    rows
}

fn combined(client: &Client, tables: &[Matrix], trainer: u32, round: u64) -> Given {
    let (given, mut rows) = (step(tables, trainer, round), wanted(tables, round));
    client
        .push_pull_rows(&gradients(tables, &given), None, &mut places(tables, &mut rows))
        .expect("rows are taken and there");
    rows
}

/// A call for each table, the last one first; the pushed memory is overwritten at once.
fn started(client: &Client, tables: &[Matrix], trainer: u32, round: u64) -> Given {
    let (mut given, mut rows) = (step(tables, trainer, round), wanted(tables, round));
    let done = client.scope(|calls| {
        let pushed: Result<Vec<_>, Failure> =
            gradients(tables, &given).into_iter().rev().map(|one| calls.push_rows(&[one], None)).collect();
        given.iter_mut().for_each(|(_, values)| values.fill(0xEE));
        let pulled: Result<Vec<_>, Failure> =
            places(tables, &mut rows).into_iter().map(|place| calls.pull_rows(vec![place])).collect();
        pushed?.into_iter().chain(pulled?).rev().try_for_each(pserver_client::Pending::wait)
    });
    done.expect("rows are taken and there");
    rows
}

fn started_and_combined(client: &Client, tables: &[Matrix], trainer: u32, round: u64) -> Given {
    let (given, mut rows) = (step(tables, trainer, round), wanted(tables, round));
    let done = client.scope(|calls| {
        let all = gradients(tables, &given).into_iter().zip(places(tables, &mut rows));
        for (given, wanted) in all {
            // The scope waits for the call.
            let _ = calls.push_pull_rows(&[given], None, vec![wanted])?;
        }
        Ok(())
    });
    done.expect("rows are taken and there");
    rows
}

/// The rows that every trainer sees in every round, with servers of its own.
fn train(bind: &'static str, step: Step) -> Vec<Vec<Given>> {
    let job = Job { bind, shards: 2, chunk_bytes: 4096, ..Job::new(2, TRAINERS) };
    let (servers, tables) = (Local::start(&job), tables(MOMENTUM));
    let clients: Vec<Client> = (0..TRAINERS).map(|trainer| client(&servers.coordinator(), trainer)).collect();
    clients.iter().for_each(|client| begin(client, &tables, false));
    let seen = std::thread::scope(|scope| {
        let run = |(trainer, client)| {
            let tables = &tables;
            scope.spawn(move || (1..=ROUNDS).map(|round| step(client, tables, trainer, round)).collect())
        };
        let running: Vec<_> = (0..).zip(&clients).map(run).collect();
        running.into_iter().map(|one| one.join().expect("training goes well")).collect()
    });
    drop(clients);
    servers.stop();
    seen
}

#[test]
fn started_and_combined_row_calls_equal_blocking_calls() {
    let expected = train(TCP, blocking);
    assert_ne!(expected[0][0], expected[0][1], "training changes rows");
    for bind in [TCP, SHM] {
        for step in [combined, started, started_and_combined] {
            assert!(train(bind, step) == expected, "{bind}: what every trainer sees");
        }
    }
}

#[test]
fn a_fetch_that_fails_is_repeated_with_its_push_and_nothing_is_applied_twice() {
    for bind in [TCP, SHM] {
        let servers = Local::start(&Job { bind, ..Job::new(1, 2) });
        let tables = [Matrix::new("table", 4, 2, COUNT)];
        let hasty = client_with(&servers.coordinator(), 0, SHORT);
        let other = client(&servers.coordinator(), 1);
        begin(&hasty, &tables, true);
        let (given, mut rows) = (vec![(vec![1, 1, 3], bytes(&[-1.0; 6]))], vec![(vec![1, 0, 3], vec![0xAA; 24])]);
        let given_up = hasty.push_pull_rows(&gradients(&tables, &given), None, &mut places(&tables, &mut rows));
        let failure = given_up.expect_err("the round waits for the other trainer");
        assert_eq!(failure.end(), CallEnd::Timeout, "{failure}");
        assert!(failure.to_string().contains("trainer 1"), "{failure}");
        assert_eq!(rows[0].1, [0xAA; 24], "the places are as they were");
        other.push_rows(&gradients(&tables, &vec![(vec![0], bytes(&[-2.0; 2]))]), None).expect("rows are taken");
        hasty
            .push_pull_rows(&gradients(&tables, &given), None, &mut places(&tables, &mut rows))
            .expect("the round is closed");
        assert_eq!(floats(&rows[0].1), [1.0, 1.0, 1.0, 1.0, 0.5, 0.5], "the mean of both trainers, once");
        servers.stop();
    }
}

#[test]
fn wrong_rows_are_refused_before_any_are_sent() {
    let servers = Local::start(&Job::new(1, 1));
    let (client, tables) = (client(&servers.coordinator(), 0), tables(COUNT));
    begin(&client, &tables, true);
    let (given, mut rows) = (step(&tables, 0, 1), wanted(&tables, 1));
    let check = |outcome: Result<(), Failure>, expected: &str| {
        let text = outcome.expect_err(expected).to_string();
        assert!(text.contains(expected), "{text}; expected {expected}");
    };
    let mut reversed = places(&tables, &mut rows);
    reversed.reverse();
    check(
        client.push_pull_rows(&gradients(&tables, &given), None, &mut reversed),
        "takes the same parameters, in the same order, on both sides",
    );
    let mut short = vec![0; 5];
    let one = |values| vec![DestinationRows { name: "wide", ids: &[0], values }];
    check(
        client.push_pull_rows(&gradients(&tables, &given)[1..2], None, &mut one(&mut short)),
        "\"wide\": a destination of 5 bytes for 1 rows; expected 64",
    );
    let mut long = vec![0; 64];
    check(
        client.push_pull_rows(&gradients(&tables, &given)[1..2], Some(f64::NAN), &mut one(&mut long)),
        "learning rate NaN",
    );
    let outside = GradientRows { name: "narrow", element_type: Float32, ids: &[40], values: &bytes(&[0.0; 3]) };
    check(client.scope(|calls| calls.push_rows(&[outside], None).map(|_| ())), "40");
    let mut place = vec![0; 12];
    let unknown = vec![DestinationRows { name: "no such", ids: &[0], values: &mut place }];
    check(client.scope(|calls| calls.pull_rows(unknown).map(|_| ())), "unknown parameter \"no such\"");
    for table in &tables {
        let values = table.pull_sparse(&client).expect("rows are there");
        assert!(values.iter().all(|byte| *byte == 0), "nothing was sent of \"{}\"", table.name);
    }
    servers.stop();
}

/// Steps until `until`, each with rows pushed and others fetched, and reports each. Failed calls are repeated.
/// Returns the number of steps.
fn count_up(client: &Client, table: &Matrix, until: Instant, reports: &mpsc::Sender<()>) -> u64 {
    let (ids, ones) = ([1, 2, 7], bytes(&vec![-1.0; 3 * table.width]));
    let mut steps = 0;
    while Instant::now() < until {
        let mut values = vec![0; 2 * table.width * 4];
        let given = [GradientRows { name: &table.name, element_type: Float32, ids: &ids, values: &ones }];
        let repeated = (0..50).find_map(|_| {
            let mut into = [DestinationRows { name: &table.name, ids: &[7, 0], values: &mut values }];
            match client.push_pull_rows(&given, None, &mut into) {
                Ok(()) => Some(()),
                Err(failure) => {
                    assert_ne!(failure.end(), CallEnd::Refused, "{failure}");
                    None
                }
            }
        });
        repeated.expect("a server that is started again answers");
        steps += 1;
        let _ = reports.send(());
        let expected = vec![f32::from(u16::try_from(steps).expect("few steps")); table.width];
        assert_eq!(floats(&values)[..table.width], expected, "the fetched row has this trainer's pushes");
    }
    steps
}

#[test]
fn rows_are_pushed_and_fetched_once_while_servers_are_killed() {
    for (mode, bind) in [("async", TCP), ("sync", TCP), ("async", SHM)] {
        let folder = folder();
        let job = Job { mode, bind, shards: 2, ..Job::new(2, 1) };
        let job = job.with_checkpoints(folder.path()).with("--journal", "on");
        let mut processes = Processes::start(job);
        let table = Matrix::new("table", 40, 16, COUNT);
        // Calls end while a server is away, and are repeated.
        let client = client_with(&processes.coordinator(), 0, Duration::from_millis(400));
        let patient = client_with(&processes.coordinator(), 0, DEADLINE);
        begin(&patient, std::slice::from_ref(&table), true);
        drop(patient);
        let (mut prng, client, table) = (SeededPrng::new(7), &client, &table);
        let (report, reports) = mpsc::channel();
        let steps = std::thread::scope(|scope| {
            let until = Instant::now() + Duration::from_secs(2);
            let counting = scope.spawn(move || count_up(client, table, until, &report));
            for _ in 0..4 {
                // The kill comes at a random time within a call, not only between two calls.
                for _ in 0..1 + prng.below(30) {
                    let _ = reports.recv_timeout(DEADLINE);
                }
                let server = prng.below(2);
                processes.kill(server);
                processes.start_again(server);
            }
            counting.join().expect("training goes on")
        });
        let found = floats(&pull_rows(&reader(&processes.coordinator()), "table", &[0, 1, 2, 7], 16).expect("rows"));
        let steps = f32::from(u16::try_from(steps).expect("few steps"));
        let expected: Vec<f32> = [0.0, steps, steps, steps].into_iter().flat_map(|value| [value; 16]).collect();
        assert_eq!(found, expected, "{mode}, {bind}: every step once");
        processes.terminate();
    }
}
