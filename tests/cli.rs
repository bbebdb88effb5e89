//! The command as people meet it: what it says, what it writes, and how it refuses.

mod common;

use common::{Folder, SAMPLE, Tensor, ferrokv, json, refused, succeed, text};
use ferrokv::host::int8::{Matrix, cpu};
use half::f16;
use safetensors::tensor::Dtype;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

#[test]
fn the_sample_is_quantized_and_every_bit_agrees() {
    let folder = Folder::new();
    let path = folder.text("report.json");
    let out = succeed(&["quantize", SAMPLE, "--json", &path]);
    for word in
        ["layer.29.key", "layer.00.value", "vectorized", "block16", "= emulator", "values agree", "1.98x"]
    {
        assert!(out.contains(word), "'{word}' is not in: {out}");
    }
    assert!(!out.contains("DIFFER"), "{out}");
    let report = json(&path);
    assert_eq!(report["values_differing"], 0);
    // 10 tensors × 7 variants, codes and restored values of 98304 elements each, and their scales.
    let scales = 10 * (6 * 192 + 32 * 192);
    assert_eq!(report["values_compared"], 10 * 7 * 2 * 98304 + scales);
    let tensors = report["tensors"].as_array().expect("tensors");
    assert_eq!(tensors.len(), 10);
    for tensor in tensors {
        assert_eq!(tensor["bytes_before"], 196_608);
        let rows = tensor["rows"].as_array().expect("rows");
        assert_eq!(rows.len(), 9, "seven variants and two SIMD paths");
        for row in rows {
            let ratio = row["bound_ratio"].as_f64().expect("a ratio");
            assert!(ratio > 0.5 && ratio <= 1.0, "{row}");
            assert!(row["runs"][0]["quantize"]["gb_per_s"].as_f64().expect("a rate") > 0.0, "{row}");
            let is_key = tensor["name"].as_str().expect("a name").ends_with(".key");
            assert_eq!(row["score_error"].as_f64().is_some_and(|error| error > 0.0), is_key, "{row}");
        }
    }
}

#[test]
fn a_round_trip_gives_what_memory_gives() {
    let folder = Folder::new();
    let bytes = fs::read(SAMPLE).expect("the sample");
    let source = safetensors::SafeTensors::deserialize(&bytes).expect("the sample");
    let metadata = |bytes: &[u8]| {
        let (_, header) = safetensors::SafeTensors::read_metadata(bytes).expect("a header");
        header.metadata().clone().expect("metadata")
    };
    let made_with = metadata(&bytes);
    let halves = |data: &[u8]| -> Vec<f16> {
        data.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]])).collect()
    };
    for (granularity, variant) in [("channel", "rows"), ("block", "fused")] {
        let (quantized, restored) =
            (folder.text(&format!("{granularity}.q")), folder.text(&format!("{granularity}.r")));
        succeed(&["quantize", SAMPLE, "-o", &quantized, "--granularity", granularity, "--variant", variant]);
        succeed(&["dequantize", &quantized, "-o", &restored]);
        let bytes = fs::read(&restored).expect("the restored file");
        let file = safetensors::SafeTensors::deserialize(&bytes).expect("the restored file");
        let names = |file: &safetensors::SafeTensors| -> BTreeSet<String> {
            file.names().into_iter().map(str::to_owned).collect()
        };
        assert_eq!(names(&file), names(&source));
        for (name, tensor) in source.tensors() {
            let back = file.tensor(&name).expect("the tensor");
            assert_eq!((back.dtype(), back.shape()), (tensor.dtype(), tensor.shape()), "{name}");
            if name.ends_with(".query") {
                assert_eq!(back.data(), tensor.data(), "{name}");
                continue;
            }
            let keys = halves(tensor.data());
            let matrix = Matrix::new(512, 192).expect("a matrix");
            let (mut codes, mut expected) = (vec![0i8; keys.len()], keys.clone());
            let mut scales = vec![0f32; if granularity == "channel" { 192 } else { 32 * 192 }];
            if granularity == "channel" {
                cpu::column_scales(&keys, matrix, &mut scales);
                cpu::quantize(&keys, matrix, &scales, &mut codes);
            } else {
                cpu::quantize_blocks(&keys, matrix, &mut scales, &mut codes);
            }
            cpu::dequantize(&codes, matrix, &scales, &mut expected);
            let bits = |values: &[f16]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&halves(back.data())), bits(&expected), "{name} by {granularity}");
        }
        let metadata = metadata(&bytes);
        assert_eq!(metadata["token_ids"], made_with["token_ids"]);
        assert!(metadata["ferrokv.restored"].starts_with("ferrokv-int8 1 "));
    }
    assert_eq!(folder.names().len(), 4, "nothing else is left: {:?}", folder.names());
}

