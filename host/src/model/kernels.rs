//! Launches of the kernels around the products: fixed point, embedding, the choice of a token.
//!
//! All of them take handles, allocate nothing and wait for nothing.

use super::linear::{DeviceWeights, Error, Input, Result, WeightKind};
use crate::Stream;
use half::{bf16, f16};
use kernels_gpu::model::activations::{Gated, Normed, Plain, SourceShape, THREADS, sums_layout};
use kernels_gpu::model::format::{Q4_0, Q4_1, Q8_0};
use kernels_gpu::model::prompt::PANEL_TOKENS;
use kernels_gpu::model::{
    CHOICE_THREADS, SampleShape, choose_largest, choose_sampled, embed, panel_activations,
    quantize_activations, sample_layout,
};
use simt::{Global, GlobalMut, Kernel, LaunchShape};

pub use super::linear::{panel_words, record_words};

fn count(what: &'static str, value: usize, most: usize, limit: &'static str) -> Result<u32> {
    if value == 0 || value > most { Err(Error::Argument { what, value, limit }) } else { Ok(value as u32) }
}

fn tokens_of(tokens: usize) -> Result<u32> {
    count("tokens", tokens, 65535, "a launch takes 1 to 65535")
}

/// Records of `input` (values [tokens, columns], [tokens, 2·columns] for SwiGLU) to `records` [tokens,
/// columns / 32, 32 words].
///
/// # Safety
/// As [`Stream::launch`]: the handles reach memory of the stream's device of these lengths until the launch
/// has finished, and nothing else touches `records`; a norm's weights are what no launch writes.
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
    if let Input::Records(_) = input {
        return Ok(());
    }
    let tokens = tokens_of(tokens)?;
    let (variant, x, weight, shape) = source(input, columns)?;
    let kernels = [
        quantize_activations::kernel::<Plain>(),
        quantize_activations::kernel::<Normed>(),
        quantize_activations::kernel::<Gated>(),
    ];
    let grid = (tokens, shape.columns.div_ceil(4 * THREADS));
    let launch = LaunchShape::new(grid, THREADS).shared(sums_layout().1);
    let args = quantize_activations::Args { x, weight, records, shape };
    // SAFETY: the caller's word; blocks for each token.
    unsafe { stream.launch(&kernels[variant], launch, args) }?;
    Ok(())
}

/// Panels of `input` to `panels`, [`panel_words`] of them: what [`quantize`] does, for
/// [`ProductKernel::Prompt`](super::linear::ProductKernel::Prompt).
///
/// # Safety
/// As [`quantize`].
///
/// # Errors
/// As [`quantize`].
pub unsafe fn panels(
    stream: &Stream,
    input: Input,
    panels: GlobalMut<u32>,
    tokens: usize,
    columns: usize,
) -> Result<()> {
    if let Input::Panels(_) = input {
        return Ok(());
    }
    let tokens = tokens_of(tokens)?;
    let (variant, x, weight, shape) = source(input, columns)?;
    let kernels = [
        panel_activations::kernel::<Plain>(),
        panel_activations::kernel::<Normed>(),
        panel_activations::kernel::<Gated>(),
    ];
    let grid = (tokens.next_multiple_of(PANEL_TOKENS), shape.columns.div_ceil(4 * THREADS));
    let launch = LaunchShape::new(grid, THREADS).shared(sums_layout().1);
    let args = panel_activations::Args { x, weight, panels, shape, tokens };
    // SAFETY: the caller's word; blocks for each token, and for those that fill the last panel up.
    unsafe { stream.launch(&kernels[variant], launch, args) }?;
    Ok(())
}

/// An input's number, its values, a norm's weights and their shape.
type Values = (usize, Global<f32>, Global<f32>, SourceShape);

fn source(input: Input, columns: usize) -> Result<Values> {
    if columns == 0 || !columns.is_multiple_of(32) || columns > u32::MAX as usize / 64 {
        return Err(Error::Columns { columns });
    }
    let columns = columns as u32;
    let (variant, x, weight, stride, epsilon) = match input {
        Input::Records(_) | Input::Panels(_) => {
            let limit = "records and panels are not made of each other: give the values";
            return Err(Error::Argument {
                what: "columns of an input that is quantized",
                value: columns as usize,
                limit,
            });
        }
        Input::Plain { x } => (0, x, x, columns, 0.0),
        Input::Normed { x, weight, epsilon } => (1, x, weight, columns, epsilon),
        Input::Gated { x } => (2, x, x, 2 * columns, 0.0),
    };
    Ok((variant, x, weight, SourceShape { columns, stride, epsilon, padding: 0 }))
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

/// What a token is chosen from, and where it goes, of each sequence.
#[derive(Clone, Copy, Debug)]
pub struct Choosing {
    /// [sequences, vocabulary].
    pub logits: Global<f32>,
    /// What draws are keyed by besides seed and position, \[sequences\].
    pub numbers: Global<u32>,
    /// The tokens that are chosen, \[sequences\].
    pub tokens: GlobalMut<u32>,
    /// The positions of the tokens before, \[sequences\]: they count up by one.
    pub positions: GlobalMut<u32>,
}

/// Chooses a token of each sequence, and counts its position up: both where the next step reads them. A
/// draw's counter is the position before.
///
/// # Safety
/// As [`quantize`].
///
/// # Errors
/// [`Error::Sampling`], [`Error::Argument`]; what the launch reports.
pub unsafe fn choose(
    stream: &Stream,
    choice: Choice,
    rows: Choosing,
    sequences: usize,
    vocabulary: usize,
) -> Result<()> {
    let shape = choice.shape(vocabulary)?;
    let grid = count("sequences", sequences, 65535, "a launch takes 1 to 65535")?;
    let launch = LaunchShape::new(grid, CHOICE_THREADS);
    let Choosing { logits, numbers, tokens, positions } = rows;
    match shape {
        // SAFETY: the caller's word; a block a sequence.
        None => unsafe {
            let args = choose_largest::Args { logits, tokens, positions, vocabulary: vocabulary as u32 };
            stream.launch(&choose_largest::kernel(), launch.shared(256), args)
        },
        // SAFETY: as above.
        Some(shape) => unsafe {
            let args = choose_sampled::Args { logits, numbers, tokens, positions, shape };
            stream.launch(&choose_sampled::kernel(), launch.shared(sample_layout().bytes), args)
        },
    }?;
    Ok(())
}
