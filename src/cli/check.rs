//! `ferrokv check`: do the emulator and the GPU give the same bits?

mod times;

use super::backend::{BackendArguments, Gpu, Opened};
use super::failure::Failure;
use super::output::ReportArguments;
use super::table::{Align, Table};
use super::{progress, text};
use clap::builder::PossibleValuesParser;
use ferrokv::Generated;
use host::check::{self, Case, CaseReport, Coverage, Golden, Outcome, Report, Times, Totals};
use host::kv::System;
use host::{Device, SYSTEMS};
use serde::Serialize;
use simt::emu::{EmuOptions, Target};
use std::cell::Cell;
use std::path::PathBuf;

const LONG: &str = "\
Run every kernel instance over a grid of shapes and inputs on the emulator and on the GPU, and compare every bit \
that they write.

The inputs are random bit patterns, NaN, infinities, subnormals, ties and ordinary numbers; the shapes lie around \
every edge of the kernels' tiles. The probe kernels do the same for each primitive of the kernel language. Outputs \
are filled with another byte on each side first, so that an element nobody writes is a difference too. Without a \
GPU the emulator still checks every access, and small shapes for races.

--sanitize is for running under NVIDIA's compute-sanitizer, which is slow: small shapes, and in place of \
the emulator a second run on the GPU (but for the few cases that are checked for races).

--orders N is for the emulator alone: every check it has, and each launch in N + 2 orders, ascending, reversed and \
by the seeds 1 to N; with 0 in the first alone. Results that depend on the order, and values that atomics may see \
late, show there. With --golden the digests of all outputs are compared with those of a folder, so that bits change only when somebody means it: \
--write-golden writes them.

--emulate TARGET has the emulator be another GPU: its tensor cores add f16 and bf16 products in their own way, and a \
block has as much shared memory as there. Of these only sm_90 was compared with a GPU.

--codegen llvm,nvvm compares two code generators, of a program that was built with both (FERROKV_CODEGEN=llvm,nvvm): \
the emulator with the first one's kernels, and these with the second one's. It needs a GPU.

--time also says how long each kernel takes on the GPU, and with two code generators who is faster: each case whose \
bits are equal runs three times more by each, in turns, and of a launch the fastest run counts. The ratio of a kernel \
is the geometric mean over its launches. A time is from an event ahead of the launch to one behind it and holds some \
2 µs of launching, so that ratios of small kernels are closer to 1 than their work is. Launches in captured graphs are \
not timed.

Exit codes: 0 all bits are equal (or there was no GPU to compare with, and the emulator found no fault); 1 some \
differ, or a kernel is at fault; 2 bad input.";

const EXAMPLES: &str = "\
Examples:
  ferrokv check                                    a minute or two
  ferrokv check --full --json check.json           over 10^9 outputs
  ferrokv check --system int8 --filter fused_f16
  ferrokv check --codegen llvm,nvvm                the bits of two code generators
  ferrokv check --full --codegen llvm,nvvm --time  whose kernels are faster
  ferrokv check --orders 16 --system gather        the emulator alone, each launch 18 times
  ferrokv check --emulate sm_86 --orders 0         what a GPU with less shared memory cannot launch
  ferrokv check --orders 0 --golden host/golden    are small cases' bits those of this version?
  compute-sanitizer --tool racecheck ferrokv check --sanitize";

/// Compare the emulator's bits with the GPU's, kernel by kernel.
#[derive(clap::Args)]
#[command(long_about = LONG, after_long_help = EXAMPLES)]
pub struct Arguments {
    /// Only the cases of this system.
    #[arg(long, value_parser = PossibleValuesParser::new(SYSTEMS.iter().map(|system| system.name)))]
    system: Option<String>,
    /// Only cases with this in a kernel's name or in their parameters.
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Small shapes and samples of bit patterns (the default).
    #[arg(long, conflicts_with_all = ["full", "huge", "sanitize", "orders"])]
    quick: bool,
    /// Large shapes and many more bit patterns: over 10^9 outputs.
    #[arg(long, conflicts_with_all = ["huge", "sanitize"])]
    full: bool,
    /// Only matrices of more than 2^31 elements: some 20 GB on the host and on the GPU.
    #[arg(long, conflicts_with = "sanitize")]
    huge: bool,
    /// Small shapes, twice on the GPU: for compute-sanitizer.
    #[arg(long)]
    sanitize: bool,
    /// Small shapes on the emulator alone, with every check; each launch also reversed and by so many seeds.
    #[arg(long, value_name = "N", conflicts_with_all = ["full", "huge", "sanitize", "codegen"])]
    orders: Option<u32>,
    /// Compare the digests of all outputs with those in this folder.
    #[arg(long, value_name = "FOLDER", requires = "orders", conflicts_with_all = ["write_golden", "list"])]
    golden: Option<PathBuf>,
    /// Write the digests of all outputs into this folder, a file for each system, in place of those there.
    #[arg(long, value_name = "FOLDER", requires = "orders", conflicts_with_all = ["filter", "list"])]
    write_golden: Option<PathBuf>,
    /// The GPU that the emulator is one of: sm_75, sm_80, … (the one it is compared with; without one what
    /// FERROKV_EMULATE says, or sm_90).
    #[arg(long, value_name = "TARGET", conflicts_with = "sanitize")]
    emulate: Option<Target>,
    /// Also time each kernel on the GPU, by each code generator.
    #[arg(long, conflicts_with_all = ["sanitize", "orders", "list"])]
    time: bool,
    /// List the cases instead of running them.
    #[arg(long)]
    list: bool,
    #[command(flatten)]
    backend: BackendArguments,
    #[command(flatten)]
    report: ReportArguments,
}

