//! Rules beside loops that were written for one optimizer each, on arrays larger than the cache and on short ones.
//!
//! Criterion's own lines are times. Then follow the ratios, measured in turns in this process: above one, the rule is
//! faster. Then comes a user's `lion.rule` beside the built-in momentum, which moves as many bytes: above one, the
//! user's rule is faster. Last comes momentum in the ops of a program, beside the same as a text.
//! `cargo bench -p pserver-bench --bench rules`

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use bytemuck::{cast_slice, cast_slice_mut};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use nix::time::{ClockId, clock_gettime};
use pserver_bench::{Fused, is_measured};
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType;
use pserver_core::ids::Version;
use pserver_core::optim::{Algorithm, Gradient, Prepared, Rule, Step};
use pserver_core::port::{Kernels, Update};
use pserver_core::rule::{CheckedRule, RuleSettings};
use pserver_kernels::cpu::{Cpu, Form};
use pserver_program::server_stage::{server_stages, with_update};
use pserver_program::{Graph, Program};

/// Elements beyond every cache, in a chunk of 4 KiB, and in a row of an embedding.
const LENGTHS: [usize; 3] = [1 << 25, 1024, 64];
/// Elements in one repetition, however short the tensors are.
const WORK: usize = 1 << 25;
const REPETITIONS: usize = 21;

/// One optimizer's tensors, on pages of their own as a server's are.
struct RuleBench {
    fused: Fused,
    rule: Prepared,
    memory: Vec<Vec<f32>>,
    length: usize,
    scalars: Vec<f64>,
    count: u64,
}

impl RuleBench {
    fn new(fused: Fused, length: usize) -> Self {
        Self::with(fused, fused.rule().expect("its text is right"), length)
    }

    /// Lion as the quick start runs it: `--rule lion.rule --set lr=0.001,b1=0.9,b2=0.99,wd=0`.
    fn of_a_user(length: usize) -> Self {
        let settings = [("b1", 0.9), ("b2", 0.99), ("wd", 0.0)].map(|(name, value)| (name.to_owned(), value));
        let text = include_str!("../../core/rules/lion.rule");
        let written = CheckedRule::new(text, &RuleSettings::from(settings)).expect("its text is right");
        let algorithm = Algorithm::Custom(Arc::new(written));
        Self::with(Fused::Lion, Rule { algorithm, ..Fused::Lion.rule().expect("its text is right") }, length)
    }

    fn with(fused: Fused, rule: Rule, length: usize) -> Self {
        let rule = Prepared::new(rule).expect("it is a rule");
        let memory = (0..rule.states().len() + 2).map(|tensor| vec![1.0 + tensor as f32; length + 1024]).collect();
        Self { fused, rule, memory, length, scalars: Vec::new(), count: 1 }
    }

    /// The weights and the states, and the gradient.
    fn tensors(memory: &mut [Vec<f32>], length: usize) -> (Vec<&mut [f32]>, &[f32]) {
        let mut pages = memory.iter_mut().map(|tensor| {
            let start = tensor.as_ptr().align_offset(4096);
            &mut tensor[start..start + length]
        });
        let gradient = pages.next().expect("there is a gradient");
        (pages.collect(), gradient)
    }

    fn by_hand(&mut self, times: usize) {
        let (mut tensors, gradient) = Self::tensors(&mut self.memory, self.length);
        for _ in 0..times {
            self.fused.update(self.count, black_box(&mut tensors), black_box(gradient));
        }
    }

    fn by_rule(&mut self, kernels: &mut Cpu, times: usize) {
        let (mut tensors, gradient) = Self::tensors(&mut self.memory, self.length);
        let step = Step { version: Version(self.count), ..Step::FIRST };
        let formula = self.rule.formula(&step, &mut self.scalars);
        let gradients = [Gradient { bytes: cast_slice(gradient), element_type: ElementType::Float32 }];
        let (weights, states) = tensors.split_first_mut().expect("there are weights");
        let count = states.len();
        for _ in 0..times {
            let mut room: [&mut [u8]; 2] = Default::default();
            room.iter_mut().zip(states.iter_mut()).for_each(|(room, state)| *room = cast_slice_mut(state));
            kernels.update(black_box(Update {
                formula,
                element_type: ElementType::Float32,
                parameter: cast_slice_mut(weights),
                states: &mut room[..count],
                gradients: &gradients,
            }));
        }
    }
}

