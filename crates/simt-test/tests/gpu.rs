//! The process for the GPU, with the emulator in the GPU's place: what comes back, and what becomes of a
//! process that does not. Each test runs itself once more, with variables of its own.

use simt::{Global, GlobalMut, LaunchShape, kernel, thread};
use simt_test::{Failed, Failure, GpuError, Report, Trial, array, bits, sizes};
use std::process::Command;

/// Set where a test is to run its cases.
const INSIDE: &str = "SIMT_TEST_GPU_INSIDE";
/// Set in the process for the GPU.
const CHILD: &str = "SIMT_TEST_CHILD";

/// Runs `inside` in a process that has these variables, and returns what it printed.
fn printed(variables: &[(&str, &str)], inside: impl FnOnce()) -> Option<String> {
    if std::env::var_os(INSIDE).is_some() {
        inside();
        return None;
    }
    let thread = std::thread::current();
    let name = thread.name().expect("the harness names its threads");
    let output = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", name, "--nocapture"])
        .env(INSIDE, "1")
        .env_remove("SIMT_TEST_CASE")
        .envs(variables.iter().copied())
        .output()
        .expect("a process");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    println!("{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}", output.status);
    Some(text)
}

const EMULATED: (&str, &str) = ("SIMT_TEST_GPU", "emulated");

fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

#[kernel]
fn add(x: Global<u32>, y: GlobalMut<u32>, by: u32, n: u32) {
    let i = thread::index_1d();
    if i < n as usize {
        y.store(i, x.load(i).wrapping_add(by));
    }
}

/// Adds 1, and what the process for the GPU is to do wrong.
fn added(x: Vec<u32>, wrong: impl Fn(&[u32]) -> (u32, u32) + 'static) -> Trial {
    let n = x.len() as u32;
    let expected: Vec<u32> = x.iter().map(|x| x.wrapping_add(1)).collect();
    Trial::new(add::kernel(), LaunchShape::new(n.div_ceil(64), 64), move |memory| {
        let (by, more) = if is_child() { wrong(&x) } else { (0, 0) };
        add::Args { x: memory.input(&x), y: memory.output(&expected), by: 1 + by, n: n + more }
    })
}

#[simt::test(result, cases = 20, orders = 1)]
fn right(#[draw(sizes(0..=300))] n: usize, #[draw(array(n, bits::<u32>()))] x: Vec<u32>) -> Option<Trial> {
    (n > 0).then(|| added(x, |_| (0, 0)))
}

/// Another result where 5 is among the inputs.
#[simt::test(result)]
fn different(#[draw(sizes(1..=300))] n: usize, #[draw(array(n, 0u32..20))] x: Vec<u32>) -> Trial {
    added(x, |x| (u32::from(x.contains(&5)), 0))
}

/// An access out of bounds from 40 elements on.
#[simt::test(result)]
fn astray(#[draw(sizes(1..=300))] n: usize, #[draw(array(n, bits::<u32>()))] x: Vec<u32>) -> Trial {
    added(x, |x| (0, u32::from(x.len() >= 40)))
}

/// The process is gone from 40 elements on.
#[simt::test(result)]
fn gone(#[draw(sizes(1..=300))] n: usize) -> Trial {
    if n >= 40 && is_child() {
        std::process::abort();
    }
    added(vec![7; n], |_| (0, 0))
}

/// It answers nothing from 40 elements on.
#[simt::test(result, cases = 20, orders = 0)]
fn silent(#[draw(sizes(38..=41))] n: usize) -> Trial {
    while n >= 40 && is_child() {
        std::thread::park();
    }
    added(vec![7; n], |_| (0, 0))
}

