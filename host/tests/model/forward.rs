//! The forward pass: against the oracle, in chunks of any length, and by kernels as by the CPU's own path.

use super::fetched;
use host::dense::DenseCache;
use host::kv::{self, Chunk, KvCache, New, Rotated};
use host::model::config::Architecture;
use host::model::forward::{Error, Runner};
use host::model::kernels::Choice;
use host::model::oracle::{DenseKeyValues, Oracle};
use host::model::synthetic::{self, Packing};
use host::model::{Error as ModelError, Model};
use host::{Device, Stream};
use simt::emu::EmuOptions;

fn device() -> Device {
    Device::cpu(EmuOptions::default())
}

fn tiny(architecture: Architecture, packing: Packing) -> Model {
    synthetic::model(synthetic::tiny(architecture), packing, 11).expect("a model")
}

fn dense(model: &Model, device: &Device, capacity: usize) -> DenseCache {
    DenseCache::new(device, (&model.config).into(), capacity).expect("a cache")
}

/// Tokens without a pattern.
fn tokens(count: usize, vocab: usize) -> Vec<u32> {
    (0..count).map(|i| ((i * i * 31 + i * 17 + 5) % vocab) as u32).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Logits of runs of tokens of these lengths, one after another.
fn in_pieces(runner: &mut Runner, mut cache: DenseCache, tokens: &[u32], pieces: &[usize]) -> Vec<f32> {
    let mut rest = tokens;
    let mut logits = Vec::new();
    for piece in pieces.iter().cycle() {
        let (chunk, later) = rest.split_at((*piece).min(rest.len()));
        if chunk.is_empty() {
            break;
        }
        logits.extend(runner.logits(chunk, &mut cache).expect("logits"));
        rest = later;
    }
    assert_eq!(cache.tokens(), tokens.len());
    logits
}

/// The largest difference from the oracle, in standard deviations of the logits.
fn distance(model: &Model, device: &Device, tokens: &[u32]) -> f64 {
    let mut runner = Runner::new(model, device).expect("a runner");
    let logits = runner.logits(tokens, &mut dense(model, device, tokens.len())).expect("logits");
    let mut held = DenseKeyValues::new(&model.config);
    let expected = Oracle::new(model).forward(tokens, &mut held).expect("logits");
    assert_eq!(logits.len(), expected.len());
    let squares: f64 = expected.iter().map(|x| x * x).sum();
    let size = (squares / expected.len() as f64).sqrt();
    let differences = logits.iter().zip(&expected).map(|(a, b)| (f64::from(*a) - b).abs());
    differences.fold(0.0, f64::max) / size
}

/// Attention's inputs are rounded to f16, by 2^−11 each, in both layers; what f32 and fixed point add is a
/// hundredth of it or less. The largest difference measured is 3.6e-3 of the logits' size.
#[test]
fn logits_are_those_of_the_oracle() {
    let device = device();
    for architecture in Architecture::ALL {
        for packing in [Packing::Q4_1, Packing::Q8_0, Packing::F32] {
            let model = tiny(architecture, packing);
            let distance = distance(&model, &device, &tokens(90, model.config.vocab));
            assert!(distance < 1e-2, "{architecture:?} {packing:?}: {distance:e}");
        }
    }
}

#[test]
fn chunks_of_any_length_give_the_same_bits() {
    let device = device();
    for architecture in Architecture::ALL {
        let model = tiny(architecture, Packing::Q4_1);
        let tokens = tokens(50, model.config.vocab);
        let mut runner = Runner::new(&model, &device).expect("a runner");
        let mut run = |pieces: &[usize]| in_pieces(&mut runner, dense(&model, &device, 64), &tokens, pieces);
        let one_by_one = bits(&run(&[1]));
        for pieces in [&[50][..], &[7, 1, 16, 3], &[15, 2]] {
            assert!(bits(&run(pieces)) == one_by_one, "{architecture:?}, chunks of {pieces:?}");
        }
    }
}

#[test]
fn prompts_of_panels_have_the_bits_of_the_cpus_own_path() {
    let device = device();
    for packing in [Packing::Q4_1, Packing::Q8_0] {
        let model = tiny(Architecture::Llama, packing);
        // More than one panel of 64, and fewer than 33 in the last chunk, which takes records.
        let tokens = tokens(90, model.config.vocab);
        let mut own = Runner::new(&model, &device).expect("a runner");
        let mut kernels = Runner::of_kernels(&model, &device, 80).expect("a runner");
        assert!(kernels.set_panels_from(33), "the emulated GPU has the kernel");
        let pieces = [70, 20];
        let expected = in_pieces(&mut own, dense(&model, &device, 128), &tokens, &pieces);
        let found = in_pieces(&mut kernels, dense(&model, &device, 128).with_kernels(), &tokens, &pieces);
        assert!(bits(&found) == bits(&expected), "{packing:?}");
    }
}

/// To a cache a chunk of one token is a step of decoding.
#[test]
fn no_chunk_is_a_step() {
    let runner =
        Runner::of_kernels(&tiny(Architecture::Llama, Packing::Q8_0), &device(), 64).expect("a runner");
    let lengths = |count: usize| {
        let (tokens, mut lengths) = (vec![1; count], Vec::new());
        let mut rest = &tokens[..];
        while let Some((chunk, later)) = runner.split(rest) {
            lengths.push(chunk.len());
            rest = later;
        }
        lengths
    };
    assert_eq!(lengths(150), [64, 64, 22]);
    assert_eq!(lengths(129), [64, 63, 2]);
    assert_eq!(lengths(65), [63, 2]);
    assert_eq!((lengths(64), lengths(1), lengths(0)), (vec![64], vec![1], vec![]));
}

#[test]
fn kernels_give_the_bits_of_the_cpus_own_path() {
    let device = device();
    for (architecture, packing) in [
        (Architecture::Llama, Packing::Q4_1),
        (Architecture::Qwen2, Packing::Q8_0),
        (Architecture::Llama, Packing::F32),
    ] {
        let model = tiny(architecture, packing);
        let tokens = tokens(21, model.config.vocab);
        let mut own = Runner::new(&model, &device).expect("a runner");
        let mut kernels = Runner::of_kernels(&model, &device, 9).expect("a runner");
        // Chunks of one to nine tokens: fused products, matrix-vector products over records, tensor cores.
        let pieces = [1, 9, 3, 8];
        let expected = in_pieces(&mut own, dense(&model, &device, 64), &tokens, &pieces);
        let found = in_pieces(&mut kernels, dense(&model, &device, 64).with_kernels(), &tokens, &pieces);
        assert!(bits(&found) == bits(&expected), "{architecture:?} {packing:?}");

        for choice in [Choice::Greedy, Choice::Sampled { temperature: 2.0, top_p: 0.9, seed: 3 }] {
            let continued = |runner: &mut Runner, mut cache: DenseCache| {
                let mut chosen = vec![runner.prefill(&tokens[..12], &mut cache, choice).expect("a token")];
                for i in 0..4 {
                    chosen.push(runner.step(chosen[i], &mut cache, choice).expect("a token"));
                }
                chosen
            };
            let cache = || dense(&model, &device, 64);
            let expected = continued(&mut own, cache());
            assert_eq!(continued(&mut kernels, cache().with_kernels()), expected, "{choice:?}");
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_before_anything_changes() {
    let device = device();
    let model = tiny(Architecture::Llama, Packing::Q8_0);
    let mut runner = Runner::new(&model, &device).expect("a runner");
    let mut cache = dense(&model, &device, 5);
    let choice = Choice::Greedy;
    let first = runner.prefill(&[1, 2, 3], &mut cache, choice).expect("a token");
    for (tokens, words) in [
        (&[][..], "at least one"),
        (&[1, 2, 3][..], "3 tokens more do not fit a cache that has 3 of 5"),
        (&[1, 320][..], "no token 320"),
    ] {
        let error = runner.prefill(tokens, &mut cache, choice).expect_err("refused").to_string();
        assert!(error.contains(words) && error.lines().count() == 1, "{error}");
        assert_eq!(cache.tokens(), 3);
    }
    let nan = Choice::Sampled { temperature: f32::NAN, top_p: 1.0, seed: 0 };
    assert!(matches!(runner.step(first, &mut cache, nan), Err(Error::Linear(_))));
    assert_eq!(cache.bytes(), 3 * 2 * 2 * 2 * 128);
    // What was there is still right.
    let again = runner.prefill(&[1, 2, 3], &mut dense(&model, &device, 5), choice).expect("a token");
    assert_eq!(first, again);
    let next = runner.step(first, &mut cache, choice).expect("a token");
    let whole = runner.prefill(&[1, 2, 3, first], &mut dense(&model, &device, 5), choice).expect("a token");
    assert_eq!(next, whole);

    let mut long = dense(&model, &device, 600);
    let error = runner.prefill(&vec![1; 513], &mut long, choice).expect_err("refused");
    assert!(matches!(error, Error::Model(ModelError::Context { tokens: 513, context: 512 })), "{error}");
    let other = synthetic::tiny(Architecture::Llama);
    let other = host::model::ModelConfig { layers: 3, ..other };
    let mut other = DenseCache::new(&device, (&other).into(), 5).expect("a cache");
    assert!(matches!(runner.step(1, &mut other, choice), Err(Error::Geometry { .. })));
}

#[test]
fn a_cache_wants_its_calls_in_order() {
    let device = device();
    let stream = Stream::new(&device).expect("a stream");
    let model = tiny(Architecture::Llama, Packing::Q8_0);
    let mut cache = dense(&model, &device, 8);
    let rows = |n: usize| host::Buffer::from_slice(&device, &vec![half::f16::ONE; n]).expect("a buffer");
    let (keys, values) = (rows(128), rows(128));
    let positions = host::Buffer::from_slice(&device, &[0u32]).expect("a buffer");
    let new = || New::Rotated(Rotated { positions: &positions, keys: &keys, values: &values });
    assert!(matches!(cache.append(&stream, 0, new()), Err(kv::Error::Order { .. })));
    assert!(matches!(
        cache.begin(&stream, Chunk::of_one(9)),
        Err(kv::Error::Full { tokens: 9, held: 0, capacity: 8 })
    ));
    cache.begin(&stream, Chunk::of_one(1)).expect("begun");
    let refused = cache.append(&stream, 2, new());
    assert!(matches!(refused, Err(kv::Error::Order { value: 2, .. })));
    cache.append(&stream, 1, new()).expect("appended");
    // One token: attention gives back its values, but for a rounding of its logarithms.
    let mut output = host::Buffer::<f32>::zeroed(&device, 256).expect("a buffer");
    cache.attend(&stream, 1, &rows(256), &mut output).expect("attended");
    assert!(output.to_vec().expect("read").iter().all(|x| (x - 1.0).abs() < 1e-6));
    assert!(cache.attend(&stream, 1, &rows(255), &mut output).is_err());
    assert_eq!(cache.tokens(), 0);
    cache.commit();
    assert_eq!((cache.tokens(), cache.bytes()), (1, 1024));
    let memory = DenseCache::new(&device, (&model.config).into(), u32::MAX as usize / 2);
    assert!(matches!(memory, Err(kv::Error::Memory { .. })), "2 TiB");
}

/// Greedy text of the real model: every token is the oracle's first choice, or one that f16 and f32 cannot
/// tell from it.
#[test]
fn the_model_continues_as_the_oracle_does() {
    let Some(model) = fetched::model() else { return };
    let device = device();
    let prompt = model.tokenizer().expect("a tokenizer").encode("The capital of France is").expect("tokens");
    let mut runner = Runner::new(model, &device).expect("a runner");
    let mut cache = dense(model, &device, 24);
    let mut held = DenseKeyValues::new(&model.config);
    let oracle = Oracle::new(model);
    let vocab = model.config.vocab;
    let mut token = runner.prefill(&prompt, &mut cache, Choice::Greedy).expect("a token");
    let mut logits = oracle.forward(&prompt, &mut held).expect("logits");
    for _ in 0..12 {
        let last = &logits[logits.len() - vocab..];
        let best = (0..vocab).max_by(|&a, &b| last[a].total_cmp(&last[b])).unwrap_or(0);
        assert_eq!(token as usize, best);
        logits = oracle.forward(&[token], &mut held).expect("logits");
        token = runner.step(token, &mut cache, Choice::Greedy).expect("a token");
    }
}
