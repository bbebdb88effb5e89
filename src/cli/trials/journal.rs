//! The record of a run that may be interrupted: each trial is kept as it is done, and a later run with the
//! same file goes on.

use crate::cli::environment::Environment;
use crate::cli::failure::Failure;
use crate::cli::output::{Report, ReportArguments};
use crate::cli::subject::Subject;
use host::eval;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Time between two writes of the file.
const PAUSE: Duration = Duration::from_secs(10);

/// The options of a record.
#[derive(clap::Args)]
pub struct JournalArguments {
    #[command(flatten)]
    report: ReportArguments,
    /// Measure everything again, in place of going on from the trials that the --json file has.
    #[arg(long)]
    fresh: bool,
}

/// One measurement of one scheme.
pub trait Trial: Serialize + DeserializeOwned {}

impl<T: Serialize + DeserializeOwned> Trial for T {}

/// What all trials of a record have in common: with other settings they could not stand beside each other.
#[derive(Serialize)]
pub struct Settings<'a, S> {
    version: &'static str,
    /// Digits that change with the kernels.
    ptx: &'static str,
    /// Whose they are.
    codegen: &'static str,
    model: &'a str,
    model_bytes: u64,
    device: &'a str,
    #[serde(flatten)]
    more: S,
}

#[derive(Serialize)]
struct Json<'a, T, U> {
    command: &'static str,
    settings: &'a Value,
    environment: &'a Environment,
    /// Why there was no GPU.
    gpu_note: Option<&'a str>,
    /// Whether every trial is there that was asked for.
    complete: bool,
    /// Of all runs that added trials.
    seconds: f64,
    trials: &'a [T],
    summary: U,
}

/// What is read of an earlier record.
#[derive(Deserialize)]
struct Earlier<T> {
    settings: Value,
    seconds: f64,
    trials: Vec<T>,
}

/// Why a record cannot be continued.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file is something else.
    #[error("{} is no record of `ferrokv {command}`: {reason}; give another file, or --fresh to replace it", path.display())]
    Other {
        /// The file.
        path: PathBuf,
        /// What it should be.
        command: &'static str,
        /// What it is.
        reason: String,
    },
    /// The trials were made otherwise.
    #[error(
        "{} has trials with {name} {found}, and this run has {wanted}; give another file, or --fresh to replace it",
        path.display()
    )]
    Settings {
        /// The file.
        path: PathBuf,
        /// What differs.
        name: String,
        /// Its value there.
        found: String,
        /// Its value here.
        wanted: String,
    },
}

/// A record under construction.
pub struct Journal<'a, T> {
    command: &'static str,
    settings: Value,
    environment: Environment,
    gpu_note: Option<&'a str>,
    trials: Vec<T>,
    /// Of earlier runs.
    seconds: f64,
    start: Instant,
    report: Report,
    path: Option<PathBuf>,
    /// When the file was last written.
    saved: Option<Instant>,
}

impl JournalArguments {
    /// Starts a record, or goes on with the one that the file holds.
    ///
    /// # Errors
    /// A path that cannot be written; a file that holds something else, or trials made with other settings.
    pub fn open<'a, T: Trial>(
        &self,
        command: &'static str,
        subject: &'a Subject,
        settings: impl Serialize,
    ) -> Result<Journal<'a, T>, Failure> {
        let report = self.report.open(Some(&subject.path), None)?;
        let path = self.report.file().map(Path::to_owned);
        let settings = Settings {
            version: env!("CARGO_PKG_VERSION"),
            ptx: subject.kernels.fingerprint,
            codegen: subject.kernels.name,
            model: &subject.model.config.name,
            model_bytes: fs::metadata(&subject.path).map_or(0, |file| file.len()),
            device: subject.device_name(),
            more: settings,
        };
        // Only strings are keys, and no number is anything but finite.
        let settings = serde_json::to_value(settings).unwrap_or_default();
        let earlier = match path.as_deref().filter(|path| !self.fresh && path.exists()) {
            Some(path) => Some(read(path, command, &settings).map_err(super::Error::from)?),
            None => None,
        };
        let (seconds, trials) = earlier.unwrap_or_default();
        Ok(Journal {
            command,
            settings,
            environment: Environment::here(subject.gpu(), subject.kernels, None),
            gpu_note: subject.gpu_note.as_deref(),
            trials,
            seconds,
            start: Instant::now(),
            report,
            path,
            saved: None,
        })
    }
}

