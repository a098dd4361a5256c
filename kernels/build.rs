//! Packs the committed CUDA binaries, a fifth of their bytes, for `src/cuda/shipped.rs`.

use std::fs::{self, File};
use std::path::Path;

use flate2::Compression;
use flate2::write::ZlibEncoder;

fn main() -> std::io::Result<()> {
    let into = std::env::var("OUT_DIR").expect("cargo names the folder");
    for name in ["pserver.sm_90.cubin", "pserver.compute_80.ptx"] {
        let from = format!("gen/{name}");
        println!("cargo::rerun-if-changed={from}");
        let packed = File::create(Path::new(&into).join(format!("{name}.z")))?;
        let mut packer = ZlibEncoder::new(packed, Compression::best());
        std::io::copy(&mut fs::read(&from)?.as_slice(), &mut packer)?;
        packer.finish()?;
    }
    println!("cargo::rerun-if-changed=build.rs");
    Ok(())
}
