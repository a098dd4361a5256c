//! Settings sent with gradients: they are merged like learning rates, and apply to one update.

use super::script::check;
use super::stage::Plan;
use crate::config::{Merge, Mode};
use crate::dtype::ElementType::{Float32, Float64};

const WRITTEN: &str = "rule: 'param a in [0, 100) = 2; param b = 3; w -= a * g + b * lr' \
                       const_lr { learning_rate: 0.125 }";
const MOMENTUM: &str = "rule: 'param mu in (0, 1) = 0.5; state m = 0; m = mu * m + g; w -= lr * m' \
                        regularizer: Coupled l2: 0.25";

fn plan(mode: Mode, trainers: u32) -> Plan {
    Plan::new(mode, Merge::Sum, trainers).with("w", Float64, 1, WRITTEN).with("v", Float64, 1, MOMENTUM)
}

#[test]
fn a_setting_applies_to_one_update() {
    check(
        plan(Mode::Sync, 1),
        "push+ 0 1 w=1 -> 0 value w@1=-2.375
         push+*a:4 0 2 w=1 -> 0 value w@2=-6.75
         push+*b:0*a:1 0 3 w=1 -> 0 value w@3=-7.75
         push+*b:0*0.5 0 4 w=1 -> 0 value w@4=-9.75
         push+*0.5 0 5 w=1 -> 0 value w@5=-13.25
         push+ 0 6 w=1 -> 0 value w@6=-15.625",
    );
    check(
        plan(Mode::Sync, 1),
        "push+ 0 1 v=4 -> 0 value v@1=-4
         push+*mu:0.25*l2:0.5 0 2 v=4 -> 0 value v@2=-7
         push+*l2:0 0 3 v=1 -> 0 value v@3=-9.5
         push+ 0 4 v=1 -> 0 value v@4=-9.375",
    );
}

#[test]
fn a_round_uses_the_mean_of_its_gradients_settings() {
    let of = |trainers| Plan::new(Mode::Sync, Merge::Sum, trainers).with("w", Float64, 1, WRITTEN);
    check(
        of(2),
        "push*a:8*b:0 1 1 w=1 -> 1 done w@1
         push*a:2 0 1 w=1 -> 0 done w@1
         show w -> w@1=-10
         push*b:0 0 2 w=1 -> 0 done w@2
         push 1 2 w=none -> 1 done w@2
         show w -> w@2=-12
         push*b:1 0 3 w=none -> 0 done w@3
         push*b:0*a:0 1 3 w=1 -> 1 done w@3
         show w -> w@3=-12.0625",
    );
    // The mean of equal settings is that setting, in any order, though three tenths do not add up to three of them.
    for order in [[0, 1, 2], [2, 0, 1]] {
        let pushes = order.map(|trainer| format!("push*a:0.1*b:0 {trainer} 1 w=10 -> *\n")).concat();
        check(of(3), &format!("{pushes} show w -> w@1=-3"));
    }
    let pushes = "push*a:1*b:0 0 1 w=1 -> *\n push*a:0.1*b:0 1 1 w=0 -> *\n push*a:0.7*b:0 2 1 w=0 -> *\n";
    check(of(3), &format!("{pushes} show w -> w@1={:?}", -((1.0 + 0.1 + 0.7) / 3.0)));
}

#[test]
fn an_async_gradient_uses_its_own_settings() {
    check(
        plan(Mode::Async, 2),
        "push*a:1*b:0 0 1 w=1 -> 0 done w@1
         push*b:0 1 1 w=1 -> 1 done w@2
         show w -> w@2=-3",
    );
}

#[test]
fn settings_that_a_rule_does_not_take_are_refused_before_anything_is_applied() {
    for (push, expected) in [
        ("push*c:1 0 1 w=1", "the step carries \"c\", which the rule does not have, *; expected some of: a, b"),
        ("push*a:100 0 1 w=1", "the step carries \"a\" = 100; expected one in [0.0, 100.0)"),
        ("push*a:-1 0 1 w=1", "the step carries \"a\" = -1; expected *"),
        ("push*b:inf 0 1 w=1", "the step carries \"b\" = inf; expected a finite number"),
        ("push*a:NaN 0 1 w=1", "the step carries \"a\" = NaN; expected *"),
        ("push*a:1*a:1 0 1 w=1", "the step carries \"a\" twice; expected it once"),
        // One parameter of the frame takes the setting, and the other does not.
        ("push*mu:0.5 0 1 v=1 w=1", "the step carries \"mu\", which the rule does not have, *"),
    ] {
        check(
            plan(Mode::Sync, 1),
            &format!(
                "{push} -> 0 error Invalid: parameter \"w\": {expected}
                 show w v -> w@0=0 & v@0=0
                 push+ 0 1 w=1 -> 0 value w@1=-2.375"
            ),
        );
    }
    check(
        plan(Mode::Delta, 1),
        "push*a:1 0 1 w=1 -> 0 error Invalid: parameter \"w\": the step carries \"a\", which *; expected some of: none",
    );
}

#[test]
fn a_table_that_replays_missed_updates_refuses_settings() {
    let adam = "optimizer: Adam adam {} sparse { height: 9 width: 1 buckets: 1 constant { value: 1 } lazy: ";
    let with = |config: &'static str| Plan::new(Mode::Sync, Merge::Sum, 1).with("s", Float32, 1, config);
    let exact: &'static str = format!("{adam}false }}").leak();
    let lazy: &'static str = format!("{adam}true }}").leak();
    let idle = "optimizer: Adagrad adagrad { } sparse { height: 9 width: 1 buckets: 1 }";
    let expected = "the step carries settings for a table that replays missed updates, *; expected none, or lazy: true";
    check(with(exact), &format!("push*epsilon:0.5 0 1 s=none -> 0 error Invalid: parameter \"s\": {expected}"));
    check(with(lazy), "push*epsilon:0.5 0 1 s=none -> 0 done s@1");
    check(with(idle), "push*epsilon:0.5 0 1 s=none -> 0 done s@1");
}
