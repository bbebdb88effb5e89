//! The schemes behind a model: exact prompts, captured steps, certificates.

use crate::artifact::ready;
use host::certified::{CertifiedCache, Policy, Rung, Settings};
use host::dense::DenseCache;
use host::eval::capture::Capture;
use host::int8::Int8Cache;
use host::kv::{Chunk, KvCache, New, Rotated, Selection, Source};
use host::model::Model;
use host::model::config::Architecture;
use host::model::forward::Runner;
use host::model::kernels::Choice;
use host::model::synthetic::{self, Packing};
use host::{Buffer, Device, Stream};
use simt::emu::EmuOptions;
use std::collections::HashSet;

const SCHEMES: [&str; 4] = ["dense", "int8-int4", "certified", "certified:strict"];

fn device() -> Device {
    Device::cpu(EmuOptions::default())
}

fn tiny() -> Model {
    synthetic::model(synthetic::tiny(Architecture::Llama), Packing::Q4_1, 11).expect("a model")
}

fn open(scheme: &str, model: &Model, device: &Device, capacity: usize) -> Box<dyn KvCache> {
    let scheme = ready(scheme, (&model.config).into());
    scheme.open(device, (&model.config).into(), None, capacity).expect("a cache")
}

fn prompt(count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| (i * i * 31 + i * 17 + 5) % 320).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn names_are_read_as_they_are_written() {
    for name in host::schemes().map(|scheme| scheme.name).chain(SCHEMES) {
        assert_eq!(name.parse::<Selection>().expect("a scheme").to_string(), name);
    }
    let refused = |name: &str| name.parse::<Selection>().expect_err("refused").to_string();
    for name in ["", "Dense", "naive"] {
        let error = refused(name);
        assert!(error.contains(&format!("'{name}'")) && error.contains("int8-int4"), "{error}");
    }
    for (name, part) in [
        ("certified:", "no preset ''; its presets are sound, paper, strict, fast"),
        ("certified:loose", "no preset 'loose'; its presets are sound"),
        ("dense:sound", "it has no presets"),
        ("dense/k=1", "no option 'k'; it has no options"),
    ] {
        let error = refused(name);
        assert!(error.contains(part), "{error}");
    }
    let again = "certified:strict/coverage=0.5/renew=0";
    assert_eq!(again.parse::<Selection>().expect("a scheme").to_string(), again);
}

/// A prompt's attention is exact whatever the scheme; the steps after it differ by what quantizing does.
#[test]
fn prompts_are_exact_and_steps_come_near() {
    let (device, model, prompt) = (device(), tiny(), prompt(45));
    let mut runner = Runner::new(&model, &device).expect("a runner");
    let mut of = |scheme: &str| {
        let mut cache = open(scheme, &model, &device, 64);
        let mut logits = runner.logits(&prompt, &mut *cache).expect("logits");
        let read = logits.len();
        for token in [7, 300, 12] {
            logits.extend(runner.logits(&[token], &mut *cache).expect("logits"));
        }
        runner.check_cache(&mut *cache).expect("all is held");
        assert_eq!(cache.tokens(), 48);
        (read, logits)
    };
    let (read, expected) = of("dense");
    let size = |x: &[f32]| x.iter().map(|x| f64::from(x * x)).sum::<f64>().sqrt();
    for scheme in &SCHEMES[1..] {
        let (_, logits) = of(scheme);
        assert_eq!(bits(&logits[..read]), bits(&expected[..read]), "{scheme}: the prompt");
        let errors: Vec<f32> = logits[read..].iter().zip(&expected[read..]).map(|(a, b)| a - b).collect();
        let far = size(&errors) / size(&expected[read..]);
        // The range of 16 normal values is 3.5 deviations; its fifteenth, uniform, has 0.067 of one as its
        // deviation. So much in each of two layers is 0.095; twice that, for keys and what layers amplify.
        assert!(far > 0.0 && far < 0.19, "{scheme}: {far}");
    }
}

