//! What holds for every implementation, on random and on hostile matrices.

use crate::implementations::{Output, all};
use ferrokv::host::int8::{Int8Element, Matrix, oracle};
use ferrokv::kernels_gpu::int8::quantizer::error_bound;
use half::{bf16, f16};
use proptest::prelude::*;

/// All implementations agree in every bit, the oracle accepts every code, and no value moves by more than its
/// scale's bound.
pub fn holds<T: Int8Element>(keys: &[T], matrix: Matrix) {
    for blocks in [false, true] {
        let rows_per_scale = if blocks { 16 } else { matrix.tokens };
        let truth = oracle::quantize(keys, matrix, rows_per_scale);
        let outputs = all(keys, matrix, blocks);
        let (_, first) = &outputs[0];
        for (name, output) in &outputs {
            same_bits(name, first, output);
        }
        for (index, (x, restored)) in keys.iter().zip(&first.restored).enumerate() {
            let scale_at =
                index / matrix.channels / rows_per_scale * matrix.channels + index % matrix.channels;
            let scale = first.scales[scale_at];
            assert_eq!(scale as f64, truth.scales[scale_at], "scale {scale_at} of {matrix}");
            let code = first.codes[index];
            assert!(truth.accepts(index, code), "code {code} of {} / {scale}", x.to_f32());
            if x.to_f32().is_finite() {
                let error = (x.to_f32() as f64 - restored.to_f32() as f64).abs();
                let bound = error_bound::<T>(scale);
                assert!(
                    error <= bound,
                    "{} came back as {}: {error:e} > {bound:e}",
                    x.to_f32(),
                    restored.to_f32()
                );
            }
        }
    }
}

fn same_bits<T: Int8Element>(name: &str, expected: &Output<T>, got: &Output<T>) {
    let bits = |scales: &[f32]| scales.iter().map(|s| s.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&got.scales), bits(&expected.scales), "scales of {name}");
    assert_eq!(got.codes, expected.codes, "codes of {name}");
    let bytes = |values: &[T]| values.iter().map(|x| x.to_f32().to_bits()).collect::<Vec<_>>();
    assert_eq!(bytes(&got.restored), bytes(&expected.restored), "restored values of {name}");
}

fn from_f32<T: Int8Element>(values: &[f32]) -> Vec<T> {
    values.iter().map(|x| T::from_f32(*x)).collect()
}

/// A shape around the edges of vectors, tiles and blocks, and values of one kind.
fn matrices() -> impl Strategy<Value = (Matrix, Vec<f32>)> {
    let edge = prop_oneof![1usize..6, 14usize..19, 30usize..35, 62usize..67];
    let values = prop_oneof![
        Just(prop_oneof![-1f32..1.0].boxed()),
        Just(any::<u32>().prop_map(f32::from_bits).boxed()),
        Just((-8i32..9).prop_map(|i| i as f32 * 0.5).boxed()),
        Just(prop_oneof![Just(0.0), Just(-0.0f32), Just(1e-45), Just(-3e-39f32), Just(1.2e-38)].boxed()),
        Just((-126f32..120.0).prop_map(f32::exp2).boxed()),
    ];
    (edge.clone(), edge, values).prop_flat_map(|(tokens, channels, value)| {
        let matrix = Matrix::new(tokens, channels).unwrap();
        (Just(matrix), proptest::collection::vec(value, matrix.elements()))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn every_implementation_agrees_and_stays_in_bounds((matrix, values) in matrices()) {
        holds::<f32>(&values, matrix);
        holds::<f16>(&from_f32(&values), matrix);
        holds::<bf16>(&from_f32(&values), matrix);
    }
}

#[test]
fn shapes_around_every_edge() {
    for tokens in [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33] {
        for channels in [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 68] {
            let matrix = Matrix::new(tokens, channels).unwrap();
            let values: Vec<f32> =
                (0..matrix.elements()).map(|i| ((i * 7919 % 1009) as f32 - 504.0) / 77.0).collect();
            holds::<f32>(&values, matrix);
        }
    }
}

#[test]
fn ties_go_to_even_in_every_implementation() {
    // A column whose scale is exactly 1: 127, then k + 1/2 for every k.
    let mut column = vec![127f32];
    column.extend((-127..127).map(|k| k as f32 + 0.5));
    let matrix = Matrix::new(column.len(), 1).unwrap();
    holds::<f32>(&column, matrix);
    let expected: Vec<i8> = column.iter().map(|x| x.round_ties_even() as i8).collect();
    for (name, output) in all(&column, matrix, false) {
        assert_eq!(output.scales, [1.0], "{name}");
        assert_eq!(output.codes, expected, "{name}");
    }
}

#[test]
fn the_bound_is_attained_to_a_part_in_a_thousand() {
    // Not vacuous: a uniform column comes within 0.1 % of its bound.
    let column: Vec<f32> = (0..8001).map(|i| i as f32 / 4000.0 - 1.0).collect();
    let matrix = Matrix::new(column.len(), 1).unwrap();
    let (_, output) = all(&column, matrix, false).remove(0);
    let worst = column.iter().zip(&output.restored).map(|(x, y)| (x - y).abs() as f64).fold(0.0, f64::max);
    let bound = error_bound::<f32>(output.scales[0]);
    assert!(worst <= bound && worst > 0.999 * bound, "{worst:e} of {bound:e}");
}
