"""`ramet` exports by name and lazily."""

from __future__ import annotations

import json

import ramet
import ramet.errors
import ramet.types
from tests.helpers import run_script


def test_all_is_sorted_and_there() -> None:
    assert list(ramet.__all__) == sorted(ramet.__all__)
    for name in ramet.__all__:
        assert getattr(ramet, name) is not None
    assert set(ramet.__all__) <= set(dir(ramet))


def test_types_and_errors_are_exported() -> None:
    for module in (ramet.types, ramet.errors):
        assert set(module.__all__) <= set(ramet.__all__)
        for name in module.__all__:
            assert getattr(ramet, name) is getattr(module, name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(ramet, "no_such_name")


def test_import_is_cheap() -> None:
    finished = run_script(
        """
        import json, sys
        import ramet
        print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
        """
    )
    assert finished.returncode == 0, finished.stderr
    heavy = {"anyio", "asyncio", "cloudpickle", "gymnasium", "msgpack", "numpy", "trio", "uvloop"}
    assert not heavy & set(json.loads(finished.stdout))
