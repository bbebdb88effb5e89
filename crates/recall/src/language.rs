//! Kernels of the language's own words, for the GPU and the emulator to compute the same.

#[cfg(not(target_arch = "nvptx64"))]
use simt::LaunchShape;
use simt::glam::{UVec2, UVec4};
use simt::warp::{FULL_MASK, warp_match_all, warp_match_any};
use simt::{Global, GlobalMut, Shared, SharedPlan, async_copy, kernel, thread};

pub mod copies;

/// Rounds of [`released`](fn@released).
const ROUNDS: u32 = 8;
/// Words of a message.
const WORDS: u32 = 64;

const fn layout() -> (Shared<u32>, u32) {
    let mut plan = SharedPlan::new();
    let flag = plan.array(1);
    (flag, plan.bytes())
}

/// Block 0 writes messages, one a round, and releases the round's number; block 1 acquires it and adds the
/// message up. `messages` \[rounds · words\]; `round` \[1\], 0 before; `sums` \[rounds\].
#[kernel]
pub fn released(messages: GlobalMut<u32>, round: GlobalMut<u32>, sums: GlobalMut<u32>) {
    let (block, t) = (thread::block_idx_x(), thread::thread_idx_x());
    let mut r = 0;
    while r < ROUNDS {
        let first = (r * WORDS) as usize;
        if block == 0 && t == 0 {
            let mut i = 0;
            while i < WORDS {
                messages.store(first + i as usize, 3 * i + 1000 * r);
                i += 1;
            }
            round.store_release(0, r + 1);
        }
        if block == 1 && t == 0 {
            while round.load_acquire(0) <= r {
                thread::pause(100);
            }
            let (mut sum, mut i) = (0, 0);
            while i < WORDS {
                sum += messages.load(first + i as usize);
                i += 1;
            }
            sums.store(r as usize, sum);
        }
        r += 1;
    }
}

/// Thread 32 hands a value to thread 0 through shared memory; lanes find those of equal values, and whether
/// all are equal. `out` \[66\]: masks of the 32-bit and the 64-bit match of warp 0, then the value and what
/// thread 0 makes of it. `all` \[32\]: a bit for each question, of words and of pairs of words, of the whole
/// warp and of lanes of one parity.
#[kernel]
pub fn matched(out: GlobalMut<u32>, all: GlobalMut<u32>) {
    let (flag, _) = layout();
    let t = thread::thread_idx_x();
    if t == 0 {
        flag.atomic_store(0, 0);
    }
    thread::sync_threads();
    if t < 32 {
        let narrow = warp_match_any(FULL_MASK, t % 5);
        let wide = warp_match_any(FULL_MASK, (t as u64 / 7) << 40);
        out.store(t as usize, narrow);
        out.store(32 + t as usize, wide);
        let own = if t.is_multiple_of(2) { 0x5555_5555 } else { 0xaaaa_aaaa };
        let mut found = u32::from(warp_match_all(FULL_MASK, 7u32));
        found |= u32::from(warp_match_all(FULL_MASK, t / 31)) << 1;
        found |= u32::from(warp_match_all(own, t % 2)) << 2;
        found |= u32::from(warp_match_all(FULL_MASK, 1u64 << 40)) << 3;
        found |= u32::from(warp_match_all(FULL_MASK, u64::from(t / 31) << 40)) << 4;
        found |= u32::from(warp_match_all(own, if t < 16 { -0.0f32 } else { 0.0 })) << 5;
        all.store(t as usize, found);
    }
    if t == 32 {
        out.store(64, 77);
        flag.store_release(0, 1);
    }
    if t == 0 {
        while flag.load_acquire(0) == 0 {
            thread::pause(100);
        }
        let value = out.load(64usize);
        out.store(65, value + 1);
    }
}

/// Atomics of each scope. Every thread counts in its block's own words and in one of the system's; the first
/// of block 0 hands a message to the second, by a flag of block scope. `own` \[2 · blocks\], `total` \[1\],
/// `message` \[3\]: all 0 before.
#[kernel]
pub fn scoped(own: GlobalMut<u32>, total: GlobalMut<u64>, message: GlobalMut<u32>) {
    let (block, t) = (thread::block_idx_x(), thread::thread_idx_x());
    let own = own.in_block_scope();
    own.atomic_add(block as usize, t + 1);
    own.atomic_max((thread::grid_dim_x() + block) as usize, t);
    total.in_system_scope().atomic_add(0, 1 << 32 | u64::from(block));
    let flag = message.in_block_scope();
    if block == 0 && t == 0 {
        message.store(1, 77);
        flag.store_release(0, 1);
    }
    if block == 0 && t == 1 {
        while flag.load_acquire(0) == 0 {
            thread::pause(100);
        }
        message.store(2, message.load(1) + 1);
        flag.atomic_cas(0, 1, 5);
    }
}

