//! What a device does in a second: kernels on tensors that lie there, and the copies that bound them.
//!
//! For `psbench`. Times are the device's own, from events around what is timed; the host's part is measured by whoever
//! runs an [`Accelerator`](pserver_core::port::Accelerator).

use std::sync::Arc;
use std::time::{Duration, Instant};

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::port::Code;

use super::arguments::{GRADIENTS_MAX, Kind, UpdateArguments};
use super::checked::Refused;
use super::code::Kernels;
use super::gathering::aligned;
use super::safe::{Context, Event, Lane, Lanes, Memory, Part, Piece, Pinned, Ticket};
use super::settings::Settings;
use super::submission::grid;

/// How long copies within the device run before they are timed: a device that has rested is slow at first.
const WARM_UP: Duration = Duration::from_millis(200);

/// What all bytes of the tensors are: each element is 0.046, of binary32 and of bfloat16. Zeros may take less power to
/// move, and so less time.
const FILLING: u8 = 0x3d;

/// A device on which one thing at a time is timed.
pub struct Probe {
    context: Arc<Context>,
    lanes: Lanes<Held>,
    kernels: Kernels,
    begin: Event,
    end: Event,
}

/// Memory of the host that a copy is timed with.
struct Held {
    piece: Piece,
}

/// An update that is timed.
#[derive(Clone, Copy, Debug)]
pub struct Timed<'a> {
    /// What is computed.
    pub code: &'a Code,
    /// The type of parameter and states.
    pub element_type: ElementType,
    /// The type of the gradients.
    pub gradient_type: ElementType,
    /// Elements of every tensor.
    pub elements: u64,
    /// How many gradients, at most 64.
    pub gradients: usize,
    /// As in [`Work::Update`](pserver_core::port::Work::Update).
    pub numbers: &'a [f64],
}

