"""What the scripts that measure peers share: timing, rows, and the report.

Needs PyTorch, and that only from `import_torch` on: what a script lists or helps with does without.
"""

import json
import sys
import time

BEGIN = time.monotonic()  # importing PyTorch is part of what a caller waits for


def import_torch(program):
    """PyTorch, with a GPU or not; without it the script ends."""
    global torch
    try:
        import torch
    except ImportError:
        sys.exit(f"{program}: PyTorch is not installed for this python3; install torch with CUDA")
    return torch


def require_gpu(program):
    if not torch.cuda.is_available():
        sys.exit(f"{program}: PyTorch sees no CUDA device")


def first_line(error):
    return (str(error).splitlines() or [""])[0]


def percentile(ordered, share):
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def time_calls(calls, seconds, limits):
    """Microseconds a call (median, p10, p90) and the replays they were taken over: `seconds` of
    them, within `limits`.

    Results are kept until the graph is gone: otherwise the allocator would give every call the
    same output memory, and writes would stay in the cache.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:3]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for call in calls]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    one = max(begin.elapsed_time(end) * 1e-3, 1e-6)
    replays = max(limits[0], min(limits[1], int(seconds / one)))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
              for _ in range(replays)]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = sorted(b.elapsed_time(e) * 1e3 / len(calls) for b, e in events)
    graph.reset()
    del results
    return percentile(times, 0.5), percentile(times, 0.1), percentile(times, 0.9), replays


class Rows:
    """What is measured until a deadline, and what is not: what a script's Bench begins with."""

    def __init__(self, seconds):
        self.deadline = BEGIN + seconds
        self.rows, self.skipped, self.errors = [], [], []
        properties = torch.cuda.get_device_properties(0)
        self.l2 = properties.L2_cache_size
        self.multiprocessors = properties.multi_processor_count

    def is_late(self):
        return time.monotonic() > self.deadline

    def add(self, name, about, size, calls, timing, **extra):
        """A row: `about` says what of, `size` is in bytes, `timing` is from `time_calls`. What of
        `extra` is nothing is left out."""
        median, p10, p90, replays = timing
        row = {**about, "bytes": size, "median_us": round(median, 3), "p10_us": round(p10, 3),
               "p90_us": round(p90, 3), "gb_per_s": round(size / median * 1e-3, 1),
               "calls": len(calls), "replays": replays,
               **{key: value for key, value in extra.items() if value}}
        self.rows.append(row)
        print(f"{name:64} {median:10.2f} us  [{p10:.2f}, {p90:.2f}]  "
              f"{row['gb_per_s']:8.1f} GB/s", file=sys.stderr)


def finish(program, path, bench, checks, versions, skipped, broken):
    """Write the report to `path`, or print it; say what failed. `skipped` is what to say of rows
    that were skipped; the script ends with `broken` if a check is outside its bound."""
    report = {
        "schema": 1,
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **versions,
        "l2_bytes": bench.l2,
        "multiprocessors": bench.multiprocessors,
        "seconds": round(time.monotonic() - BEGIN, 1),
        "checks": checks,
        "rows": bench.rows,
        "skipped": bench.skipped,
        "errors": bench.errors,
    }
    text = json.dumps(report, indent=1)
    if path:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    else:
        print(text)
    for line in bench.errors:
        print(f"{program}: {line}", file=sys.stderr)
    if bench.skipped:
        print(f"{program}: {len(bench.skipped)} {skipped}", file=sys.stderr)
    if not all(c["within_bound"] for c in checks):
        sys.exit(f"{program}: {broken}: see `checks`")
