//! Codes of a warp's row on their way into the words of a tile: see [`layout`](super::layout).
//!
//! A lane has its D/32 codes in nibbles. A selector is then what one lane has, or two have together (keys at
//! D = 64), or half of what one has (values at D = 128).

use super::layout::{Side, TileLayout};
use super::parts::{PARTS, of_part};
use simt::warp::{FULL_MASK, warp_shuffle_idx, warp_shuffle_xor};
use simt::{GlobalMut, unroll};

/// A tile in memory, and which token of it.
#[derive(Clone, Copy)]
pub(super) struct Column {
    pub tiles: GlobalMut<u8>,
    /// The block of the pool, whatever it is of a token that has no place.
    pub block: u32,
    pub head: u32,
    pub kv_heads: u32,
    pub layout: TileLayout,
    pub token: u32,
}

impl Column {
    /// The first byte of the tile.
    #[inline(always)]
    pub fn tile(self) -> usize {
        (self.block * self.kv_heads + self.head) as usize * self.layout.bytes() as usize
    }

    /// Writes what word `w` of unit `unit` has of the token.
    #[simt::device]
    fn store(self, side: Side, unit: u32, w: u32, word: u32) {
        let to = self.tile() + self.layout.column(side, self.token, unit, w) as usize;
        match side {
            Side::Key => self.tiles.store_vector(to, word as u16),
            Side::Value => self.tiles.store(to, word as u8),
        }
    }

    /// Writes a row's codes of `B` bits.
    #[simt::device]
    pub fn write<const D: usize, const B: u32>(self, side: Side, nibbles: u32, lane: u32) {
        match (side, D) {
            (Side::Key, 128) => self.write_selectors::<B>(side, nibbles, (lane, 1), 3, true),
            (Side::Key, _) => {
                let own = nibbles << (8 * (lane & 1));
                let selector = own | warp_shuffle_xor(FULL_MASK, own, 1, 32);
                self.write_selectors::<B>(side, selector, (lane, 2), 2, lane & 1 == 0);
            }
            (Side::Value, 64) => self.write_selectors::<B>(side, nibbles, (lane, 1), 2, true),
            (Side::Value, _) => self.write_pairs::<B>(nibbles, lane),
        }
    }

    /// One selector a lane, or a pair of lanes with `apart` = 2, and 2^`log` of them a unit.
    #[simt::device]
    fn write_selectors<const B: u32>(
        self,
        side: Side,
        own: u32,
        (lane, apart): (u32, u32),
        log: u32,
        writes: bool,
    ) {
        let number = lane / apart;
        let (unit, k) = (number >> log, number & ((1 << log) - 1));
        if B == 4 {
            if writes {
                self.store(side, unit, k, own);
            }
        } else if B == 3 {
            // The fourth selector's bits are the nibbles' highest of three words.
            let fourth = warp_shuffle_idx(FULL_MASK, own, lane | (3 * apart), 32);
            if writes & (k % 4 != 3) {
                let word = own | (fourth >> (k % 4) & 0x1111) << 3;
                self.store(side, unit, k / 4 * 3 + k % 4, word);
            }
        } else {
            let next = warp_shuffle_xor(FULL_MASK, own, apart, 32);
            if writes & (k % 2 == 0) {
                self.store(side, unit, k / 2, own | next << 2);
            }
        }
    }

    /// Values at D = 128: two selectors a lane, a byte each.
    #[simt::device]
    fn write_pairs<const B: u32>(self, own: u32, lane: u32) {
        let (unit, k) = (lane / 4, lane % 4);
        let [first, second] = [own & 0xff, own >> 8];
        if B == 4 {
            self.store(Side::Value, unit, 2 * k, first);
            self.store(Side::Value, unit, 2 * k + 1, second);
        } else if B == 3 {
            // Of four selectors the even lane has the first two, and the odd lane the third and the fourth.
            let other = warp_shuffle_xor(FULL_MASK, own, 1, 32);
            let odd = k % 2 == 1;
            let fourth = if odd { second } else { other >> 8 };
            let at = k / 2 * 3;
            let of = |own: u32, place: u32| own | (fourth >> place & 0x11) << 3;
            self.store(Side::Value, unit, at + 2 * (k % 2), of(first, 2 * (k % 2)));
            if !odd {
                self.store(Side::Value, unit, at + 1, of(second, 1));
            }
        } else {
            self.store(Side::Value, unit, k, first | second << 2);
        }
    }

