//! The header: nothing in it is believed before it is checked, and no memory is taken for a count that the
//! bytes left cannot hold.

use super::{Array, TensorType, Value};
use std::collections::HashSet;
use std::ops::Range;

/// The first bytes of every file.
pub const MAGIC: [u8; 4] = *b"GGUF";

/// The key that sets the alignment of the tensors.
pub const ALIGNMENT_KEY: &str = "general.alignment";

/// The alignment of the tensors where the metadata does not set it.
pub const DEFAULT_ALIGNMENT: u64 = 32;

/// Arrays within arrays; files in use have none.
const MAX_ARRAY_DEPTH: u32 = 4;

/// Axes of a tensor.
const MAX_AXES: u32 = 4;

/// What a file breaks.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// Other first bytes.
    #[error("it starts with {found:02x?} and not with 'GGUF'")]
    Magic {
        /// The first bytes, up to four.
        found: Vec<u8>,
    },
    /// Bytes in the other order.
    #[error("it is big-endian, and only little-endian files are read")]
    BigEndian,
    /// A version that is not read.
    #[error("its version is {version}, and 2 and 3 are read")]
    Version {
        /// What it says.
        version: u32,
    },
    /// The bytes end too early.
    #[error("it is cut short: {what} at byte {at} needs {needed} bytes and {left} are left")]
    Truncated {
        /// What was being read.
        what: &'static str,
        /// Where.
        at: u64,
        /// The least that it takes.
        needed: u64,
        /// What there is.
        left: u64,
    },
    /// A text that is none.
    #[error("{what} at byte {at} is not UTF-8")]
    NotUtf8 {
        /// What was being read.
        what: &'static str,
        /// Where its text starts.
        at: u64,
    },
    /// A metadata type that there is not.
    #[error("metadata '{key}' has the unknown type {id}")]
    ValueType {
        /// The key.
        key: String,
        /// The type's number.
        id: u32,
    },
    /// A truth value that is neither 0 nor 1.
    #[error("metadata '{key}' has the truth value {byte}")]
    Bool {
        /// The key.
        key: String,
        /// What is there.
        byte: u8,
    },
    /// Arrays within arrays within arrays.
    #[error("metadata '{key}' has arrays more than {MAX_ARRAY_DEPTH} deep")]
    ArrayDepth {
        /// The key.
        key: String,
    },
    /// Two values of one key.
    #[error("metadata '{key}' is there twice")]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// An alignment that is none.
    #[error("'{ALIGNMENT_KEY}' is {value}, not a power of two in a u32")]
    Alignment {
        /// What it says.
        value: String,
    },
    /// Two tensors of one name.
    #[error("tensor '{name}' is there twice")]
    DuplicateTensor {
        /// The name.
        name: String,
    },
    /// A tensor without axes, or with too many.
    #[error("tensor '{name}' has {axes} axes, and 1 to {MAX_AXES} are read")]
    Axes {
        /// The tensor.
        name: String,
        /// What it says.
        axes: u32,
    },
    /// An extent of 0, or more values than can be counted.
    #[error("tensor '{name}' has the impossible extents {dims:?}")]
    Extents {
        /// The tensor.
        name: String,
        /// Its extents, the row length first.
        dims: Vec<u64>,
    },
    /// A row that is no whole number of blocks.
    #[error(
        "tensor '{name}' has rows of {columns} values, no multiple of the {block} of a {tensor_type} block"
    )]
    RaggedRow {
        /// The tensor.
        name: String,
        /// Values of a row.
        columns: u64,
        /// Its type.
        tensor_type: TensorType,
        /// Values of a block.
        block: usize,
    },
    /// A tensor type that is not read.
    #[error("tensor '{name}' has the type {}, and {} are read", type_text(*.id), known_types())]
    TensorType {
        /// The tensor.
        name: String,
        /// The type's number.
        id: u32,
    },
    /// A tensor that starts between two aligned places.
    #[error("tensor '{name}' starts at offset {offset}, no multiple of the alignment {alignment}")]
    Misaligned {
        /// The tensor.
        name: String,
        /// Its offset in the data.
        offset: u64,
        /// The file's alignment.
        alignment: u64,
    },
    /// A tensor that reaches past the end.
    #[error("tensor '{name}' has {bytes} bytes at {start} and the file ends at {end}: it is cut short")]
    OutsideFile {
        /// The tensor.
        name: String,
        /// Its bytes.
        bytes: u64,
        /// Where they start in the file.
        start: u64,
        /// The file's size.
        end: u64,
    },
    /// Two tensors that share bytes.
    #[error("tensors '{first}' and '{second}' overlap")]
    Overlap {
        /// The one that starts first.
        first: String,
        /// The other.
        second: String,
    },
}

