//! The certified system's storage: the kernel and the serial reference give the same bytes, and every stored
//! bound holds, in f64, against what was really lost.

mod chances;
mod judge;
mod properties;
mod writer;

use ferrokv::host::certified::cases::Input;
use ferrokv::host::certified::{
    Annotation, CertifiedElement, Geometry, HEAD_DIMS, Job, Layout, Problems, Rounding, TileLayout, Writer,
    reference,
};
use ferrokv::host::{Buffer, Device, Stream};
use ferrokv::simt::emu::EmuOptions;
use half::{bf16, f16};
use std::sync::OnceLock;

/// The devices to run on: the emulator, looking for races, and the GPU where there is one.
fn devices() -> &'static [Device] {
    static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();
    DEVICES.get_or_init(|| {
        let mut devices = vec![Device::cpu(EmuOptions::race_checked())];
        match Device::cuda(0, ferrokv::ptx()) {
            Ok(gpu) => devices.push(gpu),
            Err(error) => println!("without a GPU: {error}"),
        }
        devices
    })
}

/// Where in its sequence a block of a pool is.
fn place(block: u32) -> u32 {
    7 * block + 3
}

/// Rounded to the nearest, and by chance.
const ROUNDINGS: [Rounding; 2] = [Rounding::Nearest, Rounding::Stochastic { seed: 5 }];

/// Quantizes every block of two pools with the kernel; outputs start poisoned.
fn kernel<T: CertifiedElement>(
    device: &Device,
    geometry: Geometry,
    keys: &[T],
    values: &[T],
) -> (Vec<u8>, Vec<Annotation>, Problems) {
    let blocks = keys.len() / geometry.pool_elements(1);
    let stream = Stream::new(device).unwrap();
    let job = |block| Job::new(block, block, place(block));
    let jobs: Vec<Job> = (0..blocks as u32).map(job).collect();
    let (keys, values) =
        (Buffer::from_slice(device, keys).unwrap(), Buffer::from_slice(device, values).unwrap());
    let mut tiles = Buffer::<u8>::new(device, geometry.tile_bytes(blocks)).unwrap();
    let mut annotations = Buffer::<Annotation>::new(device, geometry.pairs(blocks)).unwrap();
    stream.fill_u8(&mut tiles, .., 0xa5).unwrap();
    stream.fill_u8(&mut annotations, .., 0xa5).unwrap();
    let mut writer = Writer::<T>::new(device, geometry, jobs.len()).unwrap();
    writer.write(&stream, &keys, &values, &jobs, &mut tiles, &mut annotations).unwrap();
    let problems = writer.take_problems(&stream).unwrap();
    (tiles.to_vec().unwrap(), annotations.to_vec().unwrap(), problems)
}

/// The kernel on every device against the reference, bit for bit; each sound block is judged.
fn agree<T: CertifiedElement>(geometry: Geometry, keys: &[T], values: &[T], sound: bool) {
    let layout = geometry.layout();
    let elements = layout.elements() as usize;
    let pairs = keys.chunks_exact(elements).zip(values.chunks_exact(elements));
    let rounding = geometry.rounding();
    let quantize = |(pair, (keys, values)): (usize, (&[T], &[T]))| {
        let (block, head) = (pair as u32 / geometry.kv_heads(), pair as u32 % geometry.kv_heads());
        reference::quantize(keys, values, layout, rounding, [place(block), head])
    };
    let expected: Vec<(Vec<u8>, Annotation)> = pairs.clone().enumerate().map(quantize).collect();
    for ((keys, values), (tile, annotation)) in pairs.zip(&expected) {
        if sound {
            judge::block(keys, values, layout, rounding, tile, *annotation);
        }
    }
    for device in devices() {
        let (tiles, annotations, problems) = kernel(device, geometry, keys, values);
        for (pair, (tile, annotation)) in expected.iter().enumerate() {
            let bytes = layout.bytes as usize;
            let what = format!("{} {geometry}, pair {pair}, on {:?}", T::NAME, device.kind());
            assert!(tiles[pair * bytes..][..bytes] == tile[..], "{what}: the tile");
            assert_eq!(annotations[pair], *annotation, "{what}");
        }
        assert_eq!(problems == Problems::NONE, sound, "{problems:?}");
    }
}

