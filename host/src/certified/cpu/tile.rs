//! A quantized tile as the tensor cores' operands.

use super::query::{CONTRACTIONS, Queries, TILE};
use crate::attention::cpu::lanes::{Floats, Lanes, Order, Row, Sixteens, Tile, multiply};
use crate::attention::cpu::softmax::{MAX_ROWS, TOKENS};
use half::f16;
use kernels_gpu::certified::layout::{TileLayout, VALUE_GROUP};

/// Memory for one tile: codes and restored values as f16, and as operands.
pub(super) struct Unpacked {
    codes: [u16; TILE],
    keys: Tile,
    restored: [u16; TILE],
    values: Tile,
}

/// Products of a tile's keys with query rows.
pub(super) struct Products {
    /// Before any scaling, [rows, tokens].
    pub(super) scores: [[f32; TOKENS]; MAX_ROWS],
    /// Σ|q_n|·σ in lanes 8 to 15.
    pub(super) sigma: Floats,
    /// Whether a row of zeros, which is what a group of eight has where it has no row, has scores of 0; else they are NaN.
    pub(super) of_zeros: bool,
}

impl Unpacked {
    pub(super) const EMPTY: Unpacked =
        Unpacked { codes: [0; TILE], keys: Tile::ZERO, restored: [0; TILE], values: Tile::ZERO };

    /// `Tile::products` of the kernels; Σ|q_n|·σ where it is wanted.
    #[inline(always)]
    pub(super) fn products<L: Lanes, const D: usize>(
        &mut self,
        tile: &[u32],
        queries: &Queries,
        sigma_wanted: bool,
    ) -> Products {
        let layout = TileLayout::new(D as u32);
        let bytes: &[u8] = bytemuck::cast_slice(tile);
        let words: &[u16] = bytemuck::cast_slice(tile);
        for (codes, out) in
            bytes[..TOKENS * D].as_chunks::<16>().0.iter().zip(self.codes.as_chunks_mut::<16>().0)
        {
            *out = L::round_f16(&L::signed(codes));
        }
        let codes = &self.codes[..TOKENS * D];
        L::keys::<f16, Sixteens>(codes, D, &mut self.keys);
        let scales = &words[layout.key_scales as usize / 2..][..D];
        let zeros = &words[layout.key_zeros as usize / 2..][..D];

        let rows = queries.rows;
        let mut exact = [[0f32; TOKENS]; MAX_ROWS];
        let mut rest = [[0f32; TOKENS]; MAX_ROWS];
        let mut offsets = [0f32; 16];
        let mut sigma = [0f32; 16];
        let mut of_zeros = true;
        for contraction in 0..D / 16 {
            let column = |step: usize, lane: usize| {
                queries.column_rows[lane * D + Sixteens::dimension(contraction, step)]
            };
            let zero = Row::new::<f16, L>(of_contraction(zeros, contraction));
            multiply::<f16, L>(&zero, &queries.columns, contraction, &mut offsets, column);
            let scale = Row::new::<f16, L>(of_contraction(scales, contraction));
            of_zeros &= zero.finite && scale.finite;
            if sigma_wanted {
                multiply::<f16, L>(&scale, &queries.columns, contraction, &mut sigma, column);
            }
            let code = |step: usize, token: usize| codes[token * D + Sixteens::dimension(contraction, step)];
            for r in 0..rows {
                let [x, lost] = times::<L>(&queries.floats[r][contraction], &scale.floats);
                multiply::<f16, L>(&x, &self.keys, contraction, &mut exact[r], code);
                multiply::<f16, L>(&lost, &self.keys, contraction, &mut rest[r], code);
            }
        }
        for (r, (scores, rest)) in exact.iter_mut().zip(&rest).enumerate().take(rows) {
            for (score, rest) in scores.iter_mut().zip(rest) {
                *score = (*score + rest) + offsets[r];
            }
        }
        Products { scores: exact, sigma, of_zeros }
    }

