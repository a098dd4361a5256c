//! Choice of the kernel for a chunk.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::port::{DeviceCode, NotAdopted};
use pserver_core::rule::ssa::Lowered;

use super::arguments::{SumMode, squares_entry, sum_entry};
use super::cache::Cache;
use super::checked::DriverError;
use super::emit::Emitted;
use super::safe::{Compiler, CudaContext, CudaModule, KernelFunction};
use super::sys::{CUDA_ERROR_NOT_FOUND, CUDA_ERROR_OUT_OF_MEMORY};
use super::{shipped, source};

/// The kernel of a chunk's update, and the layout of its numbers.
#[derive(Clone)]
pub(super) struct UpdateKernel {
    pub(super) entry: KernelFunction,
    pub(super) numbers: NumbersLayout,
}

/// The layout of an update's numbers in device memory.
#[derive(Clone)]
pub(super) enum NumbersLayout {
    /// No numbers.
    None(SumMode),
    /// A scale, in the parameter's type.
    Scale(SumMode),
    /// The scalars that a rule uses, in the parameter's type.
    Scalars(Arc<Emitted>),
}

/// The shipped binary that a driver took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShippedImage {
    /// The binary for compute capability 9.
    Cubin,
    /// The text, which the driver compiled.
    Ptx,
}

impl fmt::Display for ShippedImage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Cubin => "cubin",
            Self::Ptx => "PTX",
        })
    }
}

/// The kernels of a device, loaded on first use.
pub(super) struct KernelLoader {
    shipped: Arc<CudaModule>,
    image: ShippedImage,
    made: CompiledModules,
    /// The rules of chunks, the most recent last: a parameter's chunks are adopted in sequence, and share one.
    emitted: Vec<(Arc<Lowered>, Arc<Emitted>)>,
    /// The kernels of rules by name, or the reason why there is none. Rules that differ only in numbers share one.
    entries: BTreeMap<String, Result<KernelFunction, String>>,
}

/// Modules compiled at run time, where the host has NVRTC, with a disk cache.
pub(super) struct CompiledModules {
    context: Arc<CudaContext>,
    cache: Option<Cache>,
}

impl NumbersLayout {
    /// The kernel's operation on the sum; a rule has its own.
    pub(super) fn merge(&self) -> SumMode {
        match self {
            Self::None(merge) | Self::Scale(merge) => *merge,
            Self::Scalars(_) => SumMode::Sum,
        }
    }

    /// Writes one update's numbers in the kernel's layout, replacing the content of `into`.
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

impl KernelLoader {
    /// Loads the shipped kernels. Other rules are compiled, and cached in this folder.
    ///
    /// # Errors
    /// [`Failure::Call`] when the driver does not load them; without memory for them, names the bytes.
    pub(super) fn new(context: &Arc<CudaContext>, cache: Option<&Path>) -> Result<Self, Failure> {
        let (shipped, image) = load_shipped(context, None)?;
        let made = CompiledModules::new(context, cache);
        Ok(Self { shipped, image, made, emitted: Vec::new(), entries: BTreeMap::new() })
    }

    /// The shipped binary that the driver took.
    pub(super) fn image(&self) -> ShippedImage {
        self.image
    }

    /// The kernel that adds gradients of this parameter's type.
    pub(super) fn sum(&self, element_type: ElementType) -> Result<KernelFunction, NotAdopted> {
        let name = sum_entry(element_type)
            .ok_or_else(|| Failure::call(format!("a parameter of {element_type}; it can be a gradient only")))?;
        self.shipped.entry(name).map_err(|error| self.refused(name, &error))
    }

    /// The kernel that makes the sums of squares of a sum of this type.
    pub(super) fn squares(&self, element_type: ElementType) -> Result<KernelFunction, NotAdopted> {
        let name = squares_entry(element_type)
            .ok_or_else(|| Failure::call(format!("a sum of {element_type} to keep; expected float32 or float64")))?;
        self.shipped.entry(name).map_err(|error| self.refused(name, &error))
    }

    /// The kernel for a chunk.
    ///
    /// # Errors
    /// When there is no kernel and none can be compiled, with the reason. When the device has no memory for it, with
    /// the free bytes.
    pub(super) fn program(&mut self, code: &DeviceCode, element_type: ElementType) -> Result<UpdateKernel, NotAdopted> {
        let merge = match code {
            DeviceCode::Add => SumMode::Add,
            DeviceCode::Sum => SumMode::Scale,
            DeviceCode::Rule(rule) => return self.rule(rule, element_type),
        };
        let numbers = if element_type.is_float() { NumbersLayout::Scale(merge) } else { NumbersLayout::None(merge) };
        Ok(UpdateKernel { entry: self.sum(element_type)?, numbers })
    }

