//! Kernels broken on purpose, one place at a time: does any test see it?
//!
//! The variable [`MUTATION_VARIABLE`] either records the places that can be broken, or breaks one of them, in
//! all launches of the process. `crates/simt-mutate` runs tests with it and says which broken kernel no test
//! sees.

use super::fault::Place;
use crate::kernel::{ArgMemory, KernelArgs, KernelInfo};
use core::cell::RefCell;
use core::fmt;
use core::panic::Location;
use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::str::FromStr;
use std::sync::{Mutex, OnceLock, PoisonError};

/// The variable: `record=FILE`, which appends a line for each place that can be broken; or such a line.
pub const MUTATION_VARIABLE: &str = "FERROKV_MUTATION";

/// What is done to a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Change {
    /// A barrier of the block, or of a part of its warps, is left out.
    NoBarrier,
    /// A warp's barrier is left out.
    NoWarpBarrier,
    /// A fence is left out.
    NoFence,
    /// A fence of the device is one of the block.
    BlockFence,
    /// A fence of sequential consistency is one of acquire and release.
    RelaxedFence,
    /// The mask of a warp primitive lacks its last lane.
    MaskBit,
    /// An atomic is a load and a store.
    NotAtomic,
    /// The wait for asynchronous copies waits for one group less, that for an mbarrier's phase not at all.
    NoWait,
    /// A load or a store is one element further.
    Next,
    /// A load or a store is one element earlier.
    Previous,
    /// The predicate of a vote or a barrier is the other one.
    Negated,
}

const CHANGES: [(Change, &str); 11] = [
    (Change::NoBarrier, "no-barrier"),
    (Change::NoWarpBarrier, "no-warp-barrier"),
    (Change::NoFence, "no-fence"),
    (Change::BlockFence, "block-fence"),
    (Change::RelaxedFence, "relaxed-fence"),
    (Change::MaskBit, "mask-bit"),
    (Change::NotAtomic, "not-atomic"),
    (Change::NoWait, "no-wait"),
    (Change::Next, "next"),
    (Change::Previous, "previous"),
    (Change::Negated, "negated"),
];

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(CHANGES.iter().find(|(change, _)| change == self).map_or("", |(_, name)| name))
    }
}

/// A change, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Mutant {
    At(Change, String, u32, u32),
    /// Two handles of a kernel are exchanged.
    Swap(String, String, String),
}

impl FromStr for Mutant {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "`{text}` breaks nothing: `record=FILE`, `CHANGE@FILE:LINE:COLUMN` with a change of {}, or \
                 `swap:PARAMETER:PARAMETER@KERNEL`",
                CHANGES.map(|(_, name)| name).join(", ")
            )
        };
        let (what, place) = text.split_once('@').ok_or_else(wrong)?;
        if let Some((a, b)) = what.strip_prefix("swap:").and_then(|pair| pair.split_once(':')) {
            return Ok(Mutant::Swap(a.into(), b.into(), place.into()));
        }
        let change = CHANGES.iter().find(|(_, name)| *name == what).ok_or_else(wrong)?.0;
        let mut parts = place.rsplitn(3, ':');
        let mut number = || parts.next().and_then(|part| part.parse().ok());
        let (column, line) = (number().ok_or_else(wrong)?, number().ok_or_else(wrong)?);
        Ok(Mutant::At(change, parts.next().ok_or_else(wrong)?.into(), line, column))
    }
}

/// What the process does.
enum Mode {
    Record(Mutex<(File, HashSet<String>)>),
    Break(Mutant),
}

fn mode() -> Result<Option<&'static Mode>, &'static str> {
    static MODE: OnceLock<Result<Option<Mode>, String>> = OnceLock::new();
    let read = || {
        let Ok(text) = std::env::var(MUTATION_VARIABLE) else { return Ok(None) };
        match text.strip_prefix("record=") {
            None => Ok(Some(Mode::Break(text.parse()?))),
            Some(path) => {
                let file = OpenOptions::new().create(true).append(true).open(path);
                let file = file.map_err(|error| format!("{path}: {error}"))?;
                Ok(Some(Mode::Record(Mutex::new((file, HashSet::new())))))
            }
        }
    };
    match MODE.get_or_init(read) {
        Ok(mode) => Ok(mode.as_ref()),
        Err(error) => Err(error),
    }
}

/// Whether kernels are broken, or the places recorded where they can be.
///
/// # Errors
/// Why the variable cannot be followed.
pub(super) fn is_on() -> Result<bool, String> {
    match mode() {
        Ok(mode) => Ok(mode.is_some()),
        Err(error) => Err(format!("{MUTATION_VARIABLE}: {error}")),
    }
}

