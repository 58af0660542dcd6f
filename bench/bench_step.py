"""Steps per second over many branches, against a raw epoll loop that speaks the same messages with the same children.

Also what the `direct` strategy adds to a bare `env.step`. Run: `python bench/bench_step.py [--quick]`.
"""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from typing import Any

import anyio
import msgpack
from environments import Counter
from harness import LOOPS, Report, main

import ramet
from ramet.protocol import messages as m
from ramet.types import EnvironmentSpec, State, StepResult

Pairs = list[tuple[Any, State]]


def raw_steps_per_second(pairs: Pairs, steps: int) -> float:
    """The floor: one epoll loop, msgpack and nothing else; leaves the connections as ramet expects them."""
    links = {env._link.sock.fileno(): env._link for env, _ in pairs}
    numbers = {fd: link.peer._number for fd, link in links.items()}
    instants = {fd: link.peer.instant for fd, link in links.items()}
    left = dict.fromkeys(links, steps)
    pack = msgpack.Packer().pack
    epoll = select.epoll()
    for fd in links:
        epoll.register(fd, select.EPOLLIN)

    def send(fd: int) -> None:
        numbers[fd] += 1
        payload = pack([numbers[fd], m.STEP, instants[fd], 1])
        links[fd].sock.send(len(payload).to_bytes(4, "big") + payload)

    began = time.perf_counter()
    for fd in links:
        send(fd)
    waiting = len(links)
    while waiting:
        for fd, _ in epoll.poll():
            reply = msgpack.unpackb(links[fd].sock.recv(65536)[4:])
            instants[fd] = reply[2][0]
            left[fd] -= 1
            if left[fd]:
                send(fd)
            else:
                waiting -= 1
    took = time.perf_counter() - began
    epoll.close()
    for fd, link in links.items():
        link.peer._number, link.peer.instant = numbers[fd], instants[fd]
    return len(links) * steps / took


async def ramet_steps_per_second(pairs: Pairs, steps: int) -> float:
    """A task for each branch, each awaiting `env.step` in a loop."""

    async def walk(number: int) -> None:
        env, state = pairs[number]
        state = env._peer.at(env._peer.instant, state)
        for _ in range(steps):
            state = (await env.step(state, 1)).next_state
        pairs[number] = (env, state)

    began = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for number in range(len(pairs)):
            tasks.start_soon(walk, number)
    return len(pairs) * steps / (time.perf_counter() - began)


async def step_all_per_second(mgr: ramet.BranchManager, pairs: Pairs, steps: int) -> float:
    """The same by `step_all`, without a task for each branch."""
    began = time.perf_counter()
    current = [(env, env._peer.at(env._peer.instant, state)) for env, state in pairs]
    for _ in range(steps):
        results: Sequence[Any] = await mgr.step_all(current, [1] * len(current))
        current = [(env, result.next_state) for (env, _), result in zip(current, results, strict=True)]
    return len(pairs) * steps / (time.perf_counter() - began)


async def compare(branches: int, steps: int, rounds: int, loop: str, bound: float, report: Report) -> None:
    async with ramet.host(Counter) as env:
        state, _ = await env.reset()
        async with ramet.BranchManager.create(env) as mgr:
            await mgr.checkpoint("start", state)
            pairs: Pairs = list(await mgr.branches("start", branches))
            ours, all_, raw = [], [], []
            for number in range(rounds + 1):
                a = raw_steps_per_second(pairs, steps)
                b = await ramet_steps_per_second(pairs, steps)
                c = await step_all_per_second(mgr, pairs, steps)
                if number:  # the first round warms up
                    raw.append(a / 1e3)
                    ours.append(b / 1e3)
                    all_.append(c / 1e3)
    what = f"{branches} branches, {loop}"
    report.add(what, ours, raw, unit="k step/s", against="raw epoll", bound=bound, at_least=True)
    report.add(f"{what}, step_all", all_, raw, unit="k step/s", against="raw epoll")


class Pure(Counter):
    """A pure counter."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = EnvironmentSpec(name="pure counter", pure_step=True)

    def step(self, state: State, action: Any) -> StepResult:
        return StepResult(next_state=State(observation=state.observation + 1), reward=1.0)


async def direct(count: int, rounds: int, report: Report) -> None:
    """What the `direct` strategy adds to a bare step, in microseconds."""
    env = Pure()
    state, _ = env.reset()
    added, bare = [], []
    async with ramet.BranchManager.create(env) as mgr:
        await mgr.checkpoint("start", state)
        proxy, _ = await mgr.branch("start")
        for _ in range(rounds):
            began = time.perf_counter()
            for _ in range(count):
                env.step(state, 1)
            middle = time.perf_counter()
            for _ in range(count):
                await proxy.step(state, 1)
            end = time.perf_counter()
            bare.append((middle - began) / count * 1e6)
            added.append((end - middle) / count * 1e6 - bare[-1])
    report.add("direct: added to a bare step", added, [10.0] * rounds, unit="us", against="10 us", bound=1.0)


def run(quick: bool) -> list[Report]:
    branches, steps, rounds = (50, 5, 1) if quick else (1000, 20, 5)
    report = Report("steps per second")
    for loop, bound in (("asyncio", 0.65), ("uvloop", 0.7), ("trio", 0.5)):
        anyio.run(compare, branches, steps, rounds, loop, bound, report, **LOOPS[loop])
    anyio.run(direct, 100 if quick else 20_000, rounds, report)
    return [report]


if __name__ == "__main__":
    main(run)
