//! A search over tests of this program itself: the module `subject` has kernels, a test that looks at them
//! well, and one that does not.

use simt_mutate::{Error, Outcome, Report, Search};
use std::path::PathBuf;

mod subject {
    use simt::emu::{self, EmuOptions, Schedule};
    use simt::{Global, GlobalMut, LaunchShape, Shared, SharedPlan, async_copy, kernel, thread, warp};

    const fn tile() -> Shared<u32> {
        let mut plan = SharedPlan::new();
        plan.array(64)
    }

    /// `y[i] = x[63 - i] + 1` over shared memory, and whether any of a warp is 0.
    #[kernel]
    fn reversed(x: Global<u32>, _unused: Global<u32>, y: GlobalMut<u32>, zeros: GlobalMut<u32>) {
        let t = thread::thread_idx_x();
        tile().store(t, x.load(t as usize));
        thread::sync_threads();
        let value = tile().load(63 - t);
        y.store(t as usize, value + 1);
        let any = warp::warp_vote_any(warp::FULL_MASK, value == 0);
        if t.is_multiple_of(32) {
            zeros.atomic_add(0, u32::from(any));
        }
        // It orders nothing that anyone looks at.
        thread::sync_threads();
    }

    #[kernel]
    fn copied(x: Global<u32>, y: GlobalMut<u32>) {
        let t = thread::thread_idx_x();
        if t < 16 {
            tile().copy_async(4 * t, x, 4 * t as usize);
        }
        async_copy::commit();
        async_copy::wait::<0>();
        thread::sync_threads();
        y.store(t as usize, tile().load(t));
    }

    /// Each block says that it is there and looks for the other; at most one may enter.
    #[kernel]
    fn one_enters(x: GlobalMut<u32>) {
        let own = thread::block_idx_x() as usize;
        x.atomic_store(own, 1);
        thread::device_fence_sc();
        if x.atomic_load(1 - own) == 0 {
            x.atomic_add(2, 1);
        }
    }

    /// The sum of a warp, in all its lanes.
    #[kernel]
    fn sums(y: GlobalMut<u32>) {
        let t = thread::thread_idx_x();
        let half = t + warp::warp_shuffle_xor(warp::FULL_MASK, t, 16, 32);
        y.store(t as usize, half);
    }

    fn input() -> Vec<u32> {
        let words: Vec<u128> =
            (0..16).map(|i| 0x0000_0003_0000_0002_0000_0001_0000_0000 + i * 0x11).collect();
        words.iter().flat_map(|word| (0..4).map(move |i| (word >> (32 * i)) as u32)).collect()
    }

    fn run(options: EmuOptions) -> (Vec<u32>, Vec<u32>, u32) {
        let (x, unused, mut y, mut zeros) = (input(), vec![9; 64], vec![0; 65], [0]);
        // SAFETY: the vectors live until the launch is over.
        unsafe {
            let args = reversed::Args {
                x: Global::from_raw(x.as_ptr() as u64, 64),
                unused: Global::from_raw(unused.as_ptr() as u64, 64),
                y: GlobalMut::from_raw(y.as_mut_ptr() as u64, 65),
                zeros: GlobalMut::from_raw(zeros.as_mut_ptr() as u64, 1),
            };
            let shape = LaunchShape::new(1, 64).shared(256);
            emu::launch(&reversed::kernel(), shape, args, &options).expect("no fault");
        }
        (x, y, zeros[0])
    }

    #[test]
    fn well() {
        let (x, y, zeros) = run(EmuOptions::race_checked());
        assert!((0..64).all(|i| y[i] == x[63 - i] + 1) && y[64] == 0);
        assert_eq!(zeros, 1);
    }

    #[test]
    fn hardly() {
        let (_, y, _) = run(EmuOptions::default());
        assert_eq!(y.len(), 65);
    }

