//! Gives the shared library the name under which programs ask for it at run time.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libpaddle_pserver.so.1");
}
