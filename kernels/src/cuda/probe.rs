//! Throughput of a device for `psbench`: kernels on tensors in device memory, and the copies that bound them.
//!
//! Times are the device's own, from events around the measured work. The host's part is measured on an
//! [`Accelerator`](pserver_core::port::Accelerator).

use std::sync::Arc;
use std::time::{Duration, Instant};

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::port::DeviceCode;

use super::arguments::{ElementKind, GRADIENTS_MAX, UpdateArguments};
use super::checked::DriverError;
use super::code::{KernelLoader, ShippedImage};
use super::gathering::aligned;
use super::safe::{CudaContext, CudaEvent, DeviceMemory, PinnedMemory, PinnedRange, StreamId, StreamSet, Ticket, grid};
use super::settings::CudaSettings;

/// Duration of work within the device before it is timed: an idle device starts at a lower clock, and kernels with
/// gradients in half precision then take an eighth longer.
const WARM_UP: Duration = Duration::from_millis(200);

/// The byte that fills all tensors: each element is 0.046 in binary32 and in bfloat16. Zeros may take less power to
/// move, and so less time.
const FILLING: u8 = 0x3d;

/// A device on which one operation at a time is timed.
pub struct Probe {
    context: Arc<CudaContext>,
    streams: StreamSet<HostBuffer>,
    kernels: KernelLoader,
    begin: CudaEvent,
    end: CudaEvent,
}

/// Pinned host memory for a timed copy.
struct HostBuffer {
    piece: PinnedRange,
}

/// An update to time.
#[derive(Clone, Copy, Debug)]
pub struct TimedUpdate<'a> {
    /// The computation.
    pub code: &'a DeviceCode,
    /// The type of parameter and states.
    pub element_type: ElementType,
    /// The type of the gradients.
    pub gradient_type: ElementType,
    /// Elements of each tensor.
    pub elements: u64,
    /// How many gradients, at most 64.
    pub gradients: usize,
    /// As in [`Work::Update`](pserver_core::port::Work::Update).
    pub numbers: &'a [f64],
}

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyDirection {
    /// Within the device: each byte is read and written.
    Within,
    /// From pinned memory of the host.
    In,
    /// To pinned memory of the host.
    Out,
}

impl Probe {
    /// Opens a device.
    ///
    /// # Errors
    /// [`Failure::Call`] with what was missing.
    pub fn open(settings: &CudaSettings) -> Result<Self, Failure> {
        let context = CudaContext::open(settings.ordinal).map_err(Failure::call)?;
        let refused = |error: DriverError| Failure::call(error.to_string());
        let event = || CudaEvent::new(&context, true).map_err(refused);
        context.enter().map_err(refused)?;
        Ok(Self {
            streams: StreamSet::new(&context, 2).map_err(refused)?,
            kernels: KernelLoader::new(&context, settings.cache.as_deref())?,
            begin: event()?,
            end: event()?,
            context,
        })
    }

    /// The device's name, its architecture and the driver's CUDA version, for a report.
    #[must_use]
    pub fn about(&self) -> (String, String, String) {
        let found = self.context.properties();
        let ((major, minor), (driver_major, driver_minor)) = (found.capability, found.driver);
        (found.name.clone(), format!("sm_{major}{minor}"), format!("{driver_major}.{driver_minor}"))
    }

    /// The shipped binary that the driver took.
    #[must_use]
    pub fn image(&self) -> ShippedImage {
        self.kernels.image()
    }

    /// Free bytes of the device's memory.
    ///
    /// # Errors
    /// [`Failure::Call`] with the driver's refusal.
    pub fn free_bytes(&self) -> Result<u64, Failure> {
        self.context.memory().map(|(free, _)| free).map_err(|refused| Failure::call(refused.to_string()))
    }

    /// Seconds of each of `repetitions` copies of this many bytes. Copies within the device are preceded by 0.2 s of
    /// warm-up.
    ///
    /// # Errors
    /// [`Failure::Call`] with the driver's refusal.
    pub fn copies(&mut self, way: CopyDirection, bytes: u64, repetitions: u32) -> Result<Vec<f64>, Failure> {
        self.try_copies(way, bytes, repetitions).map_err(|refused| Failure::call(refused.to_string()))
    }

