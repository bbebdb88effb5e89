//! Compiles a package to PTX: one run of cargo, for the lowest target of the build. What is for some targets
//! only is sorted out of its text ([`since`](crate::since), [`needs`](crate::needs)).
//!
//! The target has a folder of its own under the target folder that persists between builds, so that an edited
//! kernel costs one small crate and its code generation. `core` is built there once, with panics as traps: a
//! failed check in a kernel is one instruction and no call.

use crate::toolchain::Found;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The target triple.
pub const TRIPLE: &str = "nvptx64-nvidia-cuda";

/// The PTX version asked for: the first that every CUDA 12 driver reads, and late enough for the hints of
/// `cp.async` (7.4). A target's text gets a newer one where it needs that ([`version`](crate::version)).
pub const PTX_VERSION: &str = "ptx80";

/// Set for the compiler of the kernels, and so for the build scripts that it runs: that of a package which
/// compiles itself has nothing to do there.
pub const INSIDE_ENV: &str = "PTX_BUILD_INSIDE";

/// The attributes that a crate of kernels needs on the device, so that its author need not write them. They
/// go to the package alone: a library with kernels of its own has them in its source.
const ATTRIBUTES: [&str; 3] = [
    "-Zcrate-attr=no_std",
    "-Zcrate-attr=feature(abi_ptx,asm_experimental_arch)",
    // Not every kernel needs both.
    "-Aunused-features",
];

/// The profile `ptx`, as settings of cargo: no workspace needs to have it. Checks, which the host's profile
/// may ask for, would be branches in every kernel. Lines are directives in the PTX; more of debug information
/// would make ptxas leave optimisation out.
fn profile(package: &str, lines: bool) -> Vec<String> {
    let settings = [
        "inherits=\"release\"",
        "opt-level=3",
        "lto=\"fat\"",
        "codegen-units=1",
        "panic=\"abort\"",
        if lines { "debug=\"line-directives-only\"" } else { "debug=false" },
        "debug-assertions=false",
        "overflow-checks=false",
    ];
    // What the workspace says of the package goes before what it says of a profile.
    let of_package = ["debug-assertions", "overflow-checks"];
    let of_package = of_package.map(|name| format!("profile.ptx.package.{package}.{name}=false"));
    settings.iter().map(|setting| format!("profile.ptx.{setting}")).chain(of_package).collect()
}

/// What to compile, and how.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// The folder of the workspace's Cargo.toml, or of the package's.
    pub workspace: &'a Path,
    /// The package; its library is compiled as a `cdylib`.
    pub package: &'a str,
    /// The target, 90 for sm_90: the text is for newer ones, too.
    pub sm: u32,
    /// Whether PTX is wanted.
    pub asm: bool,
    /// Whether the optimised module is wanted, as text: for another code generator.
    pub ir: bool,
    /// Whether the PTX names the source line of each instruction (`.loc`).
    pub lines: bool,
    /// The folder that persists.
    pub folder: &'a Path,
    /// The device compiler.
    pub toolchain: &'a Found,
}

/// What the compiler wrote.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// The PTX, if it was asked for.
    pub ptx: Option<String>,
    /// The module, if it was asked for.
    pub ir: Option<Ir>,
    /// Its diagnostics, rendered.
    pub warnings: String,
}

/// A module of LLVM IR, as text.
#[derive(Clone, Debug)]
pub struct Ir {
    /// The file.
    pub path: PathBuf,
    /// What it holds.
    pub text: String,
}

/// Why there is no PTX.
#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    /// The code is wrong.
    #[error("{package} does not compile\n{diagnostics}")]
    Rejected {
        /// The package.
        package: String,
        /// The compiler's diagnostics, rendered.
        diagnostics: String,
    },
    /// A program does not start.
    #[error("{}: does not start: {error}", program.display())]
    Start {
        /// The program.
        program: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// No program for the link step, which has nothing to do.
    #[error("no program `true` in PATH, /bin or /usr/bin, which stands in for the linker")]
    NoLinker,
    /// A file cannot be read or written.
    #[error("{}: {error}; if it stays so, remove the folder and build again", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
}

