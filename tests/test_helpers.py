"""The helpers of the tests keep their own promises."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.helpers import alive, descendants, eventually, run_script, start_script, state, wait_until


def test_states_of_a_process() -> None:
    pid = os.fork()
    if pid == 0:
        signal.pause()
    assert alive(pid)
    assert [process.pid for process in descendants(os.getpid())] == [pid]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: state(pid) == "Z")
    assert not alive(pid)
    os.waitpid(pid, 0)
    assert state(pid) is None


async def test_waiting_has_a_limit() -> None:
    assert wait_until(lambda: 7) == 7
    with pytest.raises(AssertionError, match=r"not within 0\.02 s: the end"):
        wait_until(lambda: False, timeout=0.02, what="the end")
    with pytest.raises(AssertionError, match="the end"):
        await eventually(lambda: False, timeout=0.02, what="the end")


def test_a_script_runs_in_a_file_of_its_own(tmp_path: Path) -> None:
    source = """
        import sys
        from tests.helpers import ROOT
        print(__file__, sys.argv[1:])
        sys.exit("no")
    """
    finished = run_script(source, cwd=tmp_path, args=["a"], name="mine.py")
    assert finished == (1, f"{tmp_path / 'mine.py'} ['a']\n", "no\n")


def test_a_script_that_hangs_is_killed() -> None:
    with pytest.raises(AssertionError, match=r"did not end within 1\.0 s\nhere"):
        run_script("import time; print('here', flush=True); time.sleep(60)", timeout=1.0)


def test_a_stray_does_not_hold_up_a_script() -> None:
    begun = time.monotonic()
    source = "import subprocess; print(subprocess.Popen(['sleep', '1.5'], start_new_session=True).pid)"
    finished = run_script(source)
    assert time.monotonic() - begun < 1.4
    assert alive(int(finished.stdout))
    wait_until(lambda: not alive(int(finished.stdout)))


def test_a_script_is_killed_with_its_block() -> None:
    with start_script("print('up'); import time; time.sleep(60)") as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "up\n"
    assert not alive(script.pid)
