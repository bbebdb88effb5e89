//! Tiles in shared memory and the registers that the tensor cores want of them.

use super::{Half, ROWS};
use glam::UVec4;
use simt::{Global, GlobalMut, Shared, bits, unroll};

/// Bytes of a chunk: what one asynchronous copy moves.
const CHUNK_BYTES: u32 = 16;

/// The query rows of a warp: per lane row `g`, in the order of dimensions in which keys are loaded. Up to
/// head_dim 128 they stay in registers; beyond, in shared memory, where all warps of a block find the same
/// rows.
#[derive(Clone, Copy)]
pub struct Queries {
    /// Chunk `4s + q` of row `g`: eight elements.
    chunks: [[u32; 4]; 4],
    memory: Shared<u32>,
}

impl Queries {
    /// Words of shared memory that the rows take.
    pub const fn shared_words<const D: usize>() -> u32 {
        if D > 128 { ROWS * D as u32 / 2 } else { 0 }
    }

    /// Loads row `row` of `queries` [rows, D], or zeros if there is none. All warps call it with the same
    /// rows; beyond head_dim 128 a block barrier must follow.
    #[simt::device]
    pub fn load<E: Half, const D: usize>(
        queries: Global<E>,
        row: usize,
        present: bool,
        memory: Shared<u32>,
        writer: bool,
        lane: u32,
    ) -> Self {
        let mut chunks = [[0; 4]; 4];
        unroll!(for s in 0..(D / 32), at_most 8 {
            let at = row * D + 8 * (4 * s + (lane & 3) as usize);
            let chunk = if present { queries.load_vector_readonly::<UVec4>(at) } else { UVec4::ZERO };
            if D <= 128 {
                chunks[s % 4] = chunk.to_array();
            } else if writer {
                memory.store_vector(KeyTile::<D>::word(lane >> 2, 4 * s as u32 + (lane & 3)), chunk);
            }
        });
        Queries { chunks, memory }
    }

    #[simt::device]
    fn chunk<const D: usize>(&self, s: usize, lane: u32) -> [u32; 4] {
        if D <= 128 {
            self.chunks[s % 4]
        } else {
            let at = KeyTile::<D>::word(lane >> 2, 4 * s as u32 + (lane & 3));
            self.memory.load_vector::<UVec4>(at).to_array()
        }
    }

    /// Scores of the tile's 16 tokens: `[tokens 8j + 2q, 8j + 2q + 1]` of row `g`, j = 0 and 1.
    #[simt::device]
    pub fn scores<E: Half, const D: usize>(&self, keys: KeyTile<D>, lane: u32) -> [[f32; 2]; 2] {
        let mut c = [[0f32; 4]; 2];
        unroll!(for s in 0..(D / 32), at_most 8 {
            let q = self.chunk::<D>(s, lane);
            unroll!(for j in 0..2 {
                let k = keys.chunk(8 * j as u32 + (lane >> 2), 4 * s as u32 + (lane & 3));
                c[j] = E::multiply([q[0], 0, q[1], 0], [k[0], k[1]], c[j]);
                c[j] = E::multiply([q[2], 0, q[3], 0], [k[2], k[3]], c[j]);
            });
        });
        [[c[0][0], c[0][1]], [c[1][0], c[1][1]]]
    }

    /// [`scores`](Self::scores) of two times eight rows, up to head_dim 128: one product of 16 rows, of which
    /// each is what it is alone.
    #[simt::device]
    pub fn scores_of_two<E: Half, const D: usize>(
        both: &[Self; 2],
        keys: KeyTile<D>,
        lane: u32,
    ) -> [[[f32; 2]; 2]; 2] {
        let mut c = [[0f32; 4]; 2];
        unroll!(for s in 0..(D / 32), at_most 4 {
            let [q, r] = [both[0].chunks[s], both[1].chunks[s]];
            unroll!(for j in 0..2 {
                let k = keys.chunk(8 * j as u32 + (lane >> 2), 4 * s as u32 + (lane & 3));
                c[j] = E::multiply([q[0], r[0], q[1], r[1]], [k[0], k[1]], c[j]);
                c[j] = E::multiply([q[2], r[2], q[3], r[3]], [k[2], k[3]], c[j]);
            });
        });
        [0, 2].map(|i| [[c[0][i], c[0][i + 1]], [c[1][i], c[1][i + 1]]])
    }
}

