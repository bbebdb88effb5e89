//! What attention on slices shares: the tensor cores' arithmetic sixteen outputs at a time, the online
//! softmax of the kernels' warps, and the choice of instructions.

#[cfg(target_arch = "x86_64")]
mod avx512;
pub(crate) mod lanes;
mod order;
pub(crate) mod pieces;
pub(crate) mod query;
pub(crate) mod softmax;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

use super::Half;
use crate::simd_level::Level;
use lanes::{Lanes, Portable, bits};

/// Tiles of 16 tokens and KV heads below which other threads are not worth waking.
pub(crate) const TILES_ALONE: usize = 8;

/// Work that is the same on every machine, but for the instructions.
pub(crate) trait Work {
    type Output;

    /// Does it. Must be inlined, with everything that shall use the instructions of `L`.
    fn run<L: Lanes>(self) -> Self::Output;
}

/// Does it with the instructions of a level that the machine has ([`Level::checked`]).
pub(crate) fn run<W: Work>(level: Level, work: W) -> W::Output {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn avx2<W: Work>(work: W) -> W::Output {
            work.run::<x86::Avx2>()
        }
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl")]
        fn avx512<W: Work>(work: W) -> W::Output {
            work.run::<avx512::Avx512>()
        }
        match level {
            // SAFETY: the machine has the level's instructions.
            Level::Avx512 => return unsafe { avx512(work) },
            // SAFETY: as above.
            Level::Avx2 => return unsafe { avx2(work) },
            Level::Portable => {}
        }
    }
    let _ = level;
    work.run::<Portable>()
}

/// `rows` up to element `present`, then zeros.
#[inline(always)]
pub(crate) fn padded<'a>(rows: &[u16], present: usize, memory: &'a mut Vec<u16>) -> &'a [u16] {
    memory.clear();
    memory.extend_from_slice(&rows[..present]);
    memory.resize(rows.len(), 0);
    memory
}

/// Whether one of the rows has finite elements only: then a query of zeros has a score there that is not NaN.
#[cold]
pub(crate) fn a_finite_row<E: Half>(rows: &[u16], head_dim: usize) -> bool {
    let format = bits::<E>();
    rows.chunks_exact(head_dim)
        .any(|row| row.iter().all(|x| (x & 0x7fff) >> format.fraction < format.largest))
}
