"""The conversations, without I/O: what they write, and what they make of the replies."""

from __future__ import annotations

import contextlib
import gc
import pickle
from collections.abc import Callable, Generator, Iterable
from typing import Any, NoReturn, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramet.errors import (
    BranchLimitError,
    CannotBranch,
    CannotReseed,
    EncodeError,
    EnvironmentFailed,
    ForeignState,
    HostFailed,
    InvalidEnvironment,
    ProtocolError,
    RametError,
    ReplayDiverged,
    StaleState,
)
from ramet.protocol import messages as m
from ramet.protocol.codec import Codec
from ramet.protocol.flows import Flow, Packed, Peer, Post, Ref, run
from ramet.protocol.handles import Handle
from ramet.protocol.wire import FrameReader
from ramet.types import EnvironmentSpec, Hidden, State, StateMetadata, StepResult

T = TypeVar("T")
Message = list[Any]

codec = Codec()
SEEN = [3, "seen", 2, "episode", False, {"a": 1}, None]  # a state on the wire
TAKEN = [SEEN, 1.5, {"part": 1.0}, True, False, {"b": 2}]  # the outcome of a step


class Talked:
    """What came of a flow, and all that it wrote."""

    def __init__(self, flow: Generator[bytes | Post | None, Any, T], reply: Callable[[Message], Iterable[Message]]):
        self.written: list[Message] = []
        self.fds: list[tuple[int, ...]] = []
        self.result: Any = None
        reader, replies = FrameReader(), list[Message]()
        try:
            wanted = flow.send(None)
            while True:
                if wanted is None:
                    wanted = flow.send(replies.pop(0))
                    continue
                reader.feed(wanted.data if isinstance(wanted, Post) else wanted)
                self.fds.append(wanted.fds if isinstance(wanted, Post) else ())
                while (payload := reader.next()) is not None:
                    message = codec.decode(payload)
                    self.written.append(message)
                    if message[0]:
                        replies += reply(message)
                wanted = flow.send(None)
        except StopIteration as stop:
            self.result = stop.value


def talk(flow: Flow[Any], *facts: Any, outcome: int = m.OK, before: Iterable[Message] = ()) -> Talked:
    return Talked(flow, lambda request: [*before, [request[0], outcome, *facts]])


def fail(flow: Flow[Any], outcome: int, *facts: Any) -> NoReturn:
    talk(flow, *facts, outcome=outcome)
    raise AssertionError("it did not fail")


def new(*, pure: bool = False) -> Peer:
    peer = Peer("branch-1")
    talk(peer.build(), EnvironmentSpec("env", pure_step=pure), [])
    return peer


def stepped(peer: Peer, instant: int = 3) -> State:
    state = talk(peer.reset(None, None), [instant, *SEEN[1:]], {}).result[0]
    assert isinstance(state, State)
    return state


# -- requests ------------------------------------------------------------------------------------------


def test_reset() -> None:
    peer = new()
    talked = talk(peer.reset(7, {"task_index": 0}), SEEN, {"info": 1})
    assert talked.written == [[2, m.RESET, 7, {"task_index": 0}]]
    state, info = talked.result
    assert info == {"info": 1}
    assert state == State("seen", Hidden.IN_BRANCH, StateMetadata(2, "episode", False, {"a": 1}))
    assert state._ref == Ref(peer.token, 3, "branch-1")
    assert peer.instant == 3


def test_step() -> None:
    peer = new()
    state = stepped(peer)
    talked = talk(peer.step(state, {"any": ["action", 1]}), *TAKEN)
    assert talked.written == [[3, m.STEP, 3, {"any": ["action", 1]}]]
    result = talked.result
    assert isinstance(result, StepResult)
    assert result.next_state._ref == Ref(peer.token, 3, "branch-1")
    assert (result.reward, result.rewards, result.terminated, result.truncated) == (1.5, {"part": 1.0}, True, False)
    assert result.info == {"b": 2}


def test_numbers_rise_by_one() -> None:
    peer = new()
    numbers = [talk(peer.method("name", (1,), {"a": 2}), "value").written[0][0] for _ in range(5)]
    assert numbers == [2, 3, 4, 5, 6]


def test_call_and_hidden() -> None:
    peer = new()
    talked = talk(peer.method("name", (1, "x"), {"a": 2}), {"v": 1})
    assert talked.written == [[2, m.CALL, "name", [1, "x"], {"a": 2}]]
    assert talked.result == {"v": 1}
    talked = talk(peer.hidden(stepped(peer)), "the secret")
    assert talked.written == [[4, m.HIDDEN, 3]]
    assert talked.result == "the secret"
    at_hand = talk(peer.hidden(State("seen", "open")), "unused")
    assert (at_hand.written, at_hand.result) == ([], "open")


