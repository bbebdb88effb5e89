//! Small models as files.

use host::model::config::{Architecture, RopeKind};
use host::model::gguf::write::Writer;
use host::model::gguf::{Array, Gguf, Header, TensorType, Value};
use host::model::synthetic::{self, Packing};
use host::model::{Error, Model, ModelConfig, Result};
use proptest::prelude::*;
use std::sync::LazyLock;

/// A file of the tiny model of an architecture.
pub fn writer(architecture: Architecture) -> Writer {
    synthetic::file(&synthetic::model(synthetic::tiny(architecture), Packing::Q4_1, 7).expect("a model"))
}

pub fn open(writer: &Writer) -> Result<Model> {
    Model::from_gguf(&Gguf::from_bytes("tiny.gguf", writer.to_bytes()).expect("a valid file"))
}

/// The one line that a wrong file is refused with.
fn refusal(writer: &Writer) -> (Error, String) {
    let error = open(writer).expect_err("a wrong model");
    let text = error.to_string();
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains("tiny.gguf"), "{text}");
    (error, text)
}

#[test]
fn a_file_gives_back_the_model_that_was_written() {
    for architecture in Architecture::ALL {
        let expected = synthetic::model(synthetic::tiny(architecture), Packing::Q4_1, 7).expect("a model");
        let model = open(&writer(architecture)).expect("a valid model");
        assert_eq!(model.config, expected.config);
        for (got, expected) in model.weights.tensors().zip(expected.weights.tensors()) {
            assert_eq!((&got.name, got.rows, got.columns), (&expected.name, expected.rows, expected.columns));
            assert_eq!((got.tensor_type, &*got.bytes), (expected.tensor_type, &*expected.bytes));
        }
        assert_eq!(model.weights.tensors().count(), expected.weights.tensors().count());
        assert_eq!(model.weights.layers[1].attn_q_bias.is_some(), architecture == Architecture::Qwen2);
    }
}

#[test]
fn metadata_defaults_are_the_formats() {
    let mut writer = writer(Architecture::Llama);
    for key in ["rope.freq_base", "rope.dimension_count", "vocab_size"] {
        writer.unset(&format!("llama.{key}"));
    }
    writer.set("llama.attention.head_count", Value::U64(4)).unset("general.name");
    let config = open(&writer).expect("valid").config;
    assert_eq!((config.rope.theta, config.rope.dims, config.vocab), (10_000.0, 64, 320));
    assert_eq!((config.name.as_str(), config.query_heads), ("tiny.gguf", 4));
    assert_eq!((config.group(), config.query_width(), config.kv_width()), (2, 256, 128));
    assert_eq!(config.kv_values_per_token(), 2 * 2 * 128);

    // With no key_length a head has its share of the residual stream: then Q no longer has the shape it
    // should.
    writer.unset("llama.attention.key_length").unset("llama.attention.value_length");
    let (error, text) = refusal(&writer.set("llama.rope.dimension_count", Value::U32(32)).clone());
    assert!(matches!(error, Error::TensorShape { .. }), "{text}");
    assert!(
        text.contains("blk.0.attn_q.weight") && text.contains("128 × 256") && text.contains("128 × 128"),
        "{text}"
    );
}

#[test]
fn missing_and_wrong_metadata_are_named() {
    for key in [
        "general.architecture",
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
    ] {
        let (error, text) = refusal(writer(Architecture::Llama).unset(key));
        assert!(matches!(&error, Error::MissingKey { key: missing, .. } if missing == key), "{text}");
        assert!(text.contains(key));
        for wrong in [Value::F64(-1.0), Value::U32(0), Value::Array(Array::U8(vec![1])), Value::I64(-5)] {
            let (error, text) = refusal(writer(Architecture::Llama).set(key, wrong));
            assert!(matches!(&error, Error::WrongKey { key: wrong, .. } if wrong == key), "{text}");
        }
    }
    let huge = Value::U64(u64::MAX);
    let (_, text) = refusal(writer(Architecture::Llama).set("llama.block_count", huge));
    assert!(text.contains("18446744073709551615 (u64), expected an integer from 1 to 2^28"), "{text}");
    for theta in [f32::NAN, f32::INFINITY, 0.0] {
        let (error, text) =
            refusal(writer(Architecture::Llama).set("llama.rope.freq_base", Value::F32(theta)));
        assert!(matches!(error, Error::WrongKey { .. }), "{text}");
    }
}

