//! The coordinator, embedded in server 0: elects and fences the initialiser, keeps the catalogue, and tracks servers
//! and trainers.
//!
//! Not here: the data path. A running step needs no coordinator.
//!
//! The election is a lease. A holder that is silent for the lease's time loses it to another trainer under a larger
//! generation, and shards refuse the smaller generation from its first frame on. The commit is one event here, and no
//! trainer pushes before it; a shard filled under an uncommitted generation is filled again.

use std::collections::BTreeMap;
use std::time::Duration;

use prost::Message;

use super::membership::{PeerOrigin, PlaceClaim, Ranks, ServerSlots, TrainerMember};
use super::moves::ShardMoves;
use super::options::CoordinatorOptions;
use super::output::ServerOutput;
use super::reply::{Refusal, Replies, answer};
use super::report::CoordinatorReport;
use super::resumed::CommittedJob;
use crate::config::Mode;
use crate::error::Failure;
use crate::ids::{
    Epoch, Generation, Incarnation, MapVersion, NO_TRAINER, PeerId, RunNumber, ServerIndex, ShardId, TrainerId,
};
use crate::partition::{Catalogue, CataloguePage, ShardMap};
use crate::port::{Event, Incoming, Submit};
use crate::text::escaped;
use crate::time::Now;
use crate::wire::answer::{Answer, Initialised, Saved};
use crate::wire::request::{Commit, Request};
use crate::wire::{
    ControlAnswer, ControlRequest, ErrorCode, FirstServerMessage, Frame, Head, HeldShardMessage, HelloMessage,
    JobMessage, JoinRequest, Joined, Kind, MoveRequest, RegisterRequest, ServerEntry, ShardMapMessage, ShardMessage,
    TopologyMessage, WelcomeMessage,
};

/// Deadline of a claim that only an event can decide.
const NEVER: Now = Now(u64::MAX);

/// An action that the coordinator asks of its caller.
pub enum CoordinatorOutput {
    /// An action of any server session.
    Session(ServerOutput),
    /// Make these bytes durable before any later action; `Coordinator::recall` reads them.
    Keep(Vec<u8>),
    /// Tell this process the map of shards.
    Map(ShardMap),
    /// Save the model, then call [`Coordinator::saved`] with the head.
    Save {
        /// The requesting connection.
        peer: PeerId,
        /// The request.
        head: Head,
        /// The requested path, unchecked.
        path: String,
    },
}

/// The coordinator.
pub struct Coordinator {
    options: CoordinatorOptions,
    epoch: Epoch,
    servers: ServerSlots,
    /// Shards of each server at placement; empty before it.
    placed: Vec<u32>,
    ranks: Ranks,
    election: Election,
    /// The last granted generation.
    granted: Generation,
    peers: BTreeMap<PeerId, CoordinatorPeer>,
    /// Waiting begin requests in order; true offers to initialise.
    begins: Vec<(PeerId, Head, bool)>,
    /// Undecided requests for ranks and slots, and topology queries, in order.
    claims: Vec<Claimant>,
    moves: ShardMoves,
    /// Whether members of an earlier coordinator get the grace time at the first event.
    has_returned: bool,
}

/// An undecided request for a rank or slot.
struct Claimant {
    peer: PeerId,
    head: Head,
    request: Request,
    asked: Now,
    /// Next decision time without a change of state.
    until: Option<Now>,
}

enum Election {
    Open,
    Leased { trainer: TrainerId, generation: Generation, until: Now, pages: Vec<Vec<u8>> },
    Committed(CommittedJob),
}

struct CoordinatorPeer {
    origin: PeerOrigin,
    /// Its waiting time for absent servers.
    absence: Option<Duration>,
    /// Whether its hello was accepted.
    is_welcome: bool,
    rank: Option<TrainerId>,
    incarnation: Incarnation,
}

impl Coordinator {
    /// A coordinator; `recalled` is what an earlier start asked to keep.
    ///
    /// # Errors
    /// When what was kept cannot be read.
    pub fn new(options: CoordinatorOptions, recalled: Option<&[u8]>) -> Result<Self, Failure> {
        let mut coordinator = Self {
            epoch: options.epoch,
            servers: ServerSlots::new(options.servers, options.grace),
            placed: Vec::new(),
            ranks: Ranks::new(options.job.trainers, options.grace),
            election: Election::Open,
            granted: Generation(0),
            peers: BTreeMap::new(),
            begins: Vec::new(),
            claims: Vec::new(),
            moves: ShardMoves::default(),
            has_returned: recalled.is_some(),
            options,
        };
        if let Some(bytes) = recalled {
            coordinator.recall(bytes)?;
        }
        Ok(coordinator)
    }

    /// The job's life.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Which server leads each shard.
    #[must_use]
    pub fn map(&self) -> &ShardMap {
        self.moves.map()
    }