/// Prompts by kernels, which read the originals of one layer from a pool that all share: the bits of the
/// CPU's own path.
#[test]
fn prompts_by_kernels_are_exact_too() {
    let (device, model, prompt) = (device(), tiny(), prompt(37));
    let geometry = (&model.config).into();
    let cache = || CertifiedCache::new(&device, geometry, 48, Policy::SOUND).expect("a cache");
    let mut runner = Runner::new(&model, &device).expect("a runner");
    let mut logits = |mut cache: CertifiedCache| {
        let mut logits = runner.logits(&prompt[..20], &mut cache).expect("logits");
        logits.extend(runner.logits(&prompt[20..], &mut cache).expect("logits"));
        (bits(&logits), cache.bytes())
    };
    let (expected, bytes) = logits(cache());
    let (found, with_pool) = logits(cache().with_kernels());
    assert!(found == expected);
    assert_eq!(with_pool - bytes, 3 * 16 * 2 * 2 * 128, "three blocks of one layer");
}

/// A prompt one token longer than its chunks: the last token is no step of decoding, and its attention is
/// exact.
#[test]
fn no_token_of_a_prompt_is_left_alone() {
    let (device, model) = (device(), tiny());
    for (mut runner, count) in [
        (Runner::of_kernels(&model, &device, 16).expect("a runner"), 33),
        (Runner::new(&model, &device).expect("a runner"), 65),
    ] {
        let prompt = prompt(count);
        let mut last = |scheme: &str| {
            let mut cache = open(scheme, &model, &device, 80);
            let logits = runner.logits(&prompt, &mut *cache).expect("logits");
            assert!(cache.report().expect("read").heads.is_empty());
            bits(&logits[logits.len() - 320..])
        };
        assert_eq!(last("certified"), last("dense"), "{count} tokens");
    }
}

/// Positions past the room are left out, and the length does not follow them past the table.
#[test]
fn an_int8_cache_stays_inside_its_room() {
    let (device, model) = (device(), tiny());
    let stream = Stream::new(&device).expect("a stream");
    let mut cache = Int8Cache::new(&device, (&model.config).into(), 16).expect("a cache").with_kernels();
    let row = Buffer::from_slice(&device, &vec![half::f16::ONE; 256]).expect("a buffer");
    let positions = Buffer::from_slice(&device, &[1_000_000u32]).expect("a buffer");
    let mut output = Buffer::<f32>::zeroed(&device, 256).expect("a buffer");
    cache.begin(&stream, Chunk::of_one(1)).expect("begun");
    let (keys, values) = (&row, &row);
    let new = Rotated { positions: &positions, keys, values };
    cache.append(&stream, 0, New::Rotated(new)).expect("appended");
    cache.attend(&stream, 0, &row, &mut output).expect("no access out of bounds");
}

/// Attention sees a cache that is full to its last place.
#[test]
fn an_int8_cache_uses_all_of_its_room() {
    let (device, model) = (device(), tiny());
    let stream = Stream::new(&device).expect("a stream");
    let rows = |width: usize| {
        let row = |i: usize| half::f16::from_f32((i * 37 % 101) as f32 / 50.0 - 1.0);
        Buffer::from_slice(&device, &(0..16 * width).map(row).collect::<Vec<_>>()).expect("a buffer")
    };
    let positions = Buffer::from_slice(&device, &(0..16).collect::<Vec<u32>>()).expect("a buffer");
    let (queries, new) = (rows(256), rows(128));
    let cache = || Int8Cache::new(&device, (&model.config).into(), 16).expect("a cache");
    let [own, kernels] = [cache(), cache().with_kernels()].map(|mut cache| {
        let mut output = Buffer::<f32>::zeroed(&device, 16 * 256).expect("a buffer");
        cache.begin(&stream, Chunk::of_one(16)).expect("begun");
        let (keys, values) = (&new, &new);
        let new = Rotated { positions: &positions, keys, values };
        cache.append(&stream, 0, New::Rotated(new)).expect("appended");
        cache.attend(&stream, 0, &queries, &mut output).expect("attended");
        bits(&output.to_vec().expect("read"))
    });
    assert_eq!(kernels, own);
}

