//! What a launch reads and writes, byte by byte: for those who ask whether two launches may run beside each
//! other.

use super::allocations::Tracked;
use super::fault::Fault;
use super::history::Access;
use super::lane::Lane;
use super::{Asked, EmuOptions, mutation, run_grid, tiles};
use crate::kernel::{ArgMemory, Kernel, KernelArgs, LaunchShape};
use crate::print::Sink;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// The unit in which memory is looked at: so many bytes, from a multiple of it on.
pub const PAGE: u64 = 4096;

const WORDS: usize = PAGE as usize / 64;

/// A bit for each byte of a page, the lowest bit of the first word for the first byte.
pub type PageBits = [u64; WORDS];

/// What a launch does to a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Touch {
    /// It reads it.
    Read,
    /// It reads it before [`wait_for_previous`](crate::thread::wait_for_previous), in a kernel that waits
    /// late. A [`peek`](crate::Global::peek), which may bring anything, is none of these.
    Ahead,
    /// It writes it.
    Write,
    /// It changes it by an atomic.
    Atomic,
}

impl Touch {
    /// All of them, in ascending order.
    pub const ALL: [Touch; 4] = [Touch::Read, Touch::Ahead, Touch::Write, Touch::Atomic];
}

#[derive(Default)]
struct Page([Plane; Touch::ALL.len()]);

struct Plane([AtomicU64; WORDS]);

impl Default for Plane {
    fn default() -> Self {
        Plane([const { AtomicU64::new(0) }; WORDS])
    }
}

/// Memory behind handles, and its pages that were touched.
struct Region {
    start: u64,
    pages: Box<[OnceLock<Box<Page>>]>,
}

/// What one launch read and wrote of the memory behind its handles, in all orders in which it ran.
pub struct Traffic {
    regions: Vec<Region>,
}

