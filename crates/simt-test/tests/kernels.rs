//! Kernels without a mistake: the attribute's tests of them pass, and do what they say.

use half::{bf16, f16};
use simt::{Global, GlobalMut, LaunchShape, Shared, SharedPlan, kernel, thread};
use simt_test::{Report, Trial, array, bits, exact, finite, multiples, near, sizes, unstated};
use std::convert::Infallible;

const BLOCK: u32 = 128;

fn cover(n: usize) -> LaunchShape {
    LaunchShape::new((n as u32).div_ceil(BLOCK), BLOCK)
}

#[kernel]
fn scale(x: Global<f32>, y: GlobalMut<f32>, factor: f32, n: u32) {
    let i = thread::index_1d();
    if i < n as usize {
        y.store(i, x.load(i) * factor);
    }
}

#[simt::test]
fn scaled(
    #[draw(sizes(1..=1000))] n: usize,
    #[draw(array(n, bits::<f32>()))] x: Vec<f32>,
    #[draw(bits::<f32>())] factor: f32,
) -> Trial {
    let expected: Vec<f32> = x.iter().map(|x| x * factor).collect();
    Trial::new(scale::kernel(), cover(n), move |memory| scale::Args {
        x: memory.input(&x),
        y: memory.output(&expected),
        factor,
        n: n as u32,
    })
}

/// y = y + x, of every third element.
#[kernel(instances(f16, bf16, f32))]
fn accumulate<T: Wide>(x: Global<T>, y: GlobalMut<T>, n: u32) {
    let i = thread::index_1d() * 3;
    if i < n as usize {
        y.store(i, T::narrow(x.load(i).wide() + y.load(i).wide()));
    }
}

trait Wide: simt_test::Element {
    /// Half the distance of neighbours, relative to a normal number, and the same of subnormal ones.
    const ROUNDING: [f64; 2];
    fn wide(self) -> f32;
    fn narrow(x: f32) -> Self;
}

macro_rules! wide {
    ($($ty:ident, $rounding:expr, $wide:expr, $narrow:expr;)*) => {$(
        impl Wide for $ty {
            const ROUNDING: [f64; 2] = $rounding;
            fn wide(self) -> f32 {
                let wide: fn($ty) -> f32 = $wide;
                wide(self)
            }
            fn narrow(x: f32) -> Self {
                let narrow: fn(f32) -> $ty = $narrow;
                narrow(x)
            }
        }
    )*};
}

wide! {
    f16, [1.0 / 2048.0, 1.0 / 33_554_432.0], f16::to_f32, f16::from_f32;
    bf16, [1.0 / 256.0, 4.6e-41], bf16::to_f32, bf16::from_f32;
    f32, [0.0, 0.0], |x| x, |x| x;
}

/// A sum in place, against its f64 within a bound.
fn accumulated<T: Wide>(kernel: simt::Kernel<accumulate::Args<T>>, x: Vec<T>, y: Vec<T>) -> Trial {
    let n = x.len();
    let sums: Vec<f64> =
        (0..n).map(|i| if i % 3 == 0 { x[i].value() + y[i].value() } else { y[i].value() }).collect();
    let largest = T::narrow(f32::MAX.min(3e38)).value();
    let bounds: Vec<f64> = sums
        .iter()
        .map(|sum| {
            let [relative, absolute] = T::ROUNDING;
            // Sums that round to infinity are looked at by their bits alone.
            if sum.abs() > largest.min(60000.0) {
                f64::INFINITY
            } else {
                sum.abs() * (2f64.powi(-24) + relative * (1.0 + 2f64.powi(-24))) + absolute + 2f64.powi(-150)
            }
        })
        .collect();
    let host: Vec<T> =
        (0..n).map(|i| if i % 3 == 0 { T::narrow(x[i].wide() + y[i].wide()) } else { y[i] }).collect();
    Trial::new(kernel, cover(n.div_ceil(3)), move |memory| accumulate::Args {
        x: memory.input(&x),
        y: memory.in_out(
            &y,
            near::<T>(sums.clone(), |i| bounds[i], "two roundings: the sum to f32, 2^-24 of it, then to T")
                .and("the host's own loop", host.clone()),
        ),
        n: n as u32,
    })
}

macro_rules! accumulates {
    ($($name:ident: $ty:ident)*) => {$(
        #[simt::test(cases = 48, orders = 3)]
        fn $name(
            #[draw(sizes(1..=500))] n: usize,
            #[draw(array(n, finite::<$ty>()))] x: Vec<$ty>,
            #[draw(array(n, finite::<$ty>()))] y: Vec<$ty>,
        ) -> Trial {
            accumulated(accumulate::kernel::<$ty>(), x, y)
        }
    )*};
}

accumulates! { accumulates_f16: f16 accumulates_bf16: bf16 accumulates_f32: f32 }

const fn tile() -> Shared<i32> {
    let mut plan = SharedPlan::new();
    plan.array(BLOCK)
}

/// The largest of each block's elements, of which there are a whole number of blocks.
#[kernel(max_threads = 128)]
fn largest(x: Global<i32>, partial: GlobalMut<i32>, count: GlobalMut<u32>, out: GlobalMut<i32>) {
    let t = thread::thread_idx_x();
    tile().store(t, x.load(thread::index_1d()));
    thread::sync_threads();
    let mut half = BLOCK / 2;
    while half > 0 {
        if t < half {
            tile().store(t, tile().load(t).max(tile().load(t + half)));
        }
        thread::sync_threads();
        half /= 2;
    }
    if t == 0 {
        let block = thread::block_idx_x() as usize;
        partial.store(block, tile().load(0));
        out.store(block, tile().load(0));
        count.atomic_add(0, 1);
    }
}

#[simt::test(cases = 24)]
fn largest_of_blocks(
    #[draw(multiples(128, 1..=640))] n: usize,
    #[draw(array(n, bits::<i32>()))] x: Vec<i32>,
) -> Result<Trial, Infallible> {
    let shape = cover(n).shared(4 * BLOCK);
    let expected: Vec<i32> = x.chunks(128).map(|block| block.iter().copied().max().unwrap_or(0)).collect();
    Ok(Trial::new(largest::kernel(), shape, move |memory| largest::Args {
        x: memory.input(&x),
        partial: memory.scratch(&vec![0; expected.len()]),
        count: memory.scratch(&[0u32]),
        out: memory.output(&expected),
    }))
}

/// Values that are no case are drawn again; no oracle knows the result.
#[simt::test(result, cases = 20, orders = 0)]
fn odd_lengths_alone(#[draw(sizes(1..=99))] n: usize) -> Option<Trial> {
    (n % 2 == 1).then(|| {
        Trial::new(scale::kernel(), cover(n), move |memory| scale::Args {
            x: memory.input(&vec![1.5; n]),
            y: memory.output(unstated(n)),
            factor: 2.0,
            n: n as u32,
        })
    })
}

#[test]
fn a_report_counts_cases() {
    let Report { cases, skipped, on_gpu, without_gpu, .. } = odd_lengths_alone().unwrap();
    assert!(cases == 20 && skipped > 0, "{skipped} of {cases}");
    assert_eq!(on_gpu, if without_gpu.is_some() { 0 } else { 20 });
}

/// A test may have no parameter, and a launch no elements.
#[simt::test(cases = 1)]
fn without_a_parameter() -> Trial {
    Trial::new(scale::kernel(), LaunchShape::new(2, 32), |memory| scale::Args {
        x: memory.input::<f32>(&[]),
        y: memory.output(exact::<f32>(vec![])),
        factor: 1.0,
        n: 0,
    })
}
