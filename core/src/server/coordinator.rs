//! The coordinator, embedded in server 0: it elects the initialiser and fences it, keeps the catalogue, and knows
//! servers and trainers.
//!
//! Not here: anything on the data path. A step that runs needs no coordinator.
//!
//! The election is a lease. Who holds it is heard from within the lease's time, or another trainer is chosen
//! under a larger generation; shards refuse the smaller one from the first frame of the larger on. The commit is
//! one event here, and nobody pushes before it, so a shard that finished under a generation that never
//! committed is simply filled again.

use std::collections::BTreeMap;
use std::time::Duration;

use prost::Message;

use super::reply::{Refusal, Replies};
use super::shard::Output;
use crate::error::Failure;
use crate::ids::{Epoch, Generation, Incarnation, NO_TRAINER, PeerId, TrainerId};
use crate::partition::{Catalogue, CataloguePage};
use crate::port::{Event, Incoming, Submit};
use crate::time::Now;
use crate::wire::answer::{Answer, Initialised, Saved};
use crate::wire::request::{Commit, Request};
use crate::wire::{
    ControlAnswer, ControlRequest, ErrorCode, Frame, Head, HelloMessage, JobMessage, JoinRequest, Joined, Kind,
    RegisterRequest, ServerEntry, TopologyMessage, WelcomeMessage,
};

/// What the coordinator is told at start.
#[derive(Clone, Debug)]
pub struct CoordinatorOptions {
    /// The job's life, when nothing was kept of an earlier start.
    pub epoch: Epoch,
    /// How many servers there are.
    pub servers: u16,
    /// The settings of the job as the operator gave them; the initialiser may change mode and merge.
    pub job: JobMessage,
    /// The configuration of a parameter when nobody says otherwise, encoded.
    pub default_config: Vec<u8>,
    /// How long the initialiser may be silent.
    pub lease: Duration,
}

/// What the coordinator wants done.
pub enum CoordinatorOutput {
    /// As any session.
    Session(Output),
    /// Keep these bytes before anything that follows is sent; they come back in [`Coordinator::recall`].
    Keep(Vec<u8>),
    /// Save the model, then call [`Coordinator::saved`] with the head.
    Save {
        /// Who asks.
        peer: PeerId,
        /// The request.
        head: Head,
        /// The path asked for, as it came.
        path: String,
    },
}

/// A trainer as the coordinator knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Member {
    /// Its current life; zero when it never joined.
    pub incarnation: Incarnation,
    /// Whether it said that it is finished.
    pub left: bool,
    /// The host and process it came from.
    pub origin: String,
    /// When it was last heard.
    pub heard: Now,
}

/// The coordinator.
pub struct Coordinator {
    options: CoordinatorOptions,
    epoch: Epoch,
    servers: Vec<Option<ServerEntry>>,
    /// The shards of each server when the chunks were placed; empty before that.
    placed: Vec<u32>,
    members: Vec<Member>,
    election: Election,
    /// The last generation that was granted.
    granted: Generation,
    peers: BTreeMap<PeerId, Peer>,
    /// Trainers that asked to begin and wait, in the order of asking; true offers to initialise.
    begins: Vec<(PeerId, Head, bool)>,
    /// Whoever asked for the servers before all of them had registered.
    joins: Vec<(PeerId, Head, Request)>,
}

enum Election {
    Open,
    Held { trainer: TrainerId, generation: Generation, until: Now, pages: Vec<Vec<u8>> },
    Committed { generation: Generation, pages: Vec<Vec<u8>>, job: JobMessage },
}

struct Peer {
    origin: String,
    /// Whether its hello was accepted.
    is_welcome: bool,
    who: Option<TrainerId>,
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
            servers: vec![None; options.servers.into()],
            placed: Vec::new(),
            members: vec![Member::default(); options.job.trainers as usize],
            election: Election::Open,
            granted: Generation(0),
            peers: BTreeMap::new(),
            begins: Vec::new(),
            joins: Vec::new(),
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

    /// The trainers, by rank.
    #[must_use]
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// The generation that was committed; zero before.
    #[must_use]
    pub fn generation(&self) -> Generation {
        match &self.election {
            Election::Committed { generation, .. } => *generation,
            Election::Open | Election::Held { .. } => Generation(0),
        }
    }

