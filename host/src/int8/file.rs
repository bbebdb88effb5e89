//! The file of a quantized cache.
//!
//! A safetensors file, so that any reader of the format can open it. A tensor `x` that was quantized is
//! stored as
//!
//! | tensor | type | shape |
//! | --- | --- | --- |
//! | `x.codes` | I8 | the shape of `x`: [tokens, …], each code in ±127 |
//! | `x.scales` | F32 | \[channels\], or [⌈tokens/16⌉, channels] with `block16`; see below |
//!
//! and every other tensor of the source as it was. Channels are the product of all extents but the first. The
//! header's `__metadata__` carries the source's texts and
//!
//! | key | value |
//! | --- | --- |
//! | `ferrokv.format` | `ferrokv-int8` |
//! | `ferrokv.version` | `1` |
//! | `ferrokv.scheme` | `channel` or `block16` |
//! | `ferrokv.tensors` | JSON: `{"x": {"dtype": "F16", "shape": [512, 3, 64]}, …}`, the originals |
//!
//! The reader believes none of it: types, shapes and sizes must agree, no code may be −128, and every scale
//! must be a positive normal number of at most `LARGEST`/127 of the original type, so that no code restores
//! to an infinity.

use super::{Matrix, Variant};
use crate::tensor_file::{self, Entry, Target, TensorFile, TensorWriter};
use half::{bf16, f16};
use kernels_gpu::int8::quantizer::scale_from_max;
use safetensors::Dtype as FileDtype;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};

/// The value of `ferrokv.format`.
pub const FORMAT: &str = "ferrokv-int8";
/// The version that this library writes, and the only one it reads.
pub const VERSION: u32 = 1;

const FORMAT_KEY: &str = "ferrokv.format";
const VERSION_KEY: &str = "ferrokv.version";
/// The word of version 1 for a granularity.
const GRANULARITY_KEY: &str = "ferrokv.scheme";
const TENSORS_KEY: &str = "ferrokv.tensors";
/// Says in a restored file what it was restored from.
const RESTORED_KEY: &str = "ferrokv.restored";

/// A result with this module's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// What can be wrong with a quantized file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Wrong as a tensor file.
    #[error(transparent)]
    File(#[from] tensor_file::Error),
    /// Tensors, but not ours.
    #[error("{} is not a {FORMAT} file; make one with `ferrokv quantize -o`", path.display())]
    NotQuantized {
        /// The file.
        path: PathBuf,
    },
    /// Ours already.
    #[error("{} is a {FORMAT} file already; restore it first with `ferrokv dequantize`", path.display())]
    AlreadyQuantized {
        /// The file.
        path: PathBuf,
    },
    /// Of another version.
    #[error("{} has {FORMAT} version '{found}', this program reads {VERSION}; use the program that wrote it", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// What it says.
        found: String,
    },
    /// Of an unknown granularity.
    #[error("{} has the unknown granularity '{found}'; this program reads channel and block16", path.display())]
    Granularity {
        /// The file.
        path: PathBuf,
        /// What it says.
        found: String,
    },
    /// A pair that is not complete.
    #[error("{} has no tensor '{missing}', which its metadata promises; make it again from the source", path.display())]
    MissingPart {
        /// The file.
        path: PathBuf,
        /// What is not there.
        missing: String,
    },
    /// Parts that contradict each other, or values that no quantizer writes.
    #[error("{}: {reason}; make it again from the source", path.display())]
    Inconsistent {
        /// The file.
        path: PathBuf,
        /// What does not fit.
        reason: String,
    },
}

/// Which elements share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Granularity {
    /// All tokens of a channel.
    Channel,
    /// 16 tokens of a channel: what [`Variant::Fused`] makes.
    Block16,
}

impl Granularity {
    /// Both.
    pub const ALL: [Granularity; 2] = [Granularity::Channel, Granularity::Block16];

