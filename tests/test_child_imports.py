"""What runs in every branch stays small: the standard library and msgpack, no event loop, no pool."""

from __future__ import annotations

import json
import sys

from tests.helpers import run_script

LOOPS_AND_POOLS = {"anyio", "asyncio", "concurrent", "multiprocessing", "sniffio", "trio", "uvloop"}
CYTHON = {"cython_runtime"}  # what a compiled extension, msgpack's, brings along
ALLOWED = {"ramet", "msgpack", *CYTHON, *sys.stdlib_module_names}


def test_a_child_imports_no_event_loop() -> None:
    finished = run_script(
        """
        import json, sys
        before = set(sys.modules)
        import ramet.process.server, ramet.process.warden
        print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
        """
    )
    assert finished.returncode == 0, finished.stderr
    imported = set(json.loads(finished.stdout))
    assert not imported & LOOPS_AND_POOLS
    assert {name for name in imported if not name.startswith("_cython_")} <= ALLOWED
