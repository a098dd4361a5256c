//! Parser of the text form of programs.

use crate::attributes::{self, Attribute};
use crate::block::{Block, Program};
use crate::op::{Op, OpRole};
use crate::text::positions::{BlockPositions, ProgramPositions};
use crate::variable::{Dim, Purpose, Variable, VariableFacts};
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;

use pserver_core::text::Position;
use pserver_core::text::lexer::{Language, TextLexer, TextToken};

/// Reads a whole program, and where its declarations and ops are.
pub(super) fn program(text: &str, file: Option<&str>) -> Result<(Program, ProgramPositions), Failure> {
    let mut lexer = TextLexer::new(Language::Program, text).of_file(file);
    let ahead = lexer.next_token()?;
    let mut parser = ProgramParser { lexer, ahead };
    let mut program = Program::default();
    let mut positions = ProgramPositions::of_file(file);
    loop {
        match parser.next()? {
            (_, TextToken::End) => return Ok((program, positions)),
            (start, TextToken::Word("block")) => {
                let mut places = BlockPositions::new(start);
                let block = parser.block(program.blocks.len(), &mut places)?;
                program.blocks.push(block);
                positions.blocks.push(places);
            }
            (position, token) => {
                return Err(parser.lexer.refuse(position, format!("found {token}; expected \"block\" or the end")));
            }
        }
    }
}

struct ProgramParser<'a> {
    lexer: TextLexer<'a>,
    ahead: (Position, TextToken<'a>),
}

/// The items between an op's parentheses.
#[derive(Default)]
struct Arguments {
    inputs: Vec<String>,
    attributes: Vec<(String, Attribute)>,
    /// Where each attribute is.
    positions: Vec<Position>,
}

impl<'a> ProgramParser<'a> {
    fn next(&mut self) -> Result<(Position, TextToken<'a>), Failure> {
        let following = self.lexer.next_token()?;
        Ok(std::mem::replace(&mut self.ahead, following))
    }

    fn is_ahead(&self, symbol: &str) -> bool {
        self.ahead.1 == TextToken::Symbol(symbol)
    }

    /// Takes the next token when it is this symbol.
    fn take(&mut self, symbol: &str) -> Result<bool, Failure> {
        let found = self.is_ahead(symbol);
        if found {
            self.next()?;
        }
        Ok(found)
    }

    fn expect(&mut self, symbol: &str) -> Result<(), Failure> {
        match self.next()? {
            (_, TextToken::Symbol(found)) if found == symbol => Ok(()),
            (position, token) => Err(self.lexer.refuse(position, format!("found {token}; expected '{symbol}'"))),
        }
    }

    /// Reads a block after the word `block`.
    fn block(&mut self, index: usize, places: &mut BlockPositions) -> Result<Block, Failure> {
        let (position, number): (_, u64) = self.whole()?;
        if number != index as u64 {
            return Err(self.lexer.refuse(position, format!("found block {number}; expected block {index}, in order")));
        }
        let mut block = Block::default();
        if self.ahead.1 == TextToken::Word("in") {
            self.next()?;
            block.parent = Some(self.whole()?.1);
        }
        self.expect("{")?;
        loop {
            match self.next()? {
                (_, TextToken::Symbol("}")) => return Ok(block),
                (position, TextToken::Word(word)) => {
                    if let Some(purpose) = Purpose::ALL.into_iter().find(|purpose| purpose.name() == word) {
                        block.variables.push(self.variable(purpose)?);
                        places.variables.push(position);
                    } else if let Some(role) = OpRole::ALL.into_iter().find(|role| role.name() == word) {
                        block.ops.push(self.op(role)?);
                        places.ops.push(position);
                    } else {
                        return Err(self.lexer.refuse(position, format!("found {word:?}; expected {}", begins())));
                    }
                }
                (position, token) => {
                    return Err(self.lexer.refuse(position, format!("found {token}; expected {} or '}}'", begins())));
                }
            }
        }
    }

    fn variable(&mut self, purpose: Purpose) -> Result<Variable, Failure> {
        let name = self.name()?;
        self.expect(":")?;
        Ok(Variable { name, facts: self.facts()?, purpose })
    }

