//! Rows: sorted, united, summed and updated.

use std::mem::offset_of;

use bytemuck::{Zeroable, bytes_of, cast_slice};
use pserver_core::dtype::ElementType;
use pserver_core::ids::Version;
use pserver_core::optim::{Formula, Gradient, Prepared, Rule, Step};
use pserver_core::port::{Kernels, Plain, Update};
use pserver_core::rows::{Height, Merge, RowLayout, SelectedRows};
use pserver_kernels::conformance::{self, values};
use pserver_kernels::cuda::Emitted;
use pserver_kernels::cuda::arguments::{Kind, RowsArguments, SORT_DIGITS, SORT_TILE, ScanArguments, SortArguments};

use crate::child::{Address, BufferId, Shim};
use crate::launches::{FLOATS, assert_same, module, size};

/// Ids sorted and united on the device.
struct United {
    keys: Vec<u64>,
    places: Vec<u32>,
    unique_keys: Vec<u64>,
    starts: Vec<u32>,
}

fn at(offset: usize, buffer: BufferId) -> Address {
    Address { offset, buffer, within: 0 }
}

fn unite(shim: &mut Shim, ids: &[u64]) -> United {
    let tiles = u32::try_from(ids.len()).expect("few ids").div_ceil(SORT_TILE).max(1);
    let keys = [shim.buffer(cast_slice(ids), 0), shim.buffer(&vec![0xff; ids.len() * 8], 0)];
    let places = [0, 1].map(|_| shim.buffer(&vec![0xff; ids.len() * 4], 0));
    let counts = shim.buffer(&vec![0xff; (tiles * SORT_DIGITS) as usize * 4], 0);
    let scan = |shim: &mut Shim, count: u32| {
        let arguments = ScanArguments { counts: 0, count: count.into() };
        shim.launch("pserver_scan", [1, 1], bytes_of(&arguments), &[at(offset_of!(ScanArguments, counts), counts)]);
    };
    let mut arguments = SortArguments::zeroed();
    arguments.pairs = ids.len() as u64;
    let grid = [tiles.into(), 1];
    let passes = (64 - ids.iter().copied().max().unwrap_or(0).leading_zeros()).div_ceil(8).max(1) as usize;
    for pass in 0..passes {
        let (from, into) = (pass % 2, 1 - pass % 2);
        arguments.shift = u32::try_from(pass * 8).expect("below 64");
        let mut addresses = vec![
            at(offset_of!(SortArguments, keys), keys[from]),
            at(offset_of!(SortArguments, keys_after), keys[into]),
            at(offset_of!(SortArguments, places_after), places[into]),
            at(offset_of!(SortArguments, counts), counts),
        ];
        if pass > 0 {
            addresses.push(at(offset_of!(SortArguments, places), places[from]));
        }
        shim.launch("pserver_sort_count", grid, bytes_of(&arguments), &addresses);
        scan(shim, tiles * SORT_DIGITS);
        shim.launch("pserver_sort_scatter", grid, bytes_of(&arguments), &addresses);
    }
    let sorted = passes % 2;
    let unique_keys = shim.buffer(&vec![0xff; ids.len() * 8], 0);
    let starts = shim.buffer(&vec![0xff; ids.len() * 4 + 4], 0);
    let unique = shim.buffer(&[0xff; 4], 0);
    let addresses = [
        at(offset_of!(SortArguments, keys), keys[sorted]),
        at(offset_of!(SortArguments, keys_after), unique_keys),
        at(offset_of!(SortArguments, places_after), starts),
        at(offset_of!(SortArguments, counts), counts),
        at(offset_of!(SortArguments, unique), unique),
    ];
    shim.launch("pserver_segment_count", grid, bytes_of(&arguments), &addresses);
    scan(shim, tiles);
    shim.launch("pserver_segment_write", grid, bytes_of(&arguments), &addresses);
    let found = shim.read(unique, 4);
    let found = u32::from_le_bytes(found.try_into().expect("four bytes")) as usize;
    let united = United {
        keys: words(&shim.read(keys[sorted], ids.len() * 8)),
        places: halves(&shim.read(places[sorted], ids.len() * 4)),
        unique_keys: words(&shim.read(unique_keys, ids.len() * 8))[..found.min(ids.len())].to_vec(),
        starts: halves(&shim.read(starts, ids.len() * 4 + 4))[..=found.min(ids.len())].to_vec(),
    };
    shim.release();
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
    let Some(mut shim) = Shim::new(&module()) else { return };
    for ids in lists() {
        for order in [0, 1, 5] {
            shim.order(order);
            check_united(&unite(&mut shim, &ids), &ids).expect("sorted and united");
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

/// Without any one of the barriers some order of threads gives other results, or ends the process.
#[test]
fn every_missing_barrier_is_noticed() {
    let Some(mut shim) = Shim::new(&module()) else { return };
    let ids = random_ids(20_000, 300, 77);
    unite(&mut shim, &ids);
    let barriers = shim.barriers();
    assert!(barriers.len() >= 8, "{barriers:?}");
    for line in barriers {
        let is_noticed = [0, 1, 5, 6].into_iter().any(|order| {
            let outcome = std::panic::catch_unwind(|| {
                let mut shim = Shim::new(&module()).expect("g++ was there a moment ago");
                shim.order(order);
                shim.drop_barrier(line);
                check_united(&unite(&mut shim, &ids), &ids).is_err()
            });
            outcome.unwrap_or(true)
        });
        println!("the barrier at line {line} of the module: {}", if is_noticed { "noticed" } else { "not noticed" });
        assert!(is_noticed, "the barrier at line {line} of the module may be left out");
    }
}

const WIDTHS: [u32; 3] = [1, 8, 67];
const RECORDS: u64 = 60;

#[test]
fn rows_are_merged_and_updated_as_the_plain_form_does() {
    let Some(mut shim) = Shim::new(&module()) else { return };
    let rules = &conformance::rules()[..12];
    for (index, rule) in rules.iter().enumerate() {
        for (element_type, width) in FLOATS.into_iter().flat_map(|each| WIDTHS.map(|width| (each, width))) {
            let kinds = [element_type, ElementType::Float16, ElementType::Bfloat16];
            let gradient_type = kinds[(index + width as usize) % 3];
            check_rows(&mut shim, rule, element_type, gradient_type, width, index as u64);
        }
    }
}

fn check_rows(
    shim: &mut Shim,
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
    let mut merge = Merge::default();
    let merged = merge.unite(layout, &views).expect("they fit").to_selected_rows();
    let prepared = Prepared::new(rule.clone()).expect("it is a rule");
    let step = Step { version: Version(5), rate: None, norm: None, scale: 1.0 };
    let tensor_bytes = usize::try_from(RECORDS).expect("few") * width as usize * size(element_type);
    let tensors: Vec<Vec<u8>> = (0..=prepared.states().len())
        .map(|tensor| values(element_type, tensor_bytes / size(element_type), seed, tensor as u64))
        .collect();
    let expected = updated(&prepared, &step, &tensors, &merged);
    shim.order(seed % 4);
    let left = launch_rows(shim, &prepared, &step, &tensors, &contributions, element_type);
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

/// All tensors, one behind the other, after the kernels.
fn launch_rows(
    shim: &mut Shim,
    prepared: &Prepared,
    step: &Step,
    tensors: &[Vec<u8>],
    contributions: &[SelectedRows],
    element_type: ElementType,
) -> Vec<u8> {
    let ids: Vec<u64> = contributions.iter().flat_map(|rows| rows.view().ids().iter().collect::<Vec<_>>()).collect();
    let united = unite(shim, &ids);
    let mut values = Vec::new();
    let Formula::Rule { code, scalars } = prepared.formula(step, &mut values) else { panic!("a rule") };
    let (emitted, mut packed) = (Emitted::of(code), Vec::new());
    emitted.pack(element_type, scalars, &mut packed);
    let layout = contributions[0].view().layout();
    let mut arguments = RowsArguments::zeroed();
    (arguments.width, arguments.count) = (layout.width(), 4);
    arguments.gradient_kind = Kind::of(layout.element_type()).code();
    arguments.stride = layout.width() as u64 * element_type.bytes();
    arguments.state_stride = tensors[0].len() as u64;
    let unique = u32::try_from(united.unique_keys.len()).expect("few rows");
    let records = shim.buffer(&tensors.concat(), 0);
    let mut addresses = vec![
        at(offset_of!(RowsArguments, records), records),
        at(offset_of!(RowsArguments, unique), shim.buffer(&unique.to_le_bytes(), 0)),
        at(offset_of!(RowsArguments, keys), shim.buffer(cast_slice(&united.unique_keys), 0)),
        at(offset_of!(RowsArguments, starts), shim.buffer(cast_slice(&united.starts), 0)),
        at(offset_of!(RowsArguments, places), shim.buffer(cast_slice(&united.places), 0)),
    ];
    if !packed.is_empty() {
        addresses.push(at(offset_of!(RowsArguments, scalars), shim.buffer(&packed, 0)));
    }
    let mut first = 0;
    for (index, rows) in contributions.iter().enumerate() {
        arguments.firsts[index] = first;
        first += u32::try_from(rows.view().len()).expect("few rows");
        let bytes: Vec<u8> = (0..rows.view().len()).flat_map(|row| rows.view().row(row).to_vec()).collect();
        addresses.push(at(offset_of!(RowsArguments, gradients) + 8 * index, shim.buffer(&bytes, 0)));
    }
    shim.launch(&emitted.rows_entry(element_type), [2, 1], bytes_of(&arguments), &addresses);
    let left = shim.read(records, tensors.len() * tensors[0].len());
    shim.release();
    left
}
