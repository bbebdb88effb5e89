//! What `bench attention` found, as data.

use super::super::record;
use super::arguments::Shape;
use crate::cli::timing::Timing;
use host::kv::workload::{Fact, Memory};
use serde::{Deserialize, Serialize};

/// One measured figure. Peers write the same fields.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Row {
    /// Whose row: `ferrokv`, or another library.
    pub peer: String,
    /// `decode`, or `read` for what memory alone takes.
    pub op: String,
    /// Which of our schemes, or which pattern of reading.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheme: Option<String>,
    /// Whether it ran on the emulator.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub emulator: bool,
    /// Whether it ran on the CPU's own path.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub on_slices: bool,
    /// Element type of the cache.
    pub dtype: String,
    /// Sequences.
    pub batch: u32,
    /// Query heads.
    pub q_heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Elements of a row.
    pub head_dim: u32,
    /// Tokens of each sequence.
    pub context: u32,
    /// Where the blocks of a paged cache lie; shuffled, if nothing is said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blocks: Option<BlockOrder>,
    /// Bytes that the formula must move: keys, values, queries and outputs in the cache's type.
    pub bytes: u64,
    /// Bytes that the scheme's own layout makes it read of the cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_bytes: Option<u64>,
    /// Microseconds a call, median.
    pub median_us: f64,
    /// 10th percentile.
    pub p10_us: f64,
    /// 90th percentile.
    pub p90_us: f64,
    /// `bytes` a second, in 10^9.
    pub gb_per_s: f64,
    /// Calls in one timed repetition.
    pub calls: usize,
    /// Repetitions.
    pub replays: usize,
    /// Caches that the calls take in turns, so that none finds its input in the cache of the GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sets: Option<usize>,
    /// The pattern that read `cache_bytes` fastest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub roofline: Option<String>,
    /// Its time, in microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub roofline_us: Option<f64>,
    /// `roofline_us` / `median_us`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fraction: Option<f64>,
    /// Whether what was compared is right: rows of the output within what their scheme promises of the
    /// formula in f64, and on small caches every bit that of the emulator. None where nothing is promised and
    /// no bit was compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verified: Option<bool>,
    /// The largest part of a bound that an error took, of the compared rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_of_bound: Option<f64>,
    /// Whether every bit was compared with the emulator's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bits_compared: Option<bool>,
    /// A form of the call that was tried.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config: Option<String>,
    /// `cache_bytes` a second, in 10^9.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_gb_per_s: Option<f64>,
    /// The time of our dense attention / `median_us`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dense_ratio: Option<f64>,
    /// The fastest of the other libraries, its form that is fastest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fastest_peer: Option<String>,
    /// Its time / `median_us`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer_ratio: Option<f64>,
    /// What a step consists of, if it is more than one stage; none on the emulator.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<Stage>,
    /// Bytes that the scheme's cache takes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Memory>,
    /// The errors of the compared rows as parts of their outputs' norms: median and largest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub relative_error: Option<[f64; 2]>,
    /// The bounds that are stated, as parts of the outputs' norms: median and largest of the compared rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub relative_bound: Option<[f64; 2]>,
    /// Figures that the scheme alone knows the meaning of.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub facts: Vec<Fact>,
}

/// A stage of a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stage {
    /// Its name.
    pub name: String,
    /// By how many microseconds the median grows with it: a step up to it, less a step up to the stage
    /// before.
    pub us: f64,
}

/// Where the blocks of a paged cache lie in their pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum BlockOrder {
    /// Shuffled over all of it.
    #[default]
    Shuffled,
    /// A sequence's one behind the other.
    InOrder,
}

/// What a row is about.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Subject {
    /// Heads.
    pub shape: Shape,
    /// Sequences.
    pub batch: u32,
    /// Tokens of each.
    pub context: u32,
    /// Element type.
    pub dtype: &'static str,
    /// Where its blocks lie.
    pub blocks: BlockOrder,
}

/// Bytes of an element of the cache.
const ELEMENT: u64 = 2;

