//! `ferrokv diagnose` as people meet it: what it measures of the sample, of a tiny model with files of its
//! own, and how it refuses.

mod common;

use common::{Folder, SAMPLE, json, refused, succeed, words};
use ferrokv::host::model::config::Architecture;
use ferrokv::host::model::synthetic::{self, Packing};
use half::f16;
use safetensors::tensor::Dtype;
use serde_json::Value;
use std::fs;

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

fn rows(report: &Value) -> Vec<&Value> {
    report["rows"].as_array().expect("rows").iter().collect()
}

/// More bits are nearer in every measure, rows come by bytes, and each has what it says.
#[test]
fn the_sample_is_measured_scheme_by_scheme() {
    let folder = Folder::new();
    let (path, plot) = (folder.text("report.json"), folder.text("plot"));
    // Codes alone.
    let [four, two, three] = ["gtq/k=4/v=4", "gtq/k=2/v=2", "gtq"].map(|kv| format!("{kv}/recent=0/sink=0"));
    let kv = format!("{four},{two},{three},int8-int4,kivi-paper/k=2");
    let more =
        ["--kv", &kv, "--layers", "7,22", "--queries", "3", "--json", &path, "--plot", &plot, "--by-layer"];
    let out = succeed(&[&["diagnose", SAMPLE][..], &more].concat());
    for word in ["layers 07, 22, 3 query tokens of 9 heads", "kivi-paper/k=2 *", "layer.22", "SmolLM2"] {
        assert!(out.to_lowercase().contains(&word.to_lowercase()), "'{word}' is not in: {out}");
    }
    let report = json(&path);
    assert_eq!((&report["tokens"], &report["query_tokens"][2]), (&512.into(), &511.into()));
    let found = rows(&report);
    let names: Vec<&str> = found.iter().map(|row| row["kv"].as_str().expect("a name")).collect();
    // A key in 18, 24 and 26 bytes; 34; 68. Of kivi-paper 512 tokens are sixteen groups.
    assert_eq!(names, [&*two, "kivi-paper/k=2", &three, &four, "int8-int4"]);
    let bytes: Vec<f64> = found.iter().map(|row| number(&row["key_bytes"])).collect();
    assert_eq!(bytes, [18.0, 24.0, 26.0, 34.0, 80.0]);
    // Values keep 32 tokens of 512 in f16.
    assert_eq!(number(&found[1]["value_bytes"]), (480.0 * 24.0 + 32.0 * 128.0) / 512.0);
    let of = |row: usize, measure: &str| number(&found[row][measure]["mean"]);
    for measure in ["logit", "offsets", "divergence", "output", "values"] {
        let gtq = [0, 2, 3].map(|row| of(row, measure));
        assert!(gtq.is_sorted_by(|a, b| a > b), "{measure}: {gtq:?}");
        let interval = &found[0][measure]["interval"];
        assert!(number(&interval["low"]) <= gtq[0] && gtq[0] <= number(&interval["high"]), "{interval}");
    }
    assert!(of(4, "logit") < of(3, "logit") && of(4, "overlap") > of(0, "overlap"));
    assert_eq!(found[0]["samples"], 2 * 3 * 9);
    let layers = found[0]["layers"].as_array().expect("layers");
    let mean = layers.iter().map(|layer| number(&layer["logit"]["mean"])).sum::<f64>() / 2.0;
    assert!((mean - of(0, "logit")).abs() < 1e-9);
    let svg = fs::read_to_string(folder.path("plot.svg")).expect("a picture");
    assert!(svg.contains("int8-int4") && svg.contains("bytes of a key"), "{svg}");
}

/// Files of the model that was captured are taken, and those of another one are not.
#[test]
fn files_are_those_of_the_captured_model() {
    let folder = Folder::new();
    let text = words(&folder, 6000);
    let model = |name: &str, seed: u64| {
        let model =
            synthetic::model(synthetic::tiny(Architecture::Llama), Packing::Q4_1, seed).expect("a model");
        fs::write(folder.path(name), synthetic::file(&model).to_bytes()).expect("written");
        folder.text(name)
    };
    let (own, other) = (model("own.gguf", 1), model("other.gguf", 2));
    let [cache, energies, order, books] = ["kv", "energies", "order", "books"].map(|name| folder.text(name));
    let capture = |out: &str, model: &str, tokens: &str, start: &str| {
        let of = ["--text", &text, "--start", start, "--tokens", tokens, "--queries", "40", "--layers", "1"];
        succeed(&[&["capture", "-o", out, "--model", model, "--backend", "cpu"][..], &of].concat());
    };
    capture(&cache, &own, "150", "0");
    capture(&energies, &own, "40", "9000");
    let calibrate = |scheme: &str, out: &str, model: &str| {
        let of = ["--text", &text, "--windows", "4", "--tokens", "128", "--backend", "cpu", "--force"];
        succeed(&[&["calibrate", "--scheme", scheme, "-o", out, "--model", model][..], &of].concat());
    };
    calibrate("gtq-blocks", &order, &own);
    calibrate("vecinfer", &books, &own);
    let files = [
        format!("gtq-blocks/recent=0/sink=0/order={order}"),
        format!("vecinfer/recent=0/sink=0/codes={books}"),
        format!("block-gtq/k=3/v=3/from={energies}"),
    ];
    let report = folder.text("report.json");
    succeed(&["diagnose", &cache, "--kv", &files.join(","), "--queries", "5", "--json", &report]);
    let report = json(&report);
    let found = rows(&report);
    assert_eq!(found.len(), 3);
    for row in &found {
        // RoPE is known, and what was stored is near.
        assert!(number(&row["offsets"]["mean"]) > 0.0 && number(&row["output"]["mean"]) < 1.0, "{row}");
    }
    // Of 150 tokens the last 6 are in no full tile.
    let vecinfer = found.iter().find(|row| row["kv"].as_str().expect("a name").starts_with("vecinfer"));
    assert_eq!(vecinfer.expect("a row")["coded_keys"], 144);

    capture(&energies_of_other(&folder), &other, "40", "0");
    calibrate("gtq-blocks", &order, &other);
    refused(&["diagnose", &cache, "--kv", &files[0]], &["order", "model_hash"]);
    let from = format!("block-gtq/from={}", energies_of_other(&folder));
    refused(&["diagnose", &cache, "--kv", &from], &["energies of another", "model_hash"]);
}

