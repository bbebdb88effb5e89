//! What is measured: the operations, the bytes each must move, and the ceiling that stands beside it.

use host::int8::Matrix;
use host::roofline::{Mix, Pattern};
use kernels_gpu::int8::TOKENS_PER_BLOCK;

/// One thing that is timed. The names are those of the peers' rows (`docs/results/FIELDS.md`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// The matrix to another place.
    Copy,
    /// Equation (6).
    Scales,
    /// Equation (7) with given scales.
    Quantize,
    /// Equation (8).
    Dequantize,
    /// Equations (6) and (7).
    ScalesQuantize,
    /// Scales and codes of each block of 16 tokens.
    BlockQuantize,
    /// Equation (8) with the scales of blocks.
    BlockDequantize,
}

/// Bytes that an operation moves, each as often as the formula must.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traffic {
    /// Read.
    pub reads: u64,
    /// Written.
    pub writes: u64,
}

impl Traffic {
    /// Both.
    pub fn total(self) -> u64 {
        self.reads + self.writes
    }

    fn read_share(self) -> f64 {
        self.reads as f64 / self.total() as f64
    }
}

impl Operation {
    /// The name in reports and tables.
    pub fn name(self) -> &'static str {
        match self {
            Operation::Copy => "copy",
            Operation::Scales => "scales",
            Operation::Quantize => "quantize",
            Operation::Dequantize => "dequantize",
            Operation::ScalesQuantize => "scales_quantize",
            Operation::BlockQuantize => "block_quantize",
            Operation::BlockDequantize => "block_dequantize",
        }
    }

    /// What it moves for elements of `element` bytes.
    pub fn traffic(self, matrix: Matrix, element: usize) -> Traffic {
        let codes = matrix.elements() as u64;
        let keys = codes * element as u64;
        let scales = 4 * matrix.channels as u64;
        let blocks = scales * matrix.tokens.div_ceil(TOKENS_PER_BLOCK as usize) as u64;
        let (reads, writes) = match self {
            Operation::Copy => (keys, keys),
            Operation::Scales => (keys, scales),
            Operation::Quantize => (keys + scales, codes),
            Operation::Dequantize => (codes + scales, keys),
            Operation::ScalesQuantize => (2 * keys + scales, codes + scales),
            Operation::BlockQuantize => (keys, codes + blocks),
            Operation::BlockDequantize => (codes + blocks, keys),
        };
        Traffic { reads, writes }
    }

    /// The passes over memory that it takes, one after the other: each has a ceiling of its own.
    pub fn passes(self, matrix: Matrix, element: usize) -> Vec<Traffic> {
        match self {
            Operation::ScalesQuantize => {
                [Operation::Scales, Operation::Quantize].map(|pass| pass.traffic(matrix, element)).to_vec()
            }
            _ => vec![self.traffic(matrix, element)],
        }
    }

    /// Tokens that share a scale, where not all do.
    pub fn block_tokens(self) -> Option<u32> {
        matches!(self, Operation::BlockQuantize | Operation::BlockDequantize).then_some(TOKENS_PER_BLOCK)
    }
}

/// A kernel of [`kernels_gpu::roofline`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ceiling {
    /// Its name.
    pub kernel: &'static str,
    /// What it moves for each vector.
    pub mix: Mix,
    /// What its row is called.
    pub operation: &'static str,
    /// Bytes it reads a vector.
    pub reads: u64,
    /// Bytes it writes a vector.
    pub writes: u64,
}

/// All of them.
pub const CEILINGS: [Ceiling; 4] = [
    Ceiling { kernel: "read_four", mix: Mix::Read, operation: "read", reads: 16, writes: 0 },
    Ceiling { kernel: "narrow_four", mix: Mix::Narrow, operation: "narrow", reads: 16, writes: 4 },
    Ceiling { kernel: "widen_four", mix: Mix::Widen, operation: "widen", reads: 4, writes: 16 },
    Ceiling { kernel: "copy_four", mix: Mix::Copy, operation: "copy", reads: 16, writes: 16 },
];

impl Ceiling {
    /// The one whose mix of reads and writes is nearest.
    pub fn nearest(traffic: Traffic) -> Ceiling {
        let distance = |ceiling: &Ceiling| {
            let own = Traffic { reads: ceiling.reads, writes: ceiling.writes };
            (own.read_share() - traffic.read_share()).abs()
        };
        let mut best = CEILINGS[0];
        for ceiling in CEILINGS {
            if distance(&ceiling) < distance(&best) {
                best = ceiling;
            }
        }
        best
    }

    /// The patterns to try: the ceiling is the best of them.
    pub fn patterns(self, vectors: u64, matrix: Matrix) -> Vec<Pattern> {
        let row = vectors / matrix.tokens as u64;
        let whole = row > 0 && vectors.is_multiple_of(matrix.tokens as u64) && row <= u64::from(u32::MAX);
        self.mix.patterns(whole.then_some(row as u32))
    }

    /// How many vectors make the traffic that this kernel stands beside, within a source and a target of so
    /// many bytes.
    pub fn vectors(self, matrix: Matrix, element: usize) -> u64 {
        let (codes, keys) = (matrix.elements() as u64, (matrix.elements() * element) as u64);
        let (source, target) = match self.kernel {
            "read_four" => (keys, 0),
            "narrow_four" => (keys, codes),
            "widen_four" => (codes, keys),
            _ => (keys, keys),
        };
        let within = |bytes: u64, vector: u64| bytes.checked_div(vector).unwrap_or(u64::MAX);
        ((source + target) / (self.reads + self.writes))
            .min(within(source, self.reads))
            .min(within(target, self.writes))
    }
}
