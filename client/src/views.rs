//! Views: pulled parameters that are read in the server's memory.
//!
//! A view holds one version. Servers write the next version elsewhere while it is held. Their budget has one held
//! version for each trainer, so a parameter with a view is not pulled again before the view is released.

use std::sync::Arc;

use pserver_core::dtype::Half;
use pserver_core::error::Failure;
use pserver_core::ids::{ParameterIndex, Version};
use pserver_core::memory::{Arena, Budget, Lease, LoanBook};

use super::call::ViewChunk;
use super::carried::CarriedNumbers;
use super::client_lock::ClientGuard;
use super::transfer::{FetchRequest, FetchRequests};
use super::{Client, Extent, GradientSlice};

/// Least bytes of an arena; only used slots are resident.
const ARENA_BYTES: u32 = 64 * 1024 * 1024;
/// Attempts to pull a view when connections end meanwhile.
const FETCHES_MAX: u32 = 5;

/// Some parameters of one version, each in pieces, to be read. Over shared memory they are the server's own; over TCP
/// they are copies.
pub struct View {
    parameters: Vec<Vec<Lease>>,
    _hold: Arc<()>,
}

/// Arenas for values that are not readable in place.
#[derive(Default)]
pub(super) struct ViewArenas {
    arenas: Vec<(u32, Arena)>,
}

impl View {
    /// The pieces of one of the parameters, in order; together they are the parameter, as it was asked for.
    ///
    /// # Panics
    /// When there is no such parameter.
    pub fn pieces(&self, parameter: usize) -> impl ExactSizeIterator<Item = &[u8]> {
        self.parameters[parameter].iter().map(Lease::bytes)
    }

    /// How many parameters there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.parameters.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.parameters.is_empty()
    }

    /// Whether every piece is the server's own memory, and nothing was copied.
    #[must_use]
    pub fn is_in_place(&self) -> bool {
        self.leases().all(Lease::is_foreign)
    }

    /// Gives the servers their memory back.
    ///
    /// # Errors
    /// When a connection to them ended in the meantime: what was read may be torn between versions.
    pub fn release(self) -> Result<(), Failure> {
        if self.leases().all(Lease::is_kept) {
            return Ok(());
        }
        Err(Failure::call(
            "a connection to the servers ended while the view was held; values read from it may be of a later version",
        ))
    }

    fn leases(&self) -> impl Iterator<Item = &Lease> {
        self.parameters.iter().flatten()
    }
}

impl Client {
    /// [`Client::pull`], into a view.
    ///
    /// # Errors
    /// As [`Client::pull`]; and when there is a view of one of the parameters.
    pub fn pull_view(&self, names: &[&str]) -> Result<View, Failure> {
        self.pull_view_as(&names.iter().map(|name| (*name, None)).collect::<Vec<_>>())
    }

    /// [`Client::pull_view`], of values that come as is said beside each.
    ///
    /// # Errors
    /// As [`Client::pull_view`].
    pub fn pull_view_as(&self, wanted: &[(&str, Option<Half>)]) -> Result<View, Failure> {
        let mut state = self.lock()?;
        state.ready()?;
        state.lend(|state, book| {
            let hold = state.hold(wanted)?;
            let call = state.start_pull(fetched(wanted), Version(0), None, book)?;
            let kept = state.finish_kept(call)?;
            state.finish_view(kept, wanted, &hold, book)
        })
    }

    /// [`Client::push_pull`], into a view of the gradients' parameters.
    ///
    /// # Errors
    /// As [`Client::push_pull`]; and when there is a view of one of the parameters.
    pub fn push_pull_view<'a>(
        &self,
        gradients: &[GradientSlice<'_>],
        numbers: impl Into<CarriedNumbers<'a>>,
    ) -> Result<View, Failure> {
        self.push_pull_view_as(gradients, numbers, &vec![None; gradients.len()])
    }

    /// [`Client::push_pull_view`], of values that come as `halves` says, one for each gradient.
    ///
    /// # Errors
    /// As [`Client::push_pull_view`].
    ///
    /// # Panics
    /// When there is not one for each gradient.
    pub fn push_pull_view_as<'a>(
        &self,
        gradients: &[GradientSlice<'_>],
        numbers: impl Into<CarriedNumbers<'a>>,
        halves: &[Option<Half>],
    ) -> Result<View, Failure> {
        let numbers = numbers.into();
        assert_eq!(gradients.len(), halves.len(), "each gradient's value comes as something");
        let _memory = self.hold(gradients.iter().map(|given| Extent::of(given.content)));
        let mut state = self.lock()?;
        let named = gradients.iter().map(|given| given.name);
        let wanted: Vec<(&str, Option<Half>)> = named.zip(halves.iter().copied()).collect();
        let chosen = state.select(gradients, Some(&fetched(&wanted)))?;
        state.lend(|state, book| {
            let hold = state.hold(&wanted)?;
            let call = state.start_push(chosen, gradients, numbers, Some(fetched(&wanted)), book)?;
            let numbers = state.push_sequences(call);
            let kept = state.finish_kept(call)?;
            let view = state.finish_view(kept, &wanted, &hold, book);
            // The gradients are applied, so servers must recognise a repetition.
            view.map_err(|failure| state.undo_push(call, &numbers, failure))
        })
    }
}

