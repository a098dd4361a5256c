//! The accelerator over the stand-in driver and the kernels that the shim made.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::ids::Version;
use pserver_core::memory::{Arena, Budget, Value};
use pserver_core::optim::{Algorithm, Formula, Prepared, Rule, Step};
use pserver_core::port::{Accelerator, DeviceCode, GradientLease, NotAdopted, Plain, Resident, Simulated, Work};

use super::job::{self, CHUNK_BYTES, Fate, Trainer};
use super::standin::{each, each_seed, is_inside, kernels};
use crate::conformance;
use crate::cuda::{AcceleratorKernels, Cuda, CudaSettings, Emitted, ModuleSource};

const FLOATS: [ElementType; 2] = [ElementType::Float32, ElementType::Float64];

/// Banks that hold one large chunk's gradient, so that many are streamed; and a ring that holds half of one.
fn settings() -> CudaSettings {
    let (gradient_bytes, staging_bytes) = (4 * u64::from(CHUNK_BYTES), CHUNK_BYTES / 2);
    CudaSettings { gradient_bytes, staging_bytes, chunk_bytes: CHUNK_BYTES, ..CudaSettings::of(0) }
}

fn open() -> Cuda {
    Cuda::open(settings()).expect("the stand-in is there")
}

/// Some of the suite's rules, all of them when asked for, and their kernels.
fn some_rules() -> Vec<Rule> {
    let step = if std::env::var("PSERVER_FULL").is_ok_and(|text| text == "1") { 1 } else { 11 };
    conformance::rules().into_iter().step_by(step).collect()
}

fn library(module: &ModuleSource) -> Option<String> {
    Some(kernels(module)?.display().to_string())
}

fn library_of(rules: Vec<Rule>) -> Option<String> {
    let step = Step { version: Version(1), norm: Some(1.0), ..Step::FIRST };
    let emitted = |rule| {
        let prepared = Prepared::new(rule).expect("it is a rule");
        let mut scalars = Vec::new();
        let Formula::Rule { code, .. } = prepared.formula(&step, &mut scalars) else { return None };
        Some(Emitted::of(code))
    };
    let emitted: Vec<_> = rules.into_iter().filter_map(emitted).collect();
    library(&ModuleSource::new(&emitted, [], &FLOATS))
}

#[test]
fn every_update_on_the_device_has_the_bits_of_the_plain_form() {
    let Some(library) = library_of(some_rules()) else { return };
    each(&[&[("PSERVER_STANDIN_KERNELS", &library)]], || {
        let settings = CudaSettings { gradient_bytes: 4 << 20, chunk_bytes: 1 << 20, ..CudaSettings::of(0) };
        let device = Cuda::open(settings).expect("the stand-in is there");
        let worst = conformance::worst_of(&mut AcceleratorKernels::new(device, 64 << 10, 32), some_rules());
        assert!(worst.ulps <= conformance::TOLERANCE_ULPS, "{worst:?}");
    });
}

/// Some of the suite's rules for accelerators, two of them with a norm, and one that the suite has itself.
fn rules_of_devices() -> Vec<Rule> {
    let momentum = Algorithm::Momentum { momentum: 0.5, nesterov: false };
    let (with_norm, others): (Vec<_>, Vec<_>) =
        conformance::rules().into_iter().partition(|rule| rule.clip_norm.is_some());
    let clipped = with_norm.into_iter().take(2);
    others.into_iter().step_by(13).chain(clipped).chain([Rule { algorithm: momentum, ..Rule::default() }]).collect()
}

#[test]
fn the_suite_of_accelerators_holds_in_every_order() {
    let Some(library) = library_of(rules_of_devices()) else { return };
    each_seed(4, &[("PSERVER_STANDIN_KERNELS", &library)], || {
        conformance::device::check(|| Box::new(open()), &rules_of_devices());
    });
}

#[test]
fn a_job_has_the_bits_of_the_plain_form_in_every_order() {
    let Some(library) = library(&job::module()) else { return };
    each_seed(8, &[("PSERVER_STANDIN_KERNELS", &library)], || assert_eq!(job::run(&mut open()), Fate::default()));
}

