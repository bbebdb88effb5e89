//! Shapes, and the split of the work, which depends on nothing but them.

use crate::attention::{BLOCK_TOKENS, MAX_PARTS, ROWS, part_floats, warps};
use simt::{Pod, Zeroable, bits};

/// The shape of a launch. All sequences share pools and have a row of the block table each.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct DenseShape {
    /// Query heads of a KV head.
    pub group: u32,
    /// Query tokens of a sequence; its last keys are those of these tokens.
    pub query_tokens: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Entries of a row of the block table.
    pub max_blocks: u32,
    /// Parts that a sequence is cut into: [`split_count`], or as many as who plans for lists wants.
    pub splits: u32,
    /// The same for rows of blocks whose word of wanted rows has no [`MANY`](Self::MANY): there are few of
    /// them, and each should have many multiprocessors.
    pub few_splits: u32,
    /// Scores in log2 units: log2(e) times the softmax scale.
    pub scale_log2: f32,
    /// Blocks of the pool; 0 where its tiles shall not be asked for ahead.
    pub pool_blocks: u32,
    /// 1: few rows are wanted, if any, so that what comes behind is let in at once.
    pub rung: u32,
}

impl DenseShape {
    /// Beside a row of blocks' wanted rows, bits 0 to 7: it is one of many.
    pub const MANY: u32 = 1 << 8;

    /// Parts that a row of blocks with these wanted rows is cut into.
    #[inline(always)]
    pub const fn splits_of(self, wanted: u32) -> u32 {
        if wanted & Self::MANY != 0 { self.splits } else { self.few_splits }
    }

    /// Parts that there is room for.
    #[inline(always)]
    pub const fn most_splits(self) -> u32 {
        if self.splits < self.few_splits { self.few_splits } else { self.splits }
    }

    /// Query rows of a KV head.
    #[inline(always)]
    pub const fn rows(self) -> u32 {
        self.group * self.query_tokens
    }

    /// Groups of eight query rows of a KV head.
    #[inline(always)]
    pub const fn row_groups(self) -> u32 {
        self.rows().div_ceil(ROWS)
    }

    /// Where a row of a KV head is among all [sequences, query_tokens, kv_heads · group].
    #[inline(always)]
    pub fn query_row(self, sequence: u32, head: u32, row: u32) -> u32 {
        let (token, in_group) = (bits::div_u32(row, self.group), bits::rem_u32(row, self.group));
        let heads = self.kv_heads * self.group;
        (sequence * self.query_tokens + token) * heads + head * self.group + in_group
    }

    /// Keys that a row of a KV head sees, of a sequence of `length`.
    #[inline(always)]
    pub fn visible(self, length: u32, row: u32) -> u32 {
        (length + bits::div_u32(row, self.group) + 1).saturating_sub(self.query_tokens)
    }

    /// Tiles that some row of a group sees.
    #[inline(always)]
    pub fn visible_tiles(self, length: u32, row_group: u32) -> u32 {
        if self.query_tokens == 1 {
            return length.div_ceil(BLOCK_TOKENS);
        }
        let last = (row_group * ROWS + ROWS - 1).min(self.rows() - 1);
        self.visible(length, last).div_ceil(BLOCK_TOKENS)
    }
}

/// Thread blocks that fill the machine once: one on each of the 132 multiprocessors of a GH100. A constant,
/// not the device's own number: the order of additions, and with it the bits, must not depend on the device.
const BLOCKS_WANTED: u32 = 132;
const _: () = assert!(BLOCKS_WANTED < MAX_PARTS, "parts that are merged at once");

/// Parts that each sequence is cut into, for `launches` rows of blocks (sequences × KV heads × row groups)
/// and tables of `max_blocks` blocks.
pub const fn split_count(launches: u32, max_blocks: u32) -> u32 {
    let wanted = BLOCKS_WANTED / if launches == 0 { 1 } else { launches };
    // A part should have work for every warp, twice.
    let most = max_blocks.div_ceil(2 * warps(64));
    let splits = if wanted < most { wanted } else { most };
    if splits == 0 { 1 } else { splits }
}

/// Rows of blocks of a rung, one of which is wanted if any is.
const ROWS_A_FEW: u32 = 4;

/// Parts that a sequence is cut into where few of `launches` rows of blocks are wanted, most often none: more
/// would take longer to find that out.
pub const fn few_split_count(launches: u32, max_blocks: u32) -> u32 {
    split_count(launches.div_ceil(ROWS_A_FEW), max_blocks)
}

/// Floats of the partial results of `launches` rows of `splits` blocks.
pub const fn partial_floats(launches: u32, splits: u32, head_dim: u32) -> usize {
    launches as usize * splits as usize * part_floats(head_dim)
}
