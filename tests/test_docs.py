"""The Python code of README.md and docs/ runs.

Each ```python block is a script of its own, in an empty directory, with warnings as errors. A comment on the
line before the block says otherwise:

    <!-- continued -->          one script with the block before it
    <!-- notebook -->           cells of a notebook: `await` may stand outside of functions
    <!-- file: my_envs.py -->   a file of that name, there for every later script of the page
    <!-- not run: the reason -->

Line numbers in a traceback are those of the page. Blocks in other languages are left alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.helpers import ROOT, run_script

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

BLOCK = re.compile(
    r"(?:^<!--[ ]*(?P<how>continued|notebook|file|not\ run)(?::[ ]*(?P<what>[^\n]*?))?[ ]*-->\n+)?"
    r"^```[ ]*python\b[^\n]*\n(?P<code>.*?)^```[ ]*$",
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)
FENCE = re.compile(r"^[ \t]*```[ ]*python\b", re.MULTILINE)

# An exception where Box2D's import warns of its own types crashes the interpreter.
WARNINGS = ["-W", "error", "-W", "ignore:builtin type:DeprecationWarning"]

NOTEBOOK = """\
import ast, asyncio, inspect, pathlib, sys
page = pathlib.Path("cells.txt")
code = compile(page.read_text(), page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
async def run():
    if inspect.iscoroutine(result := eval(code, vars(sys.modules["__main__"]))):
        await result
asyncio.run(run())
"""


@dataclass
class Script:
    page: str
    line: int
    source: str
    notebook: bool = False
    files: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def read(page: Path) -> list[Script]:
    """The scripts of a page."""
    text = page.read_text(encoding="utf-8")
    scripts: list[Script] = []
    files: dict[str, str] = {}
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == len(FENCE.findall(text)), f"{page.name}: a block is indented or not closed"
    for block in blocks:
        line = text.count("\n", 0, block.start("code")) + 1
        how, what, code = block["how"], block["what"], block["code"]
        if how in ("file", "not run"):
            assert what, f"{page.name}:{line}: say which file, or why it is not run"
            if how == "file":
                files[what] = code
        elif how == "continued":
            script = scripts[-1]
            script.source += "\n" * (line - 1 - script.source.count("\n")) + code
        else:
            source = "\n" * (line - 1) + code
            scripts.append(Script(page.name, line, source, notebook=how == "notebook", files=dict(files)))
    return scripts


SCRIPTS = [script for page in PAGES if page.exists() for script in read(page)]


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_it_runs(script: Script, tmp_path: Path) -> None:
    for name, text in script.files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    source = script.source
    if script.notebook:
        (tmp_path / "cells.txt").write_text(source, encoding="utf-8")
        source = NOTEBOOK
    finished = run_script(source, cwd=tmp_path, timeout=50, flags=WARNINGS, name="page.py")
    assert finished.returncode == 0, f"{script}\n{finished.stdout}\n{finished.stderr}"


def test_reading_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- file: a.py -->\n```python\nx = 1\n```\n"
        "```console\n$ ls\n```\n"
        "```python\nimport a\n```\ntext\n<!-- continued -->\n\n```python\nassert a.x\n```\n"
        "<!-- not run: it costs money -->\n```python\nspend()\n```\n"
        '<!-- notebook -->\n```python title="cell"\nawait asyncio.sleep(0)\n```\n'
    )
    one, two = read(page)
    assert (one.line, one.source.split("\n")[8], one.source.split("\n")[14]) == (9, "import a", "assert a.x")
    assert one.files == {"a.py": "x = 1\n"}
    assert not one.notebook
    assert two.notebook
    test_it_runs(one, tmp_path)
    two.source = "import asyncio\n" + two.source
    test_it_runs(two, tmp_path)
