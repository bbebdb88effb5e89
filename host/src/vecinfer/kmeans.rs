//! k-means: seeded by k-means++, sums in f64, the same bits on every machine and with any number of threads.

use super::books::Search;
use super::cpu::nearest;
use crate::attention::cpu::lanes::Lanes;
use crate::attention::cpu::{Work, run};
use crate::kv;
use crate::simd_level::Level;
use kernels_gpu::mixed;
use rayon::prelude::*;

/// Rounds at most.
pub(super) const ROUNDS: usize = 30;
/// Points of a centroid that are looked at; more do not make it better.
const POINTS_A_CENTROID: usize = 256;
/// The most points, and those that seeding looks at.
const MOST: usize = 1 << 17;
const SEEDING: usize = 16;
/// Points that are a thread's work at a time. Fixed, as sums are added up in their order.
const CHUNK: usize = 2048;

/// Random numbers, counter-based: the n-th of a seed.
fn random(seed: u64, n: u64) -> f64 {
    (mixed(seed, n) >> 11) as f64 / (1u64 << 53) as f64
}

/// Points [count, d] of which no more than `most` are left: one of each so many, drawn. Were it always the
/// first, channels that come at the same distance would be left out altogether.
fn thinned(points: &[f32], d: usize, most: usize, seed: u64) -> Vec<f32> {
    let count = points.len() / d;
    if count <= most {
        return points.to_vec();
    }
    let first = |i: usize| (i as u128 * count as u128 / most as u128) as usize;
    let drawn = |i: usize| {
        let (first, next) = (first(i), first(i + 1));
        let ahead = (random(!seed, i as u64) * (next - first) as f64) as usize;
        (first + ahead).min(next - 1)
    };
    (0..most).flat_map(|i| &points[drawn(i) * d..][..d]).copied().collect()
}

/// `count` centroids [count, d] of points [_, d]. `told` hears of each round, of [`ROUNDS`] and the seeding.
///
/// # Errors
/// What `told` says.
pub(super) fn kmeans(
    points: &[f32],
    d: usize,
    count: usize,
    seed: u64,
    mut told: impl FnMut() -> kv::Result<()>,
) -> kv::Result<Vec<f32>> {
    let points = thinned(points, d, (count * POINTS_A_CENTROID).min(MOST), seed);
    let mut centroids = seeded(&thinned(&points, d, count * SEEDING, seed), d, count, seed);
    told()?;
    let mut done = false;
    for _ in 0..ROUNDS {
        if !done {
            done = round(&points, d, &mut centroids);
        }
        told()?;
    }
    Ok(centroids)
}

/// k-means++: each centroid is a point, drawn with the square of its distance to the nearest one so far.
fn seeded(points: &[f32], d: usize, count: usize, seed: u64) -> Vec<f32> {
    let total = points.len() / d;
    let mut centroids = Vec::with_capacity(count * d);
    let mut distances = vec![f32::INFINITY; total];
    let mut chosen = ((random(seed, 0) * total as f64) as usize).min(total - 1);
    for number in 0..count {
        let own = points[chosen * d..][..d].to_vec();
        let sums: Vec<f64> = distances
            .par_chunks_mut(CHUNK)
            .zip(points.par_chunks(CHUNK * d))
            .map(|(distances, points)| {
                let mut sum = 0f64;
                for (distance, point) in distances.iter_mut().zip(points.chunks_exact(d)) {
                    let mut far = 0f32;
                    for (a, b) in point.iter().zip(&own) {
                        far += (a - b) * (a - b);
                    }
                    *distance = distance.min(far);
                    sum += f64::from(*distance);
                }
                sum
            })
            .collect();
        centroids.extend_from_slice(&own);
        // Where all points are taken, any will do.
        let mut left = random(seed, number as u64 + 1) * sums.iter().sum::<f64>();
        chosen = total - 1;
        let mut chunk = 0;
        while chunk + 1 < sums.len() && left >= sums[chunk] {
            left -= sums[chunk];
            chunk += 1;
        }
        for (i, distance) in distances.iter().enumerate().skip(chunk * CHUNK) {
            left -= f64::from(*distance);
            if left < 0.0 {
                chosen = i;
                break;
            }
        }
    }
    centroids
}

/// What a chunk of points adds up to.
struct Sums {
    sums: Vec<f64>,
    counts: Vec<u32>,
    /// The point that is farthest from its centroid, and half the square of its distance.
    farthest: (f32, usize),
}

