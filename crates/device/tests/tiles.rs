//! Tensor maps of buffers on the CPU: what they are refused for, and what the checks of a device see of the
//! memory that they lead to.

use ferrokv_device::{Buffer, Device, Error, Stream};
use simt::emu::{EmuOptions, Fault, FaultKind, TileMistake};
use simt::{
    Global, GlobalMut, LaunchShape, Mbarrier, Shared, SharedPlan, Swizzle, TensorMap, TensorMapError,
    TensorMapShape, bulk, kernel, thread,
};

const fn layout() -> (Shared<u32>, Shared<Mbarrier>, u32) {
    let mut plan = SharedPlan::new();
    let (tile, full) = (plan.tile(64, Swizzle::None), plan.array(1));
    (tile, full, plan.bytes())
}

/// Copies a box of 4 rows of 16 words at `column`, `row` from the tensor of map 0 to the same place in that
/// of map 1. One thread.
#[kernel(min_sm = 90)]
fn moved(maps: Global<TensorMap>, column: i32, row: i32) {
    let (tile, full, _) = layout();
    full.init(0, 1);
    bulk::fence_shared();
    maps.acquire(0);
    maps.acquire(1);
    full.arrive_and_expect(0, 256);
    tile.copy_tile(0, maps, 0, [column, row], full, 0);
    full.wait(0, 0);
    maps.copy_tile(1, [column, row], tile, 0);
    bulk::commit();
    bulk::wait::<0>();
}

/// 10 rows of 20 words.
fn shape() -> TensorMapShape {
    TensorMapShape::new::<u32, _>([20, 10], [16, 4])
}

fn run(stream: &Stream, maps: &Buffer<TensorMap>, column: i32, row: i32) -> Result<(), Error> {
    let shape = LaunchShape::new(1, 1).shared(layout().2);
    // SAFETY: the tensors of these tests live until their buffers are read.
    unsafe { stream.launch(&moved::kernel(), shape, moved::Args { maps: maps.global(), column, row }) }
}

fn fault(result: Result<(), Error>) -> Fault {
    match result {
        Err(Error::Fault(fault)) => *fault,
        other => panic!("{other:?}"),
    }
}

#[test]
fn boxes_move_between_buffers() {
    let device = Device::cpu(EmuOptions::thorough());
    let stream = Stream::new(&device).unwrap();
    let words: Vec<u32> = (0..240).collect();
    let x = Buffer::from_slice(&device, &words).unwrap();
    let mut y = Buffer::from_slice(&device, &[0u32; 200]).unwrap();
    let maps = [x.tensor_map(40, &shape()).unwrap(), y.tensor_map_mut(0, &shape()).unwrap()];
    let maps = Buffer::from_slice(&device, &maps).unwrap();
    run(&stream, &maps, 12, 8).unwrap();
    let expected: Vec<u32> = (0..200).map(|i| if i >= 160 && i % 20 >= 12 { 40 + i } else { 0 }).collect();
    assert_eq!(y.to_vec().unwrap(), expected);
}

#[test]
fn what_is_refused() {
    let device = Device::cpu(EmuOptions::default());
    let mut x = Buffer::<u32>::zeroed(&device, 200).unwrap();
    let refused = |result: Result<TensorMap, Error>| match result {
        Err(Error::TensorMap(error)) => error,
        other => panic!("{other:?}"),
    };
    assert!(x.tensor_map(0, &shape()).is_ok());
    assert_eq!(refused(x.tensor_map(4, &shape())), TensorMapError::Outside { needed: 800, bytes: 784 });
    assert!(matches!(refused(x.tensor_map(2, &shape())), TensorMapError::Address { .. }));
    assert!(matches!(x.tensor_map(201, &shape()), Err(Error::Range { .. })));
    // Rows that lie on each other are for reading alone.
    let slid = shape().with_strides(&[16]);
    assert!(x.tensor_map(0, &slid).is_ok());
    let error = refused(x.tensor_map_mut(0, &slid));
    assert_eq!(error, TensorMapError::Overlaps { dimension: 1, bytes: 16, inside: 80 });
    // So are rows that end within 16 bytes.
    let odd = TensorMapShape::new::<u32, _>([18, 10], [16, 4]).with_strides(&[80]);
    assert!(x.tensor_map(0, &odd).is_ok());
    assert_eq!(refused(x.tensor_map_mut(0, &odd)), TensorMapError::Written { bytes: 72 });
}

