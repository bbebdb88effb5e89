//! Memory and streams that another library owns: the same checks on both backends, and what is of one alone.

mod common;

use common::{add, cover, on_both};
use ferrokv_device::dlpack::{DlDevice, DlTensor, DlType};
use ferrokv_device::{BackendKind, Buffer, Device, Error, Stream};
use simt::emu::FaultKind;
use std::ptr::null_mut;

on_both! {
    a_launch_reaches_memory_of_others
    dropping_leaves_the_memory_to_its_owner
    lengths_are_checked_as_those_of_own_memory
    addresses_that_hold_no_elements_are_refused
    a_tensor_of_dlpack_is_a_buffer
    tensors_that_do_not_fit_are_refused
    a_foreign_stream_runs_copies_and_launches_in_order
    captures_are_for_the_owner_of_a_stream
}

/// What another library would hand over: the address of `owner`'s elements.
fn borrowed(device: &Device, owner: &mut Buffer<u32>) -> Buffer<u32> {
    let (address, len) = (owner.global_mut().address(), owner.len());
    // SAFETY: the owner outlives it in every test, which touches the memory between its waits only.
    unsafe { Buffer::from_raw(device, address, len) }.unwrap()
}

/// The legacy default stream, as a library that asks for no other has it.
fn default_stream(device: &Device) -> Stream {
    // SAFETY: null is always there; nothing else uses it in these tests.
    unsafe { Stream::from_raw(device, null_mut()) }.unwrap()
}

fn a_launch_reaches_memory_of_others(device: &Device) {
    let mut owner = Buffer::from_slice(device, &[5_u32; 300]).unwrap();
    let stream = default_stream(device);
    let mut tensor = borrowed(device, &mut owner);
    // SAFETY: 300 elements, each thread its own; waited for below.
    unsafe { stream.launch(&common::increment::kernel(), cover(300), add(&mut tensor, 7)) }.unwrap();
    stream.synchronize().unwrap();
    assert_eq!(owner.to_vec().unwrap(), [12; 300]);
}

fn dropping_leaves_the_memory_to_its_owner(device: &Device) {
    let mut owner = Buffer::from_slice(device, &[1_u32, 2, 3]).unwrap();
    for _ in 0..3 {
        let mut tensor = borrowed(device, &mut owner);
        tensor.write(1, &[9]).unwrap();
        assert_eq!(tensor.to_vec().unwrap(), [1, 9, 3]);
    }
    assert_eq!(owner.to_vec().unwrap(), [1, 9, 3]);
    // A fresh buffer takes other memory.
    let mut other = Buffer::from_slice(device, &[0_u32; 3]).unwrap();
    assert_ne!(other.global_mut().address(), owner.global_mut().address());
}

/// `owner`'s elements as DLPack describes them, [2, 3] from element 1 on.
fn described(device: &Device, owner: &mut Buffer<u32>, shape: &mut [i64; 2]) -> DlTensor {
    let (device_type, ordinal) =
        (if device.kind() == BackendKind::Cpu { 1 } else { 2 }, device.info().ordinal);
    DlTensor {
        data: std::ptr::with_exposed_provenance_mut(owner.global_mut().address() as usize),
        device: DlDevice { device_type, device_id: ordinal as i32 },
        ndim: 2,
        dtype: DlType { code: 0, bits: 32, lanes: 1 },
        shape: shape.as_mut_ptr(),
        strides: null_mut(),
        byte_offset: 4,
    }
}

fn a_tensor_of_dlpack_is_a_buffer(device: &Device) {
    let mut owner = Buffer::from_slice(device, &[5_u32; 8]).unwrap();
    let mut shape = [2, 3];
    let mut given = described(device, &mut owner, &mut shape);
    let stream = default_stream(device);
    // The second ones are those of a row that is not there twice: nobody takes a step of it.
    for (mut strides, mut extents) in [([3, 1], [2, 3]), ([77, 1], [1, 6]), ([1, -5], [6, 1])] {
        (given.shape, given.strides) = (extents.as_mut_ptr(), strides.as_mut_ptr());
        // SAFETY: six elements of the owner, which outlives it; nothing else touches them meanwhile.
        let mut tensor = unsafe { Buffer::<u32>::from_dlpack(device, &given) }.unwrap();
        assert_eq!(tensor.len(), 6);
        // SAFETY: 6 elements, each thread its own; waited for below.
        unsafe { stream.launch(&common::increment::kernel(), cover(6), add(&mut tensor, 7)) }.unwrap();
        stream.synchronize().unwrap();
    }
    assert_eq!(owner.to_vec().unwrap(), [5, 26, 26, 26, 26, 26, 26, 5]);
    // Of no dimension there is one element; of an extent of 0 none, wherever it is said to be.
    given.ndim = 0;
    (given.shape, given.strides) = (null_mut(), null_mut());
    // SAFETY: one element of the owner.
    assert_eq!(unsafe { Buffer::<i32>::from_dlpack(device, &given) }.unwrap().len(), 1);
    let mut none = [0, 3];
    (given.ndim, given.shape, given.data, given.byte_offset) = (2, none.as_mut_ptr(), null_mut(), 0);
    // SAFETY: no elements.
    assert!(unsafe { Buffer::<u32>::from_dlpack(device, &given) }.unwrap().is_empty());
}

