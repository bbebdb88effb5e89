//! How far each stream is known to have come.

use std::collections::BTreeMap;

/// For each stream the last stretch of its work that is known to be done; 0, the start, for those not named.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::cpu) struct Clock(BTreeMap<u64, u64>);

impl Clock {
    pub(super) fn of(&self, stream: u64) -> u64 {
        self.0.get(&stream).copied().unwrap_or(0)
    }

    pub(super) fn set(&mut self, stream: u64, stretch: u64) {
        self.0.insert(stream, stretch);
    }

    /// What is known to either, of the streams that are there.
    pub(super) fn join(&mut self, other: &Clock, there: impl Fn(u64) -> bool) {
        for (stream, stretch) in &other.0 {
            if there(*stream) {
                let own = self.0.entry(*stream).or_default();
                *own = (*own).max(*stretch);
            }
        }
    }

    pub(super) fn forget(&mut self, stream: u64) {
        self.0.remove(&stream);
    }

    /// How many streams it names.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}
