//! The pass as launches on one stream: for GPUs, and for comparing the emulator with the CPU's own path.

use super::weights::{Extents, Layer, Packed};
use super::{Result, Rows};
use crate::kv::{Chunk, KvCache, New, Raw};
use crate::model::kernels::{self, Choice, Choosing, panel_words, record_words};
use crate::model::linear::{DeviceWeights, Epilogue, Fusing, Input, PackedWeights, ProductKernel};
use crate::{Buffer, Device, Graph, GraphExec, Pinned, Stream};
use half::f16;
use simt::GlobalMut;

/// The pass and the stream that it is put into.
#[derive(Debug)]
pub(super) struct Launches {
    stream: Stream,
    pass: Pass,
    /// Rows of logits that the last chunk gave.
    rows: usize,
    /// Tokens of the last chunk.
    count: usize,
}

/// Weights, and the activations of a chunk, on the device.
#[derive(Debug)]
struct Pass {
    weights: Packed<DeviceWeights, Buffer<f32>>,
    tokens: Buffer<u32>,
    positions: Buffer<u32>,
    /// What the draws of a chunk's last rows are keyed by.
    numbers: Buffer<u32>,
    x: Buffer<f32>,
    qkv: Buffer<f32>,
    queries: Buffer<f16>,
    keys: Buffer<f16>,
    values: Buffer<f16>,
    attended: Buffer<f32>,
    gate_up: Buffer<f32>,
    /// Records or panels of the widest input.
    records: Buffer<u32>,
    logits: Buffer<f32>,
}

fn to_device(
    device: &Device,
    packed: &Packed<PackedWeights, Vec<f32>>,
) -> Result<Packed<DeviceWeights, Buffer<f32>>> {
    let matrix = |m: &PackedWeights| -> Result<DeviceWeights> { Ok(DeviceWeights::new(device, m)?) };
    let vector = |v: &Vec<f32>| -> Result<Buffer<f32>> { Ok(Buffer::from_slice(device, v)?) };
    let layer = |l: &Layer<PackedWeights, Vec<f32>>| -> Result<Layer<DeviceWeights, Buffer<f32>>> {
        Ok(Layer {
            attn_norm: vector(&l.attn_norm)?,
            qkv: matrix(&l.qkv)?,
            qkv_bias: l.qkv_bias.as_ref().map(vector).transpose()?,
            output: matrix(&l.output)?,
            output_bias: l.output_bias.as_ref().map(vector).transpose()?,
            ffn_norm: vector(&l.ffn_norm)?,
            gate_up: matrix(&l.gate_up)?,
            down: matrix(&l.down)?,
        })
    };
    Ok(Packed {
        embedding: matrix(&packed.embedding)?,
        layers: packed.layers.iter().map(layer).collect::<Result<_>>()?,
        output_norm: vector(&packed.output_norm)?,
        output: packed.output.as_ref().map(matrix).transpose()?,
        frequencies: vector(&packed.frequencies)?,
        extents: packed.extents,
    })
}

impl Launches {
    pub fn new(device: &Device, weights: &Packed<PackedWeights, Vec<f32>>, chunk: usize) -> Result<Self> {
        let extents = weights.extents;
        let widest = extents.hidden.max(extents.ffn).max(extents.query_width());
        let pass = Pass {
            weights: to_device(device, weights)?,
            tokens: Buffer::new(device, chunk)?,
            positions: Buffer::new(device, chunk)?,
            numbers: Buffer::zeroed(device, chunk)?,
            x: Buffer::new(device, chunk * extents.hidden)?,
            qkv: Buffer::new(device, chunk * extents.qkv_width())?,
            queries: Buffer::new(device, chunk * extents.query_width())?,
            keys: Buffer::new(device, chunk * extents.kv_width())?,
            values: Buffer::new(device, chunk * extents.kv_width())?,
            attended: Buffer::new(device, chunk * extents.query_width())?,
            gate_up: Buffer::new(device, chunk * 2 * extents.ffn)?,
            records: Buffer::new(device, record_words(chunk, widest).max(panel_words(chunk, widest)))?,
            logits: Buffer::new(device, extents.vocab)?,
        };
        Ok(Launches { stream: Stream::new(device)?, pass, rows: 0, count: 0 })
    }

    pub fn chunk(&mut self, tokens: &[u32], chunk: Chunk, rows: Rows, cache: &mut dyn KvCache) -> Result<()> {
        let Launches { stream, pass, .. } = self;
        let (count, positions) = (tokens.len(), cache.held().positions(chunk));
        let outputs = rows.of(count);
        pass.room_for_logits(stream, outputs)?;
        cache.begin(stream, chunk)?;
        stream.upload(tokens, &mut pass.tokens, 0)?;
        stream.upload(&positions, &mut pass.positions, 0)?;
        pass.enqueue(stream, count, outputs, cache)?;
        (self.rows, self.count) = (outputs, count);
        cache.commit();
        Ok(())
    }

