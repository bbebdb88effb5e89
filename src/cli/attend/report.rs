//! The results: for machines all of them, for people a row a head.

use crate::cli::table::{Align, Table};
use crate::cli::text;
use host::certified::{Policy, Rung};
use serde::Serialize;

/// The report for machines.
#[derive(Serialize)]
pub struct Report<'a> {
    /// `attend`.
    pub command: &'static str,
    /// Of this program.
    pub version: &'static str,
    /// The file read.
    pub file: String,
    /// `certified`, `dense` or `naive`.
    pub scheme: &'static str,
    /// The preset's name; none for `dense`.
    pub policy: Option<&'static str>,
    /// Its thresholds. Infinite ones are null.
    pub thresholds: Option<&'a Policy>,
    /// How the quantized cache is stored, `compact` or `paper`; none for `dense`.
    pub layout: Option<&'static str>,
    /// `emulator`, or the GPU's name.
    pub device: String,
    /// Why it is no GPU.
    pub gpu_note: Option<&'a str>,
    /// Over all layers.
    pub summary: Summary,
    /// One by one.
    pub layers: &'a [LayerReport],
}

/// What was found over all layers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Heads, counted for each query token.
    pub heads: usize,
    /// Those whose error is not within their bound.
    pub violations: usize,
    /// Bound over error.
    pub median_ratio: Option<f64>,
    /// The least of them.
    pub least_ratio: Option<f64>,
    /// Heads computed from the originals.
    pub dense_heads: usize,
    /// Those of them that have other bits than dense attention.
    pub dense_bits_differing: usize,
}

/// A layer.
#[derive(Clone, Debug, Serialize)]
pub struct LayerReport {
    /// `layer.07`.
    pub name: String,
    /// F16 or BF16.
    pub dtype: String,
    /// Tokens in the file.
    pub tokens: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Query heads.
    pub heads: usize,
    /// Channels of one.
    pub head_dim: usize,
    /// Positions of the query tokens.
    pub query_tokens: Vec<usize>,
    /// A step, all query tokens at once.
    pub step_seconds: f64,
    /// Dense attention of the same.
    pub dense_seconds: f64,
    /// What the first step read, with nothing in the scratch.
    pub bytes: Bytes,
    /// What the cache takes.
    pub memory: Memory,
    /// A row for each query token and head.
    pub rows: Vec<Head>,
}

/// Bytes read, each as often as a group of up to eight query heads reads it.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Bytes {
    /// GPU: quantized blocks and their annotations, in the one pass over all.
    pub quantized: u64,
    /// GPU: quantized blocks once more, whose share the originals take.
    pub replaced: u64,
    /// GPU: blocks that are not full yet, held as they came.
    pub trailing: u64,
    /// GPU: originals found in the scratch.
    pub scratch: u64,
    /// Host memory: originals of promoted blocks.
    pub host_promoted: u64,
    /// Host memory: whole sequences, for heads on the dense rung.
    pub host_dense: u64,
    /// Host memory: originals of promoted blocks in a step that follows others of the same; on a GPU only.
    pub host_promoted_warm: Option<u64>,
    /// GPU or host memory: tiles and originals that the checks of a step read once more.
    pub checked: u64,
    /// GPU: what dense attention reads.
    pub dense: u64,
}

impl Bytes {
    fn gpu(self) -> u64 {
        self.quantized + self.replaced + self.trailing + self.scratch
    }

    fn host(self) -> u64 {
        self.host_promoted + self.host_dense
    }
}

/// What a cache takes, all of its buffers counted.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Memory {
    /// Bytes on the GPU.
    pub gpu: usize,
    /// Page-locked bytes on the host.
    pub host: usize,
}

/// A head for one query token.
#[derive(Clone, Debug, Serialize)]
pub struct Head {
    /// The query token's position: it sees the keys up to its own.
    pub token: usize,
    /// The query head.
    pub head: usize,
    /// The head of keys and values that it reads.
    pub kv_head: usize,
    /// E_key + E_val + E_round.
    pub bound: f64,
    /// By quantized keys.
    pub e_key: f32,
    /// By quantized values.
    pub e_val: f32,
    /// By the arithmetic.
    pub e_round: f32,
    /// The distance from the formula in f64.
    pub error: f64,
    /// Bound over error; none where the error is 0.
    pub ratio: Option<f64>,
    /// Whether the error is within the bound.
    pub holds: bool,
    /// Dense attention's distance from the formula.
    pub dense_error: f64,
    /// The exact output's norm.
    pub output_norm: f64,
    /// The share of the mass that comes from quantized keys.
    pub tail_mass: f32,
    /// The largest error of a score by quantized keys.
    pub delta: f32,
    /// Blocks of 16 tokens whose keys were promoted.
    pub promoted_keys: u32,
    /// The same of values.
    pub promoted_values: u32,
    /// What the output was computed from.
    pub rung: Rung,
    /// Why, for the dense rung.
    pub reasons: Vec<&'static str>,
    /// Whether the output has the bits of dense attention.
    pub bits_of_dense: bool,
}

impl Head {
    /// A bound that does not hold is tighter than any.
    fn tightness(&self) -> f64 {
        if self.holds { self.ratio.unwrap_or(f64::INFINITY) } else { 0.0 }
    }
}

