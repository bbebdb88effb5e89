//! Keys and values as uniform codes of 2 or 4 bits, keys by channel and values by token, after Liu et al.,
//! *KIVI*: the baseline that needs no calibration.
//!
//! The mathematics is in [`kernels_gpu::kivi`], the layout in [`kernels_gpu::kivi::Layout`]; `docs/kivi.md`
//! has both with figures. A [`Store`] keeps what a layer holds, a step attends to it with a [`Plan`], in one
//! launch. A prompt's attention is exact over what earlier chunks are stored as.

mod cache;
mod cases;
mod cpu;
mod error;
pub mod oracle;
mod plan;
mod prompt;
mod sample;
mod setting;
mod store;
#[cfg(test)]
mod tests;

pub use cache::KiviCache;
pub use error::{Error, Result};
pub use kernels_gpu::kivi::{Layout, Side};
pub use plan::{Handles, Plan};
pub use setting::{HEAD_DIMS, Setting};
pub use store::{Encode, Store};

use crate::kv::{Kind, OptionSpec, Scheme, System, proof, workload};

const BITS: Kind = Kind::Word(&["2", "4"]);

/// The system.
pub static SYSTEM: System = System {
    name: "kivi",
    about: "keys by channel and values by token as uniform codes of 2 or 4 bits",
    kernels: || kernels_gpu::kivi::kernels().collect(),
    cases: cases::cases,
    schemes: &[Scheme {
        name: "kivi",
        about: "KIVI: keys by channel, values by token, a scale and a zero in f16 for each group",
        presets: &[],
        options: &[
            OptionSpec { name: "k", about: "bits of a channel of a key; 2", kind: BITS },
            OptionSpec { name: "v", about: "bits of a channel of a value; as the keys", kind: BITS },
            OptionSpec {
                name: "group",
                about: "tokens of a key's channel, and channels of a token's value, that share a scale; 32",
                kind: Kind::Word(&["32", "64", "128"]),
            },
            OptionSpec {
                name: "residual",
                about: "tokens at the end that stay in f16, a multiple of the group; 128",
                kind: Kind::Count(0, 1 << 16),
            },
        ],
        step_bytes: |selection, head_dim, tokens| Setting::of(selection).step_bytes(head_dim, tokens),
        check: |selection| Ok(Setting::of(selection).checked().map(drop)?),
        open: |opening| Ok(Box::new(KiviCache::new(opening, Setting::of(opening.selection))?)),
        workload: workload::through_cache,
        proof: proof::by_workload,
        calibrate: None,
    }],
};
