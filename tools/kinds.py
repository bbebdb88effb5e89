"""One function a table: the lines of Markdown that records make. The names are those in docs/results/current.toml."""

import math
import re
import statistics
from collections import defaultdict

from beside import bare as plain
from beside import beside_each_other, by_layer, equal_bytes, of_a_text, other_shapes
from models import model, model_batches, model_ends, prompts
from records import DEVICES, Wrong, facts, interval, losing, ratio, scheme, table, tokens

# --- INT8 -----------------------------------------------------------------------------------------------------------

OPERATIONS = [
    ("scales", "scales"),
    ("quantize", "quantize"),
    ("dequantize", "dequantize"),
    ("scales_quantize", "scales and codes"),
    ("block_quantize", "blocks of 16"),
]


def int8_rows(record, tokens, channels, op, place="gpu"):
    rows = record.rows(tokens=tokens, channels=channels, op=op)
    ours = [row for row in rows if row["peer"] == "ferrokv" and row.get("place") == place]
    return ours, {row["peer"]: row for row in rows if row["peer"] not in ("ferrokv", "cuda driver")}


def fastest(rows):
    return min(rows, key=lambda row: row["median_us"])


def int8_h200(records):
    (record,) = records
    size = {"tokens": 131072, "channels": 8192}
    found = {}
    for op in ("quantize", "dequantize", "block_quantize", "block_dequantize", "scales", "scales_quantize"):
        for row in int8_rows(record, *size.values(), op)[0]:
            found[op, row["variant"]] = row

    def pair(op, variant):
        row = found.get((op, variant))
        return (f"{row['median_us']:.0f}", ratio(row["fraction"])) if row else ("–", "–")

    rows = [(f"`{variant}`", *pair("quantize", variant), *pair("dequantize", variant))
            for variant in ("naive", "tiled", "coarsened", "vectorized", "rows", "wide")]
    rows.append(("`fused`, blocks of 16 tokens", *pair("block_quantize", "fused"), *pair("block_dequantize", "fused")))
    for op, name in (("scales", "column scales"), ("scales_quantize", "column scales and codes")):
        row = fastest(int8_rows(record, *size.values(), op)[0])
        rows.append((name, f"{row['median_us']:.0f}", ratio(row["fraction"]), "–", "–"))
    return table(("131072 × 8192, f32", "to codes, µs", "of the ceiling", "from codes, µs", "of the ceiling"), rows)


def int8_peers_h200(records):
    sizes = []
    for record in records:
        for row in record.data["rows"]:
            size = row["tokens"], row["channels"]
            if size not in sizes:
                sizes.append(size)
    rows = []
    for size in sorted(sizes, key=lambda size: (-size[0] * size[1], -size[1])):
        for record in records:
            cells = []
            for op, _ in OPERATIONS:
                ours, peers = int8_rows(record, *size, op)
                if ours and "torch.compile" in peers:
                    best = fastest(ours)["median_us"]
                    triton = peers.get("triton")
                    cells.append(f"{peers['torch.compile']['median_us'] / best:.2f} · "
                                 + ratio(triton and triton["median_us"] / best))
            if len(cells) == len(OPERATIONS):
                rows.append((f"{size[0]} × {size[1]}", *cells, str(records.index(record) + 1)))
                break
    return table(("matrix", *(name for _, name in OPERATIONS), "record"), rows)


def int8_h100(records):
    (record,) = records
    rows = []
    for op, name in OPERATIONS:
        ours, peers = int8_rows(record, 131072, 8192, op)
        best = fastest(ours)
        torch = peers["torch.compile"]["median_us"]
        triton = peers.get("triton")
        rows.append((f"{name}, `{best['variant']}`", f"{best['median_us'] / 1000:.3f}", ratio(best["fraction"]),
                     f"{torch / 1000:.3f}", ratio(torch / best["median_us"]),
                     f"{triton['median_us'] / 1000:.3f}" if triton else "–",
                     ratio(triton and triton["median_us"] / best["median_us"])))
    return table(("131072 × 8192, f32", "ours, ms", "of the ceiling", "torch.compile, ms", "×", "Triton, ms", "×"),
                 rows)


