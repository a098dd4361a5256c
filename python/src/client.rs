//! The client: calls with lists of names and arrays.
//!
//! A call takes its arrays with the interpreter attached, and runs detached. A list of names and a list of arrays have
//! one entry for each parameter.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use pserver_client::{CallNumber, GivenValue, GradientSlice, StateSlice, StateTensor, TableProgress, rule_file};
use pserver_core::config::{Mode, OptimizerSettings};
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::ids::Version;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::PyBytes;

use crate::arrays::{Access, GivenStream, HeldArray, ParameterName, Staging, arrays, plain_tensors, store};
use crate::carried::RawNumbers;
use crate::errors::{outcome, refused};
use crate::held::ParameterArrays;
use crate::rows::{RowArrays, row_ids, start_rows};
use crate::session::{PythonSession, locked};
use crate::started::RawCall;
use crate::tensors::LibraryTensor;

/// A client of a job, until it is closed.
#[pyclass(frozen, name = "RawClient", module = "pserver._pserver")]
pub(crate) struct RawClient {
    session: Mutex<Option<Arc<PythonSession>>>,
    process: u32,
}

type Arrays<'py> = Vec<Bound<'py, PyAny>>;

/// Ids and values of rows, one array of each for each parameter.
type IdsAndValues<'py> = (Arrays<'py>, Arrays<'py>);

/// Updates, and tensors with their names.
type RawState = (u64, Vec<(String, LibraryTensor)>);

/// Learning rates that came with gradients: the first update of each, and the rate.
type RawRates = Vec<(u64, Option<f64>)>;

/// Name, type, shape, whether it is sent by rows, and version.
type Listed = (String, String, Vec<u64>, bool, u64);

#[pymethods]
impl RawClient {
    #[new]
    fn new(py: Python<'_>, options: &str) -> PyResult<Self> {
        let session = outcome(py, py.detach(|| PythonSession::open(options)))?;
        Ok(Self { session: Mutex::new(Some(Arc::new(session))), process: std::process::id() })
    }

    fn begin_init(&self, py: Python<'_>, config: Option<&str>) -> PyResult<bool> {
        let settings = settings(py, config)?;
        self.call(py, |session| session.client().begin_init(&settings))
    }

    #[pyo3(signature = (name, value, config))]
    fn init(&self, py: Python<'_>, name: &str, value: &Bound<'_, PyAny>, config: Option<&str>) -> PyResult<()> {
        let settings = settings(py, config)?;
        let array = HeldArray::of(value, &ParameterName(name), Access::Read)?;
        self.call(py, |session| {
            let (element_type, shape) = (array.element_type(), array.shape());
            session.client().init_param(name, element_type, shape, array.contents(), &settings)
        })
    }

    fn init_rows(&self, py: Python<'_>, name: &str, element_type: &str, config: &str) -> PyResult<()> {
        let settings = settings(py, Some(config))?;
        let element_type = type_of_name(element_type).ok_or_else(|| {
            refused(
                py,
                format!("{}: element type {element_type:?}; expected one such as \"float32\"", ParameterName(name)),
            )
        })?;
        if settings.sparse.is_none() {
            let text = "its configuration describes no rows; expected sparse { ... } in it";
            return Err(refused(py, format!("{}: {text}", ParameterName(name))));
        }
        self.call(py, |session| session.client().init_param(name, element_type, &[], &[], &settings))
    }

