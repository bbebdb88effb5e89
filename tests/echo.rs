//! `echo`, the system that `docs/adding-a-system.md` adds: its rounding, and that two folders and one line
//! are all that every command needs.

mod common;

use common::{Folder, SAMPLE, ferrokv, json, refused, succeed, text, words};
use ferrokv::host::model::config::Architecture;
use ferrokv::host::model::synthetic::{self, Packing};
use ferrokv::kernels_gpu::echo::{MOST_DROPPED, THREADS, round, rounded};
use ferrokv::simt::LaunchShape;
use half::f16;
use serde_json::Value;
use simt_test::{Trial, array, bits, sizes};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Of all numbers with the mantissa's last bits zero the nearest one, of two the one whose last bit is even.
fn nearest(x: f16, candidates: &[f16]) -> f16 {
    let distance = |candidate: &f16| (candidate.to_f64() - x.to_f64()).abs();
    let least = candidates.iter().map(distance).fold(f64::INFINITY, f64::min);
    let mut ties = candidates.iter().filter(|candidate| distance(candidate) == least);
    let first = *ties.next().expect("a candidate");
    match ties.next() {
        None => first,
        // Neighbours differ by one unit of the last place that is kept.
        Some(second) => {
            let unit = 1 << (first.to_bits() ^ second.to_bits()).trailing_zeros();
            if first.to_bits() & unit == 0 { first } else { *second }
        }
    }
}

#[test]
fn every_number_is_rounded_to_the_nearest() {
    for dropped in 0..=MOST_DROPPED {
        let unit = 1u16 << dropped;
        let finite = |bits: u16| f16::from_bits(bits).is_finite();
        for bits in 0..=u16::MAX {
            let x = f16::from_bits(bits);
            let found = rounded(x, dropped);
            if !x.is_finite() {
                assert_eq!(found.to_bits(), bits, "infinities and NaN stay");
                continue;
            }
            // The multiples of a unit around it, of its sign.
            let below = bits & !(unit - 1);
            let around: Vec<f16> = [Some(below), below.checked_add(unit)]
                .into_iter()
                .flatten()
                .filter(|other| finite(*other) && (other ^ bits) & 0x8000 == 0)
                .map(f16::from_bits)
                .collect();
            let expected = nearest(x, &around);
            assert_eq!(
                found.to_bits(),
                expected.to_bits(),
                "{x} less {dropped} bits: {found}, not {expected}"
            );
            // The bound that the kernel's file states, for numbers with a full mantissa.
            if bits & 0x7c00 != 0 && x.to_f32().abs() <= f16::from_bits(0x7c00 - unit).to_f32() {
                let error = (found.to_f64() - x.to_f64()).abs();
                assert!(error <= x.to_f64().abs() * 2f64.powi(dropped as i32 - 11), "{x}: {error}");
            }
        }
    }
}

/// The same in f64: to the nearest multiple of the last place that is left.
fn exactly_rounded(x: f16, dropped: u32) -> f16 {
    let value = f64::from(x);
    if !value.is_finite() || value == 0.0 {
        return x;
    }
    // The exponent of a number; subnormal ones have that of the smallest normal one.
    let exponent = (value.abs().log2().floor() as i32).max(-14);
    let place = 2f64.powi(exponent - 10 + dropped as i32);
    // The largest number of the precision: all bits of the mantissa that are left.
    let largest = 2f64.powi(16) - 2f64.powi(15 - 10 + dropped as i32);
    let nearest = (value / place).round_ties_even() * place;
    f16::from_f64(nearest.clamp(-largest, largest).copysign(value))
}

#[simt::test(ptx = ferrokv::ptx())]
fn keys_and_values_are_rounded(
    #[draw(sizes(1..=600))] count: usize,
    #[draw(array(count, bits::<f16>()))] keys: Vec<f16>,
    #[draw(array(count, bits::<f16>()))] values: Vec<f16>,
    #[draw(0..=MOST_DROPPED)] dropped: u32,
) -> Trial {
    let each = |x: &[f16]| x.iter().map(|x| exactly_rounded(*x, dropped)).collect::<Vec<_>>();
    let (rounded_keys, rounded_values) = (each(&keys), each(&values));
    let shape = LaunchShape::new((count as u32).div_ceil(THREADS), THREADS);
    Trial::new(round::kernel(), shape, move |memory| round::Args {
        keys: memory.input(&keys),
        values: memory.input(&values),
        rounded_keys: memory.output(&rounded_keys),
        rounded_values: memory.output(&rounded_values),
        count: count as u32,
        dropped,
    })
}

