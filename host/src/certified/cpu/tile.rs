//! A quantized tile as the tensor cores' operands.

use super::query::{CONTRACTIONS, Queries, TILE};
use crate::attention::Half;
use crate::attention::cpu::lanes::{
    Floats, Lanes, Order, Portable, Row, Sixteens, Tile, multiply_each, square,
};
use crate::attention::cpu::softmax::{MAX_ROWS, TOKENS};
use half::f16;
use kernels_gpu::certified::layout::{Layout, TileLayout, VALUE_GROUP};
use kernels_gpu::certified::tile::scale_above;

/// Memory for one tile: codes and restored values as operands.
pub(super) struct Unpacked {
    codes: [u16; TILE],
    /// The rows that meet a contraction of the keys: q_n·σ rounded, and what rounding lost.
    products: [[Row; 2]; MAX_ROWS],
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
    /// Σ(q_n·σ)², of rounded products.
    pub(super) squares: [f32; MAX_ROWS],
    /// Whether a row of zeros, which is what a group of eight has where it has no row, has scores of 0; else
    /// they are NaN.
    pub(super) of_zeros: bool,
}

impl Unpacked {
    pub(super) const EMPTY: Unpacked = Unpacked {
        codes: [0; TILE],
        products: [[Row::ZERO; 2]; MAX_ROWS],
        keys: Tile::ZERO,
        restored: [0; TILE],
        values: Tile::ZERO,
    };

    /// `Tile::products` of the kernels; Σ|q_n|·σ and Σ(q_n·σ)² where they are wanted.
    #[inline(always)]
    pub(super) fn products<L: Lanes, const D: usize>(
        &mut self,
        layout: Layout,
        tile: &[u32],
        queries: &Queries,
        wanted: [bool; 2],
    ) -> Products {
        match layout {
            Layout::Compact => self.products_in::<L, D, false>(tile, queries, wanted),
            Layout::Paper => self.products_in::<L, D, true>(tile, queries, wanted),
        }
    }

