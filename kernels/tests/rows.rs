//! A table of rows equals a dense parameter bit for bit, for every optimizer, by the reference kernels and the CPU's.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::{Just, ProptestConfig, Strategy, any, prop_oneof, proptest};
use proptest::sample::select;
use proptest::test_runner::TestCaseError;

use pserver_core::dtype::ElementType;
use pserver_core::ids::Version;
use pserver_core::memory::{Arena, Budget};
use pserver_core::optim::{Algorithm, Gradient, Prepared, Regularizer, Rule, Schedule, Step, fill};
use pserver_core::port::{Kernels, Plain, Update};
use pserver_core::rows::{
    CatchUp, Height, Ids, Initializer, PartialRead, RowLayout, RowMerge, RowTable, RowWorkspace, SelectedRows,
    TablePieces, TableSettings,
};
use pserver_core::rule::CheckedRule;
use pserver_kernels::cpu::Cpu;

const ROWS: u64 = 40;
const PIECE_BYTES: u32 = 8192;

/// One step of a job: the rows that each trainer sends, the rows that are read afterwards, and the step's own rate.
#[derive(Clone, Debug)]
struct Round {
    contributions: Vec<Vec<(u64, f32)>>,
    reads: Vec<u64>,
    rate: Option<f64>,
}

/// The parameter as a dense one, the reference.
struct Dense {
    weight: Vec<u8>,
    states: Vec<Vec<u8>>,
}

impl Dense {
    fn new(settings: &TableSettings) -> Self {
        let row_bytes = settings.layout.row_bytes();
        let mut weight = vec![0; row_bytes * usize::try_from(ROWS).expect("few rows")];
        for (id, row) in (0..).zip(weight.chunks_mut(row_bytes)) {
            settings.begin(id, row);
        }
        let element_type = settings.layout.element_type();
        let begun = |initial| {
            let mut state = vec![0; weight.len()];
            fill(element_type, &mut state, initial);
            state
        };
        let states = settings.rule.states().iter().map(|state| begun(state.initial)).collect();
        Self { weight, states }
    }

    fn apply(&mut self, settings: &TableSettings, kernels: &mut dyn Kernels, rows: &[SelectedRows], step: &Step) {
        let element_type = settings.layout.element_type();
        let dense: Vec<_> = rows.iter().map(|rows| scatter(settings.layout, rows, self.weight.len())).collect();
        let gradients: Vec<_> = dense.iter().map(|bytes| Gradient { bytes, element_type }).collect();
        let mut states: Vec<&mut [u8]> = self.states.iter_mut().map(Vec::as_mut_slice).collect();
        kernels.update(Update {
            formula: settings.rule.formula(step, &mut Vec::new()),
            element_type,
            parameter: &mut self.weight,
            states: &mut states,
            gradients: &gradients,
        });
    }
}

/// Rows added to zeros, in order of appearance.
fn scatter(layout: RowLayout, rows: &SelectedRows, bytes: usize) -> Vec<u8> {
    let mut dense = vec![0; bytes];
    for (id, row) in rows.view().iter() {
        let into = &mut dense[usize::try_from(id).expect("a small id") * layout.row_bytes()..][..row.len()];
        match layout.element_type() {
            ElementType::Float32 => {
                add::<4>(into, row, |a, b| (f32::from_le_bytes(a) + f32::from_le_bytes(b)).to_le_bytes())
            }
            _ => add::<8>(into, row, |a, b| (f64::from_le_bytes(a) + f64::from_le_bytes(b)).to_le_bytes()),
        }
    }
    dense
}

fn add<const BYTES: usize>(into: &mut [u8], from: &[u8], plus: impl Fn([u8; BYTES], [u8; BYTES]) -> [u8; BYTES]) {
    for (into, from) in into.as_chunks_mut().0.iter_mut().zip(from.as_chunks().0) {
        *into = plus(*into, *from);
    }
}

fn encode(layout: RowLayout, rows: &[(u64, f32)]) -> SelectedRows {
    let ids: Vec<_> = rows.iter().map(|(id, _)| *id).collect();
    let mut values = Vec::new();
    for (_, value) in rows {
        for place in 0..layout.width() {
            let value = *value * if place % 2 == 0 { 1.0 } else { -0.5 };
            match layout.element_type() {
                ElementType::Float32 => values.extend(value.to_le_bytes()),
                _ => values.extend(f64::from(value).to_le_bytes()),
            }
        }
    }
    SelectedRows::new(layout, &ids, &values).expect("a row for each id")
}

