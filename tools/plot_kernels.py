#!/usr/bin/env python3
"""Draws docs/kernels-h200.svg from the INT8 record of an H200: bars of bandwidth, the peers' and the ceilings.

Needs nothing but Python. `python3 tools/plot_kernels.py` from the repository's root.
"""
import json
from pathlib import Path

root = Path(__file__).resolve().parent.parent
record = json.loads((root / "docs/results/bench-int8/h200/2026-11-21-deb6793.json").read_text())
# The largest size at which the record has both peers.
TOKENS, CHANNELS = 131072, 2048
rows = [r for r in record["rows"] if (r["tokens"], r["channels"]) == (TOKENS, CHANNELS) and r.get("place", "gpu") == "gpu"]
PEERS = ["torch.compile", "triton"]


def speed(op, name):
    """TB/s of one of our variants or of a peer."""
    found = [r["gb_per_s"] for r in rows if r["op"] == op and name in (r.get("variant"), r["peer"])]
    return found[0] / 1000


def panel(title, op, names, ceiling):
    best = max(r["gb_per_s"] for r in rows if r["op"] == ceiling and r["peer"] == "ferrokv") / 1000
    return title, [(name, speed(op, name), name in PEERS) for name in names], best


variants = ["naive", "tiled", "coarsened", "vectorized", "rows", "wide"]
panels = [
    panel("quantize: f32 to int8, scales given", "quantize", variants + PEERS, "narrow"),
    panel("dequantize: int8 to f32", "dequantize", variants + PEERS, "widen"),
    panel("scales of whole columns", "scales", ["columns"] + PEERS, "read"),
    panel("scales and codes of blocks of 16 tokens", "block_quantize", ["fused"] + PEERS, "narrow"),
]
WIDTH, LEFT, BAR, GAP, FULL = 860, 130, 18, 6, 600
lines, y = [], 78
for title, bars, ceiling in panels:
    lines.append(f'<text x="{LEFT}" y="{y}" font-weight="600">{title}</text>')
    y += 12
    top = y
    for name, value, peer in bars:
        width, fill = FULL * value / 5, "#8a8a8a" if peer else "#2f6f9f"
        lines.append(f'<text x="{LEFT - 10}" y="{y + 14}" text-anchor="end">{name}</text>')
        lines.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{fill}"/>')
        end, colour, anchor = (width - 8, "#fff", "end") if value > 1 else (width + 8, "#222", "start")
        lines.append(f'<text x="{LEFT + end:.1f}" y="{y + 14}" fill="{colour}" text-anchor="{anchor}">{value:.2f} TB/s</text>')
        y += BAR + GAP
    x = LEFT + FULL * ceiling / 5
    lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 2}" y2="{y - GAP + 2}" stroke="#c0504d" stroke-width="2" stroke-dasharray="5 3"/>')
    lines.append(f'<text x="{x + 70:.1f}" y="{top - 12}" fill="#c0504d" text-anchor="middle">only moving bytes: {ceiling:.2f}</text>')
    y += 32
environment = record["environment"]
head = (
    f"{environment['gpu']['name']}, {TOKENS} × {CHANNELS} values, {environment['date'][:10]}, commit {environment['commit']}; "
    f"grey: PyTorch {record['peers']['torch']}, Triton {record['peers']['triton']}"
)
picture = f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y - 10}" font-family="sans-serif" font-size="14">
<rect width="{WIDTH}" height="{y - 10}" fill="#fff"/>
<text x="{LEFT}" y="26" font-size="16" font-weight="600">INT8 kernels: bytes moved a second</text>
<text x="{LEFT}" y="46" font-size="12" fill="#666">{head}</text>
{chr(10).join(lines)}
</svg>
"""
(root / "docs/kernels-h200.svg").write_text(picture)
