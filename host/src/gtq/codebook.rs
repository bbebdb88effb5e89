//! Levels that are best for a coordinate of a point of the unit sphere, in f64.
//!
//! A coordinate x of a uniform point of the sphere in D dimensions has the density (1 − x²)^((D−3)/2) up to a
//! factor; with x = sin θ that is cos^(D−2) θ dθ, smooth for every D from 2 on. A level is the mean of what
//! is nearest to it (Lloyd and Max): with thresholds t_i between the levels c_i,
//!
//! ```text
//! c_i = ∫ x f / ∫ f over [t_i, t_{i+1}]        t_i = (c_{i−1} + c_i) / 2
//! ```
//!
//! The first integral is closed, the second a Gauss–Legendre sum. Lloyd's iteration comes near, Newton's,
//! whose matrix has three diagonals, ends it. Levels and errors here are √D times those of the unit sphere's:
//! a coordinate has mean square 1 then, and D → ∞ is the normal distribution that the paper takes for all D.

use kernels_gpu::gtq::Codebook;

/// Nodes in (0, 1) of the sixteen-point rule on [−1, 1], and their weights.
const NODES: [(f64, f64); 8] = [
    (0.095_012_509_837_637_44, 0.189_450_610_455_068_5),
    (0.281_603_550_779_258_9, 0.182_603_415_044_923_6),
    (0.458_016_777_657_227_4, 0.169_156_519_395_002_54),
    (0.617_876_244_402_643_7, 0.149_595_988_816_576_73),
    (0.755_404_408_355_003, 0.124_628_971_255_533_88),
    (0.865_631_202_387_831_7, 0.095_158_511_682_492_78),
    (0.944_575_023_073_232_6, 0.062_253_523_938_647_89),
    (0.989_400_934_991_649_9, 0.027_152_459_411_754_095),
];

/// The distribution of a coordinate, not normalised.
#[derive(Clone, Copy, Debug)]
struct Sphere {
    dim: f64,
}

impl Sphere {
    /// ∫ f over [a, b], 0 <= a <= b <= 1.
    fn mass(self, a: f64, b: f64) -> f64 {
        let (low, high) = (a.clamp(0.0, 1.0).asin(), b.clamp(0.0, 1.0).asin());
        // Fourteen deviations further there is nothing; a panel is no wider than one.
        let high = high.min(low + 14.0 / self.dim.sqrt());
        let panels = ((high - low) * self.dim.sqrt()).ceil().max(1.0);
        let width = (high - low) / panels;
        let panel = |p: f64| {
            let middle = low + (p + 0.5) * width;
            let value = |theta: f64| theta.cos().max(0.0).powf(self.dim - 2.0);
            let of = |(node, weight): &(f64, f64)| {
                weight * (value(middle - node * width / 2.0) + value(middle + node * width / 2.0))
            };
            NODES.iter().map(of).sum::<f64>() * width / 2.0
        };
        (0..panels as usize).map(|p| panel(p as f64)).sum()
    }

    /// ∫ x f over [a, b].
    fn moment(self, a: f64, b: f64) -> f64 {
        let end = |x: f64| (1.0 - x * x).max(0.0).powf((self.dim - 1.0) / 2.0);
        (end(a) - end(b)) / (self.dim - 1.0)
    }

    fn density(self, x: f64) -> f64 {
        (1.0 - x * x).max(0.0).powf((self.dim - 3.0) / 2.0)
    }

    /// The mean square error of positive levels and their opposites, of a coordinate of mean square 1.
    fn error(self, levels: &[f64]) -> f64 {
        let total = self.mass(0.0, 1.0);
        let gained: f64 = (0..levels.len())
            .map(|i| {
                let (low, high) = cell(levels, i);
                levels[i] * (2.0 * self.moment(low, high) - levels[i] * self.mass(low, high))
            })
            .sum();
        1.0 - self.dim * gained / total
    }
}

/// What is nearer to positive level `i` than to the others.
fn cell(levels: &[f64], i: usize) -> (f64, f64) {
    let low = if i == 0 { 0.0 } else { (levels[i - 1] + levels[i]) / 2.0 };
    let high = levels.get(i + 1).map_or(1.0, |next| ((levels[i] + next) / 2.0).min(1.0));
    (low.min(1.0), high)
}

