//! The words of the King James Bible, and the pairs of them that skip-gram with negative sampling learns from.
//!
//! A word that is there predicts the words around it, and not words drawn at random (Mikolov et al., "Distributed
//! Representations of Words and Phrases and their Compositionality", 2013). Frequent words are thinned out, the
//! window's width is drawn for every word, and the random words are drawn by count to the power of 3/4, all as there.
//!
//! Not here: the tables that are learned, and the program that learns them. Where the text comes from and under which
//! licence stands in `cli/data/README.md`.

use std::collections::BTreeMap;
use std::io::Read;

use anyhow::{Context, Result, ensure};
use flate2::read::GzDecoder;
use pserver_cli::quickstart::Shuffler;

/// Verses in the text.
pub(crate) const VERSES: usize = 31_102;
/// Pairs in one pass over the text, to within a hundredth: the words that stay and the windows' widths are random.
pub(crate) const EPOCH_PAIRS: u32 = 2_326_000;
/// Distinct words, in lower case.
pub(crate) const VOCABULARY: usize = 12_762;
/// Words drawn at random for every pair.
pub(crate) const NEGATIVES: usize = 5;

/// Most words to either side of a word that it predicts.
const WINDOW: usize = 5;
/// Of words more frequent than this share of the text, some are left out.
const THINNING: f64 = 1e-3;
/// The power of a word's count by which it is drawn at random.
const NEGATIVE_POWER: f64 = 0.75;
const PACKED: &[u8] = include_bytes!("../../data/kjv.txt.gz");

/// A word by its rank: 0 is the most frequent, and of equally frequent ones the first by the alphabet is before.
pub(crate) type Word = u32;

/// The whole text, in words.
#[derive(Clone, Debug)]
pub(crate) struct Words {
    vocabulary: Vec<String>,
    verses: Vec<Vec<Word>>,
    /// The share of a word's appearances that is kept.
    kept: Vec<f64>,
    /// For each word, the weights of those up to it added up.
    weights: Vec<f64>,
}

/// Pairs for one step: for each a word, and the words it is compared with.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Pairs {
    /// The words that predict.
    pub(crate) centers: Vec<i64>,
    /// For each center one word of its surroundings, then [`NEGATIVES`] random ones.
    pub(crate) targets: Vec<i64>,
    /// For each target one if it was there, zero if it was drawn.
    pub(crate) labels: Vec<f32>,
}

impl Words {
    /// Unpacks and counts the text.
    ///
    /// # Errors
    /// The line at fault, when the text is not what it was when the program was built.
    pub(crate) fn load() -> Result<Self> {
        let mut text = String::new();
        GzDecoder::new(PACKED).read_to_string(&mut text).context("the packed text cannot be unpacked")?;
        let words = Self::of(&text)?;
        let (verses, distinct) = (words.verses.len(), words.vocabulary.len());
        ensure!(verses == VERSES, "the text has {verses} verses; expected {VERSES}");
        ensure!(distinct == VOCABULARY, "the text has {distinct} distinct words; expected {VOCABULARY}");
        Ok(words)
    }

    fn of(text: &str) -> Result<Self> {
        let verses = text.lines().enumerate().map(|(index, line)| {
            let (_, verse) =
                line.split_once(' ').with_context(|| format!("line {}: a verse without words", index + 1))?;
            Ok(split(verse))
        });
        let verses = verses.collect::<Result<Vec<Vec<String>>>>()?;
        let mut counts: BTreeMap<&str, u32> = BTreeMap::new();
        for word in verses.iter().flatten() {
            *counts.entry(word).or_default() += 1;
        }
        let mut ranked: Vec<(&str, u32)> = counts.into_iter().collect();
        ranked.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        let ranks: BTreeMap<&str, Word> = ranked.iter().zip(0..).map(|((word, _), rank)| (*word, rank)).collect();
        let total: f64 = ranked.iter().map(|(_, count)| f64::from(*count)).sum();
        let kept = |count: u32| (THINNING * total / f64::from(count)).sqrt().min(1.0);
        let mut sum = 0.0;
        let mut up_to = |count: u32| {
            sum += f64::from(count).powf(NEGATIVE_POWER);
            sum
        };
        Ok(Self {
            vocabulary: ranked.iter().map(|(word, _)| (*word).to_owned()).collect(),
            kept: ranked.iter().map(|(_, count)| kept(*count)).collect(),
            weights: ranked.iter().map(|(_, count)| up_to(*count)).collect(),
            verses: verses.iter().map(|verse| verse.iter().map(|word| ranks[word.as_str()]).collect()).collect(),
        })
    }

