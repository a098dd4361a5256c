//! The accelerator over CUDA.
mod checked;
mod sys;
