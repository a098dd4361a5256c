//! The `psbench` program; see `docs/BENCH.md`.

fn main() -> std::process::ExitCode {
    pserver_bench::program::main()
}
