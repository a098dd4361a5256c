//! Launchers of kernels: the shim's process, a device, or one that loses launches.

use std::env;
use std::panic::{AssertUnwindSafe, catch_unwind};

use pserver_kernels::conformance::skips::{is_required, skip};
use pserver_kernels::conformance::standin;
use pserver_kernels::cuda::ModuleSource;

use crate::child::Shim;
use crate::device::OnDevice;

/// A buffer, until it is released.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BufferId(pub(crate) u64);

/// An address to be written at an offset of a structure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceAddress {
    pub(crate) offset: usize,
    pub(crate) buffer: BufferId,
    pub(crate) within: u64,
}

impl DeviceAddress {
    /// The address of a buffer's first byte.
    pub(crate) fn of(offset: usize, buffer: BufferId) -> Self {
        Self { offset, buffer, within: 0 }
    }
}

/// Kernels of a module, and memory that they work on. Buffers lie between guards.
pub(crate) trait Launcher: Send {
    /// A buffer with these bytes, at an address of this offset from a multiple of 16.
    fn buffer(&mut self, content: &[u8], align: usize) -> BufferId;

    /// Runs a kernel; its structure has addresses put in.
    fn launch(&mut self, name: &str, grid: [u64; 2], arguments: &[u8], addresses: &[DeviceAddress]);

    /// The whole content of a buffer.
    fn read(&mut self, buffer: BufferId, bytes: usize) -> Vec<u8>;

    /// Frees all buffers. The test fails, at its end at the latest, if a kernel wrote out of bounds.
    fn release(&mut self);

    /// Threads and blocks forwards (0), backwards (1), or shuffled, where the launcher controls that.
    fn order(&mut self, order: u64);

    /// Whether there is a kernel of this name.
    fn has(&mut self, name: &str) -> bool;
}

/// Runs a check on every launcher for this module's kernels: the shim's process, where there is g++, and [`on_device`].
/// At the same time: a launcher keeps at most one processor busy.
pub(crate) fn on_every(module: &ModuleSource, check: impl Fn(&mut dyn Launcher) + Sync) {
    if standin::is_inside() || Launchers::wanted() != Launchers::All {
        return on_device(module, |device| check(device));
    }
    // Its skip stands for the stand-in driver too, which is made by the same compiler.
    let Some(mut shim) = Shim::new(module) else { return if_there(module, check) };
    std::thread::scope(|threads| {
        threads.spawn(|| {
            check(&mut shim);
            assert!(shim.end().success(), "a kernel left its buffers");
        });
        on_device(module, |device| check(device));
    });
}

/// Runs a check on the first device, where there is one; else on the simulated driver, in a process of its own.
pub(crate) fn on_device(module: &ModuleSource, check: impl FnOnce(&mut OnDevice)) {
    match OnDevice::open(module) {
        Ok(mut device) => {
            check(&mut device);
            device.report();
        }
        Err(why) if standin::is_inside() => panic!("the stand-in driver: {why}"),
        Err(why) if Launchers::wanted() != Launchers::All || is_required("cuda") => skip("cuda", &why),
        Err(_) => match standin::driver_with(module) {
            Ok(vars) => {
                let vars: Vec<(&str, &str)> = vars.iter().map(|(name, value)| (*name, value.as_str())).collect();
                standin::run_again(&vars);
            }
            Err(why) => skip("g++", &why),
        },
    }
}

fn if_there(module: &ModuleSource, check: impl Fn(&mut dyn Launcher)) {
    if let Ok(mut device) = OnDevice::open(module) {
        check(&mut device);
        device.report();
    }
}

/// The launchers that tests use, by the variable `PSERVER_LAUNCHERS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Launchers {
    /// Unset: the shim and a device, or the stand-in driver.
    All,
    /// `device`: the device alone, which a sanitizer observes.
    Device,
    /// `shipped`: the device alone, and no kernels but the shipped ones. A sanitizer patches every kernel of a module
    /// that is loaded.
    Shipped,
}

impl Launchers {
    pub(crate) fn wanted() -> Self {
        match env::var("PSERVER_LAUNCHERS").ok().as_deref() {
            None => Self::All,
            Some("device") => Self::Device,
            Some("shipped") => Self::Shipped,
            Some(found) => panic!("PSERVER_LAUNCHERS is `{found}`; expected `device`, `shipped`, or no such variable"),
        }
    }
}

/// A launcher whose launches are seen, and may be lost: a kernel of a lost launch does not run.
pub(crate) struct Watched<'a> {
    pub(crate) inner: &'a mut dyn Launcher,
    /// Whether a launch of a kernel of this name runs.
    pub(crate) runs: &'a mut (dyn FnMut(&str) -> bool + Send),
}

impl Launcher for Watched<'_> {
    fn buffer(&mut self, content: &[u8], align: usize) -> BufferId {
        self.inner.buffer(content, align)
    }

    fn launch(&mut self, name: &str, grid: [u64; 2], arguments: &[u8], addresses: &[DeviceAddress]) {
        if (self.runs)(name) {
            self.inner.launch(name, grid, arguments, addresses);
        }
    }

    fn read(&mut self, buffer: BufferId, bytes: usize) -> Vec<u8> {
        self.inner.read(buffer, bytes)
    }

    fn release(&mut self) {
        self.inner.release();
    }

    fn order(&mut self, order: u64) {
        self.inner.order(order);
    }

    fn has(&mut self, name: &str) -> bool {
        self.inner.has(name)
    }
}

/// Checks that the loss of any launch of these kernels is noticed, and that there are such launches. A kernel must
/// leave its result for other kernels: one that counts what others write must not be lost.
pub(crate) fn assert_a_lost_launch_is_noticed(
    launcher: &mut dyn Launcher,
    prefix: &str,
    check: impl Fn(&mut dyn Launcher),
) {
    for lost in 0.. {
        let mut launched = 0;
        let mut runs = |name: &str| {
            launched += usize::from(name.starts_with(prefix));
            !name.starts_with(prefix) || launched != lost + 1
        };
        let mut losing = Watched { inner: &mut *launcher, runs: &mut runs };
        let outcome = catch_unwind(AssertUnwindSafe(|| check(&mut losing)));
        launcher.release();
        if launched <= lost {
            assert!(outcome.is_ok() && 0 < lost, "{prefix}: without a loss, after {lost} launches");
            return;
        }
        assert!(outcome.is_err(), "{prefix}: launch {lost} was lost and not noticed");
    }
}
