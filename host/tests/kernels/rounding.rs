//! The guide's example of a system: f16 with fewer bits.

use half::f16;
use kernels_gpu::echo::{MOST_DROPPED, THREADS, round};
use simt::LaunchShape;
use simt_test::{Trial, array, bits, sizes};

/// `x` with `dropped` bits fewer, in f64: to the nearest multiple of the last place that is left.
fn rounded(x: f16, dropped: u32) -> f16 {
    let value = f64::from(x);
    if !value.is_finite() || value == 0.0 {
        return x;
    }
    // The exponent of a number; subnormal ones have that of the smallest normal one.
    let exponent = (value.abs().log2().floor() as i32).max(-14);
    let place = 2f64.powi(exponent - 10 + dropped as i32);
    // The largest number of the precision: all bits of the mantissa that are left.
    let largest = 2f64.powi(16) - 2f64.powi(15 - 10 + dropped as i32);
    let nearest = (value / place).round_ties_even() * place;
    f16::from_f64(nearest.clamp(-largest, largest).copysign(value))
}

#[simt::test(ptx = ferrokv::ptx())]
fn keys_and_values_are_rounded(
    #[draw(sizes(1..=600))] count: usize,
    #[draw(array(count, bits::<f16>()))] keys: Vec<f16>,
    #[draw(array(count, bits::<f16>()))] values: Vec<f16>,
    #[draw(0..=MOST_DROPPED)] dropped: u32,
) -> Trial {
    let each = |x: &[f16]| x.iter().map(|x| rounded(*x, dropped)).collect::<Vec<_>>();
    let (rounded_keys, rounded_values) = (each(&keys), each(&values));
    let shape = LaunchShape::new((count as u32).div_ceil(THREADS), THREADS);
    Trial::new(round::kernel(), shape, move |memory| round::Args {
        keys: memory.input(&keys),
        values: memory.input(&values),
        rounded_keys: memory.output(&rounded_keys),
        rounded_values: memory.output(&rounded_values),
        count: count as u32,
        dropped,
    })
}
