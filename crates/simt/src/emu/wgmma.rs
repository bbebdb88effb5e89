//! Products of groups of four warps: computed when somebody waits for them, as late as they may be.

use super::collective::{WarpCall, WarpOp};
use super::fault::{FaultKind, Place, ProductFault, Space};
use super::history::Access;
use super::lane::{Lane, raise, warp_call, with_lane};
use super::matrix::MatrixOp;
use super::mbarrier::agent;
use super::mutation::Change;
use super::shared::check_written;
use super::tensor::{Format, TensorCores};
use crate::Swizzle;
use crate::warp::FULL_MASK;
use crate::wgmma::Kind;
use core::cell::{Cell, RefCell};
use core::panic::Location;
use std::collections::{BTreeMap, VecDeque};

/// The one target that has them.
const SM: u32 = 90;
/// Warps of a group.
const WARPS: usize = 4;
/// Threads of a group.
const GROUP_THREADS: u64 = 32 * WARPS as u64;
/// Registers of a multiprocessor.
const REGISTERS: u32 = 65536;
/// Rows of A that a warp has.
const WARP_ROWS: u32 = 16;
/// Distances of a descriptor are below this.
const FAR: u32 = 1 << 18;
/// Bytes of a vector, of which a row of an operand has two.
const VECTOR: u32 = 16;

/// An operand in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    pub(crate) base: u32,
    pub(crate) len: u32,
    /// Bytes of an element.
    pub(crate) element: u32,
    pub(crate) index: u32,
    pub(crate) swizzle: Swizzle,
    pub(crate) next_group: u32,
    pub(crate) along_k: u32,
}

/// Where A is.
#[derive(Clone, Copy, Debug)]
pub enum Source {
    Registers([u32; 4]),
    Shared(Placed),
}

/// What all lanes of a warp, and all warps of a group, say alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GroupCall {
    Begin,
    Commit,
    Wait(usize),
    Registers(u32),
    Multiply { kind: Kind, columns: u32, add: bool, a: Option<Placed>, b: Placed },
}

/// A lane's registers of A, and those of the four lanes that have its rows, while it is parked.
#[derive(Clone, Copy, Default)]
pub(super) struct Fragments {
    a: [u32; 4],
    rows: [[u32; 4]; 4],
}

/// A's two rows of a lane.
enum Rows {
    Registers([[u128; 2]; 2]),
    Shared(Placed),
}

struct Product {
    id: u32,
    kind: Kind,
    add: bool,
    a: Rows,
    b: Placed,
}

struct Sums {
    values: Vec<u32>,
    /// Products that are under way.
    waits_for: u32,
}

/// What one thread has under way.
#[derive(Default)]
pub(super) struct Products {
    open: Vec<Product>,
    groups: VecDeque<Vec<Product>>,
    /// How many groups are over.
    done: u32,
    sums: BTreeMap<u32, Sums>,
    next: u32,
}

impl Products {
    pub(super) fn clear(&mut self) {
        *self = Products::default();
    }

    fn group(&self) -> u32 {
        self.done + self.groups.len() as u32
    }
}

type Step = (GroupCall, &'static Location<'static>);

/// What the four warps of a group have called, as far as one of them has not yet.
#[derive(Default)]
struct Followed {
    counts: [u64; WARPS],
    ended: [bool; WARPS],
    steps: VecDeque<Step>,
    dropped: u64,
}

impl Followed {
    /// The warp makes its next call; where another one has made a different one, or has ended.
    fn step(&mut self, warp: usize, step: Step) -> Result<(), Option<Place>> {
        let at = self.counts[warp];
        if self.counts.iter().zip(self.ended).any(|(&count, ended)| ended && count <= at) {
            return Err(None);
        }
        match self.steps.get((at - self.dropped) as usize) {
            Some(&(call, place)) if call != step.0 || place != step.1 => return Err(Some(place.into())),
            Some(_) => {}
            None => self.steps.push_back(step),
        }
        self.counts[warp] += 1;
        while self.counts.iter().all(|&count| count > self.dropped) {
            self.steps.pop_front();
            self.dropped += 1;
        }
        Ok(())
    }

