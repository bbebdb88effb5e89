//! The pass as launches on one stream: for GPUs, and for comparing the emulator with the CPU's own path.

use super::weights::{Extents, Layer, Packed};
use super::{Result, Rows};
use crate::model::cache::{KvCache, Unrotated};
use crate::model::kernels::{self, Choice, record_words};
use crate::model::linear::{DeviceWeights, Epilogue, Fusing, Input, PackedWeights, ProductKernel};
use crate::{Buffer, Device, Graph, GraphExec, Pinned, Stream};
use half::f16;
use kernels_gpu::model::rope;
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
    x: Buffer<f32>,
    qkv: Buffer<f32>,
    queries: Buffer<f16>,
    keys: Buffer<f16>,
    values: Buffer<f16>,
    attended: Buffer<f32>,
    gate_up: Buffer<f32>,
    /// Records of the widest input.
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
            x: Buffer::new(device, chunk * extents.hidden)?,
            qkv: Buffer::new(device, chunk * extents.qkv_width())?,
            queries: Buffer::new(device, chunk * extents.query_width())?,
            keys: Buffer::new(device, chunk * extents.kv_width())?,
            values: Buffer::new(device, chunk * extents.kv_width())?,
            attended: Buffer::new(device, chunk * extents.query_width())?,
            gate_up: Buffer::new(device, chunk * 2 * extents.ffn)?,
            records: Buffer::new(device, record_words(chunk, widest))?,
            logits: Buffer::new(device, extents.vocab)?,
        };
        Ok(Launches { stream: Stream::new(device)?, pass, rows: 0, count: 0 })
    }

    pub fn chunk(&mut self, tokens: &[u32], rows: Rows, cache: &mut dyn KvCache) -> Result<()> {
        let Launches { stream, pass, .. } = self;
        let (count, first) = (tokens.len(), cache.tokens());
        let positions: Vec<u32> = (first as u32..).take(count).collect();
        let outputs = rows.of(count);
        let logits = outputs * pass.weights.extents.vocab;
        if pass.logits.len() < logits {
            pass.logits = Buffer::new(stream.device(), logits)?;
        }
        cache.begin(stream, count)?;
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

    /// A token from the last row of logits.
    pub fn choose(&mut self, choice: Choice) -> Result<u32> {
        let (row, last) = (self.rows - 1, self.count - 1);
        self.pass.choose(&self.stream, choice, row, last)?;
        let mut chosen = [0];
        self.stream.download(&self.pass.tokens, last, &mut chosen)?;
        Ok(chosen[0])
    }

    /// One step of decoding as a graph, and the memory that its choice comes to. The first replay reads `token`.
    pub fn capture(
        &mut self,
        token: u32,
        choice: Choice,
        cache: &mut dyn KvCache,
    ) -> Result<(Graph, Pinned<u32>)> {
        let Launches { stream, pass, .. } = self;
        cache.begin(stream, 1)?;
        stream.upload(&[token], &mut pass.tokens, 0)?;
        stream.upload(&[cache.tokens() as u32], &mut pass.positions, 0)?;
        let mut chosen = Pinned::zeroed(stream.device(), 1)?;
        let (graph, recorded) = stream.capture(|stream| {
            Ok(pass.enqueue(stream, 1, 1, cache).and_then(|()| {
                pass.choose(stream, choice, 0, 0)?;
                // SAFETY: it is read after the stream was waited for, and goes after that with the graph.
                Ok(unsafe { stream.download_async(&pass.tokens, ..1, &mut chosen, 0) }?)
            }))
        })?;
        recorded?;
        Ok((graph, chosen))
    }

    /// Runs a captured step, and waits for the token that it chose.
    ///
    /// # Safety
    /// The graph and `chosen` are those of [`capture`](Self::capture) with this cache, of which no buffer has been replaced.
    pub unsafe fn replay(
        &mut self,
        graph: &GraphExec,
        chosen: &Pinned<u32>,
        cache: &mut dyn KvCache,
    ) -> Result<u32> {
        cache.begin(&self.stream, 1)?;
        // SAFETY: the caller's word.
        unsafe { graph.launch(&self.stream) }?;
        self.wait()?;
        (self.rows, self.count) = (1, 1);
        cache.commit();
        Ok(chosen[0])
    }

    /// Has the next captured step read another token.
    pub fn set_token(&mut self, token: u32) -> Result<()> {
        Ok(self.stream.upload(&[token], &mut self.pass.tokens, 0)?)
    }

    pub fn set_fusing(&mut self, fusing: Fusing) {
        let weights = &mut self.pass.weights;
        let layers = weights.layers.iter_mut();
        let matrices = layers.flat_map(|l| [&mut l.qkv, &mut l.output, &mut l.gate_up, &mut l.down]);
        for matrix in matrices.chain([&mut weights.embedding]).chain(&mut weights.output) {
            matrix.set_fusing(fusing);
        }
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
        // SAFETY: here and below, buffers of the stream's device that are long enough for a chunk, as `new` made them; one
        // stream, so each launch sees what those before it wrote. Dropping a buffer waits for the device.
        unsafe {
            kernels::embedding(stream, &weights.embedding, self.tokens.global(), x.global_mut(), count)
        }?;
        for (number, layer) in weights.layers.iter().enumerate() {
            let normed = Input::Normed { x: x.global(), weight: layer.attn_norm.global(), epsilon };
            let biased =
                Epilogue { bias: layer.qkv_bias.as_ref().map(Buffer::global), ..Epilogue::default() };
            // SAFETY: as above.
            unsafe { product(stream, &layer.qkv, normed, biased, records, qkv.global_mut(), count) }?;
            let (positions, frequencies) = (&self.positions, &weights.frequencies);
            let new = Unrotated { qkv, positions, frequencies, pairing, rotary: rope.rotary };
            if !cache.rotate_and_append(stream, number, new, queries)? {
                let args = rope::Args {
                    qkv: qkv.global(),
                    positions: positions.global(),
                    frequencies: frequencies.global(),
                    queries: queries.global_mut(),
                    keys: keys.global_mut(),
                    values: values.global_mut(),
                    shape: rope,
                };
                // SAFETY: as above.
                unsafe { kernels::rotate(stream, pairing, args, count) }?;
                cache.append(stream, number, positions, keys, values)?;
            }
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

    /// The choice from a row of logits, to the token at `last`, whose position counts up.
    fn choose(&mut self, stream: &Stream, choice: Choice, row: usize, last: usize) -> Result<()> {
        let vocab = self.weights.extents.vocab;
        let logits = self.logits.global_range(row * vocab..(row + 1) * vocab)?;
        let token = self.tokens.global_range_mut(last..last + 1)?;
        let position = self.positions.global_range_mut(last..last + 1)?;
        // SAFETY: a row of logits, and a token and a position, all of this device.
        Ok(unsafe { kernels::choose(stream, choice, logits, token, position, 1, vocab) }?)
    }
}

/// A product, its input's records before it where it does not make them itself.
///
/// # Safety
/// As [`DeviceWeights::run_on`]; `records` has room for the input's.
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
    } else {
        // SAFETY: the caller's word.
        unsafe { kernels::quantize(stream, input, records, tokens, weights.columns()) }?;
        Input::Records(records.as_const())
    };
    // SAFETY: the caller's word.
    Ok(unsafe { weights.run_on(stream, ProductKernel::Auto, input, epilogue, out, tokens) }?)
}
