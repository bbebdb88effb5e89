//! A step of decoding over a full cache.

use super::memory::CacheMemory;
use super::{Arguments, Chosen, Subject};
use crate::cli::failure::Failure;
use crate::cli::table::{Align, Table};
use crate::cli::text;
use crate::cli::timing::Timing;
use crate::cli::tokens::short;
use host::kv::{Capacity, Summary};
use host::model::kernels::Choice;
use serde::Serialize;
use std::time::Instant;

/// Steps before those that count.
pub const WARM: usize = 20;
/// What every step reads.
const TOKEN: u32 = 1;

/// One scheme at one context.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub kv: String,
    /// The option whose file was made up.
    pub made_up: Option<&'static str>,
    /// Tokens of each sequence at the last step.
    pub context: u32,
    /// Sequences.
    pub batch: u32,
    pub steps: usize,
    /// Of a step, the host's wait for the token included.
    pub median_us: f64,
    pub p10_us: f64,
    pub p90_us: f64,
    pub tokens_per_second: f64,
    /// What a step reads at least.
    pub weight_bytes: u64,
    pub kv_bytes: u64,
    /// What they take at the memory's speed; GPU only.
    pub read_us: Option<f64>,
    /// The rest.
    pub fixed_us: Option<f64>,
    /// The dense scheme's median at this context and batch over this one's.
    pub times_dense: Option<f64>,
    /// After the last step.
    #[serde(flatten)]
    pub memory: CacheMemory,
    /// Launches and copies of the graph.
    pub launches: Option<usize>,
    /// Seconds that filling the cache took.
    pub fill_seconds: f64,
    /// Of the steps that count.
    pub report: Option<Summary>,
    /// Bytes that a step read from the originals in the host's memory.
    pub bus_bytes: Option<u64>,
    /// Of the tiles that were used from their originals, the share that was on the device already.
    pub found: Option<f64>,
}

/// Times the steps of a scheme at a context, of so many sequences. `speed` is the memory's, bytes a second.
///
/// # Errors
/// A cache that cannot be opened or has no room; what the device reports.
pub fn measure(
    subject: &mut Subject,
    chosen: &Chosen,
    (context, batch): (u32, u32),
    speed: Option<f64>,
    arguments: &Arguments,
) -> Result<Row, Failure> {
    let (tokens, steps) = (context as usize, arguments.steps as usize);
    let mut cache = subject.cache(chosen, Capacity { tokens, sequences: batch as usize })?;
    let runner = &mut subject.runner;
    let start = Instant::now();
    // The steps, those to warm up, and the token before them.
    let before = tokens.saturating_sub(steps + WARM + 1);
    runner.fill(&mut *cache, 0, before, arguments.key_scale)?;
    for _ in 1..batch {
        let sequence = runner.join(&mut *cache)?;
        runner.fill(&mut *cache, sequence, before, arguments.key_scale)?;
    }
    let fill_seconds = start.elapsed().as_secs_f64();
    let filled = cache.bytes();
    let mut first = TOKEN;
    for sequence in 0..batch as usize {
        first = runner.prefill_of(sequence, &[TOKEN], &mut *cache, (Choice::Greedy, 0))?;
    }
    let before = runner.traffic(&*cache)?;
    let mut decoder = runner.decoder(first, &mut *cache, Choice::Greedy)?;
    let (mut times, mut report) = (Vec::with_capacity(steps), None::<Summary>);
    for step in 0..WARM + steps {
        if !arguments.chosen_tokens {
            decoder.set_token(TOKEN)?;
        }
        let start = Instant::now();
        decoder.step()?;
        let time = start.elapsed().as_secs_f64() * 1e6;
        if step < WARM {
            continue;
        }
        times.push(time);
        report = Summary::join(report, Summary::of(&decoder.cache().report()?));
    }
    let launches = decoder.graph_len();
    drop(decoder);
    runner.check_cache(&mut *cache)?;
    let traffic = runner.traffic(&*cache)?.zip(before).map(|(after, before)| after.since(before));
    let timing = Timing::new(times, 1);
    let (weight_bytes, kv_bytes) = (runner.step_bytes(), cache.step_bytes());
    let read_us = speed.map(|speed| (weight_bytes + kv_bytes) as f64 / speed * 1e6);
    Ok(Row {
        kv: chosen.name.clone(),
        made_up: chosen.made_up,
        context,
        batch,
        steps,
        median_us: timing.median_us,
        p10_us: timing.p10_us,
        p90_us: timing.p90_us,
        tokens_per_second: f64::from(batch) * 1e6 / timing.median_us,
        weight_bytes,
        kv_bytes,
        read_us,
        fixed_us: read_us.map(|read| timing.median_us - read),
        times_dense: None,
        memory: CacheMemory::of(&*cache, filled),
        launches,
        fill_seconds,
        report,
        bus_bytes: traffic.map(|traffic| traffic.read_bytes / (WARM + steps) as u64),
        found: traffic.filter(|used| used.found + used.read > 0).map(host::kv::Traffic::found_share),
    })
}

/// The table; nothing if there are no rows.
pub fn table(rows: &[Row]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let mut table = Table::new(&[
        ("KV", Align::Left),
        ("context", Align::Right),
        ("batch", Align::Right),
        ("step", Align::Right),
        ("tokens/s", Align::Right),
        ("dense/this", Align::Right),
        ("bytes take", Align::Right),
        ("fixed", Align::Right),
        ("cache", Align::Right),
        ("of f16", Align::Right),
        ("over the bus", Align::Right),
        ("found", Align::Right),
        ("heads computed exactly", Align::Right),
    ]);
    let or_nothing = |x: Option<f64>| x.map_or_else(String::new, text::microseconds);
    for row in rows {
        table.row([
            row.kv.clone(),
            short(row.context),
            row.batch.to_string(),
            text::microseconds(row.median_us),
            format!("{:.1}", row.tokens_per_second),
            row.times_dense.map_or_else(String::new, |ratio| format!("{ratio:.2}")),
            or_nothing(row.read_us),
            or_nothing(row.fixed_us),
            text::bytes(row.memory.cache_bytes),
            format!("{:.3}", row.memory.cache_of_f16),
            row.bus_bytes.map_or_else(String::new, text::bytes),
            row.found.map_or_else(String::new, |share| format!("{:.0} %", 100.0 * share)),
            row.report.map_or_else(String::new, |known| format!("{} of {}", known.exact_heads, known.heads)),
        ]);
    }
    table.render()
}