fn energies_of_other(folder: &Folder) -> String {
    folder.text("energies of another")
}

#[test]
fn what_cannot_be_diagnosed_is_refused() {
    let folder = Folder::new();
    let kv = |list: &str, words: &[&str]| refused(&["diagnose", SAMPLE, "--kv", list], words);
    kv("gtqq", &["there is no KV scheme 'gtqq'", "kivi-scale", "vecinfer"]);
    kv("dense", &["dense does not say what its keys and values are restored to", "ferrokv attend"]);
    kv("gtq,gather", &["gather does not say"]);
    kv("certified", &["certified does not say"]);
    kv("vecinfer", &["ferrokv calibrate --scheme vecinfer", "vecinfer/codes=FILE"]);
    kv("block-gtq", &["ferrokv capture", "block-gtq/from=FILE"]);
    kv("kivi-paper/residual=40", &["kivi-paper/residual=40 is no multiple of its group of 32"]);
    kv("kivi/residual=40", &["a residual of 40 tokens is no multiple of the group of 32"]);
    refused(&["diagnose", SAMPLE, "--layers", "3"], &["has no layer 3", "0, 7, 15, 22, 29"]);
    refused(&["diagnose", SAMPLE, "--queries", "65"], &["layer.00 has queries of 64 tokens"]);
    refused(&["diagnose", &folder.text("nothing.safetensors")], &["nothing.safetensors"]);

    // 40 tokens of two KV heads, 3 query tokens.
    let half: Vec<u8> =
        (0..40 * 2 * 64).flat_map(|i| f16::from_f32((i as f32).sin()).to_le_bytes()).collect();
    let cache = |name: &str, dtype: Dtype, dim: usize, metadata: &[(&str, &str)]| {
        let tensor = |tokens: usize| (dtype, vec![tokens, 2, dim], &half[..tokens * 2 * dim * 2]);
        let parts =
            [("layer.03.key", tensor(40)), ("layer.03.value", tensor(40)), ("layer.03.query", tensor(3))];
        let parts: Vec<_> =
            parts.iter().map(|(name, (dtype, shape, data))| (*name, *dtype, &shape[..], *data)).collect();
        folder.tensors_with(name, &parts, Some(metadata))
    };
    let kv = |path: &str, list: &str, words: &[&str]| {
        refused(&["diagnose", path, "--kv", list, "--queries", "2"], words);
    };
    let whole = cache("whole", Dtype::F16, 64, &[]);
    let out = succeed(&["diagnose", &whole, "--kv", "gtq", "--queries", "2"]);
    assert!(out.contains("the file does not say how RoPE turns its keys"), "{out}");
    kv(&whole, "gtq-blocks/order=order.safetensors", &["does not say how many layers", "ferrokv capture"]);
    kv(&cache("narrow", Dtype::F16, 32, &[]), "gtq", &["gtq has no kernels for head_dim 32"]);
    kv(&cache("bf16", Dtype::BF16, 64, &[]), "gtq", &["layer.03 of", "BF16"]);
    let rope = [("rope_pairing", "crossed"), ("rope_channels", "64"), ("rope_frequencies", "1")];
    kv(&cache("rope", Dtype::F16, 64, &rope), "gtq", &["rope_pairing = 'crossed'", "half-split"]);
    let rope = [("rope_pairing", "half-split"), rope[1], rope[2]];
    kv(&cache("short", Dtype::F16, 64, &rope), "gtq", &["rope_frequencies = '1'", "each pair"]);
    kv(&cache("layers", Dtype::F16, 64, &[("layers", "many")]), "gtq", &["layers = 'many'", "no number"]);
}
