//! The cases of `ferrokv check`.

use host::Device;
use host::check::{Coverage, not_covered, run_cases};
use host::model::cases::cases;
use simt::emu::EmuOptions;

#[test]
fn cases_cover_every_instance_and_the_emulator_accepts_them() {
    let cases = cases(Coverage::Quick);
    assert_eq!(not_covered(&cases, kernels_gpu::model::kernels()), Vec::<&str>::new());
    let report = run_cases(&cases, &Device::cpu(EmuOptions::default()), None, |_| {});
    let bad: Vec<String> =
        report.cases.iter().filter(|case| !case.outcome.is_good()).map(|case| format!("{case:?}")).collect();
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}