/// Where a chunk of a row lies, in chunks: `bits` are flipped so that neither the copies' writes nor the
/// lanes' reads meet in a bank.
#[inline(always)]
fn swizzle<const D: usize>(row: u32, chunk: u32, bits: u32) -> u32 {
    // Rows of 96 elements are 192 bytes: neighbours start half the banks apart on their own.
    if D.is_multiple_of(64) { row * (D as u32 / 8) + (chunk ^ bits) } else { row * (D as u32 / 8) + chunk }
}

/// 16 keys of 16 bits, [16, D], in shared memory.
#[derive(Clone, Copy)]
pub struct KeyTile<const D: usize> {
    memory: Shared<u32>,
    /// First word.
    start: u32,
}

/// 16 values of 16 bits, [16, D], in shared memory.
#[derive(Clone, Copy)]
pub struct ValueTile<const D: usize> {
    memory: Shared<u32>,
    start: u32,
}

macro_rules! tiles {
    ($name:ident, |$row:ident| $swizzle:expr) => {
        impl<const D: usize> $name<D> {
            /// Words of a tile.
            pub const WORDS: u32 = 8 * D as u32;
            /// Copies that each lane of a warp makes.
            pub const COPIES: u32 = Self::WORDS / 4 / 32;

            /// The tile at word `start` of `memory`.
            #[inline(always)]
            pub fn at(memory: Shared<u32>, start: u32) -> Self {
                $name { memory, start }
            }

            #[inline(always)]
            fn word($row: u32, chunk: u32) -> u32 {
                4 * swizzle::<D>($row, chunk, $swizzle)
            }

            /// Starts copying the tile at element `from` of `source`; a warp's work. Rows from `rows` on
            /// become zeros and are not read.
            #[simt::device]
            pub fn copy<E: Half>(self, source: Global<E>, from: usize, rows: u32, lane: u32) {
                self.copy_as::<E, false>(source, from, rows, lane);
            }

            /// [`copy`](Self::copy) of a tile that nobody needs again soon.
            #[simt::device]
            pub fn copy_once<E: Half>(self, source: Global<E>, from: usize, rows: u32, lane: u32) {
                self.copy_as::<E, true>(source, from, rows, lane);
            }

            #[simt::device]
            fn copy_as<E: Half, const ONCE: bool>(
                self,
                source: Global<E>,
                from: usize,
                rows: u32,
                lane: u32,
            ) {
                let per_row = D as u32 / 8;
                // A lane's chunks lie at distances that are known when this is compiled, if it is known that
                // no lane is beyond 31.
                let lane = lane % 32;
                let first = from + (lane * (CHUNK_BYTES / 2)) as usize;
                let place = |i: u32| {
                    let (row, chunk) = if 32u32.is_multiple_of(per_row) {
                        (32 / per_row * i + lane / per_row, lane % per_row)
                    } else {
                        ((32 * i + lane) / per_row, (32 * i + lane) % per_row)
                    };
                    (row, self.start + Self::word(row, chunk), first + (32 * i * CHUNK_BYTES / 2) as usize)
                };
                if rows >= super::BLOCK_TOKENS {
                    unroll!(for i in 0..(Self::COPIES as usize), at_most 16 {
                        let (_, target, at) = place(i as u32);
                        if ONCE {
                            self.memory.copy_async_once(target, source, at);
                        } else {
                            self.memory.copy_async(target, source, at);
                        }
                    });
                } else {
                    unroll!(for i in 0..(Self::COPIES as usize), at_most 16 {
                        let (row, target, at) = place(i as u32);
                        self.memory.copy_async_or_zero(target, source, at, row < rows);
                    });
                }
            }

            /// Writes the tile to `target`, from element `to` on; a warp's work.
            #[simt::device]
            pub fn store<E: Half>(self, target: GlobalMut<E>, to: usize, lane: u32) {
                let per_row = D as u32 / 8;
                unroll!(for i in 0..(Self::COPIES as usize), at_most 16 {
                    let c = 32 * i as u32 + lane;
                    let chunk = self.chunk(bits::div_u32(c, per_row), bits::rem_u32(c, per_row));
                    let at = to + (c * (CHUNK_BYTES / 2)) as usize;
                    target.store_vector(at, UVec4::from_array(chunk));
                });
            }

            /// Eight elements of a row.
            #[simt::device]
            pub fn chunk(self, row: u32, chunk: u32) -> [u32; 4] {
                self.memory.load_vector::<UVec4>(self.start + Self::word(row, chunk)).to_array()
            }
        }
    };
}
// Eight lanes read four chunks of each of two rows at once.
tiles!(KeyTile, |row| (row & 1) << 2);
// Eight lanes read two chunks, D / 64 apart, of each of four rows, two apart.
tiles!(ValueTile, |row| match D {
    64 => row & 6,
    128 => row >> 1 & 1 | row & 4,
    _ => row >> 1 & 3,
});