/// Copies of 4 and 8 bytes that run beside the threads, from places that are aligned to no more, each third
/// of them of zeros, beside words that threads write. `x` \[130\], `out` \[256\], 64 threads.
#[kernel]
pub fn copied_words(x: Global<u32>, out: GlobalMut<u32>) {
    let (tile, _) = tile();
    let t = thread::thread_idx_x();
    let from = t as usize;
    tile.copy_async_4(t, x, 63 - from);
    async_copy::commit();
    tile.copy_async_4_or_zero(64 + 2 * t, x, 2 * from + 1, !t.is_multiple_of(3));
    tile.store(65 + 2 * t, 1000 + t);
    let pairs = 192 + 2 * (t / 2);
    if t.is_multiple_of(4) {
        tile.copy_async_8(pairs, x, from + 2);
    }
    if t % 4 == 2 {
        tile.copy_async_8_or_zero(pairs, x, from + 64, !t.is_multiple_of(3));
    }
    async_copy::commit();
    async_copy::wait::<1>();
    let own = tile.load(t);
    async_copy::wait::<0>();
    thread::sync_threads();
    out.store(from, own + tile.load(t ^ 1));
    out.store(64 + from, tile.load(64 + t));
    out.store(128 + from, tile.load(128 + t));
    out.store(192 + from, tile.load(192 + t));
}

/// Rows and columns of [`turned`](fn@turned).
#[cfg(not(target_arch = "nvptx64"))]
const SHAPE: (u32, u32) = (37, 28);

/// `y` \[columns, rows\] becomes `x` \[rows, columns\] transposed, and each row of `pairs`, \[rows,
/// columns / 2\], the sums of a row's neighbours; `lengths` \[4\]. A block for each row and more, 32 threads.
#[kernel]
pub fn turned(
    x: Global<u32>,
    y: GlobalMut<u32>,
    pairs: GlobalMut<u32>,
    lengths: GlobalMut<u32>,
    rows: u32,
    columns: u32,
) {
    let (x, y) = (x.rows(rows, columns), y.rows(columns, rows));
    let (row, t) = (thread::block_idx_x(), thread::thread_idx_x());
    if let Some(value) = x.get(row, t) {
        y.store(t, row, value);
    }
    if row < rows && t < columns / 2 {
        let [a, b] = x.row(row).load_vector::<UVec2>(2 * t).to_array();
        let sums = pairs.slice((row * (columns / 2)) as usize, columns / 2);
        sums.store(t, a + b);
        if row == 1 && t == 3 {
            let last = x.get(rows - 1, columns - 1).is_some() as u32 + 2 * x.get(rows, 0).is_some() as u32;
            let found = UVec4::new(x.rows(), y.rows(), sums.len(), last);
            lengths.slice(0, 4).store_vector(0, found);
        }
    }
}

const fn tile() -> (Shared<u32>, u32) {
    let mut plan = SharedPlan::new();
    let tile = plan.array(256);
    (tile, plan.bytes())
}

