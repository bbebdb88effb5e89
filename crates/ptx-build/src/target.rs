//! One target of a build: from the compiler's text to what is embedded.

use crate::codegen::Codegen;
use crate::compile::{self, Compiled, Request};
use crate::index::{Index, TargetPtx};
use crate::lint::{self, Finding, Rule};
use crate::needs::{self, Need};
use crate::nvvm;
use crate::ptxas::{self, Ptxas, PtxasError, Usage};
use crate::{directives, lacks, ptx, since, sites, stand_ins, version};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::thread;

/// What one target came to.
pub(crate) struct Target {
    pub(crate) ptx: TargetPtx,
    pub(crate) findings: Vec<Finding>,
    pub(crate) warnings: Vec<String>,
}

/// A target, or why there is none.
pub(crate) type Outcome = Result<Target, String>;

/// What both generators came to, each in the order of its targets.
#[derive(Default)]
pub(crate) struct Outcomes {
    pub(crate) llvm: Vec<Outcome>,
    pub(crate) nvvm: Vec<Outcome>,
}

/// The targets of each generator; none if it is not asked for.
pub(crate) struct Wanted<'a> {
    pub(crate) llvm: &'a [u32],
    pub(crate) nvvm: &'a [u32],
    /// What the second generator needs.
    pub(crate) library: Option<&'a nvvm::Library>,
}

/// Compiles once, then completes, checks and assembles for each target, side by side. `request` is told the
/// target.
pub(crate) fn build(wanted: &Wanted, request: &Request, ptxas: Option<&Ptxas>) -> Outcomes {
    let Some(lowest) = lowest(wanted.llvm, wanted.nvvm) else { return Outcomes::default() };
    let (asm, ir) = (!wanted.llvm.is_empty(), !wanted.nvvm.is_empty());
    let request = &Request { sm: lowest, asm, ir, ..request.clone() };
    let Compiled { ptx, ir, warnings } = match compile::compile(request) {
        Ok(compiled) => compiled,
        // Said once: of the generator that is there in any case.
        Err(error) => {
            let errors = vec![Err(error.to_string())];
            let none = Outcomes::default();
            return if asm { Outcomes { llvm: errors, ..none } } else { Outcomes { nvvm: errors, ..none } };
        }
    };
    thread::scope(|scope| {
        let one = |text, sm| finish(text, warnings.clone(), request, sm, Codegen::Llvm, ptxas);
        let of_llvm: Vec<_> = match &ptx {
            Some(text) => wanted.llvm.iter().map(|&sm| scope.spawn(move || one(text, sm))).collect(),
            None => Vec::new(),
        };
        let nvvm = match (&ir, wanted.library) {
            (Some(ir), Some(library)) => by_libnvvm(ir, request, wanted.nvvm, library, ptxas),
            _ => Vec::new(),
        };
        let panicked = || Err(PANICKED.to_owned());
        let llvm = of_llvm.into_iter().map(|worker| worker.join().unwrap_or_else(|_| panicked())).collect();
        Outcomes { llvm, nvvm }
    })
}

/// The target that the one compilation is for.
fn lowest(llvm: &[u32], nvvm: &[u32]) -> Option<u32> {
    let of_nvvm = nvvm.iter().map(|&sm| sm.clamp(nvvm::OLDEST_IR, nvvm::NEWEST_IR));
    llvm.iter().copied().chain(of_nvvm).min()
}

const PANICKED: &str = "ptx-build panicked: please report this";

/// What libNVVM makes of the module for `targets`.
fn by_libnvvm(
    ir: &compile::Ir,
    request: &Request,
    targets: &[u32],
    library: &nvvm::Library,
    ptxas: Option<&Ptxas>,
) -> Vec<Outcome> {
    let legal = match nvvm::legal::translate(&ir.text) {
        Ok(legal) => legal,
        Err(refused) => {
            let error = nvvm::NvvmError::Refused { path: ir.path.clone(), refused };
            return vec![Err(error.to_string())];
        }
    };
    // Targets that libNVVM compiles for alike share its result.
    let groups = targets.chunk_by(|a, b| nvvm::compiled_for(*a) == nvvm::compiled_for(*b));
    let group = |targets: &[u32]| -> Vec<Outcome> {
        let generated = match nvvm::generate(library, &legal, nvvm::compiled_for(targets[0]), &ir.path) {
            Ok(generated) => generated,
            Err(error) => return vec![Err(error.to_string())],
        };
        let each = |sm: u32| {
            let text = nvvm::retarget::complete(&generated.ptx, &legal.assembly, sm);
            let text = text.map_err(|error| error.to_string())?;
            finish(&text, generated.messages.clone(), request, sm, Codegen::Nvvm, ptxas)
        };
        targets.iter().map(|&sm| each(sm)).collect()
    };
    thread::scope(|scope| {
        let group = &group;
        let workers: Vec<_> = groups.map(|targets| scope.spawn(move || group(targets))).collect();
        let panicked = || vec![Err(PANICKED.to_owned())];
        workers.into_iter().flat_map(|worker| worker.join().unwrap_or_else(|_| panicked())).collect()
    })
}

