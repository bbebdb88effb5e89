#!/usr/bin/env python3
"""A prompt of a Llama model in PyTorch: from its tokens to the last one's logits, random weights in 16 bits.

The sizes are those of `ferrokv bench model --synthetic`. RMS norms, rotation, causal attention with grouped
heads by scaled_dot_product_attention, SiLU gates, keys and values of all tokens kept; one sequence, all
tokens at once. Every row is captured in a CUDA graph and replayed, as in common.py. `bytes` are those of the
weights. Configurations:

    eager      operator by operator
    compiled   torch.compile of a layer, which fuses what is between products (asked for with --compile)

`checks` compares a small model's logits in 16 bits with plain f64, a head and a pair at a time.
"""

import argparse
import math
import sys

import common
from common import first_line

PROGRAM = "prompt peers"
# Layers, hidden, ffn, query heads, KV heads, vocabulary, RoPE's base.
SHAPES = {
    "llama-3.1-8b": (32, 4096, 14336, 32, 8, 128256, 500000.0),
    "qwen2.5-7b": (28, 3584, 18944, 28, 4, 152064, 1000000.0),
}
HEAD_DIM = 128
SECONDS = 3.0  # of a row
REPLAYS = (3, 20)


class Model:
    def __init__(self, shape, dtype, device="cuda"):
        self.layers, self.hidden, ffn, self.q_heads, self.kv_heads, vocab, self.base = shape
        generator = torch.Generator(device=device).manual_seed(1)

        def matrix(rows, columns):
            weights = torch.randn(rows, columns, device=device, dtype=torch.float32, generator=generator)
            return (weights * columns ** -0.5).to(dtype)

        width = (self.q_heads + 2 * self.kv_heads) * HEAD_DIM
        self.embedding = matrix(vocab, self.hidden)
        self.head = matrix(vocab, self.hidden)
        self.weights = [(matrix(width, self.hidden), matrix(self.hidden, self.q_heads * HEAD_DIM),
                         matrix(2 * ffn, self.hidden), matrix(self.hidden, ffn))
                        for _ in range(self.layers)]
        self.norm = torch.ones(self.hidden, device=device, dtype=dtype)
        self.run_layer = self.layer

    def bytes(self):
        matrices = [self.embedding, self.head] + [m for layer in self.weights for m in layer]
        return sum(m.numel() * m.element_size() for m in matrices)

    def angles(self, tokens):
        """Cosines and sines [tokens, head_dim / 2]."""
        device, dtype = self.norm.device, self.norm.dtype
        steps = torch.arange(0, HEAD_DIM, 2, device=device, dtype=torch.float64) / HEAD_DIM
        angles = torch.arange(tokens, device=device, dtype=torch.float64)[:, None] * self.base ** -steps
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def layer(self, x, weights, cos, sin):
        into, out, gates, down = weights
        tokens = x.shape[0]
        projected = functional.linear(functional.rms_norm(x, (self.hidden,), self.norm, 1e-5), into)
        q, k, v = (part.view(tokens, -1, HEAD_DIM).transpose(0, 1) for part in projected.split(
            [self.q_heads * HEAD_DIM, self.kv_heads * HEAD_DIM, self.kv_heads * HEAD_DIM], 1))

        def rotated(rows):
            a, b = rows.chunk(2, 2)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], 2)

        q, k = rotated(q), rotated(k)
        attended = functional.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        x = x + functional.linear(attended.transpose(0, 1).reshape(tokens, -1), out)
        gate, up = functional.linear(
            functional.rms_norm(x, (self.hidden,), self.norm, 1e-5), gates).chunk(2, 1)
        return x + functional.linear(functional.silu(gate) * up, down), k, v

    def logits(self, tokens, cos, sin, kept):
        x = self.embedding[tokens]
        for number, weights in enumerate(self.weights):
            x, k, v = self.run_layer(x, weights, cos, sin)
            if kept is not None:
                kept[number, 0].copy_(k)
                kept[number, 1].copy_(v)
        last = functional.rms_norm(x[-1:], (self.hidden,), self.norm, 1e-5)
        return functional.linear(last, self.head)


