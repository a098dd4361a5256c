//! A client of the library with what calls from Python need: the facts of parameters, and the arrays of started calls.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pserver_client::environment::{Environment, ResolvedOptions, find};
use pserver_client::launchers::Launchers;
use pserver_client::{
    CallNumber, CarriedNumbers, Client, DestinationSlice, GradientSlice, ParameterFacts, setting_file,
};
use pserver_core::dtype::{ElementType, Half};
use pserver_core::error::Failure;
use pserver_kernels::cuda::{ForeignMemory, MemoryOwner};

use crate::arrays::{HeldArray, store};
use crate::held::ParameterArrays;

/// A client that is open.
pub(crate) struct PythonSession {
    // Before the arrays: its end returns the memory of all calls.
    client: Client,
    process: u32,
    /// Facts of parameters, whose names are kept for good.
    facts: Mutex<HashMap<&'static str, Arc<ParameterFacts>>>,
    started: Mutex<StartedCalls>,
    /// Registered arrays with their replicas, by address.
    registered: Mutex<BTreeMap<usize, Vec<HeldArray>>>,
}

/// Calls whose result nobody has taken.
#[derive(Default)]
struct StartedCalls {
    /// The arrays of each.
    arrays: BTreeMap<CallNumber, Vec<HeldArray>>,
    /// Calls that the program has dropped without waiting.
    dropped: VecDeque<CallNumber>,
}

