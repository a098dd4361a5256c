//! A bounded run of readers of outside bytes, with almost valid and invalid input. `PSERVER_SEED` replays,
//! `PSERVER_FULL=1` runs a hundred times as long.

use pserver_core::prng::Prng;

/// A reader: no input makes it panic. It says whether the bytes were read.
type Reading = fn(&[u8]) -> bool;

const CASES: u64 = 3_000;

/// Runs each reader on changes of its examples, which are valid inputs.
pub(crate) fn run_all(all: &[(&str, Reading)], examples: impl Fn(&str) -> Vec<Vec<u8>>) {
    let variable = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let seed = variable("PSERVER_SEED").unwrap_or(20_240);
    let cases = if variable("PSERVER_FULL") == Some(1) { 100 * CASES } else { CASES };
    println!("nonsense: PSERVER_SEED={seed}, {cases} cases of each");
    for (name, read) in all {
        run(name, *read, &examples(name), seed, cases);
    }
}

fn run(name: &str, read: Reading, examples: &[Vec<u8>], seed: u64, cases: u64) {
    let prng = &mut Prng(seed);
    for example in examples {
        assert!(read(example), "{name}: what is right is refused: {}", example.escape_ascii());
    }
    let mut known = 0;
    for case in 0..cases {
        let bytes = almost(prng, examples);
        let outcome = std::panic::catch_unwind(|| read(&bytes));
        let was_read = outcome.unwrap_or_else(|_| panic!("{name}, seed {seed}, case {case}: {}", bytes.escape_ascii()));
        known += u64::from(was_read);
    }
    // A fifth are examples as they are; some changes do no harm.
    assert!(cases / 8 < known && known < cases, "{name}: {known} of {cases} were read");
}

/// One of the examples with some places changed; sometimes random bytes alone.
fn almost(prng: &mut Prng, examples: &[Vec<u8>]) -> Vec<u8> {
    if prng.below(16) == 0 {
        return (0..prng.below(200)).map(|_| prng.next().to_le_bytes()[0]).collect();
    }
    let mut bytes = examples[prng.index(examples.len())].clone();
    for _ in 0..prng.below(4) {
        let at = prng.index(bytes.len() + 1);
        let end = (at + prng.index(12)).min(bytes.len());
        match prng.below(5) {
            0 => bytes.truncate(at),
            1 => drop(bytes.drain(at..end)),
            2 => {
                let again = bytes[at..end].to_vec();
                let to = prng.index(bytes.len() + 1);
                bytes.splice(to..to, again);
            }
            3 => bytes.insert(at, prng.choose(b"0-.e{}()[],=\"'\\#\n \0\x7f\xff")),
            _ if at < end => bytes[at] = prng.choose(b"019 aw@=<\xc3\x80").wrapping_add(prng.choose(&[0, 0, 1])),
            _ => {}
        }
    }
    bytes
}
