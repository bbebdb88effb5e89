//! Attention to a constant number of keys, after Alsufi and Scott, *Attention Pays Its Bill* (2026): block 0,
//! the last blocks, and of those between them the k whose bounds promise the largest scores.
//!
//! Keys and values stay as they are, in a paged cache; beside it [`Bounds`] keep the largest and the smallest
//! key of each gather-block, channel by channel. A step ranks blocks by them ([`Plan::select_on`]), which
//! writes a block table, and attends over that with the kernel of [`crate::attention::dense`]
//! ([`Plan::attend_on`]). What is left out is counted; nothing is known of its weight.

mod audit;
mod bounds;
mod cache;
mod cases;
mod cpu;
mod elements;
mod error;
pub mod oracle;
mod plan;
mod ranking;
mod ranks;
pub mod sketch;
pub mod staging;
#[cfg(test)]
mod tests;
mod tiles;
mod workload;

pub use audit::{AuditHandles, Auditor};
pub use bounds::{Bounds, FoldHandles};
pub use cache::GatherCache;
pub use elements::GatherElement;
pub use error::{Error, Result};
pub use kernels_gpu::gather::Extent;
pub use plan::{Chosen, Handles, Plan};
pub use ranking::{List, Ranking, Score};
pub use ranks::Ranks;
pub use staging::StagedCache;
pub use tiles::{ByBounds, BySketches, CodedCache, OverCodes, SketchedCodes};
pub use tiles::{TiledCache, TiledElement, TiledPlan};

use crate::kv::{HeadReport, Held, Kind, OptionSpec, Preset, Scheme, Selection, System, proof};
use error::length;
use kernels_gpu::gather::{MOST_SLOTS, Rule, TILE_BLOCKS, summary_words};

/// Tokens that a gather-block may have.
pub const BLOCKS: [u32; 4] = [16, 32, 64, 128];
/// Channels of a head that there are kernels for: with 96 and 256 for up to eight query heads a list.
pub const HEAD_DIMS: [u32; 4] = [64, 96, 128, 256];
/// Those that bounds in 8 bits and thread blocks that rank for themselves have kernels for.
const UP_TO_128: [u32; 3] = [64, 96, 128];
/// Those that sketches, staging pools and audits have kernels for.
const FEW_HEAD_DIMS: [u32; 2] = [64, 128];
/// The most tokens of a sequence.
const MOST_TOKENS: u32 = 1 << 31;
/// The most blocks of a sequence whose masses fit 32 bits together: the kernel's unit is 2^−8 of a bin's
/// upper edge at the most.
const MOST_COUNTED: u32 = 1 << 23;

