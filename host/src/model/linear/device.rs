//! Packed weights on a device, and the launches of their products.

use super::{Error, PackedWeights, Result, WeightKind};
use crate::{Buffer, Device, Stream};
use half::{bf16, f16};
use kernels_gpu::model::activations::{Gated, Normed, Plain, SourceShape, THREADS};
use kernels_gpu::model::batch::{BATCH_ROWS, BATCH_TOKENS, batch_layout};
use kernels_gpu::model::fixed::RECORD_WORDS;
use kernels_gpu::model::format::{GROUP, Q4_0, Q4_1, Q8_0};
use kernels_gpu::model::prefill::{PREFILL_ROWS, PREFILL_THREADS, PREFILL_TOKENS, prefill_bytes};
use kernels_gpu::model::product::{HAS_BIAS, HAS_RESIDUAL, LinearShape, linear_layout};
use kernels_gpu::model::prompt::{
    PANEL_TOKENS, PANEL_WORDS, PROMPT_GROUPS, PROMPT_ROWS, PROMPT_THREADS, prompt_bytes,
};
use kernels_gpu::model::{linear, linear_batch, linear_fused, linear_prefill, linear_prompt};
use simt::{Global, GlobalMut, Kernel, LaunchShape, TensorMap, TensorMapShape};

/// The matrix-vector kernels over records in global memory.
pub(in crate::model) type Product = Kernel<linear::Args>;

/// The tensor-core kernels for batches.
pub(in crate::model) type Batch = Kernel<linear_batch::Args>;

/// The tensor-core kernels for prompts.
pub(in crate::model) type Prefill = Kernel<linear_prefill::Args>;

/// The kernels for prompts by groups of four warps.
pub(in crate::model) type Prompt = Kernel<linear_prompt::Args>;

/// The kernels that make records themselves.
pub(in crate::model) type Fused = Kernel<linear_fused::Args>;

/// Which products of a few tokens quantize their input themselves, again in each thread block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fusing {
    /// Channels of a row, at most.
    pub columns: usize,
    /// Thread blocks of the product, at most.
    pub blocks: usize,
}

impl Default for Fusing {
    fn default() -> Self {
        Fusing { columns: 2048, blocks: 512 }
    }
}

/// Up to this many tokens a product is that of a batch: its thread blocks share a row's weights, and have
/// eight tokens each. Beyond, tokens are work enough for a warp to have whole rows, for 32 of them.
pub const BATCH_UP_TO: usize = 32;

/// Products that make their records themselves are for fewer tokens than this: each token's product reads the
/// weights, from the second-level cache.
const FUSE_BELOW: usize = 5;

/// From this many tokens on a product takes [`linear_prompt`](fn@linear_prompt), where there is the kernel.
const PANELS_FROM: usize = BATCH_UP_TO + 1;

/// What a product multiplies.
#[derive(Clone, Copy, Debug)]
pub enum Input {
    /// Records [tokens, k / 32, 32 words].
    Records(Global<u32>),
    /// Panels [⌈tokens / 64⌉, k / 32, 2176 words], of [`panels`](crate::model::kernels::panels).
    Panels(Global<u32>),
    /// f32 [tokens, k], quantized as they are.
    Plain {
        /// The values.
        x: Global<f32>,
    },
    /// RMSNorm of f32 [tokens, k].
    Normed {
        /// The values.
        x: Global<f32>,
        /// The norm's weights, \[k\], which no launch writes: they may be read before those ahead are done.
        weight: Global<f32>,
        /// ε.
        epsilon: f32,
    },
    /// SwiGLU of f32 [tokens, 2·k]: gates, then what they multiply.
    Gated {
        /// The values.
        x: Global<f32>,
    },
}

/// What is added to a product.
#[derive(Clone, Copy, Debug, Default)]
pub struct Epilogue {
    /// \[rows\].
    pub bias: Option<Global<f32>>,
    /// [tokens, rows]; may be the output itself.
    pub residual: Option<Global<f32>>,
}

/// Which kernel a product takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProductKernel {
    /// The one that suits the input, the number of tokens and the row's length.
    Auto,
    /// A thread block's warps share rows: one token at a time.
    Decode,
    /// Tensor cores, eight tokens at a time; a thread block's warps share rows. Integer codes only.
    Batch,
    /// Tensor cores, 32 tokens at a time. Integer codes only.
    Prefill,
    /// Tensor cores by groups of four warps, 64 tokens at a time: of panels, which no other takes. Integer
    /// codes only, on the CPU and on GPUs of compute capability 9.0.
    Prompt,
}

