//! Generator for `cargo ci kernels`: `source` prints the shipped module's source, `manifest CUBIN PTX` the manifest of
//! these binaries, `standin` the environment in which a process loads the simulated driver.

use std::env::args;
use std::io::{Write, stdout};

use pserver_kernels::conformance::standin;
use pserver_kernels::cuda::shipped;

fn main() -> std::io::Result<()> {
    let arguments: Vec<String> = args().skip(1).collect();
    let text = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["source"] => shipped::module().text().to_owned(),
        ["manifest", cubin, ptx] => shipped::manifest(&std::fs::read(cubin)?, &std::fs::read(ptx)?),
        ["standin"] => {
            let told = standin::everything(&shipped::module()).map_err(std::io::Error::other)?;
            told.iter().map(|(name, value)| format!("{name}={value}\n")).collect()
        }
        _ => panic!("expected `source`, `standin`, or `manifest` and two files; found {arguments:?}"),
    };
    stdout().write_all(text.as_bytes())
}
