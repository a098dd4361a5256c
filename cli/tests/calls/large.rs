//! Large parameters, and many small ones. `PSERVER_LARGE=1` runs the real size, which is 3 GiB in one parameter; a
//! small size runs always. Times are printed, and nothing depends on them.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use crate::cluster::asked::is_set;
use crate::cluster::job::{Job, client};
use crate::cluster::ports::free_port;
use crate::cluster::process::Process;
use crate::cluster::training::{Tensor, begin, given, wanted};
use pserver_client::{Client, ClientOptions, DestinationSlice, GradientSlice};
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType::Float32;
use pserver_core::error::Failure;
use pserver_core::port::Transport;
use pserver_core::wire::Address;
use pserver_kernels::conformance::skips::skip;
use pserver_transport::network::{Network, NetworkOptions};
use pserver_transport::trace::{Trace, TraceCounters};

const MIB: usize = 1024 * 1024;
const GIB: usize = 1024 * MIB;
/// The gradient, the value, and the same on the server with its gradients on their way.
const MEMORY_PER_BYTE: usize = 4;

/// A line of a file in `/proc`, in bytes.
fn proc_bytes(file: &str, key: &str) -> Option<usize> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find(|line| line.starts_with(key))?;
    let kibibytes: usize = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kibibytes * 1024)
}

fn gib(bytes: usize) -> f64 {
    f64::from(u32::try_from(bytes / MIB).expect("below a petabyte")) / 1024.0
}

/// Runs `work` and prints how long it took.
fn timed<T>(what: &str, bytes: usize, work: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let done = work();
    let seconds = begun.elapsed().as_secs_f64();
    println!("{what}: {:.2} GiB in {seconds:.2} s, {:.2} GiB/s", gib(bytes), gib(bytes) / seconds);
    done
}

fn start(job: &Job) -> Process {
    let bind = format!("tcp://127.0.0.1:{}", free_port());
    Process::start(&job.arguments(0, &bind, None)).expect("a server starts")
}

/// Initialises, pushes and pulls one parameter of so many bytes.
fn check_size(bytes: usize) {
    let process = start(&Job { shards: 2, chunk_bytes: 1024 * 1024, ..Job::new(1, 1) });
    let client = client(&process.address, 0);
    let settings = OptimizerSettings::from_text("const_lr { learning_rate: 1.0 }").expect("an optimizer");
    assert!(client.begin_init(&settings).expect("it is chosen"));
    // The value of an element is its index: element n is n modulo 2^24, which an f32 holds exactly.
    let mut value: Vec<u8> = vec![0; bytes];
    for (at, element) in (0_u32..).zip(value.chunks_exact_mut(4)) {
        element.copy_from_slice(&number(at).to_le_bytes());
    }
    let declare = || client.init_param("large", Float32, &[], &value, &settings).expect("it is declared");
    timed("init", bytes, declare);
    client.finish_init().expect("it is initialised");
    let given = [GradientSlice { name: "large", element_type: Float32, content: &value }];
    // One round takes the value from itself.
    timed("push", bytes, || client.push(&given, None).expect("the gradient is taken"));
    let wanted = DestinationSlice::new("large", &mut value);
    timed("pull", bytes, || client.pull(&mut [wanted]).expect("the value is there"));
    assert_eq!(value.iter().position(|byte| *byte != 0), None, "the first byte that is not zero");
    let peak = |id: String| gib(proc_bytes(&format!("/proc/{id}/status"), "VmHWM:").unwrap_or(0));
    let (server, trainer) = (peak(process.id().to_string()), peak("self".to_owned()));
    println!("peak resident memory: server {server:.2} GiB, trainer {trainer:.2} GiB");
}

#[expect(clippy::cast_precision_loss, reason = "24 bits fit")]
fn number(at: u32) -> f32 {
    (at % (1 << 24)) as f32
}

#[test]
fn a_parameter_longer_than_any_frame_comes_back_whole() {
    check_size(33 * MIB + 4);
}

#[test]
fn a_parameter_of_3_gib_comes_back_whole() {
    if !is_set("PSERVER_LARGE") {
        return skip("large", "PSERVER_LARGE=1 runs it");
    }
    let free = proc_bytes("/proc/meminfo", "MemAvailable:").unwrap_or(0);
    if free < 3 * GIB * MEMORY_PER_BYTE {
        return skip("large", &format!("it takes {} GiB of memory, {:.1} are free", 3 * MEMORY_PER_BYTE, gib(free)));
    }
    check_size(3 * GIB);
}

/// Gradients share frames up to so many bytes (`packer.rs`).
const SHARED_BYTES: usize = 256 * 1024;

/// A client, and the trace of its transport. The client can open no second transport.
fn counted(coordinator: &Address) -> (Client, Arc<TraceCounters>) {
    let network = Network::new(NetworkOptions::default()).expect("this process can have another transport");
    let trace = Trace::new(Box::new(network));
    let counters = trace.counters();
    let once = Mutex::new(Some(trace));
    let make = move || -> Result<Box<dyn Transport>, Failure> {
        let trace = once.lock().expect("nobody panics").take();
        Ok(Box::new(trace.ok_or_else(|| Failure::call("there is only one"))?))
    };
    let options = ClientOptions { trainer: Some(0), ..ClientOptions::new(coordinator.clone()) };
    (Client::over(options, make).expect("there is a transport"), counters)
}

/// Frames that a trainer sends and gets in a round of push and pull.
fn frames_of_a_round(count: usize, elements: usize) -> (u64, u64) {
    let tensors: Vec<Tensor> =
        (0..count).map(|number| Tensor::new(&format!("tensor {number}"), Float32, elements, "").zeroed()).collect();
    let process = start(&Job { chunk_bytes: 1024 * 1024, ..Job::new(1, 1) });
    let (client, counters) = counted(&process.address);
    begin(&client, &tensors).expect("the tensors are initialised");
    let gradients: Vec<Vec<u8>> = tensors.iter().map(Tensor::initial).collect();
    let mut values = gradients.clone();
    let frames = || (counters.out.frames(), counters.inward.frames());
    let before = frames();
    let mut wanted = wanted(&tensors, &mut values);
    client.push_pull(&given(&tensors, &gradients), None, &mut wanted).expect("a round is closed");
    let after = frames();
    (after.0 - before.0, after.1 - before.1)
}

/// The report of `psbench` has the times of both.
#[test]
fn many_small_parameters_take_about_as_many_frames_as_their_bytes_need() {
    let (count, bytes) = (10_000, 1000);
    let (sent, received) = frames_of_a_round(count, bytes / 4);
    let least = count.div_ceil(SHARED_BYTES / bytes);
    println!("{count} of {bytes} bytes: {sent} frames sent, {received} received; as full as can be: {least}");
    let most = u64::try_from(least).expect("few");
    assert!(sent == most, "{sent} frames sent; expected {most}");
    assert!(received <= 2 * most, "{received} frames received; expected at most {}", 2 * most);
}
