"""What the benchmarks share: rounds in turn, ratios first, one table for people and one JSON line for machines."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

LOOPS: dict[str, dict[str, Any]] = {
    "asyncio": {"backend": "asyncio"},
    "uvloop": {"backend": "asyncio", "backend_options": {"use_uvloop": True}},
    "trio": {"backend": "trio"},
}


@dataclass
class Report:
    """Collects rows of a benchmark and prints them.

    Attributes:
        title: what is measured.
        rows: the rows: what, ours, the floor or peer, the ratios of the rounds, the bound that is promised.
    """

    title: str
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self,
        what: str,
        ours: Sequence[float],
        other: Sequence[float],
        *,
        unit: str,
        against: str,
        bound: float | None = None,
        at_least: bool = False,
    ) -> None:
        """Add a row; `ours[i]` and `other[i]` are of the same round. The bound is on the median ratio."""
        ratios = [a / b for a, b in zip(ours, other, strict=True)]
        middle = statistics.median(ratios)
        kept = None if bound is None else (middle >= bound if at_least else middle <= bound)
        self.rows.append(
            {
                "what": what,
                "against": against,
                "ratio": [min(ratios), middle, max(ratios)],
                "bound": bound,
                "kept": kept,
                "at_least": at_least,
                "ours": statistics.median(ours),
                "other": statistics.median(other),
                "unit": unit,
            }
        )

    def show(self) -> bool:
        """Print the table and the JSON line; whether every bound was kept."""
        print(f"\n{self.title}\n{machine()}\n")
        columns = f"{'what':38} {'ratio min / median / max':>26} {'bound':>8}"
        head = f"{columns}  {'ours':>10} {'other':>10} {'unit':8} against"
        print(head + "\n" + "-" * len(head))
        for row in self.rows:
            ratio = " / ".join(f"{value:.2f}" for value in row["ratio"])
            sign = ">=" if row["at_least"] else "<="
            bound = "" if row["bound"] is None else f"{sign} {row['bound']:g}"
            mark = {None: " ", True: " ", False: "!"}[row["kept"]]
            print(
                f"{row['what']:38} {ratio:>26} {bound:>8}{mark} {row['ours']:>10.3f} {row['other']:>10.3f}"
                f" {row['unit']:8} {row['against']}"
            )
        print(json.dumps({"title": self.title, "machine": machine(), "rows": self.rows}))
        return all(row["kept"] is not False for row in self.rows)


def machine() -> str:
    """The machine and the versions, in a line."""
    names = ("anyio", "msgpack", "uvloop", "trio")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, {memory} GiB, {platform.system()} {platform.release()},"
        f" Python {platform.python_version()}, {versions}"
    )


def median_of(times: Sequence[float]) -> float:
    """The median, in milliseconds."""
    return statistics.median(times) * 1e3


def main(run: Callable[[bool], Mapping[str, Report] | Sequence[Report]]) -> None:
    """Run a benchmark from the command line: `--quick` for a smoke test; exits with 1 if a bound was not kept."""
    reports = run("--quick" in sys.argv[1:])
    kept = [report.show() for report in (reports.values() if isinstance(reports, Mapping) else reports)]
    sys.exit(0 if all(kept) or "--quick" in sys.argv[1:] else 1)
