//! Tensor copies against what they are by definition, element by element, over many random shapes.

use simt::emu::{self, EmuOptions};
use simt::random::mix;
use simt::{
    Global, GlobalMut, LaunchShape, Mbarrier, Shared, SharedPlan, Swizzle, TensorMap, TensorMapError,
    TensorMapShape, bulk, half, kernel,
};

const fn layout(words: u32) -> (Shared<u32>, Shared<Mbarrier>, u32) {
    let mut plan = SharedPlan::new();
    let (tile, full) = (plan.tile(words, Swizzle::B128), plan.array(1));
    (tile, full, plan.bytes())
}

#[kernel(min_sm = 90, max_threads = 1, instances(1, 2, 3, 4, 5))]
fn bring<const RANK: usize>(maps: Global<TensorMap>, corner: Global<i32>, out: GlobalMut<u32>, words: u32) {
    let (tile, full, _) = layout(words);
    full.init(0, 1);
    bulk::fence_shared();
    maps.acquire(0);
    full.arrive_and_expect(0, 4 * words);
    tile.copy_tile(0, maps, 0, core::array::from_fn::<i32, RANK, _>(|i| corner.load(i)), full, 0);
    full.wait(0, 0);
    for i in 0..words {
        out.store(i as usize, tile.load(i));
    }
}

#[kernel(min_sm = 90, max_threads = 1, instances(1, 2, 3, 4, 5))]
fn put<const RANK: usize>(maps: Global<TensorMap>, corner: Global<i32>, from: Global<u32>, words: u32) {
    let (tile, _, _) = layout(words);
    for i in 0..words {
        tile.store(i, from.load(i as usize));
    }
    bulk::fence_shared();
    maps.acquire(0);
    maps.copy_tile(0, core::array::from_fn::<i32, RANK, _>(|i| corner.load(i)), tile, 0);
    bulk::commit();
    bulk::wait::<0>();
}

/// Bytes that are aligned as device memory is.
#[derive(Clone, PartialEq)]
struct Memory(Vec<glam::UVec4>);

impl Memory {
    fn new(bytes: usize, random: &mut Random) -> Self {
        let units = bytes.div_ceil(16);
        Memory((0..units).map(|_| glam::UVec4::from_array([(); 4].map(|()| random.next()))).collect())
    }

    fn bytes(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.0)
    }

    fn words(&mut self) -> GlobalMut<u32> {
        // SAFETY: used while it lives.
        unsafe { GlobalMut::from_raw(self.0.as_mut_ptr() as u64, 4 * self.0.len()) }
    }
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 += 1;
        (mix(self.0) >> 20) as u32
    }

    /// Less than `end`.
    fn below(&mut self, end: u32) -> u32 {
        self.next() % end
    }
}

const SWIZZLES: [Swizzle; 4] = [Swizzle::None, Swizzle::B32, Swizzle::B64, Swizzle::B128];

/// How a box lies to its tensor.
#[derive(Clone, Copy)]
enum Kind {
    Inside,
    Meets,
    Any,
}

/// A tensor of a random shape, and the corner of a box.
struct Drawn<const RANK: usize> {
    element: usize,
    extents: [u64; RANK],
    strides: [u64; RANK],
    tile: [u32; RANK],
    swizzle: Swizzle,
    corner: [i32; RANK],
    /// Where the tensor begins, in bytes.
    ahead: usize,
}

