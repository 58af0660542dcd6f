"""What NetHack (`nle`) needs so that its copies are exact: its generator in C, and its files.

The generator: NLE's `reset(seed=...)` seeds Gymnasium's generator, which the game does not use, and the game
reseeds itself from the system now and then. Here the game is seeded, and that habit turned off.

The files: NetHack writes a level that the hero leaves into a file of its directory, and reads its texts and
special levels from `nhdat` through one open file. Copies of a process share both: two copies that take the
stairs would write the same file, and each would come back to a level that the other has left. So the
directory is treated as the kernel treats memory: after a fork nobody writes the shared one any more, and a
process that goes on makes itself a copy first.
"""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import fcntl
import os
import secrets
import shutil
import tempfile
import weakref
from typing import Any

__all__ = ["NetHack"]

_PREFIXES = 10  # PREFIX_COUNT of NetHack 3.6
_LARGEST_SEED = 2**63
_ROOM = "room-"
_SWEPT = 4


class NetHack:
    """Stands between a `GymnasiumEnvironment` and NLE.

    Args:
        game: NLE's environment, unwrapped.
    """

    def __init__(self, game: Any) -> None:
        self._game = game
        self._seeded = False
        self._set_initial_seeds = game.nethack.set_initial_seeds
        game.nethack.set_initial_seeds = self._seed_next  # `game.seed()` ends here too
        self._files = _Files(game.nethack._vardir, game.nethack.dlpath) if _can_move(game.nethack) else None

    def before_reset(self, seed: int | None) -> None:
        """Seed the coming game: as asked for, or as the user did by `game.seed()`, or from Gymnasium's generator."""
        self.before_step()
        if seed is not None:
            self._seed_next(seed % _LARGEST_SEED, seed % _LARGEST_SEED)
        elif not self._seeded:
            core, disp = self._game.np_random.integers(_LARGEST_SEED, size=2)
            self._seed_next(int(core), int(disp))
        self._seeded = False

    def after_reset(self) -> None:
        """Tell the new game where its files are."""
        if self._files is not None:
            self._files.enter()

    def before_step(self) -> None:
        """Let go of the files that another process shares."""
        if self._files is not None and self._files.shared:
            self._files.move()

    def reseed(self, seed: int) -> None:
        """Seed the running game."""
        self._game.nethack.set_current_seeds(core=seed % _LARGEST_SEED, disp=seed % _LARGEST_SEED, reseed=False)

    def _seed_next(self, core: int, disp: int, reseed: bool = False, lgen: int | None = None) -> None:
        self._seeded = True
        self._set_initial_seeds(core, disp, reseed, lgen)

    @staticmethod
    def own(observation: dict[str, Any]) -> dict[str, Any]:
        """The observation as it is now: NLE writes the next one into the same arrays."""
        return {key: value.copy() for key, value in observation.items()}


def _can_move(nethack: Any) -> bool:
    with contextlib.suppress(AttributeError, OSError, ValueError):
        with _Library(nethack.dlpath) as prefixes:
            first = ctypes.string_at(prefixes[0]) if prefixes[0] else b""
        return os.path.isdir("/proc/self/fd") and first in (b"", os.fsencode(nethack._vardir) + b"/")
    return False  # another build of NetHack: leave it alone


class _Library:
    """The game's table of directories, for a moment: a handle that stays would prevent NLE's next reset."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._handle: int | None = None

    def __enter__(self) -> ctypes.Array[ctypes.c_void_p]:
        library = ctypes.CDLL(self._path)
        self._handle = library._handle
        return (ctypes.c_void_p * _PREFIXES).in_dll(library, "fqn_prefix")

    def __exit__(self, *exc_info: object) -> None:
        if self._handle is not None:
            _ctypes.dlclose(self._handle)


class _Files:
    """The directory that the game writes to, which is copied when it is shared and about to be written.

    The copies ("rooms") lie inside of the game's own directory, which NLE removes at the end. A lock on each,
    which forked processes inherit, tells whether anyone still needs it.
    """

    def __init__(self, home: str, library: str) -> None:
        self.shared = False
        self._home = home
        self._room = home
        self._lock = -1
        self._library = library
        self._text = ctypes.create_string_buffer(os.fsencode(home) + b"/")
        self._data = os.path.realpath(os.path.join(home, "nhdat"))
        self._open: dict[int, int] = {}  # the descriptors of nhdat, and where each stood at the fork
        this = weakref.ref(self)
        os.register_at_fork(before=lambda: _share(this()))

    def share(self) -> None:
        """Note that a fork is about to be made."""
        if not self.shared:
            self.shared = True
            self._open = {fd: os.lseek(fd, 0, os.SEEK_CUR) for fd in self._descriptors()}

    def move(self) -> None:
        """Go on in a copy of the directory."""
        self.shared = False
        old, lock = self._room, self._lock
        self._room, self._lock = self._copy(old)
        self.enter()
        for fd, position in self._open.items():
            self._reopen(fd, position)
        if lock >= 0:
            os.close(lock)
            _remove_if_unused(old)
        self._sweep()

    def enter(self) -> None:
        """Tell the game where its files are; a reset forgets it."""
        if self._room == self._home:
            return
        self._text = ctypes.create_string_buffer(os.fsencode(self._room) + b"/")
        with _Library(self._library) as prefixes:
            for number in range(_PREFIXES):
                prefixes[number] = ctypes.addressof(self._text)

    def _copy(self, old: str) -> tuple[str, int]:
        new = tempfile.mkdtemp(prefix="new-", dir=self._home)
        lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_SH)
        with os.scandir(old) as entries:
            for entry in entries:
                target = os.path.join(new, entry.name)
                if entry.is_symlink():
                    os.symlink(os.readlink(entry.path), target)
                elif entry.is_file() and not entry.stat().st_size:  # most are, and this is the quickest
                    os.mknod(target)
                elif entry.is_file():
                    shutil.copyfile(entry.path, target)
                elif entry.name == "save":
                    shutil.copytree(entry.path, target)
        room = os.path.join(self._home, _ROOM + os.path.basename(new))
        os.rename(new, room)
        return room, lock

    def _descriptors(self) -> list[int]:
        found = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the descriptor that lists the directory
                if os.readlink(f"/proc/self/fd/{name}") == self._data:
                    found.append(int(name))
        return found

    def _reopen(self, fd: int, position: int) -> None:
        """Give the descriptor a position of its own."""
        own = os.open(self._data, os.O_RDONLY | os.O_CLOEXEC)
        os.lseek(own, position, os.SEEK_SET)
        os.dup2(own, fd)
        os.close(own)

    def _sweep(self) -> None:
        """Remove a few rooms whose processes were killed: more than one comes with each move."""
        with contextlib.suppress(OSError):
            rooms = [name for name in os.listdir(self._home) if name.startswith(_ROOM)]
            for _ in range(min(_SWEPT, len(rooms))):
                _remove_if_unused(os.path.join(self._home, secrets.choice(rooms)))


def _share(files: _Files | None) -> None:
    if files is not None:
        files.share()


def _remove_if_unused(room: str) -> None:
    with contextlib.suppress(OSError):  # someone holds it, or another has removed it
        fd = os.open(room, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(room)
        finally:
            os.close(fd)