def int8_cpu(records):
    (record,) = records
    sizes = [(32768, 1024), (131072, 256)]
    operations = OPERATIONS[:3] + [("block_quantize", "blocks of 16: scales and codes"),
                                   ("block_dequantize", "blocks of 16: dequantize")]
    rows = []
    for op, name in operations:
        cells = []
        for size in sizes:
            ours = [row for row in int8_rows(record, *size, op, "cpu")[0] if row["variant"] == "simd"]
            cells.append(ratio(fastest(ours)["fraction"]))
        rows.append((name, *cells))
    cells = []
    for size in sizes:
        (paper,) = [row for row in int8_rows(record, *size, "quantize", "cpu")[0] if row["variant"] == "paper"]
        cells.append(f"{paper['fraction']:.3f}")
    rows.append(("the paper's loop: quantize", *cells))
    return table(("of a parallel `memcpy` of the same bytes", *(f"{a} × {b}" for a, b in sizes)), rows)


# --- Attention ------------------------------------------------------------------------------------------------------

def shapes(records):
    """Rows of decoding by type, heads, batch and context: our schemes, and the fastest peer of the same record."""
    found = {}
    for record in records:
        here = defaultdict(dict)
        for row in record.rows(op="decode"):
            if row.get("emulator"):
                continue
            rows = here[row["dtype"], row["q_heads"], row["kv_heads"], row["batch"], row["context"]]
            name = scheme(row["scheme"]) if row["peer"] == "ferrokv" else "peer"
            if name not in rows or row["median_us"] < rows[name]["median_us"]:
                rows[name] = row
        for key, rows in here.items():
            if "dense" in rows:
                found.setdefault(key, rows)
    # 32/8 ahead of 28/4, then as they grow.
    return [(key, found[key]) for key in sorted(found, key=lambda key: (key[0] != "f16", -key[2], key[3], key[4]))]


def beside(found, name):
    if name not in found or "peer" not in found:
        return None
    return found["peer"]["median_us"] / found[name]["median_us"]


def by_context(records, labels):
    """Heads and batch by context: a row for each label, of what its function makes of the rows of one shape."""
    found = shapes(records)
    contexts = sorted({key[4] for key, _ in found})
    groups = defaultdict(dict)
    for (_, heads, kv, batch, context), rows in found:
        groups[f"{heads}/{kv}, {batch}"][context] = rows
    lines = []
    for group, here in groups.items():
        for label, cell in labels:
            cells = [cell(here[context]) if context in here else "–" for context in contexts]
            if any(cell != "–" for cell in cells):
                lines.append((group, label, *cells))
    return table(("heads, batch", "", *map(tokens, contexts)), lines)


def disturbed(row):
    """A mark behind a figure whose 10th and 90th percentile are more than a twentieth apart."""
    return " ~" if row["p90_us"] > 1.05 * row["p10_us"] else ""


def peer_times(name):
    return f"`{name}`, ×", lambda rows: losing(beside(rows, name)) + (disturbed(rows[name]) if "peer" in rows else "")


def attention_h100(records):
    def peer(rows):
        if "peer" not in rows:
            return "–"
        return f"{rows['peer']['median_us']:.0f} {rows['peer']['peer'].removeprefix('torch ')}"

    return by_context(records, [("fastest peer, µs", peer), *map(peer_times, ("dense", "int8-int4", "certified"))])


def attention_in_order(records):
    return by_context(records, [
        *map(peer_times, ("dense", "int8-int4")),
        ("`dense` / `int8-int4`", lambda rows: ratio(rows["dense"]["median_us"] / rows["int8-int4"]["median_us"])),
        ("`int8-int4` of reading alone", lambda rows: f"{rows['int8-int4']['fraction']:.3f}"),
    ])


def attention_h200(records):
    groups = defaultdict(dict)
    contexts = (65536, 131072, 262144)
    for (dtype, heads, kv, batch, context), found in shapes(records):
        if "peer" in found and context in contexts:
            groups[f"{dtype}, {heads}/{kv}, {batch}"][context] = " · ".join(
                losing(beside(found, name)) for name in ("dense", "int8-int4", "certified"))
    return table(("type, heads, batch", *map(tokens, contexts)),
                 [(group, *(here.get(context, "–") for context in contexts)) for group, here in groups.items()])


def gather(records):
    """Steps that read a constant number of keys, beside the fastest peer, which reads all."""
    rows = []
    for (_, heads, kv, batch, context), found in shapes(records):
        if "gather" not in found:
            continue
        of = found["gather"]
        stages = {stage["name"]: stage["us"] for stage in of["stages"]}
        read = sum(value["value"]["bytes"] for value in of["facts"] if value["name"].endswith(" read")
                   and "bytes" in value["value"])
        rows.append((str(batch), tokens(context), f"{found['peer']['median_us']:.0f}", f"{of['median_us']:.1f}",
                     "; ".join(f"`{name}` {us:.1f}" for name, us in stages.items()), f"{read / 1e6:.1f}", ratio(of["fraction"]),
                     losing(beside(found, "gather")), losing(beside(found, "gather:production"))))
    return table(("batch", "context", "peer, µs", "`gather`, µs", "its launches", "MB read",
                  "of reading alone", "×", "`:production`, ×"), rows)


