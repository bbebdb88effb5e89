//! Text to tokens and back: byte-level BPE from a file's tokens and merges.
//!
//! The merging is the `tokenizers` crate's; what a file calls its pre-tokenizer chooses how a text is cut
//! before:
//!
//! | `tokenizer.ggml.pre` | pieces |
//! | --- | --- |
//! | `gpt-2` | contractions, words, numbers and punctuation, each with the space before it |
//! | `smollm` | every digit alone, then as `gpt-2` |
//! | `qwen2` | NFC; words with one character before them, digits alone, line breaks with what precedes |
//! | `llama-bpe` | the same without NFC, up to three digits together; a piece that is a token is not merged |
//!
//! Bytes that the vocabulary lacks are left out, as the models' own tokenizers do. SmolLM2 lacks 21: 13 that
//! UTF-8 never has, six control characters, and the first bytes of two ranges of rare characters.
//!
//! A text never becomes a control token: a prompt with `<|im_end|>` in it is those ten characters, unless
//! [`Tokenizer::encode_special`] is asked. The turns of a chat are put together from ids
//! ([`Tokenizer::chat`]).

mod chat;
mod stream;

pub use chat::{Message, Role};
pub use stream::DecodeStream;

use super::config::{model_name, text, wrong_key};
use super::error::{Error, Result};
use super::gguf::{Array, Gguf, Value};
use chat::ChatMl;
use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::sync::LazyLock;
use tokenizers::SplitDelimiterBehavior::Isolated;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};

const TOKENS: &str = "tokenizer.ggml.tokens";
const MERGES: &str = "tokenizer.ggml.merges";
const TYPES: &str = "tokenizer.ggml.token_type";

/// How a text is cut before its pieces are merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PreTokenizer {
    Gpt2,
    SmolLm,
    Qwen2,
    Llama3,
}

impl PreTokenizer {
    const ALL: [PreTokenizer; 4] =
        [PreTokenizer::Gpt2, PreTokenizer::SmolLm, PreTokenizer::Qwen2, PreTokenizer::Llama3];

    const fn name(self) -> &'static str {
        match self {
            PreTokenizer::Gpt2 => "gpt-2",
            PreTokenizer::SmolLm => "smollm",
            PreTokenizer::Qwen2 => "qwen2",
            PreTokenizer::Llama3 => "llama-bpe",
        }
    }

    /// The steps: which patterns cut, then bytes to the characters that stand for them.
    fn steps(self) -> tokenizers::Result<Sequence> {
        // What a word, a number, punctuation and white space are; `digits` is how many digits stay together.
        let pattern = |digits: &str| {
            let pattern = [
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
                r"[^\r\n\p{L}\p{N}]?\p{L}+",
                digits,
                r" ?[^\s\p{L}\p{N}]+[\r\n]*",
                r"\s*[\r\n]+",
                r"\s+(?!\S)",
                r"\s+",
            ];
            Split::new(SplitPattern::Regex(pattern.join("|")), Isolated, false)
        };
        let bytes = |use_regex| PreTokenizerWrapper::from(ByteLevel::new(false, true, use_regex));
        Ok(Sequence::new(match self {
            PreTokenizer::Gpt2 => vec![bytes(true)],
            PreTokenizer::SmolLm => vec![Digits::new(true).into(), bytes(true)],
            PreTokenizer::Qwen2 => vec![pattern(r"\p{N}")?.into(), bytes(false)],
            PreTokenizer::Llama3 => vec![pattern(r"\p{N}{1,3}")?.into(), bytes(false)],
        }))
    }
}

/// What a token is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    /// A piece of text.
    Normal,
    /// A mark for the model that no text becomes: the turns of a chat, the end of a document.
    Control,
    /// A text that always becomes this one token.
    UserDefined,
    /// A place in the vocabulary that nothing becomes.
    Unused,
}

