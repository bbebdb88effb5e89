//! Codes in f64, written to be obvious: what every implementation is judged by.

use kernels_gpu::kivi::largest_code;

/// Half a unit of f16, relative, and below its normal numbers.
const U: f64 = 1.0 / 2048.0;
const TAU: f64 = 1.0 / (1u64 << 25) as f64;

/// The least number of a group, and its scale before it is rounded.
pub fn exact(x: &[f64], bits: u32) -> (f64, f64) {
    let least = x.iter().copied().fold(f64::INFINITY, f64::min);
    let most = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    (least, (most - least) / f64::from(largest_code(bits)))
}

/// What codes of so many bits make of the numbers of a group, were scale and zero exact.
pub fn quantized(x: &[f64], bits: u32) -> Vec<f64> {
    let (least, scale) = exact(x, bits);
    let one =
        |x: &f64| if scale == 0.0 { least } else { least + scale * ((x - least) / scale).round_ties_even() };
    x.iter().map(one).collect()
}

/// How far what is restored may be from a number, by its group's exact scale and by what is restored: the
/// derivation is in [`kernels_gpu::kivi`].
pub fn error(x: &[f64], bits: u32, restored: f64) -> f64 {
    let (_, scale) = exact(x, bits);
    let codes = f64::from(largest_code(bits));
    // s itself is off by as much.
    let off = 2.0 * U * scale + TAU;
    (scale + off) / 2.0 + codes * off + U * restored.abs() + TAU
}
