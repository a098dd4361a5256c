//! The handwritten digits that the quickstart learns, carried inside the program.
//!
//! Not here: the network that learns them; see [`super::network`]. Where the data comes from and under which
//! licence stands in `cli/data/README.md`.

use std::io::Read;

use anyhow::{Context, Result, ensure};
use flate2::read::GzDecoder;

use super::shuffler::Shuffler;

/// Pixels of one digit: 8 rows of 8.
pub const PIXELS: usize = 64;
/// The digits 0 to 9.
pub const CLASSES: usize = 10;
/// Digits in the data.
pub const ROWS: usize = 1797;
/// Digits to learn from; the rest are held out.
pub const TRAINING_ROWS: usize = 1437;

/// A pixel's darkest value in the data.
const PIXEL_MAX: u8 = 16;
/// The order is the same in every run, so that accuracies can be compared.
const SPLIT_SEED: u64 = 0x5eed_d161;
const PACKED: &[u8] = include_bytes!("../../data/digits.csv.gz");

/// One handwritten digit.
#[derive(Clone, Debug, PartialEq)]
pub struct Digit {
    /// Darkness, 0 to 1, row by row from the top left.
    pub pixels: [f32; PIXELS],
    /// Which digit it is, below [`CLASSES`].
    pub label: usize,
}

/// All digits, shuffled and split once and for all.
#[derive(Clone, Debug)]
pub struct Digits {
    training: Vec<Digit>,
    held_out: Vec<Digit>,
}

impl Digits {
    /// Unpacks and checks the data that the program carries.
    ///
    /// # Errors
    /// The line and column at fault, when the data is not what it was when the program was built.
    pub fn load() -> Result<Self> {
        let mut text = String::new();
        GzDecoder::new(PACKED).read_to_string(&mut text).context("the packed digits cannot be unpacked")?;
        let mut training = parse(&text)?;
        ensure!(training.len() == ROWS, "the digits have {} rows; expected {ROWS}", training.len());
        Shuffler::new(SPLIT_SEED).shuffle(&mut training);
        let held_out = training.split_off(TRAINING_ROWS);
        Ok(Self { training, held_out })
    }

    /// The digits that no trainer sees.
    #[must_use]
    pub fn held_out(&self) -> Vec<&Digit> {
        self.held_out.iter().collect()
    }

    /// The share of trainer `trainer` out of `trainers`: every `trainers`-th training digit. The shares are
    /// disjoint, cover everything, and differ in length by at most one.
    ///
    /// # Errors
    /// When there is no such trainer, or there are more trainers than digits.
    pub fn part(&self, trainer: u32, trainers: u32) -> Result<Vec<&Digit>> {
        ensure!(trainer < trainers, "there is no trainer {trainer}; {trainers} trainers count from 0");
        let (first, step) = (usize::try_from(trainer)?, usize::try_from(trainers)?);
        ensure!(
            step <= self.training.len(),
            "{trainers} trainers cannot share {} digits; expected at most one trainer a digit",
            self.training.len()
        );
        Ok(self.training.iter().skip(first).step_by(step).collect())
    }
}

fn parse(text: &str) -> Result<Vec<Digit>> {
    text.lines()
        .enumerate()
        .map(|(index, line)| parse_line(line).with_context(|| format!("digits, line {}", index + 1)))
        .collect()
}

fn parse_line(line: &str) -> Result<Digit> {
    let fields: Vec<&str> = line.split(',').collect();
    ensure!(fields.len() == PIXELS + 1, "{} columns; expected {PIXELS} pixels and a label", fields.len());
    let mut pixels = [0.0; PIXELS];
    for (column, (pixel, field)) in pixels.iter_mut().zip(&fields).enumerate() {
        let value = bounded(field, PIXEL_MAX).with_context(|| format!("column {}", column + 1))?;
        *pixel = f32::from(value) / f32::from(PIXEL_MAX);
    }
    let label = bounded(fields[PIXELS], 9).context("the label")?;
    Ok(Digit { pixels, label: usize::from(label) })
}

fn bounded(field: &str, most: u8) -> Result<u8> {
    let value = field.parse().ok().filter(|&value: &u8| value <= most);
    value.with_context(|| format!("\"{field}\"; expected a whole number from 0 to {most}"))
}

#[cfg(test)]
mod tests {
    use super::{CLASSES, Digit, Digits, ROWS, TRAINING_ROWS, parse};

    fn row(change: impl Fn(&mut Vec<String>)) -> String {
        let mut fields: Vec<String> = (0..65).map(|column| (column % 10).to_string()).collect();
        change(&mut fields);
        fields.join(",")
    }

    fn check_refused(line: &str, expected: &str) {
        let text = format!("{}\n{line}", row(|_| ()));
        let error = format!("{:#}", parse(&text).expect_err("the second line is wrong"));
        assert_eq!(error, format!("digits, line 2: {expected}"));
    }

    #[test]
    fn a_wrong_line_is_refused_by_line_and_column() {
        check_refused("7", "1 columns; expected 64 pixels and a label");
        check_refused(&row(|fields| fields.truncate(64)), "64 columns; expected 64 pixels and a label");
        check_refused(&row(|fields| fields[2] = "17".into()), "column 3: \"17\"; expected a whole number from 0 to 16");
        check_refused(
            &row(|fields| fields[63] = "1.5".into()),
            "column 64: \"1.5\"; expected a whole number from 0 to 16",
        );
        check_refused(
            &row(|fields| fields[64] = "10".into()),
            "the label: \"10\"; expected a whole number from 0 to 9",
        );
    }

    #[test]
    fn the_split_is_the_same_every_time_and_both_halves_know_every_digit() {
        let (first, second) = (Digits::load().unwrap(), Digits::load().unwrap());
        assert_eq!(first.training, second.training);
        assert_eq!(first.training.len(), TRAINING_ROWS);
        assert_eq!(first.held_out.len(), ROWS - TRAINING_ROWS);
        for half in [&first.training, &first.held_out] {
            let share = half.len() / CLASSES;
            for label in 0..CLASSES {
                let count = half.iter().filter(|digit| digit.label == label).count();
                assert!(count > share / 2 && count < share * 2, "{count} of {label}");
            }
        }
    }

    #[test]
    fn the_parts_cover_the_training_digits_once() {
        let digits = Digits::load().unwrap();
        for trainers in [1, 2, 4, 7, 1437] {
            let mut seen: Vec<*const Digit> = (0..trainers)
                .flat_map(|trainer| digits.part(trainer, trainers).unwrap())
                .map(std::ptr::from_ref)
                .collect();
            seen.sort_unstable();
            seen.dedup();
            assert_eq!(seen.len(), TRAINING_ROWS);
        }
    }

    #[test]
    fn a_trainer_that_does_not_exist_has_no_part() {
        let digits = Digits::load().unwrap();
        let error = |trainer, trainers| digits.part(trainer, trainers).unwrap_err().to_string();
        assert_eq!(error(4, 4), "there is no trainer 4; 4 trainers count from 0");
        assert!(error(0, 1438).starts_with("1438 trainers cannot share 1437 digits"));
    }
}
