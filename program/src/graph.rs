//! Graph: the checked form of a program.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use pserver_core::error::Failure;
use pserver_core::limits::{
    NAME_BYTES_MAX, PROGRAM_BLOCKS_MAX, PROGRAM_OPERANDS_MAX, PROGRAM_OPS_MAX, PROGRAM_VARIABLES_MAX,
};
use pserver_core::optim::Prepared;

use super::block::{Block, Program};
use super::given::{GivenValues, TakenValues};
use super::infer::{self, Inferred};
use super::op::{Op, OpKind, OpRole};
use super::text::ProgramPositions;
use super::variable::{Purpose, Variable, VariableFacts};

/// Index of a variable in [`Graph::variables`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VariableIndex(pub u32);

impl VariableIndex {
    /// The index as a number.
    #[must_use]
    pub const fn place(self) -> usize {
        self.0 as usize
    }
}

/// An op whose variables are known and fit it.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// The kind and its attributes.
    pub kind: OpKind,
    /// The phase it belongs to.
    pub role: OpRole,
    /// The inputs, in the order of the kind's signature.
    pub inputs: Vec<VariableIndex>,
    /// The outputs, in the order of the kind's signature.
    pub outputs: Vec<VariableIndex>,
    /// The rule of an [`Update`](OpKind::Update), read from its configuration and lowered once; none for every other
    /// kind.
    pub rule: Option<Arc<Prepared>>,
}

/// A block of a graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Scope {
    /// The index of the enclosing block; none for block 0 only.
    pub parent: Option<u32>,
    /// Its ops, in the program's order.
    pub nodes: Vec<Node>,
}

/// A checked program: every op fits its variables. An executor runs it.
///
/// Invariants:
///
/// - Blocks form a tree with block 0 as its root, and each other block is run by exactly one op, in its parent.
/// - The facts of every variable are known, and every op's inputs and outputs fit its kind.
/// - Data is never written. A temporary is written by exactly one op, and read only by later ops of the same block or
///   of a block that a later op runs. Parameters and states may be read before and written after.
/// - A queue is touched by `enqueue` and `dequeue` only.
/// - An update writes the variables that it reads.
#[derive(Clone, Debug)]
pub struct Graph {
    program: Program,
    positions: ProgramPositions,
    variables: Vec<Variable>,
    by_name: BTreeMap<String, VariableIndex>,
    scopes: Vec<Scope>,
    given: TakenValues,
}

/// Graphs are equal if their programs are: everything else follows from these, except positions, which do not count.
impl PartialEq for Graph {
    fn eq(&self, other: &Self) -> bool {
        self.program == other.program
    }
}

impl Graph {
    /// Checks a program.
    ///
    /// The error names the block, the op by index and kind, the variable, and the facts that were found and expected.
    pub fn new(program: Program) -> Result<Self, Failure> {
        Self::located(program, ProgramPositions::default())
    }

    /// Checks a program that [`Program::read`] made of a text, also when declarations and ops were appended since.
    ///
    /// ```
    /// use pserver_program::{Graph, Program};
    ///
    /// let (program, positions) = Program::read("block 0 {\n    forward y = relu(x)\n}", Some("net.program"))?;
    /// let refused = Graph::located(program, positions).expect_err("x is not declared").to_string();
    /// assert!(refused.starts_with("net.program:2:5: block 0, op 0 relu: found no variable \"x\""));
    /// # Ok::<(), pserver_core::error::Failure>(())
    /// ```
    ///
    /// # Errors
    /// As [`new`](Self::new), after the position: `FILE:LINE:COLUMN: block 0, op 2 matmul: ...`, or `line LINE, column
    /// COLUMN: ...` without a file's name.
    pub fn located(program: Program, positions: ProgramPositions) -> Result<Self, Failure> {
        check_size(&program, &positions)?;
        let mut checker = Checker { positions, ..Checker::default() };
        for (index, block) in program.blocks.iter().enumerate() {
            checker.declare(index, block)?;
        }
        checker.scope(&program, 0)?;
        if let Some(block) = checker.scopes.iter().position(Option::is_none) {
            let block = checker.positions.block(block);
            return Err(Failure::call(format!("{block}: found no op that runs it; expected one in its parent")));
        }
        let Checker { variables, by_name, scopes, positions } = checker;
        let variables = variables.into_iter().map(|known| known.variable).collect();
        let (scopes, given) = (scopes.into_iter().flatten().collect(), TakenValues::default());
        Ok(Self { variables, by_name, scopes, program, positions, given })
    }

