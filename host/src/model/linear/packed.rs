//! Weights packed for the kernels and for the CPU path: one layout for both.

use super::{Error, Result};
use crate::model::gguf::{TensorType, dequantize};
use crate::model::weights::Tensor;
use bytemuck::{Pod, Zeroable};
use half::{bf16, f16};
use kernels_gpu::model::fixed::BLOCK;
use kernels_gpu::model::format::{Format, GROUP, Q4_0, Q4_1, Q8_0};
use rayon::prelude::*;
use std::fmt;

/// How packed weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightKind {
    /// Four bits with scale and minimum, 20 bytes for 32.
    Q4_1,
    /// Four bits with a scale, 18 bytes for 32.
    Q4_0,
    /// Eight bits with a scale, 34 bytes for 32.
    Q8_0,
    /// 16-bit floats.
    F16,
    /// The upper halves of 32-bit floats.
    Bf16,
    /// 32-bit floats.
    F32,
}

impl WeightKind {
    /// All of them.
    pub const ALL: [WeightKind; 6] = [
        WeightKind::Q4_1,
        WeightKind::Q4_0,
        WeightKind::Q8_0,
        WeightKind::F16,
        WeightKind::Bf16,
        WeightKind::F32,
    ];

    /// What a tensor of this type is packed as: itself, or f16 where there is no kernel for it.
    pub fn of(tensor_type: TensorType) -> WeightKind {
        match tensor_type {
            TensorType::Q4_1 => WeightKind::Q4_1,
            TensorType::Q4_0 => WeightKind::Q4_0,
            TensorType::Q8_0 => WeightKind::Q8_0,
            TensorType::Bf16 => WeightKind::Bf16,
            TensorType::F32 => WeightKind::F32,
            _ => WeightKind::F16,
        }
    }

    /// The type whose blocks are taken as they are.
    pub fn tensor_type(self) -> TensorType {
        match self {
            WeightKind::Q4_1 => TensorType::Q4_1,
            WeightKind::Q4_0 => TensorType::Q4_0,
            WeightKind::Q8_0 => TensorType::Q8_0,
            WeightKind::F16 => TensorType::F16,
            WeightKind::Bf16 => TensorType::Bf16,
            WeightKind::F32 => TensorType::F32,
        }
    }

    /// Whether codes are integers.
    pub fn is_quantized(self) -> bool {
        matches!(self, WeightKind::Q4_1 | WeightKind::Q4_0 | WeightKind::Q8_0)
    }

    /// 32-bit words of a tile of eight rows and 32 channels.
    pub fn tile_words(self) -> usize {
        let words = match self {
            WeightKind::Q4_1 => Q4_1::TILE_WORDS,
            WeightKind::Q4_0 => Q4_0::TILE_WORDS,
            WeightKind::Q8_0 => Q8_0::TILE_WORDS,
            WeightKind::F16 => f16::TILE_WORDS,
            WeightKind::Bf16 => bf16::TILE_WORDS,
            WeightKind::F32 => f32::TILE_WORDS,
        };
        words as usize
    }

    /// Scales of a tile, f16 each.
    pub fn tile_scales(self) -> usize {
        match self {
            WeightKind::Q4_1 => Q4_1::TILE_SCALES as usize,
            WeightKind::Q4_0 | WeightKind::Q8_0 => Q8_0::TILE_SCALES as usize,
            _ => 0,
        }
    }
}

impl fmt::Display for WeightKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.tensor_type().fmt(f)
    }
}

/// Rows of one tensor, in the blocks of its file.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// How the values are stored.
    pub tensor_type: TensorType,
    /// How many rows.
    pub rows: usize,
    /// Channels of a row.
    pub columns: usize,
    /// The blocks, row after row.
    pub bytes: &'a [u8],
}

impl<'a> From<&'a Tensor> for Rows<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        let &Tensor { tensor_type, rows, columns, .. } = tensor;
        Rows { tensor_type, rows, columns, bytes: &tensor.bytes }
    }
}

