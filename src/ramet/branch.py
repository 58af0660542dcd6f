"""The async proxy of an environment that lives in a process of its own: a host, or a branch of one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

from ramet.drive import run, shielded, talk
from ramet.errors import BranchClosed, BranchLost, EncodeError, EnvironmentFailed, RametError
from ramet.lineage import Node
from ramet.naming import branch_names, note_fork, refuse_remote, warn_of_handle
from ramet.process.copies import Copy, Source, fork_live
from ramet.process.link import Link, Plan, Talk
from ramet.process.plans import draw_seeds, end
from ramet.protocol.flows import Flow
from ramet.protocol.handles import Handle
from ramet.types import EnvironmentSpec, Seed, State, StepResult

__all__ = ["BranchEnvironment"]

T = TypeVar("T")


class BranchEnvironment:
    """An environment in a process of its own.

    Every call is one round trip. A call that is cancelled while it waits for its answer leaves the branch usable (the
    environment may have done what was asked); the answer is skipped when it comes.

    Attributes:
        spec: what the environment says of itself.
        name: its name for people.
        node: its place in the lineage.
        source: what copies of it are made of.
        shared: it is the original itself, seen through a branch of a pure environment.
    """

    def __init__(
        self,
        source: Source,
        *,
        node: Node,
        state: State | None = None,
        reseeded: tuple[str, ...] = (),
        shared: bool = False,
        end: Callable[[Link], Plan[None]] | None = None,
        leave: Callable[[BranchEnvironment], None] | None = None,
    ) -> None:
        assert source.link is not None
        self.spec: EnvironmentSpec = source.spec
        self.name = source.link.name
        self.node = node
        self.source = source
        self._link = source.link
        self._peer = source.link.peer
        self._timeout = source.link.tree.step_timeout
        self._state = state
        self._certain = True
        self.shared = shared
        self._reseeded = reseeded
        self._closed = False
        self._end = end
        self._leave = leave
        self._forks: set[BranchEnvironment] = set()
        self._told = False

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self._link.pid

    @property
    def reseeded(self) -> tuple[str, ...]:
        """What was reseeded when this branch was made; empty for an exact copy."""
        return self._reseeded

    @property
    def unwrapped(self) -> Any:
        """There is no object in this process.

        Raises:
            AttributeError: always; `call()` reaches the environment's other methods.
        """
        raise AttributeError("unwrapped")  # `__getattr__` says the rest

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[State, Mapping[str, Any]]:
        """Reset the environment and return its first state and an info mapping.

        Raises:
            EnvironmentFailed: its `reset` raised.
            BranchLost: its process is gone.
        """
        state, info = await self._talk(self._peer.reset(seed, options))
        self._state = state
        if type(state.observation) is Handle:
            self._told = warn_of_handle(self.name, state.observation, told=self._told)
        return state, info

    async def step(self, state: State, action: Any) -> StepResult:
        """Take one step.

        Args:
            state: the newest state of this branch, or any state if `spec.pure_step`.
            action: an `Action`, or any value that the codec carries.

        Raises:
            EnvironmentFailed: its `step` raised; the branch stays usable.
            StaleState: the branch has moved past `state`.
            ForeignState: `state` belongs to another branch.
            EncodeError: the action cannot cross.
            BranchBusy: another call is under way.
            StepTimeout: it took longer than `step_timeout`, and the branch was ended.
            BranchLost: its process is gone.
        """
        try:
            return self._took(await self._talk(self._peer.step(state, action)))
        except (EnvironmentFailed, EncodeError):
            self._doubt()
            raise

    async def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call another public method of the environment, or read a public attribute, such as `call("render")`.

        Raises:
            EnvironmentFailed: it raised, or there is no such method.
        """
        return await self._talk(self._peer.method(name, args, kwargs))

    async def hidden(self, state: State) -> Any:
        """The hidden part of `state`.

        Raises:
            StaleState: the branch has moved past it.
        """
        return await self._talk(self._peer.hidden(state))

    async def current(self) -> State:
        """The newest state, for instance after a step that was cancelled while it waited for its answer.

        Raises:
            InvalidEnvironment: the environment was not reset yet.
            BranchLost: its process is gone.
        """
        self._state = await self._talk(self._peer.current())
        self._certain = True
        return self._state

    @overload
    async def fork(self, n: None = None, *, seed: Seed = None) -> tuple[BranchEnvironment, State]: ...

    @overload
    async def fork(self, n: int, *, seed: Seed = None) -> list[tuple[BranchEnvironment, State]]: ...

    async def fork(
        self, n: int | None = None, *, seed: Seed = None
    ) -> tuple[BranchEnvironment, State] | list[tuple[BranchEnvironment, State]]:
        """Copy this live environment where it stands; it goes on, and the copies start from its instant.

        The copies end at the latest with this environment. Cancelled, it leaves no process behind.

        Args:
            n: how many copies, as a list; one copy, not in a list, by default.
            seed: reseed the copies: `"fresh"`, or an integer from which each gets a seed of its own.

        Raises:
            CannotBranch: its process cannot be forked.
            CannotReseed: nothing in it could take the seed.
            BranchLimitError: there is no room; no copy was made.
        """
        began = time.perf_counter()
        copies = await run(self._fork(1 if n is None else n, seed))
        each = (time.perf_counter() - began) / max(1, len(copies))
        pairs = [(self._own(copy, each), copy.state) for copy in copies]
        return pairs[0] if n is None else pairs

    async def aclose(self) -> None:
        """End this environment and its forks, and wait (within bounds) until their processes are gone.

        It runs to its end under cancellation.
        """
        links = self.take_links()
        if self._end is not None:
            await shielded(self._end(self._link))
        elif links:
            await shielded(end(links))

    async def __aenter__(self) -> BranchEnvironment:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    if not TYPE_CHECKING:  # or a type checker would take every misspelt name

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"{name!r}: {self.name} lives in a process of its own; `await env.call({name!r})` reaches what"
                " the environment has"
                if not name.startswith("_")
                else f"{type(self).__name__!r} object has no attribute {name!r}"
            )

    def __repr__(self) -> str:
        return f"<{self.name}: {self.spec.name} in process {self.pid}>"

    # -- inside ----------------------------------------------------------------------------------

    async def _talk(self, flow: Flow[T]) -> T:
        if self._closed:
            raise BranchClosed(self.name)
        try:
            return await talk(self._link, flow, timeout=self._timeout)
        except BranchLost as error:
            self.node.end(error.reason)
            raise
        except RametError:
            raise
        except BaseException:
            self.unsettle()
            raise

    def _newest(self) -> Plan[State]:
        """The newest state, asked for only if a cancelled call has left that open."""
        if not self._certain:
            self._state = yield Talk(self._link, self._peer.current())
            self._certain = True
        if self._state is None:
            return State()
        return self._state

    def newest_state(self) -> State:
        """The newest state that was seen."""
        return State() if self._state is None else self._state

    def absorb(self, result: StepResult | Exception) -> StepResult | Exception:
        """Note the outcome of a step that was driven elsewhere."""
        if isinstance(result, StepResult):
            return self._took(result)
        if isinstance(result, BranchLost):
            self.node.end(result.reason)
        elif isinstance(result, EnvironmentFailed | EncodeError):
            self._doubt()
        return result

    def unsettle(self) -> None:
        """Note that a call was cancelled: the environment may have moved on."""
        self._certain = False

    def _doubt(self) -> None:
        """Note that a step has failed: perhaps only its result could not cross, and the environment has moved on."""
        if not self._peer.pure:
            self.unsettle()

    def _took(self, result: StepResult) -> StepResult:
        self._state = after = result.next_state
        if type(after.observation) is Handle:
            self._told = warn_of_handle(self.name, after.observation, told=self._told)
        return result

    def step_flow(self, state: State, action: Any) -> tuple[Link, Flow[StepResult]]:
        """One step, for a driver that steps many branches at once."""
        if self._closed:
            raise BranchClosed(self.name)
        return self._link, self._peer.step(state, action)

    def _fork(self, count: int, seed: Seed) -> Plan[list[Copy]]:
        refuse_remote(self.spec)
        state = yield from self._newest()
        names = branch_names("fork", count)
        return (yield from fork_live(self.source, state, names, draw_seeds(seed, count)))

    def _own(self, copy: Copy, fork_time: float) -> BranchEnvironment:
        node = note_fork(self.node, "fork", copy, fork_time)
        env = BranchEnvironment(
            copy.source, node=node, state=copy.state, reseeded=copy.reseeded, leave=self._forks.discard
        )
        self._forks.add(env)
        return env

    def take_links(self) -> list[Link]:
        """The connections of this environment and its forks, which it lets go of; for who ends them."""
        links: list[Link] = []
        waiting = [self]
        while waiting:  # no recursion: a chain of forks may be deep
            env = waiting.pop()
            env._closed = True
            if not env.shared:
                links.append(env._link)
            waiting += env._forks
            env._forks.clear()
            env.node.end()
            if env._leave is not None:
                env._leave(env)
        return links
