//! Keys and values in 8 bits, restored for attention.

use crate::attention::{BLOCK_TOKENS, PagedPool};
use crate::kv::restored::{Coded, Side};
use crate::kv::{
    Added, Capacity, Chunk, Error, Geometry, Held, KvCache, New, Paged, Restored, Result, Rotated, Rows,
    Sequences,
};
use crate::{Buffer, Device, Stream};
use half::f16;
use kernels_gpu::int8::quantizer::{dequantize, quantize, scale_from_max};
use kernels_gpu::int8::{BlockShape, append_blocks, restore_blocks};
use simt::LaunchShape;

/// What one layer keeps: `kernels_gpu::int8` says how it lies.
#[derive(Debug)]
struct Layer {
    codes: Buffer<i8>,
    scales: Buffer<f32>,
    fresh: Buffer<f16>,
}

/// An INT8 cache: blocks of 16 tokens with a scale for each channel, the block that is being
/// filled in f16.
///
/// There are no originals: a chunk's attention, a prompt's too, sees full blocks as they are restored. They
/// are restored in each layer before attention, to a pool that all layers share.
#[derive(Debug)]
pub struct Int8Cache {
    sequences: Sequences,
    layers: Vec<Layer>,
    shape: BlockShape,
    pool: PagedPool<f16>,
    paged: Paged,
}

impl Int8Cache {
    /// An empty cache: of `capacity` tokens of one sequence, or as many of several.
    ///
    /// # Errors
    /// [`Error::Memory`] if the device can never hold it; heads that there is no kernel for; out of memory.
    pub fn new(device: &Device, geometry: Geometry, capacity: impl Into<Capacity>) -> Result<Self> {
        let sequences = Sequences::new(device, geometry, capacity.into());
        let problem = sequences.step_problem().checked()?;
        let (max_blocks, kv_heads, head_dim) = (problem.max_blocks(), problem.kv_heads, problem.head_dim);
        let blocks = problem.sequences * max_blocks;
        let shape = BlockShape { tokens: 1, kv_heads, head_dim, blocks, max_blocks };
        let tiles = 2 * blocks as usize * geometry.kv_heads;
        let tile = BLOCK_TOKENS as usize * geometry.head_dim;
        let bytes = geometry.layers as u64 * (tiles * (tile + 4 * geometry.head_dim)) as u64;
        Error::if_too_large(device, sequences.capacity, bytes)?;
        let layer = |_| -> Result<Layer> {
            Ok(Layer {
                codes: Buffer::new(device, tiles * tile)?,
                scales: Buffer::new(device, tiles * geometry.head_dim)?,
                fresh: Buffer::zeroed(device, sequences.capacity.sequences * fresh_elements(geometry))?,
            })
        };
        let layers = (0..geometry.layers).map(layer).collect::<Result<_>>()?;
        let (pool, paged) = (sequences.pool()?, Paged::new(&sequences)?);
        Ok(Int8Cache { sequences, layers, shape, pool, paged })
    }

    /// The kernels on every device: on the CPU the emulator, which gives the same bits.
    pub fn with_kernels(mut self) -> Self {
        self.sequences.simd = false;
        self
    }

    /// The two kernels of a layer: append the chunk, and restore everything.
    fn launch(&mut self, stream: &Stream, layer: usize, new: Rotated<'_>, chunk: Chunk) -> Result<()> {
        let Int8Cache { sequences, layers, shape, pool, paged } = self;
        let rows = sequences.rows(chunk);
        let elements = rows * sequences.geometry.kv_width();
        let Rows { table, lengths, tokens } = paged.rows(chunk)?;
        let shape = BlockShape { tokens, ..*shape };
        let Layer { codes, scales, fresh } = &mut layers[layer];
        let of_each = fresh_elements(sequences.geometry);
        let fresh = match chunk {
            Chunk::Prompt { sequence, .. } => {
                fresh.global_range_mut(sequence * of_each..(sequence + 1) * of_each)?
            }
            Chunk::Step => fresh.global_mut(),
        };
        let positions = new.positions.global_range(..rows)?;
        let arguments = append_blocks::Args {
            new_keys: new.keys.global_range(..elements)?,
            new_values: new.values.global_range(..elements)?,
            positions,
            table,
            fresh,
            codes: codes.global_mut(),
            scales: scales.global_mut(),
            shape,
        };
        let count = lengths.len() as u32;
        let launch = LaunchShape::new((shape.kv_heads, 2, count), shape.head_dim);
        // SAFETY: buffers of the stream's device, as long as the shape says; positions past a sequence's last
        // block are left out. Dropping a buffer waits for the device.
        unsafe { stream.launch(&append_blocks::kernel::<f16>(), launch, arguments) }?;
        let (pool_keys, pool_values) = pool.both_mut();
        let arguments = restore_blocks::Args {
            positions,
            table,
            fresh: fresh.as_const(),
            codes: codes.global(),
            scales: scales.global(),
            lengths,
            keys: pool_keys.global_mut(),
            values: pool_values.global_mut(),
            shape,
        };
        let launch = LaunchShape::new((shape.max_blocks, shape.kv_heads, 2 * count), shape.head_dim);
        // SAFETY: as above; the pool has as many blocks.
        unsafe { stream.launch(&restore_blocks::kernel::<f16>(), launch, arguments) }?;
        Ok(())
    }

