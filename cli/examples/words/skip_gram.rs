//! Skip-gram with negative sampling as a program: two tables of rows, one for words that predict and one for words that
//! are predicted, whose gradients are the rows that a step touched.
//!
//! Not here: the words and their pairs ([`super::text`]); where the tables live.

use pserver_core::dtype::ElementType::{Float32, Int64};
use pserver_core::error::Failure;
use pserver_core::rows::Initializer;
use pserver_program::{Builder, Dim, Graph, append_backward, append_optimizer};

use super::text::{NEGATIVES, VOCABULARY};

/// Elements of a word's row.
pub(crate) const WIDTH: u64 = 64;
/// The table of words that predict: what is kept in the end.
pub(crate) const TABLE: &str = "words/center";
/// The table of words that are predicted.
const CONTEXT_TABLE: &str = "words/context";

/// The program: data `center` (int64[batch, 1]), `target` (int64[batch, 1 + NEGATIVES]) and `label` (float32 of the
/// target's shape), the scalar `loss` in nats, both tables' gradients and their updates by `optimizer`, which is
/// configuration in protobuf's text form.
///
/// # Errors
/// When the configuration is none.
pub(crate) fn program(optimizer: &str, seed: u64) -> Result<Graph, Failure> {
    let p = Builder::new();
    let targets = [Dim::Batch, Dim::Fixed(1 + NEGATIVES as u64)];
    let center = p.data("center", Int64, [Dim::Batch, Dim::Fixed(1)]);
    let target = p.data("target", Int64, targets);
    let label = p.data("label", Float32, targets);
    let shape = [VOCABULARY as u64, WIDTH];
    // As in word2vec: what predicts begins small and random, what is predicted with nothing.
    let bound = 0.5 / 64.0;
    let centers = p.parameter(TABLE, Float32, &shape, Initializer::Uniform { low: -bound, high: bound }, seed);
    let contexts = p.parameter(CONTEXT_TABLE, Float32, &shape, Initializer::Zeros, seed);
    let products = p.mul(p.lookup_table(contexts, target), p.lookup_table(centers, center));
    let scores = p.reduce_sum(products, 2);
    let losses = p.sigmoid_cross_entropy(scores, label);
    let loss = p.named("loss", p.mean(losses));
    let loss = p.name(loss);
    let mut program = p.finish()?.into_program();
    let gradients = append_backward(&mut program, &loss)?;
    append_optimizer(&mut program, optimizer, &gradients)?;
    Graph::new(program)
}
