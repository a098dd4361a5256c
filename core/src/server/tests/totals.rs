//! Totals: a round between its last gradient and the number that the trainers compute from its share.

use std::sync::Arc;

use super::script::{Script, check};
use super::stage::{Parcel, Plan, Stage, id};
use crate::checkpoint::Storage;
use crate::checkpoint::storage::InMemory;
use crate::config::{Merge, Mode};
use crate::dtype::ElementType::{Float32, Float64};
use crate::ids::ChunkId;
use crate::prng::Prng;
use crate::wire::{Kind, RowsPart};

const CLIPPED: &str = "optimizer: SGD const_lr { learning_rate: 1 } stage: 'g = g * total(sum(g * g)); update'";
const SHARE: &str = "algorithm: 'sum' total_part: Share";
const TOTAL: &str = "algorithm: 'sum' total_part: Total";

/// A parameter of two chunks, `w`, the second of one element, whose share is `s` and total `t`, beside one without.
fn plan(trainers: u32) -> Plan {
    Plan::new(Mode::Sync, Merge::Sum, trainers)
        .with("w", Float32, 1025, CLIPPED)
        .with("s", Float64, 1, SHARE)
        .with("t", Float64, 1, TOTAL)
        .with("v", Float32, 2, "optimizer: SGD const_lr { learning_rate: 1 }")
}

#[test]
fn a_round_publishes_its_share_and_is_updated_with_the_total() {
    check(
        plan(2),
        "pull 0 1 s ->
         pull 1 1 w ->
         push 0 1 w=1 w.1=1 v=1 -> 0 done w@1 w.1@1 v@1
         push 1 1 w=2 w.1=1 v=1 -> 1 done w@1 w.1@1 v@1 & 0 value s@1=9220
         show w v t -> w@0=0 & v@1=-2 & t@0=0
         push 0 1 t=0.5 -> 0 done t@1 & 1 value w@1=-1.5
         push 1 1 t=0.5 -> 1 done t@1
         show w w.1 t s -> w@1=-1.5 & w.1@1=-1 & t@1=0.5 & s@1=9220
         pull 1 1 s -> 1 value s@1=9220
         push 1 2 w=1 w.1=0 -> 1 done w@2 w.1@2
         pull 1 2 s ->
         push 0 2 w=1 w.1=0 -> 0 done w@2 w.1@2 & 1 value s@2=4096
         push 1 2 t=2 -> 1 done t@2
         push 0 2 t=2 -> 0 done t@2
         show w w.1 -> w@2=-5.5 & w.1@2=-1",
    );
}

#[test]
fn a_round_without_any_gradient_has_a_share_of_zero_and_is_no_update() {
    check(
        plan(2),
        "push 0 1 w=none w.1=none -> 0 done w@1 w.1@1
         push 1 1 w=none w.1=none -> 1 done w@1 w.1@1
         pull 0 1 s -> 0 value s@1=0
         push 0 1 t=3 -> 0 done t@1
         push 1 1 t=3 -> 1 done t@1
         push 0 2 w=1 w.1=0 -> 0 done w@2 w.1@2
         push 1 2 w=none w.1=none -> 1 done w@2 w.1@2
         pull 0 2 s -> 0 value s@2=1024
         push 0 2 t=1 -> 0 done t@2
         push 1 2 t=1 -> 1 done t@2
         show w w.1 -> w@2=-1 & w.1@2=0",
    );
}

#[test]
fn a_total_without_its_number_is_refused() {
    check(
        plan(1),
        "push 0 1 w=1 w.1=1 -> 0 done w@1 w.1@1
         push 0 1 t=none -> 0 error Invalid: parameter \"t\", a total: no number; expected 8 bytes of float64
         void 0 1 t=none -> 0 error Invalid: parameter \"t\", a total: no number; expected 8 bytes of float64
         void 0 1 t=2 -> 0 error Invalid: parameter \"t\", a total: a void push; expected 8 bytes of float64
         push 0 1 t=1 -> 0 done t@1
         show w -> w@1=-1",
    );
}

#[test]
fn the_share_is_of_the_round_that_was_complete_before_a_rejoin() {
    check(
        plan(2),
        "leave 1 -> 1 done
         push 0 1 w=1 w.1=1 -> 0 done w@1 w.1@1
         show s -> s@1=1025
         reborn 1
         push 1 1 w=5 w.1=5 ->
         push 1 1 t=1 -> 1 done t@1 & 1 done w@1 w.1@1
         show w -> w@1=-1
         push 0 1 t=1 -> 0 done t@1",
    );
}