    /// The same on the CPU.
    fn on_slices(&mut self, layer: usize, new: Rotated<'_>, chunk: Chunk) -> Result<()> {
        for added in self.sequences.added(chunk) {
            for kind in 0..2 {
                self.sequence_on_slices(layer, kind, new, added)?;
            }
            let length = (added.first + added.tokens) as u32;
            self.paged.set_length(added.sequence, length)?;
        }
        Ok(())
    }

    /// Keys (0) or values (1) that a sequence gets.
    fn sequence_on_slices(&mut self, layer: usize, kind: u32, new: Rotated<'_>, added: Added) -> Result<()> {
        let (shape, block) = (self.shape, BLOCK_TOKENS as usize);
        let (heads, d) = (self.sequences.geometry.kv_heads, self.sequences.geometry.head_dim);
        let (tile, width) = (block * d, heads * d);
        let Layer { codes, scales, fresh } = &mut self.layers[layer];
        let Added { sequence, row: first_row, first, tokens } = added;
        let blocks = self.paged.blocks(sequence);
        let mut numbers = vec![f16::ZERO; tokens * width];
        let (mut near, mut row) = (vec![f16::ZERO; tile], vec![0f32; tile]);
        let (mut quantized, mut of_tile) = (vec![0i8; tile], vec![0f32; d]);
        let length = first + tokens;
        let (from, pool) = match kind {
            0 => (new.keys, self.pool.both_mut().0),
            _ => (new.values, self.pool.both_mut().1),
        };
        from.read(first_row * width, &mut numbers)?;
        for head in 0..heads {
            let own = shape.fresh(sequence as u32, kind, head as u32);
            fresh.read(own, &mut near)?;
            for token in 0..tokens {
                let position = first + token;
                let place = position % block;
                near[place * d..][..d].copy_from_slice(&numbers[(token * heads + head) * d..][..d]);
                if place + 1 < block {
                    continue;
                }
                let number = blocks[position / block];
                row.iter_mut().zip(&near).for_each(|(x, near)| *x = near.to_f32());
                for (channel, scale) in of_tile.iter_mut().enumerate() {
                    let largest =
                        row[channel..].iter().step_by(d).fold(0f32, |most, x| simt::math::max(most, x.abs()));
                    *scale = scale_from_max::<f16>(largest);
                }
                for (i, code) in quantized.iter_mut().enumerate() {
                    *code = quantize(row[i], of_tile[i % d]) as i8;
                }
                scales.write(shape.scale(kind, number, head as u32), &of_tile)?;
                codes.write(shape.tile(kind, number, head as u32), &quantized)?;
            }
            fresh.write(own, &near)?;
            for &number in &blocks[..length / block] {
                codes.read(shape.tile(kind, number, head as u32), &mut quantized)?;
                scales.read(shape.scale(kind, number, head as u32), &mut of_tile)?;
                for (codes, restored) in quantized.chunks_exact(d).zip(row.chunks_exact_mut(d)) {
                    for ((x, code), scale) in restored.iter_mut().zip(codes).zip(&of_tile) {
                        *x = dequantize(*code, *scale);
                    }
                }
                half::slice::HalfFloatSliceExt::convert_from_f32_slice(&mut near[..], &row);
                pool.write(shape.tile(0, number, head as u32), &near)?;
            }
            if !length.is_multiple_of(block) {
                fresh.read(own, &mut near)?;
                let rest = length % block * d;
                pool.write(shape.tile(0, blocks[length / block], head as u32), &near[..rest])?;
            }
        }
        Ok(())
    }
}

/// Elements of the blocks that a sequence is filling, of keys and values.
fn fresh_elements(geometry: Geometry) -> usize {
    2 * BLOCK_TOKENS as usize * geometry.kv_width()
}

/// Copies blocks `from` to blocks `to`, of `elements` each, of both halves of a layer's buffer.
fn copy_blocks<T: simt::Pod>(
    stream: &Stream,
    buffer: &mut Buffer<T>,
    elements: usize,
    (from, to): (&[u32], &[u32]),
) -> Result<()> {
    let half = buffer.len() / 2;
    let mut block = vec![T::zeroed(); elements];
    for (from, to) in from.iter().zip(to) {
        for start in [0, half] {
            stream.download(buffer, start + *from as usize * elements, &mut block)?;
            stream.upload(&block, buffer, start + *to as usize * elements)?;
        }
    }
    Ok(())
}

