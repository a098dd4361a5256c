//! Plans with more units than a word of marks has bits: the search for a ready unit wraps over several words, and finds
//! the same unit as a search through a list of all units.

use super::stage::{loops, number, recv, send, variable};
use crate::executor::{ExecutionPlan, Marking, UnitIndex, UnitKind, UnitRunner, Wait};
use crate::{Graph, Op, ProgramPeer, Purpose};
use pserver_core::prng::Prng;

/// Loops that receive once and then send this many times each.
fn plan(sends: &[usize]) -> ExecutionPlan {
    let bodies = sends.iter().enumerate().map(|(place, count)| {
        let name = format!("x{place}");
        let mut ops: Vec<Op> = vec![recv(&format!("in{place}"), &[&name])];
        ops.extend((0..*count).map(|copy| send(&format!("out{place}/{copy}"), ProgramPeer::Server(0), &name)));
        (vec![variable(&name, number(), Purpose::Temporary)], ops)
    });
    let graph: Graph = loops(Vec::new(), bodies.collect());
    ExecutionPlan::of(&graph).expect("no loop waits for another")
}

/// The units whose inputs are available, as a runner reports them.
struct There(Vec<bool>);

impl UnitRunner for There {
    type Error = ();

    fn waits(&mut self, _: &ExecutionPlan, unit: UnitIndex) -> Option<Wait> {
        (!self.0[unit.place()]).then_some(Wait::Arrival)
    }

    fn run(&mut self, _: &ExecutionPlan, unit: UnitIndex) -> Result<(), ()> {
        assert!(self.0[unit.place()], "what is not ready does not run");
        Ok(())
    }
}

/// A reference marking: which units have run in this turn, which stages have begun, where the search begins.
struct Listed<'a> {
    plan: &'a ExecutionPlan,
    has_run: Vec<bool>,
    has_begun: Vec<bool>,
    from: usize,
}

impl<'a> Listed<'a> {
    fn new(plan: &'a ExecutionPlan) -> Self {
        let has_begun = plan.stages().iter().map(|stage| stage.begun_by.is_none()).collect();
        Self { plan, has_run: vec![false; plan.units().len()], has_begun, from: 0 }
    }

    fn is_marked(&self, place: usize) -> bool {
        let units = self.plan.units();
        let comes_before = |other: &usize| units[*other].followers.iter().any(|one| *one as usize == place);
        self.has_begun[units[place].stage as usize]
            && !self.has_run[place]
            && (0..units.len()).filter(comes_before).all(|other| self.has_run[other])
    }

    fn next(&self, there: &There) -> Option<usize> {
        let all = (self.from..self.has_run.len()).chain(0..self.from);
        all.into_iter().find(|place| there.0[*place] && self.is_marked(*place))
    }

    fn ran(&mut self, place: usize) {
        self.has_run[place] = true;
        let (unit, stages) = (&self.plan.units()[place], self.plan.stages());
        if unit.act == UnitKind::Loop {
            let begun = (0..stages.len()).filter(|stage| stages[*stage].begun_by.map(|by| by as usize) == Some(place));
            begun.for_each(|stage| self.has_begun[stage] = true);
        }
        let stage = unit.stage as usize;
        let (first, end) = (stages[stage].units.0 as usize, stages[stage].units.1 as usize);
        if self.has_run[first..end].iter().all(|has| *has) {
            self.from = end % self.has_run.len();
            self.has_begun[stage] = stages[stage].begun_by.is_some();
            self.has_run[first..end].fill(false);
        }
    }
}

/// 40 plans of 66 to 354 units, 500 steps each. `PSERVER_SEED` replays.
#[test]
fn the_unit_that_runs_is_the_one_that_a_list_finds() {
    let given = std::env::var("PSERVER_SEED").ok().and_then(|text| text.parse().ok());
    let seed: u64 = given.unwrap_or(0x5eed_0064);
    println!("the_unit_that_runs_is_the_one_that_a_list_finds: PSERVER_SEED={seed}");
    let mut prng = Prng(seed);
    for _ in 0..40 {
        let sends: Vec<usize> = (0..22 + prng.below(38)).map(|_| 1 + prng.index(4)).collect();
        let plan = plan(&sends);
        assert!(plan.units().len() > 64, "{} units are in one word", plan.units().len());
        let (mut marking, mut listed) = (Marking::new(&plan), Listed::new(&plan));
        let mut there = There(vec![false; plan.units().len()]);
        // In a few plans many units are ready and in most plans few, so that the search often wraps over several words.
        let odds = 2 + prng.below(60);
        for step in 0..500 {
            there.0.iter_mut().for_each(|is_there| *is_there = prng.below(odds) == 0);
            let expected = listed.next(&there);
            let found = marking.step(&plan, &mut there).expect("nothing goes wrong in a unit");
            assert_eq!(found.map(UnitIndex::place), expected, "step {step} of {sends:?}, from {}", listed.from);
            expected.into_iter().for_each(|place| listed.ran(place));
        }
    }
}

/// Each unit in turn is the only ready one, in each word of marks and from each start of the search.
#[test]
fn every_ready_unit_is_found_from_every_start() {
    const LOOPS: usize = 60;
    let plan = plan(&[0; LOOPS]);
    assert_eq!(plan.units().len(), 2 * LOOPS, "a loop and a recv each");
    let mut marking = Marking::new(&plan);
    let mut there = There(vec![true; 2 * LOOPS]);
    // Each loop runs once; its recv comes after it and is a stage that runs every turn.
    while marking.turns(&plan, UnitIndex(119)) == 0 {
        marking.step(&plan, &mut there).expect("nothing goes wrong in a unit");
    }
    for place in (0..LOOPS).flat_map(|first| [first, LOOPS - 1 - first, first * 37 % LOOPS]).map(|one| 2 * one + 1) {
        there.0.fill(false);
        there.0[place] = true;
        let found = marking.step(&plan, &mut there).expect("nothing goes wrong in a unit");
        assert_eq!(found.map(UnitIndex::place), Some(place));
    }
    there.0.fill(false);
    assert_eq!(marking.step(&plan, &mut there), Ok(None), "nothing is ready");
}
