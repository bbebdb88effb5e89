//! Launches of the kernels around the products: fixed point, embedding, rotation, the choice of a token.
//!
//! All of them take handles, allocate nothing and wait for nothing.

use super::linear::{DeviceWeights, Error, Input, Result, WeightKind};
use crate::Stream;
use half::{bf16, f16};
use kernels_gpu::Element;
use kernels_gpu::model::activations::{Gated, Normed, Plain, SourceShape, THREADS, sums_layout};
use kernels_gpu::model::format::{Q4_0, Q4_1, Q8_0};
use kernels_gpu::model::rotation::{ROPE_THREADS, RopeShape};
use kernels_gpu::model::{
    CHOICE_THREADS, SampleShape, choose_largest, choose_sampled, embed, quantize_activations, rope,
    rope_append, sample_layout,
};
use simt::{Global, GlobalMut, Kernel, LaunchShape};

pub use super::linear::record_words;

fn count(what: &'static str, value: usize, most: usize, limit: &'static str) -> Result<u32> {
    if value == 0 || value > most { Err(Error::Argument { what, value, limit }) } else { Ok(value as u32) }
}

fn tokens_of(tokens: usize) -> Result<u32> {
    count("tokens", tokens, 65535, "a launch takes 1 to 65535")
}

/// Records of `input` (values [tokens, columns], [tokens, 2·columns] for SwiGLU) to `records` [tokens, columns / 32, 32 words].
///
/// # Safety
/// As [`Stream::launch`]: the handles reach memory of the stream's device of these lengths until the launch has finished, and
/// nothing else touches `records`; a norm's weights are what no launch writes.
///
/// # Errors
/// [`Error::Columns`], [`Error::Argument`]; what the launch reports.
pub unsafe fn quantize(
    stream: &Stream,
    input: Input,
    records: GlobalMut<u32>,
    tokens: usize,
    columns: usize,
) -> Result<()> {
    let tokens = tokens_of(tokens)?;
    if columns == 0 || !columns.is_multiple_of(32) || columns > u32::MAX as usize / 64 {
        return Err(Error::Columns { columns });
    }
    let columns = columns as u32;
    let (kernel, x, weight, stride, epsilon) = match input {
        Input::Records(_) => return Ok(()),
        Input::Plain { x } => (quantize_activations::kernel::<Plain>(), x, x, columns, 0.0),
        Input::Normed { x, weight, epsilon } => {
            (quantize_activations::kernel::<Normed>(), x, weight, columns, epsilon)
        }
        Input::Gated { x } => (quantize_activations::kernel::<Gated>(), x, x, 2 * columns, 0.0),
    };
    let shape = SourceShape { columns, stride, epsilon, padding: 0 };
    let launch = LaunchShape::new((tokens, columns.div_ceil(4 * THREADS)), THREADS).shared(sums_layout().1);
    // SAFETY: the caller's word; blocks for each token.
    unsafe { stream.launch(&kernel, launch, quantize_activations::Args { x, weight, records, shape }) }?;
    Ok(())
}

/// Rows `tokens` \[count\] of `weights` to `out` [count, columns]; a row that is not there is NaN.
///
/// # Safety
/// As [`quantize`].
///
/// # Errors
/// [`Error::Argument`]; what the launch reports.
pub unsafe fn embedding(
    stream: &Stream,
    weights: &DeviceWeights,
    tokens: Global<u32>,
    out: GlobalMut<f32>,
    count: usize,
) -> Result<()> {
    let count = tokens_of(count)?;
    let (codes, scales) = weights.handles();
    let kernel = embed_kernel(weights.kind());
    let args = embed::Args {
        codes,
        scales,
        tokens,
        out,
        rows: weights.rows() as u32,
        blocks: weights.blocks() as u32,
    };
    // SAFETY: the caller's word; a block a token.
    unsafe { stream.launch(&kernel, LaunchShape::new(count, THREADS), args) }?;
    Ok(())
}

/// The kernels of [`embedding`].
type Embed = Kernel<embed::Args>;

