//! Kernels that the loaded PTX is too low for, and such that it should hold, seen from a stand-in for the
//! driver, compiled here, that knows no kernel.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod stand_in;

use ferrokv_device::{Device, Error, PtxImage, Stream};
use simt::{LaunchShape, kernel};

const FAKE: &str = r#"
functions! {
    cuThreadExchangeStreamCaptureMode() 0;
    cuModuleLoadDataEx(out: *mut usize) { *out = 1; 0 };
    cuModuleGetFunction() 500;
    cuStreamCreate(out: *mut usize) { *out = 1; 0 };
    cuStreamSynchronize() 0;
}
"#;

#[kernel(min_sm = 90)]
fn late() {}

#[kernel]
fn early() {}

#[test]
fn a_kernel_that_needs_a_higher_target_says_so() {
    assert_eq!((late::kernel().info().min_sm, early::kernel().info().min_sm), (90, 0));
    let folder = tempfile::tempdir().unwrap();
    let library = stand_in::library(folder.path(), &stand_in::driver(FAKE));
    // SAFETY: the only test of this process, before any other thread of it runs.
    unsafe { std::env::set_var(cuda_lazy::DRIVER_VARIABLE, &library) };
    for loaded in [80, 90] {
        let device = Device::cuda(0, &[PtxImage::new(loaded, "")]).unwrap();
        let stream = Stream::new(&device).unwrap();
        let shape = LaunchShape::new(1, 32);
        // SAFETY: the stand-in runs nothing.
        let error = unsafe { stream.launch(&late::kernel(), shape, late::Args {}) }.unwrap_err();
        match error {
            Error::KernelNeeds { kernel: "late", needs: 90, sm: 80, .. } if loaded == 80 => {
                let text = error.to_string();
                let start = "kernel late needs sm_90: it is marked so; the PTX for sm_80 was loaded";
                assert!(text.starts_with(start), "{text}");
            }
            Error::KernelMissing { kernel: "late", sm: 90 } if loaded == 90 => {}
            other => panic!("{other}"),
        }
        // SAFETY: as above.
        let error = unsafe { stream.launch(&early::kernel(), shape, early::Args {}) }.unwrap_err();
        assert!(matches!(error, Error::KernelMissing { kernel: "early", sm } if sm == loaded), "{error}");
    }
    // What the build found that the target lacks; of two images the one for this target is asked.
    let images = [
        PtxImage::new(75, "// simt.left_out early 80 .m16n8k16, cp.async\n"),
        PtxImage::new(100, "// simt.left_out early 120 other\n"),
    ];
    let device = Device::cuda(0, &images).unwrap();
    let error = device.prepare(&early::kernel(), LaunchShape::new(1, 32)).unwrap_err();
    let text = error.to_string();
    let start = "kernel early needs sm_80: .m16n8k16, cp.async; the PTX for sm_75 was loaded";
    assert!(
        matches!(error, Error::KernelNeeds { needs: 80, sm: 75, .. }) && text.starts_with(start),
        "{text}"
    );
}