fn type_text(id: u32) -> String {
    TensorType::name_of_id(id).map_or_else(|| format!("number {id}"), str::to_owned)
}

fn known_types() -> String {
    TensorType::ALL.map(TensorType::name).join(", ")
}

/// A tensor as the header announces it, checked against the file.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    /// Its name, as `blk.0.attn_q.weight`.
    pub name: String,
    /// Extents, the length of a row first.
    pub dims: Vec<u64>,
    /// How its values are stored.
    pub tensor_type: TensorType,
    /// Its bytes in the file.
    pub range: Range<usize>,
}

impl TensorInfo {
    /// Values of a row.
    pub fn columns(&self) -> usize {
        // The parser has checked that the product of all extents is a usize.
        self.dims[0] as usize
    }

    /// Rows, over all other axes.
    pub fn rows(&self) -> usize {
        self.dims[1..].iter().product::<u64>() as usize
    }
}

/// Everything before the tensors' data.
#[derive(Clone, Debug, PartialEq)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// Keys and values in the file's order.
    pub metadata: Vec<(String, Value)>,
    /// Tensors in the file's order.
    pub tensors: Vec<TensorInfo>,
    /// What every tensor's offset is a multiple of.
    pub alignment: u64,
}

impl Header {
    /// Reads the header of `file`, which is all the bytes of the file.
    ///
    /// # Errors
    /// The first thing that the file breaks.
    pub fn parse(file: &[u8]) -> Result<Header, Fault> {
        let mut reader = Reader { file, at: 0 };
        if !file.starts_with(&MAGIC) {
            return Err(Fault::Magic { found: file[..file.len().min(4)].to_vec() });
        }
        reader.at = MAGIC.len();
        let version = reader.u32("the version")?;
        match version {
            2 | 3 => {}
            0x0200_0000 | 0x0300_0000 => return Err(Fault::BigEndian),
            _ => return Err(Fault::Version { version }),
        }
        let tensor_count = reader.u64("the number of tensors")?;
        let key_count = reader.u64("the number of keys")?;

        let mut metadata = Vec::with_capacity(reader.count("metadata", key_count, 8 + 4 + 1)?);
        let mut keys = HashSet::new();
        for _ in 0..key_count {
            let key = reader.string("a metadata key")?;
            let id = reader.u32("a metadata type")?;
            let value = reader.value(&key, id)?;
            if !keys.insert(key.clone()) {
                return Err(Fault::DuplicateKey { key });
            }
            metadata.push((key, value));
        }
        let alignment = match metadata.iter().find(|(key, _)| key == ALIGNMENT_KEY) {
            None => DEFAULT_ALIGNMENT,
            Some((_, Value::U32(alignment))) if alignment.is_power_of_two() => u64::from(*alignment),
            Some((_, value)) => return Err(Fault::Alignment { value: value.to_string() }),
        };

        let mut announced = Vec::with_capacity(reader.count("tensors", tensor_count, 8 + 4 + 8 + 4 + 8)?);
        let mut names = HashSet::new();
        for _ in 0..tensor_count {
            let tensor = reader.tensor()?;
            if !names.insert(tensor.name.clone()) {
                return Err(Fault::DuplicateTensor { name: tensor.name });
            }
            announced.push(tensor);
        }
        let data = (reader.at as u64).next_multiple_of(alignment);
        let place = |tensor: Announced| tensor.place(file.len() as u64, data, alignment);
        let tensors: Vec<TensorInfo> = announced.into_iter().map(place).collect::<Result<_, _>>()?;
        no_overlap(&tensors)?;
        Ok(Header { version, metadata, tensors, alignment })
    }
}