/// The configuration of momentum that is written in ops.
fn momentum_of_ops() -> String {
    let program: Program = "block 0 {
            parameter w: float32[64]
            state w@speed: float32[64]
            initialise w = fill(value=0.0)
            initialise w@speed = fill(value=0.0)
            communication loop_forever(block=1)
        }
        block 1 in 0 {
            temporary g: float32[64]
            communication g, sender = recv(channel=\"g\")
            communication merged = gradient_accumulator(g, sender, count=1, merge=mean, staleness=0)
            optimize kept = scale(w@speed, factor=0.9)
            optimize w@speed = add(kept, merged)
            optimize move = scale(w@speed, factor=0.1)
            optimize w = sub(w, move)
        }"
    .parse()
    .expect("it is a program");
    let component = Graph::new(program).and_then(|graph| with_update(&graph)).expect("it is an optimizer");
    server_stages(&component).expect("it has a stage")[0].config.clone()
}

fn seconds(work: impl FnOnce()) -> f64 {
    let now = || clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from).expect("threads have a clock");
    let start = now();
    work();
    (now() - start).as_secs_f64()
}

fn quartiles(mut values: Vec<f64>) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| values[quarter * (values.len() - 1) / 4])
}

fn ratios(fused: Fused, length: usize) {
    let mut bench = RuleBench::new(fused, length);
    let times = (WORK / length).max(1);
    for form in Form::here() {
        let mut kernels = Cpu::with(form);
        let measured: Vec<(f64, f64)> = (0..=REPETITIONS)
            .map(|_| (seconds(|| bench.by_hand(times)), seconds(|| bench.by_rule(&mut kernels, times))))
            .skip(1)
            .collect();
        let [low, ratio, high] = quartiles(measured.iter().map(|(hand, rule)| hand / rule).collect());
        let [_, hand, _] = quartiles(measured.iter().map(|(hand, _)| hand * 1e9 / times as f64).collect());
        let [_, rule, _] = quartiles(measured.iter().map(|(_, rule)| rule * 1e9 / times as f64).collect());
        println!(
            "{:9} {length:9} elements, {form:?}: ratio {ratio:.3} ({low:.3} to {high:.3}); \
             {rule:.1} ns a call, by hand {hand:.1} ns",
            fused.name()
        );
    }
}

/// Momentum in ops and as a text, in turns, on the same tensors.
fn ops_beside_text(length: usize) {
    let [ops, text] = [momentum_of_ops().as_str(), "rule: 'state m = 0; m = 0.9*m + g; w -= 0.1*m'"]
        .map(|config| OptimizerSettings::from_text(config).expect("its text is right").rule.expect("it has a rule"));
    let mut bench = RuleBench::with(Fused::Momentum, ops.clone(), length);
    let [ops, text] = [ops, text].map(|rule| Prepared::new(rule).expect("it is a rule"));
    let times = (WORK / length).max(1);
    for form in Form::here() {
        let mut kernels = Cpu::with(form);
        let mut run = |rule: &Prepared| {
            bench.rule = rule.clone();
            seconds(|| bench.by_rule(&mut kernels, times))
        };
        let measured = (0..=REPETITIONS).map(|_| run(&text) / run(&ops)).skip(1);
        let [low, ratio, high] = quartiles(measured.collect());
        println!("ops       {length:9} elements, {form:?}: {ratio:.3} of the text's speed ({low:.3} to {high:.3})");
    }
}

/// A user's rule and the built-in momentum, in turns.
fn beside_momentum(length: usize) {
    let (mut user, mut momentum) = (RuleBench::of_a_user(length), RuleBench::new(Fused::Momentum, length));
    let times = (WORK / length).max(1);
    for form in Form::here() {
        let mut kernels = Cpu::with(form);
        let mut run = |bench: &mut RuleBench| seconds(|| bench.by_rule(&mut kernels, times));
        let measured = (0..=REPETITIONS).map(|_| run(&mut momentum) / run(&mut user)).skip(1);
        let [low, ratio, high] = quartiles(measured.collect());
        println!("lion.rule {length:9} elements, {form:?}: {ratio:.3} of momentum's speed ({low:.3} to {high:.3})");
    }
}

fn rules(criterion: &mut Criterion) {
    let lengths: &[usize] = if is_measured() { &LENGTHS } else { &[100] };
    for &length in lengths {
        let mut group = criterion.benchmark_group(format!("update of {length} elements"));
        group.sample_size(10).throughput(Throughput::Elements(length as u64));
        for fused in Fused::ALL {
            let mut bench = RuleBench::new(fused, length);
            let mut kernels = Cpu::new();
            group.bench_function(format!("{}, rule", fused.name()), |bencher| {
                bencher.iter(|| bench.by_rule(&mut kernels, 1));
            });
            group.bench_function(format!("{}, by hand", fused.name()), |bencher| bencher.iter(|| bench.by_hand(1)));
        }
        group.finish();
    }
    for &length in lengths.iter().filter(|_| is_measured()) {
        Fused::ALL.into_iter().for_each(|fused| ratios(fused, length));
        beside_momentum(length);
        ops_beside_text(length);
    }
}

criterion_group!(benches, rules);
criterion_main!(benches);