// SAFETY: layers, pool, table and the plan for steps are made once; other plans are not captured.
unsafe impl KvCache for Int8Cache {
    fn scheme(&self) -> &'static str {
        "int8"
    }

    fn held(&self) -> Held<'_> {
        self.sequences.held()
    }

    /// Codes and scales of full blocks, the trailing blocks in f16, and the pool that layers are restored to.
    fn bytes(&self) -> u64 {
        self.step_bytes() + (self.pool.keys().bytes() + self.pool.values().bytes()) as u64
    }

    fn step_bytes(&self) -> u64 {
        let (block, geometry) = (BLOCK_TOKENS as usize, self.sequences.geometry);
        let of_sequence = |tokens: &usize| {
            let full = tokens / block * (block + 4) * 2 * geometry.kv_width() * geometry.layers;
            full as u64 + geometry.token_bytes() * (tokens % block) as u64
        };
        self.held().sequences.iter().flatten().map(of_sequence).sum()
    }

    fn restored(&self, stream: &Stream, layer: usize, sequence: usize) -> Result<Option<Restored>> {
        stream.synchronize()?;
        let tokens = self.sequences.length(sequence)?;
        let (heads, d) = (self.sequences.geometry.kv_heads, self.sequences.geometry.head_dim);
        let (shape, block) = (self.shape, BLOCK_TOKENS as usize);
        let Layer { codes, scales, fresh } = &self.layers[layer];
        let (codes, scales, fresh) = (codes.to_vec()?, scales.to_vec()?, fresh.to_vec()?);
        let blocks = self.paged.blocks(sequence);
        let side = |kind: u32| {
            let mut rows = vec![0f32; tokens * heads * d];
            for (row, out) in rows.chunks_exact_mut(d).enumerate() {
                let (token, head) = (row / heads, (row % heads) as u32);
                let place = token % block * d;
                if token >= tokens / block * block {
                    let near = &fresh[shape.fresh(sequence as u32, kind, head) + place..];
                    out.iter_mut().zip(near).for_each(|(out, x)| *out = x.to_f32());
                    continue;
                }
                let number = blocks[token / block];
                let codes = &codes[shape.tile(kind, number, head) + place..];
                let scales = &scales[shape.scale(kind, number, head)..];
                for (out, (code, scale)) in out.iter_mut().zip(codes.iter().zip(scales)) {
                    // Attention is over a pool in f16.
                    *out = f16::from_f32(dequantize(*code, *scale)).to_f32();
                }
            }
            let bytes = d as f64 * (1.0 + size_of::<f32>() as f64 / block as f64);
            Side { rows, bytes, coded: Coded { block, kept: 0, front: 0, extra: 0 } }
        };
        Ok(Some(Restored { keys: side(0), values: side(1) }))
    }

    fn join(&mut self, _: &Stream) -> Result<usize> {
        self.paged.join(&mut self.sequences)
    }

    /// Everything is copied: what two sequences share would be restored twice.
    fn fork(&mut self, stream: &Stream, sequence: usize) -> Result<usize> {
        let tokens = self.sequences.length(sequence)?;
        let fork = self.paged.join(&mut self.sequences)?;
        stream.synchronize()?;
        let full = tokens / BLOCK_TOKENS as usize;
        let blocks = (&self.paged.blocks(sequence)[..full], &self.paged.blocks(fork)[..full]);
        let (width, of_each) = (self.sequences.geometry.kv_width(), fresh_elements(self.sequences.geometry));
        let mut fresh = vec![f16::ZERO; of_each];
        for layer in &mut self.layers {
            copy_blocks(stream, &mut layer.codes, BLOCK_TOKENS as usize * width, blocks)?;
            copy_blocks(stream, &mut layer.scales, width, blocks)?;
            stream.download(&layer.fresh, sequence * of_each, &mut fresh)?;
            stream.upload(&fresh, &mut layer.fresh, fork * of_each)?;
        }
        self.sequences.enter(fork, tokens);
        Ok(fork)
    }

    fn leave(&mut self, stream: &Stream, sequence: usize) -> Result<()> {
        self.paged.leave(stream, &mut self.sequences, sequence)
    }

    fn begin(&mut self, _: &Stream, chunk: Chunk) -> Result<()> {
        self.sequences.room(chunk)?;
        self.paged.ready(&self.sequences, chunk)?;
        self.sequences.begin(chunk);
        Ok(())
    }

    fn append(&mut self, stream: &Stream, layer: usize, new: New<'_>) -> Result<()> {
        let chunk = self.sequences.begun(layer)?;
        let new = new.rotated(stream, self.sequences.geometry, self.sequences.rows(chunk))?;
        self.sequences.check_appended(stream, new)?;
        if self.sequences.on_slices(stream) {
            return self.on_slices(layer, new, chunk);
        }
        self.launch(stream, layer, new, chunk)
    }

    fn attend(
        &mut self,
        stream: &Stream,
        layer: usize,
        queries: &Buffer<f16>,
        output: &mut Buffer<f32>,
    ) -> Result<()> {
        let attending = self.sequences.attending(stream, layer, queries, output)?;
        self.paged.attend(stream, &self.sequences, &self.pool, attending)
    }

    fn commit(&mut self) {
        self.sequences.commit();
    }
}
