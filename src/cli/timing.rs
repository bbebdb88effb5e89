//! Times: a median and two percentiles over repetitions.

use host::{Device, Event, Stream};
use std::time::Instant;

/// A time a call, over repetitions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// Microseconds, median.
    pub median_us: f64,
    /// 10th percentile.
    pub p10_us: f64,
    /// 90th percentile.
    pub p90_us: f64,
    /// Calls that one repetition holds.
    pub calls: usize,
    /// Repetitions.
    pub replays: usize,
}

impl Timing {
    /// Of `times`, in microseconds, each of `calls` calls.
    pub fn new(mut times: Vec<f64>, calls: usize) -> Self {
        times.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let index = ((share * times.len() as f64) as usize).min(times.len().saturating_sub(1));
            times.get(index).map_or(f64::NAN, |time| time / calls as f64)
        };
        Timing { median_us: at(0.5), p10_us: at(0.1), p90_us: at(0.9), calls, replays: times.len() }
    }
}

/// How long and how often a row is repeated.
#[derive(Clone, Copy, Debug)]
pub struct Repetition {
    /// Seconds a row, within the limits.
    pub seconds: f64,
    /// The fewest repetitions.
    pub least: usize,
    /// The most.
    pub most: usize,
}

impl Repetition {
    /// How many repetitions of `one` second each.
    pub fn count(self, one: f64) -> usize {
        ((self.seconds / one.max(1e-9)) as usize).clamp(self.least, self.most)
    }
}

/// Times `calls` calls of `record` in a captured graph: one call to the driver a repetition, events around
/// it. `record` is given the number of the call, to take inputs in turns.
///
/// # Safety
/// The buffers that `record` names live until this returns.
pub unsafe fn on_device<X: From<host::Error>>(
    stream: &Stream,
    calls: usize,
    repetition: Repetition,
    mut record: impl FnMut(&Stream, usize) -> Result<(), X>,
) -> Result<Timing, X> {
    let device: &Device = stream.device();
    let (graph, recorded) =
        stream.capture(|stream| Ok((0..calls).try_for_each(|call| record(stream, call))))?;
    recorded?;
    let graph = graph.instantiate()?;
    let mut events = Vec::new();
    let mut replay = |first: usize, count: usize| -> Result<Vec<f64>, X> {
        while events.len() < 2 * (first + count) {
            events.push(Event::new(device)?);
        }
        let pairs: Vec<&[Event]> = events.chunks_exact(2).skip(first).take(count).collect();
        for pair in &pairs {
            stream.record(&pair[0])?;
            // SAFETY: this function's contract.
            unsafe { graph.launch(stream) }?;
            stream.record(&pair[1])?;
        }
        stream.synchronize()?;
        pairs.iter().map(|pair| Ok(pair[1].elapsed_ms(&pair[0])? * 1e3)).collect()
    };
    // The first pays for the upload of the graph; the second says how long one takes.
    let warm = replay(0, 2)?;
    let count = repetition.count(warm.last().copied().unwrap_or(0.0) * 1e-6);
    // What the clocks need to settle, in the same proportion for every row.
    replay(0, (count / 10).max(1))?;
    Ok(Timing::new(replay(0, count)?, calls))
}

/// Times `call` on the host's clock, after one call to warm up, unless that one alone took longer than a row
/// may.
pub fn on_host(repetition: Repetition, mut call: impl FnMut()) -> Timing {
    let mut once = || {
        let start = Instant::now();
        call();
        start.elapsed().as_secs_f64()
    };
    let first = once();
    if first > repetition.seconds && repetition.least <= 1 {
        return Timing::new(vec![first * 1e6], 1);
    }
    let count = repetition.count(first);
    Timing::new((0..count).map(|_| once() * 1e6).collect(), 1)
}