#[test]
fn the_job_of_the_suite_has_the_committed_digest() {
    assert_eq!(job::run(&mut Simulated::new(Plain, 1 << 20, 3)), Fate::default());
    assert_eq!(job::digest(), job::DIGEST);
}

#[test]
fn a_device_whose_lanes_do_not_wait_is_noticed() {
    let Some(library) = library(&job::module()) else { return };
    each_seed(3, &[("PSERVER_STANDIN_KERNELS", &library), ("PSERVER_STANDIN_NO_WAITS", "1")], || {
        let mut device = open();
        let found = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| job::run(&mut device)));
        // The state of a stream is unknown if no event of the stream is awaited.
        std::mem::forget(device);
        let panic = found.expect_err("a wait that is missing shows");
        let text = panic.downcast_ref::<String>().expect("it says what differs");
        assert!(text.contains("the parameter of"), "{text}");
    });
}

#[test]
fn a_device_that_is_dropped_in_the_middle_keeps_what_it_works_on() {
    let Some(library) = library(&job::module()) else { return };
    each_seed(3, &[("PSERVER_STANDIN_KERNELS", &library)], || {
        let mut budget = Budget::new();
        budget.line("test", CHUNK_BYTES, 8);
        let arena = Arena::new(&budget).expect("there is memory");
        let mut device = open();
        device.pin(&arena).expect("it can be pinned");
        let slot = device.adopt(&Resident {
            element_type: FLOATS[0],
            bytes: CHUNK_BYTES,
            code: DeviceCode::Add,
            keeps_sum: false,
        });
        let slot = slot.expect("there is room");
        let parameter = Arc::new(Value::new(arena.take_zeroed(CHUNK_BYTES).expect("it is free"), CHUNK_BYTES));
        device.submit(&mut VecDeque::from([Work::Load { slot, parameter, states: Vec::new() }])).expect("it is well");
        drop(device);
        assert_eq!(arena.usage().slots_in_use, 1);
    });
}

#[test]
fn a_device_goes_from_thread_to_thread() {
    let Some(library) = library(&job::module()) else { return };
    each_seed(2, &[("PSERVER_STANDIN_KERNELS", &library)], || {
        let mut device = open();
        assert_eq!(job::run(&mut device), Fate::default());
        let moved = thread::spawn(move || {
            device.clear();
            assert_eq!(job::run(&mut device), Fate::default());
            device
        });
        let device = moved.join().expect("it is well on a new thread");
        // If an object had not been released there, the simulated driver would refuse to release the context.
        thread::spawn(move || drop(device)).join().expect("it is well on one more");
    });
}

/// One failing call, and the expected outcome of the job.
fn check_failure(failing: &str, expected: impl Fn(&Fate) -> bool) {
    let Some(library) = library(&job::module()) else { return };
    each_seed(2, &[("PSERVER_STANDIN_KERNELS", &library), ("PSERVER_STANDIN_FAIL", failing)], || {
        let mut device = open();
        let fate = job::run(&mut device);
        assert!(expected(&fate), "{failing}: {fate:?}");
        if fate.lost.is_some() {
            assert!(
                device
                    .adopt(&Resident { element_type: FLOATS[0], bytes: 4, code: DeviceCode::Add, keeps_sum: false })
                    .is_err()
            );
        }
    });
}

/// One failing call among updates that are submitted together, and the expected outcome of the job.
fn check_failure_together(failing: &str, expected: impl Fn(&Fate) -> bool) {
    let Some(library) = library(&job::module()) else { return };
    each_seed(3, &[("PSERVER_STANDIN_KERNELS", &library), ("PSERVER_STANDIN_FAIL", failing)], || {
        let fate = job::run_in(&mut open(), true);
        assert!(expected(&fate), "{failing}: {fate:?}");
    });
}

/// In this job the second and the third chunk fit into one bank, and so do the fourth and the fifth.
#[test]
fn updates_that_are_submitted_together_have_the_bits_of_the_plain_form_in_every_order() {
    let Some(library) = library(&job::module()) else { return };
    let roomy = || CudaSettings { gradient_bytes: 4 << 20, ..settings() };
    each_seed(8, &[("PSERVER_STANDIN_KERNELS", &library)], || {
        assert_eq!(job::run_in(&mut open(), true), Fate::default());
        assert_eq!(job::run_in(&mut Cuda::open(roomy()).expect("the stand-in is there"), true), Fate::default());
    });
}

