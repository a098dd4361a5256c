//! Two transports that can reach each other over a device.

use std::any::Any;
use std::io::Write;
use std::thread::{self, JoinHandle};

use pserver_core::wire::Address;

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

/// The device of this machine; where there is none, the test is counted as skipped.
pub(super) fn hardware() -> Option<Device> {
    match Device::find(&Devices::Best) {
        Ok(device) => Some(device),
        Err(why) => {
            let required = std::env::var("PSERVER_REQUIRE").unwrap_or_default();
            assert!(!required.split(',').any(|what| what == "rdma"), "rdma is required, and {why}");
            if let Ok(path) = std::env::var("PSERVER_SKIP_REPORT") {
                let report = std::fs::OpenOptions::new().append(true).create(true).open(path);
                writeln!(report.expect("the report opens"), "SKIPPED: rdma: {why}").expect("the report is written");
            }
            None
        }
    }
}