/// The best positive levels: half of 2^`bits`.
fn best(sphere: Sphere, bits: u32) -> Vec<f64> {
    let count = 1usize << (bits - 1);
    let reach = (3.5 / sphere.dim.sqrt()).min(1.0);
    let mut levels: Vec<f64> = (0..count).map(|i| reach * (i as f64 + 0.5) / count as f64).collect();
    for _ in 0..200 {
        let next = (0..count).map(|i| {
            let (low, high) = cell(&levels, i);
            sphere.moment(low, high) / sphere.mass(low, high)
        });
        levels = next.collect();
    }
    for _ in 0..30 {
        if newton(sphere, &mut levels) < 1e-15 {
            break;
        }
    }
    levels
}

/// One step towards levels that are their cells' means; how far the largest moved.
fn newton(sphere: Sphere, levels: &mut [f64]) -> f64 {
    let count = levels.len();
    // Rows of the matrix: below, on, and above the diagonal, and the right-hand side.
    let mut rows = vec![[0.0; 4]; count];
    for (i, row) in rows.iter_mut().enumerate() {
        let (low, high) = cell(levels, i);
        let mass = sphere.mass(low, high);
        let mean = sphere.moment(low, high) / mass;
        let by_low = if i == 0 { 0.0 } else { sphere.density(low) * (mean - low) / mass / 2.0 };
        let by_high = if i + 1 == count { 0.0 } else { sphere.density(high) * (high - mean) / mass / 2.0 };
        *row = [-by_low, 1.0 - by_low - by_high, -by_high, mean - levels[i]];
    }
    for i in 1..count {
        let factor = rows[i][0] / rows[i - 1][1];
        rows[i][1] -= factor * rows[i - 1][2];
        rows[i][3] -= factor * rows[i - 1][3];
    }
    let (mut next, mut most) = (0.0, 0.0f64);
    for i in (0..count).rev() {
        next = (rows[i][3] - rows[i][2] * next) / rows[i][1];
        levels[i] += next;
        most = most.max(next.abs());
    }
    most
}

/// The mean square error of the best levels of `bits` bits in `dim` dimensions, of a coordinate of mean
/// square 1.
pub fn best_error(dim: usize, bits: u32) -> f64 {
    let sphere = Sphere { dim: dim as f64 };
    sphere.error(&best(sphere, bits))
}

/// The best positive levels of `bits` bits in `dim` dimensions, √dim times those of the unit sphere.
pub fn best_levels(dim: usize, bits: u32) -> Vec<f64> {
    let sphere = Sphere { dim: dim as f64 };
    best(sphere, bits).into_iter().map(|level| level * sphere.dim.sqrt()).collect()
}

/// Levels of `bits` bits for points of the sphere in `dim` dimensions.
#[derive(Clone, Debug, PartialEq)]
pub struct Levels {
    /// Dimensions, at least 2.
    pub dim: usize,
    /// Bits of a code.
    pub bits: u32,
    /// The best positive levels.
    pub best: Vec<f64>,
    /// Their mean square error, of a coordinate of mean square 1.
    pub best_error: f64,
    /// Integers of all levels in use, in ascending order: level = step·(integer + 1/2).
    pub integers: Vec<i8>,
    /// The step.
    pub step: f64,
    /// The mean square error of these.
    pub error: f64,
}

impl Levels {
    /// Solves for the levels, and for the half-integers and the step that come nearest in error.
    pub fn new(dim: usize, bits: u32) -> Self {
        let sphere = Sphere { dim: dim as f64 };
        let root = sphere.dim.sqrt();
        let best = best(sphere, bits);
        let mut found: Option<(f64, f64, Vec<f64>)> = None;
        for top in 64..=127 {
            let mut step = best[best.len() - 1] / (f64::from(top) + 0.5);
            let halves: Vec<f64> =
                best.iter().map(|level| (level / step - 0.5).round().max(0.0) + 0.5).collect();
            if halves.windows(2).any(|pair| pair[0] >= pair[1]) || halves[halves.len() - 1] > 127.5 {
                continue;
            }
            for _ in 0..20 {
                let levels: Vec<f64> = halves.iter().map(|half| half * step).collect();
                let of = |i: usize| {
                    let (low, high) = cell(&levels, i);
                    [halves[i] * sphere.moment(low, high), halves[i] * halves[i] * sphere.mass(low, high)]
                };
                let sums = (0..halves.len()).map(of).fold([0.0; 2], |a, b| [a[0] + b[0], a[1] + b[1]]);
                step = sums[0] / sums[1];
            }
            let error = sphere.error(&halves.iter().map(|half| half * step).collect::<Vec<_>>());
            if found.as_ref().is_none_or(|(least, ..)| error < *least) {
                found = Some((error, step, halves));
            }
        }
        // Up to 6 bits neighbours are further apart than the finest step.
        let (error, step, halves) = found.unwrap_or((1.0, 1.0, vec![0.5; best.len()]));
        let positive = halves.iter().map(|half| (half - 0.5) as i8);
        let integers = positive.clone().rev().map(|i| !i).chain(positive).collect();
        Levels {
            dim,
            bits,
            best_error: sphere.error(&best),
            best: best.iter().map(|level| level * root).collect(),
            integers,
            step: step * root,
            error,
        }
    }

