//! Tokenizers, on a small vocabulary: every byte, some pieces, the control tokens of ChatML.

use crate::tiny::{open, writer};
use host::model::config::Architecture;
use host::model::gguf::write::Writer;
use host::model::gguf::{Array, Value};
use host::model::text::Corpus;
use host::model::tokenizer::{Message, TokenKind};
use host::model::{Error, Tokenizer};
use proptest::prelude::*;
use std::sync::LazyLock;

fn tokenizer(writer: &Writer) -> Tokenizer {
    open(writer).expect("a valid model").tokenizer.expect("a tokenizer")
}

fn with_pre(pre: &str) -> Tokenizer {
    tokenizer(writer(Architecture::Llama).set("tokenizer.ggml.pre", Value::String(pre.into())))
}

/// The token of a byte.
const fn byte(byte: u8) -> u32 {
    3 + byte as u32
}

fn pieces(tokenizer: &Tokenizer, text: &str) -> Vec<String> {
    let ids = tokenizer.encode(text).expect("tokens");
    ids.iter().map(|&id| tokenizer.piece(id).expect("a token").to_owned()).collect()
}

#[test]
fn merges_go_by_rank() {
    let tokenizer = with_pre("smollm");
    assert_eq!(pieces(&tokenizer, "the thing and then"), ["t", "he", "Ġt", "h", "ing", "Ġand", "Ġthe", "n"]);
    assert_eq!(tokenizer.encode("é\0").expect("tokens"), [byte(0xc3), byte(0xa9), byte(0)]);
}

/// What may be merged across is what a pre-tokenizer leaves together.
#[test]
fn pre_tokenizers_cut_differently() {
    let merges = ["1 2", "12 3", "Ġ 1", "in g", "i n", "( in", "! Ċ"].map(str::to_owned).to_vec();
    let cut = |pre: &str, text: &str| {
        let mut writer = writer(Architecture::Llama);
        let file = host::model::gguf::Gguf::from_bytes("tiny", writer.to_bytes()).expect("valid");
        let tokens = file.get("tokenizer.ggml.tokens").and_then(Value::as_array).and_then(Array::as_strings);
        let mut tokens = tokens.expect("tokens").to_vec();
        for (i, merge) in merges.iter().enumerate() {
            let piece = merge.replace(' ', "");
            if !tokens.contains(&piece) {
                tokens[300 + i] = piece;
            }
        }
        writer.set("tokenizer.ggml.pre", Value::String(pre.into()));
        writer.set("tokenizer.ggml.tokens", Value::Array(Array::String(tokens)));
        writer.set("tokenizer.ggml.merges", Value::Array(Array::String(merges.clone())));
        pieces(&tokenizer(&writer), text)
    };
    assert_eq!(cut("gpt-2", "a 123"), ["a", "Ġ", "123"]);
    assert_eq!(cut("smollm", "a 123"), ["a", "Ġ", "1", "2", "3"]);
    assert_eq!(cut("qwen2", "a123"), ["a", "1", "2", "3"]);
    assert_eq!(cut("llama-bpe", "a1234"), ["a", "123", "4"]);
    // One character before a word goes with it, and line breaks with the punctuation before them.
    assert_eq!(cut("qwen2", "(in!\n"), ["(in", "!Ċ"]);
    assert_eq!(cut("gpt-2", "(in!\n"), ["(", "in", "!", "Ċ"]);
    // NFC makes one character of e and its accent.
    assert_eq!(cut("qwen2", "e\u{301}"), ["Ã", "©"]);
    assert_eq!(cut("llama-bpe", "e\u{301}"), ["e", "Ì", "ģ"]);
}

#[test]
fn control_tokens_come_only_when_asked_for() {
    let tokenizer = with_pre("smollm");
    let text = "a<|im_end|>b<|im_end";
    assert!(tokenizer.encode(text).expect("tokens").iter().all(|&id| id > 2));
    let ids = tokenizer.encode_special(text).expect("tokens");
    assert_eq!(ids[..3], [byte(b'a'), 2, byte(b'b')]);
    assert!(ids[3..].iter().all(|&id| id > 2));
    assert_eq!(tokenizer.decode(&ids).expect("text"), "ab<|im_end");
    assert!(tokenizer.is_end(2) && tokenizer.is_end(0) && !tokenizer.is_end(1) && !tokenizer.is_end(50));
    assert_eq!((tokenizer.bos(), tokenizer.kind(319).expect("a token")), (None, TokenKind::Unused));
    let mut with_bos = writer(Architecture::Llama);
    with_bos.set("tokenizer.ggml.add_bos_token", Value::Bool(true));
    assert_eq!(self::tokenizer(&with_bos).bos(), Some(1));

    // A token that a user defined is one wherever it is spelled, the longest first.
    let mut defined = writer(Architecture::Llama);
    let mut kinds = vec![1; 320];
    kinds[300] = 4;
    kinds[301] = 4;
    let file = host::model::gguf::Gguf::from_bytes("tiny", defined.to_bytes()).expect("valid");
    let tokens = file.get("tokenizer.ggml.tokens").and_then(Value::as_array).and_then(Array::as_strings);
    let mut tokens = tokens.expect("tokens").to_vec();
    tokens[300] = "<tool>".into();
    tokens[301] = "<tool> é".into();
    defined.set("tokenizer.ggml.tokens", Value::Array(Array::String(tokens)));
    defined.set("tokenizer.ggml.token_type", Value::Array(Array::I32(kinds)));
    let tokenizer = self::tokenizer(&defined);
    let ids = tokenizer.encode("é<tool>x<tool> é").expect("tokens");
    assert_eq!(ids, [byte(0xc3), byte(0xa9), 300, byte(b'x'), 301]);
    assert_eq!(tokenizer.decode(&ids).expect("text"), "é<tool>x<tool> é");
}

