//! Several prompts of a file, side by side: a step of the model gives a token of each.

use super::{Arguments, Error, Finish, Step, choice, f16_bytes, rate};
use crate::cli::failure::Failure;
use crate::cli::interrupt::Interrupt;
use crate::cli::output::print;
use crate::cli::subject::behind_bos;
use crate::cli::{progress, scheme, text};
use host::kv::{Capacity, KvCache, Summary};
use host::model::Tokenizer;
use host::model::forward::{Decoder, Error as ForwardError, Runner};
use host::model::kernels::Choice;
use host::model::tokenizer::{DecodeStream, Message};
use serde::Serialize;
use std::collections::VecDeque;
use std::fs;
use std::path::Path;
use std::time::Instant;

/// A prompt, and what it was continued by.
#[derive(Serialize)]
struct Continued {
    prompt: String,
    prompt_tokens: Vec<u32>,
    text: String,
    /// Why it ended; `None` where it did not begin.
    finish: Option<Finish>,
    steps: Vec<Step>,
    /// Of all its steps; `None` for a scheme that says nothing of them.
    report: Option<Summary>,
}

#[derive(Serialize)]
struct Json<'a> {
    command: &'static str,
    version: &'static str,
    model: &'a str,
    file: String,
    kv: String,
    device: &'a str,
    /// Why there was no GPU.
    gpu_note: Option<&'a str>,
    chat: bool,
    /// `None`: the most likely token each time.
    temperature: Option<f32>,
    top_p: f32,
    seed: u64,
    /// Sequences that the cache had room for, and tokens of each.
    sequences: usize,
    capacity: usize,
    /// What failed.
    error: Option<String>,
    texts: &'a [Continued],
    /// Of prompts, and of steps.
    prefill_seconds: f64,
    decode_seconds: f64,
    /// Of the tokens that steps gave, of all sequences.
    decode_tokens_per_second: Option<f64>,
    /// The most that the cache took.
    kv_bytes: u64,
    /// What the same tokens would take in f16.
    kv_bytes_f16: u64,
    kv_host_bytes: u64,
    report: Option<Summary>,
}

/// Continues the prompts of a file, a line each.
///
/// # Errors
/// As the command's.
pub(super) fn run(arguments: &Arguments, path: &Path) -> Result<(), Failure> {
    let scheme = &scheme::one(&arguments.kv)?;
    let lines = read(path)?;
    // The report may take neither's place.
    arguments.report.open(Some(path), None)?;
    let report = arguments.report.open(Some(&arguments.subject.path()?), None)?;
    let subject = arguments.subject.open()?;
    let tokenizer = subject.tokenizer()?;
    let mut texts = Vec::with_capacity(lines.len());
    for prompt in lines {
        let prompt_tokens = if arguments.chat {
            tokenizer.chat(&[Message::user(&prompt)])?
        } else {
            behind_bos(tokenizer, &tokenizer.encode(&prompt)?)
        };
        subject.fits(prompt_tokens.len())?;
        texts.push(Continued {
            prompt,
            prompt_tokens,
            text: String::new(),
            finish: None,
            steps: Vec::new(),
            report: None,
        });
    }
    let config = &subject.model.config;
    let choice = choice(arguments);
    choice.shape(config.vocab).map_err(ForwardError::from)?;
    let longest = texts.iter().map(|text| text.prompt_tokens.len()).max().unwrap_or(1);
    let capacity = Capacity {
        tokens: longest.saturating_add(arguments.max_tokens as usize).min(config.context),
        sequences: (arguments.sequences as usize).min(texts.len()),
    };
    let mut cache = subject.cache(scheme, capacity)?;
    let mut runner = subject.runner()?;
    let mut batch = Batch {
        tokenizer,
        choice,
        context: config.context,
        max_tokens: arguments.max_tokens as usize,
        streams: (0..texts.len()).map(|_| Some(tokenizer.stream())).collect(),
        there: vec![None; capacity.sequences],
        waiting: (0..texts.len()).collect(),
        printed: if report.takes_stdout() { usize::MAX } else { 0 },
        texts,
        interrupt: Interrupt::watch().map_err(Error::from)?,
        prefill: 0.0,
        decode: 0.0,
        most: [0; 3],
    };
    let written = batch.write(&mut runner, &mut *cache);
    let name = subject.device_name();
    let decoded: usize = batch.texts.iter().map(|text| text.steps.len().saturating_sub(1)).sum();
    let summary = batch.texts.iter().fold(None, |all, text| Summary::join(all, text.report));
    if written.is_ok() {
        eprintln!("{}", batch.status(decoded, summary, &scheme.to_string(), name));
    }
    let json = Json {
        command: "generate",
        version: env!("CARGO_PKG_VERSION"),
        model: &config.name,
        file: subject.path.display().to_string(),
        kv: scheme.to_string(),
        device: name,
        gpu_note: subject.gpu_note.as_deref(),
        chat: arguments.chat,
        temperature: arguments.temperature,
        top_p: arguments.top_p,
        seed: arguments.seed,
        sequences: capacity.sequences,
        capacity: capacity.tokens,
        error: written.as_ref().err().map(ToString::to_string),
        texts: &batch.texts,
        prefill_seconds: batch.prefill,
        decode_seconds: batch.decode,
        decode_tokens_per_second: (decoded > 0).then(|| rate(decoded, batch.decode)),
        kv_bytes: batch.most[0],
        kv_bytes_f16: batch.most[1],
        kv_host_bytes: batch.most[2],
        report: summary,
    };
    let reported = report.finish("", &json);
    // What failed first is the cause.
    written?;
    reported?;
    let cut = |text: &Continued| matches!(text.finish, None | Some(Finish::Interrupted));
    match batch.texts.iter().any(cut) {
        true => Err(Error::Interrupted { tokens: text::plural(decoded + batch.begun(), "token") }.into()),
        false => Ok(()),
    }
}

