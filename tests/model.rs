//! `ferrokv model`: what it shows of small files, and how it refuses what is no model.

mod common;

use common::{Folder, json, refused, succeed};
use ferrokv::host::model::config::Architecture;
use ferrokv::host::model::gguf::Value;
use ferrokv::host::model::gguf::write::Writer;
use ferrokv::host::model::synthetic::{self, Packing};
use std::fs;

fn tiny(architecture: Architecture) -> Writer {
    synthetic::file(&synthetic::model(synthetic::tiny(architecture), Packing::Q4_1, 1).expect("a model"))
}

fn write(folder: &Folder, name: &str, writer: &Writer) -> String {
    fs::write(folder.path(name), writer.to_bytes()).expect("written");
    folder.text(name)
}

#[test]
fn a_file_is_shown_with_its_bytes() {
    let folder = Folder::new();
    let path = write(&folder, "tiny.gguf", &tiny(Architecture::Qwen2));
    let report = folder.text("report.json");
    let out = succeed(&["model", &path, "--json", &report]);
    for expected in [
        "4 query, 2 KV, of 64 channels",
        "half-split of 64 channels",
        // 2 layers of 2 · 2 · 64 values, 2 bytes each.
        "1,024 bytes a token (512 values in 2 layers), 512.0 KiB at 512 tokens",
        "tokenizer.ggml.tokens",
        "320 elements",
    ] {
        assert!(out.contains(expected), "'{expected}' is not in: {out}");
    }
    let report = json(&report);
    assert_eq!((&report["command"], &report["config"]["qkv_bias"]), (&"model".into(), &true.into()));
    assert_eq!((&report["kv_f16_bytes_per_token"], &report["tokenizer_vocab"]), (&1024.into(), &320.into()));
    assert_eq!(report["metadata"]["tokenizer.ggml.tokens"]["length"], 320);
    assert!(report.get("tokens").is_none());
    // Types and tensors are two views of the same bytes.
    let sum = |rows: &str| -> u64 {
        report[rows].as_array().expect("rows").iter().map(|row| row["bytes"].as_u64().expect("bytes")).sum()
    };
    assert_eq!(sum("types"), sum("tensors"));
    let types = report["types"].as_array().expect("types");
    let q4_1 = types.iter().find(|row| row["tensor_type"] == "Q4_1").expect("Q4_1");
    assert_eq!(q4_1["bytes"].as_u64(), q4_1["values"].as_u64().map(|values| values / 32 * 20));
}

#[test]
fn texts_are_tokenized() {
    let folder = Folder::new();
    let path = write(&folder, "tiny.gguf", &tiny(Architecture::Llama));
    let report = folder.text("tokens.json");
    let out = succeed(&["model", &path, "--tokenize", "the é<|im_end|>", "--json", &report]);
    assert!(out.contains("(part of a character)") && out.contains("15 tokens"), "{out}");
    assert!(!out.contains("(control)"), "{out}");
    let tokens = &json(&report)["tokens"];
    assert_eq!((&tokens[0]["piece"], &tokens[1]["text"]), (&"t".into(), &"he".into()));
    assert_eq!((&tokens[2]["piece"], &tokens[2]["text"]), (&"Ġ".into(), &" ".into()));
    assert!(tokens[3]["text"].is_null() && tokens[3]["control"] == false);
    let out = succeed(&["model", &path, "--tokenize", "<|im_end|>", "--special"]);
    assert!(out.contains("(control)") && out.contains("1 token\n"), "{out}");
    assert!(succeed(&["model", &path, "--tokenize", ""]).contains("0 tokens"));
}

#[test]
fn what_is_no_model_is_refused_by_name() {
    let folder = Folder::new();
    let whole = tiny(Architecture::Llama).to_bytes();
    let path = folder.text("cut.gguf");
    fs::write(&path, &whole[..whole.len() - 1]).expect("written");
    refused(&["model", &path], &["cut.gguf", "cut short"]);
    fs::write(&path, b"plain text").expect("written");
    refused(&["model", &path], &["cut.gguf", "not with 'GGUF'"]);
    refused(&["model", &folder.text("none.gguf")], &["none.gguf", "./setup --model"]);
    let mut writer = tiny(Architecture::Llama);
    let path = write(&folder, "rwkv.gguf", writer.set("general.architecture", Value::String("rwkv".into())));
    refused(&["model", &path], &["'rwkv'", "llama and qwen2"]);
    let mut writer = tiny(Architecture::Llama);
    let path = write(&folder, "none.gguf", writer.unset("tokenizer.ggml.model"));
    refused(&["model", &path, "--tokenize", "a"], &["has no tokenizer"]);
    succeed(&["model", &path]);
}
