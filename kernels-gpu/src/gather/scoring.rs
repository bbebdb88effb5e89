//! Scores of tiles of gather-blocks, for the kernels that choose by them: the mathematics is in `choice.rs`.

use super::bounds::{TILE_BLOCKS, tile_words};
use super::choice::SelectShape;
use super::codes::{code_words, restored, scale_word};
use super::rule::Extent;
use super::sieve::maxima_words;
use crate::attention::{BLOCK_TOKENS, Half, ROWS};
use glam::{UVec2, UVec4};
use simt::math::maximum;
use simt::warp::{self, FULL_MASK};
use simt::{Global, GlobalMut, bits, thread, unroll};

/// Blocks are scored by the largest and the smallest key.
pub const BY_BOUNDS: u32 = 0;
/// Blocks are scored by their mean key.
pub const BY_MEANS: u32 = 1;
/// Blocks are scored by the largest and the smallest key in 8 bits, rounded outward.
pub const BY_CODES: u32 = 2;

/// Words that a tile of 16 gather-blocks has of what they are scored by.
#[inline(always)]
pub const fn summary_words(summary: u32, head_dim: u32) -> u32 {
    match summary {
        BY_MEANS => tile_words(head_dim) / 2,
        BY_CODES => code_words(head_dim),
        _ => tile_words(head_dim),
    }
}

/// A score as a word that orders like it: −∞ is the least number, NaN (which [`maximum`] has made the one of
/// `NAN_BITS`) above all. Sums of the tensor cores are never −0.
#[inline(always)]
pub fn ordered(score: f32) -> u32 {
    let bits = score.to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

/// The score of such a word.
#[inline(always)]
pub fn score_of(word: u32) -> f32 {
    f32::from_bits(if word >> 31 == 1 { word & !(1 << 31) } else { !word })
}

/// Of a pair of elements the positive ones, and the negative ones, with zeros for the others.
#[inline(always)]
pub fn signs(pair: u32) -> [u32; 2] {
    let negative = (pair >> 15 & 0x0001_0001) * 0xffff;
    [pair & !negative, pair & negative]
}

/// Thread blocks of `warps` warps for a list, of `rows` lists for which `wanted` shall be launched together,
/// and of which the longest has `tiles` tiles.
pub(super) const fn parts(wanted: u32, warps: u32, rows: u32, tiles: u32) -> u32 {
    let wanted = wanted / if rows == 0 { 1 } else { rows };
    // A tile for every warp.
    let most = tiles.div_ceil(warps);
    let parts = if wanted < most { wanted } else { most };
    if parts == 0 { 1 } else { parts }
}

/// What there is to score in a row, and how much of it a thread block takes.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub extent: Extent,
    pub tiles: u32,
    pub tiles_a_part: u32,
}

impl Part {
    /// Of a sequence of so many tokens, as far as the table reaches.
    #[simt::device]
    pub fn of(length: u32, shape: SelectShape) -> Self {
        let extent = Extent::of(length.min(shape.max_blocks * BLOCK_TOKENS), shape.rule);
        let tiles = if extent.ranked_blocks() > 0 { extent.local.div_ceil(TILE_BLOCKS) } else { 0 };
        let parts = thread::grid_dim_x();
        Part { extent, tiles, tiles_a_part: bits::div_u32(tiles + parts - 1, parts).max(1) }
    }
}

/// A list's row of what there is of each list, and of its KV head's bounds.
#[derive(Clone, Copy)]
pub(super) struct Row {
    shape: SelectShape,
    sequence: u32,
    /// Which row it is, [sequences, kv_heads · lists].
    pub number: u32,
    /// The KV head.
    pub head: u32,
}

impl Row {
    #[simt::device]
    pub fn of(shape: SelectShape, list_of: u32, sequence: u32) -> Self {
        let number = sequence * (shape.kv_heads * shape.lists) + list_of;
        Row { shape, sequence, number, head: bits::div_u32(list_of, shape.lists) }
    }

    /// The first word of a tile of bounds.
    #[simt::device]
    fn first_word(self, tile: u32, words: u32) -> usize {
        let of_head = (self.sequence * self.shape.kv_heads + self.head) as usize * self.shape.tiles as usize;
        (of_head + tile as usize) * words as usize
    }

    /// Where the score of block 0 is.
    #[simt::device]
    pub fn first_key(self) -> usize {
        self.number as usize * (self.shape.tiles * TILE_BLOCKS) as usize
    }

    /// Ahead of where the largest score of the first tile is.
    #[simt::device]
    pub fn first_maximum(self) -> usize {
        self.number as usize * maxima_words(self.shape.tiles) as usize
    }

    /// Where the list begins.
    #[simt::device]
    pub fn first_listed(self) -> usize {
        self.number as usize * self.shape.most as usize
    }

