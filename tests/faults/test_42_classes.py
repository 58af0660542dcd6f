"""Fault 42: a class defined beside the user's script, or in a notebook cell, cannot be found in the child."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.helpers import run_script

MODULE = """
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple
from ramet import State, StepResult, StateMetadata

class Side(Enum):
    LEFT = "left"
    RIGHT = "right"

class Place(NamedTuple):
    x: int
    y: int

@dataclass
class Board:
    side: Side
    place: Place

@dataclass(frozen=True, slots=True)
class Move:
    by: int
    side: Side

class Game:
    '''An environment that insists on the very classes.'''
    def __init__(self, start=0):
        self.x = start
    def reset(self, *, seed=None, options=None):
        return State(Board(Side.LEFT, Place(self.x, 0))), {}
    def step(self, state, action):
        assert type(action) is Move and type(action.side) is Side, type(action)
        self.x += action.by
        return StepResult(State(Board(action.side, Place(self.x, 0)), {"last": action}))
"""

PLAY = """
async def play(factory, classes, **kwargs):
    Side, Place, Board, Move = classes
    async with host(factory, **kwargs) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset()
        assert type(state.observation) is Board, state
        await mgr.checkpoint("start", state)
        async with mgr.branch("start") as (branch, at):
            result = await branch.step(at, Move(3, Side.RIGHT))
            seen = result.next_state.observation
            assert type(seen) is Board and seen.side is Side.RIGHT and type(seen.place) is Place, seen
            assert (await branch.hidden(result.next_state)) == {"last": Move(3, Side.RIGHT)}
            print("x is", seen.place.x)

async def play_live(env, classes):
    Side, Place, Board, Move = classes
    warnings.simplefilter("ignore")
    async with BranchManager.create(env, strategy="process_fork") as mgr:
        state, _ = await mgr.env.reset()
        await mgr.checkpoint("start", state)
        async with mgr.branch("start") as (branch, at):
            seen = (await branch.step(at, Move(3, Side.RIGHT))).next_state.observation
            assert type(seen) is Board and seen.side is Side.RIGHT, seen
            print("x is", seen.place.x)
"""

IMPORTS = "import os, sys, warnings\nimport anyio\nfrom ramet import BranchManager, host\n"

MAIN = """
if __name__ == "__main__":
    backend = "trio" if "trio" in sys.argv else "asyncio"
    anyio.run(main, backend=backend)
"""


def run(script: str, *, folder: Path, name: str = "script.py", cwd: Path | None = None) -> str:
    done = run_script(IMPORTS + textwrap.dedent(PLAY) + textwrap.dedent(script) + MAIN, cwd=folder, name=name)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_a_class_beside_the_script(tmp_path: Path) -> None:
    """A module beside the script is found in the host, by name or by its class, also from another directory."""
    (tmp_path / "games.py").write_text(MODULE)
    (tmp_path / "elsewhere").mkdir()
    script = """
        async def main():
            import games
            classes = games.Side, games.Place, games.Board, games.Move
            await play("games:Game", classes)
            await play(games.Game, classes, args=(1,))
            os.chdir("elsewhere")
            await play("games:Game", classes, kwargs={"start": 2})
            await play("games:Game", classes, cwd="/", args=(3,))
            await play_live(games.Game(4), classes)
    """
    assert run(script, folder=tmp_path) == "".join(f"x is {n}\n" for n in (3, 4, 5, 6, 7))


def test_a_class_of_the_script_itself(tmp_path: Path) -> None:
    """Classes of `__main__` travel by value and are rebuilt as themselves, in both directions."""
    script = textwrap.dedent(MODULE) + textwrap.dedent(
        """
        async def main():
            classes = Side, Place, Board, Move
            await play(Game, classes)
            await play("__main__:Game", classes, args=(1,))
            await play(lambda: Game(2), classes)
            await play_live(Game(3), classes)
        """
    )
    assert run(script, folder=tmp_path) == "".join(f"x is {n}\n" for n in (3, 4, 5, 6))


def test_a_module_that_is_not_there(tmp_path: Path) -> None:
    """A factory that cannot be found says so, and a class that is not known here arrives as a record."""
    (tmp_path / "games.py").write_text(MODULE)
    script = """
        from ramet import HostFailed, Record

        async def main():
            for name in ("gone:Game", "games:Gone"):
                try:
                    await host(name)
                except HostFailed as error:
                    print(error)
            async with host("games:Game") as env:
                state, _ = await env.reset()
                assert type(state.observation) is Record and "games" not in sys.modules
                print(state.observation.type_name, state.observation.place.x)
    """
    gone, unknown, record = run(script, folder=tmp_path).splitlines()
    assert "gone:Game" in gone
    assert "No module named 'gone'" in gone
    assert "games:Gone" in unknown
    assert "has no attribute 'Gone'" in unknown
    assert record == "games:Board 0"


@pytest.mark.parametrize("how", ["-m", "-c", "stdin"])
def test_a_script_that_is_no_file_of_its_own(how: str, tmp_path: Path) -> None:
    """The same for a package that is run by name, a command line, and a script from a pipe."""
    import subprocess
    import sys

    from tests.helpers import ROOT

    source = (
        IMPORTS
        + PLAY
        + MODULE
        + "\nimport helper\n\nasync def main():\n    assert helper.HERE\n"
        + "    await play(Game, (Side, Place, Board, Move))\n"
        + MAIN
    )
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "script.py").write_text(source)
    (tmp_path / "helper.py").write_text("HERE = True\n")
    command = {"-m": ["-m", "package.script"], "-c": ["-c", source], "stdin": ["-"]}[how]
    done = subprocess.run(
        [sys.executable, *command],
        input=source if how == "stdin" else "",
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        timeout=30,
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("x is 3\n", "")