#[test]
fn reports_parse_and_need_no_gpu() {
    let commands: [&[&str]; 4] = [
        &["doctor", "--json", "-"],
        &["kernels", "--system", "int8", "--json", "-"],
        &["check", "--filter", "int8_quantize_rows_f16", "--backend", "cpu", "--json", "-"],
        &["check", "--list", "--json", "-"],
    ];
    let reports = commands.map(|command| -> Value {
        serde_json::from_str(&succeed(command)).unwrap_or_else(|error| panic!("{command:?}: {error}"))
    });
    let [doctor, kernels, check, list] = reports;
    let whats: Vec<&Value> =
        doctor["findings"].as_array().expect("findings").iter().map(|f| &f["what"]).collect();
    for what in
        ["host toolchain", "device compiler", "embedded PTX", "CUDA driver", "GPU", "ptxas", "libNVVM", "CPU"]
    {
        assert!(whats.iter().any(|found| *found == what), "{what} is not in {whats:?}");
    }
    let driver =
        doctor["findings"].as_array().and_then(|all| all.iter().find(|f| f["what"] == "CUDA driver"));
    assert_eq!(
        driver.map(|finding| (&finding["ok"], finding["remedy"].is_string())),
        Some((&Value::Bool(false), true))
    );

    let names: Vec<&str> = kernels["kernels"]
        .as_array()
        .expect("kernels")
        .iter()
        .filter_map(|kernel| kernel["name"].as_str())
        .collect();
    assert!(names.contains(&"int8_quantize_fused_bf16"), "{names:?}");
    assert!(names.iter().all(|name| name.starts_with("int8_")), "{names:?}");

    assert_eq!((&check["passed"], &check["totals"]["differing_bits"]), (&Value::Bool(true), &Value::from(0)));
    assert!(check["totals"]["outputs"].as_u64().expect("a number") > 10_000);
    assert_eq!(check["totals"]["no_gpu"], check["totals"]["cases"]);
    assert!(check["times"].is_null());
    assert!(list.as_array().expect("a list").len() > 500);
}

#[test]
fn kernels_of_a_code_generator_that_is_not_there_are_refused_with_the_way_to_have_them() {
    refused(&["bench", "int8", "--codegen", "llvm,nvvm"], &["names one code generator", "ferrokv check"]);
    // A program that was built with both has nothing to refuse.
    let of_the_emulator = ferrokv(&["check", "--orders", "0", "--codegen", "llvm"]);
    assert_eq!(of_the_emulator.status.code(), Some(2));
    assert!(text(&of_the_emulator.stderr).contains("cannot be used with"));
    refused(&["check", "--codegen", "llvm,llvm"], &["--codegen llvm,llvm", "two different ones"]);
    refused(&["check", "--codegen", "llvm,nvvm,llvm"], &["--codegen llvm,nvvm,llvm", "two different ones"]);
    if ferrokv::generated().iter().all(|made| made.name != "nvvm" || made.images.is_empty()) {
        refused(&["check", "--codegen", "llvm,nvvm", "--backend", "cpu"], &["FERROKV_CODEGEN="]);
        refused(&["kernels", "--codegen", "nvvm"], &["code generator nvvm", "FERROKV_CODEGEN="]);
    }
}