    /// The words, the most frequent first.
    #[must_use]
    pub(crate) fn vocabulary(&self) -> &[String] {
        &self.vocabulary
    }

    /// The rank of a word, if the text has it.
    #[must_use]
    pub(crate) fn find(&self, word: &str) -> Option<Word> {
        let place = self.vocabulary.iter().position(|known| known == word)?;
        Word::try_from(place).ok()
    }

    /// The pairs of one epoch that trainer `trainer` out of `trainers` learns from: those of every `trainers`-th verse,
    /// in an order that follows from `seed`, `trainer` and `epoch`.
    ///
    /// # Errors
    /// When there is no such trainer.
    pub(crate) fn pairs(&self, trainer: u32, trainers: u32, epoch: u32, seed: u64) -> Result<EpochPairs<'_>> {
        ensure!(trainer < trainers, "there is no trainer {trainer}; {trainers} trainers count from 0");
        let (first, step) = (usize::try_from(trainer)?, usize::try_from(trainers)?);
        let mut order: Vec<usize> = (first..self.verses.len()).step_by(step).collect();
        let mut shuffler = Shuffler::of(&[seed, u64::from(trainer), u64::from(epoch)]);
        shuffler.shuffle(&mut order);
        Ok(EpochPairs { words: self, order, shuffler, waiting: Vec::new() })
    }

    /// A word by the weights; `share` is in `0.0 .. 1.0`.
    fn draw(&self, share: f64) -> Word {
        let sum = self.weights.last().copied().unwrap_or(0.0);
        let place = self.weights.partition_point(|up_to| *up_to <= share * sum);
        Word::try_from(place.min(self.weights.len() - 1)).expect("ranks are 32 bits")
    }
}

/// The pairs of one epoch, verse by verse.
pub(crate) struct EpochPairs<'a> {
    words: &'a Words,
    /// The verses that are left, the last one first.
    order: Vec<usize>,
    shuffler: Shuffler,
    /// Pairs of verses that were begun: a word and one of its surroundings.
    waiting: Vec<(Word, Word)>,
}

impl EpochPairs<'_> {
    /// The next `count` pairs; none when fewer are left.
    pub(crate) fn next(&mut self, count: usize) -> Option<Pairs> {
        while self.waiting.len() < count {
            let verse = self.order.pop()?;
            self.begin(verse);
        }
        let mut pairs = Pairs::default();
        for (center, context) in self.waiting.drain(..count).collect::<Vec<_>>() {
            pairs.centers.push(center.into());
            pairs.targets.push(context.into());
            pairs.labels.push(1.0);
            for _ in 0..NEGATIVES {
                pairs.targets.push(self.words.draw(self.shuffler.share()).into());
                pairs.labels.push(0.0);
            }
        }
        Some(pairs)
    }

    fn begin(&mut self, verse: usize) {
        let words = self.words;
        let mut stays = |word: &&Word| self.shuffler.share() < words.kept[**word as usize];
        let verse: Vec<Word> = words.verses[verse].iter().filter(&mut stays).copied().collect();
        for (place, center) in verse.iter().enumerate() {
            let width = 1 + self.shuffler.below(WINDOW);
            let around = place.saturating_sub(width)..(place + width + 1).min(verse.len());
            let pairs = around.filter(|other| *other != place).map(|other| (*center, verse[other]));
            self.waiting.extend(pairs);
        }
    }
}

/// The words nearest to `word` by the angle between their rows, the nearest first, with the cosine.
///
/// # Panics
/// When the table does not have a row of `width` elements for the word.
#[must_use]
pub(crate) fn nearest(table: &[f32], width: usize, word: Word, count: usize) -> Vec<(Word, f32)> {
    let row = |word: usize| &table[word * width..(word + 1) * width];
    let dot = |left: &[f32], right: &[f32]| left.iter().zip(right).map(|(left, right)| left * right).sum::<f32>();
    let own = row(word as usize);
    let cosine = |other: usize| dot(own, row(other)) / (dot(own, own) * dot(row(other), row(other))).sqrt();
    let others = (0..table.len() / width).filter(|other| *other != word as usize);
    let mut near: Vec<(Word, f32)> =
        others.map(|other| (Word::try_from(other).expect("ranks are 32 bits"), cosine(other))).collect();
    near.sort_by(|left, right| right.1.total_cmp(&left.1));
    near.truncate(count);
    near
}

