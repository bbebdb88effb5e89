//! The layers of a file with keys, values and queries: checked before any computing, read one at a time.

use super::failure::{CommandError, Failure};
use host::attention::dense::DenseElement;
use host::int8::file::Dtype;
use host::tensor_file::TensorFile;

/// What a layer's three tensors are called.
const PARTS: [&str; 3] = ["key", "value", "query"];
/// The metadata that says which token the first query row is of.
const FIRST_POSITION: &str = "query_first_position";

/// A layer as the header has it.
#[derive(Clone, Debug)]
pub struct Layer {
    /// `layer.07`.
    pub name: String,
    /// Of all three tensors: F16 or BF16.
    pub dtype: Dtype,
    /// Tokens of keys and values.
    pub tokens: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Query heads.
    pub heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Rows of queries.
    pub query_rows: usize,
    /// The token that the first row of queries is of.
    pub first_position: usize,
}

/// A layer's numbers.
pub struct Tensors<E> {
    /// [tokens, kv_heads, head_dim].
    pub keys: Vec<E>,
    /// Likewise.
    pub values: Vec<E>,
    /// [query rows, heads, head_dim].
    pub queries: Vec<E>,
}

impl Layer {
    /// 7 of `layer.07`.
    pub fn number(&self) -> Option<usize> {
        self.name.strip_prefix("layer.")?.parse().ok()
    }
}

/// `07` of `layer.07.key`.
fn digits(name: &str) -> Option<(&str, &str)> {
    let (digits, part) = name.strip_prefix("layer.")?.split_once('.')?;
    let known = PARTS.contains(&part) && !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
    known.then_some((digits, part))
}

/// Why a file's layers cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No layer at all.
    #[error(
        "{path} has no layer: tensors named layer.NN.key, layer.NN.value and layer.NN.query are needed; it has {names}"
    )]
    NoLayers {
        /// The file.
        path: String,
        /// Some names.
        names: String,
    },
    /// A layer that was asked for.
    #[error("{path} has no layer {layer}; it has layers {layers}")]
    NoLayer {
        /// The file.
        path: String,
        /// What was asked for.
        layer: u32,
        /// What there is.
        layers: String,
    },
    /// A layer that is not complete.
    #[error("{path} has no {names}, which {layer} needs; add them, or leave {layer} out")]
    Missing {
        /// The file.
        path: String,
        /// The layer.
        layer: String,
        /// The tensors.
        names: String,
    },
    /// A tensor of another type or shape.
    #[error("tensor '{name}' cannot be used: {reason}")]
    Tensor {
        /// The tensor.
        name: String,
        /// What is wrong, and what is expected.
        reason: String,
    },
    /// Metadata that is no number.
    #[error(
        "{path} has the metadata query_first_position = '{text}', which is no position; make it a number"
    )]
    Position {
        /// The file.
        path: String,
        /// What is there.
        text: String,
    },
    /// A NaN or an infinity.
    #[error("tensor '{name}' has {value} at {index:?}; correct the source")]
    NonFinite {
        /// The tensor.
        name: String,
        /// The value.
        value: f32,
        /// Its index.
        index: [usize; 3],
    },
    /// More query tokens than there are.
    #[error("{layer} has queries of {rows} tokens, and --queries asks for {wanted}; ask for up to {rows}")]
    TooFewQueries {
        /// The layer.
        layer: String,
        /// What it has.
        rows: usize,
        /// What was asked for.
        wanted: usize,
    },
}

impl CommandError for Error {}

/// The layers of `file`, by number, or those of `wanted`.
///
/// # Errors
/// Tensors that are missing or unfit, and layers that are not there.
pub fn layers(file: &TensorFile, wanted: &[u32]) -> Result<Vec<Layer>, Error> {
    let path = || file.path().display().to_string();
    let mut found: Vec<(u64, &str)> = file
        .entries()
        .keys()
        .filter_map(|name| digits(name))
        .filter_map(|(digits, _)| Some((digits.parse().ok()?, digits)))
        .collect();
    found.sort_unstable();
    found.dedup();
    if found.is_empty() {
        let mut names: Vec<&str> = file.entries().keys().take(6).map(String::as_str).collect();
        if file.entries().len() > names.len() {
            names.push("…");
        }
        let names = if names.is_empty() { "none".into() } else { names.join(", ") };
        return Err(Error::NoLayers { path: path(), names });
    }
    for number in wanted {
        if !found.iter().any(|(there, _)| there == &u64::from(*number)) {
            let names: Vec<String> = found.iter().map(|(number, _)| number.to_string()).collect();
            return Err(Error::NoLayer { path: path(), layer: *number, layers: names.join(", ") });
        }
    }
    let chosen = |number: u64| wanted.is_empty() || wanted.iter().any(|wanted| u64::from(*wanted) == number);
    found.iter().filter(|(number, _)| chosen(*number)).map(|(_, digits)| layer(file, digits)).collect()
}

