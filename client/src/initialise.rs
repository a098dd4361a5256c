//! Joining a job, electing the initialising trainer, and sending initial values.

use std::collections::BTreeMap;

use prost::Message;
use pserver_core::checkpoint::check_savable;
use pserver_core::client::{LaneId, RequestBody};
use pserver_core::config::{OptimizerSettings, ParameterConfig, SparseSettings, row_layout};
use pserver_core::dtype::ElementType;
use pserver_core::error::{CallEnd, Failure};
use pserver_core::ids::{ChunkId, Generation, Round, ShardId};
use pserver_core::limits::{FRAME_CONTROL_BYTES_MAX, FRAME_ENTRIES_MAX};
use pserver_core::memory::{LendingMemory, LoanBook};
use pserver_core::optim::{NOT_ROW_WISE, Rule};
use pserver_core::partition::{Buckets, Catalogue, CataloguePage, Declaration, Name, Parameter, Topology, TotalPart};
use pserver_core::port::{Outgoing, Payloads};
use pserver_core::rows::{RowMerge, RowsView, seed_of};
use pserver_core::wire::answer::{Answer, Initialised};
use pserver_core::wire::request::{Commit, Request};
use pserver_core::wire::{CatalogueRequest, Entry, FinishMessage, Frame, Head, InitMessage, JoinRequest, Joined, Kind};

use super::bucketize::{BucketedRows, Bucketizer};
use super::call::CallNumber;
use super::client_lock::ClientGuard;
use super::control::{answer, unexpected};
use super::job::{CatalogueDraft, InitPhase, JoinedJob};
use super::{Client, ClientState, Extent};

/// A page of the catalogue leaves room in its frame for the message around it.
const PAGE_BYTES_MAX: u32 = FRAME_CONTROL_BYTES_MAX / 2;

impl Client {
    /// Offers to initialise the parameters. True: this trainer was chosen and declares them. False: they are there now,
    /// as another has declared them, or this client knew already.
    ///
    /// Of an initialised job another constant learning rate takes effect: gradients of this client bring it.
    ///
    /// # Errors
    /// When the settings are wrong or contradict those of the job, or nobody has initialised before the deadline.
    pub fn begin_init(&self, settings: &OptimizerSettings) -> Result<bool, Failure> {
        let mut state = self.lock()?;
        state.joined()?;
        // Settings are checked before a trainer is elected.
        let draft = state.draft(settings)?;
        if state.ready_job().is_ready() {
            return state.follow_settings(settings).map(|()| false);
        }
        let generation = match state.begin(true)? {
            Answer::Granted(generation) => Generation(generation),
            Answer::Initialised(done) => {
                state.fetch(done)?;
                return state.follow_settings(settings).map(|()| false);
            }
            other => return Err(unexpected(&other)),
        };
        state.engine.identify(|identity| identity.generation = generation);
        state.engine.hold_lease(true);
        state.ready_job().phase = InitPhase::Initialising(Box::new(draft));
        Ok(true)
    }

    /// Declares a parameter and sends its initial value. An empty shape means one dimension. One number for a part of
    /// the total of a table stands for those of all its buckets.
    ///
    /// # Errors
    /// When this trainer was not chosen, when something about the parameter is wrong, or when the initialisation
    /// was taken from this trainer; after the last, it begins anew with [`Client::begin_init`].
    pub fn init_param(
        &self,
        name: &str,
        element_type: ElementType,
        shape: &[u64],
        content: &[u8],
        settings: &OptimizerSettings,
    ) -> Result<(), Failure> {
        let _memory = self.hold([Extent::of(content)]);
        let mut state = self.lock()?;
        let count = match settings.total_part {
            Some(part) if content.len() == TotalPart::NUMBER_BYTES as usize => {
                state.drafting()?.catalogue.numbers_of_part(part)
            }
            _ => 1,
        };
        let numbers;
        let (shape, content) = if count > 1 {
            numbers = content.repeat(usize::try_from(count).unwrap_or(usize::MAX));
            (&[][..], numbers.as_slice())
        } else {
            (shape, content)
        };
        let declaration = state.declaration(name, element_type, shape, content, settings)?;
        state.init_param(declaration, content)
    }

