//! Tensors in files (safetensors): reading with every number of the header checked, writing that replaces a
//! file as a whole or not at all.
//!
//! The reader copies tensors out one at a time instead of mapping the file: a file that another program
//! shortens meanwhile is an error then and not a crash. The writer's bytes depend on its input only, so equal
//! caches make equal files.

use bytemuck::Pod;
pub use safetensors::Dtype;
use safetensors::tensor::Metadata;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

// The format is little-endian, and tensors are copied as they are.
const _: () = assert!(cfg!(target_endian = "little"));

/// The longest header: the limit of the safetensors project.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Bytes of the header's length.
const LENGTH_BYTES: u64 = 8;

/// A result with this module's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// What can be wrong with a tensor file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused.
    #[error("cannot {doing} {}: {source}; {way_out}", path.display())]
    Io {
        /// What was being done.
        doing: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// Why not.
        source: io::Error,
        /// What to look at.
        way_out: &'static str,
    },
    /// Not what the format asks for.
    #[error("{} is not a valid safetensors file: {reason}; make or fetch it again", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A tensor that is not in the file.
    #[error("{} has no tensor '{name}'; it has {available}", path.display())]
    NoTensor {
        /// The file.
        path: PathBuf,
        /// The tensor asked for.
        name: String,
        /// Some that are there.
        available: String,
    },
    /// A tensor of another type than it is read as.
    #[error("tensor '{name}' of {} holds {dtype}, but {accepted} is read", path.display())]
    WrongDtype {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// What it holds.
        dtype: Dtype,
        /// What it is read as.
        accepted: Dtype,
    },
    /// A tensor that memory cannot hold.
    #[error("tensor '{name}' needs {bytes} bytes of memory, more than there is; split the file")]
    NoMemory {
        /// The tensor.
        name: String,
        /// Its size.
        bytes: u64,
    },
    /// Something is where the output should go.
    #[error("{} exists; choose another path, or give --force to replace it", path.display())]
    Exists {
        /// The path.
        path: PathBuf,
    },
    /// The output would replace something that is no file.
    #[error("{} is not a regular file and will not be replaced; choose another path", path.display())]
    NotRegular {
        /// The path.
        path: PathBuf,
    },
    /// The output would replace the input.
    #[error("{} is the input; choose another path for the output", path.display())]
    SameAsInput {
        /// The path.
        path: PathBuf,
    },
    /// Two tensors of one name.
    #[error("two tensors would be named '{name}'; rename one in the source")]
    Duplicate {
        /// The name.
        name: String,
    },
    /// Data that does not fit the tensor announced.
    #[error(
        "tensor '{name}' was announced with {expected} bytes and given {got}; give it all of its data once"
    )]
    Length {
        /// The tensor.
        name: String,
        /// Bytes given.
        got: u64,
        /// Bytes announced.
        expected: u64,
    },
}

/// A tensor's type, shape and place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// What it holds.
    pub dtype: Dtype,
    /// Its extents, outermost first.
    pub shape: Vec<usize>,
    /// Where its data starts, counted from the start of all data.
    start: u64,
    bytes: u64,
}

impl Entry {
    /// How many elements it has.
    pub fn elements(&self) -> usize {
        // The reader and the writer have checked that the product exists.
        self.shape.iter().product()
    }

