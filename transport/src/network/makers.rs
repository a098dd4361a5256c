//! Who makes what takes the system long: a few threads, one for each host that asks.
//!
//! So somebody whose connections take long to make keeps its own next one waiting, and the others' for as long as all
//! threads are kept, but no lane.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Semaphore;
use tokio::task::JoinError;

/// Threads that make something at once.
const MAKERS_MAX: usize = 4;

pub(super) struct Makers {
    threads: Arc<Semaphore>,
    /// Hosts that something is made for, or that wait.
    hosts: Mutex<BTreeMap<Option<IpAddr>, Arc<Semaphore>>>,
}

impl Makers {
    pub(super) fn new() -> Self {
        Self { threads: Arc::new(Semaphore::new(MAKERS_MAX)), hosts: Mutex::default() }
    }

    /// Makes something for `host`, when it is its turn. What is begun is finished, also when nobody waits any more.
    ///
    /// # Errors
    /// When making it panics.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        host: Option<IpAddr>,
        make: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, JoinError> {
        let own = self.host(host).acquire_owned().await.expect("it is never closed");
        let thread = Arc::clone(&self.threads).acquire_owned().await.expect("it is never closed");
        let made = tokio::task::spawn_blocking(move || {
            let made = make();
            drop((own, thread));
            made
        });
        made.await
    }

    fn host(&self, host: Option<IpAddr>) -> Arc<Semaphore> {
        // It is whole after every operation, so a panic elsewhere does not spoil it.
        let mut hosts = self.hosts.lock().unwrap_or_else(PoisonError::into_inner);
        hosts.retain(|_, waiting| Arc::strong_count(waiting) > 1);
        Arc::clone(hosts.entry(host).or_insert_with(|| Arc::new(Semaphore::new(1))))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use tokio::runtime::Builder;

    use super::*;

    #[test]
    fn who_takes_long_keeps_only_its_own_waiting() {
        let runtime = Builder::new_current_thread().build().expect("a runtime");
        let makers = Arc::new(Makers::new());
        let host = |number: u8| Some(IpAddr::from([10, 0, 0, number]));
        let (go, stuck) = mpsc::channel::<()>();
        let (say, said) = mpsc::channel();
        let task = |host: Option<IpAddr>, make: Box<dyn FnOnce() + Send>| {
            let makers = Arc::clone(&makers);
            runtime.spawn(async move { makers.run(host, make).await.expect("it does not panic") })
        };
        let first = task(host(1), Box::new(move || stuck.recv().expect("it goes on")));
        let own = task(host(1), Box::new(move || say.send(()).expect("somebody listens")));
        runtime.block_on(async {
            for _ in 0..3 {
                makers.run(host(2), || ()).await.expect("another host is not kept");
            }
        });
        assert!(said.try_recv().is_err(), "its second waits for its first");
        go.send(()).expect("it waits");
        runtime.block_on(async { (first.await.expect("it ends"), own.await.expect("it ends")) });
        said.try_recv().expect("then it is its turn");
        assert_eq!(makers.threads.available_permits(), MAKERS_MAX, "every thread is free");
    }
}
