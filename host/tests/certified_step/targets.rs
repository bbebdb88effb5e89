//! Bounds are those of the tensor cores that a step runs on.

use super::*;
use ferrokv::simt::emu::Target;

/// On sm_80 sixteen products are two sums that keep a bit less: what tensor cores lose is bounded by twice as
/// much, all else of a bound by the same.
#[test]
fn bounds_grow_with_what_older_tensor_cores_lose() {
    let sequences = [(Input::Sharp, 260), (Input::Normal, 513), (Input::Outlier, 90)];
    let batch = Batch::<f16>::new(problem(3, 3, 2, 64, 520), &sequences, 7, 3);
    let truth = exact(&batch);
    for (name, policy) in [("dense", DENSE), ("choosing", CHOOSING), ("sound", Policy::SOUND)] {
        let [new, old] = [90, 80].map(|sm| {
            let device = Device::cpu(EmuOptions { target: Target::new(sm), ..EmuOptions::default() });
            let mut trial = loaded(&device, &batch);
            let returned = step(&mut trial, &policy);
            judge(&batch, &truth, &returned, &format!("{name} on sm_{sm}"));
            returned.certificates
        });
        for (new, old) in new.iter().zip(&old) {
            let grown = |of: f32, before: f32| of > 1.1 * before && of <= 2.01 * before;
            assert!(grown(old.e_round, new.e_round), "{name}: {old:?} after {new:?}");
            if name == "dense" {
                assert!(grown(old.e_key, new.e_key), "{name}: {old:?} after {new:?}");
            }
        }
    }
}