def by_stage(records):
    """A row a scheme: µs of a step by batch and context, of its stages, and by how much `dense` takes longer."""
    found = {(context, batch): rows for (_, _, _, batch, context), rows in shapes(records)}
    names = list(dict.fromkeys(name for rows in found.values() for name in rows if name not in ("single", "peer")))

    def cell(rows, name):
        if name not in rows:
            return "–"
        own = rows[name]
        stages = "".join(f", {stage['us']:.{0 if stage['us'] >= 50 else 1}f}" for stage in own.get("stages") or ())
        beside = f" ({losing(rows['dense']['median_us'] / own['median_us'])}{stages})"
        return f"{own['median_us']:.{0 if stages and own['median_us'] >= 100 else 1}f}" + (beside if stages else "")

    lines = [(f"`{name.removeprefix('gather') or name}`", *(cell(found[key], name) for key in sorted(found)))
             for name in names]
    heads = [f"{tokens(context)}, batch {batch}" for context, batch in sorted(found)]
    return table(("", *heads), lines)


def ranks(records):
    """µs of steps that one thread block ranks, and each: a row for each batch and context."""
    kinds = ("gather", "gather/bounds=16", "gather:production")
    rows = []
    for (_, _, _, batch, context), found in shapes(records):
        times = (found[f"{kind}/ranks={who}"]["median_us"] for kind in kinds for who in ("one", "each"))
        rows.append((str(batch), tokens(context), f"{found['peer']['median_us']:.1f}",
                     f"{found['dense']['median_us']:.1f}", *(f"{us:.1f}" for us in times)))
    heads = [f"{kind}{who}" for kind in ("", "16 bits, ", "k = 8, ") for who in ("one", "each")]
    return table(("batch", "context", "peer", "`dense`", *heads), rows)


def by_scheme(records):
    """A row a scheme: µs by batch and context, and by how much the fastest peer takes longer, or `dense` without one."""
    found = {(batch, context): rows for (_, _, _, batch, context), rows in shapes(records)}
    names = list(dict.fromkeys(name for rows in found.values() for name in rows if name not in ("single", "peer")))
    columns = sorted(found)
    lines = []
    if any("peer" in rows for rows in found.values()):
        lines.append(("the fastest peer", *(f"{found[key]['peer']['median_us']:.1f}" if "peer" in found[key] else "–"
                                            for key in columns)))
    for name in names:
        cells = []
        for key in columns:
            own, beside = found[key].get(name), found[key].get("peer", found[key]["dense"])
            cells.append(f"{own['median_us']:.1f} ({losing(beside['median_us'] / own['median_us'])})" if own else "–")
        lines.append((f"`{name}`", *cells))
    heads = [f"{tokens(context)}, batch {batch}" for batch, context in columns]
    return table(("µs", *heads), lines)


def of_trace(records):
    """Steps over keys and queries of a text: µs, `dense` over it, and what of the sequence was read or is known."""
    rows = []
    for (_, _, _, _, context), found in shapes(records):
        for name, row in found.items():
            if name == "single":
                continue
            facts = {fact["name"]: fact["value"] for fact in row.get("facts", ())}
            kept, skipped = facts.get("tokens read"), facts.get("mass skipped")
            percent = [f"{100 * row[key][0]:.1f} %" if key in row else "–" for key in ("relative_error", "relative_bound")]
            rows.append((str(context), f"`{name}`", f"{row['median_us']:.1f}",
                         losing(found["dense"]["median_us"] / row["median_us"]),
                         f"{kept['count']:,.0f}" if kept else "–",
                         f"{100 * skipped['error']:.1f} %" if skipped else "–", *percent))
    return table(("tokens", "`--kv`", "µs", "dense / it", "kept", "skipped, most", "error", "bound"), rows)


