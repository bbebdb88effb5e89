//! GGUF blocks and logits beside those of candle.

use candle_core::quantized::gguf_file::Content;
use candle_core::{Device, Tensor};
use candle_transformers::models::{quantized_llama, quantized_qwen2};
use host::model::config::{Architecture, ModelConfig};
use host::model::gguf::write::Writer;
use host::model::gguf::{Bytes, Gguf, TensorType, dequantize};
use host::model::oracle::{DenseKeyValues, Oracle};
use host::model::synthetic::{self, Packing};
use host::model::text::Corpus;
use host::model::weights::{self, LayerWeights, Weights};
use host::model::{Error, Model, fetched};
use simt::random::SplitMix64;
use std::io::{Cursor, Write};
use std::path::Path;

/// The bytes of a block with the sign and the upper exponent bits of a float.
fn float_bytes(tensor_type: TensorType) -> Vec<usize> {
    match tensor_type {
        TensorType::F32 => vec![3],
        TensorType::F16 | TensorType::Bf16 | TensorType::Q8_0 | TensorType::Q4_0 | TensorType::Q5_0 => {
            vec![1]
        }
        TensorType::Q4_1 | TensorType::Q4K => vec![1, 3],
        TensorType::Q6K => vec![209],
    }
}

/// Candle's values of every tensor of a file, against ours, bit by bit. Gives how many values there were.
fn compare_tensors(name: &str, bytes: Vec<u8>) -> usize {
    let file = Gguf::from_bytes(name, bytes.clone()).expect("a valid file");
    let mut reader = Cursor::new(bytes);
    let content = Content::read(&mut reader).expect("candle reads the header");
    let mut values = 0;
    for info in &file.header().tensors {
        let theirs = content.tensor(&mut reader, &info.name, &Device::Cpu).expect("candle reads the tensor");
        let theirs =
            theirs.dequantize(&Device::Cpu).and_then(|x| x.flatten_all()?.to_vec1::<f32>()).expect("values");
        let mut ours = vec![0.0; info.rows() * info.columns()];
        dequantize(info.tensor_type, &file.data(info), &mut ours);
        assert_eq!(theirs.len(), ours.len(), "{}", info.name);
        for (i, (theirs, ours)) in theirs.iter().zip(&ours).enumerate() {
            assert_eq!(
                theirs.to_bits(),
                ours.to_bits(),
                "{} value {i}: candle {theirs}, ours {ours}",
                info.name
            );
        }
        values += ours.len();
    }
    values
}

#[test]
fn random_blocks_of_every_type_restore_to_the_same_bits() {
    let mut random = SplitMix64(1);
    let mut writer = Writer::new();
    for tensor_type in TensorType::ALL {
        let (columns, rows) = (2 * 256, 64);
        let row_bytes = tensor_type.row_bytes(columns).expect("whole blocks");
        let mut bytes: Vec<u8> = (0..rows * row_bytes).map(|_| random.word() as u8).collect();
        for block in bytes.chunks_exact_mut(tensor_type.block_bytes()) {
            for at in float_bytes(tensor_type) {
                // An exponent that is not all ones.
                block[at] &= 0xbf;
            }
        }
        writer.tensor(tensor_type.name(), &[columns as u64, rows as u64], tensor_type, bytes);
    }
    assert_eq!(compare_tensors("random", writer.to_bytes()), TensorType::ALL.len() * 512 * 64);
}

/// The path of the model, or a line that says that there is none.
fn fetched_model(test: &str) -> Option<std::path::PathBuf> {
    match fetched::model() {
        Err(Error::NotFetched { .. }) => {
            // Past the test harness's capture, or nobody would see it.
            let _ =
                writeln!(std::io::stderr(), "{test}: skipped, the model is not fetched (./setup --model)");
            None
        }
        found => Some(found.expect("a path")),
    }
}

#[test]
fn the_models_tensors_restore_to_the_same_bits() {
    let Some(path) = fetched_model("the_models_tensors_restore_to_the_same_bits") else { return };
    let bytes = std::fs::read(&path).expect("the model");
    assert_eq!(compare_tensors("the model", bytes), 134_515_008);
}

/// Candle's forward pass, one token a call.
enum Candle {
    Llama(quantized_llama::ModelWeights),
    Qwen2(quantized_qwen2::ModelWeights),
}

impl Candle {
    fn open(architecture: Architecture, file: &Writer) -> Candle {
        let mut reader = Cursor::new(file.to_bytes());
        let content = Content::read(&mut reader).expect("candle reads the header");
        match architecture {
            Architecture::Llama => Candle::Llama(
                quantized_llama::ModelWeights::from_gguf(content, &mut reader, &Device::Cpu)
                    .expect("candle's model"),
            ),
            Architecture::Qwen2 => Candle::Qwen2(
                quantized_qwen2::ModelWeights::from_gguf(content, &mut reader, &Device::Cpu)
                    .expect("candle's model"),
            ),
        }
    }

    /// Logits after one more token.
    fn step(&mut self, token: u32, position: usize) -> Vec<f32> {
        let input = Tensor::new(&[[token]], &Device::Cpu).expect("a token");
        let logits = match self {
            Candle::Llama(model) => model.forward(&input, position),
            Candle::Qwen2(model) => model.forward(&input, position),
        };
        logits.and_then(|logits| logits.flatten_all()?.to_vec1()).expect("logits")
    }
}

