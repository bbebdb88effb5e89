//! One block: its threads as coroutines, parked where they wait for each other.

use super::allocations::Tracked;
use super::cluster::Cluster;
use super::collective;
use super::fault::{Fault, FaultKind, Place, Space};
use super::fixed::Fixed;
use super::lane::{Lane, State};
use super::late::Late;
use super::lodging::Lodging;
use super::mbarrier::Mbarriers;
use super::mutation::{self, Change};
use super::named::{BARRIERS, Named};
use super::options::{Dice, Schedule};
use super::orders::Watchpoint;
use super::print::Lines;
use super::race::{GridRaces, Races};
use super::shared::SharedMemory;
use super::target::Target;
use super::tensor::TensorCores;
use super::trap;
use super::wgmma::WarpGroups;
use super::{EmuOptions, MAX_BLOCK_THREADS};
use crate::kernel::{Dim3, KernelInfo, LaunchShape};
use crate::print::Sink;
use core::cell::{Cell, OnceCell, RefCell};
use core::panic::Location;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use workers::Worker;

/// What the threads of one block share.
pub(crate) struct Block {
    pub(crate) info: &'static KernelInfo,
    pub(crate) shape: LaunchShape,
    pub(crate) index: Cell<Dim3>,
    pub(crate) number: Cell<u64>,
    /// Its cluster, and its rank there.
    cluster: OnceCell<Rc<Cluster>>,
    pub(crate) rank: Cell<u32>,
    /// Whether all its threads have ended.
    pub(super) is_done: Cell<bool>,
    /// How many threads ask which lanes are with them.
    pub(super) asking: Cell<u32>,
    pub(crate) shared: SharedMemory,
    pub(crate) races: Option<RefCell<Races>>,
    pub(crate) tracked: Option<Arc<Tracked>>,
    pub(crate) watchpoint: Option<Arc<Watchpoint>>,
    /// The GPU that is emulated.
    pub(super) target: Target,
    /// How its products of f16 and bf16 matrices add up: each of them asks.
    pub(super) tensor_cores: TensorCores,
    /// What its threads have printed.
    pub(crate) lines: Lines,
    /// Whether kernels are broken on purpose, or recorded for that.
    mutated: bool,
    /// Whether accesses are looked at, for one of the four above.
    pub(crate) watched: bool,
    /// Whether something has happened that a waiting thread may wait for.
    pub(crate) changed: Cell<bool>,
    named: RefCell<[Named; BARRIERS]>,
    pub(super) mbarriers: Mbarriers,
    /// Its groups of four warps.
    pub(super) warp_groups: WarpGroups,
    /// Whether a thread has ended.
    ended: Cell<bool>,
    /// Whether its threads run on stacks that other blocks use, too.
    pub(super) is_guest: Cell<bool>,
    /// Decides who goes next, if the order is one of seeds.
    dice: Option<Cell<Dice>>,
    seed: u64,
    lanes: Cell<*const Lane>,
    threads: u32,
    /// The threads in the order in which they start: those from `next` to `end` may.
    order: Box<[Cell<u32>]>,
    next: Cell<u32>,
    end: Cell<u32>,
    /// The thread that runs now.
    running: Cell<u32>,
}

impl Block {
    pub(crate) fn cluster(&self) -> &Cluster {
        self.cluster.get().expect("a block joins a cluster before it runs")
    }

    /// Whether one of its threads has.
    pub(super) fn has_started(&self) -> bool {
        self.next.get() > 0
    }

    /// Whether this change is made here, of a kernel broken on purpose.
    #[inline]
    pub(super) fn breaks(&self, change: Change, place: &'static Location<'static>) -> bool {
        self.mutated && mutation::breaks(change, place)
    }

    /// The index that an access of `step` elements has in the place of `index`.
    #[inline]
    pub(super) fn index(&self, index: u64, step: u64, place: &'static Location<'static>) -> u64 {
        if self.mutated { mutation::index(index, step, place) } else { index }
    }

    /// Whether the thread that asks gives way now.
    pub(super) fn tosses(&self) -> bool {
        self.roll(|dice| dice.below(2) == 0).unwrap_or(false)
    }

    /// One of so many, two or more; the last one half of the time: the last one always, if the order is not
    /// one of seeds.
    pub(super) fn choose(&self, count: usize) -> usize {
        let chosen = |dice: &mut Dice| if dice.below(2) == 0 { count - 1 } else { dice.below(count - 1) };
        self.roll(chosen).unwrap_or(count - 1)
    }

    fn roll<R>(&self, f: impl FnOnce(&mut Dice) -> R) -> Option<R> {
        self.dice.as_ref().map(|cell| {
            let mut dice = cell.get();
            let result = f(&mut dice);
            cell.set(dice);
            result
        })
    }
}

