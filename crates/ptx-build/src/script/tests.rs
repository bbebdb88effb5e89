//! What the build makes of findings, allowed ones and targets of two code generators, with no compiler run.

use super::*;
use crate::target::Target;
use crate::{lint, ptx};

fn judge(results: Vec<Outcome>, allow: &str) -> Result<Index, Vec<String>> {
    judge_both(results, Vec::new(), allow)
}

fn judge_both(llvm: Vec<Outcome>, nvvm: Vec<Outcome>, allow: &str) -> Result<Index, Vec<String>> {
    let allow = AllowList::parse(Path::new("allow.toml"), allow).unwrap();
    let index = Index { compiler: Some("rustc 1.96.0".into()), ..Index::default() };
    let of_each = [(Codegen::Llvm, llvm), (Codegen::Nvvm, nvvm)];
    PtxBuild::new("kernels").judge(of_each, index, &allow, Path::new("folder"))
}

fn target(sm: u32, body: &str) -> Outcome {
    let ptx = format!(".entry k()\n{{\n{body}\n}}\n");
    let findings = lint::check(&ptx::parse(&ptx));
    let entries = vec!["k".into()];
    let ptx = TargetPtx { sm, ptx, machine_code: Vec::new(), entries, usage: Vec::new() };
    Ok(Target { ptx, findings, warnings: Vec::new() })
}

const BAD: &str = "ld.b32 %r1, [%rd1];";
const ROW: &str = "[[allow]]\nentry = \"k\"\nrule = \"generic-address\"\nreason = \"a test\"\n";

#[test]
fn a_finding_of_both_targets_is_one_error() {
    let errors = judge(vec![target(80, BAD), target(90, BAD)], "").unwrap_err();
    assert_eq!(errors.len(), 2, "{errors:?}");
    assert!(errors[0].starts_with("sm_80 sm_90 [generic-address] kernel k, PTX line 3: "), "{errors:?}");
    assert!(errors[1].contains("kernels.sm_80.ptx; what must stay goes into kernels/ptx-allow.toml"));
}

#[test]
fn a_finding_says_the_generator_if_it_is_the_second() {
    let errors = judge_both(vec![target(90, BAD)], vec![target(90, BAD)], "").unwrap_err();
    assert!(errors[0].starts_with("sm_90 nvvm:sm_90 [generic-address]"), "{errors:?}");
    let errors = judge_both(vec![target(90, "ret;")], vec![target(90, BAD)], "").unwrap_err();
    assert!(errors[0].starts_with("nvvm:sm_90 [generic-address]"), "{errors:?}");
    assert!(errors[1].contains("kernels.nvvm.sm_90.ptx;"), "{errors:?}");
}

#[test]
fn the_first_generator_that_has_targets_is_what_runs() {
    let both = judge_both(vec![target(90, "ret;")], vec![target(100, "ret;")], "").unwrap();
    assert_eq!((both.codegen, both.targets[0].sm), (Codegen::Llvm, 90));
    assert_eq!(both.second.map(|second| second.targets[0].sm), Some(100));
    let alone = judge_both(Vec::new(), vec![target(100, "ret;")], "").unwrap();
    assert_eq!((alone.codegen, alone.targets.len(), alone.second.is_none()), (Codegen::Nvvm, 1, true));
}

#[test]
fn an_allowed_finding_passes_and_an_idle_row_does_not() {
    let index = judge(vec![target(80, BAD), target(90, "ret;")], ROW).unwrap();
    assert_eq!(index.targets.len(), 2);
    assert_eq!(index.compiler.as_deref(), Some("rustc 1.96.0"));
    let errors = judge(vec![target(80, "ret;"), target(90, "ret;")], ROW).unwrap_err();
    assert_eq!(errors, ["allow.toml:1: no kernel `k` breaks the rule generic-address: remove the row"]);
}

#[test]
fn a_row_is_idle_only_where_its_generator_ran() {
    // Only the second one runs: what the first one needs is not asked for.
    assert!(judge_both(Vec::new(), vec![target(90, "ret;")], ROW).is_ok());
    // What only the second one needs is of a row that says so.
    let of_nvvm = ROW.to_owned() + "codegen = \"nvvm\"\n";
    assert!(judge_both(vec![target(90, "ret;")], vec![target(90, BAD)], &of_nvvm).is_ok());
    assert!(judge(vec![target(90, "ret;")], &of_nvvm).is_ok());
    let errors = judge_both(vec![target(90, BAD)], vec![target(90, BAD)], &of_nvvm).unwrap_err();
    assert!(errors[0].starts_with("sm_90 [generic-address]"), "{errors:?}");
}

#[test]
fn what_is_shipped_is_taken_for_the_first_generator_alone() {
    let build = PtxBuild::new("kernels");
    let taken = |build: &PtxBuild, list: Option<&str>, writes| {
        build.codegens(list).and_then(|codegens| is_shipped(&codegens, writes))
    };
    assert_eq!(taken(&build, None, true), Ok(true));
    assert_eq!(taken(&build, Some("nvvm"), false), Ok(false));
    let nvvm = build.codegen(&[Codegen::Nvvm, Codegen::Nvvm]);
    assert_eq!(taken(&nvvm, None, false), Ok(false));
    assert_eq!(taken(&nvvm, Some("llvm"), true), Ok(true));
    assert_eq!(taken(&nvvm, None, true), Err(ListError::Ships { list: "nvvm".into() }));
    assert!(matches!(taken(&nvvm, Some("clang"), true), Err(ListError::Codegen { .. })));
}

#[test]
fn targets_of_a_build_script_are_checked_as_those_of_the_variable() {
    let targets =
        |targets: &[u32], list| PtxBuild::new("kernels").nvvm_targets(targets).nvvm_targets_of(list);
    assert_eq!(targets(&[120, 90, 90], None), Ok(vec![90, 120]));
    for wrong in [&[][..], &[70]] {
        let text = targets(wrong, None).unwrap_err().to_string();
        assert!(text.starts_with("PtxBuild::nvvm_targets="), "{text}");
        assert_eq!(targets(wrong, Some("100")), Ok(vec![100]));
    }
}

#[test]
fn the_same_error_of_both_targets_is_shown_once() {
    let error = |sm| Err(format!("ptxas refused k.ptx for sm_{sm}:\nerror: this\nand that"));
    // The idle row is not blamed for what did not compile.
    let errors = judge(vec![error(80), error(90)], ROW).unwrap_err();
    assert_eq!(errors, ["ptxas refused k.ptx for sm_80:\nerror: this\nand that"]);
}

#[test]
fn the_target_folder_is_the_tagged_one_or_the_profiles_parent() {
    let out = Path::new("/nonexistent/t/release/build/k-1/out");
    assert_eq!(target_folder(Path::new("/w"), out), Path::new("/nonexistent/t"));
    assert_eq!(target_folder(Path::new("/w"), Path::new("/out")), Path::new("/w/target"));
}
