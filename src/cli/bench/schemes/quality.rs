//! What a model's text loses over each scheme, beside the dense cache on the same windows.

use super::report::{OfText, Row, Window};
use super::{Arguments, Error, Only};
use crate::cli::bench::record::Skipped;
use crate::cli::failure::Failure;
use crate::cli::scheme;
use crate::cli::subject::{Subject, behind_bos, corpus};
use crate::cli::trials::Watcher;
use host::Device;
use host::eval::compare::{self, Beside, Compared};
use host::eval::{self, perplexity, statistics};
use host::kv::{KvCache, Selection};
use host::model::text::Corpus;
use host::model::{Error as ModelError, Model};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

/// What quality is measured on.
pub struct Text {
    /// The model's file.
    pub path: PathBuf,
    model: Model,
    corpus: Corpus,
}

/// Model and text; nothing, and a line in `skipped`, if they were not fetched and none is named.
///
/// # Errors
/// What cannot be opened; what was not fetched, if nothing but quality is asked for.
pub fn text(arguments: &Arguments, skipped: &mut Vec<Skipped>) -> Result<Option<Text>, Failure> {
    let open = || -> Result<Text, Failure> {
        let path = arguments.subject.path()?;
        let (model, corpus) = (Model::open(&path)?, corpus(&arguments.text)?);
        Ok(Text { path, model, corpus })
    };
    match open() {
        Ok(text) => Ok(Some(text)),
        Err(Failure::Model(error @ ModelError::NotFetched { .. }))
            if arguments.only != Some(Only::Quality) =>
        {
            skipped.push(Skipped { what: "quality of every scheme".into(), reason: error.to_string() });
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// One of the text's windows: its number, where it starts, its tokens.
type Cut = (usize, usize, Vec<u32>);

/// A model on a device, windows, and the schemes that it has caches of.
pub struct Quality<'a> {
    arguments: &'a Arguments,
    subject: Subject,
    corpus: Corpus,
    windows: Vec<Cut>,
    /// Each with the number of its row; the first is dense.
    schemes: Vec<(usize, &'a Selection)>,
}

impl<'a> Quality<'a> {
    /// Cuts the windows and has every scheme open a cache.
    ///
    /// # Errors
    /// A window that is longer than the model's context or the text; a file that does not go with the model.
    /// What else a scheme says goes into `skipped`.
    pub fn open(
        text: Text,
        arguments: &'a Arguments,
        selections: &'a [Selection],
        (device, gpu_note): (&Device, Option<String>),
        skipped: &mut Vec<Skipped>,
    ) -> Result<Self, Failure> {
        let Text { path, model, corpus } = text;
        let kernels = arguments.subject.kernels()?;
        let subject = Subject { path, model, device: device.clone(), kernels, gpu_note };
        let context = arguments.context as usize;
        subject.fits(context)?;
        let tokenizer = subject.tokenizer()?;
        let behind = tokenizer.bos().map_or(0, |_| 1);
        let cut = corpus.windows(tokenizer, context - behind, arguments.windows as usize)?;
        let cut = cut.into_iter().enumerate();
        let mut windows: Vec<Cut> = cut
            .map(|(number, window)| (number, window.start, behind_bos(tokenizer, &window.tokens)))
            .collect();
        // If time ends, those that were read are spread over the text.
        windows.sort_by_key(|(number, ..)| (*number as u64).reverse_bits());
        let mut schemes = Vec::new();
        for (row, selection) in selections.iter().enumerate() {
            match subject.cache(selection, context) {
                Ok(_) => schemes.push((row, selection)),
                Err(Failure::Scheme(error)) if !scheme::has_file(selection) => skipped
                    .push(Skipped { what: format!("quality of {selection}"), reason: error.to_string() }),
                Err(error) => return Err(error),
            }
        }
        Ok(Quality { arguments, subject, corpus, windows, schemes })
    }

    /// Model and text.
    pub fn about(&self) -> (String, String) {
        (self.subject.model.config.name.clone(), self.corpus.name().to_owned())
    }

    /// Has the model read the windows, one after the other, as long as there is time.
    ///
    /// # Errors
    /// What the device or a scheme reports; Ctrl-C.
    pub fn measure(
        &self,
        begin: Instant,
        rows: &mut [Row],
        skipped: &mut Vec<Skipped>,
    ) -> Result<(), Failure> {
        let (count, context) = (self.windows.len(), self.arguments.context as usize);
        let watcher = Watcher::new(count * self.schemes.len() * perplexity::work(context))?;
        let late = || begin.elapsed().as_secs_f64() > self.arguments.seconds;
        let mut runner = self.subject.runner()?;
        let mut found: Vec<(&Cut, Beside, Vec<Memory>)> = Vec::new();
        let mut longest = 0.0f64;
        for window in &self.windows {
            let start = begin.elapsed().as_secs_f64();
            if start + longest > self.arguments.seconds {
                break;
            }
            watcher.say(format!("window {} of {count}", found.len() + 1));
            let open = |(_, selection): &(usize, &Selection)| self.subject.cache(selection, context);
            let mut caches = self.schemes.iter().map(open).collect::<Result<Vec<_>, _>>()?;
            let Some((first, others)) = caches.split_first_mut() else { break };
            let mut others: Vec<&mut dyn KvCache> =
                others.iter_mut().map(|cache| &mut **cache as &mut dyn KvCache).collect();
            let mut watch = |work| match (watcher.hear(work), late()) {
                (ControlFlow::Continue(()), false) => ControlFlow::Continue(()),
                _ => ControlFlow::Break(()),
            };
            match compare::beside(&mut runner, &mut **first, &mut others, &window.2, &mut watch) {
                Ok(beside) => {
                    let memory = caches.iter().map(|cache| Memory::of(&**cache)).collect();
                    found.push((window, beside, memory));
                }
                Err(eval::Error::Stopped) if late() => break,
                Err(error) => {
                    watcher.end();
                    return Err(match error {
                        eval::Error::Stopped => Error::Interrupted.into(),
                        error => error.into(),
                    });
                }
            }
            longest = longest.max(begin.elapsed().as_secs_f64() - start);
        }
        watcher.end();
        if found.len() < count {
            let what = format!("quality in {} of {count} windows", count - found.len());
            skipped.push(Skipped {
                what,
                reason: format!("no time left (--seconds {})", self.arguments.seconds),
            });
        }
        if !found.is_empty() {
            found.sort_by_key(|((number, ..), ..)| *number);
            for (place, (row, _)) in self.schemes.iter().enumerate() {
                rows[*row].quality = Some(self.of_text(&found, place));
            }
        }
        Ok(())
    }

    /// What windows say of the scheme at `place`, dense at 0.
    fn of_text(&self, found: &[(&Cut, Beside, Vec<Memory>)], place: usize) -> OfText {
        let of = |beside: &Beside| place.checked_sub(1).map(|other| beside.others[other].clone());
        let windows = found.iter().map(|((number, start, _), beside, _)| {
            let other = of(beside);
            let nll = other.as_ref().map_or(&beside.first.nll, |other| &other.nll[1]);
            Window {
                window: *number,
                start: *start,
                nll: statistics::mean(nll),
                kl: other.as_ref().map(|other| statistics::mean(&other.kl)),
            }
        });
        let windows: Vec<Window> = windows.collect();
        let others: Vec<Compared> = found.iter().filter_map(|(_, beside, _)| of(beside)).collect();
        let reports = found.iter().filter_map(|(_, beside, _)| match of(beside) {
            Some(other) => other.report[1],
            None => beside.first.report,
        });
        let nll = statistics::mean(&windows.iter().map(|window| window.nll).collect::<Vec<_>>());
        let Memory { all, step } = found[0].2[place];
        OfText {
            context: self.arguments.context,
            head_dim: self.subject.model.config.head_dim as u32,
            decoded: found[0].1.first.nll.len(),
            nll,
            perplexity: nll.exp(),
            beside: (place > 0).then(|| compare::summarize(others.iter(), self.arguments.seed)),
            token_bytes: all,
            step_bytes: step,
            report: reports.reduce(host::kv::Summary::and),
            windows,
        }
    }
}

/// Bytes of a token and KV head at the end of a window.
#[derive(Clone, Copy)]
struct Memory {
    all: f64,
    step: f64,
}

impl Memory {
    fn of(cache: &dyn KvCache) -> Self {
        let geometry = cache.geometry();
        let rows = (cache.tokens() * geometry.layers * geometry.kv_heads) as f64;
        let all = cache.bytes() + cache.host_bytes();
        Memory { all: all as f64 / rows, step: cache.step_bytes() as f64 / rows }
    }
}
