//! Kernels for some targets only.
//!
//! `#[kernel(min_sm = 90)]` leaves a comment, `// simt.min_sm ENTRY SM`, as launch bounds are left
//! ([`directives`](crate::directives)). The compiler makes the entry all the same, as it does not look into
//! inline assembly; it is cut out here of the PTX of the targets below. Kernels of which an assembler says
//! that they need a higher target ([`lacks`](crate::lacks)) are cut out in the same way.
//!
//! `#[kernel(only_sm = 90)]` leaves `// simt.only_sm ENTRY SM`: the entry is in the PTX of that target alone,
//! whose header then names the target with its own features, `sm_90a`, and which GPUs of that compute
//! capability alone take. For newer ones whoever loads the PTX cuts the entry out: it stands between lines
//! `// simt.only_begin ENTRY SM` and `// simt.only_end ENTRY` ([`only`]).
//!
//! In the place of each a comment stays, `// simt.left_out ENTRY SM WHY`: whoever looks for the kernel in
//! that PTX is told the target that has it.

use crate::ptx::{self, Module};
use std::collections::BTreeMap;

/// What a directive line starts with, behind `//`.
pub const MIN_SM: &str = "simt.min_sm";

/// The same of a kernel for one target alone.
pub const ONLY_SM: &str = "simt.only_sm";

/// What the line ahead of an entry that is for one target alone starts with, behind `//`, in its PTX.
pub const ONLY_BEGIN: &str = "simt.only_begin";

/// What the comment in the place of an entry starts with, behind `//`.
pub const LEFT_OUT: &str = "simt.left_out";

/// Why an entry is not in a target's PTX.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// The lowest target that has it.
    pub sm: u32,
    /// What of it needs that target, in one line.
    pub why: String,
}

/// A directive that cannot be followed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "PTX line {line}: `{text}` must read `// {MIN_SM} ENTRY SM` or `// {ONLY_SM} ENTRY SM`, with an entry of \
     this module and a number"
)]
pub struct NeedsError {
    /// The line of the PTX.
    pub line: usize,
    /// The comment.
    pub text: String,
}

/// The text without the entries that ask for more than `sm`, or for another one.
///
/// # Errors
/// A comment that is not written as it must be, or that names no entry.
pub fn leave_out(source: String, sm: u32) -> Result<String, NeedsError> {
    let mut needs = named(&source, MIN_SM)?;
    needs.retain(|_, need| need.sm > sm);
    let mut only = named(&source, ONLY_SM)?;
    only.retain(|_, need| need.sm != sm);
    needs.extend(only);
    if needs.is_empty() {
        return Ok(source);
    }
    let module = ptx::parse(&source);
    Ok(cut(source, &module, &needs))
}

/// The text with what is for `sm` alone marked, and the header's target with features of its own; the text
/// itself if there is no such kernel.
///
/// # Errors
/// As of [`leave_out`].
pub fn only(source: String, sm: u32) -> Result<String, NeedsError> {
    let only = named(&source, ONLY_SM)?;
    if only.is_empty() {
        return Ok(source);
    }
    let module = ptx::parse(&source);
    let mut text = String::with_capacity(source.len());
    let mut from = 0;
    for function in module.functions.iter().filter(|function| only.contains_key(&function.name)) {
        text.push_str(&source[from..function.header.start]);
        let (name, entry) = (&function.name, &source[function.header.start..function.end]);
        text.push_str(&format!("// {ONLY_BEGIN} {name} {sm}\n{entry}\n// simt.only_end {name}"));
        from = function.end;
    }
    text.push_str(&source[from..]);
    Ok(text.replacen(&format!("\n.target sm_{sm}"), &format!("\n.target sm_{sm}a"), 1))
}

