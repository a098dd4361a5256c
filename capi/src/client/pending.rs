//! Calls that are started, and waited for later.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pserver_core::error::Failure;
use pserver_core::memory::{LoanBook, lend};

use super::calls::CallNumber;
use super::transfer::Fetch;
use super::turns::Entered;
use super::{Client, Extent, Given, Held, Wanted};

/// Starts calls within [`Client::scope`].
pub struct Calls<'scope, 'env> {
    client: &'scope Client,
    book: &'scope LoanBook<'env>,
    started: Mutex<Vec<CallNumber>>,
}

/// A call that was started. What it was given is the client's until the scope ends.
#[must_use = "a call's failure is told to who waits for it"]
pub struct Pending<'scope> {
    client: &'scope Client,
    call: CallNumber,
}

impl Client {
    /// Runs `body`, which may start calls that go on while it computes. Every call is over when this returns.
    ///
    /// What leads: of the frames that wait to leave, those of the parameter that was declared first, because the next
    /// forward pass needs it first. Calls about one parameter leave one after the other.
    ///
    /// ```no_run
    /// # use paddle_pserver::client::{Client, Given, Wanted};
    /// # use pserver_core::dtype::ElementType::Float32;
    /// # use pserver_core::error::Failure;
    /// # fn step(client: &Client, last: &[u8], first: &[u8], back: &mut [u8]) -> Result<(), Failure> {
    /// client.scope(|calls| {
    ///     let one = calls.push(&[Given { name: "last layer", element_type: Float32, content: last }], None)?;
    ///     // The gradient of the first layer is computed here, while that of the last one is on its way.
    ///     let given = [Given { name: "first layer", element_type: Float32, content: first }];
    ///     let two = calls.push_pull(&given, None, vec![Wanted::new("first layer", back)])?;
    ///     one.wait()?;
    ///     two.wait()
    /// })
    /// # }
    /// ```
    ///
    /// What is lent must outlive the scope:
    ///
    /// ```compile_fail,E0597
    /// # use paddle_pserver::client::{Client, Wanted};
    /// # fn step(client: &Client) {
    /// let result = client.scope(|calls| {
    ///     let mut local = vec![0; 64];
    ///     calls.pull(vec![Wanted::new("w", &mut local)]).map(|_| ())
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
    pub(crate) fn start_push_pull(
        &self,
        gradients: &[Given<'static>],
        into: Vec<Wanted<'static>>,
    ) -> Result<CallNumber, Failure> {
        let sent = gradients.iter().map(|given| Extent::of(given.content));
        let memory = self.hold(sent.chain(into.iter().map(|wanted| Extent::of(wanted.content))));
        self.start_with(&LoanBook::open(), memory, |state, book| {
            let into = Fetch::all(into);
            let chosen = state.choose(gradients, Some(&into))?;
            state.start_push(chosen, gradients, None, Some(into), book)
        })
    }

    /// Waits until a call is over and takes its result, once.
    pub(crate) fn wait(&self, call: CallNumber) -> Result<(), Failure> {
        self.enter()?.wait(call).expect("only one can wait for it")
    }

    /// Whether a call is over, well or not.
    pub(crate) fn is_over(&self, call: CallNumber) -> Result<bool, Failure> {
        Ok(self.enter()?.look_at(call))
    }

    /// Gives up the calls that were started: their memory is the caller's when this returns, and who waits for one is
    /// told why.
    pub(crate) fn give_up(&self, why: &str) {
        if let Ok(mut state) = self.enter() {
            state.abort_started(why);
        }
    }

    fn start_with<'env>(
        &self,
        book: &LoanBook<'env>,
        memory: Held,
        start: impl FnOnce(&mut Entered<'_>, &LoanBook<'env>) -> Result<CallNumber, Failure>,
    ) -> Result<CallNumber, Failure> {
        let mut state = self.enter()?;
        state.ready()?;
        self.shared.move_on()?;
        let call = state.contain(|state| start(state, book))?;
        state.goes_on_alone(call, memory);
        Ok(call)
    }
}

impl<'scope, 'env> Calls<'scope, 'env> {
    /// [`Client::push`], started.
    ///
    /// # Errors
    /// What is wrong with which gradient; whatever else goes wrong is told to who waits.
    pub fn push(&self, gradients: &[Given<'env>], rate: Option<f64>) -> Result<Pending<'scope>, Failure> {
        self.start(|state, book| {
            let chosen = state.choose(gradients, None)?;
            state.start_push(chosen, gradients, rate, None, book)
        })
    }

    /// [`Client::push_pull`], started.
    ///
    /// # Errors
    /// As [`Calls::push`] and [`Calls::pull`].
    pub fn push_pull(
        &self,
        gradients: &[Given<'env>],
        rate: Option<f64>,
        into: Vec<Wanted<'env>>,
    ) -> Result<Pending<'scope>, Failure> {
        self.start(|state, book| {
            let into = Fetch::all(into);
            let chosen = state.choose(gradients, Some(&into))?;
            state.start_push(chosen, gradients, rate, Some(into), book)
        })
    }

    /// [`Client::pull`], started.
    ///
    /// # Errors
    /// What is wrong with which place; whatever else goes wrong is told to who waits.
    pub fn pull(&self, into: Vec<Wanted<'env>>) -> Result<Pending<'scope>, Failure> {
        self.start(|state, book| state.start_pull(Fetch::all(into), book))
    }

    fn start(
        &self,
        start: impl FnOnce(&mut Entered<'_>, &LoanBook<'env>) -> Result<CallNumber, Failure>,
    ) -> Result<Pending<'scope>, Failure> {
        let call = self.client.start_with(self.book, Held::default(), start)?;
        self.started().push(call);
        Ok(Pending { client: self.client, call })
    }

    /// Waits for the calls that nobody waited for; tells the first failure.
    fn finish_all(&self) -> Result<(), Failure> {
        let started = std::mem::take(&mut *self.started());
        let mut state = self.client.enter()?;
        let results: Vec<_> = started.into_iter().filter_map(|call| state.wait(call)).collect();
        results.into_iter().collect()
    }

    fn abort(&self) {
        let started = std::mem::take(&mut *self.started());
        let Ok(mut state) = self.client.enter() else { return };
        state.abort(&started, "the program panicked");
        for call in started {
            // Nobody is left to hear it.
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

/// Gets lent memory back before a panic goes on through the scope.
struct AbortOnUnwind<'a, 'scope, 'env>(&'a Calls<'scope, 'env>);

impl Drop for AbortOnUnwind<'_, '_, '_> {
    fn drop(&mut self) {
        self.0.abort();
    }
}
