"""llama.cpp on the same GGUF file and the same CPU, for comparison with `ferrokv generate --backend cpu`.

Needs the package xllamacpp (llama.cpp with its server, in one wheel). One JSON object goes to stdout:
tokens a second of reading a prompt and of writing, medians over runs, as llama.cpp's own timings say.

    python3 benches/peers/llama.py --model model.gguf --threads 2 --prompt "Once upon a time" --tokens 128
"""

import argparse
import json
import statistics
import sys


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    try:
        import xllamacpp
    except ImportError as error:
        print(f"llama.py needs the package xllamacpp: {error}", file=sys.stderr)
        return 2

    parameters = xllamacpp.CommonParams()
    parameters.model.path = arguments.model
    parameters.n_ctx = arguments.context
    parameters.n_parallel = 1
    parameters.n_gpu_layers = 0
    parameters.warmup = True
    for cpu in (parameters.cpuparams, parameters.cpuparams_batch):
        cpu.n_threads = arguments.threads
    server = xllamacpp.Server(parameters)
    request = {
        "prompt": arguments.prompt,
        "n_predict": arguments.tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    answers = [server.handle_completions(request) for _ in range(arguments.runs + 1)]
    for answer in answers:
        if "timings" not in answer:
            print(f"llama.cpp gave no timings: {answer}", file=sys.stderr)
            return 1
    # The first run pays for what is allocated once.
    timings = [answer["timings"] for answer in answers[1:]]
    report = {
        "library": "llama.cpp (xllamacpp)",
        "version": getattr(xllamacpp, "__version__", None),
        "system": xllamacpp.get_system_info(),
        "threads": arguments.threads,
        "prompt_tokens": timings[0]["prompt_n"],
        "tokens": timings[0]["predicted_n"],
        "prompt_per_second": statistics.median(t["prompt_per_second"] for t in timings),
        "predicted_per_second": statistics.median(t["predicted_per_second"] for t in timings),
        "text": answers[-1].get("content") or answers[-1]["choices"][0]["text"],
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