    /// The same in the compact layout, or in the paper's.
    #[inline(always)]
    fn products_in<L: Lanes, const D: usize, const PAPER: bool>(
        &mut self,
        tile: &[u32],
        queries: &Queries,
        [sigma_wanted, squares_wanted]: [bool; 2],
    ) -> Products {
        let layout = TileLayout::new(D as u32, if PAPER { Layout::Paper } else { Layout::Compact });
        let bytes: &[u8] = bytemuck::cast_slice(tile);
        L::codes::<Sixteens>(&bytes[..TOKENS * D], D, &mut self.codes[..TOKENS * D], &mut self.keys);
        let of_keys = |part: u32| &bytes[part as usize..][..D * layout.kind.metadata_bytes() as usize];
        let (scales, zeros) = (of_keys(layout.key_scales), of_keys(layout.key_zeros));

        let rows = queries.rows;
        // Of q_n·σ rounded, and of what rounding it lost.
        let mut sums = [[[0f32; TOKENS]; 2]; MAX_ROWS];
        // Σ q_n·z, in the paper's layout of z rounded and of what that lost, and Σ|q_n|·σ in lanes 8 to 15.
        let mut of_columns = [[0f32; 16]; 3];
        let of_zero = if PAPER { 2 } else { 1 };
        let wanted = of_zero + usize::from(sigma_wanted);
        let mut of_zeros = true;
        let mut squares = [0f32; MAX_ROWS];
        for contraction in 0..D / 16 {
            let mut metadata = [Row::ZERO; 3];
            let mut wide = [0f32; 16];
            if PAPER {
                wide = of_contraction(bytemuck::cast_slice(scales), contraction);
                let zero = of_contraction(bytemuck::cast_slice(zeros), contraction);
                let [rounded, lost, above] = &mut metadata;
                split::<L>(zero, rounded, lost);
                let mut scales = wide;
                for scale in &mut scales {
                    *scale = scale_above(*scale);
                }
                above.set::<f16, L>(L::round_f16(&scales));
                let mut finite = rounded.finite;
                for scale in &wide {
                    finite &= scale.is_finite();
                }
                of_zeros &= finite;
            } else {
                let [zero, scale, _] = &mut metadata;
                zero.set::<f16, L>(of_contraction(bytemuck::cast_slice(zeros), contraction));
                scale.set::<f16, L>(of_contraction(bytemuck::cast_slice(scales), contraction));
                of_zeros &= zero.finite && scale.finite;
            }
            let scales = if PAPER { &wide } else { &metadata[1].floats };
            let columns = queries.columns.of_keys(contraction);
            multiply_each::<f16, L>(|i| &metadata[i], columns, &mut of_columns[..wanted]);
            for (products, query) in self.products.iter_mut().zip(&queries.floats).take(rows) {
                times::<L>(&query[contraction], scales, products);
            }
            if squares_wanted {
                for (squares, [rounded, _]) in squares.iter_mut().zip(&self.products).take(rows) {
                    square::<f16>(rounded, squares);
                }
            }
            let products = |i: usize| &self.products.as_flattened()[i];
            let keys = self.keys.of_keys(contraction);
            multiply_each::<f16, L>(products, keys, sums[..rows].as_flattened_mut());
        }
        let (mut offsets, sigma) = (of_columns[0], of_columns[of_zero]);
        if PAPER {
            for (offset, lost) in offsets.iter_mut().zip(&of_columns[1]) {
                *offset += lost;
            }
        }
        let mut scores = [[0f32; TOKENS]; MAX_ROWS];
        for (r, (scores, [exact, rest])) in scores.iter_mut().zip(&sums).enumerate().take(rows) {
            for (score, (exact, rest)) in scores.iter_mut().zip(exact.iter().zip(rest)) {
                *score = (exact + rest) + offsets[r];
            }
        }
        Products { scores, sigma, squares, of_zeros }
    }

    /// Restores the tile's values, for [`add_values`](Self::add_values).
    #[inline(always)]
    pub(super) fn restore<L: Lanes, const D: usize>(&mut self, layout: Layout, tile: &[u32]) {
        let layout = TileLayout::new(D as u32, layout);
        let bytes: &[u8] = bytemuck::cast_slice(tile);
        let words: &[u16] = bytemuck::cast_slice(tile);
        let groups = TOKENS * D / VALUE_GROUP as usize;
        let codes = bytes[layout.value_codes as usize..][..TOKENS * D / 2].as_chunks::<8>().0;
        let scales = words[layout.value_scales as usize / 2..][..groups].as_chunks::<16>().0;
        let zeros = words[layout.value_zeros as usize / 2..][..groups].as_chunks::<16>().0;
        let out = self.restored.as_chunks_mut::<16>().0.as_chunks_mut::<16>().0;
        let codes = codes.as_chunks::<16>().0;
        // Sixteen groups at a time, for their scales and zeros.
        for ((scales, zeros), (codes, out)) in scales.iter().zip(zeros).zip(codes.iter().zip(out)) {
            let mut wide = [[0f32; 16]; 2];
            L::widen::<f16>(scales, &mut wide[0]);
            L::widen::<f16>(zeros, &mut wide[1]);
            let [scales, zeros] = &wide;
            L::restore_groups(codes, scales, zeros, out);
            let mut others = false;
            for (scale, zero) in scales.iter().zip(zeros) {
                others |= !is_exact(*scale, *zero);
            }
            if others {
                restore_others(codes, scales, zeros, out);
            }
        }
        L::values::<f16>(&self.restored[..TOKENS * D], D, &mut self.values);
    }

    /// The restored values, [16, D].
    #[inline(always)]
    pub(super) fn restored<const D: usize>(&self) -> &[u16] {
        &self.restored[..TOKENS * D]
    }

