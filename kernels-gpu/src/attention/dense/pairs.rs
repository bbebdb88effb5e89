//! Attention of prompts: [`attend`](fn@super::attend) of two groups of eight rows at a time, with its bits.
//!
//! # Mathematics
//! That of [`attend`](fn@super::attend) where a sequence is one part, in its order: a warp takes every eighth
//! tile, with an online softmax for each row; warps are added in their order.
//!
//! # Layout
//! That of [`attend`](fn@super::attend).
//!
//! # Bytes
//! A group of rows alone takes 4·D bytes for each token that it sees from the L2 cache, which is busier than
//! anything else in a prompt: two groups take them once.
//!
//! # Work split
//! Grid (1, kv_heads · ⌈row groups / 2⌉, sequences). A warp's queries are all 16 rows of an operand: what
//! belongs to the second group stands where one group alone has zeros, so scores of both are one product.
//! Probabilities take 16 rows for each group (see [`attention`](crate::attention)): two products, of values
//! that are loaded once. Tiles past the last token that a group sees are left out for that group.

use super::DenseShape;
#[cfg(not(target_arch = "nvptx64"))]
use super::decode::attend;
use super::decode::{Arguments, Target, Tiles, lay_out, layout};
use crate::attention::{
    BLOCK_TOKENS, GridPlace, Half, PartialRow, Queries, ROWS, Running, combine, combined_rows, first_blocks,
    walk, warps,
};
use half::{bf16, f16};
use simt::{Global, GlobalMut, Shared, SharedPlan, async_copy, kernel, thread, unroll, warp};

/// Attention of all rows that `wanted` names, which is as for [`attend`](fn@super::attend); `partials` and
/// `counters` are not used. Grid (1, kv_heads · ⌈row groups / 2⌉, sequences), of a shape with one split;
/// threads and shared memory as there.
#[kernel(
    system = dense,
    args = attend,
    instances((f16, 64), (f16, 96), (f16, 128), (bf16, 64), (bf16, 96), (bf16, 128)),
    max_threads = 256,
    min_blocks = 1,
    overlaps = by_hand
)]
pub fn attend_pairs<E: Half, const D: usize>(
    queries: Global<E>,
    keys: Global<E>,
    values: Global<E>,
    table: Global<u32>,
    lengths: Global<u32>,
    wanted: Global<u32>,
    partials: GlobalMut<f32>,
    counters: GlobalMut<u32>,
    output: GlobalMut<f32>,
    lse: GlobalMut<f32>,
    shape: DenseShape,
) {
    let arguments =
        Arguments { queries, keys, values, table, lengths, wanted, partials, counters, output, lse, shape };
    match D {
        64 => attend_pair::<E, D, 3>(arguments),
        _ => attend_pair::<E, D, 2>(arguments),
    }
}

/// What a thread block does, with rings of `S` stages.
#[simt::device]
fn attend_pair<E: Half, const D: usize, const S: u32>(arguments: Arguments<E>) {
    let Arguments { queries, keys, values, table, lengths, wanted, output, lse, shape, .. } = arguments;
    thread::wait_for_previous();
    let groups = shape.row_groups();
    let GridPlace { sequence, head, row_group: pair, .. } = GridPlace::of(groups.div_ceil(2));
    let row_groups = [2 * pair, 2 * pair + 1];
    let first_word = ((sequence * shape.kv_heads + head) * groups) as usize;
    let wanted_of = |group: u32| if group < groups { wanted.load(first_word + group as usize) } else { 0 };
    let rows_wanted = row_groups.map(wanted_of);
    let length = lengths.load(sequence as usize);
    if rows_wanted[0] | rows_wanted[1] == 0 {
        return;
    }
    let ends =
        [0, 1].map(|i| if rows_wanted[i] == 0 { 0 } else { shape.visible_tiles(length, row_groups[i]) });
    let end = ends[0].max(ends[1]);

    let layout = const { lay_out::<D>(&mut SharedPlan::new(), S) };
    let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
    let rows = row_groups.map(|group| group * ROWS + (lane >> 2));
    let queries = rows.map(|row| {
        let at = shape.query_row(sequence, head, row) as usize;
        Queries::load::<E, D>(queries, at, row < shape.rows(), layout.queries, false, lane)
    });
    let visible = rows.map(|row| shape.visible(length, row));
    let tiles =
        Tiles::<E, D, S> { layout, keys, values, table, shape, sequence, head, length, warp, lane, end };
    let ahead = first_blocks(&tiles, warp);

    let mut running = [Running::new(), Running::new()];
    walk(&tiles, warp, ahead, |tile, stage| {
        let (k, v) = tiles.stage(stage);
        let scores = Queries::scores_of_two::<E, D>(&queries, k, lane);
        let mut weights = [[0f32; 4]; 2];
        unroll!(for group in 0..2 {
            let mut own = scores[group];
            unroll!(for j in 0..2 {
                unroll!(for i in 0..2 {
                    let scaled = own[j][i] * shape.scale_log2;
                    let token = tile * BLOCK_TOKENS + 8 * j as u32 + 2 * (lane & 3) + i as u32;
                    own[j][i] = if token < visible[group] { scaled } else { f32::NEG_INFINITY };
                });
            });
            weights[group] = running[group].weigh::<D>(own).0;
        });
        Running::accumulate_two::<E, D>(&mut running, weights, [tile < ends[0], tile < ends[1]], v, lane);
    });

    // Read again: kept since the start they would cost registers that the loop has not.
    let rows_wanted = row_groups.map(wanted_of);
    let places = const { results::<D>() };
    // All copies have landed, all tiles are read.
    async_copy::wait::<0>();
    thread::sync_threads();
    unroll!(for i in 0..2 {
        running[i].store_output::<D>(places[i].outputs, warp * ROWS * D as u32, lane);
        let sum = running[i].row_sum();
        if lane & 3 == 0 {
            let row = PartialRow { reference: running[i].reference, sum };
            places[i].rows.store(warp * ROWS + (lane >> 2), row);
        }
    });
    thread::sync_threads();
    unroll!(for i in 0..2 {
        let (rows_wanted, row_group) = (rows_wanted[i], row_groups[i]);
        let target = Target { output, lse, rows_wanted, shape, sequence, head, row_group };
        combine::<D>(places[i].rows, places[i].outputs, |r, d, merged| target.finish::<D>(r, d, merged));
    });
}

/// Results of a group's warps.
#[derive(Clone, Copy)]
struct Results {
    /// Σ p·v, [warps, 8, D].
    outputs: Shared<f32>,
    /// References and sums, and what [`combine`] adds.
    rows: Shared<PartialRow>,
}

/// Those of both groups, in the rings' place.
const fn results<const D: usize>() -> [Results; 2] {
    let mut over = SharedPlan::new();
    let outputs = warps(D as u32) * ROWS * D as u32;
    let first = Results { outputs: over.array(outputs), rows: over.array(combined_rows(warps(D as u32))) };
    let second = Results { outputs: over.array(outputs), rows: over.array(combined_rows(warps(D as u32))) };
    [first, second]
}

/// They fit there.
const fn fits<const D: usize>() -> bool {
    let of_group = warps(D as u32) * ROWS * D as u32 * 4
        + combined_rows(warps(D as u32)) * size_of::<PartialRow>() as u32;
    2 * of_group <= warps(D as u32) * layout::<D>().ring_words * 4
}

const _: () = assert!(fits::<64>() && fits::<96>() && fits::<128>());
