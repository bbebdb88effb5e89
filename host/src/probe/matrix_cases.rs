//! The cases of the tensor-core and asynchronous-copy probes.

use super::Samples;
use crate::check::{Case, CaseError, OutputBuffer, poisoned};
use crate::{Buffer, Device, Stream};
use kernels_gpu::mix;
use kernels_gpu::probe::matrices;
use simt::{Kernel, LaunchShape};

/// Warps of a block of the MMA probe.
const WARPS: u32 = 4;

pub(super) fn cases(samples: Samples) -> Vec<Case> {
    let mut cases = Vec::new();
    // An MMA costs as much as some hundred operators.
    let blocks = (samples.operands >> 11).max(1);
    for class in 0..matrices::CLASSES {
        multiply(&mut cases, matrices::multiply::kernel::<matrices::F16>(), blocks, class);
        multiply(&mut cases, matrices::multiply::kernel::<matrices::Bf16>(), blocks, class);
    }
    for class in 0..2 {
        multiply(&mut cases, matrices::multiply::kernel::<matrices::I8>(), blocks, class);
    }
    for seed in 0..4 {
        let run = move |device: &Device| -> Result<_, CaseError> {
            let stream = Stream::new(device)?;
            let mut out = poisoned::<u32>(&stream, 32 * 8)?;
            let shape = LaunchShape::new(1, 32).shared(matrices::rows().1);
            // SAFETY: 32 lanes write 8 words each.
            unsafe {
                stream.launch(
                    &matrices::matrices::kernel(),
                    shape,
                    matrices::matrices::Args { out: out.global_mut(), seed },
                )
            }?;
            Ok(vec![OutputBuffer::download("out", &out)?])
        };
        let info = matrices::matrices::kernel().info();
        cases.push(Case::new(info, format!("seed={seed}"), run).race_checked());
    }
    for (tiles, present) in [(0, 0), (1, 1), (2, 1), (3, 3), (4, 4), (9, 6), (33, 33)] {
        copies(&mut cases, tiles, present);
    }
    cases
}

fn multiply(cases: &mut Vec<Case>, kernel: Kernel<matrices::multiply::Args>, blocks: u32, class: u32) {
    let label = format!("class={class} tiles={}", blocks * WARPS);
    let run = move |device: &Device| -> Result<_, CaseError> {
        let stream = Stream::new(device)?;
        let mut out = poisoned::<u32>(&stream, (blocks * WARPS * 32 * matrices::REGISTERS) as usize)?;
        let shape = LaunchShape::new(blocks, WARPS * 32);
        // SAFETY: each thread writes its own four words.
        unsafe {
            stream.launch(
                &kernel,
                shape,
                matrices::multiply::Args { out: out.global_mut(), seed: class + 1, class },
            )
        }?;
        Ok(vec![OutputBuffer::download("out", &out)?])
    };
    cases.push(Case::new(kernel.info(), label, run));
}

fn copies(cases: &mut Vec<Case>, tiles: u32, present: u32) {
    let run = move |device: &Device| -> Result<_, CaseError> {
        let stream = Stream::new(device)?;
        // Only what is present may be read.
        let words: Vec<u32> =
            (0..(present * matrices::STAGE_WORDS).max(4)).map(|i| mix(i as u64) as u32).collect();
        let source = Buffer::from_slice(device, &words)?;
        let mut out = poisoned::<u32>(&stream, 32)?;
        let shape = LaunchShape::new(1, 32).shared(matrices::ring().1);
        let args = matrices::copies::Args { source: source.global(), out: out.global_mut(), tiles, present };
        // SAFETY: the source holds `present` tiles; 32 lanes write a word each.
        unsafe { stream.launch(&matrices::copies::kernel(), shape, args) }?;
        Ok(vec![OutputBuffer::download("out", &out)?])
    };
    let info = matrices::copies::kernel().info();
    cases.push(Case::new(info, format!("tiles={tiles} present={present}"), run).race_checked());
}
