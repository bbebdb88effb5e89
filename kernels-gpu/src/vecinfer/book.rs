//! Codebooks in shared memory, and a lane's codes in registers.
//!
//! A codebook comes as [`attend`](fn@super::attend) fetches it ([`Code::fetched_bytes`]): keys of four and
//! eight channels are whole numbers ([`Code::whole_keys`]) and take a byte a channel, values of more than
//! eight bits are whole multiples of a step ([`Code::whole_values`]) and take one too, all others two. Of
//! bytes that are values two instructions make f16 ([`Book::unit`]).
//!
//! A codebook of 256 centroids is repeated in all banks: row `code` is 256 bytes, the first half of keys,
//! the other of values, in which the centroid lies once for each group of lanes that is served at a time (16
//! times at 8 bytes). So 32 lanes with 32 different codes never meet in a bank, a load of 8 bytes a lane
//! takes the two cycles that its bytes take, and one `prmt` makes its address: the code's byte above the
//! byte of the lane's place in a row. It costs 64 KiB for both.
//!
//! A larger one takes 32 KiB, and is there as often as it fits. Lanes that want different centroids of one
//! bank wait for each other; wavefronts of a warp's load, of codes that are all as likely:
//!
//! | | a centroid's bytes | copies | wavefronts | of f16, once |
//! |---|---|---|---|---|
//! | d = 4, b = 10 | 4 | 8 | 2.95 | 6.1 |
//! | d = 4, b = 12 | 4 | 2 | 3.45 | 6.1 |
//! | d = 8, b = 10 | 8 | 4 | 5.3 | 10.4 |
//! | d = 8, b = 12 | 8 | 1 | 6.15 | 10.4 |

use super::Code;
use crate::attention::threads;
use glam::{UVec2, UVec4};
use simt::half2::fma_f16x2;
use simt::{Global, Shared, SharedPlan, bits, thread, unroll};

/// Bytes of a centroid that is repeated in all banks, and from one to the next.
const ROW: u32 = 128;
const PITCH: u32 = 2 * ROW;
/// Bytes of a codebook that is not.
const LARGE: u32 = 32 << 10;
/// The most parts of 16 bytes of a codebook that a thread puts there, of 128 threads.
const CHUNKS: usize = (LARGE / 16 / 128) as usize;
const _: () = assert!(CHUNKS == 16 && LARGE == 256 * ROW, "either kind has as many");

/// A codebook in shared memory, of keys or of values.
#[derive(Clone, Copy)]
pub(super) struct Book<const C: u32, const KEYS: bool> {
    memory: Shared<u8>,
    /// Where in it.
    start: u32,
}

/// Room in `plan` for codebooks of keys and values: those that are repeated in all banks share rows.
pub(super) const fn books<const K: u32, const V: u32>(
    plan: &mut SharedPlan,
) -> (Book<K, true>, Book<V, false>) {
    let (large_keys, large_values) = (Code::of(K).bits > 8, Code::of(V).bits > 8);
    let repeated = if large_keys && large_values { 0 } else { PITCH * 256 };
    let of_keys = if large_keys { LARGE } else { 0 };
    let of_values = if large_values { LARGE } else { 0 };
    let memory = plan.array(repeated + of_keys + of_values);
    let keys = Book { memory, start: if large_keys { repeated } else { 0 } };
    let values = Book { memory, start: if large_values { repeated + of_keys } else { ROW } };
    (keys, values)
}

impl<const C: u32, const KEYS: bool> Book<C, KEYS> {
    const CODE: Code = Code::of(C);
    /// Whether centroids are bytes.
    const WHOLE: bool = if KEYS { Self::CODE.whole_keys() } else { Self::CODE.whole_values() };
    /// Bytes of a centroid.
    const UNIT: u32 = if Self::WHOLE { 1 } else { 2 } * Self::CODE.d;
    /// How often it is there.
    const COPIES: u32 =
        if Self::CODE.bits == 8 { ROW / Self::UNIT } else { LARGE / (Self::UNIT << Self::CODE.bits) };
    /// Bytes of all its copies.
    const ALL: u32 = Self::UNIT * Self::COPIES;
    /// Bytes of the codebook that make 16 bytes of it here, of which so many are the same.
    const SOURCE: u32 = if Self::ALL < 16 { Self::UNIT * (16 / Self::ALL) } else { Self::UNIT };
    const SAME: u32 = if Self::ALL < 16 { 1 } else { Self::ALL / 16 };

