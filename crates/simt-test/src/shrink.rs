//! From a failing case to a simple one that fails in the same way.
//!
//! Values are taken in their order: lengths stand ahead of arrays, so they shrink first, and an array keeps
//! its first elements. Of an array, halves and halves of halves are made as simple as can be while the case
//! still fails; the elements that are left go to the front, so that in the next round the length can follow;
//! and they are made simpler each by itself.

use crate::draws::{Case, Drawn, Item, Slot, Step};
use std::ops::Range;

/// What running a case came to.
pub(crate) struct Tried<F> {
    /// Its values, as far as they were drawn.
    pub drawn: Vec<Drawn>,
    /// How it failed, if it did.
    pub failure: Option<F>,
}

/// How often a case is shrunk from its first value to its last.
const ROUNDS: usize = 5;
/// How many elements of an array are made simpler each by itself.
const ELEMENTS: usize = 16;

/// Shrinks, and keeps the simplest case that failed.
pub(crate) struct Shrinker<'r, F> {
    /// Runs a case; a failure of another kind than the first is none.
    pub run: &'r mut dyn FnMut(&Case) -> Tried<F>,
    /// Whether there is time for another run.
    pub more: &'r mut dyn FnMut() -> bool,
    pub case: Case,
    pub drawn: Vec<Drawn>,
    pub failure: F,
    /// How many simpler cases failed.
    pub steps: u32,
}

/// What came of an attempt.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Came {
    /// The case fails as before, and is the one from here on.
    Fails,
    /// It does not.
    Passes,
    /// There was no such step to take.
    NoStep,
}

