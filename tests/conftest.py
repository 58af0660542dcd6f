"""What every test is held to.

* An async test runs on asyncio, on uvloop and on trio; no marker is needed.
* When a test and its fixtures are done, no process is left that was not there before (children, children's
  children, zombies, and strays that have left the family), and no open descriptor.
* With RAMET_NO_SKIPS=1 a skipped test is a failure: CI is to run everything.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import signal
import sys
import time
import uuid
from collections.abc import Generator, Iterator
from typing import Any

import hypothesis
import pytest
import uvloop

from tests.helpers import Process, descendants, marked, open_fds, processes

LINUX = sys.platform.startswith("linux")
SESSION = f"ramet-test-{uuid.uuid4().hex}"
NO_SKIPS = os.environ.get("RAMET_NO_SKIPS", "0") not in ("", "0")
GRACE = 2.0  # a kill is asynchronous: seconds that processes and descriptors have to go

PASSED = pytest.StashKey[bool]()

hypothesis.settings.register_profile("ramet", parent=hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("ramet")


def mark_this_process() -> None:
    """Marks this process, and so every process that ever comes from it, with `SESSION`.

    The environment carries the mark through an exec. A process that is only forked keeps the environment
    block of its first ancestor that was exec'd, so a mapping of a named file carries the mark there.
    """
    os.environ["RAMET_TEST_SESSION"] = f"{os.environ.get('RAMET_TEST_SESSION', '')}:{SESSION}"
    if LINUX:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        fd = os.memfd_create(SESSION)
        os.ftruncate(fd, mmap.PAGESIZE)
        mapped = libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        os.close(fd)
        assert mapped != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())


mark_this_process()


# -- event loops ---------------------------------------------------------------------------------------


def pytest_sessionstart(session: pytest.Session) -> None:
    session.add_marker("anyio")  # anyio's plugin looks at async tests alone
    uvloop.new_event_loop().close()  # libuv opens a pipe with its first loop and keeps it


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
        pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
        pytest.param(("trio", {}), id="trio"),
    ],
)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


# -- nothing left behind -------------------------------------------------------------------------------


def family() -> dict[tuple[int, int], Process]:
    """Every process that came from this one, wherever it is now, zombies included."""
    table = processes()
    me = table[os.getpid()]
    younger = {pid: process for pid, process in table.items() if process.start >= me.start and process != me}
    found = [*descendants(me.pid, table=table), *marked(SESSION, table=younger)]
    return {(process.pid, process.start): process for process in found}


def end(strays: list[Process]) -> None:
    """Kills what a test left, so that the next test starts clean."""
    for process in strays:
        try:
            os.kill(process.pid, signal.SIGKILL)
            os.waitpid(process.pid, 0)
        except (ProcessLookupError, ChildProcessError):  # gone, or another's child
            pass


def left_processes(before: dict[tuple[int, int], Process]) -> list[Process]:
    deadline = time.monotonic() + GRACE
    while strays := [process for key, process in family().items() if key not in before]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return strays


def left_fds(before: dict[int, str]) -> list[str]:
    deadline = time.monotonic() + GRACE
    while extra := open_fds().items() - before.items():
        if time.monotonic() > deadline:
            break
        gc.collect()  # only now: it costs more than most tests
        time.sleep(0.01)
    return [f"fd {fd} -> {target}" for fd, target in sorted(extra)]


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """An error after a test that leaves a process or a descriptor.

    Being the first fixture of every test, it is the last to be torn down: after the test's own fixtures,
    async ones too. After a failure descriptors are not compared, for the traceback keeps objects alive.
    """
    if not LINUX:
        yield
        return
    processes_before, fds_before = family(), open_fds()
    yield
    left = []
    if strays := left_processes(processes_before):
        left += [str(process) for process in strays]
        end(strays)
    if request.node.stash.get(PASSED, False):
        left += left_fds(fds_before)
    if left:
        pytest.fail("left behind:\n" + "\n".join(left), pytrace=False)


# -- no skips in CI ------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[PASSED] = report.passed
    if NO_SKIPS and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped under RAMET_NO_SKIPS: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if NO_SKIPS and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped under RAMET_NO_SKIPS: {report.longrepr}"
    return report
