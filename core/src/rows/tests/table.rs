use std::sync::Arc;

use crate::dtype::{ElementType, Half};
use crate::ids::Version;
use crate::memory::{Arena, Budget};
use crate::optim::{Algorithm, Gradient, Prepared, Rule, Schedule, Step};
use crate::port::{Kernels, Plain, Update};
use crate::prng::Prng;
use crate::rows::initializer::mix;
use crate::rows::{
    CatchUp, Ids, Initializer, PartialRead, RateChanges, Record, RowMerge, RowTable, RowWorkspace, RowsView, TableCopy,
    TablePieces, TableSettings,
};

use super::{bytes, floats, layout};

const PIECE_BYTES: u32 = 4096;

fn pieces(count: u64) -> TablePieces {
    let mut budget = Budget::new();
    budget.line("rows", PIECE_BYTES, count);
    TablePieces::new(Arena::new(&budget).expect("a small arena"), PIECE_BYTES)
}

fn settings(algorithm: Algorithm) -> TableSettings {
    settings_of(Rule { algorithm, schedule: Schedule::Const { rate: 0.5 }, ..Rule::default() })
}

/// The same settings with a changed rule.
fn with(settings: TableSettings, change: impl FnOnce(&mut Rule)) -> TableSettings {
    let mut rule = settings.rule.rule().clone();
    change(&mut rule);
    TableSettings { rule: Arc::new(Prepared::new(rule).expect("a valid rule")), ..settings }
}

fn settings_of(rule: Rule) -> TableSettings {
    TableSettings {
        layout: layout(ElementType::Float32, 2),
        rule: Arc::new(Prepared::new(rule).expect("a valid rule")),
        initializer: Initializer::Uniform { low: -1.0, high: 1.0 },
        seed: 11,
        first: 0,
        catch_up: CatchUp::Exact,
    }
}

fn momentum() -> TableSettings {
    settings(Algorithm::Momentum { momentum: 0.5, nesterov: false })
}

/// A table, and the workspace to use it.
struct Player {
    table: RowTable,
    work: RowWorkspace,
}

impl Player {
    fn new(settings: TableSettings, count: u64) -> Self {
        let table = RowTable::new(settings, pieces(count)).expect("the settings are valid");
        Self { table, work: RowWorkspace::default() }
    }

    /// Updates rows of two elements, each by its number.
    fn push(&mut self, rows: &[(u64, f32)]) -> Result<(), String> {
        let ids: Vec<_> = rows.iter().map(|(id, _)| *id).collect();
        let values: Vec<_> = rows.iter().flat_map(|(_, value)| [*value, *value]).collect();
        let values = bytes(&values);
        let views = [RowsView::new(self.table.layout(), &ids, &values).expect("a row for each id")];
        let mut merge = RowMerge::default();
        let merged = merge.unite(self.table.layout(), &views).expect("they fit");
        let step = Step { version: Version(self.table.version().0 + 1), ..Step::FIRST };
        self.table.apply(&mut self.work, &mut Plain, &merged, &step, &[]).map_err(|refusal| refusal.to_string())
    }

    fn pull(&mut self, ids: &[u64]) -> Vec<f32> {
        let mut into = vec![0xff; ids.len() * 8];
        let ids = Ids::new(self.table.layout(), ids).expect("ids in range");
        self.table.pull(&mut self.work, &mut Plain, ids, &mut into);
        floats(&into)
    }

    fn set(&mut self, ids: &[u64], values: &[f32]) {
        let values = bytes(values);
        let rows = RowsView::new(self.table.layout(), ids, &values).expect("a row for each id");
        self.table.set(&mut self.work, &mut Plain, &rows, 0).expect("there is room");
    }

    fn initial(&self, id: u64) -> Vec<f32> {
        let mut row = vec![0; 8];
        self.table.settings().begin(id, &mut row);
        floats(&row)
    }

    fn rows(&self) -> u64 {
        self.table.usage().rows
    }
}

#[test]
fn an_untouched_row_reads_as_its_initial_value_and_is_not_stored() {
    let mut player = Player::new(momentum(), 2);
    let expected = [player.initial(7), player.initial(1 << 50), player.initial(7)].concat();
    assert_eq!(player.pull(&[7, 1 << 50, 7]), expected);
    player.push(&[(3, 1.0)]).expect("there is room");
    assert_eq!(player.pull(&[7, 1 << 50, 7]), expected);
    assert_eq!(player.rows(), 1);
}

