//! Control messages, in protobuf: the parts of the protocol that are off the path of gradients and values.
//!
//! A new field gets a new number, and readers ignore unknown fields.

use prost::{Enumeration, Message, Oneof};

use crate::error::Failure;
use crate::ids::{MapVersion, ServerIndex, ShardId, ShardIndex, Term};
use crate::partition::{DeclarationMessage, Parameter, ShardMap, ShardPlace, Topology};

/// The kind of process that opens a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Enumeration)]
#[repr(i32)]
pub enum Role {
    /// A process that computes gradients.
    Trainer = 0,
    /// A server that registers with the coordinator.
    Server = 1,
    /// A process that only reads, such as a tool or the server that saves a model.
    Reader = 2,
}

/// The first message of a connection.
#[derive(Clone, PartialEq, Message)]
pub struct HelloMessage {
    /// The kind of process that opens it.
    #[prost(enumeration = "Role", tag = "1")]
    pub role: i32,
    /// The host it runs on, for error texts.
    #[prost(string, tag = "2")]
    pub host: String,
    /// Its process number there, for error texts.
    #[prost(uint32, tag = "3")]
    pub process: u32,
    /// How long its calls wait for an absent server, in milliseconds; none is until their deadline.
    #[prost(uint64, optional, tag = "4")]
    pub absence_millis: Option<u64>,
    /// Of a trainer that has joined: the number of the run that it takes part in.
    #[prost(uint32, tag = "5")]
    pub run: u32,
    /// The trainers of that run.
    #[prost(uint32, tag = "6")]
    pub run_trainers: u32,
}

/// A transport's offer of another path than the socket, added to the hello. Sessions neither write nor see it.
#[derive(Clone, PartialEq, Message)]
pub struct OfferMessage {
    /// The offer, in the transport's own bytes.
    #[prost(bytes = "vec", tag = "15")]
    pub offer: Vec<u8>,
}

impl OfferMessage {
    /// Adds an offer to an encoded hello.
    pub fn add(control: &mut Vec<u8>, offer: Vec<u8>) {
        // The concatenation of two encoded messages is one message with the fields of both.
        control.extend(Self { offer }.encode_to_vec());
    }

    /// Takes the offer out of an encoded hello, if there is one at its end.
    pub fn take(control: &mut Vec<u8>) -> Option<Vec<u8>> {
        let offer = Self::decode(control.as_slice()).ok().filter(|message| !message.offer.is_empty())?;
        let rest = control.strip_suffix(offer.encode_to_vec().as_slice())?.len();
        control.truncate(rest);
        Some(offer.offer)
    }
}

/// The answer to an accepted hello.
#[derive(Clone, PartialEq, Message)]
pub struct WelcomeMessage {
    /// Initialised as of this generation; zero before initialisation.
    #[prost(uint32, tag = "1")]
    pub generation: u32,
}

/// Reason for refusing a request or a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Enumeration)]
#[repr(i32)]
pub enum ErrorCode {
    /// The request has a fault; repeating it gives the same answer.
    Invalid = 0,
    /// The parameters are not initialised yet.
    NotInitialised = 1,
    /// The sender was superseded: an older generation, incarnation or epoch.
    Fenced = 2,
    /// The server has no room now; the same request may be sent again.
    Busy = 3,
    /// A wait reached its deadline; the text names the awaited trainers.
    Deadline = 4,
    /// The initialisation must begin anew.
    InitialisationLost = 5,
    /// The sender does not have the job's token; repeating the request gives the same answer.
    Unauthenticated = 6,
    /// Another server leads the shard; the coordinator's map says which.
    Moved = 7,
}

/// The message of an error or a refusal.
#[derive(Clone, PartialEq, Message)]
pub struct ErrorMessage {
    /// Error code, for programs.
    #[prost(enumeration = "ErrorCode", tag = "1")]
    pub code: i32,
    /// Error text, for people.
    #[prost(string, tag = "2")]
    pub text: String,
    /// Ranks of the trainers that were awaited, for programs.
    #[prost(uint32, repeated, tag = "3")]
    pub trainers: Vec<u32>,
}

