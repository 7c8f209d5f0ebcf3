"""One self-contained HTML page about a comparison: it opens offline, prints, and claims no more than it shows."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from plots.files import write_whole
from plots.runs import Run
from tasks.compare.statistics import LEVEL, smallest_permutation_p
from tasks.compare.summary import Row
from tasks.compare.table import HEADINGS, cells

ENOUGH_SEEDS = 3
"""With fewer paired seeds no difference is called shown: a t-test on two leaves one degree of freedom."""


def write_report(
    path: str | Path,
    *,
    name: str,
    runs: Sequence[Run],
    rows: Sequence[Row],
    picture: Path,
    problems: Sequence[str],
    arms: Mapping[str, Sequence[tuple[str, str]]],
    settings: Sequence[str],
    command: str,
) -> Path:
    """Write the page.

    Args:
        path: The HTML file.
        name: Of the experiment.
        runs: The finished runs.
        rows: Their summary.
        picture: The loss curves as SVG; the page carries a copy.
        problems: Sentences about runs that are left out, and what else to mind.
        arms: Path and text of each arm's configs, the later overriding the earlier.
        settings: Flags that overrule the configs in every arm.
        command: What makes all this again.

    Raises:
        OSError: A file cannot be read or written.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html.j2").render(
        name=name,
        facts=facts(runs),
        # As an image, not as markup: names inside the SVG can then never become part of the page.
        picture=base64.b64encode(picture.read_bytes()).decode(),
        headings=HEADINGS,
        table=[(row.is_baseline, cells(row)) for row in rows],
        verdicts=[verdict(row) for row in rows],
        warnings=list(problems),
        arms=arms,
        settings=list(settings),
        command=command,
    )
    return write_whole(path, page)


def facts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Name what was compared, on what and how it was measured; values that differ stand side by side."""

    def either(*keys: str, show: Callable[[Any], str] = str) -> str:
        values = dict.fromkeys(_found(run, keys) for run in runs)
        return " or ".join("unknown" if value is None else show(value) for value in values) or "unknown"

    def count(value: Any) -> str:
        return f"{value:,.0f}"

    size = either("data", "size", show=count)
    trained = f"{either('steps', show=count)} steps, {either('tokens', show=count)} bytes"
    window = f"context {either('validation', 'context', show=count)}, "
    window += f"stride {either('validation', 'stride', show=count)} bytes"
    scored = either("validation", "bytes_scored", show=count)
    targets = either("validation", "split_targets", show=count)
    return [
        ("Data", f"{either('data', 'name')}, {size} bytes"),
        ("SHA-256 of the data", either("data", "sha256")),
        ("Training per run", trained),
        ("Seeds", ", ".join(map(str, sorted({run.seed for run in runs})))),
        ("Measured on", f"{either('validation', 'split')} split, {either('validation', 'evaluation')}"),
        ("Measured with", window),
        ("Bytes scored", f"{scored} of the {targets} that the split has" if targets != "unknown" else scored),
        ("Device", f"{either('device')}, threads: {either('threads')}, precision {either('precision')}"),
        ("Versions", f"torch {either('torch')}, code {either('code_version')}"),
    ]


def warnings(runs: Sequence[Run], rows: Sequence[Row]) -> Iterable[str]:
    """Say what would make the comparison unfair or unsound."""
    # Named one by one: a result may differ between runs, how it was obtained may not.
    alike = (
        ("Runs used different data", [("data", "name"), ("data", "size"), ("data", "sha256")]),
        (
            "Validations were measured differently",
            [("validation", key) for key in ("split", "evaluation", "context", "stride", "bytes_scored")],
        ),
        ("Runs trained for different numbers of steps", [("steps",)]),
        ("Runs trained on different numbers of bytes", [("tokens",)]),
    )
    for sentence, paths in alike:
        if len({tuple(_found(run, path) for path in paths) for run in runs}) > 1:
            yield f"{sentence}: the arms are not comparable as they stand."
    for row in rows:
        if row.skipped_steps:
            yield f"{row.arm} left out {row.skipped_steps} steps whose loss or gradients were not finite."
    pairs = [len(row.paired_seeds) for row in rows if row.difference is not None]
    if pairs and min(pairs) >= ENOUGH_SEEDS and smallest_permutation_p(min(pairs)) >= LEVEL:
        yield (
            f"With {_seeds(min(pairs))} a permutation test cannot give less than {smallest_permutation_p(min(pairs)):.2g}: "
            "what is concluded below rests on the t-test, which takes the differences to be normal."
        )
    if len({tuple(_found(run, (key,)) for key in ("device", "threads", "processes")) for run in runs}) > 1:
        yield "Runs had different devices, threads or numbers of processes: their speeds are not comparable."
    if not any(row.is_baseline for row in rows):
        yield "The baseline has no finished run: no differences are given."


def _found(run: Run, keys: Sequence[str]) -> Any:
    value: Any = run.info
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def verdict(row: Row) -> str:
    """Say in one sentence what an arm's runs show, and no more than that."""
    seeds = len(row.seeds)
    if row.diverged:
        which = ", ".join(map(str, row.diverged))
        return f"{row.arm} diverged with seed {which}: nothing is concluded from it."
    end = f"{row.arm} ended at {row.bpc:.3f} bpc" + (f" ± {row.bpc_half:.3f}" if row.bpc_half is not None else "")
    if row.is_baseline:
        return f"{end} ({_seeds(seeds)}); it is the baseline."
    paired = len(row.paired_seeds)
    few = f"{_seeds(paired)} {'is' if paired == 1 else 'are'} too few to conclude"
    if row.difference is None or row.difference_half is None:
        why = few if paired < 2 else f"{row.baseline} diverged"
        return f"{end} ({_seeds(seeds)}). No difference to {row.baseline} is given: {why}."
    low, high = row.difference - row.difference_half, row.difference + row.difference_half
    if row.p is None:
        same = f"{row.arm} differed from {row.baseline} by {row.difference:+.3f} bpc with every one of {_seeds(paired)}"
        return f"{same}: without any spread there is no interval and no t-test, and nothing is concluded."
    assert row.p_holm is not None
    numbers = (
        f"{row.difference:+.3f} bpc (95% interval {low:+.3f} to {high:+.3f}, p {_p(row.p)}, "
        f"corrected for the number of arms {_p(row.p_holm)}, {paired} paired seeds)"
    )
    if paired < ENOUGH_SEEDS:
        return f"{row.arm} differed from {row.baseline} by {numbers}, but {few}."
    if row.p_holm >= LEVEL:
        return f"No difference is shown between {row.arm} and {row.baseline}: {numbers}."
    better = "lower (better)" if row.difference < 0 else "higher (worse)"
    return f"{row.arm} ended {better} than {row.baseline}: {numbers}."


def _p(value: float) -> str:
    if value < 0.001:
        return "< 0.001"
    return f"= {value:.4f}" if abs(value - LEVEL) < 0.0005 else f"= {value:.3f}"


def _seeds(count: int) -> str:
    return f"{count} seed{'' if count == 1 else 's'}"
