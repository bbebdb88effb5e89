//! The blocks of one cluster, which run together; a kernel without clusters has clusters of one block.

use super::block::{BlockTurn, Runner, Setting};
use super::cluster::Cluster;
use super::collective;
use super::fault::{Fault, FaultKind, ThreadId, Wait};
use super::lane::{Lane, State};
use super::lodging::Lodging;
use super::options::{Dice, Schedule};
use super::race::GridRaces;
use crate::kernel::{Dim3, LaunchShape};
use std::cell::RefCell;
use std::rc::Rc;

/// What came of a cluster's turn.
#[derive(Clone, Copy, Debug)]
pub(super) enum Turn {
    Done,
    /// Threads gave way: whether anything changed, and how many went on and gave way again if no thread came
    /// any further than that.
    Ran {
        changed: bool,
        idle_looks: u64,
    },
}

/// Where one of the blocks is.
#[derive(Clone, Copy, PartialEq)]
enum Member {
    /// It has moved, or may since another one has.
    Going,
    /// It cannot go on before others come to the cluster's barrier.
    Held,
    Done,
}

/// Runs the blocks of one cluster, one at a time, on one OS thread.
pub(super) struct Team<'a> {
    /// By rank.
    runners: Vec<Runner<'a>>,
    members: Vec<Member>,
    cluster: Rc<Cluster>,
    shape: LaunchShape,
    extent: Dim3,
    number: u64,
    reversed: bool,
    /// Decides whose turn it is, if the order is one of seeds.
    dice: Option<Dice>,
    seed: Option<u64>,
}

impl Drop for Team<'_> {
    fn drop(&mut self) {
        // Before any block goes that threads of another one may look at.
        self.runners.iter_mut().for_each(Runner::unwind);
    }
}

/// What the blocks of one turn have done.
#[derive(Default)]
struct Sum {
    changed: bool,
    /// Whether a thread came further than to give way again.
    further: bool,
    looks: u64,
}

impl<'a> Team<'a> {
    pub(super) fn new(setting: &Setting<'a>, races: Option<&Rc<RefCell<GridRaces>>>) -> Self {
        let extent = setting.info.cluster;
        let runners: Vec<Runner<'a>> = (0..extent.count()).map(|_| Runner::new(setting, races)).collect();
        let cluster = Rc::new(Cluster::new(runners.iter().map(Runner::block).collect()));
        (0..).zip(&runners).for_each(|(rank, runner)| runner.join(rank, &cluster));
        Team {
            members: vec![Member::Going; runners.len()],
            runners,
            cluster,
            shape: setting.shape,
            extent,
            number: 0,
            reversed: setting.schedule == Schedule::Reversed,
            dice: None,
            seed: match setting.schedule {
                Schedule::Seeded(seed) => Some(seed.into()),
                _ => None,
            },
        }
    }

    /// Begins cluster number `number` of the grid, on stacks of its own or as a guest.
    pub(super) fn enter(&mut self, number: u64, lodging: Option<Rc<Lodging>>) {
        self.number = number;
        self.members.fill(Member::Going);
        self.cluster.reset();
        let (grid, extent) = (self.shape.grid, self.extent);
        let clusters = Dim3 { x: grid.x / extent.x, y: grid.y / extent.y, z: grid.z / extent.z };
        let first = clusters.at(number);
        for (rank, runner) in (0..).zip(&mut self.runners) {
            let own = extent.at(rank);
            let x = first.x * extent.x + own.x;
            let y = first.y * extent.y + own.y;
            let z = first.z * extent.z + own.z;
            runner.enter(Dim3 { x, y, z }, lodging.clone());
        }
        let seed = self.seed.filter(|_| self.runners.len() > 1);
        self.dice = seed.map(|seed: u64| Dice::new(!seed ^ number.rotate_left(32)));
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Whether its blocks have no stacks of their own.
    pub(super) fn is_guest(&self) -> bool {
        self.runners[0].is_guest()
    }

    /// What its threads wait for.
    pub(super) fn waits(&self) -> impl Iterator<Item = Wait> {
        self.runners.iter().flat_map(Runner::waits)
    }

    /// Lets the threads of each block run until some give way and nothing else can move; of one block, in an
    /// order of seeds.
    pub(super) fn turn(&mut self) -> Result<Turn, Box<Fault>> {
        if self.cluster.end_phase() {
            self.let_held_go();
        }
        let mut sum = Sum::default();
        let goes = |member: &Member| *member == Member::Going;
        match &mut self.dice {
            Some(dice) => {
                let going = self.members.iter().filter(|member| goes(member)).count();
                let chosen = dice.below(going);
                let rank = (0..self.members.len()).filter(|rank| goes(&self.members[*rank])).nth(chosen);
                self.step(rank.unwrap_or(0), &mut sum)?;
            }
            None => {
                for at in 0..self.runners.len() {
                    let rank = if self.reversed { self.runners.len() - 1 - at } else { at };
                    if goes(&self.members[rank]) {
                        self.step(rank, &mut sum)?;
                    }
                }
            }
        }
        if self.members.iter().all(|member| *member == Member::Done) {
            return Ok(Turn::Done);
        }
        if !self.members.iter().any(goes) && !self.cluster.is_full() {
            return Err(self.stuck());
        }
        let idle_looks = if sum.further { 0 } else { sum.looks.max(1) };
        Ok(Turn::Ran { changed: sum.changed, idle_looks })
    }

    fn let_held_go(&mut self) {
        let held = self.members.iter_mut().filter(|member| **member == Member::Held);
        held.for_each(|member| *member = Member::Going);
    }

    fn step(&mut self, rank: usize, sum: &mut Sum) -> Result<(), Box<Fault>> {
        let (member, changed, idle_looks) = match self.runners[rank].turn()? {
            BlockTurn::Done => (Member::Done, true, 0),
            BlockTurn::Held { changed } => (Member::Held, changed, u64::from(!changed)),
            BlockTurn::Ran { changed, idle_looks } => (Member::Going, changed, idle_looks),
        };
        if changed {
            self.let_held_go();
        }
        self.members[rank] = member;
        sum.changed |= changed;
        sum.further |= idle_looks == 0;
        sum.looks += idle_looks;
        Ok(())
    }

    /// All blocks that have not ended wait for others at the cluster's barrier.
    fn stuck(&self) -> Box<Fault> {
        // What hangs in one warp is why the others wait.
        for runner in &self.runners {
            if let Some((lane, place, kind)) = collective::why_a_warp_is_stuck(runner.lanes()) {
                return Box::new(Fault::of(&runner.lanes()[lane], Some(place), kind));
            }
        }
        let phase = self.cluster.phase();
        let mut all = self.runners.iter().flat_map(Runner::lanes);
        let absent = all.clone().find(|lane| lane.arrived.get() != Some(phase));
        let (Some(waiting), Some(absent)) = (all.find(|lane| super::cluster::waits(lane)), absent) else {
            unreachable!("a phase that all have arrived in is over")
        };
        let place = |lane: &Lane| match lane.state.get() {
            State::Parked(_, place) => Some(place.into()),
            _ => None,
        };
        let thread = ThreadId { block: absent.block().index.get(), thread: absent.thread };
        let kind = FaultKind::ClusterBarrier { absent: Box::new(thread), waits_at: place(absent) };
        Box::new(Fault::of(waiting, place(waiting), kind))
    }
}
