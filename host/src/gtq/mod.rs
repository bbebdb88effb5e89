//! Keys and values as codes of a few bits of their rotated rows: TurboQuant-MSE, packed as the bits say, with
//! decode attention over the codes in one launch a layer.
//!
//! The mathematics is in [`kernels_gpu::gtq`], the layout in [`kernels_gpu::gtq::layout`]; `docs/gtq.md` has
//! both with figures.

pub mod allocation;
mod cache;
mod cases;
pub mod codebook;
mod cpu;
mod encode;
mod encoder;
pub mod groups;
pub mod near;
pub mod oracle;
mod order;
mod plan;
pub mod rows;
mod sample;
pub mod stability;
#[cfg(test)]
mod tests;
mod workload;

pub use cache::GtqCache;
pub use encoder::{AppendHandles, Encoder, Places, RawHandles};
pub use kernels_gpu::attention::Window;
pub use kernels_gpu::gtq::{Rule, TileLayout};
pub use order::Order;
pub use plan::{Books, Handles, Plan};

use crate::kv::{self, Kind, OptionSpec, Scheme, Selection, System, proof};

/// Channels of a head that there are kernels for.
pub const HEAD_DIMS: [u32; 2] = [64, 128];
/// Bits of a code that there are kernels for.
pub const BITS: [u32; 3] = [2, 3, 4];

const VALUE_BITS: OptionSpec =
    OptionSpec { name: "v", about: "bits of a channel of a value", kind: Kind::Count(2, 4) };
const NORM: OptionSpec = OptionSpec {
    name: "norm",
    about: "what a row's scale keeps: the least error, its length, or its product with itself",
    kind: Kind::Word(&["none", "norm", "unbiased"]),
};

const RECENT: OptionSpec = OptionSpec {
    name: "recent",
    about: "tokens at the end that are read in 16 bits, rounded up to 16; 128",
    kind: Kind::Count(0, 1 << 16),
};
const SINK: OptionSpec = OptionSpec {
    name: "sink",
    about: "tokens at the front that are read in 16 bits; 16",
    kind: Kind::Word(&["0", "16"]),
};

/// The name of the scheme whose keys are in parts.
const BLOCKS: &str = "gtq-blocks";

/// The system.
pub static SYSTEM: System = System {
    name: "gtq",
    about: "keys and values as codes of 2, 3 or 4 bits of their rotated rows",
    kernels: || kernels_gpu::gtq::kernels().collect(),
    cases: cases::cases,
    schemes: &[
        Scheme {
            name: "gtq",
            about: "keys and values in 2, 3 or 4 bits a channel, rotated and quantized to the sphere's levels",
            presets: &[],
            options: &[
                OptionSpec { name: "k", about: "bits of a channel of a key", kind: Kind::Count(2, 4) },
                VALUE_BITS,
                NORM,
                RECENT,
                SINK,
            ],
            step_bytes,
            check: |_| Ok(()),
            open: |opening| Ok(Box::new(GtqCache::new(opening, Settings::of(opening.selection))?)),
            workload: kv::workload::through_cache,
            proof: proof::by_workload,
            calibrate: None,
        },
        Scheme {
            name: BLOCKS,
            about: "the same with keys in four parts: more bits where rotary blocks matter more to the model",
            presets: &[],
            options: &[
                OptionSpec {
                    name: "k",
                    about: "bits of a channel of a key, on average",
                    kind: Kind::Count(2, 4),
                },
                VALUE_BITS,
                NORM,
                RECENT,
                SINK,
                OptionSpec {
                    name: order::OPTION,
                    about: "the order of channels that `ferrokv calibrate` has made",
                    kind: Kind::File,
                },
            ],
            step_bytes,
            check: |_| Ok(()),
            open: |opening| {
                let order = Order::open(opening)?;
                Ok(Box::new(GtqCache::in_order(opening, Settings::of(opening.selection), &order)?))
            },
            workload: workload::open,
            proof: proof::by_workload,
            calibrate: Some(order::CALIBRATOR),
        },
    ],
};

fn step_bytes(selection: &Selection, head_dim: u32, tokens: u64) -> f64 {
    Settings::of(selection).step_bytes(head_dim, tokens) as f64
}

/// How keys and values are quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Bits of a channel of a key: one of [`BITS`].
    pub key_bits: u32,
    /// Bits of a channel of a value.
    pub value_bits: u32,
    /// How a row's scale is chosen.
    pub rule: Rule,
    /// Whether keys are in four parts, with bits of which `key_bits` are the mean.
    pub blocks: bool,
    /// Tokens at the end that are read in 16 bits at least; rounded up to whole tiles.
    pub recent: u32,
    /// Tokens at the front that are; rounded up to whole tiles, of which there is a warp each.
    pub sink: u32,
}

