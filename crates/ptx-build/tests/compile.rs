//! From Rust to linted PTX, with the real device compiler. Where there is none, the tests say so and pass.

use ptx_build::compile::{CompileError, Request, compile};
use ptx_build::toolchain::{DeviceToolchain, Found, find};
use ptx_build::{directives, lint, ptx, ptxas, since};
use std::path::Path;

fn toolchain() -> Option<Found> {
    match find() {
        DeviceToolchain::Found(found) => Some(found),
        DeviceToolchain::Missing(missing) => {
            eprintln!("not tested: {missing}");
            None
        }
    }
}

fn request<'a>(package: &'a str, toolchain: &'a Found) -> Request<'a> {
    Request {
        workspace: Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixture")),
        package,
        sm: 80,
        asm: true,
        ir: false,
        lines: false,
        folder: Path::new(env!("CARGO_TARGET_TMPDIR")),
        toolchain,
    }
}

fn body<'a>(text: &'a str, entry: &str) -> &'a str {
    let start =
        text.find(&format!(".entry {entry}(")).unwrap_or_else(|| panic!("no entry {entry} in\n{text}"));
    let end = text[start..].find("\n}").map_or(text.len(), |end| start + end);
    &text[start..end]
}

#[test]
fn kernels_become_ptx_that_passes_and_assembles() {
    let Some(toolchain) = toolchain() else { return };
    let compiled = compile(&request("good", &toolchain)).unwrap();
    assert_eq!(compiled.warnings, "");
    let written = compiled.ptx.unwrap();
    assert!(!written.contains("\t.loc\t"));
    let module = ptx::parse(&written);

    // Every entry survives: private ones, and those of a dependency; and nothing else does.
    let mut entries: Vec<&str> = module.functions.iter().map(|function| function.name.as_str()).collect();
    entries.sort_unstable();
    assert_eq!(
        entries,
        ["bounded", "converges", "from_dependency", "from_sm_80", "target_name"],
        "{}",
        written
    );
    assert!(module.functions.iter().all(|function| function.is_entry && function.is_defined));
    assert_eq!(lint::check(&module), []);

    // Bounds reach the text through link-time optimisation, from the dependency too.
    let of_target = |sm| {
        let text = since::select(&written, sm).unwrap();
        directives::apply(&text, &ptx::parse(&text)).unwrap()
    };
    let text = of_target(90);
    assert!(body(&text, "bounded").contains("\n)\n.maxntid 256, 1, 1\n.minnctapersm 2\n{"), "{text}");
    assert!(body(&text, "from_dependency").contains("\n)\n.maxntid 128, 1, 1\n{"), "{text}");

    // One barrier in the source is one barrier in the PTX, ahead of the branch that follows it.
    assert_eq!(body(&text, "converges").matches("bar.sync").count(), 1, "{text}");

    // The target, lines of its own, plain IEEE operations, and a failed check that is a trap.
    assert!(text.contains(".version 8.0\n.target sm_90\n"), "{text}");
    let of_older = of_target(80);
    assert!(of_older.contains(".version 8.0\n.target sm_80\n"), "{of_older}");
    for (text, own, other) in [(&text, "90", "80"), (&of_older, "80", "90")] {
        let body = body(text, "target_name");
        assert!(body.contains(&format!(", {own};")) && !body.contains(&format!(", {other};")), "{body}");
    }
    let bounded = body(&text, "bounded");
    for needed in ["mul.rn.f32", "div.rn.f32", "add.rn.f32", "trap;"] {
        assert!(bounded.contains(needed), "{needed} in {bounded}");
    }

    match ptxas::find(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))) {
        Ok(ptxas) => {
            let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("good.ptx");
            std::fs::write(&file, &text).unwrap();
            let _ = std::fs::remove_file(file.with_extension("ptxas.log"));
            let assembled = ptxas.assemble(&file, &text, 90).unwrap();
            let names: Vec<&str> = assembled.usage.iter().map(|usage| usage.entry.as_str()).collect();
            assert_eq!(names, entries);
            assert!(assembled.usage.iter().all(|usage| usage.registers > 0 && usage.stack == 0));
            // The second time it is read from the log.
            assert_eq!(ptxas.assemble(&file, &text, 90).unwrap(), assembled);
            let wrong = text.replace("mul.rn.f32", "mul.rn.f33");
            let file = file.with_file_name("wrong.ptx");
            std::fs::write(&file, &wrong).unwrap();
            let error = ptxas.assemble(&file, &wrong, 90).unwrap_err().to_string();
            assert!(error.contains("wrong.ptx") && error.contains("f33"), "{error}");
        }
        Err(reason) => eprintln!("not assembled: {reason}"),
    }
}

#[test]
fn source_lines_come_with_the_ptx_if_they_are_asked_for() {
    let Some(toolchain) = toolchain() else { return };
    let request = Request { lines: true, ..request("good", &toolchain) };
    let text = since::select(&compile(&request).unwrap().ptx.unwrap(), 80).unwrap();
    let module = ptx::parse(&text);
    assert_eq!(lint::check(&module), []);
    assert!(body(&text, "bounded").contains("\t.loc\t"), "{text}");
    assert!(text.contains("good/src/lib.rs\"") && !text.contains(", debug"), "{text}");
    let Ok(ptxas) = ptxas::find(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))) else { return };
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("lines.ptx");
    std::fs::write(&file, &text).unwrap();
    let _ = std::fs::remove_file(file.with_extension("ptxas.log"));
    ptxas.assemble(&file, &text, 80).unwrap();
    let machine_code = std::fs::read(ptxas::machine_code_file(&file)).unwrap();
    let table = b".debug_line";
    assert!(machine_code.windows(table.len()).any(|part| part == table), "no line table");
}

#[test]
fn a_mistake_is_shown_as_the_compiler_shows_it() {
    let Some(toolchain) = toolchain() else { return };
    let error = compile(&request("broken", &toolchain)).unwrap_err();
    assert!(matches!(error, CompileError::Rejected { .. }), "{error}");
    let text = error.to_string();
    assert!(text.starts_with("broken does not compile\n"), "{text}");
    for needed in ["error[E0308]: mismatched types", "broken/src/lib.rs:6:5", "expected `u32`, found `&str`"]
    {
        assert!(text.contains(needed), "{needed} in {text}");
    }
}