    fn finish_init(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |session| session.client().finish_init())
    }

    fn give_up_init(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |session| session.client().give_up_init())
    }

    fn push(
        &self,
        py: Python<'_>,
        names: Vec<PyBackedStr>,
        gradients: Vec<Bound<'_, PyAny>>,
        numbers: RawNumbers,
        stream: GivenStream,
    ) -> PyResult<()> {
        let mut gradients = arrays(py, &names, &gradients, Access::Send(stream))?;
        self.call(py, |session| {
            stage(session, &names, &mut gradients, Staging::Gradient)?;
            session.client().push(&session.gradients(&names, &gradients)?, numbers.carried())
        })
    }

    /// Looks at arrays of the host, also tensors that autograd follows: gradients, or with `writes` destinations.
    fn hold(
        &self,
        py: Python<'_>,
        names: Vec<PyBackedStr>,
        all: Vec<Bound<'_, PyAny>>,
        writes: bool,
    ) -> PyResult<ParameterArrays> {
        let held = arrays(py, &names, &all, if writes { Access::Replace } else { Access::Look })?;
        let held = self.call(py, |session| session.hold(&names, held, (writes, false)))?;
        Ok(held.expect("shapes may be written in another way"))
    }

    /// The same if all are contiguous tensors of the shape of their parameters, whose memory has the values, and
    /// gradients are such that autograd does not follow; none otherwise.
    fn hold_plain(
        &self,
        py: Python<'_>,
        names: Vec<PyBackedStr>,
        tensors: Vec<Bound<'_, PyAny>>,
        writes: bool,
    ) -> PyResult<Option<ParameterArrays>> {
        let Some(held) = plain_tensors(&tensors, !writes)? else { return Ok(None) };
        self.call(py, |session| session.hold(&names, held, (writes, true)))
    }

    /// Checks gradients and, where there are some, destinations as calls do, and the gradients' elements; sends
    /// nothing.
    fn check_push(
        &self,
        py: Python<'_>,
        gradients: Py<ParameterArrays>,
        out: Option<Py<ParameterArrays>>,
        numbers: RawNumbers,
    ) -> PyResult<()> {
        self.call(py, |session| {
            gradients.get().as_gradients(|given| match &out {
                None => session.client().check_push(given, numbers.carried(), None),
                Some(out) => {
                    out.get().as_destinations(|into| session.client().check_push(given, numbers.carried(), Some(into)))
                }
            })
        })
    }

    /// Checks the elements of gradients of rows.
    fn check_rows(&self, py: Python<'_>, name: &str, gradient: &Bound<'_, PyAny>, numbers: RawNumbers) -> PyResult<()> {
        let array = HeldArray::of(gradient, &ParameterName(name), Access::Read)?;
        self.call(py, |session| {
            let (element_type, content) = (array.element_type(), array.contents());
            session.client().check_rows(&GradientSlice { name, element_type, content }, numbers.carried())
        })
    }

    fn set(&self, py: Python<'_>, names: Vec<PyBackedStr>, values: Vec<Bound<'_, PyAny>>) -> PyResult<()> {
        let mut values = arrays(py, &names, &values, Access::Send(None))?;
        self.call(py, |session| {
            stage(session, &names, &mut values, Staging::Value)?;
            session.client().set(&session.gradients(&names, &values)?)
        })
    }

    /// Returns the most updates that a chunk of them has.
    fn pull(
        &self,
        py: Python<'_>,
        names: Vec<PyBackedStr>,
        out: Vec<Bound<'_, PyAny>>,
        version: u64,
        stream: GivenStream,
    ) -> PyResult<u64> {
        let mut out = arrays(py, &names, &out, Access::Fetch(stream))?;
        self.call(py, |session| {
            stage(session, &names, &mut out, Staging::Destination)?;
            let mut into = session.destinations(&names, &mut out)?;
            let version = session.client().pull_version(&mut into, Version(version))?;
            store(&mut out).map(|()| version.0)
        })
    }

    fn push_pull(
        &self,
        py: Python<'_>,
        names: Vec<PyBackedStr>,
        both: (Arrays<'_>, Arrays<'_>),
        numbers: RawNumbers,
        stream: GivenStream,
    ) -> PyResult<()> {
        let mut gradients = arrays(py, &names, &both.0, Access::Send(stream))?;
        let mut out = arrays(py, &names, &both.1, Access::Fetch(stream))?;
        self.call(py, |session| {
            stage(session, &names, &mut gradients, Staging::Gradient)?;
            stage(session, &names, &mut out, Staging::Destination)?;
            let given = session.gradients(&names, &gradients)?;
            session.client().push_pull(&given, numbers.carried(), &mut session.destinations(&names, &mut out)?)?;
            store(&mut out)
        })
    }

    /// Starts a push with `gradients`, a pull with `out`, or both.
    fn start(
        &self,
        py: Python<'_>,
        names: Vec<PyBackedStr>,
        both: (Option<Arrays<'_>>, Option<Arrays<'_>>),
        numbers: RawNumbers,
        stream: GivenStream,
    ) -> PyResult<RawCall> {
        let mut gradients = both.0.map(|all| arrays(py, &names, &all, Access::Send(stream))).transpose()?;
        let mut out = both.1.map(|all| arrays(py, &names, &all, Access::Fetch(stream))).transpose()?;
        self.started(py, |session| {
            stage(session, &names, gradients.as_deref_mut().unwrap_or_default(), Staging::Gradient)?;
            stage(session, &names, out.as_deref_mut().unwrap_or_default(), Staging::Destination)?;
            session.start(&names, (gradients, out), numbers.carried())
        })
    }

    /// Starts a push, a pull, or both, of arrays that are held. A pull's result has the checksums of the values.
    /// `is_of_step`: a pull fetches the values that this trainer's gradients have made. The call becomes that of
    /// `noted`.
    fn start_held(
        &self,
        py: Python<'_>,
        noted: &Bound<'_, PyAny>,
        both: (Option<Py<ParameterArrays>>, Option<Py<ParameterArrays>>),
        numbers: RawNumbers,
        is_of_step: bool,
    ) -> PyResult<()> {
        let call = self.started(py, |session| {
            let (gradients, out) = (both.0.as_ref().map(Py::get), both.1.as_ref().map(Py::get));
            session.start_held(gradients, out, numbers.carried(), is_of_step)
        })?;
        call.note(noted, both.1.is_some())
    }

    /// Starts a push without gradients. The call becomes that of `noted`.
    fn start_pass(
        &self,
        py: Python<'_>,
        noted: &Bound<'_, PyAny>,
        names: Vec<PyBackedStr>,
        is_void: bool,
    ) -> PyResult<()> {
        self.started(py, |session| session.start_pass(&names, is_void))?.note(noted, false)
    }

    fn push_rows(
        &self,
        py: Python<'_>,
        names: Vec<PyBackedStr>,
        ids: Vec<Bound<'_, PyAny>>,
        gradients: Vec<Bound<'_, PyAny>>,
        numbers: RawNumbers,
    ) -> PyResult<()> {
        let given = RowArrays::of(py, &names, &ids, &gradients, Access::Read)?;
        self.call(py, |session| session.client().push_rows(&given.gradients(&names)?, numbers.carried()))
    }

    fn pull_rows(
        &self,
        py: Python<'_>,
        names: Vec<PyBackedStr>,
        ids: Vec<Bound<'_, PyAny>>,
        out: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let mut out = RowArrays::of(py, &names, &ids, &out, Access::Write)?;
        self.call(py, |session| session.client().pull_rows(&mut out.destinations(session, &names)?))
    }

    /// Sends rows, and fetches those of `wanted`.
    fn push_pull_rows(
        &self,
        py: Python<'_>,
        names: Vec<PyBackedStr>,
        given: IdsAndValues<'_>,
        wanted: IdsAndValues<'_>,
        numbers: RawNumbers,
    ) -> PyResult<()> {
        let given = RowArrays::of(py, &names, &given.0, &given.1, Access::Read)?;
        let mut out = RowArrays::of(py, &names, &wanted.0, &wanted.1, Access::Write)?;
        self.call(py, |session| {
            let given = given.gradients(&names)?;
            session.client().push_pull_rows(&given, numbers.carried(), &mut out.destinations(session, &names)?)
        })
    }

    /// Starts a push of rows. Its arrays are the program's when this returns.
    fn start_push_rows(
        &self,
        py: Python<'_>,
        names: Vec<PyBackedStr>,
        ids: Vec<Bound<'_, PyAny>>,
        gradients: Vec<Bound<'_, PyAny>>,
        numbers: RawNumbers,
    ) -> PyResult<RawCall> {
        let given = RowArrays::of(py, &names, &ids, &gradients, Access::Read)?;
        self.started(py, |session| session.client().start_push_rows(&given.gradients(&names)?, numbers.carried()))
    }

    /// Starts a pull of rows, behind a push of the rows `given` of the same parameters.
    fn start_pull_rows(
        &self,
        py: Python<'_>,
        names: Vec<PyBackedStr>,
        wanted: IdsAndValues<'_>,
        given: Option<IdsAndValues<'_>>,
        numbers: RawNumbers,
    ) -> PyResult<RawCall> {
        let given = given.map(|(ids, values)| RowArrays::of(py, &names, &ids, &values, Access::Read)).transpose()?;
        let out = RowArrays::of(py, &names, &wanted.0, &wanted.1, Access::Write)?;
        self.started(py, |session| start_rows(session, &names, given, out, &numbers))
    }

    /// Updates, and each tensor with its name.
    fn state(&self, py: Python<'_>, name: &str) -> PyResult<RawState> {
        let state = self.call(py, |session| session.client().optimizer_state(name))?;
        Ok((state.updates, tensors(state.tensors, state.element_type, &state.shape)))
    }

    /// Of rows: updates, each tensor with its name, and the learning rates.
    fn row_states(&self, py: Python<'_>, name: &str, ids: &Bound<'_, PyAny>) -> PyResult<(RawState, RawRates)> {
        let ids = HeldArray::of(ids, &ParameterName(name), Access::Read)?;
        let (state, rows) = self.call(py, |session| {
            let ids = row_ids(name, &ids)?;
            Ok((session.client().row_states(name, ids)?, ids.len()))
        })?;
        let TableProgress { updates, rates } = state.progress;
        let shape = [rows as u64, state.width];
        Ok(((updates, tensors(state.tensors, state.element_type, &shape)), rates))
    }

    /// `progress` are updates and learning rates.
    fn set_row_states(
        &self,
        py: Python<'_>,
        name: &str,
        ids: &Bound<'_, PyAny>,
        states: (Vec<PyBackedStr>, Vec<Bound<'_, PyAny>>),
        progress: Option<(u64, RawRates)>,
    ) -> PyResult<()> {
        let ids = HeldArray::of(ids, &ParameterName(name), Access::Read)?;
        let names = states.0;
        let tensors = arrays(py, &names, &states.1, Access::Read)?;
        let progress = progress.map(|(updates, rates)| TableProgress { updates, rates });
        self.call(py, |session| {
            let slices = state_slices(session, name, &names, &tensors)?;
            session.client().set_row_states(name, row_ids(name, &ids)?, &slices, progress.as_ref())
        })
    }

    fn set_state(
        &self,
        py: Python<'_>,
        name: &str,
        names: Vec<PyBackedStr>,
        tensors: Vec<Bound<'_, PyAny>>,
        updates: u64,
    ) -> PyResult<()> {
        let tensors = arrays(py, &names, &tensors, Access::Read)?;
        self.call(py, |session| {
            let slices = state_slices(session, name, &names, &tensors)?;
            session.client().set_optimizer_state(name, &slices, updates)
        })
    }

    /// The least version, the bytes, and the directory of each shard.
    fn checkpoint(&self, py: Python<'_>) -> PyResult<(u64, u64, Vec<String>)> {
        let taken = self.call(py, |session| session.client().checkpoint())?;
        Ok((taken.version.0, taken.bytes, taken.shards.into_iter().map(|one| one.directory).collect()))
    }

    /// Values, and of the parameters `tables` rows.
    fn load(
        &self,
        py: Python<'_>,
        values: (Vec<PyBackedStr>, Vec<Bound<'_, PyAny>>),
        tables: Vec<PyBackedStr>,
        rows: IdsAndValues<'_>,
    ) -> PyResult<()> {
        let names = values.0;
        let values = arrays(py, &names, &values.1, Access::Read)?;
        let rows = RowArrays::of(py, &tables, &rows.0, &rows.1, Access::Read)?;
        self.call(py, |session| {
            let given = names.iter().zip(&values).map(|(name, array)| GivenValue {
                name,
                element_type: array.element_type(),
                shape: array.shape(),
                content: array.contents(),
            });
            session.client().load_with_rows(&given.collect::<Vec<_>>(), &rows.gradients(&tables)?)
        })
    }

    /// Returns the names of the parameters in the file.
    fn load_file(&self, py: Python<'_>, path: PathBuf) -> PyResult<Vec<String>> {
        self.call(py, |session| session.client().load_file(&path))
    }

    /// The ids of all rows, as bytes of uint64.
    fn list_rows<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyBytes>> {
        let ids = self.call(py, |session| session.client().list_rows(name))?;
        Ok(PyBytes::new(py, bytemuck::cast_slice(&ids)))
    }

    /// Compares a parameter's optimizer with that of this configuration; another constant learning rate takes effect.
    fn follow_optimizer(&self, py: Python<'_>, name: &str, config: &str) -> PyResult<()> {
        let settings = settings(py, Some(config))?;
        self.call(py, |session| session.client().follow_optimizer(name, &settings))
    }

    /// Checks that a parameter has the optimizer of this configuration.
    fn check_optimizer(&self, py: Python<'_>, name: &str, config: &str) -> PyResult<()> {
        let settings = settings(py, Some(config))?;
        self.call(py, |session| session.client().check_optimizer(name, &settings))
    }

    /// The names of all parameters.
    fn names(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.call(py, |session| session.client().names())
    }

    /// The mode of the job: `sync`, `async`, `bounded` or `delta`.
    fn mode(&self, py: Python<'_>) -> PyResult<&'static str> {
        self.call(py, |session| {
            Ok(match session.client().mode()? {
                Mode::Sync => "sync",
                Mode::Async => "async",
                Mode::Staleness { .. } => "bounded",
                Mode::Delta => "delta",
            })
        })
    }

    /// Type, shape, and whether the parameter is sent by rows.
    fn describe(&self, py: Python<'_>, name: &str) -> PyResult<(String, Vec<u64>, bool)> {
        let facts = self.call(py, |session| session.facts(name))?;
        Ok((facts.element_type.to_string(), facts.shape.clone(), facts.is_sparse))
    }

    fn parameters(&self, py: Python<'_>) -> PyResult<Vec<Listed>> {
        let listed = self.call(py, |session| session.client().parameters())?;
        let row = |one: pserver_client::ListedParameter| {
            let facts = one.facts;
            (one.name, facts.element_type.to_string(), facts.shape, facts.is_sparse, one.version.0)
        };
        Ok(listed.into_iter().map(row).collect())
    }

    fn save(&self, py: Python<'_>, path: &str) -> PyResult<(String, u64)> {
        self.call(py, |session| session.client().save_model(path))
    }

    fn leave(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |session| session.client().leave())
    }

    /// Leaves, if this trainer takes part in a job. A closed client has no part, and neither has a forked process.
    fn leave_at_end(&self, py: Python<'_>) -> PyResult<()> {
        if std::process::id() != self.process || locked(&self.session).is_none() {
            return Ok(());
        }
        self.call(py, |session| session.client().leave_at_end())
    }

    fn resume_rounds(&self, py: Python<'_>) -> PyResult<u64> {
        self.call(py, |session| session.client().resume_rounds())
    }

    fn trainer(&self, py: Python<'_>) -> PyResult<u32> {
        self.call(py, |session| session.client().trainer())
    }

    fn trainers(&self, py: Python<'_>) -> PyResult<u32> {
        self.call(py, |session| session.client().trainers())
    }

    fn servers(&self, py: Python<'_>) -> PyResult<u32> {
        self.call(py, |session| session.client().servers())
    }

    /// The address of server 0.
    fn coordinator(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.session(py)?.client().options().coordinator.to_string())
    }

    /// Payload bytes sent and received.
    fn moved(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        let moved = self.session(py)?.client().moved();
        Ok((moved.sent, moved.received))
    }

    /// A buffer of elements, or without a type of bytes.
    fn buffer(&self, py: Python<'_>, shape: Vec<i64>, element_type: Option<&str>) -> PyResult<LibraryTensor> {
        let session = self.session(py)?;
        let element_type = element_type.and_then(type_of_name);
        let made = py.detach(|| {
            let bytes = LibraryTensor::bytes_of(element_type, &shape)?;
            // A buffer does not keep the client alive: a closed client has used it for the last time.
            let buffer = session.client().buffer(bytes.max(1))?;
            let session = Arc::downgrade(&session);
            let give_back = Box::new(move |buffer| {
                if let Some(session) = session.upgrade()
                    && let Err((used, _)) = session.client().free(buffer)
                {
                    // A call holds the object whose memory it uses, so nothing else is left to give it back.
                    std::mem::forget(used);
                }
            });
            Ok(LibraryTensor::buffer(buffer, bytes, element_type, shape, give_back))
        });
        outcome(py, made)
    }

    /// Registers memory of a device or of the host, and memory of devices that is one with it.
    fn register(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        replicas: Vec<Bound<'_, PyAny>>,
        stream: GivenStream,
    ) -> PyResult<()> {
        let held = |one: &Bound<'_, PyAny>| HeldArray::of(one, &"an array to register", Access::Fetch(stream));
        let array = held(array)?;
        let replicas = replicas.iter().map(held).collect::<PyResult<Vec<_>>>()?;
        self.call(py, |session| session.register(array, replicas))
    }

    fn unregister(&self, py: Python<'_>, array: &Bound<'_, PyAny>) -> PyResult<()> {
        let array = HeldArray::of(array, &"a registered array", Access::Fetch(None))?;
        self.call(py, |session| session.unregister(array.place().0))
    }

    /// The pieces of each parameter, in memory of the library.
    fn view(&self, py: Python<'_>, names: Vec<PyBackedStr>) -> PyResult<Vec<Vec<LibraryTensor>>> {
        self.call(py, |session| {
            let asked: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
            let view = Arc::new(session.client().pull_view(&asked)?);
            let parameters = asked.iter().enumerate().map(|(at, name)| {
                let facts = session.facts(name)?;
                Ok(LibraryTensor::pieces(&view, at, facts.element_type, &facts.shape))
            });
            parameters.collect()
        })
    }

    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        self.session(py)?.client().cancel();
        Ok(())
    }

    /// Closes the client. A second time has no effect, and neither has it in a forked process.
    fn close(&self, py: Python<'_>) {
        if std::process::id() != self.process {
            return;
        }
        py.detach(|| {
            let session = locked(&self.session).take();
            if let Some(session) = session {
                session.close();
            }
        });
    }
}