    /// Trainers by rank.
    #[must_use]
    pub fn members(&self) -> &[TrainerMember] {
        self.ranks.members()
    }

    /// A report of the job.
    #[must_use]
    pub fn report(&self, now: Now) -> CoordinatorReport {
        CoordinatorReport {
            epoch: self.epoch.0,
            generation: self.generation().0,
            job: self.job(),
            trainers: self.ranks.reports(now),
            servers: self.servers.reports(now),
        }
    }

    /// The committed generation; zero before the commit.
    #[must_use]
    pub fn generation(&self) -> Generation {
        match &self.election {
            Election::Committed(committed) => committed.generation,
            Election::Open | Election::Leased { .. } => Generation(0),
        }
    }

    /// The settings of the job: those that it was initialised with, or those of this start.
    fn job(&self) -> JobMessage {
        match &self.election {
            Election::Committed(committed) => committed.job,
            Election::Open | Election::Leased { .. } => self.options.job,
        }
    }

    /// Registers the server in which the coordinator is embedded.
    ///
    /// # Errors
    /// When there is no such server, or its shards are not those that the chunks were placed on.
    pub fn register(&mut self, server: u32, entry: ServerEntry) -> Result<(), Failure> {
        self.check_server(server, &entry)?;
        self.servers.embed(server, entry);
        Ok(())
    }

    fn check_server(&self, server: u32, entry: &ServerEntry) -> Result<(), Failure> {
        self.servers.check(server, entry, self.placed.get(server as usize).copied())
    }

    /// Handles one event and appends the resulting actions to `out`.
    pub fn handle(&mut self, now: Now, event: Event, out: &mut Vec<CoordinatorOutput>) {
        let mut replies = Replies::default();
        if std::mem::take(&mut self.has_returned) {
            self.ranks.begin_grace(now);
            self.servers.begin_grace(now);
        }
        match event {
            Event::Accepted { peer, origin, .. } => {
                let origin = PeerOrigin { address: origin, ..PeerOrigin::default() };
                let stranger = CoordinatorPeer {
                    origin,
                    absence: None,
                    is_welcome: false,
                    rank: None,
                    incarnation: Incarnation(0),
                };
                self.peers.insert(peer, stranger);
            }
            Event::Head { peer, frame } => {
                let land = Submit::PostReceive { peer, into: Incoming::discard_all(&frame) };
                out.push(CoordinatorOutput::Session(ServerOutput::Submit(land)));
            }
            Event::Received { peer, frame, .. } => self.landed(now, peer, &frame, &mut replies, out),
            Event::Gone { peer, .. } => self.gone(now, peer, &mut replies, out),
            Event::Moved { .. }
            | Event::Transmitted { .. }
            | Event::Sent { .. }
            | Event::Connected { .. }
            | Event::TakesAnswers { .. }
            | Event::AnswerReturned { .. } => {}
        }
        self.flush(&mut replies, out);
    }

    /// Ends the lease of a silent initialiser, logs silent servers, and decides claims that are due. Call when
    /// [`Coordinator::deadline`] has passed.
    pub fn expire(&mut self, now: Now, out: &mut Vec<CoordinatorOutput>) {
        let mut replies = Replies::default();
        if let Election::Leased { trainer, generation, until, .. } = &self.election
            && *until <= now
        {
            tracing::warn!(%trainer, %generation, "the lease of the initialiser has ended; another trainer is elected");
            self.election = Election::Open;
            self.elect(now, &mut replies, out);
        }
        self.servers.log_silent(now);
        if self.claims.iter().any(|claim| claim.until.is_some_and(|until| until <= now)) {
            self.admit(now, &mut replies, out);
        }
        self.flush(&mut replies, out);
    }

    /// The next time at which [`Coordinator::expire`] has work.
    #[must_use]
    pub fn deadline(&self) -> Option<Now> {
        let lease = match &self.election {
            Election::Leased { until, .. } => Some(*until),
            Election::Open | Election::Committed(_) => None,
        };
        self.claims.iter().filter_map(|claim| claim.until).chain(lease).chain(self.servers.silence_due()).min()
    }

    /// Takes note of the shards that a server holds, which follows the map of this version, or has just started.
    pub fn note_held(
        &mut self,
        server: ServerIndex,
        version: Option<MapVersion>,
        held: &[HeldShardMessage],
        out: &mut Vec<CoordinatorOutput>,
    ) {
        let mut replies = Replies::default();
        let servers = &self.servers;
        let connection =
            |server: ServerIndex| servers.entry(server.0.into()).map(|_| servers.is_connected(server.0.into()));
        let known = self.map().version();
        let has_settled = self.moves.reported(server, version, held, connection, &mut replies);
        if known < self.map().version() {
            self.map_changed(&mut replies, out);
        } else if has_settled {
            out.push(self.keep());
        }
        self.flush(&mut replies, out);
    }

