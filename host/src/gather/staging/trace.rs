//! What staging pools of other sizes, and the best of all rules, would have made of the same lists.

use std::collections::HashMap;

/// Blocks that were staged when a step wanted them, and those that were not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Blocks that were there.
    pub hits: u64,
    /// Blocks that were not.
    pub misses: u64,
}

impl Counts {
    /// Of what was wanted, the share that was there; 1 if nothing was.
    pub fn hit_share(self) -> f64 {
        match self.hits + self.misses {
            0 => 1.0,
            all => self.hits as f64 / all as f64,
        }
    }

    /// Both together.
    pub fn and(self, other: Counts) -> Counts {
        Counts { hits: self.hits + other.hits, misses: self.misses + other.misses }
    }
}

/// Least recently used first: the rule of `kernels_gpu::gather::place`, for one sequence and KV head.
#[derive(Clone, Debug)]
pub struct Lru {
    /// The one that was used the longest time ago first.
    blocks: Vec<u32>,
    slots: usize,
}

impl Lru {
    /// An empty pool of so many slots, at least as many as a step wants blocks.
    pub fn new(slots: usize) -> Self {
        Lru { blocks: Vec::new(), slots }
    }

    /// A step that wants these blocks, each once.
    pub fn step(&mut self, wanted: &[u32]) -> Counts {
        let hits = wanted.iter().filter(|block| self.blocks.contains(block)).count() as u64;
        self.blocks.retain(|block| !wanted.contains(block));
        self.blocks.extend(wanted);
        self.blocks.drain(..self.blocks.len().saturating_sub(self.slots));
        Counts { hits, misses: wanted.len() as u64 - hits }
    }
}

/// The least misses that any rule can have which knows all lists ahead: what a step does not want and will be
/// wanted again the latest goes first.
pub fn optimum(lists: &[Vec<u32>], slots: usize) -> Counts {
    // The steps that want a block, the next one last.
    let mut uses: HashMap<u32, Vec<usize>> = HashMap::new();
    for (step, list) in lists.iter().enumerate().rev() {
        list.iter().for_each(|block| uses.entry(*block).or_default().push(step));
    }
    let (mut staged, mut counts) = (Vec::<u32>::new(), Counts::default());
    for list in lists {
        list.iter().for_each(|block| _ = uses.get_mut(block).map(Vec::pop));
        let hits = list.iter().filter(|block| staged.contains(block)).count() as u64;
        counts = counts.and(Counts { hits, misses: list.len() as u64 - hits });
        staged.retain(|block| !list.contains(block));
        staged.sort_by_key(|block| {
            uses.get(block).and_then(|steps| steps.last().copied()).unwrap_or(usize::MAX)
        });
        staged.truncate(slots.saturating_sub(list.len()));
        staged.extend(list);
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::dense::sample::random;

    /// The most hits that any choice of what stays can have, by trying all.
    fn tried(lists: &[Vec<u32>], staged: u32, slots: u32) -> u64 {
        let Some((list, rest)) = lists.split_first() else { return 0 };
        let wanted = list.iter().fold(0u32, |set, block| set | 1 << block);
        let all = staged | wanted;
        let keeps = |set: &u32| set & wanted == wanted && set & !all == 0 && set.count_ones() <= slots;
        let best = (0..64).filter(keeps).map(|set| tried(rest, set, slots)).max().unwrap_or(0);
        u64::from((staged & wanted).count_ones()) + best
    }

    #[test]
    fn the_optimum_is_one() {
        let mut better = 0;
        for seed in 0..40 {
            let list = |step: u64| {
                let first = random(seed, step) as u32 % 6;
                vec![first, (first + 1 + random(seed + 100, step) as u32 % 5) % 6]
            };
            let lists: Vec<Vec<u32>> = (0..7).map(list).collect();
            for slots in [2, 3, 4] {
                let best = optimum(&lists, slots);
                assert_eq!(best.hits, tried(&lists, 0, slots as u32), "{lists:?}, {slots} slots");
                let mut lru = Lru::new(slots);
                let own = lists.iter().map(|list| lru.step(list)).fold(Counts::default(), Counts::and);
                assert!(own.hits <= best.hits && own.hits + own.misses == 14, "{own:?} and {best:?}");
                better += u64::from(own.hits < best.hits);
            }
        }
        assert!(better > 0, "no difference in any of them");
        assert_eq!((Counts::default().hit_share(), Counts { hits: 3, misses: 1 }.hit_share()), (1.0, 0.75));
    }
}
