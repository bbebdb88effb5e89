//! Kernels that only move bytes.

use glam::Vec4;
use kernels_gpu::probe::memory::{COPIES, hints};
use kernels_gpu::roofline::{Grid, copy_four, launch, narrow_four, narrow_neighbours, read_four, widen_four};
use simt::{Kernel, LaunchShape};
use simt_test::{Trial, array, bits, sizes};

/// A launch over `vectors` vectors in rows of `row`.
fn moved(
    kernel: Kernel<copy_four::Args>,
    (vectors, row, per_thread): (usize, usize, u32),
    source: Vec<u32>,
    target: Vec<u32>,
) -> Option<Trial> {
    let grid = Grid::new(vectors as u64, row as u32);
    Some(Trial::new(kernel, launch(grid, per_thread)?, move |memory| copy_four::Args {
        source: memory.input(&source),
        target: memory.output(&target),
        grid,
    }))
}

fn narrowed(words: &[u32]) -> Vec<u32> {
    words.chunks(4).map(|vector| vector.iter().fold(0, |all, word| all ^ word)).collect()
}

/// One test a kernel: its vectors a thread, words it reads of a vector, and what it makes of them.
macro_rules! moves {
    ($($name:ident: $kernel:expr, $per_thread:literal, $words:literal, $target:expr;)*) => {$(
        #[simt::test(cases = 32, ptx = ferrokv::ptx())]
        fn $name(
            #[draw(sizes(1..=700))] vectors: usize,
            #[draw(sizes(1..=300))] row: usize,
            #[draw(array($words * vectors, bits::<u32>()))] source: Vec<u32>,
        ) -> Option<Trial> {
            let expected: fn(&[u32]) -> Vec<u32> = $target;
            let target = expected(&source);
            moved($kernel, (vectors, row, $per_thread), source, target)
        }
    )*};
}

moves! {
    copies: copy_four::kernel(), 1, 4, |words| words.to_vec();
    narrows: narrow_four::kernel::<1>(), 1, 4, narrowed;
    narrows_two: narrow_four::kernel::<2>(), 2, 4, narrowed;
    widens: widen_four::kernel::<1>(), 1, 1, |words| words.iter().flat_map(|word| [*word; 4]).collect();
    widens_eight: widen_four::kernel::<8>(), 8, 1, |words| words.iter().flat_map(|word| [*word; 4]).collect();
}

/// Neighbours of four to a thread, so rows do not matter.
#[simt::test(cases = 32, ptx = ferrokv::ptx())]
fn narrows_neighbours(
    #[draw(sizes(1..=2000))] vectors: usize,
    #[draw(array(4 * vectors, bits::<u32>()))] source: Vec<u32>,
) -> Option<Trial> {
    let target = narrowed(&source);
    moved(narrow_neighbours::kernel(), (vectors, 1, 4), source, target)
}

/// The threads whose vectors cancel to a certain word, of which half the words drawn are.
#[simt::test(cases = 32, ptx = ferrokv::ptx())]
fn reads_and_counts(
    #[draw(sizes(1..=700))] vectors: usize,
    #[draw(array(vectors, proptest::prop_oneof![proptest::prelude::Just(0x9e37_79b9u32), bits::<u32>()]))]
    words: Vec<u32>,
) -> Option<Trial> {
    let source: Vec<u32> = words.iter().flat_map(|word| [7, *word, 7, 0]).collect();
    let count = words.iter().filter(|word| **word == 0x9e37_79b9).count() as u32;
    let grid = Grid::new(vectors as u64, 64);
    Some(Trial::new(read_four::kernel::<1>(), launch(grid, 1)?, move |memory| copy_four::Args {
        source: memory.input(&source),
        target: memory.in_out(&[0], vec![count]),
        grid,
    }))
}

/// Every width, through every hint.
macro_rules! hinted {
    ($($name:ident: $unit:ty;)*) => {$(
        #[simt::test(cases = 24, ptx = ferrokv::ptx())]
        fn $name(
            #[draw(sizes(1..=300))] count: usize,
            #[draw(array(count * size_of::<$unit>(), bits::<u8>()))] x: Vec<u8>,
        ) -> Trial {
            let copies = x.repeat(COPIES);
            let shape = LaunchShape::new((count as u32).div_ceil(64), 64);
            Trial::new(hints::kernel::<$unit>(), shape, move |memory| hints::Args {
                x: memory.input(&x),
                out: memory.output(&copies),
                count: count as u32,
            })
        }
    )*};
}

hinted! { hints_u8: u8; hints_u16: u16; hints_u32: u32; hints_u64: u64; hints_vec4: Vec4; }