    /// Writes a key's codes in parts: a lane has those of `each` dimensions of its part, as
    /// [stored](super::layout::stored); zeros of a row that does not fit.
    #[simt::device]
    pub fn write_parts<const D: usize>(self, codes: [u32; 4], fits: bool, runs: Runs, lane: u32) {
        let (part, own) = (lane / 8, lane % 8);
        let (mut low, mut high) = (0u32, 0u32);
        unroll!(for i in 0..4 {
            if i < D / 32 {
                low |= (codes[i] & runs.mask) << (4 * i as u32);
                high |= codes[i] >> runs.length << (4 * i as u32);
            }
        });
        if D == 64 {
            (low, high) = (low << (8 * (own & 1)), high << (8 * (own & 1)));
        }
        let all = u64::from(low) << runs.low | u64::from(high) << runs.high;
        let all = if fits { all } else { 0 };
        // All parts' bits are in the same words, and of D = 64 those of two lanes.
        let mut words = [all as u32, (all >> 32) as u32];
        unroll!(for w in 0..2 {
            words[w] |= warp_shuffle_xor(FULL_MASK, words[w], 8, 32);
            words[w] |= warp_shuffle_xor(FULL_MASK, words[w], 16, 32);
            if D == 64 {
                words[w] |= warp_shuffle_xor(FULL_MASK, words[w], 1, 32);
            }
        });
        // The lanes of part p write word p.
        let pair = if part & 2 == 0 { words[0] } else { words[1] };
        let word = (if part & 1 == 0 { pair } else { pair >> 16 }) as u16;
        if part < self.layout.key_bits && (D == 128 || own & 1 == 0) {
            let to = self.tile() + self.layout.nibbles(self.token, own / 2, part, own % 2) as usize;
            self.tiles.store_vector(to, word);
        }
    }
}

/// Where the bits of a part's codes are, as [`fields`](super::parts::fields) has them: two runs, of the low
/// bits and of the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Runs {
    /// Bits of the first run, and as many ones.
    pub length: u32,
    /// See `length`.
    pub mask: u32,
    /// Where the first dimension's runs begin, in four words of 16 bits.
    pub low: u32,
    /// The second run; anything where there is none.
    pub high: u32,
}

impl Runs {
    /// Of a part of keys of so many bits on average, by lengths and beginnings in a byte each.
    #[inline(always)]
    pub fn of(average: u32, part: u32) -> Self {
        const ALL: [[u32; PARTS]; 3] = [Runs::packed(2), Runs::packed(3), Runs::packed(4)];
        let word = match average {
            2 => of_part(ALL[0], part),
            3 => of_part(ALL[1], part),
            _ => of_part(ALL[2], part),
        };
        let length = word & 0xff;
        Runs { length, mask: (1 << length) - 1, low: word >> 8 & 0xff, high: word >> 16 }
    }

    const fn packed(average: u32) -> [u32; PARTS] {
        let (bits, fields) = (super::parts::bits(average), super::parts::fields(average));
        let mut all = [0; PARTS];
        let mut part = 0;
        while part < PARTS {
            let mut length = 1;
            while length < bits[part] && field(fields[part], length) == field(fields[part], length - 1) + 1 {
                length += 1;
            }
            let high = if length < bits[part] { field(fields[part], length) } else { 0 };
            all[part] = length | field(fields[part], 0) << 8 | high << 16;
            part += 1;
        }
        all
    }
}

/// Where bit `bit` is of the first dimension.
const fn field(fields: u32, bit: u32) -> u32 {
    let field = fields >> (4 * bit) & 15;
    16 * (field >> 2) + (field & 3)
}

#[cfg(test)]
mod tests {
    use super::super::parts::{bits, fields, in_nibbles};
    use super::*;

    /// Two runs are all of a code, in each place.
    #[test]
    fn runs_are_the_fields() {
        for average in [2, 3, 4] {
            for part in 0..PARTS {
                let Runs { length, mask, low, high } = Runs::of(average, part as u32);
                for code in 0..1u32 << bits(average)[part] {
                    for nibble in 0..4 {
                        let shift = 4 * nibble;
                        let found = u64::from(code & mask) << (low + shift)
                            | u64::from(code >> length) << (high + shift);
                        let expected = in_nibbles(code, bits(average)[part], fields(average)[part], nibble);
                        assert_eq!(found, expected, "{average} {part} {code} {nibble}");
                    }
                }
            }
        }
    }
}
