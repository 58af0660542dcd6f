"""Start a warden: the agent executes a fresh interpreter, so nothing of the agent's own state is forked."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ramet.errors import CannotBranch, HostFailed
from ramet.process.descriptors import plug_standard_streams
from ramet.process.limits import Headroom, raise_descriptor_limit
from ramet.process.tree import Tree, socket_pair

__all__ = ["LaunchOptions", "launch"]

_BOOT = "import sys; sys.path[:] = sys.argv[3:]; from ramet.process.warden import main; main(*map(int, sys.argv[1:3]))"

_HASH_SEED = "PYTHONHASHSEED"
_ONE_THREAD = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


def _draw_hash_seed() -> int:
    return random.SystemRandom().randrange(1, 2**32)


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How the processes of a tree are started.

    Attributes:
        cwd: the working directory; the agent's by default.
        environ: the environment variables; the agent's by default.
        output: where stdout and stderr of the environment go: `"inherit"`, `"discard"`, or a file to append to.
        allow_pickle: let values that have no other form cross as pickles.
        allow_threads: fork although the environment's process runs Python threads.
        step_timeout: the longest that a call may take, in seconds; the branch is ended then.
        start_timeout: the longest that the factory may take, in seconds.
        grace: how long the environment's `close()` may take, in seconds.
        hash_seed: PYTHONHASHSEED, unless the environment variables say it. The processes that replay a host's
            episode have the host's, or their sets have another order and the replay diverges.
    """

    cwd: str | os.PathLike[str] | None = None
    environ: Mapping[str, str] | None = None
    output: Literal["inherit", "discard"] | Path | str = "inherit"
    allow_pickle: bool = False
    allow_threads: bool = False
    step_timeout: float | None = None
    start_timeout: float = 300.0
    grace: float = 5.0
    hash_seed: int = field(default_factory=_draw_hash_seed, repr=False, compare=False)


def launch(options: LaunchOptions, *, blocking: bool) -> Tree:
    """Start a warden.

    Raises:
        CannotBranch: this system has no fork.
        HostFailed: the interpreter could not be started.
        BranchLimitError: there is no room for it.
    """
    if not hasattr(os, "fork"):
        raise CannotBranch(
            "process_fork",
            "this system has no fork",
            instead="use direct or clone, or run under Linux (WSL 2)",
        )
    raise_descriptor_limit()
    plug_standard_streams()
    Headroom().require(2)  # the warden and the host
    ours, theirs = socket_pair()
    arguments = [str(theirs.fileno()), str(int(options.allow_pickle)), *_path()]
    command = [sys.executable, *_interpreter_flags(), "-c", _BOOT, *arguments]
    try:
        with theirs, _output(options.output) as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=options.cwd,
                env=_environ(options),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
    except OSError as error:
        ours.close()
        raise HostFailed("the environment", f"its interpreter could not be started: {error}") from error
    process.returncode = 0  # the tree reaps it, and Popen must not
    return Tree(
        ours,
        process.pid,
        blocking=blocking,
        pickle=options.allow_pickle,
        allow_threads=options.allow_threads,
        step_timeout=options.step_timeout,
        grace=options.grace,
    )


def _interpreter_flags() -> list[str]:
    """The flags that the agent's interpreter was started with, such as `-X dev`."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if "-I" in flags:
        flags += ["-s", "-P"]
    # These two would have PYTHONHASHSEED ignored; `_environ` leaves out what else they are for.
    return [flag for flag in flags if flag not in ("-I", "-E")]


def _path() -> list[str]:
    """The agent's import path; what is relative in it was meant from the agent's working directory.

    An entry that is no path, which only some path hook understands, goes as it is.
    """
    found: list[object] = [*sys.path]  # what is no path is passed over by the interpreter too
    entries = [os.fsdecode(entry) for entry in found if isinstance(entry, str | os.PathLike)]
    return [os.path.abspath(entry) if not entry or os.path.exists(entry) else entry for entry in entries]


def _environ(options: LaunchOptions) -> dict[str, str]:
    environ = dict(os.environ if options.environ is None else options.environ)
    for name in _ONE_THREAD:
        environ.setdefault(name, "1")
    if environ.get(_HASH_SEED, "random") == "random":
        environ[_HASH_SEED] = str(options.hash_seed)
    if sys.flags.ignore_environment:  # -E or -I
        return {name: value for name, value in environ.items() if name == _HASH_SEED or not name.startswith("PYTHON")}
    return environ


@contextlib.contextmanager
def _output(where: str | Path) -> Iterator[int | None]:
    if where == "inherit":
        yield None
    elif where == "discard":
        yield subprocess.DEVNULL
    else:
        with open(where, "ab") as file:
            yield file.fileno()
