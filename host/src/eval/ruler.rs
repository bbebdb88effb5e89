//! Seven tasks over long texts, after the RULER benchmark, made by rule from a seed.
//!
//! The text is read in chunks; question and answer are decoded token by token through the cache. A trial's
//! score is the share of the expected answers that what the model writes contains, whatever their case.

use super::decoder::{self, Decoder, Watch};
use super::prompt::{Frame, Prompt, number, sentences, with_needles, words};
use super::{Error, Result};
use crate::kv::{KvCache, Summary};
use crate::model::Tokenizer;
use crate::model::forward::Runner;
use crate::model::text::Corpus;
use crate::random::Random;

/// The seed that commands take: that of the paper on certified attention.
pub const SEED: u64 = 20_260_416;

/// Numbers of several needles: keys of `MultiKey` and `MultiQuery`, values of `MultiValue`.
const SEVERAL: usize = 4;
/// Assignments that follow the first in a chain.
const HOPS: usize = 4;
/// Words that are common in `CommonWords`.
const COMMON: usize = 10;
/// How often each of them comes at most, and every other word.
const OFTEN: usize = 30;
const RARE: usize = 3;
/// Words that are asked for in `FrequentWords`.
const FREQUENT: usize = 3;
/// Different words of `FrequentWords`; the k-th comes about 1/k² as often as the first.
const CODED: usize = 60;

/// A kind of task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subtask {
    /// One needle.
    Single,
    /// A needle among others with other keys.
    MultiKey,
    /// One key with four values.
    MultiValue,
    /// Four keys, all asked for.
    MultiQuery,
    /// Variables that are assigned to each other: all that have a value.
    VariableTracking,
    /// A list of words: the ten that come most often.
    CommonWords,
    /// A text of made-up words: the three that come most often.
    FrequentWords,
}

impl Subtask {
    /// All of them, in the benchmark's order.
    pub const ALL: [Subtask; 7] = [
        Subtask::Single,
        Subtask::MultiKey,
        Subtask::MultiValue,
        Subtask::MultiQuery,
        Subtask::VariableTracking,
        Subtask::CommonWords,
        Subtask::FrequentWords,
    ];

    /// What it is called on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Subtask::Single => "single",
            Subtask::MultiKey => "multikey",
            Subtask::MultiValue => "multivalue",
            Subtask::MultiQuery => "multiquery",
            Subtask::VariableTracking => "vt",
            Subtask::CommonWords => "cwe",
            Subtask::FrequentWords => "fwe",
        }
    }

    /// Tokens that the model may write, as the paper has them.
    pub const fn most_tokens(self) -> usize {
        match self {
            Subtask::Single | Subtask::MultiKey | Subtask::FrequentWords => 32,
            Subtask::MultiValue | Subtask::VariableTracking | Subtask::CommonWords => 96,
            Subtask::MultiQuery => 48,
        }
    }
}

/// A trial.
#[derive(Clone, Debug, PartialEq)]
pub struct Task {
    /// What kind.
    pub subtask: Subtask,
    /// Text and question.
    pub prompt: Prompt,
    /// What the answer must contain.
    pub expected: Vec<String>,
}

/// What all tasks of a run are made from.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// The model's tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// What haystacks and words come from.
    pub corpus: &'a Corpus,
    /// Which tasks.
    pub seed: u64,
}

/// What a kind of task asks.
struct Question {
    question: String,
    primer: String,
    expected: Vec<String>,
}