    /// Has a new map of shards kept, and tells it.
    fn map_changed(&mut self, replies: &mut Replies, out: &mut Vec<CoordinatorOutput>) {
        out.push(self.keep());
        out.push(CoordinatorOutput::Map(self.map().clone()));
        self.moves.tell(replies);
    }

    /// Answers a request to save a model.
    pub fn saved(
        &mut self,
        peer: PeerId,
        head: &Head,
        saved: Result<Saved, Failure>,
        out: &mut Vec<CoordinatorOutput>,
    ) {
        let mut replies = Replies::default();
        match saved {
            Ok(saved) => answer(&mut replies, peer, head, Answer::Saved(saved)),
            Err(failure) => replies.error(peer, head, &Refusal::invalid(failure.to_string())),
        }
        self.flush(&mut replies, out);
    }

    fn flush(&self, replies: &mut Replies, out: &mut Vec<CoordinatorOutput>) {
        let mut sends = Vec::new();
        replies.flush(|peer| self.peers.contains_key(&peer), &mut sends);
        out.extend(sends.into_iter().map(CoordinatorOutput::Session));
    }

    fn landed(
        &mut self,
        now: Now,
        peer: PeerId,
        frame: &Frame,
        replies: &mut Replies,
        out: &mut Vec<CoordinatorOutput>,
    ) {
        let done = match frame.head.kind {
            Kind::Hello => self.hello(now, peer, frame, replies),
            Kind::Control => self.control(now, peer, frame, replies, out),
            kind => Err(Refusal::invalid(format!("the coordinator has no answer to a frame of kind {kind:?}"))),
        };
        let Err(refusal) = done else { return };
        tracing::warn!(%peer, kind = ?frame.head.kind, "refused: {}", refusal.text);
        if frame.head.kind != Kind::Hello {
            replies.error(peer, &frame.head, &refusal);
            return;
        }
        replies.refused(peer, &frame.head, &refusal);
        self.flush(replies, out);
        out.push(CoordinatorOutput::Session(ServerOutput::Close(peer)));
    }

    fn hello(&mut self, now: Now, peer: PeerId, frame: &Frame, replies: &mut Replies) -> Result<(), Refusal> {
        let head = &frame.head;
        if head.epoch != Epoch(0) && head.epoch != self.epoch {
            return Err(Refusal::other_epoch(head.epoch, self.epoch));
        }
        let hello = HelloMessage::decode(frame.control.as_slice())
            .map_err(|error| Refusal::invalid(format!("the hello does not parse: {error}")))?;
        let trainer = (head.trainer != NO_TRAINER).then_some(head.trainer);
        if let Some(trainer) = trainer {
            self.ranks.check_life(trainer, head.incarnation)?;
        }
        let Some(known) = self.peers.get_mut(&peer) else { return Ok(()) };
        (known.origin.host, known.origin.process) = (escaped(&hello.host).into_owned(), hello.process);
        known.absence = hello.absence_millis.map(Duration::from_millis);
        (known.is_welcome, known.rank, known.incarnation) = (true, trainer, head.incarnation);
        if let Some(trainer) = trainer {
            self.ranks.connected(trainer, head.incarnation, &known.origin);
        }
        self.heard(now, trainer);
        let message = WelcomeMessage { generation: self.generation().0 };
        let answer = Head { epoch: self.epoch, ..head.answer(Kind::Welcome) };
        replies.whole(peer, Frame::with_control(answer, &message));
        Ok(())
    }

    fn heard(&mut self, now: Now, trainer: Option<TrainerId>) {
        let Some(trainer) = trainer else { return };
        self.ranks.heard(now, trainer);
        if let Election::Leased { trainer: holder, until, .. } = &mut self.election
            && *holder == trainer
        {
            *until = now + self.options.lease;
        }
    }

    fn gone(&mut self, now: Now, peer: PeerId, replies: &mut Replies, out: &mut Vec<CoordinatorOutput>) {
        let gone = self.peers.remove(&peer);
        self.begins.retain(|(waiting, ..)| *waiting != peer);
        self.claims.retain(|claim| claim.peer != peer);
        self.moves.gone(peer);
        self.servers.lost(now, peer);
        let life = gone.and_then(|gone| Some((gone.rank?, gone.incarnation)));
        let has_other = |(trainer, incarnation)| {
            self.peers.values().any(|other| (other.rank, other.incarnation) == (Some(trainer), incarnation))
        };
        if let Some((rank, incarnation)) = life.filter(|life| !has_other(*life)) {
            self.ranks.lost(now, rank, incarnation);
            if let Election::Leased { trainer, until, .. } = &mut self.election
                && *trainer == rank
            {
                // A lost connection shortens the lease to a quarter, in which the holder can reconnect.
                *until = (*until).min(now + self.options.lease / 4);
            }
        }
        self.admit(now, replies, out);
    }

