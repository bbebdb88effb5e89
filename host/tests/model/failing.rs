//! Steps that fail half-way: a decoder gives no more tokens after one.

use host::dense::DenseCache;
use host::kv::{Chunk, Held, KvCache, New, Result};
use host::model::config::Architecture;
use host::model::forward::{Error, Runner};
use host::model::kernels::Choice;
use host::model::synthetic::{self, Packing};
use host::{Buffer, Device, Stream};
use simt::emu::EmuOptions;
use simt::{GlobalMut, LaunchShape, kernel};

/// Writes behind its argument's only element if that is not 0.
#[kernel]
fn trip(wire: GlobalMut<u32>) {
    if wire.load(0) != 0 {
        wire.store(1, 0);
    }
}

/// A cache whose last layer has a launch more, which faults when the wire is set: the others hold the token
/// then.
struct Tripping {
    inner: DenseCache,
    wire: GlobalMut<u32>,
}

// SAFETY: the cache inside names what it names, and the wire outlives this one.
unsafe impl KvCache for Tripping {
    fn scheme(&self) -> &'static str {
        self.inner.scheme()
    }

    fn held(&self) -> Held<'_> {
        self.inner.held()
    }

    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }

    fn step_bytes(&self) -> u64 {
        self.inner.step_bytes()
    }

    fn join(&mut self, stream: &Stream) -> Result<usize> {
        self.inner.join(stream)
    }

    fn fork(&mut self, stream: &Stream, sequence: usize) -> Result<usize> {
        self.inner.fork(stream, sequence)
    }

    fn leave(&mut self, stream: &Stream, sequence: usize) -> Result<()> {
        self.inner.leave(stream, sequence)
    }

    fn begin(&mut self, stream: &Stream, chunk: Chunk) -> Result<()> {
        self.inner.begin(stream, chunk)
    }

    fn append(&mut self, stream: &Stream, layer: usize, new: New<'_>) -> Result<()> {
        if layer + 1 == self.geometry().layers {
            // SAFETY: one thread over a buffer that the test keeps; what it does outside is what the emulator
            // refuses.
            unsafe {
                stream.launch(&trip::kernel(), LaunchShape::new(1, 1), trip::Args { wire: self.wire })
            }?;
        }
        self.inner.append(stream, layer, new)
    }

    fn attend(
        &mut self,
        stream: &Stream,
        layer: usize,
        queries: &Buffer<half::f16>,
        output: &mut Buffer<f32>,
    ) -> Result<()> {
        self.inner.attend(stream, layer, queries, output)
    }

    fn commit(&mut self) {
        self.inner.commit();
    }
}

#[test]
fn a_decoder_ends_with_the_step_that_failed() {
    let device = Device::cpu(EmuOptions::default());
    let model = synthetic::model(synthetic::tiny(Architecture::Llama), Packing::Q4_1, 11).expect("a model");
    let choice = Choice::Greedy;
    for (way, mut runner) in [
        ("captured", Runner::of_kernels(&model, &device, 8).expect("a runner")),
        ("one by one", Runner::new(&model, &device).expect("a runner")),
    ] {
        let mut wire = Buffer::from_slice(&device, &[0u32]).expect("a buffer");
        let inner = DenseCache::new(&device, (&model.config).into(), 16).expect("a cache");
        let mut cache = Tripping { inner, wire: wire.global_mut() };
        let first = runner.prefill(&[1, 2, 3], &mut cache, choice).expect("a token");
        let mut decoder = runner.decoder(first, &mut cache, choice).expect("a decoder");
        assert_eq!(decoder.graph_len().is_some(), way == "captured");
        decoder.next().expect("the fourth");
        wire.write(0, &[1]).expect("written");
        let error = decoder.next().expect_err("a fault").to_string();
        assert!(error.contains("trip"), "{way}: {error}");
        // Nothing is wrong any more but what the cache holds.
        wire.write(0, &[0]).expect("written");
        for _ in 0..2 {
            let error = decoder.next().expect_err("no further step");
            assert!(matches!(error, Error::Failed), "{way}: {error}");
        }
        assert_eq!(decoder.cache().tokens(), 4, "{way}");
    }
}