/// Control message of a push. An entry without a payload stands for no gradient: a round of those alone is no update.
#[derive(Clone, PartialEq, Message)]
pub struct PushMessage {
    /// The learning rate of this gradient, which replaces the schedule's.
    #[prost(double, optional, tag = "1")]
    pub rate: Option<f64>,
    /// Whether the rounds of its chunks end without an update, whatever others send.
    #[prost(bool, tag = "2")]
    pub is_void: bool,
    /// Numbers of the rule that replace the configured ones for this gradient.
    #[prost(message, repeated, tag = "3")]
    pub settings: Vec<SettingMessage>,
    /// Whether the sender has no gradient for the frame's parameters. Of a table an entry without rows alone would be a
    /// gradient of zeros.
    #[prost(bool, tag = "4")]
    pub is_pass: bool,
}

/// A number of a rule, by its name.
#[derive(Clone, PartialEq, Message)]
pub struct SettingMessage {
    /// A parameter of a rule's text, or an optimizer's constant as configuration names it.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its value.
    #[prost(double, tag = "2")]
    pub value: f64,
}

impl PushMessage {
    /// The settings, by name.
    pub fn named(&self) -> impl Iterator<Item = (&str, f64)> {
        self.settings.iter().map(|one| (one.name.as_str(), one.value))
    }
}

/// Control message of a pull or set with [`Flags::STATE`](super::Flags::STATE): the part of the optimizer's state that
/// the frame is about.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct StateMessage {
    /// The index of a state tensor in the rule's order; absent for the number of updates.
    #[prost(uint32, optional, tag = "1")]
    pub state: Option<u32>,
    /// In a set without a state tensor: the updates that the state has seen.
    #[prost(uint64, tag = "2")]
    pub updates: u64,
}

/// Control message of an init frame: the parameter of its chunks.
#[derive(Clone, PartialEq, Message)]
pub struct InitMessage {
    /// The parameter's index in the catalogue.
    #[prost(uint32, tag = "1")]
    pub parameter: u32,
    /// The parameter.
    #[prost(message, optional, tag = "2")]
    pub declaration: Option<DeclarationMessage>,
    /// The cluster's chunk size.
    #[prost(uint32, tag = "3")]
    pub chunk_bytes: u32,
}

impl From<&Parameter> for InitMessage {
    fn from(parameter: &Parameter) -> Self {
        Self {
            parameter: parameter.index().0,
            declaration: Some(DeclarationMessage::from(parameter.declaration())),
            chunk_bytes: parameter.chunk_bytes(),
        }
    }
}

/// Control message of a finish frame: the number of chunks that the shard must have, and the job's settings.
#[derive(Clone, PartialEq, Message)]
pub struct FinishMessage {
    /// Chunks that were sent to this shard.
    #[prost(uint64, tag = "1")]
    pub chunks: u64,
    /// The job's settings.
    #[prost(message, optional, tag = "2")]
    pub job: Option<JobMessage>,
}

/// Settings of a job.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct JobMessage {
    /// The number of the mode: 0 sync, 1 async, 2 bounded staleness, 3 deltas.
    #[prost(uint32, tag = "1")]
    pub mode: u32,
    /// The bound of bounded staleness, in rounds.
    #[prost(uint32, tag = "2")]
    pub staleness: u32,
    /// How gradients are merged: 0 mean, 1 sum.
    #[prost(uint32, tag = "3")]
    pub merge: u32,
    /// Number of trainers.
    #[prost(uint32, tag = "4")]
    pub trainers: u32,
    /// The cluster's chunk size in bytes.
    #[prost(uint32, tag = "5")]
    pub chunk_bytes: u32,
}

