//! The programs of the guests: a table that host and guest both read, because both are this program.
//!
//! Not here: how a line is run ([`super::guest`]) and what is made of what it writes ([`super::figures`]).

/// One program of a guest.
pub(super) struct GuestProgram {
    /// The name in the report; a single word.
    pub(super) name: &'static str,
    /// It is ended after so long: it hangs. A busy machine takes ten times what an idle one does.
    pub(super) seconds: u64,
    /// A program that is started before this one and must succeed too.
    pub(super) beside: Option<&'static str>,
    /// The program begins when somebody listens here.
    pub(super) port: Option<u16>,
    pub(super) line: &'static str,
}

/// The programs of one machine.
#[derive(Clone, Copy)]
pub(super) struct Scenario {
    pub(super) name: &'static str,
    /// QEMU's arguments for the processors.
    pub(super) processors: &'static [&'static str],
    /// Makes the network and the device. A line that fails ends the guest.
    pub(super) before: &'static [&'static str],
    parts: &'static [&'static [GuestProgram]],
}

impl Scenario {
    /// The programs, in order.
    pub(super) fn programs(&self) -> impl Iterator<Item = &'static GuestProgram> {
        self.parts.iter().copied().flatten()
    }
}

/// Two processors of an old kind: QEMU spends two fifths less time on it than on `max`, whose vectors and page tables
/// are longer.
const FAST: &[&str] = &["-accel", "tcg,thread=multi", "-smp", "2", "-cpu", "Nehalem"];
/// One processor, whose clock advances by a nanosecond for each instruction, and while it idles to its next timer. It
/// has all vectors that QEMU knows, as processors beside network cards do.
const COUNTING: &[&str] = &["-accel", "tcg,thread=single", "-icount", "shift=0,sleep=off", "-smp", "1", "-cpu", "max"];

/// The machine of each commit, alone: soft-RoCE over a device that leads nowhere, so that both ends are here.
pub(super) const ALONE: Scenario =
    Scenario { name: "alone", processors: FAST, before: ALONE_NETWORK, parts: &[PROMISES] };
/// The machine that runs everything.
pub(super) const ALONE_LONG: Scenario =
    Scenario { name: "alone-long", processors: FAST, before: ALONE_NETWORK, parts: &[FIGURES, PROMISES, LAYOUTS] };

const PROMISES: &[GuestProgram] = &[
    program("devinfo", 60, "ibv_devinfo -v"),
    psbench("pushpull-verbs", PUSHPULL_VERBS),
    program("probe", 600, "transport-unit --show-output --test-threads=1 verbs::probe"),
    program("verbs", 900, "transport-unit --show-output --test-threads=1 verbs::tests::real"),
    program("digits-verbs", 300, "sh /bin/digits verbs adam"),
    program("digits-tcp", 300, "sh /bin/digits tcp adam"),
    program("idle", 300, "sh /bin/idle 7170"),
    program("killed-trainer", 300, "sh /bin/killed-trainer 7172"),
    program("flaps", 300, "sh /bin/flaps"),
    program("kills", 900, KILLS),
];

/// The speed of the same machine's tools and of TCP, beside that of verbs.
const FIGURES: &[GuestProgram] = &[
    perftest("ib_write_bw", "ib_write_bw -d rxe0 -x 1 -F -s 1048576 -n 16 -t 16 10.9.0.1"),
    psbench("pushpull-tcp", PUSHPULL_TCP),
    perftest("ib_send_bw", "ib_send_bw -d rxe0 -x 1 -F -s 1048576 -n 16 -t 16 10.9.0.1"),
    perftest("ib_read_bw", "ib_read_bw -d rxe0 -x 1 -F -s 1048576 -n 16 10.9.0.1"),
    perftest("ib_write_lat", "ib_write_lat -d rxe0 -x 1 -F -s 4096 -n 200 10.9.0.1"),
    psbench("latency-verbs", "psbench latency --transport verbs --bytes 4KiB --iterations 100 --json"),
    psbench("latency-tcp", "psbench latency --transport tcp --bytes 4KiB --iterations 100 --json"),
];