    /// The name in files.
    pub fn name(self) -> &'static str {
        match self {
            Granularity::Channel => "channel",
            Granularity::Block16 => "block16",
        }
    }

    /// The granularity with that name.
    pub fn from_name(name: &str) -> Option<Granularity> {
        Granularity::ALL.into_iter().find(|granularity| granularity.name() == name)
    }

    /// The granularity of a variant's scales.
    pub fn of(variant: Variant) -> Granularity {
        if variant == Variant::Fused { Granularity::Block16 } else { Granularity::Channel }
    }

    /// The variant to restore with on a device.
    pub fn variant(self) -> Variant {
        match self {
            Granularity::Channel => Variant::Rows,
            Granularity::Block16 => Variant::Fused,
        }
    }

    /// The shape of a matrix's scales.
    pub fn scales_shape(self, matrix: Matrix) -> Vec<usize> {
        match self {
            Granularity::Channel => vec![matrix.channels],
            Granularity::Block16 => vec![matrix.scales(Variant::Fused) / matrix.channels, matrix.channels],
        }
    }
}

impl fmt::Display for Granularity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The element types that can be quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Dtype {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
}

impl Dtype {
    /// Of a safetensors type, if it is one of these.
    pub fn from_file(dtype: FileDtype) -> Option<Dtype> {
        match dtype {
            FileDtype::F32 => Some(Dtype::F32),
            FileDtype::F16 => Some(Dtype::F16),
            FileDtype::BF16 => Some(Dtype::Bf16),
            _ => None,
        }
    }

    /// As a safetensors type.
    pub fn to_file(self) -> FileDtype {
        match self {
            Dtype::F32 => FileDtype::F32,
            Dtype::F16 => FileDtype::F16,
            Dtype::Bf16 => FileDtype::BF16,
        }
    }

    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        self.to_file().bitsize() / 8
    }

    /// The largest scale that a quantizer gives a column of this type; no code times it rounds to an
    /// infinity.
    pub fn largest_scale(self) -> f32 {
        match self {
            Dtype::F32 => scale_from_max::<f32>(f32::INFINITY),
            Dtype::F16 => scale_from_max::<f16>(f32::INFINITY),
            Dtype::Bf16 => scale_from_max::<bf16>(f32::INFINITY),
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_file().fmt(f)
    }
}

/// What is stored of a tensor besides its codes and scales.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Original {
    /// The type it had.
    pub dtype: Dtype,
    /// The shape it had.
    pub shape: Vec<usize>,
}

impl Original {
    /// The tensor as a matrix: the first extent counts tokens, the product of the others channels.
    ///
    /// # Errors
    /// Fewer than two extents, an extent of zero or too many elements, in words.
    pub fn matrix(&self) -> std::result::Result<Matrix, String> {
        let [tokens, rest @ ..] = self.shape.as_slice() else {
            return Err("rank 0; [tokens, …] with two or more extents is needed".into());
        };
        if rest.is_empty() {
            return Err("rank 1; [tokens, …] with two or more extents is needed".into());
        }
        let channels = rest.iter().try_fold(1usize, |product, extent| product.checked_mul(*extent));
        let channels = channels.ok_or("more channels than can be counted")?;
        Matrix::new(*tokens, channels).map_err(|error| error.to_string())
    }
}

/// The names that a tensor's parts have in the file.
fn parts(name: &str) -> (String, String) {
    (format!("{name}.codes"), format!("{name}.scales"))
}

/// Refuses a source that is quantized already.
///
/// # Errors
/// [`Error::AlreadyQuantized`].
pub fn check_source<R: Read + Seek>(source: &TensorFile<R>) -> Result<()> {
    match source.metadata().contains_key(FORMAT_KEY) {
        true => Err(Error::AlreadyQuantized { path: source.path().to_owned() }),
        false => Ok(()),
    }
}

/// A quantized file, open for reading.
#[derive(Debug)]
pub struct QuantizedFile<R = File> {
    file: TensorFile<R>,
    granularity: Granularity,
    originals: BTreeMap<String, Original>,
}