/// Values that are kept for a view.
fn fetched<'env>(wanted: &[(&'env str, Option<Half>)]) -> FetchRequests<'env> {
    wanted.iter().map(|(name, half)| FetchRequest { name, place: None, half: *half }).collect()
}

impl ClientGuard<'_> {
    /// Refuses further pulls of these parameters until the hold is dropped.
    fn hold(&mut self, wanted: &[(&str, Option<Half>)]) -> Result<Arc<()>, Failure> {
        let hold = Arc::new(());
        let (job, mut last) = (self.ready_job(), None);
        let chosen = wanted.iter().map(|(name, _)| job.parameter(name, &mut last)).collect::<Result<Vec<_>, _>>()?;
        job.refuse_viewed(&chosen)?;
        for index in chosen {
            job.progress_mut(index).viewed = Arc::downgrade(&hold);
        }
        Ok(hold)
    }

    /// The view of a call that fetches. Where a connection ended meanwhile some of it may be torn, and it is fetched
    /// anew.
    fn finish_view<'env>(
        &mut self,
        mut kept: Vec<ViewChunk>,
        wanted: &[(&'env str, Option<Half>)],
        hold: &Arc<()>,
        book: &LoanBook<'env>,
    ) -> Result<View, Failure> {
        for _ in 0..FETCHES_MAX {
            let view = self.gather_view(kept, wanted, Arc::clone(hold))?;
            if view.leases().all(Lease::is_kept) {
                return Ok(view);
            }
            drop(view);
            let call = self.start_pull(fetched(wanted), Version(0), None, book)?;
            kept = self.finish_kept(call)?;
        }
        Err(Failure::call("connections ended repeatedly while the view was fetched; the call may be repeated"))
    }

    fn gather_view(
        &mut self,
        mut kept: Vec<ViewChunk>,
        wanted: &[(&str, Option<Half>)],
        hold: Arc<()>,
    ) -> Result<View, Failure> {
        kept.sort_unstable_by_key(|one| (one.parameter, one.chunk));
        let (job, mut last) = (self.job.as_ref().expect("the job is ready"), None);
        let order = wanted.iter().map(|(name, _)| job.parameter(name, &mut last)).collect::<Result<Vec<_>, _>>()?;
        let mut parameters: Vec<Vec<Lease>> = order.iter().map(|_| Vec::new()).collect();
        let mut by_index: Vec<(ParameterIndex, usize)> = order.into_iter().zip(0..).collect();
        by_index.sort_unstable();
        for one in kept {
            let at = by_index.binary_search_by_key(&one.parameter, |(index, _)| *index);
            let at = at.expect("what came back was asked for");
            let lease = if self.options.is_reader { self.memory.views.own(one.lease)? } else { one.lease };
            parameters[by_index[at].1].push(lease);
        }
        Ok(View { parameters, _hold: hold })
    }
}

impl ViewArenas {
    /// Memory for a value.
    pub(super) fn take(&mut self, bytes: u32) -> Result<Lease, Failure> {
        let slot = bytes.next_power_of_two().max(64);
        let known = self.arenas.iter().filter(|(size, _)| *size == slot);
        if let Some(lease) = known.filter_map(|(_, arena)| arena.take(bytes).ok()).next() {
            return Ok(lease);
        }
        let mut budget = Budget::new();
        budget.line("values for views", slot, (ARENA_BYTES / slot).max(4).into());
        let arena = Arena::new(&budget)?;
        let lease = arena.take(bytes)?;
        self.arenas.push((slot, arena));
        Ok(lease)
    }

    /// Copies a lease into memory of the client. A server's budget has no versions held by readers.
    fn own(&mut self, lease: Lease) -> Result<Lease, Failure> {
        if !lease.is_foreign() {
            return Ok(lease);
        }
        let mut own = self.take(lease.len())?;
        lease.copy_to(own.bytes_mut());
        if lease.is_kept() {
            return Ok(own);
        }
        Err(Failure::call("the connection ended while a value was read; the call may be repeated"))
    }
}
