//! What the emulator reports.

use super::lane::Lane;
use super::options::Schedule;
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

/// What a thread waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WaitFor {
    /// A word that is to change.
    Word {
        /// Which memory.
        space: Space,
        /// The element index used.
        index: u64,
        /// What the word holds; not known of a plain load.
        value: Option<u64>,
        /// Whether the launch recorded who wrote what: with `race_check`.
        recorded: bool,
        /// Who wrote it last, and where; `None` if no thread has, or nothing was recorded.
        last: Option<(ThreadId, Place)>,
    },
    /// The other threads of its block, at a barrier.
    Barrier,
    /// The other lanes of a mask.
    Lanes {
        /// The mask.
        mask: u32,
    },
    /// It pauses and looks at no word.
    Unknown,
}

/// A thread that waits, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wait {
    /// The thread.
    pub thread: ThreadId,
    /// Where it waits.
    pub place: Place,
    /// What for.
    pub on: WaitFor,
}

/// Threads that wait while nothing changes any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endless {
    /// How many threads wait.
    pub threads: u64,
    /// The first thread that waits at each place for each word; five at the most.
    pub waits: Vec<Wait>,
    /// How many blocks have not started, for want of room beside those that wait.
    pub not_started: u64,
}

/// A result that depends on the order in which threads ran.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OrderDependence {
    /// The kernel's parameter.
    pub parameter: &'static str,
    /// The element of its array.
    pub index: u64,
    /// The two orders.
    pub schedules: [Schedule; 2],
    /// The element's bytes after each of them, eight at the most, as a little-endian number.
    pub values: [u64; 2],
    /// Who wrote them last in the first order, and where.
    pub first: Option<(ThreadId, Place)>,
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
    /// A barrier's number is not 1 to 15.
    NamedBarrierId {
        /// The number.
        id: u32,
    },
    /// A barrier of a number of threads that is no number of warps.
    NamedBarrierThreads {
        /// The barrier's number.
        id: u32,
        /// How many threads.
        threads: u32,
    },
    /// Warps that come to one barrier and do not agree on how many threads shall.
    NamedBarrierMismatch {
        /// The barrier's number.
        id: u32,
        /// How many this call asks for.
        threads: u32,
        /// How many the first one asks for.
        other: u32,
        /// Where that one is.
        other_place: Place,
    },
    /// A barrier with a number to which fewer threads come than it asks for.
    NamedBarrierShort {
        /// The barrier's number.
        id: u32,
        /// How many it asks for.
        threads: u32,
        /// How many have come, a warp counted as 32.
        arrived: u32,
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
    /// A read of global memory that nobody wrote.
    Unwritten {
        /// The element index used.
        index: u64,
        /// Bytes of the access.
        bytes: usize,
    },
    /// A handle to freed memory.
    Freed {
        /// The kernel's parameter.
        parameter: &'static str,
    },
    /// A read-only load of what the launch writes, in whatever order: the load may pass by what was written.
    ReadOnlyLoad(Box<Race>),
    /// The source of an asynchronous copy, written before the copying thread has waited for it.
    CopySource(Box<Race>),
    /// Two atomics of different widths on the same bytes, with nothing that orders them.
    AtomicWidths(Box<Race>),
    /// Threads wait while nothing changes any more.
    EndlessWait(Box<Endless>),
    /// A result that depends on the order in which threads ran.
    OrderDependence(Box<OrderDependence>),
    /// The thread's local variables and calls need more stack than it has.
    StackOverflow {
        /// How much it has: [`stack_bytes`](super::EmuOptions::stack_bytes).
        bytes: usize,
    },
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
    /// The order in which the threads ran: with it the fault comes again.
    pub schedule: Schedule,
}

impl Fault {
    pub(super) fn of(lane: &Lane, place: Option<Place>, kind: FaultKind) -> Self {
        let block = lane.block();
        let thread = Some(ThreadId { block: block.index.get(), thread: lane.thread });
        Fault { kernel: block.info.name, thread, place, kind, schedule: Schedule::Parallel }
    }

    pub(crate) fn refused(info: &'static KernelInfo, reason: String) -> Self {
        Fault::of_launch(info, FaultKind::Refused { reason })
    }

