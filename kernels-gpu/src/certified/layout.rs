//! Where everything of a quantized block lies: one tile and one annotation for each block of 16 tokens and KV
//! head.
//!
//! # The tile
//! `32·D` bytes in the compact layout, 16 a token and 16 channels: half of what f16 takes. `36·D` in the
//! paper's, whose key scales and zeros are f32. Pools are `[block][kv_head][tile]`.
//!
//! | from byte | paper's | what | type | shape |
//! |---|---|---|---|---|
//! | 0 | 0 | key codes, plus 128 | u8 | `[16 tokens][D]` |
//! | 16·D | 16·D | key scales σ | f16 or f32 | \[D\] |
//! | 18·D | 20·D | key zeros z | f16 or f32 | \[D\] |
//! | 20·D | 24·D | value codes, byte j the channels 2j (low nibble) and 2j + 1 | u4 | `[16 tokens][D]` |
//! | 28·D | 32·D | value scales | f16 | `[16 tokens][D / 16]` |
//! | 30·D | 34·D | value zeros | f16 | `[16 tokens][D / 16]` |

use super::quantizer::SIZE_UNIT;
use glam::UVec4;
use simt::bits::byte_perm;
use simt::{Global, Pod, Zeroable};

/// Tokens of a block.
pub const BLOCK_TOKENS: u32 = 16;

/// Neighbouring channels of a value that share a scale and a zero.
pub const VALUE_GROUP: u32 = 16;

/// The head dimensions that the kernels have instances for.
pub const HEAD_DIMS: [u32; 4] = [64, 96, 128, 256];

/// What the scales and zeros of keys are stored as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Layout {
    /// f16, rounded such that the bounds hold: 256 bytes a token and KV head at head_dim 128.
    #[default]
    Compact,
    /// f32, as the paper has them: 288 bytes.
    Paper,
}

impl Layout {
    /// Both.
    pub const ALL: [Layout; 2] = [Layout::Compact, Layout::Paper];

    /// `compact` or `paper`.
    pub const fn name(self) -> &'static str {
        match self {
            Layout::Compact => "compact",
            Layout::Paper => "paper",
        }
    }

    /// Bytes of a key's scale, and of its zero.
    #[inline(always)]
    pub const fn metadata_bytes(self) -> u32 {
        match self {
            Layout::Compact => 2,
            Layout::Paper => 4,
        }
    }
}

/// Byte offsets in the tile of one head dimension, a multiple of 16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileLayout {
    /// Which of the two.
    pub kind: Layout,
    /// D.
    pub head_dim: u32,
    /// Key codes + 128: u8 `[16][D]`.
    pub key_codes: u32,
    /// σ: f16 or f32 \[D\].
    pub key_scales: u32,
    /// z: f16 or f32 \[D\].
    pub key_zeros: u32,
    /// Value codes: u4 `[16][D]`, the even channel in the low nibble.
    pub value_codes: u32,
    /// Value scales: f16 `[16][D / 16]`.
    pub value_scales: u32,
    /// Value zeros: f16 `[16][D / 16]`.
    pub value_zeros: u32,
    /// Bytes of a tile.
    pub bytes: u32,
}

impl TileLayout {
    /// The layout for `head_dim` channels.
    pub const fn new(head_dim: u32, kind: Layout) -> Self {
        let codes = BLOCK_TOKENS * head_dim;
        let channels = kind.metadata_bytes() * head_dim;
        let groups = 2 * BLOCK_TOKENS * (head_dim / VALUE_GROUP);
        TileLayout {
            kind,
            head_dim,
            key_codes: 0,
            key_scales: codes,
            key_zeros: codes + channels,
            value_codes: codes + 2 * channels,
            value_scales: codes + 2 * channels + codes / 2,
            value_zeros: codes + 2 * channels + codes / 2 + groups,
            bytes: codes + 2 * channels + codes / 2 + 2 * groups,
        }
    }

    /// Groups of a token's value.
    #[inline(always)]
    pub const fn groups(self) -> u32 {
        self.head_dim / VALUE_GROUP
    }

    /// The byte of a key's code.
    #[inline(always)]
    pub const fn key_code(self, token: u32, channel: u32) -> u32 {
        self.key_codes + token * self.head_dim + channel
    }

