//! Which code runs a rule, and how long it is kept.
//!
//! A shard's chunks have few rules, and each comes behind the same `Arc`, so code is found by that identity: the code
//! of the update before, nearly always; else it is looked up. No lock is taken and nothing is hashed. A rule whose code
//! is kept is kept too, so an identity is never another rule's. Rules that differ in their constants only share code,
//! which is handed its scalars with every update.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use pserver_core::dtype::ElementType;
use pserver_core::limits::STATES_MAX;
use pserver_core::optim::Gradient;
use pserver_core::rule::ssa::{Lowered, ScalarId};

use super::element::{Real, Scratch, TILE};
use super::sum_tile_wide;
use crate::native::{self, Function, GRADIENTS_MAX, Source, Target, Tensors, Vectors, Width};
use crate::tiles::{self, Program, Slots};

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

    /// The fastest that this machine can run; asked once.
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

/// Rules whose code is kept. A job with more of them looks for code, or generates it, now and then.
const KEPT_MAX: usize = 4096;

/// One rule's update of a piece of a parameter of floats.
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
pub(super) struct Rules {
    form: Form,
    kept: Vec<Kept>,
    /// Where each of them is.
    places: BTreeMap<Key, usize>,
    /// Which one ran last.
    recent: usize,
    /// Which one goes when there is no room.
    oldest: usize,
    singles: Slots<f32>,
    doubles: Slots<f64>,
}

/// The address of a rule that is kept, and what it runs on.
type Key = (usize, Width, Source);

#[derive(Debug)]
struct Kept {
    code: Arc<Lowered>,
    width: Width,
    source: Source,
    run: Run,
}

#[derive(Clone, Debug)]
enum Run {
    /// With the scalars that it uses, and where it finds them.
    Generated {
        function: Arc<Function>,
        used: Vec<ScalarId>,
        scalars: Vec<u8>,
    },
    Tiles(Arc<Program>),
}

impl Kept {
    fn key(&self) -> Key {
        (Arc::as_ptr(&self.code).addr(), self.width, self.source)
    }
}

impl Rules {
    /// In this form, or as tiles where the machine cannot.
    pub(super) fn new(form: Form) -> Self {
        let is_here = form == Form::best() || Form::here().contains(&form);
        Self {
            form: if is_here { form } else { Form::Tiles },
            kept: Vec::new(),
            places: BTreeMap::new(),
            recent: 0,
            oldest: 0,
            singles: Slots::default(),
            doubles: Slots::default(),
        }
    }

    pub(super) fn form(&self) -> Form {
        self.form
    }

    /// Updates in one pass, or, with gradients of several types or of none or of very many, tile by tile on their sum.
    pub(super) fn update(&mut self, update: RuleUpdate<'_, '_>) {
        let one_type = source_of(update.gradients);
        let source = one_type.unwrap_or(Source::Own);
        self.find(update.code, update.width, source);
        match &mut self.kept[self.recent].run {
            Run::Generated { function, used, scalars } => {
                native::write_scalars(update.width, used, update.scalars, scalars);
                let call = Call { function, scalars };
                if one_type.is_some() { call.fused(update) } else { call.by_tiles(update) }
            }
            Run::Tiles(program) => {
                let RuleUpdate { scalars, weights, states, gradients, .. } = update;
                let tensors = tiles::Tensors { weights, states, gradients, scalars };
                match update.width {
                    Width::Single => program.run(&mut self.singles, tensors),
                    Width::Double => program.run(&mut self.doubles, tensors),
                }
            }
        }
    }

    /// Makes the code of a rule the recent one.
    fn find(&mut self, code: &Arc<Lowered>, width: Width, source: Source) {
        let is_it = |kept: &Kept| Arc::ptr_eq(&kept.code, code) && kept.width == width && kept.source == source;
        if self.kept.get(self.recent).is_some_and(is_it) {
            return;
        }
        let known = self.places.get(&(Arc::as_ptr(code).addr(), width, source)).copied();
        self.recent = known.unwrap_or_else(|| self.keep(code, width, source));
    }

    #[cold]
    fn keep(&mut self, code: &Arc<Lowered>, width: Width, source: Source) -> usize {
        let is_alike = |kept: &&Kept| kept.width == width && kept.source == source && computes_alike(&kept.code, code);
        let run = self.kept.iter().find(is_alike).map(|kept| kept.run.clone());
        let run = run.unwrap_or_else(|| self.generate(code, width, source));
        let kept = Kept { code: Arc::clone(code), width, source, run };
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

    fn generate(&self, code: &Lowered, width: Width, source: Source) -> Run {
        let generated = self.form.vectors().and_then(|vectors| Function::new(code, Target { vectors, width }, source));
        match generated {
            Some(function) => {
                let used = native::used_scalars(code);
                let scalars = native::scalar_room(width, &used);
                Run::Generated { function: Arc::new(function), scalars, used }
            }
            None => Run::Tiles(Arc::new(Program::new(code))),
        }
    }
}

/// Whether two rules compute the same of their scalars, so that one's code is the other's.
fn computes_alike(one: &Lowered, other: &Lowered) -> bool {
    let values = |code: &Lowered| code.states().iter().map(|state| state.value).collect::<Vec<_>>();
    one.ops() == other.ops() && one.weight() == other.weight() && values(one) == values(other)
}

/// The one type of all gradients, when one call can take them.
fn source_of(gradients: &[Gradient<'_>]) -> Option<Source> {
    let first = gradients.first()?.element_type;
    let is_one = gradients.len() <= GRADIENTS_MAX && gradients.iter().all(|other| other.element_type == first);
    is_one.then_some(match first {
        ElementType::Float16 => Source::Half,
        ElementType::Bfloat16 => Source::Brain,
        _ => Source::Own,
    })
}

/// A generated function with the scalars of one update.
#[derive(Clone, Copy)]
struct Call<'a> {
    function: &'a Function,
    scalars: &'a [u8],
}

impl Call<'_> {
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

    fn tile_by_tile<E: Real>(self, update: RuleUpdate<'_, '_>) {
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
        self.function.run(Tensors { weights, states, gradients, scalars: self.scalars });
    }
}
