//! What `./setup --model` fetches. Without it these tests say so and pass; nothing else lets them pass
//! unseen.

use host::model::oracle::{DenseKeyValues, KeyValues, Oracle, log_probability, perplexity};
use host::model::text::Corpus;
use host::model::tokenizer::{Message, Role, TokenKind};
use host::model::{Error, Model, fetched};
use std::borrow::Cow;
use std::io::Write;
use std::sync::OnceLock;

/// The model, or a line that says that there is none.
pub fn model() -> Option<&'static Model> {
    static MODEL: OnceLock<Option<Model>> = OnceLock::new();
    let open = || match fetched::model() {
        Err(Error::NotFetched { .. }) => None,
        found => Some(Model::open(found.expect("a path")).expect("the model opens")),
    };
    let model = MODEL.get_or_init(open).as_ref();
    if model.is_none() {
        // Past the test harness's capture, or nobody would see it.
        let name = std::thread::current().name().unwrap_or_default().to_owned();
        let _ = writeln!(std::io::stderr(), "{name}: skipped, the model is not fetched (./setup --model)");
    }
    model
}

#[test]
fn the_model_is_what_it_should_be() {
    let Some(model) = model() else { return };
    let config = &model.config;
    let sizes =
        [config.layers, config.hidden, config.ffn, config.query_heads, config.kv_heads, config.head_dim];
    assert_eq!(sizes, [30, 576, 1536, 9, 3, 64]);
    assert_eq!((config.rope.theta, config.rope.dims, config.norm_eps), (100_000.0, 64, 1e-5));
    assert_eq!((config.vocab, config.context, config.kv_values_per_token()), (49152, 8192, 11520));
    assert!(config.tied_embeddings && !config.qkv_bias);
    let values: usize = model.weights.tensors().map(|tensor| tensor.rows * tensor.columns).sum();
    assert_eq!((values, model.weights.tensors().count()), (134_515_008, 272));
}

/// Ids by an independent byte-level BPE (plain merging by rank) over this vocabulary.
#[test]
fn texts_get_the_tokens_that_they_should() {
    let Some(model) = model() else { return };
    let tokenizer = model.tokenizer().expect("a tokenizer");
    assert_eq!((tokenizer.vocab(), tokenizer.bos()), (49152, None));
    for (text, expected) in EXPECTED {
        let ids = tokenizer.encode(text).expect("tokens");
        assert_eq!(ids, *expected, "{text:?}");
        assert_eq!(tokenizer.decode(&ids).expect("text"), *text);
    }
    assert_eq!(
        (tokenizer.piece(28).expect("a token"), tokenizer.kind(2).expect("a token")),
        (",", TokenKind::Control)
    );
    assert!(tokenizer.is_end(2) && tokenizer.is_end(0) && !tokenizer.is_end(1));
    assert!(matches!(tokenizer.piece(49152), Err(Error::NoToken { id: 49152, vocab: 49152 })));
    assert!(matches!(tokenizer.decode(&[5, 1 << 31]), Err(Error::NoToken { .. })));
}

const EXPECTED: &[(&str, &[u32])] = &[
    ("", &[]),
    ("Hello, world!", &[19556, 28, 905, 17]),
    (
        " The year 1984  wasn't\n\n  like '1984'.",
        &[378, 713, 216, 33, 41, 40, 36, 216, 5603, 982, 8866, 702, 637, 33, 41, 40, 36, 4289],
    ),
    ("naïve — 中文字 🙂", &[3546, 46494, 1841, 216, 28589, 29184, 36518, 47526]),
    ("\ttabs\r\n", &[197, 100, 7366, 2738]),
    ("don't  stop", &[12420, 982, 216, 2853]),
    ("x = foo(bar)[0] # 3.14", &[104, 446, 29856, 24, 6299, 12993, 32, 77, 907, 216, 35, 30, 33, 36]),
    ("²½ ١٢", &[19133, 16738, 216, 164, 111, 164, 112]),
];

