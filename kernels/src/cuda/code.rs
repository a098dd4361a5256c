//! Which kernel runs for a chunk.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::port::{Code, NotAdopted};
use pserver_core::rule::ssa::Lowered;

use super::arguments::{Merge, squares_entry, sum_entry};
use super::cache::Cache;
use super::checked::Refused;
use super::emit::Emitted;
use super::safe::{Compiler, Context, Entry, Module};
use super::sys::{CUDA_ERROR_NOT_FOUND, CUDA_ERROR_OUT_OF_MEMORY};
use super::{shipped, source};

/// What is launched for a chunk's update, and how its numbers are handed over.
#[derive(Clone)]
pub(super) struct Program {
    pub(super) entry: Entry,
    pub(super) numbers: Numbers,
}

/// What the numbers of an update become in the device's memory.
#[derive(Clone)]
pub(super) enum Numbers {
    /// Nothing.
    None(Merge),
    /// A scale, in the parameter's type.
    Scale(Merge),
    /// The scalars that a rule uses, in the parameter's type.
    Scalars(Arc<Emitted>),
}

/// The kernels of a device, loaded when they are first needed.
pub(super) struct Kernels {
    shipped: Arc<Module>,
    made: Made,
    /// The rules of chunks, the last one last: a parameter's chunks come one behind the other, and share one.
    emitted: Vec<(Arc<Lowered>, Arc<Emitted>)>,
    /// The kernels of rules by their names, or why there is none. Rules that differ only in numbers have one.
    entries: BTreeMap<String, Result<Entry, String>>,
}

/// Modules that are made of texts where the host has a compiler, and kept between runs.
pub(super) struct Made {
    context: Arc<Context>,
    cache: Option<Cache>,
}

impl Numbers {
    /// What the sum becomes; a rule says that itself.
    pub(super) fn merge(&self) -> Merge {
        match self {
            Self::None(merge) | Self::Scale(merge) => *merge,
            Self::Scalars(_) => Merge::Sum,
        }
    }

    /// Writes one update's numbers as the kernel takes them, in place of what `into` held.
    #[expect(clippy::cast_possible_truncation, reason = "the scale is rounded to the parameter's type")]
    pub(super) fn pack(&self, element_type: ElementType, numbers: &[f64], into: &mut Vec<u8>) {
        into.clear();
        match (self, element_type) {
            (Self::None(_), _) => {}
            (Self::Scale(_), ElementType::Float32) => into.extend((numbers[0] as f32).to_le_bytes()),
            (Self::Scale(_), _) => into.extend(numbers[0].to_le_bytes()),
            (Self::Scalars(emitted), _) => emitted.pack(element_type, numbers, into),
        }
    }
}

impl Kernels {
    /// Loads what is shipped. Rules that are not among it are compiled, and kept in this folder.
    ///
    /// # Errors
    /// [`Failure::Call`] when the driver does not load them; where it has no memory for them, names the bytes.
    pub(super) fn new(context: &Arc<Context>, cache: Option<&Path>) -> Result<Self, Failure> {
        Ok(Self {
            shipped: load_shipped(context)?,
            made: Made::new(context, cache),
            emitted: Vec::new(),
            entries: BTreeMap::new(),
        })
    }

    /// The kernel that adds gradients of this parameter's type.
    pub(super) fn sum(&self, element_type: ElementType) -> Result<Entry, NotAdopted> {
        let name = sum_entry(element_type)
            .ok_or_else(|| Failure::call(format!("a parameter of {element_type}; it can be a gradient only")))?;
        self.shipped.entry(name).map_err(|error| self.refused(name, &error))
    }

    /// The kernel that makes the sums of squares of a sum of this type.
    pub(super) fn squares(&self, element_type: ElementType) -> Result<Entry, NotAdopted> {
        let name = squares_entry(element_type)
            .ok_or_else(|| Failure::call(format!("a sum of {element_type} to keep; expected float32 or float64")))?;
        self.shipped.entry(name).map_err(|error| self.refused(name, &error))
    }

