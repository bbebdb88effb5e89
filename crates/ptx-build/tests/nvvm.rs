//! The second code generator, where there is a libNVVM. One that is there and does not work is a failure.

use ptx_build::compile::{Request, compile};
use ptx_build::needs::{self, Need};
use ptx_build::nvvm::{self, Library, NvvmError, legal, library, retarget};
use ptx_build::toolchain::{DeviceToolchain, find};
use ptx_build::{directives, lacks, lint, ptx, ptxas, since};
use std::collections::BTreeMap;
use std::path::Path;

const WORKSPACE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// The library, or `None` if there is none at all.
fn libnvvm() -> Option<Library> {
    match library::find(Path::new(WORKSPACE)) {
        Ok(library) => Some(library),
        Err(NvvmError::NoLibrary { reason }) if reason == library::NONE => {
            eprintln!("not tested: {reason}; {}", library::REMEDY);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn tmp(name: &str) -> std::path::PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("nvvm");
    std::fs::create_dir_all(&folder).unwrap();
    folder.join(name)
}

/// A kernel of rustc's form, translated; `body` writes what it likes to `%y`.
fn kernel(declarations: &str, body: &str) -> legal::Legal {
    let text = format!(
        "target datalayout = \"e-p6:32:32-i64:64-i128:128-i256:256-v16:16-v32:32-n16:32:64\"\n\
         target triple = \"nvptx64-nvidia-cuda\"\n\
         {declarations}\n\
         define ptx_kernel void @k(ptr %y, float %a, float %b, float %c, double %d) #0 {{\n{body}\n  ret void\n}}\n\
         attributes #0 = {{ nounwind \"target-cpu\"=\"sm_90\" \"target-features\"=\"+ptx80\" }}\n"
    );
    legal::translate(&text).unwrap()
}

#[test]
fn inline_ptx_that_threads_execute_together_is_taken_as_convergent() {
    let Some(library) = libnvvm() else { return };
    // The condition is the same in each turn: without the attribute the loop is doubled, one for each side of
    // it, and threads of a warp wait in two places.
    let body = "  %1 = fcmp olt float %a, %b\n  br label %turn\n\
                turn:\n  %i = phi i32 [ 0, %0 ], [ %j, %end ]\n  br i1 %1, label %one, label %two\n\
                one:\n  store volatile float %a, ptr %y\n  br label %end\n\
                two:\n  store volatile float %c, ptr %y\n  store volatile float %b, ptr %y\n  br label %end\n\
                end:\n  call void asm sideeffect \"bar.warp.sync -1;\", \"~{memory}\"()\n  \
                %j = add i32 %i, 1\n  %more = icmp ult i32 %j, 1000\n  br i1 %more, label %turn, label %out\nout:";
    let legal = kernel("", body);
    let calls = |ir: &str| library.compile(ir, nvvm::MODERN).unwrap().ptx.matches("bar.warp.sync").count();
    let other = legal.ir.replace("() convergent", "()");
    assert_ne!(other, legal.ir);
    // The turns are unrolled, too.
    let (once, doubled) = (calls(&legal.ir), calls(&other));
    assert_eq!((once > 0, doubled), (true, 2 * once));
}

#[test]
fn operations_keep_their_rounding() {
    let Some(library) = libnvvm() else { return };
    let unary = |name: &str| {
        (
            format!("declare float @llvm.{name}.f32(float)"),
            format!("  %1 = call float @llvm.{name}.f32(float %a)\n  store float %1, ptr %y"),
        )
    };
    let store = "\n  store float %2, ptr %y";
    let cases: [((String, String), &[&str]); 9] = [
        (unary("sqrt"), &["sqrt.rn.f32"]),
        (unary("rint"), &["cvt.rni.f32.f32"]),
        (unary("nearbyint"), &["cvt.rni.f32.f32"]),
        (unary("roundeven"), &["cvt.rni.f32.f32"]),
        (unary("floor"), &["cvt.rmi.f32.f32"]),
        (unary("trunc"), &["cvt.rzi.f32.f32"]),
        // Of separate operations no fused one is made, and of the fused one nothing else.
        (
            (String::new(), format!("  %1 = fmul float %a, %b\n  %2 = fadd float %1, %c{store}")),
            &["mul.rn.f32", "add.rn.f32"],
        ),
        (
            (
                "declare float @llvm.fma.f32(float, float, float)".into(),
                "  %1 = call float @llvm.fma.f32(float %a, float %b, float %c)\n  store float %1, ptr %y"
                    .into(),
            ),
            &["fma.rn.f32"],
        ),
        (
            (String::new(), format!("  %1 = fdiv float %a, %b\n  %2 = fadd float %1, %c{store}")),
            &["div.rn.f32", "add.rn.f32"],
        ),
    ];
    for ((declarations, body), expected) in cases {
        let legal = kernel(&declarations, &body);
        let ptx = library.compile(&legal.ir, nvvm::MODERN).unwrap().ptx;
        let text = retarget::complete(&ptx, "", nvvm::MODERN).unwrap();
        for instruction in expected {
            assert!(text.contains(instruction), "{instruction} of {body} in {text}");
        }
        let floats = |line: &&str| line.contains(".f32") && !line.contains(".param");
        assert_eq!(text.lines().filter(floats).count(), expected.len(), "{body} in {text}");
        assert!(!text.contains(".ftz") && !text.contains(".approx"), "{text}");
        assert_eq!(lint::check(&ptx::parse(&text)), []);
    }
}

#[test]
fn the_absolute_value_changes_the_sign_alone() {
    let Some(library) = libnvvm() else { return };
    let legal = kernel(
        "declare double @llvm.fabs.f64(double)",
        "  %1 = call double @llvm.fabs.f64(double %d)\n  store double %1, ptr %y",
    );
    let ptx = library.compile(&legal.ir, nvvm::MODERN).unwrap().ptx;
    let clears = ptx.contains("abs.f64") || ptx.contains("9223372036854775807");
    assert!(clears && !ptx.contains(".extern"), "{ptx}");
}

#[test]
fn an_intrinsic_that_the_library_lacks_is_named() {
    let Some(library) = libnvvm() else { return };
    let legal = kernel(
        "declare i32 @llvm.nvvm.no.such()",
        "  %1 = call i32 @llvm.nvvm.no.such()\n  store i32 %1, ptr %y",
    );
    let error = library
        .compile(&legal.ir, nvvm::MODERN)
        .and_then(|compiled| retarget::complete(&compiled.ptx, "", nvvm::MODERN))
        .unwrap_err()
        .to_string();
    assert!(error.contains("llvm.nvvm.no.such") || error.contains("unknown intrin"), "{error}");
}

#[test]
fn what_is_no_module_is_refused_with_the_librarys_words() {
    let Some(library) = libnvvm() else { return };
    let error = library.compile("nothing\n", nvvm::MODERN).unwrap_err();
    assert!(matches!(&error, NvvmError::Library { arch, .. } if arch == "compute_100"), "{error}");
    assert!(error.to_string().contains("expected top-level entity"), "{error}");
}

#[test]
fn kernels_go_through_both_generators_unchanged() {
    let Some(library) = libnvvm() else { return };
    let toolchain = match find() {
        DeviceToolchain::Found(found) => found,
        DeviceToolchain::Missing(missing) => return eprintln!("not tested: {missing}"),
    };
    let request = Request {
        workspace: Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixture")),
        package: "good",
        sm: nvvm::OLDEST_IR,
        asm: true,
        ir: true,
        lines: false,
        folder: Path::new(env!("CARGO_TARGET_TMPDIR")),
        toolchain: &toolchain,
    };
    let compiled = compile(&request).unwrap();
    // What the first generator makes does not depend on whether there is a second.
    let alone = compile(&Request { ir: false, ..request.clone() }).unwrap();
    assert_eq!(alone.ptx, compiled.ptx);
    assert!(alone.ir.is_none());
    let entries = |text: &str| -> Vec<String> {
        let mut names: Vec<_> =
            ptx::parse(text).functions.into_iter().map(|function| function.name).collect();
        names.sort_unstable();
        names
    };
    let ir = compiled.ir.unwrap();
    let legal = legal::translate(&ir.text).unwrap();
    // The second time the text is read from the file beside the IR.
    let generated = nvvm::generate(&library, &legal, nvvm::MODERN, &ir.path).unwrap();
    assert_eq!(nvvm::generate(&library, &legal, nvvm::MODERN, &ir.path).unwrap(), generated);
    for (sm, header) in [(90, ".version 8.3\n.target sm_90\n"), (100, ".version 8.6\n.target sm_100\n")] {
        let text = retarget::complete(&generated.ptx, &legal.assembly, sm).unwrap();
        let text = since::select(&text, sm).unwrap();
        let text = directives::apply(&text, &ptx::parse(&text)).unwrap();
        assert!(text.contains(header), "{text}");
        assert_eq!(entries(&text), entries(compiled.ptx.as_deref().unwrap()));
        assert_eq!(lint::check(&ptx::parse(&text)), []);
        let bounds = "\n.maxntid 256, 1, 1\n.minnctapersm 2\n";
        assert_eq!(text.matches(bounds).count(), 1, "{text}");
        let Ok(ptxas) = ptxas::find(Path::new(WORKSPACE)) else {
            return eprintln!("not assembled: no ptxas");
        };
        let file = tmp(&format!("good.{sm}.ptx"));
        std::fs::write(&file, &text).unwrap();
        let assembled = ptxas.assemble(&file, &text, sm).unwrap();
        assert!(assembled.usage.iter().all(|usage| usage.registers > 0 && usage.stack == 0));
    }
}

/// Every target of `all`, from what rustc and libNVVM make for it: what ptxas takes whole, and what it says
/// that the oldest lacks.
#[test]
fn every_target_has_what_it_can_have() {
    let (Some(library), Ok(ptxas)) = (libnvvm(), ptxas::find(Path::new(WORKSPACE))) else {
        return eprintln!("not tested: no libNVVM or no ptxas");
    };
    let toolchain = match find() {
        DeviceToolchain::Found(found) => found,
        DeviceToolchain::Missing(missing) => return eprintln!("not tested: {missing}"),
    };
    let mut lacking = BTreeMap::new();
    for sm in nvvm::TARGETS {
        let request = Request {
            workspace: Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixture")),
            package: "good",
            sm: nvvm::OLDEST_IR,
            asm: false,
            ir: true,
            lines: false,
            folder: Path::new(env!("CARGO_TARGET_TMPDIR")),
            toolchain: &toolchain,
        };
        let ir = compile(&request).unwrap().ir.unwrap();
        let legal = legal::translate(&ir.text).unwrap();
        let generated = nvvm::generate(&library, &legal, nvvm::compiled_for(sm), &ir.path).unwrap();
        let text = retarget::complete(&generated.ptx, &legal.assembly, sm).unwrap();
        let text = since::select(&text, sm).unwrap();
        // libNVVM hands the comments on that say which line is for which target.
        let lines = [80, 90].map(|name| text.matches(&format!(", {name};")).count());
        assert_eq!(lines, if sm < 90 { [1, 0] } else { [0, 1] }, "{text}");
        let mut text = directives::apply(&text, &ptx::parse(&text)).unwrap();
        let file = tmp(&format!("targets.{sm}.ptx"));
        std::fs::write(&file, &text).unwrap();
        let mut assembled = ptxas.assemble(&file, &text, sm);
        if let Err(ptxas::PtxasError::Refused { messages, .. }) = &assembled {
            let module = ptx::parse(&text);
            let found = lacks::of(&text, &module, messages).unwrap_or_else(|| panic!("sm_{sm}: {messages}"));
            text = needs::cut(text, &module, &found);
            lacking.insert(sm, found);
            std::fs::write(&file, &text).unwrap();
            assembled = ptxas.assemble(&file, &text, sm);
        }
        let names: Vec<String> = assembled.unwrap().usage.into_iter().map(|usage| usage.entry).collect();
        let mut expected = vec!["bounded", "converges", "from_dependency", "from_sm_80", "target_name"];
        expected.retain(|name| sm >= 80 || *name != "from_sm_80");
        assert_eq!(names, expected, "sm_{sm}");
        assert_eq!(lint::check(&ptx::parse(&text)), [], "sm_{sm}");
    }
    let needs = Need { sm: 80, why: "cp.async.wait_all, redux".into() };
    assert_eq!(lacking, BTreeMap::from([(75, BTreeMap::from([("from_sm_80".to_owned(), needs)]))]));
}

/// An instruction that only the newer target has does not come through for the older one.
#[test]
fn the_assembler_refuses_what_an_older_target_has_not() {
    let Ok(ptxas) = ptxas::find(Path::new(WORKSPACE)) else { return eprintln!("not tested: no ptxas") };
    let newer = ".version 9.0\n.target sm_100\n.address_size 64\n.visible .entry k()\n{\n\t.reg .b64 %a;\n\t\
                 mov.b64 %a, 0;\n\tadd.rn.f32x2 %a, %a, %a;\n\tret;\n}\n";
    for (sm, taken) in [(100, true), (90, false)] {
        let text = retarget::complete(newer, "", sm).unwrap();
        let file = tmp(&format!("newer.{sm}.ptx"));
        std::fs::write(&file, &text).unwrap();
        let assembled = ptxas.assemble(&file, &text, sm);
        assert_eq!(assembled.is_ok(), taken, "sm_{sm}: {assembled:?}");
    }
}
