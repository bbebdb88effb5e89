//! `ferrokv eval ppl`: perplexity of the decoded half of windows.

use super::pairs::{Paired, Pairs, Rows, lengths};
use super::{Lengths, beside_dense, exact_heads, names, worst_bound};
use crate::cli::chart::{Chart, Line, Panel, Point};
use crate::cli::failure::Failure;
use crate::cli::picture::Picture;
use crate::cli::scheme::{self, DENSE};
use crate::cli::subject::{Subject, SubjectArguments, behind_bos, corpus};
use crate::cli::table::{Align, Table};
use crate::cli::text;
use crate::cli::trials::journal::{Journal, JournalArguments};
use crate::cli::trials::{Watcher, signed};
use host::eval::perplexity::{self, Summary};
use host::eval::statistics::{self, Interval};
use host::kv;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Instant;

const LONG: &str = "\
Measure perplexity over a KV scheme. Windows of a text, evenly spread over it and with no text in common, are read to their \
half in chunks; the second half is decoded token by token through the cache, teacher-forced. The negative log-likelihood \
(NLL, nats a token) is that of the second half alone.

Every scheme sees the same windows, and the dense cache always runs beside them. ΔNLL is the mean over windows of the \
difference from dense, with a 95 % bootstrap interval over windows; the ratio of perplexities is its exponential. An interval \
that holds 0 says that these windows show no difference.";

const EXAMPLES: &str = "\
Examples:
  ferrokv eval ppl --kv certified,int8-int4 --context 512..4096 --json ppl.json
  ferrokv eval ppl --kv certified --text moby-dick --windows 20 --plot ppl       writes ppl.svg and ppl.png
  ferrokv eval ppl --kv certified --model other.gguf --text notes.txt --context 8192";

/// Measure perplexity of the decoded half of windows.
#[derive(clap::Args)]
#[command(long_about = LONG, after_long_help = EXAMPLES)]
pub struct Arguments {
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "int8-int4,certified")]
    #[arg(help = scheme::short("How keys and values are kept"))]
    #[arg(long_help = scheme::long("How keys and values are kept"))]
    kv: Vec<String>,
    /// Lengths of windows in tokens: a list, or 512..8192 with what lies between by doubling.
    #[arg(long, value_name = "LENGTHS", default_value = "1024")]
    context: Lengths,
    /// Windows of each length.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    windows: u32,
    /// The text: sotu or moby-dick, which ./setup --model fetched, or a file.
    #[arg(long, value_name = "NAME|FILE", default_value = "sotu")]
    text: String,
    /// Which resamples the intervals are of.
    #[arg(long, value_name = "S", default_value_t = statistics::SEED)]
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
    windows: u32,
}

/// One window over one scheme.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Trial {
    kv: String,
    context: usize,
    /// Its number, and the byte of the text where it starts.
    window: usize,
    start: usize,
    /// Tokens of the decoded half.
    decoded: usize,
    /// Their mean negative log-likelihood, nats.
    nll: f64,
    kv_tokens: usize,
    /// Of the device's memory, at the end.
    kv_bytes: u64,
    /// What the scheme promised, over all steps.
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
        (self.context, self.window) == (other.context, other.window)
    }

    fn report(&self) -> Option<kv::Summary> {
        self.report
    }

    fn seconds(&self) -> f64 {
        self.seconds
    }
}