    /// Everything is declared: the other trainers may go on.
    ///
    /// # Errors
    /// As [`Client::init_param`].
    pub fn finish_init(&self) -> Result<(), Failure> {
        self.lock()?.finish_init()
    }

    /// Gives up the initialisation that this trainer was chosen for, and what was declared: another trainer that offers
    /// to initialise is chosen at once. It has no effect on a trainer that was not elected.
    ///
    /// # Errors
    /// When the coordinator does not answer before the deadline; another is then chosen when the lease has lapsed.
    pub fn give_up_init(&self) -> Result<(), Failure> {
        let mut state = self.lock()?;
        if state.drafting().is_err() {
            return Ok(());
        }
        state.engine.hold_lease(false);
        state.ready_job().phase = InitPhase::Joined;
        state.control(Request::Resign(true), "giving up the initialisation").map(drop)
    }
}

impl ClientGuard<'_> {
    /// Joins the job when that has not happened.
    pub(super) fn joined(&mut self) -> Result<&mut JoinedJob, Failure> {
        self.check_cancelled()?;
        self.wait_for_cancelled();
        while self.job.is_none() {
            let call = match self.joining.filter(|call| !self.is_cancelled(*call)) {
                Some(call) => call,
                None => self.begin_to_join(),
            };
            self.wait_over(call);
            // Of several threads the first to come back takes the answer in, for all.
            if self.joining == Some(call) {
                self.joining = None;
                let joined = self.take_answer(call)?;
                match answer(&joined)? {
                    Answer::Joined(joined) => self.job = Some(self.enter_job(joined)?),
                    other => return Err(unexpected(&other)),
                }
            } else if let Some(ended) = self.take(call) {
                // It was cancelled, and a thread that began later asks anew.
                ended?;
            }
            self.check_cancelled()?;
        }
        Ok(self.ready_job())
    }

    fn begin_to_join(&mut self) -> CallNumber {
        let request = if self.options.is_reader {
            Request::Observe(true)
        } else {
            Request::Join(JoinRequest { trainer: self.options.trainer, incarnation: 0 })
        };
        let (lane, frame) = self.engine.question(request);
        let times = (self.until, self.options.deadline);
        let call = self.question("joining the job", times, vec![(lane, frame, RequestBody::default())]);
        self.joining = Some(call);
        call
    }

    /// Waits until the parameters are initialised, and knows the catalogue from then on.
    pub(super) fn ready(&mut self) -> Result<&mut JoinedJob, Failure> {
        match &self.joined()?.phase {
            InitPhase::Ready(_) => {}
            InitPhase::Initialising(_) | InitPhase::Finishing => {
                return Err(Failure::ended(
                    CallEnd::NotInitialised,
                    "the parameters are not initialised yet: this trainer was elected and has not finished",
                ));
            }
            InitPhase::Joined => match self.begin(false)? {
                Answer::Initialised(done) => self.fetch(done)?,
                other => return Err(unexpected(&other)),
            },
        }
        Ok(self.ready_job())
    }

    fn begin(&mut self, offers: bool) -> Result<Answer, Failure> {
        answer(&self.control(Request::Begin(offers), "waiting until the parameters are initialised")?)
    }

    /// Fetches the catalogue that was committed.
    fn fetch(&mut self, done: Initialised) -> Result<(), Failure> {
        let mut pages = Vec::new();
        for page in 0..done.pages {
            let request = Request::Catalogue(CatalogueRequest { page });
            let Answer::Page(bytes) = answer(&self.control(request, "fetching the catalogue")?)? else {
                return Err(Failure::call("the coordinator's answer is not a catalogue page"));
            };
            let decoded = CataloguePage::decode(bytes.as_slice());
            pages.push(decoded.map_err(|error| Failure::call(format!("catalogue page {page}: {error}")))?);
        }
        let catalogue = Catalogue::from_pages(pages)?;
        if self.ready_job().is_ready() {
            // Another thread was first, and may have calls on their way.
            return Ok(());
        }
        self.engine.hold_lease(false);
        self.engine.identify(|identity| identity.generation = Generation(done.generation));
        let job = self.ready_job();
        job.settings = done.job.unwrap_or(job.settings);
        job.initial_config = done.default_config;
        job.is_initialised(catalogue, None);
        done.rate.map_or(Ok(()), |rate| self.take_default_rate(rate))
    }

    fn init_param(&mut self, declaration: Declaration, content: &[u8]) -> Result<(), Failure> {
        let what = format!("initialising parameter \"{}\"", declaration.name.as_str());
        let generation = self.engine.identity().generation;
        let index = self.drafting()?.catalogue.declare(declaration)?;
        let job = self.ready_job();
        let InitPhase::Initialising(draft) = &job.phase else { unreachable!("the draft was just used") };
        let parameter = draft.catalogue.parameter(index).expect("it was just declared");
        let layout = row_layout(parameter.declaration())?;
        let ids: Vec<u64> = (0..).take(layout.map_or(0, |layout| content.len() / layout.row_bytes())).collect();
        let given =
            layout.map(|layout| RowsView::new(layout, &ids, content).map(|rows| (layout, [rows]))).transpose()?;
        let (mut merge, bytes_max) = (RowMerge::default(), job.chunk_bytes());
        let bucketed = match &given {
            Some((layout, rows)) => {
                let buckets = parameter.declaration().buckets.expect("a parameter of rows has buckets");
                Some(Bucketizer { buckets, bytes_max }.bucketize(*layout, rows, &mut merge)?)
            }
            None => None,
        };
        let mut memory = LendingMemory::new(vec![0; bucketed.as_ref().map_or(0, BucketedRows::bytes)]);
        let done = self.lend(|state, book| {
            let job = state.ready_job();
            let InitPhase::Initialising(draft) = &job.phase else { unreachable!("the draft was just used") };
            let parameter = draft.catalogue.parameter(index).expect("it was just declared");
            let frames = match &bucketed {
                Some(rows) => init_rows_frames(job, parameter, rows, &mut memory),
                None => init_frames(job, parameter, content, book),
            };
            let with_body = |(lane, frame, payload)| (lane, frame, RequestBody { payload, ..RequestBody::default() });
            state.ask_all(frames.into_iter().map(with_body).collect(), &what)
        });
        self.moved.count(u64::try_from(content.len()).unwrap_or(u64::MAX), 0);
        done.map_err(|failure| self.initialisation_failed(generation, failure))
    }

    fn finish_init(&mut self) -> Result<(), Failure> {
        // After training it would be too late to hear that the model cannot be saved. Nothing was sent: what is missing
        // may still be declared.
        check_savable(self.drafting()?.catalogue.iter().map(Parameter::declaration))?;
        let generation = self.engine.identity().generation;
        let InitPhase::Initialising(draft) = std::mem::replace(&mut self.ready_job().phase, InitPhase::Finishing)
        else {
            unreachable!("the draft was just used");
        };
        let finished = self.finish_shards(&draft).and_then(|()| self.commit(generation, &draft));
        if let Err(failure) = finished {
            return Err(self.initialisation_failed(generation, failure));
        }
        self.engine.hold_lease(false);
        if let Some(text) = draft.describe_integers() {
            tracing::warn!("{text}");
        }
        let job = self.ready_job();
        job.settings = draft.settings;
        job.initial_config = draft.default_config;
        job.is_initialised(draft.catalogue, Some(Round(0)));
        Ok(())
    }

    fn finish_shards(&mut self, draft: &CatalogueDraft) -> Result<(), Failure> {
        let mut counts: BTreeMap<ShardId, u64> = BTreeMap::new();
        for parameter in draft.catalogue.iter() {
            for (chunk, _) in parameter.chunks() {
                *counts.entry(parameter.shard_of(chunk)).or_default() += 1;
            }
        }
        let finish = |(place, lane)| {
            let chunks = counts.get(&place).copied().unwrap_or(0);
            let message = FinishMessage { chunks, job: Some(draft.settings) };
            (lane, Frame::with_control(Head::new(Kind::Finish), &message), RequestBody::default())
        };
        let frames = self.ready_job().lanes().map(finish).collect();
        self.ask_all(frames, "finishing the initialisation")
    }

    fn commit(&mut self, generation: Generation, draft: &CatalogueDraft) -> Result<(), Failure> {
        let pages = draft.catalogue.pages(PAGE_BYTES_MAX);
        for (number, page) in pages.iter().enumerate() {
            let last = number + 1 == pages.len();
            let job = last.then_some(draft.settings);
            let default_config = if last { draft.default_config.clone() } else { Vec::new() };
            let commit = Commit { generation: generation.0, page: page.encode_to_vec(), last, job, default_config };
            self.control(Request::Commit(commit), "committing the catalogue")?;
        }
        Ok(())
    }

    /// Voids the declarations of a generation. The trainer may begin anew.
    fn initialisation_failed(&mut self, generation: Generation, failure: Failure) -> Failure {
        if self.engine.identity().generation == generation {
            self.engine.hold_lease(false);
            let job = self.ready_job();
            if !job.is_ready() {
                job.phase = InitPhase::Joined;
            }
        }
        failure
    }
}

