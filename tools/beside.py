"""Tables of schemes beside each other: records of `bench schemes`, and `diagnose` at equal bytes, layer by layer."""

import math
import re
from collections import defaultdict

from records import DEVICES, Wrong, interval, losing, scheme, table, tokens

# --- bench schemes --------------------------------------------------------------------------------------------------


def bare(name):
    """A scheme's name without the file that it was opened with, and without codes that are the default."""
    return re.sub(r"/(codes|order|from)=.*", "", scheme(name)).replace("vecinfer/k=d4b8/v=d4b8", "vecinfer")


def digits(value):
    """Three digits of a number."""
    return "0" if value == 0 else f"{value:.{min(4, max(0, 2 - math.floor(math.log10(abs(value)))))}f}"


def memory(row):
    """Bytes of a token and KV head in all memory and what a step reads of them, over the longest context of the first
    shape; without steps, at the end of a window."""
    steps = [step for step in row["speed"] if step.get("memory")]
    if steps:
        first = [step for step in steps if step["kv_heads"] == steps[0]["kv_heads"]]
        step = max(first, key=lambda step: (step["context"], -step["batch"]))
        count = step["batch"] * step["kv_heads"] * step["context"]
        return (step["memory"]["device"] + step["memory"]["host"]) / count, step["cache_bytes"] / count
    return (row["quality"]["token_bytes"], row["quality"]["step_bytes"]) if row["quality"] else None


def gathered(records):
    """What records of `bench schemes` say together: rows by name, speeds by name and place, and the places. Of several
    records the first that has a figure says it."""
    rows, speed, places = {}, defaultdict(dict), []
    for record in records:
        for row in record.data["rows"]:
            name = bare(row["kv"])
            known = rows.setdefault(name, {"quality": None, "bytes": None, "bound": None, "steps": False})
            known["quality"] = known["quality"] or row["quality"]
            if not known["steps"]:
                known["bytes"], known["steps"] = memory(row) or known["bytes"], bool(row["speed"])
            bounds = [step["relative_bound"][1] for step in row["speed"] if step.get("relative_bound")]
            known["bound"] = max(bounds + ([known["bound"]] if known["bound"] else []), default=None)
            for step in row["speed"]:
                place = (step["q_heads"], step["kv_heads"], step["batch"], step["context"], record.device)
                places += [place] * (place not in places)
                speed[name].setdefault(place, step.get("dense_ratio"))
    places.sort(key=lambda place: (-place[0], place[4], place[2], place[3]))
    return {name: row for name, row in rows.items() if row["bytes"]}, speed, places


def heads_of(places):
    """The names of columns; the device only where there are several."""
    several = len({place[4] for place in places}) > 1
    return [(f"{DEVICES[device]}, " if several else "") + f"{q_heads}/{kv_heads}, {tokens(context)}"
            + (f" ×{batch}" if batch > 1 else "") for q_heads, kv_heads, batch, context, device in places]


def lost_by(name, row):
    """Divergence and perplexity with their intervals."""
    lost = row["quality"] and row["quality"]["beside"]
    if not lost:
        return ["0", "0"] if name == "dense" and row["quality"] else ["–", "–"]
    ends, delta = lost["kl_interval"], lost["delta_interval"]
    percent = interval(math.expm1(delta["low"]) * 100, math.expm1(delta["high"]) * 100, 1) if delta else ""
    kl = f" [{digits(ends['low'])}, {digits(ends['high'])}]" if ends else ""
    return [f"{digits(lost['kl'])}{kl}", f"{math.expm1(lost['delta']) * 100:+.1f} % {percent}".strip()]


def of_a_text(records):
    """A row a scheme of `bench schemes`: what its cache takes over the windows of a text, and what that loses. Of
    several records the first that has a scheme says it."""
    lines, said = [], set()
    for row in (row for record in records for row in record.data["rows"]):
        name, own = bare(row["kv"]), row["quality"]
        if own and name not in said:
            said.add(name)
            lines.append((-own["token_bytes"], [f"`{name}`", f"{own['token_bytes']:.1f}", f"{own['step_bytes']:.1f}",
                                                *lost_by(name, row)]))
    return table(("`--kv`", "bytes", "read", "KL, 95 %", "perplexity, 95 %"),
                 [cells for _, cells in sorted(lines, key=lambda each: each[0])])


def beside_each_other(records):
    """A row a scheme of `bench schemes`: bytes, what a text loses, the largest bound, and speed at the first shape."""
    rows, speed, places = gathered(records)
    places = [place for place in places if place[:2] == places[0][:2]]
    lines = []
    for name, row in rows.items():
        # Bytes of another head_dim do not stand beside these.
        if not row["steps"]:
            continue
        cells = [f"`{name}`", f"{row['bytes'][0]:.0f}", f"{row['bytes'][1]:.0f}", *lost_by(name, row)]
        cells.append("–" if row["bound"] is None else digits(row["bound"]))
        cells += [losing(speed[name].get(place)) for place in places]
        lines.append((-row["bytes"][0], cells))
    return table(("`--kv`", "bytes", "read", "KL, 95 %", "perplexity, 95 %", "bound", *heads_of(places)),
                 [cells for _, cells in sorted(lines, key=lambda each: each[0])])


def other_shapes(records):
    """The speeds of `bench schemes` at the shapes behind the first."""
    rows, speed, places = gathered(records)
    places = [place for place in places if place[:2] != places[0][:2]]
    lines = [(-row["bytes"][0], [f"`{name}`", *(losing(speed[name].get(place)) for place in places)])
             for name, row in rows.items() if any(speed[name].get(place) for place in places)]
    return table(("`--kv`", *heads_of(places)), [cells for _, cells in sorted(lines, key=lambda each: each[0])])


