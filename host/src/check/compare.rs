//! Outputs, and where two of them differ.

use crate::Buffer;
use crate::Result;
use crate::hash::hash;
use half::{bf16, f16};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use simt::Pod;
use std::fmt::Write;

/// Bytes that one task compares.
const CHUNK: usize = 1 << 20;

/// How an output's bytes are to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ElementKind {
    /// Elements of one byte, all of whose bits count.
    Bits8,
    /// Elements of two bytes, all of whose bits count.
    Bits16,
    /// Elements of four bytes, all of whose bits count.
    Bits32,
    /// Elements of eight bytes, all of whose bits count.
    Bits64,
    /// Floats: any NaN equals any other.
    F16,
    /// Floats: any NaN equals any other.
    Bf16,
    /// Floats: any NaN equals any other.
    F32,
    /// Floats: any NaN equals any other.
    F64,
}

impl ElementKind {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            ElementKind::Bits8 => 1,
            ElementKind::Bits16 | ElementKind::F16 | ElementKind::Bf16 => 2,
            ElementKind::Bits32 | ElementKind::F32 => 4,
            ElementKind::Bits64 | ElementKind::F64 => 8,
        }
    }

    /// Whether an element of these bits is a NaN.
    fn is_nan(self, bits: u64) -> bool {
        match self {
            ElementKind::F16 => bits & 0x7fff > 0x7c00,
            ElementKind::Bf16 => bits & 0x7fff > 0x7f80,
            ElementKind::F32 => bits & 0x7fff_ffff > 0x7f80_0000,
            ElementKind::F64 => bits & (u64::MAX >> 1) > 0x7ff0 << 48,
            _ => false,
        }
    }
}

/// An element type of outputs.
pub trait OutputElement: Pod + Send + Sync {
    /// How its bytes are compared.
    const KIND: ElementKind;
}

macro_rules! output_elements {
    ($($t:ty: $kind:ident),*) => {
        $(impl OutputElement for $t { const KIND: ElementKind = ElementKind::$kind; })*
    };
}
output_elements!(u8: Bits8, i8: Bits8, u16: Bits16, i16: Bits16, u32: Bits32, i32: Bits32, u64: Bits64,
    i64: Bits64, f16: F16, bf16: Bf16, f32: F32, f64: F64);

/// Elements of some type, as bytes: kept as they came, not copied.
trait Bytes: Send + Sync {
    fn bytes(&self) -> &[u8];
}

impl<T: Pod + Send + Sync> Bytes for Vec<T> {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }
}

/// What a run wrote to one buffer.
pub struct OutputBuffer {
    name: &'static str,
    kind: ElementKind,
    values: Box<dyn Bytes>,
}

impl OutputBuffer {
    /// An output called `name`.
    pub fn new<T: OutputElement>(name: &'static str, values: Vec<T>) -> Self {
        OutputBuffer { name, kind: T::KIND, values: Box::new(values) }
    }

    /// Waits for the device and copies `buffer` out.
    ///
    /// # Errors
    /// What a kernel did wrong.
    pub fn download<T: OutputElement>(name: &'static str, buffer: &Buffer<T>) -> Result<Self> {
        Ok(Self::new(name, buffer.to_vec()?))
    }

    /// The same bytes, read as elements of `kind`.
    pub fn read_as(self, kind: ElementKind) -> Self {
        OutputBuffer { kind, ..self }
    }

    /// What it is called.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// How its bytes are read.
    pub fn kind(&self) -> ElementKind {
        self.kind
    }

    /// How many elements it has.
    pub fn len(&self) -> usize {
        self.bytes().len() / self.kind.bytes()
    }

    /// Whether it has no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        self.values.bytes()
    }
}

/// A hash of outputs: names, kinds, sizes, and every element, in the place of a NaN ones alone. Equal
/// outputs, as [`compare`] has it, have equal digests.
pub(super) fn digest(outputs: &[OutputBuffer]) -> u64 {
    let heading = |output: &OutputBuffer| {
        let len = (output.len() as u64).to_le_bytes();
        [output.name.as_bytes(), &[0, output.kind as u8], &len].concat()
    };
    let headings: Vec<Vec<u8>> = outputs.iter().map(heading).collect();
    let parts = outputs.iter().zip(&headings).flat_map(|(output, heading)| {
        let kind = output.kind;
        let elements = output.bytes().chunks_exact(kind.bytes());
        let elements = elements.map(move |x| if kind.is_nan(word(x)) { &[0xff; 8][..x.len()] } else { x });
        std::iter::once(heading.as_slice()).chain(elements)
    });
    hash(parts)
}

/// An element's bytes as the low ones of a word.
fn word(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(word)
}

/// The first element in which two outputs differ.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    /// The output's name.
    pub output: String,
    /// The element's index.
    pub index: u64,
    /// Its bits on the reference device, in hexadecimal.
    pub reference: String,
    /// Its bits on the other device, in hexadecimal.
    pub other: String,
}

/// How two outputs compare.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Comparison {
    pub(super) elements: u64,
    pub(super) differing_elements: u64,
    pub(super) differing_bits: u64,
    pub(super) first: Option<Difference>,
}

/// Counts within one chunk, or several.
#[derive(Clone, Copy, Default)]
struct Count {
    elements: u64,
    bits: u64,
    first: Option<u64>,
}

impl Count {
    fn join(self, other: Count) -> Count {
        let first = match (self.first, other.first) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        Count { elements: self.elements + other.elements, bits: self.bits + other.bits, first }
    }
}

/// Compares two outputs of one size and kind.
pub(super) fn compare(reference: &OutputBuffer, other: &OutputBuffer) -> Comparison {
    let (kind, size) = (reference.kind, reference.kind.bytes());
    let (a, b) = (reference.bytes(), other.bytes());
    let count = a
        .par_chunks(CHUNK)
        .zip(b.par_chunks(CHUNK))
        .enumerate()
        // Most chunks are equal as bytes, and no more is to be known of them.
        .filter(|(_, (a, b))| a != b)
        .map(|(chunk, (a, b))| compare_chunk(kind, (chunk * (CHUNK / size)) as u64, a, b))
        .reduce(Count::default, Count::join);
    let hex = |bytes: &[u8], index: u64| {
        let start = index as usize * size;
        let mut text = String::from("0x");
        for byte in bytes[start..start + size].iter().rev() {
            // Writing to a string does not fail.
            let _ = write!(text, "{byte:02x}");
        }
        text
    };
    Comparison {
        elements: reference.len() as u64,
        differing_elements: count.elements,
        differing_bits: count.bits,
        first: count.first.map(|index| Difference {
            output: reference.name.to_string(),
            index,
            reference: hex(a, index),
            other: hex(b, index),
        }),
    }
}

fn compare_chunk(kind: ElementKind, start: u64, a: &[u8], b: &[u8]) -> Count {
    let size = kind.bytes();
    let mut count = Count::default();
    for (i, (a, b)) in a.chunks_exact(size).zip(b.chunks_exact(size)).enumerate() {
        if a == b {
            continue;
        }
        let (a, b) = (word(a), word(b));
        if kind.is_nan(a) && kind.is_nan(b) {
            continue;
        }
        count = count.join(Count {
            elements: 1,
            bits: (a ^ b).count_ones() as u64,
            first: Some(start + i as u64),
        });
    }
    count
}
