//! Keys and values in 8 bits, restored for attention.

use crate::attention::{BLOCK_TOKENS, PagedPool};
use crate::kv::{Error, Geometry, Held, KvCache, New, Paged, Result, Rotated, Sequence};
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

/// An INT8 cache of one sequence: blocks of 16 tokens with a scale for each channel, the block that is being
/// filled in f16.
///
/// There are no originals: a chunk's attention, a prompt's too, sees full blocks as they are restored. They
/// are restored in each layer before attention, to a pool that all layers share.
#[derive(Debug)]
pub struct Int8Cache {
    sequence: Sequence,
    layers: Vec<Layer>,
    shape: BlockShape,
    pool: PagedPool<f16>,
    paged: Paged,
}

impl Int8Cache {
    /// An empty cache for up to `capacity` tokens.
    ///
    /// # Errors
    /// [`Error::Memory`] if the device can never hold it; heads that there is no kernel for; out of memory.
    pub fn new(device: &Device, geometry: Geometry, capacity: usize) -> Result<Self> {
        let sequence = Sequence::new(device, geometry, capacity);
        let problem = sequence.problem(1).checked()?;
        let blocks = problem.max_blocks();
        let shape = BlockShape { tokens: 1, kv_heads: problem.kv_heads, head_dim: problem.head_dim, blocks };
        let tiles = 2 * blocks as usize * geometry.kv_heads;
        let tile = BLOCK_TOKENS as usize * geometry.head_dim;
        let bytes = geometry.layers as u64 * (tiles * (tile + 4 * geometry.head_dim)) as u64;
        Error::if_too_large(device, capacity, bytes)?;
        let layer = |_| -> Result<Layer> {
            Ok(Layer {
                codes: Buffer::new(device, tiles * tile)?,
                scales: Buffer::new(device, tiles * geometry.head_dim)?,
                fresh: Buffer::zeroed(device, 2 * geometry.kv_heads * tile)?,
            })
        };
        let layers = (0..geometry.layers).map(layer).collect::<Result<_>>()?;
        let (pool, paged) = (sequence.pool()?, Paged::new(&sequence)?);
        Ok(Int8Cache { sequence, layers, shape, pool, paged })
    }

    /// The kernels on every device: on the CPU the emulator, which gives the same bits.
    pub fn with_kernels(mut self) -> Self {
        self.sequence.simd = false;
        self
    }

    /// The two kernels of a layer: append the chunk, and restore everything.
    fn launch(
        &mut self,
        stream: &Stream,
        layer: usize,
        positions: &Buffer<u32>,
        keys: &Buffer<f16>,
        values: &Buffer<f16>,
        tokens: usize,
    ) -> Result<()> {
        let elements = tokens * self.sequence.geometry.kv_width();
        let shape = BlockShape { tokens: tokens as u32, ..self.shape };
        let Layer { codes, scales, fresh } = &mut self.layers[layer];
        let positions = positions.global_range(..tokens)?;
        let arguments = append_blocks::Args {
            new_keys: keys.global_range(..elements)?,
            new_values: values.global_range(..elements)?,
            positions,
            fresh: fresh.global_mut(),
            codes: codes.global_mut(),
            scales: scales.global_mut(),
            shape,
        };
        let launch = LaunchShape::new((shape.kv_heads, 2), shape.head_dim);
        // SAFETY: buffers of the stream's device, as long as the shape says; positions past the last block
        // are left out. Dropping a buffer waits for the device.
        unsafe { stream.launch(&append_blocks::kernel::<f16>(), launch, arguments) }?;
        let (pool_keys, pool_values) = self.pool.both_mut();
        let arguments = restore_blocks::Args {
            positions,
            fresh: fresh.global(),
            codes: codes.global(),
            scales: scales.global(),
            lengths: self.paged.table.lengths_mut().global_mut(),
            keys: pool_keys.global_mut(),
            values: pool_values.global_mut(),
            shape,
        };
        let launch = LaunchShape::new((shape.blocks, shape.kv_heads, 2), shape.head_dim);
        // SAFETY: as above; the pool has as many blocks.
        unsafe { stream.launch(&restore_blocks::kernel::<f16>(), launch, arguments) }?;
        Ok(())
    }

