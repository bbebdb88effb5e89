//! `ferrokv eval ruler`: seven tasks over long texts.

use super::pairs::{Paired, Pairs, Rows, lengths};
use super::{Lengths, beside_dense, exact_heads, names};
use crate::cli::chart::{Chart, Line, Panel, Point};
use crate::cli::failure::Failure;
use crate::cli::picture::Picture;
use crate::cli::scheme::{self, DENSE};
use crate::cli::subject::{SubjectArguments, corpus};
use crate::cli::table::{Align, Table};
use crate::cli::text;
use crate::cli::trials::journal::{Journal, JournalArguments};
use crate::cli::trials::{Watcher, signed};
use clap::builder::PossibleValuesParser;
use host::eval::ruler::{self, Source, Subtask};
use host::eval::statistics::{self, Interval, RESAMPLES};
use host::kv;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Instant;

const LONG: &str = "\
Seven tasks over long texts, after the RULER benchmark, made by rule from a seed:

  single      one number for a word, in a haystack of speeches
  multikey    the same among three other words with numbers
  multivalue  four numbers for one word
  multiquery  four words with a number each, all asked for
  vt          variables assigned to each other: the five that have a value
  cwe         a list of words: the ten that come most often
  fwe         a text of made-up words: the three that come most often

The text is read in chunks; question and answer are decoded token by token through the cache. The score of a trial is the \
share of the expected answers that what the model writes contains. All schemes get the same trials; against dense stands the \
mean difference with a bootstrap interval over trials.";

const EXAMPLES: &str = "\
Examples:
  ferrokv eval ruler --kv certified --context 2048 --json ruler.json --plot ruler
  ferrokv eval ruler --kv int8-int4,certified --tasks single,vt --trials 20 --context 1024..4096";

/// What stands for all tasks together.
const ALL: &str = "all";

/// Do seven tasks over long texts.
#[derive(clap::Args)]
#[command(long_about = LONG, after_long_help = EXAMPLES)]
pub struct Arguments {
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "int8-int4,certified")]
    #[arg(help = scheme::short("How keys and values are kept"))]
    #[arg(long_help = scheme::long("How keys and values are kept"))]
    kv: Vec<String>,
    /// Lengths of prompt and answer in tokens: a list, or 512..8192 with what lies between by doubling.
    #[arg(long, value_name = "LENGTHS", default_value = "1024")]
    context: Lengths,
    /// Which tasks; all if not given.
    #[arg(long, value_name = "TASK", value_delimiter = ',', value_parser = PossibleValuesParser::new(Subtask::ALL.map(Subtask::name)))]
    tasks: Vec<String>,
    /// Trials of each task at each length.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    trials: u32,
    /// Haystacks and words: sotu or moby-dick, which ./setup --model fetched, or a file.
    #[arg(long, value_name = "NAME|FILE", default_value = "sotu")]
    text: String,
    /// Which trials.
    #[arg(long, value_name = "S", default_value_t = ruler::SEED)]
    seed: u64,
    /// Draw PREFIX.svg and PREFIX.png (replaced if they exist).
    #[arg(long, value_name = "PREFIX")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    subject: SubjectArguments,
    #[command(flatten)]
    journal: JournalArguments,
}

#[derive(Serialize)]
struct Settings<'a> {
    text: &'a str,
    text_bytes: usize,
    seed: u64,
}

/// One task over one scheme.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Trial {
    kv: String,
    task: String,
    context: usize,
    trial: u64,
    /// Of the prompt.
    tokens: usize,
    expected: Vec<String>,
    /// What the model wrote.
    text: String,
    score: f64,
    report: Option<kv::Summary>,
    seconds: f64,
}

impl Paired for Trial {
    fn kv(&self) -> &str {
        &self.kv
    }

    fn context(&self) -> usize {
        self.context
    }

    fn is_same(&self, other: &Trial) -> bool {
        (self.context, self.trial) == (other.context, other.trial) && self.task == other.task
    }

    fn report(&self) -> Option<kv::Summary> {
        self.report
    }

    fn seconds(&self) -> f64 {
        self.seconds
    }
}

/// A scheme at one length in one task, or in all.
#[derive(Debug, Serialize)]
struct Row {
    context: usize,
    task: String,
    kv: String,
    trials: usize,
    score: f64,
    /// Against dense on the same trials.
    delta: f64,
    delta_interval: Option<Interval>,
    report: Option<kv::Summary>,
    seconds: f64,
}

