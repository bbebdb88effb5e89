//! `ferrokv diagnose`: what codes of a captured cache's keys and values do to its attention, scheme by
//! scheme.

mod measure;
mod picture;
mod report;

use super::captured::Facts;
use super::environment::Environment;
use super::failure::{CommandError, Failure};
use super::layers::{self, Layer};
use super::output::ReportArguments;
use super::picture::Picture;
use super::{progress, scheme};
use host::eval::references::{self, REFERENCES};
use host::eval::statistics;
use host::int8::file::Dtype;
use host::kv::Selection;
use host::tensor_file::TensorFile;
use std::path::PathBuf;

const LONG: &str = "\
Put the keys and values of a captured cache through KV schemes, and measure what their codes do to the attention of its \
queries, with no model in the loop: a table with a row a scheme, by the bytes that a key takes.

Of each chosen query token and head, against keys and values as they were:
  error    mean over the keys that it sees of |q.k - q.k^|, not divided by the root of head_dim
  at 50    the same with the query turned by RoPE to 50 distances from each key, from -1024 to 1024; of codes alone
  KL       divergence of the softmax over the codes from the exact one, nats; keys alone
  top 10   how many of the ten heaviest tokens are among the ten heaviest over the codes; of equals the first
  output   distance of the output over codes of keys and values from the exact one, over its norm
  values   the same of codes of values alone, under exact weights
Means over layers, heads and queries, each with a 95 % bootstrap interval over (head, query) pairs: how far other queries of \
this text would move it, not another text.

Bytes are those of a KV head's token with all that belongs to it, on average over the captured tokens: tokens that a scheme \
keeps as they were count in f16, and have no error. Compare rows of equal bytes.

Besides schemes there are references: published quantizers without kernels. All of it runs on the CPU.

A file that a scheme was given (codebooks, an order) must be for the model that was captured, and should be of another text. \
Schemes whose steps read originals are refused: `ferrokv attend` shows what they do.

Exit codes: 0 done; 2 bad input.";

const EXAMPLES: &str = "\
Examples:
  ferrokv diagnose assets/kv-smollm2.safetensors
  ferrokv diagnose assets/kv-smollm2.safetensors --kv gtq,gtq/k=2,kivi/k=2 --by-layer --plot codes      writes codes.svg, .png
  ferrokv capture -o kv.safetensors --layers 2,10,17,26 --tokens 8000 --queries 64
  ferrokv calibrate --scheme gtq-blocks -o order.safetensors
  ferrokv diagnose kv.safetensors --kv gtq,gtq-blocks/order=order.safetensors --json codes.json
  ferrokv capture -o other.safetensors --layers 2,10,17,26 --text moby-dick --tokens 2048 --queries 2048
  ferrokv diagnose kv.safetensors --kv block-gtq/k=3/from=other.safetensors,kivi-paper/k=3,kivi-scale/k=4";

/// What codes of a captured cache do to logits, softmax and output, by bytes.
#[derive(clap::Args)]
#[command(long_about = LONG, after_long_help = EXAMPLES)]
pub struct Arguments {
    /// The captured cache: a safetensors file of `ferrokv capture`.
    file: PathBuf,
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    #[arg(default_value = "int8-int4,gtq/k=4/v=4,gtq,gtq/k=2/v=2,kivi-paper/k=4,kivi-paper/k=2")]
    #[arg(help = short(), long_help = long())]
    kv: Vec<String>,
    /// Only these layers, by number and separated by commas.
    #[arg(long, value_name = "N", value_delimiter = ',')]
    layers: Vec<u32>,
    /// How many query tokens of each layer, evenly spread over the file's; 1 is the last.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..))]
    queries: u16,
    /// Show a row for each layer besides that for all.
    #[arg(long)]
    by_layer: bool,
    /// Which resamples the intervals are of.
    #[arg(long, value_name = "S", default_value_t = statistics::SEED)]
    seed: u64,
    /// Draw error and divergence by bytes into PREFIX.svg and PREFIX.png (replaced if they exist).
    #[arg(long, value_name = "PREFIX")]
    plot: Option<PathBuf>,
    /// The program's commit, for the report.
    #[arg(long, value_name = "HASH")]
    commit: Option<String>,
    #[command(flatten)]
    report: ReportArguments,
}

fn short() -> String {
    format!("{}; references: {}", scheme::short("Schemes"), scheme::names(REFERENCES.iter()))
}

fn long() -> String {
    let mut out = scheme::long("Schemes");
    out += "\nReferences, without kernels:\n";
    scheme::list(&mut out, REFERENCES.iter());
    out
}

