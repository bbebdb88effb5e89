//! A cache in two tiers: quantized blocks on the GPU, their originals in page-locked host memory.
//!
//! # What is where
//! | memory | what |
//! |---|---|
//! | GPU | tiles and annotations of every block; the scratch; fresh blocks; table, lengths, limits |
//! | host, mapped | the originals of every block |
//!
//! Blocks of 16 tokens belong to one pool, whatever sequence has them. A full block never changes again, so
//! that forks share it.
//!
//! # The block that is being filled
//! Each sequence has a *fresh* block in the GPU's memory, and a row goes there and to the originals. A step
//! reads its trailing blocks there, and a full one is quantized from there. The alternative, keeping trailing
//! blocks in the scratch, would let two of them, or a promoted block and one of them, want the same slot; and
//! with no scratch every step would read them over the bus. So: 64·D bytes for each sequence and KV head, no
//! eviction, no tags, and no host memory is ever read to append.
//!
//! # Sequences that begin near
//! Where steps gain nothing from quantized blocks, because the slots hold all originals that there are, a
//! cache can begin with *resident* sequences: [`begin_residence`](TieredCache::begin_residence).
//!
//! # What the host knows
//! The device's lengths are the truth: kernels advance them, in a graph without the host. An append checks a
//! row's limit, which [`reserve`](TieredCache::reserve) raises after it has put the blocks into the table.
//! What the host keeps beside it is exact as long as it has seen every append, and asked anew where it has
//! not.
//!
//! # From a product
//! A model's step gives queries, keys and values as one product leaves them: `turning` takes them from there
//! to the fresh block, and to a tile if it is full, in one launch in place of three.
//!
//! # On the CPU
//! Calls that are not captured do their work on slices, with the kernels' bits in all that is listed above.
//! Captured ones, and all of a cache [`with_kernels`](TieredCache::with_kernels), are launches under the
//! emulator.
//!
//! # Use
//! One stream at a time: a call's work must be ordered behind that of the calls before.

mod attend;
mod book;
pub mod cases;
mod error;
mod extents;
mod residence;
mod sequences;
mod slices;
mod tokens;
mod turn_cases;
mod turning;

use super::{Annotation, BLOCK_TOKENS, CertifiedElement, Geometry, Result, Scratch, StepElement, Traffic};
use crate::{Buffer, Device, Pinned, Stream};
use book::Book;
pub use error::{CacheError, Refused};
pub use extents::{Extents, Memory};
use half::{bf16, f16};
use kernels_gpu::certified::admit::{LAST, TOTAL};
use kernels_gpu::certified::layout::{Job, Problems};
use kernels_gpu::certified::{CacheShape, Refusals, append, inspect, prefill};
use simt::Kernel;

type Append<E> = Kernel<append::Args<E>>;

type Prefill<E> = Kernel<prefill::Args<E>>;

type Inspect<E> = Kernel<inspect::Args<E>>;

/// The kernels that fill a cache.
#[doc(hidden)]
#[derive(Debug)]
pub struct CacheKernels<E: CacheElement> {
    append: Append<E>,
    prefill: Prefill<E>,
    inspect: Inspect<E>,
}

/// An element type of a [`TieredCache`]: f16 and bf16.
pub trait CacheElement: CertifiedElement + StepElement {
    #[doc(hidden)]
    fn cache_kernels() -> CacheKernels<Self>;
}

macro_rules! elements {
    ($($t:ty),*) => {$(
        impl CacheElement for $t {
            fn cache_kernels() -> CacheKernels<$t> {
                CacheKernels {
                    append: append::kernel::<$t>(),
                    prefill: prefill::kernel::<$t>(),
                    inspect: inspect::kernel::<$t>(),
                }
            }
        }
    )*};
}
elements!(f16, bf16);

/// A sequence of one cache, until it is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SequenceId {
    row: u32,
    generation: u32,
}

impl SequenceId {
    /// Its place in batches: in the queries, the appended tokens, and what a step writes.
    pub fn row(self) -> u32 {
        self.row
    }
}

/// Keys and values of many sequences, quantized on the GPU as blocks fill, with the originals in host memory.
pub struct TieredCache<E: CacheElement> {
    device: Device,
    extents: Extents,
    shape: CacheShape,
    scratch: Scratch,
    kernels: CacheKernels<E>,
    book: Book,
    /// Appends were captured, and may have run unseen.
    captured: bool,
    /// Whether calls take the CPU's own path in place of the kernels.
    own_path: bool,
    tiles: Buffer<u32>,
    annotations: Buffer<Annotation>,
    table: Buffer<u32>,
    lengths: Buffer<u32>,
    limits: Buffer<u32>,
    near: Buffer<E>,
    directory: Buffer<u64>,
    jobs: Buffer<Job>,
    /// What quantizing found.
    problems: Buffer<u64>,
    /// What appending refused, and what prefill did.
    refusals: [Buffer<u64>; 2],
    keys: Pinned<E>,
    values: Pinned<E>,
}

