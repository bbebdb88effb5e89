//! The blocks of a launch: who starts when, and what is done about blocks that wait for each other.
//!
//! The blocks of a cluster start together and count as one here; most kernels have clusters of one block.
//!
//! Each core takes the next block that nobody has started and runs it. A block whose threads only look again
//! and again for something to change is set aside, and the core starts another one; those set aside get a
//! turn after each. When no block is left to start, or no room for one, and on no core anything changes for
//! as long as the launch has patience, the wait is one without end.

use super::block::Setting;
use super::fault::{Endless, Fault, FaultKind, Space, Wait, WaitFor};
use super::lodging::Lodging;
use super::options::{Dice, Schedule};
use super::race::GridRaces;
use super::stack;
use super::team::{Team, Turn};
use crate::kernel::{KernelInfo, LaunchShape};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// How many threads may be parked in blocks that wait for others: as many as the largest GPU holds at once,
/// 2,048 on each of 160 multiprocessors.
const RESIDENT_THREADS: u64 = 160 * 2048;

/// So many of them have stacks of their own. The others are guests on one set of stacks.
const OWN_STACKS: u64 = 16 * 1024;

/// Where more blocks than this are set aside, they get turns after several new ones each.
const FEW_ASIDE: usize = 64;

/// A wait that has changed nothing for so many rounds is a long one.
const LONG_QUIET: u64 = 64;

/// Turns in which nothing changes, until a block is set aside.
const SHORT_WAIT: u32 = 4;

/// The same of turns in which something does: its threads may change words without end while they wait.
const LONG_WAIT: u32 = 1024;

/// A wait in which words keep changing is one without end after so many times the patience.
const LIVELOCK: u64 = 10_000;

/// What a core that is out of patience leaves to the others until it looks again.
const NAP: std::time::Duration = std::time::Duration::from_micros(50);

/// Grids of fewer threads are not worth the other cores' waking.
const SMALL_GRID: u64 = 256;

/// How many blocks are taken at a time at most, of so many threads: enough work to be worth the taking.
fn largest_share(threads: u64) -> u64 {
    (16 * 1024 / threads).max(1)
}

/// The threads of a cluster.
fn threads(info: &KernelInfo, shape: LaunchShape) -> u64 {
    shape.block.count() * info.cluster.count()
}

/// A launch under way, shared by the cores that run it.
pub(super) struct Grid<'a> {
    setting: Setting<'a>,
    /// The blocks in the order in which they start, if that is not ascending.
    order: Option<Vec<u64>>,
    blocks: u64,
    share: u64,
    cores: u64,
    /// The first block that nobody has taken.
    next: AtomicU64,
    /// Blocks above one that failed are left out, those below still run: so the report does not depend on
    /// timing.
    lowest_failed: AtomicU64,
    fault: Mutex<Option<(u64, Fault)>>,
    /// Blocks that are under way.
    resident: AtomicU64,
    /// Counts turns in which something changed.
    changes: AtomicU64,
    /// Cores that have begun, and those of them that have not ended.
    begun: AtomicUsize,
    working: AtomicUsize,
    /// How many of them are out of patience, and the count of changes since which they are.
    waiting: Mutex<(u64, usize)>,
    /// No more turns: nothing would ever change.
    over: AtomicBool,
    waits: Mutex<Vec<Wait>>,
}

impl<'a> Grid<'a> {
    pub(super) fn new(setting: Setting<'a>) -> Self {
        let shape = setting.shape;
        let threads = threads(setting.info, shape);
        let blocks = shape.grid.count() / setting.info.cluster.count();
        let alone = setting.options.race_check || setting.schedule != Schedule::Parallel;
        let small = blocks.saturating_mul(threads) < SMALL_GRID;
        let cores = if alone || small { 1 } else { blocks.min(rayon::current_num_threads() as u64) };
        Grid {
            order: order(setting.schedule, blocks),
            blocks,
            share: if alone { 1 } else { (blocks / (8 * cores)).clamp(1, largest_share(threads)) },
            cores,
            next: AtomicU64::new(0),
            lowest_failed: AtomicU64::new(u64::MAX),
            fault: Mutex::new(None),
            resident: AtomicU64::new(0),
            changes: AtomicU64::new(0),
            begun: AtomicUsize::new(0),
            working: AtomicUsize::new(0),
            waiting: Mutex::new((0, 0)),
            over: AtomicBool::new(false),
            waits: Mutex::new(Vec::new()),
            setting,
        }
    }

