//! Kernels for rows: sort, merge of equal ids, sum and update.

use std::mem::offset_of;

use bytemuck::{Zeroable, bytes_of, cast_slice};
use pserver_core::dtype::ElementType;
use pserver_core::ids::Version;
use pserver_core::optim::{Formula, Gradient, Prepared, Rule, Step};
use pserver_core::port::{Kernels, Plain, Update};
use pserver_core::rows::{Height, RowLayout, RowMerge, SelectedRows};
use pserver_kernels::conformance::compiled::{code_of, module};
use pserver_kernels::conformance::{self, values};
use pserver_kernels::cuda::Emitted;
use pserver_kernels::cuda::arguments::{
    ElementKind, RowsArguments, SORT_DIGITS, SORT_TILE, ScanArguments, SortArguments,
};

use crate::launcher::{DeviceAddress, Launcher, assert_a_lost_launch_is_noticed, on_every};
use crate::launches::{FLOATS, assert_same, size};

/// Ids sorted and united on the device.
struct United {
    keys: Vec<u64>,
    places: Vec<u32>,
    unique_keys: Vec<u64>,
    starts: Vec<u32>,
}

fn unite(launcher: &mut dyn Launcher, ids: &[u64]) -> United {
    let tiles = u32::try_from(ids.len()).expect("few ids").div_ceil(SORT_TILE).max(1);
    let keys = [launcher.buffer(cast_slice(ids), 0), launcher.buffer(&vec![0xff; ids.len() * 8], 0)];
    let places = [0, 1].map(|_| launcher.buffer(&vec![0xff; ids.len() * 4], 0));
    let counts = launcher.buffer(&vec![0xff; (tiles * SORT_DIGITS) as usize * 4], 0);
    let scan = |launcher: &mut dyn Launcher, count: u32| {
        let arguments = ScanArguments { counts: 0, count: count.into() };
        launcher.launch(
            "pserver_scan",
            [1, 1],
            bytes_of(&arguments),
            &[DeviceAddress::of(offset_of!(ScanArguments, counts), counts)],
        );
    };
    let mut arguments = SortArguments::zeroed();
    arguments.pairs = ids.len() as u64;
    let grid = [tiles.into(), 1];
    let passes = (64 - ids.iter().copied().max().unwrap_or(0).leading_zeros()).div_ceil(8).max(1) as usize;
    for pass in 0..passes {
        let (from, into) = (pass % 2, 1 - pass % 2);
        arguments.shift = u32::try_from(pass * 8).expect("below 64");
        let mut addresses = vec![
            DeviceAddress::of(offset_of!(SortArguments, keys), keys[from]),
            DeviceAddress::of(offset_of!(SortArguments, keys_after), keys[into]),
            DeviceAddress::of(offset_of!(SortArguments, places_after), places[into]),
            DeviceAddress::of(offset_of!(SortArguments, counts), counts),
        ];
        if pass > 0 {
            addresses.push(DeviceAddress::of(offset_of!(SortArguments, places), places[from]));
        }
        launcher.launch("pserver_sort_count", grid, bytes_of(&arguments), &addresses);
        scan(launcher, tiles * SORT_DIGITS);
        launcher.launch("pserver_sort_scatter", grid, bytes_of(&arguments), &addresses);
    }
    let sorted = passes % 2;
    let unique_keys = launcher.buffer(&vec![0xff; ids.len() * 8], 0);
    let starts = launcher.buffer(&vec![0xff; ids.len() * 4 + 4], 0);
    let unique = launcher.buffer(&[0xff; 4], 0);
    let addresses = [
        DeviceAddress::of(offset_of!(SortArguments, keys), keys[sorted]),
        DeviceAddress::of(offset_of!(SortArguments, keys_after), unique_keys),
        DeviceAddress::of(offset_of!(SortArguments, places_after), starts),
        DeviceAddress::of(offset_of!(SortArguments, counts), counts),
        DeviceAddress::of(offset_of!(SortArguments, unique), unique),
    ];
    launcher.launch("pserver_segment_count", grid, bytes_of(&arguments), &addresses);
    scan(launcher, tiles);
    launcher.launch("pserver_segment_write", grid, bytes_of(&arguments), &addresses);
    let found = launcher.read(unique, 4);
    let found = u32::from_le_bytes(found.try_into().expect("four bytes")) as usize;
    let united = United {
        keys: words(&launcher.read(keys[sorted], ids.len() * 8)),
        places: halves(&launcher.read(places[sorted], ids.len() * 4)),
        unique_keys: words(&launcher.read(unique_keys, ids.len() * 8))[..found.min(ids.len())].to_vec(),
        starts: halves(&launcher.read(starts, ids.len() * 4 + 4))[..=found.min(ids.len())].to_vec(),
    };
    launcher.release();
    united
}

fn words(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect()
}

fn halves(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()
}