    /// The warp ends; where another one has gone further.
    fn end(&mut self, warp: usize) -> Result<(), Option<Place>> {
        self.ended[warp] = true;
        match self.steps.get((self.counts[warp] - self.dropped) as usize) {
            Some(&(_, place)) => Err(Some(place.into())),
            None => Ok(()),
        }
    }
}

/// A block's groups of warps.
#[derive(Default)]
pub(super) struct WarpGroups {
    groups: RefCell<BTreeMap<usize, Followed>>,
    /// Registers of a thread of those groups that have said how many they hold.
    registers: RefCell<BTreeMap<usize, u32>>,
    /// Warps that have ended: a bit each.
    ended: Cell<u32>,
}

impl WarpGroups {
    /// A new block.
    pub(super) fn reset(&self) {
        self.groups.borrow_mut().clear();
        self.registers.borrow_mut().clear();
        self.ended.set(0);
    }

    /// Calls `f` on the group of a warp.
    fn of<R>(&self, warp: usize, f: impl FnOnce(&mut Followed) -> R) -> R {
        let ended = self.ended.get() >> (warp / WARPS * WARPS);
        let first =
            || Followed { ended: core::array::from_fn(|i| ended >> i & 1 == 1), ..Followed::default() };
        f(self.groups.borrow_mut().entry(warp / WARPS).or_insert_with(first))
    }
}

fn raise_product(place: &'static Location<'static>, fault: ProductFault) -> ! {
    raise(place, FaultKind::Products(fault))
}

/// All lanes of the warp make this call, and its group's warps the same ones in turn.
#[track_caller]
#[inline(always)]
fn meet(call: GroupCall, a: [u32; 4]) -> [[u32; 4]; 4] {
    let place = Location::caller();
    let value = with_lane(|lane| {
        check_group(lane, call, place);
        lane.fragments.set(Fragments { a, rows: [[0; 4]; 4] });
        lane.fragments.as_ptr() as u64
    });
    warp_call(WarpCall::new(FULL_MASK, WarpOp::Matrix(MatrixOp::Group(call)), value, 0));
    with_lane(|lane| lane.fragments.get().rows)
}

fn check_group(lane: &Lane, call: GroupCall, place: &'static Location<'static>) {
    let block = lane.block();
    if block.target.number() != SM {
        raise_product(place, ProductFault::Target { sm: block.target.number() });
    }
    if block.info.only_sm != SM {
        raise_product(place, ProductFault::Unmarked);
    }
    if lane.lane() != 0 {
        return;
    }
    let warp = lane.linear as usize / 32;
    let threads = block.shape.block.count();
    if ((warp / WARPS + 1) * WARPS * 32) as u64 > threads {
        raise_product(place, ProductFault::Warps { threads });
    }
    let followed = block.warp_groups.of(warp, |group| group.step(warp % WARPS, (call, place)));
    if let Err(other) = followed {
        raise_product(place, ProductFault::Parted { other });
    }
}

/// Hands each lane the registers of the four that have its rows; `addresses` are those of [`Fragments`].
pub(super) fn exchange(addresses: &[u64; 32]) {
    // SAFETY: all 32 lanes are parked in `meet`, their fragments are in their `Lane`s, and this thread runs
    // them all.
    let all = addresses.map(|address| unsafe { (*(address as *const Fragments)).a });
    for (lane, address) in addresses.iter().enumerate() {
        let first = lane / 4 * 4;
        // SAFETY: as above.
        unsafe { (*(*address as *mut Fragments)).rows = [0, 1, 2, 3].map(|q| all[first + q]) }
    }
}