/// Which way a copy goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
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
    pub fn open(settings: &Settings) -> Result<Self, Failure> {
        let context = Context::open(settings.ordinal).map_err(Failure::call)?;
        let refused = |error: Refused| Failure::call(error.to_string());
        let event = || Event::new(&context, true).map_err(refused);
        context.enter().map_err(refused)?;
        Ok(Self {
            lanes: Lanes::new(&context, 2).map_err(refused)?,
            kernels: Kernels::new(&context, settings.cache.as_deref())?,
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

    /// Bytes of the device's memory that are free.
    ///
    /// # Errors
    /// [`Failure::Call`] with what the driver refused.
    pub fn free_bytes(&self) -> Result<u64, Failure> {
        self.context.memory().map(|(free, _)| free).map_err(|refused| Failure::call(refused.to_string()))
    }

    /// Seconds of each of `repetitions` copies of so many bytes. Copies within the device run for 0.2 s before.
    ///
    /// # Errors
    /// [`Failure::Call`] with what the driver refused.
    pub fn copies(&mut self, way: Way, bytes: u64, repetitions: u32) -> Result<Vec<f64>, Failure> {
        self.try_copies(way, bytes, repetitions).map_err(|refused| Failure::call(refused.to_string()))
    }

    fn try_copies(&mut self, way: Way, bytes: u64, repetitions: u32) -> Result<Vec<f64>, Refused> {
        self.context.enter()?;
        let memory = Memory::new(&self.context, bytes * 2)?;
        let (first, second) = (memory.part(0..bytes), memory.part(bytes..bytes * 2));
        if way == Way::Within {
            let mut copy = || self.timed(Lane::Compute, |lanes| lanes.copy(Lane::Compute, &first, &second));
            let until = Instant::now() + WARM_UP;
            while Instant::now() < until {
                copy()?;
            }
            return (0..repetitions).map(|_| copy()).collect();
        }
        let length = usize::try_from(bytes).expect("an address has 64 bits");
        let mut pieces = Pinned::new(&self.context, length)?.pieces(length);
        let mut piece = pieces.pop().expect("the memory is one piece");
        let mut seconds = Vec::new();
        for _ in 0..repetitions {
            let end = Event::new(&self.context, false)?;
            let ticket = self.lanes.hold(Held { piece }, end);
            let lane = if way == Way::In { Lane::In } else { Lane::Out };
            let timed = self.timed(lane, |lanes| match way {
                Way::In => lanes.copy_in(ticket, |held| held.piece.bytes(), &first),
                _ => lanes.copy_out(ticket, &first, |held| held.piece.bytes_mut()),
            });
            piece = self.back(lane, ticket)?.piece;
            seconds.push(timed?);
        }
        Ok(seconds)
    }

    /// Seconds of each of `repetitions` times that so many bytes are copied from pinned memory of the host and as many
    /// to it, both at once: until both are there.
    ///
    /// # Errors
    /// [`Failure::Call`] with what the driver refused.
    pub fn copies_both(&mut self, bytes: u64, repetitions: u32) -> Result<Vec<f64>, Failure> {
        self.try_both(bytes, repetitions).map_err(|refused| Failure::call(refused.to_string()))
    }

    fn try_both(&mut self, bytes: u64, repetitions: u32) -> Result<Vec<f64>, Refused> {
        self.context.enter()?;
        let memory = Memory::new(&self.context, bytes * 2)?;
        let (first, second) = (memory.part(0..bytes), memory.part(bytes..bytes * 2));
        let length = usize::try_from(bytes).expect("an address has 64 bits");
        let mut pieces = Pinned::new(&self.context, length * 2)?.pieces(length);
        let is_in = Event::new(&self.context, false)?;
        let mut seconds = Vec::new();
        for _ in 0..repetitions {
            let ends = [Event::new(&self.context, false)?, Event::new(&self.context, false)?];
            let [into, out] = ends.map(|end| {
                let piece = pieces.pop().expect("there are two");
                self.lanes.hold(Held { piece }, end)
            });
            self.lanes.record(Lane::In, &self.begin)?;
            self.lanes.wait(Lane::Out, &self.begin)?;
            self.lanes.copy_in(into, |held| held.piece.bytes(), &first)?;
            self.lanes.copy_out(out, &second, |held| held.piece.bytes_mut())?;
            self.lanes.record(Lane::In, &is_in)?;
            self.lanes.wait(Lane::Out, &is_in)?;
            self.lanes.record(Lane::Out, &self.end)?;
            self.lanes.synchronize()?;
            seconds.push(self.end.seconds_since(&self.begin)?);
            self.lanes.close(Lane::In, into)?;
            self.lanes.close(Lane::Out, out)?;
            self.lanes.empty(|held, _| pieces.push(held.piece))?;
        }
        Ok(seconds)
    }

    fn back(&mut self, lane: Lane, ticket: Ticket) -> Result<Held, Refused> {
        self.lanes.close(lane, ticket)?;
        let mut held = None;
        self.lanes.empty(|value, _| held = Some(value))?;
        Ok(held.expect("it was held"))
    }

    /// Seconds of each of `repetitions` updates of tensors that lie on the device, all of one small number.
    ///
    /// # Errors
    /// [`Failure::Call`] when there is no kernel, or what the driver refused.
    ///
    /// # Panics
    /// When there are more gradients than a kernel takes.
    pub fn updates(&mut self, timed: &Timed<'_>, repetitions: u32) -> Result<Vec<f64>, Failure> {
        self.context.enter().map_err(|refused| Failure::call(refused.to_string()))?;
        let program = self.kernels.program(timed.code, timed.element_type)?;
        let mut packed = Vec::new();
        program.numbers.pack(timed.element_type, timed.numbers, &mut packed);
        let mut run = || {
            let (memory, launch) = self.prepare(timed, &packed)?;
            let launch = UpdateArguments { merge: program.numbers.merge() as u32, ..launch };
            let grid = grid(&self.context, &program.entry, timed.elements);
            let seconds = (0..repetitions)
                .map(|_| self.timed(Lane::Compute, |lanes| lanes.launch(&program.entry, grid, &launch)))
                .collect::<Result<Vec<_>, Refused>>();
            drop(memory);
            seconds
        };
        run().map_err(|refused: Refused| Failure::call(refused.to_string()))
    }

    /// Tensors that are filled, and a launch that has them.
    fn prepare(&mut self, timed: &Timed<'_>, numbers: &[u8]) -> Result<(Arc<Memory>, UpdateArguments), Refused> {
        assert!(timed.gradients <= GRADIENTS_MAX, "{} gradients", timed.gradients);
        let own = aligned(timed.elements * timed.element_type.bytes());
        let each = aligned(timed.elements * timed.gradient_type.bytes());
        let states = timed.code.states() as u64;
        let place = aligned(numbers.len().max(1) as u64);
        let memory = Memory::new(&self.context, place + own * (1 + states) + each * timed.gradients as u64)?;
        let all = memory.part(0..place + own * (1 + states) + each * timed.gradients as u64);
        self.lanes.fill(Lane::Compute, &all, FILLING)?;
        self.lanes.synchronize()?;
        if !numbers.is_empty() {
            self.bring(numbers, &all.part(0..numbers.len() as u64))?;
        }
        let address = |offset: u64| all.address() + offset;
        let mut launch = UpdateArguments {
            elements: timed.elements,
            weights: address(place),
            states: [0; _],
            sum: 0,
            scalars: if numbers.is_empty() { 0 } else { address(0) },
            skip: 0,
            copy: 0,
            count: u32::try_from(timed.gradients).expect("there are at most 64"),
            gradient_kind: Kind::of(timed.gradient_type).code(),
            copy_kind: Kind::of(timed.element_type).code(),
            merge: 0,
            gradients: [0; GRADIENTS_MAX],
        };
        let state = |index: u64| address(place + own * (1 + index));
        launch.states.iter_mut().zip(0..states).for_each(|(into, index)| *into = state(index));
        let gradient = |index: u64| address(place + own * (1 + states) + each * index);
        launch.gradients.iter_mut().zip(0..timed.gradients as u64).for_each(|(into, index)| *into = gradient(index));
        Ok((memory, launch))
    }

    fn bring(&mut self, bytes: &[u8], to: &Part) -> Result<(), Refused> {
        let mut pieces = Pinned::new(&self.context, bytes.len())?.pieces(bytes.len());
        let mut piece = pieces.pop().expect("the memory is one piece");
        piece.bytes_mut().copy_from_slice(bytes);
        let end = Event::new(&self.context, false)?;
        let ticket = self.lanes.hold(Held { piece }, end);
        self.lanes.copy_in(ticket, |held| held.piece.bytes(), to)?;
        self.back(Lane::In, ticket).map(drop)
    }

    /// The device's seconds for what is submitted to one lane.
    fn timed(
        &mut self,
        lane: Lane,
        submit: impl FnOnce(&mut Lanes<Held>) -> Result<(), Refused>,
    ) -> Result<f64, Refused> {
        self.lanes.record(lane, &self.begin)?;
        submit(&mut self.lanes)?;
        self.lanes.record(lane, &self.end)?;
        self.lanes.synchronize()?;
        self.end.seconds_since(&self.begin)
    }
}
