//! The kernel handles of each element type.

use half::{bf16, f16};
use kernels_gpu::Element;
use kernels_gpu::int8::{
    column_maxima, dequantize_coarsened, dequantize_fused, dequantize_naive, dequantize_rows,
    dequantize_tiled, dequantize_vectorized, dequantize_wide, finish_scales, first_nonfinite,
    quantize_coarsened, quantize_fused, quantize_naive, quantize_rows, quantize_tiled, quantize_vectorized,
    quantize_wide,
};
use simt::Kernel;

/// Quantizes with given scales.
type Quantize<T> = Kernel<quantize_naive::Args<T>>;
/// Quantizes and writes the scales too.
type QuantizeFused<T> = Kernel<quantize_fused::Args<T>>;
/// Restores with given scales.
type Dequantize<T> = Kernel<dequantize_naive::Args<T>>;

/// Handles to every instance for one element type.
#[doc(hidden)]
pub struct Kernels<T: Element> {
    pub(super) column_maxima: Kernel<column_maxima::Args<T>>,
    pub(super) finish_scales: Kernel<finish_scales::Args>,
    pub(super) first_nonfinite: Kernel<first_nonfinite::Args<T>>,
    pub(super) quantize_naive: Quantize<T>,
    pub(super) quantize_tiled: Quantize<T>,
    pub(super) quantize_coarsened: Quantize<T>,
    pub(super) quantize_vectorized: Quantize<T>,
    pub(super) quantize_rows: Quantize<T>,
    pub(super) quantize_wide: Quantize<T>,
    pub(super) quantize_fused: QuantizeFused<T>,
    pub(super) dequantize_naive: Dequantize<T>,
    pub(super) dequantize_tiled: Dequantize<T>,
    pub(super) dequantize_coarsened: Dequantize<T>,
    pub(super) dequantize_vectorized: Dequantize<T>,
    pub(super) dequantize_rows: Dequantize<T>,
    pub(super) dequantize_wide: Dequantize<T>,
    pub(super) dequantize_fused: Dequantize<T>,
}

/// An element type that the INT8 kernels have instances for: f32, f16 and bf16.
pub trait Int8Element: Element {
    #[doc(hidden)]
    const KERNELS: Kernels<Self>;
}

macro_rules! instances {
    ($($t:ty),*) => {$(
        impl Int8Element for $t {
            const KERNELS: Kernels<$t> = Kernels {
                column_maxima: column_maxima::kernel::<$t>(),
                finish_scales: finish_scales::kernel::<$t>(),
                first_nonfinite: first_nonfinite::kernel::<$t>(),
                quantize_naive: quantize_naive::kernel::<$t>(),
                quantize_tiled: quantize_tiled::kernel::<$t>(),
                quantize_coarsened: quantize_coarsened::kernel::<$t>(),
                quantize_vectorized: quantize_vectorized::kernel::<$t>(),
                quantize_rows: quantize_rows::kernel::<$t>(),
                quantize_wide: quantize_wide::kernel::<$t>(),
                quantize_fused: quantize_fused::kernel::<$t>(),
                dequantize_naive: dequantize_naive::kernel::<$t>(),
                dequantize_tiled: dequantize_tiled::kernel::<$t>(),
                dequantize_coarsened: dequantize_coarsened::kernel::<$t>(),
                dequantize_vectorized: dequantize_vectorized::kernel::<$t>(),
                dequantize_rows: dequantize_rows::kernel::<$t>(),
                dequantize_wide: dequantize_wide::kernel::<$t>(),
                dequantize_fused: dequantize_fused::kernel::<$t>(),
            };
        }
    )*};
}
instances!(f32, f16, bf16);