impl RawClient {
    fn session(&self, py: Python<'_>) -> PyResult<Arc<PythonSession>> {
        if std::process::id() != self.process {
            let text = "this client was made before a fork; the process that was forked makes a client of its own";
            return Err(refused(py, text));
        }
        let session = locked(&self.session).clone();
        session.ok_or_else(|| refused(py, "this client is closed; expected an open one, from pserver.connect()"))
    }

    /// Runs a call without the interpreter.
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&PythonSession) -> Result<T, Failure> + Send,
    ) -> PyResult<T> {
        let session = self.session(py)?;
        let result = py.detach(|| {
            let result = call(&session);
            drop(session);
            result
        });
        outcome(py, result)
    }

    /// Starts a call without the interpreter.
    fn started(
        &self,
        py: Python<'_>,
        start: impl FnOnce(&PythonSession) -> Result<CallNumber, Failure> + Send,
    ) -> PyResult<RawCall> {
        let session = self.session(py)?;
        let number = outcome(py, py.detach(|| start(&session)))?;
        Ok(RawCall::new(session, number))
    }
}

impl Drop for RawClient {
    fn drop(&mut self) {
        Python::try_attach(|py| self.close(py));
    }
}

fn settings(py: Python<'_>, config: Option<&str>) -> PyResult<OptimizerSettings> {
    let read = config.map(|text| OptimizerSettings::from_text_with(text, &rule_file::open)).transpose();
    outcome(py, read.map(Option::unwrap_or_default))
}

