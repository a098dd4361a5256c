//! Every limit, with the reason for it.

use std::time::Duration;

/// The smallest chunk a cluster may choose: its 32-byte entry is then below 1 % of the payload.
pub const CHUNK_BYTES_MIN: u32 = 4 * 1024;
/// The default chunk size. Measured on loopback TCP: 256 KiB to 4 MiB are alike, 64 KiB costs twice as much.
pub const CHUNK_BYTES_DEFAULT: u32 = 1024 * 1024;
/// The largest chunk a cluster may choose.
pub const CHUNK_BYTES_MAX: u32 = 16 * 1024 * 1024;
const _: () = assert!(CHUNK_BYTES_MIN.is_power_of_two() && CHUNK_BYTES_MAX.is_power_of_two());
const _: () = assert!(CHUNK_BYTES_MIN <= CHUNK_BYTES_DEFAULT && CHUNK_BYTES_DEFAULT <= CHUNK_BYTES_MAX);

/// The payload of one frame: at least one chunk fits, and small chunks share a frame up to it.
pub const FRAME_PAYLOAD_BYTES_MAX: u32 = CHUNK_BYTES_MAX;
/// Entries in one frame; 4,096 entries of 32 bytes are 128 KiB, the most that a peer can make a server hold before the
/// payload.
pub const FRAME_ENTRIES_MAX: u32 = 4096;
/// Bytes of a call's destinations from which copies into them go past the caches: more than a core's own cache has by
/// several times, so that the first values have left it when the last arrive. Measured through shared memory.
pub const PAST_CACHES_BYTES_MIN: usize = 8 * 1024 * 1024;
/// Receives posted at once for one connection: while the payload of one frame moves, the heads, answers and payload
/// requests of the next are in flight. A frame of 1 MiB takes 84 microseconds at 100 Gbit/s, so three cover a round
/// trip of 250.
pub const RECEIVES_MAX: usize = 4;
/// Unread answer bytes of a peer, after which its server stops reading from it: four of the longest frames, so that a
/// reading peer never waits, and few enough for many idle peers.
pub const UNREAD_BYTES_MAX: u64 = 64 * 1024 * 1024;
const _: () = assert!(4 * FRAME_PAYLOAD_BYTES_MAX as u64 <= UNREAD_BYTES_MAX);
/// Requests of one connection that wait for versions of a shard, beside two for each of its chunks: 13 MiB of them, and
/// more than a trainer has that waits once for everything.
pub const WAITS_PER_PEER_MAX: usize = 64 * 1024;
/// Waits that a shard ends in one turn of its loop because their time is up: about a millisecond of texts.
pub const WAITS_ENDED_PER_TURN: usize = 1024;
/// The control message of one frame; longer lists travel in pages.
pub const FRAME_CONTROL_BYTES_MAX: u32 = 1024 * 1024;
/// The control message of a hello, which is read before its sender is known.
pub const HELLO_CONTROL_BYTES_MAX: u32 = 4096;

/// The payload of one journal record: a frame with its entries and control message, and room to grow; a length is
/// compared with it before a byte is allocated.
pub const JOURNAL_RECORD_BYTES_MAX: u32 = 64 * 1024 * 1024 + 64 * 1024;
const _: () = assert!(FRAME_PAYLOAD_BYTES_MAX + FRAME_CONTROL_BYTES_MAX < JOURNAL_RECORD_BYTES_MAX);

/// How often a process tries to claim a directory that others claim at the same moment.
pub const OWNER_CLAIMS_MAX: u32 = 16;
/// The file that names a directory's owner: a host's name has at most 255 bytes.
pub const OWNER_RECORD_BYTES_MAX: usize = 4096;

/// The coordinator's file: the catalogue's pages, about a hundred bytes for each parameter, and 16 bytes for each
/// trainer; a length is compared with it before a byte is allocated.
pub const COORDINATOR_STATE_BYTES_MAX: usize = 16 * 1024 * 1024 * 1024;