    pub fn logits(&self) -> Result<Vec<f32>> {
        let mut logits = vec![0.0; self.rows * self.pass.weights.extents.vocab];
        self.stream.download(&self.pass.logits, 0, &mut logits)?;
        Ok(logits)
    }

    /// A token from each of the last rows of logits, drawn by these numbers.
    pub fn choose(&mut self, choice: Choice, numbers: &[u32]) -> Result<Vec<u32>> {
        let first = self.count - numbers.len();
        self.stream.upload(numbers, &mut self.pass.numbers, 0)?;
        self.pass.choose(&self.stream, choice, self.rows - numbers.len(), first, numbers.len())?;
        let mut chosen = vec![0; numbers.len()];
        self.stream.download(&self.pass.tokens, first, &mut chosen)?;
        Ok(chosen)
    }

    /// One step of decoding as a graph, and the memory that its choices come to. What a replay reads is
    /// [set](Self::set_rows) before the first of them.
    pub fn capture(&mut self, choice: Choice, cache: &mut dyn KvCache) -> Result<(Graph, Pinned<u32>)> {
        let Launches { stream, pass, .. } = self;
        let sequences = cache.held().sequences.len();
        pass.room_for_logits(stream, sequences)?;
        cache.begin(stream, Chunk::Step)?;
        let mut chosen = Pinned::zeroed(stream.device(), sequences)?;
        let (graph, recorded) = stream.capture(|stream| {
            Ok(pass.enqueue(stream, sequences, sequences, cache).and_then(|()| {
                pass.choose(stream, choice, 0, 0, sequences)?;
                // SAFETY: it is read after the stream was waited for, and goes after that with the graph.
                Ok(unsafe { stream.download_async(&pass.tokens, ..sequences, &mut chosen, 0) }?)
            }))
        })?;
        recorded?;
        Ok((graph, chosen))
    }

    /// Runs a captured step, and waits for the tokens that it chose.
    ///
    /// # Safety
    /// The graph and `chosen` are those of [`capture`](Self::capture) with this cache, of which no buffer has
    /// been replaced, in the regime that its next step is of.
    pub unsafe fn replay(
        &mut self,
        graph: &GraphExec,
        chosen: &Pinned<u32>,
        cache: &mut dyn KvCache,
    ) -> Result<Vec<u32>> {
        cache.begin(&self.stream, Chunk::Step)?;
        // SAFETY: the caller's word.
        unsafe { graph.launch(&self.stream) }?;
        self.wait()?;
        (self.rows, self.count) = (chosen.len(), chosen.len());
        cache.commit();
        Ok(chosen.to_vec())
    }

    /// What the next captured step reads of each sequence: a token, where it goes, and what its draw is keyed
    /// by.
    pub fn set_rows(&mut self, tokens: &[u32], positions: &[u32], numbers: &[u32]) -> Result<()> {
        self.stream.upload(tokens, &mut self.pass.tokens, 0)?;
        self.stream.upload(positions, &mut self.pass.positions, 0)?;
        Ok(self.stream.upload(numbers, &mut self.pass.numbers, 0)?)
    }

    pub fn set_fusing(&mut self, fusing: Fusing) {
        self.matrices().for_each(|matrix| matrix.set_fusing(fusing));
    }

    pub fn set_panels_from(&mut self, tokens: usize) -> bool {
        self.matrices().for_each(|matrix| matrix.set_panels_from(tokens));
        self.pass.weights.layers.iter().all(|layer| layer.qkv.has_panels())
    }

    fn matrices(&mut self) -> impl Iterator<Item = &mut DeviceWeights> {
        let weights = &mut self.pass.weights;
        let layers = weights.layers.iter_mut();
        let matrices = layers.flat_map(|l| [&mut l.qkv, &mut l.output, &mut l.gate_up, &mut l.down]);
        matrices.chain([&mut weights.embedding]).chain(&mut weights.output)
    }

    /// Waits until everything is done.
    pub fn wait(&self) -> Result<()> {
        Ok(self.stream.synchronize()?)
    }

    /// The stream that everything is put into.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }
}

impl Pass {
    /// Room for so many rows of logits.
    fn room_for_logits(&mut self, stream: &Stream, rows: usize) -> Result<()> {
        let logits = rows * self.weights.extents.vocab;
        if self.logits.len() < logits {
            self.logits = Buffer::new(stream.device(), logits)?;
        }
        Ok(())
    }