/// What a record says of one scheme at one length.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The length.
    pub context: usize,
    /// The scheme.
    pub kv: String,
    /// Tokens decoded in a window.
    pub decoded: usize,
    /// Bytes a token that the cache takes at the end of a window.
    pub kv_bytes_per_token: f64,
    /// The figures.
    #[serde(flatten)]
    pub summary: Summary,
    /// What the scheme promised, over all windows.
    pub report: Option<kv::Summary>,
    /// Time of all windows.
    pub seconds: f64,
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
    let windows = arguments.windows as usize;

    lengths.iter().try_for_each(|length| subject.fits(*length))?;
    let settings =
        Settings { text: corpus.name(), text_bytes: corpus.text().len(), windows: arguments.windows };
    let mut journal: Journal<Trial> = arguments.journal.open("eval ppl", &subject, settings)?;
    let rows = |trials: &[Trial]| rows(trials, arguments.seed);

    let start = tokenizer.bos().map_or(0, |_| 1);
    let mut cut = Vec::new();
    for length in lengths {
        for (number, window) in corpus.windows(tokenizer, length - start, windows)?.into_iter().enumerate() {
            cut.push((number, window.start, behind_bos(tokenizer, &window.tokens)));
        }
    }
    let plan: Vec<_> =
        cut.iter().flat_map(|window| schemes.iter().map(move |scheme| (window, scheme))).collect();
    let watcher = Watcher::new(plan.iter().map(|((_, _, tokens), _)| perplexity::work(tokens.len())).sum())?;
    let mut runner = subject.runner()?;
    for ((number, start, tokens), scheme) in &plan {
        let (context, kv) = (tokens.len(), scheme.to_string());
        if journal.has(|trial| (trial.context, trial.window) == (context, *number) && trial.kv == kv) {
            watcher.skip(perplexity::work(context));
            continue;
        }
        watcher.say(format!("{context} tokens, window {} of {windows}, {kv}", number + 1));
        let begun = Instant::now();
        let mut cache = subject.cache(scheme, context)?;
        let half = perplexity::decode_half(&mut runner, &mut *cache, tokens, &mut |work| watcher.hear(work));
        let half = match half {
            Ok(half) => half,
            Err(error) => {
                watcher.end();
                return Err(journal.ended_early(error.into(), plan.len(), &rows(journal.trials())));
            }
        };
        let trial = Trial {
            kv,
            context,
            window: *number,
            start: *start,
            decoded: half.nll.len(),
            nll: statistics::mean(&half.nll),
            kv_tokens: cache.tokens(),
            kv_bytes: cache.bytes(),
            report: half.report,
            seconds: begun.elapsed().as_secs_f64(),
        };
        journal.push(trial, rows)?;
    }
    watcher.end();
    let summary = rows(journal.trials());
    if let Some(picture) = &picture {
        let title = format!("{}, {}: decoded half of windows", subject.model.config.name, corpus.name());
        picture.write(&chart(title, &summary.rows))?;
    }
    journal.finish(&render(&summary, &subject, corpus.name(), &journal.machine()), &summary)
}

/// Rows by length, the baseline first; a window counts where both have it.
fn rows(trials: &[Trial], seed: u64) -> Rows<Row> {
    let names = names(trials.iter().map(|trial| trial.kv.as_str()));
    let mut rows = Vec::new();
    for context in lengths(trials) {
        let of_length: Vec<&Trial> = trials.iter().filter(|trial| trial.context == context).collect();
        for &kv in &names {
            let Some(pairs) = Pairs::of(&of_length, kv) else { continue };
            let (nll, baseline) = pairs.figures(|trial| trial.nll);
            let first = pairs.first();
            rows.push(Row {
                context,
                kv: kv.to_owned(),
                decoded: first.decoded,
                kv_bytes_per_token: first.kv_bytes as f64 / first.kv_tokens as f64,
                summary: perplexity::summarize(&nll, &baseline, seed),
                report: pairs.report(),
                seconds: pairs.seconds(),
            });
        }
    }
    Rows::new(seed, rows)
}