/// Packed weights on a device. A run allocates nothing and waits for nothing, so it can be captured.
#[derive(Debug)]
pub struct DeviceWeights {
    kind: WeightKind,
    rows: u32,
    columns: u32,
    fusing: Fusing,
    codes: Buffer<u32>,
    scales: Buffer<u16>,
    /// Of codes and scales, for [`ProductKernel::Prompt`], where that is.
    maps: Option<Buffer<TensorMap>>,
    /// Tokens from which on a product takes panels.
    panels_from: usize,
}

impl DeviceWeights {
    /// Copies weights to a device.
    ///
    /// # Errors
    /// Out of memory, and what else the device reports.
    pub fn new(device: &Device, packed: &PackedWeights) -> Result<DeviceWeights> {
        // No kernel reads the scales of a kind that has none, but a handle wants memory.
        let scales = if packed.scales().is_empty() { &[0][..] } else { packed.scales() };
        let (codes, scales) =
            (Buffer::from_slice(device, packed.codes())?, Buffer::from_slice(device, scales)?);
        let maps = match prompt_kernel(packed.kind()) {
            None => None,
            Some((kernel, shared)) => match device
                .prepare(&kernel, prompt_launch(1, 1, shared))
                .map_err(Error::from)
                .and_then(|()| tensor_maps(device, packed, &codes, &scales))
            {
                Ok(maps) => Some(maps),
                Err(Error::Device(error)) if is_lacking(&error) => None,
                Err(error) => return Err(error),
            },
        };
        // The emulator takes longer for it, not less.
        let on_gpu = device.info().compute_capability.is_some();
        Ok(DeviceWeights {
            kind: packed.kind(),
            rows: packed.rows() as u32,
            columns: packed.columns() as u32,
            fusing: Fusing::default(),
            codes,
            scales,
            maps,
            panels_from: if on_gpu { PANELS_FROM } else { usize::MAX },
        })
    }

    /// How they are stored.
    pub fn kind(&self) -> WeightKind {
        self.kind
    }

    /// Outputs of the product.
    pub fn rows(&self) -> usize {
        self.rows as usize
    }

    /// Inputs of the product.
    pub fn columns(&self) -> usize {
        self.columns as usize
    }

    /// Blocks of 32 channels of a row.
    pub fn blocks(&self) -> usize {
        self.columns as usize / 32
    }

    /// The tiles' codes and scales.
    pub fn handles(&self) -> (Global<u32>, Global<u16>) {
        (self.codes.global(), self.scales.global())
    }

    /// Whether a product of so many tokens takes values and makes the records itself; otherwise
    /// [`quantize`](crate::model::kernels::quantize) must come before it.
    pub fn fuses(&self, tokens: usize) -> bool {
        let shape = self.shape(1);
        let blocks = shape.groups().div_ceil(shape.groups_a_block()) as usize;
        let short =
            self.columns() <= self.fusing.columns && blocks.saturating_mul(tokens) <= self.fusing.blocks;
        self.kind.is_quantized() && tokens < FUSE_BELOW && short
    }

    /// Whether a product of so many tokens takes panels, which [`panels`](crate::model::kernels::panels) must
    /// make ahead of it, and not records: on GPUs that have the kernel, of more tokens than a batch has.
    pub fn takes_panels(&self, tokens: usize) -> bool {
        self.maps.is_some() && tokens >= self.panels_from
    }

    /// Whether the device has the kernel for panels.
    pub fn has_panels(&self) -> bool {
        self.maps.is_some()
    }

    /// Sets from how many tokens on a product takes panels, where it can: no bits change, times do.
    pub fn set_panels_from(&mut self, tokens: usize) {
        self.panels_from = tokens;
    }

    /// Sets what [`fuses`](Self::fuses) goes by: no bits change, times do.
    pub fn set_fusing(&mut self, fusing: Fusing) {
        self.fusing = fusing;
    }

