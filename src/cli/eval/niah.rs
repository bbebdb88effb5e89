//! `ferrokv eval niah`: a needle in a haystack.

use super::pairs::{Paired, Pairs, Rows, lengths};
use super::{Lengths, beside_dense, exact_heads, names};
use crate::cli::failure::Failure;
use crate::cli::heat_map::{Cell, HeatMaps, Map, shade};
use crate::cli::picture::Picture;
use crate::cli::scheme::{self, DENSE};
use crate::cli::subject::{SubjectArguments, corpus};
use crate::cli::table::{Align, Table};
use crate::cli::text;
use crate::cli::trials::journal::{Journal, JournalArguments};
use crate::cli::trials::{Watcher, signed};
use host::eval::needle::{self, Setting, Task};
use host::eval::ruler;
use host::eval::statistics::{self, Interval, RESAMPLES};
use host::kv;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Instant;

const LONG: &str = "\
Hide a pass key at a depth of a long text, among other keys, and ask for it. The text is read in chunks; the question and the \
answer are decoded token by token through the cache.

A trial is scored twice: by the log-probability of the right key, teacher-forced, and by whether the key is in what the model \
writes by itself. All schemes get the same trials. Hit rates have Wilson intervals; against dense stand McNemar's exact test \
for hits and the mean difference of log-probabilities with a bootstrap interval over trials.";

const EXAMPLES: &str = "\
Examples:
  ferrokv eval niah --kv certified --context 512..4096 --json niah.json --plot niah
  ferrokv eval niah --kv int8-int4 --depths 11 --trials 4 --distractors 16
  ferrokv eval niah --kv certified --text moby-dick";

/// Find a needle in a haystack.
#[derive(clap::Args)]
#[command(long_about = LONG, after_long_help = EXAMPLES)]
pub struct Arguments {
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "int8-int4,certified")]
    #[arg(help = scheme::short("How keys and values are kept"))]
    #[arg(long_help = scheme::long("How keys and values are kept"))]
    kv: Vec<String>,
    /// Lengths of prompt and answer in tokens: a list, or 512..8192 with what lies between by doubling.
    #[arg(long, value_name = "LENGTHS", default_value = "1024,2048")]
    context: Lengths,
    /// How many depths, evenly from the start of the text to its end.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(2..=101))]
    depths: u32,
    /// Trials of each length and depth, each with a text and keys of its own.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    trials: u32,
    /// Keys beside the one that is asked for.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(0..needle::MOST_KEYS as i64))]
    distractors: u32,
    /// The haystack: sotu or moby-dick, which ./setup --model fetched, or a file.
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
    distractors: u32,
    seed: u64,
}

/// One key over one scheme.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Trial {
    kv: String,
    context: usize,
    depth: f64,
    trial: u64,
    /// Of the prompt.
    tokens: usize,
    key: String,
    /// Of the right key, natural logarithm.
    log_probability: f64,
    hit: bool,
    /// What the model wrote.
    text: String,
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
        (self.context, self.depth, self.trial) == (other.context, other.depth, other.trial)
    }

    fn report(&self) -> Option<kv::Summary> {
        self.report
    }

    fn seconds(&self) -> f64 {
        self.seconds
    }
}

