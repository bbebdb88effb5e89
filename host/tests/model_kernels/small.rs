//! Embedding rows and rotation.

use super::{Numbers, assert_bits, blocks, emulator, weights};
use half::{bf16, f16};
use host::Buffer;
use host::attention::rope::{Pairing, RopeElement, frequencies, rotate, rotate_and_append};
use host::check::OutputElement;
use host::model::cpu;
use host::model::gguf::dequantize;
use host::model::kernels::embedding;
use host::model::linear::{DeviceWeights, WeightKind};
use kernels_gpu::attention::rotation::RopeShape;
use kernels_gpu::model::{rope, rope_append};

#[test]
fn embedding_rows_are_those_of_the_file() {
    let (device, stream) = emulator();
    let (rows, columns) = (21, 96);
    for kind in WeightKind::ALL {
        for wild in [false, true] {
            let packed = weights(kind, rows, columns, 4, wild);
            let bytes = blocks(kind.tensor_type(), rows, columns, 4, wild);
            let tokens = [0u32, 7, 8, 20, 3, 21, u32::MAX];
            let mut out = vec![0f32; tokens.len() * columns];
            cpu::embedding(&packed, &tokens, &mut out);

            let on_device = DeviceWeights::new(&device, &packed).unwrap();
            let asked = Buffer::from_slice(&device, &tokens).unwrap();
            let mut found = Buffer::<f32>::new(&device, out.len()).unwrap();
            // SAFETY: a row for each token.
            unsafe { embedding(&stream, &on_device, asked.global(), found.global_mut(), tokens.len()) }
                .unwrap();
            assert_bits("kernel", &out, &found.to_vec().unwrap());

            let mut row = vec![0f32; columns];
            for (token, out) in tokens.iter().zip(out.chunks(columns)) {
                if *token as usize >= rows {
                    assert!(out.iter().all(|x| x.is_nan()));
                    continue;
                }
                let row_bytes = bytes.len() / rows;
                dequantize(kind.tensor_type(), &bytes[*token as usize * row_bytes..][..row_bytes], &mut row);
                for (x, y) in row.iter().zip(out) {
                    // One rounding here, two there.
                    let near = (x - y).abs() <= 1e-6 * x.abs().max(0.2);
                    assert!(near || wild && (x.is_nan() == y.is_nan() || !x.is_finite()), "{x} and {y}");
                }
            }
        }
    }
}

fn check_rotation<E: RopeElement + OutputElement>(
    pairing: Pairing,
    shape: RopeShape,
    tokens: usize,
    wild: bool,
) {
    let (device, stream) = emulator();
    let positions: Vec<u32> = [0u32, 1, 77, 8191, 1 << 20].into_iter().cycle().take(tokens).collect();
    let (tokens, dim) = (positions.len(), shape.head_dim as usize);
    let (q, kv) = (tokens * shape.q_heads as usize * dim, tokens * shape.kv_heads as usize * dim);
    let mut numbers = Numbers::new(u64::from(shape.head_dim));
    let qkv: Vec<f32> =
        (0..q + 2 * kv).map(|_| if wild { numbers.wild() } else { numbers.uniform() }).collect();
    let table = frequencies(100_000.0, shape.rotary as usize);
    let zeros = |len| vec![E::from_f32(0.0); len];
    let (mut queries, mut keys, mut values) = (zeros(q), zeros(kv), zeros(kv));
    cpu::rotate(pairing, &qkv, &positions, &table, &mut queries, &mut keys, &mut values, shape).unwrap();

    let (from, at) =
        (Buffer::from_slice(&device, &qkv).unwrap(), Buffer::from_slice(&device, &positions).unwrap());
    let turns = Buffer::from_slice(&device, &table).unwrap();
    let buffer = |len| Buffer::<E>::new(&device, len).unwrap();
    let mut found = [buffer(q), buffer(kv), buffer(kv)];
    let [to_queries, to_keys, to_values] = found.each_mut().map(|buffer| buffer.global_mut());
    let args = rope::Args {
        qkv: from.global(),
        positions: at.global(),
        frequencies: turns.global(),
        queries: to_queries,
        keys: to_keys,
        values: to_values,
        shape,
    };
    // SAFETY: the buffers have the shape's lengths.
    unsafe { rotate(&stream, pairing, args, tokens) }.unwrap();
    for (expected, found) in [queries.clone(), keys, values].iter().zip(&found) {
        let found: Vec<f32> = found.to_vec().unwrap().into_iter().map(E::to_f32).collect();
        let expected: Vec<f32> = expected.iter().map(|x| x.to_f32()).collect();
        for (a, b) in expected.iter().zip(&found) {
            assert!(a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(), "{a} and {b}");
        }
    }
    if wild {
        return;
    }
    // The formula in f64, from the rounded angle.
    let row = (shape.q_heads + 2 * shape.kv_heads) as usize * dim;
    for (t, position) in positions.iter().enumerate() {
        for head in 0..shape.q_heads as usize {
            let x = &qkv[t * row + head * dim..][..dim];
            let y = &queries[(t * shape.q_heads as usize + head) * dim..][..dim];
            for (i, frequency) in table.iter().enumerate() {
                let (a, b) = match pairing {
                    Pairing::Interleaved => (2 * i, 2 * i + 1),
                    Pairing::HalfSplit => (i, i + table.len()),
                };
                let angle = f64::from(*position as f32 * frequency);
                let turned = [
                    f64::from(x[a]) * angle.cos() - f64::from(x[b]) * angle.sin(),
                    f64::from(x[a]) * angle.sin() + f64::from(x[b]) * angle.cos(),
                ];
                for (exact, found) in turned.into_iter().zip([y[a], y[b]]) {
                    let allowed = 4.0 * 2f64.powi(-24) * 2.0 + E::HALF_ULP * exact.abs() + E::SUBNORMAL_ERROR;
                    assert!(
                        (exact - f64::from(found.to_f32())).abs() <= allowed,
                        "{exact} and {}",
                        found.to_f32()
                    );
                }
            }
            for k in shape.rotary as usize..dim {
                assert_eq!(y[k].to_f32(), E::from_f32(x[k]).to_f32());
            }
        }
    }
}

