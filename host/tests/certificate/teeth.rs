//! The parts of the bound where they are tight, and their constants as the document has them: none can be
//! made a twentieth less unseen.

use super::norm;
use half::f16;
use host::certified::reference::{Tile, quantize};
use host::certified::{Geometry, Layout, Rounding};
use kernels_gpu::certified::carried::gather::Moments;
use kernels_gpu::certified::layout::Annotation;
use kernels_gpu::certified::quantizer::{over_size, value_size};
use kernels_gpu::certified::query::{Query, delta, delta_dense, delta_original};

const D: usize = 64;

/// `computed` is at least `exact`, and a thousandth more at the most.
fn is_just_above(what: &str, computed: f32, exact: f64) {
    let computed = f64::from(computed);
    assert!(
        (exact..=exact * 1.001).contains(&computed),
        "{what}: {computed:e}, and the document has {exact:e}"
    );
}

/// Keys of one block whose errors in token 2 are `share` of σ = 1/64, up where the query is positive and down
/// where it is not: all of them move its score one way.
fn worst_keys(query: &[f64], share: &[f64]) -> Vec<f16> {
    let sigma = 1.0 / 64.0;
    let key = |token: usize, channel: usize| match token {
        0 => 0.0,
        1 => 255.0,
        // The code is that of 2, or of 3.
        2 if query[channel] > 0.0 => 3.0 - share[channel],
        2 => 2.0 + share[channel],
        _ => 7.0,
    };
    (0..16 * D).map(|i| f16::from_f64(sigma * key(i / D, i % D))).collect()
}

/// How far the score of token 2 is off, and what Δ allows.
fn off_and_allowed(query: &[f64], share: &[f64]) -> (f64, f64) {
    let keys = worst_keys(query, share);
    let layout = Geometry::new(1, D as u32).unwrap().layout();
    let (tile, annotation) = quantize(&keys, &keys, layout, Rounding::Nearest, [0, 0]);
    let tile = Tile::new(layout, &tile).unwrap();
    // As a normalised query has it: 2^e is 1.
    let scale = 1.0 / (D as f64).sqrt();
    let sum = |of: &dyn Fn(usize) -> f64| (0..D).map(of).sum::<f64>();
    let off = scale * sum(&|c| query[c] * (tile.key(2, c) - keys[2 * D + c].to_f64()));
    let x = sum(&|c| query[c].abs() * tile.key_scale(c));
    let length = (norm(query) * (1.0 + 2f64.powi(-16))) as f32;
    let query = Query { pairs: [0; 32], scale: scale as f32, norm: length, finite: true };
    (off, f64::from(delta::<f16, D>(&query, x as f32, annotation)))
}

#[test]
fn keys_that_round_against_the_query_reach_delta() {
    let sign = |c: usize| if (c * 7).is_multiple_of(3) { -1.0 } else { 1.0 };
    // Half a step in every channel, whatever the query's size there: the first of the two forms.
    let half = 127.0 / 256.0;
    let uneven: Vec<f64> = (0..D).map(|c| sign(c) * (1.0 + (c % 13) as f64 * 4.0)).collect();
    let (off, allowed) = off_and_allowed(&uneven, &[half; D]);
    assert!((0.95 * allowed..allowed).contains(&off), "{off} of {allowed}");
    // Errors in proportion to the query: Cauchy and Schwarz.
    let share: Vec<f64> = (0..D).map(|c| if c % 2 == 0 { half } else { 16.0 / 256.0 }).collect();
    let along: Vec<f64> = (0..D).map(|c| sign(c) * 100.0 * share[c]).collect();
    let (off, allowed) = off_and_allowed(&along, &share);
    assert!((0.95 * allowed..allowed).contains(&off), "{off} of {allowed}");
}

#[test]
fn rounding_of_scores_is_what_the_document_says() {
    let exp = 3.0 * 2f64.powi(-20);
    let d = D as f64;
    for (length, size) in [(40.0, 3.0), (300.0, 0.02), (64.0, 1e4)] {
        let query = Query { pairs: [0; 32], scale: 0.25, norm: length as f32, finite: true };
        let of_size = Annotation { zeta: size as f32, ..Annotation::NONE };
        let term = |steps: f64| (d / 16.0 + steps) * 1.25 * 2f64.powi(-21) * length;
        let compact = 0.25 * (term(1.0) * size + 257.0 * d * 2f64.powi(-26)) + exp;
        is_just_above("(5)", delta::<f16, D>(&query, 0.0, of_size), compact);
        let paper = 0.25 * (term(1.5) * size + 385.0 * d * 2f64.powi(-26)) + exp;
        is_just_above("(5')", delta::<f32, D>(&query, 0.0, of_size), paper);
        let original = 0.25 * (term(0.5) * size + d * 2f64.powi(-30)) + exp;
        is_just_above("(6)", delta_original::<D>(&query, size as f32), original);
        // A subnormal operand counts as 2^−14, a row of 256 of them as 2^−10.
        let small = 2f64.powi(-10);
        let c_d = (d / 16.0 + 1.0) * 1.25 * 2f64.powi(-21);
        let dense = c_d * (0.25 * length + 0.125 * small) * (size + small) + exp;
        is_just_above("(6) of dense", delta_dense::<D>(&query, 0.125, size as f32), dense);
    }
}

