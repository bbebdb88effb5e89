//! Tiles and queries to try kernels on: any bytes are codes, so that pools are made up as they are.

use super::plan::Books;
use super::{Handles, Plan, Settings};
#[cfg(test)]
use super::{near, rows};
use crate::attention::BLOCK_TOKENS;
use crate::attention::dense::Problem;
use crate::attention::dense::sample::normal;
use crate::{Buffer, Device, Stream};
use half::f16;
use kernels_gpu::gtq::Side;
use kernels_gpu::gtq::parts::{UNIT, norm_byte};
use kernels_gpu::mixed;

/// What a pool and its queries hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Input {
    /// Codes as they come, n about 1, queries about N(0, 1).
    Normal,
    /// The same with long keys: few tokens matter, and references move.
    Sharp,
    /// n of keys and values over all that f16 has, zeros among them.
    Wide,
    /// One code everywhere, and queries of equal elements, the largest there are among them.
    Equal,
    /// Queries of zeros, subnormal numbers, infinities and NaN.
    Hostile,
}

impl Input {
    pub(super) const ALL: [Input; 5] =
        [Input::Normal, Input::Sharp, Input::Wide, Input::Equal, Input::Hostile];

    pub(super) fn name(self) -> &'static str {
        match self {
            Input::Normal => "normal",
            Input::Sharp => "sharp",
            Input::Wide => "wide",
            Input::Equal => "equal",
            Input::Hostile => "hostile",
        }
    }

    /// Number `index` of the queries.
    fn query(self, index: usize, head_dim: usize) -> f16 {
        let row = index / head_dim;
        let x = f16::from_f32(normal(17, index as u64));
        match self {
            Input::Equal if row == 1 => f16::MAX,
            Input::Equal => f16::ONE,
            Input::Hostile => match row % 5 {
                0 => f16::ZERO,
                1 => f16::from_bits(mixed(5, index as u64) as u16 & 0x83ff),
                2 if index % head_dim == 7 => f16::INFINITY,
                3 if index % head_dim == 9 => f16::NAN,
                _ => x,
            },
            _ => x,
        }
    }

    /// n of a key or value, number `index`.
    fn n(self, index: u64, is_key: bool) -> f16 {
        let z = mixed(31, index);
        let uniform = (z >> 40) as f32 / (1u64 << 24) as f32;
        match self {
            Input::Sharp if is_key => f16::from_f32(30.0 * uniform),
            Input::Wide if z.is_multiple_of(5) => f16::ZERO,
            // Of keys less, or scores are so large that one token has all weight.
            Input::Wide => f16::from_bits((z >> 20) as u16 % if is_key { 0x4c00 } else { 0x7c00 }),
            _ => f16::from_f32(0.5 + uniform),
        }
    }
}

/// Orders of channels, [kv_heads, head_dim], that have nothing in common.
pub(super) fn order(books: &Books, kv_heads: u32) -> Vec<u8> {
    let dim = books.layout.head_dim as usize;
    let mut order: Vec<u8> = (0..books.order_bytes(kv_heads)).map(|i| (i % dim) as u8).collect();
    for (head, own) in order.chunks_exact_mut(dim).enumerate() {
        for i in (1..dim).rev() {
            own.swap(i, (mixed(head as u64, i as u64) % (i as u64 + 1)) as usize);
        }
    }
    order
}

/// A pool, a table and queries.
pub(super) struct Sample {
    pub(super) books: Books,
    pub(super) problem: Problem,
    pub(super) lengths: Vec<u32>,
    pub(super) tiles: Vec<u32>,
    /// The window, [sequences, kv_heads] slots.
    pub(super) near: Vec<u32>,
    pub(super) table: Vec<u32>,
    pub(super) queries: Vec<f16>,
    pub(super) order: Vec<u8>,
}

/// Bits of the outputs and of the log-sums.
pub(super) type Attended = (Vec<f32>, Vec<f32>);