    fn control(
        &mut self,
        now: Now,
        peer: PeerId,
        frame: &Frame,
        replies: &mut Replies,
        out: &mut Vec<CoordinatorOutput>,
    ) -> Result<(), Refusal> {
        let head = &frame.head;
        let request = ControlRequest::decode(frame.control.as_slice())
            .map_err(|error| Refusal::invalid(format!("the control message does not parse: {error}")))?;
        let request = request.request.ok_or_else(|| Refusal::invalid("a control message without a question"))?;
        let rank = self.check_sender(peer, &request)?;
        self.heard(now, rank);
        match request {
            Request::Register(_) | Request::Join(_) | Request::Observe(_) => {
                self.check_claim(&request)?;
                self.claims.push(Claimant { peer, head: *head, request, asked: now, until: None });
                self.admit(now, replies, out);
            }
            Request::Begin(offers) => {
                self.replace_begins(peer, rank, replies);
                if !offers {
                    self.resign(rank, head.generation);
                }
                self.begins.push((peer, *head, offers && rank.is_some()));
                self.elect(now, replies, out);
            }
            Request::Resign(_) => {
                self.resign(rank, head.generation);
                self.elect(now, replies, out);
                answer(replies, peer, head, Answer::Done(true));
            }
            Request::Commit(commit) => {
                self.commit(peer, commit, out)?;
                answer(replies, peer, head, Answer::Done(true));
                self.elect(now, replies, out);
            }
            Request::Catalogue(wanted) => {
                let page = self.page(wanted.page)?;
                answer(replies, peer, head, Answer::Page(page));
            }
            Request::Heartbeat(_) => answer(replies, peer, head, Answer::Done(true)),
            Request::Leave(_) => {
                if !self.servers.leave(peer) {
                    let trainer = rank.ok_or_else(|| Refusal::invalid("only a trainer or server can leave"))?;
                    self.ranks.note_departed(trainer);
                    out.push(self.keep());
                }
                answer(replies, peer, head, Answer::Done(true));
                self.admit(now, replies, out);
            }
            Request::Release(_) => {
                self.ranks.released(now, rank.ok_or_else(|| Refusal::invalid("only a trainer has a rank"))?);
                answer(replies, peer, head, Answer::Done(true));
                self.admit(now, replies, out);
            }
            Request::Waiting(_) => {
                let (text, ends_by_itself) = self.describe_wait(peer);
                let message = ControlAnswer { answer: Some(Answer::Waiting(text)), ends_by_itself };
                replies.whole(peer, Frame::with_control(head.answer(Kind::Answer), &message));
            }
            Request::Checkpoint(_) => {
                return Err(Refusal::invalid("the coordinator has no parameters; expected a request to a shard"));
            }
            Request::Watch(version) => self.moves.watch(peer, *head, MapVersion(version), replies),
            Request::Move(order) => self.order_move((peer, *head), &order, replies, out)?,
            Request::Save(path) => {
                self.check_save(rank)?;
                out.push(CoordinatorOutput::Save { peer, head: *head, path });
            }
        }
        Ok(())
    }

    fn order_move(
        &mut self,
        mover: (PeerId, Head),
        order: &MoveRequest,
        replies: &mut Replies,
        out: &mut Vec<CoordinatorOutput>,
    ) -> Result<(), Refusal> {
        let (shard, to) = self.check_move(order)?;
        if self.moves.order(mover, (shard, to), MapVersion(order.seen), replies) {
            tracing::info!(%shard, %to, "the shard moves");
            self.map_changed(replies, out);
        }
        Ok(())
    }

    /// The shard of an order to move it, and the server that it moves to.
    fn check_move(&self, order: &MoveRequest) -> Result<(ShardId, ServerIndex), Refusal> {
        if self.generation() == Generation(0) {
            return Err(Refusal::new(ErrorCode::NotInitialised, "shards move once the parameters are initialised"));
        }
        if self.servers.absent().next().is_some() {
            return Err(Refusal::new(ErrorCode::Busy, self.servers.describe_absent()));
        }
        let shard = order.shard.and_then(ShardMessage::id);
        let entry = |server: u32| self.servers.entry(server as usize);
        let shard = shard
            .filter(|shard| entry(shard.server.0.into()).is_some_and(|entry| u32::from(shard.shard.0) < entry.shards));
        let shard = shard.ok_or_else(|| Refusal::invalid("a move of a shard that this job does not have"))?;
        let to = u16::try_from(order.to).ok().filter(|to| entry((*to).into()).is_some());
        let to =
            to.ok_or_else(|| Refusal::invalid(format!("a move to server {}, which this job does not have", order.to)))?;
        if !self.servers.is_connected(to.into()) {
            let text = format!("a move to server {to}, which is not connected; expected a server that runs");
            return Err(Refusal::new(ErrorCode::Busy, text));
        }
        let lacks = |server: &u32| !entry(*server).is_some_and(|entry| entry.keeps_journal);
        if let Some(server) =
            [self.map().place(shard).server.0.into(), u32::from(to)].iter().find(|server| lacks(server))
        {
            return Err(Refusal::invalid(format!(
                "server {server} keeps no journal: a shard moves by its files; expected journal = on, and a \
                 checkpoint_dir that both servers see"
            )));
        }
        Ok((shard, ServerIndex(to)))
    }

