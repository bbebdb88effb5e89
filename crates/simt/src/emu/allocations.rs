//! Memory that the emulator keeps account of: which of its bytes somebody wrote, and whether it is freed.
//!
//! A launch with [`memory_check`](super::EmuOptions::memory_check) reports reads of bytes that nobody wrote,
//! and handles to freed memory, where its handles lead to memory that was announced here. The CPU backend
//! announces its buffers; memory that nobody announced counts as written. Addresses are those of
//! [`Global::address`](crate::Global::address).

use super::traffic::Traffic;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// One allocation.
pub(super) struct Allocation {
    start: u64,
    bytes: u64,
    owner: u64,
    /// A bit for each byte.
    written: Box<[AtomicU64]>,
    freed: AtomicBool,
}

static ALLOCATIONS: RwLock<BTreeMap<u64, Arc<Allocation>>> = RwLock::new(BTreeMap::new());

fn find(address: u64) -> Option<Arc<Allocation>> {
    let all = ALLOCATIONS.read().unwrap_or_else(PoisonError::into_inner);
    let (_, allocation) = all.range(..=address).next_back()?;
    (address - allocation.start < allocation.bytes).then(|| allocation.clone())
}

/// `bytes` bytes from `address` on are new: nobody wrote them. They belong to `owner`, a number for which the
/// caller has a meaning.
pub fn announce(address: u64, bytes: usize, owner: u64) {
    let written = (0..bytes.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
    let allocation =
        Allocation { start: address, bytes: bytes as u64, owner, written, freed: AtomicBool::new(false) };
    let mut all = ALLOCATIONS.write().unwrap_or_else(PoisonError::into_inner);
    all.insert(address, Arc::new(allocation));
}

/// The memory that starts at `address` is freed. The caller keeps it from being given out again until it
/// calls [`forget`].
pub fn free(address: u64) {
    if let Some(allocation) = find(address) {
        allocation.freed.store(true, Ordering::Relaxed);
    }
}

/// The memory that starts at `address` is no longer accounted for.
pub fn forget(address: u64) {
    ALLOCATIONS.write().unwrap_or_else(PoisonError::into_inner).remove(&address);
}

/// `bytes` bytes from `address` on were written.
pub fn write(address: u64, bytes: usize) {
    if let Some(allocation) = find(address) {
        allocation.set(address, bytes);
    }
}

/// `bytes` bytes were copied: of those to which unwritten ones came, nobody wrote any.
pub fn copy(to: u64, from: u64, bytes: usize) {
    let Some(target) = find(to) else { return };
    match find(from) {
        None => target.set(to, bytes),
        Some(source) => {
            let known: Vec<bool> = (0..bytes as u64).map(|i| source.has(from + i)).collect();
            for (i, known) in known.into_iter().enumerate() {
                target.put(to + i as u64, known);
            }
        }
    }
}

/// Whether `address` lies in memory that is freed.
pub fn is_freed(address: u64) -> bool {
    find(address).is_some_and(|allocation| allocation.freed.load(Ordering::Relaxed))
}

/// Whom the memory at `address` belongs to, if it is accounted for.
pub fn owner(address: u64) -> Option<u64> {
    find(address).map(|allocation| allocation.owner)
}

/// Whether any memory is accounted for.
pub(super) fn any() -> bool {
    !ALLOCATIONS.read().unwrap_or_else(PoisonError::into_inner).is_empty()
}

impl Allocation {
    fn has(&self, address: u64) -> bool {
        let at = address - self.start;
        at < self.bytes && self.written[at as usize / 64].load(Ordering::Relaxed) >> (at % 64) & 1 == 1
    }

    fn put(&self, address: u64, written: bool) {
        let at = address - self.start;
        if at >= self.bytes {
            return;
        }
        let word = &self.written[at as usize / 64];
        match written {
            true => word.fetch_or(1 << (at % 64), Ordering::Relaxed),
            false => word.fetch_and(!(1 << (at % 64)), Ordering::Relaxed),
        };
    }

    fn set(&self, address: u64, bytes: usize) {
        let (mut at, end) = (address - self.start, (address - self.start + bytes as u64).min(self.bytes));
        while at < end {
            let whole = at % 64 == 0 && end - at >= 64;
            let mask = if whole { u64::MAX } else { 1 << (at % 64) };
            self.written[at as usize / 64].fetch_or(mask, Ordering::Relaxed);
            at += if whole { 64 } else { 1 };
        }
    }

    fn range(&self) -> Range<u64> {
        self.start..self.start + self.bytes
    }
}

/// The memory of one launch's handles, as far as it is accounted for, and who else asked what the launch does
/// to it.
#[derive(Default)]
pub(crate) struct Tracked {
    allocations: Vec<Arc<Allocation>>,
    pub(super) traffic: Option<Arc<Traffic>>,
}

impl Tracked {
    /// Of the memory at these addresses.
    pub(super) fn of(addresses: impl Iterator<Item = u64>) -> Tracked {
        let mut allocations: Vec<Arc<Allocation>> = addresses.filter_map(find).collect();
        allocations.sort_by_key(|allocation| allocation.start);
        allocations.dedup_by_key(|allocation| allocation.start);
        Tracked { allocations, traffic: None }
    }

    fn holding(&self, address: u64) -> Option<&Allocation> {
        let holds = |allocation: &&Arc<Allocation>| allocation.range().contains(&address);
        self.allocations.iter().find(holds).map(|allocation| &**allocation)
    }

    /// Whether all the bytes were written, or are not accounted for.
    pub(super) fn is_written(&self, address: u64, bytes: usize) -> bool {
        match self.holding(address) {
            Some(allocation) => (address..address + bytes as u64).all(|byte| allocation.has(byte)),
            None => true,
        }
    }

    pub(super) fn write(&self, address: u64, bytes: usize) {
        if let Some(allocation) = self.holding(address) {
            allocation.set(address, bytes);
        }
    }

    /// What is written, for [`restore`](Self::restore).
    pub(super) fn snapshot(&self) -> Vec<Vec<u64>> {
        let bits = |allocation: &Arc<Allocation>| {
            allocation.written.iter().map(|word| word.load(Ordering::Relaxed)).collect()
        };
        self.allocations.iter().map(bits).collect()
    }

    pub(super) fn restore(&self, snapshot: &[Vec<u64>]) {
        for (allocation, bits) in self.allocations.iter().zip(snapshot) {
            for (word, bits) in allocation.written.iter().zip(bits) {
                word.store(*bits, Ordering::Relaxed);
            }
        }
    }
}
