//! The kernels as a whole: what the sources declare, what the PTX holds and what `ferrokv check` covers are one set.

use ferrokv::host::Device;
use ferrokv::host::check::{not_covered, probe, run_cases};
use ferrokv::host::{certified, dense, int8, model, roofline};
use ferrokv::simt::emu::EmuOptions;
use std::collections::BTreeSet;

#[test]
fn kernel_names_are_unique_and_carry_their_system() {
    let mut names = BTreeSet::new();
    for (system, kernel) in ferrokv::kernels() {
        assert!(kernel.name.starts_with(&format!("{system}_")), "{} is not of {system}", kernel.name);
        assert!(names.insert(kernel.name), "{} is declared twice", kernel.name);
    }
    assert!(names.len() > 100);
}

#[test]
fn every_ptx_image_has_exactly_the_declared_kernels() {
    if let Some(note) = ferrokv::embedded::BUILD_NOTE {
        println!("no PTX to compare with: {note}");
        return;
    }
    let declared: BTreeSet<&str> = ferrokv::kernels().map(|(_, kernel)| kernel.name).collect();
    assert!(!ferrokv::ptx().is_empty());
    for image in ferrokv::ptx() {
        let module = ptx_build::ptx::parse(image.text);
        let entries: BTreeSet<&str> =
            module.functions.iter().filter(|f| f.is_entry).map(|f| f.name.as_str()).collect();
        assert_eq!(entries, declared, "entries of the PTX for sm_{}", image.sm);
    }
}

/// A kernel that may start early waits first, where there is such a wait, and nowhere else does any.
#[test]
fn kernels_that_overlap_wait_before_any_access() {
    let overlaps: BTreeSet<&str> =
        ferrokv::kernels().filter(|(_, kernel)| kernel.overlaps).map(|(_, kernel)| kernel.name).collect();
    assert!(overlaps.contains("probe_link"));
    for image in ferrokv::ptx() {
        let module = ptx_build::ptx::parse(image.text);
        for (index, function) in module.functions.iter().enumerate() {
            let body = module.statements.iter().filter(|statement| statement.function == Some(index));
            let instructions: Vec<_> = body.filter_map(|statement| statement.instruction.as_ref()).collect();
            let first = |wanted: &dyn Fn(&str, bool) -> bool, part: &str| {
                instructions.iter().position(|i| wanted(i.name(), i.has(part)))
            };
            let wait = first(&|name, wait| name == "griddepcontrol" && wait, "wait");
            let next = first(&|name, next| name == "griddepcontrol" && next, "launch_dependents");
            let place = format!("{} for sm_{}", function.name, image.sm);
            if image.sm < 90 {
                assert_eq!((wait, next), (None, None), "{place}");
            } else if overlaps.contains(function.name.as_str()) {
                let (wait, next) = (wait.expect(&place), next.expect(&place));
                assert!(wait < next, "{place}");
                // Parameters are the launch's own, and may be read before; memory is not, and no thread may turn away.
                let early = instructions[..next].iter().find(|i| match i.name() {
                    "ld" => !i.has("param"),
                    name => ["st", "atom", "red", "cp", "prefetch", "bra", "ret", "exit"].contains(&name),
                });
                assert_eq!(early, None, "{place}");
                assert!(instructions[wait].predicate.is_none(), "{place}");
            } else {
                assert_eq!(wait, None, "{place}");
            }
        }
    }
}

#[test]
fn every_kernel_has_a_case_and_the_emulator_accepts_all_of_them() {
    let mut cases = probe::cases(probe::Coverage::QUICK);
    cases.extend(int8::cases::cases(int8::cases::Coverage::Quick));
    cases.extend(model::cases::cases(model::cases::Coverage::Quick));
    cases.extend(roofline::cases());
    cases.extend(certified::cases::cases(false));
    cases.extend(dense::cases::cases(dense::cases::Coverage::Quick));
    assert_eq!(not_covered(&cases, ferrokv::kernels().map(|(_, kernel)| kernel)), Vec::<&str>::new());

    let report = run_cases(&cases, &Device::cpu(EmuOptions::default()), None, |_| {});
    let bad: Vec<String> =
        report.cases.iter().filter(|case| !case.outcome.is_good()).map(|case| format!("{case:?}")).collect();
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}
