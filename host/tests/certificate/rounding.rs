//! Equations (5) and (7) against a model of the tensor core's sums.

use super::quantized::{KINDS, keys_and_values, quantize_keys};
use super::{Random, dot, exponent, f16, mean, minus, norm};
use kernels_gpu::certified::quantizer::{KEY_BOUND, wide_key_channel};
use rayon::prelude::*;

/// How tensor cores add up.
#[derive(Clone, Copy)]
struct Sums {
    /// The products of one sum.
    products: usize,
    /// Bits that are kept below the largest alignment.
    bits: i32,
    /// What chains may lose, over what they may lose by the first of [`GENERATIONS`].
    truncation: f64,
}

/// Hopper's, and those of sm_75 to sm_89.
const GENERATIONS: [Sums; 2] =
    [Sums { products: 16, bits: 25, truncation: 1.0 }, Sums { products: 8, bits: 24, truncation: 2.0 }];

/// The largest error over its bound in any trial of `one`, by each generation.
fn of_each_generation(what: &str, trials: u64, least: f64, one: impl Fn(Sums, u64) -> f64 + Sync) {
    for sums in GENERATIONS {
        let worst = (0..trials).into_par_iter().map(|seed| one(sums, seed)).reduce(|| 0.0, f64::max);
        println!("rounding of {what}, {} products a sum: largest error / bound {worst:.3}", sums.products);
        assert!(worst > least, "the bound is of another size than the errors: {worst}");
    }
}

/// One sum of the tensor core: products and accumulator, truncated.
fn mma(sums: Sums, c: f64, a: &[f64], b: &[f64]) -> f64 {
    let terms: Vec<(f64, i32)> = a
        .iter()
        .zip(b)
        .map(|(a, b)| (a * b, exponent(*a).max(-14) + exponent(*b).max(-14)))
        .chain([(c, exponent(c))])
        .filter(|t| t.0 != 0.0)
        .collect();
    let Some(largest) = terms.iter().map(|t| t.1).max() else { return 0.0 };
    let step = 2f64.powi(largest - sums.bits);
    let sum = terms.iter().map(|t| (t.0 / step).trunc()).sum::<f64>() * step;
    // To f32, toward zero.
    if sum == 0.0 {
        return 0.0;
    }
    let place = 2f64.powi(exponent(sum).max(-126) - 23);
    (sum / place).trunc() * place
}

fn chain(sums: Sums, a: &[f64], b: &[f64]) -> f64 {
    a.chunks(sums.products).zip(b.chunks(sums.products)).fold(0.0, |c, (a, b)| mma(sums, c, a, b))
}

fn f32(x: f64) -> f64 {
    x as f32 as f64
}

#[test]
fn scores_round_within_equation_5() {
    of_each_generation("scores", 2000, 0.02, |sums, seed| {
        let mut random = Random::new(seed);
        let dim = [64, 96, 128, 256][seed as usize / KINDS % 4];
        let [mut keys, _] = keys_and_values(&mut random, 16, dim, seed as usize % KINDS);
        let mut query: Vec<f64> =
            (0..dim).map(|_| f16(10f64.powf(random.unit() * 3.0 - 2.0) * random.normal())).collect();
        if seed % 3 == 0 {
            // All terms of one sign: truncation always loses.
            query.iter_mut().for_each(|q| *q = q.abs());
            keys.iter_mut().flatten().for_each(|k| *k = k.abs());
        }
        let (codes, sigma, zero) = quantize_keys(&keys);
        let size = 2f64.powi(exponent(query.iter().fold(0.0, |m, q| q.abs().max(m))) - 5);
        let q: Vec<f64> = query.iter().map(|q| f16(q / size)).collect();
        let x: Vec<f64> = q.iter().zip(&sigma).map(|(q, s)| f16(q * s)).collect();
        let low: Vec<f64> = (0..dim).map(|c| f16(q[c] * sigma[c] - x[c])).collect();
        let scale = size * std::f64::consts::LOG2_E / (dim as f64).sqrt();
        let offset = chain(sums, &q, &zero);
        let zeta = norm(&zero) + 128.0 * norm(&sigma);
        let c_d = (dim as f64 / 16.0 + 1.0) * 1.25 * 2f64.powi(-21) * sums.truncation;
        let bound = scale * (c_d * norm(&q) * zeta + 257.0 * sums.truncation * dim as f64 * 2f64.powi(-26));
        // The same of original keys, by equation (6).
        let c_f = (dim as f64 / 16.0 + 0.5) * 1.25 * 2f64.powi(-21) * sums.truncation;
        for key in &keys {
            let got = f32(chain(sums, &q, key) * f32(scale));
            let exact = dot(&query, key) / size * scale;
            let bound = scale * (c_f * norm(&q) * norm(key) + dim as f64 * 2f64.powi(-30) * sums.truncation);
            let error = (got - exact).abs();
            assert!(error <= bound, "seed {seed}: error {error:e} above {bound:e} by original keys");
        }
        codes
            .iter()
            .map(|code| {
                let raw = f32(chain(sums, &x, code) + chain(sums, &low, code));
                let got = f32(f32(raw + offset) * f32(scale));
                let exact =
                    (0..dim).map(|c| query[c] * (sigma[c] * code[c] + zero[c])).sum::<f64>() / size * scale;
                let error = (got - exact).abs();
                assert!(error <= bound, "seed {seed}: error {error:e} above {bound:e}");
                error / bound
            })
            .fold(0.0, f64::max)
    });
}

