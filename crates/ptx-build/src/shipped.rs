//! PTX that a package ships, so that whoever builds it needs no device compiler.
//!
//! A folder of the package holds `kernels.sm_80.ptx`, … as the author's build wrote them, and a file
//! [`SOURCES`] with one line: sixteen hexadecimal digits that change with the package's sources and with the
//! version of this crate, which is that of the kernel language. PTX of other sources is never used.

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

/// Tells the sources of a package apart: every file below `src`, by name and contents, and the version of
/// the kernel language.
///
/// # Errors
/// The file or folder that cannot be read.
pub fn sources(package: &Path) -> Result<String, String> {
    let mut files = Vec::new();
    let src = package.join("src");
    collect(&src, &mut files).map_err(|error| format!("{}: cannot be read: {error}", src.display()))?;
    files.sort();
    let mut parts = vec![env!("CARGO_PKG_VERSION").to_owned()];
    for file in files {
        let text = fs::read_to_string(&file)
            .map_err(|error| format!("{}: cannot be read: {error}", file.display()))?;
        let name = file.strip_prefix(&src).unwrap_or(&file).to_string_lossy().replace('\\', "/");
        // A checkout may end its lines in its own way.
        parts.extend([name, text.replace("\r\n", "\n")]);
    }
    Ok(format!("{:016x}", crate::fingerprint(parts.iter().map(String::as_str))))
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

/// Reads the folder, for these sources and targets.
pub fn read(folder: &Path, sources: &str, targets: &[u32]) -> Shipped {
    let file = folder.join(SOURCES);
    match fs::read_to_string(&file) {
        Ok(of) if of.trim() == sources => {}
        Ok(_) => return Shipped::Unusable(format!("the PTX in {} is of other sources", folder.display())),
        Err(error) => return Shipped::Unusable(format!("{}: {error}", file.display())),
    }
    let mut found = Vec::new();
    for &sm in targets {
        let path = folder.join(Index::ptx_file(sm));
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) => return Shipped::Unusable(format!("{}: {error}", path.display())),
        };
        let module = ptx::parse(&text);
        let entries = module.functions.iter().filter(|function| function.is_entry && function.is_defined);
        let entries = entries.map(|function| function.name.clone()).collect();
        found.push(TargetPtx { sm, entries, ptx: text, machine_code: Vec::new(), usage: Vec::new() });
    }
    Shipped::Current(found)
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
        put(Index::ptx_file(target.sm), &target.ptx)?;
    }
    put(SOURCES.into(), &format!("{sources}\n"))
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
        let (ptx, before) = (package.join("ptx"), sources(&package).unwrap());
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
        // A target that nobody shipped.
        let Shipped::Unusable(reason) = read(&ptx, &before, &[80, 100]) else { panic!("not there") };
        assert!(reason.contains("kernels.sm_100.ptx"), "{reason}");
        // Another line, another name, another end of line.
        fs::write(package.join("src/inner/mod.rs"), "// nothing\r\n").unwrap();
        assert_eq!(sources(&package).unwrap(), before);
        fs::write(package.join("src/inner/mod.rs"), "// something\n").unwrap();
        let after = sources(&package).unwrap();
        assert_ne!(after, before);
        let Shipped::Unusable(reason) = read(&ptx, &after, &[80]) else { panic!("of other sources") };
        assert!(reason.contains("of other sources"), "{reason}");
        fs::rename(package.join("src/inner"), package.join("src/outer")).unwrap();
        assert_ne!(sources(&package).unwrap(), after);
        let _ = fs::remove_dir_all(&package);
    }

    #[test]
    fn a_package_without_sources_is_named() {
        let error = sources(Path::new("/nonexistent/package")).unwrap_err();
        assert!(error.contains("/nonexistent/package/src"), "{error}");
    }
}
