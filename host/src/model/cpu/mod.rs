//! The model's operations on slices: all cores, SIMD, and the kernels' bits.
//!
//! Every function here gives what the kernel of the same purpose in [`kernels_gpu::model`] gives, in every
//! bit but those of a NaN, whose bits it canonicalises where the kernel does. There are three paths
//! ([`Level`]), chosen at run time:
//!
//! | path | a block's dot product for eight rows |
//! |---|---|
//! | [`Level::Avx512`] | `vpdpbusd` on 256 bits: 4 channels of 8 rows, activations broadcast from memory |
//! | [`Level::Avx2`] | `vpmaddubsw`; four-bit codes add up in 16 bits, as 8·2·15·127 = 30480 fits |
//! | [`Level::Portable`] | plain Rust |
//!
//! No path sums across a register: eight rows are eight lanes from codes to result, and a strand of the order
//! in [`kernels_gpu::model::product`] is a register.

mod activations;
mod choice;
mod product;
#[cfg(target_arch = "x86_64")]
mod simd;
mod small;

pub use crate::simd_level::Level;
pub use activations::{Source, quantize, quantize_at};
pub use choice::choose;
pub use product::{Onto, product, product_at};
pub use small::{embedding, rotate};
