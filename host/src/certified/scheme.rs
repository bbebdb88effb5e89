//! What the system declares: its schemes, their presets, and each threshold of a [`Policy`] as an option.

use super::{
    Annotation, BLOCK_TOKENS, Bound, CertifiedCache, Error as Own, Layout, Policy, SecondPass, Settings,
    TileLayout, cases, proof, workload,
};
use crate::kv::proof::by_workload;
use crate::kv::{Error, Kind, OptionSpec, Preset, Result, Scheme, Selection, System, Value};
use kernels_gpu::certified::carried::MAX_RETRY;

/// The system.
pub static SYSTEM: System = System {
    name: "certified",
    about: "attention over INT8 keys and INT4 values with a bound on every head's error",
    kernels: || kernels_gpu::certified::kernels().collect(),
    cases: cases::cases,
    schemes: &[
        Scheme {
            name: "int8-int4",
            about: "keys in 8 bits, values in 4, nothing known of the error",
            presets: &[],
            options: &[],
            step_bytes: |_, head_dim, tokens| tile_bytes(head_dim, Layout::Compact) * tokens as f64,
            check: |_| Ok(()),
            open: |opening| {
                Ok(Box::new(CertifiedCache::new(
                    opening.device,
                    opening.geometry,
                    opening.capacity,
                    Policy::BARE,
                )?))
            },
            workload: workload::open_bare,
            proof: by_workload,
            calibrate: None,
        },
        Scheme {
            name: "certified",
            about: "the same with a bound on every head's error, and exact fallback",
            presets: &PRESETS,
            options: &OPTIONS,
            step_bytes: |selection, head_dim, tokens| {
                let annotation = size_of::<Annotation>() as f64 / f64::from(BLOCK_TOKENS);
                (tile_bytes(head_dim, layout(selection)) + annotation) * tokens as f64
            },
            check: |selection| settings(selection).map(|_| ()),
            open: |opening| {
                let selection = opening.selection;
                let settings = settings(selection)?;
                let (device, geometry) = (opening.device, opening.geometry);
                Ok(Box::new(CertifiedCache::with_settings(device, geometry, opening.capacity, settings)?))
            },
            workload: workload::open,
            proof: proof::prove_scheme,
            calibrate: None,
        },
    ],
};

/// Bytes of a token of a tile.
fn tile_bytes(head_dim: u32, layout: Layout) -> f64 {
    f64::from(TileLayout::new(head_dim, layout).bytes) / f64::from(BLOCK_TOKENS)
}

const PRESETS: [Preset; 4] = [
    Preset {
        name: "sound",
        about: "no head is off by more than 5 % of its output, but for one in a billion; what is stored is watched",
    },
    Preset { name: "paper", about: "the paper's thresholds, bound and ranking check; no budgets" },
    Preset { name: "strict", about: "much is promoted, and what is stored is watched closely" },
    Preset { name: "fast", about: "little is promoted, only hopeless heads are exact" },
];

/// Sets a threshold; the value is of the option's kind.
type Set = fn(&mut Policy, &Value);

const SHARE: Kind = Kind::Number(0.0, 1.0);
const SIZE: Kind = Kind::Number(0.0, f64::INFINITY);
const BLOCKS: Kind = Kind::Count(0, u32::MAX as u64);

/// Defines thresholds: the field's name, its option's kind, how a value is read, what it is for.
macro_rules! thresholds {
    ($($field:ident: $kind:expr, $read:expr, $about:literal;)*) => {
        const THRESHOLDS: &[(OptionSpec, Set)] = &[$((
            OptionSpec { name: stringify!($field), about: $about, kind: $kind },
            |policy, value| policy.$field = $read(value),
        )),*];
    };
}

thresholds! {
    coverage: SHARE, number, "share of a head's mass that promoted keys shall cover";
    min_keys: BLOCKS, count, "blocks of 16 tokens whose keys are promoted in any case";
    max_keys: BLOCKS, count, "blocks whose keys are promoted at the most";
    key_floor: SHARE, number, "least share of the mass that a block's keys are promoted for";
    expand_tail: SIZE, number, "tail mass from which max_keys becomes expanded_keys";
    expanded_keys: BLOCKS, count, "max_keys where the tail is heavy";
    value_tolerance: SIZE, number, "share of the largest value that E_val is brought down to";
    value_floor: SIZE, number, "least part of E_val that a block's values are promoted for";
    max_values: BLOCKS, count, "blocks whose values are promoted at the most";
    error_budget: SIZE, number, "share of its output's norm that a head's bound may be before it is exact";
    risk: SHARE, number, "probability with which a bound may fail; 0: never, and codes are the nearest ones";
    sight: SHARE, number, "share of the mass from which on a token brings its block, listed or not; 0, or originals at hand and again=host: none does";
    per_group: Kind::Switch, switch, "query heads of a KV head share what any of them promotes";
    renew: BLOCKS, count, "steps that a list of promoted blocks serves; 0: each step makes its own";
    retry: Kind::Count(0, MAX_RETRY as u64), count, "renewals that heads beside one over budget stay exact for, at the most; 0: none";
    again: Kind::Word(&["host", "on", "off"]), second_pass, "heads over budget get a list of their own masses before they are exact; host: where originals are there";
    bound: Kind::Word(&["sound", "paper"]), bound, "whose bound E_key is";
    ranking: BLOCKS, count, "heaviest blocks whose order is checked; 0: none";
    canary: SIZE, number, "how far scores of promoted blocks may be apart beyond their bound; inf: nothing is compared";
    exploration: SHARE, number, "share of other blocks that are compared a step, those of renew steps in one";
}

