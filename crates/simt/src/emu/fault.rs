//! What the emulator reports.

use super::block::Lane;
use crate::kernel::{Dim3, KernelInfo};
use core::fmt;
use core::panic::Location;

/// A line of a kernel's source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The file, as the compiler names it.
    pub file: &'static str,
    /// The line.
    pub line: u32,
    /// The column.
    pub column: u32,
}

impl From<&'static Location<'static>> for Place {
    fn from(at: &'static Location<'static>) -> Self {
        Place { file: at.file(), line: at.line(), column: at.column() }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.file, self.line, self.column)
    }
}

/// A thread of the grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadId {
    /// Its block's index in the grid.
    pub block: Dim3,
    /// Its index in the block.
    pub thread: Dim3,
}

impl fmt::Display for ThreadId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {} thread {}", self.block, self.thread)
    }
}

/// Which memory an access went to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// Device memory.
    Global,
    /// The block's shared memory.
    Shared,
}

impl fmt::Display for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Space::Global => "global",
            Space::Shared => "shared",
        })
    }
}

/// Two accesses to the same bytes, one of them a write, with nothing that orders them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Race {
    /// Which memory.
    pub space: Space,
    /// The element index that this access used.
    pub index: u64,
    /// The first racing byte: an address, or an offset in shared memory.
    pub byte: u64,
    /// What this access does: `read`, `write` or `atomic`.
    pub access: &'static str,
    /// What the other one did.
    pub other_access: &'static str,
    /// The other thread.
    pub other: ThreadId,
    /// Where the other access is.
    pub other_place: Place,
}

/// What went wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FaultKind {
    /// The launch shape is one that no GPU takes, or that the kernel does not.
    Refused {
        /// Why, with the values.
        reason: String,
    },
    /// An access that begins or ends outside its array.
    OutOfBounds {
        /// Which memory.
        space: Space,
        /// The element index used.
        index: u64,
        /// Bytes of the access.
        bytes: usize,
        /// Elements of the array.
        len: u64,
        /// Bytes of an element.
        element_bytes: usize,
        /// Whether it was a write.
        write: bool,
    },
    /// An access whose address is not a multiple of its size.
    Misaligned {
        /// Which memory.
        space: Space,
        /// The element index used.
        index: u64,
        /// Bytes of the access.
        bytes: usize,
        /// How far the address is past the last aligned one.
        off_by: u64,
    },
    /// A shared array that reaches beyond the shared memory the launch asked for.
    SharedTooSmall {
        /// Where the access ends, in bytes from the start of the block's shared memory.
        needed: u64,
        /// The launch's shared memory, in bytes.
        launched_with: u32,
    },
    /// A read of shared memory that no thread wrote.
    Uninitialized {
        /// Byte offset in the block's shared memory.
        offset: u32,
        /// Bytes of the access.
        bytes: usize,
    },
    /// An access to shared memory that an asynchronous copy is still on its way to.
    CopyUnderWay {
        /// Byte offset in the block's shared memory.
        offset: u32,
        /// Bytes of the access.
        bytes: usize,
    },
    /// A barrier that not all threads of the block reach.
    DivergentBarrier {
        /// A thread that is not there.
        absent: Dim3,
        /// Where it waits instead; `None` if it has returned from the kernel.
        waits_at: Option<Place>,
    },
    /// A lane that calls a warp primitive without naming itself in the mask.
    LaneNotInMask {
        /// The mask.
        mask: u32,
        /// The calling lane.
        lane: u32,
    },
    /// A lane that the mask names and that does not make the call.
    LaneMissing {
        /// The mask.
        mask: u32,
        /// The lane that is not there.
        lane: u32,
        /// Where it waits instead; `None` if it has returned or was never launched.
        waits_at: Option<Place>,
    },
    /// A shuffle that reads a lane outside the mask.
    ShuffleSource {
        /// The mask.
        mask: u32,
        /// The lane read.
        lane: u32,
    },
    /// A shuffle width that is not a power of two up to 32.
    ShuffleWidth {
        /// The width.
        width: u32,
    },
    /// A kernel that is to wait for the launch before returns and has not.
    NoWait,
    /// Two accesses to the same bytes, one of them a write, with nothing that orders them.
    Race(Box<Race>),
    /// The kernel panicked: on the device the grid would trap.
    Panic {
        /// The panic's message.
        message: String,
    },
}