    /// Of no thread.
    pub(crate) fn of_launch(info: &'static KernelInfo, kind: FaultKind) -> Self {
        Fault { kernel: info.name, thread: None, place: None, kind, schedule: Schedule::Parallel }
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
        if self.schedule != Schedule::Parallel {
            write!(f, ", in order `{}`", self.schedule)?;
        }
        write!(f, ": {}", self.kind)
    }
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {} ", self.thread, self.place)?;
        self.on.fmt(f)
    }
}

impl fmt::Display for WaitFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WaitFor::Barrier => f.write_str("waits at a barrier for the rest of its block"),
            WaitFor::Lanes { mask } => write!(f, "waits for the other lanes of mask {mask:#010x}"),
            WaitFor::Unknown => f.write_str("pauses again and again"),
            WaitFor::Word { space, index, value, recorded, last } => {
                write!(f, "waits for {space} element {index} to change")?;
                if let Some(value) = value {
                    write!(f, " from {value}")?;
                }
                match last {
                    Some((thread, place)) => write!(f, ", last written by {thread} at {place}"),
                    None if *recorded => f.write_str(", which no thread has written"),
                    None => Ok(()),
                }
            }
        }
    }
}

impl fmt::Display for Endless {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a wait without end: ")?;
        for (i, wait) in self.waits.iter().enumerate() {
            // The fault has named the first thread and its place.
            match i {
                0 => write!(f, "it {}", wait.on)?,
                _ => write!(f, "; {wait}")?,
            }
        }
        if self.threads > 1 {
            write!(f, "; {} threads wait in all", self.threads)?;
        }
        if self.not_started > 0 {
            write!(f, "; {} blocks have no room to start beside those that wait", self.not_started)?;
        }
        Ok(())
    }
}

impl fmt::Display for OrderDependence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OrderDependence { parameter, index, schedules: [a, b], values: [x, y], first } = self;
        write!(f, "the result depends on the order of threads: element {index} of `{parameter}` ")?;
        write!(f, "is {x:#x} in order `{a}`")?;
        if let Some((thread, place)) = first {
            write!(f, " (written by {thread} at {place})")?;
        }
        write!(f, " and {y:#x} in order `{b}`")
    }
}

fn elsewhere(waits_at: &Option<Place>) -> String {
    match waits_at {
        Some(place) => format!("it waits at {place}"),
        None => "it is not running any more".to_string(),
    }
}

impl Race {
    /// The two accesses in words.
    fn both(&self) -> String {
        let Race { space, index, byte, access, other_access, other, other_place } = self;
        format!(
            "this {access} of {space} element {index} (byte {byte:#x}) and the {other_access} of {other} at {other_place}"
        )
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
            FaultKind::NamedBarrierId { id } => {
                write!(f, "barrier {id}: the numbers are 1 to 15, and 0 is that of `sync_threads`")
            }
            FaultKind::NamedBarrierThreads { id, threads } => {
                write!(f, "barrier {id} of {threads} threads: a multiple of 32 up to 1024 is needed")
            }
            FaultKind::NamedBarrierMismatch { id, threads, other, other_place } => {
                write!(f, "barrier {id} of {threads} threads, which is one of {other} at {other_place}")
            }
            FaultKind::NamedBarrierShort { id, threads, arrived } => {
                write!(f, "barrier {id} waits for {threads} threads, and {arrived} have come")
            }
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
            FaultKind::Unwritten { index, bytes } => {
                write!(f, "read of {bytes} bytes of global memory from element {index} that nobody wrote")
            }
            FaultKind::Freed { parameter } => {
                write!(f, "`{parameter}` is a handle to memory that is freed: keep its buffer for as long")
            }
            FaultKind::ReadOnlyLoad(pair) => write!(
                f,
                "read-only load of what the launch writes: {}; the load may bring what was there before",
                pair.both()
            ),
            FaultKind::CopySource(pair) => write!(
                f,
                "source of an asynchronous copy that is under way: {}; wait for the copy's group first",
                pair.both()
            ),
            FaultKind::AtomicWidths(pair) => write!(
                f,
                "atomics of two widths on the same bytes: {}; such are not atomic to each other",
                pair.both()
            ),
            FaultKind::EndlessWait(endless) => write!(f, "{endless}"),
            FaultKind::OrderDependence(dependence) => write!(f, "{dependence}"),
            FaultKind::StackOverflow { bytes } => write!(
                f,
                "local variables and calls need more than the thread's stack of {bytes} bytes; \
                 `EmuOptions::stack_bytes` gives it more"
            ),
            FaultKind::Panic { message } => write!(f, "the kernel panicked: {message}"),
        }
    }
}
