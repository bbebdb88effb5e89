//! Blocks of originals to tiles and annotations, on the device.

use super::{Annotation, Error, Geometry, Job, Layout, Problems, Result, Rounding};
use crate::{Buffer, Device, Stream};
use glam::UVec2;
use half::{bf16, f16};
use kernels_gpu::Element;
use kernels_gpu::certified::{quantize_block, write_launch};
use simt::{GlobalMut, Kernel, Pod};
use std::marker::PhantomData;

/// The kernel that quantizes a block.
pub type QuantizeBlock<T> = Kernel<quantize_block::Args<T>>;

/// An element type of caches: f16 and bf16.
pub trait CertifiedElement: Element<Four = UVec2> {
    #[doc(hidden)]
    fn quantize_block(geometry: Geometry) -> QuantizeBlock<Self>;
}

macro_rules! elements {
    ($($t:ty),*) => {$(
        impl CertifiedElement for $t {
            fn quantize_block(geometry: Geometry) -> QuantizeBlock<$t> {
                match (geometry.head_dim(), geometry.layout().kind) {
                    (64, Layout::Compact) => quantize_block::kernel::<$t, 64, f16>(),
                    (64, Layout::Paper) => quantize_block::kernel::<$t, 64, f32>(),
                    (96, Layout::Compact) => quantize_block::kernel::<$t, 96, f16>(),
                    (96, Layout::Paper) => quantize_block::kernel::<$t, 96, f32>(),
                    (128, Layout::Compact) => quantize_block::kernel::<$t, 128, f16>(),
                    (128, Layout::Paper) => quantize_block::kernel::<$t, 128, f32>(),
                    // A geometry has no other.
                    (_, Layout::Compact) => quantize_block::kernel::<$t, 256, f16>(),
                    (_, Layout::Paper) => quantize_block::kernel::<$t, 256, f32>(),
                }
            }
        }
    )*};
}
elements!(f16, bf16);

/// Quantizes blocks of one geometry. It allocates at the start and nothing when it writes.
pub struct Writer<T: CertifiedElement> {
    device: Device,
    geometry: Geometry,
    /// Jobs of one launch.
    jobs: Buffer<Job>,
    problems: Buffer<u64>,
    element: PhantomData<T>,
}

impl<T: CertifiedElement> Writer<T> {
    /// A writer that quantizes up to `jobs` blocks a launch; longer lists take several.
    ///
    /// # Errors
    /// [`Error::TooMany`]; out of memory for the list of jobs (8 bytes each).
    pub fn new(device: &Device, geometry: Geometry, jobs: usize) -> Result<Self> {
        let fits = u32::try_from(jobs).is_ok_and(|jobs| {
            jobs > 0 && write_launch(geometry.layout(), geometry.kv_heads(), jobs).is_some()
        });
        if !fits {
            return Err(Error::TooMany { jobs, geometry });
        }
        let none = bytemuck::cast::<Problems, [u64; 4]>(Problems::NONE);
        Ok(Writer {
            device: device.clone(),
            geometry,
            jobs: Buffer::new(device, jobs)?,
            problems: Buffer::from_slice(device, &none)?,
            element: PhantomData,
        })
    }

    /// KV heads and their channels.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Rounds otherwise from here on.
    pub(super) fn set_rounding(&mut self, rounding: Rounding) {
        self.geometry = self.geometry.with_rounding(rounding);
    }

    /// Blocks in a buffer that should hold a whole number of them.
    fn blocks<P: Pod>(&self, what: &'static str, buffer: &Buffer<P>, per_block: usize) -> Result<usize> {
        if buffer.len().is_multiple_of(per_block) {
            return Ok(buffer.len() / per_block);
        }
        let expected = format!("a multiple of {per_block}");
        Err(Error::Length { what, got: buffer.len(), expected, geometry: self.geometry })
    }

    fn same<P: Pod>(&self, what: &'static str, buffer: &Buffer<P>, expected: usize) -> Result<()> {
        if buffer.len() == expected {
            return Ok(());
        }
        Err(Error::Length {
            what,
            got: buffer.len(),
            expected: expected.to_string(),
            geometry: self.geometry,
        })
    }

