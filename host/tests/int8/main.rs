//! The INT8 system: one property, every implementation.
//!
//! The implementations are the SIMD path, the paper's loop, each variant's kernels on the emulator and, where
//! there is a GPU, on it. All of them must give the same bits, and the f64 oracle accepts each code.

mod implementations;
mod properties;
mod values;

use ferrokv::host::int8::{self, Matrix, Plan, Variant};
use ferrokv::host::{Buffer, Device, Stream};
use ferrokv::simt::emu::EmuOptions;

#[test]
fn shapes_that_make_no_matrix_are_refused() {
    assert!(matches!(Matrix::new(0, 4), Err(int8::Error::Empty { .. })));
    assert!(matches!(Matrix::new(4, 0), Err(int8::Error::Empty { .. })));
    assert!(matches!(Matrix::new(1, 1 << 31), Err(int8::Error::TooLarge { .. })));
    assert!(matches!(Matrix::new(1 << 40, 1), Err(int8::Error::TooLarge { .. })));
    assert!(Matrix::new(1 << 21, 1 << 11).is_ok(), "2^32 elements are fine");
}

#[test]
fn buffers_of_another_matrix_are_refused_before_any_launch() {
    let device = Device::cpu(EmuOptions::default());
    let stream = Stream::new(&device).unwrap();
    let keys = Buffer::from_slice(&device, &[1f32; 8]).unwrap();
    for variant in Variant::ALL {
        let mut plan = Plan::<f32>::new(&device, Matrix::new(4, 4).unwrap(), variant).unwrap();
        let mut out = plan.allocate().unwrap();
        let error = plan.quantize(&stream, &keys, &mut out).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the matrix has 8 elements, a matrix of 4 × 4 needs 16; allocate it for this plan"
        );
        let small = Plan::<f32>::new(&device, Matrix::new(2, 4).unwrap(), variant).unwrap();
        assert!(matches!(
            small.codes(&stream, &keys, &mut out),
            Err(int8::Error::Length { what: "codes", .. })
        ));
    }
}

#[test]
fn a_matrix_made_past_its_limits_makes_no_plan() {
    let device = Device::cpu(EmuOptions::default());
    for (tokens, channels) in [(0, 4), (1 << 62, 4), (1, (1 << 32) + 4)] {
        for variant in Variant::ALL {
            let plan = Plan::<f32>::new(&device, Matrix { tokens, channels }, variant);
            let Err(error) = plan else { panic!("a plan for {tokens} × {channels}") };
            assert!(matches!(error, int8::Error::Empty { .. } | int8::Error::TooLarge { .. }), "{error}");
        }
    }
}

#[test]
fn buffers_of_another_device_are_refused() {
    let Ok(gpu) = Device::cuda(0, ferrokv::ptx()) else { return };
    let cpu = Device::cpu(EmuOptions::default());
    let matrix = Matrix::new(2, 4).unwrap();
    for (here, there) in [(&cpu, &gpu), (&gpu, &cpu)] {
        let mut plan = Plan::<f32>::new(here, matrix, Variant::Rows).unwrap();
        let mut out = plan.allocate().unwrap();
        let (own, foreign) =
            (Buffer::from_slice(here, &[1f32; 8]).unwrap(), Buffer::from_slice(there, &[1f32; 8]).unwrap());
        let wrong = |result: int8::Result<()>| {
            assert!(matches!(result, Err(int8::Error::Device(ferrokv::host::Error::WrongDevice { .. }))));
        };
        let stream = Stream::new(here).unwrap();
        wrong(plan.codes(&stream, &foreign, &mut out));
        wrong(plan.first_nonfinite(&stream, &foreign).map(|_| ()));
        wrong(plan.scales(&Stream::new(there).unwrap(), &own, &mut out));
    }
}

#[test]
fn an_unknown_variant_names_those_there_are() {
    let error = "fast".parse::<Variant>().unwrap_err().to_string();
    assert_eq!(
        error,
        "there is no INT8 variant 'fast'; there are naive, tiled, coarsened, vectorized, rows, wide, fused"
    );
    for variant in Variant::ALL {
        assert_eq!(variant.to_string().parse::<Variant>().unwrap(), variant);
    }
}

#[test]
fn a_captured_quantization_replays_on_new_keys() {
    let device = Device::cpu(EmuOptions::default());
    let stream = Stream::new(&device).unwrap();
    let matrix = Matrix::new(33, 12).unwrap();
    let first: Vec<f32> = (0..matrix.elements()).map(|i| (i as f32).sin()).collect();
    let second: Vec<f32> = (0..matrix.elements()).map(|i| (i as f32 * 3.0).cos() * 9.0).collect();
    let mut keys = Buffer::from_slice(&device, &first).unwrap();
    let mut plan = Plan::<f32>::new(&device, matrix, Variant::Rows).unwrap();
    let mut out = plan.allocate().unwrap();
    let (graph, ()) = stream
        .capture(|stream| {
            plan.quantize(stream, &keys, &mut out).map_err(|error| match error {
                int8::Error::Device(error) => error,
                other => panic!("{other}"),
            })
        })
        .unwrap();
    assert_eq!(graph.len(), 4, "a fill, the maxima, the scales, the codes");
    let exec = graph.instantiate().unwrap();
    for values in [&second, &first] {
        keys.write(0, values).unwrap();
        // SAFETY: the plan, its buffers and the keys live and are unchanged.
        unsafe { exec.launch(&stream) }.unwrap();
        stream.synchronize().unwrap();
        let expected = implementations::simd(values, matrix, false);
        assert_eq!(out.codes.to_vec().unwrap(), expected.codes);
    }
}

#[test]
fn the_first_nonfinite_value_is_found_wherever_it_is() {
    let device = Device::cpu(EmuOptions::default());
    let stream = Stream::new(&device).unwrap();
    for (tokens, channels) in [(1, 1), (3, 5), (7, 8), (5, 3)] {
        let matrix = Matrix::new(tokens, channels).unwrap();
        let mut plan = Plan::<f32>::new(&device, matrix, Variant::Naive).unwrap();
        let clean = vec![f32::MAX; matrix.elements()];
        let keys = Buffer::from_slice(&device, &clean).unwrap();
        assert_eq!(plan.first_nonfinite(&stream, &keys).unwrap(), None);
        for at in 0..matrix.elements() {
            let mut bad = clean.clone();
            bad[at] = if at % 2 == 0 { f32::NAN } else { f32::NEG_INFINITY };
            bad[matrix.elements() - 1] = f32::INFINITY;
            let keys = Buffer::from_slice(&device, &bad).unwrap();
            assert_eq!(plan.first_nonfinite(&stream, &keys).unwrap(), Some(at), "{matrix}");
            assert_eq!(int8::cpu::first_nonfinite(&bad), Some(at));
        }
    }
}

#[test]
fn looking_for_a_value_while_capturing_is_refused_before_anything_is_recorded() {
    let device = Device::cpu(EmuOptions::default());
    let stream = Stream::new(&device).unwrap();
    let mut plan = Plan::<f32>::new(&device, Matrix::new(2, 2).unwrap(), Variant::Naive).unwrap();
    let keys = Buffer::from_slice(&device, &[1f32; 4]).unwrap();
    let (graph, error) =
        stream.capture(|stream| Ok(plan.first_nonfinite(stream, &keys).unwrap_err().to_string())).unwrap();
    assert!(error.contains("is not possible while the stream captures"), "{error}");
    assert!(graph.is_empty());
}
