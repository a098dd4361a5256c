use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::verbs::tests::fixtures;

/// The longest wait for a device to give up.
const PATIENCE: Duration = Duration::from_secs(20);
const USUAL: Patience = Patience { timeout: 14, retries: 7, receiver_retries: 7 };

/// The device; without one a line tells the reason.
fn device() -> Option<ProbeDevice> {
    let test = "verbs::probe::tests::a_device_does_what_the_transport_relies_on";
    ProbeDevice::open().map_err(|why| fixtures::skip(test, &why)).ok()
}

fn work(opcode: ibv_wr_opcode, bytes: usize, offset: usize, id: u64) -> ProbeWork {
    ProbeWork { opcode, flags: IBV_SEND_SIGNALED, bytes, offset, id }
}

/// Waits for one completion.
fn next(end: &ProbeEnd<'_>) -> ibv_wc {
    let (mut done, began) = ([ibv_wc::default()], Instant::now());
    while end.poll(&mut done) == 0 {
        assert!(began.elapsed() < PATIENCE, "nothing is complete after {PATIENCE:?}");
        thread::yield_now();
    }
    done[0]
}

/// The status of the next completion, as C's text.
fn status(end: &ProbeEnd<'_>) -> String {
    said(end, next(end).status)
}

fn said(end: &ProbeEnd<'_>, status: ibv_wc_status) -> String {
    let text = call!(end.device.verbs, ibv_wc_status_str, status);
    // SAFETY: libibverbs returns a text of its own, which ends with a zero and is never changed.
    unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// One test, so that a machine without a device skips once; each part is a promise that the transport relies on.
#[test]
fn a_device_does_what_the_transport_relies_on() {
    let Some(device) = device() else { return };
    limits(&device);
    inline(&device);
    device_memory(&device);
    for opcode in [IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_READ, IBV_WR_SEND] {
        for bytes in [0, 1, 64, 4095, 4097, 1 << 20] {
            data_arrives(&device, opcode, bytes);
        }
    }
    writes_arrive_in_order(&device);
    a_completion_wakes_a_sleeping_thread(&device);
    latencies(&device);
    for bytes in [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20] {
        rates(&device, bytes);
    }
    a_send_waits_for_a_receive(&device);
    a_receiver_that_is_not_ready_ends_the_queue_pair(&device);
    deregistered_memory_is_not_written(&device);
    requests_after_a_failure_are_flushed(&device);
    a_destroyed_peer_ends_the_queue_pair(&device);
    a_link_that_is_down_ends_the_queue_pair(&device);
}

fn limits(device: &ProbeDevice) {
    let (limits, port) = (&device.limits, &device.port);
    println!(
        "limits: max_qp {} max_qp_wr {} max_sge {} max_cqe {} max_mr {} max_mr_size {} max_qp_rd_atom {} \
         max_qp_init_rd_atom {} max_srq {} max_srq_wr {} ack_delay {} cap_flags {:#x}",
        limits.max_qp,
        limits.max_qp_wr,
        limits.max_sge,
        limits.max_cqe,
        limits.max_mr,
        limits.max_mr_size,
        limits.max_qp_rd_atom,
        limits.max_qp_init_rd_atom,
        limits.max_srq,
        limits.max_srq_wr,
        limits.local_ca_ack_delay,
        limits.device_cap_flags,
    );
    println!(
        "port: state {} mtu {} of {} max_msg_sz {} link_layer {} gid_tbl_len {}",
        port.state, port.active_mtu, port.max_mtu, port.max_msg_sz, port.link_layer, port.gid_tbl_len
    );
    for entry in &device.gids {
        let (index, kind, bytes) = (entry.gid_index, entry.gid_type, gid_bytes(entry));
        println!("gid[{index}]: type {kind} netdev {} {}", entry.ndev_ifindex, std::net::Ipv6Addr::from(bytes));
    }
    assert_eq!(port.state, IBV_PORT_ACTIVE);
    assert!(limits.max_qp_wr >= 1024 && limits.max_qp_rd_atom >= 16 && port.max_msg_sz >= 8 << 20);
}

/// The largest inline message, by bisection.
fn inline(device: &ProbeDevice) {
    let queue = call!(device.verbs, ibv_create_cq, device.context, 16, ptr::null_mut(), ptr::null_mut(), 0);
    let (mut fits, mut refused) = (0, 1 << 16);
    while refused - fits > 1 {
        let middle = u32::midpoint(fits, refused);
        match device.queue_pair(queue, middle) {
            Ok(pair) => {
                assert_eq!(call!(device.verbs, ibv_destroy_qp, pair), 0);
                fits = middle;
            }
            Err(_) => refused = middle,
        }
    }
    println!("inline: up to {fits} bytes, with 2 scatter entries");
    assert_eq!(call!(device.verbs, ibv_destroy_cq, queue), 0);
    assert!(fits >= 64);
}

/// Whether the device registers memory of other devices: tried with an invalid file, as NCCL does.
fn device_memory(device: &ProbeDevice) {
    let access = IBV_ACCESS_LOCAL_WRITE.cast_signed();
    let region = call!(device.verbs, ibv_reg_dmabuf_mr, device.domain, 0, 4096, 0, -1, access);
    println!("dma-buf of file -1: {}", std::io::Error::last_os_error());
    assert!(region.is_null());
}

fn data_arrives(device: &ProbeDevice, opcode: ibv_wr_opcode, bytes: usize) {
    let (mut near, mut far) = device.pair(USUAL);
    let reads = opcode == IBV_WR_RDMA_READ;
    let source = if reads { &mut far.memory[HALF..] } else { &mut near.memory[..HALF] };
    source.iter_mut().enumerate().for_each(|(at, byte)| *byte = u8::try_from(at % 251).expect("a byte") + 1);
    let receives = matches!(opcode, IBV_WR_RDMA_WRITE_WITH_IMM | IBV_WR_SEND);
    if receives {
        far.receive(0, bytes, 2);
    }
    assert_eq!(near.post(&far, work(opcode, bytes, 0, 1)), 0);
    let done = next(&near);
    assert_eq!((done.status, done.wr_id), (IBV_WC_SUCCESS, 1), "opcode {opcode}, {bytes} bytes");
    if receives {
        let done = next(&far);
        assert_eq!((done.status, done.wr_id, done.byte_len as usize), (IBV_WC_SUCCESS, 2, bytes));
        let carries = done.wc_flags & IBV_WC_WITH_IMM != 0;
        assert_eq!(carries, opcode == IBV_WR_RDMA_WRITE_WITH_IMM);
        // SAFETY: either form of the union is 32 bits.
        assert!(!carries || unsafe { done.__bindgen_anon_1.imm_data } == 7_u32.to_be());
    }
    let (from, to) =
        if reads { (&far.memory[HALF..], &near.memory[..HALF]) } else { (&near.memory[..HALF], &far.memory[HALF..]) };
    assert!(from[..bytes] == to[..bytes], "opcode {opcode}: {bytes} bytes are not what was sent");
    assert!(to[bytes..].iter().all(|byte| *byte == 0), "opcode {opcode}: more than {bytes} bytes were written");
}

/// A write whose immediate data has arrived is complete, and so are all writes before it.
fn writes_arrive_in_order(device: &ProbeDevice) {
    let (mut near, far) = device.pair(USUAL);
    let each = 64 << 10;
    for (index, value) in (0..8).zip(1_u8..) {
        near.memory[index * each..][..each].fill(value);
        far.receive(0, 0, index as u64);
    }
    for index in 0..8 {
        let opcode = if index == 7 { IBV_WR_RDMA_WRITE_WITH_IMM } else { IBV_WR_RDMA_WRITE };
        let flags = if index == 7 { IBV_SEND_SIGNALED } else { 0 };
        assert_eq!(
            near.post(&far, ProbeWork { opcode, flags, bytes: each, offset: index * each, id: index as u64 }),
            0
        );
    }
    assert_eq!(next(&far).status, IBV_WC_SUCCESS);
    for (index, value) in (0..8).zip(1_u8..) {
        assert!(far.memory[HALF + index * each..][..each].iter().all(|byte| *byte == value), "write {index}");
    }
    assert_eq!((next(&near).wr_id, near.poll(&mut [ibv_wc::default()])), (7, 0), "only the last was signalled");
}

fn a_completion_wakes_a_sleeping_thread(device: &ProbeDevice) {
    let (near, far) = device.pair(USUAL);
    far.receive(0, 64, 1);
    far.arm();
    let slept = thread::scope(|scope| {
        let far = SharedEnd(&far);
        let sleeper = scope.spawn(move || {
            let far = far;
            far.0.sleep();
            Instant::now()
        });
        let began = Instant::now();
        assert_eq!(near.post(far.0, work(IBV_WR_SEND, 64, 0, 1)), 0);
        let woken = sleeper.join().expect("the sleeper is woken");
        woken.duration_since(began)
    });
    println!("sleeper: woken {} us after the post", slept.as_micros());
    assert_eq!(next(&far).status, IBV_WC_SUCCESS);
}

/// An end that two threads use.
#[derive(Clone, Copy)]
struct SharedEnd<'a>(&'a ProbeEnd<'a>);

// SAFETY: libibverbs locks its queues and channels itself, and the tests write no memory while it is shared.
unsafe impl Send for SharedEnd<'_> {}

/// Time from a post to its completion, and to its arrival; the median of 50.
fn latencies(device: &ProbeDevice) {
    let (near, far) = device.pair(USUAL);
    for (name, opcode, flags, bytes) in [
        ("SEND inline 64 B", IBV_WR_SEND, IBV_SEND_INLINE, 64),
        ("SEND 64 B", IBV_WR_SEND, 0, 64),
        ("SEND 4 KiB", IBV_WR_SEND, 0, 4 << 10),
        ("WRITE_WITH_IMM inline 64 B", IBV_WR_RDMA_WRITE_WITH_IMM, IBV_SEND_INLINE, 64),
        ("WRITE_WITH_IMM 4 KiB", IBV_WR_RDMA_WRITE_WITH_IMM, 0, 4 << 10),
        ("WRITE 4 KiB", IBV_WR_RDMA_WRITE, 0, 4 << 10),
        ("READ 64 B", IBV_WR_RDMA_READ, 0, 64),
        ("READ 4 KiB", IBV_WR_RDMA_READ, 0, 4 << 10),
    ] {
        let receives = matches!(opcode, IBV_WR_RDMA_WRITE_WITH_IMM | IBV_WR_SEND);
        let mut times: Vec<_> = (0..50)
            .map(|id| {
                if receives {
                    far.receive(0, bytes, id);
                }
                let began = Instant::now();
                assert_eq!(
                    near.post(&far, ProbeWork { opcode, flags: flags | IBV_SEND_SIGNALED, bytes, offset: 0, id }),
                    0
                );
                if receives {
                    assert_eq!(next(&far).status, IBV_WC_SUCCESS);
                }
                let arrived = began.elapsed();
                assert_eq!(next(&near).status, IBV_WC_SUCCESS);
                (began.elapsed(), arrived)
            })
            .collect();
        times.sort_unstable();
        let (complete, arrived) = times[25];
        println!("latency: {name:<28} complete {:>6} us, arrived {:>6} us", complete.as_micros(), arrived.as_micros());
    }
}

/// Bytes per second with 16 in flight, the better of two interleaved rounds.
fn rates(device: &ProbeDevice, bytes: usize) {
    let (near, far) = device.pair(USUAL);
    let count = (2 << 20 >> bytes.trailing_zeros()).max(8);
    let kinds = [
        ("WRITE", IBV_WR_RDMA_WRITE),
        ("WRITE_WITH_IMM", IBV_WR_RDMA_WRITE_WITH_IMM),
        ("READ", IBV_WR_RDMA_READ),
        ("SEND", IBV_WR_SEND),
    ];
    let mut best = [Duration::MAX; 4];
    for _ in 0..2 {
        for (index, (_, opcode)) in kinds.iter().enumerate() {
            best[index] = best[index].min(stream(&near, &far, *opcode, bytes, count));
        }
    }
    let shown = kinds
        .iter()
        .zip(best)
        .map(|((name, _), time)| format!("{name} {:.1} MB/s", (bytes * count) as f64 / time.as_secs_f64() / 1e6));
    println!("rate: {:>4} KiB x {count:>3}: {}", bytes >> 10, shown.collect::<Vec<_>>().join(", "));
}

fn stream(near: &ProbeEnd<'_>, far: &ProbeEnd<'_>, opcode: ibv_wr_opcode, bytes: usize, count: usize) -> Duration {
    let receives = matches!(opcode, IBV_WR_RDMA_WRITE_WITH_IMM | IBV_WR_SEND);
    let places = HALF / bytes;
    let (mut posted, mut complete, mut arrived) = (0, 0, 0);
    let mut done = [ibv_wc::default(); 16];
    let began = Instant::now();
    while complete < count || receives && arrived < count {
        while posted < count && posted < complete + 16 {
            let offset = posted % places * bytes;
            if receives {
                far.receive(offset, bytes, posted as u64);
            }
            assert_eq!(near.post(far, work(opcode, bytes, offset, posted as u64)), 0);
            posted += 1;
        }
        for (end, counter) in [(near, &mut complete), (far, &mut arrived)] {
            let some = end.poll(&mut done);
            assert!(done[..some].iter().all(|one| one.status == IBV_WC_SUCCESS));
            *counter += some;
        }
        thread::yield_now();
    }
    began.elapsed()
}

fn a_send_waits_for_a_receive(device: &ProbeDevice) {
    let (near, far) = device.pair(USUAL);
    assert_eq!(near.post(&far, work(IBV_WR_SEND, 64, 0, 1)), 0);
    let began = Instant::now();
    while began.elapsed() < Duration::from_millis(50) {
        assert_eq!(near.poll(&mut [ibv_wc::default()]), 0, "complete without a receive");
    }
    far.receive(0, 64, 2);
    assert_eq!((next(&near).status, next(&far).status), (IBV_WC_SUCCESS, IBV_WC_SUCCESS));
    println!("not ready: 7 retries wait for ever; complete {} ms after the post", began.elapsed().as_millis());
}

fn a_receiver_that_is_not_ready_ends_the_queue_pair(device: &ProbeDevice) {
    let (near, far) = device.pair(Patience { receiver_retries: 1, ..USUAL });
    let began = Instant::now();
    assert_eq!(near.post(&far, work(IBV_WR_SEND, 64, 0, 1)), 0);
    let done = next(&near);
    println!("not ready: with 1 retry `{}` after {} ms", said(&near, done.status), began.elapsed().as_millis());
    assert_eq!(done.status, IBV_WC_RNR_RETRY_EXC_ERR);
}

fn deregistered_memory_is_not_written(device: &ProbeDevice) {
    for opcode in [IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ] {
        let (near, mut far) = device.pair(USUAL);
        far.deregister();
        assert_eq!(near.post(&far, work(opcode, 4096, 0, 1)), 0);
        let done = next(&near);
        println!("deregistered: opcode {opcode} ends with `{}`", said(&near, done.status));
        assert_eq!(done.status, IBV_WC_REM_ACCESS_ERR);
    }
}

fn requests_after_a_failure_are_flushed(device: &ProbeDevice) {
    let (near, far) = device.pair(Patience { receiver_retries: 0, ..USUAL });
    near.receive(0, 64, 100);
    assert_eq!(near.post(&far, work(IBV_WR_SEND, 64, 0, 1)), 0);
    for id in 2..5 {
        assert_eq!(near.post(&far, ProbeWork { flags: 0, ..work(IBV_WR_RDMA_WRITE, 64, 0, id) }), 0);
    }
    let ends: Vec<_> = (0..5).map(|_| next(&near)).map(|done| (done.wr_id, done.status)).collect();
    println!("flushed: {ends:?}");
    assert_eq!(ends[0], (1, IBV_WC_RNR_RETRY_EXC_ERR));
    // Unsignaled requests and receives are flushed with completions too, in any order among the two queues.
    let mut ids: Vec<_> = ends[1..].iter().map(|(id, status)| (*id, *status == IBV_WC_WR_FLUSH_ERR)).collect();
    ids.sort_unstable();
    assert_eq!(ids, [(2, true), (3, true), (4, true), (100, true)]);
    // A post to a broken queue pair is refused, or taken and flushed.
    let error = near.post(&far, work(IBV_WR_RDMA_WRITE, 64, 0, 9));
    let end = if error == 0 { status(&near) } else { std::io::Error::from_raw_os_error(error).to_string() };
    println!("flushed: a later post ends with `{end}`");
}

/// Without answers, packets are retransmitted until the queue pair gives up. Over soft-RoCE 7 retries never end, as if
/// they were the receiver's count.
fn a_destroyed_peer_ends_the_queue_pair(device: &ProbeDevice) {
    for (timeout, retries) in [(8, 1), (14, 1), (14, 6), (16, 2)] {
        let (near, mut far) = device.pair(Patience { timeout, retries, receiver_retries: 7 });
        far.destroy_pair();
        let began = Instant::now();
        assert_eq!(near.post(&far, work(IBV_WR_RDMA_WRITE, 4096, 0, 1)), 0);
        let done = next(&near);
        let (text, millis) = (said(&near, done.status), began.elapsed().as_millis());
        println!("peer gone: timeout {timeout}, {retries} retries: `{text}` after {millis} ms");
        assert_eq!(done.status, IBV_WC_RETRY_EXC_ERR);
    }
}

/// Only with an interface that may be taken down.
fn a_link_that_is_down_ends_the_queue_pair(device: &ProbeDevice) {
    let Some(link) = fixtures::NetworkInterface::that_may_go_down() else { return };
    for (timeout, retries) in [(8, 1), (14, 6)] {
        let (near, far) = device.pair(Patience { timeout, retries, receiver_retries: 7 });
        link.goes("down");
        let began = Instant::now();
        let error = near.post(&far, work(IBV_WR_RDMA_WRITE, 4096, 0, 1));
        let end = if error == 0 { status(&near) } else { std::io::Error::from_raw_os_error(error).to_string() };
        println!("link down: timeout {timeout}, {retries} retries: `{end}` after {} ms", began.elapsed().as_millis());
        link.goes("up");
    }
}
