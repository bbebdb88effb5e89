//! Keys and values of a model's layers, kept by any scheme.

use crate::device::{borrowed, ferrokv_device, load};
use crate::status::{Failure, Status, call, end, give, handle};
use crate::tensor::{Count, buffer, ferrokv_tensor, tensor};
use half::f16;
use host::kv::{Capacity, Chunk, Geometry, KvCache, New, Rotated, Selection};
use host::{Buffer, Device, SYSTEMS, Stream};
use std::ffi::{CStr, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

/// Layers and heads that a cache is for, and what it has room for.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ferrokv_cache_extents {
    /// Layers of the model.
    pub layers: u32,
    /// Query heads.
    pub q_heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Channels of a head.
    pub head_dim: u32,
    /// Tokens that a sequence may grow to.
    pub max_tokens: u32,
    /// Sequences that there is room for.
    pub sequences: u32,
}

/// A cache.
pub struct ferrokv_cache {
    device: Device,
    state: Mutex<State>,
}

struct State {
    cache: Box<dyn KvCache>,
    /// Rows of the buffers of the chunk that was begun; 0 for none.
    rows: usize,
}

/// Runs `work` on a cache with the caller's stream.
///
/// # Safety
/// `cache` is null or a handle; `stream` as for [`Stream::from_raw`].
unsafe fn on(
    cache: *const ferrokv_cache,
    stream: *mut c_void,
    work: impl FnOnce(&mut State, &Device, &Stream) -> Result<(), Failure>,
) -> Status {
    // SAFETY: this function's contract.
    call(|| unsafe {
        let ferrokv_cache { device, state } = handle("cache", cache)?;
        let stream = borrowed(device, stream)?;
        let mut state = state.lock().map_err(|_| Failure::broken("cache"))?;
        work(&mut state, device, &stream)
    })
}

/// What a cache says of itself; `otherwise` for null.
///
/// # Safety
/// `cache` is null or a handle.
unsafe fn ask<R>(cache: *const ferrokv_cache, otherwise: R, what: impl FnOnce(&dyn KvCache) -> R) -> R {
    // SAFETY: this function's contract.
    let Ok(cache) = (unsafe { handle("cache", cache) }) else { return otherwise };
    let asked = catch_unwind(AssertUnwindSafe(|| cache.state.lock().ok().map(|state| what(&*state.cache))));
    asked.ok().flatten().unwrap_or(otherwise)
}

/// An empty cache by a scheme as `--kv` names it: `NAME[:PRESET][/OPTION=VALUE]…`. It has sequence 0, empty.
///
/// # Safety
/// `device` is null or a handle, `scheme` null or a string that ends in 0, `extents` and `out` null
/// or valid for a read and a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrokv_cache_create(
    device: *const ferrokv_device,
    scheme: *const c_char,
    extents: *const ferrokv_cache_extents,
    out: *mut *mut ferrokv_cache,
) -> Status {
    // SAFETY: this function's contract.
    unsafe {
        give(out, || {
            let device = handle("device", device)?.device.clone();
            let given =
                extents.as_ref().ok_or_else(|| Failure::argument("the extents are NULL; give them"))?;
            if scheme.is_null() {
                return Err(Failure::argument("the scheme is NULL; ferrokv_schemes lists what there is"));
            }
            let selection: Selection = CStr::from_ptr(scheme).to_string_lossy().parse()?;
            let ferrokv_cache_extents { layers, q_heads, kv_heads, head_dim, .. } = *given;
            let extents =
                [("layers", layers), ("q_heads", q_heads), ("kv_heads", kv_heads), ("head_dim", head_dim)];
            if let Some((what, _)) = extents.iter().find(|(_, extent)| *extent == 0) {
                return Err(Failure::argument(format!("{what} is 0; give the cache at least one")));
            }
            let wide = |n: u32| n as usize;
            let geometry = Geometry {
                layers: wide(layers),
                q_heads: wide(q_heads),
                kv_heads: wide(kv_heads),
                head_dim: wide(head_dim),
            };
            let capacity = Capacity { tokens: wide(given.max_tokens), sequences: wide(given.sequences) };
            // Keys come turned: a scheme that turns them itself says that it needs the model's rotation.
            let cache = selection.open(&device, geometry, None, capacity)?;
            let name = selection.scheme().name;
            for system in SYSTEMS {
                // Of the others' kernels a scheme uses those of exact attention.
                if system.name == "dense" || system.schemes.iter().any(|scheme| scheme.name == name) {
                    load(&device, (system.kernels)())?;
                }
            }
            Ok(ferrokv_cache { device, state: Mutex::new(State { cache, rows: 0 }) })
        })
    }
}

