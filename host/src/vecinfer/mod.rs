//! Vector-quantized keys and values, attended to straight from their codes, after Yao et al., *VecInfer*.
//!
//! Keys pass through a transformation that takes their outliers away, and keys and values are stored as the
//! numbers of the nearest centroids: 1 to 4 bits a channel ([`Setting`]). Codebooks and transformation are
//! made once for a model ([`calibrate`]) and read from a file ([`Books`]). A [`Store`] keeps what a layer
//! holds; a step attends to it with a [`Plan`], in one launch. A prompt's attention is exact over what
//! earlier chunks are stored as.

mod books;
mod cache;
pub mod calibrate;
mod cases;
mod cpu;
mod error;
mod kmeans;
pub mod oracle;
mod plan;
mod prompt;
mod restored;
mod setting;
mod store;
#[cfg(test)]
mod tests;
mod turning;
mod whole;
mod workload;

pub use books::{Books, LayerBooks, Tables};
pub use cache::VecInferCache;
pub use calibrate::Transform;
pub use error::{Error, Result};
pub use kernels_gpu::vecinfer::{CODES, Code};
pub use plan::{Handles, Plan};
pub use setting::{HEAD_DIMS, Setting};
pub use store::{Encode, Source, Store};
pub use turning::Turning;

use crate::kv::{Kind, OptionSpec, Scheme, System, proof};
use setting::{CODE_OPTIONS, RESTORED, STEP};

/// The system.
pub static SYSTEM: System = System {
    name: "vecinfer",
    about: "vector-quantized keys and values, attended to from their codes",
    kernels: || kernels_gpu::vecinfer::kernels().collect(),
    cases: cases::cases,
    schemes: &[Scheme {
        name: "vecinfer",
        about: "keys and values as codes of 1 to 4 bits a channel, by codebooks made for the model",
        presets: &[],
        options: &[
            CODE_OPTIONS[0],
            CODE_OPTIONS[1],
            OptionSpec {
                name: "recent",
                about: "tokens at the end that stay in f16, rounded up to 16; 128",
                kind: Kind::Count(0, 1 << 16),
            },
            OptionSpec {
                name: "sink",
                about: "tokens at the front that stay in f16; 16",
                kind: Kind::Word(&["0", "16"]),
            },
            OptionSpec {
                name: STEP,
                about: "of `bench attention` and `attend`: what a step attends to, its codes or, to compare with, all \
                        tokens restored to f16 in each step; codes",
                kind: Kind::Word(&["codes", RESTORED]),
            },
            OptionSpec {
                name: "codes",
                about: "the codebooks that `ferrokv calibrate` has made",
                kind: Kind::File,
            },
        ],
        step_bytes: |selection, head_dim, tokens| Setting::of(selection).step_bytes(head_dim, tokens),
        check: |selection| Ok(Setting::of(selection).checked().map(drop)?),
        open: |opening| Ok(Box::new(VecInferCache::open(opening)?)),
        workload: workload::open,
        proof: proof::by_workload,
        calibrate: Some(calibrate::CALIBRATOR),
    }],
};
