"""Older records in the form that commands write today: tables are written for that form alone.

`docs/results/FIELDS.md` describes both. What an older record does not say is left out.
"""

ORIGINALS = {"gpu": "device", "host": "host"}


def fact(name, kind, value):
    return {"name": name, "value": {kind: value}}


def attention_row(row):
    """A row of `bench attention` with `certified` in place of stages and facts."""
    of = row.pop("certified")
    row["stages"] = of["parts"]
    row["facts"] = [
        fact("originals", "text", ORIGINALS[of["originals"]]),
        fact("keys", "count", of["promoted_keys"]),
        fact("values", "count", of["promoted_values"]),
        fact("tail", "count", of["tail_mass"]),
        fact("E_key", "error", of["e_key"]),
        fact("E_val", "error", of["e_val"]),
        fact("E_round", "error", of["e_round"]),
        fact("quantized", "bytes", of["quantized_bytes"]),
        fact("promoted", "bytes", of["promoted_bytes"]),
        fact("dense", "bytes", of["dense_bytes"]),
        fact("dense heads", "text", f"{of['dense_heads']} of {of['heads']}"),
    ]


def report(of):
    """What `certificates` said of some steps."""
    return of and {
        "heads": of["heads"], "bounded_heads": of["heads"], "worst_bound": of["worst_bound"],
        "mixed_heads": of["promoted_heads"], "exact_heads": of["dense_heads"],
        "original_keys": of["promoted_keys"], "original_values": of["promoted_values"],
        "skipped": 0, "worst_skipped_mass": None,
    }


def tally(of):
    """What `prove` counted of one kind of input."""
    quantized, promoted, expanded, dense, layer = of["rungs"]
    return {
        "head_steps": of["head_steps"], "bounded": of["head_steps"] - of["unbounded"],
        "violations": of["violations"], "sources": [quantized, promoted + expanded, dense + layer],
        "ratio": [of["median"][0], of["tightest"]], "relative_error": None, "relative_bound": None,
        "facts": [fact("paper/ours", "error", of["paper_over_ours"])],
    }


def proof(data):
    """A record of `prove` from when it knew one scheme."""
    data["schemes"] = [{
        "kv": "certified", "seconds": data.pop("seconds"),
        "inputs": [[name, tally(of)] for name, of in data.pop("inputs").items()],
        "total": tally(data["total"]), "violations": data.pop("violations"), "notes": [],
        "alarms": data.pop("total")["rungs"][4],
    }]


def reports(data):
    """Every `certificates`, however deep, as `report`."""
    if isinstance(data, dict):
        if "certificates" in data:
            data["report"] = report(data.pop("certificates"))
        for of in data.values():
            reports(of)
    elif isinstance(data, list):
        for of in data:
            reports(of)


def today(data):
    """A record in today's form; one that is in it stays as it is."""
    if not isinstance(data, dict):
        return data
    if data.get("command") == "prove" and "schemes" not in data:
        proof(data)
    for row in data.get("rows", []):
        if "certified" in row:
            attention_row(row)
    reports(data)
    return data