/// Compiles the package for one target.
pub fn compile(request: &Request) -> Result<Compiled, CompileError> {
    let folder =
        request.folder.join(format!("sm_{}{}", request.sm, if request.lines { "-lines" } else { "" }));
    let file = |path: &Path, error| CompileError::File { path: path.to_owned(), error };
    fs::create_dir_all(&folder).map_err(|error| file(&folder, error))?;
    // Two outer builds (debug and release, say) may meet here: the second waits until the first has read its
    // PTX.
    let lock_path = folder.join(".ptx-build.lock");
    let lock = File::create(&lock_path).map_err(|error| file(&lock_path, error))?;
    lock.lock().map_err(|error| file(&lock_path, error))?;

    let assembly = folder.join(format!("{}.s", request.package));
    let ir = folder.join(format!("{}.ll", request.package));
    let cargo = env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from);
    let emits = [("--emit=asm=", &assembly, request.asm), ("--emit=llvm-ir=", &ir, request.ir)];
    let emits = emits.into_iter().filter(|(.., wanted)| *wanted).map(|(option, path, _)| {
        let mut emit = OsString::from(option);
        emit.push(path);
        emit
    });
    let mut command = Command::new(&cargo);
    command.current_dir(request.workspace);
    command.args(["rustc", "--quiet", "--color=never", "--package", request.package, "--lib"]);
    for setting in profile(request.package, request.lines) {
        command.arg("--config").arg(setting);
    }
    command.args([
        "--crate-type=cdylib",
        "--profile=ptx",
        "--target",
        TRIPLE,
        "-Zbuild-std=core",
        "--target-dir",
    ]);
    command.arg(&folder).arg("--").args(ATTRIBUTES).args(emits);
    scrub(&mut command);
    command.env(INSIDE_ENV, "1");
    command.env("RUSTC", &request.toolchain.rustc).env("RUSTC_BOOTSTRAP", "1");
    // Empty names also override a wrapper that cargo's configuration names.
    command.env("RUSTC_WRAPPER", "").env("RUSTC_WORKSPACE_WRAPPER", "");
    command.env("CARGO_ENCODED_RUSTFLAGS", flags(request.sm, &no_linker()?));

    let output = command.output().map_err(|error| CompileError::Start { program: cargo, error })?;
    let diagnostics = clean(&String::from_utf8_lossy(&output.stderr));
    if !output.status.success() {
        return Err(CompileError::Rejected { package: request.package.to_owned(), diagnostics });
    }
    let read = |path: &Path| fs::read_to_string(path).map_err(|error| file(path, error));
    let ptx = if request.asm { Some(read(&assembly)?) } else { None };
    let ir = if request.ir { Some(Ir { text: read(&ir)?, path: ir }) } else { None };
    Ok(Compiled { ptx, ir, warnings: diagnostics })
}

/// The compiler's flags, as `CARGO_ENCODED_RUSTFLAGS` wants them.
fn flags(sm: u32, linker: &Path) -> OsString {
    let mut flags = OsString::from("-Clinker=");
    flags.push(linker);
    for flag in [
        format!("-Ctarget-cpu=sm_{sm}"),
        format!("-Ctarget-feature=+{PTX_VERSION}"),
        "-Zunstable-options".into(),
        "-Cpanic=immediate-abort".into(),
        // rustc's own jump threading copies calls into the arms of a later branch, barriers too: threads that
        // took different arms then wait for each other at different barriers, for ever. LLVM knows not to do
        // that.
        "-Zmir-enable-passes=-JumpThreading".into(),
        // What a kernel unrolls or calls must disappear whatever its size: indices must become constants, or
        // arrays land in local memory.
        "-Cllvm-args=-unroll-threshold=10000".into(),
        "-Cllvm-args=-inline-threshold=10000".into(),
    ] {
        flags.push("\x1f");
        flags.push(flag);
    }
    flags
}

/// A program that does nothing and succeeds. What `--emit` asks for is there before the linker is called, and
/// the bitcode linker that the target would want need not be installed.
fn no_linker() -> Result<PathBuf, CompileError> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(["/bin".into(), "/usr/bin".into()])
        .map(|folder| folder.join("true"))
        .find(|candidate| candidate.is_file())
        .ok_or(CompileError::NoLinker)
}