/// The machine whose clock counts instructions: it has one processor, on which a nanosecond is an instruction. Figures
/// are the same on every host, and no scheduler of another processor is in them.
pub(super) const COUNTED: Scenario =
    Scenario { name: "counted", processors: COUNTING, before: ALONE_NETWORK, parts: &[COUNTS] };

/// The sleeping peer of perftest beside rounds of ours over each transport. A spinning one would measure how long the
/// guest's scheduler lets it.
const COUNTS: &[GuestProgram] = &[
    perftest("ib_send_lat", "ib_send_lat -e -d rxe0 -x 1 -F -s 4096 -n 500 10.9.0.1"),
    perftest("ib_send_lat-1m", "ib_send_lat -e -d rxe0 -x 1 -F -s 1048576 -n 20 10.9.0.1"),
    psbench("verbs", VERBS_4K),
    psbench("tcp", "psbench latency --transport tcp --poll block --alone -s 4KiB --iterations 500 --json"),
    psbench("shm", "psbench latency --transport shm --poll block --alone -s 4KiB --iterations 500 --json"),
    psbench("verbs-64", VERBS_64),
    psbench("verbs-1m", VERBS_1M),
    psbench("verbs-1m-2", VERBS_1M_2),
    psbench("shm-1m-2", SHM_1M_2),
    program("gloo-1m", 300, GLOO_1M),
    psbench("tcp-1m", "psbench latency --transport tcp --poll block --alone -s 1MiB --iterations 20 --json"),
];

/// From registered memory and into it, as perftest's is.
const VERBS_4K: &str =
    "psbench latency --transport verbs --poll block --alone -s 4KiB --buffers own --iterations 500 --json";
const VERBS_64: &str =
    "psbench latency --transport verbs --poll block --alone -s 64 --buffers own --iterations 500 --json";
const VERBS_1M: &str =
    "psbench latency --transport verbs --poll block --alone -s 1MiB --buffers own --iterations 20 --json";

/// Two trainers, and beside them two ranks of gloo that reduce as much.
const VERBS_1M_2: &str = "psbench latency --transport verbs --poll block --alone -s 1MiB --buffers own --trainers 2 \
                          --iterations 20 --json";
const SHM_1M_2: &str = "psbench latency --transport shm --poll block --alone -s 1MiB --buffers registered --trainers 2 \
                        --iterations 20 --json";
const GLOO_1M: &str = "mkdir /tmp/gloo; gloo 1 2 1048576 20 /tmp/gloo & gloo 0 2 1048576 20 /tmp/gloo && wait $!";

/// Tests that the host runs over TCP and shared memory, once more over verbs.
const LAYOUTS: &[GuestProgram] = &[program("digests", 900, DIGESTS), program("c-programs", 900, C_PROGRAMS)];

/// Sixteen messages each way, as perftest keeps them in flight, from memory and into memory that is registered, as its
/// is. Nine rounds are the fewest.
const PUSHPULL_VERBS: &str = "psbench pushpull --transport verbs --bytes 16MiB --chunk 1MiB --buffers own \
                              --iterations 9 --alone --json";
const PUSHPULL_TCP: &str = "psbench pushpull --transport tcp --bytes 16MiB --chunk 1MiB --iterations 9 --alone --json";

/// Servers are killed while three trainers train, and the digest is that of a job over TCP that nobody disturbed.
const KILLS: &str = "PSERVER_TEST_BIND=verbs://127.0.0.1:0 PSERVER_KILLS=1 \
                     cli-kill --show-output --test-threads=1 a_disturbed_job twice_when_servers_are";
