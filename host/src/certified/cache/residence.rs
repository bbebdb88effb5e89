//! Sequences whose originals are all in the GPU's memory, in the slots: from the start, as long as they fit.

use super::super::{AttendedHandles, StepPlan};
use super::{BLOCK_TOKENS, CacheElement, CacheError, Result, Scratch, TieredCache};
use crate::Stream;
use kernels_gpu::certified::layout::pair;
use simt::Global;

impl<E: CacheElement> TieredCache<E> {
    /// Tokens that a sequence may have to be resident: what the slots hold if each sequence gets a part.
    pub fn resident_tokens(&self) -> u32 {
        let slots = self.scratch.key_slots.min(self.scratch.value_slots);
        let blocks = (slots / (self.extents.sequences * self.shape.kv_heads)).min(self.shape.max_blocks);
        blocks * BLOCK_TOKENS
    }

    /// Whether sequences are resident.
    pub fn is_resident(&self) -> bool {
        self.shape.resident > 0
    }

    /// From now on tokens go to the slots too, and [`attend`](Self::attend) reads these: `dense` attention.
    /// Each head has a certificate of what that rounds, by the annotations, with the reason
    /// [`RESIDENT`](kernels_gpu::certified::policy::reason::RESIDENT). It wants a plan [with
    /// residents](StepPlan::with_residents) of as many tokens. What the slots have is forgotten.
    ///
    /// That ends with the append or prefill by which a sequence has more than
    /// [`resident_tokens`](Self::resident_tokens), and with a fork. A captured append cannot end it: a
    /// sequence that a replay would make longer stops, as one without room.
    ///
    /// **Graphs** are of what the cache was when they were captured: one with an append or a step is not to
    /// be replayed once sequences have become resident, or are so no more. The appends would miss the slots,
    /// or the steps read what is not there.
    ///
    /// Nothing happens on the CPU's own path, which has no use for it. Waits for the stream.
    ///
    /// # Errors
    /// [`CacheError::Residence`] where a sequence has tokens, or the slots hold no block of each;
    /// [`crate::Error::Capturing`].
    pub fn begin_residence(&mut self, stream: &Stream) -> Result<()> {
        if self.own_path {
            return Ok(());
        }
        self.refresh(stream)?;
        let tokens = self.book.live().map(|row| self.book.row(row).length).max().unwrap_or(0);
        let most = self.resident_tokens();
        if tokens > 0 || most == 0 {
            return Err(CacheError::Residence { tokens, most }.into());
        }
        self.shape.resident = most / BLOCK_TOKENS;
        self.tag(stream, |_, _| None)?;
        self.write_limits(stream)
    }

    /// Ends it where some sequence would have so many tokens. Waits for the stream if so.
    pub(super) fn end_residence_for(&mut self, stream: &Stream, tokens: u64) -> Result<()> {
        if tokens > u64::from(self.resident_tokens()) { self.end_residence(stream) } else { Ok(()) }
    }

    fn write_limits(&mut self, stream: &Stream) -> Result<()> {
        let live: Vec<u32> = self.book.live().collect();
        live.into_iter().try_for_each(|row| self.write_limit(stream, row))
    }

    /// From now on the slots are for what steps use. What they have stays there where it is at its place.
    /// Graphs that were captured are of no use any more ([why](Self::begin_residence)). Waits for the stream.
    ///
    /// # Errors
    /// [`crate::Error::Capturing`].
    pub fn end_residence(&mut self, stream: &Stream) -> Result<()> {
        if !self.is_resident() {
            return Ok(());
        }
        self.refresh(stream)?;
        let (shape, book) = (self.shape, self.book.clone());
        let sequences = self.extents.sequences;
        // By slot the pair that lies there.
        let pairs = shape.resident * shape.kv_heads;
        let at = |slot: u32, slots: u32| {
            if slot >= pairs * sequences {
                return None;
            }
            let row = book.row(slot / pairs);
            let (index, head) = (slot % pairs / shape.kv_heads, slot % shape.kv_heads);
            let block = *row.blocks.get(index as usize).filter(|_| index < row.length / BLOCK_TOKENS)?;
            let pair = pair(block, shape.kv_heads, head) as u32;
            (pair % slots == slot).then_some(pair)
        };
        self.shape.resident = 0;
        self.tag(stream, at)?;
        self.write_limits(stream)
    }

    /// Says which pair each slot holds, of so many slots of its kind.
    fn tag(&mut self, stream: &Stream, holds: impl Fn(u32, u32) -> Option<u32>) -> Result<()> {
        let Scratch { key_slots, value_slots, .. } = self.scratch;
        let first = Scratch::word(0);
        let mut words = vec![0u64; self.directory.len() - first];
        stream.download(&self.directory, first, &mut words)?;
        let of_kinds =
            [key_slots, value_slots].into_iter().flat_map(|slots| (0..slots).map(move |s| (s, slots)));
        for (words, (slot, slots)) in words.chunks_exact_mut(2).zip(of_kinds) {
            words[1] = u64::from(holds(slot, slots).unwrap_or(Scratch::EMPTY));
        }
        Ok(stream.upload(&words, &mut self.directory, first)?)
    }

    /// [`attend_on`](Self::attend_on) of resident sequences.
    ///
    /// # Safety
    /// As [`attend_on`](Self::attend_on).
    ///
    /// # Errors
    /// [`CacheError::Plan`] for a plan without residents, or for others; what the launches report.
    pub(super) unsafe fn attend_residents(
        &mut self,
        stream: &Stream,
        plan: &mut StepPlan<E>,
        queries: Global<E>,
        out: AttendedHandles,
    ) -> Result<()> {
        let sequences = plan.problem().sequences;
        self.same([
            ("number of resident tokens", plan.resident_tokens(), self.resident_tokens()),
            ("number of sequences", sequences, self.extents.sequences),
        ])?;
        let tile = self.geometry().layout().elements() as usize;
        let elements = (self.shape.resident * self.shape.kv_heads * sequences) as usize * tile;
        let values = self.scratch.key_slots as usize * tile;
        let slots = [self.near.global_range(..elements)?, self.near.global_range(values..values + elements)?];
        let handles = self.step_handles(sequences as usize, queries)?;
        // SAFETY: as in `attend_on`; every token of a resident sequence went to its slots, and its limit is
        // what these hold.
        unsafe { plan.run_residents(stream, &handles, slots, self.shape, out) }
    }
}
