//! `ferrokv prove`: does any certificate promise too much?

use super::backend::{BackendArguments, Gpu};
use super::failure::Failure;
use super::output::ReportArguments;
use super::table::{Align, Table};
use super::{progress, text};
use half::f16;
use host::Device;
use host::certified::proof::{self, Findings, Layer, Notable, Options, Tally};
use host::tensor_file::{Dtype, TensorFile};
use serde::Serialize;
use simt::emu::EmuOptions;
use std::path::{Path, PathBuf};
use std::time::Instant;

const LONG: &str = "\
Run steps of certified attention over caches of every kind and compare each head's error, by attention in f64, with \
what its certificate says: no error may be larger.

The caches are ordinary ones, degenerate ones (constant channels, an outlier, copies), some made to go wrong (keys that \
all round against the query, near ties where the choice of blocks is made, all mass on one token or on the trailing \
block, huge norms, attention spread over thousands of tokens), and the real one of a file; head_dim 64 and 128, f16 and \
bf16, 1 to 16 query heads a KV head; the presets paper, sound, naive, strict and fast in \
turn, the paper's thresholds also with our bound, and some in the paper's layout, whose scales of keys are f32.

It also says how tight the bounds are (bound over error), where heads came from, and how the paper's bound on the error \
by quantized keys compares with ours on the same heads. The caches are as they were written: an alarm of the canary \
would be a mistake too.

Exit codes: 0 no error is beyond its bound; 1 some are, or an alarm was raised; 2 bad input.";

const EXAMPLES: &str = "\
Examples:
  ferrokv prove                                    20,000 head-steps; on the emulator if there is no GPU
  ferrokv prove --head-steps 1000000 --json proof.json
  ferrokv prove --seed 7 --max-tokens 4096 --long-tokens 65536";

/// Compare certificates with errors, head by head.
#[derive(clap::Args)]
#[command(long_about = LONG, after_long_help = EXAMPLES)]
pub struct Arguments {
    /// Head-steps at least: query heads of steps.
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
    device: &'a str,
    /// Why there was no GPU.
    gpu_note: Option<&'a str>,
    seed: u64,
    max_tokens: u32,
    long_tokens: u32,
    seconds: f64,
    passed: bool,
    #[serde(flatten)]
    findings: &'a Findings,
}

/// Runs the command.
///
/// # Errors
/// Bad input, a GPU asked for that cannot be used, or an error beyond its bound.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let report = arguments.report.open(arguments.cache.as_deref(), None)?;
    let layers = arguments.cache.as_deref().map(layers).transpose()?.unwrap_or_default();
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
    let bar = progress::bar(arguments.head_steps as usize);
    let start = Instant::now();
    let findings = proof::prove(&device, options, &layers, |done| bar.set_position(done))?;
    let seconds = start.elapsed().as_secs_f64();
    bar.finish_and_clear();

    let name = device.info().name.clone();
    let alarms = findings.total.rungs[4];
    let passed = findings.total.violations == 0 && alarms == 0;
    let json = Json {
        command: "prove",
        version: env!("CARGO_PKG_VERSION"),
        ptx_fingerprint: ferrokv::embedded::FINGERPRINT,
        device: &name,
        gpu_note: gpu_note.as_deref(),
        seed: options.seed,
        max_tokens: options.max_tokens,
        long_tokens: options.long_tokens,
        seconds,
        passed,
        findings: &findings,
    };
    report.finish(&render(&findings, &name, seconds), &json)?;
    match findings.total.violations {
        0 if alarms == 0 => Ok(()),
        0 => Err(Failure::Differs(format!(
            "{} raised over caches that nobody has changed",
            text::plural(alarms as usize, "alarm")
        ))),
        n => Err(Failure::Differs(format!(
            "{} beyond what their certificates say",
            text::plural(n as usize, "error")
        ))),
    }
}

