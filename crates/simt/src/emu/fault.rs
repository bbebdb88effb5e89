//! What the emulator reports.

use super::lane::Lane;
use super::options::Schedule;
use crate::kernel::{Dim3, KernelInfo};
use core::fmt;
use core::panic::Location;
use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

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

/// The same text for the rest of the program, as places have their files: one copy of each, of which there
/// are few.
#[doc(hidden)]
pub fn interned(text: &str) -> &'static str {
    static TEXTS: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut texts = TEXTS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = texts.get(text) {
        return known;
    }
    let leaked: &'static str = Box::leak(text.into());
    texts.insert(leaked);
    leaked
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
    /// That of another block of its cluster.
    Cluster,
}

impl fmt::Display for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Space::Global => "global",
            Space::Shared => "shared",
            Space::Cluster => "another block's shared",
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
    /// What this access does: `read`, `write`, `atomic`, and so on.
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
    /// The other threads of its cluster, at the cluster's barrier.
    Cluster,
    /// The other lanes of a mask.
    Lanes {
        /// The mask.
        mask: u32,
    },
    /// The end of a phase of an mbarrier.
    Phase {
        /// The element of its array.
        index: u64,
        /// The phase's parity.
        parity: u32,
        /// How many threads have not arrived.
        arrivals: u32,
        /// How many shall.
        count: u32,
        /// Bytes that are expected and that no copy brings.
        bytes: i64,
        /// Who arrived last, and where; `None` if no thread has.
        last: Option<(ThreadId, Place)>,
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

/// Copies that bring an mbarrier more bytes than are expected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excess {
    /// The element of the array.
    pub index: u64,
    /// How many bytes are expected.
    pub expected: i64,
    /// How many come.
    pub copied: i64,
    /// Who arrived last, and where.
    pub last: Option<(ThreadId, Place)>,
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
    /// An access that is not all in one row of a matrix, whether or not it is in its array.
    OutsideMatrix {
        /// The row and the column used.
        place: [u32; 2],
        /// How many rows and columns there are.
        of: [u32; 2],
        /// Bytes of the access.
        bytes: usize,
        /// Bytes of an element.
        element_bytes: usize,
        /// Whether it was a write.
        write: bool,
    },
    /// A matrix that is larger than its array.
    MatrixTooLarge {
        /// How many rows.
        rows: u32,
        /// How many columns.
        columns: u32,
        /// Elements of the array.
        len: u64,
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
    /// Shared memory that is used as an mbarrier and holds none: not initialized, or invalidated.
    NoMbarrier {
        /// The element of the array.
        index: u64,
    },
    /// An access to the bytes of an mbarrier by other means than its own, or another one made there.
    MbarrierBytes {
        /// Byte offset in the block's shared memory.
        offset: u32,
        /// Bytes of the access.
        bytes: usize,
    },
    /// An mbarrier for no thread, or for too many.
    MbarrierCount {
        /// How many.
        count: u32,
    },
    /// A thread that arrives at an mbarrier where all have, in a phase that still waits for bytes.
    MbarrierArrivals {
        /// The element of the array.
        index: u64,
        /// How many arrive in a phase.
        count: u32,
        /// Where it was initialized.
        made: Place,
    },
    /// An mbarrier that expects more bytes than it can count.
    MbarrierExpected {
        /// How many.
        bytes: i64,
        /// The most.
        most: u32,
    },
    /// Copies that bring an mbarrier more bytes than are expected in the phase, whose threads have all
    /// arrived.
    MbarrierExcess(Box<Excess>),
    /// A bulk copy of bytes that are no multiple of 16.
    BulkSize {
        /// How many.
        bytes: u32,
    },
    /// A bulk copy that nobody has waited for at the end of what it needs: the block, of one to shared
    /// memory, or the thread, of one to global memory.
    BulkLeft {
        /// Where it goes.
        space: Space,
    },
    /// A bulk copy of or over what a thread wrote by a plain access, without a fence between the two.
    NoProxyFence(Box<Race>),
    /// A product of a group of four warps that is not as it must be.
    Products(ProductFault),
    /// A rank that no block of the cluster has.
    ClusterRank {
        /// The rank.
        rank: u32,
        /// How many blocks there are.
        size: u32,
    },
    /// An access to the shared memory of another block of the cluster, which may not have started.
    ClusterNotStarted {
        /// That block's rank.
        rank: u32,
    },
    /// An access to the shared memory of another block of the cluster, which may have ended by then.
    ClusterEnded {
        /// That block's rank.
        rank: u32,
    },
    /// A read of another block's shared memory that no thread wrote.
    ClusterUnwritten {
        /// That block's rank.
        rank: u32,
        /// Byte offset in its shared memory.
        offset: u32,
        /// Bytes of the access.
        bytes: usize,
    },
    /// A thread that arrives at the cluster's barrier twice and has not waited in between, or that waits and
    /// has not arrived.
    ClusterArrival {
        /// Whether it waits.
        waits: bool,
    },
    /// A cluster's barrier that not all threads of the cluster reach.
    ClusterBarrier {
        /// A thread that is not there.
        absent: Box<ThreadId>,
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
    /// A wrong use of a tensor map.
    Tile(TileMistake),
    /// Two atomics of different widths on the same bytes, with nothing that orders them.
    AtomicWidths(Box<Race>),
    /// Two atomics on the same bytes by threads of two blocks, one of them of the block's scope, with nothing
    /// that orders them.
    AtomicScope(Box<Race>),
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

mod products;
mod tiles;
mod words;

pub use products::ProductFault;

pub use tiles::TileMistake;
