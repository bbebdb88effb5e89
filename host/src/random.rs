//! Random choices that a seed decides, on every machine the same.

use kernels_gpu::mix;

/// A generator of random numbers (SplitMix64 from a counter).
#[derive(Clone, Debug)]
pub struct Random {
    seed: u64,
    index: u64,
}

impl Random {
    /// The generator of a seed.
    pub fn new(seed: u64) -> Self {
        Random::counting(seed, 0)
    }

    /// The same, past so many words.
    pub fn counting(seed: u64, index: u64) -> Self {
        Random { seed: mix(seed), index }
    }

    /// The generator of a seed for one of many uses, which a name and numbers tell apart.
    pub fn of(seed: u64, name: &str, numbers: &[u64]) -> Self {
        let bytes = name.bytes().map(u64::from);
        let seed =
            bytes.chain([u64::MAX]).chain(numbers.iter().copied()).fold(seed, |seed, x| mix(seed ^ mix(x)));
        Random::new(seed)
    }

    /// Any 64 bits.
    pub fn word(&mut self) -> u64 {
        self.index += 1;
        mix(self.seed ^ self.index)
    }

    /// A number below `n`, or 0 if that is 0.
    pub fn below(&mut self, n: usize) -> usize {
        // The high half of a product: for any n here its bias is under 2⁻³⁰.
        ((u128::from(self.word()) * n as u128) >> 64) as usize
    }

    /// In [0, 1).
    pub fn uniform(&mut self) -> f64 {
        (self.word() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// One of `items`, if there is any.
    pub fn choose<'a, T>(&mut self, items: &'a [T]) -> Option<&'a T> {
        items.get(self.below(items.len()))
    }

    /// All of `items` in another order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_below_comes_as_often() {
        let mut random = Random::new(1);
        let mut counts = [0u32; 7];
        (0..70_000).for_each(|_| counts[random.below(7)] += 1);
        // Five standard deviations of a binomial with 70,000 draws.
        assert!(counts.iter().all(|count| count.abs_diff(10_000) < 470), "{counts:?}");
        assert_eq!((random.below(1), random.below(0)), (0, 0));
        assert!((0..1000).map(|_| random.uniform()).all(|x| (0.0..1.0).contains(&x)));
    }

    #[test]
    fn orders_come_as_often_and_uses_differ() {
        let mut random = Random::new(2);
        let mut counts = std::collections::BTreeMap::<Vec<u8>, u32>::new();
        for _ in 0..6000 {
            let mut items = vec![0, 1, 2];
            random.shuffle(&mut items);
            *counts.entry(items).or_default() += 1;
        }
        assert!(counts.len() == 6 && counts.values().all(|count| count.abs_diff(1000) < 145), "{counts:?}");
        let first = |name: &str, numbers: &[u64]| Random::of(3, name, numbers).word();
        assert_eq!(first("a", &[1, 2]), first("a", &[1, 2]));
        let others = [first("a", &[2, 1]), first("b", &[1, 2]), first("a", &[1]), first("", &[1, 2])];
        assert!(others.iter().all(|other| *other != first("a", &[1, 2])), "{others:?}");
    }
}
