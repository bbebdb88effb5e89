"""The records of docs/results, and how figures are written: what tools/tables.py and its tables share."""

import json
import re
from functools import lru_cache
from pathlib import Path

from forms import today

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs/results"
CURRENT = RESULTS / "current.toml"
INDEX = RESULTS / "README.md"
DEVICES = {"h100": "H100", "h200": "H200", "cpu-2-threads": "two CPU threads"}
# Attention over INT8 keys and INT4 values with nothing promoted, as records have called it.
SCHEMES = {"naive": "int8-int4", "naive-int8-int4": "int8-int4"}
PATH = re.compile(r"(?P<command>[a-z0-9-]+)/(?P<device>[a-z0-9-]+)/"
                  r"(?P<date>\d{4}-\d\d-\d\d)-(?P<commit>(?:before-)?[0-9a-f]{7})"
                  r"(?:-(?P<part>[a-z0-9.-]+))?\.(?:json|txt)")


class Wrong(Exception):
    """What does not fit together, for whoever edits the records."""


class Record:
    """One file of docs/results: where it lies says command, device, date and commit."""

    def __init__(self, path, notes):
        found = PATH.fullmatch(path)
        if not found:
            raise Wrong(f"docs/results/{path}: not <command>/<device>/<date>-<commit>[-<part>].json or .txt")
        self.path, self.notes = path, notes
        self.command, self.device, self.date, self.commit = found.group("command", "device", "date", "commit")
        # A build that was never committed is named by the commit that came next: it is no commit of its own.
        unnamed = self.commit.startswith("before-")
        self.commit = self.commit.removeprefix("before-")
        self.build = f"no commit, a build ahead of {self.commit}" if unnamed else f"commit {self.commit}"
        if self.device not in DEVICES:
            raise Wrong(f"docs/results/{path}: tools/tables.py has no name for the device {self.device}")

    @property
    def text(self):
        return (RESULTS / self.path).read_text()

    @property
    def data(self):
        return load(self.path)

    def rows(self, **fields):
        """The rows that have these values."""
        return [row for row in self.data["rows"] if all(row.get(name) == value for name, value in fields.items())]

    def check(self):
        """That the path says what the record says of itself."""
        if not self.path.endswith(".json"):
            return
        data = self.data
        environment = data.get("environment", {})
        date = environment.get("date") or data.get("date")
        commit = environment.get("commit") or data.get("commit")
        gpu = (environment.get("gpu") or {}).get("name") or data.get("device")
        if date and date[:10] != self.date:
            raise Wrong(f"docs/results/{self.path}: the record is of {date[:10]}")
        if commit and f"commit {commit}" != self.build:
            raise Wrong(f"docs/results/{self.path}: the record is of commit {commit}")
        if gpu and gpu != "CPU" and DEVICES[self.device] not in gpu:
            raise Wrong(f"docs/results/{self.path}: the record is of {gpu}")


@lru_cache(maxsize=None)
def load(path):
    return today(json.loads((RESULTS / path).read_text()))


def facts(of):
    """The figures that a scheme alone knows the meaning of: name and bare value."""
    return {fact["name"]: next(iter(fact["value"].values())) for fact in of["facts"]}


def relative(document, record):
    folder = document.parent
    up = ""
    while folder not in (RESULTS / record.path).parents:
        folder, up = folder.parent, up + "../"
    return up + (RESULTS / record.path).relative_to(folder).as_posix()


def scheme(name):
    base = re.match(r"[^:/]*", name)[0]
    return SCHEMES.get(base, base) + name[len(base):]


def tokens(count):
    for size, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if count % size == 0:
            return f"{count // size}{letter}"
    return str(count)


def table(head, rows):
    """A Markdown table; every column but the first few words aligned as it comes."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        if len(row) != len(head):
            raise Wrong(f"a row of {len(row)} cells below {len(head)} heads: {row}")
        lines.append("| " + " | ".join(row) + " |")
    return lines


def ratio(value):
    return "–" if value is None else f"{value:.2f}"


def losing(value):
    """A ratio, bold where the other one is faster."""
    if value is None:
        return "–"
    return f"**{value:.2f}**" if value < 0.995 else f"{value:.2f}" if value < 9.995 else f"{value:.1f}"


def interval(low, high, digits):
    return f"[{low:+.{digits}f}, {high:+.{digits}f}]"