fn layer(file: &TensorFile, digits: &str) -> Result<Layer, Error> {
    let path = || file.path().display().to_string();
    let stem = format!("layer.{digits}");
    let names = PARTS.map(|part| format!("{stem}.{part}"));
    let missing: Vec<&str> =
        names.iter().filter(|name| !file.entries().contains_key(*name)).map(String::as_str).collect();
    if !missing.is_empty() {
        return Err(Error::Missing { path: path(), layer: stem, names: missing.join(" and ") });
    }
    let mut dtypes = Vec::new();
    let mut shapes = Vec::new();
    for (name, what) in names.iter().zip([
        "[tokens, kv_heads, head_dim]",
        "[tokens, kv_heads, head_dim]",
        "[query tokens, heads, head_dim]",
    ]) {
        let entry = &file.entries()[name];
        let refuse = |reason: String| Error::Tensor { name: name.clone(), reason };
        let dtype = Dtype::from_file(entry.dtype).filter(|dtype| *dtype != Dtype::F32);
        let unfit = || refuse(format!("it holds {}; attention is computed over F16 and BF16", entry.dtype));
        let dtype = dtype.ok_or_else(unfit)?;
        let [first, second, third] = entry.shape[..] else {
            return Err(refuse(format!("its shape is {:?}; {what} is expected", entry.shape)));
        };
        let fits = |extent: usize| extent != 0 && u32::try_from(extent).is_ok();
        if ![first, second, third].into_iter().all(fits) {
            return Err(refuse(format!("its shape {:?} has an extent of 0 or beyond 32 bits", entry.shape)));
        }
        if dtypes.first().is_some_and(|keys| *keys != dtype) {
            return Err(refuse(format!("it holds {dtype} and the keys {}; store them alike", dtypes[0])));
        }
        dtypes.push(dtype);
        shapes.push([first, second, third]);
    }
    let [[tokens, kv_heads, head_dim], values, [query_rows, heads, query_dim]] =
        [shapes[0], shapes[1], shapes[2]];
    let refuse = |part: usize, reason: String| Error::Tensor { name: names[part].clone(), reason };
    if values != shapes[0] {
        return Err(refuse(
            1,
            format!("its shape is {values:?} and the keys' {:?}; they must be equal", shapes[0]),
        ));
    }
    if query_dim != head_dim {
        return Err(refuse(2, format!("its heads have {query_dim} channels and the keys' {head_dim}")));
    }
    if !heads.is_multiple_of(kv_heads) {
        let reason = format!("its {heads} heads are no multiple of the keys' {kv_heads}");
        return Err(refuse(2, reason));
    }
    let first_position = match file.metadata().get(FIRST_POSITION) {
        // Without a word, they are the last ones.
        None => tokens.checked_sub(query_rows),
        Some(text) => {
            let number = text.parse().map_err(|_| Error::Position { path: path(), text: text.clone() })?;
            usize::checked_add(number, query_rows).filter(|end| *end <= tokens).map(|_| number)
        }
    };
    let first_position = first_position.ok_or_else(|| {
        let first = file.metadata().get(FIRST_POSITION).map_or("unset", String::as_str);
        let reason = format!(
            "its {query_rows} rows reach beyond the {tokens} tokens of the keys ({FIRST_POSITION} of the file's \
             metadata is {first})"
        );
        refuse(2, reason)
    })?;
    Ok(Layer { name: stem, dtype: dtypes[0], tokens, kv_heads, heads, head_dim, query_rows, first_position })
}

impl Layer {
    /// `count` rows of queries, evenly spread from the first to the last; one is the last.
    ///
    /// # Errors
    /// More than there are.
    pub fn choose(&self, count: usize) -> Result<Vec<usize>, Error> {
        if count > self.query_rows {
            let (layer, rows) = (self.name.clone(), self.query_rows);
            return Err(Error::TooFewQueries { layer, rows, wanted: count });
        }
        let last = self.query_rows - 1;
        let row = |i: usize| if count == 1 { last } else { i * last / (count - 1) };
        Ok((0..count).map(row).collect())
    }

    /// How many keys a row of queries sees.
    pub fn visible(&self, row: usize) -> usize {
        self.first_position + row + 1
    }

    /// Reads the numbers.
    ///
    /// # Errors
    /// What cannot be read, and what is not finite.
    pub fn read<E: DenseElement>(&self, file: &mut TensorFile) -> Result<Tensors<E>, Failure> {
        let mut part = |part: &str, heads: usize| -> Result<Vec<E>, Failure> {
            let name = format!("{}.{part}", self.name);
            let data: Vec<E> = file.read(&name, self.dtype.to_file())?;
            match data.iter().position(|x| !x.to_f32().is_finite()) {
                None => Ok(data),
                Some(at) => {
                    let token = at / (heads * self.head_dim);
                    let index = [token, at / self.head_dim % heads, at % self.head_dim];
                    Err(Error::NonFinite { name, value: data[at].to_f32(), index }.into())
                }
            }
        };
        let keys = part("key", self.kv_heads)?;
        Ok(Tensors { keys, values: part("value", self.kv_heads)?, queries: part("query", self.heads)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_spread_from_first_to_last() {
        let layer = Layer {
            name: "layer.00".into(),
            dtype: Dtype::F16,
            tokens: 512,
            kv_heads: 3,
            heads: 9,
            head_dim: 64,
            query_rows: 64,
            first_position: 448,
        };
        assert_eq!(layer.choose(1).expect("one"), [63]);
        assert_eq!(layer.choose(4).expect("four"), [0, 21, 42, 63]);
        assert_eq!(layer.choose(64).expect("all"), (0..64).collect::<Vec<_>>());
        assert!(layer.choose(65).is_err());
        assert_eq!((layer.visible(0), layer.visible(63)), (449, 512));
    }

    #[test]
    fn names_have_a_number_and_a_part() {
        assert_eq!(digits("layer.07.key"), Some(("07", "key")));
        for name in ["layer.07.keys", "layer..key", "layer.a.key", "07.key", "layer.7"] {
            assert_eq!(digits(name), None, "{name}");
        }
    }
}
