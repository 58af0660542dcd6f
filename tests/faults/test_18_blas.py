"""Row 18: BLAS and OpenMP pools deadlock or oversubscribe after a fork."""

from __future__ import annotations

import os
from typing import Any

import anyio
import pytest

from ramet import BranchManager, ForkSafetyWarning, host
from tests.faults.envs import Counter


class Matrices(Counter):
    """Multiplies matrices that are large enough for a pool of threads."""

    def __init__(self) -> None:
        super().__init__()
        import numpy as np  # not before the number of its threads was set

        self.matrix = np.random.default_rng(0).random((400, 400))
        self.product = float((self.matrix @ self.matrix).sum())  # a pool, if there is one, exists now

    def act(self, action: Any) -> Any:
        again = float((self.matrix @ self.matrix).sum())
        assert abs(again - self.product) < 1e-6 * self.product
        return len(os.listdir("/proc/self/task"))

    def threads(self) -> int:
        return len(os.listdir("/proc/self/task"))


async def test_blas_deadlocks_or_oversubscribes_after_a_fork() -> None:
    """64 branches multiply at once, with one thread each by default."""
    seen: list[int] = []

    async def multiply(env: Any, at: Any) -> None:
        seen.append((await env.step(at, "go")).next_state.observation)

    async with host(Matrices) as env:
        at, _ = await env.reset()
        assert await env.call("threads") == 1
        async with BranchManager.create(env) as mgr:
            await mgr.checkpoint("start", at)
            with anyio.fail_after(30):
                async with mgr.branches("start", 64) as pairs, anyio.create_task_group() as group:
                    for pair in pairs:
                        group.start_soon(multiply, *pair)
    assert seen == [1] * 64


async def test_a_blas_pool_that_was_asked_for_deadlocks_after_a_fork() -> None:
    """A user who asks for threads keeps them, is warned once by name, and the copies still multiply."""
    environ = {**os.environ, "OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}
    async with host(Matrices, environ=environ) as env:
        at, _ = await env.reset()
        assert await env.call("threads") == 2
        async with BranchManager.create(env) as mgr:
            with pytest.warns(ForkSafetyWarning, match="native threads.*: ") as caught:
                await mgr.checkpoint("start", at)
            assert len(caught) == 1
            with anyio.fail_after(30):
                async with mgr.branches("start", 4) as pairs:
                    for branch, below in pairs:
                        await branch.step(below, "go")