/// Plays a job on a table and on a dense parameter.
fn check(settings: &TableSettings, kernels: &mut dyn Kernels, rounds: &[Round]) -> Result<(), TestCaseError> {
    let mut budget = Budget::new();
    budget.line("rows", PIECE_BYTES, 64);
    let pieces = TablePieces::new(Arena::new(&budget).expect("a small arena"), PIECE_BYTES);
    let mut table = RowTable::new(settings.clone(), pieces).expect("valid settings");
    let (mut work, mut merge, mut dense) = (RowWorkspace::default(), RowMerge::default(), Dense::new(settings));
    for (version, round) in (1..).map(Version).zip(rounds) {
        let scale = 1.0 / round.contributions.len() as f64;
        let step = Step { version, rate: round.rate, scale, ..Step::FIRST };
        let rows: Vec<_> = round.contributions.iter().map(|rows| encode(settings.layout, rows)).collect();
        let views: Vec<_> = rows.iter().map(SelectedRows::view).collect();
        let merged = merge.unite(settings.layout, &views).expect("they fit");
        for view in views.iter().filter(|view| view.ids().len() % 2 == 1) {
            let (mut from, ids) = (0, view.ids());
            while !table.catch_up(&mut work, kernels, ids, &mut from, &mut allowance(&round.reads)) {}
        }
        table.apply(&mut work, kernels, &merged, &step, &[]).expect("there is room");
        dense.apply(settings, kernels, &rows, &step);
        compare(settings, &mut table, &mut work, kernels, &dense, &round.reads, version)?;
    }
    let all: Vec<u64> = (0..ROWS).collect();
    compare(settings, &mut table, &mut work, kernels, &dense, &all, Version(rounds.len() as u64))?;
    let sorted = table.sorted();
    for (index, id) in sorted.ids().enumerate() {
        let record = table.record(&sorted, index);
        // A row that a read created may be one that no update changes.
        if record.last == table.version() {
            let at = usize::try_from(id).expect("a small id") * settings.layout.row_bytes();
            let states = dense.states.iter().map(|state| &state[at..at + settings.layout.row_bytes()]);
            let content: Vec<_> =
                std::iter::once(&dense.weight[at..at + settings.layout.row_bytes()]).chain(states).collect();
            proptest::prop_assert_eq!(record.content, content.concat(), "row {} at the end", id);
        }
    }
    Ok(())
}

/// The allowance of replays in one turn: sometimes a few rows, and sometimes everything.
fn allowance(reads: &[u64]) -> u64 {
    [1, 40, u64::MAX][reads.len() % 3]
}

fn compare(
    settings: &TableSettings,
    table: &mut RowTable,
    work: &mut RowWorkspace,
    kernels: &mut dyn Kernels,
    dense: &Dense,
    reads: &[u64],
    version: Version,
) -> Result<(), TestCaseError> {
    let row_bytes = settings.layout.row_bytes();
    let mut into = vec![0; reads.len() * row_bytes];
    let (ids, mut reading) = (Ids::new(settings.layout, reads).expect("small ids"), PartialRead::default());
    while !table.read(work, kernels, ids, &mut reading, &mut allowance(reads), &mut into) {}
    for (id, row) in reads.iter().zip(into.chunks(row_bytes)) {
        let expected = &dense.weight[usize::try_from(*id).expect("a small id") * row_bytes..][..row_bytes];
        proptest::prop_assert_eq!(row, expected, "row {} at version {} by {}", id, version, kernels.name());
    }
    Ok(())
}

fn algorithms() -> Vec<Algorithm> {
    let ftrl = |learning_rate_power, beta| Algorithm::Ftrl { learning_rate_power, beta };
    vec![
        Algorithm::Add,
        Algorithm::Sum,
        Algorithm::Sgd,
        Algorithm::Momentum { momentum: 0.9, nesterov: false },
        Algorithm::Momentum { momentum: 0.5, nesterov: true },
        Algorithm::Adagrad { epsilon: 1e-6 },
        Algorithm::Adadelta { rho: 0.9, epsilon: 1e-6 },
        Algorithm::RmsProp { rho: 0.9, epsilon: 1e-6, momentum: 0.0 },
        Algorithm::RmsProp { rho: 0.9, epsilon: 1e-6, momentum: 0.9 },
        Algorithm::Adam { beta1: 0.9, beta2: 0.999, epsilon: 1e-8 },
        Algorithm::AdamW { beta1: 0.9, beta2: 0.99, epsilon: 1e-8 },
        ftrl(-0.5, 0.1),
        ftrl(-0.7, 0.0),
        ftrl(0.0, 0.0),
        written(include_str!("../../core/rules/lion.rule")),
        // A custom rule that changes rows without a gradient, uses the count, and has a state that starts above zero.
        written("state s = 0.5\nstate m = 0\nm = 0.5*m + g\ns = s*0.9 + m*m\nw -= lr*m/(1 + s) + lr*0.01*w/n"),
    ]
}

fn written(text: &str) -> Algorithm {
    Algorithm::Custom(Arc::new(CheckedRule::new(text, &BTreeMap::new()).expect("a valid rule")))
}

