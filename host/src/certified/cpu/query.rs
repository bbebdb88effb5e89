//! The query rows of a group of eight, in the forms in which quantized and original keys want them.

use crate::attention::Half;
use crate::attention::cpu::lanes::{Floats, Lanes, Order, Row, Sixteens, Tile};
pub(super) use crate::attention::cpu::query::{CONTRACTIONS, head};
use crate::attention::cpu::softmax::MAX_ROWS;
use half::f16;
use kernels_gpu::certified::query::Query;
use simt::convert;

/// Elements of 16 rows.
pub(super) const TILE: usize = 16 * 16 * CONTRACTIONS;

/// Up to eight rows, normalised as `Query::load` does it.
pub(super) struct Queries {
    /// Rows that there are.
    pub(super) rows: usize,
    /// Without their elements.
    pub(super) heads: [Query; MAX_ROWS],
    /// Normalised elements, [rows, contractions].
    pub(super) floats: [[Floats; CONTRACTIONS]; MAX_ROWS],
    /// The same as operands of the element type.
    pub(super) operands: [[Row; CONTRACTIONS]; MAX_ROWS],
    /// Rows as columns: the elements in lanes 0 to 7, their magnitudes in lanes 8 to 15.
    pub(super) columns: Tile,
    /// Those as f16, [16, head_dim].
    pub(super) column_rows: [u16; TILE],
}

impl Queries {
    pub(super) const EMPTY: Queries = Queries {
        rows: 0,
        heads: [Query { pairs: [0; 32], scale: 0.0, norm: 0.0, finite: true }; MAX_ROWS],
        floats: [[[0.0; 16]; CONTRACTIONS]; MAX_ROWS],
        operands: [[Row::ZERO; CONTRACTIONS]; MAX_ROWS],
        columns: Tile::ZERO,
        column_rows: [0; TILE],
    };

    /// Loads the rows of `queries` [rows, D].
    #[inline(always)]
    pub(super) fn load<E: Half, L: Lanes, const D: usize>(&mut self, queries: &[u16], softmax_scale: f32) {
        self.rows = queries.len() / D;
        self.column_rows[..16 * D].fill(0);
        for (r, row) in queries.chunks_exact(D).enumerate() {
            let (head, x) = head::<E, L, D>(row, softmax_scale);
            self.heads[r] = head;
            for (chunk, x) in x[..D].as_chunks::<16>().0.iter().enumerate() {
                let normalized = L::round::<f16>(x);
                let at = 16 * chunk;
                for (i, bits) in normalized.into_iter().enumerate() {
                    self.column_rows[r * D + at + i] = bits;
                    self.column_rows[(MAX_ROWS + r) * D + at + i] = bits & 0x7fff;
                }
            }
            for contraction in 0..D / 16 {
                let mut elements = [0u16; 16];
                for (step, x) in elements.iter_mut().enumerate() {
                    *x = self.column_rows[r * D + Sixteens::dimension(contraction, step)];
                }
                L::widen::<f16>(&elements, &mut self.floats[r][contraction]);
                self.operands[r][contraction] = Row::new::<E, L>(operands::<E>(elements));
            }
        }
        L::keys::<f16, Sixteens>(&self.column_rows[..16 * D], D, &mut self.columns);
    }
}

/// `Query::operand`.
#[inline(always)]
fn operands<E: Half>(x: [u16; 16]) -> [u16; 16] {
    if E::IS_F16 {
        return x;
    }
    let mut out = [0; 16];
    for (out, x) in out.iter_mut().zip(x) {
        *out = E::pack(convert::f32_from_f16(f16::from_bits(x)), 0.0) as u16;
    }
    out
}
