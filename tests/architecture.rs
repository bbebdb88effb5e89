//! What may name what, read off the sources: systems do not name one another, the device layer names nothing
//! that is built on it, a command names no other command, and modules of a crate name one another in no
//! circle.
//!
//! It sees paths: each that begins with `crate`, `super`, `self` or a crate of this workspace, groups in
//! braces included, in `use` and elsewhere. It does not see names that a macro makes, nor a re-export of
//! another module's thing under the own name.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Folders that every system may name. They name no system.
const SHARED: &[&str] = &["attention", "check", "kv", "probe"];

/// Folders of `host/src` above the systems, the lowest first: each may name the systems and those before it.
const ABOVE: &[&str] = &["model", "eval"];

/// What breaks a rule today: the file and what it names. A row that is not needed any more fails the test,
/// too.
///
/// `gather` over codes is two systems put together: what one chooses, the other's pass attends to. That is
/// `gather/tiles`; and with a bound on both errors `gather/sketch`, which hands its choice to that pass
/// (`kept.rs`) and takes in the certificates that it makes (`settling.rs`).
const ALLOWED: &[(&str, &str)] = &[
    ("host/src/gather/error.rs", "certified"),
    ("host/src/gather/sketch/cases.rs", "certified"),
    ("host/src/gather/sketch/cpu.rs", "certified"),
    ("host/src/gather/sketch/elements.rs", "certified"),
    ("host/src/gather/sketch/kept.rs", "certified"),
    ("host/src/gather/sketch/plan.rs", "certified"),
    ("host/src/gather/sketch/tests/codes.rs", "certified"),
    ("host/src/gather/sketch/tests/mod.rs", "certified"),
    ("host/src/gather/sketch/workload.rs", "certified"),
    ("host/src/gather/tests/tiles.rs", "certified"),
    ("host/src/gather/tiles/cache.rs", "certified"),
    ("host/src/gather/tiles/mod.rs", "certified"),
    ("host/src/gather/tiles/plan.rs", "certified"),
    ("host/src/gather/tiles/sketched.rs", "certified"),
    ("host/src/gather/tiles/workload.rs", "certified"),
    ("kernels-gpu/src/gather/sketch/settling.rs", "certified"),
];

#[test]
fn systems_do_not_name_one_another() {
    let mut found = BTreeSet::new();
    for root in ["host/src", "kernels-gpu/src"] {
        let folders = folders(root);
        assert!(folders.contains("certified") && folders.contains("int8"), "{root}: {folders:?}");
        for source in sources(root) {
            let Some(from) = source.module.first().filter(|from| folders.contains(*from)) else { continue };
            for path in source.paths() {
                // The kernels of a system are its other half; `crate` is what both name alike.
                let to = match path.iter().map(String::as_str).collect::<Vec<_>>()[..] {
                    ["crate" | "kernels_gpu" | "host", to, ..] => to,
                    _ => continue,
                };
                if folders.contains(to) && to != from && !may_name(from, to) {
                    found.insert((source.file.clone(), to.to_owned()));
                }
            }
        }
    }
    compare(found, |file| !file.starts_with("src/"));
}

fn may_name(from: &str, to: &str) -> bool {
    let height = |folder| ABOVE.iter().position(|above| *above == folder).map_or(0, |height| height + 1);
    SHARED.contains(&to) || (height(from) > height(to) && !SHARED.contains(&from))
}

#[test]
fn the_device_layer_names_nothing_above_it() {
    const ABOVE_IT: [&str; 4] = ["kernels_gpu", "host", "ferrokv", "ferrokv_host"];
    let sources = sources("crates/device/src");
    assert!(sources.len() > 10);
    for source in sources {
        for path in source.paths() {
            assert!(!ABOVE_IT.contains(&&*path[0]), "{} names {}", source.file, path.join("::"));
        }
    }
    let manifest = fs::read_to_string(workspace().join("crates/device/Cargo.toml")).expect("the manifest");
    for line in manifest.lines() {
        let dependency = line.split(['=', '.']).next().unwrap_or_default().trim().replace('-', "_");
        assert!(!ABOVE_IT.contains(&&*dependency), "crates/device/Cargo.toml: {line}");
    }
}