impl QuantizedFile<File> {
    /// Opens the file and checks all that its header says.
    ///
    /// # Errors
    /// Any of [`Error`]'s.
    pub fn open(path: &Path) -> Result<Self> {
        QuantizedFile::new(TensorFile::open(path)?)
    }
}

impl<R: Read + Seek> QuantizedFile<R> {
    /// Checks all that the header says.
    ///
    /// # Errors
    /// Any of [`Error`]'s.
    pub fn new(file: TensorFile<R>) -> Result<Self> {
        let path = || file.path().to_owned();
        let text = |key: &str| file.metadata().get(key).map(String::as_str);
        if text(FORMAT_KEY) != Some(FORMAT) {
            return Err(Error::NotQuantized { path: path() });
        }
        let version = text(VERSION_KEY).unwrap_or("");
        if version.parse() != Ok(VERSION) {
            return Err(Error::Version { path: path(), found: version.to_owned() });
        }
        let granularity = text(GRANULARITY_KEY).unwrap_or("");
        let Some(granularity) = Granularity::from_name(granularity) else {
            return Err(Error::Granularity { path: path(), found: granularity.to_owned() });
        };
        let inconsistent = |reason| Error::Inconsistent { path: path(), reason };
        let originals: BTreeMap<String, Original> = serde_json::from_str(text(TENSORS_KEY).unwrap_or(""))
            .map_err(|error| inconsistent(format!("its {TENSORS_KEY} cannot be read ({error})")))?;
        for (name, original) in &originals {
            let matrix =
                original.matrix().map_err(|reason| inconsistent(format!("tensor '{name}' has {reason}")))?;
            let (codes, scales) = parts(name);
            let wanted = [
                (codes, FileDtype::I8, original.shape.clone()),
                (scales, FileDtype::F32, granularity.scales_shape(matrix)),
            ];
            for (part, dtype, shape) in wanted {
                let Some(entry) = file.entries().get(&part) else {
                    return Err(Error::MissingPart { path: path(), missing: part });
                };
                if entry.dtype != dtype || entry.shape != shape {
                    return Err(inconsistent(format!(
                        "'{part}' is {} {:?} where {dtype} {shape:?} belongs",
                        entry.dtype, entry.shape
                    )));
                }
            }
            if file.entries().contains_key(name) {
                return Err(inconsistent(format!("tensor '{name}' is there both quantized and as it was")));
            }
        }
        Ok(QuantizedFile { file, granularity, originals })
    }

    /// Which elements share a scale.
    pub fn granularity(&self) -> Granularity {
        self.granularity
    }

    /// The quantized tensors.
    pub fn originals(&self) -> &BTreeMap<String, Original> {
        &self.originals
    }

    /// The tensors that were stored as they are.
    pub fn others(&self) -> impl Iterator<Item = (&String, &Entry)> {
        let is_part = |name: &str| {
            let of = |suffix| name.strip_suffix(suffix).is_some_and(|name| self.originals.contains_key(name));
            of(".codes") || of(".scales")
        };
        self.file.entries().iter().filter(move |(name, _)| !is_part(name))
    }

    /// The metadata of the source, and what it is restored from.
    pub fn restored_metadata(&self) -> BTreeMap<String, String> {
        let mut metadata = self.file.metadata().clone();
        for key in [FORMAT_KEY, VERSION_KEY, GRANULARITY_KEY, TENSORS_KEY] {
            metadata.remove(key);
        }
        metadata.insert(RESTORED_KEY.into(), format!("{FORMAT} {VERSION} {}", self.granularity));
        metadata
    }

