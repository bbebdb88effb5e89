//! Exact attention over f16 and bf16 caches: the baseline. The kernels are shared:
//! [`crate::attention::dense`].

pub use crate::attention::dense::*;

/// Every kernel instance of the system.
#[cfg(not(target_arch = "nvptx64"))]
pub fn kernels() -> impl Iterator<Item = &'static simt::KernelInfo> {
    [attend::INSTANCES, attend_lean::INSTANCES, attend_pairs::INSTANCES, append::INSTANCES]
        .into_iter()
        .flatten()
}