#[test]
fn a_set_is_applied_after_the_update_whose_share_is_published() {
    check(
        plan(1),
        "push 0 1 w=1 w.1=1 -> 0 done w@1 w.1@1
         set 0 w=7 ->
         show w -> w@0=0
         push 0 1 t=1 -> 0 done t@1 & 0 done w@1
         show w w.1 -> w@1=7 & w.1@1=-1",
    );
}

#[test]
fn a_total_before_its_share_waits_and_the_lowest_ranks_number_counts() {
    check(
        plan(2),
        "push 1 1 t=3 -> 1 done t@1
         push 0 1 t=0.5 -> 0 done t@1
         push 1 2 t=4 ->
         show t s -> t@0=0 & s@0=0
         push 0 1 w=1 w.1=1 -> 0 done w@1 w.1@1
         push 1 1 w=1 w.1=1 -> 1 done w@1 w.1@1 & 1 done t@2
         show w t s -> w@1=-1 & t@1=0.5 & s@1=4100",
    );
}

#[test]
fn an_invalid_total_is_refused_and_changes_nothing() {
    check(
        plan(2),
        "push 0 1 s=1 -> 0 error Invalid: parameter \"s\": trainer 0 sent to it; expected none, because*
         set 0 s=1 -> 0 error Invalid: parameter \"s\": trainer 0 sent to it; expected none, because*
         set 0 t=1 -> 0 error Invalid: parameter \"t\": trainer 0 sent to it; expected a push of its round's number
         push 0 1 t=nan -> 0 error Invalid: the gradient of trainer 0 for parameter \"t\" has NaN*
         push 0 1 t=inf -> 0 error Invalid: the gradient of trainer 0 for parameter \"t\" has inf*
         push 0 3 t=1 -> 0 error Invalid: parameter \"t\" chunk 0: trainer 0 sent round 3 while round 1 is open*
         push 0 0 t=1 -> 0 done t@0
         push 0 1 w=1 w.1=1 -> 0 done w@1 w.1@1
         push 1 1 w=1 w.1=1 -> 1 done w@1 w.1@1
         push 1 1 t=1 -> 1 done t@1
         show w t -> w@1=-2 & t@1=1",
    );
}

#[test]
fn an_expired_wait_names_the_missing_trainer_or_total() {
    check(
        plan(2),
        "push 0 1 w=1 w.1=1 -> 0 done w@1 w.1@1
         pull 0 1 s ->
         ask 0 -> 0 parameter \"s\" chunk 0: round 1 waits for trainer 1*
         gone 1 ->
         wait 1999 ->
         wait 1 -> 0 error Deadline: parameter \"s\" chunk 0: round 1 waits for trainer 1 (host h, pid 1; connection *
         reborn 1
         push 1 1 w=1 w.1=1 -> 1 done w@1 w.1@1
         pull 0 1 w ->
         gone 1 ->
         wait 3000 ->
         wait 57000 -> 0 error Deadline: * round 1 waits for its total, which a trainer sends
         push 0 1 t=1 -> 0 done t@1
         show w -> w@1=-2",
    );
}

#[test]
fn a_share_without_memory_is_computed_when_there_is_some() {
    let mut script = Script::new(Stage::serving(plan(2)));
    script.run(
        "push 0 1 w=1 w.1=1 -> 0 done w@1 w.1@1
         pull 0 1 s ->
         starve
         spare w w.1
         push 1 1 w=1 w.1=1 -> 1 done w@1 w.1@1
         show s w -> s@0=0 & w@0=0
         feed -> 0 value s@1=4100
         show s w -> s@1=4100 & w@0=0
         push 0 1 t=1 -> 0 done t@1
         show w -> w@1=-2",
    );
}

fn refused(plan: Plan, expected: &str) {
    let mut stage = Stage::empty(plan);
    stage.begin();
    let found = stage.errors().join("; ");
    assert!(found.contains(expected), "found {found:?}; expected {expected:?}");
}

