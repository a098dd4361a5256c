//! Large parameters, and many small ones. `PSERVER_LARGE=1` runs the real size, which is 3 GiB in one parameter; a
//! small size runs always. Figures are printed, and nothing depends on them.

mod cluster;

use std::time::Instant;

use cluster::job::{Job, client};
use cluster::process::{Process, free_ports};
use cluster::skip::{is_set, skip};
use cluster::training::{Tensor, begin, given};
use paddle_pserver::client::{Client, Given, Wanted};
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType::Float32;

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
    let bind = format!("tcp://127.0.0.1:{}", free_ports(1)[0]);
    Process::start(&job.arguments(0, &bind, None)).expect("a server starts")
}

/// Initialises, pushes and pulls one parameter of so many bytes.
fn check_size(bytes: usize) {
    let process = start(&Job { shards: 2, chunk_bytes: 1024 * 1024, ..Job::new(1, 1) });
    let client = client(&process.address, 0);
    let settings = OptimizerSettings::from_text("const_lr { learning_rate: 1.0 }").expect("an optimizer");
    assert!(client.begin_init(&settings).expect("it is chosen"));
    // A number that tells where it stands: element n is n modulo 2^24, which an f32 holds exactly.
    let mut value: Vec<u8> = vec![0; bytes];
    for (at, element) in (0_u32..).zip(value.chunks_exact_mut(4)) {
        element.copy_from_slice(&number(at).to_le_bytes());
    }
    let declare = || client.init_param("large", Float32, &[], &value, &settings).expect("it is declared");
    timed("init", bytes, declare);
    client.finish_init().expect("it is initialised");
    let given = [Given { name: "large", element_type: Float32, content: &value }];
    // One round takes the value from itself.
    timed("push", bytes, || client.push(&given, None).expect("the gradient is taken"));
    let wanted = Wanted { name: "large", content: &mut value };
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

/// Seconds that a round of push and pull takes, the best of a few.
fn seconds_of_a_round(count: usize, elements: usize) -> f64 {
    let tensors: Vec<Tensor> =
        (0..count).map(|number| Tensor::new(&format!("tensor {number}"), Float32, elements, "").zeroed()).collect();
    let process = start(&Job { chunk_bytes: 1024 * 1024, ..Job::new(1, 1) });
    let client = client(&process.address, 0);
    begin(&client, &tensors).expect("the tensors are initialised");
    let gradients: Vec<Vec<u8>> = tensors.iter().map(Tensor::initial).collect();
    let mut values = gradients.clone();
    let mut round = || {
        let begun = Instant::now();
        push_pull(&client, &tensors, &gradients, &mut values);
        begun.elapsed().as_secs_f64()
    };
    // The first one asks for versions.
    round();
    (0..5).map(|_| round()).fold(f64::INFINITY, f64::min)
}

fn push_pull(client: &Client, tensors: &[Tensor], gradients: &[Vec<u8>], values: &mut [Vec<u8>]) {
    let given = given(tensors, gradients);
    let wanted = tensors.iter().zip(values).map(|(tensor, content)| Wanted { name: &tensor.name, content });
    let mut wanted: Vec<Wanted<'_>> = wanted.collect();
    client.push_pull(&given, None, &mut wanted).expect("a round is closed");
}

#[test]
fn many_small_parameters_cost_about_what_one_large_one_does() {
    let (small, large) = (seconds_of_a_round(10_000, 250), seconds_of_a_round(1, 2_500_000));
    println!("10,000 of 1 kB: {small:.4} s; one of 10 MB: {large:.4} s; ratio {:.2}", small / large);
}