    /// Forgets the rules of a job and unloads the modules compiled for them.
    pub(super) fn clear(&mut self) {
        self.emitted.clear();
        self.entries.clear();
    }

    fn rule(&mut self, rule: &Arc<Lowered>, element_type: ElementType) -> Result<UpdateKernel, NotAdopted> {
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
        Ok(UpdateKernel { entry: entry.map_err(NotAdopted::Unfit)?, numbers: NumbersLayout::Scalars(emitted) })
    }

    fn emitted(&mut self, rule: &Arc<Lowered>) -> Arc<Emitted> {
        if let Some((_, emitted)) = self.emitted.iter().rev().find(|(other, _)| Arc::ptr_eq(other, rule)) {
            return Arc::clone(emitted);
        }
        let emitted = Arc::new(Emitted::of(rule));
        self.emitted.push((Arc::clone(rule), Arc::clone(&emitted)));
        emitted
    }

    /// The shipped kernel, or a compiled one; the inner error says why the rule has none. Other refusals of the driver
    /// are not properties of the rule and are not remembered.
    fn find(
        &self,
        rule: &Emitted,
        element_type: ElementType,
        name: &str,
    ) -> Result<Result<KernelFunction, String>, NotAdopted> {
        match self.shipped.entry(name) {
            Ok(entry) => return Ok(Ok(entry)),
            Err(error) if error.code == CUDA_ERROR_NOT_FOUND => {}
            Err(error) => return Err(self.refused(name, &error)),
        }
        match self.made.of(&source::ModuleSource::of_update(rule, element_type)) {
            Ok(module) => module.entry(name).map(Ok).map_err(|error| self.refused(name, &error)),
            Err(ModuleError::Compiled(why)) => {
                Ok(Err(format!("the rule has no shipped kernel, and cannot be compiled: {why}")))
            }
            Err(ModuleError::Loaded(error, bytes)) if error.code == CUDA_ERROR_OUT_OF_MEMORY => {
                Err(NotAdopted::Full(no_room(&self.made.context, &format!("kernel {name}"), bytes, &error)))
            }
            Err(ModuleError::Loaded(error, _)) => Err(self.refused(name, &error)),
        }
    }

    /// The failure for a kernel that the driver refused. The driver may load a kernel lazily and lack memory only then.
    fn refused(&self, name: &str, error: &DriverError) -> NotAdopted {
        match self.made.context.memory() {
            Ok((free, total)) if error.code == CUDA_ERROR_OUT_OF_MEMORY => NotAdopted::Full(format!(
                "memory of CUDA device {}: kernel {name} found no room, {free} of {total} are free: {error}",
                self.made.context.properties().ordinal
            )),
            _ => NotAdopted::Unfit(format!("kernel {name}: {error}")),
        }
    }
}

/// The reason why there is no module for a source.
#[derive(Debug)]
pub(super) enum ModuleError {
    /// It cannot be compiled here, now or later.
    Compiled(String),
    /// The driver did not load it, which may pass; with its length in bytes.
    Loaded(DriverError, usize),
}

impl fmt::Display for ModuleError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Compiled(why) => write!(formatter, "compiled: {why}"),
            Self::Loaded(error, _) => write!(formatter, "loaded: {error}"),
        }
    }
}

impl CompiledModules {
    /// Compiled modules for this device, cached in this folder.
    pub(super) fn new(context: &Arc<CudaContext>, folder: Option<&Path>) -> Self {
        Self { context: Arc::clone(context), cache: folder.and_then(Cache::new) }
    }

