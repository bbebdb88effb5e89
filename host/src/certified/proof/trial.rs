//! A batch on a device: quantized, then attended to.

use crate::attention::dense;
use crate::attention::inputs::Batch;
use crate::certified::{
    Annotation, Attended, Certificate, CertifiedElement, Error, Geometry, Job, Layout, Near, Policy, Result,
    Rounding, Scratch, StepElement, StepHandles, StepPlan, StepProblem, Writer,
};
use crate::{Buffer, Device, Stream};
use kernels_gpu::certified::admit::HEADER;
use simt::Global;

/// What a step returned.
#[derive(Clone, Debug, PartialEq)]
pub struct Returned {
    /// [sequences, q_heads, head_dim].
    pub output: Vec<f32>,
    /// [sequences, q_heads].
    pub lse: Vec<f32>,
    /// Likewise.
    pub certificates: Vec<Certificate>,
}

/// A cache on a device, its quantized form, and buffers for queries and what is returned: used again by every
/// batch of one [`StepProblem`].
pub struct Trial<E: StepElement + CertifiedElement> {
    device: Device,
    stream: Stream,
    problem: StepProblem,
    geometry: Geometry,
    writer: Writer<E>,
    queries: Buffer<E>,
    keys: Buffer<E>,
    values: Buffer<E>,
    tiles: Buffer<u8>,
    annotations: Buffer<Annotation>,
    table: Buffer<u32>,
    lengths: Buffer<u32>,
    near: Buffer<E>,
    directory: Buffer<u64>,
    scratch: Scratch,
}

impl<E: StepElement + CertifiedElement> Trial<E> {
    /// Room for batches of this problem with up to `blocks` blocks in their pools.
    ///
    /// # Errors
    /// Heads that no kernel takes; out of memory.
    pub fn new(device: &Device, problem: StepProblem, blocks: usize) -> Result<Self> {
        Self::with_layout(device, problem, blocks, Layout::Compact)
    }

