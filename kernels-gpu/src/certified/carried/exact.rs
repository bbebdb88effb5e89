//! A row of blocks that an earlier step has left to the dense rung: no quantized block is looked at, only how
//! large keys and values are, from which follows what the dense rung rounds.

use super::super::admit::{Found, Scratch};
use super::super::finish::store_dense_rows;
use super::super::judge::Exact;
use super::super::layout::Annotation;
use super::super::pass::StepShape;
use super::super::policy::{Certificate, reason};
use super::super::promote::largest_norms;
use super::super::query::Query;
use super::CarriedLayout;
use super::claim::carried_warps;
use super::gather::Gathered;
use crate::attention::dense::DenseShape;
use crate::attention::{BLOCK_TOKENS, Chain, Half, KeyTile, ROWS, ValueTile, last_to_arrive};
use simt::math::max;
use simt::warp::{self, FULL_MASK, warp_reduce_max_u32};
use simt::{Global, GlobalMut, Zeroable, async_copy, thread, unroll};

/// The certificate of a head that this step has not tried, over keys and values of these norms at most;
/// `why`: [`Turn::rung_and_reason`](super::Turn::rung_and_reason).
#[inline(always)]
pub fn certificate<E: Half, const D: usize>(
    query: &Query,
    softmax_scale: f32,
    [nu, kappa]: [f32; 2],
    dense: &Chain,
    why: u32,
) -> Certificate {
    let why = why | if query.finite { 0 } else { reason::QUERY_NOT_FINITE << 16 };
    Exact::new::<E, D>(query, softmax_scale, nu, kappa, dense).certificate(Certificate::zeroed(), why)
}

/// A split of such a row.
#[derive(Clone, Copy)]
pub(super) struct ExactRow<E> {
    pub(super) layout: CarriedLayout,
    pub(super) annotations: Global<Annotation>,
    pub(super) table: Global<u32>,
    pub(super) keys: Global<E>,
    pub(super) values: Global<E>,
    pub(super) near: Global<E>,
    pub(super) scratch: Scratch,
    pub(super) shape: StepShape,
    pub(super) launch_row: u32,
    /// The first of its rows among all, and whether the lane's is one of them.
    pub(super) first_row: u32,
    pub(super) present: bool,
    pub(super) sequence: u32,
    pub(super) head: u32,
    /// Tokens of the sequence.
    pub(super) length: u32,
    /// Full blocks of the split, from the first to before the last.
    pub(super) blocks: [u32; 2],
    /// Which split of how many.
    pub(super) split: [u32; 2],
    /// Rung and reason.
    pub(super) why: u32,
    pub(super) lane: u32,
    pub(super) warp: u32,
}

impl<E: Half> ExactRow<E> {
    /// The pair of a block of the sequence and the KV head.
    #[simt::device]
    fn pair(&self, index: u32) -> u32 {
        let ExactRow { table, shape, sequence, head, .. } = *self;
        table.load_readonly((sequence * shape.max_blocks + index) as usize) * shape.kv_heads + head
    }

    /// The largest norms of values and keys in the split: all threads' work, the result is thread 0's.
    #[simt::device]
    fn of_split<const D: usize>(&self) -> [f32; 2] {
        let ExactRow { length, blocks: [first, end], split: [split, splits], warp, .. } = *self;
        let mut largest = [0f32; 2];
        let mut index = first + thread::thread_idx_x();
        while index < end {
            let own = Annotation::load_norms(self.annotations, self.pair(index) as usize);
            largest = [max(largest[0], own[0]), max(largest[1], own[1])];
            index += thread::block_dim_x();
        }
        let tokens = length % BLOCK_TOKENS;
        if tokens != 0 && split + 1 == splits && warp == 0 {
            let [keys, values] = self.trailing::<D>(tokens);
            largest = [max(largest[0], values), max(largest[1], keys)];
        }
        self.over_warps(largest.map(|x| of_warp(x)))
    }