/// A module is a command if `cli/mod.rs` takes its `Arguments`; the others are shared.
#[test]
fn commands_do_not_name_one_another() {
    let sources = sources("src/cli");
    let front = sources.iter().find(|source| source.module.is_empty()).expect("src/cli/mod.rs");
    let words = front.words();
    let commands: BTreeSet<&str> =
        words.windows(3).filter(|w| w[1] == "::" && w[2] == "Arguments").map(|w| &*w[0]).collect();
    assert!(commands.contains("bench") && commands.contains("eval"), "{commands:?}");
    let mut found = BTreeSet::new();
    for source in &sources {
        let Some(from) = source.module.first() else { continue };
        for path in source.paths() {
            // Within `src/cli`, `crate` is the folder itself where `super` led there, and its parent where it
            // is written.
            let mut rest = path.iter().skip(1).skip_while(|name| *name == "cli");
            let Some(to) = rest.next().filter(|_| path[0] == "crate") else { continue };
            if commands.contains(&**to) && to != from {
                found.insert((source.file.clone(), to.clone()));
            }
        }
    }
    compare(found, |file| file.starts_with("src/"));
}

/// The modules at the top of a crate have an order in which each names only those below it. What is inside of
/// one of them is its own affair. So are the files of crates that are one module each: `ptx-build`, and the
/// two that have two sides which know each other, `simt` (primitives and emulator) and the device layer
/// (devices and backends).
#[test]
fn modules_name_one_another_in_no_circle() {
    const CRATES: [&str; 4] = ["host/src", "kernels-gpu/src", "crates/capi/src", "crates/simt-test/src"];
    for root in CRATES {
        let sources = sources(root);
        let mut named = names(&sources);
        assert!(named.len() > 2, "{root}: {:?}", named.keys());
        without_circles(&mut named);
        let edges = named.iter().flat_map(|(from, to)| {
            to.iter().map(move |(to, file)| format!("\n    {from} names {to} in {file}"))
        });
        assert!(named.is_empty(), "{root} has modules in a circle:{}", edges.collect::<String>());
    }
}

/// Modules at the top, with those that each names and a file where it does. Tests are left out. What the root
/// defines itself is in a module without a name.
type Named = BTreeMap<String, BTreeMap<String, String>>;

fn names(sources: &[Source]) -> Named {
    let top = |source: &Source| source.module.first().cloned().unwrap_or_default();
    let modules: BTreeSet<String> = sources.iter().map(top).collect();
    let tests: Vec<Vec<String>> = sources.iter().flat_map(Source::modules_of_tests).collect();
    let roots = sources.iter().filter(|source| source.module.is_empty());
    let own: BTreeSet<String> = roots.flat_map(Source::items).collect();
    let mut named = Named::new();
    for source in sources {
        let from = named.entry(top(source)).or_default();
        for (module, path) in source.paths_by_module() {
            if tests.iter().any(|test| module.starts_with(test)) {
                continue;
            }
            let to = match &path[..] {
                [first, name, ..] if first == "crate" => {
                    if own.contains(name) {
                        ""
                    } else {
                        name
                    }
                }
                // In the root a module's name is enough.
                [name, ..] if module.is_empty() => name,
                _ => continue,
            };
            if modules.contains(to) && to != top(source) {
                from.entry(to.to_owned()).or_insert_with(|| source.file.clone());
            }
        }
    }
    named
}

/// Leaves what is in a circle, or between two of them.
fn without_circles(named: &mut Named) {
    loop {
        let before: usize = named.values().map(|to| to.len() + 1).sum();
        let from: BTreeSet<String> = named.keys().cloned().collect();
        named.values_mut().for_each(|to| to.retain(|to, _| from.contains(to)));
        let wanted: BTreeSet<String> = named.values().flat_map(|to| to.keys().cloned()).collect();
        named.retain(|from, to| !to.is_empty() && wanted.contains(from));
        if named.values().map(|to| to.len() + 1).sum::<usize>() == before {
            return;
        }
    }
}

/// Fails for what was found and is not allowed, and for what is allowed, is `ours`, and was not found.
fn compare(found: BTreeSet<(String, String)>, ours: impl Fn(&str) -> bool) {
    let allowed: BTreeSet<(String, String)> = ALLOWED
        .iter()
        .filter(|(file, _)| ours(file))
        .map(|(file, to)| (file.to_string(), to.to_string()))
        .collect();
    let rows = |set: &BTreeSet<(String, String)>, other: &BTreeSet<(String, String)>| -> String {
        set.difference(other).map(|(file, to)| format!("\n    ({file:?}, {to:?}),")).collect()
    };
    let (new, stale) = (rows(&found, &allowed), rows(&allowed, &found));
    assert!(new.is_empty(), "these name what they must not:{new}");
    assert!(stale.is_empty(), "these rows of ALLOWED are not needed any more, remove them:{stale}");
}