/// A cache line of words: what keeps a register's loads inside one.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u32; 16]);

/// A matrix \[rows, columns\] in tiles of eight rows and 32 channels, as `kernels_gpu::model::format`
/// describes.
///
/// Rows are filled up with zeros to a multiple of eight; otherwise it takes the bytes that the file's blocks
/// do.
#[derive(Clone)]
pub struct PackedWeights {
    kind: WeightKind,
    rows: usize,
    columns: usize,
    codes: Vec<Line>,
    scales: Vec<u16>,
}

impl PackedWeights {
    /// Packs the rows of `parts`, one below another (queries, keys and values; gate and up).
    ///
    /// Parts of one type are packed as it is, other types and mixtures as f16; f32 beside others stays f32.
    ///
    /// # Errors
    /// [`Error::Columns`] if rows are no whole number of 32 channels, [`Error::Parts`] if the parts' rows
    /// differ in length or there are none, [`Error::Bytes`] if a part is not as long as its shape says,
    /// [`Error::TooLarge`].
    pub fn new(parts: &[Rows<'_>]) -> Result<PackedWeights> {
        let Some(first) = parts.first() else { return Err(Error::Parts { columns: Vec::new() }) };
        let columns = first.columns;
        if parts.iter().any(|part| part.columns != columns) {
            return Err(Error::Parts { columns: parts.iter().map(|part| part.columns).collect() });
        }
        if columns == 0 || !columns.is_multiple_of(BLOCK as usize) {
            return Err(Error::Columns { columns });
        }
        let rows: usize = parts.iter().map(|part| part.rows).sum();
        // 32-bit indices of rows and blocks in the kernels.
        if rows == 0 || rows > u32::MAX as usize / 64 || columns > u32::MAX as usize / 64 {
            return Err(Error::TooLarge { rows, columns });
        }
        for part in parts {
            let row_bytes = part.tensor_type.row_bytes(columns).ok_or(Error::Columns { columns })?;
            if row_bytes.checked_mul(part.rows) != Some(part.bytes.len()) {
                let expected = row_bytes.saturating_mul(part.rows);
                return Err(Error::Bytes {
                    tensor_type: part.tensor_type,
                    found: part.bytes.len(),
                    expected,
                });
            }
        }
        let kinds = parts.iter().map(|part| WeightKind::of(part.tensor_type));
        let kind = kinds.clone().reduce(merge).unwrap_or(WeightKind::F16);
        let blocks = columns / BLOCK as usize;
        let groups = rows.div_ceil(GROUP as usize);
        let tiles = groups.checked_mul(blocks).ok_or(Error::TooLarge { rows, columns })?;
        let (words, halves) = (kind.tile_words(), kind.tile_scales());
        let mut codes = vec![Line::zeroed(); tiles * words / 16];
        let mut scales = vec![0u16; tiles * halves];

        let group_words = blocks * words;
        let pack_group = |group: usize, codes: &mut [u32], scales: &mut [u16]| {
            let mut values = vec![0f32; columns];
            for r in 0..GROUP as usize {
                let Some((part, row)) = row_of(parts, group * GROUP as usize + r) else { break };
                let row_bytes = part.bytes.len() / part.rows;
                let bytes = &part.bytes[row * row_bytes..][..row_bytes];
                if kind.is_quantized() {
                    pack_blocks(kind, bytes, r, codes, scales);
                } else {
                    dequantize(part.tensor_type, bytes, &mut values);
                    pack_floats(kind, &values, r, codes);
                }
            }
        };
        let lines = codes.par_chunks_mut(group_words / 16).enumerate();
        if halves == 0 {
            lines.for_each(|(group, codes)| pack_group(group, bytemuck::cast_slice_mut(codes), &mut []));
        } else {
            lines.zip(scales.par_chunks_mut(blocks * halves)).for_each(|((group, codes), scales)| {
                pack_group(group, bytemuck::cast_slice_mut(codes), scales);
            });
        }
        Ok(PackedWeights { kind, rows, columns, codes, scales })
    }

    /// How they are stored.
    pub fn kind(&self) -> WeightKind {
        self.kind
    }

    /// Outputs of the product.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs of the product, a multiple of 32.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Blocks of 32 channels in a row.
    pub fn blocks(&self) -> usize {
        self.columns / BLOCK as usize
    }

    /// The tiles' codes.
    pub fn codes(&self) -> &[u32] {
        bytemuck::cast_slice(&self.codes)
    }

    /// The tiles' scales, as bits of f16.
    pub fn scales(&self) -> &[u16] {
        &self.scales
    }

    /// Bytes of codes and scales: what a product reads.
    pub fn bytes(&self) -> usize {
        size_of_val(self.codes()) + size_of_val(self.scales())
    }
}

impl fmt::Debug for PackedWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PackedWeights { kind, rows, columns, .. } = self;
        write!(f, "PackedWeights({kind}, {rows} × {columns}, {} bytes)", self.bytes())
    }
}