    /// Restores the tile's values, for [`add_values`](Self::add_values).
    #[inline(always)]
    pub(super) fn restore<L: Lanes, const D: usize>(&mut self, tile: &[u32]) {
        let layout = TileLayout::new(D as u32);
        let bytes: &[u8] = bytemuck::cast_slice(tile);
        let words: &[u16] = bytemuck::cast_slice(tile);
        let groups = TOKENS * D / VALUE_GROUP as usize;
        let codes = bytes[layout.value_codes as usize..][..TOKENS * D / 2].as_chunks::<8>().0;
        let scales = words[layout.value_scales as usize / 2..][..groups].as_chunks::<16>().0;
        let zeros = words[layout.value_zeros as usize / 2..][..groups].as_chunks::<16>().0;
        let mut out = self.restored.as_chunks_mut::<16>().0.iter_mut();
        let mut codes = codes.iter();
        // Sixteen groups at a time, for their scales and zeros.
        for (scales, zeros) in scales.iter().zip(zeros) {
            let mut wide = [[0f32; 16]; 2];
            L::widen::<f16>(scales, &mut wide[0]);
            L::widen::<f16>(zeros, &mut wide[1]);
            for ((group, codes), out) in (0..16).zip(&mut codes).zip(&mut out) {
                let (scale, zero) = (wide[0][group], wide[1][group]);
                let mut sums = L::restore(*codes, scale, zero);
                if !is_exact(scale, zero) {
                    make_odd(&mut sums, *codes, scale, zero);
                }
                *out = L::round_f16(&sums);
            }
        }
        L::values::<f16>(&self.restored[..TOKENS * D], D, &mut self.values);
    }

    /// Adds weights times the restored values to the outputs of the rows: those of rounded weights and those of what rounding
    /// has cut off.
    #[inline(always)]
    pub(super) fn add_values<L: Lanes, const D: usize>(
        &self,
        weights: &[[Row; 2]; MAX_ROWS],
        outputs: &mut [[[Floats; 16]; 2]; MAX_ROWS],
        rows: usize,
    ) {
        for chunk in 0..D / 16 {
            let element = |token: usize, lane: usize| self.restored[token * D + 16 * chunk + lane];
            for (weights, outputs) in weights.iter().zip(outputs.iter_mut()).take(rows) {
                for (weights, output) in weights.iter().zip(outputs) {
                    multiply::<f16, L>(weights, &self.values, chunk, &mut output[chunk], element);
                }
            }
        }
    }
}

/// A contraction's part of a number for each dimension.
#[inline(always)]
fn of_contraction(x: &[u16], contraction: usize) -> [u16; 16] {
    let mut out = [0u16; 16];
    for (step, out) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        let at = Sixteens::dimension(contraction, 4 * step);
        out.copy_from_slice(&x[at..at + 4]);
    }
    out
}

/// `Query::times`: q_n·σ rounded, and what rounding lost. The product of two f16 is exact in f32, and so is the difference.
#[inline(always)]
fn times<L: Lanes>(query: &Floats, scales: &Floats) -> [Row; 2] {
    let mut product = [0f32; 16];
    for (product, (q, s)) in product.iter_mut().zip(query.iter().zip(scales)) {
        *product = q * s;
    }
    let rounded = Row::new::<f16, L>(L::round_f16(&product));
    for (product, rounded) in product.iter_mut().zip(&rounded.floats) {
        *product -= rounded;
    }
    [rounded, Row::new::<f16, L>(L::round_f16(&product))]
}

/// Whether f32 holds every code·scale + zero exactly: with exponents s and z of the two, the sum is below
/// 2^(max(s + 5, z + 1) + 1) and a multiple of 2^(min(s, z) − 10), and 24 bits lie between.
#[inline(always)]
fn is_exact(scale: f32, zero: f32) -> bool {
    let [s, z] = [scale, zero].map(|x| (x.to_bits() >> 23 & 0xff) as i32);
    scale == 0.0 || zero == 0.0 || (s - z <= 8 && z - s <= 12)
}

/// Makes what rounding has changed odd, so that it lies on the right side of every tie and rounding it to f16 is the one
/// rounding of `fma_f16x2`.
#[cold]
#[inline(never)]
fn make_odd(sums: &mut Floats, codes: [u8; 8], scale: f32, zero: f32) {
    let codes = u64::from_le_bytes(codes);
    for (i, sum) in sums.iter_mut().enumerate() {
        let product = (codes >> (4 * i) & 15) as f32 * scale;
        let back = *sum - product;
        // What the sum has lost, exactly.
        let lost = (product - (*sum - back)) + (zero - back);
        let bits = sum.to_bits();
        if lost != 0.0 && lost.is_finite() && bits & 1 == 0 {
            let outward = (lost > 0.0) == (*sum > 0.0);
            *sum = f32::from_bits(if outward { bits + 1 } else { bits - 1 });
        }
    }
}

const _: () = assert!(TILE == 16 * 16 * CONTRACTIONS && VALUE_GROUP == 16);
