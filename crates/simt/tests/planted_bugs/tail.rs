//! Vector kernels whose length is no multiple of the vector.

use crate::support::{at, caught, modes, pass, read, write};
use glam::Vec4;
use simt::emu::{FaultKind, Space};
use simt::{Global, GlobalMut, LaunchShape, kernel, thread};

const SOURCE: &str = include_str!("tail.rs");
const LEN: u32 = 102;
const POISON: f32 = -1e30;

/// Rounds the number of vectors up.
#[kernel]
fn crossing(x: Global<f32>, y: GlobalMut<f32>, len: u32) {
    let i = thread::index_1d();
    if i < len.div_ceil(4) as usize {
        let v: Vec4 = x.load_vector(4 * i); // BUG: the last vector crosses the end
        y.store_vector(4 * i, v * 2.0);
    }
}

/// Rounds the number of vectors down, and nobody takes the rest.
#[kernel]
fn dropping(x: Global<f32>, y: GlobalMut<f32>, len: u32) {
    let i = thread::index_1d();
    if i < (len / 4) as usize {
        let v: Vec4 = x.load_vector(4 * i);
        y.store_vector(4 * i, v * 2.0);
    }
}

#[kernel]
fn whole(x: Global<f32>, y: GlobalMut<f32>, len: u32) {
    let i = thread::index_1d();
    let (vectors, tail) = ((len / 4) as usize, (len % 4) as usize);
    if i < vectors {
        let v: Vec4 = x.load_vector(4 * i);
        y.store_vector(4 * i, v * 2.0);
    } else if i < vectors + tail {
        let j = 4 * vectors + (i - vectors);
        y.store(j, x.load(j) * 2.0);
    }
}

/// The first element where a kernel's output is not the oracle's.
fn first_difference(y: &[f32], x: &[f32]) -> Option<usize> {
    let oracle = x.iter().map(|x| x * 2.0);
    y.iter().zip(oracle).position(|(y, oracle)| y.to_bits() != oracle.to_bits())
}

#[test]
fn the_last_vector_crosses_the_end_or_the_tail_is_dropped() {
    let shape = LaunchShape::new(1, 64);
    // Aligned to 16 bytes, and longer than the handles, so that memory behind the end exists.
    let backing: Vec<Vec4> = (0..26).map(|i| Vec4::splat(i as f32)).collect();
    let x = &bytemuck::cast_slice::<Vec4, f32>(&backing)[..LEN as usize];
    for options in modes() {
        let mut backing = vec![Vec4::splat(POISON); 26];
        let y = bytemuck::cast_slice_mut::<Vec4, f32>(&mut backing);
        let place = at!("the last vector crosses the end", block 0, thread 25);
        let args = crossing::Args { x: read(x), y: write(&mut y[..LEN as usize]), len: LEN };
        let kind = caught(crossing::kernel(), shape, args, &options, place);
        let expected = FaultKind::OutOfBounds {
            space: Space::Global,
            index: 100,
            bytes: 16,
            len: 102,
            element_bytes: 4,
            write: false,
        };
        assert_eq!(kind, expected);

        y.fill(POISON);
        let args = dropping::Args { x: read(x), y: write(&mut y[..LEN as usize]), len: LEN };
        pass(dropping::kernel(), shape, args, &options);
        assert_eq!(first_difference(&y[..LEN as usize], x), Some(100));
        assert_eq!(y[100], POISON);

        let args = whole::Args { x: read(x), y: write(&mut y[..LEN as usize]), len: LEN };
        pass(whole::kernel(), shape, args, &options);
        assert_eq!(first_difference(&y[..LEN as usize], x), None);
        assert_eq!(y[102..], [POISON, POISON]);
    }
}