/// Why a cache cannot be diagnosed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Numbers that schemes do not take.
    #[error("{layer} of {path} holds {dtype}, and codes are made of F16; capture it by `ferrokv capture`")]
    Dtype {
        /// The file.
        path: String,
        /// The layer.
        layer: String,
        /// What it holds.
        dtype: String,
    },
    /// Layers that do not fit one cache.
    #[error(
        "{layer} of {path} has {found}, and {first} has {expected}; one cache takes equal layers, choose them with --layers"
    )]
    Unequal {
        /// The file.
        path: String,
        /// The layer.
        layer: String,
        /// Its extents.
        found: String,
        /// The first one.
        first: String,
        /// Its extents.
        expected: String,
    },
    /// A file that says nothing of its model.
    #[error(
        "{path} does not say how many layers its model has, which {kv} is checked against; capture it again by \
         `ferrokv capture`"
    )]
    NoModel {
        /// The capture.
        path: String,
        /// The scheme that was given a file.
        kv: String,
    },
}

impl CommandError for Error {}

/// Schemes and references as they are given, each once.
fn each_once(texts: &[String]) -> Result<Vec<Selection>, Failure> {
    let mut found: Vec<Selection> = Vec::new();
    for text in texts {
        let selection = Selection::parse(text, host::schemes().chain(&REFERENCES))?;
        if !found.contains(&selection) {
            found.push(selection);
        }
    }
    Ok(found)
}

/// Says so if the layers cannot be in one cache.
fn check(path: &str, layers: &[Layer]) -> Result<(), Error> {
    let extents = |layer: &Layer| {
        let Layer { tokens, heads, kv_heads, head_dim, .. } = layer;
        format!("{tokens} tokens, {heads} query and {kv_heads} KV heads of {head_dim}")
    };
    for layer in layers {
        if layer.dtype != Dtype::F16 {
            let (path, layer, dtype) = (path.to_owned(), layer.name.clone(), layer.dtype.to_string());
            return Err(Error::Dtype { path, layer, dtype });
        }
        let (found, expected) = (extents(layer), extents(&layers[0]));
        if found != expected {
            let (path, layer, first) = (path.to_owned(), layer.name.clone(), layers[0].name.clone());
            return Err(Error::Unequal { path, layer, found, first, expected });
        }
    }
    Ok(())
}

/// Runs the command.
///
/// # Errors
/// Bad input, a scheme that is not of codes alone, or what it says of these keys and values.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let selections = each_once(&arguments.kv)?;
    let report = arguments.report.open(Some(&arguments.file), None)?;
    let picture =
        arguments.plot.as_ref().map(|prefix| Picture::new(prefix, Some(&arguments.file))).transpose()?;
    let mut file = TensorFile::open(&arguments.file)?;
    let facts = Facts::read(&file)?;
    let path = arguments.file.display().to_string();
    let layers = layers::layers(&file, &arguments.layers)?;
    check(&path, &layers)?;
    let captured = measure::Captured::read(&mut file, facts, layers, arguments.queries.into())?;
    let exact = captured.exact();
    let bar = progress::timed(selections.len() * captured.work());
    let mut rows = Vec::new();
    for selection in &selections {
        bar.set_message(selection.to_string());
        rows.push(measure::row(&captured, &exact, selection, arguments.seed, |work| bar.inc(work as u64))?);
    }
    bar.finish_and_clear();
    // Of equal bytes as they were given.
    rows.sort_by(|a, b| a.key_bytes.total_cmp(&b.key_bytes).then(a.value_bytes.total_cmp(&b.value_bytes)));
    let json = report::Json::new(
        &captured,
        &path,
        Environment::here(None, ferrokv::generated()[0], arguments.commit.as_deref()),
        arguments.seed,
        &rows,
    );
    if let Some(picture) = &picture {
        picture.write(&picture::chart(json.title(), &rows))?;
    }
    report.finish(&report::tables(&json, arguments.by_layer), &json)
}

/// What a row is drawn with: the scheme without its bits and files.
fn family(selection: &Selection) -> String {
    let scheme = selection.scheme();
    let preset =
        selection.preset().filter(|own| Some(*own) != scheme.presets.first().map(|first| first.name));
    let preset = preset.map_or_else(String::new, |preset| format!(":{preset}"));
    let others = selection.values().filter(|(name, _)| !["k", "v"].contains(name));
    let others = others.filter(|(name, _)| selection.file(name).is_none());
    let options: String = others.map(|(name, value)| format!("/{name}={value}")).collect();
    format!("{}{preset}{options}", scheme.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_named_by_scheme() {
        let texts = [
            "gtq-blocks/k=2/v=3/order=a/b/c.safetensors",
            "kivi-paper/k=2/group=64/residual=64",
            "kivi-paper/k=2/group=64/residual=64",
        ];
        let found = each_once(&texts.map(String::from)).expect("a scheme and a reference");
        assert_eq!(found.len(), 2);
        assert_eq!(
            (family(&found[0]), family(&found[1])),
            ("gtq-blocks".into(), "kivi-paper/group=64/residual=64".into())
        );
        let unknown = each_once(&["gtqq".into()]).expect_err("no scheme").to_string();
        assert!(unknown.contains("gtq-blocks") && unknown.contains("kivi-scale"), "{unknown}");
    }
}
