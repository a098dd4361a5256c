//! Control messages: everything that is rare enough to be protobuf.
//!
//! Fields only ever get new numbers; a reader ignores those it does not know.

use prost::{Enumeration, Message, Oneof};

use crate::partition::DeclarationMessage;

/// The kind of process that opens a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Enumeration)]
#[repr(i32)]
pub enum Role {
    /// A process that computes gradients.
    Trainer = 0,
    /// A server that registers with the coordinator.
    Server = 1,
    /// A process that only reads: the one that saves models, or a tool.
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
    /// How long its calls wait for a server that is not there, in milliseconds; absent is until their deadline.
    #[prost(uint64, optional, tag = "4")]
    pub absence_millis: Option<u64>,
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
        // Encoded messages that are put together are one message with the fields of both.
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

/// Why a request or a connection was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Enumeration)]
#[repr(i32)]
pub enum ErrorCode {
    /// Something in the request is wrong; asking again changes nothing.
    Invalid = 0,
    /// The parameters are not initialised yet.
    NotInitialised = 1,
    /// The sender was superseded: an older generation, incarnation or epoch.
    Fenced = 2,
    /// The server has no room now; the same request may be sent again.
    Busy = 3,
    /// A wait came to its deadline; the text names who was waited for.
    Deadline = 4,
    /// The initialisation must begin anew.
    InitialisationLost = 5,
    /// The sender has not shown the job's token; asking again changes nothing.
    Unauthenticated = 6,
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
}

/// Control message of a push.
#[derive(Clone, PartialEq, Message)]
pub struct PushMessage {
    /// The learning rate of this gradient, which replaces the schedule's.
    #[prost(double, optional, tag = "1")]
    pub rate: Option<f64>,
}

/// The control message of an init frame: whose chunks its entries are.
#[derive(Clone, PartialEq, Message)]
pub struct InitMessage {
    /// The parameter's place in the catalogue.
    #[prost(uint32, tag = "1")]
    pub parameter: u32,
    /// The parameter.
    #[prost(message, optional, tag = "2")]
    pub declaration: Option<DeclarationMessage>,
    /// The cluster's chunk size.
    #[prost(uint32, tag = "3")]
    pub chunk_bytes: u32,
}

/// The control message of a finish frame: what the shard must hold, and how it shall behave from now on.
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
    /// How many trainers take part.
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
    /// Its shards.
    #[prost(uint32, tag = "2")]
    pub shards: u32,
}

/// Where everything is.
#[derive(Clone, PartialEq, Message)]
pub struct TopologyMessage {
    /// The servers, in the order of their index.
    #[prost(message, repeated, tag = "1")]
    pub servers: Vec<ServerEntry>,
}

/// A server reports for duty.
#[derive(Clone, PartialEq, Message)]
pub struct RegisterRequest {
    /// Its index.
    #[prost(uint32, tag = "1")]
    pub server: u32,
    /// Its address and shards.
    #[prost(message, optional, tag = "2")]
    pub entry: Option<ServerEntry>,
    /// Whether it has served this job since it started, and reports again.
    #[prost(bool, tag = "3")]
    pub renews: bool,
}

/// A trainer reports for duty.
#[derive(Clone, PartialEq, Message)]
pub struct JoinRequest {
    /// The rank it wants; absent takes the lowest free one.
    #[prost(uint32, optional, tag = "1")]
    pub trainer: Option<u32>,
    /// The incarnation it already has when it only reconnects; zero for a new life.
    #[prost(uint32, tag = "2")]
    pub incarnation: u32,
}

/// A trainer was accepted.
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
    /// The configuration a parameter gets when nobody says otherwise: an encoded optimizer message.
    #[prost(bytes = "vec", tag = "7")]
    pub default_config: Vec<u8>,
}

/// A page of the catalogue, uploaded when initialisation finishes and fetched by everybody else.
#[derive(Clone, PartialEq, Message)]
pub struct CatalogueRequest {
    /// The page wanted, from zero.
    #[prost(uint32, tag = "1")]
    pub page: u32,
}

/// The questions to the coordinator, and one to shards.
#[derive(Clone, PartialEq, Message)]
pub struct ControlRequest {
    /// Exactly one of them.
    #[prost(oneof = "request::Request", tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12")]
    pub request: Option<request::Request>,
}

/// The forms of a question.
pub mod request {
    use super::{CatalogueRequest, JobMessage, JoinRequest, Message, Oneof, RegisterRequest};

    /// The initialiser hands over one page of the catalogue; the last one commits.
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
    }

    /// The question.
    #[derive(Clone, PartialEq, Oneof)]
    pub enum Request {
        /// A server reports for duty.
        #[prost(message, tag = "1")]
        Register(RegisterRequest),
        /// A trainer reports for duty.
        #[prost(message, tag = "2")]
        Join(JoinRequest),
        /// A trainer offers to initialise, or waits until somebody has.
        #[prost(bool, tag = "3")]
        Begin(bool),
        /// The initialiser commits.
        #[prost(message, tag = "4")]
        Commit(Commit),
        /// A page of the committed catalogue.
        #[prost(message, tag = "5")]
        Catalogue(CatalogueRequest),
        /// I am alive.
        #[prost(bool, tag = "6")]
        Heartbeat(bool),
        /// I am finished.
        #[prost(bool, tag = "7")]
        Leave(bool),
        /// Save the model under this path.
        #[prost(string, tag = "8")]
        Save(String),
        /// A reader asks where everything is.
        #[prost(bool, tag = "9")]
        Observe(bool),
        /// The initialiser cannot finish, and another is to be chosen at once. The head has the generation that it
        /// gives back; any other changes nothing.
        #[prost(bool, tag = "10")]
        Resign(bool),
        /// A trainer gives its rank up, and its connection ends.
        #[prost(bool, tag = "11")]
        Release(bool),
        /// Asked of a shard: what the calls of this connection wait for.
        #[prost(bool, tag = "12")]
        Waiting(bool),
    }
}

/// The answers to them.
#[derive(Clone, PartialEq, Message)]
pub struct ControlAnswer {
    /// Exactly one of them.
    #[prost(oneof = "answer::Answer", tags = "1, 2, 3, 4, 5, 6, 7")]
    pub answer: Option<answer::Answer>,
}

/// The forms of an answer.
pub mod answer {
    use super::{JobMessage, Joined, Message, Oneof};

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

    /// The answer.
    #[derive(Clone, PartialEq, Oneof)]
    pub enum Answer {
        /// Done.
        #[prost(bool, tag = "1")]
        Done(bool),
        /// Welcome to the job.
        #[prost(message, tag = "2")]
        Joined(Joined),
        /// You initialise, under this generation.
        #[prost(uint32, tag = "3")]
        Granted(u32),
        /// Somebody has initialised.
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
    }
}
