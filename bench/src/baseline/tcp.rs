//! The baseline server over TCP: a head of 16 bytes and a chunk, back and forth, one thread for each trainer.
//!
//! A trainer is one thread that writes what the socket takes and reads what it has, so neither direction waits for
//! the other; when everything is written it blocks in reading. The server's thread of a trainer reads a chunk; who
//! reads a chunk's last gradient sums; every thread answers its own trainer, in the order of chunks.

use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pserver_core::optim::Gradient;
use pserver_kernels::cpu;

use super::BaselinePlan;
use super::wire::{HEAD_BYTES, RoundCursor, Socket, head};
use crate::child;
use crate::job::Poll;
use crate::report::announce;
use crate::sizes::length;
use crate::trainer::Exchange;

/// One chunk of the server.
struct Cell {
    /// Each trainer's gradient; its thread alone takes the lock, until all are here.
    gradients: Vec<Mutex<Vec<u8>>>,
    value: RwLock<Vec<u8>>,
    /// Gradients of the open round that are here.
    arrived: Mutex<u32>,
    /// Rounds summed.
    rounds: AtomicU64,
    summed: Condvar,
}

/// The server's process.
pub(crate) fn serve(plan: &BaselinePlan) -> Result<()> {
    let listener = TcpListener::bind(&plan.address).with_context(|| format!("{} is not to be had", plan.address))?;
    let address = listener.local_addr().context("no address")?;
    let cells: Arc<Vec<Cell>> = Arc::new((0..plan.chunks()).map(|chunk| Cell::new(plan, chunk)).collect());
    let plan = plan.clone();
    let accept = move || {
        for (trainer, socket) in (0..plan.trainers).zip(listener.incoming()) {
            let (plan, cells) = (plan.clone(), Arc::clone(&cells));
            let serve = move || -> Result<()> {
                let socket = Socket::new(socket.context("a trainer cannot be accepted")?, plan.poll, usize::MAX)?;
                serve_one(&plan, &cells, length(u64::from(trainer)), &socket)
            };
            std::thread::spawn(move || {
                if let Err(error) = serve() {
                    announce(&format!("baseline server: {error:#}"));
                    std::process::exit(1);
                }
            });
        }
    };
    std::thread::Builder::new().name("baseline-accept".to_owned()).spawn(accept).context("no thread")?;
    child::serve_usage(&address.to_string())
}

/// Serves one trainer until it is gone.
fn serve_one(plan: &BaselinePlan, cells: &[Cell], trainer: usize, socket: &Socket) -> Result<()> {
    // A lone trainer's gradient is its sum: it is read to where it is kept.
    let is_alone = plan.trainers == 1 && plan.dtype.gradient() == plan.dtype.value();
    for round in 1.. {
        let mut answered = 0;
        for (chunk, cell) in cells.iter().enumerate() {
            let is_there = if is_alone {
                socket.read_chunk(chunk, &mut cell.value.write().unwrap_or_else(PoisonError::into_inner))?
            } else {
                let mut gradient = cell.gradients[trainer].lock().unwrap_or_else(PoisonError::into_inner);
                socket.read_chunk(chunk, &mut gradient)?
            };
            if !is_there {
                return Ok(());
            }
            if is_alone {
                cell.rounds.store(round, Ordering::Relaxed);
            } else {
                cell.arrive(plan, round);
            }
            while answered <= chunk && round <= cells[answered].rounds.load(Ordering::Acquire) {
                cells[answered].answer(socket, answered, round)?;
                answered += 1;
            }
        }
        for (chunk, cell) in cells.iter().enumerate().skip(answered) {
            cell.wait(round, plan.poll);
            cell.answer(socket, chunk, round)?;
        }
    }
    Ok(())
}

impl Cell {
    fn new(plan: &BaselinePlan, chunk: usize) -> Self {
        // Pages that no chunk uses are never touched and take no memory.
        let gradient = || Mutex::new(vec![0; plan.gradient_span(chunk).len()]);
        Self {
            gradients: (0..plan.trainers).map(|_| gradient()).collect(),
            value: RwLock::new(vec![0; plan.span(chunk).len()]),
            arrived: Mutex::new(0),
            rounds: AtomicU64::new(0),
            summed: Condvar::new(),
        }
    }

    /// A gradient is here; with the last one all are summed.
    fn arrive(&self, plan: &BaselinePlan, round: u64) {
        let mut arrived = self.arrived.lock().unwrap_or_else(PoisonError::into_inner);
        *arrived += 1;
        if *arrived < plan.trainers {
            return;
        }
        *arrived = 0;
        let held: Vec<_> =
            self.gradients.iter().map(|one| one.lock().unwrap_or_else(PoisonError::into_inner)).collect();
        let gradients: Vec<_> =
            held.iter().map(|bytes| Gradient { bytes, element_type: plan.dtype.gradient() }).collect();
        let mut value = self.value.write().unwrap_or_else(PoisonError::into_inner);
        cpu::sum(plan.dtype.value(), &mut value, &gradients);
        self.rounds.store(round, Ordering::Release);
        self.summed.notify_all();
    }

