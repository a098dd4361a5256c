//! Random programs that servers host, with kills of servers and trainers: queues, accumulators, shared states, ops of a
//! user's own, optimizers written in ops. Their values are those of plain code, to the bit.
//!
//! `PSERVER_PROGRAMS` says how many programs, and `PSERVER_KILLS` how many kills of servers each has.

use std::fmt::Write;
use std::sync::RwLock;
use std::time::Duration;

use pserver_client::DestinationSlice;
use pserver_core::wire::Address;
use pserver_program::transpile::ProgramPart;
use pserver_program::{Elements, Graph, Program, ProgramPeer, Tensor};
use pserver_trainer::{Trainer, initialise};

use crate::cluster::job::{Job, client_with, folder, reader};
use crate::cluster::process::Processes;
use crate::cluster::seeded::SeededPrng;

const STEPS: u64 = 10;
/// The time that a call waits for an absent server.
const SHORT: Duration = Duration::from_secs(2);

/// A form of a server's program, of which no flow carries out any.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    /// Gradients pass a queue and leave it some at a time, and another queue or an accumulator joins them.
    Queues { at_a_time: usize, has_accumulator: bool },
    /// An accumulator by senders, and a scale of each gradient before it.
    Rounds,
    /// Two parameters share a state that is a sum of both gradients.
    Tied,
    /// The accumulator gives once it has so many gradients, of any trainers: the order decides.
    First { count: usize },
}

/// A job: the same trainers send to each server's program.
struct Case {
    trainers: usize,
    width: usize,
    capacity: usize,
    forms: Vec<Form>,
}

impl Case {
    fn random(prng: &mut SeededPrng) -> Self {
        let trainers = [1, 2, 4][prng.below(3)];
        let servers = [1, 3][prng.below(2)];
        let at_a_time = |prng: &mut SeededPrng| [1, 2, 4][prng.below(3)].min(trainers);
        let forms = (0..servers).map(|_| match prng.below(5) {
            0 | 1 => Form::Queues { at_a_time: at_a_time(prng), has_accumulator: prng.below(2) == 0 },
            2 => Form::Rounds,
            3 => Form::Tied,
            _ => Form::First { count: 1 + prng.below(trainers) },
        });
        let forms: Vec<Form> = forms.collect();
        Self { trainers, width: 1 + prng.below(3000), capacity: trainers + prng.below(5), forms }
    }

    /// The ops of every server's loop after its gradients: momentum, written in ops.
    fn update(&self, name: &str, gradient: &str) -> String {
        format!(
            "optimize {name}_half = scale({name}_speed, factor=0.5)
            optimize {name}_speed = add({name}_half, {gradient})
            optimize {name}_move = mul({name}_speed, rate)
            optimize {name} = sub({name}, {name}_move)\n"
        )
    }

    /// The program of a server.
    fn server(&self, number: usize) -> String {
        let (form, width) = (self.forms[number], self.width);
        let names = self.names_of(number);
        // A constant of the same name on every server.
        let mut text = String::from("block 0 {\nstate rate: float64[]\n");
        for name in &names {
            writeln!(text, "parameter {name}: float64[{width}]\n state {name}_speed: float64[{width}]").expect("text");
        }
        let (declared, begin, blocks) = match form {
            Form::Queues { at_a_time, has_accumulator } => self.queues(&names[0], at_a_time, has_accumulator),
            Form::Rounds => self.rounds(&names[0], self.trainers),
            Form::First { count } => self.rounds(&names[0], count),
            Form::Tied => self.tied(&names[0], &names[1]),
        };
        text += &declared;
        for name in &names {
            writeln!(text, "initialise {name} = fill(value=1.0)\n initialise {name}_speed = fill(value=0.0)")
                .expect("text");
        }
        text += &begin;
        text += "initialise rate = fill(value=0.5)\n";
        names.iter().for_each(|name| text += &self.to_all(name));
        (1..=blocks.len()).for_each(|block| writeln!(text, "communication loop_forever(block={block})").expect("text"));
        text += "}\n";
        for (block, ops) in (1..).zip(&blocks) {
            writeln!(text, "block {block} in 0 {{\n{}}}", declared_first(ops)).expect("text");
        }
        text
    }

