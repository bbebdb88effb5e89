//! Comparison of bits: two runs of a case that differ in a known place, and what the report says of it.

use super::*;
use kernels_gpu::probe;
use simt::LaunchShape;
use std::sync::atomic::{AtomicUsize, Ordering};

fn cpu() -> Device {
    Device::cpu(EmuOptions::default())
}

fn info() -> &'static KernelInfo {
    probe::indices::indices::kernel().info()
}

/// A case whose second run differs from its first by `change`.
fn changed<T: OutputElement>(values: Vec<T>, change: impl Fn(&mut Vec<T>) + Send + Sync + 'static) -> Case {
    let runs = AtomicUsize::new(0);
    Case::new(info(), "changed", move |_| {
        let mut values = values.clone();
        if runs.fetch_add(1, Ordering::Relaxed) == 1 {
            change(&mut values);
        }
        Ok(vec![OutputBuffer::new("first", vec![1u8; 5]), OutputBuffer::new("second", values)])
    })
}

fn compare_with_itself(case: Case) -> CaseReport {
    let report = run_cases(&[case], &cpu(), Some(&cpu()), |_| {});
    assert_eq!(report.passed(), report.cases[0].outcome == Outcome::Equal);
    report.cases.into_iter().next().unwrap()
}

#[test]
fn a_difference_is_found_and_named() {
    // Several chunks; the first difference is in the second one, more follow.
    let report = compare_with_itself(changed(vec![7u32; 1 << 20], |values| {
        values[300_000] ^= 0x8000_0001;
        values[900_000] ^= 1;
        values[900_001] ^= 0xff;
    }));
    assert_eq!(report.outcome, Outcome::Different);
    assert_eq!((report.compared, report.differing_elements, report.differing_bits), ((1 << 20) + 5, 3, 11));
    let first = report.first_difference.unwrap();
    assert_eq!((first.output.as_str(), first.index), ("second", 300_000));
    assert_eq!((first.reference.as_str(), first.other.as_str()), ("0x00000007", "0x80000006"));
}

#[test]
fn the_last_element_of_an_odd_size_counts() {
    for len in [1, 2, 3, (1 << 20) - 1, (1 << 20) + 1] {
        let report = compare_with_itself(changed(vec![7i8; len], move |values| values[len - 1] = -7));
        assert_eq!(report.first_difference.unwrap().index, len as u64 - 1);
        assert_eq!(report.differing_bits, (7u8 ^ -7i8 as u8).count_ones() as u64);
    }
    let report = compare_with_itself(changed(Vec::<f32>::new(), |_| {}));
    assert_eq!((report.outcome, report.compared), (Outcome::Equal, 5));
}

#[test]
fn a_nan_is_a_nan_and_nothing_else_is() {
    let nan = compare_with_itself(changed(vec![f32::NAN; 9], |v| v[4] = f32::from_bits(0xffff_ffff)));
    assert_eq!((nan.outcome, nan.differing_bits), (Outcome::Equal, 0));
    let infinity = compare_with_itself(changed(vec![f32::INFINITY; 9], |v| v[4] = f32::NAN));
    assert_eq!((infinity.outcome, infinity.differing_elements), (Outcome::Different, 1));
    let zero = compare_with_itself(changed(vec![0f64; 9], |v| v[4] = -0.0));
    assert_eq!(
        (zero.differing_bits, zero.first_difference.unwrap().other.as_str()),
        (1, "0x8000000000000000")
    );
    let bits = compare_with_itself(changed(vec![f32::NAN.to_bits(); 9], |v| v[4] = 0xffff_ffff));
    assert_eq!(bits.outcome, Outcome::Different);
    for (nan, other) in [(0x7c01u16, 0xffff), (0xfc01, 0x7e00)] {
        let values = vec![half::f16::from_bits(nan)];
        let report = compare_with_itself(changed(values, move |v| v[0] = half::f16::from_bits(other)));
        assert_eq!(report.outcome, Outcome::Equal);
    }
    let bf16 = changed(vec![half::bf16::from_bits(0x7f81)], |v| v[0] = half::bf16::from_bits(0x7f80));
    assert_eq!(compare_with_itself(bf16).outcome, Outcome::Different);
}