    /// Where the codebook of a KV head begins in `books`, which are one, or one for each head.
    #[inline(always)]
    pub(super) fn of_head(head: u32, each: bool) -> usize {
        if each { (head * Self::CODE.fetched_bytes(KEYS)) as usize } else { 0 }
    }

    /// Loads a thread's part of a block of head_dim `D`, ahead of the wait of a launch that overlaps.
    #[simt::device]
    pub(super) fn ahead<const D: usize>(books: Global<u8>, from: usize) -> Chunks {
        let mut words = [[0; 4]; CHUNKS];
        unroll!(for i in 0..((LARGE / 16 / threads(D as u32)) as usize), at_most 16 {
            let chunk = thread::thread_idx_x() + threads(D as u32) * i as u32;
            let at = from + (chunk / Self::SAME * Self::SOURCE) as usize;
            words[i] = match Self::SOURCE {
                4 => [books.load_vector_ahead::<u32>(at); 4],
                8 => {
                    let [a, b] = books.load_vector_ahead::<UVec2>(at).to_array();
                    if Self::UNIT == 4 { [a, a, b, b] } else { [a, b, a, b] }
                }
                _ => books.load_vector_ahead::<UVec4>(at).to_array(),
            };
        });
        Chunks { words }
    }

    /// Puts a thread's part there. A barrier must follow.
    #[simt::device]
    pub(super) fn fill<const D: usize>(self, ahead: Chunks) {
        unroll!(for i in 0..((LARGE / 16 / threads(D as u32)) as usize), at_most 16 {
            let chunk = thread::thread_idx_x() + threads(D as u32) * i as u32;
            let at = if Self::CODE.bits == 8 {
                PITCH * (chunk / (ROW / 16)) + 16 * (chunk % (ROW / 16))
            } else {
                16 * chunk
            };
            self.memory.store_vector(self.start + at, UVec4::from_array(ahead.words[i]));
        });
    }

    /// What a lane adds to the place of each centroid.
    #[inline(always)]
    pub(super) fn of_lane(self, lane: u32) -> u32 {
        lane % Self::COPIES * Self::UNIT
    }

    /// The whole numbers of a lane's slot: a word of four channels, two of eight.
    #[simt::device]
    pub(super) fn whole(self, words: &Words<C>, slot: usize, own: u32) -> [u32; 2] {
        let place = self.start + words.place(slot, own, Self::ALL);
        if Self::CODE.d == 4 {
            return [self.memory.load_vector::<u32>(place), 0];
        }
        self.memory.load_vector::<UVec2>(place).to_array()
    }

    /// The unit of a lane's slots from `slot` on in f16: two words of four channels, four of eight. `step` is
    /// of values that are bytes.
    #[simt::device]
    pub(super) fn unit(self, words: &Words<C>, slot: usize, own: u32, step: Step) -> [u32; 4] {
        if Self::WHOLE {
            let [a, b] = self.whole(words, slot, own);
            let ([a, b], [c, d]) = (step.of_bytes(a), step.of_bytes(b));
            return [a, b, c, d];
        }
        let place = |slot: usize| self.start + words.place(slot, own, Self::ALL);
        match Self::CODE.d {
            2 => {
                let [a, b] = [slot, slot + 1].map(|s| self.memory.load_vector::<u32>(place(s)));
                [a, b, 0, 0]
            }
            4 => {
                let [a, b] = self.memory.load_vector::<[u32; 2]>(place(slot));
                [a, b, 0, 0]
            }
            _ => self.memory.load_vector::<UVec4>(place(slot)).to_array(),
        }
    }

    /// The step of values that are bytes, behind their codebook.
    #[simt::device]
    pub(super) fn step(books: Global<u8>, from: usize) -> Step {
        if !Self::WHOLE {
            return Step::NONE;
        }
        let behind = from + (Self::UNIT << Self::CODE.bits) as usize;
        let [step, offset] = books.load_vector_readonly::<UVec2>(behind).to_array();
        Step { step, offset }
    }
}