/// The layers of a file that have keys, values and queries.
fn layers(path: &Path) -> Result<Vec<Layer>, Failure> {
    let mut file = TensorFile::open(path)?;
    let names: Vec<String> =
        file.entries().keys().filter_map(|name| name.strip_suffix(".query")).map(str::to_owned).collect();
    let mut layers = Vec::new();
    for name in names {
        let shape = |file: &TensorFile<_>, what: &str| -> Result<[u32; 3], Failure> {
            let name = format!("{name}.{what}");
            let entry = file.entry(&name)?;
            let extents: Vec<u32> = entry.shape.iter().filter_map(|x| u32::try_from(*x).ok()).collect();
            <[u32; 3]>::try_from(extents).map_err(|_| Failure::Unsuitable {
                reason: format!("shape {:?}; [tokens, heads, head_dim] is needed", entry.shape),
                name,
            })
        };
        let [tokens, kv_heads, head_dim] = shape(&file, "key")?;
        let [query_tokens, q_heads, query_dim] = shape(&file, "query")?;
        let fits = shape(&file, "value")? == [tokens, kv_heads, head_dim]
            && query_dim == head_dim
            && query_tokens <= tokens;
        if !fits {
            return Err(Failure::Unsuitable {
                name: format!("{name}.query"),
                reason: "its shape does not go with that of keys and values".into(),
            });
        }
        let mut read = |what: &str| file.read::<f16>(&format!("{name}.{what}"), Dtype::F16);
        layers.push(Layer {
            keys: read("key")?,
            values: read("value")?,
            queries: read("query")?,
            tokens,
            query_tokens,
            kv_heads,
            q_heads,
            head_dim,
        });
    }
    Ok(layers)
}

fn render(findings: &Findings, device: &str, seconds: f64) -> String {
    let mut table = Table::new(&[
        ("input", Align::Left),
        ("head-steps", Align::Right),
        ("violations", Align::Right),
        ("no bound", Align::Right),
        ("quantized", Align::Right),
        ("promoted", Align::Right),
        ("expanded", Align::Right),
        ("dense", Align::Right),
        ("layer", Align::Right),
        ("bound/error", Align::Right),
        ("least", Align::Right),
        ("dense b/e", Align::Right),
        ("paper/ours", Align::Right),
        ("least", Align::Right),
        ("E_key", Align::Right),
        ("E_val", Align::Right),
        ("E_round", Align::Right),
        ("error", Align::Right),
    ]);
    let mut row = |name: &str, tally: &Tally| {
        let number = |x: f64| if x.is_nan() { "-".into() } else { format!("{x:.3e}") };
        let ratio = |x: f64| match x {
            x if x.is_nan() => "-".into(),
            x if x < 1000.0 => format!("{x:.2}"),
            x => format!("{x:.1e}"),
        };
        let counts = [tally.head_steps, tally.violations, tally.unbounded].into_iter().chain(tally.rungs);
        let ratios = [
            tally.median[0],
            tally.tightest,
            tally.median[1],
            tally.paper_over_ours,
            tally.paper_over_ours_least,
        ];
        let cells = std::iter::once(name.to_owned())
            .chain(counts.map(text::count))
            .chain(ratios.map(ratio))
            .chain(tally.medians.map(number));
        table.row(cells);
    };
    for (input, tally) in &findings.inputs {
        row(input.name(), tally);
    }
    row("all", &findings.total);
    let mut out = format!("on {device}, {}\n\n{}", text::seconds(seconds), table.render());
    out += "\nbound/error, paper/ours (bounds on the error by keys, the paper's thresholds) and the last four: medians\n";
    out += "\nhead-steps by bound/error: ";
    let last = findings.total.tightness.len() - 1;
    for (i, count) in findings.total.tightness.iter().enumerate().filter(|(_, count)| **count != 0) {
        let plus = if i == last { "+" } else { "" };
        out += &format!(" {}{plus}: {};", 1u64 << i, text::count(*count));
    }
    out.pop();
    out.push('\n');
    if !findings.total.reasons.is_empty() {
        let reasons = findings.total.reasons.iter().map(|(name, n)| format!("{name} {}", text::count(*n)));
        out += &format!("dense because: {}\n", reasons.collect::<Vec<_>>().join("; "));
    }
    let [least, middle, most] = findings.total.paper_kernel_over_f64;
    if !middle.is_nan() {
        out += &format!(
            "the paper's bound by the kernels over the same in f64: {middle:.3} in the median, {least:.3} to {most:.3}\n"
        );
    }
    if let Some(tightest) = &findings.tightest {
        out += &format!("tightest: {}\n", line(tightest));
    }
    for violation in &findings.violations {
        out += &format!("VIOLATION: {}\n", line(violation));
    }
    out
}

fn line(found: &Notable) -> String {
    format!(
        "error {:.4e}, bound {:.4e} (keys {:.3e}, values {:.3e}, rounding {:.3e}); {}, {} head_dim={} group={} {} tokens, \
         sequence {} head {}, policy {}, seed {}",
        found.error,
        found.bound,
        found.parts[0],
        found.parts[1],
        found.parts[2],
        found.rung,
        found.element,
        found.head_dim,
        found.group,
        found.tokens,
        found.sequence,
        found.q_head,
        found.policy,
        found.seed
    )
}