impl<const RANK: usize> Drawn<RANK> {
    fn new(random: &mut Random) -> Self {
        let element = 1 << random.below(4);
        let swizzle = SWIZZLES[random.below(4) as usize];
        let row = if swizzle == Swizzle::None { 16 * (1 + random.below(9)) } else { swizzle.row() };
        let mut tile = [(); RANK].map(|()| 1 + random.below(4));
        tile[0] = row / element as u32;
        if RANK == 2 {
            // Enough rows for the pattern to begin again.
            tile[1] = 1 + random.below(40);
        }
        let kind = [Kind::Inside, Kind::Meets, Kind::Any][random.below(3) as usize];
        let extents = tile.map(|tile| {
            let least = if matches!(kind, Kind::Inside) { tile } else { 1 };
            u64::from(least + random.below(tile + 4))
        });
        let mut extents: [u64; RANK] = extents;
        if random.below(2) == 0 {
            // Rows of whole vectors, as a tensor to write to has them.
            extents[0] = extents[0].next_multiple_of(16 / element as u64);
        }
        let mut strides = [element as u64; RANK];
        // Outer dimensions in a random order of their strides.
        let mut order: Vec<usize> = (1..RANK).collect();
        for i in (1..order.len()).rev() {
            order.swap(i, random.below(i as u32 + 1) as usize);
        }
        let mut inside = extents[0] * element as u64;
        for dimension in order {
            strides[dimension] = inside.next_multiple_of(16) + 16 * u64::from(random.below(2));
            inside = strides[dimension] * extents[dimension];
        }
        let corner = core::array::from_fn(|i| {
            let (tile, extent) = (tile[i] as i32, extents[i] as i32);
            match kind {
                Kind::Inside => random.below((extent - tile + 1) as u32) as i32,
                Kind::Meets => 1 - tile + random.below((extent + tile - 1) as u32) as i32,
                Kind::Any => random.below((extent + 3 * tile) as u32) as i32 - 2 * tile,
            }
        });
        // Along rows at a multiple of 16 bytes.
        let mut corner: [i32; RANK] = corner;
        corner[0] -= corner[0].rem_euclid(16 / element as i32);
        let ahead = 16 * random.below(3) as usize;
        Drawn { element, extents, strides, tile, swizzle, corner, ahead }
    }

    fn shape(&self) -> TensorMapShape {
        let shape = match self.element {
            1 => TensorMapShape::new::<u8, RANK>(self.extents, self.tile),
            2 => TensorMapShape::new::<half::f16, RANK>(self.extents, self.tile),
            4 => TensorMapShape::new::<f32, RANK>(self.extents, self.tile),
            _ => TensorMapShape::new::<i64, RANK>(self.extents, self.tile),
        };
        shape.with_strides(&self.strides[1..]).with_swizzle(self.swizzle)
    }

    /// Calls `visit` for each byte of the box: where it lies in shared memory, and in the tensor's memory if
    /// it is inside.
    fn each_byte(&self, mut visit: impl FnMut(usize, Option<usize>)) {
        let elements: u32 = self.tile.iter().product();
        for number in 0..elements as usize {
            let (mut left, mut inside, mut at) = (number, true, self.ahead as i64);
            for i in 0..RANK {
                let place = i64::from(self.corner[i]) + (left % self.tile[i] as usize) as i64;
                left /= self.tile[i] as usize;
                inside &= (0..self.extents[i] as i64).contains(&place);
                at += place * self.strides[i] as i64;
            }
            for byte in 0..self.element {
                let plain = number * self.element + byte;
                // The vector of 16 bytes within the 128, and the number of those 128.
                let (vector, line) = (plain / 16 % 8, plain / 128);
                let vector = vector
                    ^ match self.swizzle {
                        Swizzle::None => 0,
                        Swizzle::B32 => line % 2,
                        Swizzle::B64 => line % 4,
                        Swizzle::B128 => line % 8,
                    };
                visit(128 * line + 16 * vector + plain % 16, inside.then(|| at as usize + byte));
            }
        }
    }
}

fn options(round: u32) -> EmuOptions {
    match round % 8 {
        0 => EmuOptions::thorough(),
        1..4 => EmuOptions::race_checked(),
        _ => EmuOptions::default(),
    }
}