/// A captured step, replayed over block boundaries, gives what steps one by one give, and those are the CPU's
/// own.
#[test]
fn captured_steps_are_the_steps() {
    let (device, model, prompt) = (device(), tiny(), prompt(13));
    let choice = Choice::Sampled { temperature: 2.0, top_p: 1.0, seed: 5 };
    for scheme in host::schemes().map(|scheme| scheme.name) {
        let kernels = || Runner::of_kernels(&model, &device, 16).expect("a runner");
        let run = |mut runner: Runner, captured: bool| {
            let mut cache = open(scheme, &model, &device, 40);
            let first = runner.prefill(&prompt, &mut *cache, choice).expect("a token");
            let mut tokens = vec![first];
            if captured {
                let mut decoder = runner.decoder(first, &mut *cache, choice).expect("a decoder");
                tokens.extend((0..22).map(|_| decoder.next().expect("a token")));
                assert_eq!(decoder.cache().tokens(), 35);
            } else {
                for i in 0..22 {
                    tokens.push(runner.step(tokens[i], &mut *cache, choice).expect("a token"));
                }
            }
            runner.check_cache(&mut *cache).expect("all is held");
            // What follows a decoder still finds its place.
            tokens.push(runner.step(9, &mut *cache, choice).expect("a token"));
            tokens
        };
        let expected = run(Runner::new(&model, &device).expect("a runner"), false);
        assert_eq!(run(kernels(), false), expected, "{scheme}: one by one");
        assert_eq!(run(kernels(), true), expected, "{scheme}: captured");
    }
}

/// GPUs whose blocks have 99 KiB of shared memory have kernels for every scheme, with the same tokens.
#[test]
fn every_scheme_fits_smaller_gpus() {
    let (device, prompt) = (device(), prompt(13));
    let lean = device.with_max_shared_bytes(99 << 10);
    let mut config = synthetic::tiny(Architecture::Llama);
    (config.head_dim, config.rope.dims) = (128, 128);
    let models = [tiny(), synthetic::model(config, Packing::Q4_1, 11).expect("a model")];
    let run = |device: &Device, model: &Model, scheme: &str| {
        let mut runner = Runner::of_kernels(model, device, 16).expect("a runner");
        let mut cache = open(scheme, model, device, 40);
        let first = runner.prefill(&prompt, &mut *cache, Choice::Greedy).expect("a token");
        let mut decoder = runner.decoder(first, &mut *cache, Choice::Greedy).expect("a decoder");
        (0..6).map(|_| decoder.next().expect("a token")).collect::<Vec<u32>>()
    };
    let names = host::schemes().map(|scheme| scheme.name);
    for scheme in
        names.chain(["certified:strict", "gather:certified", "gather:quest", "gather/tiles=int8-int4"])
    {
        for model in &models {
            let head_dim = model.config.head_dim;
            assert_eq!(run(&lean, model, scheme), run(&device, model, scheme), "{scheme}, {head_dim}");
        }
    }
    let error = Selection::parse("gather/ranks=each", host::schemes()).expect("a scheme");
    let error = error
        .open(&lean, (&models[0].config).into(), None, 40)
        .err()
        .expect("a kernel of 141 KB")
        .to_string();
    assert!(error.contains("101376 is the device's most"), "{error}");
}

