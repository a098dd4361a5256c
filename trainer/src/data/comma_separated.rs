//! CSV files with a header: the columns of variables, and tensors as a table.
//!
//! A variable of one number per row is the column with its name. A variable of more dimensions is the columns `name.0`,
//! `name.1` and so on, the last dimension fastest.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_program::{Elements, Tensor};

use super::DataVariable;
use super::number::{Number, elements};

/// Columns of a header that an error names.
const NAMES_SHOWN: usize = 8;

/// Reads the columns of these variables. Other columns are not read.
pub(super) fn read(path: &Path, wanted: &[DataVariable]) -> Result<Vec<Tensor>, String> {
    let mut reader =
        csv::ReaderBuilder::new().trim(csv::Trim::All).from_path(path).map_err(|error| error.to_string())?;
    let header = reader.headers().map_err(|error| error.to_string())?.clone();
    let places = wanted.iter().map(|one| columns(&header, one)).collect::<Result<Vec<_>, _>>()?;
    let mut numbers: Vec<Vec<Number>> = vec![Vec::new(); wanted.len()];
    let mut rows = 0_u64;
    let mut record = csv::StringRecord::new();
    while reader.read_record(&mut record).map_err(|error| error.to_string())? {
        for ((one, places), numbers) in wanted.iter().zip(&places).zip(&mut numbers) {
            for place in places {
                let field = &record[*place];
                let number = number(field, one.element_type);
                numbers.push(number.ok_or_else(|| {
                    let (line, name) = (record.position().map_or(0, csv::Position::line), &header[*place]);
                    format!("line {line}, column {name:?}: found {field:?}; expected a number of {}", one.element_type)
                })?);
            }
        }
        rows += 1;
    }
    let tensor = |(one, numbers): (&DataVariable, Vec<Number>)| {
        let elements = elements(one.element_type, numbers.into_iter()).expect("each field was checked");
        Tensor::new([&[rows], one.example.as_slice()].concat(), elements)
    };
    Ok(wanted.iter().zip(numbers).map(tensor).collect())
}

/// The indices of a variable's columns.
fn columns(header: &csv::StringRecord, one: &DataVariable) -> Result<Vec<usize>, String> {
    let mut by_name = BTreeMap::new();
    for (place, name) in header.iter().enumerate() {
        if by_name.insert(name, place).is_some() {
            return Err(format!("found the column {name:?} twice; expected each once"));
        }
    }
    let count = one.example.iter().product::<u64>();
    if let (1, Some(place)) = (count, by_name.get(one.name.as_str())) {
        return Ok(vec![*place]);
    }
    let place = |index: u64| by_name.get(format!("{}.{index}", one.name).as_str()).copied();
    let found: Option<Vec<usize>> = (0..count).map(place).collect();
    found.filter(|_| place(count).is_none() && !by_name.contains_key(one.name.as_str())).ok_or_else(|| {
        let expected = match count {
            1 => format!("{:?}", one.name),
            _ => format!("{0}.0 to {0}.{1}", one.name, count - 1),
        };
        let own = by_name.keys().filter(|name| name.starts_with(&one.name)).count();
        let shown: Vec<&str> = header.iter().take(NAMES_SHOWN).collect();
        let more = if header.len() > NAMES_SHOWN {
            format!(" and {} more", header.len() - NAMES_SHOWN)
        } else {
            String::new()
        };
        format!("found {own} columns for data {one} among {}{more}; expected {expected}", shown.join(", "))
    })
}

/// The number of a field, if the type has it. A float is rounded once to nearest.
fn number(field: &str, element_type: ElementType) -> Option<Number> {
    let number = match element_type {
        ElementType::Float32 => Number::Real(field.parse::<f32>().ok()?.into()),
        _ => match field.parse() {
            Ok(whole) => Number::Whole(whole),
            Err(_) => Number::Real(field.parse().ok()?),
        },
    };
    let is_finite = matches!(number, Number::Whole(_)) || matches!(number, Number::Real(real) if real.is_finite());
    (is_finite && elements(element_type, std::iter::once(number)).is_ok()).then_some(number)
}

/// Tensors of equal rows as a table with a header; scalars have one row.
///
/// # Errors
/// When two tensors have different rows.
pub(super) fn write(tensors: &[(String, Tensor)]) -> Result<String, Failure> {
    let rows = |tensor: &Tensor| tensor.shape().first().copied().unwrap_or(1);
    let first = tensors.first().map_or(0, |(_, tensor)| rows(tensor));
    if let Some((name, tensor)) = tensors.iter().find(|(_, tensor)| rows(tensor) != first) {
        let (found, like) = (rows(tensor), &tensors[0].0);
        return Err(Failure::call(format!(
            "{name:?} has {found} rows; expected {first}, as {like:?} has; safetensors and npz take both"
        )));
    }
    let mut text = String::new();
    // Also of tensors without rows.
    let width = |tensor: &Tensor| tensor.shape().iter().skip(1).product::<u64>();
    let widths = tensors.iter().map(|(_, tensor)| usize::try_from(width(tensor)).expect("a row is in memory"));
    let widths: Vec<usize> = widths.collect();
    let heads = tensors.iter().zip(&widths).flat_map(|((name, one), width)| match one.shape().len() {
        0 | 1 => vec![field(name)],
        _ => (0..*width).map(|index| field(&format!("{name}.{index}"))).collect(),
    });
    text.push_str(&heads.collect::<Vec<_>>().join(","));
    text.push('\n');
    for row in 0..usize::try_from(first).expect("the rows are in memory") {
        for (place, ((_, tensor), width)) in tensors.iter().zip(&widths).enumerate() {
            for index in row * width..(row + 1) * width {
                let comma = if place == 0 && index == row * width { "" } else { "," };
                write!(text, "{comma}{}", shown(tensor.elements(), index)).expect("a string takes everything");
            }
        }
        text.push('\n');
    }
    Ok(text)
}

/// A name as a field of CSV, in quotes where it needs them.
fn field(name: &str) -> String {
    if name.contains([',', '"', '\n', '\r']) { format!("\"{}\"", name.replace('"', "\"\"")) } else { name.to_owned() }
}

/// The shortest text that reads back as the element.
fn shown(elements: &Elements, index: usize) -> String {
    match elements {
        Elements::Int32(values) => values[index].to_string(),
        Elements::Uint32(values) => values[index].to_string(),
        Elements::Int64(values) => values[index].to_string(),
        Elements::Uint64(values) => values[index].to_string(),
        Elements::Float32(values) => values[index].to_string(),
        Elements::Float64(values) => values[index].to_string(),
        Elements::Float16(values) => values[index].to_string(),
        Elements::Bfloat16(values) => values[index].to_string(),
    }
}