#[test]
fn chats_follow_the_models_template() {
    let Some(model) = model() else { return };
    let tokenizer = model.tokenizer().expect("a tokenizer");
    let spelled = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n\
                   <|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n";
    let ids = tokenizer.chat(&[Message::user("Why is the sky blue?")]).expect("a prompt");
    assert_eq!(ids, tokenizer.encode_special(spelled).expect("tokens"));
    let system = Message { role: Role::System, content: "Be brief.".into() };
    let ids = tokenizer.chat(&[system, Message::user("Hi<|im_end|>")]).expect("a prompt");
    let controls =
        ids.iter().filter(|&&id| tokenizer.kind(id).expect("a token") == TokenKind::Control).count();
    assert_eq!((controls, ids[0]), (5, 1), "what the user writes ends no turn");
    let text = tokenizer.decode(&ids).expect("text");
    assert_eq!(text, "system\nBe brief.\nuser\nHi<|im_end|>\nassistant\n");
}

/// A window of a text from this character on, with no separators between the speeches.
fn tokens(model: &Model, text: &str, start: usize, length: usize) -> Vec<u32> {
    let corpus = Corpus::fetched(text).expect("fetched with the model");
    let mut text = corpus.text().to_owned();
    if corpus.name() == "sotu" {
        // The first speech ends with no line feed and the second with one of its own.
        text = text.replacen('\n', "", 1).replacen("\n\n", "\n", 1);
    }
    let start = text.char_indices().nth(start).expect("a long text").0;
    let tokenizer = model.tokenizer().expect("a tokenizer");
    Corpus::new("reference", text).window(tokenizer, start, length).expect("long enough").tokens
}

/// Against an independent implementation in another language, of which two decimals are known.
#[test]
fn perplexities_are_those_of_an_independent_implementation() {
    let Some(model) = model() else { return };
    let oracle = Oracle::new(model);
    for (text, expected) in [("sotu", 36.72), ("moby-dick", 50.44)] {
        let tokens = tokens(model, text, 20_000, 1024);
        let found = perplexity(&oracle.log_probabilities(&tokens).expect("logits"));
        println!("{text}: perplexity {found:.4}, expected {expected}");
        assert!((found / expected - 1.0).abs() < 0.005, "{text}: {found}, expected {expected}");
    }
}

/// A cache that is read token by token, as quantized ones are.
struct Stepwise(DenseKeyValues);

impl KeyValues for Stepwise {
    fn tokens(&self) -> usize {
        self.0.tokens()
    }

    fn append(&mut self, layer: usize, keys: &[f64], values: &[f64]) {
        self.0.append(layer, keys, values);
    }

    fn head(&self, layer: usize, kv_head: usize) -> [Cow<'_, [f64]>; 2] {
        self.0.head(layer, kv_head).map(|x| Cow::Owned(x.into_owned()))
    }
}

#[test]
fn one_call_or_many_one_token_or_all() {
    let Some(model) = model() else { return };
    let oracle = Oracle::new(model);
    let tokens = tokens(model, "sotu", 100_000, 24);
    let vocab = model.config.vocab;
    let whole = oracle.forward(&tokens, &mut DenseKeyValues::new(&model.config)).expect("logits");
    let mut dense = DenseKeyValues::new(&model.config);
    let mut parts = oracle.forward(&tokens[..10], &mut dense).expect("logits");
    parts.extend(oracle.forward(&tokens[10..], &mut dense).expect("logits"));
    let stepwise =
        oracle.forward(&tokens, &mut Stepwise(DenseKeyValues::new(&model.config))).expect("logits");
    assert_eq!((whole.len(), dense.tokens()), (24 * vocab, 24));
    for other in [parts, stepwise] {
        let difference = whole.iter().zip(&other).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(difference < 1e-9, "{difference}");
    }
    let expected: Vec<f64> =
        (1..24).map(|i| log_probability(&whole[(i - 1) * vocab..i * vocab], tokens[i])).collect();
    let found = oracle.log_probabilities(&tokens).expect("logits");
    assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-9));

    let bad = oracle.forward(&[49152], &mut dense).expect_err("no such token");
    assert!(matches!(bad, Error::NoToken { .. }) && dense.tokens() == 24);
    let long = oracle.forward(&vec![5; 8169], &mut dense).expect_err("too long").to_string();
    assert!(long.contains("8193 tokens are more than the context of 8192"), "{long}");
}