impl Settings {
    /// 3 and 3 bits, the smallest error, 16 tokens at the front and 128 recent ones in 16 bits.
    pub const DEFAULT: Settings =
        Settings { key_bits: 3, value_bits: 3, rule: Rule::None, blocks: false, recent: 128, sink: 16 };

    /// The same with all tokens read from their codes.
    #[must_use]
    pub fn without_window(self) -> Self {
        Settings { recent: 0, sink: 0, ..self }
    }

    /// What a selection says.
    fn of(selection: &Selection) -> Self {
        let default = Settings::DEFAULT;
        Settings {
            key_bits: selection.count("k", default.key_bits.into()) as u32,
            value_bits: selection.count("v", default.value_bits.into()) as u32,
            rule: match selection.word("norm", "none") {
                "norm" => Rule::Norm,
                "unbiased" => Rule::Unbiased,
                _ => Rule::None,
            },
            blocks: selection.scheme().name == BLOCKS,
            recent: selection.count("recent", default.recent.into()) as u32,
            sink: if selection.word("sink", "16") == "0" { 0 } else { default.sink },
        }
    }

    /// Tiles that are read in 16 bits, of sequences of up to so many.
    pub fn window(self, tiles: u32) -> Window {
        Window::of(self.sink, self.recent).within(tiles)
    }

    /// Bytes that a step reads of a KV head of so many tokens.
    pub fn step_bytes(self, head_dim: u32, tokens: u64) -> u64 {
        let layout = self.layout(head_dim);
        let coded = Window::of(self.sink, self.recent).coded(tokens);
        u64::from(layout.token_bytes()) * coded + u64::from(layout.slot().token_bytes()) * (tokens - coded)
    }

    /// Where codes of such settings lie.
    pub fn layout(self, head_dim: u32) -> TileLayout {
        let Settings { key_bits, value_bits, blocks, .. } = self;
        TileLayout { head_dim, key_bits, value_bits, parted: blocks }
    }
}

/// A result with this system's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// What the system reports.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A buffer, a launch or a copy failed.
    #[error(transparent)]
    Device(#[from] crate::Error),
    /// Extents that attention refuses.
    #[error(transparent)]
    Exact(#[from] crate::attention::dense::Error),
    /// Extents that rotation refuses.
    #[error(transparent)]
    Rotation(#[from] crate::attention::Error),
    /// The order's file.
    #[error(transparent)]
    File(#[from] crate::tensor_file::Error),
    /// A file for channels that turn together in another way.
    #[error(
        "{path} is for blocks of {found}, and the model's are {expected}; make it for this model by `ferrokv calibrate --scheme gtq-blocks`"
    )]
    Blocks {
        /// The file.
        path: String,
        /// The file's.
        found: String,
        /// The model's.
        expected: String,
    },
    /// A file that does not hold an order of channels.
    #[error("{path} is damaged: {what}; make it again by `ferrokv calibrate --scheme gtq-blocks`")]
    Damaged {
        /// The file.
        path: String,
        /// What is wrong.
        what: String,
    },
    /// A head_dim that no kernel has an instance for.
    #[error("gtq has no kernels for head_dim {head_dim}; those there are take 64 and 128")]
    HeadDim {
        /// What was asked for.
        head_dim: u32,
    },
    /// Bits that no kernel has an instance for.
    #[error("gtq has no kernels for {what} of {bits} bits; those there are take 2, 3 and 4")]
    Bits {
        /// Keys or values.
        what: &'static str,
        /// What was asked for.
        bits: u32,
    },
    /// An order with a channel that heads do not have.
    #[error(
        "the order of channels has channel {channel}, and heads have {head_dim}; give it that of this model"
    )]
    Channel {
        /// The channel.
        channel: u8,
        /// Channels of a head.
        head_dim: u32,
    },
    /// A buffer that does not hold what the problem needs.
    #[error("{what} has {got} elements, this problem needs {expected}; make it for the plan")]
    Length {
        /// Which buffer.
        what: &'static str,
        /// Elements it has.
        got: usize,
        /// Elements it needs.
        expected: usize,
    },
    /// A row that cannot be stored.
    #[error(
        "layer {layer}, KV head {head}: the {what} of token {position} is not finite, or its norm is too large to be stored; the cache holds zeros in its place and is not to be used further"
    )]
    Row {
        /// The layer.
        layer: usize,
        /// The KV head.
        head: u32,
        /// Key or value.
        what: &'static str,
        /// Its token's place in its sequence.
        position: u32,
    },
}

impl From<Error> for kv::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Device(error) => error.into(),
            Error::Exact(error) => error.into(),
            Error::Rotation(error) => error.into(),
            Error::File(error) => error.into(),
            error @ (Error::HeadDim { .. } | Error::Bits { .. }) => kv::Error::refused(error),
            error => kv::Error::system(error),
        }
    }
}

fn length(what: &'static str, got: usize, expected: usize) -> Result<()> {
    if got == expected { Ok(()) } else { Err(Error::Length { what, got, expected }) }
}