    /// The same with the quantized form in a layout.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_layout(device: &Device, problem: StepProblem, blocks: usize, layout: Layout) -> Result<Self> {
        let StepProblem { sequences, q_heads, kv_heads, head_dim, max_tokens } = problem;
        let geometry = Geometry::new(kv_heads, head_dim)?.with_layout(layout);
        let max_blocks = max_tokens.div_ceil(super::super::BLOCK_TOKENS);
        let pool = geometry.pool_elements(blocks);
        Ok(Trial {
            device: device.clone(),
            stream: Stream::new(device)?,
            problem,
            geometry,
            writer: Writer::new(device, geometry, blocks)?,
            queries: Buffer::new(device, (sequences * q_heads * head_dim) as usize)?,
            keys: Buffer::new(device, pool)?,
            values: Buffer::new(device, pool)?,
            tiles: Buffer::new(device, geometry.tile_bytes(blocks))?,
            annotations: Buffer::new(device, geometry.pairs(blocks))?,
            table: Buffer::new(device, (sequences * max_blocks) as usize)?,
            lengths: Buffer::new(device, sequences as usize)?,
            near: Buffer::new(device, 0)?,
            directory: Buffer::new(device, 0)?,
            scratch: Scratch::NONE,
        })
    }

    /// The same whose codes are rounded otherwise from the next batch on.
    pub fn with_rounding(mut self, rounding: Rounding) -> Self {
        self.geometry = self.geometry.with_rounding(rounding);
        self.writer.set_rounding(rounding);
        self
    }

    /// The stream of everything here.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Puts a scratch of this size beside the cache, empty. Fresh tiles are not supported.
    ///
    /// # Errors
    /// Out of memory.
    pub fn set_scratch(&mut self, key_slots: u32, value_slots: u32) -> Result<()> {
        self.scratch = Scratch { key_slots, value_slots, fresh: 0, admits: 1 };
        let mut directory = vec![0u64; HEADER as usize];
        for _ in 0..key_slots + value_slots {
            directory.extend([u64::MAX, u64::from(Scratch::EMPTY)]);
        }
        let tile = self.geometry.layout().elements() as usize;
        self.near = Buffer::new(&self.device, self.scratch.tiles() as usize * tile)?;
        self.stream.fill_u8(&mut self.near, .., 0xff)?;
        self.directory = Buffer::from_slice(&self.device, &directory)?;
        Ok(())
    }

    /// Brings a batch's cache to the device and quantizes its full blocks. What nobody may read holds no
    /// number.
    ///
    /// # Errors
    /// [`Error::Length`] for a batch of another problem, or with more blocks; what cannot be quantized; what
    /// the device reports.
    pub fn load(&mut self, batch: &Batch<E>) -> Result<()> {
        let geometry = self.geometry;
        let check = |what: &'static str, got: usize, most: usize| {
            if got <= most {
                return Ok(());
            }
            Err(Error::Length { what, got, expected: format!("{most} at most"), geometry })
        };
        check("the batch's pool", batch.keys.len(), self.keys.len())?;
        check("the batch's table", batch.table.len(), self.table.len())?;
        self.keys.write(0, &batch.keys)?;
        self.values.write(0, &batch.values)?;
        self.table.write(0, &batch.table)?;
        self.lengths.write(0, &batch.lengths)?;
        self.stream.fill_u8(&mut self.tiles, .., 0xff)?;
        self.stream.fill_u8(&mut self.annotations, .., 0xff)?;
        let job = |(block, index)| Job::new(block, block, index);
        let jobs: Vec<Job> = batch.full_blocks().into_iter().map(job).collect();
        let Trial { writer, stream, keys, values, tiles, annotations, .. } = self;
        writer.write(stream, keys, values, &jobs, tiles, annotations)?;
        writer.check(stream)
    }

    /// Brings a batch's queries to the device.
    ///
    /// # Errors
    /// What the device reports.
    pub fn ask(&mut self, batch: &Batch<E>) -> Result<()> {
        Ok(self.queries.write(0, &batch.queries)?)
    }

    /// A plan for this cache.
    ///
    /// # Errors
    /// As [`StepPlan::with_layout`].
    pub fn plan(&self, policy: &Policy) -> Result<StepPlan<E>> {
        StepPlan::with_layout(&self.device, self.problem, policy, self.geometry.layout().kind)
    }

    /// Turns bits of a byte of the quantized pool over, and nobody is told.
    ///
    /// # Errors
    /// A byte past its end; what the device reports.
    pub fn flip(&mut self, byte: usize, bits: u8) -> Result<()> {
        let mut now = [0];
        self.stream.download(&self.tiles, byte, &mut now)?;
        Ok(self.tiles.write(byte, &[now[0] ^ bits])?)
    }

    /// Replaces the annotation of a pair of block and KV head, and nobody is told.
    ///
    /// # Errors
    /// A pair that is not there; what the device reports.
    pub fn annotate(&mut self, pair: usize, annotation: Annotation) -> Result<()> {
        Ok(self.annotations.write(pair, &[annotation])?)
    }

    /// The quantized pool and its annotations.
    ///
    /// # Errors
    /// What the device reports.
    pub fn quantized(&self) -> Result<(Vec<u8>, Vec<Annotation>)> {
        Ok((self.tiles.to_vec()?, self.annotations.to_vec()?))
    }

    /// Where a step finds everything.
    pub fn handles(&mut self) -> StepHandles<E> {
        // SAFETY: the same memory: four bytes a word.
        let tiles = unsafe { Global::from_raw(self.tiles.global().address(), self.tiles.len() / 4) };
        let near = match self.scratch == Scratch::NONE {
            true => Near::none(),
            false => Near {
                tiles: self.near.global_mut(),
                directory: self.directory.global_mut(),
                scratch: self.scratch,
            },
        };
        StepHandles {
            queries: self.queries.global(),
            tiles,
            annotations: self.annotations.global(),
            table: self.table.global(),
            lengths: self.lengths.global(),
            keys: self.keys.global(),
            values: self.values.global(),
            near,
        }
    }

    /// What a scratch holds: its tiles and its directory.
    ///
    /// # Errors
    /// What the device reports.
    pub fn scratch_contents(&self) -> Result<(Vec<E>, Vec<u64>)> {
        Ok((self.near.to_vec()?, self.directory.to_vec()?))
    }

    /// One step of what is loaded and asked. What it does not write is NaN.
    ///
    /// # Errors
    /// What the device reports.
    pub fn step(&mut self, plan: &mut StepPlan<E>, out: &mut Attended) -> Result<Returned> {
        self.step_over(plan, out, 0xff)
    }

    /// The same over a byte that is another one on each kind of device.
    pub(in crate::certified) fn step_poisoned(
        &mut self,
        plan: &mut StepPlan<E>,
        out: &mut Attended,
    ) -> Result<Returned> {
        let byte = crate::check::poison(self.device.kind());
        self.step_over(plan, out, byte)
    }

    fn step_over(&mut self, plan: &mut StepPlan<E>, out: &mut Attended, byte: u8) -> Result<Returned> {
        self.stream.fill_u8(&mut out.output, .., byte)?;
        self.stream.fill_u8(&mut out.lse, .., byte)?;
        self.stream.fill_u8(&mut out.certificates, .., byte)?;
        let handles = self.handles();
        // SAFETY: buffers of this trial, made for the problem; the table's entries are blocks of the pool and
        // each full one was quantized by `load`; what is returned is read before anything here goes.
        unsafe { plan.run(&self.stream, &handles, out.handles())? };
        self.stream.synchronize()?;
        Ok(Returned {
            output: out.output.to_vec()?,
            lse: out.lse.to_vec()?,
            certificates: out.certificates.to_vec()?,
        })
    }

    /// Dense attention over the same pools: outputs and log-sums.
    ///
    /// # Errors
    /// What the device reports.
    pub fn dense(&mut self) -> Result<(Vec<f32>, Vec<f32>)> {
        let StepProblem { sequences, q_heads, kv_heads, head_dim, max_tokens } = self.problem;
        let problem = dense::Problem { sequences, q_heads, kv_heads, head_dim, query_tokens: 1, max_tokens };
        let mut plan = dense::Plan::<E>::new(&self.device, problem)?;
        let mut out = plan.allocate()?;
        let handles = dense::Handles {
            queries: self.queries.global(),
            keys: self.keys.global(),
            values: self.values.global(),
            table: self.table.global(),
            lengths: self.lengths.global(),
            wanted: None,
            near: true,
            output: out.output.global_mut(),
            lse: out.lse.global_mut(),
        };
        // SAFETY: as in `step`.
        unsafe { plan.run_on(&self.stream, handles)? };
        self.stream.synchronize()?;
        Ok((out.output.to_vec()?, out.lse.to_vec()?))
    }
}