#[test]
fn an_untouched_row_with_decay_reads_its_decayed_value_and_is_not_stored() {
    let decaying = with(settings(Algorithm::Sgd), |rule| rule.l2 = 1.0);
    let mut player = Player::new(decaying.clone(), 2);
    (0..3).for_each(|_| player.push(&[(3, 1.0)]).expect("there is room"));
    // The shrink is 1 / (1 + 0.5); within a rounding each.
    let decayed = |initial: f32| (0..3).fold(initial, |value, _| value / 1.5);
    let initial = player.initial(7);
    let near =
        |found: &[f32]| found.iter().zip(&initial).all(|(found, initial)| (found - decayed(*initial)).abs() <= 1e-7);
    let first = player.pull(&[7, 7, 7]);
    assert!(near(&first[..2]) && near(&first[2..4]) && near(&first[4..]), "{first:?} from {initial:?}");
    assert_eq!(player.rows(), 1);
    assert_eq!(player.pull(&[7]), first[..2]);
    // Without memory for it the row can still be read.
    let mut full = Player::new(decaying, 2);
    (0..204).for_each(|id| full.push(&[(id, 1.0)]).expect("there is room"));
    let rows = full.rows();
    let read = full.pull(&[1 << 40, 1 << 40]);
    assert!(read[..2] == read[2..] && read.iter().all(|value| value.abs() < 1e-6), "{read:?}");
    assert_eq!(full.rows(), rows);
}

#[test]
fn lazy_rows_see_only_the_updates_they_are_in() {
    let mut lazy = momentum();
    lazy.catch_up = CatchUp::Lazy;
    lazy.initializer = Initializer::Zeros;
    let mut player = Player::new(lazy.clone(), 2);
    player.push(&[(1, 1.0)]).expect("there is room");
    player.push(&[(2, 1.0)]).expect("there is room");
    assert_eq!(player.pull(&[1, 2]), [-0.5; 4]);
    player.push(&[(1, 0.0)]).expect("there is room");
    assert_eq!(player.pull(&[1, 2]), [-0.75, -0.75, -0.5, -0.5]);

    lazy.catch_up = CatchUp::Exact;
    let mut exact = Player::new(lazy, 2);
    exact.push(&[(1, 1.0)]).expect("there is room");
    exact.push(&[(2, 1.0)]).expect("there is room");
    assert_eq!(exact.pull(&[1, 2]), [-0.75, -0.75, -0.5, -0.5]);
}

#[test]
fn a_table_grows_through_every_split_and_finds_each_row_again() {
    let mut player = Player::new(settings(Algorithm::Sgd), 2000);
    // Ids one after another, and ids that differ in their upper bits alone.
    let ids: Vec<u64> = (0..20_000).chain((1..5_000).map(|id| id << 40)).collect();
    for some in ids.chunks(777) {
        let rows: Vec<_> = some.iter().map(|id| (*id, 1.0)).collect();
        player.push(&rows).expect("there is room");
    }
    assert_eq!(player.rows(), ids.len() as u64);
    let expected: Vec<f32> = ids.iter().flat_map(|id| player.initial(*id)).map(|value| value - 0.5).collect();
    assert_eq!(player.pull(&ids), expected);
    let mut ascending = ids;
    ascending.sort_unstable();
    assert!(player.table.sorted().ids().eq(ascending));
}

#[test]
fn ids_chosen_to_share_a_hash_do_not_grow_the_directory() {
    let mut player = Player::new(settings(Algorithm::Sgd), 64);
    let alike = (0..).filter(|id| mix(*id) >> 52 == 0);
    let rows: Vec<_> = alike.take(205).map(|id| (id, 1.0)).collect();
    let refusal = player.push(&rows).expect_err("they share twelve bits");
    assert!(refusal.contains("204 rows whose ids share 11 bits of their hash"), "{refusal}");
    player.push(&[(1 << 40, 1.0)]).expect("others go on");
}

#[test]
fn an_update_without_memory_changes_nothing_and_is_refused_with_counts() {
    // A piece for the index, one for 256 records of 16 bytes: weight and momentum are 16, and a version.
    let mut player = Player::new(settings(Algorithm::Adagrad { epsilon: 1.0 }), 2);
    let rows: Vec<_> = (0..150).map(|id| (id, 1.0)).collect();
    player.push(&rows).expect("there is room");
    let ids: Vec<u64> = (0..150).collect();
    let before = player.pull(&ids);
    let rows: Vec<_> = (0..1000).map(|id| (id, 1.0)).collect();
    let refusal = player.push(&rows).expect_err("there is no room");
    assert_eq!(
        refusal,
        "no room for row 204: 204 rows take 4096 bytes, their index 4096; no memory for 4096 bytes: all 2 slots of \
         4096 bytes are in use, and no larger slot is free"
    );
    assert_eq!(player.table.version(), Version(1));
    assert_eq!(player.pull(&ids), before);
    assert_eq!(player.pull(&[180]), player.initial(180));
    let rows: Vec<_> = (0..204).map(|id| (id, 1.0)).collect();
    player.push(&rows).expect("these have room already");
}