    /// Quantizes the blocks that `jobs` names: `keys` and `values` are pools `[block][kv_head][16][D]`,
    /// `tiles` and `annotations` pools `[block][kv_head]`. Waits for earlier work of the stream to take the
    /// list of jobs, and not for the quantization. What could not be quantized shows at
    /// [`check`](Self::check).
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::Block`], [`Error::Twice`]; [`crate::Error::WrongDevice`],
    /// [`crate::Error::Capturing`]; what the launch reports.
    pub fn write(
        &mut self,
        stream: &Stream,
        keys: &Buffer<T>,
        values: &Buffer<T>,
        jobs: &[Job],
        tiles: &mut Buffer<u8>,
        annotations: &mut Buffer<Annotation>,
    ) -> Result<()> {
        let geometry = self.geometry;
        stream.device().check_same(&self.device, "the writer")?;
        stream.device().check_same(keys.device(), "the pool of keys")?;
        stream.device().check_same(values.device(), "the pool of values")?;
        stream.device().check_same(tiles.device(), "the pool of tiles")?;
        stream.device().check_same(annotations.device(), "the buffer of annotations")?;
        let sources = self.blocks("the pool of keys", keys, geometry.pool_elements(1))?;
        self.same("the pool of values", values, keys.len())?;
        let destinations = self.blocks("the pool of tiles", tiles, geometry.tile_bytes(1))?;
        self.same("the buffer of annotations", annotations, geometry.pairs(destinations))?;
        check_jobs(jobs, sources, destinations)?;

        let kernel = T::quantize_block(geometry);
        let [by_chance, seed] = geometry.rounding().words();
        for jobs in jobs.chunks(self.jobs.len()) {
            // Ordered behind the launch that read the list before.
            stream.upload(jobs, &mut self.jobs, 0)?;
            let Some(shape) = write_launch(geometry.layout(), geometry.kv_heads(), jobs.len() as u32) else {
                return Err(Error::TooMany { jobs: jobs.len(), geometry });
            };
            let arguments = quantize_block::Args {
                jobs: self.jobs.global(),
                keys: keys.global(),
                values: values.global(),
                tiles: tiles.global_mut(),
                annotations: as_floats(annotations),
                problems: self.problems.global_mut(),
                kv_heads: geometry.kv_heads(),
                by_chance,
                seed,
            };
            // SAFETY: the buffers hold whole blocks, each job names blocks inside them, and no two the same
            // destination, all as just checked; dropping a buffer waits for the device.
            unsafe { stream.launch(&kernel, shape, arguments)? };
        }
        Ok(())
    }

    /// Waits for the stream, and says whether everything written since the last check could be quantized.
    ///
    /// # Errors
    /// [`Error::NotFinite`] or [`Error::Range`] for the first element that could not;
    /// [`crate::Error::Capturing`]; what a kernel did wrong.
    pub fn check(&mut self, stream: &Stream) -> Result<()> {
        let problems = self.take_problems(stream)?;
        self.geometry.verdict(problems)
    }

    /// Waits for the stream, and takes what was found since the last time.
    ///
    /// # Errors
    /// [`crate::Error::Capturing`]; what a kernel did wrong.
    pub fn take_problems(&mut self, stream: &Stream) -> Result<Problems> {
        let mut found = [0u64; 4];
        stream.download(&self.problems, 0, &mut found)?;
        let found = bytemuck::cast(found);
        if found != Problems::NONE {
            stream.fill_u32(&mut self.problems, .., u32::MAX)?;
        }
        Ok(found)
    }

    /// What was found so far, as the device's words: for kernels and graphs that quantize on their own.
    pub fn problems(&mut self) -> GlobalMut<u64> {
        self.problems.global_mut()
    }
}

/// The annotations as the floats that kernels see.
fn as_floats(annotations: &mut Buffer<Annotation>) -> GlobalMut<f32> {
    let handle = annotations.global_mut();
    // SAFETY: the same memory; an annotation is so many words.
    unsafe { GlobalMut::from_raw(handle.address(), handle.len() * Annotation::WORDS) }
}

/// Blocks inside the pools, no destination twice.
fn check_jobs(jobs: &[Job], sources: usize, destinations: usize) -> Result<()> {
    let mut seen = Vec::with_capacity(jobs.len());
    for (index, job) in jobs.iter().enumerate().filter(|(_, job)| **job != Job::NONE) {
        for (which, block, blocks) in
            [("source", job.source, sources), ("destination", job.destination, destinations)]
        {
            if block as usize >= blocks {
                return Err(Error::Block { index, which, block, blocks });
            }
        }
        seen.push(job.destination);
    }
    seen.sort_unstable();
    match seen.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(Error::Twice { block: pair[0] }),
        None => Ok(()),
    }
}
