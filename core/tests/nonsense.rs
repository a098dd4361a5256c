//! Readers of outside bytes, given almost valid and invalid input, in a bounded run. The functions
//! are those of the fuzz targets in `core/fuzz`.

mod random;
mod reading;

use prost::Message;
use pserver_core::config::{OptimizerSettings, ParameterConfig};
use pserver_core::dtype::ElementType::{Float32, Float64};
use pserver_core::dtype::Half;
use pserver_core::ids::{ChunkId, ChunkIndex, ParameterIndex, Round, ServerIndex, TrainerId};
use pserver_core::partition::{Buckets, Catalogue, Declaration, Name, Topology, TotalPart};
use pserver_core::wire::{Entry, Flags, Frame, Head, Kind};

const RULES: [&str; 3] = [
    include_str!("../rules/adam.rule"),
    include_str!("../rules/lion.rule"),
    "param b in (0, 1] = 0.5; state m = -0.5 # a comment\nlet k = select(g > 0 and not (w == 0), b, -b)
     m = k ^ 2; w -= lr*m",
];
const CONFIGS: [&str; 4] = [
    "optimizer: Adam adam { beta_1: 0.9 epsilon: 1e-8 } const_lr { learning_rate: 0.1 } clip_norm: 2",
    "sgd < momentum: .9, nesterov: true > lr_policy: Linear; linear_lr { learning_rate: 1
     lr_decay_a: 0.5 lr_decay_b: 25e-2 }",
    "algorithm: 'ftrl' ftrl { } home: 3 sparse { height: 9 width: 2 gaussian { deviation: 0.5 } } # rows",
    "rule: 'state m = 0; m = b*m + g;' \"w -= lr*m\" rule_set { key: 'b' value: 0.9 } mode: Staleness
     staleness_bound: 2",
];

fn frame() -> Vec<u8> {
    let mut frame = Frame::bare(Head { flags: Flags::WANT_VALUE, ..Head::new(Kind::Push) });
    for (index, bytes) in [(0, 0_usize), (1, 16), (2, 4096)] {
        let id = ChunkId { parameter: ParameterIndex(index), chunk: ChunkIndex(index.into()) };
        frame.entries.push(match bytes {
            0 => Entry::bare(id, Round(1), Float32),
            bytes => Entry::with_payload(id, Round(1), Float32, &vec![7; bytes]),
        });
    }
    frame.entries[1].half = Some(Half::Bfloat16);
    frame.control = vec![1, 2, 3];
    frame.encode()
}

fn page() -> Vec<u8> {
    let mut catalogue = Catalogue::new(Topology::new(vec![2, 1]).expect("valid"), 4096).expect("valid");
    let plain = |name: &str, bytes| Declaration {
        name: Name::new(name.as_bytes()).expect("valid"),
        element_type: Float32,
        bytes,
        shape: Vec::new(),
        whole: false,
        config: vec![1, 2, 3],
        buckets: None,
        owner: None,
        sender: None,
        total_part: None,
        hosted: None,
    };
    let rows =
        Declaration { buckets: Some(Buckets { rows: 90, count: 7 }), shape: vec![100, 4], ..plain("rows", 1440) };
    let all = [
        plain("plain", 20_000),
        Declaration { whole: true, ..plain("whole", 9000) },
        Declaration { element_type: Float64, total_part: Some(TotalPart::Share), ..plain("share", 8) },
        Declaration { element_type: Float64, total_part: Some(TotalPart::Total), ..plain("total", 8) },
        Declaration { owner: Some(ServerIndex(1)), ..plain("home", 9000) },
        Declaration { sender: Some(TrainerId(1)), ..plain("queue", 9000) },
        rows,
    ];
    for declaration in all {
        catalogue.declare(declaration).expect("valid");
    }
    catalogue.pages(1 << 20)[0].encode_to_vec()
}

/// The state that a coordinator keeps of an initialised job, after the byte that marks a state.
fn coordinator() -> Vec<u8> {
    #[derive(Clone, PartialEq, Message)]
    struct Kept {
        #[prost(uint64, tag = "1")]
        epoch: u64,
        #[prost(uint32, tag = "2")]
        granted: u32,
        #[prost(uint32, tag = "3")]
        committed: u32,
        #[prost(bytes = "vec", repeated, tag = "4")]
        pages: Vec<Vec<u8>>,
        #[prost(uint32, repeated, tag = "6")]
        incarnations: Vec<u32>,
        #[prost(string, repeated, tag = "8")]
        addresses: Vec<String>,
    }
    let catalogue = Catalogue::new(Topology::new(vec![2]).expect("valid"), 4096).expect("valid");
    let pages = vec![catalogue.pages(1 << 20)[0].encode_to_vec()];
    let addresses = vec!["tcp://127.0.0.1:1".to_owned()];
    let kept = Kept { epoch: 7, granted: 3, committed: 3, pages, incarnations: vec![1, 2], addresses };
    [vec![1], kept.encode_to_vec()].concat()
}

/// Valid inputs of each function.
fn examples(name: &str) -> Vec<Vec<u8>> {
    let texts = |all: &[&str]| all.iter().map(|text| text.as_bytes().to_vec()).collect();
    let config = |text: &&str| {
        let settings = OptimizerSettings::from_text(text).expect("it is a configuration");
        ParameterConfig { sparse: settings.sparse, ..ParameterConfig::of(settings.rule.expect("it has a rule")) }
            .encode()
    };
    match name {
        "rule_text" => texts(&RULES),
        "config_text" => texts(&CONFIGS),
        "config_bytes" => CONFIGS.iter().map(config).collect(),
        "wire_frame" => vec![frame()],
        "catalogue_page" => vec![page()],
        // Changes of files (`reading/files.rs`), of which the first are those that change nothing.
        "coordinator_file" => vec![vec![0], coordinator()],
        "manifest" => vec![vec![2, 0, 0, 0, 0, 0], vec![128 + 2, 0, 0, 0, 0, 0], vec![4, 9, 0, 0, 0, 0]],
        "journal" => vec![vec![2, 0, 0, 0, 0, 0], vec![200, 0, 0, 0, 5, 0], vec![2, 9, 0, 0, 0, 0, 255, 0, 0, 0, 3, 0]],
        other => panic!("no examples of {other}"),
    }
}

#[test]
fn any_input_is_read_or_refused() {
    random::run_all(&reading::ALL, examples);
}
