//! Models with random weights: the right shapes for measuring speed at sizes that no file here has, and small
//! ones for tests.
//!
//! The weights depend on the seed and the shape alone, not on the machine or the number of threads. They are
//! of a size that keeps activations finite (about 1/√inputs), and the text that such a model writes is noise.

use super::Model;
use super::config::{Architecture, ModelConfig, Rope};
use super::error::{Error, Result};
use super::gguf::write::Writer;
use super::gguf::{Array, Bytes, TensorType, Value};
use super::tokenizer::byte_characters;
use super::weights::{Tensor, Weights, assemble};
use crate::random::Random;
use half::f16;
use kernels_gpu::mix;
use rayon::prelude::*;

/// A model whose shape is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Llama 3.1 8B: 32 layers, 32 query heads on 8 KV heads of 128.
    Llama31_8B,
    /// Qwen 2.5 7B: 28 layers, 28 query heads on 4 KV heads of 128, biases on Q, K and V.
    Qwen25_7B,
}

impl Shape {
    /// All of them.
    pub const ALL: [Shape; 2] = [Shape::Llama31_8B, Shape::Qwen25_7B];

    /// What it is called on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Shape::Llama31_8B => "llama-3.1-8b",
            Shape::Qwen25_7B => "qwen2.5-7b",
        }
    }

    /// Its sizes.
    pub fn config(self) -> ModelConfig {
        let name = format!("{} (random weights)", self.name());
        match self {
            Shape::Llama31_8B => ModelConfig {
                architecture: Architecture::Llama,
                name,
                layers: 32,
                hidden: 4096,
                ffn: 14336,
                query_heads: 32,
                kv_heads: 8,
                head_dim: 128,
                rope: Rope {
                    kind: Architecture::Llama.rope_kind(),
                    theta: 500_000.0,
                    dims: 128,
                    factors: Some(llama31_factors(500_000.0, 128)),
                },
                norm_eps: 1e-5,
                vocab: 128_256,
                context: 131_072,
                tied_embeddings: false,
                qkv_bias: false,
                attn_output_bias: false,
            },
            Shape::Qwen25_7B => ModelConfig {
                architecture: Architecture::Qwen2,
                name,
                layers: 28,
                hidden: 3584,
                ffn: 18944,
                query_heads: 28,
                kv_heads: 4,
                head_dim: 128,
                rope: Rope {
                    kind: Architecture::Qwen2.rope_kind(),
                    theta: 1_000_000.0,
                    dims: 128,
                    factors: None,
                },
                norm_eps: 1e-6,
                vocab: 152_064,
                // That of its variant for long texts, rounded up.
                context: 1 << 20,
                tied_embeddings: false,
                qkv_bias: true,
                attn_output_bias: false,
            },
        }
    }
}

/// Llama 3.1's rule: wavelengths over 8192 positions are stretched 8 times, those under 8192/4 not at all,
/// and between them the factor's inverse goes linearly with 8192 / wavelength.
fn llama31_factors(theta: f64, dims: usize) -> Vec<f32> {
    const STRETCH: f64 = 8.0;
    const LOW: f64 = 1.0;
    const HIGH: f64 = 4.0;
    const TRAINED: f64 = 8192.0;
    let factor = |i: usize| {
        let wavelength = std::f64::consts::TAU * theta.powf(2.0 * i as f64 / dims as f64);
        let smooth = ((TRAINED / wavelength - LOW) / (HIGH - LOW)).clamp(0.0, 1.0);
        (1.0 / ((1.0 - smooth) / STRETCH + smooth)) as f32
    };
    (0..dims / 2).map(factor).collect()
}

/// A small model for tests, with heads that do not fill the residual stream; its vocabulary has 320 tokens.
pub fn tiny(architecture: Architecture) -> ModelConfig {
    let qwen = architecture == Architecture::Qwen2;
    ModelConfig {
        architecture,
        name: format!("tiny {} (random weights)", architecture.name()),
        layers: 2,
        hidden: 128,
        ffn: 192,
        query_heads: 4,
        kv_heads: 2,
        head_dim: 64,
        rope: Rope { kind: architecture.rope_kind(), theta: 10_000.0, dims: 64, factors: None },
        norm_eps: 1e-5,
        vocab: 320,
        context: 512,
        tied_embeddings: !qwen,
        qkv_bias: qwen,
        attn_output_bias: false,
    }
}

