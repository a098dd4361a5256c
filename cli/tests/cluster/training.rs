//! Tensors whose values and gradients follow from their name, the trainer and the round.

use pserver_client::{Client, DestinationSlice, GradientSlice};
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;

use super::seeded::SeededPrng;

/// A parameter of a test.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) element_type: ElementType,
    pub(crate) elements: usize,
    /// Its optimizer message in protobuf's text form.
    pub(crate) settings: String,
    pub(crate) begins_at_zero: bool,
}

impl Tensor {
    pub(crate) fn new(name: &str, element_type: ElementType, elements: usize, settings: &str) -> Self {
        Self { name: name.to_owned(), element_type, elements, settings: settings.to_owned(), begins_at_zero: false }
    }

    pub(crate) fn zeroed(self) -> Self {
        Self { begins_at_zero: true, ..self }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.elements * usize::try_from(self.element_type.bytes()).expect("an element is short")
    }

    /// The value before the first round.
    pub(crate) fn initial(&self) -> Vec<u8> {
        if self.begins_at_zero { vec![0; self.bytes()] } else { self.filled(0) }
    }

    /// The gradient of `trainer` in `round`, the same in every process.
    pub(crate) fn gradient(&self, trainer: u32, round: u64) -> Vec<u8> {
        self.filled((round << 16) | u64::from(trainer + 1))
    }

    /// A tensor with the same number in every element.
    pub(crate) fn constant(&self, number: f32) -> Vec<u8> {
        self.each(|| number.into())
    }

    /// Numbers of every magnitude between -1 and 1, so that their sum depends on the order in which it is made.
    fn filled(&self, salt: u64) -> Vec<u8> {
        let name = self.name.bytes().fold(salt, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
        let mut prng = SeededPrng::new(name);
        self.each(move || {
            let (high, low) = (prng.next() >> 32, prng.next() >> 32);
            let word = |word: u64| f64::from(u32::try_from(word).expect("32 bits"));
            let fraction = (word(high) + word(low) / f64::from(1_u32 << 31) / 2.0) / f64::from(1_u32 << 31) - 1.0;
            fraction / f64::from(1_u32 << (high % 20))
        })
    }

    fn each(&self, mut number: impl FnMut() -> f64) -> Vec<u8> {
        #[expect(clippy::cast_possible_truncation, reason = "the nearest one will do")]
        let single = |number: f64| (number as f32).to_le_bytes();
        match self.element_type {
            ElementType::Float64 => (0..self.elements).flat_map(|_| number().to_le_bytes()).collect(),
            ElementType::Float32 => (0..self.elements).flat_map(|_| single(number())).collect(),
            other => panic!("no test has a tensor of {other}"),
        }
    }
}

/// Initialises the tensors, or waits until another trainer has; true when this one did. A trainer from which the
/// initialisation was taken begins anew.
pub(crate) fn begin(client: &Client, tensors: &[Tensor]) -> Result<bool, Failure> {
    loop {
        if !client.begin_init(&OptimizerSettings::default())? {
            return Ok(false);
        }
        match initialise(client, tensors) {
            Ok(()) => return Ok(true),
            Err(failure) => println!("the initialisation begins anew: {failure}"),
        }
    }
}

/// Declares every tensor and finishes, after `begin_init` has chosen this client.
pub(crate) fn initialise(client: &Client, tensors: &[Tensor]) -> Result<(), Failure> {
    tensors.iter().try_for_each(|tensor| declare(client, tensor))?;
    client.finish_init()
}

pub(crate) fn declare(client: &Client, tensor: &Tensor) -> Result<(), Failure> {
    let settings = OptimizerSettings::from_text(&tensor.settings).expect("the test's optimizers are right");
    client.init_param(&tensor.name, tensor.element_type, &[], &tensor.initial(), &settings)
}

/// Pushes the gradients of `trainer` in `round` for all tensors, in one call.
pub(crate) fn push(client: &Client, tensors: &[Tensor], trainer: u32, round: u64) -> Result<(), Failure> {
    let gradients: Vec<Vec<u8>> = tensors.iter().map(|tensor| tensor.gradient(trainer, round)).collect();
    client.push(&given(tensors, &gradients), None)
}

/// Pushes these gradients, and fetches the parameters after the round.
pub(crate) fn push_pull(client: &Client, tensors: &[Tensor], trainer: u32, round: u64) -> Result<(), Failure> {
    let gradients: Vec<Vec<u8>> = tensors.iter().map(|tensor| tensor.gradient(trainer, round)).collect();
    let mut values = places(tensors);
    client.push_pull(&given(tensors, &gradients), None, &mut wanted(tensors, &mut values))
}

/// Fetches every tensor.
pub(crate) fn pull(client: &Client, tensors: &[Tensor]) -> Result<Vec<Vec<u8>>, Failure> {
    let mut values = places(tensors);
    client.pull(&mut wanted(tensors, &mut values))?;
    Ok(values)
}

pub(crate) fn given<'a>(tensors: &'a [Tensor], contents: &'a [Vec<u8>]) -> Vec<GradientSlice<'a>> {
    let one = |(tensor, content): (&'a Tensor, &'a Vec<u8>)| GradientSlice {
        name: &tensor.name,
        element_type: tensor.element_type,
        content,
    };
    tensors.iter().zip(contents).map(one).collect()
}

pub(crate) fn places(tensors: &[Tensor]) -> Vec<Vec<u8>> {
    tensors.iter().map(|tensor| vec![0; tensor.bytes()]).collect()
}

pub(crate) fn wanted<'a>(tensors: &'a [Tensor], contents: &'a mut [Vec<u8>]) -> Vec<DestinationSlice<'a>> {
    let one = |(tensor, content): (&'a Tensor, &'a mut Vec<u8>)| DestinationSlice::new(&tensor.name, content);
    tensors.iter().zip(contents).map(one).collect()
}
