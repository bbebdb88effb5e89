//! The paper's 25 tests and the values that it leaves open, each for every implementation.

use crate::implementations::{all, simd};
use crate::properties::holds;
use ferrokv::host::int8::{Matrix, metrics};
use ferrokv::kernels_gpu::Element;
use half::{bf16, f16};

/// Checks scales and codes of a small matrix in every implementation (scales by whole columns).
fn gives(values: &[f32], tokens: usize, channels: usize, scales: &[f32], codes: &[i8]) {
    let matrix = Matrix::new(tokens, channels).unwrap();
    for (name, output) in all(values, matrix, false) {
        assert_eq!(output.scales, scales, "scales of {name}");
        assert_eq!(output.codes, codes, "codes of {name}");
    }
}

#[test]
fn one_element() {
    gives(&[-5.08], 1, 1, &[5.08 / 127.0], &[-127]);
}

#[test]
fn one_vector() {
    gives(&[127.0, -63.5, 0.0, 254.0], 1, 4, &[1.0, 0.5, 1.0 / 127.0, 2.0], &[127, -127, 0, 127]);
}

#[test]
fn a_matrix_by_hand() {
    // Columns with maxima 127 and 12.7; 3.2 / 0.1 is a little over 32.
    let scales = [1.0, 12.7 / 127.0];
    gives(&[127.0, 12.7, -1.4, -12.7, 63.6, 3.2], 3, 2, &scales, &[127, 127, -1, -127, 64, 32]);
}

#[test]
fn zeros_ones_and_alternating_signs() {
    gives(&[0.0; 24], 6, 4, &[1.0 / 127.0; 4], &[0; 24]);
    gives(&[-0.0; 24], 6, 4, &[1.0 / 127.0; 4], &[0; 24]);
    gives(&[1.0; 24], 6, 4, &[1.0 / 127.0; 4], &[127; 24]);
    let signs: Vec<f32> = (0..24).map(|i| if i % 2 == 0 { 1.0 } else { -1.0 }).collect();
    let codes: Vec<i8> = signs.iter().map(|x| *x as i8 * 127).collect();
    gives(&signs, 6, 4, &[1.0 / 127.0; 4], &codes);
}

#[test]
fn small_columns_keep_their_range() {
    // The authors' code takes any column under 1e-8 for zeros; here only zeros are, and a scale is never
    // subnormal.
    gives(&[1e-9, -5e-10], 2, 1, &[1e-9 / 127.0], &[127, -64]);
    gives(&[1e-45, 0.0], 2, 1, &[f32::MIN_POSITIVE], &[0, 0]);
    gives(&[1e-36, -1e-38], 2, 1, &[f32::MIN_POSITIVE], &[85, -1]);
}

#[test]
fn what_is_not_finite_saturates() {
    gives(&[f32::NAN, 2.0, -1.0], 3, 1, &[2.0 / 127.0], &[0, 127, -64]);
    gives(&[f32::NAN; 4], 4, 1, &[1.0 / 127.0], &[0; 4]);
    let scale = f32::LARGEST / 127.0;
    gives(&[f32::INFINITY, f32::NEG_INFINITY, 1.0, -f32::MAX], 4, 1, &[scale], &[127, -127, 0, -127]);
    for (name, output) in all(&[f32::INFINITY, f32::NAN, 7.0], Matrix::new(3, 1).unwrap(), false) {
        assert!(output.restored.iter().all(|x| x.is_finite()), "{name}");
    }
}

#[test]
fn every_f16_and_bf16_value() {
    let every: Vec<u16> = (0..=u16::MAX).collect();
    for channels in [1, 64] {
        let matrix = Matrix::new(65536 / channels, channels).unwrap();
        holds::<f16>(&every.iter().map(|b| f16::from_bits(*b)).collect::<Vec<_>>(), matrix);
        holds::<bf16>(&every.iter().map(|b| bf16::from_bits(*b)).collect::<Vec<_>>(), matrix);
    }
}

