//! Steps that each thread block ranks for itself: the bits of those that one ranks and of the CPU's own path,
//! in every order, without races, and the scratch as it was.

use super::*;
use crate::kv::Selection;
use half::{bf16, f16};
use kernels_gpu::gather::MOST_LISTED;

/// What both kinds of steps write; `entries` is left out.
type Bits = [Vec<u32>; 5];

fn bits_of(stepped: Stepped) -> Bits {
    let Stepped { list, counts, kept, output, lse, .. } = stepped;
    [list, counts, kept, output, lse]
}

/// A batch on a device, its plan, and what the plan writes.
struct Stage<E: GatherElement> {
    stream: Stream,
    at: crate::attention::inputs::Uploaded<E>,
    bounds: Bounds<E>,
    plan: Plan<E>,
    output: Buffer<f32>,
    lse: Buffer<f32>,
}

impl<E: GatherElement> Stage<E> {
    fn new(batch: &Batch<E>, support: Support, ranking: Ranking, options: EmuOptions) -> Self {
        // What the CPU's own path writes is not in the account of memory.
        let slices = !options.memory_check;
        let device = Device::cpu(options);
        let stream = Stream::new(&device).expect("a stream");
        let at = batch.upload(&device).expect("buffers");
        let mut bounds = Bounds::scored(&device, batch.problem, support, ranking.score).expect("bounds");
        let cut = std::slice::from_ref(&batch.lengths);
        let folded = in_chunks(&device, cut, |tokens, positions, lengths| {
            let handles =
                FoldHandles { keys: at.keys.global(), table: at.table.global(), positions, lengths };
            // SAFETY: buffers of the emulator, whose table is of this pool.
            unsafe { bounds.fold_on(&stream, (0, tokens), slices, handles) }
        });
        folded.expect("folded");
        let plan = Plan::<E>::ranked(&device, batch.problem, support, ranking).expect("a plan");
        let plan = plan.with_ranks(Ranks::Each).expect("a plan");
        let rows = batch.problem.dense().query_rows();
        let output = Buffer::<f32>::zeroed(&device, batch.queries.len()).expect("a buffer");
        let lse = Buffer::<f32>::zeroed(&device, rows).expect("a buffer");
        Stage { stream, at, bounds, plan, output, lse }
    }

    fn handles(&mut self) -> Handles<E> {
        Handles {
            queries: self.at.queries.global(),
            keys: self.at.keys.global(),
            values: self.at.values.global(),
            bounds: self.bounds.words().global(),
            table: self.at.table.global(),
            lengths: self.at.lengths.global(),
            output: self.output.global_mut(),
            lse: self.lse.global_mut(),
        }
    }

    fn step(&mut self) -> crate::gather::Result<()> {
        let handles = self.handles();
        // SAFETY: buffers of the emulator, whose table is of this pool.
        unsafe { self.plan.step_on(&self.stream, false, &handles) }
    }

    /// What was written; the scratch is 0.
    fn read(&self) -> Bits {
        let counters = self.plan.each().expect("each ranks").counters().to_vec().expect("read");
        assert!(counters.iter().all(|count| *count == 0), "{counters:?}");
        let words = |buffer: &Buffer<u32>| buffer.to_vec().expect("read");
        let bits =
            |buffer: &Buffer<f32>| buffer.to_vec().expect("read").iter().map(|x| x.to_bits()).collect();
        let chosen = self.plan.chosen();
        [words(&chosen.list), words(&chosen.counts), words(&chosen.kept), bits(&self.output), bits(&self.lse)]
    }
}

/// A step, twice, has the bits of one that one thread block ranks and of the CPU's own path.
fn check<E: GatherElement>(batch: &Batch<E>, support: Support, ranking: Ranking, options: EmuOptions) {
    let expected = bits_of(step_by(batch, support, ranking, false).0);
    assert!(bits_of(step_by(batch, support, ranking, true).0) == expected, "the CPU's own path");
    let mut stage = Stage::new(batch, support, ranking, options);
    for time in 0..2 {
        stage.step().unwrap_or_else(|error| panic!("{support:?} {ranking:?}: {error}"));
        let found = stage.read();
        for (name, (found, expected)) in
            ["list", "counts", "kept", "output", "lse"].iter().zip(found.iter().zip(&expected))
        {
            assert!(found == expected, "{name} of time {time}, {support:?} {ranking:?} {:?}", batch.lengths);
        }
    }
}

const BY_BOUNDS: Ranking = Ranking { score: Score::Bounds, list: List::KvHead };

