//! What is known of a step, in terms of no scheme.

mod audited;
mod relative;

pub use audited::Audited;
pub use relative::{Relative, Shares};

use super::Held;
use serde::{Deserialize, Serialize};

/// What a head's output was computed from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// What the scheme stores, alone.
    Stored,
    /// That, and the originals of some blocks.
    Mixed,
    /// The originals alone, where the scheme stores something else: its exact fallback.
    Originals,
}

/// What is known of the attention of one query head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadReport {
    /// The most that the head's output, a row of head_dim numbers, can be away from exact attention, in
    /// the Euclidean norm; a scheme may say so but for a probability that it states. Not finite: the
    /// scheme has no bound for this head. `None`: it never has one.
    pub bound: Option<f32>,
    /// The norm of that output, where the scheme knows it.
    pub norm: Option<f32>,
    /// What the output was computed from.
    pub source: Source,
    /// Blocks of 16 tokens whose keys were used from the originals.
    pub original_keys: u32,
    /// The same of values.
    pub original_values: u32,
    /// Tokens of the sequence that were not attended to.
    pub skipped: u32,
    /// The most that these can have of the head's attention mass; `None` where nothing is known of it.
    pub skipped_mass: Option<f32>,
    /// What was found where the head was held against all of its sequence.
    pub audit: Option<Audit>,
    /// Whether stored data of its sequence, in its layer, were found to have changed.
    pub changed: bool,
}

/// A head whose output was computed a second time, from everything there is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Audit {
    /// The share of the head's attention mass that was skipped.
    pub mass: f32,
    /// What the output is off by, in the Euclidean norm.
    pub error: f32,
    /// The norm of the output as it should be.
    pub norm: f32,
}

impl HeadReport {
    /// Of a head that is computed from what is stored, all of it, and of whose error nothing is known.
    pub const STORED: HeadReport = HeadReport {
        bound: None,
        norm: None,
        source: Source::Stored,
        original_keys: 0,
        original_values: 0,
        skipped: 0,
        skipped_mass: None,
        audit: None,
        changed: false,
    };
}

/// What is known of the last step of decoding.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepReport {
    /// [layers, sequences that are there, q_heads]; empty where the scheme says nothing, or the last chunk
    /// was a prompt's.
    pub heads: Vec<HeadReport>,
}

impl StepReport {
    /// What it says of one sequence of a cache that holds what it held at the step: [layers, q_heads].
    pub fn of_sequence(&self, held: Held<'_>, sequence: usize) -> StepReport {
        let there = |sequences: &[Option<usize>]| sequences.iter().flatten().count();
        let before = there(&held.sequences[..sequence.min(held.sequences.len())]);
        let all = there(held.sequences).max(1);
        let rows = self.heads.chunks(held.geometry.q_heads.max(1)).skip(before).step_by(all);
        StepReport { heads: rows.flatten().copied().collect() }
    }
}

/// Originals that steps have used so far, in all layers: tiles of 16 tokens of one KV head, of keys or of
/// values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Tiles that were in the device's memory.
    pub found: u64,
    /// Tiles that were read from the host's.
    pub read: u64,
    /// Bytes of the latter.
    pub read_bytes: u64,
}

impl Traffic {
    /// What has come since `before`.
    pub fn since(self, before: Traffic) -> Traffic {
        Traffic {
            found: self.found - before.found,
            read: self.read - before.read,
            read_bytes: self.read_bytes - before.read_bytes,
        }
    }

    /// The share of the tiles that was in the device's memory; 0 if there were none.
    pub fn found_share(self) -> f64 {
        self.found as f64 / ((self.found + self.read) as f64).max(1.0)
    }
}

/// What the reports of some steps say together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Heads, of all layers and steps.
    pub heads: u64,
    /// Heads for which the scheme states a bound, finite or not.
    pub bounded_heads: u64,
    /// The largest bound on a head's error: the Euclidean norm of an output row. `None` where a stated bound
    /// is not finite, or none is stated.
    pub worst_bound: Option<f32>,
    /// Bounds over the norms of what they bound, of the heads of which both are known.
    #[serde(skip_deserializing, serialize_with = "as_shares", skip_serializing_if = "Option::is_none")]
    pub relative_bound: Option<Relative>,
    /// Heads some of whose blocks were used from their originals.
    pub mixed_heads: u64,
    /// Heads that were computed from the originals alone: the exact fallback.
    pub exact_heads: u64,
    /// Heads of a layer whose stored data of the sequence were found to have changed.
    #[serde(default, skip_serializing_if = "is_none")]
    pub changed_heads: u64,
    /// Blocks whose keys were used from their originals.
    pub original_keys: u64,
    /// Blocks whose values were.
    pub original_values: u64,
    /// Tokens that were not attended to.
    pub skipped: u64,
    /// The largest share of a head's mass that skipped tokens can have; `None` where nothing is known of it.
    pub worst_skipped_mass: Option<f32>,
    /// What a sample of the heads that skipped tokens has shown; `None` where none was looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub audited: Option<Audited>,
}

