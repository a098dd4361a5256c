//! Components of a server's sub-program: ops that have no variable in common with others run apart.
//!
//! A variable that only the initialisation writes is a constant, which joins nothing: each component has its own.

use std::collections::{BTreeMap, BTreeSet};

use pserver_core::error::Failure;

use crate::{Block, Graph, Op, OpKind, OpRole, Program, loop_forever};

/// A sub-program's components, in the order of their first ops after the initialisation. Each is a program of its own,
/// with the initialisation that its variables need.
///
/// # Errors
/// When a component is no program, which its limits can be the reason for.
pub fn components(graph: &Graph) -> Result<Vec<Graph>, Failure> {
    let program = graph.program();
    let ops: Vec<(usize, usize, &Op)> = ops(program).filter(|(.., op)| !is_apart(op)).collect();
    let written: BTreeSet<&str> = ops.iter().flat_map(|(.., op)| &op.outputs).map(String::as_str).collect();
    let queues: BTreeSet<&str> = ops
        .iter()
        .filter(|(.., op)| matches!(op.kind, OpKind::Enqueue | OpKind::Dequeue { .. }))
        .map(|(.., op)| op.inputs[0].as_str())
        .collect();
    // Of each op the first one that it is joined with.
    let mut root: Vec<usize> = (0..ops.len()).collect();
    let mut first_of: BTreeMap<&str, usize> = BTreeMap::new();
    for (number, (.., op)) in ops.iter().enumerate() {
        for name in op.inputs.iter().chain(&op.outputs).map(String::as_str) {
            if !written.contains(name) && !queues.contains(name) {
                continue;
            }
            let other = *first_of.entry(name).or_insert(number);
            let (one, other) = (find(&mut root, number), find(&mut root, other));
            root[one.max(other)] = one.min(other);
        }
    }
    let mut members: BTreeMap<usize, Vec<(usize, usize)>> = BTreeMap::new();
    for (number, (block, place, _)) in ops.iter().enumerate() {
        members.entry(find(&mut root, number)).or_default().push((*block, *place));
    }
    members.into_values().map(|members| graph.part(component(program, &members))).collect()
}

fn find(root: &mut [usize], mut number: usize) -> usize {
    while root[number] != number {
        root[number] = root[root[number]];
        number = root[number];
    }
    number
}

/// All ops, with their blocks and places.
fn ops(program: &Program) -> impl Iterator<Item = (usize, usize, &Op)> {
    let blocks = program.blocks.iter().enumerate();
    blocks.flat_map(|(block, held)| held.ops.iter().enumerate().map(move |(place, op)| (block, place, op)))
}

/// Whether an op is of no component by itself.
fn is_apart(op: &Op) -> bool {
    op.role == OpRole::Initialise || matches!(op.kind, OpKind::LoopForever { .. })
}

/// The program of these ops.
fn component(program: &Program, members: &[(usize, usize)]) -> Program {
    let mut names: BTreeSet<&str> = BTreeSet::new();
    for (block, place) in members {
        let op = &program.blocks[*block].ops[*place];
        names.extend(op.inputs.iter().chain(&op.outputs).map(String::as_str));
    }
    let mut first: Vec<Op> = Vec::new();
    for op in program.blocks[0].ops.iter().rev().filter(|op| op.role == OpRole::Initialise) {
        if op.outputs.iter().any(|output| names.contains(output.as_str())) {
            names.extend(op.inputs.iter().map(String::as_str));
            first.push(op.clone());
        }
    }
    first.reverse();
    let variables = |block: usize| {
        let declared = program.blocks[block].variables.iter();
        declared.filter(|one| names.contains(one.name.as_str())).cloned().collect()
    };
    let of_block = |block: usize| {
        let own = members.iter().filter(move |(of, _)| *of == block);
        own.map(move |(_, place)| program.blocks[block].ops[*place].clone())
    };
    let mut outer = Block { parent: None, variables: variables(0), ops: first };
    outer.ops.extend(of_block(0));
    let mut blocks = vec![outer];
    let used: BTreeSet<usize> = members.iter().map(|(block, _)| *block).filter(|block| *block > 0).collect();
    for block in used {
        let number = u32::try_from(blocks.len()).expect("blocks are bounded, see `limits`");
        blocks[0].ops.push(loop_forever(number));
        blocks.push(Block { parent: Some(0), variables: variables(block), ops: of_block(block).collect() });
    }
    Program { blocks }
}