/// A sequence more, empty; its number is written to `sequence`. Waits for the stream.
///
/// # Safety
/// `cache` is null or a handle, `sequence` null or valid for a write, `stream` a stream of the
/// device that nothing else is put into during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrokv_cache_join(
    cache: *const ferrokv_cache,
    stream: *mut c_void,
    sequence: *mut u32,
) -> Status {
    // SAFETY: this function's contract.
    unsafe {
        on(cache, stream, |state, _, stream| {
            let out = place(sequence)?;
            stream.synchronize()?;
            state.rows = 0;
            *out = state.cache.join(stream)? as u32;
            Ok(())
        })
    }
}

/// A sequence more, with the tokens of `source`; its number is written to `sequence`. Waits for the stream.
///
/// # Safety
/// As [`ferrokv_cache_join`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrokv_cache_fork(
    cache: *const ferrokv_cache,
    stream: *mut c_void,
    source: u32,
    sequence: *mut u32,
) -> Status {
    // SAFETY: this function's contract.
    unsafe {
        on(cache, stream, |state, _, stream| {
            let out = place(sequence)?;
            stream.synchronize()?;
            state.rows = 0;
            *out = state.cache.fork(stream, source as usize)? as u32;
            Ok(())
        })
    }
}

/// Where a number is written to.
///
/// # Safety
/// `out` is null or valid for a write while the reference lives.
unsafe fn place<'a>(out: *mut u32) -> Result<&'a mut u32, Failure> {
    // SAFETY: this function's contract.
    unsafe { out.as_mut() }
        .ok_or_else(|| Failure::argument("the place for the sequence's number is NULL; give one"))
}

/// Forgets a sequence: its number is free. Waits for the stream.
///
/// # Safety
/// As [`ferrokv_cache_join`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrokv_cache_leave(
    cache: *const ferrokv_cache,
    stream: *mut c_void,
    sequence: u32,
) -> Status {
    // SAFETY: this function's contract.
    unsafe {
        on(cache, stream, |state, _, stream| {
            stream.synchronize()?;
            state.rows = 0;
            Ok(state.cache.leave(stream, sequence as usize)?)
        })
    }
}

/// Begins `chunk`.
fn begin(state: &mut State, stream: &Stream, chunk: Chunk) -> Result<(), Failure> {
    state.rows = 0;
    state.cache.begin(stream, chunk)?;
    state.rows = chunk.rows(state.cache.held().capacity.sequences);
    Ok(())
}

/// Begins a chunk of `tokens` tokens of one sequence, behind those that it has. May allocate and wait: not
/// for a capture.
///
/// # Safety
/// As [`ferrokv_cache_join`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrokv_cache_begin_prompt(
    cache: *const ferrokv_cache,
    stream: *mut c_void,
    sequence: u32,
    tokens: u32,
) -> Status {
    let chunk = Chunk::Prompt { sequence: sequence as usize, tokens: tokens as usize };
    // SAFETY: this function's contract.
    unsafe { on(cache, stream, |state, _, stream| begin(state, stream, chunk)) }
}

/// Begins a step: a token of every sequence that is there. Nothing happens on the device.
///
/// # Safety
/// As [`ferrokv_cache_join`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrokv_cache_begin_step(
    cache: *const ferrokv_cache,
    stream: *mut c_void,
) -> Status {
    // SAFETY: this function's contract.
    unsafe { on(cache, stream, |state, _, stream| begin(state, stream, Chunk::Step)) }
}

/// Adds the chunk's keys and values to a layer: `positions` \[rows\] int32, the place of each token in its
/// sequence (2^31 and beyond, negative numbers that is, for a row whose sequence is not there); `keys` and
/// `values` [rows, kv_heads, head_dim] float16, the keys turned by their positions. Rows are the chunk's
/// tokens; of a step, the sequences that there is room for.
///
/// # Safety
/// `cache` is null or a handle, the tensors null or valid for a read, `stream` a stream of the
/// device that nothing else is put into during the call. Until the launches have finished (for a capture:
/// each run of the graph) all tensors are there, and nothing else writes what is read or touches what is
/// written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrokv_cache_append(
    cache: *const ferrokv_cache,
    stream: *mut c_void,
    layer: u32,
    positions: *const ferrokv_tensor,
    keys: *const ferrokv_tensor,
    values: *const ferrokv_tensor,
) -> Status {
    // SAFETY: this function's contract.
    unsafe {
        on(cache, stream, |state, device, stream| {
            let (positions, keys, values) =
                (tensor("positions", positions)?, tensor("keys", keys)?, tensor("values", values)?);
            let rows = begun(state)?;
            let elements = Count::Exactly(rows * state.cache.geometry().kv_width());
            let positions: Buffer<u32> = buffer(device, "positions", &positions, Count::Exactly(rows))?;
            let keys: Buffer<f16> = buffer(device, "keys", &keys, elements)?;
            let values: Buffer<f16> = buffer(device, "values", &values, elements)?;
            let new = Rotated { positions: &positions, keys: &keys, values: &values };
            Ok(state.cache.append(stream, layer as usize, New::Rotated(new))?)
        })
    }
}

