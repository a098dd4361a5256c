//! The client of a trainer: borrowed, or shared with others that keep it.

use std::ops::Deref;
use std::sync::Arc;

use pserver_client::Client;

/// A client for as long as its trainer lives.
pub enum HeldClient<'c> {
    /// Its owner outlives the trainer.
    Borrowed(&'c Client),
    /// The trainer is one of its owners.
    Shared(Arc<Client>),
}

impl Deref for HeldClient<'_> {
    type Target = Client;

    fn deref(&self) -> &Client {
        match self {
            Self::Borrowed(client) => client,
            Self::Shared(client) => client,
        }
    }
}

impl<'c> From<&'c Client> for HeldClient<'c> {
    fn from(client: &'c Client) -> Self {
        Self::Borrowed(client)
    }
}

impl From<Arc<Client>> for HeldClient<'_> {
    fn from(client: Arc<Client>) -> Self {
        Self::Shared(client)
    }
}