impl Placed {
    /// Where vector `k` of row `row` begins, in the block's shared memory.
    fn vector(&self, row: u32, k: u32) -> u64 {
        let start = u64::from(self.base) + u64::from(self.index) * u64::from(self.element);
        let group = u64::from(row / 8) * u64::from(self.next_group);
        let (row, k) = (u64::from(row % 8), u64::from(k));
        match self.swizzle {
            Swizzle::None => start + group + row * 16 + k * u64::from(self.along_k),
            swizzle => {
                let at = start + group + row * u64::from(swizzle.row()) + k * 16;
                // No shared memory is larger.
                u64::from(swizzle.place(at as u32))
            }
        }
    }

    /// It begins where it may: in the array, so that nothing overflows behind this.
    fn check_place(&self, place: &'static Location<'static>) {
        let start = u64::from(self.base) + u64::from(self.index) * u64::from(self.element);
        if self.index >= self.len {
            let (space, index, len) = (Space::Shared, self.index.into(), self.len.into());
            let (bytes, element_bytes, write) = (VECTOR as usize, self.element as usize, false);
            raise(place, FaultKind::OutOfBounds { space, index, bytes, len, element_bytes, write });
        }
        let (bytes, step) = match self.swizzle {
            Swizzle::None => (16, 16),
            swizzle => (32, swizzle.period()),
        };
        let (in_row, row) = (start % u64::from(step), u64::from(self.swizzle.row()));
        let off_by = match self.swizzle {
            Swizzle::None => in_row,
            // A whole number of steps of 32 bytes into the first row.
            _ if in_row + 32 > row => in_row,
            _ => in_row % 32,
        };
        if off_by != 0 {
            let (space, index) = (Space::Shared, self.index.into());
            raise(place, FaultKind::Misaligned { space, index, bytes, off_by });
        }
        let distances = [self.next_group, if self.swizzle == Swizzle::None { self.along_k } else { 0 }];
        if let Some(&distance) = distances.iter().find(|&&distance| distance % step != 0 || distance >= FAR) {
            raise_product(place, ProductFault::Distance { distance, step });
        }
    }

    /// Every vector of so many rows, from `first` on, lies inside the array and is written.
    fn check(&self, lane: &Lane, first: u32, rows: u32, place: &'static Location<'static>) {
        self.check_place(place);
        let (base, element) = (u64::from(self.base), u64::from(self.element));
        let (len, element_bytes) = (u64::from(self.len), self.element as usize);
        for (row, k) in (first..first + rows).flat_map(|row| [(row, 0), (row, 1)]) {
            let at = self.vector(row, k);
            let end = at + u64::from(VECTOR);
            if at < base || end > base + len * element {
                let (space, index) = (Space::Shared, at.saturating_sub(base) / element);
                let (bytes, write) = (VECTOR as usize, false);
                raise(place, FaultKind::OutOfBounds { space, index, bytes, len, element_bytes, write });
            }
            let launched_with = lane.shared.bytes;
            if end > u64::from(launched_with) {
                raise(place, FaultKind::SharedTooSmall { needed: end, launched_with });
            }
            check_written(lane, at as u32, VECTOR as usize, place);
        }
    }

    /// They are read from now on until the warp has waited.
    fn used(&self, lane: &Lane, group: u32, first: u32, rows: u32, place: &'static Location<'static>) {
        let Some(races) = &lane.block().races else { return };
        let agent = agent::products(lane.linear - lane.lane(), group);
        for (row, k) in (first..first + rows).flat_map(|row| [(row, 0), (row, 1)]) {
            let at = self.vector(row, k);
            let index = (at - u64::from(self.base)) / u64::from(self.element);
            let part = (at, index, VECTOR as usize);
            let found = races.borrow_mut().copy(lane, agent, Space::Shared, part, Access::Copy, place);
            if let Some(kind) = found {
                raise(place, kind);
            }
        }
    }

    fn row(&self, lane: &Lane, row: u32) -> [u128; 2] {
        [0, 1].map(|k| lane.block().shared.read_unit(self.vector(row, k) as u32))
    }
}

