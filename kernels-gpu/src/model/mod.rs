//! A transformer's forward pass but for attention: products with quantized weights, norms, rotations, the
//! choice of a token.
//!
//! # Exact inside a block
//! Activations are turned to fixed point, 32 channels at a time ([`fixed`]); then a dot product with the
//! integer codes of a block of weights is an integer, the same in any order: `dp4a` for one token, tensor
//! cores for more, SIMD on the CPU. What is left to fix is the order in which blocks are added ([`product`]),
//! and that is the same for all: prefill in any chunks gives the bits of token by token, and the CPU those of
//! the GPU.
//!
//! # The kernels
//! | kernel | what it does | launches of it a layer and step |
//! |---|---|---|
//! | [`fn@embed`] | rows of the embedding | once a step |
//! | [`fn@quantize_activations`] | fixed point, with RMSNorm or SwiGLU in front | 0, or 4 for long rows |
//! | [`fn@linear`], [`fn@linear_fused`] | product for a few tokens | 4: QKV, output, gate and up, down |
//! | [`fn@linear_batch`] | product for the tokens of a batch | 4, in the place of `linear` |
//! | [`fn@linear_prefill`] | product for many tokens | |
//! | [`fn@panel_activations`], [`fn@linear_prompt`] | the same on GPUs of compute capability 9.0 | |
//! | [`fn@rope`], [`fn@rope_append`] | rotation, types and places that caches want | 1 |
//! | [`fn@choose_largest`], [`fn@choose_sampled`] | the next token, for the next step | once a step |

pub mod activations;
pub mod batch;
mod choice;
mod embedding;
pub mod fixed;
mod floats;
pub mod format;
pub mod prefill;
pub mod product;
pub mod prompt;
pub mod random;
mod sample;

pub use crate::attention::rotation::{rope, rope_append};
pub use activations::quantize_activations;
pub use batch::linear_batch;
pub use choice::{CHOICE_THREADS, choose_largest, order_key};
pub use embedding::embed;
pub use prefill::linear_prefill;
pub use product::{linear, linear_fused};
pub use prompt::{linear_prompt, panel_activations};
pub use sample::{SampleShape, choose_sampled, nucleus_mass, sample_layout, sample_weight};

/// Every kernel instance of the system.
#[cfg(not(target_arch = "nvptx64"))]
pub fn kernels() -> impl Iterator<Item = &'static simt::KernelInfo> {
    [
        quantize_activations::INSTANCES,
        linear::INSTANCES,
        linear_fused::INSTANCES,
        linear_batch::INSTANCES,
        linear_prefill::INSTANCES,
        panel_activations::INSTANCES,
        linear_prompt::INSTANCES,
        embed::INSTANCES,
        rope::INSTANCES,
        rope_append::INSTANCES,
        choose_largest::INSTANCES,
        choose_sampled::INSTANCES,
    ]
    .into_iter()
    .flatten()
}
