//! Keys in groups of rotary blocks, in f64: Block-GTQ as published and with other scores, levels and norms,
//! to be compared before there are kernels for them. The kernels have one group, or four of one size with
//! fixed bits.
//!
//! A group of n blocks is a row of 2n channels with bits, a rotation and a norm of its own: x ↦
//! r·R^T·L(R·x/r)/√(2n). The rotation is one of Haar's measure, drawn from a seed, as groups are of any size.

use kernels_gpu::mixed;
use std::collections::HashMap;
use std::sync::Arc;

/// How a group's norm is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    /// f16: two bytes.
    Half,
    /// A byte: log2 of the norm, sixteen steps an octave, over sixteen octaves around the calibration's.
    Byte,
}

impl Norm {
    /// Bytes of one.
    pub fn bytes(self) -> usize {
        match self {
            Norm::Half => 2,
            Norm::Byte => 1,
        }
    }

    fn kept(self, norm: f64) -> f64 {
        match self {
            Norm::Half => half::f16::from_f64(norm).to_f64(),
            Norm::Byte => ((norm.log2() * 16.0).round() / 16.0).exp2(),
        }
    }
}

/// Which levels a group has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Book {
    /// Those of a normal distribution, whatever the group's size: the paper's.
    Normal,
    /// Those of the sphere in as many dimensions as the group has.
    Sphere,
}

/// What a group's rows go through.
#[derive(Debug)]
struct Turned {
    /// [dim, dim], row by row.
    rotation: Vec<f64>,
    /// Positive levels, √dim times the unit sphere's.
    levels: Vec<f64>,
}

/// Rotations and levels, made once for each size and number of bits.
#[derive(Debug, Default)]
pub struct Library(HashMap<(usize, u32, bool), Arc<Turned>>);

impl Library {
    fn get(&mut self, dim: usize, bits: u32, book: Book) -> Arc<Turned> {
        let sphere = book == Book::Sphere;
        let make = || {
            // From so many dimensions on the difference to the normal distribution is below 10^-4.
            let levels = super::codebook::best_levels(if sphere { dim } else { 1 << 20 }, bits);
            Arc::new(Turned { rotation: haar(dim, (dim as u64) << 8 | u64::from(bits)), levels })
        };
        self.0.entry((dim, bits, sphere)).or_insert_with(make).clone()
    }
}

