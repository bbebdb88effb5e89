//! The build script: the stages in order, and how cargo hears of them.

use crate::allow::AllowList;
use crate::compile::{self, Request};
use crate::index::{FILE, Index, TargetPtx};
use crate::lint::{self, Finding, Rule};
use crate::ptxas::{self, Ptxas, Usage};
use crate::shipped::{self, Shipped};
use crate::toolchain::{self, DeviceToolchain, Found};
use crate::{directives, needs, ptx, sites};
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;

/// Set to 1, the build leaves the PTX out on purpose.
const NO_PTX_ENV: &str = "FERROKV_NO_PTX";

/// Set to 1, the PTX names the source line of each instruction, for profilers. Instructions are the same.
const LINES_ENV: &str = "FERROKV_PTX_LINES";

/// Names the package whose build writes the PTX that it ships anew.
const SHIP_ENV: &str = "FERROKV_SHIP_PTX";

/// Written by `./setup` when it has installed something: a build that went without looks again.
const SETUP_STAMP: &str = ".ferrokv/setup.stamp";

/// A build of one package of kernels, to be run from the build script of the crate that embeds the PTX.
#[derive(Clone, Debug)]
pub struct PtxBuild {
    /// The workspace's folder, seen from the build script's package.
    workspace: PathBuf,
    package: String,
    /// The folder below `target/ptx-build` that persists.
    folder: PathBuf,
    targets: Vec<u32>,
    watch: Vec<PathBuf>,
    allow: PathBuf,
    /// Where the package ships its PTX.
    ships: Option<PathBuf>,
}

/// What one target came to.
struct Target {
    ptx: TargetPtx,
    findings: Vec<Finding>,
    warnings: Vec<String>,
}

impl PtxBuild {
    /// A build of the package that the build script is of: its library has the kernels, and for the device
    /// its build script has nothing to do. What is for the host alone stands behind
    /// `#[cfg(not(target_arch = "nvptx64"))]` and in dependencies of such a target.
    pub fn this_package() -> Self {
        let package = env::var("CARGO_PKG_NAME").unwrap_or_default();
        let allow = PathBuf::from("ptx-allow.toml");
        let watch = vec!["src".into(), "Cargo.toml".into(), "Cargo.lock".into(), allow.clone()];
        PtxBuild { watch, allow, ..PtxBuild::member("", "", &package) }
    }

    /// A build of `package`, whose folder has its name and lies beside the build script, for sm_80 and sm_90.
    pub fn new(package: &str) -> Self {
        PtxBuild { folder: PathBuf::new(), ..PtxBuild::member("", package, package) }
    }

    /// The same of a package in `folder` of the workspace, for a build script in another folder of it, from
    /// which `workspace` leads to the workspace's own. All paths are seen from there.
    pub fn member(workspace: &str, folder: &str, package: &str) -> Self {
        PtxBuild {
            workspace: workspace.into(),
            package: package.to_owned(),
            folder: package.into(),
            targets: vec![80, 90],
            watch: vec![PathBuf::from(folder), "Cargo.lock".into(), "Cargo.toml".into()],
            allow: Path::new(folder).join("ptx-allow.toml"),
            ships: None,
        }
    }

    /// The package ships its PTX in `folder`, seen from the build script: where that is of the sources that
    /// are there, it is taken, and no device compiler is needed. `FERROKV_SHIP_PTX=NAME cargo build`
    /// writes that of the package NAME.
    pub fn ships(mut self, folder: impl Into<PathBuf>) -> Self {
        self.ships = Some(folder.into());
        self
    }

    /// Compiles for these targets (90 for sm_90) instead.
    pub fn targets(mut self, targets: &[u32]) -> Self {
        self.targets = targets.to_vec();
        self.targets.sort_unstable();
        self.targets.dedup();
        self
    }

    /// Builds again when one of these files or folders changes, too.
    pub fn watch<P: Into<PathBuf>>(mut self, paths: impl IntoIterator<Item = P>) -> Self {
        self.watch.extend(paths.into_iter().map(Into::into));
        self
    }