/// As long as a GPU keeps all originals that there are, a step has the bits of `dense` and says so; then it
/// is by tiles. The same one by one and captured, and for a second text in the same cache.
#[test]
fn a_cache_is_dense_until_it_has_more_than_is_kept() {
    let (device, model, text) = (device(), tiny(), prompt(40));
    let mut runner = Runner::of_kernels(&model, &device, 16).expect("a runner");
    let geometry: host::kv::Geometry = (&model.config).into();
    let kept = Settings { resident: 32, as_on_a_gpu: true, ..Settings::new(Policy::SOUND) };
    let open_with =
        |settings: Settings| CertifiedCache::with_settings(&device, geometry, 64, settings).expect("a cache");
    let resident = |cache: &dyn KvCache| {
        let heads = cache.report().expect("read").heads;
        let exact =
            heads.iter().filter(|head| head.source == Source::Originals && head.norm.is_none()).count();
        assert!(exact == 0 || exact == heads.len());
        exact > 0
    };
    let by_hand = |runner: &mut Runner, cache: &mut dyn KvCache| {
        runner.read(&text[..20], cache).expect("read");
        let mut steps = Vec::new();
        for token in &text[20..] {
            let logits = bits(&runner.logits(&[*token], cache).expect("logits"));
            steps.push((
                logits,
                cache.report().is_ok_and(|report| !report.heads.is_empty()) && resident(cache),
            ));
        }
        steps
    };
    let mut cache = open_with(kept);
    assert_eq!((cache.period(), cache.regime()), (1, 1));
    let expected = by_hand(&mut runner, &mut cache);
    assert_eq!(cache.regime(), 0);
    let dense = by_hand(&mut runner, &mut *open("dense", &model, &device, 64));
    let tiles = by_hand(&mut runner, &mut open_with(Settings { resident: 0, ..kept }));
    for (i, (step, (exact, quantized))) in expected.iter().zip(dense.iter().zip(&tiles)).enumerate() {
        // Tokens 21 to 32.
        assert_eq!(step.1, i < 12, "step {i}");
        assert_eq!(step.0 == exact.0, i < 12, "step {i}");
        assert!(quantized.0 != exact.0 && !quantized.1, "step {i}");
    }
    // A cache that is full and resident reads originals in a step.
    let mut full = CertifiedCache::with_settings(&device, geometry, 32, kept).expect("a cache");
    runner.read(&text[..32], &mut full).expect("read");
    assert_eq!(
        (full.step_bytes(), full.host_bytes()),
        (32 * geometry.token_bytes(), 32 * geometry.token_bytes())
    );
    // A prompt that is too long at once.
    let mut long = open_with(kept);
    runner.read(&text[..39], &mut long).expect("read");
    assert_eq!(long.regime(), 0);
    // The second text begins as the first did.
    let stream = Stream::new(&device).expect("a stream");
    cache.leave(&stream, 0).expect("it leaves");
    for round in 0..2 {
        if round > 0 {
            cache.leave(&stream, 0).expect("it leaves");
        }
        assert_eq!(cache.join(&stream).expect("a sequence"), 0);
        runner.read(&text[..20], &mut cache).expect("read");
        let mut decoder = runner.decoder(text[20], &mut cache, Choice::Greedy).expect("a decoder");
        for (token, (logits, exact)) in text[20..].iter().zip(&expected) {
            decoder.set_token(*token).expect("set");
            decoder.next().expect("a token");
            assert_eq!(resident(decoder.cache()), *exact);
            assert_eq!(bits(&decoder.logits().expect("logits")), *logits, "text {round}");
        }
        drop(decoder);
        runner.check_cache(&mut cache).expect("all is held");
    }
}

/// A decoder reads what it is told, and has the logits of what it read.
#[test]
fn a_decoder_can_be_led() {
    let (device, model) = (device(), tiny());
    let text = prompt(20);
    let mut expected = Vec::new();
    let mut runner = Runner::new(&model, &device).expect("a runner");
    let mut cache = open("certified", &model, &device, 32);
    runner.read(&text[..12], &mut *cache).expect("read");
    for token in &text[12..] {
        expected.push(bits(&runner.logits(&[*token], &mut *cache).expect("logits")));
    }
    for mut runner in [runner, Runner::of_kernels(&model, &device, 16).expect("a runner")] {
        let mut cache = open("certified", &model, &device, 32);
        runner.read(&text[..12], &mut *cache).expect("read");
        let mut decoder = runner.decoder(text[12], &mut *cache, Choice::Greedy).expect("a decoder");
        assert!(decoder.set_token(320).is_err());
        for (token, expected) in text[12..].iter().zip(&expected) {
            decoder.set_token(*token).expect("set");
            decoder.next().expect("a token");
            assert_eq!(bits(&decoder.logits().expect("logits")), *expected);
        }
    }
}

#[test]
fn a_decoder_ends_where_the_cache_does() {
    let (device, model) = (device(), tiny());
    let mut runner = Runner::of_kernels(&model, &device, 8).expect("a runner");
    let mut cache = open("dense", &model, &device, 5);
    let first = runner.prefill(&[1, 2, 3], &mut *cache, Choice::Greedy).expect("a token");
    let mut decoder = runner.decoder(first, &mut *cache, Choice::Greedy).expect("a decoder");
    decoder.next().expect("the fourth");
    decoder.next().expect("the fifth");
    let error = decoder.next().expect_err("full").to_string();
    assert!(error.contains("1 tokens more do not fit a cache that has 5 of 5"), "{error}");
    drop(decoder);
    assert_eq!(cache.tokens(), 5);
    assert!(runner.decoder(1, &mut *cache, Choice::Greedy).is_err());
}