    /// Drops the begin requests of a trainer's other connections: an older process of the rank is refused, and an old
    /// connection of the same process has no reader.
    fn replace_begins(&mut self, peer: PeerId, rank: Option<TrainerId>, replies: &mut Replies) {
        let Some(trainer) = rank else { return };
        let peers = &self.peers;
        let is_other = |other: &PeerId| *other != peer && peers.get(other).is_some_and(|one| one.rank == rank);
        for (other, head, _) in self.begins.extract_if(.., |(other, ..)| is_other(other)) {
            let incarnation = peers.get(&other).map_or(Incarnation(0), |one| one.incarnation);
            if let Err(refusal) = self.ranks.check_life(trainer, incarnation) {
                replies.error(other, &head, &refusal);
            }
        }
    }

    /// Refuses a reader's save while trainers make steps together.
    fn check_save(&self, rank: Option<TrainerId>) -> Result<(), Refusal> {
        let job = self.job();
        let is_sync = Mode::from_numbers(job.mode, job.staleness) == Some(Mode::Sync);
        if rank.is_some() || !is_sync || !self.ranks.are_any_connected() {
            return Ok(());
        }
        Err(Refusal::invalid(
            "a model that a reader saves while trainers train may have parameters of different rounds; expected \
             paddle_save_model of a trainer between two steps, or after the trainers have left",
        ))
    }

    fn rank_of(&self, peer: PeerId) -> Option<TrainerId> {
        self.peers.get(&peer).and_then(|peer| peer.rank)
    }

    /// The sender of a request, whose hello was accepted and whose incarnation is current. A commit is fenced by its
    /// generation.
    fn check_sender(&self, peer: PeerId, request: &Request) -> Result<Option<TrainerId>, Refusal> {
        let known = self.peers.get(&peer).filter(|peer| peer.is_welcome);
        let known = known.ok_or_else(|| Refusal::invalid("the first frame of a connection is a hello"))?;
        if let Some(trainer) = known.rank
            && !matches!(request, Request::Join(_) | Request::Commit(_))
        {
            self.ranks.check_life(trainer, known.incarnation)?;
        }
        Ok(known.rank)
    }

    /// Refuses a request for a rank or slot that the job does not have.
    fn check_claim(&self, request: &Request) -> Result<(), Refusal> {
        match request {
            Request::Register(register) => {
                let entry = register.entry.as_ref();
                let entry = entry.ok_or_else(|| Refusal::invalid("a registration without an address"))?;
                let counted = self.servers.check_count(register);
                let checked = counted.and_then(|()| self.check_server(register.server, entry));
                checked.map_err(|failure| Refusal::invalid(failure.to_string()))
            }
            Request::Join(JoinRequest { trainer: Some(trainer), .. }) => {
                self.ranks.check(TrainerId(*trainer)).map(drop)
            }
            _ => Ok(()),
        }
    }

    /// Decides claims: servers first; trainers and readers once every server has registered.
    fn admit(&mut self, now: Now, replies: &mut Replies, out: &mut Vec<CoordinatorOutput>) {
        if self.claims.is_empty() {
            return;
        }
        let is_server = |claim: &Claimant| matches!(claim.request, Request::Register(_));
        let (servers, others): (Vec<_>, _) = std::mem::take(&mut self.claims).into_iter().partition(is_server);
        for mut claimant in servers.into_iter().chain(others) {
            let claim = self.claim(now, &claimant, out);
            let Claimant { peer, head, .. } = &claimant;
            match claim {
                PlaceClaim::Taken(trainer) => answer(replies, *peer, head, Answer::Joined(self.joined(trainer))),
                PlaceClaim::Refused(refusal) => {
                    tracing::warn!(%peer, "refused: {}", refusal.text);
                    replies.error(*peer, head, &refusal);
                }
                PlaceClaim::Waits(until) => {
                    claimant.until = Some(until).filter(|until| *until < NEVER);
                    self.claims.push(claimant);
                }
            }
        }
    }