    /// The same on the CPU.
    fn on_slices(
        &mut self,
        layer: usize,
        keys: &Buffer<f16>,
        values: &Buffer<f16>,
        tokens: usize,
    ) -> Result<()> {
        let (shape, block) = (self.shape, BLOCK_TOKENS as usize);
        let (heads, d) = (self.sequence.geometry.kv_heads, self.sequence.geometry.head_dim);
        let tile = block * d;
        let Layer { codes, scales, fresh } = &mut self.layers[layer];
        let mut new = vec![f16::ZERO; tokens * heads * d];
        let (mut near, mut row) = (vec![f16::ZERO; tile], vec![0f32; tile]);
        let (mut quantized, mut of_tile) = (vec![0i8; tile], vec![0f32; d]);
        let length = self.sequence.tokens + tokens;
        for kind in 0..2u32 {
            let (from, pool) = match kind {
                0 => (keys, self.pool.both_mut().0),
                _ => (values, self.pool.both_mut().1),
            };
            from.read(0, &mut new)?;
            for head in 0..heads {
                let own = shape.fresh(kind, head as u32);
                fresh.read(own, &mut near)?;
                for token in 0..tokens {
                    let position = self.sequence.tokens + token;
                    let place = position % block;
                    near[place * d..][..d].copy_from_slice(&new[(token * heads + head) * d..][..d]);
                    if place + 1 < block {
                        continue;
                    }
                    let block = (position / block) as u32;
                    row.iter_mut().zip(&near).for_each(|(x, near)| *x = near.to_f32());
                    for (channel, scale) in of_tile.iter_mut().enumerate() {
                        let largest = row[channel..]
                            .iter()
                            .step_by(d)
                            .fold(0f32, |most, x| simt::math::max(most, x.abs()));
                        *scale = scale_from_max::<f16>(largest);
                    }
                    for (i, code) in quantized.iter_mut().enumerate() {
                        *code = quantize(row[i], of_tile[i % d]) as i8;
                    }
                    scales.write(shape.scale(kind, block, head as u32), &of_tile)?;
                    codes.write(shape.tile(kind, block, head as u32), &quantized)?;
                }
                fresh.write(own, &near)?;
                for block_index in 0..length / block {
                    let number = block_index as u32;
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
                    pool.write(shape.tile(0, (length / block) as u32, head as u32), &near[..rest])?;
                }
            }
        }
        Ok(self.paged.table.lengths_mut().write(0, &[length as u32])?)
    }
}

// SAFETY: layers, pool, table and the plan for one token are made once; other plans are not captured.
unsafe impl KvCache for Int8Cache {
    fn scheme(&self) -> &'static str {
        "int8"
    }

    fn held(&self) -> Held {
        self.sequence.held()
    }

    /// Codes and scales of full blocks, the trailing block in f16, and the pool that layers are restored to.
    fn bytes(&self) -> u64 {
        self.step_bytes() + (self.pool.keys().bytes() + self.pool.values().bytes()) as u64
    }

    fn step_bytes(&self) -> u64 {
        let block = BLOCK_TOKENS as usize;
        let full = self.sequence.tokens / block
            * (block + 4)
            * 2
            * self.sequence.geometry.kv_width()
            * self.sequence.geometry.layers;
        full as u64 + self.sequence.geometry.token_bytes() * (self.sequence.tokens % block) as u64
    }

    fn begin(&mut self, _: &Stream, tokens: usize) -> Result<()> {
        self.sequence.room(tokens)?;
        self.paged.ready(&self.sequence, tokens)?;
        self.sequence.begin(tokens);
        Ok(())
    }

    fn append(&mut self, stream: &Stream, layer: usize, new: New<'_>) -> Result<()> {
        let tokens = self.sequence.begun(layer)?;
        let new = new.rotated(stream, self.sequence.geometry, tokens)?;
        self.sequence.check_appended(stream, new)?;
        let Rotated { positions, keys, values } = new;
        if self.sequence.on_slices(stream) {
            return self.on_slices(layer, keys, values, tokens);
        }
        self.launch(stream, layer, positions, keys, values, tokens)
    }

    fn attend(
        &mut self,
        stream: &Stream,
        layer: usize,
        queries: &Buffer<f16>,
        output: &mut Buffer<f32>,
    ) -> Result<()> {
        self.sequence.begun(layer)?;
        self.paged.attend(stream, &self.sequence, &self.pool, queries, output)
    }

    fn commit(&mut self) {
        self.sequence.commit();
    }
}
