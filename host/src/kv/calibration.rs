//! Artifacts: what a scheme makes once for a model, from keys and values of a real run, and reads again where
//! a cache is opened.
//!
//! A scheme that needs one declares a [`Calibrator`]; `ferrokv calibrate` collects the [`Material`], and
//! [`Selection::calibrate`] makes an [`Artifact`] of it, which is written as a safetensors file. Opening
//! reads the file by [`Opening::needed_artifact`](super::Opening::needed_artifact), which compares what the
//! file was made for with the model.

use super::{Error, Geometry, OptionSpec, Result, Rope, Scheme, Selection};
use crate::tensor_file::{Dtype, Target, TensorWriter};
use bytemuck::Pod;
use half::f16;
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;

/// How a scheme makes its artifact.
#[derive(Debug)]
pub struct Calibrator {
    /// The option of the scheme, of [`Kind::File`](super::Kind::File), that the file is given by.
    pub artifact: &'static str,
    /// What can be set when it is made: read by [`Selection::for_calibration`] in place of the scheme's
    /// options.
    pub options: &'static [OptionSpec],
    /// Whether it needs queries besides keys and values.
    pub queries: bool,
    /// Says so if the options together make no sense, before anything is run.
    pub check: fn(&Selection) -> Result<()>,
    /// Whether its artifacts have a [`Chart`].
    pub chart: bool,
    /// Makes it. The same material and options give the same bytes.
    pub run: fn(&Calibration<'_>) -> Result<Artifact>,
}

/// Hears how much of how much work is done, and may end it.
pub type Progress<'a> = &'a (dyn Fn(usize, usize) -> ControlFlow<()> + Sync);

/// What a calibrator is given.
#[derive(Clone, Copy)]
pub struct Calibration<'a> {
    /// Keys and values.
    pub material: &'a Material,
    /// The scheme with the options of its calibrator.
    pub selection: &'a Selection,
    /// Who watches.
    pub progress: Progress<'a>,
}

impl Calibration<'_> {
    /// Tells who watches.
    ///
    /// # Errors
    /// [`Error::Stopped`] if they want no more.
    pub fn tell(&self, done: usize, of: usize) -> Result<()> {
        match (self.progress)(done, of) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(Error::Stopped),
        }
    }
}

/// What passed through a model's attention, layer by layer.
#[derive(Clone, Debug)]
pub struct Material {
    /// Whose.
    pub geometry: Geometry,
    /// How the model has turned keys and queries; `None` where there is no model.
    pub rope: Option<Rope>,
    /// All layers in order.
    pub layers: Vec<Passed>,
    /// The tokens with which texts begin, where that is known.
    pub fronts: Vec<usize>,
}

/// What passed through a layer: of one text, or of several one after another.
#[derive(Clone, Debug, Default)]
pub struct Passed {
    /// [tokens, kv_heads, head_dim], rotated.
    pub keys: Vec<f16>,
    /// Likewise.
    pub values: Vec<f16>,
    /// [tokens, q_heads, head_dim], rotated and not scaled; empty where nobody has asked for them.
    pub queries: Vec<f16>,
}

impl Material {
    /// Tokens.
    pub fn tokens(&self) -> usize {
        let width = self.geometry.kv_width().max(1);
        self.layers.first().map_or(0, |layer| layer.keys.len() / width)
    }

    /// Of rows [tokens, …] those that are not among the first `count` tokens of a text. Where these are all
    /// that there is, all.
    pub fn behind_fronts<T: Copy>(&self, rows: &[T], count: usize) -> Vec<T> {
        let width = rows.len() / self.tokens().max(1);
        let is_front =
            |token: usize| self.fronts.iter().any(|front| (*front..front + count).contains(&token));
        let inner = (0..self.tokens()).filter(|token| !is_front(*token));
        let inner: Vec<T> = inner.flat_map(|token| &rows[token * width..][..width]).copied().collect();
        if inner.is_empty() { rows.to_vec() } else { inner }
    }

    /// Made-up keys and values for a shape, always the same ones: for tests and examples, of no use to a
    /// model. Channels differ in size and have a mean, as those of models do.
    pub fn made_up(geometry: Geometry, tokens: usize, seed: u64) -> Self {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        // Sums of uniform numbers from an xorshift generator: near enough to normal ones.
        let mut number = || {
            let mut sum = -2.0;
            for _ in 0..4 {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                sum += (state >> 40) as f32 / (1u64 << 24) as f32;
            }
            sum
        };
        let mut rows = |heads: usize| -> Vec<f16> {
            let width = heads * geometry.head_dim;
            let channels: Vec<[f32; 2]> = (0..width).map(|_| [number(), 1.0 + number().abs()]).collect();
            let of = |i: usize| channels[i % width];
            (0..tokens * width).map(|i| f16::from_f32(of(i)[0] + of(i)[1] * number())).collect()
        };
        let layers = (0..geometry.layers)
            .map(|_| Passed {
                keys: rows(geometry.kv_heads),
                values: rows(geometry.kv_heads),
                queries: rows(geometry.q_heads),
            })
            .collect();
        Material { geometry, rope: None, layers, fronts: Vec::new() }
    }