    /// Asks the L2 cache for the first `ahead` tiles of bounds of a warp of `warps` in a part: a hint, ahead
    /// of the wait. What the launch ahead has yet to write may be counted in the length that this looks at,
    /// or not.
    #[simt::device]
    pub fn ask<const D: usize>(
        self,
        bounds: Global<u32>,
        lengths: Global<u32>,
        [part, warp, lane]: [u32; 3],
        [warps, ahead]: [u32; 2],
        wanted: bool,
    ) {
        let glance = Part::of(lengths.peek(self.sequence as usize, wanted), self.shape);
        // A lane a tile.
        let mine = warp + warps * lane;
        let tile = part * glance.tiles_a_part + mine;
        let there = wanted & (lane < ahead) & (mine < glance.tiles_a_part) & (tile < glance.tiles);
        let words = summary_words(self.shape.summary, D as u32);
        bounds.prefetch(self.first_word(if there { tile } else { 0 }, words), 4 * words, there);
    }
}

/// A warp's work on a row.
#[derive(Clone, Copy)]
pub(super) struct Scoring<E> {
    pub queries: Global<E>,
    pub bounds: Global<u32>,
    pub scores: GlobalMut<u32>,
    pub maxima: GlobalMut<u32>,
    pub row: Row,
    /// Where the local blocks begin.
    pub local: u32,
    pub lane: u32,
}

impl<E: Half> Scoring<E> {
    /// Scores tile `tile` and every `WARPS`th behind it to before `end`. With `AHEAD` the bounds of the next
    /// tile are on their way to registers meanwhile.
    #[simt::device]
    pub fn tiles_of<const D: usize, const R: usize, const WARPS: u32, const AHEAD: bool>(
        self,
        tile: u32,
        end: u32,
    ) {
        // A loop for each: what one does not need takes no registers.
        match self.row.shape.summary {
            BY_MEANS => self.tiles::<D, R, BY_MEANS, WARPS, AHEAD>(tile, end),
            // Of bf16 and two groups of heads there are not the registers; of more channels no codes.
            BY_CODES if D <= 128 && (E::IS_F16 || R == 1) => {
                self.tiles::<D, R, BY_CODES, WARPS, AHEAD>(tile, end)
            }
            _ => self.tiles::<D, R, BY_BOUNDS, WARPS, AHEAD>(tile, end),
        }
    }

    #[simt::device]
    fn tiles<const D: usize, const R: usize, const BY: u32, const WARPS: u32, const AHEAD: bool>(
        self,
        mut tile: u32,
        end: u32,
    ) {
        let (lane, group) = (self.lane, self.row.shape.group);
        let first_word = self.row.first_word(0, summary_words(BY, D as u32));
        let (first_key, first_maximum) = (self.row.first_key(), self.row.first_maximum());
        let words = summary_words(BY, D as u32) as usize;
        let mut from = first_word + tile as usize * words;
        // Ahead of the queries, which they do not depend on.
        let mut bounds = TileBounds::NONE;
        if AHEAD && tile < end {
            bounds = TileBounds::load::<D, BY>(self.bounds, from, lane);
        }
        let operands =
            Operands::<R>::load::<E, D, BY>(self.queries, (self.row.number * group) as usize, group, lane);
        while tile < end {
            if !AHEAD {
                bounds = TileBounds::load::<D, BY>(self.bounds, from, lane);
            }
            let scored = operands.scores::<E, D, BY>(&bounds);
            let scales = bounds.scales;
            // Ahead of the condition: behind it the compiler has the loads wait for the products above.
            from += WARPS as usize * words;
            // The next ones are on their way while these are put together.
            if AHEAD && tile + WARPS < end {
                bounds = TileBounds::load::<D, BY>(self.bounds, from, lane);
            }
            // Held over the products it takes a register that `score` lacks on some GPUs.
            let lane = if AHEAD { lane } else { warp::lane_id() };
            let [low, high] = best::<R>(scored, scales, group, lane);
            // Lanes 4g have block g, lanes 4g + 1 block g + 8.
            let block = TILE_BLOCKS * tile + 8 * (lane & 3) + (lane >> 2);
            let score = ordered(if lane & 3 == 0 { low } else { high });
            if lane & 3 < 2 {
                self.scores.store(first_key + block as usize, score);
            }
            let counts = lane & 3 < 2 && block >= 1 && block < self.local;
            let score = if counts { score } else { 0 };
            let most = warp::warp_reduce_max_u32(FULL_MASK, score);
            if lane == 0 {
                self.maxima.store(first_maximum + 1 + tile as usize, most);
            }
            tile += WARPS;
        }
    }
}

/// The query heads of a list as B operands: for each contraction the positive channels and the negative ones,
/// or all and none.
struct Operands<const R: usize>([[[[u32; 2]; 2]; 16]; R]);