fn agree_on_every_input<T: CertifiedElement>() {
    for head_dim in HEAD_DIMS {
        for layout in Layout::ALL {
            let geometry = Geometry::new(2, head_dim).unwrap().with_layout(layout);
            for (input, rounding) in Input::ALL.into_iter().flat_map(|i| ROUNDINGS.map(|r| (i, r))) {
                let (keys, values) = (input.pool::<T>(geometry, 2, 3), input.pool::<T>(geometry, 2, 5));
                agree(geometry.with_rounding(rounding), &keys, &values, input.is_sound());
            }
        }
    }
}

#[test]
fn kernel_and_reference_agree_and_the_bounds_hold_f16() {
    agree_on_every_input::<f16>();
}

#[test]
fn kernel_and_reference_agree_and_the_bounds_hold_bf16() {
    agree_on_every_input::<bf16>();
}

#[test]
fn a_block_worked_out_by_hand() {
    // Keys 0, 17, …, 255 in every channel: σ = 1, z = 128, codes −128, −111, …, 127. Values 0 to 15 in every
    // group: scale 1, zero 0.
    let geometry = Geometry::new(1, 64).unwrap();
    let keys: Vec<f16> = (0..16 * 64).map(|i| f16::from_f32((i / 64 * 17) as f32)).collect();
    let values: Vec<f16> = (0..16 * 64).map(|i| f16::from_f32((i % 16) as f32)).collect();
    agree(geometry, &keys, &values, true);
    let (tile, annotation) =
        reference::quantize(&keys, &values, geometry.layout(), Rounding::Nearest, [0, 0]);
    for token in 0..16 {
        assert!(tile[token * 64..][..64].iter().all(|byte| *byte == token as u8 * 17));
    }
    let halves = |from: usize, count: usize| -> Vec<f32> {
        tile[from..from + 2 * count]
            .chunks_exact(2)
            .map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32())
            .collect()
    };
    assert_eq!(halves(16 * 64, 64), [1.0; 64], "σ");
    assert_eq!(halves(18 * 64, 64), [128.0; 64], "z");
    for token in 0..16 {
        for group in 0..4 {
            assert_eq!(
                tile[20 * 64 + token * 32 + group * 8..][..8],
                [0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe]
            );
        }
    }
    assert_eq!(halves(28 * 64, 64), [1.0; 64], "value scales");
    assert_eq!(halves(30 * 64, 64), [0.0; 64], "value zeros");
    // No error but what the bound allows for rounding: 2^-16 times ‖σ‖ = 8, and 2^-70.
    assert!(annotation.eps >= 0.0 && annotation.eps < 8.1 / 65536.0);
    assert!(annotation.eta >= 0.0 && annotation.eta <= 2f32.powi(-70));
    // ‖V‖² = 4·(0 + 1 + 4 + … + 225); ζ = 8·128 + 128·8.
    let close =
        |bound: f32, exact: f64| bound as f64 >= exact && bound as f64 <= exact * (1.0 + 2f64.powi(-14));
    assert!(close(annotation.nu, 4960f64.sqrt()), "{annotation:?}");
    assert!(close(annotation.zeta, 2048.0), "{annotation:?}");
}

