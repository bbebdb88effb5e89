//! `ferrokv generate`: a model continues a prompt, its keys and values in a cache of one's choice.

mod batch;

use super::failure::{CommandError, Failure};
use super::interrupt::{self, Interrupt};
use super::output::{ReportArguments, print};
use super::progress;
use super::scheme;
use super::subject::{SubjectArguments, behind_bos};
use super::text;
use host::kv::{KvCache, Summary};
use host::model::Tokenizer;
use host::model::forward::{Error as ForwardError, Runner};
use host::model::kernels::Choice;
use host::model::tokenizer::{DecodeStream, Message};
use indicatif::ProgressBar;
use serde::Serialize;
use std::io::{IsTerminal, stdout};
use std::path::PathBuf;
use std::time::Instant;

const LONG: &str = "\
Continue a prompt with a language model from a GGUF file, its keys and values in a KV cache of the chosen scheme. Text goes \
to stdout as it is made; a line on stderr at the end says how fast the prompt was read and the text written, and what the \
cache takes.

Without --temperature every token is the most likely one. With it tokens are drawn, and the same seed draws the same ones.

The prompt is attended to exactly, but for int8, which keeps no originals; the scheme acts on the tokens that are written.

On the CPU the products are SIMD code with the bits of the GPU's kernels. On a GPU a step is one graph, whatever the scheme.

With --prompts the lines of a file are continued side by side: a step gives a token of each. A line gets what it gets whoever is beside it; texts are printed in the order of the lines, as they end.

Ctrl-C ends the text, and so does a step that fails: what was printed stays, and --json is written with what there is.

Exit codes: 0 done; 2 bad input; 130 interrupted.";

const EXAMPLES: &str = "\
Examples:
  ./setup --model                                          fetches SmolLM2-135M-Instruct
  ferrokv generate --kv certified --chat \"Why is the sky blue?\"
  ferrokv generate \"Once upon a time\" --max-tokens 40 --temperature 0.8 --top-p 0.95 --seed 7
  ferrokv generate \"2, 3, 5, 7,\" --model other.gguf --json record.json
  ferrokv generate --prompts prompts.txt --sequences 4 --kv certified --max-tokens 64";

/// Continue a prompt with a language model.
#[derive(clap::Args)]
#[command(long_about = LONG, after_long_help = EXAMPLES)]
pub struct Arguments {
    /// What to continue; with --chat, what to answer.
    #[arg(required_unless_present = "prompts", conflicts_with = "prompts")]
    prompt: Option<String>,
    /// A file with a prompt on each line, in place of one prompt; empty lines are passed over.
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// Prompts that are continued side by side, at most. How attention cuts its work, with that the last
    /// bits, follows their number.
    #[arg(long, value_name = "N", default_value_t = 8, conflicts_with = "prompt")]
    #[arg(value_parser = clap::value_parser!(u32).range(2..=64))]
    sequences: u32,
    #[arg(long, value_name = "SCHEME", default_value = "dense")]
    #[arg(help = scheme::short("How keys and values are kept"))]
    #[arg(long_help = scheme::long("How keys and values are kept"))]
    kv: String,
    /// Tokens to write at most; the model may end earlier. The cache is made for as many, and how attention
    /// cuts its work, with that the last bits, follows its size.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// Draw tokens, with logits divided by T; above 1 more surprising, below 1 less.
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Draw from the most likely tokens alone, those that together have this probability.
    #[arg(
        long,
        value_name = "P",
        default_value_t = 1.0,
        requires = "temperature",
        allow_negative_numbers = true
    )]
    top_p: f32,
    /// Which draws.
    #[arg(long, value_name = "S", default_value_t = 0, requires = "temperature")]
    seed: u64,
    /// The prompt is a message to an assistant, in the model's chat template.
    #[arg(long)]
    chat: bool,
    #[command(flatten)]
    subject: SubjectArguments,
    #[command(flatten)]
    report: ReportArguments,
}

