//! How tiles lie in shared memory so that neither the tensor cores nor a copy meet one bank twice.

/// Which bits of a byte's place are exchanged: those of its vector of 16 bytes by XOR with those of its row
/// of 128 bytes. Tiles that are swizzled begin at a multiple of [`period`](Self::period) bytes of shared
/// memory. The names and the patterns are those of TMA descriptors and of `wgmma`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Swizzle {
    /// Nothing is exchanged.
    #[default]
    None,
    /// Rows of 32 bytes.
    B32,
    /// Rows of 64 bytes.
    B64,
    /// Rows of 128 bytes.
    B128,
}

impl Swizzle {
    /// Bytes after which the pattern begins again.
    pub const fn period(self) -> u32 {
        match self {
            Swizzle::None => 16,
            Swizzle::B32 => 256,
            Swizzle::B64 => 512,
            Swizzle::B128 => 1024,
        }
    }

    /// Bytes of a row, within which vectors change places.
    pub const fn row(self) -> u32 {
        self.period() / 8
    }

    /// What a tile's place in shared memory is a multiple of, for copies and for the pattern to begin there.
    pub(crate) const fn tile_align(self) -> u32 {
        if self.period() < 128 { 128 } else { self.period() }
    }

    /// Where the byte at `offset` of the unswizzled tile lies, from the tile's beginning.
    pub const fn place(self, offset: u32) -> u32 {
        let mask = match self {
            Swizzle::None => 0,
            Swizzle::B32 => 0x10,
            Swizzle::B64 => 0x30,
            Swizzle::B128 => 0x70,
        };
        offset ^ offset >> 3 & mask
    }
}
