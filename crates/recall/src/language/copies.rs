//! Bulk copies both ways and barriers in shared memory, from sm_90 on.

#[cfg(not(target_arch = "nvptx64"))]
use simt::LaunchShape;
use simt::{Global, GlobalMut, Mbarrier, Shared, SharedPlan, bulk, kernel, thread};

const STAGES: u32 = 2;
/// Words of a tile.
const WORDS: u32 = 192;
/// Tiles of a block.
const ROUNDS: u32 = 9;
#[cfg(not(target_arch = "nvptx64"))]
const BLOCKS: u32 = 3;
/// Threads that compute, behind the warp that copies.
const CONSUMERS: u32 = 96;

struct Layout {
    full: Shared<Mbarrier>,
    empty: Shared<Mbarrier>,
    tile: Shared<u32>,
    out: Shared<u32>,
}

/// Where things lie, and how many bytes they take.
const fn layout() -> (Layout, u32) {
    let mut plan = SharedPlan::new();
    let (full, empty) = (plan.array(STAGES), plan.array(STAGES));
    let (tile, out) = (plan.array(STAGES * WORDS), plan.array(STAGES * WORDS));
    (Layout { full, empty, tile, out }, plan.bytes())
}

/// A ring of two tiles: thread 0 copies them in, each by two copies, three warps compute, and thread 32
/// copies out what they made. Word `w` of tile `r` becomes 3 × word `191 - w`, + `r`. `x` and `y`
/// \[blocks · rounds · words\].
#[kernel(min_sm = 90, max_threads = 128)]
pub fn piped(x: Global<u32>, y: GlobalMut<u32>) {
    let (Layout { full, empty, tile, out }, _) = layout();
    let t = thread::thread_idx_x();
    if t == 0 {
        let mut stage = 0;
        while stage < STAGES {
            full.init(stage, 1);
            empty.init(stage, CONSUMERS);
            stage += 1;
        }
        bulk::fence();
    }
    thread::sync_threads();
    let mut round = 0;
    while round < ROUNDS {
        let (stage, turn) = (round % STAGES, round / STAGES);
        let from = ((thread::block_idx_x() * ROUNDS + round) * WORDS) as usize;
        if t == 0 {
            // The turn before the first one counts as over.
            empty.wait(stage, turn + 1);
            full.arrive_and_expect(stage, 4 * WORDS);
            tile.copy_bulk(stage * WORDS, x, from, 64, full, stage);
            tile.copy_bulk(stage * WORDS + 16, x, from + 16, 4 * WORDS - 64, full, stage);
        }
        if t >= 32 {
            full.wait(stage, turn);
            if t == 32 {
                // What goes out is then free for this round.
                bulk::wait_read::<1>();
            }
            thread::named_barrier_sync(1, CONSUMERS);
            let w = t - 32;
            let [a, b] = [tile.load(stage * WORDS + 191 - w), tile.load(stage * WORDS + 95 - w)];
            empty.arrive(stage);
            out.store(stage * WORDS + w, 3 * a + round);
            out.store(stage * WORDS + w + 96, 3 * b + round);
            bulk::fence_shared();
            thread::named_barrier_sync(2, CONSUMERS);
            if t == 32 {
                y.copy_bulk(from, out, stage * WORDS, 4 * WORDS);
                bulk::commit();
            }
        }
        round += 1;
    }
    if t == 32 {
        bulk::wait_read::<0>();
    }
}

/// Three phases of 32 arrivals in each of two lives of a barrier, whose eight bytes are a number in between;
/// and what a look at either parity finds. `out` \[2 · 3 · 64 + 8\], 64 threads.
#[kernel(min_sm = 90)]
pub fn phases(out: GlobalMut<u32>) {
    let (Layout { full, tile, .. }, _) = layout();
    let plain = SharedPlan::new().array::<u64>(1);
    let t = thread::thread_idx_x();
    let mut life = 0;
    while life < 2 {
        if t == 0 {
            full.init(0, 32);
        }
        thread::sync_threads();
        let mut phase = 0;
        while phase < 3 {
            if t < 32 {
                tile.store(t, 100 * phase + t);
                full.arrive(0);
            }
            full.wait(0, phase);
            out.store(((3 * life + phase) * 64 + t) as usize, tile.load((t + 5) % 32));
            thread::sync_threads();
            phase += 1;
        }
        if t == 0 {
            full.invalidate(0);
            plain.store(0, 7 + life as u64);
            out.store(384 + life as usize, plain.load(0) as u32);
        }
        thread::sync_threads();
        life += 1;
    }
    if t == 0 {
        full.init(1, 2);
        out.store(386, full.try_wait(1, 1).into());
        full.arrive(1);
        full.arrive(1);
        // The first phase is over, and the second is not.
        full.wait(1, 0);
        full.arrive(1);
        out.store(387, full.try_wait(1, 0).into());
        full.arrive(1);
        full.wait(1, 1);
        out.store(388, full.try_wait(1, 3).into());
    }
}

/// All that the kernels compute.
#[cfg(not(target_arch = "nvptx64"))]
pub fn computed(device: &ferrokv_device::Device) -> Result<Vec<u32>, ferrokv_device::Error> {
    use ferrokv_device::{Buffer, Stream};
    let stream = Stream::new(device)?;
    let words = BLOCKS * ROUNDS * WORDS;
    let x: Vec<u32> = (0..words).map(input).collect();
    let x = Buffer::from_slice(device, &x)?;
    let mut y = Buffer::from_slice(device, &vec![0u32; words as usize])?;
    let shape = LaunchShape::new(BLOCKS, 32 + CONSUMERS).shared(layout().1);
    let args = piped::Args { x: x.global(), y: y.global_mut() };
    // SAFETY: the arrays are as long as the kernel says, and live until all are read.
    unsafe { stream.launch(&piped::kernel(), shape, args) }?;
    let mut out = Buffer::from_slice(device, &[0u32; 392])?;
    let shape = LaunchShape::new(1, 64).shared(layout().1);
    // SAFETY: as above.
    unsafe { stream.launch(&phases::kernel(), shape, phases::Args { out: out.global_mut() }) }?;
    Ok([y.to_vec()?, out.to_vec()?].concat())
}

#[cfg(not(target_arch = "nvptx64"))]
fn input(i: u32) -> u32 {
    i.wrapping_mul(2_654_435_761) >> 7
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrokv_device::Device;
    use simt::emu::EmuOptions;

    #[test]
    fn copies_are_what_their_documents_say_in_every_order() {
        let found = computed(&Device::cpu(EmuOptions::thorough())).unwrap();
        let (y, out) = found.split_at((BLOCKS * ROUNDS * WORDS) as usize);
        for (i, y) in (0..).zip(y) {
            let (tile, w) = (i / WORDS, i % WORDS);
            assert_eq!(*y, 3 * input(tile * WORDS + 191 - w) + tile % ROUNDS, "word {w} of tile {tile}");
        }
        for (i, seen) in (0..384).zip(out) {
            assert_eq!(*seen, 100 * (i / 64 % 3) + (i % 64 + 5) % 32);
        }
        assert_eq!(out[384..], [7, 8, 1, 1, 1, 0, 0, 0]);
    }
}
