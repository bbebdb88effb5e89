//! Products of made-up matrices by the model of the tensor cores, with results worked out by hand.

use super::*;
use half::f16;

fn one(a: &[(f32, f32)], c: f32) -> u32 {
    one_of(TensorCores::Hopper, a, c)
}

fn one_of(tensor_cores: TensorCores, a: &[(f32, f32)], c: f32) -> u32 {
    let mut rows = [[0; 16]; 16];
    let mut columns = [[0; 16]; 8];
    for (k, (x, y)) in a.iter().enumerate() {
        rows[3][k] = f16::from_f32(*x).to_bits();
        columns[5][k] = f16::from_f32(*y).to_bits();
    }
    let mut acc = [[0; 8]; 16];
    acc[3][5] = c.to_bits();
    tensor_cores.mma_16x8x16(Format::F16, &rows, &columns, &acc)[3][5]
}

#[test]
fn small_sums_are_exact() {
    assert_eq!(one(&[(1.5, 2.0), (-0.25, 4.0)], 10.0), 12f32.to_bits());
    assert_eq!(one(&[], -0.0), 0);
    assert_eq!(one(&[(1.0, 1.0), (-1.0, 1.0)], 0.0), 0);
}

#[test]
fn terms_are_cut_off_25_bits_below_the_largest() {
    // 2^-25 is the last bit beside 1: two of them survive and round away toward zero in the f32.
    let tiny = 2f32.powi(-12);
    assert_eq!(one(&[(tiny, 2f32.powi(-13))], 1.0), 1f32.to_bits());
    assert_eq!(one(&[(tiny, tiny), (tiny, tiny)], 1.0), (1.0 + 2f32.powi(-23)).to_bits());
    // 2^-26 is cut off on its own, though eight of them would make 2^-23.
    assert_eq!(one(&[(2f32.powi(-13), 2f32.powi(-13)); 8], 1.0), 1f32.to_bits());
    // Toward zero, not down.
    assert_eq!(one(&[(-2f32.powi(-13), 2f32.powi(-13)); 8], -1.0), (-1f32).to_bits());
}

#[test]
fn what_is_not_finite() {
    assert_eq!(one(&[(f32::INFINITY, 1.0)], 0.0), f32::INFINITY.to_bits());
    assert_eq!(one(&[(f32::INFINITY, -1.0)], 1.0), f32::NEG_INFINITY.to_bits());
    assert_eq!(one(&[(f32::INFINITY, 0.0)], 0.0), NAN);
    assert_eq!(one(&[(f32::INFINITY, 1.0)], f32::NEG_INFINITY), NAN);
    assert_eq!(one(&[(f32::NAN, 1.0)], 0.0), NAN);
    // A product that is cut off beside the largest f32 does not round it up.
    assert_eq!(one(&[(65504.0, 65504.0)], f32::MAX), f32::MAX.to_bits());
}

#[test]
fn beyond_the_largest_is_infinite() {
    // bf16 has f32's exponents: 2^127 · 1 + 2^127.
    let (one, big) = (0x3f80, 0x7f00);
    let mut a = [[0; 16]; 16];
    let mut b = [[0; 16]; 8];
    (a[0][0], b[0][0]) = (big, one);
    let mut c = [[0; 8]; 16];
    c[0][0] = 2f32.powi(127).to_bits();
    assert_eq!(mma_16x8x16(Format::Bf16, &a, &b, &c)[0][0], f32::INFINITY.to_bits());
    c[0][0] |= 1 << 31;
    assert_eq!(mma_16x8x16(Format::Bf16, &a, &b, &c)[0][0], 0);
}

#[test]
fn integers_wrap() {
    let c = [[0x7fff_ffff; 8]; 16];
    let d = mma_16x8x32(&[[-128; 32]; 16], &[[-128; 32]; 8], &c);
    assert_eq!(d[0][0], 0x7fff_ffffu32.wrapping_add(32 << 14));
}

/// An exponent of what is not zero; subnormal numbers have that of the smallest normal one.
fn exponent(x: f64, smallest: i32) -> i32 {
    (((x.to_bits() >> 52) & 0x7ff) as i32 - 1023).max(smallest)
}