/// Layouts of servers, shards and chunks over verbs and over TCP, which take too long for more than one optimizer.
const DIGESTS: &str = "PSERVER_TEST_BIND=verbs://127.0.0.1:0 cli-digest --show-output --test-threads=1 adam_has";
/// All of them but those that look at the library, not at what it sends, the one that first compiles a driver, and the
/// one that is about sockets and waits for deadlines.
const C_PROGRAMS: &str = "PSERVER_TEST_BIND=verbs://127.0.0.1:0 PSERVER_C_PROGRAMS=/c \
                          cli-c_programs --test-threads=1 \
                          --skip static_library --skip exports --skip may_lie_on_a_device --skip is_killed";

/// The machine in which a person tries something.
pub(super) const BY_HAND: Scenario = Scenario {
    name: "by-hand",
    processors: FAST,
    before: ALONE_NETWORK,
    parts: &[&[program("by-hand", 600, "sh /by-hand")]],
};

/// One of two machines with a wire between them that loses a packet in a thousand and takes its time: the one with the
/// server. It serves the same job over verbs and over TCP, and says what came of it.
pub(super) const SERVER: Scenario = Scenario {
    name: "server",
    processors: FAST,
    before: &[
        "/bin/ip link set lo up",
        "/bin/ip link set eth0 mtu 4200",
        "/bin/ip address add 10.9.0.1/24 dev eth0",
        "/bin/ip link set eth0 up",
        "/bin/tc qdisc add dev eth0 root netem loss 0.1% delay 1ms",
        "rdma link add rxe0 type rxe netdev eth0",
    ],
    parts: &[&[
        program("serve-verbs", 600, "sh /bin/serve auto 7164"),
        program("serve-tcp", 600, "sh /bin/serve tcp 7165"),
        program("serve-beside", 600, "sh /bin/serve auto 7167 beside"),
        program("serve-flap", 600, "sh /bin/serve auto 7166 flap"),
    ]],
};

/// The other one, with the trainer.
pub(super) const TRAINER: Scenario = Scenario {
    name: "trainer",
    processors: FAST,
    before: &[
        "/bin/ip link set lo up",
        "/bin/ip link set eth0 mtu 4200",
        "/bin/ip address add 10.9.0.2/24 dev eth0",
        "/bin/ip link set eth0 up",
        "/bin/tc qdisc add dev eth0 root netem loss 0.1% delay 1ms",
        "rdma link add rxe0 type rxe netdev eth0",
    ],
    parts: &[&[
        program("train-verbs", 600, "sh /bin/train auto 7164"),
        program("train-tcp", 600, "sh /bin/train tcp 7165"),
        program("train-beside", 600, "sh /bin/train auto 7167 beside"),
        program("train-flap", 600, "sh /bin/train auto 7166 flap"),
    ]],
};

/// Scripts, as short as what they say: a person repeats them by hand. A line `figure …` is repeated at the end.
pub(super) const SCRIPTS: &[(&str, &str)] = &[
    ("bin/serve", SERVE),
    ("bin/train", TRAIN),
    ("bin/digits", DIGITS),
    ("bin/idle", IDLE),
    ("bin/killed-trainer", KILLED_TRAINER),
    ("bin/flaps", FLAPS),
];

/// Serves until the trainer says that it is done. With `auto` both sides may choose, and must have chosen verbs. With
/// `beside` the trainer's machine has a second server.
///
/// With `flap` the server's machine has no device before the trainer has done its first epoch. Then it has one, and the
/// connections must go on over verbs: one of the job, and one for each shard. The wire, which loses one packet in a
/// hundred and reorders one in twenty, stalls for four seconds: no connection is lost. The link is down for two, which
/// ends a queue pair of soft-RoCE that sends. Ten seconds later all frames must go over verbs: TCP has at most the
/// segments of what ends the program, which are some for each connection.
const SERVE: &str = r#"
mkdir /tmp/$2
echo "the same on both machines" > /tmp/$2/token
[ "$3" != flap ] || rdma link delete rxe0
servers=1; [ "$3" != beside ] || servers=2
pserver serve --bind "$1://10.9.0.1:$2" --token-file /tmp/$2/token --trainers 1 --servers $servers --merge mean \
    --model-dir /tmp/$2 --log-level debug 2> /tmp/$2/log &