/// The entries that a kind of directive names.
fn named(source: &str, kind: &str) -> Result<BTreeMap<String, Need>, NeedsError> {
    let mut needs: BTreeMap<String, Need> = BTreeMap::new();
    if !source.contains(kind) {
        return Ok(needs);
    }
    let module = ptx::parse(source);
    for (line, text) in (1..).zip(source.lines()) {
        let Some(rest) = directive(text).and_then(|rest| rest.strip_prefix(kind)) else { continue };
        let words: Vec<&str> = rest.split_whitespace().collect();
        let is_entry =
            |name: &str| module.functions.iter().any(|function| function.is_entry && function.name == name);
        let parsed = match words[..] {
            [entry, number] if is_entry(entry) => number.parse().ok().map(|number| (entry, number)),
            _ => None,
        };
        let (entry, sm): (&str, u32) =
            parsed.ok_or_else(|| NeedsError { line, text: text.trim().to_owned() })?;
        let option = if kind == ONLY_SM { "only_sm" } else { "min_sm" };
        let why = format!("#[kernel({option} = {sm})]");
        needs.insert(entry.to_owned(), Need { sm, why });
    }
    Ok(needs)
}

/// The text without these entries, and without the comments that name them: each has a comment in its place.
/// `module` is what [`ptx::parse`] reads from `source`.
pub fn cut(source: String, module: &Module, needs: &BTreeMap<String, Need>) -> String {
    if needs.is_empty() {
        return source;
    }
    let mut text = String::with_capacity(source.len());
    let mut from = 0;
    for function in module.functions.iter().filter(|function| function.is_entry) {
        let Some(Need { sm, why }) = needs.get(&function.name) else { continue };
        text.push_str(&source[from..function.header.start]);
        text.push_str(&format!("// {LEFT_OUT} {} {sm} {why}", function.name));
        from = function.end;
    }
    text.push_str(&source[from..]);
    // What other comments of the kernel macro say of an entry follows their word.
    let names_one_that_is_out = |line: &str| {
        let rest = directive(line).filter(|rest| rest.starts_with("simt.") && !rest.starts_with(LEFT_OUT));
        rest.and_then(|rest| rest.split_whitespace().nth(1)).is_some_and(|entry| needs.contains_key(entry))
    };
    text.split_inclusive('\n').filter(|line| !names_one_that_is_out(line)).collect()
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
        let place =
            "\t// .globl b\n// simt.left_out b 90 #[kernel(min_sm = 90)]\n// of b\n.visible .entry c()";
        assert!(text.contains(place), "{text}");
    }

    #[test]
    fn it_stays_from_its_target_on() {
        for sm in [90, 100] {
            assert_eq!(leave_out(SOURCE.into(), sm).unwrap(), SOURCE);
        }
    }

    #[test]
    fn what_is_for_one_target_is_in_that_one_alone() {
        let source = SOURCE.replace("simt.min_sm b 90", "simt.only_sm b 90");
        for sm in [80, 100] {
            let text = leave_out(source.replace("sm_80", &format!("sm_{sm}")), sm).unwrap();
            assert!(!text.contains("mbarrier") && !text.contains("simt.only_sm"), "{text}");
            let place = "// simt.left_out b 90 #[kernel(only_sm = 90)]";
            assert!(text.contains(place), "{text}");
            assert_eq!(only(text.clone(), sm).unwrap(), text);
        }
        let text = only(leave_out(source.replace("sm_80", "sm_90"), 90).unwrap(), 90).unwrap();
        assert!(text.contains("\n.target sm_90a\n"), "{text}");
        let (before, rest) = text.split_once("// simt.only_begin b 90\n.visible .entry b()").unwrap();
        let (entry, behind) = rest.split_once("}\n// simt.only_end b\n").unwrap();
        assert!(before.ends_with("\t// .globl b\n") && entry.contains("mbarrier"), "{text}");
        assert!(behind.starts_with("// of b"), "{text}");
        assert_eq!(ptx::parse(&text).functions.len(), 3);
    }

    #[test]
    fn what_cannot_be_followed_is_an_error() {
        for bad in ["k", "k many", "other 90", "k 90 1", ""] {
            let text = format!("// simt.min_sm {bad}\n.entry k() {{ ret; }}\n");
            assert_eq!(leave_out(text, 80).unwrap_err().line, 1, "{bad}");
        }
    }
}
