//! The build script: the stages in order, and how cargo hears of them.

use crate::allow::AllowList;
use crate::codegen::{self, Codegen, ListError};
use crate::compile::{self, Request};
use crate::index::{FILE, Index, Second, TargetPtx};
use crate::lint::Finding;
use crate::nvvm::{self, NvvmError};
use crate::ptxas;
use crate::shipped::{self, Shipped};
use crate::target::{self, Outcome, Wanted};
use crate::toolchain::{self, DeviceToolchain};
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

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
    codegens: Vec<Codegen>,
    nvvm_targets: Vec<u32>,
    watch: Vec<PathBuf>,
    allow: PathBuf,
    /// Where the package ships its PTX.
    ships: Option<PathBuf>,
}

/// The code generators of a build, at least one.
struct Generators {
    codegens: Vec<Codegen>,
    /// What libNVVM compiles for.
    nvvm_targets: Vec<u32>,
    /// libNVVM, if it is among them.
    library: Option<nvvm::Library>,
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
            codegens: vec![Codegen::Llvm],
            nvvm_targets: vec![90, 100, 120],
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

    /// Has these code generators make the PTX: what runs is the first one's, a second one's is held beside
    /// it. `FERROKV_CODEGEN`, where it is set, says otherwise.
    pub fn codegen(mut self, codegens: &[Codegen]) -> Self {
        if !codegens.is_empty() {
            self.codegens.clear();
            for codegen in codegens {
                if !self.codegens.contains(codegen) {
                    self.codegens.push(*codegen);
                }
            }
        }
        self
    }

