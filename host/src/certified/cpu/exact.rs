//! A group of rows that an earlier step has left to the dense rung: `carried::exact` of the kernels.

use super::original::originals;
use super::pass::{RowGroup, View};
use super::query::head;
use crate::attention::Half;
use crate::attention::cpu::Work;
use crate::attention::cpu::lanes::Lanes;
use crate::certified::{BLOCK_TOKENS, Certificate};
use kernels_gpu::attention::Chain;
use kernels_gpu::certified::carried::exact::certificate;
use kernels_gpu::certified::layout::pair;
use kernels_gpu::certified::quantizer::{bound_or_infinity, norm_bound};
use simt::math::{fma, max};
use std::marker::PhantomData;

/// The certificates of such a group.
pub(super) struct Exact<'a, E, const D: usize> {
    pub(super) view: View<'a>,
    pub(super) group: RowGroup,
    /// Tokens of the sequence.
    pub(super) length: u32,
    /// Rung and reason.
    pub(super) why: u32,
    pub(super) certificates: &'a mut [Certificate],
    pub(super) element: PhantomData<E>,
}

impl<E: Half, const D: usize> Work for Exact<'_, E, D> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Exact { view, group, length, why, certificates, .. } = self;
        let largest = largest_norms::<E, D>(&view, group, length);
        let dense = Chain::of_dense::<D>(length, view.shape.dense_splits);
        let rows = view.rows::<D>(group).chunks_exact(D);
        for (query, known) in rows.zip(certificates) {
            let (query, _) = head::<E, L, D>(query, view.shape.softmax_scale);
            *known = certificate::<E, D>(&query, view.shape.softmax_scale, largest, &dense, why);
        }
    }
}

/// The largest norms of a sequence's values and of its keys.
#[inline(always)]
fn largest_norms<E: Half, const D: usize>(view: &View<'_>, group: RowGroup, length: u32) -> [f32; 2] {
    let max_blocks = view.shape.max_blocks as usize;
    let table = &view.table[group.sequence * max_blocks..][..max_blocks];
    let (full, tokens) = ((length / BLOCK_TOKENS) as usize, (length % BLOCK_TOKENS) as usize);
    let mut largest = [0f32; 2];
    for block in &table[..full] {
        let at = pair(*block, view.shape.kv_heads, group.head as u32);
        let own = view.annotations[at];
        largest = [max(largest[0], own.nu), max(largest[1], own.eps + own.zeta)];
    }
    if tokens != 0 {
        let [keys, values] = originals::<D>(view, group, table[full]);
        for (largest, rows) in largest.iter_mut().zip([values, keys]) {
            for row in rows.chunks_exact(D).take(tokens) {
                let mut squares = 0f32;
                for [a, b] in row.as_chunks::<2>().0 {
                    let [a, b] = E::unpack(u32::from(*a) | u32::from(*b) << 16);
                    squares = fma(b, b, fma(a, a, squares));
                }
                *largest = max(*largest, bound_or_infinity(norm_bound(squares)));
            }
        }
    }
    largest
}
