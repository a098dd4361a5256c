//! A client in a forked process. Forking is unsafe code, so this test has a file of its own.

use nix::sys::signal::{Signal, raise};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType::Float32;

use pserver_client::{Client, ClientOptions, GradientSlice};
use pserver_node::Server;
use pserver_node::settings::Settings;

fn push(client: &Client) -> bool {
    let content = [0; 4];
    client.push(&[GradientSlice { name: "w", element_type: Float32, content: &content }], None).is_ok()
}

#[test]
fn a_child_process_that_drops_its_parents_client_leaves_it_alone() {
    let line = ["--bind", "tcp://127.0.0.1:0", "--trainers", "1", "--log-level", "warn"];
    let settings = Settings::of_words(line).expect("the test's settings are right");
    let server = Server::start(settings).expect("a server starts on a free port");
    let deadline = std::time::Duration::from_secs(20);
    let options = ClientOptions { trainer: Some(0), deadline, ..ClientOptions::new(server.address().clone()) };
    let client = Client::new(options).expect("this process can have another transport");
    assert!(client.begin_init(&OptimizerSettings::default()).expect("it is chosen"));
    client.init_param("w", Float32, &[], &[0; 4], &OptimizerSettings::default()).expect("it is declared");
    client.finish_init().expect("it is initialised");
    assert!(push(&client));
    // SAFETY: the child looks at the client, drops it and ends itself; glibc sees to it that it may free memory.
    match unsafe { fork() }.expect("there may be another process") {
        ForkResult::Child => {
            let is_known = client.moved().sent > 0 && client.options().trainer == Some(0);
            let is_refused = !push(&client);
            drop(client);
            let _ = raise(if is_known && is_refused { Signal::SIGKILL } else { Signal::SIGTERM });
        }
        ForkResult::Parent { child } => {
            let ended = waitpid(child, None).expect("the child ends");
            assert_eq!(ended, WaitStatus::Signaled(child, Signal::SIGKILL, false), "the child saw what it should");
            assert!(push(&client), "the parent goes on");
            drop(client);
            server.stop().expect("a server stops without a failure");
        }
    }
}
