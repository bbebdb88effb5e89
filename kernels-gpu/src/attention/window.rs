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
    /// here in any case. With no more than those at the front there are no last ones.
    pub slots: u32,
}

impl Window {
    /// No tile.
    pub const NONE: Window = Window { sink: 0, slots: 0 };

    /// For so many tokens at the front and at the end, of either whole tiles.
    pub const fn of(sink: u32, recent: u32) -> Self {
        let sink = sink.div_ceil(BLOCK_TOKENS);
        Window { sink, slots: sink + if recent == 0 { 0 } else { recent.div_ceil(BLOCK_TOKENS) + 1 } }
    }

    /// The same where no sequence has more than so many tiles: what holds all has no use for more.
    pub fn within(self, tiles: u32) -> Self {
        Window { slots: self.slots.min(self.sink + tiles + 1), ..self }
    }

    /// [`recent`](Self::recent), of a window without last tiles any tile past the end.
    #[inline(always)]
    pub const fn first_recent(self, length: u32) -> u32 {
        if self.slots == self.sink { u32::MAX } else { self.recent(length) }
    }

    /// Tokens of a sequence that are read from their codes.
    pub fn coded(self, length: u64) -> u64 {
        let tile = u64::from(BLOCK_TOKENS);
        let sink = length.min(u64::from(self.sink) * tile);
        if self.slots == self.sink {
            return length - sink;
        }
        (length / tile).saturating_sub(u64::from(self.slots - 1)) * tile
    }

    /// The first tile of the last ones that a step reads in f16, of a sequence of `length` tokens; the codes
    /// of those before are read, but for the sink.
    #[inline(always)]
    pub const fn recent(self, length: u32) -> u32 {
        (length / BLOCK_TOKENS).saturating_sub(self.slots - self.sink - 1)
    }

    /// Whether a tile is read from its codes.
    #[inline(always)]
    pub const fn is_coded(self, tile: u32, length: u32) -> bool {
        tile >= self.sink && tile < self.first_recent(length)
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
        for (sink, slots) in [(0, 0), (1, 1), (0, 1), (0, 3), (1, 2), (1, 4), (2, 5)] {
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
                let expected = match window.slots - sink {
                    0 => last + 1,
                    at_the_end => (length / BLOCK_TOKENS).saturating_sub(at_the_end - 1),
                };
                assert_eq!(coded, expected.saturating_sub(sink), "{window:?} {length}");
                let tokens = window.coded(length.into()) as u32;
                assert_eq!(tokens.div_ceil(BLOCK_TOKENS), coded, "{window:?} {length}");
            }
        }
        assert_eq!(Window::of(0, 0), Window::NONE);
        assert_eq!(Window::of(16, 0), Window { sink: 1, slots: 1 });
        assert_eq!(Window::of(16, 17), Window { sink: 1, slots: 4 });
        assert_eq!(Window::of(16, 1 << 16).within(3), Window { sink: 1, slots: 5 });
    }
}