impl ClientState {
    fn enter_job(&mut self, joined: Joined) -> Result<JoinedJob, Failure> {
        self.engine.identify(|identity| identity.join(&joined));
        JoinedJob::new(joined, &mut self.engine)
    }

    /// The beginning of a catalogue under the settings of the job and what the initialiser says.
    fn draft(&mut self, settings: &OptimizerSettings) -> Result<CatalogueDraft, Failure> {
        if settings.sparse.is_some() {
            return Err(Failure::call(
                "sparse is a setting of one parameter; expected it with init_param, not for all",
            ));
        }
        let of_one = [
            ("home", settings.owner.is_some()),
            ("sender", settings.sender.is_some()),
            ("total_part", settings.total_part.is_some()),
            ("backup_trainers", 0 < settings.backup_trainers),
        ];
        if let Some((setting, _)) = of_one.into_iter().find(|(_, is_given)| *is_given) {
            return Err(Failure::call(format!(
                "{setting} is a setting of one parameter; expected it with init_param, not for all"
            )));
        }
        let job = self.job.as_mut().expect("the job was joined");
        let mut message = job.settings;
        if !job.is_ready() {
            let decided = (job.operator.has_mode, job.operator.has_merge);
            job.check_sharing(settings, decided)?;
        }
        if let Some(mode) = settings.mode {
            (message.mode, message.staleness) = mode.numbers();
        }
        if let Some(merge) = settings.merge {
            message.merge = merge.number();
        }
        let default_config = match &settings.rule {
            Some(rule) => ParameterConfig::of(rule.clone()).encode(),
            None => job.default_config.clone(),
        };
        let catalogue = Catalogue::new(job.topology.clone(), message.chunk_bytes)?;
        let is_config_given = settings.rule.is_some();
        Ok(CatalogueDraft { catalogue, settings: message, default_config, is_config_given })
    }

