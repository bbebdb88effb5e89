//! Attention over a quantized cache, with a bound on every head's error.
//!
//! Fills a cache with a prompt, decodes a few tokens, and shows for each head of the last step what was used,
//! what its error is at most, and what it is, by the formula in f64.
//!
//! `cargo run --release --example certified`

use ferrokv::host::attention::oracle::{Sequence, rows};
use ferrokv::host::certified::{Extents, Geometry, Policy, Result, Rung, StepPlan, StepProblem, TieredCache};
use ferrokv::host::{Buffer, Device, Stream};
use ferrokv::simt::emu::EmuOptions;
use half::f16;

const PROMPT: usize = 300;
const KV_HEADS: usize = 2;
const Q_HEADS: usize = 8;
const DIM: usize = 64;

/// Rows of `count` tokens, [tokens, heads, 64].
fn made_up(count: usize, heads: usize, seed: f32) -> Vec<f16> {
    (0..count * heads * DIM).map(|i| f16::from_f32(2.0 * (i as f32 * seed + (i % 7) as f32).sin())).collect()
}

fn main() -> Result<()> {
    let (device, no_gpu) = Device::auto(EmuOptions::default(), ferrokv::ptx());
    no_gpu.inspect(|reason| println!("on the emulator: {reason}"));
    let stream = Stream::new(&device)?;
    let geometry = Geometry::new(KV_HEADS as u32, DIM as u32)?;
    let extents =
        Extents { geometry, blocks: 512, sequences: 1, max_tokens: 512, key_slots: 16, value_slots: 16 };
    let mut cache = TieredCache::<f16>::new(&device, extents)?;
    let upload = |rows: &[f16]| Buffer::from_slice(&device, rows);

    let sequence = cache.start_sequence()?;
    let (keys, values) = (made_up(PROMPT, KV_HEADS, 0.37), made_up(PROMPT, KV_HEADS, 0.73));
    cache.prefill(&stream, sequence, &upload(&keys)?, &upload(&values)?)?;
    let problem = StepProblem {
        sequences: 1,
        q_heads: Q_HEADS as u32,
        kv_heads: KV_HEADS as u32,
        head_dim: DIM as u32,
        max_tokens: extents.max_tokens,
    };
    let mut plan = StepPlan::new(&device, problem, &Policy::SOUND)?;
    let mut out = plan.allocate()?;
    let mut queries = Vec::new();
    for step in 0..10 {
        let new = [0.37, 0.73].map(|seed| made_up(1, KV_HEADS, seed + step as f32));
        cache.append(&stream, &upload(&new[0])?, &upload(&new[1])?)?;
        queries = made_up(1, Q_HEADS, 0.11 + step as f32);
        cache.attend(&stream, &mut plan, &upload(&queries)?, &mut out)?;
    }
    cache.check(&stream)?;

    // By head and then by token, as the oracle wants it.
    let [keys, values] = cache.read(&stream, sequence)?.map(|all| {
        let tokens = all.chunks_exact(KV_HEADS * DIM);
        let of = |head: usize| tokens.clone().flat_map(move |token| &token[head * DIM..(head + 1) * DIM]);
        (0..KV_HEADS).flat_map(of).map(|x| x.to_f64()).collect::<Vec<f64>>()
    });
    let length = keys.len() / (KV_HEADS * DIM);
    let asked: Vec<f64> = queries.iter().map(|x| x.to_f64()).collect();
    let truth = Sequence::decode(length, Q_HEADS, KV_HEADS, DIM).attend(
        &asked,
        rows(&keys, length, DIM),
        rows(&values, length, DIM),
    );
    let (output, certificates) = (out.output.to_vec()?, out.certificates.to_vec()?);
    println!(
        "{length} tokens: {} bytes on the GPU, {} on the host",
        cache.memory().gpu(),
        cache.memory().host
    );
    for (head, certificate) in certificates.iter().enumerate() {
        let own = head * DIM..(head + 1) * DIM;
        let errors = output[own.clone()].iter().zip(&truth.output[own]).map(|(o, t)| f64::from(*o) - t);
        let error = errors.map(|e| e * e).sum::<f64>().sqrt();
        let bound = f64::from(certificate.bound());
        let rung = Rung::of(certificate.rung());
        println!("head {head}: {rung:9}  error {error:.2e} of at most {bound:.2e}");
        assert!(error <= bound, "head {head} is further off than its bound");
    }
    Ok(())
}
