//! The proof of `certified` in terms of no scheme.

use super::{Findings, Notable, POLICIES, Tally, prove};
use crate::certified::scheme::{layout, policy};
use crate::kv::proof::{self, Trial};
use crate::kv::workload::Fact;
use crate::kv::{Result, Selection};

/// Of the scheme's default every preset in turn, the paper's thresholds with our bound too, steps that choose
/// for themselves, and the paper's layout; of another selection that alone.
pub(in crate::certified) fn prove_scheme(
    trial: &Trial<'_>,
    progress: &mut dyn FnMut(u64),
) -> Result<proof::Findings> {
    let Trial { device, selection, options, layers } = *trial;
    let name = selection.to_string();
    let found = if *selection == Selection::of(selection.scheme()) {
        prove(device, options, layers, &POLICIES, progress)?
    } else {
        prove(device, options, layers, &[(&name, policy(selection)?, layout(selection))], progress)?
    };
    Ok(neutral(found))
}

fn neutral(found: Findings) -> proof::Findings {
    let mut notes = Vec::new();
    let [least, middle, most] = found.total.paper_kernel_over_f64;
    if !middle.is_nan() {
        notes.push(format!(
            "the paper's bound by the kernels over the same in f64: {middle:.3} in the median, {least:.3} to {most:.3}"
        ));
    }
    let Tally { risked: [risked, beyond], likely_over_error, likely_over_output, .. } = found.total;
    if risked > 0 {
        let [median, most, worst] = likely_over_output.map(|share| 100.0 * share);
        notes.push(format!(
            "what is likely: beyond it {beyond} of {risked} errors; {likely_over_error:.1} times the error in the median; of the \
             output {median:.2} % in the median, {most:.2} % in 99 of 100, {worst:.2} % at most"
        ));
    }
    if !found.total.reasons.is_empty() {
        let reasons = found.total.reasons.iter().map(|(name, n)| format!("{name} {n}"));
        notes.push(format!("exact because: {}", reasons.collect::<Vec<_>>().join("; ")));
    }
    notes.extend(found.tightest.as_ref().map(|tightest| format!("tightest: {}", line(tightest))));
    proof::Findings {
        alarms: found.total.rungs[4],
        inputs: found.inputs.into_iter().map(|(input, tally)| (input.name().to_owned(), of(tally))).collect(),
        total: of(found.total),
        violations: found.violations.iter().map(line).collect(),
        notes,
    }
}

fn of(tally: Tally) -> proof::Tally {
    let [e_key, e_val, e_round, _] = tally.medians;
    let facts = vec![
        Fact::count("unbounded", tally.unbounded as f64),
        Fact::count("expanded", tally.rungs[2] as f64),
        Fact::count("layer", tally.rungs[4] as f64),
        Fact::error("dense b/e", tally.median[1]),
        Fact::error("paper/ours", tally.paper_over_ours),
        Fact::error("least", tally.paper_over_ours_least),
        Fact::error("E_key", e_key),
        Fact::error("E_val", e_val),
        Fact::error("E_round", e_round),
        Fact::count("beyond likely", tally.risked[1] as f64),
        Fact::error("likely/error", tally.likely_over_error),
    ];
    proof::Tally { facts, ..tally.counting.finish() }
}

fn line(found: &Notable) -> String {
    format!(
        "error {:.4e}, bound {:.4e} (keys {:.3e}, values {:.3e}, rounding {:.3e}); {}, {} head_dim={} group={} {} tokens, \
         sequence {} head {}, policy {}, seed {}",
        found.error,
        found.bound,
        found.parts[0],
        found.parts[1],
        found.parts[2],
        found.rung,
        found.element,
        found.head_dim,
        found.group,
        found.tokens,
        found.sequence,
        found.q_head,
        found.policy,
        found.seed
    )
}
