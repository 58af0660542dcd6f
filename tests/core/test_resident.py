"""What a process does with steps, files, flags and records that are not as one would wish."""

from __future__ import annotations

import gc
import gzip
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args

import anyio
import pytest

from ramet import (
    BranchManager,
    CannotBranch,
    EncodeError,
    EnvironmentConfig,
    InvalidEnvironment,
    StaleState,
    blocking,
    host,
)
from ramet.lineage import Node
from ramet.process import launch
from ramet.types import EnvironmentSpec, State, StateMetadata, StepResult, StrategyName
from tests.helpers import ROOT


class _Thing:
    """A value without a form: it stays in its process."""


class _RaisingSink:
    def __init__(self, stream: Any) -> None:
        self.write = stream.write

    def flush(self) -> None:
        raise RuntimeError("the sink is gone")


class Odd:
    """Counts its steps; an action says what is wrong with the result."""

    spec = EnvironmentSpec("odd", deterministic=True, supports_seed=True)

    def __init__(self, folder: str = "") -> None:
        self.count = 0
        self.kept: list[Any] = []
        self.folder = folder

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[State, dict[str, Any]]:
        self.count = 0
        return State(0), {}

    def step(self, state: State, action: Any) -> StepResult:
        self.count += 1
        cycle: list[Any] = []
        cycle.append(cycle)
        after = State(self.count, None, StateMetadata(self.count))
        if action == "reward":
            return StepResult(after, "much")  # type: ignore[arg-type]
        if action == "state":
            return StepResult(self.count)  # type: ignore[arg-type]
        if action == "observation":
            return StepResult(State(cycle))
        if action == "info":
            return StepResult(after, info={"cycle": cycle})
        return StepResult(after)

    def thing(self) -> _Thing:
        return _Thing()

    def things(self) -> int:
        return sum(type(value) is _Thing for value in gc.get_objects())

    def open_gzip(self) -> None:
        self.kept.append(open(f"{self.folder}/plain", "w"))  # noqa: SIM115
        self.kept.append(gzip.open(f"{self.folder}/packed", "wt"))  # noqa: SIM115
        self.kept[-1].close()

    def open_detached(self) -> None:
        self.kept.append(open(f"{self.folder}/plain", "w"))  # noqa: SIM115

    def detach(self) -> None:
        self.kept.append(self.kept[-1].detach())

    def break_stdout(self) -> None:
        sys.stdout = _RaisingSink(sys.stdout)


class Slow(Odd):
    """A step of it may never come back."""

    def step(self, state: State, action: Any) -> StepResult:
        if action == "hang":
            signal.pause()
        return super().step(state, action)


class Closing(Slow):
    """Leaves a file when it is closed."""

    def close(self) -> None:
        Path(self.folder, str(os.getpid())).touch()


# -- files at a fork -----------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", ["open_gzip", "break_stdout"])
async def test_file_objects_that_raise_do_not_hurt_a_fork(trouble: str, tmp_path: Path) -> None:
    """What the environment's own file objects raise is not the fork's business."""
    async with host(Odd, args=(str(tmp_path),)) as env:
        await env.reset()
        await env.call(trouble)
        assert (await env.fork())[1].observation == 0


async def test_a_detached_file_does_not_hurt_a_fork(tmp_path: Path) -> None:
    """One that was known to the fork before is let go."""
    async with host(Odd, args=(str(tmp_path),)) as env:
        await env.reset()
        await env.call("open_detached")
        await env.fork()
        await env.call("detach")
        assert (await env.fork())[1].observation == 0


# -- results that cannot be used -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "action, error", [("reward", InvalidEnvironment), ("state", InvalidEnvironment), ("observation", EncodeError)]
)
async def test_a_malformed_result_does_not_move_the_branch_on(action: str, error: type[Exception]) -> None:
    """The step has failed as one that raised: the state before it is still the newest."""
    async with host(Odd) as env:
        state, _ = await env.reset()
        with pytest.raises(error):
            await env.step(state, action)
        assert (await env.fork())[1].observation == 0
        assert (await env.step(state, "go")).next_state.metadata.step == 2


async def test_after_a_step_whose_reply_could_not_cross() -> None:
    """The environment has moved on, and a fork finds out by itself where it stands."""
    async with host(Odd) as env:
        state, _ = await env.reset()
        with pytest.raises(EncodeError):
            await env.step(state, "info")
        with pytest.raises(StaleState):
            await env.step(state, "go")
        branch, at = await env.fork()
        assert at.observation == 1
        assert (await branch.step(at, "go")).next_state.observation == 2
        assert (await env.current()).observation == 1


async def test_after_such_a_step_among_many() -> None:
    """The same through `step_all`."""
    async with host(Odd) as env:
        state, _ = await env.reset()
        async with BranchManager.create(env) as mgr:
            await mgr.checkpoint("start", state)
            async with mgr.branches("start", 2) as pairs:
                results = await mgr.step_all(pairs, ["info", "go"])
                assert isinstance(results[0], EncodeError)
                assert (await pairs[0][0].fork())[1].observation == 1


def test_after_such_a_step_of_a_blocking_agent() -> None:
    """The same without an event loop."""
    with blocking.host(Odd) as env:
        state, _ = env.reset()
        with pytest.raises(EncodeError):
            env.step(state, "info")
        assert env.fork()[1].observation == 1


# -- handles as actions --------------------------------------------------------------------------------