/// What is no threshold.
const OTHERS: [OptionSpec; 3] = [
    OptionSpec {
        name: "layout",
        about: "scales of keys in f16 or, as in the paper, f32",
        kind: Kind::Word(&["compact", "paper"]),
    },
    OptionSpec {
        name: "scratch",
        about: "share of the blocks whose originals a GPU keeps after use",
        kind: SHARE,
    },
    OptionSpec {
        name: "resident",
        about: "tokens whose originals a GPU keeps at the least: one sequence has exact attention until it has more than fit; 0: never",
        kind: Kind::Count(0, 1 << 31),
    },
];

const OPTIONS: [OptionSpec; THRESHOLDS.len() + OTHERS.len()] = {
    let mut all = [OTHERS[0]; THRESHOLDS.len() + OTHERS.len()];
    let mut i = 0;
    while i < all.len() {
        all[i] = if i < THRESHOLDS.len() { THRESHOLDS[i].0 } else { OTHERS[i - THRESHOLDS.len()] };
        i += 1;
    }
    all
};

fn number(value: &Value) -> f32 {
    if let Value::Number(number) = value { *number as f32 } else { f32::NAN }
}

fn count(value: &Value) -> u32 {
    if let Value::Count(count) = value { *count as u32 } else { u32::MAX }
}

fn switch(value: &Value) -> bool {
    *value == Value::Switch(true)
}

fn bound(value: &Value) -> Bound {
    if *value == Value::Word("paper") { Bound::Paper } else { Bound::Sound }
}

fn second_pass(value: &Value) -> SecondPass {
    match value {
        Value::Word("on") => SecondPass::Always,
        Value::Word("off") => SecondPass::Never,
        _ => SecondPass::Host,
    }
}

/// The thresholds of a selection of `certified`.
///
/// # Errors
/// Those that make no sense together.
pub(super) fn policy(selection: &Selection) -> Result<Policy> {
    let mut policy = selection.preset().and_then(Policy::preset).unwrap_or_default();
    for (name, value) in selection.values() {
        if let Some((_, set)) = THRESHOLDS.iter().find(|(spec, _)| spec.name == name) {
            set(&mut policy, value);
        }
    }
    unwatch(&mut policy, selection);
    let problem = policy.problem().map(|what| Own::Policy { what });
    let carried = (layout(selection) == Layout::Paper && policy.renew > 0)
        .then_some(Own::CarriedLayout { renew: policy.renew });
    problem.or(carried).map_or(Ok(policy), |error| Err(Error::refused(error)))
}

/// Switches off what nobody has asked for by name: a preset's look at what is stored, where options make its
/// steps choose for themselves, each of which would compare, or promote nothing; and exploration where the
/// canary is off.
fn unwatch(policy: &mut Policy, selection: &Selection) {
    let preset = selection.preset().and_then(Policy::preset).unwrap_or_default();
    let [canary, exploration] = ["canary", "exploration"].map(|name| selection.value(name).is_some());
    let other = preset.renew > 0 && (policy.renew == 0 || !policy.promotes());
    if other && !canary && !exploration {
        policy.canary = f32::INFINITY;
    }
    if policy.canary == f32::INFINITY && !exploration {
        policy.exploration = 0.0;
    }
}

/// How the quantized cache is stored.
pub(super) fn layout(selection: &Selection) -> Layout {
    if selection.word("layout", "compact") == "paper" { Layout::Paper } else { Layout::Compact }
}

