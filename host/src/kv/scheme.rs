//! Schemes, and how a command line names one: `name[:preset][/key=value]…`.

use super::calibration::Calibrator;
use super::proof::Prove;
use super::workload::{self, Workload};
use super::{Capacity, Error, Geometry, Kind, KvCache, OptionSpec, Result, Value};
use crate::Device;
use crate::attention::rope::Pairing;
use crate::tensor_file::TensorFile;
use std::fmt;
use std::path::Path;

/// A way to keep keys and values.
#[derive(Debug)]
pub struct Scheme {
    /// What it is called: lower case, digits and hyphens.
    pub name: &'static str,
    /// What it is, in a line.
    pub about: &'static str,
    /// Named settings, the default first; empty if there is nothing to choose.
    pub presets: &'static [Preset],
    /// What can be set besides, over the preset.
    pub options: &'static [OptionSpec],
    /// Bytes that a step of decoding reads of one KV head of so many channels with so many tokens: keys and
    /// values and all that belongs to them.
    pub step_bytes: fn(&Selection, u32, u64) -> f64,
    /// Says so if preset and options together make no sense, before anything is opened.
    pub check: fn(&Selection) -> Result<()>,
    /// An empty cache for the layers of a model.
    pub open: fn(&Opening<'_>) -> Result<Box<dyn KvCache>>,
    /// One layer's step of decoding over given keys and values, to be measured and judged.
    pub workload: fn(&workload::Opening<'_>) -> Result<Box<dyn Workload>>,
    /// What it promises put to the test: [`by_workload`](super::proof::by_workload), unless the system knows
    /// more.
    pub proof: Prove,
    /// How the file is made that caches of the scheme are opened with; `None` for a scheme that needs none.
    pub calibrate: Option<Calibrator>,
}

/// Settings with a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preset {
    /// The name.
    pub name: &'static str,
    /// What it is for.
    pub about: &'static str,
}

/// A scheme with a preset and options, as a command line names it.
///
/// ```
/// use host::kv::Selection;
///
/// let selection: Selection = "certified:strict/value_floor=0".parse()?;
/// assert_eq!((selection.scheme().name, selection.preset()), ("certified", Some("strict")));
/// assert_eq!(selection.to_string(), "certified:strict/value_floor=0");
/// assert!("certified:loose".parse::<Selection>().is_err());
/// # Ok::<(), host::kv::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Selection {
    scheme: &'static Scheme,
    preset: Option<&'static Preset>,
    /// In the order in which the scheme lists them.
    values: Vec<(&'static OptionSpec, Value)>,
    /// The fingerprint of the model that it is for, where there is one.
    model: Option<String>,
}

impl Selection {
    /// The scheme's default.
    pub fn of(scheme: &'static Scheme) -> Self {
        Selection { scheme, preset: scheme.presets.first(), values: Vec::new(), model: None }
    }

    /// Finds the scheme among `schemes`, and reads preset and options.
    ///
    /// # Errors
    /// What there is not, with what there is: [`Error::Scheme`], [`Error::Preset`], [`Error::Option`],
    /// [`Error::Value`], [`Error::Twice`]; what the scheme says of settings that make no sense together.
    pub fn parse(text: &str, schemes: impl Iterator<Item = &'static Scheme> + Clone) -> Result<Self> {
        let selection = Selection::parse_with(text, schemes, |scheme| Ok(scheme.options))?;
        (selection.scheme.check)(&selection)?;
        Ok(selection)
    }

