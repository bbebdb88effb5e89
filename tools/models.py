"""Tables of a model's steps and prompts, in Markdown, from records of `bench model`."""

from records import losing, scheme, table, tokens


def model(records, ends=False):
    """A row a scheme; of a second record only the schemes that the first one has not. Of the first and the last
    context, without columns that are empty, if `ends`."""
    contexts, schemes = [], {}
    for record in records:
        new = set(map(scheme, (row["kv"] for row in record.data["rows"]))) - set(schemes)
        for row in record.data["rows"]:
            if scheme(row["kv"]) in new:
                schemes.setdefault(scheme(row["kv"]), {})[row["context"]] = row
                schemes[scheme(row["kv"])]["record"] = records.index(record) + 1
                contexts += [row["context"]] * (row["context"] not in contexts)
    contexts = sorted({min(contexts), max(contexts)}) if ends else contexts
    lines = []
    for name, of in schemes.items():
        cells = [f"`{name}`" + (f" (record {of['record']})" if of["record"] > 1 else "")]
        for context in contexts:
            row = of.get(context)
            if row is None:
                cells += ["–"] * 5
                continue
            found, bus = row.get("found"), row.get("bus_bytes")
            cells += [f"{row['median_us'] / 1000:.2f}", losing(row["times_dense"]), f"{row['fixed_us'] / 1000:.2f}",
                      "–" if found is None else f"{found * 100:.0f} %",
                      "–" if bus is None else f"{bus / 2**20:.0f} MiB"]
        lines.append(cells)
    heads = [head for context in contexts
             for head in (f"{tokens(context)}: ms", "dense / it", "the rest", "found", "bus")]
    if ends:
        some = [i for i in range(len(heads)) if any(cells[i + 1] != "–" for cells in lines)]
        heads = [heads[i] for i in some]
        lines = [[cells[0], *(cells[i + 1] for i in some)] for cells in lines]
    return table(("`--kv`", *heads), lines)


def model_ends(records):
    return model(records, ends=True)


def model_batches(records):
    """A row a scheme and a number of sequences, at the shortest and the longest context."""
    (record,) = records
    contexts = sorted({row["context"] for row in record.data["rows"]})
    contexts = sorted({contexts[0], contexts[-1]})
    found = {(row["kv"], row["batch"], row["context"]): row for row in record.data["rows"]}
    lines = []
    for batch in sorted({key[1] for key in found}):
        for name in dict.fromkeys(key[0] for key in found):
            cells = [f"`{scheme(name)}`", str(batch)]
            for context in contexts:
                row = found.get((name, batch, context))
                # What the GPU's memory does not hold is not measured.
                cells += ["–"] * 4 if row is None else [
                    f"{row['median_us'] / 1000:.2f}", f"{row['tokens_per_second']:.0f}",
                    losing(row["times_dense"]), f"{row['fixed_us'] / 1000:.2f}"]
            lines.append(cells)
    heads = [head for context in contexts
             for head in (f"{tokens(context)}: ms", "tokens/s", "dense / it", "rest")]
    return table(("`--kv`", "batch", *heads), lines)


def prompts(records):
    """A row a scheme and prompt; those of another library behind them, beside `dense`."""
    (record, other) = records
    lines = []
    for row in record.data["prompts"]:
        lines.append((f"`{scheme(row['kv'])}`", tokens(row["tokens"]), f"{row['median_us'] / 1000:.0f}",
                      f"{row['tokens_per_second']:.0f}", losing(row["times_dense"]), f"{row['cache_of_f16']:.3f}"))
    dense = {row["tokens"]: row["median_us"] for row in record.data["prompts"] if row["kv"] == "dense"}
    for row in other.data["rows"]:
        us, beside = row["median_us"], dense.get(row["tokens"])
        lines.append((f"PyTorch, {row['dtype']}, {row['config']}", tokens(row["tokens"]), f"{us / 1000:.0f}",
                      f"{row['tokens'] * 1e6 / us:.0f}", "–" if beside is None else f"{beside / us:.2f}", "1.000"))
    return table(("`--kv`", "prompt", "ms", "tokens/s", "dense / it", "cache over f16"), lines)