/// Seconds and trials of an earlier record.
fn read<T: Trial>(path: &Path, command: &'static str, settings: &Value) -> Result<(f64, Vec<T>), Error> {
    let other = |reason: String| Error::Other { path: path.to_owned(), command, reason };
    let text = fs::read_to_string(path).map_err(|error| other(error.to_string()))?;
    let earlier: Value = serde_json::from_str(&text).map_err(|error| other(error.to_string()))?;
    let found = earlier.get("command").and_then(Value::as_str).unwrap_or("something else");
    if found != command {
        return Err(other(format!("it is of `{found}`")));
    }
    let mut earlier: Earlier<T> =
        serde_json::from_value(earlier).map_err(|error| other(error.to_string()))?;
    // Records of programs with one code generator do not name it.
    if let Some(settings) = earlier.settings.as_object_mut() {
        settings.entry("codegen").or_insert_with(|| "llvm".into());
    }
    let none = serde_json::Map::new();
    let [there, here] = [&earlier.settings, settings].map(|value| value.as_object().unwrap_or(&none));
    for name in here.keys().chain(there.keys()) {
        let [found, wanted] = [there, here].map(|settings| settings.get(name).unwrap_or(&Value::Null));
        if found != wanted {
            let (found, wanted) = (found.to_string(), wanted.to_string());
            return Err(Error::Settings { path: path.to_owned(), name: name.clone(), found, wanted });
        }
    }
    Ok((earlier.seconds, earlier.trials))
}

impl<T: Trial> Journal<'_, T> {
    /// All trials so far, those of earlier runs first.
    pub fn trials(&self) -> &[T] {
        &self.trials
    }

    /// Whether there is such a trial.
    pub fn has(&self, wanted: impl Fn(&T) -> bool) -> bool {
        self.trials.iter().any(wanted)
    }

    /// The machine in a line.
    pub fn machine(&self) -> String {
        self.environment.line()
    }

    /// Adds a trial. The first one and then one now and then goes to the file, with those before it.
    ///
    /// # Errors
    /// What cannot be written.
    pub fn push<U: Serialize>(&mut self, trial: T, summary: impl Fn(&[T]) -> U) -> Result<(), Failure> {
        self.trials.push(trial);
        if self.saved.is_none_or(|saved| saved.elapsed() >= PAUSE) {
            self.save(false, &summary(&self.trials))?;
            self.saved = Some(Instant::now());
        }
        Ok(())
    }

    /// Writes the file, if there is one.
    fn save(&self, complete: bool, summary: &impl Serialize) -> Result<(), Failure> {
        self.report.save(&self.json(complete, summary))
    }

    /// Prints the tables and writes the report.
    ///
    /// # Errors
    /// What cannot be written.
    pub fn finish(&self, tables: &str, summary: &impl Serialize) -> Result<(), Failure> {
        self.report.finish(tables, &self.json(true, summary))
    }

    /// What to say of a run that ended before all of its trials, of which the file gets those there are.
    pub fn ended_early(&self, error: Failure, of: usize, summary: &impl Serialize) -> Failure {
        if let Err(error) = self.save(false, summary) {
            return error;
        }
        if !matches!(error, Failure::Measure(eval::Error::Stopped)) {
            return error;
        }
        let done = self.trials.len();
        let kept = match &self.path {
            Some(path) => format!("{} has them, and the same command goes on from there", path.display()),
            None => "with --json FILE they would have been kept".into(),
        };
        super::Error::Interrupted(format!("interrupted with {done} of {of} trials done; {kept}")).into()
    }

    fn json<'b, U: Serialize>(&'b self, complete: bool, summary: &'b U) -> Json<'b, T, &'b U> {
        Json {
            command: self.command,
            settings: &self.settings,
            environment: &self.environment,
            gpu_note: self.gpu_note,
            complete,
            seconds: self.seconds + self.start.elapsed().as_secs_f64(),
            trials: &self.trials,
            summary,
        }
    }
}