/// Words are letters, with an apostrophe between them at most, in lower case.
fn split(verse: &str) -> Vec<String> {
    let is_part = |letter: char| letter.is_ascii_alphabetic() || letter == '\'';
    let parts = verse.split(|letter| !is_part(letter)).map(|part| part.trim_matches('\''));
    parts.filter(|part| !part.is_empty()).map(str::to_ascii_lowercase).collect()
}

#[cfg(test)]
mod tests {
    use super::{EPOCH_PAIRS, NEGATIVES, Pairs, Words, nearest, split};

    #[test]
    fn the_text_is_whole_and_ranked() {
        let words = Words::load().unwrap();
        assert_eq!(words.vocabulary()[..5], ["the", "and", "of", "to", "that"]);
        assert_eq!(words.find("lord"), Some(13));
        assert_eq!(words.find("telephone"), None);
        assert_eq!(words.verses.iter().map(Vec::len).sum::<usize>(), 789_684);
    }

    #[test]
    fn words_are_letters_in_lower_case() {
        assert_eq!(
            split("And God said, Let there be: the LORD's 'light'."),
            ["and", "god", "said", "let", "there", "be", "the", "lord's", "light"]
        );
    }

    #[test]
    fn a_line_without_words_is_named() {
        let error = Words::of("Ge1:1 In the beginning\nGe1:2").unwrap_err();
        assert_eq!(error.to_string(), "line 2: a verse without words");
    }

    #[test]
    fn trainers_share_the_verses_and_the_seed_gives_the_order() {
        let words = Words::of("a one two\nb three four\nc five six").unwrap();
        let all = |trainer, seed| {
            let mut pairs = words.pairs(trainer, 2, 0, seed).unwrap();
            let mut seen = Pairs::default();
            while let Some(next) = pairs.next(1) {
                seen.centers.extend(next.centers);
                seen.targets.extend(next.targets.first());
            }
            seen
        };
        let named = |ids: &[i64]| {
            let mut named: Vec<&str> =
                ids.iter().map(|id| &*words.vocabulary()[usize::try_from(*id).unwrap()]).collect();
            named.sort_unstable();
            named.dedup();
            named.join(" ")
        };
        assert!("five one six two".contains(&named(&all(0, 1).centers)));
        assert!("four three".contains(&named(&all(1, 1).centers)));
        assert_eq!(all(0, 1), all(0, 1));
        assert!(words.pairs(2, 2, 0, 1).is_err());
    }

    #[test]
    fn a_pair_is_one_word_that_was_there_and_random_ones() {
        let words = Words::load().unwrap();
        let pairs = words.pairs(0, 2, 0, 1).unwrap().next(100).unwrap();
        assert_eq!((pairs.centers.len(), pairs.targets.len()), (100, 100 * (NEGATIVES + 1)));
        for labels in pairs.labels.chunks_exact(NEGATIVES + 1) {
            assert_eq!(labels, [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
        }
    }

    #[test]
    fn a_pass_over_the_text_has_as_many_pairs_as_is_said() {
        let words = Words::load().unwrap();
        let mut pairs = words.pairs(0, 1, 0, 3).unwrap();
        let batches = std::iter::from_fn(|| pairs.next(100)).count();
        let said = usize::try_from(EPOCH_PAIRS).unwrap();
        assert!((batches * 100).abs_diff(said) < said / 100, "{batches} batches of 100");
    }

    #[test]
    fn random_words_are_drawn_by_their_weight() {
        let words = Words::of("a x x x x x x x x x x x x x x x x y").unwrap();
        // Sixteen to the power of 3/4 is eight: eight parts of nine.
        assert_eq!([0.0, 0.88, 0.89, 0.999].map(|share| words.draw(share)), [0, 0, 1, 1]);
    }

    #[test]
    fn the_nearest_row_points_the_same_way() {
        let table = [1.0, 0.0, 0.0, 1.0, 5.0, 1.0, -1.0, 0.0];
        let near = nearest(&table, 2, 0, 3);
        assert_eq!(near.iter().map(|(word, _)| *word).collect::<Vec<_>>(), [2, 1, 3]);
        assert!((near[0].1 - 5.0 / 26.0_f32.sqrt()).abs() < 1e-6);
    }
}
