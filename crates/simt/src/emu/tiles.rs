//! Tensor copies: boxes of a tensor, row by row.

use super::allocations;
use super::bulk::{Far, Load, Side, Store, UNIT, units, used};
use super::fault::{FaultKind, Space, TileMistake};
use super::history::Access;
use super::lane::{Lane, raise, with_lane};
use super::mbarrier::{Agent, Named, agent};
use super::memory::watch;
use super::mutation::Change;
use super::shared::{check_arrived, check_written};
use crate::kernel::ArgMemory;
use crate::tiles::{MAX_RANK, TensorMapError, TensorMapShape};
use crate::{Global, GlobalMut, Pod, Shared, Swizzle, TensorMap};
use core::mem::{align_of, size_of};
use core::panic::Location;

/// The first word of a map that the emulator has made.
const MAGIC: u64 = u64::from_le_bytes(*b"simt-map");

const SWIZZLES: [Swizzle; 4] = [Swizzle::None, Swizzle::B32, Swizzle::B64, Swizzle::B128];

/// A map of a tensor in `x`, to read by under the emulator.
///
/// # Errors
/// The first rule that is broken: see [`TensorMapShape::check`].
pub fn tensor_map<T: Pod>(x: Global<T>, shape: &TensorMapShape) -> Result<TensorMap, TensorMapError> {
    made(x.address(), x.len() * size_of::<T>(), shape, false)
}

/// A map of a tensor in `y`, to read and to write by under the emulator.
///
/// # Errors
/// As for [`tensor_map`], and if elements of the tensor overlap.
pub fn tensor_map_mut<T: Pod>(y: GlobalMut<T>, shape: &TensorMapShape) -> Result<TensorMap, TensorMapError> {
    made(y.address(), y.len() * size_of::<T>(), shape, true)
}

fn made(
    address: u64,
    bytes: usize,
    shape: &TensorMapShape,
    writable: bool,
) -> Result<TensorMap, TensorMapError> {
    shape.check(address, bytes as u64, writable)?;
    Ok(Map { address, writable, shape: *shape }.encode())
}

/// What is in a map.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Map {
    address: u64,
    writable: bool,
    shape: TensorMapShape,
}

impl Map {
    fn encode(&self) -> TensorMap {
        let TensorMapShape { format, rank, extents, strides, tile, swizzle, .. } = self.shape;
        let mut words = [0; 16];
        (words[0], words[1]) = (MAGIC, self.address);
        let flags =
            [rank as u8, format as u8, swizzle as u8, self.writable.into(), strides[0] as u8, 0, 0, 0];
        words[2] = u64::from_le_bytes(flags);
        words[3..8].copy_from_slice(&extents);
        words[8..12].copy_from_slice(&strides[1..]);
        let pair = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
        (words[12], words[13], words[14]) = (pair(tile[0], tile[1]), pair(tile[2], tile[3]), tile[4].into());
        words[15] = digest(&words);
        TensorMap::from_words(words)
    }

    fn decode(map: &TensorMap) -> Option<Map> {
        let words = map.words();
        if words[0] != MAGIC || words[15] != digest(words) {
            return None;
        }
        let [rank, format, swizzle, writable, element_bytes, ..] = words[2].to_le_bytes();
        let strides = core::array::from_fn(|i| if i == 0 { element_bytes.into() } else { words[7 + i] });
        let tile = core::array::from_fn(|i| (words[12 + i / 2] >> (32 * (i % 2))) as u32);
        let extents = core::array::from_fn(|i| words[3 + i]);
        let swizzle = *SWIZZLES.get(usize::from(swizzle))?;
        let shape = TensorMapShape::from_parts(format.into(), rank.into(), (extents, strides), tile, swizzle);
        Some(Map { address: words[1], writable: writable != 0, shape })
    }

    /// The tensor as memory that a handle leads to.
    fn memory(&self) -> ArgMemory {
        let element_bytes = self.shape.strides[0] as usize;
        let (address, bytes, writable) = (self.address, self.shape.bytes(), self.writable);
        ArgMemory { address, bytes, element_bytes, writable, maps: false }
    }
}

/// Of all words but the last.
fn digest(words: &[u64; 16]) -> u64 {
    words[..15].iter().fold(0, |digest, word| crate::random::mix(digest ^ word).wrapping_add(1))
}

