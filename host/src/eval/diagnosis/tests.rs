//! Measures of made-up layers whose answers are known.

use super::*;
use crate::attention::rope::Pairing;
use crate::kv::restored::{Coded, Side};

const DIM: usize = 4;

fn halves(numbers: &[f32]) -> Vec<f16> {
    numbers.iter().map(|x| f16::from_f32(*x)).collect()
}

/// A layer of one KV head, whose queries are of the last tokens.
struct Made {
    keys: Vec<f16>,
    values: Vec<f16>,
    queries: Vec<f16>,
    positions: Vec<usize>,
    rope: Option<Rope>,
}

impl Made {
    fn new(keys: &[f32], values: &[f32], queries: &[f32]) -> Self {
        let (tokens, asking) = (keys.len() / DIM, queries.len() / DIM);
        Made {
            keys: halves(keys),
            values: halves(values),
            queries: halves(queries),
            positions: (tokens - asking..tokens).collect(),
            rope: None,
        }
    }

    fn layer(&self) -> Layer<'_> {
        Layer {
            geometry: Geometry { layers: 1, q_heads: 1, kv_heads: 1, head_dim: DIM },
            original: Original { layer: 0, keys: &self.keys, values: &self.values },
            queries: &self.queries,
            positions: &self.positions,
            rope: self.rope.as_ref(),
        }
    }

    /// Itself with an error added to each number of keys and of values.
    fn moved(&self, keys: impl Fn(usize) -> f32, values: impl Fn(usize) -> f32, coded: Coded) -> Restored {
        let side = |rows: &[f16], error: &dyn Fn(usize) -> f32| {
            let rows = rows.iter().enumerate().map(|(at, x)| x.to_f32() + error(at));
            Side { rows: rows.collect(), bytes: 1.0, coded }
        };
        Restored { keys: side(&self.keys, &keys), values: side(&self.values, &values) }
    }
}

/// Numbers without a pattern.
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut random = crate::eval::Random::new(seed);
    (0..count).map(|_| random.uniform() as f32 * 2.0 - 1.0).collect()
}

#[test]
fn what_is_restored_as_it_was_has_no_error() {
    let mut made = Made::new(&numbers(40 * DIM, 1), &numbers(40 * DIM, 2), &numbers(3 * DIM, 3));
    made.rope = Some(Rope { pairing: Pairing::HalfSplit, rotary: 4, frequencies: vec![1.0, 0.1] });
    let samples = Exact::new(made.layer()).judge(&made.moved(|_| 0.0, |_| 0.0, Coded::ALL));
    let zero = Sample {
        token: 37,
        q_head: 0,
        logit: 0.0,
        offsets: Some(0.0),
        divergence: 0.0,
        overlap: 1.0,
        output: 0.0,
        values: 0.0,
    };
    assert_eq!(samples, [37, 38, 39].map(|token| Sample { token, ..zero }));
}

/// An error that is the same in all keys moves all logits by as much: the softmax does not see it.
#[test]
fn a_shift_of_all_logits_is_an_error_of_logits_alone() {
    let made = Made::new(&numbers(40 * DIM, 1), &numbers(40 * DIM, 2), &[2.0, -1.0, 0.5, 4.0]);
    let shift = |at: usize| [0.5, 0.25, -1.0, 0.125][at % DIM];
    let samples = Exact::new(made.layer()).judge(&made.moved(shift, |_| 0.0, Coded::ALL));
    let [sample] = samples[..] else { panic!("{samples:?}") };
    assert!((sample.logit - 0.75).abs() < 1e-6, "{sample:?}");
    assert!(sample.divergence < 1e-9 && sample.output < 1e-6 && sample.overlap == 1.0, "{sample:?}");
    assert_eq!((sample.offsets, sample.values), (None, 0.0));
}