def by_heads(records):
    """The same at one context, by heads and batch: their record has a head_dim for each."""
    parts = {}
    for (_, q_heads, kv_heads, batch, context), rows in shapes(records):
        parts.setdefault((q_heads, kv_heads), {})[batch, context] = rows
    columns = [(heads, key) for heads, found in parts.items() for key in sorted(found)]
    names = list(dict.fromkeys(name for heads, key in columns for name in parts[heads][key] if name != "single"))
    lines = []
    for name in names:
        cells = []
        for heads, key in columns:
            rows = parts[heads][key]
            cells.append(f"{rows[name]['median_us']:.1f} ({losing(rows['dense']['median_us'] / rows[name]['median_us'])})"
                         if name in rows else "–")
        lines.append((f"`{name}`", *cells))
    heads = [f"{q_heads}/{kv_heads} of {parts[q_heads, kv_heads][key]['dense']['head_dim']}, {tokens(key[1])}, batch {key[0]}"
             for (q_heads, kv_heads), key in columns]
    return table(("µs", *heads), lines)


def staging(records):
    """Keys and values in the host's memory: what a step finds on the GPU, and what it brings."""
    rows = []
    for (_, _, _, batch, context), found in shapes(records):
        for name in (name for name in found if "staging" in name):
            of = found[name]
            stages = {stage["name"]: stage["us"] for stage in of["stages"]}
            own = facts(of)
            brought = own["from the host"]
            rows.append((str(batch), tokens(context), f"`{name}`", f"{of['median_us']:.1f}", f"{stages['select']:.1f}",
                         f"{stages['fetch']:.1f}", f"{stages['attend']:.1f}", f"{own['blocks found']:.0f}", f"{own['blocks fetched']:.0f}",
                         f"{brought / 2**20:.1f} MiB", f"{brought / stages['fetch'] / 1e3:.0f}",
                         f"{found['gather']['median_us']:.1f}"))
    return table(("batch", "context", "`--kv`", "µs", "`select`", "`fetch`", "`attend`", "found", "fetched", "bytes", "GB/s",
                  "`gather`, µs"), rows)


# --- Models ---------------------------------------------------------------------------------------------------------

def regime(records):
    """A row a form of the traffic model: its constants with their standard errors, and how far off it is."""
    (record,) = records
    lines = []
    for fit in record.data["fits"]:
        schemes = dict(fit["c1_us"])

        def constant(of, scale):
            if of is None:
                return "–"
            error = of["standard_error"]
            return f"{of['value'] * scale:.2f}" + ("" if error is None else f" ± {error * scale:.2f}")

        share = lambda of: "–" if of is None else f"{of:.1%}".replace("%", " %")
        squared = lambda of: "–" if of is None else f"{of:.5f}".replace("-", "−")
        lines.append((f"`{fit['form']}`", constant(fit["beta_tb_per_s"], 1), constant(fit["c0_us"], 1e-3),
                      constant(fit["row_us"], 1e-3), *(constant(of, 1e-3) for of in schemes.values()),
                      squared(fit["r2_times"]), squared(fit["r2_speedups"]), share(fit["worst"]),
                      share(fit["worst_held_out"])))
    c1 = (f"c1, `{name}`" for name in dict(record.data["fits"][0]["c1_us"]))
    return table(("form", "β, TB/s", "c0, ms", "r, ms", *c1, "R², times", "speed-ups", "worst", "held out"),
                 lines)


def projections(records):
    """A row a context and number of sequences, a column a projection."""
    found = [{(square["context"], square["batch"]): square for row in record.data["squares"] for square in row}
             for record in records]
    heads = ["; ".join(record.data["projections"]).replace(" ms", "") or "as fitted" for record in records]

    def cell(square):
        outside = square["too_large"] or not square["inside"]
        return f"({square['speedup']:.2f})" if outside else f"{square['speedup']:.2f}"

    lines = [(tokens(place[0]), str(place[1]), *(cell(of[place]) for of in found)) for place in sorted(found[0])]
    return table(("context", "batch", *heads), lines)


def worst_bound(of):
    return "–" if of is None or of["worst_bound"] is None else f"{of['worst_bound']:.2f}"


def exactly(of):
    """Heads that were computed exactly, of a scheme that can fall back to that."""
    return f"{of['exact_heads']:,} of {of['heads']:,}" if of and of["bounded_heads"] else "–"


def generate(records):
    rows = []
    for record in records:
        data, of = record.data, record.data["report"]
        rows.append((DEVICES[record.device], f"`{scheme(data['kv'])}`", f"{data['decode_tokens_per_second']:,.0f}",
                     f"{data['prefill_tokens_per_second']:,.0f}", worst_bound(of), exactly(of)))
    return table(("device", "`--kv`", "decode, tokens a second", "prompt", "worst bound", "heads computed exactly"),
                 rows)