fn tensors_that_do_not_fit_are_refused(device: &Device) {
    let mut owner = Buffer::from_slice(device, &[5_u32; 8]).unwrap();
    let mut shape = [2, 3];
    let right = described(device, &mut owner, &mut shape);
    let (mut turned, mut below, mut vast, mut gap) = ([1, 2], [2, -3], [i64::MAX, 3], [4, 1]);
    let elsewhere = DlDevice { device_type: 3 - right.device.device_type, device_id: 0 };
    let halves = DlType { code: 2, bits: 16, lanes: 1 };
    let pairs = DlType { lanes: 2, ..right.dtype };
    let wrong = [
        (DlTensor { strides: turned.as_mut_ptr(), ..right }, "has shape [2, 3] and strides [1, 2]"),
        (DlTensor { strides: gap.as_mut_ptr(), ..right }, "has shape [2, 3] and strides [4, 1]"),
        (DlTensor { shape: below.as_mut_ptr(), ..right }, "has shape [2, -3]"),
        (DlTensor { shape: vast.as_mut_ptr(), ..right }, "has shape [9223372036854775807, 3]"),
        (DlTensor { shape: null_mut(), ..right }, "has 2 dimensions and no shape"),
        (DlTensor { ndim: -1, ..right }, "has -1 dimensions"),
        (DlTensor { dtype: halves, ..right }, "is of float16, and uint32 is needed"),
        (DlTensor { dtype: pairs, ..right }, "is of int32 x 2, and uint32 is needed"),
        (DlTensor { device: elsewhere, ..right }, "and the device is"),
        (DlTensor { byte_offset: u64::MAX, ..right }, "begins 18446744073709551615 bytes behind"),
    ];
    for (tensor, text) in wrong {
        // SAFETY: refused.
        let error = unsafe { Buffer::<u32>::from_dlpack(device, &tensor) }.unwrap_err();
        assert!(matches!(error, Error::Tensor { .. }) && error.to_string().contains(text), "{error}");
    }
    // SAFETY: refused.
    let error =
        unsafe { Buffer::<u32>::from_dlpack(device, &DlTensor { byte_offset: 2, ..right }) }.unwrap_err();
    assert!(matches!(error, Error::Misaligned { .. }), "{error}");
}

fn lengths_are_checked_as_those_of_own_memory(device: &Device) {
    let mut owner = Buffer::from_slice(device, &[1_u32; 64]).unwrap();
    let address = owner.global_mut().address();
    // SAFETY: the first half of the owner's elements, which nothing else touches meanwhile.
    let mut half = unsafe { Buffer::<u32>::from_raw(device, address, 32) }.unwrap();
    assert!(matches!(half.read(30, &mut [0; 3]), Err(Error::Range { start: 30, end: 33, len: 32, .. })));
    assert!(matches!(half.global_range(..33), Err(Error::Range { .. })));
    if device.kind() == BackendKind::Cpu {
        let arguments = common::increment::Args { y: half.global_mut(), by: 1, n: 64 };
        let stream = default_stream(device);
        // SAFETY: past the length, which the emulator sees; the owner has memory there.
        let error = unsafe { stream.launch(&common::increment::kernel(), cover(64), arguments) }.unwrap_err();
        let Error::Fault(fault) = &error else { panic!("{error}") };
        assert!(matches!(fault.kind, FaultKind::OutOfBounds { .. }), "{error}");
        assert_eq!(owner.to_vec().unwrap()[32..], [1; 32]);
    }
    // SAFETY: refused.
    let error = unsafe { Buffer::<u32>::from_raw(device, address, usize::MAX / 2) }.unwrap_err();
    assert!(matches!(error, Error::TooLarge { .. }), "{error}");
}

