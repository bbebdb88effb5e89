//! Cases of a prompt's products from panels: each compares its bits with those of
//! [`ProductKernel::Decode`] on the same device too.

use super::cases::{Content, Problem, make_records, weights};
use super::kernels::{panel_words, panels};
use super::linear::{DeviceWeights, Epilogue, Error, Input, ProductKernel, WeightKind, prompt_kernel};
use crate::check::{Case, CaseError, Coverage, OutputBuffer, poisoned};
use crate::{Buffer, Device, Stream};
use kernels_gpu::model::activations::{Gated, Normed, Plain};
use kernels_gpu::model::panel_activations;

/// Panels and their products, beside those of [`ProductKernel::Decode`].
pub(super) fn add(cases: &mut Vec<Case>, coverage: Coverage) {
    // Around a group's 64 rows and a thread block's, around panels; every number of strands; fewer blocks
    // than stages of the ring, and more.
    let edges = [(1, 32, 1), (24, 224, 63), (65, 416, 64), (193, 800, 65), (200, 1056, 3)];
    let shapes = if coverage == Coverage::Small { &[(9, 96, 2)][..] } else { &edges[..] };
    let mut problems: Vec<(usize, usize, usize)> = shapes.to_vec();
    if coverage == Coverage::Full {
        problems.extend([(576, 1536, 130), (512, 14336, 64)]);
    }
    let quantized = WeightKind::ALL.into_iter().filter_map(|kind| Some((kind, prompt_kernel(kind)?)));
    for (kind, (kernel, shared)) in quantized {
        for &(rows, columns, tokens) in &problems {
            for content in [Content::Uniform, Content::Spiked] {
                let hostile = content == Content::Spiked;
                let problem = Problem { kind, rows, columns, tokens, content, hostile };
                let what = if hostile { "hostile weights" } else { "weights" };
                let label = format!("{rows}x{columns} {what}, {tokens} tokens {content:?}");
                let case = Case::new(kernel.info(), label, move |device| run_prompt(device, problem))
                    .and(panel_activations::kernel::<Plain>().info())
                    .and(panel_activations::kernel::<Normed>().info())
                    .and(panel_activations::kernel::<Gated>().info())
                    .within(shared);
                cases.push(if rows * columns * tokens <= 2048 { case.race_checked() } else { case });
            }
        }
    }
}

fn run_prompt(device: &Device, problem: Problem) -> Result<Vec<OutputBuffer>, CaseError> {
    let Problem { kind, rows, columns, tokens, content, hostile } = problem;
    let stream = Stream::new(device)?;
    let weights = DeviceWeights::new(device, &weights(kind, rows, columns, hostile)?)?;
    let x = Buffer::from_slice(device, &content.values(5, 2 * tokens * columns))?;
    let bias = Buffer::from_slice(device, &Content::Uniform.values(6, rows))?;
    let residual = Buffer::from_slice(device, &Content::Uniform.values(7, tokens * rows))?;
    let norm = Buffer::from_slice(device, &Content::Uniform.values(8, columns))?;
    let (x, weight) = (x.global(), norm.global());
    let inputs = [
        ("plain", Input::Plain { x }),
        ("normed", Input::Normed { x, weight, epsilon: 1e-5 }),
        ("gated", Input::Gated { x }),
    ];
    let mut outputs = Vec::new();
    for (name, input) in inputs {
        let words = make_records(&stream, input, tokens, columns)?;
        let mut panel = poisoned::<u32>(&stream, panel_words(tokens, columns))?;
        // SAFETY: the input's handles reach `tokens` rows.
        unsafe { panels(&stream, input, panel.global_mut(), tokens, columns)? };
        let alone = name == "gated";
        let epilogue =
            Epilogue { bias: (!alone).then(|| bias.global()), residual: (!alone).then(|| residual.global()) };
        let run = |kernel, input| -> Result<Buffer<f32>, CaseError> {
            let mut out = poisoned::<f32>(&stream, tokens * rows)?;
            // SAFETY: buffers of the device of these lengths, read back before they go.
            let run = unsafe { weights.run_on(&stream, kernel, input, epilogue, out.global_mut(), tokens) };
            // What a device has no kernel for is said by the device's own error.
            run.map_err(|error| match error {
                Error::Device(error) => CaseError::from(error),
                error => error.into(),
            })?;
            Ok(out)
        };
        let decode = run(ProductKernel::Decode, Input::Records(words.global()))?;
        let prompt = run(ProductKernel::Prompt, Input::Panels(panel.global()))?;
        let (decode, prompt) =
            (OutputBuffer::download("decode", &decode)?, OutputBuffer::download(name, &prompt)?);
        let pairs = decode.bytes().chunks_exact(4).zip(prompt.bytes().chunks_exact(4));
        let differing = pairs.filter(|(a, b)| a != b).count();
        if differing != 0 {
            return Err(format!("{differing} outputs of `{name}` are not those of the kernel Decode").into());
        }
        outputs.extend([OutputBuffer::download("panels", &panel)?, prompt]);
    }
    Ok(outputs)
}