#[test]
fn parameters_that_form_no_total_are_refused_by_name() {
    let new = |mode| Plan::new(mode, Merge::Mean, 2).with("w", Float32, 2, CLIPPED);
    for mode in [Mode::Async, Mode::Staleness { bound: 2 }] {
        let plan = new(mode).with("s", Float64, 1, SHARE).with("t", Float64, 1, TOTAL);
        refused(plan, &format!("parameter \"w\": its stage has total in a job in {mode:?}; expected mode sync"));
    }
    refused(new(Mode::Sync), "parameter \"w\": its stage has total; expected its share and its total after it");
    let exchanged = new(Mode::Sync).with("t", Float64, 1, TOTAL).with("s", Float64, 1, SHARE);
    refused(exchanged, "parameter \"w\": its stage has total; expected its share and its total after it");
    let alone = Plan::new(Mode::Sync, Merge::Mean, 2).with("s", Float64, 1, SHARE);
    refused(alone, "parameter \"s\": a part of a total (Share) of no parameter here; expected one before it");
    let wide = new(Mode::Sync).with("s", Float64, 1, SHARE).with("t", Float64, 2, TOTAL);
    refused(wide, "parameter \"t\": a part of a total; expected one float64 with the algorithm sum");
    let other = new(Mode::Sync).with("s", Float64, 1, "optimizer: SGD total_part: Share").with("t", Float64, 1, TOTAL);
    refused(other, "parameter \"s\": a part of a total; expected one float64 with the algorithm sum");
}

/// Runs `before` on a shard that is then killed, and `after` on the shard restored from checkpoint and journal.
fn check_restart(before: &str, has_checkpoint: bool, after: &str) {
    let storage = InMemory::new();
    let on_disk: Arc<dyn Storage> = Arc::new(storage.clone());
    let mut stage = Stage::empty(plan(2));
    stage.restore(&on_disk, false);
    stage.initialise();
    let mut script = Script::new(stage);
    script.run(before);
    if has_checkpoint {
        script.stage.checkpoint(1);
    }
    let mut stage = Stage::empty(plan(2));
    let on_disk: Arc<dyn Storage> = Arc::new(storage.copy());
    stage.restore(&on_disk, false);
    stage.actors = script.stage.actors.clone();
    for (trainer, actor) in script.stage.actors.clone() {
        stage.connect(trainer, actor.incarnation);
    }
    Script::new(stage).run(after);
}

#[test]
fn a_restart_keeps_the_share_and_the_waiting_round() {
    let before = "leave 1 -> 1 done
                  push 0 1 w=1 w.1=1 -> 0 done w@1 w.1@1
                  show s w t -> s@1=1025 & w@0=0 & t@0=0";
    let after = "pull 0 1 s -> 0 value s@1=1025
                 reborn 1
                 push 1 1 w=5 w.1=5 ->
                 push 0 1 t=2 -> 0 done t@1 & 1 done w@1 w.1@1
                 show s w t -> s@1=1025 & w@1=-2 & t@1=2";
    check_restart(before, false, after);
    check_restart(before, true, after);
    let updated = format!("{before}\n push 0 1 t=2 -> 0 done t@1");
    let after = "push 0 1 t=3 -> 0 done t@1
                 pull 0 1 s -> 0 value s@1=1025
                 show w t -> w@1=-2 & t@1=2";
    check_restart(&updated, false, after);
    check_restart(&updated, true, after);
}

/// A table, and a dense parameter with the same rows.
const HEIGHT: u64 = 40;
const WIDTH: usize = 3;
const ADAM: &str = "optimizer: Adam adam {} const_lr { learning_rate: 0.1 } l2: 0.01 regularizer: Coupled \
                    stage: 'g = g * min(12 / (total(sum(g * g)) + 1e-6), 1); update'";
const ROWS: &str = "optimizer: Adam adam {} const_lr { learning_rate: 0.1 } l2: 0.01 regularizer: Coupled \
                    stage: 'g = g * min(12 / (total(sum(g * g)) + 1e-6), 1); update' \
                    sparse { height: 40 width: 3 buckets: 3 constant { value: 0 } }";

/// A dense parameter (0 to 2, with its numbers) and a table of the same rows (3 to 5).
fn dense_and_rows() -> Plan {
    Plan::new(Mode::Sync, Merge::Mean, 2)
        .with("w", Float32, HEIGHT * WIDTH as u64, ADAM)
        .with("s", Float64, 1, SHARE)
        .with("t", Float64, 1, TOTAL)
        .with("rows", Float32, WIDTH as u64, ROWS)
        .with("rs", Float64, 3, SHARE)
        .with("rt", Float64, 3, TOTAL)
}

fn value(stage: &Stage, parameter: u32, chunk: u64) -> Vec<u8> {
    let contents = stage.contents();
    contents.into_iter().find(|(one, ..)| *one == id(parameter, chunk)).expect("the shard holds it").2
}

fn number(stage: &Stage, parameter: u32, chunk: u64) -> f64 {
    f64::from_le_bytes(value(stage, parameter, chunk).try_into().expect("one number"))
}

