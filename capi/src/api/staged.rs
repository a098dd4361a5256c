//! Staging of contents on a device: pinned pages of the host hold them during the call.
//!
//! A gradient is copied from the device before it is checked; a value is copied to the device after the call succeeds.
//! The rest of the library treats the pages as memory of the caller. Of memory with
//! replicas, a gradient is the sum of all replicas, a value is sent from the first, and a fetched value goes to all.

use std::ffi::{c_int, c_void};

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_kernels::cuda::ForeignClaim;

use super::checked::{Call, TensorClaim};
use pserver_client::{Client, GradientSlice};

/// The pinned pages of one call. They are kept as long as the call may use them: until the C function returns, or, for
/// a started call, until its wait returns.
#[derive(Default)]
pub(super) struct Staged {
    sent: Vec<Page>,
    wanted: Vec<Page>,
}

struct Page {
    claim: ForeignClaim,
    /// The address of the caller's memory.
    caller_address: usize,
}

/// The elements of a content.
#[derive(Clone, Copy)]
pub(super) enum As {
    /// A gradient with elements of this type.
    Gradient(c_int),
    Value,
    /// Gradients of rows. Memory with replicas is refused, because the row ids of the replicas are unknown.
    Rows,
}

impl Staged {
    /// Gradients as they are sent, checked.
    pub(super) fn gradients<'call>(
        &mut self,
        call: &'call Call,
        client: &Client,
        claims: &[TensorClaim],
    ) -> Result<Vec<GradientSlice<'call>>, Failure> {
        let sent = |(index, claim): (usize, &TensorClaim)| {
            let read = As::Gradient(claim.element_type);
            let content = self.sent_from(client, claim.content, claim.content_len, read)?;
            call.parameter(&TensorClaim { content, ..*claim }, &format!("grads[{index}]"))
        };
        let gradients = claims.iter().enumerate().map(sent).collect::<Result<_, _>>()?;
        self.settle()?;
        Ok(gradients)
    }

    /// A value as it is sent, checked.
    pub(super) fn value<'call>(
        &mut self,
        call: &'call Call,
        client: &Client,
        claim: impl Into<TensorClaim>,
        what: &str,
    ) -> Result<GradientSlice<'call>, Failure> {
        let claim = claim.into();
        let content = self.sent_from(client, claim.content, claim.content_len, As::Value)?;
        self.settle()?;
        call.parameter(&TensorClaim { content, ..claim }, what)
    }

    /// Destinations of fetched values.
    pub(super) fn wanted<T: Copy + Into<TensorClaim>>(
        &mut self,
        client: &Client,
        claims: &[T],
    ) -> Result<Vec<TensorClaim>, Failure> {
        let wanted = |claim: &T| {
            let claim = (*claim).into();
            let content = self.wanted_at(client, claim.content, claim.content_len)?;
            Ok(TensorClaim { content, ..claim })
        };
        claims.iter().map(wanted).collect()
    }

    /// The memory that content is read from. Content on a device is copied to pages, which have it after
    /// [`Staged::settle`].
    pub(super) fn sent_from(
        &mut self,
        client: &Client,
        content: *mut c_void,
        len: impl Into<i64>,
        read: As,
    ) -> Result<*mut c_void, Failure> {
        let Some(mut claim) = claim(client, content, len)? else { return Ok(content) };
        match read {
            As::Rows if claim.has_replicas() => {
                return Err(Failure::call(format!(
                    "rows at {content:p}, which has replicas whose row ids are unknown; expected memory without \
                     replicas, and a call for each device"
                )));
            }
            As::Gradient(number) => match ElementType::from_number(i64::from(number)) {
                Some(element_type) => claim.begin_fetch_sum(element_type)?,
                None => claim.begin_fetch()?, // the check of the claim refuses the number
            },
            As::Value | As::Rows => claim.begin_fetch()?,
        }
        let start = claim.start().as_ptr().cast();
        self.sent.push(Page { claim, caller_address: content.addr() });
        Ok(start)
    }

    /// The memory that content is written to: for content on a device pages, which [`Staged::store`] copies there.
    pub(super) fn wanted_at(
        &mut self,
        client: &Client,
        content: *mut c_void,
        len: impl Into<i64>,
    ) -> Result<*mut c_void, Failure> {
        let Some(claim) = claim(client, content, len)? else { return Ok(content) };
        let start = claim.start().as_ptr().cast();
        self.wanted.push(Page { claim, caller_address: content.addr() });
        Ok(start)
    }

    /// Waits until the contents to send are in the pages.
    pub(super) fn settle(&mut self) -> Result<(), Failure> {
        self.sent.iter_mut().try_for_each(|page| page.claim.settle())
    }

    /// Copies fetched contents to the device.
    pub(super) fn store(&mut self) -> Result<(), Failure> {
        self.wanted.iter_mut().try_for_each(|page| page.claim.begin_store())?;
        self.wanted.iter_mut().try_for_each(|page| page.claim.settle())
    }

    /// The caller's memory for a page; other memory is the caller's own.
    pub(super) fn callers(&self, content: *mut c_void) -> *mut c_void {
        let page = self.wanted.iter().find(|page| page.claim.start().as_ptr().addr() == content.addr());
        page.map_or(content, |page| std::ptr::without_provenance_mut(page.caller_address))
    }

    /// Whether nothing of the call lies on a device.
    pub(super) fn is_empty(&self) -> bool {
        self.sent.is_empty() && self.wanted.is_empty()
    }
}

/// The pinned pages for content on a device; none for other memory, and none for content that will be refused.
fn claim(client: &Client, content: *mut c_void, len: impl Into<i64>) -> Result<Option<ForeignClaim>, Failure> {
    match usize::try_from(len.into()) {
        Ok(bytes) if 0 < bytes => client.claim(content.addr(), bytes),
        _ => Ok(None),
    }
}