    /// Enters a server: the one that the coordinator is embedded in, without a connection.
    ///
    /// # Errors
    /// When there is no such server, or its shards are not those that the chunks were placed on.
    pub fn register(&mut self, server: u32, entry: ServerEntry) -> Result<(), Failure> {
        let count = self.servers.len();
        let Some(slot) = self.servers.get_mut(server as usize) else {
            return Err(Failure::call(format!("server index {server}: this job has {count} servers, numbered from 0")));
        };
        let placed = self.placed.get(server as usize).copied();
        let before = slot.as_ref().map(|before| before.shards).or(placed);
        if let Some(before) = before.filter(|before| *before != entry.shards) {
            return Err(Failure::call(format!(
                "server {server} had {before} shards and comes back with {}: chunks would change their places",
                entry.shards
            )));
        }
        *slot = Some(entry);
        Ok(())
    }

    /// Takes an event in, and gives everything out that follows from it.
    pub fn handle(&mut self, now: Now, event: Event, out: &mut Vec<CoordinatorOutput>) {
        let mut replies = Replies::default();
        match event {
            Event::Accepted { peer, origin } => {
                self.peers.insert(peer, Peer { origin, is_welcome: false, who: None, incarnation: Incarnation(0) });
            }
            Event::Head { peer, frame } => {
                let land = Submit::Land { peer, into: Incoming::nowhere(&frame) };
                out.push(CoordinatorOutput::Session(Output::Submit(land)));
            }
            Event::Landed { peer, frame, .. } => self.landed(now, peer, &frame, &mut replies, out),
            Event::Gone { peer, .. } => self.gone(now, peer),
            Event::Left { .. } | Event::Sent { .. } | Event::Connected { .. } => {}
        }
        self.flush(&mut replies, out);
    }

    /// Takes the lease from an initialiser that was silent for too long. Call when [`Coordinator::deadline`] has
    /// passed.
    pub fn expire(&mut self, now: Now, out: &mut Vec<CoordinatorOutput>) {
        let lapsed = matches!(&self.election, Election::Held { until, .. } if *until <= now);
        if !lapsed {
            return;
        }
        if let Election::Held { trainer, generation, .. } = &self.election {
            tracing::warn!(%trainer, %generation, "the initialiser was silent for too long; another is chosen");
        }
        self.election = Election::Open;
        let mut replies = Replies::default();
        self.elect(now, &mut replies, out);
        self.flush(&mut replies, out);
    }

    /// When [`Coordinator::expire`] has something to do.
    #[must_use]
    pub fn deadline(&self) -> Option<Now> {
        match &self.election {
            Election::Held { until, .. } => Some(*until),
            Election::Open | Election::Committed { .. } => None,
        }
    }

