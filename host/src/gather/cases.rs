//! The system's cases for `ferrokv check`: bounds over chunks of every cut, choices around every edge of
//! blocks, tiles and lists, ties, several sequences of different lengths.

use super::{
    Bounds, Chosen, FoldHandles, GatherElement, Handles, List, Plan, Ranking, Ranks, Score, Support,
};
use crate::attention::StepProblem;
use crate::attention::inputs::{Batch, Input, in_chunks, thrice};
use crate::check::{Case, CaseError, Coverage, OutputBuffer, OutputElement, poisoned};
use crate::{Device, Stream};
use half::{bf16, f16};
use kernels_gpu::attention::ROWS;
use kernels_gpu::gather::TILE_BLOCKS;

/// A batch and how much of it is kept.
#[derive(Clone, Copy)]
struct Step {
    lengths: &'static [u32],
    inputs: &'static [Input],
    kv_heads: u32,
    group: u32,
    head_dims: &'static [u32],
    max_tokens: u32,
    support: Support,
    ranking: Ranking,
    ranks: Ranks,
    race_check: bool,
}

const STEP: Step = Step {
    lengths: &[1, 15, 16, 17, 33, 64, 79, 80, 81, 150, 160],
    inputs: &[Input::Normal, Input::Ties, Input::Duplicates, Input::Wide],
    kv_heads: 2,
    group: 4,
    head_dims: &super::HEAD_DIMS,
    max_tokens: 160,
    support: Support { k: 3, block: 16, local: 2 },
    ranking: Ranking { score: Score::Bounds, list: List::KvHead },
    ranks: Ranks::One,
    race_check: false,
};

/// One long sequence among many.
const CROWD: [u32; 33] = {
    let mut lengths = [1; 33];
    lengths[7] = 2560;
    lengths
};

/// The steps of every instance, ranked by one thread block and by each.
fn steps(coverage: Coverage) -> Vec<Step> {
    let one = ranked_by_one(coverage);
    let each = one.iter().map(|step| Step { ranks: Ranks::Each, ..*step });
    one.iter().copied().chain(each).collect()
}