impl Sample {
    /// For `problem`, of which `sequences` is that of the lengths.
    pub(super) fn new(
        settings: Settings,
        problem: Problem,
        lengths: &[u32],
        input: Input,
    ) -> super::Result<Self> {
        let books = Books::new(problem.head_dim, settings)?;
        let problem = Problem { sequences: lengths.len() as u32, ..problem }.checked()?;
        let (layout, heads) = (books.layout, problem.kv_heads as usize);
        let tile = layout.bytes() as usize;
        let max_blocks = problem.max_blocks() as usize;
        let total: u32 = lengths.iter().map(|length| length.div_ceil(BLOCK_TOKENS)).sum();
        // A few blocks are nobody's.
        let mut places: Vec<u32> = (0..total + 2).collect();
        for i in (1..places.len()).rev() {
            places.swap(i, (mixed(3, i as u64) % (i as u64 + 1)) as usize);
        }
        let mut table = vec![u32::MAX; lengths.len() * max_blocks];
        let mut bytes = vec![0xffu8; places.len() * heads * tile];
        let mut free = places.into_iter();
        for (sequence, length) in lengths.iter().enumerate() {
            for index in 0..length.div_ceil(BLOCK_TOKENS) {
                let place = free.next().unwrap_or(0);
                table[sequence * max_blocks + index as usize] = place;
                for head in 0..heads {
                    let number = place as usize * heads + head;
                    let tile = &mut bytes[number * tile..][..tile];
                    let codes = layout.code_bytes() as usize;
                    for (i, byte) in tile[..codes].iter_mut().enumerate() {
                        let z = mixed(1, (number * codes + i) as u64) as u8;
                        *byte = if input == Input::Equal { 0 } else { z };
                    }
                    // Of tokens that there are not, n is NaN, or in a byte the largest.
                    for token in 0..BLOCK_TOKENS.min(length - index * BLOCK_TOKENS) {
                        for (side, is_key) in [(Side::Key, true), (Side::Value, false)] {
                            let at = layout.norm(side, token) as usize;
                            let which = (number as u32 * BLOCK_TOKENS + token) * 2 + u32::from(is_key);
                            if layout.norm_bytes(side) == 2 {
                                let n = input.n(which.into(), is_key);
                                tile[at..at + 2].copy_from_slice(&n.to_bits().to_le_bytes());
                                continue;
                            }
                            for (part, byte) in tile[at..at + 4].iter_mut().enumerate() {
                                let n = input.n(u64::from(which) << 2 | part as u64, is_key);
                                *byte = norm_byte(n.to_f32()).min(255) as u8;
                            }
                        }
                    }
                }
            }
        }
        let dim = problem.head_dim as usize;
        let queries = (0..problem.query_rows() * dim).map(|i| input.query(i, dim)).collect();
        let near = window(&books, problem, lengths, input);
        let tiles = bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let order = order(&books, problem.kv_heads);
        Ok(Sample { books, problem, lengths: lengths.to_vec(), tiles, near, table, queries, order })
    }

    /// Attends; with `slices` by the CPU's own path. `poison`: what outputs hold before.
    pub(super) fn attend(&self, device: &Device, slices: bool, poison: u8) -> super::Result<Attended> {
        let stream = Stream::new(device)?;
        let mut plan = Plan::new(device, self.problem, self.books.clone())?;
        let queries = Buffer::from_slice(device, &self.queries)?;
        let tiles = Buffer::from_slice(device, &self.tiles)?;
        let near = Buffer::from_slice(device, &self.near)?;
        let table = Buffer::from_slice(device, &self.table)?;
        let lengths = Buffer::from_slice(device, &self.lengths)?;
        let order = Buffer::from_slice(device, &self.order)?;
        let mut output = Buffer::<f32>::new(device, self.queries.len())?;
        let mut lse = Buffer::<f32>::new(device, self.problem.query_rows())?;
        stream.fill_u8(&mut output, .., poison)?;
        stream.fill_u8(&mut lse, .., poison)?;
        // Twice: counters are as they were.
        for _ in 0..2 {
            let handles = Handles {
                queries: queries.global(),
                tiles: tiles.global(),
                near: near.global(),
                table: table.global(),
                order: order.global(),
                lengths: lengths.global(),
                output: output.global_mut(),
                lse: lse.global_mut(),
            };
            // SAFETY: buffers of this device as the problem wants them; the table's entries that lengths
            // reach are blocks of the pool. They are there until the stream has been waited for.
            unsafe { plan.run_on(&stream, slices, handles) }?;
            stream.synchronize()?;
        }
        Ok((output.to_vec()?, lse.to_vec()?))
    }