    fn try_copies(&mut self, way: CopyDirection, bytes: u64, repetitions: u32) -> Result<Vec<f64>, DriverError> {
        self.context.enter()?;
        let memory = DeviceMemory::new(&self.context, bytes * 2)?;
        let (first, second) = (memory.part(0..bytes), memory.part(bytes..bytes * 2));
        if way == CopyDirection::Within {
            let mut copy = || self.timed(StreamId::Compute, |streams| streams.copy(StreamId::Compute, &first, &second));
            warm_up(&mut copy)?;
            return (0..repetitions).map(|_| copy()).collect();
        }
        let length = usize::try_from(bytes).expect("an address has 64 bits");
        let mut pieces = PinnedMemory::new(&self.context, length)?.pieces(length);
        let mut piece = pieces.pop().expect("the memory is one piece");
        let mut seconds = Vec::new();
        for _ in 0..repetitions {
            let end = CudaEvent::new(&self.context, false)?;
            let ticket = self.streams.hold(HostBuffer { piece }, end);
            let stream = if way == CopyDirection::In { StreamId::In } else { StreamId::Out };
            let timed = self.timed(stream, |streams| match way {
                CopyDirection::In => streams.copy_in(ticket, |held| held.piece.bytes(), &first),
                _ => streams.copy_out(ticket, &first, |held| held.piece.bytes_mut()),
            });
            piece = self.back(stream, ticket)?.piece;
            seconds.push(timed?);
        }
        Ok(seconds)
    }

    /// Seconds of each of `repetitions` simultaneous copies of this many bytes in both directions between pinned host
    /// memory and the device, until both are complete.
    ///
    /// # Errors
    /// [`Failure::Call`] with the driver's refusal.
    pub fn copies_both(&mut self, bytes: u64, repetitions: u32) -> Result<Vec<f64>, Failure> {
        self.try_both(bytes, repetitions).map_err(|refused| Failure::call(refused.to_string()))
    }

    fn try_both(&mut self, bytes: u64, repetitions: u32) -> Result<Vec<f64>, DriverError> {
        self.context.enter()?;
        let memory = DeviceMemory::new(&self.context, bytes * 2)?;
        let (first, second) = (memory.part(0..bytes), memory.part(bytes..bytes * 2));
        let length = usize::try_from(bytes).expect("an address has 64 bits");
        let mut pieces = PinnedMemory::new(&self.context, length * 2)?.pieces(length);
        let is_in = CudaEvent::new(&self.context, false)?;
        let mut seconds = Vec::new();
        for _ in 0..repetitions {
            let ends = [CudaEvent::new(&self.context, false)?, CudaEvent::new(&self.context, false)?];
            let [into, out] = ends.map(|end| {
                let piece = pieces.pop().expect("there are two");
                self.streams.hold(HostBuffer { piece }, end)
            });
            self.streams.record(StreamId::In, &self.begin)?;
            self.streams.wait(StreamId::Out, &self.begin)?;
            self.streams.copy_in(into, |held| held.piece.bytes(), &first)?;
            self.streams.copy_out(out, &second, |held| held.piece.bytes_mut())?;
            self.streams.record(StreamId::In, &is_in)?;
            self.streams.wait(StreamId::Out, &is_in)?;
            self.streams.record(StreamId::Out, &self.end)?;
            self.streams.synchronize()?;
            seconds.push(self.end.seconds_since(&self.begin)?);
            self.streams.close(StreamId::In, into)?;
            self.streams.close(StreamId::Out, out)?;
            self.streams.empty(|held, _| pieces.push(held.piece))?;
        }
        Ok(seconds)
    }

    fn back(&mut self, stream: StreamId, ticket: Ticket) -> Result<HostBuffer, DriverError> {
        self.streams.close(stream, ticket)?;
        let mut held = None;
        self.streams.empty(|value, _| held = Some(value))?;
        Ok(held.expect("it was held"))
    }

