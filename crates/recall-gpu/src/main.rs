//! Launches one case of `crates/recall` on a GPU, for the tools of compute-sanitizer.
//!
//! `recall-gpu` lists the cases, one a line: its name, its category, and `bug` if it has one to plant.
//! `recall-gpu NAME...` runs programs without their bugs, one after another, `recall-gpu NAME bug` the one
//! with it. `recall-gpu stopping N` lets a kernel panic in the Nth way, and compares what the GPU and the
//! emulator say of it; `recall-gpu language` compares what they compute, `recall-gpu printing` what they
//! print. It exits with 0 if the launches end and the results are right, with 1 if not, and with 2 if it is
//! asked for something else. A planted bug has the process for itself: a launch that goes wrong takes the
//! process' context with it. `sanitize.py` beside this runs all of them.

use ferrokv_device::{Device, Error, PtxImage};
use simt::emu::EmuOptions;
use simt_recall::{Case, Machine, categories, language, printing, stopping};
use std::process::ExitCode;

mod embedded {
    include!(concat!(env!("OUT_DIR"), "/ptx_index.rs"));
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let cases = || categories().into_iter().flat_map(|(_, cases)| cases).filter(|case| is_built(case));
    if arguments.is_empty() {
        for case in cases() {
            println!("{} {}{}", case.name, case.category, if case.has_bug() { " bug" } else { "" });
        }
        return ExitCode::SUCCESS;
    }
    if arguments == ["language"] {
        return gpu().map_or_else(|why| usage(&why), |gpu| computes(&gpu));
    }
    if arguments == ["printing"] {
        return gpu().map_or_else(|why| usage(&why), |gpu| prints(&gpu));
    }
    if let [word, how] = &arguments[..]
        && word == "stopping"
    {
        return match how.parse() {
            Ok(how) if how < stopping::WAYS => stops(how),
            _ => usage(&format!("{how}: there are ways 0 to {}", stopping::WAYS - 1)),
        };
    }
    let (names, bug) = match &arguments[..] {
        [name, bug] if bug == "bug" => (std::slice::from_ref(name), 1),
        names => (names, 0),
    };
    let mut chosen = Vec::new();
    for name in names {
        match cases().find(|case| case.name == name) {
            Some(case) if bug == 0 || case.has_bug() => chosen.push(case),
            Some(_) => return usage(&format!("{name}: it has no bug to plant")),
            None => return usage(&format!("{name}: no case of this name; without arguments all are listed")),
        }
    }
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(why) => return usage(&why),
    };
    for case in chosen {
        if let Err(error) = Machine::gpu(&gpu).and_then(|machine| (case.run)(bug, &machine)) {
            eprintln!("recall-gpu: {}: {error}", case.name);
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

fn checked() -> EmuOptions {
    EmuOptions::race_checked()
}

fn gpu() -> Result<Device, String> {
    let images = PtxImage::of(embedded::PTX, embedded::MACHINE_CODE);
    if images.is_empty() {
        let note = embedded::BUILD_NOTE.unwrap_or_default();
        return Err(format!("this program holds no kernels: {note}"));
    }
    Device::cuda(0, &images).map_err(|error| format!("no GPU to run on: {error}"))
}

/// Compares what kernels compute on the GPU and under the emulator.
fn computes(gpu: &Device) -> ExitCode {
    let emulator = Device::cpu(checked());
    let mut words = 0;
    for computed in [language::computed, language::copies::computed] {
        match (computed(gpu), computed(&emulator)) {
            (Ok(gpu), Ok(emulator)) if gpu == emulator => words += gpu.len(),
            (Err(missing @ Error::KernelNeeds { .. }), Ok(_)) => println!("not compared: {missing}"),
            differ => {
                eprintln!("recall-gpu: language: {differ:?}");
                return ExitCode::FAILURE;
            }
        }
    }
    println!("{words} words, the same on the GPU and under the emulator");
    ExitCode::SUCCESS
}

/// Lets the kernel panic on the GPU and under the emulator.
fn stops(how: u32) -> ExitCode {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(why) => return usage(&why),
    };
    let said = |device: &Device| match stopping::launch(device, how) {
        Err(Error::Fault(mut fault)) => {
            if how == stopping::IN_A_FUNCTION {
                fault.place = None;
            }
            Ok(fault.to_string())
        }
        Err(error) => Err(error.to_string()),
        Ok(()) => Err("it did not stop".to_owned()),
    };
    let (emulator, gpu) = (said(&Device::cpu(EmuOptions::default())), said(&gpu));
    match (emulator, gpu) {
        (Ok(emulator), Ok(gpu)) if emulator == gpu => {
            println!("{gpu}");
            ExitCode::SUCCESS
        }
        (emulator, gpu) => {
            eprintln!("recall-gpu: stopping {how}:\nemulator: {emulator:?}\nGPU: {gpu:?}");
            ExitCode::FAILURE
        }
    }
}

/// Compares what kernels print on the GPU and under the emulator.
fn prints(gpu: &Device) -> ExitCode {
    let emulator = Device::cpu(EmuOptions::default());
    // Threads for several times the lines that a GPU keeps.
    let flood = printing::flood(gpu, 160);
    let kept = simt::on_device::lines::COUNT;
    if !matches!(flood, Ok((lines, lost)) if (lines, lost) == (kept, 160 * 256 - kept)) {
        eprintln!(
            "recall-gpu: printing: lines kept and lost, of {} with room for {kept}: {flood:?}",
            160 * 256
        );
        return ExitCode::FAILURE;
    }
    match (printing::printed(gpu), printing::printed(&emulator)) {
        (Ok(gpu), Ok(emulator)) if gpu == emulator => {
            let lines = gpu.iter().map(Vec::len).sum::<usize>();
            println!("{lines} lines, the same on the GPU and under the emulator");
            println!("{kept} of {} lines kept, the others counted", 160 * 256);
            gpu.iter().for_each(|part| println!("{}", part[0]));
            ExitCode::SUCCESS
        }
        (Ok(gpu), Ok(emulator)) => {
            for (part, (gpu, emulator)) in gpu.iter().zip(&emulator).enumerate() {
                eprintln!("recall-gpu: printing, part {part}: {} and {} lines", gpu.len(), emulator.len());
                let differ = gpu.iter().zip(emulator).filter(|(gpu, emulator)| gpu != emulator);
                differ.take(5).for_each(|(g, e)| eprintln!("GPU:      {g}\nemulator: {e}"));
            }
            ExitCode::FAILURE
        }
        (gpu, emulator) => {
            let errors = (gpu.err(), emulator.err());
            eprintln!("recall-gpu: printing: {errors:?}");
            ExitCode::FAILURE
        }
    }
}

/// Whether its kernel is in the PTX, as all are that a GPU can launch.
fn is_built(case: &Case) -> bool {
    case.fits_a_gpu()
}

fn usage(what: &str) -> ExitCode {
    eprintln!("recall-gpu: {what}");
    ExitCode::from(2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, BTreeSet};

    /// What a panic's macro leaves is what the build numbers and the device layer reads.
    #[test]
    fn every_way_to_panic_is_a_site_of_the_ptx() {
        for (_, text) in embedded::PTX {
            let sites: Vec<&str> =
                text.lines().filter_map(|line| line.trim().strip_prefix("// simt.site ")).collect();
            // One is that of a kernel that prints.
            let (printing, sites): (Vec<&str>, Vec<&str>) =
                sites.iter().partition(|site| site.contains(" stopped crates/recall/src/printing.rs:"));
            assert_eq!((printing.len(), sites.len() as u32), (1, stopping::WAYS), "{sites:?}");
            for site in &sites {
                let (number, rest) = site.split_once(' ').expect("a number");
                assert!(rest.starts_with("stopping crates/recall/src/stopping.rs:"), "{site}");
                assert_eq!(text.matches(&format!("[record+4], {number};")).count(), 1, "{site}");
            }
            let said = |message: &str| sites.iter().any(|site| site.ends_with(message));
            assert!(said(" assertion failed: x.load(i) != 70.0 && i < 100"), "{sites:?}");
            assert!(said(" {0} of element {1}, at most {2:.2}; {{{3:#06x}}}"), "{sites:?}");
            assert!(said(r" failed: element {2}\u{a}  left: {0:?}\u{a} right: {1:?}"), "{sites:?}");
            assert_eq!(text.matches(".visible .global .align 8 .u64 simt_stop_record").count(), 1);
        }
    }

    /// What only higher targets have is in their PTX alone; and there each word is the instruction that its
    /// document says.
    #[test]
    fn bulk_copies_are_in_the_ptx_of_sm_90_alone() {
        let words = [
            "mbarrier.init.shared::cta.b64 [",
            "mbarrier.inval.shared::cta.b64 [",
            "mbarrier.arrive.shared::cta.b64 _, [",
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [",
            "mbarrier.try_wait.parity.shared::cta.b64 p, [",
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [",
            "cp.async.bulk.global.shared::cta.bulk_group [g], [",
            "cp.async.bulk.commit_group;",
            "cp.async.bulk.wait_group 0;",
            "cp.async.bulk.wait_group.read 1;",
            "fence.proxy.async;",
            "fence.proxy.async.shared::cta;",
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [",
            "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [",
            "fence.proxy.tensormap::generic.acquire.sys [",
        ];
        for (sm, text) in embedded::PTX {
            for word in words {
                assert_eq!(text.contains(word), *sm >= 90, "{word} for sm_{sm}");
            }
            for entry in ["piped", "phases", "read_before_the_wait", "box_not_shown"] {
                assert_eq!(text.contains(&format!(".entry {entry}(")), *sm >= 90, "{entry} for sm_{sm}");
            }
            assert!(text.contains(".entry copied_words("));
        }
    }

    /// What one generation has stands between words of its own, in the PTX of that target alone.
    #[test]
    fn products_of_groups_of_warps_are_in_the_ptx_of_sm_90_alone() {
        let words = [
            "wgmma.fence.sync.aligned;",
            "wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {",
            "wgmma.commit_group.sync.aligned;",
            "wgmma.wait_group.sync.aligned 0;",
            "// simt.only_begin three_of_four_warps 90",
            "// simt.only_end three_of_four_warps",
            ".target sm_90a",
        ];
        for (sm, text) in embedded::PTX {
            for word in words {
                assert_eq!(text.contains(word), *sm == 90, "{word} for sm_{sm}");
            }
        }
    }

    /// The same of clusters; and a kernel that has one says so in its head.
    #[test]
    fn clusters_are_in_the_ptx_from_sm_90_on() {
        let words = [
            "barrier.cluster.arrive.aligned;",
            "barrier.cluster.wait.aligned;",
            "mapa.shared::cluster.u32 ",
            "ld.shared::cluster.b32 ",
            "st.shared::cluster.b32 [",
            "atom.shared::cluster.add.u32 ",
            ", %cluster_ctarank;",
            ", %cluster_nctarank;",
            "\n.explicitcluster\n.reqnctapercluster 2, 1, 1\n{",
            "\n.explicitcluster\n.reqnctapercluster 4, 1, 1\n{",
        ];
        for (sm, text) in embedded::PTX {
            for word in words {
                assert_eq!(text.contains(word), *sm >= 90, "{word} for sm_{sm}");
            }
            assert!(text.contains("\tactivemask.b32 "), "for sm_{sm}");
            for entry in ["not_yet_written", "rank_beyond", "two_store_to_one_word"] {
                assert_eq!(text.contains(&format!(".entry {entry}(")), *sm >= 90, "{entry} for sm_{sm}");
            }
        }
    }

    /// By kernel, the lowest target that has it, of those that an image is without.
    fn needs(sm: u32, text: &'static str) -> BTreeMap<&'static str, u32> {
        PtxImage::new(sm, text).left_out().map(|out| (out.kernel, out.needs)).collect()
    }

    /// What another code generator makes of the whole language is there for each target that can have it.
    #[test]
    fn the_second_generator_has_every_kernel_for_every_target_that_can() {
        if embedded::SECOND_CODEGEN.is_none() {
            return eprintln!("not tested: built without FERROKV_CODEGEN=llvm,nvvm");
        }
        let marked = needs(embedded::PTX[0].0, embedded::PTX[0].1);
        assert!(marked["piped"] == 90 && marked.values().all(|sm| *sm == 90), "{marked:?}");
        for &(sm, text) in embedded::SECOND_PTX {
            let out = needs(sm, text);
            let assembled = embedded::SECOND_RESOURCES.iter().filter(|used| used.sm == sm);
            let there: BTreeSet<&str> = assembled.map(|used| used.entry).collect();
            let all: BTreeSet<&str> = there.iter().chain(out.keys()).copied().collect();
            assert!(all.iter().eq(embedded::ENTRIES), "sm_{sm}: {all:?}");
            match sm {
                // Products of groups of four warps are for one generation.
                91.. => {
                    assert!(out.len() == 5 && out.contains_key("three_of_four_warps"), "sm_{sm}: {out:?}")
                }
                90 => assert_eq!(out, BTreeMap::new(), "sm_{sm}"),
                80.. => assert_eq!(out, marked, "sm_{sm}"),
                _ => {
                    assert!(marked.iter().all(|(kernel, sm)| out[kernel] == *sm));
                    let more: Vec<&str> =
                        out.keys().copied().filter(|kernel| !marked.contains_key(kernel)).collect();
                    assert!(
                        more.contains(&"copied_words") && more.contains(&"product_in_both_arms"),
                        "{more:?}"
                    );
                    assert!(more.iter().all(|kernel| out[kernel] == 80), "{out:?}");
                    assert!(there.contains("counted"), "{there:?}");
                }
            }
        }
    }

    /// The same of lines; and who prints nothing has nothing of it.
    #[test]
    fn every_line_is_a_site_of_the_ptx() {
        for (_, text) in embedded::PTX {
            let sites: Vec<&str> =
                text.lines().filter_map(|line| line.trim_start().strip_prefix("// simt.print ")).collect();
            for (number, entry, message) in [
                (1, "counted", " thread {0}, line {1}"),
                (2, "stopped", " about to stop: {0}"),
                (3, "values", " {0} of {1}: {2} {2:?} {2:.3} {2:+10.2e} {{{2:*^12}}}"),
                (6, "values", r#" {0:?} {1:>7} {2} {3:5}| \u{fc}n\u{ef}code \\ "quoted" {4}"#),
                (9, "values", ":9 "),
            ] {
                let start = format!("{number} {entry} crates/recall/src/printing.rs:");
                let is = |site: &&&str| site.starts_with(&start) && site.ends_with(message);
                assert_eq!(sites.iter().filter(is).count(), 1, "{message}: {sites:?}");
                assert_eq!(text.matches(&format!("[record+8], {number};")).count(), 1, "{message}");
            }
            assert_eq!(
                (sites.len(), text.matches("[record+8], ").count()),
                (9, 9 + stopping::WAYS as usize + 1)
            );
            assert_eq!(text.matches(".visible .global .align 8 .u64 simt_print_ring[3];").count(), 1);
        }
    }
}
