//! Lines for some targets only.
//!
//! A package is compiled once, for the lowest target of its build, and each target's PTX is made of that
//! text: what PTX has for a target, it has for all that are newer. A line of inline assembly that ends with
//! `// simt.since 90` is left out of the targets below sm_90, one with `// simt.below 90` out of sm_90 and
//! newer ones; the comment goes from both. Such a line is a whole statement: what ends in it begins in it.

/// What the comment starts with behind `//`, of a line for newer targets.
pub const SINCE: &str = "simt.since";

/// The same of a line for older targets.
pub const BELOW: &str = "simt.below";

/// A comment that cannot be followed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("PTX line {line}: `{text}` must end with `// {SINCE} SM` or `// {BELOW} SM`, SM a number")]
pub struct SinceError {
    /// The line of the PTX.
    pub line: usize,
    /// The line's text.
    pub text: String,
}

/// The text without the lines that are for other targets than `sm`, and with `sm` for the target in its
/// header.
///
/// # Errors
/// A comment that is not written as it must be.
pub fn select(source: &str, sm: u32) -> Result<String, SinceError> {
    let mut text = String::with_capacity(source.len());
    let mut target_is_named = false;
    for (line, whole) in (1..).zip(source.split_inclusive('\n')) {
        if let Some(named) = whole.strip_prefix(".target sm_").filter(|_| !target_is_named) {
            target_is_named = true;
            text.push_str(&format!(
                ".target sm_{sm}{}",
                named.trim_start_matches(|c: char| c.is_ascii_digit())
            ));
            continue;
        }
        let Some((statement, comment)) = whole.rsplit_once("//") else {
            text.push_str(whole);
            continue;
        };
        let comment = comment.trim();
        let is_for = |word: &str| {
            let number = comment.strip_prefix(word).filter(|rest| !rest.starts_with(char::is_alphanumeric));
            number.map(|number| number.trim().parse::<u32>())
        };
        let wanted = match (is_for(SINCE), is_for(BELOW)) {
            (None, None) => {
                text.push_str(whole);
                continue;
            }
            (Some(Ok(from)), _) => sm >= from,
            (_, Some(Ok(end))) => sm < end,
            _ => return Err(SinceError { line, text: whole.trim().to_owned() }),
        };
        if wanted {
            text.push_str(statement.trim_end());
            text.push('\n');
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "\
// of .target sm_80
.version 8.0
.target sm_80
.visible .entry k()
{
\t// begin inline asm
\tgriddepcontrol.wait; // simt.since 90
\t// end inline asm
\t// begin inline asm
\tmov.b32 %r1, 0; // simt.below 90
\tmov.b32 %r1, 1; // simt.since 90
\t// end inline asm
\tret; // not.simt.since 90
}
";

    #[test]
    fn each_target_has_its_lines() {
        let lines = |sm| -> Vec<String> {
            let text = select(SOURCE, sm).unwrap();
            text.lines().map(|line| line.trim().to_owned()).filter(|l| l.ends_with(';')).collect()
        };
        assert_eq!(lines(80), ["mov.b32 %r1, 0;"]);
        assert_eq!(lines(89), lines(80));
        assert_eq!(lines(90), ["griddepcontrol.wait;", "mov.b32 %r1, 1;"]);
        assert_eq!(lines(120), lines(90));
    }

    #[test]
    fn all_else_stays_as_it_is() {
        let text = select(SOURCE, 90).unwrap();
        assert!(text.starts_with("// of .target sm_80\n.version 8.0\n.target sm_90\n.visible"), "{text}");
        assert!(text.ends_with("\tret; // not.simt.since 90\n}\n"), "{text}");
        let without = "\t// begin inline asm\n\t// end inline asm\n";
        assert!(select(SOURCE, 80).unwrap().contains(without));
        let debug = select(".target sm_80, debug\nret; // simt.since90\n", 90).unwrap();
        assert_eq!(debug, ".target sm_90, debug\nret; // simt.since90\n");
        for end in ["", "}", "// last"] {
            assert_eq!(select(end, 90).unwrap(), end);
        }
    }

    #[test]
    fn what_cannot_be_followed_is_an_error() {
        for bad in ["ret; // simt.since", "ret; // simt.since ninety", "// simt.below 90 or so"] {
            let source = format!(".version 8.0\n{bad}\n");
            let error = select(&source, 80).unwrap_err();
            assert_eq!((error.line, error.text.as_str()), (2, bad));
        }
    }
}
