//! Rounding by chance: the mean over the chances is the number, whatever it is of, and the chances of
//! different numbers have nothing to do with each other.

use super::reference;
use ferrokv::host::certified::reference::Tile;
use ferrokv::host::certified::{Geometry, Layout, Rounding};
use ferrokv::kernels_gpu::mix;
use half::f16;
use rayon::prelude::*;

const D: usize = 64;
/// Seeds that are tried.
const SEEDS: usize = 4000;

/// Errors of a block's keys and values by seed, each in units of the deviation that chances of its
/// probability have; 0 where there is nothing to choose. [seeds, 2·16·D].
fn errors(layout: Layout) -> Vec<Vec<f64>> {
    let geometry = Geometry::new(1, D as u32).unwrap().with_layout(layout);
    let number = |i: usize, spread: f64| {
        let unit = (mix(i as u64) >> 11) as f64 * 2f64.powi(-53);
        f16::from_f64(spread * (unit - 0.4) + (i % D) as f64 * 0.01)
    };
    let keys: Vec<f16> = (0..16 * D).map(|i| number(i, 3.0)).collect();
    let values: Vec<f16> = (0..16 * D).map(|i| number(i + 77_777, 2.0)).collect();
    let tile_layout = geometry.layout();
    let tiles: Vec<Vec<u8>> = (0..SEEDS as u32)
        .into_par_iter()
        .map(|seed| {
            let rounding = Rounding::Stochastic { seed };
            reference::quantize(&keys, &values, tile_layout, rounding, [seed % 5, seed % 3]).0
        })
        .collect();
    let read = |tile: &[u8]| -> Vec<f64> {
        let tile = Tile::new(tile_layout, tile).unwrap();
        let places = || (0..16).flat_map(|t| (0..D).map(move |c| (t, c)));
        places().map(|(t, c)| tile.key(t, c)).chain(places().map(|(t, c)| tile.value(t, c))).collect()
    };
    let restored: Vec<Vec<f64>> = tiles.par_iter().map(|tile| read(tile)).collect();
    let exact: Vec<f64> = keys.iter().chain(&values).map(|x| x.to_f64()).collect();
    // What codes are apart, keys first.
    let first = Tile::new(tile_layout, &tiles[0]).unwrap();
    let step = |i: usize| {
        let (token, channel) = (i / D % 16, i % D);
        if i < 16 * D { first.key_scale(channel) } else { first.value_scale(token, channel).to_f64() }
    };
    let deviations: Vec<f64> = (0..exact.len())
        .map(|i| {
            let all = || restored.iter().map(|numbers| numbers[i]);
            let (low, high) = (all().fold(f64::INFINITY, f64::min), all().fold(f64::NEG_INFINITY, f64::max));
            if low == high {
                // The other code is so much further away that no seed has taken it.
                assert!((exact[i] - low).abs() < 0.01 * step(i), "number {i} has one code alone");
                return 0.0;
            }
            assert!(low <= exact[i] && exact[i] <= high, "number {i} is not between its codes");
            ((exact[i] - low) * (high - exact[i])).sqrt()
        })
        .collect();
    let unit = |(i, x): (usize, &f64)| if deviations[i] > 0.0 { (x - exact[i]) / deviations[i] } else { 0.0 };
    restored.iter().map(|numbers| numbers.iter().enumerate().map(unit).collect()).collect()
}

/// The sums over `n` seeds of errors with mean 0 and deviation 1, over √n, have squares of 1 in the mean;
/// that mean over `m` such sums is within 6 √(2/m).
fn are_like_noise(what: &str, sums: impl Iterator<Item = f64>) {
    let (mut squares, mut m, mut largest) = (0f64, 0f64, 0f64);
    for sum in sums {
        let scaled = sum / (SEEDS as f64).sqrt();
        squares += scaled * scaled;
        largest = largest.max(scaled.abs());
        m += 1.0;
    }
    let mean = squares / m;
    assert!((mean - 1.0).abs() < 6.0 * (2.0 / m).sqrt(), "{what}: {mean} over {m} sums");
    // One of 2,000 normal numbers is beyond 6 with a probability of 4e−6.
    assert!(largest < 6.0, "{what}: {largest}");
}

#[test]
fn means_over_the_chances_are_the_numbers_and_chances_are_independent() {
    for layout in Layout::ALL {
        let errors = errors(layout);
        let numbers = errors[0].len();
        // Rare choices are no normal numbers after so few seeds.
        let often = |i: &usize| {
            let up = errors.iter().filter(|e| e[*i] > 0.0).count();
            (SEEDS / 50..SEEDS * 49 / 50).contains(&up)
        };
        let some: Vec<usize> = (0..numbers).filter(often).collect();
        assert!(some.len() > numbers * 8 / 10, "{} of {numbers} have something to choose", some.len());
        are_like_noise("means", some.iter().map(|i| errors.iter().map(|e| e[*i]).sum()));
        // A channel's next token, a token's next channel, a key and its value.
        for step in [1, D, 16 * D] {
            let pairs = some.iter().filter(|i| some.binary_search(&(*i + step)).is_ok());
            let products = pairs.map(|i| errors.iter().map(|e| e[*i] * e[i + step]).sum());
            are_like_noise("products", products);
        }
        // A seed's neighbour.
        let products = some.iter().map(|i| errors.windows(2).map(|two| two[0][*i] * two[1][*i]).sum::<f64>());
        are_like_noise("products of seeds", products);
    }
}
