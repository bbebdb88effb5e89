//! PyTorch's backends and FlashInfer, over what is asked for.

use super::super::peers::{Found, PeerRow, Script};
use super::arguments::Arguments;
use super::report::{Libraries, Row, Subject};

/// Of the time there is, the script may start rows until so many seconds before its end: what it then has
/// under way is done, and its report is written.
const MARGIN: f64 = 10.0;
/// The command's option that gives the script more time.
pub const OPTION: &str = "--seconds";

impl PeerRow for Row {
    const REQUIRED: &'static [&'static str] =
        &["peer", "op", "dtype", "batch", "q_heads", "kv_heads", "head_dim", "context", "median_us"];
}

/// Runs the script over these subjects for at most `seconds`.
pub fn run(arguments: &Arguments, subjects: &[Subject], seconds: f64) -> Found<Row, Libraries> {
    let each = |of: fn(&Subject) -> String| {
        let mut found: Vec<String> = Vec::new();
        for text in subjects.iter().map(of) {
            if !found.contains(&text) {
                found.push(text);
            }
        }
        found.join(",")
    };
    let script = Script { python: &arguments.python, path: &arguments.peers_script, seconds, option: OPTION };
    script.run(&[
        ("--shapes", each(|subject| subject.shape.to_string())),
        ("--batches", each(|subject| subject.batch.to_string())),
        ("--contexts", each(|subject| subject.context.to_string())),
        ("--dtype", each(|subject| subject.dtype.into())),
        ("--seconds", format!("{:.0}", (seconds - MARGIN).max(0.0))),
    ])
}
