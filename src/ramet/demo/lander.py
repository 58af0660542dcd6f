"""Land the lunar lander without a model: fork it at each decision, try every engine, keep the best forks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import NamedTuple

import anyio

from ramet import BranchManager, Pair, State, host


class Try(NamedTuple):
    pair: Pair
    reward: float = 0.0  # what the game has paid so far: it pays for nearing the pad slowly and upright
    engines: tuple[int, ...] = ()  # 0 none, 1 left, 2 main, 3 right
    done: bool = False


async def fly(begin: Try, pair: Pair, engine: int, hold: int, tries: list[Try]) -> None:
    (env, state), reward, done = pair, begin.reward, False
    while hold and not done:
        result = await env.step(state, engine)
        state, reward, done, hold = result.next_state, reward + result.reward, result.done, hold - 1
    tries.append(Try((env, state), reward, (*begin.engines, engine), done))


async def land(mgr: BranchManager, state: State, width: int = 8, hold: int = 15) -> AsyncGenerator[list[Try], None]:
    await mgr.checkpoint("0.0", state)
    beam = {"0.0": Try((mgr.env, state))}
    while beam:
        tries: list[Try] = []
        forks = [(begin, await mgr.branches(name, 4)) for name, begin in beam.items()]
        async with anyio.create_task_group() as tasks:
            for begin, pairs in forks:
                for engine, pair in enumerate(pairs):
                    tasks.start_soon(fly, begin, pair, engine, hold, tries)
        tries.sort(key=lambda one: one.reward, reverse=True)
        yield tries
        best = [] if tries[0].done else [one for one in tries[:width] if not one.done]
        old, beam = beam, {f"{len(one.engines)}.{number}": one for number, one in enumerate(best)}
        for name, one in beam.items():
            await mgr.checkpoint(name, one.pair[1], env=one.pair[0])
        for name in old:
            await mgr.release(name)


async def main() -> None:
    async with host("ramet.adapters.gymnasium:make_environment", args=("LunarLander-v3",)) as env:
        state, _ = await env.reset(seed=42)
        async with BranchManager.create(env) as mgr:
            async for tries in land(mgr, state):
                print(f"frame {tries[0].pair[1].metadata.step}: reward {tries[0].reward:.1f}")


if __name__ == "__main__":
    anyio.run(main)