# --- diagnose, at equal bytes ---------------------------------------------------------------------------------------


def at(points, count):
    """The error at so many bytes: between two settings the logarithm is a line; None outside of them."""
    points = sorted(points)
    for (low, a), (high, b) in zip(points, points[1:]):
        if low <= count <= high:
            part = (count - low) / (high - low)
            return math.exp((1 - part) * math.log(a) + part * math.log(b))
    return None


def by_family(record, layer, measure):
    """Bytes of a key and a figure in one layer, of every setting of every scheme; names without bits and files."""
    found = defaultdict(list)
    for row in record.data["rows"]:
        name = re.sub(r"[:/].*", "", bare(row["kv"]))
        (here,) = [of for of in row["layers"] if of["layer"] == layer]
        found[name].append((here["key_bytes"], here[measure]["mean"]))
    return found


def ours(record):
    """The bytes of our keys in parts, setting by setting."""
    rows = [row for row in record.data["rows"] if bare(row["kv"]).startswith("gtq-blocks")]
    return [(int(re.search(r"k=(\d)", row["kv"]).group(1)), row) for row in sorted(rows, key=lambda row: row["key_bytes"])]


def equal_bytes(records):
    """Layers in which one way of keeping keys has a smaller error than another at equal bytes, and the layers where not."""
    (record,) = records
    layers = record.data["layers"]
    lines = []

    def line(bits, measure, name, other, first, second):
        """`first` and `second` give a figure of a layer, at equal bytes."""
        pairs = [(layer, first(layer), second(layer)) for layer in layers]
        if any(b is None for _, _, b in pairs):
            return
        lost = [f"{layer.removeprefix('layer.').lstrip('0') or '0'}: {a / b:.2f}" for layer, a, b in pairs if a >= b]
        ratios = sorted(a / b for _, a, b in pairs)
        middle = math.exp(sum(map(math.log, ratios)) / len(ratios))
        lines.append((str(bits), measure, name, other, f"{len(pairs) - len(lost)} of {len(pairs)}", f"{middle:.2f}",
                      f"{ratios[0]:.2f} to {ratios[-1]:.2f}", ", ".join(lost) if len(lost) < 9 else
                      "most" if len(lost) > len(pairs) / 2 else f"{len(lost)} layers"))

    measures = (("logit", "error"), ("divergence", "KL"))
    for measure, title in measures:
        of = {layer: by_family(record, layer, measure) for layer in layers}
        published = {int(re.search(r"k=(\d)", row["kv"]).group(1)): row for row in record.data["rows"]
                     if row["kv"].startswith("block-gtq")}
        for bits, row in ours(record):
            own = {here["layer"]: (here["key_bytes"], here[measure]["mean"]) for here in row["layers"]}
            for other, name in (("gtq", "`gtq`"), ("block-gtq", "Block-GTQ")):
                line(bits, title, "`gtq-blocks`", name, lambda layer: own[layer][1],
                     lambda layer: at(of[layer][other], own[layer][0]))
            if bits in published:
                theirs = {here["layer"]: (here["key_bytes"], here[measure]["mean"]) for here in published[bits]["layers"]}
                line(bits, title, "`gtq-blocks`", "Block-GTQ, equal bits", lambda layer: own[layer][1],
                     lambda layer: theirs[layer][1])
                line(bits, title, "Block-GTQ", "`gtq`", lambda layer: theirs[layer][1],
                     lambda layer: at(of[layer]["gtq"], theirs[layer][0]))
                uniform = {bits_of(row): row for row in record.data["rows"] if bare(row["kv"]).startswith("gtq/")}
                same = {here["layer"]: here[measure]["mean"] for here in uniform[bits]["layers"]}
                line(bits, title, "Block-GTQ", "`gtq`, equal bits", lambda layer: theirs[layer][1], same.get)
    if not lines:
        raise Wrong(f"docs/results/{record.path}: nothing to compare at equal bytes")
    order = {"`gtq-blocks`": 0, "Block-GTQ": 1}
    lines.sort(key=lambda row: (row[1] != "error", order[row[2]], row[3], row[0]))
    return table(("bits", "of", "keys", "against", "less in", "ratio", "by layer", "not less, and ratio"), lines)


def bits_of(row):
    """The bits of a key."""
    return int(re.search(r"k=(\d)", row["kv"]).group(1))


def by_layer(records):
    """The error in every layer at the bytes of our keys in parts: theirs at those bytes, uniform at those bytes."""
    (record,) = records
    lines = []
    for layer in record.data["layers"]:
        of = by_family(record, layer, "logit")
        cells = [layer.removeprefix("layer.").lstrip("0") or "0"]
        for bits, row in ours(record):
            if bits > 3:
                continue
            (here,) = [here for here in row["layers"] if here["layer"] == layer]
            own = here["logit"]["mean"]
            others = [at(of[name], here["key_bytes"]) for name in ("block-gtq", "gtq")]
            cells.append(digits(own))
            cells += ["–" if value is None else f"{digits(value)}" if own < value else f"**{digits(value)}**"
                      for value in others]
        lines.append(cells)
    heads = [f"{name}, {row['key_bytes']:.0f} B" for bits, row in ours(record) if bits <= 3
             for name in ("`gtq-blocks`", "Block-GTQ", "`gtq`")]
    return table(("layer", *heads), lines)