/// What cannot be continued.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nothing to continue.
    #[error("the prompt is empty; give some text")]
    EmptyPrompt,
    /// A file of prompts that cannot be read.
    #[error("the prompts of {path} cannot be read: {source}; give a file of UTF-8 text, a prompt a line")]
    Prompts {
        /// The file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// A file of prompts without any.
    #[error("{path} has no prompts; give one on each line")]
    NoPrompts {
        /// The file.
        path: String,
    },
    /// Ctrl-C.
    #[error("interrupted after {tokens}; what was printed is all there is")]
    Interrupted {
        /// How many, in words.
        tokens: String,
    },
    /// The handler of Ctrl-C.
    #[error(transparent)]
    Watch(#[from] interrupt::Error),
}

impl CommandError for Error {
    fn exit_code(&self) -> u8 {
        if matches!(self, Error::Interrupted { .. }) { 130 } else { 2 }
    }
}

/// Why a text ends.
#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Finish {
    /// The model said so.
    End,
    /// As many tokens as asked for.
    MaxTokens,
    /// The model's context is full.
    Context,
    /// Ctrl-C.
    Interrupted,
    /// A step failed, or the text could not be printed.
    Failed,
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
    prompt: &'a str,
    chat: bool,
    /// `None`: the most likely token each time.
    temperature: Option<f32>,
    top_p: f32,
    seed: u64,
    prompt_tokens: &'a [u32],
    text: &'a str,
    finish: Finish,
    /// What failed.
    error: Option<String>,
    steps: &'a [Step],
    prefill_seconds: f64,
    prefill_tokens_per_second: f64,
    decode_seconds: f64,
    /// Of the tokens after the first, which the prompt's pass gave.
    decode_tokens_per_second: Option<f64>,
    /// Tokens in the cache at the end.
    kv_tokens: usize,
    kv_bytes: u64,
    /// What they would take in f16.
    kv_bytes_f16: u64,
    kv_host_bytes: u64,
    /// Of all steps; `None` for a scheme that says nothing of them.
    report: Option<Summary>,
    /// Tiles of 16 tokens that were used from their originals: found on the device, and read from the host's
    /// memory.
    tiles_found: Option<u64>,
    tiles_read: Option<u64>,
}

/// One token of the text.
#[derive(Serialize)]
struct Step {
    token: u32,
    /// What became complete with it; empty inside a character.
    text: String,
    /// From the step's start to the choice; for the first token, the prompt's pass.
    seconds: f64,
    /// What is known of the attention that it was chosen by; nothing of the first.
    report: Option<Summary>,
}