fn no_overlap(tensors: &[TensorInfo]) -> Result<(), Fault> {
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_by_key(|tensor| tensor.range.start);
    match order.windows(2).find(|pair| pair[0].range.end > pair[1].range.start) {
        None => Ok(()),
        Some(pair) => Err(Fault::Overlap { first: pair[0].name.clone(), second: pair[1].name.clone() }),
    }
}

/// A tensor whose place is not checked yet.
struct Announced {
    name: String,
    dims: Vec<u64>,
    tensor_type: TensorType,
    bytes: u64,
    offset: u64,
}

impl Announced {
    fn place(self, end: u64, data: u64, alignment: u64) -> Result<TensorInfo, Fault> {
        let Announced { name, dims, tensor_type, bytes, offset } = self;
        if !offset.is_multiple_of(alignment) {
            return Err(Fault::Misaligned { name, offset, alignment });
        }
        let start = data.saturating_add(offset);
        if start.checked_add(bytes).is_none_or(|stop| stop > end) {
            return Err(Fault::OutsideFile { name, bytes, start, end });
        }
        // Both are at most the file's length, which is a usize.
        let range = start as usize..(start + bytes) as usize;
        Ok(TensorInfo { name, dims, tensor_type, range })
    }
}

struct Reader<'a> {
    file: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn left(&self) -> usize {
        self.file.len() - self.at
    }

    fn take(&mut self, what: &'static str, bytes: u64) -> Result<&'a [u8], Fault> {
        let left = self.left();
        match usize::try_from(bytes) {
            Ok(bytes) if bytes <= left => {
                let taken = &self.file[self.at..][..bytes];
                self.at += bytes;
                Ok(taken)
            }
            _ => Err(Fault::Truncated { what, at: self.at as u64, needed: bytes, left: left as u64 }),
        }
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], Fault> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.take(what, N as u64)?);
        Ok(bytes)
    }

    fn u32(&mut self, what: &'static str) -> Result<u32, Fault> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &'static str) -> Result<u64, Fault> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// `count` as a capacity, if that many things of at least `least` bytes can follow.
    fn count(&self, what: &'static str, count: u64, least: u64) -> Result<usize, Fault> {
        let (needed, left) = (count.saturating_mul(least), self.left() as u64);
        if needed > left {
            return Err(Fault::Truncated { what, at: self.at as u64, needed, left });
        }
        Ok(count as usize)
    }

    fn string(&mut self, what: &'static str) -> Result<String, Fault> {
        let length = self.u64(what)?;
        let at = self.at as u64;
        let bytes = self.take(what, length)?;
        std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| Fault::NotUtf8 { what, at })
    }

    fn value(&mut self, key: &str, id: u32) -> Result<Value, Fault> {
        const WHAT: &str = "a metadata value";
        Ok(match id {
            0 => Value::U8(self.array::<1>(WHAT)?[0]),
            1 => Value::I8(i8::from_le_bytes(self.array(WHAT)?)),
            2 => Value::U16(u16::from_le_bytes(self.array(WHAT)?)),
            3 => Value::I16(i16::from_le_bytes(self.array(WHAT)?)),
            4 => Value::U32(self.u32(WHAT)?),
            5 => Value::I32(i32::from_le_bytes(self.array(WHAT)?)),
            6 => Value::F32(f32::from_le_bytes(self.array(WHAT)?)),
            7 => Value::Bool(boolean(key, self.array::<1>(WHAT)?[0])?),
            8 => Value::String(self.string(WHAT)?),
            9 => Value::Array(self.elements(key, 0)?),
            10 => Value::U64(self.u64(WHAT)?),
            11 => Value::I64(i64::from_le_bytes(self.array(WHAT)?)),
            12 => Value::F64(f64::from_le_bytes(self.array(WHAT)?)),
            _ => return Err(Fault::ValueType { key: key.to_owned(), id }),
        })
    }

    fn elements(&mut self, key: &str, depth: u32) -> Result<Array, Fault> {
        if depth == MAX_ARRAY_DEPTH {
            return Err(Fault::ArrayDepth { key: key.to_owned() });
        }
        let id = self.u32("an array's type")?;
        let count = self.u64("an array's length")?;
        Ok(match id {
            0 => Array::U8(self.numbers(count, u8::from_le_bytes)?),
            1 => Array::I8(self.numbers(count, i8::from_le_bytes)?),
            2 => Array::U16(self.numbers(count, u16::from_le_bytes)?),
            3 => Array::I16(self.numbers(count, i16::from_le_bytes)?),
            4 => Array::U32(self.numbers(count, u32::from_le_bytes)?),
            5 => Array::I32(self.numbers(count, i32::from_le_bytes)?),
            6 => Array::F32(self.numbers(count, f32::from_le_bytes)?),
            7 => {
                let bytes = self.take("an array of truth values", count)?;
                Array::Bool(bytes.iter().map(|&byte| boolean(key, byte)).collect::<Result<_, _>>()?)
            }
            8 => {
                let mut strings = Vec::with_capacity(self.count("an array of strings", count, 8)?);
                for _ in 0..count {
                    strings.push(self.string("a string of an array")?);
                }
                Array::String(strings)
            }
            9 => {
                let mut arrays = Vec::with_capacity(self.count("an array of arrays", count, 4 + 8)?);
                for _ in 0..count {
                    arrays.push(self.elements(key, depth + 1)?);
                }
                Array::Array(arrays)
            }
            10 => Array::U64(self.numbers(count, u64::from_le_bytes)?),
            11 => Array::I64(self.numbers(count, i64::from_le_bytes)?),
            12 => Array::F64(self.numbers(count, f64::from_le_bytes)?),
            _ => return Err(Fault::ValueType { key: key.to_owned(), id }),
        })
    }

    fn numbers<T, const N: usize>(
        &mut self,
        count: u64,
        from: impl Fn([u8; N]) -> T,
    ) -> Result<Vec<T>, Fault> {
        let bytes = self.take("an array of numbers", count.saturating_mul(N as u64))?;
        let (elements, _) = bytes.as_chunks::<N>();
        Ok(elements.iter().map(|element| from(*element)).collect())
    }

    fn tensor(&mut self) -> Result<Announced, Fault> {
        let name = self.string("a tensor's name")?;
        let axes = self.u32("a tensor's number of axes")?;
        if !(1..=MAX_AXES).contains(&axes) {
            return Err(Fault::Axes { name, axes });
        }
        let dims = self.numbers(u64::from(axes), u64::from_le_bytes)?;
        let id = self.u32("a tensor's type")?;
        let offset = self.u64("a tensor's offset")?;
        let Some(tensor_type) = TensorType::from_id(id) else {
            return Err(Fault::TensorType { name, id });
        };
        let values =
            dims.iter().try_fold(1usize, |values, &dim| values.checked_mul(usize::try_from(dim).ok()?));
        let Some(values) = values.filter(|&values| values != 0) else {
            return Err(Fault::Extents { name, dims });
        };
        let block = tensor_type.block_values();
        if !dims[0].is_multiple_of(block as u64) {
            return Err(Fault::RaggedRow { name, columns: dims[0], tensor_type, block });
        }
        // A block has at most four bytes a value.
        let Some(bytes) = tensor_type.row_bytes(values) else {
            return Err(Fault::Extents { name, dims });
        };
        Ok(Announced { name, dims, tensor_type, bytes: bytes as u64, offset })
    }
}

fn boolean(key: &str, byte: u8) -> Result<bool, Fault> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(Fault::Bool { key: key.to_owned(), byte }),
    }
}