#[test]
fn a_matrix_against_itself_has_no_error() {
    let values: Vec<f32> = (0..60).map(|i| (i as f32).sin()).collect();
    let matrix = Matrix::new(15, 4).unwrap();
    let errors = metrics::errors(&values, &values, matrix, &[1.0; 4]);
    assert_eq!((errors.max_abs, errors.bound_ratio, errors.l2, errors.mean_abs), (0.0, 0.0, 0.0, 0.0));
    assert_eq!(metrics::attention_error(&[0.5; 8], &values, &values, matrix), 0.0);
}

#[test]
fn metrics_by_hand() {
    let matrix = Matrix::new(2, 2).unwrap();
    let (original, restored) = ([1f32, 2.0, 3.0, 4.0], [1f32, 2.5, 3.0, 2.0]);
    let errors = metrics::errors(&original, &restored, matrix, &[2.0, 4.0]);
    assert_eq!((errors.max_abs, errors.l2, errors.mean_abs), (2.0, 4.25f64.sqrt(), 0.625));
    assert!((errors.bound_ratio - 2.0 / (2.0 * (1.0 + 1.0 / 32768.0))).abs() < 1e-12);
    // What is not finite does not count, and what should be and is not counts as infinitely wrong.
    let errors = metrics::errors(&[f32::NAN, 2.0], &[0.0, 2.5], Matrix::new(2, 1).unwrap(), &[2.0]);
    assert_eq!((errors.max_abs, errors.mean_abs), (0.5, 0.5));
    let errors = metrics::errors(&[1f32, 2.0], &[f32::NAN, 2.0], Matrix::new(2, 1).unwrap(), &[2.0]);
    assert_eq!((errors.max_abs, errors.bound_ratio), (f64::INFINITY, f64::INFINITY));
    // q = (1, 2): differences of the two scores are -1 and 4.
    assert_eq!(metrics::attention_error(&[1.0, 2.0], &original, &restored, matrix), 2.5);
}

#[test]
fn l2_grows_past_what_an_f32_sum_can_hold() {
    // 2^25 equal errors of 2^-7: an f32 running sum of squares would stop at 2^-14 * 2^24.
    let n = 1 << 25;
    let matrix = Matrix::new(n / 64, 64).unwrap();
    let errors = metrics::errors(&vec![0f32; n], &vec![1.0 / 128.0; n], matrix, &[1.0; 64]);
    assert_eq!(errors.l2, (n as f64).sqrt() / 128.0);
}

#[test]
fn uniform_data_has_the_paper_s_errors() {
    // U(-1, 1): the error is uniform in ±s/2, so L2 is √(T·D)·s/√12 and the attention error of U(-1, 1)
    // queries √(D/3)·s/√12·√(2/π): the paper's .0119 at D = 128. Sampling noise here is under 1 %.
    let matrix = Matrix::new(16384, 128).unwrap();
    let mut state = 0x2545_f491_4f6c_dd1du64;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let keys: Vec<f32> = (0..matrix.elements()).map(|_| uniform()).collect();
    let queries: Vec<f32> = (0..8 * 128).map(|_| uniform()).collect();
    let output = simd(&keys, matrix, false);
    let errors = metrics::errors(&keys, &output.restored, matrix, &output.scales);
    let scale = 1.0 / 127.0;
    let l2 = (matrix.elements() as f64).sqrt() * scale / 12f64.sqrt();
    assert!((errors.l2 / l2 - 1.0).abs() < 0.01, "{} for {l2}", errors.l2);
    let attention = (128f64 / 3.0).sqrt() * scale / 12f64.sqrt() * (2.0 / std::f64::consts::PI).sqrt();
    let got = metrics::attention_error(&queries, &keys, &output.restored, matrix);
    // Eight queries: the norm of each is itself random, ± 5 % for the mean.
    assert!((got / attention - 1.0).abs() < 0.06, "{got} for {attention}");
}
