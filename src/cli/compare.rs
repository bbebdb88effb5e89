//! `ferrokv compare`: two KV schemes on the same text, step by step.

use super::chart::{Chart, Line, Panel, Point};
use super::failure::Failure;
use super::picture::Picture;
use super::scheme;
use super::subject::{SubjectArguments, behind_bos, corpus};
use super::table::{Align, Table};
use super::text;
use super::trials::journal::{Journal, JournalArguments};
use super::trials::{Error, Watcher, signed};
use host::eval::compare::{self, Agreement, Compared, Summary};
use host::eval::statistics;
use host::kv::KvCache;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Instant;

const LONG: &str = "\
Compare two KV schemes on the same text, step by step. The first half of each window is read in chunks, the second decoded \
token by token over both caches, teacher-forced: at each step both see the same tokens, and what differs is the caches' doing.

Of each step: the Kullback-Leibler divergence of B's next-token distribution from A's, KL(A || B), in nats; their total \
variation; whether both find the same token most likely; and the margin between A's two largest logits. Decisive steps are \
those with a margin above 1, where another choice is no matter of rounding.";

const EXAMPLES: &str = "\
Examples:
  ferrokv compare --kv dense,certified --json compare.json
  ferrokv compare --kv certified,certified:strict --context 4096 --windows 8 --plot compare
  ferrokv compare --kv dense,int8-int4 --text moby-dick --backend cuda";

/// How many points a curve has, at most.
const POINTS: usize = 64;

/// Compare two KV schemes on the same text, step by step.
#[derive(clap::Args)]
#[command(long_about = LONG, after_long_help = EXAMPLES)]
pub struct Arguments {
    #[arg(long, value_name = "A,B", value_delimiter = ',', default_value = "dense,certified")]
    #[arg(help = scheme::short("The two schemes"))]
    #[arg(long_help = scheme::long("The two schemes"))]
    kv: Vec<String>,
    /// Tokens of a window; its second half is decoded.
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(16..))]
    context: u32,
    /// Windows, evenly spread over the text.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=10_000))]
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
    kv: &'a [String; 2],
    text: &'a str,
    text_bytes: usize,
    windows: u32,
    context: u32,
}

/// One window.
#[derive(Debug, Serialize, Deserialize)]
struct Trial {
    /// Its number, and the byte of the text where it starts.
    window: usize,
    start: usize,
    seconds: f64,
    /// A value a step.
    #[serde(flatten)]
    steps: Compared,
}

#[derive(Serialize)]
struct Json {
    bootstrap_seed: u64,
    bootstrap_resamples: usize,
    #[serde(flatten)]
    summary: Summary,
}

/// Runs the command.
///
/// # Errors
/// Bad input, what the device reports, or Ctrl-C.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let [first, second] = &scheme::each_once(&arguments.kv)?[..] else {
        return Err(Error::NotTwo { found: arguments.kv.join(",") }.into());
    };
    let pair = [first, second];
    let picture = arguments.plot.as_deref().map(|prefix| Picture::new(prefix, None)).transpose()?;
    let corpus = corpus(&arguments.text)?;
    let subject = arguments.subject.open()?;
    let tokenizer = subject.tokenizer()?;
    let (context, windows) = (arguments.context as usize, arguments.windows as usize);
    subject.fits(context)?;
    let kv = pair.map(|scheme| scheme.to_string());
    let settings = Settings {
        kv: &kv,
        text: corpus.name(),
        text_bytes: corpus.text().len(),
        windows: arguments.windows,
        context: arguments.context,
    };
    let mut journal: Journal<Trial> = arguments.journal.open("compare", &subject, settings)?;
    let summary = |trials: &[Trial]| Json {
        bootstrap_seed: arguments.seed,
        bootstrap_resamples: statistics::RESAMPLES,
        summary: compare::summarize(trials.iter().map(|trial| &trial.steps), arguments.seed),
    };

    let behind = tokenizer.bos().map_or(0, |_| 1);
    let plan = corpus.windows(tokenizer, context - behind, windows)?;
    let watcher = Watcher::new(windows * compare::work(context))?;
    let mut runner = subject.runner()?;
    for (number, window) in plan.iter().enumerate() {
        if journal.has(|trial| trial.window == number) {
            watcher.skip(compare::work(context));
            continue;
        }
        watcher.say(format!("window {} of {windows}", number + 1));
        let begun = Instant::now();
        let tokens = behind_bos(tokenizer, &window.tokens);
        let (mut first, mut second) = (subject.cache(pair[0], context)?, subject.cache(pair[1], context)?);
        let caches: [&mut dyn KvCache; 2] = [&mut *first, &mut *second];
        match compare::compare(&mut runner, caches, &tokens, &mut |work| watcher.hear(work)) {
            Ok(steps) => {
                let seconds = begun.elapsed().as_secs_f64();
                journal.push(Trial { window: number, start: window.start, seconds, steps }, summary)?;
            }
            Err(error) => {
                watcher.end();
                return Err(journal.ended_early(error.into(), windows, &summary(journal.trials())));
            }
        }
    }
    watcher.end();
    let json = summary(journal.trials());
    if let Some(picture) = &picture {
        let title = format!("{}, {}: {} against {}", subject.model.config.name, corpus.name(), kv[1], kv[0]);
        picture.write(&chart(title, journal.trials()))?;
    }
    let head = format!("{} over {}, on {}", subject.model.config.name, corpus.name(), journal.machine());
    journal.finish(&render(&head, &kv, &json), &json)
}