def test_fork() -> None:
    peer = new()
    talked = talk(
        peer.fork((8, 9), seeds=[None, 7], instant=3, collect=True, allow_threads=False),
        [100, 101],
        5,
        ["a warning"],
        None,
        4,
    )
    assert talked.written == [[2, m.FORK, [None, 7], 3, True, False]]
    assert talked.fds == [(8, 9)]
    forked = talked.result
    assert (forked.pids, forked.first_handle, forked.warnings, forked.failure, forked.instant) == (
        [100, 101],
        5,
        ["a warning"],
        None,
        4,
    )
    assert peer.instant == 4


def test_welcome() -> None:
    peer = Peer("branch-2")
    assert run(peer.welcome(), [[0, m.OK, ["random", "env.rng"]]]) == ("random", "env.rng")
    assert peer.reseeded == ("random", "env.rng")
    refusal = m.error_facts(CannotReseed("process_fork", "nothing takes it"))
    with pytest.raises(CannotReseed, match="nothing takes it"):
        run(Peer("branch-2").welcome(), [[0, m.REFUSED, refusal]])
    with pytest.raises(ProtocolError, match="answered request 5 before there was one"):
        run(Peer("branch-2").welcome(), [[5, m.OK, []]])


def test_an_action_that_cannot_cross() -> None:
    peer = new()
    state = stepped(peer)
    with pytest.raises(EncodeError, match=r"action\[.deep.\]\[1\]"):
        talk(peer.step(state, {"deep": [0, object()]}), *TAKEN)
    assert talk(peer.step(state, "fine"), *TAKEN).result.reward == 1.5


# -- late replies --------------------------------------------------------------------------------------


def abandon(flow: Flow[Any]) -> None:
    """Begins a conversation and is cancelled while the answer is awaited."""
    assert flow.send(None) is not None
    assert flow.send(None) is None
    with pytest.raises(KeyboardInterrupt):
        flow.throw(KeyboardInterrupt())


def test_late_replies_are_let_pass() -> None:
    peer = new()
    state = stepped(peer)
    abandon(peer.step(state, "a"))
    abandon(peer.method("slow", (), {}))
    late: list[Message] = [[3, m.OK, *TAKEN], [4, m.FAILED, "call", "builtins:ValueError", "late", ""]]
    talked = talk(peer.method("name", (), {}), "value", before=late)
    assert talked.written == [[5, m.CALL, "name", [], {}]]
    assert talked.result == "value"


def test_a_late_fork_is_skipped() -> None:
    peer = new()
    abandon(peer.fork((8,), seeds=[None], instant=None, collect=False, allow_threads=False))
    abandon(peer.fork((8,), seeds=[None], instant=None, collect=False, allow_threads=False))
    before: list[Message] = [[2, m.OK, [100], 1, [], None, 0], [3, m.STALE, 5, 4]]  # the second was refused
    assert talk(peer.method("name", (), {}), "value", before=before).result == "value"


@pytest.mark.parametrize(
    "before",
    [
        [[99, m.OK, "from the future"]],
        [[2, m.OK, "once"], [2, m.OK, "twice"]],
        [[3, m.OK, "out of order"], [2, m.OK, "before it"]],
        [[0, m.OK, "nobody asked"]],
    ],
)
def test_replies_that_nobody_waits_for(before: list[Message]) -> None:
    peer = new()
    abandon(peer.method("a", (), {}))
    abandon(peer.method("b", (), {}))
    with pytest.raises(ProtocolError, match="which is not open"):
        talk(peer.method("c", (), {}), "value", before=before)


def test_an_abandoned_flow_may_be_closed() -> None:
    peer = new()
    flow = peer.method("a", (), {})
    flow.send(None)
    flow.close()
    assert talk(peer.method("b", (), {}), "value", before=[[2, m.OK, "late"]]).result == "value"


# -- refusals ------------------------------------------------------------------------------------------


def test_the_environment_raised() -> None:
    peer = new()
    with pytest.raises(EnvironmentFailed, match="step of branch-1 raised ValueError: no") as caught:
        fail(peer.step(stepped(peer), "a"), m.FAILED, "step", "builtins:ValueError", "no", "Traceback ...")
    assert caught.value.branch == "branch-1"
    assert caught.value.__notes__ == ["in branch-1:\nTraceback ..."]


def test_the_environment_has_moved_on() -> None:
    peer = new()
    with pytest.raises(StaleState, match="at step 5") as caught:
        fail(peer.step(stepped(peer), "a"), m.STALE, 5, 3)
    assert (caught.value.at, caught.value.state) == (5, 3)