/// A file with the module that it is, from its root down.
struct Source {
    file: String,
    module: Vec<String>,
    text: String,
}

impl Source {
    /// Its words and marks without comments, strings and characters.
    fn words(&self) -> Vec<String> {
        let mut words = Vec::new();
        let mut rest = self.text.as_str();
        while let Some(first) = rest.chars().next() {
            let is_word = |c: char| c.is_alphanumeric() || c == '_';
            let end = if rest.starts_with("//") {
                rest.find('\n').unwrap_or(rest.len())
            } else if rest.starts_with("/*") {
                rest.find("*/").map_or(rest.len(), |at| at + 2)
            } else if let Some(raw) = rest.strip_prefix("r\"") {
                raw.find('"').map_or(rest.len(), |at| at + 3)
            } else if rest.starts_with("r#\"") {
                rest.find("\"#").map_or(rest.len(), |at| at + 2)
            } else if first == '"' {
                string_end(rest)
            } else if rest.starts_with("'\"'") || rest.starts_with("'{'") || rest.starts_with("'}'") {
                3
            } else if rest.starts_with("'\\\"'") || rest.starts_with("'\\''") {
                4
            } else {
                let end = match first {
                    ':' if rest.starts_with("::") => 2,
                    c if is_word(c) => rest.find(|c| !is_word(c)).unwrap_or(rest.len()),
                    c => c.len_utf8(),
                };
                if !first.is_whitespace() {
                    words.push(rest[..end].to_owned());
                }
                end
            };
            rest = &rest[end..];
        }
        words
    }

    /// The modules that are there for tests alone, from the root down.
    fn modules_of_tests(&self) -> Vec<Vec<String>> {
        const MARK: [&str; 7] = ["#", "[", "cfg", "(", "test", ")", "]"];
        let words = self.words();
        let marked = words.windows(MARK.len() + 2).filter(|words| words[..MARK.len()] == MARK);
        let names = marked.filter(|words| words[MARK.len()] == "mod").map(|words| &words[MARK.len() + 1]);
        names.map(|name| self.module.iter().chain([name]).cloned().collect()).collect()
    }

    /// What it defines and does not only hand on.
    fn items(&self) -> Vec<String> {
        let words = self.words();
        let defines = |word: &str| matches!(word, "static" | "fn" | "struct" | "enum" | "trait" | "type");
        words.windows(2).filter(|pair| defines(&pair[0])).map(|pair| pair[1].clone()).collect()
    }

    /// Every path that it names, from `crate` or another crate's name down.
    fn paths(&self) -> Vec<Vec<String>> {
        self.paths_by_module().into_iter().map(|(_, path)| path).collect()
    }

    /// The same, each with the module that names it.
    fn paths_by_module(&self) -> Vec<(Vec<String>, Vec<String>)> {
        let words = self.words();
        let mut found = Vec::new();
        // The modules that are open in the file, each with the depth of braces that it ends at.
        let (mut inner, mut depth): (Vec<(String, usize)>, _) = (Vec::new(), 0usize);
        let mut behind = 0;
        for (i, word) in words.iter().enumerate() {
            // Part of a path that was followed, groups included.
            if i < behind {
                continue;
            }
            match word.as_str() {
                "{" => {
                    if i >= 2 && words[i - 2] == "mod" {
                        inner.push((words[i - 1].clone(), depth));
                    }
                    depth += 1;
                }
                "}" => {
                    depth = depth.saturating_sub(1);
                    inner.pop_if(|(_, at)| *at == depth);
                }
                _ => {}
            }
            let begins = i == 0 || words[i - 1] != "::";
            if begins && is_name(word) && words.get(i + 1).is_some_and(|next| next == "::") {
                let module: Vec<String> =
                    self.module.iter().chain(inner.iter().map(|(name, _)| name)).cloned().collect();
                let here: Vec<String> = ["crate".to_owned()].into_iter().chain(module.clone()).collect();
                let start = match word.as_str() {
                    "super" => here[..here.len().saturating_sub(1).max(1)].to_vec(),
                    "self" => here,
                    name => vec![name.to_owned()],
                };
                let mut paths = Vec::new();
                behind = follow(&words, i + 2, start, &mut paths);
                found.extend(paths.into_iter().map(|path| (module.clone(), path)));
            }
        }
        found
    }
}

