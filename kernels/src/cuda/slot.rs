//! A chunk that lives on the device: its memory, its kernels, and the checks of work for it.

use pserver_core::limits::{RULE_SCALARS_MAX, STATES_MAX};
use pserver_core::memory::Lease;
use pserver_core::port::{GradientLease, Resident, Work};

use super::arguments::{ElementKind, GRADIENTS_MAX, UpdateArguments};
use super::code::UpdateKernel;
use super::safe::{DeviceRange, KernelFunction};

/// A chunk that lives on the device.
pub(super) struct SlotState {
    pub(super) resident: Resident,
    pub(super) program: UpdateKernel,
    pub(super) sum: KernelFunction,
    pub(super) parameter: DeviceRange,
    pub(super) states: Vec<DeviceRange>,
    pub(super) kept: Option<KeptSum>,
    pub(super) is_loaded: bool,
    pub(super) is_busy: bool,
    /// The reason why the content is unknown.
    pub(super) broken: Option<String>,
}

/// A chunk's sum of gradients, kept for the next update.
pub(super) struct KeptSum {
    pub(super) sum: DeviceRange,
    pub(super) squares: DeviceRange,
    /// The kernel that computes the squares.
    pub(super) entry: KernelFunction,
    /// Whether the sum has been computed.
    pub(super) is_there: bool,
}

impl SlotState {
    /// Checks that the work is what the slot was adopted for.
    pub(super) fn check(&self, work: &Work) {
        let slot = work.slot();
        assert!(!self.is_busy, "slot {slot} has work under way");
        let holds = |lease: &Lease| self.resident.bytes <= lease.len();
        match work {
            Work::Load { parameter, states, .. } => {
                assert_eq!(parameter.len(), self.resident.bytes, "the parameter of slot {slot}");
                let all = states.len() == self.states.len() || states.is_empty() && self.is_loaded;
                assert!(all, "{} states were loaded to slot {slot}, it has {}", states.len(), self.states.len());
                assert!(states.iter().all(holds), "a state of slot {slot} is too short");
            }
            Work::Sum { gradients, squares, .. } => {
                let holds_squares = self.resident.squares_bytes() <= squares.len();
                assert!(self.is_loaded && holds_squares, "slot {slot} was not loaded, or its place is too short");
                assert!(self.kept.is_some(), "slot {slot} was adopted without a place for a sum");
                self.check_gradients(gradients);
            }
            Work::Update { gradients, is_summed, into, .. } => {
                assert!(self.is_loaded && holds(into), "slot {slot} was not loaded, or its place is too short");
                let has_sum = self.kept.as_ref().is_some_and(|kept| kept.is_there);
                assert!(has_sum || !is_summed, "slot {slot} has no sum");
                self.check_gradients(gradients);
            }
            Work::Store { states, .. } => {
                assert!(self.is_loaded && states.iter().all(holds), "slot {slot} was not loaded, or a place is short");
                assert_eq!(states.len(), self.states.len(), "a place for every state of slot {slot}");
            }
        }
    }

    fn check_gradients(&self, gradients: &[GradientLease]) {
        let own = self.resident.element_type;
        for gradient in gradients {
            assert!(gradient.element_type.is_gradient_for(own), "{} for {own}", gradient.element_type);
            let bytes = self.elements() * gradient.element_type.bytes();
            assert_eq!(u64::from(gradient.bytes), bytes, "a gradient for a chunk of {} bytes", self.resident.bytes);
        }
    }

    /// Updates the slot's state after its work completed.
    pub(super) fn record_completion(&mut self, work: &Work) {
        self.is_loaded = true;
        let is_there = match work {
            Work::Sum { .. } => true,
            Work::Load { .. } | Work::Update { .. } => false,
            Work::Store { .. } => return,
        };
        self.kept.iter_mut().for_each(|kept| kept.is_there = is_there);
    }

    fn elements(&self) -> u64 {
        u64::from(self.resident.bytes) / self.resident.element_type.bytes()
    }

    /// Enters the numbers of an update; `packed` is room for them.
    pub(super) fn set_numbers(&self, launch: &mut UpdateArguments, numbers: &[f64], packed: &mut Vec<u8>) {
        self.program.numbers.pack(self.resident.element_type, numbers, packed);
        launch.set_numbers(packed);
    }

    /// The kernel's arguments, without gradients and numbers.
    pub(super) fn arguments(&self) -> UpdateArguments {
        let mut states = [0; STATES_MAX];
        states.iter_mut().zip(&self.states).for_each(|(into, state)| *into = state.address());
        let own = ElementKind::of(self.resident.element_type).code();
        UpdateArguments {
            elements: self.elements(),
            weights: self.parameter.address(),
            states,
            sum: 0,
            scalars: 0,
            skip: 0,
            copy: 0,
            count: 0,
            gradient_kind: own,
            copy_kind: own,
            merge: self.program.numbers.merge() as u32,
            gradients: [0; GRADIENTS_MAX],
            numbers: [0; RULE_SCALARS_MAX],
        }
    }
}