#[test]
fn updates_that_are_submitted_together_take_one_call_for_copies_each_way_and_one_for_each_event() {
    let Some(library) = library(&job::module()) else { return };
    let folder = tempfile::tempdir().expect("there is a folder for tests");
    let log = folder.path().join("calls").display().to_string();
    let log = std::env::var("PSERVER_STANDIN_CALLS").unwrap_or(log);
    const CHUNKS: usize = 8;
    each(&[&[("PSERVER_STANDIN_KERNELS", &library), ("PSERVER_STANDIN_CALLS", &log)]], || {
        let mut budget = Budget::new();
        budget.line("test", CHUNK_BYTES, 4 * CHUNKS as u64);
        let arena = Arena::new(&budget).expect("there is memory");
        let mut device =
            Cuda::open(CudaSettings { gradient_bytes: 4 << 20, ..settings() }).expect("the stand-in is there");
        device.pin(&arena).expect("it can be pinned");
        let lease = || arena.take_zeroed(CHUNK_BYTES).expect("it is free");
        let resident =
            Resident { element_type: FLOATS[0], bytes: CHUNK_BYTES, code: DeviceCode::Add, keeps_sum: false };
        let slots: Vec<_> = (0..CHUNKS).map(|_| device.adopt(&resident).expect("there is room")).collect();
        for &slot in &slots {
            let parameter = Arc::new(Value::new(lease(), CHUNK_BYTES));
            run(&mut device, Work::Load { slot, parameter, states: Vec::new() }).1.expect("nothing fails");
        }
        let update = |&slot| {
            let gradient = GradientLease { lease: lease(), bytes: CHUNK_BYTES, element_type: FLOATS[0] };
            Work::Update { slot, numbers: vec![1.0], gradients: vec![gradient], is_summed: false, into: lease() }
        };
        let mut queue = slots.iter().map(update).collect();
        let before = std::fs::read_to_string(&log).expect("there were calls").lines().count();
        device.submit(&mut queue).expect("the device is well");
        assert!(queue.is_empty());
        let text = std::fs::read_to_string(&log).expect("there were calls");
        let count = |call: &str| text.lines().skip(before).filter(|line| line.starts_with(call)).count();
        let names = ["cuMemcpyBatchAsync", "cuMemcpy", "cuLaunchKernel", "cuEventRecord", "cuStreamWaitEvent"];
        assert_eq!(names.map(count), [2, 2, CHUNKS, 3, 3], "{text}");
        let mut done = Vec::new();
        while done.len() < CHUNKS {
            device.wait(Duration::from_secs(1));
            device.poll(&mut done).expect("the device is well");
        }
        assert!(done.iter().all(|one| one.outcome.is_ok()));
    });
}

/// The third and the fourth kernel of the job are launched together.
#[test]
fn a_kernel_that_cannot_be_launched_with_others_leaves_its_slot_as_it_was_and_the_updates_before_it_happen() {
    check_failure_together("cuLaunchKernel:4:701", refused);
}

#[test]
fn the_first_of_several_kernels_that_cannot_be_launched_leaves_all_slots_as_they_were() {
    check_failure_together("cuLaunchKernel:3:701", |fate| (fate.refused, fate.broken, fate.kept) == (2, 0, 0));
}

/// The third batched copy is the copy to the device for two updates together.
#[test]
fn copies_of_several_updates_that_are_refused_leave_all_slots_as_they_were() {
    let failing = "cuMemcpyBatchAsync_v2:3:1,cuMemcpyHtoDAsync_v2:16:1";
    check_failure_together(failing, |fate| (fate.refused, fate.broken, fate.kept) == (2, 0, 0));
}

#[test]
fn copies_of_several_updates_that_are_refused_after_the_kernels_break_the_slots_of_all() {
    let failing = "cuMemcpyBatchAsync_v2:4:1,cuMemcpyDtoHAsync_v2:2:1";
    check_failure_together(failing, |fate| (fate.refused, fate.broken, fate.kept) == (0, 2, 0));
}

