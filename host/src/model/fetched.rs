//! What `./setup --model` fetched: in `.ferrokv` of this folder or of one above it.

use super::error::{Error, Result};
use std::path::{Path, PathBuf};

/// SmolLM2-135M-Instruct, the model that commands take where none is given.
pub const MODEL: &str = ".ferrokv/models/SmolLM2-135M-Instruct.Q4_1.gguf";

/// The texts' names: State of the Union addresses from 1790 to 2021, and Moby Dick.
pub const TEXTS: [&str; 2] = ["sotu", "moby-dick"];

/// Where the model is.
///
/// # Errors
/// It was not fetched.
pub fn model() -> Result<PathBuf> {
    find(Path::new(MODEL))
}

/// Where a text is, by its name.
///
/// # Errors
/// It was not fetched, or there is none of that name.
pub fn text(name: &str) -> Result<PathBuf> {
    find(Path::new(".ferrokv/texts").join(format!("{name}.txt")).as_ref())
}

fn find(path: &Path) -> Result<PathBuf> {
    let here = std::env::current_dir().unwrap_or_default();
    let found = here.ancestors().map(|folder| folder.join(path)).find(|path| path.is_file());
    found.ok_or_else(|| Error::NotFetched { path: path.to_owned() })
}