    /// Its size in the file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// A safetensors file, open for reading.
#[derive(Debug)]
pub struct TensorFile<R = File> {
    source: R,
    path: PathBuf,
    entries: BTreeMap<String, Entry>,
    metadata: BTreeMap<String, String>,
    data_start: u64,
}

impl TensorFile<File> {
    /// Opens the file and checks its header.
    ///
    /// # Errors
    /// [`Error::Io`], or [`Error::Corrupt`] with what is wrong.
    pub fn open(path: &Path) -> Result<Self> {
        let way_out = "check the path and its permissions";
        let fail = |source| Error::Io { doing: "open", path: path.to_owned(), source, way_out };
        let file = File::open(path).map_err(fail)?;
        if file.metadata().map_err(fail)?.is_dir() {
            return Err(fail(io::ErrorKind::IsADirectory.into()));
        }
        TensorFile::new(file, path)
    }
}

impl<R: Read + Seek> TensorFile<R> {
    /// Checks the header of `source`; `path` is what errors call it.
    ///
    /// # Errors
    /// As [`open`](TensorFile::open).
    pub fn new(mut source: R, path: &Path) -> Result<Self> {
        let corrupt = |reason: String| Error::Corrupt { path: path.to_owned(), reason };
        let way_out = "check the disk and whether another program changes the file";
        let fail = |source| Error::Io { doing: "read", path: path.to_owned(), source, way_out };
        let total = source.seek(SeekFrom::End(0)).map_err(fail)?;
        source.seek(SeekFrom::Start(0)).map_err(fail)?;
        if total < LENGTH_BYTES {
            return Err(corrupt(format!(
                "it has {total} bytes, not even the {LENGTH_BYTES} of a header's length"
            )));
        }
        let mut length = [0; LENGTH_BYTES as usize];
        source.read_exact(&mut length).map_err(fail)?;
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER_BYTES {
            return Err(corrupt(format!(
                "a header of {length} bytes exceeds the {MAX_HEADER_BYTES} allowed"
            )));
        }
        let data_start = LENGTH_BYTES + length;
        if data_start > total {
            let present = total - LENGTH_BYTES;
            return Err(corrupt(format!(
                "it is cut off: the header has {length} bytes, {present} are there"
            )));
        }
        // Bounded by the file's size, which was just compared.
        let mut header = vec![0; length as usize];
        source.read_exact(&mut header).map_err(fail)?;
        // Not `SafeTensors::deserialize`: its sum of offsets and header can overflow.
        let header: Metadata = serde_json::from_slice(&header)
            .map_err(|error| corrupt(format!("its header is wrong: {}", one_line(&error.to_string()))))?;
        let (announced, present) = (header.data_len() as u64, total - data_start);
        if announced != present {
            let what = if announced > present { "it is cut off" } else { "it has bytes that no tensor owns" };
            return Err(corrupt(format!("{what}: the tensors take {announced} bytes, {present} are there")));
        }
        let entry = |info: &safetensors::tensor::TensorInfo| Entry {
            dtype: info.dtype,
            shape: info.shape.clone(),
            start: info.data_offsets.0 as u64,
            bytes: (info.data_offsets.1 - info.data_offsets.0) as u64,
        };
        let entries = header.tensors().into_iter().map(|(name, info)| (name, entry(info))).collect();
        let metadata = header.metadata().clone().unwrap_or_default().into_iter().collect();
        Ok(TensorFile { source, path: path.to_owned(), entries, metadata, data_start })
    }

    /// The file's name.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The tensors by name.
    pub fn entries(&self) -> &BTreeMap<String, Entry> {
        &self.entries
    }

    /// The header's free texts.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// The tensor called `name`.
    ///
    /// # Errors
    /// [`Error::NoTensor`].
    pub fn entry(&self, name: &str) -> Result<&Entry> {
        self.entries.get(name).ok_or_else(|| {
            let mut names: Vec<&str> = self.entries.keys().take(6).map(String::as_str).collect();
            match self.entries.len() {
                0 => names.push("none"),
                1..=6 => {}
                _ => names.push("…"),
            }
            Error::NoTensor { path: self.path.clone(), name: name.to_owned(), available: names.join(", ") }
        })
    }

    /// Copies a tensor of type `dtype` out, as elements of `T`.
    ///
    /// # Errors
    /// [`Error::NoTensor`], [`Error::WrongDtype`], [`Error::NoMemory`], [`Error::Io`].
    ///
    /// # Panics
    /// If `T` and `dtype` differ in size.
    pub fn read<T: Pod>(&mut self, name: &str, dtype: Dtype) -> Result<Vec<T>> {
        assert_eq!(size_of::<T>() * 8, dtype.bitsize(), "{dtype} is read as another type");
        let entry = self.entry(name)?;
        if entry.dtype != dtype {
            let (path, name) = (self.path.clone(), name.to_owned());
            return Err(Error::WrongDtype { path, name, dtype: entry.dtype, accepted: dtype });
        }
        self.copy_out(name)
    }