    /// Runs the build: tells cargo what to watch, writes the PTX and the [index](crate::index) to `OUT_DIR`,
    /// and fails with readable errors if the kernels do not compile, break a rule or do not assemble.
    pub fn run(&self) -> ExitCode {
        let (Some(package), Some(out)) = (env::var_os("CARGO_MANIFEST_DIR"), env::var_os("OUT_DIR")) else {
            eprintln!("ptx-build runs in a build script: CARGO_MANIFEST_DIR and OUT_DIR are not set");
            return ExitCode::FAILURE;
        };
        let (package, out) = (PathBuf::from(package), PathBuf::from(out));
        if env::var_os(compile::INSIDE_ENV).is_some() {
            // The kernels of the package itself are what is being compiled.
            println!("cargo::rerun-if-changed=build.rs");
            return ExitCode::SUCCESS;
        }
        let workspace = package.join(&self.workspace);
        self.print_watched(&workspace);
        match self.shipped_or_built(&package, &workspace, &out).and_then(|index| write(&out, &index)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(errors) => {
                errors.iter().for_each(|error| print_lines("error", error));
                ExitCode::FAILURE
            }
        }
    }

    fn print_watched(&self, workspace: &Path) {
        for name in [NO_PTX_ENV, LINES_ENV, SHIP_ENV, toolchain::RUSTC_ENV, ptxas::PTXAS_ENV, "RUSTUP_HOME"] {
            println!("cargo::rerun-if-env-changed={name}");
        }
        // A path that does not exist would make cargo run the script every time. Only a workspace with such a
        // `setup` gets the stamp.
        let stamp = workspace.join(SETUP_STAMP);
        if !stamp.exists()
            && workspace.join("setup").is_file()
            && fs::create_dir_all(workspace.join(".ferrokv")).is_ok()
        {
            // Without the stamp a later ./setup is only noticed at the next change: no reason to fail.
            let _ = fs::write(&stamp, "not yet\n");
        }
        let watched = self.watch.iter().map(|path| workspace.join(path)).chain([stamp, "build.rs".into()]);
        for path in watched.filter(|path| path.exists()) {
            println!("cargo::rerun-if-changed={}", path.display());
        }
    }

    /// What the package ships, if that is of its sources; else what the compiler makes, which is shipped from
    /// then on if that is asked for.
    fn shipped_or_built(&self, package: &Path, workspace: &Path, out: &Path) -> Result<Index, Vec<String>> {
        let Some(folder) = &self.ships else { return self.build(workspace, out) };
        // Others that ship are dependencies, maybe in a folder that is not to be written to.
        let writes = env::var(SHIP_ENV).is_ok_and(|name| Ok(name) == env::var("CARGO_PKG_NAME"));
        if is_set(NO_PTX_ENV) && !writes {
            return self.build(workspace, out);
        }
        let folder = package.join(folder);
        let sources = shipped::sources(workspace, &self.watch).map_err(|error| vec![error])?;
        if writes {
            let index = self.build(workspace, out)?;
            if let Some(note) = &index.note {
                return Err(vec![format!("{SHIP_ENV} is set, and there is no PTX to ship: {note}")]);
            }
            shipped::write(&folder, &sources, &index.targets).map_err(|error| vec![error])?;
            return Ok(index);
        }
        // As above: a path that does not exist would make cargo run the script every time.
        if folder.exists() {
            println!("cargo::rerun-if-changed={}", folder.display());
        }
        match shipped::read(&folder, &sources, &self.targets) {
            Shipped::Current(targets) => Ok(Index { targets, ..Index::default() }),
            Shipped::Unusable(reason) => {
                let name = env::var("CARGO_PKG_NAME").unwrap_or_default();
                print_lines("warning", &format!("{reason}; {SHIP_ENV}={name} cargo build writes it anew"));
                let mut index = self.build(workspace, out)?;
                index.note = index.note.map(|note| format!("{note}; {reason}"));
                Ok(index)
            }
        }
    }

