//! Points and their nearest centroids, round by round.
//!
//! Let a be the centroid that was a point's in the round before, s' = ½‖c‖² − x·c a score as computed, and E
//! the most that one is off. With D² = 2(s'(a) + E + ½‖x‖²), which is no less than ‖x − a‖², a centroid c at
//! ‖c − a‖ > R = D + sqrt(D² + 4E) has
//!
//! ```text
//! ½‖x − c‖² − ½‖x − a‖² ≥ ½(‖c − a‖ − D)² − ½D² > 2E        so that s'(c) > s'(a)
//! ```
//!
//! and is left out. E is (2N + 2)·2^−24·(½M² + ‖x‖·M), M being the largest ‖c‖: a score is 2N operations,
//! N of ½‖c‖² and N of x·c, each of which is off by at most half a unit of what it adds up, and no sum of
//! theirs is above what is in the brackets, but for the roundings before it, which the other two units
//! cover. Points with the same a are a group; sixteen of them at a time, the farthest first, look at the
//! centroids that the farthest of the sixteen may want. Where a has not moved, only those that have.

use super::{Block, Floats, LANES, MARGIN, at_most, blocks, half_norm, squares};
use crate::attention::cpu::lanes::Lanes;
use crate::attention::cpu::{Work, run};
use crate::simd_level::Level;
use rayon::prelude::*;

/// Points that are a thread's work at a time, about.
const OF_TASK: usize = 1024;
/// No centroid.
const NONE: u32 = u32::MAX;

/// The centroid that is nearest to a point, and its score.
#[derive(Clone, Copy, Debug)]
pub(super) struct Near {
    pub(super) number: u32,
    pub(super) score: f32,
}

/// Points, centroids, and which is nearest to each point.
pub(super) struct Assigned<'a, const N: usize> {
    points: &'a [[f32; N]],
    /// ½‖x‖².
    half_squares: Vec<f64>,
    pub(super) centroids: Vec<[f32; N]>,
    /// Of sixteen centroids a bit each: whether it is another one than in the last round.
    moved: Vec<u32>,
    /// By point.
    pub(super) near: Vec<Near>,
    /// Points by centroid, of each by number, and where each centroid's begin. None before the first round.
    order: Vec<u32>,
    starts: Vec<usize>,
    /// What a round finds, in that order.
    found: Vec<Near>,
}

impl<'a, const N: usize> Assigned<'a, N> {
    pub(super) fn new(points: &'a [[f32; N]], centroids: Vec<[f32; N]>) -> Self {
        let none = Near { number: NONE, score: 0.0 };
        let half = |x: &[f32; N]| 0.5 * x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
        Assigned {
            half_squares: points.iter().map(half).collect(),
            moved: vec![u32::MAX; centroids.len().div_ceil(LANES)],
            near: vec![none; points.len()],
            order: (0..points.len() as u32).collect(),
            starts: Vec::new(),
            found: vec![none; points.len()],
            points,
            centroids,
        }
    }

    /// Finds the nearest centroid of each point.
    pub(super) fn assign(&mut self, level: Level) {
        let half_norms: Vec<f32> = self.centroids.iter().map(half_norm).collect();
        let longest = half_norms.iter().fold(0f32, |most, half| most.max(*half));
        let view = View {
            points: self.points,
            half_squares: &self.half_squares,
            centroids: &self.centroids,
            by_channel: &blocks(&self.centroids, f32::INFINITY),
            half_norms: &half_norms,
            longest: (2.0 * f64::from(longest)).sqrt() * (1.0 + MARGIN),
            moved: &self.moved,
            near: &self.near,
            order: &self.order,
            starts: &self.starts,
        };
        let mut tasks = Vec::new();
        let mut rest = &mut self.found[..];
        // Where a task may end: in the first round anywhere, in others behind a group.
        let groups = self.starts.len().saturating_sub(1);
        let cuts = if groups == 0 { self.points.len().div_ceil(OF_TASK) } else { groups };
        let end_of = |cut: usize| match groups {
            0 => ((cut + 1) * OF_TASK).min(self.points.len()),
            _ => self.starts[cut + 1],
        };
        let (mut begin, mut first) = (0, 0);
        for cut in 0..cuts {
            let end = end_of(cut);
            if end - begin >= OF_TASK || cut + 1 == cuts {
                let (found, others) = rest.split_at_mut(end - begin);
                rest = others;
                tasks.push(Task { view, begin, groups: [first, cut + 1], found });
                (begin, first) = (end, cut + 1);
            }
        }
        tasks.into_par_iter().for_each_init(Scratch::default, |scratch, task| {
            if groups == 0 {
                run(level, All { task, scratch });
            } else {
                run(level, Groups { task, scratch });
            }
        });
    }

