//! Tokens come in: one for each sequence, or many for one.

use super::{BLOCK_TOKENS, CacheElement, CacheError, Refused, Result, SequenceId, TieredCache};
use crate::{Buffer, Stream};
use kernels_gpu::certified::layout::{Annotation, Problems};
use kernels_gpu::certified::tokens::THREADS;
use kernels_gpu::certified::{Piece, Refusals, append, inspect, prefill, quantize_block, write_launch};
use simt::{GlobalMut, LaunchShape};

impl<E: CacheElement> TieredCache<E> {
    /// Appends a token to every sequence that is not paused: `keys` and `values` start with [sequences,
    /// kv_heads, head_dim], in rows of which those without a sequence are not read. Blocks that are full then
    /// are quantized, in the same stream.
    ///
    /// Where room was [reserved](Self::reserve) it waits for nothing and can be captured: each replay appends
    /// a token. Else it makes room itself, a block at a time, and waits for the stream to do so.
    ///
    /// A key or value that is not finite, or beyond f16, is refused by the device: the sequence keeps its
    /// length and takes no more tokens until [`check`](Self::check) has said so. Other sequences go on.
    ///
    /// # Errors
    /// [`CacheError::Length`]; [`CacheError::TooLong`], [`CacheError::PoolExhausted`] and
    /// [`CacheError::NotReserved`], and no sequence has got a token; [`crate::Error::WrongDevice`]; what the
    /// launches report.
    pub fn append(&mut self, stream: &Stream, keys: &Buffer<E>, values: &Buffer<E>) -> Result<()> {
        stream.device().check_same(&self.device, "the cache")?;
        let expected = self.extents.sequences as usize * self.extents.token_elements();
        for (what, buffer) in [("the buffer of keys", keys), ("the buffer of values", values)] {
            stream.device().check_same(buffer.device(), what)?;
            if buffer.len() < expected {
                let expected = format!("at least {expected}");
                return Err(CacheError::Length { what, got: buffer.len(), expected }.into());
            }
        }
        self.make_room(stream)?;
        if self.on_slices(stream) {
            // SAFETY: memory of the CPU backend, whose streams have done what they were told when a call
            // returns.
            unsafe { self.append_on_slices(keys, values) };
            self.count_appended();
            return Ok(());
        }
        let arguments = append::Args {
            new_keys: keys.global(),
            new_values: values.global(),
            table: self.table.global(),
            lengths: self.lengths.global_mut(),
            limits: self.limits.global_mut(),
            keys: self.keys.global_mut(),
            values: self.values.global_mut(),
            near: self.near.global_mut(),
            directory: self.directory.global_mut(),
            jobs: self.jobs.global_mut(),
            problems: self.refusals[0].global_mut(),
            shape: self.shape,
            scratch: self.scratch,
        };
        let launch = LaunchShape::new(self.extents.sequences, THREADS);
        // SAFETY: inputs are a row for each sequence; a length below its limit has its block in the table;
        // near pool, directory, jobs and refusals were made for these extents. Dropping a buffer, or the
        // cache, waits for the device.
        unsafe { stream.launch(&self.kernels.append, launch, arguments)? };
        self.quantize(stream, self.extents.sequences)?;
        if !stream.is_capturing() {
            self.count_appended();
        }
        Ok(())
    }

    /// Room for one token more of every sequence that is not paused: reserved where the stream captures.
    pub(super) fn make_room(&mut self, stream: &Stream) -> Result<()> {
        if stream.is_capturing() {
            let full = self.book.active().find(|row| self.book.row(*row).length >= self.book.room(*row));
            if let Some(sequence) = full {
                return Err(CacheError::NotReserved { sequence }.into());
            }
            self.captured = true;
        } else {
            if self.captured || self.book.active().any(|row| self.book.row(row).length >= self.book.room(row))
            {
                self.refresh(stream)?;
            }
            let growth = self.book.growth(self.book.active().map(|row| (row, 1)))?;
            let longest = self.book.active().map(|row| self.book.row(row).length).max().unwrap_or(0);
            self.end_residence_for(stream, u64::from(longest) + 1)?;
            self.grow(stream, &growth)?;
        }
        Ok(())
    }