/// Runs the command.
///
/// # Errors
/// Bad input, what the device reports, or Ctrl-C.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let schemes = beside_dense(&arguments.kv)?;
    let picture = arguments.plot.as_deref().map(|prefix| Picture::new(prefix, None)).transpose()?;
    let corpus = corpus(&arguments.text)?;
    let subject = arguments.subject.open()?;
    let tokenizer = subject.tokenizer()?;
    let Lengths(lengths) = &arguments.context;
    lengths.iter().try_for_each(|length| subject.fits(*length))?;
    let settings = Settings { text: corpus.name(), text_bytes: corpus.text().len(), seed: arguments.seed };
    let mut journal: Journal<Trial> = arguments.journal.open("eval ruler", &subject, settings)?;
    let chosen = |subtask: &Subtask| {
        arguments.tasks.is_empty() || arguments.tasks.iter().any(|name| name == subtask.name())
    };
    let subtasks: Vec<Subtask> = Subtask::ALL.into_iter().filter(chosen).collect();
    let source = Source { tokenizer, corpus: &corpus, seed: arguments.seed };
    let mut plan = Vec::new();
    for &length in lengths {
        for trial in 0..u64::from(arguments.trials) {
            plan.extend(subtasks.iter().map(|subtask| (length, trial, *subtask)));
        }
    }
    let planned = plan.len() * schemes.len();
    let watcher = Watcher::new(plan.iter().map(|(length, ..)| length).sum::<usize>() * schemes.len())?;
    let mut runner = subject.runner()?;
    for &(context, trial, subtask) in &plan {
        let task = source.task(subtask, context, trial)?;
        for scheme in &schemes {
            let kv = scheme.to_string();
            let there = |other: &Trial| {
                (other.context, other.trial) == (context, trial)
                    && other.task == subtask.name()
                    && other.kv == kv
            };
            if journal.has(there) {
                watcher.skip(context);
                continue;
            }
            watcher.say(format!("{context} tokens, {}, trial {}, {kv}", subtask.name(), trial + 1));
            let begun = Instant::now();
            let mut cache = subject.cache(scheme, task.capacity())?;
            // The bar counts tokens of prompts, and steps as far as they go beyond.
            let mut part = watcher.part(context);
            let scored =
                match ruler::run(&mut runner, tokenizer, &task, &mut *cache, &mut |work| part.hear(work)) {
                    Ok(scored) => scored,
                    Err(error) => {
                        watcher.end();
                        let summary = rows(journal.trials());
                        return Err(journal.ended_early(error.into(), planned, &summary));
                    }
                };
            part.end();
            let trial = Trial {
                kv,
                task: subtask.name().to_owned(),
                context,
                trial,
                tokens: task.prompt.tokens(),
                expected: task.expected.clone(),
                text: scored.text,
                score: scored.score,
                report: scored.report,
                seconds: begun.elapsed().as_secs_f64(),
            };
            journal.push(trial, rows)?;
        }
    }
    watcher.end();
    let summary = rows(journal.trials());
    if let Some(picture) = &picture {
        picture.write(&chart(format!("{}, {}", subject.model.config.name, corpus.name()), &summary.rows))?;
    }
    let head =
        format!("{}, texts from {}, on {}", subject.model.config.name, corpus.name(), journal.machine());
    journal.finish(&render(&head, &summary), &summary)
}

/// The record's tasks, in their order.
fn tasks(trials: &[Trial]) -> Vec<&'static str> {
    let there = |name: &&str| trials.iter().any(|trial| trial.task == *name);
    Subtask::ALL.map(Subtask::name).into_iter().filter(there).collect()
}