impl Traffic {
    fn over(memory: &[(&'static str, ArgMemory)]) -> Traffic {
        let pages =
            |memory: &ArgMemory| memory.address / PAGE..(memory.address + memory.bytes).div_ceil(PAGE);
        let mut ranges: Vec<Range<u64>> =
            memory.iter().filter(|(_, memory)| memory.bytes > 0).map(|(_, memory)| pages(memory)).collect();
        ranges.sort_by_key(|range| range.start);
        let mut apart: Vec<Range<u64>> = Vec::new();
        for range in ranges {
            match apart.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => apart.push(range),
            }
        }
        let region = |range: Range<u64>| Region {
            start: range.start * PAGE,
            pages: range.map(|_| OnceLock::new()).collect(),
        };
        Traffic { regions: apart.into_iter().map(region).collect() }
    }

    /// An access of `bytes` bytes, which is aligned to its size.
    fn note(&self, touch: Touch, address: u64, bytes: usize) {
        let after = self.regions.partition_point(|region| region.start <= address);
        let Some(region) = after.checked_sub(1).map(|at| &self.regions[at]) else { return };
        let at = address - region.start;
        let Some(page) = region.pages.get((at / PAGE) as usize) else { return };
        let plane = &page.get_or_init(Box::default).0[touch as usize];
        let word = &plane.0[(at % PAGE) as usize / 64];
        let mask = ((1u64 << bytes) - 1) << (at % 64);
        if word.load(Ordering::Relaxed) & mask != mask {
            word.fetch_or(mask, Ordering::Relaxed);
        }
    }

    /// Calls `visit` with the address of each page that was touched, in ascending order, and the bytes that
    /// were touched in each way, in the order of [`Touch::ALL`].
    pub fn pages(&self, mut visit: impl FnMut(u64, [PageBits; Touch::ALL.len()])) {
        for region in &self.regions {
            for (number, page) in region.pages.iter().enumerate() {
                let Some(page) = page.get() else { continue };
                let bits = std::array::from_fn(|touch| {
                    let words: &Plane = &page.0[touch];
                    std::array::from_fn(|word| words.0[word].load(Ordering::Relaxed))
                });
                visit(region.start + number as u64 * PAGE, bits);
            }
        }
    }
}

impl Tracked {
    /// Notes an access for whoever asked for the launch's [`Traffic`].
    pub(super) fn traffic(&self, lane: &Lane, access: Access, address: u64, bytes: usize) {
        let Some(traffic) = &self.traffic else { return };
        let ahead = lane.block().info.waits_late && !lane.waited.get();
        let touch = match access {
            Access::Write => Touch::Write,
            Access::Atomic(_) | Access::Look(_) | Access::Put(_) => Touch::Atomic,
            Access::Read | Access::ReadOnly | Access::Copy if ahead => Touch::Ahead,
            Access::Read | Access::ReadOnly | Access::Copy => Touch::Read,
        };
        traffic.note(touch, address, bytes);
    }
}

/// [`launch_printing`](super::launch_printing), and what it read and wrote.
///
/// # Safety
/// As for [`launch`](super::launch).
///
/// # Errors
/// As for [`launch`](super::launch).
pub unsafe fn launch_recorded<A: KernelArgs>(
    kernel: &Kernel<A>,
    shape: LaunchShape,
    args: A,
    options: &EmuOptions,
    sink: Option<&Sink>,
) -> Result<Arc<Traffic>, Fault> {
    let (body, args) = (kernel.body(), mutation::arguments(kernel.info(), args));
    let mut memory: Vec<(&'static str, ArgMemory)> = Vec::new();
    args.memory(&mut |parameter, handle| memory.push((parameter, handle)));
    tiles::add_tensors(&mut memory);
    let traffic = Arc::new(Traffic::over(&memory));
    let asked = Asked { traffic: Some(traffic.clone()), sink: sink.cloned(), ..Asked::default() };
    run_grid(kernel.info(), shape, &move || body(args), options, &memory, asked)?;
    Ok(traffic)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(address: u64, bytes: u64) -> (&'static str, ArgMemory) {
        ("x", ArgMemory { address, bytes, element_bytes: 1, writable: true, maps: false })
    }

    /// The bytes touched: starts and ends of ranges of addresses.
    fn touched(traffic: &Traffic, touch: Touch) -> Vec<(u64, u64)> {
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        traffic.pages(|page, bits| {
            for byte in
                (0..PAGE).filter(|byte| bits[touch as usize][*byte as usize / 64] >> (byte % 64) & 1 == 1)
            {
                let address = page + byte;
                match ranges.last_mut() {
                    Some((_, end)) if *end == address => *end += 1,
                    _ => ranges.push((address, address + 1)),
                }
            }
        });
        ranges
    }

    #[test]
    fn every_byte_is_noted_where_it_is() {
        // Handles that share a page, one that touches it, and one apart.
        let traffic = Traffic::over(&[
            memory(9 * PAGE, 16),
            memory(2 * PAGE + 256, 100),
            memory(PAGE + 8, PAGE),
            memory(20 * PAGE, 0),
        ]);
        assert_eq!(traffic.regions.len(), 2);
        traffic.note(Touch::Write, 2 * PAGE - 16, 16);
        traffic.note(Touch::Write, 2 * PAGE, 16);
        traffic.note(Touch::Write, 2 * PAGE + 257, 1);
        traffic.note(Touch::Read, 9 * PAGE + 8, 8);
        traffic.note(Touch::Read, 9 * PAGE + 56, 8);
        traffic.note(Touch::Atomic, 9 * PAGE + 4, 4);
        // No handle leads there.
        traffic.note(Touch::Write, 0, 8);
        traffic.note(Touch::Write, 3 * PAGE, 8);
        traffic.note(Touch::Write, 20 * PAGE, 8);
        assert_eq!(
            touched(&traffic, Touch::Write),
            [(2 * PAGE - 16, 2 * PAGE + 16), (2 * PAGE + 257, 2 * PAGE + 258)]
        );
        assert_eq!(
            touched(&traffic, Touch::Read),
            [(9 * PAGE + 8, 9 * PAGE + 16), (9 * PAGE + 56, 9 * PAGE + 64)]
        );
        assert_eq!(touched(&traffic, Touch::Atomic), [(9 * PAGE + 4, 9 * PAGE + 8)]);
        assert_eq!(touched(&traffic, Touch::Ahead), []);
    }
}
