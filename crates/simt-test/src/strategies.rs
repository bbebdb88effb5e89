//! What to draw: bit patterns with the edges of each type, and lengths around the sizes of warps and blocks.

use crate::draws::random;
use crate::element::{Element, Layout};
use proptest::strategy::{NewTree, Strategy, ValueTree};
use proptest::test_runner::TestRunner;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Bound, RangeBounds};

/// Any bits of `T`, edges more often than chance has them: both zeros, subnormal numbers, powers of two and
/// their neighbours, the largest number, infinities, NaN with payloads; of integers 0, both ends, powers of
/// two and their neighbours.
///
/// ```
/// use proptest::strategy::Strategy;
/// let halves = simt_test::bits::<u16>().prop_map(half::f16::from_bits);
/// # let _ = halves;
/// ```
pub fn bits<T: Element>() -> Bits<T> {
    Bits { finite: false, element: PhantomData }
}

/// The same without infinities and NaN.
pub fn finite<T: Element>() -> Bits<T> {
    Bits { finite: true, element: PhantomData }
}

/// A number from `range`, for lengths and extents: its ends, multiples of 32, 128 and 256 and powers of two,
/// their neighbours on both sides, and any other. It shrinks to the smallest that fails.
///
/// A range without an end is taken to end at 4096 past its start; an empty range gives its start.
pub fn sizes(range: impl RangeBounds<usize>) -> Sizes {
    multiples(1, range)
}

/// The multiples of `of` in `range`, drawn as [`sizes`] draws. Without one in the range, the one behind it.
pub fn multiples(of: usize, range: impl RangeBounds<usize>) -> Sizes {
    let start = match range.start_bound() {
        Bound::Included(start) => *start,
        Bound::Excluded(before) => before.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(end) => *end,
        Bound::Excluded(behind) => behind.saturating_sub(1),
        Bound::Unbounded => start.saturating_add(4096),
    };
    let of = of.max(1);
    let first = start.div_ceil(of);
    Sizes { of, first, last: (end / of).max(first) }
}

/// See [`bits`] and [`finite`].
#[derive(Clone, Copy, Debug)]
pub struct Bits<T> {
    finite: bool,
    element: PhantomData<T>,
}

/// See [`sizes`] and [`multiples`].
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    of: usize,
    /// In units of `of`.
    first: usize,
    last: usize,
}

impl<T: Element> Strategy for Bits<T> {
    type Tree = Candidates<T>;
    type Value = T;

    fn new_tree(&self, runner: &mut TestRunner) -> NewTree<Self> {
        let bits = match T::FLOAT {
            Some(layout) => float::<T>(runner, layout, self.finite),
            None => integer::<T>(runner),
        };
        let finite = self.finite;
        Ok(Candidates::new(T::of_bits(bits), move |x: T| simpler(x, finite)))
    }
}

/// All bits of `T`.
fn mask<T: Element>() -> u64 {
    u64::MAX >> (64 - T::BITS)
}

fn float<T: Element>(runner: &mut TestRunner, layout: Layout, finite: bool) -> u64 {
    let (choice, number) = (random(runner), random(runner));
    let (one, infinity) = (layout.one(), layout.infinity());
    let mantissa = number & ((1 << layout.mantissa) - 1);
    let near = |bits: u64| bits.wrapping_add(number % 3).wrapping_sub(1);
    let size = match choice % 100 {
        // Every bit by chance.
        0..35 => number & (layout.sign() - 1),
        // Numbers of 1/16 to 16, most mantissas of which are no round ones.
        35..60 => one.wrapping_add((number >> 60 << layout.mantissa) | mantissa) - (8 << layout.mantissa),
        // Halves of small integers: ties.
        60..70 => T::of_bits(0).bits() | half_integers::<T>(number % 17),
        70..76 => 0,
        76..80 => one,
        // Powers of two and their neighbours.
        80..86 => near(((number >> 32) % (infinity >> layout.mantissa)).max(1) << layout.mantissa),
        // The smallest, the largest and any subnormal number; the smallest normal one.
        86..88 => 1,
        88..90 => near(1 << layout.mantissa),
        90..92 => mantissa,
        // The largest numbers.
        92..95 => infinity - 1 - number % 3,
        95..97 => infinity,
        // NaN: quiet, and with any payload.
        97..98 => infinity | 1 << (layout.mantissa - 1),
        _ => infinity | mantissa.max(1),
    };
    let size = if finite && size >= infinity { infinity - 1 - mantissa } else { size };
    if choice >> 63 == 0 { size } else { size | layout.sign() }
}

