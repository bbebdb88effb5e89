//! Barriers with a number, lanes that are together, and what threads wait for.

use super::super::fault::{Fault, FaultKind, Place, Space, ThreadId, Wait, WaitFor};
use super::super::lane::{Look, Pause, State};
use super::super::named::{self, CLUSTER, NamedCall};
use super::{Lane, Runner};

impl Runner<'_> {
    /// Counts the warp that starts at `first`, if all its lanes have come to one barrier with a number, and
    /// lets those go on who need not wait any longer; says whether it did.
    pub(super) fn settle_named(&mut self, first: usize) -> Result<bool, Box<Fault>> {
        let warp = &self.lanes[first..self.lanes.len().min(first + 32)];
        let Some((call, place)) = named::met(warp) else { return Ok(false) };
        if call.id == CLUSTER {
            return self.settle_cluster(first, call.waits, place);
        }
        let mut all = self.block.named.borrow_mut();
        let barrier = &mut all[call.id as usize];
        if let Some(other_place) = barrier.place.filter(|_| barrier.threads != call.threads) {
            let (id, threads, other) = (call.id, call.threads, barrier.threads);
            let kind = FaultKind::NamedBarrierMismatch { id, threads, other, other_place };
            return Err(self.fault(&self.lanes[first], Some(place.into()), kind));
        }
        (barrier.threads, barrier.place) = (call.threads, Some(place.into()));
        barrier.warps.push((first, call.waits));
        if let Some(races) = &self.block.races {
            let number = self.block.number.get();
            races.borrow_mut().arrive(number, first as u32, warp.len() as u32, &mut barrier.known);
        }
        for lane in warp {
            let counted = NamedCall { counted: true, ..call };
            lane.state.set(State::Parked(Pause::Named(counted), place));
        }
        let mut free = Vec::new();
        if barrier.arrived() == call.threads {
            let done = std::mem::take(barrier);
            for (warp, _) in done.warps.iter().filter(|(_, waits)| *waits) {
                if let Some(races) = &self.block.races {
                    races.borrow_mut().depart(*warp as u32, &done.known);
                }
                free.push(*warp);
            }
        }
        if !call.waits {
            free.push(first);
        }
        drop(all);
        for warp in free {
            for lane in self.order_of(warp) {
                self.resume(lane, 0)?;
            }
        }
        Ok(true)
    }

    /// Lets lanes of the warp that starts at `first` go on that ask which of them are together, and says
    /// whether there was one: all that ask at one place; in the reversed order each by itself; in an order of
    /// seeds as the dice have it.
    pub(super) fn settle_active(&mut self, first: usize) -> Result<bool, Box<Fault>> {
        let place = |lane: &Lane| match lane.state.get() {
            State::Parked(Pause::Active, place) => Some(place),
            _ => None,
        };
        let warp = &self.lanes[first..self.lanes.len().min(first + 32)];
        if self.block.asking.get() == 0 || warp.iter().all(|lane| place(lane).is_none()) {
            return Ok(false);
        }
        let mut together: Vec<usize> = Vec::new();
        let mut at = None;
        for lane in self.order_of(first) {
            let Some(here) = place(&self.lanes[lane]) else { continue };
            let joins = match at {
                None => true,
                Some(at) if at != here => false,
                Some(_) => self.block.roll(|dice| dice.below(4) != 0).unwrap_or(!self.reversed),
            };
            if joins {
                at = Some(here);
                together.push(lane);
            }
        }
        self.block.asking.update(|asking| asking - together.len() as u32);
        let mask = together.iter().fold(0u64, |mask, lane| mask | 1 << (lane - first));
        for lane in together {
            self.resume(lane, mask)?;
        }
        Ok(true)
    }

    /// A thread that waits at a barrier with a number, where too few have come.
    pub(super) fn short_of_threads(&self) -> Option<(usize, Place, FaultKind)> {
        let (lane, (call, place)) = self.lanes.iter().enumerate().find_map(|(at, lane)| {
            named::call_of(lane).filter(|(call, _)| call.id != CLUSTER).map(|call| (at, call))
        })?;
        let arrived = self.block.named.borrow()[call.id as usize].arrived();
        let kind = FaultKind::NamedBarrierShort { id: call.id, threads: call.threads, arrived };
        Some((lane, place.into(), kind))
    }

    /// What its threads wait for.
    pub(in super::super) fn waits(&self) -> impl Iterator<Item = Wait> {
        let (block, shape) = (self.block.index.get(), self.block.shape);
        self.lanes.iter().filter_map(move |lane| {
            let State::Parked(pause, place) = lane.state.get() else { return None };
            let phase = |look: Look| {
                let shared = Some(look).filter(|look| look.space == Space::Shared);
                shared.and_then(|look| self.block.mbarriers.lacking(look.byte))
            };
            let on = match pause {
                Pause::Named(call) if call.id == CLUSTER => WaitFor::Cluster,
                Pause::Barrier { .. } | Pause::Named(_) => WaitFor::Barrier,
                Pause::Warp(call) => WaitFor::Lanes { mask: call.mask },
                Pause::Active => WaitFor::Unknown,
                Pause::Turn => match lane.look.get() {
                    None => WaitFor::Unknown,
                    Some(Look { space: space @ Space::Cluster, index, value, .. }) => {
                        WaitFor::Word { space, index, value, recorded: false, last: None }
                    }
                    Some(look) => phase(look).unwrap_or_else(|| {
                        let Look { space, byte, index, value } = look;
                        let races = self.block.races.as_ref();
                        let last = races.and_then(|races| races.borrow_mut().last_change(shape, space, byte));
                        WaitFor::Word { space, index, value, recorded: races.is_some(), last }
                    }),
                },
            };
            Some(Wait { thread: ThreadId { block, thread: lane.thread }, place: place.into(), on })
        })
    }
}
