#!/usr/bin/env python3
"""Writes the tables of the documents, and the index of the records, from the records in docs/results.

`python3 tools/tables.py` writes, `python3 tools/tables.py --check` says what is not in step and exits with 1. A table
stands between `<!-- table:ID -->` and `<!-- end -->` in README.md or in a document of docs; `docs/results/current.toml`
says which records answer it. Needs nothing but Python 3.11.
"""

import re
import sys
import tomllib
from collections import defaultdict

from kinds import TABLES
from records import CURRENT, DEVICES, INDEX, RESULTS, ROOT, Record, Wrong, relative


def caption(records, document):
    """Device, commit and date of a table, with links to its records, numbered where there are several."""
    parts = []
    for n, record in enumerate(records, 1):
        link = f"[record{f' {n}' if len(records) > 1 else ''}]({relative(document, record)})"
        if n > 1 and (record.device, record.build) == (records[n - 2].device, records[n - 2].build):
            parts[-1] += f", {link}"
        else:
            parts.append(f"{DEVICES[record.device]}, {record.build}, {record.date}: {link}")
    lines = [""]
    for word in re.findall(r"(?:\[[^\]]*\]\([^)]*\)|[^\s\[]|\[)+", "*" + "; ".join(parts) + ".*"):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > 118:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def fill(document, current, records):
    """The document's text with every table written anew."""
    used = []

    def written(found):
        name = found.group(1)
        if name not in TABLES:
            raise Wrong(f"{document.relative_to(ROOT)}: tools/tables.py has no table {name}")
        if name not in current["tables"]:
            raise Wrong(f"{CURRENT.relative_to(ROOT)}: no record answers {name}")
        of = []
        for path in current["tables"][name]:
            if path not in records:
                raise Wrong(f"{CURRENT.relative_to(ROOT)}: {name} wants {path}, which is not there")
            of.append(records[path])
        used.append(name)
        lines = TABLES[name](of)
        if name != "questions":
            lines = caption(of, document) + [""] + lines
        return "\n".join([f"<!-- table:{name} -->", *lines, "<!-- end -->"])

    text = document.read_text()
    opened = text.count("<!-- table:")
    text = re.sub(r"<!-- table:([a-z0-9-]+) -->\n.*?<!-- end -->", written, text, flags=re.DOTALL)
    if len(used) != opened:
        raise Wrong(f"{document.relative_to(ROOT)}: a table without its `<!-- end -->`")
    return text, used


def wrapped(text, indent):
    """Words of a text in lines of at most 116 columns, code kept in one piece where it fits."""
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > 116 - indent:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return [" " * indent + line for line in lines + [line]]


def index(current, records):
    """docs/results/README.md."""
    answers = defaultdict(list)
    for name, paths in current["tables"].items():
        for path in paths:
            answers[path].append(name)
    lines = [
        "# Records",
        "",
        "*Written by `tools/tables.py` from the files in this folder and [current.toml](current.toml): edit these.*",
        "",
        "A record is what a command wrote on one machine in one run, unedited. Its path says the command, the device,",
        "the date and the commit of the binary. The tables of the documents are written from these files; what the",
        "fields mean is in [FIELDS.md](FIELDS.md). Times of two machines, or of two runs with other work beside them,",
        "are not comparable: the documents state ratios within one record. Records that a newer one replaces are in",
        "git's history.",
        "",
        "Commands are those of their commits: older ones have `--schemes` for `--kv`, and `naive` or `naive-int8-int4` for the",
        "scheme `int8-int4`.",
        "",
    ]
    commands = defaultdict(list)
    for record in records.values():
        commands[record.command].append(record)
    for command in sorted(commands):
        lines += [f"## {command}", ""]
        for record in sorted(commands[command], key=lambda each: (each.device, each.date, each.path)):
            name = record.path.removeprefix(command + "/")
            lines += [f"- [{name}]({record.path}):",
                      f"  {DEVICES[record.device]}, {record.build}, {record.date}.",
                      *wrapped(f"`{record.notes['command']}`:", 2), *wrapped(f"{record.notes['what']}.", 2)]
            if answers[record.path]:
                lines += wrapped("Answers: " + ", ".join(answers[record.path]) + ".", 2)
        lines.append("")
    return "\n".join(lines)


def main():
    checking = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not checking:
        sys.exit("usage: python3 tools/tables.py [--check]")
    current = tomllib.loads(CURRENT.read_text())
    records = {path: Record(path, notes) for path, notes in current["records"].items()}
    there = {path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*") if path.is_file()}
    there -= {"README.md", "FIELDS.md", "current.toml"}
    for path in sorted(there ^ set(records)):
        raise Wrong(f"docs/results/{path}: " + ("not named in current.toml" if path in there else "not there"))
    for record in records.values():
        record.check()
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    wanted, used, text = {}, [], ""
    for document in documents:
        if document != INDEX:
            wanted[document], names = fill(document, current, records)
            used += names
            text += wanted[document]
    for name in sorted(set(current["tables"]) - set(used)):
        raise Wrong(f"{CURRENT.relative_to(ROOT)}: no document has the table {name}")
    for path in records:
        if f"results/{path}" not in text:
            raise Wrong(f"docs/results/{path}: answers no table, and no document links to it")
    wanted[INDEX] = index(current, records)
    late = [path for path, new in wanted.items() if not path.exists() or path.read_text() != new]
    for path in late:
        if checking:
            print(f"{path.relative_to(ROOT)}: not in step with the records; run python3 tools/tables.py",
                  file=sys.stderr)
        else:
            path.write_text(wanted[path])
            print(f"{path.relative_to(ROOT)} written")
    sys.exit(1 if checking and late else 0)


if __name__ == "__main__":
    try:
        main()
    except Wrong as wrong:
        sys.exit(str(wrong))
