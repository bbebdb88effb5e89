//! A kernel, the function that launches it, and the test of both.

use simt::{Global, GlobalMut, kernel, math, thread};

/// y = a·x + y, one thread an element.
#[kernel]
pub fn axpy(a: f32, x: Global<f32>, y: GlobalMut<f32>, n: u32) {
    let i = thread::index_1d();
    if i < n as usize {
        y.store(i, math::fma(a, x.load(i), y.load(i)));
    }
}

// What follows is for the host: the device compiler sees the kernels alone.
#[cfg(not(target_arch = "nvptx64"))]
mod host;
#[cfg(not(target_arch = "nvptx64"))]
pub use host::*;

#[cfg(test)]
mod tests {
    use super::*;
    use simt::LaunchShape;
    use simt_test::{Trial, array, bits, sizes};

    /// For each case that is drawn: under the emulator with every check, in nine orders, and on the GPU if
    /// there is one, the bits are those of plain Rust.
    #[simt::test(ptx = ptx())]
    fn it_is_a_fused_multiply_add(
        #[draw(sizes(1..=1000))] n: usize,
        #[draw(bits::<f32>())] a: f32,
        #[draw(array(n, bits::<f32>()))] x: Vec<f32>,
        #[draw(array(n, bits::<f32>()))] y: Vec<f32>,
    ) -> Trial {
        let expected: Vec<f32> = x.iter().zip(&y).map(|(x, y)| a.mul_add(*x, *y)).collect();
        Trial::new(axpy::kernel(), LaunchShape::new(n.div_ceil(128) as u32, 128), move |memory| axpy::Args {
            a,
            x: memory.input(&x),
            y: memory.in_out(&y, &expected),
            n: n as u32,
        })
    }
}
