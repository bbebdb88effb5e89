//! Long texts to evaluate on, and the windows that are cut from them.

use super::error::{Error, Result};
use super::fetched;
use super::tokenizer::Tokenizer;
use std::fs;
use std::path::Path;

/// The least bytes of text taken for a token; where they are too few, more are taken.
const BYTES_PER_TOKEN: usize = 6;

/// A text.
#[derive(Clone, Debug)]
pub struct Corpus {
    name: String,
    text: String,
}

/// Consecutive tokens of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// The byte of the text where it starts.
    pub start: usize,
    /// Its tokens; no BOS.
    pub tokens: Vec<u32>,
}

impl Corpus {
    /// One of [`fetched::TEXTS`].
    ///
    /// # Errors
    /// It was not fetched, or cannot be read.
    pub fn fetched(name: &str) -> Result<Corpus> {
        let mut corpus = Corpus::open(fetched::text(name)?)?;
        corpus.name = name.to_owned();
        Ok(corpus)
    }

    /// A file of UTF-8 text.
    ///
    /// # Errors
    /// It cannot be read, or is not UTF-8.
    pub fn open(path: impl AsRef<Path>) -> Result<Corpus> {
        let path = path.as_ref();
        let text =
            fs::read_to_string(path).map_err(|source| Error::Text { path: path.to_owned(), source })?;
        Ok(Corpus { name: path.display().to_string(), text })
    }

    /// A text that is in memory.
    pub fn new(name: impl Into<String>, text: impl Into<String>) -> Corpus {
        Corpus { name: name.into(), text: text.into() }
    }

    /// What it is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// All of it.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// `length` tokens from the first whole character at or after byte `start`.
    ///
    /// # Errors
    /// The rest of the text has fewer tokens.
    pub fn window(&self, tokenizer: &Tokenizer, start: usize, length: usize) -> Result<Window> {
        self.cut(tokenizer, start, self.text.len(), length)
    }

    /// `count` windows of `length` tokens, evenly spread over the text and with no text in common. Each
    /// starts behind white space, but for the first, which starts with the text.
    ///
    /// # Errors
    /// The text is too short for them.
    pub fn windows(&self, tokenizer: &Tokenizer, length: usize, count: usize) -> Result<Vec<Window>> {
        let start = |i: usize| match (self.text.len() as u128 * i as u128 / count.max(1) as u128) as usize {
            0 => 0,
            at => {
                let at = self.boundary(at);
                let rest = &self.text[at..];
                at + rest.find(char::is_whitespace).map_or(rest.len(), |space| {
                    space + rest[space..].chars().next().map_or(0, char::len_utf8)
                })
            }
        };
        (0..count).map(|i| self.cut(tokenizer, start(i), start(i + 1), length)).collect()
    }

    /// The first character boundary at or after a byte.
    fn boundary(&self, at: usize) -> usize {
        (at..self.text.len()).find(|&at| self.text.is_char_boundary(at)).unwrap_or(self.text.len())
    }

    fn cut(&self, tokenizer: &Tokenizer, start: usize, end: usize, length: usize) -> Result<Window> {
        let start = self.boundary(start);
        let rest = &self.text[start..end.max(start)];
        let mut bytes = length.saturating_mul(BYTES_PER_TOKEN);
        loop {
            // Up to white space: what follows then changes no token before it.
            let part = match rest.len() <= bytes {
                true => rest,
                false => {
                    let boundary = self.boundary(start + bytes) - start;
                    &rest[..rest[..boundary].trim_end().rfind(char::is_whitespace).unwrap_or(0)]
                }
            };
            let part = if part.len() < rest.len() { part.trim_end() } else { part };
            let mut tokens = tokenizer.encode(part)?;
            if tokens.len() >= length {
                tokens.truncate(length);
                return Ok(Window { start, tokens });
            }
            if bytes >= rest.len() {
                let text = self.name.clone();
                return Err(Error::TextTooShort { text, start, found: tokens.len(), needed: length });
            }
            bytes = bytes.saturating_mul(2);
        }
    }
}
