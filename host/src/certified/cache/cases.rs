//! The cache's cases for `ferrokv check`: filled in every way, and stepped on with scratches of every size.

use super::super::cases::in_layout;
use super::super::{Annotation, Attended, HEAD_DIMS, Layout, Policy, Rounding, StepPlan, StepProblem};
use super::{BLOCK_TOKENS, CacheElement, CacheError, Extents, Geometry, Result, TieredCache};
use crate::attention::dense::sample::normal;
use crate::check::{Case, CaseError, Coverage, OutputBuffer, OutputElement};
use crate::{Buffer, Device, Stream};
use bytemuck::Zeroable;
use half::{bf16, f16};
use kernels_gpu::certified::{Certificate, mark, weigh};

/// How codes are rounded.
pub(super) const CHANCE: Rounding = Rounding::Stochastic { seed: 2 };

/// About N(0, 1), with a few channels that stand out; the same on every machine.
pub fn tokens<E: CacheElement>(geometry: Geometry, count: usize, seed: u64) -> Vec<E> {
    let elements = (geometry.kv_heads() * geometry.head_dim()) as usize;
    let dim = geometry.head_dim() as usize;
    (0..count * elements)
        .map(|i| {
            let channel = if i % dim % 29 == 3 { 6.0 } else { 1.0 };
            E::from_f32(normal(seed, i as u64) * channel)
        })
        .collect()
}

/// Queries that look like keys, so that some blocks stand out.
pub fn queries<E: CacheElement>(problem: StepProblem, seed: u64) -> Vec<E> {
    let count = (problem.sequences * problem.q_heads * problem.head_dim) as usize;
    (0..count).map(|i| E::from_f32(normal(seed, i as u64) * 1.5)).collect()
}

/// The cases of every instance; small ones of caches that fill a few blocks.
pub fn cases(coverage: Coverage) -> Vec<Case> {
    let mut cases = Vec::new();
    for head_dim in HEAD_DIMS {
        add_fill::<f16>(&mut cases, head_dim);
        add_fill::<bf16>(&mut cases, head_dim);
    }
    let long = Steps {
        layout: Layout::Compact,
        slots: (0, 0),
        group: 3,
        tokens: 158,
        max_tokens: 192,
        steps: 3,
        race_check: false,
    };
    // Looking for races takes as long as query heads and steps are many: hundreds of threads choose for each.
    let short =
        Steps { slots: (3, 2), group: 1, tokens: 63, max_tokens: 80, steps: 2, race_check: true, ..long };
    let paper = Steps { layout: Layout::Paper, slots: (40, 80), ..long };
    let all = [long, Steps { slots: (40, 80), ..long }, short, paper];
    let small = [Steps { slots: (0, 0), ..short }, short, Steps { layout: Layout::Paper, ..short }];
    let of_coverage: &[Steps] = if coverage == Coverage::Small { &small } else { &all };
    for &what in of_coverage {
        for head_dim in super::super::STEP_HEAD_DIMS {
            add_steps::<f16>(&mut cases, head_dim, what);
            add_steps::<bf16>(&mut cases, head_dim, what);
        }
    }
    for head_dim in super::super::STEP_HEAD_DIMS {
        add_residents::<f16>(&mut cases, head_dim);
        add_residents::<bf16>(&mut cases, head_dim);
    }
    cases.extend(super::turn_cases::cases());
    cases
}

/// Steps on three sequences: one, its fork, and one that fills its first block.
#[derive(Clone, Copy)]
struct Steps {
    /// The paper's chooses in each step.
    layout: Layout,
    /// Slots for keys and for values.
    slots: (u32, u32),
    /// Query heads of each KV head.
    group: u32,
    /// Tokens of the first sequence before the first step.
    tokens: usize,
    max_tokens: u32,
    steps: u64,
    race_check: bool,
}