/// The same in the paper's layout: σ and z are f32, and each number that a product needs is two f16.
#[test]
fn scores_of_the_papers_layout_round_within_its_equation() {
    let up = |sigma: f64| f16(f32(sigma * (1.0 + 2f64.powi(-10)) + 2f64.powi(-25)));
    of_each_generation("scores in the paper's layout", 2000, 0.02, |sums, seed| {
        let mut random = Random::new(seed);
        let dim = [64, 96, 128, 256][seed as usize / KINDS % 4];
        let [mut keys, _] = keys_and_values(&mut random, 16, dim, seed as usize % KINDS);
        let mut query: Vec<f64> =
            (0..dim).map(|_| f16(10f64.powf(random.unit() * 3.0 - 2.0) * random.normal())).collect();
        if seed % 3 == 0 {
            query.iter_mut().for_each(|q| *q = q.abs());
            keys.iter_mut().flatten().for_each(|k| *k = k.abs());
        }
        if seed % 7 == 0 {
            // Far from zero, where z's second part counts.
            keys.iter_mut().flatten().for_each(|k| *k = f16(*k + 300.0));
        }
        if seed % 11 == 0 {
            // Scales below f16's numbers.
            keys.iter_mut().flatten().for_each(|k| *k = f16(*k * 2f64.powi(-16)));
        }
        let size = 2f64.powi(exponent(query.iter().fold(0.0, |m, q| q.abs().max(m))) - 5);
        let q: Vec<f64> = query.iter().map(|q| f16(q / size)).collect();
        let channels: Vec<(f64, f64)> = (0..dim)
            .map(|c| {
                let of_channel = || keys.iter().map(|k| k[c] as f32);
                let (low, high) = (
                    of_channel().fold(f32::INFINITY, f32::min),
                    of_channel().fold(f32::NEG_INFINITY, f32::max),
                );
                let (scale, zero) = wide_key_channel(low, high, 0.5);
                (f64::from(scale), f64::from(zero))
            })
            .collect();
        let (sigma, zero): (Vec<f64>, Vec<f64>) = channels.into_iter().unzip();
        let split = |x: f64| (f16(x), f16(x - f16(x)));
        let (x, low): (Vec<f64>, Vec<f64>) = (0..dim).map(|c| split(f32(q[c] * sigma[c]))).unzip();
        let (z, rest): (Vec<f64>, Vec<f64>) = zero.iter().map(|z| split(*z)).unzip();
        let above: Vec<f64> = sigma.iter().map(|s| up(*s)).collect();
        let scale = size * std::f64::consts::LOG2_E / (dim as f64).sqrt();
        let offset = f32(chain(sums, &q, &z) + chain(sums, &q, &rest));
        let zeta = norm(&zero) + 128.0 * norm(&sigma);
        let c_d = (dim as f64 / 16.0 + 1.5) * 1.25 * 2f64.powi(-21) * sums.truncation;
        let bound = scale * (c_d * norm(&q) * zeta + 385.0 * sums.truncation * dim as f64 * 2f64.powi(-26));
        // Half of Δ, as the tensor core has it: no channel's σ is less than it is.
        let sizes: Vec<f64> = q.iter().map(|q| q.abs()).collect();
        assert!(above.iter().zip(&sigma).all(|(above, sigma)| above >= sigma));
        let (boxed, truth) = (chain(sums, &sizes, &above), dot(&sizes, &sigma));
        assert!(
            boxed * (1.0 + 2f64.powi(-15)) + dim as f64 * 2f64.powi(-32) * sums.truncation >= truth,
            "seed {seed}: {boxed:e} for {truth:e}"
        );
        keys.iter()
            .map(|key| {
                let code = |c: usize| {
                    if sigma[c] == 0.0 { 0.0 } else { ((key[c] - zero[c]) / sigma[c]).round_ties_even() }
                };
                let code: Vec<f64> = (0..dim).map(|c| code(c).clamp(-128.0, 127.0)).collect();
                let off: Vec<f64> = (0..dim).map(|c| key[c] - (sigma[c] * code[c] + zero[c])).collect();
                assert!((0..dim).all(|c| off[c].abs() <= sigma[c] * KEY_BOUND), "seed {seed}");
                let raw = f32(chain(sums, &x, &code) + chain(sums, &low, &code));
                let got = f32(f32(raw + offset) * f32(scale));
                let exact =
                    (0..dim).map(|c| query[c] * (sigma[c] * code[c] + zero[c])).sum::<f64>() / size * scale;
                let error = (got - exact).abs();
                assert!(error <= bound, "seed {seed}: error {error:e} above {bound:e}");
                // And against the original keys, by (5).
                let exact = dot(&query, key) / size * scale;
                let by_keys = scale * boxed * 0.5 * (1.0 + 2f64.powi(-9) + 2f64.powi(-14));
                let error_of_key = (got - exact).abs();
                assert!(error_of_key <= by_keys + bound, "seed {seed}: {error_of_key:e}");
                error / bound
            })
            .fold(0.0, f64::max)
    });
}