    /// `out` [tokens, rows] = W·v + bias + residual: one launch.
    ///
    /// # Safety
    /// As [`Stream::launch`]: every handle reaches memory of the stream's device that is as long as said,
    /// until the launch has finished; `out` is touched by nothing else meanwhile, and overlaps no input but
    /// `residual`, with which it agrees element by element if at all. No launch writes a norm's weights.
    ///
    /// # Errors
    /// [`Error::Argument`] for no tokens, more than 65535 of them, or a kernel that the weights or the input
    /// do not suit; what the launch reports.
    pub unsafe fn run_on(
        &self,
        stream: &Stream,
        kernel: ProductKernel,
        input: Input,
        epilogue: Epilogue,
        out: GlobalMut<f32>,
        tokens: usize,
    ) -> Result<()> {
        if tokens == 0 || tokens > 65535 {
            return Err(Error::Argument {
                what: "tokens",
                value: tokens,
                limit: "a product takes 1 to 65535",
            });
        }
        let mut shape = self.shape(tokens as u32);
        if epilogue.bias.is_some() {
            shape.flags |= HAS_BIAS;
        }
        if epilogue.residual.is_some() {
            shape.flags |= HAS_RESIDUAL;
        }
        let (variant, x, weight, stride, epsilon) = match input {
            // SAFETY: the caller's word.
            Input::Records(records) => unsafe {
                return self.run_records(stream, kernel, records, epilogue, out, shape);
            },
            // SAFETY: the caller's word.
            Input::Panels(panels) => unsafe {
                return self.run_panels(stream, kernel, panels, epilogue, out, shape);
            },
            Input::Plain { x } => (0, x, x, self.columns, 0.0),
            Input::Normed { x, weight, epsilon } => (1, x, weight, self.columns, epsilon),
            Input::Gated { x } => (2, x, x, 2 * self.columns, 0.0),
        };
        if !matches!(kernel, ProductKernel::Auto | ProductKernel::Decode) {
            let limit = "the tensor-core kernels take records or panels: quantize first";
            return Err(Error::Argument { what: "an input of values", value: tokens, limit });
        }
        let kernels = fused_kernels(self.kind).ok_or_else(|| self.floats(NO_FUSED))?;
        let (codes, scales) = self.handles();
        let (bias, residual) = added(epilogue, out);
        let source = SourceShape { columns: self.columns, stride, epsilon, padding: 0 };
        let launch = decode_launch(shape).shared(linear_layout(shape.blocks).bytes);
        let args = linear_fused::Args { codes, scales, x, weight, bias, residual, out, source, shape };
        // SAFETY: the caller's word; the grid covers rows and tokens, the kernel stays inside both, and the
        // shared memory holds a token's records. No launch writes weights.
        unsafe { stream.launch(&kernels[variant], launch, args) }?;
        Ok(())
    }

    /// The product's extents, with nothing added.
    fn shape(&self, tokens: u32) -> LinearShape {
        LinearShape { rows: self.rows, blocks: self.columns / 32, tokens, flags: 0 }
    }

    /// # Safety
    /// As [`run_on`](Self::run_on).
    unsafe fn run_records(
        &self,
        stream: &Stream,
        kernel: ProductKernel,
        records: Global<u32>,
        epilogue: Epilogue,
        out: GlobalMut<f32>,
        shape: LinearShape,
    ) -> Result<()> {
        let (codes, scales) = self.handles();
        let (bias, residual) = added(epilogue, out);
        if kernel == ProductKernel::Prompt {
            let limit = "the kernel Prompt takes panels: make them in place of records";
            return Err(Error::Argument { what: "tokens", value: shape.tokens as usize, limit });
        }
        let kernel = match kernel {
            ProductKernel::Auto if !self.kind.is_quantized() => ProductKernel::Decode,
            ProductKernel::Auto => match shape.tokens as usize {
                0..=1 => ProductKernel::Decode,
                2..=BATCH_UP_TO => ProductKernel::Batch,
                _ => ProductKernel::Prefill,
            },
            chosen => chosen,
        };
        if kernel == ProductKernel::Batch {
            let kernel = batch_kernel(self.kind).ok_or_else(|| self.floats(NO_TENSOR_CORES))?;
            if shape.tokens.checked_mul(shape.blocks * RECORD_WORDS).is_none() {
                let limit = "the kernel for batches counts the words of its records in 32 bits: use Prefill";
                return Err(Error::Argument { what: "tokens", value: shape.tokens as usize, limit });
            }
            let grid = (shape.tokens.div_ceil(BATCH_TOKENS), shape.rows.div_ceil(BATCH_ROWS));
            let launch = LaunchShape::new(grid, THREADS).shared(batch_layout().bytes);
            let args = linear_batch::Args { codes, scales, records, bias, residual, out, shape };
            // SAFETY: the caller's word; the grid covers rows and tokens, and the kernel stays inside both.
            // No launch writes weights.
            unsafe { stream.launch(&kernel, launch, args) }?;
            return Ok(());
        }
        if kernel == ProductKernel::Prefill {
            let (kernel, shared) = prefill_kernel(self.kind).ok_or_else(|| self.floats(NO_TENSOR_CORES))?;
            let grid = (shape.tokens.div_ceil(PREFILL_TOKENS), shape.rows.div_ceil(PREFILL_ROWS));
            let launch = LaunchShape::new(grid, PREFILL_THREADS).shared(shared);
            // SAFETY: the caller's word; the grid covers rows and tokens, and the kernel stays inside both.
            unsafe {
                stream.launch(
                    &kernel,
                    launch,
                    linear_prefill::Args { codes, scales, records, bias, residual, out, shape },
                )
            }?;
            return Ok(());
        }
        let launch = decode_launch(shape).shared(linear_layout(0).bytes);
        let args = linear::Args { codes, scales, records, bias, residual, out, shape };
        // SAFETY: as above; no launch writes weights.
        unsafe { stream.launch(&decode_kernel(self.kind), launch, args) }?;
        Ok(())
    }

