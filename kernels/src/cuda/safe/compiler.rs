//! NVRTC, the run-time compiler, where the host has it.

use std::ffi::{CString, c_char};
use std::ptr;
use std::sync::OnceLock;

use super::context::driver_version;
use crate::cuda::sys::{self, Compiler as Library, ResultCode, nvrtcProgram};

/// NVRTC's success code.
const SUCCESS: ResultCode = 0;

/// The compiler's library.
#[derive(Clone, Copy)]
pub(in crate::cuda) struct Compiler {
    library: Library,
    version: (u32, u32),
}

/// A program of the compiler, destroyed when this is dropped.
struct NvrtcProgram {
    library: Library,
    handle: nvrtcProgram,
}

impl Compiler {
    /// The compiler, loaded once; or the reason why there is none.
    pub(in crate::cuda) fn find() -> Result<Self, String> {
        static COMPILER: OnceLock<Result<Compiler, String>> = OnceLock::new();
        COMPILER.get_or_init(load).clone()
    }

    /// Its version.
    pub(in crate::cuda) fn version(self) -> (u32, u32) {
        self.version
    }

    /// Compiles a source to a cubin; the error has the compiler's log.
    pub(in crate::cuda) fn compile(self, text: &str, options: &[String]) -> Result<Vec<u8>, String> {
        let library = self.library;
        let source = CString::new(text).map_err(|_| "the text has a zero in it".to_owned())?;
        let mut handle = ptr::null_mut();
        let (none, no_names) = (ptr::null(), ptr::null());
        // SAFETY: `handle` is there to be written, the text ends with a zero, and there are no headers.
        let code = unsafe {
            (library.nvrtcCreateProgram)(&raw mut handle, source.as_ptr(), c"rule.cu".as_ptr(), 0, none, no_names)
        };
        called("nvrtcCreateProgram", code)?;
        let program = NvrtcProgram { library, handle };
        let options = options.iter().map(|option| CString::new(option.as_str()));
        let options: Vec<CString> = options.collect::<Result<_, _>>().map_err(|error| error.to_string())?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let count = i32::try_from(pointers.len()).expect("there are a few options");
        // SAFETY: the program is there, and so are as many options.
        let code = unsafe { (library.nvrtcCompileProgram)(handle, count, pointers.as_ptr()) };
        called("nvrtcCompileProgram", code).map_err(|error| format!("{error}: {}", program.log()))?;
        program.image()
    }
}

impl NvrtcProgram {
    fn image(&self) -> Result<Vec<u8>, String> {
        let mut bytes = 0;
        // SAFETY: `bytes` is there to be written, and the program was compiled.
        called("nvrtcGetCUBINSize", unsafe { (self.library.nvrtcGetCUBINSize)(self.handle, &raw mut bytes) })?;
        let mut image = vec![0_u8; bytes];
        // SAFETY: as many bytes are there to be written as the library has.
        let code = unsafe { (self.library.nvrtcGetCUBIN)(self.handle, image.as_mut_ptr().cast::<c_char>()) };
        called("nvrtcGetCUBIN", code)?;
        Ok(image)
    }

    /// The compiler's log, as far as it is available.
    fn log(&self) -> String {
        let mut bytes = 0;
        // SAFETY: `bytes` is there to be written, and the program is there.
        let code = unsafe { (self.library.nvrtcGetProgramLogSize)(self.handle, &raw mut bytes) };
        let mut log = vec![0_u8; bytes];
        if code == SUCCESS {
            // SAFETY: as many bytes are there to be written as the library has.
            let _ = unsafe { (self.library.nvrtcGetProgramLog)(self.handle, log.as_mut_ptr().cast::<c_char>()) };
        }
        String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned()
    }
}

impl Drop for NvrtcProgram {
    fn drop(&mut self) {
        // SAFETY: the program was created once, and this is its owner.
        let _ = unsafe { (self.library.nvrtcDestroyProgram)(&raw mut self.handle) };
    }
}

/// The first library whose code the driver loads: one of the driver's major version or older. Without a driver, the
/// first one.
fn load() -> Result<Compiler, String> {
    let driver = driver_version();
    let mut why = None;
    for library in sys::compilers() {
        // It is never unloaded: programs of it may exist anywhere.
        match at(Box::leak(Box::new(library))) {
            Ok(Compiler { version: (major, minor), .. }) if driver.is_some_and(|(most, _)| most < major) => {
                let (most, least) = driver.expect("there is one");
                why.get_or_insert(format!(
                    "libnvrtc is of CUDA {major}.{minor}, and the driver of CUDA {most}.{least} does not load what it \
                     compiles; expected libnvrtc.so.{most}"
                ));
            }
            Ok(compiler) => return Ok(compiler),
            Err(refused) => drop(why.get_or_insert(refused)),
        }
    }
    Err(why.unwrap_or_else(|| {
        let names = sys::COMPILER_NAMES.join(", ");
        format!("libnvrtc, which compiles rules for the device, was not found; looked for {names}")
    }))
}

fn at(library: &'static libloading::Library) -> Result<Compiler, String> {
    let library = Library::load(library).map_err(|symbol| format!("libnvrtc is too old: it has no {symbol}"))?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both are there to be written.
    called("nvrtcVersion", unsafe { (library.nvrtcVersion)(&raw mut major, &raw mut minor) })?;
    let version = (u32::try_from(major).unwrap_or(0), u32::try_from(minor).unwrap_or(0));
    Ok(Compiler { library, version })
}

fn called(call: &str, code: ResultCode) -> Result<(), String> {
    if code == SUCCESS { Ok(()) } else { Err(format!("{call}: error {code}")) }
}