    /// What runs for a chunk.
    ///
    /// # Errors
    /// When there is no kernel for it, and none can be made; says why. When the device has no memory for it, how much
    /// is free.
    pub(super) fn program(&mut self, code: &Code, element_type: ElementType) -> Result<Program, NotAdopted> {
        let merge = match code {
            Code::Add => Merge::Add,
            Code::Sum => Merge::Scale,
            Code::Rule(rule) => return self.rule(rule, element_type),
        };
        let numbers = if element_type.is_float() { Numbers::Scale(merge) } else { Numbers::None(merge) };
        Ok(Program { entry: self.sum(element_type)?, numbers })
    }

    /// Forgets the rules of a job, and gives up the modules that were made for them.
    pub(super) fn clear(&mut self) {
        self.emitted.clear();
        self.entries.clear();
    }

    fn rule(&mut self, rule: &Arc<Lowered>, element_type: ElementType) -> Result<Program, NotAdopted> {
        if !matches!(element_type, ElementType::Float32 | ElementType::Float64) {
            return Err(NotAdopted::Unfit(format!("a rule for {element_type}; expected float32 or float64")));
        }
        let emitted = self.emitted(rule);
        let name = emitted.update_entry(element_type);
        let entry = match self.entries.get(&name) {
            Some(known) => known.clone(),
            None => {
                let found = self.find(&emitted, element_type, &name)?;
                self.entries.insert(name, found.clone());
                found
            }
        };
        Ok(Program { entry: entry.map_err(NotAdopted::Unfit)?, numbers: Numbers::Scalars(emitted) })
    }

    fn emitted(&mut self, rule: &Arc<Lowered>) -> Arc<Emitted> {
        if let Some((_, emitted)) = self.emitted.iter().rev().find(|(other, _)| Arc::ptr_eq(other, rule)) {
            return Arc::clone(emitted);
        }
        let emitted = Arc::new(Emitted::of(rule));
        self.emitted.push((Arc::clone(rule), Arc::clone(&emitted)));
        emitted
    }

    /// The kernel that is shipped, or one that is made; or why it cannot be. What the driver refuses otherwise is not
    /// of the rule, and is not kept.
    fn find(&self, rule: &Emitted, element_type: ElementType, name: &str) -> Result<Result<Entry, String>, NotAdopted> {
        match self.shipped.entry(name) {
            Ok(entry) => return Ok(Ok(entry)),
            Err(error) if error.code == CUDA_ERROR_NOT_FOUND => {}
            Err(error) => return Err(self.refused(name, &error)),
        }
        match self.made.of(&source::Module::of_update(rule, element_type)) {
            Ok(module) => module.entry(name).map(Ok).map_err(|error| self.refused(name, &error)),
            Err(Unmade::Compiled(why)) => {
                Ok(Err(format!("the rule is not one of the kernels that are shipped, and cannot be compiled: {why}")))
            }
            Err(Unmade::Loaded(error, bytes)) if error.code == CUDA_ERROR_OUT_OF_MEMORY => {
                Err(NotAdopted::Full(no_room(&self.made.context, &format!("kernel {name}"), bytes, &error)))
            }
            Err(Unmade::Loaded(error, _)) => Err(self.refused(name, &error)),
        }
    }

    /// What the driver says of a kernel. It may load one only when it is asked for it, and then lack the memory.
    fn refused(&self, name: &str, error: &Refused) -> NotAdopted {
        match self.made.context.memory() {
            Ok((free, total)) if error.code == CUDA_ERROR_OUT_OF_MEMORY => NotAdopted::Full(format!(
                "memory of CUDA device {}: kernel {name} found no room, {free} of {total} are free: {error}",
                self.made.context.properties().ordinal
            )),
            _ => NotAdopted::Unfit(format!("kernel {name}: {error}")),
        }
    }
}

/// Why there is no module of a text.
#[derive(Debug)]
pub(super) enum Unmade {
    /// It cannot be compiled here, now or later; why.
    Compiled(String),
    /// The driver does not load it, which may pass; and how many bytes it has.
    Loaded(Refused, usize),
}