fn check<const RANK: usize>(
    bring: simt::Kernel<bring::Args>,
    put: simt::Kernel<put::Args>,
    seen: &mut [u32; 3],
) {
    let mut random = Random(1000 * RANK as u64);
    for round in 0..150 {
        let mut drawn = Drawn::<RANK>::new(&mut random);
        let shape = drawn.shape();
        let bytes = shape.bytes() as usize;
        let mut memory = Memory::new(drawn.ahead + bytes + 16, &mut random);
        let words = shape.tile_bytes() / 4;
        let mut tile = Memory::new(4 * words as usize, &mut random);
        let launch = LaunchShape::new(1, 1).shared(layout(words).2);
        // SAFETY: inside of the memory, which lives.
        let tensor =
            unsafe { GlobalMut::<u8>::from_raw(memory.words().address() + drawn.ahead as u64, bytes) };
        let whole = (drawn.extents[0] as usize * drawn.element).is_multiple_of(16);
        let to_write = if whole {
            emu::tensor_map_mut(tensor, &shape)
        } else {
            emu::tensor_map(tensor.as_const(), &shape)
        };
        let maps = [emu::tensor_map(tensor.as_const(), &shape), to_write];
        let maps = maps.map(|map| map.unwrap_or_else(|error| panic!("{shape:?}: {error}")));
        // SAFETY: used while it lives.
        let maps = [0, 1].map(|i| unsafe { Global::from_raw(&raw const maps[i] as u64, 1) });

        let (mut expected, mut outside) = (vec![0; 4 * words as usize], 0);
        drawn.each_byte(|shared, global| match global {
            Some(global) => expected[shared] = memory.bytes()[global],
            None => outside += 1,
        });
        let part = if outside == 0 { 0 } else { 1 + usize::from(outside == expected.len()) };
        seen[part] += 1;
        // SAFETY: used while it lives.
        let corner = unsafe { Global::from_raw(drawn.corner.as_ptr() as u64, RANK) };
        let args = bring::Args { maps: maps[0], corner, out: tile.words(), words };
        // SAFETY: all handles cover live memory that nothing else uses.
        unsafe { emu::launch(&bring, launch, args, &options(round)) }.unwrap_or_else(|f| panic!("{f}"));
        assert_eq!(tile.bytes(), expected, "brought: {shape:?} from {:?}", drawn.corner);

        if !whole {
            let bytes = drawn.extents[0] * drawn.element as u64;
            assert_eq!(emu::tensor_map_mut(tensor, &shape), Err(TensorMapError::Written { bytes }));
            continue;
        }
        // What is written begins inside.
        drawn.corner = drawn.corner.map(|coordinate| coordinate.max(0));
        let mut tile = Memory::new(4 * words as usize, &mut random);
        let mut expected = memory.clone();
        drawn.each_byte(|shared, global| {
            if let Some(global) = global {
                expected.bytes()[global] = tile.bytes()[shared];
            }
        });
        // SAFETY: used while it lives.
        let corner = unsafe { Global::from_raw(drawn.corner.as_ptr() as u64, RANK) };
        let args = put::Args { maps: maps[1], corner, from: tile.words().as_const(), words };
        // SAFETY: as above.
        unsafe { emu::launch(&put, launch, args, &options(round)) }.unwrap_or_else(|f| panic!("{f}"));
        assert!(memory == expected, "put: {shape:?} to {:?}", drawn.corner);
    }
}

#[test]
fn boxes_of_every_rank_are_copied_both_ways() {
    // Boxes that are inside, over an edge, and outside.
    let mut seen = [0; 3];
    check::<1>(bring::kernel::<1>(), put::kernel::<1>(), &mut seen);
    check::<2>(bring::kernel::<2>(), put::kernel::<2>(), &mut seen);
    check::<3>(bring::kernel::<3>(), put::kernel::<3>(), &mut seen);
    check::<4>(bring::kernel::<4>(), put::kernel::<4>(), &mut seen);
    check::<5>(bring::kernel::<5>(), put::kernel::<5>(), &mut seen);
    assert!(seen.iter().all(|count| *count > 30), "{seen:?}");
}
