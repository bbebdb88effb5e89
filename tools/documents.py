#!/usr/bin/env python3
"""Says what must not stand in README.md and docs: paths of one machine, a diary, links that lead nowhere, long pages.

`python3 tools/documents.py` prints FILE:LINE and what is wrong, and exits with 1 if there is any. What was and is
no more belongs to docs/experiments alone. Needs nothing but Python.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MACHINE = re.compile(r"(?<![\w.>}])/(?:home|root|work|mnt|Users|tmp|var|opt)/\w")
DIARY = re.compile(
    r"\b(?:the record before|records? before this|an? earlier (?:run|record|version|dense|form)|the earlier record|"
    r"the run before|before this run|used to (?:be|take|have)|no longer|not any more|as it is now|as they are now|"
    r"previously|has become|have become|by now|since then|was the aim|were once|until recently|of today|newly)\b",
    re.IGNORECASE,
)
# Lines that a document may have. Speed is read to its end, so that what loses is read as well; what is no speed goes to
# another document. A page of an experiment is one question, read by whoever is about to ask it again.
PERFORMANCE = 250
EXPERIMENT = range(10, 31)
LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$")


def anchor(heading):
    """GitHub's name of a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(path):
    return {anchor(line.lstrip("#")) for line in prose(path) if line.startswith("#")}


def prose(path):
    """The lines of a document; of code blocks, nothing."""
    code = False
    for line in path.read_text().splitlines():
        if line.lstrip().startswith("```"):
            code = not code
            yield ""
        else:
            yield "" if code else line


def check(path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if MACHINE.search(line):
            yield number, "a path of one machine"
    if ROOT / "docs/experiments" not in path.parents:
        text = path.read_text()
        for found in DIARY.finditer(re.sub(r"\s", " ", text)):
            yield text[: found.start()].count("\n") + 1, f"a diary's words: {found.group(0)}"
    for number, line in enumerate(prose(path), 1):
        for inline, reference in LINK.findall(line):
            target, _, name = (inline or reference).partition("#")
            if "://" in target or target.startswith("mailto:"):
                continue
            there = (path.parent / target).resolve() if target else path
            if not there.exists():
                yield number, f"no such file: {target}"
            elif name and there.suffix == ".md" and name not in anchors(there):
                yield number, f"no such heading: {target}#{name}"


def experiments():
    """Pages of docs/experiments that its index does not have under their own title."""
    folder = ROOT / "docs/experiments"
    index = (folder / "README.md").read_text()
    for page in sorted(folder.glob("[0-9]*.md")):
        title = page.read_text().splitlines()[0].removeprefix("# ")
        if f"| [{page.name[:3]}]({page.name}) | {title} |" not in index:
            yield f"docs/experiments/README.md: no row for {page.name}, {title}"


def lengths():
    """Documents that are longer than they may be, or experiments that say too little."""
    lines = len((ROOT / "docs/performance.md").read_text().splitlines())
    if lines > PERFORMANCE:
        yield f"docs/performance.md: {lines} lines, {PERFORMANCE} at most"
    for page in sorted((ROOT / "docs/experiments").glob("[0-9]*.md")):
        lines = len(page.read_text().splitlines())
        if lines not in EXPERIMENT:
            yield f"docs/experiments/{page.name}: {lines} lines, {EXPERIMENT[0]} to {EXPERIMENT[-1]} are wanted"


def main():
    found = 0
    for what in [*experiments(), *lengths()]:
        found += 1
        print(what)
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "assets/README.md"]:
        for number, what in check(path):
            found += 1
            print(f"{path.relative_to(ROOT)}:{number}: {what}")
    sys.exit(f"{found} things to mend" if found else 0)


if __name__ == "__main__":
    main()
