//! Files that schemes need and were not given, made up for a model of random weights: no run of it has a text
//! that a file could be made from, and how fast a step is follows from the file's size.

use crate::cli::failure::{CommandError, Failure};
use crate::cli::text;
use host::kv::Selection;
use host::model::forward::Runner;
use host::tensor_file::Target;
use serde::Serialize;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;
use tempfile::TempDir;

/// Tokens of keys and values that a file is made from.
const TOKENS: usize = 256;

/// A file that was made up.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MadeUp {
    /// The scheme's calibration with its settings.
    pub settings: String,
    /// The option that such a file is given by.
    pub option: &'static str,
    /// What it was made from.
    pub from: String,
    /// Of its tensors.
    pub bytes: usize,
    /// What making it took.
    pub seconds: f64,
}

/// The files of one run, which go with it.
#[derive(Debug, Default)]
pub struct Files {
    /// Made with the first file.
    folder: Option<TempDir>,
    made: Vec<(MadeUp, PathBuf)>,
}

/// The folder for them cannot be made.
#[derive(Debug, thiserror::Error)]
#[error("no folder for files that are made up: {0}; set TMPDIR to one that can be written")]
struct NoFolder(std::io::Error);

impl CommandError for NoFolder {}

impl Files {
    /// The selection with the file that it lacks, and which option that is; as it is if it lacks none.
    ///
    /// Keys are multiplied by `key_scale`, as those are that fill the caches. `fingerprint` is the model's,
    /// which a cache compares.
    ///
    /// # Errors
    /// What the scheme says of the model's heads; no folder for temporary files; what cannot be written.
    pub fn complete(
        &mut self,
        selection: &Selection,
        runner: &Runner,
        fingerprint: &str,
        key_scale: f32,
    ) -> Result<(Selection, Option<&'static str>), Failure> {
        let Some(calibration) = selection.calibration()? else { return Ok((selection.clone(), None)) };
        let settings = calibration.to_string();
        let at = match self.made.iter().position(|(made, _)| made.settings == settings) {
            Some(at) => at,
            None => {
                self.make(&calibration, runner, fingerprint, key_scale)?;
                self.made.len() - 1
            }
        };
        let (made, path) = &self.made[at];
        Ok((selection.with_artifact(path)?, Some(made.option)))
    }

    fn make(
        &mut self,
        calibration: &Selection,
        runner: &Runner,
        fingerprint: &str,
        key_scale: f32,
    ) -> Result<(), Failure> {
        let start = Instant::now();
        let material = runner.filling(TOKENS, key_scale);
        let mut artifact = calibration.calibrate(&material, &|_, _| ControlFlow::Continue(()))?;
        let from = format!("random keys and values of {}", text::plural(TOKENS, "token"));
        artifact.say("model_hash", fingerprint);
        artifact.say("text", format!("none: {from}"));
        artifact.say("made_by", "ferrokv bench model");
        let folder = match &mut self.folder {
            Some(folder) => folder,
            folder => folder.insert(tempfile::tempdir().map_err(NoFolder)?),
        };
        let path = folder.path().join(format!("{}.safetensors", self.made.len()));
        artifact.write(Target::new(&path, true, None)?)?;
        let made = MadeUp {
            settings: calibration.to_string(),
            option: calibration.scheme().calibrate.as_ref().map_or("", |calibrator| calibrator.artifact),
            from,
            bytes: artifact.bytes(),
            seconds: start.elapsed().as_secs_f64(),
        };
        self.made.push((made, path));
        Ok(())
    }

    /// What was made up so far.
    pub fn made(&self) -> impl Iterator<Item = &MadeUp> {
        self.made.iter().map(|(made, _)| made)
    }
}

/// A line for each file, below the tables.
pub fn lines<'a>(made: impl Iterator<Item = &'a MadeUp>) -> String {
    let line = |made: &MadeUp| {
        let MadeUp { settings, option, from, seconds, .. } = made;
        let took = text::seconds(*seconds);
        format!(
            "made up: {option} of {settings}, from {from}, in {took}; speed follows, what is lost does not\n"
        )
    };
    made.map(line).collect()
}
