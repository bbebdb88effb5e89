//! Kernels for some targets only: `// simt.min_sm ENTRY SM`.
//!
//! `#[kernel(min_sm = 90)]` leaves such a comment, as launch bounds are left
//! ([`directives`](crate::directives)). The entry is compiled for every target, as the compiler does not look
//! into inline assembly, and cut out here of the PTX of those below.

use crate::ptx;
use std::collections::BTreeMap;

/// What a directive line starts with, behind `//`.
pub const MIN_SM: &str = "simt.min_sm";

/// A directive that cannot be followed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "PTX line {line}: `{text}` must read `// {MIN_SM} ENTRY SM`, with an entry of this module and a number"
)]
pub struct NeedsError {
    /// The line of the PTX.
    pub line: usize,
    /// The comment.
    pub text: String,
}

/// The text without the entries that need more than `sm`, and without the comments that name these.
///
/// # Errors
/// A comment that is not written as it must be, or that names no entry.
pub fn leave_out(source: String, sm: u32) -> Result<String, NeedsError> {
    if !source.contains(MIN_SM) {
        return Ok(source);
    }
    let module = ptx::parse(&source);
    let mut needs: BTreeMap<&str, u32> = BTreeMap::new();
    for (line, text) in (1..).zip(source.lines()) {
        let Some(rest) = directive(text).and_then(|rest| rest.strip_prefix(MIN_SM)) else { continue };
        let words: Vec<&str> = rest.split_whitespace().collect();
        let is_entry =
            |name: &str| module.functions.iter().any(|function| function.is_entry && function.name == name);
        let parsed = match words[..] {
            [entry, number] if is_entry(entry) => number.parse().ok().map(|number| (entry, number)),
            _ => None,
        };
        let (entry, number) = parsed.ok_or_else(|| NeedsError { line, text: text.trim().to_owned() })?;
        needs.insert(entry, number);
    }
    let is_out = |entry: &str| needs.get(entry).is_some_and(|needed| *needed > sm);
    let mut kept = String::with_capacity(source.len());
    let mut from = 0;
    for function in module.functions.iter().filter(|function| function.is_entry && is_out(&function.name)) {
        kept.push_str(&source[from..function.header.start]);
        from = function.end;
    }
    kept.push_str(&source[from..]);
    if from == 0 {
        return Ok(kept);
    }
    // What other comments of the kernel macro say of an entry follows their word.
    let names_one_that_is_out = |line: &str| {
        let entry = directive(line).filter(|rest| rest.starts_with("simt."));
        entry.and_then(|rest| rest.split_whitespace().nth(1)).is_some_and(is_out)
    };
    Ok(kept.split_inclusive('\n').filter(|line| !names_one_that_is_out(line)).collect())
}

fn directive(line: &str) -> Option<&str> {
    Some(line.trim().strip_prefix("//")?.trim_start())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "\
.version 8.0
.target sm_80
\t// simt.launch_bounds b 256 2
\t// simt.min_sm b 90
// simt.overlaps b
// simt.overlaps a
.visible .entry a(
\t.param .u64 a_0
)
{
\tret;
}
\t// .globl b
.visible .entry b()
.maxntid 256, 1, 1
{
\t// begin inline asm
\t{ .reg .pred p; mbarrier.inval.shared::cta.b64 [%r1]; }
\t// end inline asm
\tret;
}
// of b
.visible .entry c()
{
\tret;
}
";

    #[test]
    fn an_entry_is_left_out_below_its_target() {
        let text = leave_out(SOURCE.into(), 80).unwrap();
        let module = ptx::parse(&text);
        let names: Vec<&str> = module.functions.iter().map(|function| function.name.as_str()).collect();
        assert_eq!(names, ["a", "c"]);
        assert!(!text.contains("mbarrier") && !text.contains("maxntid") && !text.contains("simt.min_sm"));
        assert_eq!(module.overlapping, ["a".to_owned()].into());
        assert!(text.contains("// of b\n.visible .entry c()"), "{text}");
    }

    #[test]
    fn it_stays_from_its_target_on() {
        for sm in [90, 100] {
            assert_eq!(leave_out(SOURCE.into(), sm).unwrap(), SOURCE);
        }
    }

    #[test]
    fn what_cannot_be_followed_is_an_error() {
        for bad in ["k", "k many", "other 90", "k 90 1", ""] {
            let text = format!("// simt.min_sm {bad}\n.entry k() {{ ret; }}\n");
            assert_eq!(leave_out(text, 80).unwrap_err().line, 1, "{bad}");
        }
    }
}
