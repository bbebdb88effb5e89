//! New tokens on their way into the tiles: the launches that encode them.

use super::{Books, Error, Result, encode, length};
use crate::attention::dense::Problem;
use crate::attention::rope::{Pairing, RopeShape, check_rope};
use crate::cpu::handles::{slice, slice_mut};
use crate::{Buffer, Device, Stream};
use half::f16;
use kernels_gpu::gtq::raw::{blocks, row_layout};
use kernels_gpu::gtq::{
    ENCODE_THREADS, EncodeShape, encode as encode_whole, encode_parts, rope_encode, rope_encode_parts,
};
use simt::{Global, GlobalMut, Kernel, LaunchShape};

/// The arguments of [`Encoder::run_on`]: memory of any kind that the device reaches.
#[derive(Clone, Copy, Debug)]
pub struct AppendHandles {
    /// New keys, [sequences, query_tokens, kv_heads, head_dim].
    pub new_keys: Global<f16>,
    /// New values, like the keys.
    pub new_values: Global<f16>,
    /// Where they go.
    pub places: Places,
}

/// The arguments of [`Encoder::rotate_and_run`], likewise.
#[derive(Clone, Copy, Debug)]
pub struct RawHandles {
    /// Queries, keys and values, [sequences, query_tokens, (q_heads + 2·kv_heads)·head_dim].
    pub qkv: Global<f32>,
    /// Radians a position, [rotary / 2].
    pub frequencies: Global<f32>,
    /// Channels of a head that turn.
    pub rotary: u32,
    /// Which of them turn together.
    pub pairing: Pairing,
    /// Where the rotated queries go, [sequences, query_tokens, q_heads, head_dim].
    pub queries: GlobalMut<f16>,
    /// Where keys and values go.
    pub places: Places,
}

/// Where new tokens belong, and the memory that they go to.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    /// Where each token belongs, [sequences, query_tokens]: a token past the table's last block is left out.
    pub positions: Global<u32>,
    /// [sequences, max_blocks].
    pub table: Global<u32>,
    /// Of keys in parts, [kv_heads, head_dim]: the channel that each dimension is. Empty of whole keys. It is
    /// read before the launches ahead have ended.
    pub order: Global<u8>,
    /// \[sequences\]: one more than the position of the sequence's last new token.
    pub lengths: GlobalMut<u32>,
    /// The pool, [blocks, kv_heads] tiles.
    pub tiles: GlobalMut<u32>,
    /// The window, [sequences, kv_heads] slots.
    pub near: GlobalMut<u32>,
    /// \[2\]: the first key and the first value that could not be stored, position · kv_heads + head;
    /// `u32::MAX` before.
    pub problems: GlobalMut<u32>,
}

/// The kernels that rotate and encode, for whole keys and for keys in parts.
type RopeEncode = (Kernel<rope_encode::Args>, Kernel<rope_encode_parts::Args>);

/// Those of a head_dim and pairing.
pub(super) fn rope_encode_kernels(head_dim: u32, pairing: Pairing) -> RopeEncode {
    match (head_dim, pairing) {
        (64, Pairing::HalfSplit) => (rope_encode::kernel::<64, 0>(), rope_encode_parts::kernel::<64, 0>()),
        (64, Pairing::Interleaved) => (rope_encode::kernel::<64, 1>(), rope_encode_parts::kernel::<64, 1>()),
        (_, Pairing::HalfSplit) => (rope_encode::kernel::<128, 0>(), rope_encode_parts::kernel::<128, 0>()),
        (_, Pairing::Interleaved) => (rope_encode::kernel::<128, 1>(), rope_encode_parts::kernel::<128, 1>()),
    }
}

/// What encodes: levels of keys and values where the device finds them.
#[derive(Debug)]
pub struct Encoder {
    books: Books,
    /// Levels of keys in parts.
    numbers: Buffer<f32>,
}

