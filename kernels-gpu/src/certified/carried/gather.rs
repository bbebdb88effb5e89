//! What a row's certificate adds up over its blocks, in the pass itself.

use super::super::layout::Annotation;
use super::super::query::LOG2_E_ABOVE;
use super::likely::Noise;
use crate::attention::{PartialRow, ROWS};
use simt::math::{abs, exp2, exp2_nonpositive, fma, max};
use simt::{Pod, Zeroable};

/// Sums over the blocks of one query row, each weighed with its share of the row's sum: Σ p_t of the weights
/// that the output is made with, relative to the row's reference. T: the blocks whose keys are quantized.
/// n_t: the size of a token's value, which its norm is not above.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct Gathered {
    /// Σ_T w (e^Δ − 1).
    pub a1: f32,
    /// Σ w η, over blocks whose values are quantized.
    pub eta: f32,
    /// The largest Δ in T.
    pub delta: f32,
    /// Σ_T w g v, [`Noise`]'s variance and growth.
    pub twice: f32,
    /// Σ_T w² g v, w² the sum of the squares of a block's weights.
    pub noise: f32,
    /// Σ_T w (e^Δ − 1) ν.
    pub a2: f32,
    /// Σ w ν².
    pub nu_squares: f32,
    /// The largest ν.
    pub nu: f32,
    /// Σ_T (Σ p n) g v.
    pub twice_values: f32,
    /// Σ_T (Σ p² n²) g v.
    pub noise_values: f32,
    /// Σ_T w (1 − e^−Δ).
    pub a3: f32,
    /// Σ w κ².
    pub kappa_squares: f32,
    /// The largest κ: no key's norm is larger.
    pub kappa: f32,
    /// Σ (Σ p² n²) s², s a block's spread, over blocks whose values are quantized.
    pub spread: f32,
    /// Σ_T w² g² v².
    pub fourth: f32,
    /// Σ_T w.
    pub tail: f32,
    /// Σ w η². Nobody asks for it.
    pub eta_squares: f32,
    /// The largest η.
    pub largest_eta: f32,
    /// Σ (Σ p² n²) h², h a block's step, over blocks whose values are quantized.
    pub step: f32,
    /// Σ_T (Σ p² n²) g² v².
    pub fourth_values: f32,
}

impl Gathered {
    /// Words of it: five of each of a row's four lanes.
    pub const WORDS: u32 = size_of::<Gathered>() as u32 / 4;
    /// Words of a lane.
    pub const OF_LANE: u32 = Self::WORDS / 4;

    /// Whether a word is the largest of its kind, not a sum.
    #[inline(always)]
    pub const fn is_largest(word: u32) -> bool {
        word % Self::OF_LANE == 2
    }

    /// Whether a word is a sum of squares of weights.
    #[inline(always)]
    pub const fn is_square(word: u32) -> bool {
        word % Self::OF_LANE == 4 || word % Self::OF_LANE == 3 && word >= 2 * Self::OF_LANE
    }

    /// Words of eight rows.
    pub const EIGHT: u32 = ROWS * Self::WORDS;

    /// Those of no block.
    pub const NONE: Gathered = Gathered {
        a1: 0.0,
        eta: 0.0,
        delta: 0.0,
        twice: 0.0,
        noise: 0.0,
        a2: 0.0,
        nu_squares: 0.0,
        nu: 0.0,
        twice_values: 0.0,
        noise_values: 0.0,
        a3: 0.0,
        kappa_squares: 0.0,
        kappa: 0.0,
        spread: 0.0,
        fourth: 0.0,
        tail: 0.0,
        eta_squares: 0.0,
        largest_eta: 0.0,
        step: 0.0,
        fourth_values: 0.0,
    };
}

/// What a block has that bounds errors.
#[derive(Clone, Copy)]
pub struct Bounds {
    /// Δ, if its keys are quantized.
    pub delta: Option<f32>,
    /// η; 0 where its values are not quantized.
    pub eta: f32,
    /// The largest norm of a value.
    pub nu: f32,
    /// The largest norm of a key.
    pub kappa: f32,
    /// The squares of the block's spread and step; 0 where its values are not quantized.
    pub spreads: [f32; 2],
    /// What sizes of values are told in.
    pub unit: f32,
}

