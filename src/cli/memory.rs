//! Memory of a size that a file decides.

use super::failure::Failure;
use bytemuck::Pod;

/// `len` zeros, or an error where `vec!` would end the process.
pub fn zeros<T: Pod>(name: &str, len: usize) -> Result<Vec<T>, Failure> {
    let mut values = Vec::new();
    let no_memory =
        |_| Failure::NoMemory { name: name.to_owned(), bytes: len.saturating_mul(size_of::<T>()) };
    values.try_reserve_exact(len).map_err(no_memory)?;
    values.resize(len, T::zeroed());
    Ok(values)
}