#[test]
fn a_benchmark_out_of_time_reports_what_it_left_out() {
    let out = succeed(&[
        "bench",
        "int8",
        "--backend",
        "cpu",
        "--sizes",
        "8x4,64x64",
        "--seconds",
        "0",
        "--json",
        "-",
    ]);
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    let skipped = report["skipped"].as_array().unwrap();
    let left_out: Vec<&str> = skipped
        .iter()
        .filter(|row| row["reason"].as_str().unwrap().contains("0 seconds were over"))
        .map(|row| row["what"].as_str().unwrap())
        .collect();
    assert_eq!(left_out, ["64 × 64 f32", "8 × 4 f32"], "the largest would have been first");
}

#[test]
fn doctor_is_strict_only_when_asked() {
    succeed(&["doctor"]);
    let strict = ferrokv(&["doctor", "--strict"]);
    assert_eq!(strict.status.code(), Some(1));
    assert!(text(&strict.stderr).contains("missing"), "{}", text(&strict.stderr));
    assert!(text(&strict.stdout).contains("->"), "{}", text(&strict.stdout));
}

#[test]
fn help_names_units_examples_and_exit_codes() {
    let commands: [&[&str]; 12] = [
        &["quantize"],
        &["dequantize"],
        &["check"],
        &["doctor"],
        &["kernels"],
        &["bench"],
        &["bench", "int8"],
        &["bench", "launch"],
        &["bench", "schemes"],
        &["regime", "fit"],
        &["regime", "plot"],
        &["new"],
    ];
    for command in commands {
        let help = succeed(&[command, &["--help"]].concat());
        assert!(help.contains("Exit codes:"), "{help}");
        assert!(help.lines().count() > 15, "{help}");
    }
    assert!(succeed(&["--help"]).contains("Examples:"));
}

#[test]
fn a_new_crate_is_whole_or_not_there() {
    let folder = Folder::new();
    let crate_folder = folder.text("of-mine/my-kernels");
    let said = succeed(&["new", &crate_folder]);
    assert!(said.contains("cargo test"), "{said}");
    for file in ["Cargo.toml", "build.rs", "src/lib.rs", "src/host.rs", "src/main.rs", ".cargo/config.toml"] {
        assert!(folder.path("of-mine/my-kernels").join(file).is_file(), "{file}");
    }
    let manifest = fs::read_to_string(folder.path("of-mine/my-kernels/Cargo.toml")).expect("a manifest");
    assert!(manifest.contains("/crates/simt\""), "{manifest}");
    // Where there is something, with a name that is none, with a folder that has no crates.
    let (word, other) = (folder.text("of-mine/match"), folder.text("of-mine/other"));
    let nowhere = folder.text("of-mine");
    for (arguments, words) in [
        (vec!["new", &crate_folder], "is there already"),
        (vec!["new", &word], "is no name for a crate"),
        (vec!["new", &other, "--crates", &nowhere], "has no crates/simt/Cargo.toml"),
    ] {
        let refused = ferrokv(&arguments);
        assert_eq!(refused.status.code(), Some(2));
        assert!(text(&refused.stderr).contains(words), "{}", text(&refused.stderr));
    }
    assert_eq!(fs::read_dir(folder.path("of-mine")).expect("a folder").count(), 1);
    let versions = succeed(&["new", &other, "--crates", "registry"]);
    assert!(versions.contains("the registry"), "{versions}");
    let manifest = fs::read_to_string(folder.path("of-mine/other/Cargo.toml")).expect("a manifest");
    assert!(manifest.contains("version = \"=0.1.0\"") && !manifest.contains("path ="), "{manifest}");
}

