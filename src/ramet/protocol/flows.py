"""Conversations, each once, as generators; they do no I/O and know no event loop.

A flow yields what it wants and is sent what came of it:

* `bytes`: write these;
* `Post`: write these bytes together with these file descriptors;
* `None`: the next message, please (it is sent the decoded list).

It returns the conversation's result or raises one of `ramet.errors`. A driver throws into a flow what
went wrong (end of file, cancellation); the flow notes that an answer may still come and lets it pass.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

from ramet.errors import EncodeError, EnvironmentFailed, ForeignState, ProtocolError, StaleState
from ramet.protocol import messages as m
from ramet.protocol.codec import Codec
from ramet.protocol.handles import Handle
from ramet.protocol.wire import frame
from ramet.types import EnvironmentSpec, Hidden, State, StateMetadata, StepResult, check_state

__all__ = ["Flow", "Forked", "Packed", "Peer", "Post", "Ref"]

T = TypeVar("T")

_tokens = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Post:
    """Bytes to write together with file descriptors."""

    data: bytes
    fds: tuple[int, ...]


Flow = Generator[bytes | Post | None, Any, T]


class Ref(NamedTuple):
    """The instant that a state stands for: which process, which instant of it, and its name."""

    token: int
    instant: int
    owner: str


@dataclass(frozen=True, slots=True)
class Packed:
    """The hidden part of a pure environment's state, encoded; `await env.hidden(state)` decodes it."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Forked:
    """What a process said after it was asked to fork.

    Attributes:
        pids: the children that were made.
        first_handle: the first handle id that the children do not share with their parent.
        warnings: texts for `ForkSafetyWarning`.
        failure: `[name, args, facts]` of the error that stopped the batch, if one did.
        instant: the instant that the children start from.
    """

    pids: list[int]
    first_handle: int
    warnings: list[str]
    failure: list[Any] | None
    instant: int