/// f32 toward zero; a zero is +0.
fn toward_zero(x: f64) -> f32 {
    let near = x as f32;
    let cut = if f64::from(near.abs()) > x.abs() && x.abs() < 2f64.powi(128) {
        f32::from_bits(near.to_bits() - 1)
    } else {
        near
    };
    if cut == 0.0 { 0.0 } else { cut }
}

/// What a generation is said to do, in f64, which holds every term and every sum exactly.
fn oracle((kept, steps): (i32, usize), smallest: i32, a: &[f64; 16], b: &[f64; 16], c: f32) -> u32 {
    let mut accumulator = c;
    for (a, b) in a.chunks(steps).zip(b.chunks(steps)) {
        let products = a.iter().zip(b).map(|(x, y)| (exponent(*x, smallest) + exponent(*y, smallest), x * y));
        let own = f64::from(accumulator);
        let terms: Vec<(i32, f64)> = products.chain([(exponent(own, -126), own)]).collect();
        let exact: f64 = terms.iter().map(|(_, term)| term).sum();
        if !exact.is_finite() {
            accumulator = exact as f32;
            continue;
        }
        let largest = terms.iter().filter(|(_, term)| *term != 0.0).map(|(exponent, _)| *exponent).max();
        // In two steps, as 2^-kept of the smallest is below f64.
        let scale = |x: f64, exponent: i32| x * 2f64.powi(exponent / 2) * 2f64.powi(exponent - exponent / 2);
        accumulator = largest.map_or(0.0, |largest| {
            let cut: f64 = terms.iter().map(|(_, term)| scale(*term, kept - largest).trunc()).sum();
            toward_zero(scale(cut, largest - kept))
        });
    }
    if accumulator.is_nan() { NAN } else { accumulator.to_bits() }
}

fn said(tensor_cores: TensorCores) -> (i32, usize) {
    match tensor_cores {
        TensorCores::Volta => (23, 4),
        TensorCores::Turing | TensorCores::Ampere => (24, 8),
        TensorCores::Hopper => (25, 16),
    }
}

/// Numbers that a seed decides.
struct Random(u64);

impl Random {
    fn word(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 32) as u32
    }

    /// Bits of an operand: near one another, of any size, or any bits at all.
    fn operand(&mut self, kind: u32, format: Format) -> u16 {
        let (fraction, bias) = if format == Format::F16 { (10, 15) } else { (7, 127) };
        let spread = match kind {
            0 => 3,
            1 => bias as u32,
            _ => return self.word() as u16,
        };
        let exponent = (bias - 1 - (self.word() % spread) as u16) << fraction;
        (self.word() as u16 & (((1 << fraction) - 1) | 0x8000)) | exponent
    }
}

#[test]
fn each_generation_is_what_is_said_of_it() {
    let mut random = Random(22);
    for (round, format) in (0..240).flat_map(|round| [(round, Format::F16), (round, Format::Bf16)]) {
        let kind = round % 3;
        let mut operand = || random.operand(kind, format);
        let a: [[u16; 16]; 16] = std::array::from_fn(|_| std::array::from_fn(|_| operand()));
        let b: [[u16; 16]; 8] = std::array::from_fn(|_| std::array::from_fn(|_| operand()));
        let c: [[u32; 8]; 16] = std::array::from_fn(|_| {
            std::array::from_fn(|_| match kind {
                2 => random.word(),
                _ => (((random.word() % 2000) as f32 - 1000.0) * 2f32.powi(-(random.word() as i32 & 15)))
                    .to_bits(),
            })
        });
        let value = |x: u16| match format {
            Format::F16 => f16::from_bits(x).to_f64(),
            Format::Bf16 => half::bf16::from_bits(x).to_f64(),
        };
        let smallest = if format == Format::F16 { -14 } else { -126 };
        for tensor_cores in TensorCores::ALL {
            let d = tensor_cores.mma_16x8x16(format, &a, &b, &c);
            for (row, column) in (0..16).flat_map(|row| (0..8).map(move |column| (row, column))) {
                let (a, b) = (a[row].map(value), b[column].map(value));
                let expected = oracle(said(tensor_cores), smallest, &a, &b, f32::from_bits(c[row][column]));
                assert_eq!(d[row][column], expected, "{tensor_cores:?} {format:?} {round} {row} {column}");
            }
        }
    }
}