#[test]
fn outputs_of_another_size_are_an_error() {
    let report = compare_with_itself(changed(vec![1u16; 4], |values| values.push(1)));
    assert_eq!(report.outcome, Outcome::Error);
    let message = report.message.unwrap();
    assert!(message.contains("second: 8 bytes") && message.contains("second: 10 bytes"), "{message}");
}

#[test]
fn a_gpu_too_old_for_a_kernel_is_none_to_compare_with() {
    let runs = AtomicUsize::new(0);
    let case = Case::new(info(), "new", move |_| match runs.fetch_add(1, Ordering::Relaxed) {
        0 => Ok(vec![OutputBuffer::new("out", vec![1u8])]),
        _ => Err(Error::KernelNeeds { kernel: "k", needs: 90, why: "it is marked so".into(), sm: 80 }.into()),
    });
    let report = run_cases(&[case], &cpu(), Some(&cpu()), |_| {});
    assert!(report.passed());
    assert_eq!(report.cases[0].outcome, Outcome::NoGpu);
    let message = report.cases[0].message.as_ref().unwrap();
    assert!(message.contains("90"), "{message}");
}

#[test]
fn faults_and_errors_are_told_apart_and_the_rest_still_runs() {
    let kernel = probe::barriers::barriers::kernel();
    // One word too few for 32 threads.
    let fault = Case::new(kernel.info(), "too small", move |device| {
        let stream = Stream::new(device)?;
        let mut out = poisoned::<u32>(&stream, 32 * probe::barriers::WORDS as usize - 1)?;
        let shape = LaunchShape::new(1, 32).shared(probe::barriers::layout().bytes);
        // SAFETY: the emulator checks bounds.
        unsafe {
            stream.launch(&kernel, shape, probe::barriers::barriers::Args { out: out.global_mut(), seed: 1 })
        }?;
        Ok(vec![OutputBuffer::download("out", &out)?])
    });
    let error = Case::new(info(), "error", |_| Err("no such thing".into()));
    let good = changed(vec![1u8], |_| {}).and(kernel.info());
    let mut seen = Vec::new();
    let cases = [fault, error, good];
    let report = run_cases(&cases, &cpu(), None, |progress| {
        seen.push((progress.case.outcome, progress.done, progress.total));
    });
    assert_eq!(seen, [(Outcome::Fault, 1, 3), (Outcome::Error, 2, 3), (Outcome::NoGpu, 3, 3)]);
    assert!(!report.passed());
    let message = report.cases[0].message.as_deref().unwrap();
    assert!(message.contains("probe_barriers") && message.contains("out of bounds"), "{message}");
    let totals = &report.totals;
    assert_eq!((totals.cases, totals.fault, totals.error, totals.no_gpu), (3, 1, 1, 1));
    assert_eq!((totals.outputs, totals.compared), (6, 0));

    assert_eq!(report.by_kernel()[0].0, "probe_barriers");
    assert_eq!(report.by_kernel()[1].1.cases, 2);
    assert!(not_covered(&cases, [info(), kernel.info()]).is_empty());
    assert_eq!(not_covered(&cases, probe::fences::last_lane::INSTANCES), ["probe_last_lane"]);

    let text = serde_json::to_string(&report).unwrap();
    assert_eq!(serde_json::from_str::<Report>(&text).unwrap(), report);
    assert!(text.contains(r#""outcome":"no_gpu""#), "{text}");
}

#[test]
fn outputs_are_poisoned() {
    let stream = Stream::new(&cpu()).unwrap();
    assert_eq!(poisoned::<u32>(&stream, 3).unwrap().to_vec().unwrap(), [0xa5a5_a5a5; 3]);
    assert_ne!(poison(BackendKind::Cpu), poison(BackendKind::Cuda));
}