impl Subject {
    /// Bytes of keys and values.
    pub fn cache_bytes(self) -> u64 {
        let rows = u64::from(self.batch) * u64::from(self.shape.kv_heads) * u64::from(self.context);
        2 * ELEMENT * rows * u64::from(self.shape.head_dim)
    }

    /// Those and the queries and outputs.
    pub fn bytes(self) -> u64 {
        let rows = u64::from(self.batch) * u64::from(self.shape.q_heads);
        self.cache_bytes() + 2 * ELEMENT * rows * u64::from(self.shape.head_dim)
    }

    /// A row of ours.
    pub fn row(self, op: &str, scheme: &str, bytes: u64, timing: Timing) -> Row {
        Row {
            peer: "ferrokv".into(),
            op: op.into(),
            scheme: Some(scheme.into()),
            dtype: self.dtype.into(),
            batch: self.batch,
            q_heads: self.shape.q_heads,
            kv_heads: self.shape.kv_heads,
            head_dim: self.shape.head_dim,
            context: self.context,
            blocks: (op == "decode" && self.blocks != BlockOrder::default()).then_some(self.blocks),
            bytes,
            median_us: timing.median_us,
            p10_us: timing.p10_us,
            p90_us: timing.p90_us,
            gb_per_s: bytes as f64 / timing.median_us * 1e-3,
            calls: timing.calls,
            replays: timing.replays,
            ..Row::default()
        }
    }
}

impl std::fmt::Display for Subject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} batch {} context {}", self.shape, self.dtype, self.batch, self.context)?;
        match self.blocks {
            BlockOrder::Shuffled => Ok(()),
            BlockOrder::InOrder => f.write_str(", blocks in order"),
        }
    }
}

impl Row {
    /// Whose row, in a table: the scheme, or the other library.
    pub fn by(&self) -> &str {
        if self.peer == "ferrokv" { self.scheme.as_deref().unwrap_or("ferrokv") } else { &self.peer }
    }

    /// The same, and where its blocks lie if they are not shuffled.
    pub fn label(&self) -> String {
        let order = if self.blocks == Some(BlockOrder::InOrder) { ", in order" } else { "" };
        let place = match (self.emulator, self.on_slices) {
            (true, _) => ", emulator",
            (_, true) => ", CPU",
            _ => "",
        };
        format!("{}{order}{place}", self.by())
    }

    /// Whether it ran where another did.
    fn is_where(&self, other: &Row) -> bool {
        (self.emulator, self.on_slices) == (other.emulator, other.on_slices)
    }

    /// Whether both are of one shape, type, batch and context.
    fn is_beside(&self, other: &Row) -> bool {
        self.group() == other.group() && self.context == other.context
    }

    /// What has a table of its own.
    pub fn group(&self) -> (u32, u32, u32, &str, u32) {
        (self.q_heads, self.kv_heads, self.head_dim, &self.dtype, self.batch)
    }
}

/// Sets what our schemes are beside: our dense attention, and the fastest of the other libraries.
pub fn set_ratios(rows: &mut [Row]) {
    for i in 0..rows.len() {
        let of = &rows[i];
        if of.peer != "ferrokv" || of.op != "decode" {
            continue;
        }
        let beside = |row: &&Row| row.op == "decode" && row.is_beside(of);
        let dense = rows
            .iter()
            .filter(beside)
            .filter(|row| row.peer == "ferrokv" && row.by() == "dense" && row.is_where(of))
            .find(|row| row.blocks == of.blocks);
        let dense = dense.map(|row| row.median_us / of.median_us);
        let peers = rows.iter().filter(beside).filter(|row| row.peer != "ferrokv" && row.is_where(of));
        let peer = peers.min_by(|a, b| a.median_us.total_cmp(&b.median_us));
        let peer = peer.map(|row| (row.peer.clone(), row.median_us / of.median_us));
        let row = &mut rows[i];
        row.dense_ratio = dense;
        (row.fastest_peer, row.peer_ratio) = peer.unzip();
    }
}

/// Versions that the peers' script states besides PyTorch's.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Libraries {
    /// cuDNN's.
    pub cudnn: Option<u64>,
    /// FlashInfer's.
    pub flashinfer: Option<String>,
}

/// The whole report.
pub type Report = record::Report<Row, Libraries>;