    fn build(&self, workspace: &Path, out: &Path) -> Result<Index, Vec<String>> {
        if is_set(NO_PTX_ENV) {
            return Ok(Index { note: Some(format!("built with {NO_PTX_ENV} set")), ..Index::default() });
        }
        let found = match toolchain::find() {
            DeviceToolchain::Found(found) => found,
            DeviceToolchain::Missing(missing) => {
                print_lines("warning", &format!("built without GPU code: {missing}"));
                return Ok(Index { note: Some(missing.to_string()), ..Index::default() });
            }
        };
        println!("cargo::rerun-if-changed={}", found.rustc.display());
        let allow = AllowList::read(&workspace.join(&self.allow)).map_err(|error| vec![error.to_string()])?;
        let ptxas = match ptxas::find(workspace) {
            Ok(ptxas) => Some(ptxas),
            // No ptxas is no fault, but one that was named must do.
            Err(reason) if reason.starts_with(ptxas::PTXAS_ENV) => return Err(vec![reason]),
            Err(_) => None,
        };
        let folder = target_folder(workspace, out).join("ptx-build").join(&self.folder);
        let results: Vec<Result<Target, String>> = thread::scope(|scope| {
            let workers: Vec<_> = self
                .targets
                .iter()
                .map(|&sm| {
                    let request = Request {
                        workspace,
                        package: &self.package,
                        sm,
                        targets: &self.targets,
                        lines: is_set(LINES_ENV),
                        folder: &folder,
                        toolchain: &found,
                    };
                    let ptxas = ptxas.as_ref();
                    scope.spawn(move || one_target(&request, ptxas))
                })
                .collect();
            let join = |worker: thread::ScopedJoinHandle<'_, _>| {
                worker.join().unwrap_or_else(|_| Err("ptx-build panicked: please report this".into()))
            };
            workers.into_iter().map(join).collect()
        });
        self.judge(results, &allow, &folder, &found, ptxas)
    }

    /// The index, or every error of every target.
    fn judge(
        &self,
        results: Vec<Result<Target, String>>,
        allow: &AllowList,
        folder: &Path,
        found: &Found,
        ptxas: Option<Ptxas>,
    ) -> Result<Index, Vec<String>> {
        let mut errors = Vec::new();
        let mut warnings: Vec<String> = Vec::new();
        let mut targets = Vec::new();
        // A finding that several targets share is said once, with the first target's line.
        let mut refused: Vec<(Vec<u32>, Finding)> = Vec::new();
        for (&sm, result) in self.targets.iter().zip(results) {
            match result {
                Ok(target) => {
                    for finding in target.findings.into_iter().filter(|finding| !allow.accepts(finding)) {
                        let same = |f: &Finding| f.rule == finding.rule && f.entry == finding.entry;
                        match refused.iter_mut().find(|(_, earlier)| same(earlier)) {
                            Some((targets, _)) => targets.push(sm),
                            None => refused.push((vec![sm], finding)),
                        }
                    }
                    warnings.extend(target.warnings);
                    targets.push(target.ptx);
                }
                Err(error) => errors.push(error),
            }
        }
        for (targets, finding) in &refused {
            let names: Vec<String> = targets.iter().map(|sm| format!("sm_{sm}")).collect();
            errors.push(format!("{} {finding}", names.join(" ")));
        }
        if let Some((targets, _)) = refused.first() {
            let path = folder.join(Index::ptx_file(targets[0]));
            let allow = self.allow.display();
            errors.push(format!(
                "that PTX is {}; what must stay goes into {allow} with its reason",
                path.display()
            ));
        }
        // Each target compiles the same source: say each thing once, and no count of rows that an error hid.
        dedup_across_targets(&mut errors);
        if errors.is_empty() {
            errors = allow.unused(ptxas.is_some());
        }
        if !errors.is_empty() {
            return Err(errors);
        }
        dedup_across_targets(&mut warnings);
        warnings.iter().for_each(|warning| print_lines("warning", warning));
        Ok(Index {
            targets,
            note: None,
            compiler: Some(found.version.clone()),
            ptxas: ptxas.map(|ptxas| ptxas.version),
        })
    }
}

