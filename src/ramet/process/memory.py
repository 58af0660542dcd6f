"""What a fork shares: keep the garbage collector from touching it, and measure what became private."""

from __future__ import annotations

import gc

__all__ = ["collect_if_due", "freeze", "private_memory", "thaw"]


_AT_LEAST = 70_000  # allocations; CPython's own thresholds come to as much
_pending = 0
_tracked = 0


def freeze(*, collect: bool) -> None:
    """Freeze the heap for the forks that follow, so that a child's collections leave shared pages alone.

    Args:
        collect: collect the garbage first (0.3 s at four million containers), for a process that will
            be forked many times.
    """
    global _pending, _tracked
    young, middle, old = gc.get_count()
    first, second, _ = gc.get_threshold()
    _pending += young + first * (middle + second * old)
    if collect:
        gc.collect()
        _pending = 0
    elif gc.isenabled():
        gc.collect(0)  # a few hundred objects at most; as old ones they would wait for a full collection
    gc.freeze()
    if collect:
        _tracked = gc.get_freeze_count()


def collect_if_due() -> None:
    """Collect the garbage that forks keep the collector from: a freeze sets its counters back. Not while frozen.

    A full collection is due by the collector's own rule, when a quarter of what there was has been added.
    """
    global _pending, _tracked
    if _pending > max(_AT_LEAST, _tracked // 4) and gc.isenabled():
        _pending = 0
        gc.collect()
        gc.freeze()
        _tracked = gc.get_freeze_count()
        gc.unfreeze()


def thaw() -> None:
    """Give the frozen objects back to the collector, in a process that goes on."""
    gc.unfreeze()


def private_memory(pid: int) -> dict[str, int]:
    """Private dirty memory and proportional set size of a process, in bytes.

    Raises:
        OSError: there is no such process, or no `/proc`.
    """
    wanted = {"Private_Dirty": 0, "Pss": 0}
    with open(f"/proc/{pid}/smaps_rollup") as table:
        for line in table:
            key, _, rest = line.partition(":")
            if key in wanted:
                wanted[key] = int(rest.split()[0]) * 1024
    return wanted
