//! `ferrokv kernels`: every kernel instance and what it uses, and the KV schemes of the same systems.

use super::backend::{BackendArguments, Gpu};
use super::failure::Failure;
use super::output::ReportArguments;
use super::scheme;
use super::table::{Align, Table};
use super::text;
use ferrokv::embedded::{self, EntryResources};
use host::kv::{OptionSpec, Preset, Scheme};
use host::{Device, KernelAttributes, LeftOut};
use serde::Serialize;
use simt::KernelInfo;
use std::collections::{BTreeMap, BTreeSet};

const LONG: &str = "\
List every kernel instance with its source line and what one thread and one block of it use: registers, static \
shared memory in bytes, stack and spills in bytes, and the instructions of its machine code. The numbers are those \
of the build's ptxas, a line a target and code generator (none if the build had no ptxas: ./setup --tools gets \
one), and with a GPU those of the driver's own compiler. A kernel that a target cannot have says so, with what it \
needs. Also compares the program's kernels with the entries of the embedded PTX.

Without --filter the systems' KV schemes follow, as --kv of other commands takes them: with presets and options.

Exit codes: 0 they match, or there is no PTX; 1 they do not; 2 bad input.";

/// List kernels with their registers, shared memory and spills.
#[derive(clap::Args)]
#[command(long_about = LONG)]
pub struct Arguments {
    /// Only kernels of this system: those that `--help` of `ferrokv check` lists.
    #[arg(long)]
    system: Option<String>,
    /// Only kernels whose name has this in it.
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
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
    ptxas: Option<&'static str>,
    gpu: Option<&'a str>,
    kernels: &'a [Kernel],
    /// The ways to keep keys and values of the same systems.
    schemes: Vec<SchemeRow>,
    /// Kernels of the program that the PTX lacks.
    not_in_ptx: &'a [&'static str],
    /// Entries of the PTX that the program does not know.
    not_in_program: &'a [&'static str],
}

#[derive(Serialize)]
struct Kernel {
    system: &'static str,
    name: &'static str,
    module: &'static str,
    source: String,
    max_threads: u32,
    in_ptx: bool,
    resources: Vec<Resources>,
    /// The targets that cannot have it.
    left_out: Vec<Lacking>,
}

/// A way to keep keys and values: `name[:preset][/option=value]…`.
#[derive(Serialize)]
struct SchemeRow {
    system: &'static str,
    name: &'static str,
    about: &'static str,
    /// The default first.
    presets: Vec<PresetRow>,
    options: Vec<OptionRow>,
}

#[derive(Serialize)]
struct PresetRow {
    name: &'static str,
    about: &'static str,
}

#[derive(Serialize)]
struct OptionRow {
    name: &'static str,
    about: &'static str,
    /// What it may be, in words.
    value: String,
}

/// The schemes of the systems that are asked for; none where kernels are chosen by name.
fn schemes(arguments: &Arguments) -> Vec<(&'static str, &'static Scheme)> {
    let asked = |name| arguments.system.as_deref().is_none_or(|wanted| wanted == name);
    let systems = host::SYSTEMS.iter().filter(|system| arguments.filter.is_none() && asked(system.name));
    systems.flat_map(|system| system.schemes.iter().map(|scheme| (system.name, scheme))).collect()
}

impl SchemeRow {
    fn new((system, scheme): (&'static str, &'static Scheme)) -> Self {
        let Scheme { name, about, presets, options, .. } = *scheme;
        let preset = |preset: &Preset| PresetRow { name: preset.name, about: preset.about };
        let option = |option: &OptionSpec| OptionRow {
            name: option.name,
            about: option.about,
            value: option.kind.to_string(),
        };
        SchemeRow {
            system,
            name,
            about,
            presets: presets.iter().map(preset).collect(),
            options: options.iter().map(option).collect(),
        }
    }
}

/// A target that cannot have a kernel.
#[derive(Clone, Serialize)]
struct Lacking {
    /// `nvvm ptxas sm_75`.
    by: String,
    /// The lowest target that can.
    needs: u32,
    /// What of the kernel it is that needs that target.
    why: &'static str,
}

