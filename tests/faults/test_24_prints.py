"""Fault 24: the environment prints to stdout and corrupts the protocol."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from ramet import BranchManager, host
from tests.faults.probes import Talkative
from tests.helpers import ROOT, run_script

TEN_MEGABYTES = 10_000_000


@pytest.mark.parametrize("output", ["discard", "file"])
async def test_the_environment_prints_to_stdout(output: str, tmp_path: Path) -> None:
    """Ten megabytes of prints in one step do not hang, and no byte of them is taken for an answer."""
    log = tmp_path / "output.log"
    where = "discard" if output == "discard" else log
    async with host(Talkative, output=where) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset()
        await mgr.checkpoint("start", state)
        async with mgr.branch("start") as (branch, at):
            with anyio.fail_after(30):
                result = await branch.step(at, TEN_MEGABYTES)
            assert result.next_state.observation == TEN_MEGABYTES
            assert (await branch.step(result.next_state, 100)).next_state.observation == TEN_MEGABYTES + 100
    if output == "file":
        text = log.read_text()
        assert text.count("x" * 99 + "\n") == TEN_MEGABYTES // 100 + 1
        for line in ("raw\n", "raw error\n", "to stderr\n", "from a subprocess\n"):
            assert text.count(line) == 2, line


SCRIPT = """
from ramet.blocking import host
from tests.faults.probes import Talkative

with host(Talkative) as env:
    state, _ = env.reset()
    print("answer:", env.step(state, 200).next_state.observation, flush=True)
"""


def test_prints_go_where_the_prints_of_the_agent_go() -> None:
    """By default the environment shares the agent's stdout and stderr."""
    done = run_script(SCRIPT)
    assert done.stdout.count("x" * 99) == 2
    assert "from a subprocess\n" in done.stdout
    assert "answer: 200\n" in done.stdout
    assert done.stderr == "raw error\nto stderr\n"


@pytest.mark.parametrize("closed", ["1", "2", "1,2", "0,1,2"])
def test_an_agent_without_stdout(closed: str, tmp_path: Path) -> None:
    """An agent whose standard streams are closed, as some daemons' are, can host: the prints go nowhere."""
    (tmp_path / "script.py").write_text(
        "import sys, os\n"
        "from ramet.blocking import BranchManager, host\n"
        "from tests.faults.probes import Talkative\n"
        "with host(Talkative) as env:\n"
        "    state, _ = env.reset()\n"
        "    answer = env.step(state, 200).next_state.observation\n"
        "    branch, state = env.fork()\n"
        "    answer += branch.step(state, 200).next_state.observation\n"
        "env = Talkative()\n"
        "with BranchManager.create(env, strategy='process_fork') as mgr:\n"
        "    mgr.checkpoint('start', env.reset()[0])\n"
        "    branch, state = mgr.branch('start')\n"
        "    answer += branch.step(state, 200).next_state.observation\n"
        "open('answer', 'w').write(str(answer))\n"
    )
    close = " ".join(f"{fd}>&-" for fd in closed.split(","))
    subprocess.run(
        ["sh", "-c", f'exec "{sys.executable}" script.py {close}'],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        timeout=30,
        check=True,
    )
    assert (tmp_path / "answer").read_text() == "800"
