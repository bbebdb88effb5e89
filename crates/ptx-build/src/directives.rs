//! Launch bounds: `// simt.launch_bounds ENTRY MAX_THREADS MIN_BLOCKS`, and clusters: `// simt.cluster ENTRY
//! X Y Z`.
//!
//! Rust has no way to give a kernel `.maxntid`. The kernel macro therefore leaves a comment in the module's
//! assembly (`global_asm!`), which reaches the PTX unchanged, through link-time optimisation and from
//! dependencies too; here it becomes a directive behind the entry's parameters.

use crate::ptx::Module;
use std::collections::BTreeMap;

/// What a directive line starts with, behind `//`.
pub const LAUNCH_BOUNDS: &str = "simt.launch_bounds";

/// The same of a cluster's blocks along each axis.
pub const CLUSTER: &str = "simt.cluster";

/// The most blocks of a cluster that every GPU with clusters has room for.
const MAX_CLUSTER: u32 = 8;

/// The most threads that a block can have.
const MAX_BLOCK: u32 = 1024;

/// A directive that cannot be followed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum DirectiveError {
    /// It is not written as it must be.
    #[error(
        "PTX line {line}: `{text}` must read `// {LAUNCH_BOUNDS} ENTRY MAX_THREADS MIN_BLOCKS`, with 1 to 1024 threads and 0 to 32 blocks, or `// {CLUSTER} ENTRY X Y Z`, with 1 to 8 blocks in all"
    )]
    Malformed {
        /// The line of the PTX.
        line: usize,
        /// The comment.
        text: String,
    },
    /// It names an entry that is not there.
    #[error("PTX line {line}: launch bounds or a cluster for `{entry}`, which is no entry of this module")]
    NoSuchEntry {
        /// The line of the PTX.
        line: usize,
        /// The name.
        entry: String,
    },
    /// Two directives for one entry do not agree, or the entry has its own already.
    #[error("PTX line {line}: `{entry}` has launch bounds or a cluster already, and others")]
    Conflict {
        /// The line of the PTX.
        line: usize,
        /// The entry.
        entry: String,
    },
}

/// What an entry's directives say.
#[derive(Clone, Copy, Default)]
struct Bounds {
    /// The most threads of a block, and how many blocks shall fit a multiprocessor.
    launch: Option<(u32, u32)>,
    cluster: Option<[u32; 3]>,
}

impl Bounds {
    /// What the words behind an entry's name say, if they are those of a directive.
    fn parse(is_cluster: bool, words: &[&str]) -> Option<Bounds> {
        let numbers: Vec<u32> = words.iter().map(|word| word.parse().ok()).collect::<Option<_>>()?;
        match numbers[..] {
            [threads, blocks] if !is_cluster => ((1..=MAX_BLOCK).contains(&threads) && blocks <= 32)
                .then_some(Bounds { launch: Some((threads, blocks)), cluster: None }),
            [x, y, z] if is_cluster => {
                let blocks = x.checked_mul(y).and_then(|blocks| blocks.checked_mul(z))?;
                let cluster = Some([x, y, z]);
                (1..=MAX_CLUSTER).contains(&blocks).then_some(Bounds { launch: None, cluster })
            }
            _ => None,
        }
    }

    /// Takes over what `other` says; whether they agree.
    fn join(&mut self, other: Bounds) -> bool {
        let agree = self.launch.is_none_or(|launch| other.launch.is_none_or(|other| other == launch))
            && self.cluster.is_none_or(|cluster| other.cluster.is_none_or(|other| other == cluster));
        self.launch = self.launch.or(other.launch);
        self.cluster = self.cluster.or(other.cluster);
        agree
    }