/// Results of Volta, Turing, Ampere and Hopper.
fn of_each(a: &[(f32, f32)], c: f32) -> [f32; 4] {
    TensorCores::ALL.map(|tensor_cores| f32::from_bits(one_of(tensor_cores, a, c)))
}

#[test]
fn generations_differ_by_the_bits_that_they_keep() {
    // So many terms of 2^-23 in sum beside 1.
    let (one, next) = (1.0, 1.0 + 2f32.powi(-23));
    let terms = |exponent: i32, count: usize| vec![(2f32.powi(-12), 2f32.powi(exponent + 12)); count];
    assert_eq!(of_each(&terms(-23, 1), 1.0), [next; 4]);
    assert_eq!(of_each(&terms(-24, 2), 1.0), [one, next, next, next]);
    assert_eq!(of_each(&terms(-25, 4), 1.0), [one, one, one, next]);
    assert_eq!(of_each(&terms(-26, 8), 1.0), [one; 4]);
}

#[test]
fn generations_differ_by_the_products_that_they_add_at_once() {
    // Large products that cancel hide a small one that is added with them, and no other.
    let hidden_at = |at: usize| {
        let mut terms = vec![(0.0, 0.0); 16];
        (terms[0], terms[1], terms[at]) = ((4096.0, 4096.0), (4096.0, -4096.0), (0.25, 0.25));
        of_each(&terms, 0.0)
    };
    let (lost, kept) = (0.0, 0.0625);
    assert_eq!(hidden_at(3), [lost; 4]);
    assert_eq!(hidden_at(4), [kept, lost, lost, lost]);
    assert_eq!(hidden_at(7), [kept, lost, lost, lost]);
    assert_eq!(hidden_at(8), [kept, kept, kept, lost]);
    assert_eq!(hidden_at(15), [kept, kept, kept, lost]);
}

#[test]
fn what_is_not_finite_stays_so_in_later_sums() {
    for at in [0, 5, 9, 15] {
        let mut terms = vec![(1.0, 1.0); 16];
        terms[at].0 = f32::INFINITY;
        assert_eq!(of_each(&terms, 0.0), [f32::INFINITY; 4]);
        terms[15 - at].0 = f32::NEG_INFINITY;
        for tensor_cores in TensorCores::ALL {
            assert_eq!(one_of(tensor_cores, &terms, 0.0), NAN);
        }
    }
}

/// A chain's error over 1.25 · 2^-21 · n · Σ|products|, which [`TensorCores::truncation`] bounds: products of
/// any signs and sizes, and those of one sign that are cut off whole beside a first one.
#[test]
fn chains_lose_what_is_said_and_nearly_all_of_it() {
    let mut random = Random(50);
    let mut worst = [0f64; 4];
    for round in 0..400 {
        let steps = [1, 2, 8, 64][round / 4 % 4];
        // Beside 1, what is just below the last bit that is kept: 2^-22, 2^-23, 2^-24 and 2^-25.
        let below = 2f32.powi(-22 - (round % 4) as i32) * (1.0 - 2f32.powi(-9));
        let products: Vec<(f32, f32)> = (0..16 * steps)
            .map(|i| match round % 8 {
                0..4 if i == 0 => (1.0, 1.0),
                0..4 => (2f32.powi(-12), below * 2f32.powi(12)),
                kind => {
                    let mut operand =
                        || f16::from_bits(random.operand(u32::from(kind == 7), Format::F16)).to_f32();
                    (operand(), operand())
                }
            })
            .collect();
        let exact: f64 = products.iter().map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        let all: f64 = products.iter().map(|(a, b)| (f64::from(*a) * f64::from(*b)).abs()).sum();
        for (tensor_cores, worst) in TensorCores::ALL.into_iter().zip(&mut worst) {
            let sum = products.chunks(16).fold(0.0, |c, step| f32::from_bits(one_of(tensor_cores, step, c)));
            let unit = 1.25 * 2f64.powi(-21) * steps as f64 * all;
            *worst = worst.max((f64::from(sum) - exact).abs() / unit);
        }
    }
    for (tensor_cores, worst) in TensorCores::ALL.into_iter().zip(worst) {
        let said = f64::from(tensor_cores.truncation());
        assert!(worst <= said && worst > 0.7 * said, "{tensor_cores:?} loses {worst}, said to lose {said}");
    }
}
