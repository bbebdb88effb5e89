//! Exact attention as a workload.

use super::{Attended, DenseElement, Handles, Plan, bound};
use crate::Stream;
use crate::kv::workload::{AnyInput, Data, Input, Memory, Opening, Outcome, Promise, Workload};
use crate::kv::{HeadReport, Result};
use std::sync::Arc;

struct Dense<E: DenseElement> {
    input: Arc<Input<E>>,
    plan: Plan<E>,
    out: Attended,
}

/// One launch over each of the pools.
pub(super) fn open(opening: &Opening<'_>) -> Result<Box<dyn Workload>> {
    Ok(match &opening.input {
        AnyInput::F16(input) => Box::new(Dense::open(input.clone())?),
        AnyInput::Bf16(input) => Box::new(Dense::open(input.clone())?),
    })
}

impl<E: DenseElement> Dense<E> {
    fn open(input: Arc<Input<E>>) -> Result<Self> {
        let plan = Plan::new(&input.device, input.problem)?;
        let stream = Stream::new(&input.device)?;
        let out = input.unwritten(&stream)?;
        let mut dense = Dense { input, plan, out };
        // A first run outside any timing: the driver loads the kernel.
        dense.enqueue(&stream, 0, 1)?;
        stream.synchronize()?;
        Ok(dense)
    }
}

impl<E: DenseElement> Workload for Dense<E> {
    fn stages(&self) -> &'static [&'static str] {
        &["attend"]
    }

    fn enqueue(&mut self, stream: &Stream, set: usize, _: usize) -> Result<()> {
        let Input { queries, pools, table, .. } = &*self.input;
        let slices = self.input.on_slices(stream);
        let handles = Handles {
            queries: queries[0].global(),
            keys: pools[set].keys().global(),
            values: pools[set].values().global(),
            table: table.blocks().global(),
            lengths: table.lengths().global(),
            wanted: None,
            near: true,
            output: self.out.output.global_mut(),
            lse: self.out.lse.global_mut(),
        };
        // SAFETY: buffers of this device, host memory on the CPU; the table checked its entries against the
        // pools and its lengths against its rows. Dropping a buffer waits for the device.
        Ok(unsafe { self.plan.attend_on(stream, slices, handles) }?)
    }

    fn read_bytes(&self) -> u64 {
        let tokens: u64 = self.input.lengths.iter().map(|length| u64::from(*length)).sum();
        tokens * self.input.token_bytes()
    }

    fn memory(&self) -> Memory {
        let pool = &self.input.pools[0];
        Memory { device: (pool.keys().bytes() + pool.values().bytes()) as u64, host: 0 }
    }

    fn outcome(&self) -> Result<Outcome> {
        let heads = vec![HeadReport::STORED; self.out.lse.len()];
        Ok(Outcome { output: self.out.output.to_vec()?, lse: self.out.lse.to_vec()?, heads })
    }

    fn promise(&self, _: usize, data: &Data<'_>) -> Promise {
        let Data { sequence, q_head, query, key, value } = *data;
        let (output, lse) = bound::row::<E>(&sequence, self.plan.splits(), query, key, value, 0, q_head);
        Promise::Elements { output, lse }
    }
}