#[test]
fn contradictions_are_named() {
    let cases: [(&str, Value, &str); 6] = [
        ("llama.attention.head_count_kv", Value::U32(3), "4 query heads cannot share 3 KV heads"),
        ("llama.attention.value_length", Value::U32(32), "keys of 64 channels and values of 32"),
        ("llama.rope.dimension_count", Value::U32(66), "RoPE over 66 channels of heads of 64"),
        ("llama.rope.dimension_count", Value::U32(63), "RoPE over 63 channels"),
        ("llama.vocab_size", Value::U32(321), "'llama.vocab_size' is 321 and the embedding has 320 rows"),
        ("llama.embedding_length", Value::U32(96), "token_embd.weight"),
    ];
    for (key, value, expected) in cases {
        let (_, text) = refusal(writer(Architecture::Llama).set(key, value));
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn what_cannot_be_run_is_named() {
    let (error, text) =
        refusal(writer(Architecture::Llama).set("general.architecture", Value::String("mamba".into())));
    assert!(
        matches!(error, Error::Architecture { .. }) && text.contains("'mamba'; llama and qwen2"),
        "{text}"
    );
    let (_, text) = refusal(writer(Architecture::Llama).set("llama.expert_count", Value::U32(8)));
    assert!(text.contains("mixture of experts (llama.expert_count = 8)"), "{text}");
    let (_, text) =
        refusal(writer(Architecture::Llama).set("llama.rope.scaling.type", Value::String("yarn".into())));
    assert!(text.contains("scaled RoPE (llama.rope.scaling.type = yarn)"), "{text}");
    let mut none = writer(Architecture::Llama);
    none.set("llama.rope.scaling.type", Value::String("none".into()))
        .set("llama.expert_count", Value::U32(0));
    assert!(open(&none).is_ok());
}

/// Every tensor is needed, and none is left unused: a bias that nobody adds would be a silent error.
#[test]
fn tensors_are_all_needed_and_all_used() {
    for architecture in Architecture::ALL {
        let names: Vec<String> = {
            let model = synthetic::model(synthetic::tiny(architecture), Packing::Q8_0, 7).expect("a model");
            model.weights.tensors().map(|tensor| tensor.name.clone()).collect()
        };
        for name in names.iter().filter(|name| *name != "output.weight") {
            let (error, text) = refusal(writer(architecture).remove_tensor(name));
            assert!(
                matches!(&error, Error::MissingTensor { name: missing, .. } if missing == name),
                "{text}"
            );
        }
    }
    // Qwen without an output matrix is a tied model, and Llama with one is not.
    assert!(
        open(writer(Architecture::Qwen2).remove_tensor("output.weight"))
            .expect("valid")
            .config
            .tied_embeddings
    );
    let (error, text) = refusal(writer(Architecture::Llama).tensor(
        "blk.0.attn_q_norm.weight",
        &[64],
        TensorType::F32,
        vec![0; 256],
    ));
    assert!(matches!(error, Error::UnknownTensor { .. }) && text.contains("attn_q_norm"), "{text}");
    // A bias in one layer only.
    let bias = |width: usize| vec![0; 4 * width];
    let mut some = writer(Architecture::Llama);
    some.tensor("blk.0.attn_q.bias", &[256], TensorType::F32, bias(256));
    assert!(matches!(open(&some), Err(Error::MissingTensor { .. })));
    // Llama with all biases is a model too.
    let mut all = writer(Architecture::Llama);
    for layer in 0..2 {
        for (role, width) in [("attn_q", 256), ("attn_k", 128), ("attn_v", 128), ("attn_output", 128)] {
            all.tensor(&format!("blk.{layer}.{role}.bias"), &[width], TensorType::F32, bias(width as usize));
        }
    }
    let model = open(&all).expect("valid");
    assert!(model.config.qkv_bias && model.config.attn_output_bias);
}

#[test]
fn rope_factors_divide_the_frequencies() {
    let mut writer = writer(Architecture::Llama);
    let factors: Vec<f32> = (0..32).map(|i| 1.0 + i as f32).collect();
    let bytes = |factors: &[f32]| factors.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    writer.tensor("rope_freqs.weight", &[32], TensorType::F32, bytes(&factors));
    let rope = open(&writer).expect("valid").config.rope;
    let frequencies = rope.frequencies();
    assert_eq!((frequencies.len(), frequencies[0]), (32, 1.0));
    let expected = 10_000f64.powf(-0.5) / 17.0;
    assert!((frequencies[16] - expected).abs() < 1e-12 * expected);
    assert_eq!((RopeKind::Interleaved.pair(3, 64), RopeKind::HalfSplit.pair(3, 64)), ((6, 7), (3, 35)));

    writer.tensor("rope_freqs.weight", &[31], TensorType::F32, bytes(&factors[..31]));
    assert!(matches!(open(&writer), Err(Error::TensorShape { .. })));
    let zero = [&[0.0], &factors[1..]].concat();
    writer.tensor("rope_freqs.weight", &[32], TensorType::F32, bytes(&zero));
    assert!(matches!(open(&writer), Err(Error::Inconsistent { .. })));
}

#[test]
fn rows_are_restored_alone_and_together() {
    let model = open(&writer(Architecture::Llama)).expect("valid");
    let down = &model.weights.layers[1].ffn_down;
    assert_eq!((down.rows, down.columns, down.tensor_type), (128, 192, TensorType::Q4_1));
    assert_eq!((down.row_bytes(), down.bytes.len()), (120, 128 * 120));
    let all = down.to_f32();
    let mut row = vec![0.0; 192];
    down.dequantize_row(77, &mut row);
    assert_eq!(&all[77 * 192..78 * 192], row);
    assert_eq!(down.row(77), &down.bytes[77 * 120..78 * 120]);
}

/// The weights are random and of the promised size, and the same whoever makes them.
#[test]
fn random_weights_are_deterministic_and_of_unit_gain() {
    for packing in [Packing::Q8_0, Packing::Q4_1, Packing::F32] {
        let config: ModelConfig = synthetic::tiny(Architecture::Qwen2);
        let weights = synthetic::weights(&config, packing, 1).expect("weights");
        let one_thread = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a pool");
        let again = one_thread.install(|| synthetic::weights(&config, packing, 1)).expect("weights");
        let other = synthetic::weights(&config, packing, 2).expect("weights");
        for ((tensor, again), other) in weights.tensors().zip(again.tensors()).zip(other.tensors()) {
            assert_eq!(*tensor.bytes, *again.bytes, "{}", tensor.name);
            assert_ne!(*tensor.bytes, *other.bytes, "{}", tensor.name);
            let values = tensor.to_f32();
            assert!(values.iter().all(|value| value.is_finite()));
            if tensor.rows > 1 {
                let squares: f64 = values.iter().map(|&x| f64::from(x).powi(2)).sum();
                let gain = (squares / tensor.rows as f64).sqrt();
                assert!((0.9..1.2).contains(&gain), "{}: {gain}", tensor.name);
            }
        }
    }
    let mut odd = synthetic::tiny(Architecture::Llama);
    odd.ffn = 100;
    let error = synthetic::model(odd, Packing::Q8_0, 1).expect_err("no blocks").to_string();
    assert!(error.contains("ffn_down") && error.contains("rows of 100 values"), "{error}");
}

#[test]
fn shapes_are_those_of_the_models() {
    let parameters = |config: &ModelConfig| {
        let matrices = config.hidden * (2 * config.query_width() + 2 * config.kv_width() + 3 * config.ffn);
        let biases = if config.qkv_bias { config.query_width() + 2 * config.kv_width() } else { 0 };
        config.layers * (matrices + biases + 2 * config.hidden)
            + config.hidden
            + 2 * config.vocab * config.hidden
    };
    let [llama, qwen] = synthetic::Shape::ALL.map(synthetic::Shape::config);
    // As their publishers count them.
    assert_eq!(parameters(&llama), 8_030_261_248);
    assert_eq!(parameters(&qwen), 7_615_616_512);
    // Llama 3.1: the fastest rotations as they were, the slowest stretched eightfold.
    let factors = llama.rope.factors.expect("factors");
    assert_eq!((factors.len(), factors[0], factors[63]), (64, 1.0, 8.0));
    assert!(factors.is_sorted() && factors.iter().any(|factor| (1.5..7.0).contains(factor)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// Metadata, names, extents and tokens of a whole model, changed anywhere: a model or an error.
    #[test]
    fn mutations_of_a_valid_model_never_panic(
        flips in prop::collection::vec((any::<prop::sample::Index>(), 0u8..8), 1..4),
        words in prop::collection::vec((any::<prop::sample::Index>(), prop::sample::select(vec![
            0u64, 1, 2, 63, 65, 128, 1 << 20, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 63, u64::MAX,
        ]), prop::sample::select(vec![1usize, 4, 8])), 0..2),
    ) {
        static FILE: LazyLock<(Vec<u8>, usize)> = LazyLock::new(|| {
            let bytes = writer(Architecture::Qwen2).to_bytes();
            let header = Header::parse(&bytes).expect("valid").tensors[0].range.start;
            (bytes, header)
        });
        let (bytes, header) = &*FILE;
        let mut bytes = bytes.clone();
        for (at, bit) in flips {
            bytes[at.index(*header)] ^= 1 << bit;
        }
        for (at, word, length) in words {
            let at = at.index(header - 8);
            bytes[at..at + length].copy_from_slice(&word.to_le_bytes()[..length]);
        }
        if let Ok(file) = Gguf::from_bytes("mutated", bytes)
            && let Ok(model) = Model::from_gguf(&file)
        {
            // What was accepted can be used: all sizes agree.
            prop_assert!(model.weights.tensors().all(|tensor| tensor.bytes.len() == tensor.rows * tensor.row_bytes()));
            if let Some(tokenizer) = &model.tokenizer {
                let ids = tokenizer.encode("the text é 12").expect("tokens");
                tokenizer.decode(&ids).expect("text");
                let _ = tokenizer.chat(&[]);
            }
        }
    }
}
