//! The choice of a token.

use super::{Numbers, emulator};
use host::Buffer;
use host::model::cpu;
use host::model::kernels::{Choice, Choosing, choose};
use kernels_gpu::model::random::philox;
use proptest::prelude::*;

/// The kernel's tokens, after a look at the positions.
fn on_emulator(choice: Choice, logits: &[f32], position: u32, sequences: usize) -> Vec<u32> {
    let (device, stream) = emulator();
    let buffer = Buffer::from_slice(&device, logits).unwrap();
    let mut tokens = Buffer::from_slice(&device, &vec![u32::MAX; sequences]).unwrap();
    let mut positions = Buffer::from_slice(&device, &vec![position; sequences]).unwrap();
    let vocabulary = logits.len() / sequences;
    let numbers = Buffer::from_slice(&device, &(0..sequences as u32).collect::<Vec<_>>()).unwrap();
    let rows = Choosing {
        logits: buffer.global(),
        numbers: numbers.global(),
        tokens: tokens.global_mut(),
        positions: positions.global_mut(),
    };
    // SAFETY: `vocabulary` logits for each sequence.
    unsafe { choose(&stream, choice, rows, sequences, vocabulary) }.unwrap();
    assert_eq!(positions.to_vec().unwrap(), vec![position.wrapping_add(1); sequences]);
    tokens.to_vec().unwrap()
}

fn check(choice: Choice, logits: &[f32], position: u32, sequences: usize) -> Vec<u32> {
    let vocabulary = logits.len() / sequences;
    let expected: Vec<u32> = logits
        .chunks(vocabulary)
        .enumerate()
        .map(|(i, logits)| cpu::choose(choice, logits, position, i as u32).unwrap())
        .collect();
    assert_eq!(on_emulator(choice, logits, position, sequences), expected, "{choice:?}");
    expected
}

const NAN: f32 = f32::NAN;
const INF: f32 = f32::INFINITY;

#[test]
fn the_largest_logit_wins_and_the_lowest_index_among_equals() {
    let cases: [(&[f32], u32); 8] = [
        (&[1.0, 3.0, 2.0], 1),
        (&[3.0, 3.0, 3.0], 0),
        (&[-0.0, 0.0], 0),
        (&[-5.0, -1.0, -1.0], 1),
        (&[NAN, -INF, NAN], 1),
        (&[NAN, NAN], 0),
        (&[0.0, INF, INF], 1),
        (&[-NAN, f32::MIN], 1),
    ];
    for (logits, token) in cases {
        assert_eq!(check(Choice::Greedy, logits, 4, 1), [token], "{logits:?}");
        // A draw from what is left of the nucleus by the smallest p.
        let sampled = Choice::Sampled { temperature: 1e-3, top_p: 1e-6, seed: 1 };
        let nucleus = check(sampled, logits, 4, 1)[0] as usize;
        assert!(logits[nucleus] == logits[token as usize] || logits[nucleus].is_nan());
    }
    for (length, at) in [(5000, 4097), (16_384, 16_383), (20_000, 16_384), (40_000, 39_999)] {
        let mut long = vec![-INF; length];
        assert_eq!(check(Choice::Greedy, &long, 0, 1), [0]);
        long[at] = f32::MIN;
        assert_eq!(check(Choice::Greedy, &long, 0, 1), [at as u32]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn choices_are_those_of_the_kernels(
        vocabulary in 1usize..3000,
        sequences in 1usize..3,
        temperature in 0.01f32..5.0,
        top_p in 0.001f32..=1.0,
        position: u32,
        wild: bool,
        seed: u64,
    ) {
        let mut numbers = Numbers::new(seed);
        let mut logit = || if wild { numbers.wild() } else { numbers.uniform() * 8.0 };
        let logits: Vec<f32> = (0..vocabulary * sequences).map(|_| logit()).collect();
        check(Choice::Greedy, &logits, position, sequences);
        check(Choice::Sampled { temperature, top_p, seed }, &logits, position, sequences);
    }
}

/// Draws follow the distribution: counts within five standard deviations of a binomial.
#[test]
fn draws_follow_the_probabilities_and_stay_in_the_nucleus() {
    let probabilities = [0.5f64, 0.25, 0.125, 0.0625, 0.0625];
    let logits: Vec<f32> = probabilities.iter().map(|p| p.ln() as f32).collect();
    let draws = 20_000;
    for (top_p, inside) in [(1.0, 5), (0.7, 2), (0.876, 5)] {
        let mass: f64 = probabilities[..inside].iter().sum();
        let mut counts = [0u32; 5];
        for position in 0..draws {
            let choice = Choice::Sampled { temperature: 1.0, top_p, seed: 11 };
            counts[cpu::choose(choice, &logits, position, 0).unwrap() as usize] += 1;
        }
        for (i, count) in counts.iter().enumerate() {
            let p = if i < inside { probabilities[i] / mass } else { 0.0 };
            let mean = f64::from(draws) * p;
            let deviation = (mean * (1.0 - p)).sqrt();
            assert!((f64::from(*count) - mean).abs() <= 5.0 * deviation, "{top_p}: {counts:?}");
        }
    }
}

#[test]
fn philox_gives_the_published_numbers() {
    assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
    assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
    let pi = philox([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]);
    assert_eq!(pi, [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
}

#[test]
fn numbers_without_meaning_are_refused() {
    let refuse = |temperature, top_p, part: &str| {
        let error = cpu::choose(Choice::Sampled { temperature, top_p, seed: 0 }, &[0.0], 0, 0).unwrap_err();
        assert!(error.to_string().contains(part), "{error}");
    };
    refuse(0.0, 1.0, "temperature is 0");
    refuse(-1.0, 1.0, "temperature is -1");
    refuse(NAN, 1.0, "temperature is NaN");
    refuse(1e-44, 1.0, "temperature is");
    refuse(1.0, 0.0, "top-p is 0");
    refuse(1.0, 1.1, "top-p is 1.1");
    refuse(1.0, NAN, "top-p is NaN");
    assert!(cpu::choose(Choice::Greedy, &[], 0, 0).unwrap_err().to_string().contains("the vocabulary is 0"));
}
