//! What unfinished work did to each page of memory.
//!
//! Work that the host has waited for is forgotten, and so are bytes that later work, ordered behind, has done
//! at least as much to: whatever conflicts with the one conflicts with the other.

use super::Op;
use super::bits::{Bits, Touched, first, run};
use simt::emu::traffic::{PAGE, Touch};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// So many works of one stretch of a stream are told apart on a page.
const APART: usize = 16;
/// Fewer entries than these are not looked through for what may be forgotten.
const FEW: usize = 4096;

/// What one work did to a page in one way.
struct Entry {
    op: Arc<Op>,
    touch: Touch,
    bits: Bits,
    /// The number of the work in its stream; the lowest, where it is that of several.
    number: u64,
}

/// The first bytes that two works both use.
pub(super) struct Conflict {
    pub(super) first: Arc<Op>,
    pub(super) touches: [Touch; 2],
    pub(super) or_before: bool,
    pub(super) addresses: Range<u64>,
}

#[derive(Default)]
pub(super) struct History {
    pages: BTreeMap<u64, Vec<Entry>>,
    entries: usize,
    /// With so many entries it is time to forget.
    full: usize,
}

impl Entry {
    /// Whether this and `op` may come in either order, `op` touching the bytes as it says.
    fn is_beside(&self, op: &Op, touch: Touch) -> bool {
        if self.op.stream != op.stream {
            return op.clock.of(self.op.stream) < self.op.stretch && self.op.clock.of(op.stream) < op.stretch;
        }
        if self.number <= op.number {
            touch == Touch::Ahead && self.number > op.ahead
        } else {
            self.touch == Touch::Ahead && op.number > self.op.ahead
        }
    }
}

fn conflicts(a: Touch, b: Touch) -> bool {
    match (a, b) {
        (Touch::Write, _) | (_, Touch::Write) => true,
        (Touch::Atomic, Touch::Atomic) => false,
        (Touch::Atomic, _) | (_, Touch::Atomic) => true,
        (Touch::Read | Touch::Ahead, Touch::Read | Touch::Ahead) => false,
    }
}

/// Whether all that conflicts with a past `past` conflicts with a past `touch`.
fn covers(touch: Touch, past: Touch) -> bool {
    match touch {
        Touch::Write => true,
        Touch::Atomic => past == Touch::Atomic,
        Touch::Read | Touch::Ahead => matches!(past, Touch::Read | Touch::Ahead),
    }
}

impl History {
    /// The first bytes in which work is in conflict with past work, `done` saying what the host has waited
    /// for.
    pub(super) fn conflict(
        &self,
        op: &Op,
        touched: &Touched,
        done: impl Fn(&Op) -> bool,
    ) -> Option<Conflict> {
        let mut at = 0;
        while at < touched.len() {
            let page = touched[at].0;
            let end = at + touched[at..].iter().take_while(|other| other.0 == page).count();
            let entries = self.pages.get(&page).map_or(&[][..], Vec::as_slice);
            let found = touched[at..end]
                .iter()
                .flat_map(|(_, touch, bits)| entries.iter().map(move |entry| (entry, *touch, bits)))
                .filter(|(entry, touch, _)| {
                    conflicts(entry.touch, *touch) && !done(&entry.op) && entry.is_beside(op, *touch)
                })
                .filter_map(|(entry, touch, bits)| {
                    first(&entry.bits.and(bits)).map(|byte| (byte, entry, touch))
                })
                .min_by_key(|(byte, ..)| *byte);
            if let Some((byte, entry, touch)) = found {
                let length = self.length(&touched[at..], (touch, byte), entry);
                return Some(Conflict {
                    first: entry.op.clone(),
                    touches: [entry.touch, touch],
                    or_before: entry.number != entry.op.number,
                    addresses: page + byte..page + byte + length,
                });
            }
            at = end;
        }
        None
    }