    /// Takes the values of ops `given`, for this graph and the parts that it is divided into. They are read when such
    /// an op runs.
    ///
    /// ```
    /// use std::collections::BTreeMap;
    /// use std::sync::Arc;
    /// use pserver_program::{Elements, Graph, Program, Tensor};
    ///
    /// let text = "block 0 { parameter w: float32[2] initialise w = given(name=\"weights\") }";
    /// let values = |length: u64, floats| {
    ///     Arc::new(BTreeMap::from([("weights".to_owned(), Tensor::new([length], Elements::Float32(floats)))]))
    /// };
    /// let graph = || Graph::new(text.parse::<Program>()?);
    /// assert!(graph()?.with_values(values(2, vec![0.5, 1.0])).is_ok());
    /// let refused = graph()?.with_values(values(1, vec![0.5])).expect_err("it is too short").to_string();
    /// assert_eq!(refused, "block 0, op 0 given: value \"weights\" is float32[1]; expected float32[2]");
    /// # Ok::<(), pserver_core::error::Failure>(())
    /// ```
    ///
    /// # Errors
    /// Names the op, the value, its type and shape, and those that were expected, unless each op has its value.
    pub fn with_values(mut self, values: Arc<dyn GivenValues>) -> Result<Self, Failure> {
        self.given = TakenValues(Some(values));
        for (block, scope) in self.scopes.iter().enumerate() {
            for (place, node) in scope.nodes.iter().enumerate() {
                if let OpKind::Given { name, first } = &node.kind {
                    let checked = self.given.check(name, *first, &self.variable(node.outputs[0]).facts);
                    checked.map_err(|reason| Failure::call(format!("{}: {reason}", self.label(block, place))))?;
                }
            }
        }
        Ok(self)
    }

    /// The names of the values that ops `given` take.
    pub fn given_names(&self) -> impl Iterator<Item = &str> {
        let nodes = self.scopes.iter().flat_map(|scope| &scope.nodes);
        nodes.filter_map(|node| if let OpKind::Given { name, .. } = &node.kind { Some(name.as_str()) } else { None })
    }

    /// Checks a program that was made of this one, and gives it the same values.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn part(&self, program: Program) -> Result<Self, Failure> {
        Ok(Self { given: self.given.clone(), ..Self::new(program)? })
    }

    /// The values of ops `given`.
    pub(crate) const fn given(&self) -> &TakenValues {
        &self.given
    }

    /// Refuses a program that trains a parameter without giving it a first value.
    ///
    /// # Errors
    /// [`Failure::Call`] with the position and the name of the first parameter that no op of the role
    /// [`Initialise`](OpRole::Initialise) writes.
    pub fn check_initialised(&self) -> Result<(), Failure> {
        let ops = self.program.blocks.iter().flat_map(|block| &block.ops);
        let initialise = ops.filter(|op| op.role == OpRole::Initialise);
        let begun: BTreeSet<&str> = initialise.flat_map(|op| &op.outputs).map(String::as_str).collect();
        for (index, block) in self.program.blocks.iter().enumerate() {
            for (place, Variable { name, purpose, .. }) in block.variables.iter().enumerate() {
                if *purpose == Purpose::Parameter && !begun.contains(name.as_str()) {
                    let label = self.positions.variable(index, place, name);
                    let expected = "expected one, such as uniform or fill";
                    return Err(Failure::call(format!("{label}: found no initialise op that writes it; {expected}")));
                }
            }
        }
        Ok(())
    }

    /// The name of an op in errors, after its position in the text.
    pub(crate) fn label(&self, block: usize, place: usize) -> String {
        self.positions.op(block, place, &self.scopes[block].nodes[place].kind)
    }

    /// The unchecked program.
    #[must_use]
    pub const fn program(&self) -> &Program {
        &self.program
    }

    /// The unchecked program, to be changed and checked again.
    #[must_use]
    pub fn into_program(self) -> Program {
        self.program
    }

    /// All variables: the declared ones block by block, then temporaries in the order in which they are written.
    #[must_use]
    pub fn variables(&self) -> &[Variable] {
        &self.variables
    }

    /// One variable.
    #[must_use]
    pub fn variable(&self, index: VariableIndex) -> &Variable {
        &self.variables[index.place()]
    }

    /// The variable of this name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<VariableIndex> {
        self.by_name.get(name).copied()
    }

    /// The facts of the variable of this name.
    #[must_use]
    pub fn facts(&self, name: &str) -> Option<&VariableFacts> {
        self.find(name).map(|index| &self.variable(index).facts)
    }

    /// Its blocks; an op that runs a block has its index in this list.
    #[must_use]
    pub fn scopes(&self) -> &[Scope] {
        &self.scopes
    }
}

