//! k-means: seeded by k-means++, sums in f64, the same bits on every machine and with any number of threads.
//!
//! A point's centroid is the one with the least ½‖c‖² − x·c, computed as [`Nearest`] has it, of equal ones
//! the first. Most centroids need not be looked at: what is left out is proven to lose, rounding included
//! ([`near`], [`seed`]), so that the result is that of looking at all of them.

mod near;
mod seed;

use crate::kv;
use crate::simd_level::Level;
use half::f16;
use kernels_gpu::mixed;
use kernels_gpu::vecinfer::Nearest;
use near::Assigned;

/// Rounds at most.
pub(super) const ROUNDS: usize = 30;
/// Points of a centroid that are looked at; more do not make it better.
const POINTS_A_CENTROID: usize = 256;
/// The most points, and those of a centroid that seeding looks at.
const MOST: usize = 1 << 17;
const SEEDING: usize = 16;
/// Points, or centroids, that are computed at a time.
const LANES: usize = 16;

/// Of each point or centroid a number.
type Floats = [f32; LANES];
/// Sixteen points by channel.
type Block<const N: usize> = [Floats; N];

/// Random numbers, counter-based: the n-th of a seed.
fn random(seed: u64, n: u64) -> f64 {
    (mixed(seed, n) >> 11) as f64 / (1u64 << 53) as f64
}

/// Which of `count` points are looked at, no more than `most`: one of each so many, drawn. Were it always the
/// first, channels that come at the same distance would be left out altogether.
fn drawn(count: usize, most: usize, seed: u64) -> impl Iterator<Item = usize> {
    let kept = count.min(most);
    let first = move |i: usize| (i as u128 * count as u128 / kept as u128) as usize;
    (0..kept).map(move |i| {
        let (first, next) = (first(i), first(i + 1));
        let ahead = (random(!seed, i as u64) * (next - first) as f64) as usize;
        (first + ahead).min(next - 1)
    })
}

/// Sub-vectors of rows: each row has `width` elements that count, from `first` on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Points<'a> {
    /// [rows, stride].
    pub rows: &'a [f16],
    /// From a row to the next.
    pub stride: usize,
    /// The first element of a row that counts.
    pub first: usize,
    /// Elements of a row that count: some sub-vectors.
    pub width: usize,
    /// Channels of a sub-vector: 2, 4 or 8.
    pub d: usize,
}

impl Points<'_> {
    /// How many.
    pub fn count(&self) -> usize {
        self.rows.len() / self.stride * (self.width / self.d)
    }

    fn get<const N: usize>(&self, i: usize) -> [f32; N] {
        let of_row = self.width / N;
        let at = i / of_row * self.stride + self.first + i % of_row * N;
        std::array::from_fn(|channel| self.rows[at + channel].to_f32())
    }
}

/// `count` centroids [count, d] of points. `told` hears of each round, of [`ROUNDS`] and the seeding.
///
/// # Errors
/// What `told` says.
pub(super) fn kmeans(
    points: Points<'_>,
    count: usize,
    seed: u64,
    told: &dyn Fn() -> kv::Result<()>,
) -> kv::Result<Vec<f32>> {
    let level = Level::best();
    match points.d {
        2 => of::<2>(level, points, count, seed, told),
        4 => of::<4>(level, points, count, seed, told),
        _ => of::<8>(level, points, count, seed, told),
    }
}

fn of<const N: usize>(
    level: Level,
    points: Points<'_>,
    count: usize,
    seed: u64,
    told: &dyn Fn() -> kv::Result<()>,
) -> kv::Result<Vec<f32>> {
    let most = (count * POINTS_A_CENTROID).min(MOST);
    let points: Vec<[f32; N]> = drawn(points.count(), most, seed).map(|i| points.get(i)).collect();
    let some = drawn(points.len(), count * SEEDING, seed).map(|i| points[i]).collect::<Vec<_>>();
    let centroids = seed::seeded(level, some, count, seed);
    told()?;
    let mut assigned = Assigned::new(&points, centroids);
    let mut done = false;
    for _ in 0..ROUNDS {
        if !done {
            assigned.assign(level);
            done = assigned.move_centroids();
        }
        told()?;
    }
    Ok(assigned.centroids.into_flattened())
}

/// Σ (a − b)² of sixteen points and one: at most (N + 2)·2^−24 of itself off.
#[inline(always)]
fn squares<const N: usize>(block: &Block<N>, point: &[f32; N]) -> Floats {
    let mut sums = [0f32; LANES];
    for (channel, x) in block.iter().zip(point) {
        for (sum, a) in sums.iter_mut().zip(channel) {
            let far = a - x;
            *sum = far.mul_add(far, *sum);
        }
    }
    sums
}

/// What the errors of [`squares`], and of bounds that are made of some of them, are less than, relatively.
const MARGIN: f64 = 1e-5;

/// A bit for each lane that is not above its limit.
#[inline(always)]
fn at_most(x: &Floats, limits: &Floats) -> u32 {
    let mut bits = [0u32; LANES];
    for (lane, bit) in bits.iter_mut().enumerate() {
        *bit = if x[lane] <= limits[lane] { 1 << lane } else { 0 };
    }
    bits.iter().fold(0, |all, bit| all | bit)
}

/// Points by channel, sixteen at a time; `fill` where there are none.
fn blocks<const N: usize>(points: &[[f32; N]], fill: f32) -> Vec<Block<N>> {
    let of = |chunk: &[[f32; N]]| {
        let mut block = [[fill; LANES]; N];
        for (lane, point) in chunk.iter().enumerate() {
            (0..N).for_each(|channel| block[channel][lane] = point[channel]);
        }
        block
    };
    points.chunks(LANES).map(of).collect()
}

fn half_norm<const N: usize>(c: &[f32; N]) -> f32 {
    let mut wide = [0f32; 8];
    wide[..N].copy_from_slice(c);
    Nearest::half_norm::<N>(&wide)
}

#[cfg(test)]
mod tests;
