use std::sync::Mutex;

use pserver_core::server::ShardReport;
use pserver_transport::loopback::Hub;

use super::*;
use crate::machine::OsMachine;
use crate::telemetry::SessionReport;

/// A session that notes its end, and panics in its second turn if it is to.
struct EndingSession {
    name: &'static str,
    panics: bool,
    turns: u32,
    ended: Arc<Mutex<Vec<&'static str>>>,
}

impl NodeSession for EndingSession {
    fn report(&self, _: Now) -> SessionReport {
        SessionReport::Shard(ShardReport::default(), None)
    }

    fn handle(&mut self, _: Now, _: Event, _: &mut Vec<ServerOutput>) -> Result<(), Failure> {
        Ok(())
    }

    fn work(&mut self, _: Now, _: &mut Vec<ServerOutput>) -> Result<bool, Failure> {
        self.turns += 1;
        assert!(!self.panics || self.turns < 2, "a defect");
        Ok(true)
    }

    fn deadline(&self) -> Option<Now> {
        None
    }

    fn finish(&mut self) -> Result<(), Failure> {
        self.ended.lock().unwrap().push(self.name);
        Ok(())
    }
}

/// The sessions of a thread that are finished, of these and whether each panics.
fn finished(sessions: &[(&'static str, bool)]) -> Vec<&'static str> {
    let ended = Arc::default();
    let transport = Hub::default().transport();
    let mut thread = SessionThread::shared("a thread".to_owned(), transport, Arc::new(OsMachine::start())).unwrap();
    for (lane, (name, panics)) in (1..).zip(sessions) {
        let session = EndingSession { name, panics: *panics, turns: 0, ended: Arc::clone(&ended) };
        // The thread may have ended already.
        let _ = thread.entry().enter(lane, session, SessionControl::new(thread.entry().doorbell().clone()));
    }
    while !thread.has_ended() {
        std::thread::yield_now();
    }
    assert!(thread.join().unwrap_err().to_string().contains("a session panicked"));
    let mut ended = ended.lock().unwrap().clone();
    ended.sort_unstable();
    ended
}

#[test]
fn the_other_sessions_of_a_thread_are_finished_after_a_panic() {
    assert_eq!(finished(&[("one", false), ("two", true)]), ["one"]);
    assert!(finished(&[("one", true)]).is_empty());
}
