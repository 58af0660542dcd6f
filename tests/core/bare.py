"""What a user writes first: no spec, no optional method, and nothing random in the whole module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ramet.types import State, StateMetadata, StepResult


class Bare:
    """Adds up numbers."""

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[State, dict[str, Any]]:
        self.total = 0
        return State(self.total), {}

    def step(self, state: State, action: Any) -> StepResult:
        self.total += int(action)
        return StepResult(State(self.total, None, StateMetadata(state.metadata.step + 1)), float(action))