fn refused(fate: &Fate) -> bool {
    (fate.refused, fate.broken, &fate.lost, fate.kept) == (1, 0, &None, 0)
}

fn broken(fate: &Fate) -> bool {
    (fate.refused, fate.broken, &fate.lost, fate.kept) == (0, 1, &None, 0)
}

#[test]
fn a_copy_that_is_refused_before_the_kernel_leaves_the_slot_as_it_was() {
    check_failure("cuMemcpyHtoDAsync_v2:30:1", refused);
}

/// A driver that has batched copies but does not support them for its device.
#[test]
fn a_batch_of_copies_that_is_not_supported_becomes_single_copies() {
    check_failure("cuMemcpyBatchAsync_v2:1:801", |fate| *fate == Fate::default());
}

/// Gradients of one chunk are copied in one call.
#[test]
fn a_batch_of_copies_that_is_refused_becomes_single_copies() {
    check_failure("cuMemcpyBatchAsync_v2:2:1", |fate| *fate == Fate::default());
}

#[test]
fn a_kernel_that_cannot_be_launched_leaves_the_slot_as_it_was() {
    check_failure("cuLaunchKernel:5:701", refused);
}

#[test]
fn a_wait_that_is_refused_before_the_kernel_leaves_the_slot_as_it_was() {
    check_failure("cuStreamWaitEvent:4:1", refused);
}

#[test]
fn a_copy_that_is_refused_after_the_kernel_breaks_the_slot_and_no_other() {
    check_failure("cuMemcpyDtoHAsync_v2:3:1", broken);
}

#[test]
fn a_partly_loaded_state_breaks_its_slot_and_no_other() {
    check_failure("cuMemcpyHtoDAsync_v2:2:1", broken);
}

/// The kernel that sums, the one that makes squares, and their copy back; the last is of an update of a sum.
#[test]
fn a_sum_that_is_refused_leaves_the_slot_as_it_was_and_can_be_made_again() {
    let Some(library) = library(&job::module()) else { return };
    let failing = ["cuLaunchKernel:1:701", "cuLaunchKernel:2:701", "cuMemcpyDtoHAsync_v2:1:1", "cuLaunchKernel:3:701"];
    let all = failing.map(|one| [("PSERVER_STANDIN_KERNELS", library.as_str()), ("PSERVER_STANDIN_FAIL", one)]);
    each(&all.each_ref().map(<[_; 2]>::as_slice), || {
        let mut budget = Budget::new();
        budget.line("test", CHUNK_BYTES, 8);
        let arena = Arena::new(&budget).expect("there is memory");
        let lease = |value: f32| {
            let mut lease = arena.take(CHUNK_BYTES).expect("it is free");
            lease.bytes_mut().as_chunks_mut().0.iter_mut().for_each(|place| *place = value.to_le_bytes());
            lease
        };
        let rule = job::rule("sgd").expect("it is a rule");
        let mut numbers = Vec::new();
        let Formula::Rule { code, .. } = rule.formula(&job::step(1), &mut numbers) else { panic!("it has code") };
        let code = DeviceCode::Rule(Arc::clone(code));
        let mut device = open();
        let resident = Resident { element_type: FLOATS[0], bytes: CHUNK_BYTES, code, keeps_sum: true };
        let slot = device.adopt(&resident).expect("there is room");
        let parameter = Arc::new(Value::new(lease(2.0), CHUNK_BYTES));
        run(&mut device, Work::Load { slot, parameter, states: Vec::new() }).1.expect("nothing fails yet");
        let gradient = |value| GradientLease { lease: lease(value), bytes: CHUNK_BYTES, element_type: FLOATS[0] };
        let mut work = Work::Sum { slot, gradients: vec![gradient(1.5), gradient(-0.25)], squares: lease(7.0) };
        let mut refused = 0;
        for _ in 0..4 {
            let (back, outcome) = run(&mut device, work);
            refused += usize::from(matches!(outcome, Err(Failure::Call(_))));
            assert!(outcome.is_ok() || refused == 1, "{outcome:?}");
            work = match (back, outcome) {
                (again, Err(_)) => again,
                (Work::Sum { gradients, squares, .. }, Ok(())) => {
                    // 1,024 times the square of 1.25, four blocks.
                    let expected = 1600.0_f64.to_le_bytes().repeat(4);
                    assert_eq!(squares.bytes()[..32], expected);
                    Work::Update { slot, numbers: numbers.clone(), gradients, is_summed: true, into: squares }
                }
                (Work::Update { into, .. }, Ok(())) => {
                    // The rate is a 128th and the scale a half.
                    assert_eq!(into.bytes(), (2.0_f32 - 1.25 / 256.0).to_le_bytes().repeat(CHUNK_BYTES as usize / 4));
                    return assert_eq!(refused, 1, "the call failed");
                }
                (other, _) => panic!("{} was not begun", other.name()),
            };
        }
        panic!("it comes to its end");
    });
}