    /// Runs all of it.
    pub(super) fn run(self) -> Result<(), Fault> {
        if self.cores == 1 {
            self.work();
        } else {
            rayon::scope(|scope| (0..self.cores).for_each(|_| scope.spawn(|_| self.work())));
        }
        let waits = self.waits.into_inner().unwrap_or_else(PoisonError::into_inner);
        let schedule = self.setting.schedule;
        match self.fault.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some((_, fault)) => Err(Fault { schedule, ..fault }),
            None if waits.is_empty() => Ok(()),
            None => {
                let started = self.next.into_inner().min(self.blocks);
                let info = self.setting.info;
                let not_started = (self.blocks - started) * info.cluster.count();
                Err(Fault { schedule, ..endless(info, waits, not_started) })
            }
        }
    }

    fn work(&self) {
        self.begun.fetch_add(1, Ordering::SeqCst);
        self.working.fetch_add(1, Ordering::SeqCst);
        let _ended = Ended(self);
        let races = || Rc::new(RefCell::new(GridRaces::new(self.setting.late.clone())));
        let races = self.setting.options.race_check.then(races);
        let mut core = Core {
            grid: self,
            races,
            aside: Vec::new(),
            spare: Vec::new(),
            lodging: Lodging::new(self.setting.options.stack_bytes),
            started: 0,
            rounds: 0,
            share: 0..0,
            quiet: 0,
            idle_looks: 0,
            seen_changes: 0,
        };
        match self.setting.schedule {
            Schedule::Seeded(seed) => core.mix(Dice::new(seed.into())),
            _ => core.run_in_turn(),
        }
    }

    /// How many blocks may be under way, on all cores.
    fn room(&self) -> u64 {
        let threads = if stack::CAN_BE_SHARED { RESIDENT_THREADS } else { OWN_STACKS };
        (threads / self.threads()).max(2 * self.cores)
    }

    /// How many of them have stacks of their own, on one core.
    fn own_stacks(&self) -> usize {
        (OWN_STACKS / self.threads() / self.cores).max(2) as usize
    }

    fn threads(&self) -> u64 {
        threads(self.setting.info, self.setting.shape)
    }

    fn fail(&self, number: u64, fault: Fault) {
        self.lowest_failed.fetch_min(number, Ordering::SeqCst);
        let mut first = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
        if first.as_ref().is_none_or(|(lowest, _)| number < *lowest) {
            *first = Some((number, fault));
        }
        if self.cores == 1 {
            // In the order of a schedule the first fault is the first that happens.
            self.over.store(true, Ordering::SeqCst);
        }
    }
}

/// A core that has ended, or that unwinds: then nobody shall wait for what it was to change.
struct Ended<'g, 'a>(&'g Grid<'a>);

impl Drop for Ended<'_, '_> {
    fn drop(&mut self) {
        // Its last block may have set what the others wait for.
        self.0.changes.fetch_add(1, Ordering::SeqCst);
        self.0.working.fetch_sub(1, Ordering::SeqCst);
        if std::thread::panicking() {
            self.0.over.store(true, Ordering::SeqCst);
        }
    }
}

fn order(schedule: Schedule, blocks: u64) -> Option<Vec<u64>> {
    match schedule {
        Schedule::Parallel | Schedule::Ascending => None,
        Schedule::Reversed => Some((0..blocks).rev().collect()),
        Schedule::Seeded(seed) => {
            let mut order: Vec<u64> = (0..blocks).collect();
            Dice::new(!u64::from(seed)).shuffle(&mut order);
            Some(order)
        }
    }
}

fn endless(info: &'static KernelInfo, mut waits: Vec<Wait>, not_started: u64) -> Fault {
    // Who looks at a word first: the others may wait just because of it.
    let rank = |wait: &Wait| {
        let (block, thread) = (wait.thread.block, wait.thread.thread);
        let looks = matches!(wait.on, WaitFor::Word { .. } | WaitFor::Phase { .. } | WaitFor::Unknown);
        (!looks, block.z, block.y, block.x, thread.z, thread.y, thread.x)
    };
    waits.sort_by_key(rank);
    let threads = waits.len() as u64;
    let mut known = Vec::new();
    waits.retain(|wait| {
        let word = match &wait.on {
            WaitFor::Word { space, index, .. } => Some((*space, *index)),
            WaitFor::Phase { index, .. } => Some((Space::Shared, *index)),
            _ => None,
        };
        let new = known.len() < 5 && !known.contains(&(wait.place, word));
        if new {
            known.push((wait.place, word));
        }
        new
    });
    let (thread, place) = (waits[0].thread, waits[0].place);
    let kind = FaultKind::EndlessWait(Box::new(Endless { threads, waits, not_started }));
    Fault { thread: Some(thread), place: Some(place), ..Fault::of_launch(info, kind) }
}

