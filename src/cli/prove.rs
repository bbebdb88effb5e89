//! `ferrokv prove`: does any scheme promise too much?

use super::backend::{BackendArguments, Gpu};
use super::failure::Failure;
use super::output::ReportArguments;
use super::table::{Align, Table};
use super::{layers, progress, scheme, text};
use half::f16;
use host::Device;
use host::int8::file::Dtype;
use host::kv::proof::{Findings, Layer, Options, Tally, Trial};
use host::tensor_file::TensorFile;
use serde::Serialize;
use simt::emu::EmuOptions;
use std::path::{Path, PathBuf};
use std::time::Instant;

const LONG: &str = "\
Run steps of attention over caches of every kind and compare each head's error, by attention in f64, with \
what its scheme promises: no error may be larger. Of a scheme that promises nothing the errors are shown.

The caches are ordinary ones, degenerate ones (constant channels, an outlier, copies), some made to go wrong (keys that \
all round against the query, near ties where the choice of blocks is made, all mass on one token or on the trailing \
block, huge norms, attention spread over thousands of tokens), and the real one of a file.

A scheme's system may know more to try: of `certified` every preset is tried in turn, over head_dim 64 and 128, f16 and bf16, 1 to \
16 query heads a KV head, both layouts, with lists of other sequences too; and the paper's bound stands beside ours. With \
a preset or an option (`certified:strict`) that alone is tried. The caches are as they were written: an alarm that stored data \
have changed would be a mistake too.

Exit codes: 0 no error is beyond its bound; 1 some are, or an alarm was raised; 2 bad input.";

const EXAMPLES: &str = "\
Examples:
  ferrokv prove                                    20,000 head-steps; on the emulator if there is no GPU
  ferrokv prove --kv dense,int8-int4,certified:strict --head-steps 2000
  ferrokv prove --head-steps 1000000 --json proof.json
  ferrokv prove --seed 7 --max-tokens 4096 --long-tokens 65536";

/// Compare what schemes promise with errors, head by head.
#[derive(clap::Args)]
#[command(long_about = LONG, after_long_help = EXAMPLES)]
pub struct Arguments {
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "certified")]
    #[arg(help = scheme::short("KV schemes"))]
    #[arg(long_help = scheme::long("KV schemes"))]
    kv: Vec<String>,
    /// Head-steps at least, of each scheme: query heads of steps.
    #[arg(long, value_name = "N", default_value_t = 20_000)]
    head_steps: u64,
    /// The longest of most sequences, in tokens; 1024 on a GPU, 256 on the emulator if not given.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(32..=65536))]
    max_tokens: Option<u32>,
    /// A few sequences of this many tokens; 8192 on a GPU, 2048 on the emulator if not given.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(32..=400_000))]
    long_tokens: Option<u32>,
    /// Other numbers.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// The file with a real cache: tensors layer.NN.key, .value and .query. Without it only made-up ones.
    #[arg(long, value_name = "FILE")]
    cache: Option<PathBuf>,
    #[command(flatten)]
    backend: BackendArguments,
    #[command(flatten)]
    report: ReportArguments,
}

#[derive(Serialize)]
struct Json<'a> {
    command: &'static str,
    version: &'static str,
    ptx_fingerprint: &'static str,
    codegen: &'static str,
    device: &'a str,
    /// Why there was no GPU.
    gpu_note: Option<&'a str>,
    seed: u64,
    max_tokens: u32,
    long_tokens: u32,
    passed: bool,
    schemes: &'a [Proven],
}

/// What was found of a scheme.
#[derive(Serialize)]
struct Proven {
    kv: String,
    seconds: f64,
    #[serde(flatten)]
    findings: Findings,
}

