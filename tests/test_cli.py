"""The `ramet` command: the demo, the doctor, and errors in one line."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import ramet
from ramet import RametError, cli, doctor
from ramet.demo import Figures, report
from tests.helpers import ROOT, run_script, start_script

LANDER = ROOT / "src" / "ramet" / "demo" / "lander.py"
RUN = "import sys; from ramet.cli import main; sys.exit(main(sys.argv[1:]))"
SHORT = ["demo", "--width", "2", "--seed", "4"]


def run_command(*args: str, before: str = "") -> tuple[int, list[str], list[str]]:
    finished = run_script(f"{before}\n{RUN}", args=args, timeout=55)
    return finished.returncode, finished.stdout.splitlines(), finished.stderr.splitlines()


# -- arguments -----------------------------------------------------------------------------------------


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"ramet {ramet.__version__}\n"


@pytest.mark.parametrize(
    "args", [[], ["dance"], ["demo", "--seed", "x"], ["demo", "--seed", "-1"], ["demo", "--width", "0"]], ids=" ".join
)
def test_wrong_arguments(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(args)
    assert "error: " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("args", [["--help"], ["demo", "--help"], ["doctor", "--help"]], ids=" ".join)
def test_help(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(args)
    assert "usage: ramet" in capsys.readouterr().out


def test_the_command_imports_little_until_it_knows_what_to_do() -> None:
    code = "import sys, ramet.cli; print({'anyio', 'asyncio', 'gymnasium', 'numpy', 'rich'} & set(sys.modules))"
    assert run_script(code).stdout == "set()\n"


# -- errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error, status, text",
    [
        (RametError("no room\n for it"), 1, "ramet: no room for it\n"),
        (OSError(28, "No space left"), 1, "ramet: OSError: [Errno 28] No space left\n"),
        (ExceptionGroup("tasks", [ExceptionGroup("more", [RametError("lost")])]), 1, "ramet: lost\n"),
        (KeyboardInterrupt(), 130, "ramet: interrupted\n"),
    ],
    ids=["ours", "theirs", "group", "interrupt"],
)
def test_an_error_is_one_line(
    error: BaseException,
    status: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(arguments: object) -> int:
        raise error

    monkeypatch.setattr(cli, "_demo", fail)
    assert cli.main(["demo"]) == status
    assert capsys.readouterr().err == text


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_demo", lambda arguments: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["demo"])


@pytest.mark.parametrize("missing", ["gymnasium", "Box2D"])
def test_the_demo_says_what_to_install(missing: str) -> None:
    hide = f"""
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == {missing!r} else find_spec(name, *rest)
"""
    status, _, err = run_command("demo", before=hide)
    assert status == 1
    assert err == [f'ramet: the demo needs {missing}: pip install "ramet[demo]"']


def test_ctrl_c_is_one_line_too() -> None:
    with start_script(RUN, args=["demo", "--plain"]) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.readline()  # the first decision
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
        assert (process.returncode, err) == (130, "ramet: interrupted\n")


def test_a_reader_that_goes_away_ends_it_quietly() -> None:
    with start_script(RUN, args=["demo", "--plain"]) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(30) == 1
        assert process.stderr.read() == ""


# -- the demo ------------------------------------------------------------------------------------------


def test_the_demo_lands() -> None:
    status, out, err = run_command(*SHORT)
    assert (status, err) == (0, [])
    begin, *decisions = out[: out.index("") - 1]
    assert begin.startswith("landing LunarLander-v3")
    assert re.fullmatch(r"frame +15, +4 forks tried, the best at height +\d.\d\d with reward +-?\d+.\d", decisions[0])
    text = "\n".join(out)
    assert "host host-1 · LunarLander-v3 · pid" in text
    assert re.search(r"└─ branch-\d+ · frame 15 · (no|left|main|right) engine · forked in \d+\.\d\d ms", text)
    assert re.search(r"^landed +both legs on the ground after \d{3} frames, reward 2\d\d", text, re.MULTILINE)
    assert re.search(r"^branches +\d{3} in \d\d decisions$", text, re.MULTILINE)
    assert re.search(r"^forks +\d+ of the live simulator.* \d+\.\d\d ms \(median\)$", text, re.MULTILINE)
    assert re.search(r"^steps +1,\d\d\d in \d+\.\d s: [\d,]+ steps/s", text, re.MULTILINE)
    assert re.search(r"^replay +would have taken [\d,]+ resets and [\d,]+ steps more", text, re.MULTILINE)


def read_terminal(args: Sequence[str]) -> tuple[int, str]:
    """What a command writes to a terminal, and its status."""
    controller, terminal = pty.openpty()
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen([sys.executable, "-c", RUN, *args], stdout=terminal, stderr=terminal, env=environ)
    os.close(terminal)
    text = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while data := os.read(controller, 65536):
            text += data
    os.close(controller)
    return process.wait(30), text.decode()


def test_a_terminal_gets_a_progress_display() -> None:
    status, text = read_terminal(SHORT)
    assert status == 0, text
    assert "━" in text
    assert "forks tried" in text
    assert "replay" in text
    assert "landing LunarLander-v3 by" not in text
    status, text = read_terminal([*SHORT, "--plain"])
    assert status == 0, text
    assert "━" not in text


def figures(**changes: float) -> Figures:
    facts = {"reward": 10.0, "legs": 0, "frames": 9, "decisions": 2, "branches": 1234, "checkpoints": 3}
    facts |= {"fork_time": 0.0015, "steps": 5000, "seconds": 2.0, "replay_steps": 100000}
    return Figures(**{**facts, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes, landed", [({}, False), ({"legs": 2}, True), ({"legs": 1}, False), ({"reward": 200.0}, True)], ids=repr
)
def test_what_counts_as_landed(changes: dict[str, float], landed: bool) -> None:
    assert figures(**changes).landed == landed


def test_the_figures_add_up() -> None:
    lines = list(report(figures(), 0.001, 0.00003))
    assert lines[0].startswith("not landed no leg")
    assert "1,237 of the live simulator" in lines[2]
    assert "1.50 ms" in lines[2]
    assert "2,500 steps/s" in lines[3]
    assert "1,234 resets and 100,000 steps more" in lines[4]
    assert "4.2 s at 1.0 ms and 30 µs" in lines[4]


# -- the example ---------------------------------------------------------------------------------------


def test_the_example_is_what_the_demo_runs() -> None:
    assert (ROOT / "examples" / "lander.py").resolve() == LANDER
    source = LANDER.read_text()
    assert len(source.splitlines()) < 60
    imported = re.findall(r"^(?:from|import) (\S+)", source, re.MULTILINE)
    assert {name for name in imported if name.startswith("ramet")} == {"ramet"}


def test_the_example_runs(tmp_path: Path) -> None:
    source = LANDER.read_text().replace("width: int = 8", "width: int = 2").replace("seed=42", "seed=4")
    finished = run_script(source, cwd=tmp_path, timeout=55)
    assert finished.returncode == 0, finished.stderr
    assert re.fullmatch(r"frame \d{3}: reward 2\d\d.\d", finished.stdout.splitlines()[-1])


# -- the doctor ----------------------------------------------------------------------------------------


def test_the_doctor_finds_this_machine_usable() -> None:
    status, out, err = run_command("doctor")
    assert (status, err) == (0, []), out
    assert out[-1] == "ramet can fork here"
    checks = {line[9:32].strip(): line[:8].strip() for line in out[:-2] if line[:8].strip()}
    for name in ("Python", "system", "fork", "CLONE_PARENT", "RLIMIT_NOFILE", "kernel.pid_max", "event loops"):
        assert checks[name] == "ok", out
    for name in ("huge pages", "user namespaces", "overlayfs", "overcommit"):
        assert checks[name] in ("ok", "note"), out
    assert any(line.startswith("ok       packages") and "numpy" in line for line in out)


def test_the_doctor_harms_nothing(tmp_path: Path) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    namespaces = {name: os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "user")}
    list(doctor.examine())
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert {name: os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "user")} == namespaces


def test_a_problem_is_a_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def examine() -> Iterator[doctor.Check]:
        yield doctor.Check("fork", "problem", "Operation not permitted", "allow it")
        yield doctor.Check("huge pages", "note", "never")

    monkeypatch.setattr(doctor, "examine", examine)
    assert cli.main(["doctor"]) == 1
    fork, advice, pages, _, verdict = capsys.readouterr().out.splitlines()
    assert fork.split() == ["problem", "fork", "Operation", "not", "permitted"]
    assert advice.strip() == "→ allow it"
    assert pages.startswith("note     huge pages")
    assert verdict == "1 problem: ramet cannot fork here"


def test_a_probe_that_dies_or_raises_is_told() -> None:
    def refused() -> str:
        raise PermissionError(1, "Operation not permitted")

    def broken() -> str:
        raise ValueError("oops")

    def dying() -> str:
        os._exit(3)

    assert doctor._in_child(lambda: "") == ""
    assert doctor._in_child(refused) == "Operation not permitted"
    assert doctor._in_child(broken) == "ValueError: oops"
    assert doctor._in_child(dying) == "the child ended with status 3"


def test_a_probe_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PROBE_TIMEOUT", 0.1)
    reader, writer = os.pipe()
    assert doctor._in_child(lambda: str(os.read(reader, 1))) == "no answer within 0.1 s"
    os.close(reader)
    os.close(writer)
