//! The kernels' instances by element type.

use crate::attention::dense::DenseElement;
use half::{bf16, f16};
use kernels_gpu::gather::{attend_chosen, average, chosen_bytes, fold, score, score_wide, select, squeeze};
use simt::Kernel;

/// The kernel's handle.
#[doc(hidden)]
pub type Select<E> = Kernel<select::Args<E>>;
/// The kernel's handle.
#[doc(hidden)]
pub type ScoreKernel<E> = Kernel<score::Args<E>>;
/// The kernel's handle.
#[doc(hidden)]
pub type AttendChosen<E> = Kernel<attend_chosen::Args<E>>;
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
    /// Those that score, and rank and attend, with the shared memory of the second.
    #[doc(hidden)]
    fn each_kernels(head_dim: u32, row_groups: u32) -> Option<(ScoreKernel<Self>, AttendChosen<Self>, u32)>;
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

            fn each_kernels(
                head_dim: u32,
                row_groups: u32,
            ) -> Option<(ScoreKernel<Self>, AttendChosen<Self>, u32)> {
                macro_rules! of {
                    ($score:ident, $d:literal, $r:literal) => {
                        Some((
                            $score::kernel::<$element, $d, $r>(),
                            attend_chosen::kernel::<$element, $d, $r>(),
                            chosen_bytes::<$d>(),
                        ))
                    };
                }
                match (head_dim, row_groups) {
                    (64, 1) => of!(score, 64, 1),
                    (64, 2) => of!(score, 64, 2),
                    (96, 1) => of!(score, 96, 1),
                    (128, 1) => of!(score, 128, 1),
                    (128, 2) => of!(score_wide, 128, 2),
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