/// What was found over all layers.
pub fn summary(layers: &[LayerReport]) -> Summary {
    let rows = || layers.iter().flat_map(|layer| &layer.rows);
    let mut ratios: Vec<f64> = rows().filter_map(|row| row.ratio).collect();
    ratios.sort_by(f64::total_cmp);
    let dense = |row: &&Head| row.rung.is_dense();
    Summary {
        heads: rows().count(),
        violations: rows().filter(|row| !row.holds).count(),
        median_ratio: ratios.get(ratios.len() / 2).copied(),
        least_ratio: ratios.first().copied(),
        dense_heads: rows().filter(dense).count(),
        dense_bits_differing: rows().filter(dense).filter(|row| !row.bits_of_dense).count(),
    }
}

const COLUMNS: [(&str, Align); 12] = [
    ("token", Align::Right),
    ("head", Align::Right),
    ("E_key", Align::Right),
    ("E_val", Align::Right),
    ("E_round", Align::Right),
    ("bound", Align::Right),
    ("error", Align::Right),
    ("bound/error", Align::Right),
    ("keys", Align::Right),
    ("values", Align::Right),
    ("rung", Align::Left),
    ("why", Align::Left),
];

/// What the columns mean.
pub const LEGEND: &str = "\
token: the query token's position, which sees the keys up to its own; of each head the one whose bound is tightest
is shown (--all: every one);
bound: E_key + E_val + E_round, of the Euclidean norm of the head's error; error: its distance from the formula in f64;
keys, values: blocks of 16 tokens that were used from their originals; rung, why: what the output was computed from:
quantized blocks, some promoted, more of them (expanded), the head's originals (dense), those of all heads because stored
data have changed (layer);
bytes: of the first step, with an empty scratch, each as often as a group of up to 8 query heads reads it.
";

/// A layer's table and what it cost.
pub fn layer(layer: &LayerReport, all: bool, dense: bool) -> String {
    let mut table = Table::new(&COLUMNS);
    let mut shown: Vec<&Head> = Vec::new();
    if all {
        shown.extend(&layer.rows);
    } else {
        for head in 0..layer.heads {
            let own = layer.rows.iter().filter(|row| row.head == head);
            shown.extend(own.min_by(|a, b| a.tightness().total_cmp(&b.tightness())));
        }
    }
    for row in shown {
        let mut why = row.reasons.join(", ");
        if !row.holds {
            why = format!("VIOLATED {why}");
        }
        table.row([
            row.token.to_string(),
            row.head.to_string(),
            text::error(row.e_key.into()),
            text::error(row.e_val.into()),
            text::error(row.e_round.into()),
            text::error(row.bound),
            text::error(row.error),
            row.ratio.map_or("-".into(), |ratio| format!("{ratio:.1}")),
            row.promoted_keys.to_string(),
            row.promoted_values.to_string(),
            row.rung.to_string(),
            why,
        ]);
    }
    let LayerReport { name, dtype, tokens, kv_heads, heads, head_dim, bytes, memory, .. } = layer;
    let positions: Vec<String> = layer.query_tokens.iter().map(usize::to_string).collect();
    let mut out = format!(
        "{name}  {dtype}, {} tokens, {heads} heads on {kv_heads} KV heads of {head_dim}; query tokens {}\n{}",
        text::count(*tokens as u64),
        positions.join(", "),
        table.render()
    );
    let (step, beside) = (text::seconds(layer.step_seconds), text::seconds(layer.dense_seconds));
    if dense {
        let read = text::bytes(bytes.dense);
        return out
            + &format!(
                "  step {beside}; reads {read} on the GPU, where the cache takes {}\n\n",
                text::bytes(memory.gpu as u64)
            );
    }
    out += &format!(
        "  step {step} (dense {beside}); reads {} on the GPU (dense {}): {} quantized, {} of them again, {} trailing, \
         {} from the scratch\n",
        text::bytes(bytes.gpu()),
        text::bytes(bytes.dense),
        text::bytes(bytes.quantized),
        text::bytes(bytes.replaced),
        text::bytes(bytes.trailing),
        text::bytes(bytes.scratch),
    );
    let warm = bytes
        .host_promoted_warm
        .map_or(String::new(), |warm| format!(" ({} in later steps)", text::bytes(warm)));
    if bytes.checked > 0 {
        out += &format!("  reads {} once more to check blocks and their order\n", text::bytes(bytes.checked));
    }
    out += &format!(
        "  reads {} from host memory: {} of promoted blocks{warm}, {} for the dense rung; the cache takes {} on the GPU, \
         {} on the host\n\n",
        text::bytes(bytes.host()),
        text::bytes(bytes.host_promoted),
        text::bytes(bytes.host_dense),
        text::bytes(memory.gpu as u64),
        text::bytes(memory.host as u64),
    );
    out
}

impl Summary {
    /// Its line.
    pub fn line(&self) -> String {
        let bounds = match self.violations {
            0 => format!("all {} hold", text::count(self.heads as u64)),
            n => format!("{} of {} are VIOLATED", text::count(n as u64), text::count(self.heads as u64)),
        };
        let ratio = |ratio: Option<f64>| ratio.map_or("-".into(), |ratio| format!("{ratio:.1}"));
        let bits = match (self.dense_heads, self.dense_bits_differing) {
            (0, _) => String::new(),
            (_, 0) => " with the bits of dense attention".into(),
            (_, n) => format!(", {n} of which DIFFER from dense attention"),
        };
        format!(
            "bounds: {bounds}; bound over error: median {}, least {}; {} on the dense rung{bits}\n",
            ratio(self.median_ratio),
            ratio(self.least_ratio),
            text::plural(self.dense_heads, "head"),
        )
    }
}