impl Source<'_> {
    /// The `trial`-th task of a kind, of up to `length` tokens with its answer; the same for every scheme.
    ///
    /// # Errors
    /// A length that is too short for the task; a text that is too short.
    pub fn task(&self, subtask: Subtask, length: usize, trial: u64) -> Result<Task> {
        let mut random = Random::of(self.seed, subtask.name(), &[length as u64, trial]);
        let random = &mut random;
        match subtask {
            Subtask::Single => self.needles(subtask, length, random, 1, 1, 1),
            Subtask::MultiKey => self.needles(subtask, length, random, SEVERAL, 1, 1),
            Subtask::MultiValue => self.needles(subtask, length, random, 1, SEVERAL, 1),
            Subtask::MultiQuery => self.needles(subtask, length, random, SEVERAL, 1, SEVERAL),
            Subtask::VariableTracking => self.variables(length, random),
            Subtask::CommonWords => self.common_words(length, random),
            Subtask::FrequentWords => self.frequent_words(length, random),
        }
    }

    fn frame<'a>(&'a self, subtask: Subtask, length: usize, asked: &'a Question) -> Frame<'a> {
        Frame {
            tokenizer: self.tokenizer,
            question: &asked.question,
            primer: &asked.primer,
            length,
            answer: subtask.most_tokens(),
        }
    }

    fn in_haystack(
        &self,
        subtask: Subtask,
        length: usize,
        random: &mut Random,
        needles: &[(f64, String)],
        asked: Question,
    ) -> Result<Task> {
        let hay = sentences(self.tokenizer, self.corpus, length, random)?;
        let text = |count| with_needles(&hay, count, needles);
        let (_, prompt) = self.frame(subtask, length, &asked).fit(0, hay.len(), text)?;
        Ok(Task { subtask, prompt, expected: asked.expected })
    }

    /// `keys` names with `values` numbers each, of which the first `queried` names are asked for.
    fn needles(
        &self,
        subtask: Subtask,
        length: usize,
        random: &mut Random,
        keys: usize,
        values: usize,
        queried: usize,
    ) -> Result<Task> {
        let names: Vec<String> = self.some_words(random, keys)?;
        let mut numbers: Vec<String> = Vec::new();
        while numbers.len() < keys * values {
            let number = number(random, 7);
            if !numbers.contains(&number) {
                numbers.push(number);
            }
        }
        let mut needles = Vec::new();
        for (i, number) in numbers.iter().enumerate() {
            let sentence =
                format!("One of the special magic numbers for {} is: {number}.", names[i / values]);
            needles.push((random.uniform(), sentence));
        }
        let asked = names[..queried].join(", ");
        let (what, verb) = if queried * values == 1 { ("number", "is") } else { ("numbers", "are") };
        let asked = Question {
            question: format!(
                "What {verb} the special magic {what} for {asked}? They are mentioned in the text above."
            ),
            primer: format!("The special magic {what} for {asked} mentioned in the text {verb}"),
            expected: numbers[..queried * values].to_vec(),
        };
        self.in_haystack(subtask, length, random, &needles, asked)
    }

    /// A chain of assignments, in the text in its order.
    fn variables(&self, length: usize, random: &mut Random) -> Result<Task> {
        let mut names: Vec<String> = Vec::new();
        while names.len() <= HOPS {
            let name: String = (0..5).map(|_| char::from(b'A' + random.below(26) as u8)).collect();
            if !names.contains(&name) {
                names.push(name);
            }
        }
        let value = number(random, 5);
        let mut depths: Vec<f64> = names.iter().map(|_| random.uniform()).collect();
        depths.sort_by(f64::total_cmp);
        let mut needles = vec![(depths[0], format!("VAR {} = {value}.", names[0]))];
        for i in 1..names.len() {
            needles.push((depths[i], format!("VAR {} = VAR {}.", names[i], names[i - 1])));
        }
        let asked = Question {
            question: format!(
                "Find all variables that are assigned the value {value} in the text above, by way of other variables too."
            ),
            primer: format!("The {} variables that are assigned the value {value} are:", names.len()),
            expected: names,
        };
        self.in_haystack(Subtask::VariableTracking, length, random, &needles, asked)
    }

    /// A numbered list in which ten words come often and all others three times.
    fn common_words(&self, length: usize, random: &mut Random) -> Result<Task> {
        let words = words(self.corpus, random);
        let order = random.word();
        let asked = Question {
            question: format!("What are the {COMMON} most common words in the list above?"),
            primer: format!("The {COMMON} words that come most often in the list are:"),
            expected: words.iter().take(COMMON).cloned().collect(),
        };
        // Of `size` words to the longest text half belong to the common ones, up to their limit.
        let list = |size: usize| {
            let often = (size / (2 * COMMON)).clamp(RARE + 1, OFTEN);
            let others = words[COMMON..].iter().take(size.saturating_sub(COMMON * often) / RARE);
            let common = words[..COMMON].iter().flat_map(|word| std::iter::repeat_n(word, often));
            let mut list: Vec<&String> =
                common.chain(others.flat_map(|word| std::iter::repeat_n(word, RARE))).collect();
            Random::new(order).shuffle(&mut list);
            let lines = list.iter().enumerate().map(|(i, word)| format!("{}. {word}", i + 1));
            lines.collect::<Vec<_>>().join(" ")
        };
        let least = 2 * COMMON * (RARE + 1);
        self.enough(words.len(), COMMON + COMMON * (RARE + 1) / RARE + 1)?;
        let most = COMMON * OFTEN + RARE * (words.len() - COMMON);
        let frame = self.frame(Subtask::CommonWords, length, &asked);
        let (_, prompt) = frame.fit(least, most.min(length).max(least), list)?;
        Ok(Task { subtask: Subtask::CommonWords, prompt, expected: asked.expected })
    }

    /// Made-up words, the k-th about 1/k² as often as the first.
    fn frequent_words(&self, length: usize, random: &mut Random) -> Result<Task> {
        let mut words: Vec<String> = Vec::new();
        while words.len() < CODED {
            let word: String = (0..6).map(|_| char::from(b'a' + random.below(26) as u8)).collect();
            if !words.contains(&word) {
                words.push(word);
            }
        }
        let order = random.word();
        let asked = Question {
            question: format!("What are the {FREQUENT} words that come most often in the coded text above?"),
            primer: format!("The {FREQUENT} words that come most often are:"),
            expected: words[..FREQUENT].to_vec(),
        };
        let text = |size: usize| {
            let whole: f64 = (1..=CODED).map(|k| (k as f64).powi(-2)).sum();
            let times = |k: usize| (size as f64 * (k as f64).powi(-2) / whole).round() as usize;
            let mut all: Vec<&String> = words
                .iter()
                .enumerate()
                .flat_map(|(i, word)| std::iter::repeat_n(word, times(i + 1)))
                .collect();
            Random::new(order).shuffle(&mut all);
            all.iter().map(|word| word.as_str()).collect::<Vec<_>>().join(" ")
        };
        // With so many the third comes more often than the fourth.
        let (_, prompt) = self.frame(Subtask::FrequentWords, length, &asked).fit(40, length.max(40), text)?;
        Ok(Task { subtask: Subtask::FrequentWords, prompt, expected: asked.expected })
    }

    fn some_words(&self, random: &mut Random, count: usize) -> Result<Vec<String>> {
        let mut words = words(self.corpus, random);
        self.enough(words.len(), count)?;
        words.truncate(count);
        Ok(words)
    }

    fn enough(&self, found: usize, needed: usize) -> Result<()> {
        if found < needed {
            return Err(Error::FewWords { text: self.corpus.name().to_owned(), found, needed });
        }
        Ok(())
    }
}

