//! Model parallelism: the columns of one weight over all trainers.
//!
//! ```text
//! y = x w            trainer 0 has the program, with a share of the columns; the others have the other shares.
//!
//! trainer 0                                  trainer i
//! send(x)                                    x = recv
//! y0 = x w0                                  yi = x wi;  send(yi)
//! y = concat(y0, y1 = recv, ...)
//! ...
//! dy0, dy1, ... = split(dy);  send(dyi)      dyi = recv
//! dw0 = x' dy0                               dwi = x' dyi
//! dx = dy0 w0' + (dx1 = recv) + ...          dxi = dyi wi';  send(dxi)
//! update(w0, dw0)                            update(wi, dwi)
//! ```
//!
//! Trainers send each other everything through queues of one item on servers. No item is sent before all readers have
//! the previous one: a trainer begins a step when it has received everything of the step before; trainer 0 sends an `x`
//! when it has every `yi` of the step before, so every trainer has the `x` before; the others send a `yi` or `dxi` when
//! they have the step's `x`, so trainer 0 has ended the step before; and trainer 0 sends a `dyi` when it has the step's
//! `yi`, so trainer `i` has.
//!
//! The gradients of the shares are not sent. Every column of `y` and `dw` has the bits of the undivided program; `dx`
//! is a sum of sums over some columns each, and is rounded differently.

use std::collections::BTreeMap;

use crate::graph::Graph;
use crate::op::{Op, OpKind, OpRole, ProgramPeer};
use crate::variable::{Dim, Purpose, Variable, VariableFacts};
use pserver_core::error::Failure;
use pserver_core::limits::{SERVERS_MAX, TRAINERS_MAX};

use super::Transpiler;
use super::cost::CostModel;
use super::group::{Groups, OpGroup};
use super::outline::{Outline, ops, variable};
use super::part::{Cluster, ProgramPart};
use super::queues::{self, QueueRoute};
use super::write::{BlockWriter, UsedNames, part};

/// Cuts the weight of one layer, the largest that can be cut, by columns over the trainers. Its rule must be
/// element-wise, and servers only hold queues. One `matmul` must read it as its right operand, and no other op but that
/// op's gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Columns;

/// The weight that [`Columns`] cuts, and what trainers have of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ColumnShares {
    /// The parameter's name in the whole program.
    pub parameter: String,
    /// By trainer: the name of its columns, `[rows, its columns]`, in the order of columns.
    pub names: Vec<String>,
}

impl Columns {
    /// The shares that [`transpile`](Transpiler::transpile) gives the trainers of this cluster.
    ///
    /// # Errors
    /// As [`transpile`](Transpiler::transpile).
    pub fn shares(graph: &Graph, cluster: Cluster) -> Result<ColumnShares, Failure> {
        Self::check(cluster)?;
        let groups = Groups::find(&Outline::of(graph))?;
        let layer = Layer::find(graph, &groups, cluster.trainers)?;
        let shares = Shares::new(graph, &layer, cluster);
        let names = shares.names.iter().map(|names| names[layer.weight].clone()).collect();
        Ok(ColumnShares { parameter: layer.weight.to_owned(), names })
    }

    fn check(Cluster { trainers, servers }: Cluster) -> Result<(), Failure> {
        if !(2..=TRAINERS_MAX).contains(&trainers) {
            return Err(Failure::call(format!(
                "{trainers} trainers to cut columns over; expected 2 to {TRAINERS_MAX}"
            )));
        }
        if !(1..=u32::from(SERVERS_MAX)).contains(&servers) {
            return Err(Failure::call(format!(
                "{servers} servers for queues between trainers; expected 1 to {SERVERS_MAX}"
            )));
        }
        Ok(())
    }
}

impl Transpiler for Columns {
    fn transpile(&self, graph: &Graph, cluster: Cluster, costs: &CostModel) -> Result<Vec<ProgramPart>, Failure> {
        costs.validate()?;
        Self::check(cluster)?;
        let Cluster { trainers, servers } = cluster;
        let groups = Groups::find(&Outline::of(graph))?;
        let layer = Layer::find(graph, &groups, trainers)?;
        let shares = Shares::new(graph, &layer, cluster);
        let first = part(graph, vec![ProgramPeer::Trainer(0)], vec![shares.first()])?;
        let others =
            (1..trainers).map(|number| part(graph, vec![ProgramPeer::Trainer(number)], vec![shares.other(number)]));
        let blocks = |number| queues::blocks(&shares.queues, number);
        let queues = (0..servers).map(|number| part(graph, vec![ProgramPeer::Server(number)], blocks(number)));
        std::iter::once(Ok(first)).chain(others).chain(queues).collect()
    }
}

