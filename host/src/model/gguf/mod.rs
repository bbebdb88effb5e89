//! GGUF files: metadata and packed tensors, memory-mapped.
//!
//! Versions 2 and 3, little-endian:
//!
//! | part | bytes |
//! | --- | --- |
//! | magic `GGUF`, version u32, number of tensors u64, number of keys u64 | 24 |
//! | each key: string, type u32, value | |
//! | each tensor: name, number of axes u32, extents u64 (the row length first), type u32, offset u64 | |
//! | zeros up to the alignment | |
//! | the tensors' data, each at a multiple of the alignment | |
//!
//! A string is its length (u64) and UTF-8; an array is its type (u32), its length (u64) and its elements; the
//! alignment is 32 unless `general.alignment` sets another. The types of tensors are in [`TensorType`].
//!
//! [`Header::parse`] checks everything once; after that every tensor's bytes are there and of the right size.

mod dequantize;
mod parse;
mod types;
mod value;
pub mod write;

pub use dequantize::dequantize;
pub use parse::{Fault, Header, TensorInfo};
pub use types::TensorType;
pub use value::{Array, Value};

use memmap2::Mmap;
use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A result with this module's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Why a file cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused.
    #[error("cannot open {}: {source}; check the path, or fetch the model with ./setup --model", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Not what the format asks for.
    #[error("{} is not a GGUF file that can be read: {fault}; make or fetch it again", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        fault: Fault,
    },
}

/// Bytes of a mapped file or of memory, shared and cheap to clone.
#[derive(Clone)]
pub struct Bytes {
    storage: Arc<Storage>,
    range: Range<usize>,
}

enum Storage {
    Mapped(Mmap),
    Owned(Vec<u8>),
}

impl Bytes {
    fn new(storage: Storage) -> Self {
        let len = match &storage {
            Storage::Mapped(map) => map.len(),
            Storage::Owned(bytes) => bytes.len(),
        };
        Bytes { storage: Arc::new(storage), range: 0..len }
    }

    /// A part of them.
    ///
    /// # Panics
    /// If the range is not inside.
    pub fn slice(&self, range: Range<usize>) -> Bytes {
        assert!(range.start <= range.end && range.end <= self.len(), "{range:?} of {} bytes", self.len());
        let start = self.range.start;
        Bytes { storage: Arc::clone(&self.storage), range: start + range.start..start + range.end }
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        Bytes::new(Storage::Owned(bytes))
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let all: &[u8] = match &*self.storage {
            Storage::Mapped(map) => map,
            Storage::Owned(bytes) => bytes,
        };
        &all[self.range.clone()]
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bytes({})", self.len())
    }
}

/// An open file.
#[derive(Debug)]
pub struct Gguf {
    path: PathBuf,
    header: Header,
    /// Places in `header.metadata`.
    keys: HashMap<String, usize>,
    /// Places in `header.tensors`.
    names: HashMap<String, usize>,
    bytes: Bytes,
}

impl Gguf {
    /// Maps a file and checks its header.
    ///
    /// The file must not be changed while it is open: as with every mapped file, a program that shortens it
    /// ends this one with a bus error. Replace a model by renaming a new file over it.
    ///
    /// # Errors
    /// A file that cannot be opened or that is not valid.
    pub fn open(path: impl AsRef<Path>) -> Result<Gguf> {
        let path = path.as_ref();
        let io = |source| Error::Io { path: path.to_owned(), source };
        let file = File::open(path).map_err(io)?;
        if !file.metadata().map_err(io)?.is_file() {
            return Err(io(io::Error::other("it is not a regular file")));
        }
        // SAFETY: the bytes are only read, as u8, for which any value is valid; that nobody changes the file
        // is what the documentation asks of the user.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Gguf::new(path, Bytes::new(Storage::Mapped(map)))
    }

    /// A file that is in memory already; `name` stands for its path in messages.
    ///
    /// # Errors
    /// Bytes that are not valid.
    pub fn from_bytes(name: impl Into<PathBuf>, bytes: Vec<u8>) -> Result<Gguf> {
        Gguf::new(&name.into(), bytes.into())
    }

    fn new(path: &Path, bytes: Bytes) -> Result<Gguf> {
        let header =
            Header::parse(&bytes).map_err(|fault| Error::Invalid { path: path.to_owned(), fault })?;
        let keys = header.metadata.iter().enumerate().map(|(i, (key, _))| (key.clone(), i)).collect();
        let names = header.tensors.iter().enumerate().map(|(i, tensor)| (tensor.name.clone(), i)).collect();
        Ok(Gguf { path: path.to_owned(), header, keys, names, bytes })
    }

    /// Where it came from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Everything before the data, in the file's order.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The file's size in bytes.
    pub fn size(&self) -> usize {
        self.bytes.len()
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.keys.get(key).map(|&i| &self.header.metadata[i].1)
    }

    /// The tensor of a name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.names.get(name).map(|&i| &self.header.tensors[i])
    }

    /// A tensor's packed bytes.
    ///
    /// # Panics
    /// If the tensor is of another file and does not fit this one.
    pub fn data(&self, tensor: &TensorInfo) -> Bytes {
        self.bytes.slice(tensor.range.clone())
    }
}