    fn claim(&mut self, now: Now, claimant: &Claimant, out: &mut Vec<CoordinatorOutput>) -> PlaceClaim<TrainerId> {
        let Claimant { peer, request, asked, .. } = claimant;
        let origin = self.peers.get(peer).map(|peer| peer.origin.clone()).unwrap_or_default();
        match request {
            Request::Register(register) => self.claim_server((now, *asked), *peer, &origin, register, out),
            _ if self.servers.absent().next().is_some() => {
                let absence = self.peers.get(peer).and_then(|peer| peer.absence);
                match absence.map(|absence| *asked + absence) {
                    Some(until) if until <= now => PlaceClaim::Refused(self.servers.refuse_absent(now, *asked)),
                    until => PlaceClaim::Waits(until.unwrap_or(NEVER)),
                }
            }
            Request::Join(join) => {
                let claim = self.ranks.claim(now, *asked, join.trainer, &origin);
                if let PlaceClaim::Taken(trainer) = claim {
                    let incarnation = self.ranks.get(trainer).map_or(Incarnation(0), |member| member.incarnation);
                    if let Some(peer) = self.peers.get_mut(peer) {
                        (peer.rank, peer.incarnation) = (Some(trainer), incarnation);
                    }
                    out.push(self.keep());
                }
                claim
            }
            _ => PlaceClaim::Taken(NO_TRAINER),
        }
    }

    /// Describes what the requests of a connection wait for, and whether that ends without the requester's deadline: a
    /// silent initialiser loses its lease.
    fn describe_wait(&self, peer: PeerId) -> (String, bool) {
        if self.claims.iter().any(|claim| claim.peer == peer) {
            let absent = self.servers.describe_absent();
            let all_taken = "every rank has a trainer that is connected".to_owned();
            return (if absent.is_empty() { all_taken } else { absent }, false);
        }
        if let Some(moving) = self.moves.describe_wait(peer) {
            return (moving, false);
        }
        match &self.election {
            Election::Leased { trainer, .. } if self.begins.iter().any(|(waiting, ..)| *waiting == peer) => {
                let origin = self.ranks.get(*trainer).map(|member| member.origin.to_string()).unwrap_or_default();
                (format!("trainer {trainer} ({origin}) initialises the parameters and has not finished"), true)
            }
            Election::Open if self.begins.iter().any(|(waiting, ..)| *waiting == peer) => {
                ("no trainer has offered to initialise the parameters".to_owned(), false)
            }
            _ => (String::new(), false),
        }
    }

    fn claim_server(
        &mut self,
        times: (Now, Now),
        peer: PeerId,
        origin: &PeerOrigin,
        register: &RegisterRequest,
        out: &mut Vec<CoordinatorOutput>,
    ) -> PlaceClaim<TrainerId> {
        let Some(entry) = &register.entry else {
            return PlaceClaim::Refused(Refusal::invalid("a registration is empty"));
        };
        // A first registration that comes again, perhaps late, says nothing new: the process may hold shards by now.
        let is_repeated = register.map_version.is_none() && self.servers.is_held_by(register, origin);
        match self.servers.claim(times, peer, origin, register, entry) {
            PlaceClaim::Taken(is_elsewhere) => {
                if is_elsewhere {
                    out.push(self.keep());
                }
                if !is_repeated {
                    let server = u16::try_from(register.server).expect("its slot was just found");
                    self.note_held(ServerIndex(server), register.map_version.map(MapVersion), &register.holds, out);
                }
                PlaceClaim::Taken(NO_TRAINER)
            }
            PlaceClaim::Waits(until) => PlaceClaim::Waits(until),
            PlaceClaim::Refused(refusal) => PlaceClaim::Refused(refusal),
        }
    }

    fn joined(&self, trainer: TrainerId) -> Joined {
        let member = self.ranks.get(trainer);
        Joined {
            trainer: trainer.0,
            incarnation: member.map_or(0, |member| member.incarnation.0),
            epoch: self.epoch.0,
            generation: self.generation().0,
            topology: Some(TopologyMessage { servers: self.servers.entries().cloned().collect() }),
            job: Some(self.job()),
            default_config: self.options.default_config.clone(),
            watches: self.options.watches,
            takes_nonfinite: self.options.takes_nonfinite,
            run: self.ranks.run().0,
            is_mode_given: self.options.given.has("mode"),
            is_merge_given: self.options.given.has("merge"),
            first_server: (trainer == NO_TRAINER).then(|| FirstServerMessage {
                lease_millis: u64::try_from(self.options.lease.as_millis()).unwrap_or(u64::MAX),
                model_dir: self.options.model_dir.clone(),
            }),
            map: Some(ShardMapMessage::from(self.map())),
        }
    }