/// All that the kernels compute.
#[cfg(not(target_arch = "nvptx64"))]
pub fn computed(device: &ferrokv_device::Device) -> Result<Vec<u32>, ferrokv_device::Error> {
    use ferrokv_device::{Buffer, Stream};
    let stream = Stream::new(device)?;
    let mut messages = Buffer::from_slice(device, &[0u32; (ROUNDS * WORDS) as usize])?;
    let mut round = Buffer::from_slice(device, &[0u32])?;
    let mut sums = Buffer::from_slice(device, &[0u32; ROUNDS as usize])?;
    let mut out = Buffer::from_slice(device, &[0u32; 66])?;
    let args = released::Args {
        messages: messages.global_mut(),
        round: round.global_mut(),
        sums: sums.global_mut(),
    };
    // SAFETY: the arrays are as long as the kernel says, and live until all are read.
    unsafe { stream.launch(&released::kernel(), LaunchShape::new(2, 32), args) }?;
    let mut all = Buffer::from_slice(device, &[0u32; 32])?;
    let args = matched::Args { out: out.global_mut(), all: all.global_mut() };
    let (_, bytes) = layout();
    // SAFETY: as above.
    unsafe { stream.launch(&matched::kernel(), LaunchShape::new(1, 64).shared(bytes), args) }?;
    let mut own = Buffer::from_slice(device, &[0u32; 6])?;
    let mut total = Buffer::from_slice(device, &[0u64])?;
    let mut message = Buffer::from_slice(device, &[0u32; 3])?;
    let args =
        scoped::Args { own: own.global_mut(), total: total.global_mut(), message: message.global_mut() };
    // SAFETY: as above.
    unsafe { stream.launch(&scoped::kernel(), LaunchShape::new(3, 64), args) }?;
    let total: Vec<u32> = total.to_vec()?.iter().flat_map(|sum| [*sum as u32, (sum >> 32) as u32]).collect();
    let x: Vec<u32> = (0..130).map(|i| i * i + 7).collect();
    let x = Buffer::from_slice(device, &x)?;
    let mut copies = Buffer::from_slice(device, &[0u32; 256])?;
    let args = copied_words::Args { x: x.global(), out: copies.global_mut() };
    let (_, bytes) = tile();
    // SAFETY: as above.
    unsafe { stream.launch(&copied_words::kernel(), LaunchShape::new(1, 64).shared(bytes), args) }?;
    let (rows, columns) = SHAPE;
    let matrix: Vec<u32> = (0..rows * columns).map(|i| i * i + 3).collect();
    let matrix = Buffer::from_slice(device, &matrix)?;
    let mut y = Buffer::from_slice(device, &vec![0u32; matrix.len()])?;
    let mut pairs = Buffer::from_slice(device, &vec![0u32; matrix.len() / 2])?;
    let mut lengths = Buffer::from_slice(device, &[0u32; 4])?;
    let args = turned::Args {
        x: matrix.global(),
        y: y.global_mut(),
        pairs: pairs.global_mut(),
        lengths: lengths.global_mut(),
        rows,
        columns,
    };
    // SAFETY: as above.
    unsafe { stream.launch(&turned::kernel(), LaunchShape::new(rows + 2, 32), args) }?;
    let words = [messages, round, sums, out, copies, y, pairs, lengths, all, own, message];
    let words: Result<Vec<_>, _> = words.iter().map(|buffer| buffer.to_vec()).collect();
    Ok([words?.concat(), total].concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrokv_device::Device;
    use simt::emu::EmuOptions;

    #[test]
    fn words_are_what_their_documents_say_in_every_order() {
        let found = computed(&Device::cpu(EmuOptions::thorough())).unwrap();
        let [messages, sums] = [0, (ROUNDS * WORDS + 1) as usize];
        for r in 0..ROUNDS {
            let message: Vec<u32> = (0..WORDS).map(|i| 3 * i + 1000 * r).collect();
            assert_eq!(found[messages + (r * WORDS) as usize..][..WORDS as usize], message[..]);
            assert_eq!(found[sums + r as usize], message.iter().sum::<u32>());
        }
        let out = &found[sums + ROUNDS as usize..];
        for t in 0..32 {
            let mask = |same: &dyn Fn(u32) -> bool| (0..32).fold(0, |mask, u| mask | (same(u) as u32) << u);
            assert_eq!(out[t as usize], mask(&|u| u % 5 == t % 5));
            assert_eq!(out[32 + t as usize], mask(&|u| u / 7 == t / 7));
        }
        assert_eq!(out[64..66], [77, 78]);
        let (copies, x) = (&out[66..], |i: usize| (i * i + 7) as u32);
        for t in 0..64 {
            assert_eq!(copies[t], x(63 - t) + x(63 - (t ^ 1)));
            let scattered = if t % 3 == 0 { 0 } else { x(2 * t + 1) };
            assert_eq!(copies[64 + 2 * t..][..2], [scattered, 1000 + t as u32]);
            let pair = match t % 4 {
                0 => [x(t + 2), x(t + 3)],
                2 if t % 3 == 0 => [0, 0],
                2 => [x(t + 64), x(t + 65)],
                _ => continue,
            };
            assert_eq!(copies[192 + t..][..2], pair);
        }
        let (rows, columns) = (SHAPE.0 as usize, SHAPE.1 as usize);
        let (y, rest) = copies[256..].split_at(rows * columns);
        let (pairs, rest) = rest.split_at(rows * columns / 2);
        let (lengths, scopes) = rest.split_at(4);
        let matrix = |row: usize, column: usize| ((row * columns + column).pow(2) + 3) as u32;
        for (i, value) in y.iter().enumerate() {
            assert_eq!(*value, matrix(i % rows, i / rows));
        }
        for (i, sum) in pairs.iter().enumerate() {
            let (row, column) = (i / (columns / 2), 2 * (i % (columns / 2)));
            assert_eq!(*sum, matrix(row, column) + matrix(row, column + 1));
        }
        assert_eq!(*lengths, [37, 28, 14, 1]);
        assert_eq!(scopes[..32], [0b1101; 32]);
        assert_eq!(scopes[32..], [2080, 2080, 2080, 63, 63, 63, 5, 77, 78, 192, 192]);
    }
}
