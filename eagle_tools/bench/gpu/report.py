"""The GPU benchmark's results as a short table and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eagle_tools.bench.figures import save, subplots

KILO = 1024  # tokens
_SUMMARIZED = (1, 8, 64)  # batch sizes
_DRAFTING = ("adaptive", "chain of 5", "chain of 3", "one size")  # settings of the part `batches`

Document = dict[str, Any]
Results = dict[str, Document]  # of the parts that were measured, by name


def results_of(document: Document) -> Results:
    return {name: part["result"] for name, part in document.get("parts", {}).items() if part["status"] == "ok"}


def markdown(document: Document) -> str:
    """The report: a summary, then each part in a few lines, then what was not measured."""
    machine, results = document.get("machine", {}), results_of(document)
    versions = ", ".join(f"{name} {number}" for name, number in machine.get("versions", {}).items() if number)
    lines = [f"# {machine.get('device', 'unknown device')}", "", f"{document['began']}; {versions}"]
    if document["settings"]["tiny"]:
        lines += ["", "**Tiny shapes: the times mean nothing.**"]
    if summary := [*_summary(document, results)]:
        lines += ["", *summary]
    for name, section in _SECTIONS.items():
        if name in results:
            lines += ["", *section(results[name])]
    if any(name in results for name in _LONG):
        lines += ["", *_contexts(results)]
    return "\n".join([*lines, *_suite(document.get("tests")), *_missing(document)])


def _summary(document: Document, results: Results) -> Iterator[str]:
    """A table short enough for a README."""
    rows = [(f"{clients}, tokens/s", *rates) for clients, *rates in _served_rows(results)]
    for row in results.get("batches", {}).get("rows", ()) if not rows else ():
        if row["batch"] in _SUMMARIZED and "adaptive" in row:
            rates = [f"{row[name]['tokens_per_second']:.0f}" for name in ("plain", "adaptive")]
            who = "1 request" if row["batch"] == 1 else f"{row['batch']} requests"
            rows.append((f"{who}, tokens/s", *rates, f"{_ratio(row, 'adaptive'):.2f} x"))
    if "decode" in results:
        plain, fast, floor = (results["decode"][name] for name in ("plain", "speculative", "floor_ms"))
        ratio = f"{fast['cycle_ms'] / plain['cycle_ms']:.2f} x"
        rows.append((f"a cycle (floor {floor:.2f}), ms", f"{plain['cycle_ms']:.2f}", f"{fast['cycle_ms']:.2f}", ratio))
        rows.append(("tokens per cycle", f"{plain['tokens_per_cycle']:.2f}", f"{fast['tokens_per_cycle']:.2f}", ""))
    if "peer" in results:
        rows.append(("transformers, tokens/s", f"{results['peer']['transformers_tokens_per_second']:.0f}", "", ""))
    if rows:
        shape = "tiny shapes" if document["settings"]["tiny"] else "Llama-3.1-8B's shape"
        device = document.get("machine", {}).get("device", "")
        yield from table((f"{device}, {shape}", "plain", "speculative", ""), rows)


def _goals(result: Document) -> Iterator[str]:
    rows = [
        (g["name"], f"{g['measured']:.3f}", f"{g['goal']:.2f}", "" if g["met"] else "**missed**")
        for g in result["goals"]
    ]
    yield from table(("goal", "measured", "at most", ""), rows)


def _decode(result: Document) -> Iterator[str]:
    yield "## Batch 1, wall clock"
    yield ""
    yield from _goals(result)
    yield ""
    rows = [
        (name, *(f"{result[name][key]:.3f}" for key in ("tokens_per_second", "tokens_per_cycle", "cycle_ms")))
        for name in ("plain", "speculative")
    ]
    yield from table(("decoding", "tokens/s", "tokens/cycle", "cycle ms"), rows)
    yield ""
    yield (
        f"Speculative / plain: **{result['speedup']:.2f} x**. Floor of a plain step: {result['floor_ms']:.3f} ms. "
        f"{result['tokens_alike']} of {result['tokens_compared']} tokens agree before each text's first difference."
    )


def _stages(result: Document) -> Iterator[str]:
    yield "## Batch 1, sums of kernel times"
    yield ""
    yield from _goals(result)
    yield ""
    both = [result[name] for name in ("plain", "speculative")]
    names = dict.fromkeys(name for step in both[::-1] for name in step["ms"])  # a plain step has fewer stages
    rows = [
        _stage_row(name, [(step["ms"].get(name, 0.0), step["kernels"].get(name, 0)) for step in both]) for name in names
    ]
    rows.append(_stage_row("all", [(step["total_ms"], sum(step["kernels"].values())) for step in both]))
    rows.append(_stage_row("cycle, wall clock", [(step["cycle_ms"], 0) for step in both]))
    yield from table(("stage", "plain ms", "kernels", "speculative ms", "kernels"), rows)
    for name, step in zip(("plain step", "cycle"), both, strict=True):
        if step["top"]:
            yield ""
            yield from table((name, "ms", "calls", "share"), [_kernel_row(kernel) for kernel in step["top"]])


def _stage_row(name: str, values: Sequence[tuple[float, float]]) -> tuple[str, ...]:
    """Milliseconds and kernels, plain and speculative. A CPU has no kernels."""
    return (name, *(text for ms, kernels in values for text in (f"{ms:.3f}", f"{kernels:.0f}" if kernels else "")))


def _kernel_row(kernel: Document) -> tuple[str, ...]:
    return f"`{kernel['kernel'][:70]}`", f"{kernel['ms']:.3f}", f"{kernel['calls']:.0f}", f"{kernel['share']:.0%}"


def _floor(result: Document) -> Iterator[str]:
    yield (
        f"Copy {result['copy_gb_per_s']:.0f} GB/s, matrix-vector read {result['read_gb_per_s']:.0f} GB/s, matmul "
        f"{result['matmul_tflop_per_s']:.1f} TFLOP/s; {result['weight_bytes'] / 1e9:.2f} GB of weights per step, head "
        f"{result['head_weight_bytes'] / 1e9:.2f} GB."
    )


def _batches(result: Document) -> Iterator[str]:
    yield "## Batches"
    yield ""
    yield "Adaptive trees follow cost and load, as in the server by default; of the others each is of one size."
    yield ""
    drafting = [name for name in _DRAFTING if any(name in row for row in result["rows"])]
    rows = [
        (
            row["batch"],
            *(_rate(row, name) for name in ("plain", *drafting)),
            row.get("chosen", ""),
            "" if (best := _of_the_best(row)) is None else f"{best:.2f}",
        )
        for row in result["rows"]
    ]
    yield from table(("batch", "plain tok/s", *drafting, "chosen", "adaptive / best"), rows)
    yield ""
    rows = [(row["batch"], *(_cycle(row, name) for name in ("plain", *drafting))) for row in result["rows"]]
    yield from table(("batch, ms (tokens) per cycle", "plain", *drafting), rows)
    if "note" in result:
        yield f"\n{result['note']}"


def _rate(row: Document, name: str) -> str:
    """Tokens/s, and their ratio to those of plain decoding; "" if it was not measured."""
    if name not in row:
        return ""
    rate = f"{row[name]['tokens_per_second']:.0f}"
    return rate if name == "plain" else f"{rate} ({_ratio(row, name):.2f} x)"


def _cycle(row: Document, name: str) -> str:
    return f"{row[name]['cycle_ms']:.2f} ({row[name]['tokens_per_cycle']:.2f})" if name in row else ""


def _ratio(row: Document, name: str) -> float:
    ratio: float = row[name]["tokens_per_second"] / row["plain"]["tokens_per_second"]
    return ratio


def _of_the_best(row: Document) -> float | None:
    """The speed of adaptive trees / that of the best other setting; None: one is missing."""
    others = [row[name]["tokens_per_second"] for name in ("plain", *_DRAFTING[1:]) if name in row]
    return row["adaptive"]["tokens_per_second"] / max(others) if "adaptive" in row and others else None


def _served(result: Document) -> Iterator[str]:
    yield "## The server with its defaults, over HTTP"
    yield ""
    yield from table(("clients", "plain tok/s", "speculative tok/s", "ratio"), _served_rows({"served": result}))


def _served_rows(results: Results) -> list[tuple[str, ...]]:
    """Clients, tokens/s of the plain server and of the one with drafts, and their ratio."""
    rows = []
    served = results.get("served", {"plain": (), "speculative": ()})
    for slow, fast in zip(served["plain"], served["speculative"], strict=True):
        rates = [server["tokens_per_second"] for server in (slow, fast)]
        who = "1 client" if slow["clients"] == 1 else f"{slow['clients']} clients"
        who += ", mixed prompts" if slow["mixed"] else ""
        rows.append((who, *(f"{rate:.0f}" for rate in rates), f"{rates[1] / rates[0]:.2f} x"))
    return rows


def _contexts(results: Results) -> Iterator[str]:
    yield "## Contexts, batch 1, ms"
    yield ""
    yield "Verification and drafting are sums of kernel times; steps and cycles are by the wall clock."
    yield ""
    series = _series(results)
    lengths = list(dict.fromkeys(n for values in series.values() for n in values))
    rows = [(name, *(f"{values[n]:.3f}" if n in values else "" for n in lengths)) for name, values in series.items()]
    yield from table(("", *lengths), rows)


def _series(results: Results) -> dict[str, dict[str, float]]:
    """Milliseconds by context length, of the plain step and of each way."""
    series: dict[str, dict[str, float]] = {}
    if "contexts" in results:
        series |= {"floor": results["contexts"]["floor_ms"], "plain step": results["contexts"]["step_ms"]}
    for measured in (results[name] for name in _LONG[1:] if name in results):
        series.setdefault(f"verify, {measured['verify']}", measured["verify_ms"])
        series.setdefault(f"propose, {measured['draft']}", measured["propose_ms"])
        series[f"cycle, {measured['verify']} and {measured['draft']}"] = measured["cycle_ms"]
    return series


def _mla(result: Document) -> Iterator[str]:
    yield f"## MLA, one layer, {result['heads']} heads over {result['rank']} + {result['rope']}, device ms"
    yield ""
    names = [name for name in result["rows"][0] if name not in ("context", "kv_mb")]
    rows = [
        (row["context"], *(f"{row[n]['device_ms']:.4f}" if "device_ms" in row[n] else "failed" for n in names))
        for row in result["rows"]
    ]
    yield from table(("context", *names), rows)
    for reason in sorted({row[n]["failed"] for row in result["rows"] for n in names if "failed" in row[n]}):
        yield f"\nfailed: {reason}"


def _products(result: Document) -> Iterator[str]:
    yield "## Matrix products, device us"
    yield ""
    known = ("product", "outputs", "inputs", "rows")
    names = [name for name in result["rows"][0] if name not in known]
    rows = [
        (
            f"{row['product']} {row['outputs']} x {row['inputs']}",
            row["rows"],
            *(f"{row[name]:.1f}" if isinstance(row[name], float) else "failed" for name in names),
        )
        for row in result["rows"]
    ]
    yield from table(("product", "rows", *names), rows)
    for reason in sorted({row[name] for row in result["rows"] for name in names if isinstance(row[name], str)}):
        yield f"\nfailed: {reason}"


def _peer(result: Document) -> Iterator[str]:
    ours = ", ".join(f"{name} {result[f'{name}_tokens_per_second']:.1f}" for name in ("plain", "speculative"))
    yield (
        f"Peer: transformers' generate {result['transformers_tokens_per_second']:.1f} tokens/s; here {ours}. Of "
        f"{result['tokens']} tokens {result['plain_tokens_alike']} (plain) and {result['speculative_tokens_alike']} "
        "(speculative) agree before the first difference."
    )


def _build(result: Document) -> Iterator[str]:
    times = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in result["seconds"].items())
    yield f"Before the measurement, FlashInfer's modules were loaded or compiled: {times or 'none'}."


_SECTIONS = {
    "build": _build,
    "floor": _floor,
    "decode": _decode,
    "stages": _stages,
    "served": _served,
    "peer": _peer,
    "batches": _batches,
    "mla": _mla,
    "products": _products,
}
_LONG = ("contexts", "paged", "mask", "cascade", "per_node")  # parts that share a table


def _suite(tests: Document | None) -> Iterator[str]:
    if tests is None:
        return
    yield "\n## tests/gpu\n"
    if "passed" not in tests:
        yield f"Not run: {tests['reason']}."
        return
    yield f"{tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped ({tests['status']})."
    yield from (f"- failed: {reason}" for reason in tests["failures"])
    yield from (f"- skipped: {reason}" for reason in tests["skips"])


def _missing(document: Document) -> Iterator[str]:
    missing = {name: part for name, part in document.get("parts", {}).items() if part["status"] != "ok"}
    if missing:
        yield "\n## Not measured\n"
    for name, part in missing.items():
        yield f"- {name}: {part['status']}, {part.get('reason', '')}"


def table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """A Markdown table; all columns except the first are right-aligned."""
    yield f"| {' | '.join(map(str, head))} |"
    yield f"|---|{'---:|' * (len(head) - 1)}"
    yield from (f"| {' | '.join(map(str, row))} |" for row in rows)


def plot(path: Path, document: Document) -> None:
    """Stages of a cycle, speedup over batch, curves over context: one panel for each that was measured."""
    results = results_of(document)
    drawers = [draw for names, draw in _PANELS if any(name in results for name in names)]
    if not drawers:
        return
    figure, axes = subplots(1, len(drawers), figsize=(5.4 * len(drawers), 4.2), squeeze=False)
    for axis, draw in zip(axes[0], drawers, strict=True):
        draw(axis, results)
    title = document.get("machine", {}).get("device", "")
    figure.suptitle(f"{title}{' (tiny shapes)' if document['settings']['tiny'] else ''}")
    save(figure, path)


def _plot_stages(axis: Any, results: Results) -> None:
    rows = [(name, results["stages"][name]) for name in ("plain", "speculative")]
    left = [0.0, 0.0]
    for stage in dict.fromkeys(name for _, row in rows for name in row["ms"]):
        widths = [row["ms"].get(stage, 0.0) for _, row in rows]
        axis.barh([1, 0], widths, left=left, label=stage)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for y, (_, row) in zip((1, 0), rows, strict=True):
        axis.plot(row["cycle_ms"], y, "|", color="black", markersize=28)
    axis.plot([], [], "|", color="black", markersize=8, label="wall time")
    axis.set_yticks([1, 0], [name for name, _ in rows])
    axis.set_xlim(left=0)
    axis.set_ylim(-0.6, 2.3)
    axis.set_xlabel("ms per cycle, batch 1")
    axis.set_title("kernel times of one cycle")
    axis.legend(fontsize=8, ncols=4, loc="upper center")


def _plot_batches(axis: Any, results: Results) -> None:
    rows = results["batches"]["rows"]
    sizes, highest = [row["batch"] for row in rows], 1.0
    for name in _DRAFTING:
        ratios = {row["batch"]: _ratio(row, name) for row in rows if name in row}
        axis.plot([*ratios], [*ratios.values()], "o-" if name == "adaptive" else "o:", label=name)
        for size, ratio in ratios.items() if name == "adaptive" else ():
            axis.annotate(f"{ratio:.2f}", (size, ratio), textcoords="offset points", xytext=(0, 7), ha="center")
        highest = max(highest, *ratios.values()) if ratios else highest
    axis.axhline(1.0, color="gray", linestyle=":")
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.set_ylim(0, 1.2 * highest)
    axis.set_xlabel("batch")
    axis.set_title("speculative / plain throughput")
    axis.legend(fontsize=8)


def _plot_contexts(axis: Any, results: Results) -> None:
    lengths: list[int] = []
    for name, values in _series(results).items():
        lengths = sorted({*lengths, *map(int, values)})
        style = ":" if name == "floor" else "--" if name.startswith("propose") else "-"
        axis.plot([int(n) for n in values], list(values.values()), style, marker="o", markersize=4, label=name)
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{n // KILO}k" if n >= KILO else str(n) for n in lengths])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("context, tokens")
    axis.set_ylabel("ms, batch 1")
    axis.set_title("long contexts")
    axis.legend(fontsize=8)


_PANELS = ((("stages",), _plot_stages), (("batches",), _plot_batches), (_LONG, _plot_contexts))