/// One server of the cluster.
#[derive(Clone, PartialEq, Message)]
pub struct ServerEntry {
    /// The address that trainers connect to.
    #[prost(string, tag = "1")]
    pub address: String,
    /// The shards that are placed at it.
    #[prost(uint32, tag = "2")]
    pub shards: u32,
    /// Whether it keeps checkpoints and a journal of its shards, from which another server can take one up.
    #[prost(bool, tag = "3")]
    pub keeps_journal: bool,
}

/// The servers of a job.
#[derive(Clone, PartialEq, Message)]
pub struct TopologyMessage {
    /// The servers, in the order of their index.
    #[prost(message, repeated, tag = "1")]
    pub servers: Vec<ServerEntry>,
}

impl TopologyMessage {
    /// The places of the job's shards.
    ///
    /// # Errors
    ///
    /// No server, or a server without shards or with more than a place can name.
    pub fn topology(&self) -> Result<Topology, Failure> {
        let shards = self.servers.iter().map(|server| {
            u16::try_from(server.shards).map_err(|_| Failure::call(format!("a server with {} shards", server.shards)))
        });
        Topology::new(shards.collect::<Result<Vec<_>, _>>()?)
    }
}

/// The map of a job's shards.
#[derive(Clone, PartialEq, Message)]
pub struct ShardMapMessage {
    /// Its version.
    #[prost(uint64, tag = "1")]
    pub version: u64,
    /// The shards that are not at the server that they were placed at first, under the first term.
    #[prost(message, repeated, tag = "2")]
    pub moved: Vec<ShardPlaceMessage>,
}

/// The place of a shard.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct ShardPlaceMessage {
    /// The shard's name.
    #[prost(message, optional, tag = "1")]
    pub shard: Option<ShardMessage>,
    /// The server that leads it.
    #[prost(uint32, tag = "2")]
    pub server: u32,
    /// Its term there.
    #[prost(uint32, tag = "3")]
    pub term: u32,
    /// The server that it moves to.
    #[prost(uint32, optional, tag = "4")]
    pub next: Option<u32>,
    /// The version of the map that changed the place last.
    #[prost(uint64, tag = "5")]
    pub changed: u64,
    /// The server that served it last, as far as reports say, until its leader serves it.
    #[prost(uint32, optional, tag = "6")]
    pub former: Option<u32>,
}

/// The name of a shard.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct ShardMessage {
    /// The server that it was placed at first.
    #[prost(uint32, tag = "1")]
    pub server: u32,
    /// Its index there.
    #[prost(uint32, tag = "2")]
    pub shard: u32,
}

impl From<ShardId> for ShardMessage {
    fn from(shard: ShardId) -> Self {
        Self { server: shard.server.0.into(), shard: shard.shard.0.into() }
    }
}

impl ShardMessage {
    /// The name, if its numbers are those of a shard.
    #[must_use]
    pub fn id(self) -> Option<ShardId> {
        let server = ServerIndex(u16::try_from(self.server).ok()?);
        Some(ShardId { server, shard: ShardIndex(u16::try_from(self.shard).ok()?) })
    }
}

impl From<&ShardMap> for ShardMapMessage {
    fn from(map: &ShardMap) -> Self {
        let place = |(shard, place): (ShardId, ShardPlace)| ShardPlaceMessage {
            shard: Some(shard.into()),
            server: place.server.0.into(),
            term: place.term.0,
            next: place.next.map(|next| next.0.into()),
            changed: place.changed.0,
            former: place.former.map(|former| former.0.into()),
        };
        Self { version: map.version().0, moved: map.moved().map(place).collect() }
    }
}

impl ShardMapMessage {
    /// The map; none where a number is not one of a shard or a server.
    #[must_use]
    pub fn map(&self) -> Option<ShardMap> {
        let index = |number: u32| u16::try_from(number).ok().map(ServerIndex);
        let place = |place: &ShardPlaceMessage| {
            let optional = |number: Option<u32>| match number {
                Some(number) => index(number).map(Some),
                None => Some(None),
            };
            let (next, former) = (optional(place.next)?, optional(place.former)?);
            let (server, changed) = (index(place.server)?, MapVersion(place.changed));
            Some((place.shard?.id()?, ShardPlace { server, term: Term(place.term), next, former, changed }))
        };
        Some(ShardMap::new(MapVersion(self.version), self.moved.iter().map(place).collect::<Option<_>>()?))
    }
}