/// How the matrices are packed; norms and biases are F32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// All in Q8_0: 8.5 bits a value.
    Q8_0,
    /// Projections in Q4_1 (5 bits a value), embedding and output in Q8_0.
    Q4_1,
    /// All in F32, for comparisons with implementations that round their activations for packed weights.
    F32,
}

/// A model of these sizes with random weights.
///
/// # Errors
/// Sizes that are no multiple of the 32 values of a block.
pub fn model(config: ModelConfig, packing: Packing, seed: u64) -> Result<Model> {
    let weights = weights(&config, packing, seed)?;
    Ok(Model { config, weights, tokenizer: None })
}

/// The weights alone.
///
/// # Errors
/// As [`model`].
pub fn weights(config: &ModelConfig, packing: Packing, seed: u64) -> Result<Weights> {
    let mut number = 0;
    assemble(config, &mut |name, rows, columns| {
        let (tensor_type, fill_row) = kind(name, packing);
        let Some(row_bytes) = tensor_type.row_bytes(columns) else {
            let feature = format!("'{name}' with rows of {columns} values, no multiple of 32,");
            return Err(Error::Unsupported { model: config.name.clone(), feature });
        };
        number += 1;
        let mut bytes = vec![0; rows * row_bytes];
        bytes.par_chunks_mut(row_bytes).enumerate().for_each(|(row, bytes)| {
            let mut random = Random::counting(seed ^ mix(number), (row as u64) << 32);
            fill_row(bytes, columns, &mut random);
        });
        Ok(Tensor { name: name.to_owned(), tensor_type, rows, columns, bytes: Bytes::from(bytes) })
    })
}

/// Fills a row of that many values.
type Fill = fn(&mut [u8], usize, &mut Random);

fn kind(name: &str, packing: Packing) -> (TensorType, Fill) {
    if name.ends_with("norm.weight") {
        (TensorType::F32, |bytes, _, random| plain(bytes, 1.0, 0.5, random))
    } else if name.ends_with(".bias") {
        (TensorType::F32, |bytes, _, random| plain(bytes, 0.0, 0.5, random))
    } else if packing == Packing::F32 {
        (TensorType::F32, |bytes, columns, random| {
            plain(bytes, 0.0, 12f32.sqrt() / (columns as f32).sqrt(), random)
        })
    } else if packing == Packing::Q8_0 || !name.starts_with("blk.") {
        (TensorType::Q8_0, q8_0)
    } else {
        (TensorType::Q4_1, q4_1)
    }
}

/// f32 in an interval of `width` about `mean`.
fn plain(bytes: &mut [u8], mean: f32, width: f32, random: &mut Random) {
    for value in bytes.as_chunks_mut::<4>().0 {
        *value = (mean + (uniform(random) - 0.5) * width).to_le_bytes();
    }
}

fn q8_0(bytes: &mut [u8], columns: usize, random: &mut Random) {
    // Codes uniform in ±127 have the standard deviation 255/√12.
    let step = 12f32.sqrt() / 255.0 / (columns as f32).sqrt();
    for block in bytes.as_chunks_mut::<34>().0 {
        let d = f16::from_f32(step * (0.5 + uniform(random)));
        block[..2].copy_from_slice(&d.to_le_bytes());
        fill(&mut block[2..], random);
        block[2..].iter_mut().for_each(|code| *code = (*code as i8).max(-127) as u8);
    }
}

fn q4_1(bytes: &mut [u8], columns: usize, random: &mut Random) {
    // Codes uniform in 0..=15 have the standard deviation 16/√12 and the mean 7.5.
    let step = 12f32.sqrt() / 16.0 / (columns as f32).sqrt();
    for block in bytes.as_chunks_mut::<20>().0 {
        let d = f16::from_f32(step * (0.5 + uniform(random)));
        block[..2].copy_from_slice(&d.to_le_bytes());
        block[2..4].copy_from_slice(&f16::from_f32(-7.5 * d.to_f32()).to_le_bytes());
        fill(&mut block[4..], random);
    }
}

/// In [0, 1).
fn uniform(random: &mut Random) -> f32 {
    (random.word() >> 40) as f32 / (1 << 24) as f32
}