/// What a launch has for each of its blocks.
#[derive(Clone)]
pub(super) struct Setting<'a> {
    pub(super) info: &'static KernelInfo,
    pub(super) shape: LaunchShape,
    pub(super) body: &'a (dyn Fn() + Sync),
    pub(super) options: EmuOptions,
    pub(super) schedule: Schedule,
    pub(super) tracked: Option<Arc<Tracked>>,
    pub(super) watchpoint: Option<Arc<Watchpoint>>,
    /// Whether kernels are broken on purpose, or recorded for that.
    pub(super) mutated: bool,
    /// Who gets what they print, if anybody.
    pub(super) sink: Option<Sink>,
    /// What is known of loads that take effect late, if any may.
    pub(super) late: Option<Arc<Mutex<Late>>>,
}

/// What came of a block's turn.
#[derive(Clone, Copy, Debug)]
pub(super) enum BlockTurn {
    Done,
    /// No thread can go on before others come to the cluster's barrier.
    Held {
        changed: bool,
    },
    /// Threads gave way: whether anything changed, and how many went on and gave way again if no thread came
    /// any further than that.
    Ran {
        changed: bool,
        idle_looks: u64,
    },
}

/// Runs blocks of one launch, one at a time, on one OS thread.
pub(super) struct Runner<'a> {
    // Before what their coroutines point to.
    workers: Vec<Option<Worker>>,
    /// Of `workers`, those that are `None`.
    vacant: Vec<usize>,
    block: Fixed<Block>,
    lanes: Fixed<[Lane]>,
    /// The first threads of the warps, in the order in which they go.
    warps: Vec<usize>,
    reversed: bool,
    /// Whether the block's last turn changed nothing.
    quiet: bool,
    /// Whether a thread's stack was full.
    overflowed: bool,
    body: &'a (dyn Fn() + Sync),
    stack_bytes: usize,
    /// Whose stacks its threads run on, if they have none of their own.
    lodging: Option<Rc<Lodging>>,
}

impl Drop for Runner<'_> {
    fn drop(&mut self) {
        self.unwind();
    }
}

impl<'a> Runner<'a> {
    pub(super) fn new(setting: &Setting<'a>, races: Option<&Rc<RefCell<GridRaces>>>) -> Self {
        let Setting { info, shape, body, options, schedule, tracked, watchpoint, mutated, sink, late: _ } =
            setting.clone();
        trap::watch();
        let threads = shape.block.count().min(MAX_BLOCK_THREADS) as u32;
        let mixed = matches!(schedule, Schedule::Seeded(_));
        let block = Fixed::new(Box::new(Block {
            info,
            shape,
            index: Cell::new(Dim3 { x: 0, y: 0, z: 0 }),
            number: Cell::new(0),
            cluster: OnceCell::new(),
            rank: Cell::new(0),
            is_done: Cell::new(false),
            asking: Cell::new(0),
            shared: SharedMemory::new(shape.shared_bytes),
            races: races.map(|grid| RefCell::new(Races::new(threads, grid.clone(), mixed))),
            watched: mutated || races.is_some() || tracked.is_some() || watchpoint.is_some(),
            mutated,
            tracked,
            watchpoint,
            target: options.target.unwrap_or_default(),
            tensor_cores: options.target.unwrap_or_default().tensor_cores(),
            lines: Lines::new(sink),
            changed: Cell::new(false),
            named: RefCell::default(),
            mbarriers: Mbarriers::default(),
            warp_groups: WarpGroups::default(),
            ended: Cell::new(false),
            is_guest: Cell::new(false),
            dice: mixed.then(|| Cell::new(Dice::new(0))),
            seed: if let Schedule::Seeded(seed) = schedule { seed.into() } else { 0 },
            lanes: Cell::new(core::ptr::null()),
            threads,
            order: (0..threads).map(Cell::new).collect(),
            next: Cell::new(0),
            end: Cell::new(0),
            running: Cell::new(0),
        }));
        let pointer: *const Block = &*block;
        let shared = block.shared.view();
        let lane = |linear| Lane::new(shape.block.at(u64::from(linear)), linear, pointer, shared);
        let lanes: Box<[Lane]> = (0..threads).map(lane).collect();
        let lanes = Fixed::new(lanes);
        block.lanes.set(lanes.as_ptr());
        let warps = (0..lanes.len()).step_by(32).collect();
        let (reversed, stack_bytes) = (schedule == Schedule::Reversed, options.stack_bytes);
        Runner {
            workers: Vec::new(),
            vacant: Vec::new(),
            block,
            lanes,
            warps,
            reversed,
            quiet: false,
            overflowed: false,
            body,
            stack_bytes,
            lodging: None,
        }
    }