    /// # Safety
    /// As [`run_on`](Self::run_on).
    unsafe fn run_panels(
        &self,
        stream: &Stream,
        kernel: ProductKernel,
        panels: Global<u32>,
        epilogue: Epilogue,
        out: GlobalMut<f32>,
        shape: LinearShape,
    ) -> Result<()> {
        let refused = |limit| Error::Argument { what: "tokens", value: shape.tokens as usize, limit };
        if !matches!(kernel, ProductKernel::Auto | ProductKernel::Prompt) {
            return Err(refused("panels are for the kernel Prompt: make records for the others"));
        }
        let (kernel, shared) = prompt_kernel(self.kind).ok_or_else(|| self.floats(NO_TENSOR_CORES))?;
        let launch = prompt_launch(shape.tokens, shape.rows, shared);
        let Some(maps) = &self.maps else {
            stream.device().prepare(&kernel, launch)?;
            return Err(refused("this driver makes no tensor maps for panels: make records"));
        };
        let (bias, residual) = added(epilogue, out);
        let args = linear_prompt::Args { maps: maps.global(), panels, bias, residual, out, shape };
        // SAFETY: the caller's word; the grid covers rows and tokens, and the kernel stays inside both. The
        // maps are of this matrix, whose groups and blocks the shape has.
        unsafe { stream.launch(&kernel, launch, args) }?;
        Ok(())
    }

    fn floats(&self, limit: &'static str) -> Error {
        Error::Argument { what: "a float matrix's number of rows", value: self.rows(), limit }
    }
}

const NO_TENSOR_CORES: &str = "the tensor-core kernels take integer codes: use Auto or Decode";
const NO_FUSED: &str = "products of float weights take records: quantize first";

/// The matrix-vector kernel over records.
pub(in crate::model) fn decode_kernel(kind: WeightKind) -> Product {
    match kind {
        WeightKind::Q4_1 => linear::kernel::<Q4_1>(),
        WeightKind::Q4_0 => linear::kernel::<Q4_0>(),
        WeightKind::Q8_0 => linear::kernel::<Q8_0>(),
        WeightKind::F16 => linear::kernel::<f16>(),
        WeightKind::Bf16 => linear::kernel::<bf16>(),
        WeightKind::F32 => linear::kernel::<f32>(),
    }
}

/// The kernel for batches, for integer codes.
pub(in crate::model) fn batch_kernel(kind: WeightKind) -> Option<Batch> {
    match kind {
        WeightKind::Q4_1 => Some(linear_batch::kernel::<Q4_1>()),
        WeightKind::Q4_0 => Some(linear_batch::kernel::<Q4_0>()),
        WeightKind::Q8_0 => Some(linear_batch::kernel::<Q8_0>()),
        _ => None,
    }
}

/// The tensor-core kernel for prompts, for integer codes, and its shared memory in bytes.
pub(in crate::model) fn prefill_kernel(kind: WeightKind) -> Option<(Prefill, u32)> {
    match kind {
        WeightKind::Q4_1 => Some((linear_prefill::kernel::<Q4_1>(), prefill_bytes::<Q4_1>())),
        WeightKind::Q4_0 => Some((linear_prefill::kernel::<Q4_0>(), prefill_bytes::<Q4_0>())),
        WeightKind::Q8_0 => Some((linear_prefill::kernel::<Q8_0>(), prefill_bytes::<Q8_0>())),
        _ => None,
    }
}