/// One core's part in a launch.
struct Core<'g, 'a> {
    grid: &'g Grid<'a>,
    races: Option<Rc<RefCell<GridRaces>>>,
    /// Blocks that are under way.
    aside: Vec<Team<'a>>,
    /// Runners that have no block.
    spare: Vec<Team<'a>>,
    /// The stacks of those that have none of their own.
    lodging: Rc<Lodging>,
    /// How many blocks have started since those set aside got their turns.
    started: usize,
    rounds: u64,
    /// Blocks that this core has taken and not started.
    share: std::ops::Range<u64>,
    /// Turns in a row in which nothing changed, here or elsewhere.
    quiet: u64,
    /// Looks that changed something since a thread has come any further.
    idle_looks: u64,
    seen_changes: u64,
}

impl<'a> Core<'_, 'a> {
    fn next_block(&mut self) -> Option<u64> {
        let grid = self.grid;
        if self.share.is_empty() {
            let start = grid.next.fetch_add(grid.share, Ordering::SeqCst).min(grid.blocks);
            self.share = start..grid.blocks.min(start + grid.share);
        }
        let at = self.share.next()?;
        let number = grid.order.as_ref().map_or(at, |order| order[at as usize]);
        if grid.cores > 1 && number > grid.lowest_failed.load(Ordering::SeqCst) {
            return None;
        }
        Some(number)
    }

    fn enter(&mut self, number: u64) -> Team<'a> {
        let mut runner =
            self.spare.pop().unwrap_or_else(|| Team::new(&self.grid.setting, self.races.as_ref()));
        self.grid.resident.fetch_add(1, Ordering::SeqCst);
        let is_guest = stack::CAN_BE_SHARED && self.aside.len() >= self.grid.own_stacks();
        runner.enter(number, is_guest.then(|| self.lodging.clone()));
        runner
    }

    /// Whether another block may start.
    fn has_room(&self) -> bool {
        self.aside.len() < 2 || self.grid.resident.load(Ordering::SeqCst) < self.grid.room()
    }

    fn fails(&self, runner: &Team<'_>, fault: Fault) {
        self.grid.resident.fetch_sub(1, Ordering::SeqCst);
        self.grid.fail(runner.number(), fault);
    }

    /// A block is done: another one may be run in its place.
    fn leaves(&mut self, runner: Team<'a>) {
        self.grid.resident.fetch_sub(1, Ordering::SeqCst);
        self.spare.push(runner);
    }

    /// Blocks one after another; those that wait get a turn after each.
    fn run_in_turn(&mut self) {
        while !self.grid.over.load(Ordering::SeqCst) {
            let number = if self.has_room() { self.next_block() } else { None };
            match number {
                Some(number) => {
                    let runner = self.enter(number);
                    self.run_until_it_waits(runner);
                }
                None if self.aside.is_empty() => return,
                None => {}
            }
            self.started += 1;
            let due = number.is_none() || self.started >= self.aside.len() / FEW_ASIDE;
            if due && !self.aside.is_empty() {
                self.started = 0;
                self.round(number.is_some());
            }
        }
        self.give_up();
    }

    fn run_until_it_waits(&mut self, mut runner: Team<'a>) {
        let (mut quiet, mut turns) = (0, 0);
        loop {
            match runner.turn() {
                Ok(Turn::Done) => return self.leaves(runner),
                Ok(Turn::Ran { changed, idle_looks }) => {
                    self.count_looks(changed, idle_looks);
                    quiet = if changed { 0 } else { quiet + 1 };
                    turns += 1;
                    if quiet >= SHORT_WAIT || turns >= LONG_WAIT {
                        return self.aside.push(runner);
                    }
                }
                Err(fault) => return self.fails(&runner, *fault),
            }
        }
    }

    /// A turn for each block that was set aside.
    fn round(&mut self, mut changed: bool) {
        let lowest_failed = self.grid.lowest_failed.load(Ordering::SeqCst);
        // Guests take long to come in: while others start, and in a long wait, they look less often.
        self.rounds += 1;
        let often = match (self.quiet < LONG_QUIET, changed) {
            (true, false) => 1,
            (true, true) => 8,
            (false, _) => 8 * (1 + self.aside.len() / self.grid.own_stacks()) as u64,
        };
        let all = self.rounds.is_multiple_of(often);
        for mut runner in std::mem::take(&mut self.aside) {
            if self.grid.cores > 1 && runner.number() > lowest_failed {
                changed = true;
                self.grid.resident.fetch_sub(1, Ordering::SeqCst);
                continue;
            }
            if !all && runner.is_guest() {
                self.aside.push(runner);
                continue;
            }
            match runner.turn() {
                Ok(Turn::Done) => {
                    changed = true;
                    self.leaves(runner);
                }
                Ok(Turn::Ran { changed: did, idle_looks }) => {
                    changed |= did;
                    self.count_looks(did, idle_looks);
                    self.aside.push(runner);
                }
                Err(fault) => {
                    changed = true;
                    self.fails(&runner, *fault);
                }
            }
        }
        self.count_round(changed, 1);
    }

    /// Looks of a turn that changed nothing do not count: that turn is quiet.
    fn count_looks(&mut self, changed: bool, idle_looks: u64) {
        self.idle_looks = match (changed, idle_looks) {
            (_, 0) => 0,
            (true, looks) => self.idle_looks + looks,
            (false, _) => self.idle_looks,
        };
    }

    /// Takes note of whether anything changed; ends the launch when nothing has for too long. `often` is how
    /// many turns make one round.
    fn count_round(&mut self, changed: bool, often: u64) {
        let grid = self.grid;
        let patience = u64::from(grid.setting.options.patience.max(1));
        if changed {
            grid.changes.fetch_add(1, Ordering::SeqCst);
        }
        let changes = grid.changes.load(Ordering::SeqCst);
        if changed || changes != self.seen_changes {
            (self.quiet, self.seen_changes) = (0, changes);
        } else {
            self.quiet += 1;
        }
        if self.idle_looks > patience.saturating_mul(LIVELOCK) {
            grid.over.store(true, Ordering::SeqCst);
        } else if self.quiet > patience.saturating_mul(often) {
            // A core that has not begun may hold what the others wait for; it may also never begin.
            let all_begun = grid.begun.load(Ordering::SeqCst) as u64 >= grid.cores;
            let long = self.quiet > patience.saturating_mul(often).saturating_mul(100);
            self.wait_with_the_others(changes, all_begun || long);
        } else if self.quiet > 32 && grid.cores > 1 {
            std::thread::yield_now();
        }
    }

    /// Nothing has changed since there were so many changes. When all cores say so, nothing will.
    fn wait_with_the_others(&mut self, changes: u64, may_end: bool) {
        let grid = self.grid;
        let mut waiting = grid.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.0 != changes {
            *waiting = (changes, 0);
        }
        waiting.1 += 1;
        // Who has ended since counts no more, and what it did is a change.
        let all_wait = waiting.1 >= grid.working.load(Ordering::SeqCst);
        if may_end && all_wait && grid.changes.load(Ordering::SeqCst) == changes {
            grid.over.store(true, Ordering::SeqCst);
            return;
        }
        drop(waiting);
        std::thread::sleep(NAP);
        let mut waiting = grid.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.0 == changes {
            waiting.1 -= 1;
        }
    }

    /// The launch is over: what is left waits.
    fn give_up(&mut self) {
        if self.grid.lowest_failed.load(Ordering::SeqCst) != u64::MAX {
            // The fault is the report.
            return self.aside.clear();
        }
        let mut waits = self.grid.waits.lock().unwrap_or_else(PoisonError::into_inner);
        waits.extend(self.aside.iter().flat_map(Team::waits));
        drop(waits);
        self.aside.clear();
    }

    /// Several blocks at once, as the dice have it.
    fn mix(&mut self, mut dice: Dice) {
        let room = self.grid.room() as usize;
        let mut width = (1 + dice.below(8)).min(room);
        while !self.grid.over.load(Ordering::SeqCst) {
            while self.aside.len() < width
                && let Some(number) = self.next_block()
            {
                let runner = self.enter(number);
                self.aside.push(runner);
            }
            if self.aside.is_empty() {
                return;
            }
            let at = dice.below(self.aside.len());
            let changed = match self.aside[at].turn() {
                Ok(Turn::Done) => {
                    let done = self.aside.swap_remove(at);
                    self.leaves(done);
                    self.idle_looks = 0;
                    true
                }
                Ok(Turn::Ran { changed, idle_looks }) => {
                    self.count_looks(changed, idle_looks);
                    changed
                }
                Err(fault) => {
                    let failed = self.aside.swap_remove(at);
                    self.fails(&failed, *fault);
                    true
                }
            };
            let often = self.aside.len() as u64;
            self.count_round(changed, often.max(1));
            if self.quiet > 64 * often && width < room {
                // They may wait for one that has not started.
                width = (width + 1 + width / 8).min(room);
            }
        }
        self.give_up();
    }
}

#[cfg(test)]
mod tests;
