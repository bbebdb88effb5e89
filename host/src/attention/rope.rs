//! Rotary position embedding (RoPE): which channels turn together, and the launches that turn them.
//!
//! All of it takes handles, allocates nothing and waits for nothing.

use super::{Error, Result};
use crate::Stream;
use half::{bf16, f16};
use kernels_gpu::Element;
pub use kernels_gpu::attention::rotation::RopeShape;
use kernels_gpu::attention::rotation::{ROPE_THREADS, blocks_of_token};
use kernels_gpu::attention::rotation::{rope, rope_append};
use simt::{Kernel, LaunchShape};

fn count(what: &'static str, value: usize, most: usize, limit: &'static str) -> Result<u32> {
    if value == 0 || value > most { Err(Error::Rotation { what, value, limit }) } else { Ok(value as u32) }
}

/// Which channels of a head turn together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// i and i + rotary/2.
    HalfSplit,
    /// 2i and 2i + 1.
    Interleaved,
}

/// Frequencies θ^(−2i/rotary) of the pairs, computed in f64.
pub fn frequencies(theta: f64, rotary: usize) -> Vec<f32> {
    (0..rotary / 2).map(|i| theta.powf(-2.0 * i as f64 / rotary as f64) as f32).collect()
}

/// The kernels' handles.
#[doc(hidden)]
pub type Rope<E> = Kernel<rope::Args<E>>;

/// A type that queries, keys and values are handed on in: f32, f16, bf16.
pub trait RopeElement: Element {
    /// The instance for a pairing.
    #[doc(hidden)]
    fn kernel(pairing: Pairing) -> Rope<Self>;
}

macro_rules! rope_elements {
    ($($element:ty),*) => {$(
        impl RopeElement for $element {
            fn kernel(pairing: Pairing) -> Rope<Self> {
                match pairing {
                    Pairing::HalfSplit => rope::kernel::<$element, 0>(),
                    Pairing::Interleaved => rope::kernel::<$element, 1>(),
                }
            }
        }
    )*};
}
rope_elements!(f32, f16, bf16);

/// Rotates queries and keys and hands all three on in type `E`: see [`kernels_gpu::attention::rotation`].
///
/// # Safety
/// As [`Stream::launch`]: the handles reach memory of the stream's device of these lengths until the launch
/// has finished, and nothing else touches what it writes.
///
/// # Errors
/// [`Error::Rotation`] for odd or missing extents; what the launch reports.
pub unsafe fn rotate<E: RopeElement>(
    stream: &Stream,
    pairing: Pairing,
    args: rope::Args<E>,
    tokens: usize,
) -> Result<()> {
    let tokens = count("tokens", tokens, 65535, "a launch takes 1 to 65535")?;
    check_rope(args.shape)?;
    let launch = LaunchShape::new((blocks_of_token(args.shape, tokens), tokens), ROPE_THREADS);
    // SAFETY: the caller's word; each pair has its thread.
    unsafe { stream.launch(&E::kernel(pairing), launch, args) }?;
    Ok(())
}

/// The kernel of [`rotate_and_append`].
type RopeAppend = Kernel<rope_append::Args>;

/// The kernel of [`rotate_and_append`].
pub(crate) fn rope_append_kernel(pairing: Pairing) -> RopeAppend {
    match pairing {
        Pairing::HalfSplit => rope_append::kernel::<0>(),
        Pairing::Interleaved => rope_append::kernel::<1>(),
    }
}

/// [`rotate`] of `tokens` tokens, `args.tokens` of each sequence, and
/// [`append`](crate::attention::dense::append) to a dense cache, in one launch.
///
/// # Safety
/// As [`rotate`]; no two tokens have one place, and the table's entries up to each position are blocks of the
/// pools. A token past the table is left out.
///
/// # Errors
/// As [`rotate`].
pub unsafe fn rotate_and_append(
    stream: &Stream,
    pairing: Pairing,
    args: rope_append::Args,
    tokens: usize,
) -> Result<()> {
    let tokens = count("tokens", tokens, 65535, "a launch takes 1 to 65535")?;
    let of_each = count("tokens of a sequence", args.tokens as usize, tokens as usize, "there are fewer")?;
    let sequences = tokens.div_ceil(of_each) as usize;
    if sequences * args.max_blocks as usize > args.table.len() {
        let limit = "the table has no more entries";
        return Err(Error::Rotation { what: "max_blocks", value: args.max_blocks as usize, limit });
    }
    if sequences > args.lengths.len() {
        return Err(Error::Rotation {
            what: "sequences",
            value: sequences,
            limit: "there are fewer lengths",
        });
    }
    check_rope(args.shape)?;
    let launch = LaunchShape::new((blocks_of_token(args.shape, tokens), tokens), ROPE_THREADS);
    // SAFETY: the caller's word; each pair has its thread.
    unsafe { stream.launch(&rope_append_kernel(pairing), launch, args) }?;
    Ok(())
}

/// Whether extents can be rotated.
pub(crate) fn check_rope(shape: RopeShape) -> Result<()> {
    let RopeShape { q_heads, kv_heads, head_dim, rotary } = shape;
    let limit = "head_dim is even and at most 65536";
    if head_dim == 0 || head_dim > 65536 || !head_dim.is_multiple_of(2) {
        return Err(Error::Rotation { what: "head_dim", value: head_dim as usize, limit });
    }
    if rotary > head_dim || !rotary.is_multiple_of(2) {
        let limit = "the channels that turn are an even number, at most head_dim";
        return Err(Error::Rotation { what: "rotary", value: rotary as usize, limit });
    }
    count("query heads", q_heads as usize, 16384, "there are 1 to 16384")?;
    count("KV heads", kv_heads as usize, 8192, "there are 1 to 8192")?;
    Ok(())
}