    /// The first byte of a channel's σ.
    #[inline(always)]
    pub const fn key_scale(self, channel: u32) -> u32 {
        self.key_scales + self.kind.metadata_bytes() * channel
    }

    /// The first byte of a channel's z.
    #[inline(always)]
    pub const fn key_zero(self, channel: u32) -> u32 {
        self.key_zeros + self.kind.metadata_bytes() * channel
    }

    /// The byte of a value's code, which is the byte's low nibble for an even channel.
    #[inline(always)]
    pub const fn value_code(self, token: u32, channel: u32) -> u32 {
        self.value_codes + (token * self.head_dim + channel) / 2
    }

    /// The first byte of a value group's scale.
    #[inline(always)]
    pub const fn value_scale(self, token: u32, group: u32) -> u32 {
        self.value_scales + 2 * (token * self.groups() + group)
    }

    /// The first byte of a value group's zero.
    #[inline(always)]
    pub const fn value_zero(self, token: u32, group: u32) -> u32 {
        self.value_zeros + 2 * (token * self.groups() + group)
    }

    /// Elements of a block of originals of one KV head: keys or values.
    #[inline(always)]
    pub const fn elements(self) -> u32 {
        BLOCK_TOKENS * self.head_dim
    }

    /// The first byte of a tile in its pool `[block][kv_head][tile]`.
    #[inline(always)]
    pub const fn tile(self, block: u32, kv_heads: u32, kv_head: u32) -> usize {
        pair(block, kv_heads, kv_head) * self.bytes as usize
    }

    /// The first element of a block of originals in its pool `[block][kv_head][16][D]`.
    #[inline(always)]
    pub const fn originals(self, block: u32, kv_heads: u32, kv_head: u32) -> usize {
        pair(block, kv_heads, kv_head) * self.elements() as usize
    }
}

/// The number of a pair of block and KV head, in pools and annotations.
#[inline(always)]
pub const fn pair(block: u32, kv_heads: u32, kv_head: u32) -> usize {
    block as usize * kv_heads as usize + kv_head as usize
}

/// How numbers become codes: docs/certificate.md, "A bound that may fail".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// To the nearest code: the least error.
    #[default]
    Nearest,
    /// Up or down by chance, so that the mean over the chances is the number itself: errors of different
    /// tokens and channels then add up like noise, which is what the statistical bound rests on.
    Stochastic {
        /// What the chances follow from, beside block, KV head, token and channel: another one a layer.
        seed: u32,
    },
}

impl Rounding {
    /// As the kernels are told: whether rounding is by chance, and the seed.
    pub const fn words(self) -> [u32; 2] {
        match self {
            Rounding::Nearest => [0, 0],
            Rounding::Stochastic { seed } => [1, seed],
        }
    }
}

/// What is known about the error of one block and KV head: 48 bytes, `[block][kv_head]`. Each is an upper
/// bound, and infinite where the block cannot be quantized.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C, align(16))]
pub struct Annotation {
    /// max over the tokens of ‖V − V^‖₂, V^ as the kernels restore it: one half-precision fused multiply-add.
    pub eta: f32,
    /// max over the tokens of ‖V‖₂.
    pub nu: f32,
    /// max over the tokens of ‖K − K^‖₂, K^ = code·σ + z without rounding.
    pub eps: f32,
    /// ‖z‖₂ + 128·‖σ‖₂: no |K^| is larger, channel by channel.
    pub zeta: f32,
    /// max over the tokens of √(Σ h²) / n, h half the distance of the two numbers between which a value was
    /// rounded by chance, n the token's size; infinite where it was not.
    pub spread: f32,
    /// max over the tokens of its largest h / n; infinite likewise.
    pub step: f32,
    /// No |K − K^| is more σ than this: a half, or one where rounding is by chance, and what f32 loses.
    pub reach: f32,
    #[doc(hidden)]
    pub unused: u32,
    /// The tokens' sizes, a byte each, token 0's the lowest of the first word: ‖V‖₂ of token t is at most
    /// n_t, its byte times [`unit`](Self::unit).
    pub sizes: [u32; 4],
}

/// Copies of 16 bytes that an annotation is.
pub const VECTORS: u32 = size_of::<Annotation>() as u32 / 16;

impl Annotation {
    /// Words of one.
    pub const WORDS: usize = size_of::<Annotation>() / 4;

