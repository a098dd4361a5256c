//! Generator for `cargo ci kernels`: `source` prints the shipped module's source, `manifest CUBIN PTX` the manifest of
//! these binaries, `standin` the environment in which a process loads the simulated driver, `rules ARCHITECTURE FOLDER`
//! compiles what tests on a device compile into a folder, by the NVRTC that the loader finds.

use std::env::args;
use std::io::{Write, stdout};

use pserver_kernels::conformance::{compiled, standin};
use pserver_kernels::cuda::{compile_ahead, shipped};

fn main() -> std::io::Result<()> {
    let arguments: Vec<String> = args().skip(1).collect();
    let text = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["source"] => shipped::module().text().to_owned(),
        ["manifest", cubin, ptx] => shipped::manifest(&std::fs::read(cubin)?, &std::fs::read(ptx)?),
        ["standin"] => {
            let variables = standin::everything(&shipped::module()).map_err(std::io::Error::other)?;
            variables.iter().map(|(name, value)| format!("{name}={value}\n")).collect()
        }
        ["rules", architecture, folder] => {
            let made = compile_ahead(compiled::sources(), architecture, folder.as_ref());
            made.map(|()| String::new()).map_err(std::io::Error::other)?
        }
        _ => panic!(
            "expected `source`, `standin`, `manifest` and two files, or `rules`, an architecture and a folder; found \
             {arguments:?}"
        ),
    };
    stdout().write_all(text.as_bytes())
}
