//! Runtime-certified attention over INT8 keys and INT4 values (Calver): what is quantized, and by how much it
//! errs.
//!
//! A KV cache is blocks of 16 tokens. A full block is quantized once, to a [tile](layout) that takes half of
//! f16's room, or 9/16 in the paper's layout, with an [annotation](layout::Annotation) that bounds its
//! errors; the originals stay in another pool, for the blocks that attention then finds to matter.
//! [`quantizer`] has the arithmetic and the derivation of its bounds.
//!
//! | kernel | does | block |
//! |---|---|---|
//! | [`fn@attend`] | attention over all tiles, masses and error bounds of blocks | eight warps a split |
//! | [`fn@carry`] | all of a step in one pass, by the list of an earlier one | 8 or 12 warps a split |
//! | [`fn@append`], [`fn@prefill`] | tokens to originals and fresh blocks | 256 threads a token |
//! | [`fn@turn_append`] | RoPE, append, quantization in one | D threads a KV head, or two query heads |
//! | [`fn@weigh`] | what each query row wants from the originals | a thread for one or two blocks |
//! | [`fn@mark`] | the lists of these, and which of them come into the scratch | a warp for 32 blocks |
//! | [`fn@replace`] | promoted blocks' shares replaced; output and certificate | a warp a listed block |
//! | [`fn@audit`] | promoted and drawn blocks compared with their originals, if asked | a warp a block |
//! | [`fn@rank`] | the order of the heaviest blocks checked, if asked | 256 threads a query head |
//! | [`fn@canary`] | what `audit` compares, ahead of a step that renews its list | a warp a block |
//! | [`fn@vouch`] | certificates of exact attention over resident sequences | 4 warps a row of blocks |
//! | [`fn@settle`] | heads sent to the dense rung for what these found | 256 threads a sequence |
//! | [`fn@quantize_block`] | originals to tile and annotation | D threads a block and KV head |

pub mod admit;
pub mod auditing;
pub mod carried;
pub mod choice;
mod finish;
pub mod judge;
pub mod layout;
mod lists;
pub mod marking;
pub mod metadata;
pub mod parts;
mod pass;
pub mod policy;
mod promote;
pub mod quantizer;
pub mod query;
pub mod ranking;
pub mod residents;
pub mod settling;
pub mod sums;
pub mod tile;
pub mod tokens;
pub mod turning;
pub mod weighing;
mod write;

pub use admit::{Scratch, Traffic};
pub use auditing::{audit, audit_layout};
pub use carried::{Bare, Certified, LeanBare, LeanCertified, canary, carried_layout, carry};
pub use choice::weigh_layout;
pub use judge::Exact;
pub use marking::{Entry, ListHead, mark, mark_layout};
pub use pass::{MAX_REFERENCE, PassLayout, Record, StepShape, attend, pass_layout, pass_share};
pub use policy::{Certificate, Thresholds, Watch};
pub use promote::{PromoteLayout, promote_layout, replace};
pub use ranking::{rank, rank_layout};
pub use residents::{vouch, vouch_layout};
pub use settling::settle;
pub use sums::{RowSums, Taken};
pub use tokens::{CacheShape, Piece, Refusals, append, inspect, prefill};
pub use turning::turn_append;
#[cfg(not(target_arch = "nvptx64"))]
pub use turning::turn_launch;
pub use weighing::{RowChoice, Weighed, weigh};
#[cfg(not(target_arch = "nvptx64"))]
pub use write::launch as write_launch;
pub use write::{WriteLayout, quantize_block, write_layout};

/// Every kernel instance of the system.
#[cfg(not(target_arch = "nvptx64"))]
pub fn kernels() -> impl Iterator<Item = &'static simt::KernelInfo> {
    [
        quantize_block::INSTANCES,
        attend::INSTANCES,
        carry::INSTANCES,
        weigh::INSTANCES,
        mark::INSTANCES,
        replace::INSTANCES,
        audit::INSTANCES,
        rank::INSTANCES,
        canary::INSTANCES,
        settle::INSTANCES,
        vouch::INSTANCES,
        append::INSTANCES,
        prefill::INSTANCES,
        inspect::INSTANCES,
        turn_append::INSTANCES,
    ]
    .into_iter()
    .flatten()
}