    /// ν and ε + ζ of a pair: what no norm of a value, and none of a key, is above.
    #[simt::device]
    pub fn load_norms(annotations: Global<Annotation>, pair: usize) -> [f32; 2] {
        let first = annotations.cast::<UVec4>().load(VECTORS as usize * pair);
        let [_, nu, eps, zeta]: [f32; 4] = bytemuck::cast(first);
        [nu, eps + zeta]
    }

    /// What sizes are told in: a 255th of ν, and what roundings of this product and of a size lose.
    #[inline(always)]
    pub fn unit(&self) -> f32 {
        self.nu * SIZE_UNIT
    }

    /// The sizes of the tokens 2q, 2q + 1, 2q + 8 and 2q + 9, whose weights lane q of a row has: whole
    /// numbers.
    #[inline(always)]
    pub fn sizes_of_lane(&self, q: u32) -> [f32; 4] {
        // The bytes of 2^23 in f32, but for its lowest, which is the size.
        const ABOVE: u32 = 0x4b00_0000;
        let upper = q & 2 != 0;
        let [a, b, c, d] = self.sizes;
        let words = if upper { [b, d] } else { [a, c] };
        let selector = 0x7440 + 2 * (q & 1);
        let size = |i: u32| {
            let bits = byte_perm(words[(i / 2) as usize], ABOVE, selector + i % 2);
            f32::from_bits(bits) - f32::from_bits(ABOVE)
        };
        [size(0), size(1), size(2), size(3)]
    }

    /// Of nothing.
    pub const NONE: Annotation = Annotation {
        eta: 0.0,
        nu: 0.0,
        eps: 0.0,
        zeta: 0.0,
        spread: 0.0,
        step: 0.0,
        reach: 0.0,
        unused: 0,
        sizes: [0; 4],
    };
}

/// One block to quantize.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(16))]
pub struct Job {
    /// The block of originals; [`Job::NONE`]'s means that there is nothing to do.
    pub source: u32,
    /// The block of the quantized pool and of the annotations.
    pub destination: u32,
    /// The block's place in its sequence: the chances of rounding follow from it, so that they do not depend
    /// on where a pool has room, nor on other sequences.
    pub index: u32,
    #[doc(hidden)]
    pub unused: u32,
}

impl Job {
    /// Does nothing: fills up a list whose length is fixed.
    pub const NONE: Job = Job::new(u32::MAX, u32::MAX, u32::MAX);

    /// Block `source` to block `destination`, which is number `index` of its sequence.
    #[inline(always)]
    pub const fn new(source: u32, destination: u32, index: u32) -> Self {
        Job { source, destination, index, unused: 0 }
    }
}

/// What could not be quantized: the flat indices, in the pools of originals, of the first elements of each
/// kind, or `u64::MAX`. They start at `u64::MAX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Problems {
    /// A key that is NaN or infinite.
    pub key_not_finite: u64,
    /// A finite key whose channel needs a scale or a zero beyond f16, or in the paper's layout than its f16
    /// products with queries hold.
    pub key_range: u64,
    /// A value that is NaN or infinite.
    pub value_not_finite: u64,
    /// A finite value whose group needs a scale or a zero beyond f16, or that is restored as an infinity.
    pub value_range: u64,
}

impl Problems {
    /// No problem.
    pub const NONE: Problems = Problems {
        key_not_finite: u64::MAX,
        key_range: u64::MAX,
        value_not_finite: u64::MAX,
        value_range: u64::MAX,
    };
}

// Vectors of 16 bytes start at each part, and a tile is 32 or 36 bytes a channel, as the kernels count on.
const _: () = {
    let mut i = 0;
    while i < HEAD_DIMS.len() {
        let d = HEAD_DIMS[i];
        let (t, p) = (TileLayout::new(d, Layout::Compact), TileLayout::new(d, Layout::Paper));
        assert!(t.bytes == 32 * d && p.bytes == 36 * d);
        assert!(t.key_zeros == 18 * d && t.value_codes == 20 * d);
        assert!(t.value_scales == 28 * d && t.value_zeros == 30 * d);
        assert!(p.key_zeros == 20 * d && p.value_codes == 24 * d);
        assert!(p.value_scales == 32 * d && p.value_zeros == 34 * d);
        // All are multiples of 2·D.
        assert!((2 * d).is_multiple_of(16));
        i += 1;
    }
};