@pytest.mark.parametrize(
    "error",
    [
        CannotBranch("process_fork", "it has threads", instead="end them"),
        CannotReseed("process_fork", "nothing takes it"),
        BranchLimitError("pids.max", value=1, used=1, needed=1),
        ReplayDiverged(2, "a", "b"),
        HostFailed("a:b", "no"),
        InvalidEnvironment("none"),
        EncodeError("value", "no form"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_refusals_are_rebuilt(error: RametError) -> None:
    facts = codec.decode(codec.encode(m.error_facts(error)))
    with pytest.raises(type(error)) as caught:
        fail(new().history(), m.REFUSED, facts)
    assert type(caught.value) is type(error)
    assert str(caught.value) == str(error)
    assert vars(caught.value) == vars(error)


@pytest.mark.parametrize(
    "facts",
    [
        ["NoSuchError", [], {}],
        ["describe_status", ["x"], {}],
        ["ForkSafetyWarning", ["x"], {}],
        ["__builtins__", [], {}],
        ["CannotBranch", [], "no mapping"],
        ["CannotBranch"],
        "CannotBranch",
        None,
        7,
    ],
)
def test_refusals_that_make_no_sense(facts: Any) -> None:
    with pytest.raises(ProtocolError):
        fail(new().history(), m.REFUSED, facts)


def state_of_words() -> st.SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3) | st.binary(max_size=3)
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=7), max_leaves=10)


FLOWS: dict[str, Callable[[Peer], Flow[Any]]] = {
    "build": lambda peer: peer.build(),
    "prepare": lambda peer: peer.prepare(b""),
    "reset": lambda peer: peer.reset(None, None),
    "step": lambda peer: peer.step(peer.at(0, State()), "a"),
    "hidden": lambda peer: peer.hidden(peer.at(0, State(hidden=Hidden.IN_BRANCH))),
    "fork": lambda peer: peer.fork((), seeds=[None], instant=0, collect=False, allow_threads=False),
    "reseed": lambda peer: peer.reseed(State(), 1),
    "reseed_all": lambda peer: peer.reseed_all(1),
    "check": lambda peer: peer.check(peer.at(0, State())),
    "current": lambda peer: peer.current(),
    "history": lambda peer: peer.history(),
    "replay": lambda peer: peer.replay(b"", None),
    "close": lambda peer: peer.close(),
}


@pytest.mark.parametrize("name", FLOWS)
@settings(max_examples=40)
@given(outcome=st.integers(-1, 5), facts=st.lists(state_of_words(), max_size=7))
def test_malformed_replies_are_protocol_errors(name: str, outcome: int, facts: list[Any]) -> None:
    """Whatever comes back, a flow gives a result or raises one of ramet's errors."""
    with contextlib.suppress(ProtocolError, EnvironmentFailed, StaleState):
        talk(FLOWS[name](Peer("branch-1")), *facts, outcome=outcome)


@pytest.mark.parametrize(
    "name", ["build", "prepare", "reset", "step", "fork", "reseed", "current", "history", "replay"]
)
@pytest.mark.parametrize("facts", [[], [None], ["text"], [None] * 9])
def test_replies_of_another_kind(name: str, facts: list[Any]) -> None:
    with pytest.raises(ProtocolError, match="branch-1"):
        talk(FLOWS[name](Peer("branch-1")), *facts)


@pytest.mark.parametrize("message", [None, 5, [], [1], ["1", 0], [None, 0], {"a": 1}, [1.0, 0]])
def test_payloads_that_are_no_message(message: Any) -> None:
    with pytest.raises(ProtocolError, match="no message"):
        Peer("branch-1").decode(codec.encode(message))
    with pytest.raises(ProtocolError):
        Peer("branch-1").decode(b"\xc1")


# -- states --------------------------------------------------------------------------------------------


def child_of(parent: Peer, *, first_handle: int = 1) -> Peer:
    child = Peer("branch-2", parent=parent)
    child.descend(parent, instant=parent.instant, first_handle=first_handle)
    return child


def test_a_state_of_another_branch() -> None:
    one, two = new(), new()
    two.name = "branch-2"
    state = stepped(one)
    with pytest.raises(ForeignState, match="belongs to branch-1, not to branch-2") as caught:
        talk(two.step(state, "a"), *TAKEN)
    assert (caught.value.branch, caught.value.owner) == ("branch-2", "branch-1")
    for flow in (two.check(state), two.hidden(state)):
        with pytest.raises(ForeignState):
            talk(flow, None)


@pytest.mark.parametrize("lose", [lambda s: pickle.loads(pickle.dumps(s)), lambda s: State(s.observation)])
def test_a_state_without_a_reference(lose: Callable[[State], State]) -> None:
    peer = new()
    with pytest.raises(ForeignState, match="built by hand, copied or unpickled"):
        talk(peer.step(lose(stepped(peer)), "a"), *TAKEN)


