//! Gradients with elements that are NaN or infinite: refused before anything of their frame is kept, or zeros, or
//! accepted.

use std::sync::Arc;

use super::script::{Script, check};
use super::stage::{Parcel, Plan, Stage, id};
use crate::checkpoint::Storage;
use crate::checkpoint::storage::InMemory;
use crate::config::{Merge, Mode};
use crate::dtype::ElementType::{Float32, Float64, Int64};
use crate::port::{Plain, Simulated};
use crate::server::NonFinite;
use crate::wire::RowsPart;

const SGD: &str = "optimizer: SGD";
const ROWS: &str = "const_lr { learning_rate: 1 } sparse { height: 100 width: 2 buckets: 1 constant { value: 10 } }";

fn plan(mode: Mode, trainers: u32) -> Plan {
    Plan::new(mode, Merge::Mean, trainers).with("w", Float32, 1, SGD).with("x", Float32, 2, SGD)
}

fn check_with(nonfinite: NonFinite, plan: Plan, script: &str) {
    let mut stage = Stage::empty(plan.clone());
    stage.shard.options.nonfinite = nonfinite;
    Script::new(stage.initialised()).run(script);
    let mut stage = Stage::empty(plan).with_accelerator(Simulated::new(Plain, u64::MAX, 1));
    stage.shard.options.nonfinite = nonfinite;
    Script::new(stage.initialised()).run(script);
}

#[test]
fn a_refused_gradient_leaves_the_round_open_for_a_corrected_one() {
    check(
        plan(Mode::Sync, 2),
        "push 0 1 w=1 x=7,NaN -> 0 error Invalid: the gradient of trainer 0 for parameter \"x\" has NaN (float32) as \
           element 1 of chunk 0; expected finite numbers: push a corrected gradient *
         push 1 1 w=3 x=4 -> 1 done w@1 x@1
         show w x -> w@0=0 & x@0=0
         mend 0 1 w=1 x=1 -> 0 done w@1 x@1
         show w x -> w@1=-2 & x@1=-2.5",
    );
}

#[test]
fn frames_of_a_push_that_were_taken_stay_and_the_corrected_push_brings_the_others() {
    check(
        plan(Mode::Sync, 2),
        "push 0 1 w=1 -> 0 done w@1
         mend 0 1 x=inf -> 0 error Invalid: *for parameter \"x\" has inf (float32) as element 0 of chunk 0*
         mend 0 1 w=100 x=1 -> 0 done w@1 x@1
         push 1 1 w=3 x=4 -> 1 done w@1 x@1
         show w x -> w@1=-2 & x@1=-2.5",
    );
    check(
        plan(Mode::Async, 1),
        "push 0 0 w=1 -> 0 done w@1
         mend 0 0 x=-inf -> 0 error Invalid: *has -inf*
         mend 0 0 w=100 x=1 -> 0 done w@1 x@1
         show w x -> w@1=-1 & x@1=-1",
    );
    // A rule that needs the whole gradient.
    check(
        Plan::new(Mode::Async, Merge::Mean, 2).with("w", Float32, 2048, "sgd { } clip_norm: 1e6"),
        "push 0 0 w=1 -> *
         mend 0 0 w.1=NaN -> 0 error Invalid: *as element 0 of chunk 1*
         mend 0 0 w=100 w.1=2 -> *
         push 1 0 w=1 w.1=1 -> *
         show w w.1 -> w@2=-2 & w.1@2=-3",
    );
}

#[test]
fn every_type_of_floats_is_looked_at_and_integers_are_not() {
    let plan = Plan::new(Mode::Async, Merge::Mean, 1).with("w", Float32, 3, SGD).with("d", Float64, 3, SGD).with(
        "n",
        Int64,
        1,
        "algorithm: \"add\"",
    );
    check(
        plan,
        "push 0 0 w=1,2,NaNh -> 0 error Invalid: *has NaN (float16) as element 2*
         push 0 0 w=1,inf,2b -> 0 error Invalid: *
         push 0 0 d=1,-inf,2 -> 0 error Invalid: *has -inf (float64) as element 1*
         push 0 0 n=-1 d=3 w=65504h -> 0 done n@1 d@1 w@1",
    );
}

#[test]
fn a_skipped_gradient_counts_as_zeros() {
    check_with(
        NonFinite::Skip,
        plan(Mode::Sync, 2),
        "push 0 1 w=1 x=7,NaN -> 0 done w@1 x@1
         push 1 1 w=3 x=4 -> 1 done w@1 x@1
         show w x -> w@1=-2 & x@1=-2",
    );
}

#[test]
fn an_accepted_gradient_is_applied() {
    check_with(
        NonFinite::Accept,
        plan(Mode::Async, 1),
        "push 0 0 w=NaN -> 0 done w@1
         show w -> w@1=NaN",
    );
}

fn rows(values: [f32; 4]) -> Vec<u8> {
    let ids = [7_u64, 9].into_iter().flat_map(u64::to_le_bytes);
    RowsPart::ONLY.encode().into_iter().chain(ids).chain(values.into_iter().flat_map(f32::to_le_bytes)).collect()
}

fn push_rows(stage: &mut Stage, values: [f32; 4]) -> Parcel {
    let parcel = stage.push(0, vec![(id(0, 0), 1, rows(values))], false);
    stage.deliver(0, &parcel);
    parcel
}

#[test]
fn rows_are_named_by_their_ids_and_skipped_with_their_part() {
    let plan = || Plan::new(Mode::Sync, Merge::Sum, 1).with("s", Float32, 2, ROWS);
    let mut stage = Stage::serving(plan());
    let before = stage.contents();
    push_rows(&mut stage, [1.0, 2.0, 3.0, f32::NAN]);
    let expected = "the gradient of trainer 0 for parameter \"s\" has NaN (float32) as element 1 of row 9";
    assert!(stage.errors().iter().any(|text| text.starts_with(expected)), "{:?}", stage.errors());
    assert_eq!(stage.contents(), before);
    let (mut skipping, mut zeros) = (Stage::serving(plan()), Stage::serving(plan()));
    skipping.shard.options.nonfinite = NonFinite::Skip;
    push_rows(&mut skipping, [1.0, 2.0, 3.0, f32::NAN]);
    push_rows(&mut zeros, [0.0; 4]);
    assert_eq!(skipping.errors(), Vec::<String>::new());
    assert_ne!(skipping.contents(), before);
    assert_eq!(skipping.contents(), zeros.contents());
}

#[test]
fn a_journal_has_no_refused_gradient_and_skipped_ones_as_they_were_applied() {
    let storage: Arc<dyn Storage> = Arc::new(InMemory::default());
    let restored = |nonfinite| {
        let mut stage = Stage::empty(plan(Mode::Async, 1));
        stage.restore(&storage, false);
        stage.shard.options.nonfinite = nonfinite;
        stage
    };
    let first = restored(NonFinite::Refuse).initialised();
    let end = first.shard.journal_position();
    let mut script = Script::new(first);
    script.run("push 0 0 w=1 x=NaN -> 0 error Invalid: *");
    assert_eq!(script.stage.shard.journal_position(), end, "nothing is written of what is refused");
    script.stage.shard.options.nonfinite = NonFinite::Skip;
    script.run("mend 0 0 w=1 x=NaN -> 0 done w@1 x@1\n show w x -> w@1=-1 & x@1=0");
    script.stage.shard.options.nonfinite = NonFinite::Accept;
    script.run("push 0 0 w=inf -> 0 done w@2");
    let again = restored(NonFinite::Refuse);
    assert_eq!(format!("{:?}", again.contents()), format!("{:?}", script.stage.contents()));
}