/// A shard that a server holds: it serves it, or is about to.
#[derive(Clone, PartialEq, Message)]
pub struct HeldShardMessage {
    /// The shard's name.
    #[prost(message, optional, tag = "1")]
    pub shard: Option<ShardMessage>,
    /// Whether its values are restored and it serves.
    #[prost(bool, tag = "2")]
    pub serves: bool,
    /// Why it could not be taken up; then the server does not hold it.
    #[prost(string, optional, tag = "3")]
    pub failure: Option<String>,
}

/// Order to move a shard to another server.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct MoveRequest {
    /// The shard's name.
    #[prost(message, optional, tag = "1")]
    pub shard: Option<ShardMessage>,
    /// The index of the server.
    #[prost(uint32, tag = "2")]
    pub to: u32,
    /// The version of the map that the sender has seen: a later change of the shard's place stands.
    #[prost(uint64, tag = "3")]
    pub seen: u64,
}

/// Registration of a server.
#[derive(Clone, PartialEq, Message)]
pub struct RegisterRequest {
    /// Its index.
    #[prost(uint32, tag = "1")]
    pub server: u32,
    /// Its address and shards.
    #[prost(message, optional, tag = "2")]
    pub entry: Option<ServerEntry>,
    /// Whether the server has served this job since it started, and registers again.
    #[prost(bool, tag = "3")]
    pub renews: bool,
    /// Its status for the page of the job, in JSON; empty unless server 0 watches.
    #[prost(bytes = "vec", tag = "4")]
    pub status: Vec<u8>,
    /// The servers that the job has by this server's settings.
    #[prost(uint32, optional, tag = "5")]
    pub servers: Option<u32>,
    /// The shards that it holds.
    #[prost(message, repeated, tag = "6")]
    pub holds: Vec<HeldShardMessage>,
    /// The version of the map that these follow; none of a server that has just started.
    #[prost(uint64, optional, tag = "7")]
    pub map_version: Option<u64>,
    /// A random number of the server's process.
    #[prost(uint64, tag = "8")]
    pub start: u64,
}

/// Join of a trainer.
#[derive(Clone, PartialEq, Message)]
pub struct JoinRequest {
    /// The requested rank; none takes the lowest free one.
    #[prost(uint32, optional, tag = "1")]
    pub trainer: Option<u32>,
    /// The trainer's incarnation when it reconnects; zero for a new process.
    #[prost(uint32, tag = "2")]
    pub incarnation: u32,
}

/// A trainer was accepted.
//
// tidy: allow fields: a message of the protocol, which is read as a whole.
#[derive(Clone, PartialEq, Message)]
pub struct Joined {
    /// Its rank.
    #[prost(uint32, tag = "1")]
    pub trainer: u32,
    /// Its incarnation.
    #[prost(uint32, tag = "2")]
    pub incarnation: u32,
    /// The job's epoch.
    #[prost(uint64, tag = "3")]
    pub epoch: u64,
    /// The generation that was committed; zero before initialisation.
    #[prost(uint32, tag = "4")]
    pub generation: u32,
    /// The servers.
    #[prost(message, optional, tag = "5")]
    pub topology: Option<TopologyMessage>,
    /// The job's settings as far as they are known.
    #[prost(message, optional, tag = "6")]
    pub job: Option<JobMessage>,
    /// The default configuration of a parameter: an encoded optimizer message.
    #[prost(bytes = "vec", tag = "7")]
    pub default_config: Vec<u8>,
    /// Whether server 0 shows the status of servers, which then report it with each registration.
    #[prost(bool, tag = "8")]
    pub watches: bool,
    /// The number of the run that the trainer takes part in.
    #[prost(uint32, tag = "9")]
    pub run: u32,
    /// Whether the operator has set the mode, so that no initialiser changes it.
    #[prost(bool, tag = "10")]
    pub is_mode_given: bool,
    /// The same for the merge.
    #[prost(bool, tag = "11")]
    pub is_merge_given: bool,
    /// Whether servers take gradients with NaN or infinite elements.
    #[prost(bool, tag = "12")]
    pub takes_nonfinite: bool,
    /// Settings of server 0 with which a server that registers compares its own.
    #[prost(message, optional, tag = "13")]
    pub first_server: Option<FirstServerMessage>,
    /// Which server leads each shard.
    #[prost(message, optional, tag = "14")]
    pub map: Option<ShardMapMessage>,
}

