//! `ferrokv calibrate`: the file that a KV scheme needs, made from a real run.

use super::failure::Failure;
use super::output::ReportArguments;
use super::picture::Sheet;
use super::scheme;
use super::squares::Squares;
use super::subject::{Subject, SubjectArguments, behind_bos, corpus};
use super::text;
use super::trials::{Error, Watcher};
use host::eval::capture::Capture;
use host::eval::{self, Decoder};
use host::kv::calibration::{Artifact, Material, Passed};
use host::kv::{self, Selection};
use host::model::fetched;
use host::model::forward::Error as ForwardError;
use host::tensor_file::Target;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

const LONG: &str = "\
Make the file that a KV scheme needs for a model: codebooks, allocations, or whatever it is that the scheme finds out once. \
The model reads windows of a text, evenly spread over it, over a cache in f16; keys and values of all layers (after RoPE) are \
what the scheme works on. The file names the scheme with its settings, the model with a hash of its norms, layers and heads, the text and a hash \
of its tokens; opening a cache compares scheme, settings and model.

The file's bytes follow from model, text and options alone; on a GPU, whose keys may differ in their last bits, they may be \
others than with --backend cpu.

Evaluate on another text than the one that was calibrated on.

Exit codes: 0 done; 2 bad input; 130 interrupted, with nothing written.";

/// Make the file that a KV scheme needs for a model.
#[derive(clap::Args)]
#[command(long_about = LONG)]
pub struct Arguments {
    #[arg(long, value_name = "SCHEME")]
    #[arg(help = scheme::calibrated_short(), long_help = scheme::calibrated_long())]
    scheme: String,
    /// The file to write.
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Draw what the file decides, for a scheme that has a picture of it; SVG or PNG, by the name.
    ///
    /// Of gtq-blocks: which bits each rotary block of a key gets, by layer and KV head. A picture that is
    /// there is replaced.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Replace the output if it exists.
    #[arg(long)]
    force: bool,
    /// The text: sotu or moby-dick, which ./setup --model fetched, or a file.
    #[arg(long, value_name = "NAME|FILE", default_value = "moby-dick")]
    text: String,
    /// Windows of the text.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=65536))]
    windows: u32,
    /// Tokens of a window: best as many as the contexts that the file is for.
    ///
    /// Keys turn with their positions: what a short window has seen of them is not what a longer context
    /// has.
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
    #[command(flatten)]
    subject: SubjectArguments,
    #[command(flatten)]
    report: ReportArguments,
}

#[derive(Serialize)]
struct Json<'a> {
    command: &'static str,
    version: &'static str,
    model: &'a str,
    device: &'a str,
    gpu_note: Option<&'a str>,
    scheme: &'a str,
    text: &'a str,
    windows: u32,
    tokens: usize,
    bytes: usize,
    metadata: &'a std::collections::BTreeMap<String, String>,
}

/// What passed through a model, and what identifies the text.
struct Read {
    material: Material,
    text: String,
    /// FNV-1a of the tokens' numbers, 64 bits.
    hash: u64,
}

/// Runs the command.
///
/// # Errors
/// Bad input, what the device reports, what cannot be written, or Ctrl-C.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let selection = Selection::for_calibration(&arguments.scheme, host::schemes())?;
    let path = arguments.subject.path()?;
    // Neither what is read is written over.
    if !fetched::TEXTS.contains(&arguments.text.as_str()) {
        Target::new(&arguments.output, arguments.force, Some(Path::new(&arguments.text)))?;
    }
    let target = Target::new(&arguments.output, arguments.force, Some(&path))?;
    let sheet = sheet(&selection, arguments, &path)?;
    let report = arguments.report.open(Some(&path), Some(&arguments.output))?;
    let subject = arguments.subject.open()?;
    let work = arguments.tokens as usize * arguments.windows as usize;
    // As much again for making it.
    let watcher = Watcher::new(2 * work)?;
    let done = read(&subject, &selection, arguments, &watcher)
        .and_then(|read| Ok((make(&selection, &read.material, work, &watcher)?, read)));
    watcher.end();
    let (mut artifact, read) = done?;
    artifact.say("model", &subject.model.config.name);
    artifact.say("model_hash", subject.model.fingerprint());
    artifact.say("text", &read.text);
    artifact.say("text_hash", format!("{:016x}", read.hash));
    artifact.say("made_by", "ferrokv calibrate");
    artifact.write(target)?;
    if let (Some(sheet), Some(chart)) = (sheet, &artifact.chart) {
        sheet.write(&Squares(chart))?;
    }
    let scheme = selection.to_string();
    let json = Json {
        command: "calibrate",
        version: env!("CARGO_PKG_VERSION"),
        model: &subject.model.config.name,
        device: subject.device_name(),
        gpu_note: subject.gpu_note.as_deref(),
        scheme: &scheme,
        text: &read.text,
        windows: arguments.windows,
        tokens: read.material.tokens(),
        bytes: artifact.bytes(),
        metadata: &artifact.metadata,
    };
    report.finish(&render(&json, &arguments.output.display().to_string()), &json)
}