/// Rankings, groups, head_dims, types; lengths around blocks, of which all is kept, and none.
#[test]
fn whoever_ranks_the_bits_are_the_same() {
    for score in [Score::Bounds, Score::Codes, Score::Mean] {
        for list in [List::KvHead, List::QueryHead] {
            let ranking = Ranking { score, list };
            let support = Support { k: 3, block: 16, local: 2 };
            let problem = StepProblem { q_heads: 8, ..PROBLEM };
            let batch = batch::<f16>(problem, Input::Normal, &[400, 1, 97, 0, 256], 3);
            check(&batch, support, ranking, EmuOptions::default());
        }
    }
    for (group, head_dim, support) in [
        (11, 64, Support { k: 5, block: 16, local: 1 }),
        (16, 128, Support { k: 2, block: 32, local: 3 }),
        (7, 128, Support { k: 1, block: 64, local: 1 }),
        (4, 64, Support { k: 0, block: 16, local: 3 }),
        (4, 64, Support { k: 1000, block: 16, local: 1 }),
        (8, 96, Support { k: 3, block: 16, local: 2 }),
    ] {
        let problem = StepProblem { q_heads: 2 * group, head_dim, ..PROBLEM };
        let half = batch::<f16>(problem, Input::Sharp, &[400, 17, 255], 4);
        check(&half, support, BY_BOUNDS, EmuOptions::default());
        let brain = batch::<bf16>(problem, Input::Ties, &[399, 81], 5);
        check(&brain, support, BY_BOUNDS, EmuOptions::default());
    }
}

/// The best are found by the maxima of tiles, of pairs of tiles, among all; more scores than shared memory
/// holds; ties by the hundred.
#[test]
fn long_sequences_are_ranked_by_every_thread_block() {
    let problem = StepProblem { q_heads: 1, kv_heads: 1, max_tokens: 16 * 2610, ..PROBLEM };
    for input in [Input::Normal, Input::Duplicates] {
        let batch = batch::<f16>(problem, input, &[16 * 2610 - 9, 16 * 700], 3);
        for k in [1, 60, 120, 400] {
            check(&batch, Support { k, block: 16, local: 1 }, BY_BOUNDS, EmuOptions::default());
        }
    }
    let problem = StepProblem { max_tokens: 16 * 8300, ..problem };
    let mut batch = batch::<f16>(problem, Input::Normal, &[16 * 8300 - 5], 3);
    batch.keys.fill(f16::ONE);
    check(&batch, Support { k: 100, block: 16, local: 1 }, BY_BOUNDS, EmuOptions::default());
}

/// Several thread blocks of several rows in nine orders, with every check: no order leaves another result,
/// none has a race.
#[test]
fn no_order_makes_a_difference() {
    for (group, lengths, support) in [
        (2, [640, 70], Support { k: 3, block: 16, local: 1 }),
        // Two groups of query heads, which are thread blocks of their own.
        (9, [600, 16], Support { k: 2, block: 16, local: 2 }),
    ] {
        let problem =
            StepProblem { sequences: 2, q_heads: group, kv_heads: 1, head_dim: 64, max_tokens: 640 };
        let batch = batch::<f16>(problem, Input::Normal, &lengths, 3);
        check(&batch, support, BY_BOUNDS, EmuOptions::thorough());
    }
}

/// The same over the maxima of tiles; where more is left than is counted, so that all keys are ranked; and by
/// 128 sets.
#[test]
fn no_order_makes_a_difference_to_long_lists() {
    for (blocks, k, input) in
        [(1050, 40, Input::Normal), (1050, 20, Input::Duplicates), (2100, 60, Input::Normal)]
    {
        let max_tokens = 16 * blocks;
        let problem = StepProblem { sequences: 1, q_heads: 1, kv_heads: 1, head_dim: 64, max_tokens };
        let batch = batch::<f16>(problem, input, &[max_tokens], 3);
        check(&batch, Support { k, block: 16, local: 1 }, BY_BOUNDS, EmuOptions::thorough());
    }
}

/// The attention is in several parts, which one of the thread blocks adds up.
#[test]
fn parts_are_added_up_in_every_order() {
    let problem = StepProblem { sequences: 1, q_heads: 1, kv_heads: 1, head_dim: 64, max_tokens: 1600 };
    let batch = batch::<f16>(problem, Input::Normal, &[1590], 3);
    let support = Support { k: 2, block: 128, local: 2 };
    check(&batch, support, BY_BOUNDS, EmuOptions::thorough());
    assert!(Plan::<f16>::new(&device(), problem, support).expect("a plan").splits() > 1);
}

/// Counts of blocks around every way to rank: all keys by counting, four keys or the maxima of four tiles a
/// thread, those of sets, of tiles, and everything; by one thread block as by each.
#[test]
fn every_way_to_rank_chooses_the_same() {
    let blocks = [34, 127, 128, 129, 130, 131, 174, 260, 1023, 1024, 1025, 1026, 1027, 1100, 1600, 2700];
    let problem = StepProblem { sequences: 1, q_heads: 1, kv_heads: 1, head_dim: 64, max_tokens: 16 * 2700 };
    for input in [Input::Normal, Input::Duplicates] {
        for count in blocks {
            let batch = batch::<f16>(problem, input, &[16 * count], 3 + u64::from(count));
            for k in [1, 32, 48, 49] {
                check(&batch, Support { k, block: 16, local: 1 }, BY_BOUNDS, EmuOptions::default());
            }
        }
    }
    // All keys are the same: what is left is more than is counted.
    for count in [140, 1024, 1500] {
        let mut batch = batch::<f16>(problem, Input::Normal, &[16 * count], 3);
        batch.keys.fill(f16::ONE);
        check(&batch, Support { k: 32, block: 16, local: 1 }, BY_BOUNDS, EmuOptions::default());
    }
}