/// Runs one piece of work to completion.
fn run(device: &mut Cuda, work: Work) -> (Work, Result<(), Failure>) {
    let (mut queue, mut done) = (VecDeque::from([work]), Vec::new());
    while done.is_empty() {
        device.submit(&mut queue).expect("the device is well");
        device.wait(Duration::from_secs(1));
        device.poll(&mut done).expect("the device is well");
    }
    let one = done.pop().expect("there is one");
    (one.work, one.outcome)
}

#[test]
fn a_failed_stream_loses_the_device_and_the_memory_it_may_write() {
    check_failure("execute:100:719", |fate| {
        let Fate { refused, broken, lost, kept } = fate;
        let why = lost.as_ref().is_some_and(|why| why.contains("CUDA_ERROR_LAUNCH_FAILED (719)"));
        (*refused, *broken) == (0, 0) && why && 0 < *kept
    });
}

#[test]
fn a_failed_event_query_loses_the_device() {
    check_failure("cuEventQuery:50:214", |fate| {
        fate.lost.as_ref().is_some_and(|why| why.contains("cuEventQuery: CUDA_ERROR_ECC_UNCORRECTABLE (214)"))
    });
}

#[test]
fn memory_that_cannot_be_pinned_is_copied_all_the_same() {
    check_failure("cuMemHostRegister_v2:1:2", |fate| *fate == Fate::default());
}

#[test]
fn nothing_goes_to_the_device_from_memory_that_is_not_pinned() {
    let Some(library) = library(&job::module()) else { return };
    let folder = tempfile::tempdir().expect("there is a folder for tests");
    let log = folder.path().join("unpinned").display().to_string();
    let settings = [("PSERVER_STANDIN_KERNELS", library.as_str()), ("PSERVER_STANDIN_UNPINNED", &log)];
    let check = |settings: &[(&str, &str)], expected: usize| {
        each_seed(2, settings, || assert_eq!(job::run(&mut open()), Fate::default()));
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        let count = |way| text.lines().filter(|line| line.starts_with(way)).count();
        assert_eq!((count("to the device"), count("from the device")), (0, expected), "{text}");
    };
    if is_inside() {
        return check(&settings, 0);
    }
    // Half of the gradients lie in memory that is not pinned.
    check(&settings, 0);
    // No memory can be pinned, so copies are slow: eight chunks in five rounds and their seven states, for each seed.
    let refused = [&settings[..], &[("PSERVER_STANDIN_FAIL", "cuMemHostRegister_v2:1:2")]].concat();
    check(&refused, 2 * (8 * 5 + 7));
}

#[test]
fn a_trainers_memory_is_pinned_until_the_trainer_departs() {
    each(&[&[]], || {
        let mut budget = Budget::new();
        budget.line("test", CHUNK_BYTES, 8);
        let (trainer, mut device) = (Trainer::new(&budget), open());
        assert!(device.arenas.lock(&trainer.lend(&[1; 1000])), "its first lease adds it");
        assert!(device.arenas.lock(&trainer.lend(&[2; 1000])));
        device.arenas.forget_trainers_that_left();
        assert_eq!(Arc::strong_count(&trainer.memory), 2, "it is there, and pinned");
        let left = Arc::downgrade(&trainer.memory);
        drop(trainer);
        device.submit(&mut VecDeque::new()).expect("it is well");
        assert_eq!(left.strong_count(), 0, "nobody keeps it");
    });
}

