//! The cases of products of groups of four warps.

use super::Samples;
use crate::check::{Case, CaseError, OutputBuffer, poisoned};
use crate::{Device, Stream};
use kernels_gpu::probe::matrices::{Bf16, CLASSES, F16, I8};
use kernels_gpu::probe::products;
use simt::{Kernel, LaunchShape};

pub(super) fn cases(samples: Samples) -> Vec<Case> {
    let mut cases = Vec::new();
    // A block's products are 64 · 256 sums at the most, each of up to 48 terms.
    let blocks = (samples.operands >> 17).max(1);
    macro_rules! add {
        ($($format:ident, $classes:expr, $(($l:literal, $place:literal))*;)*) => {
            $($(of(&mut cases, products::products::kernel::<$format, $l, $place>(), $l, blocks, $classes);)*)*
        };
    }
    add! {
        F16, CLASSES, (4, 0) (8, 1) (16, 2) (32, 3) (48, 4) (64, 0) (96, 1) (128, 4);
        Bf16, CLASSES, (4, 4) (16, 1) (32, 0) (64, 3) (96, 2);
        I8, 2, (4, 1) (8, 0) (16, 0) (32, 2) (48, 1) (64, 4) (96, 0) (128, 3);
    }
    cases
}

/// One kernel over every class of numbers; `sums` is L.
fn of(
    cases: &mut Vec<Case>,
    kernel: Kernel<products::products::Args>,
    sums: usize,
    blocks: u32,
    classes: u32,
) {
    // Wide ones take the emulator long: a few classes, where narrow ones have all.
    for class in (0..classes).filter(|&class| sums <= 32 || class < 4) {
        let label = format!("class={class} products={blocks}");
        let run = move |device: &Device| -> Result<_, CaseError> {
            let stream = Stream::new(device)?;
            let mut out = poisoned::<u32>(&stream, blocks as usize * 128 * 2 * sums)?;
            let shape = LaunchShape::new(blocks, 128).shared(products::layout().2);
            let args = products::products::Args { out: out.global_mut(), seed: class + 1, class };
            // SAFETY: each thread writes its own words.
            unsafe { stream.launch(&kernel, shape, args) }?;
            Ok(vec![OutputBuffer::download("out", &out)?])
        };
        cases.push(Case::new(kernel.info(), label, run).race_checked());
    }
}
