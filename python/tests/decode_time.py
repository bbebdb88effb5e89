"""What a call of `ferrokv.Decode` costs: the GPU's time in a graph, and the host's time of a call.

    python3 python/tests/decode_time.py [--sequences 8] [--tokens 4096] [--json FILE]

With a pair of pools the GPU's time is to be that of `ferrokv bench attention` at the same extents on the same GPU, but
for noise: the kernel is the same, and only whose memory and stream it runs on differs. With pages of both, the
multiplication of the table is counted too. Pools take turns, so that what one call has read is out of the second-level
cache when it comes again.
"""

import argparse
import json
import statistics
import time

from common import ferrokv, torch


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("sequences", 1), ("tokens", 32768), ("q-heads", 32), ("kv-heads", 8), ("head-dim", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", help="writes what was found there")
    given = parser.parse_args()
    width = -(-given.tokens // 16)
    count = given.sequences * width
    bytes_of_pool = count * 2 * given.kv_heads * 16 * given.head_dim * 2
    sets = max(2, -(-200_000_000 // bytes_of_pool))
    pools = [torch.randn(count, 2, given.kv_heads, 16, given.head_dim, dtype=torch.float16, device="cuda")
             for _ in range(sets)]
    table = torch.arange(count, dtype=torch.int32, device="cuda").reshape(given.sequences, width)
    lengths = torch.full((given.sequences,), given.tokens, dtype=torch.int32, device="cuda")
    queries = torch.randn(given.sequences, given.q_heads, given.head_dim, dtype=torch.float16, device="cuda")
    decode = ferrokv.Decode(sequences=given.sequences, q_heads=given.q_heads, kv_heads=given.kv_heads,
                            head_dim=given.head_dim, max_tokens=given.tokens, device="cuda")
    pairs = [(pool[:, 0].contiguous(), pool[:, 1].contiguous()) for pool in pools]
    out, lse = decode(queries, pools[0], table, lengths)
    report = dict(device=ferrokv.device_name("cuda"), version=ferrokv.version(), **vars(given))
    for name, caches in (("pages of both", pools), ("a pair of pools", pairs)):
        graph, calls = torch.cuda.CUDAGraph(), 10 * sets
        with torch.cuda.graph(graph):
            for i in range(calls):
                decode(queries, caches[i % sets], table, lengths, out=out, lse=lse)
        times = []
        for _ in range(21):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / calls)
        gpu = statistics.median(times[1:])
        host = []
        for _ in range(200):
            torch.cuda.synchronize()
            start = time.perf_counter()
            decode(queries, caches[0], table, lengths, out=out, lse=lse)
            host.append((time.perf_counter() - start) * 1e6)
        report[name] = dict(gpu_us=gpu, gpu_spread_us=[min(times[1:]), max(times[1:])], host_us=statistics.median(host),
                            read_gb_s=bytes_of_pool / gpu / 1e3)
        print(f"{name}: {gpu:.1f} us on the GPU, {bytes_of_pool / gpu / 1e3:.0f} GB/s of keys and values; "
              f"{statistics.median(host):.1f} us on the host")
    if given.json:
        with open(given.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