/// The picture's file, if one is wanted.
fn sheet(selection: &Selection, arguments: &Arguments, model: &Path) -> Result<Option<Sheet>, Failure> {
    let Some(plot) = &arguments.plot else { return Ok(None) };
    let scheme = selection.scheme();
    if !scheme.calibrate.as_ref().is_some_and(|calibrator| calibrator.chart) {
        return Err(Failure::NoPicture { scheme: scheme.name });
    }
    // Files that are not there yet have no canonical path.
    let same = |other: &Path| std::path::absolute(plot).ok() == std::path::absolute(other).ok();
    for (what, other) in [("the output", Some(&*arguments.output)), ("the report", arguments.report.file())] {
        if other.is_some_and(same) {
            return Err(Failure::SamePath { what, path: plot.display().to_string() });
        }
    }
    let inputs = [model.to_owned(), arguments.text.clone().into(), arguments.output.clone()];
    Ok(Some(Sheet::new(plot, &inputs)?))
}

/// Has the model read the windows.
fn read(
    subject: &Subject,
    selection: &Selection,
    arguments: &Arguments,
    watcher: &Watcher,
) -> Result<Read, Failure> {
    let tokenizer = subject.tokenizer()?;
    let (count, windows) = (arguments.tokens as usize, arguments.windows as usize);
    subject.fits(count)?;
    let corpus = corpus(&arguments.text)?;
    let behind = tokenizer.bos().map_or(0, |_| 1);
    let cut = corpus.windows(tokenizer, count.saturating_sub(behind).max(1), windows)?;
    let dense = scheme::one(scheme::DENSE)?;
    let layers: Vec<usize> = (0..subject.model.config.layers).collect();
    let queries = selection.scheme().calibrate.as_ref().is_some_and(|calibrator| calibrator.queries);
    let mut runner = subject.runner()?;
    let geometry = (&subject.model.config).into();
    let rope = Some((&subject.model.config).into());
    let layers_of = vec![Passed::default(); layers.len()];
    let mut material = Material { geometry, rope, layers: layers_of, fronts: Vec::new() };
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    watcher.say("reading".into());
    for window in &cut {
        let mut tokens = behind_bos(tokenizer, &window.tokens);
        tokens.truncate(count);
        material.fronts.push(material.tokens());
        for byte in tokens.iter().flat_map(|token| token.to_le_bytes()) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        let mut inner = subject.cache(&dense, count)?;
        let first_query = if queries { 0 } else { count };
        let mut cache = Capture::new(&mut *inner, &layers, first_query).map_err(ForwardError::from)?;
        let mut watch = |work| watcher.hear(work);
        let mut decoder = Decoder::new(&mut runner, &mut cache, &mut watch);
        match decoder.read(&tokens).and_then(|()| decoder.finish()) {
            Ok(_) => {}
            Err(eval::Error::Stopped) => return Err(interrupted()),
            Err(error) => return Err(error.into()),
        }
        for (passed, captured) in material.layers.iter_mut().zip(cache.into_layers()) {
            passed.keys.extend_from_slice(&captured.keys);
            passed.values.extend_from_slice(&captured.values);
            passed.queries.extend_from_slice(&captured.queries);
        }
    }
    let plural = text::plural(windows, "window");
    let text = format!("{}, {plural} of {}", corpus.name(), text::plural(count, "token"));
    Ok(Read { material, text, hash })
}

/// Has the scheme make its artifact, which counts as so much work.
fn make(
    selection: &Selection,
    material: &Material,
    work: usize,
    watcher: &Watcher,
) -> Result<Artifact, Failure> {
    watcher.say(format!("making what {} needs", selection.scheme().name));
    let shown = AtomicUsize::new(0);
    let made = selection.calibrate(material, &|done, of| {
        let now = work * done.min(of) / of.max(1);
        let before = shown.fetch_max(now, Ordering::Relaxed);
        watcher.hear(now.saturating_sub(before))
    });
    match made {
        Err(kv::Error::Stopped) => Err(interrupted()),
        made => Ok(made?),
    }
}

fn interrupted() -> Failure {
    Error::Interrupted("interrupted; nothing was written".into()).into()
}

fn render(json: &Json, path: &str) -> String {
    let mut out = format!(
        "{path}: {} for {} by {}, {}\n\n",
        json.scheme,
        json.model,
        json.text,
        text::bytes(json.bytes as u64)
    );
    for (name, value) in json.metadata {
        out += &format!("{name:<16} {value}\n");
    }
    out
}