    /// The book's lengths after an append.
    pub(super) fn count_appended(&mut self) {
        let active: Vec<u32> = self.book.active().collect();
        active.into_iter().for_each(|row| self.book.row_mut(row).length += 1);
    }

    /// Quantizes the fresh blocks that the first `jobs` jobs name.
    fn quantize(&mut self, stream: &Stream, jobs: u32) -> Result<()> {
        let geometry = self.geometry();
        let refuse = || CacheError::Extents { extents: self.extents, problem: "too many jobs".to_string() };
        let launch = write_launch(geometry.layout(), geometry.kv_heads(), jobs).ok_or_else(refuse)?;
        let (keys, values) = self.fresh()?;
        let (tiles, annotations) = self.quantized_mut();
        let [by_chance, seed] = geometry.rounding().words();
        let arguments = quantize_block::Args {
            jobs: self.jobs.global(),
            keys: keys.as_const(),
            values: values.as_const(),
            tiles,
            annotations,
            problems: self.problems.global_mut(),
            kv_heads: geometry.kv_heads(),
            by_chance,
            seed,
        };
        // SAFETY: the kernel before has written as many jobs, from fresh blocks to blocks of the cache, each
        // of which one sequence fills.
        unsafe { stream.launch(&E::quantize_block(geometry), launch, arguments)? };
        Ok(())
    }

    /// The fresh blocks' keys and values.
    pub(super) fn fresh(&mut self) -> Result<(GlobalMut<E>, GlobalMut<E>)> {
        let elements = self.scratch.fresh as usize * self.geometry().layout().elements() as usize;
        let [keys, values] = [0, 1].map(|kind| self.fresh_elements(kind, 0));
        let keys = self.near.global_range_mut(keys..keys + elements)?;
        Ok((keys, self.near.global_range_mut(values..values + elements)?))
    }

    /// Tiles and annotations, in the elements that kernels write.
    pub(super) fn quantized_mut(&mut self) -> (GlobalMut<u8>, GlobalMut<f32>) {
        let (tiles, annotations) = (self.tiles.global_mut(), self.annotations.global_mut());
        // SAFETY: the same memory in smaller elements; an annotation is so many words.
        unsafe {
            (
                GlobalMut::from_raw(tiles.address(), tiles.len() * 4),
                GlobalMut::from_raw(annotations.address(), annotations.len() * Annotation::WORDS),
            )
        }
    }

    /// Appends many tokens to a sequence: `keys` and `values` are [tokens, kv_heads, head_dim]. Waits for the
    /// stream.
    ///
    /// # Errors
    /// [`CacheError::UnknownSequence`], [`CacheError::Length`], [`CacheError::TooLong`],
    /// [`CacheError::PoolExhausted`], [`CacheError::Refused`] for keys or values that are not finite or
    /// beyond f16, and the cache is as it was; [`crate::Error::WrongDevice`], [`crate::Error::Capturing`];
    /// what the launches report.
    pub fn prefill(
        &mut self,
        stream: &Stream,
        sequence: SequenceId,
        keys: &Buffer<E>,
        values: &Buffer<E>,
    ) -> Result<()> {
        let elements = self.extents.token_elements();
        let tokens = keys.len() / elements;
        for (what, buffer) in [("the buffer of keys", keys), ("the buffer of values", values)] {
            if buffer.len() != tokens * elements {
                let expected = format!("a multiple of {elements}, as many keys as values");
                return Err(CacheError::Length { what, got: buffer.len(), expected }.into());
            }
        }
        self.prefill_first(stream, sequence, keys, values, tokens)
    }

