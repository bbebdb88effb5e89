//! The allow list: findings that are accepted, each with a reason.
//!
//! A file of rows, in a small part of TOML:
//! ```toml
//! [[allow]]
//! entry = "certified_merge*"    # a kernel, or all whose names start so
//! rule = "local-memory"
//! reason = "sixteen bytes, read once, outside the loop"
//! ```
//! A row that accepts nothing is an error: the list cannot outlive what it excuses. Whether it does is asked
//! of what the first generator, llvm, makes; a row with the line `codegen = "nvvm"` is for the other one
//! alone. One with `targets = "sm_100 sm_120"` is for GPUs that compile the PTX of a lower target themselves:
//! no build makes their machine code, so none judges it, and whoever does reads the row from the file.

use crate::codegen::Codegen;
use crate::lint::{Finding, Rule};
use std::cell::Cell;
use std::path::{Path, PathBuf};

/// What is wrong with an allow list.
#[derive(Debug, thiserror::Error)]
pub enum AllowError {
    /// It cannot be read.
    #[error("{}: cannot be read: {error}", path.display())]
    Read {
        /// The list.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// A line is not what a list may hold.
    #[error("{}:{line}: {what}", path.display())]
    Line {
        /// The list.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong and what is right.
        what: String,
    },
}

/// One row.
#[derive(Clone, Debug)]
pub struct Row {
    /// A kernel's name, or the start of several followed by `*`.
    pub entry: String,
    /// The rule that the kernel may break.
    pub rule: Rule,
    /// Why it may.
    pub reason: String,
    /// The generator whose code alone may break it; `None` of what either makes.
    pub codegen: Option<Codegen>,
    /// The GPUs that compile the PTX of a lower target, for which alone it may; empty for the build's own.
    pub targets: Vec<u32>,
    /// The row's line in the file.
    pub line: usize,
    used: Cell<bool>,
}

/// A list of rows.
#[derive(Clone, Debug, Default)]
pub struct AllowList {
    path: PathBuf,
    rows: Vec<Row>,
}

#[derive(Default)]
struct Draft {
    line: usize,
    values: [Option<String>; 5],
}

/// The first three are in every row.
const KEYS: [&str; 5] = ["entry", "rule", "reason", "codegen", "targets"];

impl AllowList {
    /// Reads the list at `path`; no file is an empty list.
    pub fn read(path: &Path) -> Result<AllowList, AllowError> {
        match std::fs::read_to_string(path) {
            Ok(text) => AllowList::parse(path, &text),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(AllowList::default()),
            Err(error) => Err(AllowError::Read { path: path.to_owned(), error }),
        }
    }

    /// Reads a list from `text`; `path` is for messages.
    pub fn parse(path: &Path, text: &str) -> Result<AllowList, AllowError> {
        let wrong = |line: usize, what: String| AllowError::Line { path: path.to_owned(), line, what };
        let mut list = AllowList { path: path.to_owned(), rows: Vec::new() };
        let mut draft: Option<Draft> = None;
        for (line, text) in (1..).zip(text.lines()) {
            let text = text.trim();
            if text.is_empty() || text.starts_with('#') {
                continue;
            }
            if text.split('#').next().is_some_and(|head| head.trim() == "[[allow]]") {
                list.push(draft.replace(Draft { line, ..Draft::default() }))?;
                continue;
            }
            let (key, value) = text
                .split_once('=')
                .ok_or_else(|| wrong(line, format!("`{text}` is neither [[allow]] nor key = \"value\"")))?;
            let index = KEYS.iter().position(|known| *known == key.trim()).ok_or_else(|| {
                let key = key.trim();
                let keys = "entry, rule, reason and maybe codegen or targets";
                wrong(line, format!("unknown key `{key}`; a row has {keys}"))
            })?;
            let value = quoted(value).ok_or_else(|| {
                wrong(line, format!("the value of `{}` must be one string in quotes", key.trim()))
            })?;
            let draft = draft.as_mut().ok_or_else(|| wrong(line, "a row starts with [[allow]]".into()))?;
            if draft.values[index].replace(value.to_owned()).is_some() {
                return Err(wrong(line, format!("`{}` stands twice in one row", key.trim())));
            }
        }
        list.push(draft)?;
        Ok(list)
    }

