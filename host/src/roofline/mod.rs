//! What a device's memory reaches with no arithmetic in the way: the kernels of [`kernels_gpu::roofline`], each in
//! the patterns that the other systems' kernels use.

use crate::check::{Case, CaseError, OutputBuffer, poisoned};
use crate::{Buffer, Device, Error, Stream};
use kernels_gpu::roofline::{Grid, copy_four, narrow_four, read_four, widen_four};
use simt::{Global, GlobalMut, Kernel, KernelInfo};
use std::fmt;

type Move = Kernel<(Global<u32>, GlobalMut<u32>, Grid)>;

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

    fn kernel(self, pattern: Pattern) -> Move {
        match (self, pattern) {
            (Mix::Read, Pattern::Single) => read_four::kernel::<1>(),
            (Mix::Narrow, Pattern::Single) => narrow_four::kernel::<1>(),
            (Mix::Widen, Pattern::Single) => widen_four::kernel::<1>(),
            (Mix::Copy, Pattern::Single) => copy_four::kernel::<1>(),
            (Mix::Read, _) => read_four::kernel::<8>(),
            (Mix::Narrow, _) => narrow_four::kernel::<8>(),
            (Mix::Widen, _) => widen_four::kernel::<8>(),
            (Mix::Copy, _) => copy_four::kernel::<8>(),
        }
    }
}

/// Which vectors a thread moves. Which is fastest depends on the mix and on the memory, so a ceiling is the best of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// One vector a thread, side by side.
    Single,
    /// Eight vectors a thread; a block's are side by side.
    Block,
    /// Eight vectors a thread, one below the other in rows of so many vectors.
    Rows(u32),
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Pattern::Single => f.write_str("single"),
            Pattern::Block => f.write_str("block"),
            Pattern::Rows(row) => write!(f, "rows of {row}"),
        }
    }
}

impl Pattern {
    fn grid(self, vectors: u64) -> Grid {
        match self {
            Pattern::Single | Pattern::Block => Grid::new(vectors, 256),
            Pattern::Rows(row) => Grid::new(vectors, row),
        }
    }

    fn per_thread(self) -> u32 {
        if self == Pattern::Single { 1 } else { 8 }
    }
}

/// Moves `vectors` vectors from `source` to `target`, whose sizes in words must fit the mix (a read needs one word of
/// target).
///
/// # Safety
/// Until the launch has finished, the memory behind both handles is there, on the stream's device, and nothing else
/// uses the target or writes the source.
///
/// # Errors
/// [`Error::Range`] for a handle that is too short; [`Error::TooLarge`] for vectors that one launch cannot number; what
/// the launch reports.
pub unsafe fn launch(
    stream: &Stream,
    mix: Mix,
    pattern: Pattern,
    vectors: u64,
    source: Global<u32>,
    target: GlobalMut<u32>,
) -> Result<(), Error> {
    let (read, written) = mix.bytes();
    let check = |what, len: usize, bytes: u64| {
        let end = vectors.saturating_mul(bytes / 4).max(1) as usize;
        if end <= len { Ok(()) } else { Err(Error::Range { what, start: 0, end, len }) }
    };
    check("source", source.len(), read)?;
    check("target", target.len(), written)?;
    let kernel = mix.kernel(pattern);
    let grid = pattern.grid(vectors);
    let Some(shape) = kernels_gpu::roofline::launch(grid, pattern.per_thread()) else {
        return Err(Error::TooLarge { len: vectors as usize, element_bytes: 16 });
    };
    // SAFETY: both handles reach what `vectors` vectors of this mix need, as just checked; each vector is moved by one
    // thread. The rest is this function's contract.
    unsafe { stream.launch(&kernel, shape, (source, target, grid)) }
}

/// Every kernel in every pattern, over whole and ragged grids.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for mix in Mix::ALL {
        for pattern in [Pattern::Single, Pattern::Block, Pattern::Rows(24)] {
            for vectors in [1u64, 255, 2048, 5003] {
                let info: &'static KernelInfo = mix.kernel(pattern).info();
                let label = format!("{pattern} vectors={vectors}");
                let run = move |device: &Device| run(device, mix, pattern, vectors);
                cases.push(Case::new(info, label, run).race_checked());
            }
        }
    }
    cases
}

fn run(device: &Device, mix: Mix, pattern: Pattern, vectors: u64) -> Result<Vec<OutputBuffer>, CaseError> {
    let stream = Stream::new(device)?;
    let words: Vec<u32> = (0..vectors as u32 * 4).map(|i| i.wrapping_mul(0x9e37_79b9) ^ i >> 3).collect();
    let source = Buffer::from_slice(device, &words)?;
    let mut target = poisoned::<u32>(&stream, words.len())?;
    if mix == Mix::Read {
        // The sink counts blocks whose data cancels; what surrounds it stays as it is.
        stream.fill_u32(&mut target, .., 0)?;
    }
    // SAFETY: both buffers live until `to_vec` has waited for the launch.
    unsafe { launch(&stream, mix, pattern, vectors, source.global(), target.global_mut())? };
    let moved = (vectors * mix.bytes().1 / 4).max(1) as usize;
    let mut values = target.to_vec()?;
    values.truncate(moved);
    Ok(vec![OutputBuffer::new("target", values)])
}