/// The bits of `halves / 2`.
fn half_integers<T: Element>(halves: u64) -> u64 {
    let value = halves as f64 / 2.0;
    match T::NAME {
        "f64" => value.to_bits(),
        "f32" => u64::from((value as f32).to_bits()),
        "f16" => u64::from(half::f16::from_f64(value).to_bits()),
        _ => u64::from(half::bf16::from_f64(value).to_bits()),
    }
}

fn integer<T: Element>(runner: &mut TestRunner) -> u64 {
    let (choice, number) = (random(runner), random(runner));
    let power = 1u64 << ((number >> 32) % u64::from(T::BITS));
    let bits = match choice % 10 {
        0..4 => number,
        4..6 => number % 17,
        6..8 => power.wrapping_add(number % 3).wrapping_sub(1),
        // Both ends, of either sign.
        8 => (u64::from(T::SIGNED) << (T::BITS - 1)).wrapping_sub(number % 2),
        _ => u64::MAX.wrapping_sub(number % 2),
    };
    bits & mask::<T>()
}

/// How far from simple a value is: what it shrinks to has less.
fn rank<T: Element>(x: T) -> u64 {
    let bits = x.bits();
    match T::FLOAT {
        _ if bits == 0 => 0,
        Some(layout) if bits == layout.one() => 1,
        Some(layout) => {
            let size = bits & !layout.sign();
            let quiet = layout.infinity() | 1 << (layout.mantissa - 1);
            let payload = layout.is_nan(bits) && size != quiet;
            2 + u64::from(size.count_ones()) + 64 * u64::from(size != bits) + 64 * u64::from(payload)
        }
        None if T::SIGNED && bits >> (T::BITS - 1) != 0 => {
            ((bits ^ mask::<T>()).saturating_add(1)).saturating_mul(2).saturating_add(1)
        }
        None => bits.saturating_mul(2),
    }
}

/// Simpler values, the simplest first.
fn simpler<T: Element>(x: T, finite: bool) -> Vec<T> {
    let bits = x.bits();
    let mut all = vec![0];
    match T::FLOAT {
        Some(layout) => {
            let size = bits & !layout.sign();
            all.extend([layout.one(), layout.one() | layout.sign(), layout.sign()]);
            if layout.is_nan(bits) {
                all.push(layout.infinity() | 1 << (layout.mantissa - 1));
            }
            if size >= layout.infinity() {
                all.push(layout.infinity());
            } else if size < 1 << layout.mantissa {
                all.push(1);
            }
            all.push(size);
            for keep in 0..layout.mantissa {
                all.push(bits & !((1 << (layout.mantissa - keep)) - 1));
            }
        }
        None => {
            all.push(1);
            let negative = T::SIGNED && bits >> (T::BITS - 1) != 0;
            let size = if negative { bits.wrapping_neg() & mask::<T>() } else { bits };
            let mut step = size / 2;
            all.push(size);
            while step > 0 {
                all.push(if negative { (size - step).wrapping_neg() & mask::<T>() } else { size - step });
                step /= 2;
            }
        }
    }
    let is_finite = |x: &T| T::FLOAT.is_none_or(|layout| x.bits() & !layout.sign() < layout.infinity());
    let fitting = all.into_iter().map(T::of_bits).filter(|y| rank(*y) < rank(x));
    let mut fitting: Vec<T> = fitting.filter(|y| !finite || is_finite(y)).collect();
    fitting.dedup_by_key(|y| y.bits());
    fitting
}

