//! The conformance suite for every backend.

use std::thread;
use std::time::Duration;

use pserver_core::limits::RECEIVES_MAX;
use pserver_core::wire::Address;
use pserver_transport::conformance::{self, TransportPair};
use pserver_transport::fault::{FaultPlan, FaultyTransport};
use pserver_transport::loopback::{self, LoopbackTransport};
use pserver_transport::network::{
    ChecksumPolicy, JobToken, Lanes, Listener, Network, NetworkOptions, PollPolicy, SocketOptions, Stop,
};
use pserver_transport::tls::{EncryptPolicy, Encryption, EncryptionSettings};
use pserver_transport::verbs::{VerbsDevice, VerbsDevices};

/// Stops a listener and joins its thread when dropped.
struct ConformanceListener(Stop, Option<thread::JoinHandle<()>>);

impl Drop for ConformanceListener {
    fn drop(&mut self) {
        self.0.stop();
        if let Some(thread) = self.1.take() {
            thread.join().expect("the listener ends well");
        }
    }
}

fn tcp(host: &str, options: &NetworkOptions) -> TransportPair {
    ends(&format!("tcp://{host}:0"), options)
}

fn ends(address: &str, options: &NetworkOptions) -> TransportPair {
    let address = Address::parse(address).expect("an address");
    let near = Network::new(options.clone()).expect("a transport");
    let far = Network::new(options.clone()).expect("a transport");
    let listener = Listener::bind(&address, options.clone()).expect("a free port");
    let address = Address { port: listener.local_address().port, ..address };
    let (stop, lanes) = (Stop::new(), Lanes::from([(0, far.connection_sender())]));
    let run = {
        let stop = stop.clone();
        move || listener.run(lanes, stop).expect("the listener runs")
    };
    let keep = Box::new(ConformanceListener(stop, Some(thread::spawn(run))));
    TransportPair { keep, ..TransportPair::new(Box::new(near), Box::new(far), address) }
}

#[test]
fn loopback_keeps_every_promise() {
    conformance::check(|| {
        let (near, far, address) = loopback::pair();
        TransportPair::new(Box::new(near), Box::new(far), address).landing(RECEIVES_MAX)
    });
}

#[test]
fn loopback_keeps_every_promise_without_checksums_and_without_sleep() {
    conformance::check(|| {
        let (near, far, address) = loopback::pair();
        let with = |end: LoopbackTransport| Box::new(end.with(ChecksumPolicy::BetweenHosts, PollPolicy::Busy));
        TransportPair::new(with(near), with(far), address)
    });
}

#[test]
fn tcp_keeps_every_promise() {
    conformance::check(|| tcp("127.0.0.1", &NetworkOptions::default()));
}

#[test]
fn tcp_keeps_every_promise_by_name_and_with_checksums() {
    let options = NetworkOptions { checks: ChecksumPolicy::Always, ..NetworkOptions::default() };
    conformance::check(|| tcp("localhost", &options));
}

#[test]
fn tcp_keeps_every_promise_with_small_buffers() {
    let small = Some(16 * 1024);
    let options = NetworkOptions {
        socket: SocketOptions { send_buffer_bytes: small, receive_buffer_bytes: small, ..SocketOptions::default() },
        checks: ChecksumPolicy::Always,
        ..NetworkOptions::default()
    };
    conformance::check(|| tcp("[::1]", &options));
}

#[test]
fn shared_memory_keeps_every_promise() {
    conformance::check(|| ends("shm://127.0.0.1:0", &NetworkOptions::default()));
}

#[test]
fn shared_memory_is_discovered_and_keeps_every_promise() {
    conformance::check(|| {
        ends("localhost:0", &NetworkOptions { poll: PollPolicy::Block, ..NetworkOptions::default() })
    });
}

#[test]
fn shared_memory_keeps_every_promise_without_sleep() {
    conformance::check(|| {
        ends("shm://[::]:0", &NetworkOptions { poll: PollPolicy::Busy, ..NetworkOptions::default() })
    });
}

#[test]
fn every_transport_keeps_its_promises_with_a_token() {
    let token = JobToken::new(b"nobody can guess this").ok();
    let options = NetworkOptions { token, ..NetworkOptions::default() };
    conformance::check(|| tcp("127.0.0.1", &options));
    conformance::check(|| ends("shm://127.0.0.1:0", &options));
    conformance::check(|| verbs("verbs://127.0.0.1:0", options.clone()));
}

/// Options with TLS, and a token for it.
fn encrypted(policy: EncryptPolicy) -> NetworkOptions {
    let settings = EncryptionSettings { policy, ..EncryptionSettings::default() };
    let encryption = Encryption::of_server(&settings).expect("a certificate can be made");
    let token = JobToken::new(b"nobody can guess this").ok();
    NetworkOptions { token, encryption, ..NetworkOptions::default() }
}

#[test]
fn tls_keeps_every_promise() {
    conformance::check(|| tcp("127.0.0.1", &encrypted(EncryptPolicy::Tcp)));
}

#[test]
fn tls_keeps_every_promise_by_name_with_checksums_and_without_verbs() {
    let options = NetworkOptions { checks: ChecksumPolicy::Always, ..encrypted(EncryptPolicy::Required) };
    conformance::check(|| tcp("localhost", &options));
}

#[test]
fn tls_keeps_every_promise_with_small_buffers() {
    let small = Some(16 * 1024);
    let options = NetworkOptions {
        socket: SocketOptions { send_buffer_bytes: small, receive_buffer_bytes: small, ..SocketOptions::default() },
        // One thread waits for both sides in turn, a millisecond for each half of a record.
        linger: Duration::from_secs(30),
        ..encrypted(EncryptPolicy::Tcp)
    };
    conformance::check(|| tcp("[::1]", &options));
}

#[test]
fn tls_keeps_every_promise_with_polling_and_with_sleeping_sides() {
    for poll in [PollPolicy::Busy, PollPolicy::Block] {
        let options = NetworkOptions { poll, ..encrypted(EncryptPolicy::Tcp) };
        conformance::check(|| tcp("127.0.0.1", &options));
    }
}

#[test]
fn tls_keeps_every_promise_beside_late_frames() {
    let plan = FaultPlan { delay_frame: 0.3, delay_polls: 3, ..FaultPlan::default() };
    conformance::check(|| {
        let ends = tcp("127.0.0.1", &encrypted(EncryptPolicy::Tcp));
        TransportPair { far: Box::new(FaultyTransport::new(ends.far, plan, 3)), ..ends }
    });
}

#[test]
fn verbs_that_are_offered_over_tls_keep_every_promise() {
    conformance::check(|| verbs("verbs://127.0.0.1:0", encrypted(EncryptPolicy::Tcp)));
}

/// Verbs over a software device.
fn verbs(address: &str, options: NetworkOptions) -> TransportPair {
    ends(address, &NetworkOptions { devices: VerbsDevices::This(VerbsDevice::in_process()), ..options })
        .landing(2)
        .blind()
}

#[test]
fn verbs_keep_every_promise() {
    conformance::check(|| verbs("verbs://127.0.0.1:0", NetworkOptions::default()));
}

#[test]
fn verbs_keep_every_promise_with_checksums() {
    let options =
        || NetworkOptions { checks: ChecksumPolicy::Always, poll: PollPolicy::Block, ..NetworkOptions::default() };
    conformance::check(|| verbs("verbs://[::1]:0", options()));
}
