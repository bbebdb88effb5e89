//! `ferrokv model`: what a model file holds, and what its tokenizer makes of a text.

use super::failure::Failure;
use super::output::ReportArguments;
use super::table::{Align, Table};
use super::text;
use host::model::config::ModelConfig;
use host::model::gguf::{Gguf, Value};
use host::model::tokenizer::TokenKind;
use host::model::{Error, Model, Tokenizer, fetched};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

const LONG: &str = "\
Show what a GGUF file holds: the sizes of the model, the bytes that one token takes in its KV cache, its metadata, \
and its tensors by type with their bytes. Everything that a run relies on is checked: metadata that are missing or \
contradict each other, tensors of another shape than they say, types and architectures that cannot be run are \
refused by name.

With --tokenize: what the model's tokenizer makes of a text, one token a line, with its number, the piece as the \
vocabulary spells it (Ġ is a space, Ċ a line feed) and the text that it stands for.

Exit codes: 0 done; 2 bad input.";

const EXAMPLES: &str = "\
Examples:
  ./setup --model                                 fetches SmolLM2-135M-Instruct
  ferrokv model                                   what it holds
  ferrokv model other.gguf --json other.json
  ferrokv model --tokenize \"The year 1984\"
  ferrokv model --tokenize \"<|im_start|>user\" --special";

/// Characters of a metadata value in the table.
const VALUE_WIDTH: usize = 72;

/// Show what a model file holds, or tokenize a text.
#[derive(clap::Args)]
#[command(long_about = LONG, after_long_help = EXAMPLES)]
pub struct Arguments {
    /// The GGUF file; without one, what ./setup --model fetched.
    file: Option<PathBuf>,
    /// Show the tokens of TEXT instead.
    #[arg(long, value_name = "TEXT")]
    tokenize: Option<String>,
    /// Control tokens that are spelled in TEXT become control tokens; otherwise they are text like any other.
    #[arg(long, requires = "tokenize")]
    special: bool,
    #[command(flatten)]
    report: ReportArguments,
}

#[derive(Serialize)]
struct Json<'a> {
    command: &'static str,
    version: &'static str,
    file: String,
    file_bytes: usize,
    gguf_version: u32,
    config: &'a ModelConfig,
    /// Values of keys and values that one token adds, in all layers.
    kv_values_per_token: usize,
    kv_f16_bytes_per_token: usize,
    kv_f16_bytes_at_context: usize,
    /// Tokens of the tokenizer, if there is one.
    tokenizer_vocab: Option<usize>,
    metadata: BTreeMap<&'a str, serde_json::Value>,
    types: &'a [TypeRow],
    tensors: Vec<TensorRow<'a>>,
    /// With --tokenize.
    #[serde(skip_serializing_if = "Option::is_none")]
    tokens: Option<&'a [Token]>,
}

/// All tensors of one type.
#[derive(Serialize)]
struct TypeRow {
    tensor_type: &'static str,
    tensors: usize,
    values: usize,
    bytes: usize,
}

#[derive(Serialize)]
struct TensorRow<'a> {
    name: &'a str,
    tensor_type: &'static str,
    /// The row length first, as in the file.
    dims: &'a [u64],
    bytes: usize,
}

#[derive(Serialize)]
struct Token {
    id: u32,
    piece: String,
    /// `None` where the bytes are a part of a character.
    text: Option<String>,
    control: bool,
}