#[test]
fn an_update_after_a_reservation_cannot_fail() {
    let mut player = Player::new(momentum(), 2);
    let ids: Vec<u64> = (0..150).collect();
    let checked = Ids::new(player.table.layout(), &ids).expect("in range");
    player.table.reserve(&mut player.work, checked).expect("there is room");
    let initial: Vec<f32> = ids.iter().flat_map(|id| player.initial(*id)).collect();
    assert_eq!(player.pull(&ids), initial);
    // Other rows take the rest of the memory.
    let others: Vec<_> = (1000..3000).map(|id| (id, 1.0)).collect();
    player.push(&others).expect_err("there is no room for all of these");
    let rows: Vec<_> = (0..150).map(|id| (id, 1.0)).collect();
    player.push(&rows).expect("room was reserved");
}

#[test]
fn setting_a_row_replaces_its_weight_and_leaves_its_states() {
    let mut player = Player::new(momentum(), 2);
    player.push(&[(1, 1.0)]).expect("there is room");
    player.push(&[(2, 1.0)]).expect("there is room");
    player.set(&[1, 9, 1], &[5.0, 5.0, 7.0, 7.0, 6.0, 6.0]);
    assert_eq!(player.pull(&[1, 9]), [6.0, 6.0, 7.0, 7.0]);
    player.push(&[(2, 1.0)]).expect("there is room");
    // The momentum of row 1 was -0.5, then -0.25, and is -0.125 now.
    assert_eq!(player.pull(&[1, 9]), [5.875, 5.875, 7.0, 7.0]);
}

#[test]
fn a_table_restored_from_records_in_any_order_goes_on_like_the_original() {
    let adam = Algorithm::Adam { beta1: 0.9, beta2: 0.99, epsilon: 1e-6 };
    let decaying = with(settings(adam), |rule| rule.l2 = 0.1);
    let mut first = Player::new(decaying.clone(), 100);
    for round in 0..20 {
        let rows: Vec<_> = (0..30).map(|id| (id * id % (round + 7), 0.25 * round as f32)).collect();
        first.push(&rows).expect("there is room");
    }
    let mut second = Player::new(decaying, 100);
    second.table.resume(first.table.version(), first.table.rates().clone());
    let sorted = first.table.sorted();
    let ids: Vec<u64> = sorted.ids().collect();
    assert!(ids.is_sorted() && ids.len() as u64 == first.rows());
    for index in (0..sorted.len()).rev() {
        second.table.restore(&mut second.work, first.table.record(&sorted, index)).expect("it was a record");
    }
    for player in [&mut first, &mut second] {
        player.push(&[(3, 1.0), (1000, 2.0)]).expect("there is room");
    }
    let all: Vec<u64> = (0..40).chain([1000, 5000]).collect();
    assert_eq!(second.pull(&all), first.pull(&all));
}

#[test]
fn a_record_that_does_not_fit_is_refused_by_name() {
    let mut player = Player::new(momentum(), 2);
    player.table.resume(Version(5), RateChanges::default());
    let mut check = |last, content: &[u8], expected: &str| {
        let record = Record { id: 4, last: Version(last), content };
        let refusal = player.table.restore(&mut player.work, record).expect_err("it does not fit");
        assert_eq!(refusal.to_string(), expected);
    };
    check(1, &[0; 8], "row 4 has 8 bytes; expected 16");
    check(6, &[0; 16], "row 4 is of version 6; expected at most 5");
    assert_eq!(player.rows(), 0);
}

#[test]
fn settings_that_a_table_does_not_support_are_refused_by_name() {
    let check = |settings: TableSettings, expected: &str| {
        assert_eq!(RowTable::new(settings, pieces(2)).expect_err("it cannot be").to_string(), expected);
    };
    let clipped = with(momentum(), |rule| rule.clip_norm = Some(2.0));
    check(
        clipped,
        "clip_norm is 2 for a parameter of rows, whose whole gradient no server has; expected none, or \
         clip_value",
    );
    let wide = TableSettings { layout: layout(ElementType::Float32, 1000), ..momentum() };
    check(wide, "pieces of 4096 bytes; expected at least 8064, a row with its states");
    let integers = TableSettings { layout: layout(ElementType::Int32, 1), ..momentum() };
    check(
        integers,
        "momentum cannot update a parameter of type int32; expected float32 or float64, or the algorithm add or sum",
    );
}

