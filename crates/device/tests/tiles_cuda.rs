//! What the driver is asked for a tensor map, seen from a stand-in for it that is compiled here; and a driver
//! that makes none.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod common;
mod stand_in;

use ferrokv_device::{Buffer, Device, Error, PtxImage};
use simt::{Swizzle, TensorMapShape, half::bf16};

/// It writes what it is asked for as the map.
const FAKE: &str = r#"
functions! {
    cuModuleLoadDataEx(out: *mut usize) { *out = 1; 0 };
    cuModuleGetFunction(out: *mut usize) { *out = 1; 0 };
    cuStreamCreate(out: *mut usize) { *out = 1; 0 };
    cuStreamSynchronize() 0;
    cuTensorMapEncodeTiled(
        map: *mut u64, format: u32, rank: u32, address: u64, extents: *const u64, strides: *const u64,
        tile: *const u32, steps: *const u32, interleave: u32, swizzle: u32, l2: u32, fill: u32
    ) {
        assert_eq!(map as usize % 64, 0);
        if format == 7 { return 801; }
        let small = [format, rank, interleave, swizzle, l2, fill].into_iter().rev();
        let words = [small.fold(0, |word, part| word << 8 | u64::from(part)), address];
        let words = words.into_iter()
            .chain((0..3).map(|i| *extents.add(i)))
            .chain((0..2).map(|i| *strides.add(i)))
            .chain((0..3).map(|i| u64::from(*tile.add(i)) << 32 | u64::from(*steps.add(i))));
        for (i, word) in words.enumerate() { map.add(i).write(word); }
        0
    };
}
"#;

#[test]
fn a_map_is_what_the_driver_writes() {
    let folder = tempfile::tempdir().unwrap();
    let library = stand_in::library(folder.path(), &stand_in::driver(FAKE));
    // SAFETY: the only test of this process, before any other thread of it runs.
    unsafe { std::env::set_var(cuda_lazy::DRIVER_VARIABLE, &library) };
    let device = Device::cuda(0, &[PtxImage::new(90, common::PTX)]).unwrap();
    let mut x = Buffer::<bf16>::new(&device, 1 << 20).unwrap();
    let shape = TensorMapShape::new::<bf16, _>([104, 20, 30], [64, 3, 2]);
    let shape = shape.with_strides(&[256, 256 * 20]).with_swizzle(Swizzle::B128);
    let map = x.tensor_map(8, &shape).unwrap();
    let small = u64::from_le_bytes([9, 3, 0, 3, 2, 0, 0, 0]);
    let tile = [64, 3, 2].map(|extent| extent << 32 | 1);
    // The stand-in's memory begins at 4096.
    let expected = [small, 4096 + 16, 104, 20, 30, 256, 5120, tile[0], tile[1], tile[2], 0, 0, 0, 0, 0, 0];
    assert_eq!(*map.words(), expected);
    assert_eq!(x.tensor_map_mut(8, &shape).unwrap(), map);
    assert!(matches!(x.tensor_map(1, &shape), Err(Error::TensorMap(_))));

    // As a driver without it answers.
    let floats = TensorMapShape::new::<f32, _>([64, 20], [16, 4]);
    let error = x.tensor_map(0, &floats).unwrap_err();
    assert!(matches!(error, Error::NoTensorMaps) && error.to_string().contains("12.0"), "{error}");
}
