//! PyTorch's backends and FlashInfer, over what is asked for.

use super::super::peers::{Found, PeerRow, Script};
use super::arguments::Arguments;
use super::report::{Libraries, Row};

/// Of the time there is, the script may start rows until so many seconds before its end: what it then has
/// under way is done, and its report is written.
const MARGIN: f64 = 10.0;
/// The command's option that gives the script more time.
pub const OPTION: &str = "--seconds";

impl PeerRow for Row {
    const REQUIRED: &'static [&'static str] =
        &["peer", "op", "dtype", "batch", "q_heads", "kv_heads", "head_dim", "context", "median_us"];
}

/// Runs the script for at most `seconds`.
pub fn run(arguments: &Arguments, seconds: f64) -> Found<Row, Libraries> {
    fn join<T: ToString>(parts: &[T]) -> String {
        parts.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
    }
    let script = Script { python: &arguments.python, path: &arguments.peers_script, seconds, option: OPTION };
    script.run(&[
        ("--shapes", join(&arguments.shapes)),
        ("--batches", join(&arguments.batches)),
        ("--contexts", join(&arguments.contexts)),
        ("--dtype", join(&arguments.dtype)),
        ("--seconds", format!("{:.0}", (seconds - MARGIN).max(0.0))),
    ])
}
