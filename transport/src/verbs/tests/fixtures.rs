//! Two transports that can reach each other over a device.

use std::any::Any;
use std::ffi::OsString;
use std::io::{self, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::Command;
use std::thread::{self, JoinHandle};

use pserver_core::wire::{Address, Scheme};

use crate::conformance::TransportPair;
use crate::network::{Lanes, Listener, Network, NetworkOptions, Stop};
use crate::verbs::{FabricSettings, VerbsDevice, VerbsDevices};

/// Stops a listener and joins its thread when dropped.
struct ListenerGuard(Stop, Option<JoinHandle<()>>);

impl Drop for ListenerGuard {
    fn drop(&mut self) {
        self.0.stop();
        if let Some(thread) = self.1.take() {
            thread.join().expect("the listener ends well");
        }
    }
}

/// A connecting transport, a listening one, the address, and the guard of the listener.
pub(super) fn transports(address: &str, options: &NetworkOptions) -> (Network, Network, Address, Box<dyn Any>) {
    let address = Address::parse(address).expect("an address");
    let near = Network::new(options.clone()).expect("a transport");
    let far = Network::new(options.clone()).expect("a transport");
    let listener = Listener::bind(&address, options.clone()).expect("a free port");
    let address = Address { port: listener.local_address().port, ..address };
    let (stop, lanes) = (Stop::new(), Lanes::from([(0, far.connection_sender())]));
    let run = {
        let stop = stop.clone();
        move || listener.run(lanes, stop).expect("the listener runs")
    };
    (near, far, address, Box::new(ListenerGuard(stop, Some(thread::spawn(run)))))
}

pub(super) fn ends(address: &str, options: &NetworkOptions) -> TransportPair {
    let (near, far, address, keep) = transports(address, options);
    TransportPair { keep, ..TransportPair::new(Box::new(near), Box::new(far), address).landing(2).blind() }
}

/// A port that forwards its bytes to another one: clients of this port see a server on another machine.
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
                    // Either side may close at any time.
                    let _ = io::copy(&mut from, &mut to);
                    let _ = to.shutdown(Shutdown::Both);
                });
            }
        }
    });
    Address { scheme: Scheme::Auto, host: "127.0.0.1".to_owned(), port }
}

/// The device of this machine; without one, the named test is reported as skipped.
pub(super) fn hardware(test: &str) -> Option<VerbsDevice> {
    VerbsDevice::find(&VerbsDevices::Best, &FabricSettings::default()).map_err(|why| skip(test, &why.to_string())).ok()
}

/// Reports a skipped test, so that a run elsewhere can be required.
pub(in crate::verbs) fn skip(test: &str, why: &str) {
    let required = std::env::var("PSERVER_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|result| result.trim() == "rdma"), "rdma is required, and {why}");
    if let Ok(path) = std::env::var("PSERVER_SKIP_REPORT") {
        let report = std::fs::OpenOptions::new().append(true).create(true).open(path);
        writeln!(report.expect("the report opens"), "SKIPPED: rdma: {test}: {why}").expect("the report is written");
    }
}

/// The network interface under a device, which a test may take down.
pub(in crate::verbs) struct NetworkInterface(OsString);

impl NetworkInterface {
    /// `PSERVER_RDMA_INTERFACE` names an interface that no other connection needs.
    pub(in crate::verbs) fn that_may_go_down() -> Option<Self> {
        std::env::var_os("PSERVER_RDMA_INTERFACE").map(Self)
    }

    /// Sets the interface `up` or `down`.
    pub(in crate::verbs) fn goes(&self, state: &str) {
        let ip = Command::new("/bin/ip").args(["link", "set"]).arg(&self.0).arg(state).status();
        assert!(ip.expect("ip runs").success(), "the link does not go {state}");
    }
}