/// How a cache is made. With no scratch no sequence is resident either, if nobody says so.
fn settings(selection: &Selection) -> Result<Settings> {
    let policy = policy(selection)?;
    let mut settings = Settings { layout: layout(selection), ..Settings::new(policy) };
    if let Some(Value::Number(share)) = selection.value("scratch") {
        settings.scratch = *share;
        settings.resident = if *share > 0.0 { settings.resident } else { 0 };
    }
    if let Some(value) = selection.value("resident") {
        settings.resident = count(value);
    }
    if settings.resident > 0 && policy.renew == 0 && selection.value("resident").is_some() {
        return Err(Error::refused(Own::Residents { renew: policy.renew }));
    }
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selection(text: &str) -> Result<Selection> {
        Selection::parse(text, SYSTEM.schemes.iter())
    }

    #[test]
    fn presets_are_those_of_the_policy_and_options_change_them() {
        assert_eq!(PRESETS.map(|preset| preset.name), Policy::PRESETS);
        for name in Policy::PRESETS {
            let policy = policy(&selection(&format!("certified:{name}")).expect(name)).expect(name);
            assert_eq!(Some(policy), Policy::preset(name));
        }
        let changed = selection("certified/value_floor=0/max_keys=7/per_group=off").expect("options");
        let policy = policy(&changed).expect("they go together");
        assert_eq!((policy.value_floor, policy.max_keys, policy.per_group), (0.0, 7, false));
        assert_eq!(policy.coverage, Policy::SOUND.coverage);
        assert_eq!(changed.to_string(), "certified/max_keys=7/value_floor=0/per_group=off");
    }

    /// What is stored is compared by default where a list is carried, and elsewhere if somebody says so.
    #[test]
    fn watching_goes_with_carried_lists() {
        let watched = |text: &str| {
            let policy = policy(&selection(text).expect(text)).expect(text);
            policy.canary < f32::INFINITY && policy.exploration > 0.0
        };
        for text in ["certified", "certified/renew=4", "certified:strict", "certified/exploration=0.1"] {
            assert!(watched(text), "{text}");
        }
        for text in [
            "certified/canary=inf",
            "certified/risk=0/renew=0",
            "certified/min_keys=0/max_keys=0/max_values=0",
            "certified:fast",
        ] {
            assert!(!watched(text), "{text}");
        }
        assert!(watched("certified/risk=0/renew=0/canary=0/exploration=0.01"));
        let refused = selection("certified:fast/exploration=0.1").expect_err("nothing to explore with");
        assert!(refused.to_string().contains("canary is off"));
    }

    /// A scratch comes with resident sequences where steps carry lists; both can be switched off.
    #[test]
    fn what_is_kept_of_the_originals_can_be_set() {
        let of = |text: &str| settings(&selection(text).expect(text)).expect(text);
        let kept = |text: &str| (of(text).scratch, of(text).resident);
        assert_eq!(kept("certified"), (Settings::SCRATCH, Settings::RESIDENT));
        assert_eq!(kept("certified/scratch=0.5"), (0.5, Settings::RESIDENT));
        assert_eq!(kept("certified/scratch=0"), (0.0, 0));
        assert_eq!(kept("certified/scratch=0/resident=64"), (0.0, 64));
        assert_eq!(kept("certified/resident=0"), (Settings::SCRATCH, 0));
        let refused = selection("certified:strict/resident=64").expect_err("no list").to_string();
        assert!(refused.contains("renew is 0"), "{refused}");
    }

    /// Every field of the policy but `certify` is an option: none is forgotten when one is added.
    #[test]
    fn every_threshold_has_an_option_that_sets_it() {
        let serde_json::Value::Object(fields) = serde_json::to_value(Policy::SOUND).expect("plain") else {
            panic!("a policy is a struct");
        };
        let mut fields: Vec<&str> =
            fields.keys().map(String::as_str).filter(|name| *name != "certify").collect();
        let mut names: Vec<&str> = THRESHOLDS.iter().map(|(spec, _)| spec.name).collect();
        fields.sort_unstable();
        names.sort_unstable();
        assert_eq!(fields, names);
        for (spec, set) in THRESHOLDS {
            let mut policy = Policy::STRICT;
            let value = match spec.kind {
                Kind::Count(..) => Value::Count(3),
                Kind::Number(..) => Value::Number(0.375),
                Kind::Switch => Value::Switch(false),
                Kind::Word(words) => Value::Word(words[1]),
                Kind::File => panic!("no threshold is a file"),
            };
            set(&mut policy, &value);
            let json = |policy: Policy| serde_json::to_value(policy).expect("plain");
            let (before, after) = (json(Policy::STRICT), json(policy));
            let changed: Vec<&String> = before
                .as_object()
                .into_iter()
                .flatten()
                .filter(|(k, v)| after[k.as_str()] != **v)
                .map(|(k, _)| k)
                .collect();
            assert_eq!(changed, [spec.name]);
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused_when_it_is_named() {
        let refused = |text: &str| selection(text).expect_err(text).to_string();
        assert!(refused("certified/renew=4/ranking=1").contains("set renew to 0"));
        assert!(refused("certified/min_keys=20/max_keys=4").contains("swap them"));
        assert!(refused("certified/layout=paper").contains("set renew to 0"));
        assert!(refused("certified/renew=0").contains("set risk to 0"));
        assert!(refused("certified/coverage=1.5").contains("a number from 0 to 1"));
        assert!(refused("certified/coverage=nan").contains("a number from 0 to 1"));
        assert!(refused("certified/covrage=1").contains("its options are coverage, min_keys"));
        assert!(refused("certified/renew=1/renew=2").contains("twice"));
        assert!(refused("int8-int4:fast").contains("it has no presets"));
        assert!(selection("certified/layout=paper/renew=0/risk=0").is_ok());
    }
}