def test_the_instant_that_a_branch_was_made_from() -> None:
    parent = new()
    before = stepped(parent, 3)
    at = stepped(parent, 4)
    child = child_of(parent)
    grandchild = child_of(child)
    after = stepped(parent, 5)
    assert talk(child.step(at, "a"), *TAKEN).written[0][2] == 4
    assert talk(grandchild.step(at, "a"), *TAKEN).written[0][2] == 4
    for other in (before, after):
        with pytest.raises(ForeignState):
            talk(child.step(other, "a"), *TAKEN)
    later = child_of(child)  # the child has gone on in between
    with pytest.raises(ForeignState):
        talk(later.step(at, "a"), *TAKEN)


def test_a_pure_environments_states_travel_whole() -> None:
    peer = new(pure=True)
    hidden = codec.encode({"secret": 1})
    talked = talk(peer.reset(None, None), [*SEEN[:6], hidden], {})
    state = talked.result[0]
    assert state.hidden == Packed(hidden)
    assert talk(peer.hidden(state)).result == {"secret": 1}
    whole = ["seen", 2, "episode", False, {"a": 1}]
    assert talk(peer.step(state, "a"), *TAKEN).written[0][2] == [*whole, hidden]
    stored = pickle.loads(pickle.dumps(state))
    assert talk(peer.step(stored, "a"), *TAKEN).written[0][2] == [*whole, hidden]
    by_hand = State("seen", {"secret": 2}, state.metadata)
    assert talk(peer.step(by_hand, "a"), *TAKEN).written[0][2] == [*whole, codec.encode({"secret": 2})]
    another = new(pure=True)
    assert talk(another.step(state, "a"), *TAKEN).written[0][2] == [*whole, hidden]
    assert talk(peer.reseed(state, 7), SEEN, ["state"]).written[0][1:] == [m.RESEED, [*whole, hidden], 7]


# -- handles -------------------------------------------------------------------------------------------


def held(peer: Peer, id: int) -> Handle:
    """A handle that came from the branch of `peer`."""
    sender = Codec(export=lambda value: (id, "builtins:object", "<object>"))
    value = peer.decode(sender.encode([1, m.OK, object()]))[2]
    assert isinstance(value, Handle)
    return value


def sent(flow: Flow[Any]) -> list[Message]:
    """What the flow writes; handles in it arrive as `Handle`s of the other side."""
    reader = FrameReader()
    wanted = flow.send(None)
    assert isinstance(wanted, bytes)
    flow.close()
    reader.feed(wanted)
    other = Codec(resolve=lambda id, type_name, text: ("resolved", id))
    found = []
    while (payload := reader.next()) is not None:
        found.append(other.decode(payload))
    return found


def test_a_handle_goes_back_to_its_branch_and_to_later_ones() -> None:
    parent = new()
    handle = held(parent, 1)
    assert sent(parent.method("use", (handle,), {}))[0][3] == [("resolved", 1)]
    child = child_of(parent, first_handle=2)
    grandchild = child_of(child, first_handle=2)
    for heir in (child, grandchild):
        assert sent(heir.method("use", (handle,), {}))[0][3] == [("resolved", 1)]
    younger = held(parent, 2)  # it came to be after the fork
    for heir in (child, grandchild):
        with pytest.raises(ForeignState, match="valid only in the branch that it came from"):
            sent(heir.method("use", (younger,), {}))
    stranger = new()
    with pytest.raises(ForeignState):
        sent(stranger.method("use", (handle,), {}))
    with pytest.raises(ForeignState):  # and not upwards
        sent(parent.method("use", (held(child, 2),), {}))
    assert repr(handle) == "<Handle of builtins:object: <object>>"


def test_dropped_handles_ride_on_the_next_request() -> None:
    peer = new()
    kept, dropped = held(peer, 1), held(peer, 2)
    del dropped
    gc.collect()
    notice, request = sent(peer.method("a", (), {}))
    assert notice == [0, m.DROP, [2]]
    assert request[1] == m.CALL
    assert len(sent(peer.method("b", (), {}))) == 1  # told once
    del kept
    gc.collect()
    assert sent(peer.method("c", (), {}))[0] == [0, m.DROP, [1]]


def test_a_stored_handle_refers_to_nothing() -> None:
    peer = new()
    stored = pickle.loads(pickle.dumps(held(peer, 1)))
    assert (stored.type_name, stored.text) == ("builtins:object", "<object>")
    with pytest.raises(ForeignState):
        sent(peer.method("use", (stored,), {}))