class Peer:
    """The agent's half of the conversation with one process."""

    __slots__ = (
        "__weakref__",
        "_answered",
        "_codec",
        "_dropped",
        "_heirs",
        "_number",
        "instant",
        "line",
        "modules",
        "name",
        "origins",
        "pure",
        "reseeded",
        "spec",
        "token",
    )

    def __init__(self, name: str, *, allow_pickle: bool = False, parent: Peer | None = None) -> None:
        self.name = name
        self.token = next(_tokens)
        self.instant: int = parent.instant if parent else 0
        self.pure: bool = parent.pure if parent else False
        self.spec: EnvironmentSpec | None = parent.spec if parent else None
        self.modules: list[str] = []
        self.reseeded: tuple[str, ...] = ()
        # The very instants that this process was made from, and the handles that it shares.
        self.origins: frozenset[Ref] = frozenset()
        self.line: dict[int, int] = {}
        self._codec = Codec(allow_pickle=allow_pickle, export=self._export, resolve=self._resolve)
        self._number = 0
        self._answered = 0
        self._dropped: list[int] = []
        self._heirs: weakref.WeakSet[Peer] = weakref.WeakSet()

    def descend(self, parent: Peer, *, instant: int, first_handle: int) -> None:
        """Take over what a child shares with the parent that it was forked from at `instant`."""
        self.instant = instant
        here = Ref(parent.token, instant, parent.name)
        self.origins = frozenset({here, *(ref for ref in parent.origins if ref.instant == instant)})
        self.line = {**parent.line, parent.token: first_handle}
        parent._heirs.add(self)

    # -- one request, one reply ------------------------------------------------------------------

    def call(
        self,
        op: int,
        *arguments: Any,
        fds: tuple[int, ...] = (),
    ) -> Flow[list[Any]]:
        """Send a request and wait for its reply, letting late replies of earlier requests pass."""
        self._number = number = self._number + 1
        try:
            data = frame(self._codec.encode([number, op, *arguments]))
        except EncodeError as error:
            raise EncodeError(_in_argument(error.path, op), error.reason) from None
        if self._dropped:
            data = self._drop_notice() + data
        yield Post(data, fds) if fds else data
        while True:
            reply = yield None
            if reply[0] == number:
                self._answered = number
                break
            self._pass(reply)
        if reply[1] != m.OK:
            self._fail(reply, op)
        return reply  # type: ignore[no-any-return]

    @property
    def waiting(self) -> bool:
        """Whether an answer is still to come."""
        return self._answered < self._number

    def decode(self, payload: bytes) -> list[Any]:
        """A payload of the wire as a message.

        Raises:
            ProtocolError: it is not one.
        """
        message = self._codec.decode(payload)
        if type(message) is not list or len(message) < 2 or type(message[0]) is not int:
            raise ProtocolError(f"{self.name} sent something that is no message")
        return message

    def _pass(self, reply: list[Any]) -> None:
        """A late reply. Those come in order and once, or a flood of them would never end."""
        if not self._answered < reply[0] < self._number:
            raise ProtocolError(f"{self.name} answered request {reply[0]}, which is not open")
        self._answered = reply[0]

    def _fail(self, reply: list[Any], op: int) -> NoReturn:
        outcome, facts = reply[1], reply[2:]
        if outcome == m.FAILED and len(facts) == 4:
            method, type_name, text, traceback = map(str, facts)
            raise EnvironmentFailed(self.name, method, type_name=type_name, text=text, traceback=traceback)
        if outcome == m.STALE and [type(fact) for fact in facts] == [int, int]:
            raise StaleState(self.name, at=facts[0], state=facts[1])
        if outcome == m.REFUSED and len(facts) == 1:
            raise m.error_from_facts(facts[0])
        raise ProtocolError(f"{self.name} answered request {op} with outcome {outcome!r:.100}, which makes no sense")

    def _only(self, reply: list[Any], *types: type) -> Any:
        """The values of a reply, which are to be of these types: one as it is, several as a list."""
        values = reply[2:]
        if len(values) != len(types) or not all(map(isinstance, values, types)):
            raise ProtocolError(f"{self.name} sent an answer that does not fit the request")
        return values[0] if len(values) == 1 else values

    # -- the conversations -----------------------------------------------------------------------

    def welcome(self) -> Flow[tuple[str, ...]]:
        """What a forked child says first, of itself: what was reseeded.

        Raises:
            CannotReseed: a seed was given and nothing could take it.
        """
        reply = yield None
        if reply[0] != 0:
            raise ProtocolError(f"{self.name} answered request {reply[0]!r} before there was one")
        if reply[1] != m.OK:
            self._fail(reply, m.HELLO)
        self.reseeded = tuple(map(str, self._only(reply, list)))
        return self.reseeded

    def prepare(self, recipe: bytes) -> Flow[int]:
        """Load the factory and build nothing; the process says its pid, so that nobody waits for the warden to."""
        reply = yield from self.call(m.PREPARE, recipe)
        pid: int = self._only(reply, int)
        return pid

    def build(self) -> Flow[EnvironmentSpec]:
        """Call the factory that was prepared."""
        reply = yield from self.call(m.BUILD)
        spec, modules = self._only(reply, EnvironmentSpec, list)
        self.modules = modules
        self.spec = spec
        self.pure = spec.pure_step
        return spec  # type: ignore[no-any-return]

    def reset(self, seed: int | None, options: Mapping[str, Any] | None) -> Flow[tuple[State, Any]]:
        """Reset the environment."""
        reply = yield from self.call(m.RESET, seed, None if options is None else dict(options))
        state, info = self._only(reply, list, object)
        return self._state(state), info

    def step(self, state: State, action: Any) -> Flow[StepResult]:
        """Take one step.

        Raises:
            ForeignState: the state belongs to another branch.
            StaleState: the branch has moved past it.
        """
        reply = yield from self.call(m.STEP, self.reference(state), action)
        try:
            _, _, after, reward, rewards, terminated, truncated, info = reply
        except ValueError as error:
            raise ProtocolError(f"{self.name} sent a malformed result") from error
        return StepResult(self._state(after), reward, rewards, terminated, truncated, info)

    def method(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Flow[Any]:
        """Call another method of the environment."""
        reply = yield from self.call(m.CALL, name, list(args), dict(kwargs))
        return self._only(reply, object)

    def hidden(self, state: State) -> Flow[Any]:
        """The hidden part of `state`."""
        if isinstance(state.hidden, Packed):
            return self._codec.decode(state.hidden.data)
        if state.hidden is not Hidden.IN_BRANCH:
            return state.hidden
        reply = yield from self.call(m.HIDDEN, self.instant_of(state))
        return self._only(reply, object)

    def fork(
        self,
        fds: tuple[int, ...],
        *,
        seeds: Sequence[int | None],
        instant: int | None,
        collect: bool,
        allow_threads: bool,
    ) -> Flow[Forked]:
        """Fork a child for each descriptor and seed; each speaks on its own connection.

        Abandoned, the children end by themselves: each finds its connection closed.
        """
        count = len(seeds)
        reply = yield from self.call(
            m.FORK,
            list(seeds),
            instant,
            collect,
            allow_threads,
            fds=fds,
        )
        forked = self._forked(reply, count)
        self.instant = forked.instant
        return forked

    def _forked(self, reply: list[Any], count: int) -> Forked:
        forked = Forked(*self._only(reply, list, int, list, object, int))
        pids = forked.pids
        if not all(type(pid) is int for pid in pids) or len(pids) > count:
            raise ProtocolError(f"{self.name} sent pids that make no sense")
        if forked.failure is None and len(pids) < count:
            raise ProtocolError(f"{self.name} made {len(pids)} children of {count} and does not say why")
        return forked

    def reseed(self, state: State, seed: int) -> Flow[tuple[State, list[str]]]:
        """The state of a pure environment with other random numbers ahead.

        Raises:
            CannotReseed: the environment has no `reseed(state, seed)`.
        """
        reply = yield from self.call(m.RESEED, self._whole(state), seed)
        state, named = self._only(reply, list, list)
        return self._state(state), named

    def reseed_all(self, seed: int) -> Flow[tuple[str, ...]]:
        """Reseed what the process draws random numbers from, and tell what that was.

        Raises:
            CannotReseed: nothing could take the seed.
        """
        reply = yield from self.call(m.RESEED_ALL, seed)
        self.reseeded = tuple(map(str, self._only(reply, list)))
        return self.reseeded

    def check(self, state: State) -> Flow[None]:
        """Whether the branch still stands at `state`.

        Raises:
            ForeignState: the state belongs to another branch.
            StaleState: the branch has moved past it.
        """
        yield from self.call(m.CHECK, self.instant_of(state))

    def current(self) -> Flow[State]:
        """The newest state, for an agent that has lost track of it."""
        reply = yield from self.call(m.CURRENT)
        return self._state(self._only(reply, list))

    def history(self) -> Flow[bytes]:
        """The reset and the actions that led here, encoded."""
        reply = yield from self.call(m.HISTORY)
        history: bytes = self._only(reply, bytes)
        return history

    def replay(self, history: bytes, expected: bytes | None) -> Flow[State]:
        """Reset and play `history` on the environment that was built.

        Raises:
            ReplayDiverged: it went another way than the recording.
        """
        reply = yield from self.call(m.REPLAY, history, expected)
        return self._state(self._only(reply, list))

    def close(self) -> Flow[None]:
        """Ask the environment to close itself."""
        yield from self.call(m.CLOSE)

    # -- states ----------------------------------------------------------------------------------

    def reference(self, state: State) -> Any:
        """What stands for `state` in a request: an instant, or the whole state if the environment is pure."""
        if not self.pure:
            return self.instant_of(state)
        return self._whole(state)

    def instant_of(self, state: State) -> int:
        """The instant of this process that `state` stands for.

        Raises:
            TypeError: it is no state.
            ForeignState: it belongs to another process, or to none.
        """
        check_state(state)
        ref = state._ref
        if ref is not None and (ref.token == self.token or ref in self.origins):
            return int(ref.instant)
        if ref is None:
            raise ForeignState(
                self.name,
                "no branch",
                advice="it was built by hand, copied or unpickled, and the environment is not pure:"
                " use the state that reset, step or branch returned",
            )
        raise ForeignState(self.name, ref.owner)

    def encode(self, value: Any) -> bytes:
        """`value` as bytes.

        Raises:
            EncodeError: a part of it has no form.
        """
        return self._codec.encode(value)

    def at(self, instant: int, state: State) -> State:
        """`state` with a reference to an instant of this process."""
        return State(state.observation, state.hidden, state.metadata, Ref(self.token, instant, self.name))

    def _state(self, wire: Any) -> State:
        try:
            instant, observation, step, episode_id, is_terminal, info, hidden = wire
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"{self.name} sent a malformed state") from error
        if type(instant) is not int:
            raise ProtocolError(f"{self.name} sent a state of no instant")
        self.instant = instant
        if hidden is None:
            hidden = Hidden.IN_BRANCH
        elif type(hidden) is bytes:
            hidden = Packed(hidden)
        metadata = StateMetadata(step, episode_id, is_terminal, info)
        return State(observation, hidden, metadata, Ref(self.token, instant, self.name))

    def _whole(self, state: State) -> list[Any]:
        check_state(state)
        hidden = state.hidden
        if isinstance(hidden, Packed):
            hidden = hidden.data
        elif not isinstance(hidden, Handle):
            hidden = self._codec.encode(hidden)
        meta = state.metadata
        return [state.observation, meta.step, meta.episode_id, meta.is_terminal, meta.info, hidden]

    # -- handles ---------------------------------------------------------------------------------

    def _export(self, value: object) -> tuple[int, str, str] | None:
        if not isinstance(value, Handle):
            return None
        if value.owner == self.token or value.id < self.line.get(value.owner, 0):
            return value.id, value.type_name, value.text
        raise ForeignState(
            self.name,
            "another branch",
            advice=f"{value!r} is valid only in the branch that it came from and in branches made from that later",
        )

    def _resolve(self, id: int, type_name: str, text: str) -> Handle:
        return Handle(id, type_name, text, owner=self.token, drop=partial(self._drop, self.token))

    def _drop(self, owner: int, id: int) -> None:
        """Note that a value can be let go, here and in every process that was forked while it was kept."""
        self._dropped.append(id)
        for heir in list(self._heirs):
            if id < heir.line.get(owner, 0):
                heir._drop(owner, id)

    def _drop_notice(self) -> bytes:
        ids, self._dropped[:] = self._dropped[:], ()
        return frame(self._codec.encode([0, m.DROP, ids]))


def run(flow: Flow[T], replies: Iterable[list[Any]]) -> T:
    """Drive a flow with ready-made replies, for tests and tools; what it writes is discarded."""
    supply = iter(replies)
    try:
        wanted = flow.send(None)
        while True:
            wanted = flow.send(next(supply) if wanted is None else None)
    except StopIteration as stop:
        value: T = stop.value
        return value


_ARGUMENTS = {
    m.RESET: ("seed", "options"),
    m.STEP: ("state", "action"),
    m.CALL: ("name", "args", "kwargs"),
    m.REPLAY: ("history", "expected"),
}


def _in_argument(path: str, op: int) -> str:
    """The path inside the argument that the user gave, for one inside the whole request."""
    index, _, rest = path.removeprefix("value[").partition("]")
    names = _ARGUMENTS.get(op, ())
    number = int(index) - 2 if index.isdigit() else -1
    return names[number] + rest if 0 <= number < len(names) else path
