//! Cache of code for rules.
//!
//! A shard's chunks have few rules, and each comes behind the same `Arc`, so code is found by that identity: nearly
//! always it is the code of the last update. No lock is taken and nothing is hashed. The cache keeps the rule as well,
//! so an identity is never reused. Rules that differ in their constants only share code, which gets its scalars with
//! every update.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use pserver_core::dtype::ElementType;
use pserver_core::limits::STATES_MAX;
use pserver_core::optim::Gradient;
use pserver_core::rule::ssa::{Lowered, ScalarId};

use super::element::{KernelReal, Scratch, TILE};
use super::sum_tile_wide;
use crate::native::{self, CallTensors, CodeTarget, GRADIENTS_MAX, GeneratedFunction, GradientFormat, Vectors, Width};
use crate::tiles::{self, TileProgram, TileSlots};

/// How rules are run on this machine. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Operation after operation over tiles; on every machine.
    Tiles,
    /// Generated code for AVX2.
    Avx2,
    /// Generated code for AVX-512.
    Avx512,
}

impl Form {
    /// The forms that this machine can run, the fastest last.
    #[must_use]
    pub fn here() -> Vec<Self> {
        let is_allowed = native::is_allowed();
        let forms = [Self::Tiles, Self::Avx2, Self::Avx512].into_iter();
        forms.filter(|form| form.vectors().is_none_or(|vectors| is_allowed && vectors.are_there())).collect()
    }

    /// The fastest form on this machine, detected once.
    #[must_use]
    pub fn best() -> Self {
        static BEST: OnceLock<Form> = OnceLock::new();
        *BEST.get_or_init(|| Self::here().last().copied().unwrap_or(Self::Tiles))
    }

    fn vectors(self) -> Option<Vectors> {
        match self {
            Self::Tiles => None,
            Self::Avx2 => Some(Vectors::Avx2),
            Self::Avx512 => Some(Vectors::Avx512),
        }
    }
}

/// Rules in the cache. A job with more of them looks up or generates code from time to time.
const KEPT_MAX: usize = 4096;

/// An update of a piece of a float parameter by a rule.
pub(super) struct RuleUpdate<'a, 'b> {
    pub(super) code: &'a Arc<Lowered>,
    /// As [`Lowered::evaluate`] gave them.
    pub(super) scalars: &'a [f64],
    pub(super) width: Width,
    pub(super) weights: &'a mut [u8],
    pub(super) states: &'a mut [&'b mut [u8]],
    pub(super) gradients: &'a [Gradient<'a>],
}

/// Code, and the room it works in.
#[derive(Debug)]
pub(super) struct RuleKernels {
    form: Form,
    /// The most gradients that generated code adds in one call, at most [`GRADIENTS_MAX`].
    at_once: usize,
    kept: Vec<CachedRule>,
    /// Where each of them is.
    places: BTreeMap<RuleKey, usize>,
    /// The entry that ran last.
    recent: usize,
    /// The entry that is evicted next.
    oldest: usize,
    singles: TileSlots<f32>,
    doubles: TileSlots<f64>,
}

/// The address of a cached rule, and the variant of its code.
type RuleKey = (usize, Width, GradientFormat);

#[derive(Debug)]
struct CachedRule {
    code: Arc<Lowered>,
    width: Width,
    source: GradientFormat,
    run: RuleExecution,
}

#[derive(Clone, Debug)]
enum RuleExecution {
    /// With the scalars that it uses, and where it finds them.
    Generated {
        function: Arc<GeneratedFunction>,
        used: Vec<ScalarId>,
        scalars: Vec<u8>,
    },
    Tiles(Arc<TileProgram>),
}

impl CachedRule {
    fn key(&self) -> RuleKey {
        (Arc::as_ptr(&self.code).addr(), self.width, self.source)
    }
}

impl RuleKernels {
    /// In this form, or as tiles where the machine cannot.
    pub(super) fn new(form: Form) -> Self {
        let is_here = form == Form::best() || Form::here().contains(&form);
        Self {
            form: if is_here { form } else { Form::Tiles },
            at_once: native::gradients_at_once(),
            kept: Vec::new(),
            places: BTreeMap::new(),
            recent: 0,
            oldest: 0,
            singles: TileSlots::default(),
            doubles: TileSlots::default(),
        }
    }

    pub(super) fn form(&self) -> Form {
        self.form
    }

    /// Updates in one pass. Gradients of several types, of none, or more than `at_once` are added in tiles first.
    pub(super) fn update(&mut self, update: RuleUpdate<'_, '_>) {
        let one_type = source_of(update.gradients).filter(|_| update.gradients.len() <= self.at_once);
        let source = one_type.unwrap_or(GradientFormat::Own);
        self.find(update.code, update.width, source);
        match &mut self.kept[self.recent].run {
            RuleExecution::Generated { function, used, scalars } => {
                native::write_scalars(update.width, used, update.scalars, scalars);
                let call = GeneratedCall { function, scalars };
                if one_type.is_some() { call.fused(update) } else { call.by_tiles(update) }
            }
            RuleExecution::Tiles(program) => {
                let RuleUpdate { scalars, weights, states, gradients, .. } = update;
                let tensors = tiles::TileTensors { weights, states, gradients, scalars };
                match update.width {
                    Width::Single => program.run(&mut self.singles, tensors),
                    Width::Double => program.run(&mut self.doubles, tensors),
                }
            }
        }
    }