fn random_ids(count: usize, bound: u64, seed: u64) -> Vec<u64> {
    words(&values(ElementType::Uint64, count, seed, 9)).into_iter().map(|id| (id >> 1) % bound).collect()
}

/// The sizes that one tile, several tiles and a part of one have; few ids, many, and those of 63 bits.
fn lists() -> Vec<Vec<u64>> {
    let sizes = [(0, 5), (1, 5), (31, 5), (2048, 700), (2049, 3), (5000, 1 << 62), (4096, 1 << 20), (700, 256)];
    sizes.into_iter().enumerate().map(|(seed, (count, bound))| random_ids(count, bound, seed as u64)).collect()
}

#[test]
fn ids_are_sorted_in_order_and_united() {
    on_every(&module(), check_sorted);
}

fn check_sorted(launcher: &mut dyn Launcher) {
    for ids in lists() {
        for order in [0, 1, 5] {
            launcher.order(order);
            check_united(&unite(launcher, &ids), &ids).expect("sorted and united");
        }
    }
}

fn check_united(united: &United, ids: &[u64]) -> Result<(), String> {
    let mut expected: Vec<(u64, u32)> = ids.iter().copied().zip(0..).collect();
    expected.sort_unstable();
    let (keys, places): (Vec<u64>, Vec<u32>) = expected.into_iter().unzip();
    let mut starts = Vec::new();
    for (index, key) in (0..).zip(&keys) {
        if index == 0 || keys[index as usize - 1] != *key {
            starts.push(index);
        }
    }
    let unique_keys: Vec<u64> = starts.iter().map(|start: &u32| keys[*start as usize]).collect();
    starts.push(u32::try_from(ids.len()).expect("few ids"));
    let is_right = united.keys == keys && united.places == places;
    let is_united = united.unique_keys == unique_keys && united.starts == starts;
    if is_right && is_united { Ok(()) } else { Err(format!("{} ids: {is_right} {is_united}", ids.len())) }
}

/// Detects a missing barrier.
pub(crate) fn uniting_is_right(launcher: &mut dyn Launcher) -> bool {
    let ids = random_ids(20_000, 300, 77);
    check_united(&unite(launcher, &ids), &ids).is_ok()
}

/// The checks fail for a launcher that loses any one launch.
#[test]
fn a_lost_launch_is_noticed() {
    on_every(&module(), |launcher| {
        let ids = random_ids(5000, 1 << 20, 3);
        assert_a_lost_launch_is_noticed(launcher, "pserver_segment_write", |launcher| {
            check_united(&unite(launcher, &ids), &ids).expect("sorted and united");
        });
        let rule = &conformance::rules()[1];
        assert_a_lost_launch_is_noticed(launcher, "pserver_rows_", |launcher| {
            check_rows(launcher, rule, ElementType::Float32, ElementType::Float32, 8, 1);
        });
    });
}

const WIDTHS: [u32; 3] = [1, 8, 67];
const RECORDS: u64 = 60;

#[test]
fn rows_are_merged_and_updated_as_the_plain_form_does() {
    on_every(&module(), check_all_rows);
}

fn check_all_rows(launcher: &mut dyn Launcher) {
    let rules = &conformance::rules()[..12];
    for (index, rule) in rules.iter().enumerate() {
        let code = code_of(&Prepared::new(rule.clone()).expect("it is a rule")).expect("it has code");
        let emitted = Emitted::of(&code);
        for (element_type, width) in FLOATS.into_iter().flat_map(|each| WIDTHS.map(|width| (each, width))) {
            if !launcher.has(&emitted.rows_entry(element_type)) {
                continue;
            }
            let kinds = [element_type, ElementType::Float16, ElementType::Bfloat16];
            let gradient_type = kinds[(index + width as usize) % 3];
            check_rows(launcher, rule, element_type, gradient_type, width, index as u64);
        }
    }
}

/// An update of rows, where the rule has a kernel for them.
pub(crate) fn check_rule(
    launcher: &mut dyn Launcher,
    rule: &Rule,
    element_type: ElementType,
    gradient_type: ElementType,
) {
    let code = code_of(&Prepared::new(rule.clone()).expect("it is a rule")).expect("it has code");
    if launcher.has(&Emitted::of(&code).rows_entry(element_type)) {
        check_rows(launcher, rule, element_type, gradient_type, 67, 1);
    }
}