impl Bounds {
    /// Those of an annotated block; keys are quantized if there is a `delta`, values if so said. Spreads are
    /// those of codes that were rounded `by_chance`, if anybody asks.
    #[inline(always)]
    pub fn of(annotation: Annotation, delta: Option<f32>, quantized_values: bool, by_chance: bool) -> Self {
        let Annotation { eta, nu, eps, zeta, spread, step, .. } = annotation;
        let used = |x: f32| if quantized_values { x } else { 0.0 };
        let spreads = if by_chance { [used(spread * spread), used(step * step)] } else { [0.0; 2] };
        Bounds { delta, eta: used(eta), nu, kappa: eps + zeta, spreads, unit: annotation.unit() }
    }
}

/// Sums over the weights of a block's tokens, relative to a reference.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Moments {
    /// Σ p.
    pub mass: f32,
    /// Σ p n, n in units.
    pub sized: f32,
    /// Σ p².
    pub squares: f32,
    /// Σ p² n².
    pub sized_squares: f32,
}

impl Moments {
    /// What a lane's four weights add to Σ p n, Σ p² and Σ p² n².
    #[inline(always)]
    pub fn of_weights(p: [f32; 4], sizes: [f32; 4]) -> [f32; 3] {
        let squares = |x: [f32; 4]| fma(x[3], x[3], fma(x[2], x[2], fma(x[1], x[1], x[0] * x[0])));
        let sized = [p[0] * sizes[0], p[1] * sizes[1], p[2] * sizes[2], p[3] * sizes[3]];
        [(sized[0] + sized[1]) + (sized[2] + sized[3]), squares(p), squares(sized)]
    }

    /// In the order of the fields.
    #[inline(always)]
    pub fn new([mass, sized, squares, sized_squares]: [f32; 4]) -> Self {
        Moments { mass, sized, squares, sized_squares }
    }

    /// The same relative to a reference of which theirs is `factor`.
    #[inline(always)]
    pub fn times(self, factor: f32) -> Self {
        let square = factor * factor;
        Moments {
            mass: self.mass * factor,
            sized: self.sized * factor,
            squares: self.squares * square,
            sized_squares: self.sized_squares * square,
        }
    }
}

impl Gathered {
    /// What a block adds to a row's sums: `noise` is that of its keys, if they are quantized and anybody
    /// asks.
    #[inline(always)]
    pub fn of_block(moments: Moments, noise: Option<Noise>, of: Bounds) -> Self {
        let Bounds { delta, eta, nu, kappa, spreads, unit } = of;
        let Moments { mass, squares, .. } = moments;
        let (sized, sized_squares) = (moments.sized * unit, moments.sized_squares * unit * unit);
        let mut own = Gathered {
            eta: mass * eta,
            nu_squares: mass * (nu * nu),
            kappa_squares: mass * (kappa * kappa),
            eta_squares: mass * (eta * eta),
            nu,
            kappa,
            largest_eta: eta,
            spread: sized_squares * spreads[0],
            step: sized_squares * spreads[1],
            ..Gathered::NONE
        };
        if let Some(delta) = delta {
            let [up, down] = growths(delta);
            own.a1 = mass * up;
            own.a2 = mass * (up * nu);
            own.a3 = mass * down;
            own.tail = mass;
            own.delta = delta;
        }
        if let Some(Noise { variance, growth }) = noise {
            let grown = growth * variance;
            own.twice = mass * grown;
            own.twice_values = sized * grown;
            own.noise = squares * grown;
            own.noise_values = sized_squares * grown;
            own.fourth = squares * (grown * grown);
            own.fourth_values = sized_squares * (grown * grown);
        }
        own
    }

    /// In the order of the fields.
    #[inline(always)]
    pub fn words(self) -> [f32; Self::WORDS as usize] {
        bytemuck::cast(self)
    }