server=$!
log=/tmp/$2/log
connections() { grep -c 'welcome.*trainer=0' $log; }
returned() { grep -c 'goes on over verbs' $log; }
segments() { grep Tcp: /proc/net/snmp | tail -n 1 | cut -d ' ' -f 12; }
bytes() { cat /sys/class/net/eth0/statistics/rx_bytes; }
if [ "$3" = flap ]; then
    nc -l -p $(($2 + 1000)) > /dev/null
    wire="/bin/tc qdisc change dev eth0 root netem"
    $wire loss 1% delay 20ms reorder 5%
    rdma link add rxe0 type rxe netdev eth0
    second=0
    expected=$(($(connections) + 1))
    until [ $(returned) -ge $expected ] || [ $second = 20 ]; do sleep 1; second=$((second + 1)); done
    $wire loss 1% delay 20ms reorder 5%
    lost=$(connections)
    $wire loss 100%; sleep 4; $wire loss 1% delay 20ms reorder 5%; sleep 3
    lost=$(($(connections) - lost))
    /bin/ip link set eth0 down; sleep 2; /bin/ip link set eth0 up
    sleep 10
    segments=$(segments); bytes=$(bytes)
fi
timeout 500 nc -l -p $(($2 + 2000)) > /dev/null || echo "the trainer's machine has not said that it is done"
if [ "$3" = flap ]; then
    segments=$(($(segments) - segments)); bytes=$(($(bytes) - bytes))
    echo "figure connections that went on over verbs: $(returned), $expected after $second s; lost in a stall: $lost"
    echo "figure from 10 s after the flap on: $bytes bytes arrived, with $segments segments of TCP"
    [ $second -lt 20 ] && [ $lost = 0 ] && [ $bytes -gt 500000 ] && [ $segments -lt 100 ] ||
        { cat /tmp/$2/log; exit 1; }
fi
kill -TERM $server
wait $server || { cat /tmp/$2/log; exit 1; }
if [ "$1" = auto ] && [ "$3" != flap ]; then
    chosen=$(grep -c 'a connection goes over verbs' /tmp/$2/log)
    echo "figure connections over verbs where both sides may choose: $chosen"
    [ $chosen -gt 0 ] && ! grep 'a connection stays on TCP' /tmp/$2/log || { cat /tmp/$2/log; exit 1; }
fi
echo "model $(sha256sum < /tmp/$2/digits.safetensors)"
"#;

/// Trains some passes over the digits, which the parent of a quickstart would otherwise have started. With `flap` it
/// tells the server's machine when the first is done. That machine may go away with its answer lost on the wire, so
/// nobody waits long for it; what it was not told, it misses itself. With `beside` it has a server of its own machine
/// too, which it reaches through shared memory.
const TRAIN: &str = r#"
tell() {
    for attempt in $(seq 25); do
        timeout 3 nc 10.9.0.1 $1 < /dev/null && return
        sleep 0.5
    done
}
mkdir /tmp/$2
mkfifo /tmp/$2/orders
echo "the same on both machines" > /tmp/$2/token
(echo finish; sleep 600) > /tmp/$2/orders &
servers=1
if [ "$3" = beside ]; then
    servers=2
    pserver serve --bind "$1://10.9.0.2:0" --token-file /tmp/$2/token --index 1 --servers 2 --log-level debug \
        --coordinator "$1://10.9.0.1:$2" > /dev/null 2> /tmp/$2/log &
    beside=$!
