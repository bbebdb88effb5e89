//! Codebooks in shared memory, and a lane's codes in registers.
//!
//! A codebook of 256 centroids is repeated in all banks: row `code` is 256 bytes, the first half of keys,
//! the other of values, in which the centroid lies once for each group of lanes that is served at a time (16
//! times at 8 bytes). So 32 lanes with 32 different codes never meet in a bank, a load of 8 bytes a lane
//! takes the two cycles that its bytes take, and one `prmt` makes its address: the code's byte above the
//! byte of the lane's place in a row. It costs 64 KiB in place of 512·d bytes each. Larger codebooks are
//! there once. Keys that are whole numbers ([`Code::whole_keys`]) are bytes there: a centroid of four
//! channels is one wavefront to fetch, and not two.

use super::Code;
use crate::attention::Half;
use crate::element::store_whole;
use glam::{UVec2, UVec4};
use half::f16;
use simt::math::to_i32_nearest_even;
use simt::{Global, Shared, SharedPlan, bits, thread, unroll};

/// Bytes of a centroid that is repeated in all banks, and from one to the next.
const ROW: u32 = 128;
const PITCH: u32 = 2 * ROW;
/// Threads of the blocks that use them.
pub(super) const THREADS: u32 = 256;

/// A codebook in shared memory, of keys or of values.
#[derive(Clone, Copy)]
pub(super) struct Book<const C: u32, const KEYS: bool> {
    memory: Shared<u8>,
    /// Where in it.
    start: u32,
}

/// Bytes of a codebook that is there once.
const fn once_bytes(code: Code, whole: bool) -> u32 {
    if code.bits == 8 { 0 } else { (if whole { 1 } else { 2 }) * code.book_elements() }
}

/// Room in `plan` for codebooks of keys and values: those that are repeated share rows.
pub(super) const fn books<const K: u32, const V: u32>(
    plan: &mut SharedPlan,
) -> (Book<K, true>, Book<V, false>) {
    let repeated = if Code::of(K).bits == 8 || Code::of(V).bits == 8 { PITCH * 256 } else { 0 };
    let (of_keys, of_values) =
        (once_bytes(Code::of(K), Code::of(K).whole_keys()), once_bytes(Code::of(V), false));
    let memory = plan.array(repeated + of_keys + of_values);
    let keys = Book { memory, start: if Code::of(K).bits == 8 { 0 } else { repeated } };
    let values = Book { memory, start: if Code::of(V).bits == 8 { ROW } else { repeated + of_keys } };
    (keys, values)
}

impl<const C: u32, const KEYS: bool> Book<C, KEYS> {
    const CODE: Code = Code::of(C);
    /// Whether centroids are whole numbers.
    const WHOLE: bool = KEYS && Self::CODE.whole_keys();
    /// Bytes of a centroid.
    const UNIT: u32 = if Self::WHOLE { 1 } else { 2 } * Self::CODE.d;

    /// Fills it from element `from` of `books`, with what was loaded ahead of it: the work of a block. A
    /// barrier must follow.
    #[simt::device]
    pub(super) fn fill(self, ahead: Chunks<C>, books: Global<f16>, from: usize) {
        let t = thread::thread_idx_x();
        if Self::CODE.bits == 8 {
            unroll!(for i in 0..8 {
                let chunk = t + THREADS * i as u32;
                let at = PITCH * (chunk / (ROW / 16)) + 16 * (chunk % (ROW / 16));
                self.memory.store_vector(
                    self.start + at,
                    if Self::WHOLE { ahead.whole(i) } else { ahead.widened(i) },
                );
            });
            return;
        }
        unroll!(for i in 0..(once_bytes(Self::CODE, Self::WHOLE) as usize / 16 / THREADS as usize), at_most 16 {
            let chunk = t + THREADS * i as u32;
            let load = |at: u32| books.load_vector_readonly::<UVec4>(from + at as usize);
            let word = if Self::WHOLE {
                let [a, b, c, d] = load(16 * chunk).to_array();
                let [e, f, g, h] = load(16 * chunk + 8).to_array();
                UVec4::new(bytes_of([a, b]), bytes_of([c, d]), bytes_of([e, f]), bytes_of([g, h]))
            } else {
                load(8 * chunk)
            };
            self.memory.store_vector(self.start + 16 * chunk, word);
        });
    }