    /// Answers begin requests: all of them after the commit, one of them while there is no initialiser.
    fn elect(&mut self, now: Now, replies: &mut Replies, out: &mut Vec<CoordinatorOutput>) {
        if let Election::Committed(committed) = &self.election {
            let pages = u32::try_from(committed.pages.len()).unwrap_or(u32::MAX);
            let done = Initialised {
                generation: committed.generation.0,
                pages,
                job: Some(committed.job),
                default_config: committed.default_config.clone(),
                rate: committed.rate,
            };
            for (peer, head, _) in self.begins.drain(..) {
                answer(replies, peer, &head, Answer::Initialised(done.clone()));
            }
            return;
        }
        if let Election::Leased { trainer, .. } = &self.election {
            // The holder begins again: its generation is void.
            let holder = Some(*trainer);
            let again = self.begins.iter().any(|(peer, ..)| self.rank_of(*peer) == holder);
            if !again {
                return;
            }
        }
        self.grant(now, replies, out);
    }

    /// Ends the lease of a holder that gives up. A request from before the grant names another generation and is
    /// ignored.
    fn resign(&mut self, rank: Option<TrainerId>, believed: Generation) {
        if let Election::Leased { trainer, generation, .. } = &self.election
            && (Some(*trainer), *generation) == (rank, believed)
        {
            tracing::warn!(%trainer, %generation, "the initialiser gave up; another trainer is elected");
            self.election = Election::Open;
        }
    }

    fn grant(&mut self, now: Now, replies: &mut Replies, out: &mut Vec<CoordinatorOutput>) {
        let holder = match &self.election {
            Election::Leased { trainer, .. } => Some(*trainer),
            Election::Open | Election::Committed(_) => None,
        };
        let rank = |peer: &PeerId| self.peers.get(peer).and_then(|one| one.rank);
        let chosen = self.begins.iter().position(|(peer, _, offers)| {
            *offers && rank(peer).is_some() && (holder.is_none() || rank(peer) == holder)
        });
        let Some(chosen) = chosen else { return };
        let (peer, head, _) = self.begins.remove(chosen);
        let Some(trainer) = self.peers.get(&peer).and_then(|one| one.rank) else { return };
        self.granted = Generation(self.granted.0 + 1);
        let until = now + self.options.lease;
        self.election = Election::Leased { trainer, generation: self.granted, until, pages: Vec::new() };
        out.push(self.keep());
        tracing::info!(%trainer, generation = %self.granted, "elected to initialise the parameters");
        answer(replies, peer, &head, Answer::Granted(self.granted.0));
    }

    /// Takes a page of the catalogue from the elected initialiser; the last one ends the initialisation.
    fn commit(&mut self, peer: PeerId, commit: Commit, out: &mut Vec<CoordinatorOutput>) -> Result<(), Refusal> {
        let lost = |text: String| Refusal::new(ErrorCode::InitialisationLost, text);
        let rank = self.rank_of(peer);
        match &mut self.election {
            Election::Committed(committed) if committed.generation.0 == commit.generation => {}
            Election::Leased { trainer, generation, pages, .. }
                if Some(*trainer) == rank && generation.0 == commit.generation =>
            {
                // A resent page counts once.
                if !pages.contains(&commit.page) {
                    pages.push(commit.page);
                }
                if commit.last {
                    let pages = std::mem::take(pages);
                    check_pages(&pages).map_err(|failure| lost(failure.to_string()))?;
                    let job = commit.job.unwrap_or(self.options.job);
                    tracing::info!(%generation, "initialisation is committed");
                    let (generation, default_config) = (*generation, commit.default_config);
                    self.election = Election::Committed(CommittedJob {
                        generation,
                        pages,
                        job,
                        default_config,
                        operator_config: self.options.default_config.clone(),
                        rate: None,
                    });
                    out.push(self.keep());
                }
            }
            _ => {
                return Err(lost(format!(
                    "generation {} was superseded: begin the initialisation anew",
                    commit.generation
                )));
            }
        }
        Ok(())
    }

    fn page(&self, number: u32) -> Result<Vec<u8>, Refusal> {
        let Election::Committed(CommittedJob { pages, .. }) = &self.election else {
            return Err(Refusal::new(ErrorCode::NotInitialised, "the parameters are not initialised yet"));
        };
        let page = pages.get(number as usize).cloned();
        page.ok_or_else(|| Refusal::invalid(format!("page {number} of a catalogue of {} pages", pages.len())))
    }

    fn keep(&self) -> CoordinatorOutput {
        CoordinatorOutput::Keep(self.kept())
    }

    /// The state that a later start of the coordinator recalls.
    #[must_use]
    pub fn kept(&self) -> Vec<u8> {
        let committed = match &self.election {
            Election::Committed(committed) => committed.clone(),
            Election::Open | Election::Leased { .. } => CommittedJob::default(),
        };
        let kept = KeptMessage {
            epoch: self.epoch.0,
            granted: self.granted.0,
            committed: committed.generation.0,
            job: (committed.generation > Generation(0)).then_some(committed.job),
            pages: committed.pages,
            default_config: committed.default_config,
            operator_config: committed.operator_config,
            incarnations: self.ranks.incarnations(),
            left: self.ranks.departed(),
            addresses: self.servers.addresses(),
            run: self.ranks.run().0,
            map: Some(ShardMapMessage::from(self.map())),
        };
        kept.encode_to_vec()
    }

