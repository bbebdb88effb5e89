//! The systems above the kernels: plans, CPU paths, caches, policies, models and their evaluation.
//!
//! The device layer they stand on is [`ferrokv_device`]: all its types are here too, at the root. What every
//! system declares, and what a way to keep keys and values has to offer, is in [`kv`]; [`SYSTEMS`] lists
//! them.

pub mod attention;
pub mod certified;
pub mod check;
pub mod dense;
pub mod echo;
pub mod eval;
pub mod gather;
pub mod gtq;
mod hash;
pub mod int8;
pub mod kivi;
pub mod kv;
pub mod model;
pub mod probe;
mod random;
pub mod roofline;
mod simd_level;
pub mod statistics;
pub mod tensor_file;
pub mod vecinfer;

use ferrokv_device::cpu;
pub use ferrokv_device::{
    BackendKind, Buffer, Device, DeviceInfo, Error, Event, Graph, GraphExec, KernelAttributes, KernelTimes,
    LeftOut, NodeId, Pinned, PtxImage, PtxRefusal, Result, Stream, cuda_devices, nvtx, unordered,
};

use kv::{Scheme, System};

/// Every system: what commands, checks and listings know.
#[rustfmt::skip]
pub static SYSTEMS: &[&System] = &[
    &dense::SYSTEM,
    &int8::SYSTEM,
    &certified::SYSTEM,
    &gather::SYSTEM,
    &vecinfer::SYSTEM,
    &gtq::SYSTEM,
    &kivi::SYSTEM,
    &echo::SYSTEM,
    &model::SYSTEM,
    &roofline::SYSTEM,
    &probe::SYSTEM,
];

/// The ways to keep keys and values of all systems, in the order of [`SYSTEMS`].
pub fn schemes() -> impl Iterator<Item = &'static Scheme> + Clone {
    SYSTEMS.iter().flat_map(|system| system.schemes)
}

impl std::str::FromStr for kv::Selection {
    type Err = kv::Error;

    fn from_str(text: &str) -> kv::Result<Self> {
        kv::Selection::parse(text, schemes())
    }
}
