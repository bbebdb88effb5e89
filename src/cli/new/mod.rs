//! `ferrokv new`: a crate with a kernel of one's own.

use super::failure::{CommandError, Failure};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

const LONG: &str = "\
Make a crate with one kernel, the function that launches it, a program and a test. It builds, runs and tests at \
once: on the GPU if there is one and a device compiler (`ferrokv doctor` says how to get it), and under the \
emulator without either.

  ferrokv new my-kernels && cd my-kernels
  cargo test        the kernel over drawn inputs, with every check, in nine orders, and on the GPU
  cargo run         the kernel on whatever there is

The chapter docs/own-crate.md says what is in it and where to go from there.

Exit codes: 0 the crate is there; 2 bad input, or a folder that cannot be written.";

/// Make a crate with a kernel of one's own.
#[derive(clap::Args)]
#[command(long_about = LONG)]
pub struct Arguments {
    /// The folder to make; its last part is the crate's name.
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
    /// Where Ferrokv's crates are: a checkout of its repository, or `registry` for versions in place of
    /// folders. Without it the checkout that this program was built from.
    #[arg(long, value_name = "CHECKOUT")]
    crates: Option<PathBuf>,
}

/// Why there is no crate.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error(
        "'{0}' is no name for a crate: give a folder whose last part begins with a small letter and has small \
         ASCII letters, digits, - and _ alone, and is neither a word of Rust nor the name of a crate that this \
         one needs"
    )]
    Name(String),
    #[error("{} is there already: name another folder, or remove it", .0.display())]
    Exists(PathBuf),
    #[error("{} has no {FIRST_CRATE}: give --crates the folder of a checkout of Ferrokv, or `registry`", .0.display())]
    NoCheckout(PathBuf),
    #[error("{}: a manifest can only name paths in UTF-8: give --crates another one", .0.display())]
    NotText(PathBuf),
    #[error("{}: {error}", path.display())]
    File { path: PathBuf, error: io::Error },
}

impl CommandError for Refused {}

const FIRST_CRATE: &str = "crates/simt/Cargo.toml";
const REGISTRY: &str = "registry";

/// An archive without members: see `.cargo/config.toml` of the new crate.
const EMPTY_ARCHIVE: &str = "!<arch>\n";

/// Words that are no names in Rust, and names that cargo or Rust has for itself.
const TAKEN: &str = " abstract as async await become box break const continue crate do dyn else enum extern false \
    final fn for gen if impl in let loop macro match mod move mut override priv pub ref return self static struct \
    super trait true try type typeof unsafe unsized use virtual where while yield alloc build core deps examples \
    incremental proc-macro std test ";
/// Crates that the new one has below it, apart from those whose names begin with `ferrokv`.
const NEEDED: &str = " simt simt-test simt-macros ptx-build cuda-lazy bytemuck half glam cust cust-raw cust-core \
    cust-derive thiserror tracing rayon libc libloading corosensei proptest syn quote proc-macro2 ";

/// Runs the command.
///
/// # Errors
/// A name that cannot be a crate's, a folder that is there, a checkout without the crates, a file that cannot
/// be written.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let folder = &arguments.folder;
    let name = name(folder)?;
    let crates = crates(arguments.crates.as_deref())?;
    if folder.symlink_metadata().is_ok() {
        return Err(Refused::Exists(folder.clone()).into());
    }
    // All of it beside the place first, so that there is a whole crate or none.
    let parent = folder.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let file = |path: &Path, error| Refused::File { path: path.into(), error };
    fs::create_dir_all(parent).map_err(|error| file(parent, error))?;
    let beside = tempfile::Builder::new()
        .prefix(".ferrokv-new-")
        .tempdir_in(parent)
        .map_err(|error| file(parent, error))?;
    for (path, text) in files(&name, crates.as_deref()) {
        let path = beside.path().join(path);
        let inner = path.parent().unwrap_or(beside.path());
        fs::create_dir_all(inner).map_err(|error| file(inner, error))?;
        fs::write(&path, text).map_err(|error| file(&path, error))?;
    }
    fs::rename(beside.path(), folder).map_err(|error| file(folder, error))?;
    // It is no longer there to be removed.
    let _ = beside.keep();
    let of = crates.unwrap_or("the registry".into());
    println!("made {}, with Ferrokv's crates of {of}", folder.display());
    println!("  cd {} && cargo test", folder.display());
    Ok(())
}