#[derive(Serialize)]
struct Json<'a> {
    command: &'static str,
    version: &'static str,
    suite: &'static str,
    ptx_fingerprint: &'static str,
    /// That of the second generator.
    second_ptx_fingerprint: Option<&'static str>,
    compute_capability: Option<u32>,
    driver_version: Option<u32>,
    passed: bool,
    /// Kernels of the program that no case of the whole suite launches.
    not_covered: &'a [&'static str],
    /// Cases of which there are golden bits, and which the program has not.
    stale: &'a [String],
    /// Why there was no GPU.
    gpu_note: Option<&'a str>,
    /// The code generators whose kernels ran on the GPU.
    codegens: &'a [&'static str],
    #[serde(flatten)]
    report: &'a Report,
    /// The second generator's kernels compared with the first one's.
    second: Option<&'a Report>,
    /// How long kernels took, with `--time`.
    times: Option<&'a Times>,
}

#[derive(Serialize)]
struct Listed<'a> {
    kernels: &'a [&'static str],
    label: &'a str,
}

impl Arguments {
    fn suite(&self) -> &'static str {
        match self {
            Arguments { orders: Some(_), .. } => "orders",
            Arguments { sanitize: true, .. } => "sanitize",
            Arguments { huge: true, .. } => "huge",
            Arguments { full: true, .. } => "full",
            _ => "quick",
        }
    }

    /// Every case of the suite.
    fn cases(&self) -> Vec<Case> {
        let coverage = match self.suite() {
            "sanitize" | "orders" => Coverage::Small,
            "huge" => Coverage::Huge,
            "full" => Coverage::Full,
            _ => Coverage::Quick,
        };
        self.systems().flat_map(|system| system.own_cases(coverage)).collect()
    }

    fn systems(&self) -> impl Iterator<Item = &'static System> {
        let wanted = |name| self.system.as_deref().is_none_or(|system| system == name);
        SYSTEMS.iter().copied().filter(move |system| wanted(system.name))
    }
}

