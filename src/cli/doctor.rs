//! `ferrokv doctor`: what this machine has, and what is missing.

use super::failure::Failure;
use super::output::ReportArguments;
use super::text;
use ferrokv::{Generated, embedded};
use host::{Device, cuda_devices};
use ptx_build::nvvm::NvvmError;
use ptx_build::nvvm::library::{self, Located};
use ptx_build::ptxas;
use ptx_build::toolchain::{self, DeviceToolchain};
use serde::Serialize;
use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

const LONG: &str = "\
Say what this machine has for building and running kernels: host toolchain, device compiler, the PTX inside this \
program, the CUDA driver and its GPUs, the CUDA tools, and the CPU's SIMD instructions; and how to get what is \
missing. Nothing is needed to use the CPU: the emulator and the SIMD code are always there.

Exit codes: 0, also if something is missing; with --strict 1 then.";

/// Say what this machine has and what is missing.
#[derive(clap::Args)]
#[command(long_about = LONG)]
pub struct Arguments {
    /// Exit with 1 if anything is missing.
    #[arg(long)]
    strict: bool,
    #[command(flatten)]
    report: ReportArguments,
}

/// One thing looked at.
#[derive(Serialize)]
struct Finding {
    what: &'static str,
    /// Whether it is there and can be used.
    ok: bool,
    /// What was found, or why it is not there.
    found: String,
    /// How to get it.
    remedy: Option<String>,
}

impl Finding {
    fn ok(what: &'static str, found: impl Into<String>) -> Self {
        Finding { what, ok: true, found: found.into(), remedy: None }
    }

    fn missing(what: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Finding { what, ok: false, found: found.into(), remedy: Some(remedy.into()) }
    }
}

#[derive(Serialize)]
struct Json<'a> {
    command: &'static str,
    version: &'static str,
    findings: &'a [Finding],
    gpus: &'a [Gpu],
    ptx: Vec<Ptx>,
    ptx_fingerprint: &'static str,
}

#[derive(Serialize)]
struct Ptx {
    /// The code generator, and the digits that change with all its PTX.
    codegen: &'static str,
    fingerprint: &'static str,
    sm: u32,
    bytes: usize,
    entries: usize,
    machine_code_bytes: usize,
}

#[derive(Serialize)]
struct Gpu {
    ordinal: u32,
    name: String,
    compute_capability: Option<u32>,
    multiprocessors: u32,
    memory_bytes: Option<u64>,
    l2_bytes: Option<u64>,
    memory_bandwidth: Option<u64>,
    driver_version: Option<u32>,
    /// Why the embedded kernels do not load there; `None` if they do.
    kernels_refused: Option<String>,
}

/// Runs the command.
///
/// # Errors
/// With `--strict`, if something is missing; or a report that cannot be written.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let report = arguments.report.open(None, None)?;
    let gpus = gpus();
    let mut findings = vec![host_toolchain(), device_compiler(), embedded_ptx(), driver()];
    findings.push(gpu_finding(&gpus));
    findings.extend([tool("ptxas"), tool("nvdisasm"), libnvvm(), simd()]);

    let json = Json {
        command: "doctor",
        version: env!("CARGO_PKG_VERSION"),
        findings: &findings,
        gpus: gpus.as_deref().unwrap_or_default(),
        ptx: ferrokv::generated().iter().flat_map(ptx).collect(),
        ptx_fingerprint: embedded::FINGERPRINT,
    };
    report.finish(&tables(&findings, gpus.as_deref().unwrap_or_default()), &json)?;
    let missing = findings.iter().filter(|finding| !finding.ok).count();
    if arguments.strict && missing != 0 {
        Err(Failure::Missing(text::plural(missing, "thing")))
    } else {
        Ok(())
    }
}