async def test_a_handle_passed_back_as_an_action_is_let_go() -> None:
    """The record of the steps keeps no value alive, and says which step cannot be replayed."""
    async with host(Odd) as env:
        state, _ = await env.reset()
        for _ in range(3):
            thing = await env.call("thing")
            state = (await env.step(state, thing)).next_state
            del thing
        assert await env.call("things") == 0
        async with BranchManager.create(env, strategy="action_replay") as mgr:
            with pytest.raises(CannotBranch, match="the action of step 1"):
                await mgr.checkpoint("start", state)
            state, _ = await env.reset()
            await mgr.checkpoint("start", state)
            async with mgr.branch("start") as (_, at):
                assert at.observation == 0


# -- the lineage ---------------------------------------------------------------------------------------


def count(node: Node) -> int:
    waiting, number = [node], 0
    while waiting:
        number += 1
        waiting += waiting.pop().children
    return number


def test_checkpoints_with_branches_are_forgotten() -> None:
    """One that is replaced at each step does not grow the tree, though it had branches."""
    root = Node(0, "host", "host-1")
    for _ in range(2000):
        checkpoint = root.add("checkpoint", "at")
        branch = checkpoint.add("branch", "branch")
        checkpoint.end("replaced")
        branch.end()  # after its parent
    assert len(root.children) <= 401
    assert len(root.children) + root.forgotten == 2000


def test_chains_are_forgotten_once_their_last_node_has_ended() -> None:
    """A chain ends as a whole, from either end; what lives keeps all above it."""
    root = Node(0, "host", "host-1")
    kept = root.add("branch", "kept")
    alive = kept.add("fork", "alive")
    kept.end()
    for number in range(1000):
        chain = [root]
        for _ in range(5):
            chain.append(chain[-1].add("fork", "fork"))
        for node in chain[1:] if number % 2 else reversed(chain[1:]):
            node.end()
    assert count(root) < 401 * 5 + 3
    assert root.children[0] is kept
    assert kept.children == [alive]


def test_a_node_that_gets_a_child_after_its_end_is_not_over() -> None:
    """A branch whose fork was under way when its checkpoint was released."""
    root = Node(0, "host", "host-1")
    checkpoint = root.add("checkpoint", "at")
    checkpoint.end()
    root.end()
    branch = checkpoint.add("branch", "late")
    assert [node.over for node in (root, checkpoint)] == [False, False]
    branch.end()
    assert [node.over for node in (root, checkpoint)] == [True, True]


# -- how processes are started -------------------------------------------------------------------------


def test_the_import_path_of_a_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Relative folders become absolute; what only a path hook knows, and what is no path, is left alone."""
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    hook = "__editable__.package-0.1.finder.__path_hook__"
    monkeypatch.setattr(sys, "path", ["", "there", hook, None, tmp_path, 3])
    assert launch._path() == [str(tmp_path), str(tmp_path / "there"), hook, str(tmp_path)]


_REPLAY = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "src")!r}]
from ramet.blocking import BranchManager, host
from tests.faults.probes import Unordered

with host(Unordered) as env, BranchManager.create(env, strategy="action_replay") as mgr:
    state, _ = env.reset(seed=1)
    mgr.checkpoint("start", env.step(state, 3).next_state)
    with mgr.branch("start"):
        print(env.call("hash_seed"))
"""


@pytest.mark.parametrize("flag", ["-I", "-E"])
def test_replays_of_an_isolated_agent(flag: str) -> None:
    """Its hosts take the hash seed all the same, so that a replay does not diverge."""
    environ = {**os.environ, "PYTHONHASHSEED": "17", "PYTHONPATH": "/nowhere"}
    done = subprocess.run(
        [sys.executable, flag, "-c", _REPLAY], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "17"), done.stderr


# -- the end of replayed environments ------------------------------------------------------------------


async def test_hung_replays_share_one_time_to_close() -> None:
    """Their clean-up is bounded by `grace` for all of them."""
    async with host(Slow, grace=0.5) as env:
        state, _ = await env.reset()
        async with BranchManager.create(env, strategy="action_replay") as mgr:
            await mgr.checkpoint("start", state)
            pairs = await mgr.branches("start", 6)
            with anyio.move_on_after(0.1):
                async with anyio.create_task_group() as group:
                    for branch, at in pairs:
                        group.start_soon(branch.step, at, "hang")
            began = time.monotonic()
        assert time.monotonic() - began < 2.0  # one after another it would be 3


async def test_replays_that_hang_do_not_keep_others_from_closing(tmp_path: Path) -> None:
    """Each is asked before the first is waited for."""
    async with host(Closing, args=(str(tmp_path),), grace=0.5) as env:
        state, _ = await env.reset()
        async with BranchManager.create(env, strategy="action_replay") as mgr:
            await mgr.checkpoint("start", state)
            pairs = await mgr.branches("start", 3)
            pids = {str(branch.pid) for branch, _ in pairs[1:]}
            with anyio.move_on_after(0.05):
                await pairs[0][0].step(pairs[0][1], "hang")
    assert pids < set(os.listdir(tmp_path))


@pytest.mark.parametrize("strategy", get_args(StrategyName))
def test_every_strategy_has_a_place_in_a_configuration(strategy: StrategyName) -> None:
    """The names stand in one place."""
    assert EnvironmentConfig("any", branching_strategy=strategy).branching_strategy == strategy