    /// The lines behind the entry's parameters.
    fn text(self) -> String {
        let mut text = String::new();
        if let Some((threads, blocks)) = self.launch {
            text.push_str(&format!("\n.maxntid {threads}, 1, 1"));
            if blocks > 0 {
                text.push_str(&format!("\n.minnctapersm {blocks}"));
            }
        }
        if let Some([x, y, z]) = self.cluster {
            text.push_str(&format!("\n.explicitcluster\n.reqnctapercluster {x}, {y}, {z}"));
        }
        text
    }
}

/// The text with every launch bound and every cluster in its place. `module` is what [`crate::ptx::parse`]
/// reads from `source`.
pub fn apply(source: &str, module: &Module) -> Result<String, DirectiveError> {
    // By the offset where the directive goes, so that the text can be put together in one pass.
    let mut bounds: BTreeMap<usize, Bounds> = BTreeMap::new();
    for (line, text) in (1..).zip(source.lines()) {
        let Some(comment) = text.trim().strip_prefix("//").map(str::trim_start) else { continue };
        let word = [LAUNCH_BOUNDS, CLUSTER].into_iter().find(|word| comment.starts_with(word));
        let Some((word, rest)) = word.and_then(|word| Some((word, comment.strip_prefix(word)?))) else {
            continue;
        };
        let malformed = || DirectiveError::Malformed { line, text: text.trim().to_owned() };
        let words: Vec<&str> = rest.split_whitespace().collect();
        let (entry, numbers) = words.split_first().ok_or_else(malformed)?;
        let bound = Bounds::parse(word == CLUSTER, numbers).ok_or_else(malformed)?;
        if !rest.starts_with(char::is_whitespace) {
            return Err(malformed());
        }
        let function = module
            .functions
            .iter()
            .find(|function| function.is_entry && function.name == *entry)
            .ok_or_else(|| DirectiveError::NoSuchEntry { line, entry: (*entry).to_owned() })?;
        let header = &source[function.after_params..function.header.end];
        let there = match word {
            CLUSTER => [".reqnctapercluster", ".explicitcluster"],
            _ => [".maxntid", ".reqntid"],
        };
        let agrees = bounds.entry(function.after_params).or_default().join(bound);
        if !agrees || there.iter().any(|directive| header.contains(directive)) {
            return Err(DirectiveError::Conflict { line, entry: (*entry).to_owned() });
        }
    }
    let mut text = String::with_capacity(source.len() + 48 * bounds.len());
    let mut from = 0;
    for (at, bounds) in bounds {
        text.push_str(&source[from..at]);
        text.push_str(&bounds.text());
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
    fn clusters_stand_there_as_well() {
        let source = format!("// simt.cluster b 2 2 1\n// simt.cluster a 8 1 1\n{SOURCE}");
        let text = apply(&source).unwrap();
        let both = "\n.maxntid 256, 1, 1\n.minnctapersm 2\n.explicitcluster\n.reqnctapercluster 2, 2, 1\n{";
        assert!(text.contains(&format!(".entry b(){both}")), "{text}");
        assert!(
            text.contains("\n.maxntid 128, 1, 1\n.explicitcluster\n.reqnctapercluster 8, 1, 1\n{"),
            "{text}"
        );
        for bad in
            ["a 2", "a 2 1", "a 0 1 1", "a 9 1 1", "a 2 2 4", "a 65536 65536 1", "a 1 1 1 1", "a x 1 1"]
        {
            let text = format!("// simt.cluster {bad}\n.entry a() {{ ret; }}\n");
            assert!(matches!(apply(&text), Err(DirectiveError::Malformed { line: 1, .. })), "{bad}");
        }
        let twice = "// simt.cluster a 2 1 1\n// simt.cluster a 4 1 1\n.entry a() { ret; }\n";
        assert_eq!(apply(twice).unwrap_err(), DirectiveError::Conflict { line: 2, entry: "a".into() });
        let there = "// simt.cluster a 2 1 1\n.entry a()\n.reqnctapercluster 2, 1, 1\n{ ret; }\n";
        assert_eq!(apply(there).unwrap_err(), DirectiveError::Conflict { line: 1, entry: "a".into() });
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