def llama_cpp(records):
    peer, *ours = records
    base = peer.data
    rows = [(f"llama.cpp, {base['version']}", f"{base['predicted_per_second']:.0f}", "1.00",
             f"{base['prompt_per_second']:.0f}", "1.00")]
    for record in ours:
        data = record.data
        decode, prompt = data["decode_tokens_per_second"], data["prefill_tokens_per_second"]
        rows.append((f"`{scheme(data['kv'])}`", f"{decode:.0f}", losing(decode / base["predicted_per_second"]),
                     f"{prompt:.0f}", losing(prompt / base["prompt_per_second"])))
    return table(("two CPU threads", "decode, tokens a second", "of llama.cpp", "prompt, tokens a second",
                  "of llama.cpp"), rows)


# --- Checks ---------------------------------------------------------------------------------------------------------

def compared(record):
    """Cases, outputs compared and bits that differ."""
    if record.path.endswith(".txt"):
        found = re.search(r"([\d,]+) cases: [\d,]+ outputs, ([\d,]+) compared, [\d,]+ elements \(([\d,]+) bits\)",
                          record.text)
        return tuple(int(number.replace(",", "")) for number in found.groups())
    total = record.data.get("totals") or record.data["total"]
    bits = total["differing_bits"] if "differing_bits" in total else total["bits_differing"]
    return total["cases"], total["compared"], bits


def checks(records):
    rows = []
    for record in records:
        cases, outputs, bits = compared(record)
        rows.append((f"`{record.notes['command']}`", DEVICES[record.device], record.commit, f"{cases:,}",
                     f"{outputs:,}",
                     f"{bits:,}"))
    return table(("command", "GPU", "commit", "cases", "outputs compared", "bits that differ"), rows)


def proven(record):
    """What `prove` found of `certified`."""
    (found,) = [found for found in record.data["schemes"] if found["kv"] == "certified"]
    return found


def prove(records):
    (record,) = records
    found = proven(record)
    rows = [("all", found["total"]), *found["inputs"]]

    def paper(of):
        of = facts(of)["paper/ours"]
        return "–" if of is None else f"{of:.1f}"

    return table(
        ("keys and values", "head-steps", "errors above the bound", "bound / error, median", "least",
         "paper's E_key / ours"),
        [(name if name in ("all",) else "a real cache" if name == "real" else f"`{name}`", f"{of['head_steps']:,}",
          f"{of['violations']:,}", f"{of['ratio'][0]:,.1f}", f"{of['ratio'][1]:.4f}", paper(of)) for name, of in rows])


def launch(records):
    (record,) = records
    of = record.data["launch"]
    return table(("raw `cuLaunchKernel`", "typed launch", "ratio", "1000 single launches", "a graph of 1000",
                  "its call"),
                 [(f"{of['raw_ns'] / 1000:.2f} µs", f"{of['typed_ns'] / 1000:.2f} µs", f"{of['ratio']:.3f}",
                   f"{of['single_launches_us'] / 1000:.2f} ms", f"{of['graph_replay_us'] / 1000:.2f} ms",
                   f"{of['graph_call_us']:.1f} µs")])


# --- Quality --------------------------------------------------------------------------------------------------------

def perplexity_codes(records):
    """A row a scheme and a context: bytes a token, what it loses beside dense on the same windows, in nats a token. Of the
    first record only `gather`, of what two records have the later one's, of rows of one name the first."""
    found = {}
    for record in records:
        for row in reversed(record.data["summary"]["rows"]):
            name = plain(row["kv"])
            if name != "dense" and (record is not records[0] or name.startswith("gather")):
                found[row["context"], name] = row
    rows = []
    for (context, name), row in sorted(found.items(), key=lambda each: (each[0][0], -each[1]["kv_bytes_per_token"])):
        delta = row["delta_interval"]
        rows.append((f"`{name}`", tokens(context), str(row["windows"]),
                     f"{row['kv_bytes_per_token']:,.0f}", f"{math.exp(row['delta']) - 1:+.2%}".replace("%", " %"),
                     f"{row['delta']:+.4f}", interval(delta["low"], delta["high"], 4)))
    head = ("`--kv`", "context", "windows", "bytes a token", "perplexity over dense's", "ΔNLL", "95 %")
    return table(head, rows)


