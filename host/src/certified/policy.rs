//! What is promoted, and when a head is computed exactly: every threshold in one place, with named presets.

use kernels_gpu::certified::carried::MAX_RETRY;
use kernels_gpu::certified::layout::{BLOCK_TOKENS, Rounding};
use kernels_gpu::certified::parts::MAX_BLOCKS;
use kernels_gpu::certified::policy::{Thresholds, Watch, reason, rung};
use kernels_gpu::certified::ranking::MAX_DEPTH;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The thresholds of the ladder.
///
/// Rung by rung: the quantized pass alone; keys promoted by coverage; rung 1, more of them where the tail
/// stays heavy; rung 2, values promoted to a budget; rung 3, the head computed from the originals because a
/// bound is over its budget, or because the order of its heaviest blocks is in doubt; rung 4, all heads of
/// the sequence, because stored data have changed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Policy {
    /// τ_cov: the share of a head's attention mass that blocks with promoted keys shall cover; 0 to 1. With
    /// `renew` the mass of the trailing block is in the whole, which no list covers.
    pub coverage: f32,
    /// K_min: blocks whose keys are promoted in any case.
    pub min_keys: u32,
    /// K_max: blocks whose keys are promoted at the most.
    pub max_keys: u32,
    /// The least share of a head's attention mass that a block beyond `min_keys` must have for its keys to be
    /// promoted: what promoting it can take from E_key is as small a share of what E_key is.
    pub key_floor: f32,
    /// Rung 1: a tail of more than this share raises K_max to `expanded_keys`.
    pub expand_tail: f32,
    /// See `expand_tail`.
    pub expanded_keys: u32,
    /// Rung 2: values are promoted, the worst first, until E_val of the rest is at most this share of ν, ν,
    /// the largest norm of a value in the head's cache with its error η added.
    pub value_tolerance: f32,
    /// The local threshold of rung 2: a block's values are promoted only if its part of E_val, ρ_b·η_b, is at
    /// least this share of ν.
    pub value_floor: f32,
    /// Blocks whose values are promoted at the most.
    pub max_values: u32,
    /// Rung 3: a head whose bound is a larger share of its output's norm is computed from the originals.
    /// Infinite: nothing is.
    pub error_budget: f32,
    /// δ: the probability with which a head's bound may fail, over the chances of the codes' rounding, for
    /// queries and lists that do not depend on them (docs/certificate.md, "A bound that may fail"). Codes are
    /// rounded by chance then. 0: codes are the nearest ones, and the bound is the worst case.
    pub risk: f32,
    /// The share of a head's mass, as the step before had it, from which on a token brings its block from the
    /// originals, keys and values, though no list has it: a query may leap to where none has looked. A warp
    /// brings eight blocks at the most. With `renew` 0 every list is the step's own, and nothing is missed;
    /// benchmarks with originals at hand and `again` as it is by default do without, see
    /// [`SecondPass::Host`]. 0: none does.
    pub sight: f32,
    /// The query heads of a KV head use what any of them promotes: closer to exact for the same bytes. With
    /// `renew` they always do.
    pub per_group: bool,
    /// For how many steps what was chosen by the masses of one is promoted: from the step after it on, so
    /// that each step is one pass. Blocks that were filled since are promoted too, the two newest of them.
    /// The bound is that of the step's own weights, however old the choice; it grows with what the choice has
    /// missed. 0: each step chooses for itself, between two passes.
    pub renew: u32,
    /// For how many renewals of its list, at the most, a row of blocks is left to the dense rung alone, once
    /// the first step by a new list has found one of its up to eight heads over budget: the pass over
    /// quantized blocks would come on top of the originals. Then it is tried again; where that finds the
    /// same, it waits twice as long, from one renewal up. 0: every step tries.
    pub retry: u32,
    /// Whether rows of blocks with a head over budget are passed over a second time, by a list of the step's
    /// own masses, before what is over it still is computed from the originals. With
    /// [`renew`](Self::renew) 0 every list is the step's own.
    pub again: SecondPass,
    /// Whether outputs come with a certificate. Without, nothing is promoted and nothing known of the error:
    /// what is left is one pass over the quantized cache.
    pub certify: bool,
    /// Whose bound E_key is.
    pub bound: Bound,
    /// r: the order of the r heaviest promoted blocks is checked, and that no other block may be among them;
    /// a head that fails is computed from the originals. 0: it is not checked.
    pub ranking: u32,
    /// ε_guard: scores by quantized and by original keys may differ by Δ, the rounding of both and this much;
    /// a block where they do by more, or whose values differ by more than η, sends the sequence to rung 4.
    /// Infinite: nothing is compared. With `renew` blocks are compared ahead of the steps that make a list
    /// anew, one in so many, by the list that there is then and with what a scratch, if there is one, has of
    /// it; a sequence that was sent to rung 4 stays there, as its row of the [`Carried`](super::Carried) list
    /// says.
    pub canary: f32,
    /// The share of the blocks that are compared in each step though nobody promotes them. With `renew` so
    /// many times that share, all of them at the most, in a step that makes a list anew, and none in others.
    pub exploration: f32,
}

