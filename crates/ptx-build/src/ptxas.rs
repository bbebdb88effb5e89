//! ptxas, where there is one: assembles the PTX for its target and says what each entry uses.

use crate::cubin;
use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Names a ptxas to use.
pub const PTXAS_ENV: &str = "FERROKV_PTXAS";

/// How to get ptxas.
pub const REMEDY: &str = "run ./setup --tools, or put a CUDA toolkit (12 or newer) in PATH";

/// The oldest release that reads our PTX (8.0).
const OLDEST: (u32, u32) = (12, 0);

/// A ptxas that can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ptxas {
    /// The program.
    pub path: PathBuf,
    /// Its release, for example `13.0.88`.
    pub version: String,
}

/// What one entry uses on one target.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// The entry.
    pub entry: String,
    /// Registers of each thread.
    pub registers: u32,
    /// Bytes of stack of each thread.
    pub stack: u32,
    /// Bytes that each thread spills.
    pub spill_stores: u32,
    /// Bytes of spills that each thread reads back.
    pub spill_loads: u32,
    /// Bytes of static shared memory of each block.
    pub shared: u32,
    /// Instructions of the machine code.
    pub instructions: u32,
}

/// Why PTX could not be assembled.
#[derive(Debug, thiserror::Error)]
pub enum PtxasError {
    /// The program does not start.
    #[error("{}: does not start: {error}; {REMEDY}", path.display())]
    Start {
        /// The program.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// It refused the text.
    #[error("ptxas refused {} for sm_{sm}:\n{messages}", ptx.display())]
    Refused {
        /// The PTX.
        ptx: PathBuf,
        /// The target.
        sm: u32,
        /// What it said.
        messages: String,
    },
}

/// Looks for ptxas: [`PTXAS_ENV`], `.ferrokv/tools/bin` under `workspace`, PATH, `/usr/local/cuda/bin`. The
/// first that runs and is new enough is taken; the error says what was found wanting.
pub fn find(workspace: &Path) -> Result<Ptxas, String> {
    if let Some(named) = env::var_os(PTXAS_ENV).filter(|value| !value.is_empty()) {
        return probe(Path::new(&named))
            .map_err(|reason| format!("{PTXAS_ENV}: {reason}; correct or unset it"));
    }
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = [workspace.join(".ferrokv/tools/bin")]
        .into_iter()
        .chain(env::split_paths(&path))
        .chain([PathBuf::from("/usr/local/cuda/bin")]);
    let mut reasons = Vec::new();
    for candidate in folders.map(|folder| folder.join("ptxas")).filter(|candidate| candidate.is_file()) {
        match probe(&candidate) {
            Ok(ptxas) => return Ok(ptxas),
            Err(reason) => reasons.push(reason),
        }
    }
    if reasons.is_empty() {
        reasons.push("no ptxas".into());
    }
    Err(format!("{}; {REMEDY}", reasons.join("; ")))
}

fn probe(path: &Path) -> Result<Ptxas, String> {
    let at = path.display();
    let output = Command::new(path)
        .arg("--version")
        .output()
        .map_err(|error| format!("{at} does not start: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let version = text
        .split(|c: char| c.is_whitespace() || c == ',')
        .find_map(|word| word.strip_prefix('V').filter(|rest| rest.starts_with(|c: char| c.is_ascii_digit())))
        .ok_or_else(|| format!("{at} does not tell its version"))?;
    let mut numbers = version.split('.').map(|number| number.parse::<u32>().unwrap_or(0));
    let release = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if release < OLDEST {
        return Err(format!("{at} is release {version}, older than {}.{}", OLDEST.0, OLDEST.1));
    }
    Ok(Ptxas { path: path.to_owned(), version: version.to_owned() })
}

/// What an assembly came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assembled {
    /// What each entry uses, sorted by name.
    pub usage: Vec<Usage>,
    /// Its warnings, and what it says of lost speed.
    pub warnings: Vec<String>,
}

/// Where the machine code of the file `ptx` lies.
pub fn machine_code_file(ptx: &Path) -> PathBuf {
    ptx.with_extension("cubin")
}

impl Ptxas {
    /// Assembles the file `ptx` for `sm` and leaves the machine code beside it, as `.cubin`. What ptxas said
    /// is kept there too: the same text is not assembled twice by the same release.
    pub fn assemble(&self, ptx: &Path, text: &str, sm: u32) -> Result<Assembled, PtxasError> {
        let log_path = ptx.with_extension("ptxas.log");
        let cubin = machine_code_file(ptx);
        let seal = format!("// {:016x}\n", crate::fingerprint([text, &self.version, &sm.to_string()]));
        if cubin.exists()
            && let Ok(log) = std::fs::read_to_string(&log_path)
            && let Some(log) = log.strip_prefix(&seal)
        {
            return Ok(with_instructions(parse_log(log), &cubin));
        }
        let features = if text.contains(&format!("\n.target sm_{sm}a")) { "a" } else { "" };
        let output = Command::new(&self.path)
            .args([&format!("-arch=sm_{sm}{features}"), "-v", "-o"])
            .args([&cubin, ptx])
            .output()
            .map_err(|error| PtxasError::Start { path: self.path.clone(), error })?;
        let log = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() {
            let messages = log.trim().to_owned();
            return Err(PtxasError::Refused { ptx: ptx.to_owned(), sm, messages });
        }
        // Only a cache: if it cannot be written the next build assembles again.
        let _ = std::fs::write(&log_path, format!("{seal}{log}"));
        Ok(with_instructions(parse_log(&log), &cubin))
    }
}

/// Counted in the machine code, where it can be read.
fn with_instructions(mut assembled: Assembled, cubin: &Path) -> Assembled {
    let counted = std::fs::read(cubin).map(|code| cubin::instructions(&code)).unwrap_or_default();
    for usage in &mut assembled.usage {
        usage.instructions = counted.get(&usage.entry).copied().unwrap_or(0);
    }
    assembled
}

/// Reads what `ptxas -v` prints.
pub fn parse_log(log: &str) -> Assembled {
    let mut assembled = Assembled::default();
    let mut current: Option<Usage> = None;
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let entry = rest.split('\'').next().unwrap_or_default().to_owned();
            assembled.usage.extend(current.replace(Usage { entry, ..Usage::default() }));
        } else if line.contains("warning") || line.contains("Potential Performance Loss") {
            assembled.warnings.push(line.trim().to_owned());
        } else if let Some(usage) = &mut current {
            let facts = line.split_once("Used ").map_or(line, |(_, facts)| facts);
            for fact in facts.split(',') {
                let Some((number, what)) = fact.trim().split_once(' ') else { continue };
                let Ok(number) = number.parse::<u32>() else { continue };
                match what {
                    "registers" => usage.registers = number,
                    "bytes stack frame" => usage.stack = number,
                    "bytes spill stores" => usage.spill_stores = number,
                    "bytes spill loads" => usage.spill_loads = number,
                    "bytes smem" => usage.shared = number,
                    _ => {}
                }
            }
        }
    }
    assembled.usage.extend(current);
    assembled.usage.sort_by(|a, b| a.entry.cmp(&b.entry));
    assembled
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'b' for 'sm_90'
ptxas info    : Function properties for b
    64 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 64 bytes cumulative stack size, 4096 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 1.059 ms
ptxas warning : something about b
ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized in the function 'b'
ptxas info    : Compiling entry function 'a' for 'sm_90'
ptxas info    : Function properties for a
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers, 368 bytes cmem[0]
";

    #[test]
    fn the_log_is_read() {
        let assembled = parse_log(LOG);
        let b = Usage {
            entry: "b".into(),
            registers: 32,
            stack: 64,
            spill_stores: 12,
            spill_loads: 16,
            shared: 4096,
            instructions: 0,
        };
        let a = Usage { entry: "a".into(), registers: 10, ..Usage::default() };
        assert_eq!(assembled.usage, [a, b]);
        let [warning, loss] = &assembled.warnings[..] else { panic!("{:?}", assembled.warnings) };
        assert_eq!(warning, "ptxas warning : something about b");
        assert!(loss.contains("serialized"), "{loss}");
        assert_eq!(parse_log(""), Assembled::default());
    }

    #[test]
    fn a_program_that_is_not_ptxas_is_refused() {
        let error = probe(Path::new("/nonexistent/ptxas")).unwrap_err();
        assert!(error.starts_with("/nonexistent/ptxas does not start"), "{error}");
    }
}