    fn facts(&mut self) -> Result<VariableFacts, Failure> {
        match self.next()? {
            (_, TextToken::Word("queue")) => {
                self.expect("(")?;
                if let (position, TextToken::Word("queue")) = self.ahead {
                    return Err(self
                        .lexer
                        .refuse(position, "found a queue of queues; expected dense, rows or strings in it"));
                }
                let of = Box::new(self.facts()?);
                self.expect(",")?;
                let (_, capacity) = self.whole()?;
                self.expect(")")?;
                Ok(VariableFacts::Queue { of, capacity })
            }
            (_, TextToken::Word("rows")) => {
                self.expect("(")?;
                let element_type = self.element_type()?;
                self.expect(",")?;
                let (_, height) = self.whole()?;
                self.expect(",")?;
                let (_, width) = self.whole()?;
                self.expect(")")?;
                Ok(VariableFacts::SelectedRows { element_type, height, width })
            }
            (_, TextToken::Word("strings")) => Ok(VariableFacts::Strings),
            (position, TextToken::Word(word)) => match attributes::element_type(word) {
                Some(element_type) => Ok(VariableFacts::Dense { element_type, shape: self.shape()? }),
                None => Err(self
                    .lexer
                    .refuse(position, format!("found {word:?}; expected a type, \"rows\", \"queue\" or \"strings\""))),
            },
            (position, token) => Err(self
                .lexer
                .refuse(position, format!("found {token}; expected a type, \"rows\", \"queue\" or \"strings\""))),
        }
    }

    fn element_type(&mut self) -> Result<ElementType, Failure> {
        let (position, token) = self.next()?;
        let found = if let TextToken::Word(word) = token { attributes::element_type(word) } else { None };
        found.ok_or_else(|| {
            let names = ElementType::ALL.map(ElementType::name).join(", ");
            self.lexer.refuse(position, format!("found {token}; expected a type, one of {names}"))
        })
    }

    fn shape(&mut self) -> Result<Vec<Dim>, Failure> {
        self.expect("[")?;
        self.list("]", |parser| {
            if parser.ahead.1 == TextToken::Word("batch") {
                parser.next()?;
                return Ok(Dim::Batch);
            }
            let (position, token) = parser.next()?;
            let length = if let TextToken::Numeral(text) = token { to_whole(text) } else { None };
            length.map(Dim::Fixed).ok_or_else(|| {
                parser
                    .lexer
                    .refuse(position, format!("found {token}; expected a dimension, a whole number or \"batch\""))
            })
        })
    }

    /// Items separated by commas, up to a symbol, which is taken.
    fn list<T>(&mut self, close: &str, item: impl Fn(&mut Self) -> Result<T, Failure>) -> Result<Vec<T>, Failure> {
        let mut items = Vec::new();
        if self.take(close)? {
            return Ok(items);
        }
        loop {
            items.push(item(self)?);
            match self.next()? {
                (_, TextToken::Symbol(",")) => {}
                (_, TextToken::Symbol(found)) if found == close => return Ok(items),
                (position, token) => {
                    return Err(self.lexer.refuse(position, format!("found {token}; expected ',' or '{close}'")));
                }
            }
        }
    }

    /// The outputs and `=`, which an op without outputs lacks; then the kind and its arguments.
    fn op(&mut self, role: OpRole) -> Result<Op, Failure> {
        let mut position = self.ahead.0;
        let mut outputs = vec![self.name()?];
        while self.take(",")? {
            outputs.push(self.name()?);
        }
        let kind = if self.take("=")? {
            position = self.ahead.0;
            self.name()?
        } else if outputs.len() == 1 && self.is_ahead("(") {
            outputs.remove(0)
        } else {
            let (position, token) = self.next()?;
            return Err(self.lexer.refuse(position, format!("found {token}; expected '=' after an op's outputs")));
        };
        self.expect("(")?;
        let Arguments { inputs, attributes, positions } = self.arguments()?;
        let names: Vec<String> = attributes.iter().map(|(name, _)| name.clone()).collect();
        let kind = attributes::kind(&kind, attributes).map_err(|refusal| {
            // Of two equal attributes the second is refused.
            let place = refusal.attribute.and_then(|name| names.iter().rposition(|given| *given == name));
            self.lexer.refuse(place.map_or(position, |place| positions[place]), refusal.reason)
        })?;
        Ok(Op { kind, inputs, outputs, role })
    }

