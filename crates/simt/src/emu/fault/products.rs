//! Products of groups of four warps that are not as they must be.

use super::Place;
use core::fmt;

/// What is wrong with products of [`wgmma`](crate::wgmma).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProductFault {
    /// The GPU that is emulated does not have them.
    Target {
        /// Its target, 80 for sm_80.
        sm: u32,
    },
    /// The kernel is not marked as one of the GPUs that have them.
    Unmarked,
    /// The calling warp is one of fewer than four.
    Warps {
        /// Threads of the block.
        threads: u64,
    },
    /// The four warps do not make the same calls.
    Parted {
        /// Another warp's call in the place of this one; `None` if it has ended.
        other: Option<Place>,
    },
    /// A distance within an operand that is no multiple of what it must be.
    Distance {
        /// In bytes.
        distance: u32,
        /// What it must be a multiple of.
        step: u32,
    },
    /// Sums that are used while products are on their way to them.
    UnderWay,
    /// The thread ends and has not waited.
    Left,
    /// The block's groups hold more registers than there are.
    Registers {
        /// Of a thread of each group, together.
        total: u32,
        /// What the launch gave them.
        limit: u32,
    },
}

impl fmt::Display for ProductFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ProductFault::Target { sm } => write!(
                f,
                "products of `simt::wgmma` are of sm_90 alone, and sm_{sm} is emulated: emulate sm_90, or launch another \
                 kernel"
            ),
            ProductFault::Unmarked => f.write_str(
                "products of `simt::wgmma` in a kernel that is not marked `#[kernel(only_sm = 90)]`",
            ),
            ProductFault::Warps { threads } => write!(
                f,
                "products of `simt::wgmma` are of four warps, and this one has not three others in a block of {threads} \
                 threads"
            ),
            ProductFault::Parted { other: Some(place) } => {
                write!(f, "the four warps of a group make different calls: another one that at {place}")
            }
            ProductFault::Parted { other: None } => {
                f.write_str("the four warps of a group make different calls: another one has ended")
            }
            ProductFault::Distance { distance, step } => {
                write!(
                    f,
                    "a distance of {distance} bytes within an operand: a multiple of {step} below 2^18 is needed"
                )
            }
            ProductFault::UnderWay => f.write_str(
                "sums that products are on their way to: commit their group and wait for it first",
            ),
            ProductFault::Registers { total, limit } => write!(
                f,
                "the block's groups of warps hold {total} registers a thread together, and its launch gives them \
                 {limit}: one of them would wait forever"
            ),
            ProductFault::Left => f.write_str("the thread ends and has not waited for its group's products"),
        }
    }
}
