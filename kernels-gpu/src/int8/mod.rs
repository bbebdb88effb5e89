//! Per-channel symmetric INT8 quantization of keys or values (Taneja and Shingvi, *GPU-Accelerated INT8
//! Quantization for KV Cache Compression*, 2025).
//!
//! # The mathematics
//! `K` is a row-major matrix of T tokens and D channels. Equation numbers are the paper's.
//!
//! ```text
//! s_d       = max_t |K[t,d]| / 127                        (6)
//! C[t,d]    = clamp(round(K[t,d] / s_d), -127, 127)        (7)
//! K^[t,d]   = C[t,d] · s_d                                 (8)
//! |K - K^| <= s_d / 2                                      (9)
//! ```
//!
//! [`quantizer`] settles what the paper leaves open: rounding is to nearest even everywhere, the division is
//! IEEE division, a column of zeros has scale 1/127, a scale is never subnormal, NaN counts as 0 and
//! infinities saturate; and it gives (9) with its rounding terms.
//!
//! # The layout
//! Codes are int8, row-major [T, D]; scales f32 \[D\], or f32 [⌈T/16⌉, D] for `fused`, which gives each block
//! of 16 tokens its own scales. Bytes for f32 input: quantizing reads 4·T·D (+ 4·D scales) and writes T·D;
//! the scales of a whole column need another read of 4·T·D, those of `fused` cost 4·T·D/16 written and no
//! read.
//!
//! # The kernels
//! | kernel | one thread does | block |
//! |---|---|---|
//! | [`fn@quantize_naive`], [`fn@dequantize_naive`] | one element | 16 × 16 |
//! | [`fn@quantize_tiled`], … | one element, scales in shared memory | 16 × 16 |
//! | [`fn@quantize_coarsened`], … | four columns 16 apart | 16 × 16 |
//! | [`fn@quantize_vectorized`], … | four neighbouring columns of one row | 256 |
//! | [`fn@quantize_rows`], … | four neighbouring columns of eight rows | 256 |
//! | [`fn@quantize_wide`] | sixteen neighbouring columns of two rows | 256 |
//! | [`fn@dequantize_wide`] | 16 bytes of two rows | 256 |
//! | [`fn@quantize_fused`], … | four columns of 16 tokens, scales included | 128 |
//! | [`fn@column_maxima`], [`fn@finish_scales`] | (6) over the whole column | 256 |
//! | [`fn@append_blocks`], [`fn@restore_blocks`] | a channel of a block of a growing cache | D |

mod blocks;
mod fused;
mod grid;
mod paper;
pub mod quantizer;
mod rows;
mod scales;
mod vectorized;
mod wide;

pub use blocks::{BlockShape, append_blocks, restore_blocks};
pub use fused::{TOKENS_PER_BLOCK, dequantize_fused, quantize_fused};
#[cfg(not(target_arch = "nvptx64"))]
pub use grid::launch;
pub use grid::{PAPER_TILE, Shape, quad_rows};
pub use paper::{
    dequantize_coarsened, dequantize_naive, dequantize_tiled, quantize_coarsened, quantize_naive,
    quantize_tiled, tiled_layout,
};
pub use rows::{ROWS_PER_THREAD, dequantize_rows, quantize_rows};
pub use scales::{
    SCAN_COLUMNS, SCAN_ROWS, ScanLayout, column_maxima, finish_scales, first_nonfinite, scan_layout,
};
pub use vectorized::{dequantize_vectorized, quantize_vectorized};
pub use wide::{WIDE_BACK_COLUMNS, WIDE_COLUMNS, dequantize_wide, quantize_wide};

/// Every kernel instance of the system.
#[cfg(not(target_arch = "nvptx64"))]
pub fn kernels() -> impl Iterator<Item = &'static simt::KernelInfo> {
    [
        column_maxima::INSTANCES,
        finish_scales::INSTANCES,
        first_nonfinite::INSTANCES,
        quantize_naive::INSTANCES,
        quantize_tiled::INSTANCES,
        quantize_coarsened::INSTANCES,
        quantize_vectorized::INSTANCES,
        quantize_rows::INSTANCES,
        quantize_wide::INSTANCES,
        quantize_fused::INSTANCES,
        dequantize_naive::INSTANCES,
        dequantize_tiled::INSTANCES,
        dequantize_coarsened::INSTANCES,
        dequantize_vectorized::INSTANCES,
        dequantize_rows::INSTANCES,
        dequantize_wide::INSTANCES,
        dequantize_fused::INSTANCES,
        append_blocks::INSTANCES,
        restore_blocks::INSTANCES,
    ]
    .into_iter()
    .flatten()
}
