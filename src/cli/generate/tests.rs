//! Texts that fail half-way.

use super::*;
use host::dense::DenseCache;
use host::kv::{self, Chunk, Held, New};
use host::model::Model;
use host::model::config::Architecture;
use host::model::synthetic::{self, Packing};
use host::{Buffer, Device, Stream};
use simt::emu::EmuOptions;

/// A dense cache that takes so many chunks, and then none.
struct Failing {
    inner: DenseCache,
    chunks: usize,
    /// Whether it has lost what it was given.
    lost: bool,
}

fn failure() -> kv::Error {
    kv::Error::Order { what: "the test's chunk", value: 0, limit: "it was to fail" }
}

// SAFETY: the cache inside names what it names.
unsafe impl KvCache for Failing {
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

    fn check(&mut self, stream: &Stream) -> kv::Result<()> {
        if self.lost { Err(failure()) } else { self.inner.check(stream) }
    }

    fn join(&mut self, stream: &Stream) -> kv::Result<usize> {
        self.inner.join(stream)
    }

    fn fork(&mut self, stream: &Stream, sequence: usize) -> kv::Result<usize> {
        self.inner.fork(stream, sequence)
    }

    fn leave(&mut self, stream: &Stream, sequence: usize) -> kv::Result<()> {
        self.inner.leave(stream, sequence)
    }

    fn begin(&mut self, stream: &Stream, chunk: Chunk) -> kv::Result<()> {
        self.chunks = self.chunks.checked_sub(1).ok_or_else(failure)?;
        self.inner.begin(stream, chunk)
    }

    fn append(&mut self, stream: &Stream, layer: usize, new: New<'_>) -> kv::Result<()> {
        self.inner.append(stream, layer, new)
    }

    fn attend(
        &mut self,
        stream: &Stream,
        layer: usize,
        queries: &Buffer<half::f16>,
        output: &mut Buffer<f32>,
    ) -> kv::Result<()> {
        self.inner.attend(stream, layer, queries, output)
    }

    fn commit(&mut self) {
        self.inner.commit();
    }
}

/// What was made before a failure is kept, and the failure is named.
#[test]
fn a_text_has_what_was_made_before_a_failure() {
    let model = synthetic::model(synthetic::tiny(Architecture::Llama), Packing::Q4_1, 1).expect("a model");
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), synthetic::file(&model).to_bytes()).expect("written");
    let model = Model::open(file.path()).expect("a model");
    let device = Device::cpu(EmuOptions::default());
    let mut runner = Runner::new(&model, &device).expect("a runner");
    let text = Text {
        tokenizer: model.tokenizer().expect("a tokenizer"),
        choice: Choice::Greedy,
        context: model.config.context,
        max_tokens: 6,
        streams: false,
        interrupt: Interrupt::default(),
    };
    let mut write = |chunks: usize, lost: bool| {
        let inner = DenseCache::new(&device, (&model.config).into(), 16).expect("a cache");
        let mut cache = Failing { inner, chunks, lost };
        let done = text.write(&mut runner, &mut cache, &[5, 6, 7]);
        (done, cache.tokens())
    };
    let tokens = |done: &Done| done.steps.iter().map(|step| step.token).collect::<Vec<_>>();
    let (whole, _) = write(usize::MAX, false);
    assert!(whole.failure.is_none() && whole.finish == Finish::MaxTokens);
    assert_eq!(whole.steps.len(), 6);
    // The prompt is a chunk, and each token but the last one more.
    for (chunks, lost) in [(0, false), (1, false), (4, false), (6, true)] {
        let (done, held) = write(chunks, lost);
        assert!(done.finish == Finish::Failed);
        let failure = done.failure.as_ref().expect("a failure");
        assert!(failure.to_string().contains("it was to fail"), "{failure}");
        assert_eq!(tokens(&done), tokens(&whole)[..chunks]);
        assert_eq!(held, if chunks == 0 { 0 } else { 2 + chunks });
        assert!(whole.text.starts_with(&done.text) && (done.read > 0) == (chunks > 0));
    }
}
