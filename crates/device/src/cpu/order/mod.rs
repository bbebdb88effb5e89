//! The stream check: which work may run beside which, and on what memory.
//!
//! The work of a stream is cut into stretches, at each point that something may wait for: an event, the end
//! of a graph, a wait of the host. A [`Clock`] says up to which stretch of each stream work is known to be
//! done. The host has one, and each stream has one of the work that comes next in it; waits join them. Two
//! works are ordered if they are of one stream or one's clock knows the other's stretch. What the host has
//! waited for is done before all that comes later. All threads of the host count as one: it is the program's
//! own business to order them.
//!
//! Calls run in order here, so each work is checked against the unfinished work before it ([`history`]).

mod bits;
mod clock;
mod history;
#[cfg(test)]
mod tests;

use crate::backend::At;
use crate::error::{Error, Result};
use crate::unordered::{Access, Doing, Memory, Unordered, Use};
use bits::{Bits, Touched};
pub(super) use clock::Clock;
use history::{Conflict, History};
use simt::emu::traffic::{Touch, Traffic};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One work of a stream: a launch, a copy or a fill.
pub(super) struct Op {
    stream: u64,
    stretch: u64,
    /// Its number in the stream, from 1.
    number: u64,
    /// The work of the stream up to this number is done before it starts; what comes before its wait may run
    /// beside the rest.
    ahead: u64,
    /// What is done before it, of the other streams.
    clock: Clock,
    /// The stream as reports name it.
    name: u64,
    doing: Doing,
    step: Option<(usize, At)>,
    at: At,
}

impl Op {
    /// The host, which is ordered with nothing by a clock of its own.
    fn of_host() -> Op {
        let at = std::panic::Location::caller();
        let clock = Clock::default();
        Op { stream: 0, stretch: 1, number: 0, ahead: 0, clock, name: 0, doing: Doing::Host, step: None, at }
    }

    fn is_before(&self, other: &Op) -> bool {
        match self.stream == other.stream {
            true => self.number <= other.number,
            false => other.clock.of(self.stream) >= self.stretch,
        }
    }

    fn as_use(&self, touch: Touch, or_before: bool) -> Use {
        let Op { name, number, doing, step, at, .. } = *self;
        Use { doing, access: access(touch), stream: Some(name), number, step, at: Some(at), or_before }
    }
}

fn access(touch: Touch) -> Access {
    match touch {
        Touch::Read => Access::Read,
        Touch::Ahead => Access::ReadAhead,
        Touch::Write => Access::Write,
        Touch::Atomic => Access::Atomic,
    }
}

struct Stream {
    name: u64,
    /// What is done before the work that comes next, of the other streams.
    clock: Clock,
    /// The stretch that the work that comes next belongs to.
    stretch: u64,
    /// How much work there was.
    number: u64,
    /// The work up to this number is done before a launch starts that may overlap those before it.
    ahead: u64,
    /// Whether the stretch has no work.
    fresh: bool,
}

impl Stream {
    /// What is not a launch has come: it is done before anything behind it starts.
    fn after_other(&mut self) {
        self.ahead = self.number;
    }
}

#[derive(Default)]
struct State {
    streams: BTreeMap<u64, Stream>,
    names: u64,
    host: Clock,
    history: History,
    memory: BTreeMap<u64, Memory>,
    /// Something went wrong already.
    failed: bool,
}

/// Numbers the streams of the process, from 1.
static STREAMS: AtomicU64 = AtomicU64::new(1);

/// The order of the work of one device.
#[derive(Default)]
pub(super) struct Order(Mutex<State>);

impl Order {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// There is memory, which nothing uses.
    pub(super) fn made(&self, address: u64, memory: Memory) {
        self.state().memory.insert(address, memory);
    }

    /// The memory at `address` is given back.
    pub(super) fn forget(&self, address: u64, bytes: usize) {
        let mut state = self.state();
        state.memory.remove(&address);
        state.history.forget(address, bytes);
    }

