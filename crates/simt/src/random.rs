//! SplitMix64: random words that a seed and a number decide, the same on every machine and on both sides.

/// How far apart the states of two numbers that follow each other are.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// A 64-bit word that depends on every bit of `x`: what the generator makes of the state `x`.
#[inline(always)]
pub const fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(STEP);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Number `index` of the generator that starts in the state `seed`: a counter, so that any part can be made
/// by any thread.
#[inline(always)]
pub const fn mixed(seed: u64, index: u64) -> u64 {
    mix(seed.wrapping_add(index.wrapping_mul(STEP)))
}

/// The generator, in a state.
#[derive(Clone, Copy, Debug)]
pub struct SplitMix64(pub u64);

impl SplitMix64 {
    /// The next word.
    #[inline(always)]
    pub const fn word(&mut self) -> u64 {
        let word = mix(self.0);
        self.0 = self.0.wrapping_add(STEP);
        word
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first words of the published program for the seed 1234567.
    #[test]
    fn words_are_those_of_the_published_generator() {
        let expected = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
            4_593_380_528_125_082_431,
            16_408_922_859_458_223_821,
        ];
        let mut random = SplitMix64(1_234_567);
        for (index, expected) in expected.into_iter().enumerate() {
            assert_eq!((random.word(), mixed(1_234_567, index as u64)), (expected, expected));
        }
    }
}
