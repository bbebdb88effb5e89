//! Steps that restore all tokens, beside those from codes.

use super::super::restored::Restored;
use super::super::{Handles, Tables};
use super::{Ran, STEP, Setting, Step, device, run};
use crate::attention::inputs::Input;
use crate::{Buffer, Stream};

/// A step over what a run has stored.
fn restored(ran: &Ran, slices: bool) -> Vec<f32> {
    let device = device();
    let stream = Stream::new(&device).expect("a stream");
    let problem = ran.batch.problem;
    let tables = Tables::new(&device, &ran.books, 0).expect("tables");
    let mut restored = Restored::new(&device, ran.store.problem()).expect("kernels");
    let queries = Buffer::from_slice(&device, &ran.batch.queries).expect("a buffer");
    let rows = problem.dense().query_rows() * problem.head_dim as usize;
    let mut output = Buffer::<f32>::from_slice(&device, &vec![f32::NAN; rows]).expect("a buffer");
    let handles =
        Handles { queries: queries.global(), lengths: ran.lengths.global(), output: output.global_mut() };
    let step = (handles, &*ran.batch.lengths);
    let of = |stages| {
        // SAFETY: host memory of this device, which is there until the stream was waited for.
        unsafe { restored.run_on(&stream, slices, (&ran.store, &tables), step, stages) }.expect("a step");
        stream.synchronize().expect("done");
        output.to_vec().expect("read")
    };
    let mut of = of;
    assert!(of(1).iter().all(|x| x.is_nan()), "the first stage attends to nothing");
    of(2)
}

/// Both attend to the same numbers, so that their outputs are as near as rounding leaves them: weights of
/// attention from codes have 11 bits, its queries 16, and dense attention's weights have more.
#[test]
fn restored_tokens_give_what_codes_give() {
    for head_dim in [64, 128] {
        for step in [
            Step { lengths: &[159, 1, 80], inputs: &[Input::Normal], ..STEP },
            Step { lengths: &[70], inputs: &[Input::Normal], group: 7, by_head: true, ..STEP },
        ] {
            let setting = Setting { recent: step.recent, sink: step.sink, ..Setting::DEFAULT };
            let ran = run(step, setting, head_dim, true);
            let found = restored(&ran, true);
            let by_kernels = restored(&ran, false);
            assert!(found.iter().zip(&by_kernels).all(|(a, b)| a.to_bits() == b.to_bits()), "{head_dim}");
            let codes = ran.output.to_vec().expect("read");
            let size = |x: &[f32]| x.iter().map(|x| f64::from(x * x)).sum::<f64>().sqrt();
            let errors: Vec<f32> = found.iter().zip(&codes).map(|(a, b)| a - b).collect();
            let far = size(&errors) / size(&codes);
            assert!(far > 0.0 && far < 1.0 / 512.0, "{head_dim} {step:?}: {far}");
        }
    }
}
