//! Error of the elementary functions, in units in the last place, against `f64`.
//!
//! The reference is the platform's `f64` function, whose own error is under 2 ULP of `f64`, that is under
//! 2^−28 ULP of `f32`: nothing against the three decimals that are asserted here. (Where the `f64` result of
//! `exp2` is itself subnormal or 0, the `f32` one is 0; and the platform's `f64` sine and cosine reduce huge
//! arguments exactly.)
//!
//! The normal run takes one input of every 2039; `cargo test --release -p ferrokv-simt --test math_ulp --
//! --ignored --nocapture` takes all 2^32 and shows the worst of them.

use rayon::prelude::*;
use simt::math;
use std::fmt;

/// The worst input of a run.
#[derive(Clone, Copy)]
struct Worst {
    ulp: f64,
    input: f32,
    result: f32,
    inputs: u64,
}

impl Worst {
    const NONE: Self = Self { ulp: -1.0, input: 0.0, result: 0.0, inputs: 0 };

    fn merge(self, other: Self) -> Self {
        let worse = if other.ulp > self.ulp { other } else { self };
        Self { inputs: self.inputs + other.inputs, ..worse }
    }
}

impl fmt::Display for Worst {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ulp, input, result, inputs } = self;
        let bits = input.to_bits();
        write!(f, "{ulp:.4} ULP at {input:e} (0x{bits:08x}), which gives {result:e}; {inputs} inputs")
    }
}

/// The distance of neighbouring `f32` around `exact`.
fn unit(exact: f64) -> f64 {
    let exponent = ((exact.to_bits() >> 52) & 0x7ff) as i32 - 1023;
    2f64.powi(exponent.clamp(-126, 127) - 23)
}

/// How far `result` is off, in ULP; infinite when one of the two is NaN or wrongly infinite.
fn error(result: f32, exact: f64) -> f64 {
    if result.is_nan() || exact.is_nan() {
        return if result.is_nan() && exact.is_nan() { 0.0 } else { f64::INFINITY };
    }
    if result.is_infinite() {
        return if result == exact as f32 { 0.0 } else { f64::INFINITY };
    }
    (f64::from(result) - exact).abs() / unit(exact)
}

/// Takes every `stride`-th of the 2^32 bit patterns that `domain` accepts.
fn scan(
    stride: u64,
    domain: impl Fn(f32) -> bool + Sync,
    function: impl Fn(f32) -> f32 + Sync,
    reference: impl Fn(f64) -> f64 + Sync,
) -> Worst {
    const CHUNK: u64 = 1 << 22;
    (0..(1u64 << 32).div_ceil(CHUNK))
        .into_par_iter()
        .map(|chunk| {
            let start = (chunk * CHUNK).next_multiple_of(stride);
            let mut worst = Worst::NONE;
            for bits in (start..(chunk + 1) * CHUNK).step_by(stride as usize) {
                let input = f32::from_bits(bits as u32);
                if !domain(input) {
                    continue;
                }
                worst.inputs += 1;
                let result = function(input);
                let ulp = error(result, reference(f64::from(input)));
                if ulp > worst.ulp {
                    worst = Worst { ulp, input, result, ..worst };
                }
            }
            worst
        })
        .reduce(|| Worst::NONE, Worst::merge)
}

fn anything(_: f32) -> bool {
    true
}

/// Where `exp2_nonpositive` promises its error bound.
fn not_flushed(x: f32) -> bool {
    x.is_nan() || (x > -126.5 && x <= 127.0)
}

/// Prints what was measured and compares it with the documented bound.
fn check(name: &str, bound: f64, worst: Worst) {
    println!("{name}: {worst} (documented: {bound})");
    assert!(worst.inputs > 0 && worst.ulp <= bound, "{name}: {worst}, documented: {bound}");
}

/// For each function one test over a sample and one over every `f32` of its domain.
macro_rules! bounds {
    ($($name:ident: $bound:literal, $domain:expr, $function:expr, $reference:expr;)*) => {
        mod sample {
            use super::*;
            $(#[test]
            fn $name() {
                check(stringify!($name), $bound, scan(2039, $domain, $function, $reference));
            })*
        }

        mod every_input {
            use super::*;
            $(#[test]
            #[ignore = "2^32 inputs: a minute or two, in release"]
            fn $name() {
                check(stringify!($name), $bound, scan(1, $domain, $function, $reference));
            })*
        }
    };
}

bounds! {
    exp2: 0.766, anything, math::exp2, f64::exp2;
    exp2_with_normal_result: 0.608, |x| x >= -126.0, math::exp2, f64::exp2;
    exp2_nonpositive: 0.800, not_flushed, math::exp2_nonpositive, f64::exp2;
    log2: 0.934, anything, math::log2, f64::log2;
    sin: 0.502, anything, math::sin, f64::sin;
    cos: 0.502, anything, math::cos, f64::cos;
    rsqrt: 1.491, anything, math::rsqrt, |x| 1.0 / x.sqrt();
}