#[test]
fn rotations_are_the_formula_and_the_kernels_bits() {
    for (q_heads, kv_heads, head_dim, rotary) in
        // Of heads of 96 a thread's next pair is another one of its head.
        [(9, 3, 64, 64), (9, 3, 96, 80), (2, 2, 10, 6), (1, 1, 128, 32), (4, 1, 2, 0)]
    {
        let shape = RopeShape { q_heads, kv_heads, head_dim, rotary };
        for pairing in [Pairing::HalfSplit, Pairing::Interleaved] {
            // A thread a pair, and up to four pairs a thread.
            for (tokens, wild) in [(5, false), (5, true), (66, false), (66, true)] {
                check_rotation::<f32>(pairing, shape, tokens, wild);
                check_rotation::<f16>(pairing, shape, tokens, wild);
                check_rotation::<bf16>(pairing, shape, tokens, wild);
            }
        }
    }
}

#[test]
fn rotations_that_cannot_be_are_refused() {
    let refuse = |q_heads, kv_heads, head_dim, rotary, part: &str| {
        let shape = RopeShape { q_heads, kv_heads, head_dim, rotary };
        let error = cpu::rotate::<f32>(Pairing::HalfSplit, &[], &[], &[], &mut [], &mut [], &mut [], shape);
        let error = error.unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    };
    refuse(1, 1, 3, 2, "head_dim is 3");
    refuse(1, 1, 4, 6, "rotary is 6");
    refuse(1, 1, 4, 3, "rotary is 3");
    refuse(0, 1, 4, 4, "query heads is 0");
    refuse(1, 0, 4, 4, "KV heads is 0");
}

#[test]
fn rotation_to_a_pool_is_rotation_and_then_appending() {
    let shape = RopeShape { q_heads: 4, kv_heads: 2, head_dim: 10, rotary: 6 };
    let (device, stream) = emulator();
    // The last is past the table.
    let (positions, blocks) = ([31u32, 0, 17, 48], [5u32, 0, 3]);
    let (q, kv, pool) = (4 * 4 * 10, 4 * 2 * 10, 6 * 2 * 16 * 10);
    let mut numbers = Numbers::new(3);
    let qkv: Vec<f32> = (0..q + 2 * kv).map(|_| numbers.uniform()).collect();
    let turns = frequencies(10_000.0, 6);
    let from = Buffer::from_slice(&device, &qkv).unwrap();
    let at = Buffer::from_slice(&device, &positions).unwrap();
    let turns_there = Buffer::from_slice(&device, &turns).unwrap();
    let table = Buffer::from_slice(&device, &blocks).unwrap();
    for pairing in [Pairing::HalfSplit, Pairing::Interleaved] {
        let zeros = |len| vec![f16::ZERO; len];
        let (mut queries, mut keys, mut values) = (zeros(q), zeros(kv), zeros(kv));
        cpu::rotate(pairing, &qkv, &positions, &turns, &mut queries, &mut keys, &mut values, shape).unwrap();
        for (count, length) in [(4, 7), (3, 18)] {
            let mut found = [q, pool, pool].map(|len| Buffer::<f16>::zeroed(&device, len).unwrap());
            let [to_queries, to_keys, to_values] = found.each_mut().map(|buffer| buffer.global_mut());
            let mut lengths = Buffer::from_slice(&device, &[7u32]).unwrap();
            let args = rope_append::Args {
                qkv: from.global(),
                positions: at.global(),
                frequencies: turns_there.global(),
                queries: to_queries,
                table: table.global(),
                lengths: lengths.global_mut(),
                keys: to_keys,
                values: to_values,
                shape,
                tokens: count as u32,
                max_blocks: table.len() as u32,
            };
            // SAFETY: the buffers have the shape's lengths, and the table's blocks are the pools'.
            unsafe { rotate_and_append(&stream, pairing, args, count) }.unwrap();
            assert_eq!(lengths.to_vec().unwrap(), [length]);
            let [found_queries, found_keys, found_values] = found.each_ref().map(|b| b.to_vec().unwrap());
            assert_eq!(found_queries[..count * 40], queries[..count * 40]);
            for (new, found) in [(&keys, found_keys), (&values, found_values)] {
                let mut expected = zeros(pool);
                for (token, position) in positions[..count].iter().map(|p| *p as usize).enumerate() {
                    let Some(block) = blocks.get(position / 16) else { continue };
                    for head in 0..2 {
                        let to = ((*block as usize * 2 + head) * 16 + position % 16) * 10;
                        expected[to..to + 10].copy_from_slice(&new[(token * 2 + head) * 10..][..10]);
                    }
                }
                assert_eq!(found, expected);
            }
        }
    }
}
