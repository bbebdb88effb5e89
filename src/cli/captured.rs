//! What a captured cache says of its model: written by `capture`, read by what opens files made for a model.

use super::failure::CommandError;
use host::attention::rope::Pairing;
use host::kv::{Geometry, Rope};
use host::model::Model;
use host::tensor_file::TensorFile;

const LAYERS: &str = "layers";
const HASH: &str = "model_hash";
const PAIRING: &str = "rope_pairing";
const CHANNELS: &str = "rope_channels";
const FREQUENCIES: &str = "rope_frequencies";

/// What a file says of the model that it is from; nothing, if it is of another program.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Facts {
    /// Its name.
    pub model: Option<String>,
    /// Of what, and from where.
    pub text: Option<String>,
    /// How many layers it has.
    pub layers: Option<usize>,
    /// Its fingerprint.
    pub model_hash: Option<String>,
    /// How it turns queries and keys.
    pub rope: Option<Rope>,
}

/// Metadata that make no sense.
#[derive(Debug, thiserror::Error)]
#[error("{path} has the metadata {name} = '{text}', which {reason}; capture it again")]
pub struct Error {
    path: String,
    name: &'static str,
    text: String,
    reason: &'static str,
}

impl CommandError for Error {}

fn pairing(pairing: Pairing) -> &'static str {
    match pairing {
        Pairing::HalfSplit => "half-split",
        Pairing::Interleaved => "interleaved",
    }
}

/// What a capture says of a model.
pub fn metadata(model: &Model) -> Vec<(&'static str, String)> {
    let (geometry, rope) = (Geometry::from(&model.config), Rope::from(&model.config));
    let frequencies: Vec<String> = rope.frequencies.iter().map(f32::to_string).collect();
    vec![
        (LAYERS, geometry.layers.to_string()),
        ("kv_heads", geometry.kv_heads.to_string()),
        ("head_dim", geometry.head_dim.to_string()),
        (HASH, model.fingerprint()),
        (PAIRING, pairing(rope.pairing).into()),
        (CHANNELS, rope.rotary.to_string()),
        (FREQUENCIES, frequencies.join(",")),
    ]
}

impl Facts {
    /// Those of a file.
    ///
    /// # Errors
    /// Metadata that are there and make no sense.
    pub fn read(file: &TensorFile) -> Result<Self, Error> {
        let said = |name: &str| file.metadata().get(name).cloned();
        let wrong = |name: &'static str, text: &str, reason: &'static str| {
            let path = file.path().display().to_string();
            Error { path, name, text: text.to_owned(), reason }
        };
        let number = |name: &'static str| match said(name) {
            None => Ok(None),
            Some(text) => text.parse().map(Some).map_err(|_| wrong(name, &text, "is no number")),
        };
        let rope = match (said(PAIRING), number(CHANNELS)?, said(FREQUENCIES)) {
            (Some(pairs), Some(rotary), Some(list)) => {
                let known = [Pairing::HalfSplit, Pairing::Interleaved];
                let found = known.into_iter().find(|known| pairing(*known) == pairs);
                let no_pairing = || wrong(PAIRING, &pairs, "is neither half-split nor interleaved");
                let frequencies: Result<Vec<f32>, _> = list.split(',').map(str::parse).collect();
                let frequencies = frequencies.ok().filter(|all| 2 * all.len() == rotary);
                let no_list = || wrong(FREQUENCIES, &list, "is not a number for each pair of channels");
                Some(Rope {
                    pairing: found.ok_or_else(no_pairing)?,
                    rotary: rotary as u32,
                    frequencies: frequencies.ok_or_else(no_list)?,
                })
            }
            _ => None,
        };
        let (model, text) = (said("model"), said("text"));
        Ok(Facts { model, text, layers: number(LAYERS)?, model_hash: said(HASH), rope })
    }
}