/// A scheme at one length, over all depths.
#[derive(Debug, Serialize)]
struct Row {
    context: usize,
    kv: String,
    trials: usize,
    hits: usize,
    hit_rate: f64,
    /// Wilson's.
    hit_interval: Interval,
    /// Trials in which the dense cache alone hit, and this scheme alone.
    only_dense: usize,
    only_this: usize,
    /// McNemar's exact test, two-sided.
    p: f64,
    log_probability: f64,
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
    let settings = Settings {
        text: corpus.name(),
        text_bytes: corpus.text().len(),
        distractors: arguments.distractors,
        seed: arguments.seed,
    };
    let mut journal: Journal<Trial> = arguments.journal.open("eval niah", &subject, settings)?;
    let mut plan = Vec::new();
    for &length in lengths {
        for trial in 0..u64::from(arguments.trials) {
            for depth in 0..arguments.depths {
                let depth = f64::from(depth) / f64::from(arguments.depths - 1);
                let distractors = arguments.distractors as usize;
                plan.push(Setting { length, depth, distractors, seed: arguments.seed, trial });
            }
        }
    }
    let planned = plan.len() * schemes.len();
    let watcher = Watcher::new(plan.iter().map(|setting| setting.length).sum::<usize>() * schemes.len())?;
    let mut runner = subject.runner()?;
    for setting in &plan {
        let task = Task::new(tokenizer, &corpus, *setting)?;
        for scheme in &schemes {
            let kv = scheme.to_string();
            let Setting { length: context, depth, trial, .. } = *setting;
            let there = |other: &Trial| {
                (other.context, other.depth, other.trial) == (context, depth, trial) && other.kv == kv
            };
            if journal.has(there) {
                watcher.skip(context);
                continue;
            }
            watcher.say(format!("{context} tokens, depth {:.0} %, trial {}, {kv}", 100.0 * depth, trial + 1));
            let begun = Instant::now();
            let open = || subject.cache(scheme, task.capacity());
            // The bar counts tokens of prompts: steps take longer, and so do misses, in every trial alike.
            let mut part = watcher.part(context);
            let scored = match needle::run(&mut runner, tokenizer, &task, open, &mut |work| part.hear(work)) {
                Ok(scored) => scored,
                Err(error) => {
                    watcher.end();
                    let summary = rows(journal.trials());
                    return Err(journal.ended_early(error, planned, &summary));
                }
            };
            part.end();
            let trial = Trial {
                kv,
                context,
                depth,
                trial,
                tokens: task.prompt.tokens(),
                key: task.key.clone(),
                log_probability: scored.log_probability,
                hit: scored.hit,
                text: scored.text,
                report: scored.report,
                seconds: begun.elapsed().as_secs_f64(),
            };
            journal.push(trial, rows)?;
        }
    }
    watcher.end();
    let summary = rows(journal.trials());
    if let Some(picture) = &picture {
        let title = format!("{}, {}: pass keys", subject.model.config.name, corpus.name());
        picture.write(&maps(title, journal.trials()))?;
    }
    let head = format!(
        "{} looks for a key among {} in {}, on {}",
        subject.model.config.name,
        arguments.distractors + 1,
        corpus.name(),
        journal.machine()
    );
    journal.finish(&render(&head, &summary), &summary)
}

/// Rows by length, the baseline first; a trial counts where both have it.
fn rows(trials: &[Trial]) -> Rows<Row> {
    let names = names(trials.iter().map(|trial| trial.kv.as_str()));
    let mut rows = Vec::new();
    for context in lengths(trials) {
        let of_length: Vec<&Trial> = trials.iter().filter(|trial| trial.context == context).collect();
        for &kv in &names {
            let Some(pairs) = Pairs::of(&of_length, kv) else { continue };
            let hits = pairs.count(|own, _| own.hit);
            let only_dense = pairs.count(|own, dense| dense.hit && !own.hit);
            let only_this = pairs.count(|own, dense| own.hit && !dense.hit);
            let (logs, dense) = pairs.figures(|trial| trial.log_probability);
            let deltas: Vec<f64> = logs.iter().zip(&dense).map(|(own, dense)| own - dense).collect();
            rows.push(Row {
                context,
                kv: kv.to_owned(),
                trials: pairs.len(),
                hits,
                hit_rate: hits as f64 / pairs.len() as f64,
                hit_interval: statistics::wilson(hits, pairs.len()),
                only_dense,
                only_this,
                p: statistics::mcnemar(only_dense, only_this),
                log_probability: statistics::mean(&logs),
                delta: statistics::mean(&deltas),
                delta_interval: statistics::bootstrap(&deltas, RESAMPLES, statistics::SEED),
                report: pairs.report(),
                seconds: pairs.seconds(),
            });
        }
    }
    Rows::new(statistics::SEED, rows)
}

fn render(head: &str, summary: &Rows<Row>) -> String {
    let mut table = Table::new(&[
        ("context", Align::Right),
        ("KV scheme", Align::Left),
        ("hits", Align::Right),
        ("rate", Align::Right),
        ("95 %", Align::Left),
        ("dense only", Align::Right),
        ("this only", Align::Right),
        ("p", Align::Right),
        ("log p(key)", Align::Right),
        ("Δ", Align::Right),
        ("95 %", Align::Left),
        ("dense heads", Align::Right),
        ("time", Align::Right),
    ]);
    for row in &summary.rows {
        let only = |text: String| if row.kv == DENSE { String::new() } else { text };
        table.row([
            row.context.to_string(),
            row.kv.clone(),
            format!("{}/{}", row.hits, row.trials),
            format!("{:.3}", row.hit_rate),
            format!("[{:.3}, {:.3}]", row.hit_interval.low, row.hit_interval.high),
            only(row.only_dense.to_string()),
            only(row.only_this.to_string()),
            only(format!("{:.3}", row.p)),
            format!("{:.4}", row.log_probability),
            only(format!("{:+.5}", row.delta)),
            only(signed(row.delta_interval)),
            exact_heads(row.report),
            text::seconds(row.seconds),
        ]);
    }
    format!(
        "{head}\n\n{}\nrates: Wilson; p: McNemar, exact, of hits against dense; Δ: log-probability of the key less that over \
         dense,\nbootstrap over trials ({} resamples, seed {}).\n",
        table.render(),
        text::count(summary.bootstrap_resamples as u64),
        summary.bootstrap_seed,
    )
}

