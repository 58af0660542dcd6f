"""What an agent says, as an action of a Gymnasium space."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from ramet.types import Action

__all__ = ["ActionReader"]

_SHOWN = 20


class ActionReader:
    """Reads actions: raw values, texts, and `Action` with either.

    Args:
        space: the action space.
        name: the environment's name, for messages.
        texts: what stands for an action.
        check: refuse what is outside of the space.

    Raises:
        ValueError: a value in `texts` is not in the space.
    """

    def __init__(self, space: Space[Any], *, name: str, texts: Mapping[str, Any], check: bool) -> None:
        self._space = space
        self._name = name
        self._check = check
        self._shown = tuple(texts)
        self._texts: dict[str, Any] = {}
        for text, value in texts.items():
            self._texts[_folded(text)] = self._fit(value)

    def __call__(self, action: Any) -> Any:
        """The action as the environment takes it.

        Raises:
            ValueError: it is not understood, or outside of the space.
        """
        if type(action) is int:
            return self._fit(action)
        if isinstance(action, Action):
            if action.payload is None:
                return self._from_text(action.text, action)
            action = action.payload
        return self._from_text(action, action) if isinstance(action, str) else self._fit(action)

    def _from_text(self, text: str, action: Any) -> Any:
        found = self._texts.get(_folded(text))
        if found is not None:
            return found
        if isinstance(self._space, spaces.Text) and self._space.contains(text):
            return text
        try:
            value = json.loads(text)
        except ValueError:
            raise self._refusal(action) from None
        return self._fit(value, shown=action)

    def _fit(self, value: Any, *, shown: Any = None) -> Any:
        """`value` in the types of the space, and inside of it."""
        try:
            fitted = _fitted(self._space, value)
            fits = not self._check or bool(self._space.contains(fitted))
        except Exception:  # spaces raise all kinds at values of other types
            fitted, fits = value, not self._check
        if not fits:
            raise self._refusal(value if shown is None else shown)
        return fitted

    def _refusal(self, action: Any) -> ValueError:
        said = action.text if isinstance(action, Action) and action.text else action
        allowed = describe(self._space)
        if self._shown:
            texts = ", ".join(map(repr, self._shown[:_SHOWN])) + (", …" if len(self._shown) > _SHOWN else "")
            allowed = f"one of {texts}, or {allowed}"
        return ValueError(f"{said!r} is no action of {self._name}: it takes {allowed}")


def describe(space: Space[Any]) -> str:
    """What a space allows, in words."""
    if isinstance(space, spaces.Discrete):
        return f"an integer from {space.start} to {space.start + space.n - 1}"
    if isinstance(space, spaces.Text):
        return f"a text of {space.min_length} to {space.max_length} characters"
    if isinstance(space, spaces.Box):
        return f"{space.dtype} numbers of shape {space.shape} from {_bound(space.low)} to {_bound(space.high)}"
    return f"an element of {space}"


def _bound(bound: np.ndarray[Any, Any]) -> str:
    values = {float(value) for value in bound.flat}
    return f"{values.pop():g}" if len(values) == 1 else str(bound.tolist())


def _folded(text: str) -> str:
    return text.strip().casefold()


def _fitted(space: Space[Any], value: Any) -> Any:
    """`value` with lists as arrays and numbers in the space's types, where that loses nothing."""
    if isinstance(space, spaces.Discrete):
        return value.item() if isinstance(value, np.ndarray) and value.size == 1 else value
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        return _as_array(value, np.dtype(space.dtype))
    if isinstance(space, spaces.Tuple):
        return tuple(_fitted(part, item) for part, item in zip(space.spaces, value, strict=True))
    if isinstance(space, spaces.Dict):
        return {key: _fitted(space.spaces[key], item) for key, item in value.items()}
    return value


def _as_array(value: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    given = np.asarray(value)
    if not np.can_cast(given.dtype, dtype, "same_kind") and given.dtype.kind not in "iub":
        raise TypeError(f"{given.dtype} does not fit into {dtype}")
    array = given.astype(dtype, copy=False)
    if dtype.kind in "iu" and not np.array_equal(array, given):
        raise ValueError("a number is too large")
    return array
