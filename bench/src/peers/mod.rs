//! Other systems that do the same work and are in package registries.
//!
//! Each is a script in `bench/peers` that starts processes of its own and runs rounds when it is told to (`partner`);
//! what it needs is put into a folder once (`install`). Nothing here is needed to build or to test.

mod install;
mod partner;

use clap::ValueEnum;

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
pub(crate) const PEERS: [Peer; 11] = [
    Peer::serving("MXNet kvstore", Kit::Mxnet, "mxnet_kvstore.py", TransportName::Tcp),
    Peer::serving("ps-lite", Kit::Pslite, "pslite.py", TransportName::Tcp),
    Peer::serving("ps-lite ipc", Kit::Pslite, "pslite.py", TransportName::Shm),
    Peer::serving("BytePS", Kit::Pslite, "byteps.py", TransportName::Tcp),
    Peer::serving("BytePS ipc", Kit::Pslite, "byteps.py", TransportName::Shm),
    Peer::serving("torch RPC", Kit::Torch, "torch_rpc.py", TransportName::Tcp),
    Peer::serving("torch RPC", Kit::Torch, "torch_rpc.py", TransportName::Shm),
    Peer {
        trainers: (1, 1),
        bounds: "it adds nothing up, so only one trainer knows what it must get",
        rule: RuleName::None,
        ..Peer::serving("PaddlePaddle brpc, set and get", Kit::Paddle, "paddle_brpc.py", TransportName::Tcp)
    },
    Peer {
        trainers: (2, u32::MAX),
        bounds: ALONE,
        ..Peer::serving("gloo all-reduce", Kit::Torch, "torch_gloo.py", TransportName::Tcp)
    },
    Peer::mpi(TransportName::Tcp, "tcp,self"),
    Peer::mpi(TransportName::Shm, "vader,self"),
];

impl Peer {
    /// A server that sums, and trainers.
    const fn serving(name: &'static str, kit: Kit, script: &'static str, path: TransportName) -> Self {
        let program = PeerProgram::Script(script);
        Self { name, kit, program, path, trainers: (1, u32::MAX), bounds: "", rule: RuleName::Sum }
    }

    const fn mpi(path: TransportName, layers: &'static str) -> Self {
        let program = PeerProgram::Mpirun(layers);
        Self {
            name: "Open MPI all-reduce",
            kit: Kit::Openmpi,
            program,
            path,
            trainers: (2, u32::MAX),
            bounds: ALONE,
            rule: RuleName::Sum,
        }
    }

    pub(crate) fn serves(&self, trainers: u32) -> bool {
        (self.trainers.0..=self.trainers.1).contains(&trainers)
    }

    /// The command that starts the peer, once its kit is installed.
    pub(crate) fn command(&self, places: &InstallFolders, bytes: u64, trainers: u32) -> Vec<String> {
        let mut command = match self.program {
            PeerProgram::Script(script) => vec![places.python(self.kit), places.script(script)],
            PeerProgram::Mpirun(layers) => {
                let mut all = vec![places.launcher(self.kit)];
                all.extend(["--allow-run-as-root", "--oversubscribe"].map(str::to_owned));
                all.extend(["--mca", "btl_tcp_if_include", "lo", "--mca", "btl", layers, "-n"].map(str::to_owned));
                all.extend([trainers.to_string(), places.program(self.kit)]);
                all
            }
        };
        command.extend(["--bytes".to_owned(), bytes.to_string(), "--trainers".to_owned(), trainers.to_string()]);
        command.extend(["--transport".to_owned(), word(self.path)]);
        command
    }
}

/// The command that starts PyTorch's optimizers, once its kit is installed.
pub(crate) fn optimizers(places: &InstallFolders, rule: &str, elements: u64) -> Vec<String> {
    let script = places.script("torch_optimizers.py");
    let words = ["--rule", rule, "--elements", &elements.to_string()].map(str::to_owned);
    [places.python(Kit::Torch), script].into_iter().chain(words).collect()
}