#[test]
fn chats_are_put_together_from_ids() {
    let tokenizer = with_pre("smollm");
    let ids = tokenizer.chat(&[Message::user("hi")]).expect("a prompt");
    assert_eq!(
        ids,
        tokenizer.encode_special("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n").expect("tokens")
    );
    let template = |text: Option<&str>| {
        let mut writer = writer(Architecture::Llama);
        match text {
            Some(text) => writer.set("tokenizer.chat_template", Value::String(text.into())),
            None => writer.unset("tokenizer.chat_template"),
        };
        let error = self::tokenizer(&writer).chat(&[]).expect_err("no ChatML");
        assert!(matches!(error, Error::ChatTemplate { .. }));
        error.to_string()
    };
    assert!(template(None).contains("no chat template"));
    let other = template(Some("{% for m in messages %}\n[INST] {{ m }}"));
    assert!(other.contains("another kind ('{% for m in messages %} [INST] {{ m }}…')"), "{other}");
}

#[test]
fn characters_come_whole() {
    let tokenizer = with_pre("smollm");
    let mut stream = tokenizer.stream();
    let mut push = |bytes: &[u8]| -> String {
        bytes.iter().map(|&b| stream.push(byte(b)).expect("a token")).collect::<Vec<_>>().join("|")
    };
    assert_eq!(push("é🙂a".as_bytes()), "|é||||🙂|a");
    // A byte that starts nothing, a character cut off by another, and one that never ends.
    assert_eq!(push(&[0xff]), "\u{fffd}");
    assert_eq!(push(&[0xe2, 0x82, b'x']), "||\u{fffd}x");
    assert_eq!(push(&[0xf0, 0x9f]), "|");
    assert!(matches!(stream.push(320), Err(Error::NoToken { id: 320, vocab: 320 })));
    assert_eq!(stream.finish(), "\u{fffd}");
}

#[test]
fn wrong_tokenizers_are_named() {
    type Change = fn(&mut Writer);
    let strings =
        |texts: &[&str]| Value::Array(Array::String(texts.iter().map(|&text| text.to_owned()).collect()));
    let refusal = |change: &dyn Fn(&mut Writer)| {
        let mut writer = writer(Architecture::Llama);
        change(&mut writer);
        let error = open(&writer).expect_err("a wrong tokenizer").to_string();
        assert_eq!(error.lines().count(), 1);
        error
    };
    let spm = refusal(&|writer| {
        writer.set("tokenizer.ggml.model", Value::String("llama".into()));
    });
    assert!(spm.contains("has the tokenizer llama; gpt2 with"), "{spm}");
    let pre = refusal(&|writer| {
        writer.set("tokenizer.ggml.pre", Value::String("other".into()));
    });
    assert!(pre.contains("'other'") && pre.contains("smollm, qwen2"), "{pre}");
    for key in ["tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.pre"] {
        assert!(
            refusal(&|writer| {
                writer.unset(key);
            })
            .contains(key)
        );
        assert!(
            refusal(&|writer| {
                writer.set(key, Value::U8(1));
            })
            .contains("1 (u8)")
        );
    }
    for (merges, expected) in [
        (vec!["a"], "merge 'a' is not two pieces"),
        (vec!["a b c"], "merge 'a b c' is not two pieces"),
        (vec!["a "], "merge 'a ' is not two pieces"),
        (vec!["a b"], "ab"),
    ] {
        let error = refusal(&|writer| {
            writer.set("tokenizer.ggml.merges", strings(&merges));
        });
        assert!(error.contains("is broken") && error.contains(expected), "{error}");
    }
    let twice = refusal(&|writer| {
        writer.set("tokenizer.ggml.tokens", strings(&["a", "b", "a"])).unset("tokenizer.ggml.token_type");
    });
    assert!(twice.contains("token 'a' is there twice"), "{twice}");
    let kinds: [Change; 2] = [
        |writer| {
            writer.set("tokenizer.ggml.token_type", Value::Array(Array::I32(vec![1; 319])));
        },
        |writer| {
            writer.set("tokenizer.ggml.token_type", Value::Array(Array::I32(vec![7; 320])));
        },
    ];
    assert!(kinds.iter().all(|change| refusal(change).contains("an array of 320 i32 from 1 to 6")));
    let end = refusal(&|writer| {
        writer.set("tokenizer.ggml.eos_token_id", Value::U32(320));
    });
    assert!(end.contains("eos_token_id") && end.contains("a token below 320"), "{end}");
    let many: Vec<String> = (0..321).map(|i| format!("t{i}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let large = refusal(&|writer| {
        writer.set("tokenizer.ggml.tokens", strings(&many)).unset("tokenizer.ggml.token_type");
        writer.set("tokenizer.ggml.merges", strings(&[]));
    });
    assert!(large.contains("its tokenizer has 321 tokens and its embedding 320 rows"), "{large}");
    let mut none = writer(Architecture::Llama);
    none.unset("tokenizer.ggml.model");
    assert!(matches!(open(&none).expect("a model").tokenizer(), Err(Error::NoTokenizer { .. })));
}