struct Assign<'a> {
    points: &'a [f32],
    first: usize,
    d: usize,
    count: usize,
    search: &'a Search,
}

impl Work for Assign<'_> {
    type Output = Sums;

    #[inline(always)]
    fn run<L: Lanes>(self) -> Sums {
        let Assign { points, first, d, count, search } = self;
        let mut out =
            Sums { sums: vec![0.0; count * d], counts: vec![0; count], farthest: (f32::NEG_INFINITY, first) };
        for (i, point) in points.chunks_exact(d).enumerate() {
            let (number, score) = nearest(point, search);
            let mut far = score;
            for x in point {
                far += 0.5 * x * x;
            }
            if far > out.farthest.0 {
                out.farthest = (far, first + i);
            }
            out.counts[number as usize] += 1;
            let sums = &mut out.sums[number as usize * d..][..d];
            sums.iter_mut().zip(point).for_each(|(sum, x)| *sum += f64::from(*x));
        }
        out
    }
}

/// Moves each centroid to the mean of its points; one without points to a point that is far from its own.
/// Whether nothing has changed.
fn round(points: &[f32], d: usize, centroids: &mut [f32]) -> bool {
    let (level, count) = (Level::best(), centroids.len() / d);
    let search = Search::of(centroids, d);
    let chunks: Vec<Sums> = points
        .par_chunks(CHUNK * d)
        .enumerate()
        .map(|(i, points)| run(level, Assign { points, first: i * CHUNK, d, count, search: &search }))
        .collect();
    let (mut sums, mut counts) = (vec![0f64; count * d], vec![0u64; count]);
    for chunk in &chunks {
        sums.iter_mut().zip(&chunk.sums).for_each(|(sum, own)| *sum += own);
        counts.iter_mut().zip(&chunk.counts).for_each(|(count, own)| *count += u64::from(*own));
    }
    let mut far: Vec<(f32, usize)> = chunks.iter().map(|chunk| chunk.farthest).collect();
    far.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let mut far = far.into_iter();
    let mut same = true;
    for ((centroid, sums), count) in centroids.chunks_exact_mut(d).zip(sums.chunks_exact(d)).zip(counts) {
        let new: Vec<f32> = if count > 0 {
            sums.iter().map(|sum| (sum / count as f64) as f32).collect()
        } else if let Some((_, at)) = far.next() {
            points[at * d..][..d].to_vec()
        } else {
            continue;
        };
        same &= centroid == new;
        centroid.copy_from_slice(&new);
    }
    same
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points() -> Vec<f32> {
        // Sixteen heaps, far apart.
        let heap = |i: usize| [(i % 4) as f32 * 10.0, (i / 4) as f32 * 10.0];
        (0..6400).flat_map(|i| heap(i % 16).map(|x| x + random(5, 7 * i as u64 + x as u64) as f32)).collect()
    }

    /// Points that come at a fixed distance are not left out, even where that is the distance of those that
    /// are looked at.
    #[test]
    fn points_at_any_distance_are_seen() {
        const PERIOD: usize = 96;
        let count = 128;
        // Twelve times as many as are looked at.
        let points: Vec<f32> =
            (0..12 * count * POINTS_A_CENTROID).flat_map(|i| [(i % PERIOD) as f32, 0.0]).collect();
        let centroids = kmeans(&points, 2, count, 1, || Ok(())).expect("centroids");
        for kind in 0..PERIOD {
            let near = |c: &[f32]| (c[0] - kind as f32).abs() < 0.25 && c[1].abs() < 0.25;
            assert!(centroids.chunks_exact(2).any(near), "no centroid at {kind}");
        }
    }

    #[test]
    fn heaps_are_found_and_the_result_is_the_same_with_any_number_of_threads() {
        let found = kmeans(&points(), 2, 16, 1, || Ok(())).expect("centroids");
        let mut heaps: Vec<[i32; 2]> =
            found.chunks(2).map(|c| [(c[0] / 10.0).floor() as i32, (c[1] / 10.0).floor() as i32]).collect();
        heaps.sort_unstable();
        heaps.dedup();
        assert_eq!(heaps.len(), 16, "{found:?}");
        let alone = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a pool");
        assert_eq!(alone.install(|| kmeans(&points(), 2, 16, 1, || Ok(()))).expect("centroids"), found);
    }

    #[test]
    fn equal_points_are_no_trouble() {
        let found = kmeans(&[1.5; 4000], 4, 256, 9, || Ok(())).expect("centroids");
        assert!(found.iter().all(|x| *x == 1.5));
    }
}