/// Rows of the chunk that was begun.
fn begun(state: &State) -> Result<usize, Failure> {
    match state.rows {
        0 => Err(Failure::state("no chunk was begun; begin a prompt or a step first")),
        rows => Ok(rows),
    }
}

/// Causal attention of the chunk's tokens in a layer that has their keys and values: `queries` [rows,
/// q_heads, head_dim] float16, `output` likewise in float32. Of a step, what rows without a sequence get is
/// unspecified.
///
/// # Safety
/// As [`ferrokv_cache_append`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrokv_cache_attend(
    cache: *const ferrokv_cache,
    stream: *mut c_void,
    layer: u32,
    queries: *const ferrokv_tensor,
    output: *const ferrokv_tensor,
) -> Status {
    // SAFETY: this function's contract.
    unsafe {
        on(cache, stream, |state, device, stream| {
            let (queries, output) = (tensor("queries", queries)?, tensor("output", output)?);
            let elements = Count::Exactly(begun(state)? * state.cache.geometry().query_width());
            let queries: Buffer<f16> = buffer(device, "queries", &queries, elements)?;
            let mut output: Buffer<f32> = buffer(device, "output", &output, elements)?;
            Ok(state.cache.attend(stream, layer as usize, &queries, &mut output)?)
        })
    }
}

/// The chunk is in all layers: from now on it counts. For a step that a graph has run: `begin_step` before it
/// and this behind it, and nothing between.
///
/// # Safety
/// `cache` is null or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrokv_cache_commit(cache: *const ferrokv_cache) -> Status {
    // SAFETY: this function's contract.
    call(|| unsafe {
        let mut state = handle("cache", cache)?.state.lock().map_err(|_| Failure::broken("cache"))?;
        begun(&state)?;
        state.cache.commit();
        state.rows = 0;
        Ok(())
    })
}

/// Waits for the stream, and fails if a key or value was appended that the scheme does not take.
///
/// # Safety
/// As [`ferrokv_cache_join`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrokv_cache_check(cache: *const ferrokv_cache, stream: *mut c_void) -> Status {
    // SAFETY: this function's contract.
    unsafe {
        on(cache, stream, |state, _, stream| {
            stream.synchronize()?;
            Ok(state.cache.check(stream)?)
        })
    }
}

/// Tokens of a sequence; -1 where none is there.
///
/// # Safety
/// `cache` is null or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrokv_cache_tokens(cache: *const ferrokv_cache, sequence: u32) -> i64 {
    // SAFETY: this function's contract.
    unsafe {
        ask(cache, -1, |cache| {
            let tokens = cache.held().sequences.get(sequence as usize).copied().flatten();
            tokens.map_or(-1, |tokens| tokens as i64)
        })
    }
}

/// Bytes of the device's memory that the committed tokens take in all layers.
///
/// # Safety
/// `cache` is null or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrokv_cache_bytes(cache: *const ferrokv_cache) -> u64 {
    // SAFETY: this function's contract.
    unsafe { ask(cache, 0, |cache| cache.bytes()) }
}

/// After how many steps what they launch is the same again: as many graphs take turns, each captured at its
/// own step.
///
/// # Safety
/// `cache` is null or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrokv_cache_period(cache: *const ferrokv_cache) -> u32 {
    // SAFETY: this function's contract.
    unsafe { ask(cache, 0, |cache| cache.period() as u32) }
}

/// Ends a cache: its launches have finished, and no graph that has them runs again.
///
/// # Safety
/// `cache` is null or a handle, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrokv_cache_destroy(cache: *mut ferrokv_cache) {
    // SAFETY: this function's contract.
    unsafe { end(cache) }
}
