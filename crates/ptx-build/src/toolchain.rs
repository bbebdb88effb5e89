//! Finds the device toolchain: a rustc of the pinned version whose library source is installed.
//!
//! Looked for, in this order: the environment variable [`RUSTC_ENV`], rustup's toolchain of that version,
//! and `/usr/bin/rustc` (Debian's `rustc-web`). The target's precompiled libraries are not needed: `core` is
//! built from source.

use std::env;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The one version of rustc that compiles kernels: its unstable features are what the kernels use.
pub const VERSION: &str = "1.96.0";

/// Names a device compiler to use as it is.
pub const RUSTC_ENV: &str = "FERROKV_DEVICE_RUSTC";

/// How to get a device compiler.
pub const REMEDY: &str =
    "run ./setup, or `rustup toolchain install 1.96.0 --profile minimal --component rust-src`";

/// What [`find`] came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceToolchain {
    /// There is a compiler.
    Found(Found),
    /// There is none.
    Missing(Missing),
}

/// Where a compiler was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Named by [`RUSTC_ENV`].
    Environment,
    /// A toolchain of rustup.
    Rustup,
    /// The distribution's.
    System,
}

/// A device compiler that can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The compiler.
    pub rustc: PathBuf,
    /// What it says of itself, for example `rustc 1.96.0 (ac68faa20 2026-05-25)`.
    pub version: String,
    /// Where it was found.
    pub origin: Origin,
    /// The source of the standard library.
    pub library: PathBuf,
}

/// Why there is no device compiler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// One line for each place that was looked at.
    pub reasons: Vec<String>,
    /// How to get one.
    pub remedy: String,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Origin::Environment => RUSTC_ENV,
            Origin::Rustup => "rustup",
            Origin::System => "the system",
        })
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {} (from {})", self.version, self.rustc.display(), self.origin)
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no device compiler: {}; {}", self.reasons.join("; "), self.remedy)
    }
}

impl fmt::Display for DeviceToolchain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceToolchain::Found(found) => found.fmt(f),
            DeviceToolchain::Missing(missing) => missing.fmt(f),
        }
    }
}

/// Looks for the device toolchain.
pub fn find() -> DeviceToolchain {
    if let Some(named) = env::var_os(RUSTC_ENV).filter(|value| !value.is_empty()) {
        return match probe(Path::new(&named), Origin::Environment) {
            Ok(found) => DeviceToolchain::Found(found),
            Err(reason) => missing(vec![format!("{RUSTC_ENV}: {reason}")]),
        };
    }
    let mut reasons = Vec::new();
    let rustup = rustup_candidates();
    if rustup.is_empty() {
        reasons.push(format!("rustup has no toolchain {VERSION}"));
    }
    let candidates = rustup
        .into_iter()
        .map(|path| (path, Origin::Rustup))
        .chain([(PathBuf::from("/usr/bin/rustc"), Origin::System)]);
    for (path, origin) in candidates {
        match probe(&path, origin) {
            Ok(found) => return DeviceToolchain::Found(found),
            Err(reason) => reasons.push(reason),
        }
    }
    missing(reasons)
}

fn missing(reasons: Vec<String>) -> DeviceToolchain {
    DeviceToolchain::Missing(Missing { reasons, remedy: REMEDY.into() })
}

/// The compilers of rustup's toolchains of the pinned version (`1.96.0-x86_64-unknown-linux-gnu`). Read from
/// the folder: asking rustup could start a download.
fn rustup_candidates() -> Vec<PathBuf> {
    let home = env::var_os("RUSTUP_HOME")
        .map(PathBuf::from)
        .or_else(|| env::var_os("HOME").map(|home| Path::new(&home).join(".rustup")));
    let Some(entries) = home.and_then(|home| home.join("toolchains").read_dir().ok()) else {
        return Vec::new();
    };
    let mut found: Vec<PathBuf> = entries
        .filter_map(Result::ok)
        .filter(|entry| {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            name.strip_prefix(VERSION).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
        })
        .map(|entry| entry.path().join("bin/rustc"))
        .collect();
    found.sort();
    found
}

/// Is `rustc` of the pinned version, with the library source in its sysroot?
fn probe(rustc: &Path, origin: Origin) -> Result<Found, String> {
    let at = rustc.display();
    if !rustc.exists() {
        return Err(format!("{at} does not exist"));
    }
    let run = |args: &[&str]| -> Result<String, String> {
        let output = Command::new(rustc)
            .args(args)
            .env_remove("RUSTUP_TOOLCHAIN")
            .output()
            .map_err(|error| format!("{at} does not start: {error}"))?;
        if !output.status.success() {
            return Err(format!("{at} {} failed: {}", args.join(" "), output.status));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let verbose = run(&["-vV"])?;
    let release = verbose.lines().find_map(|line| line.strip_prefix("release: ")).unwrap_or("unknown");
    if release != VERSION {
        return Err(format!("{at} is version {release}, not {VERSION}"));
    }
    let library = Path::new(run(&["--print", "sysroot"])?.trim()).join("lib/rustlib/src/rust/library");
    if !library.join("core/Cargo.toml").exists() {
        return Err(format!("{at} has no library source (the component rust-src, Debian's rust-web-src)"));
    }
    // `rustc 1.96.0 (hash date) (built from a source tarball)`: the last part says nothing.
    let first = verbose.lines().next().unwrap_or_default();
    let version = first.split_inclusive(')').next().unwrap_or(first).to_owned();
    Ok(Found { rustc: rustc.to_owned(), version, origin, library })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_failed_candidate_says_why() {
        let absent = probe(Path::new("/nonexistent/rustc"), Origin::System).unwrap_err();
        assert_eq!(absent, "/nonexistent/rustc does not exist");
        // The compiler of this very test is some rustc, but not the device's version.
        let rustc = env::var("RUSTC")
            .unwrap_or_else(|_| format!("{}/bin/rustc", env!("CARGO").trim_end_matches("/bin/cargo")));
        if Path::new(&rustc).exists() {
            let other = probe(Path::new(&rustc), Origin::System).unwrap_err();
            assert!(other.contains("not 1.96.0"), "{other}");
        }
    }

    #[test]
    fn missing_names_every_reason_and_the_way_out() {
        let text = missing(vec!["a is not there".into(), "b is too old".into()]).to_string();
        assert!(text.contains("a is not there; b is too old; run ./setup"), "{text}");
    }

    #[test]
    fn the_remedy_names_the_pinned_version() {
        assert!(REMEDY.contains(VERSION));
    }
}