    fn to_all(&self, name: &str) -> String {
        let send = |trainer| format!("communication send({name}, channel=\"{name}\", to=trainer:{trainer})\n");
        (0..self.trainers).map(send).collect()
    }

    fn received(&self, name: &str, sender: &str) -> String {
        let width = self.width;
        format!(
            "temporary {name}_piece: float64[{width}]
            communication {name}_piece{sender} = recv(channel=\"{name}_g\")\n"
        )
    }

    /// Declarations, initialisation and loops.
    fn queues(&self, w: &str, at_a_time: usize, has_accumulator: bool) -> (String, String, Vec<String>) {
        let (width, trainers) = (self.width, self.trainers);
        let mut declared = format!("state {w}_q: queue(float64[{width}], {})\n", self.capacity.max(at_a_time));
        let items = |letter: &str, count: usize| -> String {
            (0..count).map(|item| format!("{w}_{letter}{item}")).collect::<Vec<_>>().join(", ")
        };
        let first = format!(
            "{} communication {w}_own = scale({w}_piece, factor=2.0)
            communication enqueue({w}_q, {w}_own)\n",
            self.received(w, "")
        );
        let some = items("i", at_a_time);
        let take = format!(
            "communication {some} = dequeue({w}_q, min_count={at_a_time})
            communication {w}_some = sum({some})\n"
        );
        let rest = trainers / at_a_time;
        let update = self.update(w, &format!("{w}_all")) + &self.to_all(w);
        if has_accumulator {
            let all = format!("communication {w}_all = gradient_accumulator({w}_some, count={rest}, merge=sum)\n");
            return (declared, String::new(), vec![first, format!("{take}{all}{update}")]);
        }
        writeln!(declared, "state {w}_r: queue(float64[{width}], {rest})").expect("text");
        let some = items("j", rest);
        let join = format!(
            "communication {some} = dequeue({w}_r, min_count={rest})
            optimize {w}_all = sum({some})\n{update}"
        );
        (declared, String::new(), vec![first, format!("{take} communication enqueue({w}_r, {w}_some)\n"), join])
    }

    fn rounds(&self, w: &str, count: usize) -> (String, String, Vec<String>) {
        let ops = format!(
            "{} communication {w}_own = scale({w}_piece, factor=2.0)
            communication {w}_all = gradient_accumulator({w}_own, {w}_sender, count={count}, merge=sum, staleness=0)
            communication {w}_senders = string_accumulator({w}_sender, count={count})
            {} communication send({w}, {w}_senders, channel=\"{w}\", to=senders)\n",
            self.received(w, &format!(", {w}_sender")),
            self.update(w, &format!("{w}_all"))
        );
        (String::new(), String::new(), vec![ops])
    }

    fn tied(&self, w: &str, v: &str) -> (String, String, Vec<String>) {
        let (width, count) = (self.width, self.trainers);
        let merged = |name: &str| {
            format!(
                "{} communication {name}_all = gradient_accumulator({name}_piece, {name}_sender, count={count}, \
                 merge=sum, staleness=0)\n",
                self.received(name, &format!(", {name}_sender"))
            )
        };
        let ops = format!(
            "{}{} communication {w}_senders = string_accumulator({w}_sender, count={count})
            optimize {w}_sum = add({w}_all, {v}_all)
            optimize {w}_both = add({w}_both, {w}_sum)
            optimize {w}_own = add({w}_all, {w}_both)
            optimize {v}_own = add({v}_all, {w}_both)
            {}{} communication send({w}, {w}_senders, channel=\"{w}\", to=senders)
            communication send({v}, {w}_senders, channel=\"{v}\", to=senders)\n",
            merged(w),
            merged(v),
            self.update(w, &format!("{w}_own")),
            self.update(v, &format!("{v}_own"))
        );
        let state = format!("state {w}_both: float64[{width}]\n");
        (state, format!("initialise {w}_both = fill(value=0.0)\n"), vec![ops])
    }

    fn names_of(&self, server: usize) -> Vec<String> {
        let letters: &[&str] = if self.forms[server] == Form::Tied { &["w", "v"] } else { &["w"] };
        letters.iter().map(|letter| format!("{letter}{server}")).collect()
    }

    fn names(&self) -> Vec<String> {
        (0..self.forms.len()).flat_map(|server| self.names_of(server)).collect()
    }

    fn trainer(&self) -> String {
        let width = self.width;
        let mut text = format!("block 0 {{\n data x: float64[{width}]\n");
        for name in self.names() {
            writeln!(text, "temporary {name}: float64[{width}]").expect("text");
        }
        for name in self.names() {
            let server = &name[1..];
            writeln!(
                text,
                "communication {name} = recv(channel=\"{name}\")
                forward {name}_h = scale({name}, factor=0.5)
                forward {name}_g = add(x, {name}_h)
                communication send({name}_g, channel=\"{name}_g\", to=server:{server})"
            )
            .expect("text");
        }
        text + "}\n"
    }

    fn parts(&self) -> Vec<ProgramPart> {
        let part = |peers, text: String| {
            let program: Program = text.parse().unwrap_or_else(|error| panic!("{error}\n{text}"));
            let graph = Graph::new(program).unwrap_or_else(|error| panic!("{error}\n{text}"));
            ProgramPart { peers, graph }
        };
        let trainers = (0..self.trainers).map(|trainer| ProgramPeer::Trainer(number(trainer))).collect();
        let servers =
            (0..self.forms.len()).map(|server| part(vec![ProgramPeer::Server(number(server))], self.server(server)));
        std::iter::once(part(trainers, self.trainer())).chain(servers).collect()
    }

    /// The values of plain code, by name; none where the order decides.
    fn expected(&self) -> Vec<(String, Option<Vec<f64>>)> {
        let mut all = Vec::new();
        for (server, form) in self.forms.iter().enumerate() {
            let names = if *form == Form::Tied { 2 } else { 1 };
            let (mut values, mut speeds) = (vec![vec![1.0; self.width]; names], vec![vec![0.0; self.width]; names]);
            let mut both = vec![0.0; self.width];
            for step in 0..STEPS {
                for at in 0..self.width {
                    let gain = if *form == Form::Tied { 1.0 } else { 2.0 };
                    let sum = |value: f64| {
                        let each = (0..self.trainers).map(|trainer| gain * (x(trainer, step, at) + value * 0.5));
                        each.sum::<f64>()
                    };
                    let mut gradients: Vec<f64> = values.iter().map(|value| sum(value[at])).collect();
                    if *form == Form::Tied {
                        both[at] += gradients[0] + gradients[1];
                        gradients.iter_mut().for_each(|gradient| *gradient += both[at]);
                    }
                    for (name, gradient) in gradients.into_iter().enumerate() {
                        speeds[name][at] = speeds[name][at] * 0.5 + gradient;
                        values[name][at] += speeds[name][at] * -0.5;
                    }
                }
            }
            let is_fixed = !matches!(form, Form::First { count } if *count < self.trainers);
            for (letter, value) in ["w", "v"].iter().zip(values) {
                all.push((format!("{letter}{server}"), is_fixed.then_some(value)));
            }
        }
        all
    }
}

/// Declarations before ops, as a block has them.
fn declared_first(ops: &str) -> String {
    let (declared, others): (Vec<&str>, Vec<&str>) =
        ops.lines().partition(|line| line.trim_start().starts_with("temporary "));
    declared.into_iter().chain(others).map(|line| format!("{line}\n")).collect()
}

fn number(place: usize) -> u32 {
    u32::try_from(place).expect("it is small")
}

/// A multiple of a sixteenth, so that all sums of a short training are exact.
fn x(trainer: usize, step: u64, at: usize) -> f64 {
    let number = (at * 7 + trainer * 5 + usize::try_from(step).expect("few") * 13) % 11;
    f64::from(number_of(number)) / 16.0 - 0.25
}

fn number_of(small: usize) -> u8 {
    u8::try_from(small).expect("it is small")
}

/// Trains until all steps are ended: a process whose call fails repeats it, or ends, and another one of its rank goes
/// on. None ends where another trainer has left: it would come again alone, and begin a run in which all are awaited.
fn train((address, rank): (&Address, usize), case: &Case, parts: &[ProgramPart], seed: u64, left: &RwLock<u32>) {
    let mut prng = SeededPrng::new(seed + rank as u64);
    let mut starts = left.read().expect("no trainer has failed");
    for _ in 0..150 {
        let client = client_with(address, number(rank), SHORT);
        if initialise(&client, parts).is_err() {
            continue;
        }
        let Ok(mut own) = Trainer::new(&client, parts) else { continue };
        drop(starts);
        loop {
            let ended = own.steps_ended().expect("the servers host programs");
            if ended == STEPS {
                let mut left = left.write().expect("no trainer has failed");
                *left += 1;
                if client.leave().is_ok() {
                    return;
                }
            }
            let data = (0..case.width).map(|at| x(rank, ended, at)).collect();
            let is_fed = own.feed("x", Tensor::new([case.width as u64], Elements::Float64(data))).is_ok();
            if rank == 0 && prng.below(4) == 0 {
                let _ = client.checkpoint();
            }
            // tidy: allow sleep: steps are spread over the time of the kills
            std::thread::sleep(Duration::from_millis(prng.below(30) as u64));
            let is_made = ended == STEPS || own.step().is_ok();
            if !is_made && !is_fed && prng.below(2) == 0 || prng.below(6) == 0 {
                let now = left.read().expect("no trainer has failed");
                if *now == 0 {
                    starts = now;
                    break;
                }
            }
        }
    }
    panic!("trainer {rank} makes no progress");
}

fn fetched(address: &Address, name: &str, width: usize) -> Vec<f64> {
    let mut found = vec![0.0_f64; width];
    let place = DestinationSlice::new(name, bytemuck::cast_slice_mut(&mut found));
    reader(address).pull(&mut [place]).expect("it is there");
    found
}

fn check(seed: u64, kills: usize) {
    let mut prng = SeededPrng::new(seed);
    let case = Case::random(&mut prng);
    println!("seed {seed}: {} trainers, {:?}, width {}", case.trainers, case.forms, case.width);
    let folder = folder();
    let servers = u16::try_from(case.forms.len()).expect("few");
    let job = Job { chunk_bytes: 4096, ..Job::new(servers, number(case.trainers)) };
    let job = job.with_checkpoints(folder.path()).with("--journal", "on");
    let mut servers = Processes::start(job);
    let (address, parts) = (servers.coordinator(), case.parts());
    let left = RwLock::new(0);
    std::thread::scope(|scope| {
        for rank in 0..case.trainers {
            let (address, case, parts, left) = (&address, &case, &parts, &left);
            scope.spawn(move || train((address, rank), case, parts, seed, left));
        }
        for _ in 0..kills {
            // tidy: allow sleep: the moment of a kill is random
            std::thread::sleep(Duration::from_millis(prng.below(100) as u64));
            let server = prng.below(case.forms.len());
            servers.kill(server);
            servers.start_again(server);
        }
    });
    let before: Vec<Vec<f64>> = case.names().iter().map(|name| fetched(&address, name, case.width)).collect();
    (0..case.forms.len()).for_each(|server| servers.kill(server));
    (0..case.forms.len()).for_each(|server| servers.start_again(server));
    for (name, before) in case.names().iter().zip(before) {
        let after = fetched(&address, name, case.width);
        assert!(before == after, "seed {seed}: {name} differs after a restart");
        let expected = case.expected().into_iter().find(|(known, _)| known == name).expect("it is known").1;
        assert!(expected.is_none_or(|expected| expected == after), "seed {seed}: {name} differs from plain code");
    }
    servers.terminate();
}

#[test]
fn random_hosted_programs_equal_plain_code_through_kills() {
    let number_of = |variable: &str, default: usize| {
        std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
    };
    let (programs, kills) = (number_of("PSERVER_PROGRAMS", 4), number_of("PSERVER_KILLS", 3));
    let mut prng = SeededPrng::of("random_hosted_programs_equal_plain_code_through_kills");
    // Trainers that wait for an item of one program, and have sent to another one in the same step.
    check(5_254_106_335_212_061_541, kills);
    (0..programs).for_each(|_| check(prng.next() >> 1, kills));
}