#[test]
fn windows_are_cut_from_the_text_at_their_places() {
    let tokenizer = with_pre("smollm");
    let text: String = (0..4000).map(|i| format!("the {i} naïve things,\nand ")).collect();
    let all = tokenizer.encode(&text).expect("tokens");
    let corpus = Corpus::new("things", text.clone());
    for length in [0, 1, 7, 100, 5000, all.len()] {
        let window = corpus.window(&tokenizer, 0, length).expect("long enough");
        assert_eq!((window.start, &window.tokens[..]), (0, &all[..length]));
    }
    // Byte 8 is inside of ï.
    assert_eq!(corpus.window(&tokenizer, 9, 5).expect("long enough").start, 10);
    let short = corpus.window(&tokenizer, 0, all.len() + 1).expect_err("too long").to_string();
    assert!(short.contains(&format!(
        "things has {} tokens from byte 0 on, and {}",
        all.len(),
        all.len() + 1
    )));

    let windows = corpus.windows(&tokenizer, 1000, 10).expect("long enough");
    assert_eq!((windows.len(), windows[0].start), (10, 0));
    for (i, window) in windows.iter().enumerate() {
        let decoded = tokenizer.decode(&window.tokens).expect("text");
        assert!(text[window.start..].starts_with(&decoded), "{i}");
        assert!(i == 0 || text[..window.start].ends_with(char::is_whitespace), "{i}");
        let next = windows.get(i + 1).map_or(text.len(), |next| next.start);
        assert!(window.start + decoded.len() <= next, "{i}");
    }
    assert!(matches!(corpus.windows(&tokenizer, 10_000, 10), Err(Error::TextTooShort { .. })));
    assert!(corpus.windows(&tokenizer, 10, 0).expect("none").is_empty());
    assert!(corpus.windows(&tokenizer, 1, text.len()).is_err());
}

#[test]
fn texts_that_cannot_be_read_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("bytes.txt");
    std::fs::write(&path, [b'a', 0xff]).expect("written");
    let error = Corpus::open(&path).expect_err("no UTF-8").to_string();
    assert!(error.contains("bytes.txt") && error.contains("UTF-8"), "{error}");
    assert!(matches!(Corpus::open(folder.path().join("none.txt")), Err(Error::Text { .. })));
    assert!(matches!(Corpus::fetched("no-such-text"), Err(Error::NotFetched { .. })));
}

static TOKENIZERS: LazyLock<[Tokenizer; 3]> =
    LazyLock::new(|| ["smollm", "gpt-2", "llama-bpe"].map(with_pre));

proptest! {
    /// With every byte in the vocabulary nothing is lost, streamed or not.
    #[test]
    fn any_text_comes_back(text in any::<String>(), spaced in "[ \n\ta-z0-9'é🙂]{0,60}") {
        for text in [text, spaced] {
            for tokenizer in TOKENIZERS.iter() {
                let ids = tokenizer.encode(&text).expect("tokens");
                prop_assert_eq!(tokenizer.decode(&ids).expect("text"), text.clone());
                let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.bytes(id).expect("a token").into_owned()).collect();
                prop_assert_eq!(&bytes, text.as_bytes());
                prop_assert_eq!(tokenizer.encode_special(&text).expect("tokens"), ids);
            }
        }
    }

    /// Any ids give some text, and the stream gives the same as the whole.
    #[test]
    fn any_tokens_give_text(ids in prop::collection::vec(0u32..320, 0..40)) {
        let tokenizer = &TOKENIZERS[0];
        let bytes: Vec<u8> = ids.iter().filter(|&&id| id > 2).flat_map(|&id| tokenizer.bytes(id).expect("a token").into_owned()).collect();
        prop_assert_eq!(tokenizer.decode(&ids).expect("text"), String::from_utf8_lossy(&bytes).into_owned());
    }
}
