//! What a layer holds: codes of all tokens, the most recent ones in f16.

use super::books::Tables;
use super::cpu;
use super::setting::{checked, name};
use super::{Error, Result, Setting};
use crate::attention::{BLOCK_TOKENS, StepProblem};
use crate::cpu::handles::{slice, slice_mut};
use crate::simd_level::Level;
use crate::{Buffer, Device, Stream};
use half::f16;
use kernels_gpu::vecinfer::{
    Code, ENCODE_THREADS, EncodeShape, RESTORE_THREADS, Shape, encode, encode_bytes, restore,
};
use simt::{Global, GlobalMut, Kernel, KernelInfo, LaunchShape};

const TILE: usize = BLOCK_TOKENS as usize;

/// The kernel's handle, and its shared memory.
type EncodeKernel = (Kernel<encode::Args>, u32);

macro_rules! instances {
    ($($dim:literal: $($code:literal)*;)*) => {
        /// The instances for a head_dim and a code.
        fn kernels_of(head_dim: u32, code: Code) -> Option<(EncodeKernel, Kernel<restore::Args>)> {
            match (head_dim, code.number()) {
                $($(
                    ($dim, $code) => Some((
                        (encode::kernel::<$dim, $code>(), encode_bytes::<$dim, $code>()),
                        restore::kernel::<$dim, $code>(),
                    )),
                )*)*
                _ => None,
            }
        }

        /// The codes that there are kernels for.
        pub(super) fn encoded(head_dim: u32) -> &'static [u32] {
            match head_dim {
                $($dim => &[$($code),*],)*
                _ => &[],
            }
        }
    };
}
instances!(
    64: 208 408 410 412 808 810 812;
    96: 208 408;
    128: 208 408 410 412 808 810 812;
    256: 408 812;
);

/// Those of keys and of values.
fn kernels_for(head_dim: u32, setting: Setting) -> Result<[(EncodeKernel, Kernel<restore::Args>); 2]> {
    let refuse = || {
        let named = encoded(head_dim).iter().map(|number| name(Code::of(*number)));
        let there = named.collect::<Vec<_>>().join(", ");
        Error::Codes {
            keys: name(setting.keys),
            values: name(setting.values),
            head_dim: Some(head_dim),
            there,
        }
    };
    let of = |code| kernels_of(head_dim, code).ok_or_else(refuse);
    Ok([of(setting.keys)?, of(setting.values)?])
}

/// Their entries.
pub(super) fn kernel_info(head_dim: u32, setting: Setting) -> Result<Vec<&'static KernelInfo>> {
    let kernels = kernels_for(head_dim, setting)?;
    Ok(kernels.iter().flat_map(|((encode, _), restore)| [encode.info(), restore.info()]).collect())
}

/// Keys and values of one layer, of all sequences.
#[derive(Debug)]
pub struct Store {
    setting: Setting,
    problem: StepProblem,
    shape: Shape,
    /// [sequences, kv_heads, tiles, bytes of a tile].
    pub(super) codes: Buffer<u8>,
    /// [sequences, kv_heads, slots, 16, head_dim], transformed.
    pub(super) recent_keys: Buffer<f16>,
    /// Likewise, as they are.
    pub(super) recent_values: Buffer<f16>,
    /// 0, or 2·position + 1 for a key and + 2 for a value that is not finite.
    refused: Buffer<u32>,
    encode: [EncodeKernel; 2],
    restore: [Kernel<restore::Args>; 2],
}

/// Where new tokens come from.
#[derive(Clone, Copy, Debug)]
pub enum Source {
    /// Rows [sequences, tokens, kv_heads, head_dim].
    Rows,
    /// A pool [blocks, kv_heads, 16, head_dim], by a table [sequences, max_blocks].
    Pool {
        /// The table.
        table: Global<u32>,
        /// Entries of a row.
        max_blocks: u32,
    },
}

