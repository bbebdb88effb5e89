#!/usr/bin/env python3
"""Says which lines are too long: documents have at most 120 columns, comments in Rust at most 110.

`python3 tools/columns.py` prints FILE:LINE and the width, and exits with 1 if there is any. Tables and code blocks of
documents count; a line that is nothing but a link's target (`[name]: target`) does not. Needs nothing but Python.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT, COMMENT = 120, 110


def lines(path):
    return enumerate(path.read_text().splitlines(), 1)


def wide_document(line):
    return len(line) > DOCUMENT and not re.match(r"\[[^\]]+\]: \S+$", line)


def wide_comment(line):
    return len(line) > COMMENT and line.lstrip().startswith("//")


def main():
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "*.md", "*.rs"], cwd=ROOT, check=True,
                           capture_output=True, text=True).stdout.splitlines()
    found = 0
    for path in sorted(ROOT / name for name in names):
        if not path.is_file():
            continue
        wide = wide_document if path.suffix == ".md" else wide_comment
        for number, line in lines(path):
            if wide(line):
                found += 1
                print(f"{path.relative_to(ROOT)}:{number}: {len(line)} columns")
    if found:
        sys.exit(f"{found} lines are too long: documents have {DOCUMENT} columns, comments {COMMENT}")


if __name__ == "__main__":
    main()
