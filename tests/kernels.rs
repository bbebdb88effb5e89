//! The kernels as a whole: what the sources declare, what the PTX holds and what `ferrokv check` covers are
//! one set.

use ferrokv::Generated;
use ferrokv::host::check::{Coverage, not_covered, run_cases};
use ferrokv::host::{Device, PtxImage, SYSTEMS};
use ferrokv::simt::KernelInfo;
use ferrokv::simt::emu::EmuOptions;
use std::collections::{BTreeMap, BTreeSet};

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
    assert!(!ferrokv::ptx().is_empty());
    let generated = ferrokv::generated();
    for (codegen, image) in generated.iter().flat_map(|made| made.images.iter().map(|i| (made.name, i))) {
        let kernels = ferrokv::kernels().map(|(_, kernel)| kernel);
        let left_out = left_out(image);
        let is_there = |kernel: &&KernelInfo| kernel.min_sm <= image.sm && !left_out.contains(kernel.name);
        let declared: BTreeSet<&str> = kernels.filter(is_there).map(|kernel| kernel.name).collect();
        let module = ptx_build::ptx::parse(image.text);
        let entries: BTreeSet<&str> =
            module.functions.iter().filter(|f| f.is_entry).map(|f| f.name.as_str()).collect();
        assert_eq!(entries, declared, "entries of {codegen}'s PTX for sm_{}", image.sm);
    }
}

/// Kernels that the target lacks: from sm_80 on only those whose `min_sm` or `only_sm` says so.
fn left_out(image: &PtxImage) -> BTreeSet<&str> {
    let left_out: BTreeSet<&str> = image.left_out().map(|left_out| left_out.kernel).collect();
    let lacks = |kernel: &KernelInfo| kernel.min_sm > image.sm || ![0, image.sm].contains(&kernel.only_sm);
    let says = |name: &&str| ferrokv::kernels().any(|(_, kernel)| kernel.name == *name && lacks(kernel));
    assert!(image.sm < 80 || left_out.iter().all(says), "sm_{}: {left_out:?}", image.sm);
    left_out
}

/// A launch hands the same bytes to a kernel, whichever code generator it is of.
#[test]
fn kernels_of_a_second_code_generator_take_the_same_parameters() {
    let [Generated { name: first, images, .. }, Generated { name: second, images: others, .. }] =
        ferrokv::generated()[..]
    else {
        return println!(
            "the program was built with one code generator (FERROKV_CODEGEN=llvm,nvvm builds two)"
        );
    };
    // Any target may be the first one's only one: the text with the most kernels is what others are held to.
    let of_all = images.iter().chain(others).map(|image| parameters(image.text));
    let expected = of_all.max_by_key(BTreeMap::len).expect("a target");
    assert!(expected.len() > 100);
    for image in images.iter().chain(others) {
        let found = parameters(image.text);
        let left_out = left_out(image);
        let count = found.len() + left_out.len();
        assert_eq!(count, expected.len(), "kernels of {first} or {second} for sm_{}", image.sm);
        for (kernel, parameters) in expected.iter().filter(|(name, _)| !left_out.contains(name.as_str())) {
            assert_eq!(
                found.get(kernel),
                Some(parameters),
                "{kernel} of {first} or {second} for sm_{}",
                image.sm
            );
        }
    }
}

/// Each kernel's parameters, as bits and elements: `u64 a` and `b8 a[16]` are `64` and `8[16]`.
fn parameters(ptx: &str) -> BTreeMap<String, Vec<String>> {
    let module = ptx_build::ptx::parse(ptx);
    let of = |header: &str| -> Vec<String> {
        let list = header.split_once('(').map_or("", |(_, list)| list);
        let parameters = list.split(',').filter(|parameter| parameter.contains(".param"));
        let shape = |parameter: &str| {
            let typed = |word: &&str| word.starts_with('.') && word.ends_with(|c: char| c.is_ascii_digit());
            let bits = parameter
                .split_whitespace()
                .find(typed)
                .unwrap_or("")
                .trim_start_matches(['.', 'b', 'u', 's', 'f']);
            let elements = parameter.find('[').map_or("", |at| parameter[at..].trim_end_matches([')', '\n']));
            format!("{bits}{elements}")
        };
        parameters.map(shape).collect()
    };
    let entries = module.functions.iter().filter(|function| function.is_entry);
    entries.map(|f| (f.name.clone(), of(&ptx[f.header.start..f.after_params]))).collect()
}

