use std::collections::BTreeMap;

use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType::Float32;
use pserver_core::error::Failure;
use pserver_core::prng::Prng;
use pserver_core::wire::Kind;

use super::servers::TestJob;
use crate::{Client, DestinationRows, GradientRows, TableProgress};

const WIDTH: usize = 2;
const TABLE: &str = "sparse { height: 1000 width: 2 buckets: 5 } sgd { } const_lr { learning_rate: 1.0 }";

/// A job with a table of zeros, and its client.
fn table() -> (TestJob, Client) {
    table_with(1, TABLE)
}

/// The same of so many trainers, with this configuration.
fn table_with(trainers: u32, config: &str) -> (TestJob, Client) {
    let job = TestJob::start(2, 2, trainers);
    let client = job.client(0);
    let settings = OptimizerSettings::from_text(config).expect("it is right");
    assert!(client.begin_init(&OptimizerSettings::from_text("").expect("it is right")).expect("it joins"));
    client.init_param("rows", Float32, &[1000, WIDTH as u64], &[], &settings).expect("it is right");
    client.finish_init().expect("every shard takes it");
    (job, client)
}

fn push(client: &Client, ids: &[u64], values: &[[f32; WIDTH]]) -> Result<(), Failure> {
    let values = bytemuck::cast_slice(values);
    client.push_rows(&[GradientRows { name: "rows", element_type: Float32, ids, values }], None)
}

fn pull(client: &Client, ids: &[u64]) -> Vec<[f32; WIDTH]> {
    let mut values = vec![[f32::NAN; WIDTH]; ids.len()];
    let content = bytemuck::cast_slice_mut(&mut values);
    client.pull_rows(&mut [DestinationRows { name: "rows", ids, values: content }]).expect("rows are there");
    values
}

#[test]
fn rows_are_summed_by_id_and_come_back_in_the_order_asked_for() {
    let (_job, client) = table();
    let mut prng = Prng(11);
    let mut expected = BTreeMap::<u64, [f32; WIDTH]>::new();
    for _ in 0..20 {
        let ids: Vec<u64> = (0..1 + prng.index(50)).map(|_| prng.below(40)).collect();
        // Whole numbers, so that sums are exact in any order.
        let values: Vec<[f32; WIDTH]> =
            ids.iter().map(|_| [prng.index(9), prng.index(9)].map(|one| one as f32)).collect();
        push(&client, &ids, &values).expect("a round");
        for (id, value) in ids.iter().zip(&values) {
            let row = expected.entry(*id).or_default();
            row.iter_mut().zip(value).for_each(|(sum, one)| *sum -= one);
        }
        let asked: Vec<u64> = (0..60).map(|_| prng.below(45)).collect();
        let rows: Vec<_> = asked.iter().map(|id| expected.get(id).copied().unwrap_or_default()).collect();
        assert_eq!(pull(&client, &asked), rows);
    }
    assert_eq!(client.list_rows("rows").expect("they are there"), expected.into_keys().collect::<Vec<_>>());
}

#[test]
fn a_trainer_whose_rows_came_too_late_goes_on_with_the_open_round() {
    // So few buckets that each comes in several parts.
    let table = TABLE.replace("buckets: 5", "buckets: 2");
    let (job, first) = table_with(2, &format!("{table} backup_trainers: 1"));
    let late = job.client(1);
    let ids: Vec<u64> = (0..1000).collect();
    let ones = vec![[1.0; WIDTH]; ids.len()];
    push(&late, &ids, &ones).expect("the first round");
    for _ in 0..4 {
        push(&first, &ids, &ones).expect("a round");
    }
    assert_eq!(pull(&first, &[7]), [[-4.0; WIDTH]], "the first of its gradients was late");
    push(&late, &ids, &ones).expect("it is dropped");
    assert_eq!(pull(&late, &[999]), [[-4.0; WIDTH]]);
    push(&late, &ids, &ones).expect("it is of the open round");
    assert_eq!(pull(&late, &[999]), [[-5.0; WIDTH]]);
    push(&first, &[3], &[[1.0; WIDTH]]).expect("it is dropped");
    push(&first, &[3], &[[1.0; WIDTH]]).expect("it is of the open round");
    assert_eq!(pull(&first, &[3, 4]), [[-6.0; WIDTH], [-5.0; WIDTH]]);
}

#[test]
fn counts_of_updates_that_are_set_and_read_are_no_rounds() {
    let (_job, client) = table();
    push(&client, &[1], &[[1.0; WIDTH]]).expect("a round");
    client
        .set_row_states("rows", &[], &[], Some(&TableProgress { updates: 1000, rates: Vec::new() }))
        .expect("it fits");
    push(&client, &[1], &[[1.0; WIDTH]]).expect("a round");
    assert!(client.row_states("rows", &[1]).expect("it is there").progress.updates > 1000);
    push(&client, &[1], &[[1.0; WIDTH]]).expect("a round");
    assert_eq!(pull(&client, &[1]), [[-3.0; WIDTH]]);
}

#[test]
fn a_row_beyond_the_table_is_refused_before_anything_is_sent() {
    let (job, client) = table();
    push(&client, &[3], &[[1.0; WIDTH]]).expect("a round");
    job.take_seen(Kind::Push);
    let text = push(&client, &[3, 1000], &[[1.0; WIDTH]; 2]).expect_err("there are 1000 rows").to_string();
    assert!(["\"rows\"", "1000"].iter().all(|word| text.contains(word)), "{text}");
    let text = push(&client, &[3, 4], &[[1.0; WIDTH]]).expect_err("a row is missing").to_string();
    assert!(["\"rows\"", "8", "16"].iter().all(|word| text.contains(word)), "{text}");
    assert_eq!(job.take_seen(Kind::Push), []);
    assert_eq!(pull(&client, &[3, 4]), [[-1.0; WIDTH], [0.0; WIDTH]]);
}
