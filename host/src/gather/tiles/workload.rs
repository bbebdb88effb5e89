//! A step over codes as a workload: all sequences of a batch in two launches.

use super::super::workload::{bounds_of, heads};
use super::super::{Bounds, Ranking, Support};
use super::{TiledElement, TiledPlan};
use crate::attention::StepProblem;
use crate::attention::dense::Attended;
use crate::certified::workload::{Quantized, quantize};
use crate::certified::{Certificate, Geometry, Layout, Near, Policy, StepHandles, TileLayout};
use crate::kv::workload::{AnyInput, Data, Fact, Input, Memory, Opening, Outcome, Promise, Workload};
use crate::kv::{Result, Selection};
use crate::{Buffer, Stream};
use kernels_gpu::attention::{BLOCK_TOKENS, ROWS};
use std::sync::Arc;

struct Tiled<E: TiledElement> {
    input: Arc<Input<E>>,
    plan: TiledPlan<E>,
    /// Of each pool.
    bounds: Vec<Bounds<E>>,
    quantized: Vec<Quantized>,
    layout: TileLayout,
    out: Attended,
    /// Of the codes over what is kept, [sequences, q_heads].
    certificates: Vec<Certificate>,
}

/// Bounds and tiles of each of the pools, and a step.
pub(in crate::gather) fn open(opening: &Opening<'_>) -> Result<Box<dyn Workload>> {
    let selection = opening.selection;
    Ok(match &opening.input {
        AnyInput::F16(input) => Box::new(Tiled::open(input.clone(), selection)?),
        AnyInput::Bf16(input) => Box::new(Tiled::open(input.clone(), selection)?),
    })
}

impl<E: TiledElement> Tiled<E> {
    fn open(input: Arc<Input<E>>, selection: &Selection) -> Result<Self> {
        let (device, support) = (&input.device, Support::of(selection));
        let problem = StepProblem::from(input.problem);
        let score = Ranking::fitting::<E>(selection, problem).score;
        let plan = TiledPlan::new(device, problem, support, score)?;
        let geometry = Geometry::new(problem.kv_heads, problem.head_dim)?.with_layout(Layout::Compact);
        let stream = Stream::new(device)?;
        let bounds = (0..input.pools.len()).map(|set| bounds_of(&input, set, (support, score), &stream));
        let bounds = bounds.collect::<Result<_>>()?;
        let quantized = quantize(&input, geometry, &stream)?;
        let out = input.unwritten(&stream)?;
        let layout = geometry.layout();
        let mut tiled = Tiled { input, plan, bounds, quantized, layout, out, certificates: Vec::new() };
        // A first run outside any timing: the driver loads the kernels.
        tiled.enqueue(&stream, 0, usize::MAX)?;
        stream.synchronize()?;
        tiled.certify((problem, support, score), &stream)?;
        Ok(tiled)
    }

    /// The certificates of the same outputs, from a step that makes them.
    fn certify(&mut self, of: (StepProblem, Support, super::super::Score), stream: &Stream) -> Result<()> {
        let mut judged = TiledPlan::<E>::with_policy(&self.input.device, of, &Policy::CODES)?;
        let slices = self.input.on_slices(stream);
        let handles = self.handles(0);
        let bounds = self.bounds[0].words().global();
        let mut own = self.input.unwritten(stream)?;
        let out = (own.output.global_mut(), own.lse.global_mut());
        // SAFETY: as in `enqueue`; it ends before the plan and what it writes go.
        unsafe { judged.run(stream, slices, (bounds, &handles), out, usize::MAX) }?;
        stream.synchronize()?;
        self.certificates = judged.certificates().to_vec()?;
        let bits = |buffer: &Buffer<f32>| -> Result<Vec<u32>> {
            Ok(buffer.to_vec()?.into_iter().map(f32::to_bits).collect())
        };
        for (bare, certified) in [(&self.out.output, &own.output), (&self.out.lse, &own.lse)] {
            if bits(bare)? != bits(certified)? {
                return Err(crate::kv::Error::system(OtherOutputs));
            }
        }
        Ok(())
    }