/// A model's tokenizer.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// As the file has them: bytes as characters, but for tokens that are not normal.
    pieces: Vec<String>,
    kinds: Vec<TokenKind>,
    /// Control and user-defined tokens, the longest first.
    marks: Vec<u32>,
    bos: Option<u32>,
    add_bos: bool,
    /// Tokens that end a generation.
    ends: Vec<u32>,
    /// What there is instead of ChatML.
    chat: std::result::Result<ChatMl, String>,
    model: String,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("model", &self.model)
            .field("vocab", &self.vocab())
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Reads a file's tokenizer.
    ///
    /// # Errors
    /// A kind that is not known, metadata missing or of the wrong type, or tokens and merges that do not go
    /// together.
    pub fn from_gguf(file: &Gguf) -> Result<Tokenizer> {
        let model = model_name(file);
        let kind = text(file, "tokenizer.ggml.model")?;
        let pre = if kind == "gpt2" { text(file, "tokenizer.ggml.pre")? } else { "" };
        let known = PreTokenizer::ALL.map(PreTokenizer::name).join(", ");
        let Some(pre) = PreTokenizer::ALL.into_iter().find(|known| known.name() == pre) else {
            let found =
                if kind == "gpt2" { format!("gpt2 with the pre-tokenizer '{pre}'") } else { kind.to_owned() };
            return Err(Error::TokenizerKind { model, found, known });
        };
        let broken = |reason: String| Error::Tokenizer { model: model.clone(), reason };
        let pieces = strings(file, TOKENS)?.to_vec();
        let kinds = kinds(file, pieces.len())?;
        let inner = byte_level_bpe(pre, &pieces, strings(file, MERGES)?).map_err(broken)?;

        let mut marks: Vec<u32> = (0..pieces.len() as u32)
            .filter(|&id| matches!(kinds[id as usize], TokenKind::Control | TokenKind::UserDefined))
            .filter(|&id| !pieces[id as usize].is_empty())
            .collect();
        marks.sort_by_key(|&id| std::cmp::Reverse(pieces[id as usize].len()));
        let id = |key: &str| token_id(file, key, pieces.len());
        let mut ends: Vec<u32> = Vec::new();
        for key in ["eos", "eot", "eom"] {
            ends.extend(id(&format!("tokenizer.ggml.{key}_token_id"))?);
        }
        // Whatever the metadata call the end, a chat model also ends with these.
        let named =
            |&id: &u32| matches!(&*pieces[id as usize], "<|im_end|>" | "<|endoftext|>" | "<|eot_id|>");
        ends.extend(marks.iter().copied().filter(named));
        ends.sort_unstable();
        ends.dedup();
        let chat =
            ChatMl::from_gguf(file, |name| marks.iter().copied().find(|&id| pieces[id as usize] == name));
        let add_bos = file.get("tokenizer.ggml.add_bos_token").and_then(Value::as_bool).unwrap_or(false);
        let bos = id("tokenizer.ggml.bos_token_id")?;
        Ok(Tokenizer { inner, pieces, kinds, marks, bos, add_bos, ends, chat, model })
    }

    /// How many tokens there are.
    pub fn vocab(&self) -> usize {
        self.pieces.len()
    }

    /// The token that a text starts with, where the model wants one before every text.
    pub fn bos(&self) -> Option<u32> {
        self.bos.filter(|_| self.add_bos)
    }

    /// Does this token end a generation?
    pub fn is_end(&self, id: u32) -> bool {
        self.ends.binary_search(&id).is_ok()
    }

    /// What a token is for.
    ///
    /// # Errors
    /// There is no such token.
    pub fn kind(&self, id: u32) -> Result<TokenKind> {
        self.kinds.get(id as usize).copied().ok_or(Error::NoToken { id, vocab: self.vocab() })
    }

    /// A token as the file spells it: `Ġthe` is ` the`.
    ///
    /// # Errors
    /// There is no such token.
    pub fn piece(&self, id: u32) -> Result<&str> {
        self.pieces.get(id as usize).map(String::as_str).ok_or(Error::NoToken { id, vocab: self.vocab() })
    }

    /// The bytes of text that a token stands for; one character may take several tokens.
    ///
    /// # Errors
    /// There is no such token.
    pub fn bytes(&self, id: u32) -> Result<Cow<'_, [u8]>> {
        let piece = self.piece(id)?;
        let bytes: Option<Vec<u8>> = match self.kind(id)? {
            TokenKind::Normal => piece.chars().map(|c| BYTES.get(&c).copied()).collect(),
            _ => None,
        };
        Ok(bytes.map_or(Cow::Borrowed(piece.as_bytes()), Cow::Owned))
    }

    /// Tokens of a text. What looks like a control token is text; no token is put before the first.
    ///
    /// # Errors
    /// What the tokenizer cannot do; it can do any text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_marks(text, false)
    }

    /// The same, but control tokens spelled in the text become control tokens.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_special(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_marks(text, true)
    }

    /// Text of tokens. Control tokens have none; bytes that are no UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// A token that there is not.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        let mut stream = self.stream();
        let mut text = String::new();
        for &id in ids {
            text += &stream.push(id)?;
        }
        Ok(text + &stream.finish())
    }

    /// A decoder for tokens that come one at a time.
    pub fn stream(&self) -> DecodeStream<'_> {
        DecodeStream::new(self)
    }

    /// The prompt of a chat, up to where the assistant's answer starts. Without a system message the one that
    /// the model was trained with comes first, if its template has one.
    ///
    /// # Errors
    /// The model has no ChatML template.
    pub fn chat(&self, messages: &[Message]) -> Result<Vec<u32>> {
        match &self.chat {
            Ok(chat) => chat.prompt(self, messages),
            Err(found) => Err(Error::ChatTemplate { model: self.model.clone(), found: found.clone() }),
        }
    }

    fn encode_marks(&self, text: &str, control: bool) -> Result<Vec<u32>> {
        let is_mark = |id: &u32| control || self.kinds[*id as usize] == TokenKind::UserDefined;
        let marks: Vec<(&[u8], u32)> = self
            .marks
            .iter()
            .filter(|id| is_mark(id))
            .map(|&id| (self.pieces[id as usize].as_bytes(), id))
            .collect();
        let mut ids = Vec::new();
        // `start` is where the text that is not encoded yet begins.
        let (mut start, mut at) = (0, 0);
        while at < text.len() && !marks.is_empty() {
            match marks.iter().find(|(mark, _)| text.as_bytes()[at..].starts_with(mark)) {
                None => at += 1,
                Some((mark, id)) => {
                    self.encode_piece(&text[start..at], &mut ids)?;
                    ids.push(*id);
                    at += mark.len();
                    start = at;
                }
            }
        }
        self.encode_piece(&text[start..], &mut ids)?;
        Ok(ids)
    }

    fn encode_piece(&self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        let encoding = self
            .inner
            .encode_fast(text, false)
            .map_err(|error| Error::Encode { reason: error.to_string() })?;
        ids.extend(encoding.get_ids());
        Ok(())
    }
}