    fn wait(&self, round: u64, poll: Poll) {
        if super::turns::look(poll, || round <= self.rounds.load(Ordering::Acquire)) {
            return;
        }
        let mut arrived = self.arrived.lock().unwrap_or_else(PoisonError::into_inner);
        while self.rounds.load(Ordering::Acquire) < round {
            arrived = self.summed.wait(arrived).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn answer(&self, socket: &Socket, chunk: usize, round: u64) -> Result<()> {
        let value = self.value.read().unwrap_or_else(PoisonError::into_inner);
        let head = head(chunk, value.len(), round);
        socket.write_all(&head, &value)
    }
}

/// A trainer's end.
pub(crate) struct TcpTrainer {
    plan: BaselinePlan,
    socket: Socket,
    gradient: Vec<u8>,
    value: Vec<u8>,
    round: u64,
}

impl TcpTrainer {
    pub(crate) fn new(plan: &BaselinePlan, _trainer: u32) -> Result<Self> {
        let socket =
            TcpStream::connect(&plan.address).with_context(|| format!("no baseline server at {}", plan.address))?;
        let socket = Socket::new(socket, plan.poll, length(plan.piece_bytes))?;
        let gradient = vec![0; length(plan.gradient_bytes())];
        Ok(Self { plan: plan.clone(), socket, gradient, value: vec![0; length(plan.bytes)], round: 0 })
    }

    fn exchange(&mut self) -> Result<()> {
        let chunks = self.plan.chunks();
        let mut out = RoundCursor::new(HEAD_BYTES + self.plan.gradient_span(0).len());
        let mut back = RoundCursor::new(HEAD_BYTES + self.plan.span(0).len());
        let mut answer = [0; HEAD_BYTES];
        let mut idle_since: Option<Instant> = None;
        while back.chunk < chunks {
            let wrote = out.chunk < chunks && self.write(&mut out)?;
            let may_block = out.chunk == chunks && self.plan.poll == Poll::Block;
            let read = self.read(&mut back, &mut answer, may_block)?;
            if wrote || read {
                idle_since = None;
                continue;
            }
            match self.plan.poll {
                Poll::Busy => std::hint::spin_loop(),
                Poll::Block => self.socket.ready(out.chunk < chunks)?,
                Poll::Adaptive => {
                    let since = *idle_since.get_or_insert_with(Instant::now);
                    if since.elapsed() > Duration::from_micros(50) {
                        self.socket.ready(out.chunk < chunks)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Writes what the socket takes of one chunk; false when it takes nothing.
    fn write(&self, out: &mut RoundCursor) -> Result<bool> {
        let body = &self.gradient[self.plan.gradient_span(out.chunk)];
        let head = head(out.chunk, body.len(), self.round);
        let (first, second) = out.rest(&head, body);
        match self.socket.send_now(first, second) {
            Ok(count) => out.advance(count, |chunk| HEAD_BYTES + self.plan.gradient_span(chunk).len()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error).context("writing to the baseline server"),
        }
        Ok(true)
    }

    /// Reads what the socket has of one chunk; false when it has nothing.
    fn read(&mut self, back: &mut RoundCursor, answer: &mut [u8; HEAD_BYTES], may_block: bool) -> Result<bool> {
        let chunk = back.chunk;
        let body = &mut self.value[self.plan.span(chunk)];
        let bytes = body.len();
        let (first, second) = back.rest_mut(answer, body);
        match self.socket.receive(first, second, may_block) {
            Ok(0) => anyhow::bail!("the baseline server has hung up"),
            Ok(count) => back.advance(count, |chunk| HEAD_BYTES + self.plan.span(chunk).len()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error).context("reading from the baseline server"),
        }
        if back.chunk > chunk {
            ensure!(*answer == head(chunk, bytes, self.round), "an answer to another round");
        }
        Ok(true)
    }
}

impl Exchange for TcpTrainer {
    fn gradient(&mut self) -> &mut [u8] {
        &mut self.gradient
    }

    fn round(&mut self, begin: &mut dyn FnMut() -> Instant) -> Result<Duration> {
        self.round += 1;
        let start = begin();
        self.exchange()?;
        Ok(start.elapsed())
    }

    fn value(&mut self) -> &[u8] {
        &self.value
    }

    fn settle(&mut self) -> Result<()> {
        Ok(())
    }
}