/// What a cache is filled with is what files are made from, and has no block's bounds twice: else what ranks
/// blocks would find ties, which no text has.
#[test]
fn what_a_cache_is_filled_with_does_not_come_again() {
    let tokens = 12 * 1024 + 300;
    let mut config = synthetic::tiny(Architecture::Llama);
    config.context = tokens;
    let (device, model) = (device(), synthetic::model(config, Packing::Q4_1, 11).expect("a model"));
    let mut runner = Runner::new(&model, &device).expect("a runner");
    let mut cache = open("dense", &model, &device, tokens);
    let mut capture = Capture::new(&mut *cache, &[1], tokens).expect("a layer");
    runner.fill(&mut capture, 0, tokens, 3.0).expect("filled");
    let captured = capture.into_layers().remove(0);
    let material = runner.filling(tokens, 3.0);
    let first = &material.layers[1];
    for (all, first) in [(&captured.keys, &first.keys), (&captured.values, &first.values)] {
        let width = all.len() / tokens;
        assert!(first.len() == 1024 * width && all[..first.len()] == first[..]);
        let mut largest = HashSet::new();
        for block in all.chunks_exact(128 * width) {
            let of = |channel: usize| block.iter().skip(channel).step_by(width).map(|x| x.to_f32());
            let of = |channel: usize| of(channel).fold(f32::NEG_INFINITY, f32::max).to_bits();
            assert!(largest.insert((0..width).map(of).collect::<Vec<_>>()), "a block of the same bounds");
        }
    }
}

/// Every head of every layer is certified at each step of decoding, and only there.
#[test]
fn steps_are_certified() {
    let (device, model, prompt) = (device(), tiny(), prompt(60));
    let mut runner = Runner::new(&model, &device).expect("a runner");
    for (scheme, heads) in [("dense", 0), ("int8-int4", 0), ("certified", 2 * 4)] {
        let mut cache = open(scheme, &model, &device, 80);
        runner.read(&prompt, &mut *cache).expect("read");
        assert!(cache.report().expect("read").heads.is_empty(), "{scheme}: exact");
        runner.step(3, &mut *cache, Choice::Greedy).expect("a token");
        let report = cache.report().expect("read");
        assert_eq!(report.heads.len(), heads, "{scheme}");
        for head in report.heads {
            assert!(head.bound.is_some_and(|bound| bound > 0.0 && bound < 100.0), "{head:?}");
        }
        runner.read(&[1, 2], &mut *cache).expect("read");
        assert!(cache.report().expect("read").heads.is_empty(), "{scheme}: exact again");
    }
}