    fn drafting(&mut self) -> Result<&mut CatalogueDraft, Failure> {
        match self.job.as_mut().map(|job| &mut job.phase) {
            Some(InitPhase::Initialising(draft)) => Ok(draft),
            Some(InitPhase::Ready(_)) => Err(Failure::call("the parameters are initialised already")),
            Some(InitPhase::Finishing) => Err(Failure::call("another call finishes the initialisation")),
            _ => Err(Failure::call("this trainer was not elected to initialise; expected begin_init_params first")),
        }
    }

    fn declaration(
        &mut self,
        name: &str,
        element_type: ElementType,
        shape: &[u64],
        content: &[u8],
        settings: &OptimizerSettings,
    ) -> Result<Declaration, Failure> {
        let draft = self.drafting()?;
        let named = |failure: Failure| Failure::call(format!("parameter \"{name}\": {failure}"));
        let rule = match &settings.rule {
            Some(rule) => rule.clone(),
            None => default_rule(&draft.default_config, element_type)?,
        };
        let config = ParameterConfig { rule, sparse: None, backup_trainers: settings.backup_trainers };
        config.rule.validate_for(element_type).map_err(named)?;
        let dense = Declaration {
            name: Name::new(name.as_bytes())?,
            element_type,
            bytes: u64::try_from(content.len()).unwrap_or(u64::MAX),
            shape: shape.to_vec(),
            whole: !config.rule.is_element_wise() || settings.hosted.is_some(),
            config: config.encode(),
            buckets: None,
            owner: settings.owner,
            sender: settings.sender,
            total_part: settings.total_part,
            hosted: settings.hosted,
        };
        let Some(mut sparse) = settings.sparse else { return Ok(dense) };
        if sparse.initializer.is_random() {
            // Tables with one seed have equal rows.
            sparse.seed.get_or_insert_with(|| seed_of(name));
        }
        let declared = sparse_declaration(dense, draft.catalogue.topology(), config, sparse);
        declared.and_then(|declared| check_content(declared, content)).map_err(named)
    }
}

