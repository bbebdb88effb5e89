//! Kernels that the tests launch, each as Rust for the emulator and as PTX for the GPU.
// Each test binary takes a part.
#![allow(dead_code, unused_macros, unused_imports)]

use ferrokv_device::{Buffer, Device, Error, PtxImage};
use simt::emu::EmuOptions;
use simt::{Global, GlobalMut, LaunchShape, SharedPlan, kernel, thread};

/// The PTX of every kernel here but [`fn@missing`].
pub const PTX: &str = include_str!("kernels.ptx");
/// [`PTX`] as the loader takes it.
pub const IMAGES: &[PtxImage] = &[PtxImage::new(80, PTX)];

#[kernel(system = host_test)]
pub fn affine(x: Global<f32>, y: GlobalMut<f32>, a: f32, n: u32) {
    let i = thread::index_1d();
    if i < n as usize {
        y.store(i, x.load(i) * a + 1.0);
    }
}

#[kernel(system = host_test)]
pub fn increment(y: GlobalMut<u32>, by: u32, n: u32) {
    let i = thread::index_1d();
    if i < n as usize {
        y.store(i, y.load(i).wrapping_add(by));
    }
}

/// [`fn@increment`] of a whole buffer.
pub fn add(buffer: &mut Buffer<u32>, by: u32) -> increment::Args {
    increment::Args { y: buffer.global_mut(), by, n: buffer.len() as u32 }
}

/// [`fn@increment`] under the same name in the PTX, whose target knows no launches that overlap.
pub mod overlapping {
    use super::increment as in_order;
    use super::{GlobalMut, kernel};

    #[kernel(system = host_test, args = in_order, overlaps)]
    pub fn increment(y: GlobalMut<u32>, by: u32, n: u32) {
        in_order(y, by, n);
    }
}

#[kernel(system = host_test, max_threads = 256)]
pub fn reverse(y: GlobalMut<u32>, stride: u32) {
    let (t, n) = (thread::thread_idx_x(), thread::block_dim_x());
    let memory = SharedPlan::new().array::<u32>(n * stride);
    memory.store(t * stride, y.load(t as usize));
    thread::sync_threads();
    y.store(t as usize, memory.load((n - 1 - t) * stride));
}

#[kernel(system = host_test)]
pub fn narrow(y: GlobalMut<u32>) {
    let t = thread::thread_idx_x();
    y.store(t as usize, t);
}

#[kernel(system = host_test)]
pub fn missing(y: GlobalMut<u32>) {
    narrow(y);
}

/// Enough blocks of 128 threads for `n` threads.
pub fn cover(n: usize) -> LaunchShape {
    LaunchShape::new(n.div_ceil(128).max(1) as u32, 128)
}

pub fn cpu() -> Option<Device> {
    Some(Device::cpu(EmuOptions::default()))
}

/// The first GPU, or a line that says why there is none. Anything else that is wrong fails the test.
pub fn cuda() -> Option<Device> {
    match Device::cuda(0, IMAGES) {
        Ok(device) => Some(device),
        Err(reason @ (Error::NoDriver(_) | Error::NoDevice { .. })) => {
            eprintln!("skipped on the GPU: {reason}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Each check of the list as a test on the CPU and one on the GPU.
macro_rules! on_both {
    ($($check:ident)*) => {
        mod on_cpu {
            $(#[test] fn $check() { if let Some(device) = crate::common::cpu() { super::$check(&device) } })*
        }
        mod on_cuda {
            $(#[test] fn $check() { if let Some(device) = crate::common::cuda() { super::$check(&device) } })*
        }
    };
}
pub(crate) use on_both;
