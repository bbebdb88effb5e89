//! The systems above the kernels: plans, CPU paths, caches, policies, models and their evaluation.
//!
//! The device layer they stand on is [`ferrokv_device`]: all its types are here too, at the root.

pub mod attention;
pub mod certified;
pub mod check;
pub mod dense;
pub mod eval;
pub mod int8;
pub mod model;
pub mod roofline;
mod simd_level;
pub mod tensor_file;

use ferrokv_device::cpu;
pub use ferrokv_device::{
    BackendKind, Buffer, Device, DeviceInfo, Error, Event, Graph, GraphExec, KernelAttributes, NodeId,
    Pinned, PtxImage, PtxRefusal, Result, Stream, cuda_devices,
};