/// Completes, checks and assembles a generator's text for the target `sm`, of a module made for that of
/// `request`.
fn finish(
    text: &str,
    messages: String,
    request: &Request,
    sm: u32,
    codegen: Codegen,
    ptxas: Option<&Ptxas>,
) -> Outcome {
    let text = stand_ins::replace(since::select(text, sm).map_err(|error| error.to_string())?);
    let module = ptx::parse(&text);
    let text = directives::apply(&text, &module).map_err(|error| error.to_string())?;
    let text = needs::leave_out(text, sm).map_err(|error| error.to_string())?;
    let text = needs::only(text, sm).map_err(|error| error.to_string())?;
    let mut text = sites::number(version::raise(text));
    // The file that findings and ptxas point at has the directives in, so its lines are what is read.
    let mut module = ptx::parse(&text);
    let file = request.folder.join(Index::ptx_file(codegen, sm));
    let mut warnings = vec![messages];
    let mut lacking = BTreeMap::new();
    let assembled = loop {
        fs::write(&file, &text).map_err(|error| format!("{}: cannot be written: {error}", file.display()))?;
        let Some(ptxas) = ptxas else { break None };
        let error = match ptxas.assemble(&file, &text, sm) {
            Ok(assembled) => break Some(assembled),
            Err(error) => error,
        };
        // A text that was not made for the target may have kernels that the target cannot have.
        let needs = match &error {
            PtxasError::Refused { messages, .. } if sm < request.sm => lacks::of(&text, &module, messages),
            _ => None,
        };
        let needs = needs.ok_or_else(|| error.to_string())?;
        text = needs::cut(text, &module, &needs);
        module = ptx::parse(&text);
        lacking.extend(needs);
    };
    let mut findings = lint::check(&module);
    let (mut usage, mut machine_code) = (Vec::new(), Vec::new());
    if let Some(assembled) = assembled {
        let mut spilling = Vec::new();
        for entry in &assembled.usage {
            let found = resource_findings(entry, &findings);
            match codegen {
                Codegen::Llvm => findings.extend(found),
                Codegen::Nvvm => spilling.extend(found),
            }
        }
        warnings.extend(lack_warning(&lacking, sm));
        warnings.extend(spill_warning(&spilling, sm));
        warnings.extend(assembled.warnings);
        usage = assembled.usage;
        machine_code = read(&ptxas::machine_code_file(&file))?;
    }
    let entries = module.functions.iter().filter(|function| function.is_entry && function.is_defined);
    let entries = entries.map(|function| function.name.clone()).collect();
    warnings.retain(|warning| !warning.is_empty());
    let ptx = TargetPtx { sm, ptx: text, machine_code, entries, usage };
    Ok(Target { ptx, findings, warnings })
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    fs::read(path).map_err(|error| format!("{}: cannot be read: {error}", path.display()))
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

/// Which kernels a target has not, counted; the PTX and `ferrokv kernels` say what each of them lacks.
fn lack_warning(lacking: &BTreeMap<String, Need>, sm: u32) -> Option<String> {
    let lowest = lacking.values().map(|need| need.sm).min()?;
    let names: Vec<&str> = lacking.keys().map(String::as_str).collect();
    let (count, some) = (names.len(), names[..names.len().min(3)].join(", "));
    let more = if count > 3 { ", …" } else { "" };
    Some(format!("nvvm sm_{sm}: without {count} kernels, which need sm_{lowest} or higher: {some}{more}"))
}

/// Kernels are written so that the first generator's do not spill. Another one's registers are its own: what
/// it spills is said, and is right all the same.
fn spill_warning(findings: &[Finding], sm: u32) -> Option<String> {
    if findings.is_empty() {
        return None;
    }
    let names: Vec<&str> = findings.iter().map(|finding| finding.entry.as_str()).collect();
    Some(format!("nvvm sm_{sm}: registers did not suffice in {}", names.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_compilation_is_for_a_target_that_rustc_knows() {
        assert_eq!(
            [lowest(&[80, 90], &[]), lowest(&[90], &[]), lowest(&[], &[])],
            [Some(80), Some(90), None]
        );
        assert_eq!([lowest(&[80, 90], &[75]), lowest(&[90], &[86, 100])], [Some(80), Some(86)]);
        assert_eq!([lowest(&[], &[75]), lowest(&[], &[86])], [Some(80), Some(86)]);
        assert_eq!([lowest(&[], &[100, 120]), lowest(&[], &[90, 120])], [Some(90); 2]);
    }

    #[test]
    fn kernels_that_a_target_has_not_are_counted() {
        let names = ["a", "b", "c", "d"];
        let lacking = |count| -> BTreeMap<String, Need> {
            names[..count].iter().map(|name| ((*name).into(), Need { sm: 80, why: "x".into() })).collect()
        };
        let text = lack_warning(&lacking(4), 75);
        assert_eq!(
            text.as_deref(),
            Some("nvvm sm_75: without 4 kernels, which need sm_80 or higher: a, b, c, …")
        );
        assert!(lack_warning(&lacking(3), 75).unwrap().ends_with(": a, b, c"));
        assert_eq!(lack_warning(&lacking(0), 75), None);
    }

    #[test]
    fn spills_and_stacks_are_findings() {
        let usage =
            Usage { entry: "k".into(), registers: 255, stack: 64, spill_stores: 8, ..Usage::default() };
        let spill = resource_findings(&usage, &[]);
        assert_eq!((spill.len(), spill[0].rule), (1, Rule::Spill));
        assert_eq!(spill[0].text, "255 registers, 8 bytes spilled, 0 bytes read back");
        assert_eq!(spill_warning(&spill, 90).as_deref(), Some("nvvm sm_90: registers did not suffice in k"));
        assert_eq!(spill_warning(&[], 90), None);
        let usage = Usage { spill_stores: 0, ..usage };
        assert_eq!(resource_findings(&usage, &[])[0].rule, Rule::Stack);
        // Local memory that the PTX shows explains the stack.
        let local =
            Finding { rule: Rule::LocalMemory, entry: "k".into(), line: 1, text: String::new(), count: 1 };
        assert_eq!(resource_findings(&usage, &[local]), []);
        assert_eq!(resource_findings(&Usage { stack: 0, ..usage }, &[]), []);
    }
}