/// Compiles, completes, checks and assembles for one target.
fn one_target(request: &Request, ptxas: Option<&Ptxas>) -> Result<Target, String> {
    let compiled = compile::compile(request).map_err(|error| error.to_string())?;
    let module = ptx::parse(&compiled.ptx);
    let text = directives::apply(&compiled.ptx, &module).map_err(|error| error.to_string())?;
    let text = needs::leave_out(text, request.sm).map_err(|error| error.to_string())?;
    let text = sites::number(text);
    // The file that findings and ptxas point at has the directives in, so its lines are what is read.
    let module = ptx::parse(&text);
    let file = request.folder.join(Index::ptx_file(request.sm));
    fs::write(&file, &text).map_err(|error| format!("{}: cannot be written: {error}", file.display()))?;
    let mut findings = lint::check(&module);
    let mut warnings = vec![compiled.warnings];
    let (mut usage, mut machine_code) = (Vec::new(), Vec::new());
    if let Some(ptxas) = ptxas {
        let assembled = ptxas.assemble(&file, &text, request.sm).map_err(|error| error.to_string())?;
        for entry in &assembled.usage {
            findings.extend(resource_findings(entry, &findings));
        }
        warnings.extend(assembled.warnings);
        usage = assembled.usage;
        let cubin = ptxas::machine_code_file(&file);
        machine_code =
            fs::read(&cubin).map_err(|error| format!("{}: cannot be read: {error}", cubin.display()))?;
    }
    let entries = module.functions.iter().filter(|function| function.is_entry && function.is_defined);
    let entries = entries.map(|function| function.name.clone()).collect();
    warnings.retain(|warning| !warning.is_empty());
    Ok(Target {
        ptx: TargetPtx { sm: request.sm, ptx: text, machine_code, entries, usage },
        findings,
        warnings,
    })
}

/// What ptxas's numbers say against an entry. A stack that the PTX's own local memory explains is not said
/// twice.
fn resource_findings(usage: &Usage, earlier: &[Finding]) -> Vec<Finding> {
    let finding = |rule, text| Finding { rule, entry: usage.entry.clone(), line: 0, text, count: 1 };
    let mut findings = Vec::new();
    let Usage { registers, stack, spill_stores, spill_loads, .. } = usage;
    let explained = earlier.iter().any(|f| f.rule == Rule::LocalMemory && f.entry == usage.entry);
    if *spill_stores > 0 || *spill_loads > 0 {
        let text =
            format!("{registers} registers, {spill_stores} bytes spilled, {spill_loads} bytes read back");
        findings.push(finding(Rule::Spill, text));
    } else if *stack > 0 && !explained {
        findings.push(finding(Rule::Stack, format!("{stack} bytes of stack")));
    }
    findings
}

/// Drops texts that differ only in the target that they name.
fn dedup_across_targets(texts: &mut Vec<String>) {
    let mut seen = Vec::new();
    texts.retain(|text| {
        let body = text
            .split_once('\n')
            .filter(|(first, _)| first.contains(" for sm_"))
            .map_or(text.as_str(), |(_, body)| body);
        let fresh = !seen.iter().any(|earlier| earlier == body);
        if fresh {
            seen.push(body.to_owned());
        }
        fresh
    });
}

/// Whether a switch among the variables is on.
fn is_set(name: &str) -> bool {
    env::var_os(name).is_some_and(|value| !value.is_empty() && value != "0")
}

/// One instruction to cargo for each line of `text`.
fn print_lines(kind: &str, text: &str) {
    text.lines().for_each(|line| println!("cargo::{kind}={line}"));
}

/// The target folder that `out` lies in: the one that cargo tagged, or, in a folder that was there before
/// cargo, the one above `PROFILE/build/PACKAGE/out`. (Its subfolder `ptx` would be where the profile `ptx`
/// goes.)
fn target_folder(workspace: &Path, out: &Path) -> PathBuf {
    let tagged = out.ancestors().find(|folder| folder.join("CACHEDIR.TAG").exists());
    tagged.or_else(|| out.ancestors().nth(4)).map_or_else(|| workspace.join("target"), Path::to_owned)
}

