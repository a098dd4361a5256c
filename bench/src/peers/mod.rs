//! Other systems that do the same work and are in package registries.
//!
//! Each is a script in `bench/peers` that starts processes of its own and runs rounds when it is told to (`partner`);
//! what it needs is put into a folder once (`install`). Nothing here is needed to build or to test.

mod install;
mod partner;

use clap::ValueEnum;

use crate::hosts::{BenchHost, Hosts, INTERFACE, ServerPlacement};
use crate::job::{RuleName, TransportName, word};

pub(crate) use install::{InstallFolders, install};
pub(crate) use partner::Partner;

/// Packages that are installed together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kit {
    /// MXNet's kvstore, which is ps-lite.
    Mxnet,
    /// ps-lite as BytePS ships it, and BytePS's server.
    Pslite,
    /// PaddlePaddle's parameter server over brpc.
    Paddle,
    /// PyTorch's all-reduce with gloo, its RPC, and its fused optimizers.
    Torch,
    /// Open MPI's all-reduce.
    Openmpi,
}

/// Somebody who can run rounds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer {
    pub(crate) name: &'static str,
    pub(crate) kit: Kit,
    program: PeerProgram,
    pub(crate) path: TransportName,
    /// Whether it spreads values over several servers.
    pub(crate) spreads: bool,
    /// How few and how many trainers it works with.
    trainers: (u32, u32),
    /// Why not with others.
    pub(crate) bounds: &'static str,
    /// The settings with which our servers do the same work.
    pub(crate) rule: RuleName,
}

/// How a peer is started.
#[derive(Clone, Copy, Debug)]
enum PeerProgram {
    /// By the Python of its kit, with this script.
    Script(&'static str),
    /// By `mpirun`, with these ways to carry bytes.
    Mpirun(&'static str),
}

const ALONE: &str = "one rank has nobody to reduce with";

/// Everybody who runs rounds, in the order of the table.
pub(crate) const PEERS: [Peer; 12] = [
    Peer::spreading("MXNet kvstore", Kit::Mxnet, "mxnet_kvstore.py", TransportName::Tcp),
    Peer::spreading("ps-lite", Kit::Pslite, "pslite.py", TransportName::Tcp),
    Peer::serving("ps-lite ipc", Kit::Pslite, "pslite.py", TransportName::Shm),
    Peer::spreading("BytePS", Kit::Pslite, "byteps.py", TransportName::Tcp),
    Peer::serving("BytePS ipc", Kit::Pslite, "byteps.py", TransportName::Shm),
    Peer::serving("torch RPC", Kit::Torch, "torch_rpc.py", TransportName::Tcp),
    Peer::serving("torch RPC", Kit::Torch, "torch_rpc.py", TransportName::Shm),
    Peer {
        trainers: (1, 1),
        bounds: "it adds nothing up, so only one trainer knows what it must get",
        rule: RuleName::None,
        ..Peer::serving("PaddlePaddle brpc, set and get", Kit::Paddle, "paddle_brpc.py", TransportName::Tcp)
    },
    Peer::reducing("gloo all-reduce", Kit::Torch, "torch_gloo.py"),
    Peer::reducing("DDP over gloo", Kit::Torch, "torch_ddp.py"),
    Peer::mpi(TransportName::Tcp, "tcp,self"),
    Peer::mpi(TransportName::Shm, "vader,self"),
];

impl Peer {
    /// A server that sums, and trainers.
    const fn serving(name: &'static str, kit: Kit, script: &'static str, path: TransportName) -> Self {
        let program = PeerProgram::Script(script);
        Self { name, kit, program, path, spreads: false, trainers: (1, u32::MAX), bounds: "", rule: RuleName::Sum }
    }

    /// Servers that sum, and trainers.
    const fn spreading(name: &'static str, kit: Kit, script: &'static str, path: TransportName) -> Self {
        Self { spreads: true, ..Self::serving(name, kit, script, path) }
    }

    /// Ranks that reduce among themselves.
    const fn reducing(name: &'static str, kit: Kit, script: &'static str) -> Self {
        let trainers = (2, u32::MAX);
        Self { trainers, bounds: ALONE, ..Self::serving(name, kit, script, TransportName::Tcp) }
    }

    const fn mpi(path: TransportName, layers: &'static str) -> Self {
        let program = PeerProgram::Mpirun(layers);
        Self {
            name: "Open MPI all-reduce",
            kit: Kit::Openmpi,
            program,
            path,
            spreads: false,
            trainers: (2, u32::MAX),
            bounds: ALONE,
            rule: RuleName::Sum,
        }
    }

    pub(crate) fn serves(&self, trainers: u32) -> bool {
        (self.trainers.0..=self.trainers.1).contains(&trainers)
    }

    /// The command that starts the peer, once its kit is installed; on hosts, if there are some.
    pub(crate) fn command(
        &self,
        places: &InstallFolders,
        bytes: u64,
        trainers: u32,
        on: Option<(&Hosts, ServerPlacement)>,
    ) -> Vec<String> {
        let hosts = on.map(|(hosts, _)| hosts);
        let mut command = match self.program {
            PeerProgram::Script(script) => vec![places.python(self.kit), places.script(script)],
            PeerProgram::Mpirun(layers) => {
                let mut all = hosts.map_or_else(Vec::new, |hosts| hosts.of_trainers()[0].within().to_vec());
                all.push(places.launcher(self.kit));
                all.extend(["--allow-run-as-root", "--oversubscribe"].map(str::to_owned));
                let interface = if hosts.is_some() { INTERFACE } else { "lo" };
                all.extend(["--mca", "btl_tcp_if_include", interface, "--mca", "btl", layers].map(str::to_owned));
                if let Some(hosts) = hosts {
                    let agent = format!("sh {} {}", places.script("host.sh"), hosts.words());
                    let slots = trainers as usize / hosts.of_trainers().len();
                    let each = |host: &BenchHost| format!("{}:{slots}", host.address);
                    let list = hosts.of_trainers().iter().map(each).collect::<Vec<_>>().join(",");
                    all.extend(["--mca", "oob_tcp_if_include", INTERFACE, "--mca", "plm_rsh_agent"].map(str::to_owned));
                    // A daemon of its own session would not end, nor rest, with this one. Each would bind its rank to
                    // the first processor of what it takes for its own machine.
                    all.extend([agent, "--leave-session-attached".to_owned(), "--host".to_owned(), list]);
                    all.extend(["--bind-to", "none"].map(str::to_owned));
                }
                all.extend(["-n".to_owned(), trainers.to_string(), places.program(self.kit)]);
                all
            }
        };
        command.extend(["--bytes".to_owned(), bytes.to_string(), "--trainers".to_owned(), trainers.to_string()]);
        command.extend(["--transport".to_owned(), word(self.path)]);
        if let Some((hosts, placement)) = on {
            let servers = hosts.servers(placement).to_string();
            command.extend(["--hosts".to_owned(), hosts.words(), "--servers".to_owned(), servers]);
        }
        command
    }
}

/// The command that starts PyTorch's optimizers, once its kit is installed.
pub(crate) fn optimizers(places: &InstallFolders, rule: &str, elements: u64) -> Vec<String> {
    let script = places.script("torch_optimizers.py");
    let words = ["--rule", rule, "--elements", &elements.to_string()].map(str::to_owned);
    [places.python(Kit::Torch), script].into_iter().chain(words).collect()
}
