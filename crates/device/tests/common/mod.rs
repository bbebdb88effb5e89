//! Kernels that the tests launch, each as Rust for the emulator and as PTX for the GPU.
// Each test binary takes a part.
#![allow(dead_code, unused_macros, unused_imports)]

use ferrokv_device::{Device, Error, PtxImage};
use simt::emu::EmuOptions;
use simt::{Global, GlobalMut, Kernel, KernelInfo, LaunchShape, SharedPlan, thread};

/// The PTX of every kernel here but [`MISSING`].
pub const PTX: &str = include_str!("kernels.ptx");
/// [`PTX`] as the loader takes it.
pub const IMAGES: &[PtxImage] = &[PtxImage { sm: 80, text: PTX }];

// Name in PTX, most threads, whether launches may overlap (the PTX is of a target where none does), body.
macro_rules! kernels {
    ($($name:ident: $entry:literal, $max:literal, $overlaps:literal, $body:ident($($arg:ty),*);)*) => {$(
        pub static $name: Kernel<($($arg,)*)> = {
            static INFO: KernelInfo = KernelInfo {
                name: $entry,
                module: module_path!(),
                file: file!(),
                line: line!(),
                max_threads: $max,
                overlaps: $overlaps,
                waits_late: false,
            };
            #[allow(unused_parens)]
            Kernel::new(&INFO, $body)
        };
    )*};
}
kernels! {
    AFFINE: "host_test_affine", 1024, false, affine(Global<f32>, GlobalMut<f32>, f32, u32);
    INCREMENT: "host_test_increment", 1024, false, increment(GlobalMut<u32>, u32, u32);
    INCREMENT_OVERLAPPING: "host_test_increment", 1024, true, increment(GlobalMut<u32>, u32, u32);
    REVERSE: "host_test_reverse", 256, false, reverse(GlobalMut<u32>, u32);
    NARROW: "host_test_narrow", 1024, false, narrow(GlobalMut<u32>);
    MISSING: "host_test_missing", 1024, false, narrow(GlobalMut<u32>);
}

fn affine((x, y, a, n): (Global<f32>, GlobalMut<f32>, f32, u32)) {
    let i = thread::index_1d();
    if i < n as usize {
        y.store(i, x.load(i) * a + 1.0);
    }
}

fn increment((y, by, n): (GlobalMut<u32>, u32, u32)) {
    let i = thread::index_1d();
    if i < n as usize {
        y.store(i, y.load(i).wrapping_add(by));
    }
}

fn reverse((y, stride): (GlobalMut<u32>, u32)) {
    let (t, n) = (thread::thread_idx_x(), thread::block_dim_x());
    let memory = SharedPlan::new().array::<u32>(n * stride);
    memory.store(t * stride, y.load(t as usize));
    thread::sync_threads();
    y.store(t as usize, memory.load((n - 1 - t) * stride));
}

fn narrow((y,): (GlobalMut<u32>,)) {
    let t = thread::thread_idx_x();
    y.store(t as usize, t);
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
