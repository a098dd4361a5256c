//! The module on a device, or on the driver that stands in for one.

use std::collections::BTreeSet;
use std::env;
use std::sync::{Mutex, PoisonError};

use pserver_kernels::conformance::standin::beside_the_program;
use pserver_kernels::cuda::{KernelLaunch, KernelLauncher, LaunchBuffer, LaunchGraph, ModuleSource, ShippedImage};

use crate::launcher::{BufferId, DeviceAddress, Launcher, Launchers};

/// The byte before and behind a buffer.
const GUARD: u8 = 0xa5;
/// The length of a guard in bytes: more than a thread writes at once.
const GUARD_BYTES: usize = 64;

/// A device, with guards around buffers.
pub(crate) struct OnDevice {
    device: KernelLauncher,
    buffers: Vec<Held>,
    /// Requested kernels that are neither shipped nor compilable here.
    missing: BTreeSet<String>,
    /// The reason why no kernel could be compiled.
    without: Option<String>,
}

/// A launch of a step that is captured.
pub(crate) struct StepLaunch {
    name: String,
    arguments: Vec<u8>,
}

/// The image of the shipped kernels, by the variable `PSERVER_IMAGE`; unset, the one that servers load.
fn wanted_image() -> Option<ShippedImage> {
    match env::var("PSERVER_IMAGE").ok().as_deref() {
        None => None,
        Some("ptx") => Some(ShippedImage::Ptx),
        Some(found) => panic!("PSERVER_IMAGE is `{found}`; expected `ptx`, or no such variable"),
    }
}

struct Held {
    buffer: LaunchBuffer,
    /// The offset of the content in the buffer.
    begin: usize,
    bytes: usize,
}

impl OnDevice {
    /// The first device, with the shipped kernels and, where there is a compiler, those of this module.
    pub(crate) fn open(module: &ModuleSource) -> Result<Self, String> {
        // The tests of this process need the same module at the same time, and compiling takes minutes: one of them
        // compiles it, and the next process finds it in the cache.
        static MAKING: Mutex<()> = Mutex::new(());
        let _making = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
        let mut device =
            KernelLauncher::open(0, &beside_the_program("rules"), wanted_image()).map_err(|why| why.to_string())?;
        println!("{}, {} kernels", device.name(), device.image());
        let without = if module.entries().all(|entry| device.has(entry)) {
            None
        } else if Launchers::wanted() == Launchers::Shipped {
            Some("only the shipped ones are wanted".to_owned())
        } else {
            device.add(module).err().map(|why| why.to_string())
        };
        Ok(Self { device, buffers: Vec::new(), missing: BTreeSet::new(), without })
    }

    /// A launch for [`OnDevice::capture`], with addresses put in.
    pub(crate) fn prepared(&self, name: &str, arguments: &[u8], addresses: &[DeviceAddress]) -> StepLaunch {
        StepLaunch { name: name.to_owned(), arguments: self.with_addresses(arguments, addresses) }
    }

    /// Launches as one graph, each on two blocks.
    pub(crate) fn capture(&mut self, launches: &[StepLaunch]) -> LaunchGraph {
        let launches: Vec<KernelLaunch<'_>> =
            launches.iter().map(|launch| (launch.name.as_str(), (2, 1), launch.arguments.as_slice())).collect();
        self.device.capture(&launches).expect("the driver captures launches")
    }

    pub(crate) fn replay(&mut self, step: &LaunchGraph) {
        self.device.replay(step).expect("the kernels run");
    }

    /// The device address of a buffer's content.
    pub(crate) fn place(&self, buffer: BufferId) -> usize {
        usize::try_from(self.address(DeviceAddress::of(0, buffer))).expect("an address has 64 bits")
    }

    /// Writes the first bytes of a buffer anew.
    pub(crate) fn rewrite(&mut self, buffer: BufferId, bytes: &[u8]) {
        let held = &self.buffers[usize::try_from(buffer.0).expect("few buffers")];
        let (buffer, begin) = (held.buffer, held.begin as u64);
        self.device.write(buffer, begin, bytes).expect("the device takes bytes");
    }

    fn with_addresses(&self, arguments: &[u8], addresses: &[DeviceAddress]) -> Vec<u8> {
        let mut arguments = arguments.to_vec();
        for address in addresses {
            arguments[address.offset..][..8].copy_from_slice(&self.address(*address).to_le_bytes());
        }
        arguments
    }

    /// Prints the missing kernels.
    pub(crate) fn report(&self) {
        if let (Some(why), false) = (&self.without, self.missing.is_empty()) {
            println!("{}: {} kernels are left out: {why}", self.device.name(), self.missing.len());
        }
    }

    fn address(&self, address: DeviceAddress) -> u64 {
        let held = &self.buffers[usize::try_from(address.buffer.0).expect("few buffers")];
        self.device.address(held.buffer) + held.begin as u64 + address.within
    }
}

impl Launcher for OnDevice {
    fn buffer(&mut self, content: &[u8], align: usize) -> BufferId {
        let begin = GUARD_BYTES + align;
        let mut bytes = vec![GUARD; begin + content.len() + GUARD_BYTES];
        bytes[begin..][..content.len()].copy_from_slice(content);
        let buffer = self.device.buffer(&bytes).expect("the device has memory");
        self.buffers.push(Held { buffer, begin, bytes: content.len() });
        BufferId(self.buffers.len() as u64 - 1)
    }

    fn launch(&mut self, name: &str, grid: [u64; 2], arguments: &[u8], addresses: &[DeviceAddress]) {
        let arguments = self.with_addresses(arguments, addresses);
        let [wide, high] = grid.map(|blocks| u32::try_from(blocks).expect("a small grid"));
        self.device.launch(name, (wide, high), &arguments).expect("a kernel runs");
    }

    fn read(&mut self, buffer: BufferId, bytes: usize) -> Vec<u8> {
        let held = &self.buffers[usize::try_from(buffer.0).expect("few buffers")];
        let begin = held.begin;
        assert_eq!(bytes, held.bytes, "a buffer is read whole");
        let found = self.device.read(held.buffer).expect("the device gives its memory");
        found[begin..][..bytes].to_vec()
    }

    fn release(&mut self) {
        for held in self.buffers.drain(..) {
            let found = self.device.read(held.buffer).expect("the device gives its memory");
            let (before, rest) = found.split_at(held.begin);
            let is_whole = before.iter().chain(&rest[held.bytes..]).all(|byte| *byte == GUARD);
            assert!(is_whole || std::thread::panicking(), "a kernel wrote beside a buffer of {} bytes", held.bytes);
        }
        self.device.clear();
    }

    fn order(&mut self, _: u64) {}

    fn has(&mut self, name: &str) -> bool {
        let is_there = self.device.has(name);
        if !is_there {
            self.missing.insert(name.to_owned());
        }
        is_there
    }
}
