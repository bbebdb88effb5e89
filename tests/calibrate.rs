//! `ferrokv calibrate` with a tiny model of random weights: what it writes, what it does not write over, and
//! that what it wrote is read.

mod common;

use common::{Folder, json, refused, succeed, words};
use ferrokv::host::model::config::Architecture;
use ferrokv::host::model::synthetic::{self, Packing};
use std::fs;

#[test]
fn a_file_is_made_of_a_run_and_serves_it() {
    let folder = Folder::new();
    let model = synthetic::model(synthetic::tiny(Architecture::Llama), Packing::Q4_1, 1).expect("a model");
    fs::write(folder.path("tiny.gguf"), synthetic::file(&model).to_bytes()).expect("written");
    let (model, text) = (folder.text("tiny.gguf"), words(&folder, 4000));
    let (one, two, report) = (folder.text("one"), folder.text("two"), folder.text("report.json"));
    let run = ["--model", &model, "--text", &text, "--windows", "4", "--tokens", "128", "--backend", "cpu"];
    let calibrate = |scheme: &str, more: &[&str]| -> Vec<String> {
        let line = [&["calibrate", "--scheme", scheme][..], &run, more].concat();
        line.into_iter().map(String::from).collect()
    };
    fn of(line: &[String]) -> Vec<&str> {
        line.iter().map(String::as_str).collect()
    }
    let out = succeed(&of(&calibrate("vecinfer/seed=3", &["-o", &one, "--json", &report])));
    assert!(out.contains("vecinfer/seed=3") && out.contains("books_hash"), "{out}");
    let said = &json(&report)["metadata"];
    assert_eq!((&said["scheme"], &said["keys"]), (&"vecinfer".into(), &"d4b8".into()));
    assert_eq!((&said["layers"], &said["tokens"]), (&"2".into(), &"512".into()));
    succeed(&of(&calibrate("vecinfer/seed=3", &["-o", &two])));
    assert!(fs::read(&one).expect("read") == fs::read(&two).expect("read"), "the same bytes");

    // What is there stays, and neither what is read nor the model is written over.
    let before = fs::read(&text).expect("read");
    refused(&of(&calibrate("vecinfer", &["-o", &one])), &["one", "--force"]);
    refused(&of(&calibrate("vecinfer", &["-o", &text, "--force"])), &["words.txt"]);
    refused(&of(&calibrate("vecinfer", &["-o", &model, "--force"])), &["tiny.gguf"]);
    refused(&of(&calibrate("vecinfer/k=d2b8/v=d4b10", &["-o", &two, "--force"])), &["d2b8 with d2b8"]);
    refused(&of(&calibrate("dense", &["-o", &two, "--force"])), &["needs no calibration"]);
    assert!(fs::read(&text).expect("read") == before && fs::read(&one).expect("read").len() > 4096);

    // Another model of the same sizes refuses it.
    let other = synthetic::model(synthetic::tiny(Architecture::Llama), Packing::Q4_1, 2).expect("a model");
    fs::write(folder.path("other.gguf"), synthetic::file(&other).to_bytes()).expect("written");
    let (other, codes) = (folder.text("other.gguf"), format!("vecinfer/codes={one}"));
    let generate = ["generate", "tok", "--model", &other, "--max-tokens", "2", "--backend", "cpu"];
    refused(&[&generate[..], &["--kv", &codes]].concat(), &["one", "model_hash"]);

    // A model's text and a layer's step read it.
    let kv = format!("vecinfer/recent=16/codes={one}");
    succeed(&["generate", "tok", "--model", &model, "--max-tokens", "20", "--kv", &kv, "--backend", "cpu"]);
    // A codebook for each KV head, of values that are whole.
    let heads = folder.text("heads");
    let scheme = "vecinfer/k=d4b10/v=d4b10";
    succeed(&of(&calibrate(&format!("{scheme}/books=head"), &["-o", &heads])));
    let by_head = format!("{scheme}/recent=16/codes={heads}");
    let generate = ["generate", "tok", "--model", &model, "--max-tokens", "20", "--backend", "cpu"];
    succeed(&[&generate[..], &["--kv", &by_head]].concat());
    let captured = folder.text("kv.safetensors");
    let capture = ["--tokens", "96", "--layers", "0,1", "--text", &text, "--backend", "cpu"];
    succeed(&[&["capture", "-o", &captured, "--model", &model][..], &capture].concat());
    let attend = ["attend", &captured, "--kv", &kv, "--backend", "cpu", "--layers", "1"];
    let out = succeed(&attend);
    assert!(out.contains("of layer 1 in the file"), "{out}");
}

/// A picture beside the file: written whole or not at all, and refused where there is none or where it would
/// take the place of something else.
#[test]
fn what_a_calibration_decides_is_drawn() {
    let folder = Folder::new();
    let model = synthetic::model(synthetic::tiny(Architecture::Llama), Packing::Q4_1, 1).expect("a model");
    fs::write(folder.path("tiny.gguf"), synthetic::file(&model).to_bytes()).expect("written");
    let (model, text) = (folder.text("tiny.gguf"), words(&folder, 4000));
    let (order, picture) = (folder.text("order"), folder.text("order.svg"));
    let run = ["--model", &model, "--text", &text, "--windows", "2", "--tokens", "64", "--backend", "cpu"];
    let of = |scheme: &'static str, plot: &'static str| -> Vec<String> {
        let plot = folder.text(plot);
        let line = [&["calibrate", "--scheme", scheme, "-o", &order, "--force", "--plot", &plot][..], &run];
        line.concat().into_iter().map(String::from).collect()
    };
    let refused_for = |scheme, plot, words: &[&str]| {
        let line = of(scheme, plot);
        refused(&line.iter().map(String::as_str).collect::<Vec<_>>(), words);
    };
    refused_for("vecinfer", "order.svg", &["vecinfer", "no picture"]);
    refused_for("gtq-blocks", "order.gif", &["order.gif", ".svg or .png"]);
    refused_for("gtq-blocks", "nowhere/order.svg", &["nowhere"]);
    // The picture would take the file's place, or the report's, by another way to write the same path.
    let other_way = folder.text("order.svg").replace("/order.svg", "/./order.svg");
    for (at, report) in [(picture.as_str(), "report.json"), (order.as_str(), picture.as_str())] {
        let line =
            [&["calibrate", "--scheme", "gtq-blocks", "-o", at, "--plot", &other_way][..], &run].concat();
        refused(&[&line[..], &["--json", report]].concat(), &["order.svg"]);
    }
    assert!(!folder.path("order").exists() && !folder.path("order.svg").exists(), "nothing is written");
    let words = of("gtq-blocks", "order.svg");
    succeed(&words.iter().map(String::as_str).collect::<Vec<_>>());
    let svg = fs::read_to_string(&picture).expect("a picture");
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{svg}");
    for word in ["gtq-blocks", "part 1: 6 bits", "part 4: 1 bit of 3", "rotary block"] {
        assert!(svg.contains(word), "{word}: {svg}");
    }
    // No file that was begun is left.
    let names: Vec<String> = folder.names().into_iter().collect();
    assert_eq!(names, ["order", "order.svg", "tiny.gguf", "words.txt"]);
}