/// What the annotation says of a channel's error is what (5) multiplies: half a σ, or one, and X' may be 2^−9
/// and 2^−14 too small.
#[test]
fn a_key_may_be_half_a_step_off_or_one() {
    let keys = vec![f16::ONE; 16 * D];
    for (layout, rounding, steps) in [
        (Layout::Compact, Rounding::Nearest, 0.5),
        (Layout::Paper, Rounding::Nearest, 0.5),
        (Layout::Compact, Rounding::Stochastic { seed: 1 }, 1.0),
    ] {
        let layout = Geometry::new(1, D as u32).unwrap().with_layout(layout).layout();
        let (_, annotation) = quantize(&keys, &keys, layout, rounding, [0, 0]);
        let exact = steps * (1.0 + 2f64.powi(-9) + 2f64.powi(-14));
        is_just_above("reach", annotation.reach, exact);
    }
}

/// Sizes bound norms whatever these are, by a 255th of the largest and a 2^−17th at the most.
#[test]
fn a_size_is_the_least_that_bounds() {
    let mut random = super::Random::new(11);
    for _ in 0..200_000 {
        let nu = random.within(1e-20, 1e30) as f32;
        let norm = match random.bits() % 4 {
            0 => nu,
            1 => nu * (random.bits() % 256) as f32 / 255.0,
            2 => nu * random.within(1e-6, 1.0) as f32,
            _ => f32::from_bits(nu.to_bits() - (random.bits() % 9) as u32),
        };
        let size = value_size(norm, nu);
        let unit = Annotation { nu, ..Annotation::NONE }.unit();
        let (bound, exact) = (f64::from(size) * f64::from(unit), f64::from(norm));
        let finest = f64::from(nu) / 255.0 * (1.0 + 2f64.powi(-17));
        assert!(size.fract() == 0.0 && (1.0..=255.0).contains(&size), "{size}");
        assert!(
            bound >= exact && bound <= exact * (1.0 + 2f64.powi(-17)) + finest,
            "{norm:e} of {nu:e}: {bound:e}"
        );
        let part = f64::from(over_size(norm, size, unit)) * bound;
        assert!(part >= exact && part <= exact * (1.0 + 2f64.powi(-18)), "{norm:e}: {part:e}");
    }
    for spoilt in [f32::NAN, f32::INFINITY] {
        assert_eq!([value_size(spoilt, f32::INFINITY), value_size(spoilt, 1.0)], [255.0; 2]);
    }
}

/// What the four lanes of a row add up is of each token its own weight and its own size.
#[test]
fn every_token_has_its_own_size() {
    for seed in 0..500 {
        let mut random = super::Random::new(seed);
        let sizes: [u8; 16] = std::array::from_fn(|_| random.bits() as u8);
        let words = [0, 1, 2, 3].map(|i| u32::from_le_bytes(sizes[4 * i..][..4].try_into().unwrap()));
        let annotation = Annotation { sizes: words, ..Annotation::NONE };
        let weights: [f32; 16] = std::array::from_fn(|_| random.within(1e-6, 1.0) as f32);
        let mut sums = [0f64; 3];
        for q in 0..4 {
            // The tokens whose scores the tensor core leaves in lane q.
            let tokens = [0, 1, 8, 9].map(|i| 2 * q + i);
            let own = Moments::of_weights(tokens.map(|t| weights[t]), annotation.sizes_of_lane(q as u32));
            sums.iter_mut().zip(own).for_each(|(sum, own)| *sum += f64::from(own));
        }
        let of = |f: &dyn Fn(f64, f64) -> f64| {
            weights.iter().zip(sizes).map(|(p, n)| f(f64::from(*p), f64::from(n))).sum::<f64>()
        };
        let exact = [of(&|p, n| p * n), of(&|p, _| p * p), of(&|p, n| (p * n).powi(2))];
        for (sum, exact) in sums.into_iter().zip(exact) {
            assert!((sum - exact).abs() <= exact * 1e-5, "seed {seed}: {sum:e}, exactly {exact:e}");
        }
    }
}