fn check_size(program: &Program, positions: &ProgramPositions) -> Result<(), Failure> {
    let blocks = program.blocks.len();
    if blocks == 0 || blocks > PROGRAM_BLOCKS_MAX {
        return Err(Failure::call(format!("the program has {blocks} blocks; expected 1 to {PROGRAM_BLOCKS_MAX}")));
    }
    let ops: usize = program.blocks.iter().map(|block| block.ops.len()).sum();
    if ops > PROGRAM_OPS_MAX {
        return Err(Failure::call(format!("the program has {ops} ops; expected at most {PROGRAM_OPS_MAX}")));
    }
    for (index, block) in program.blocks.iter().enumerate() {
        let expected = match (index, block.parent) {
            (0, None) => continue,
            (0, Some(_)) => "none, because the program begins here".to_owned(),
            (_, Some(parent)) if (parent as usize) < index => continue,
            _ => format!("a block before it, 0 to {}", index - 1),
        };
        let found = block.parent.map_or("none".to_owned(), |parent| parent.to_string());
        let label = positions.block(index);
        return Err(Failure::call(format!("{label}: found parent {found}; expected {expected}")));
    }
    Ok(())
}

/// A variable while a program is checked.
#[derive(Debug)]
struct CheckedVariable {
    variable: Variable,
    block: u32,
    is_written: bool,
}

#[derive(Debug, Default)]
struct Checker {
    variables: Vec<CheckedVariable>,
    by_name: BTreeMap<String, VariableIndex>,
    scopes: Vec<Option<Scope>>,
    positions: ProgramPositions,
}

impl Checker {
    fn declare(&mut self, index: usize, block: &Block) -> Result<(), Failure> {
        self.scopes.push(None);
        for (place, variable) in block.variables.iter().enumerate() {
            let checked = infer::check_declaration(variable);
            checked.and_then(|()| self.add(variable.clone(), block_number(index)).map(|_| ())).map_err(|reason| {
                Failure::call(format!("{}: {reason}", self.positions.variable(index, place, &variable.name)))
            })?;
        }
        Ok(())
    }

    fn add(&mut self, variable: Variable, block: u32) -> Result<VariableIndex, String> {
        let bytes = variable.name.len();
        if bytes == 0 || bytes > NAME_BYTES_MAX {
            return Err(format!("the name has {bytes} bytes; expected 1 to {NAME_BYTES_MAX}"));
        }
        if self.variables.len() >= PROGRAM_VARIABLES_MAX {
            return Err(format!("found one variable more than {PROGRAM_VARIABLES_MAX}; expected at most as many"));
        }
        let index = VariableIndex(u32::try_from(self.variables.len()).map_err(|error| error.to_string())?);
        if let Some(first) = self.by_name.insert(variable.name.clone(), index) {
            let block = self.variables[first.place()].block;
            return Err(format!("found this name in block {block} as well; expected each name once"));
        }
        self.variables.push(CheckedVariable { variable, block, is_written: false });
        Ok(index)
    }

    /// Checks the ops of a block in order, and the ops of each block that an op runs with that op.
    fn scope(&mut self, program: &Program, index: usize) -> Result<(), Failure> {
        let block = &program.blocks[index];
        let mut nodes = Vec::with_capacity(block.ops.len());
        for (place, op) in block.ops.iter().enumerate() {
            let mut node = self.node(op, block_number(index));
            if let (Ok(_), OpKind::LoopForever { block: inner }) = (&node, &op.kind) {
                node = self.enter(program, index, *inner as usize).and(node);
            }
            let refuse = |reason| Failure::call(format!("{}: {reason}", self.positions.op(index, place, &op.kind)));
            nodes.push(node.map_err(refuse)?);
            if let OpKind::LoopForever { block: inner } = op.kind {
                self.scope(program, inner as usize)?;
            }
        }
        self.scopes[index] = Some(Scope { parent: block.parent, nodes });
        Ok(())
    }

    /// Checks that the op of a block may run another block.
    fn enter(&mut self, program: &Program, outer: usize, inner: usize) -> Result<(), String> {
        let Some(block) = program.blocks.get(inner) else {
            return Err(format!("found block {inner}; expected one below {}", program.blocks.len()));
        };
        if block.parent != Some(block_number(outer)) {
            let parent = block.parent.map_or("none".to_owned(), |parent| parent.to_string());
            return Err(format!("found block {inner}, whose parent is {parent}; expected a block with parent {outer}"));
        }
        let scope = Scope { parent: block.parent, nodes: Vec::new() };
        match self.scopes[inner].replace(scope) {
            Some(_) => Err(format!("found block {inner} run by two ops; expected one")),
            None => Ok(()),
        }
    }