fi
pserver quickstart-trainer --coordinator "$1://10.9.0.1:$2" --trainer 0 --trainers 1 --servers $servers --mode sync \
    --token-file /tmp/$2/token --epochs 5 --seed 1 \
    --optimizer "optimizer: SGD sgd { } lr_policy: Const const_lr { learning_rate: 0.4 }" \
    < /tmp/$2/orders > /tmp/$2/reports &
trainer=$!
if [ "$3" = flap ]; then
    /bin/tc qdisc change dev eth0 root netem loss 1% delay 20ms reorder 5%
    until grep -q '"epoch":1,' /tmp/$2/reports || ! kill -0 $trainer; do sleep 0.02; done
    tell $(($2 + 1000))
fi
wait $trainer
trained=$?
cat /tmp/$2/reports
tell $(($2 + 2000))
if [ "$3" = beside ]; then
    kill -TERM $beside
    wait $beside || { cat /tmp/$2/log; exit 1; }
    echo "figure of the server beside the trainer: $(grep -c 'connection goes over verbs' /tmp/$2/log) over verbs," \
        "$(grep -c 'welcome.*trainer=0' /tmp/$2/log) connections of the trainer"
    ! grep 'connection goes over verbs\|stays on TCP' /tmp/$2/log && grep -q 'welcome.*trainer=0' /tmp/$2/log || exit 1
fi
exit $trained
"#;

/// Two trainers and two servers learn the digits; says what model came of it.
const DIGITS: &str = r#"
pserver quickstart --transport $1 --optimizer $2 --trainers 2 --epochs 1 --json --model-dir /tmp/digits-$1-$2 || exit 1
echo "model $(sha256sum < /tmp/digits-$1-$2/digits.safetensors)"
"#;

/// A server and a trainer over verbs that have nothing to do: the trainer waits to be told that the others have left.
/// A wake-up is a voluntary switch of a thread (`/proc/PID/task/*/status`), which other work on the host does not
/// change. A thread that spins has none: it takes the processor. The fourteenth and fifteenth number of `stat` are
/// hundredths of a second there.
const IDLE: &str = r#"
mkdir /tmp/$1
mkfifo /tmp/$1/orders
sleep 600 > /tmp/$1/orders &
pserver serve --bind "verbs://127.0.0.1:$1" --trainers 1 --merge mean --model-dir /tmp/$1 > /tmp/$1/ready &
server=$!
until grep -q ready /tmp/$1/ready; do sleep 0.1; done
pserver quickstart-trainer --coordinator "verbs://127.0.0.1:$1" --trainer 0 --trainers 1 --servers 1 --mode sync \
    --epochs 1 --seed 1 --optimizer "optimizer: SGD sgd { } lr_policy: Const const_lr { learning_rate: 0.4 }" \
    < /tmp/$1/orders > /tmp/$1/reports &
