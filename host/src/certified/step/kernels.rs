//! The kernels of a step for each element type and head_dim.

use crate::attention::dense::DenseElement;
use crate::certified::Layout;
use half::{bf16, f16};
use kernels_gpu::certified::{
    Bare, Certified, LeanBare, LeanCertified, attend, audit, audit_layout, canary, carried_layout, carry,
    pass_layout, promote_layout, replace, vouch,
};
use simt::Kernel;

type Attend<E> = Kernel<attend::Args<E>>;

type Replace<E> = Kernel<replace::Args<E>>;

type Carry<E> = Kernel<carry::Args<E>>;

type Audit<E> = Kernel<audit::Args<E>>;

type Canary<E> = Kernel<canary::Args<E>>;

type Vouch<E> = Kernel<vouch::Args<E>>;

/// The kernels of a head_dim and layout, and their shared memory. `carry` and `canary` are the compact
/// layout's, and so is `vouch`: plans of the other refuse to carry lists.
#[doc(hidden)]
#[derive(Debug)]
pub struct StepKernels<E: StepElement> {
    pub(super) attend: (Attend<E>, u32),
    pub(super) replace: (Replace<E>, u32),
    /// Without certificates, with them.
    carry: [Carry<E>; 2],
    /// The same in less shared memory.
    lean: [Carry<E>; 2],
    lean_bytes: [u32; 2],
    /// Shared memory of the pass by a carried list, of either kind.
    carried_bytes: [u32; 2],
    pub(super) audit: (Audit<E>, u32),
    pub(super) canary: (Canary<E>, u32),
    pub(super) vouch: Vouch<E>,
}

impl<E: StepElement> StepKernels<E> {
    /// Those for a device whose thread blocks have so many bytes of shared memory.
    pub(in crate::certified) fn within(mut self, shared_bytes: u32) -> Self {
        for i in 0..2 {
            if self.carried_bytes[i] > shared_bytes {
                (self.carry[i], self.carried_bytes[i]) = (self.lean[i], self.lean_bytes[i]);
            }
        }
        self
    }

    /// `attend`, `replace` and `audit`.
    pub(in crate::certified) fn infos(&self) -> [&'static simt::KernelInfo; 3] {
        [self.attend.0.info(), self.replace.0.info(), self.audit.0.info()]
    }

    /// The pass of a step by a carried list, with certificates or without.
    pub(in crate::certified) fn carry(&self, certify: bool) -> &Carry<E> {
        &self.carry[certify as usize]
    }

    /// What is compared ahead of such a pass.
    pub(in crate::certified) fn canary(&self) -> &Canary<E> {
        &self.canary.0
    }

    /// The certificates of steps over resident sequences.
    pub(in crate::certified) fn vouch(&self) -> &Vouch<E> {
        &self.vouch
    }

    /// Shared memory of its blocks, in bytes.
    pub(super) fn carried_bytes(&self, certify: bool) -> u32 {
        self.carried_bytes[certify as usize]
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
            carry: [carry::kernel::<$element, $dim, Bare>(), carry::kernel::<$element, $dim, Certified>()],
            lean: [carry::kernel::<$element, $dim, LeanBare>(), carry::kernel::<$element, $dim, LeanCertified>()],
            lean_bytes: [
                carried_layout::<$dim, LeanBare>().bytes,
                carried_layout::<$dim, LeanCertified>().bytes,
            ],
            carried_bytes: [carried_layout::<$dim, Bare>().bytes, carried_layout::<$dim, Certified>().bytes],
            audit: (audit::kernel::<$element, $dim, $metadata>(), audit_layout::<$metadata, $dim>().bytes),
            canary: (canary::kernel::<$element, $dim>(), audit_layout::<f16, $dim>().bytes),
            vouch: vouch::kernel::<$element, $dim>(),
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