fn check_rows(
    launcher: &mut dyn Launcher,
    rule: &Rule,
    element_type: ElementType,
    gradient_type: ElementType,
    width: u32,
    seed: u64,
) {
    let layout = RowLayout::new(element_type, width, Height::Rows(RECORDS)).expect("a layout");
    let contributions: Vec<SelectedRows> = (0..4)
        .map(|trainer| {
            let ids = random_ids(17, 24, seed * 7 + trainer);
            let rows = values(gradient_type, ids.len() * width as usize, seed + trainer, 2);
            SelectedRows::new(layout.of(gradient_type).expect("a layout"), &ids, &rows).expect("rows")
        })
        .collect();
    let views: Vec<_> = contributions.iter().map(SelectedRows::view).collect();
    let mut merge = RowMerge::default();
    let merged = merge.unite(layout, &views).expect("they fit").to_selected_rows();
    let prepared = Prepared::new(rule.clone()).expect("it is a rule");
    let step = Step { version: Version(5), ..Step::FIRST };
    let tensor_bytes = usize::try_from(RECORDS).expect("few") * width as usize * size(element_type);
    let tensors: Vec<Vec<u8>> = (0..=prepared.states().len())
        .map(|tensor| values(element_type, tensor_bytes / size(element_type), seed, tensor as u64))
        .collect();
    let expected = updated(&prepared, &step, &tensors, &merged);
    launcher.order(seed % 4);
    let left = launch_rows(launcher, &prepared, &step, &tensors, &contributions, element_type);
    assert_same(element_type, &left, &expected.concat(), &format!("{width} wide, {gradient_type}: {rule:?}"));
}

/// Tensors after an update of some rows, by the plain form.
fn updated(prepared: &Prepared, step: &Step, tensors: &[Vec<u8>], merged: &SelectedRows) -> Vec<Vec<u8>> {
    let mut expected = tensors.to_vec();
    let merged = merged.view();
    let bytes = merged.layout().row_bytes();
    for (place, id) in merged.ids().iter().enumerate() {
        let row = usize::try_from(id).expect("few rows") * bytes..usize::try_from(id + 1).expect("few rows") * bytes;
        let (weights, states) = expected.split_first_mut().expect("there are weights");
        Plain.update(Update {
            formula: prepared.formula(step, &mut Vec::new()),
            element_type: merged.layout().element_type(),
            parameter: &mut weights[row.clone()],
            states: &mut states.iter_mut().map(|state| &mut state[row.clone()]).collect::<Vec<_>>(),
            gradients: &[Gradient { bytes: merged.row(place), element_type: merged.layout().element_type() }],
        });
    }
    expected
}

/// All tensors after the kernels, concatenated.
fn launch_rows(
    launcher: &mut dyn Launcher,
    prepared: &Prepared,
    step: &Step,
    tensors: &[Vec<u8>],
    contributions: &[SelectedRows],
    element_type: ElementType,
) -> Vec<u8> {
    let ids: Vec<u64> = contributions.iter().flat_map(|rows| rows.view().ids().iter().collect::<Vec<_>>()).collect();
    let united = unite(launcher, &ids);
    let mut values = Vec::new();
    let Formula::Rule { code, scalars } = prepared.formula(step, &mut values) else { panic!("a rule") };
    let (emitted, mut packed) = (Emitted::of(code), Vec::new());
    emitted.pack(element_type, scalars, &mut packed);
    let layout = contributions[0].view().layout();
    let mut arguments = RowsArguments::zeroed();
    (arguments.width, arguments.count) = (layout.width(), 4);
    arguments.gradient_kind = ElementKind::of(layout.element_type()).code();
    arguments.stride = layout.width() as u64 * element_type.bytes();
    arguments.state_stride = tensors[0].len() as u64;
    let unique = u32::try_from(united.unique_keys.len()).expect("few rows");
    let records = launcher.buffer(&tensors.concat(), 0);
    let mut addresses = vec![
        DeviceAddress::of(offset_of!(RowsArguments, records), records),
        DeviceAddress::of(offset_of!(RowsArguments, unique), launcher.buffer(&unique.to_le_bytes(), 0)),
        DeviceAddress::of(offset_of!(RowsArguments, keys), launcher.buffer(cast_slice(&united.unique_keys), 0)),
        DeviceAddress::of(offset_of!(RowsArguments, starts), launcher.buffer(cast_slice(&united.starts), 0)),
        DeviceAddress::of(offset_of!(RowsArguments, places), launcher.buffer(cast_slice(&united.places), 0)),
    ];
    if !packed.is_empty() {
        addresses.push(DeviceAddress::of(offset_of!(RowsArguments, scalars), launcher.buffer(&packed, 0)));
    }
    let mut first = 0;
    for (index, rows) in contributions.iter().enumerate() {
        arguments.firsts[index] = first;
        first += u32::try_from(rows.view().len()).expect("few rows");
        let bytes: Vec<u8> = (0..rows.view().len()).flat_map(|row| rows.view().row(row).to_vec()).collect();
        addresses.push(DeviceAddress::of(offset_of!(RowsArguments, gradients) + 8 * index, launcher.buffer(&bytes, 0)));
    }
    launcher.launch(&emitted.rows_entry(element_type), [2, 1], bytes_of(&arguments), &addresses);
    let left = launcher.read(records, tensors.len() * tensors[0].len());
    launcher.release();
    left
}
