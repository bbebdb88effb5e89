//! A step as a workload: all sequences of a batch in one launch.

use super::calibrate::of_itself;
use super::restored::Restored;
use super::setting::{RESTORED, STEP};
use super::{Books, Encode, Error, Handles, Plan, Setting, Source, Store, Tables};
use crate::attention::StepProblem;
use crate::kv::workload::{Fact, Input, Memory, Opening, Outcome, Workload};
use crate::kv::{self, HeadReport, Result};
use crate::{Buffer, Stream};
use half::f16;
use std::sync::Arc;

/// Tokens that codebooks are made from at most, where none are given.
const TOKENS: usize = 4096;
/// And at least: fewer are taken again and again.
const LEAST: usize = 2048;

struct VecInfer {
    input: Arc<Input<f16>>,
    setting: Setting,
    plan: Plan,
    /// What a step does in place of the plan, where tokens are to be restored.
    restored: Option<Restored>,
    tables: Tables,
    /// Of each pool.
    stores: Vec<Store>,
    lengths: Buffer<u32>,
    output: Buffer<f32>,
    /// Of which layer of a model the codebooks are; `None` if they were made from the input.
    layer: Option<usize>,
}

/// The codes of each of the pools, and a step. Without a file the codebooks are made from the input itself.
pub(super) fn open(opening: &Opening<'_>) -> Result<Box<dyn Workload>> {
    let input = opening.f16()?;
    let setting = Setting::of(opening.selection);
    let dense = input.problem;
    let problem = StepProblem::from(dense);
    let device = input.device.clone();
    let plan = Plan::new(&device, problem, setting)?;
    let geometry = input.geometry();
    let capacity = (dense.max_tokens as usize).into();
    let selection = opening.selection;
    let of_model = kv::Opening { device: &device, geometry, rope: None, capacity, selection };
    let (books, layer) = match of_model.artifact_of_layers("codes")? {
        Some((mut file, layers)) => {
            let books = Books::read(&mut file, setting, [layers, geometry.kv_heads, geometry.head_dim])?;
            let layer = opening.layer.unwrap_or(0);
            if layer >= layers {
                return Err(Error::Layer { path: file.path().display().to_string(), layers, layer }.into());
            }
            (books, Some(layer))
        }
        None => (self::of_itself(&input.material([LEAST, TOKENS])?, setting)?, None),
    };
    let tables = Tables::new(&device, &books, layer.unwrap_or(0))?;
    let stream = Stream::new(&device)?;
    let mut output = Buffer::new(&device, problem.dense().query_rows() * problem.head_dim as usize)?;
    // What no right result is.
    stream.fill_u8(&mut output, .., 0xff)?;
    let lengths = Buffer::zeroed(&device, problem.sequences as usize)?;
    let stores = Vec::new();
    let restores = selection.word(STEP, "") == RESTORED;
    let restored = restores.then(|| Restored::new(&device, problem)).transpose()?;
    let mut workload = VecInfer { input, setting, plan, restored, tables, stores, lengths, output, layer };
    for set in 0..workload.input.pools.len() {
        workload.encode(&stream, set, problem)?;
    }
    // A first run outside any timing: the driver loads the kernel.
    workload.enqueue(&stream, 0, workload.stages().len())?;
    stream.synchronize()?;
    Ok(Box::new(workload))
}

impl VecInfer {
    /// Stores a pool's sequences.
    fn encode(&mut self, stream: &Stream, set: usize, problem: StepProblem) -> Result<()> {
        let device = stream.device();
        let mut store = Store::new(device, problem, self.setting)?;
        let slices = device.has_host_paths();
        let (pool, table) = (&self.input.pools[set], &self.input.table);
        let width = table.max_blocks() as usize;
        let longest = self.input.lengths.iter().copied().max().unwrap_or(0) as usize;
        let positions = Buffer::<u32>::zeroed(device, longest.max(1))?;
        for (sequence, length) in self.input.lengths.iter().enumerate().filter(|(_, length)| **length > 0) {
            let row = table.blocks().global_range(sequence * width..(sequence + 1) * width)?;
            let encode = Encode {
                sequence: sequence as u32,
                counts: [1, *length],
                source: Source::Pool { table: row, max_blocks: width as u32 },
                keys: pool.keys().global(),
                values: pool.values().global(),
                positions: positions.global_range(..*length as usize)?,
                lengths: self.lengths.global_range_mut(sequence..sequence + 1)?,
                pool: None,
            };
            // SAFETY: buffers of this device, host memory on the CPU; the table checked its entries against
            // the pools. `positions` is there until the stream has been waited for.
            unsafe { store.encode_on(stream, slices, &self.tables, encode) }?;
        }
        store.check(stream, 0)?;
        self.stores.push(store);
        Ok(())
    }
}

impl Workload for VecInfer {
    fn stages(&self) -> &'static [&'static str] {
        if self.restored.is_some() { Restored::STAGES } else { &["attend"] }
    }

    fn enqueue(&mut self, stream: &Stream, set: usize, stages: usize) -> Result<()> {
        let slices = stream.device().has_host_paths() && !stream.is_capturing();
        let handles = Handles {
            queries: self.input.queries[0].global(),
            lengths: self.lengths.global(),
            output: self.output.global_mut(),
        };
        let (store, tables) = (&self.stores[set], &self.tables);
        if let Some(restored) = &mut self.restored {
            let step = (handles, &*self.input.lengths);
            // SAFETY: as below; the lengths on the device are those of the input, as encoding has left them.
            return Ok(unsafe { restored.run_on(stream, slices, (store, tables), step, stages) }?);
        }
        // SAFETY: buffers of this device, host memory on the CPU. Dropping a buffer waits for the device.
        Ok(unsafe { self.plan.run_on(stream, slices, store, tables, handles) }?)
    }

    fn read_bytes(&self) -> u64 {
        let of = |length: &u32| self.setting.step_bytes(self.input.problem.head_dim, (*length).into());
        let of_head: f64 = self.input.lengths.iter().map(of).sum();
        let stored = u64::from(self.input.problem.kv_heads) * of_head.ceil() as u64;
        // What was restored is written, and read again.
        let tokens: u64 = self.input.lengths.iter().map(|length| u64::from(*length)).sum();
        stored + if self.restored.is_some() { tokens * self.input.token_bytes() } else { 0 }
    }

    fn memory(&self) -> Memory {
        let restored = self.restored.as_ref().map_or(0, Restored::bytes);
        Memory { device: (self.stores[0].bytes() + self.tables.bytes() + restored) as u64, host: 0 }
    }

    fn outcome(&self) -> Result<Outcome> {
        let heads = vec![HeadReport::STORED; self.plan.problem().dense().query_rows()];
        Ok(Outcome { output: self.output.to_vec()?, lse: Vec::new(), heads })
    }

    fn facts(&self) -> Result<Vec<Fact>> {
        let coded: u64 = self.input.lengths.iter().map(|length| self.setting.coded((*length).into())).sum();
        let all: u64 = self.input.lengths.iter().map(|length| u64::from(*length)).sum();
        let made = match self.layer {
            Some(layer) => format!("of layer {layer} in the file"),
            None => "made from this input itself".into(),
        };
        Ok(vec![
            Fact::text("codebooks", made),
            Fact::count("tokens read from codes", coded as f64),
            Fact::count("tokens read in f16", (all - coded) as f64),
        ])
    }
}