#[test]
fn a_trainers_memory_that_cannot_be_pinned_is_copied_all_the_same() {
    each(&[&[("PSERVER_STANDIN_FAIL", "cuMemHostRegister_v2:1:1")]], || {
        let mut budget = Budget::new();
        budget.line("test", CHUNK_BYTES, 8);
        assert!(!open().arenas.lock(&Trainer::new(&budget).lend(&[1; 1000])));
    });
}

#[test]
fn a_failed_allocation_names_its_bytes() {
    let Some(library) = library(&job::module()) else { return };
    each(&[&[("PSERVER_STANDIN_KERNELS", &library), ("PSERVER_STANDIN_MEMORY", "1000000")]], || {
        let refused = Cuda::open(CudaSettings::of(0)).map(|_| ()).expect_err("there is less");
        let text = refused.to_string();
        assert!(
            text.contains("285212672 bytes were asked for") && text.contains("1000000 of 1000000 are free"),
            "{text}"
        );

        let mut device = open();
        let resident =
            Resident { element_type: FLOATS[0], bytes: CHUNK_BYTES, code: DeviceCode::Add, keeps_sum: false };
        let mut count = 0;
        let text = loop {
            match device.adopt(&resident) {
                Ok(slot) => assert_eq!(slot.0, count),
                Err(NotAdopted::Full(text)) => break text,
                Err(refused) => panic!("it is room that is missing: {refused:?}"),
            }
            count += 1;
        };
        assert!(text.starts_with("memory of CUDA device 0: 16384 bytes were asked for, "), "{text}");
        assert!(text.contains(", 15625 are kept for the driver; taken for"), "a 64th of the device: {text}");
        assert!(text.contains(&format!("taken for parameters {}", count * CHUNK_BYTES)), "{text}");
        assert!(30 < count, "{count} chunks found room");
        device.clear();
        assert_eq!(device.adopt(&resident).map(|slot| slot.0), Ok(0));
        let limited = CudaSettings { memory_bytes: Some(40_000), ..settings() };
        let mut device = {
            drop(device);
            Cuda::open(limited).expect("there is as much")
        };
        assert!(device.capabilities().bytes_free <= 40_000);
        assert_eq!((0..9).filter(|_| device.adopt(&resident).is_ok()).count(), 2);
    });
}

#[test]
fn a_full_device_names_the_first_failed_allocation_and_its_bytes() {
    let check = |failing: &str, words: &[&str]| {
        each(&[&[("PSERVER_STANDIN_FAIL", failing)]], || {
            let text = Cuda::open(settings()).map(|_| ()).expect_err("it is full").to_string();
            assert!(words.iter().all(|word| text.contains(word)), "{text}");
        });
    };
    let kernels = format!("{} bytes of kernels were to be loaded, ", crate::cuda::shipped::cubin().len());
    match std::env::var("PSERVER_STANDIN_FAIL").as_deref() {
        Ok(failing) if failing.contains("Module") => check(failing, &[&kernels, " of 268435456 are free"]),
        Ok(failing) => check(failing, &["bytes of the host's memory were to be pinned for its copies: cuMemHostAlloc"]),
        Err(_) => {
            for one in ["cuModuleLoadData:1:2", "cuMemHostAlloc:1:2"] {
                check(one, &[]);
            }
        }
    }
}

#[test]
fn resident_data_that_does_not_fit_the_device_is_refused_by_name() {
    each(&[&[]], || {
        let mut device = open();
        let mut check = |element_type, bytes, code: DeviceCode, words: &str| {
            let refused =
                device.adopt(&Resident { element_type, bytes, code, keeps_sum: false }).expect_err("it is not taken");
            assert!(matches!(&refused, NotAdopted::Unfit(text) if text.contains(words)), "{refused:?}");
        };
        check(FLOATS[0], CHUNK_BYTES + 4, DeviceCode::Add, "16388 bytes; this device was opened for 16384");
        check(ElementType::Float16, 4, DeviceCode::Add, "float16");
        // Nothing is compiled here, and the stand-in knows no kernels but its own.
        check(FLOATS[0], 4, DeviceCode::Add, "kernel pserver_sum_f32: cuModuleGetFunction: CUDA_ERROR_NOT_FOUND (500)");
    });
}
