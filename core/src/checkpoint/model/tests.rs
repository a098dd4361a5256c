use std::sync::Arc;

use proptest::prelude::*;
use safetensors::SafeTensors;

use super::*;
use crate::checkpoint::inspect;
use crate::checkpoint::storage::tests::{get, put};
use crate::checkpoint::storage::{Failing, InMemory, StorageFault};

/// `name type shape`, such as `w:sparse-0 float32 2x3`; a scalar's shape is `-`.
fn tensor(text: &str) -> ModelTensor {
    let mut words = text.split(' ');
    let name = words.next().unwrap().to_owned();
    let element_type = words.next().unwrap();
    let element_type = ElementType::ALL.into_iter().find(|known| known.name() == element_type).unwrap();
    let shape = match words.next().unwrap() {
        "-" => Vec::new(),
        shape => shape.split('x').map(|dimension| dimension.parse().unwrap()).collect(),
    };
    ModelTensor { name, element_type, shape }
}

/// Plans the tensors of a `;`-separated list, and prints the plan in the same way with the parts behind.
fn plan(tensors: &str) -> Result<String, Failure> {
    let tensors: Vec<_> = tensors.split("; ").filter(|text| !text.is_empty()).map(tensor).collect();
    let outputs = plan_model(&tensors)?.into_iter().map(|output| {
        let shape: Vec<_> = output.shape.iter().map(u64::to_string).collect();
        format!("{} {} {} {:?}", output.name, output.element_type, shape.join("x"), output.parts)
    });
    Ok(outputs.collect::<Vec<_>>().join("; "))
}

fn check(tensors: &str, expected: &str) {
    assert_eq!(plan(tensors).as_deref(), Ok(expected), "{tensors}");
}

fn check_refused(tensors: &str, shard: &str, why: &str) {
    let text = plan(tensors).expect_err(tensors).to_string();
    assert!(text.contains(&format!("{shard:?}")), "{tensors}: {text:?} does not name {shard:?}");
    assert!(text.contains(why), "{tensors}: expected {why:?} in {text:?}");
}

#[test]
fn shards_become_one_parameter_in_index_order() {
    check("", "");
    check("w float32 2x3; b float32 3", "w float32 2x3 [0]; b float32 3 [1]");
    check("w:sparse-0 float32 2x3", "w float32 2x3 [0]");
    check("w:sparse-1 float32 1x3; b int32 4; w:sparse-0 float32 2x3", "w float32 3x3 [2, 0]; b int32 4 [1]");
    check("w:sparse-0 int64 2; w:sparse-1 int64 5", "w int64 7 [0, 1]");
    check("w:sparse-0 float32 0x3; w:sparse-1 float32 5x3", "w float32 5x3 [0, 1]");
    let eleven: Vec<_> = (0..11).rev().map(|shard| format!("w:sparse-{shard} float32 1x2")).collect();
    check(&eleven.join("; "), "w float32 11x2 [10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]");
}

#[test]
fn names_that_only_look_like_shards_are_ordinary() {
    check("w:sparse-x float32 2", "w:sparse-x float32 2 [0]");
    check("w:sparse- float32 2; w float32 1", "w:sparse- float32 2 [0]; w float32 1 [1]");
    check("w:sparse--1 float32 2; w:sparse-+1 float32 2", "w:sparse--1 float32 2 [0]; w:sparse-+1 float32 2 [1]");
    check("w:sparse-0x float32 2; wsparse-0 float32 2", "w:sparse-0x float32 2 [0]; wsparse-0 float32 2 [1]");
    check("a:sparse-0:sparse-0 float32 2", "a:sparse-0 float32 2 [0]");
}

#[test]
fn larger_elements_come_first_so_that_all_are_aligned() {
    check(
        "h float16 3; f float32 3; d float64 3; i int64 1",
        "d float64 3 [2]; i int64 1 [3]; f float32 3 [1]; h float16 3 [0]",
    );
}