#[test]
fn a_step_with_an_invalid_rate_or_scale_is_refused() {
    let mut player = Player::new(momentum(), 2);
    let mut check = |rate, scale, expected: &str| {
        let mut merge = RowMerge::default();
        let merged = merge.unite(player.table.layout(), &[]).expect("there is nothing");
        let step = Step { version: Version(1), rate, scale, ..Step::FIRST };
        let refusal = player.table.apply(&mut player.work, &mut Plain, &merged, &step, &[]).expect_err("it is refused");
        assert_eq!(refusal.to_string(), format!("a step's {expected}; expected a finite number, zero or above"));
    };
    check(Some(-1.0), 1.0, "rate is -1");
    check(Some(f64::NAN), 1.0, "rate is NaN");
    check(None, f64::INFINITY, "scale is inf");
}

/// Plain kernels that count the bytes of weights that they update.
struct Counting(u64);

impl Kernels for Counting {
    fn sum(&mut self, element_type: ElementType, into: &mut [u8], gradients: &[Gradient<'_>]) {
        Plain.sum(element_type, into, gradients);
    }

    fn update(&mut self, update: Update<'_>) {
        self.0 += update.parameter.len() as u64;
        Plain.update(update);
    }

    fn narrow_to_half(&mut self, half: Half, value: &[u8], into: &mut [u8]) {
        Plain.narrow_to_half(half, value, into);
    }

    fn name(&self) -> &'static str {
        "counting"
    }
}

/// Rules under which idle rows change, each in another way.
fn restless() -> Vec<TableSettings> {
    let adam = settings(Algorithm::Adam { beta1: 0.9, beta2: 0.99, epsilon: 1e-6 });
    let decaying = with(settings(Algorithm::Sgd), |rule| rule.l2 = 0.01);
    vec![momentum(), with(adam.clone(), |rule| rule.l1 = 0.01), adam, decaying]
}

/// Pulls rows in as many pieces as it takes; how many those were.
fn read_in_pieces(player: &mut Player, ids: &[u64], allowance: u64) -> (Vec<f32>, usize) {
    let (mut into, mut reading) = (vec![0xff; ids.len() * 8], PartialRead::default());
    let ids = Ids::new(player.table.layout(), ids).expect("ids in range");
    for pieces in 1.. {
        let (mut kernels, mut left) = (Counting(0), allowance);
        let Player { table, work } = player;
        let is_over = table.read(work, &mut kernels, ids, &mut reading, &mut left, &mut into);
        // An update goes over all rows of a tile, whatever remains of the allowance.
        assert!(kernels.0 <= allowance + 8 * ids.len() as u64, "{} bytes for {allowance}", kernels.0);
        if is_over {
            return (floats(&into), pieces);
        }
    }
    unreachable!("it is over when it is")
}

#[test]
fn rows_read_in_pieces_equal_rows_read_at_once() {
    for settings in restless() {
        let (mut whole, mut pieces) = (Player::new(settings.clone(), 8), Player::new(settings, 8));
        let mut prng = Prng(3);
        for round in 0..60 {
            let rows: Vec<_> = (0..prng.below(4)).map(|_| (prng.below(12), 0.5)).collect();
            for player in [&mut whole, &mut pieces] {
                player.push(&rows).expect("there is room");
            }
            let ids: Vec<u64> = (0..prng.below(9)).map(|_| prng.below(20)).collect();
            let (found, count) = read_in_pieces(&mut pieces, &ids, 1 + prng.below(200));
            assert_eq!(found, whole.pull(&ids), "round {round} in {count} pieces");
        }
        let all: Vec<u64> = (0..20).collect();
        let (found, count) = read_in_pieces(&mut pieces, &all, 64);
        assert_eq!(found, whole.pull(&all), "in {count} pieces");
        assert_eq!(pieces.rows(), whole.rows(), "reading puts no row there");
    }
}