impl Summary {
    /// That of one step, if its scheme says anything.
    pub fn of(step: &StepReport) -> Option<Summary> {
        step.heads.iter().map(|head| Summary::of_head(*head)).reduce(Summary::and)
    }

    fn of_head(head: HeadReport) -> Summary {
        Summary {
            heads: 1,
            bounded_heads: u64::from(head.bound.is_some()),
            worst_bound: head.bound.filter(|bound| bound.is_finite()),
            relative_bound: head.bound.zip(head.norm).and_then(|(bound, norm)| Relative::of(bound, norm)),
            mixed_heads: u64::from(head.source == Source::Mixed),
            exact_heads: u64::from(head.source == Source::Originals),
            changed_heads: head.changed.into(),
            original_keys: head.original_keys.into(),
            original_values: head.original_values.into(),
            skipped: head.skipped.into(),
            worst_skipped_mass: head.skipped_mass,
            audited: head.audit.map(Audited::of),
        }
    }

    /// Both together.
    pub fn and(self, other: Summary) -> Summary {
        let worst = |a: Option<f32>, b: Option<f32>| a.zip(b).map(|(a, b)| a.max(b));
        Summary {
            heads: self.heads + other.heads,
            bounded_heads: self.bounded_heads + other.bounded_heads,
            worst_bound: worst(self.worst_bound, other.worst_bound),
            relative_bound: match (self.relative_bound, other.relative_bound) {
                (Some(all), Some(more)) => Some(all.and(more)),
                (all, more) => all.or(more),
            },
            mixed_heads: self.mixed_heads + other.mixed_heads,
            exact_heads: self.exact_heads + other.exact_heads,
            changed_heads: self.changed_heads + other.changed_heads,
            original_keys: self.original_keys + other.original_keys,
            original_values: self.original_values + other.original_values,
            skipped: self.skipped + other.skipped,
            worst_skipped_mass: match (self.skipped, other.skipped) {
                (0, _) => other.worst_skipped_mass,
                (_, 0) => self.worst_skipped_mass,
                _ => worst(self.worst_skipped_mass, other.worst_skipped_mass),
            },
            audited: match (self.audited, other.audited) {
                (Some(all), Some(more)) => Some(all.and(more)),
                (all, more) => all.or(more),
            },
        }
    }

    /// Both together, where either may be missing.
    pub fn join(all: Option<Summary>, step: Option<Summary>) -> Option<Summary> {
        match (all, step) {
            (Some(all), Some(step)) => Some(all.and(step)),
            (all, step) => all.or(step),
        }
    }

    /// In words: what a scheme's user wants to know at the end of a run.
    pub fn line(&self) -> String {
        let mut parts = Vec::new();
        if self.bounded_heads > 0 {
            parts.push(match (self.worst_bound, self.relative_bound) {
                (None, _) => "no finite bound for some heads".into(),
                (Some(_), Some(relative)) => {
                    let Shares { median, most, worst } = relative.shares();
                    let percent = |share: f32| format!("{} %", significant(100.0 * share));
                    format!(
                        "bounds are {} of the head's output in the median, {} in 99 of 100, {} at most",
                        percent(median),
                        percent(most),
                        percent(worst)
                    )
                }
                (Some(bound), None) => format!("bound at most {bound:.3}"),
            });
        }
        if self.skipped > 0 {
            parts.push(match self.worst_skipped_mass {
                Some(mass) => format!("skipped mass at most {mass:.2e}"),
                None if self.audited.is_none() => "nothing known of the skipped mass".into(),
                None => "no bound on the skipped mass".into(),
            });
        }
        parts.extend(self.audited.map(|audited| audited.line()));
        if self.bounded_heads > 0 || self.exact_heads > 0 {
            parts.push(format!("{} of {} heads computed exactly", self.exact_heads, self.heads));
        }
        if self.changed_heads > 0 {
            parts.push(format!(
                "{} of them because stored data were found to have changed",
                self.changed_heads
            ));
        }
        parts.join(", ")
    }
}