impl fmt::Display for Unmade {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Compiled(why) => write!(formatter, "compiled: {why}"),
            Self::Loaded(error, _) => write!(formatter, "loaded: {error}"),
        }
    }
}

impl Made {
    /// For this device, kept in this folder.
    pub(super) fn new(context: &Arc<Context>, folder: Option<&Path>) -> Self {
        Self { context: Arc::clone(context), cache: folder.and_then(Cache::new) }
    }

    /// The module of a text: kept from an earlier run, or compiled now; else what it cannot be, and why.
    pub(super) fn of(&self, text: &source::Module) -> Result<Arc<Module>, Unmade> {
        let compiler = Compiler::find().map_err(|why| Unmade::Compiled(why.to_string()))?;
        let (major, minor) = compiler.version();
        let name = format!("{}-{}-nvrtc{major}.{minor}.cubin", text.digest(), architecture(&self.context));
        if let Some(image) = self.cache.as_ref().and_then(|cache| cache.get(&name)) {
            match Module::load(&self.context, &image) {
                Ok(module) => return Ok(module),
                Err(error) if error.code == CUDA_ERROR_OUT_OF_MEMORY => return Err(Unmade::Loaded(error, image.len())),
                Err(error) => tracing::warn!(%error, name, "a compiled module that was kept cannot be loaded"),
            }
        }
        let compiled = compiler.compile(text.text(), &options(&self.context));
        let image = compiled.map_err(|why| Unmade::Compiled(why.to_string()))?;
        let loaded = Module::load(&self.context, &image);
        // Compiled it is, whether there is room for it now or not.
        if let Some(cache) = &self.cache
            && loaded.as_ref().err().is_none_or(|error| error.code == CUDA_ERROR_OUT_OF_MEMORY)
        {
            cache.put(&name, &image);
        }
        loaded.map_err(|error| Unmade::Loaded(error, image.len()))
    }
}

/// What the device's code is compiled for.
fn architecture(context: &Context) -> String {
    let (major, minor) = context.properties().capability;
    format!("sm_{major}{minor}")
}

/// How a text is compiled: no product is fused with a sum.
fn options(context: &Context) -> [String; 3] {
    [format!("--gpu-architecture={}", architecture(context)), "--fmad=false".into(), "--std=c++17".into()]
}

/// For which module there was no room, and how much there is.
fn no_room(context: &Context, what: &str, bytes: usize, error: &Refused) -> String {
    let ordinal = context.properties().ordinal;
    let (free, total) = context.memory().unwrap_or((0, 0));
    format!(
        "memory of CUDA device {ordinal}: {what}: {bytes} bytes of kernels were to be loaded, {free} of {total} are \
         free: {error}"
    )
}

/// The committed kernels: those for the device itself, or those that the driver compiles.
///
/// # Errors
/// [`Failure::Call`] with what the driver refused; where it has no memory for them, names the bytes.
pub(super) fn load_shipped(context: &Arc<Context>) -> Result<Arc<Module>, Failure> {
    let refused = |image: &[u8], error: &Refused| {
        let ordinal = context.properties().ordinal;
        let room = match context.memory() {
            Ok((free, total)) if error.code == CUDA_ERROR_OUT_OF_MEMORY => {
                format!("{} bytes of kernels were to be loaded, {free} of {total} are free: ", image.len())
            }
            _ => String::new(),
        };
        Failure::call(format!("CUDA device {ordinal}: {room}{error}"))
    };
    if context.properties().capability.0 == 9 {
        match Module::load(context, shipped::CUBIN) {
            Ok(module) => return Ok(module),
            Err(error) if error.code == CUDA_ERROR_OUT_OF_MEMORY => return Err(refused(shipped::CUBIN, &error)),
            Err(error) => tracing::warn!(%error, "the driver does not take the cubin, and compiles the PTX"),
        }
    }
    Module::load(context, shipped::PTX).map_err(|error| refused(shipped::PTX, &error))
}