    fn node(&mut self, op: &Op, block: u32) -> Result<Node, String> {
        let operands = op.inputs.len().max(op.outputs.len());
        if operands > PROGRAM_OPERANDS_MAX {
            return Err(format!("found {operands} operands on one side; expected at most {PROGRAM_OPERANDS_MAX}"));
        }
        let inputs = op.inputs.iter().map(|name| self.readable(name, op, block)).collect::<Result<Vec<_>, _>>()?;
        let declared = op.outputs.iter().map(|name| self.writable(name, block)).collect::<Result<Vec<_>, _>>()?;
        let facts: Vec<&VariableFacts> = inputs.iter().map(|index| self.facts(*index)).collect();
        let known: Vec<_> = declared.iter().map(|index| index.map(|index| self.facts(index))).collect();
        check_distinct(&op.outputs)?;
        let Inferred { facts, rule } = infer::outputs(op, &facts, &known)?;
        let mut outputs = Vec::with_capacity(facts.len());
        for ((name, declared), facts) in op.outputs.iter().zip(declared).zip(facts) {
            outputs.push(self.write(name, declared, facts, block)?);
        }
        Ok(Node { kind: op.kind.clone(), role: op.role, inputs, outputs, rule })
    }

    fn facts(&self, index: VariableIndex) -> &VariableFacts {
        &self.variables[index.place()].variable.facts
    }

    /// A variable that an op of a block may read.
    fn readable(&self, name: &str, op: &Op, block: u32) -> Result<VariableIndex, String> {
        let Some(index) = self.by_name.get(name).copied() else {
            return Err(format!(
                "found no variable {name:?}; expected a declared one, or one that an op before writes"
            ));
        };
        let known = &self.variables[index.place()];
        self.check_visible(known, block)?;
        if known.variable.purpose == Purpose::Temporary && !known.is_written {
            return Err(format!("found no value in temporary {name:?}; expected an op before this one that writes it"));
        }
        let is_queue = matches!(known.variable.facts, VariableFacts::Queue { .. });
        if is_queue && !matches!(op.kind, OpKind::Enqueue | OpKind::Dequeue { .. }) {
            return Err(format!("found queue {name:?}; expected only enqueue and dequeue to touch it"));
        }
        Ok(index)
    }

    /// A variable that an op may write, when it is known already.
    fn writable(&self, name: &str, block: u32) -> Result<Option<VariableIndex>, String> {
        let Some(index) = self.by_name.get(name).copied() else { return Ok(None) };
        let known = &self.variables[index.place()];
        self.check_visible(known, block)?;
        if let VariableFacts::Queue { .. } = known.variable.facts {
            return Err(format!("found queue {name:?} as an output; expected enqueue to fill it"));
        }
        match known.variable.purpose {
            Purpose::Data => {
                Err(format!("found data {name:?} as an output; expected another variable, because data is only fed"))
            }
            Purpose::Temporary if known.is_written => {
                Err(format!("found a second op that writes temporary {name:?}; expected one"))
            }
            // A loop would write the temporary repeatedly while the block around it reads it once.
            Purpose::Temporary if known.block != block => {
                let own = known.block;
                Err(format!("found temporary {name:?} of block {own} written in block {block}; expected it in {own}"))
            }
            Purpose::Temporary | Purpose::Parameter | Purpose::State => Ok(Some(index)),
        }
    }

    fn write(
        &mut self,
        name: &str,
        declared: Option<VariableIndex>,
        facts: VariableFacts,
        block: u32,
    ) -> Result<VariableIndex, String> {
        let index = match declared {
            Some(index) => index,
            None => {
                infer::check_facts(&facts).map_err(|reason| format!("output {name:?} is {facts}; {reason}"))?;
                let name = name.to_owned();
                self.add(Variable { name, facts: facts.clone(), purpose: Purpose::Temporary }, block)?
            }
        };
        let known = &mut self.variables[index.place()];
        if known.variable.facts != facts {
            let found = &known.variable.facts;
            return Err(format!("output {name:?} is declared {found}; expected {facts}, which the op gives"));
        }
        known.is_written = true;
        Ok(index)
    }

    fn check_visible(&self, known: &CheckedVariable, block: u32) -> Result<(), String> {
        let mut scope = Some(block);
        while let Some(index) = scope {
            if index == known.block {
                return Ok(());
            }
            scope = self.parent(index);
        }
        let name = &known.variable.name;
        Err(format!("found {name:?} of block {}; expected a variable of this block or one around it", known.block))
    }

    fn parent(&self, block: u32) -> Option<u32> {
        self.scopes[block as usize].as_ref().and_then(|scope| scope.parent)
    }
}

fn check_distinct(outputs: &[String]) -> Result<(), String> {
    let mut seen = BTreeSet::new();
    match outputs.iter().find(|name| !seen.insert(*name)) {
        Some(name) => Err(format!("found output {name:?} twice; expected each once")),
        None => Ok(()),
    }
}

/// A block's index, which [`PROGRAM_BLOCKS_MAX`] keeps small.
fn block_number(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}