/// Runs the command.
///
/// # Errors
/// Bad input, a GPU asked for that cannot be used, what the device reports, or Ctrl-C.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    if let Some(path) = &arguments.prompts {
        return batch::run(arguments, path);
    }
    let asked = arguments.prompt.as_deref().unwrap_or_default();
    if asked.is_empty() {
        return Err(Error::EmptyPrompt.into());
    }
    let scheme = &scheme::one(&arguments.kv)?;
    let report = arguments.report.open(Some(&arguments.subject.path()?), None)?;
    let subject = arguments.subject.open()?;
    let tokenizer = subject.tokenizer()?;
    let prompt = if arguments.chat {
        tokenizer.chat(&[Message::user(asked)])?
    } else {
        behind_bos(tokenizer, &tokenizer.encode(asked)?)
    };
    subject.fits(prompt.len())?;
    let context = subject.model.config.context;
    let choice = choice(arguments);
    choice.shape(subject.model.config.vocab).map_err(ForwardError::from)?;

    let capacity = prompt.len().saturating_add(arguments.max_tokens as usize).min(context);
    let mut cache = subject.cache(scheme, capacity)?;
    let mut runner = subject.runner()?;
    let text = Text {
        tokenizer,
        choice,
        context,
        max_tokens: arguments.max_tokens as usize,
        streams: !report.takes_stdout(),
        interrupt: Interrupt::watch().map_err(Error::from)?,
    };
    let done = text.write(&mut runner, &mut *cache, &prompt);

    let name = subject.device_name();
    let decoded = done.steps.len().saturating_sub(1);
    let traffic = match done.failure {
        None => {
            eprintln!("{}", done.status(prompt.len(), &*cache, name));
            runner.traffic(&*cache)?
        }
        // The device may be lost.
        Some(_) => runner.traffic(&*cache).unwrap_or_default(),
    };
    let json = Json {
        command: "generate",
        version: env!("CARGO_PKG_VERSION"),
        model: &subject.model.config.name,
        file: subject.path.display().to_string(),
        kv: scheme.to_string(),
        device: name,
        gpu_note: subject.gpu_note.as_deref(),
        prompt: asked,
        chat: arguments.chat,
        temperature: arguments.temperature,
        top_p: arguments.top_p,
        seed: arguments.seed,
        prompt_tokens: &prompt,
        text: &done.text,
        finish: done.finish,
        error: done.failure.as_ref().map(ToString::to_string),
        steps: &done.steps,
        prefill_seconds: done.prefill,
        prefill_tokens_per_second: rate(done.read, done.prefill),
        decode_seconds: done.decode,
        decode_tokens_per_second: (decoded > 0).then(|| rate(decoded, done.decode)),
        kv_tokens: cache.tokens(),
        kv_bytes: cache.bytes(),
        kv_bytes_f16: f16_bytes(&*cache),
        kv_host_bytes: cache.host_bytes(),
        report: done.report,
        tiles_found: traffic.map(|t| t.found),
        tiles_read: traffic.map(|t| t.read),
    };
    let written = report.finish("", &json);
    match done.failure {
        // What failed first is the cause.
        Some(failure) => Err(failure),
        None if done.finish == Finish::Interrupted => {
            written?;
            Err(Error::Interrupted { tokens: text::plural(done.steps.len(), "token") }.into())
        }
        None => written,
    }
}

fn choice(arguments: &Arguments) -> Choice {
    match arguments.temperature {
        None => Choice::Greedy,
        Some(temperature) => Choice::Sampled { temperature, top_p: arguments.top_p, seed: arguments.seed },
    }
}

fn rate(tokens: usize, seconds: f64) -> f64 {
    tokens as f64 / seconds.max(1e-9)
}

/// How a text is made.
struct Text<'a> {
    tokenizer: &'a Tokenizer,
    choice: Choice,
    context: usize,
    max_tokens: usize,
    /// Whether it goes to stdout as it comes.
    streams: bool,
    interrupt: Interrupt,
}

/// A text, and how long it took.
struct Done {
    steps: Vec<Step>,
    text: String,
    finish: Finish,
    /// Why it failed, if it did.
    failure: Option<Failure>,
    /// Tokens of the prompt that were read.
    read: usize,
    /// Seconds.
    prefill: f64,
    /// Seconds, of all tokens but the first.
    decode: f64,
    report: Option<Summary>,
}

