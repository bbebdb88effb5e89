//! A prompt: from its tokens to the logits of the last of them.

use super::memory::CacheMemory;
use super::{Chosen, Subject};
use crate::cli::failure::Failure;
use crate::cli::table::{Align, Table};
use crate::cli::text;
use crate::cli::timing::{Repetition, Timing};
use crate::cli::tokens::short;
use host::BackendKind;
use serde::Serialize;

/// Of each row, on a GPU after one that does not count; the CPU's own path has nothing to warm up.
const ON_GPU: Repetition = Repetition { seconds: 5.0, least: 3, most: 10 };
const ON_CPU: Repetition = Repetition { seconds: 0.0, least: 1, most: 1 };

/// One scheme and length.
#[derive(Clone, Debug, Serialize)]
pub struct PromptRow {
    pub kv: String,
    /// The option whose file was made up.
    pub made_up: Option<&'static str>,
    /// Of the prompt.
    pub tokens: u32,
    /// Tokens that pass through the model at a time, at most.
    pub chunk: usize,
    /// Times that count.
    pub repetitions: usize,
    /// Of a prompt into a new cache, by the device's clock; the cache is opened before.
    pub median_us: f64,
    pub p10_us: f64,
    pub p90_us: f64,
    pub tokens_per_second: f64,
    /// The dense scheme's median at this length over this one's.
    pub times_dense: Option<f64>,
    /// Behind the prompt, before any step.
    #[serde(flatten)]
    pub memory: CacheMemory,
}

/// Times a prompt of so many random tokens.
///
/// # Errors
/// A cache that cannot be opened or has no room; what the device reports.
pub fn measure(subject: &mut Subject, chosen: &Chosen, tokens: u32) -> Result<PromptRow, Failure> {
    let prompt = subject.random_tokens(tokens as usize);
    let once = |subject: &mut Subject| -> Result<(f64, CacheMemory), Failure> {
        let mut cache = subject.cache(chosen, tokens as usize)?;
        let us = subject.runner.time_prompt(&prompt, &mut *cache)? * 1e3;
        subject.runner.check_cache(&mut *cache)?;
        Ok((us, CacheMemory::of(&*cache, 0)))
    };
    let (first, memory) = once(subject)?;
    let (repetition, mut times) = match subject.device.kind() {
        BackendKind::Cuda => (ON_GPU, Vec::new()),
        BackendKind::Cpu => (ON_CPU, vec![first]),
    };
    for _ in times.len()..repetition.count(first * 1e-6) {
        times.push(once(subject)?.0);
    }
    let repetitions = times.len();
    let timing = Timing::new(times, 1);
    Ok(PromptRow {
        kv: chosen.name.clone(),
        made_up: chosen.made_up,
        tokens,
        chunk: subject.runner.chunk(),
        repetitions,
        median_us: timing.median_us,
        p10_us: timing.p10_us,
        p90_us: timing.p90_us,
        tokens_per_second: f64::from(tokens) * 1e6 / timing.median_us,
        times_dense: None,
        memory,
    })
}

/// The table; nothing if there are no rows.
pub fn table(rows: &[PromptRow]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let mut table = Table::new(&[
        ("KV", Align::Left),
        ("prompt", Align::Right),
        ("time", Align::Right),
        ("tokens/s", Align::Right),
        ("dense/this", Align::Right),
        ("cache", Align::Right),
        ("of f16", Align::Right),
    ]);
    for row in rows {
        table.row([
            row.kv.clone(),
            short(row.tokens),
            text::microseconds(row.median_us),
            format!("{:.1}", row.tokens_per_second),
            row.times_dense.map_or_else(String::new, |ratio| format!("{ratio:.2}")),
            text::bytes(row.memory.cache_bytes),
            format!("{:.3}", row.memory.cache_of_f16),
        ]);
    }
    format!("prompts, in chunks of up to {} tokens\n\n{}", rows[0].chunk, table.render())
}