/// A layer that can be cut.
struct Layer<'a> {
    group: &'a OpGroup,
    weight: &'a str,
    columns: u64,
    elements: u64,
    /// `y = x w`
    forward: usize,
    /// `dx = dy w'`, when the program needs it.
    back: Option<usize>,
    /// `dw = x' dy`
    gradient: usize,
}

impl<'a> Layer<'a> {
    /// The layer with the largest weight; the first of equal ones.
    fn find(graph: &'a Graph, groups: &'a Groups<'_>, trainers: u32) -> Result<Self, Failure> {
        let all = groups.all.iter().filter_map(|group| Self::of(graph, group));
        let wide = all.filter(|layer| layer.columns >= u64::from(trainers));
        wide.reduce(|best, next| if next.elements > best.elements { next } else { best }).ok_or_else(|| {
            Failure::call(format!(
                "found no weight that can be cut into {trainers} shares of columns; expected one with an element-wise \
                 rule that a single matmul reads, as its right operand"
            ))
        })
    }

    fn of(graph: &'a Graph, group: &'a OpGroup) -> Option<Self> {
        group.rows?;
        let [gradient_name] = &group.arrivals[..] else { return None };
        let mut parameters = group.kept.iter().filter(|name| variable(graph, name).1 == Purpose::Parameter);
        let weight = parameters.next().filter(|_| parameters.next().is_none())?;
        let VariableFacts::Dense { shape, .. } = variable(graph, weight).0 else { return None };
        let [Dim::Fixed(rows), Dim::Fixed(columns)] = shape[..] else { return None };
        if !matches!(variable(graph, gradient_name).0, VariableFacts::Dense { shape: found, .. } if found == shape) {
            return None;
        }
        let readers = |name: &str, role: OpRole| -> Vec<usize> {
            let reads = |op: &Op| op.role == role && op.inputs.iter().any(|input| input == name);
            ops(graph).filter(|(_, op)| reads(op)).map(|(place, _)| place).collect()
        };
        let by_trainers = |name: &str| [readers(name, OpRole::Forward), readers(name, OpRole::Backward)];
        let [forward, back] = by_trainers(weight);
        let ([forward], true) = (&forward[..], back.len() < 2) else { return None };
        let is_written = |op: &Op| op.outputs.contains(gradient_name);
        let gradient = ops(graph).find(|(_, op)| is_written(op)).map(|(place, _)| place)?;
        if by_trainers(gradient_name).iter().any(|readers| !readers.is_empty()) {
            return None;
        }
        let back = back.first().copied();
        let elements = rows.saturating_mul(columns);
        let layer = Self { group, weight, columns, elements, forward: *forward, back, gradient };
        layer.is_as_drawn(graph).then_some(layer)
    }

    /// Whether the three products are those at the head of this file.
    fn is_as_drawn(&self, graph: &Graph) -> bool {
        let op = |place: usize| &graph.program().blocks[0].ops[place];
        let (forward, gradient) = (op(self.forward), op(self.gradient));
        let is_right = |op: &Op, transposed: bool| match op.kind {
            OpKind::Matmul { transpose_right, .. } => transpose_right == transposed,
            _ => false,
        };
        let back = self.back.map(op);
        is_right(forward, false)
            && forward.inputs[1] == self.weight
            && forward.inputs[0] != self.weight
            && is_right(gradient, false)
            && gradient.inputs[0] == forward.inputs[0]
            && back.is_none_or(|back| {
                let is_left = matches!(back.kind, OpKind::Matmul { transpose_left: false, .. });
                is_left && is_right(back, true) && back.inputs == [gradient.inputs[1].as_str(), self.weight]
            })
    }
}

/// The layer's shares and their names.
struct Shares<'a> {
    graph: &'a Graph,
    layer: &'a Layer<'a>,
    lengths: Vec<u64>,
    /// For every share the names of the cut variables.
    names: Vec<BTreeMap<&'a str, String>>,
    /// The name of the uncut variable that a share's columns are filled from.
    wholes: BTreeMap<&'a str, String>,
    /// The queues between trainers.
    queues: Vec<QueueRoute>,
}

impl<'a> Shares<'a> {
    fn new(graph: &'a Graph, layer: &'a Layer<'a>, cluster: Cluster) -> Self {
        let Cluster { trainers, servers } = cluster;
        let (least, more) = (layer.columns / u64::from(trainers), layer.columns % u64::from(trainers));
        let lengths = (0..u64::from(trainers)).map(|share| least + u64::from(share < more)).collect();
        let mut names = UsedNames::of(graph);
        let mut shares = Self { graph, layer, lengths, names: Vec::new(), wholes: BTreeMap::new(), queues: Vec::new() };
        let cut = shares.cut();
        for number in 0..trainers {
            let of_share = cut.iter().map(|name| (*name, names.fresh(format!("{name}@columns{number}"))));
            shares.names.push(of_share.collect());
        }
        let kept = layer.group.kept.iter().map(String::as_str);
        shares.wholes = kept.map(|name| (name, names.fresh(format!("{name}@whole")))).collect();
        shares.queues = queues::routes(shares.sent(), servers, &mut names);
        shares
    }

