//! Asynchronous calls: started now, waited for later.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pserver_core::error::Failure;
use pserver_core::ids::Version;
use pserver_core::memory::{LoanBook, lend};
use pserver_core::wire::Flags;

use super::call::CallNumber;
use super::carried::CarriedNumbers;
use super::client_lock::ClientGuard;
use super::rows::sent_extents;
use super::transfer::FetchRequest;
use super::{Client, DestinationRows, DestinationSlice, Extent, GradientRows, GradientSlice, HeldBuffers};

/// Starts calls within [`Client::scope`].
pub struct Calls<'scope, 'env> {
    client: &'scope Client,
    book: &'scope LoanBook<'env>,
    started: Mutex<Vec<CallNumber>>,
}

/// A started call. Its memory is borrowed until the scope ends.
#[must_use = "a call's failure is returned by wait"]
pub struct Pending<'scope> {
    client: &'scope Client,
    call: CallNumber,
}

impl Client {
    /// Runs `body`, which may start calls that go on while it computes. Every call is over when this returns.
    ///
    /// Queued frames are sent in the order of declaration of their parameters, in which the next forward pass needs
    /// them. Calls about one parameter leave one after the other.
    ///
    /// ```no_run
    /// # use pserver_client::{Client, GradientSlice, DestinationSlice};
    /// # use pserver_core::dtype::ElementType::Float32;
    /// # use pserver_core::error::Failure;
    /// # fn step(client: &Client, last: &[u8], first: &[u8], back: &mut [u8]) -> Result<(), Failure> {
    /// client.scope(|calls| {
    ///     let one = calls.push(&[GradientSlice { name: "last layer", element_type: Float32, content: last }], None)?;
    ///     // The gradient of the first layer is computed here, while that of the last one is on its way.
    ///     let given = [GradientSlice { name: "first layer", element_type: Float32, content: first }];
    ///     let two = calls.push_pull(&given, None, vec![DestinationSlice::new("first layer", back)])?;
    ///     one.wait()?;
    ///     two.wait()
    /// })
    /// # }
    /// ```
    ///
    /// Borrowed memory must outlive the scope:
    ///
    /// ```compile_fail,E0597
    /// # use pserver_client::{Client, DestinationSlice};
    /// # fn step(client: &Client) {
    /// let result = client.scope(|calls| {
    ///     let mut local = vec![0; 64];
    ///     calls.pull(vec![DestinationSlice::new("w", &mut local)]).map(|_| ())
    /// });
    /// # }
    /// ```
    ///
    /// # Errors
    /// What `body` returns, else the first failure of a call that nobody waited for.
    pub fn scope<'env, R>(&self, body: impl FnOnce(&Calls<'_, 'env>) -> Result<R, Failure>) -> Result<R, Failure> {
        lend(|book| {
            let calls = Calls { client: self, book, started: Mutex::default() };
            let guard = AbortOnUnwind(&calls);
            let result = body(&calls);
            std::mem::forget(guard);
            let finished = calls.finish_all();
            result.and_then(|value| finished.map(|()| value))
        })
    }

    /// [`Client::push_pull`], started on memory that lives as long as the process, as far as Rust can tell.
    pub fn start_push_pull<'a>(
        &self,
        gradients: &[GradientSlice<'static>],
        numbers: impl Into<CarriedNumbers<'a>>,
        into: Vec<DestinationSlice<'static>>,
    ) -> Result<CallNumber, Failure> {
        self.start_both(gradients, numbers.into(), into, false)
    }

    /// [`Client::start_push_pull`], for [`Client::wait_sums`].
    pub fn start_push_pull_summed<'a>(
        &self,
        gradients: &[GradientSlice<'static>],
        numbers: impl Into<CarriedNumbers<'a>>,
        into: Vec<DestinationSlice<'static>>,
    ) -> Result<CallNumber, Failure> {
        self.start_both(gradients, numbers.into(), into, true)
    }

    fn start_both(
        &self,
        gradients: &[GradientSlice<'static>],
        numbers: CarriedNumbers<'_>,
        into: Vec<DestinationSlice<'static>>,
        sums: bool,
    ) -> Result<CallNumber, Failure> {
        let sent = gradients.iter().map(|given| Extent::of(given.content));
        let memory = self.hold(sent.chain(into.iter().map(|wanted| Extent::of(wanted.content))));
        self.start_with(&LoanBook::open(), memory, |state, book| {
            let into = FetchRequest::all(into);
            let chosen = state.select(gradients, Some(&into))?.summed(sums);
            state.start_push(chosen, gradients, numbers, Some(into), book)
        })
    }

    /// [`Client::push`], started as [`Client::start_push_pull`] is.
    pub fn start_push<'a>(
        &self,
        gradients: &[GradientSlice<'static>],
        numbers: impl Into<CarriedNumbers<'a>>,
    ) -> Result<CallNumber, Failure> {
        let numbers = numbers.into();
        let memory = self.hold(gradients.iter().map(|given| Extent::of(given.content)));
        self.start_with(&LoanBook::open(), memory, |state, book| {
            let chosen = state.select(gradients, None)?;
            state.start_push(chosen, gradients, numbers, None, book)
        })
    }

    /// Starts to say that this trainer has no gradients for these parameters in their next round, in mode sync. A round
    /// for which no trainer has a gradient is no update. `is_void`: the round is none whatever the others send.
    ///
    /// # Errors
    /// The parameter that is refused, and why; later failures are returned by [`Client::wait`].
    pub fn start_pass(&self, names: &[&str], is_void: bool) -> Result<CallNumber, Failure> {
        self.start_with(&LoanBook::open(), HeldBuffers::default(), |state, _| state.start_pass(names, is_void))
    }

    /// [`Client::pull`], started as [`Client::start_push_pull`] is.
    pub fn start_pull(&self, into: Vec<DestinationSlice<'static>>) -> Result<CallNumber, Failure> {
        self.start_pull_with(into, None)
    }

    /// [`Client::start_pull`], for [`Client::wait_sums`]. With `is_of_step` the values are those that the gradients
    /// of this trainer have made, as [`Client::push_pull`] fetches them: in sync mode without what other trainers have
    /// set since.
    pub fn start_pull_summed(
        &self,
        into: Vec<DestinationSlice<'static>>,
        is_of_step: bool,
    ) -> Result<CallNumber, Failure> {
        self.start_pull_with(into, Some(if is_of_step { Flags::OF_STEP } else { Flags::default() }))
    }

    fn start_pull_with(
        &self,
        into: Vec<DestinationSlice<'static>>,
        summed: Option<Flags>,
    ) -> Result<CallNumber, Failure> {
        let memory = self.hold(into.iter().map(|wanted| Extent::of(wanted.content)));
        self.start_with(&LoanBook::open(), memory, |state, book| {
            state.start_pull(FetchRequest::all(into), Version(0), summed, book)
        })
    }

    /// [`Client::push_rows`], started. The rows are copied: their memory is the caller's when this returns.
    ///
    /// # Errors
    /// As [`Calls::push_rows`].
    pub fn start_push_rows<'a>(
        &self,
        gradients: &[GradientRows<'_>],
        numbers: impl Into<CarriedNumbers<'a>>,
    ) -> Result<CallNumber, Failure> {
        let numbers = numbers.into();
        let _memory = self.hold(sent_extents(gradients));
        self.start_with(&LoanBook::open(), HeldBuffers::default(), |state, book| {
            state.start_push_rows(gradients, numbers, None, book)
        })
    }

    /// [`Client::pull_rows`], started as [`Client::start_push_pull`] is. Names and ids are not used after the start.
    ///
    /// # Errors
    /// As [`Calls::pull_rows`].
    pub fn start_pull_rows(&self, into: Vec<DestinationRows<'static>>) -> Result<CallNumber, Failure> {
        let memory = self.hold(into.iter().map(|wanted| Extent::of(wanted.values)));
        self.start_with(&LoanBook::open(), memory, |state, book| state.start_pull_rows(into, book))
    }

    /// [`Client::push_pull_rows`], started as [`Client::start_push_rows`] and [`Client::start_pull_rows`] are.
    ///
    /// # Errors
    /// As [`Calls::push_pull_rows`].
    pub fn start_push_pull_rows<'a>(
        &self,
        gradients: &[GradientRows<'_>],
        numbers: impl Into<CarriedNumbers<'a>>,
        into: Vec<DestinationRows<'static>>,
    ) -> Result<CallNumber, Failure> {
        let numbers = numbers.into();
        let _memory = self.hold(sent_extents(gradients));
        let memory = self.hold(into.iter().map(|wanted| Extent::of(wanted.values)));
        self.start_with(&LoanBook::open(), memory, |state, book| {
            state.start_push_rows(gradients, numbers, Some(into), book)
        })
    }

    /// Waits until a call is over and takes its result, once.
    pub fn wait(&self, call: CallNumber) -> Result<(), Failure> {
        self.lock()?.wait(call).expect("only one can wait for it")
    }

    /// [`Client::wait`] for a call whose values are summed: the CRC32C of each.
    pub fn wait_sums(&self, call: CallNumber) -> Result<Vec<u32>, Failure> {
        self.lock()?.finish_sums(call)
    }

    /// Whether a call is over, well or not.
    pub fn is_over(&self, call: CallNumber) -> Result<bool, Failure> {
        Ok(self.lock()?.poll(call))
    }

    /// Cancels a call that was started, unless it is over. [`wait`](Self::wait) then says so, and the call's memory is
    /// the caller's after it. Servers may have its gradients: a repetition of a push applies none twice.
    pub fn cancel_started(&self, call: CallNumber) -> Result<(), Failure> {
        let mut state = self.lock()?;
        if !state.poll(call) {
            state.cancel_call(call);
        }
        Ok(())
    }

    /// Gives up the calls that were started, and the rank: the calls' memory is the caller's when this returns, a
    /// thread that waits for one of them is told why, and the rank is free for another trainer.
    pub fn give_up(&self, why: &str) {
        if let Ok(mut state) = self.lock() {
            state.abort_started(why);
            state.release_rank();
        }
    }

    fn start_with<'env>(
        &self,
        book: &LoanBook<'env>,
        memory: HeldBuffers,
        start: impl FnOnce(&mut ClientGuard<'_>, &LoanBook<'env>) -> Result<CallNumber, Failure>,
    ) -> Result<CallNumber, Failure> {
        let mut state = self.lock()?;
        state.ready()?;
        self.lock.start_driver()?;
        let call = state.contain(|state| start(state, book))?;
        state.detach(call, memory);
        Ok(call)
    }
}

