//! What a cache of codes refuses, what it takes, and that its files are what they say.

#[path = "common/artifact.rs"]
mod artifact;

use artifact::ready;
use half::f16;
use host::kv::calibration::Material;
use host::kv::{Chunk, Geometry, KvCache, New, Rotated, Selection};
use host::tensor_file::Target;
use host::{Buffer, Device, Stream};
use simt::emu::EmuOptions;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

const GEOMETRY: Geometry = Geometry { layers: 2, q_heads: 4, kv_heads: 2, head_dim: 64 };

fn device() -> Device {
    Device::cpu(EmuOptions::default())
}

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("vecinfer-{}-{name}", std::process::id()))
}

/// Makes a file by `settings` of a calibration.
fn made(name: &str, settings: &str, geometry: Geometry, tokens: usize) -> Result<PathBuf, host::kv::Error> {
    let selection = Selection::for_calibration(&format!("vecinfer{settings}"), host::schemes())?;
    let material = Material::made_up(geometry, tokens, 3);
    let artifact = selection.calibrate(&material, &|_, _| ControlFlow::Continue(()))?;
    let path = file(name);
    artifact.write(Target::new(&path, true, None)?)?;
    Ok(path)
}

fn open(text: &str, geometry: Geometry) -> Result<Box<dyn KvCache>, host::kv::Error> {
    text.parse::<Selection>()?.open(&device(), geometry, None, 64)
}

fn refused(text: &str, geometry: Geometry) -> String {
    let error = open(text, geometry).err().expect("refused").to_string();
    assert_eq!(error.lines().count(), 1, "{error}");
    error
}

#[test]
fn a_cache_needs_the_file_of_its_model_and_setting() {
    let none = refused("vecinfer", GEOMETRY);
    assert!(
        none.contains("ferrokv calibrate --scheme vecinfer") && none.contains("vecinfer/codes=FILE"),
        "{none}"
    );
    let path = made("own", "", GEOMETRY, 200).expect("made");
    let own = format!("vecinfer/codes={}", path.display());
    assert_eq!(open(&own, GEOMETRY).expect("this model's").geometry(), GEOMETRY);
    for (what, other) in [
        ("layers 2, and the model has 3", Geometry { layers: 3, ..GEOMETRY }),
        ("kv_heads 2, and the model has 1", Geometry { kv_heads: 1, ..GEOMETRY }),
        ("head_dim 64, and the model has 128", Geometry { head_dim: 128, ..GEOMETRY }),
    ] {
        let error = refused(&own, other);
        assert!(error.contains(what), "{error}");
    }
    let other = refused(&format!("vecinfer/k=d2b8/codes={}", path.display()), GEOMETRY);
    assert!(other.contains("keys") && other.contains("d4b8") && other.contains("d2b8"), "{other}");
    let none = "vecinfer/k=d4b10/v=d2b8".parse::<Selection>().expect_err("no kernels").to_string();
    assert!(none.contains("keys in d4b10 with values in d2b8; there are d2b8 with d2b8"), "{none}");
    assert!(refused("vecinfer/codes=/no/such/file", GEOMETRY).contains("/no/such/file"));
    let restored = refused(&format!("vecinfer/step=restored/codes={}", path.display()), GEOMETRY);
    assert!(restored.contains("bench attention") && restored.contains("leave it out"), "{restored}");
}

/// Heads of every size have files and caches, and codes that one has no kernels for are refused by name.
#[test]
fn heads_of_every_size_have_caches() {
    for head_dim in [64, 96, 128, 256] {
        let geometry = Geometry { head_dim, ..GEOMETRY };
        let path = made(&format!("dim-{head_dim}"), "", geometry, 200).expect("made");
        let cache = open(&format!("vecinfer/codes={}", path.display()), geometry).expect("a cache");
        assert_eq!(cache.geometry(), geometry);
        let text = "vecinfer/k=d2b8/v=d4b8";
        let made = made(&format!("pair-{head_dim}"), "/k=d2b8/v=d4b8", geometry, 200);
        match (head_dim, made) {
            (64 | 128, Ok(path)) => {
                let cache = open(&format!("{text}/codes={}", path.display()), geometry);
                assert_eq!(cache.expect("a cache").geometry(), geometry);
            }
            (96 | 256, Err(error)) => {
                assert!(error.to_string().contains(&format!("at head_dim {head_dim}")), "{error}");
            }
            (_, made) => panic!("{head_dim}: {made:?}"),
        }
    }
}

#[test]
fn a_file_that_was_cut_or_altered_is_refused() {
    let path = made("whole", "", GEOMETRY, 200).expect("made");
    let whole = std::fs::read(&path).expect("read");
    let text = |name: &str| format!("vecinfer/codes={}", file(name).display());
    std::fs::write(file("cut"), &whole[..whole.len() - 100]).expect("written");
    assert!(refused(&text("cut"), GEOMETRY).contains("cut off"));
    let mut altered = whole.clone();
    let last = altered.len() - 1;
    altered[last] ^= 1;
    std::fs::write(file("altered"), &altered).expect("written");
    assert!(refused(&text("altered"), GEOMETRY).contains("hash"));
    // What the header says of the tables is theirs too.
    let (on, off) = (&b"\"hadamard\":\"on\""[..], &b"\"hadamard\":\"off\""[..]);
    let at = whole.windows(on.len()).position(|part| part == on).expect("in the header");
    let mut turned = whole.clone();
    turned.splice(at..at + on.len(), off.iter().copied());
    let header = u64::from_le_bytes(whole[..8].try_into().expect("eight"));
    turned[..8].copy_from_slice(&(header + 1).to_le_bytes());
    std::fs::write(file("turned"), &turned).expect("written");
    assert!(refused(&text("turned"), GEOMETRY).contains("hash"));
    // A NaN in a codebook: all bits of its last element.
    altered[last] = 0x7f;
    altered[last - 1] = 0xff;
    std::fs::write(file("nan"), &altered).expect("written");
    assert!(refused(&text("nan"), GEOMETRY).contains("NaN"));
}