impl Task {
    /// Tokens that a cache needs room for.
    pub fn capacity(&self) -> usize {
        self.prompt.tokens() + self.subtask.most_tokens()
    }

    /// Work in the measure of a [`Watch`], at most.
    pub fn work(&self) -> usize {
        self.prompt.context.len() + (self.prompt.steps.len() + self.subtask.most_tokens()) * decoder::STEP
    }

    /// The share of the expected answers that a text contains.
    pub fn score(&self, text: &str) -> f64 {
        let text = text.to_lowercase();
        let found = self.expected.iter().filter(|answer| text.contains(&answer.to_lowercase())).count();
        found as f64 / self.expected.len() as f64
    }
}

/// How a trial went.
#[derive(Clone, Debug, PartialEq)]
pub struct Scored {
    /// What the model writes.
    pub text: String,
    /// The share of the expected answers in it.
    pub score: f64,
    /// What the scheme promised, over all steps.
    pub report: Option<Summary>,
}

/// Runs a trial over an empty cache.
///
/// # Errors
/// What the pass reports; [`Error::Stopped`].
pub fn run(
    runner: &mut Runner,
    tokenizer: &Tokenizer,
    task: &Task,
    cache: &mut dyn KvCache,
    watch: Watch,
) -> Result<Scored> {
    let mut decoder = Decoder::new(runner, cache, watch);
    decoder.read(&task.prompt.context)?;
    let written = decoder.continue_greedily(tokenizer, &task.prompt.steps, task.subtask.most_tokens())?;
    let report = decoder.finish()?;
    let text = tokenizer.decode(&written)?;
    Ok(Scored { score: task.score(&text), text, report })
}
