//! Session behind a handle: one client, and the settings that an edition's calls do not carry.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::memory::Buffer;

use super::loaded::LoadedProgram;
use super::staged::Staged;
use pserver_client::environment::unknown_variables;
use pserver_client::environment::{Environment, find, of_process};
use pserver_client::{CallNumber, Client, View, console, setting_file};

/// A client behind a handle.
pub(super) struct Session {
    // Declared before the client: the views hold connections of the client.
    views: Mutex<BTreeMap<u64, View>>,
    // Declared before the client: the programs share the client.
    programs: Mutex<BTreeMap<u64, Arc<Mutex<LoadedProgram>>>>,
    pub(super) client: Arc<Client>,
    /// Whether this trainer offers to initialise the parameters. Only edition go can say no.
    pub(super) offers: bool,
    /// The lengths that edition 1's calls do not carry.
    declared: Mutex<BTreeMap<String, Declared>>,
    /// Registered buffers by their start address. Declared after the client, whose calls use the buffers.
    buffers: Mutex<BTreeMap<usize, Buffer>>,
    /// Pages of started calls for contents on a device. Declared after the client, whose calls use the pages.
    staged: Mutex<BTreeMap<CallNumber, Staged>>,
}

#[derive(Clone, Copy)]
struct Declared {
    element_type: ElementType,
    bytes: usize,
}

impl Session {
    pub(super) fn new(client: Client, offers: bool) -> Self {
        Self {
            views: Mutex::default(),
            programs: Mutex::default(),
            client: Arc::new(client),
            offers,
            declared: Mutex::default(),
            buffers: Mutex::default(),
            staged: Mutex::default(),
        }
    }

    /// A client with these options; other settings come from the environment of the process.
    pub(super) fn open(options: &str, offers: bool) -> Result<Self, Failure> {
        let variable = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        let found = find(options, &Environment { variable: &variable, file: &setting_file::open })?;
        if found.is_verbose {
            let warnings = unknown_variables(&of_process());
            let choices = found.choices.iter().map(ToString::to_string);
            choices.chain(warnings).for_each(|line| console::remark(format_args!("libpaddle_pserver: {line}")));
        }
        Ok(Self::new(Client::new(found.options)?, offers))
    }

    /// The buffers that the C program registered.
    pub(super) fn buffers(&self) -> MutexGuard<'_, BTreeMap<usize, Buffer>> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Device contents of calls that were started and not yet waited for.
    pub(super) fn staged(&self) -> MutexGuard<'_, BTreeMap<CallNumber, Staged>> {
        self.staged.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The views that the C program holds, by the bits of their handles.
    pub(super) fn views(&self) -> MutexGuard<'_, BTreeMap<u64, View>> {
        self.views.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The programs that the C program holds, by the bits of their handles.
    pub(super) fn programs(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Mutex<LoadedProgram>>>> {
        self.programs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a parameter's type and its length in bytes.
    pub(super) fn declare(&self, name: &str, element_type: ElementType, bytes: usize) {
        let mut declared = self.declared.lock().unwrap_or_else(PoisonError::into_inner);
        declared.insert(name.to_owned(), Declared { element_type, bytes });
    }

    /// The length in bytes of a parameter that was declared with this type.
    pub(super) fn declared(&self, name: &str, element_type: ElementType) -> Result<usize, Failure> {
        let declared = self.declared.lock().unwrap_or_else(PoisonError::into_inner);
        let known = declared.get(name).ok_or_else(|| {
            Failure::call(format!(
                "parameter \"{name}\": its length is not known, as calls of edition 1 carry none; \
                 expected paddle_declare_param before this call"
            ))
        })?;
        if known.element_type != element_type {
            let expected = known.element_type;
            return Err(Failure::call(format!(
                "parameter \"{name}\": element type {element_type}; expected {expected}, as it was declared"
            )));
        }
        Ok(known.bytes)
    }
}