/// The lines of a file that have something in them.
fn read(path: &Path) -> Result<Vec<String>, Failure> {
    let shown = || path.display().to_string();
    let text = fs::read_to_string(path).map_err(|source| Error::Prompts { path: shown(), source })?;
    let lines: Vec<String> = text.lines().filter(|line| !line.trim().is_empty()).map(str::to_owned).collect();
    if lines.is_empty() { Err(Error::NoPrompts { path: shown() }.into()) } else { Ok(lines) }
}

/// What a text that ends has of a character.
fn rest(stream: &mut Option<DecodeStream<'_>>) -> String {
    stream.take().map(DecodeStream::finish).unwrap_or_default()
}

/// Texts under way.
struct Batch<'a> {
    tokenizer: &'a Tokenizer,
    choice: Choice,
    context: usize,
    max_tokens: usize,
    texts: Vec<Continued>,
    /// What each text's characters are made of, until it ends.
    streams: Vec<Option<DecodeStream<'a>>>,
    /// Which text each of the cache's sequences is.
    there: Vec<Option<usize>>,
    /// Texts that have not begun.
    waiting: VecDeque<usize>,
    /// Texts that were printed: those of the file's first lines.
    printed: usize,
    interrupt: Interrupt,
    /// Seconds.
    prefill: f64,
    decode: f64,
    /// The most bytes: of the cache, of its tokens in f16, of the host.
    most: [u64; 3],
}

