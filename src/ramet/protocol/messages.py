"""The messages, as lists: requests `[id, op, ...]` and replies `[id, outcome, ...]`.

A request with id 0 is a notice: it has no reply. Ids rise by one for each request of a connection.
A state crosses as `[instant, observation, step, episode_id, is_terminal, info, hidden]`, where hidden
is `None` unless the environment is pure: then it is the encoded value, or a handle.
"""

from __future__ import annotations

from typing import Any, Final

import ramet.errors
from ramet.errors import ProtocolError, RametError

__all__ = [
    "BUILD",
    "CALL",
    "CHECK",
    "CLOSE",
    "CURRENT",
    "DROP",
    "FAILED",
    "FORK",
    "HELLO",
    "HIDDEN",
    "HISTORY",
    "OK",
    "PREPARE",
    "REFUSED",
    "REPLAY",
    "RESEED",
    "RESEED_ALL",
    "RESET",
    "STALE",
    "STEP",
    "error_facts",
    "error_from_facts",
]

# Requests to the process of an environment.
DROP: Final = 0  # ids of handles that the agent has dropped (a notice)
HELLO: Final = 1  # what a forked child says first, of itself: `[0, OK, reseeded]`, or a refusal
PREPARE: Final = 2  # pickled recipe               -> pid            load the factory, build nothing
BUILD: Final = 3  #                                -> spec, modules  call the factory
RESET: Final = 4  # seed, options                  -> state, info
STEP: Final = 5  # instant or state, action        -> state, reward, rewards, terminated, truncated, info
CALL: Final = 6  # name, args, kwargs              -> value
HIDDEN: Final = 7  # instant                       -> value
FORK: Final = 8  # seeds, instant, collect, allow_threads -> pids, first free handle, warnings, failure, instant
HISTORY: Final = 9  #                              -> encoded history
REPLAY: Final = 10  # encoded history, observation -> state
CLOSE: Final = 11  #                               -> None           call env.close()
CURRENT: Final = 12  #                             -> state          the newest one
RESEED: Final = 13  # state, seed                  -> state, names   of a pure environment
RESEED_ALL: Final = 14  # seed                     -> reseeded      what HELLO does, later
CHECK: Final = 15  # instant                       -> None           is it the newest?

# Replies.
OK: Final = 0
FAILED: Final = 1  # the environment raised: method, type name, text, traceback
STALE: Final = 2  # the steps since the last reset: of the environment, and of the state that was asked for
REFUSED: Final = 3  # one of ramet's own errors: class name, arguments, facts


def error_facts(error: RametError) -> list[Any]:
    """One of ramet's errors as plain values."""
    return [type(error).__name__, list(map(str, error.args)), dict(error.__dict__)]


def error_from_facts(facts: Any) -> RametError:
    """The error that `error_facts` took apart.

    Raises:
        ProtocolError: there is no such error.
    """
    if type(facts) is not list or [type(fact) for fact in facts] != [str, list, dict]:
        raise ProtocolError("a malformed error came back")
    name, args, attributes = facts
    cls = getattr(ramet.errors, name, None)
    if not (isinstance(cls, type) and issubclass(cls, RametError)):
        raise ProtocolError(f"an unknown error came back: {name!r:.100}")
    if not all(type(text) is str for text in (*args, *attributes)):
        raise ProtocolError("a malformed error came back")
    error: RametError = cls.__new__(cls, *args)
    error.args = tuple(args)
    error.__dict__.update(attributes)
    return error