#[test]
fn broken_files_are_refused() {
    let folder = Folder::new();
    let good = fs::read(SAMPLE).expect("the sample");
    let write = |name: &str, bytes: &[u8]| {
        fs::write(folder.path(name), bytes).expect("written");
        folder.text(name)
    };
    let truncated = write("truncated", &good[..good.len() / 2]);
    let header = write("header", &good[..100]);
    let garbage = write("garbage", &[0x20; 64]);
    let oversized = write("oversized", &[&u64::MAX.to_le_bytes(), good.get(8..100).expect("bytes")].concat());
    let empty = write("empty", &[]);
    for (path, words) in [
        (&truncated, ["cut off", "make or fetch it again"]),
        (&header, ["cut off", "header"]),
        (&garbage, ["exceeds", "header"]),
        (&oversized, ["exceeds", "header"]),
        (&empty, ["0 bytes", "not a valid safetensors file"]),
    ] {
        refused(&["quantize", path], &words);
        refused(&["dequantize", path, "-o", &folder.text("out")], &words);
    }
    refused(&["quantize", &folder.text("absent")], &["cannot open", "absent", "check the path"]);
    refused(&["quantize", &folder.text("")], &["cannot open", "directory"]);
    assert!(!folder.path("out").exists());
}

#[test]
fn unsuitable_tensors_are_refused_by_name() {
    let folder = Folder::new();
    let numbers = f32_bytes(&[1.0; 6]);
    let integers = folder.tensors("integers", &[("ids", Dtype::I32, &[2, 3], &numbers)]);
    refused(&["quantize", &integers], &["no tensor to quantize", "'ids'", "I32", "F32, F16 or BF16"]);
    refused(&["quantize", &integers, "--tensors", "ids"], &["'ids' cannot be quantized", "I32", "--tensors"]);
    let flat = folder.tensors("flat", &[("bias", Dtype::F32, &[6], &numbers)]);
    refused(&["quantize", &flat], &["no tensor to quantize", "'bias'", "rank 1"]);
    refused(&["quantize", &flat, "--tensors", "b*s"], &["'bias'", "rank 1", "two or more"]);
    let scalar = folder.tensors("scalar", &[("x", Dtype::F32, &[], &numbers[..4])]);
    refused(&["quantize", &scalar], &["'x'", "rank 0"]);
    let hollow =
        folder.tensors("hollow", &[("k", Dtype::F32, &[0, 3], &[]), ("m", Dtype::F32, &[2, 3], &numbers)]);
    refused(&["quantize", &hollow], &["'k'", "[0, 3]", "no element"]);
    succeed(&["quantize", &hollow, "--tensors", "m"]);
    refused(&["quantize", &hollow, "--tensors", "zzz"], &["no tensor", "'zzz'", "k, m"]);
    let none = folder.tensors("none", &[]);
    refused(&["quantize", &none], &["no tensor to quantize", "empty"]);
}

#[test]
fn values_that_are_not_finite_are_named_or_saturate() {
    let folder = Folder::new();
    let mut values = [1.0f32; 24];
    values[17] = f32::NAN;
    let nan = folder.tensors("nan", &[("a.key", Dtype::F32, &[2, 3, 4], &f32_bytes(&values))]);
    values[17] = f32::NEG_INFINITY;
    let infinite = folder.tensors("infinite", &[("a.key", Dtype::F32, &[2, 3, 4], &f32_bytes(&values))]);
    let out = folder.text("out");
    refused(&["quantize", &nan, "-o", &out], &["'a.key'", "NaN at [1, 1, 1]", "--allow-nonfinite"]);
    refused(&["quantize", &infinite, "-o", &out], &["'a.key'", "-inf at [1, 1, 1]"]);
    assert_eq!(folder.names().len(), 2, "nothing half-written: {:?}", folder.names());

    succeed(&["quantize", &nan, "-o", &out, "--allow-nonfinite"]);
    let back = folder.text("back");
    succeed(&["dequantize", &out, "-o", &back]);
    let bytes = fs::read(back).expect("the restored file");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("the restored file");
    let tensor = file.tensor("a.key").expect("the tensor");
    let restored: Vec<f32> =
        tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    for (at, x) in restored.into_iter().enumerate() {
        assert!(if at == 17 { x == 0.0 } else { (x - 1.0).abs() < 1e-6 }, "{at}: {x}");
    }
    succeed(&["quantize", &infinite, "--allow-nonfinite"]);
}

