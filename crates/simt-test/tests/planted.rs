//! Kernels with a mistake: what the message says of each, and how small the case has become.

use half::f16;
use simt::emu::FaultKind;
use simt::{Global, GlobalMut, LaunchShape, kernel, math, thread};
use simt_test::{Failed, FailedCase, Failure, Report, Trial, Versus, array, bits, near, sizes, unstated};

#[kernel]
fn magnitude(x: Global<f32>, y: GlobalMut<f32>, n: u32) {
    let i = thread::index_1d();
    if i < n as usize {
        let x = x.load(i);
        // The mistake: −0 keeps its sign.
        y.store(i, if x < 0.0 { -x } else { x });
    }
}

fn cover(n: usize) -> LaunchShape {
    LaunchShape::new((n as u32).div_ceil(128), 128)
}

/// The case that a test failed with.
fn failed(result: Result<Report, Failed>) -> FailedCase {
    match result {
        Err(Failed::Case(case)) => {
            println!("{case}\n");
            *case
        }
        Err(other) => panic!("{other}"),
        Ok(report) => panic!("unnoticed: {report:?}"),
    }
}

/// The place in this file of the first `what` behind `mark`, as a fault names it.
fn place(mark: &str, what: &str) -> String {
    let text = include_str!("planted.rs");
    let start = text.find(mark).expect("the mark");
    let at = start + text[start..].find(what).expect("the place");
    let (line, column) = (text[..at].matches('\n').count() + 1, at - text[..at].rfind('\n').unwrap_or(0));
    format!("crates/simt-test/tests/planted.rs:{line}:{column}")
}

fn inputs(case: &FailedCase) -> Vec<(&str, &str)> {
    case.inputs.iter().map(|(name, value)| (*name, value.as_str())).collect()
}

#[simt::test(result)]
fn magnitudes(#[draw(sizes(1..=1000))] n: usize, #[draw(array(n, bits::<f32>()))] x: Vec<f32>) -> Trial {
    let expected: Vec<f32> = x.iter().map(|x| math::abs(*x)).collect();
    Trial::new(magnitude::kernel(), cover(n), move |memory| magnitude::Args {
        x: memory.input(&x),
        y: memory.output(&expected),
        n: n as u32,
    })
}

#[test]
fn a_wrong_value_at_one_pattern() {
    let case = failed(magnitudes());
    assert_eq!(inputs(&case), [("n", "1"), ("x", "[-0.0 (0x80000000)], 1 elements of f32")]);
    let text = case.to_string();
    let difference = format!(
        "output `y`: element 0 is -0.0 (0x80000000), expected 0.0 (0x00000000); 1 of 1 elements differ (written by \
         block (0,0,0) thread (0,0,0) at {}): the oracle says otherwise",
        place("fn magnitude(", "store")
    );
    assert!(text.contains(&difference), "{text}");
    // The guide shows the message, of a build with debug assertions.
    let text = text.replace("cargo test --release", "cargo test");
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words(include_str!("../../../docs/kernel-guide.md")).contains(&words(&text)), "{text}");
    assert!(text.contains("kernel magnitude,"), "{text}");
    assert!(text.contains("launch = grid (1,1,1), block (128,1,1), 0 bytes"), "{text}");
    assert!(case.command.contains("cargo test"), "{}", case.command);
    assert!(
        case.command.contains(" -p ferrokv-simt-test -- --exact a_wrong_value_at_one_pattern"),
        "{}",
        case.command
    );
}

/// Four elements a thread, also where fewer are left.
#[kernel]
fn ragged(x: Global<u8>, y: GlobalMut<u8>, n: u32) {
    let i = thread::index_1d() * 4;
    if i < n as usize {
        y.store_vector::<u32>(i, x.load_vector::<u32>(i));
    }
}

#[simt::test(result)]
fn raggeds(#[draw(sizes(1..=1000))] n: usize, #[draw(array(n, bits::<u8>()))] x: Vec<u8>) -> Trial {
    Trial::new(ragged::kernel(), cover(n.div_ceil(4)), move |memory| ragged::Args {
        x: memory.input(&x),
        y: memory.output(&x),
        n: n as u32,
    })
}

#[test]
fn an_access_behind_a_ragged_end() {
    let case = failed(raggeds());
    assert_eq!(inputs(&case), [("n", "1"), ("x", "[0], 1 elements of u8")]);
    let text = case.to_string();
    let fault = format!(
        "kernel ragged, block (0,0,0) thread (0,0,0), at {}, in order `ascending`: global read out of bounds: 4 \
         bytes from element 0 of an array of 1 elements of 1 bytes",
        place("fn ragged(", "load_vector")
    );
    assert!(text.contains(&fault), "{text}");
}

/// The first thread to come with a value of its own wins.
#[kernel]
fn first_wins(x: Global<u32>, winner: GlobalMut<u32>, n: u32) {
    let i = thread::index_1d();
    if i < n as usize && x.load(i) != 0 {
        winner.atomic_cas(0, 0, i as u32 + 1);
    }
}