impl CatalogueDraft {
    /// Names the integer parameters, for which the optimizer given with begin has no effect.
    pub(super) fn describe_integers(&self) -> Option<String> {
        if !self.is_config_given {
            return None;
        }
        let integers = self.catalogue.iter().map(Parameter::declaration).filter(|one| !one.element_type.is_float());
        let names: Vec<String> = integers.map(|one| format!("\"{}\"", one.name.as_str())).collect();
        (!names.is_empty()).then(|| {
            format!(
                "parameter {}: the optimizer and the learning rate given with begin have no effect, as gradients of \
                 integers are added",
                names.join(", ")
            )
        })
    }
}

/// The frames that bring one parameter to its shards: chunks of one shard share frames up to a chunk's length.
fn init_frames<'env>(
    job: &JoinedJob,
    parameter: &Parameter,
    content: &'env [u8],
    book: &LoanBook<'env>,
) -> Vec<(LaneId, Frame, Payloads)> {
    let message = InitMessage::from(parameter);
    let element_type = parameter.declaration().element_type;
    let mut frames = Vec::new();
    let mut rest = content;
    for (chunk, span) in parameter.chunks() {
        let (bytes, after) = rest.split_at(span.bytes as usize);
        rest = after;
        let id = ChunkId { parameter: parameter.index(), chunk };
        let entry = Entry::with_payload(id, Round(0), element_type, bytes);
        let mut frame = Frame::with_control(Head::new(Kind::Init), &message);
        frame.entries.push(entry);
        frames.push((job.lane(parameter.shard_of(chunk)), frame, [Outgoing::Loan(book.read(bytes))].into()));
    }
    frames
}