trainer=$!
until grep -q epoch /tmp/$1/reports || ! kill -0 $trainer; do sleep 0.1; done
spent() { set -- $(cat /proc/$1/stat); echo $((${14} + ${15})); }
woken() {
    total=0
    for word in $(cat /proc/$1/task/*/status | grep '^voluntary'); do
        case $word in [0-9]*) total=$((total + word)) ;; esac
    done
    echo $total
}
sleep 2
served=$(spent $server); woke=$(woken $server); trained=$(woken $trainer)
sleep 10
served=$(($(spent $server) - served)); woke=$(($(woken $server) - woke)); trained=$(($(woken $trainer) - trained))
echo "figure idle for 10 s: server $woke wake-ups (at most 500), $((served * 10)) ms on a processor (at most 2000)"
echo "figure idle for 10 s: trainer $trained wake-ups"
kill -0 $server && kill -0 $trainer && [ $woke -le 500 ] && [ $served -le 200 ] || exit 1
echo finish > /tmp/$1/orders
wait $trainer || exit 1
kill -TERM $server
wait $server
"#;

/// A trainer that is killed within its second epoch; the next of the same rank trains on and ends well.
const KILLED_TRAINER: &str = r#"
mkdir /tmp/$1
pserver serve --bind "verbs://127.0.0.1:$1" --trainers 1 --merge mean --model-dir /tmp/$1 --log-level debug \
    > /tmp/$1/ready 2> /tmp/$1/log &
server=$!
until grep -q ready /tmp/$1/ready; do sleep 0.1; done
train() {
    mkfifo /tmp/$1/orders-$2
    (echo finish; sleep 600) > /tmp/$1/orders-$2 &
    exec pserver quickstart-trainer --coordinator "verbs://127.0.0.1:$1" --trainer 0 --trainers 1 --servers 1 \
        --mode sync --epochs $2 --seed 1 --optimizer "sgd { } const_lr { learning_rate: 0.4 }" < /tmp/$1/orders-$2
}
train $1 1000 > /tmp/$1/reports &
trainer=$!
until grep -q epoch /tmp/$1/reports || ! kill -0 $trainer; do sleep 0.02; done
kill -KILL $trainer || exit 1
(train $1 2) || { cat /tmp/$1/log; exit 1; }
kill -TERM $server
wait $server || { cat /tmp/$1/log; exit 1; }
echo "figure connections after a trainer was killed: $(grep -c 'welcome.*trainer=0' /tmp/$1/log)"
[ $(grep -c 'welcome.*trainer=0' /tmp/$1/log) -gt 1 ]
"#;

/// Two trainers push and pull 1 MiB while the link goes down three times for a second. Soft-RoCE then loses its
/// retransmission timer in two of three runs, and completes a READ never: the connection's watch must end such a
/// connection, and the job goes on over the next one. `psbench` compares every element.
const FLAPS: &str = r#"
sent() { cat /sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts; }
before=$(sent)
psbench latency --transport verbs --poll block --alone -s 1MiB --buffers ordinary --trainers 2 --iterations 200 \
    --json &
bench=$!
# A round has 256 packets and more each way.
until [ $(sent) -gt $((before + 2000)) ] || ! kill -0 $bench 2> /dev/null; do sleep 0.1; done
flapped=0
for flap in 1 2 3; do
    kill -0 $bench 2> /dev/null || break
    /bin/ip link set dummy0 down; sleep 1; /bin/ip link set dummy0 up
    /bin/ip address add 10.9.0.1/24 dev dummy0 2> /dev/null
    flapped=$flap
    sleep 3
done
wait $bench || exit 1
echo "figure times that the link went down under load: $flapped"
[ $flapped -gt 0 ]
"#;

/// The shell has an `ip` of its own, which is another: `/bin/ip` is meant. `dummy0` comes with its module.
const ALONE_NETWORK: &[&str] = &[
    "/bin/ip link set lo up",
    "/bin/ip link set dummy0 mtu 4200",
    "/bin/ip address add 10.9.0.1/24 dev dummy0",
    "/bin/ip link set dummy0 up",
    "rdma link add rxe0 type rxe netdev dummy0",
];

const fn program(name: &'static str, seconds: u64, line: &'static str) -> GuestProgram {
    GuestProgram { name, seconds, beside: None, port: None, line }
}

const fn psbench(name: &'static str, line: &'static str) -> GuestProgram {
    program(name, 300, line)
}

/// A program of perftest is its own server when it is told no address.
const fn perftest(name: &'static str, line: &'static str) -> GuestProgram {
    let (server, _) = line.split_at(line.len() - " 10.9.0.1".len());
    GuestProgram { name, seconds: 200, beside: Some(server), port: Some(18515), line }
}

/// The scenario of this name.
pub(super) fn scenario(name: &str) -> Option<Scenario> {
    [ALONE, ALONE_LONG, COUNTED, SERVER, TRAINER, BY_HAND].into_iter().find(|scenario| scenario.name == name)
}