/// Full blocks are what (6) to (8) make of them, the last one as it came; kernels and the CPU's own path
/// agree.
#[test]
fn an_int8_cache_holds_what_its_formula_says() {
    let (device, model) = (device(), tiny());
    let stream = Stream::new(&device).expect("a stream");
    let geometry = host::kv::Geometry { layers: 2, ..(&model.config).into() };
    let row = |token: usize, i: usize, kind: usize| {
        half::f16::from_f32(((token * 131 + i * 17 + kind * 7) % 251) as f32 / 25.0 - 5.0)
    };
    let (width, total) = (geometry.kv_width(), 37);
    let caches = || Int8Cache::new(&device, geometry, 48).expect("a cache");
    for mut cache in [caches(), caches().with_kernels()] {
        let mut first = 0;
        for count in [20, 1, 1, 15] {
            let rows = |kind: usize| {
                let tokens = (first..first + count).flat_map(|t| (0..width).map(move |i| row(t, i, kind)));
                Buffer::from_slice(&device, &tokens.collect::<Vec<_>>()).expect("a buffer")
            };
            let positions: Vec<u32> = (first as u32..(first + count) as u32).collect();
            let positions = Buffer::from_slice(&device, &positions).expect("a buffer");
            cache.begin(&stream, Chunk::of_one(count)).expect("begun");
            for layer in 0..2 {
                let (keys, values) = (&rows(0), &rows(1));
                let new = Rotated { positions: &positions, keys, values };
                cache.append(&stream, layer, New::Rotated(new)).expect("appended");
            }
            cache.commit();
            first += count;
        }
        assert_eq!((cache.tokens(), cache.step_bytes()), (total, 2 * (2 * 2 * (16 + 4) * 128 + 5 * 512)));
        // Attention with a query of zeros is the mean of the values.
        let queries = Buffer::<half::f16>::zeroed(&device, 256).expect("a buffer");
        let mut output = Buffer::<f32>::zeroed(&device, 256).expect("a buffer");
        let position = Buffer::from_slice(&device, &[total as u32]).expect("a buffer");
        cache.begin(&stream, Chunk::of_one(1)).expect("begun");
        let last = |kind| {
            let row: Vec<_> = (0..width).map(|i| row(total, i, kind)).collect();
            Buffer::from_slice(&device, &row).expect("a buffer")
        };
        let (keys, values) = (&last(0), &last(1));
        let new = Rotated { positions: &position, keys, values };
        cache.append(&stream, 1, New::Rotated(new)).expect("appended");
        cache.attend(&stream, 1, &queries, &mut output).expect("attended");
        let output = output.to_vec().expect("read");
        for i in 0..width {
            let restored = |token: usize| {
                let exact = row(token, i, 1).to_f64();
                if token >= 32 {
                    return exact;
                }
                let block = (token / 16 * 16..token / 16 * 16 + 16).map(|t| row(t, i, 1).to_f64().abs());
                let scale = block.fold(0.0, f64::max) / 127.0;
                half::f16::from_f64((exact / scale).round_ties_even() * scale).to_f64()
            };
            let mean = (0..=total).map(restored).sum::<f64>() / (total + 1) as f64;
            let found = f64::from(output[i / 64 * 128 + i % 64]);
            // Weights of 2^-11 relative rounding at most, of values up to 5.
            assert!((found - mean).abs() < 5.0 / 2048.0, "channel {i}: {found} for {mean}");
        }
    }
}

/// With budgets of zero every head is computed from the originals: the bits of a dense cache of the same
/// extents.
#[test]
fn heads_over_budget_are_dense() {
    let (device, model, prompt) = (device(), tiny(), prompt(40));
    let none = Policy { error_budget: 0.0, ..Policy::SOUND };
    let mut runner = Runner::new(&model, &device).expect("a runner");
    let geometry = (&model.config).into();
    let mut certified = CertifiedCache::new(&device, geometry, 48, none).expect("a cache");
    let mut dense = DenseCache::new(&device, geometry, 48).expect("a cache");
    let mut logits = |cache: &mut dyn KvCache| {
        runner.read(&prompt, cache).expect("read");
        runner.logits(&[8], cache).expect("logits")
    };
    assert_eq!(bits(&logits(&mut certified)), bits(&logits(&mut dense)));
    let certificates = certified.certificates().expect("read");
    assert!(certificates.iter().all(|c| Rung::of(c.rung()) == Rung::Dense && c.e_val == 0.0));
    // Two full blocks in 8 and 4 bits of 16, and half a block as it is.
    assert_eq!(dense.bytes(), 41 * 1024);
    assert_eq!(certified.bytes(), 2 * 16 * 512 + 2 * 2 * 2 * 48 + 9 * 1024);
    assert_eq!((dense.host_bytes(), certified.host_bytes()), (0, 41 * 1024));
}

/// A key that is no number is not held, and the check says which.
#[test]
fn what_a_cache_refuses_is_said() {
    let (device, model) = (device(), tiny());
    let stream = Stream::new(&device).expect("a stream");
    let mut cache = open("certified", &model, &device, 8);
    let rows = |x: f32| {
        let row = vec![half::f16::from_f32(x); 128];
        Buffer::from_slice(&device, &row).expect("a buffer")
    };
    let positions = Buffer::from_slice(&device, &[0u32]).expect("a buffer");
    cache.begin(&stream, Chunk::of_one(1)).expect("begun");
    let (keys, values) = (&rows(f32::NAN), &rows(1.0));
    let new = Rotated { positions: &positions, keys, values };
    cache.append(&stream, 1, New::Rotated(new)).expect("appended");
    let error = cache.check(&stream).expect_err("refused").to_string();
    assert!(error.contains("key") && error.contains("not finite") && error.lines().count() == 1, "{error}");
}