/// Runs the command.
///
/// # Errors
/// Bad input, a GPU asked for that cannot be used, or bits that differ.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let report = arguments.report.open(None, None)?;
    let mut cases = arguments.cases();
    let whole = arguments.system.is_none() && !arguments.huge && arguments.orders.is_none();
    let not_covered = match whole {
        true => check::not_covered(&cases, ferrokv::kernels().map(|(_, info)| info)),
        false => Vec::new(),
    };
    if let Some(filter) = &arguments.filter {
        cases.retain(|case| {
            case.label().contains(filter) || case.kernels().iter().any(|name| name.contains(filter))
        });
        if cases.is_empty() {
            return Err(Failure::NoCase { filter: filter.clone() });
        }
    }
    if arguments.list {
        return list(&cases, &report);
    }
    let golden = match &arguments.golden {
        Some(folder) => Some(Golden::read(folder, arguments.systems().map(|system| system.name))?),
        None => None,
    };
    if let Some(folder) = &arguments.write_golden {
        Golden::writable(folder)?;
    }
    let (gpu, gpu_note, kernels, second) = match arguments.orders {
        Some(_) => (None, None, arguments.backend.kernels()?, None),
        None => match arguments.backend.open_generated()? {
            Opened { gpu: Gpu::Ready(device), kernels, second } => (Some(device), None, kernels, second),
            Opened { gpu: Gpu::None(reason), kernels, .. } => (None, Some(reason), kernels, None),
        },
    };
    let name = kernels.name;
    let reference = match (&gpu, arguments.sanitize) {
        (Some(gpu), true) => gpu.clone(),
        (None, true) => {
            return Err(Failure::NeedsGpu { what: "--sanitize", reason: gpu_note.unwrap_or_default() });
        }
        // Of the GPU that it is compared with.
        (gpu, false) => {
            let target = arguments.emulate.or_else(|| gpu.as_ref().map(Device::target));
            Device::cpu(EmuOptions { target, ..EmuOptions::default() })
        }
    };
    if let (true, None) = (arguments.time, &gpu) {
        return Err(Failure::NeedsGpu { what: "--time", reason: gpu_note.unwrap_or_default() });
    }
    let rounds = 1 + usize::from(second.is_some()) + usize::from(arguments.time);
    let bar = progress::bar(cases.len() * rounds);
    let wrong = Cell::new(0usize);
    let step = |progress: check::Progress<'_>| {
        wrong.set(wrong.get() + usize::from(!progress.case.outcome.is_good()));
        let note = if wrong.get() == 0 { String::new() } else { format!("{} wrong; ", wrong.get()) };
        let kernel = progress.case.kernels.first().map_or("", String::as_str);
        bar.set_message(format!("{note}{kernel} {}", progress.case.label));
        // A kernel that never ends on the GPU is in the case after the last one said here.
        tracing::debug!(
            done = progress.done,
            kernel,
            label = progress.case.label,
            "{}",
            progress.case.outcome
        );
        bar.inc(1);
    };
    let mut found = match arguments.orders {
        Some(orders) => {
            // The reversed order is the first one more.
            let orders = if orders == 0 { 0 } else { orders.saturating_add(1) };
            let options = EmuOptions { orders, target: arguments.emulate, ..EmuOptions::thorough() };
            check::run_emulated(&cases, options, &step)
        }
        None => check::run_cases(&cases, &reference, gpu.as_ref(), &step),
    };
    let mut codegens: Vec<&'static str> = gpu.iter().map(|_| name).collect();
    let found_second = match (&gpu, &second) {
        (Some(first), Some((Generated { name: second_name, .. }, second))) => {
            codegens.push(second_name);
            let mut report = check::run_cases(&cases, first, Some(second), &step);
            // Both are the same GPU: the generators tell them apart.
            let named = |gpu: &str, codegen: &str| format!("{gpu} ({codegen})");
            found.other = found.other.map(|gpu| named(&gpu, name));
            report.reference = named(&report.reference, name);
            report.other = report.other.map(|gpu| named(&gpu, second_name));
            Some(report)
        }
        _ => None,
    };
    // What is found so far is said, whatever comes of the times.
    let (times, untimed) = match (&gpu, arguments.time) {
        (Some(gpu), true) => {
            let second = second.iter().map(|(kernels, device)| (kernels.name, device));
            let devices: Vec<(&str, &Device)> = [(name, gpu)].into_iter().chain(second).collect();
            let reports: Vec<&Report> = [&found].into_iter().chain(&found_second).collect();
            match times::measure(&cases, &reports, &devices, &bar) {
                Ok(times) => (Some(times), None),
                Err(error) => (None, Some(error)),
            }
        }
        _ => (None, None),
    };
    bar.finish_and_clear();
    let found = match &golden {
        Some(golden) => golden.hold(found),
        None => found,
    };
    let stale = match &golden {
        Some(golden) if arguments.filter.is_none() => golden.stale(&found),
        _ => Vec::new(),
    };
    let info = gpu.as_ref().map(Device::info);
    let reports = || [&found].into_iter().chain(&found_second);
    let passed = reports().all(Report::passed) && stale.is_empty();
    let json = Json {
        command: "check",
        version: env!("CARGO_PKG_VERSION"),
        suite: arguments.suite(),
        ptx_fingerprint: kernels.fingerprint,
        second_ptx_fingerprint: second.as_ref().map(|(kernels, _)| kernels.fingerprint),
        compute_capability: info.and_then(|info| info.compute_capability),
        driver_version: info.and_then(|info| info.driver_version),
        passed,
        stale: &stale,
        not_covered: &not_covered,
        gpu_note: gpu_note.as_deref(),
        codegens: &codegens,
        report: &found,
        second: found_second.as_ref(),
        times: times.as_ref(),
    };
    // What is true of the whole is said once. With a second report there was a GPU.
    let mut shown = vec![tables(&found, gpu_note.as_deref(), &not_covered)];
    shown.extend(found_second.as_ref().map(|found| tables(found, None, &[])));
    shown.extend(times.as_ref().map(times::table));
    shown.extend(untimed.as_ref().map(|error| format!("no times: {error}\n")));
    report.finish(&shown.join("\n"), &json)?;
    if let Some(folder) = &arguments.write_golden {
        Golden::write(&found, folder)?;
    }
    if passed {
        return untimed.map_or(Ok(()), |error| Err(error.into()));
    }
    if let [first, ..] = stale.as_slice()
        && found.passed()
    {
        return Err(Failure::Differs(format!(
            "golden bits are there of {} that the program has not, the first one {first}; \
             write them with --write-golden",
            text::plural(stale.len(), "case"),
        )));
    }
    let sum = |part: fn(&Totals) -> u64| -> u64 { reports().map(|found| part(&found.totals)).sum() };
    let (different, altered) = (sum(|t| t.different), sum(|t| t.altered));
    let (fault, error, cases) = (sum(|t| t.fault), sum(|t| t.error), sum(|t| t.cases));
    Err(Failure::Differs(format!(
        "{different} of {cases} cases differ, {altered} have other bits than the golden ones, {fault} at fault, \
         {error} failed; the first ones are listed above"
    )))
}