    /// Seconds of each of `repetitions` updates of tensors on the device, all filled with one small number. Several are
    /// preceded by 0.2 s of warm-up.
    ///
    /// # Errors
    /// [`Failure::Call`] when there is no kernel, or with the driver's refusal.
    ///
    /// # Panics
    /// When there are more gradients than a kernel takes.
    pub fn updates(&mut self, timed: &TimedUpdate<'_>, repetitions: u32) -> Result<Vec<f64>, Failure> {
        self.context.enter().map_err(|refused| Failure::call(refused.to_string()))?;
        let program = self.kernels.program(timed.code, timed.element_type)?;
        let mut packed = Vec::new();
        program.numbers.pack(timed.element_type, timed.numbers, &mut packed);
        let mut run = || {
            let (memory, launch) = self.prepare(timed, &packed)?;
            let launch = UpdateArguments { merge: program.numbers.merge() as u32, ..launch };
            let grid = grid(timed.elements);
            let mut update = || self.timed(StreamId::Compute, |streams| streams.launch(&program.entry, grid, &launch));
            if 1 < repetitions {
                warm_up(&mut update)?;
            }
            let seconds = (0..repetitions).map(|_| update()).collect::<Result<Vec<_>, _>>();
            drop(memory);
            seconds
        };
        run().map_err(|refused: DriverError| Failure::call(refused.to_string()))
    }

    /// Filled tensors, and the arguments of a launch on them.
    fn prepare(
        &mut self,
        timed: &TimedUpdate<'_>,
        numbers: &[u8],
    ) -> Result<(Arc<DeviceMemory>, UpdateArguments), DriverError> {
        assert!(timed.gradients <= GRADIENTS_MAX, "{} gradients", timed.gradients);
        let own = aligned(timed.elements * timed.element_type.bytes());
        let each = aligned(timed.elements * timed.gradient_type.bytes());
        let states = timed.code.states() as u64;
        let bytes = own * (1 + states) + each * timed.gradients as u64;
        let memory = DeviceMemory::new(&self.context, bytes)?;
        let all = memory.part(0..bytes);
        self.streams.fill(StreamId::Compute, &all, FILLING)?;
        self.streams.synchronize()?;
        let address = |offset: u64| all.address() + offset;
        let mut launch = UpdateArguments {
            elements: timed.elements,
            weights: all.address(),
            states: [0; _],
            sum: 0,
            scalars: 0,
            skip: 0,
            copy: 0,
            count: u32::try_from(timed.gradients).expect("there are at most 64"),
            gradient_kind: ElementKind::of(timed.gradient_type).code(),
            copy_kind: ElementKind::of(timed.element_type).code(),
            merge: 0,
            gradients: [0; GRADIENTS_MAX],
            numbers: [0; _],
        };
        launch.set_numbers(numbers);
        let state = |index: u64| address(own * (1 + index));
        launch.states.iter_mut().zip(0..states).for_each(|(into, index)| *into = state(index));
        let gradient = |index: u64| address(own * (1 + states) + each * index);
        launch.gradients.iter_mut().zip(0..timed.gradients as u64).for_each(|(into, index)| *into = gradient(index));
        Ok((memory, launch))
    }

    /// The device's seconds for the work submitted to one stream.
    fn timed(
        &mut self,
        stream: StreamId,
        submit: impl FnOnce(&mut StreamSet<HostBuffer>) -> Result<(), DriverError>,
    ) -> Result<f64, DriverError> {
        self.streams.record(stream, &self.begin)?;
        submit(&mut self.streams)?;
        self.streams.record(stream, &self.end)?;
        self.streams.synchronize()?;
        self.end.seconds_since(&self.begin)
    }
}

/// Repeats work until the device has the clock of one that works.
fn warm_up(work: &mut impl FnMut() -> Result<f64, DriverError>) -> Result<(), DriverError> {
    let until = Instant::now() + WARM_UP;
    while Instant::now() < until {
        work()?;
    }
    Ok(())
}
