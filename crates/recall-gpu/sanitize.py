#!/usr/bin/env python3
"""Runs every case of crates/recall on a GPU, by itself and under each tool of compute-sanitizer, and writes a record.

`python3 sanitize.py RECALL_GPU --commit COMMIT --json FILE`, where RECALL_GPU is the program of this package. Each bug
has a process of its own with a limit of time, as it may hang; those that hang without a tool come last. The twins of a
category share a process for each tool, and have one each where that names any error. What is left when `--seconds` are
over is in the record as not run. Needs nothing but Python 3.9.
"""

import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

# What each tool is run with. A tool says of itself which options it has.
TOOLS = {
    "memcheck": [],
    "racecheck": [],
    "synccheck": [],
    "initcheck": ["--initcheck-address-space", "all"],
}
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")
HEADER = re.compile(r"COMPUTE-SANITIZER|Target application|SUMMARY|^=+\s*$")


def ended(process, limit):
    """Waits so long; then ends the process and those that it started. Says whether that was needed."""
    try:
        process.wait(timeout=max(limit, 0.1))
        return False
    except subprocess.TimeoutExpired:
        pass
    for number, patience in ((signal.SIGINT, 2), (signal.SIGKILL, 20)):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=patience)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass
    return True


def run(command, folder, name, limit):
    """Status (None if it did not end), whether it ran out of time, seconds, and what it printed."""
    begin, path = time.monotonic(), os.path.join(folder, name)
    with open(path, "w") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                   start_new_session=True)
        late = ended(process, limit)
    with open(path, errors="replace") as output:
        return process.returncode, late, round(time.monotonic() - begin, 2), output.read()


def counted(text):
    """How many errors or hazards a tool's summaries name, or None if it came to none; and its first finding."""
    found = [int(errors or hazards) for errors, hazards in SUMMARY.findall(text)]
    first = next((line.lstrip("= ").rstrip() for line in text.splitlines()
                  if line.startswith("=====") and not HEADER.search(line)), None)
    return (max(found) if found else None), first


def output(command):
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("program")
    options.add_argument("--commit", required=True)
    options.add_argument("--json", required=True, help="the record")
    options.add_argument("--outputs", default="outputs", help="a folder for what each run prints")
    options.add_argument("--seconds", type=float, default=300, help="for all of it")
    options.add_argument("--limit", type=float, default=30, help="for one run, in seconds")
    options.add_argument("--hang-limit", type=float, default=8, help="for one that hangs without a tool")
    options.add_argument("--jobs", type=int, default=12)
    options.add_argument("--only", action="append", help="a case; may be given again")
    options = options.parse_args()
    end = time.monotonic() + options.seconds
    os.makedirs(options.outputs, exist_ok=True)

    cases = [line.split() for line in output([options.program]).splitlines()]
    cases = [case for case in cases if not options.only or case[0] in options.only]
    known = output(["compute-sanitizer", "--help"])
    tools = {tool: flags if not flags or flags[0] in known else [] for tool, flags in TOOLS.items()}
    hung, rows = set(), []

    # The first run compiles the kernels for all others; if it fails, so will they.
    status, _, seconds, text = run([options.program, cases[0][0]], options.outputs, "first", 60)
    if status != 0:
        sys.exit(f"{cases[0][0]}: status {status} after {seconds} s\n{text}")

    def one(job):
        names, bug, tool = job
        left = end - time.monotonic()
        if left < 1:
            rows.extend({"case": case, "bug": bug, "tool": tool, "not_run": True} for case in names)
            return []
        command = [options.program, *names] + (["bug"] if bug else [])
        if tool != "none":
            command = ["compute-sanitizer", "--tool", tool, *tools[tool], *command]
        limit = options.hang_limit if tool == "none" or names[0] in hung else options.limit
        name = f"{names[0]}{'-and-others' if names[1:] else ''}-{'bug' if bug else 'twin'}-{tool}"
        status, late, seconds, text = run(command, options.outputs, name, min(limit, left))
        row = {"status": status, "late": late, "seconds": seconds}
        if tool == "none":
            if late and bug:
                hung.add(names[0])
            row["first"] = text.strip().splitlines()[-1] if text.strip() else None
        else:
            row["count"], row["first"] = counted(text)
        if names[1:] and (status != 0 or row.get("count")):
            return [((case,), bug, tool) for case in names]
        rows.extend({"case": case, "bug": bug, "tool": tool, **row} for case in names)
        return []

    categories = sorted({case[1] for case in cases})
    groups = [tuple(case[0] for case in cases if case[1] == category) for category in categories]
    bugs = [(case[0],) for case in cases if case[2:] == ["bug"]]
    with ThreadPoolExecutor(options.jobs) as pool:
        def all_of(jobs):
            apart = [job for more in pool.map(one, jobs) for job in more]
            list(pool.map(one, apart))

        all_of([(names, True, "none") for names in bugs] + [(names, False, "none") for names in groups])
        quick = [(names, True, tool) for tool in tools for names in bugs if names[0] not in hung]
        all_of([(names, False, tool) for tool in tools for names in groups] + quick)
        all_of([(names, True, tool) for tool in tools for names in bugs if names[0] in hung])

    order = {case[0]: place for place, case in enumerate(cases)}
    rows.sort(key=lambda row: (row["bug"], order[row["case"]], ["none", *tools].index(row["tool"])))
    gpu = output(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]).split(", ")
    record = {
        "date": datetime.date.today().isoformat(),
        "commit": options.commit,
        "device": gpu[0],
        "driver": gpu[-1],
        "compute_sanitizer": output(["compute-sanitizer", "--version"]).splitlines(),
        "tools": {tool: " ".join(flags) for tool, flags in tools.items()},
        "limits": {"run": options.limit, "hangs": options.hang_limit},
        "rows": rows,
    }
    with open(options.json, "w") as file:
        # A row a line, for whoever reads it.
        head = json.dumps({**record, "rows": []}, indent=1)
        lines = ",\n".join("  " + json.dumps(row) for row in rows)
        file.write(head.replace('"rows": []', '"rows": [\n' + lines + "\n ]") + "\n")
    done = [row for row in rows if "not_run" not in row]
    print(f"{len(done)} of {len(rows)} runs, {sum(row['late'] for row in done)} out of time,",
          f"{len(hung)} cases hang without a tool")


if __name__ == "__main__":
    main()