    /// The codes and scales of a quantized tensor.
    ///
    /// # Errors
    /// [`Error::Inconsistent`] for values that no quantizer writes, or what reading reports.
    pub fn read(&mut self, name: &str) -> Result<(Vec<i8>, Vec<f32>)> {
        let (codes_name, scales_name) = parts(name);
        let codes: Vec<i8> = self.file.read(&codes_name, FileDtype::I8)?;
        let scales: Vec<f32> = self.file.read(&scales_name, FileDtype::F32)?;
        let inconsistent = |reason| Error::Inconsistent { path: self.file.path().to_owned(), reason };
        if let Some(at) = codes.iter().position(|code| *code == i8::MIN) {
            return Err(inconsistent(format!("'{codes_name}' has the code -128 at element {at}")));
        }
        let Some(Original { dtype, .. }) = self.originals.get(name) else {
            return Err(inconsistent(format!("its {TENSORS_KEY} does not name '{name}'")));
        };
        let most = dtype.largest_scale();
        let possible = |scale: &f32| scale.is_normal() && *scale > 0.0 && *scale <= most;
        if let Some(at) = scales.iter().position(|scale| !possible(scale)) {
            let value = scales[at];
            return Err(inconsistent(format!(
                "'{scales_name}' has the scale {value:e} at element {at}; {dtype} has {:e} to {most:e}",
                f32::MIN_POSITIVE
            )));
        }
        Ok((codes, scales))
    }

    /// The bytes of a tensor that was stored as it is.
    ///
    /// # Errors
    /// What reading reports.
    pub fn read_bytes(&mut self, name: &str) -> Result<Vec<u8>> {
        Ok(self.file.read_bytes(name)?)
    }
}

/// A quantized file being written; nothing is at its path before [`finish`](Self::finish).
#[derive(Debug)]
pub struct QuantizedWriter {
    writer: TensorWriter,
}

impl QuantizedWriter {
    /// Starts the file for `quantized` tensors of a source with `metadata`, and its `others`, stored as they
    /// are.
    ///
    /// # Errors
    /// [`Error::Inconsistent`] for a tensor that is no matrix, or what writing reports.
    pub fn create<'a>(
        target: Target,
        granularity: Granularity,
        metadata: &BTreeMap<String, String>,
        quantized: &BTreeMap<String, Original>,
        others: impl IntoIterator<Item = (&'a String, &'a Entry)>,
    ) -> Result<Self> {
        let mut tensors = Vec::new();
        for (name, original) in quantized {
            let matrix = original.matrix().map_err(|reason| {
                let reason = format!("tensor '{name}' has {reason}");
                Error::Inconsistent { path: target.path().to_owned(), reason }
            })?;
            let (codes, scales) = parts(name);
            tensors.push((codes, FileDtype::I8, original.shape.clone()));
            tensors.push((scales, FileDtype::F32, granularity.scales_shape(matrix)));
        }
        tensors
            .extend(others.into_iter().map(|(name, entry)| (name.clone(), entry.dtype, entry.shape.clone())));
        let mut metadata = metadata.clone();
        metadata.insert(FORMAT_KEY.into(), FORMAT.into());
        metadata.insert(VERSION_KEY.into(), VERSION.to_string());
        metadata.insert(GRANULARITY_KEY.into(), granularity.name().into());
        metadata.insert(TENSORS_KEY.into(), serde_json::json!(quantized).to_string());
        Ok(QuantizedWriter { writer: TensorWriter::create(target, &metadata, tensors)? })
    }

    /// Writes the codes and scales of a tensor.
    ///
    /// # Errors
    /// What writing reports.
    pub fn write(&mut self, name: &str, codes: &[i8], scales: &[f32]) -> Result<()> {
        let (codes_name, scales_name) = parts(name);
        self.writer.write(&codes_name, codes)?;
        Ok(self.writer.write(&scales_name, scales)?)
    }

    /// Writes a tensor that is stored as it is.
    ///
    /// # Errors
    /// What writing reports.
    pub fn write_bytes(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        Ok(self.writer.write(name, bytes)?)
    }

    /// Gives the file its name.
    ///
    /// # Errors
    /// What writing reports.
    pub fn finish(self) -> Result<()> {
        Ok(self.writer.finish()?)
    }
}
