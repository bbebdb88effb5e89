//! `ferrokv attend` as people meet it: bounds that hold on real keys, and how it refuses files.

mod common;

use common::{Folder, SAMPLE, Tensor, ferrokv, json, refused, succeed, text};
use half::{bf16, f16};
use safetensors::tensor::Dtype;
use serde_json::Value;
use std::fs;

/// The report of a run that succeeds.
fn report(arguments: &[&str]) -> Value {
    serde_json::from_str(&succeed(&[arguments, &["--json"]].concat())).expect("JSON")
}

/// A tensor of a file under construction.
#[derive(Clone)]
struct Part {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    data: Vec<u8>,
}

/// F16 or BF16 numbers between -1 and 1.
fn part(name: &str, dtype: Dtype, shape: &[usize]) -> Part {
    let numbers = (0..shape.iter().product::<usize>()).map(|i| (i as f32 * 0.37 + name.len() as f32).sin());
    let data = numbers.flat_map(|x| match dtype {
        Dtype::BF16 => bf16::from_f32(x).to_le_bytes().to_vec(),
        Dtype::F16 => f16::from_f32(x).to_le_bytes().to_vec(),
        _ => x.to_le_bytes().to_vec(),
    });
    Part { name: name.into(), dtype, shape: shape.to_vec(), data: data.collect() }
}

/// Layer 3: 40 tokens, `kv_heads` heads of `dim` channels, 3 query tokens of `heads` heads.
fn layer(dtype: Dtype, kv_heads: usize, heads: usize, dim: usize) -> Vec<Part> {
    vec![
        part("layer.03.key", dtype, &[40, kv_heads, dim]),
        part("layer.03.value", dtype, &[40, kv_heads, dim]),
        part("layer.03.query", dtype, &[3, heads, dim]),
    ]
}

/// A cache of these tensors in a folder.
fn cache(folder: &Folder, parts: &[Part], metadata: &[(&str, &str)]) -> String {
    let tensors: Vec<Tensor> =
        parts.iter().map(|part| (&*part.name, part.dtype, &*part.shape, &*part.data)).collect();
    folder.tensors_with("cache.safetensors", &tensors, Some(metadata))
}

