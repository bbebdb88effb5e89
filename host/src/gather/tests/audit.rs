//! Audits: what they find is the truth, by the kernels and by the CPU's own path; what is drawn is a sample.

use super::super::audit::{AuditHandles, Auditor};
use super::super::oracle;
use super::scheme::{cache_of, chunk};
use super::*;
use crate::attention::dense::bound;
use crate::attention::oracle::Sequence;
use crate::kv::{KvCache, Selection, Summary};
use half::{bf16, f16};
use kernels_gpu::gather::{AuditShape, Audited};

/// The audit of a step that is done.
fn audit<E: GatherElement>(
    batch: &Batch<E>,
    stepped: &Stepped,
    support: Support,
    share: f64,
    slices: bool,
) -> (Vec<Audited>, u32) {
    let device = device();
    let stream = Stream::new(&device).expect("a stream");
    let at = batch.upload(&device).expect("buffers");
    let floats = |bits: &[u32]| {
        let floats: Vec<f32> = bits.iter().map(|bits| f32::from_bits(*bits)).collect();
        Buffer::from_slice(&device, &floats).expect("a buffer")
    };
    let (output, lse) = (floats(&stepped.output), floats(&stepped.lse));
    let mut audits = Buffer::<Audited>::zeroed(&device, lse.len()).expect("a buffer");
    let mut auditor = Auditor::<E>::new(&device, batch.problem, support, share).expect("an auditor");
    let handles = AuditHandles {
        queries: at.queries.global(),
        keys: at.keys.global(),
        values: at.values.global(),
        near: true,
        table: at.table.global(),
        lengths: at.lengths.global(),
        output: output.global(),
        lse: lse.global(),
    };
    // SAFETY: buffers of the emulator, whose table is of this pool.
    unsafe { auditor.audit_on(&stream, slices, 3, &handles, audits.global_mut()) }.expect("audited");
    (audits.to_vec().expect("read"), auditor.splits())
}

/// Of every head: the mass that it skipped, what its output is off by, and the norm, as f64 has them from the
/// list. An output is within the bound of dense attention of what it should be, on either side; so a norm, or
/// the norm of a difference, is within those bounds' norms. A log-sum-exp likewise: with δ what both may be
/// off by, 1 − exp(L − L') moves by δ·e^δ at most, as it never falls faster than L − L' does; f32 adds less
/// than 2^−20 to the difference of two numbers below 2^6 and to what is made of it.
fn check<E: GatherElement>(batch: &Batch<E>, support: Support) -> usize {
    let (stepped, plan) = step(batch, support, false);
    let (audits, splits) = audit(batch, &stepped, support, 1.0, false);
    assert!(audit(batch, &stepped, support, 1.0, true).0 == audits, "the CPU's own path");
    let (dim, group) = (batch.problem.head_dim as usize, plan.attended().group() as usize);
    let mut looked_at = 0;
    for sequence in 0..batch.lengths.len() {
        let length = batch.lengths[sequence] as usize;
        for head in 0..batch.problem.kv_heads as usize {
            let blocks = list(batch, &stepped, sequence, head);
            let kept = oracle::tokens(&blocks, support.block as usize, length);
            let all: Vec<usize> = (0..length).collect();
            let row = |pool: &[E], token: usize, to: &mut [f64]| read(batch, pool, sequence, head, token, to);
            let key = |token: usize, to: &mut [f64]| row(&batch.keys, token, to);
            let value = |token: usize, to: &mut [f64]| row(&batch.values, token, to);
            for (q, query) in queries(batch, sequence, head).iter().enumerate() {
                let at = (sequence * batch.problem.kv_heads as usize + head) * group + q;
                let found = audits[at];
                if kept.len() == length {
                    assert_eq!(found, Audited { mass: 0.0, error: 0.0, norm: 0.0, drawn: 0 });
                    continue;
                }
                let of = |tokens: &[usize], splits: u32| {
                    let (output, lse) = oracle::masked(tokens, query, key, value);
                    let (bounds, lse_bound) = bound::row::<E>(
                        &Sequence::decode(tokens.len(), 1, 1, dim),
                        splits,
                        query,
                        |_, token, to: &mut [f64]| key(tokens[token], to),
                        |_, token, to: &mut [f64]| value(tokens[token], to),
                        0,
                        0,
                    );
                    (output, lse, norm(bounds.iter().copied()), lse_bound)
                };
                let (few, lse, few_bound, delta) = of(&kept, plan.splits());
                let (whole, whole_lse, whole_bound, whole_delta) = of(&all, splits);
                let delta = delta + whole_delta;
                assert!(lse.abs() < 64.0 && whole_lse.abs() < 64.0, "{lse} {whole_lse}");
                let mass = 1.0 - (lse - whole_lse).exp();
                let slack = delta * delta.exp() + 2f64.powi(-20);
                assert!((f64::from(found.mass) - mass).abs() <= slack, "{found:?}, {mass} ± {slack}");
                let error = norm(few.iter().zip(&whole).map(|(a, b)| a - b));
                let rounded = |x: f64| x * 2f64.powi(-20);
                let slack = few_bound + whole_bound;
                assert!(
                    (f64::from(found.error) - error).abs() <= slack + rounded(error + slack),
                    "{found:?}"
                );
                let size = norm(whole.iter().copied());
                assert!((f64::from(found.norm) - size).abs() <= whole_bound + rounded(size), "{found:?}");
                assert_eq!(found.drawn, 1);
                looked_at += 1;
            }
        }
    }
    looked_at
}