    fn handles(&self, set: usize) -> StepHandles<E> {
        let Input { queries, pools, table, .. } = &*self.input;
        let Quantized { tiles, annotations } = &self.quantized[set];
        StepHandles {
            queries: queries[0].global(),
            tiles: tiles.global().cast(),
            annotations: annotations.global(),
            table: table.blocks().global(),
            lengths: table.lengths().global(),
            keys: pools[set].keys().global(),
            values: pools[set].values().global(),
            near: Near::none(),
        }
    }

    /// Of bounds, and of tiles and the tokens behind the last full block of 16.
    fn bytes_read(&self) -> [u64; 2] {
        let support = self.plan.support();
        let kv_heads = u64::from(self.input.problem.kv_heads);
        let of = |length: u32| {
            let kept = support.kept(length);
            // Each group of eight query heads reads them.
            let groups = u64::from(self.input.problem.group().div_ceil(ROWS));
            let tiles = u64::from(kept / BLOCK_TOKENS) * kv_heads * groups * u64::from(self.layout.bytes);
            let bounds = self.bounds[0].bytes_of(support.extent(length).ranked_blocks());
            [bounds, tiles + u64::from(kept % BLOCK_TOKENS) * self.input.token_bytes()]
        };
        let each = self.input.lengths.iter().map(|length| of(*length));
        each.fold([0, 0], |sum, of| [sum[0] + of[0], sum[1] + of[1]])
    }
}

#[derive(Debug, thiserror::Error)]
#[error(
    "gather over codes has other outputs with a certificate than without; run `ferrokv check` and report this"
)]
struct OtherOutputs;

impl<E: TiledElement> Workload for Tiled<E> {
    fn stages(&self) -> &'static [&'static str] {
        TiledPlan::<E>::STAGES
    }

    fn enqueue(&mut self, stream: &Stream, set: usize, stages: usize) -> Result<()> {
        let (handles, bounds) = (self.handles(set), self.bounds[set].words().global());
        let slices = self.input.on_slices(stream);
        let out = (self.out.output.global_mut(), self.out.lse.global_mut());
        // SAFETY: buffers of this device, host memory on the CPU; the table checked its entries against the
        // pools and its lengths against its rows, and every full block is quantized. Dropping a buffer waits
        // for the device.
        unsafe { self.plan.run(stream, slices, (bounds, &handles), out, stages) }
    }

    fn read_bytes(&self) -> u64 {
        self.bytes_read().iter().sum()
    }

    fn memory(&self) -> Memory {
        let Quantized { tiles, annotations } = &self.quantized[0];
        let bounds = self.bounds[0].words().bytes();
        Memory { device: (tiles.bytes() + annotations.bytes() + bounds) as u64, host: 0 }
    }

    fn outcome(&self) -> Result<Outcome> {
        let heads = heads(self.plan.support(), &self.input);
        Ok(Outcome { output: self.out.output.to_vec()?, lse: self.out.lse.to_vec()?, heads })
    }

    /// Where nothing is left out, what the certificate says of the codes.
    fn promise(&self, row: usize, _: &Data<'_>) -> Promise {
        let length = self.input.lengths[row / self.input.problem.q_heads as usize];
        if self.plan.support().kept(length) < length {
            return Promise::Nothing;
        }
        Promise::Norm(self.certificates[row].likely.into())
    }

    fn facts(&self) -> Result<Vec<Fact>> {
        let kept = self.input.lengths.iter().map(|length| f64::from(self.plan.support().kept(*length)));
        let [bounds, tiles] = self.bytes_read();
        let mut of_codes: Vec<f32> = self.certificates.iter().map(|c| c.likely / c.norm).collect();
        of_codes.sort_by(f32::total_cmp);
        let median = of_codes.get(of_codes.len() / 2).map_or(f64::NAN, |x| f64::from(*x));
        Ok(vec![
            Fact::count("tokens read", kept.sum::<f64>() / self.input.lengths.len().max(1) as f64),
            Fact::bytes("bounds read", bounds),
            Fact::bytes("tiles read", tiles),
            Fact::error("bound of the codes / norm, median", median),
        ])
    }
}