impl Batch<'_> {
    /// All texts, or what there is of them when they are interrupted or a step fails.
    fn write(&mut self, runner: &mut Runner, cache: &mut dyn KvCache) -> Result<(), Failure> {
        let line = progress::bar(self.texts.len());
        let mut decoder = runner.batch(cache, self.choice)?;
        let mut written = Ok(());
        while written.is_ok() && !self.interrupt.pressed() {
            written = self.advance(&mut decoder);
            let finished = self.texts.iter().filter(|text| text.finish.is_some()).count();
            line.set_position(finished as u64);
            if self.waiting.is_empty() && self.there.iter().all(Option::is_none) {
                break;
            }
        }
        line.finish_and_clear();
        drop(decoder);
        let stopped = if written.is_ok() { Finish::Interrupted } else { Finish::Failed };
        for text in self.there.iter_mut().filter_map(Option::take) {
            self.texts[text].finish = Some(stopped);
            self.texts[text].text += &rest(&mut self.streams[text]);
        }
        // What there is, whatever has failed; and what failed first is the cause.
        let printed = self.print();
        written?;
        printed?;
        Ok(runner.check_cache(cache)?)
    }

    /// Those join that can, and a step.
    fn advance(&mut self, decoder: &mut Decoder<'_>) -> Result<(), Failure> {
        while decoder.has_room() && decoder.steps_to_join() == 0 && !self.interrupt.pressed() {
            let Some(text) = self.waiting.pop_front() else { break };
            let start = Instant::now();
            // The line's number keys its draws: what it gets does not depend on when it comes.
            let (sequence, first) = decoder.join(&self.texts[text].prompt_tokens, text as u32)?;
            let seconds = start.elapsed().as_secs_f64();
            self.prefill += seconds;
            self.there[sequence] = Some(text);
            self.note(decoder.cache());
            self.take(decoder, sequence, first, seconds, None)?;
        }
        if self.there.iter().all(Option::is_none) && self.waiting.is_empty() {
            return Ok(());
        }
        let start = Instant::now();
        let chosen = decoder.step()?.to_vec();
        let seconds = start.elapsed().as_secs_f64();
        self.decode += seconds;
        let cache = decoder.cache();
        self.note(cache);
        let (report, held) = (cache.report()?, cache.held());
        let reports: Vec<_> =
            (0..chosen.len()).map(|row| Summary::of(&report.of_sequence(held, row))).collect();
        for (sequence, (token, report)) in chosen.into_iter().zip(reports).enumerate() {
            if self.there[sequence].is_some() {
                self.take(decoder, sequence, token, seconds, report)?;
            }
        }
        Ok(())
    }

    /// Keeps the most that the cache has taken.
    fn note(&mut self, cache: &dyn KvCache) {
        for (most, bytes) in self.most.iter_mut().zip([cache.bytes(), f16_bytes(cache), cache.host_bytes()]) {
            *most = bytes.max(*most);
        }
    }

    /// A token of a sequence, which leaves if that was its last.
    fn take(
        &mut self,
        decoder: &mut Decoder<'_>,
        sequence: usize,
        token: u32,
        seconds: f64,
        report: Option<Summary>,
    ) -> Result<(), Failure> {
        let Some(number) = self.there[sequence] else { return Ok(()) };
        let (text, stream) = (&mut self.texts[number], &mut self.streams[number]);
        let end = self.tokenizer.is_end(token);
        let piece = match stream {
            Some(stream) if !end => stream.push(token)?,
            _ => String::new(),
        };
        text.text += &piece;
        text.steps.push(Step { token, text: piece, seconds, report });
        text.report = Summary::join(text.report, report);
        let length = decoder.cache().held().sequences[sequence].unwrap_or(0);
        text.finish = if end {
            Some(Finish::End)
        } else if text.steps.len() >= self.max_tokens {
            Some(Finish::MaxTokens)
        } else {
            (length >= self.context).then_some(Finish::Context)
        };
        if text.finish.is_some() {
            text.text += &rest(stream);
            self.there[sequence] = None;
            decoder.leave(sequence)?;
            self.print()?;
        }
        Ok(())
    }

    /// Prints the texts that have ended, in the order of the file: those before which all have.
    fn print(&mut self) -> Result<(), Failure> {
        while let Some(Continued { prompt, text, finish: Some(_), .. }) = self.texts.get(self.printed) {
            print(&format!("[{}] {prompt}\n{}\n\n", self.printed + 1, text.trim_end()))?;
            self.printed += 1;
        }
        Ok(())
    }

    /// Texts that have begun.
    fn begun(&self) -> usize {
        self.texts.iter().filter(|text| !text.steps.is_empty()).count()
    }

    /// `5 prompts in 0.30 s; 160 tokens, 120.1/s, 4 at a time; KV dense: 427.5 KiB; CPU`.
    fn status(&self, decoded: usize, known: Option<Summary>, kv: &str, device: &str) -> String {
        let [bytes, whole, _] = self.most;
        let share = match bytes == whole || whole == 0 {
            true => String::new(),
            false => format!(" ({:.0} % of f16)", 100.0 * bytes as f64 / whole as f64),
        };
        let known = super::known(known);
        let speed = match decoded {
            0 => String::new(),
            _ => format!(", {:.1}/s", rate(decoded, self.decode)),
        };
        format!(
            "{} in {}; {}{speed}, {} at a time; KV {kv}: {}{share}{known}; {device}",
            text::plural(self.begun(), "prompt"),
            text::seconds(self.prefill),
            text::plural(decoded + self.begun(), "token"),
            self.there.len(),
            text::bytes(bytes),
        )
    }
}