    /// The module for a source: cached by an earlier run, or compiled now.
    pub(super) fn of(&self, text: &source::ModuleSource) -> Result<Arc<CudaModule>, ModuleError> {
        let compiler = Compiler::find().map_err(|why| ModuleError::Compiled(why.to_string()))?;
        let architecture = architecture(&self.context);
        let name = cache_name(text, &architecture, compiler);
        if let Some(image) = self.cache.as_ref().and_then(|cache| cache.get(&name)) {
            match CudaModule::load(&self.context, &image) {
                Ok(module) => return Ok(module),
                Err(error) if error.code == CUDA_ERROR_OUT_OF_MEMORY => {
                    return Err(ModuleError::Loaded(error, image.len()));
                }
                Err(error) => tracing::warn!(%error, name, "a cached compiled module cannot be loaded"),
            }
        }
        let compiled = compiler.compile(text.text(), &options(&architecture));
        let image = compiled.map_err(|why| ModuleError::Compiled(why.to_string()))?;
        let loaded = CudaModule::load(&self.context, &image);
        // The binary is good even if there is no memory for it now, so it is cached.
        if let Some(cache) = &self.cache
            && loaded.as_ref().err().is_none_or(|error| error.code == CUDA_ERROR_OUT_OF_MEMORY)
        {
            cache.put(&name, &image);
        }
        loaded.map_err(|error| ModuleError::Loaded(error, image.len()))
    }
}

/// The compute architecture that code is compiled for.
fn architecture(context: &CudaContext) -> String {
    let (major, minor) = context.properties().capability;
    format!("sm_{major}{minor}")
}

/// Compiler options: products and sums are not contracted.
fn options(architecture: &str) -> [String; 3] {
    [format!("--gpu-architecture={architecture}"), "--fmad=false".into(), "--std=c++17".into()]
}

/// The name of a compiled source in the cache.
fn cache_name(text: &source::ModuleSource, architecture: &str, compiler: Compiler) -> String {
    let (major, minor) = compiler.version();
    format!("{}-{architecture}-nvrtc{major}.{minor}.cubin", text.digest())
}

/// Compiles sources for an architecture, such as `sm_90`, into a folder of compiled rules. Only the compiler's library
/// is needed, not a device: a device finds the results in that folder if the compiler there has the same version.
///
/// # Errors
/// [`Failure::Call`] when there is no compiler, it refuses a source, or the folder cannot be used.
pub fn compile_ahead(
    sources: impl IntoIterator<Item = source::ModuleSource>,
    architecture: &str,
    folder: &Path,
) -> Result<(), Failure> {
    let compiler = Compiler::find().map_err(Failure::call)?;
    let refused = || Failure::call(format!("{}: compiled rules cannot be kept there", folder.display()));
    let cache = Cache::new(folder).ok_or_else(refused)?;
    for text in sources {
        let name = cache_name(&text, architecture, compiler);
        if cache.get(&name).is_none() {
            cache.put(&name, &compiler.compile(text.text(), &options(architecture)).map_err(Failure::call)?);
            cache.get(&name).ok_or_else(refused)?;
        }
    }
    Ok(())
}

/// The error text for a module that found no memory.
fn no_room(context: &CudaContext, what: &str, bytes: usize, error: &DriverError) -> String {
    let ordinal = context.properties().ordinal;
    let (free, total) = context.memory().unwrap_or((0, 0));
    format!(
        "memory of CUDA device {ordinal}: {what}: {bytes} bytes of kernels were to be loaded, {free} of {total} are \
         free: {error}"
    )
}

/// The committed kernels: the cubin for compute capability 9, else the PTX, which the driver compiles; or the image
/// that is wanted.
///
/// # Errors
/// [`Failure::Call`] with the driver's refusal, and the bytes where it had no memory.
pub(super) fn load_shipped(
    context: &Arc<CudaContext>,
    wanted: Option<ShippedImage>,
) -> Result<(Arc<CudaModule>, ShippedImage), Failure> {
    let refused = |image: &[u8], error: &DriverError| {
        let ordinal = context.properties().ordinal;
        let room = match context.memory() {
            Ok((free, total)) if error.code == CUDA_ERROR_OUT_OF_MEMORY => {
                format!("{} bytes of kernels were to be loaded, {free} of {total} are free: ", image.len())
            }
            _ => String::new(),
        };
        Failure::call(format!("CUDA device {ordinal}: {room}{error}"))
    };
    if context.properties().capability.0 == 9 && wanted != Some(ShippedImage::Ptx) {
        let cubin = shipped::cubin();
        match CudaModule::load(context, &cubin) {
            Ok(module) => return Ok((module, ShippedImage::Cubin)),
            Err(error) if error.code == CUDA_ERROR_OUT_OF_MEMORY => return Err(refused(&cubin, &error)),
            Err(error) => tracing::warn!(%error, "the driver does not take the cubin, and compiles the PTX"),
        }
    }
    let ptx = shipped::ptx();
    let module = CudaModule::load(context, &ptx).map_err(|error| refused(&ptx, &error))?;
    Ok((module, ShippedImage::Ptx))
}