/// The first row of A that the lane's warp has.
fn first_row(lane: &Lane) -> u32 {
    lane.linear / 32 % WARPS as u32 * WARP_ROWS
}

#[track_caller]
pub(crate) fn begin() {
    meet(GroupCall::Begin, [0; 4]);
}

/// The group's threads have so many registers each from here on. A block has what its launch gave it: as many
/// for each thread as fit a multiprocessor that it has to itself, whose four schedulers have a quarter of the
/// warps each. It is checked where every group has said once what it holds: a second time depends on when.
#[track_caller]
pub(crate) fn registers(count: u32) {
    let place = Location::caller();
    meet(GroupCall::Registers(count), [0; 4]);
    with_lane(|lane| {
        let block = lane.block();
        let mut held = block.warp_groups.registers.borrow_mut();
        let said_before =
            held.insert(lane.linear as usize / 32 / WARPS, count).is_some_and(|old| old != count);
        let groups = block.shape.block.count().div_ceil(GROUP_THREADS);
        let launched = (REGISTERS / block.info.max_threads.next_multiple_of(GROUP_THREADS as u32)) & !7;
        let (total, limit) = (held.values().sum(), groups as u32 * launched);
        // A group that has not said yet may be about to give some up.
        if !said_before && held.len() as u64 == groups && total > limit {
            raise_product(place, ProductFault::Registers { total, limit });
        }
    });
}

/// Sums that a thread hands over.
pub(crate) fn resume(sums: &[u32]) -> u32 {
    with_lane(|lane| {
        let mut products = lane.products.borrow_mut();
        let id = products.next;
        products.next += 1;
        products.sums.insert(id, Sums { values: sums.to_vec(), waits_for: 0 });
        id
    })
}

#[track_caller]
pub(crate) fn multiply(sums: Option<u32>, (kind, columns): (Kind, u32), a: Source, b: Placed) -> u32 {
    let place = Location::caller();
    let (words, placed) = match a {
        Source::Registers(words) => (words, None),
        Source::Shared(placed) => ([0; 4], Some(placed)),
    };
    let quad = meet(GroupCall::Multiply { kind, columns, add: sums.is_some(), a: placed, b }, words);
    let id = sums.unwrap_or_else(|| resume(&vec![0; columns as usize / 2]));
    with_lane(|lane| {
        let group = lane.products.borrow().group();
        // One lane looks for its warp.
        if lane.lane() == 0 {
            b.check(lane, 0, columns, place);
            b.used(lane, group, 0, columns, place);
            if let Some(a) = placed {
                a.check(lane, first_row(lane), WARP_ROWS, place);
                a.used(lane, group, first_row(lane), WARP_ROWS, place);
            }
        }
        let a = placed.map_or_else(|| Rows::Registers(rows_of(quad)), Rows::Shared);
        let mut products = lane.products.borrow_mut();
        // Sums that were taken are nobody's any more.
        if let Some(own) = products.sums.get_mut(&id) {
            own.waits_for += 1;
            products.open.push(Product { id, kind, add: sums.is_some(), a, b });
        }
    });
    id
}

/// A lane's two rows, from the registers of the four lanes that have them: register 2·k + r of lane q has
/// bytes 4·q to 4·q + 3 of vector k of row g + 8·r.
fn rows_of(quad: [[u32; 4]; 4]) -> [[u128; 2]; 2] {
    let vector =
        |k: usize, r: usize| (0..4).fold(0, |vector, q| vector | u128::from(quad[q][2 * k + r]) << (32 * q));
    [0, 1].map(|r| [vector(0, r), vector(1, r)])
}

#[track_caller]
pub(crate) fn commit() {
    meet(GroupCall::Commit, [0; 4]);
    with_lane(|lane| {
        let mut products = lane.products.borrow_mut();
        let group = std::mem::take(&mut products.open);
        products.groups.push_back(group);
    });
}