    /// The bytes of a token's tile.
    #[cfg(test)]
    pub(super) fn tile(&self, sequence: usize, head: usize, token: usize) -> &[u8] {
        let max_blocks = self.problem.max_blocks() as usize;
        let block = self.table[sequence * max_blocks + token / BLOCK_TOKENS as usize] as usize;
        let bytes = self.books.layout.bytes() as usize;
        let from = (block * self.problem.kv_heads as usize + head) * bytes;
        &bytemuck::cast_slice(&self.tiles)[from..from + bytes]
    }

    /// The bytes of a token's slot, if it is not read from its codes.
    #[cfg(test)]
    pub(super) fn slot(&self, sequence: usize, head: usize, token: usize) -> Option<&[u8]> {
        let (window, tile) = (self.books.window(self.problem), token as u32 / BLOCK_TOKENS);
        let bytes = self.books.layout.slot().bytes() as usize;
        let first = (sequence * self.problem.kv_heads as usize + head) * window.slots as usize;
        (!window.is_coded(tile, self.lengths[sequence])).then(|| {
            let from = (first + window.slot(tile) as usize) * bytes;
            &bytemuck::cast_slice(&self.near)[from..from + bytes]
        })
    }

    /// A key or value restored.
    #[cfg(test)]
    pub(super) fn restored(&self, side: Side, sequence: usize, head: usize, token: usize) -> Vec<f64> {
        if let Some(slot) = self.slot(sequence, head, token) {
            return near::restored(slot, &self.books, side, token as u32 % BLOCK_TOKENS, self.order_of(head));
        }
        let tile = self.tile(sequence, head, token);
        rows::restored(tile, &self.books, side, token as u32 % BLOCK_TOKENS, self.order_of(head))
    }

    /// The order of a KV head's channels; empty of whole keys.
    #[cfg(test)]
    pub(super) fn order_of(&self, head: usize) -> &[u8] {
        let dim = if self.order.is_empty() { 0 } else { self.problem.head_dim as usize };
        &self.order[head * dim..(head + 1) * dim]
    }
}

/// A window of numbers as they come, with n as of codes. Those of tokens that there are not are NaN.
fn window(books: &Books, problem: Problem, lengths: &[u32], input: Input) -> Vec<u32> {
    let (layout, window, heads) = (books.layout.slot(), books.window(problem), problem.kv_heads as usize);
    let (of_slot, dim) = (layout.bytes() as usize, layout.head_dim as usize);
    let mut bytes = vec![0u8; 4 * books.window_words(problem)];
    let mut set = |slot: usize, at: u32, own: &[u8]| {
        let at = slot * of_slot + at as usize;
        bytes[at..at + own.len()].copy_from_slice(own);
    };
    let slots = window.slots as usize;
    for (slot, token) in (0..lengths.len() * heads * slots).flat_map(|slot| (0..16).map(move |t| (slot, t))) {
        let which = (slot as u32 * BLOCK_TOKENS + token) as usize;
        let (mut key, mut value) = (Vec::new(), Vec::new());
        for d in 0..dim {
            let z = mixed(41, (which * dim + d) as u64);
            let x = normal(43, (which * dim + d) as u64) / books.values.step as f32;
            let equal = input == Input::Equal;
            key.extend(if equal { [1, 1] } else { [z as u8, (z >> 8) as u8] });
            value.extend(f16::from_f32(if equal { 40.0 } else { x }).to_bits().to_le_bytes());
        }
        set(slot, layout.unit(token, 0), &key);
        set(slot, layout.value(token), &value);
        // Whose token it is depends on the slot's tile; of the sequence's last tile some are nobody's.
        let sequence = slot / slots / heads;
        let last = lengths[sequence].saturating_sub(1) / BLOCK_TOKENS;
        let own = !window.is_coded(last, lengths[sequence]) && window.slot(last) as usize == slot % slots;
        let absent = own && last * BLOCK_TOKENS + token >= lengths[sequence];
        let n = |is_key: bool, part: usize| {
            let n = input.n((8 * which + 2 * part + usize::from(is_key)) as u64 | 1 << 40, is_key).to_f32();
            if absent { f32::NAN } else { n }
        };
        for (part, levels) in books.keys.iter().enumerate() {
            // Of integers with a mean square of that of uniform ones.
            let unit = 18768.0 * levels.step as f32 * if layout.parted { UNIT } else { 1.0 };
            set(slot, layout.key_scale(token, part as u32), &(n(true, part) / unit).to_le_bytes());
        }
        set(slot, layout.value_scale(token), &n(false, 0).to_le_bytes());
    }
    bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
}