fn tables(findings: &[Finding], gpus: &[Gpu]) -> String {
    let width = findings.iter().map(|finding| finding.what.len()).max().unwrap_or(0);
    let mut out = format!("ferrokv {}\n", env!("CARGO_PKG_VERSION"));
    for Finding { what, ok, found, remedy } in findings {
        let mark = if *ok { "ok     " } else { "missing" };
        out += &format!("  {mark}  {what:width$}  {found}\n");
        if let Some(remedy) = remedy {
            out += &format!("           {:width$}  -> {remedy}\n", "");
        }
        if *what == EMBEDDED {
            let generated = ferrokv::generated();
            for Ptx { codegen, sm, bytes, entries, machine_code_bytes, .. } in generated.iter().flat_map(ptx)
            {
                let by = if generated.len() > 1 { format!("{codegen} ") } else { String::new() };
                let size = text::bytes(bytes as u64);
                let code = match machine_code_bytes {
                    0 => "no machine code: the driver compiles for a minute on first use".into(),
                    bytes => format!("machine code {}", text::bytes(bytes as u64)),
                };
                out += &format!("           {:width$}  {by}sm_{sm}: {entries} kernels, {size}; {code}\n", "");
            }
        }
    }
    for gpu in gpus {
        out += &format!("\nGPU {}: {}\n", gpu.ordinal, gpu.name);
        let capability = gpu.compute_capability.map(|cc| format!("{}.{}", cc / 10, cc % 10));
        let bandwidth =
            gpu.memory_bandwidth.map(|rate| format!("{:.0} GB/s by clock and bus", rate as f64 / 1e9));
        let lines = [
            ("compute capability", capability),
            ("multiprocessors", Some(gpu.multiprocessors.to_string())),
            ("memory", gpu.memory_bytes.map(text::bytes)),
            ("second-level cache", gpu.l2_bytes.map(text::bytes)),
            ("memory bandwidth", bandwidth),
            ("driver serves CUDA", gpu.driver_version.map(cuda_version)),
            ("kernels", Some(gpu.kernels_refused.clone().unwrap_or_else(|| "load".into()))),
        ];
        for (what, value) in lines {
            out += &format!("  {what:18}  {}\n", value.as_deref().unwrap_or("unknown"));
        }
    }
    out
}

