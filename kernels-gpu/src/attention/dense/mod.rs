//! Exact attention over paged f16 and bf16 caches, and how tokens get there: what the system `dense` is, and
//! what others fall back to.

mod decode;
mod layout;
mod pairs;
mod tokens;

pub(crate) use decode::{Layout, Target, lay_out};
pub use decode::{attend, attend_lean, layout, lean_layout};
pub use layout::{DenseShape, few_split_count, partial_floats, split_count};
pub use pairs::attend_pairs;
pub use tokens::{APPEND_THREADS, AppendShape, append};

/// Stages of a warp's ring of tiles: some 64 KB are on the way to each multiprocessor then. With more, under
/// full load, multiprocessors' shares of the bandwidth differ the more, and those that come last cannot catch
/// up.
pub const fn stages(head_dim: u32) -> u32 {
    if head_dim <= 64 { 3 } else { 2 }
}