impl Encoder {
    /// With these levels, on a device.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(device: &Device, books: Books) -> Result<Self> {
        let numbers = Buffer::from_slice(device, &books.part_numbers())?;
        Ok(Encoder { books, numbers })
    }

    /// How it quantizes, and where codes lie.
    pub fn books(&self) -> &Books {
        &self.books
    }

    /// What a launch for a problem is told, if stream, problem and places go together.
    fn checked(&self, stream: &Stream, problem: Problem, places: &Places) -> Result<EncodeShape> {
        stream.device().check_same(self.numbers.device(), "the encoder")?;
        let problem = problem.checked()?;
        let Problem { sequences, kv_heads, head_dim, query_tokens, .. } = problem;
        let layout = self.books.layout;
        if head_dim != layout.head_dim {
            return Err(Error::HeadDim { head_dim });
        }
        let tile = layout.bytes() as usize / 4 * kv_heads as usize;
        length("the buffer of positions", places.positions.len(), (sequences * query_tokens) as usize)?;
        let entries = sequences as usize * problem.max_blocks() as usize;
        length("the block table", places.table.len(), entries)?;
        length("the buffer of lengths", places.lengths.len(), sequences as usize)?;
        length("the pool", places.tiles.len(), places.tiles.len() / tile * tile)?;
        length("the window", places.near.len(), self.books.window_words(problem))?;
        length("the words of problems", places.problems.len(), 2)?;
        length("the order of channels", places.order.len(), self.books.order_bytes(kv_heads))?;
        Ok(self.books.encode_shape(problem))
    }

    /// Encodes `problem.query_tokens` new tokens of each sequence, in one launch; with `slices` on the CPU's
    /// own path in its place, which gives the same bits. It allocates nothing, waits for nothing and can be
    /// captured.
    ///
    /// # Safety
    /// Until the launch has finished (for a capture: until each run of the graph has):
    /// - the encoder and the memory behind every handle are there, reached by the stream's device, and
    ///   nothing else writes it, or touches what is written; with `slices` it is host memory;
    /// - no two tokens have one place, and the table's entries up to each position are blocks of the pool;
    /// - the order's entries are below `head_dim`, and no launch of the stream writes them.
    ///
    /// # Errors
    /// [`Error::Length`] for handles of another problem; those of [`Problem::checked`]; what the launch
    /// reports.
    pub unsafe fn run_on(
        &self,
        stream: &Stream,
        problem: Problem,
        slices: bool,
        handles: AppendHandles,
    ) -> Result<()> {
        let AppendHandles { new_keys: keys, new_values: values, places } = handles;
        let shape = self.checked(stream, problem, &places)?;
        let Problem { sequences, kv_heads, head_dim, query_tokens, .. } = problem;
        let elements = places.positions.len() * (kv_heads * head_dim) as usize;
        length("the buffer of new keys", keys.len(), elements)?;
        length("the buffer of new values", values.len(), elements)?;
        let Places { positions, table, order, lengths, tiles, near, problems } = places;
        if slices {
            // SAFETY: the caller's word; the emulator's streams have done what they were told when a call
            // returns.
            unsafe {
                let new = encode::New {
                    keys: slice(keys),
                    values: slice(values),
                    positions: slice(positions),
                    table: slice(table),
                    order: slice(order),
                };
                let kept = encode::Kept {
                    lengths: slice_mut(lengths),
                    tiles: slice_mut(tiles.cast::<u8>()),
                    near: slice_mut(near.cast::<u8>()),
                    problems: slice_mut(problems),
                };
                encode::append(&self.books, shape, new, kept);
            }
            return Ok(());
        }
        let (tiles, near) = (tiles.cast::<u8>(), near.cast::<u8>());
        let grid = (query_tokens, blocks(0, kv_heads, head_dim)[0], sequences);
        let launch = LaunchShape::new(grid, ENCODE_THREADS);
        if self.books.layout.parted {
            let kernel =
                if head_dim == 64 { encode_parts::kernel::<64>() } else { encode_parts::kernel::<128>() };
            let books = self.numbers.global();
            let args = encode_parts::Args {
                keys,
                values,
                positions,
                table,
                order,
                lengths,
                tiles,
                near,
                problems,
                books,
                shape,
            };
            // SAFETY: as below, and the order has channels of the head.
            return Ok(unsafe { stream.launch(&kernel, launch, args) }?);
        }
        let kernel =
            if head_dim == 64 { encode_whole::kernel::<64>() } else { encode_whole::kernel::<128>() };
        let args =
            encode_whole::Args { keys, values, positions, table, lengths, tiles, near, problems, shape };
        // SAFETY: lengths as just checked, a position past the table is left out, and the rest is this
        // function's contract.
        Ok(unsafe { stream.launch(&kernel, launch, args) }?)
    }

    /// Turns queries and keys and encodes, in one launch: the bits of
    /// [`rotate`](crate::attention::rope::rotate) and [`run_on`](Self::run_on) one after another. It
    /// allocates nothing, waits for nothing and can be captured.
    ///
    /// # Safety
    /// As [`run_on`](Self::run_on).
    ///
    /// # Errors
    /// As [`run_on`](Self::run_on); more channels that turn than a head has.
    pub unsafe fn rotate_and_run(
        &self,
        stream: &Stream,
        problem: Problem,
        handles: RawHandles,
    ) -> Result<()> {
        let RawHandles { qkv, frequencies, rotary, pairing, queries, places } = handles;
        let shape = self.checked(stream, problem, &places)?;
        let Problem { sequences, q_heads, kv_heads, head_dim, query_tokens, .. } = problem;
        let rows = places.positions.len();
        let heads = (q_heads + 2 * kv_heads) as usize;
        length("the buffer of queries, keys and values", qkv.len(), rows * heads * head_dim as usize)?;
        length("the buffer of queries", queries.len(), rows * (q_heads * head_dim) as usize)?;
        let rope = RopeShape { q_heads, kv_heads, head_dim, rotary };
        check_rope(rope)?;
        length("the table of frequencies", frequencies.len(), rotary as usize / 2)?;
        let Places { positions, table, order, lengths, tiles, near, problems } = places;
        let (tiles, near) = (tiles.cast::<u8>(), near.cast::<u8>());
        let shared = if head_dim == 64 { row_layout::<64>().1 } else { row_layout::<128>().1 };
        let grid = (query_tokens, blocks(q_heads, kv_heads, head_dim).iter().sum::<u32>(), sequences);
        let launch = LaunchShape::new(grid, ENCODE_THREADS).shared(shared);
        let (whole, parts) = rope_encode_kernels(head_dim, pairing);
        if self.books.layout.parted {
            let books = self.numbers.global();
            let args = rope_encode_parts::Args {
                qkv,
                positions,
                frequencies,
                queries,
                table,
                order,
                lengths,
                tiles,
                near,
                problems,
                books,
                rope,
                shape,
            };
            // SAFETY: as below, and the order has channels of the head.
            return Ok(unsafe { stream.launch(&parts, launch, args) }?);
        }
        let args = rope_encode::Args {
            qkv,
            positions,
            frequencies,
            queries,
            table,
            lengths,
            tiles,
            near,
            problems,
            rope,
            shape,
        };
        // SAFETY: lengths as just checked, a position past the table is left out, and the rest is this
        // function's contract.
        Ok(unsafe { stream.launch(&whole, launch, args) }?)
    }
}
