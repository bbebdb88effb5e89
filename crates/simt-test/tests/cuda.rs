//! On a GPU, where there is one: results, and a kernel that goes astray there. The PTX is by hand, so that no
//! device compiler is needed; without a GPU the first test runs on the emulator alone.

use simt::{Global, GlobalMut, LaunchShape, kernel, thread};
use simt_test::{Failed, Failure, GpuError, PtxImage, Trial, array, bits, sizes};

const IMAGES: &[PtxImage] = &[PtxImage::new(80, include_str!("../../device/tests/common/kernels.ptx"))];

#[kernel(system = host_test)]
fn affine(x: Global<f32>, y: GlobalMut<f32>, a: f32, n: u32) {
    let i = thread::index_1d();
    if i < n as usize {
        y.store(i, x.load(i) * a + 1.0);
    }
}

#[simt::test(ptx = IMAGES)]
fn affine_everywhere(
    #[draw(sizes(1..=1000))] n: usize,
    #[draw(array(n, bits::<f32>()))] x: Vec<f32>,
    #[draw(bits::<f32>())] a: f32,
) -> Trial {
    let expected: Vec<f32> = x.iter().map(|x| x * a + 1.0).collect();
    Trial::new(affine::kernel(), LaunchShape::new(n.div_ceil(128) as u32, 128), move |memory| affine::Args {
        x: memory.input(&x),
        y: memory.output(&expected),
        a,
        n: n as u32,
    })
}

/// In the PTX it adds `by` to all elements; here, of 40 and more, to none.
#[kernel(system = host_test)]
fn increment(y: GlobalMut<u32>, by: u32, n: u32) {
    let i = thread::index_1d();
    if i < n as usize && n < 40 {
        y.store(i, y.load(i).wrapping_add(by));
    }
}

/// From 40 elements on the GPU is told of 2^24, and writes far behind the array.
#[simt::test(result, cases = 16, ptx = IMAGES)]
fn astray(#[draw(sizes(1..=50))] n: usize) -> Trial {
    let (before, expected) = (vec![1; n], vec![if n < 40 { 3 } else { 1 }; n]);
    let far = n >= 40 && std::env::var_os("SIMT_TEST_CHILD").is_some();
    let n = if far { 1 << 24 } else { n as u32 };
    Trial::new(increment::kernel(), LaunchShape::new(n.div_ceil(128), 128), move |memory| increment::Args {
        y: memory.in_out(&before, &expected),
        by: 2,
        n,
    })
}

#[test]
fn a_context_that_is_lost_is_an_error_and_the_next_case_runs() {
    let case = match astray() {
        Err(Failed::Case(case)) => case,
        // Without a GPU, or in the process that has it, nothing is wrong.
        Ok(report) => return assert_eq!(report.on_gpu, 0, "{report:?}"),
        Err(other) => panic!("{other}"),
    };
    println!("{case}");
    let Failure::Gpu(GpuError::Fault { code: Some(_), .. }) = &case.failure else { panic!("{case}") };
    // To get there, cases passed after others had lost their context.
    assert_eq!(case.inputs, [("n", "40".to_string())]);
}