/// The dimension that output tile `t` holds in column `column`: a lane supplies, as column `g` of the tiles,
/// D/8 neighbouring dimensions.
#[inline(always)]
pub const fn output_dimension<const D: usize>(t: usize, column: u32) -> u32 {
    column * (D as u32 / 8) + t as u32
}

/// Output tiles whose operands are made at once.
#[inline(always)]
pub const fn width<const D: usize>() -> usize {
    // At head_dim 256 registers are short.
    if D.is_multiple_of(64) && D < 256 { 8 } else { 4 }
}

/// Values as operands, some output tiles at a time.
pub trait Values<const D: usize>: Copy {
    /// B operands of [`width`] output tiles from tile `width · s` on: tokens 2q, 2q + 1 and 2q + 8, 2q + 9 of
    /// the dimension that [`output_dimension`] names for column `g`.
    fn operands(self, s: u32, lane: u32) -> [[u32; 2]; 8];
}

/// The pairs (token a, token b) of both halves of a word of two dimensions.
#[inline(always)]
fn transpose(a: u32, b: u32) -> [u32; 2] {
    [bits::byte_perm(a, b, 0x5410), bits::byte_perm(a, b, 0x7632)]
}

impl<const D: usize> Values<D> for ValueTile<D> {
    #[simt::device]
    fn operands(self, s: u32, lane: u32) -> [[u32; 2]; 8] {
        let (g, q) = (lane >> 2, lane & 3);
        let mut b = [[0; 2]; 8];
        if width::<D>() == 8 {
            let tokens = [2 * q, 2 * q + 1, 2 * q + 8, 2 * q + 9]
                .map(|token| self.chunk(token, D as u32 / 64 * g + s));
            unroll!(for e in 0..4 {
                let low = transpose(tokens[0][e], tokens[1][e]);
                let high = transpose(tokens[2][e], tokens[3][e]);
                b[2 * e] = [low[0], high[0]];
                b[2 * e + 1] = [low[1], high[1]];
            });
        } else {
            let half = D as u32 / 32 * g + s;
            let tokens = [2 * q, 2 * q + 1, 2 * q + 8, 2 * q + 9].map(|token| {
                let at = self.start + Self::word(token, half / 2) + 2 * (half & 1);
                self.memory.load_vector::<[u32; 2]>(at)
            });
            unroll!(for e in 0..2 {
                let low = transpose(tokens[0][e], tokens[1][e]);
                let high = transpose(tokens[2][e], tokens[3][e]);
                b[2 * e] = [low[0], high[0]];
                b[2 * e + 1] = [low[1], high[1]];
            });
        }
        b
    }
}
