//! The kernel language of Ferrokv.
//!
//! A kernel is one Rust function marked [`#[kernel]`](kernel). Compiled for `nvptx64` it becomes a PTX entry;
//! compiled for the host it runs under the [emulator](emu) of the GPU's execution model. Each primitive of
//! this crate has both sides next to each other: on the device a special register, an LLVM intrinsic or one
//! line of inline PTX, on the host a call into the emulator.
//!
//! | module | what it holds | `cuda_std`'s name |
//! |---|---|---|
//! | [`thread`] | indices, block barriers, fences, overlap of launches | `thread` |
//! | [`warp`] | shuffles, votes, reductions | `warp` |
//! | [`Global`], [`GlobalMut`] | typed device memory, width and cache hint by name | raw pointers |
//! | [`rows`] | matrices and slices of it, with their lengths on the device | slices |
//! | [`Shared`], [`SharedPlan`] | shared memory with a computed layout | `shared` |
//! | [`atomic`] | integer atomics on both memories | `atomic` |
//! | [`cluster`] | clusters of blocks and each other's shared memory (sm_90) | |
//! | [`convert`] | f16, bf16 and e4m3 | |
//! | [`async_copy`] | copies to shared memory that run beside the thread | |
//! | [`mbarrier`], [`bulk`] | barriers in shared memory, and bulk copies that they count (sm_90) | |
//! | [`tiles`], [`TensorMap`] | copies of boxes of a tensor, by a descriptor (sm_90) | |
//! | [`tensor`] | matrix multiply-accumulate, `ldmatrix` | |
//! | [`wgmma`] | products of matrices by groups of four warps, asynchronously (compute capability 9.0) | |
//! | [`half2`] | arithmetic on pairs of f16 | |
//! | [`bits`] | `dp4a`, byte permute | |
//! | [`math`] | exact-order elementary functions | `GpuFloat` |
//! | [`random`] | words that a seed and a number decide | |
//! | [`println!`], `print` on the host | lines of text from kernels | `println!` |
//!
//! # Numerics
//! Float operations are IEEE-754, round to nearest even, never contracted, never flushed; a fused
//! multiply-add happens only where the source says [`math::fma`]. Elementary functions are this crate's own
//! polynomials. So a kernel's output on the GPU equals its output under the emulator bit for bit. NaN
//! payloads are the one exception: a NaN is a NaN on both sides, its bits are not promised.
//!
//! # Safety
//! Inside a kernel the accessors are safe functions: what makes them sound is the **launch**, which is
//! `unsafe` (on the GPU) and whose caller vouches that the kernel, with these arguments and this shape, stays
//! inside its buffers and has no race. The emulator is how one finds out: it turns each such mistake into an
//! error.
#![cfg_attr(target_arch = "nvptx64", no_std, allow(internal_features))]
#![cfg_attr(target_arch = "nvptx64", feature(
        stdarch_nvptx,
        asm_experimental_arch,
        core_float_math,
        // The convergent intrinsics of `ptx`: see there.
        link_llvm_intrinsics,
        abi_unadjusted
    ))]

/// Gives a primitive its two sides, and makes the emulator's errors point at the kernel's own line.
macro_rules! sides {
    ($(
        $(#[$attr:meta])*
        pub fn $name:ident $(<$($gen:ident $(: $bound:path)?),*>)? ($($arg:ident : $ty:ty),* $(,)?) $(-> $ret:ty)?
        { device $device:block emulator $emulator:block }
    )*) => {$(
        $(#[$attr])*
        #[crate::device(in_line)]
        pub fn $name $(<$($gen $(: $bound)?),*>)? ($($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "nvptx64")]
            $device
            #[cfg(not(target_arch = "nvptx64"))]
            $emulator
        }
    )*};
}

// What `#[kernel]` and `#[device]` write names the crate from outside.
extern crate self as simt;

#[cfg(target_arch = "nvptx64")]
mod ptx;

pub mod async_copy;
pub mod atomic;
pub mod bits;
pub mod bulk;
pub mod cluster;
pub mod convert;
#[cfg(not(target_arch = "nvptx64"))]
pub mod emu;
mod global;
pub mod half2;
mod index;
#[cfg(not(target_arch = "nvptx64"))]
mod kernel;
pub mod math;
pub mod mbarrier;
#[doc(hidden)]
pub mod on_device;
#[cfg(not(target_arch = "nvptx64"))]
pub mod print;
pub mod random;
pub mod rows;
mod shared;
mod swizzle;
pub mod tensor;
pub mod thread;
pub mod tiles;
pub mod warp;
pub mod wgmma;

pub use bytemuck::{Pod, Zeroable};
pub use cluster::ClusterShared;
/// The crate of vectors whose types kernels load and store.
pub use glam;
pub use global::{Global, GlobalMut};
/// The crate of `f16` and `bf16`.
pub use half;
pub use index::{GlobalIndex, SharedIndex};
#[cfg(not(target_arch = "nvptx64"))]
#[doc(hidden)]
pub use kernel::{ArgMemory, same_names};
#[cfg(not(target_arch = "nvptx64"))]
pub use kernel::{Dim3, Kernel, KernelArg, KernelArgs, KernelInfo, LaunchShape, MAX_PARAMS};
pub use mbarrier::Mbarrier;
pub use shared::{Shared, SharedPlan};
pub use simt_macros::{device, kernel, println, test, unroll};
pub use swizzle::Swizzle;
pub use tiles::TensorMap;
#[cfg(not(target_arch = "nvptx64"))]
pub use tiles::{TensorMapError, TensorMapShape, TileElement};

/// What a panic becomes on the device: the grid stops with an error.
#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: `trap` has no precondition; it ends the grid.
    unsafe { core::arch::nvptx::trap() }
}
