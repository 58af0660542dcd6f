"""Every exception and warning of ramet.

    RametError
    ├── CannotBranch            a strategy cannot serve this environment
    │   └── CannotReseed        a seed was asked for and nothing could take it
    ├── BranchLimitError        the machine has no room for so many processes
    ├── ReplayDiverged          a replay reached another state than the checkpoint
    ├── UnknownCheckpoint       no checkpoint of that name            (also a KeyError)
    ├── InvalidEnvironment      the object is no environment          (also a TypeError)
    ├── HostFailed              the factory, or the start of its process, failed
    ├── EnvironmentFailed       the environment's own exception; the branch stays usable
    ├── StaleState              a state that the branch has moved past
    ├── ForeignState            a state of another branch
    ├── BranchBusy              two calls on one branch at once
    ├── BranchClosed            the branch was ended by its owner
    ├── BranchLost              the branch's process is gone
    │   └── StepTimeout         ended because a call took too long    (also a TimeoutError)
    ├── EncodeError             a value cannot cross between processes (also a ValueError)
    └── ProtocolError           malformed bytes from the other side

    ForkSafetyWarning           a fork went ahead although something may go wrong in the children
    HandleWarning               an observation could not be encoded and stays in its branch

Each carries its facts as attributes, and all of them pickle.
"""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Iterable

__all__ = [
    "BranchBusy",
    "BranchClosed",
    "BranchLimitError",
    "BranchLost",
    "CannotBranch",
    "CannotReseed",
    "EncodeError",
    "EnvironmentFailed",
    "ForeignState",
    "ForkSafetyWarning",
    "HandleWarning",
    "HostFailed",
    "InvalidEnvironment",
    "ProtocolError",
    "RametError",
    "ReplayDiverged",
    "StaleState",
    "StepTimeout",
    "UnknownCheckpoint",
]


def _rebuild(cls: type[RametError], args: tuple[object, ...], facts: dict[str, object]) -> RametError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(facts)
    return error


class RametError(Exception):
    """The base of every error that ramet raises by itself."""

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class CannotBranch(RametError):
    """A strategy cannot serve, and nothing was harmed.

    Attributes:
        strategy: the strategy that was asked for, or `None` if none of them can serve.
        reason: why it cannot.
        instead: what would work, as a sentence; may be empty.
    """

    def __init__(self, strategy: str | None, reason: str, *, instead: str = "") -> None:
        self.strategy = strategy
        self.reason = reason
        self.instead = instead
        subject = f"{strategy} cannot branch this environment" if strategy else "cannot branch this environment"
        super().__init__(f"{subject}: {reason}" + (f"; {instead}" if instead else ""))


class CannotReseed(CannotBranch):
    """A seed was asked for, and no random generator was found to take it."""


class BranchLimitError(RametError):
    """The machine has no room for the processes asked for; none of them was made.

    Attributes:
        limit: the name of the limit, such as `"RLIMIT_NOFILE"` or `"cgroup pids.max"`.
        value: the limit's value.
        used: how much of it is in use.
        needed: how much more the call needed.
    """

    def __init__(self, limit: str, *, value: int, used: int, needed: int, advice: str = "") -> None:
        self.limit = limit
        self.value = value
        self.used = used
        self.needed = needed
        super().__init__(
            f"{limit} is {value}, {used} in use, {needed} more needed: no branch was made"
            f" ({advice or 'raise the limit, or keep fewer branches alive at once'})"
        )


class ReplayDiverged(RametError):
    """Replaying the recorded actions did not lead back to the checkpoint.

    Attributes:
        step: the step at which the replay was first seen to differ (0 is the reset).
        expected: what the checkpoint has there, as text.
        got: what the replay got, as text.
    """

    def __init__(self, step: int, expected: str, got: str) -> None:
        self.step = step
        self.expected = expected
        self.got = got
        super().__init__(
            f"the replay diverged at step {step}: expected {expected}, got {got}; the environment is not"
            " deterministic under its seed: use process_fork"
        )


class UnknownCheckpoint(RametError, KeyError):
    """There is no checkpoint of that name.

    Attributes:
        name: the name that was asked for.
        known: the names that there are.
    """

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        self.known = tuple(known)
        from difflib import get_close_matches  # only here: branches import this module too

        close = get_close_matches(name, self.known, n=1)
        if close:
            hint = f"did you mean {close[0]!r}?"
        elif self.known:
            hint = f"there are {', '.join(map(repr, self.known))}"
        else:
            hint = "there is none yet: make one with checkpoint(name, state) (was its `await` forgotten?)"
        super().__init__(f"no checkpoint named {name!r}: {hint}")

    def __str__(self) -> str:
        return str(self.args[0])


class InvalidEnvironment(RametError, TypeError):
    """The object does not have the methods of an environment, or they return something else."""


class HostFailed(RametError):
    """The environment's process did not come up, or its factory raised.

    The factory's traceback is attached as a note.

    Attributes:
        factory: what was to be built, as text.
        reason: what went wrong.
    """

    def __init__(self, factory: str, reason: str) -> None:
        self.factory = factory
        self.reason = reason
        super().__init__(f"the host of {factory} did not start: {reason}")


