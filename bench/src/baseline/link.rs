//! A raw TCP link: writers that write and readers that read, and nothing that answers.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result};

/// A link's streams, connected and warm.
pub(crate) struct WarmStreams {
    streams: Vec<(TcpStream, TcpStream)>,
}

impl WarmStreams {
    /// So many streams over this machine's loopback.
    pub(crate) fn new(streams: u32) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("no port for a link")?;
        let address = listener.local_addr().context("no address")?;
        let connect = |_| -> Result<_> {
            let near = TcpStream::connect(address).context("a link cannot be connected")?;
            let (far, _) = listener.accept().context("a link cannot be accepted")?;
            near.set_nodelay(true)?;
            far.set_nodelay(true)?;
            Ok((near, far))
        };
        Ok(Self { streams: (0..streams).map(connect).collect::<Result<_>>()? })
    }

    /// Seconds for `bytes` on every stream, in writes and reads of `chunk` bytes; with `both_ways` as many come back
    /// at the same time.
    pub(crate) fn seconds(&self, bytes: usize, chunk: usize, both_ways: bool) -> Result<f64> {
        let start = Instant::now();
        thread::scope(|scope| {
            let mut threads = Vec::new();
            for (near, far) in &self.streams {
                threads.push(scope.spawn(move || write(near, bytes, chunk)));
                threads.push(scope.spawn(move || read(far, bytes, chunk)));
                if both_ways {
                    threads.push(scope.spawn(move || write(far, bytes, chunk)));
                    threads.push(scope.spawn(move || read(near, bytes, chunk)));
                }
            }
            threads.into_iter().try_for_each(|one| one.join().expect("moving bytes does not panic"))
        })?;
        Ok(start.elapsed().as_secs_f64())
    }
}

fn write(mut stream: &TcpStream, bytes: usize, chunk: usize) -> Result<()> {
    let buffer = vec![1; chunk];
    for start in (0..bytes).step_by(chunk) {
        stream.write_all(&buffer[..chunk.min(bytes - start)]).context("writing to a link")?;
    }
    Ok(())
}

fn read(mut stream: &TcpStream, bytes: usize, chunk: usize) -> Result<()> {
    let mut buffer = vec![0; chunk];
    for start in (0..bytes).step_by(chunk) {
        stream.read_exact(&mut buffer[..chunk.min(bytes - start)]).context("reading from a link")?;
    }
    Ok(())
}