fn rows(report: &Value) -> Vec<&Value> {
    let layers = report["layers"].as_array().expect("layers");
    layers.iter().flat_map(|layer| layer["rows"].as_array().expect("rows")).collect()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// A figure that the scheme alone knows.
fn fact(of: &Value, name: &str) -> Value {
    let facts = of["facts"].as_array().expect("facts");
    let fact = facts.iter().find(|fact| fact["name"] == name).unwrap_or_else(|| panic!("no {name}: {of}"));
    fact["value"].as_object().expect("a figure").values().next().expect("a value").clone()
}

#[test]
fn bounds_hold_on_the_sample() {
    let folder = Folder::new();
    let (path, plot) = (folder.text("report.json"), folder.text("plot"));
    let out =
        succeed(&["attend", SAMPLE, "--layers", "7", "--queries", "2", "--json", &path, "--plot", &plot]);
    for word in
        ["certified, on emulator", "layer.07", "query tokens 448, 511", "all 18 hold", "bound of the output"]
    {
        assert!(out.contains(word), "'{word}' is not in: {out}");
    }
    let report = json(&path);
    assert_eq!(report["summary"]["violations"], 0);
    assert_eq!(report["summary"]["dense_bits_differing"], 0);
    assert_eq!(report["device"], "emulator");
    let rows = rows(&report);
    assert_eq!(rows.len(), 18);
    for row in &rows {
        let (bound, error) = (number(&row["bound"]), number(&row["error"]));
        let parts: f64 = ["E_key", "E_val", "E_round"].into_iter().map(|part| number(&fact(row, part))).sum();
        assert!(error > 0.0 && error <= bound && row["holds"] == true, "{row}");
        let worst = number(&fact(row, "worst case"));
        assert!((worst - parts).abs() <= 1e-6 * worst && bound <= worst * (1.0 + 1e-6), "{row}");
        let exact = row["source"] == "originals";
        assert_eq!(exact, !fact(row, "why").as_str().expect("words").is_empty(), "{row}");
        assert!(!exact || row["bits_of_dense"] == true, "{row}");
    }
    // Token 511 has 32 full blocks, token 448 has 28 and one key more. Tiles of 2048 bytes, annotations
    // of 48.
    let layer = &report["layers"][0];
    assert_eq!(fact(layer, "quantized"), 3 * (32 + 28) * (2048 + 48));
    assert_eq!(layer["dense_read_bytes"], 3 * (512 + 449) * 4 * 64);
    // Tiles and annotations of 32 blocks, a scratch of 64 blocks of keys and as many of values, its
    // directory.
    let scratch = 3 * 32 * 2;
    let memory = 32 * 3 * (2048 + 48) + scratch * (2048 + 16) + 16 * 8;
    assert_eq!(layer["memory"]["device"], memory);
    assert_eq!(layer["memory"]["host"], 2 * 32 * 3 * 2048);
    let svg = fs::read_to_string(folder.text("plot.svg")).expect("the picture");
    assert!(svg.contains("bound = error") && svg.contains("true error"));
    assert!(fs::read(folder.text("plot.png")).expect("the picture").starts_with(b"\x89PNG"));
}

/// From 16 rows of blocks on the exact fallback cuts sequences into more parts than dense attention: its
/// heads have the bits of that.
#[test]
fn exact_heads_of_many_sequences_have_the_bits_of_their_fallback() {
    for scheme in ["certified/error_budget=0", "certified:strict"] {
        let report = report(&["attend", SAMPLE, "--layers", "7", "--queries", "24", "--kv", scheme]);
        let exact = number(&report["summary"]["exact_heads"]);
        assert!(exact >= 100.0 && report["summary"]["dense_bits_differing"] == 0, "{}", report["summary"]);
        let of_row = |row: &Value| (row["source"] == "originals").then(|| row["bits_of_dense"] == true);
        assert!(rows(&report).into_iter().filter_map(of_row).all(|same| same));
    }
}

#[test]
fn nothing_is_promoted_by_int8_int4_and_dense_has_rounding_only() {
    let on_sample =
        |scheme: &str| report(&["attend", SAMPLE, "--layers", "15", "--queries", "1", "--kv", scheme]);
    let (bare, dense) = (on_sample("int8-int4"), on_sample("dense"));
    for (bare, dense) in rows(&bare).into_iter().zip(rows(&dense)) {
        assert_eq!([&bare["original_keys"], &bare["original_values"]], [0, 0]);
        assert_eq!((&bare["source"], &dense["source"]), (&"stored".into(), &"stored".into()));
        assert!(number(&fact(bare, "E_key")) > 0.0 && number(&fact(bare, "E_val")) > 0.0, "{bare}");
        assert!(number(&dense["error"]) < 0.01 * number(&bare["error"]), "{dense} {bare}");
        assert!(number(&dense["bound"]) >= number(&dense["error"]), "{dense}");
        assert_eq!(number(&dense["error"]), number(&bare["dense_error"]));
    }
    assert_eq!((&dense["summary"]["violations"], &dense["kv"]), (&0.into(), &"dense".into()));
}

/// A scheme that promises nothing is shown with its errors, and there is nothing to violate.
#[test]
fn without_a_promise_there_is_the_error() {
    let report = report(&["attend", SAMPLE, "--layers", "7", "--queries", "1", "--kv", "int8"]);
    assert_eq!((&report["summary"]["bounded"], &report["summary"]["violations"]), (&0.into(), &0.into()));
    for row in rows(&report) {
        assert!(row["bound"].is_null() && row["holds"] == true, "{row}");
        let relative = number(&row["error"]) / number(&row["output_norm"]);
        assert!(relative > 1e-5 && relative < 0.05, "eight bits: {row}");
    }
}

#[test]
fn the_papers_layout_has_its_bytes_and_holds() {
    let on_sample =
        |scheme: &str| report(&["attend", SAMPLE, "--layers", "7", "--queries", "1", "--kv", scheme]);
    let (paper, compact) = (on_sample("certified:paper/layout=paper"), on_sample("certified:paper"));
    assert_eq!([&paper["kv"], &compact["kv"]], ["certified:paper/layout=paper", "certified:paper"]);
    // 32 blocks of 3 KV heads of 64 channels: tiles of 36 bytes a channel, or of 32, and annotations of 48
    // bytes.
    for (report, bytes) in [(&paper, 36 * 64), (&compact, 32 * 64)] {
        assert_eq!(report["summary"]["violations"], 0);
        assert_eq!(fact(&report["layers"][0], "quantized"), 3 * 32 * (bytes + 48));
    }
    let device = |report: &Value| number(&report["layers"][0]["memory"]["device"]);
    assert_eq!(device(&paper) - device(&compact), f64::from(3 * 32 * 4 * 64));
    let delta =
        |report: &Value| rows(report).into_iter().map(|row| number(&fact(row, "delta"))).collect::<Vec<_>>();
    assert_ne!(delta(&paper), delta(&compact));
    let refuse = |scheme: &str, part: &str| {
        let refused = ferrokv(&["attend", SAMPLE, "--kv", scheme]);
        let error = text(&refused.stderr);
        assert!(refused.status.code() == Some(2) && error.contains(part), "{error}");
    };
    refuse("dense/layout=paper", "it has no options");
    refuse("certified/layout=paper", "set renew to 0");
}

#[test]
fn outputs_do_not_depend_on_the_scratch() {
    let with =
        |scratch: &str| report(&["attend", SAMPLE, "--layers", "0", "--queries", "2", "--scratch", scratch]);
    let (none, some) = (with("0"), with("200"));
    assert_eq!(rows(&none), rows(&some));
}

#[test]
fn bf16_and_positions_without_metadata() {
    let folder = Folder::new();
    let file = cache(&folder, &layer(Dtype::BF16, 1, 2, 128), &[]);
    let report = report(&["attend", &file, "--queries", "3", "--kv", "certified:strict"]);
    // The last three of forty tokens.
    assert_eq!(report["layers"][0]["query_tokens"], serde_json::json!([37, 38, 39]));
    assert_eq!((rows(&report).len(), &report["summary"]["violations"]), (6, &Value::from(0)));
    // Dense attention has more head dimensions than certified.
    let file = cache(&folder, &layer(Dtype::F16, 2, 2, 96), &[("query_first_position", "5")]);
    let out = succeed(&["attend", &file, "--queries", "1", "--kv", "dense"]);
    assert!(out.contains("query tokens 7\n"), "{out}");
    refused(&["attend", &file, "--queries", "1"], &["layer.03", "head_dim 96", "64 and 128"]);
}

#[test]
fn files_that_are_refused() {
    let folder = Folder::new();
    let whole = layer(Dtype::F16, 2, 4, 64);
    let refuse = |parts: &[Part], options: &[&str], words: &[&str]| {
        let file = cache(&folder, parts, &[]);
        refused(&[&["attend", &file, "--queries", "1"], options].concat(), words);
    };
    refuse(&whole[..1], &[], &["layer.03.value and layer.03.query"]);
    refuse(&[part("keys", Dtype::F16, &[4, 1, 64])], &[], &["no layer", "layer.NN.key", "keys"]);
    refuse(&whole, &["--layers", "3,7"], &["no layer 7", "layers 3"]);
    refuse(&whole, &["--backend", "cuda"], &["libcuda"]);
    refused(&["attend", &cache(&folder, &whole, &[]), "--queries", "4"], &["layer.03", "up to 3"]);

    let with = |index: usize, part: Part| {
        let mut parts = whole.clone();
        parts[index] = part;
        parts
    };
    let query = |dtype, shape: &[usize]| with(2, part("layer.03.query", dtype, shape));
    refuse(&layer(Dtype::F32, 2, 4, 64), &[], &["layer.03.key", "F32", "F16 and BF16"]);
    refuse(&query(Dtype::BF16, &[3, 4, 64]), &[], &["layer.03.query", "BF16", "alike"]);
    refuse(&query(Dtype::F16, &[3, 256]), &[], &["layer.03.query", "[3, 256]", "head_dim"]);
    refuse(&query(Dtype::F16, &[3, 4, 128]), &[], &["layer.03.query", "128", "64"]);
    refuse(&query(Dtype::F16, &[3, 5, 64]), &[], &["layer.03.query", "5 heads", "2"]);
    refuse(&query(Dtype::F16, &[41, 4, 64]), &[], &["layer.03.query", "41 rows", "40 tokens"]);
    let shorter = with(1, part("layer.03.value", Dtype::F16, &[39, 2, 64]));
    refuse(&shorter, &[], &["layer.03.value", "[39, 2, 64]", "[40, 2, 64]"]);
    refuse(&layer(Dtype::F16, 1, 17, 64), &[], &["17 query heads", "16"]);
    for (at, name) in ["key", "value", "query"].into_iter().enumerate() {
        let mut parts = whole.clone();
        // Token 1, head 1, channel 9.
        let first = 2 * (parts[at].shape[1] * 64 + 64 + 9);
        parts[at].data[first..first + 2].copy_from_slice(&f16::NAN.to_le_bytes());
        refuse(&parts, &[], &[&format!("layer.03.{name}"), "NaN", "[1, 1, 9]"]);
    }

    let file = cache(&folder, &whole, &[("query_first_position", "38")]);
    refused(&["attend", &file], &["layer.03.query", "is 38"]);
    let file = cache(&folder, &whole, &[("query_first_position", "last")]);
    refused(&["attend", &file], &["'last'"]);
    let unknown = ferrokv(&["attend", &file, "--kv", "certified:brave"]);
    let error = text(&unknown.stderr);
    assert_eq!(unknown.status.code(), Some(2), "{error}");
    assert!(error.contains("brave") && error.contains("sound") && error.contains("strict"), "{error}");
}

/// `prove` reads real caches by the same rules; what it cannot prove over is said before any step.
#[test]
fn prove_refuses_the_same_files() {
    let folder = Folder::new();
    let refuse = |parts: &[Part], words: &[&str]| {
        let file = cache(&folder, parts, &[]);
        refused(&["prove", "--cache", &file, "--kv", "dense", "--head-steps", "1"], words);
    };
    let whole = layer(Dtype::F16, 2, 4, 64);
    refuse(&whole[..2], &["layer.03.query"]);
    refuse(&layer(Dtype::BF16, 2, 4, 64), &["layer.03.key", "BF16", "F16"]);
    let mut empty = whole.clone();
    empty[2] = part("layer.03.query", Dtype::F16, &[0, 4, 64]);
    refuse(&empty, &["layer.03.query", "[0, 4, 64]"]);
    let mut nan = whole.clone();
    nan[0].data[..2].copy_from_slice(&f16::NAN.to_le_bytes());
    refuse(&nan, &["layer.03.key", "NaN", "[0, 0, 0]"]);
    let file = cache(&folder, &whole, &[]);
    let short = ["--kv", "dense", "--head-steps", "1", "--max-tokens", "32", "--backend", "cpu"];
    succeed(&[&["prove", "--cache", &file][..], &short].concat());
}