/// Runs the command.
///
/// # Errors
/// A file that cannot be opened or run, or a text for which there is no tokenizer.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let path = match &arguments.file {
        Some(path) => path.clone(),
        None => fetched::model()?,
    };
    let report = arguments.report.open(Some(&path), None)?;
    let file = Gguf::open(&path).map_err(Error::File)?;
    let model = Model::from_gguf(&file)?;
    let config = &model.config;
    let tokens = match &arguments.tokenize {
        Some(text) => Some(tokenize(model.tokenizer()?, text, arguments.special)?),
        None => None,
    };
    let types = types(&file);
    let kv_bytes = 2 * config.kv_values_per_token();
    let header = file.header();
    let json = Json {
        command: "model",
        version: env!("CARGO_PKG_VERSION"),
        file: path.display().to_string(),
        file_bytes: file.size(),
        gguf_version: header.version,
        config,
        kv_values_per_token: config.kv_values_per_token(),
        kv_f16_bytes_per_token: kv_bytes,
        kv_f16_bytes_at_context: kv_bytes.saturating_mul(config.context),
        tokenizer_vocab: model.tokenizer.as_ref().map(Tokenizer::vocab),
        metadata: header.metadata.iter().map(|(key, value)| (key.as_str(), to_json(value))).collect(),
        types: &types,
        tensors: header
            .tensors
            .iter()
            .map(|tensor| TensorRow {
                name: &tensor.name,
                tensor_type: tensor.tensor_type.name(),
                dims: &tensor.dims,
                bytes: tensor.range.len(),
            })
            .collect(),
        tokens: tokens.as_deref(),
    };
    let tables = match &tokens {
        Some(tokens) => token_table(tokens),
        None => [
            format!(
                "{}: GGUF version {}, {}\n\n",
                json.file,
                header.version,
                text::bytes(file.size() as u64)
            ),
            config_table(config),
            format!(
                "\nKV cache in f16: {} bytes a token ({} values in {}), {} at {} tokens\n\n",
                text::count(kv_bytes as u64),
                text::count(config.kv_values_per_token() as u64),
                text::plural(config.layers, "layer"),
                text::bytes(json.kv_f16_bytes_at_context as u64),
                text::count(config.context as u64),
            ),
            type_table(&types),
            "\n".to_owned(),
            metadata_table(&file),
        ]
        .concat(),
    };
    report.finish(&tables, &json)
}

fn tokenize(tokenizer: &Tokenizer, text: &str, special: bool) -> Result<Vec<Token>, Error> {
    let ids = if special { tokenizer.encode_special(text)? } else { tokenizer.encode(text)? };
    let token = |id| {
        Ok(Token {
            id,
            piece: tokenizer.piece(id)?.to_owned(),
            text: String::from_utf8(tokenizer.bytes(id)?.into_owned()).ok(),
            control: tokenizer.kind(id)? == TokenKind::Control,
        })
    };
    ids.into_iter().map(token).collect()
}

fn token_table(tokens: &[Token]) -> String {
    let mut table = Table::new(&[("id", Align::Right), ("piece", Align::Left), ("text", Align::Left)]);
    for token in tokens {
        let text = match &token.text {
            _ if token.control => "(control)".to_owned(),
            Some(text) => format!("{text:?}"),
            None => "(part of a character)".to_owned(),
        };
        table.row([token.id.to_string(), token.piece.clone(), text]);
    }
    format!("{}\n{}\n", table.render(), text::plural(tokens.len(), "token"))
}

fn types(file: &Gguf) -> Vec<TypeRow> {
    let mut types = BTreeMap::new();
    for tensor in &file.header().tensors {
        let row = TypeRow { tensor_type: tensor.tensor_type.name(), tensors: 0, values: 0, bytes: 0 };
        let row = types.entry(tensor.tensor_type).or_insert(row);
        row.tensors += 1;
        row.values += tensor.rows() * tensor.columns();
        row.bytes += tensor.range.len();
    }
    types.into_values().collect()
}