impl<E: CacheElement> TieredCache<E> {
    /// An empty cache.
    ///
    /// # Errors
    /// [`CacheError::Extents`]; [`Error::Geometry`](super::Error::Geometry) cannot happen, for there is a
    /// geometry; out of memory, of the device or of what the host can lock.
    pub fn new(device: &Device, extents: Extents) -> Result<Self> {
        let scratch = extents.checked()?;
        let Extents { geometry, blocks, sequences, max_tokens, .. } = extents;
        let blocks_size = blocks as usize;
        let shape = extents.shape();
        let mut directory = vec![0u64; scratch.words() as usize];
        let first_slot = Scratch::word(0);
        for slot in directory[first_slot..].chunks_exact_mut(2) {
            slot.copy_from_slice(&[u64::MAX, u64::from(Scratch::EMPTY)]);
        }
        let refusals = bytemuck::cast::<Refusals, [u64; 5]>(Refusals::NONE);
        let problems = bytemuck::cast::<Problems, [u64; 4]>(Problems::NONE);
        let tile = geometry.layout().elements() as usize;
        let originals = geometry.pool_elements(blocks_size);
        Ok(TieredCache {
            device: device.clone(),
            extents,
            shape,
            scratch,
            kernels: E::cache_kernels(),
            book: Book::new(sequences, blocks, max_tokens),
            captured: false,
            own_path: device.has_host_paths(),
            tiles: Buffer::new(device, geometry.tile_bytes(blocks_size) / 4)?,
            annotations: Buffer::new(device, geometry.pairs(blocks_size))?,
            table: Buffer::zeroed(device, sequences as usize * shape.max_blocks as usize)?,
            lengths: Buffer::zeroed(device, sequences as usize)?,
            limits: Buffer::zeroed(device, sequences as usize)?,
            near: Buffer::zeroed(device, scratch.tiles() as usize * tile)?,
            directory: Buffer::from_slice(device, &directory)?,
            jobs: Buffer::zeroed(device, extents.jobs() as usize)?,
            problems: Buffer::from_slice(device, &problems)?,
            refusals: [Buffer::from_slice(device, &refusals)?, Buffer::from_slice(device, &refusals)?],
            keys: Pinned::zeroed(device, originals)?,
            values: Pinned::zeroed(device, originals)?,
        })
    }

    /// The kernels on every device: on the CPU the emulator, which gives the bits of the CPU's own path and
    /// takes some hundred times as long.
    pub fn with_kernels(mut self) -> Self {
        self.own_path = false;
        self
    }

    /// Whether a call takes the CPU's own path: a graph wants launches.
    fn on_slices(&self, stream: &Stream) -> bool {
        self.own_path && !stream.is_capturing()
    }

    /// As it was made.
    pub fn extents(&self) -> Extents {
        self.extents
    }

    /// KV heads and their channels.
    pub fn geometry(&self) -> Geometry {
        self.extents.geometry
    }

    /// Where it is.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Blocks that no sequence has, nor has reserved.
    pub fn free_blocks(&self) -> usize {
        self.book.free_blocks()
    }

    /// Bytes by what they are for: those of the buffers that the cache owns.
    pub fn memory(&self) -> Memory {
        let tile = self.geometry().layout().elements() as usize * size_of::<E>();
        Memory {
            tiles: self.tiles.bytes(),
            annotations: self.annotations.bytes(),
            scratch_keys: self.scratch.key_slots as usize * tile,
            scratch_values: self.scratch.value_slots as usize * tile,
            fresh: self.near.bytes()
                - (self.scratch.key_slots as usize + self.scratch.value_slots as usize) * tile,
            directory: self.directory.bytes(),
            tables: self.table.bytes() + self.lengths.bytes() + self.limits.bytes(),
            work: self.jobs.bytes()
                + self.problems.bytes()
                + self.refusals.iter().map(Buffer::bytes).sum::<usize>(),
            host: self.keys.bytes() + self.values.bytes(),
        }
    }

    /// What steps read in place of quantized blocks: the last one, and all of them. Waits for the stream.
    ///
    /// # Errors
    /// [`crate::Error::Capturing`]; what a kernel did wrong.
    pub fn traffic(&self, stream: &Stream) -> Result<[Traffic; 2]> {
        let mut words = [0u64; 8];
        stream.download(&self.directory, LAST, &mut words)?;
        const { assert!(TOTAL == LAST + 4) };
        Ok(bytemuck::cast(words))
    }
}

impl<E: CacheElement> Drop for TieredCache<E> {
    fn drop(&mut self) {
        // Kernels may be using the host's memory. What they did wrong was somebody else's to ask.
        if let Err(error) = self.device.synchronize() {
            tracing::debug!(%error, "waiting for the device before its host memory goes");
        }
    }
}

impl<E: CacheElement> std::fmt::Debug for TieredCache<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TieredCache").field("extents", &self.extents).finish_non_exhaustive()
    }
}
