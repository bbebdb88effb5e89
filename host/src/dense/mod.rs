//! Keys and values as they are, and exact attention over them: the baseline.
//!
//! The attention itself is [`crate::attention::dense`], which other systems fall back to.

mod cache;
pub mod cases;
mod workload;

pub use crate::attention::dense::*;
pub use cache::DenseCache;

use crate::kv::{Scheme, System, proof};

/// The system.
pub static SYSTEM: System = System {
    name: "dense",
    about: "exact attention over paged f16 and bf16 caches: the baseline and the fallback",
    kernels: || kernels_gpu::dense::kernels().collect(),
    cases: cases::cases,
    schemes: &[Scheme {
        name: "dense",
        about: "keys and values in f16, exact attention",
        presets: &[],
        options: &[],
        step_bytes: |_, head_dim, tokens| f64::from(4 * head_dim) * tokens as f64,
        check: |_| Ok(()),
        open: |opening| Ok(Box::new(DenseCache::new(opening.device, opening.geometry, opening.capacity)?)),
        workload: workload::open,
        proof: proof::by_workload,
        calibrate: None,
    }],
};
