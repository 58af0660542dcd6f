"""The loop of every process that holds an environment: read a request, do it, answer.

There is no event loop and no thread here, so that the process can be forked at any request. A forked child
replaces the parent's socket by its own and goes on in the same loop, as if nothing had happened.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import msgpack

from ramet.errors import CannotBranch, EncodeError, InvalidEnvironment, ProtocolError, RametError
from ramet.process import fork as forks
from ramet.process.descriptors import put_null_over, receive
from ramet.process.limits import no_room
from ramet.process.memory import collect_if_due, freeze, thaw
from ramet.process.reseed import reseed
from ramet.process.resident import Handles, Resident, environment_failure, unpack_recipe
from ramet.process.safety import Safety, thread_count
from ramet.protocol import messages as m
from ramet.protocol.codec import Codec, describe
from ramet.protocol.wire import FrameReader, frame

__all__ = ["Server"]


class Server:
    """Serves one environment on one socket.

    Args:
        sock: the connection to the agent.
        warden: the pid of the warden, which is the parent of all.
        adopted: this process is a fork of the agent's own and is itself the warden.
        own: other descriptors that are not the environment's.
        pickle: let values that have no other form cross as pickles.
        safety: what is known of this process's files already.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        warden: int,
        adopted: bool = False,
        own: Iterable[int] = (),
        pickle: bool = False,
        safety: Safety | None = None,
    ) -> None:
        self.sock = sock
        self.resident: Resident | None = None
        self.build: Callable[[], Any] | None = None
        self._warden = warden
        self._pickle = pickle
        self._fd = sock.fileno()
        self._adopted = adopted
        self._reader = FrameReader()
        self._fds: list[int] = []
        self._handles = Handles()
        self._codec = self._new_codec({})
        self._safety = safety or Safety()
        self._safety.own |= {sock.fileno(), *own}
        self._checkpoint = adopted  # only ever forked, so its heap stays frozen
        self._oom_score = _higher_oom_score()
        self._tidied = True
        forks.on_foreign_fork(self._let_go)

    def _new_codec(self, classes: Any) -> Codec:
        handles = self._handles
        return Codec(allow_pickle=self._pickle, classes=classes, export=handles.export, resolve=handles.resolve)

    def adopt(self, env: Any, state: Any, instant: int) -> None:
        """Take an environment that lives in this process already."""
        self.resident = Resident(env, self._codec)
        self.resident.state = state
        self.resident.instant = instant
        self.resident.steps_before = 0 if state is None else state.metadata.step

    def serve(self) -> NoReturn:
        """Answer requests until the agent closes the connection, then leave without clean-up of any kind."""
        code = 1
        try:
            while self.turn() is not None:
                pass
            code = 0
        except ConnectionError:
            code = 0  # the agent went away before it had our answer
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            if error.code is not code and error.code is not None:
                print(error.code, file=sys.stderr)  # noqa: T201 - as Python does at its own exit
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)

    def turn(self) -> bool | None:
        """Read once and answer what came.

        Returns:
            `None` at the end of the stream, and otherwise whether this is now a forked child.
        """
        data, fds = receive(self.sock)
        if not data:
            return None
        self._fds += fds
        self._reader.feed(data)
        while (payload := self._reader.next()) is not None:
            if self._answer(payload):
                return True
        return False

    # -- requests --------------------------------------------------------------------------------

    def _answer(self, payload: bytes) -> bool:
        """Do one request and send its reply; true in a forked child, which owes no reply."""
        try:
            number, op, *arguments = self._codec.decode(payload)
        except RametError as error:  # a value in it is not understood here
            if isinstance(error, ProtocolError):
                error = EncodeError("the request", f"its branch cannot read it: {error.reason}")
            self.sock.sendall(_refused(_number_of(payload), error))
            return False
        if op == m.DROP:
            self._handles.drop(arguments[0])
            return False
        if op == m.FORK:
            return self._fork(number, *arguments)
        if not self._tidied:
            self._tidy()
        try:
            reply = frame(self._codec.encode([number, m.OK, *_HANDLERS[op](self, *arguments)]))
        except _Stale as error:
            reply = frame(self._codec.encode([number, m.STALE, error.at, error.asked]))
        except RametError as error:
            reply = _refused(number, error)
        except SystemExit:
            raise
        except BaseException:
            reply = frame(self._codec.encode([number, m.FAILED, *environment_failure(_NAMES.get(op, "it"))]))
        self.sock.sendall(reply)
        return False

    def _reseed_all(self, seed: int) -> list[Any]:
        resident = self._there()
        return [reseed(resident.env, seed, deterministic=resident.spec.deterministic)]

    def _prepare(self, recipe: bytes) -> list[Any]:
        self.build, classes = unpack_recipe(recipe)
        self._codec = self._new_codec(classes)
        return [os.getpid()]

    def _build(self) -> list[Any]:
        if self.resident is None:  # an adopted environment is there already
            if self.build is None:
                raise ProtocolError("BUILD came before PREPARE")
            self.resident = Resident(self.build(), self._codec)
        return [self.resident.spec, [name for name in ("numpy",) if name in sys.modules]]

    def _reset(self, seed: int | None, options: Any) -> list[Any]:
        resident = self._there()
        state, info = resident.reset(seed, options)
        return [resident.wire_state(state), info]

    def _step(self, reference: Any, action: Any) -> list[Any]:
        resident = self._there()
        state = resident.state_from(reference) if resident.pure else self._at(reference)
        result = resident.step(state, action)
        reward = result.reward
        return [
            resident.wire_state(result.next_state),
            reward if type(reward) is float else float(reward),
            result.rewards,
            bool(result.terminated),
            bool(result.truncated),
            result.info,
        ]

    def _call(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        resident = self._there()
        if name.startswith("_"):
            raise InvalidEnvironment(f"{name!r} is private: only public methods can be called from outside")
        member = getattr(resident.env, name)
        value = member(*args, **kwargs) if callable(member) else member
        return [resident.runner.finish(value)]

    def _hidden(self, instant: int) -> list[Any]:
        return [self._at(instant).hidden]

    def _check(self, instant: int) -> list[Any]:
        self._at(instant)
        return [None]

    def _reseed(self, wire: list[Any], seed: int) -> list[Any]:
        resident = self._there()
        state, named = resident.reseed(resident.state_from(wire), seed)
        return [resident.wire_state(state), named]

    def _current(self) -> list[Any]:
        resident = self._there()
        return [resident.wire_state(resident.current())]

    def _history(self) -> list[Any]:
        return [self._there().history()]

    def _replay(self, history: bytes, expected: bytes | None) -> list[Any]:
        resident = self._there()
        return [resident.wire_state(resident.replay(history, expected))]

    def _close(self) -> list[Any]:
        if self.resident is not None:
            self.resident.close()
        return [None]

    def _let_go(self) -> None:
        """In a process that the environment forked by itself: the connection is not its own."""
        put_null_over([self.sock.fileno()])

    def _there(self) -> Resident:
        if self.resident is None:
            raise ProtocolError("a request came before the environment was built")
        return self.resident

    def _at(self, instant: int) -> Any:
        resident = self._there()
        state = resident.current()
        if instant != resident.instant:
            raise _Stale(resident, instant)
        return state

    # -- forks -----------------------------------------------------------------------------------

    def _fork(
        self, number: int, seeds: list[int | None], instant: int | None, collect: bool, allow_threads: bool
    ) -> bool:
        """Fork a child for each seed and tell the agent their pids; true in each child."""
        ends, self._fds = self._fds[: len(seeds)], self._fds[len(seeds) :]
        pids: list[int] = []
        warnings: list[str] = []
        failure: list[Any] | None = None
        try:
            if len(ends) < len(seeds):  # the kernel drops descriptors that find no place here
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            warnings = self._before_fork(instant, allow_threads, ends)
            freeze(collect=collect)
            if self._make_children(ends, seeds, pids):
                self._checkpoint = collect
                return True
        except OSError as error:
            failure = m.error_facts(no_room(error, len(seeds) - len(pids)))
        except CannotBranch as error:
            failure = m.error_facts(error)
        except _Stale as error:
            _close_all(ends)
            self.sock.sendall(frame(self._codec.encode([number, m.STALE, error.at, error.asked])))
            return False
        if not self._checkpoint:
            thaw()
        _close_all(ends[len(pids) :])
        at = self.resident.instant if self.resident is not None else 0
        reply = [number, m.OK, pids, self._handles.next_id, warnings, failure, at]
        self.sock.sendall(frame(self._codec.encode(reply)))
        if not self._checkpoint:
            collect_if_due()
        return False

    def _before_fork(self, instant: int | None, allow_threads: bool, ends: list[int]) -> list[str]:
        resident = self.resident
        tasks = ""
        if resident is not None:
            if instant is not None and instant != resident.instant:
                raise _Stale(resident, instant)
            resident.runner.before_fork()
            ends = [*ends, *resident.runner.descriptors()]
            tasks = resident.runner.left_behind()
        return self._safety.check(allow_threads=allow_threads, passing=ends, also=tasks)

    def _make_children(self, ends: list[int], seeds: list[int | None], pids: list[int]) -> bool:
        for end, seed in zip(ends, seeds, strict=True):
            pid = forks.offspring() if self._adopted else self._fork_under_warden()
            if pid == 0:
                self._begin(end, ends, seed, self._fds)
                return True
            os.close(end)
            pids.append(pid)
        return False

    def _fork_under_warden(self) -> int:
        if forks.sibling_works() and thread_count() == 1:
            try:
                return forks.sibling()
            except OSError as error:
                if error.errno in _OUT_OF_ROOM:
                    raise
        return forks.orphan()

    def _begin(self, end: int, ends: list[int], seed: int | None, others: list[int]) -> None:
        """In the child: say hello, put our end in the place of the parent's socket, and let the siblings' ends go.

        An exact copy says hello first of all; the rest takes place while the agent hears of it.
        """
        try:
            if seed is None:
                os.write(end, _HELLO)
            os.dup2(end, self._fd, False)
            for fd in ends[ends.index(end) :]:
                os.close(fd)
            for fd in others:
                os.close(fd)
            if sys.platform == "linux" and os.getppid() != self._warden:
                os._exit(0)  # the warden ended before the death signal was set
            self._become()
            if seed is not None:
                self.sock.sendall(self._reseeded_hello(seed))
        except OSError:
            os._exit(0)  # the agent has gone, or has given up this fork

    def _reseeded_hello(self, seed: int) -> bytes:
        self._tidy()  # the environment's own code is about to run
        try:
            return frame(self._codec.encode([0, m.OK, *self._reseed_all(seed)]))
        except RametError as error:
            return _refused(0, error)
        except SystemExit:
            raise
        except BaseException:
            return frame(self._codec.encode([0, m.FAILED, *environment_failure("reseed")]))

    def _become(self) -> None:
        """In the child: forget what is the parent's."""
        if self._fds:
            self._fds = []
        if not self._reader.empty:
            self._reader.clear()
        self._tidied = False
        if self._adopted:
            self._adopted = False
            forks.set_parent_death_signal()
        resident = self.resident
        if resident is not None and resident.runner.used:
            resident.runner.after_fork()

    def _tidy(self) -> None:
        """What can wait until the first real request: it is not on the path of a fork."""
        self._tidied = True
        if self._oom_score:
            _raise_oom_score(self._oom_score)
            self._oom_score = b""  # its own children inherit it
        if "tempfile" in sys.modules:
            _detach_temporary_directories()
        self._safety.spare_files()


class _Stale(Exception):
    """The steps since the last reset: of the environment, and of the state that was asked for."""

    def __init__(self, resident: Resident, instant: int) -> None:
        self.at = resident.steps_before + len(resident.steps)
        self.asked = self.at - (resident.instant - instant)  # each step is an instant, and so is a reset


_HANDLERS: dict[int, Callable[..., list[Any]]] = {
    m.PREPARE: Server._prepare,
    m.BUILD: Server._build,
    m.RESET: Server._reset,
    m.STEP: Server._step,
    m.CALL: Server._call,
    m.HIDDEN: Server._hidden,
    m.CURRENT: Server._current,
    m.CHECK: Server._check,
    m.HISTORY: Server._history,
    m.RESEED_ALL: Server._reseed_all,
    m.RESEED: Server._reseed,
    m.REPLAY: Server._replay,
    m.CLOSE: Server._close,
}
_NAMES = {m.BUILD: "the factory", m.RESET: "reset", m.STEP: "step", m.CALL: "call", m.CLOSE: "close"}
_HELLO = frame(Codec().encode([0, m.OK, []]))
_plain = Codec(export=lambda value: (0, *describe(value)))
_OUT_OF_ROOM = (errno.EAGAIN, errno.ENOMEM)


def _number_of(payload: bytes) -> int:
    """The number of a request of which not every value can be read. Numbers may have been left out before it."""
    reader = msgpack.Unpacker()
    reader.feed(payload)
    reader.read_array_header()
    return int(reader.unpack())


def _refused(number: int, error: RametError) -> bytes:
    return frame(_plain.encode([number, m.REFUSED, m.error_facts(error)]))


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _higher_oom_score() -> bytes:
    """A score with which the kernel ends a branch before the agent or its host; empty if there is none to set."""
    try:
        with open("/proc/self/oom_score_adj", "rb") as file:
            return b"%d" % min(1000, int(file.read()) + 200)
    except OSError:
        return b""


def _raise_oom_score(score: bytes) -> None:
    try:
        file = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(file, score)
        os.close(file)
    except OSError:
        pass  # not ours to change


def _detach_temporary_directories() -> None:
    """A copy must not delete the directory that the original still uses."""
    cleanup = sys.modules["tempfile"].TemporaryDirectory._cleanup.__func__
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        target = finalizer.peek()
        if target is not None and getattr(target[1], "__func__", None) is cleanup:
            finalizer.detach()