/// The build's lint sees where each waits; here, that it and the host mean the same kernels.
#[test]
fn kernels_that_overlap_wait_where_there_is_a_wait() {
    for image in ferrokv::ptx() {
        let overlaps: BTreeSet<String> = ferrokv::kernels()
            .filter(|(_, kernel)| kernel.overlaps)
            .filter(|(_, kernel)| kernel.min_sm <= image.sm && [0, image.sm].contains(&kernel.only_sm))
            .map(|(_, kernel)| kernel.name.to_owned())
            .collect();
        assert!(overlaps.contains("probe_link"));
        let module = ptx_build::ptx::parse(image.text);
        assert_eq!((module.target(), &module.overlapping), (image.sm, &overlaps));
        let found = ptx_build::lint::check(&module);
        assert!(found.iter().all(|finding| finding.rule != ptx_build::lint::Rule::Wait), "{found:?}");
        for (index, function) in module.functions.iter().enumerate() {
            let body = module.statements.iter().filter(|statement| statement.function == Some(index));
            let instructions = body.filter_map(|statement| statement.instruction.as_ref());
            let count =
                |part| instructions.clone().filter(|i| i.name() == "griddepcontrol" && i.has(part)).count();
            let early = image.sm >= 90 && overlaps.contains(&function.name);
            let place = format!("{} for sm_{}", function.name, image.sm);
            assert_eq!(count("wait"), early as usize, "{place}");
            // Dense attention gives the word at once where it is a rung that nobody may want, else behind its
            // first tiles: with two stages the compiler makes two paths of that, for a warp with a tile to
            // start with and for one without.
            // Two groups of rows are never a rung. What ranks for itself gives it with a warp's last tile:
            // where each stage's copies start.
            let words = match function.name.as_str() {
                name if name.starts_with("dense_attend_pairs") && name.ends_with("_64") => 1,
                name if name.starts_with("dense_attend_pairs") => 2,
                name if name.starts_with("dense_attend") && name.ends_with("_64") => 2,
                name if name.starts_with("dense_attend") => 3,
                name if name.starts_with("gather_attend_chosen") && name.contains("_64_") => 3,
                name if name.starts_with("gather_attend_chosen") => 2,
                _ => 1,
            };
            assert!(!early || count("launch_dependents") == words, "{place}");
            // Attention, whose blocks take much shared memory, lets the next launch in behind its wait; so
            // does what scores for it.
            let first = instructions.clone().find(|i| i.name() == "griddepcontrol");
            let names = [
                "certified_",
                "dense_attend",
                "gather_attend_chosen",
                "gather_score",
                "gtq_attend",
                "kivi_attend",
                "vecinfer_attend",
            ];
            let in_turn = names.iter().any(|start| function.name.starts_with(start));
            assert!(!early || first.is_some_and(|i| i.has("wait")) == in_turn, "{place}");
        }
    }
}

#[test]
fn every_kernel_has_a_case_and_the_emulator_accepts_all_of_them() {
    let cases: Vec<_> = SYSTEMS.iter().flat_map(|system| (system.cases)(Coverage::Quick)).collect();
    assert_eq!(not_covered(&cases, ferrokv::kernels().map(|(_, kernel)| kernel)), Vec::<&str>::new());

    let report = run_cases(&cases, &Device::cpu(EmuOptions::default()), None, |_| {});
    let bad: Vec<String> =
        report.cases.iter().filter(|case| !case.outcome.is_good()).map(|case| format!("{case:?}")).collect();
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}