/// Runs the command.
///
/// # Errors
/// Bad input, a GPU asked for that cannot be used, or an error beyond its bound.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let report = arguments.report.open(arguments.cache.as_deref(), None)?;
    let layers = arguments.cache.as_deref().map(read).transpose()?.unwrap_or_default();
    let kernels = arguments.backend.kernels()?;
    let (device, gpu_note) = match arguments.backend.open()? {
        Gpu::Ready(device) => (device, None),
        Gpu::None(reason) => (Device::cpu(EmuOptions::default()), Some(reason)),
    };
    let on_gpu = gpu_note.is_none();
    let options = Options {
        head_steps: arguments.head_steps,
        max_tokens: arguments.max_tokens.unwrap_or(if on_gpu { 1024 } else { 256 }),
        long_tokens: arguments.long_tokens.unwrap_or(if on_gpu { 8192 } else { 2048 }),
        seed: arguments.seed,
    };
    let schemes = scheme::each_once(&arguments.kv)?;
    let bar = progress::bar(arguments.head_steps as usize * schemes.len());
    let mut proven = Vec::new();
    for selection in &schemes {
        bar.set_message(selection.to_string());
        let (start, before) = (Instant::now(), bar.position());
        let trial = Trial { device: &device, selection, options, layers: &layers };
        let findings = (selection.scheme().proof)(&trial, &mut |done| bar.set_position(before + done))?;
        proven.push(Proven { kv: selection.to_string(), seconds: start.elapsed().as_secs_f64(), findings });
    }
    bar.finish_and_clear();

    let name = device.info().name.clone();
    let sum = |of: fn(&Findings) -> u64| proven.iter().map(|proven| of(&proven.findings)).sum::<u64>();
    let (violations, alarms) = (sum(|found| found.total.violations), sum(|found| found.alarms));
    let json = Json {
        command: "prove",
        version: env!("CARGO_PKG_VERSION"),
        ptx_fingerprint: kernels.fingerprint,
        codegen: kernels.name,
        device: &name,
        gpu_note: gpu_note.as_deref(),
        seed: options.seed,
        max_tokens: options.max_tokens,
        long_tokens: options.long_tokens,
        passed: violations == 0 && alarms == 0,
        schemes: &proven,
    };
    let tables: Vec<String> = proven.iter().map(|proven| render(proven, &name)).collect();
    report.finish(&tables.join("\n"), &json)?;
    match violations {
        0 if alarms == 0 => Ok(()),
        0 => Err(Failure::Differs(format!(
            "{} raised over caches that nobody has changed",
            text::plural(alarms as usize, "alarm")
        ))),
        n => Err(Failure::Differs(format!("{} beyond what is promised", text::plural(n as usize, "error")))),
    }
}

/// The layers of a file, up to the token of its last query.
fn read(path: &Path) -> Result<Vec<Layer>, Failure> {
    let mut file = TensorFile::open(path)?;
    let layers = layers::layers(&file, &[])?;
    let mut read = |layer: &layers::Layer| {
        if layer.dtype != Dtype::F16 {
            let reason = format!("it holds {}; prove takes real caches in F16", layer.dtype);
            return Err(layers::Error::Tensor { name: format!("{}.key", layer.name), reason }.into());
        }
        let layers::Layer { kv_heads, heads, head_dim, query_rows, .. } = *layer;
        let tokens = layer.visible(query_rows - 1);
        let mut data = layer.read::<f16>(&mut file)?;
        data.keys.truncate(tokens * kv_heads * head_dim);
        data.values.truncate(tokens * kv_heads * head_dim);
        Ok(Layer {
            keys: data.keys,
            values: data.values,
            queries: data.queries,
            // Extents fit into 32 bits, as was checked.
            tokens: tokens as u32,
            query_tokens: query_rows as u32,
            kv_heads: kv_heads as u32,
            q_heads: heads as u32,
            head_dim: head_dim as u32,
        })
    };
    layers.iter().map(&mut read).collect()
}

fn render(proven: &Proven, device: &str) -> String {
    let Proven { kv, seconds, findings } = proven;
    let mut columns = vec![
        ("input", Align::Left),
        ("head-steps", Align::Right),
        ("bounded", Align::Right),
        ("violations", Align::Right),
        ("stored", Align::Right),
        ("mixed", Align::Right),
        ("originals", Align::Right),
        ("bound/error", Align::Right),
        ("least", Align::Right),
        ("error of output", Align::Right),
        ("worst", Align::Right),
        ("bound of output", Align::Right),
        ("99 %", Align::Right),
        ("worst", Align::Right),
    ];
    columns.extend(findings.total.facts.iter().map(|fact| (fact.name.as_str(), Align::Right)));
    let mut table = Table::new(&columns);
    let mut row = |name: &str, tally: &Tally| {
        let ratio = |x: f64| if x < 1000.0 { format!("{x:.2}") } else { format!("{x:.1e}") };
        let [median, least] = tally.ratio.map_or(["-".into(), "-".into()], |ratios| ratios.map(ratio));
        let spread =
            |spread: Option<[f64; 3]>| spread.map_or(["-"; 3].map(String::from), |x| x.map(text::error));
        let [error, _, worst_error] = spread(tally.relative_error);
        let [bound, most, worst] = spread(tally.relative_bound);
        let counts = [tally.head_steps, tally.bounded, tally.violations].into_iter().chain(tally.sources);
        let cells = std::iter::once(name.to_owned()).chain(counts.map(text::count));
        let cells = cells.chain([median, least, error, worst_error, bound, most, worst]);
        table.row(cells.chain(tally.facts.iter().map(|fact| text::figure(&fact.value))));
    };
    for (input, tally) in &findings.inputs {
        row(input, tally);
    }
    row("all", &findings.total);
    let mut out = format!("{kv} on {device}, {}\n\n{}", text::seconds(*seconds), table.render());
    out += "\nof output: parts of the exact output's norm; medians, where nothing else is said\n";
    for note in &findings.notes {
        out += &format!("{note}\n");
    }
    for violation in &findings.violations {
        out += &format!("VIOLATION: {violation}\n");
    }
    out
}
