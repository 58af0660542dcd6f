"""Handles: what stands in the agent for a value that could not leave its branch."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Handle"]


class Handle:
    """An opaque reference to a value that stayed in its branch.

    It is valid again when it is passed back to that branch or to any branch that descends from it
    after the value came to be. Dropping the last reference lets the branch forget the value.

    Attributes:
        type_name: the value's type, as `"module:name"`.
        text: the value's `repr`, shortened.
    """

    __slots__ = ("_drop", "id", "owner", "text", "type_name")

    def __init__(
        self, id: int, type_name: str, text: str, *, owner: int, drop: Callable[[int], None] | None = None
    ) -> None:
        self.id = id
        self.type_name = type_name
        self.text = text
        self.owner = owner
        self._drop = drop

    def __repr__(self) -> str:
        return f"<Handle of {self.type_name}: {self.text}>"

    def __reduce__(self) -> tuple[object, ...]:
        # A stored handle says what it was; it refers to nothing any more.
        return _detached, (self.type_name, self.text)

    def __del__(self) -> None:
        if self._drop is not None:
            self._drop(self.id)


def _detached(type_name: str, text: str) -> Handle:
    return Handle(0, type_name, text, owner=0)