/// The sample's errors grow with the bits that are dropped; without any, attention is exact but for rounding.
#[test]
fn fewer_bits_are_further_off() {
    let relative_errors = |scheme: &str| -> Vec<f64> {
        let line = ["attend", SAMPLE, "--layers", "7", "--queries", "1", "--kv", scheme, "--json"];
        let report: Value = serde_json::from_str(&succeed(&line)).expect("JSON");
        let rows = report["layers"][0]["rows"].as_array().expect("rows").clone();
        let number = |row: &Value, what: &str| row[what].as_f64().expect("a number");
        rows.iter().map(|row| number(row, "error") / number(row, "output_norm")).collect()
    };
    let [whole, twelve, nine] = ["echo/bits=16", "echo", "echo/bits=9"].map(relative_errors);
    for ((whole, twelve), nine) in whole.iter().zip(&twelve).zip(&nine) {
        assert!(*whole < 1e-6 && 100.0 * whole < *twelve, "nothing is dropped: {whole} {twelve}");
        assert!(2.0 * twelve < *nine && *nine < 1.0, "{twelve} {nine}");
    }
}

/// Help, listings, checks, proofs and benchmarks know it from the registry alone.
#[test]
fn every_command_knows_it() {
    let folder = Folder::new();
    let model = synthetic::model(synthetic::tiny(Architecture::Llama), Packing::Q4_1, 1).expect("a model");
    fs::write(folder.path("tiny.gguf"), synthetic::file(&model).to_bytes()).expect("written");
    let (model, report) = (folder.text("tiny.gguf"), folder.text("report.json"));
    for command in [
        &["generate"][..],
        &["compare"],
        &["capture"],
        &["attend"],
        &["prove"],
        &["eval", "ppl"],
        &["eval", "niah"],
        &["bench", "attention"],
        &["bench", "model"],
    ] {
        let help = succeed(&[command, &["--help"]].concat());
        assert!(help.contains("echo") && help.contains("/bits="), "{command:?}: {help}");
    }
    let listed = succeed(&["kernels", "--system", "echo", "--backend", "cpu", "--json", &report]);
    assert!(listed.contains("echo_round") && listed.contains("/bits="), "{listed}");
    let schemes = json(&report)["schemes"].clone();
    assert_eq!((&schemes[0]["name"], &schemes[0]["options"][0]["name"]), (&"echo".into(), &"bits".into()));
    assert!(succeed(&["check", "--system", "echo", "--backend", "cpu"]).contains("no fault"));

    let line = ["--kv", "dense,echo/bits=10", "--backend", "cpu", "--json", &report];
    let bench = ["bench", "attention", "--shapes", "4/2/64", "--batches", "2", "--contexts", "70"];
    succeed(&[&bench[..], &["--seconds-per-row", "0"], &line].concat());
    let rows = json(&report)["rows"].as_array().expect("rows").clone();
    let row = rows.iter().find(|row| row["scheme"] == "echo/bits=10").expect("its row");
    assert!(row["verified"].is_null() && row["relative_error"][0].as_f64() > Some(1e-4), "{row}");

    let options = ["--model", &model, "--contexts", "64", "--steps", "3"];
    succeed(&[&["bench", "model"][..], &options, &line].concat());
    assert_eq!(json(&report)["rows"][1]["kv"], "echo/bits=10");

    let generate = ["generate", "tok", "--model", &model, "--max-tokens", "3", "--backend", "cpu"];
    let output = ferrokv(&[&generate[..], &["--kv", "echo", "--json", &report]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_eq!(json(&report)["kv"], "echo");

    let words = words(&folder, 500);
    let perplexity =
        ["eval", "ppl", "--model", &model, "--text", &words, "--context", "32", "--windows", "2"];
    succeed(&[&perplexity[..], &["--fresh"], &line].concat());
    let rows = json(&report)["summary"]["rows"].clone();
    let number = |row: usize, what: &str| rows[row][what].as_f64().expect("a number");
    assert_eq!((&rows[0]["kv"], &rows[1]["kv"]), (&"dense".into(), &"echo/bits=10".into()));
    assert!(
        number(0, "delta") == 0.0 && number(1, "delta") != 0.0 && number(1, "delta").abs() < 0.2,
        "{rows}"
    );

    let proof =
        ["prove", "--kv", "dense,echo", "--head-steps", "100", "--max-tokens", "64", "--long-tokens", "64"];
    succeed(&[&proof[..], &["--backend", "cpu", "--json", &report]].concat());
    let schemes = json(&report)["schemes"].clone();
    let total = |of: usize, what: &str| schemes[of]["total"][what].as_u64().expect("a count");
    assert!(total(0, "bounded") == total(0, "head_steps") && total(0, "violations") == 0, "{schemes}");
    assert!(total(1, "bounded") == 0 && total(1, "head_steps") >= 100, "it promises nothing: {schemes}");
}

/// Two folders, their `pub mod` lines, and one line of `SYSTEMS`: no other source names it.
#[test]
fn two_folders_and_one_line_are_all_of_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut named = Vec::new();
    let mut folders = ["src", "host", "kernels-gpu", "crates", "tests", "benches", "examples"]
        .map(|name| root.join(name))
        .to_vec();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let lines = fs::read_to_string(&path).expect("text");
                let words = |line: &str| {
                    ["echo::", "mod echo", "`echo`", "\"echo\"", "\"echo/"]
                        .iter()
                        .any(|name| line.contains(name))
                };
                let path = path.strip_prefix(root).expect("below it").display().to_string();
                named.extend(
                    lines
                        .lines()
                        .filter(|line| words(line))
                        .map(|line| (path.clone(), line.trim().to_owned())),
                );
            }
        }
    }
    let of_its_own = |path: &str| {
        ["host/src/echo/", "kernels-gpu/src/echo/", "tests/echo.rs"].iter().any(|own| path.starts_with(own))
    };
    named.retain(|(path, _)| !of_its_own(path));
    named.sort();
    let expected = [
        ("host/src/lib.rs", "&echo::SYSTEM,"),
        ("host/src/lib.rs", "pub mod echo;"),
        ("kernels-gpu/src/lib.rs", "//! | [`echo`] | f16 with fewer bits: the guide's example of a system |"),
        ("kernels-gpu/src/lib.rs", "pub mod echo;"),
    ];
    assert_eq!(named, expected.map(|(path, line)| (path.to_owned(), line.to_owned())));
}