fn list(cases: &[Case], report: &super::output::Report) -> Result<(), Failure> {
    let listed: Vec<Listed> =
        cases.iter().map(|case| Listed { kernels: case.kernels(), label: case.label() }).collect();
    let mut out = String::new();
    for Listed { kernels, label } in &listed {
        out += &format!("{}  {label}\n", kernels.join(" + "));
    }
    report.finish(&out, &listed)
}

fn tables(report: &Report, gpu_note: Option<&str>, not_covered: &[&str]) -> String {
    let mut table = Table::new(&[
        ("kernel", Align::Left),
        ("cases", Align::Right),
        ("outputs", Align::Right),
        ("compared", Align::Right),
        ("bits differing", Align::Right),
        ("reference", Align::Right),
        ("other", Align::Right),
        ("result", Align::Left),
    ]);
    for (kernel, totals) in report.by_kernel() {
        table.row([
            kernel.to_owned(),
            text::count(totals.cases),
            text::count(totals.outputs),
            text::count(totals.compared),
            text::count(totals.differing_bits),
            text::seconds(totals.reference_seconds),
            if report.other.is_some() { text::seconds(totals.other_seconds) } else { "-".into() },
            verdict(&totals),
        ]);
    }
    let other = report.other.as_deref().unwrap_or("none");
    let mut out = format!("reference: {}; compared with: {other}\n", report.reference);
    if let Some(note) = gpu_note {
        let note = note.split("; ").next().unwrap_or(note);
        out += &format!("no GPU: {note} (ferrokv doctor says more); the emulator checks what it runs\n");
    }
    out.push('\n');
    out += &table.render();
    out += &failures(report);
    if !not_covered.is_empty() {
        out += &format!(
            "\nno case launches {}: {}\n",
            text::plural(not_covered.len(), "kernel"),
            not_covered.join(", ")
        );
    }
    let totals = &report.totals;
    out += &format!(
        "\n{}: {} outputs, {} compared, {} elements ({} bits) differ; reference {}, other {}\n",
        text::plural(totals.cases as usize, "case"),
        text::count(totals.outputs),
        text::count(totals.compared),
        text::count(totals.differing_elements),
        text::count(totals.differing_bits),
        text::seconds(totals.reference_seconds),
        text::seconds(totals.other_seconds),
    );
    out
}

/// `equal`, or how many cases ended how.
fn verdict(totals: &Totals) -> String {
    let kinds = [
        (totals.different, "DIFFERENT"),
        (totals.fault, "AT FAULT"),
        (totals.error, "FAILED"),
        (totals.altered, "ALTERED"),
        (totals.equal, "equal"),
        (totals.no_gpu, "no fault"),
    ];
    let kinds: Vec<_> = kinds.into_iter().filter(|(count, _)| *count != 0).collect();
    match kinds.as_slice() {
        [(_, name)] => name.to_string(),
        _ => kinds.iter().map(|(count, name)| format!("{count} {name}")).collect::<Vec<_>>().join(", "),
    }
}

/// The first cases that went wrong, a line each.
fn failures(report: &Report) -> String {
    const SHOWN: usize = 20;
    let wrong: Vec<&CaseReport> = report.cases.iter().filter(|case| !case.outcome.is_good()).collect();
    let mut out = String::new();
    for case in wrong.iter().take(SHOWN) {
        let what = match (&case.outcome, &case.first_difference, &case.message) {
            (Outcome::Different, Some(first), _) => format!(
                "{} of {} elements; first {}[{}]: {} and {}",
                text::count(case.differing_elements),
                text::count(case.compared),
                first.output,
                first.index,
                first.reference,
                first.other
            ),
            (_, _, Some(message)) => message.split_whitespace().collect::<Vec<_>>().join(" "),
            _ => String::new(),
        };
        out += &format!("\n{}: {} ({}): {what}", case.outcome, case.kernels.join(" + "), case.label);
    }
    match wrong.len() {
        0 => {}
        n if n > SHOWN => out += &format!("\nand {} more: --json has them all\n", n - SHOWN),
        _ => out.push('\n'),
    }
    out
}