class EnvironmentFailed(RametError):
    """The environment raised; its traceback is attached as a note. The branch stays usable.

    Attributes:
        branch: the branch's name.
        method: the method that raised.
        type_name: the exception's type, such as `"builtins:ValueError"`.
        text: the exception's text.
        traceback: the traceback in the branch, as text.
    """

    def __init__(self, branch: str, method: str, *, type_name: str, text: str, traceback: str = "") -> None:
        self.branch = branch
        self.method = method
        self.type_name = type_name
        self.text = text
        self.traceback = traceback
        super().__init__(f"{method} of {branch} raised {type_name.removeprefix('builtins:')}: {text}")
        if traceback:
            self.add_note(f"in {branch}:\n{traceback.rstrip()}")


class StaleState(RametError):
    """A mutable environment cannot go on from an instant that it has moved past.

    Attributes:
        branch: the branch's name.
        at: the step that the branch stands at, counted since its last reset.
        state: the step that the state stands for; negative if it is of an earlier episode.
    """

    def __init__(self, branch: str, *, at: int, state: int) -> None:
        self.branch = branch
        self.at = at
        self.state = state
        which = f"the state of step {state}" if state >= 0 else "a state of an earlier episode"
        super().__init__(
            f"{branch} stands at step {at} and cannot go back to {which}: step the newest state"
            " (current() gives it), or make a checkpoint before moving on and branch from that"
        )


class ForeignState(RametError):
    """A state of one branch was given to another.

    Attributes:
        branch: the branch that was called.
        owner: the branch that the state belongs to.
    """

    def __init__(self, branch: str, owner: str, *, advice: str = "") -> None:
        self.branch = branch
        self.owner = owner
        super().__init__(
            f"the state belongs to {owner}, not to {branch}: "
            + (advice or f"step it on {owner}, or use the state that came with {branch}")
        )


class BranchBusy(RametError):
    """Two calls on one branch at once; the first goes on unharmed.

    Attributes:
        branch: the branch's name.
    """

    def __init__(self, branch: str) -> None:
        self.branch = branch
        super().__init__(
            f"{branch} is busy with another call: a branch does one thing at a time, make one branch per task"
        )


class BranchClosed(RametError):
    """The branch was ended by its owner: its block, its checkpoint's release, or its manager.

    Attributes:
        branch: the branch's name.
    """

    def __init__(self, branch: str, *, what: str = "has ended") -> None:
        self.branch = branch
        super().__init__(f"{branch} {what}: use it inside the block that made it, or make a new branch")


class BranchLost(RametError):
    """The branch's process is gone.

    Attributes:
        branch: the branch's name.
        pid: the process id.
        status: the wait status as `os.waitpid` gives it, or `None` if it is not known.
        reason: how it ended, in words.
    """

    def __init__(self, branch: str, *, pid: int, status: int | None = None, reason: str = "") -> None:
        self.branch = branch
        self.pid = pid
        self.status = status
        self.reason = reason or describe_status(status)
        super().__init__(f"{branch} (pid {pid}) is gone: {self.reason}")


class StepTimeout(BranchLost, TimeoutError):
    """A call took longer than `step_timeout`, and its branch was ended.

    Attributes:
        timeout: the limit, in seconds.
    """

    def __init__(self, branch: str, *, pid: int, timeout: float) -> None:
        self.timeout = timeout
        super().__init__(branch, pid=pid, reason=f"ended since a call took longer than {timeout:g} s")


class EncodeError(RametError, ValueError):
    """A value cannot cross between processes.

    Attributes:
        path: where in the value the trouble is, such as `value["board"][3]`.
        reason: what the trouble is.
    """

    def __init__(self, path: str, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"cannot encode {path}: {reason}")


class ProtocolError(RametError):
    """The other side sent bytes that make no sense; the connection is not used any more.

    Attributes:
        reason: what made no sense.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class ForkSafetyWarning(RuntimeWarning):
    """A fork went ahead although something in the process may not work in its children."""


class HandleWarning(RuntimeWarning):
    """An observation could not be encoded: it stays in its branch and crosses as a handle."""


def warn_user(text: str, category: type[Warning]) -> None:
    """Warn at the line that called into ramet."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == "ramet":
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level - 1)


def describe_status(status: int | None) -> str:
    """Say in words how a process ended, from its wait status (`None` if that is not known)."""
    if status is None:
        return "its process ended, the exit status is not known"
    if status & 0x7F:
        number = status & 0x7F
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        return f"killed by {name}" + ("; out of memory?" if name == "SIGKILL" else "")
    return f"exited with status {status >> 8}"


def type_name(error: BaseException) -> str:
    """The type of an exception as "module:qualname"."""
    return f"{type(error).__module__}:{type(error).__qualname__}"


def text_of(error: BaseException) -> str:
    """The text of an exception; never raises, whatever its `__str__` does."""
    try:
        return str(error)
    except Exception:
        return "(its text cannot be shown: its __str__ raises)"