fn add_fill<E: CacheElement + OutputElement>(cases: &mut Vec<Case>, head_dim: u32) {
    let Ok(geometry) = Geometry::new(3, head_dim) else { return };
    let geometry = geometry.with_rounding(CHANCE);
    let kernels = E::cache_kernels();
    let label = format!("{} heads=3 head_dim={head_dim} fill, fork, free, refuse", E::NAME);
    let run =
        move |device: &Device| -> std::result::Result<_, CaseError> { Ok(fill::<E>(device, geometry)?) };
    let case = Case::new(kernels.append.info(), label, run)
        .and(kernels.prefill.info())
        .and(kernels.inspect.info())
        .and(E::quantize_block(geometry).info());
    cases.push(case.race_checked());
}

fn add_steps<E: CacheElement + OutputElement>(cases: &mut Vec<Case>, head_dim: u32, what: Steps) {
    let Steps { layout, slots: (keys, values), group, tokens, steps: count, .. } = what;
    let (Ok(geometry), Some(kernels)) = (Geometry::new(2, head_dim), E::step_kernels(head_dim, layout))
    else {
        return;
    };
    // The paper's layout has no steps that ask for chances.
    let rounding = if layout == Layout::Paper { Rounding::Nearest } else { CHANCE };
    let geometry = geometry.with_layout(layout).with_rounding(rounding);
    let label = format!(
        "{} heads=2x{group} head_dim={head_dim} tokens={tokens} slots={keys},{values} steps={count}{}",
        E::NAME,
        in_layout(layout)
    );
    let run = move |device: &Device| -> std::result::Result<_, CaseError> {
        Ok(steps::<E>(device, geometry, what)?)
    };
    let case = Case::new(mark::kernel().info(), label, run).and(weigh::kernel().info());
    let [attend, replace, _] = kernels.infos();
    let case = match layout {
        Layout::Compact => case.and(kernels.carry(true).info()),
        Layout::Paper => case.and(attend).and(replace),
    };
    cases.push(if what.race_check { case.race_checked() } else { case });
}

fn add_residents<E: CacheElement + OutputElement>(cases: &mut Vec<Case>, head_dim: u32) {
    let (Ok(geometry), Some(kernels)) =
        (Geometry::new(2, head_dim), E::step_kernels(head_dim, Layout::Compact))
    else {
        return;
    };
    let geometry = geometry.with_rounding(CHANCE);
    let fills = E::cache_kernels();
    let label = format!("{} heads=2x3 head_dim={head_dim} resident sequences", E::NAME);
    let run = move |device: &Device| -> std::result::Result<_, CaseError> {
        Ok(residents::<E>(device, geometry, 3)?)
    };
    let case =
        Case::new(kernels.vouch().info(), label, run).and(fills.append.info()).and(fills.prefill.info());
    cases.push(case.race_checked());
}

/// Whatever can happen to a cache but a step.
fn fill<E: CacheElement + OutputElement>(device: &Device, geometry: Geometry) -> Result<Vec<OutputBuffer>> {
    let stream = Stream::new(device)?;
    let extents =
        Extents { geometry, blocks: 24, sequences: 4, max_tokens: 100, key_slots: 5, value_slots: 3 };
    let mut cache = TieredCache::<E>::new(device, extents)?.with_kernels();
    let elements = extents.token_elements();
    let [first, second] = [cache.start_sequence()?, cache.start_sequence()?];
    let input = |count: usize, seed: u64| Buffer::from_slice(device, &tokens::<E>(geometry, count, seed));
    cache.prefill(&stream, first, &input(39, 1)?, &input(39, 2)?)?;
    let mut refused = Vec::new();
    for step in 0..14u64 {
        let mut keys = tokens::<E>(geometry, 4, 100 + step);
        let mut values = tokens::<E>(geometry, 4, 200 + step);
        // One sequence's token is refused, the other's goes on.
        match step {
            7 => keys[elements + 5] = E::from_f32(f32::NAN),
            11 => values[elements - 1] = E::from_f32(f32::NEG_INFINITY),
            _ => {}
        }
        cache.append(&stream, &Buffer::from_slice(device, &keys)?, &Buffer::from_slice(device, &values)?)?;
        if matches!(step, 8 | 13) {
            refused.push(verdict(cache.check(&stream)));
        }
    }
    // Begins in a block, fills several, ends in one.
    cache.prefill(&stream, second, &input(45, 3)?, &input(45, 4)?)?;
    let mut bad = tokens::<E>(geometry, 20, 5);
    bad[7 * elements + 70] = E::from_f32(f32::INFINITY);
    let bad = Buffer::from_slice(device, &bad)?;
    refused.push(verdict(cache.prefill(&stream, second, &input(20, 6)?, &bad)));
    let fork = cache.fork(&stream, first)?;
    cache.free(&stream, first)?;
    let third = cache.start_sequence()?;
    cache.prefill(&stream, third, &input(17, 7)?, &input(17, 8)?)?;
    for step in 0..3 {
        cache.append(&stream, &input(4, 300 + step)?, &input(4, 400 + step)?)?;
    }
    cache.check(&stream)?;
    let mut outputs = contents(&cache, &stream)?;
    outputs.push(OutputBuffer::new("refused", refused));
    for (name, sequence) in [("second", second), ("fork", fork), ("third", third)] {
        let [keys, values] = cache.read(&stream, sequence)?;
        outputs.push(OutputBuffer::new(name, [keys, values].concat()));
    }
    Ok(outputs)
}