#[test]
fn tensors_are_memory_that_is_kept_account_of() {
    let device = Device::cpu(EmuOptions { memory_check: true, ..EmuOptions::default() });
    let stream = Stream::new(&device).unwrap();
    let mut x = Buffer::<u32>::new(&device, 200).unwrap();
    let mut y = Buffer::<u32>::new(&device, 200).unwrap();
    let maps = [x.tensor_map(0, &shape()).unwrap(), y.tensor_map_mut(0, &shape()).unwrap()];
    let maps = Buffer::from_slice(&device, &maps).unwrap();
    // Rows 0 to 3 alone.
    x.write(0, &[7; 80]).unwrap();
    let kind = fault(run(&stream, &maps, 0, 1)).kind;
    assert_eq!(kind, FaultKind::Unwritten { index: 80, bytes: 64 });
    run(&stream, &maps, 12, 0).unwrap();
    // What a box brought to `y` counts as written, and nothing else does.
    let back = [y.tensor_map(0, &shape()).unwrap(), x.tensor_map_mut(0, &shape()).unwrap()];
    let back = Buffer::from_slice(&device, &back).unwrap();
    run(&stream, &back, 12, 0).unwrap();
    let kind = fault(run(&stream, &back, 8, 0)).kind;
    assert_eq!(kind, FaultKind::Unwritten { index: 8, bytes: 48 });
    drop(y);
    let kind = fault(run(&stream, &maps, 12, 0)).kind;
    assert_eq!(kind, FaultKind::Freed { parameter: "maps" });
    // Maps that nobody wrote.
    let maps = Buffer::<TensorMap>::new(&device, 2).unwrap();
    let kind = fault(run(&stream, &maps, 0, 0)).kind;
    assert_eq!(kind, FaultKind::Unwritten { index: 0, bytes: 16 });
}

#[test]
fn a_map_that_is_none() {
    let device = Device::cpu(EmuOptions::default());
    let stream = Stream::new(&device).unwrap();
    let maps = Buffer::<TensorMap>::zeroed(&device, 2).unwrap();
    let fault = fault(run(&stream, &maps, 0, 0));
    assert_eq!(fault.kind, FaultKind::Tile(TileMistake::NoMap { index: 0 }));
    assert!(fault.to_string().contains("`Buffer::tensor_map`"), "{fault}");
}

/// Doubles every element; one thread each.
#[kernel]
fn doubled(y: GlobalMut<u32>) {
    let i = thread::index_1d();
    y.store(i, 2 * y.load(i));
}

#[test]
fn streams_that_meet_in_a_tensor() {
    let device = Device::cpu(EmuOptions { stream_check: true, ..EmuOptions::default() });
    let (first, second) = (Stream::new(&device).unwrap(), Stream::new(&device).unwrap());
    let x = Buffer::<u32>::zeroed(&device, 200).unwrap();
    let mut y = Buffer::<u32>::zeroed(&device, 200).unwrap();
    let maps = [x.tensor_map(0, &shape()).unwrap(), y.tensor_map_mut(0, &shape()).unwrap()];
    let maps = Buffer::from_slice(&device, &maps).unwrap();
    run(&first, &maps, 12, 8).unwrap();
    let twice = |elements| {
        let y = y.global_range_mut(elements).unwrap();
        // SAFETY: a thread for each element.
        unsafe { second.launch(&doubled::kernel(), LaunchShape::new(1, 8), doubled::Args { y }) }
    };
    let mut twice = twice;
    // Beside the box, and on it.
    twice(164..172).unwrap();
    assert!(matches!(twice(172..180), Err(Error::Unordered(_))));
}