/// 16 bytes of a codebook in shared memory each, on their way there.
#[derive(Clone, Copy)]
pub(super) struct Chunks {
    words: [[u32; 4]; CHUNKS],
}

/// The step s of whole values: a byte u stands for s·(u − 128).
#[derive(Clone, Copy)]
pub(super) struct Step {
    /// s in f16, twice.
    step: u32,
    /// −1152·s, which f16 holds as s has seven bits.
    offset: u32,
}

impl Step {
    /// Of what is not bytes.
    pub(super) const NONE: Self = Step { step: 0, offset: 0 };

    /// Four bytes in f16: 0x6400 | u is 1024 + u, and s·(1024 + u) − 1152·s is rounded once.
    #[inline(always)]
    fn of_bytes(self, bytes: u32) -> [u32; 2] {
        [0x4140, 0x4342]
            .map(|select| fma_f16x2(bits::byte_perm(bytes, 0x6464_6464, select), self.step, self.offset))
    }
}

/// A lane's codes of a tile.
#[derive(Clone, Copy)]
pub(super) struct Words<const C: u32> {
    low: [u32; 8],
    high: [u32; 2],
}

impl<const C: u32> Words<C> {
    const CODE: Code = Code::of(C);

    /// None.
    pub(super) const NONE: Self = Words { low: [0; 8], high: [0; 2] };

    /// Of the tile that begins at byte `tile`.
    #[simt::device]
    pub(super) fn load<const D: usize>(codes: Global<u8>, tile: usize, lane: u32) -> Self {
        let (low_bytes, high_bytes) = (Self::CODE.low_bytes(D as u32), Self::CODE.high_bytes(D as u32));
        let mut low = [0; 8];
        let at = tile + (lane * low_bytes) as usize;
        match low_bytes {
            4 => low[0] = codes.load_vector_streaming::<u32>(at),
            8 => [low[0], low[1]] = codes.load_vector_streaming::<UVec2>(at).to_array(),
            12 => unroll!(for i in 0..3 {
                low[i] = codes.load_vector_streaming::<u32>(at + 4 * i);
            }),
            24 => unroll!(for i in 0..3 {
                [low[2 * i], low[2 * i + 1]] = codes.load_vector_streaming::<UVec2>(at + 8 * i).to_array();
            }),
            _ => {
                [low[0], low[1], low[2], low[3]] = codes.load_vector_streaming::<UVec4>(at).to_array();
                if low_bytes == 32 {
                    [low[4], low[5], low[6], low[7]] =
                        codes.load_vector_streaming::<UVec4>(at + 16).to_array();
                }
            }
        }
        let mut high = [0; 2];
        let at = tile + (32 * low_bytes + lane * high_bytes) as usize;
        match high_bytes {
            0 => {}
            1 => high[0] = codes.load_vector_streaming::<u8>(at) as u32,
            2 => high[0] = codes.load_vector_streaming::<u16>(at) as u32,
            4 => high[0] = codes.load_vector_streaming::<u32>(at),
            _ => high = codes.load_vector_streaming::<UVec2>(at).to_array(),
        }
        Words { low, high }
    }

    /// Where the centroid of a slot's code begins, `own` being the lane's part of it, `all` the bytes of its
    /// copies.
    #[inline(always)]
    fn place(&self, slot: usize, own: u32, all: u32) -> u32 {
        let word = self.low[slot / 4];
        if Self::CODE.bits == 8 {
            // A byte of the word above the lane's, which is less than a byte, and zeros.
            return bits::byte_perm(word, own, 0x5504 | (slot as u32 % 4) << 4);
        }
        let log = all.trailing_zeros();
        let low = moved(word, 8 * (slot as u32 % 4), log);
        let more = Self::CODE.bits - 8;
        let bit = slot as u32 * more;
        let high = moved(self.high[(bit / 32) as usize], bit % 32, log + 8);
        bits::and_or(low, 0xff << log, bits::and_or(high, ((1 << more) - 1) << (log + 8), own))
    }
}

/// `word` shifted so that its bit `from` becomes bit `to`.
#[inline(always)]
const fn moved(word: u32, from: u32, to: u32) -> u32 {
    if from > to { word >> (from - to) } else { word << (to - from) }
}