fn type_table(types: &[TypeRow]) -> String {
    let columns = ["type", "tensors", "values", "bytes", "bits a value"];
    let align = |(i, name)| (name, if i == 0 { Align::Left } else { Align::Right });
    let mut table = Table::new(&columns.into_iter().enumerate().map(align).collect::<Vec<_>>());
    let mut row = |name: &str, tensors: usize, values: usize, bytes: usize| {
        table.row([
            name.to_owned(),
            text::count(tensors as u64),
            text::count(values as u64),
            text::count(bytes as u64),
            format!("{:.2}", 8.0 * bytes as f64 / values.max(1) as f64),
        ]);
    };
    let mut sums = [0; 3];
    for TypeRow { tensor_type, tensors, values, bytes } in types {
        row(tensor_type, *tensors, *values, *bytes);
        [*tensors, *values, *bytes].into_iter().zip(&mut sums).for_each(|(x, sum)| *sum += x);
    }
    row("all", sums[0], sums[1], sums[2]);
    table.render()
}

fn config_table(config: &ModelConfig) -> String {
    let rope = &config.rope;
    let turned = serde_json::to_value(rope.kind).ok().and_then(|kind| kind.as_str().map(str::to_owned));
    let yes = |flag: bool| if flag { "yes" } else { "no" }.to_owned();
    let mut table = Table::new(&[("model", Align::Left), ("", Align::Left)]);
    let rows = [
        ("name", one_line(&config.name)),
        ("architecture", config.architecture.name().to_owned()),
        ("layers", config.layers.to_string()),
        ("hidden channels", config.hidden.to_string()),
        ("feed-forward channels", config.ffn.to_string()),
        (
            "heads",
            format!("{} query, {} KV, of {} channels", config.query_heads, config.kv_heads, config.head_dim),
        ),
        (
            "RoPE",
            format!(
                "{} of {} channels, theta {}{}",
                turned.unwrap_or_default(),
                rope.dims,
                rope.theta,
                if rope.factors.is_some() { ", frequencies with factors" } else { "" }
            ),
        ),
        ("RMSNorm epsilon", config.norm_eps.to_string()),
        ("vocabulary", text::count(config.vocab as u64)),
        ("context", text::count(config.context as u64)),
        ("output tied to embedding", yes(config.tied_embeddings)),
        ("bias on Q, K and V", yes(config.qkv_bias)),
    ];
    for (what, value) in rows {
        table.row([what.to_owned(), value]);
    }
    table.render()
}

fn metadata_table(file: &Gguf) -> String {
    let mut table = Table::new(&[("metadata", Align::Left), ("type", Align::Left), ("value", Align::Left)]);
    for (key, value) in &file.header().metadata {
        let shown = match value {
            Value::Array(array) => text::plural(array.len(), "element"),
            other => one_line(&other.to_string()),
        };
        table.row([key.clone(), value.type_name().to_owned(), shown]);
    }
    table.render()
}

/// The beginning of a text, with line ends as spaces.
fn one_line(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.chars().count() <= VALUE_WIDTH {
        return line;
    }
    line.chars().take(VALUE_WIDTH - 1).chain(['…']).collect()
}

/// A value as it is; of an array its type and length, since vocabularies would fill the report.
fn to_json(value: &Value) -> serde_json::Value {
    match value {
        Value::String(text) => text.as_str().into(),
        Value::Bool(flag) => (*flag).into(),
        Value::Array(array) => serde_json::json!({ "type": array.type_name(), "length": array.len() }),
        Value::I8(x) => (*x).into(),
        Value::I16(x) => (*x).into(),
        Value::I32(x) => (*x).into(),
        Value::I64(x) => (*x).into(),
        other => match other.as_u64() {
            Some(x) => x.into(),
            None => other.as_f64().into(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_values_are_cut_and_stay_on_a_line() {
        assert_eq!(one_line("a\n  b\tc"), "a b c");
        let cut = one_line(&"é".repeat(100));
        assert_eq!((cut.chars().count(), cut.ends_with('…')), (VALUE_WIDTH, true));
        assert_eq!(to_json(&Value::I8(-3)), -3);
        assert_eq!(to_json(&Value::U64(u64::MAX)), u64::MAX);
        assert_eq!(to_json(&Value::F32(0.5)), 0.5);
        assert_eq!(to_json(&Value::F32(f32::NAN)), serde_json::Value::Null);
    }
}
