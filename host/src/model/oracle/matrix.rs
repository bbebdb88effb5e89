//! Products with packed matrices in f64.

use crate::model::weights::Tensor;
use rayon::prelude::*;

/// Rows that one task restores and multiplies; a multiple of [`TOGETHER`].
const ROWS: usize = 16;

/// Rows that are multiplied together, so that an input is loaded once for all of them.
const TOGETHER: usize = 4;

/// Inputs that stay in the cache while all rows of a task meet them.
const INPUTS: usize = 16;

/// Values of an accumulator.
const LANES: usize = 4;

/// Each input, [inputs, columns], times the matrix (+ bias): [inputs, rows].
pub(super) fn project(tensor: &Tensor, bias: Option<&Tensor>, inputs: &[f64]) -> Vec<f64> {
    let (rows, columns) = (tensor.rows, tensor.columns);
    let count = inputs.len() / columns;
    let bias = bias.map(Tensor::to_f32);
    // Rows of the matrix first, so that each task writes a piece of its own.
    let mut products = vec![0.0; rows * count];
    products.par_chunks_mut((ROWS * count).max(1)).enumerate().for_each(|(task, products)| {
        let mut packed = vec![0.0f32; columns];
        let mut weights = vec![0.0f64; products.len() / count * columns];
        for (i, weights) in weights.chunks_exact_mut(columns).enumerate() {
            tensor.dequantize_row(task * ROWS + i, &mut packed);
            weights.iter_mut().zip(&packed).for_each(|(x, &weight)| *x = f64::from(weight));
        }
        for (block, inputs) in inputs.chunks(INPUTS * columns).enumerate() {
            let groups = weights.chunks(TOGETHER * columns).zip(products.chunks_mut(TOGETHER * count));
            for (weights, products) in groups {
                dots(weights, columns, inputs, &mut products[block * INPUTS..], count);
            }
        }
    });
    let mut outputs = vec![0.0; rows * count];
    outputs.par_chunks_exact_mut(rows).enumerate().for_each(|(input, outputs)| {
        for (row, output) in outputs.iter_mut().enumerate() {
            *output = products[row * count + input] + bias.as_ref().map_or(0.0, |bias| f64::from(bias[row]));
        }
    });
    outputs
}

/// Each row times one input: [rows].
pub(super) fn products(rows: &[f64], input: &[f64]) -> Vec<f64> {
    let mut products = vec![0.0; rows.len() / input.len()];
    for (rows, products) in rows.chunks(TOGETHER * input.len()).zip(products.chunks_mut(TOGETHER)) {
        dots(rows, input.len(), input, products, 1);
    }
    products
}

/// Products of up to [`TOGETHER`] rows with some inputs: that of row r and input i at r·`stride` + i.
fn dots(weights: &[f64], columns: usize, inputs: &[f64], products: &mut [f64], stride: usize) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: the processor has what the function is compiled for.
        return unsafe { dots_avx2(weights, columns, inputs, products, stride) };
    }
    dots_with(weights, columns, inputs, products, stride, |a, b, sum| a * b + sum);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn dots_avx2(weights: &[f64], columns: usize, inputs: &[f64], products: &mut [f64], stride: usize) {
    dots_with(weights, columns, inputs, products, stride, f64::mul_add);
}

#[inline(always)]
fn dots_with(
    weights: &[f64],
    columns: usize,
    inputs: &[f64],
    products: &mut [f64],
    stride: usize,
    multiply_add: impl Fn(f64, f64, f64) -> f64,
) {
    let rows = weights.len() / columns;
    // A group that is not full repeats its last row.
    let row = |i: usize| &weights[i.min(rows - 1) * columns..][..columns];
    let group: [&[f64]; TOGETHER] = std::array::from_fn(row);
    for (input, x) in inputs.chunks_exact(columns).enumerate() {
        let mut sums = [[0.0; LANES]; TOGETHER];
        let (whole, rest) = x.as_chunks::<LANES>();
        // Of one length, so that the loop below checks no bounds.
        let lanes = group.map(|row| &row.as_chunks::<LANES>().0[..whole.len()]);
        for (at, x) in whole.iter().enumerate() {
            for (sums, row) in sums.iter_mut().zip(&lanes) {
                for ((sum, weight), x) in sums.iter_mut().zip(&row[at]).zip(x) {
                    *sum = multiply_add(*weight, *x, *sum);
                }
            }
        }
        for (i, (sums, row)) in sums.iter().zip(group).enumerate().take(rows) {
            let rest: f64 = row[columns - rest.len()..].iter().zip(rest).map(|(row, x)| row * x).sum();
            products[i * stride + input] = sums.iter().sum::<f64>() + rest;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::gguf::{Bytes, TensorType};

    fn matrix(rows: usize, columns: usize, value: impl Fn(usize) -> f32) -> Tensor {
        let bytes: Vec<u8> = (0..rows * columns).flat_map(|i| value(i).to_le_bytes()).collect();
        Tensor { name: "w".into(), tensor_type: TensorType::F32, rows, columns, bytes: Bytes::from(bytes) }
    }

    #[test]
    fn products_are_exact_on_integers() {
        // Sizes around the tasks' and the groups' edges; small integers, so that every order gives the same
        // sum.
        for (rows, columns, count) in [(1, 1, 1), (3, 5, 2), (16, 8, 1), (17, 9, 3), (37, 64, 50)] {
            let weight = |i: usize| (i * 7 % 23) as f32 - 11.0;
            let tensor = matrix(rows, columns, weight);
            let bias = matrix(1, rows, |i| i as f32);
            let inputs: Vec<f64> = (0..count * columns).map(|i| (i * 5 % 17) as f64 - 8.0).collect();
            let got = project(&tensor, Some(&bias), &inputs);
            for input in 0..count {
                for row in 0..rows {
                    let terms = (0..columns)
                        .map(|c| f64::from(weight(row * columns + c)) * inputs[input * columns + c]);
                    assert_eq!(got[input * rows + row], terms.sum::<f64>() + row as f64);
                }
            }
        }
        let rows: Vec<f64> = (0..5 * 6).map(f64::from).collect();
        let expected = rows.chunks_exact(6).map(|row| row.iter().sum::<f64>() * 2.0);
        assert_eq!(products(&rows, &[2.0; 6]), expected.collect::<Vec<_>>());
        assert!(project(&matrix(4, 4, |_| 1.0), None, &[]).is_empty());
    }
}
