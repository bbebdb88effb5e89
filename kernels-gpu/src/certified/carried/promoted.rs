//! What a step has promoted, what it leaves to the dense rung alone, and what a step does with lists.

use super::super::policy::{reason, rung};
use glam::{UVec2, UVec4};
use simt::{Global, GlobalMut, Pod, Zeroable, thread};

/// What a step has promoted of a row of blocks, and when the list was made that the next one promotes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(16))]
pub struct Promoted {
    /// Tiles of keys.
    pub key_tiles: u32,
    /// Tiles of values.
    pub value_tiles: u32,
    /// Full blocks that the sequence had when the list was made.
    pub blocks: u32,
    /// For how many renewals of the list the row's heads are still computed from the originals alone; 0: the
    /// next step tries the quantized blocks. 255: for good, as stored data have changed.
    pub exact_for: u8,
    /// What [`exact_for`](Self::exact_for) was when a step last found a head over budget; 0: the last step
    /// that judged found none. In the two highest bits what was found to have changed: keys, values.
    pub wait: u8,
    /// 1: this step has computed them so, and looked at no quantized block.
    pub exact: u8,
    /// 1: this step has passed over the row a second time, by a list of its own masses.
    pub again: u8,
}

/// [`Promoted::exact_for`] of rows whose sequence has stored data that changed.
const FOR_GOOD: u32 = u8::MAX as u32;
/// Bits of [`Promoted::wait`] there: keys, values.
const CHANGED_KEYS: u32 = 0x40;
const CHANGED_VALUES: u32 = 0x80;
/// Renewals that a row may be left to the dense rung for: what [`Promoted::wait`] has room for beside these.
pub const MAX_RETRY: u32 = CHANGED_KEYS - 1;

/// Whether a step computes a row of blocks from the originals alone, and for how long: where trying again
/// keeps finding heads over budget, it is tried half as often each time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// What [`Promoted::exact_for`] is from this step on, unless its verdict counts.
    left: u32,
    /// What [`Promoted::wait`] is.
    wait: u32,
    /// Whether the pass's verdict counts: the step is the first one by a list, or the pass the second one of
    /// such a step.
    judges: bool,
    /// Whether a head over budget gets a second pass, whose verdict then counts.
    followed: bool,
}

impl Turn {
    /// A step that has no list.
    pub const NONE: Turn = Turn { left: 0, wait: 0, judges: false, followed: false };

    /// That of a step with these bits of [`mode`] for a row whose list is of a sequence with `made` full
    /// blocks.
    #[inline(always)]
    pub fn of(mode: u32, [exact_for, wait]: [u32; 2], made: u32) -> Self {
        let counts = mode & mode::RENEWS != 0 && exact_for != FOR_GOOD;
        let left = if counts { exact_for.saturating_sub(1) } else { exact_for };
        let followed = mode & mode::FOLLOWED != 0;
        // A list that nobody has renewed says nothing of what a new one would do. That of a second pass is
        // new.
        let judges = exact_for == 0 && mode & mode::JUDGES != 0 && (made != 0 || mode & mode::AGAIN != 0);
        Turn { left, wait, judges, followed }
    }

    /// Whether the row is computed from the originals alone.
    #[inline(always)]
    pub fn is_exact(self) -> bool {
        self.left != 0
    }

    /// Why it is, as a certificate has it, and the rung.
    #[inline(always)]
    pub fn rung_and_reason(self) -> u32 {
        if self.left != FOR_GOOD {
            return rung::DENSE | reason::EARLIER << 16;
        }
        let keys = if self.wait & CHANGED_KEYS != 0 { reason::KEY_CANARY } else { 0 };
        let values = if self.wait & CHANGED_VALUES != 0 { reason::VALUE_CANARY } else { 0 };
        rung::LAYER | (reason::EARLIER | keys | values) << 16
    }

    /// [`Promoted::exact_for`] and [`Promoted::wait`] behind the step, which may have found a head over
    /// budget; `retry`: what they are at the most.
    #[inline(always)]
    pub fn after(self, over_budget: bool, retry: u32) -> [u32; 2] {
        let Turn { left, wait, judges, followed } = self;
        if !judges || over_budget && followed {
            return [left, wait];
        }
        let next = if over_budget { (2 * wait).max(1).min(retry) } else { 0 };
        [next; 2]
    }
}

/// What [`Promoted`] has, beside what is there, of a row whose sequence was `found` to have changed: bits of
/// [`reason::CANARY`].
#[inline(always)]
const fn changed_word(found: u32) -> u32 {
    let keys = if found & reason::KEY_CANARY != 0 { CHANGED_KEYS } else { 0 };
    let values = if found & reason::VALUE_CANARY != 0 { CHANGED_VALUES } else { 0 };
    FOR_GOOD | (keys | values) << 8
}

impl Promoted {
    /// Leaves a row to the dense rung for good: data of its sequence were `found` to have changed.
    #[simt::device]
    pub(super) fn changed(rows: GlobalMut<Promoted>, launch_row: u32, found: u32) {
        rows.cast::<u32>().atomic_or(4 * launch_row as usize + 3, changed_word(found));
    }