    fn push(&mut self, draft: Option<Draft>) -> Result<(), AllowError> {
        let Some(Draft { line, values }) = draft else { return Ok(()) };
        let wrong = |what: String| AllowError::Line { path: self.path.clone(), line, what };
        let missing = KEYS[..3]
            .iter()
            .zip(&values)
            .find(|(_, value)| value.as_ref().is_none_or(|v| v.trim().is_empty()));
        if let Some((key, _)) = missing {
            return Err(wrong(format!("the row has no `{key}`; entry, rule and reason are all needed")));
        }
        let [entry, rule, reason, codegen, targets] = values;
        let codegen = match codegen.as_deref() {
            None => None,
            Some("llvm") => Some(Codegen::Llvm),
            Some("nvvm") => Some(Codegen::Nvvm),
            Some(other) => return Err(wrong(format!("unknown codegen `{other}`; there are llvm and nvvm"))),
        };
        let number = |word: &str| {
            let number = word.strip_prefix("sm_").and_then(|number| number.parse().ok());
            number.ok_or_else(|| {
                wrong(format!("unknown target `{word}`; targets are named as in \"sm_100 sm_120\""))
            })
        };
        let targets: Option<Vec<u32>> =
            targets.map(|targets| targets.split_whitespace().map(number).collect()).transpose()?;
        if targets.as_ref().is_some_and(Vec::is_empty) {
            return Err(wrong(
                "the row's `targets` names none; leave it out, or name some as in \"sm_100\"".into(),
            ));
        }
        let targets = targets.unwrap_or_default();
        let [entry, rule, reason] = [entry, rule, reason].map(Option::unwrap_or_default);
        let rule = Rule::from_name(&rule).ok_or_else(|| {
            let names = Rule::ALL.map(Rule::name).join(", ");
            wrong(format!("unknown rule `{rule}`; there are {names}"))
        })?;
        if !(targets.is_empty() || rule.needs_ptxas()) {
            return Err(wrong(format!("`targets` is for what ptxas finds, and {rule} is in the PTX")));
        }
        self.rows.push(Row { entry, rule, reason, codegen, targets, line, used: Cell::new(false) });
        Ok(())
    }

    /// Is the finding in a generator's code accepted? The rows that accept it count as used; of those for
    /// either generator only what llvm makes counts, so that all builds agree on it.
    pub fn accepts(&self, finding: &Finding, codegen: Codegen) -> bool {
        let mut accepted = false;
        for row in &self.rows {
            let covers = match row.entry.strip_suffix('*') {
                Some(start) => finding.entry.starts_with(start),
                None => finding.entry == row.entry,
            };
            let covers = covers && row.targets.is_empty();
            if covers && row.rule == finding.rule && row.codegen.is_none_or(|only| only == codegen) {
                row.used.set(row.used.get() || codegen == row.codegen.unwrap_or_default());
                accepted = true;
            }
        }
        accepted
    }

    /// One message for each row that has accepted nothing. Rows of rules that only ptxas can find are left
    /// out unless it ran, and rows of a generator that did not run.
    pub fn unused(&self, ptxas_ran: bool, ran: &[Codegen]) -> Vec<String> {
        let could = |row: &Row| {
            let judged = row.targets.is_empty() && (ptxas_ran || !row.rule.needs_ptxas());
            judged && ran.contains(&row.codegen.unwrap_or_default())
        };
        let idle = self.rows.iter().filter(|row| !row.used.get() && could(row));
        idle.map(|row| {
            let (path, line) = (self.path.display(), row.line);
            format!("{path}:{line}: no kernel `{}` breaks the rule {}: remove the row", row.entry, row.rule)
        })
        .collect()
    }