#[test]
fn sums_round_within_equation_7() {
    let steps = 64;
    of_each_generation("sums", 200, 0.01, |sums, seed| {
        let mut random = Random::new(seed);
        let dim = 8;
        let positive = seed % 2 == 0;
        let spread = 6.0 * random.unit();
        let weights: Vec<f64> = (0..16 * steps).map(|_| f32((spread * random.normal()).exp())).collect();
        let top = 2f64.powf(weights.iter().copied().fold(0.0, f64::max).log2().ceil());
        let weights: Vec<f64> = weights.iter().map(|p| f32(p / top)).collect();
        let values: Vec<Vec<f64>> = (0..16 * steps)
            .map(|_| (0..dim).map(|_| f16(if positive { random.unit() } else { random.normal() })).collect())
            .collect();
        let high: Vec<f64> = weights.iter().map(|p| f16(4096.0 * p)).collect();
        let low: Vec<f64> = weights.iter().zip(&high).map(|(p, h)| f16(4096.0 * p - h)).collect();
        // The total in f32, token after token.
        let total = weights.iter().fold(0.0, |sum, p| f32(sum + p));
        let returned: Vec<f64> = (0..dim)
            .map(|c| {
                let column: Vec<f64> = values.iter().map(|v| v[c]).collect();
                f32(f32(chain(sums, &high, &column) + chain(sums, &low, &column)) / 4096.0 / total)
            })
            .collect();
        let error = norm(&minus(&returned, &mean(&weights, &values)));
        let nu = values.iter().map(|v| norm(v)).fold(0.0, f64::max);
        let n = steps as f64;
        let bracket = n * 1.26 * 2f64.powi(-21) * sums.truncation
            + (1.0 + 16.0 * n + 4.0) * 2f64.powi(-24)
            + 2f64.powi(-23)
            + 16.0 * n * 2f64.powi(-36);
        let bound = nu * bracket + (dim as f64).sqrt() * 2f64.powi(-34) * sums.truncation;
        assert!(error <= bound, "seed {seed}: error {error:e} above {bound:e}");
        error / bound
    });
}
