//! The cases of tensor copies.

use crate::check::{Case, CaseError, OutputBuffer, poisoned};
use crate::{Buffer, Device, Stream};
use half::{bf16, f16};
use kernels_gpu::mix;
use kernels_gpu::probe::tiles::{COORDINATES, THREADS, boxes, boxes_back, layout};
use simt::{Kernel, LaunchShape, Swizzle, TensorMap, TensorMapShape, TileElement};

/// Words ahead of the tensor, so that it does not begin where its buffer does.
const AHEAD: usize = 12;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    // Rank 1: whole inside, over either end, all outside on either side.
    let ends = [[0], [5], [-3], [90], [-16], [100], [-1000], [84]];
    both(&mut cases, "1 u32", shape::<u32, 1>([100], [16]), &ends);
    both(&mut cases, "1 u8", shape::<u8, 1>([100], [16]), &ends);
    both(&mut cases, "1 u8 whole", shape::<u8, 1>([112], [16]), &ends);
    both(&mut cases, "1 f64", shape::<f64, 1>([100], [16]), &ends);
    both(&mut cases, "1 u16 256", shape::<u16, 1>([1000], [256]), &[[0], [-256], [-100], [900], [513]]);
    // Rank 2, over all four sides and corners.
    let sides = [[0, 0], [13, 3], [-5, 2], [0, -4], [-7, -1], [90, 16], [-32, 0], [3, 20], [1, 7], [77, -2]];
    for swizzle in [Swizzle::None, Swizzle::B32, Swizzle::B64, Swizzle::B128] {
        let row = if swizzle == Swizzle::None { 48 } else { swizzle.row() };
        let name = |element: &str| format!("2 {element} {swizzle:?}");
        let halves = shape::<f16, 2>([104, 20], [row / 2, 11]).with_swizzle(swizzle);
        both(&mut cases, &name("f16"), halves, &sides);
        both(&mut cases, &name("f16 rows apart"), halves.with_strides(&[240]), &sides);
        let bytes = shape::<u8, 2>([112, 20], [row, 16]).with_swizzle(swizzle);
        both(&mut cases, &name("i8"), bytes, &sides);
        let words = shape::<u32, 2>([100, 20], [row / 4, 9]).with_swizzle(swizzle);
        both(&mut cases, &name("u32"), words, &sides);
        let doubles = shape::<u64, 2>([96, 20], [row / 8, 33]).with_swizzle(swizzle);
        both(&mut cases, &name("u64"), doubles, &sides);
        // Three dimensions, the outer two in either order.
        let cube = shape::<bf16, 3>([40, 5, 6], [row / 2, 3, 4]).with_swizzle(swizzle);
        let corners = [[0, 0, 0], [4, -1, 2], [-9, 3, 4], [24, 2, -3], [0, 5, 0], [-1, -2, -3]];
        both(&mut cases, &format!("3 bf16 {swizzle:?}"), cube, &corners);
        let turned = cube.with_strides(&[480, 80]);
        both(&mut cases, &format!("3 bf16 turned {swizzle:?}"), turned, &corners);
    }
    let corners = [[0, 0, 0, 0], [-2, 1, -1, 2], [9, 3, 2, -1], [4, -3, 2, 1], [20, 0, 0, 0]];
    both(&mut cases, "4 f32", shape::<f32, 4>([12, 5, 4, 3], [8, 4, 3, 2]), &corners);
    let rows = shape::<f32, 4>([36, 5, 4, 3], [32, 4, 3, 2]).with_swizzle(Swizzle::B128);
    both(&mut cases, "4 f32 B128", rows, &corners);
    let corners = [[0, 0, 0, 0, 0], [-3, 1, -1, 1, -1], [7, -2, 1, -1, 2], [1, 2, 2, 1, 0], [0, 0, 0, 0, 3]];
    both(&mut cases, "5 u16", shape::<u16, 5>([24, 4, 3, 2, 3], [16, 3, 2, 2, 2]), &corners);
    let rows = shape::<u16, 5>([40, 4, 3, 2, 3], [32, 3, 2, 2, 2]).with_swizzle(Swizzle::B64);
    both(&mut cases, "5 u16 B64", rows, &corners);
    cases
}

/// A shape of `RANK` dimensions, which is said with the elements here.
fn shape<T: TileElement, const RANK: usize>(extents: [u64; RANK], tile: [u32; RANK]) -> TensorMapShape {
    TensorMapShape::new::<T, RANK>(extents, tile)
}

