//! Fixed point: its digits, its error, and the three sources on every path.

use super::{Numbers, emulator};
use host::Buffer;
use host::model::cpu::{self, Level, Source};
use host::model::kernels::{quantize, record_words};
use host::model::linear::Input;
use kernels_gpu::model::fixed::{Part, Record, digits, undo_digits};
use proptest::prelude::*;

const ZERO: Record = [Part { high: [0; 8], middle: [0; 8], low: [0; 8], step: 0.0, sum: 0.0 }; 4];

fn on_path(level: Level, source: Source<'_>, tokens: usize, columns: usize) -> Vec<Record> {
    let mut records = vec![ZERO; tokens * columns / 32];
    cpu::quantize_at(level, source, columns, &mut records);
    records
}

/// X of a record's 32 channels.
fn fixed(record: &Record) -> Vec<i32> {
    record
        .iter()
        .flat_map(|part| {
            (0..8).map(|i| undo_digits([part.high[i], part.middle[i], part.low[i]].map(i32::from)))
        })
        .collect()
}

fn check(x: &[f32], weight: &[f32], tokens: usize, columns: usize) {
    let (device, stream) = emulator();
    let (values, weights) =
        (Buffer::from_slice(&device, x).unwrap(), Buffer::from_slice(&device, weight).unwrap());
    let run = |input, tokens| {
        let mut words = Buffer::<u32>::new(&device, record_words(tokens, columns)).unwrap();
        // SAFETY: the buffers have the lengths that tokens and columns ask for.
        unsafe { quantize(&stream, input, words.global_mut(), tokens, columns) }.unwrap();
        words.to_vec().unwrap()
    };
    let normed = run(Input::Normed { x: values.global(), weight: weights.global(), epsilon: 1e-5 }, tokens);
    let plain = run(Input::Plain { x: values.global() }, tokens);
    let gated = run(Input::Gated { x: values.global() }, tokens / 2);
    for level in Level::available() {
        let words = |source, tokens| {
            bytemuck::cast_slice::<Record, u32>(&on_path(*level, source, tokens, columns)).to_vec()
        };
        assert_eq!(words(Source::Plain(x), tokens), plain, "{level:?}");
        assert_eq!(words(Source::Normed { x, weight, epsilon: 1e-5 }, tokens), normed, "{level:?}, RMSNorm");
        assert_eq!(words(Source::Gated(x), tokens / 2), gated, "{level:?}, SwiGLU");
    }
}

#[test]
fn every_path_has_the_kernels_bits() {
    for (tokens, columns) in [(2, 32), (4, 96), (2, 576), (2, 1024), (2, 1536), (6, 1056), (2, 4128)] {
        let mut numbers = Numbers::new(columns as u64);
        let weight = numbers.values(columns, 2.0);
        check(&numbers.values(tokens * columns, 20.0), &weight, tokens, columns);
        let wild: Vec<f32> = (0..tokens * columns).map(|_| numbers.wild()).collect();
        check(&wild, &weight, tokens, columns);
        let tiny: Vec<f32> = numbers.values(tokens * columns, 1e-38);
        check(&tiny, &weight, tokens, columns);
    }
}

#[test]
fn digits_cover_the_range() {
    for x in (-2_084_864..=2_084_864).step_by(7).chain([-2_084_864, 2_084_864, 0, 8127, 8128, -8256, -8257]) {
        let [a, b, c] = digits(x);
        assert_eq!(undo_digits([a, b, c]), x);
        assert!((-127..=127).contains(&a) && (-64..=63).contains(&b) && (-64..=63).contains(&c), "{x}");
    }
}

proptest! {
    #[test]
    fn fixed_point_is_within_half_a_step(
        values in prop::collection::vec(any::<f32>().prop_filter("finite", |x| x.is_finite()), 32),
    ) {
        let record = on_path(Level::best(), Source::Plain(&values), 1, 32)[0];
        let step = f64::from(record[0].step);
        let largest = values.iter().fold(0f64, |m, x| m.max(f64::from(x.abs())));
        prop_assert!(step <= (largest * 2f64.powi(-19)).max(2f64.powi(-126)), "a step of {step:e} for {largest:e}");
        let fixed = fixed(&record);
        for (x, fixed) in values.iter().zip(&fixed) {
            prop_assert!(fixed.abs() <= 2_084_864);
            prop_assert!((f64::from(*x) - step * f64::from(*fixed)).abs() <= step / 2.0);
        }
        let sum = step * f64::from(fixed.iter().sum::<i32>());
        let error = (f64::from(record[0].sum) - sum).abs();
        // Values near f32's largest may have a sum beyond it.
        prop_assert!(sum.abs() > f64::from(f32::MAX) || error <= sum.abs() * 2f64.powi(-23) + 2f64.powi(-149));
    }

    #[test]
    fn norms_and_gates_are_the_formulas(
        seed: u64, blocks in 1usize..40, exponent in -20i32..20,
    ) {
        let columns = blocks * 32;
        let mut numbers = Numbers::new(seed);
        let x = numbers.values(2 * columns, 2f64.powi(exponent) as f32);
        let weight = numbers.values(columns, 2.0);
        let restored = |source| -> Vec<(f64, f64)> {
            let records = on_path(Level::best(), source, 1, columns);
            let value = |record: &Record| {
                let step = f64::from(record[0].step);
                fixed(record).into_iter().map(move |x| (step * f64::from(x), step / 2.0)).collect::<Vec<_>>()
            };
            records.iter().flat_map(value).collect()
        };
        let squares: f64 = x[..columns].iter().map(|x| f64::from(*x).powi(2)).sum();
        let factor = 1.0 / (squares / columns as f64 + f64::from(1e-5f32)).sqrt();
        let normed = restored(Source::Normed { x: &x[..columns], weight: &weight, epsilon: 1e-5 });
        for (((y, half), x), w) in normed.into_iter().zip(&x).zip(&weight) {
            let exact = f64::from(*x) * factor * f64::from(*w);
            // A chain of columns / 1024 squares, 10 additions, a division, an addition, 1.5 for the root, two
            // products.
            let rounding = (columns as f64 / 1024.0 + 16.0) * 2f64.powi(-24) * exact.abs();
            prop_assert!((y - exact).abs() <= half + rounding, "{y:e} for {exact:e}");
        }
        for (((y, half), g), u) in restored(Source::Gated(&x)).into_iter().zip(&x).zip(&x[columns..]) {
            let (g, u) = (f64::from(*g), f64::from(*u));
            let exact = g / (1.0 + (-g).exp()) * u;
            // The exponential: a rounded argument of g·log2(e) and one ULP; an addition, a division, a
            // product.
            let rounding = (g.abs() * 1.5 + 6.0) * 2f64.powi(-24) * exact.abs() + 1e-37 * (1.0 + u.abs());
            prop_assert!((y - exact).abs() <= half + rounding, "{y:e} for {exact:e}");
        }
    }
}