#[test]
fn calibration_is_the_same_each_time_and_refuses_what_it_cannot_use() {
    let read = |name: &str| std::fs::read(made(name, "/seed=5", GEOMETRY, 200).expect("made")).expect("read");
    assert_eq!(read("one"), read("two"));
    let error = |settings: &str, geometry, tokens| {
        made("none", settings, geometry, tokens).expect_err("refused").to_string()
    };
    let short = error("/k=d4b10", GEOMETRY, 100);
    assert!(short.contains("1024 centroids") && short.contains("128 tokens"), "{short}");
    assert!(error("/k=d4b10/v=d2b8", GEOMETRY, 200).contains("there are d2b8 with d2b8"));
    let dim = error("", Geometry { head_dim: 80, ..GEOMETRY }, 200);
    assert!(dim.contains("head_dim 80") && dim.contains("64, 96, 128 and 256"), "{dim}");
    let pair = error("/k=d8b12", Geometry { head_dim: 96, ..GEOMETRY }, 200);
    assert!(pair.contains("d8b12 with values in d8b12 at head_dim 96; there are d2b8 with d2b8"), "{pair}");
    let pair = error("/k=d2b8", Geometry { head_dim: 256, ..GEOMETRY }, 200);
    assert!(pair.contains("at head_dim 256; there are d4b8 with d4b8, d8b12 with d8b12"), "{pair}");
    let dense =
        Selection::for_calibration("dense", host::schemes()).expect_err("nothing to make").to_string();
    assert!(dense.contains("dense needs no calibration"), "{dense}");
    assert!(error("/transform=x", GEOMETRY, 200).contains("s+h"));
}

/// Appends tokens `first..` to both layers.
fn append(cache: &mut dyn KvCache, stream: &Stream, rows: &[f16], tokens: usize) {
    let chunk = Chunk::of_one(tokens);
    let positions = Buffer::from_slice(stream.device(), &cache.held().positions(chunk)).expect("a buffer");
    let rows = Buffer::from_slice(stream.device(), rows).expect("a buffer");
    cache.begin(stream, chunk).expect("begun");
    for layer in 0..GEOMETRY.layers {
        let new = Rotated { positions: &positions, keys: &rows, values: &rows };
        cache.append(stream, layer, New::Rotated(new)).expect("appended");
        if tokens > 1 {
            let queries = Buffer::<f16>::zeroed(stream.device(), tokens * 256).expect("a buffer");
            let mut output = Buffer::<f32>::zeroed(stream.device(), tokens * 256).expect("a buffer");
            cache.attend(stream, layer, &queries, &mut output).expect("attended");
        }
    }
    cache.commit();
}

#[test]
fn what_is_no_number_is_said_and_bytes_are_those_of_the_codes() {
    let device = device();
    let stream = Stream::new(&device).expect("a stream");
    let selection = ready("vecinfer/recent=16/sink=0", GEOMETRY);
    let mut cache = selection.open(&device, GEOMETRY, None, 64).expect("a cache");
    let mut with_first =
        ready("vecinfer/recent=16", GEOMETRY).open(&device, GEOMETRY, None, 64).expect("a cache");
    let row = |i: usize| f16::from_f32((i * 37 % 101) as f32 / 50.0 - 1.0);
    let rows: Vec<f16> = (0..40 * 128).map(row).collect();
    let empty = cache.bytes();
    append(&mut *cache, &stream, &rows, 40);
    let heads = (GEOMETRY.layers * GEOMETRY.kv_heads) as u64;
    // Of the prompt: keys and values of three tiles, and its queries.
    let room = 2 * (2 * 64 * 48 * 2) + 40 * 256 * 2;
    assert_eq!(cache.bytes() - empty, heads * 40 * 32 + room);
    append(&mut *cache, &stream, &rows[..128], 1);
    assert_eq!(cache.bytes() - empty, heads * 41 * 32, "no step needs a prompt's room");
    cache.check(&stream).expect("all is held");
    // Of 41 tokens 25 are read in f16, and 16 from their codes: 16 bytes of keys and as many of values.
    assert_eq!(cache.step_bytes(), heads * (16 * 32 + 25 * 256));
    // With the first 16 in f16 as well no code is read, until there are 16 tokens more.
    append(&mut *with_first, &stream, &rows, 40);
    append(&mut *with_first, &stream, &rows[..128], 1);
    assert_eq!(with_first.step_bytes(), heads * 41 * 256);
    append(&mut *with_first, &stream, &rows[..16 * 128], 16);
    assert_eq!(with_first.step_bytes(), heads * (16 * 32 + 41 * 256));
    let mut bad = rows[..128].to_vec();
    bad[100] = f16::INFINITY;
    append(&mut *cache, &stream, &bad, 1);
    let error = cache.check(&stream).expect_err("refused").to_string();
    assert!(error.contains("value of token 41"), "{error}");
}