    /// Restores the state of an earlier start.
    fn recall(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let kept = KeptMessage::decode(bytes).map_err(unreadable)?;
        self.epoch = Epoch(kept.epoch);
        self.granted = Generation(kept.granted);
        self.servers.recall(&kept.addresses);
        if let Some(map) = &kept.map {
            let wrong = || Failure::Node("the coordinator's stored map of shards is damaged".to_owned());
            self.moves.recall(map.map().ok_or_else(wrong)?);
        }
        self.ranks.recall(&kept.incarnations, &kept.left, RunNumber(kept.run));
        if kept.committed > 0 {
            let first = kept.pages.first().map(|page| CataloguePage::decode(page.as_slice()));
            self.placed = first.transpose().map_err(unreadable)?.map(|page| page.shards).unwrap_or_default();
            if self.placed.len() != self.servers.len() {
                let (before, now) = (self.placed.len(), self.servers.len());
                let shown = self.options.given.0.get("servers");
                return Err(Failure::Node(format!(
                    "{}: the job in this checkpoint_dir was initialised on {before} servers, which stays; expected \
                     servers = {before}, or another checkpoint_dir for a new job",
                    shown.cloned().unwrap_or_else(|| format!("servers = {now} (default)"))
                )));
            }
            let resumed = CommittedJob {
                generation: Generation(kept.committed),
                job: kept.job.unwrap_or(self.options.job),
                pages: kept.pages,
                default_config: kept.default_config,
                operator_config: kept.operator_config,
                rate: None,
            };
            let committed = resumed.resume(&self.options, &self.ranks.staying())?;
            self.ranks.resize(committed.job.trainers);
            self.election = Election::Committed(committed);
        }
        Ok(())
    }
}

/// The part of the recalled state that locates the job's files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RecalledJob {
    pub(super) epoch: Epoch,
    /// The shards of each server; empty before the parameters are initialised.
    pub(super) shards: Vec<u16>,
}

impl RecalledJob {
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, Failure> {
        let kept = KeptMessage::decode(bytes).map_err(unreadable)?;
        let first = kept.pages.first().filter(|_| kept.committed > 0);
        let page = first.map(|page| CataloguePage::decode(page.as_slice())).transpose().map_err(unreadable)?;
        let shards = page.map(|page| page.shards).unwrap_or_default();
        let shards = shards.into_iter().map(|count| u16::try_from(count).unwrap_or(u16::MAX)).collect();
        Ok(Self { epoch: Epoch(kept.epoch), shards })
    }
}

fn unreadable(error: prost::DecodeError) -> Failure {
    Failure::Node(format!("the coordinator's stored state does not parse: {error}"))
}

fn check_pages(pages: &[Vec<u8>]) -> Result<(), Failure> {
    let mut decoded = Ok(());
    // Pages are decoded one at a time, to bound memory.
    let found = pages.iter().map_while(|page| match CataloguePage::decode(page.as_slice()) {
        Ok(page) => Some(page),
        Err(error) => {
            decoded = Err(Failure::call(format!("catalogue page: {error}")));
            None
        }
    });
    let catalogue = Catalogue::from_pages(found);
    decoded.and(catalogue.map(drop))
}

#[derive(Clone, PartialEq, Message)]
struct KeptMessage {
    #[prost(uint64, tag = "1")]
    epoch: u64,
    #[prost(uint32, tag = "2")]
    granted: u32,
    #[prost(uint32, tag = "3")]
    committed: u32,
    #[prost(bytes = "vec", repeated, tag = "4")]
    pages: Vec<Vec<u8>>,
    #[prost(message, optional, tag = "5")]
    job: Option<JobMessage>,
    #[prost(uint32, repeated, tag = "6")]
    incarnations: Vec<u32>,
    #[prost(bool, repeated, tag = "7")]
    left: Vec<bool>,
    /// Where the servers were, in the order of their index; empty for one that never registered.
    #[prost(string, repeated, tag = "8")]
    addresses: Vec<String>,
    /// The number of the trainers' last run.
    #[prost(uint32, tag = "9")]
    run: u32,
    /// The configuration of parameters without their own, as the job was initialised.
    #[prost(bytes = "vec", tag = "10")]
    default_config: Vec<u8>,
    /// The same as the operator has set it.
    #[prost(bytes = "vec", tag = "11")]
    operator_config: Vec<u8>,
    /// Which server leads each shard.
    #[prost(message, optional, tag = "12")]
    map: Option<ShardMapMessage>,
}