/// The kernel of [`embedding`].
pub(super) fn embed_kernel(kind: WeightKind) -> Embed {
    match kind {
        WeightKind::Q4_1 => embed::kernel::<Q4_1>(),
        WeightKind::Q4_0 => embed::kernel::<Q4_0>(),
        WeightKind::Q8_0 => embed::kernel::<Q8_0>(),
        WeightKind::F16 => embed::kernel::<f16>(),
        WeightKind::Bf16 => embed::kernel::<bf16>(),
        WeightKind::F32 => embed::kernel::<f32>(),
    }
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

/// Rotates queries and keys and hands all three on in type `E`: see [`kernels_gpu::model::rotation`].
///
/// # Safety
/// As [`quantize`].
///
/// # Errors
/// [`Error::Argument`] for odd or missing extents; what the launch reports.
pub unsafe fn rotate<E: RopeElement>(
    stream: &Stream,
    pairing: Pairing,
    args: rope::Args<E>,
    tokens: usize,
) -> Result<()> {
    let tokens = tokens_of(tokens)?;
    check_rope(args.shape)?;
    let launch = LaunchShape::new((args.shape.pairs().div_ceil(ROPE_THREADS), tokens), ROPE_THREADS);
    // SAFETY: the caller's word; a thread a pair.
    unsafe { stream.launch(&E::kernel(pairing), launch, args) }?;
    Ok(())
}

/// The kernel of [`rotate_and_append`].
type RopeAppend = Kernel<rope_append::Args>;

/// The kernel of [`rotate_and_append`].
pub(super) fn rope_append_kernel(pairing: Pairing) -> RopeAppend {
    match pairing {
        Pairing::HalfSplit => rope_append::kernel::<0>(),
        Pairing::Interleaved => rope_append::kernel::<1>(),
    }
}

/// [`rotate`] of the tokens of one sequence and [`append`](crate::dense::append) to its dense cache, in one launch.
///
/// # Safety
/// As [`quantize`]; no two tokens have one place, and the table's entries up to each position are blocks of the pools. A token
/// past the table is left out.
///
/// # Errors
/// As [`rotate`].
pub unsafe fn rotate_and_append(
    stream: &Stream,
    pairing: Pairing,
    args: rope_append::Args,
    tokens: usize,
) -> Result<()> {
    let tokens = tokens_of(tokens)?;
    if args.max_blocks as usize > args.table.len() {
        let limit = "the table has no more entries";
        return Err(Error::Argument { what: "max_blocks", value: args.max_blocks as usize, limit });
    }
    check_rope(args.shape)?;
    let launch = LaunchShape::new((args.shape.pairs().div_ceil(ROPE_THREADS), tokens), ROPE_THREADS);
    // SAFETY: the caller's word; a thread a pair.
    unsafe { stream.launch(&rope_append_kernel(pairing), launch, args) }?;
    Ok(())
}

/// Whether extents can be rotated.
pub(super) fn check_rope(shape: RopeShape) -> Result<()> {
    let RopeShape { q_heads, kv_heads, head_dim, rotary } = shape;
    let limit = "head_dim is even and at most 65536";
    if head_dim == 0 || head_dim > 65536 || !head_dim.is_multiple_of(2) {
        return Err(Error::Argument { what: "head_dim", value: head_dim as usize, limit });
    }
    if rotary > head_dim || !rotary.is_multiple_of(2) {
        let limit = "the channels that turn are an even number, at most head_dim";
        return Err(Error::Argument { what: "rotary", value: rotary as usize, limit });
    }
    count("query heads", q_heads as usize, 16384, "there are 1 to 16384")?;
    count("KV heads", kv_heads as usize, 8192, "there are 1 to 8192")?;
    Ok(())
}

/// How a token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Choice {
    /// The most likely one.
    Greedy,
    /// A draw.
    Sampled {
        /// Divides the logits; greater than 0.
        temperature: f32,
        /// The nucleus's mass, above 0 and at most 1.
        top_p: f32,
        /// The draws' key; the position is the counter.
        seed: u64,
    },
}

impl Choice {
    /// The kernel's view of a draw; `None` for the most likely token.
    ///
    /// # Errors
    /// [`Error::Sampling`] for numbers that mean nothing.
    pub fn shape(self, vocabulary: usize) -> Result<Option<SampleShape>> {
        let vocabulary = count("the vocabulary", vocabulary, 1 << 30, "it has 1 to 2^30 tokens")?;
        let Choice::Sampled { temperature, top_p, seed } = self else { return Ok(None) };
        let sharpness = std::f32::consts::LOG2_E / temperature;
        // A NaN is in no range.
        if !(temperature > 0.0 && temperature.is_finite() && sharpness.is_finite()) {
            return Err(Error::Sampling {
                what: "temperature",
                value: temperature,
                limit: "give a number above 0",
            });
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            let limit = "give a number above 0 and at most 1";
            return Err(Error::Sampling { what: "top-p", value: top_p, limit });
        }
        let top_p = (f64::from(top_p) * 65536.0).round() as u32;
        Ok(Some(SampleShape { seed, vocabulary, sharpness, top_p, padding: 0 }))
    }
}

/// Chooses a token of each sequence's `logits` [sequences, vocabulary], writes it to `tokens` \[sequences\], and counts
/// `positions` \[sequences\] up by one: both where the next step reads them. A draw's counter is the position before.
///
/// # Safety
/// As [`quantize`].
///
/// # Errors
/// [`Error::Sampling`], [`Error::Argument`]; what the launch reports.
pub unsafe fn choose(
    stream: &Stream,
    choice: Choice,
    logits: Global<f32>,
    tokens: GlobalMut<u32>,
    positions: GlobalMut<u32>,
    sequences: usize,
    vocabulary: usize,
) -> Result<()> {
    let shape = choice.shape(vocabulary)?;
    let grid = count("sequences", sequences, 65535, "a launch takes 1 to 65535")?;
    let launch = LaunchShape::new(grid, CHOICE_THREADS);
    match shape {
        // SAFETY: the caller's word; a block a sequence.
        None => unsafe {
            let args = choose_largest::Args { logits, tokens, positions, vocabulary: vocabulary as u32 };
            stream.launch(&choose_largest::kernel(), launch.shared(256), args)
        },
        // SAFETY: as above.
        Some(shape) => unsafe {
            let args = choose_sampled::Args { logits, tokens, positions, shape };
            stream.launch(&choose_sampled::kernel(), launch.shared(sample_layout().bytes), args)
        },
    }?;
    Ok(())
}