fn write(out: &Path, index: &Index) -> Result<(), Vec<String>> {
    let rendered = index.render();
    let texts = index.targets.iter().map(|target| (Index::ptx_file(target.sm), target.ptx.as_bytes()));
    let machine_code =
        index.targets.iter().map(|target| (Index::machine_code_file(target.sm), &target.machine_code[..]));
    for (name, content) in texts.chain(machine_code).chain([(FILE.to_owned(), rendered.as_bytes())]) {
        let path = out.join(name);
        fs::write(&path, content)
            .map_err(|error| vec![format!("{}: cannot be written: {error}", path.display())])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(results: Vec<Result<Target, String>>, allow: &str) -> Result<Index, Vec<String>> {
        let found = Found {
            rustc: "rustc".into(),
            version: "rustc 1.96.0".into(),
            origin: toolchain::Origin::System,
            library: "library".into(),
        };
        let allow = AllowList::parse(Path::new("allow.toml"), allow).unwrap();
        PtxBuild::new("kernels").judge(results, &allow, Path::new("folder"), &found, None)
    }

    fn target(sm: u32, body: &str) -> Result<Target, String> {
        let ptx = format!(".entry k()\n{{\n{body}\n}}\n");
        let findings = lint::check(&ptx::parse(&ptx));
        Ok(Target {
            ptx: TargetPtx {
                sm,
                ptx,
                machine_code: Vec::new(),
                entries: vec!["k".into()],
                usage: Vec::new(),
            },
            findings,
            warnings: Vec::new(),
        })
    }

    const BAD: &str = "ld.b32 %r1, [%rd1];";
    const ROW: &str = "[[allow]]\nentry = \"k\"\nrule = \"generic-address\"\nreason = \"a test\"\n";

    #[test]
    fn a_finding_of_both_targets_is_one_error() {
        let errors = judge(vec![target(80, BAD), target(90, BAD)], "").unwrap_err();
        assert_eq!(errors.len(), 2, "{errors:?}");
        assert!(errors[0].starts_with("sm_80 sm_90 [generic-address] kernel k, PTX line 3: "), "{errors:?}");
        assert!(errors[1].contains("kernels.sm_80.ptx; what must stay goes into kernels/ptx-allow.toml"));
    }

    #[test]
    fn an_allowed_finding_passes_and_an_idle_row_does_not() {
        let index = judge(vec![target(80, BAD), target(90, "ret;")], ROW).unwrap();
        assert_eq!(index.targets.len(), 2);
        assert_eq!(index.compiler.as_deref(), Some("rustc 1.96.0"));
        let errors = judge(vec![target(80, "ret;"), target(90, "ret;")], ROW).unwrap_err();
        assert_eq!(errors, ["allow.toml:1: no kernel `k` breaks the rule generic-address: remove the row"]);
    }

    #[test]
    fn the_same_compiler_error_of_both_targets_is_shown_once() {
        let error = |sm| Err(format!("kernels does not compile for sm_{sm}\nerror: this\nand that"));
        // The idle row is not blamed for what did not compile.
        let errors = judge(vec![error(80), error(90)], ROW).unwrap_err();
        assert_eq!(errors, ["kernels does not compile for sm_80\nerror: this\nand that"]);
    }

    #[test]
    fn spills_and_stacks_are_findings() {
        let usage =
            Usage { entry: "k".into(), registers: 255, stack: 64, spill_stores: 8, ..Usage::default() };
        let spill = resource_findings(&usage, &[]);
        assert_eq!((spill.len(), spill[0].rule), (1, Rule::Spill));
        assert_eq!(spill[0].text, "255 registers, 8 bytes spilled, 0 bytes read back");
        let usage = Usage { spill_stores: 0, ..usage };
        assert_eq!(resource_findings(&usage, &[])[0].rule, Rule::Stack);
        // Local memory that the PTX shows explains the stack.
        let local =
            Finding { rule: Rule::LocalMemory, entry: "k".into(), line: 1, text: String::new(), count: 1 };
        assert_eq!(resource_findings(&usage, &[local]), []);
        assert_eq!(resource_findings(&Usage { stack: 0, ..usage }, &[]), []);
    }

    #[test]
    fn the_target_folder_is_the_tagged_one_or_the_profiles_parent() {
        let out = Path::new("/nonexistent/t/release/build/k-1/out");
        assert_eq!(target_folder(Path::new("/w"), out), Path::new("/nonexistent/t"));
        assert_eq!(target_folder(Path::new("/w"), Path::new("/out")), Path::new("/w/target"));
    }
}
