//! A placement that is given: a line for each parameter, or for each piece of one, with its server.
//!
//! ```text
//! # parameter, server, and the rows of a piece
//! weight 0
//! table 0 0..4096
//! table 1 4096..10000
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use pserver_core::error::Failure;

use super::division::Portion;
use super::group::{Groups, OpGroup};
use crate::graph::Graph;

/// Names in an error, at most.
const NAMED_MAX: usize = 8;

/// The servers of all parameters of a program, each whole or in pieces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GivenPlacement {
    pieces: Vec<GivenPiece>,
}

/// A parameter, or some rows of one, on a server.
#[derive(Clone, Debug, PartialEq, Eq)]
struct GivenPiece {
    parameter: String,
    server: u32,
    rows: Option<Range<u64>>,
}

impl FromStr for GivenPlacement {
    type Err = Failure;

    fn from_str(text: &str) -> Result<Self, Failure> {
        let pieces = content_lines(text).map(|(number, line)| {
            piece(line).ok_or_else(|| {
                Failure::call(format!(
                    "line {number}: found {line:?}; expected a parameter, its server and, of a piece, its rows, such \
                     as \"table 1 4096..8192\""
                ))
            })
        });
        Ok(Self { pieces: pieces.collect::<Result<_, _>>()? })
    }
}

/// The lines of a file that have something, without comments, each with its number.
pub(super) fn content_lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = (1..).zip(text.lines()).map(|(number, line)| (number, line.trim()));
    lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
}

fn piece(line: &str) -> Option<GivenPiece> {
    let (rest, last) = line.rsplit_once(char::is_whitespace)?;
    let rows = last.split_once("..").and_then(|(start, end)| Some(start.parse().ok()?..end.parse().ok()?));
    let (parameter, server) = match rows {
        Some(_) => rest.trim_end().rsplit_once(char::is_whitespace)?,
        None => (rest, last),
    };
    Some(GivenPiece { parameter: parameter.trim_end().to_owned(), server: server.parse().ok()?, rows })
}

impl fmt::Display for GivenPlacement {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for GivenPiece { parameter, server, rows } in &self.pieces {
            match rows {
                None => writeln!(formatter, "{parameter} {server}")?,
                Some(rows) => writeln!(formatter, "{parameter} {server} {}..{}", rows.start, rows.end)?,
            }
        }
        Ok(())
    }
}

impl GivenPlacement {
    /// That of groups whose portions are known.
    pub(super) fn of(graph: &Graph, groups: &Groups<'_>, portions: &[Vec<Portion>]) -> Self {
        let of_group = |(group, portions): (&OpGroup, &Vec<Portion>)| {
            let parameter = group.name(graph);
            let is_whole = portions.len() == 1;
            let piece = move |Portion { server, rows }: &Portion| GivenPiece {
                parameter: parameter.clone(),
                server: *server,
                rows: (!is_whole).then(|| rows.clone()),
            };
            portions.iter().map(piece).collect::<Vec<_>>()
        };
        Self { pieces: groups.all.iter().zip(portions).flat_map(of_group).collect() }
    }

    /// The portions of the groups, each group's in the order of its rows.
    ///
    /// # Errors
    /// When a parameter is missing or unknown, a server is not there, or rows are given twice, or not, or stay whole.
    pub(super) fn portions(
        &self,
        graph: &Graph,
        groups: &Groups<'_>,
        servers: u32,
    ) -> Result<Vec<Vec<Portion>>, Failure> {
        let mut by_name: BTreeMap<&str, Vec<&GivenPiece>> = BTreeMap::new();
        for one in &self.pieces {
            if one.server >= servers {
                let found = format!("found the server {} of the parameter {:?}", one.server, one.parameter);
                return Err(refused(format!("{found}; expected one below {servers}")));
            }
            by_name.entry(&one.parameter).or_default().push(one);
        }
        let mut portions = Vec::new();
        for group in &groups.all {
            let name = group.name(graph);
            let pieces = by_name.remove(name.as_str());
            let pieces = pieces.ok_or_else(|| refused(format!("found no parameter {name:?}; expected its server")))?;
            portions.push(portions_of(&name, &pieces, group)?);
        }
        match by_name.keys().next() {
            None => Ok(portions),
            Some(name) => {
                let names: Vec<String> = groups.all.iter().take(NAMED_MAX).map(|group| group.name(graph)).collect();
                Err(refused(format!(
                    "found the parameter {name:?}; expected one of the program's {} that have a server of their own: \
                     {}",
                    groups.all.len(),
                    names.join(", ")
                )))
            }
        }
    }
}

fn portions_of(name: &str, pieces: &[&GivenPiece], group: &OpGroup) -> Result<Vec<Portion>, Failure> {
    if let [GivenPiece { server, rows: None, .. }] = pieces {
        return Ok(vec![Portion { server: *server, rows: 0..group.rows.unwrap_or(1) }]);
    }
    let whole = || refused(format!("found pieces of {name:?}, which stays whole: {}", group.why_whole));
    let rows = group.rows.ok_or_else(whole)?;
    let mut portions = Vec::new();
    for one in pieces {
        let rows = one.rows.clone();
        let rows =
            rows.ok_or_else(|| refused(format!("found {name:?} twice without rows; expected the rows of each piece")))?;
        portions.push(Portion { server: one.server, rows });
    }
    portions.sort_by_key(|one| one.rows.start);
    let mut from = 0;
    for Portion { rows: piece, .. } in &portions {
        if piece.start != from || piece.is_empty() {
            let found = format!("found the rows {}..{} of {name:?}", piece.start, piece.end);
            return Err(refused(format!("{found}; expected a piece from row {from} on")));
        }
        from = piece.end;
    }
    if from != rows {
        return Err(refused(format!("found {from} rows of {name:?}; expected {rows}")));
    }
    let mut servers: Vec<u32> = portions.iter().map(|one| one.server).collect();
    servers.sort_unstable();
    match servers.windows(2).find(|pair| pair[0] == pair[1]) {
        None => Ok(portions),
        Some(pair) => Err(refused(format!("found two pieces of {name:?} on server {}; expected one", pair[0]))),
    }
}

fn refused(why: String) -> Failure {
    Failure::call(format!("the given placement: {why}"))
}