/// Follows a path from word `at` on, through every branch of its groups; returns where it ends.
fn follow(words: &[String], mut at: usize, mut path: Vec<String>, found: &mut Vec<Vec<String>>) -> usize {
    loop {
        match words.get(at).map(String::as_str) {
            Some("super") => _ = path.pop_if(|last| last != "crate"),
            Some("self") => {}
            Some("{") => {
                at += 1;
                while words.get(at).is_some_and(|word| word != "}") {
                    at = follow(words, at, path.clone(), found);
                    // To the next branch: past `as` and its name, or the comma.
                    while words.get(at).is_some_and(|word| word != "," && word != "}") {
                        at += 1;
                    }
                    at += words.get(at).is_some_and(|word| word == ",") as usize;
                }
                return at + 1;
            }
            Some(name) if is_name(name) => path.push(name.to_owned()),
            _ => break,
        }
        at += 1;
        if words.get(at).is_none_or(|word| word != "::") {
            break;
        }
        at += 1;
    }
    found.push(path);
    at
}

fn is_name(word: &str) -> bool {
    word.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// Behind the quotation mark that ends the string which `text` begins with.
fn string_end(text: &str) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut entries: Vec<PathBuf> = fs::read_dir(folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.expect("an entry").path())
        .collect();
    entries.sort();
    entries
}

fn stem(path: &Path) -> String {
    path.file_stem().expect("a name").to_str().expect("UTF-8").to_owned()
}

fn folders(root: &str) -> BTreeSet<String> {
    entries(&workspace().join(root)).iter().filter(|path| path.is_dir()).map(|path| stem(path)).collect()
}

fn sources(root: &str) -> Vec<Source> {
    let mut found = Vec::new();
    let mut open = vec![(workspace().join(root), Vec::new())];
    while let Some((folder, module)) = open.pop() {
        for path in entries(&folder) {
            let name = stem(&path);
            let mut module = module.clone();
            if !matches!(&*name, "mod" | "lib" | "main") {
                module.push(name);
            }
            if path.is_dir() {
                open.push((path, module));
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let file = path.strip_prefix(workspace()).expect("in the workspace");
                let file = file.to_str().expect("UTF-8").replace('\\', "/");
                found.push(Source { file, module, text: fs::read_to_string(&path).expect("the source") });
            }
        }
    }
    found
}

/// The finder of circles, over sources with one, one through the root, and one in tests alone.
#[test]
fn circles_are_found_as_written() {
    let source = |name: &str, text: &str| Source {
        file: format!("{name}.rs"),
        module: [name].iter().filter(|name| !name.is_empty()).map(|name| name.to_string()).collect(),
        text: text.into(),
    };
    let circles = |sources: &[Source]| -> Vec<String> {
        let mut named = names(sources);
        without_circles(&mut named);
        named.into_keys().collect()
    };
    let leaf = source("leaf", "pub fn f() {}");
    let root = source("", "pub mod a; pub use other::Thing; pub static ALL: &[u32] = &[a::X];");
    let a = |text| source("a", text);
    let b = source("b", "use crate::{a::X, leaf};");
    assert!(
        circles(&[leaf, root, a("use crate::{leaf, Thing}; mod own { use super::super::leaf::f; }"), b])
            .is_empty()
    );
    let b = || source("b", "use super::a::X;");
    assert_eq!(circles(&[source("c", "use crate::a;"), a("fn f() { crate::b::g() }"), b()]), ["a", "b"]);
    let of_tests = "#[cfg(test)] mod tests { use crate::b::g; }";
    assert!(circles(&[a(of_tests), b()]).is_empty());
    let root = source("", "pub static ALL: &[u32] = &[a::X];");
    assert_eq!(circles(&[root, a("use crate::ALL;")]), ["", "a"]);
}

/// The reader itself: every way to write a path that the sources have.
#[test]
fn paths_are_read_as_written() {
    let text = "
        use crate::{a::{self, b as c}, d}; // use crate::comment::no;
        use super::super::dense::Plan;
        fn f() -> kernels_gpu::int8::Shape { \"crate::string::no\"; super::x::<T>() }
        mod tests { use super::*; use super::y::Z; }
        fn g() { '{'; self::h::i() }
    ";
    let source = Source {
        file: "certified/cache/mod.rs".into(),
        module: vec!["certified".into(), "cache".into()],
        text: text.into(),
    };
    let found: Vec<String> = source.paths().iter().map(|path| path.join("::")).collect();
    let expected = [
        "crate::a",
        "crate::a::b",
        "crate::d",
        "crate::dense::Plan",
        "kernels_gpu::int8::Shape",
        "crate::certified::x",
        "crate::certified::cache",
        "crate::certified::cache::y::Z",
        "crate::certified::cache::h::i",
    ];
    assert_eq!(found, expected);
}