    /// What a lane adds to the place of each centroid.
    #[inline(always)]
    pub(super) fn of_lane(self, lane: u32) -> u32 {
        if Self::CODE.bits == 8 { lane * Self::UNIT % ROW } else { 0 }
    }

    /// The whole numbers of a lane's slot of four channels.
    #[simt::device]
    pub(super) fn word(self, words: &Words<C>, slot: usize, own: u32) -> u32 {
        self.memory.load_vector(self.start + words.place(slot, own, Self::UNIT))
    }

    /// The unit of a lane's slots from `slot` on: two words of four channels, four of eight.
    #[simt::device]
    pub(super) fn unit(self, words: &Words<C>, slot: usize, own: u32) -> [u32; 4] {
        let place = |slot: usize| self.start + words.place(slot, own, Self::UNIT);
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
}

/// Four whole numbers in f16 as bytes.
#[inline(always)]
fn bytes_of(words: [u32; 2]) -> u32 {
    let ([a, b], [c, d]) = (<f16 as Half>::unpack(words[0]), <f16 as Half>::unpack(words[1]));
    let [a, b, c, d] = [a, b, c, d].map(|x| to_i32_nearest_even(x) as u32);
    bits::byte_perm(bits::byte_perm(a, b, 0x0040), bits::byte_perm(c, d, 0x0040), 0x5410)
}

/// A thread's centroids of a codebook that is repeated, on their way there: of 16 bytes of its eighth each.
#[derive(Clone, Copy)]
pub(super) struct Chunks<const C: u32> {
    words: [[u32; 4]; 8],
}

impl<const C: u32> Chunks<C> {
    /// Loads them, ahead of the wait of a launch that overlaps; none of a larger codebook.
    #[simt::device]
    pub(super) fn ahead(books: Global<f16>, from: usize) -> Self {
        let mut words = [[0; 4]; 8];
        if Code::of(C).bits == 8 {
            unroll!(for i in 0..8 {
                let code = (thread::thread_idx_x() + THREADS * i as u32) / (ROW / 16);
                let at = from + (code * Code::of(C).d) as usize;
                match Code::of(C).d {
                    2 => words[i][0] = books.load_vector_ahead::<u32>(at),
                    4 => [words[i][0], words[i][1]] = books.load_vector_ahead::<UVec2>(at).to_array(),
                    _ => words[i] = books.load_vector_ahead::<UVec4>(at).to_array(),
                }
            });
        }
        Chunks { words }
    }

    /// The same of whole numbers of four channels.
    #[inline(always)]
    fn whole(&self, i: usize) -> UVec4 {
        UVec4::splat(bytes_of([self.words[i][0], self.words[i][1]]))
    }

    /// 16 bytes of the row, as often as the centroid fits.
    #[inline(always)]
    fn widened(&self, i: usize) -> UVec4 {
        let [a, b, c, d] = self.words[i];
        match Code::of(C).d {
            2 => UVec4::splat(a),
            4 => UVec4::new(a, b, a, b),
            _ => UVec4::new(a, b, c, d),
        }
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

    /// Where the centroid of a slot's code begins, `own` being the lane's part of it, `unit` its bytes.
    #[inline(always)]
    fn place(&self, slot: usize, own: u32, unit: u32) -> u32 {
        let word = self.low[slot / 4];
        if Self::CODE.bits == 8 {
            // A byte of the word above the lane's, which is less than a byte, and zeros.
            return bits::byte_perm(word, own, 0x5504 | (slot as u32 % 4) << 4);
        }
        let log = unit.trailing_zeros();
        let low = moved(word, 8 * (slot as u32 % 4), log);
        let more = Self::CODE.bits - 8;
        let bit = slot as u32 * more;
        let high = moved(self.high[(bit / 32) as usize], bit % 32, log + 8);
        bits::and_or(low, 0xff << log, high & ((1 << more) - 1) << (log + 8))
    }
}

/// `word` shifted so that its bit `from` becomes bit `to`.
#[inline(always)]
const fn moved(word: u32, from: u32, to: u32) -> u32 {
    if from > to { word >> (from - to) } else { word << (to - from) }
}

/// Writes eight bytes of f16 in one access.
#[simt::device]
pub(super) fn store_four(target: simt::GlobalMut<f16>, at: usize, words: [u32; 2]) {
    store_whole(target, at, words);
}