fn render(head: &str, kv: &[String; 2], json: &Json) -> String {
    let Json { bootstrap_seed, bootstrap_resamples, summary } = json;
    let [a, b] = kv;
    let mut table = Table::new(&[("", Align::Left), ("", Align::Right), ("95 %", Align::Left)]);
    let mut row = |name: &str, value: String, interval: String| table.row([name.to_owned(), value, interval]);
    let none = String::new;
    row(
        "KL, mean (nats a step)",
        text::error(summary.kl),
        summary
            .kl_interval
            .map_or_else(none, |i| format!("[{}, {}]", text::error(i.low), text::error(i.high))),
    );
    row("KL, median", text::error(summary.kl_median), none());
    row("KL, 99 % quantile", text::error(summary.kl_99), none());
    row("KL, largest", text::error(summary.kl_max), none());
    row("total variation, mean", text::error(summary.tv), none());
    row("total variation, largest", text::error(summary.tv_max), none());
    for (name, agreement) in
        [("same most likely token", summary.all), ("  of decisive steps", summary.decisive)]
    {
        let Agreement { steps, agree, share, interval } = agreement;
        if steps > 0 {
            let of = format!(
                "{} of {}: {:.2} %",
                text::count(agree as u64),
                text::count(steps as u64),
                100.0 * share
            );
            row(name, of, format!("[{:.2}, {:.2}] %", 100.0 * interval.low, 100.0 * interval.high));
        }
    }
    row(&format!("perplexity, {a}"), format!("{:.3}", summary.perplexity[0]), none());
    row(&format!("perplexity, {b}"), format!("{:.3}", summary.perplexity[1]), none());
    row("ΔNLL (nats a token)", format!("{:+.5}", summary.delta), signed(summary.delta_interval));
    format!(
        "{b} against {a}: {head}\n\n{}\n{}; KL and ΔNLL: bootstrap over windows ({} resamples, seed {bootstrap_seed}); shares: \
         Wilson.\n",
        table.render(),
        text::plural(summary.windows, "window"),
        text::count(*bootstrap_resamples as u64),
    )
}

/// Means over windows and neighbouring steps, by the number of the step.
fn curve(trials: &[Trial], of: impl Fn(&Compared, usize) -> f64) -> Vec<Point> {
    let steps = trials.iter().map(|trial| trial.steps.kl.len()).min().unwrap_or(0);
    let width = steps.div_ceil(POINTS).max(1);
    let point = |first: usize| {
        let range = first..(first + width).min(steps);
        let values: Vec<f64> =
            trials.iter().flat_map(|trial| range.clone().map(|step| of(&trial.steps, step))).collect();
        let x = (range.start + range.end - 1) as f64 / 2.0 + 1.0;
        Point { x, y: statistics::mean(&values), interval: None }
    };
    (0..steps).step_by(width).map(point).collect()
}

fn chart(title: String, trials: &[Trial]) -> Chart {
    let panel = |y_title: &str, zero, points| Panel {
        x_title: "decoded tokens".into(),
        y_title: y_title.into(),
        labels: Vec::new(),
        logarithmic: false,
        zero,
        lines: vec![Line { name: String::new(), points }],
    };
    let share = |found: &Compared, step: usize| f64::from(u8::from(found.agrees[step]));
    Chart {
        title,
        panels: vec![
            panel("KL, nats a step", Some(0.0), curve(trials, |found, step| found.kl[step])),
            panel(
                "ΔNLL, nats a token",
                Some(0.0),
                curve(trials, |found, step| found.nll[1][step] - found.nll[0][step]),
            ),
            panel("same most likely token", Some(1.0), curve(trials, share)),
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn curves_are_means_of_neighbours() {
        let trial = |shift: f64| Trial {
            window: 0,
            start: 0,
            seconds: 0.0,
            steps: Compared { kl: (0..130).map(|i| f64::from(i) + shift).collect(), ..Compared::default() },
        };
        let points = curve(&[trial(0.0), trial(10.0)], |found, step| found.kl[step]);
        // 130 steps: 43 points of three, and one of the last.
        assert_eq!((points.len(), points[0].x, points[0].y), (44, 2.0, 6.0));
        assert_eq!((points[43].x, points[43].y), (130.0, 134.0));
        assert!(curve(&[], |_, _| 0.0).is_empty());
    }
}
