//! Error texts of typical mistakes: each names the found value, the expected value and, if there is one, the remedy. A
//! user reads these texts before any page of the documentation.

mod cluster;

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use cluster::job::{Job, Local, folder};
use cluster::ports::free_port;
use cluster::process::Process;
use cluster::training::{Tensor, begin};
use pserver_client::environment::{Environment, find};
use pserver_client::{Client, ClientOptions, DestinationSlice, GradientSlice};
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType::{Float32, Float64};
use pserver_core::error::Failure;
use pserver_core::wire::Address;

/// The fewest mistakes that these tables hold together.
const MISTAKES_MIN: usize = 60;

/// A mistaken input, and parts of the error text, in their order. The first part is the found value.
type Mistake = (&'static str, &'static [&'static str]);

/// Settings of `pserver serve`, words separated by `|`. `FOLDER` is a folder with the files that [`prepare`] writes.
const SETTINGS: &[Mistake] = &[
    ("--trainers|many", &["trainers (from --trainers) is \"many\"", "expected a whole number from 1 to 4096"]),
    ("--trainers|0", &["trainers (from --trainers) is \"0\"", "expected a whole number from 1 to 4096"]),
    ("--trainer|3", &["unexpected argument '--trainer'", "a similar argument exists: '--trainers'"]),
    (
        "--chunk-bytes|1GiB",
        &["chunk_bytes (from --chunk-bytes) is \"1GiB\"", "expected a power of two from 4KiB to 16MiB"],
    ),
    ("--chunk-bytes|65537", &["is \"65537\"", "expected a power of two", "in bytes or with KiB or MiB"]),
    ("--mode|Sync", &["mode (from --mode) is \"Sync\"", "expected one of sync, async, bounded, delta"]),
    ("--mode|bounded", &["staleness (from default) is \"0\"", "expected 1 or more with mode bounded"]),
    ("--staleness|3", &["staleness (from --staleness) is \"3\"", "expected 0, or mode bounded with it"]),
    ("--merge|avg", &["merge (from --merge) is \"avg\"", "expected one of mean, sum"]),
    ("--journal|on", &["journal (from --journal) is \"on\"", "expected off, or a checkpoint_dir with it"]),
    ("--lease-seconds|0", &["lease_seconds (from --lease-seconds) is \"0\"", "expected a number of seconds from 0.1"]),
    ("--poll|spin", &["poll (from --poll) is \"spin\"", "expected", "adaptive"]),
    ("--checks|some", &["checks (from --checks) is \"some\"", "expected", "between-hosts"]),
    ("--log-level|loud", &["log_level (from --log-level) is \"loud\"", "expected one of off, error, warn, info"]),
    ("--device|gpu", &["device (from --device) is \"gpu\"", "expected auto, cpu or cuda:N"]),
    (
        "--device-memory|2GB",
        &["device_memory (from --device-memory) is \"2GB\"", "expected a size above 0, in bytes or with"],
    ),
    (
        "--rdma-device|mlx5_0:x",
        &["rdma_device (from --rdma-device) is \"mlx5_0:x\"", "expected auto, none, or RDMA devices"],
    ),
    ("--bind|7164", &["bind (from --bind) is \"7164\"", "no port", "expected host:port, such as 127.0.0.1:7164"]),
    ("--bind|127.0.0.1:99999", &["port \"99999\" is not a number from 0 to 65535", "expected host:port"]),
    ("--bind|http://127.0.0.1:1", &["unknown transport \"http\"", "expected host:port", "tcp://, shm:// or verbs://"]),
    ("--bind|::1:7164", &["bind (from --bind) is \"::1:7164\"", "an IPv6 address stands in brackets"]),
    (
        "--bind|host.invalid:1",
        &["bind (from --bind) is \"host.invalid:1\"", "expected a host that this machine can resolve"],
    ),
    (
        "--bind|10.255.255.1:1|--insecure",
        &["bind (from --bind): listening on 10.255.255.1:1", "this machine does not have that address"],
    ),
    (
        "--bind|10.255.255.1:1",
        &["bind (from --bind) is", "expected a loopback address, a token_file, or insecure = true"],
    ),
    (
        "--bind|0.0.0.0:1|--insecure",
        &["advertise (from default) is \"\"", "expected the address at which other hosts reach"],
    ),
    ("--index|1", &["index (from --index) is \"1\"", "expected an index below servers, which is 1"]),
    ("--index|1|--servers|2", &["coordinator (from default) is \"\"", "expected the address of server 0"]),
    (
        "--coordinator|node0:0",
        &["coordinator (from --coordinator) is \"node0:0\"", "expected an address with a port above 0"],
    ),
    ("--config|FOLDER/none.toml", &["the configuration file", "none.toml cannot be read", "No such file"]),
    ("--config|FOLDER/broken.toml", &["the configuration file", "broken.toml is not TOML"]),
    (
        "--config|FOLDER/typo.toml",
        &["trainres (from", "typo.toml) is no setting", "the nearest is trainers", "pserver serve --help lists all"],
    ),
    ("--token-file|FOLDER/none", &["token_file (from --token-file)", "none: No such file"]),
    ("--token-file|FOLDER/short", &["token_file (from --token-file)", "a token of 5 bytes", "expected 16 to 1024"]),
    ("--encrypt|yes", &["encrypt (from --encrypt) is \"yes\"", "expected one of off, tcp, required"]),
    (
        "--certificate|FOLDER/none",
        &["certificate (from --certificate)", "expected none, or encrypt = tcp or required with it"],
    ),
    (
        "--encrypt|tcp|--insecure",
        &["encrypt (from --encrypt) is \"tcp\"", "expected off, or a certificate or a token_file with it"],
    ),
    (
        "--encrypt|tcp|--certificate|FOLDER/none|--private-key|FOLDER/short",
        &["encrypt (from --encrypt)", "certificate ", "none", "No such file", "expected a PEM file with certificates"],
    ),
    (
        "--encrypt|tcp|--certificate-authority|FOLDER/short",
        &["certificate_authority ", "short: found no certificate; expected a PEM file with certificates"],
    ),
    (
        "--checkpoint-dir|FOLDER/short",
        &["checkpoint_dir (from --checkpoint-dir)", "File exists", "expected a folder that this user may make"],
    ),
    ("--device|cuda:99", &["device cuda:99"]),
];

/// The message after `--optimizer`.
const OPTIMIZERS: &[Mistake] = &[
    ("adam", &["found the end after \"adam\"", "expected its fields in braces", "adam { }", "such as optimizer: Adam"]),
    ("adam: 3", &["found \"3\" after \"adam\"", "expected its fields in braces"]),
    ("optimizer: Adma", &["\"optimizer\" has \"Adma\"", "expected one of SGD (1)", "the nearest is Adam"]),
    ("optimizer: adam", &["\"optimizer\" has \"adam\"", "expected one of SGD (1)", "the nearest is Adam"]),
    ("optimizer: Adam", &["optimizer: Adam is given without adam", "expected adam { ... }, which may be empty"]),
    ("optimiser: SGD", &["field \"optimiser\" is not known", "expected one of optimizer", "the nearest is optimizer"]),
    (
        "optimizer: Adam adam { beta1: 0.9 }",
        &[
            "line 1, column 24",
            "field \"beta1\" is not known in AdamConfig",
            "expected one of beta_1",
            "the nearest is beta_1",
        ],
    ),
    ("sgd { momentum: 2 }", &["momentum is 2", "expected"]),
    ("const_lr { learning_rate 0.1 }", &["found \"0.1\"", "expected ':' after \"learning_rate\""]),
    ("const_lr { learning_rate: -1 }", &["const_lr.learning_rate is -1", "expected a finite number, zero or above"]),
    ("const_lr { learning_rate: 0.1", &["found the end", "expected a field's name or '}'"]),
    ("algorithm: \"adamn\"", &["algorithm \"adamn\" is not known", "expected one of add", "the nearest is adamw"]),
    ("algorithm: adamw", &["\"algorithm\" has \"adamw\"", "expected a string in quotes"]),
    ("rule: \"w = \"", &["rule", "expected"]),
    (
        "rule_file: \"mine.rule\"",
        &["rule_file is \"mine.rule\"", "only a trainer opens it", "expected the text itself"],
    ),
    ("base64:@@", &["after base64:", "expected base64 of the binary form"]),
    ("home: 1", &["expected no home in it, which is a setting of one parameter"]),
    ("sender: 1", &["expected no sender in it, which is a setting of one parameter"]),
    ("merge: Sum", &["expected no merge in it, or the same as the setting merge"]),
];

/// Other commands, words separated by `|`.
const COMMANDS: &[Mistake] = &[
    ("serv", &["unrecognized subcommand 'serv'", "similar subcommands exist", "'serve'"]),
    ("inspect|FOLDER/none", &["none", "No such file"]),
    (
        "inspect|FOLDER/text.safetensors",
        &["is not a whole safetensors file", "begins with the text \"hello, t\"", "expected the length of a header"],
    ),
    ("inspect|FOLDER/short", &["is not a whole safetensors file", "it has 5 bytes and its header needs 8"]),
    (
        "quickstart|--optimizer|admm",
        &["invalid value 'admm'", "possible values: sgd", "a similar value exists: 'adam'"],
    ),
    ("quickstart|--rule|FOLDER/none", &["the rule's file", "No such file"]),
    ("quickstart|--rule|FOLDER/text.safetensors", &["text.safetensors", "line 1", "expected"]),
    ("transpile|FOLDER/none", &["none", "No such file"]),
    ("transpile|FOLDER/text.safetensors", &["text.safetensors", ":1:1: found", "expected"]),
];

/// A client's options, and variables of its environment as `NAME=value`.
const OPTIONS: &[Mistake] = &[
    ("deadline=30", &["deadline (from the options) is \"30\"", "expected a time such as 500ms, 30s"]),
    (
        "trainr=1",
        &["\"trainr=1\"", "expected name=value with a name of coordinator, trainer", "the nearest is trainer"],
    ),
    ("trainer=5000", &["trainer (from the options) is \"5000\"", "expected a whole number from 0 to 4095"]),
    ("coordinator=node0", &["coordinator (from the options) is \"node0\"", "no port", "expected host:port"]),
    ("coordinator=node0:0", &["coordinator (from the options) is \"node0:0\"", "expected the port of server 0"]),
    ("RANK=first", &["trainer (from RANK) is \"first\"", "expected a whole number from 0 to 4095"]),
    ("PSERVER_READER=maybe", &["reader (from PSERVER_READER) is \"maybe\"", "expected yes or no"]),
    ("PSERVER_TOKEN_FILE=none", &["token_file (from PSERVER_TOKEN_FILE) is \"none\"", "cannot be read"]),
    ("encrypt=yes", &["encrypt (from the options) is \"yes\"", "expected one of off, tcp, required"]),
    ("certificate=none", &["certificate (from the options) is \"none\"", "expected encrypt tcp or required with it"]),
    (
        "encrypt=tcp certificate_authority=none",
        &["certificate_authority none", "expected a PEM file with certificates"],
    ),
    ("encrypt=tcp private_key=none", &["found private_key none and no certificate; expected both or neither"]),
    ("PSERVER_CONFIG=none", &["cannot be read", "named by PSERVER_CONFIG"]),
];

/// Writes the files that the tables name.
fn prepare(folder: &Path) {
    let files = [
        ("text.safetensors", "hello, this is a text and no model"),
        ("short", "horse"),
        ("broken.toml", "trainers = "),
        ("typo.toml", "trainres = 2"),
    ];
    for (name, text) in files {
        fs::write(folder.join(name), text).expect("there is room");
    }
}

/// Checks that a text has every part, one behind the other.
fn check(mistake: &str, text: &str, parts: &[&str]) {
    let mut rest = text;
    for part in parts {
        let found = rest.find(part).unwrap_or_else(|| panic!("{mistake}: expected {part:?} in\n{text}"));
        rest = &rest[found + part.len()..];
    }
}

/// Standard error and output of the program for these arguments; it must fail.
fn complaint(arguments: &[String]) -> String {
    let mut command = pserver_processes::unconfigured(Path::new(env!("CARGO_BIN_EXE_pserver")));
    let ended = command.args(arguments).stdin(Stdio::null()).output().expect("the program can be run");
    assert!(!ended.status.success(), "{arguments:?} is no mistake: {ended:?}");
    let [output, errors] = [ended.stdout, ended.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    output + &errors
}

/// Runs one table; `before` comes before each row's words.
fn check_program(before: &[&str], mistakes: &[Mistake], separator: Option<char>) {
    let folder = folder();
    prepare(folder.path());
    for (mistake, parts) in mistakes {
        let line = mistake.replace("FOLDER", folder.path().to_str().expect("it is UTF-8"));
        let words: Vec<&str> =
            separator.map_or_else(|| vec![line.as_str()], |separator| line.split(separator).collect());
        let arguments: Vec<String> = before.iter().chain(&words).map(|word| (*word).to_owned()).collect();
        check(mistake, &complaint(&arguments), parts);
    }
}

#[test]
fn a_wrong_setting_is_named_with_what_was_expected() {
    check_program(&["serve"], SETTINGS, Some('|'));
}

#[test]
fn a_wrong_optimizer_is_named_with_what_was_expected() {
    check_program(&["serve", "--optimizer"], OPTIMIZERS, None);
}

#[test]
fn a_wrong_command_is_named_with_what_was_expected() {
    check_program(&[], COMMANDS, Some('|'));
}

#[test]
fn a_wrong_option_of_a_client_is_named_with_what_was_expected() {
    for (mistake, parts) in OPTIONS {
        let is_variable = mistake.starts_with(char::is_uppercase);
        let (name, value) = mistake.split_once('=').expect("it has a value");
        let variable = |asked: &str| (is_variable && asked == name).then(|| value.to_owned());
        let file = |path: &str| Err(Failure::call(format!("the file {path} cannot be read: No such file")));
        let options = if is_variable { "" } else { mistake };
        let failure = find(options, &Environment { variable: &variable, file: &file }).expect_err("it is a mistake");
        check(mistake, &failure.to_string(), parts);
    }
}

/// Mistakes of calls: each has a name, a client of a job with one trainer, and parts of the text.
type Call = (&'static str, fn(&Client) -> Result<(), Failure>, &'static [&'static str]);

fn gradient<'a>(name: &'a str, content: &'a [u8]) -> GradientSlice<'a> {
    GradientSlice { name, element_type: Float32, content }
}

const CALLS: &[Call] = &[
    ("push of an unknown name", |client| client.push(&[gradient("v", &[0; 8])], None), &["\"v\""]),
    ("push that is too short", |client| client.push(&[gradient("w", &[0; 4])], None), &["\"w\"", "4", "8"]),
    (
        "push of another type",
        |client| client.push(&[GradientSlice { element_type: Float64, ..gradient("w", &[0; 16]) }], None),
        &["\"w\"", "expected float32"],
    ),
    (
        "push of one name twice",
        |client| client.push(&[gradient("w", &[0; 8]), gradient("w", &[0; 8])], None),
        &["\"w\""],
    ),
    ("pull of an unknown name", |client| client.pull(&mut [DestinationSlice::new("v", &mut [0; 8])]), &["\"v\""]),
    (
        "pull into too little",
        |client| client.pull(&mut [DestinationSlice::new("w", &mut [0; 4])]),
        &["\"w\"", "4", "8"],
    ),
    ("a model outside its folder", |client| client.save_model("../w").map(drop), &["../w", "expected"]),
    ("a model by an absolute path", |client| client.save_model("/tmp/w").map(drop), &["/tmp/w", "expected"]),
];

#[test]
fn a_wrong_call_is_named_with_what_was_expected() {
    let models = folder();
    let servers = Local::start(&Job::new(1, 1).with("--model-dir", models.path().display()));
    let client = cluster::job::client(&servers.coordinator(), 0);
    begin(&client, &[Tensor::new("w", Float32, 2, "optimizer: SGD")]).expect("it is initialised");
    for (mistake, call, parts) in CALLS {
        check(mistake, &call(&client).expect_err("it is a mistake").to_string(), parts);
    }
    let beyond = cluster::job::client(&servers.coordinator(), 7);
    let failure = beyond.begin_init(&OptimizerSettings::default()).expect_err("there is one trainer");
    check("a rank that the job does not have", &failure.to_string(), &["7", "1"]);
    drop((client, beyond));
    servers.stop();
}

#[test]
fn an_absent_server_is_named_with_its_address_and_the_default_address_as_such() {
    let address = Address::parse(&format!("tcp://127.0.0.1:{}", free_port())).expect("it is an address");
    for is_coordinator_default in [false, true] {
        let deadline = Duration::from_millis(500);
        let options = ClientOptions { is_coordinator_default, deadline, ..ClientOptions::new(address.clone()) };
        let failure = Client::new(options).and_then(|client| client.trainer()).expect_err("nobody listens");
        let text = failure.to_string();
        check("an absent server", &text, &[&address.to_string(), "refused"]);
        assert_eq!(text.contains("the default address: set PSERVER_COORDINATOR=host:port"), is_coordinator_default);
    }
}

/// Starts a server that runs, and checks its log for some texts until the server is stopped.
fn check_warned(arguments: &[&str], variable: Option<(&str, &str)>, parts: &[&str]) {
    let mut command = Command::new("env");
    command.args(variable.map(|(name, value)| format!("{name}={value}")));
    command.arg(env!("CARGO_BIN_EXE_pserver")).args(["serve", "--bind", "tcp://127.0.0.1:0"]).args(arguments);
    let ended = Process::run(&mut command).expect("it starts").terminate();
    assert!(ended.status.success(), "{ended:?}");
    check(&format!("{arguments:?} {variable:?}"), &ended.words, parts);
}

#[test]
fn a_variable_that_is_no_text_ends_no_program() {
    let variable = |name: &str, arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pserver"));
        command.env(name, OsStr::from_bytes(b"3\xff")).args(arguments).stdin(Stdio::null());
        let ended = command.output().expect("the program can be run");
        (ended.status.code(), String::from_utf8_lossy(&ended.stderr).into_owned())
    };
    assert_eq!(variable("SOMEBODY", &["serve", "--print-config"]), (Some(0), String::new()));
    let (code, said) = variable("PSERVER_TRAINERS", &["serve", "--print-config"]);
    assert_eq!(code, Some(1), "{said}");
    check("no text", &said, &["trainers (from PSERVER_TRAINERS)", "expected"]);
}

#[test]
fn a_setting_without_an_effect_is_warned_about() {
    let unknown = ["WARN", "PSERVER_TRAINRES (in the environment) is no setting", "the nearest is PSERVER_TRAINERS"];
    check_warned(&[], Some(("PSERVER_TRAINRES", "3")), &unknown);
    check_warned(
        &["--mode", "delta", "--optimizer", "l2: 1"],
        None,
        &["WARN", "optimizer = l2: 1 (from --optimizer) has no effect", "in mode delta trainers optimize"],
    );
    check_warned(
        &["--rdma-device", "mlx5_0"],
        None,
        &[
            "WARN",
            "rdma_device = mlx5_0 (from --rdma-device) has no effect",
            "expected host:port without one, or verbs://",
        ],
    );
}

#[test]
fn a_server_says_which_of_its_settings_server_0_overrules() {
    let first = Process::start(&Job::new(2, 2).arguments(0, "tcp://127.0.0.1:0", None)).expect("it starts");
    let coordinator = first.address.to_string();
    let job = Job { mode: "async", trainers: 3, ..Job::new(2, 3) };
    let second = Process::start(&job.arguments(1, "tcp://127.0.0.1:0", Some(&coordinator))).expect("it starts");
    let ended = second.terminate();
    let counts = "has no effect on server 1: server 0's setting counts, and the job";
    let mode = format!("mode = async (from --mode) {counts}'s mode is sync");
    let trainers = format!("trainers = 3 (from --trainers) {counts} has 2 trainers");
    check("server 1's mode and trainers", &ended.words, &[&mode, &trainers]);
    assert!(first.terminate().status.success());
}

#[test]
fn a_server_says_within_a_second_that_it_waits_for_server_0_and_what_it_found_there() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("there is a free port");
    let address = silent.local_addr().expect("it is bound").to_string();
    // A program of another protocol.
    std::thread::spawn(move || {
        for mut stream in silent.incoming().flatten() {
            use std::io::Write;
            let _ = stream.write_all(&b"HTTP/1.1 400 Bad Request\r\n".repeat(9));
        }
    });
    let job = Job::new(2, 1);
    let mut arguments = job.arguments(1, "tcp://127.0.0.1:0", Some(&format!("tcp://{address}")));
    let level = arguments.iter().position(|one| one == "warn").expect("a level is given");
    arguments[level] = "info".to_owned();
    let mut command = Command::new("timeout");
    command.args(["--signal=TERM", "4", env!("CARGO_BIN_EXE_pserver"), "serve"]).args(&arguments);
    let ended = Process::run(&mut command).err().expect("server 0 never answers");
    let parts = [
        "server 1 has waited 0.8 s for server 0",
        &address,
        "not a pserver frame",
        "\"HTTP\", another program's protocol",
    ];
    check("a port that speaks HTTP", &ended.words, &parts);
}

#[test]
fn a_training_that_diverges_says_so() {
    let folder = folder();
    let rule = concat!(env!("CARGO_MANIFEST_DIR"), "/../core/rules/sgd.rule");
    let models = folder.path().to_str().expect("it is UTF-8");
    let arguments = ["quickstart", "--epochs", "3", "--trainers", "1", "--servers", "1", "--model-dir", models];
    let arguments = arguments.into_iter().chain(["--rule", rule, "--set", "lr=1e30"]).map(str::to_owned);
    let text = complaint(&arguments.collect::<Vec<_>>());
    check("a learning rate of 1e30", &text, &["\"layer1/weight\" has NaN", "expected finite numbers", "learning rate"]);
}

#[test]
fn the_tables_hold_the_typical_mistakes() {
    let count = SETTINGS.len() + OPTIMIZERS.len() + COMMANDS.len() + OPTIONS.len() + CALLS.len();
    assert!(MISTAKES_MIN <= count, "{count} mistakes; expected {MISTAKES_MIN} or more");
    let programs = [SETTINGS, OPTIMIZERS, COMMANDS, OPTIONS].concat();
    assert!(programs.iter().all(|(_, parts)| parts.iter().all(|part| part.len() > 3)), "a part that any text has");
}
