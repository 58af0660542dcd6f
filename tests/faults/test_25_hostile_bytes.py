"""Fault 25: huge messages, hostile bytes from a compromised child."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgpack
import pytest

from ramet import BranchLost, BranchManager, EncodeError, ProtocolError, StepTimeout, host
from ramet.protocol import wire
from ramet.protocol.flows import Peer
from ramet.protocol.wire import frame
from tests.faults.probes import Compromised, SmallCap
from tests.helpers import alive, eventually

PLENTY = 10.0  # seconds: a hang is a failure, and nothing here takes this long


def message(*items: Any) -> bytes:
    return frame(msgpack.packb(list(items)))


# In a branch the step is the first request of the connection.
HOSTILE = {
    "noise": b"\xff" * 64,
    "a length over the cap": (wire.MAX_FRAME + 1).to_bytes(4) + b"x",
    "an empty frame": b"\0\0\0\0",
    "no message": frame(msgpack.packb("hello")),
    "an empty list": frame(b"\x90"),
    "a message without an outcome": message(1),
    "not msgpack": frame(b"\xc1\xc1\xc1"),
    "an unknown extension": frame(msgpack.packb([1, 0, msgpack.ExtType(99, b"")])),
    "a pickle": frame(msgpack.packb([1, 0, msgpack.ExtType(40, b"cos\nsystem\n(S'true'\ntR.")])),
    "nested too deep": frame(b"\x91" * 100_000 + b"\x90"),
    "lengths that are not there": frame(b"\x92\x01\xdd\xff\xff\xff\xff"),
    "an id that is a text": message("1", 0, 1),
    "an id from the future": message(2, 0, None),
    "an answer that was given": message(0, 0, []),
    "an id that is an array": frame(msgpack.packb([msgpack.ExtType(2, b"\x92\x01\x02"), 0, 1])),
    "an unknown outcome": message(1, 99, 1),
    "an answer without a value": message(1, 0),
    "an answer with too many values": message(1, 0, *range(20)),
    "a state that is a number": message(1, 0, 7, 0.0, {}, False, False, {}),
    "a state that is too short": message(1, 0, [1, 2, 3], 0.0, {}, False, False, {}),
    "an instant that is a text": message(1, 0, ["x", 1, 2, "", False, {}, None], 0.0, {}, False, False, {}),
    "a failure without facts": message(1, 1),
    "a refusal without facts": message(1, 3),
    "a refusal that is no list": message(1, 3, 7),
    "a refusal of another class": message(1, 3, ["__builtins__", [], {}]),
    "a refusal with unfit arguments": message(1, 3, ["RametError", 7, {}]),
    "a refusal with attributes of other types": message(1, 3, ["StaleState", ["x"], {3: 4}]),
    "a stale state without an instant": message(1, 2),
}


@asynccontextmanager
async def compromised(**options: Any) -> AsyncIterator[tuple[BranchManager, Any, Any]]:
    """A manager, a branch that is about to be bad, and a sibling, each with its state."""
    async with host(Compromised, **options) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset()
        await mgr.checkpoint("start", state)
        async with mgr.branches("start", 2) as (bad, good):
            yield mgr, bad, good


async def unharmed(mgr: BranchManager, good: Any) -> None:
    """The sibling and the manager work as if nothing had happened."""
    env, state = good
    assert (await env.step(state, 2)).next_state.observation == 2
    async with mgr.branch("start") as (another, at):
        assert (await another.step(at, 3)).next_state.observation == 3


@pytest.mark.parametrize("together", [False, True], ids=["step", "step_all"])
async def test_hostile_bytes_from_a_compromised_child(together: bool) -> None:
    """Bytes that make no sense end their branch with a ProtocolError, soon, and harm no other."""
    async with host(Compromised) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset()
        await mgr.checkpoint("start", state)
        async with mgr.branches("start", len(HOSTILE)) as pairs, mgr.branch("start") as good:
            for (bad, at), (kind, data) in zip(pairs, HOSTILE.items(), strict=True):
                with anyio.fail_after(PLENTY):
                    if together:
                        (error,) = await mgr.step_all([(bad, at)], [data])
                        assert type(error) is ProtocolError, (kind, error)
                    else:
                        with pytest.raises(ProtocolError):
                            raise AssertionError((kind, await bad.step(at, data)))
                await eventually(lambda bad=bad: not alive(bad.pid), what=kind)  # type: ignore[misc]
                with pytest.raises(ProtocolError):
                    await bad.step(at, 1)
            await unharmed(mgr, good)


async def test_a_frame_that_never_ends() -> None:
    """A promise of more bytes than come looks like a slow step: the limit of a step ends it."""
    async with compromised(step_timeout=0.3) as (mgr, (bad, state), good):
        with anyio.fail_after(PLENTY), pytest.raises(StepTimeout):
            await bad.step(state, b"\0\x10\0\0")
        await unharmed(mgr, good)


async def test_a_frame_that_never_ends_is_left() -> None:
    """Without a limit, the block can still be left at once."""
    async with compromised() as (mgr, (bad, state), good):
        with anyio.move_on_after(0.2):
            await bad.step(state, b"\0\x10\0\0")
        with anyio.fail_after(PLENTY):
            await bad.aclose()
        await unharmed(mgr, good)


async def test_a_flood_of_answers() -> None:
    """A child that never stops answering is cut off at its first answer that nobody asked for."""
    async with compromised() as (mgr, (bad, state), good):
        with anyio.fail_after(PLENTY), pytest.raises(ProtocolError):
            await bad.step(state, "flood")
        await unharmed(mgr, good)


async def test_a_child_that_closes_its_connection() -> None:
    """An environment that closes descriptors which are not its own is lost, and says so."""
    async with compromised() as (mgr, (bad, state), good):
        with anyio.fail_after(PLENTY), pytest.raises(BranchLost):
            await bad.step(state, "shut")
        await unharmed(mgr, good)


ANSWERS: dict[str, Callable[[Peer], Any]] = {
    "reset": lambda peer: peer.reset(None, None),
    "call": lambda peer: peer.method("where", (), {}),
    "history": lambda peer: peer.history(),
    "current": lambda peer: peer.current(),
    "reseed_all": lambda peer: peer.reseed_all(7),
    "build": lambda peer: peer.build(),
}


@pytest.mark.parametrize("tail", [(), (7,), ("x", "y"), ([1, 2],), ([[], []], 3)], ids=repr)
@pytest.mark.parametrize("conversation", [*ANSWERS])
def test_an_answer_that_does_not_fit(conversation: str, tail: tuple[Any, ...]) -> None:
    """Whatever a child answers to any request, the agent sees a ProtocolError or a plain value."""
    peer = Peer("hostile")
    flow = ANSWERS[conversation](peer)
    flow.send(None)
    assert flow.send(None) is None
    try:
        flow.send(peer.decode(msgpack.packb([1, 0, *tail])))
    except (StopIteration, ProtocolError):
        pass


UNFIT: list[tuple[Any, ...]] = [
    (),
    (7,),
    ([7, 8], 1, [], None, 0),
    ([], 1, [], None, 0),
    (["x"], 1, [], None, 0),
    (None, 1, [], 7, 0),
]


@pytest.mark.parametrize("tail", UNFIT, ids=repr)
def test_an_answer_to_a_fork_that_does_not_fit(tail: tuple[Any, ...]) -> None:
    """The pids that a child names are numbers, and as many as it was asked for at most."""
    peer = Peer("hostile")
    flow = peer.fork((7,), **FORK)
    flow.send(None)
    flow.send(None)
    with pytest.raises(ProtocolError):
        flow.send(peer.decode(msgpack.packb([1, 0, *tail])))


FORK: dict[str, Any] = {"seeds": [None], "instant": None, "collect": False, "allow_threads": False}


@pytest.mark.parametrize("where", ["action", "observation"])
async def test_a_message_over_the_size_cap(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value over the cap is refused where it is made, with its size; the branch stays usable."""
    async with host(SmallCap) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset()
        if where == "action":
            monkeypatch.setattr(wire, "MAX_FRAME", 1 << 20)
            with pytest.raises(EncodeError, match="over the cap"):
                await env.step(state, b"x" * (1 << 21))
            assert (await env.step(state, 1)).next_state.observation == 1
        else:
            with pytest.raises(EncodeError, match="over the cap"):
                await env.call("huge", 1 << 21)
            assert (await env.step(state, 1)).next_state.observation == 1
        assert mgr.strategy == "process_fork"
