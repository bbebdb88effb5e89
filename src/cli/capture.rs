//! `ferrokv capture`: queries, keys and values of a real run, in a file.

use super::captured;
use super::failure::Failure;
use super::output::ReportArguments;
use super::scheme;
use super::subject::{SubjectArguments, behind_bos, corpus};
use super::table::{Align, Table};
use super::text;
use super::trials::{Error, Watcher};
use host::eval::capture::{Capture, Captured};
use host::eval::{self, Decoder, decoder};
use host::kv::Geometry;
use host::model::forward::Error as ForwardError;
use host::tensor_file::{Dtype, Target, TensorWriter};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

const LONG: &str = "\
Run a model over a text and write queries, keys and values of chosen layers to a safetensors file, as the attention of the \
run had them: in f16, after RoPE, not scaled.

Layer NN is three tensors: `layer.NN.key` and `layer.NN.value`, [tokens, kv_heads, head_dim], of all tokens, and \
`layer.NN.query`, [query tokens, heads, head_dim], of the last --queries tokens. `query_first_position` in the metadata is the \
first of those. Query head h reads KV head h / (heads / kv_heads). What else the metadata say: text and tokens, and of the \
model its name, layers, a hash of its norms, and how RoPE turns its channels. `ferrokv attend`, `ferrokv diagnose` and \
`ferrokv prove --cache` read such files.

The file's bytes follow from model, text and options alone; on a GPU, whose chunks are longer, they may be others than with \
--backend cpu.

The text is read in chunks; with --decode N its last N tokens are decoded one by one over the KV scheme, so that what \
follows a scheme's errors is in the file.

Exit codes: 0 done; 2 bad input; 130 interrupted, with nothing written.";

const EXAMPLES: &str = "\
Examples:
  ferrokv capture -o kv.safetensors
  ferrokv capture -o kv.safetensors --layers 0,7,15 --tokens 2048 --queries 64 --text moby-dick --start 100000
  ferrokv capture -o kv.safetensors --kv int8-int4 --decode 32 && ferrokv attend kv.safetensors";

/// Write queries, keys and values of a real run to a file.
#[derive(clap::Args)]
#[command(long_about = LONG, after_long_help = EXAMPLES)]
pub struct Arguments {
    /// The file to write.
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Replace the output if it exists.
    #[arg(long)]
    force: bool,
    /// Which layers, counted from 0; all if not given.
    #[arg(long, value_name = "N", value_delimiter = ',')]
    layers: Vec<usize>,
    /// Tokens of the text.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
    /// Of how many of the last tokens the queries are written; 64, or all if there are fewer.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    queries: Option<u32>,
    /// The text: sotu or moby-dick, which ./setup --model fetched, or a file.
    #[arg(long, value_name = "NAME|FILE", default_value = "sotu")]
    text: String,
    /// The byte of the text where it starts.
    #[arg(long, value_name = "BYTE", default_value_t = 0)]
    start: usize,
    #[arg(long, value_name = "SCHEME", default_value = "dense")]
    #[arg(help = scheme::short("How keys and values are kept meanwhile"))]
    #[arg(long_help = scheme::long("How keys and values are kept meanwhile"))]
    kv: String,
    /// How many of the last tokens are decoded one by one.
    #[arg(long, value_name = "N", default_value_t = 0)]
    decode: u32,
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
    kv: &'a str,
    text: &'a str,
    start: usize,
    tokens: usize,
    decoded: usize,
    query_first_position: usize,
    token_ids: &'a [u32],
    layers: Vec<Layer>,
}

#[derive(Serialize)]
struct Layer {
    layer: usize,
    largest_key: f32,
    largest_value: f32,
    largest_query: f32,
}

