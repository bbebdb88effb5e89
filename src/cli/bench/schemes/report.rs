//! What `bench schemes` found, as data.

use super::Arguments;
use crate::cli::bench::attention;
use crate::cli::failure::Failure;
use crate::cli::scheme;
use host::eval::compare;
use host::eval::statistics::RESAMPLES;
use host::kv::{Selection, Summary};
use serde::Serialize;

/// One scheme.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The scheme as it was given, of files the names alone.
    pub kv: String,
    /// The same without its file.
    #[serde(skip)]
    pub name: String,
    /// Over a model's text; none where it was not measured.
    pub quality: Option<OfText>,
    /// Steps of attention: rows of `bench attention`.
    pub speed: Vec<attention::Row>,
}

/// What a model's text loses over a scheme.
#[derive(Clone, Debug, Serialize)]
pub struct OfText {
    /// Tokens of a window.
    pub context: u32,
    /// Of the model.
    pub head_dim: u32,
    /// Tokens of a window that are decoded.
    pub decoded: usize,
    /// The mean of the windows' mean negative log-likelihoods, nats a token.
    pub nll: f64,
    /// Its exponential.
    pub perplexity: f64,
    /// Beside dense on the same windows; none for dense itself.
    pub beside: Option<compare::Summary>,
    /// Bytes of a token and KV head at the end of a window, in all memory.
    pub token_bytes: f64,
    /// Of them what a step reads at least.
    pub step_bytes: f64,
    /// What the scheme states of its heads, over all steps.
    pub report: Option<Summary>,
    /// Window by window.
    pub windows: Vec<Window>,
}

/// One window over a scheme.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Window {
    /// Its number among those asked for.
    pub window: usize,
    /// The byte of the text where it starts.
    pub start: usize,
    /// The mean negative log-likelihood of its decoded tokens, nats.
    pub nll: f64,
    /// The mean divergence of a step from dense's, nats; none for dense itself.
    pub kl: Option<f64>,
}

/// What the report has besides rows.
#[derive(Clone, Debug, Serialize)]
pub struct More {
    /// The model that quality is of, if it was measured.
    pub model: Option<String>,
    /// Its text.
    pub text: Option<String>,
    /// Windows that were asked for.
    pub windows: u32,
    /// What queries of steps were multiplied by.
    pub query_scale: f32,
    /// Which resamples.
    pub bootstrap_seed: u64,
    /// How many.
    pub bootstrap_resamples: usize,
}

impl More {
    /// Of model and text, if quality was measured.
    pub fn new(arguments: &Arguments, about: Option<(String, String)>) -> Self {
        let (model, text) = about.unzip();
        More {
            model,
            text,
            windows: arguments.windows,
            query_scale: arguments.query_scale,
            bootstrap_seed: arguments.seed,
            bootstrap_resamples: RESAMPLES,
        }
    }
}

/// A row for each scheme, of which nothing is known.
///
/// # Errors
/// A scheme that is none without its file.
pub fn rows(selections: &[Selection]) -> Result<Vec<Row>, Failure> {
    let row = |selection| {
        let name = scheme::without_files(selection)?.to_string();
        Ok(Row { kv: scheme::plain(selection), name, quality: None, speed: Vec::new() })
    };
    selections.iter().map(row).collect()
}

impl Row {
    /// Bytes of a token and KV head, in all memory and what a step reads: over the longest context of the
    /// first shape, or at the end of a model's window.
    pub fn bytes(&self) -> Option<(f64, f64)> {
        let shape = |row: &attention::Row| (row.q_heads, row.kv_heads, row.head_dim);
        let of_first = self.speed.iter().filter(|row| shape(row) == shape(&self.speed[0]));
        let step = of_first.max_by_key(|row| (row.context, std::cmp::Reverse(row.batch)));
        let step = step.and_then(|row| {
            let tokens = f64::from(row.batch) * f64::from(row.kv_heads) * f64::from(row.context);
            let memory = row.memory?;
            Some(((memory.device + memory.host) as f64 / tokens, row.cache_bytes? as f64 / tokens))
        });
        step.or_else(|| self.quality.as_ref().map(|of| (of.token_bytes, of.step_bytes)))
    }

    /// The largest bound that is stated of a step's compared rows, over the norm of its output.
    pub fn bound(&self) -> Option<f64> {
        self.speed.iter().filter_map(|row| row.relative_bound).map(|[_, most]| most).reduce(f64::max)
    }
}

/// By their bytes, most first; those of which nothing is known last.
pub fn sorted(mut rows: Vec<Row>) -> Vec<Row> {
    let bytes = |row: &Row| row.bytes().map_or(f64::NEG_INFINITY, |(all, _)| all);
    rows.sort_by(|a, b| bytes(b).total_cmp(&bytes(a)));
    rows
}