/// 12080 is 12.8.
fn cuda_version(version: u32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

fn host_toolchain() -> Finding {
    let what = "host toolchain";
    match Command::new("rustc").arg("-V").output() {
        Ok(output) if output.status.success() => {
            Finding::ok(what, String::from_utf8_lossy(&output.stdout).trim().to_owned())
        }
        _ => Finding::missing(what, "no rustc in PATH", "install Rust 1.95 or newer: https://rustup.rs"),
    }
}

fn device_compiler() -> Finding {
    let what = "device compiler";
    match toolchain::find() {
        DeviceToolchain::Found(found) => Finding::ok(what, found.to_string()),
        DeviceToolchain::Missing(missing) => {
            Finding::missing(what, missing.reasons.join("; "), missing.remedy)
        }
    }
}

const EMBEDDED: &str = "embedded PTX";

fn ptx(kernels: &Generated) -> impl Iterator<Item = Ptx> + use<> {
    let Generated { name: codegen, fingerprint, images } = *kernels;
    images.iter().map(move |image| Ptx {
        codegen,
        fingerprint,
        sm: image.sm,
        bytes: image.text.len(),
        entries: image.text.lines().filter(|line| line.contains(".visible .entry ")).count(),
        machine_code_bytes: image.machine_code.len(),
    })
}

fn embedded_ptx() -> Finding {
    if ferrokv::ptx().is_empty() {
        let reason = embedded::BUILD_NOTE.unwrap_or("the build left it out");
        return Finding::missing(EMBEDDED, reason, "run ./setup and build again");
    }
    let compiler = embedded::DEVICE_COMPILER.unwrap_or("an unknown compiler");
    let checked =
        embedded::PTXAS.map_or("not assembled".into(), |version| format!("assembled by ptxas {version}"));
    Finding::ok(EMBEDDED, format!("{} by {compiler}, {checked}", embedded::FINGERPRINT))
}

fn driver() -> Finding {
    let what = "CUDA driver";
    match cuda_lazy::driver() {
        Ok(driver) => Finding::ok(
            what,
            format!("{} (CUDA {})", driver.path().display(), cuda_version(driver.cuda_version())),
        ),
        Err(error) => {
            let text = error.to_string();
            let (found, remedy) =
                text.split_once("; ").unwrap_or((&text, "use a machine with an NVIDIA GPU"));
            Finding::missing(what, found, remedy)
        }
    }
}

fn gpus() -> Result<Vec<Gpu>, host::Error> {
    let open = |ordinal| Device::cuda(ordinal, ferrokv::ptx()).err().map(|error| error.to_string());
    let gpu = |info: host::DeviceInfo| Gpu {
        ordinal: info.ordinal,
        kernels_refused: open(info.ordinal),
        name: info.name,
        compute_capability: info.compute_capability,
        multiprocessors: info.multiprocessors,
        memory_bytes: info.memory_bytes,
        l2_bytes: info.l2_bytes,
        memory_bandwidth: info.memory_bandwidth,
        driver_version: info.driver_version,
    };
    Ok(cuda_devices()?.into_iter().map(gpu).collect())
}

fn gpu_finding(gpus: &Result<Vec<Gpu>, host::Error>) -> Finding {
    let what = "GPU";
    let emulator = "an NVIDIA GPU of compute capability 8.0 or newer; the emulator serves meanwhile";
    match gpus {
        Err(host::Error::NoDriver(_)) => Finding::missing(what, "none without a driver", emulator),
        Err(error) => Finding::missing(what, error.to_string(), emulator),
        Ok(gpus) if gpus.is_empty() => Finding::missing(what, "the driver sees none", emulator),
        Ok(gpus) => match gpus.iter().find_map(|gpu| gpu.kernels_refused.as_deref()) {
            Some(reason) => Finding::missing(what, reason, "as the line says"),
            None => Finding::ok(what, text::plural(gpus.len(), "GPU")),
        },
    }
}

/// The folder that `./setup --tools` fills: of the checkout that this program was built from, if it is still
/// there.
fn workspace() -> PathBuf {
    let built = Path::new(env!("CARGO_MANIFEST_DIR"));
    if built.is_dir() { built.to_owned() } else { PathBuf::from(".") }
}

fn tool(name: &'static str) -> Finding {
    if name == "ptxas" {
        return match ptxas::find(&workspace()) {
            Ok(found) => Finding::ok(name, format!("{} at {}", found.version, found.path.display())),
            Err(reason) => {
                Finding::missing(name, reason.split("; ").next().unwrap_or_default(), ptxas::REMEDY)
            }
        };
    }
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = [workspace().join(".ferrokv/tools/bin")]
        .into_iter()
        .chain(env::split_paths(&path))
        .chain([PathBuf::from("/usr/local/cuda/bin")]);
    match folders.map(|folder| folder.join(name)).find(|candidate| candidate.is_file()) {
        Some(path) => Finding::ok(name, path.display().to_string()),
        None => Finding::missing(name, format!("no {name}"), ptxas::REMEDY),
    }
}

/// The second code generator, for builds with `FERROKV_CODEGEN=llvm,nvvm`.
fn libnvvm() -> Finding {
    let what = "libNVVM";
    match library::find(&workspace()) {
        Ok(found) => {
            let Located { path, release, .. } = found.located();
            let used = match embedded::LIBNVVM {
                Some(used) if used == release => ", used by this program's build",
                _ => "",
            };
            Finding::ok(what, format!("{release} at {}{used}", path.display()))
        }
        Err(NvvmError::NoLibrary { reason }) => {
            Finding::missing(what, reason, format!("{} (it is optional)", library::REMEDY))
        }
        Err(error) => Finding::missing(what, error.to_string(), library::REMEDY),
    }
}

/// What the SIMD code asks for, and what else may matter.
fn simd() -> Finding {
    let what = "CPU";
    let threads = rayon::current_num_threads();
    let features: &[(&str, bool)] = &cpu_features();
    let names = |there| features.iter().filter(move |(_, has)| *has == there).map(|(name, _)| *name);
    let has: Vec<&str> = names(true).collect();
    let lacks: Vec<&str> = names(false).collect();
    let lacking = if lacks.is_empty() { String::new() } else { format!(" (not {})", lacks.join(", ")) };
    let list = if has.is_empty() { "no SIMD beyond the baseline".into() } else { has.join(", ") };
    Finding::ok(what, format!("{}: {list}{lacking}", text::plural(threads, "thread")))
}

#[cfg(target_arch = "x86_64")]
fn cpu_features() -> [(&'static str, bool); 7] {
    [
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("f16c", is_x86_feature_detected!("f16c")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bw", is_x86_feature_detected!("avx512bw")),
        ("avx512vl", is_x86_feature_detected!("avx512vl")),
        ("avx512dq", is_x86_feature_detected!("avx512dq")),
    ]
}

#[cfg(not(target_arch = "x86_64"))]
fn cpu_features() -> [(&'static str, bool); 0] {
    []
}