/// The largest difference of logits, beside the largest logit; and how often the likeliest token differs
/// where it leads by more than that.
#[derive(Debug, Default)]
struct Difference {
    largest: f64,
    magnitude: f64,
    argmax_differs: usize,
}

fn compare_logits(model: &Model, file: &Writer, tokens: &[u32]) -> Difference {
    let mut candle = Candle::open(model.config.architecture, file);
    let oracle = Oracle::new(model);
    let mut cache = DenseKeyValues::new(&model.config);
    let mut difference = Difference::default();
    for (chunk, tokens) in tokens.chunks(128).enumerate() {
        let logits = oracle.forward(tokens, &mut cache).expect("logits");
        for (i, (ours, &token)) in logits.chunks_exact(model.config.vocab).zip(tokens).enumerate() {
            let theirs = candle.step(token, 128 * chunk + i);
            let differences = ours.iter().zip(&theirs).map(|(a, &b)| (a - f64::from(b)).abs());
            let here = differences.fold(0.0, f64::max);
            difference.largest = difference.largest.max(here);
            difference.magnitude = ours.iter().fold(difference.magnitude, |most, x| most.max(x.abs()));
            let best = |x: &mut dyn Iterator<Item = f64>| {
                x.enumerate()
                    .max_by(|a, b| a.1.total_cmp(&b.1))
                    .map(|(token, _)| token)
                    .expect("a vocabulary")
            };
            let (our_best, their_best) =
                (best(&mut ours.iter().copied()), best(&mut theirs.iter().map(|&x| f64::from(x))));
            // Two that are closer than the difference are a tie.
            let tie = ours[our_best] - ours[their_best] <= 2.0 * here;
            difference.argmax_differs += usize::from(our_best != their_best && !tie);
        }
    }
    difference
}

/// Candle takes the head's size to be hidden/heads.
fn square(architecture: Architecture) -> ModelConfig {
    let mut config = synthetic::tiny(architecture);
    config.hidden = config.query_width();
    config
}

#[test]
fn small_models_of_both_architectures_give_the_same_logits() {
    for architecture in Architecture::ALL {
        let model = synthetic::model(square(architecture), Packing::F32, 3).expect("a model");
        let mut random = SplitMix64(5);
        let tokens: Vec<u32> = (0..200).map(|_| (random.word() % 320) as u32).collect();
        let difference = compare_logits(&model, &synthetic::file(&model), &tokens);
        println!("{architecture:?}: {difference:?}");
        assert!(difference.magnitude > 1.0, "{difference:?}");
        // Sums of a few hundred f32, twice: 2^-24 each, and a wrong pairing or a lost bias would be of
        // order 1.
        assert!(difference.largest < 1e-4 * difference.magnitude, "{architecture:?}: {difference:?}");
        assert_eq!(difference.argmax_differs, 0, "{architecture:?}: {difference:?}");
    }
}

/// The same model with its weights restored to F32: with packed ones candle rounds activations to 8 bits.
fn unpacked(model: &Model) -> Model {
    let tensor = |packed: &weights::Tensor| {
        let bytes: Vec<u8> = packed.to_f32().iter().flat_map(|x| x.to_le_bytes()).collect();
        weights::Tensor { tensor_type: TensorType::F32, bytes: Bytes::from(bytes), ..packed.clone() }
    };
    let optional = |packed: &Option<weights::Tensor>| packed.as_ref().map(tensor);
    let token_embedding = tensor(&model.weights.token_embedding);
    let layer = |layer: &LayerWeights| LayerWeights {
        attn_norm: tensor(&layer.attn_norm),
        attn_q: tensor(&layer.attn_q),
        attn_k: tensor(&layer.attn_k),
        attn_v: tensor(&layer.attn_v),
        attn_q_bias: optional(&layer.attn_q_bias),
        attn_k_bias: optional(&layer.attn_k_bias),
        attn_v_bias: optional(&layer.attn_v_bias),
        attn_output: tensor(&layer.attn_output),
        attn_output_bias: optional(&layer.attn_output_bias),
        ffn_norm: tensor(&layer.ffn_norm),
        ffn_gate: tensor(&layer.ffn_gate),
        ffn_up: tensor(&layer.ffn_up),
        ffn_down: tensor(&layer.ffn_down),
    };
    let output =
        if model.config.tied_embeddings { token_embedding.clone() } else { tensor(&model.weights.output) };
    let weights = Weights {
        layers: model.weights.layers.iter().map(layer).collect(),
        output_norm: tensor(&model.weights.output_norm),
        output,
        token_embedding,
    };
    Model { config: model.config.clone(), weights, tokenizer: None }
}

/// A thousand teacher-forced tokens of real text: differences are those of f32, and no likeliest token
/// differs but for ties.
#[test]
fn the_model_gives_the_same_logits_on_a_thousand_tokens() {
    let Some(path) = fetched_model("the_model_gives_the_same_logits_on_a_thousand_tokens") else { return };
    let model = Model::open(Path::new(&path)).expect("the model opens");
    let corpus = Corpus::fetched("moby-dick").expect("fetched with the model");
    let tokens =
        corpus.window(model.tokenizer().expect("a tokenizer"), 300_000, 1000).expect("long enough").tokens;
    let model = unpacked(&model);
    let difference = compare_logits(&model, &synthetic::file(&model), &tokens);
    println!("SmolLM2: {difference:?}");
    assert!(difference.magnitude > 10.0, "{difference:?}");
    assert!(difference.largest < 1e-3 * difference.magnitude, "{difference:?}");
    assert_eq!(difference.argmax_differs, 0, "{difference:?}");
}
