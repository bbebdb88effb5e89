//! How fast attention over each scheme is: `bench attention`'s rows.

use super::Arguments;
use super::report::Row;
use crate::cli::bench::attention::{self, BlockOrder, Clock, Material, Plan, Subject};
use crate::cli::bench::record::Skipped;
use crate::cli::failure::Failure;
use crate::cli::scheme;
use host::Device;
use host::kv::Selection;
use std::time::Instant;

/// Every shape and batch at the first context, then at the next.
fn subjects(arguments: &Arguments) -> Vec<Subject> {
    let mut subjects = Vec::new();
    for &context in &arguments.contexts {
        for &shape in &arguments.shapes {
            for &batch in &arguments.batches {
                let blocks = BlockOrder::default();
                subjects.push(Subject { shape, batch, context, dtype: "f16", blocks });
            }
        }
    }
    subjects
}

/// Gives each row the steps of its scheme, as far as a share of the time allows. Files are left out: they are
/// for the heads of a model.
///
/// # Errors
/// What the device reports.
pub fn measure(
    arguments: &Arguments,
    selections: &[Selection],
    device: &Device,
    (begin, share): (Instant, f64),
    rows: &mut [Row],
    skipped: &mut Vec<Skipped>,
) -> Result<(), Failure> {
    let bare = selections.iter().map(scheme::without_files).collect::<Result<Vec<_>, _>>()?;
    let mut kv: Vec<Selection> = Vec::new();
    for selection in &bare {
        if !kv.contains(selection) {
            kv.push(selection.clone());
        }
    }
    let plan = Plan {
        kv: &kv,
        scratch: None,
        material: Material::Normal(arguments.query_scale),
        repetition: attention::repetition(device, arguments.seconds_per_row),
        on_slices: true,
    };
    let mut found = Vec::new();
    let mut clock = Clock::new(begin, arguments.seconds, share);
    attention::steps(&subjects(arguments), &plan, device, &mut clock, &mut found, skipped)?;
    attention::set_ratios(&mut found);
    for (row, selection) in rows.iter_mut().zip(&bare) {
        let name = selection.to_string();
        row.speed =
            found.iter().filter(|found| found.op == "decode" && found.by() == name).cloned().collect();
    }
    Ok(())
}
