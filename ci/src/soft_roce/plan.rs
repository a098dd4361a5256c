//! What guests run: a table that the host and the guest both read, because both are this program.
//!
//! Not here: how a line is run ([`super::guest`]) and what is made of what it writes ([`super::figures`]).

/// One program of a guest.
pub(super) struct Program {
    /// What the report calls it; a single word.
    pub(super) name: &'static str,
    /// It is ended after so long.
    pub(super) seconds: u64,
    /// What is started before it, and must end well too.
    pub(super) beside: Option<&'static str>,
    /// The program begins when somebody listens here.
    pub(super) port: Option<u16>,
    pub(super) line: &'static str,
}

/// What one machine does.
pub(super) struct Scenario {
    pub(super) name: &'static str,
    /// Makes the network and the device. A line that fails ends the guest.
    pub(super) before: &'static [&'static str],
    pub(super) programs: &'static [Program],
}

/// The machine that runs everything alone: soft-RoCE over a device that leads nowhere, so that both ends are here.
pub(super) const ALONE: Scenario = Scenario {
    name: "alone",
    before: ALONE_NETWORK,
    programs: &[
        program("devinfo", 20, "ibv_devinfo -v"),
        perftest("ib_write_bw", "ib_write_bw -d rxe0 -x 1 -F -s 65536 -n 200 10.9.0.1"),
        perftest("ib_write_lat", "ib_write_lat -d rxe0 -x 1 -F -s 8 -n 200 10.9.0.1"),
        perftest("ib_send_bw", "ib_send_bw -d rxe0 -x 1 -F -s 65536 -n 200 10.9.0.1"),
        perftest("ib_read_bw", "ib_read_bw -d rxe0 -x 1 -F -s 65536 -n 200 10.9.0.1"),
        psbench("pushpull-verbs", "psbench pushpull --transport verbs --bytes 1MiB --iterations 5 --json"),
        psbench("pushpull-tcp", "psbench pushpull --transport tcp --bytes 1MiB --iterations 5 --json"),
        psbench("latency-verbs", "psbench latency --transport verbs --bytes 4KiB --iterations 20 --json"),
        psbench("latency-tcp", "psbench latency --transport tcp --bytes 4KiB --iterations 20 --json"),
        program("probe", 120, "transport-unit --nocapture --test-threads=1 verbs::probe"),
        program("verbs", 240, "transport-unit --nocapture --test-threads=1 verbs::tests::real"),
        program(
            "digits-verbs",
            60,
            "pserver quickstart --transport verbs --trainers 2 --epochs 1 --json --model-dir /tmp/m",
        ),
    ],
};

/// The machine in which a person tries something.
pub(super) const BY_HAND: Scenario =
    Scenario { name: "by-hand", before: ALONE_NETWORK, programs: &[program("by-hand", 600, "sh /by-hand")] };

/// One of two machines with a wire between them that loses a packet in a thousand and takes its time: the one with the
/// server. It serves the same job over verbs and over TCP, and says what came of it.
pub(super) const SERVER: Scenario = Scenario {
    name: "server",
    before: &[
        "/bin/ip link set lo up",
        "/bin/ip link set eth0 mtu 4200",
        "/bin/ip address add 10.9.0.1/24 dev eth0",
        "/bin/ip link set eth0 up",
        "/bin/tc qdisc add dev eth0 root netem loss 0.1% delay 1ms",
        "rdma link add rxe0 type rxe netdev eth0",
    ],
    programs: &[
        program("serve-verbs", 120, "sh /bin/serve verbs 7164"),
        program("serve-tcp", 120, "sh /bin/serve tcp 7165"),
        program("serve-cut", 120, "sh /bin/serve verbs 7166 cut"),
    ],
};

/// The other one, with the trainer.
pub(super) const TRAINER: Scenario = Scenario {
    name: "trainer",
    before: &[
        "/bin/ip link set lo up",
        "/bin/ip link set eth0 mtu 4200",
        "/bin/ip address add 10.9.0.2/24 dev eth0",
        "/bin/ip link set eth0 up",
        "/bin/tc qdisc add dev eth0 root netem loss 0.1% delay 1ms",
        "rdma link add rxe0 type rxe netdev eth0",
    ],
    programs: &[
        program("train-verbs", 120, "sh /bin/train verbs 7164"),
        program("train-tcp", 120, "sh /bin/train tcp 7165"),
        program("train-cut", 120, "sh /bin/train verbs 7166"),
    ],
};

/// Scripts, as short as what they say: a person repeats them by hand.
pub(super) const SCRIPTS: &[(&str, &str)] = &[("bin/serve", SERVE), ("bin/train", TRAIN)];

/// Serves until the trainer says that it is done. With `cut` the wire is down for two
/// seconds while it trains.
const SERVE: &str = r#"
mkdir /tmp/$2
pserver serve --bind "$1://10.9.0.1:$2" --insecure --trainers 1 --merge mean --model-dir /tmp/$2 &
server=$!
if [ "$3" = cut ]; then
    nc -l -p $(($2 + 1000)) > /dev/null
    sleep 4; /bin/ip link set eth0 down; sleep 2; /bin/ip link set eth0 up
    echo "the wire was cut"
fi
nc -l -p $(($2 + 2000)) > /dev/null
kill -TERM $server
wait $server || exit 1
echo "model $(sha256sum < /tmp/$2/digits.safetensors)"
"#;

/// Trains two passes over the digits, which the parent of a quickstart would otherwise have started.
const TRAIN: &str = r#"
mkfifo /tmp/$2
(echo finish; sleep 600) > /tmp/$2 &
until nc 10.9.0.1 $(($2 + 1000)) < /dev/null 2> /dev/null; do [ "$2" = 7166 ] || break; sleep 1; done
pserver quickstart-trainer --coordinator "$1://10.9.0.1:$2" --trainer 0 --trainers 1 --servers 1 --mode sync \
    --epochs 2 --seed 1 --optimizer "optimizer: SGD sgd { } lr_policy: Const const_lr { learning_rate: 0.4 }" < /tmp/$2
trained=$?
until nc 10.9.0.1 $(($2 + 2000)) < /dev/null; do sleep 1; done
exit $trained
"#;

/// The shell has an `ip` of its own, which is another: `/bin/ip` is meant. `dummy0` comes with its module.
const ALONE_NETWORK: &[&str] = &[
    "/bin/ip link set lo up",
    "/bin/ip link set dummy0 mtu 4200",
    "/bin/ip address add 10.9.0.1/24 dev dummy0",
    "/bin/ip link set dummy0 up",
    "rdma link add rxe0 type rxe netdev dummy0",
];

const fn program(name: &'static str, seconds: u64, line: &'static str) -> Program {
    Program { name, seconds, beside: None, port: None, line }
}

const fn psbench(name: &'static str, line: &'static str) -> Program {
    program(name, 90, line)
}

/// A program of perftest is its own server when it is told no address.
const fn perftest(name: &'static str, line: &'static str) -> Program {
    let (server, _) = line.split_at(line.len() - " 10.9.0.1".len());
    Program { name, seconds: 60, beside: Some(server), port: Some(18515), line }
}

/// The scenario of this name.
pub(super) fn scenario(name: &str) -> Option<Scenario> {
    [ALONE, SERVER, TRAINER, BY_HAND].into_iter().find(|scenario| scenario.name == name)
}
