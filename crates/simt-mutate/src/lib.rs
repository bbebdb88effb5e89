//! Kernels broken on purpose, one place at a time: which of them does no test see?
//!
//! The emulator does the breaking, at run time, by [`simt::emu::MUTATION_VARIABLE`]: no kernel is compiled
//! anew. This crate runs programs of tests with it, each test alone: first to record which places each test
//! reaches, then once for each place and each test that reaches it, until one fails.
#![deny(missing_docs)]

mod run;

use run::{Ended, Test};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Why a search could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A program that cannot be run, or that is no program of tests.
    #[error("{}: {reason}; give programs as `cargo test --no-run` names them", program.display())]
    Program {
        /// The program.
        program: PathBuf,
        /// What went wrong.
        reason: String,
    },
    /// No test is left.
    #[error(
        "no test has `{filter}` in its name and reaches a kernel; {count} have the name, of which {left_out} fail \
         by themselves or take too long"
    )]
    NoTest {
        /// What names are asked to hold.
        filter: String,
        /// How many tests have it.
        count: usize,
        /// How many of them fail unbroken, or take longer than they may.
        left_out: usize,
    },
    /// A file that cannot be written or read.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What went wrong.
        source: std::io::Error,
    },
}

/// What is searched.
#[derive(Clone, Debug, Default)]
pub struct Search {
    /// Programs of tests.
    pub programs: Vec<PathBuf>,
    /// Only tests with this in their name or in that of their program.
    pub test: String,
    /// Only places, or kernels whose handles are exchanged, with this in their name.
    pub place: String,
    /// Only such changes; all, if empty.
    pub changes: Vec<String>,
    /// At most so many places, drawn by the seed.
    pub sample: Option<usize>,
    /// What decides which places are drawn, and in which order they are tried.
    pub seed: u64,
    /// How many tests run at the same time; 0 for one a core.
    pub jobs: usize,
    /// How long the search may take. The places are tried in an order that the seed draws, so those that
    /// were tried are a sample of all.
    pub limit: Option<Duration>,
    /// How long one test may take unbroken; longer ones are left out. 600 s if it says nothing.
    pub longest: Option<Duration>,
    /// An earlier report over the same sources: what was seen there is not tried again, and is in the new
    /// report.
    pub earlier: Option<Report>,
}

/// What came of a broken kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// A test failed.
    Seen,
    /// A test did not end.
    Endless,
    /// All tests that reach it passed.
    Unseen,
}

/// A broken kernel.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Mutant {
    /// What is changed where, as [`simt::emu::MUTATION_VARIABLE`] takes it.
    pub change: String,
    /// What came of it.
    pub outcome: Outcome,
    /// The tests that ran with it; the last one saw it, if one did.
    pub tests: Vec<String>,
}

/// What a search found.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// How many tests reach a kernel.
    pub tests: usize,
    /// Tests that fail by themselves, or for which there was no time.
    pub failing: Vec<String>,
    /// The broken kernels, by their places.
    pub mutants: Vec<Mutant>,
    /// Changes that there was no time to try.
    pub left: Vec<String>,
}

impl Report {
    /// Those that no test saw.
    pub fn unseen(&self) -> impl Iterator<Item = &Mutant> {
        self.mutants.iter().filter(|mutant| mutant.outcome == Outcome::Unseen)
    }

    /// Reads one that was written.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn read(path: &Path) -> Result<Self, Error> {
        let file = |source| Error::File { path: path.into(), source };
        let text = std::fs::read_to_string(path).map_err(file)?;
        serde_json::from_str(&text).map_err(|error| file(error.into()))
    }

    /// Writes it as JSON: beside the file first, then in its place.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        let file = |source| Error::File { path: path.into(), source };
        let text = serde_json::to_string_pretty(self).map_err(|error| file(error.into()))?;
        let beside = path.with_extension("partial");
        std::fs::write(&beside, text + "\n").map_err(file)?;
        std::fs::rename(&beside, path).map_err(file)
    }
}