impl Strategy for Sizes {
    type Tree = Candidates<usize>;
    type Value = usize;

    fn new_tree(&self, runner: &mut TestRunner) -> NewTree<Self> {
        let Sizes { of, first, last } = *self;
        let (choice, number) = (random(runner), random(runner) as usize);
        let any = |from: usize, to: usize| from + number % (to - from).saturating_add(1);
        let units = match choice % 10 {
            0 => first,
            1 => last,
            2 => any(first, last.min(first.saturating_add(8))),
            3..8 => {
                let grain = [32, 128, 256][(choice >> 8) as usize % 3] / of.min(32);
                let edge = any(first, last) / grain * grain;
                (edge + (choice >> 16) as usize % 3).saturating_sub(1)
            }
            _ => any(first, last),
        };
        let Sizes { of, first, last } = *self;
        Ok(Candidates::new(units.clamp(first, last) * of, move |x| smaller(x, of, first)))
    }
}

/// Smaller multiples of `of`, not below `first` times it, in ascending order.
fn smaller(x: usize, of: usize, first: usize) -> Vec<usize> {
    let (units, mut all) = (x / of, Vec::new());
    all.extend((0..4).map(|i| first + i));
    let mut power = 8;
    while power < units && power < 1 << 40 {
        all.extend([power - 1, power, power + 1]);
        power *= 2;
    }
    for grain in [1, 32, 128, 256] {
        // As far past a multiple of a warp or a block.
        all.extend((0..4).map(|i| units % grain + i * grain));
        let mut step = (units - first) / 2 / grain;
        while step > 0 {
            all.push(units - step * grain);
            step /= 2;
        }
    }
    all.retain(|smaller| (first..units).contains(smaller));
    all.sort_unstable();
    all.dedup();
    all.into_iter().map(|units| units * of).collect()
}

/// A value that shrinks to the first of a list of simpler ones that fails, and from there on again.
pub struct Candidates<T> {
    current: T,
    /// What failed last, while `next` are tried in its place.
    failing: T,
    next: std::vec::IntoIter<T>,
    simpler: Box<dyn Fn(T) -> Vec<T>>,
}

impl<T: fmt::Debug> fmt::Debug for Candidates<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Candidates").field("current", &self.current).finish_non_exhaustive()
    }
}

impl<T: Copy> Candidates<T> {
    fn new(value: T, simpler: impl Fn(T) -> Vec<T> + 'static) -> Self {
        Candidates {
            current: value,
            failing: value,
            next: Vec::new().into_iter(),
            simpler: Box::new(simpler),
        }
    }
}

impl<T: Copy + fmt::Debug> ValueTree for Candidates<T> {
    type Value = T;

    fn current(&self) -> T {
        self.current
    }

    fn simplify(&mut self) -> bool {
        self.failing = self.current;
        self.next = (self.simpler)(self.current).into_iter();
        self.complicate()
    }

