//! What a row's certificate adds up over its blocks, in the pass itself: each of a row's four lanes some of
//! it.

use super::super::layout::Annotation;
use super::super::query::LOG2_E_ABOVE;
use super::likely::Noise;
use crate::attention::{PartialRow, ROWS};
use simt::math::{abs, exp2, exp2_nonpositive, fma, max};
use simt::warp::{FULL_MASK, warp_shuffle_xor};
use simt::{Pod, Shared, Zeroable, unroll};

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
    /// Σ w η²: what lane 3 makes of its number as the others do of theirs. Nobody asks for it.
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
    /// Those of an annotated block; keys are quantized if there is a `delta`, values if so said.
    #[inline(always)]
    pub fn of(annotation: Annotation, delta: Option<f32>, quantized_values: bool) -> Self {
        let Annotation { eta, nu, eps, zeta, spread, step, .. } = annotation;
        let used = |x: f32| if quantized_values { x } else { 0.0 };
        let spreads = [used(spread * spread), used(step * step)];
        Bounds { delta, eta: used(eta), nu, kappa: eps + zeta, spreads, unit: annotation.unit() }
    }
}

/// A lane's first three words of [`Gathered`], relative to the warp's reference.
#[derive(Clone, Copy)]
pub struct Gather {
    first: f32,
    second: f32,
    largest: f32,
}

impl Gather {
    /// No block.
    #[inline(always)]
    pub fn new() -> Self {
        Gather { first: 0.0, second: 0.0, largest: 0.0 }
    }

    /// The reference has become another one.
    #[inline(always)]
    pub fn rescale(&mut self, before: f32, now: f32) {
        if before != now {
            let factor = exp2_nonpositive(before - now);
            self.first *= factor;
            self.second *= factor;
        }
    }

    /// Takes a block in, whose tokens weigh `mass` in all. All lanes do the same with numbers of their own.
    #[inline(always)]
    pub fn add(&mut self, mass: f32, of: Bounds, lane: u32) {
        let q = lane & 3;
        let Bounds { delta, eta, nu, kappa, .. } = of;
        let own = if q == 1 {
            nu
        } else if q == 2 {
            kappa
        } else {
            eta
        };
        let mut largest = own;
        if q == 0 {
            largest = 0.0;
        }
        if let Some(delta) = delta {
            let growth = growth_of_lane(delta, q);
            self.first = fma(mass, if q == 1 { growth * nu } else { growth }, self.first);
            if q == 0 {
                largest = delta;
            }
        }
        self.second = fma(mass, if q == 0 { own } else { own * own }, self.second);
        self.largest = max(self.largest, largest);
    }

    /// In the order of a lane's part of [`Gathered`].
    pub fn words(self, noise: Noisy) -> [f32; 5] {
        [self.first, self.second, self.largest, noise.third, noise.fourth]
    }

    /// Writes them to row `row` of `rows`.
    #[simt::device]
    pub fn keep(self, noise: Noisy, rows: Shared<f32>, row: u32, lane: u32) {
        let at = row * Gathered::WORDS + Gathered::OF_LANE * (lane & 3);
        let words = self.words(noise);
        unroll!(for i in 0..5 {
            rows.store(at + i as u32, words[i]);
        });
    }
}

impl Default for Gather {
    fn default() -> Self {
        Gather::new()
    }
}

/// A lane's other two words, which the bound that may fail follows from.
#[derive(Clone, Copy, Default)]
pub struct Noisy {
    third: f32,
    fourth: f32,
}

impl Noisy {
    /// The reference has become another one.
    #[inline(always)]
    pub fn rescale(&mut self, before: f32, now: f32, lane: u32) {
        let factor = exp2_nonpositive(before - now);
        let square = factor * factor;
        self.third *= if lane & 3 < 2 { factor } else { square };
        self.fourth *= square;
    }

    /// Takes in what the bound that may fail wants of a block: `moments` of its tokens' weights, those of the
    /// lane, and the `noise` of its keys, if they are quantized.
    #[inline(always)]
    pub fn add(&mut self, mass: f32, moments: Moments, noise: Option<Noise>, of: Bounds, lane: u32) {
        let q = lane & 3;
        let squares = moments.squares * of.unit * of.unit;
        if q >= 2 {
            self.third = fma(squares, of.spreads[if q == 2 { 0 } else { 1 }], self.third);
        }
        let Some(Noise { variance, growth }) = noise else { return };
        let grown = growth * variance;
        let odd = q & 1 == 1;
        if q < 2 {
            self.third = fma(if odd { moments.own * of.unit } else { mass }, grown, self.third);
        }
        let square = if odd { squares } else { moments.own };
        self.fourth = fma(square, if q < 2 { grown } else { grown * grown }, self.fourth);
    }

    /// What warp `warp` has in `memory`, where its lanes have [`Parked::WORDS`] words each.
    #[simt::device]
    pub fn load(memory: Shared<f32>, warp: u32, lane: u32) -> Self {
        let at = 32 * Parked::WORDS * warp + lane;
        Noisy { third: memory.load(at), fourth: memory.load(at + 32) }
    }

    /// Puts it there.
    #[simt::device]
    pub fn store(self, memory: Shared<f32>, warp: u32, lane: u32) {
        let at = 32 * Parked::WORDS * warp + lane;
        memory.store(at, self.third);
        memory.store(at + 32, self.fourth);
    }
}

/// Sums over a block's tokens, of a row's four lanes together, as one of them wants them.
#[derive(Clone, Copy)]
pub struct Moments {
    /// Even lanes: Σ p². Odd ones: Σ p n, n in units.
    pub own: f32,
    /// Σ p² n².
    pub squares: f32,
}

