//! Codebooks and transformation: of a layer, from a file, on a device.

use super::setting::name;
use super::whole::{fetched, is_step, multiple, of_multiple};
use super::{Error, Result, Setting};
use crate::hash::hash;
use crate::tensor_file::{Dtype, TensorFile};
use crate::{BackendKind, Buffer, Device};
use half::f16;
use kernels_gpu::vecinfer::{Code, Nearest, ROWS_OF_TRANSFORM, Shape};

/// The largest element of a centroid of keys that are whole numbers.
pub(super) const LARGEST_KEY: f32 = 127.0;

/// What a layer needs to be encoded and read.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerBooks {
    /// [kv_heads, 5, head_dim]: mean, key_before, key_after, query_before, query_after, as the kernels'
    /// `transform` names them.
    pub transform: Vec<f32>,
    /// [1 or kv_heads, 2^b, d]; of d = 4 and 8 whole numbers, 127 at most.
    pub keys: Vec<f16>,
    /// Likewise; of b > 8 whole multiples of a step, 127 at most.
    pub values: Vec<f16>,
    /// These steps, [1 or kv_heads]; of b = 8 none.
    pub steps: Vec<f16>,
}

/// What a model needs.
#[derive(Clone, Debug, PartialEq)]
pub struct Books {
    /// Whether keys pass through the Hadamard matrix.
    pub hadamard: bool,
    /// Codes of keys, then of values.
    pub codes: [Code; 2],
    /// Layer by layer.
    pub layers: Vec<LayerBooks>,
}

/// The tensors of a layer, of which the last is there for whole values.
pub(super) fn tensor_names(layer: usize) -> [String; 4] {
    ["transform", "keys", "values", "steps"].map(|part| format!("layer.{layer:02}.{part}"))
}

impl Books {
    /// Reads a file that was made for these heads, and for this setting.
    ///
    /// # Errors
    /// [`Error::Setting`], [`Error::Damaged`]; what reading reports.
    pub fn read(file: &mut TensorFile, setting: Setting, heads: [usize; 3]) -> Result<Self> {
        let [layers, kv_heads, head_dim] = heads;
        let path = file.path().display().to_string();
        let damaged = |what: String| Error::Damaged { path: path.clone(), what };
        let said = |file: &TensorFile, name: &str| file.metadata().get(name).cloned().unwrap_or_default();
        let codes = [setting.keys, setting.values];
        for (what, code) in ["keys", "values"].into_iter().zip(codes) {
            let (found, expected) = (said(file, what), name(code));
            if found != expected {
                return Err(Error::Setting { path, what, found, expected });
            }
        }
        let hadamard = match said(file, "hadamard").as_str() {
            "on" => true,
            "off" => false,
            other => return Err(damaged(format!("hadamard is '{other}', which is neither on nor off"))),
        };
        let mut books = Books { hadamard, codes, layers: Vec::new() };
        for layer in 0..layers {
            let [transform, keys, values, steps] = tensor_names(layer);
            let read = LayerBooks {
                transform: file.read(&transform, Dtype::F32)?,
                keys: file.read(&keys, Dtype::F16)?,
                values: file.read(&values, Dtype::F16)?,
                steps: if codes[1].whole_values() { file.read(&steps, Dtype::F16)? } else { Vec::new() },
            };
            read.check(kv_heads, head_dim, codes)
                .map_err(|what| damaged(format!("layer {layer}: {what}")))?;
            books.layers.push(read);
        }
        let hash = format!("{:016x}", books.hash());
        match said(file, "books_hash") {
            found if found == hash => Ok(books),
            found => Err(damaged(format!("its contents have the hash {hash}, and it says {found}"))),
        }
    }

    /// The hash of all of it, what the header says of the tables included.
    pub(super) fn hash(&self) -> u64 {
        let said = format!("{} {} {}", name(self.codes[0]), name(self.codes[1]), self.hadamard);
        let tables = self.layers.iter().flat_map(|layer| {
            [
                bytemuck::cast_slice(&layer.transform),
                bytemuck::cast_slice(&layer.keys),
                bytemuck::cast_slice(&layer.values),
                bytemuck::cast_slice(&layer.steps),
            ]
        });
        hash(std::iter::once(said.as_bytes()).chain(tables))
    }
}

impl LayerBooks {
    /// Says what is wrong, if something is.
    pub(super) fn check(
        &self,
        kv_heads: usize,
        head_dim: usize,
        codes: [Code; 2],
    ) -> std::result::Result<(), String> {
        let rows = kv_heads * ROWS_OF_TRANSFORM as usize * head_dim;
        if self.transform.len() != rows || self.transform.iter().any(|x| !x.is_finite()) {
            return Err(format!("the transformation is not {rows} finite numbers"));
        }
        for (what, book, code) in [("keys", &self.keys, codes[0]), ("values", &self.values, codes[1])] {
            let one = code.book_elements() as usize;
            if book.len() != one && book.len() != kv_heads * one {
                return Err(format!("{} elements are no codebook of {what} of {one}", book.len()));
            }
            if let Some(at) = book.iter().position(|x| !x.is_finite()) {
                return Err(format!("the codebook of {what} has {} at element {at}", book[at]));
            }
            let whole = |x: &f16| x.to_f32().fract() == 0.0 && x.to_f32().abs() <= LARGEST_KEY;
            if what == "keys"
                && code.whole_keys()
                && let Some(at) = book.iter().position(|x| !whole(x))
            {
                return Err(format!(
                    "the codebook of keys has {} at element {at}, where whole numbers up to 127 belong",
                    book[at]
                ));
            }
        }
        let whole = codes[1].whole_values();
        let books = self.values.len() / codes[1].book_elements() as usize;
        let expected = if whole { books } else { 0 };
        if self.steps.len() != expected || !self.steps.iter().all(|step| is_step(*step)) {
            return Err(format!("{:?} are no steps of {expected} codebooks of values", self.steps));
        }
        for (book, step) in self.values.chunks_exact(codes[1].book_elements() as usize).zip(&self.steps) {
            let is_whole = |x: &f16| of_multiple(multiple(x.to_f32(), *step), *step) == *x;
            if let Some(at) = book.iter().position(|x| !is_whole(x)) {
                let found = book[at];
                return Err(format!(
                    "the codebook of values has {found} at element {at}, where multiples of {step} belong"
                ));
            }
        }
        Ok(())
    }
}