/// New tokens.
#[derive(Clone, Copy, Debug)]
pub struct Encode {
    /// The first sequence that gets some.
    pub sequence: u32,
    /// How many sequences do, and how many tokens each.
    pub counts: [u32; 2],
    /// Where keys and values are.
    pub source: Source,
    /// Rotated keys.
    pub keys: Global<f16>,
    /// Values.
    pub values: Global<f16>,
    /// Positions, \[sequences, tokens\]: the first of each sequence is read, the others follow.
    pub positions: Global<u32>,
    /// Of the sequences, \[sequences\]: becomes one more than the last position.
    pub lengths: GlobalMut<u32>,
    /// Pools that get what is stored as well, block t the tile t of the one sequence there is.
    pub pool: Option<[GlobalMut<f16>; 2]>,
}

impl Store {
    /// An empty one.
    ///
    /// # Errors
    /// [`Error::HeadDim`], [`Error::Codes`], [`Error::TooLong`]; out of memory.
    pub fn new(device: &Device, problem: StepProblem, setting: Setting) -> Result<Self> {
        let problem = checked(problem)?;
        let shape = setting.shape(problem);
        let [(encode_keys, restore_keys), (encode_values, restore_values)] =
            kernels_for(problem.head_dim, setting)?;
        let rows = problem.sequences as usize * problem.kv_heads as usize;
        let window = rows * shape.window.slots as usize * TILE * problem.head_dim as usize;
        let bytes = rows * shape.tiles as usize * setting.tile_bytes(problem.head_dim) as usize;
        Ok(Store {
            setting,
            problem,
            shape,
            // Words of tokens that are not there are read with those that are.
            codes: Buffer::zeroed(device, bytes)?,
            recent_keys: Buffer::zeroed(device, window)?,
            recent_values: Buffer::zeroed(device, window)?,
            refused: Buffer::zeroed(device, 1)?,
            encode: [encode_keys, encode_values],
            restore: [restore_keys, restore_values],
        })
    }

    /// How it stores.
    pub fn setting(&self) -> Setting {
        self.setting
    }

    /// What it is for.
    pub fn problem(&self) -> StepProblem {
        self.problem
    }

    pub(super) fn shape(&self) -> Shape {
        self.shape
    }

    /// The codes, [sequences, kv_heads, tiles, bytes of a tile].
    pub fn codes(&self) -> &Buffer<u8> {
        &self.codes
    }

    /// The windows of keys and of values, [sequences, kv_heads, slots, 16, head_dim].
    pub fn recent(&self) -> [&Buffer<f16>; 2] {
        [&self.recent_keys, &self.recent_values]
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        self.codes.bytes() + self.recent_keys.bytes() + self.recent_values.bytes()
    }

    /// Elements of a sequence: of codes, of a window.
    fn of_sequence(&self) -> [usize; 2] {
        let sequences = self.problem.sequences as usize;
        [self.codes.len() / sequences, self.recent_keys.len() / sequences]
    }

