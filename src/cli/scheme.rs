//! KV schemes on the command line: how they are read and listed.

use super::failure::Failure;
use host::kv::calibration::Calibrator;
use host::kv::{OptionSpec, Preset, Scheme, Selection};
use std::fmt::Write;

/// The scheme that others are measured against.
pub const DENSE: &str = "dense";

/// A scheme as an argument names it: `name[:preset][/key=value]…`. Read by the command, not with its other
/// arguments: a refusal is a line then.
///
/// # Errors
/// What there is not, with what there is.
pub fn one(text: &str) -> Result<Selection, Failure> {
    Ok(text.parse::<Selection>()?)
}

/// [`DENSE`], if it is among the schemes.
pub fn dense() -> Option<Selection> {
    DENSE.parse().ok()
}

/// All of them, each once, in their order.
///
/// # Errors
/// As [`one`].
pub fn each_once(texts: &[String]) -> Result<Vec<Selection>, Failure> {
    let mut found: Vec<Selection> = Vec::new();
    for text in texts {
        let selection = one(text)?;
        if !found.contains(&selection) {
            found.push(selection);
        }
    }
    Ok(found)
}

/// `what`, and what schemes there are: for an argument's short help.
pub fn short(what: &str) -> String {
    format!("{what}: {}", names(host::schemes()))
}

/// Schemes with what can be set.
pub fn names(schemes: impl Iterator<Item = &'static Scheme>) -> String {
    let name = |scheme: &Scheme| match (scheme.presets, scheme.options) {
        ([], []) => scheme.name.to_owned(),
        ([], _) => format!("{}[/OPTION=VALUE]…", scheme.name),
        (_, []) => format!("{}[:PRESET]", scheme.name),
        _ => format!("{}[:PRESET][/OPTION=VALUE]…", scheme.name),
    };
    schemes.map(name).collect::<Vec<_>>().join(", ")
}

/// `what`, and every scheme with its presets and options: for its long help.
pub fn long(what: &str) -> String {
    let mut out = format!(
        "{what}: NAME[:PRESET][/OPTION=VALUE]…, separated by commas where several are taken.\n\nKV schemes:\n"
    );
    list(&mut out, host::schemes());
    out
}

/// Schemes, each with its presets and options.
pub fn list(out: &mut String, schemes: impl Iterator<Item = &'static Scheme>) {
    for scheme in schemes {
        let _ = writeln!(out, "{:<12} {}", scheme.name, scheme.about);
        for (i, Preset { name, about }) in scheme.presets.iter().enumerate() {
            let default = if i == 0 { " (default)" } else { "" };
            let _ = writeln!(out, "{:<14}:{name}{default} — {about}", "");
        }
        options(out, scheme.options);
    }
}

fn options(out: &mut String, options: &[OptionSpec]) {
    for OptionSpec { name, about, kind } in options {
        let _ = writeln!(out, "{:<14}/{name}= — {about}: {kind}", "");
    }
}

/// The schemes that need a file.
fn calibrated() -> impl Iterator<Item = (&'static Scheme, &'static Calibrator)> {
    host::schemes().filter_map(|scheme| Some((scheme, scheme.calibrate.as_ref()?)))
}

/// Which schemes need a file: for the short help of `calibrate`.
pub fn calibrated_short() -> String {
    let names: Vec<&str> = calibrated().map(|(scheme, _)| scheme.name).collect();
    match names.len() {
        0 => "The scheme; there is none that needs a file".into(),
        _ => format!("The scheme, NAME[/OPTION=VALUE]…: {}", names.join(", ")),
    }
}

/// The same with what can be set: for its long help.
pub fn calibrated_long() -> String {
    let mut out = calibrated_short() + "\n";
    for (scheme, calibrator) in calibrated() {
        let _ =
            writeln!(out, "{:<12} a file for --kv {}/{}=FILE", scheme.name, scheme.name, calibrator.artifact);
        options(&mut out, calibrator.options);
    }
    out
}