    /// The same on the host.
    pub fn change(&mut self, found: u32) {
        let [exact_for, wait, ..] = changed_word(found).to_le_bytes();
        self.exact_for |= exact_for;
        self.wait |= wait;
    }

    /// Full blocks that a row's sequence had when its list was made.
    #[simt::device]
    pub(in super::super) fn blocks(rows: Global<Promoted>, launch_row: u32) -> u32 {
        rows.cast::<u32>().load(4 * launch_row as usize + 2)
    }

    /// Notes them.
    #[simt::device]
    pub(in super::super) fn note_blocks(rows: GlobalMut<Promoted>, launch_row: u32, blocks: u32) {
        rows.cast::<u32>().store(4 * launch_row as usize + 2, blocks);
    }

    /// Full blocks that a row's sequence had when its list was made, and the turn of the row in a step with
    /// bits of [`mode`].
    #[simt::device]
    pub(super) fn turn(rows: Global<Promoted>, launch_row: u32, mode: u32) -> (u32, Turn) {
        let [_, _, made, exact] = rows.cast::<UVec4>().load(launch_row as usize).to_array();
        (made, Turn::of(mode, [exact & 0xff, exact >> 8 & 0xff], made))
    }

    /// For how many renewals the row is exact still, and whether it was in this step.
    #[simt::device]
    pub(in super::super) fn exact(rows: Global<Promoted>, launch_row: u32) -> [u32; 2] {
        let word = rows.cast::<u32>().load(4 * launch_row as usize + 3);
        [word & 0xff, word >> 16 & 0xff]
    }

    /// Whether a launch with bits of [`mode`] passes over a row of blocks: one with [`AGAIN`](mode::AGAIN) is
    /// for those alone that the pass ahead of it has tried and left a head of to the dense rung.
    #[simt::device]
    pub(in super::super) fn passed_over(
        rows: Global<Promoted>,
        dense_rows: Global<u32>,
        launch_row: u32,
        mode: u32,
    ) -> bool {
        if mode & mode::AGAIN == 0 {
            return false;
        }
        // Issued together: with a short circuit the second would wait for the first.
        let over = dense_rows.load(launch_row as usize);
        let [_, exact] = Promoted::exact(rows, launch_row);
        over == 0 || exact != 0
    }

    /// Whether a launch with bits of [`mode`] [passes over](Self::passed_over) all rows of blocks of its
    /// grid. All threads call it, and all blocks find the same.
    #[simt::device]
    pub(in super::super) fn none_again(rows: Global<Promoted>, dense_rows: Global<u32>, mode: u32) -> bool {
        if mode & mode::AGAIN == 0 {
            return false;
        }
        let count = thread::grid_dim_y() * thread::grid_dim_z();
        let (mut any, mut row) = (false, thread::thread_idx_x());
        while row < count {
            any |= !Promoted::passed_over(rows, dense_rows, row, mode);
            row += thread::block_dim_x();
        }
        thread::sync_threads_or(any as u32) == 0
    }

    /// Notes what the step has promoted, [what it leaves](Turn::after), and whether it was exact. Behind a
    /// second pass what both have promoted.
    #[simt::device]
    pub(super) fn note(
        rows: GlobalMut<Promoted>,
        launch_row: u32,
        tiles: [u32; 2],
        [exact_for, wait]: [u32; 2],
        exact: bool,
        again: bool,
    ) {
        let at = 2 * launch_row as usize;
        let mut tiles = UVec2::from_array(tiles);
        if again {
            tiles += rows.cast::<UVec2>().as_const().load(at);
        }
        rows.cast::<UVec2>().store(at, tiles);
        let word = exact_for | wait << 8 | (exact as u32) << 16 | (again as u32) << 24;
        rows.cast::<u32>().store(4 * launch_row as usize + 3, word);
    }
}

/// The first of the full blocks that a step promotes though no list has them: those that were filled since it
/// was made, the two newest of them at the most.
#[inline(always)]
pub fn first_recent(blocks: u32, when_made: u32) -> u32 {
    when_made.max(blocks.saturating_sub(2)).min(blocks)
}

/// What a step does with lists, as the launches are told: bits. Who launches counts the steps.
pub mod mode {
    /// There is a list, of an earlier step: its blocks are promoted.
    pub const LISTED: u32 = 1;
    /// Blocks are noted, and the next list made of them.
    pub const RENEWS: u32 = 2;
    /// The step is the first by a new list: rows of blocks with a head over budget are left to the dense rung
    /// alone from the next step on.
    pub const JUDGES: u32 = 4;
    /// Blocks are noted though the list stays: rows of blocks with a head over budget get a list of their own
    /// masses, and a second pass by it.
    pub const FOLLOWED: u32 = 8;
    /// The launch is for those rows alone, and what it lists is for the pass behind it.
    pub const AGAIN: u32 = 16;