/// Gives arrays on devices pages of the host for one call, with the contents to send.
fn stage(
    session: &PythonSession,
    names: &[PyBackedStr],
    arrays: &mut [HeldArray],
    staging: Staging,
) -> Result<(), Failure> {
    let mut all = names.iter().zip(arrays.iter_mut());
    all.try_for_each(|(name, array)| array.stage(session.client(), &ParameterName(name), staging))?;
    arrays.iter_mut().try_for_each(HeldArray::settle)
}

/// Tensors of a state, each of this shape.
fn tensors(all: Vec<StateTensor>, element_type: ElementType, shape: &[u64]) -> Vec<(String, LibraryTensor)> {
    let shape: Vec<i64> = shape.iter().map(|size| size.cast_signed()).collect();
    let tensor = |one: StateTensor| (one.name, LibraryTensor::contents(one.content, element_type, shape.clone()));
    all.into_iter().map(tensor).collect()
}

/// Tensors of a state to set, of the parameter's type and shape.
fn state_slices<'a>(
    session: &PythonSession,
    name: &str,
    names: &'a [PyBackedStr],
    tensors: &'a [HeldArray],
) -> Result<Vec<StateSlice<'a>>, Failure> {
    let mut slices = Vec::with_capacity(names.len());
    for (of, array) in names.iter().zip(tensors) {
        let declared = session.check_shape(name, array)?;
        if array.element_type() != declared {
            let found = array.element_type();
            let text = format!("{}: an array of {found} for state \"{of}\"; expected {declared}", ParameterName(name));
            return Err(Failure::call(text));
        }
        slices.push(StateSlice { name: of, content: array.contents() });
    }
    Ok(slices)
}

fn type_of_name(name: &str) -> Option<ElementType> {
    ElementType::ALL.into_iter().find(|one| one.to_string() == name)
}
