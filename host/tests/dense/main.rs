//! Dense decode attention: one property over the emulator and, where there is one, a GPU, judged by the
//! formula in f64.

mod append;
mod properties;
mod relations;

use ferrokv::host::attention::{self, BlockTable, PagedPool};
use ferrokv::host::dense::sample::{Input, Sample};
use ferrokv::host::dense::{self, Plan, Problem};
use ferrokv::host::{Buffer, Device, Stream};
use ferrokv::simt::emu::EmuOptions;
use half::f16;
use std::sync::OnceLock;

/// Something to vary.
const PROBLEM: Problem =
    Problem { sequences: 1, q_heads: 8, kv_heads: 2, head_dim: 64, query_tokens: 1, max_tokens: 100 };

/// The emulator, and the GPU where there is one.
fn devices() -> &'static [Device] {
    static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();
    DEVICES.get_or_init(|| {
        let mut devices = vec![Device::cpu(EmuOptions::default())];
        match Device::cuda(0, ferrokv::ptx()) {
            Ok(gpu) => devices.push(gpu),
            Err(error) => println!("without a GPU: {error}"),
        }
        devices
    })
}

#[test]
fn problems_without_a_kernel_are_refused_by_name() {
    let refused = [
        (Problem { sequences: 0, ..PROBLEM }, "sequences is 0; give the problem at least one"),
        (Problem { max_tokens: 0, ..PROBLEM }, "max_tokens is 0"),
        (Problem { query_tokens: 0, ..PROBLEM }, "query_tokens is 0"),
        (Problem { kv_heads: 0, ..PROBLEM }, "kv_heads is 0"),
        (
            Problem { head_dim: 80, ..PROBLEM },
            "there is no kernel for head_dim 80; there are 64, 96, 128 and 256",
        ),
        (Problem { q_heads: 7, ..PROBLEM }, "7 query heads are no multiple of 2 KV heads"),
        (Problem { q_heads: 34, ..PROBLEM }, "17 query heads on a KV head are too many; up to 16"),
        (Problem { sequences: 65536, ..PROBLEM }, "a number of sequences of 65536 is too large: 65535"),
        (Problem { query_tokens: u32::MAX, ..PROBLEM }, "groups of eight query rows"),
        (Problem { max_tokens: u32::MAX, ..PROBLEM }, "max_tokens plus query_tokens of 4294967296"),
        (Problem { sequences: 65535, max_tokens: 1 << 21, ..PROBLEM }, "sequences times blocks"),
    ];
    let device = Device::cpu(EmuOptions::default());
    for (problem, part) in refused {
        let error = Plan::<f16>::new(&device, problem).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
        assert_eq!(error.lines().count(), 1);
    }
    for head_dim in dense::HEAD_DIMS {
        assert!(Problem { head_dim, ..PROBLEM }.checked().is_ok());
    }
}

#[test]
fn a_table_takes_blocks_of_the_pool_only() {
    let device = Device::cpu(EmuOptions::default());
    let mut table = BlockTable::new(&device, 2, 3, 5).unwrap();
    table.set(1, &[4, 0], 32).unwrap();
    let before = (table.blocks().to_vec().unwrap(), table.lengths().to_vec().unwrap());
    let mut refuse = |sequence, blocks: &[u32], length, part: &str| {
        let error = table.set(sequence, blocks, length).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    };
    refuse(2, &[], 0, "there is no sequence 2: the table has 2");
    refuse(1, &[5], 1, "block 5 is not in the pool, which has 5");
    refuse(1, &[0, 1, 2, 3], 1, "4 blocks do not fit a row of 3");
    refuse(1, &[0, 1], 33, "33 tokens do not fit 2 blocks of 16");
    assert_eq!((table.blocks().to_vec().unwrap(), table.lengths().to_vec().unwrap()), before);
    assert_eq!(before, (vec![0, 0, 0, 4, 0, 0], vec![0, 32]));
    assert!(matches!(BlockTable::new(&device, 1 << 16, 1 << 16, 1), Err(attention::Error::Table { .. })));
    assert!(matches!(PagedPool::<f16>::new(&device, 0, 1, 64), Err(attention::Error::Pool { .. })));
    assert!(matches!(
        PagedPool::<f16>::new(&device, 1 << 16, 1 << 16, 64),
        Err(attention::Error::Pool { .. })
    ));
    let lone = [f16::ONE; 64];
    let error = PagedPool::from_slices(&device, 1, 64, &lone, &lone).unwrap_err();
    assert!(matches!(error, attention::Error::PoolLength { block: 1024, .. }), "{error}");
}

