//! The file that a scheme needs, made by its own calibration from made-up keys and values.

use host::kv::calibration::Material;
use host::kv::{Geometry, Selection};
use host::tensor_file::Target;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A scheme as `--kv` names it, ready to be opened for these heads: with a file, if it needs one that `text`
/// does not give.
pub fn ready(text: &str, geometry: Geometry) -> Selection {
    static FILES: AtomicUsize = AtomicUsize::new(0);
    let given: Selection = text.parse().expect("a scheme");
    let Some(of) = given.calibration().expect("settings of a calibration") else { return given };
    let material = Material::made_up(geometry, 160, 7);
    let artifact = of.calibrate(&material, &|_, _| ControlFlow::Continue(()));
    let number = FILES.fetch_add(1, Ordering::Relaxed);
    let name = format!("{}-{}-{number}.safetensors", of.scheme().name, std::process::id());
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let target = Target::new(&path, true, None).expect("a folder");
    artifact.and_then(|artifact| artifact.write(target)).expect("an artifact");
    given.with_artifact(&path).expect("a scheme with its file")
}
