//! Rows over a small model of random weights. No figure of time is asserted: figures are the machine's.

use super::made_up::Files;
use super::{Arguments, Chosen, Of, Subject, beside_dense, choose, made_up, prompt, step, wanted};
use crate::cli::bench::testing::{parse, refusal};
use crate::cli::scheme;
use host::Device;
use host::model::config::Architecture;
use host::model::forward::Runner;
use host::model::synthetic::{self, Packing};
use simt::emu::EmuOptions;

fn subject() -> Subject {
    let device = Device::cpu(EmuOptions::default());
    let model = synthetic::model(synthetic::tiny(Architecture::Llama), Packing::Q8_0, 1).expect("a model");
    Subject {
        runner: Runner::new(&model, &device).expect("a runner"),
        device,
        name: model.config.name.clone(),
        fingerprint: model.fingerprint(),
        vocab: model.config.vocab as u32,
    }
}

fn arguments(line: &[&str]) -> Arguments {
    parse(line).expect("arguments")
}

fn chosen(text: &str, files: &mut Files, subject: &Subject) -> Chosen {
    let arguments = arguments(&["--synthetic", "llama-3.1-8b"]);
    choose(&scheme::one(text).expect("a scheme"), files, subject, &arguments).expect("its file")
}

#[test]
fn contexts_have_defaults_unless_prompts_are_wanted() {
    let steps = |line: &[&str]| -> Vec<(u32, Option<u32>)> {
        let of = |(length, of)| match of {
            Of::Prompt => (length, None),
            Of::Steps(batch) => (length, Some(batch)),
        };
        wanted(&arguments(line)).into_iter().map(of).collect()
    };
    assert_eq!(steps(&[]), [(1024, Some(1)), (4096, Some(1))]);
    assert_eq!(steps(&["--prompt", "8K"]), [(8192, None)]);
    assert_eq!(
        steps(&["--prompt", "300,8K", "--contexts", "1K", "--batches", "1,4"]),
        [(1024, Some(1)), (1024, Some(4)), (300, None), (8192, None)]
    );
    assert!(refusal::<Arguments>(&["--prompt", "0"]).contains("no number from 1"));
}

/// A scheme that needs codebooks runs over a model of random weights, and what it says is that they are made
/// up; the cache holds them against the model.
#[test]
fn a_file_is_made_up_once_and_is_the_models() {
    let (mut subject, mut files) = (subject(), Files::default());
    let dense = chosen("dense", &mut files, &subject);
    assert!(dense.made_up.is_none() && files.made().count() == 0);
    let codes = chosen("vecinfer", &mut files, &subject);
    let fewer = chosen("vecinfer/recent=32", &mut files, &subject);
    let finer = chosen("vecinfer/k=d2b8/v=d2b8", &mut files, &subject);
    assert_eq!((&*codes.name, &*fewer.name), ("vecinfer", "vecinfer/recent=32"));
    assert_eq!([codes.made_up, fewer.made_up, finer.made_up], [Some("codes"); 3]);
    let settings: Vec<&str> = files.made().map(|made| &*made.settings).collect();
    assert_eq!(settings, ["vecinfer", "vecinfer/k=d2b8/v=d2b8"], "one file serves both windows");
    let lines = made_up::lines(files.made());
    assert!(
        lines.starts_with("made up: codes of vecinfer, from random keys and values of 256 tokens"),
        "{lines}"
    );

    let arguments = arguments(&["--steps", "2"]);
    let mut rows = Vec::new();
    for scheme in [&dense, &codes, &fewer, &finer] {
        rows.push(step::measure(&mut subject, scheme, (512, 2), None, &arguments).expect("a row"));
    }
    beside_dense(&mut rows, &mut []);
    assert!(rows.iter().all(|row| row.times_dense.is_some() && row.steps == 2));
    // Two layers, two KV heads of 64, two sequences of 512 tokens.
    let f16 = 2 * 2 * 2 * 512 * 256;
    assert!(rows.iter().all(|row| row.memory.cache_f16_bytes == f16), "{rows:?}");
    assert_eq!((rows[0].memory.cache_of_f16, rows[0].memory.cache_prompt_bytes), (1.0, None));
    let codes_of = |row: usize| rows[row].memory;
    assert!(codes_of(2).cache_bytes < codes_of(1).cache_bytes, "a shorter window");
    // Of one sequence the room of prompts is given back; where others may join it stays.
    let one = step::measure(&mut subject, &codes, (512, 1), None, &arguments).expect("a row").memory;
    assert!(one.cache_prompt_bytes > Some(one.cache_bytes) && codes_of(1).cache_prompt_bytes.is_none());
    assert!(2 * one.cache_bytes < codes_of(1).cache_bytes);
    let json = serde_json::to_value(&rows[1]).expect("a row");
    assert_eq!((&json["kv"], &json["made_up"]), (&"vecinfer".into(), &"codes".into()));
    assert_eq!(json["cache_f16_bytes"], f16);
    assert!(step::table(&rows).contains("of f16") && step::table(&[]).is_empty());

    // Of another model the file is refused.
    subject.fingerprint = "0123456789abcdef".into();
    let error =
        step::measure(&mut subject, &codes, (512, 1), None, &arguments).expect_err("refused").to_string();
    assert!(error.contains("model_hash"), "{error}");
}

#[test]
fn a_prompt_has_a_row_a_scheme() {
    let (mut subject, mut files) = (subject(), Files::default());
    let mut rows = Vec::new();
    for text in ["dense", "vecinfer", "int8-int4"] {
        let scheme = chosen(text, &mut files, &subject);
        rows.push(prompt::measure(&mut subject, &scheme, 150).expect("a row"));
    }
    beside_dense(&mut [], &mut rows);
    assert_eq!(rows[0].times_dense, Some(1.0));
    for row in &rows {
        assert!(row.median_us > 0.0 && row.tokens_per_second > 0.0, "{row:?}");
        assert_eq!((row.tokens, row.repetitions, row.chunk), (150, 1, 64));
        assert!(row.times_dense.is_some());
    }
    assert_eq!(rows[0].memory.cache_f16_bytes, 2 * 2 * 150 * 256);
    let table = prompt::table(&rows);
    assert!(table.contains("chunks of up to 64") && table.lines().count() == 6, "{table}");
    let scheme = chosen("dense", &mut files, &subject);
    let error = prompt::measure(&mut subject, &scheme, 513).expect_err("too long").to_string();
    assert!(error.contains("512"), "{error}");
}
