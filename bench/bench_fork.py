"""Fork times against bare `os.fork`, fan-out, chains, memory of an idle branch, and how both grow.

The floor is a bare `os.fork` with a socketpair of its own until the child's first byte, measured in a process with the
same heap and the same modules: inside the hosted environment itself. Ours runs from the agent's call until the child's
first answer has arrived at the agent. Run: `python bench/bench_fork.py [--quick]`.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import anyio
from environments import private_dirty
from harness import LOOPS, Report, main, median_of

import ramet
import ramet.blocking


async def live_forks(mib: int, count: int, rounds: int, loop: str, report: Report) -> None:
    """A live fork until the child's first answer; and until it has also answered a step."""
    async with ramet.host("environments:Counter", args=(mib,)) as env:
        await env.reset()
        ours, stepped, floor = [], [], []
        for number in range(rounds + 1):
            bare = await env.call("bare_forks", count)
            times, with_step = [], []
            for _ in range(count):
                began = time.perf_counter()
                child, state = await env.fork()
                times.append(time.perf_counter() - began)
                await child.step(state, 1)
                with_step.append(time.perf_counter() - began)
                await child.aclose()
            if number:
                floor.append(median_of(bare))
                ours.append(median_of(times))
                stepped.append(median_of(with_step))
    report.add(f"live fork, {mib} MiB, {loop}", ours, floor, unit="ms", against="os.fork", bound=1.5)
    report.add(f"  and its first step, {mib} MiB, {loop}", stepped, floor, unit="ms", against="os.fork")


def live_forks_blocking(mib: int, count: int, rounds: int, report: Report) -> None:
    """The same through `ramet.blocking`."""
    with ramet.blocking.host("environments:Counter", args=(mib,)) as env:
        env.reset()
        ours, floor = [], []
        for number in range(rounds + 1):
            bare = env.call("bare_forks", count)
            times = []
            for _ in range(count):
                began = time.perf_counter()
                child, _ = env.fork()
                times.append(time.perf_counter() - began)
                child.close()
            if number:
                floor.append(median_of(bare))
                ours.append(median_of(times))
    report.add(f"live fork, {mib} MiB, blocking", ours, floor, unit="ms", against="os.fork", bound=1.5)


async def fan_out(mib: int, count: int, rounds: int, report: Report) -> None:
    """`branches(name, n)` of a source that every child reads back, against a serial loop of bare forks that do so."""
    async with ramet.host("environments:Counter", args=(mib,)) as env:
        state, _ = await env.reset()
        async with ramet.BranchManager.create(env) as mgr:
            await mgr.checkpoint("start", state)
            ours, serial, overlapped = [], [], []
            for number in range(rounds + 1):
                one_by_one = await env.call("bare_fan_out", count, serial=True)
                at_the_end = await env.call("bare_fan_out", count, serial=False)
                began = time.perf_counter()
                async with mgr.branches("start", count) as pairs:
                    async with anyio.create_task_group() as tasks:
                        for branch, _ in pairs:
                            tasks.start_soon(branch.call, "read_back")
                    took = time.perf_counter() - began
                if number:
                    serial.append(one_by_one * 1e3)
                    overlapped.append(at_the_end * 1e3)
                    ours.append(took * 1e3)
    what = f"{count} branches, {mib} MiB read back"
    report.add(what, ours, serial, unit="ms", against="serial os.fork", bound=1.3)
    report.add(what, ours, overlapped, unit="ms", against="overlapped os.fork")