/// Rows by length and task, the baseline first; a trial counts where both have it.
fn rows(trials: &[Trial]) -> Rows<Row> {
    let names = names(trials.iter().map(|trial| trial.kv.as_str()));
    let mut rows = Vec::new();
    for context in lengths(trials) {
        for task in tasks(trials).into_iter().chain([ALL]) {
            let wanted = |trial: &&Trial| trial.context == context && (task == ALL || trial.task == task);
            let of_task: Vec<&Trial> = trials.iter().filter(wanted).collect();
            for &kv in &names {
                let Some(pairs) = Pairs::of(&of_task, kv) else { continue };
                let (scores, dense) = pairs.figures(|trial| trial.score);
                let deltas: Vec<f64> = scores.iter().zip(&dense).map(|(own, dense)| own - dense).collect();
                rows.push(Row {
                    context,
                    task: task.to_owned(),
                    kv: kv.to_owned(),
                    trials: pairs.len(),
                    score: statistics::mean(&scores),
                    delta: statistics::mean(&deltas),
                    delta_interval: statistics::bootstrap(&deltas, RESAMPLES, statistics::SEED),
                    report: pairs.report(),
                    seconds: pairs.seconds(),
                });
            }
        }
    }
    Rows::new(statistics::SEED, rows)
}

fn render(head: &str, summary: &Rows<Row>) -> String {
    let mut table = Table::new(&[
        ("context", Align::Right),
        ("task", Align::Left),
        ("KV scheme", Align::Left),
        ("trials", Align::Right),
        ("score", Align::Right),
        ("Δ", Align::Right),
        ("95 %", Align::Left),
        ("dense heads", Align::Right),
        ("time", Align::Right),
    ]);
    for row in &summary.rows {
        let only = |text: String| if row.kv == DENSE { String::new() } else { text };
        table.row([
            row.context.to_string(),
            row.task.clone(),
            row.kv.clone(),
            row.trials.to_string(),
            format!("{:.3}", row.score),
            only(format!("{:+.3}", row.delta)),
            only(signed(row.delta_interval)),
            exact_heads(row.report),
            text::seconds(row.seconds),
        ]);
    }
    format!(
        "{head}\n\n{}\nΔ: score less that over dense on the same trials, bootstrap over trials ({} resamples, seed {}).\n",
        table.render(),
        text::count(summary.bootstrap_resamples as u64),
        summary.bootstrap_seed,
    )
}

/// A panel a length: scores by task.
fn chart(title: String, rows: &[Row]) -> Chart {
    let names = names(rows.iter().map(|row| row.kv.as_str()));
    let mut lengths: Vec<usize> = rows.iter().map(|row| row.context).collect();
    lengths.dedup();
    let panel = |context: &usize| {
        let own = || rows.iter().filter(|row| row.context == *context);
        let mut labels: Vec<String> = own().map(|row| row.task.clone()).collect();
        labels.dedup();
        let line = |name: &&str| {
            let point = |row: &Row| {
                let x = labels.iter().position(|label| *label == row.task)? as f64;
                Some(Point { x, y: row.score, interval: None })
            };
            Line {
                name: name.to_string(),
                points: own().filter(|row| row.kv == *name).filter_map(point).collect(),
            }
        };
        let lines = names.iter().map(line).collect();
        let (x_title, y_title) = (format!("tasks of {context} tokens"), "score".to_owned());
        Panel { x_title, y_title, labels, logarithmic: false, zero: Some(0.0), lines }
    };
    Chart { title, panels: lengths.iter().map(panel).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_are_paired_by_task_and_in_all() {
        let trial = |kv: &str, task: &str, trial, score| Trial {
            kv: kv.into(),
            task: task.into(),
            context: 64,
            trial,
            tokens: 60,
            expected: Vec::new(),
            text: String::new(),
            score,
            report: None,
            seconds: 1.0,
        };
        let trials = [
            trial(DENSE, "vt", 0, 0.4),
            trial("x", "vt", 0, 0.6),
            trial(DENSE, "single", 0, 1.0),
            trial("x", "single", 0, 0.0),
            trial("x", "single", 1, 1.0),
        ];
        let rows = rows(&trials).rows;
        let found: Vec<_> = rows.iter().map(|row| (row.task.as_str(), row.kv.as_str(), row.trials)).collect();
        let expected = [
            ("single", DENSE, 1),
            ("single", "x", 1),
            ("vt", DENSE, 1),
            ("vt", "x", 1),
            (ALL, DENSE, 2),
            (ALL, "x", 2),
        ];
        assert_eq!(found, expected);
        assert!((rows[5].score - 0.3).abs() < 1e-12 && (rows[5].delta + 0.4).abs() < 1e-12);
        let chart = chart("t".into(), &rows);
        assert_eq!((chart.panels.len(), chart.panels[0].labels.len()), (1, 3));
    }
}