    /// Bounds of the norms of the trailing block's keys and of its values: a warp's work.
    #[simt::device]
    fn trailing<const D: usize>(&self, tokens: u32) -> [f32; 2] {
        let ExactRow { layout, shape, scratch, lane, .. } = *self;
        let pair = self.pair(self.length / BLOCK_TOKENS);
        let elements = BLOCK_TOKENS as usize * D;
        let fresh = self.sequence * shape.kv_heads + self.head;
        let source = |kind: u32, originals: Global<E>| match Found::fresh(scratch, kind, fresh).tile {
            Scratch::EMPTY => (originals, pair as usize * elements),
            tile => (self.near, tile as usize * elements),
        };
        let ring = layout.pass.ring;
        let key_tile = KeyTile::<D>::at(ring, 0);
        let value_tile = ValueTile::<D>::at(ring, super::Tile::<half::f16, D>::WORDS);
        let (from, at) = source(0, self.keys);
        key_tile.copy(from, at, tokens, lane);
        let (from, at) = source(1, self.values);
        value_tile.copy(from, at, tokens, lane);
        async_copy::commit();
        async_copy::wait::<0>();
        warp::sync_warp(FULL_MASK);
        largest_norms::<E, D>(key_tile, value_tile, lane)
    }

    /// The largest over all warps, in the first one's lanes.
    #[simt::device]
    fn over_warps(&self, own: [f32; 2]) -> [f32; 2] {
        let ExactRow { layout, lane, warp, .. } = *self;
        if lane == 0 {
            unroll!(for i in 0..2 {
                layout.gathered.store(2 * warp + i as u32, own[i]);
            });
        }
        thread::sync_threads();
        let exists = warp == 0 && lane < thread::block_dim_x() / 32;
        let of_lane = |i: u32| if exists { layout.gathered.load(2 * lane + i) } else { 0.0 };
        [of_warp(of_lane(0)), of_warp(of_lane(1))]
    }

    /// Certificates, and all rows of the row of blocks for the dense rung, which writes what else there is.
    /// Whether this thread block was the row's last.
    #[simt::device]
    pub(super) fn finish<const D: usize>(
        &self,
        query: &Query,
        gathered: GlobalMut<f32>,
        counters: GlobalMut<u32>,
        certificates: GlobalMut<Certificate>,
        dense_rows: GlobalMut<u32>,
    ) -> bool {
        let ExactRow { layout, shape, launch_row, length, split: [split, splits], .. } = *self;
        let ExactRow { first_row, present, lane, warp, .. } = *self;
        let largest = self.of_split::<D>();
        let first = (launch_row * shape.splits * Gathered::EIGHT) as usize;
        if thread::thread_idx_x() == 0 {
            unroll!(for i in 0..2 {
                gathered.store(first + (split * Gathered::EIGHT) as usize + i, largest[i]);
            });
        }
        if !last_to_arrive(counters, launch_row, splits, layout.last) {
            return false;
        }
        if warp == 0 {
            let mut largest = [0f32; 2];
            let mut of = lane;
            while of < splits {
                let at = first + (of * Gathered::EIGHT) as usize;
                largest = [0, 1].map(|i| max(largest[i], gathered.as_const().load(at + i)));
                of += 32;
            }
            let largest = [of_warp(largest[0]), of_warp(largest[1])];
            if present && lane & 3 == 0 {
                let dense = Chain::of_dense::<D>(length, shape.dense_splits);
                let known = certificate::<E, D>(query, shape.softmax_scale, largest, &dense, self.why);
                known.store(certificates, (first_row + (lane >> 2)) as usize);
            }
            store_dense_rows(dense_rows, launch_row, present, DenseShape::MANY, lane);
        }
        true
    }
}

/// The largest of a warp's numbers, none of which is negative: their bits have their order.
#[simt::device]
pub(in super::super) fn of_warp(x: f32) -> f32 {
    f32::from_bits(warp_reduce_max_u32(FULL_MASK, x.to_bits()))
}

// As many floats as there are warps, twice, fit where warps leave what they gather.
const _: () = assert!(2 <= Gathered::EIGHT && ROWS == 8 && carried_warps(64) <= 32);
