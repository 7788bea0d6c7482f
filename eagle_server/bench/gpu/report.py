"""The GPU benchmark's results as a short table and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

KILO = 1024  # tokens

Document = dict[str, Any]
Results = dict[str, Document]  # of the parts that were measured, by name


def results_of(document: Document) -> Results:
    return {name: part["result"] for name, part in document.get("parts", {}).items() if part["status"] == "ok"}


def markdown(document: Document) -> str:
    """The report: goals first, then each part in a few lines, then what was not measured."""
    machine, results = document.get("machine", {}), results_of(document)
    versions = ", ".join(f"{name} {number}" for name, number in machine.get("versions", {}).items() if number)
    lines = [f"# {machine.get('device', 'unknown device')}", "", f"{document['began']}; {versions}"]
    if document["settings"]["tiny"]:
        lines += ["", "**Tiny shapes: the times mean nothing.**"]
    for name, section in _SECTIONS.items():
        if name in results:
            lines += ["", *section(results[name])]
    return "\n".join([*lines, *_suite(document.get("tests")), *_missing(document)])


def _decode(result: Document) -> Iterator[str]:
    plain, fast = result["plain"], result["speculative"]
    yield "## Batch 1"
    yield ""
    yield from table(
        ("goal", "measured", "at most", ""),
        [
            (g["name"], f"{g['measured']:.3f}", f"{g['goal']:.2f}", "" if g["met"] else "**missed**")
            for g in result["goals"]
        ],
    )
    yield ""
    rows = [
        (
            name,
            f"{each['tokens_per_second']:.1f}",
            f"{each['tokens_per_cycle']:.2f}",
            f"{each['cycle_ms']:.3f}",
            f"{each['device_ms']:.3f}",
            ", ".join(f"{stage} {ms:.3f}" for stage, ms in each["stage_ms"].items()),
        )
        for name, each in (("plain", plain), ("speculative", fast))
    ]
    yield from table(("decoding", "tokens/s", "tokens/cycle", "cycle ms", "device ms", "stages, ms"), rows)
    yield ""
    yield (
        f"Speculative / plain: **{result['speedup']:.2f} x**. Floor of a plain step: {result['floor_ms']:.3f} ms. "
        f"{result['tokens_alike']} of {result['tokens_compared']} tokens agree before each text's first difference."
    )


def _floor(result: Document) -> Iterator[str]:
    yield (
        f"Copy {result['copy_gb_per_s']:.0f} GB/s, matrix-vector read {result['read_gb_per_s']:.0f} GB/s, matmul "
        f"{result['matmul_tflop_per_s']:.1f} TFLOP/s; {result['weight_bytes'] / 1e9:.2f} GB of weights per step, head "
        f"{result['head_weight_bytes'] / 1e9:.2f} GB."
    )


def _batches(result: Document) -> Iterator[str]:
    yield "## Batches"
    yield ""
    rows = [
        (
            row["batch"],
            f"{row['plain']['tokens_per_second']:.0f}",
            f"{row['speculative']['tokens_per_second']:.0f}",
            f"{row['speedup']:.2f} x",
            f"{row['plain']['cycle_ms']:.2f}",
            f"{row['speculative']['cycle_ms']:.2f}",
            f"{row['speculative']['tokens_per_cycle']:.2f}",
        )
        for row in result["rows"]
    ]
    yield from table(
        ("batch", "plain tok/s", "speculative tok/s", "ratio", "step ms", "cycle ms", "tokens/cycle"), rows
    )
    if "note" in result:
        yield f"\n{result['note']}"


def _contexts(result: Document) -> Iterator[str]:
    yield "## Contexts, batch 1, ms"
    yield ""
    series = {
        "floor": result["floor_ms"],
        "plain step": result["plain_step_ms"],
        **{f"verify, {way}": values for way, values in result["verify_ms"].items()},
        **{f"propose, {way}": values for way, values in result["propose_ms"].items()},
    }
    lengths = [str(length) for length in result["contexts"]]
    rows = [(name, *(f"{values[n]:.3f}" if n in values else "" for n in lengths)) for name, values in series.items()]
    yield from table(("", *lengths), rows)
    for way, reason in result["failed"].items():
        yield f"\n{way}: failed, {reason}"


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


def _peer(result: Document) -> Iterator[str]:
    ours = ", ".join(f"{name} {result[f'{name}_tokens_per_second']:.1f}" for name in ("plain", "speculative"))
    yield (
        f"Peer: transformers' generate {result['transformers_tokens_per_second']:.1f} tokens/s; here {ours}. Of "
        f"{result['tokens']} tokens {result['plain_tokens_alike']} (plain) and {result['speculative_tokens_alike']} "
        "(speculative) agree before the first difference."
    )


def _profile(result: Document) -> Iterator[str]:
    yield "## Where the device's time goes"
    for name, kernels in result.items():
        yield ""
        rows = [
            (f"`{k['kernel'][:70]}`", f"{k['ms_per_cycle']:.3f}", f"{k['calls_per_cycle']:.0f}", f"{k['share']:.0%}")
            for k in kernels
        ]
        yield from table((name, "ms", "calls", "share"), rows)


_SECTIONS = {
    "floor": _floor,
    "decode": _decode,
    "peer": _peer,
    "batches": _batches,
    "contexts": _contexts,
    "mla": _mla,
    "profile": _profile,
}


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
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    results = results_of(document)
    drawers = [(name, draw) for name, draw in _PANELS.items() if name in results]
    if not drawers:
        return
    figure, axes = plt.subplots(1, len(drawers), figsize=(5.4 * len(drawers), 4.2), dpi=100, squeeze=False)
    for axis, (name, draw) in zip(axes[0], drawers, strict=True):
        draw(axis, results[name])
    title = document.get("machine", {}).get("device", "")
    figure.suptitle(f"{title}{' (tiny shapes)' if document['settings']['tiny'] else ''}")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _plot_stages(axis: Any, result: Document) -> None:
    rows = [("plain", result["plain"]), ("speculative", result["speculative"])]
    stages = dict.fromkeys(name for _, row in rows for name in row["stage_ms"] if name != "emit")
    left = [0.0, 0.0]
    for stage in stages:
        widths = [row["stage_ms"].get(stage, 0.0) for _, row in rows]
        axis.barh([1, 0], widths, left=left, label=stage)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for y, (total, (_, row)) in zip((1, 0), zip(left, rows, strict=True), strict=True):
        axis.plot(row["cycle_ms"], y, "|", color="black", markersize=28)
        axis.annotate(f"{row['tokens_per_second']:.0f} tok/s", (total / 2, y), ha="center", va="center", color="white")
    axis.plot([], [], "|", color="black", markersize=8, label="wall time")
    axis.axvline(result["floor_ms"], color="gray", linestyle=":", label="floor")
    axis.set_yticks([1, 0], [name for name, _ in rows])
    axis.set_xlim(left=0)
    axis.set_ylim(-0.6, 2.3)
    axis.set_xlabel("ms per cycle, batch 1")
    axis.set_title(f"one cycle: {result['speedup']:.2f} x plain decoding")
    axis.legend(fontsize=8, ncols=4, loc="upper center")


def _plot_batches(axis: Any, result: Document) -> None:
    sizes = [row["batch"] for row in result["rows"]]
    ratios = [row["speedup"] for row in result["rows"]]
    axis.plot(sizes, ratios, "o-")
    for size, ratio in zip(sizes, ratios, strict=True):
        axis.annotate(f"{ratio:.2f}", (size, ratio), textcoords="offset points", xytext=(0, 7), ha="center")
    axis.axhline(1.0, color="gray", linestyle=":")
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.set_ylim(0, 1.2 * max([*ratios, 1.0]))
    axis.set_xlabel("batch")
    axis.set_title("speculative / plain throughput")


def _plot_contexts(axis: Any, result: Document) -> None:
    lengths = result["contexts"]
    series: list[tuple[str, dict[str, float], str | None, str]] = [
        ("floor", result["floor_ms"], "gray", ":"),
        ("plain step", result["plain_step_ms"], "black", "-"),
    ]
    series += [(f"verify, {way}", values, None, "-") for way, values in result["verify_ms"].items()]
    series += [(f"propose, {way}", values, None, "--") for way, values in result["propose_ms"].items()]
    for name, values, color, style in series:
        known = [n for n in lengths if str(n) in values]
        axis.plot(known, [values[str(n)] for n in known], style, marker="o", markersize=4, color=color, label=name)
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{n // KILO}k" if n >= KILO else str(n) for n in lengths])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("context, tokens")
    axis.set_ylabel("ms, batch 1")
    axis.set_title("long contexts")
    axis.legend(fontsize=8)


_PANELS = {"decode": _plot_stages, "batches": _plot_batches, "contexts": _plot_contexts}
