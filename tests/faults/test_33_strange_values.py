"""Fault 33: lone surrogates, integers over 64 bits, NaN, dicts with integer keys in actions or observations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from ramet import Action, BranchManager, EncodeError, ToolCall, host
from ramet.blocking import host as blocking_host
from tests.faults.probes import Cyclic, Echo

STRANGE: list[Any] = [
    "\ud800",
    "text \udcff with \ud83d a half",
    {"\udc80": "\udc80"},
    b"\xff\xfe",
    2**64,
    -(2**63) - 1,
    2**5000,
    {2**70: -(2**70)},
    [True, 1, 1.0, None],
    {1: "one", 2.5: "x", None: 0, (1, 2): "pair", frozenset({3}): "set"},
    float("inf"),
    -0.0,
    [[[[[{"deep": [(), {}, set()]}]]]]],
    "",
    "\x00",
    {"": {"": ""}},
    complex(0.0, -0.0),
    range(10**30),
    "é" * 10_000,
    {str(number): number for number in range(1000)},
]


def same(one: Any, other: Any) -> bool:
    """Equal, and of the same types all the way down."""
    return one == other and repr(one) == repr(other)


async def test_strange_values_in_actions_and_observations() -> None:
    """What models write and simulators show arrives as it was sent, in a host, a branch and a fork."""
    async with host(Echo) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset()
        await mgr.checkpoint("start", state)
        fork, forked = await env.fork()
        branch, at = await mgr.branch("start")
        for each, now in ((env, state), (branch, at), (fork, forked)):
            state = now
            for value in STRANGE:
                result = await each.step(state, value)
                state = result.next_state
                assert same(state.observation, value), value
                assert same(result.info, {"action": value})
                assert same(state.metadata.info, {"action": value})
                assert same(await each.hidden(state), {"hidden": value})
            state = (await each.step(state, math.nan)).next_state
            assert math.isnan(state.observation)


async def test_strange_values_in_reset_options_and_calls() -> None:
    """The same for options of a reset, arguments of a call, and what an agent's `Action` holds."""
    async with host(Echo) as env:
        for value in STRANGE:
            options: Any = {"value": value, 7: "seven"}
            _, info = await env.reset(seed=2**80, options=options)
            assert same(info, {"seed": 2**80, "options": options})
            assert same(await env.call("echo", value, other=value), [value, value])
        action = Action("\ud800", (ToolCall("buy", {"n": 2**70, "text": "\udfff"}, id="\ud800"),), {1: math.inf})
        state, _ = await env.reset()
        assert (await env.step(state, action)).next_state.observation == action


def test_strange_values_without_an_event_loop() -> None:
    """The same over a blocking socket."""
    with blocking_host(Echo) as env:
        state, _ = env.reset()
        for value in STRANGE:
            state = env.step(state, value).next_state
            assert same(state.observation, value)


def cyclic() -> Any:
    value: list[Any] = [1]
    value.append({"again": value})
    return value


BAD: dict[str, Callable[[], Any]] = {
    'action[0]["board"][1]': lambda: [{"board": [1, object()]}],
    'action["f"]': lambda: {"f": lambda: None},
    'action[1]["again"]': cyclic,
    "action.payload[0]": lambda: Action(payload=[object()]),
}


@pytest.mark.parametrize("where", [*BAD])
async def test_a_value_that_cannot_cross(where: str) -> None:
    """The error names the path inside the value, and the branch stays usable."""
    async with host(Echo) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset()
        await mgr.checkpoint("start", state)
        async with mgr.branch("start") as (branch, at):
            with pytest.raises(EncodeError) as caught:
                await branch.step(at, BAD[where]())
            assert caught.value.path == where
            at = (await branch.step(at, "fine")).next_state
            assert at.observation == "fine"
            with pytest.raises(EncodeError) as caught:
                await branch.call("echo", 1, other=object())
            assert caught.value.path == 'kwargs["other"]'
            with pytest.raises(EncodeError) as caught:
                await branch.reset(options={"world": BAD[where]()})
            assert caught.value.path.startswith('options["world"]')
            assert (await branch.step(at, "still fine")).next_state.observation == "still fine"


async def test_an_observation_that_cannot_cross() -> None:
    """An observation that contains itself is a typed error that says where; the branch can be reset."""
    async with host(Cyclic) as env:
        state, _ = await env.reset()
        with pytest.raises(EncodeError, match="contains itself") as caught:
            await env.step(state, 1)
        assert '["board"]' in caught.value.path
        assert (await env.reset())[0].observation == "reset"