#[test]
fn what_belongs_to_another_problem_is_refused_before_the_launch() {
    let device = Device::cpu(EmuOptions::default());
    let stream = Stream::new(&device).unwrap();
    let mut plan = Plan::<f16>::new(&device, PROBLEM).unwrap();
    let queries = Buffer::from_slice(&device, &[f16::ONE; 8 * 64]).unwrap();
    let pool = PagedPool::<f16>::new(&device, 7, 2, 64).unwrap();
    let table = BlockTable::new(&device, 1, 7, 7).unwrap();
    let mut out = plan.allocate().unwrap();
    plan.run(&stream, &queries, &pool, &table, &mut out).unwrap();

    let mut refuse = |queries: &Buffer<f16>, pool: &PagedPool<f16>, table: &BlockTable, part: &str| {
        let error = plan.run(&stream, queries, pool, table, &mut out).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    };
    let short = Buffer::from_slice(&device, &[f16::ONE; 64]).unwrap();
    refuse(&short, &pool, &table, "the buffer of queries has 64 elements, this problem needs 512");
    let narrow = PagedPool::<f16>::new(&device, 7, 1, 64).unwrap();
    refuse(&queries, &narrow, &table, "the pool's number of KV heads is 1, the plan's is 2");
    let wide = PagedPool::<f16>::new(&device, 7, 2, 96).unwrap();
    refuse(&queries, &wide, &table, "the pool's head_dim is 96, the plan's is 64");
    let small = PagedPool::<f16>::new(&device, 6, 2, 64).unwrap();
    refuse(&queries, &small, &table, "the pool's number of blocks is 6, the plan's is 7");
    let others = BlockTable::new(&device, 2, 7, 7).unwrap();
    refuse(&queries, &pool, &others, "the table's number of sequences is 2");
    let long = BlockTable::new(&device, 1, 8, 7).unwrap();
    refuse(&queries, &pool, &long, "the table's blocks of a sequence is 8");
    let mut swapped = PagedPool::<f16>::new(&device, 7, 2, 64).unwrap();
    *swapped.both_mut().0 = Buffer::new(&device, 16).unwrap();
    refuse(&queries, &swapped, &table, "the pool's keys has 16 elements");
}

#[test]
fn a_captured_run_follows_lengths_and_queries() {
    for device in devices() {
        let sample = Sample::<f16>::new(PROBLEM, &[90], Input::Normal, 3);
        let paged = sample.paged(5, 2);
        let stream = Stream::new(device).unwrap();
        let mut plan = Plan::<f16>::new(device, PROBLEM).unwrap();
        let pool = PagedPool::from_slices(device, 2, 64, &paged.keys, &paged.values).unwrap();
        let mut table = BlockTable::new(device, 1, 7, pool.blocks()).unwrap();
        let mut queries = Buffer::from_slice(device, &sample.queries).unwrap();
        let mut out = plan.allocate().unwrap();
        let (graph, recorded) =
            stream.capture(|stream| Ok(plan.run(stream, &queries, &pool, &table, &mut out))).unwrap();
        recorded.unwrap();
        assert_eq!(graph.len(), 1, "one launch");
        let exec = graph.instantiate().unwrap();
        for (length, factor) in [(90, 1.0), (33, -1.0), (90, 0.5)] {
            let asked: Vec<f16> = sample.queries.iter().map(|q| f16::from_f32(q.to_f32() * factor)).collect();
            queries.write(0, &asked).unwrap();
            table.set(0, &paged.tables[0], length).unwrap();
            // SAFETY: plan, queries, pool, table and outputs live.
            unsafe { exec.launch(&stream) }.unwrap();
            stream.synchronize().unwrap();
            let replayed = (out.output.to_vec().unwrap(), out.lse.to_vec().unwrap());
            // The same without a graph.
            plan.run(&stream, &queries, &pool, &table, &mut out).unwrap();
            stream.synchronize().unwrap();
            assert_eq!(replayed, (out.output.to_vec().unwrap(), out.lse.to_vec().unwrap()));
            assert!(replayed.0.iter().any(|x| *x != 0.0));
        }
    }
}