    /// Level of code `code`.
    pub fn level(&self, code: usize) -> f64 {
        self.step * (f64::from(self.integers[code]) + 0.5)
    }

    /// What encoding is given. `N`: at least as many as there are levels.
    pub fn codebook<const N: usize>(&self) -> Codebook<N> {
        let count = self.integers.len();
        let threshold =
            |i: usize| if i + 1 < count { (self.level(i) + self.level(i + 1)) / 2.0 } else { f64::INFINITY };
        Codebook {
            thresholds: std::array::from_fn(|i| threshold(i) as f32),
            levels: std::array::from_fn(|i| if i < count { self.level(i) as f32 } else { 0.0 }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Positive levels and relative errors, computed apart from this solver: in two dimensions an angle is
    /// uniform, in four the density is a half circle, and Lloyd's iteration has closed integrals; from eight
    /// on it was run over sums of four million steps.
    #[test]
    fn levels_are_the_spheres() {
        let cases: [(usize, u32, &[f64], f64); 6] = [
            (2, 3, &[0.203752, 0.605528, 0.988082, 1.327692], 0.00986),
            (4, 3, &[0.223414, 0.674079, 1.138189, 1.635705], 0.0193),
            (8, 2, &[0.446671, 1.427860], 0.094771),
            (64, 3, &[0.243753, 0.750658, 1.329343, 2.111311], 0.033391),
            (128, 2, &[0.452453, 1.505193], 0.116000),
            (128, 3, &[0.244425, 0.753330, 1.336599, 2.131471], 0.033966),
        ];
        for (dim, bits, expected, error) in cases {
            let levels = Levels::new(dim, bits);
            for (found, expected) in levels.best.iter().zip(expected) {
                assert!((found - expected).abs() < 2e-6, "{dim} {bits}: {:?}", levels.best);
            }
            assert!((levels.best_error - error).abs() < 1e-4, "{dim} {bits}: {}", levels.best_error);
        }
    }

    /// With dimensions enough it is the normal distribution, to the digits that are known of it.
    #[test]
    fn the_limit_is_normal() {
        let known: [(u32, &[f64]); 3] = [
            (2, &[0.452780, 1.510418]),
            (3, &[0.245094, 0.756005, 1.343909, 2.151946]),
            (4, &[0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590]),
        ];
        for (bits, expected) in known {
            // The first term of the difference is proportional to 1/D.
            let (near, far) = (Levels::new(20_000, bits).best, Levels::new(40_000, bits).best);
            for ((near, far), expected) in near.iter().zip(far).zip(expected) {
                let limit = 2.0 * far - near;
                assert!((limit - expected).abs() < 2e-6, "{bits}: {limit} for {expected}");
            }
        }
    }

    /// Each level is the mean of its cell, and half-integers cost less than 0.3 % of the error.
    #[test]
    fn half_integers_are_nearly_as_good() {
        for dim in [64, 128] {
            for bits in 2..=4 {
                let levels = Levels::new(dim, bits);
                let sphere = Sphere { dim: dim as f64 };
                let best: Vec<f64> = levels.best.iter().map(|level| level / sphere.dim.sqrt()).collect();
                for (i, level) in best.iter().enumerate() {
                    let (low, high) = cell(&best, i);
                    let mean = sphere.moment(low, high) / sphere.mass(low, high);
                    assert!((level - mean).abs() < 1e-13, "{dim} {bits}: {level} {mean}");
                }
                let lost = levels.error / levels.best_error - 1.0;
                assert!((0.0..0.003).contains(&lost), "{dim} {bits}: {lost}");
                assert_eq!(levels.integers.len(), 1 << bits);
                let opposite = |i: usize| !levels.integers[levels.integers.len() - 1 - i];
                assert!((0..levels.integers.len()).all(|i| levels.integers[i] == opposite(i)));
            }
        }
    }
}