/// When a step has a second pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SecondPass {
    /// Where originals are in the host's memory, so that an exact head takes what the bus takes: as in the
    /// caches of models, on every device. On a GPU that has them at hand a pass takes longer than they do,
    /// and nothing is promoted on sight either. A step is not told where they are, and has the pass.
    Host,
    /// Always.
    #[serde(rename = "on")]
    Always,
    /// Never.
    #[serde(rename = "off")]
    Never,
}

/// A bound on the error by quantized keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Bound {
    /// The least of (1b), (1c) and (1d) of docs/certificate.md.
    Sound,
    /// The paper's (15), which is looser.
    Paper,
}

impl Policy {
    /// The names of the presets.
    pub const PRESETS: [&'static str; 4] = ["sound", "paper", "strict", "fast"];

    /// The default: what carries a noticeable share of a head's mass or of its error comes from the
    /// originals, for every head of a KV head, and no head's error is more than a twentieth of its output,
    /// but for one in a billion. Promotion pays where attention is concentrated; where it is not, errors of
    /// many tokens cancel, which the bound knows. One step in sixteen compares what is stored with the
    /// originals: promoted blocks that are at hand, and others with a probability of 1/256.
    pub const SOUND: Policy = Policy {
        coverage: 0.99,
        min_keys: 2,
        max_keys: 48,
        key_floor: 1.0 / 512.0,
        expand_tail: 1.0,
        expanded_keys: 48,
        value_tolerance: 0.003,
        value_floor: 1.0 / 8192.0,
        max_values: 96,
        error_budget: 0.05,
        risk: 1e-9,
        sight: 1.0 / 256.0,
        per_group: true,
        renew: 16,
        retry: 8,
        again: SecondPass::Host,
        certify: true,
        bound: Bound::Sound,
        ranking: 0,
        canary: 1e-6,
        exploration: 1.0 / 4096.0,
    };

    /// The default, without a look at what is stored.
    pub const UNWATCHED: Policy = Policy { canary: f32::INFINITY, exploration: 0.0, ..Policy::SOUND };

    /// The default's thresholds in steps that choose for themselves, whose bound is the worst case: that
    /// gates nothing, for it is often larger than the output.
    pub const CHOOSING: Policy =
        Policy { renew: 0, error_budget: f32::INFINITY, risk: 0.0, sight: 0.0, ..Policy::UNWATCHED };

    /// The thresholds of the paper's runs (its v_tol is a share too: its η is relative), its bound and its
    /// ranking check; the canary was off there. No rung looks at E_key.
    pub const PAPER: Policy = Policy {
        coverage: 0.995,
        min_keys: 2,
        max_keys: 128,
        key_floor: 0.0,
        expand_tail: 0.02,
        expanded_keys: 256,
        value_tolerance: 0.05,
        value_floor: 0.0,
        max_values: u32::MAX,
        error_budget: f32::INFINITY,
        risk: 0.0,
        sight: 0.0,
        per_group: false,
        renew: 0,
        bound: Bound::Paper,
        ranking: 1,
        ..Policy::UNWATCHED
    };

    /// Much is promoted, heads that attend broadly become dense, and the stored data are watched.
    pub const STRICT: Policy = Policy {
        coverage: 0.999,
        max_keys: 128,
        key_floor: 0.0,
        expand_tail: 0.002,
        expanded_keys: 512,
        value_tolerance: 0.01,
        value_floor: 0.0,
        max_values: 512,
        renew: 0,
        risk: 0.0,
        sight: 0.0,
        ranking: 1,
        canary: 1e-6,
        exploration: 1.0 / 256.0,
        ..Policy::SOUND
    };

    /// Few promotions, budgets that only what is hopeless exceeds.
    pub const FAST: Policy = Policy {
        coverage: 0.8,
        max_keys: 8,
        expanded_keys: 8,
        value_tolerance: 0.5,
        max_values: 8,
        error_budget: 0.5,
        sight: 0.0,
        ..Policy::UNWATCHED
    };

    /// Nothing is promoted and nothing gated: what is left is INT8/INT4 attention with a bound beside it.
    pub const CODES: Policy = Policy {
        coverage: 0.0,
        min_keys: 0,
        max_keys: 0,
        key_floor: 0.0,
        expand_tail: f32::INFINITY,
        expanded_keys: 0,
        value_tolerance: f32::INFINITY,
        value_floor: 0.0,
        max_values: 0,
        error_budget: f32::INFINITY,
        risk: 0.0,
        sight: 0.0,
        per_group: false,
        ..Policy::UNWATCHED
    };

    /// INT8/INT4 attention alone: no bound, and nothing done that only a bound would need.
    pub const BARE: Policy = Policy { certify: false, ..Policy::CODES };

    /// The preset of that name.
    pub fn preset(name: &str) -> Option<Policy> {
        Some(match name {
            "sound" => Policy::SOUND,
            "paper" => Policy::PAPER,
            "strict" => Policy::STRICT,
            "fast" => Policy::FAST,
            _ => return None,
        })
    }

    /// What is wrong with the thresholds, if anything.
    pub fn problem(&self) -> Option<String> {
        let shares = [
            ("coverage", self.coverage),
            ("key_floor", self.key_floor),
            ("exploration", self.exploration),
            ("risk", self.risk),
            ("sight", self.sight),
        ];
        for (name, value) in shares {
            if !(0.0..=1.0).contains(&value) {
                return Some(format!("{name} is {value}: give a share between 0 and 1"));
            }
        }
        let sizes = [
            ("value_floor", self.value_floor),
            ("expand_tail", self.expand_tail),
            ("value_tolerance", self.value_tolerance),
            ("error_budget", self.error_budget),
            ("canary", self.canary),
        ];
        for (name, value) in sizes {
            if value.is_nan() || value < 0.0 {
                return Some(format!("{name} is {value}: give a number from 0 up"));
            }
        }
        if self.risk > 0.0 && (self.renew == 0 || self.bound == Bound::Paper) {
            return Some(format!(
                "risk is {} and {}: only a step by a carried list, with our bound, knows what is likely; set risk to 0",
                self.risk,
                if self.renew == 0 { "renew is 0" } else { "bound is the paper's" }
            ));
        }
        if self.retry > MAX_RETRY {
            return Some(format!("retry is {}: give a count of renewals up to {MAX_RETRY}", self.retry));
        }
        if self.min_keys > self.max_keys {
            return Some(format!("min_keys is {} and max_keys {}: swap them", self.min_keys, self.max_keys));
        }
        if self.ranking > MAX_DEPTH {
            return Some(format!("ranking is {}: give a depth up to {MAX_DEPTH}", self.ranking));
        }
        if self.exploration > 0.0 && self.canary == f32::INFINITY {
            return Some(
                "exploration looks at blocks and canary is off: give canary an ε_guard, 1e-6 say, or set exploration to 0".into(),
            );
        }
        if self.renew > 0 && self.ranking > 0 {
            return Some(format!(
                "renew is {} and ranking is on: it looks at what a step has chosen for itself; set renew to 0",
                self.renew
            ));
        }
        if self.renew > 0 && self.certify && self.canary < f32::INFINITY && !self.promotes() {
            return Some(format!(
                "renew is {}, canary is on and nothing is ever promoted: what it finds is kept with the list; set canary to inf and exploration to 0, or renew to 0, or max_keys to 1",
                self.renew
            ));
        }
        if !self.certify && (self.ranking > 0 || self.canary < f32::INFINITY) {
            return Some("certify is off and ranking or canary is on: switch these off too".into());
        }
        if !self.certify && (self.max_keys > 0 || self.max_values > 0) {
            return Some(
                "certify is off and something would be promoted: set max_keys and max_values to 0".into(),
            );
        }
        None
    }

    /// Whether anything may ever be promoted.
    pub(super) fn promotes(&self) -> bool {
        self.certify && (self.max_keys > 0 || self.max_values > 0)
    }

    /// Whether a step promotes what an earlier one has chosen.
    pub(super) fn carries(&self) -> bool {
        self.renew > 0
    }

    /// Whether steps have a second pass, for rows of blocks with a head over budget.
    pub(super) fn passes_again(&self) -> bool {
        self.again != SecondPass::Never
            && self.carries()
            && self.promotes()
            && self.error_budget < f32::INFINITY
    }

    /// The policy of steps whose originals are on the device: no bus is saved by a second pass, or by what is
    /// promoted on sight.
    pub(super) fn with_originals_at_hand(self) -> Policy {
        match self.again {
            SecondPass::Host => Policy { again: SecondPass::Never, sight: 0.0, ..self },
            _ => self,
        }
    }

    /// For how many steps a list is used; 0 if there is none, or each step has its own.
    pub(crate) fn every(&self) -> u32 {
        if self.promotes() { self.renew } else { 0 }
    }

    /// ln(4/δ), rounded up; 0 where no risk is taken.
    fn log_odds(&self) -> f32 {
        if self.risk > 0.0 { (4.0 / f64::from(self.risk)).ln() as f32 * (1.0 + 1e-6) } else { 0.0 }
    }

    /// √(2 (`log_odds` + ln 2N)), rounded up, N the most tokens of a sequence.
    fn deviations(&self) -> f32 {
        let tokens = 2.0 * f64::from(MAX_BLOCKS * BLOCK_TOKENS);
        (2.0 * (f64::from(self.log_odds()) + tokens.ln())).sqrt() as f32 * (1.0 + 1e-6)
    }

    /// How the codes of a cache for this policy are rounded; `seed` of another layer is another one.
    pub fn rounding(&self, seed: u32) -> Rounding {
        if self.risk > 0.0 { Rounding::Stochastic { seed } } else { Rounding::Nearest }
    }

    /// As the kernels want it.
    pub(super) fn thresholds(&self) -> Thresholds {
        Thresholds {
            coverage: self.coverage,
            min_keys: self.min_keys,
            max_keys: self.max_keys,
            key_floor: self.key_floor,
            expand_tail: self.expand_tail,
            expanded_keys: self.expanded_keys,
            value_tolerance: self.value_tolerance,
            value_floor: self.value_floor,
            max_values: self.max_values,
            error_budget: self.error_budget,
            retry: self.retry,
            log_odds: self.log_odds(),
            deviations: self.deviations(),
            sight: if self.sight > 0.0 { f64::from(self.sight).log2() as f32 } else { f32::INFINITY },
            per_group: self.per_group as u32,
            certify: self.certify as u32,
            paper_bound: (self.bound == Bound::Paper) as u32,
        }
    }

    /// What is checked after a step, or ahead of one that makes a list anew, if anything.
    pub(super) fn watch(&self) -> Option<Watch> {
        let steps = self.renew.max(1);
        let share = (f64::from(self.exploration) * f64::from(steps)).min(1.0);
        let draw = (share * 2f64.powi(32)).round() as u64;
        let watch = Watch { depth: self.ranking, guard: self.canary, draw };
        (watch.depth > 0 || watch.compares()).then_some(watch)
    }
}

impl Default for Policy {
    fn default() -> Self {
        Policy::SOUND
    }
}

/// The rung that a head's output comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rung {
    /// Quantized blocks and the trailing block.
    Quantized,
    /// Some keys or values promoted.
    Promoted,
    /// The same after K_max was raised.
    Expanded,
    /// Computed from the originals, as `dense` does it.
    Dense,
    /// The same, with all heads of the sequence: stored data have changed.
    Layer,
}