/// Takes out of the command's environment what the outer cargo and the user's host settings put there: each
/// would change the device build, or make it start over.
fn scrub(command: &mut Command) {
    for (name, _) in env::vars_os() {
        if is_outer(&name) {
            command.env_remove(&name);
        }
    }
}

fn is_outer(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    let exact = [
        "CARGO",
        "CARGO_ENCODED_RUSTFLAGS",
        "CARGO_INCREMENTAL",
        "CARGO_MAKEFLAGS",
        "CARGO_TARGET_DIR",
        "DEBUG",
        "HOST",
        "MAKEFLAGS",
        "MFLAGS",
        "NUM_JOBS",
        "OPT_LEVEL",
        "OUT_DIR",
        "PROFILE",
        "RUSTC",
        "RUSTC_LINKER",
        "RUSTC_WORKSPACE_WRAPPER",
        "RUSTC_WRAPPER",
        "RUSTDOC",
        "RUSTDOCFLAGS",
        "RUSTFLAGS",
        "RUSTUP_TOOLCHAIN",
        "RUST_RECURSION_COUNT",
        "TARGET",
    ];
    let starts = [
        "CARGO_BIN_",
        "CARGO_BUILD_",
        "CARGO_CFG_",
        "CARGO_FEATURE_",
        "CARGO_MANIFEST_",
        "CARGO_PKG_",
        "CARGO_PROFILE_",
        "CARGO_TARGET_",
        "CARGO_UNSTABLE_",
        "DEP_",
    ];
    exact.contains(&&*name) || starts.iter().any(|start| name.starts_with(start))
}

/// Cargo's standard error without what says nothing to the kernel's author: that the target feature above is
/// unstable, and the counts of warnings.
fn clean(stderr: &str) -> String {
    let noise = |paragraph: &&str| {
        let first = paragraph.trim_start().lines().next().unwrap_or_default();
        let unstable = first.starts_with("warning: unstable feature specified for `-Ctarget-feature`");
        let count = first.starts_with("warning: `") && first.contains(" generated ");
        !(first.is_empty() || unstable || count)
    };
    stderr
        .split("\n\n")
        .filter(noise)
        .map(|paragraph| paragraph.trim_matches('\n'))
        .collect::<Vec<_>>()
        .join("\n\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_outer_build_does_not_show_through() {
        for name in ["RUSTFLAGS", "CARGO_PROFILE_RELEASE_LTO", "CARGO_CFG_TARGET_ARCH", "RUSTUP_TOOLCHAIN"] {
            assert!(is_outer(OsStr::new(name)), "{name}");
        }
        for name in ["PATH", "HOME", "CARGO_HOME", "CARGO_NET_OFFLINE", "CARGO_HTTP_CAINFO", "RUSTUP_HOME"] {
            assert!(!is_outer(OsStr::new(name)), "{name}");
        }
    }

    #[test]
    fn flags_are_separated_and_name_the_target() {
        let flags = flags(90, Path::new("/bin/true")).into_string().unwrap();
        let flags: Vec<&str> = flags.split('\x1f').collect();
        assert_eq!(flags[0], "-Clinker=/bin/true");
        assert!(flags.contains(&"-Ctarget-cpu=sm_90") && flags.contains(&"-Ctarget-feature=+ptx80"));
    }

    #[test]
    fn diagnostics_keep_what_the_author_needs() {
        let stderr = "\
warning: unstable feature specified for `-Ctarget-feature`: `ptx80`
  |
  = note: this feature is not stably supported; its behavior can change in the future

warning: unused variable: `x`
 --> src/lib.rs:2:21

error[E0308]: mismatched types
 --> src/lib.rs:3:1

warning: `k` (lib) generated 1 warning
";
        let kept = clean(stderr);
        assert!(kept.starts_with("warning: unused variable"), "{kept}");
        assert!(kept.contains("error[E0308]") && !kept.contains("unstable") && !kept.contains("generated"));
        assert_eq!(clean(""), "");
    }
}
