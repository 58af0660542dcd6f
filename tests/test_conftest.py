"""The checks of conftest.py do fail when they should."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import ROOT

CONFTEST = Path(__file__).with_name("conftest.py")


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A test session of its own with the same conftest.py."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("RAMET_NO_SKIPS", raising=False)
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8").replace("GRACE = 2.0", "GRACE = 0.3"))
    return pytester


def test_it_finds_what_is_left(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        """
        import os, signal, socket, subprocess, sys
        import anyio, pytest

        KEPT = []

        def test_child():
            KEPT.append(subprocess.Popen(["sleep", "60"]))

        def test_forked_child():
            if os.fork() == 0:
                signal.pause()

        def test_zombie():
            if os.fork() == 0:
                os._exit(0)

        def daemonise(then):
            if (pid := os.fork()) == 0:
                os.setsid()
                if os.fork() == 0:
                    then()
                os._exit(0)
            os.waitpid(pid, 0)

        def test_daemon():
            daemonise(signal.pause)

        def test_exec_daemon():
            daemonise(lambda: os.execvp("sleep", ["sleep", "60"]))

        def test_descriptor():
            KEPT.append(socket.socketpair())

        async def test_async_descriptor():
            KEPT.append(socket.socketpair())

        @pytest.fixture
        async def leaking():
            yield
            KEPT.append(socket.socketpair())

        async def test_async_fixture(leaking):
            pass
        """
    )
    result = inner.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=12, errors=12)
    result.stdout.fnmatch_lines(["left behind:", "pid * (sleep, state S, parent *): sleep 60"])
    result.stdout.fnmatch_lines(["pid * (python*, state Z, parent *"])
    result.stdout.fnmatch_lines(["fd * -> socket:*"])


def test_it_lets_pass_what_is_tidy(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        """
        import gc, os, socket, subprocess
        import anyio, pytest
        from hypothesis import given, strategies as st

        @pytest.fixture(scope="module")
        def shared():
            with subprocess.Popen(["sleep", "60"]) as process:
                yield process
                process.kill()

        @pytest.fixture
        async def pair():
            left, right = socket.socketpair()
            yield left
            left.close(), right.close()

        def test_module_fixture(shared):
            assert shared.poll() is None

        def test_slow_to_go():
            if (pid := os.fork()) == 0:
                os.setsid()
                if os.fork() == 0:
                    os.execvp("sleep", ["sleep", "0.1"])
                os._exit(0)
            os.waitpid(pid, 0)

        def test_subprocess():
            assert subprocess.run(["true"]).returncode == 0

        def test_garbage():
            gc.collect()
            read, write = os.pipe()

            class Owner:
                def __del__(self):
                    os.close(read), os.close(write)

            owner = Owner()
            owner.itself = owner

        async def test_async(pair, anyio_backend_name):
            await anyio.sleep(0)
            await anyio.to_thread.run_sync(lambda: None)
            assert (await anyio.run_process(["true"])).returncode == 0
            if anyio_backend_name == "asyncio":
                import asyncio
                print("loop", type(asyncio.get_running_loop()).__module__)
            else:
                print("loop", anyio_backend_name)

        @given(st.integers())
        def test_hypothesis(number):
            assert number == number

        @given(st.integers())
        async def test_async_hypothesis(number):
            await anyio.sleep(0)
        """
    )
    result = inner.runpytest_subprocess("-p", "no:cacheprovider", "-rP")
    result.assert_outcomes(passed=11)
    loops = {line.split()[1] for line in result.outlines if line.startswith("loop ")}
    assert loops == {"asyncio.unix_events", "uvloop", "trio"}


def test_a_skip_is_a_failure_when_asked(inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    inner.makepyfile(
        """
        import pytest

        def test_skipped():
            pytest.skip("there is no such thing here")

        @pytest.mark.skip
        def test_marked():
            pass

        @pytest.mark.xfail(strict=True)
        def test_expected():
            assert False

        def test_passes():
            pass
        """
    )
    inner.makepyfile(test_module="import pytest\npytest.importorskip('there_is_no_such_module')")
    inner.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1, skipped=3, xfailed=1)
    monkeypatch.setenv("RAMET_NO_SKIPS", "1")
    result = inner.runpytest_subprocess("-p", "no:cacheprovider", "--continue-on-collection-errors")
    result.assert_outcomes(passed=1, failed=1, errors=2, xfailed=1)
    result.stdout.fnmatch_lines(["*skipped under RAMET_NO_SKIPS*no such thing here*"])
    assert result.ret != 0