/// The frames that make the buckets of a parameter, with what rows there are: those of one shard share frames.
fn init_rows_frames(
    job: &JoinedJob,
    parameter: &Parameter,
    rows: &BucketedRows<'_>,
    memory: &mut LendingMemory,
) -> Vec<(LaneId, Frame, Payloads)> {
    let message = InitMessage::from(parameter);
    let mut frames: Vec<(LaneId, Frame, Payloads)> = Vec::new();
    for (bucket, part) in rows.parts(memory) {
        let lane = job.lane(parameter.shard_of(bucket));
        let id = ChunkId { parameter: parameter.index(), chunk: bucket };
        let entry = Entry::with_payload(id, Round(0), rows.element_type(), part.bytes());
        let fits = |frame: &Frame| {
            let bytes = frame.payload_bytes() + u64::from(entry.bytes);
            frame.entries.len() < FRAME_ENTRIES_MAX as usize && bytes <= job.chunk_bytes().into()
        };
        let open = frames.iter().rposition(|(one, _, _)| *one == lane).filter(|at| fits(&frames[*at].1));
        let at = open.unwrap_or_else(|| {
            frames.push((lane, Frame::with_control(Head::new(Kind::Init), &message), Payloads::new()));
            frames.len() - 1
        });
        frames[at].1.entries.push(entry);
        frames[at].2.extend((!part.is_empty()).then_some(Outgoing::Loan(part)));
    }
    frames
}

/// The declaration of a parameter that is updated by rows, from that of a dense one. Height and width are in the shape
/// or in the configuration.
fn sparse_declaration(
    dense: Declaration,
    topology: &Topology,
    config: ParameterConfig,
    sparse: SparseSettings,
) -> Result<Declaration, Failure> {
    let (shape, element_type) = (dense.shape.as_slice(), dense.element_type);
    let refused = |text: String| Err(Failure::call(text));
    let said = (sparse.height.unwrap_or(0), sparse.width.map_or(0, u64::from));
    let (height, width) = match *shape {
        [] => said,
        [height, width] => (height, width),
        _ => return refused(format!("shape {shape:?} of a sparse parameter; expected height and width")),
    };
    if width == 0 {
        return refused("sparse: neither width nor a shape is given; expected one of them".to_owned());
    }
    if said.1 > 0 && said != (height, width) {
        return refused(format!("shape {shape:?}; its configuration says height {} and width {}", said.0, said.1));
    }
    let rows = match (sparse.rows, height) {
        (None, 0) => return refused("sparse: neither rows nor height is given; expected one of them".to_owned()),
        (Some(rows), height) if height > 0 => rows.min(height),
        (rows, height) => rows.unwrap_or(height),
    };
    if !config.rule.is_row_wise() {
        return refused(NOT_ROW_WISE.to_owned());
    }
    sparse.initializer.validate_for(element_type)?;
    let buckets = Buckets { rows, count: sparse.buckets.unwrap_or_else(|| Buckets::suiting(topology)) };
    let bytes = rows.checked_mul(width).and_then(|elements| elements.checked_mul(element_type.bytes()));
    Ok(Declaration {
        bytes: bytes.unwrap_or(u64::MAX),
        shape: vec![height, width],
        whole: false,
        config: ParameterConfig { sparse: Some(sparse), ..config }.encode(),
        buckets: Some(buckets),
        ..dense
    })
}

/// A sparse parameter begins with no content, or with a whole matrix of it.
fn check_content(declared: Declaration, content: &[u8]) -> Result<Declaration, Failure> {
    row_layout(&declared)?;
    let whole = declared.shape.iter().try_fold(declared.element_type.bytes(), |bytes, one| bytes.checked_mul(*one));
    if content.is_empty() || u64::try_from(content.len()).ok() == whole.filter(|whole| *whole <= declared.bytes) {
        return Ok(declared);
    }
    Err(Failure::call(format!(
        "{} bytes of initial value; expected none, or {} bytes when all of its rows may come to be",
        content.len(),
        whole.unwrap_or(u64::MAX)
    )))
}

/// The configuration of a parameter of which nobody said anything; integers can only be added to.
fn default_rule(config: &[u8], element_type: ElementType) -> Result<Rule, Failure> {
    if !element_type.is_float() {
        return Ok(Rule { algorithm: pserver_core::optim::Algorithm::Add, ..Rule::default() });
    }
    Ok(ParameterConfig::decode(config)?.rule)
}