/// Grows and steps.
fn steps<E: CacheElement + OutputElement>(
    device: &Device,
    geometry: Geometry,
    what: Steps,
) -> Result<Vec<OutputBuffer>> {
    let Steps { slots: (key_slots, value_slots), group, tokens: first_tokens, max_tokens, steps, .. } = what;
    let stream = Stream::new(device)?;
    let extents = Extents { geometry, blocks: 40, sequences: 4, max_tokens, key_slots, value_slots };
    let mut cache = TieredCache::<E>::new(device, extents)?.with_kernels();
    let first = cache.start_sequence()?;
    let input = |count: usize, seed: u64| Buffer::from_slice(device, &tokens::<E>(geometry, count, seed));
    cache.prefill(&stream, first, &input(first_tokens, 1)?, &input(first_tokens, 2)?)?;
    let second = cache.start_sequence()?;
    cache.prefill(&stream, second, &input(15, 3)?, &input(15, 4)?)?;
    cache.fork(&stream, first)?;
    let problem = problem(extents, group);
    let policy =
        Policy { coverage: 0.7, max_keys: 4, expanded_keys: 6, value_tolerance: 0.02, ..Policy::SOUND };
    let layout = geometry.layout().kind;
    let policy = if layout == Layout::Paper { Policy { renew: 0, risk: 0.0, ..policy } } else { policy };
    let mut plan = StepPlan::<E>::with_layout(device, problem, &policy, layout)?;
    let mut out = plan.allocate()?;
    let mut outputs = Vec::new();
    for step in 0..steps {
        cache.append(&stream, &input(4, 10 + step)?, &input(4, 20 + step)?)?;
        let queries = Buffer::from_slice(device, &queries::<E>(problem, 30 + step / 2))?;
        cache.attend(&stream, &mut plan, &queries, &mut out)?;
        outputs.extend(attended(&out)?);
    }
    cache.check(&stream)?;
    outputs.extend(contents(&cache, &stream)?);
    Ok(outputs)
}

