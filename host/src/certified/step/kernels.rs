//! The kernels of a step for each element type and head_dim.

use crate::attention::dense::DenseElement;
use crate::certified::{Annotation, Layout};
use half::{bf16, f16};
use kernels_gpu::certified::carried::Promoted;
use kernels_gpu::certified::{
    Certificate, Entry, Exact, ListHead, Record, Scratch, StepShape, Taken, Thresholds, Watch, Weighed,
    attend, audit, audit_layout, carried_layout, carry, pass_layout, promote_layout, replace,
};
use simt::{Global, GlobalMut, Kernel};

type Attend<E> = Kernel<(
    Global<E>,
    Global<u32>,
    Global<Annotation>,
    Global<u32>,
    Global<u32>,
    GlobalMut<Record>,
    GlobalMut<f32>,
    StepShape,
)>;

type Replace<E> = Kernel<(
    Global<E>,
    Global<u32>,
    Global<u32>,
    Global<u32>,
    Global<E>,
    Global<E>,
    GlobalMut<E>,
    GlobalMut<u64>,
    Global<ListHead>,
    Global<Entry>,
    Global<Weighed>,
    Global<Taken>,
    GlobalMut<f32>,
    GlobalMut<f32>,
    GlobalMut<u32>,
    GlobalMut<f32>,
    GlobalMut<f32>,
    GlobalMut<Certificate>,
    GlobalMut<u32>,
    StepShape,
    Thresholds,
    Scratch,
)>;

type Carry<E> = Kernel<(
    Global<E>,
    Global<u32>,
    Global<Annotation>,
    Global<u32>,
    Global<u32>,
    Global<E>,
    Global<E>,
    GlobalMut<E>,
    GlobalMut<u64>,
    Global<ListHead>,
    Global<Entry>,
    GlobalMut<Promoted>,
    GlobalMut<Record>,
    GlobalMut<f32>,
    GlobalMut<f32>,
    GlobalMut<u32>,
    GlobalMut<f32>,
    GlobalMut<f32>,
    GlobalMut<Certificate>,
    GlobalMut<u32>,
    StepShape,
    Thresholds,
    Scratch,
    u32,
)>;

type Audit<E> = Kernel<(
    Global<E>,
    Global<u32>,
    Global<u32>,
    Global<u32>,
    Global<E>,
    Global<E>,
    Global<E>,
    Global<u64>,
    Global<Record>,
    Global<ListHead>,
    Global<Entry>,
    Global<Weighed>,
    Global<f32>,
    Global<u32>,
    GlobalMut<f32>,
    GlobalMut<u32>,
    GlobalMut<Exact>,
    StepShape,
    Watch,
    Scratch,
)>;

/// The kernels of a head_dim and layout, and their shared memory. `carry` is the compact layout's: plans of the other refuse to
/// carry lists.
#[doc(hidden)]
#[derive(Debug)]
pub struct StepKernels<E: StepElement> {
    pub(super) attend: (Attend<E>, u32),
    pub(super) replace: (Replace<E>, u32),
    pub(super) carry: (Carry<E>, u32),
    pub(super) audit: (Audit<E>, u32),
}

impl<E: StepElement> StepKernels<E> {
    /// `attend`, `replace`, `audit` and `carry`.
    pub(in crate::certified) fn infos(&self) -> [&'static simt::KernelInfo; 4] {
        [self.attend.0.info(), self.replace.0.info(), self.audit.0.info(), self.carry.0.info()]
    }
}

/// An element type that the kernels of a step have instances for: f16 and bf16.
pub trait StepElement: DenseElement {
    #[doc(hidden)]
    fn step_kernels(head_dim: u32, layout: Layout) -> Option<StepKernels<Self>>;
}

/// Head dimensions that a step has instances for.
pub const STEP_HEAD_DIMS: [u32; 2] = [64, 128];

macro_rules! instances {
    ($element:ty, $dim:literal, $metadata:ty) => {
        StepKernels {
            attend: (attend::kernel::<$element, $dim, $metadata>(), pass_layout::<$metadata, $dim>().bytes),
            replace: (replace::kernel::<$element, $dim, $metadata>(), promote_layout::<$metadata, $dim>().bytes),
            carry: (carry::kernel::<$element, $dim>(), carried_layout::<$dim>().bytes),
            audit: (audit::kernel::<$element, $dim, $metadata>(), audit_layout::<$metadata, $dim>().bytes),
        }
    };
    ($($element:ty: $($dim:literal)*),*) => {$(
        impl StepElement for $element {
            fn step_kernels(head_dim: u32, layout: Layout) -> Option<StepKernels<Self>> {
                match (head_dim, layout) {
                    $(
                        ($dim, Layout::Compact) => Some(instances!($element, $dim, f16)),
                        ($dim, Layout::Paper) => Some(instances!($element, $dim, f32)),
                    )*
                    _ => None,
                }
            }
        }
    )*};
}
instances!(f16: 64 128, bf16: 64 128);