/// By kernel, what the images of each code generator are without.
fn left_out() -> BTreeMap<&'static str, Vec<Lacking>> {
    let mut left_out: BTreeMap<&str, Vec<Lacking>> = BTreeMap::new();
    for (generated, image) in
        ferrokv::generated().into_iter().flat_map(|of| of.images.iter().map(move |image| (of.name, image)))
    {
        for LeftOut { kernel, needs, why } in image.left_out() {
            left_out.entry(kernel).or_default().push(Lacking {
                by: built_by(generated, image.sm),
                needs,
                why,
            });
        }
    }
    left_out
}

/// Who made machine code from the PTX of a code generator; that of the device compiler goes without saying.
fn built_by(codegen: &str, sm: u32) -> String {
    let codegen = if codegen == "llvm" { String::new() } else { format!("{codegen} ") };
    format!("{codegen}ptxas sm_{sm}")
}

/// What a kernel uses, by one compiler.
#[derive(Serialize)]
struct Resources {
    /// `ptxas sm_90`, `nvvm ptxas sm_90`, or the GPU's name.
    by: String,
    registers: u32,
    static_shared_bytes: u32,
    /// Stack by ptxas; local memory by the driver.
    local_bytes: u32,
    /// The driver does not tell.
    spill_stores: Option<u32>,
    spill_loads: Option<u32>,
    /// Those of the machine code; the driver does not tell.
    instructions: Option<u32>,
}

impl Resources {
    /// Of machine code from the PTX of a code generator.
    fn built(entry: &EntryResources, codegen: &str) -> Self {
        Resources {
            by: built_by(codegen, entry.sm),
            registers: entry.registers,
            static_shared_bytes: entry.shared,
            local_bytes: entry.stack,
            spill_stores: Some(entry.spill_stores),
            spill_loads: Some(entry.spill_loads),
            instructions: Some(entry.instructions),
        }
    }
}

/// Runs the command.
///
/// # Errors
/// An unknown system, a GPU asked for that cannot be used, or entries that do not match.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let report = arguments.report.open(None, None)?;
    let systems: BTreeSet<&str> = ferrokv::kernels().map(|(system, _)| system).collect();
    if let Some(system) = arguments.system.as_deref().filter(|system| !systems.contains(system)) {
        let names = systems.into_iter().collect::<Vec<_>>().join(", ");
        return Err(Failure::UnknownSystem { system: system.to_owned(), names });
    }
    let chosen = arguments.backend.kernels()?;
    let gpu = match arguments.backend.open()? {
        Gpu::Ready(device) => Some(device),
        Gpu::None(_) => None,
    };
    let entries: BTreeSet<&'static str> = embedded::ENTRIES.iter().copied().collect();
    let left_out = left_out();
    let mut kernels = Vec::new();
    for (system, info) in ferrokv::kernels() {
        let wanted = arguments.system.as_deref().is_none_or(|wanted| wanted == system)
            && arguments.filter.as_deref().is_none_or(|text| info.name.contains(text));
        if !wanted {
            continue;
        }
        let in_ptx = entries.contains(info.name);
        let first = (embedded::CODEGEN, embedded::RESOURCES);
        let second = embedded::SECOND_CODEGEN.map(|name| (name, embedded::SECOND_RESOURCES));
        let generated = [first].into_iter().chain(second);
        let built =
            generated.flat_map(|(codegen, entries)| entries.iter().map(move |entry| (codegen, entry)));
        let built = built.filter(|(_, entry)| entry.entry == info.name);
        let mut resources: Vec<Resources> =
            built.map(|(codegen, entry)| Resources::built(entry, codegen)).collect();
        if let Some(gpu) = gpu.as_ref().filter(|_| in_ptx)
            && let Some(attributes) = attributes(gpu, info)?
        {
            resources.push(Resources {
                by: gpu.info().name.clone(),
                registers: attributes.registers,
                static_shared_bytes: attributes.static_shared_bytes,
                local_bytes: attributes.local_bytes,
                spill_stores: None,
                spill_loads: None,
                instructions: None,
            });
        }
        kernels.push(Kernel {
            system,
            name: info.name,
            module: info.module,
            source: format!("{}:{}", info.file, info.line),
            max_threads: info.max_threads,
            in_ptx,
            resources,
            left_out: left_out.get(info.name).cloned().unwrap_or_default(),
        });
    }
    kernels.sort_by_key(|kernel| (kernel.system, kernel.name));

    let known: BTreeSet<&'static str> = ferrokv::kernels().map(|(_, info)| info.name).collect();
    let has_ptx = !ferrokv::ptx().is_empty();
    let missing = |a: &BTreeSet<&'static str>, b: &BTreeSet<&'static str>| -> Vec<&'static str> {
        if has_ptx { a.difference(b).copied().collect() } else { Vec::new() }
    };
    let (mut not_in_ptx, not_in_program) = (missing(&known, &entries), missing(&entries, &known));
    not_in_ptx.retain(|name| !left_out.contains_key(name));
    let schemes = schemes(arguments);
    let json = Json {
        command: "kernels",
        version: env!("CARGO_PKG_VERSION"),
        ptx_fingerprint: chosen.fingerprint,
        codegen: chosen.name,
        ptxas: embedded::PTXAS,
        gpu: gpu.as_ref().map(|gpu| &*gpu.info().name),
        kernels: &kernels,
        schemes: schemes.iter().copied().map(SchemeRow::new).collect(),
        not_in_ptx: &not_in_ptx,
        not_in_program: &not_in_program,
    };
    let mut tables = table(&kernels);
    tables += &match (has_ptx, not_in_ptx.len() + not_in_program.len()) {
        (false, _) => format!("\nno PTX is embedded: {}\n", embedded::BUILD_NOTE.unwrap_or("left out")),
        (true, 0) => format!("\nprogram and PTX agree on {}\n", text::plural(known.len(), "kernel")),
        (true, _) => format!("\nnot in the PTX: {not_in_ptx:?}\nnot in the program: {not_in_program:?}\n"),
    };
    if !schemes.is_empty() {
        tables += "\nKV schemes, NAME[:PRESET][/OPTION=VALUE]…:\n";
        scheme::list(&mut tables, schemes.iter().map(|(_, scheme)| *scheme));
    }
    report.finish(&tables, &json)?;
    if not_in_ptx.is_empty() && not_in_program.is_empty() {
        return Ok(());
    }
    Err(Failure::Differs("the program's kernels and the PTX's entries differ; build again".into()))
}