/// The characters that stand for the bytes 0 to 255 in pieces: printable bytes for themselves, and the other
/// 68 from U+0100 on.
pub(super) fn byte_characters() -> impl Iterator<Item = char> {
    let mut others = '\u{100}'..;
    (0..=255u8).filter_map(move |byte| match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => Some(char::from(byte)),
        _ => others.next(),
    })
}

static BYTES: LazyLock<HashMap<char, u8>> = LazyLock::new(|| byte_characters().zip(0..=255).collect());

fn strings<'a>(file: &'a Gguf, key: &str) -> Result<&'a [String]> {
    let value =
        file.get(key).ok_or_else(|| Error::MissingKey { model: model_name(file), key: key.to_owned() })?;
    value
        .as_array()
        .and_then(Array::as_strings)
        .ok_or_else(|| wrong_key(file, key, value, "an array of strings"))
}

fn kinds(file: &Gguf, tokens: usize) -> Result<Vec<TokenKind>> {
    let Some(value) = file.get(TYPES) else { return Ok(vec![TokenKind::Normal; tokens]) };
    let expected = || format!("an array of {tokens} i32 from 1 to 6, one a token");
    let wrong = || wrong_key(file, TYPES, value, &expected());
    let types =
        value.as_array().and_then(Array::as_i32).filter(|types| types.len() == tokens).ok_or_else(wrong)?;
    let kind = |&number: &i32| match number {
        // 2 is the token for what is unknown, 6 one byte of vocabularies with such.
        1 | 2 | 6 => Ok(TokenKind::Normal),
        3 => Ok(TokenKind::Control),
        4 => Ok(TokenKind::UserDefined),
        5 => Ok(TokenKind::Unused),
        _ => Err(Error::WrongKey {
            model: model_name(file),
            key: TYPES.to_owned(),
            found: format!("{number} somewhere"),
            expected: expected(),
        }),
    };
    types.iter().map(kind).collect()
}

fn token_id(file: &Gguf, key: &str, tokens: usize) -> Result<Option<u32>> {
    let Some(value) = file.get(key) else { return Ok(None) };
    match value.as_u64().filter(|&id| id < tokens as u64) {
        Some(id) => Ok(Some(id as u32)),
        None => Err(wrong_key(file, key, value, &format!("a token below {tokens}"))),
    }
}

fn byte_level_bpe(
    pre: PreTokenizer,
    pieces: &[String],
    merges: &[String],
) -> std::result::Result<tokenizers::Tokenizer, String> {
    if pieces.is_empty() || u32::try_from(pieces.len()).is_err() {
        return Err(format!("it has {} tokens", pieces.len()));
    }
    let mut vocab = Vocab::default();
    for (id, piece) in pieces.iter().enumerate() {
        if vocab.insert(piece.clone(), id as u32).is_some() {
            return Err(format!("token '{piece}' is there twice"));
        }
    }
    let pair = |merge: &String| match merge.split_once(' ') {
        Some((a, b)) if !a.is_empty() && !b.is_empty() && !b.contains(' ') => {
            Ok((a.to_owned(), b.to_owned()))
        }
        _ => Err(format!("merge '{merge}' is not two pieces with a space between")),
    };
    let merges = merges.iter().map(pair).collect::<std::result::Result<Vec<_>, _>>()?;
    let bpe = BPE::builder()
        .vocab_and_merges(vocab, merges)
        .ignore_merges(pre == PreTokenizer::Llama3)
        .build()
        .map_err(|error| error.to_string())?;
    let mut tokenizer = tokenizers::Tokenizer::new(bpe);
    tokenizer.with_pre_tokenizer(Some(pre.steps().map_err(|error| error.to_string())?));
    if pre == PreTokenizer::Qwen2 {
        tokenizer.with_normalizer(Some(NFC));
    }
    Ok(tokenizer)
}