    /// The variables that trainers send, with their readers: `x`, and for every other share `y`, `dy` and `dx`.
    fn sent(&self) -> Vec<(String, VariableFacts, Vec<ProgramPeer>)> {
        let forward = self.op(self.layer.forward);
        let (x, y) = (&forward.inputs[0], &forward.outputs[0]);
        let slope = &self.op(self.layer.gradient).inputs[1];
        let back = self.layer.back.map(|back| &self.op(back).outputs[0]);
        let mut sent =
            vec![(x.clone(), variable(self.graph, x).0.clone(), self.others().map(|(_, peer)| peer).collect())];
        for (share, peer) in self.others() {
            let first = ProgramPeer::Trainer(0);
            let of_share = [(Some(y), first), (Some(slope), peer), (back, first)];
            let known = of_share.into_iter().filter_map(|(name, reader)| Some((name?, reader)));
            sent.extend(
                known.map(|(name, reader)| (self.name(name, share).to_owned(), self.facts(name, share), vec![reader])),
            );
        }
        sent
    }

    /// Sends a variable to its queue.
    fn send(&self, name: &str, writer: &mut BlockWriter) {
        let queue = self.queues.iter().find(|queue| queue.channel == name);
        let server = queue.expect("what is sent has a queue").server;
        writer.send(name, name, ProgramPeer::Server(server));
    }

