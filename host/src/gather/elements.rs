//! The kernels' instances by element type.

use crate::attention::dense::DenseElement;
use half::{bf16, f16};
use kernels_gpu::gather::{average, fold, select, squeeze, step, step_bytes};
use simt::Kernel;

/// The kernel's handle.
#[doc(hidden)]
pub type Select<E> = Kernel<select::Args<E>>;
/// The kernel's handle.
#[doc(hidden)]
pub type Step<E> = Kernel<step::Args<E>>;
/// The kernel's handle.
#[doc(hidden)]
pub type Fold<E> = Kernel<fold::Args<E>>;
/// The kernel's handle.
#[doc(hidden)]
pub type Squeeze<E> = Kernel<squeeze::Args<E>>;
/// The kernel's handle.
#[doc(hidden)]
pub type Average<E> = Kernel<average::Args<E>>;

/// An element type that the kernels have instances for: f16 and bf16.
pub trait GatherElement: DenseElement {
    /// The instance for a head_dim and so many groups of eight query heads, if there is one.
    #[doc(hidden)]
    fn select_kernel(head_dim: u32, row_groups: u32) -> Option<Select<Self>>;
    /// The same of a step in one launch, with its shared memory.
    #[doc(hidden)]
    fn step_kernel(head_dim: u32, row_groups: u32) -> Option<(Step<Self>, u32)>;
    #[doc(hidden)]
    fn fold_kernel() -> Fold<Self>;
    #[doc(hidden)]
    fn squeeze_kernel() -> Squeeze<Self>;
    #[doc(hidden)]
    fn average_kernel() -> Average<Self>;
}

macro_rules! instances {
    ($($element:ty),*) => {$(
        impl GatherElement for $element {
            fn select_kernel(head_dim: u32, row_groups: u32) -> Option<Select<Self>> {
                match (head_dim, row_groups) {
                    (64, 1) => Some(select::kernel::<$element, 64, 1>()),
                    (64, 2) => Some(select::kernel::<$element, 64, 2>()),
                    (96, 1) => Some(select::kernel::<$element, 96, 1>()),
                    (128, 1) => Some(select::kernel::<$element, 128, 1>()),
                    (128, 2) => Some(select::kernel::<$element, 128, 2>()),
                    (256, 1) => Some(select::kernel::<$element, 256, 1>()),
                    _ => None,
                }
            }

            fn step_kernel(head_dim: u32, row_groups: u32) -> Option<(Step<Self>, u32)> {
                match (head_dim, row_groups) {
                    (64, 1) => Some((step::kernel::<$element, 64, 1>(), step_bytes::<64>())),
                    (64, 2) => Some((step::kernel::<$element, 64, 2>(), step_bytes::<64>())),
                    (96, 1) => Some((step::kernel::<$element, 96, 1>(), step_bytes::<96>())),
                    (128, 1) => Some((step::kernel::<$element, 128, 1>(), step_bytes::<128>())),
                    (128, 2) => Some((step::kernel::<$element, 128, 2>(), step_bytes::<128>())),
                    _ => None,
                }
            }

            fn fold_kernel() -> Fold<Self> {
                fold::kernel::<$element>()
            }

            fn squeeze_kernel() -> Squeeze<Self> {
                squeeze::kernel::<$element>()
            }

            fn average_kernel() -> Average<Self> {
                average::kernel::<$element>()
            }
        }
    )*};
}
instances!(f16, bf16);