#[test]
fn shards_that_do_not_make_one_parameter_are_refused_by_name() {
    check_refused("w:sparse-1 float32 2", "w:sparse-1", "without w:sparse-0");
    check_refused("w:sparse-0 float32 2; w:sparse-2 float32 2", "w:sparse-2", "without w:sparse-1");
    check_refused("w float32 2; w:sparse-0 float32 2", "w:sparse-0", "overlaps with \"w\"");
    check_refused("w:sparse-0 float32 2; w float32 2", "w:sparse-0", "overlaps with \"w\"");
    check_refused("w:sparse-0 float32 2; w:sparse-0 float32 2", "w:sparse-0", "occurs twice");
    check_refused("w float32 2; w int32 2", "w", "occurs twice");
    check_refused("w:sparse-0 float32 2; w:sparse-01 float32 2", "w:sparse-01", "leading zero");
    check_refused("w:sparse-00 float32 2", "w:sparse-00", "leading zero");
    check_refused("w:sparse-0 float32 2x3; w:sparse-1 float32 2x4", "w:sparse-1", "rows of shape [4]");
    check_refused("w:sparse-0 float32 2x3; w:sparse-1 float32 6", "w:sparse-1", "rows of shape []");
    check_refused("w:sparse-0 float32 2; w:sparse-1 float64 2", "w:sparse-1", "is of float64");
    check_refused("w:sparse-0 float32 -", "w:sparse-0", "has no rows");
    check_refused("w:sparse-99999999999999999999 float32 2", "w:sparse-99999999999999999999", "no list of shards");
    check_refused(":sparse-0 float32 2", ":sparse-0", "without a name");
    check_refused("__metadata__ float32 2", "__metadata__", "cannot hold");
    check_refused("w float32 4294967296x4294967296x4", "w", "larger than any parameter may be");
    check_refused("w:sparse-0 uint32 70368744177664; w:sparse-1 uint32 1", "w", "larger than any parameter may be");
}

/// A parameter as it is declared: `name type shape`, and `rows` behind it where it is one of rows.
fn declaration(text: &str) -> Declaration {
    let (text, rows) = text.strip_suffix(" rows").map_or((text, false), |text| (text, true));
    let ModelTensor { name, element_type, shape } = tensor(text);
    let bytes = shape.iter().product::<u64>() * element_type.bytes();
    Declaration {
        name: crate::partition::Name::new(name.as_bytes()).unwrap(),
        element_type,
        bytes,
        shape,
        whole: false,
        config: Vec::new(),
        buckets: rows.then_some(crate::partition::Buckets { rows: 10, count: 1 }),
        owner: None,
        sender: None,
        total_part: None,
        hosted: None,
    }
}

#[test]
fn a_model_that_could_not_be_saved_is_detected_from_the_declarations() {
    let check = |parameters: &str, refusal: Option<&str>| {
        let parameters: Vec<_> = parameters.split("; ").map(declaration).collect();
        match (check_savable(parameters.iter()), refusal) {
            (Ok(()), None) => {}
            (Err(failure), Some(refusal)) => assert!(failure.to_string().contains(refusal), "{failure}"),
            (found, expected) => panic!("{parameters:?}: expected {expected:?}, found {found:?}"),
        }
    };
    check("e:sparse-0 float32 2x3; e:sparse-1 float32 4x3; b float32 3", None);
    check("e:sparse-0 float32 2x3; e:sparse-2 float32 4x3", Some("\"e:sparse-2\" is there without e:sparse-1"));
    check("e:sparse-0 float32 2x3; e:sparse-1 float64 4x3", Some("\"e:sparse-1\" is of float64"));
    check("e float32 2x3; e:sparse-0 float32 4x3", Some("\"e:sparse-0\" overlaps with \"e\""));
    // A matrix that is small is never listed; a larger one, and one without a height, may be.
    check("e float32 100x8 rows; e:ids float32 3; e:rows float32 3", None);
    check("e float32 0x8 rows; e:ids float32 3", Some("\"e:ids\" occurs twice"));
    check("e float32 0x8 rows; e:rows float32 3", Some("\"e:rows\" occurs twice"));
    check("e float32 1000000000x8 rows; e:rows float32 3", Some("\"e:rows\" occurs twice"));
    check("e float32 0x8 rows; e:sparse-0 float32 3x8", None);
}

fn metadata() -> BTreeMap<String, String> {
    BTreeMap::from([("step".to_owned(), "7".to_owned())])
}

fn outputs() -> Vec<OutputTensor> {
    plan_model(&[tensor("w:sparse-1 float32 1x2"), tensor("w:sparse-0 float32 2x2"), tensor("n int64 -")]).unwrap()
}

/// The bytes of `outputs`: one int64, six float32.
fn contents() -> Vec<u8> {
    (0..32).collect()
}