/// Most reports have none of it.
#[allow(clippy::trivially_copy_pass_by_ref)] // as serde calls it
fn is_none(count: &u64) -> bool {
    *count == 0
}

/// Two digits that count.
fn significant(x: f32) -> String {
    let digits = if x > 0.0 { (1.0 - x.log10().floor()).clamp(0.0, 6.0) as usize } else { 1 };
    format!("{x:.digits$}")
}

/// A report has the three numbers.
fn as_shares<S: serde::Serializer>(
    relative: &Option<Relative>,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    relative.map(|relative| relative.shares()).serialize(serializer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::{Capacity, Geometry};

    fn head(bound: f32, source: Source) -> HeadReport {
        HeadReport { bound: Some(bound), source, original_keys: 2, ..HeadReport::STORED }
    }

    #[test]
    fn heads_are_counted_by_source_and_the_worst_bound_counts() {
        let heads = vec![
            head(1.25, Source::Stored),
            head(0.75, Source::Mixed),
            head(2.25, Source::Mixed),
            head(0.25, Source::Originals),
        ];
        let one = Summary::of(&StepReport { heads }).expect("some");
        assert_eq!((one.heads, one.mixed_heads, one.exact_heads, one.original_keys), (4, 2, 1, 8));
        assert_eq!((one.bounded_heads, one.worst_bound), (4, Some(2.25)));
        let heads = vec![head(f32::NAN, Source::Stored), head(0.25, Source::Stored)];
        let unbounded = Summary::of(&StepReport { heads }).expect("one");
        assert_eq!(unbounded.worst_bound, None);
        assert_eq!((one.and(unbounded).worst_bound, one.and(one).heads), (None, 8));
        assert_eq!(Summary::of(&StepReport::default()), None);
    }

    #[test]
    fn what_has_changed_is_said() {
        let heads =
            vec![HeadReport { changed: true, ..head(0.5, Source::Originals) }, head(0.25, Source::Stored)];
        let summary = Summary::of(&StepReport { heads }).expect("some");
        assert_eq!(summary.changed_heads, 1);
        assert!(summary.line().ends_with("1 of them because stored data were found to have changed"));
        let sound = Summary::of(&StepReport { heads: vec![head(0.25, Source::Stored)] }).expect("one");
        assert!(!sound.line().contains("changed") && sound.and(summary).changed_heads == 1);
        let written = |summary| serde_json::to_string(&summary).expect("JSON");
        assert!(!written(sound).contains("changed") && written(summary).contains("\"changed_heads\":1"));
    }

    #[test]
    fn a_sequence_has_its_rows_of_every_layer() {
        let geometry = Geometry { layers: 2, q_heads: 2, kv_heads: 1, head_dim: 64 };
        let sequences = [Some(5), None, Some(7)];
        let held = Held { geometry, capacity: Capacity { tokens: 8, sequences: 3 }, sequences: &sequences };
        let heads = (0..8).map(|i| head(i as f32, Source::Stored)).collect();
        let bounds = |sequence| {
            let own = StepReport { heads: Vec::clone(&heads) }.of_sequence(held, sequence);
            own.heads.iter().filter_map(|head| head.bound).collect::<Vec<_>>()
        };
        assert_eq!((bounds(0), bounds(2)), (vec![0.0, 1.0, 4.0, 5.0], vec![2.0, 3.0, 6.0, 7.0]));
        assert_eq!(StepReport::default().of_sequence(held, 2), StepReport::default());
    }

    #[test]
    fn what_is_not_known_of_skipped_tokens_is_not_known_of_all() {
        let skips = |skipped, skipped_mass| {
            let head = HeadReport { skipped, skipped_mass, ..HeadReport::STORED };
            Summary::of(&StepReport { heads: vec![head] }).expect("one")
        };
        let known = skips(16, Some(0.25)).and(skips(32, Some(0.125)));
        assert_eq!((known.skipped, known.worst_skipped_mass), (48, Some(0.25)));
        assert_eq!(known.and(skips(0, None)).worst_skipped_mass, Some(0.25));
        assert_eq!(known.and(skips(16, None)).worst_skipped_mass, None);
    }

    #[test]
    fn traffic_is_a_difference_of_counters() {
        let (before, after) =
            (Traffic { found: 3, read: 1, read_bytes: 64 }, Traffic { found: 9, read: 3, read_bytes: 192 });
        assert_eq!(after.since(before), Traffic { found: 6, read: 2, read_bytes: 128 });
        assert_eq!((after.since(before).found_share(), Traffic::default().found_share()), (0.75, 0.0));
    }
}