    /// The rows.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }
}

/// The inside of the one quoted string in `text`; a comment may follow it.
fn quoted(text: &str) -> Option<&str> {
    let (inside, rest) = text.trim().strip_prefix('"')?.split_once('"')?;
    let rest = rest.trim();
    (rest.is_empty() || rest.starts_with('#')).then_some(inside)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<AllowList, String> {
        AllowList::parse(Path::new("ptx-allow.toml"), text).map_err(|error| error.to_string())
    }

    fn finding(entry: &str, rule: Rule) -> Finding {
        Finding { rule, entry: entry.into(), line: 1, text: "x".into(), count: 1 }
    }

    const TWO: &str = "\
# accepted
[[allow]] # one
entry = \"merge*\" # all of them
rule = \"local-memory\"
reason = \"a small table = 16 bytes\"

[[allow]]
entry = \"other\"
rule = \"spill\"
reason = \"seen, costs nothing\"
";

    #[test]
    fn rows_accept_what_they_name_and_nothing_else() {
        let list = parse(TWO).unwrap();
        assert!(list.accepts(&finding("merge_f32", Rule::LocalMemory), Codegen::Llvm));
        assert!(!list.accepts(&finding("merge_f32", Rule::Call), Codegen::Llvm));
        assert!(!list.accepts(&finding("mer", Rule::LocalMemory), Codegen::Llvm));
        assert!(!list.accepts(&finding("other_too", Rule::Spill), Codegen::Llvm));
        assert_eq!(list.rows()[0].reason, "a small table = 16 bytes");
    }

    #[test]
    fn an_unused_row_is_reported_if_its_rule_could_be_checked() {
        let list = parse(TWO).unwrap();
        assert_eq!(list.unused(true, &[Codegen::Llvm]).len(), 2);
        list.accepts(&finding("merge_f32", Rule::LocalMemory), Codegen::Llvm);
        assert_eq!(list.unused(false, &[Codegen::Llvm]), Vec::<String>::new());
        assert_eq!(
            list.unused(true, &[Codegen::Llvm]),
            ["ptx-allow.toml:7: no kernel `other` breaks the rule spill: remove the row"]
        );
    }

    #[test]
    fn a_row_for_gpus_that_compile_themselves_is_nothing_to_the_build() {
        let text = TWO.replace("rule = \"spill\"\n", "rule = \"spill\"\ntargets = \"sm_100 sm_120\"\n");
        let list = parse(&text).unwrap();
        assert_eq!((&list.rows()[0].targets, &list.rows()[1].targets), (&vec![], &vec![100, 120]));
        assert!(!list.accepts(&finding("other", Rule::Spill), Codegen::Llvm));
        list.accepts(&finding("merge_f32", Rule::LocalMemory), Codegen::Llvm);
        assert_eq!(list.unused(true, &[Codegen::Llvm]), Vec::<String>::new());
    }

    #[test]
    fn mistakes_name_their_line() {
        let row = "[[allow]]\nentry = \"k\"\nrule = \"call\"\n";
        let cases = [
            (row.to_owned(), "ptx-allow.toml:1: the row has no `reason`"),
            (format!("{row}reason = \" \"\n"), "ptx-allow.toml:1: the row has no `reason`"),
            (format!("{row}reason = why\n"), "ptx-allow.toml:4: the value of `reason` must be"),
            (format!("{row}rule = \"call\"\n"), "ptx-allow.toml:4: `rule` stands twice"),
            (
                row.replace("call", "speed") + "reason = \"r\"\n",
                "ptx-allow.toml:1: unknown rule `speed`; there are rounding,",
            ),
            (
                format!("{row}reason = \"r\"\ncodegen = \"gcc\"\n"),
                "ptx-allow.toml:1: unknown codegen `gcc`; there are llvm and nvvm",
            ),
            (
                row.replace("call", "spill") + "reason = \"r\"\ntargets = \"100\"\n",
                "ptx-allow.toml:1: unknown target `100`; targets are named",
            ),
            (
                row.replace("call", "spill") + "reason = \"r\"\ntargets = \" \"\n",
                "ptx-allow.toml:1: the row's `targets` names none",
            ),
            (
                format!("{row}reason = \"r\"\ntargets = \"sm_100\"\n"),
                "ptx-allow.toml:1: `targets` is for what ptxas finds, and call is",
            ),
            ("entry = \"k\"\n".to_owned(), "ptx-allow.toml:1: a row starts with [[allow]]"),
            ("[[allow]]\nkernel = \"k\"\n".to_owned(), "ptx-allow.toml:2: unknown key `kernel`"),
            ("what\n".to_owned(), "ptx-allow.toml:1: `what` is neither"),
        ];
        for (text, expected) in cases {
            let error = parse(&text).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
    }

    #[test]
    fn no_file_is_an_empty_list() {
        assert!(AllowList::read(Path::new("/nonexistent/ptx-allow.toml")).unwrap().rows().is_empty());
    }
}
