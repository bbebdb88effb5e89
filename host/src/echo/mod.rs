//! Keys and values in fewer bits, by rounding alone: the system that `docs/adding-a-system.md` adds, and one
//! to start from.

mod cache;
mod cases;

pub use cache::EchoCache;

use crate::Stream;
use crate::kv::{Kind, OptionSpec, Scheme, Selection, System, proof, workload};
use kernels_gpu::echo::{MOST_DROPPED, THREADS, round};
use simt::LaunchShape;

/// The system.
pub static SYSTEM: System = System {
    name: "echo",
    about: "f16 with fewer bits of mantissa: the guide's example of a system",
    kernels: || kernels_gpu::echo::kernels().collect(),
    cases: cases::cases,
    schemes: &[Scheme {
        name: "echo",
        about: "keys and values rounded to 12 bits: the guide's example",
        presets: &[],
        options: &[OptionSpec {
            name: "bits",
            about: "bits of a number, sign and 5 of exponent among them",
            kind: Kind::Count(16 - MOST_DROPPED as u64, 16),
        }],
        // Rounded numbers are still stored as f16.
        step_bytes: |_, head_dim, tokens| f64::from(4 * head_dim) * tokens as f64,
        check: |_| Ok(()),
        open: |opening| Ok(Box::new(EchoCache::new(opening, dropped(opening.selection))?)),
        workload: workload::through_cache,
        proof: proof::by_workload,
        calibrate: None,
    }],
};

/// Bits of the mantissa that a selection drops.
fn dropped(selection: &Selection) -> u32 {
    16 - selection.count("bits", 12) as u32
}

/// Rounds `args.count` keys and values.
///
/// # Safety
/// As [`Stream::launch`]: the handles reach so many elements until the launch has finished, and nothing else
/// touches what it writes.
///
/// # Errors
/// What the launch reports.
unsafe fn run(stream: &Stream, args: round::Args) -> crate::Result<()> {
    let shape = LaunchShape::new(args.count.div_ceil(THREADS), THREADS);
    // SAFETY: the caller's word; a thread an element.
    unsafe { stream.launch(&round::kernel(), shape, args) }
}
