"""Imports go downwards only: the table of the design, held over every module of `ramet`.

Imports inside functions count, those under `if TYPE_CHECKING` do not. A module that is not in the table
fails.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "ramet"

LAYERS = [
    {"types", "errors"},
    {"protocol"},
    {"process"},
    {"branch", "drive", "hosting", "lineage", "local", "naming", "pending", "pump", "rounds"},
    {"strategies"},
    {"manager", "blocking", "gather", "mapping"},
    {"search", "sessions", "testing", "adapters"},
    {"config", "demo", "doctor", "server"},
    {"cli", "__main__"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
RANK[""] = RANK["manager"]  # `from ramet import host` reaches everything that is lazily exported

FILES = sorted(SOURCE.rglob("*.py"))
MODULES = {".".join(("ramet", *file.relative_to(SOURCE).with_suffix("").parts)): file for file in FILES}


def runtime_imports(node: ast.AST, *, functions: bool = True) -> Iterator[str]:
    """The dotted names that the code imports when it runs."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for statement in child.orelse:
                yield from runtime_imports(ast.Module([statement], []), functions=functions)
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: write the import in full"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif functions or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from runtime_imports(child, functions=functions)


def part(imported: str) -> str:
    """The entry of the table that `imported` belongs to: `process` for `ramet.process.fork.fork`."""
    name = imported.split(".")[1] if "." in imported else ""
    return name if name in RANK or (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").exists() else ""


def ours(file: Path, **options: bool) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {name for name in runtime_imports(tree, **options) if name.split(".")[0] == "ramet"}


@pytest.mark.parametrize("module", [name for name in MODULES if name != "ramet.__init__"])
def test_imports_go_downwards(module: str) -> None:
    name = part(module)
    assert name in RANK, f"{module} is not in the table of layers"
    upwards = {target for target in ours(MODULES[module]) if RANK[part(target)] > RANK[name]}
    assert not upwards, f"{module} imports from a higher layer"
    if name == "adapters":
        assert {part(target) for target in ours(MODULES[module])} <= {"types", "errors", "adapters"}


def test_no_cycles() -> None:
    graph = {}
    for module, file in MODULES.items():
        named = {target for name in ours(file, functions=False) for target in (name, name.rpartition(".")[0])}
        graph[module] = {target for target in named if target in MODULES and target != module}
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(MODULES)