    #[test]
    fn copies() {
        let words: Vec<u128> = (0..16).map(|i| i + 1).collect();
        let mut y = [0u32; 64];
        // SAFETY: as above.
        unsafe {
            let args = copied::Args {
                x: Global::from_raw(words.as_ptr() as u64, 64),
                y: GlobalMut::from_raw(y.as_mut_ptr() as u64, 64),
            };
            let shape = LaunchShape::new(1, 64).shared(256);
            emu::launch(&copied::kernel(), shape, args, &EmuOptions::default()).expect("no fault");
        }
        assert!((0..64).all(|i| y[i] == if i % 4 == 0 { i as u32 / 4 + 1 } else { 0 }));
    }

    #[test]
    fn enters() {
        for schedule in (0..40).map(Schedule::Seeded) {
            let mut x = [0; 3];
            let options = EmuOptions { race_check: true, schedule, ..EmuOptions::default() };
            // SAFETY: the array lives until the launch is over.
            unsafe {
                let args = one_enters::Args { x: GlobalMut::from_raw(x.as_mut_ptr() as u64, 3) };
                emu::launch(&one_enters::kernel(), LaunchShape::new(2, 1), args, &options).expect("no fault");
            }
            assert!(x[2] < 2, "both entered");
        }
    }

    #[test]
    fn shuffles() {
        let mut y = [0; 32];
        // SAFETY: as above.
        unsafe {
            let args = sums::Args { y: GlobalMut::from_raw(y.as_mut_ptr() as u64, 32) };
            let options = EmuOptions::default();
            emu::launch(&sums::kernel(), LaunchShape::new(1, 32), args, &options).expect("no fault");
        }
        assert_eq!(y[3], 22);
    }

    #[test]
    fn without_kernels() {}

    #[test]
    fn fails() {
        // Only where it is searched.
        assert!(std::env::var_os(emu::MUTATION_VARIABLE).is_none());
    }
}

fn search(test: &str) -> Search {
    let program = std::env::current_exe().expect("this program has a path");
    Search { programs: vec![program], test: format!("subject::{test}"), ..Search::default() }
}

fn found(test: &str) -> Report {
    search(test).run(&|_, _, _| {}).expect("a report")
}

fn outcomes(report: &Report, change: &str) -> Vec<Outcome> {
    report.mutants.iter().filter(|m| m.change.starts_with(change)).map(|m| m.outcome).collect()
}

#[test]
fn a_test_that_looks_well_sees_all_but_what_makes_no_difference() {
    let report = found("well");
    assert_eq!((report.tests, report.failing.len()), (1, 0));
    // Handles of `x` and `unused` exchanged, both barriers, the loads and stores, the atomic, the vote.
    assert_eq!(outcomes(&report, "swap:x:unused@reversed"), [Outcome::Seen]);
    assert_eq!(outcomes(&report, "no-barrier@"), [Outcome::Seen, Outcome::Unseen]);
    assert!(outcomes(&report, "next@").iter().all(|outcome| *outcome == Outcome::Seen));
    assert!(outcomes(&report, "previous@").iter().all(|outcome| *outcome == Outcome::Seen));
    assert_eq!(outcomes(&report, "next@").len(), 4);
    assert_eq!(outcomes(&report, "not-atomic@"), [Outcome::Seen]);
    assert_eq!(outcomes(&report, "negated@"), [Outcome::Seen]);
    assert_eq!(report.unseen().count(), 1);
}

#[test]
fn a_test_that_hardly_looks_sees_faults_alone() {
    let report = found("hardly");
    // An output shorter than the one that it is exchanged with is seen by the emulator.
    assert_eq!(outcomes(&report, "swap:"), [Outcome::Unseen, Outcome::Seen]);
    // Without the first barrier a thread reads what nobody wrote.
    assert_eq!(outcomes(&report, "no-barrier@"), [Outcome::Seen, Outcome::Unseen]);
    assert_eq!(outcomes(&report, "negated@"), [Outcome::Unseen]);
}

