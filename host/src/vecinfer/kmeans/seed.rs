//! k-means++: each centroid is a point, drawn with the square of its distance to the nearest one so far.
//!
//! Points are ordered so that sixteen neighbours are a block with a middle m and a radius r. With the largest
//! distance D of its points to their nearest centroids, a new centroid c with ‖c − m‖ ≥ r + D is no nearer to
//! any of them, and the block is left alone. The comparison has room for rounding, so that distances are
//! those of looking at all points.

use super::{Block, Floats, LANES, MARGIN, at_most, blocks, random, squares};
use crate::attention::cpu::lanes::Lanes;
use crate::attention::cpu::{Work, run};
use crate::simd_level::Level;

/// Blocks of which the sum is kept.
const OF_SUM: usize = 64;

/// `count` of the points.
pub(super) fn seeded<const N: usize>(
    level: Level,
    mut points: Vec<[f32; N]>,
    count: usize,
    seed: u64,
) -> Vec<[f32; N]> {
    arrange(&mut points);
    let mut seeding = Seeding::new(points);
    let total = seeding.points.len();
    let mut chosen = ((random(seed, 0) * total as f64) as usize).min(total - 1);
    let mut centroids = Vec::with_capacity(count);
    for number in 0..count {
        let centroid = seeding.points[chosen];
        centroids.push(centroid);
        run(level, Update { seeding: &mut seeding, centroid });
        chosen = seeding.draw(random(seed, number as u64 + 1));
    }
    centroids
}

/// Orders points so that neighbours are near: halves by the channel that spreads most, again and again.
fn arrange<const N: usize>(points: &mut [[f32; N]]) {
    if points.len() <= LANES {
        return;
    }
    let spread = |channel: usize| {
        let (mut sum, mut squares) = (0f64, 0f64);
        for point in points.iter() {
            let x = f64::from(point[channel]);
            sum += x;
            squares += x * x;
        }
        squares - sum * sum / points.len() as f64
    };
    let spreads: [f64; N] = std::array::from_fn(spread);
    let widest = (0..N).max_by(|a, b| spreads[*a].total_cmp(&spreads[*b])).unwrap_or(0);
    let middle = (points.len() / 2).next_multiple_of(LANES);
    // Equal in that channel: the others decide, so that the two halves are the same sets
    // whatever the order was.
    let key = |point: &[f32; N]| std::array::from_fn::<f32, N, _>(|i| point[(widest + i) % N]);
    points.select_nth_unstable_by(middle, |a, b| {
        let pairs = key(a).into_iter().zip(key(b));
        pairs.map(|(a, b)| a.total_cmp(&b)).find(|order| order.is_ne()).unwrap_or(std::cmp::Ordering::Equal)
    });
    let (low, high) = points.split_at_mut(middle);
    arrange(low);
    arrange(high);
}

struct Seeding<const N: usize> {
    points: Vec<[f32; N]>,
    blocks: Vec<Block<N>>,
    /// Squares of the points' distances to the nearest centroid; 0 where there is no point.
    distances: Vec<Floats>,
    /// Sums of a block's distances, and of [`OF_SUM`] blocks'.
    sums: Vec<f64>,
    upper: Vec<f64>,
    /// Middles of sixteen blocks, their radii, and the squares of r + D.
    middles: Vec<Block<N>>,
    radii: Vec<f32>,
    reaches: Vec<Floats>,
}

impl<const N: usize> Seeding<N> {
    fn new(points: Vec<[f32; N]>) -> Self {
        let own = blocks(&points, 0.0);
        let middle = |points: &[[f32; N]]| -> [f32; N] {
            std::array::from_fn(|channel| {
                let sum: f64 = points.iter().map(|point| f64::from(point[channel])).sum();
                (sum / points.len() as f64) as f32
            })
        };
        let middles: Vec<[f32; N]> = points.chunks(LANES).map(middle).collect();
        let radius = |(points, middle): (&[[f32; N]], &[f32; N])| {
            let far = |point: &[f32; N]| -> f64 {
                point.iter().zip(middle).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum()
            };
            (points.iter().map(far).fold(0.0, f64::max).sqrt() * (1.0 + MARGIN)) as f32
        };
        let count = own.len();
        let mut distances = vec![[f32::INFINITY; LANES]; count];
        if let Some(last) = distances.last_mut() {
            last[(points.len() - 1) % LANES + 1..].fill(0.0);
        }
        Seeding {
            radii: points.chunks(LANES).zip(&middles).map(radius).collect(),
            // Blocks that there are not are never reached.
            middles: blocks(&middles, 0.0),
            reaches: (0..count.div_ceil(LANES))
                .map(|i| {
                    std::array::from_fn(|lane| if LANES * i + lane < count { f32::INFINITY } else { -1.0 })
                })
                .collect(),
            sums: vec![0.0; count],
            upper: vec![0.0; count.div_ceil(OF_SUM)],
            distances,
            blocks: own,
            points,
        }
    }