fn ranked_by_one(coverage: Coverage) -> Vec<Step> {
    let small = Step { lengths: &[150, 1, 97], kv_heads: 1, race_check: true, ..STEP };
    // Seventeen tiles that are kept are cut into two.
    let parts = Step {
        lengths: &[420, 1, 97],
        max_tokens: 432,
        support: Support { k: 14, block: 16, local: 2 },
        ..small
    };
    let wide = Step { group: 2 * ROWS, ..parts };
    // Several thread blocks score, and one of them ranks what all have found.
    let several = Step {
        lengths: &[2310, 40],
        kv_heads: 1,
        head_dims: &[64],
        max_tokens: 2560,
        support: Support { k: 7, block: 16, local: 1 },
        race_check: true,
        ..STEP
    };
    let fewer = Step { support: Support { k: 6, ..several.support }, ..several };
    // So many that tiles are ranked by their maxima ahead of scores; the first half of them, and all.
    let long = Step { lengths: &[16 * 1100, 16 * 520], max_tokens: 16 * 1100, ..several };
    let sifted = Step { support: Support { k: 40, ..several.support }, ..long };
    // Equal ones by the hundred, of which more are left than are counted.
    let tied = Step { inputs: &[Input::Duplicates], support: Support { k: 30, ..several.support }, ..long };
    let in_codes = Step { ranking: Ranking { score: Score::Codes, list: List::KvHead }, ..small };
    let by_means = Step { ranking: Ranking { score: Score::Mean, list: List::KvHead }, ..parts };
    let by_query = Step { ranking: Ranking { score: Score::Bounds, list: List::QueryHead }, ..small };
    if coverage == Coverage::Small {
        return vec![small, wide, several, fewer, sifted, tied, in_codes, by_means, by_query];
    }
    let mut steps = vec![small, wide, several, fewer, sifted, tied, in_codes, by_means, by_query, STEP];
    for list in [List::KvHead, List::QueryHead] {
        steps.push(Step { ranking: Ranking { score: Score::Mean, list }, ..STEP });
        steps.push(Step { ranking: Ranking { score: Score::Codes, list }, group: 11, ..STEP });
        let support = Support { k: 2, block: 64, local: 1 };
        let ranking = Ranking { score: Score::Bounds, list };
        steps.push(Step {
            lengths: &[1000, 129, 641],
            group: 11,
            max_tokens: 1024,
            support,
            ranking,
            ..STEP
        });
    }
    // Few of many scores are looked at, by the maxima of sets of tiles, of tiles, and not at all.
    let ks: &[u32] = if coverage == Coverage::Full { &[40, 150, 400] } else { &[40] };
    for k in ks.iter().copied() {
        steps.push(Step {
            lengths: &[16 * 4000 - 3, 16 * 2000],
            inputs: &[Input::Normal, Input::Duplicates],
            kv_heads: 1,
            head_dims: &[64],
            max_tokens: 16 * 4000,
            support: Support { k, block: 16, local: 1 },
            ..STEP
        });
    }
    for group in [1, 7, 8, 11, 16] {
        steps.push(Step { lengths: &[159, 111], group, ..STEP });
    }
    for block in [32, 64, 128] {
        let support = Support { k: 2, block, local: 1 };
        steps.push(Step { lengths: &[1000, 129, 641], max_tokens: 1024, support, ..STEP });
    }
    let none = &[Input::Constant, Input::Huge, Input::Outlier];
    let odd = Step { lengths: &[900, 800, 530], inputs: none, max_tokens: 900, ..STEP };
    steps.extend([odd, Step { ranking: in_codes.ranking, ..odd }]);
    // One thread block for a sequence and KV head, each warp of it with several tiles.
    steps.push(Step { lengths: &CROWD, kv_heads: 8, group: 1, race_check: false, ..several });
    // Nothing but the first block and the last ones.
    let window = Support { k: 0, block: 16, local: 3 };
    steps.push(Step { lengths: &[160, 79, 48, 0], support: window, ..STEP });
    // More is asked for than there is, and as much.
    let all = Support { k: 1000, block: 16, local: 4 };
    steps.push(Step { lengths: &[160, 79], support: all, ..STEP });
    steps.push(Step { support: Support { k: 5, block: 16, local: 4 }, ..STEP });
    if coverage == Coverage::Full {
        // More blocks than there is shared memory for.
        let long = Support { k: 300, block: 16, local: 4 };
        steps.push(Step {
            lengths: &[140_000, 90_007],
            inputs: &[Input::Normal, Input::Duplicates],
            kv_heads: 1,
            max_tokens: 140_000,
            support: long,
            ..STEP
        });
    }
    steps
}

/// The cases of every instance.
pub(super) fn cases(coverage: Coverage) -> Vec<Case> {
    let mut cases = Vec::new();
    if coverage == Coverage::Huge {
        return cases;
    }
    for step in steps(coverage) {
        for head_dim in step.head_dims {
            add::<f16>(&mut cases, step, *head_dim);
            add::<bf16>(&mut cases, step, *head_dim);
        }
    }
    cases
}

fn add<E: GatherElement + OutputElement>(cases: &mut Vec<Case>, step: Step, head_dim: u32) {
    let Step { group, kv_heads, support, ranking, ranks, .. } = step;
    let of_list = group / ranking.lists(group);
    let row_groups = of_list.div_ceil(ROWS);
    let kernel = match ranks {
        Ranks::Each => E::each_kernels(head_dim, row_groups).map(|(_, kernel, _)| kernel.info()),
        Ranks::One => E::select_kernel(head_dim, row_groups).map(|kernel| kernel.info()),
    };
    let Some(kernel) = kernel else { return };
    if ranking.score == Score::Codes && (!E::IS_F16 && of_list > ROWS || head_dim > 128) {
        return;
    }
    let lengths = step.lengths.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let Support { k, block, local } = support;
    let Ranking { score, list } = ranking;
    let label = format!(
        "heads={}/{kv_heads} k={k} block={block} local={local} {score:?} {list:?} of {}{}: {lengths}",
        group * kv_heads,
        step.max_tokens,
        if ranks == Ranks::Each { " by each" } else { "" }
    );
    let case = Case::new(kernel, label, move |device| run::<E>(device, step, head_dim));
    let case = case.and(match score {
        Score::Bounds => E::fold_kernel().info(),
        Score::Codes => E::squeeze_kernel().info(),
        Score::Mean => E::average_kernel().info(),
    });
    let case = match E::each_kernels(head_dim, row_groups).filter(|_| ranks == Ranks::Each) {
        Some((score, ..)) => case.and(score.info()),
        None => case,
    };
    cases.push(if step.race_check { case.race_checked() } else { case });
}

