//! A step as a captured graph: tokens and positions stay on the device.

use super::{Numbers, emulator, weights};
use host::Buffer;
use host::model::cpu::{self, Onto, Source};
use host::model::kernels::{Choice, Choosing, choose, embedding};
use host::model::linear::{DeviceWeights, Epilogue, Input, ProductKernel, WeightKind};
use kernels_gpu::model::fixed::{Part, Record};

const ZERO: Record = [Part { high: [0; 8], middle: [0; 8], low: [0; 8], step: 0.0, sum: 0.0 }; 4];
const HIDDEN: usize = 96;
const FFN: usize = 160;
const VOCABULARY: usize = 300;

/// Embedding, a feed-forward part with its residual, logits, a draw: replayed, it is the CPU's loop.
#[test]
fn a_captured_step_goes_from_token_to_token() {
    let (device, stream) = emulator();
    let table = weights(WeightKind::Q8_0, VOCABULARY, HIDDEN, 1, false);
    let gate_up = weights(WeightKind::Q4_1, 2 * FFN, HIDDEN, 2, false);
    let down = weights(WeightKind::Q4_1, HIDDEN, FFN, 3, false);
    let norm = Numbers::new(4).values(HIDDEN, 1.0);
    let choice = Choice::Sampled { temperature: 0.8, top_p: 0.95, seed: 5 };
    let (start, position, steps) = (17u32, 40u32, 12u32);

    let [table_there, gate_up_there, down_there] =
        [&table, &gate_up, &down].map(|packed| DeviceWeights::new(&device, packed).unwrap());
    assert!(gate_up_there.fuses(1) && down_there.fuses(1));
    let weight = Buffer::from_slice(&device, &norm).unwrap();
    let mut token = Buffer::from_slice(&device, &[start]).unwrap();
    let mut positions = Buffer::from_slice(&device, &[position]).unwrap();
    let number = Buffer::from_slice(&device, &[0u32]).unwrap();
    let mut x = Buffer::<f32>::zeroed(&device, HIDDEN).unwrap();
    let mut hidden = Buffer::<f32>::zeroed(&device, 2 * FFN).unwrap();
    let mut logits = Buffer::<f32>::zeroed(&device, VOCABULARY).unwrap();
    let (graph, recorded) = stream
        .capture(|stream| {
            let normed = Input::Normed { x: x.global(), weight: weight.global(), epsilon: 1e-5 };
            let gated = Input::Gated { x: hidden.global() };
            let onto = Epilogue { residual: Some(x.global()), ..Epilogue::default() };
            let (alone, auto) = (Epilogue::default(), ProductKernel::Auto);
            // SAFETY: buffers of the extents that the weights have, which live as long as the graph is used.
            Ok(unsafe {
                embedding(stream, &table_there, token.global(), x.global_mut(), 1)
                    .and_then(|()| gate_up_there.run_on(stream, auto, normed, alone, hidden.global_mut(), 1))
                    .and_then(|()| down_there.run_on(stream, auto, gated, onto, x.global_mut(), 1))
                    .and_then(|()| table_there.run_on(stream, auto, normed, alone, logits.global_mut(), 1))
                    .and_then(|()| {
                        let rows = Choosing {
                            logits: logits.global(),
                            numbers: number.global(),
                            tokens: token.global_mut(),
                            positions: positions.global_mut(),
                        };
                        choose(stream, choice, rows, 1, VOCABULARY)
                    })
            })
        })
        .unwrap();
    recorded.unwrap();
    assert_eq!(graph.len(), 5, "launches of a step");
    let exec = graph.instantiate().unwrap();

    let mut here = start;
    for step in 0..steps {
        // SAFETY: all buffers live.
        unsafe { exec.launch(&stream) }.unwrap();
        let mut x = vec![0f32; HIDDEN];
        cpu::embedding(&table, &[here], &mut x);
        let (mut narrow, mut wide) = (vec![ZERO; HIDDEN / 32], vec![ZERO; FFN / 32]);
        let mut hidden = vec![0f32; 2 * FFN];
        cpu::quantize(Source::Normed { x: &x, weight: &norm, epsilon: 1e-5 }, HIDDEN, &mut narrow);
        cpu::product(&gate_up, &narrow, None, Onto::Nothing, &mut hidden);
        cpu::quantize(Source::Gated(&hidden), FFN, &mut wide);
        cpu::product(&down, &wide, None, Onto::Output, &mut x);
        cpu::quantize(Source::Normed { x: &x, weight: &norm, epsilon: 1e-5 }, HIDDEN, &mut narrow);
        let mut logits = vec![0f32; VOCABULARY];
        cpu::product(&table, &narrow, None, Onto::Nothing, &mut logits);
        here = cpu::choose(choice, &logits, position + step, 0).unwrap();
        assert_eq!(token.to_vec().unwrap(), [here], "step {step}");
        assert_eq!(positions.to_vec().unwrap(), [position + step + 1]);
    }
}
