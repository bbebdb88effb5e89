//! Devices, buffers, streams, graphs and typed launches. The layer knows no kernel of its own and nothing of
//! what is built on it.
//!
//! One interface, two backends: a [`Device`] is a GPU (through `cust`, the driver loaded on first use) or the
//! emulator of `simt` on the CPU. Everything made from a device works the same on both, and gives the same
//! bits:
//!
//! | type | what it is |
//! | --- | --- |
//! | [`Buffer`] | typed device memory |
//! | [`Pinned`] | host memory that the device reaches too |
//! | [`Stream`] | work in order: launches, copies, fills, capture |
//! | [`Event`] | a point in a stream, with a time |
//! | [`Graph`], [`GraphExec`] | captured work, replayed with no host work between its steps |
//!
//! Memory and streams that other libraries own become a [`Buffer`] and a [`Stream`], too; [`dlpack`] has the
//! tensors that they hand over.
//!
//! [`Device::print_to`] takes the lines that kernels print, and [`nvtx`] names stretches of time for
//! profilers. [`Device::record_times`] has launches timed.
//!
//! On the CPU, [`stream_check`](simt::emu::EmuOptions::stream_check) finds work of two streams that nothing
//! orders, and [`unordered`] says which.
//!
//! Launches are `unsafe`: a kernel reads and writes memory through handles that the compiler does not follow.
//! What the caller vouches for is in [`Stream::launch`].

/// The kernels that the build script of the crate it stands in has made (`ptx-build`): a
/// `&'static [`[`PtxImage`]`]`, to open a GPU with. Empty if the build had no device compiler.
///
/// ```ignore
/// let (device, why_no_gpu) = Device::auto(EmuOptions::default(), ferrokv_device::embedded_ptx!());
/// ```
#[macro_export]
macro_rules! embedded_ptx {
    () => {{
        mod ptx_index {
            include!(concat!(env!("OUT_DIR"), "/ptx_index.rs"));
        }
        static IMAGES: ::std::sync::LazyLock<::std::vec::Vec<$crate::PtxImage>> =
            ::std::sync::LazyLock::new(|| $crate::PtxImage::of(ptx_index::PTX, ptx_index::MACHINE_CODE));
        let images: &'static [$crate::PtxImage] = &IMAGES;
        images
    }};
}

mod backend;
mod buffer;
pub mod cpu;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod cuda;
mod device;
pub mod dlpack;
mod error;
mod event;
mod graph;
mod limits;
pub mod nvtx;
mod pinned;
#[cfg_attr(not(all(target_os = "linux", target_arch = "x86_64")), expect(dead_code))]
mod prints;
mod sites;
#[cfg_attr(not(all(target_os = "linux", target_arch = "x86_64")), expect(dead_code))]
mod stops;
mod stream;
mod tiles;
mod times;
pub mod unordered;

pub use buffer::Buffer;
pub use device::{BackendKind, Device, DeviceInfo, KernelAttributes, LeftOut, PtxImage, cuda_devices};
pub use error::{Error, PtxRefusal, Result};
pub use event::Event;
pub use graph::{Graph, GraphExec, NodeId};
pub use pinned::Pinned;
pub use stream::Stream;
pub use times::KernelTimes;
