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
    pub(super) after: &'static [&'static str],
}

/// The machine that runs everything alone: soft-RoCE over a device that leads nowhere, so that both ends are here.
pub(super) const ALONE: Scenario = Scenario {
    name: "alone",
    before: ALONE_NETWORK,
    programs: &[
        Program { name: "devinfo", seconds: 10, beside: None, port: None, line: "ibv_devinfo -v" },
        perftest(
            "ib_write_bw",
            "ib_write_bw -d rxe0 -x 1 -F -s 65536 -n 200",
            "ib_write_bw -d rxe0 -x 1 -F -s 65536 -n 200 10.9.0.1",
        ),
        perftest(
            "ib_write_lat",
            "ib_write_lat -d rxe0 -x 1 -F -s 8 -n 200",
            "ib_write_lat -d rxe0 -x 1 -F -s 8 -n 200 10.9.0.1",
        ),
        perftest(
            "ib_send_bw",
            "ib_send_bw -d rxe0 -x 1 -F -s 65536 -n 200",
            "ib_send_bw -d rxe0 -x 1 -F -s 65536 -n 200 10.9.0.1",
        ),
        perftest(
            "ib_read_bw",
            "ib_read_bw -d rxe0 -x 1 -F -s 65536 -n 200",
            "ib_read_bw -d rxe0 -x 1 -F -s 65536 -n 200 10.9.0.1",
        ),
        Program {
            name: "probe",
            seconds: 60,
            beside: None,
            port: None,
            line: "transport-unit --nocapture --test-threads=1 verbs::",
        },
    ],
    after: &[],
};

/// The machine in which a person tries something.
pub(super) const BY_HAND: Scenario = Scenario {
    name: "by-hand",
    before: ALONE_NETWORK,
    programs: &[Program { name: "by-hand", seconds: 600, beside: None, port: None, line: "sh /by-hand" }],
    after: &[],
};

/// The shell has an `ip` of its own, which is another: `/bin/ip` is meant. `dummy0` comes with its module.
const ALONE_NETWORK: &[&str] = &[
    "/bin/ip link set lo up",
    "/bin/ip link set dummy0 mtu 4200",
    "/bin/ip address add 10.9.0.1/24 dev dummy0",
    "/bin/ip link set dummy0 up",
    "rdma link add rxe0 type rxe netdev dummy0",
];

const fn perftest(name: &'static str, beside: &'static str, line: &'static str) -> Program {
    Program { name, seconds: 30, beside: Some(beside), port: Some(18515), line }
}

/// The scenario of this name.
pub(super) fn scenario(name: &str) -> Option<Scenario> {
    [ALONE, BY_HAND].into_iter().find(|scenario| scenario.name == name)
}
