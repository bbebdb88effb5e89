//! Which tensors of a file are quantized, and which queries they are measured with.

use crate::cli::failure::Failure;
use host::int8::file::{Dtype, Original};
use host::tensor_file::{Entry, TensorFile};
use std::collections::BTreeMap;

/// The tensors of a file, divided.
pub struct Selection {
    /// To be quantized.
    pub chosen: BTreeMap<String, Original>,
    /// The others, with the reason.
    pub kept: BTreeMap<String, String>,
}

/// `layer.00.query` for `layer.00.key`.
pub fn query_of(name: &str) -> Option<String> {
    name.strip_suffix("key")
        .filter(|stem| stem.is_empty() || stem.ends_with('.'))
        .map(|stem| format!("{stem}query"))
}

/// Whether `name` is the `query` beside a `key`.
fn is_query(file: &TensorFile, name: &str) -> bool {
    let stem = name.strip_suffix("query").filter(|stem| stem.is_empty() || stem.ends_with('.'));
    stem.is_some_and(|stem| file.entries().contains_key(&format!("{stem}key")))
}

/// Whether `name` matches: as a whole if the pattern has `*` or `?`, else any part of it.
fn matches(pattern: &str, name: &str) -> bool {
    if pattern.contains(['*', '?']) {
        glob(pattern.as_bytes(), name.as_bytes())
    } else {
        name.contains(pattern)
    }
}

/// `*` stands for any bytes, `?` for one. Goes back to the last star only, so it takes |pattern|·|name|
/// steps.
fn glob(pattern: &[u8], name: &[u8]) -> bool {
    let (mut p, mut n) = (0, 0);
    let mut star = None;
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(c) if *c == b'?' || *c == name[n] => {
                p += 1;
                n += 1;
            }
            _ => match star {
                Some((at, from)) => {
                    star = Some((at, from + 1));
                    p = at + 1;
                    n = from + 1;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|c| *c == b'*')
}

/// The tensor as one that can be quantized, or why it is none.
fn suitable(entry: &Entry) -> Result<Original, String> {
    let dtype = Dtype::from_file(entry.dtype);
    let dtype = dtype.ok_or_else(|| format!("it holds {}; F32, F16 and BF16 are accepted", entry.dtype))?;
    let original = Original { dtype, shape: entry.shape.clone() };
    match original.matrix() {
        Ok(_) => Ok(original),
        Err(reason) => Err(format!("shape {:?}: {reason}", entry.shape)),
    }
}

/// Divides the tensors of `file`. With patterns, what they match must be suitable; without, what is not a
/// float of rank 2 or more is passed over. Queries beside keys are measured with, unless `queries` asks for
/// them.
///
/// # Errors
/// A pattern that matches nothing, a tensor that cannot be quantized, or nothing left.
pub fn select(file: &TensorFile, patterns: &[String], queries: bool) -> Result<Selection, Failure> {
    let path = || file.path().display().to_string();
    for pattern in patterns {
        if !file.entries().keys().any(|name| matches(pattern, name)) {
            let mut names: Vec<&str> = file.entries().keys().take(6).map(String::as_str).collect();
            if file.entries().len() > names.len() {
                names.push("…");
            }
            let names = if names.is_empty() { "none".into() } else { names.join(", ") };
            return Err(Failure::NoMatch { path: path(), pattern: pattern.clone(), names });
        }
    }
    let mut selection = Selection { chosen: BTreeMap::new(), kept: BTreeMap::new() };
    for (name, entry) in file.entries() {
        let named = patterns.iter().any(|pattern| matches(pattern, name));
        let is_matrix = Dtype::from_file(entry.dtype).is_some() && entry.shape.len() >= 2;
        let kept = if !patterns.is_empty() && !named {
            Some("not named by --tensors".to_owned())
        } else if is_query(file, name) && !queries {
            Some("queries that the keys are measured with".to_owned())
        } else {
            match suitable(entry) {
                Ok(original) => {
                    selection.chosen.insert(name.clone(), original);
                    None
                }
                Err(reason) if named || is_matrix => {
                    return Err(Failure::Unsuitable { name: name.clone(), reason });
                }
                Err(reason) => Some(reason),
            }
        };
        selection.kept.extend(kept.map(|reason| (name.clone(), reason)));
    }
    if selection.chosen.is_empty() {
        let first = selection.kept.iter().next();
        let reason = first.map_or("it is empty".into(), |(name, reason)| format!("'{name}': {reason}"));
        return Err(Failure::NothingToDo { path: path(), reason });
    }
    Ok(selection)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_people_expect() {
        for (pattern, name) in [
            ("00", "layer.00.key"),
            ("layer.*.key", "layer.00.key"),
            ("*", ""),
            ("a?c*", "abc"),
            ("*b*b", "abbb"),
        ] {
            assert!(matches(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [
            ("01", "layer.00.key"),
            ("layer.*.key", "layer.00.keys"),
            ("?", ""),
            ("a*c", "abcd"),
            ("key*", "a.key"),
        ] {
            assert!(!matches(pattern, name), "{pattern} {name}");
        }
        // Would take forever if every star were tried again.
        assert!(!matches(&"*a".repeat(40), &"a".repeat(39)));
    }

    #[test]
    fn queries_belong_to_keys() {
        assert_eq!(query_of("layer.00.key").as_deref(), Some("layer.00.query"));
        assert_eq!(query_of("key").as_deref(), Some("query"));
        assert_eq!(query_of("monkey"), None);
        assert_eq!(query_of("layer.00.value"), None);
    }
}
