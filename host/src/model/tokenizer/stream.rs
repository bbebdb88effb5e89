//! Text from tokens that come one at a time.

use super::{TokenKind, Tokenizer};
use crate::model::Result;

/// Gives out text as soon as its characters are complete.
///
/// A character may take several tokens; its first bytes are held back until the last has come. Bytes that can
/// be no part of a character become U+FFFD.
#[derive(Debug)]
pub struct DecodeStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The start of a character, at most three bytes.
    held: Vec<u8>,
}

impl<'a> DecodeStream<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer) -> Self {
        DecodeStream { tokenizer, held: Vec::new() }
    }

    /// The text that is complete with this token; control tokens have none.
    ///
    /// # Errors
    /// There is no such token; the stream is as before.
    pub fn push(&mut self, id: u32) -> Result<String> {
        if self.tokenizer.kind(id)? == TokenKind::Control {
            return Ok(String::new());
        }
        self.held.extend_from_slice(&self.tokenizer.bytes(id)?);
        Ok(self.take_complete())
    }

    /// What is held back at the end of the text: nothing, or U+FFFD for a character that was not finished.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.held).into_owned()
    }

    fn take_complete(&mut self) -> String {
        let mut text = String::new();
        loop {
            match std::str::from_utf8(&self.held) {
                Ok(rest) => {
                    text += rest;
                    self.held.clear();
                    return text;
                }
                Err(error) => {
                    let valid = error.valid_up_to();
                    text += &String::from_utf8_lossy(&self.held[..valid]);
                    self.held.drain(..valid);
                    // No length: more bytes could make a character of it.
                    let Some(wrong) = error.error_len() else { return text };
                    self.held.drain(..wrong);
                    text.push(char::REPLACEMENT_CHARACTER);
                }
            }
        }
    }
}