    /// There is a stream: its number.
    pub(super) fn open(&self) -> u64 {
        let mut state = self.state();
        let stream = STREAMS.fetch_add(1, Ordering::Relaxed);
        state.names += 1;
        let (name, clock) = (state.names, Clock::default());
        let fresh = Stream { name, clock, stretch: 1, number: 0, ahead: 0, fresh: true };
        state.streams.insert(stream, fresh);
        stream
    }

    /// The stream is dropped, which waits for its work.
    pub(super) fn close(&self, stream: u64) {
        let mut state = self.state();
        state.wait_for(stream);
        state.streams.remove(&stream);
        state.host.forget(stream);
        state.streams.values_mut().for_each(|other| other.clock.forget(stream));
        state.tidy();
    }

    /// An event is recorded: what is done when it has come.
    pub(super) fn record(&self, stream: u64) -> Clock {
        let mut state = self.state();
        if let Some(stream) = state.streams.get_mut(&stream) {
            stream.after_other();
        }
        state.cut(stream)
    }

    /// The stream waits for an event.
    pub(super) fn hold(&self, stream: u64, event: &Clock) {
        self.state().join(stream, event);
    }

    /// A capture begins or ends.
    pub(super) fn capture(&self, stream: u64) {
        if let Some(stream) = self.state().streams.get_mut(&stream) {
            stream.after_other();
        }
    }

    /// The host waits for an event.
    pub(super) fn host_waits(&self, event: &Clock) {
        let state = &mut *self.state();
        state.host.join(event, |stream| state.streams.contains_key(&stream));
        state.tidy();
    }

    /// The host waits for a stream.
    pub(super) fn host_waits_for(&self, stream: u64) {
        let mut state = self.state();
        state.wait_for(stream);
        state.tidy();
    }

    /// The host waits for all streams.
    pub(super) fn host_waits_for_all(&self) {
        let mut state = self.state();
        let all: Vec<u64> = state.streams.keys().copied().collect();
        all.into_iter().for_each(|stream| state.wait_for(stream));
        state.tidy();
    }

    /// Work comes into a stream; `overlaps` says whether it is a launch, and whether that may overlap others.
    /// `None` for a stream of another device: nothing is known of its order.
    pub(super) fn begin(
        &self,
        stream: u64,
        (doing, at): (Doing, At),
        step: Option<(usize, At)>,
        overlaps: Option<bool>,
    ) -> Option<Arc<Op>> {
        let state = &mut *self.state();
        let into = state.streams.get_mut(&stream)?;
        into.number += 1;
        into.fresh = false;
        let ahead = if overlaps == Some(true) { into.ahead } else { into.number - 1 };
        into.ahead = if overlaps.is_some() { ahead } else { into.number };
        let Stream { name, stretch, number, .. } = *into;
        let clock = into.clock.clone();
        Some(Arc::new(Op { stream, stretch, number, ahead, clock, name, doing, step, at }))
    }

    /// A copy or a fill comes into a stream, which is not done if this fails.
    pub(super) fn transfer(
        &self,
        stream: u64,
        what: (Doing, At),
        step: Option<(usize, At)>,
        ranges: &[(u64, usize, Touch)],
    ) -> Result<()> {
        let Some(op) = self.begin(stream, what, step, None) else { return Ok(()) };
        let pages = ranges.iter().flat_map(|(address, bytes, touch)| {
            bits::pages(*address, *bytes).map(|(page, bits)| (page, *touch, bits))
        });
        let mut touched: Touched = pages.collect();
        touched.sort_by_key(|(page, touch, _)| (*page, *touch));
        self.end(&op, touched, false)
    }

    /// A launch that has begun has done this.
    pub(super) fn end_launch(&self, op: Option<Arc<Op>>, traffic: &Traffic) -> Result<()> {
        let Some(op) = op else { return Ok(()) };
        let mut touched = Touched::new();
        traffic.pages(|page, planes| {
            let planes = Touch::ALL.into_iter().zip(&planes);
            touched.extend(planes.filter_map(|(touch, bits)| Bits::of(bits).map(|bits| (page, touch, bits))));
        });
        self.end(&op, touched, true)
    }

