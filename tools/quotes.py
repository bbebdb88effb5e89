#!/usr/bin/env python3
"""Says which code blocks of the documents are not what the file has that they quote.

A block with `<!-- from PATH -->` in the line above its fence must stand in that file, line by line as it is, from the
repository's root. `python3 tools/quotes.py` prints FILE:LINE and what is wrong, and exits with 1 if there is any.
Needs nothing but Python.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"<!-- from (\S+) -->")
FENCE = "```"


def blocks(lines):
    """Number and path of each mark, and the lines of the block below it; none if there is no block."""
    for number, line in enumerate(lines, 1):
        mark = MARK.fullmatch(line)
        if not mark:
            continue
        below = lines[number:]
        block = None
        if below and below[0].startswith(FENCE) and FENCE in below[1:]:
            block = below[1 : below.index(FENCE, 1)]
        yield number, mark[1], block


def wrong(path, block):
    if not block:
        return "no code block follows the mark"
    if not (ROOT / path).is_file():
        return f"no such file: {path}"
    text = (ROOT / path).read_text()
    if "\n" + "\n".join(block) + "\n" not in "\n" + text:
        known = set(text.splitlines())
        strange = next((line for line in block if line not in known), None)
        return f"not in {path}: {strange}" if strange else f"{path} has these lines, but not in this order"
    return None


def main():
    found = 0
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for number, path, block in blocks(document.read_text().splitlines()):
            if what := wrong(path, block):
                found += 1
                print(f"{document.relative_to(ROOT)}:{number}: {what}")
    sys.exit(f"{found} quotes to mend" if found else 0)


if __name__ == "__main__":
    main()
