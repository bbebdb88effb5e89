//! Tokens that a scheme of codes has in f16 as well: the first ones, and the most recent ones.

use super::BLOCK_TOKENS;
use simt::{Pod, Zeroable, bits};

/// Tiles of 16 tokens of a sequence and KV head that are kept in f16: `sink` tiles at the front, which stay,
/// and a ring of the last ones. Models give the first tokens of a text much of their attention, and their
/// keys lie far from all others, so that codes made for the others are worst where it matters most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Window {
    /// Tiles at the front.
    pub sink: u32,
    /// Tiles that there is room for: those at the front, and one more than the last ones that are read from
    /// here in any case.
    pub slots: u32,
}

impl Window {
    /// The first tile of the last ones that a step reads in f16, of a sequence of `length` tokens; the codes
    /// of those before are read, but for the sink.
    #[inline(always)]
    pub const fn recent(self, length: u32) -> u32 {
        (length / BLOCK_TOKENS).saturating_sub(self.slots - self.sink - 1)
    }

    /// Whether a tile is read from its codes.
    #[inline(always)]
    pub const fn is_coded(self, tile: u32, length: u32) -> bool {
        tile >= self.sink && tile < self.recent(length)
    }

    /// Whether a tile is kept when the last token is in tile `last`.
    #[inline(always)]
    pub const fn keeps(self, tile: u32, last: u32) -> bool {
        tile < self.sink || tile + (self.slots - self.sink) > last
    }

    /// Where a tile lies.
    #[inline(always)]
    pub fn slot(self, tile: u32) -> u32 {
        if tile < self.sink {
            return tile;
        }
        self.sink + bits::rem_u32(tile - self.sink, self.slots - self.sink)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of any length each tile is read from one place, none of the window's places has two tiles that are
    /// read, and what is read is kept.
    #[test]
    fn tiles_that_are_read_have_places_of_their_own() {
        for (sink, slots) in [(0, 1), (0, 3), (1, 2), (1, 4), (2, 5)] {
            let window = Window { sink, slots };
            for length in 1..200 {
                let last = (length - 1) / BLOCK_TOKENS;
                let mut taken = vec![None; slots as usize];
                for tile in (0..=last).filter(|tile| !window.is_coded(*tile, length)) {
                    assert!(window.keeps(tile, last), "{window:?} {length} {tile}");
                    let slot = window.slot(tile) as usize;
                    assert_eq!(taken[slot].replace(tile), None, "{window:?} {length} {tile}");
                }
                // No tile that is kept later takes the place of one that is read now.
                let kept: Vec<u32> = (0..=last).filter(|tile| window.keeps(*tile, last)).collect();
                let mut slots: Vec<u32> = kept.iter().map(|tile| window.slot(*tile)).collect();
                slots.sort_unstable();
                slots.dedup();
                assert_eq!(slots.len(), kept.len(), "{window:?} {length}");
                let coded = (0..=last).filter(|tile| window.is_coded(*tile, length)).count() as u32;
                let full = length / BLOCK_TOKENS;
                assert_eq!(coded, full.saturating_sub(slots_at_the_end(window)).saturating_sub(sink));
            }
        }
    }

    fn slots_at_the_end(window: Window) -> u32 {
        window.slots - window.sink - 1
    }
}
