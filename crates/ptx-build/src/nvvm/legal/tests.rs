//! Modules of a few lines: what is translated, what stays as it is, and what is refused.

use super::*;

const HEAD: &str = "\
target datalayout = \"e-p6:32:32-i64:64-i128:128-i256:256-v16:16-v32:32-n16:32:64\"
target triple = \"nvptx64-nvidia-cuda\"
";

fn module(body: &str) -> String {
    format!("{HEAD}define ptx_kernel void @k(ptr %y) #0 {{\nstart:\n{body}\n  ret void\n}}\n")
}

/// The translated lines of a kernel's body.
fn body(text: &str) -> String {
    let legal = translate(&module(text)).unwrap();
    let (_, rest) = legal.ir.split_once("start:\n").unwrap();
    rest.split_once("\n  ret void").unwrap().0.to_owned()
}

fn refused(text: &str) -> Refusal {
    let Refused(mut refusals) = translate(text).unwrap_err();
    assert_eq!(refusals.len(), 1, "{refusals:?}");
    refusals.remove(0)
}

#[test]
fn the_module_gets_the_layout_and_the_version() {
    let text = format!("{HEAD}!llvm.ident = !{{!7}}\n!7 = !{{!\"rustc\"}}\n");
    let legal = translate(&text).unwrap();
    let layout = legal.ir.lines().next().unwrap();
    assert!(layout.starts_with("target datalayout = \"e-p:64:64:64-i1:8:8-"), "{layout}");
    assert!(layout.ends_with("-v128:128:128-n16:32:64\""), "{layout}");
    // Behind all numbers that are taken.
    assert!(
        legal.ir.ends_with("!nvvmir.version = !{!8}\n!8 = !{i32 2, i32 0, i32 3, i32 2}\n"),
        "{}",
        legal.ir
    );
}

#[test]
fn what_is_legal_stays() {
    let text = "  %0 = fadd float %a, %b\n  %1 = tail call float @llvm.fma.f32(float %0, float %a, float %b)\n  \
                %2 = tail call i32 asm sideeffect \"ld.relaxed.gpu.global.b32 ${0}, [${1}];\", \"=&r,l,~{memory}\"(i64 %p) #1";
    assert_eq!(body(text), text);
}

#[test]
fn module_assembly_is_taken_out() {
    let text = format!(
        "{HEAD}module asm \"// simt.launch_bounds k 128 2\"\nmodule asm \".extern .shared .b8 s[]; // \\22x\\22 \\\\ \\09\"\n"
    );
    let legal = translate(&text).unwrap();
    assert!(!legal.ir.contains("module asm"));
    assert_eq!(legal.assembly, "// simt.launch_bounds k 128 2\n.extern .shared .b8 s[]; // \"x\" \\ \t\n");
}

#[test]
fn target_attributes_are_dropped_and_others_kept() {
    let text = format!(
        "{HEAD}attributes #0 = {{ convergent nounwind \"target-cpu\"=\"sm_90\" \"target-features\"=\"+ptx80\" }}\n\
         attributes #1 = {{ nounwind memory(none) \"x\"=\"y\" }}\n"
    );
    let legal = translate(&text).unwrap();
    assert!(legal.ir.contains("attributes #0 = { convergent nounwind }\n"), "{}", legal.ir);
    assert!(legal.ir.contains("attributes #1 = { nounwind memory(none) \"x\"=\"y\" }\n"));
}

#[test]
fn rint_and_nearbyint_become_roundeven_declared_once() {
    let call =
        "  %0 = tail call float @llvm.rint.f32(float %a)\n  %1 = call float @llvm.nearbyint.f32(float %0)";
    let text = module(call)
        + "declare float @llvm.rint.f32(float) #15\ndeclare float @llvm.roundeven.f32(float)\n\
           declare float @llvm.nearbyint.f32(float)\n";
    let legal = translate(&text).unwrap();
    assert!(legal.ir.contains("  %0 = tail call float @llvm.roundeven.f32(float %a)\n"), "{}", legal.ir);
    assert!(legal.ir.contains("  %1 = call float @llvm.roundeven.f32(float %0)\n"));
    assert_eq!(legal.ir.matches("declare ").count(), 1);
    assert!(legal.ir.contains("declare float @llvm.roundeven.f32(float) #15\n"));
}

#[test]
fn the_absolute_value_clears_the_sign_bit() {
    assert_eq!(
        body("  %15 = tail call noundef float @llvm.fabs.f32(float noundef %x.i) #4"),
        "  %nvvm.abs.15.bits = bitcast float %x.i to i32\n  \
         %nvvm.abs.15.clear = and i32 %nvvm.abs.15.bits, 2147483647\n  \
         %15 = bitcast i32 %nvvm.abs.15.clear to float"
    );
    assert_eq!(
        body("  %y = call double @llvm.fabs.f64(double %d)"),
        "  %nvvm.abs.y.bits = bitcast double %d to i64\n  \
         %nvvm.abs.y.clear = and i64 %nvvm.abs.y.bits, 9223372036854775807\n  \
         %y = bitcast i64 %nvvm.abs.y.clear to double"
    );
    let other = refused(&module("  %y = call <2 x float> @llvm.fabs.v2f32(<2 x float> %d)"));
    assert_eq!((other.line, &*other.function), (5, "k"));
    assert!(matches!(other.what, What::Call(_)), "{other}");
}