impl PythonSession {
    /// A client with these options, and for the rest what the process's environment says.
    pub(crate) fn open(options: &str) -> Result<Self, Failure> {
        let client = Client::new(resolved(options)?.options)?;
        let (process, facts, started) = (std::process::id(), Mutex::default(), Mutex::default());
        Ok(Self { client, process, facts, started, registered: Mutex::default() })
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// Whether this process was forked from the one that made the client.
    pub(crate) fn is_of_parent(&self) -> bool {
        std::process::id() != self.process
    }

    /// Type, length and shape of a parameter, asked for once.
    pub(crate) fn facts(&self, name: &str) -> Result<Arc<ParameterFacts>, Failure> {
        self.known(name).map(|(_, facts)| facts)
    }

    /// The same, with the name for a call that outlives its start.
    fn known(&self, name: &str) -> Result<(&'static str, Arc<ParameterFacts>), Failure> {
        if let Some((name, known)) = locked(&self.facts).get_key_value(name) {
            return Ok((name, Arc::clone(known)));
        }
        let (name, facts) = (name_for_good(name), Arc::new(self.client.describe(name)?));
        locked(&self.facts).insert(name, Arc::clone(&facts));
        Ok((name, facts))
    }

    /// Gradients or values to send, each with the shape of its parameter.
    pub(crate) fn gradients<'a>(
        &self,
        names: &'a [impl AsRef<str>],
        arrays: &'a [HeldArray],
    ) -> Result<Vec<GradientSlice<'a>>, Failure> {
        let given = names.iter().zip(arrays).map(|(name, array)| {
            let name = name.as_ref();
            self.check_shape(name, array)?;
            Ok(GradientSlice { name, element_type: array.element_type(), content: array.contents() })
        });
        given.collect()
    }

    /// Destinations, each with the shape and the type of its parameter; float32 may come as half precision.
    pub(crate) fn destinations<'a>(
        &self,
        names: &'a [impl AsRef<str>],
        arrays: &'a mut [HeldArray],
    ) -> Result<Vec<DestinationSlice<'a>>, Failure> {
        let wanted = names.iter().zip(arrays).map(|(name, array)| {
            let name = name.as_ref();
            let half = self.check_destination(name, array)?;
            Ok(DestinationSlice { name, content: array.contents_mut(), half })
        });
        wanted.collect()
    }

    /// Checks the array for a parameter's value; says whether the value comes in half precision.
    pub(crate) fn check_destination(&self, name: &str, array: &HeldArray) -> Result<Option<Half>, Failure> {
        half_of(name, array, self.check_shape(name, array)?)
    }

    /// Checks the shape of an array; says the type of the parameter.
    pub(crate) fn check_shape(&self, name: &str, array: &HeldArray) -> Result<ElementType, Failure> {
        check_shape(name, array, &*self.facts(name)?)
    }

    /// Starts a push with gradients, a pull with destinations, or both, and holds the arrays until the call is over.
    pub(crate) fn start(
        &self,
        names: &[impl AsRef<str>],
        (gradients, out): (Option<Vec<HeldArray>>, Option<Vec<HeldArray>>),
        numbers: CarriedNumbers<'_>,
    ) -> Result<CallNumber, Failure> {
        let has_out = out.is_some();
        let gradients = gradients.unwrap_or_default();
        let mut out = out.unwrap_or_default();
        let given = self.lasting_gradients(names, &gradients)?;
        let into = self.lasting_destinations(names, &mut out)?;
        let number = match (given.is_empty(), has_out) {
            (false, true) => self.client.start_push_pull(&given, numbers, into),
            (false, false) => self.client.start_push(&given, numbers),
            (true, _) => self.client.start_pull(into),
        }?;
        self.keep(number, gradients.into_iter().chain(out).collect());
        Ok(number)
    }

    /// Starts a push of arrays that are held, a pull into such arrays, or both. A pull sums the values.
    pub(crate) fn start_held(
        &self,
        gradients: Option<&ParameterArrays>,
        out: Option<&ParameterArrays>,
        numbers: CarriedNumbers<'_>,
        is_of_step: bool,
    ) -> Result<CallNumber, Failure> {
        let given = gradients.map(ParameterArrays::take_gradients).transpose()?;
        let wanted = out.map(ParameterArrays::take_destinations).transpose()?;
        let (number, held) = match (given, wanted) {
            (Some((given, arrays)), None) => (self.client.start_push(&given, numbers), arrays),
            (Some((given, mut arrays)), Some((into, destinations))) => {
                arrays.extend(destinations);
                (self.client.start_push_pull_summed(&given, numbers, into), arrays)
            }
            (None, Some((into, arrays))) => (self.client.start_pull_summed(into, is_of_step), arrays),
            (None, None) => {
                return Err(Failure::call("a call without arrays; expected gradients, destinations, or both"));
            }
        };
        let number = number?;
        self.keep(number, held);
        Ok(number)
    }

    /// The arrays for calls about these parameters, each with the shape of its parameter, and destinations with its
    /// type or half precision. Where `is_exact`, none if a shape is written in another way, or a type does not fit.
    pub(crate) fn hold(
        &self,
        names: &[impl AsRef<str>],
        arrays: Vec<HeldArray>,
        (writes, is_exact): (bool, bool),
    ) -> Result<Option<ParameterArrays>, Failure> {
        let mut parameters = Vec::with_capacity(names.len());
        for (name, array) in names.iter().zip(&arrays) {
            let (name, facts) = self.known(name.as_ref())?;
            if is_exact && array.shape() != facts.shape && !(array.shape().is_empty() && facts.shape == [1]) {
                return Ok(None);
            }
            let declared = check_shape(name, array, &facts)?;
            let half = if writes { half_of(name, array, declared) } else { Ok(None) };
            if is_exact && half.is_err() {
                return Ok(None);
            }
            parameters.push((name, half?));
        }
        Ok(Some(ParameterArrays::new(parameters, arrays)))
    }

    /// Starts a push without gradients.
    pub(crate) fn start_pass(&self, names: &[impl AsRef<str>], is_void: bool) -> Result<CallNumber, Failure> {
        let names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
        self.client.start_pass(&names, is_void)
    }

    /// Gradients of a started call.
    fn lasting_gradients(
        &self,
        names: &[impl AsRef<str>],
        arrays: &[HeldArray],
    ) -> Result<Vec<GradientSlice<'static>>, Failure> {
        let given = names.iter().zip(arrays).map(|(name, array)| {
            let (name, facts) = self.known(name.as_ref())?;
            check_shape(name, array, &facts)?;
            Ok(GradientSlice { name, element_type: array.element_type(), content: array.lasting() })
        });
        given.collect()
    }

    /// Destinations of a started call.
    fn lasting_destinations(
        &self,
        names: &[impl AsRef<str>],
        out: &mut [HeldArray],
    ) -> Result<Vec<DestinationSlice<'static>>, Failure> {
        let wanted = names.iter().zip(out).map(|(name, array)| {
            let (name, facts) = self.known(name.as_ref())?;
            let half = half_of(name, array, check_shape(name, array, &facts)?)?;
            Ok(DestinationSlice { name, content: array.lasting_mut(), half })
        });
        wanted.collect()
    }

    /// Registers the memory of an array, and holds it.
    pub(crate) fn register(&self, array: HeldArray, replicas: Vec<HeldArray>) -> Result<(), Failure> {
        let (address, bytes, is_on_device) = array.place();
        if is_on_device && !matches!(ForeignMemory::find(address, bytes)?, MemoryOwner::Device(_)) {
            return Err(Failure::call(format!(
                "{address:#x} is memory of a CUDA device, and CUDA's driver is not loaded in this process, or does not \
                 know it; expected memory of a device of this process, or of the host: .cpu()"
            )));
        }
        if array.stream().is_some() && !replicas.is_empty() {
            return Err(Failure::call(
                "a stream for memory with replicas, which are read behind the default stream of each device; expected \
                 none",
            ));
        }
        self.client.register(address, bytes, array.stream())?;
        let replicated = replicas.iter().try_for_each(|one| {
            let (replica, bytes, _) = one.place();
            self.client.register_replica(address, replica, bytes)
        });
        if replicated.is_err() {
            self.client.unregister(address)?;
            return replicated;
        }
        locked(&self.registered).insert(address, std::iter::once(array).chain(replicas).collect());
        Ok(())
    }

    /// Forgets the memory of an array, and lets go of it.
    pub(crate) fn unregister(&self, address: usize) -> Result<(), Failure> {
        self.client.unregister(address)?;
        let released = locked(&self.registered).remove(&address);
        drop(released);
        Ok(())
    }

    /// Holds the arrays of a call until it is over.
    pub(crate) fn keep(&self, call: CallNumber, held: Vec<HeldArray>) {
        locked(&self.started).arrays.insert(call, held);
        self.sweep();
    }

    /// Writes the values that a call has fetched to the devices of its destinations.
    pub(crate) fn store(&self, call: CallNumber) -> Result<(), Failure> {
        let mut started = locked(&self.started);
        started.arrays.get_mut(&call).map_or(Ok(()), |all| store(all))
    }

    /// Lets go of the arrays of a call whose result was taken.
    pub(crate) fn release(&self, call: CallNumber) {
        let released = locked(&self.started).arrays.remove(&call);
        drop(released);
    }

    /// The program has dropped a call that it did not wait for: its arrays stay until it is over.
    pub(crate) fn drop_call(&self, call: CallNumber) {
        locked(&self.started).dropped.push_back(call);
        self.sweep();
    }

    /// Ends every call and gives the rank up. All memory of the program is its own when this returns.
    pub(crate) fn close(&self) {
        self.client.give_up("the client was closed");
        let released = std::mem::take(&mut locked(&self.started).arrays);
        drop(released);
    }

    fn sweep(&self) {
        // Calls end mostly in the order of their starts, so the oldest is asked about, and not every one each time.
        while let Some(call) = { locked(&self.started).dropped.pop_front() } {
            if !self.client.is_over(call).unwrap_or(false) {
                locked(&self.started).dropped.push_front(call);
                return;
            }
            // The program has dropped the result.
            let _ = self.client.wait(call);
            self.release(call);
        }
    }
}

