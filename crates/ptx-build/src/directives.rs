//! Launch bounds: `// simt.launch_bounds ENTRY MAX_THREADS MIN_BLOCKS`.
//!
//! Rust has no way to give a kernel `.maxntid`. The kernel macro therefore leaves a comment in the module's
//! assembly (`global_asm!`), which reaches the PTX unchanged, through link-time optimisation and from
//! dependencies too; here it becomes a directive behind the entry's parameters.

use crate::ptx::Module;
use std::collections::BTreeMap;

/// What a directive line starts with, behind `//`.
pub const LAUNCH_BOUNDS: &str = "simt.launch_bounds";

/// The most threads that a block can have.
const MAX_BLOCK: u32 = 1024;

/// A directive that cannot be followed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum DirectiveError {
    /// It is not written as it must be.
    #[error(
        "PTX line {line}: `{text}` must read `// {LAUNCH_BOUNDS} ENTRY MAX_THREADS MIN_BLOCKS`, with 1 to 1024 threads and 0 to 32 blocks"
    )]
    Malformed {
        /// The line of the PTX.
        line: usize,
        /// The comment.
        text: String,
    },
    /// It names an entry that is not there.
    #[error("PTX line {line}: launch bounds for `{entry}`, which is no entry of this module")]
    NoSuchEntry {
        /// The line of the PTX.
        line: usize,
        /// The name.
        entry: String,
    },
    /// Two directives for one entry do not agree, or the entry has bounds already.
    #[error("PTX line {line}: `{entry}` has launch bounds already, and others")]
    Conflict {
        /// The line of the PTX.
        line: usize,
        /// The entry.
        entry: String,
    },
}

/// The text with every launch bound in its place. `module` is what [`crate::ptx::parse`] reads from `source`.
pub fn apply(source: &str, module: &Module) -> Result<String, DirectiveError> {
    // By the offset where the directive goes, so that the text can be put together in one pass.
    let mut bounds: BTreeMap<usize, (u32, u32)> = BTreeMap::new();
    for (line, text) in (1..).zip(source.lines()) {
        let Some(rest) = text.trim().strip_prefix("//").map(str::trim_start) else { continue };
        let Some(rest) = rest.strip_prefix(LAUNCH_BOUNDS) else { continue };
        let malformed = || DirectiveError::Malformed { line, text: text.trim().to_owned() };
        let mut words = rest.split_whitespace();
        let entry = words.next().ok_or_else(malformed)?;
        let mut number = |range: std::ops::RangeInclusive<u32>| {
            let number = words.next().and_then(|word| word.parse::<u32>().ok());
            number.filter(|number| range.contains(number)).ok_or_else(malformed)
        };
        let bound = (number(1..=MAX_BLOCK)?, number(0..=32)?);
        if words.next().is_some() || !rest.starts_with(char::is_whitespace) {
            return Err(malformed());
        }
        let function = module
            .functions
            .iter()
            .find(|function| function.is_entry && function.name == entry)
            .ok_or_else(|| DirectiveError::NoSuchEntry { line, entry: entry.to_owned() })?;
        let header = &source[function.after_params..function.header.end];
        let conflict = bounds.insert(function.after_params, bound).is_some_and(|earlier| earlier != bound);
        if conflict || header.contains(".maxntid") || header.contains(".reqntid") {
            return Err(DirectiveError::Conflict { line, entry: entry.to_owned() });
        }
    }
    let mut text = String::with_capacity(source.len() + 48 * bounds.len());
    let mut from = 0;
    for (at, (threads, blocks)) in bounds {
        text.push_str(&source[from..at]);
        text.push_str(&format!("\n.maxntid {threads}, 1, 1"));
        if blocks > 0 {
            text.push_str(&format!("\n.minnctapersm {blocks}"));
        }
        from = at;
    }
    text.push_str(&source[from..]);
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ptx;

    const SOURCE: &str = "\
.version 8.0
\t// simt.launch_bounds b 256 2
// simt.launch_bounds a 128 0
// simt.launch_bounds b 256 2
.visible .entry a(
\t.param .u64 a_0
)
{
\tret;
}
.visible .entry b()
{
\tret;
}
";

    fn apply(source: &str) -> Result<String, DirectiveError> {
        super::apply(source, &ptx::parse(source))
    }

    #[test]
    fn bounds_stand_behind_the_parameters() {
        let text = apply(SOURCE).unwrap();
        assert!(text.contains(".entry a(\n\t.param .u64 a_0\n)\n.maxntid 128, 1, 1\n{"), "{text}");
        assert!(text.contains(".entry b()\n.maxntid 256, 1, 1\n.minnctapersm 2\n{"), "{text}");
        // Once only, and reading the result again finds the bounds in place.
        assert_eq!(text.matches(".maxntid").count(), 2);
        assert!(matches!(apply(&text), Err(DirectiveError::Conflict { .. })));
    }

    #[test]
    fn text_without_directives_is_left_alone() {
        let text = ".entry a() { ret; }\n// simt is a crate\n";
        assert_eq!(apply(text).unwrap(), text);
    }

    #[test]
    fn what_cannot_be_followed_is_an_error() {
        for bad in ["a", "a 128", "a 0 0", "a 1025 1", "a 128 33", "a 128 1 1", "a many 1", ""] {
            let text = format!("// simt.launch_bounds {bad}\n.entry a() {{ ret; }}\n");
            assert!(matches!(apply(&text), Err(DirectiveError::Malformed { line: 1, .. })), "{bad}");
        }
        let missing = apply("// simt.launch_bounds c 128 0\n.entry a() { ret; }\n").unwrap_err();
        assert_eq!(missing, DirectiveError::NoSuchEntry { line: 1, entry: "c".into() });
        let twice = "// simt.launch_bounds a 128 0\n// simt.launch_bounds a 64 0\n.entry a() { ret; }\n";
        assert_eq!(apply(twice).unwrap_err(), DirectiveError::Conflict { line: 2, entry: "a".into() });
    }
}