    /// Says what work does to memory; `done` says whether it has done it, whatever comes of this.
    fn end(&self, op: &Arc<Op>, touched: Touched, done: bool) -> Result<()> {
        let state = &mut *self.state();
        let is_done = |op: &Op| is_done(&state.streams, &state.host, op);
        let found = state.history.conflict(op, &touched, is_done);
        if (found.is_none() || done) && !is_done(op) {
            state.history.add(op, touched, is_done);
        }
        match found {
            None => Ok(()),
            Some(conflict) => {
                let second = op.as_use(conflict.touches[1], false);
                Err(state.report(&conflict, second))
            }
        }
    }

    /// The host reads pinned memory, writes it, or gives it back.
    pub(super) fn host(&self, address: u64, bytes: usize, access: Access, at: Option<At>) -> Result<()> {
        let state = &mut *self.state();
        let touch = if access == Access::Read { Touch::Read } else { Touch::Write };
        let is_done = |op: &Op| is_done(&state.streams, &state.host, op);
        let Some(conflict) = state.history.unfinished((address, bytes), touch, is_done) else {
            return Ok(());
        };
        let doing = Doing::Host;
        let second = Use { doing, access, stream: None, number: 0, step: None, at, or_before: false };
        Err(state.report(&conflict, second))
    }

    /// A launch failed, so that what follows means nothing.
    pub(super) fn fail(&self) {
        self.state().failed = true;
    }

    pub(super) fn has_failed(&self) -> bool {
        self.state().failed
    }
}

/// Whether the host has waited for it. Of a stream that is gone, it has.
fn is_done(streams: &BTreeMap<u64, Stream>, host: &Clock, op: &Op) -> bool {
    !streams.contains_key(&op.stream) || host.of(op.stream) >= op.stretch
}

impl State {
    /// Ends a stretch: what is done when all of the stream's work is.
    fn cut(&mut self, stream: u64) -> Clock {
        let Some(from) = self.streams.get_mut(&stream) else { return Clock::default() };
        let mut clock = from.clock.clone();
        if from.fresh {
            clock.set(stream, from.stretch - 1);
        } else {
            clock.set(stream, from.stretch);
            from.stretch += 1;
            from.fresh = true;
        }
        clock
    }

    /// The stream's work waits for what the clock knows.
    fn join(&mut self, stream: u64, clock: &Clock) {
        let known: Vec<u64> = self.streams.keys().copied().collect();
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.clock.join(clock, |other| known.binary_search(&other).is_ok());
            stream.after_other();
        }
    }

    /// The host waits for a stream.
    fn wait_for(&mut self, stream: u64) {
        let clock = self.cut(stream);
        self.host.join(&clock, |_| true);
    }

    /// Forgets the past, if the host has waited for all of it.
    fn tidy(&mut self) {
        let done =
            |(number, stream): (&u64, &Stream)| stream.fresh && self.host.of(*number) + 1 >= stream.stretch;
        if self.streams.iter().all(done) {
            self.history.clear();
        }
    }

    fn report(&mut self, conflict: &Conflict, second: Use) -> Error {
        self.failed = true;
        let first = conflict.first.as_use(conflict.touches[0], conflict.or_before);
        let bytes = &conflict.addresses;
        let holding = self
            .memory
            .range(..=bytes.start)
            .next_back()
            .filter(|(address, memory)| bytes.start - **address < memory.bytes() as u64);
        let (memory, bytes) = match holding {
            None => (None, bytes.clone()),
            Some((address, memory)) => {
                let end = memory.bytes() as u64;
                (Some(*memory), bytes.start - address..(bytes.end - address).min(end))
            }
        };
        Error::Unordered(Box::new(Unordered { first, second, memory, bytes }))
    }
}
