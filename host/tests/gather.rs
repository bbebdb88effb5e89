//! The scheme `gather` behind a model.

use host::kv::{KvCache, Selection};
use host::model::Model;
use host::model::config::Architecture;
use host::model::forward::Runner;
use host::model::kernels::Choice;
use host::model::synthetic::{self, Packing};
use host::{Device, Stream};
use simt::emu::EmuOptions;

fn device() -> Device {
    Device::cpu(EmuOptions::default())
}

fn tiny() -> Model {
    synthetic::model(synthetic::tiny(Architecture::Llama), Packing::Q4_1, 11).expect("a model")
}

fn open(scheme: &str, model: &Model, device: &Device, capacity: usize) -> Box<dyn KvCache> {
    let scheme: Selection = scheme.parse().expect("a scheme");
    scheme.open(device, (&model.config).into(), None, capacity).expect("a cache")
}

fn prompt(count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| (i * i * 31 + i * 17 + 5) % 320).collect()
}

/// Four blocks of 16 of up to seven are kept: captured steps, steps by kernels one by one, and those by the
/// CPU's own path write the same text, and leave out the same.
#[test]
fn captured_steps_choose_the_same() {
    let (device, model, prompt) = (device(), tiny(), prompt(80));
    let choice = Choice::Sampled { temperature: 2.0, top_p: 1.0, seed: 5 };
    let run = |mut runner: Runner, captured: bool, option: &str| {
        let scheme = format!("gather/k=1/block=16/local=2{option}");
        let mut cache = open(&scheme, &model, &device, 110);
        let first = runner.prefill(&prompt, &mut *cache, choice).expect("a token");
        let mut tokens = vec![first];
        if captured {
            let mut decoder = runner.decoder(first, &mut *cache, choice).expect("a decoder");
            tokens.extend((0..20).map(|_| decoder.next().expect("a token")));
        } else {
            for i in 0..20 {
                tokens.push(runner.step(tokens[i], &mut *cache, choice).expect("a token"));
            }
        }
        let stream = Stream::new(&device).expect("a stream");
        cache.check(&stream).expect("all is held");
        let report = cache.report().expect("a report");
        assert_eq!(report.heads.len(), cache.geometry().layers * cache.geometry().q_heads);
        // 100 tokens are seven blocks.
        assert!(report.heads.iter().all(|head| head.skipped == 3 * 16), "{report:?}");
        let traffic = cache.traffic(&stream).expect("read");
        assert_eq!(
            traffic.is_some_and(|traffic| traffic.read > 0),
            option.contains("staging"),
            "{traffic:?}"
        );
        tokens
    };
    let kernels = || Runner::of_kernels(&model, &device, 16).expect("a runner");
    let expected = run(Runner::new(&model, &device).expect("a runner"), false, "");
    // Keys and values on the device, ranked by one thread block and by each; and in the host's memory.
    for option in ["/ranks=one", "/ranks=each", "/staging=2", "/staging=3"] {
        let own = Runner::new(&model, &device).expect("a runner");
        assert_eq!(run(own, false, option), expected, "{option}: the CPU's own path");
        assert_eq!(run(kernels(), false, option), expected, "{option}: one by one");
        assert_eq!(run(kernels(), true, option), expected, "{option}: captured");
    }
}

/// Prompts are exact. Steps that keep everything are dense attention but for how the work is cut; steps that
/// leave something out are not.
#[test]
fn what_is_left_out_makes_the_difference() {
    let (device, model, prompt) = (device(), tiny(), prompt(100));
    let mut runner = Runner::new(&model, &device).expect("a runner");
    let mut of = |scheme: &str| {
        let mut cache = open(scheme, &model, &device, 128);
        let mut logits = runner.logits(&prompt, &mut *cache).expect("logits");
        let read = logits.len();
        for token in [7, 300, 12] {
            logits.extend(runner.logits(&[token], &mut *cache).expect("logits"));
        }
        (read, logits)
    };
    let (read, expected) = of("dense");
    let size = |x: &[f32]| x.iter().map(|x| f64::from(x * x)).sum::<f64>().sqrt();
    let mut far = |scheme: &str| {
        let (_, logits) = of(scheme);
        assert!(logits[..read] == expected[..read], "{scheme}: the prompt");
        let errors: Vec<f32> = logits[read..].iter().zip(&expected[read..]).map(|(a, b)| a - b).collect();
        size(&errors) / size(&expected[read..])
    };
    // Dense attention is within some 10^-6 of the exact one. Of random weights attention is flat, and what is
    // left out, two thirds of the tokens, changes all of it.
    let [all, few] = ["gather", "gather/k=1/block=16/local=1"].map(&mut far);
    assert!(all < 1e-4 && few > 0.01, "{all} {few}");
}