#[test]
fn a_read_during_updates_gives_each_row_as_of_some_version() {
    let decaying = with(settings(Algorithm::Sgd), |rule| rule.l2 = 0.01);
    let mut player = Player::new(decaying, 8);
    for _ in 0..50 {
        player.push(&[(1, 0.0)]).expect("there is room");
    }
    let ids: Vec<u64> = (0..6).collect();
    let ids = Ids::new(player.table.layout(), &ids).expect("ids in range");
    let (mut into, mut reading) = (vec![0; 48], PartialRead::default());
    let initial: Vec<f32> = (0..6).map(|id| player.initial(id)[0]).collect();
    for turn in 0.. {
        assert!(turn < 200, "it comes to its end, although the table goes on");
        let (Player { table, work }, mut left) = (&mut player, 64);
        if table.read(work, &mut Plain, ids, &mut reading, &mut left, &mut into) {
            break;
        }
        // A row that did not exist when the read began, and a row that is read later.
        player.push(&[(turn % 6, 0.0)]).expect("there is room");
    }
    let updates = player.table.version().0;
    for (initial, found) in initial.iter().zip(floats(&into).chunks(2)) {
        let versions = (0..updates).scan(*initial, |value, _| {
            *value /= 1.005;
            Some(*value)
        });
        let is_near = |value: &f32| (value - found[0]).abs() <= initial.abs() * 1e-5;
        assert!(versions.skip(49).any(|value| is_near(&value)), "{found:?} from {initial} after 50 to {updates}");
    }
}

#[test]
fn rows_that_catch_up_in_pieces_are_updated_like_rows_that_do_at_once() {
    for settings in restless() {
        let (mut whole, mut pieces) = (Player::new(settings.clone(), 8), Player::new(settings, 8));
        let first: Vec<_> = (0..10).map(|id| (id, 0.5)).collect();
        let ids: Vec<u64> = (0..12).collect();
        for player in [&mut whole, &mut pieces] {
            player.push(&first).expect("there is room");
            (0..100).for_each(|_| player.push(&[(3, 0.25)]).expect("there is room"));
        }
        let mut from = 0;
        let mut turn = |player: &mut Player, mut left: u64| {
            let (mut kernels, allowance) = (Counting(0), left);
            let ids = Ids::new(player.table.layout(), &ids).expect("ids in range");
            let is_over = player.table.catch_up(&mut player.work, &mut kernels, ids, &mut from, &mut left);
            assert!(kernels.0 <= allowance + 80, "{} bytes for {allowance}", kernels.0);
            (is_over, kernels.0)
        };
        assert_eq!(turn(&mut pieces, 0), (false, 0), "there is nothing left");
        let turns = (1..).find(|_| turn(&mut pieces, 240).0).expect("it comes to its end");
        // A hundred updates of nine rows of 8 bytes, but where they come to rest.
        assert!((3..=30 + 1).contains(&turns), "{turns} turns");
        let second: Vec<_> = ids.iter().map(|id| (*id, 1.0)).collect();
        for player in [&mut whole, &mut pieces] {
            player.push(&second).expect("there is room");
        }
        assert_eq!(pieces.pull(&ids), whole.pull(&ids));
    }
}

/// A copy in ascending order of its ids.
fn sorted(copy: &TableCopy) -> Vec<(u64, u64, Vec<Vec<u8>>)> {
    let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    let row = |(index, (id, last)): (usize, (&[u8], &[u8]))| {
        let parts = copy.contents.iter().map(|tensor| tensor[index * 8..][..8].to_vec()).collect();
        (number(id), number(last), parts)
    };
    let mut rows: Vec<_> = copy.ids.chunks(8).zip(copy.lasts.chunks(8)).enumerate().map(row).collect();
    rows.sort();
    rows
}

#[test]
fn a_copy_in_pieces_is_the_table_as_of_the_start_of_the_copy() {
    let lasting = with(settings(Algorithm::Adagrad { epsilon: 1e-6 }), |_| ());
    for settings in restless().into_iter().chain([lasting]) {
        let mut player = Player::new(settings, 100);
        let mut prng = Prng(9);
        let mut some = |below: u64| (0..20).map(|_| (prng.below(below), 0.5)).collect::<Vec<_>>();
        for _ in 0..100 {
            player.push(&some(1500)).expect("there is room");
        }
        let expected = player.table.copy();
        player.table.begin_copy();
        let mut pieces = 0;
        let copy = loop {
            pieces += 1;
            if let Some(copy) = player.table.copy_on(&mut 1000) {
                break copy;
            }
            // Existing rows, and new ones that split pages; rows that are read, and rows that are set.
            player.push(&some(1500)).expect("there is room");
            player.push(&some(1 << 40)).expect("there is room");
            player.pull(&some(1500).iter().map(|(id, _)| *id).collect::<Vec<_>>());
            player.set(&[1, 2, 3], &[7.0; 6]);
        };
        assert!(pieces > 5, "{pieces} pieces");
        assert_eq!(sorted(&copy), sorted(&expected));
        assert_ne!(sorted(&player.table.copy()), sorted(&expected), "the table went on");
        player.push(&some(1500)).expect("there is room");
    }
}