    /// Begins the block of this index, on stacks of its own or as a guest.
    pub(super) fn enter(&mut self, index: Dim3, lodging: Option<Rc<Lodging>>) {
        let number = self.block.shape.grid.number(index);
        self.block.is_guest.set(lodging.is_some());
        self.lodging = lodging;
        self.block.number.set(number);
        self.block.index.set(index);
        self.block.is_done.set(false);
        self.block.asking.set(0);
        self.block.next.set(0);
        self.block.end.set(0);
        self.block.changed.set(true);
        self.block.shared.reset();
        self.block.named.borrow_mut().fill(Named::default());
        self.block.mbarriers.reset();
        self.block.warp_groups.reset();
        if let Some(races) = &self.block.races {
            races.borrow_mut().enter_block(number);
        }
        self.lanes.iter().for_each(Lane::reset);
        let seed = Dice::new(self.block.seed).below(usize::MAX) as u64 ^ number;
        self.block.roll(|dice| *dice = Dice::new(seed));
    }

    /// Whether it has no stacks of its own.
    pub(super) fn is_guest(&self) -> bool {
        self.lodging.is_some()
    }

    /// Lets the block's threads run until some give way and nothing else can move, or the block is done.
    pub(super) fn turn(&mut self) -> Result<BlockTurn, Box<Fault>> {
        self.quiet = !self.block.changed.replace(false);
        let result = if self.block.dice.is_some() { self.mixed_turn() } else { self.plain_turn() };
        let result = if matches!(result, Ok(BlockTurn::Done)) { self.done() } else { result };
        if !matches!(result, Ok(BlockTurn::Ran { .. } | BlockTurn::Held { .. })) {
            self.block.is_done.set(true);
            if let Some(races) = self.block.races.as_ref().filter(|_| !self.overflowed) {
                races.borrow_mut().leave_block(self.block.number.get());
            }
            // After a fault, parked threads are unwound here, while their stacks and lanes still exist.
            self.unwind();
        }
        self.block.lines.hand_over();
        result
    }

    fn plain_turn(&mut self) -> Result<BlockTurn, Box<Fault>> {
        let mut further = self.block.end.get() < self.block.threads;
        if further {
            for at in 0..self.warps.len() {
                let warp = if self.reversed { self.warps.len() - 1 - at } else { at };
                self.let_start(self.warps[warp]);
            }
            self.start()?;
        }
        loop {
            let mut progress = false;
            for at in 0..self.warps.len() {
                let warp = if self.reversed { self.warps.len() - 1 - at } else { at };
                progress |= self.settle_warp(self.warps[warp])?;
            }
            further |= progress;
            if progress {
                continue;
            }
            if self.all_done() {
                return Ok(BlockTurn::Done);
            }
            let looks = self.resume_those_that_gave_way()?;
            if looks > 0 {
                return Ok(self.ran(further, looks));
            }
            if self.is_held() {
                return Ok(self.held(further));
            }
            self.release_barrier()?;
            further = true;
        }
    }

    /// As the dice have it.
    fn mixed_turn(&mut self) -> Result<BlockTurn, Box<Fault>> {
        let (mut further, mut looks) = (false, 0);
        let mut warps = std::mem::take(&mut self.warps);
        self.block.roll(|dice| dice.shuffle(&mut warps));
        for first in &warps {
            if self.block.roll(|dice| dice.below(4) == 0).unwrap_or(false) {
                continue;
            }
            if matches!(self.lanes[*first].state.get(), State::NotStarted) {
                self.let_start(*first);
                self.start()?;
                further = true;
            }
            for lane in self.order_of(*first) {
                let rests = self.block.roll(|dice| dice.below(4) == 0).unwrap_or(false);
                if self.lanes[lane].gave_way() && !rests {
                    self.resume(lane, 0)?;
                    looks += 1;
                }
            }
            further |= self.settle_warp(*first)?;
        }
        let all_wait = |lane: &Lane| !lane.gave_way() && !matches!(lane.state.get(), State::NotStarted);
        if !further && looks == 0 && self.lanes.iter().all(all_wait) {
            for first in &warps {
                further |= self.settle_warp(*first)?;
            }
            if !further && !self.all_done() {
                self.warps = warps;
                if self.is_held() {
                    return Ok(self.held(false));
                }
                self.release_barrier()?;
                return Ok(self.ran(true, 0));
            }
        }
        self.warps = warps;
        Ok(if self.all_done() { BlockTurn::Done } else { self.ran(further, looks) })
    }