def plain(model, ids):
    """The last token's logits in f64, written to be obvious: a head, a query and a pair at a time."""
    tokens, half = len(ids), HEAD_DIM // 2
    x = model.embedding.double()[ids]

    def normed(rows):
        return rows / (rows.pow(2).mean(1, keepdim=True) + 1e-5).sqrt()

    def rotated(rows):  # [tokens, HEAD_DIM]
        out = rows.clone()
        for position in range(tokens):
            for i in range(half):
                angle = position * model.base ** (-2 * i / HEAD_DIM)
                a, b = rows[position, i].item(), rows[position, i + half].item()
                out[position, i] = a * math.cos(angle) - b * math.sin(angle)
                out[position, i + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    for into, out, gates, down in model.weights:
        projected = normed(x) @ into.double().T
        heads = [projected[:, h * HEAD_DIM:(h + 1) * HEAD_DIM] for h in range(model.q_heads + 2 * model.kv_heads)]
        group, attended = model.q_heads // model.kv_heads, []
        keys = [rotated(rows) for rows in heads[model.q_heads:model.q_heads + model.kv_heads]]
        values = heads[model.q_heads + model.kv_heads:]
        for h in range(model.q_heads):
            logits = rotated(heads[h]) @ keys[h // group].T / math.sqrt(HEAD_DIM)
            future = torch.ones_like(logits).triu(1).bool()
            attended.append(torch.softmax(logits.masked_fill(future, -math.inf), 1) @ values[h // group])
        x = x + torch.cat(attended, 1) @ out.double().T
        gate, up = (normed(x) @ gates.double().T).chunk(2, 1)
        x = x + (gate / (1 + (-gate).exp()) * up) @ down.double().T
    return normed(x[-1:]) @ model.head.double().T


def check():
    """A small model's logits in 16 bits against `plain` in f64. The bound is an estimate: 16 bits' unit times the
    root of the number of roundings on a path, some 24, times four. A wrong mask, rotation or head is beyond it."""
    small = Model((2, 256, 512, 4, 2, 512, 10000.0), torch.bfloat16)
    ids = torch.arange(40, device="cuda") * 7 % 512
    got = small.logits(ids, *small.angles(40), None).double().cpu()
    for name in ("embedding", "head"):
        setattr(small, name, getattr(small, name).cpu())
    small.weights = [tuple(m.cpu() for m in layer) for layer in small.weights]
    want = plain(small, ids.cpu())
    error = float((got - want).abs().max() / want.abs().max())
    return {"peer": "torch", "config": "eager", "dtype": "bf16", "max_relative_error": error,
            "within_bound": error <= 4 * 2.0 ** -8 * 24 ** 0.5}


def measure(bench, name, tokens, compiled):
    if bench.is_late():
        bench.skipped.append(f"torch prompt {name} {tokens}: no time left")
        return
    try:
        model = Model(SHAPES[name], torch.bfloat16)
    except torch.cuda.OutOfMemoryError:
        bench.errors.append(f"torch prompt {name} {tokens}: the device has too little memory")
        return
    cos, sin = model.angles(tokens)
    ids = torch.randint(model.embedding.shape[0], (tokens,), device="cuda")
    kept = torch.empty(model.layers, 2, model.kv_heads, tokens, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    for config in ("eager", "compiled") if compiled else ("eager",):
        label = f"torch prompt {config} {name} {tokens}"
        if bench.is_late():
            bench.skipped.append(f"{label}: no time left")
            continue
        if config == "compiled":
            model.run_layer = torch.compile(model.layer, dynamic=False)
        calls = [lambda: model.logits(ids, cos, sin, kept)]
        try:
            timing = common.time_calls(calls, SECONDS, REPLAYS)
        except RuntimeError as error:  # out of memory, or what a compiler says
            bench.errors.append(f"{label}: {first_line(error)}")
            continue
        about = {"peer": "torch", "op": "prompt", "dtype": "bf16", "model": name, "tokens": tokens}
        bench.add(label, about, model.bytes(), calls, timing, config=config)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the report there (else stdout)")
    parser.add_argument("--model", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--tokens", default="8192", help="lengths of prompts, a,b")
    parser.add_argument("--seconds", type=float, default=120.0, help="start no row after this many seconds")
    parser.add_argument("--compile", action="store_true", help="also compiled, which takes a while")
    args = parser.parse_args()
    try:
        lengths = [int(part) for part in args.tokens.split(",")]
        if min(lengths) < 1:
            raise ValueError
    except ValueError:
        parser.error(f"--tokens {args.tokens}: expected positive integers a,b")
    global torch, functional
    torch = common.import_torch(PROGRAM)
    import torch.nn.functional as functional
    common.require_gpu(PROGRAM)
    with torch.no_grad():
        bench = common.Rows(args.seconds)
        checks = [check()]
        for tokens in lengths:
            measure(bench, args.model, tokens, args.compile)
            torch.cuda.empty_cache()
    common.finish(PROGRAM, args.json, bench, checks, {}, "skipped, see `skipped`",
                  "the model is outside its error bound")


if __name__ == "__main__":
    sys.exit(main())