fn norm(x: impl Iterator<Item = f64>) -> f64 {
    x.map(|x| x * x).sum::<f64>().sqrt()
}

#[test]
fn what_is_found_is_what_was_skipped() {
    let support = Support { k: 3, block: 32, local: 2 };
    for input in [Input::Normal, Input::Sharp, Input::Dominant, Input::Wide] {
        assert_eq!(check(&batch::<f16>(PROBLEM, input, &[400, 1, 289, 32], 5), support), 16, "{input}");
        let problem = StepProblem { head_dim: 128, q_heads: 11, kv_heads: 1, max_tokens: 1500, ..PROBLEM };
        let support = Support { block: 128, ..support };
        assert_eq!(check(&batch::<bf16>(problem, input, &[1500, 1151], 6), support), 22, "{input}");
    }
}

/// Who is drawn is the same by kernels and by slices, is a share of all, and differs by layer, length,
/// sequence and head: no two of these stand for each other.
#[test]
fn a_share_is_drawn() {
    let shape = |layer, threshold| AuditShape {
        rule: Support { k: 1, block: 16, local: 1 }.rule(),
        group: 4,
        kv_heads: 2,
        sequences: 2,
        max_blocks: 1000,
        layer,
        threshold,
    };
    for share in [0.01, 0.3] {
        let threshold = (share * 4_294_967_296f64) as u32;
        let words = |layer: u32| -> Vec<bool> {
            let of = |length: u32| {
                (0..2).flat_map(move |s| (0..8).map(move |q| shape(layer, threshold).draws(s, length, q)))
            };
            (100..1100).flat_map(of).collect()
        };
        let (a, b) = (words(0), words(1));
        let drawn = |of: &[bool]| of.iter().filter(|drawn| **drawn).count() as f64 / of.len() as f64;
        // 16,000 draws: five times the standard deviation.
        let slack = 5.0 * (share * (1.0 - share) / 16_000.0).sqrt();
        for of in [&a, &b] {
            assert!((drawn(of) - share).abs() < slack, "{share}: {}", drawn(of));
        }
        let both = a.iter().zip(&b).map(|(a, b)| *a && *b).collect::<Vec<_>>();
        assert!((drawn(&both) - share * share).abs() < slack, "layers are drawn apart");
        let pairs: Vec<bool> = a.windows(2).map(|pair| pair[0] && pair[1]).collect();
        assert!((drawn(&pairs) - share * share).abs() < slack, "heads are drawn apart");
    }
    assert_eq!(shape(0, u32::MAX).wanted(1, 1, 0, 49), 0b1111);
    assert_eq!(shape(0, u32::MAX).wanted(1, 1, 0, 48), 0, "nothing is left out of three blocks");
    assert_eq!(AuditShape { group: 11, ..shape(0, u32::MAX) }.wanted(0, 0, 1, 99), 0b111);
    let some = batch::<f16>(PROBLEM, Input::Normal, &[400, 390, 380], 5);
    let support = Support { k: 3, block: 16, local: 2 };
    let (stepped, _) = step(&some, support, false);
    let [(kernels, _), (slices, _)] =
        [false, true].map(|slices| audit(&some, &stepped, support, 0.4, slices));
    assert!(kernels == slices);
    let drawn = kernels.iter().filter(|audited| audited.drawn == 1).count();
    assert!((1..24).contains(&drawn), "{drawn} of 24");
    for share in [0.0, 1.5, f64::NAN] {
        let error = Auditor::<f16>::new(&device(), PROBLEM, support, share).expect_err("refused");
        assert!(error.to_string().contains("of the heads cannot be audited"), "{error}");
    }
}