fn render(summary: &Rows<Row>, subject: &Subject, corpus: &str, machine: &str) -> String {
    let mut table = Table::new(&[
        ("context", Align::Right),
        ("KV scheme", Align::Left),
        ("windows", Align::Right),
        ("decoded", Align::Right),
        ("NLL", Align::Right),
        ("perplexity", Align::Right),
        ("ΔNLL", Align::Right),
        ("95 %", Align::Left),
        ("ratio", Align::Right),
        ("95 %", Align::Left),
        ("KV B/token", Align::Right),
        ("dense heads", Align::Right),
        ("worst bound", Align::Right),
        ("time", Align::Right),
    ]);
    for row in &summary.rows {
        let Summary { windows, nll, perplexity, delta, delta_interval, ratio, ratio_interval } = row.summary;
        let beside = row.kv != DENSE;
        let only = |text: String| if beside { text } else { String::new() };
        table.row([
            row.context.to_string(),
            row.kv.clone(),
            windows.to_string(),
            text::count((windows * row.decoded) as u64),
            format!("{nll:.4}"),
            format!("{perplexity:.3}"),
            only(format!("{delta:+.5}")),
            only(signed(delta_interval)),
            only(format!("{ratio:.5}")),
            only(ratio_interval.map_or_else(|| "-".into(), |i| format!("[{:.5}, {:.5}]", i.low, i.high))),
            format!("{:.0}", row.kv_bytes_per_token),
            exact_heads(row.report),
            worst_bound(row.report),
            text::seconds(row.seconds),
        ]);
    }
    format!(
        "{} over {corpus}, on {}\n\n{}\nThe decoded half of each window, nats a token; ΔNLL and ratio against dense on the \
         same windows, bootstrap over windows\n({} resamples, seed {}).\n",
        subject.model.config.name,
        machine,
        table.render(),
        text::count(summary.bootstrap_resamples as u64),
        summary.bootstrap_seed,
    )
}

/// Perplexity by length, and each scheme's difference from dense with its interval.
fn chart(title: String, rows: &[Row]) -> Chart {
    let mut lengths: Vec<usize> = rows.iter().map(|row| row.context).collect();
    lengths.dedup();
    let names = names(rows.iter().map(|row| row.kv.as_str()));
    let lines = |of: fn(&Row) -> (f64, Option<Interval>), baseline: bool| -> Vec<Line> {
        let point = |row: &Row| {
            let x = lengths.iter().position(|length| *length == row.context)? as f64;
            let (y, interval) = of(row);
            Some(Point { x, y, interval: interval.map(|i| (i.low, i.high)) })
        };
        let line = |name: &&str| {
            let own = rows.iter().filter(|row| row.kv == *name && (baseline || row.kv != DENSE));
            Line { name: name.to_string(), points: own.filter_map(point).collect() }
        };
        names.iter().map(line).collect()
    };
    let panel = |y_title: &str, zero, lines| Panel {
        x_title: "tokens of a window; its second half is decoded".into(),
        y_title: y_title.into(),
        labels: lengths.iter().map(usize::to_string).collect(),
        logarithmic: false,
        zero,
        lines,
    };
    let mut panels = vec![panel("perplexity", None, lines(|row| (row.summary.perplexity, None), true))];
    if names.len() > 1 {
        let delta = |row: &Row| (row.summary.delta, row.summary.delta_interval);
        panels.push(panel("ΔNLL against dense, nats", Some(0.0), lines(delta, false)));
    }
    Chart { title, panels }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trial(kv: &str, context: usize, window: usize, nll: f64) -> Trial {
        Trial {
            kv: kv.into(),
            context,
            window,
            start: 0,
            decoded: context / 2,
            nll,
            kv_tokens: context - 1,
            kv_bytes: 4 * (context as u64 - 1),
            report: None,
            seconds: 1.0,
        }
    }

    /// Of a run that was interrupted, a window counts where both schemes have it.
    #[test]
    fn windows_are_paired() {
        let trials = [
            trial(DENSE, 64, 0, 2.0),
            trial("x", 64, 0, 2.5),
            trial(DENSE, 64, 1, 5.0),
            trial("x", 64, 2, 100.0),
            trial(DENSE, 32, 0, 1.0),
        ];
        let rows = rows(&trials, 1).rows;
        let found: Vec<_> = rows
            .iter()
            .map(|row| (row.context, row.kv.as_str(), row.summary.windows, row.summary.delta))
            .collect();
        assert_eq!(found, [(32, DENSE, 1, 0.0), (64, DENSE, 2, 0.0), (64, "x", 1, 0.5)]);
        assert_eq!((rows[2].kv_bytes_per_token, rows[2].summary.delta_interval), (4.0, None));
    }
}