    /// Kernels to launch: of keys and values at once, where both have the same code.
    fn kinds(&self) -> &'static [(usize, u32)] {
        if self.setting.keys == self.setting.values { &[(0, 2)] } else { &[(0, 1), (1, 1)] }
    }

    /// Puts new tokens in. With `slices` on the CPU's own path, which gives the same.
    ///
    /// # Safety
    /// Until the launch has finished, for a capture until each run of the graph has: the memory behind the
    /// handles is there, host memory with `slices`, keys and values of all tokens, and nothing else touches
    /// what is written. Positions past the room are left out.
    ///
    /// # Errors
    /// [`Error::Length`]; what the launches report.
    pub unsafe fn encode_on(
        &mut self,
        stream: &Stream,
        slices: bool,
        tables: &Tables,
        new: Encode,
    ) -> Result<()> {
        let [sequences, tokens] = new.counts;
        let rows = sequences as usize * tokens as usize;
        super::error::length("the buffer of positions", new.positions.len(), rows)?;
        super::error::length("the buffer of lengths", new.lengths.len(), sequences as usize)?;
        let (got, expected) = ((new.sequence + sequences) as usize, self.problem.sequences as usize);
        if got > expected {
            return Err(Error::Length { what: "the range of sequences", got, expected });
        }
        let (table, max_blocks) = match new.source {
            Source::Rows => (new.positions, 0),
            Source::Pool { table, max_blocks } => (table, max_blocks),
        };
        let shape = EncodeShape {
            max_blocks,
            to_pool: new.pool.is_some().into(),
            ..self.setting.encode_shape(tables.complete(self.shape), self.problem.head_dim, tokens)
        };
        let [of_codes, of_window] = self.of_sequence();
        let first = new.sequence as usize;
        let codes = self.codes.global_range_mut(first * of_codes..)?;
        let recent_keys = self.recent_keys.global_range_mut(first * of_window..)?;
        let recent_values = self.recent_values.global_range_mut(first * of_window..)?;
        let [pool_keys, pool_values] = new.pool.unwrap_or([recent_keys, recent_values]);
        if slices {
            // SAFETY: the caller's word, and this store's own memory.
            unsafe {
                let from = cpu::Encoding {
                    setting: self.setting,
                    head_dim: self.problem.head_dim,
                    shape,
                    keys: slice(new.keys),
                    values: slice(new.values),
                    positions: slice(new.positions),
                    table: slice(table),
                    tables,
                };
                let to = cpu::Encoded {
                    codes: slice_mut(codes),
                    recent: [slice_mut(recent_keys), slice_mut(recent_values)],
                    pool: new.pool.map(|pool| pool.map(|half| slice_mut(half))),
                    lengths: slice_mut(new.lengths),
                    refused: &mut slice_mut(self.refused.global_mut())[0],
                };
                cpu::encode(Level::best(), from, to);
            }
            return Ok(());
        }
        for (kind, kinds) in self.kinds() {
            let (kernel, bytes) = &self.encode[*kind];
            let tiles = if tokens == 1 { 1 } else { (tokens - 1).div_ceil(BLOCK_TOKENS) + 1 };
            let grid = (tiles, self.problem.kv_heads * kinds, sequences);
            let args = encode::Args {
                keys: new.keys,
                values: new.values,
                positions: new.positions,
                table,
                transforms: tables.transform.global(),
                key_books: tables.keys.global(),
                value_books: tables.values.global(),
                key_norms: tables.norms[0].global(),
                value_norms: tables.norms[1].global(),
                codes,
                recent_keys,
                recent_values,
                pool_keys,
                pool_values,
                lengths: new.lengths,
                refused: self.refused.global_mut(),
                shape: EncodeShape { first_kind: *kind as u32, ..shape },
            };
            let launch = LaunchShape::new(grid, ENCODE_THREADS).shared(*bytes);
            // SAFETY: the caller's word; a thread block is alone with a tile, and what is past the room is
            // left out.
            unsafe { stream.launch(kernel, launch, args) }?;
        }
        Ok(())
    }

    /// Writes the first `length` tokens of a sequence as they are stored to pools, tile t to block t.
    ///
    /// # Safety
    /// As [`encode_on`](Self::encode_on): the pools have as many blocks, and the sequence as many tokens.
    ///
    /// # Errors
    /// What the launches report.
    pub unsafe fn restore_on(
        &self,
        stream: &Stream,
        slices: bool,
        tables: &Tables,
        (sequence, length): (u32, u32),
        [pool_keys, pool_values]: [GlobalMut<f16>; 2],
    ) -> Result<()> {
        let shape = self.setting.encode_shape(tables.complete(self.shape), self.problem.head_dim, 0);
        let [of_codes, of_window] = self.of_sequence();
        let first = sequence as usize;
        let codes = self.codes.global_range(first * of_codes..(first + 1) * of_codes)?;
        let window = first * of_window..(first + 1) * of_window;
        let recent_keys = self.recent_keys.global_range(window.clone())?;
        let recent_values = self.recent_values.global_range(window)?;
        if slices {
            // SAFETY: the caller's word, and this store's own memory.
            unsafe {
                let stored = cpu::Stored {
                    setting: self.setting,
                    head_dim: self.problem.head_dim,
                    shape: shape.cache,
                    codes: slice(codes),
                    recent: [slice(recent_keys), slice(recent_values)],
                    books: [slice(tables.keys.global()), slice(tables.values.global())],
                };
                cpu::restore(stored, length, [slice_mut(pool_keys), slice_mut(pool_values)]);
            }
            return Ok(());
        }
        for (kind, kinds) in self.kinds() {
            let grid = (length.div_ceil(BLOCK_TOKENS), self.problem.kv_heads, *kinds);
            let args = restore::Args {
                codes,
                recent_keys,
                recent_values,
                key_books: tables.keys.global(),
                value_books: tables.values.global(),
                pool_keys,
                pool_values,
                length,
                shape: EncodeShape { first_kind: *kind as u32, ..shape },
            };
            // SAFETY: the caller's word.
            unsafe { stream.launch(&self.restore[*kind], LaunchShape::new(grid, RESTORE_THREADS), args) }?;
        }
        Ok(())
    }

    /// What the codes of a sequence's first `length` tokens stand for, keys and values, [tokens, kv_heads,
    /// head_dim]: keys in the space of the model.
    ///
    /// # Errors
    /// What the copies report.
    pub(super) fn restored(&self, tables: &Tables, sequence: usize, length: usize) -> Result<[Vec<f32>; 2]> {
        let [of_codes, _] = self.of_sequence();
        let mut codes = vec![0; of_codes];
        self.codes.read(sequence * of_codes, &mut codes)?;
        let (keys, values) = (tables.keys.to_vec()?, tables.values.to_vec()?);
        let stored = cpu::Stored {
            setting: self.setting,
            head_dim: self.problem.head_dim,
            shape: tables.complete(self.shape),
            codes: &codes,
            recent: [&[], &[]],
            books: [&keys, &values],
        };
        let mut rows = [cpu::from_codes(stored, 0, length), cpu::from_codes(stored, 1, length)];
        cpu::turn_back(
            stored.shape,
            self.problem.head_dim as usize,
            &tables.transform.to_vec()?,
            &mut rows[0],
        );
        Ok(rows)
    }

    /// Sequence `to` gets what sequence `from` has of its first `tokens` tokens.
    ///
    /// # Errors
    /// What the copies report.
    pub fn copy(&mut self, stream: &Stream, from: usize, to: usize, tokens: usize) -> Result<()> {
        let [of_codes, of_window] = self.of_sequence();
        let heads = self.problem.kv_heads as usize;
        let (of_head, tile) = (of_codes / heads, self.setting.tile_bytes(self.problem.head_dim) as usize);
        let used = tokens.div_ceil(TILE) * tile;
        // A copy has two buffers: by way of one that lasts until it is done.
        let device = stream.device().clone();
        let mut codes = Buffer::<u8>::new(&device, heads * used)?;
        for head in 0..heads {
            let at = from * of_codes + head * of_head;
            stream.copy(&self.codes, at..at + used, &mut codes, head * used)?;
        }
        for head in 0..heads {
            let at = to * of_codes + head * of_head;
            stream.copy(&codes, head * used..(head + 1) * used, &mut self.codes, at)?;
        }
        for window in [&mut self.recent_keys, &mut self.recent_values] {
            let mut kept = Buffer::<f16>::new(&device, of_window)?;
            stream.copy(window, from * of_window..(from + 1) * of_window, &mut kept, 0)?;
            stream.copy(&kept, .., window, to * of_window)?;
        }
        Ok(stream.synchronize()?)
    }

    /// 0, or 2·position + 1 for a key and + 2 for a value that is not finite.
    pub(super) fn refused(&self) -> &Buffer<u32> {
        &self.refused
    }

    pub(super) fn refused_mut(&mut self) -> GlobalMut<u32> {
        self.refused.global_mut()
    }

    /// Whether all that was put in is finite. Waits for the stream.
    ///
    /// # Errors
    /// [`Error::NotFinite`]; what the device reports.
    pub fn check(&self, stream: &Stream, layer: usize) -> Result<()> {
        stream.synchronize()?;
        let mut found = [0];
        self.refused.read(0, &mut found)?;
        match found[0] {
            0 => Ok(()),
            mark => {
                let what = if mark % 2 == 1 { "key" } else { "value" };
                Err(Error::NotFinite { what, token: (mark - 1) / 2, layer })
            }
        }
    }
}
