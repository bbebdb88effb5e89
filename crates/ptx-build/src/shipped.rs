//! PTX that a package ships, so that whoever builds it needs no device compiler.
//!
//! A folder of the package holds `kernels.sm_80.ptx`, … as the author's build wrote them, and a file
//! [`SOURCES`]. Its first line changes with everything that the build watches, `Cargo.lock` apart, and with
//! the version of this crate, which is that of the kernel language; a line a target follows that changes with
//! the PTX. PTX of other sources, or that is not what the build wrote, is never used.

use crate::codegen::Codegen;
use crate::index::{Index, TargetPtx};
use crate::ptx;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The file that says which sources the PTX is of.
pub const SOURCES: &str = "SOURCES";

/// What a folder of shipped PTX came to.
#[derive(Debug)]
pub enum Shipped {
    /// It is of the sources that are there.
    Current(Vec<TargetPtx>),
    /// Why it is not used.
    Unusable(String),
}

/// Tells sources apart: these files, and every file below these folders, by name and contents, and the
/// version of the kernel language. Names are seen from `workspace`; what does not exist counts as such. Of a
/// manifest that cargo has written anew for a package, the author's counts, which lies beside it.
///
/// # Errors
/// The file or folder that cannot be read.
pub fn sources(workspace: &Path, watched: &[PathBuf]) -> Result<String, String> {
    let mut files = Vec::new();
    for path in watched.iter().filter(|path| !path.ends_with("Cargo.lock")) {
        let path = workspace.join(path);
        collect(&path, &mut files).map_err(|error| format!("{}: cannot be read: {error}", path.display()))?;
    }
    files.sort();
    let mut parts = vec![env!("CARGO_PKG_VERSION").to_owned()];
    for file in files {
        let original = file.with_extension("toml.orig");
        let packaged = file.ends_with("Cargo.toml") && original.exists();
        let read = if packaged { &original } else { &file };
        let bytes = fs::read(read).map_err(|error| format!("{}: cannot be read: {error}", read.display()))?;
        let name = file.strip_prefix(workspace).unwrap_or(&file).to_string_lossy().replace('\\', "/");
        // A checkout may end its lines in its own way.
        parts.extend([name, String::from_utf8_lossy(&bytes).replace("\r\n", "\n")]);
    }
    Ok(fingerprint(&parts))
}

fn fingerprint(parts: &[String]) -> String {
    format!("{:016x}", crate::fingerprint(parts.iter().map(String::as_str)))
}

/// Files, and what lies below folders.
fn collect(path: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    if path.is_dir() {
        for entry in fs::read_dir(path)? {
            collect(&entry?.path(), files)?;
        }
    } else if path.exists() {
        files.push(path.to_owned());
    }
    Ok(())
}

/// The contents of [`SOURCES`].
fn seal(sources: &str, targets: &[TargetPtx]) -> String {
    let of_target = |target: &TargetPtx| {
        format!("sm_{} {}\n", target.sm, fingerprint(&[target.ptx.replace("\r\n", "\n")]))
    };
    targets.iter().map(of_target).fold(format!("{sources}\n"), |text, line| text + &line)
}

/// Reads the folder, for these sources and targets.
pub fn read(folder: &Path, sources: &str, targets: &[u32]) -> Shipped {
    let file = folder.join(SOURCES);
    let sealed = match fs::read_to_string(&file) {
        Ok(text) => text.replace("\r\n", "\n"),
        Err(error) => return Shipped::Unusable(format!("{}: {error}", file.display())),
    };
    if sealed.lines().next() != Some(sources) {
        return Shipped::Unusable(format!("the PTX in {} is of other sources", folder.display()));
    }
    let mut found = Vec::new();
    for &sm in targets {
        let path = folder.join(Index::ptx_file(Codegen::Llvm, sm));
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) => return Shipped::Unusable(format!("{}: {error}", path.display())),
        };
        let module = ptx::parse(&text);
        let entries = module.functions.iter().filter(|function| function.is_entry && function.is_defined);
        let entries = entries.map(|function| function.name.clone()).collect();
        found.push(TargetPtx { sm, entries, ptx: text, machine_code: Vec::new(), usage: Vec::new() });
    }
    // Targets that are not asked for may be there, too.
    let lines: Vec<&str> = sealed.lines().collect();
    match seal(sources, &found).lines().find(|line| !lines.contains(line)) {
        None => Shipped::Current(found),
        Some(line) => {
            let target = line.split(' ').next().unwrap_or_default();
            Shipped::Unusable(format!(
                "the PTX for {target} in {} is not what a build wrote",
                folder.display()
            ))
        }
    }
}

