//! A job that encrypts: trainers, other servers, saves and readers of the status over TLS.

use std::process::{Command, Stdio};

use crate::certificates::{Authority, by_certificate, by_token};
use crate::cluster::job::{DEADLINE, Job, Local, TCP, client, folder};
use crate::cluster::ports::free_port;
use crate::cluster::process::Process;
use crate::cluster::training::{Tensor, begin, given, pull};
use pserver_client::{Client, ClientOptions};
use pserver_core::dtype::ElementType::Float32;
use pserver_core::wire::{Address, Scheme};
use pserver_transport::network::JobToken;
use pserver_transport::tls::{EncryptPolicy, Encryption};

const SGD: &str = "const_lr { learning_rate: 1.0 }";
const TOKEN: &str = "correct horse battery staple";

fn encrypted(coordinator: &Address, encryption: Option<Encryption>, token: Option<JobToken>) -> Client {
    let options = ClientOptions::new(coordinator.clone());
    Client::new(ClientOptions { trainer: Some(0), deadline: DEADLINE, encryption, token, ..options })
        .expect("it is made")
}

/// One round, and a model that server 0 saves over a connection of its own.
fn train(trainer: &Client) {
    let tensors = [Tensor::new("w", Float32, 50_000, SGD).zeroed()];
    assert!(begin(trainer, &tensors).expect("it is chosen"));
    trainer.push(&given(&tensors, &[tensors[0].constant(-1.0)]), None).expect("it is taken");
    assert!(pull(trainer, &tensors).expect("it is there") == [tensors[0].constant(1.0)], "one gradient of one");
    trainer.save_model("model.safetensors").expect("the server reads its own job");
}

#[test]
fn a_job_with_a_token_alone_is_encrypted_on_every_transport_that_may_leave_the_host() {
    let (tcp, required) = (EncryptPolicy::Tcp, EncryptPolicy::Required);
    for (bind, policy) in [(TCP, tcp), (TCP, required), ("127.0.0.1:0", required)] {
        let folder = folder();
        let token = folder.path().join("token");
        std::fs::write(&token, TOKEN).expect("there is room");
        let job = Job { bind, ..Job::new(2, 1) }
            .with("--token-file", token.display())
            .with("--encrypt", policy)
            .with("--model-dir", folder.path().join("models").display());
        let servers = Local::start(&job);
        let coordinator = servers.coordinator();
        let token = JobToken::read(&token).ok();
        let trainer = encrypted(&coordinator, by_token(policy), token.clone());
        train(&trainer);
        let over_tcp = Address { scheme: Scheme::Tcp, ..coordinator.clone() };
        let refused = encrypted(&over_tcp, None, token.clone()).names().expect_err("it is plain").to_string();
        assert!(refused.contains(&format!("this server has encrypt = {policy}")), "{refused}");
        let verbs = Address { scheme: Scheme::Verbs, ..coordinator };
        let client =
            ClientOptions { encryption: by_token(EncryptPolicy::Required), token, ..ClientOptions::new(verbs) };
        let refused = Client::new(client).and_then(|client| client.names()).expect_err("verbs are refused").to_string();
        let has_device = !refused.contains("RDMA device");
        assert!(!has_device || refused.contains("encrypt = required refuses them"), "{refused}");
        drop(trainer);
        servers.stop();
    }
}

#[test]
fn a_job_with_certificates_knows_its_servers_and_trainers_by_them() {
    let (folder, stranger) = (folder(), folder());
    let authority = Authority::new(folder.path());
    let [certificate, key] = authority.certify("127.0.0.1");
    let job = Job { bind: TCP, ..Job::new(2, 1) }
        .with("--encrypt", "tcp")
        .with("--certificate", certificate)
        .with("--private-key", key)
        .with("--certificate-authority", authority.file())
        .with("--model-dir", folder.path().join("models").display());
    let servers = Local::start(&job);
    let coordinator = servers.coordinator();
    let own = authority.certify("trainer");
    let trainer = encrypted(&coordinator, by_certificate(&authority, &own), None);
    train(&trainer);
    let other = Authority::new(stranger.path());
    let foreign = encrypted(&coordinator, by_certificate(&authority, &other.certify("trainer")), None);
    let refused = foreign.names().expect_err("it is another authority's").to_string();
    assert!(refused.contains("refuses this session: TLS: received fatal alert"), "{refused}");
    let refused = client(&coordinator, 0).names().expect_err("it is plain").to_string();
    assert!(refused.contains("the client does not speak TLS"), "{refused}");
    drop(trainer);
    servers.stop();
}

/// The output of `pserver top`, or its error.
fn top(arguments: &[&str]) -> Result<String, String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pserver"));
    command.arg("top").args(arguments).arg("--once").env_remove("PSERVER_HTTP_TOKEN_FILE").stdin(Stdio::null());
    let output = command.output().expect("the program can be run");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

#[test]
fn the_status_is_read_over_tls_and_names_it() {
    let folder = folder();
    let authority = Authority::new(folder.path());
    let [certificate, key] = authority.certify("127.0.0.1");
    let at = format!("127.0.0.1:{}", free_port());
    let job = Job::new(1, 1).with("--http", &at).with("--encrypt", "tcp");
    let job = job.with("--certificate", certificate).with("--private-key", key);
    let server = Process::start(&job.arguments(0, TCP, None)).expect("it starts");
    let trainer = encrypted(&server.address, by_token(EncryptPolicy::Tcp), None);
    let tensors = [Tensor::new("w", Float32, 1000, SGD).zeroed()];
    assert!(begin(&trainer, &tensors).expect("it is chosen"));
    let https = format!("https://{at}");
    let text = top(&[&https, "--certificate-authority", &authority.file()]).expect("the server is known");
    assert!(text.contains("1 of 1 servers") && text.contains(" tls\n"), "{text}");
    assert!(top(&[&https]).expect("it is on loopback").contains("1 of 1 servers"));
    let refused = top(&[&at]).expect_err("it speaks TLS");
    assert!(refused.contains("speaks TLS; expected https:// before it"), "{refused}");
    drop((trainer, server));
}