/// What the GPU's driver made of a kernel, if the GPU can have it.
fn attributes(gpu: &Device, info: &'static KernelInfo) -> Result<Option<KernelAttributes>, host::Error> {
    match gpu.kernel_attributes(info) {
        Err(host::Error::KernelNeeds { .. } | host::Error::KernelOnly { .. }) => Ok(None),
        result => result,
    }
}

fn table(kernels: &[Kernel]) -> String {
    let mut table = Table::new(&[
        ("system", Align::Left),
        ("kernel", Align::Left),
        ("threads", Align::Right),
        ("compiled by", Align::Left),
        ("registers", Align::Right),
        ("shared B", Align::Right),
        ("local B", Align::Right),
        ("spills B", Align::Right),
        ("instructions", Align::Right),
        ("source", Align::Left),
    ]);
    for kernel in kernels {
        let head = [kernel.system.to_owned(), kernel.name.to_owned(), kernel.max_threads.to_string()];
        if kernel.resources.is_empty() && kernel.left_out.is_empty() {
            let by = if kernel.in_ptx { "(no ptxas)" } else { "(no PTX)" };
            let none = || "-".to_owned();
            let cells = [by.to_owned(), none(), none(), none(), none(), none(), kernel.source.clone()];
            table.row(head.into_iter().chain(cells));
            continue;
        }
        let mut lines = Vec::new();
        for used in &kernel.resources {
            let spills = used.spill_stores.map(|stores| stores + used.spill_loads.unwrap_or(0));
            lines.push([
                used.by.clone(),
                used.registers.to_string(),
                used.static_shared_bytes.to_string(),
                used.local_bytes.to_string(),
                spills.map_or("-".into(), |bytes| bytes.to_string()),
                used.instructions.map_or("-".into(), |count| count.to_string()),
                String::new(),
            ]);
        }
        for Lacking { by, needs, why } in &kernel.left_out {
            let none = || "-".to_owned();
            lines.push([
                by.clone(),
                none(),
                none(),
                none(),
                none(),
                none(),
                format!("needs sm_{needs}: {why}"),
            ]);
        }
        for (i, mut cells) in lines.into_iter().enumerate() {
            if i == 0 {
                let source = &mut cells[6];
                let note = std::mem::replace(source, kernel.source.clone());
                *source += &if note.is_empty() { note } else { format!(" ({note})") };
            }
            let head = head.iter().map(|cell| if i == 0 { cell.clone() } else { String::new() });
            table.row(head.chain(cells));
        }
    }
    table.render()
}
