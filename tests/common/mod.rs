//! How tests of the command run it, what it must say, and the files that they give it.
// Each test binary takes a part.
#![allow(dead_code)]

use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;
use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};
use tempfile::TempDir;

/// Keys, values and queries of a language model.
pub const SAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/kv-smollm2.safetensors");

/// Runs the command with no driver in reach, wherever the tests run.
pub fn ferrokv(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ferrokv"))
        .args(arguments)
        .env("CUDA_LAZY_DRIVER", "/nonexistent/libcuda.so.1")
        .output()
        .expect("the command starts")
}

/// What it said.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// Exit code 0; stdout.
pub fn succeed(arguments: &[&str]) -> String {
    let output = ferrokv(arguments);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// Exit code 2, nothing on stdout, and one line on stderr with each of `words`.
pub fn refused(arguments: &[&str], words: &[&str]) {
    let output = ferrokv(arguments);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
    assert_eq!(error.lines().count(), 1, "{arguments:?}: {error}");
    assert!(output.stdout.is_empty(), "{arguments:?}: {}", text(&output.stdout));
    for word in words {
        assert!(error.contains(word), "{arguments:?}: '{word}' is not in: {error}");
    }
}

/// A report that was written.
pub fn json(path: &str) -> Value {
    serde_json::from_str(&fs::read_to_string(path).expect("the report")).expect("JSON")
}

/// Name, element type, shape and bytes.
pub type Tensor<'a> = (&'a str, Dtype, &'a [usize], &'a [u8]);

/// A folder that goes with its owner.
pub struct Folder(TempDir);

impl Folder {
    /// An empty one.
    pub fn new() -> Self {
        Folder(tempfile::tempdir().expect("a temporary folder"))
    }

    /// A place in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The same as an argument.
    pub fn text(&self, name: &str) -> String {
        self.path(name).to_str().expect("UTF-8").to_owned()
    }

    /// What is in it.
    pub fn names(&self) -> BTreeSet<String> {
        let name = |entry: fs::DirEntry| entry.file_name().into_string().expect("UTF-8");
        fs::read_dir(self.0.path()).expect("the folder").map(|entry| name(entry.expect("an entry"))).collect()
    }

    /// A safetensors file of these tensors.
    pub fn tensors(&self, name: &str, tensors: &[Tensor]) -> String {
        self.tensors_with(name, tensors, None)
    }

    /// The same with metadata.
    pub fn tensors_with(&self, name: &str, tensors: &[Tensor], metadata: Option<&[(&str, &str)]>) -> String {
        let views = tensors.iter().map(|(name, dtype, shape, data)| {
            (*name, TensorView::new(*dtype, shape.to_vec(), data).expect("a tensor"))
        });
        let metadata = metadata.map(|pairs| {
            pairs.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect::<HashMap<_, _>>()
        });
        fs::write(self.path(name), safetensors::serialize(views, metadata).expect("a file"))
            .expect("written");
        self.text(name)
    }
}

/// Sentences without a pattern.
pub fn words(folder: &Folder, count: usize) -> String {
    let words =
        ["the", "other", "thing", "and", "in", "on", "there", "all", "a", "call", "ring", "10", "ten"];
    let mut state = 1u32;
    let mut text = String::new();
    for i in 0..count {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        text += words[(state >> 16) as usize % words.len()];
        text += if i % 9 == 8 { ". " } else { " " };
    }
    fs::write(folder.path("words.txt"), text).expect("written");
    folder.text("words.txt")
}