/// A cache that audits has the outputs of one that does not, and says of the heads that it drew what they
/// skipped; in host memory as well.
#[test]
fn a_cache_reports_what_was_found() {
    let options = "k=1/block=16/local=1";
    let support = Support { k: 1, block: 16, local: 1 };
    let open =
        |more: &str, kernels: bool| cache_of(&format!("gather/{options}{more}"), 120, support, kernels);
    let mut plain = open("", false);
    let mut audited = [open("/audit=1", false), open("/audit=1", true), open("/audit=0.3", false)];
    let staged: Selection = format!("gather/{options}/staging=2/audit=1").parse().expect("a selection");
    let mut staged = staged.open(&device(), super::scheme::GEOMETRY, None, 120).expect("a cache");
    let (mut drawn, mut whole) = (0, None);
    for tokens in [60, 1, 1, 30, 1, 1, 1] {
        let bits = chunk(&mut plain, tokens);
        for cache in &mut audited {
            assert!(chunk(cache, tokens) == bits, "{tokens}");
        }
        assert!(chunk(&mut *staged, tokens) == bits, "{tokens}");
        if tokens > 1 {
            continue;
        }
        let reports = audited.each_ref().map(|cache| cache.report().expect("a report"));
        assert_eq!(reports[0], reports[1], "kernels and slices");
        assert_eq!(reports[0], staged.report().expect("a report"), "host memory");
        assert!(plain.report().expect("a report").heads.iter().all(|head| head.audit.is_none()));
        for (all, some) in reports[0].heads.iter().zip(&reports[2].heads) {
            let audit = all.audit.expect("drawn");
            // Random keys: a skipped token has about its share.
            assert!(audit.mass > 0.0 && audit.mass < 0.9 && audit.error > 0.0 && audit.norm > 0.0);
            assert!(some.audit.is_none_or(|of_some| of_some == audit));
            drawn += usize::from(some.audit.is_some());
        }
        whole = Summary::join(whole, Summary::of(&reports[0]));
    }
    assert!((3..32).contains(&drawn), "{drawn} of 40");
    let whole = whole.expect("steps");
    let line = whole.line();
    assert_eq!(whole.audited.expect("audited").heads, 40);
    assert!(line.contains("no bound on the skipped mass") && line.contains("audit of 40 heads"), "{line}");
    let refused = "gather:certified/audit=0.1".parse::<Selection>().expect_err("refused").to_string();
    assert!(refused.contains("bounds what every head skips"), "{refused}");
}
