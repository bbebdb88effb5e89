//! Vector-quantized keys and values, attended to straight from their codes, after Yao et al., *VecInfer:
//! Efficient LLM Inference with Low-Bit KV Cache via Outlier-Suppressed Vector Quantization*.
//!
//! | kernel | what it does |
//! |---|---|
//! | [`encode`](fn@encode) | transforms keys as they are appended, and finds the nearest centroids |
//! | [`rope_encode`](fn@rope_encode) | a step's token, turned and encoded: of codes of 8 bits |
//! | [`attend`](fn@attend) | a step's attention, from the codes and the most recent tokens, in one launch |
//! | [`restore`](fn@restore) | tokens of a sequence as they are stored, in f16: for a prompt's attention |
//! | [`turn`](fn@turn) | a prompt's queries in the space of the keys |
//!
//! # Mathematics
//! Keys have channels that are much larger than others, and codebooks that many sub-vectors share cannot
//! follow them. So a key k is stored as k~ and a query q read as q~ (equations 3 to 7), with μ a mean by
//! channel, λ_i = sqrt(max |k_i − μ_i|) and H the orthonormal Hadamard matrix:
//!
//! ```text
//! k~ = H·diag(λ)^−1·(k − μ)        q~ = H·diag(λ)·q        q~·k~ = q·k − q·μ
//! ```
//!
//! The last term is the same for every key of a query, so that softmax does not see it. Values stay as they
//! are. A vector of D channels is cut into sub-vectors of d, and each is stored as the number of the nearest
//! of 2^b centroids (equation 2): b/d bits a channel. [`Code`] says which d and b there are, and how codes
//! lie in memory.

mod book;
mod code;
mod decode;
mod layout;
mod nearest;
mod prompt;
mod queries;
mod running;
mod step;
mod transform;
mod write;

pub use crate::attention::split_count;
pub use code::{CODES, Code, Kind};
pub use decode::{attend, attend_wide, partial_floats, rows_of};
pub use layout::layout;
pub use nearest::Nearest;
pub use prompt::{RESTORE_THREADS, restore, turn};
pub use queries::whole_scale;
pub use step::{rope_encode, step_blocks};
pub use transform::{ROWS_OF_TRANSFORM, Shape, hadamard_block, norm};
pub use write::{ENCODE_THREADS, EncodeShape, encode, encode_bytes};

/// Every kernel instance of the system.
#[cfg(not(target_arch = "nvptx64"))]
pub fn kernels() -> impl Iterator<Item = &'static simt::KernelInfo> {
    let steps = attend::INSTANCES.iter().chain(attend_wide::INSTANCES);
    let encode = encode::INSTANCES.iter().chain(rope_encode::INSTANCES);
    encode.chain(steps).chain(restore::INSTANCES).chain(turn::INSTANCES)
}