impl<'scope, 'env> Calls<'scope, 'env> {
    /// [`Client::push`], started.
    ///
    /// # Errors
    /// The gradient that is refused, and why; later failures are returned by [`Pending::wait`].
    pub fn push<'a>(
        &self,
        gradients: &[GradientSlice<'env>],
        numbers: impl Into<CarriedNumbers<'a>>,
    ) -> Result<Pending<'scope>, Failure> {
        let numbers = numbers.into();
        self.start(|state, book| {
            let chosen = state.select(gradients, None)?;
            state.start_push(chosen, gradients, numbers, None, book)
        })
    }

    /// [`Client::push_pull`], started.
    ///
    /// # Errors
    /// As [`Calls::push`] and [`Calls::pull`].
    pub fn push_pull<'a>(
        &self,
        gradients: &[GradientSlice<'env>],
        numbers: impl Into<CarriedNumbers<'a>>,
        into: Vec<DestinationSlice<'env>>,
    ) -> Result<Pending<'scope>, Failure> {
        let numbers = numbers.into();
        self.start(|state, book| {
            let into = FetchRequest::all(into);
            let chosen = state.select(gradients, Some(&into))?;
            state.start_push(chosen, gradients, numbers, Some(into), book)
        })
    }

    /// [`Client::pull`], started.
    ///
    /// # Errors
    /// The destination that is refused, and why; later failures are returned by [`Pending::wait`].
    pub fn pull(&self, into: Vec<DestinationSlice<'env>>) -> Result<Pending<'scope>, Failure> {
        self.start(|state, book| state.start_pull(FetchRequest::all(into), Version(0), None, book))
    }

    /// [`Client::push_rows`], started. The rows are copied: their memory is the caller's when this returns.
    ///
    /// # Errors
    /// The rows that are refused, and why; later failures are returned by [`Pending::wait`].
    pub fn push_rows<'a>(
        &self,
        gradients: &[GradientRows<'_>],
        numbers: impl Into<CarriedNumbers<'a>>,
    ) -> Result<Pending<'scope>, Failure> {
        let numbers = numbers.into();
        self.start(|state, book| state.start_push_rows(gradients, numbers, None, book))
    }

    /// [`Client::pull_rows`], started: the rows of a later step travel while this one is computed.
    ///
    /// # Errors
    /// The rows that are refused, and why; later failures are returned by [`Pending::wait`].
    pub fn pull_rows(&self, into: Vec<DestinationRows<'env>>) -> Result<Pending<'scope>, Failure> {
        self.start(|state, book| state.start_pull_rows(into, book))
    }

    /// [`Client::push_pull_rows`], started.
    ///
    /// # Errors
    /// As [`Calls::push_rows`] and [`Calls::pull_rows`].
    pub fn push_pull_rows<'a>(
        &self,
        gradients: &[GradientRows<'_>],
        numbers: impl Into<CarriedNumbers<'a>>,
        into: Vec<DestinationRows<'env>>,
    ) -> Result<Pending<'scope>, Failure> {
        let numbers = numbers.into();
        self.start(|state, book| state.start_push_rows(gradients, numbers, Some(into), book))
    }

    fn start(
        &self,
        start: impl FnOnce(&mut ClientGuard<'_>, &LoanBook<'env>) -> Result<CallNumber, Failure>,
    ) -> Result<Pending<'scope>, Failure> {
        let call = self.client.start_with(self.book, HeldBuffers::default(), start)?;
        self.started().push(call);
        Ok(Pending { client: self.client, call })
    }

    /// Waits for the calls that nobody waited for; tells the first failure.
    fn finish_all(&self) -> Result<(), Failure> {
        let started = std::mem::take(&mut *self.started());
        let mut state = self.client.lock()?;
        let results: Vec<_> = started.into_iter().filter_map(|call| state.wait(call)).collect();
        results.into_iter().collect()
    }

    fn abort(&self) {
        let started = std::mem::take(&mut *self.started());
        let Ok(mut state) = self.client.lock() else { return };
        state.abort(&started, "the program panicked");
        for call in started {
            // The panic replaces the result.
            let _ = state.take(call);
        }
    }

    fn started(&self) -> MutexGuard<'_, Vec<CallNumber>> {
        self.started.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pending<'_> {
    /// Whether the call is over, well or not: whether a wait for it would return at once.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.client.is_over(self.call).unwrap_or(true)
    }

    /// Waits until the call is over.
    ///
    /// # Errors
    /// As the blocking call of the same name. The time for it counts from when it was started.
    pub fn wait(self) -> Result<(), Failure> {
        self.client.wait(self.call)
    }
}

/// Reclaims borrowed memory before a panic unwinds through the scope.
struct AbortOnUnwind<'a, 'scope, 'env>(&'a Calls<'scope, 'env>);

impl Drop for AbortOnUnwind<'_, '_, '_> {
    fn drop(&mut self) {
        self.0.abort();
    }
}