/// A case for each direction.
fn both<const RANK: usize>(
    cases: &mut Vec<Case>,
    label: &str,
    shape: TensorMapShape,
    corners: &[[i32; RANK]],
) {
    let words = shape.tile_bytes() / 4;
    let launch = move |boxes: usize| LaunchShape::new(boxes as u32, THREADS).shared(layout(words).bytes);
    // Along rows a box begins at a multiple of 16 bytes.
    let step = 16 / shape.strides()[0] as i32;
    let aligned = |mut corner: [i32; RANK]| {
        corner[0] -= corner[0].rem_euclid(step);
        corner
    };
    let corners: Vec<[i32; RANK]> = corners.iter().copied().map(aligned).collect();
    let (kernel, kernel_back) = kernels::<RANK>();

    let at = corners.clone();
    let run = move |device: &Device| -> Result<_, CaseError> {
        let stream = Stream::new(device)?;
        let (_tensor, maps) = tensor(device, &shape)?;
        let corners = Buffer::from_slice(device, &padded(&at))?;
        let mut out = poisoned::<u32>(&stream, at.len() * words as usize)?;
        let args =
            boxes::Args { maps: maps.global(), corners: corners.global(), out: out.global_mut(), words };
        // SAFETY: each block writes its own words of the output; the tensor lives until they are downloaded.
        unsafe { stream.launch(&kernel, launch(at.len()), args) }?;
        Ok(vec![OutputBuffer::download("out", &out)?])
    };
    cases.push(Case::new(kernel.info(), format!("{label}, {} boxes", corners.len()), run).race_checked());

    let row = shape.extents()[0] * shape.strides()[0];
    if !row.is_multiple_of(16) {
        // Copies to it would write behind its rows: there is no such map.
        return;
    }
    // Boxes that do not overlap, and that begin inside.
    let mut apart: Vec<[i32; RANK]> = Vec::new();
    for corner in corners.iter().map(|corner| corner.map(|coordinate| coordinate.max(0))) {
        let overlaps =
            |other: &[i32; RANK]| (0..RANK).all(|i| corner[i].abs_diff(other[i]) < shape.tile()[i]);
        if !apart.iter().any(overlaps) {
            apart.push(corner);
        }
    }
    let label = format!("{label}, {} boxes", apart.len());
    let run = move |device: &Device| -> Result<_, CaseError> {
        let stream = Stream::new(device)?;
        let (tensor, maps) = tensor(device, &shape)?;
        let corners = Buffer::from_slice(device, &padded(&apart))?;
        let args = boxes_back::Args { maps: maps.global(), corners: corners.global(), words, seed: 3 };
        // SAFETY: the blocks' boxes are apart; the tensor lives until it is downloaded.
        unsafe { stream.launch(&kernel_back, launch(apart.len()), args) }?;
        Ok(vec![OutputBuffer::download("tensor", &tensor)?])
    };
    cases.push(Case::new(kernel_back.info(), label, run).race_checked());
}

/// A tensor of words that say where they are, and two maps of it: to write by, and to read by.
fn tensor(device: &Device, shape: &TensorMapShape) -> Result<(Buffer<u32>, Buffer<TensorMap>), CaseError> {
    let words = AHEAD + shape.bytes().div_ceil(4) as usize + AHEAD;
    let words: Vec<u32> = (0..words as u64).map(|i| mix(i) as u32).collect();
    let mut tensor = Buffer::from_slice(device, &words)?;
    let to_read = tensor.tensor_map(AHEAD, shape)?;
    let whole = (shape.extents()[0] * shape.strides()[0]).is_multiple_of(16);
    let maps = [if whole { tensor.tensor_map_mut(AHEAD, shape)? } else { to_read }, to_read];
    Ok((tensor, Buffer::from_slice(device, &maps)?))
}

fn padded<const RANK: usize>(corners: &[[i32; RANK]]) -> Vec<i32> {
    let wide = |corner: &[i32; RANK]| {
        std::array::from_fn::<_, { COORDINATES as usize }, _>(|i| corner.get(i).copied().unwrap_or(0))
    };
    corners.iter().flat_map(wide).collect()
}

fn kernels<const RANK: usize>() -> (Kernel<boxes::Args>, Kernel<boxes_back::Args>) {
    match RANK {
        1 => (boxes::kernel::<1>(), boxes_back::kernel::<1>()),
        2 => (boxes::kernel::<2>(), boxes_back::kernel::<2>()),
        3 => (boxes::kernel::<3>(), boxes_back::kernel::<3>()),
        4 => (boxes::kernel::<4>(), boxes_back::kernel::<4>()),
        _ => (boxes::kernel::<5>(), boxes_back::kernel::<5>()),
    }
}
