//! Numbers that look random and follow from a seed (SplitMix64).

pub(super) struct Luck(pub(super) u64);

impl Luck {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Below `end`, which is above zero.
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub(super) fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        let place = self.below(choices.len() as u64);
        choices[usize::try_from(place).expect("few choices")]
    }

    /// In [-1, 1), a multiple of 1/128.
    pub(super) fn real(&mut self) -> f32 {
        f32::from(i8::from_le_bytes([self.next().to_le_bytes()[0]])) / 128.0
    }
}