    /// How many bytes the conflict with `entry` has from `byte` of the first page on.
    fn length(&self, touched: &[(u64, Touch, Bits)], (touch, byte): (Touch, u64), entry: &Entry) -> u64 {
        let mut length = 0;
        let pages = touched.iter().filter(|(_, other, _)| *other == touch);
        for (number, (page, _, bits)) in pages.enumerate() {
            if *page != touched[0].0 + number as u64 * PAGE {
                break;
            }
            let same = |other: &&Entry| Arc::ptr_eq(&other.op, &entry.op) && other.touch == entry.touch;
            let Some(other) = self.pages.get(page).and_then(|entries| entries.iter().find(same)) else {
                break;
            };
            let start = if number == 0 { byte } else { 0 };
            let here = run(&other.bits.and(bits), start);
            length += here;
            if start + here < PAGE {
                break;
            }
        }
        length
    }

    /// Unfinished work that the host must not come between: the first that conflicts with its `touch`.
    pub(super) fn unfinished(
        &self,
        (address, bytes): (u64, usize),
        touch: Touch,
        done: impl Fn(&Op) -> bool,
    ) -> Option<Conflict> {
        let end = address + bytes as u64;
        let known = self.pages.range(address / PAGE * PAGE..end);
        let touched = known.filter_map(|(page, _)| {
            let bits = Bits::between(address.saturating_sub(*page), (end - page).min(PAGE));
            bits.map(|bits| (*page, touch, bits))
        });
        let touched: Touched = touched.collect();
        self.conflict(&Op::of_host(), &touched, done)
    }

    /// Adds work to the past, `done` saying what the host has waited for.
    pub(super) fn add(&mut self, op: &Arc<Op>, touched: Touched, done: impl Fn(&Op) -> bool) {
        for (page, touch, bits) in touched {
            let entries = self.pages.entry(page).or_default();
            let before = entries.len();
            entries.retain_mut(|entry| {
                if done(&entry.op) {
                    return false;
                }
                if !covers(touch, entry.touch) || Arc::ptr_eq(&entry.op, op) || !entry.op.is_before(op) {
                    return true;
                }
                match entry.bits.without(&bits) {
                    Some(left) => entry.bits = left,
                    None => return false,
                }
                true
            });
            entries.push(Entry { op: op.clone(), touch, bits, number: op.number });
            merge(entries);
            self.entries = self.entries + entries.len() - before;
        }
        if self.entries > self.full.max(FEW) {
            self.sweep(done);
        }
    }

    /// Forgets what is done.
    fn sweep(&mut self, done: impl Fn(&Op) -> bool) {
        self.pages.retain(|_, entries| {
            entries.retain(|entry| !done(&entry.op));
            !entries.is_empty()
        });
        self.entries = self.pages.values().map(Vec::len).sum();
        self.full = 2 * self.entries;
    }

    /// Forgets all.
    pub(super) fn clear(&mut self) {
        *self = History::default();
    }

    /// Forgets what was done to memory that is given back.
    pub(super) fn forget(&mut self, address: u64, bytes: usize) {
        let end = address + bytes as u64;
        let touched: Vec<u64> = self.pages.range(address / PAGE * PAGE..end).map(|(page, _)| *page).collect();
        for page in touched {
            let Some(gone) = Bits::between(address.saturating_sub(page), (end - page).min(PAGE)) else {
                continue;
            };
            let Some(entries) = self.pages.get_mut(&page) else { continue };
            let before = entries.len();
            entries.retain_mut(|entry| {
                let left = entry.bits.without(&gone);
                left.map(|left| entry.bits = left).is_some()
            });
            self.entries -= before - entries.len();
            if entries.is_empty() {
                self.pages.remove(&page);
            }
        }
    }

    /// How many entries there are.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        assert_eq!(self.entries, self.pages.values().map(Vec::len).sum::<usize>());
        self.entries
    }
}

/// Makes one entry of the two oldest that are of the last one's kind, if there are too many: nothing but the
/// launches' numbers tells them apart, and no clock does.
fn merge(entries: &mut Vec<Entry>) {
    let Some(last) = entries.last() else { return };
    let alike = |entry: &Entry| {
        entry.op.stream == last.op.stream && entry.op.stretch == last.op.stretch && entry.touch == last.touch
    };
    let all: Vec<usize> = (0..entries.len()).filter(|at| alike(&entries[*at])).collect();
    if all.len() <= APART {
        return;
    }
    let old = entries.remove(all[0]);
    let kept = &mut entries[all[1] - 1];
    kept.bits = kept.bits.or(&old.bits);
    kept.number = kept.number.min(old.number);
    if old.op.number > kept.op.number {
        kept.op = old.op;
    }
}
