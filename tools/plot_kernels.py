#!/usr/bin/env python3
"""Draws docs/kernels-h200.svg from docs/results/kernels-int8-h200.json: bars of bandwidth beside the ceilings.

Needs nothing but Python. `python3 tools/plot_kernels.py` from the repository's root.
"""
import json
from pathlib import Path

root = Path(__file__).resolve().parent.parent
record = json.loads((root / "docs/results/kernels-int8-h200.json").read_text())
TOKENS, CHANNELS = 131072, 8192
rows = [r for r in record["rows"] if (r["tokens"], r["channels"]) == (TOKENS, CHANNELS)]


def best(op, variant, run=None):
    found = [r["gb_per_s"] for r in rows if r["op"] == op and r["variant"] == variant and run in (None, r["run"])]
    return max(found) if found else None


variants = ["naive", "tiled", "coarsened", "vectorized", "rows"]
panels = [
    ("quantize: f32 to int8, scales given", [(v, best("quantize", v, 1)) for v in variants], best("narrow", "ceiling")),
    ("dequantize: int8 to f32", [(v, best("dequantize", v, 1)) for v in variants], best("widen", "ceiling")),
    ("scales of whole columns", [("columns", best("scales", "columns"))], best("read", "ceiling")),
    # The mixes of both directions have the same ceiling to a part in 800: one line.
    (
        "fused: codes and scales of blocks of 16 tokens",
        [("quantize", best("block_quantize", "fused", 1)), ("dequantize", best("block_dequantize", "fused", 1))],
        best("narrow", "ceiling"),
    ),
]
WIDTH, LEFT, BAR, GAP, FULL = 860, 120, 20, 8, 600
lines, y = [], 78
for title, bars, ceiling in panels:
    lines.append(f'<text x="{LEFT}" y="{y}" font-weight="600">{title}</text>')
    y += 12
    top = y
    for name, speed in bars:
        width = FULL * speed / 5000
        lines.append(f'<text x="{LEFT - 10}" y="{y + 15}" text-anchor="end">{name}</text>')
        lines.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" fill="#2f6f9f"/>')
        lines.append(f'<text x="{LEFT + width - 8:.1f}" y="{y + 15}" fill="#fff" text-anchor="end">{speed / 1000:.2f} TB/s</text>')
        y += BAR + GAP
    x = LEFT + FULL * ceiling / 5000
    lines.insert(-3 * len(bars), f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 2}" y2="{y - GAP + 2}" stroke="#c0504d" stroke-width="2" stroke-dasharray="5 3"/>')
    lines.append(f'<text x="{x + 70:.1f}" y="{top - 12}" fill="#c0504d" text-anchor="middle">only moving bytes: {ceiling / 1000:.2f}</text>')
    y += 34
head = f"{record['device']}, {TOKENS} × {CHANNELS} values, run of {record['date']}, commit {record['commit']}"
picture = f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y - 10}" font-family="sans-serif" font-size="14">
<rect width="{WIDTH}" height="{y - 10}" fill="#fff"/>
<text x="{LEFT}" y="26" font-size="16" font-weight="600">INT8 kernels: bytes moved a second</text>
<text x="{LEFT}" y="46" font-size="12" fill="#666">{head}</text>
{chr(10).join(lines)}
</svg>
"""
(root / "docs/kernels-h200.svg").write_text(picture)
