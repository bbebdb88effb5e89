//! A sequence as it is stored, in f16: what a prompt's attention reads of the tokens before its chunk.
//!
//! # Layout
//! `codes`, `recent_keys`, `recent_values`: those of one sequence. `pool_keys`, `pool_values` [blocks,
//! kv_heads, 16, D]: tile t becomes block t.
//!
//! # Bytes
//! A token and KV head: its codes are read, 4·D bytes written.
//!
//! # Work split
//! Grid (tiles, kv_heads, 2): a thread block the keys or the values of a tile, a thread two channels at a
//! time.

use super::layout::{Layout, Shape, Side};
use super::{code_pair, restored};
use crate::attention::BLOCK_TOKENS;
use half::f16;
use simt::{Global, GlobalMut, kernel, thread};

/// Threads of a block.
pub const RESTORE_THREADS: u32 = 256;

/// Restores the first `length` tokens of a sequence into the pools, as a step would see them.
#[kernel(system = kivi, instances(64, 128), max_threads = 256, overlaps)]
pub fn restore<const D: usize>(
    codes: Global<u32>,
    recent_keys: Global<f16>,
    recent_values: Global<f16>,
    pool_keys: GlobalMut<f16>,
    pool_values: GlobalMut<f16>,
    length: u32,
    shape: Shape,
) {
    let layout = Layout { head_dim: D as u32, ..shape.layout };
    let (tile, head) = (thread::block_idx_x(), thread::block_idx_y());
    let key = thread::block_idx_z() == 0;
    let (recent, pool) = if key { (recent_keys, pool_keys) } else { (recent_values, pool_values) };
    let group = layout.whole(tile * BLOCK_TOKENS);
    let block = (head * shape.groups + group) as usize * layout.group_words() as usize;
    let own = block + D + ((tile - group * layout.tiles()) * layout.tile_words()) as usize;
    let coded = group < shape.coded(length);
    let near = (head * shape.slots() * layout.group + shape.near(tile * BLOCK_TOKENS)) as usize * D;
    let to = (tile as usize * shape.kv_heads as usize + head as usize) * (BLOCK_TOKENS as usize * D);
    let mut item = thread::thread_idx_x();
    while item < BLOCK_TOKENS * D as u32 / 2 {
        let (token, channel) = (item / (D as u32 / 2), 2 * (item % (D as u32 / 2)));
        if tile * BLOCK_TOKENS + token < length {
            let word = if coded {
                let of = |channel: u32| one(codes, [block, own], layout, key, token, channel);
                of(channel) | of(channel + 1) << 16
            } else {
                recent.load_vector::<u32>(near + 2 * item as usize)
            };
            pool.store_vector(to + 2 * item as usize, word);
        }
        item += RESTORE_THREADS;
    }
}

/// The bits of x^ of a token of a tile; the words where the group's block and the tile begin.
#[simt::device]
fn one(
    codes: Global<u32>,
    [block, tile]: [usize; 2],
    layout: Layout,
    key: bool,
    token: u32,
    channel: u32,
) -> u32 {
    let side = if key { Side::Key } else { Side::Value };
    let bits = layout.bits(side);
    let place = layout.place(side, token, channel);
    let word = codes.load(tile + layout.word(side, place.lane, place.word) as usize);
    let (scales, zeros, half) = if key {
        let at = block + (channel / 2) as usize;
        (codes.load(at), codes.load(at + (layout.head_dim / 2) as usize), channel % 2)
    } else {
        let at = tile + layout.value_scale(token, channel) as usize;
        (codes.load(at), codes.load(at + 1), token % 2)
    };
    // The word's two halves have the scales' order.
    let both = restored(code_pair(bits, word, (place.bit % 16) >> (bits / 2)), scales, zeros);
    both >> (16 * half) & 0xffff
}
