//! Prompts of a given length: a long text, and a question about it.

use super::{Error, Result};
use crate::model::text::Corpus;
use crate::model::tokenizer::Message;
use crate::model::{Error as ModelError, Tokenizer};
use crate::random::Random;
use std::collections::BTreeSet;

/// Tokens between the end of a question and the start of the answer in a chat, at most.
const TURN: usize = 8;
/// Bytes of a token, at most, where a window is cut from a text.
const BYTES_PER_TOKEN: usize = 12;

/// Tokens of two long sentences.
const CUT: usize = 256;

/// A text and a question, as tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// What is read in chunks.
    pub context: Vec<u32>,
    /// What is decoded token by token: the question, and the words that the answer starts with.
    pub steps: Vec<u32>,
}

impl Prompt {
    /// In the model's chat template, or in plain words if it has none that is known.
    ///
    /// # Errors
    /// What the tokenizer cannot do.
    pub fn new(tokenizer: &Tokenizer, text: &str, question: &str, primer: &str) -> Result<Prompt> {
        let message = format!("{text}\n\n{question}");
        let mut tokens = match tokenizer.chat(&[Message::user(message)]) {
            Err(ModelError::ChatTemplate { .. }) => {
                let plain = tokenizer.encode(&format!("{text}\n\nQuestion: {question}\nAnswer: "))?;
                tokenizer.bos().into_iter().chain(plain).collect()
            }
            tokens => tokens?,
        };
        let primer = tokenizer.encode(primer)?;
        let steps = tokenizer.encode(question)?.len() + TURN;
        let steps = tokens.split_off(tokens.len().saturating_sub(steps).max(1));
        Ok(Prompt { context: tokens, steps: [steps, primer].concat() })
    }

    /// Tokens of both.
    pub fn tokens(&self) -> usize {
        self.context.len() + self.steps.len()
    }
}

/// What a prompt is made of, but for its length.
pub struct Frame<'a> {
    /// The model's tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// What is asked.
    pub question: &'a str,
    /// What the answer starts with.
    pub primer: &'a str,
    /// Tokens of prompt and answer together, at most.
    pub length: usize,
    /// Tokens kept free for the answer.
    pub answer: usize,
}

impl Frame<'_> {
    /// The longest prompt that fits, of texts of `least` to `most` pieces, and how many pieces it has.
    ///
    /// # Errors
    /// [`Error::TooShort`] if `least` pieces are too many.
    pub fn fit(&self, least: usize, most: usize, text: impl Fn(usize) -> String) -> Result<(usize, Prompt)> {
        let Frame { tokenizer, question, primer, length, answer } = *self;
        let of = |pieces| Prompt::new(tokenizer, &text(pieces), question, primer);
        let mut best = of(least)?;
        let needed = best.tokens() + answer;
        if needed > length {
            return Err(Error::TooShort { what: "the task", found: length, needed });
        }
        let (mut fits, mut over) = (least, most + 1);
        while over - fits > 1 {
            let middle = fits + (over - fits) / 2;
            let prompt = of(middle)?;
            if prompt.tokens() + answer <= length {
                (fits, best) = (middle, prompt);
            } else {
                over = middle;
            }
        }
        Ok((fits, best))
    }
}

/// Consecutive sentences of a text from a place of chance on: `tokens` tokens or more, unless the first or
/// last is very long.
///
/// # Errors
/// The text has fewer tokens.
pub fn sentences(
    tokenizer: &Tokenizer,
    corpus: &Corpus,
    tokens: usize,
    random: &mut Random,
) -> Result<Vec<String>> {
    // Sentences at both ends are cut off and dropped.
    let tokens = tokens + tokens / 4 + CUT;
    let room = corpus.text().len().saturating_sub(tokens * BYTES_PER_TOKEN);
    let window = corpus.window(tokenizer, random.below(room + 1), tokens)?;
    let text = tokenizer.decode(&window.tokens)?;
    let mut found = vec![String::new()];
    let mut ended = false;
    for word in text.split_whitespace() {
        if ended {
            found.push(String::new());
        }
        if let Some(last) = found.last_mut() {
            if !last.is_empty() {
                last.push(' ');
            }
            last.push_str(word);
        }
        ended = word.ends_with(['.', '!', '?']);
    }
    // The first and the last are cut off, if there are others.
    if found.len() > 2 {
        found.remove(0);
        found.pop();
    }
    Ok(found)
}

/// The first `count` sentences with others put between them, each at its depth: 0 before all of them, 1
/// behind.
pub fn with_needles(sentences: &[String], count: usize, needles: &[(f64, String)]) -> String {
    let sentences = &sentences[..count.min(sentences.len())];
    let mut ordered: Vec<&(f64, String)> = needles.iter().collect();
    ordered.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut ordered = ordered.into_iter().peekable();
    let total: usize = sentences.iter().map(String::len).sum();
    let (mut words, mut before) = (Vec::new(), 0);
    for sentence in sentences {
        // Whichever end of the sentence is nearer.
        let middle = (before + sentence.len() / 2) as f64 / total.max(1) as f64;
        while let Some((_, needle)) = ordered.next_if(|(depth, _)| *depth <= middle) {
            words.push(needle.as_str());
        }
        words.push(sentence);
        before += sentence.len();
    }
    words.extend(ordered.map(|(_, needle)| needle.as_str()));
    words.join(" ")
}

/// Different words of a text's first part, four to nine small letters each, in an order of chance.
pub fn words(corpus: &Corpus, random: &mut Random) -> Vec<String> {
    const PART: usize = 400_000;
    let plain = |word: &&str| (4..=9).contains(&word.len()) && word.bytes().all(|b| b.is_ascii_lowercase());
    let mut read = 0;
    let near = corpus.text().split_whitespace().take_while(|word| {
        read += word.len() + 1;
        read <= PART
    });
    let found: BTreeSet<&str> = near.filter(plain).collect();
    let mut found: Vec<String> = found.into_iter().map(str::to_owned).collect();
    random.shuffle(&mut found);
    found
}

/// A number of `digits` digits, the first not 0.
pub fn number(random: &mut Random, digits: u32) -> String {
    let least = 10usize.pow(digits - 1);
    (least + random.below(9 * least)).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needles_lie_at_their_depths() {
        let sentences: Vec<String> = ["a.", "b.", "c.", "d."].map(str::to_owned).into();
        let place = |depth: f64| with_needles(&sentences, 4, &[(depth, "X".into())]);
        assert_eq!([0.0, 0.5, 1.0].map(place), ["X a. b. c. d.", "a. b. X c. d.", "a. b. c. d. X"]);
        let two = [(0.9, "Y".to_owned()), (0.3, "X".to_owned())];
        assert_eq!(with_needles(&sentences, 2, &two), "a. X b. Y");
        assert_eq!(with_needles(&[], 0, &two), "X Y");
    }

    #[test]
    fn numbers_have_their_digits() {
        let mut random = Random::new(1);
        assert!((0..1000).map(|_| number(&mut random, 5)).all(|n| n.len() == 5 && !n.starts_with('0')));
    }

    #[test]
    fn words_are_plain_and_differ() {
        let corpus =
            Corpus::new("x", "The quick-witted fox, over over again LOUD 1234 again and again quietly");
        let mut found = words(&corpus, &mut Random::new(1));
        found.sort();
        assert_eq!(found, ["again", "over", "quietly"]);
    }
}