/// A codebook as the CPU's own path searches it.
#[derive(Debug)]
pub(super) struct Search {
    /// [d, 2^b].
    pub channels: Vec<f32>,
    /// ½‖c‖².
    pub half_norms: Vec<f32>,
}

/// A centroid's channels, and ½‖c‖².
fn widened(centroid: &[f16]) -> ([f32; 8], f32) {
    let mut c = [0f32; 8];
    c.iter_mut().zip(centroid).for_each(|(c, x)| *c = x.to_f32());
    let half_norm = match centroid.len() {
        2 => Nearest::half_norm::<2>(&c),
        4 => Nearest::half_norm::<4>(&c),
        _ => Nearest::half_norm::<8>(&c),
    };
    (c, half_norm)
}

/// What goes with codebooks where the kernels search them: [`Code::norm_floats`] of each.
pub(super) fn norms(books: &[f16], code: Code) -> Vec<f32> {
    let mut norms =
        Vec::with_capacity(books.len() / code.book_elements() as usize * code.norm_floats() as usize);
    for book in books.chunks_exact(code.book_elements() as usize) {
        let first = norms.len();
        norms.extend(book.chunks_exact(code.d as usize).map(|centroid| widened(centroid).1));
        let largest_norm = norms[first..].iter().copied().fold(0f32, f32::max);
        let largest = book.iter().fold(0f32, |most, x| most.max(x.to_f32().abs()));
        norms.extend([largest_norm, Nearest::largest(largest), 0.0, 0.0]);
    }
    norms
}

impl Search {
    fn new(book: &[f16], code: Code) -> Self {
        let (d, count) = (code.d as usize, code.centroids() as usize);
        let mut search = Search { channels: vec![0.0; d * count], half_norms: vec![0.0; count] };
        for (number, centroid) in book.chunks_exact(d).enumerate() {
            let (c, half_norm) = widened(centroid);
            for (i, x) in c.iter().take(d).enumerate() {
                search.channels[i * count + number] = *x;
            }
            search.half_norms[number] = half_norm;
        }
        search
    }
}

/// A layer's tables on a device.
#[derive(Debug)]
pub struct Tables {
    hadamard: bool,
    pub(super) transform: Buffer<f32>,
    pub(super) keys: Buffer<f16>,
    pub(super) values: Buffer<f16>,
    /// Codebooks of keys and of values as attention fetches them.
    pub(super) fetched: [Buffer<u8>; 2],
    /// [`norms`] of keys and of values.
    pub(super) norms: [Buffer<f32>; 2],
    strides: [u32; 2],
    /// On the CPU, of keys and of values, one or one for each KV head.
    pub(super) search: [Vec<Search>; 2],
}

impl Tables {
    /// Brings them there.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(device: &Device, books: &Books, layer: usize) -> Result<Self> {
        let own = &books.layers[layer];
        let stride = |book: &[f16], code: Code| {
            if book.len() == code.book_elements() as usize { 0 } else { code.book_elements() }
        };
        let search = |book: &[f16], code: Code| match device.kind() {
            BackendKind::Cpu => {
                book.chunks_exact(code.book_elements() as usize).map(|book| Search::new(book, code)).collect()
            }
            BackendKind::Cuda => Vec::new(),
        };
        let [keys, values] = books.codes;
        Ok(Tables {
            hadamard: books.hadamard,
            transform: Buffer::from_slice(device, &own.transform)?,
            keys: Buffer::from_slice(device, &own.keys)?,
            values: Buffer::from_slice(device, &own.values)?,
            fetched: [
                Buffer::from_slice(device, &fetched(keys, true, &own.keys, &[]))?,
                Buffer::from_slice(device, &fetched(values, false, &own.values, &own.steps))?,
            ],
            norms: [
                Buffer::from_slice(device, &norms(&own.keys, keys))?,
                Buffer::from_slice(device, &norms(&own.values, values))?,
            ],
            strides: [stride(&own.keys, keys), stride(&own.values, values)],
            search: [search(&own.keys, keys), search(&own.values, values)],
        })
    }

    /// Bytes of the device.
    pub fn bytes(&self) -> usize {
        let fetched: usize = self.fetched.iter().map(Buffer::bytes).sum();
        let norms: usize = self.norms.iter().map(Buffer::bytes).sum();
        self.transform.bytes() + self.keys.bytes() + self.values.bytes() + fetched + norms
    }

    /// The shape with what these are.
    pub(super) fn complete(&self, shape: Shape) -> Shape {
        let [key_stride, value_stride] = self.strides;
        Shape { hadamard: self.hadamard.into(), key_stride, value_stride, ..shape }
    }
}
