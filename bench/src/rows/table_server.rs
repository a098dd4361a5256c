//! The baseline server of rows: a hash table, an array and a socket for each trainer. It does what rows need, and no
//! more: a trainer adds the gradients of rows that come several times and sends each row once; the server finds rows,
//! and adds gradients to them or sends them; the trainer copies each to every place that wants it.
//!
//! It waits for no other trainer, keeps nothing on a disk, and knows one table, one rule and one type.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::io::{self, IoSlice, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result};
use bytemuck::{cast_slice, cast_slice_mut};

use super::baseline::Array;

/// The places of ids.
type Places = HashMap<u64, usize, BuildHasherDefault<IdHasher>>;

/// A hash of one multiplication, as ids are no attack here.
#[derive(Default)]
struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("ids are numbers");
    }

    fn write_u64(&mut self, id: u64) {
        self.0 = id.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(26);
    }
}

/// The rows of the server.
struct KeptRows {
    places: Places,
    array: Array,
}

impl KeptRows {
    fn find(&self, ids: &[u64]) -> Vec<usize> {
        ids.iter().map(|id| self.places[id]).collect()
    }
}

/// Serves tables of `rows` rows of zeros until all trainers have left.
pub(super) fn serve(listener: TcpListener, trainers: usize, rows: usize, width: usize) -> Result<JoinHandle<()>> {
    let places = (0..rows as u64).zip(0..).collect();
    let table = Arc::new(Mutex::new(KeptRows { places, array: Array::new(rows, width)? }));
    let run = move || {
        let accepted = |_| {
            let (stream, table) = (listener.accept().map(|(stream, _)| stream), Arc::clone(&table));
            thread::spawn(move || stream.and_then(|stream| serve_trainer(stream, &table, width)))
        };
        (0..trainers).map(accepted).collect::<Vec<_>>().into_iter().for_each(|one| drop(one.join()));
    };
    thread::Builder::new().spawn(run).context("the baseline server's thread")
}

/// Answers pushes and pulls, until the trainer is gone.
fn serve_trainer(mut stream: TcpStream, table: &Mutex<KeptRows>, width: usize) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let (mut ids, mut rows): (Vec<u64>, Vec<f32>) = (Vec::new(), Vec::new());
    let mut head = [0_u64; 2];
    while stream.read_exact(cast_slice_mut(&mut head)).is_ok() {
        let (count, is_push) = (usize::try_from(head[0]).unwrap_or(0), head[1] == 1);
        ids.resize(count, 0);
        stream.read_exact(cast_slice_mut(&mut ids))?;
        rows.resize(count * width, 0.0);
        if is_push {
            stream.read_exact(cast_slice_mut(&mut rows))?;
        }
        let mut table = table.lock().unwrap_or_else(PoisonError::into_inner);
        let found = table.find(&ids);
        if is_push {
            table.array.add(&found, &rows, width);
        } else {
            table.array.gather(&found, &mut rows, width);
        }
        drop(table);
        stream.write_all(if is_push { &[1] } else { cast_slice(&rows) })?;
    }
    Ok(())
}

/// A trainer of the baseline server.
pub(super) struct TableTrainer {
    stream: TcpStream,
    width: usize,
    /// The ids of a batch, each once, and where each is among them.
    ids: Vec<u64>,
    places: Places,
    /// Of each id of the batch, its place.
    order: Vec<usize>,
    rows: Vec<f32>,
}

impl TableTrainer {
    pub(super) fn new(stream: TcpStream, width: usize) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        let (ids, places, order, rows) = (Vec::new(), Places::default(), Vec::new(), Vec::new());
        Ok(Self { stream, width, ids, places, order, rows })
    }

    /// Sends the gradients of a batch.
    pub(super) fn push(&mut self, ids: &[u64], gradients: &[f32]) -> io::Result<()> {
        self.merge(ids);
        self.rows.clear();
        self.rows.resize(self.ids.len() * self.width, 0.0);
        for (place, gradient) in self.order.iter().zip(gradients.chunks_exact(self.width)) {
            let row = &mut self.rows[place * self.width..][..self.width];
            row.iter_mut().zip(gradient).for_each(|(sum, gradient)| *sum += gradient);
        }
        self.send(1)?;
        self.stream.read_exact(&mut [0])
    }

    /// Fetches the rows of a batch.
    pub(super) fn pull(&mut self, ids: &[u64], into: &mut [f32]) -> io::Result<()> {
        self.merge(ids);
        self.send(0)?;
        self.rows.resize(self.ids.len() * self.width, 0.0);
        self.stream.read_exact(cast_slice_mut(&mut self.rows))?;
        for (place, into) in self.order.iter().zip(into.chunks_exact_mut(self.width)) {
            into.copy_from_slice(&self.rows[place * self.width..][..self.width]);
        }
        Ok(())
    }

    fn merge(&mut self, ids: &[u64]) {
        self.ids.clear();
        self.places.clear();
        self.order.clear();
        for id in ids {
            let place = *self.places.entry(*id).or_insert_with(|| {
                self.ids.push(*id);
                self.ids.len() - 1
            });
            self.order.push(place);
        }
    }

    /// Sends a head and the ids, and for a push the rows, in as few calls as the system takes.
    fn send(&mut self, kind: u64) -> io::Result<()> {
        let head = [self.ids.len() as u64, kind];
        let rows = if kind == 1 { &self.rows[..] } else { &[] };
        let mut slices = [cast_slice(&head), cast_slice(&self.ids), cast_slice(rows)].map(IoSlice::new);
        let mut left = &mut slices[..];
        while left.iter().any(|slice| !slice.is_empty()) {
            let written = self.stream.write_vectored(left)?;
            IoSlice::advance_slices(&mut left, written);
        }
        Ok(())
    }
}