/// A graph is captured and run later, or never; steps of it and others follow each other.
#[test]
fn captured_steps_leave_the_scratch_ready() {
    let support = Support { k: 3, block: 16, local: 2 };
    let batch = batch::<f16>(PROBLEM, Input::Normal, &[400, 130], 3);
    let expected = bits_of(step_by(&batch, support, BY_BOUNDS, false).0);
    let mut stage = Stage::new(&batch, support, BY_BOUNDS, EmuOptions::default());
    let handles = stage.handles();
    let (plan, stream) = (&mut stage.plan, &stage.stream);
    let captured = stream.capture(|stream| {
        // SAFETY: buffers of the emulator, whose table is of this pool.
        unsafe { plan.step_on(stream, false, &handles) }.expect("recorded");
        Ok(())
    });
    let (graph, ()) = captured.expect("captured");
    let graph = graph.instantiate().expect("a graph");
    for time in 0..6 {
        stage.stream.fill_u32(&mut stage.lse, .., 0).expect("filled");
        stage.stream.fill_u32(&mut stage.output, .., 0).expect("filled");
        match time % 2 {
            0 => stage.step().expect("a step"),
            // SAFETY: as above.
            _ => unsafe { graph.launch(&stage.stream) }.expect("run"),
        }
        assert!(stage.read() == expected, "time {time}");
    }
}

#[test]
fn a_list_that_is_too_long_is_refused() {
    let problem = StepProblem { max_tokens: 16 * 9000, ..PROBLEM };
    let plan = |k: u32| {
        let plan = Plan::<f16>::new(&device(), problem, Support { k, block: 16, local: 1 }).expect("a plan");
        plan.with_ranks(Ranks::Each).map(|plan| plan.ranks())
    };
    assert_eq!(plan(MOST_LISTED).expect("fits"), Ranks::Each);
    let error = plan(MOST_LISTED + 1).expect_err("refused");
    assert!(
        error.to_string().contains("a list of 2049 distant blocks is too long for ranks=each"),
        "{error}"
    );
    // Where there are no more blocks than that, more may be asked for.
    let plan = Plan::<f16>::new(&device(), PROBLEM, Support { k: 1 << 20, block: 16, local: 1 });
    assert_eq!(plan.expect("a plan").with_ranks(Ranks::Each).expect("fits").ranks(), Ranks::Each);
}

/// Without a word few lists of few tiles are ranked by each thread block, where it can.
#[test]
fn what_is_quicker_is_taken() {
    let ranks = |text: &str, problem: StepProblem| {
        let selection: Selection = text.parse().expect("a selection");
        let plan = Plan::<f16>::new(&device(), problem, Support::of(&selection)).expect("a plan");
        plan.with_ranks_of(&selection).map(|plan| plan.ranks())
    };
    let few = StepProblem { sequences: 2, q_heads: 28, kv_heads: 4, head_dim: 128, max_tokens: 128 << 10 };
    assert_eq!(ranks("gather", few).expect("a plan"), Ranks::Each);
    assert_eq!(ranks("gather/ranks=one", few).expect("a plan"), Ranks::One);
    // 128K tokens of eight sequences, and room for some more.
    let eight = StepProblem { sequences: 8, max_tokens: (128 << 10) + 4096, ..few };
    assert_eq!(ranks("gather", eight).expect("a plan"), Ranks::Each);
    let many = StepProblem { sequences: 11, ..few };
    assert_eq!(ranks("gather", many).expect("a plan"), Ranks::One);
    assert_eq!(ranks("gather/ranks=each", many).expect("a plan"), Ranks::Each);
    assert_eq!(ranks("gather", StepProblem { max_tokens: 1 << 20, ..few }).expect("a plan"), Ranks::One);
    let wide = StepProblem { sequences: 1, q_heads: 8, head_dim: 256, ..few };
    assert_eq!(ranks("gather", wide).expect("a plan"), Ranks::One);
    let long = StepProblem { sequences: 1, kv_heads: 1, q_heads: 1, head_dim: 64, ..few };
    assert_eq!(ranks("gather/k=3000/block=16", long).expect("a plan"), Ranks::One);
    // On a device whose thread blocks have less shared memory than that takes.
    let selection: Selection = "gather".parse().expect("a selection");
    let lean = device().with_max_shared_bytes(99 << 10);
    let plan = Plan::<f16>::new(&lean, long, Support::ASSURED).expect("a plan");
    assert_eq!(plan.with_ranks_of(&selection).expect("a plan").ranks(), Ranks::One);
}
