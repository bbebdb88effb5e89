//! New tokens to a paged cache, in one launch.

use super::{Error, Problem, Result};
use crate::Stream;
use crate::attention::{BLOCK_TOKENS, Half};
use half::{bf16, f16};
use kernels_gpu::attention::dense::{self as kernels, APPEND_THREADS, AppendShape};
use simt::{Global, GlobalMut, Kernel, LaunchShape};

/// The kernel's handle.
#[doc(hidden)]
pub type Append<E> = Kernel<kernels::append::Args<E>>;

/// An element type that the kernel has an instance for: f16 and bf16.
pub trait AppendElement: Half {
    #[doc(hidden)]
    fn append_kernel() -> Append<Self>;
}

macro_rules! instances {
    ($($element:ty),*) => {$(
        impl AppendElement for $element {
            fn append_kernel() -> Append<$element> {
                kernels::append::kernel::<$element>()
            }
        }
    )*};
}
instances!(f16, bf16);

/// The arguments of [`append`]: memory of any kind that the device reaches.
#[derive(Clone, Copy, Debug)]
pub struct AppendHandles<E> {
    /// New keys, [sequences, query_tokens, kv_heads, head_dim].
    pub new_keys: Global<E>,
    /// New values, like the keys.
    pub new_values: Global<E>,
    /// Where each token belongs, [sequences, query_tokens]: a token past the table's last block is left out.
    pub positions: Global<u32>,
    /// [sequences, max_blocks].
    pub table: Global<u32>,
    /// \[sequences\]: one more than the position of the sequence's last new token.
    pub lengths: GlobalMut<u32>,
    /// The pool's keys, [blocks, kv_heads, 16, head_dim].
    pub keys: GlobalMut<E>,
    /// Its values.
    pub values: GlobalMut<E>,
}

/// Copies `problem.query_tokens` new tokens of each sequence to the blocks of a paged cache, and sets the
/// lengths. It allocates nothing, waits for nothing and can be captured: positions that a step counts up make
/// each replay append the next tokens.
///
/// # Safety
/// Until the launch has finished (for a capture: until each run of the graph has):
/// - the memory behind every handle is there, reached by the stream's device, and nothing else writes it, or
///   touches what is written;
/// - no two tokens have one place, and the table's entries up to each position are blocks of the pools.
///
/// # Errors
/// [`Error::Length`] for handles of another problem; those of [`Problem::checked`]; what the launch reports.
pub unsafe fn append<E: AppendElement>(
    stream: &Stream,
    problem: Problem,
    handles: AppendHandles<E>,
) -> Result<()> {
    let problem = problem.checked()?;
    let Problem { sequences, kv_heads, head_dim, query_tokens, .. } = problem;
    let tokens = sequences as usize * query_tokens as usize;
    let elements = tokens * kv_heads as usize * head_dim as usize;
    let block = (BLOCK_TOKENS * kv_heads) as usize * head_dim as usize;
    for (what, got, expected) in [
        ("the buffer of new keys", handles.new_keys.len(), elements),
        ("the buffer of new values", handles.new_values.len(), elements),
        ("the buffer of positions", handles.positions.len(), tokens),
        ("the block table", handles.table.len(), sequences as usize * problem.max_blocks() as usize),
        ("the buffer of lengths", handles.lengths.len(), sequences as usize),
        ("the buffer of keys", handles.keys.len(), handles.keys.len() / block * block),
        ("the buffer of values", handles.values.len(), handles.keys.len()),
    ] {
        if got != expected {
            return Err(Error::Length { what, got, expected });
        }
    }
    let shape = AppendShape { tokens: query_tokens, kv_heads, head_dim, max_blocks: problem.max_blocks() };
    let AppendHandles { new_keys, new_values, positions, table, lengths, keys, values } = handles;
    let arguments =
        kernels::append::Args { new_keys, new_values, positions, table, lengths, keys, values, shape };
    // One block a token: the problem's rows fit a launch, and they are no fewer.
    let launch = LaunchShape::new(tokens as u32, APPEND_THREADS);
    // SAFETY: lengths as just checked, a position past the table is left out, and the rest is this function's
    // contract.
    unsafe { stream.launch(&E::append_kernel(), launch, arguments)? };
    Ok(())
}
