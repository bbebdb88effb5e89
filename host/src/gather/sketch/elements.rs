//! The kernels' instances by element type.

use super::super::GatherElement;
use crate::certified::CacheElement;
use half::{bf16, f16};
use kernels_gpu::gather::sketch::{scan, scan_bytes, scan_lean, scan_lean_bytes, settle, sketch};
use simt::Kernel;

/// The kernel's handle.
#[doc(hidden)]
pub type Sketch<E> = Kernel<sketch::Args<E>>;
/// The kernel's handle.
#[doc(hidden)]
pub type Scan<E> = Kernel<scan::Args<E>>;
/// The kernel's handle.
#[doc(hidden)]
pub type Settle<E> = Kernel<settle::Args<E>>;

/// An element type that the kernels have instances for: f16 and bf16.
pub trait SketchElement: GatherElement + CacheElement {
    /// The instance for so many bits.
    #[doc(hidden)]
    fn sketch_kernel(bits: u32) -> Option<Sketch<Self>>;
    /// The instance for a head_dim and so many bits on a device whose thread blocks have `shared_bytes` of
    /// shared memory, and what it takes of them: the one that takes least where none fits.
    #[doc(hidden)]
    fn scan_kernel(head_dim: u32, bits: u32, shared_bytes: u32) -> Option<(Scan<Self>, u32)>;
    /// The instance for a head_dim.
    #[doc(hidden)]
    fn settle_kernel(head_dim: u32) -> Option<Settle<Self>>;
}

macro_rules! instances {
    ($($element:ty),*) => {$(
        impl SketchElement for $element {
            fn sketch_kernel(bits: u32) -> Option<Sketch<Self>> {
                match bits {
                    4 => Some(sketch::kernel::<$element, 4>()),
                    8 => Some(sketch::kernel::<$element, 8>()),
                    _ => None,
                }
            }

            fn scan_kernel(head_dim: u32, bits: u32, shared_bytes: u32) -> Option<(Scan<Self>, u32)> {
                match (head_dim, bits) {
                    (64, 4) => Some((scan::kernel::<$element, 64, 4>(), scan_bytes::<64, 4>())),
                    (64, 8) => Some((scan::kernel::<$element, 64, 8>(), scan_bytes::<64, 8>())),
                    (128, 4) if scan_bytes::<128, 4>() > shared_bytes => {
                        Some((scan_lean::kernel::<$element, 128, 4>(), scan_lean_bytes::<128, 4>()))
                    }
                    (128, 8) if scan_bytes::<128, 8>() > shared_bytes => {
                        Some((scan_lean::kernel::<$element, 128, 8>(), scan_lean_bytes::<128, 8>()))
                    }
                    (128, 4) => Some((scan::kernel::<$element, 128, 4>(), scan_bytes::<128, 4>())),
                    (128, 8) => Some((scan::kernel::<$element, 128, 8>(), scan_bytes::<128, 8>())),
                    _ => None,
                }
            }

            fn settle_kernel(head_dim: u32) -> Option<Settle<Self>> {
                match head_dim {
                    64 => Some(settle::kernel::<$element, 64>()),
                    128 => Some(settle::kernel::<$element, 128>()),
                    _ => None,
                }
            }
        }
    )*};
}
instances!(f16, bf16);