fn save(storage: Arc<dyn Storage>, contents: &[u8]) -> Result<u64, Failure> {
    let path = ModelPath::parse("run/model.safetensors").unwrap();
    let mut writer = ModelWriter::create(storage, (&path, 7), &outputs(), &metadata())?;
    for piece in contents.chunks(5) {
        writer.write(piece)?;
    }
    writer.finish()
}

#[test]
fn a_saved_model_opens_as_safetensors() {
    let storage = InMemory::new();
    let bytes = save(Arc::new(storage.clone()), &contents()).unwrap();
    assert_eq!(storage.list("run").unwrap(), ["model.safetensors"]);
    let file = get(&storage, "run/model.safetensors");
    assert_eq!(file.len() as u64, bytes);
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let (w, n) = (tensors.tensor("w").unwrap(), tensors.tensor("n").unwrap());
    assert_eq!((tensors.len(), w.dtype(), w.shape()), (2, safetensors::Dtype::F32, &[3, 2][..]));
    assert_eq!((n.dtype(), n.shape()), (safetensors::Dtype::I64, &[][..]));
    assert_eq!([n.data(), w.data()].concat(), contents());
    let (_, header) = SafeTensors::read_metadata(&file).unwrap();
    assert_eq!(header.metadata().as_ref().unwrap()["step"], "7");
    let report = inspect(&storage, "run/model.safetensors").unwrap();
    for line in ["2 tensors in ", "  step = 7\n", "  n I64 []\n  w F32 [3, 2]\n"] {
        assert!(report.to_string().contains(line), "{report}");
    }
}

#[test]
fn a_model_with_too_few_or_too_many_bytes_is_refused_and_leaves_nothing() {
    for wrong in [0, 31, 33] {
        let storage = InMemory::new();
        let refusal = save(Arc::new(storage.clone()), &vec![1; wrong]).unwrap_err().to_string();
        assert!(refusal.contains("run/model.safetensors"), "{refusal}");
        assert_eq!(storage.list("").unwrap(), Vec::<String>::new(), "{wrong} bytes");
    }
}

#[test]
fn no_failure_damages_the_previous_model() {
    let count = Arc::new(Failing::new(Arc::new(InMemory::new()), StorageFault::None));
    save(count.clone(), &contents()).unwrap();
    let crashes = (0..=count.operations()).map(|operation| StorageFault::Crash { operation });
    let faults = crashes.chain((0..=300).map(|bytes| StorageFault::Full { bytes }));
    for fault in faults {
        let storage = InMemory::new();
        save(Arc::new(storage.clone()), &[9; 32]).unwrap();
        let before = get(&storage, "run/model.safetensors");
        let saved = save(Arc::new(Failing::new(Arc::new(storage.clone()), fault)), &contents());
        storage.crash();
        let after = get(&storage, "run/model.safetensors");
        SafeTensors::deserialize(&after).unwrap();
        let (old, new) = (after == before, after.ends_with(&contents()));
        // Once a model has its name, it may survive although the sync of the name failed.
        assert!(if saved.is_ok() { new } else { old || new }, "{fault:?}: {saved:?}");
        if let (StorageFault::Full { .. }, Err(failure)) = (fault, saved) {
            assert!(failure.to_string().contains("no space left"), "{failure}");
            assert_eq!(storage.list("run").unwrap().len(), 1, "{fault:?}: the space is given back");
        }
    }
}

#[test]
fn a_damaged_model_is_reported() {
    let storage = InMemory::new();
    save(Arc::new(storage.clone()), &contents()).unwrap();
    let file = get(&storage, "run/model.safetensors");
    for length in 0..file.len() {
        put(&storage, "m", &file[..length]);
        assert!(!inspect(&storage, "m").unwrap().is_sound(), "cut to {length}");
    }
    assert!(inspect(&storage, "nothing").is_err());
}

proptest! {
    #[test]
    fn any_header_is_read_without_a_panic(json in "[{}\\[\\]\",:0-9a-z_ ]{0,60}", file in any::<[u8; 16]>()) {
        let storage = InMemory::new();
        put(&storage, "m", &[&(json.len() as u64).to_le_bytes()[..], json.as_bytes()].concat());
        inspect(&storage, "m").unwrap();
        put(&storage, "m", &file);
        prop_assert!(!inspect(&storage, "m").unwrap().is_sound());
    }
}