    fn complicate(&mut self) -> bool {
        let next = self.next.next();
        self.current = next.unwrap_or(self.failing);
        next.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draws::runner;
    use half::{bf16, f16};
    use std::collections::BTreeSet;

    fn drawn<S: Strategy>(strategy: &S, count: u64) -> Vec<S::Value> {
        (0..count).map(|seed| strategy.new_tree(&mut runner(seed)).unwrap().current()).collect()
    }

    /// Shrinks a value for as long as `fails`.
    fn shrunk<S: Strategy>(strategy: &S, seed: u64, fails: impl Fn(&S::Value) -> bool) -> Option<S::Value> {
        let mut tree = strategy.new_tree(&mut runner(seed)).unwrap();
        if !fails(&tree.current()) {
            return None;
        }
        let mut more = tree.simplify();
        while more {
            more = if fails(&tree.current()) { tree.simplify() } else { tree.complicate() };
        }
        Some(tree.current())
    }

    #[test]
    fn every_kind_of_float_is_drawn() {
        fn check<T: Element>() {
            let layout = T::FLOAT.unwrap();
            let (sign, infinity) = (layout.sign(), layout.infinity());
            let all: Vec<u64> = drawn(&bits::<T>(), 4000).into_iter().map(T::bits).collect();
            let kinds: [(&str, &dyn Fn(u64) -> bool); 10] = [
                ("+0", &|b| b == 0),
                ("-0", &|b| b == sign),
                ("smallest", &|b| b == 1),
                ("subnormal", &|b| b > 1 && b < 1 << layout.mantissa),
                ("largest", &|b| b == infinity - 1),
                ("infinity", &|b| b == infinity | sign),
                ("quiet NaN", &|b| b == infinity | 1 << (layout.mantissa - 1)),
                ("NaN with a payload", &|b| layout.is_nan(b) && b & 1 != 0),
                ("signalling NaN", &|b| layout.is_nan(b) && b & 1 << (layout.mantissa - 1) == 0),
                ("below a power of 2", &|b| !(b & !sign) & ((1 << layout.mantissa) - 1) == 0),
            ];
            for (kind, is) in kinds {
                assert!(all.iter().any(|b| is(*b)), "no {kind} of {}", T::NAME);
            }
            for x in drawn(&finite::<T>(), 4000) {
                assert!(x.bits() & !sign < infinity, "{x:?}");
            }
        }
        check::<f64>();
        check::<f32>();
        check::<f16>();
        check::<bf16>();
    }

    #[test]
    fn integers_have_their_ends() {
        let bytes: BTreeSet<i8> = drawn(&bits::<i8>(), 4000).into_iter().collect();
        assert_eq!(bytes.len(), 256);
        let words = drawn(&bits::<i32>(), 1000);
        for edge in [0, 1, -1, i32::MAX, i32::MIN] {
            assert!(words.contains(&edge), "{edge}");
        }
        let words = drawn(&bits::<u64>(), 1000);
        assert!(words.contains(&u64::MAX) && words.contains(&0));
    }

    #[test]
    fn sizes_lie_in_their_range_and_at_edges() {
        let all: BTreeSet<usize> = drawn(&sizes(3..=300), 2000).into_iter().collect();
        assert_eq!((all.first(), all.last()), (Some(&3), Some(&300)));
        for edge in [31, 32, 33, 127, 128, 129, 255, 256, 257] {
            assert!(all.contains(&edge), "{edge}");
        }
        assert!(drawn(&multiples(16, 1..100), 500).iter().all(|n| n % 16 == 0 && (16..100).contains(n)));
        let alone: BTreeSet<usize> = drawn(&sizes(7..=7), 100).into_iter().collect();
        assert_eq!(alone, BTreeSet::from([7]));
        assert!(drawn(&sizes(..), 100).iter().all(|n| *n <= 4096));
        // No multiple in the range: the one behind it.
        assert_eq!(drawn(&multiples(64, 1..10), 1), [64]);
    }

    #[test]
    fn values_shrink_to_the_simplest_that_fails() {
        for seed in 0..300 {
            if let Some(n) = shrunk(&sizes(1..=1000), seed, |n| n % 4 == 3) {
                assert_eq!(n, 3);
            }
            if let Some(n) = shrunk(&sizes(1..=1000), seed, |n| *n > 200) {
                assert_eq!(n, 201);
            }
            if let Some(x) = shrunk(&bits::<f32>(), seed, |x| x.is_nan()) {
                assert_eq!(x.to_bits(), f32::NAN.to_bits());
            }
            if let Some(x) = shrunk(&bits::<f32>(), seed, |x| x.is_sign_negative()) {
                assert_eq!(x.to_bits(), (-0f32).to_bits());
            }
            if let Some(x) = shrunk(&bits::<i32>(), seed, |x| *x < -9) {
                assert_eq!(x, -10);
            }
            assert_eq!(shrunk(&bits::<bf16>(), seed, |_| true).map(bf16::to_bits), Some(0));
        }
    }
}