/// Products 0 and 2·ln 3, over √4: weights of a quarter and three quarters. An error of the second key makes
/// them equal, one of the first value moves that from 4 to 8.
#[test]
fn measures_by_hand() {
    let ln3 = 3f32.ln();
    let mut keys = [0.0; 2 * DIM];
    keys[DIM] = 2.0 * ln3;
    let mut values = [0.0; 2 * DIM];
    (values[0], values[DIM]) = (4.0, 8.0);
    let made = Made::new(&keys, &values, &[1.0, 0.0, 0.0, 0.0]);
    let product = made.keys[DIM].to_f32();
    let restored = made.moved(
        |at| if at == DIM { -product } else { 0.0 },
        |at| if at == 0 { 4.0 } else { 0.0 },
        Coded::ALL,
    );
    let samples = Exact::new(made.layer()).judge(&restored);
    let [sample] = samples[..] else { panic!("{samples:?}") };
    let close =
        |found: f64, expected: f64| assert!((found - expected).abs() < 2e-3, "{found} for {expected}");
    close(sample.logit, f64::from(ln3));
    close(sample.divergence, 0.25 * 0.5f64.ln() + 0.75 * 1.5f64.ln());
    // 7 exactly; 8 with both values 8, whatever the weights.
    close(sample.output, 1.0 / 7.0);
    close(sample.values, 1.0 / 7.0);
    assert_eq!(sample.overlap, 1.0);
}

#[test]
fn of_equal_products_the_first_are_on_top() {
    assert_eq!(largest(&[1.0; 14]), (0..10).collect::<Vec<_>>());
    assert_eq!(largest(&[0.0, 2.0, 1.0, 2.0]), [1, 3, 2, 0]);
    let mut products: Vec<f32> = (0..30).map(|i| (i % 15) as f32).collect();
    assert_eq!(largest(&products), [14, 29, 13, 28, 12, 27, 11, 26, 10, 25]);
    products.rotate_left(1);
    assert_eq!(largest(&products)[..4], [13, 28, 12, 27]);
    assert!(largest(&[]).is_empty());
}

/// Twenty keys whose products fall from 20 to 1; codes push the fourth to the end.
#[test]
fn overlap_is_the_share_that_stays_on_top() {
    let keys: Vec<f32> = (0..20).flat_map(|i| [20.0 - i as f32, 0.0, 0.0, 0.0]).collect();
    let made = Made::new(&keys, &numbers(20 * DIM, 2), &[1.0, 0.0, 0.0, 0.0]);
    let samples = Exact::new(made.layer()).judge(&made.moved(
        |at| if at == 3 * DIM { -30.0 } else { 0.0 },
        |_| 0.0,
        Coded::ALL,
    ));
    assert_eq!(samples[0].overlap, 0.9);
}

/// 21 tokens: a query of the last sees 16 from codes, one of token 14 none.
#[test]
fn tokens_that_are_read_as_they_were_have_no_error() {
    let queries: Vec<f32> = [[1.0, 0.0, 0.0, 0.0]; 7].concat();
    let made = Made::new(&numbers(21 * DIM, 1), &numbers(21 * DIM, 2), &queries);
    let coded = Coded { block: 16, kept: 0, front: 0, extra: 0 };
    let samples = Exact::new(made.layer()).judge(&made.moved(|_| 1.0, |_| 1.0, coded));
    let (before, after) = (samples[0], samples[6]);
    assert_eq!((before.token, after.token), (14, 20));
    assert_eq!((before.logit, before.output, before.values), (0.0, 0.0, 0.0));
    assert!(
        (after.logit - 16.0 / 21.0).abs() < 1e-6 && after.output > 0.0 && after.values > 0.0,
        "{after:?}"
    );
}