/// Settings of server 0 that count for the whole job and are no part of [`JobMessage`].
#[derive(Clone, PartialEq, Message)]
pub struct FirstServerMessage {
    /// The lease of the initialising trainer.
    #[prost(uint64, tag = "1")]
    pub lease_millis: u64,
    /// The folder that saved models stay in.
    #[prost(string, tag = "2")]
    pub model_dir: String,
}

/// Request for a page of the catalogue.
#[derive(Clone, PartialEq, Message)]
pub struct CatalogueRequest {
    /// The page wanted, from zero.
    #[prost(uint32, tag = "1")]
    pub page: u32,
}

/// Request to the coordinator; one form is for shards.
#[derive(Clone, PartialEq, Message)]
pub struct ControlRequest {
    /// Exactly one form.
    #[prost(oneof = "request::Request", tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15")]
    pub request: Option<request::Request>,
}

/// The forms of a request.
pub mod request {
    use super::{CatalogueRequest, JobMessage, JoinRequest, Message, MoveRequest, Oneof, RegisterRequest};

    /// One page of the catalogue, uploaded by the initialiser; the last one commits.
    #[derive(Clone, PartialEq, Message)]
    pub struct Commit {
        /// The generation that was granted.
        #[prost(uint32, tag = "1")]
        pub generation: u32,
        /// One page of declarations.
        #[prost(bytes = "vec", tag = "2")]
        pub page: Vec<u8>,
        /// Whether it is the last.
        #[prost(bool, tag = "3")]
        pub last: bool,
        /// The job's settings, with the last page.
        #[prost(message, optional, tag = "4")]
        pub job: Option<JobMessage>,
        /// The configuration of parameters without their own, with the last page.
        #[prost(bytes = "vec", tag = "5")]
        pub default_config: Vec<u8>,
    }

    /// The request.
    #[derive(Clone, PartialEq, Oneof)]
    pub enum Request {
        /// A server registers.
        #[prost(message, tag = "1")]
        Register(RegisterRequest),
        /// A trainer joins.
        #[prost(message, tag = "2")]
        Join(JoinRequest),
        /// A trainer offers to initialise, or waits until another one has.
        #[prost(bool, tag = "3")]
        Begin(bool),
        /// The initialiser commits.
        #[prost(message, tag = "4")]
        Commit(Commit),
        /// A page of the committed catalogue.
        #[prost(message, tag = "5")]
        Catalogue(CatalogueRequest),
        /// Heartbeat of a trainer.
        #[prost(bool, tag = "6")]
        Heartbeat(bool),
        /// A trainer departs.
        #[prost(bool, tag = "7")]
        Leave(bool),
        /// The model is to be saved under this path.
        #[prost(string, tag = "8")]
        Save(String),
        /// A reader asks for the servers and the catalogue.
        #[prost(bool, tag = "9")]
        Observe(bool),
        /// The initialiser cannot finish, and another trainer is to be elected at once. The head has the generation
        /// that the sender gives up; any other generation changes nothing.
        #[prost(bool, tag = "10")]
        Resign(bool),
        /// A trainer gives up its rank, and its connection ends.
        #[prost(bool, tag = "11")]
        Release(bool),
        /// Request to a shard: the trainers and rounds for which calls of this connection wait.
        #[prost(bool, tag = "12")]
        Waiting(bool),
        /// Request to a shard: a checkpoint is to be taken now, and is answered when it is on disk.
        #[prost(bool, tag = "13")]
        Checkpoint(bool),
        /// A shard is to move to another server; answered when that server serves it.
        #[prost(message, tag = "14")]
        Move(MoveRequest),
        /// A server asks for the map of shards once it is newer than this version.
        #[prost(uint64, tag = "15")]
        Watch(u64),
    }
}

