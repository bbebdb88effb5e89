#!/usr/bin/env python3
"""Assembles the PTX of sm_80 and sm_90 for the GPUs that compile it themselves, and says which kernels spill there.

`python3 tools/assemble.py target/ptx-build` takes `kernels.sm_80.ptx` and `kernels.sm_90.ptx` of that folder. A driver
for sm_86 and sm_89 compiles the first, one for sm_100, sm_103 and sm_120 the second, cut as the library cuts it where
that is for sm_90a alone (crates/device/src/device.rs, text_for). Prints each kernel that has spills
or a stack and exits with 1 if kernels-gpu/ptx-allow.toml does not excuse one of them, if a kernel is missing, if ptxas
refuses the text, or if a row of that file for these targets alone (`targets = "sm_100 sm_120"`) excuses nothing.
Needs nothing but Python 3.11 and ptxas (./setup --tools), which works with two threads, a minute a target at most.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Target, and whose text is assembled for it: that of the highest target embedded that is not above it.
TARGETS = {86: 80, 89: 80, 100: 90, 103: 90, 120: 90}
# ptxas's own threads. What they make has the registers and spills of what one makes.
THREADS = 2
ENTRY = re.compile(r"^\.visible \.entry (\w+)\(", re.MULTILINE)
# A kernel for one target alone, between two lines that name it; what the text is for where it has such kernels.
ALONE = re.compile(r"^// simt\.only_begin (\w+) \d+\n.*?^// simt\.only_end \1$", re.MULTILINE | re.DOTALL)
TARGET_ALONE = re.compile(r"^\.target sm_(\d+)a$", re.MULTILINE)
COMPILED = re.compile(r"Compiling entry function '(\w+)'")
USED = re.compile(r"(\d+) bytes (stack frame|spill stores|spill loads)")
# What local memory of the PTX itself explains is stack, too.
RULES = {"spill": {"spill"}, "stack": {"stack", "local-memory"}}


class Row:
    """A row of the list of what is excused."""

    def __init__(self, row):
        self.entry, self.rule = row["entry"], row["rule"]
        # The targets on which it excuses something.
        self.used = set()
        # Without the key it is for all.
        self.targets = [int(word.removeprefix("sm_")) for word in row.get("targets", "").split()]

    def covers(self, sm, entry, rule):
        named = entry.startswith(self.entry[:-1]) if self.entry.endswith("*") else entry == self.entry
        return named and self.rule in RULES[rule] and (not self.targets or sm in self.targets)


def rows(path):
    """The rows that the first generator's code is judged by."""
    of = tomllib.loads(path.read_text()).get("allow", []) if path.is_file() else []
    return [Row(row) for row in of if row["rule"] in set().union(*RULES.values()) and row.get("codegen") != "nvvm"]


def usage(log):
    """What `ptxas -v` says of each entry: bytes of stack, of spills stored and of spills loaded."""
    found, entry = {}, None
    for line in log.splitlines():
        if compiled := COMPILED.search(line):
            entry = compiled[1]
            found[entry] = {}
        elif entry:
            found[entry].update((what, int(bytes)) for bytes, what in USED.findall(line))
    return found


def rule(used):
    """The rule that an entry breaks, as `ptx-build` names it."""
    if used.get("spill stores") or used.get("spill loads"):
        return "spill"
    return "stack" if used.get("stack frame") else None


def for_other_targets(text):
    """The text without the kernels for its own target alone, and their names."""
    alone = ALONE.findall(text)
    if not alone:
        return text, alone
    return TARGET_ALONE.sub(r".target sm_\1", ALONE.sub("", text), count=1), alone


def assemble(ptxas, ptx, sm, out):
    """The log of ptxas, or why there is none."""
    command = [ptxas.absolute(), "-v", f"-arch=sm_{sm}", f"--split-compile={THREADS}", "-o", out, ptx]
    try:
        run = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        sys.exit(f"{ptxas}: {error.strerror}; run ./setup --tools")
    return run.stderr, run.returncode == 0


def judge(sm, entries, found, excused):
    """Prints the kernels that use memory as registers; what is wrong with the target's, a line each."""
    bare = []
    if missing := [entry for entry in entries if "spill stores" not in found.get(entry, {})]:
        yield f"sm_{sm}: ptxas says nothing of {len(missing)} kernels: {', '.join(missing[:5])}"
    for entry, used in sorted(found.items()):
        broken = rule(used)
        if not broken:
            continue
        covering = [row for row in excused if row.covers(sm, entry, broken)]
        for row in covering:
            row.used.add(sm)
        said = ", ".join(f"{used.get(what, 0)} bytes {what}" for what in ("stack frame", "spill stores", "spill loads"))
        print(f"  {entry}: {said}{' (excused)' if covering else ''}", flush=True)
        if not covering:
            bare.append(entry)
    if bare:
        yield f"sm_{sm}: {len(bare)} kernels spill, and nothing excuses it: {', '.join(bare)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the build has put the PTX")
    parser.add_argument("--ptxas", type=Path, default=ROOT / ".ferrokv/tools/bin/ptxas")
    parser.add_argument("--allow", type=Path, default=ROOT / "kernels-gpu/ptx-allow.toml")
    parser.add_argument("--target", type=int, action="append", choices=TARGETS, help="one of them alone")
    arguments = parser.parse_args()
    excused, wrong = rows(arguments.allow), []
    targets = arguments.target or list(TARGETS)
    for sm in targets:
        ptx = arguments.folder / f"kernels.sm_{TARGETS[sm]}.ptx"
        try:
            text, alone = for_other_targets(ptx.read_text())
        except OSError as error:
            sys.exit(f"{ptx}: {error.strerror}; build with a device compiler first")
        entries = ENTRY.findall(text)
        if not entries:
            sys.exit(f"{ptx}: no kernel in it")
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            taken = Path(folder) / ptx.name
            taken.write_text(text)
            log, took = assemble(arguments.ptxas, taken, sm, Path(folder) / "kernels.cubin")
        seconds = time.monotonic() - start
        if not took:
            said = [line for line in log.splitlines() if "error" in line or "fatal" in line]
            print(f"sm_{sm}: refused in {seconds:.0f} s")
            wrong.append(f"sm_{sm}: ptxas refused {ptx}: {'; '.join(said[:3]) or log.strip()[-300:]}")
            continue
        found = usage(log)
        spilling = sum(rule(used) is not None for used in found.values())
        print(f"sm_{sm}, of the PTX for sm_{TARGETS[sm]}: {len(found)} kernels in {seconds:.0f} s, {spilling} spill"
              + f" ({len(alone)} are for sm_{TARGETS[sm]} alone)" * bool(alone), flush=True)
        wrong += judge(sm, entries, found, excused)
    if not arguments.target:
        wrong += [f"{arguments.allow}: no kernel `{row.entry}` breaks the rule {row.rule} on sm_{sm}: remove it"
                  for row in excused for sm in sorted(set(row.targets) - row.used)]
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
