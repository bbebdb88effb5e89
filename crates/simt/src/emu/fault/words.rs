//! What a report says.

use super::super::options::Schedule;
use super::{Endless, Excess, Fault, FaultKind, OrderDependence, Place, Race, Space, Wait, WaitFor};
use core::fmt;

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
            WaitFor::Cluster => f.write_str("waits at the cluster's barrier for the rest of its cluster"),
            WaitFor::Lanes { mask } => write!(f, "waits for the other lanes of mask {mask:#010x}"),
            WaitFor::Phase { index, parity, arrivals, count, bytes, last } => {
                write!(
                    f,
                    "waits for a phase of parity {parity} of the mbarrier in shared element {index}, which lacks "
                )?;
                match (arrivals, bytes) {
                    (0, bytes) => write!(f, "{bytes} expected bytes that no copy brings")?,
                    (arrivals, _) => write!(f, "{arrivals} of {count} arrivals")?,
                }
                match last {
                    Some((thread, place)) => write!(f, "; {thread} at {place} arrived last"),
                    None => Ok(()),
                }
            }
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
            FaultKind::OutsideMatrix { place: [row, column], of: [rows, columns], bytes, element_bytes, write } => write!(
                f,
                "{} outside of a matrix: {bytes} bytes from row {row}, column {column} of {rows} rows and {columns} columns, \
                 of elements of {element_bytes} bytes",
                if *write { "write" } else { "read" }
            ),
            FaultKind::MatrixTooLarge { rows, columns, len } => {
                write!(f, "a matrix of {rows} rows and {columns} columns over an array of {len} elements")
            }
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
                 wait for its group, which it must have been committed to, or for its mbarrier first"
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
            FaultKind::NoMbarrier { index } => {
                write!(f, "shared element {index} holds no mbarrier: initialize it, and wait for that, first")
            }
            FaultKind::MbarrierBytes { offset, bytes } => write!(
                f,
                "access to {bytes} bytes of shared memory at offset {offset}, which are those of an mbarrier: invalidate it first"
            ),
            FaultKind::MbarrierCount { count } => {
                write!(f, "an mbarrier for {count} arrivals: 1 to 1048575 are allowed")
            }
            FaultKind::MbarrierArrivals { index, count, made } => write!(
                f,
                "one arrival too many at the mbarrier in shared element {index}, made for {count} at {made}: the phase still \
                 waits for bytes"
            ),
            FaultKind::MbarrierExpected { bytes, most } => {
                write!(f, "an mbarrier that expects {bytes} bytes: {most} is the most")
            }
            FaultKind::MbarrierExcess(excess) => {
                let Excess { index, expected, copied, last } = &**excess;
                write!(
                    f,
                    "the mbarrier in shared element {index} expects {expected} bytes in this phase and copies bring {copied}: \
                     the phase may end before all have come"
                )?;
                match last {
                    Some((thread, place)) => write!(f, "; {thread} at {place} arrived last"),
                    None => Ok(()),
                }
            }
            FaultKind::BulkSize { bytes } => write!(f, "a bulk copy of {bytes} bytes: a multiple of 16 is needed"),
            FaultKind::Products(fault) => fault.fmt(f),
            FaultKind::BulkLeft { space: Space::Shared | Space::Cluster } => {
                f.write_str("the block ends and nobody has waited for this copy to its shared memory")
            }
            FaultKind::BulkLeft { space: Space::Global } => f.write_str(
                "the thread ends and has not waited until this copy has read its source: commit it and wait for its group",
            ),
            FaultKind::NoProxyFence(pair) => write!(
                f,
                "a bulk copy or product need not see a plain write: {}; the writer needs a fence of `simt::bulk` behind it, ahead of \
                 what hands it on",
                pair.both()
            ),
            FaultKind::ClusterRank { rank, size } => {
                write!(f, "block {rank} of a cluster of {size} blocks: ranks are 0 to {}", size - 1)
            }
            FaultKind::ClusterNotStarted { rank } => write!(
                f,
                "access to the shared memory of block {rank} of the cluster, which may not have started: a barrier of the \
                 cluster is needed first"
            ),
            FaultKind::ClusterEnded { rank } => write!(
                f,
                "access to the shared memory of block {rank} of the cluster, which may have ended by then: let that block \
                 wait at a barrier of the cluster behind the last access"
            ),
            FaultKind::ClusterUnwritten { rank, offset, bytes } => write!(
                f,
                "read of {bytes} bytes of the shared memory of block {rank} of the cluster at offset {offset} that no thread \
                 wrote"
            ),
            FaultKind::ClusterArrival { waits: false } => {
                f.write_str("the thread arrives at the cluster's barrier twice and has not waited in between")
            }
            FaultKind::ClusterArrival { waits: true } => {
                f.write_str("the thread waits at the cluster's barrier and has not arrived there")
            }
            FaultKind::ClusterBarrier { absent, waits_at } => write!(
                f,
                "the cluster's barrier: {absent}, of the same cluster, does not reach it; {}",
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
                "source of an asynchronous copy that is under way: {}; wait for its group or mbarrier first",
                pair.both()
            ),
            FaultKind::Tile(mistake) => write!(f, "{mistake}"),
            FaultKind::AtomicWidths(pair) => write!(
                f,
                "atomics of two widths on the same bytes: {}; such are not atomic to each other",
                pair.both()
            ),
            FaultKind::AtomicScope(pair) => write!(
                f,
                "an atomic of block scope meets another block's: {}; leave out `in_block_scope`, or order them",
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