#[test]
fn golden_bits_are_written_compared_and_missed() {
    let folder = Folder::new();
    let (golden, nowhere) = (folder.text(""), folder.text("nowhere"));
    let check = ["check", "--orders", "0", "--system", "echo"];
    let with = |option, folder| [&check[..], &[option, folder]].concat();
    succeed(&with("--write-golden", &golden));
    assert_eq!(folder.names(), BTreeSet::from(["echo.txt".to_owned()]));
    assert!(succeed(&with("--golden", &golden)).contains("no fault"));

    // Another digest of one case, a case that there is not, and one that has none.
    let path = folder.path("echo.txt");
    let kept = fs::read_to_string(&path).unwrap();
    let (digest, _) = kept.lines().find(|line| !line.starts_with('#')).unwrap().split_once(' ').unwrap();
    let failed = |contents: &str| {
        fs::write(&path, contents).unwrap();
        let output = ferrokv(&with("--golden", &golden));
        assert_eq!(output.status.code(), Some(1));
        (text(&output.stdout), text(&output.stderr))
    };
    let (said, error) = failed(&kept.replacen(digest, "0123456789abcdef", 1));
    assert!(said.contains("ALTERED") && said.contains("0123456789abcdef"), "{said}");
    assert!(error.contains("1 have other bits"), "{error}");
    let (_, error) = failed(&format!("{kept}0123456789abcdef  echo_round  elements=7\n"));
    assert!(error.contains("1 case") && error.contains("elements=7"), "{error}");
    let (said, _) = failed(&kept.lines().take(2).collect::<Vec<_>>().join("\n"));
    assert!(said.contains("there are no golden bits"), "{said}");

    refused(&with("--golden", &nowhere), &["echo.txt", "--write-golden"]);
    refused(&with("--write-golden", &nowhere), &["nowhere is no folder"]);
    let output = ferrokv(&["check", "--system", "echo", "--golden", &golden]);
    assert_eq!(output.status.code(), Some(2));
}
