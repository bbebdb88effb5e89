//! How many of the blocks that `gather` chooses over a real text a staging pool has already: by its rule,
//! least recently used, and by the best rule there can be, which knows the lists ahead.
//!
//! ```text
//! ferrokv capture --layers 0,7,15,22,29 --tokens 8000 --queries 1000 -o CACHE
//! cargo run --release -p ferrokv-host --example staged_blocks -- CACHE K BLOCK LOCAL
//! ```
//!
//! The lists are those of decoding the text's last tokens one by one, all layers and KV heads of the file; no
//! GPU is used.

use half::f16;
use host::attention::StepProblem;
use host::gather::staging::trace::{Counts, Lru, optimum};
use host::gather::{Bounds, FoldHandles, Handles, Plan, Support};
use host::tensor_file::{Dtype, TensorFile};
use host::{Buffer, Device, Stream};
use simt::emu::EmuOptions;
use std::error::Error;
use std::path::Path;

/// Keys of a layer in blocks of 16 tokens, [blocks, kv_heads, 16, head_dim].
fn blocks(keys: &[f16], tokens: usize, heads: usize, dim: usize) -> Vec<f16> {
    let mut pool = vec![f16::ZERO; tokens.div_ceil(16) * 16 * heads * dim];
    for (row, key) in keys.chunks_exact(dim).enumerate() {
        let (token, head) = (row / heads, row % heads);
        pool[((token / 16 * heads + head) * 16 + token % 16) * dim..][..dim].copy_from_slice(key);
    }
    pool
}

/// The far blocks of each step's list, by KV head.
fn lists(
    keys: &[f16],
    queries: &[f16],
    problem: StepProblem,
    support: Support,
) -> Result<Vec<Vec<Vec<u32>>>, Box<dyn Error>> {
    let device = Device::cpu(EmuOptions::default());
    let stream = Stream::new(&device)?;
    let StepProblem { kv_heads, q_heads, head_dim, max_tokens, .. } = problem;
    let row = (q_heads * head_dim) as usize;
    let steps = queries.len() / row;
    let first = max_tokens as usize - steps;
    let pool = blocks(keys, max_tokens as usize, kv_heads as usize, head_dim as usize);
    let pool = Buffer::from_slice(&device, &pool)?;
    let table = Buffer::from_slice(&device, &(0..max_tokens.div_ceil(16)).collect::<Vec<u32>>())?;
    let mut bounds = Bounds::<f16>::new(&device, problem, support)?;
    let mut plan = Plan::<f16>::new(&device, problem, support)?;
    let mut output = Buffer::<f32>::zeroed(&device, row)?;
    let mut lse = Buffer::<f32>::zeroed(&device, q_heads as usize)?;
    let mut lists = vec![Vec::new(); kv_heads as usize];
    for step in 0..steps {
        let (begin, end) = (if step == 0 { 0 } else { first + step }, first + step + 1);
        let position = Buffer::from_slice(&device, &[begin as u32])?;
        let length = Buffer::from_slice(&device, &[end as u32])?;
        let query = Buffer::from_slice(&device, &queries[step * row..][..row])?;
        let folded = FoldHandles {
            keys: pool.global(),
            table: table.global(),
            positions: position.global(),
            lengths: length.global(),
        };
        let handles = Handles {
            queries: query.global(),
            keys: pool.global(),
            values: pool.global(),
            bounds: bounds.words().global(),
            table: table.global(),
            lengths: length.global(),
            output: output.global_mut(),
            lse: lse.global_mut(),
        };
        // SAFETY: buffers of the emulator, in which a table of all blocks in order names those of the pool.
        unsafe {
            bounds.fold_on(&stream, (0, (end - begin) as u32), true, folded)?;
            plan.select_on(&stream, true, &handles)?;
        }
        let near = (end as u32).div_ceil(support.block).saturating_sub(support.local);
        let chosen = plan.chosen().list.to_vec()?;
        for (list, lists) in chosen.chunks_exact(chosen.len() / kv_heads as usize).zip(&mut lists) {
            lists.push(list.iter().copied().take_while(|block| *block < near).collect());
        }
    }
    Ok(lists)
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [path, numbers @ ..] = &arguments[..] else {
        return Err("give it a file of `ferrokv capture`".into());
    };
    let numbers = numbers.iter().map(|number| number.parse()).collect::<Result<Vec<u32>, _>>()?;
    let [k, block, local] = numbers[..] else {
        return Err("give it K, BLOCK and LOCAL behind the file".into());
    };
    let support = Support { k, block, local }.checked()?;
    let mut file = TensorFile::open(Path::new(path))?;
    let names: Vec<String> =
        file.entries().keys().filter_map(|name| name.strip_suffix(".key")).map(String::from).collect();
    let mut all = Vec::new();
    for name in &names {
        let shape = |file: &TensorFile, what: &str| -> Result<[usize; 3], Box<dyn Error>> {
            let shape = file.entry(&format!("{name}.{what}"))?.shape.clone();
            Ok(shape.try_into().map_err(|_| "a tensor of a capture has three dimensions")?)
        };
        let ([tokens, kv_heads, head_dim], [_, q_heads, _]) = (shape(&file, "key")?, shape(&file, "query")?);
        let [kv_heads, q_heads, head_dim, max_tokens] =
            [kv_heads, q_heads, head_dim, tokens].map(|n| n as u32);
        let problem = StepProblem { sequences: 1, q_heads, kv_heads, head_dim, max_tokens };
        let keys = file.read(&format!("{name}.key"), Dtype::F16)?;
        let queries = file.read(&format!("{name}.query"), Dtype::F16)?;
        all.extend(lists(&keys, &queries, problem, support)?);
    }
    let steps = all.first().map_or(0, Vec::len);
    println!(
        "{}: {} layers, {} lists of {steps} steps, k={k} block={block} local={local}",
        path,
        names.len(),
        all.len()
    );
    println!(
        "staging  least recently used  optimum  blocks fetched a step, of each  (shares of far blocks that were staged)"
    );
    for share in [4, 5, 6, 8, 12, 16, 24, 32] {
        let slots = ((k + 1) * share / 4) as usize;
        let mut counts = [Counts::default(); 2];
        for lists in &all {
            let mut lru = Lru::new(slots);
            counts[0] = lists.iter().map(|list| lru.step(list)).fold(counts[0], Counts::and);
            counts[1] = counts[1].and(optimum(lists, slots));
        }
        let [own, best] = counts;
        let fetched = counts.map(|counts| counts.misses as f64 / (steps * all.len()) as f64);
        let [a, b] = [own, best].map(Counts::hit_share);
        println!("{slots:7}  {a:19.3}  {b:7.3}  {:.2} {:.2}", fetched[0], fetched[1]);
    }
    Ok(())
}
