//! Pairs of a sparse and a dense parameter that are trained with the same gradients.

use pserver_client::{Client, DestinationRows, DestinationSlice, GradientRows, GradientSlice};
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType::Float32;
use pserver_core::error::Failure;

use super::seeded::SeededPrng;

/// A matrix, once as a dense parameter (`<name>/dense`) and once as a sparse one.
#[derive(Clone, Debug)]
pub(crate) struct Matrix {
    pub(crate) name: String,
    pub(crate) height: usize,
    pub(crate) width: usize,
    /// Its optimizer message in protobuf's text form.
    pub(crate) settings: String,
    /// Further settings of the sparse parameter, such as `lazy: true`.
    pub(crate) sparse: String,
}

/// Rows of a gradient.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rows {
    pub(crate) ids: Vec<u64>,
    pub(crate) values: Vec<f32>,
}

impl Matrix {
    pub(crate) fn new(name: &str, height: usize, width: usize, settings: &str) -> Self {
        Self { name: name.to_owned(), height, width, settings: settings.to_owned(), sparse: String::new() }
    }

    pub(crate) fn dense_name(&self) -> String {
        format!("{}/dense", self.name)
    }

    pub(crate) fn shape(&self) -> [u64; 2] {
        [self.height as u64, self.width as u64]
    }

    pub(crate) fn initial(&self) -> Vec<u8> {
        let mut prng = SeededPrng::new(self.name.len() as u64);
        (0..self.height * self.width).flat_map(|_| number(&mut prng).to_le_bytes()).collect()
    }

    /// Declares both parameters with the same initial value.
    pub(crate) fn declare(&self, client: &Client) -> Result<(), Failure> {
        let dense = settings(&self.settings);
        client.init_param(&self.dense_name(), Float32, &self.shape(), &self.initial(), &dense)?;
        self.declare_sparse(client, &self.initial())
    }

    pub(crate) fn declare_sparse(&self, client: &Client, initial: &[u8]) -> Result<(), Failure> {
        let Self { height, width, sparse, .. } = self;
        let text = format!("{} sparse {{ height: {height} width: {width} {sparse} }}", self.settings);
        client.init_param(&self.name, Float32, &[], initial, &settings(&text))
    }

    /// The gradient of `trainer` in `round`: some rows, some of them repeated, and sometimes none.
    pub(crate) fn rows(&self, trainer: u32, round: u64) -> Rows {
        let mut prng = SeededPrng::new((round << 20) | (u64::from(trainer) << 8) | self.width as u64);
        let count = if prng.below(5) == 0 { 0 } else { prng.below(self.height * 2) };
        // Most rows have one of a few ids.
        let id = |prng: &mut SeededPrng| (prng.below(self.height) * prng.below(self.height) / self.height) as u64;
        let ids: Vec<u64> = (0..count).map(|_| id(&mut prng)).collect();
        let values = (0..count * self.width).map(|_| number(&mut prng)).collect();
        Rows { ids, values }
    }

    /// The rows of this gradient as a dense gradient.
    pub(crate) fn scattered(&self, rows: &Rows) -> Vec<u8> {
        let mut whole = vec![0.0_f32; self.height * self.width];
        for (id, row) in rows.ids.iter().zip(rows.values.chunks(self.width)) {
            let start = usize::try_from(*id).expect("it is below the height") * self.width;
            for (into, value) in whole[start..][..self.width].iter_mut().zip(row) {
                *into += value;
            }
        }
        bytes(&whole)
    }

    /// Pushes the same gradient to both parameters.
    pub(crate) fn push(&self, client: &Client, trainer: u32, round: u64) -> Result<(), Failure> {
        let rows = self.rows(trainer, round);
        let (name, content) = (self.dense_name(), self.scattered(&rows));
        client.push(&[GradientSlice { name: &name, element_type: Float32, content: &content }], None)?;
        self.push_rows(client, &rows)
    }

    pub(crate) fn push_rows(&self, client: &Client, rows: &Rows) -> Result<(), Failure> {
        push_rows(client, &self.name, rows)
    }

    /// Fetches the dense parameter.
    pub(crate) fn pull_dense(&self, client: &Client) -> Result<Vec<u8>, Failure> {
        let (name, mut content) = (self.dense_name(), vec![0; self.height * self.width * 4]);
        client.pull(&mut [DestinationSlice::new(&name, &mut content)])?;
        Ok(content)
    }

    /// Fetches the sparse parameter, row by row.
    pub(crate) fn pull_sparse(&self, client: &Client) -> Result<Vec<u8>, Failure> {
        let ids: Vec<u64> = (0..self.height as u64).collect();
        pull_rows(client, &self.name, &ids, self.width)
    }

    /// Checks that both parameters are equal, to the bit.
    pub(crate) fn check_alike(&self, client: &Client, what: &str) {
        let dense = self.pull_dense(client).expect("the dense one is there");
        let sparse = self.pull_sparse(client).expect("the sparse one is there");
        let differs = dense.chunks(self.width * 4).zip(sparse.chunks(self.width * 4)).position(|(one, two)| one != two);
        if let Some(row) = differs {
            let of = |whole: &[u8]| floats(&whole[row * self.width * 4..][..self.width * 4]);
            panic!("{what}: \"{}\" row {row} is {:?}, dense {:?}", self.name, of(&sparse), of(&dense));
        }
    }
}

pub(crate) fn push_rows(client: &Client, name: &str, rows: &Rows) -> Result<(), Failure> {
    let values = bytes(&rows.values);
    client.push_rows(&[GradientRows { name, element_type: Float32, ids: &rows.ids, values: &values }], None)
}

pub(crate) fn pull_rows(client: &Client, name: &str, ids: &[u64], width: usize) -> Result<Vec<u8>, Failure> {
    let mut values = vec![0; ids.len() * width * 4];
    client.pull_rows(&mut [DestinationRows { name, ids, values: &mut values }])?;
    Ok(values)
}

pub(crate) fn settings(text: &str) -> OptimizerSettings {
    OptimizerSettings::from_text(text).unwrap_or_else(|failure| panic!("{text}: {failure}"))
}

pub(crate) fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

pub(crate) fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// A number between -1 and 1 of some magnitude.
fn number(prng: &mut SeededPrng) -> f32 {
    let word = u16::try_from(prng.next() >> 48).expect("16 bits");
    let scale = f32::from(1_u16 << (prng.below(12)));
    (f32::from(word) / 32768.0 - 1.0) / scale
}