    /// Moves each centroid to the mean of its points; one without points to a point that is far from its own.
    /// Whether nothing has changed.
    pub(super) fn move_centroids(&mut self) -> bool {
        let count = self.centroids.len();
        let mut changed = vec![false; count];
        for (at, found) in self.order.iter().zip(&self.found) {
            let near = &mut self.near[*at as usize];
            if near.number != found.number {
                changed[found.number as usize] = true;
                if near.number != NONE {
                    changed[near.number as usize] = true;
                }
            }
            *near = *found;
        }
        self.sort();
        let empty = self.starts.windows(2).filter(|own| own[0] == own[1]).count();
        let mut far = self.farthest(empty).into_iter();
        self.moved.fill(0);
        for (number, changed) in changed.into_iter().enumerate() {
            let own = &self.order[self.starts[number]..self.starts[number + 1]];
            let new = match own {
                [] => match far.next() {
                    Some(at) => self.points[at as usize],
                    None => continue,
                },
                own if changed => mean(self.points, own),
                _ => continue,
            };
            if self.centroids[number] != new {
                self.centroids[number] = new;
                self.moved[number / LANES] |= 1 << (number % LANES);
            }
        }
        self.moved.iter().all(|moved| *moved == 0)
    }

    /// Orders points by their centroids.
    fn sort(&mut self) {
        self.starts.clear();
        self.starts.resize(self.centroids.len() + 1, 0);
        for near in &self.near {
            self.starts[near.number as usize + 1] += 1;
        }
        for number in 0..self.centroids.len() {
            self.starts[number + 1] += self.starts[number];
        }
        let mut next = self.starts.clone();
        for (at, near) in (0u32..).zip(&self.near) {
            let next = &mut next[near.number as usize];
            self.order[*next] = at;
            *next += 1;
        }
    }

    /// The points that are farthest from their centroids, the farthest first.
    fn farthest(&self, count: usize) -> Vec<u32> {
        if count == 0 {
            return Vec::new();
        }
        let of = |(at, (near, half)): (u32, (&Near, &f64))| (f64::from(near.score) + half, at);
        let mut far: Vec<(f64, u32)> = (0..).zip(self.near.iter().zip(&self.half_squares)).map(of).collect();
        far.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        far.into_iter().take(count).map(|(_, at)| at).collect()
    }
}

/// The mean of some of the points, added up in their order.
fn mean<const N: usize>(points: &[[f32; N]], own: &[u32]) -> [f32; N] {
    let mut sums = [0f64; N];
    for at in own {
        sums.iter_mut().zip(&points[*at as usize]).for_each(|(sum, x)| *sum += f64::from(*x));
    }
    sums.map(|sum| (sum / own.len() as f64) as f32)
}

/// What a round works on.
#[derive(Clone, Copy)]
struct View<'a, const N: usize> {
    points: &'a [[f32; N]],
    half_squares: &'a [f64],
    centroids: &'a [[f32; N]],
    /// The same, sixteen at a time; beyond the last one infinity.
    by_channel: &'a [Block<N>],
    half_norms: &'a [f32],
    /// No ‖c‖ is larger.
    longest: f64,
    moved: &'a [u32],
    near: &'a [Near],
    order: &'a [u32],
    starts: &'a [usize],
}

impl<const N: usize> View<'_, N> {
    /// The square of R of a point, with room for rounding, given the score of its centroid.
    #[inline(always)]
    fn limit(&self, at: usize, score: f32) -> f32 {
        let half = self.half_squares[at];
        let units = (2 * N + 2) as f64 / f64::from(1u32 << 24);
        let off = units * (0.5 * self.longest * self.longest + (2.0 * half).sqrt() * self.longest);
        let square = (2.0 * (f64::from(score) + off + half)).max(0.0);
        let radius = square.sqrt() + (square + 4.0 * off).sqrt();
        ((radius * radius * (1.0 + MARGIN)) as f32).min(f32::MAX)
    }
}

/// Some points in their order, of whole groups but for the first round.
struct Task<'a, const N: usize> {
    view: View<'a, N>,
    begin: usize,
    groups: [usize; 2],
    found: &'a mut [Near],
}

/// A thread's memory.
#[derive(Default)]
struct Scratch {
    /// The squares of a group's radii, and which of its points.
    limits: Vec<(f32, u32)>,
    /// Centroids that are looked at, and the squares of their distances to the group's.
    numbers: Vec<u32>,
    squares: Vec<f32>,
}