/// The gradients of some rows: for the dense parameter and, by bucket, for the table.
fn gradients(prng: &mut Prng, plan: &Plan) -> Vec<(ChunkId, Vec<u8>)> {
    let buckets = plan.parameters[3].buckets.expect("it is a table");
    let mut dense = vec![0.0_f32; usize::try_from(HEIGHT).expect("few") * WIDTH];
    let mut parts: [(Vec<u8>, Vec<u8>); 3] = Default::default();
    for _ in 0..prng.below(12) {
        let row = prng.below(HEIGHT);
        let (ids, values) = &mut parts[buckets.of(row) as usize];
        ids.extend(row.to_le_bytes());
        let row = usize::try_from(row).expect("few");
        for element in &mut dense[row * WIDTH..][..WIDTH] {
            let one = f32::from(i16::try_from(prng.below(2001)).expect("it is small") - 1000) / 128.0;
            *element += one;
            values.extend(one.to_le_bytes());
        }
    }
    let dense = dense.into_iter().flat_map(f32::to_le_bytes).collect();
    let rows = (0..).zip(parts).map(|(bucket, (ids, values))| {
        let payload = [RowsPart::ONLY.encode().as_slice(), &ids, &values].concat();
        (id(3, bucket), if ids.is_empty() { Vec::new() } else { payload })
    });
    std::iter::once((id(0, 0), dense)).chain(rows).collect()
}

#[test]
fn a_table_with_a_total_equals_a_dense_parameter_with_a_total() {
    let plan = dense_and_rows();
    let buckets = plan.parameters[3].buckets.expect("it is a table");
    let mut stage = Stage::serving(plan.clone());
    let mut prng = Prng(5);
    let mut clipped = 0;
    for round in 1..=30 {
        for trainer in [0, 1] {
            let entries = gradients(&mut prng, &plan).into_iter().map(|(id, bytes)| (id, round, bytes)).collect();
            let parcel = stage.push(trainer, entries, false);
            stage.deliver(trainer, &parcel);
        }
        let (share, shares) = (number(&stage, 1, 0), (0..3).map(|bucket| number(&stage, 4, bucket)).sum::<f64>());
        assert!((share - shares).abs() <= 1e-12 * share, "round {round}: {share} of one, {shares} of all buckets");
        clipped += u32::from(share.sqrt() > 12.0);
        let totals = [id(2, 0), id(5, 0), id(5, 1), id(5, 2)];
        let entries = totals.map(|id| (id, round, share.sqrt().to_le_bytes().to_vec())).to_vec();
        let parcel = stage.push(0, entries, false);
        stage.deliver(0, &parcel);
        assert_eq!(stage.errors(), Vec::<String>::new(), "round {round}");
        if round % 7 != 0 {
            // Rows miss updates in between.
            continue;
        }
        let dense = value(&stage, 0, 0);
        for bucket in 0..3 {
            let own: Vec<u64> = (0..HEIGHT).filter(|row| u64::from(buckets.of(*row)) == bucket).collect();
            let head = stage.head(Kind::Pull, 0);
            let wanted = own.iter().flat_map(|row| row.to_le_bytes()).collect();
            stage.answers.clear();
            stage.deliver(0, &Parcel::new(head, vec![(id(3, bucket), round, Float32, wanted)]));
            let found = stage.answers[0].body.concat();
            for (row, found) in own.iter().zip(found.chunks_exact(4 * WIDTH)) {
                let expected = &dense[usize::try_from(*row).expect("few") * 4 * WIDTH..][..4 * WIDTH];
                assert_eq!(found, expected, "row {row} after round {round}");
            }
        }
    }
    assert!((5..30).contains(&clipped), "{clipped} of 30 rounds are clipped");
}

#[test]
fn a_tables_total_without_a_number_for_each_bucket_is_refused() {
    let new = || Plan::new(Mode::Sync, Merge::Mean, 2).with("rows", Float32, 3, ROWS);
    refused(new(), "parameter \"rows\": its stage has total; expected its share and its total after it");
    let lone = new().with("rs", Float64, 1, SHARE).with("rt", Float64, 1, TOTAL);
    refused(lone, "parameter \"rows\": its stage has total; expected its share and its total after it");
    let more = new().with("rs", Float64, 4, SHARE).with("rt", Float64, 4, TOTAL);
    refused(more, "parameter \"rs\": a part of a total; expected 3 float64 with the algorithm sum");
    let other = "optimizer: Adam adam {} stage: 'g = min(g, total(sum(g * g))); update' \
                 sparse { height: 9 width: 3 buckets: 1 }";
    let other = Plan::new(Mode::Sync, Merge::Mean, 2).with("rows", Float32, 3, other);
    refused(other, "expected none, or a stage g = g * factor; update, whose factor reads a total of gradients");
}