fn case(result: Result<Report, Failed>) -> Option<Box<simt_test::FailedCase>> {
    match result {
        Err(Failed::Case(case)) => {
            println!("{case}");
            Some(case)
        }
        // In the process for the GPU all is well.
        Ok(_) if is_child() => None,
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_case_runs_there() {
    let text = printed(&[EMULATED], || {
        let report = right().unwrap();
        println!("{report:?}");
        assert!(is_child() || report.on_gpu == 20 && report.without_gpu.is_none(), "{report:?}");
    });
    assert!(text.is_none_or(|text| text.contains("on_gpu: 20")));
}

#[test]
fn a_difference_is_told_and_shrinks() {
    let text = printed(&[EMULATED], || {
        let Some(case) = case(different()) else { return };
        assert_eq!(case.inputs[0].1, "1");
        assert_eq!(case.inputs[1].1, "[5], 1 elements of u32");
    });
    let Some(text) = text else { return };
    assert!(text.contains("output `y`: element 0 is 7, expected 6; 1 of 1 elements differ"), "{text}");
    assert!(text.contains("GPU and emulator differ"), "{text}");
    assert!(text.contains(" SIMT_TEST_GPU=emulated cargo test"), "{text}");
}

#[test]
fn a_fault_there_is_an_error_here_and_other_cases_go_on() {
    printed(&[EMULATED], || {
        if let Some(case) = case(astray()) {
            let Failure::Gpu(GpuError::Fault { code: None, message }) = &case.failure else {
                panic!("{case}")
            };
            assert!(message.contains("kernel add, block (0,0,0) thread (40,0,0)"), "{message}");
            // To get there, cases ran after faults, some of which passed.
            assert_eq!(case.inputs[0].1, "40");
        }
        // Nothing is left of it in this process: another test runs there.
        let report = right().unwrap();
        assert!(is_child() || report.on_gpu == 20, "{report:?}");
    });
}

#[test]
fn a_process_that_is_gone_is_an_error_here_and_other_cases_go_on() {
    printed(&[EMULATED], || {
        let Some(case) = case(gone()) else { return };
        let Failure::Gpu(GpuError::Ended { status }) = &case.failure else { panic!("{case}") };
        assert!(status.contains("signal: 6"), "{status}");
        assert_eq!(case.inputs[0].1, "40");
    });
}

#[test]
fn a_process_that_is_silent_is_ended() {
    printed(&[EMULATED, ("SIMT_TEST_GPU_SECONDS", "2")], || {
        let Some(case) = case(silent()) else { return };
        assert!(matches!(&case.failure, Failure::Gpu(GpuError::Silent { seconds: 2 })), "{case}");
        assert_eq!(case.inputs[0].1, "40");
    });
}

#[test]
fn a_gpu_that_is_required_and_missing_fails_the_test() {
    printed(&[("SIMT_TEST_GPU", "required")], || {
        let Some(case) = case(right()) else { return };
        let text = case.to_string();
        assert!(text.contains("there is no GPU to run on: the test names no PTX"), "{text}");
    });
}

/// The command of a message runs the same case again, and it shrinks to the same.
#[test]
fn the_command_runs_the_case_again() {
    let name = "the_command_runs_the_case_again";
    let fail = || {
        case(different());
    };
    let Some(first) = printed(&[EMULATED], fail) else { return };
    let command = first.lines().find(|line| line.contains("cargo test")).expect("a command");
    assert!(command.ends_with(&format!("-p ferrokv-simt-test -- --exact {name}")), "{command}");
    let seed = command.trim().split(' ').next().and_then(|word| word.strip_prefix("SIMT_TEST_CASE="));
    let second = printed(&[EMULATED, ("SIMT_TEST_CASE", seed.expect("a seed"))], fail).expect("the output");
    let message = |text: &str| {
        let (_, rest) = text.split_once("\n  output").expect("the message");
        rest.lines().take(5).map(str::to_string).collect::<Vec<_>>()
    };
    assert_eq!(message(&first), message(&second));
    // Another case would take another number of steps.
    let steps = |text: &str| {
        let (_, rest) = text.split_once("shrunk in ").expect("the message");
        rest.split_once(' ').expect("the message").0.to_string()
    };
    assert!(second.contains(&format!(", case 1, shrunk in {} steps", steps(&first))), "{second}");
}
