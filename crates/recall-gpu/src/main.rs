//! Launches one case of `crates/recall` on a GPU, for the tools of compute-sanitizer.
//!
//! `recall-gpu` lists the cases, one a line: its name, its category, and `bug` if it has one to plant.
//! `recall-gpu NAME...` runs programs without their bugs, one after another, `recall-gpu NAME bug` the one
//! with it. It exits with 0 if the launches end and the results are right, with 1 if not, and with 2 if it is
//! asked for something else. A planted bug has the process for itself: a launch that goes wrong takes the
//! process' context with it. `sanitize.py` beside this runs all of them.

use ferrokv_device::{Device, PtxImage};
use simt_recall::{Case, Machine, categories};
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
    let images = PtxImage::of(embedded::PTX, embedded::MACHINE_CODE);
    if images.is_empty() {
        let note = embedded::BUILD_NOTE.unwrap_or_default();
        return usage(&format!("this program holds no kernels: {note}"));
    }
    let gpu = match Device::cuda(0, &images) {
        Ok(gpu) => gpu,
        Err(error) => return usage(&format!("no GPU to run on: {error}")),
    };
    for case in chosen {
        if let Err(error) = Machine::gpu(&gpu).and_then(|machine| (case.run)(bug, &machine)) {
            eprintln!("recall-gpu: {}: {error}", case.name);
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

/// Whether its kernel is in the PTX, as all are that a GPU can launch.
fn is_built(case: &Case) -> bool {
    case.name != "large_local_array"
}

fn usage(what: &str) -> ExitCode {
    eprintln!("recall-gpu: {what}");
    ExitCode::from(2)
}
