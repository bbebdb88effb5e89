//! Buffers, streams, graphs and the systems above the kernels.
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
//! Launches are `unsafe`: a kernel reads and writes memory through handles that the compiler does not follow.
//! What the caller vouches for is in [`Stream::launch`].

pub mod attention;
mod backend;
mod buffer;
pub mod certified;
pub mod check;
mod cpu;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod cuda;
pub mod dense;
mod device;
pub mod echo;
mod error;
pub mod eval;
mod event;
mod graph;
pub mod int8;
pub mod kv;
mod limits;
pub mod model;
mod pinned;
pub mod probe;
pub mod roofline;
mod simd_level;
mod stream;
pub mod tensor_file;

pub use buffer::Buffer;
pub use device::{BackendKind, Device, DeviceInfo, KernelAttributes, PtxImage, cuda_devices};
pub use error::{Error, PtxRefusal, Result};
pub use event::Event;
pub use graph::{Graph, GraphExec, NodeId};
pub use pinned::Pinned;
pub use stream::Stream;

use kv::{Error as SchemeError, Scheme, Selection, System};

/// Every system: what commands, checks and listings know.
#[rustfmt::skip]
pub static SYSTEMS: &[&System] = &[
    &dense::SYSTEM,
    &int8::SYSTEM,
    &certified::SYSTEM,
    &echo::SYSTEM,
    &model::SYSTEM,
    &roofline::SYSTEM,
    &probe::SYSTEM,
];

/// The ways to keep keys and values of all systems, in the order of [`SYSTEMS`].
pub fn schemes() -> impl Iterator<Item = &'static Scheme> + Clone {
    SYSTEMS.iter().flat_map(|system| system.schemes)
}

impl std::str::FromStr for Selection {
    type Err = SchemeError;

    fn from_str(text: &str) -> std::result::Result<Self, SchemeError> {
        Selection::parse(text, schemes())
    }
}