thread_local! {
    /// The places that this OS thread has recorded.
    static SEEN: RefCell<HashSet<(Change, usize)>> = RefCell::default();
}

fn record(sites: &Mutex<(File, HashSet<String>)>, line: String) {
    let (file, known) = &mut *sites.lock().unwrap_or_else(PoisonError::into_inner);
    if !known.contains(&line) {
        // Who reads the list sees that it is short; a launch is no place to fail.
        let _ = writeln!(file, "{line}");
        known.insert(line);
    }
}

/// Whether this change is made here.
#[cold]
pub(super) fn breaks(change: Change, place: &'static Location<'static>) -> bool {
    match mode() {
        Ok(Some(Mode::Record(sites))) => {
            let known = (change, std::ptr::from_ref(place) as usize);
            if SEEN.with_borrow_mut(|seen| seen.insert(known)) {
                record(sites, format!("{change}@{}", Place::from(place)));
            }
            false
        }
        Ok(Some(Mode::Break(Mutant::At(wanted, file, line, column)))) => {
            *wanted == change && *line == place.line() && *column == place.column() && file == place.file()
        }
        _ => false,
    }
}

/// The index that an access has in the place of `index`.
#[cold]
pub(super) fn index(index: u64, step: u64, place: &'static Location<'static>) -> u64 {
    if breaks(Change::Next, place) {
        index.saturating_add(step)
    } else if breaks(Change::Previous, place) {
        // The first element has none before it.
        index.checked_sub(step).unwrap_or(index + step)
    } else {
        index
    }
}

/// The arguments with two handles exchanged, if that is what is broken.
#[inline]
pub(super) fn arguments<A: KernelArgs>(info: &'static KernelInfo, args: A) -> A {
    match mode() {
        Ok(None) | Err(_) => args,
        Ok(Some(mode)) => changed_arguments(mode, info, args),
    }
}

#[cold]
fn changed_arguments<A: KernelArgs>(mode: &Mode, info: &'static KernelInfo, args: A) -> A {
    let mut handles: Vec<(&'static str, ArgMemory)> = Vec::new();
    args.memory(&mut |parameter, memory| handles.push((parameter, memory)));
    match mode {
        Mode::Record(sites) => {
            for pair in handles.windows(2) {
                let [(a, first), (b, second)] = pair else { continue };
                let alike = (first.element_bytes, first.writable) == (second.element_bytes, second.writable);
                if alike && first.address != second.address {
                    record(sites, format!("swap:{a}:{b}@{}", info.name));
                }
            }
            args
        }
        Mode::Break(Mutant::Swap(a, b, kernel)) if kernel == info.name => {
            let find = |name: &str| handles.iter().find(|(parameter, _)| *parameter == name);
            match (find(a), find(b)) {
                (Some((_, a)), Some((_, b))) => exchanged(args, *a, *b),
                _ => args,
            }
        }
        _ => args,
    }
}

/// The arguments with two handles exchanged. A handle begins with the address and the number of elements.
fn exchanged<A: KernelArgs>(args: A, a: ArgMemory, b: ArgMemory) -> A {
    let words = size_of::<A>() / size_of::<u64>();
    let mut copy = args;
    let start = (&raw mut copy).cast::<u64>();
    let handle = |memory: ArgMemory| (memory.address, memory.bytes / memory.element_bytes as u64);
    let place = |handle: (u64, u64)| {
        // SAFETY: whole words of the arguments; those of a handle are initialised, and what others hold is
        // compared and not used.
        (1..words).map(|at| at - 1).find(|at| unsafe {
            (start.add(*at).read_unaligned(), start.add(at + 1).read_unaligned()) == handle
        })
    };
    let (a, b) = (handle(a), handle(b));
    if let (Some(at_a), Some(at_b)) = (place(a), place(b)) {
        for (at, (address, len)) in [(at_a, b), (at_b, a)] {
            // SAFETY: the words of a handle, which gets those of another one of the same launch.
            unsafe {
                start.add(at).write_unaligned(address);
                start.add(at + 1).write_unaligned(len);
            }
        }
    }
    copy
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_read_as_they_are_written() {
        for (change, _) in CHANGES {
            let text = format!("{change}@a:b/c.rs:12:5");
            assert_eq!(text.parse(), Ok(Mutant::At(change, "a:b/c.rs".into(), 12, 5)));
        }
        assert_eq!("swap:a:b@k".parse(), Ok(Mutant::Swap("a".into(), "b".into(), "k".into())));
        for wrong in ["", "next", "next@a.rs", "next@a.rs:1", "nothing@a.rs:1:2", "next@a.rs:x:2"] {
            assert!(wrong.parse::<Mutant>().expect_err(wrong).contains("no-barrier"), "{wrong}");
        }
    }
}