#[simt::test(result)]
fn first_winners(#[draw(sizes(1..=300))] n: usize, #[draw(array(n, bits::<u32>()))] x: Vec<u32>) -> Trial {
    Trial::new(first_wins::kernel(), cover(n), move |memory| first_wins::Args {
        x: memory.input(&x),
        winner: memory.in_out(&[0], unstated(1)),
        n: n as u32,
    })
}

#[test]
fn a_result_of_the_order_of_threads() {
    let case = failed(first_winners());
    assert_eq!(inputs(&case), [("n", "2"), ("x", "[1 ×2], 2 elements of u32")]);
    let Failure::Fault(fault) = &case.failure else { panic!("{case}") };
    assert!(matches!(fault.kind, FaultKind::OrderDependence(_)), "{fault}");
    assert!(fault.to_string().contains("element 0 of `winner` is 0x1 in order `ascending`"), "{fault}");
}

/// Adds up what is above a bound, by load and store.
#[kernel]
fn race(x: Global<u32>, sum: GlobalMut<u32>, n: u32) {
    let i = thread::index_1d();
    if i < n as usize && x.load(i) > 1000 {
        sum.store(0, sum.load(0).wrapping_add(x.load(i)));
    }
}

#[simt::test(result)]
fn races(#[draw(sizes(1..=300))] n: usize, #[draw(array(n, bits::<u32>()))] x: Vec<u32>) -> Trial {
    let sum = x.iter().filter(|x| **x > 1000).fold(0u32, |sum, x| sum.wrapping_add(*x));
    Trial::new(race::kernel(), cover(n), move |memory| race::Args {
        x: memory.input(&x),
        sum: memory.in_out(&[0], vec![sum]),
        n: n as u32,
    })
}

#[test]
fn a_race_of_two_threads() {
    let case = failed(races());
    assert_eq!(inputs(&case), [("n", "2"), ("x", "[1001 ×2], 2 elements of u32")]);
    let Failure::Fault(fault) = &case.failure else { panic!("{case}") };
    let FaultKind::Race(race) = &fault.kind else { panic!("{fault}") };
    assert_eq!((race.index, race.other.thread.x), (0, 0));
    assert_eq!(fault.thread.unwrap().thread.x, 1);
}

/// Leaves out the last element.
#[kernel]
fn all_but_the_last(x: Global<u16>, y: GlobalMut<u16>, n: u32) {
    let i = thread::index_1d();
    if i + 1 < n as usize || n < 33 {
        y.store(i, x.load(i));
    }
}

#[simt::test(result)]
fn unwritten(#[draw(sizes(33..=300))] n: usize, #[draw(array(n, bits::<u16>()))] x: Vec<u16>) -> Trial {
    Trial::new(all_but_the_last::kernel(), cover(n), move |memory| all_but_the_last::Args {
        x: memory.input(&x),
        y: memory.output(unstated(n)),
        n: n as u32,
    })
}

#[test]
fn an_element_that_nobody_writes() {
    let case = failed(unwritten());
    assert_eq!(inputs(&case), [("n", "33"), ("x", "[0 ×33], 33 elements of u16")]);
    let text = case.to_string();
    assert!(text.contains("output `y`: no thread wrote element 32, and 1 of 33 elements in all"), "{text}");
}

/// Reads what it has not written.
#[kernel]
fn adds(x: Global<u32>, y: GlobalMut<u32>, n: u32) {
    let i = thread::index_1d();
    if i < n as usize {
        y.store(i, y.load(i).wrapping_add(x.load(i)));
    }
}

#[simt::test(result)]
fn unwritten_reads(#[draw(sizes(1..=100))] n: usize, #[draw(array(n, bits::<u32>()))] x: Vec<u32>) -> Trial {
    Trial::new(adds::kernel(), cover(n), move |memory| adds::Args {
        x: memory.input(&x),
        y: memory.output(&x),
        n: n as u32,
    })
}

#[test]
fn a_read_of_an_output_that_nobody_wrote() {
    let case = failed(unwritten_reads());
    let Failure::Fault(fault) = &case.failure else { panic!("{case}") };
    assert!(matches!(fault.kind, FaultKind::Unwritten { index: 0, bytes: 4 }), "{fault}");
}

/// Rounds to f16 on the way.
#[kernel]
fn halved(x: Global<f32>, y: GlobalMut<f32>, n: u32) {
    let i = thread::index_1d();
    if i < n as usize {
        y.store(i, f16::from_f32(x.load(i)).to_f32());
    }
}

#[simt::test(result)]
fn halves(#[draw(array(40, 1f32..2.0))] x: Vec<f32>) -> Trial {
    let exactly: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
    let n = x.len();
    Trial::new(halved::kernel(), cover(n), move |memory| halved::Args {
        x: memory.input(&x),
        y: memory.output(near(
            exactly.clone(),
            |_| 2f64.powi(-12),
            "half of what rounding below 2 may be off",
        )),
        n: n as u32,
    })
}

