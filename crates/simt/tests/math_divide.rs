//! `math::Divisor` against IEEE division.

use rayon::prelude::*;
use simt::math::{self, Divisor};
use simt::random::SplitMix64;

/// Numbers for a division.
struct Random(SplitMix64);

impl Random {
    fn new(seed: u64) -> Self {
        Random(SplitMix64(seed))
    }

    fn next(&mut self) -> u64 {
        self.0.word()
    }

    fn below(&mut self, n: u32) -> u32 {
        (self.next() % u64::from(n)) as u32
    }

    /// Any bit pattern.
    fn bits(&mut self) -> f32 {
        f32::from_bits(self.next() as u32)
    }

    /// A mantissa at random, or one of those that division algorithms fail on.
    fn mantissa(&mut self) -> u32 {
        match self.below(8) {
            0 => 0x007f_ffff,
            1 => 0x007f_fffe - self.below(4),
            2 => self.below(4),
            3 => 1 << self.below(23),
            // Around sqrt(2), where the proof's margins cross.
            4 => 0x0035_04f3u32.wrapping_add_signed(self.below(9) as i32 - 4),
            _ => self.below(1 << 23),
        }
    }

    /// A number with an exponent in `exponents` (biased).
    fn number(&mut self, exponents: std::ops::RangeInclusive<u32>) -> f32 {
        let exponent = exponents.start() + self.below(exponents.end() - exponents.start() + 1);
        let sign = (self.next() as u32) & 0x8000_0000;
        f32::from_bits(sign | (exponent << 23) | self.mantissa())
    }

    /// `x` moved by up to three floats.
    fn nudge(&mut self, x: f32) -> f32 {
        f32::from_bits(x.to_bits().wrapping_add_signed(self.below(7) as i32 - 3))
    }
}

/// Checks one pair against everything that `Divisor` promises; says whether exactness was part of it.
fn check(divisor: Divisor, s: f32, x: f32) -> bool {
    let (want, got) = (x / s, divisor.divide(x));
    // The f64 quotient tells the domain: its rounding cannot cross a power of two for f32 operands.
    let size = (f64::from(x) / f64::from(s)).abs();
    let special = [x, s].into_iter().any(|v| v == 0.0 || !v.is_finite());
    let exact = special || (2f64.powi(-102)..=2f64.powi(126)).contains(&size);
    let pair = || format!("{x:e} / {s:e} ({:#010x} / {:#010x})", x.to_bits(), s.to_bits());
    if exact {
        let want = math::canonical_nan(want).to_bits();
        assert_eq!(got.to_bits(), want, "{}: got {got:e}, not {:e}", pair(), f32::from_bits(want));
    } else if size < 1.0 {
        assert!(f64::from(got).abs() <= 2f64.powi(-101), "{}: got {got:e}", pair());
    } else {
        assert!(f64::from(got).abs() >= 2f64.powi(125), "{}: got {got:e}", pair());
        assert_eq!(got.is_sign_positive(), want.is_sign_positive(), "{}: got {got:e}", pair());
    }
    let code = |q: f32| math::to_i32_nearest_even(math::clamp(q, -127.0, 127.0));
    assert_eq!(code(got), code(want), "{}: another integer", pair());
    exact
}

/// `count` pairs of each kind from one seed; returns how many had to be exact.
fn random_pairs(seed: u64, count: usize) -> usize {
    let mut random = Random::new(seed);
    let mut exact = 0;
    for _ in 0..count {
        // Any two bit patterns.
        let s = random.bits();
        let x = random.bits();
        exact += usize::from(check(Divisor::new(s), s, x));

        // Ordinary magnitudes and difficult mantissas.
        let s = random.number(100..=154);
        let divisor = Divisor::new(s);
        let x = random.number(100..=154);
        exact += usize::from(check(divisor, s, x));

        // A quotient next to k + 1/2, as an INT8 quantizer meets it, for any divisor that leaves room.
        let s = random.number(0..=247);
        let divisor = Divisor::new(s);
        let x = s * (random.below(128) as f32 + 0.5);
        exact += usize::from(check(divisor, s, random.nudge(x)));

        // A quotient next to the middle of two floats: x is the rounded product of s and 25 bits.
        let s = random.number(90..=160);
        let middle = f64::from(random.number(100..=150)) + 2f64.powi(-24);
        let x = (f64::from(s) * middle) as f32;
        exact += usize::from(check(Divisor::new(s), s, random.nudge(x)));
    }
    exact
}

#[test]
fn quotients_equal_ieee_division() {
    let exact: usize = (0..64u64).into_par_iter().map(|seed| random_pairs(seed, 8_000)).sum();
    assert!(exact > 1_700_000, "only {exact} of 2048000 pairs fell into the exact domain");
}

#[test]
#[ignore = "2*10^8 pairs: a minute in release"]
fn quotients_equal_ieee_division_over_many_pairs() {
    let exact: usize = (1000..2000u64).into_par_iter().map(|seed| random_pairs(seed, 50_000)).sum();
    println!("{exact} of 200000000 pairs fell into the exact domain, and were equal");
    assert!(exact > 170_000_000);
}

/// Divisors and dividends at the edges of everything, each with each.
#[test]
fn edge_values_equal_ieee_division() {
    let mut edges = vec![0u32, 1, 2, 3, 0x0000_8000, 0x003f_ffff, 0x0040_0000, 0x007f_fffe, 0x007f_ffff];
    for exponent in [1, 2, 23, 24, 25, 64, 103, 126, 127, 128, 150, 152, 200, 229, 230, 247, 252, 253, 254] {
        for mantissa in [0, 1, 2, 0x0035_04f3, 0x0040_0000, 0x007f_fffe, 0x007f_ffff] {
            edges.push((exponent << 23) | mantissa);
        }
    }
    edges.extend([0x7f80_0000, 0x7f80_0001, 0x7fc0_0000, 0x7fff_ffff]);
    let edges: Vec<f32> = edges.into_iter().flat_map(|b| [b, b | 0x8000_0000]).map(f32::from_bits).collect();
    let mut exact = 0;
    for &s in &edges {
        let divisor = Divisor::new(s);
        for &x in &edges {
            exact += usize::from(check(divisor, s, x));
        }
    }
    assert!(exact > edges.len() * edges.len() / 2, "{exact} exact pairs of {}", edges.len().pow(2));
}

/// Every mantissa of x against the divisors with the least margin in the proof.
#[test]
#[ignore = "every mantissa against 64 divisors: seconds in release"]
fn every_mantissa_against_the_hardest_divisors() {
    let hardest = (0..32u32).map(|i| 0x3fff_ffff - i);
    let root_two = (0..32u32).map(|i| 0x3fb5_04f3 - 16 + i);
    hardest.chain(root_two).collect::<Vec<_>>().into_par_iter().for_each(|bits| {
        let s = f32::from_bits(bits);
        let divisor = Divisor::new(s);
        for mantissa in 0..1 << 23 {
            let x = f32::from_bits(0x3f80_0000 | mantissa);
            assert_eq!(divisor.divide(x).to_bits(), (x / s).to_bits(), "{x:e} / {s:e}");
        }
    });
}