    /// What the second pass of a step with these bits is.
    pub const fn again(mode: u32) -> u32 {
        LISTED | AGAIN | mode & JUDGES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether each step is exact, of a row whose heads are over budget in the steps of `over`.
    fn exact(retry: u32, renew: usize, steps: usize, over: impl Fn(usize) -> bool) -> Vec<usize> {
        let mut count = [0; 2];
        let mut all = Vec::new();
        for step in 0..steps {
            let renews = if step % renew == 0 { mode::RENEWS } else { 0 };
            let judges = if step % renew == 1 % renew { mode::JUDGES } else { 0 };
            let turn = Turn::of(mode::LISTED | renews | judges, count, u32::from(step > 0));
            if turn.is_exact() {
                all.push(step);
            }
            count = turn.after(!turn.is_exact() && over(step), retry);
            assert!(count[0] <= retry && count[0] <= count[1]);
        }
        all
    }

    #[test]
    fn what_stays_over_budget_is_tried_half_as_often_each_time() {
        let always = |_| true;
        assert_eq!(exact(0, 4, 40, always), []);
        // Steps 0 and 1 try, 4 and 5, and so on.
        let tried = |step: &usize| step % 4 < 2;
        let expected: Vec<usize> = (0..40).filter(|step| !tried(step)).collect();
        assert_eq!(exact(1, 4, 40, always), expected);
        // Waits of 1, 2, 4, 4 and 4 renewals.
        let tried = [0, 4, 12, 28, 44, 60];
        let expected: Vec<usize> = (0..64).filter(|step| !tried.contains(&(step / 2 * 2))).collect();
        assert_eq!(exact(4, 4, 64, always), expected);
        // Each step renews: the one that tries makes a list, by which the next one judges.
        assert_eq!(exact(2, 1, 12, always), [4, 7, 10]);
    }

    /// Where a second pass follows, its verdict counts, in the first step by a list: what is over budget by
    /// the first pass's list alone, or in a later step, is never left to the dense rung.
    #[test]
    fn a_second_pass_has_the_last_word() {
        let mut count = [0; 2];
        let mut all = Vec::new();
        for step in 0..40 {
            let renews = if step % 4 == 0 { mode::RENEWS } else { 0 };
            let judges = if step % 4 == 1 { mode::JUDGES } else { 0 };
            let made = u32::from(step > 0);
            let turn = Turn::of(mode::LISTED | mode::FOLLOWED | renews | judges, count, made);
            if turn.is_exact() {
                all.push(step);
                count = turn.after(false, 4);
                continue;
            }
            // Over budget by the first list in every step, by the second one from step 10 to step 20.
            count = turn.after(true, 4);
            let over = (10..20).contains(&step);
            count = Turn::of(mode::LISTED | mode::AGAIN | judges, count, made).after(over, 4);
        }
        // Steps 10, 11 and 12 try and judge nothing, 13 begins a wait of one renewal, which 16 ends, 17 one
        // of two, which 24 ends.
        assert_eq!(all, [14, 15, 18, 19, 20, 21, 22, 23]);
    }

    /// Whatever a row has waited for, and whatever steps come: once its sequence has changed, it is exact.
    #[test]
    fn what_has_changed_stays_exact() {
        for (found, exact_for, wait) in [
            (reason::KEY_CANARY, 0, 0),
            (reason::VALUE_CANARY, 3, MAX_RETRY as u8),
            (reason::CANARY, 1, 2),
            (reason::KEY_CANARY, 255, 0x80),
        ] {
            let mut promoted = Promoted { exact_for, wait, ..Promoted::zeroed() };
            promoted.change(found);
            let mut count = [promoted.exact_for, promoted.wait].map(u32::from);
            let known = found | if wait == 0x80 { reason::VALUE_CANARY } else { 0 };
            for step in 0..600 {
                let renews = if step % 2 == 0 { mode::RENEWS } else { mode::JUDGES };
                let turn = Turn::of(mode::LISTED | mode::FOLLOWED | renews, count, step);
                assert!(turn.is_exact());
                assert_eq!(turn.rung_and_reason(), rung::LAYER | (reason::EARLIER | known) << 16);
                count = turn.after(step % 3 == 0, MAX_RETRY);
            }
        }
        assert_eq!(
            Turn::of(mode::LISTED, [254, 63], 1).rung_and_reason(),
            rung::DENSE | reason::EARLIER << 16
        );
    }

    #[test]
    fn what_is_within_its_budget_again_starts_anew() {
        // Within it in step 5, so that step 9 waits for one renewal again.
        let tried = [0, 4, 6, 8, 12, 20];
        let expected: Vec<usize> = (0..24).filter(|step| !tried.contains(&(step / 2 * 2))).collect();
        assert_eq!(exact(4, 4, 24, |step| step != 5), expected);
        // A step that does not judge says nothing.
        assert_eq!(exact(4, 4, 24, |step| step % 4 != 1), []);
    }
}
