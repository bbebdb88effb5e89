//! The system's cases for `ferrokv check`: tokens that come in chunks of every cut, steps around every edge
//! of groups, residuals, tiles and splits, of every instance.

use super::plan::kernel_of;
use super::sample::{Batch, Input};
use super::setting::{BITS, GROUPS};
use super::store::kernels_of;
use super::{HEAD_DIMS, Setting};
use crate::Device;
use crate::check::{Case, CaseError, Coverage, OutputBuffer};
use half::f16;

const BATCH: Batch = Batch {
    lengths: &[1, 31, 32, 33, 64, 65, 97, 128, 150, 160],
    kv_heads: 2,
    queries: 4,
    head_dim: 64,
    max_tokens: 160,
    setting: Setting { residual: 32, ..Setting::DEFAULT },
    input: Input::Normal,
    cuts: &[7, 1, 40],
};

/// Batches that every instance runs, and whether the emulator looks for races.
fn of_all(coverage: Coverage, batch: Batch) -> Vec<(Batch, bool)> {
    let small = Batch { lengths: &[70, 1, 0], kv_heads: 1, max_tokens: 80, ..batch };
    let bare = Setting { residual: 0, ..batch.setting };
    let bare = Batch { lengths: &[45, 96], queries: 11, kv_heads: 1, max_tokens: 96, setting: bare, ..batch };
    // Twenty blocks of a table are cut into two.
    let halves = Batch { lengths: &[300, 17], kv_heads: 1, max_tokens: 320, cuts: &[], ..batch };
    if coverage == Coverage::Small {
        return vec![(small, true), (bare, true), (halves, true)];
    }
    // Several parts, of which a short sequence uses fewer.
    let split = Batch { lengths: &[900, 17, 530], kv_heads: 1, max_tokens: 1024, cuts: &[301], ..batch };
    vec![(small, true), (bare, true), (halves, true), (batch, false), (split, false)]
}

/// Batches of one instance of each head_dim.
fn of_some(coverage: Coverage, batch: Batch) -> Vec<(Batch, bool)> {
    if coverage == Coverage::Small {
        return Vec::new();
    }
    let mut batches = Vec::new();
    for queries in [1, 7, 8, 16] {
        batches.push(Batch { lengths: &[130, 33], queries, ..batch });
    }
    for group in GROUPS.into_iter().filter(|group| *group <= batch.head_dim) {
        for residual in [0, group, 2 * group] {
            let setting = Setting { group, residual, ..batch.setting };
            let lengths = &[64, 127, 128, 129, 300, 384, 385];
            batches.push(Batch { lengths, max_tokens: 400, setting, cuts: &[100, 29, 130], ..batch });
        }
    }
    for input in Input::ALL {
        batches.push(Batch { lengths: &[77, 320], queries: 8, max_tokens: 320, input, ..batch });
        batches.push(Batch { lengths: &[1500], kv_heads: 1, max_tokens: 1536, input, cuts: &[], ..batch });
    }
    if coverage == Coverage::Full {
        batches.push(Batch { lengths: &[8192], kv_heads: 4, max_tokens: 8192, cuts: &[4000], ..batch });
        batches.push(Batch { lengths: &[4099, 1, 7777, 16], max_tokens: 40_000, cuts: &[], ..batch });
        batches.push(Batch { lengths: &[3000; 8], kv_heads: 8, max_tokens: 3000, cuts: &[], ..batch });
    }
    batches.into_iter().map(|batch| (batch, false)).collect()
}

/// The cases of every instance.
pub(super) fn cases(coverage: Coverage) -> Vec<Case> {
    let mut cases = Vec::new();
    if coverage == Coverage::Huge {
        return cases;
    }
    for head_dim in HEAD_DIMS {
        for (key_bits, value_bits) in BITS.into_iter().flat_map(|k| BITS.map(|v| (k, v))) {
            let setting = Setting { key_bits, value_bits, ..BATCH.setting };
            let batch = Batch { head_dim, setting, ..BATCH };
            let mut batches = of_all(coverage, batch);
            if (key_bits, value_bits) == (2, 2) {
                batches.extend(of_some(coverage, batch));
            }
            cases.extend(batches.into_iter().map(|(batch, race_check)| case(batch, race_check)));
        }
    }
    cases
}

fn case(batch: Batch, race_check: bool) -> Case {
    let Batch { lengths, kv_heads, queries, max_tokens, setting, input, cuts, .. } = batch;
    let label = format!(
        "tokens={lengths:?} of {max_tokens} heads={}/{kv_heads} group={} residual={} cuts={cuts:?} {input:?}",
        kv_heads * queries,
        setting.group,
        setting.residual
    );
    let run = move |device: &Device| -> Result<Vec<OutputBuffer>, CaseError> {
        let found = batch.run(device, false)?;
        let bits = |rows: &[f16]| rows.iter().map(|x| x.to_bits()).collect::<Vec<u16>>();
        let [keys, values] = found.restored;
        Ok(vec![
            OutputBuffer::new("output", found.output),
            OutputBuffer::new("codes", found.codes),
            OutputBuffer::new("recent keys", bits(&found.recent[0])),
            OutputBuffer::new("recent values", bits(&found.recent[1])),
            OutputBuffer::new("lengths", found.lengths),
            OutputBuffer::new("refused", found.refused),
            OutputBuffer::new("restored keys", keys),
            OutputBuffer::new("restored values", values),
        ])
    };
    let (attend, _) = kernel_of(setting.layout(batch.head_dim)).expect("an instance of each layout");
    let (encode, restore) = kernels_of(batch.head_dim);
    let case = Case::new(attend.info(), label, run).and(encode.info()).and(restore.info());
    if race_check { case.race_checked() } else { case }
}