/// The kernel for prompts by groups of four warps, for integer codes, and its shared memory in bytes.
pub(in crate::model) fn prompt_kernel(kind: WeightKind) -> Option<(Prompt, u32)> {
    match kind {
        WeightKind::Q4_1 => Some((linear_prompt::kernel::<Q4_1>(), prompt_bytes::<Q4_1>())),
        WeightKind::Q4_0 => Some((linear_prompt::kernel::<Q4_0>(), prompt_bytes::<Q4_0>())),
        WeightKind::Q8_0 => Some((linear_prompt::kernel::<Q8_0>(), prompt_bytes::<Q8_0>())),
        _ => None,
    }
}

/// Whether a device has no [`linear_prompt`](fn@linear_prompt), or a driver not what it needs.
fn is_lacking(error: &crate::Error) -> bool {
    use crate::Error::{KernelMissing, KernelNeeds, KernelOnly, NoTensorMaps, Shape};
    matches!(
        error,
        KernelMissing { .. } | KernelNeeds { .. } | KernelOnly { .. } | NoTensorMaps | Shape { .. }
    )
}

/// What [`linear_prompt`](fn@linear_prompt) copies codes and scales by.
fn tensor_maps(
    device: &Device,
    packed: &PackedWeights,
    codes: &Buffer<u32>,
    scales: &Buffer<u16>,
) -> Result<Buffer<TensorMap>> {
    let kind = packed.kind();
    let (words, halves) = (kind.tile_words() as u32, kind.tile_scales() as u32);
    let (blocks, groups) = (packed.blocks() as u64, packed.rows().div_ceil(GROUP as usize) as u64);
    let of_codes =
        TensorMapShape::new::<u32, _>([u64::from(words), blocks, groups], [words, 1, PROMPT_GROUPS]);
    let of_scales =
        TensorMapShape::new::<u16, _>([u64::from(halves), blocks, groups], [halves, 1, PROMPT_GROUPS]);
    let maps = [codes.tensor_map(0, &of_codes)?, scales.tensor_map(0, &of_scales)?];
    Ok(Buffer::from_slice(device, &maps)?)
}

/// The kernels that make records themselves, for integer codes: of values, of RMSNorm, of SwiGLU.
pub(in crate::model) fn fused_kernels(kind: WeightKind) -> Option<[Fused; 3]> {
    match kind {
        WeightKind::Q4_1 => Some([
            linear_fused::kernel::<Plain, Q4_1>(),
            linear_fused::kernel::<Normed, Q4_1>(),
            linear_fused::kernel::<Gated, Q4_1>(),
        ]),
        WeightKind::Q4_0 => Some([
            linear_fused::kernel::<Plain, Q4_0>(),
            linear_fused::kernel::<Normed, Q4_0>(),
            linear_fused::kernel::<Gated, Q4_0>(),
        ]),
        WeightKind::Q8_0 => Some([
            linear_fused::kernel::<Plain, Q8_0>(),
            linear_fused::kernel::<Normed, Q8_0>(),
            linear_fused::kernel::<Gated, Q8_0>(),
        ]),
        _ => None,
    }
}

/// The grid of the kernels for panels.
fn prompt_launch(tokens: u32, rows: u32, shared: u32) -> LaunchShape {
    LaunchShape::new((tokens.div_ceil(PANEL_TOKENS), rows.div_ceil(PROMPT_ROWS)), PROMPT_THREADS)
        .shared(shared)
}

/// The grid of the matrix-vector kernels.
fn decode_launch(shape: LinearShape) -> LaunchShape {
    LaunchShape::new((shape.tokens, shape.groups().div_ceil(shape.groups_a_block())), THREADS)
}

/// Handles of bias and residual; what is not there is not read.
fn added(epilogue: Epilogue, out: GlobalMut<f32>) -> (Global<f32>, Global<f32>) {
    (epilogue.bias.unwrap_or(out.as_const()), epilogue.residual.unwrap_or(out.as_const()))
}

/// Words of the records of `tokens` tokens of `columns` channels.
pub fn record_words(tokens: usize, columns: usize) -> usize {
    tokens * (columns / 32) * RECORD_WORDS as usize
}

/// Words of the panels of `tokens` tokens of `columns` channels.
pub fn panel_words(tokens: usize, columns: usize) -> usize {
    tokens.div_ceil(PANEL_TOKENS as usize) * (columns / 32) * PANEL_WORDS as usize
}