#[test]
fn outputs_are_not_put_where_they_should_not_be() {
    let folder = Folder::new();
    let input = folder.tensors("in", &[("m", Dtype::F32, &[2, 3], &f32_bytes(&[1.0; 6]))]);
    let uncompared = ["quantize", &input, "-o", &folder.text("uncompared"), "--variant", "fused"];
    refused(&uncompared, &["granularity channel", "--variant", "--granularity"]);
    let uncompared = [&uncompared[..4], &["--variant", "naive,rows", "--granularity", "block"]].concat();
    refused(&uncompared, &["granularity block16", "--variant", "--granularity"]);
    let taken = folder.text("taken");
    fs::write(&taken, "precious").expect("written");
    let original = fs::read(&input).expect("the input");

    refused(&["quantize", &input, "-o", &taken], &["taken exists", "--force"]);
    refused(&["quantize", &input, "-o", &input, "--force"], &["is the input"]);
    refused(&["quantize", &input, "-o", &folder.text("no/out")], &["cannot write to", "folder that exists"]);
    refused(&["quantize", &input, "-o", &folder.text(""), "--force"], &["not a regular file"]);
    refused(&["quantize", &input, "-o", "/dev/null", "--force"], &["/dev/null is not a regular file"]);
    refused(&["quantize", &input, "--json", &input], &["is the input"]);
    refused(&["quantize", &input, "-o", &folder.text("a"), "--json", &folder.text("a")], &["one path"]);
    assert_eq!(fs::read_to_string(&taken).expect("the file"), "precious");
    assert_eq!(fs::read(&input).expect("the input"), original);
    assert_eq!(folder.names().len(), 2, "{:?}", folder.names());

    succeed(&["quantize", &input, "-o", &taken, "--force"]);
    refused(&["quantize", &taken], &["ferrokv-int8 file already", "dequantize"]);
    refused(&["dequantize", &taken, "-o", &taken, "--force"], &["is the input"]);
    refused(&["dequantize", &taken, "-o", &input], &["in exists", "--force"]);
    refused(
        &["dequantize", &input, "-o", &folder.text("out")],
        &["is not a ferrokv-int8 file", "quantize -o"],
    );
    assert_eq!(folder.names().len(), 2, "{:?}", folder.names());
}

#[test]
#[cfg(unix)]
fn a_folder_without_permission_is_an_error() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new();
    let input = folder.tensors("in", &[("m", Dtype::F32, &[2, 3], &f32_bytes(&[1.0; 6]))]);
    let locked = folder.path("locked");
    fs::create_dir(&locked).expect("a folder");
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o555)).expect("permissions");
    // Root may write anywhere: /proc refuses even root.
    let target = if fs::write(locked.join("probe"), "").is_ok() {
        PathBuf::from("/proc/out")
    } else {
        locked.join("out")
    };
    refused(&["quantize", &input, "-o", target.to_str().expect("UTF-8")], &["cannot write", "permissions"]);
    assert!(!target.exists());
}