/// Keys of three channels in the paper's layout: a range that no f16 scale has exactly, an offset that none
/// has as a zero, and one number.
#[test]
fn the_papers_scales_and_zeros_are_not_rounded_to_f16() {
    let geometry = Geometry::new(1, 64).unwrap().with_layout(Layout::Paper);
    let key = |token: usize, channel: usize| match channel {
        0 => token as f32,
        1 => 2048.0 + 2.0 * token as f32,
        _ => -0.3,
    };
    let keys: Vec<f16> = (0..16 * 64).map(|i| f16::from_f32(key(i / 64, i % 64))).collect();
    agree(geometry, &keys, &keys, true);
    let (tile, annotation) = reference::quantize(&keys, &keys, geometry.layout(), Rounding::Nearest, [0, 0]);
    let number = |at: usize| f32::from_le_bytes(*tile[at..].first_chunk().unwrap());
    assert_eq!(number(16 * 64), 15.0 / 255.0, "σ of the first channel");
    assert_eq!(number(20 * 64), 128.0f32.mul_add(15.0 / 255.0, 0.0), "its z");
    assert_eq!(number(16 * 64 + 4), 30.0 / 255.0, "σ of the second");
    assert_eq!(number(20 * 64 + 4), 128.0f32.mul_add(30.0 / 255.0, 2048.0), "its z");
    assert_eq!([number(16 * 64 + 8), number(20 * 64 + 8)], [0.0, f16::from_f32(-0.3).to_f32()]);
    // Half a step of two channels is all there is; in f16 the second one's z alone is up to one off.
    assert!(annotation.eps < (7.5f32.powi(2) + 15.0f32.powi(2)).sqrt() / 255.0 * 1.01, "{annotation:?}");
}

/// What the kernels cannot multiply is refused in both layouts, whatever f32 could hold.
#[test]
fn keys_beyond_f16_are_a_problem_in_both_layouts() {
    for layout in Layout::ALL {
        let geometry = Geometry::new(1, 64).unwrap().with_layout(layout);
        let mut keys = vec![bf16::from_f32(1.0); 16 * 64];
        keys.iter_mut().skip(7).step_by(64).for_each(|key| *key = bf16::from_f32(70000.0));
        let values = vec![bf16::from_f32(1.0); 16 * 64];
        for device in devices() {
            let (_, annotations, problems) = kernel(device, geometry, &keys, &values);
            assert_eq!(annotations[0].eps, f32::INFINITY);
            assert!(problems.key_range != u64::MAX && problems.key_not_finite == u64::MAX, "{problems:?}");
            let error = geometry.verdict(problems).unwrap_err().to_string();
            assert!(
                error.contains("key") && error.contains("channel 7") && error.contains("beyond f16"),
                "{error}"
            );
        }
    }
}

#[test]
fn a_tile_is_32_or_36_bytes_a_channel_and_its_parts_touch() {
    for (head_dim, kind) in HEAD_DIMS.into_iter().flat_map(|d| Layout::ALL.map(|kind| (d, kind))) {
        let layout = TileLayout::new(head_dim, kind);
        let metadata = if kind == Layout::Paper { 4 } else { 2 };
        let mut owners = vec![0u32; layout.bytes as usize];
        let mut own = |at: u32, bytes: u32| (at..at + bytes).for_each(|byte| owners[byte as usize] += 1);
        for token in 0..16 {
            (0..head_dim).for_each(|channel| own(layout.key_code(token, channel), 1));
            (0..head_dim).step_by(2).for_each(|channel| {
                assert_eq!(layout.value_code(token, channel), layout.value_code(token, channel + 1));
                own(layout.value_code(token, channel), 1);
            });
            (0..head_dim / 16).for_each(|group| {
                own(layout.value_scale(token, group), 2);
                own(layout.value_zero(token, group), 2);
            });
        }
        (0..head_dim).for_each(|channel| {
            own(layout.key_scale(channel), metadata);
            own(layout.key_zero(channel), metadata);
        });
        assert_eq!(layout.bytes, (28 + 2 * metadata) * head_dim);
        assert!(owners.iter().all(|owners| *owners == 1), "head_dim {head_dim}");
    }
}