fn addresses_that_hold_no_elements_are_refused(device: &Device) {
    let mut owner = Buffer::from_slice(device, &[0_u32; 8]).unwrap();
    let address = owner.global_mut().address();
    for (address, len) in [(address + 2, 1), (0, 1)] {
        // SAFETY: refused.
        let error = unsafe { Buffer::<u32>::from_raw(device, address, len) }.unwrap_err();
        assert!(matches!(error, Error::Misaligned { align: 4, .. }), "{error}");
    }
    // SAFETY: no element is there, and none is used.
    assert!(unsafe { Buffer::<u32>::from_raw(device, 0, 0) }.unwrap().is_empty());
    if device.kind() == BackendKind::Cuda {
        let host = [0_u32; 8];
        // SAFETY: refused.
        let error = unsafe { Buffer::<u32>::from_raw(device, host.as_ptr() as u64, 8) }.unwrap_err();
        assert!(matches!(error, Error::NotReached { .. }), "{error}");
    }
}

fn a_foreign_stream_runs_copies_and_launches_in_order(device: &Device) {
    let mut first = Buffer::from_slice(device, &[1_u32; 1000]).unwrap();
    let mut second = Buffer::<u32>::new(device, 1000).unwrap();
    let stream = default_stream(device);
    let mut tensor = borrowed(device, &mut first);
    for by in 1..=20 {
        // SAFETY: 1000 elements, each thread its own; waited for below.
        unsafe {
            stream.launch(&common::overlapping::increment::kernel(), cover(1000), add(&mut tensor, by))
        }
        .unwrap();
    }
    stream.copy(&tensor, .., &mut second, 0).unwrap();
    let mut found = vec![0; 1000];
    stream.download(&second, 0, &mut found).unwrap();
    assert_eq!(found, [211; 1000]);
    drop(stream);
    // Its work is done: the wait for the device needs not know the stream any more.
    assert_eq!(first.to_vec().unwrap(), [211; 1000]);
}

fn captures_are_for_the_owner_of_a_stream(device: &Device) {
    let stream = default_stream(device);
    let error = stream.capture(|_| Ok(())).unwrap_err();
    assert!(matches!(error, Error::ForeignStream { .. }), "{error}");
    assert!(!stream.is_capturing());
    stream.synchronize().unwrap();
}

/// A graph that another library captures, as PyTorch does: in the global mode, in which the driver refuses
/// what waits or allocates.
#[test]
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn launches_go_into_the_graph_of_the_streams_owner() {
    use cust::sys;
    let Some(device) = common::cuda() else { return };
    let mut owner = Buffer::from_slice(&device, &[0_u32; 256]).unwrap();
    let mut tensor = borrowed(&device, &mut owner);
    let (mut raw, mut graph, mut exec) = (null_mut(), null_mut(), null_mut());
    let ok = sys::CUresult::CUDA_SUCCESS;
    // SAFETY: valid for writes; the device has bound its context to this thread.
    unsafe { assert_eq!(sys::cuStreamCreate(&mut raw, 1), ok) };
    // SAFETY: just made; it is destroyed at the end, behind the last use.
    let stream = unsafe { Stream::from_raw(&device, raw.cast()) }.unwrap();
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    // SAFETY: the stream lives.
    unsafe { assert_eq!(sys::cuStreamBeginCapture_v2(raw, mode), ok) };
    assert!(stream.is_capturing());
    // The kernel is looked up for the first time: also in the capture.
    for _ in 0..2 {
        // SAFETY: 256 elements, each thread its own; the buffers outlive the graph.
        unsafe { stream.launch(&common::increment::kernel(), cover(256), add(&mut tensor, 3)) }.unwrap();
    }
    assert!(matches!(stream.synchronize(), Err(Error::Capturing { .. })));
    // To allocate and to free is no part of the graph, and does not break it.
    drop(Buffer::<u32>::new(&device, 8).unwrap());
    // SAFETY: as above, and valid for writes.
    unsafe {
        assert_eq!(sys::cuStreamEndCapture(raw, &mut graph), ok);
        assert_eq!(sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0), ok);
        for _ in 0..5 {
            assert_eq!(sys::cuGraphLaunch(exec, raw), ok);
        }
    }
    stream.synchronize().unwrap();
    assert_eq!(owner.to_vec().unwrap(), [30; 256]);
    drop(stream);
    // SAFETY: not used again.
    unsafe {
        assert_eq!(sys::cuGraphExecDestroy(exec), ok);
        assert_eq!(sys::cuGraphDestroy(graph), ok);
        assert_eq!(sys::cuStreamDestroy_v2(raw), ok);
    }
}