impl Moments {
    /// What a lane's four weights add to Σ p², Σ p n and Σ p² n².
    #[inline(always)]
    pub fn of_weights(p: [f32; 4], sizes: [f32; 4]) -> [f32; 3] {
        let squares = |x: [f32; 4]| fma(x[3], x[3], fma(x[2], x[2], fma(x[1], x[1], x[0] * x[0])));
        let sized = [p[0] * sizes[0], p[1] * sizes[1], p[2] * sizes[2], p[3] * sizes[3]];
        [squares(p), (sized[0] + sized[1]) + (sized[2] + sized[3]), squares(sized)]
    }

    /// Of a row, whose lanes each have four weights. Two exchanges give even lanes one sum and odd ones
    /// another.
    #[simt::device]
    pub fn of_row(p: [f32; 4], sizes: [f32; 4], lane: u32) -> Self {
        let [plain, first, second] = Moments::of_weights(p, sizes);
        let odd = lane & 1 == 1;
        let (own, away) = if odd { (first, plain) } else { (plain, first) };
        let own = own + warp_shuffle_xor(FULL_MASK, away, 1, 32);
        let own = own + warp_shuffle_xor(FULL_MASK, own, 2, 32);
        Moments { own, squares: of_row(second) }
    }
}

/// The sum over a row's four lanes.
#[simt::device]
pub fn of_row(sum: f32) -> f32 {
    let sum = sum + warp_shuffle_xor(FULL_MASK, sum, 1, 32);
    sum + warp_shuffle_xor(FULL_MASK, sum, 2, 32)
}

/// What of a block waits in shared memory, beside [`Noisy`], until the multiplications are over, whose
/// operands take the registers.
#[derive(Clone, Copy)]
pub struct Parked {
    /// Σ p.
    pub mass: f32,
    /// Of the lane.
    pub moments: Moments,
    /// Δ.
    pub delta: f32,
}

impl Parked {
    /// Words of a lane: these, and those of [`Noisy`] ahead of them.
    pub const WORDS: u32 = 6;

    /// As [`Noisy::load`].
    #[simt::device]
    pub fn load(memory: Shared<f32>, warp: u32, lane: u32) -> Self {
        let at = 32 * Parked::WORDS * warp + 64 + lane;
        let moments = Moments { own: memory.load(at + 32), squares: memory.load(at + 64) };
        Parked { mass: memory.load(at), moments, delta: memory.load(at + 96) }
    }

    /// As [`Noisy::store`].
    #[simt::device]
    pub fn store(self, memory: Shared<f32>, warp: u32, lane: u32) {
        let at = 32 * Parked::WORDS * warp + 64 + lane;
        memory.store(at, self.mass);
        memory.store(at + 32, self.moments.own);
        memory.store(at + 64, self.moments.squares);
        memory.store(at + 96, self.delta);
    }
}

/// What a lane multiplies a block's mass with: lanes 0 and 1 at least e^Δ − 1, lane 2 at least 1 − e^−Δ, lane
/// 3 has 1.
///
/// Up to Δ = 1 these are polynomials that are above them: e^Δ − 1 is 1 + Δ/2 + Δ²/6 + Δ³/24 + … times Δ, of
/// which what follows Δ²/6 is at most Δ³ times what it is at 1, e − 8/3; and 1 − e^−Δ is an alternating
/// series. Beyond, they are an exponential's.
#[inline(always)]
pub fn growth_of_lane(delta: f32, q: u32) -> f32 {
    let mut growth = if delta <= 1.0 {
        const REST: f32 = 0.051_615_2;
        let (half, rest) = if q == 2 { (-0.5, 0.0) } else { (0.5, REST) };
        let series = fma(delta, fma(delta, fma(delta, rest, 1.0 / 6.0), half), 1.0);
        // Each of four roundings is one of 2^−24 of a number up to 1.5 times the result.
        delta * series * (1.0 + 1.0 / 1_048_576.0)
    } else {
        let x = if delta > 80.0 { 128.0 } else { delta * LOG2_E_ABOVE };
        let grown = exp2(if q == 2 { -x } else { x });
        // The rounding of the exponential on the safe side, and that of the difference, which is more where 1
        // is the larger part.
        fma(grown, 1.0 / 2_097_152.0, abs(grown - 1.0)) * (1.0 + 1.0 / 4_194_304.0)
    };
    if q == 3 {
        growth = 1.0;
    }
    growth
}

/// One word over some parts in their order: `part` has each part's, `weight` how much it weighs.
#[inline(always)]
pub fn merge(word: u32, parts: u32, part: impl Fn(u32) -> f32, weight: impl Fn(u32) -> f32) -> f32 {
    let mut merged = 0f32;
    let mut p = 0;
    while p < parts {
        let (x, w) = (part(p), weight(p));
        let w = if Gathered::is_square(word) { w * w } else { w };
        merged = if Gathered::is_largest(word) { max(merged, x) } else { fma(x, w, merged) };
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
            for (q, exact) in [(0, exact[0]), (1, exact[0]), (2, exact[1]), (3, 1.0)] {
                let ratio = f64::from(growth_of_lane(delta, q)) / exact;
                assert!(ratio >= 1.0, "{delta} lane {q}: {ratio}");
                let of = usize::from(q == 2);
                worst[of] = worst[of].max(ratio);
            }
            delta *= 1.0007;
        }
        // 1 − 1/2 + 1/6 for 1 − 1/e; where the polynomials end.
        assert!(worst[0] < 1.002 && worst[1] < 1.06, "{worst:?}");
        assert!(growth_of_lane(81.0, 0) == f32::INFINITY && growth_of_lane(f32::INFINITY, 2) >= 1.0);
        assert!(growth_of_lane(f32::NAN, 0).is_nan());
    }
}