/// Checks the shape of an array, which may also be flat, or a number; says the type of the parameter.
fn check_shape(name: &str, array: &HeldArray, facts: &ParameterFacts) -> Result<ElementType, Failure> {
    let elements = facts.bytes / facts.element_type.bytes();
    let is_number = array.shape().is_empty() && elements == 1;
    if array.shape() == facts.shape || array.shape() == [elements] || is_number || facts.is_sparse {
        return Ok(facts.element_type);
    }
    Err(Failure::call(format!(
        "parameter \"{name}\": an array of shape {:?}; expected the shape {:?}, or {elements} elements \
         in one dimension",
        array.shape(),
        facts.shape
    )))
}

/// Checks the type of an array for the value of a parameter of type `declared`; says whether the value comes in half
/// precision.
fn half_of(name: &str, array: &HeldArray, declared: ElementType) -> Result<Option<Half>, Failure> {
    let found = array.element_type();
    if found == declared {
        return Ok(None);
    }
    match (declared, Half::of(found)) {
        (ElementType::Float32, Some(half)) => Ok(Some(half)),
        _ => {
            Err(Failure::call(format!("parameter \"{name}\": an array of {found} for its value; expected {declared}")))
        }
    }
}

/// The settings of a client with these options: for the rest, what the process's environment says.
fn resolved(options: &str) -> Result<ResolvedOptions, Failure> {
    find(options, &Environment { variable: &variable, file: &setting_file::open })
}

fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// Whether the environment names server 0; the rank and the number of trainers that it says.
pub(crate) fn launched() -> Result<(bool, Option<u32>, Option<u32>), Failure> {
    let found = resolved("")?;
    let choice = |setting| found.choices.iter().find(|choice| choice.setting == setting);
    let rank = found.options.trainer;
    let size = choice("trainers").map(|choice| {
        let number = choice.text.parse().ok().filter(|number| 0 < *number);
        number.ok_or_else(|| {
            let (origin, text) = (&choice.origin, &choice.text);
            Failure::call(format!("{origin} is {text:?}; expected a number of trainers, 1 or more"))
        })
    });
    let size = size.transpose()?;
    let assumed = Launchers::new(&variable).assumed_address()?.map(|assumed| assumed.origin);
    let is_assumed = choice("coordinator").is_some_and(|choice| Some(&choice.origin) == assumed.as_ref());
    Ok((!found.options.is_coordinator_default && !is_assumed, rank, size))
}

/// A parameter's name for a call that outlives its start. A job has few names, so they are kept.
pub(crate) fn name_for_good(name: &str) -> &'static str {
    static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut names = locked(&NAMES);
    if let Some(known) = names.get(name) {
        return known;
    }
    let kept: &'static str = Box::leak(name.into());
    names.insert(kept);
    kept
}

/// Takes a lock; a thread that panicked has left the value whole.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
