"""`ramet demo`: the search of `ramet.demo.lander`, watched, with its tree and its figures at the end."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import anyio

from ramet import BranchManager, Lineage, Node, host
from ramet.demo.lander import Try, land
from ramet.errors import RametError

__all__ = ["Figures", "run"]

_ENVIRONMENT = "LunarLander-v3"
_ENGINES = ("no engine", "left engine", "main engine", "right engine")
_SOLVED = 200.0  # what Gymnasium says
_SHOWN_FIRST, _SHOWN_LAST = 8, 3
_TIMED_EPISODES, _TIMED_STEPS = 10, 40

Show = Callable[[Sequence[Try]], None]


@dataclass(frozen=True, slots=True)
class Figures:
    """What a search did.

    Attributes:
        reward: the reward of the best line.
        legs: how many of the lander's legs stood on the ground at its end.
        frames: its length.
        decisions: how many times the search chose.
        branches: how many branches it made.
        checkpoints: how many checkpoints.
        fork_time: the median time from the request for a branch until it answered, in seconds.
        steps: the steps of all branches together.
        seconds: how long the search took.
        replay_steps: how many more steps it would have taken to replay every branch from the reset.
    """

    reward: float
    legs: int
    frames: int
    decisions: int
    branches: int
    checkpoints: int
    fork_time: float
    steps: int
    seconds: float
    replay_steps: int

    @property
    def landed(self) -> bool:
        """Whether the task is solved, or the lander stands on both legs."""
        return self.reward >= _SOLVED or self.legs == 2


def run(*, seed: int = 42, width: int = 8, plain: bool = False) -> bool:
    """Run the search and print what it does.

    Args:
        seed: the seed of the episode.
        width: how many branches the search keeps at each decision.
        plain: print lines even where a progress display is possible.

    Returns:
        Whether the lander landed.

    Raises:
        RametError: something is not installed, or the search failed.
    """
    _check_installed()
    options = {"use_uvloop": True} if importlib.util.find_spec("uvloop") else {}
    with _display(plain=plain) as show:
        figures, tree = anyio.run(_search, seed, width, show, backend_options=options)
    print(*tree, "", *report(figures, *_bare_times()), sep="\n")
    return figures.landed


def _check_installed() -> None:
    missing = [name for name in ("gymnasium", "Box2D", "pygame") if importlib.util.find_spec(name) is None]
    if missing:
        raise RametError(f'the demo needs {" and ".join(missing)}: pip install "ramet[demo]"')


_SLOW_STEP = 0.01  # in seconds: a tool call, a page, a turn of a larger game


async def _search(seed: int, width: int, show: Show) -> tuple[Figures, list[str]]:
    import numpy as np  # noqa: F401  # observations are arrays where it is loaded

    async with host("ramet.adapters.gymnasium:make_environment", args=(_ENVIRONMENT,)) as env:
        state, _ = await env.reset(seed=seed)
        async with BranchManager.create(env) as mgr:
            began = time.perf_counter()
            decisions: list[list[Try]] = []
            async with contextlib.aclosing(land(mgr, state, width=width)) as search:
                async for tries in search:
                    decisions.append(tries)
                    show(tries)
            lineage = mgr.tree()
            figures = _figures(lineage, decisions, time.perf_counter() - began)
            return figures, tree_of(lineage, decisions[-1][0])


def _figures(lineage: Lineage, decisions: Sequence[Sequence[Try]], seconds: float) -> Figures:
    best = decisions[-1][0]
    branches = [node for node in lineage.nodes() if node.kind == "branch"]
    tries = [one for tries in decisions for one in tries]
    return Figures(
        reward=best.reward,
        legs=int(sum(best.pair[1].observation[6:8])),
        frames=best.pair[1].metadata.step,
        decisions=len(decisions),
        branches=len(branches),
        checkpoints=sum(node.kind == "checkpoint" for node in lineage.nodes()),
        fork_time=statistics.median(node.fork_time or 0.0 for node in branches),
        steps=sum(one.pair[1].metadata.step - one.pair[0].node.step for one in tries),
        seconds=seconds,
        replay_steps=sum(node.step for node in branches),
    )


def _bare_times() -> tuple[float, float]:
    """What a reset and a step take in this very process, with nothing around them: the best a replay could do."""
    from ramet.adapters.gymnasium import make_environment

    env = make_environment(_ENVIRONMENT)
    resets, steps = [], []
    for seed in range(_TIMED_EPISODES):
        began = time.perf_counter()
        state, _ = env.reset(seed=seed)
        resets.append(time.perf_counter() - began)
        for number in range(_TIMED_STEPS):
            began = time.perf_counter()
            state = env.step(state, number % 4).next_state
            steps.append(time.perf_counter() - began)
    return statistics.median(resets), statistics.median(steps)


# -- what is printed -----------------------------------------------------------------------------


def report(figures: Figures, reset_time: float, step_time: float) -> Iterator[str]:
    """The figures as lines."""
    legs = ("no leg", "one leg", "both legs")[figures.legs]
    forks = figures.branches + figures.checkpoints
    verdict = "landed" if figures.landed else "not landed"
    yield (
        f"{verdict:<10} {legs} on the ground after {figures.frames} frames,"
        f" reward {figures.reward:.0f} (solved from {_SOLVED:.0f})"
    )
    yield f"{'branches':<10} {figures.branches:,} in {figures.decisions} decisions"
    yield (
        f"{'forks':<10} {forks:,} of the live simulator, checkpoints included;"
        f" a branch answers after {figures.fork_time * 1e3:.2f} ms (median)"
    )
    yield (
        f"{'steps':<10} {figures.steps:,} in {figures.seconds:.1f} s:"
        f" {figures.steps / figures.seconds:,.0f} steps/s, forks included"
    )
    replay_time = figures.branches * reset_time + figures.replay_steps * step_time
    yield (
        f"{'replay':<10} would have taken {figures.branches:,} resets and {figures.replay_steps:,} steps more:"
        f" {replay_time:.1f} s at {reset_time * 1e3:.1f} ms and {step_time * 1e6:.0f} µs each"
    )
    break_even = forks * figures.fork_time / max(1, figures.replay_steps)
    slow = figures.replay_steps * _SLOW_STEP
    yield (
        f"{'':<10} this simulator is as cheap as they come: forks break even at about {break_even * 1e6:.0f} µs a step,"
        f" and at {_SLOW_STEP * 1e3:.0f} ms a step a replay would have taken {slow:,.0f} s"
    )


def tree_of(lineage: Lineage, best: Try) -> list[str]:
    """The line that won, through the tree of all branches, with its middle left out."""
    path = _path(lineage.root, best.pair[0].node)
    lines = [f"{path[0].kind} {path[0].name} · {_ENVIRONMENT} · pid {path[0].pid}"]
    line = [(parent, node) for parent, node in itertools.pairwise(path) if node.kind == "branch"]
    for depth, ((parent, node), engine) in enumerate(zip(line, best.engines, strict=True)):
        left_out = len(line) - _SHOWN_FIRST - _SHOWN_LAST
        level = min(depth, _SHOWN_FIRST) + max(0, depth - len(line) + _SHOWN_LAST)
        if depth == _SHOWN_FIRST and left_out > 0:
            lines.append(f"{'   ' * level}⋮  {left_out} more decisions")
        if depth < _SHOWN_FIRST or depth >= len(line) - _SHOWN_LAST:
            others = len(parent.children) - 1
            lines.append(
                f"{'   ' * level}└─ {node.name} · frame {node.step} · {_ENGINES[engine]}"
                f" · forked in {(node.fork_time or 0.0) * 1e3:.2f} ms · {others} others from here"
            )
    return lines


def _path(root: Node, target: Node) -> list[Node]:
    """The nodes from the root to `target`, which is below it."""
    waiting = [[root]]
    while waiting:
        path = waiting.pop()
        if path[-1] is target:
            return path
        waiting += [[*path, child] for child in path[-1].children]
    return [root]


@contextlib.contextmanager
def _display(*, plain: bool) -> Iterator[Show]:
    if not plain and importlib.util.find_spec("rich") is not None:
        with _progress() as show:
            yield show
    else:
        print(f"landing {_ENVIRONMENT} by forking it at every decision", flush=True)
        yield lambda tries: print(_described(tries), flush=True)


@contextlib.contextmanager
def _progress() -> Iterator[Show]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("landing"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task("starting", total=1.0)
        highest = 0.0

        def show(tries: Sequence[Try]) -> None:
            nonlocal highest
            height = _height(tries)
            highest = max(highest, height)
            progress.update(task, completed=1.0 - height / highest, description=_described(tries))

        yield show


def _described(tries: Sequence[Try]) -> str:
    state = tries[0].pair[1]
    return (
        f"frame {state.metadata.step:3d}, {len(tries):2d} forks tried, the best"
        f" at height {_height(tries):4.2f} with reward {tries[0].reward:6.1f}"
    )


def _height(tries: Sequence[Try]) -> float:
    return max(0.0, float(tries[0].pair[1].observation[1]))