/// The crate's name: the last part of the folder's path.
fn name(folder: &Path) -> Result<String, Refused> {
    let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
    let good = name.starts_with(|c: char| c.is_ascii_lowercase()) && name.chars().all(plain);
    let word = format!(" {} ", name.replace('_', "-"));
    let taken = [TAKEN, NEEDED].iter().any(|words| words.contains(&word)) || word.starts_with(" ferrokv");
    if !good || taken {
        return Err(Refused::Name(name));
    }
    Ok(name)
}

/// The checkout, as an absolute path; `None` for the registry.
fn crates(given: Option<&Path>) -> Result<Option<String>, Refused> {
    if given == Some(Path::new(REGISTRY)) {
        return Ok(None);
    }
    let folder = given.unwrap_or(Path::new(env!("CARGO_MANIFEST_DIR")));
    if !folder.join(FIRST_CRATE).is_file() {
        return Err(Refused::NoCheckout(folder.into()));
    }
    let whole = fs::canonicalize(folder).map_err(|error| Refused::File { path: folder.into(), error })?;
    whole.to_str().map(|text| Some(text.into())).ok_or(Refused::NotText(whole))
}

/// A string of TOML.
fn quoted(text: &str) -> String {
    let escaped = |c: char| match c {
        '"' | '\\' => format!("\\{c}"),
        c if c.is_control() => format!("\\u{:04X}", u32::from(c)),
        c => c.into(),
    };
    format!("\"{}\"", text.chars().map(escaped).collect::<String>())
}

/// What the new crate consists of.
fn files(name: &str, crates: Option<&str>) -> Vec<(&'static str, String)> {
    let dependency = |folder: &str| match crates {
        Some(crates) => format!("path = {}", quoted(&format!("{crates}/crates/{folder}"))),
        None => format!("version = \"={}\"", env!("CARGO_PKG_VERSION")),
    };
    let mut manifest = include_str!("template/manifest.toml").replace("@NAME@", name);
    for folder in ["simt-test", "simt", "device", "ptx-build"] {
        manifest = manifest.replace(&format!("@{folder}@"), &dependency(folder));
    }
    let lib = name.replace('-', "_");
    vec![
        ("Cargo.toml", manifest),
        ("build.rs", include_str!("template/build.rs").into()),
        ("src/lib.rs", include_str!("template/lib.rs").into()),
        ("src/host.rs", include_str!("template/host.rs").into()),
        ("src/main.rs", include_str!("template/main.rs").replace("@LIB@", &lib)),
        (".cargo/config.toml", include_str!("template/config.toml").into()),
        (".cargo/cuda/lib64/libcuda.a", EMPTY_ARCHIVE.into()),
        (".gitignore", "/target\n".into()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_crates() {
        for good in ["my-kernels", "a/b/kernels_2", "/x/k"] {
            assert!(name(Path::new(good)).is_ok(), "{good}");
        }
        let bad = [
            "",
            "..",
            "2x",
            "-x",
            "a b",
            "K",
            "schlüssel",
            "match",
            "struct",
            "yield",
            "abstract",
            "std",
            "build",
            "proc_macro",
            "simt",
            "simt_test",
            "half",
            "ferrokv",
            "ferrokv-simt",
            "a/..",
        ];
        for bad in bad {
            assert!(matches!(name(Path::new(bad)), Err(Refused::Name(_))), "{bad}");
        }
    }

    #[test]
    fn nothing_is_left_to_be_filled_in() {
        for crates in [None, Some("/a \"folder\"/of\\crates")] {
            for (path, text) in files("my-kernels", crates) {
                let marks = text.split('@').skip(1).filter(|rest| rest.starts_with(char::is_alphabetic));
                assert_eq!(marks.count(), 0, "{path}:\n{text}");
            }
        }
    }

    #[test]
    fn paths_are_strings_of_toml() {
        assert_eq!(quoted("/a \"b\"\\c\t/e\u{301}"), "\"/a \\\"b\\\"\\\\c\\u0009/e\u{301}\"");
    }
}