/// A parameter's bytes: 2^48, so that offsets fit the 48 bits of an address.
pub const PARAMETER_BYTES_MAX: u64 = 1 << 48;
/// The values of one row of a table: a frame's payload holds many, and a record with its states is small beside the
/// piece of memory it lies in.
pub const ROW_BYTES_MAX: u32 = 64 * 1024;
/// Buckets of a sparse parameter: each costs an entry in every push of every trainer.
pub const BUCKETS_MAX: u32 = 64 * 1024;
/// Ids of rows in the answer to one listing: 256 KiB, which a shard gathers and sorts in one turn of its loop without
/// delaying other requests.
pub const LISTED_IDS_MAX: u32 = 32 * 1024;
/// Budget of missed updates that a shard replays for one frame, and in one turn for all waiting requests, in bytes of
/// weights: as much as four full payloads bring, so that such a turn is as long as a few frames.
pub const ROWS_REPLAYED_BYTES: u64 = 4 * FRAME_PAYLOAD_BYTES_MAX as u64;
const _: () = assert!(ROW_BYTES_MAX as u64 <= ROWS_REPLAYED_BYTES, "an update of the widest row");
/// Priority of a refused leave, set or rejoin over new gradients for a device. A client retries after 20 ms and a round
/// trip: twelve times that keeps the priority of a slow client, and a lost client delays training by one pause only.
pub const DEVICE_PRIORITY: Duration = Duration::from_millis(250);
/// A parameter's name in bytes of UTF-8.
pub const NAME_BYTES_MAX: usize = 1024;
/// Parameters in one job.
pub const PARAMETERS_MAX: u32 = 16 * 1024 * 1024;
/// Trainers in one job: their marks are kept for every chunk.
pub const TRAINERS_MAX: u32 = 4096;
/// Servers in one job.
pub const SERVERS_MAX: u16 = 4096;
/// Shards of a server whose number nobody has said: pieces that its load can be spread by.
pub const SHARDS_DEFAULT: u16 = 4;
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
/// Inputs of an op, and outputs: one for every trainer, and some spare ones.
pub const PROGRAM_OPERANDS_MAX: usize = 8192;
const _: () = assert!(TRAINERS_MAX as usize * 2 <= PROGRAM_OPERANDS_MAX);
/// Variables, ops, attributes and texts of an imported program together: ten thousand ops with fifty each, in less than
/// 100 MiB.
pub const PROGRAM_PARTS_MAX: usize = 512 * 1024;
/// Different rules in an imported program: each is appended in a pass over the whole program.
pub const PROGRAM_RULES_MAX: usize = 64;
/// Items of one queue, and pieces that one accumulator takes.
pub const PROGRAM_QUEUE_MAX: u64 = 1024 * 1024;

/// Default bound of the bytes of a running program's variables: the memory of a large host. A smaller host's system
/// refuses an allocation earlier.
pub const PROGRAM_MEMORY_BYTES_MAX: u64 = 1 << 38;
/// A string that a program receives, accumulates or sends to, such as an address.
pub const PROGRAM_STRING_BYTES_MAX: usize = NAME_BYTES_MAX;

/// State tensors of one rule. Each is as much memory as the parameter, so four times the states of Adam is already a
/// rule that few can afford, and a kernel keeps an address for each in a register.
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
/// Numbers of a rule that a step may carry other values of: every step holds room for so many, and Adam with both
/// penalties has five.
pub const TUNABLES_MAX: usize = 8;
/// Most reductions of a rule, such as `norm(w)`; each is a pass over the parameter.
pub const RULE_REDUCTIONS_MAX: usize = 16;
const _: () = assert!(RULE_OPS_MAX <= 1 << 16 && RULE_SCALARS_MAX <= 1 << 16, "they are numbered in 16 bits");
/// Requests for a checkpoint that one shard holds until the next one begins: each trainer waits for its one.
pub const CHECKPOINT_REQUESTS_MAX: usize = TRAINERS_MAX as usize;
/// Updates that an optimizer's state may have seen when a trainer sets it: their number stays exact in binary64, and
/// no count of further updates overflows.
pub const STATE_UPDATES_MAX: u64 = 1 << 53;