    /// [`prefill`](Self::prefill) of the first `tokens` of longer buffers.
    ///
    /// # Errors
    /// As [`prefill`](Self::prefill).
    pub fn prefill_first(
        &mut self,
        stream: &Stream,
        sequence: SequenceId,
        keys: &Buffer<E>,
        values: &Buffer<E>,
        tokens: usize,
    ) -> Result<()> {
        let row = self.row_of(sequence)?;
        let elements = tokens.saturating_mul(self.extents.token_elements());
        for (what, buffer) in [("the buffer of keys", keys), ("the buffer of values", values)] {
            stream.device().check_same(buffer.device(), what)?;
            if buffer.len() < elements {
                let expected = format!("at least {elements}");
                return Err(CacheError::Length { what, got: buffer.len(), expected }.into());
            }
        }
        self.refresh(stream)?;
        if tokens == 0 {
            return Ok(());
        }
        let growth = self.book.growth([(row, tokens as u64)].into_iter())?;
        let start = self.book.row(row).length;
        self.inspect(stream, keys, values, elements, row, start)?;
        self.end_residence_for(stream, u64::from(start) + tokens as u64)?;
        self.grow(stream, &growth)?;
        // `growth` has held it against max_tokens.
        let end = start + tokens as u32;

        let (staged, most) = self.extents.staged();
        let mut position = start;
        while position < end {
            let in_block = position % BLOCK_TOKENS;
            let left = end - position;
            // A block that is begun, whole blocks, and the one that stays fresh.
            let (fresh, count) = if in_block != 0 || left < BLOCK_TOKENS {
                (row, left.min(BLOCK_TOKENS - in_block))
            } else {
                (staged, (left / BLOCK_TOKENS).min(most) * BLOCK_TOKENS)
            };
            self.place(stream, keys, values, Piece { row, first: position - start, position, fresh }, count)?;
            position += count;
        }
        stream.upload(&[end], &mut self.lengths, row as usize)?;
        self.book.row_mut(row).length = end;
        Ok(())
    }

    /// Copies `count` tokens, and quantizes the blocks that they fill.
    fn place(
        &mut self,
        stream: &Stream,
        keys: &Buffer<E>,
        values: &Buffer<E>,
        piece: Piece,
        count: u32,
    ) -> Result<()> {
        if self.on_slices(stream) {
            // SAFETY: memory of the CPU backend, whose streams have done what they were told when a call
            // returns; the rest as below.
            unsafe { self.place_on_slices(keys, values, piece, count) };
            return Ok(());
        }
        let arguments = prefill::Args {
            new_keys: keys.global(),
            new_values: values.global(),
            table: self.table.global(),
            keys: self.keys.global_mut(),
            values: self.values.global_mut(),
            near: self.near.global_mut(),
            directory: self.directory.global_mut(),
            jobs: self.jobs.global_mut(),
            shape: self.shape,
            scratch: self.scratch,
            piece,
        };
        // SAFETY: as many tokens are left in the input, and their blocks are in the table; from `piece.fresh`
        // on there are as many fresh blocks as the tokens reach.
        unsafe { stream.launch(&self.kernels.prefill, LaunchShape::new(count, THREADS), arguments)? };
        match (piece.position % BLOCK_TOKENS + count) / BLOCK_TOKENS {
            0 => Ok(()),
            full => self.quantize(stream, full),
        }
    }