    /// Says so if a layer is missing, too short, or has something that is no number.
    fn check(&self, queries: bool) -> Result<()> {
        let Geometry { layers, q_heads, kv_heads, head_dim } = self.geometry;
        let wrong = |layer: usize, what: &'static str, found: String| Error::Material { layer, what, found };
        if self.layers.len() != layers || self.tokens() == 0 {
            let found = format!("{} tokens in {} layers of {layers}", self.tokens(), self.layers.len());
            return Err(wrong(0, "keys", found));
        }
        for (index, layer) in self.layers.iter().enumerate() {
            let parts = [
                ("keys", &layer.keys, kv_heads, true),
                ("values", &layer.values, kv_heads, true),
                ("queries", &layer.queries, q_heads, queries),
            ];
            for (what, rows, heads, wanted) in parts.into_iter().filter(|part| part.3) {
                let expected = self.tokens() * heads * head_dim;
                if rows.len() != expected && wanted {
                    return Err(wrong(index, what, format!("{} numbers for {expected}", rows.len())));
                }
                if let Some(at) = rows.iter().position(|x| !x.is_finite()) {
                    let (token, channel) = (at / (heads * head_dim), at % (heads * head_dim));
                    let found = format!("{} at token {token}, channel {channel}", rows[at]);
                    return Err(wrong(index, what, found));
                }
            }
        }
        Ok(())
    }
}

/// What a calibrator has made: the contents of a safetensors file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Artifact {
    /// The header's free texts.
    pub metadata: BTreeMap<String, String>,
    /// A picture of what it decides; not in the file.
    pub chart: Option<Chart>,
    tensors: Vec<Tensor>,
}

/// What an artifact decides, to be drawn: a square for each row and column.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chart {
    /// What it is of.
    pub title: String,
    /// What columns and rows are.
    pub axes: [String; 2],
    /// What squares can be, in order, with what that means.
    pub classes: Vec<String>,
    /// Of each row from the top, of each column: which of the classes.
    pub rows: Vec<Vec<u8>>,
    /// Rows where something begins that has a name, in ascending order.
    pub names: Vec<(usize, String)>,
}

#[derive(Clone, Debug, PartialEq)]
struct Tensor {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Artifact {
    /// Adds a text.
    pub fn say(&mut self, name: &str, value: impl ToString) {
        self.metadata.insert(name.into(), value.to_string());
    }

    /// Adds a tensor; `dtype` is what `T` is.
    pub fn add<T: Pod>(&mut self, name: impl Into<String>, dtype: Dtype, shape: &[usize], values: &[T]) {
        let bytes = bytemuck::cast_slice(values).to_vec();
        self.tensors.push(Tensor { name: name.into(), dtype, shape: shape.to_vec(), bytes });
    }

    /// Bytes of its tensors.
    pub fn bytes(&self) -> usize {
        self.tensors.iter().map(|tensor| tensor.bytes.len()).sum()
    }

    /// Writes the file, all of it or nothing.
    ///
    /// # Errors
    /// Shapes that are not those of the data; what the file system says.
    pub fn write(&self, target: Target) -> Result<()> {
        let shapes = self.tensors.iter().map(|t| (t.name.clone(), t.dtype, t.shape.clone()));
        let mut writer = TensorWriter::create(target, &self.metadata, shapes)?;
        for tensor in &self.tensors {
            writer.write(&tensor.name, &tensor.bytes)?;
        }
        Ok(writer.finish()?)
    }
}

impl Scheme {
    /// How its artifact is made, if it has one.
    fn calibrator(&self) -> Result<&Calibrator> {
        self.calibrate.as_ref().ok_or(Error::NoCalibration { scheme: self.name })
    }
}

impl Selection {
    /// Reads a scheme with the options that its calibrator has, in place of its own.
    ///
    /// # Errors
    /// As [`parse`](Selection::parse); [`Error::NoCalibration`] for a scheme that needs no artifact.
    pub fn for_calibration(
        text: &str,
        schemes: impl Iterator<Item = &'static Scheme> + Clone,
    ) -> Result<Self> {
        let selection = Selection::parse_with(text, schemes, |scheme| Ok(scheme.calibrator()?.options))?;
        (selection.scheme().calibrator()?.check)(&selection)?;
        Ok(selection)
    }

