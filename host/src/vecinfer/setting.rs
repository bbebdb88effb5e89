//! How a cache stores.

use super::{Error, Result};
use crate::attention::BLOCK_TOKENS;
use crate::attention::StepProblem;
use crate::kv::{Kind, OptionSpec, Selection};
use kernels_gpu::attention::Window;
use kernels_gpu::vecinfer::{Code, EncodeShape, Shape, split_count};

/// Channels of a head that there are kernels for.
pub const HEAD_DIMS: [u32; 4] = [64, 96, 128, 256];
/// The most tokens of a sequence.
const MOST_TOKENS: u32 = 1 << 30;

/// The names of codes that there are kernels for.
pub(super) const NAMES: [&str; 7] = ["d2b8", "d4b10", "d4b12", "d4b8", "d8b10", "d8b12", "d8b8"];

/// The options that name codes, of the scheme and of its calibration.
pub(super) const CODE_OPTIONS: [OptionSpec; 2] = [
    OptionSpec {
        name: "k",
        about: "keys: channels of a sub-vector and bits of a code, which take b/d bits a channel; d4b8",
        kind: Kind::Word(&NAMES),
    },
    OptionSpec { name: "v", about: "values, likewise; as the keys", kind: Kind::Word(&NAMES) },
];

/// The option of a workload that says what its step attends to.
pub(super) const STEP: &str = "step";
/// Its value for tokens that each step restores to f16.
pub(super) const RESTORED: &str = "restored";

/// What a code is called: `d4b8`.
pub(super) fn name(code: Code) -> String {
    format!("d{}b{}", code.d, code.bits)
}

/// The code of a name.
pub(super) fn code(name: &str) -> Option<Code> {
    super::CODES.into_iter().find(|code| self::name(*code) == name)
}

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Keys.
    pub keys: Code,
    /// Values.
    pub values: Code,
    /// Tokens at the end that stay in f16 at least; rounded up to whole tiles.
    pub recent: u32,
    /// Tokens at the front that stay in f16; rounded up to whole tiles, and kept by one thread block.
    pub sink: u32,
}

impl Setting {
    /// 2 bits a channel, 16 tokens at the front and 128 recent ones in f16.
    pub const DEFAULT: Setting =
        Setting { keys: Code { d: 4, bits: 8 }, values: Code { d: 4, bits: 8 }, recent: 128, sink: 16 };

    /// What a selection says.
    pub(super) fn of(selection: &Selection) -> Self {
        let keys = code(selection.word("k", "")).unwrap_or(Setting::DEFAULT.keys);
        let values = code(selection.word("v", "")).unwrap_or(keys);
        let recent = selection.count("recent", Setting::DEFAULT.recent.into()) as u32;
        let sink = if selection.word("sink", "16") == "0" { 0 } else { 16 };
        Setting { keys, values, recent, sink }
    }

    /// Tiles that are in f16 as well.
    pub fn window(self) -> Window {
        let sink = self.sink.div_ceil(BLOCK_TOKENS);
        Window { sink, slots: sink + self.recent.div_ceil(BLOCK_TOKENS) + 1 }
    }

    /// Tokens of a sequence of `length` that a step reads from their codes.
    pub fn coded(self, length: u64) -> u64 {
        let tiles = length / u64::from(BLOCK_TOKENS);
        tiles.saturating_sub(u64::from(self.window().slots - 1)) * u64::from(BLOCK_TOKENS)
    }

    /// Bytes of a token's codes of one KV head.
    pub fn token_bytes(self, head_dim: u32) -> f64 {
        f64::from(self.tile_bytes(head_dim)) / f64::from(BLOCK_TOKENS)
    }

    /// Bytes of a tile's codes of one KV head.
    pub fn tile_bytes(self, head_dim: u32) -> u32 {
        self.keys.tile_bytes(head_dim) + self.values.tile_bytes(head_dim)
    }

    /// Bytes that a step reads of a KV head of so many tokens: codes, and the first and recent tokens in f16.
    pub fn step_bytes(self, head_dim: u32, tokens: u64) -> f64 {
        let coded = self.coded(tokens);
        self.token_bytes(head_dim) * coded as f64 + f64::from(4 * head_dim) * (tokens - coded) as f64
    }

    /// Itself, if there are kernels for its codes: at head_dim 64, which has those of all others.
    ///
    /// # Errors
    /// [`Error::Codes`].
    pub fn checked(self) -> Result<Self> {
        match super::plan::kernel_info(HEAD_DIMS[0], self, 1) {
            Err(Error::Codes { keys, values, there, .. }) => {
                Err(Error::Codes { keys, values, head_dim: None, there })
            }
            other => other.map(|_| self),
        }
    }

    /// What the kernels are told of a cache for such steps, but for its tables.
    pub(super) fn shape(self, problem: StepProblem) -> Shape {
        let group = problem.q_heads / problem.kv_heads.max(1);
        let tiles = problem.max_tokens.div_ceil(BLOCK_TOKENS).max(1);
        let Window { sink, slots } = self.window();
        let launches = problem.sequences * problem.kv_heads * group.div_ceil(8);
        Shape {
            group,
            kv_heads: problem.kv_heads,
            tiles,
            // A window that holds all has no use for more.
            window: Window { sink, slots: slots.min(sink + tiles + 1) },
            splits: split_count(launches, tiles),
            scale_log2: (problem.dense().scale() * std::f64::consts::LOG2_E) as f32,
            hadamard: 0,
            key_stride: 0,
            value_stride: 0,
        }
    }

    /// The same for writing `tokens` of each sequence.
    pub(super) fn encode_shape(self, shape: Shape, head_dim: u32, tokens: u32) -> EncodeShape {
        EncodeShape {
            cache: shape,
            tokens,
            first_kind: 0,
            key_tile: self.keys.tile_bytes(head_dim),
            value_tile: self.values.tile_bytes(head_dim),
            max_blocks: 0,
            to_pool: 0,
        }
    }
}

/// The problem, if there are kernels for it and it can be numbered.
pub(super) fn checked(problem: StepProblem) -> Result<StepProblem> {
    problem.dense().checked()?;
    if !HEAD_DIMS.contains(&problem.head_dim) {
        return Err(Error::HeadDim { head_dim: problem.head_dim });
    }
    if problem.max_tokens > MOST_TOKENS {
        return Err(Error::TooLong { tokens: problem.max_tokens, most: MOST_TOKENS });
    }
    Ok(problem)
}
