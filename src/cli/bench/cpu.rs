//! Rows of the CPU: the paper's loop, the SIMD path on all cores, and a copy on all cores beside them.

use super::operations::{Operation, Traffic};
use super::record::Skipped;
use super::report::{Place, Row, Subject};
use crate::cli::timing::{Repetition, on_host};
use bytemuck::Pod;
use host::int8::{Int8Element, Variant, cpu};
use rayon::prelude::*;
use std::hint::black_box;

/// Sizes of the pieces that the copy hands to the pool; the fastest counts. (Large pieces go past the cache,
/// small ones through it.) The last is one piece a thread.
const PIECES: [usize; 3] = [1 << 16, 1 << 20, usize::MAX];

/// The operations on one matrix and the memory for them.
pub struct Cpu<'a, T> {
    /// What the rows say they are about.
    pub subject: Subject,
    /// The matrix.
    pub keys: &'a [T],
    /// How often a row is repeated.
    pub repetition: Repetition,
    /// Whether rows are measured, or the results only computed.
    pub measure: bool,
    /// Bytes a second of the parallel copy.
    copy: Option<f64>,
    /// What was measured.
    pub rows: Vec<Row>,
}

impl<'a, T: Int8Element> Cpu<'a, T> {
    /// Nothing measured yet.
    pub fn new(subject: Subject, keys: &'a [T], repetition: Repetition, measure: bool) -> Self {
        Cpu { subject, keys, repetition, measure, copy: None, rows: Vec::new() }
    }

    /// The copy on all cores of as many bytes as quantizing moves, half read and half written. `scratch` has
    /// the matrix's length.
    pub fn copy(&mut self, scratch: &mut [T]) {
        if !self.measure {
            return;
        }
        let bytes =
            Operation::Quantize.traffic(self.subject.matrix, self.subject.element).total() as usize / 2;
        let source: &[u8] = bytemuck::cast_slice(self.keys);
        let target: &mut [u8] = bytemuck::cast_slice_mut(scratch);
        let bytes = bytes.min(source.len());
        let (source, target) = (&source[..bytes], &mut target[..bytes]);
        let timings = PIECES.map(|piece| {
            let piece = piece.min(bytes.div_ceil(rayon::current_num_threads()));
            let timing = on_host(self.repetition, || copy_in_pieces(source, target, piece));
            (timing, piece)
        });
        let fastest = timings.iter().min_by(|a, b| a.0.median_us.total_cmp(&b.0.median_us));
        if let Some((timing, piece)) = fastest {
            let traffic = Traffic { reads: bytes as u64, writes: bytes as u64 };
            let row = Row::new(Place::Cpu, "memcpy", self.subject, Operation::Copy.name(), traffic, *timing);
            self.copy = Some(row.gb_per_s * 1e9);
            self.rows.push(Row { config: Some(format!("{piece} bytes a piece")), ..row });
        }
    }

    /// Runs `call`, as often as a row asks for where rows are measured, and at least once.
    fn run(&mut self, variant: &str, operation: Operation, mut call: impl FnMut()) {
        if !self.measure {
            return call();
        }
        let timing = on_host(self.repetition, call);
        let row = Row::of(Place::Cpu, variant, self.subject, operation, timing);
        let row = match self.copy {
            Some(speed) => {
                let microseconds = row.bytes as f64 / speed * 1e6;
                row.beside("parallel memcpy".into(), microseconds)
            }
            None => row,
        };
        self.rows.push(row);
    }

    /// Column scales, codes by them, and what comes back.
    pub fn columns(&mut self, scales: &mut [f32], codes: &mut [i8], restored: &mut [T]) {
        let (keys, matrix) = (self.keys, self.subject.matrix);
        self.run("simd", Operation::Scales, || cpu::column_scales(keys, matrix, scales));
        self.run("simd", Operation::Quantize, || cpu::quantize(keys, matrix, scales, codes));
        self.run("simd", Operation::Dequantize, || cpu::dequantize(codes, matrix, scales, restored));
    }

    /// Scales and codes of blocks, and what comes back.
    pub fn blocks(&mut self, scales: &mut [f32], codes: &mut [i8], restored: &mut [T]) {
        let (keys, matrix) = (self.keys, self.subject.matrix);
        assert_eq!(scales.len(), matrix.scales(Variant::Fused));
        self.run("simd", Operation::BlockQuantize, || cpu::quantize_blocks(keys, matrix, scales, codes));
        self.run("simd", Operation::BlockDequantize, || cpu::dequantize(codes, matrix, scales, restored));
    }

    /// The paper's loop, up to `limit` elements. Its results are compared with those there are.
    pub fn paper(
        &mut self,
        limit: usize,
        expected: super::device::Expected<'_, T>,
        skipped: &mut Vec<Skipped>,
    ) {
        let (keys, matrix) = (self.keys, self.subject.matrix);
        if !self.measure {
            return;
        }
        if matrix.elements() > limit {
            skipped.push(Skipped {
                what: format!("cpu paper {matrix} {}", self.subject.dtype),
                reason: format!(
                    "{} elements are more than --cpu-paper-limit {limit}: the loop takes tens of nanoseconds for each",
                    matrix.elements()
                ),
            });
            return;
        }
        let fast = self.repetition;
        // One slow pass tells as much as several.
        self.repetition.least = 1;
        let mut scales = vec![0f32; matrix.channels];
        self.run("paper", Operation::Scales, || cpu::paper::column_scales(keys, matrix, &mut scales));
        let mut codes = vec![0i8; keys.len()];
        self.run("paper", Operation::Quantize, || cpu::paper::quantize(keys, matrix, &scales, &mut codes));
        let mut restored = vec![T::zeroed(); keys.len()];
        self.run("paper", Operation::Dequantize, || {
            cpu::paper::dequantize(&codes, matrix, &scales, &mut restored);
        });
        self.repetition = fast;
        let same = [
            bits(&scales) == bits(expected.scales),
            bits(&codes) == bits(expected.codes),
            bits(&restored) == bits(expected.restored),
        ];
        let first = self.rows.len() - same.len();
        for (row, same) in self.rows[first..].iter_mut().zip(same) {
            row.verified = Some(same);
        }
    }
}

fn bits<P: Pod>(values: &[P]) -> &[u8] {
    bytemuck::cast_slice(values)
}

fn copy_in_pieces(source: &[u8], target: &mut [u8], piece: usize) {
    let pieces = target.par_chunks_mut(piece.max(1)).zip(source.par_chunks(piece.max(1)));
    pieces.for_each(|(target, source)| target.copy_from_slice(source));
    black_box(target);
}