def schemes(records):
    """Every scheme once: what its cache takes, what a model's text loses over it, and how fast a step is; of records of
    `bench schemes`, or of those of `eval ppl` and `bench attention`."""
    if all(record.command == "bench-schemes" for record in records):
        return beside_each_other(records)
    texts = [record for record in records if "summary" in record.data]
    found = dict(shapes([record for record in records if "summary" not in record.data]))
    of_shape = {(batch, context): rows for (_, heads, _, batch, context), rows in found.items()
                if heads == 32 and "peer" in rows and (batch == 1 or context == 131072)}
    columns = sorted(of_shape)
    # Bytes are those of the longest context.
    longest = of_shape[columns[-1]]
    lost = {}
    for record in texts:
        # Of rows of one name, codebooks of several settings, the first counts.
        lost |= {plain(row["kv"]): row for row in reversed(record.data["summary"]["rows"])}
    rows = []
    for name, row in lost.items():
        if name == "dense" or name not in longest:
            continue
        own, delta = longest[name], row["delta_interval"]
        each = (own["memory"]["device"] + own["memory"]["host"]) / (own["batch"] * own["kv_heads"] * own["context"])
        percent = interval(math.exp(delta["low"]) * 100 - 100, math.exp(delta["high"]) * 100 - 100, 1)
        cells = [f"`{name}`", f"{each:.0f}", f"{math.exp(row['delta']) - 1:+.1%} {percent}".replace("% ", " % ")]
        for key in columns:
            here = of_shape[key].get(name)
            cells.append(losing(of_shape[key]["peer"]["median_us"] / here["median_us"]) if here else "–")
        rows.append((-each, cells))
    heads = [f"{tokens(context)}, batch {batch}" for batch, context in columns]
    return table(("`--kv`", "bytes", "perplexity, 95 %", *heads), [cells for _, cells in sorted(rows)])


def diagnosed(wanted):
    """A row a scheme of some names, by the bytes of a key: what its codes do to logits, softmax and output."""

    def figure(of, ends=True):
        if of is None:
            return "–"
        digits = min(4, max(0, 2 - math.floor(math.log10(of["mean"])))) if of["mean"] > 0 else 0
        low, high = of["interval"]["low"], of["interval"]["high"]
        return f"{of['mean']:.{digits}f}" + (f" [{low:.{digits}f}, {high:.{digits}f}]" if ends else "")

    def rows(records):
        (record,) = records
        found = []
        for row in record.data["rows"]:
            name = re.sub(r"/(codes|order|from)=.*", "", row["kv"])
            if not wanted(name):
                continue
            name = f"`{name.removesuffix('/recent=0/sink=0')}`" + (", a codebook a head" if "head" in row["kv"] else "")
            found.append((name, f"{row['key_bytes']:.1f}", f"{row['value_bytes']:.1f}", figure(row["logit"]),
                          figure(row["offsets"], False), figure(row["divergence"]),
                          f"{100 * row['overlap']['mean']:.0f} %", figure(row["output"], False),
                          f"{row['values']['mean']:.3f}"))
        head = ("", "key", "value", "error", "at 50", "KL", "top 10", "output", "values")
        return table(head, found)

    return rows


def perplexity(records):
    *current, other = records
    rows = []
    summary = [(record, row) for record in current for row in record.data["summary"]["rows"]]
    summary += [(other, row) for row in other.data["summary"]["rows"] if row["kv"] in ("int8", "certified:strict")]
    for record, row in sorted(summary, key=lambda each: each[1]["context"]):
        of = row["delta_interval"]
        rows.append((str(row["context"]), f"`{scheme(row['kv'])}`", str(row["windows"]), f"{row['perplexity']:.3f}",
                     "–" if row["kv"] == "dense" else f"{row['delta']:+.5f} {interval(of['low'], of['high'], 5)}",
                     exactly(row["report"]), f"{row['kv_bytes_per_token']:,.0f}",
                     str(records.index(record) + 1)))
    return table(("context", "`--kv`", "windows", "perplexity", "ΔNLL, 95 %", "computed exactly", "B/token",
                  "record"), rows)


def perplexity_beside(records):
    """A row a scheme of one record: its perplexity, and by how much that is off the dense one's."""
    (record,) = records
    rows = []
    for row in record.data["summary"]["rows"]:
        of, dense = row["delta_interval"], row["kv"] == "dense"
        rows.append((str(row["context"]), f"`{scheme(row['kv'])}`", f"{row['perplexity']:.3f}",
                     "–" if dense else f"{math.exp(row['delta']) - 1:+.2%}".replace("%", " %"),
                     "–" if dense else f"{row['delta']:+.4f} {interval(of['low'], of['high'], 4)}"))
    return table(("context", "`--kv`", "perplexity", "over dense's", "ΔNLL, 95 %"), rows)