    /// Copies the bytes of a tensor out, whatever its type.
    ///
    /// # Errors
    /// [`Error::NoTensor`], [`Error::NoMemory`], [`Error::Io`].
    pub fn read_bytes(&mut self, name: &str) -> Result<Vec<u8>> {
        self.copy_out(name)
    }

    fn copy_out<T: Pod>(&mut self, name: &str) -> Result<Vec<T>> {
        let (start, bytes) = self.entry(name).map(|entry| (entry.start, entry.bytes))?;
        let no_memory = || Error::NoMemory { name: name.to_owned(), bytes };
        // The header cannot announce more than the file has, but a sparse file can be larger than memory.
        let len = usize::try_from(bytes).map_err(|_| no_memory())? / size_of::<T>();
        let mut values: Vec<T> = Vec::new();
        values.try_reserve_exact(len).map_err(|_| no_memory())?;
        values.resize(len, T::zeroed());
        let at = SeekFrom::Start(self.data_start + start);
        let copied =
            self.source.seek(at).and_then(|_| self.source.read_exact(bytemuck::cast_slice_mut(&mut values)));
        let way_out = "check the disk and whether another program changes the file";
        copied.map_err(|source| Error::Io { doing: "read", path: self.path.clone(), source, way_out })?;
        Ok(values)
    }
}

/// Where an output goes, checked before any work is done.
#[derive(Clone, Debug)]
pub struct Target {
    path: PathBuf,
    force: bool,
}

impl Target {
    /// `path`, which `force` allows to replace a file, but not `input`.
    ///
    /// # Errors
    /// [`Error::SameAsInput`], [`Error::Exists`], [`Error::NotRegular`], or [`Error::Io`] for a folder that
    /// is not there.
    pub fn new(path: &Path, force: bool, input: Option<&Path>) -> Result<Self> {
        let way_out = "choose a path in a folder that exists";
        if path.file_name().is_none() {
            return Err(Error::NotRegular { path: path.to_owned() });
        }
        let folder = folder_of(path);
        let there = fs::metadata(folder).and_then(|found| match found.is_dir() {
            true => Ok(()),
            false => Err(io::ErrorKind::NotADirectory.into()),
        });
        there.map_err(|source| Error::Io { doing: "write to", path: folder.to_owned(), source, way_out })?;
        // A link whose aim is gone exists as well.
        if fs::symlink_metadata(path).is_ok() {
            let resolved = fs::canonicalize(path).ok();
            if resolved.is_some() && resolved == input.and_then(|input| fs::canonicalize(input).ok()) {
                return Err(Error::SameAsInput { path: path.to_owned() });
            }
            if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
                return Err(Error::NotRegular { path: path.to_owned() });
            }
            if !force {
                return Err(Error::Exists { path: path.to_owned() });
            }
        }
        Ok(Target { path: path.to_owned(), force })
    }

    /// The path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn failed(&self, source: io::Error) -> Error {
        let way_out = "check the folder's permissions and its free space";
        Error::Io { doing: "write", path: self.path.clone(), source, way_out }
    }

    /// A new file beside the target, gone again unless [`replace`](Self::replace) gives it the target's name.
    fn temporary(&self) -> Result<NamedTempFile> {
        let mut builder = tempfile::Builder::new();
        builder.prefix(".ferrokv-").suffix(".part");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            // What a new file would get: the process's mask takes its bits off.
            builder.permissions(fs::Permissions::from_mode(0o666));
        }
        builder.tempfile_in(folder_of(&self.path)).map_err(|source| self.failed(source))
    }

    fn replace(&self, temporary: NamedTempFile) -> Result<()> {
        temporary.as_file().sync_all().map_err(|source| self.failed(source))?;
        let moved = match self.force {
            true => temporary.persist(&self.path),
            false => temporary.persist_noclobber(&self.path),
        };
        match moved {
            Ok(_) => Ok(()),
            Err(error) if error.error.kind() == io::ErrorKind::AlreadyExists => {
                Err(Error::Exists { path: self.path.clone() })
            }
            Err(error) => Err(self.failed(error.error)),
        }
    }

    /// Makes `contents` the target's contents, all of it or nothing.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Exists`].
    pub fn write(&self, contents: &[u8]) -> Result<()> {
        let mut temporary = self.temporary()?;
        temporary.write_all(contents).map_err(|source| self.failed(source))?;
        self.replace(temporary)
    }
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A safetensors file being written: beside its target, renamed when [`finish`](Self::finish) has it all.
///
/// The types and shapes come first, so that tensors can be written one at a time, in any order.
#[derive(Debug)]
pub struct TensorWriter {
    target: Target,
    temporary: NamedTempFile,
    data_start: u64,
    /// What is still to come.
    missing: BTreeMap<String, Entry>,
}