    /// Adds weights times the restored values to the outputs of the rows, [D / 16, rows, 2]: those of rounded
    /// weights and those of what rounding has cut off.
    #[inline(always)]
    pub(super) fn add_values<L: Lanes, const D: usize>(
        &self,
        weights: &[[Row; 2]],
        outputs: &mut [[[Floats; 2]; MAX_ROWS]; CONTRACTIONS],
    ) {
        add_values::<f16, L, D>(weights, &self.values, &self.restored, outputs);
    }
}

/// Adds weights times values [16, D], of which `tile` is, to the outputs of the rows, [D / 16, rows, 2].
#[inline(always)]
pub(super) fn add_values<E: Half, L: Lanes, const D: usize>(
    weights: &[[Row; 2]],
    tile: &Tile,
    values: &[u16],
    outputs: &mut [[[Floats; 2]; MAX_ROWS]; CONTRACTIONS],
) {
    for (chunk, outputs) in outputs.iter_mut().enumerate().take(D / 16) {
        let outputs = outputs[..weights.len()].as_flattened_mut();
        let row = |i: usize| &weights.as_flattened()[i];
        multiply_each::<E, L>(row, tile.of_values(values, D, chunk), outputs);
    }
}

/// A contraction's part of a number for each dimension.
#[inline(always)]
fn of_contraction<T: Copy + Default>(x: &[T], contraction: usize) -> [T; 16] {
    let mut out = [T::default(); 16];
    for (step, out) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        let at = Sixteens::dimension(contraction, 4 * step);
        out.copy_from_slice(&x[at..at + 4]);
    }
    out
}

/// q_n·σ rounded, and what rounding lost: `Query::times`, whose product of two f16 is exact in f32, and what
/// the kernels do with σ in f32.
#[inline(always)]
fn times<L: Lanes>(query: &Floats, scales: &Floats, [rounded, lost]: &mut [Row; 2]) {
    let mut product = [0f32; 16];
    for (product, (q, s)) in product.iter_mut().zip(query.iter().zip(scales)) {
        *product = q * s;
    }
    split::<L>(product, rounded, lost);
}

/// Numbers as f16, and as f16 what that lost of them: the difference is exact in f32.
#[inline(always)]
fn split<L: Lanes>(mut x: Floats, rounded: &mut Row, lost: &mut Row) {
    rounded.set::<f16, L>(L::round_f16(&x));
    for (x, rounded) in x.iter_mut().zip(&rounded.floats) {
        *x -= rounded;
    }
    lost.set::<f16, L>(L::round_f16(&x));
}

/// Whether f32 holds every code·scale + zero exactly: with exponents s and z of the two, the sum is below
/// 2^(max(s + 5, z + 1) + 1) and a multiple of 2^(min(s, z) − 10), and 24 bits lie between.
#[inline(always)]
fn is_exact(scale: f32, zero: f32) -> bool {
    let (scale, zero) = (scale.to_bits() & 0x7fff_ffff, zero.to_bits() & 0x7fff_ffff);
    let (s, z) = ((scale >> 23) as i32, (zero >> 23) as i32);
    (scale == 0) | (zero == 0) | ((s - z <= 8) & (z - s <= 12))
}

/// [`Lanes::restore_groups`] of the groups that are not exact in f32, rounded once.
#[cold]
#[inline(never)]
fn restore_others(codes: &[[u8; 8]; 16], scales: &Floats, zeros: &Floats, out: &mut [[u16; 16]; 16]) {
    for group in (0..16).filter(|group| !is_exact(scales[*group], zeros[*group])) {
        let (codes, scale, zero) = (codes[group], scales[group], zeros[group]);
        let mut sums = Portable::restore(codes, scale, zero);
        make_odd(&mut sums, codes, scale, zero);
        out[group] = Portable::round_f16(&sums);
    }
}

/// Makes what rounding has changed odd, so that it lies on the right side of every tie and rounding it to f16
/// is the one rounding of `fma_f16x2`.
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
