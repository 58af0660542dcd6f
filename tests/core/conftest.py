"""Fixtures of the core's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.core.envs import Gate


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """A gate at which steps wait until the test opens it."""
    gate = Gate(tmp_path)
    yield gate
    gate.close()
