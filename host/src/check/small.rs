//! The small cases of each system under every check of the emulator: what the systems' own tests, which look
//! at results, cannot see. Their bits are held against the golden ones in `host/golden`. They run in one
//! order, or in as many more as `SIMT_TEST_ORDERS` says; `ferrokv check --orders 0 --golden host/golden` is
//! the same over all small cases.

use super::{Case, CaseReport, Coverage, Golden, Outcome, run_emulated};
use crate::SYSTEMS;
use simt::emu::EmuOptions;
use std::path::Path;

fn cases(system: &str, coverage: Coverage) -> Vec<Case> {
    let system = SYSTEMS.iter().find(|known| known.name == system).expect("a system");
    system.own_cases(coverage)
}

/// Every `step`th of a system's small cases: cases of one kernel follow one another, so a step that has no
/// factor in common with their number takes some of each.
fn clean(system: &str, step: usize) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden");
    let golden = Golden::read(&folder, [system]).unwrap();
    all_clean(cases(system, Coverage::Small).into_iter().step_by(step).collect(), Some(&golden));
}

fn all_clean(cases: Vec<Case>, golden: Option<&Golden>) {
    assert!(!cases.is_empty());
    let orders = std::env::var("SIMT_TEST_ORDERS").map_or(0, |orders| orders.parse().expect("a number"));
    let report = run_emulated(&cases, EmuOptions { orders, ..EmuOptions::thorough() }, |_| {});
    let report = match golden {
        Some(golden) => golden.hold(report),
        None => report,
    };
    let said = |case: &CaseReport| {
        let message = case.message.as_deref().unwrap_or_default();
        format!("{} {}: {} {message}", case.kernels.join(" + "), case.label, case.outcome)
    };
    let bad: Vec<String> =
        report.cases.iter().filter(|case| case.outcome != Outcome::NoGpu).map(said).collect();
    assert!(bad.is_empty(), "{}", bad.join("\n"));
    assert_eq!(report.cases.len(), cases.len());
}

macro_rules! clean {
    ($($system:ident: $step:literal),* $(,)?) => {
        $(
            #[test]
            fn $system() {
                clean(stringify!($system), $step);
            }
        )*
    };
}

clean! {
    dense: 1,
    int8: 1,
    certified: 17,
    gather: 7,
    vecinfer: 5,
    gtq: 7,
    kivi: 1,
    echo: 1,
    model: 1,
    roofline: 1,
}

/// The small cases of `vecinfer` are of two parts at most; these are of four.
#[test]
fn vecinfer_in_parts() {
    let parts =
        |case: &Case| case.kernels()[0] == "vecinfer_attend_64_408_408_4" && case.label().contains("of 900");
    all_clean(cases("vecinfer", Coverage::Quick).into_iter().filter(parts).collect(), None);
}

/// Kernels that take 99 KiB of shared memory have the bits of those that take more: the golden digests of
/// their cases are equal.
#[test]
fn lean_kernels_have_the_bits_of_the_others() {
    let mut twins = 0;
    for system in ["dense", "certified", "gather"] {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden").join(format!("{system}.txt"));
        let text = std::fs::read_to_string(file).expect("golden bits");
        let digests: std::collections::HashMap<&str, &str> = text
            .lines()
            .filter_map(|line| line.split_once("  "))
            .map(|(digest, case)| (case, digest))
            .collect();
        for (case, digest) in &digests {
            let other = case.replace("_lean", "").replace("_Lean", "_").replace(" in 99 KiB", "");
            if other != **case {
                assert_eq!(Some(digest), digests.get(other.as_str()), "{case}");
                twins += 1;
            }
        }
    }
    assert!(twins >= 52, "{twins}");
}