    /// The same with other options than the scheme's, and unchecked.
    pub(super) fn parse_with(
        text: &str,
        schemes: impl Iterator<Item = &'static Scheme> + Clone,
        options_of: fn(&'static Scheme) -> Result<&'static [OptionSpec]>,
    ) -> Result<Self> {
        let (head, options) = text.split_once('/').map_or((text, None), |(head, rest)| (head, Some(rest)));
        let (name, preset) = head.split_once(':').map_or((head, None), |(name, preset)| (name, Some(preset)));
        let scheme = schemes.clone().find(|scheme| scheme.name == name).ok_or_else(|| Error::Scheme {
            name: text.to_owned(),
            names: list(schemes.map(|scheme| scheme.name)),
        })?;
        let mut selection = Selection::of(scheme);
        let specs = options_of(scheme)?;
        if let Some(preset) = preset {
            let known = scheme.presets.iter().find(|known| known.name == preset);
            selection.preset = Some(known.ok_or_else(|| Error::Preset {
                scheme: scheme.name,
                preset: preset.to_owned(),
                presets: has("presets", scheme.presets.iter().map(|preset| preset.name)),
            })?);
        }
        let mut rest = options;
        while let Some(text) = rest {
            let (key, value) = match text.find(['=', '/']) {
                Some(end) if text[end..].starts_with('=') => (&text[..end], &text[end + 1..]),
                end => (&text[..end.unwrap_or(text.len())], &text[end.unwrap_or(text.len())..]),
            };
            let spec = specs.iter().find(|spec| spec.name == key).ok_or_else(|| Error::Option {
                scheme: scheme.name,
                option: key.to_owned(),
                options: has("options", specs.iter().map(|spec| spec.name)),
            })?;
            if selection.value(spec.name).is_some() {
                return Err(Error::Twice { scheme: scheme.name, option: spec.name });
            }
            // A path may have folders: it takes all that is left.
            let split = if spec.kind == Kind::File { None } else { value.split_once('/') };
            let (value, later) = split.map_or((value, None), |(value, later)| (value, Some(later)));
            selection.values.push((spec, spec.parse(scheme.name, value)?));
            rest = later;
        }
        let place = |spec: &OptionSpec| specs.iter().position(|known| known.name == spec.name);
        selection.values.sort_by_key(|(spec, _)| (spec.kind == Kind::File, place(spec)));
        Ok(selection)
    }

    /// The scheme.
    pub fn scheme(&self) -> &'static Scheme {
        self.scheme
    }

    /// The preset's name, the default one if none was given; none if the scheme has none.
    pub fn preset(&self) -> Option<&'static str> {
        self.preset.map(|preset| preset.name)
    }

    /// The options that were given.
    pub fn values(&self) -> impl Iterator<Item = (&'static str, &Value)> {
        self.values.iter().map(|(spec, value)| (spec.name, value))
    }

    /// What an option was given, if it was.
    pub fn value(&self, option: &str) -> Option<&Value> {
        self.values().find(|(name, _)| *name == option).map(|(_, value)| value)
    }

    /// A [`Kind::Count`], or what it is if nothing was given.
    pub fn count(&self, option: &str, otherwise: u64) -> u64 {
        match self.value(option) {
            Some(Value::Count(count)) => *count,
            _ => otherwise,
        }
    }

    /// A [`Kind::Number`], or what it is if nothing was given.
    pub fn number(&self, option: &str, otherwise: f64) -> f64 {
        match self.value(option) {
            Some(Value::Number(number)) => *number,
            _ => otherwise,
        }
    }

    /// A [`Kind::Word`], or what it is if nothing was given.
    pub fn word(&self, option: &str, otherwise: &'static str) -> &'static str {
        match self.value(option) {
            Some(Value::Word(word)) => word,
            _ => otherwise,
        }
    }

    /// A [`Kind::File`], if it was given.
    pub fn file(&self, option: &str) -> Option<&Path> {
        match self.value(option) {
            Some(Value::File(path)) => Some(Path::new(path)),
            _ => None,
        }
    }

    /// The same for a model: files that were made for another one are refused.
    pub fn of_model(&self, fingerprint: String) -> Self {
        Selection { model: Some(fingerprint), ..self.clone() }
    }

    /// An empty cache: of `capacity` tokens of one sequence, or as many of several.
    ///
    /// # Errors
    /// Heads that the scheme has no kernels for, files that do not go with the model; out of memory.
    pub fn open(
        &self,
        device: &Device,
        geometry: Geometry,
        rope: Option<&Rope>,
        capacity: impl Into<Capacity>,
    ) -> Result<Box<dyn KvCache>> {
        let capacity = capacity.into();
        if capacity.sequences == 0 {
            let limit = "a cache has room for one at least";
            return Err(Error::Order { what: "the number of sequences", value: 0, limit });
        }
        (self.scheme.open)(&Opening { device, geometry, rope, capacity, selection: self })
    }
}

impl PartialEq for Selection {
    fn eq(&self, other: &Self) -> bool {
        self.scheme.name == other.scheme.name && self.preset == other.preset && self.values == other.values
    }
}

impl fmt::Display for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.scheme.name)?;
        if let Some(preset) = self.preset.filter(|preset| self.scheme.presets.first() != Some(preset)) {
            write!(f, ":{}", preset.name)?;
        }
        self.values.iter().try_for_each(|(spec, value)| write!(f, "/{}={value}", spec.name))
    }
}