    /// One word over two parts that are relative to one reference.
    #[inline(always)]
    pub fn both(word: u32, a: f32, b: f32) -> f32 {
        if Self::is_largest(word) { max(a, b) } else { a + b }
    }

    /// From words in the order of the fields.
    #[inline(always)]
    pub fn of_words(words: [f32; Self::WORDS as usize]) -> Self {
        bytemuck::cast(words)
    }

    /// One word over two parts: of the reference that `other` is relative to, `own`'s is `factor`.
    #[inline(always)]
    pub fn merged(word: u32, own: f32, factor: f32, other: f32) -> f32 {
        if Self::is_largest(word) {
            max(own, other)
        } else {
            fma(own, if Self::is_square(word) { factor * factor } else { factor }, other)
        }
    }
}

impl Gathered {
    /// [`merged`](Self::merged) of all words.
    #[inline(always)]
    pub fn merged_with(self, other: Gathered, factor: f32) -> Gathered {
        let (own, other) = (self.words(), other.words());
        Self::of_words(core::array::from_fn(|i| Self::merged(i as u32, own[i], factor, other[i])))
    }
}

/// At least e^Δ − 1, and at least 1 − e^−Δ.
///
/// Up to Δ = 1 these are polynomials that are above them: e^Δ − 1 is 1 + Δ/2 + Δ²/6 + Δ³/24 + … times Δ, of
/// which what follows Δ²/6 is at most Δ³ times what it is at 1, e − 8/3; and 1 − e^−Δ is an alternating
/// series. Beyond, they are an exponential's.
#[inline(always)]
pub fn growths(delta: f32) -> [f32; 2] {
    if delta <= 1.0 {
        const REST: f32 = 0.051_615_2;
        let series = |half: f32, rest: f32| fma(delta, fma(delta, fma(delta, rest, 1.0 / 6.0), half), 1.0);
        // Each of four roundings is one of 2^−24 of a number up to 1.5 times the result.
        [series(0.5, REST), series(-0.5, 0.0)].map(|series| delta * series * (1.0 + 1.0 / 1_048_576.0))
    } else {
        let x = if delta > 80.0 { 128.0 } else { delta * LOG2_E_ABOVE };
        // The rounding of the exponential on the safe side, and that of the difference, which is more where 1
        // is the larger part.
        [exp2(x), exp2(-x)]
            .map(|grown| fma(grown, 1.0 / 2_097_152.0, abs(grown - 1.0)) * (1.0 + 1.0 / 4_194_304.0))
    }
}

/// One word over some parts in their order: `part` has each part's, `weight` how much it weighs.
#[inline(always)]
pub fn merge(word: u32, parts: u32, part: impl Fn(u32) -> f32, weight: impl Fn(u32) -> f32) -> f32 {
    let mut merged = 0f32;
    let mut p = 0;
    while p < parts {
        merged = Gathered::merged(word, part(p), weight(p), merged);
        p += 1;
    }
    merged
}

/// The weights of a warp's partial results when the largest reference is `reference`.
#[inline(always)]
pub fn weight(row: PartialRow, reference: f32) -> f32 {
    exp2_nonpositive(row.reference - reference)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_above_the_exponentials_and_hardly_so() {
        let mut delta = 1e-9f32;
        let mut worst = [0f64; 2];
        while delta < 79.0 {
            let x = f64::from(delta);
            let exact = [x.exp_m1(), -(-x).exp_m1()];
            for (i, (growth, exact)) in growths(delta).into_iter().zip(exact).enumerate() {
                let ratio = f64::from(growth) / exact;
                assert!(ratio >= 1.0, "{delta}, {i}: {ratio}");
                worst[i] = worst[i].max(ratio);
            }
            delta *= 1.0007;
        }
        // 1 − 1/2 + 1/6 for 1 − 1/e; where the polynomials end.
        assert!(worst[0] < 1.002 && worst[1] < 1.06, "{worst:?}");
        assert!(growths(81.0)[0] == f32::INFINITY && growths(f32::INFINITY)[1] >= 1.0);
        assert!(growths(f32::NAN)[0].is_nan());
    }
}