async def chain(depth: int, rounds: int, report: Report) -> None:
    """A chain of copies, each of the one before: the last against the first.

    As a search does it, the ancestors end on the way (a checkpoint in each branch, and the one before released). With
    every ancestor alive the kernel's own bookkeeping grows with the depth, for a bare `os.fork` as well.
    """
    edge = max(1, depth // 10)
    first, last, first_alive, last_alive = [], [], [], []
    for _ in range(rounds):
        async with ramet.host("environments:Counter") as env:
            state, _ = await env.reset()
            async with ramet.BranchManager.create(env) as mgr:
                times = await _chain_of_checkpoints(mgr, state, depth)
            first.append(median_of(times[:edge]))
            last.append(median_of(times[-edge:]))
            times = await _chain_of_forks(env, depth)
            first_alive.append(median_of(times[:edge]))
            last_alive.append(median_of(times[-edge:]))
    report.add(f"a chain {depth} deep: its last branches", last, first, unit="ms", against="its first", bound=1.5)
    what = f"  with all ancestors alive, {depth} deep"
    report.add(what, last_alive, first_alive, unit="ms", against="its first")


async def _chain_of_checkpoints(mgr: ramet.BranchManager, state: Any, depth: int) -> list[float]:
    times = []
    await mgr.checkpoint("0", state)
    for number in range(depth):
        began = time.perf_counter()
        branch, state = await mgr.branch(str(number))
        times.append(time.perf_counter() - began)
        state = (await branch.step(state, 1)).next_state
        await mgr.checkpoint(str(number + 1), state, env=branch)
        await mgr.release(str(number))
    return times


async def _chain_of_forks(tip: Any, depth: int) -> list[float]:
    times = []
    for _ in range(depth):
        began = time.perf_counter()
        tip, state = await tip.fork()
        times.append(time.perf_counter() - began)
        await tip.step(state, 1)
    return times


async def memory(factory: str, count: int, rounds: int, report: Report) -> None:
    """Private dirty memory of an idle branch, against a bare child of the same frozen process that only echoes."""
    idle, stepped, floor = [], [], []
    for _ in range(rounds):
        async with ramet.host(factory) as env:
            state, _ = await env.reset(seed=1)
            async with ramet.BranchManager.create(env) as mgr:
                await mgr.checkpoint("start", state)
                async with mgr.branch("start") as (frozen, _):
                    floor.append(await frozen.call("bare_child_memory") / 2**20)
                async with mgr.branches("start", count) as pairs:
                    idle.append(_memory_of(pairs))
                    results = await mgr.step_all(pairs, [1] * count)
                    assert all(isinstance(result, ramet.StepResult) for result in results)
                    stepped.append(_memory_of(pairs))
    name = factory.partition(":")[2].lower()
    report.add(f"an idle branch, {name}", idle, floor, unit="MiB", against="bare echo", bound=1.25)
    report.add(f"  and after a step, {name}", stepped, floor, unit="MiB", against="bare echo")


def _memory_of(pairs: list[Any]) -> float:
    return statistics.median(private_dirty(branch.pid) for branch, _ in pairs) / 2**20


async def growth(counts: list[int], each: int, report: Report) -> None:
    """Fork time with many branches alive, relative to the first count, ours against bare."""
    async with ramet.host("environments:Counter") as env:
        state, _ = await env.reset()
        bare = await env.call("bare_fork_times_at", counts, each)
        async with ramet.BranchManager.create(env) as mgr:
            await mgr.checkpoint("start", state)
            ours = []
            alive = 0
            for count in counts:
                await mgr.branches("start", count - alive)
                alive = count
                times = []
                for _ in range(each):
                    began = time.perf_counter()
                    child, _ = await mgr.branch("start")
                    times.append(time.perf_counter() - began)
                    await child.aclose()
                ours.append(statistics.median(times))
    for count, mine, theirs in zip(counts[1:], ours[1:], bare[1:], strict=True):
        report.add(
            f"fork time at {count} alive, of that at {counts[0]}",
            [mine / ours[0]],
            [theirs / bare[0]],
            unit="x",
            against="os.fork",
            bound=1.25,
        )


def run(quick: bool) -> list[Report]:
    report = Report("forks")
    rounds = 1 if quick else 5
    for mib, count in ((0, 5), (1, 5)) if quick else ((0, 100), (64, 60), (566, 25)):
        live_forks_blocking(mib, count, rounds, report)
        for loop in LOOPS:
            anyio.run(live_forks, mib, count, rounds, loop, report, **LOOPS[loop])
    anyio.run(fan_out, 1 if quick else 64, 4 if quick else 64, rounds, report)
    anyio.run(chain, 10 if quick else 200, 1 if quick else 3, report)
    for factory in ("environments:CartPole", "environments:Counter"):
        anyio.run(memory, factory, 4 if quick else 50, 1 if quick else 3, report)
    anyio.run(growth, [2, 4] if quick else [100, 1000, 5000], 3 if quick else 30, report)
    return [report]


if __name__ == "__main__":
    main(run)