    /// Has [`Codegen::Nvvm`] compile for these targets, from 75 on and at least one, in place of sm_90,
    /// sm_100 and sm_120; others are an error of the build. `FERROKV_NVVM_TARGETS`, where it is set, says
    /// otherwise.
    pub fn nvvm_targets(mut self, targets: &[u32]) -> Self {
        self.nvvm_targets = targets.to_vec();
        self.nvvm_targets.sort_unstable();
        self.nvvm_targets.dedup();
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
        let own = [NO_PTX_ENV, LINES_ENV, SHIP_ENV, codegen::CODEGEN_ENV, codegen::NVVM_TARGETS_ENV];
        let tools = [toolchain::RUSTC_ENV, ptxas::PTXAS_ENV, nvvm::library::LIBRARY_ENV];
        for name in own.into_iter().chain(tools).chain(["RUSTUP_HOME", "CUDA_HOME"]) {
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

    /// What the package ships, if that is of its sources and of the generator that is wanted; else what the
    /// compiler makes, which is shipped from then on if that is asked for.
    fn shipped_or_built(&self, package: &Path, workspace: &Path, out: &Path) -> Result<Index, Vec<String>> {
        let Some(folder) = &self.ships else { return self.build(workspace, out) };
        // Others that ship are dependencies, maybe in a folder that is not to be written to.
        let writes = env::var(SHIP_ENV).is_ok_and(|name| Ok(name) == env::var("CARGO_PKG_NAME"));
        if is_set(NO_PTX_ENV) && !writes {
            return self.build(workspace, out);
        }
        let codegens = self.codegens(set(codegen::CODEGEN_ENV).as_deref());
        if !codegens.and_then(|codegens| is_shipped(&codegens, writes)).map_err(|e| vec![e.to_string()])? {
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
        let generators = self.generators(workspace).map_err(|error| vec![error])?;
        let Generators { codegens, nvvm_targets, library } = generators;
        if let Some(library) = &library {
            println!("cargo::rerun-if-changed={}", library.located().path.display());
        }
        let allow = AllowList::read(&workspace.join(&self.allow)).map_err(|error| vec![error.to_string()])?;
        let ptxas = match ptxas::find(workspace) {
            Ok(ptxas) => Some(ptxas),
            // No ptxas is no fault, but one that was named must do.
            Err(reason) if reason.starts_with(ptxas::PTXAS_ENV) => return Err(vec![reason]),
            Err(reason) if codegens.contains(&Codegen::Nvvm) => {
                return Err(vec![NvvmError::NoPtxas { reason }.to_string()]);
            }
            Err(_) => None,
        };
        let folder = target_folder(workspace, out).join("ptx-build").join(&self.folder);
        let request = Request {
            workspace,
            package: &self.package,
            sm: 0,
            asm: true,
            ir: false,
            // libNVVM is given no lines.
            lines: is_set(LINES_ENV) && library.is_none(),
            folder: &folder,
            toolchain: &found,
        };
        let llvm_targets = if codegens.contains(&Codegen::Llvm) { &self.targets[..] } else { &[] };
        let wanted = Wanted { llvm: llvm_targets, nvvm: &nvvm_targets, library: library.as_ref() };
        let outcomes = target::build(&wanted, &request, ptxas.as_ref());
        let release = library.as_ref().map(|library| library.located().release.clone());
        let index = Index {
            compiler: Some(found.version.clone()),
            ptxas: ptxas.map(|ptxas| ptxas.version),
            libnvvm: release,
            ..Index::default()
        };
        let mut of_each = [(Codegen::Llvm, outcomes.llvm), (Codegen::Nvvm, outcomes.nvvm)];
        if codegens[0] == Codegen::Nvvm {
            of_each.reverse();
        }
        self.judge(of_each, index, &allow, &folder)
    }

    /// The names of this build's generators: those of a list, or its own.
    fn codegens(&self, list: Option<&str>) -> Result<Vec<Codegen>, ListError> {
        list.map_or_else(|| Ok(self.codegens.clone()), Codegen::list)
    }

    /// What libNVVM compiles for: the targets of a list, or the build's own.
    fn nvvm_targets_of(&self, list: Option<&str>) -> Result<Vec<u32>, ListError> {
        let own = || self.nvvm_targets.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        match list {
            Some(list) => codegen::target_list(codegen::NVVM_TARGETS_ENV, list),
            None => codegen::target_list("PtxBuild::nvvm_targets", &own()),
        }
    }

    /// The generators of this build.
    fn generators(&self, workspace: &Path) -> Result<Generators, String> {
        let codegens = self.codegens(set(codegen::CODEGEN_ENV).as_deref()).map_err(|e| e.to_string())?;
        if !codegens.contains(&Codegen::Nvvm) {
            return Ok(Generators { codegens, nvvm_targets: Vec::new(), library: None });
        }
        let targets = self.nvvm_targets_of(set(codegen::NVVM_TARGETS_ENV).as_deref());
        let nvvm_targets = targets.map_err(|error| error.to_string())?;
        let library = nvvm::library::find(workspace).map_err(|error| error.to_string())?;
        Ok(Generators { codegens, nvvm_targets, library: Some(library) })
    }

    /// The index with the targets of each generator that has any, or every error of every target.
    fn judge(
        &self,
        of_each: [(Codegen, Vec<Outcome>); 2],
        mut index: Index,
        allow: &AllowList,
        folder: &Path,
    ) -> Result<Index, Vec<String>> {
        let mut errors = Vec::new();
        let mut warnings: Vec<String> = Vec::new();
        let mut generated = Vec::new();
        let mut ran = Vec::new();
        // A finding that several targets share is said once, with the first target's line.
        let mut refused: Vec<(Vec<(Codegen, u32)>, Finding)> = Vec::new();
        for (codegen, outcomes) in of_each {
            if !outcomes.is_empty() {
                ran.push(codegen);
            }
            let mut targets: Vec<TargetPtx> = Vec::new();
            for outcome in outcomes {
                let target = match outcome {
                    Ok(target) => target,
                    Err(error) => {
                        errors.push(error);
                        continue;
                    }
                };
                let sm = target.ptx.sm;
                for finding in target.findings.into_iter().filter(|finding| !allow.accepts(finding, codegen))
                {
                    let same = |f: &Finding| f.rule == finding.rule && f.entry == finding.entry;
                    match refused.iter_mut().find(|(_, earlier)| same(earlier)) {
                        Some((targets, _)) => targets.push((codegen, sm)),
                        None => refused.push((vec![(codegen, sm)], finding)),
                    }
                }
                warnings.extend(target.warnings);
                targets.push(target.ptx);
            }
            if !targets.is_empty() {
                generated.push((codegen, targets));
            }
        }
        for (targets, finding) in &refused {
            let names = targets.iter().map(|(codegen, sm)| match codegen {
                Codegen::Llvm => format!("sm_{sm}"),
                Codegen::Nvvm => format!("nvvm:sm_{sm}"),
            });
            errors.push(format!("{} {finding}", names.collect::<Vec<_>>().join(" ")));
        }
        if let Some((targets, _)) = refused.first() {
            let (codegen, sm) = targets[0];
            let path = folder.join(Index::ptx_file(codegen, sm));
            let allow = self.allow.display();
            errors.push(format!(
                "that PTX is {}; what must stay goes into {allow} with its reason",
                path.display()
            ));
        }
        // All targets are made of one source: say each thing once, and no count of rows that an error hid.
        dedup_across_targets(&mut errors);
        if errors.is_empty() {
            errors = allow.unused(index.ptxas.is_some(), &ran);
        }
        if !errors.is_empty() {
            return Err(errors);
        }
        dedup_across_targets(&mut warnings);
        warnings.iter().for_each(|warning| print_lines("warning", warning));
        let mut generated = generated.into_iter();
        if let Some((codegen, targets)) = generated.next() {
            (index.codegen, index.targets) = (codegen, targets);
        }
        index.second = generated.next().map(|(codegen, targets)| Second { codegen, targets });
        Ok(index)
    }
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

/// Whether what a package ships is what these generators make, which it must be where it is written anew.
fn is_shipped(codegens: &[Codegen], writes: bool) -> Result<bool, ListError> {
    match codegens {
        [Codegen::Llvm] => Ok(true),
        _ if writes => {
            let names: Vec<&str> = codegens.iter().map(|codegen| codegen.name()).collect();
            Err(ListError::Ships { list: names.join(",") })
        }
        _ => Ok(false),
    }
}

/// The value of a variable that is set and not empty.
fn set(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
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
    let texts = index
        .generated()
        .map(|(codegen, target)| (Index::ptx_file(codegen, target.sm), target.ptx.as_bytes()));
    let machine_code = index
        .generated()
        .map(|(codegen, target)| (Index::machine_code_file(codegen, target.sm), &target.machine_code[..]));
    for (name, content) in texts.chain(machine_code).chain([(FILE.to_owned(), rendered.as_bytes())]) {
        let path = out.join(name);
        fs::write(&path, content)
            .map_err(|error| vec![format!("{}: cannot be written: {error}", path.display())])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