/// Bounds by chunks of several lengths, then a choice.
fn run<E: GatherElement>(device: &Device, step: Step, head_dim: u32) -> Result<Vec<OutputBuffer>, CaseError> {
    let Step { lengths, inputs, kv_heads, group, max_tokens, support, ranking, ranks, .. } = step;
    let sequences = lengths.len() as u32;
    let q_heads = group * kv_heads;
    let problem = StepProblem { sequences, q_heads, kv_heads, head_dim, max_tokens };
    let batch = Batch::<E>::in_turns(problem, inputs, lengths, 5, 9);
    let stream = Stream::new(device)?;
    let at = batch.upload(device)?;
    let mut bounds = Bounds::<E>::scored(device, problem, support, ranking.score)?;
    in_chunks(device, &thrice(lengths), |tokens, positions, lengths| -> Result<(), CaseError> {
        let handles = FoldHandles { keys: at.keys.global(), table: at.table.global(), positions, lengths };
        // SAFETY: buffers of the device; the table's entries up to each length are the pool's, and no
        // sequence has more new tokens.
        Ok(unsafe { bounds.fold_on(&stream, (0, tokens), false, handles) }?)
    })?;
    let mut plan = Plan::<E>::ranked(device, problem, support, ranking)?.with_ranks(ranks)?;
    let rows = (sequences * q_heads) as usize;
    let mut output = poisoned::<f32>(&stream, rows * head_dim as usize)?;
    let mut lse = poisoned::<f32>(&stream, rows)?;
    let handles = Handles {
        queries: at.queries.global(),
        keys: at.keys.global(),
        values: at.values.global(),
        bounds: bounds.words().global(),
        table: at.table.global(),
        lengths: at.lengths.global(),
        output: output.global_mut(),
        lse: lse.global_mut(),
    };
    plan.poison(&stream)?;
    // SAFETY: as above.
    unsafe { plan.step_on(&stream, false, &handles) }?;
    let mut scores = plan.scores().to_vec()?;
    let tiles = max_tokens.div_ceil(support.block).div_ceil(TILE_BLOCKS);
    for (row, scores) in scores.chunks_exact_mut((tiles * TILE_BLOCKS) as usize).enumerate() {
        let extent = support.extent(step.lengths[row / (kv_heads * plan.lists()) as usize]);
        let ranked = if extent.ranked_blocks() > 0 { 1..extent.local as usize } else { 0..0 };
        // What is not ranked is nobody's.
        for (block, score) in scores.iter_mut().enumerate() {
            *score = if ranked.contains(&block) { *score } else { 0 };
        }
    }
    let mut outputs =
        vec![OutputBuffer::download("bounds", bounds.words())?, OutputBuffer::new("scores", scores)];
    let [list, counts, entries, kept] = plan.chosen().outputs()?;
    outputs.extend([list, counts]);
    match plan.each() {
        // What the next step begins with; nobody writes a table.
        Some(each) if each.counters().to_vec()?.iter().any(|count| *count != 0) => {
            return Err("the counters are not 0 behind the launch".into());
        }
        Some(_) => {}
        None => outputs.push(entries),
    }
    outputs.push(kept);
    outputs.extend([OutputBuffer::download("output", &output)?, OutputBuffer::download("lse", &lse)?]);
    Ok(outputs)
}

impl<E: GatherElement> Plan<E> {
    /// Fills what a step writes with what no step writes.
    fn poison(&mut self, stream: &Stream) -> crate::Result<()> {
        *self.scores_mut() = poisoned(stream, self.scores().len())?;
        self.chosen_mut().poison(stream)
    }
}

impl Chosen {
    /// Fills it with what no step writes.
    pub(super) fn poison(&mut self, stream: &Stream) -> crate::Result<()> {
        for buffer in [&mut self.list, &mut self.counts, &mut self.entries, &mut self.kept] {
            *buffer = poisoned(stream, buffer.len())?;
        }
        Ok(())
    }

    /// What a case hands back of it.
    pub(super) fn outputs(&self) -> crate::Result<[OutputBuffer; 4]> {
        Ok([
            OutputBuffer::download("list", &self.list)?,
            OutputBuffer::download("counts", &self.counts)?,
            OutputBuffer::download("entries", &self.entries)?,
            OutputBuffer::download("kept", &self.kept)?,
        ])
    }
}
