//! A needle in a haystack: a pass key among many others, in a long text.
//!
//! The text is read in chunks; the question and the answer are decoded token by token through the cache. A
//! trial is scored twice: by the log-probability of the right key, teacher-forced, which tells caches apart
//! where all of them find it; and by whether the key is in what the model writes by itself.

use super::decoder::{self, Decoder, Watch};
use super::prompt::{Frame, Prompt, number, sentences, with_needles};
use super::{Error, Result};
use crate::kv::{KvCache, Summary};
use crate::model::Tokenizer;
use crate::model::forward::Runner;
use crate::model::text::Corpus;
use crate::random::Random;

/// Tokens that the model may write beyond those of the key.
const BEYOND: usize = 4;

/// Whom keys belong to: any of the first with any of the second. So distractors share half of their names
/// with the needle.
const COLOURS: [&str; 8] = ["amber", "crimson", "golden", "silver", "scarlet", "violet", "ivory", "emerald"];
const ANIMALS: [&str; 8] = ["falcon", "otter", "badger", "heron", "lynx", "raven", "salmon", "tortoise"];

/// How many keys a text can have.
pub const MOST_KEYS: usize = COLOURS.len() * ANIMALS.len();

/// What a trial is made from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Setting {
    /// Tokens of prompt and answer, at most.
    pub length: usize,
    /// Where the needle is: 0 at the start of the text, 1 at its end.
    pub depth: f64,
    /// Other keys, at depths of chance; fewer than [`MOST_KEYS`].
    pub distractors: usize,
    /// Which trials.
    pub seed: u64,
    /// Which of them.
    pub trial: u64,
}

/// A trial.
#[derive(Clone, Debug, PartialEq)]
pub struct Task {
    /// Text and question.
    pub prompt: Prompt,
    /// Five digits.
    pub key: String,
    /// The same as tokens that follow the prompt.
    pub answer: Vec<u32>,
}

impl Task {
    /// The trial of a setting; the same for every scheme.
    ///
    /// # Errors
    /// A length that the question alone is too long for; a text that is too short.
    pub fn new(tokenizer: &Tokenizer, corpus: &Corpus, setting: Setting) -> Result<Task> {
        let Setting { length, depth, distractors, seed, trial } = setting;
        // Every cell has texts and keys of its own, so that trials are independent.
        let mut random = Random::of(seed, "needle", &[length as u64, depth.to_bits(), trial]);
        let mut names: Vec<String> =
            COLOURS.iter().flat_map(|colour| ANIMALS.map(|animal| format!("{colour} {animal}"))).collect();
        random.shuffle(&mut names);
        names.truncate(distractors + 1);
        let mut keys: Vec<String> = Vec::new();
        while keys.len() < names.len() {
            let key = number(&mut random, 5);
            if !keys.contains(&key) {
                keys.push(key);
            }
        }
        let needles: Vec<(f64, String)> = names
            .iter()
            .zip(&keys)
            .enumerate()
            .map(|(i, (name, key))| {
                let place = random.uniform();
                (if i == 0 { depth } else { place }, format!("The pass key of the {name} is {key}."))
            })
            .collect();
        let (name, key) = (&names[0], keys[0].clone());
        let answer = tokenizer.encode(&format!(" {key}"))?;
        let frame = Frame {
            tokenizer,
            question: &format!("What is the pass key of the {name}? It is in the text above."),
            primer: &format!("The pass key of the {name} is"),
            length,
            answer: answer.len() + BEYOND,
        };
        let hay = sentences(tokenizer, corpus, length, &mut random)?;
        let (_, prompt) = frame.fit(0, hay.len(), |count| with_needles(&hay, count, &needles))?;
        Ok(Task { prompt, key, answer })
    }

    /// Tokens that a cache needs room for.
    pub fn capacity(&self) -> usize {
        self.prompt.tokens() + self.answer.len() + BEYOND
    }

    /// Work in the measure of a [`Watch`], where the model finds the key.
    pub fn work(&self) -> usize {
        self.prompt.context.len() + (self.prompt.steps.len() + self.answer.len() - 1) * decoder::STEP
    }
}

/// How a trial went.
#[derive(Clone, Debug, PartialEq)]
pub struct Scored {
    /// Of the right key, all its tokens together, teacher-forced; natural logarithm.
    pub log_probability: f64,
    /// Whether the key is in the text.
    pub hit: bool,
    /// What the model writes.
    pub text: String,
    /// What the scheme promised, over all steps.
    pub report: Option<Summary>,
}

/// Runs a trial over caches that `open` makes: one, or a second where the model does not write the key.
///
/// # Errors
/// What the pass or `open` reports; [`Error::Stopped`].
pub fn run<E: From<Error>>(
    runner: &mut Runner,
    tokenizer: &Tokenizer,
    task: &Task,
    mut open: impl FnMut() -> std::result::Result<Box<dyn KvCache>, E>,
    watch: Watch,
) -> std::result::Result<Scored, E> {
    let mut cache = open()?;
    let mut decoder = Decoder::new(runner, &mut *cache, watch);
    decoder.read(&task.prompt.context)?;
    let inputs = task.prompt.steps.iter().chain(&task.answer);
    let first = task.prompt.steps.len();
    let (mut log_probability, mut same) = (0.0, true);
    for (i, &token) in inputs.take(first + task.answer.len() - 1).enumerate() {
        let next = decoder.step(token)?;
        if let Some(&right) = (i + 1).checked_sub(first).and_then(|place| task.answer.get(place)) {
            log_probability += next.log_probability(right);
            same &= next.best() == right;
        }
    }
    let report = decoder.finish()?;
    if same {
        // Left to itself the model writes the same.
        return Ok(Scored { log_probability, hit: true, text: format!(" {}", task.key), report });
    }
    drop(cache);
    let mut cache = open()?;
    let mut decoder = Decoder::new(runner, &mut *cache, watch);
    decoder.read(&task.prompt.context)?;
    let count = task.answer.len() + BEYOND;
    let written = decoder.continue_greedily(tokenizer, &task.prompt.steps, count)?;
    decoder.finish()?;
    let text = tokenizer.decode(&written).map_err(Error::from)?;
    Ok(Scored { log_probability, hit: text.contains(&task.key), text, report })
}
