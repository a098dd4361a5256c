//! Every limit, with the reason for it.

use std::time::Duration;

/// The smallest chunk a cluster may choose: below it the 32-byte entry is no longer small change.
pub const CHUNK_BYTES_MIN: u32 = 4 * 1024;
/// The chunk a cluster gets when nobody chooses. Measured on loopback TCP: 256 KiB to 4 MiB are alike, 64 KiB
/// costs twice as much.
pub const CHUNK_BYTES_DEFAULT: u32 = 1024 * 1024;
/// The largest chunk a cluster may choose.
pub const CHUNK_BYTES_MAX: u32 = 16 * 1024 * 1024;
const _: () = assert!(CHUNK_BYTES_MIN.is_power_of_two() && CHUNK_BYTES_MAX.is_power_of_two());
const _: () = assert!(CHUNK_BYTES_MIN <= CHUNK_BYTES_DEFAULT && CHUNK_BYTES_DEFAULT <= CHUNK_BYTES_MAX);

/// The payload of one frame: at least one chunk fits, and small chunks share a frame up to it.
pub const FRAME_PAYLOAD_BYTES_MAX: u32 = CHUNK_BYTES_MAX;
/// Entries in one frame; 4,096 entries of 32 bytes are 128 KiB, the most a peer can make us hold before payload.
pub const FRAME_ENTRIES_MAX: u32 = 4096;
/// Frames of one connection that land at once: while the payload of one moves, the heads of the next, the answers to
/// them and what asks for their payloads are on their way. Frames of a megabyte take 84 microseconds each on a wire of
/// 100 Gbit/s, so three of them cover a round trip of 250.
pub const LANDINGS_MAX: usize = 4;
/// The control message of one frame; longer lists travel in pages.
pub const FRAME_CONTROL_BYTES_MAX: u32 = 1024 * 1024;
/// The control message of a hello, which is read before anybody is known.
pub const HELLO_CONTROL_BYTES_MAX: u32 = 4096;

/// The payload of one journal record: a frame with its entries and control message, and room to grow; a length is
/// compared with it before a byte is allocated.
pub const JOURNAL_RECORD_BYTES_MAX: u32 = 64 * 1024 * 1024 + 64 * 1024;
const _: () = assert!(FRAME_PAYLOAD_BYTES_MAX + FRAME_CONTROL_BYTES_MAX < JOURNAL_RECORD_BYTES_MAX);

/// A parameter's bytes: 2^48, so that offsets fit the 48 bits of an address.
pub const PARAMETER_BYTES_MAX: u64 = 1 << 48;
/// The values of one row of a table: a frame's payload holds many, and a record with its states is small beside the
/// piece of memory it lies in.
pub const ROW_BYTES_MAX: u32 = 64 * 1024;
/// Buckets of a sparse parameter: each costs an entry in every push of every trainer.
pub const BUCKETS_MAX: u32 = 64 * 1024;
/// Ids of rows in the answer to one question after those that are there: 256 KiB, which a shard gathers and sorts in a
/// turn of its loop without keeping others waiting.
pub const LISTED_IDS_MAX: u32 = 32 * 1024;
/// What a shard replays of missed updates for one frame, and in one turn of its loop for all that wait, in bytes of
/// weights that an update goes over: what four full payloads would bring, so that a turn with it is as long as a few
/// frames are.
pub const ROWS_REPLAYED_BYTES: u64 = 4 * FRAME_PAYLOAD_BYTES_MAX as u64;
const _: () = assert!(ROW_BYTES_MAX as u64 <= ROWS_REPLAYED_BYTES, "an update of the widest row");
/// How long a shard takes in no gradients for a device in favour of somebody's departure, value or return that it
/// refused because the device was at work. A client comes again after 20 ms and a round trip: twelve times that, so
/// that one that is slow finds its place kept, and little enough that one that is gone holds training up for one pause.
pub const COMES_FIRST: Duration = Duration::from_millis(250);
/// A parameter's name in bytes of UTF-8.
pub const NAME_BYTES_MAX: usize = 1024;
/// Parameters in one job.
pub const PARAMETERS_MAX: u32 = 16 * 1024 * 1024;
/// Trainers in one job: their marks are kept for every chunk.
pub const TRAINERS_MAX: u32 = 4096;
/// Servers in one job.
pub const SERVERS_MAX: u16 = 4096;
/// Shards on one server.
pub const SHARDS_MAX: u16 = 256;
/// Dimensions of a parameter's shape: numpy's own bound.
pub const DIMENSIONS_MAX: usize = 64;
/// A parameter's encoded configuration, with the text of its rule; a declaration then fits a page many times over.
pub const PARAMETER_CONFIG_BYTES_MAX: usize = 64 * 1024;

/// A program in its text form, and in its binary form.
pub const PROGRAM_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Blocks of a program: one for every loop, and each is walked within the one around it.
pub const PROGRAM_BLOCKS_MAX: usize = 64;
/// Variables of a program, those that need no declaration among them.
pub const PROGRAM_VARIABLES_MAX: usize = 1024 * 1024;
/// Ops of a program.
pub const PROGRAM_OPS_MAX: usize = 1024 * 1024;
/// Inputs of an op, and outputs: one for every trainer, and some.
pub const PROGRAM_OPERANDS_MAX: usize = 8192;
const _: () = assert!(TRAINERS_MAX as usize * 2 <= PROGRAM_OPERANDS_MAX);
/// Items of one queue, and pieces that one accumulator takes.
pub const PROGRAM_QUEUE_MAX: u64 = 1024 * 1024;

/// Bytes that the variables of a program that runs may take together, unless who runs it says otherwise: what a large
/// host has. What a smaller one lacks, its system refuses.
pub const PROGRAM_MEMORY_BYTES_MAX: u64 = 1 << 38;
/// A string that a program receives, accumulates or sends to: addresses, whatever they look like.
pub const PROGRAM_STRING_BYTES_MAX: usize = NAME_BYTES_MAX;

/// State tensors of one rule. Each is as much memory as the parameter, so four times what Adam has is already a rule
/// that few can afford, and a kernel keeps an address for each in a register.
pub const STATES_MAX: usize = 8;
/// A rule's text: what a page or two hold, and far within [`PARAMETER_CONFIG_BYTES_MAX`].
pub const RULE_TEXT_BYTES_MAX: usize = 16 * 1024;
const _: () = assert!(2 * RULE_TEXT_BYTES_MAX <= PARAMETER_CONFIG_BYTES_MAX, "its settings need room too");
/// A name within a rule, which may become a state's name in checkpoints.
pub const RULE_NAME_BYTES_MAX: usize = 64;
/// Levels of one expression: reading and lowering it calls itself once or twice a level, and a thread's stack is small.
pub const RULE_DEPTH_MAX: usize = 128;
/// Operations on an element, after lowering: ten times the longest built-in rule, and values have 16-bit numbers.
pub const RULE_OPS_MAX: usize = 512;
/// Scalars of a rule, after lowering, with the constants among them: computed before every update of every chunk.
pub const RULE_SCALARS_MAX: usize = 256;
const _: () = assert!(RULE_OPS_MAX <= 1 << 16 && RULE_SCALARS_MAX <= 1 << 16, "they are numbered in 16 bits");