    /// All threads have ended: no copy may be on its way to memory that is the next block's.
    fn done(&self) -> Result<BlockTurn, Box<Fault>> {
        if let Some(fault) = self.unseen_visitor() {
            return Err(fault);
        }
        match self.block.mbarriers.left() {
            None => Ok(BlockTurn::Done),
            Some((thread, place)) => {
                let kind = FaultKind::BulkLeft { space: Space::Shared };
                Err(self.fault(&self.lanes[thread as usize], Some(place.into()), kind))
            }
        }
    }

    fn ran(&self, further: bool, looks: u64) -> BlockTurn {
        let further = self.block.ended.take() || further;
        BlockTurn::Ran {
            changed: further || self.block.changed.get(),
            idle_looks: if further { 0 } else { looks.max(1) },
        }
    }

    fn all_done(&self) -> bool {
        self.lanes.iter().all(|lane| matches!(lane.state.get(), State::Done))
    }

    /// The threads of the warp that starts at `first`, in the order in which they go.
    fn order_of(&self, first: usize) -> Vec<usize> {
        let end = self.lanes.len().min(first + 32);
        let mut lanes: Vec<usize> = (first..end).collect();
        if self.reversed {
            lanes.reverse();
        }
        self.block.roll(|dice| dice.shuffle(&mut lanes));
        lanes
    }

    /// The threads of the warp that starts at `first` come next of those that start.
    fn let_start(&self, first: usize) {
        for lane in self.order_of(first) {
            let end = self.block.end.get();
            self.block.order[end as usize].set(lane as u32);
            self.block.end.set(end + 1);
        }
    }

    fn start(&mut self) -> Result<(), Box<Fault>> {
        while self.block.next.get() < self.block.end.get() {
            let worker = self.start_worker()?;
            self.drive(worker, 0)?;
        }
        Ok(())
    }

    fn resume_those_that_gave_way(&mut self) -> Result<u64, Box<Fault>> {
        let mut looks = 0;
        for at in 0..self.lanes.len() {
            let lane = if self.reversed { self.lanes.len() - 1 - at } else { at };
            if self.lanes[lane].gave_way() {
                self.resume(lane, 0)?;
                looks += 1;
            }
        }
        Ok(looks)
    }

    /// Completes every warp primitive of one warp that has all its lanes; says whether there was any.
    fn settle_warp(&mut self, first: usize) -> Result<bool, Box<Fault>> {
        let mut progress = false;
        loop {
            progress |= self.settle_named(first)?;
            let warp = &self.lanes[first..self.lanes.len().min(first + 32)];
            let Some(settled) = collective::settle(warp)
                .map_err(|(lane, place, kind)| self.fault(&self.lanes[first + lane], Some(place), kind))?
            else {
                if self.settle_active(first)? {
                    progress = true;
                    continue;
                }
                return Ok(progress);
            };
            if let Some(races) = self.block.races.as_ref().filter(|_| settled.orders_memory) {
                races.borrow_mut().warp_sync(first as u32, settled.mask);
            }
            progress = true;
            if self.reversed || self.block.dice.is_some() {
                for lane in self.order_of(first) {
                    if settled.mask >> (lane - first) & 1 == 1 {
                        self.resume(lane, settled.results[lane - first])?;
                    }
                }
            } else {
                for lane in (0..32).filter(|lane| settled.mask >> lane & 1 == 1) {
                    self.resume(first + lane, settled.results[lane])?;
                }
            }
        }
    }

    /// Releases the barrier if every thread of the block waits at the same one; otherwise nothing can move
    /// any more, and that is the fault.
    fn release_barrier(&mut self) -> Result<(), Box<Fault>> {
        if !collective::all_meet(&self.lanes)
            && let Some((lane, place, kind)) =
                collective::why_stuck(&self.lanes).or_else(|| self.short_of_threads())
        {
            return Err(self.fault(&self.lanes[lane], Some(place), kind));
        }
        let Some(value) = collective::barrier_value(&self.lanes) else {
            unreachable!("threads that are not stuck all wait at one barrier")
        };
        if let Some(races) = &self.block.races {
            races.borrow_mut().block_sync(self.block.number.get());
        }
        if self.block.dice.is_some() {
            for at in 0..self.warps.len() {
                for lane in self.order_of(self.warps[at]) {
                    self.resume(lane, value as u64)?;
                }
            }
            return Ok(());
        }
        for at in 0..self.lanes.len() {
            let lane = if self.reversed { self.lanes.len() - 1 - at } else { at };
            self.resume(lane, value as u64)?;
        }
        Ok(())
    }

    fn fault(&self, lane: &Lane, place: Option<Place>, kind: FaultKind) -> Box<Fault> {
        Box::new(Fault::of(lane, place, kind))
    }
}

mod clustered;
mod meet;
#[cfg(test)]
mod tests;
mod workers;