/// One map a scheme: depth by length.
fn maps(title: String, trials: &[Trial]) -> HeatMaps {
    let lengths = lengths(trials);
    let mut depths: Vec<f64> = trials.iter().map(|trial| trial.depth).collect();
    depths.sort_by(f64::total_cmp);
    depths.dedup();
    let at = |kv: &str, context: usize, depth: f64| -> Vec<&Trial> {
        trials.iter().filter(|t| t.kv == kv && (t.context, t.depth) == (context, depth)).collect()
    };
    let value = |own: &[&Trial]| {
        let logs: Vec<f64> = own.iter().map(|trial| trial.log_probability).collect();
        statistics::mean(&logs)
    };
    let schemes = names(trials.iter().map(|trial| trial.kv.as_str()));
    let places = || lengths.iter().flat_map(|context| depths.iter().map(move |depth| (*context, *depth)));
    let all = schemes.iter().flat_map(|kv| places().map(|(context, depth)| value(&at(kv, context, depth))));
    let least = all.filter(|value| value.is_finite()).fold(0.0, f64::min);
    let cell = |kv: &str, context: usize, depth: f64| {
        let own = at(kv, context, depth);
        let (hits, value) = (own.iter().filter(|trial| trial.hit).count(), value(&own));
        let text = || format!("{value:.2}  {hits}/{}", own.len());
        (!own.is_empty()).then(|| Cell::new(shade(value, least), text()))
    };
    let map = |kv: &&str| Map {
        name: kv.to_string(),
        cells: depths
            .iter()
            .map(|depth| lengths.iter().map(|context| cell(kv, *context, *depth)).collect())
            .collect(),
        edges: Vec::new(),
    };
    HeatMaps {
        title,
        legend: vec!["mean log-probability of the key, and hits".into()],
        columns: lengths.iter().map(usize::to_string).collect(),
        rows: depths.iter().map(|depth| format!("{:.0} %", 100.0 * depth)).collect(),
        axes: ["tokens".into(), "depth".into()],
        maps: schemes.iter().map(map).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trial(kv: &str, depth: f64, trial: u64, hit: bool, log_probability: f64) -> Trial {
        let (text, key) = (String::new(), "12345".to_owned());
        let kv = kv.to_owned();
        let report = None;
        Trial {
            kv,
            context: 64,
            depth,
            trial,
            tokens: 60,
            key,
            log_probability,
            hit,
            text,
            report,
            seconds: 1.0,
        }
    }

    #[test]
    fn trials_are_paired() {
        let mut trials = vec![
            trial("x", 0.0, 0, false, -3.0),
            trial(DENSE, 0.0, 0, true, -1.0),
            trial(DENSE, 1.0, 0, true, -2.0),
            trial("x", 1.0, 0, true, -1.0),
            trial("x", 1.0, 1, true, -50.0),
        ];
        let found = rows(&trials).rows;
        assert_eq!(found.len(), 2);
        let row = &found[1];
        assert_eq!((row.trials, row.hits, row.only_dense, row.only_this, row.p), (2, 1, 1, 0, 1.0));
        assert_eq!((row.log_probability, row.delta, found[0].hits), (-2.0, -0.5, 2));
        let drawn = maps("title".into(), &trials);
        assert_eq!((drawn.maps.len(), drawn.rows.len(), drawn.maps[0].name.as_str()), (2, 2, DENSE));
        assert_eq!(drawn.maps[1].cells[0][0].as_ref().map(|cell| cell.text.as_str()), Some("-3.00  0/1"));
        trials.retain(|trial| trial.kv != DENSE);
        assert!(rows(&trials).rows.is_empty());
    }
}