#[test]
fn a_wait_too_few_is_seen() {
    assert_eq!(outcomes(&found("copies"), "no-wait@"), [Outcome::Seen]);
}

#[test]
fn fences_and_masks_are_broken() {
    let fences = found("enters");
    assert_eq!(outcomes(&fences, "relaxed-fence@"), [Outcome::Seen]);
    assert_eq!(outcomes(&fences, "block-fence@"), [Outcome::Seen]);
    assert_eq!(outcomes(&found("shuffles"), "mask-bit@"), [Outcome::Seen]);
    // A vote has a mask as well; a barrier has none.
    assert_eq!(outcomes(&found("well"), "mask-bit@"), [Outcome::Seen]);
    assert!(outcomes(&found("well"), "relaxed-fence@").is_empty());
}

#[test]
fn tests_that_reach_no_kernel_or_fail_are_told_apart() {
    let Err(Error::NoTest { count, .. }) = search("without_kernels").run(&|_, _, _| {}) else {
        panic!("no kernel is reached")
    };
    assert_eq!(count, 1);
    let all = search("").run(&|_, _, _| {}).expect("a report");
    assert_eq!((all.tests, all.failing), (5, vec!["subject::fails".to_string()]));
    // What one test sees is seen, whoever else does not. One thread alone comes to the count of `one_enters`.
    assert_eq!(all.mutants.iter().filter(|mutant| mutant.outcome == Outcome::Unseen).count(), 3);
}

#[test]
fn changes_and_places_are_chosen() {
    let of = |search: Search| search.run(&|_, _, _| {}).expect("a report").mutants.len();
    assert_eq!(of(Search { changes: vec!["no-barrier".into()], ..search("well") }), 2);
    assert_eq!(of(Search { place: "reversed".into(), ..search("well") }), 2);
    let sample = Search { sample: Some(3), seed: 7, ..search("well") };
    assert_eq!(of(sample.clone()), 3);
    assert_eq!(of(Search { sample: Some(0), ..sample }), 0);
}

#[test]
fn programs_that_are_none_are_named() {
    let none = Search { programs: vec![PathBuf::from("/no/such/program")], ..Search::default() };
    let error = none.run(&|_, _, _| {}).expect_err("refused").to_string();
    assert!(error.contains("/no/such/program"), "{error}");
}

#[test]
fn a_report_is_written_whole() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("report.json");
    let report =
        Search { changes: vec!["swap".into()], ..search("well") }.run(&|_, _, _| {}).expect("a report");
    report.write(&path).expect("written");
    let text = std::fs::read_to_string(&path).expect("read");
    let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(json["mutants"][0]["outcome"], "seen");
    let error = report.write(&folder.path().join("none/report.json")).expect_err("no folder").to_string();
    assert!(error.contains("none"), "{error}");
}

#[test]
fn what_was_seen_is_not_tried_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("report.json");
    let first = Search { sample: Some(4), ..search("hardly") }.run(&|_, _, _| {}).expect("a report");
    first.write(&path).expect("written");
    let earlier = Report::read(&path).expect("read");
    // With a test that looks well: what was seen stays as it was found, all else is tried.
    let all = Search { earlier: Some(earlier), ..search("well") }.run(&|_, _, _| {}).expect("a report");
    let fresh = found("well");
    assert_eq!(outcomes(&all, ""), outcomes(&fresh, ""));
    let by_other = all.mutants.iter().filter(|mutant| mutant.tests == ["subject::hardly"]).count();
    let seen = first.mutants.iter().filter(|mutant| mutant.outcome == Outcome::Seen).count();
    assert_eq!(by_other, seen);
    assert!(seen > 0 && seen < first.mutants.len());

    std::fs::write(&path, "{").expect("written");
    let error = Report::read(&path).expect_err("cut off").to_string();
    assert!(error.contains("report.json"), "{error}");
}
