//! What is left out loses: rounds and seeding against definitions that look at everything.

use super::near::Assigned;
use super::*;

fn told() -> kv::Result<()> {
    Ok(())
}

fn plain(rows: &[f16], d: usize) -> Points<'_> {
    Points { rows, stride: d, first: 0, width: d, d }
}

fn halves(x: impl Iterator<Item = f32>) -> Vec<f16> {
    x.map(f16::from_f32).collect()
}

fn points() -> Vec<f16> {
    // Sixteen heaps, far apart.
    let heap = |i: usize| [(i % 4) as f32 * 10.0, (i / 4) as f32 * 10.0];
    let near = |i: usize| heap(i % 16).map(|x| x + random(5, 7 * i as u64 + x as u64) as f32);
    halves((0..6400).flat_map(near))
}

/// Points in clouds of several sizes and places; `steps` to a unit, so that many are equally far from two
/// centroids, or the same.
fn clouds<const N: usize>(count: usize, steps: f32) -> Vec<[f32; N]> {
    let normal = |n: u64| (0..6).map(|i| random(8, 6 * n + i) as f32 - 0.5).sum::<f32>();
    (0..count as u64)
        .map(|i| {
            let cloud = i % 7;
            std::array::from_fn(|channel| {
                let n = i * N as u64 + channel as u64;
                let middle = normal(1 << 40 | cloud << 8 | channel as u64) * 3.0;
                ((middle + normal(n) * (0.2 + cloud as f32)) * steps).round() / steps
            })
        })
        .collect()
}

/// Points that are hard to bound: on a line, where no triangle is one; far from the origin, where scores are
/// mostly rounding; in clouds of which a few are far away, so that rounding matters to the others.
fn hard<const N: usize>(count: usize) -> Vec<Vec<[f32; N]>> {
    let line = |x: &[f32; N]| x.map(|_| x[0]);
    let axis =
        |x: &[f32; N]| std::array::from_fn(|channel| if channel == 0 { (16.0 * x[0]).round() } else { 0.0 });
    let mut some_far = clouds::<N>(count, 4096.0);
    some_far.iter_mut().step_by(997).for_each(|x| *x = x.map(|x| 300.0 * x));
    let mut small = some_far.clone();
    small.iter_mut().for_each(|x| *x = x.map(|x| 1e-4 * x));
    vec![
        clouds(count, 2.0),
        clouds::<N>(count, 4096.0).iter().map(line).collect(),
        clouds::<N>(count, 4096.0).iter().map(axis).collect(),
        clouds::<N>(count, 4096.0).iter().map(|x| x.map(|x| x + 500.0)).collect(),
        some_far,
        small,
    ]
}

/// The first of the centroids with the least score, by the definition.
fn by_definition<const N: usize>(x: &[f32; N], centroids: &[[f32; N]]) -> (u32, f32) {
    let wide = |x: &[f32; N]| {
        let mut wide = [0f32; 8];
        wide[..N].copy_from_slice(x);
        wide
    };
    let score = |c: &[f32; N]| Nearest::score::<N>(&wide(x), &wide(c), half_norm(c));
    let all = (0u32..).zip(centroids.iter().map(score));
    all.reduce(|best, own| if own.1 < best.1 { own } else { best }).expect("there are some")
}

fn rounds_are_those_of_looking_at_all<const N: usize>() {
    for (kind, points) in hard::<N>(1500).into_iter().enumerate() {
        let of_level = |level: Level| {
            let mut assigned = Assigned::new(&points, seed::seeded(level, points.clone(), 96, 3));
            let mut bits = Vec::new();
            for round in 0..10 {
                assigned.assign(level);
                let centroids = assigned.centroids.clone();
                let done = assigned.move_centroids();
                for (at, (x, near)) in points.iter().zip(&assigned.near).enumerate() {
                    let (number, score) = by_definition(x, &centroids);
                    assert_eq!(
                        (near.number, near.score.to_bits()),
                        (number, score.to_bits()),
                        "{N} channels, kind {kind}, {level:?}, round {round}, point {at}"
                    );
                }
                bits.push(assigned.centroids.as_flattened().iter().map(|x| x.to_bits()).collect::<Vec<_>>());
                if done {
                    assert_eq!(assigned.centroids, centroids);
                    break;
                }
            }
            bits
        };
        let all: Vec<_> = Level::available().iter().map(|level| of_level(*level)).collect();
        assert!(all[0].len() > 2, "{N} channels, kind {kind}: no round leaves anything out");
        assert!(all.iter().all(|own| *own == all[0]), "{N} channels, kind {kind}: levels differ");
    }
}

#[test]
fn what_rounds_leave_out_loses() {
    rounds_are_those_of_looking_at_all::<2>();
    rounds_are_those_of_looking_at_all::<4>();
    rounds_are_those_of_looking_at_all::<8>();
}

/// Distances after new centroids are those of looking at all points, and so are sums.
#[test]
fn what_seeding_leaves_out_stays() {
    for (kind, points) in hard::<4>(1900).into_iter().enumerate() {
        for level in Level::available() {
            let (with, without) = seed::both(*level, points.clone(), 200);
            assert_eq!(with, without, "{level:?}, kind {kind}");
        }
    }
}

/// Points that come at a fixed distance are not left out, even where that is the distance of those that are
/// looked at.
#[test]
fn points_at_any_distance_are_seen() {
    const PERIOD: usize = 96;
    let count = 128;
    // Twelve times as many as are looked at.
    let total = 12 * count * POINTS_A_CENTROID;
    let rows = halves((0..total).flat_map(|i| [(i % PERIOD) as f32, 0.0]));
    let centroids = kmeans(plain(&rows, 2), count, 1, &told).expect("centroids");
    for kind in 0..PERIOD {
        let near = |c: &[f32]| (c[0] - kind as f32).abs() < 0.25 && c[1].abs() < 0.25;
        assert!(centroids.chunks_exact(2).any(near), "no centroid at {kind}");
    }
}

#[test]
fn heaps_are_found_and_the_result_is_the_same_with_any_number_of_threads() {
    let rows = points();
    let found = kmeans(plain(&rows, 2), 16, 1, &told).expect("centroids");
    let mut heaps: Vec<[i32; 2]> =
        found.chunks(2).map(|c| [(c[0] / 10.0).floor() as i32, (c[1] / 10.0).floor() as i32]).collect();
    heaps.sort_unstable();
    heaps.dedup();
    assert_eq!(heaps.len(), 16, "{found:?}");
    let alone = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a pool");
    assert_eq!(alone.install(|| kmeans(plain(&rows, 2), 16, 1, &told)).expect("centroids"), found);
}

#[test]
fn equal_points_are_no_trouble() {
    let found = kmeans(plain(&[f16::from_f32(1.5); 4000], 4), 256, 9, &told).expect("centroids");
    assert!(found.iter().all(|x| *x == 1.5));
}

/// A head's sub-vectors, and no other's.
#[test]
fn points_are_those_of_their_rows() {
    let rows = halves((0..48).map(|i| i as f32));
    let points = Points { rows: &rows, stride: 16, first: 8, width: 8, d: 4 };
    assert_eq!(points.count(), 6);
    let firsts: Vec<f32> = (0..6).map(|i| points.get::<4>(i)[0]).collect();
    assert_eq!(firsts, [8.0, 12.0, 24.0, 28.0, 40.0, 44.0]);
}