impl<F> Shrinker<'_, F> {
    pub fn shrink(&mut self) {
        self.case.slots.resize(self.drawn.len(), Slot::default());
        for _ in 0..ROUNDS {
            let steps = self.steps;
            for slot in 0..self.case.slots.len() {
                match self.drawn.get(slot).map(|drawn| drawn.len) {
                    Some(Some(len)) => self.array(slot, len),
                    Some(None) => self.value(slot, |case| &mut case.slots[slot].steps),
                    None => {}
                }
            }
            if self.steps == steps || !(self.more)() {
                break;
            }
        }
    }

    /// Runs `case`, and keeps it if it fails. `slot` is whose step it is.
    fn attempt(&mut self, case: &Case, slot: usize) -> Came {
        if !(self.more)() {
            return Came::NoStep;
        }
        let tried = (self.run)(case);
        if tried.drawn.get(slot).is_some_and(|drawn| !drawn.stepped) {
            return Came::NoStep;
        }
        match tried.failure {
            None => Came::Passes,
            Some(failure) => {
                (self.case, self.drawn, self.failure) = (case.clone(), tried.drawn, failure);
                self.steps += 1;
                Came::Fails
            }
        }
    }

    /// Takes steps of a value, or of one element of an array, as long as there are any.
    fn value(&mut self, slot: usize, steps: impl Fn(&mut Case) -> &mut Vec<Step>) {
        let mut case = self.case.clone();
        steps(&mut case).push(Step::Simplify);
        loop {
            match self.attempt(&case, slot) {
                Came::Fails => steps(&mut case).push(Step::Simplify),
                Came::Passes => steps(&mut case).push(Step::Complicate),
                // Steps behind the last failure are dropped with `case`.
                Came::NoStep => return,
            }
        }
    }

    fn array(&mut self, slot: usize, len: usize) {
        if len > u32::MAX as usize {
            return;
        }
        let items = &mut self.case.slots[slot].items;
        let known = items.len();
        items.extend((known..len).map(Item::drawn));
        self.simplify_ranges(slot, len);
        self.bring_forward(slot, len);
        let left: Vec<usize> = (0..len).filter(|at| !self.case.slots[slot].items[*at].simple).collect();
        for at in left.into_iter().take(ELEMENTS) {
            self.value(slot, |case| &mut case.slots[slot].items[at].steps);
        }
    }

    fn simplify_ranges(&mut self, slot: usize, len: usize) {
        let mut open: Vec<Range<usize>> = std::iter::once(0..len).collect();
        while let Some(range) = open.pop() {
            let mut case = self.case.clone();
            let items = &mut case.slots[slot].items[range.clone()];
            if items.iter().all(|item| item.simple) {
                continue;
            }
            items.iter_mut().for_each(|item| item.simple = true);
            if self.attempt(&case, slot) != Came::Fails && range.len() > 1 {
                let middle = range.start + range.len() / 2;
                open.extend([range.start..middle, middle..range.end]);
            }
        }
    }

    /// Brings the elements that matter to the front: those of this array alone, and, where that does not do,
    /// of every array of its length alike.
    fn bring_forward(&mut self, slot: usize, len: usize) {
        let alike = |this: &Self| -> Vec<usize> {
            let same = |at: &usize| this.drawn[*at].len == Some(len);
            (0..this.case.slots.len().min(this.drawn.len())).filter(same).collect()
        };
        for slots in [vec![slot], alike(self)] {
            let mut case = self.case.clone();
            for slot in &slots {
                let items = &mut case.slots[*slot].items;
                let known = items.len();
                items.extend((known..len).map(Item::drawn));
            }
            let simple = |at: &usize| slots.iter().all(|slot| case.slots[*slot].items[*at].simple);
            let (last, first): (Vec<usize>, Vec<usize>) = (0..len).partition(simple);
            let order: Vec<usize> = first.into_iter().chain(last).collect();
            if order.iter().copied().eq(0..len) {
                continue;
            }
            for slot in &slots {
                let items = &mut case.slots[*slot].items;
                let behind = items.split_off(len);
                *items = order.iter().map(|at| items[*at].clone()).chain(behind).collect();
            }
            if self.attempt(&case, slot) == Came::Fails {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draws::Draws;
    use crate::{array, bits, sizes};

    /// Shrinks a length and two arrays of it while `fails`.
    fn shrunk(seed: u64, fails: impl Fn(&[u32], &[u32]) -> bool) -> Option<(Vec<u32>, Vec<u32>, u32)> {
        let values = |case: &Case| {
            let mut draws = Draws::new(case, false);
            let n = draws.draw("n", sizes(1..=1000)).unwrap();
            let x = draws.draw("x", array(n, bits::<u32>())).unwrap();
            let y = draws.draw("y", array(n, bits::<u32>())).unwrap();
            (x, y, draws.into_drawn())
        };
        let mut runs = 0;
        let mut run = |case: &Case| {
            runs += 1;
            let (x, y, drawn) = values(case);
            Tried { drawn, failure: fails(&x, &y).then_some(()) }
        };
        let case = Case::new(seed);
        let Tried { drawn, failure } = run(&case);
        failure?;
        let mut shrinker = Shrinker { run: &mut run, more: &mut || true, case, drawn, failure: (), steps: 0 };
        shrinker.shrink();
        let (x, y, _) = values(&shrinker.case);
        Some((x, y, runs))
    }

    #[test]
    fn one_element_that_matters_is_all_that_is_left() {
        let mut found = 0;
        for seed in 0..100 {
            let Some((x, y, runs)) = shrunk(seed, |x, _| x.contains(&u32::MAX)) else { continue };
            assert_eq!((x, y), (vec![u32::MAX], vec![0]), "seed {seed}");
            assert!(runs < 300, "{runs}");
            found += 1;
        }
        assert!(found > 20, "{found}");
    }

    #[test]
    fn elements_that_belong_together_move_together() {
        let mut found = 0;
        for seed in 0..100 {
            let pair = |x: &[u32], y: &[u32]| x.iter().zip(y).any(|(x, y)| x > y && *y >= 7);
            let Some((x, y, _)) = shrunk(seed, pair) else { continue };
            assert_eq!((x, y), (vec![8], vec![7]), "seed {seed}");
            found += 1;
        }
        assert!(found > 50, "{found}");
    }

    #[test]
    fn a_length_that_matters_stays() {
        for seed in 0..100 {
            let Some((x, y, _)) = shrunk(seed, |x, _| x.len() % 32 == 5 && x.len() > 40) else { continue };
            assert_eq!((x, y), (vec![0; 69], vec![0; 69]), "seed {seed}");
        }
    }
}
