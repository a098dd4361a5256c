//! The library's client as the quickstart's trainers use it.

use anyhow::Result;
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType;
use pserver_core::wire::Address;

use super::trainer::{self, ParameterClient, TrainerArgs};
use crate::client::{Client, ClientOptions, Given, Wanted};

/// The program `pserver quickstart-trainer`.
///
/// # Errors
/// What stopped the training.
pub fn train(args: &TrainerArgs) -> Result<()> {
    trainer::run(args, |args| {
        let coordinator = Address::parse(&args.coordinator)?;
        let client = Client::new(ClientOptions { trainer: Some(args.trainer), ..ClientOptions::new(coordinator) })?;
        Ok(Library { client, trainer: args.trainer })
    })
}

struct Library {
    client: Client,
    trainer: u32,
}

impl ParameterClient for Library {
    fn begin_init(&mut self) -> Result<bool> {
        Ok(self.client.begin_init(&OptimizerSettings::default())?)
    }

    fn init(&mut self, name: &str, shape: &[u64], values: &[f32]) -> Result<()> {
        let (content, settings) = (bytemuck::cast_slice(values), OptimizerSettings::default());
        Ok(self.client.init_param(name, ElementType::Float32, shape, content, &settings)?)
    }

    fn finish_init(&mut self) -> Result<()> {
        Ok(self.client.finish_init()?)
    }

    fn push(&mut self, gradients: &[(&str, &[f32])]) -> Result<()> {
        let all: Vec<Given<'_>> = gradients
            .iter()
            .map(|(name, values)| Given {
                name,
                element_type: ElementType::Float32,
                content: bytemuck::cast_slice(values),
            })
            .collect();
        Ok(self.client.push(&all, None)?)
    }

    fn pull(&mut self, into: &mut [(&str, &mut [f32])]) -> Result<()> {
        let mut all: Vec<Wanted<'_>> =
            into.iter_mut().map(|(name, values)| Wanted { name, content: bytemuck::cast_slice_mut(values) }).collect();
        Ok(self.client.pull(&mut all)?)
    }

    fn leave(&mut self) -> Result<()> {
        Ok(self.client.leave()?)
    }

    fn bytes_moved(&self) -> u64 {
        let moved = self.client.moved();
        moved.sent + moved.received
    }

    fn trainer(&self) -> u32 {
        self.trainer
    }

    fn save(&mut self, path: &str) -> Result<String> {
        Ok(self.client.save_model(path)?.0)
    }
}
