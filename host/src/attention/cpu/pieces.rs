//! A thread block's warps, shared out: each is independent of the others until their results are merged.

use super::run;
use super::softmax::{MAX_WARPS, Merge, WarpResult};
use crate::simd_level::Level;
use rayon::prelude::*;
use std::cell::RefCell;
use std::thread::LocalKey;

/// How the warps of a thread block are dealt out: warp w to piece w modulo their number. The first warps have
/// a block more than the last where blocks do not divide among them, so each piece gets its share of those.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pieces {
    /// Divides the warps.
    pub(crate) count: usize,
    pub(crate) warps: usize,
}

impl Pieces {
    /// For as many thread blocks as there are to share out over the current threads: several where threads
    /// would else wait for the last of them.
    pub(crate) fn of(thread_blocks: usize, warps: usize) -> Self {
        let threads = rayon::current_num_threads();
        let count = match thread_blocks {
            _ if threads == 1 => 1,
            many if many >= 4 * threads => 1,
            few => {
                let wanted = (2 * threads).div_ceil(few.max(1)).min(warps);
                (wanted..warps).find(|count| warps.is_multiple_of(*count)).unwrap_or(warps)
            }
        };
        Pieces { count, warps }
    }

    /// Warps of a piece.
    pub(crate) fn each(self) -> usize {
        self.warps / self.count
    }

    /// The warps of piece `piece`.
    #[inline(always)]
    pub(crate) fn warps_of(self, piece: usize) -> impl Iterator<Item = usize> {
        (piece..self.warps).step_by(self.count)
    }

    /// Where a warp's result is among all: those of the first piece come first.
    #[inline(always)]
    pub(crate) fn place(self, warp: usize) -> usize {
        warp % self.count * self.each() + warp / self.count
    }

    /// Does a thread block's work: `one` for each piece, with what `inputs` has for it and the results to be
    /// of its warps; then they are merged into `out`. Gives what `one` has found, if any has.
    pub(crate) fn share<I: Send, T: Send>(
        self,
        level: Level,
        inputs: Vec<I>,
        [rows, head_dim]: [usize; 2],
        out: &mut [f32],
        one: impl Fn(usize, I, &mut [WarpResult]) -> Option<T> + Sync,
    ) -> Option<T> {
        with_memory(&RESULTS, new_results, |results| {
            let results = &mut results[..self.warps];
            let own = results.chunks_exact_mut(self.each());
            let found = if self.count == 1 {
                inputs.into_iter().zip(own).find_map(|(input, own)| one(0, input, own))
            } else {
                let pieces: Vec<_> = inputs.into_iter().zip(own).enumerate().collect();
                let found = pieces.into_par_iter().with_max_len(1);
                found.map(|(piece, (input, own))| one(piece, input, own)).reduce(|| None, Option::or)
            };
            run(level, Merge { results, pieces: self, rows, head_dim, out });
            found
        })
    }
}

thread_local!(static RESULTS: Memory<[WarpResult; MAX_WARPS]> = const { RefCell::new(Vec::new()) });

fn new_results() -> Box<[WarpResult; MAX_WARPS]> {
    Box::new([const { WarpResult::EMPTY }; MAX_WARPS])
}

/// What a thread keeps for its tasks, used again and again.
pub(crate) type Memory<T> = RefCell<Vec<Box<T>>>;

/// Does something with this thread's memory. It is the task's own meanwhile: while a task waits for its
/// pieces its thread may begin another.
pub(crate) fn with_memory<T, R>(
    memory: &'static LocalKey<Memory<T>>,
    new: impl FnOnce() -> Box<T>,
    f: impl FnOnce(&mut T) -> R,
) -> R {
    let mut own = memory.with_borrow_mut(Vec::pop).unwrap_or_else(new);
    let result = f(&mut own);
    memory.with_borrow_mut(|memory| memory.push(own));
    result
}