/// Writes the folder: first the PTX, then what it is of, each beside the file and then in its place.
///
/// # Errors
/// The file that cannot be written.
pub fn write(folder: &Path, sources: &str, targets: &[TargetPtx]) -> Result<(), String> {
    let put = |name: String, text: &str| {
        let path = folder.join(&name);
        let beside = folder.join(format!("{name}.partial"));
        fs::write(&beside, text)
            .and_then(|()| fs::rename(&beside, &path))
            .map_err(|error| format!("{}: cannot be written: {error}", path.display()))
    };
    fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    // While texts change the folder is of no sources.
    let file = folder.join(SOURCES);
    if file.exists() {
        fs::remove_file(&file).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    for target in targets {
        put(Index::ptx_file(Codegen::Llvm, target.sm), &target.ptx)?;
    }
    put(SOURCES.into(), &seal(sources, targets))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("ptx-build-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(folder.join("src/inner")).unwrap();
        fs::write(folder.join("src/lib.rs"), "mod inner;\n").unwrap();
        fs::write(folder.join("src/inner/mod.rs"), "// nothing\n").unwrap();
        folder
    }

    #[test]
    fn ptx_of_these_sources_is_used_and_no_other() {
        let package = package("sources");
        let watched = ["src".into(), "Cargo.toml".into(), "Cargo.lock".into()];
        let of = || sources(&package, &watched).unwrap();
        let (ptx, before) = (package.join("ptx"), of());
        assert!(matches!(read(&ptx, &before, &[80]), Shipped::Unusable(_)));
        let text = ".visible .entry k()\n{\n\tret;\n}\n";
        let target = |sm| TargetPtx {
            sm,
            ptx: text.into(),
            machine_code: vec![1],
            entries: vec!["k".into()],
            usage: Vec::new(),
        };
        write(&ptx, &before, &[target(80), target(90)]).unwrap();
        let Shipped::Current(found) = read(&ptx, &before, &[80, 90]) else { panic!("of these sources") };
        assert_eq!((found[1].sm, &found[1].entries[..], &found[1].ptx[..]), (90, &["k".into()][..], text));
        assert!(matches!(read(&ptx, &before, &[90]), Shipped::Current(_)));
        // A target that nobody shipped.
        let unusable = |sources: &str, targets: &[u32]| match read(&ptx, sources, targets) {
            Shipped::Unusable(reason) => reason,
            Shipped::Current(_) => panic!("current"),
        };
        assert!(unusable(&before, &[80, 100]).contains("kernels.sm_100.ptx"));
        // What is cut short is not what the build wrote.
        fs::write(ptx.join("kernels.sm_90.ptx"), &text[..9]).unwrap();
        assert!(matches!(read(&ptx, &before, &[80]), Shipped::Current(_)));
        assert!(unusable(&before, &[80, 90]).contains("sm_90"));
        write(&ptx, &before, &[target(80), target(90)]).unwrap();
        // Another line, another file that is no Rust, another name, another end of line; versions of
        // dependencies are cargo's business.
        fs::write(package.join("src/inner/mod.rs"), "// nothing\r\n").unwrap();
        fs::write(package.join("Cargo.lock"), "").unwrap();
        assert_eq!(of(), before);
        fs::write(package.join("src/table.bin"), [255, 0]).unwrap();
        let after = of();
        assert_ne!(after, before);
        assert!(unusable(&after, &[80]).contains("of other sources"));
        fs::rename(package.join("src/inner"), package.join("src/outer")).unwrap();
        let moved = of();
        assert_ne!(moved, after);
        fs::write(package.join("Cargo.toml"), "[package]").unwrap();
        let with_manifest = of();
        assert_ne!(with_manifest, moved);
        // What `cargo package` makes of a manifest, and the author's beside it.
        fs::write(package.join("Cargo.toml.orig"), "[package]").unwrap();
        fs::write(package.join("Cargo.toml"), "# written by cargo\n[package]").unwrap();
        assert_eq!(of(), with_manifest);
        let _ = fs::remove_dir_all(&package);
    }
}