fn list(names: impl Iterator<Item = &'static str>) -> String {
    names.collect::<Vec<_>>().join(", ")
}

fn has(what: &str, names: impl Iterator<Item = &'static str>) -> String {
    let names = list(names);
    if names.is_empty() { format!("it has no {what}") } else { format!("its {what} are {names}") }
}

/// How a model turns its queries and keys.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Which channels turn together.
    pub pairing: Pairing,
    /// Channels of a head that turn.
    pub rotary: u32,
    /// Radians a position, [rotary / 2].
    pub frequencies: Vec<f32>,
}

/// What a scheme is given to open a cache.
#[derive(Clone, Copy, Debug)]
pub struct Opening<'a> {
    /// Where it is to be.
    pub device: &'a Device,
    /// Its layers and heads.
    pub geometry: Geometry,
    /// How the model turns queries and keys; `None` where there is no model, and keys come turned.
    pub rope: Option<&'a Rope>,
    /// Tokens and sequences that it is to hold.
    pub capacity: Capacity,
    /// The scheme with its preset and options.
    pub selection: &'a Selection,
}

impl Opening<'_> {
    /// The safetensors file that an option of [`Kind::File`] names, if it was given: codebooks, allocations,
    /// and whatever else was made for one model. Its metadata `layers`, `kv_heads` and `head_dim` must be the
    /// model's, and `model_hash` its fingerprint, where both are known.
    ///
    /// # Errors
    /// A file that cannot be read; [`Error::Artifact`] for another model's.
    pub fn artifact(&self, option: &str) -> Result<Option<TensorFile>> {
        let Geometry { layers, kv_heads, head_dim, .. } = self.geometry;
        self.artifact_of(option, &[("layers", layers), ("kv_heads", kv_heads), ("head_dim", head_dim)])
    }

    /// The same for a model of any number of layers, of which this geometry is one: and how many it has.
    ///
    /// # Errors
    /// Likewise; a file that does not say how many layers.
    pub fn artifact_of_layers(&self, option: &str) -> Result<Option<(TensorFile, usize)>> {
        let Geometry { kv_heads, head_dim, .. } = self.geometry;
        let Some(file) = self.artifact_of(option, &[("kv_heads", kv_heads), ("head_dim", head_dim)])? else {
            return Ok(None);
        };
        let layers = file.metadata().get("layers").cloned();
        match layers.as_deref().and_then(|layers| layers.parse().ok()) {
            Some(layers) => Ok(Some((file, layers))),
            None => Err(Error::Artifact {
                path: file.path().display().to_string(),
                what: "layers",
                found: layers.unwrap_or_else(|| "that it does not name".into()),
                expected: "some".into(),
            }),
        }
    }

    fn artifact_of(&self, option: &str, facts: &[(&'static str, usize)]) -> Result<Option<TensorFile>> {
        let Some(path) = self.selection.file(option) else { return Ok(None) };
        let file = TensorFile::open(path)?;
        // Files that others have made may leave out for which scheme they are.
        let scheme = self.selection.scheme().name;
        if let Some(found) = file.metadata().get("scheme").filter(|found| *found != scheme) {
            return Err(Error::ArtifactOf { path: path.display().to_string(), found: found.clone(), scheme });
        }
        // A file may leave out its model, and there may be none to compare with.
        let made_for = file.metadata().get("model_hash").zip(self.selection.model.as_ref());
        if let Some((found, expected)) = made_for.filter(|(found, expected)| found != expected) {
            let path = path.display().to_string();
            let (found, expected) = (found.clone(), expected.clone());
            return Err(Error::Artifact { path, what: "model_hash", found, expected });
        }
        for (what, expected) in facts.iter().copied() {
            let found = file.metadata().get(what).cloned();
            if found.as_deref() != Some(expected.to_string().as_str()) {
                return Err(Error::Artifact {
                    path: path.display().to_string(),
                    what,
                    found: found.unwrap_or_else(|| "that it does not name".into()),
                    expected: expected.to_string(),
                });
            }
        }
        Ok(Some(file))
    }

    /// [`artifact`](Self::artifact) of a scheme that cannot do without.
    ///
    /// # Errors
    /// Likewise; [`Error::NoArtifact`] where none was given.
    pub fn needed_artifact(&self, option: &'static str) -> Result<TensorFile> {
        let scheme = self.selection.scheme().name;
        self.artifact(option)?.ok_or(Error::NoArtifact { scheme, option })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::{proof, workload};

    static SCHEME: Scheme = Scheme {
        name: "made-up",
        about: "for these tests",
        presets: &[Preset { name: "one", about: "" }, Preset { name: "two", about: "" }],
        options: &[
            OptionSpec { name: "codes", about: "", kind: Kind::File },
            OptionSpec { name: "k", about: "", kind: Kind::Count(1, 8) },
            OptionSpec { name: "share", about: "", kind: Kind::Number(0.0, f64::INFINITY) },
            OptionSpec { name: "score", about: "", kind: Kind::Word(&["bounds", "mean"]) },
            OptionSpec { name: "group", about: "", kind: Kind::Switch },
        ],
        step_bytes: |_, _, _| 0.0,
        check: |_| Ok(()),
        open: |_| Err(Error::Order { what: "this scheme", value: 0, limit: "it is for tests" }),
        workload: workload::through_cache,
        proof: proof::by_workload,
        calibrate: None,
    };

    fn parse(text: &str) -> Result<Selection> {
        Selection::parse(text, [&SCHEME].into_iter())
    }

    #[test]
    fn what_is_written_is_what_was_read() {
        for text in
            ["made-up", "made-up:two", "made-up/k=3", "made-up:two/k=8/share=inf/score=mean/group=off"]
        {
            assert_eq!(parse(text).expect(text).to_string(), text);
        }
        // The default preset is not written, options come in the scheme's order, files last.
        let selection = parse("made-up:one/group=on/k=2/codes=a folder/b=c/d.safetensors").expect("options");
        assert_eq!(selection.to_string(), "made-up/k=2/group=on/codes=a folder/b=c/d.safetensors");
        assert_eq!(selection.file("codes"), Some(Path::new("a folder/b=c/d.safetensors")));
        assert_eq!((selection.count("k", 1), selection.word("score", "bounds")), (2, "bounds"));
        assert_eq!(parse(&selection.to_string()).expect("again"), selection);
    }

    #[test]
    fn what_there_is_not_is_refused_with_what_there_is() {
        for (text, part) in [
            ("", "there is no KV scheme ''; there is made-up"),
            ("made", "there is no KV scheme 'made'"),
            ("made-up:", "made-up has no preset ''; its presets are one, two"),
            ("made-up:three/k=1", "no preset 'three'"),
            ("made-up/", "made-up has no option ''; its options are codes, k, share, score, group"),
            ("made-up/k", "made-up/k=: k is a whole number from 1 to 8"),
            ("made-up/k=/share=1", "made-up/k=: k is"),
            ("made-up/k=9", "made-up/k=9: k is a whole number from 1 to 8"),
            ("made-up/k=-1", "k is a whole number"),
            ("made-up/k=18446744073709551616", "k is a whole number"),
            ("made-up/share=nan", "share is a number from 0 up, or inf"),
            ("made-up/share=-0.5", "share is a number from 0 up"),
            ("made-up/score=max", "score is one of bounds, mean"),
            ("made-up/group=yes", "group is on or off"),
            ("made-up/codes=", "codes is a file"),
            ("made-up/k=1/k=2", "made-up is given k twice"),
        ] {
            let error = parse(text).expect_err(text).to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    /// A file that was made for another model is refused, with both sides named; one that is no file as well.
    #[test]
    fn artifacts_are_checked_against_the_model() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("codes.safetensors");
        let write = |head_dim: &str| {
            let header = format!(
                r#"{{"__metadata__":{{"layers":"2","kv_heads":"3","head_dim":"{head_dim}"}},"t":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}}}"#
            );
            let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
            bytes.extend(header.bytes().chain([7]));
            std::fs::write(&path, bytes).expect("written");
        };
        let device = Device::cpu(simt::emu::EmuOptions::default());
        let geometry = Geometry { layers: 2, q_heads: 9, kv_heads: 3, head_dim: 64 };
        let selection = parse(&format!("made-up/codes={}", path.display())).expect("a path");
        let opening =
            Opening { device: &device, geometry, rope: None, capacity: 16.into(), selection: &selection };
        let missing = opening.artifact("codes").expect_err("no file");
        assert!(matches!(missing, Error::File(_)), "{missing}");
        write("128");
        let other = opening.artifact("codes").expect_err("another model's").to_string();
        assert!(other.contains("is for head_dim 128, and the model has 64"), "{other}");
        write("64");
        assert!(opening.artifact("codes").expect("this model's").is_some());
        assert!(opening.artifact("k").expect("no file option").is_none());
    }
}