def needles(records):
    rows = []
    for row in (row for record in records for row in record.data["summary"]["rows"]):
        of = row["delta_interval"]
        rows.append((str(row["context"]), f"`{scheme(row['kv'])}`", f"{row['hits']} of {row['trials']}",
                     "–" if row["kv"] == "dense" else f"{row['p']:.2f}",
                     "–" if row["kv"] == "dense" else f"{row['delta']:+.3f} {interval(of['low'], of['high'], 3)}"))
    return table(("context", "`--kv`", "keys found", "McNemar p", "Δ of the key's log-probability, 95 %"), rows)


# --- The README's table ---------------------------------------------------------------------------------------------

def questions(records):
    """Eleven questions at most, each answered by one record, and where it loses, which may be of a second one."""
    check, int8, attention, step, limited, bounds, short, long, budget, real, few, text, speed, codes = records
    cases, _, bits = compared(check)
    ours = {op: fastest(int8_rows(int8, 131072, 8192, op)[0]) for op, _ in OPERATIONS}
    fractions = [row["fraction"] for row in ours.values()]
    found = shapes([attention])
    dense = [beside(here, "dense") for _, here in found]
    far = dict(found)["f16", 32, 8, 1, 131072]
    # Attention over random keys: what a budget costs where nothing keeps it, beside exact attention of the same run.
    flat = [(context, here["dense"]["median_us"] / here["certified"]["median_us"],
             here["dense"]["median_us"] / here["certified/error_budget=inf"]["median_us"])
            for (*_, context), here in shapes([budget])]
    gated = [ratio for _, ratio, _ in flat]
    ungated = [ratio for context, _, ratio in flat if context == 131072]
    of_output = re.search(r"bound of the output's norm: median ([0-9.]+) %, 99 % ([0-9.]+) %", real.text)
    of_heads = re.search(r"bounds: all (\d+) hold; .* (\d+) heads exact", real.text)
    if not of_output or not of_heads or max(gated) > 1.0 or of_heads[2] != "0":
        raise Wrong("tools/tables.py: what the README says of bounds and budgets is not so any more")
    steps, gated_steps = ({(scheme(row["kv"]), row["context"]): row for row in record.data["rows"]}
                          for record in (step, limited))
    total = proven(bounds)["total"]
    # Of perplexity, at the length where it is most.
    lost = {name: max(abs(math.expm1(row["delta"])) for record in (short, long)
                      for row in record.data["summary"]["rows"] if row["kv"] == name)
            for name in ("certified/resident=0", "int8-int4")}
    # The figure is printed. That it is chance is what makes it an answer, and evaluation.md says so too.
    intervals = [row["delta_interval"] for record in (short, long) for row in record.data["summary"]["rows"]
                 if row["kv"] == "certified/resident=0"]
    if not intervals or any(not held["low"] <= 0.0 <= held["high"] for held in intervals):
        raise Wrong("tools/tables.py: that certified shows no difference of perplexity is not so any more")
    # A constant number of keys, and codes of vectors.
    million = dict(shapes([few]))["f16", 28, 4, 1, 1048576]
    over_dense = {row["kv"]: math.expm1(row["delta"]) for row in text.data["summary"]["rows"]}
    if abs(over_dense["gather"]) > 0.001:
        raise Wrong("tools/tables.py: what the README says of 32 blocks is not so any more")
    of_codes = {row["context"]: row for each in speed.data["rows"] if each["kv"] == "vecinfer"
                for row in each["speed"] if row["batch"] == 1}
    lost_codes = next(row["quality"]["beside"]["delta"] for row in codes.data["rows"]
                      if row["kv"].startswith("vecinfer/k=d4b8/v=d4b8/codes="))
    if of_codes[131072]["memory"]["device"] / of_codes[131072]["bytes"] > 0.13:
        raise Wrong("tools/tables.py: what the README says of the bytes of codes is not so any more")
    rows = [
        ([check], "Same bits on emulator and GPU?", f"{cases:,} cases: {bits} bits differ",
         "one generation of GPUs tried"),
        ([int8], "Codes of 8 bits: as fast as memory?", f"{min(fractions):.2f} to {max(fractions):.2f} of its speed",
         "small and narrow matrices"),
        ([attention], "Exact attention beside PyTorch's?", f"{min(dense):.2f} to {max(dense):.2f} times its speed",
         f"{sum(value < 0.995 for value in dense)} of {len(dense)} sizes, by up to {100 * (1 - min(dense)):.0f} %"),
        ([attention], "… over 8-bit keys, 4-bit values?", f"{beside(far, 'int8-int4'):.2f} times at 128K tokens",
         "its error is not known"),
        ([budget], "… with a bound on the error?", f"{min(ungated):.2f} to {max(ungated):.2f} times our exact, 128K",
         f"{min(gated):.2f} to {max(gated):.2f} if kept below 5 %"),
        ([real], "How large is such a bound?", f"median: {float(of_output[1]):.1f} % of the output",
         f"1 of 100 above {float(of_output[2]):.1f} %; a small model"),
        ([bounds], "Is an error ever above its bound?",
         f"{'no' if not total['violations'] else total['violations']}, in {total['head_steps']:,} outputs",
         f"median bound: {total['ratio'][0]:.0f} times the error"),
        ([step, limited], "A token of 8B sizes, at 128K?", f"{steps['dense', 131072]['median_us'] / 1000:.1f} ms exact, "
         f"{steps['certified', 131072]['median_us'] / 1000:.1f} with bounds",
         f"{gated_steps['certified', 131072]['median_us'] / 1000:.1f} ms if kept below 5 %"),
        ([short, long], "What does a text lose?",
         f"perplexity {100 * lost['certified/resident=0']:.2f} %, without bounds {100 * lost['int8-int4']:.2f} %",
         "small model, up to 8,000 tokens"),
        ([few, text], "A million tokens, 32 blocks read?", f"{beside(million, 'gather'):.0f} times PyTorch's speed",
         f"8 blocks: perplexity {over_dense['gather:production']:+.1%}".replace("%", " %")),
        ([speed, codes], "Codes of 2 bits, at 128K?",
         f"{of_codes[131072]['dense_ratio']:.1f} times our exact",
         f"perplexity {lost_codes:+.1%}; {of_codes[8192]['dense_ratio']:.2f} times at 8K".replace("%", " %")),
    ]
    return table(("question", "answer", "where it loses", "measured on"),
                 [(*cells, ", ".join(dict.fromkeys(name for record in of for name in (
                     {"cpu-2-threads": "CPU"}.get(record.device, DEVICES[record.device]), record.commit))))
                  for of, *cells in rows])


