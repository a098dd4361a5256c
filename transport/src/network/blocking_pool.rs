//! A small thread pool for blocking operations, with at most one operation at a time for each host.
//!
//! So a host whose operations are slow delays its own next one, and others only while all threads are busy. It never
//! delays a lane.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Semaphore;
use tokio::task::JoinError;

/// Operations that run at once.
const POOL_THREADS_MAX: usize = 4;

pub(super) struct BlockingPool {
    threads: Arc<Semaphore>,
    /// Hosts with an operation that runs or waits.
    hosts: Mutex<BTreeMap<Option<IpAddr>, Arc<Semaphore>>>,
}

impl BlockingPool {
    pub(super) fn new() -> Self {
        Self { threads: Arc::new(Semaphore::new(POOL_THREADS_MAX)), hosts: Mutex::default() }
    }

    /// Runs an operation for `host` when its turn comes. A started operation finishes even if the caller has gone.
    ///
    /// # Errors
    /// The operation panicked.
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
        // Every operation leaves the map consistent, so a panic elsewhere does no harm.
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
    fn a_slow_host_delays_only_its_own_operations() {
        let runtime = Builder::new_current_thread().build().expect("a runtime");
        let blocking_pool = Arc::new(BlockingPool::new());
        let host = |number: u8| Some(IpAddr::from([10, 0, 0, number]));
        let (go, stuck) = mpsc::channel::<()>();
        let (say, said) = mpsc::channel();
        let task = |host: Option<IpAddr>, make: Box<dyn FnOnce() + Send>| {
            let blocking_pool = Arc::clone(&blocking_pool);
            runtime.spawn(async move { blocking_pool.run(host, make).await.expect("it does not panic") })
        };
        let first = task(host(1), Box::new(move || stuck.recv().expect("it goes on")));
        let own = task(host(1), Box::new(move || say.send(()).expect("somebody listens")));
        runtime.block_on(async {
            for _ in 0..3 {
                blocking_pool.run(host(2), || ()).await.expect("another host is not kept");
            }
        });
        assert!(said.try_recv().is_err(), "its second waits for its first");
        go.send(()).expect("it waits");
        runtime.block_on(async { (first.await.expect("it ends"), own.await.expect("it ends")) });
        said.try_recv().expect("then it is its turn");
        assert_eq!(blocking_pool.threads.available_permits(), POOL_THREADS_MAX, "every thread is free");
    }
}
