//! KV schemes on the command line: how they are read and listed.

use super::failure::Failure;
use host::kv::calibration::Calibrator;
use host::kv::{OptionSpec, Preset, Scheme, Selection, Value};
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

/// The same with [`DENSE`] ahead of the others.
///
/// # Errors
/// As [`one`].
pub fn beside_dense(texts: &[String]) -> Result<Vec<Selection>, Failure> {
    let dense = dense();
    let others = each_once(texts)?.into_iter().filter(|other| Some(other) != dense.as_ref());
    Ok(dense.iter().cloned().chain(others).collect())
}

/// Whether a selection was given a file that is made for a model.
pub fn has_file(selection: &Selection) -> bool {
    selection.values().any(|(_, value)| matches!(value, Value::File(_)))
}

/// A scheme's name with its file's name alone.
pub fn plain(selection: &Selection) -> String {
    let base = selection.to_string();
    match selection.values().find_map(|(name, _)| Some((name, selection.file(name)?))) {
        Some((name, path)) => {
            let file = path.file_name().unwrap_or(path.as_os_str()).display().to_string();
            base.replace(&format!("/{name}={}", path.display()), &format!("/{name}={file}"))
        }
        None => base,
    }
}

/// The same scheme without the file that it was given.
///
/// # Errors
/// What is none without it.
pub fn without_files(selection: &Selection) -> Result<Selection, Failure> {
    let mut text = selection.to_string();
    for (name, value) in selection.values().filter(|(_, value)| matches!(value, Value::File(_))) {
        text = text.replace(&format!("/{name}={value}"), "");
    }
    one(&text)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_named_without_folders_or_left_out() {
        let selection = one("gtq-blocks/k=2/v=3/order=a/b/c.safetensors").expect("a scheme");
        assert!(has_file(&selection));
        assert_eq!(plain(&selection), "gtq-blocks/k=2/v=3/order=c.safetensors");
        let bare = without_files(&selection).expect("a scheme");
        assert!(!has_file(&bare));
        assert_eq!(
            (bare.to_string(), plain(&bare)),
            ("gtq-blocks/k=2/v=3".into(), "gtq-blocks/k=2/v=3".into())
        );
    }
}
