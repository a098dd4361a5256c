//! Two transports that can reach each other over a device.

use std::any::Any;
use std::ffi::OsString;
use std::io::{self, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::Command;
use std::thread::{self, JoinHandle};

use pserver_core::wire::{Address, Scheme};

use crate::conformance::Ends;
use crate::network::{Listener, Network, NetworkOptions, Stop};
use crate::verbs::{Device, Devices};

/// Ends a listener and waits for its thread.
struct Listening(Stop, Option<JoinHandle<()>>);

impl Drop for Listening {
    fn drop(&mut self) {
        self.0.stop();
        if let Some(thread) = self.1.take() {
            thread.join().expect("the listener ends well");
        }
    }
}

/// One that listens, one that may connect, the address, and what must live as long.
pub(super) fn transports(address: &str, options: &NetworkOptions) -> (Network, Network, Address, Box<dyn Any>) {
    let address = Address::parse(address).expect("an address");
    let near = Network::new(options.clone()).expect("a transport");
    let far = Network::new(options.clone()).expect("a transport");
    let listener = Listener::bind(&address, options.clone()).expect("a free port");
    let address = Address { port: listener.local_address().port, ..address };
    let (stop, lanes) = (Stop::new(), vec![Some(far.adopter())]);
    let run = {
        let stop = stop.clone();
        move || listener.run(lanes, stop).expect("the listener runs")
    };
    (near, far, address, Box::new(Listening(stop, Some(thread::spawn(run)))))
}

pub(super) fn ends(address: &str, options: &NetworkOptions) -> Ends {
    let (near, far, address, keep) = transports(address, options);
    Ends { keep, ..Ends::new(Box::new(near), Box::new(far), address).landing(2) }
}

/// A port whose bytes go to another: to those who connect here, the server is on another machine.
pub(super) fn far_away(server: &Address) -> Address {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("it is bound").port();
    let server = (server.host.clone(), server.port);
    thread::spawn(move || {
        while let Ok((near, _)) = listener.accept() {
            let Ok(far) = TcpStream::connect((server.0.as_str(), server.1)) else { return };
            for (mut from, mut to) in [(&near, &far), (&far, &near)]
                .map(|(from, to)| (from.try_clone().expect("a descriptor"), to.try_clone().expect("a descriptor")))
            {
                thread::spawn(move || {
                    // Either side may go at any time.
                    let _ = io::copy(&mut from, &mut to);
                    let _ = to.shutdown(Shutdown::Both);
                });
            }
        }
    });
    Address { scheme: Scheme::Auto, host: "127.0.0.1".to_owned(), port }
}

/// The device of this machine; where there is none, the test of this name is counted as skipped.
pub(super) fn hardware(test: &str) -> Option<Device> {
    Device::find(&Devices::Best).map_err(|why| skip(test, &why.to_string())).ok()
}

/// Says which test was skipped, so that it is known when it has run elsewhere.
pub(in crate::verbs) fn skip(test: &str, why: &str) {
    let required = std::env::var("PSERVER_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|what| what.trim() == "rdma"), "rdma is required, and {why}");
    if let Ok(path) = std::env::var("PSERVER_SKIP_REPORT") {
        let report = std::fs::OpenOptions::new().append(true).create(true).open(path);
        writeln!(report.expect("the report opens"), "SKIPPED: rdma: {test}: {why}").expect("the report is written");
    }
}

/// The network interface under a device, which a test may take down.
pub(in crate::verbs) struct Link(OsString);

impl Link {
    /// `PSERVER_RDMA_INTERFACE`: nobody else's connections go with it.
    pub(in crate::verbs) fn that_may_go_down() -> Option<Self> {
        std::env::var_os("PSERVER_RDMA_INTERFACE").map(Self)
    }

    /// Up or down.
    pub(in crate::verbs) fn goes(&self, state: &str) {
        let ip = Command::new("/bin/ip").args(["link", "set"]).arg(&self.0).arg(state).status();
        assert!(ip.expect("ip runs").success(), "the link does not go {state}");
    }
}