/// Query heads share the KV head of their group.
#[test]
fn heads_have_errors_of_their_own_kv_head() {
    let (tokens, q_heads, kv_heads) = (5, 4, 2);
    let keys = halves(&numbers(tokens * kv_heads * DIM, 1));
    let queries = halves(&[[1.0, 0.0, 0.0, 0.0]; 4].concat());
    let layer = Layer {
        geometry: Geometry { layers: 1, q_heads, kv_heads, head_dim: DIM },
        original: Original { layer: 0, keys: &keys, values: &keys },
        queries: &queries,
        positions: &[4],
        rope: None,
    };
    let rows = |error: f32| {
        let moved = keys.iter().enumerate();
        moved.map(|(at, x)| x.to_f32() + if at / DIM % 2 == 1 { error } else { 0.0 }).collect()
    };
    let side = |error| Side { rows: rows(error), bytes: 1.0, coded: Coded::ALL };
    let samples = Exact::new(layer).judge(&Restored { keys: side(0.5), values: side(0.0) });
    let logits: Vec<f64> = samples.iter().map(|sample| (sample.logit * 1e3).round() / 1e3).collect();
    assert_eq!(logits, [0.0, 0.0, 0.5, 0.5]);
    assert_eq!(samples.iter().map(|sample| sample.q_head).collect::<Vec<_>>(), [0, 1, 2, 3]);
}

/// An error that RoPE has turned with its key: before RoPE it is (1, 0), in a pair that turns by 0.3 a
/// position. Whatever the query's direction, at distance Δ it is off by abs(cos(0.3·Δ + φ)).
#[test]
fn distances_turn_the_query() {
    let rotary = 2;
    let (frequency, tokens) = (0.3f64, 9);
    let query = [0.6, 0.8, 0.0, 0.0];
    let mut made = Made::new(&numbers(tokens * DIM, 1), &numbers(tokens * DIM, 2), &query);
    made.rope = Some(Rope { pairing: Pairing::Interleaved, rotary, frequencies: vec![frequency as f32] });
    let turned = |at: usize| {
        let angle = frequency * (at / DIM) as f64;
        [angle.cos(), angle.sin(), 0.0, 0.0][at % DIM] as f32
    };
    let sample = Exact::new(made.layer()).judge(&made.moved(turned, |_| 0.0, Coded::ALL))[0];
    // The query's direction before RoPE: at token 8 it has turned by 8 times the frequency.
    let direction = 0.8f64.atan2(0.6) - 8.0 * frequency;
    let of = |i: usize| {
        let distance = -1024.0 + 2048.0 * i as f64 / 49.0;
        (frequency * distance + direction).cos().abs()
    };
    let expected = (0..50).map(of).sum::<f64>() / 50.0;
    let found = sample.offsets.expect("RoPE is known");
    assert!((found - expected).abs() < 2e-3, "{found} for {expected}");
    // Of channels that do not turn every distance is alike.
    let still = |at: usize| if at % DIM == 2 { 1.0 } else { 0.0 };
    made.queries = halves(&[0.0, 0.0, -0.75, 0.0]);
    let sample = Exact::new(made.layer()).judge(&made.moved(still, |_| 0.0, Coded::ALL))[0];
    assert!((sample.offsets.expect("known") - 0.75).abs() < 1e-3 && (sample.logit - 0.75).abs() < 1e-3);
    // Of no codes there is nothing to say.
    let none = made.moved(still, |_| 0.0, Coded { block: 16, kept: 0, front: 0, extra: 0 });
    assert_eq!(Exact::new(made.layer()).judge(&none)[0].offsets, None);
}

#[test]
fn samples_are_summed_up_with_intervals() {
    let sample = |divergence: f64, offsets| Sample {
        token: 0,
        q_head: 0,
        logit: 2.0,
        offsets,
        divergence,
        overlap: 0.5,
        output: 0.25,
        values: 0.125,
    };
    let summary = summarize(&[0.0, 1.0, 2.0, 3.0].map(|x| sample(x, Some(x))), 1);
    assert_eq!((summary.samples, summary.divergence.mean, summary.logit.mean), (4, 1.5, 2.0));
    let interval = summary.divergence.interval.expect("of four");
    assert!(interval.low < 1.0 && interval.high > 2.0, "{interval:?}");
    assert_eq!(summary.offsets, Some(summary.divergence));
    assert_eq!((summary.overlap.mean, summary.output.mean, summary.values.mean), (0.5, 0.25, 0.125));
    let one = summarize(&[sample(1.0, None)], 1);
    assert_eq!((one.offsets, one.divergence.interval), (None, None));
    assert!(summarize(&[], 1).logit.mean.is_nan());
}