/// Waits until at most so many groups are under way.
#[track_caller]
pub(crate) fn wait(pending: usize) {
    let place = Location::caller();
    meet(GroupCall::Wait(pending), [0; 4]);
    with_lane(|lane| {
        let pending = pending + usize::from(lane.block().breaks(Change::NoWait, place));
        let mut products = lane.products.borrow_mut();
        let over = products.groups.len().saturating_sub(pending);
        let groups: Vec<_> = products.groups.drain(..over).flatten().collect();
        products.done += over as u32;
        for product in groups {
            product.land(lane, &mut products.sums);
        }
        let (Some(races), Some(group)) = (&lane.block().races, products.done.checked_sub(1)) else { return };
        races.borrow_mut().copies_are_over(lane, agent::products(lane.linear - lane.lane(), group));
    });
}

/// The sums, if nothing is under way to them.
#[track_caller]
pub(crate) fn take<const L: usize>(id: u32) -> [u32; L] {
    let place = Location::caller();
    let sums = with_lane(|lane| lane.products.borrow_mut().sums.remove(&id));
    match sums {
        Some(Sums { values, waits_for: 0 }) => core::array::from_fn(|i| values[i]),
        _ => raise_product(place, ProductFault::UnderWay),
    }
}

impl Product {
    /// It reads what it reads now.
    fn land(&self, lane: &Lane, sums: &mut BTreeMap<u32, Sums>) {
        let (g, q) = (lane.lane() / 4, lane.lane() % 4);
        let rows = match &self.a {
            Rows::Registers(rows) => *rows,
            Rows::Shared(a) => [0, 8].map(|r| a.row(lane, first_row(lane) + g + r)),
        };
        // Sums that somebody has taken too early are a fault of that.
        let Some(sums) = sums.get_mut(&self.id) else { return };
        sums.waits_for -= 1;
        for (tile, values) in (0..).zip(sums.values.chunks_exact_mut(4)) {
            let columns = [0, 1].map(|i| self.b.row(lane, 8 * tile + 2 * q + i));
            for (i, value) in values.iter_mut().enumerate() {
                let before = if self.add { *value } else { 0 };
                *value = sum(self.kind, &rows[i / 2], &columns[i % 2], before);
            }
        }
    }
}

/// One element of D, of 32 bytes of A and B.
fn sum(kind: Kind, a: &[u128; 2], b: &[u128; 2], before: u32) -> u32 {
    let halves =
        |row: &[u128; 2]| -> [u16; 16] { core::array::from_fn(|i| (row[i / 8] >> (16 * (i % 8))) as u16) };
    let of_floats = |format| TensorCores::Hopper.dot(format, &halves(a), &halves(b), before);
    match kind {
        Kind::F16 => of_floats(Format::F16),
        Kind::Bf16 => of_floats(Format::Bf16),
        Kind::I8 => {
            let bytes = |row: &[u128; 2]| -> [i8; 32] {
                core::array::from_fn(|i| (row[i / 16] >> (8 * (i % 16))) as i8)
            };
            let products = bytes(a).into_iter().zip(bytes(b)).map(|(x, y)| i32::from(x) * i32::from(y));
            before.wrapping_add(products.sum::<i32>() as u32)
        }
    }
}

/// The thread ends: nothing may be under way, and its group's warps have made the same calls.
pub(super) fn end(lane: &Lane) -> Option<FaultKind> {
    let products = lane.products.borrow();
    if !products.open.is_empty() || !products.groups.is_empty() {
        return Some(FaultKind::Products(ProductFault::Left));
    }
    if lane.lane() != 0 {
        return None;
    }
    let (groups, warp) = (&lane.block().warp_groups, lane.linear as usize / 32);
    groups.ended.set(groups.ended.get() | 1 << warp);
    if groups.groups.borrow().is_empty() {
        return None;
    }
    let ended = groups.of(warp, |group| group.end(warp % WARPS));
    ended.err().map(|other| FaultKind::Products(ProductFault::Parted { other }))
}

#[cfg(test)]
mod tests;