    /// The launches of a chunk, from its tokens to the logits of its last `outputs` tokens.
    fn enqueue(
        &mut self,
        stream: &Stream,
        count: usize,
        outputs: usize,
        cache: &mut dyn KvCache,
    ) -> Result<()> {
        let Pass { weights, x, qkv, queries, keys, values, attended, gate_up, logits, .. } = self;
        let Extents { hidden, epsilon, rope, pairing, .. } = weights.extents;
        let records = self.records.global_mut();
        let alone = Epilogue::default();
        // SAFETY: here and below, buffers of the stream's device that are long enough for a chunk, as `new`
        // made them; one stream, so each launch sees what those before it wrote. Dropping a buffer waits for
        // the device.
        unsafe {
            kernels::embedding(stream, &weights.embedding, self.tokens.global(), x.global_mut(), count)
        }?;
        for (number, layer) in weights.layers.iter().enumerate() {
            let normed = Input::Normed { x: x.global(), weight: layer.attn_norm.global(), epsilon };
            let biased =
                Epilogue { bias: layer.qkv_bias.as_ref().map(Buffer::global), ..Epilogue::default() };
            // SAFETY: as above.
            unsafe { product(stream, &layer.qkv, normed, biased, records, qkv.global_mut(), count) }?;
            let raw = Raw {
                qkv,
                positions: &self.positions,
                frequencies: &weights.frequencies,
                pairing,
                rotary: rope.rotary,
                queries,
                keys,
                values,
            };
            cache.append(stream, number, New::Raw(raw))?;
            cache.attend(stream, number, queries, attended)?;
            let residual = Some(x.global());
            let onto = Epilogue { bias: layer.output_bias.as_ref().map(Buffer::global), residual };
            let plain = Input::Plain { x: attended.global() };
            // SAFETY: as above; the residual is the output.
            unsafe { product(stream, &layer.output, plain, onto, records, x.global_mut(), count) }?;
            let normed = Input::Normed { x: x.global(), weight: layer.ffn_norm.global(), epsilon };
            // SAFETY: as above.
            unsafe { product(stream, &layer.gate_up, normed, alone, records, gate_up.global_mut(), count) }?;
            let gated = Input::Gated { x: gate_up.global() };
            let onto = Epilogue { bias: None, residual };
            // SAFETY: as above; the residual is the output.
            unsafe { product(stream, &layer.down, gated, onto, records, x.global_mut(), count) }?;
        }
        if outputs > 0 {
            let last = x.global_range((count - outputs) * hidden..count * hidden)?;
            let normed = Input::Normed { x: last, weight: weights.output_norm.global(), epsilon };
            let out = logits.global_mut();
            // SAFETY: as above; the logits have a row for each output.
            unsafe { product(stream, weights.output(), normed, alone, records, out, outputs) }?;
        }
        Ok(())
    }

    /// Choices from `count` rows of logits, `row` the first of them, to the tokens from `first` on, whose
    /// positions count up.
    fn choose(
        &mut self,
        stream: &Stream,
        choice: Choice,
        row: usize,
        first: usize,
        count: usize,
    ) -> Result<()> {
        let vocab = self.weights.extents.vocab;
        let rows = Choosing {
            logits: self.logits.global_range(row * vocab..(row + count) * vocab)?,
            numbers: self.numbers.global_range(..count)?,
            tokens: self.tokens.global_range_mut(first..first + count)?,
            positions: self.positions.global_range_mut(first..first + count)?,
        };
        // SAFETY: rows of logits, and as many numbers, tokens and positions, all of this device.
        Ok(unsafe { kernels::choose(stream, choice, rows, count, vocab) }?)
    }
}

/// A product, its input's records before it where it does not make them itself.
///
/// # Safety
/// As [`DeviceWeights::run_on`]; `records` has room for the input's, also as panels.
unsafe fn product(
    stream: &Stream,
    weights: &DeviceWeights,
    input: Input,
    epilogue: Epilogue,
    records: GlobalMut<u32>,
    out: GlobalMut<f32>,
    tokens: usize,
) -> Result<()> {
    let input = if weights.fuses(tokens) {
        input
    } else if weights.takes_panels(tokens) {
        // SAFETY: the caller's word.
        unsafe { kernels::panels(stream, input, records, tokens, weights.columns()) }?;
        Input::Panels(records.as_const())
    } else {
        // SAFETY: the caller's word.
        unsafe { kernels::quantize(stream, input, records, tokens, weights.columns()) }?;
        Input::Records(records.as_const())
    };
    // SAFETY: the caller's word.
    Ok(unsafe { weights.run_on(stream, ProductKernel::Auto, input, epilogue, out, tokens) }?)
}