/// The kind that holds both without loss, or f16.
fn merge(a: WeightKind, b: WeightKind) -> WeightKind {
    match (a, b) {
        _ if a == b => a,
        (WeightKind::F32 | WeightKind::Bf16, _) | (_, WeightKind::F32 | WeightKind::Bf16) => WeightKind::F32,
        _ => WeightKind::F16,
    }
}

/// The part that has a row, and the row's number in it.
fn row_of<'a, 'b>(parts: &'a [Rows<'b>], mut row: usize) -> Option<(&'a Rows<'b>, usize)> {
    for part in parts {
        if row < part.rows {
            return Some((part, row));
        }
        row -= part.rows;
    }
    None
}

/// Row `r` of a group: blocks of a file into tiles.
fn pack_blocks(kind: WeightKind, bytes: &[u8], r: usize, codes: &mut [u32], scales: &mut [u16]) {
    let block_bytes = kind.tensor_type().block_bytes();
    let (words, halves) = (kind.tile_words(), kind.tile_scales());
    let scale_count = halves / GROUP as usize;
    for (block, source) in bytes.chunks_exact(block_bytes).enumerate() {
        let (scale_bytes, source) = source.split_at(2 * scale_count);
        for (i, scale) in scale_bytes.chunks_exact(2).enumerate() {
            scales[block * halves + r * scale_count + i] = u16::from_le_bytes([scale[0], scale[1]]);
        }
        let tile = &mut codes[block * words..][..words];
        for j in 0..4 {
            if kind == WeightKind::Q8_0 {
                for half in 0..2 {
                    let at = 8 * j + 4 * half;
                    let four = [source[at], source[at + 1], source[at + 2], source[at + 3]];
                    tile[32 * half + 8 * j + r] = u32::from_le_bytes(four);
                }
            } else {
                // The file has channel k in the low half of byte k, channel k + 16 in the high half.
                let code = |k: usize| source[k % 16] >> (k / 16 * 4) & 15;
                let byte = |i: usize| code(8 * j + i) | code(8 * j + 4 + i) << 4;
                tile[8 * j + r] = u32::from_le_bytes([byte(0), byte(1), byte(2), byte(3)]);
            }
        }
    }
}

/// Row `r` of a group: values into tiles.
fn pack_floats(kind: WeightKind, values: &[f32], r: usize, codes: &mut [u32]) {
    for (k, value) in values.iter().enumerate() {
        let at = k * GROUP as usize + r;
        match kind {
            WeightKind::F32 => codes[at] = value.to_bits(),
            WeightKind::Bf16 => halves(codes)[at] = bf16::from_f32(*value).to_bits(),
            _ => halves(codes)[at] = f16::from_f32(*value).to_bits(),
        }
    }
}

fn halves(words: &mut [u32]) -> &mut [u16] {
    bytemuck::cast_slice_mut(words)
}