/// The system.
pub static SYSTEM: System = System {
    name: "gather",
    about: "attention to a constant number of keys: the first, the last and the most promising blocks",
    kernels: || kernels_gpu::gather::kernels().collect(),
    cases: |coverage| {
        let mut cases = cases::cases(coverage);
        cases.extend(audit::cases(coverage));
        cases.extend(sketch::cases(coverage));
        cases.extend(staging::cases(coverage));
        cases
    },
    schemes: &[Scheme {
        name: "gather",
        about: "keys and values in f16, of which steps read the first, the last and the k best blocks",
        presets: &[
            Preset { name: "assured", about: "32 distant blocks of 128 tokens: the paper's gate is met" },
            Preset { name: "production", about: "8 distant blocks: quicker, and off the paper's gate" },
            Preset {
                name: "quest",
                about: "as Quest: the 256 best pages of 16 tokens, two layers at the front attend to everything",
            },
            Preset {
                name: WINDOW,
                about: "the first block and the last 36 of 128 tokens: as many as :assured",
            },
            Preset {
                name: CERTIFIED,
                about: "blocks of 32 by a sketch of every key; what is skipped has a bound, 2 % at the most",
            },
        ],
        options: &[
            OptionSpec {
                name: "k",
                about: "distant blocks that a step reads",
                kind: Kind::Count(1, u32::MAX as u64),
            },
            OptionSpec {
                name: "block",
                about: "tokens of a block that is kept or left out",
                kind: Kind::Word(&["16", "32", "64", "128"]),
            },
            OptionSpec {
                name: "local",
                about: "blocks at the end that a step always reads, the last one maybe not full",
                kind: Kind::Count(1, u32::MAX as u64),
            },
            OptionSpec {
                name: "bounds",
                about: "bits of a bound, 16 as keys have, or 8, rounded outward; if left out, 8 where there are \
                        kernels; not with score=mean, :certified, :window",
                kind: Kind::Word(&["8", "16"]),
            },
            OptionSpec {
                name: "score",
                about: "what a block is ranked by: its bounds, or its mean key; not with :certified, :window, \
                        staging",
                kind: Kind::Word(&["bounds", "mean"]),
            },
            OptionSpec {
                name: "list",
                about: "who has a list of blocks, a KV head or each query head; not with :certified, :window, \
                        staging",
                kind: Kind::Word(&["kv", "query"]),
            },
            OptionSpec {
                name: "ranks",
                about: "who ranks the blocks of a list, each thread block that attends to it or one, with the \
                        same bits; if left out, what is quicker; not with :certified, staging",
                kind: Kind::Word(&["each", "one"]),
            },
            OptionSpec {
                name: "dense",
                about: "layers at the front that attend to everything; not with :certified, nor with staging",
                kind: Kind::Count(0, 1 << 16),
            },
            OptionSpec {
                name: "skip",
                about: "of :certified, the share of a head's attention mass that may be left out",
                kind: Kind::Number(1e-6, 1.0),
            },
            OptionSpec {
                name: "sketch",
                about: "of :certified, bits of a sketched key",
                kind: Kind::Word(&["4", "8"]),
            },
            OptionSpec {
                name: "audit",
                about: "share of the heads of steps that are attended to a second time, over everything, to \
                        report what was skipped; not with :certified, which bounds it for all",
                kind: Kind::Number(1e-9, 1.0),
            },
            OptionSpec {
                name: tiles::OPTION,
                about: "what steps read of a block, its originals or codes of 8-bit keys and 4-bit values, as int8-int4 \
                        has them; not with staging, score, list, ranks, dense, audit",
                kind: Kind::Word(&["f16", tiles::CODES]),
            },
            OptionSpec {
                name: "staging",
                about: "keys and values in the host's memory, and on the GPU so many blocks of each layer, \
                        sequence and KV head besides the local ones; not with :certified",
                kind: Kind::Count(1, MOST_SLOTS as u64),
            },
        ],
        step_bytes: |selection, head_dim, tokens| match Asked::of(selection) {
            Asked::Certified(budget) => sketch::step_bytes(budget, head_dim, tokens),
            Asked::Codes(_) => tiles::step_bytes(selection, head_dim, tokens),
            Asked::OnDevice(support) | Asked::InHost(support, _) => {
                step_bytes(support, Ranking::of(selection, head_dim, true).score, head_dim, tokens)
            }
        },
        check: |selection| {
            let given = |names: &[&str]| names.iter().any(|name| selection.value(name).is_some());
            let dense = Support::exact_layers(selection) > 0;
            Ranking::check(selection)?;
            Ranks::check(selection)?;
            tiles::check(selection)?;
            Err(match Asked::of(selection) {
                Asked::OnDevice(_) | Asked::InHost(..) if given(&["skip", "sketch"]) => Error::Preset,
                Asked::Codes(_) if given(&["skip", "sketch"]) => Error::Preset,
                Asked::Certified(_) if given(&["staging"]) => Error::NotStaged,
                Asked::Certified(_) if given(&["audit"]) => Error::NotAudited,
                Asked::Certified(_) | Asked::InHost(..) if dense => Error::DenseLayers,
                _ if selection.preset() == Some(WINDOW) && given(&["k"]) => Error::Window,
                _ => return Ok(()),
            }
            .into())
        },
        open: |opening| {
            Ok(match Asked::of(opening.selection) {
                Asked::OnDevice(support) => Box::new(GatherCache::new(opening, support)?),
                Asked::Codes(support) => Box::new(TiledCache::new(opening, support)?),
                Asked::InHost(support, slots) => Box::new(StagedCache::new(opening, support, slots)?),
                Asked::Certified(budget) if budget.codes => Box::new(SketchedCodes::new(opening, budget)?),
                Asked::Certified(budget) => Box::new(sketch::SketchedCache::new(opening, budget)?),
            })
        },
        workload: |opening| match Asked::of(opening.selection) {
            Asked::OnDevice(_) => workload::open(opening),
            Asked::Codes(_) => tiles::open(opening),
            Asked::InHost(_, slots) => staging::open(opening, slots),
            Asked::Certified(budget) => sketch::open(opening, budget),
        },
        proof: proof::by_workload,
        calibrate: None,
    }],
};

/// The preset that chooses nothing.
const WINDOW: &str = "window";
/// The preset that has a bound on what it leaves out.
const CERTIFIED: &str = "certified";

fn is_certified(selection: &Selection) -> bool {
    selection.preset() == Some(CERTIFIED)
}

/// What a selection asks for.
enum Asked {
    /// Keys and values on the device.
    OnDevice(Support),
    /// As codes on the device, their originals in the host's memory.
    Codes(Support),
    /// In the host's memory, and so many blocks on the device.
    InHost(Support, u32),
    /// With sketches, by which what is left out is bounded: on the device, or as codes there and originals
    /// in the host's memory.
    Certified(sketch::Budget),
}

