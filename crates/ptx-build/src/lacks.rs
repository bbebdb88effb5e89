//! What an assembler says that a target lacks, kernel by kernel.
//!
//! PTX is written for one target and shipped for an older one only where a second code generator makes no
//! text of its own for that ([`mod@crate::nvvm`]). ptxas reads it to the end and says of each line what needs
//! a higher target: `Feature '.m16n8k16' requires .target sm_80 or higher`. If it says nothing else against
//! the text, then the kernels of these lines are what the target cannot have, and all others are right.

use crate::needs::Need;
use crate::ptx::Module;
use std::collections::BTreeMap;

/// What stands between a feature and the number of the target that has it.
const REQUIRES: &str = " requires .target sm_";

/// The entries that lack something, with what they lack; `None` if `messages` name another error as well, or
/// one outside of every entry. `module` is what [`crate::ptx::parse`] reads from `source`.
pub fn of(source: &str, module: &Module, messages: &str) -> Option<BTreeMap<String, Need>> {
    let starts: Vec<usize> =
        std::iter::once(0).chain(source.match_indices('\n').map(|(at, _)| at + 1)).collect();
    let entry_at = |line: usize| {
        let at = *starts.get(line.checked_sub(1)?)?;
        // Functions stand in order.
        let after = module.functions.partition_point(|function| function.header.start <= at);
        let function = module.functions[..after].last()?;
        (function.is_entry && at < function.end).then_some(&function.name)
    };
    let mut lacking: BTreeMap<String, (u32, Vec<&str>)> = BTreeMap::new();
    for message in messages.lines().filter(|line| is_error(line)) {
        let (line, feature, sm) = read(message)?;
        let (needs, features) = lacking.entry(entry_at(line)?.clone()).or_default();
        *needs = sm.max(*needs);
        if !features.contains(&feature) {
            features.push(feature);
        }
    }
    let need = |(sm, mut features): (u32, Vec<&str>)| {
        features.sort_unstable();
        Need { sm, why: features.join(", ").replace('\'', "") }
    };
    Some(lacking.into_iter().map(|(entry, found)| (entry, need(found))).collect())
        .filter(|needs: &BTreeMap<_, _>| !needs.is_empty())
}

/// Whether it says anything against the text. That there were errors is said once more at the end.
fn is_error(line: &str) -> bool {
    let says = |severity: &str| {
        line.contains(&format!("; {severity}")) || line.starts_with(&format!("ptxas {severity}"))
    };
    let at_the_end = line.starts_with("ptxas fatal") && line.contains("aborted due to errors");
    !(line.trim().is_empty() || says("warning") || says("info") || at_the_end)
}

/// `ptxas FILE, line 7; error   : Feature 'cp.async' requires .target sm_80 or higher`.
fn read(message: &str) -> Option<(usize, &str, u32)> {
    let (at, what) = message.split_once("; error")?;
    let line = at.rsplit_once(", line ")?.1.trim().parse().ok()?;
    let (feature, rest) = what.trim_start().strip_prefix(':')?.split_once(REQUIRES)?;
    let feature = feature.trim();
    let named = ["Feature ", "Modifier "].iter().find_map(|word| feature.strip_prefix(word));
    let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    Some((line, named.unwrap_or(feature), rest[..digits].parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ptx;

    const SOURCE: &str = "\
.version 8.3
.target sm_75
.visible .entry a()
{
\tcp.async.commit_group;
\tret;
}
.visible .entry b()
{
\tret;
}
.visible .entry c()
{
\tredux.sync.add.s32 %r1, %r2, -1;
\tcp.async.commit_group;
}
";

    fn found(messages: &str) -> Option<BTreeMap<String, Need>> {
        of(SOURCE, &ptx::parse(SOURCE), messages)
    }

    fn error(line: usize, what: &str) -> String {
        format!("ptxas k.ptx, line {line}; error   : {what}\n")
    }

    const COPIES: &str = "Feature 'cp.async.commit_group' requires .target sm_80 or higher";

    #[test]
    fn each_entry_has_what_its_lines_lack_once() {
        let messages = [
            error(5, COPIES),
            error(
                6,
                "Modifier '.L2::evict_first' on 'createpolicy.fractional' requires .target sm_80 or higher",
            ),
            "ptxas k.ptx, line 10; warning : unused\nptxas info    : 0 bytes gmem\n".into(),
            error(14, "Feature 'redux' requires .target sm_80 or higher"),
            error(15, "Feature 'x' requires .target sm_100a or higher"),
            error(15, COPIES),
            error(15, COPIES),
            "ptxas fatal   : Ptx assembly aborted due to errors\n".into(),
        ];
        let found = found(&messages.concat()).unwrap();
        let need = |sm, why: &str| Need { sm, why: why.into() };
        assert_eq!(
            found["a"],
            need(80, ".L2::evict_first on createpolicy.fractional, cp.async.commit_group")
        );
        assert_eq!(found["c"], need(100, "cp.async.commit_group, redux, x"));
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn any_other_error_is_no_lack() {
        for other in [
            error(6, "Unknown instruction 'ret'"),
            error(2, COPIES),
            error(7, COPIES).replace("line 7", "line 700"),
            "ptxas fatal   : Unresolved extern function 'f'\n".into(),
            "Segmentation fault\n".into(),
        ] {
            assert_eq!(found(&(error(5, COPIES) + &other)), None, "{other}");
        }
        for nothing in ["", "ptxas fatal   : Ptx assembly aborted due to errors\n"] {
            assert_eq!(found(nothing), None);
        }
    }
}