    /// Looks for keys and values that a cache does not take, among the first `elements`, which would come
    /// behind `start` tokens.
    fn inspect(
        &mut self,
        stream: &Stream,
        keys: &Buffer<E>,
        values: &Buffer<E>,
        elements: usize,
        row: u32,
        start: u32,
    ) -> Result<()> {
        let vectors = elements as u64 / 8;
        let blocks = vectors.div_ceil(u64::from(THREADS)) as u32;
        if self.on_slices(stream) {
            // SAFETY: memory of the CPU backend, whose streams have done what they were told when a call
            // returns.
            unsafe { self.inspect_on_slices(keys, values, elements) };
        } else {
            let arguments = inspect::Args {
                keys: keys.global(),
                values: values.global(),
                problems: self.refusals[1].global_mut(),
                vectors,
            };
            // SAFETY: keys and values both have as many elements, a multiple of 32.
            unsafe { stream.launch(&self.kernels.inspect, LaunchShape::new(blocks, THREADS), arguments)? };
        }
        match self.take_refusals(stream, 1)?.first() {
            None => Ok(()),
            Some((kind, index)) => {
                let place = self.position(index);
                let at = Refused { sequence: row, token: start + place.0, ..refused(kind, place) };
                Err(CacheError::Refused { at, problem: problem(kind), stopped: 0 }.into())
            }
        }
    }

    /// Waits for the stream, and says whether every appended token was taken since the last check. Sequences
    /// that had stopped take tokens again from here on; they hold what they held before the one that was
    /// refused.
    ///
    /// # Errors
    /// [`CacheError::Refused`] for the first element that was not taken, [`CacheError::Full`];
    /// [`crate::Error::Capturing`]; what a kernel did wrong.
    pub fn check(&mut self, stream: &Stream) -> Result<()> {
        self.refresh(stream)?;
        let found = self.take_refusals(stream, 0)?;
        let stopped: Vec<u32> = self.book.live().filter(|row| self.book.row(*row).stopped).collect();
        for row in &stopped {
            self.book.row_mut(*row).stopped = false;
            self.write_limit(stream, *row)?;
        }
        let Some((kind, index)) = found.first() else {
            // All that was appended is finite in f16: nothing is left that could not be quantized.
            let mut problems = [0u64; 4];
            stream.download(&self.problems, 0, &mut problems)?;
            return self.geometry().verdict(bytemuck::cast::<_, Problems>(problems));
        };
        if kind == 4 {
            let sequence = index as u32;
            let tokens = self.book.row(sequence).length;
            return Err(CacheError::Full { sequence, tokens, stopped: stopped.len() }.into());
        }
        let place = self.position(index);
        let token = self.book.row(place.0).length;
        let at = Refused { sequence: place.0, token, ..refused(kind, place) };
        Err(CacheError::Refused { at, problem: problem(kind), stopped: stopped.len() }.into())
    }

    /// What appending (0) or prefill (1) refused; nothing afterwards.
    fn take_refusals(&mut self, stream: &Stream, which: usize) -> Result<Found> {
        let mut found = [0u64; 5];
        stream.download(&self.refusals[which], 0, &mut found)?;
        let found: Refusals = bytemuck::cast(found);
        if found != Refusals::NONE {
            stream.fill_u32(&mut self.refusals[which], .., u32::MAX)?;
        }
        Ok(Found(bytemuck::cast(found)))
    }

    /// Row, KV head and channel of a flat index of an input.
    fn position(&self, index: u64) -> (u32, u32, u32) {
        let (heads, dim) = (u64::from(self.shape.kv_heads), u64::from(self.shape.head_dim));
        ((index / (heads * dim)) as u32, (index / dim % heads) as u32, (index % dim) as u32)
    }
}

/// [`Refusals`] in their order.
struct Found([u64; 5]);

impl Found {
    /// The kind that comes first, and its index.
    fn first(&self) -> Option<(usize, u64)> {
        let not_finite_first = [0, 2, 1, 3, 4];
        not_finite_first.into_iter().map(|kind| (kind, self.0[kind])).find(|(_, index)| *index != u64::MAX)
    }
}

fn refused(kind: usize, (sequence, kv_head, channel): (u32, u32, u32)) -> Refused {
    Refused { what: if kind < 2 { "key" } else { "value" }, sequence, token: 0, kv_head, channel }
}

fn problem(kind: usize) -> &'static str {
    if kind & 1 == 0 {
        "not finite"
    } else {
        "beyond f16, in which quantized attention computes: store this cache's scaled down"
    }
}