/// The nearest of some centroids to sixteen points, the first of equal ones; `minus` are the points, negated.
#[inline(always)]
fn nearest<const N: usize>(view: View<'_, N>, minus: &Block<N>, numbers: &[u32]) -> [Near; LANES] {
    let mut best = [f32::INFINITY; LANES];
    let mut index = [NONE; LANES];
    for number in numbers {
        let (c, half_norm) = (&view.centroids[*number as usize], view.half_norms[*number as usize]);
        let mut s = [half_norm; LANES];
        for (minus, c) in minus.iter().zip(c) {
            for (s, minus) in s.iter_mut().zip(minus) {
                *s = minus.mul_add(*c, *s);
            }
        }
        for lane in 0..LANES {
            let less = s[lane] < best[lane];
            best[lane] = if less { s[lane] } else { best[lane] };
            index[lane] = if less { *number } else { index[lane] };
        }
    }
    std::array::from_fn(|lane| Near { number: index[lane], score: best[lane] })
}

/// Looks at all centroids.
struct All<'a, 's, const N: usize> {
    task: Task<'a, N>,
    scratch: &'s mut Scratch,
}

impl<const N: usize> Work for All<'_, '_, N> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let All { task: Task { view, begin, found, .. }, scratch } = self;
        scratch.numbers.clear();
        scratch.numbers.extend(0..view.centroids.len() as u32);
        for (chunk, found) in found.chunks_mut(LANES).enumerate() {
            let mut minus = [[0f32; LANES]; N];
            for (channel, lanes) in minus.iter_mut().enumerate() {
                for (lane, x) in lanes.iter_mut().enumerate() {
                    *x = -view.points[begin + LANES * chunk + lane.min(found.len() - 1)][channel];
                }
            }
            found.copy_from_slice(&nearest(view, &minus, &scratch.numbers)[..found.len()]);
        }
    }
}

/// Looks at the centroids near those of the round before.
struct Groups<'a, 's, const N: usize> {
    task: Task<'a, N>,
    scratch: &'s mut Scratch,
}

impl<const N: usize> Work for Groups<'_, '_, N> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Groups { task: Task { view, begin, groups: [first, past], found }, scratch } = self;
        for group in first..past {
            let own = view.starts[group]..view.starts[group + 1];
            if !own.is_empty() {
                let found = &mut found[own.start - begin..own.end - begin];
                of_group(view, group, &view.order[own], found, scratch);
            }
        }
    }
}

/// The nearest centroids of a group's points.
#[inline(always)]
fn of_group<const N: usize>(
    view: View<'_, N>,
    group: usize,
    points: &[u32],
    found: &mut [Near],
    scratch: &mut Scratch,
) {
    let Scratch { limits, numbers, squares: far } = scratch;
    let own = &view.centroids[group];
    let moved = view.moved[group / LANES] >> (group % LANES) & 1 != 0;
    limits.clear();
    for (i, (at, found)) in (0u32..).zip(points.iter().zip(&mut *found)) {
        let mut score = view.near[*at as usize].score;
        if moved {
            score = view.half_norms[group];
            for (x, c) in view.points[*at as usize].iter().zip(own) {
                score = (-x).mul_add(*c, score);
            }
        }
        *found = Near { number: group as u32, score };
        limits.push((view.limit(*at as usize, score), i));
    }
    limits.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    numbers.clear();
    far.clear();
    let limit = [limits[0].0; LANES];
    for (block, centroids) in view.by_channel.iter().enumerate() {
        let itself = if block == group / LANES { 1 << (group % LANES) } else { 0 };
        let wanted = if moved { u32::MAX } else { view.moved[block] | itself };
        if wanted == 0 {
            continue;
        }
        let distances: Floats = squares(centroids, own);
        let mut near = at_most(&distances, &limit) & wanted;
        while near != 0 {
            let lane = near.trailing_zeros() as usize;
            near &= near - 1;
            numbers.push((LANES * block + lane) as u32);
            far.push(distances[lane]);
        }
    }
    if numbers.len() == 1 {
        return;
    }
    for chunk in limits.chunks(LANES) {
        let mut kept = 0;
        for i in 0..numbers.len() {
            (numbers[kept], far[kept]) = (numbers[i], far[i]);
            kept += usize::from(far[i] <= chunk[0].0);
        }
        numbers.truncate(kept);
        far.truncate(kept);
        if kept == 1 {
            return;
        }
        let mut minus = [[0f32; LANES]; N];
        for lane in 0..LANES {
            let (_, i) = chunk[lane.min(chunk.len() - 1)];
            let x = &view.points[points[i as usize] as usize];
            (0..N).for_each(|channel| minus[channel][lane] = -x[channel]);
        }
        for ((_, i), near) in chunk.iter().zip(nearest(view, &minus, numbers)) {
            found[*i as usize] = near;
        }
    }
}