    /// Makes the code of a rule the recent one.
    fn find(&mut self, code: &Arc<Lowered>, width: Width, source: GradientFormat) {
        let is_hit = |kept: &CachedRule| Arc::ptr_eq(&kept.code, code) && kept.width == width && kept.source == source;
        if self.kept.get(self.recent).is_some_and(is_hit) {
            return;
        }
        let known = self.places.get(&(Arc::as_ptr(code).addr(), width, source)).copied();
        self.recent = known.unwrap_or_else(|| self.keep(code, width, source));
    }

    #[cold]
    fn keep(&mut self, code: &Arc<Lowered>, width: Width, source: GradientFormat) -> usize {
        let is_alike =
            |kept: &&CachedRule| kept.width == width && kept.source == source && computes_alike(&kept.code, code);
        let run = self.kept.iter().find(is_alike).map(|kept| kept.run.clone());
        let run = run.unwrap_or_else(|| self.generate(code, width, source));
        let kept = CachedRule { code: Arc::clone(code), width, source, run };
        let key = kept.key();
        let place = if self.kept.len() < KEPT_MAX {
            self.kept.push(kept);
            self.kept.len() - 1
        } else {
            self.oldest = (self.oldest + 1) % KEPT_MAX;
            let gone = std::mem::replace(&mut self.kept[self.oldest], kept);
            self.places.remove(&gone.key());
            self.oldest
        };
        self.places.insert(key, place);
        place
    }

    fn generate(&self, code: &Lowered, width: Width, source: GradientFormat) -> RuleExecution {
        let generated =
            self.form.vectors().and_then(|vectors| GeneratedFunction::new(code, CodeTarget { vectors, width }, source));
        match generated {
            Some(function) => {
                let used = native::used_scalars(code);
                let scalars = native::scalar_room(width, &used);
                RuleExecution::Generated { function: Arc::new(function), scalars, used }
            }
            None => RuleExecution::Tiles(Arc::new(TileProgram::new(code))),
        }
    }
}

/// Whether two rules compute the same of their scalars, so that one's code is the other's.
fn computes_alike(one: &Lowered, other: &Lowered) -> bool {
    let values = |code: &Lowered| code.states().iter().map(|state| state.value).collect::<Vec<_>>();
    one.ops() == other.ops() && one.weight() == other.weight() && values(one) == values(other)
}

/// The type of all gradients, if it is one.
fn source_of(gradients: &[Gradient<'_>]) -> Option<GradientFormat> {
    let first = gradients.first()?.element_type;
    let is_one = gradients.iter().all(|other| other.element_type == first);
    is_one.then_some(match first {
        ElementType::Float16 => GradientFormat::Half,
        ElementType::Bfloat16 => GradientFormat::Brain,
        _ => GradientFormat::Own,
    })
}

/// A generated function with the scalars of one update.
#[derive(Clone, Copy)]
struct GeneratedCall<'a> {
    function: &'a GeneratedFunction,
    scalars: &'a [u8],
}

impl GeneratedCall<'_> {
    fn fused(self, update: RuleUpdate<'_, '_>) {
        let RuleUpdate { weights, states, gradients, .. } = update;
        if let [lone] = gradients {
            return self.run(weights, states, &[lone.bytes]);
        }
        let mut bytes: [&[u8]; GRADIENTS_MAX] = [&[]; GRADIENTS_MAX];
        bytes.iter_mut().zip(gradients).for_each(|(bytes, gradient)| *bytes = gradient.bytes);
        self.run(weights, states, &bytes[..gradients.len()]);
    }

    fn by_tiles(self, update: RuleUpdate<'_, '_>) {
        match update.width {
            Width::Single => self.tile_by_tile::<f32>(update),
            Width::Double => self.tile_by_tile::<f64>(update),
        }
    }

    fn tile_by_tile<E: KernelReal>(self, update: RuleUpdate<'_, '_>) {
        let RuleUpdate { weights, states, gradients, .. } = update;
        let mut scratch = Scratch::<E>::zero();
        let size = size_of::<E>();
        for start in (0..weights.len() / size).step_by(TILE) {
            let length = TILE.min(weights.len() / size - start);
            let sum = &mut scratch.0[..length];
            sum_tile_wide::<E>(sum, gradients, start);
            let piece = start * size..(start + length) * size;
            let count = states.len();
            let mut parts: [&mut [u8]; STATES_MAX] = Default::default();
            for (part, state) in parts.iter_mut().zip(states.iter_mut()) {
                *part = &mut state[piece.clone()];
            }
            self.run(&mut weights[piece], &mut parts[..count], &[E::flat(sum)]);
        }
    }

    fn run(self, weights: &mut [u8], states: &mut [&mut [u8]], gradients: &[&[u8]]) {
        self.function.run(CallTensors { weights, states, gradients, scalars: self.scalars });
    }
}