impl<const R: usize> Operands<R> {
    /// Loads `group` rows of `queries` from `row` on; heads that there are not are zeros.
    #[simt::device]
    fn load<E: Half, const D: usize, const BY: u32>(
        queries: Global<E>,
        row: usize,
        group: u32,
        lane: u32,
    ) -> Self {
        let mut operands = [[[[0u32; 2]; 2]; 16]; R];
        unroll!(for r in 0..R, at_most 2 {
            let head = ROWS * r as u32 + (lane >> 2);
            unroll!(for s in 0..(D / 16), at_most 16 {
                let at = (row + head as usize) * D + 16 * s + 4 * (lane & 3) as usize;
                let four = if head < group { queries.load_vector_readonly::<UVec2>(at) } else { UVec2::ZERO };
                let parts = |pair: u32| if BY == BY_MEANS { [pair, 0] } else { signs(pair) };
                let (low, high) = (parts(four.x), parts(four.y));
                operands[r][s] = [[low[0], high[0]], [low[1], high[1]]];
            });
        });
        Operands(operands)
    }

    /// Sums over the positive and over the negative channels of a tile: of blocks g and g + 8 for two query
    /// heads each, for each group of eight heads.
    #[simt::device]
    fn scores<E: Half, const D: usize, const BY: u32>(&self, bounds: &TileBounds) -> [[[f32; 4]; 2]; R] {
        let mut c = [[[0f32; 4]; 2]; R];
        if BY == BY_CODES {
            unroll!(for s in 0..(D / 16), at_most 16 {
                let words = bounds.operands[s][0].to_array();
                unroll!(for kind in 0..2 {
                    let of = [words[2 * kind], words[2 * kind + 1]];
                    let low = [restored::<E>(of[0], 0), restored::<E>(of[1], 0)];
                    let high = [restored::<E>(of[0], 1), restored::<E>(of[1], 1)];
                    let a = [low[0], low[1], high[0], high[1]];
                    unroll!(for r in 0..R, at_most 2 {
                        c[r][kind] = E::multiply(a, self.0[r][s][kind], c[r][kind]);
                    });
                });
            });
            return c;
        }
        unroll!(for s in 0..(D / 16), at_most 16 {
            unroll!(for kind in 0..2 {
                if BY != BY_MEANS || kind == 0 {
                    let a = bounds.operands[s][kind].to_array();
                    unroll!(for r in 0..R, at_most 2 {
                        c[r][kind] = E::multiply(a, self.0[r][s][kind], c[r][kind]);
                    });
                }
            });
        });
        c
    }
}

/// The bounds of 16 gather-blocks as A operands: for each contraction maxima and minima; or means and zeros;
/// or codes of both, and nothing.
struct TileBounds {
    operands: [[UVec4; 2]; 16],
    /// What scores of blocks g and g + 8 are multiplied by.
    scales: [f32; 2],
}

impl TileBounds {
    const NONE: TileBounds = TileBounds { operands: [[UVec4::ZERO; 2]; 16], scales: [1.0; 2] };

    /// Loads the tile at word `from`.
    #[simt::device]
    fn load<const D: usize, const BY: u32>(bounds: Global<u32>, from: usize, lane: u32) -> Self {
        let mut a = Self::NONE;
        if BY != BY_BOUNDS {
            unroll!(for s in 0..(D / 16), at_most 16 {
                a.operands[s][0] = bounds.load_vector_streaming(from + 128 * s + 4 * lane as usize);
            });
            if BY == BY_CODES {
                unroll!(for i in 0..2 {
                    let at = from + scale_word(D as u32, (lane >> 2) + 8 * i as u32) as usize;
                    a.scales[i] = f32::from_bits(bounds.load_readonly(at));
                });
            }
            return a;
        }
        unroll!(for s in 0..(D / 16), at_most 16 {
            unroll!(for kind in 0..2 {
                a.operands[s][kind] = bounds.load_vector_streaming(from + 128 * (2 * s + kind) + 4 * lane as usize);
            });
        });
        a
    }
}

/// The best scores of blocks g and g + 8 over the query heads, in all lanes of g.
#[simt::device]
fn best<const R: usize>(sums: [[[f32; 4]; 2]; R], scales: [f32; 2], group: u32, lane: u32) -> [f32; 2] {
    let mut best = [f32::NEG_INFINITY; 2];
    unroll!(for r in 0..R, at_most 2 {
        unroll!(for i in 0..4 {
            let head = ROWS * r as u32 + 2 * (lane & 3) + (i as u32 & 1);
            let score = (sums[r][0][i] + sums[r][1][i]) * scales[i / 2];
            if head < group {
                best[i / 2] = maximum(best[i / 2], score);
            }
        });
    });
    unroll!(for i in 0..2 {
        unroll!(for distance in 0..2 {
            let other = warp::warp_shuffle_xor(FULL_MASK, best[i], 1 << distance, 32);
            best[i] = maximum(best[i], other);
        });
    });
    best
}