    /// Answers who asked for a model to be saved.
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
        out.push(CoordinatorOutput::Session(Output::Close(peer)));
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
            self.check_life(trainer, head.incarnation)?;
        }
        let Some(known) = self.peers.get_mut(&peer) else { return Ok(()) };
        known.origin = format!("{} ({} process {})", known.origin, hello.host, hello.process);
        (known.is_welcome, known.who, known.incarnation) = (true, trainer, head.incarnation);
        self.heard(now, trainer);
        let message = WelcomeMessage { generation: self.generation().0 };
        let answer = Head { epoch: self.epoch, ..head.answer(Kind::Welcome) };
        replies.whole(peer, Frame::with_control(answer, &message));
        Ok(())
    }

    fn check_life(&self, trainer: TrainerId, incarnation: Incarnation) -> Result<(), Refusal> {
        let Some(member) = self.members.get(trainer.0 as usize) else {
            return Err(self.no_such_rank(trainer));
        };
        if incarnation < member.incarnation {
            return Err(Refusal::superseded(trainer, incarnation, member.incarnation));
        }
        Ok(())
    }

    fn no_such_rank(&self, trainer: TrainerId) -> Refusal {
        Refusal::no_such_trainer(trainer, self.members.len())
    }

    fn heard(&mut self, now: Now, trainer: Option<TrainerId>) {
        let Some(trainer) = trainer else { return };
        if let Some(member) = self.members.get_mut(trainer.0 as usize) {
            member.heard = now;
        }
        if let Election::Held { trainer: holder, until, .. } = &mut self.election
            && *holder == trainer
        {
            *until = now + self.options.lease;
        }
    }

    fn gone(&mut self, now: Now, peer: PeerId) {
        let who = self.peers.remove(&peer).and_then(|peer| peer.who);
        self.begins.retain(|(waiting, ..)| *waiting != peer);
        self.joins.retain(|(waiting, ..)| *waiting != peer);
        let reconnected = self.peers.values().any(|other| other.who == who);
        if let Election::Held { trainer, until, .. } = &mut self.election
            && Some(*trainer) == who
            && !reconnected
        {
            // A lost connection is a reason to doubt: the holder has a part of the lease to come back.
            *until = (*until).min(now + self.options.lease / 4);
        }
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
        let who = self.check_sender(peer, &request)?;
        self.heard(now, who);
        match request {
            Request::Register(register) => return self.enter_server(peer, head, register, replies, out),
            Request::Join(_) | Request::Observe(_) => return self.join(peer, head, request, replies, out),
            Request::Begin(offers) => {
                // Whoever asks again on a new connection does not wait on the old one any more.
                let peers = &self.peers;
                let rank = |other: &PeerId| peers.get(other).and_then(|other| other.who);
                self.begins.retain(|(other, ..)| *other == peer || who.is_none() || rank(other) != who);
                if !offers {
                    self.resign(who, head.generation);
                }
                self.begins.push((peer, *head, offers && who.is_some()));
                self.elect(now, replies, out);
            }
            Request::Resign(_) => {
                self.resign(who, head.generation);
                self.elect(now, replies, out);
                answer(replies, peer, head, Answer::Done(true));
            }
            Request::Commit(commit) => self.commit(now, peer, head, commit, replies, out)?,
            Request::Catalogue(wanted) => {
                let page = self.page(wanted.page)?;
                answer(replies, peer, head, Answer::Page(page));
            }
            Request::Heartbeat(_) => answer(replies, peer, head, Answer::Done(true)),
            Request::Leave(_) => {
                let member = who.and_then(|trainer| self.members.get_mut(trainer.0 as usize));
                member.ok_or_else(|| Refusal::invalid("only a trainer can leave"))?.left = true;
                out.push(self.keep());
                answer(replies, peer, head, Answer::Done(true));
            }
            Request::Save(path) => out.push(CoordinatorOutput::Save { peer, head: *head, path }),
        }
        Ok(())
    }

    fn rank_of(&self, peer: PeerId) -> Option<TrainerId> {
        self.peers.get(&peer).and_then(|peer| peer.who)
    }

    /// Who asks: somebody whose hello was accepted and whose life was not superseded since. A commit is fenced by
    /// its generation.
    fn check_sender(&self, peer: PeerId, request: &Request) -> Result<Option<TrainerId>, Refusal> {
        let known = self.peers.get(&peer).filter(|peer| peer.is_welcome);
        let known = known.ok_or_else(|| Refusal::invalid("the first frame of a connection is a hello"))?;
        if let Some(trainer) = known.who
            && !matches!(request, Request::Join(_) | Request::Commit(_))
        {
            self.check_life(trainer, known.incarnation)?;
        }
        Ok(known.who)
    }

    fn enter_server(
        &mut self,
        peer: PeerId,
        head: &Head,
        register: RegisterRequest,
        replies: &mut Replies,
        out: &mut Vec<CoordinatorOutput>,
    ) -> Result<(), Refusal> {
        let entry = register.entry.ok_or_else(|| Refusal::invalid("a registration without an address"))?;
        self.register(register.server, entry).map_err(|failure| Refusal::invalid(failure.to_string()))?;
        answer(replies, peer, head, Answer::Joined(self.joined(NO_TRAINER)));
        self.admit(replies, out);
        Ok(())
    }

    fn join(
        &mut self,
        peer: PeerId,
        head: &Head,
        request: Request,
        replies: &mut Replies,
        out: &mut Vec<CoordinatorOutput>,
    ) -> Result<(), Refusal> {
        if let Request::Join(JoinRequest { trainer: Some(trainer), .. }) = &request
            && *trainer as usize >= self.members.len()
        {
            return Err(self.no_such_rank(TrainerId(*trainer)));
        }
        self.joins.push((peer, *head, request));
        self.admit(replies, out);
        Ok(())
    }

    /// Answers whoever asked to join, once every server has registered.
    fn admit(&mut self, replies: &mut Replies, out: &mut Vec<CoordinatorOutput>) {
        if self.servers.iter().any(Option::is_none) {
            return;
        }
        for (peer, head, request) in std::mem::take(&mut self.joins) {
            let admitted = match request {
                Request::Join(join) => self.admit_trainer(peer, &join, out),
                _ => Ok(NO_TRAINER),
            };
            match admitted {
                Ok(trainer) => answer(replies, peer, &head, Answer::Joined(self.joined(trainer))),
                Err(refusal) => replies.error(peer, &head, &refusal),
            }
        }
    }

    fn admit_trainer(
        &mut self,
        peer: PeerId,
        join: &JoinRequest,
        out: &mut Vec<CoordinatorOutput>,
    ) -> Result<TrainerId, Refusal> {
        let free = |member: &Member| member.incarnation == Incarnation(0) || member.left;
        let rank = match join.trainer {
            Some(rank) => rank,
            None => {
                self.members.iter().position(free).and_then(|rank| u32::try_from(rank).ok()).ok_or_else(|| {
                    Refusal::invalid(format!("all {} ranks of this job are taken", self.members.len()))
                })?
            }
        };
        let trainer = TrainerId(rank);
        let origin = self.peers.get(&peer).map(|peer| peer.origin.clone()).unwrap_or_default();
        let member = self.members.get_mut(rank as usize);
        let member = member.ok_or_else(|| Refusal::invalid(format!("trainer {rank} is not one of this job's")))?;
        member.incarnation = Incarnation(member.incarnation.0 + 1);
        (member.left, member.origin) = (false, origin);
        if let Some(peer) = self.peers.get_mut(&peer) {
            (peer.who, peer.incarnation) = (Some(trainer), member.incarnation);
        }
        out.push(self.keep());
        Ok(trainer)
    }

    fn joined(&self, trainer: TrainerId) -> Joined {
        let member = self.members.get(trainer.0 as usize);
        let job = match &self.election {
            Election::Committed { job, .. } => *job,
            Election::Open | Election::Held { .. } => self.options.job,
        };
        Joined {
            trainer: trainer.0,
            incarnation: member.map_or(0, |member| member.incarnation.0),
            epoch: self.epoch.0,
            generation: self.generation().0,
            topology: Some(TopologyMessage { servers: self.servers.iter().flatten().cloned().collect() }),
            job: Some(job),
            default_config: self.options.default_config.clone(),
        }
    }

    /// Answers those who wait to begin: all of them after the commit, one of them while nobody is chosen.
    fn elect(&mut self, now: Now, replies: &mut Replies, out: &mut Vec<CoordinatorOutput>) {
        if let Election::Committed { generation, pages, job } = &self.election {
            let pages = u32::try_from(pages.len()).unwrap_or(u32::MAX);
            let done = Initialised { generation: generation.0, pages, job: Some(*job) };
            for (peer, head, _) in self.begins.drain(..) {
                answer(replies, peer, &head, Answer::Initialised(done.clone()));
            }
            return;
        }
        if let Election::Held { trainer, .. } = &self.election {
            // The holder itself begins anew: what it did so far is void.
            let holder = Some(*trainer);
            let again = self.begins.iter().any(|(peer, ..)| self.rank_of(*peer) == holder);
            if !again {
                return;
            }
        }
        self.grant(now, replies, out);
    }

    /// A holder that does not offer any more gives way at once. What it asked before it was chosen names another
    /// generation, and may come again after a reconnect.
    fn resign(&mut self, who: Option<TrainerId>, believed: Generation) {
        if let Election::Held { trainer, generation, .. } = &self.election
            && (Some(*trainer), *generation) == (who, believed)
        {
            tracing::warn!(%trainer, %generation, "the initialiser gave up; another is chosen");
            self.election = Election::Open;
        }
    }

    fn grant(&mut self, now: Now, replies: &mut Replies, out: &mut Vec<CoordinatorOutput>) {
        let holder = match &self.election {
            Election::Held { trainer, .. } => Some(*trainer),
            Election::Open | Election::Committed { .. } => None,
        };
        let who = |peer: &PeerId| self.peers.get(peer).and_then(|one| one.who);
        let chosen = self
            .begins
            .iter()
            .position(|(peer, _, offers)| *offers && who(peer).is_some() && (holder.is_none() || who(peer) == holder));
        let Some(chosen) = chosen else { return };
        let (peer, head, _) = self.begins.remove(chosen);
        let Some(trainer) = self.peers.get(&peer).and_then(|one| one.who) else { return };
        self.granted = Generation(self.granted.0 + 1);
        let until = now + self.options.lease;
        self.election = Election::Held { trainer, generation: self.granted, until, pages: Vec::new() };
        out.push(self.keep());
        tracing::info!(%trainer, generation = %self.granted, "chosen to initialise the parameters");
        answer(replies, peer, &head, Answer::Granted(self.granted.0));
    }

    fn commit(
        &mut self,
        now: Now,
        peer: PeerId,
        head: &Head,
        commit: Commit,
        replies: &mut Replies,
        out: &mut Vec<CoordinatorOutput>,
    ) -> Result<(), Refusal> {
        let lost = |text: String| Refusal::new(ErrorCode::InitialisationLost, text);
        let who = self.rank_of(peer);
        match &mut self.election {
            Election::Committed { generation, .. } if generation.0 == commit.generation => {}
            Election::Held { trainer, generation, pages, .. }
                if Some(*trainer) == who && generation.0 == commit.generation =>
            {
                // A page that was sent twice, because its answer was lost with a connection, counts once.
                if !pages.contains(&commit.page) {
                    pages.push(commit.page);
                }
                if commit.last {
                    let pages = std::mem::take(pages);
                    check_pages(&pages).map_err(|failure| lost(failure.to_string()))?;
                    let job = commit.job.unwrap_or(self.options.job);
                    tracing::info!(%generation, "initialisation is committed");
                    self.election = Election::Committed { generation: *generation, pages, job };
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
        answer(replies, peer, head, Answer::Done(true));
        self.elect(now, replies, out);
        Ok(())
    }

    fn page(&self, number: u32) -> Result<Vec<u8>, Refusal> {
        let Election::Committed { pages, .. } = &self.election else {
            return Err(Refusal::new(ErrorCode::NotInitialised, "the parameters are not initialised yet"));
        };
        let page = pages.get(number as usize).cloned();
        page.ok_or_else(|| Refusal::invalid(format!("page {number} of a catalogue of {} pages", pages.len())))
    }

    fn keep(&self) -> CoordinatorOutput {
        CoordinatorOutput::Keep(self.kept())
    }

    /// What a later start of the coordinator needs to know.
    #[must_use]
    pub fn kept(&self) -> Vec<u8> {
        let (committed, pages, job) = match &self.election {
            Election::Committed { generation, pages, job } => (generation.0, pages.clone(), Some(*job)),
            Election::Open | Election::Held { .. } => (0, Vec::new(), None),
        };
        let kept = KeptMessage {
            epoch: self.epoch.0,
            granted: self.granted.0,
            committed,
            pages,
            job,
            incarnations: self.members.iter().map(|member| member.incarnation.0).collect(),
            left: self.members.iter().map(|member| member.left).collect(),
        };
        kept.encode_to_vec()
    }

    /// Takes up where an earlier start left off.
    fn recall(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let unreadable = |error: prost::DecodeError| Failure::Node(format!("what the coordinator kept: {error}"));
        let kept = KeptMessage::decode(bytes).map_err(unreadable)?;
        self.epoch = Epoch(kept.epoch);
        self.granted = Generation(kept.granted);
        for (member, incarnation) in self.members.iter_mut().zip(&kept.incarnations) {
            member.incarnation = Incarnation(*incarnation);
        }
        for (member, left) in self.members.iter_mut().zip(&kept.left) {
            member.left = *left;
        }
        if kept.committed > 0 {
            let first = kept.pages.first().map(|page| CataloguePage::decode(page.as_slice()));
            self.placed = first.transpose().map_err(unreadable)?.map(|page| page.shards).unwrap_or_default();
            if self.placed.len() != self.servers.len() {
                return Err(Failure::Node(format!(
                    "this job was initialised on {} servers and is started with {}",
                    self.placed.len(),
                    self.servers.len()
                )));
            }
            let job = kept.job.unwrap_or(self.options.job);
            self.election = Election::Committed { generation: Generation(kept.committed), pages: kept.pages, job };
        }
        Ok(())
    }
}

fn answer(replies: &mut Replies, peer: PeerId, head: &Head, answer: Answer) {
    let message = ControlAnswer { answer: Some(answer) };
    replies.whole(peer, Frame::with_control(head.answer(Kind::Answer), &message));
}

fn check_pages(pages: &[Vec<u8>]) -> Result<(), Failure> {
    let decode = |page: &Vec<u8>| {
        CataloguePage::decode(page.as_slice()).map_err(|error| Failure::call(format!("catalogue page: {error}")))
    };
    Catalogue::from_pages(pages.iter().map(decode).collect::<Result<Vec<_>, _>>()?)?;
    Ok(())
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
}