    /// The point at `part` of the sum of all distances. Where all points are taken, any will do.
    fn draw(&self, part: f64) -> usize {
        let mut left = part * self.upper.iter().sum::<f64>();
        let mut passed = |sums: &[f64]| {
            let mut at = 0;
            while at + 1 < sums.len() && left >= sums[at] {
                left -= sums[at];
                at += 1;
            }
            at
        };
        let upper = passed(&self.upper);
        let end = self.sums.len().min(OF_SUM * (upper + 1));
        let block = OF_SUM * upper + passed(&self.sums[OF_SUM * upper..end]);
        let lane = passed(&self.distances[block].map(f64::from));
        (LANES * block + lane).min(self.points.len() - 1)
    }
}

/// Distances to the nearest centroid, one of which is new.
struct Update<'a, const N: usize> {
    seeding: &'a mut Seeding<N>,
    centroid: [f32; N],
}

impl<const N: usize> Work for Update<'_, N> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Update { seeding, centroid } = self;
        let mut changed = usize::MAX;
        for group in 0..seeding.middles.len() {
            let far = squares(&seeding.middles[group], &centroid);
            let mut reached = at_most(&far, &seeding.reaches[group]);
            while reached != 0 {
                let lane = reached.trailing_zeros() as usize;
                reached &= reached - 1;
                let block = LANES * group + lane;
                let far = squares(&seeding.blocks[block], &centroid);
                let distances = &mut seeding.distances[block];
                let mut sums = [0f64; LANES];
                let mut most = 0f32;
                for ((distance, far), sum) in distances.iter_mut().zip(&far).zip(&mut sums) {
                    *distance = if *far < *distance { *far } else { *distance };
                    *sum = f64::from(*distance);
                    most = if *distance > most { *distance } else { most };
                }
                for half in [8, 4, 2, 1] {
                    for lane in 0..half {
                        sums[lane] += sums[lane + half];
                    }
                }
                seeding.sums[block] = sums[0];
                let reach = f64::from(seeding.radii[block]) + f64::from(most).sqrt();
                seeding.reaches[group][lane] = (reach * reach * (1.0 + 4.0 * MARGIN)) as f32;
                if changed != block / OF_SUM {
                    seeding.add_up(changed);
                    changed = block / OF_SUM;
                }
            }
        }
        seeding.add_up(changed);
    }
}

impl<const N: usize> Seeding<N> {
    /// Adds up the sums of some blocks.
    #[inline(always)]
    fn add_up(&mut self, upper: usize) {
        if upper < self.upper.len() {
            let end = self.sums.len().min(OF_SUM * (upper + 1));
            self.upper[upper] = self.sums[OF_SUM * upper..end].iter().sum();
        }
    }
}

/// Distances and sums after `count` centroids, as they are and of looking at all points.
#[cfg(test)]
pub(super) fn both<const N: usize>(
    level: Level,
    mut points: Vec<[f32; N]>,
    count: usize,
) -> (Vec<f32>, Vec<f32>) {
    arrange(&mut points);
    let mut seeding = Seeding::new(points.clone());
    let mut all = vec![f32::INFINITY; points.len()];
    for number in 0..count {
        let centroid = points[(random(6, number as u64) * points.len() as f64) as usize];
        run(level, Update { seeding: &mut seeding, centroid });
        for (distance, point) in all.iter_mut().zip(&points) {
            let far = point.iter().zip(&centroid).fold(0f32, |sum, (a, b)| (a - b).mul_add(a - b, sum));
            *distance = distance.min(far);
        }
    }
    let sum: f64 = all.iter().map(|x| f64::from(*x)).sum();
    let found: f64 = seeding.upper.iter().sum();
    assert!((sum - found).abs() <= 1e-12 * sum, "{found} for {sum}");
    (seeding.distances.as_flattened()[..all.len()].to_vec(), all)
}
