//! Numbers that trainers make of several parameters in the middle of a round, such as the norm of all gradients: the
//! shares that servers give for them, and the numbers that servers get.
//!
//! Every trainer makes each number of the same shares by the same ops, and sends it; servers take the first.

use std::collections::BTreeMap;

use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_program::{Elements, Tensor, VariableValue};

use super::server_parameters::{ServerParameter, ServerTotal};
use pserver_client::{Client, DestinationSlice, GradientSlice};

/// Bytes of a number on servers.
const NUMBER_BYTES: usize = 8;

impl ServerTotal {
    /// Declares the share and the total, after the parameter that reads them.
    pub(super) fn declare(&self, client: &Client) -> Result<(), Failure> {
        for (name, part) in [(&self.share, "Share"), (&self.total, "Total")] {
            let settings = OptimizerSettings::from_text(&format!("algorithm: 'sum' total_part: {part}"))?;
            client.init_param(name, ElementType::Float64, &[1], &[0; NUMBER_BYTES], &settings)?;
        }
        Ok(())
    }

    /// A share, as the program has it.
    fn received(&self, share: f64) -> Tensor {
        #[expect(clippy::cast_possible_truncation, reason = "servers have rounded it")]
        let elements = match self.element_type {
            ElementType::Float32 => Elements::Float32(vec![share as f32]),
            _ => Elements::Float64(vec![share]),
        };
        Tensor::new([], elements)
    }
}

/// The parameters and their totals of which trainers receive a share.
pub(super) fn shares(parameters: &[ServerParameter]) -> impl Iterator<Item = (&ServerParameter, &ServerTotal)> {
    parameters.iter().filter_map(|one| Some((one, one.total.as_ref().filter(|total| total.has_share)?)))
}

/// Waits for the shares of the round that was pushed last, in one call: their channels, servers and values.
pub(super) fn receive_shares(
    client: &Client,
    parameters: &[ServerParameter],
) -> Result<Vec<(String, u32, Tensor)>, Failure> {
    let mut numbers = vec![[0; NUMBER_BYTES]; shares(parameters).count()];
    let wanted = shares(parameters).zip(&mut numbers);
    let mut wanted: Vec<_> = wanted.map(|((_, total), number)| DestinationSlice::new(&total.share, number)).collect();
    client.pull(&mut wanted)?;
    let received = shares(parameters)
        .zip(&numbers)
        .map(|((one, total), number)| (total.share.clone(), one.server, total.received(f64::from_le_bytes(*number))));
    Ok(received.collect())
}

/// Sends the computed numbers, in one call. Servers recognise a repetition.
pub(super) fn push_totals(
    client: &Client,
    parameters: &[ServerParameter],
    computed: &BTreeMap<String, VariableValue>,
) -> Result<(), Failure> {
    let totals = parameters.iter().filter_map(|one| one.total.as_ref());
    let numbers = totals.filter_map(|total| match computed.get(&total.total)? {
        VariableValue::Dense(number) => match number.elements() {
            Elements::Float32(number) => Some((&total.total, f64::from(number[0]).to_le_bytes())),
            Elements::Float64(number) => Some((&total.total, number[0].to_le_bytes())),
            _ => None,
        },
        _ => None,
    });
    let numbers: Vec<(&String, [u8; NUMBER_BYTES])> = numbers.collect();
    if numbers.is_empty() {
        return Ok(());
    }
    let element_type = ElementType::Float64;
    let slices = numbers.iter().map(|(name, content)| GradientSlice { name, element_type, content });
    client.push(&slices.collect::<Vec<_>>(), None)
}