#[test]
fn broken_quantized_files_are_refused() {
    let folder = Folder::new();
    let original = r#"{"a":{"dtype":"F32","shape":[2,3]}}"#;
    let good = [
        ("ferrokv.format", "ferrokv-int8"),
        ("ferrokv.version", "1"),
        ("ferrokv.scheme", "channel"),
        ("ferrokv.tensors", original),
    ];
    let (codes, scales) = ([1u8, 2, 3, 4, 5, 6], f32_bytes(&[0.5, 1.0, 2.0]));
    let write = |name: &str, change: (&str, &str), parts: &[&str]| -> String {
        let metadata = good.map(|(key, value)| if key == change.0 { change } else { (key, value) });
        let all: [Tensor; 2] =
            [("a.codes", Dtype::I8, &[2, 3], &codes), ("a.scales", Dtype::F32, &[3], &scales)];
        let tensors: Vec<Tensor> = all.into_iter().filter(|(part, ..)| parts.contains(part)).collect();
        folder.tensors_with(name, &tensors, Some(&metadata))
    };
    let out = folder.text("out");
    let both = ["a.codes", "a.scales"];
    succeed(&["dequantize", &write("good", ("", ""), &both), "-o", &out]);
    fs::remove_file(&out).expect("removed");
    type Case<'a> = (&'a str, (&'a str, &'a str), &'a [&'a str], &'a [&'a str]);
    let cases: [Case<'_>; 7] = [
        ("format", ("ferrokv.format", "other"), &both, &["is not a ferrokv-int8 file"]),
        ("version", ("ferrokv.version", "2"), &both, &["version '2'", "reads 1"]),
        (
            "granularity",
            ("ferrokv.scheme", "pairs"),
            &both,
            &["unknown granularity 'pairs'", "channel and block16"],
        ),
        ("codes", ("", ""), &["a.scales"], &["no tensor 'a.codes'"]),
        ("scales", ("", ""), &["a.codes"], &["no tensor 'a.scales'"]),
        (
            "shape",
            ("ferrokv.tensors", r#"{"a":{"dtype":"F32","shape":[3,2]}}"#),
            &both,
            &["'a.codes' is I8 [2, 3]"],
        ),
        ("json", ("ferrokv.tensors", "{"), &both, &["ferrokv.tensors cannot be read"]),
    ];
    for (name, change, parts, words) in cases {
        refused(&["dequantize", &write(name, change, parts), "-o", &out], words);
    }
    assert!(!Path::new(&out).exists());
}

#[test]
fn a_gpu_that_is_not_there_is_an_error_only_where_one_is_asked_for() {
    let folder = Folder::new();
    let input = folder.tensors("in", &[("m", Dtype::F32, &[2, 3], &f32_bytes(&[1.0; 6]))]);
    let quantized = folder.text("q");
    succeed(&["quantize", &input, "--backend", "auto", "-o", &quantized]);
    let never = folder.text("never");
    let commands: [&[&str]; 4] = [
        &["quantize", &input, "-o", &never, "--backend", "cuda"],
        &["dequantize", &quantized, "-o", &never, "--backend", "cuda"],
        &["kernels", "--backend", "cuda"],
        &["check", "--filter", "indices", "--backend", "cuda"],
    ];
    for command in commands {
        refused(command, &["no CUDA driver", "cpu backend"]);
    }
    refused(&["check", "--sanitize"], &["--sanitize needs a GPU"]);
    refused(&["check", "--filter", "indices", "--time"], &["--time needs a GPU"]);
    assert!(!Path::new(&never).exists());
}

#[test]
fn words_that_mean_nothing_are_refused() {
    for (arguments, word) in [
        (vec!["quantize", SAMPLE, "--variant", "fast"], "possible values: all, naive"),
        (vec!["quantize", SAMPLE, "-o", "x", "--granularity", "rows"], "possible values: channel, block"),
        (vec!["quantize", SAMPLE, "--granularity", "block"], "--output"),
        (vec!["check", "--system", "rope"], "possible values: dense, int8, certified"),
        (vec!["check", "--time", "--orders", "0"], "--time"),
        (vec!["quantize"], "<FILE>"),
        (vec!["fly"], "unrecognized subcommand"),
    ] {
        let output = ferrokv(&arguments);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(word), "'{word}' is not in: {error}");
    }
    refused(&["kernels", "--system", "rope"], &["no system 'rope'", "int8"]);
    refused(&["check", "--filter", "zzz"], &["no case matches 'zzz'", "--list"]);
}