/// Runs the command.
///
/// # Errors
/// Bad input, what the device reports, what cannot be written, or Ctrl-C.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let selection = scheme::one(&arguments.kv)?;
    let path = arguments.subject.path()?;
    let target = Target::new(&arguments.output, arguments.force, Some(&path))?;
    let report = arguments.report.open(Some(&path), Some(&arguments.output))?;
    let corpus = corpus(&arguments.text)?;
    let subject = arguments.subject.open()?;
    let tokenizer = subject.tokenizer()?;
    let count = arguments.tokens as usize;
    subject.fits(count)?;
    let layers = match &arguments.layers[..] {
        [] => (0..subject.model.config.layers).collect(),
        layers => layers.to_vec(),
    };
    let queries = match arguments.queries {
        None => count.min(64),
        Some(queries) if queries as usize <= count => queries as usize,
        Some(queries) => {
            return Err(Error::MoreThanTokens { what: "--queries", value: queries, tokens: count }.into());
        }
    };
    let decoded = match arguments.decode {
        decode if decode as usize <= count => decode as usize,
        decode => return Err(Error::MoreThanTokens { what: "--decode", value: decode, tokens: count }.into()),
    };
    let behind = tokenizer.bos().map_or(0, |_| 1);
    let window = corpus.window(tokenizer, arguments.start, (count - behind).max(1))?;
    let mut tokens = behind_bos(tokenizer, &window.tokens);
    tokens.truncate(count);

    let first_query = count - queries;
    let kv = selection.to_string();
    let mut runner = subject.runner()?;
    let mut inner = subject.cache(&selection, count)?;
    let mut cache = Capture::new(&mut *inner, &layers, first_query).map_err(ForwardError::from)?;
    let watcher = Watcher::new(count - decoded + decoded * decoder::STEP)?;
    let (read, steps) = tokens.split_at(count - decoded);
    let mut watch = |work| watcher.hear(work);
    let mut decoder = Decoder::new(&mut runner, &mut cache, &mut watch);
    let done =
        decoder.read(read).and_then(|()| steps.iter().try_for_each(|token| decoder.step(*token).map(drop)));
    let done = done.and_then(|()| decoder.finish());
    watcher.end();
    match done {
        Ok(_) => {}
        Err(eval::Error::Stopped) => {
            return Err(Error::Interrupted("interrupted; nothing was written".into()).into());
        }
        Err(error) => return Err(error.into()),
    }

    let layers = cache.into_layers();
    let geometry = Geometry::from(&subject.model.config);
    let ids: Vec<String> = tokens.iter().map(u32::to_string).collect();
    let metadata = [
        ("model", subject.model.config.name.clone()),
        ("text", format!("{}, from byte {}", corpus.name(), window.start)),
        ("kv_scheme", kv.clone()),
        ("decoded", decoded.to_string()),
        ("dtype", "f16, as attention had them".into()),
        ("layout", "layer.NN.key, .value: [tokens, kv_heads, head_dim]; layer.NN.query: [query_tokens, heads, head_dim]; row-major".into()),
        ("head_map", "query head h reads KV head h / (heads / kv_heads)".into()),
        ("query_first_position", first_query.to_string()),
        ("query_scale", "not applied; scores are q.k / sqrt(head_dim)".into()),
        ("rope", "keys and queries after RoPE".into()),
        ("token_ids", ids.join(",")),
        ("made_by", "ferrokv capture".into()),
    ];
    let facts = captured::metadata(&subject.model);
    let metadata: BTreeMap<String, String> =
        metadata.into_iter().chain(facts).map(|(name, value)| (name.to_owned(), value)).collect();
    write(target, &metadata, &layers, geometry, [count, queries])?;

    let json = Json {
        command: "capture",
        version: env!("CARGO_PKG_VERSION"),
        model: &subject.model.config.name,
        device: subject.device_name(),
        gpu_note: subject.gpu_note.as_deref(),
        kv: &kv,
        text: corpus.name(),
        start: window.start,
        tokens: count,
        decoded,
        query_first_position: first_query,
        token_ids: &tokens,
        layers: layers.iter().map(Layer::of).collect(),
    };
    report.finish(&render(&json, &arguments.output.display().to_string()), &json)
}

/// Writes `counts[0]` tokens of keys and values and `counts[1]` of queries.
fn write(
    target: Target,
    metadata: &BTreeMap<String, String>,
    captured: &[Captured],
    geometry: Geometry,
    counts: [usize; 2],
) -> Result<(), Failure> {
    let Geometry { q_heads, kv_heads, head_dim, .. } = geometry;
    let parts = [("key", counts[0], kv_heads), ("value", counts[0], kv_heads), ("query", counts[1], q_heads)];
    let name = |layer: usize, part: &str| format!("layer.{layer:02}.{part}");
    let shapes = captured.iter().flat_map(|layer| {
        parts
            .map(|(part, tokens, heads)| (name(layer.layer, part), Dtype::F16, vec![tokens, heads, head_dim]))
    });
    let mut writer = TensorWriter::create(target, metadata, shapes)?;
    for layer in captured {
        writer.write(&name(layer.layer, "key"), &layer.keys)?;
        writer.write(&name(layer.layer, "value"), &layer.values)?;
        writer.write(&name(layer.layer, "query"), &layer.queries)?;
    }
    Ok(writer.finish()?)
}

impl Layer {
    fn of(captured: &Captured) -> Layer {
        let largest = |values: &[half::f16]| values.iter().map(|x| x.to_f32().abs()).fold(0.0, f32::max);
        Layer {
            layer: captured.layer,
            largest_key: largest(&captured.keys),
            largest_value: largest(&captured.values),
            largest_query: largest(&captured.queries),
        }
    }
}

fn render(json: &Json, path: &str) -> String {
    let mut table = Table::new(&[
        ("layer", Align::Right),
        ("largest |key|", Align::Right),
        ("|value|", Align::Right),
        ("|query|", Align::Right),
    ]);
    for layer in &json.layers {
        let largest = [layer.largest_key, layer.largest_value, layer.largest_query];
        table.row([layer.layer.to_string()].into_iter().chain(largest.map(|x| format!("{x:.3}"))));
    }
    format!(
        "{path}: {} of {} over {}, {} decoded over {}, queries from token {} on\n\n{}",
        text::plural(json.tokens, "token"),
        json.model,
        json.text,
        json.decoded,
        json.kv,
        json.query_first_position,
        table.render()
    )
}
