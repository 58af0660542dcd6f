"""`host()`: an environment in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ramet.branch import BranchEnvironment
from ramet.drive import run
from ramet.lineage import Node
from ramet.naming import branch_names
from ramet.pending import Pending
from ramet.process.copies import Factory, Source
from ramet.process.launch import LaunchOptions
from ramet.process.link import Link, Plan
from ramet.process.plans import close_tree, start
from ramet.process.recipe import Recipe, factory_name

__all__ = ["host", "host_node", "host_plan"]


def host(
    factory: str | Callable[..., Any],
    *,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    output: Literal["inherit", "discard"] | Path | str = "inherit",
    allow_pickle: bool = False,
    allow_threads: bool = False,
    step_timeout: float | None = None,
    start_timeout: float = 300.0,
    grace: float = 5.0,
) -> Pending[BranchEnvironment]:
    """Build an environment in a process of its own and get an async proxy of it.

    Use it as `async with host(...) as env`, or as `env = await host(...)` and `await env.aclose()`. The process gets
    the agent's import path, working directory, environment variables and interpreter flags. Cancelled, it leaves no
    process behind. When the agent ends in any way, the process and all its branches end too.

    Args:
        factory: a callable that returns the environment, or its name as `"module:attr"`. Callables are pickled by
            value where that is needed, so classes of `__main__` and of notebook cells work.
        args: positional arguments for the factory.
        kwargs: keyword arguments for the factory.
        cwd: another working directory.
        environ: other environment variables (all of them).
        output: where the environment's stdout and stderr go: `"inherit"`, `"discard"`, or a file to append to.
        allow_pickle: let values that have no other form cross as pickles; only for environments that you trust.
        allow_threads: fork although the environment's process runs Python threads.
        step_timeout: the longest that a call may take, in seconds; the branch is ended then.
        start_timeout: the longest that the factory may take, in seconds.
        grace: how long the environment's `close()` may take at the end, in seconds.

    Raises:
        InvalidEnvironment: `factory` is no factory, or what it built is no environment.
        HostFailed: it cannot be pickled, found or called; raised when the host is awaited or entered.
    """
    options = LaunchOptions(
        cwd=cwd,
        environ=environ,
        output=output,
        allow_pickle=allow_pickle,
        allow_threads=allow_threads,
        step_timeout=step_timeout,
        start_timeout=start_timeout,
        grace=grace,
    )
    made = Factory(factory, args, kwargs or {})
    recipe = Recipe.pack(factory, args, kwargs)
    return Pending(
        partial(_make, made, recipe, options),
        BranchEnvironment.aclose,
        call=f"host({factory_name(factory)!r})",
    )


def _make(factory: Factory, recipe: Recipe, options: LaunchOptions) -> Awaitable[BranchEnvironment]:
    return _started(factory, recipe, options)


async def _started(factory: Factory, recipe: Recipe, options: LaunchOptions) -> BranchEnvironment:
    link = await run(host_plan(recipe, options, blocking=False))
    assert link.peer.spec is not None
    source = Source(link.peer.spec, link=link, factory=factory, options=options)
    return BranchEnvironment(source, node=host_node(link), end=partial(close_tree, grace=options.grace))


def host_plan(recipe: Recipe, options: LaunchOptions, *, blocking: bool) -> Plan[Link]:
    """Start the process and build the environment in it."""
    return start(recipe, options, branch_names("host", 1)[0], blocking=blocking)


def host_node(link: Link) -> Node:
    """The root of a host's lineage."""
    return Node(0, "host", link.name, link.pid)