/// Whole words: a block's codes are a multiple of eight bytes.
fn fill(bytes: &mut [u8], random: &mut Random) {
    for word in bytes.as_chunks_mut::<8>().0 {
        *word = random.word().to_le_bytes();
    }
}

/// A file of a model, with the tiny tokenizer if the vocabulary has room for it: what a converter would
/// write.
///
/// The tokenizer is of the kind `smollm` with ChatML: tokens 0 to 2 are `<|endoftext|>`, `<|im_start|>` and
/// `<|im_end|>`, byte b is token 3 + b, and some common pieces follow.
pub fn file(model: &Model) -> Writer {
    let config = &model.config;
    let prefix = config.architecture.name();
    let mut writer = Writer::new();
    writer.set("general.architecture", Value::String(prefix.into()));
    writer.set("general.name", Value::String(config.name.clone()));
    for (key, size) in [
        ("block_count", config.layers),
        ("context_length", config.context),
        ("embedding_length", config.hidden),
        ("feed_forward_length", config.ffn),
        ("attention.head_count", config.query_heads),
        ("attention.head_count_kv", config.kv_heads),
        ("attention.key_length", config.head_dim),
        ("attention.value_length", config.head_dim),
        ("rope.dimension_count", config.rope.dims),
        ("vocab_size", config.vocab),
    ] {
        writer.set(&format!("{prefix}.{key}"), Value::U32(size as u32));
    }
    writer.set(&format!("{prefix}.rope.freq_base"), Value::F32(config.rope.theta as f32));
    writer.set(&format!("{prefix}.attention.layer_norm_rms_epsilon"), Value::F32(config.norm_eps));
    if let Some(factors) = &config.rope.factors {
        let bytes = factors.iter().flat_map(|factor| factor.to_le_bytes()).collect();
        writer.tensor("rope_freqs.weight", &[factors.len() as u64], TensorType::F32, bytes);
    }
    for tensor in model.weights.tensors() {
        let dims = [tensor.columns as u64, tensor.rows as u64];
        let dims = if tensor.rows == 1 { &dims[..1] } else { &dims };
        writer.tensor(&tensor.name, dims, tensor.tensor_type, tensor.bytes.to_vec());
    }
    tokenizer(&mut writer, config.vocab);
    writer
}

/// Pairs that are merged, in the order of their ranks.
const MERGES: [(&str, &str); 12] = [
    ("Ġ", "t"),
    ("h", "e"),
    ("i", "n"),
    ("Ġt", "he"),
    ("e", "r"),
    ("Ġ", "a"),
    ("o", "n"),
    ("Ġa", "n"),
    ("Ġan", "d"),
    ("l", "l"),
    ("in", "g"),
    ("Ġ", "Ġ"),
];

fn tokenizer(writer: &mut Writer, vocab: usize) {
    let mut tokens: Vec<String> = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"].map(str::to_owned).into();
    let mut kinds = vec![3; tokens.len()];
    tokens.extend(byte_characters().map(String::from));
    tokens.extend(MERGES.map(|(a, b)| format!("{a}{b}")));
    if tokens.len() > vocab {
        return;
    }
    kinds.resize(tokens.len(), 1);
    tokens.extend((tokens.len()..vocab).map(|id| format!("[PAD{id}]")));
    kinds.resize(vocab, 5);
    let strings = |strings: Vec<String>| Value::Array(Array::String(strings));
    writer.set("tokenizer.ggml.model", Value::String("gpt2".into()));
    writer.set("tokenizer.ggml.pre", Value::String("smollm".into()));
    writer.set("tokenizer.ggml.tokens", strings(tokens));
    writer.set("tokenizer.ggml.token_type", Value::Array(Array::I32(kinds)));
    writer.set("tokenizer.ggml.merges", strings(MERGES.map(|(a, b)| format!("{a} {b}")).into()));
    writer.set("tokenizer.ggml.bos_token_id", Value::U32(1));
    writer.set("tokenizer.ggml.eos_token_id", Value::U32(2));
    writer.set("tokenizer.ggml.add_bos_token", Value::Bool(false));
    let template = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + \
                    '<|im_end|>' + '\n'}}{% endfor %}{{ '<|im_start|>assistant\n' }}";
    writer.set("tokenizer.chat_template", Value::String(template.into()));
}