impl Rung {
    /// That of a certificate.
    pub fn of(code: u32) -> Rung {
        match code {
            rung::QUANTIZED => Rung::Quantized,
            rung::PROMOTED => Rung::Promoted,
            rung::EXPANDED => Rung::Expanded,
            rung::DENSE => Rung::Dense,
            _ => Rung::Layer,
        }
    }

    /// Whether it was computed from the originals.
    pub fn is_dense(self) -> bool {
        self >= Rung::Dense
    }
}

impl fmt::Display for Rung {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Rung::Quantized => "quantized",
            Rung::Promoted => "promoted",
            Rung::Expanded => "expanded",
            Rung::Dense => "dense",
            Rung::Layer => "layer",
        })
    }
}

/// The reasons of a certificate in words; empty where nothing was wrong.
pub fn reasons(bits: u32) -> Vec<&'static str> {
    // What was not tried because of what has changed was over no budget.
    let bits = if bits & reason::CANARY != 0 { bits & !reason::EARLIER } else { bits };
    let names = [
        (reason::ERROR_BUDGET, "the bound over its budget"),
        (reason::EARLIER, "an earlier step has found a head of the row over budget"),
        (reason::QUERY_NOT_FINITE, "the query is not finite"),
        (reason::SCORE_RANGE, "scores beyond what the records hold"),
        (reason::NO_BOUND, "no finite bound"),
        (reason::RANKING, "original keys put the heaviest blocks in another order"),
        (reason::BOUNDARY, "a quantized block may be among the heaviest"),
        (reason::KEY_CANARY, "scores further apart than stored keys allow"),
        (reason::VALUE_CANARY, "values further apart than stored values allow"),
        (reason::RESIDENT, "all originals are resident in the GPU's memory"),
    ];
    names.into_iter().filter(|(bit, _)| bits & bit != 0).map(|(_, name)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_are_sound_and_the_default_looks_at_what_is_stored() {
        for name in Policy::PRESETS {
            assert_eq!(Policy::preset(name).expect("a preset").problem(), None, "{name}");
        }
        let watch = Policy::SOUND.watch().expect("it compares");
        assert_eq!((watch.depth, watch.guard, watch.draw), (0, 1e-6, 1 << 24));
        assert!(Policy::UNWATCHED.watch().is_none() && Policy::FAST.watch().is_none());
        assert!(Policy::BARE.watch().is_none() && Policy::BARE.problem().is_none());
        let watch = Policy { exploration: 1.0, ..Policy::STRICT }.watch().expect("it checks");
        assert_eq!((watch.depth, watch.guard, watch.draw), (1, 1e-6, 1 << 32));
        let carried = |exploration| Policy { canary: 0.0, exploration, ..Policy::SOUND };
        assert_eq!(carried(1.0 / 256.0).problem(), None);
        assert_eq!(carried(1.0 / 256.0).watch().expect("it checks").draw, 1 << 28);
        assert_eq!(carried(0.5).watch().expect("it checks").draw, 1 << 32);
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_name() {
        let refused = |policy: Policy, word: &str| {
            let problem = policy.problem().expect("refused");
            assert!(problem.contains(word), "{problem}");
        };
        refused(Policy { ranking: 17, ..Policy::SOUND }, "ranking is 17");
        refused(Policy { ranking: 1, ..Policy::SOUND }, "set renew to 0");
        refused(Policy { exploration: 1.5, ..Policy::STRICT }, "exploration is 1.5");
        refused(Policy { exploration: 0.1, ..Policy::UNWATCHED }, "canary is off");
        refused(Policy { canary: f32::NAN, ..Policy::SOUND }, "canary is NaN");
        refused(Policy { canary: 0.0, ..Policy::BARE }, "certify is off");
        refused(Policy { canary: 0.0, ..Policy::CODES }, "or renew to 0, or max_keys to 1");
        refused(Policy { retry: 64, ..Policy::SOUND }, "renewals up to 63");
        refused(Policy { ranking: 1, renew: 0, ..Policy::BARE }, "certify is off");
        refused(Policy { renew: 0, ..Policy::SOUND }, "set risk to 0");
        refused(Policy { bound: Bound::Paper, ..Policy::SOUND }, "the paper's");
        refused(Policy { retry: 256, ..Policy::SOUND }, "retry is 256");
        refused(Policy { risk: f32::NAN, ..Policy::SOUND }, "risk is NaN");
    }

    #[test]
    fn what_spares_the_bus_is_for_originals_behind_it() {
        let at_hand = Policy::SOUND.with_originals_at_hand();
        assert!(!at_hand.passes_again() && at_hand.sight == 0.0 && Policy::SOUND.passes_again());
        // As somebody has said.
        for again in [SecondPass::Always, SecondPass::Never] {
            let said = Policy { again, ..Policy::SOUND };
            assert_eq!(said.with_originals_at_hand(), said);
        }
        assert_eq!(Policy { sight: 0.0, ..Policy::SOUND }.thresholds().sight, f32::INFINITY);
        assert_eq!(Policy::SOUND.thresholds().sight, -8.0);
    }

    #[test]
    fn every_reason_has_its_words() {
        // What was not tried because of what has changed says that.
        let all = [reasons(u32::from(u16::MAX)), reasons(reason::EARLIER)].concat();
        assert_eq!(all.len(), 10);
        assert_eq!(reasons(reason::CANARY).len(), 2);
        assert_eq!(Rung::of(rung::LAYER), Rung::Layer);
        assert!(Rung::Layer.is_dense() && Rung::Dense.is_dense() && !Rung::Expanded.is_dense());
    }
}