impl Asked {
    fn of(selection: &Selection) -> Self {
        match selection.value("staging") {
            _ if is_certified(selection) => Asked::Certified(sketch::Budget::of(selection)),
            _ if tiles::asked(selection) => Asked::Codes(Support::of(selection)),
            Some(_) => Asked::InHost(Support::of(selection), selection.count("staging", 0) as u32),
            None => Asked::OnDevice(Support::of(selection)),
        }
    }
}

/// Bytes that a step reads of a KV head with one list: keys and values of what is kept, and bounds, which are
/// two keys, or the mean of each block that is ranked.
fn step_bytes(support: Support, score: Score, head_dim: u32, tokens: u64) -> f64 {
    let length = tokens.min(MOST_TOKENS.into()) as u32;
    let ranked = support.extent(length).ranked_blocks();
    let summaries = f64::from(4 * summary_words(score.summary(), head_dim) / TILE_BLOCKS) * f64::from(ranked);
    f64::from(4 * head_dim) * f64::from(support.kept(length)) + summaries
}

/// How much of a sequence a step keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Support {
    /// Distant blocks: those with the highest scores between the first block and the last ones; all, where
    /// there are no more. With 0 nothing is chosen: a window.
    pub k: u32,
    /// Tokens of a block: one of [`BLOCKS`].
    pub block: u32,
    /// Blocks at the end that are always kept; the last one counts, full or not.
    pub local: u32,
}

impl Support {
    /// The default: 32 distant blocks of 128 tokens.
    pub const ASSURED: Support = Support { k: 32, block: 128, local: 4 };
    /// The paper's production setting: eight of them.
    pub const PRODUCTION: Support = Support { k: 8, ..Support::ASSURED };

    /// Pages of 16 tokens, as many tokens as [`ASSURED`](Support::ASSURED) keeps.
    pub const QUEST: Support = Support { k: 256, block: 16, local: 32 };
    /// As many blocks as that keeps, without any choice.
    pub const WINDOW: Support = Support { k: 0, local: 36, ..Support::ASSURED };

    /// Layers at the front that a selection has attend to everything.
    fn exact_layers(selection: &Selection) -> usize {
        selection.count("dense", if selection.preset() == Some("quest") { 2 } else { 0 }) as usize
    }

    /// What a selection says.
    fn of(selection: &Selection) -> Self {
        let preset = match selection.preset() {
            Some("production") => Support::PRODUCTION,
            Some("quest") => Support::QUEST,
            Some(WINDOW) => Support::WINDOW,
            _ => Support::ASSURED,
        };
        Support::of_options(selection, preset)
    }

    /// A preset's with what a selection's options say.
    fn of_options(selection: &Selection, preset: Support) -> Self {
        let word = selection.word("block", "");
        let narrow = |name: &str, otherwise: u32| selection.count(name, otherwise.into()) as u32;
        Support {
            k: narrow("k", preset.k),
            block: BLOCKS.into_iter().find(|block| block.to_string() == word).unwrap_or(preset.block),
            local: narrow("local", preset.local),
        }
    }

    /// Itself, if it can be launched.
    ///
    /// # Errors
    /// [`Error::Empty`], [`Error::Block`].
    pub fn checked(self) -> Result<Self> {
        if self.local == 0 {
            return Err(Error::Empty { what: "local" });
        }
        if !BLOCKS.contains(&self.block) {
            return Err(Error::Block { block: self.block });
        }
        Ok(self)
    }

    /// What it keeps of a sequence of `length` tokens, at most 2^31.
    pub fn extent(self, length: u32) -> Extent {
        Extent::of(length, self.rule())
    }

    /// Tokens that it keeps of them.
    pub fn kept(self, length: u32) -> u32 {
        self.extent(length).kept(self.rule())
    }

    /// What is known of a step in a layer: how many tokens are kept follows from the lengths, which ones from
    /// the step.
    fn reports(self, held: Held<'_>) -> Vec<HeadReport> {
        let of_sequence = |tokens: usize| {
            let skipped = tokens as u32 - self.kept(tokens as u32);
            std::iter::repeat_n(HeadReport { skipped, ..HeadReport::STORED }, held.geometry.q_heads)
        };
        held.lengths().flat_map(of_sequence).collect()
    }

    /// The most blocks that it keeps of sequences of up to `max_tokens`.
    pub fn most(self, max_tokens: u32) -> u32 {
        let blocks = max_tokens.div_ceil(self.block);
        1u32.saturating_add(self.local).saturating_add(self.k).min(blocks)
    }

    /// What the kernels are told.
    fn rule(self) -> Rule {
        Rule { block: self.block, local: self.local, k: self.k }
    }
}