/// A mistake of a kernel that the emulator caught.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The kernel's PTX entry.
    pub kernel: &'static str,
    /// The thread that made it; `None` if no thread ran.
    pub thread: Option<ThreadId>,
    /// The source line; `None` for a refused launch.
    pub place: Option<Place>,
    /// What went wrong.
    pub kind: FaultKind,
}

impl Fault {
    pub(super) fn of(lane: &Lane, place: Option<Place>, kind: FaultKind) -> Self {
        let block = lane.block();
        let thread = Some(ThreadId { block: block.index.get(), thread: lane.thread });
        Fault { kernel: block.info.name, thread, place, kind }
    }

    pub(crate) fn refused(info: &'static KernelInfo, reason: String) -> Self {
        Fault { kernel: info.name, thread: None, place: None, kind: FaultKind::Refused { reason } }
    }
}

impl std::error::Error for Fault {}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel {}", self.kernel)?;
        if let Some(thread) = &self.thread {
            write!(f, ", {thread}")?;
        }
        if let Some(place) = &self.place {
            write!(f, ", at {place}")?;
        }
        write!(f, ": {}", self.kind)
    }
}

fn elsewhere(waits_at: &Option<Place>) -> String {
    match waits_at {
        Some(place) => format!("it waits at {place}"),
        None => "it is not running any more".to_string(),
    }
}

impl fmt::Display for Race {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Race { space, index, byte, access, other_access, other, other_place } = self;
        write!(
            f,
            "race on {space} element {index} (byte {byte:#x}): this {access} and the {other_access} of {other} at {other_place} have nothing that orders them"
        )
    }
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FaultKind::Refused { reason } => write!(f, "launch refused: {reason}"),
            FaultKind::OutOfBounds { space, index, bytes, len, element_bytes, write } => write!(
                f,
                "{space} {} out of bounds: {bytes} bytes from element {index} of an array of {len} elements of {element_bytes} bytes",
                if *write { "write" } else { "read" }
            ),
            FaultKind::Misaligned { space, index, bytes, off_by } => write!(
                f,
                "misaligned {space} access: {bytes} bytes from element {index} start {off_by} bytes past a multiple of {bytes}"
            ),
            FaultKind::SharedTooSmall { needed, launched_with } => write!(
                f,
                "shared array ends at byte {needed}, but the launch has {launched_with} bytes of shared memory"
            ),
            FaultKind::Uninitialized { offset, bytes } => {
                write!(f, "read of {bytes} bytes of shared memory at offset {offset} that no thread wrote")
            }
            FaultKind::CopyUnderWay { offset, bytes } => write!(
                f,
                "access to {bytes} bytes of shared memory at offset {offset} that an asynchronous copy is still on its way to: \
                 commit it and wait for its group first"
            ),
            FaultKind::DivergentBarrier { absent, waits_at } => write!(
                f,
                "divergent barrier: thread {absent} of the block does not reach it; {}",
                elsewhere(waits_at)
            ),
            FaultKind::LaneNotInMask { mask, lane } => {
                write!(f, "lane {lane} calls a warp primitive with mask {mask:#010x}, which does not name it")
            }
            FaultKind::LaneMissing { mask, lane, waits_at } => write!(
                f,
                "mask {mask:#010x} names lane {lane}, which does not make this call; {}",
                elsewhere(waits_at)
            ),
            FaultKind::ShuffleSource { mask, lane } => {
                write!(f, "shuffle reads lane {lane}, which mask {mask:#010x} does not name")
            }
            FaultKind::ShuffleWidth { width } => {
                write!(f, "shuffle width {width} is not a power of two up to 32")
            }
            FaultKind::NoWait => {
                write!(
                    f,
                    "the kernel is to wait by itself (`overlaps = late`, `by_hand`) and ends without thread::wait_for_previous"
                )
            }
            FaultKind::Race(race) => write!(f, "{race}"),
            FaultKind::Panic { message } => write!(f, "the kernel panicked: {message}"),
        }
    }
}