#[test]
fn functions_without_a_translation_are_refused_by_name() {
    for (declaration, name) in [
        ("declare float @llvm.exp2.f32(float)", "llvm.exp2.f32"),
        ("declare float @llvm.fmuladd.f32(float, float, float)", "llvm.fmuladd.f32"),
        ("declare ptr @memcpy(ptr, ptr, i64) #3", "memcpy"),
        ("declare void @_RNv4core9panicking5panic(ptr)", "_RNv4core9panicking5panic"),
    ] {
        let text = format!("{HEAD}{declaration}\n");
        let refusal = refused(&text);
        assert_eq!(refusal.line, 3);
        assert!(matches!(&refusal.what, What::Function { name: found, .. } if found == name), "{refusal}");
        let shown = translate(&text).unwrap_err().to_string();
        assert!(shown.contains(&format!("line 3: `{name}` has no translation: ")), "{shown}");
        assert!(shown.contains("FERROKV_CODEGEN=llvm"), "{shown}");
    }
}

#[test]
fn flags_that_change_bits_are_refused() {
    for (line, flag) in [
        ("  %0 = fadd contract float %a, %b", "contract"),
        ("  %0 = fmul nnan reassoc float %a, %b", "reassoc"),
        ("  %0 = fdiv arcp float %a, %b", "arcp"),
        ("  %0 = fneg nsz float %a", "nsz"),
        ("  %0 = tail call fast float @llvm.sqrt.f32(float %a)", "fast"),
        ("  %0 = fptrunc contract double %d to float", "contract"),
        ("  %0 = fpext nnan afn float %a to double", "afn"),
        ("  %0 = fdiv float %a, %b, !fpmath !7", "!fpmath"),
    ] {
        let refusal = refused(&module(line));
        assert!(matches!(refusal.what, What::Flag { flag: found, .. } if found == flag), "{refusal}");
        assert!(refusal.to_string().starts_with("line 5, kernel k: the flag `"), "{refusal}");
    }
    // What a value is known to be changes no bit; other words are no flags.
    for fine in ["  %0 = fadd nnan ninf float %a, %b", "  %0 = call float @fast(float %contract)"] {
        assert_eq!(body(fine), fine);
    }
}

#[test]
fn attributes_that_change_bits_are_refused() {
    for name in ["unsafe-fp-math", "denormal-fp-math", "denormal-fp-math-f32", "nvptx-f32ftz"] {
        let refusal = refused(&format!("{HEAD}attributes #0 = {{ nounwind \"{name}\"=\"true\" }}\n"));
        assert_eq!((refusal.line, refusal.what), (3, What::Attribute(name)));
    }
}

#[test]
fn inline_ptx_that_threads_execute_together_is_convergent() {
    let call = "  %2 = tail call { float, i32 } asm sideeffect \"mma.sync.aligned.x \\22${0}\\22, (${1});\", \"=f,=r,r\"";
    let rest = " #22, !srcloc !140";
    let made = body(&format!("{call}(i32 %_6, ptr getelementptr (i8, ptr @s, i64 4)){rest}"));
    assert_eq!(made, format!("{call}(i32 %_6, ptr getelementptr (i8, ptr @s, i64 4)) convergent{rest}"));
    let made = body("  call void asm sideeffect \"bar.warp.sync -1;\", \"~{memory}\"()");
    assert_eq!(made, "  call void asm sideeffect \"bar.warp.sync -1;\", \"~{memory}\"() convergent");
    let alone = "  %1 = tail call i32 asm \"mov.b32 ${0}, ${1};\", \"=r,r\"(i32 %a) #23";
    assert_eq!(body(alone), alone);
}

#[test]
fn another_layout_or_target_is_refused() {
    let layout = refused("target datalayout = \"e-p:32:32\"\n");
    assert_eq!(layout.what, What::Layout("e-p:32:32".into()));
    let triple = refused("target triple = \"amdgcn-amd-amdhsa\"\n");
    assert_eq!(triple.what, What::Triple("amdgcn-amd-amdhsa".into()));
}

#[test]
fn many_refusals_are_counted() {
    let text: String = (0..20).map(|i| format!("declare void @f{i}()\n")).collect();
    let refused = translate(&text).unwrap_err();
    assert_eq!(refused.0.len(), 20);
    assert!(refused.to_string().ends_with("\nand 12 more"), "{refused}");
}