#[test]
fn a_bound_that_does_not_hold() {
    let case = failed(halves());
    let Failure::Differs(mismatch) = &case.failure else { panic!("{case}") };
    let difference = &mismatch.difference;
    // All elements but one are as simple as the strategy has them: 1.
    assert_eq!((difference.index, difference.count, difference.len), (0, 1, 40));
    let text = case.to_string();
    assert!(text.contains(" ± 2.44140625e-4; 1 of 40 elements differ"), "{text}");
    assert!(text.contains("allows (half of what rounding below 2 may be off)"), "{text}");
    assert!(text.contains(", 1.0 (0x3f800000) ×39], 40 elements of f32"), "{text}");
}

/// A second implementation with a mistake at one value.
#[simt::test(result)]
fn implementations(#[draw(array(64, bits::<u32>()))] x: Vec<u32>) -> Trial {
    let (n, zeros) = (x.len(), vec![0; 64]);
    let simd: Vec<u32> = x.iter().map(|x| x & 0x7fff_ffff).collect();
    Trial::new(adds::kernel(), cover(n), move |memory| adds::Args {
        x: memory.input(&x),
        y: memory.in_out(&zeros, simt_test::exact(x.as_slice()).and("the SIMD path", simd.as_slice())),
        n: n as u32,
    })
}

#[test]
fn another_implementation_that_is_wrong() {
    let case = failed(implementations());
    let text = case.to_string();
    let difference = "element 0 is 2147483648, expected 0; 1 of 64 elements differ (written by block (0,0,0) thread \
                      (0,0,0) at";
    assert!(text.contains(difference) && text.contains("the SIMD path says otherwise"), "{text}");
}

#[simt::test(result)]
fn panics(#[draw(sizes(1..=300))] n: usize) -> Option<Trial> {
    assert!(n < 70, "{n} is too many");
    None
}

#[simt::test(result)]
fn errors(#[draw(sizes(1..=300))] n: usize) -> Result<Option<Trial>, String> {
    if n.is_multiple_of(2) { Err(format!("{n} is even")) } else { Ok(None) }
}

#[simt::test(result)]
fn never(#[draw(sizes(1..=300))] n: usize) -> Option<Trial> {
    assert!(n > 0);
    None
}

#[simt::test(result)]
fn refused(#[draw(sizes(1..=300))] n: usize) -> Trial {
    Trial::new(adds::kernel(), LaunchShape::new(1, 8 * n as u32), |memory| adds::Args {
        x: memory.input(&[0]),
        y: memory.in_out(&[0], vec![0]),
        n: 1,
    })
}

#[test]
fn what_is_wrong_with_the_test_itself() {
    let case = failed(panics());
    assert_eq!((inputs(&case), case.kernel), (vec![("n", "70")], None));
    assert!(case.to_string().contains("the test's own function panicked: 70 is too many"), "{case}");
    let case = failed(errors());
    assert!(case.to_string().contains("no case: 2 is even"), "{case}");
    let Err(Failed::Skipped { skipped: 1000, .. }) = never() else { panic!("a test without a case") };
    let case = failed(refused());
    assert_eq!(inputs(&case), [("n", "129")]);
    assert!(matches!(case.failure, Failure::Device(_)), "{case}");
    assert!(case.to_string().contains("cannot launch adds with grid (1,1,1), block (1032,1,1)"), "{case}");
}

/// Arguments that are not the same each time.
#[simt::test(result)]
fn unsteady(#[draw(sizes(1..=300))] n: usize) -> Trial {
    let calls = std::cell::Cell::new(0);
    Trial::new(adds::kernel(), cover(n), move |memory| {
        calls.set(calls.get() + 1);
        adds::Args {
            x: memory.input(&vec![calls.get(); n]),
            y: memory.in_out(&vec![0; n], unstated(n)),
            n: n as u32,
        }
    })
}

#[test]
fn two_runs_that_differ() {
    let case = failed(unsteady());
    let Failure::Differs(mismatch) = &case.failure else { panic!("{case}") };
    assert_eq!((mismatch.versus, mismatch.difference.found.as_str()), (Versus::Parallel, "2"));
    assert_eq!(inputs(&case), [("n", "1")]);
}

/// Two mistakes, of which the second waits where the first shrinks to.
#[simt::test(result)]
fn of_two_mistakes(#[draw(sizes(1..=300))] n: usize) -> Result<Trial, String> {
    if n < 3 {
        return Err("the other mistake".to_string());
    }
    let shape = LaunchShape::new(1, if n < 40 { 32 } else { 2000 });
    Ok(Trial::new(adds::kernel(), shape, |memory| adds::Args {
        x: memory.input(&[0]),
        y: memory.in_out(&[0], vec![0]),
        n: 1,
    }))
}

#[test]
fn a_case_shrinks_to_its_own_mistake() {
    let case = failed(of_two_mistakes());
    assert!(matches!(case.failure, Failure::Device(_)), "{case}");
    assert_eq!(inputs(&case), [("n", "40")]);
}