/// Adds the tensors that maps behind the handles lead to.
pub(super) fn add_tensors(memory: &mut Vec<(&'static str, ArgMemory)>) {
    let known = memory.len();
    for at in 0..known {
        let (parameter, handle) = memory[at];
        // Of memory that is freed the launch is refused.
        if !handle.maps || allocations::is_freed(handle.address) {
            continue;
        }
        let maps = handle.address as *const TensorMap;
        for map in 0..handle.bytes as usize / size_of::<TensorMap>() {
            // SAFETY: the handle's memory, valid by the launch's contract, and no thread of it runs.
            let Some(map) = Map::decode(&unsafe { maps.add(map).read_unaligned() }) else { continue };
            let tensor = map.memory();
            let same = |(_, other): &(&str, ArgMemory)| {
                (other.address, other.bytes, other.writable)
                    == (tensor.address, tensor.bytes, tensor.writable)
            };
            if !memory[known..].iter().any(same) {
                memory.push((parameter, tensor));
            }
        }
    }
}

/// The address of map `at`.
fn locate(maps: Global<TensorMap>, at: usize, place: &'static Location<'static>) -> u64 {
    let (space, index, len) = (Space::Global, at as u64, maps.len() as u64);
    let (bytes, align) = (size_of::<TensorMap>(), align_of::<TensorMap>());
    if at >= maps.len() {
        let kind = FaultKind::OutOfBounds { space, index, bytes, len, element_bytes: bytes, write: false };
        raise(place, kind);
    }
    let address = maps.address() + index * bytes as u64;
    let off_by = address % align as u64;
    if off_by != 0 {
        raise(place, FaultKind::Misaligned { space, index, bytes: align, off_by });
    }
    address
}

/// Map `at`, if this thread may copy by it.
fn open(
    lane: &Lane,
    (maps, at): (Global<TensorMap>, usize),
    coordinates: &[i32],
    place: &'static Location<'static>,
) -> Result<Map, FaultKind> {
    let (address, index) = (locate(maps, at, place), at as u64);
    let wrong = |mistake| Err(FaultKind::Tile(mistake));
    if !lane.maps.borrow().contains(&address) {
        return wrong(TileMistake::NotAcquired { index });
    }
    // SAFETY: inside the handle's memory, which the launch's caller vouches for, and aligned.
    let Some(map) = Map::decode(&unsafe { (address as *const TensorMap).read() }) else {
        return wrong(TileMistake::NoMap { index });
    };
    let rank = map.shape.rank;
    if rank != coordinates.len() {
        return wrong(TileMistake::Rank { index, rank, coordinates: coordinates.len() });
    }
    let bytes = i64::from(coordinates[0]) * map.shape.strides[0] as i64;
    if bytes % UNIT as i64 != 0 {
        return wrong(TileMistake::Corner { coordinate: coordinates[0], bytes });
    }
    Ok(map)
}

#[track_caller]
pub(crate) fn tile_acquire(maps: Global<TensorMap>, at: usize) {
    let place = Location::caller();
    with_lane(|lane| {
        let address = locate(maps, at, place);
        for unit in (address..address + size_of::<TensorMap>() as u64).step_by(UNIT) {
            watch(lane, Space::Global, (unit, at as u64), UNIT, Access::Read, place);
        }
        let known = lane.maps.borrow().contains(&address) || lane.block().breaks(Change::NoFence, place);
        if !known {
            lane.maps.borrow_mut().push(address);
        }
    });
}

/// A prefetch moves nothing here.
#[track_caller]
pub(crate) fn tile_prefetch(maps: Global<TensorMap>, at: usize) {
    locate(maps, at, Location::caller());
}

/// A box of a tensor.
pub(super) struct Tile {
    map: Map,
    /// Of its first element.
    coordinates: [i64; MAX_RANK],
}

/// Elements of a box that lie side by side and inside of the tensor.
struct Row {
    /// Byte offset in the box, without a swizzle.
    at: usize,
    address: u64,
    bytes: usize,
}

impl Tile {
    fn new(map: Map, coordinates: &[i32]) -> Self {
        let coordinates = core::array::from_fn(|i| coordinates.get(i).map_or(0, |c| i64::from(*c)));
        Tile { map, coordinates }
    }

    /// Its rows, the parts of them that are inside.
    fn rows(&self) -> impl Iterator<Item = Row> {
        let TensorMapShape { extents, strides, tile, .. } = self.map.shape;
        // All below 2^33.
        let extents = extents.map(|extent| extent as i64);
        let tile = tile.map(i64::from);
        let first = self.coordinates[0];
        let (start, end) = (first.max(0), (first + tile[0]).min(extents[0]));
        let rows = if start < end { tile[1..].iter().product() } else { 0 };
        (0..rows).filter_map(move |row| {
            let mut left = row;
            let mut address = self.map.address + start as u64 * strides[0];
            for i in 1..MAX_RANK {
                let at = self.coordinates[i] + left % tile[i];
                left /= tile[i];
                if at < 0 || at >= extents[i] {
                    return None;
                }
                address += at as u64 * strides[i];
            }
            let at = (row * tile[0] + start - first) as usize * strides[0] as usize;
            Some(Row { at, address, bytes: (end - start) as usize * strides[0] as usize })
        })
    }

    fn used(
        &self,
        lane: &Lane,
        agent: Agent,
        access: Access,
        place: &'static Location<'static>,
    ) -> Result<(), FaultKind> {
        self.rows().try_for_each(|row| {
            let index = (row.address - self.map.address) / self.map.shape.strides[0];
            used(lane, agent, Space::Global, (row.address, index, row.bytes), access, place)
        })
    }

    /// Where the unit at `offset` of the box lies from its beginning in shared memory.
    fn swizzled(&self, offset: usize) -> u32 {
        self.map.shape.swizzle.place(offset as u32)
    }

    /// The bytes arrive in shared memory, zeros for those outside.
    pub(super) fn bring(&self, lane: &Lane, target: u32) {
        let mut value = vec![0; self.map.shape.tile_bytes() as usize];
        for row in self.rows() {
            let to = &mut value[row.at..row.at + row.bytes];
            // SAFETY: inside of the tensor, which was checked against its memory when the map was made.
            unsafe { (row.address as *const u8).copy_to_nonoverlapping(to.as_mut_ptr(), row.bytes) };
        }
        for (i, unit) in value.chunks(UNIT).enumerate() {
            lane.block().shared.arrive(target + self.swizzled(UNIT * i), unit);
        }
    }

    /// The bytes arrive in global memory, `value` as it lay in shared memory.
    pub(super) fn put(&self, value: &[u8]) {
        let mut plain = vec![0; value.len()];
        for (i, unit) in plain.chunks_mut(UNIT).enumerate() {
            let from = self.swizzled(UNIT * i) as usize;
            unit.copy_from_slice(&value[from..from + unit.len()]);
        }
        for row in self.rows() {
            let from = &plain[row.at..row.at + row.bytes];
            // SAFETY: as above; the map is one to write by.
            unsafe { from.as_ptr().copy_to_nonoverlapping(row.address as *mut u8, row.bytes) };
        }
    }
}

/// Where a box lies in shared memory: inside, and aligned.
fn start(side: &Side, lane: &Lane, map: &Map, write: bool, place: &'static Location<'static>) -> u32 {
    let align = map.shape.swizzle.tile_align();
    let off_by = (side.base + side.index * side.element_bytes as u64) % u64::from(align);
    if off_by != 0 {
        raise(place, FaultKind::Tile(TileMistake::Place { index: side.index, align, off_by }));
    }
    side.start(lane, map.shape.tile_bytes(), write, place) as u32
}

#[track_caller]
pub(crate) fn tile_load<T: Pod>(
    (target, index): (Shared<T>, u32),
    map: (Global<TensorMap>, usize),
    coordinates: &[i32],
    barrier: Named,
) {
    let place = Location::caller();
    let to = Side::shared(target, index);
    barrier.load(place, |lane, agent| {
        let map = open(lane, map, coordinates, place)?;
        let (target, bytes) = (start(&to, lane, &map, true, place), map.shape.tile_bytes());
        units(target, bytes).for_each(|unit| check_arrived(lane, unit, UNIT, place));
        let tile = Tile::new(map, coordinates);
        tile.used(lane, agent, Access::Copy, place)?;
        to.used(lane, agent, (target.into(), bytes), Access::Write, place)?;
        units(target, bytes).for_each(|unit| lane.block().shared.mark_awaited(unit, UNIT));
        Ok(Load { thread: lane.linear, place, target, bytes, source: Far::Tile(Box::new(tile)) })
    });
}

#[track_caller]
pub(crate) fn tile_store<T: Pod>(
    map: (Global<TensorMap>, usize),
    coordinates: &[i32],
    (source, from): (Shared<T>, u32),
) {
    let (place, index) = (Location::caller(), map.1 as u64);
    let of = Side::shared(source, from);
    let started = with_lane(|lane| {
        let map = open(lane, map, coordinates, place)?;
        if !map.writable {
            return Err(FaultKind::Tile(TileMistake::ReadOnly { index }));
        }
        if let Some(dimension) = coordinates.iter().position(|coordinate| *coordinate < 0) {
            let coordinate = coordinates[dimension];
            return Err(FaultKind::Tile(TileMistake::Negative { dimension, coordinate }));
        }
        let (source, bytes) = (start(&of, lane, &map, false, place), map.shape.tile_bytes());
        units(source, bytes).for_each(|unit| check_written(lane, unit, UNIT, place));
        let tile = Tile::new(map, coordinates);
        let mut stores = lane.stores.borrow_mut();
        let (thread, group) = (lane.linear, stores.group());
        of.used(lane, agent::reads(thread, group), (source.into(), bytes), Access::Copy, place)?;
        tile.used(lane, agent::writes(thread, group), Access::Write, place)?;
        stores.start(Store { place, source, bytes, target: Far::Tile(Box::new(tile)), read: None });
        Ok(())
    });
    started.unwrap_or_else(|kind| raise(place, kind));
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    #[test]
    fn a_map_is_read_as_it_was_made_and_nothing_else_is_one() {
        let shape = TensorMapShape::new::<f16, _>([64, 7, 1 << 32, 3, 2], [32, 5, 2, 1, 2])
            .with_strides(&[144, 1008, 1 << 39, 16])
            .with_swizzle(Swizzle::B64);
        for writable in [false, true] {
            let map = Map { address: 0x7000_1230, writable, shape };
            let made = map.encode();
            assert_eq!(Map::decode(&made), Some(map));
            for bit in [0, 64, 130, 700, 1000] {
                let mut words = *made.words();
                words[bit / 64] ^= 1 << (bit % 64);
                assert_eq!(Map::decode(&TensorMap::from_words(words)), None, "bit {bit}");
            }
        }
        assert_eq!(Map::decode(&TensorMap::from_words([0; 16])), None);
    }
}