/// Two sequences that are resident at first, and what an append ends: steps over slots, then by a list.
fn residents<E: CacheElement + OutputElement>(
    device: &Device,
    geometry: Geometry,
    group: u32,
) -> Result<Vec<OutputBuffer>> {
    let stream = Stream::new(device)?;
    // Two blocks of each sequence, and a slot more.
    let slots = 2 * 2 * geometry.kv_heads();
    let extents = Extents {
        geometry,
        blocks: 10,
        sequences: 2,
        max_tokens: 80,
        key_slots: slots + 1,
        value_slots: slots,
    };
    let mut cache = TieredCache::<E>::new(device, extents)?.with_kernels();
    cache.begin_residence(&stream)?;
    let problem = problem(extents, group);
    let mut plan =
        StepPlan::<E>::new(device, problem, &Policy::SOUND)?.with_residents(cache.resident_tokens())?;
    let mut out = plan.allocate()?;
    let input = |count: usize, seed: u64| Buffer::from_slice(device, &tokens::<E>(geometry, count, seed));
    for (seed, count) in [(1, 31), (2, 14)] {
        let sequence = cache.start_sequence()?;
        cache.prefill(&stream, sequence, &input(count, seed)?, &input(count, seed + 10)?)?;
    }
    let mut outputs = Vec::new();
    for step in 0..3 {
        cache.append(&stream, &input(2, 30 + step)?, &input(2, 40 + step)?)?;
        let queries = Buffer::from_slice(device, &queries::<E>(problem, 50 + step))?;
        cache.attend(&stream, &mut plan, &queries, &mut out)?;
        outputs.extend(attended(&out)?);
        outputs.push(OutputBuffer::new("resident", vec![u32::from(cache.is_resident())]));
    }
    outputs.extend(contents(&cache, &stream)?);
    Ok(outputs)
}

/// Steps of all sequences, of so many query heads a KV head.
fn problem(extents: Extents, group: u32) -> StepProblem {
    let Extents { geometry, sequences, max_tokens, .. } = extents;
    let (kv_heads, head_dim) = (geometry.kv_heads(), geometry.head_dim());
    StepProblem { sequences, q_heads: group * kv_heads, kv_heads, head_dim, max_tokens }
}

/// What a step has written.
fn attended(out: &Attended) -> Result<[OutputBuffer; 3]> {
    let Attended { output, lse, certificates } = out;
    let certificates: Vec<Certificate> = certificates.to_vec()?;
    let words = bytemuck::cast_slice::<Certificate, u32>(&certificates).to_vec();
    Ok([
        OutputBuffer::download("output", output)?,
        OutputBuffer::download("lse", lse)?,
        OutputBuffer::new("certificates", words),
    ])
}

/// Everything that the device has of a cache and is defined: of the pools the full blocks of live sequences,
/// and no more is downloaded, so that a tool that looks for reads of what nobody wrote finds none.
pub(super) fn contents<E: CacheElement + OutputElement>(
    cache: &TieredCache<E>,
    stream: &Stream,
) -> Result<Vec<OutputBuffer>> {
    stream.synchronize()?;
    let geometry = cache.geometry();
    let (tile, pairs) = (geometry.tile_bytes(1) / 4, geometry.pairs(1));
    let (mut tiles, mut annotations) = (Vec::new(), Vec::new());
    let (mut some_tiles, mut some_annotations) = (vec![0u32; tile], vec![Annotation::zeroed(); pairs]);
    for row in cache.book.live() {
        let row = cache.book.row(row);
        for block in &row.blocks[..(row.length / BLOCK_TOKENS) as usize] {
            let block = *block as usize;
            cache.tiles.read(block * tile, &mut some_tiles)?;
            cache.annotations.read(block * pairs, &mut some_annotations)?;
            tiles.extend_from_slice(&some_tiles);
            annotations.extend_from_slice(&some_annotations);
        }
    }
    Ok(vec![
        OutputBuffer::new("tiles", tiles),
        OutputBuffer::new("annotations", bytemuck::cast_slice::<_, f32>(&annotations).to_vec()),
        OutputBuffer::download("table", &cache.table)?,
        OutputBuffer::download("lengths", &cache.lengths)?,
        OutputBuffer::download("limits", &cache.limits)?,
        OutputBuffer::download("near", &cache.near)?,
        OutputBuffer::download("directory", &cache.directory)?,
        OutputBuffer::download("problems", &cache.problems)?,
    ])
}

/// Where something was refused, in numbers.
pub(super) fn verdict(result: Result<()>) -> u32 {
    match result {
        Err(super::super::Error::Cache(CacheError::Refused { at, stopped, .. })) => {
            let kind = (at.what == "value") as u32;
            at.channel
                | at.kv_head << 8
                | at.token << 12
                | at.sequence << 24
                | kind << 28
                | (stopped as u32) << 29
        }
        Err(_) => u32::MAX,
        Ok(()) => 0,
    }
}