impl Text<'_> {
    /// All of the text, or what there is of it when it is interrupted or fails.
    fn write(&self, runner: &mut Runner, cache: &mut dyn KvCache, prompt: &[u32]) -> Done {
        let mut done = Done {
            steps: Vec::new(),
            text: String::new(),
            finish: Finish::Interrupted,
            failure: None,
            read: 0,
            prefill: 0.0,
            decode: 0.0,
            report: None,
        };
        let line = progress::spinner("reading the prompt");
        let mut stream = self.tokenizer.stream();
        let written = self.fill(&mut done, &mut stream, &line, runner, cache, prompt);
        line.finish_and_clear();
        let rest = stream.finish();
        done.text += &rest;
        let printed = self.print(&rest).and_then(|()| match done.steps[..] {
            [] => Ok(()),
            _ => self.print("\n"),
        });
        if let Err(failure) = written.and(printed) {
            (done.finish, done.failure) = (Finish::Failed, Some(failure));
        }
        done
    }

    fn fill(
        &self,
        done: &mut Done,
        stream: &mut DecodeStream<'_>,
        line: &ProgressBar,
        runner: &mut Runner,
        cache: &mut dyn KvCache,
        prompt: &[u32],
    ) -> Result<(), Failure> {
        let start = Instant::now();
        let (mut rest, mut token) = (prompt, None);
        while let Some((chunk, later)) = runner.split(rest).filter(|_| !self.stopped()) {
            if later.is_empty() {
                token = Some(runner.prefill(chunk, cache, self.choice)?);
            } else {
                runner.read(chunk, cache)?;
            }
            rest = later;
            done.read = prompt.len() - rest.len();
            done.prefill = start.elapsed().as_secs_f64();
            line.set_message(format!("{} of {} prompt tokens read", done.read, prompt.len()));
        }
        if stdout().is_terminal() {
            // The text takes the terminal from here on.
            line.finish_and_clear();
        }
        let (mut seconds, mut report) = (done.prefill, None);
        let goes_on = |first: &u32| {
            !self.tokenizer.is_end(*first) && self.max_tokens > 1 && cache.tokens() < self.context
        };
        let mut decoder = match token.filter(goes_on) {
            Some(first) => Some(runner.decoder(first, cache, self.choice)?),
            None => None,
        };
        while let Some(chosen) = token.take() {
            let end = self.tokenizer.is_end(chosen);
            let piece = if end { String::new() } else { stream.push(chosen)? };
            done.text += &piece;
            let printed = self.print(&piece);
            done.steps.push(Step { token: chosen, text: piece, seconds, report });
            printed?;
            let Some(decoder) = &mut decoder else {
                let ends = if self.max_tokens > 1 { Finish::Context } else { Finish::MaxTokens };
                done.finish = if end { Finish::End } else { ends };
                break;
            };
            if end {
                done.finish = Finish::End;
            } else if done.steps.len() >= self.max_tokens {
                done.finish = Finish::MaxTokens;
            } else if decoder.cache().tokens() >= self.context {
                done.finish = Finish::Context;
            } else if !self.stopped() {
                let start = Instant::now();
                token = Some(decoder.next()?);
                seconds = start.elapsed().as_secs_f64();
                done.decode += seconds;
                report = Summary::of(&decoder.cache().report()?);
                done.report = Summary::join(done.report, report);
                line.set_message(done.status(prompt.len(), decoder.cache(), "running"));
            }
        }
        drop(decoder);
        Ok(runner.check_cache(cache)?)
    }

    fn print(&self, text: &str) -> Result<(), Failure> {
        if self.streams && !text.is_empty() { print(text) } else { Ok(()) }
    }

    fn stopped(&self) -> bool {
        self.interrupt.pressed()
    }
}

impl Done {
    /// `12 prompt tokens in 0.30 s (40.0/s); 8 tokens, 20.1/s; KV dense: 19 tokens, 427.5 KiB; CPU`, with
    /// what is known of the steps.
    fn status(&self, prompt: usize, cache: &dyn KvCache, device: &str) -> String {
        let decoded = self.steps.len().saturating_sub(1);
        let speed = match decoded {
            0 => String::new(),
            _ => format!(", {:.1}/s", rate(decoded, self.decode)),
        };
        let (bytes, whole) = (cache.bytes(), f16_bytes(cache));
        let share = match bytes == whole || whole == 0 {
            true => String::new(),
            false => format!(" ({:.0} % of f16)", 100.0 * bytes as f64 / whole as f64),
        };
        let known = known(self.report);
        format!(
            "{} in {} ({:.1}/s); {}{speed}; KV {}: {}, {}{share}{known}; {device}",
            text::plural(prompt, "prompt token"),
            text::seconds(self.prefill),
            rate(self.read, self.prefill),
            text::plural(self.steps.len(), "token"),
            cache.scheme(),
            text::plural(cache.tokens(), "token"),
            text::bytes(bytes),
        )
    }
}

/// What is known of steps, behind what a line has said; nothing where nothing is.
fn known(report: Option<Summary>) -> String {
    match report.map(|report| report.line()) {
        Some(line) if !line.is_empty() => format!(", {line}"),
        _ => String::new(),
    }
}

/// What the cache's tokens would take in f16.
fn f16_bytes(cache: &dyn KvCache) -> u64 {
    cache.geometry().token_bytes() * cache.tokens() as u64
}

#[cfg(test)]
mod tests;