impl TensorWriter {
    /// Starts a file of `tensors` (name, type, shape) with `metadata` in its header.
    ///
    /// # Errors
    /// [`Error::Duplicate`], [`Error::NoMemory`] for a shape that overflows, [`Error::Io`].
    pub fn create(
        target: Target,
        metadata: &BTreeMap<String, String>,
        tensors: impl IntoIterator<Item = (String, Dtype, Vec<usize>)>,
    ) -> Result<Self> {
        let mut tensors: Vec<_> = tensors.into_iter().collect();
        // The widest types first keep every tensor aligned.
        tensors.sort_by(|a, b| b.1.bitsize().cmp(&a.1.bitsize()).then_with(|| a.0.cmp(&b.0)));
        let mut header = serde_json::Map::new();
        let mut missing = BTreeMap::new();
        let mut start = 0;
        for (name, dtype, shape) in tensors {
            let elements = shape.iter().try_fold(1u64, |n, extent| n.checked_mul(*extent as u64));
            let bytes = elements.and_then(|n| n.checked_mul(dtype.bitsize() as u64)).map(|bits| bits / 8);
            let end = bytes.and_then(|bytes| bytes.checked_add(start)).filter(|end| *end < 1 << 60);
            let Some(end) = end else { return Err(Error::NoMemory { name, bytes: u64::MAX }) };
            let info = serde_json::json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]});
            header.insert(name.clone(), info);
            let entry = Entry { dtype, shape, start, bytes: end - start };
            if missing.insert(name.clone(), entry).is_some() {
                return Err(Error::Duplicate { name });
            }
            start = end;
        }
        header.insert("__metadata__".into(), serde_json::json!(metadata));
        let mut header = serde_json::Value::Object(header).to_string();
        while !header.len().is_multiple_of(8) {
            header.push(' ');
        }
        let data_start = LENGTH_BYTES + header.len() as u64;
        let mut temporary = target.temporary()?;
        let written = temporary
            .write_all(&(header.len() as u64).to_le_bytes())
            .and_then(|()| temporary.write_all(header.as_bytes()))
            .and_then(|()| temporary.as_file().set_len(data_start + start));
        written.map_err(|source| target.failed(source))?;
        Ok(TensorWriter { target, temporary, data_start, missing })
    }

    /// Writes all of one tensor.
    ///
    /// # Errors
    /// [`Error::Length`] for data of another size or given twice, [`Error::Io`].
    pub fn write<T: Pod>(&mut self, name: &str, values: &[T]) -> Result<()> {
        let got = size_of_val(values) as u64;
        let expected = self.missing.get(name).map_or(0, |entry| entry.bytes);
        let Some(entry) = self.missing.get(name).filter(|entry| entry.bytes == got) else {
            return Err(Error::Length { name: name.to_owned(), got, expected });
        };
        let written = self
            .temporary
            .seek(SeekFrom::Start(self.data_start + entry.start))
            .and_then(|_| self.temporary.write_all(bytemuck::cast_slice(values)));
        written.map_err(|source| self.target.failed(source))?;
        self.missing.remove(name);
        Ok(())
    }

    /// Gives the file its name.
    ///
    /// # Errors
    /// [`Error::Length`] if a tensor is missing, [`Error::Exists`] if something has appeared there meanwhile,
    /// [`Error::Io`].
    pub fn finish(self) -> Result<()> {
        if let Some((name, entry)) = self.missing.into_iter().find(|(_, entry)| entry.bytes != 0) {
            return Err(Error::Length { name, got: 0, expected: entry.bytes });
        }
        self.target.replace(self.temporary)
    }
}
