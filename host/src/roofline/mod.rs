//! What a device's memory reaches with no arithmetic in the way: the kernels of [`kernels_gpu::roofline`],
//! each in the patterns that the other systems' kernels use.

use crate::check::{Case, CaseError, Coverage, OutputBuffer, poisoned};
use crate::kv::System;
use crate::{Buffer, Device, Error, Stream};
use kernels_gpu::roofline::{Grid, copy_four, narrow_four, narrow_neighbours, read_four, widen_four};
use simt::{Global, GlobalMut, Kernel, KernelInfo};
use std::fmt;

/// The system.
pub static SYSTEM: System = System {
    name: "roofline",
    about: "kernels that only move bytes: what the others are measured against",
    kernels: || kernels_gpu::roofline::kernels().collect(),
    cases: |coverage| if coverage == Coverage::Huge { Vec::new() } else { cases() },
    schemes: &[],
};

type Move = Kernel<copy_four::Args>;

/// How many bytes are read and written for each vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mix {
    /// 16 read, none written.
    Read,
    /// 16 read, 4 written: quantizing f32.
    Narrow,
    /// 4 read, 16 written: restoring f32.
    Widen,
    /// 16 read, 16 written.
    Copy,
}

impl Mix {
    /// All of them.
    pub const ALL: [Mix; 4] = [Mix::Read, Mix::Narrow, Mix::Widen, Mix::Copy];

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Mix::Read => "read",
            Mix::Narrow => "narrow",
            Mix::Widen => "widen",
            Mix::Copy => "copy",
        }
    }

    /// Bytes read and bytes written for a vector.
    pub fn bytes(self) -> (u64, u64) {
        match self {
            Mix::Read => (16, 0),
            Mix::Narrow => (16, 4),
            Mix::Widen => (4, 16),
            Mix::Copy => (16, 16),
        }
    }

    /// The patterns that there are for it, over a matrix with rows of `row` vectors if there is one. Which is
    /// fastest depends on the mix and on the memory, so a ceiling is the best of all.
    pub fn patterns(self, row: Option<u32>) -> Vec<Pattern> {
        let mut patterns = Vec::new();
        let mut add = |order, kernel| patterns.push(Pattern { mix: self, order, kernel });
        match self {
            Mix::Read => {
                add(Order::Single, read_four::kernel::<1>());
                add(Order::Block(8), read_four::kernel::<8>());
                row.into_iter().for_each(|row| add(Order::Rows(row), read_four::kernel::<8>()));
            }
            Mix::Narrow => {
                add(Order::Single, narrow_four::kernel::<1>());
                add(Order::Block(2), narrow_four::kernel::<2>());
                add(Order::Neighbours, narrow_neighbours::kernel());
            }
            Mix::Widen => {
                add(Order::Single, widen_four::kernel::<1>());
                add(Order::Block(2), widen_four::kernel::<2>());
                add(Order::Block(8), widen_four::kernel::<8>());
            }
            Mix::Copy => add(Order::Single, copy_four::kernel()),
        }
        patterns
    }
}

/// Which vectors a thread moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// One vector a thread, side by side.
    Single,
    /// So many vectors a thread, 256 apart; a block's are side by side.
    Block(u32),
    /// Eight vectors a thread, one below the other in rows of so many vectors.
    Rows(u32),
    /// Four neighbouring vectors a thread, their narrow side in one access.
    Neighbours,
}

impl Order {
    fn per_thread(self) -> u32 {
        match self {
            Order::Single => 1,
            Order::Rows(_) => 8,
            Order::Block(n) => n,
            Order::Neighbours => 4,
        }
    }

    fn grid(self, vectors: u64) -> Grid {
        Grid::new(vectors, if let Order::Rows(row) = self { row } else { 256 })
    }
}

/// How a mix walks memory: one of [`Mix::patterns`].
#[derive(Clone, Copy)]
pub struct Pattern {
    mix: Mix,
    order: Order,
    kernel: Move,
}

impl Pattern {
    /// What it reads and writes.
    pub fn mix(&self) -> Mix {
        self.mix
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.order {
            Order::Single => f.write_str("single"),
            Order::Block(n) => write!(f, "block of {n}"),
            Order::Rows(row) => write!(f, "rows of {row}"),
            Order::Neighbours => f.write_str("4 neighbours"),
        }
    }
}

/// Moves `vectors` vectors from `source` to `target`, whose sizes in words must fit the pattern's mix (a read
/// needs one word of target).
///
/// # Safety
/// Until the launch has finished, the memory behind both handles is there, on the stream's device, and
/// nothing else uses the target or writes the source.
///
/// # Errors
/// [`Error::Range`] for a handle that is too short; [`Error::TooLarge`] for vectors that one launch cannot
/// number; what the launch reports.
pub unsafe fn launch(
    stream: &Stream,
    pattern: Pattern,
    vectors: u64,
    source: Global<u32>,
    target: GlobalMut<u32>,
) -> Result<(), Error> {
    let (read, written) = pattern.mix.bytes();
    let check = |what, len: usize, bytes: u64| {
        let end = vectors.saturating_mul(bytes / 4).max(1) as usize;
        if end <= len { Ok(()) } else { Err(Error::Range { what, start: 0, end, len }) }
    };
    check("source", source.len(), read)?;
    check("target", target.len(), written)?;
    let grid = pattern.order.grid(vectors);
    let Some(shape) = kernels_gpu::roofline::launch(grid, pattern.order.per_thread()) else {
        return Err(Error::TooLarge { len: vectors as usize, element_bytes: 16 });
    };
    // SAFETY: both handles reach what `vectors` vectors of this mix need, as just checked; each vector is
    // moved by one thread. The rest is this function's contract.
    unsafe { stream.launch(&pattern.kernel, shape, copy_four::Args { source, target, grid }) }
}

/// Every kernel in every pattern, over whole and ragged grids.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for mix in Mix::ALL {
        for pattern in mix.patterns(Some(24)) {
            for vectors in [1u64, 255, 2048, 5003] {
                let info: &'static KernelInfo = pattern.kernel.info();
                let label = format!("{pattern} vectors={vectors}");
                let run = move |device: &Device| run(device, pattern, vectors);
                cases.push(Case::new(info, label, run).race_checked());
            }
        }
    }
    cases
}

fn run(device: &Device, pattern: Pattern, vectors: u64) -> Result<Vec<OutputBuffer>, CaseError> {
    let stream = Stream::new(device)?;
    let words: Vec<u32> = (0..vectors as u32 * 4).map(|i| i.wrapping_mul(0x9e37_79b9) ^ i >> 3).collect();
    let source = Buffer::from_slice(device, &words)?;
    let mut target = poisoned::<u32>(&stream, words.len())?;
    if pattern.mix == Mix::Read {
        // The sink counts blocks whose data cancels; what surrounds it stays as it is.
        stream.fill_u32(&mut target, .., 0)?;
    }
    // SAFETY: both buffers live until `to_vec` has waited for the launch.
    unsafe { launch(&stream, pattern, vectors, source.global(), target.global_mut())? };
    let moved = (vectors * pattern.mix.bytes().1 / 4).max(1) as usize;
    let mut values = target.to_vec()?;
    values.truncate(moved);
    Ok(vec![OutputBuffer::new("target", values)])
}
