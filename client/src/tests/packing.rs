use std::collections::BTreeMap;

use pserver_core::client::{Client, Identity, LaneId};
use pserver_core::dtype::ElementType::Float32;
use pserver_core::ids::{ChunkId, ChunkIndex, ParameterIndex, Round, Sequence};
use pserver_core::port::Incoming;
use pserver_core::wire::{Address, Entry, Flags, Kind, Role, Scheme};

use super::servers::TestJob;
use crate::packer::{ChunkPiece, PackedFrame, Packer};

const MIB: u32 = 1024 * 1024;

fn piece(parameter: u32, chunk: u32, bytes: u32, sequence: u64) -> ChunkPiece {
    let id = ChunkId { parameter: ParameterIndex(parameter), chunk: ChunkIndex(chunk.into()) };
    let entry = Entry { bytes, ..Entry::bare(id, Round(1), Float32) };
    ChunkPiece { entry, payload: None, into: Some(Incoming::Discard { bytes }), sequence: Sequence(sequence) }
}

/// Packs pieces, each for a lane; the frames in the order in which they leave, as lane and parameters.
fn packed(mut packer: Packer, pieces: impl IntoIterator<Item = (LaneId, ChunkPiece)>) -> Vec<(LaneId, PackedFrame)> {
    let mut frames = Vec::new();
    for (lane, piece) in pieces {
        frames.extend(packer.add(lane, piece).map(|full| (lane, full)));
    }
    frames.extend(packer.rest());
    frames
}

fn counts(frames: &[(LaneId, PackedFrame)]) -> Vec<usize> {
    frames.iter().map(|(_, packed)| packed.frame.entries.len()).collect()
}

/// Names of so many lanes, in their order.
fn lanes(count: usize) -> Vec<LaneId> {
    let mut client = Client::new(Identity::stranger(Role::Trainer, String::new(), 1));
    let address = Address { scheme: Scheme::Loopback, host: "server-0".to_owned(), port: 1 };
    (0..count).map(|_| client.add_lane(address.clone(), 1, String::new())).collect()
}

#[test]
fn small_chunks_of_a_lane_share_frames_up_to_a_length() {
    let lane = lanes(1)[0];
    let one = |bytes| packed(Packer::new(Kind::Pull, MIB, 1, 10), (0..10).map(|at| (lane, piece(at, 0, bytes, 0))));
    assert_eq!(counts(&one(100)), [10]);
    assert_eq!(counts(&one(MIB / 16)), [4, 4, 2], "a shared frame has at most 256 KiB");
    assert_eq!(counts(&one(MIB)), [1; 10], "a large chunk has a frame of its own");
    // The shared length is no longer than a chunk.
    let small = packed(Packer::new(Kind::Pull, 1000, 1, 4), (0..4).map(|at| (lane, piece(at, 0, 500, 0))));
    assert_eq!(counts(&small), [2, 2]);
}

#[test]
fn frames_of_many_small_chunks_leave_before_all_are_packed() {
    for (count, expected) in [(1_usize, 2048_usize), (4, 512), (8, 256), (100, 256)] {
        let lanes = lanes(count);
        let lane_of = |id: u32| lanes[id as usize % count];
        let pieces = (0..10_000_u32).map(|at| (lane_of(at), piece(at, 0, 4, 0)));
        let frames = packed(Packer::new(Kind::Pull, MIB, count, 10_000), pieces);
        let (most, all) = (counts(&frames).into_iter().max(), counts(&frames).iter().sum::<usize>());
        assert_eq!((most, all), (Some(expected.min(10_000 / count)), 10_000), "{count} lanes");
        for (lane, packed) in &frames {
            let ids = packed.frame.entries.iter().map(|entry| entry.id.parameter.0);
            assert!(ids.clone().is_sorted() && ids.clone().all(|id| lane_of(id) == *lane));
            assert_eq!(packed.body.into.len(), packed.frame.entries.len());
            assert_eq!(Some(packed.body.priority), ids.min(), "the first parameter is the most urgent");
        }
    }
}

#[test]
fn chunks_of_another_call_number_or_control_message_do_not_share_a_frame() {
    let lane = lanes(1)[0];
    let pieces = [(0, 1), (1, 1), (2, 2), (3, 1)].map(|(parameter, call)| (lane, piece(parameter, 0, 4, call)));
    assert_eq!(counts(&packed(Packer::new(Kind::Push, MIB, 1, 4), pieces)), [2, 1, 1]);
    let own = BTreeMap::from([(ParameterIndex(1), b"own".to_vec())]);
    let packer = Packer::new(Kind::Push, MIB, 1, 4).with(Flags::default(), b"all".to_vec()).with_controls(own);
    let frames = packed(packer, (0..4).map(|at| (lane, piece(at, 0, 4, 1))));
    let controls: Vec<&[u8]> = frames.iter().map(|(_, packed)| packed.frame.control.as_slice()).collect();
    assert_eq!((counts(&frames), controls), (vec![1, 1, 2], vec![&b"all"[..], b"own", b"all"]));
}

#[test]
fn a_pull_of_many_small_parameters_is_one_frame_for_each_shard() {
    let job = TestJob::start(2, 2, 1);
    let names: Vec<String> = (0..100).map(|number| format!("w{number}")).collect();
    let parameters: Vec<_> = names.iter().map(|name| (name.as_str(), vec![1.0; 2])).collect();
    let client = job.begin(&parameters);
    job.take_seen(Kind::Pull);
    let mut values = vec![[0.0_f32; 2]; 100];
    let places = names.iter().zip(&mut values);
    let mut places: Vec<_> =
        places.map(|(name, one)| crate::DestinationSlice::new(name, bytemuck::cast_slice_mut(one))).collect();
    client.pull(&mut places).expect("they are there");
    let frames = job.take_seen(Kind::Pull);
    let mut chunks: Vec<_> = frames.iter().flat_map(|frame| frame.chunks.clone()).collect();
    chunks.sort_unstable();
    assert_eq!(chunks, (0..100).map(|parameter| (parameter, 0)).collect::<Vec<_>>());
    assert_eq!(frames.len(), 4, "{frames:?}");
    assert_eq!(values, [[1.0; 2]; 100]);
}