    fn arguments(&mut self) -> Result<Arguments, Failure> {
        let mut arguments = Arguments::default();
        if self.take(")")? {
            return Ok(arguments);
        }
        loop {
            let position = self.ahead.0;
            let name = self.name()?;
            if self.take("=")? {
                let value = self.value()?;
                arguments.attributes.push((name, value));
                arguments.positions.push(position);
            } else if arguments.attributes.is_empty() {
                arguments.inputs.push(name);
            } else {
                return Err(self
                    .lexer
                    .refuse(position, format!("found input {name:?} after an attribute; expected inputs first")));
            }
            match self.next()? {
                (_, TextToken::Symbol(",")) => {}
                (_, TextToken::Symbol(")")) => return Ok(arguments),
                (position, token) => {
                    return Err(self.lexer.refuse(position, format!("found {token}; expected ',', '=' or ')'")));
                }
            }
        }
    }

    fn value(&mut self) -> Result<Attribute, Failure> {
        match self.next()? {
            (_, TextToken::Text(text)) => Ok(Attribute::Text(text)),
            (_, TextToken::Word("true")) => Ok(Attribute::Bool(true)),
            (_, TextToken::Word("false")) => Ok(Attribute::Bool(false)),
            (_, TextToken::Word(number @ ("inf" | "NaN"))) => Ok(Attribute::Real(to_real(number).unwrap_or(f64::NAN))),
            (_, TextToken::Word(word)) if self.take(":")? => {
                let (_, number): (_, u64) = self.whole()?;
                Ok(Attribute::Word(format!("{word}:{number}")))
            }
            (_, TextToken::Word(word)) => Ok(Attribute::Word(word.to_owned())),
            (position, TextToken::Numeral(text)) => match (to_whole(text), to_real(text)) {
                (Some(value), _) => Ok(Attribute::Whole(value)),
                (None, Some(value)) => Ok(Attribute::Real(value)),
                (None, None) => Err(self.lexer.refuse(position, format!("found {text:?}; expected a number"))),
            },
            (_, TextToken::Symbol("[")) => {
                self.list("]", |parser| parser.whole().map(|(_, value)| value)).map(Attribute::Wholes)
            }
            (position, token) => {
                Err(self.lexer.refuse(position, format!("found {token}; expected an attribute's value")))
            }
        }
    }

    /// A name, bare or in quotes.
    fn name(&mut self) -> Result<String, Failure> {
        match self.next()? {
            (_, TextToken::Word(name)) => Ok(name.to_owned()),
            (_, TextToken::Text(name)) => Ok(name),
            (position, token) => Err(self.lexer.refuse(position, format!("found {token}; expected a name"))),
        }
    }

    fn whole<T: TryFrom<u64>>(&mut self) -> Result<(Position, T), Failure> {
        let (position, token) = self.next()?;
        let value = if let TextToken::Numeral(text) = token { to_whole(text) } else { None };
        let value = value.and_then(|value| T::try_from(value).ok());
        let below = size_of::<T>() * 8;
        value.map(|value| (position, value)).ok_or_else(|| {
            self.lexer.refuse(position, format!("found {token}; expected a whole number below 2^{below}"))
        })
    }
}

fn begins() -> String {
    let words = Purpose::ALL.map(Purpose::name).into_iter().chain(OpRole::ALL.map(OpRole::name));
    format!("one of {}", words.collect::<Vec<_>>().join(", "))
}

/// Decimal digits, without a sign and without zeros in front.
fn to_whole(text: &str) -> Option<u64> {
    let is_plain = text.bytes().all(|digit| digit.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    if is_plain { text.parse().ok() } else { None }
}

fn to_real(text: &str) -> Option<f64> {
    text.parse().ok()
}