TABLES = {
    "questions": questions,
    "int8-h100": int8_h100,
    "int8-h200": int8_h200,
    "int8-peers-h200": int8_peers_h200,
    "int8-cpu": int8_cpu,
    "attention-h100": attention_h100,
    "attention-short-h100": attention_h100,
    "attention-in-order": attention_in_order,
    "attention-h200": attention_h200,
    "gather-h100": gather,
    "ranking-h100": by_stage,
    "tiles-h100": by_scheme,
    "sketch-h100": by_scheme,
    "sketch-narrow-h100": by_scheme,
    "sketch-trace-h200": of_trace,
    "codes-bound-h200": by_scheme,
    "codes-bound-narrow-h200": by_scheme,
    "codes-h100": by_scheme,
    "codes-28-4-h100": by_scheme,
    "ranks-h100": ranks,
    "heads-h100": by_heads,
    "model-codes-h100": model,
    "model-long-h100": model_ends,
    "prompts-h100": prompts,
    "restored-h100": by_scheme,
    "staging-h100": staging,
    "perplexity-codes": perplexity_codes,
    "schemes": schemes,
    "schemes-other-shapes": other_shapes,
    "schemes-of-a-text": of_a_text,
    "diagnose-gtq": diagnosed(lambda name: not name.startswith("vecinfer")),
    "diagnose-equal-bytes": equal_bytes,
    "diagnose-by-layer": by_layer,
    "diagnose-vecinfer": diagnosed(lambda name: name.startswith(("vecinfer", "gtq", "kivi/"))),
    "model-batches-h100": model_batches,
    "regime-h100": regime,
    "regime-projected-h100": projections,
    "model-llama-8b": model_ends,
    "model-smollm2": model,
    "model-resident": model,
    "generate": generate,
    "llama-cpp": llama_cpp,
    "checks": checks,
    "prove": prove,
    "launch": launch,
    "perplexity": perplexity,
    "perplexity-gather": perplexity_beside,
    "needles-gather": needles,
    "needles-codes": needles,
    "needles-certified": needles,
}