    /// The variables that are cut by columns.
    fn cut(&self) -> Vec<&'a str> {
        let block = &self.graph.program().blocks[0];
        let [forward, gradient] = [self.layer.forward, self.layer.gradient].map(|place| &block.ops[place]);
        let back = self.layer.back.map(|place| &block.ops[place].outputs[0]);
        let products = [&forward.outputs[0], &gradient.inputs[1]].into_iter().chain(back);
        let by_group = self.layer.group.ops.iter().map(|place| &block.ops[*place]);
        let mut cut: Vec<&str> = products.map(String::as_str).collect();
        cut.extend(by_group.flat_map(|op| op.inputs.iter().chain(&op.outputs)).map(String::as_str));
        cut.sort_unstable();
        cut.dedup();
        cut
    }

    fn op(&self, place: usize) -> &'a Op {
        &self.graph.program().blocks[0].ops[place]
    }

    fn name<'n>(&'n self, name: &'n str, share: usize) -> &'n str {
        self.names[share].get(name).map_or(name, String::as_str)
    }

    /// The facts of some columns. A partial `dx` is as wide as the whole.
    fn facts(&self, name: &str, share: usize) -> VariableFacts {
        let mut facts = variable(self.graph, name).0.clone();
        let is_partial = self.layer.back.is_some_and(|place| self.op(place).outputs[0] == name);
        if let (VariableFacts::Dense { shape, .. }, false) = (&mut facts, is_partial)
            && let [_, columns] = &mut shape[..]
        {
            *columns = Dim::Fixed(self.lengths[share]);
        }
        facts
    }

    /// An op over the variables of a share.
    fn renamed(&self, place: usize, share: usize) -> Op {
        let op = self.op(place);
        let names = |names: &[String]| names.iter().map(|name| self.name(name, share).to_owned()).collect();
        Op { kind: op.kind.clone(), inputs: names(&op.inputs), outputs: names(&op.outputs), role: op.role }
    }

    fn is_kept(&self, known: &Variable) -> bool {
        self.layer.group.kept.contains(&known.name)
    }

    /// Declares the variables of a share, and fills them: initialises the whole variable and takes the share's columns.
    fn begin(&self, share: usize, writer: &mut BlockWriter) {
        let block = &self.graph.program().blocks[0];
        for known in block.variables.iter().filter(|known| self.is_kept(known)) {
            writer.declare(self.name(&known.name, share), self.facts(&known.name, share), known.purpose);
        }
        let own = self.layer.group.kept.iter().map(String::as_str);
        for place in Outline::of(self.graph).beginnings(own) {
            self.fill(self.op(place), share, writer);
        }
    }

    fn fill(&self, op: &Op, share: usize, writer: &mut BlockWriter) {
        let (name, kind) = (op.outputs[0].as_str(), op.kind.clone());
        let facts = variable(self.graph, name).0;
        if matches!(kind, OpKind::Fill { .. }) {
            return writer.op(kind, &[], &[self.name(name, share)], op.role);
        }
        let whole = &self.wholes[name];
        writer.declare(whole, facts.clone(), Purpose::Temporary);
        writer.op(kind, &[], &[whole], op.role);
        // The other shares are cut too, and not used.
        let outputs: Vec<&str> = (0..self.lengths.len()).map(|share| self.name(name, share)).collect();
        writer.op(OpKind::Split { axis: 1, lengths: self.lengths.clone() }, &[whole], &outputs, op.role);
    }

    /// The program of trainer 0: the user's, with the layer's products replaced.
    fn first(&self) -> crate::Block {
        let mut writer = BlockWriter::default();
        let block = &self.graph.program().blocks[0];
        writer.block.variables = block.variables.iter().filter(|known| !self.is_cut(known)).cloned().collect();
        self.begin(0, &mut writer);
        let mut is_split = false;
        for (place, op) in ops(self.graph) {
            let begins =
                op.role == OpRole::Initialise && op.outputs.iter().any(|name| self.names[0].contains_key(&**name));
            if begins {
                continue;
            }
            if place == self.layer.forward {
                self.forward(&mut writer);
            } else if place == self.layer.gradient || Some(place) == self.layer.back {
                if !std::mem::replace(&mut is_split, true) {
                    self.split_slope(&mut writer);
                }
                writer.block.ops.push(self.renamed(place, 0));
                if Some(place) == self.layer.back {
                    self.gather_back(&mut writer);
                }
            } else if self.layer.group.ops.contains(&place) {
                writer.block.ops.push(self.renamed(place, 0));
            } else {
                writer.block.ops.push(op.clone());
            }
        }
        writer.block
    }

    /// Whether a declared variable exists only as columns.
    fn is_cut(&self, known: &Variable) -> bool {
        let by_group = self.layer.group.ops.iter().map(|place| self.op(*place));
        let mut touched = by_group.flat_map(|op| op.inputs.iter().chain(&op.outputs));
        touched.any(|name| *name == known.name)
    }

    fn forward(&self, writer: &mut BlockWriter) {
        let op = self.op(self.layer.forward);
        let (x, y) = (op.inputs[0].as_str(), op.outputs[0].as_str());
        self.send(x, writer);
        writer.block.ops.push(self.renamed(self.layer.forward, 0));
        self.gather(y, OpKind::Concat { axis: 1 }, op.role, writer);
    }

    fn gather_back(&self, writer: &mut BlockWriter) {
        let back = self.layer.back.map(|place| self.op(place));
        if let Some(op) = back {
            self.gather(&op.outputs[0], OpKind::Sum, op.role, writer);
        }
    }

    /// Receives the other shares' parts of a variable, and combines all of them.
    fn gather(&self, name: &str, kind: OpKind, role: OpRole, writer: &mut BlockWriter) {
        for (share, _) in self.others() {
            writer.recv(self.name(name, share), self.name(name, share), self.facts(name, share));
        }
        let all: Vec<&str> = (0..self.lengths.len()).map(|share| self.name(name, share)).collect();
        writer.op(kind, &all, &[name], role);
    }

    fn split_slope(&self, writer: &mut BlockWriter) {
        let slope = self.op(self.layer.gradient).inputs[1].as_str();
        let all: Vec<&str> = (0..self.lengths.len()).map(|share| self.name(slope, share)).collect();
        let kind = OpKind::Split { axis: 1, lengths: self.lengths.clone() };
        writer.op(kind, &[slope], &all, OpRole::Communication);
        self.others().for_each(|(share, _)| self.send(all[share], writer));
    }

    fn others(&self) -> impl Iterator<Item = (usize, ProgramPeer)> {
        (1..self.lengths.len()).zip((1..).map(ProgramPeer::Trainer))
    }

    /// The program of another trainer: only the products of its columns, and their update.
    fn other(&self, number: u32) -> crate::Block {
        let share = number as usize;
        let mut writer = BlockWriter::default();
        self.begin(share, &mut writer);
        let forward = self.op(self.layer.forward);
        let (x, y) = (forward.inputs[0].as_str(), self.name(&forward.outputs[0], share));
        writer.recv(x, x, variable(self.graph, x).0.clone());
        writer.block.ops.push(self.renamed(self.layer.forward, share));
        self.send(y, &mut writer);
        let slope = self.op(self.layer.gradient).inputs[1].as_str();
        writer.recv(self.name(slope, share), self.name(slope, share), self.facts(slope, share));
        if let Some(back) = self.layer.back {
            let dx = self.name(&self.op(back).outputs[0], share);
            writer.block.ops.push(self.renamed(back, share));
            self.send(dx, &mut writer);
        }
        writer.block.ops.push(self.renamed(self.layer.gradient, share));
        let group = self.layer.group.ops.iter();
        writer.block.ops.extend(group.map(|place| self.renamed(*place, share)));
        writer.block
    }
}