/// A number that is normally distributed.
fn normal(seed: u64, index: u64) -> f64 {
    let uniform = |i: u64| ((mixed(seed, i) >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    (-2.0 * uniform(2 * index).ln()).sqrt() * (std::f64::consts::TAU * uniform(2 * index + 1)).cos()
}

/// Normal numbers, made orthonormal row by row.
fn haar(dim: usize, seed: u64) -> Vec<f64> {
    let mut rows: Vec<f64> = (0..dim * dim).map(|i| normal(seed, i as u64)).collect();
    for i in 0..dim {
        let (before, rest) = rows.split_at_mut(i * dim);
        let own = &mut rest[..dim];
        for row in before.chunks_exact(dim) {
            let along: f64 = row.iter().zip(&*own).map(|(a, b)| a * b).sum();
            own.iter_mut().zip(row).for_each(|(x, a)| *x -= along * a);
        }
        let length = own.iter().map(|x| x * x).sum::<f64>().sqrt();
        own.iter_mut().for_each(|x| *x /= length);
    }
    rows
}

/// A head's keys in groups.
#[derive(Debug)]
pub struct Groups {
    /// Channels of each, and what they go through.
    parts: Vec<(Vec<usize>, Arc<Turned>)>,
    norm: Norm,
    bits: usize,
}

impl Groups {
    /// Of `parts`, bits and blocks each, over the channels that `blocks` have.
    pub fn new(
        library: &mut Library,
        blocks: &[[usize; 2]],
        parts: &[(u32, Vec<usize>)],
        book: Book,
        norm: Norm,
    ) -> Self {
        let mut bits = 0;
        let parts = parts.iter().map(|(of_each, own)| {
            let channels: Vec<usize> = own.iter().flat_map(|block| blocks[*block]).collect();
            bits += channels.len() * *of_each as usize;
            let turned = library.get(channels.len(), *of_each, book);
            (channels, turned)
        });
        Groups { parts: parts.collect(), norm, bits }
    }

    /// Bytes of a key, norms among them.
    pub fn bytes(&self) -> f64 {
        self.bits as f64 / 8.0 + (self.parts.len() * self.norm.bytes()) as f64
    }

    /// What is left of a key.
    pub fn restored(&self, key: &[f64]) -> Vec<f64> {
        let mut restored = vec![0.0; key.len()];
        for (channels, turned) in &self.parts {
            let own: Vec<f64> = channels.iter().map(|channel| key[*channel]).collect();
            let r = own.iter().map(|x| x * x).sum::<f64>().sqrt();
            if r == 0.0 {
                continue;
            }
            let root = (own.len() as f64).sqrt();
            let scale = self.norm.kept(r) / root;
            for row in turned.rotation.chunks_exact(own.len()) {
                let y = row.iter().zip(&own).map(|(a, x)| a * x).sum::<f64>() * root / r;
                let nearest = turned
                    .levels
                    .iter()
                    .copied()
                    .min_by(|a, b| (y.abs() - a).abs().total_cmp(&(y.abs() - b).abs()))
                    .unwrap_or(0.0);
                let level = nearest.copysign(y) * scale;
                channels.iter().zip(row).for_each(|(channel, a)| restored[*channel] += level * a);
            }
        }
        restored
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gtq::codebook::best_error;

    #[test]
    fn a_rotation_is_orthonormal() {
        for dim in [2, 6, 64] {
            let rows = haar(dim, 3);
            for (i, a) in rows.chunks_exact(dim).enumerate() {
                for (j, b) in rows.chunks_exact(dim).enumerate() {
                    let product: f64 = a.iter().zip(b).map(|(x, y)| x * y).sum();
                    assert!((product - f64::from(u8::from(i == j))).abs() < 1e-12, "{dim} {i} {j}");
                }
            }
        }
    }

    /// One group of all blocks errs as the levels say; many err as theirs say, channel by channel.
    #[test]
    fn groups_err_as_their_bits_say() {
        let mut library = Library::default();
        let blocks: Vec<[usize; 2]> = (0..32).map(|i| [2 * i, 2 * i + 1]).collect();
        let whole = [(3, (0..32).collect::<Vec<_>>())];
        let split = [(4, (0..8).collect::<Vec<_>>()), (2, (8..32).collect())];
        let error = |groups: &Groups, channels: std::ops::Range<usize>| {
            let (mut errors, mut squares) = (0.0, 0.0);
            for token in 0..2000u64 {
                let key: Vec<f64> = (0..64).map(|d| normal(5, token * 64 + d)).collect();
                let restored = groups.restored(&key);
                for d in channels.clone() {
                    errors += (key[d] - restored[d]).powi(2);
                    squares += key[d] * key[d];
                }
            }
            errors / squares
        };
        let near = |found: f64, bits: u32, dim: usize| {
            let expected = best_error(dim, bits);
            assert!((found / expected - 1.0).abs() < 0.05, "{dim} {bits}: {found} for {expected}");
        };
        let of_whole = Groups::new(&mut library, &blocks, &whole, Book::Sphere, Norm::Half);
        near(error(&of_whole, 0..64), 3, 64);
        assert_eq!(of_whole.bytes(), 26.0);
        let of_split = Groups::new(&mut library, &blocks, &split, Book::Sphere, Norm::Half);
        assert_eq!(of_split.bytes(), (16 * 4 + 48 * 2) as f64 / 8.0 + 4.0);
        near(error(&of_split, 0..16), 4, 16);
        near(error(&of_split, 16..64), 2, 48);
        // A norm of a byte is off by up to 2^(1/32): its mean square, 0.00016, is added.
        let of_bytes = Groups::new(&mut library, &blocks, &split, Book::Sphere, Norm::Byte);
        assert_eq!(of_bytes.bytes(), of_split.bytes() - 2.0);
        let (fine, coarse) = (error(&of_split, 0..16), error(&of_bytes, 0..16));
        assert!(fine < coarse && coarse < 1.1 * fine, "{fine} {coarse}");
        // Of few dimensions normal levels are far off: with two the outermost is past the circle.
        let two = [(4, vec![0]), (3, (1..32).collect::<Vec<_>>())];
        let [sphere, normal] = [Book::Sphere, Book::Normal]
            .map(|book| Groups::new(&mut library, &blocks, &two, book, Norm::Half));
        assert!(error(&normal, 0..2) > 1.5 * error(&sphere, 0..2));
    }
}