fn schedules() -> Vec<Schedule> {
    vec![
        Schedule::Const { rate: 0.1 },
        Schedule::Const { rate: 0.0 },
        Schedule::Linear { rate: 0.5, a: 0.02, b: 0.01 },
        Schedule::Poly { rate: 0.5, a: 0.1, b: 0.5 },
        Schedule::Exp { rate: 0.5, a: 0.5, b: 7.0 },
        Schedule::DiscExp { rate: 0.5, a: 0.5, b: 7.0 },
    ]
}

fn rules() -> impl Strategy<Value = Rule> {
    let regularizer = select(vec![Regularizer::Proximal, Regularizer::Coupled, Regularizer::Decoupled]);
    let penalty = || prop_oneof![3 => Just(0.0), 1 => Just(0.01), 1 => Just(0.5)];
    let clip = prop_oneof![Just(None), Just(Some(0.3))];
    let algorithm = select(algorithms());
    (algorithm, penalty(), penalty(), regularizer, clip, select(schedules()), select(vec![1.0, 0.5])).prop_map(
        |(algorithm, l1, l2, regularizer, clip_value, schedule, rate_scale)| {
            let exact = algorithm.is_exact();
            let of = |value: f64| if exact { 0.0 } else { value };
            let clip_value = clip_value.filter(|_| !exact);
            Rule { algorithm, l1: of(l1), l2: of(l2), regularizer, clip_value, schedule, rate_scale, ..Rule::default() }
        },
    )
}

fn rounds() -> impl Strategy<Value = Vec<Round>> {
    let value = prop_oneof![3 => -1.0..1.0_f32, 1 => Just(0.0), 1 => Just(-0.0), 1 => Just(1e-41), 1 => Just(-1e-41)];
    let row = (0..ROWS - 5, value);
    let contributions = vec(vec(row, 0..4), 1..4);
    let reads = prop_oneof![2 => Just(Vec::new()), 1 => vec(0..ROWS, 0..5)];
    let rate = prop_oneof![9 => Just(None), 1 => Just(Some(0.25))];
    let round =
        (contributions, reads, rate).prop_map(|(contributions, reads, rate)| Round { contributions, reads, rate });
    // Without a rate of their own in half of the jobs: only then may a replay end early.
    (vec(round, 1..40), any::<bool>()).prop_map(|(mut rounds, plain)| {
        rounds.iter_mut().filter(|_| plain).for_each(|round| round.rate = None);
        rounds
    })
}

fn settings() -> impl Strategy<Value = TableSettings> {
    let initializers = vec![
        Initializer::Zeros,
        Initializer::Constant(-0.0),
        Initializer::Uniform { low: -0.5, high: 0.5 },
        Initializer::Gaussian { mean: 0.0, deviation: 0.1 },
    ];
    let element_type = select(vec![ElementType::Float32, ElementType::Float64]);
    (rules(), select(initializers), element_type, select(vec![1, 3, 17])).prop_map(
        |(rule, initializer, element_type, width)| {
            let layout = RowLayout::new(element_type, width, Height::Rows(ROWS)).expect("narrow rows");
            TableSettings { layout, rule: prepared(rule), initializer, seed: 5, first: 0, catch_up: CatchUp::Exact }
        },
    )
}

fn prepared(rule: Rule) -> Arc<Prepared> {
    Arc::new(Prepared::new(rule).expect("a valid rule"))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn a_table_equals_a_dense_parameter_to_the_bit(settings in settings(), rounds in rounds()) {
        check(&settings, &mut Plain, &rounds)?;
        check(&settings, &mut Cpu::new(), &rounds)?;
    }
}

#[test]
fn a_row_pulled_after_a_long_time_is_caught_up_with_every_update() {
    let touched = |round: u64| vec![vec![(if round.is_multiple_of(1000) { 3 } else { 4 }, 1.0)]];
    let rounds: Vec<_> =
        (0..1500).map(|round| Round { contributions: touched(round), reads: Vec::new(), rate: None }).collect();
    for rule in algorithms() {
        for l2 in [0.0, 0.01] {
            let l2 = if rule.is_exact() { 0.0 } else { l2 };
            let layout = RowLayout::new(ElementType::Float32, 4, Height::Rows(ROWS)).expect("narrow rows");
            let schedule = Schedule::Const { rate: 0.1 };
            let rule = prepared(Rule { algorithm: rule.clone(), l2, schedule, ..Rule::default() });
            let initializer = Initializer::Uniform { low: -0.5, high: 0.5 };
            let settings = TableSettings { layout, rule, initializer, seed: 5, first: 0, catch_up: CatchUp::Exact };
            check(&settings, &mut Cpu::new(), &rounds).unwrap_or_else(|wrong| panic!("{:?}: {wrong}", settings.rule));
        }
    }
}