/// A test that reaches kernels, how long it took, and how it has done in this search.
struct Reaches {
    test: Test,
    took: Duration,
    /// Broken kernels that it ran with.
    ran: AtomicU32,
    /// Those of them that it saw.
    saw: AtomicU32,
}

impl Reaches {
    /// Seconds that it takes to see one, as far as can be told by now. A test that has not run yet counts as
    /// one that sees one of two.
    fn price(&self) -> f64 {
        let count = |count: &AtomicU32| f64::from(count.load(Ordering::Relaxed));
        self.took.as_secs_f64() * (count(&self.ran) + 2.0) / (count(&self.saw) + 1.0)
    }

    /// Notes what came of it.
    fn note(&self, seen: bool) {
        self.ran.fetch_add(1, Ordering::Relaxed);
        self.saw.fetch_add(seen.into(), Ordering::Relaxed);
    }
}

/// Told how far it is: the stage, how many are done, of how many.
pub type Progress<'a> = &'a (dyn Fn(&'static str, usize, usize) + Sync);

impl Search {
    /// Records what each test reaches, then breaks each place in turn.
    ///
    /// # Errors
    /// [`Error`].
    pub fn run(&self, progress: Progress) -> Result<Report, Error> {
        let end = self.limit.and_then(|limit| Instant::now().checked_add(limit));
        let mut tests = Vec::new();
        for program in &self.programs {
            let stem = program.file_stem().unwrap_or_default().to_string_lossy();
            let all = stem.contains(&self.test);
            let tests_of = run::tests_of(program)?;
            tests.extend(tests_of.into_iter().filter(|test| all || test.name.contains(&self.test)));
        }
        let count = tests.len();
        let (reaching, places, failing) = self.record(tests, end, progress)?;
        if reaching.is_empty() {
            return Err(Error::NoTest { filter: self.test.clone(), count, left_out: failing.len() });
        }
        let mut places = self.chosen(places);
        let mut mutants = self.known(&mut places);
        let all = places.len();
        let tried =
            self.parallel(&places, |(change, tests)| try_one(change, tests, &reaching, end), &|done| {
                progress("breaking", done, all);
            });
        let mut left = Vec::new();
        for ((change, _), tried) in places.into_iter().zip(tried) {
            match tried? {
                Some(mutant) => mutants.push(mutant),
                None => left.push(change),
            }
        }
        mutants.sort_by(|a, b| a.change.cmp(&b.change));
        left.sort();
        Ok(Report { tests: reaching.len(), failing, mutants, left })
    }

    /// The tests that reach a kernel and pass, the changes with the tests that reach them, and the tests that
    /// fail by themselves.
    #[allow(clippy::type_complexity)]
    fn record(
        &self,
        tests: Vec<Test>,
        end: Option<Instant>,
        progress: Progress,
    ) -> Result<(Vec<Reaches>, BTreeMap<String, Vec<usize>>, Vec<String>), Error> {
        let all = tests.len();
        let recorded = self.parallel(
            &tests,
            |test| test.record(within(self.longest.unwrap_or(RECORDING), end)),
            &|done| progress("recording", done, all),
        );
        let (mut reaching, mut places, mut failing) =
            (Vec::new(), BTreeMap::<String, Vec<usize>>::new(), Vec::new());
        for (test, recorded) in tests.into_iter().zip(recorded) {
            let recorded = recorded?;
            if recorded.ended != Ended::Passed {
                failing.push(test.name);
            } else if !recorded.changes.is_empty() {
                for change in recorded.changes {
                    places.entry(change).or_default().push(reaching.len());
                }
                reaching.push(Reaches {
                    test,
                    took: recorded.took,
                    ran: AtomicU32::new(0),
                    saw: AtomicU32::new(0),
                });
            }
        }
        Ok((reaching, places, failing))
    }

    fn chosen(&self, places: BTreeMap<String, Vec<usize>>) -> Vec<(String, Vec<usize>)> {
        let wanted = |change: &str| {
            let (what, place) = change.split_once('@').unwrap_or((change, ""));
            let kind = what.split(':').next().unwrap_or(what);
            place.contains(&self.place) && (self.changes.is_empty() || self.changes.iter().any(|c| c == kind))
        };
        let mut chosen: Vec<_> = places.into_iter().filter(|(change, _)| wanted(change)).collect();
        // The hash of a place and the seed decides: more places leave the draw of the others as it is.
        chosen.sort_by_key(|(change, _)| hash(change, self.seed));
        chosen.truncate(self.sample.unwrap_or(usize::MAX));
        chosen
    }

    /// Takes those off that a test of the earlier report has seen, where a place is still there.
    fn known(&self, places: &mut Vec<(String, Vec<usize>)>) -> Vec<Mutant> {
        let earlier = self.earlier.iter().flat_map(|report| &report.mutants);
        let seen = earlier.filter(|mutant| mutant.outcome != Outcome::Unseen);
        let seen: BTreeMap<&str, &Mutant> = seen.map(|mutant| (mutant.change.as_str(), mutant)).collect();
        let mut known = Vec::new();
        places.retain(|(change, _)| match seen.get(change.as_str()) {
            Some(mutant) => {
                known.push((*mutant).clone());
                false
            }
            None => true,
        });
        known
    }

    fn parallel<T: Sync, R: Send>(
        &self,
        items: &[T],
        run: impl Fn(&T) -> R + Sync,
        done: &(dyn Fn(usize) + Sync),
    ) -> Vec<R> {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        let jobs = if self.jobs == 0 { cores } else { self.jobs };
        let (next, finished) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let results: Mutex<Vec<Option<R>>> = Mutex::new(items.iter().map(|_| None).collect());
        std::thread::scope(|scope| {
            for _ in 0..jobs.min(items.len()) {
                scope.spawn(|| {
                    while let Some((at, item)) = {
                        let at = next.fetch_add(1, Ordering::SeqCst);
                        items.get(at).map(|item| (at, item))
                    } {
                        let result = run(item);
                        results.lock().unwrap_or_else(PoisonError::into_inner)[at] = Some(result);
                        done(finished.fetch_add(1, Ordering::SeqCst) + 1);
                    }
                });
            }
        });
        results.into_inner().unwrap_or_else(PoisonError::into_inner).into_iter().flatten().collect()
    }
}

/// How long one test may take unbroken, if nothing is said.
const RECORDING: Duration = Duration::from_secs(600);

/// So long, or until the end.
fn within(limit: Duration, end: Option<Instant>) -> Duration {
    end.map_or(limit, |end| limit.min(end.saturating_duration_since(Instant::now())))
}

/// The test first that is likely to see it soonest, until one fails; nothing if the end comes first.
fn try_one(
    change: &str,
    tests: &[usize],
    reaching: &[Reaches],
    end: Option<Instant>,
) -> Result<Option<Mutant>, Error> {
    let over = || end.is_some_and(|end| Instant::now() >= end);
    let mut order: Vec<&Reaches> = tests.iter().map(|at| &reaching[*at]).collect();
    // Prices change meanwhile, so each is asked for once; bits of positive floats order like the floats.
    order.sort_by_cached_key(|reaches| reaches.price().to_bits());
    let mut ran = Vec::new();
    for reaches in order {
        let Reaches { test, took, .. } = reaches;
        if over() {
            return Ok(None);
        }
        ran.push(test.name.clone());
        // A broken kernel may wait for what never comes; the emulator names most of such waits by itself.
        let outcome = match test.with(change, within(*took * 10 + Duration::from_secs(30), end))? {
            Ended::Passed => {
                reaches.note(false);
                continue;
            }
            Ended::Failed => Outcome::Seen,
            Ended::Stopped if over() => return Ok(None),
            Ended::Stopped => Outcome::Endless,
        };
        reaches.note(true);
        return Ok(Some(Mutant { change: change.into(), outcome, tests: ran }));
    }
    Ok(Some(Mutant { change: change.into(), outcome: Outcome::Unseen, tests: ran }))
}

/// FNV-1a of the text and the seed.
fn hash(text: &str, seed: u64) -> u64 {
    let bytes = text.bytes().chain(seed.to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}
