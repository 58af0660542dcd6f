"""Fault 26: an exception that cannot be pickled or printed kills the worker."""

from __future__ import annotations

import pickle
import traceback

import pytest

from ramet import BranchManager, EnvironmentFailed, HostFailed, host
from ramet.blocking import host as blocking_host
from tests.faults.probes import Thrower, Unbuildable

KINDS = {
    "unprintable": "tests.faults.probes:Unprintable",
    "not text": "tests.faults.probes:NotText",
    "recursive": "tests.faults.probes:Recursive",
    "surrogate": "tests.faults.probes:Surrogate",
    "local class": "tests.faults.probes:picky.<locals>.Picky",
    "cause": "builtins:ValueError",
    "group": "builtins:ExceptionGroup",
    "base exception": "tests.faults.probes:Outcome",
    "keyboard interrupt": "builtins:KeyboardInterrupt",
    "generator exit": "builtins:GeneratorExit",
    "huge text": "builtins:ValueError",
    "unpicklable arguments": "builtins:ValueError",
}


async def test_an_exception_that_cannot_be_pickled_or_printed() -> None:
    """Type, text and traceback of any exception cross as strings, and the branch stays usable."""
    async with host(Thrower) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset()
        await mgr.checkpoint("start", state)
        async with mgr.branch("start") as (branch, at):
            for kind, name in KINDS.items():
                with pytest.raises(EnvironmentFailed) as caught:
                    await branch.step(at, kind)
                error = caught.value
                assert (error.branch, error.method, error.type_name) == (branch.name, "step", name)
                assert isinstance(error.text, str)
                assert "in act" in error.traceback
                assert error.type_name.rpartition(":")[2] in str(error)
                assert "in act" in "".join(traceback.format_exception(error))
                assert str(pickle.loads(pickle.dumps(error))) == str(error)
            assert (await branch.step(at, 2)).next_state.observation == 2


@pytest.mark.parametrize("kind", ["unprintable", "not text", "recursive"])
async def test_an_unprintable_exception_of_a_live_object(kind: str) -> None:
    """The same from an object in the agent's own process."""
    async with BranchManager.create(Thrower(), strategy="clone") as mgr:
        state, _ = await mgr.env.reset()
        with pytest.raises(EnvironmentFailed) as caught:
            await mgr.env.step(state, kind)
        assert caught.value.type_name == KINDS[kind]
        assert (await mgr.env.step(state, 2)).next_state.observation == 2


async def test_an_unprintable_exception_of_the_factory() -> None:
    """A factory whose exception cannot be printed has failed like any other."""
    with pytest.raises(HostFailed, match="Unprintable"):
        await host(Unbuildable)
    with pytest.raises(HostFailed, match="Unprintable"):
        blocking_host(Unbuildable)