/// Answer to a control request.
#[derive(Clone, PartialEq, Message)]
pub struct ControlAnswer {
    /// Exactly one form.
    #[prost(oneof = "answer::Answer", tags = "1, 2, 3, 4, 5, 6, 7, 8, 10")]
    pub answer: Option<answer::Answer>,
    /// With an answer about what calls wait for: the server itself ends the wait, at its round timeout or with the
    /// lease of the initialiser.
    #[prost(bool, tag = "9")]
    pub ends_by_itself: bool,
}

/// The forms of an answer.
pub mod answer {
    use super::{JobMessage, Joined, Message, Oneof, ShardMapMessage};

    /// Initialisation is done.
    #[derive(Clone, PartialEq, Message)]
    pub struct Initialised {
        /// The generation that was committed.
        #[prost(uint32, tag = "1")]
        pub generation: u32,
        /// Pages of the catalogue.
        #[prost(uint32, tag = "2")]
        pub pages: u32,
        /// The job's settings.
        #[prost(message, optional, tag = "3")]
        pub job: Option<JobMessage>,
        /// The configuration of parameters without their own; empty where it is unknown.
        #[prost(bytes = "vec", tag = "4")]
        pub default_config: Vec<u8>,
        /// The learning rate that the operator of a restarted server 0 gives instead of that configuration's.
        #[prost(double, optional, tag = "5")]
        pub rate: Option<f64>,
    }

    /// A model was saved.
    #[derive(Clone, PartialEq, Message)]
    pub struct Saved {
        /// Where, on the server's machine.
        #[prost(string, tag = "1")]
        pub path: String,
        /// How many bytes.
        #[prost(uint64, tag = "2")]
        pub bytes: u64,
    }

    /// A checkpoint of a shard is on disk.
    #[derive(Clone, PartialEq, Eq, Message)]
    pub struct Checkpointed {
        /// The directory of the shard's checkpoints, on the server's machine.
        #[prost(string, tag = "1")]
        pub directory: String,
        /// Its number.
        #[prost(uint64, tag = "2")]
        pub number: u64,
        /// Its bytes.
        #[prost(uint64, tag = "3")]
        pub bytes: u64,
        /// The fewest updates that a chunk had when it was begun; absent for a shard without chunks.
        #[prost(uint64, optional, tag = "4")]
        pub version: Option<u64>,
    }

    /// The answer.
    #[derive(Clone, PartialEq, Oneof)]
    pub enum Answer {
        /// Done.
        #[prost(bool, tag = "1")]
        Done(bool),
        /// The trainer has joined the job.
        #[prost(message, tag = "2")]
        Joined(Joined),
        /// The trainer is elected to initialise, under this generation.
        #[prost(uint32, tag = "3")]
        Granted(u32),
        /// A trainer has initialised.
        #[prost(message, tag = "4")]
        Initialised(Initialised),
        /// A page of the catalogue.
        #[prost(bytes, tag = "5")]
        Page(Vec<u8>),
        /// The model is on disk.
        #[prost(message, tag = "6")]
        Saved(Saved),
        /// Describes what the oldest call of the sender waits for; empty when none waits.
        #[prost(string, tag = "7")]
        Waiting(String),
        /// The checkpoint is on disk.
        #[prost(message, tag = "8")]
        Checkpointed(Checkpointed),
        /// The map of shards.
        #[prost(message, tag = "10")]
        Map(ShardMapMessage),
    }
}
