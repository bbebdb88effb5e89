//! What `bench int8` found, as data.

use super::operations::{Operation, Traffic};
use super::peers::PeerRow;
use super::record;
use crate::cli::timing::Timing;
use host::int8::Matrix;
use serde::{Deserialize, Serialize};

/// Where a row's work was done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    /// A GPU: where peers' rows come from too.
    #[default]
    Gpu,
    /// The host's cores.
    Cpu,
    /// The emulator.
    Emulator,
}

/// One measured figure. `docs/results/FIELDS.md` describes the fields.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Row {
    /// Whose row: `ferrokv`, or another library.
    pub peer: String,
    /// Where it ran.
    pub place: Place,
    /// What was done.
    pub op: String,
    /// Which of our implementations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub variant: Option<String>,
    /// Rows of the matrix.
    pub tokens: usize,
    /// Columns.
    pub channels: usize,
    /// Element type.
    pub dtype: String,
    /// Bytes that the formula must move.
    pub bytes: u64,
    /// Of them read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_read: Option<u64>,
    /// Microseconds a call, median.
    pub median_us: f64,
    /// 10th percentile.
    pub p10_us: f64,
    /// 90th percentile.
    pub p90_us: f64,
    /// 10^9 bytes a second.
    pub gb_per_s: f64,
    /// Calls in one timed repetition.
    pub calls: usize,
    /// Repetitions.
    pub replays: usize,
    /// Buffer sets that the calls take in turns, so that none finds its input in the cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sets: Option<usize>,
    /// The kernel or copy that the fraction is of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub roofline: Option<String>,
    /// What that needs for the same bytes, in microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub roofline_us: Option<f64>,
    /// `roofline_us` / `median_us`: 1 is as fast as memory alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fraction: Option<f64>,
    /// Whether every bit is the CPU's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verified: Option<bool>,
    /// Tokens that share a scale, where not all do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block_tokens: Option<u32>,
    /// A tiling or chunk size that was searched for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config: Option<String>,
}

impl Row {
    /// A row of ours.
    pub fn new(place: Place, variant: &str, on: Subject, op: &str, traffic: Traffic, timing: Timing) -> Self {
        let bytes = traffic.total();
        Row {
            peer: "ferrokv".into(),
            place,
            op: op.into(),
            variant: Some(variant.into()),
            tokens: on.matrix.tokens,
            channels: on.matrix.channels,
            dtype: on.dtype.into(),
            bytes,
            bytes_read: Some(traffic.reads),
            median_us: timing.median_us,
            p10_us: timing.p10_us,
            p90_us: timing.p90_us,
            gb_per_s: bytes as f64 / timing.median_us * 1e-3,
            calls: timing.calls,
            replays: timing.replays,
            ..Row::default()
        }
    }

    /// The row of `operation`.
    pub fn of(place: Place, variant: &str, on: Subject, operation: Operation, timing: Timing) -> Self {
        let traffic = operation.traffic(on.matrix, on.element);
        let row = Row::new(place, variant, on, operation.name(), traffic, timing);
        Row { block_tokens: operation.block_tokens(), ..row }
    }

    /// T·D.
    pub fn elements(&self) -> u64 {
        self.tokens as u64 * self.channels as u64
    }

    /// Whose row, in a table: the variant, or the other library.
    pub fn by(&self) -> &str {
        if self.peer == "ferrokv" { self.variant.as_deref().unwrap_or("ferrokv") } else { &self.peer }
    }

    /// Puts a ceiling beside it.
    pub fn beside(mut self, name: String, microseconds: f64) -> Self {
        self.fraction = Some(microseconds / self.median_us);
        self.roofline_us = Some(microseconds);
        self.roofline = Some(name);
        self
    }
}

/// What rows are about.
#[derive(Clone, Copy, Debug)]
pub struct Subject {
    /// The matrix.
    pub matrix: Matrix,
    /// The element type's name.
    pub dtype: &'static str,
    /// Its bytes.
    pub element: usize,
}

/// How far quantization moves a matrix: the paper's columns. All variants of one scheme share these, as they
/// share the bits.
#[derive(Clone, Debug, Serialize)]
pub struct Accuracy {
    /// Rows.
    pub tokens: usize,
    /// Columns.
    pub channels: usize,
    /// Element type.
    pub dtype: &'static str,
    /// Tokens that share a scale.
    pub tokens_per_scale: usize,
    /// The largest |K − K^|.
    pub max_error: f64,
    /// The largest bound of any column.
    pub bound: f64,
    /// The largest |K − K^| over its own column's bound: sound if at most 1.
    pub bound_ratio: f64,
    /// L2 norm of K − K^, summed in f64.
    pub l2_error: f64,
    /// Mean |K − K^|.
    pub mean_error: f64,
    /// Mean |q·k − q·k^| over tokens and queries from U(−1, 1), not scaled.
    pub attention_error: f64,
    /// How many queries.
    pub queries: usize,
}

/// The error columns of all rows.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Errors {
    /// The paper's error columns.
    pub accuracy: Vec<Accuracy>,
}

/// Versions that the peers' script states besides PyTorch's.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Libraries {
    /// Triton's.
    pub triton: Option<String>,
}

/// The whole report.
pub type Report = record::Report<Row, Libraries, Errors>;

impl PeerRow for Row {
    const REQUIRED: &'static [&'static str] =
        &["peer", "op", "tokens", "channels", "dtype", "bytes", "median_us"];
}