    /// How the file would be made that a cache of this selection lacks: what was given of the options that
    /// the scheme and its calibrator have in common. `None` for a scheme that needs no file, and where one
    /// was given.
    ///
    /// # Errors
    /// As [`for_calibration`](Self::for_calibration).
    pub fn calibration(&self) -> Result<Option<Self>> {
        let scheme = self.scheme();
        let Some(calibrator) = scheme.calibrate.as_ref().filter(|c| self.file(c.artifact).is_none()) else {
            return Ok(None);
        };
        let given = calibrator.options.iter().filter_map(|spec| Some((spec.name, self.value(spec.name)?)));
        let text = given.fold(scheme.name.to_owned(), |text, (name, value)| format!("{text}/{name}={value}"));
        Selection::for_calibration(&text, std::iter::once(scheme)).map(Some)
    }

    /// The same scheme and options with the file that [`calibration`](Self::calibration) speaks of.
    ///
    /// # Errors
    /// [`Error::NoCalibration`]; [`Error::Twice`] where a file was given.
    pub fn with_artifact(&self, path: &Path) -> Result<Self> {
        let option = self.scheme().calibrator()?.artifact;
        Selection::parse(&format!("{self}/{option}={}", path.display()), std::iter::once(self.scheme()))
    }

    /// Makes the artifact of a scheme that was read by [`for_calibration`](Self::for_calibration). Its
    /// metadata name the scheme, its settings, and the layers and heads that it is for.
    ///
    /// # Errors
    /// [`Error::NoCalibration`], [`Error::Material`], [`Error::Stopped`]; what the scheme says of the
    /// material.
    pub fn calibrate(&self, material: &Material, progress: Progress<'_>) -> Result<Artifact> {
        let calibrator = self.scheme().calibrator()?;
        material.check(calibrator.queries)?;
        let mut artifact = (calibrator.run)(&Calibration { material, selection: self, progress })?;
        let Geometry { layers, kv_heads, head_dim, .. } = material.geometry;
        artifact.say("scheme", self.scheme().name);
        artifact.say("settings", self);
        artifact.say("tokens", material.tokens());
        for (name, value) in [("layers", layers), ("kv_heads", kv_heads), ("head_dim", head_dim)] {
            artifact.say(name, value);
        }
        Ok(artifact)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: Geometry = Geometry { layers: 2, q_heads: 4, kv_heads: 2, head_dim: 8 };

    #[test]
    fn the_first_tokens_of_texts_are_left_out() {
        let mut material = Material::made_up(GEOMETRY, 40, 1);
        let rows: Vec<usize> = (0..80).collect();
        assert_eq!(material.behind_fronts(&rows, 16), rows, "no fronts are known");
        material.fronts = vec![0, 18];
        let expected: Vec<usize> = (32..36).chain(68..80).collect();
        assert_eq!(material.behind_fronts(&rows, 16), expected);
        assert_eq!(material.behind_fronts(&rows, 40), rows, "else nothing is left");
    }

    #[test]
    fn made_up_material_is_the_same_each_time_and_whole() {
        let material = Material::made_up(GEOMETRY, 7, 3);
        assert_eq!((material.tokens(), material.layers[1].queries.len()), (7, 7 * 32));
        material.check(true).expect("whole");
        assert_eq!(material.layers[1].values, Material::made_up(GEOMETRY, 7, 3).layers[1].values);
        assert_ne!(material.layers[1].values, Material::made_up(GEOMETRY, 7, 4).layers[1].values);
    }

    #[test]
    fn a_selection_knows_how_its_file_is_made() {
        let selection: Selection = "vecinfer/k=d8b12/v=d8b8/recent=32".parse().expect("a scheme");
        let calibration = selection.calibration().expect("codes that there are").expect("it needs a file");
        assert_eq!(calibration.to_string(), "vecinfer/k=d8b12/v=d8b8");
        let whole = selection.with_artifact(Path::new("a/b.safetensors")).expect("the option that it has");
        assert_eq!(whole.to_string(), "vecinfer/k=d8b12/v=d8b8/recent=32/codes=a/b.safetensors");
        assert!(whole.calibration().expect("nothing to make").is_none());
        let dense: Selection = "dense".parse().expect("a scheme");
        assert!(dense.calibration().expect("nothing to make").is_none());
        assert!(matches!(dense.with_artifact(Path::new("a")), Err(Error::NoCalibration { .. })));
    }

    #[test]
    fn material_that_is_not_whole_is_refused_by_name() {
        let refused = |change: fn(&mut Material)| {
            let mut material = Material::made_up(GEOMETRY, 7, 3);
            change(&mut material);
            material.check(true).expect_err("refused").to_string()
        };
        let nan = refused(|m| m.layers[1].values[20] = f16::NAN);
        assert!(nan.contains("values of layer 1") && nan.contains("NaN at token 1, channel 4"), "{nan}");
        let short = refused(|m| m.layers[0].queries.truncate(32));
        assert!(short.contains("queries of layer 0") && short.contains("32 numbers for 224"), "{short}");
        let none = refused(|m| drop(m.layers.pop()));
        assert!(none.contains("7 tokens in 1 layers of 2"), "{none}");
    }
}
