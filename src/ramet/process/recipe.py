"""How a factory travels to the process that calls it."""

from __future__ import annotations

import dataclasses
import enum
import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle

from ramet.errors import HostFailed, InvalidEnvironment, text_of

__all__ = ["Recipe", "factory_name"]


def factory_name(factory: str | Callable[..., Any]) -> str:
    """A factory's name for people."""
    if isinstance(factory, str):
        return factory
    module, name = getattr(factory, "__module__", ""), getattr(factory, "__qualname__", "")
    return f"{module}:{name}" if name else type(factory).__qualname__


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """A factory and its arguments, packed.

    Attributes:
        name: the factory's name for people.
        data: the bytes that `ramet.process.resident.unpack_recipe` takes.
    """

    name: str
    data: bytes

    @classmethod
    def pack(
        cls,
        factory: str | Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Recipe:
        """Pack a `"module:attr"` string or any callable; what is defined in `__main__` goes by value.

        Raises:
            InvalidEnvironment: it is no factory.
            HostFailed: it cannot be pickled.
        """
        if isinstance(factory, str):
            factory = _named(factory)
        _check_callable(factory)
        name = factory_name(factory)
        try:
            payload = cloudpickle.dumps((factory, args, dict(kwargs or {}), _main_classes()))
        except Exception as error:
            raise HostFailed(
                name,
                f"it cannot be pickled ({type(error).__name__}: {text_of(error)}): make locks, files and connections"
                " inside the factory instead of its closure and arguments, or name it as 'module:attr'",
            ) from error
        return cls(name, pickle.dumps((name, payload)))


def _check_callable(factory: object) -> None:
    if callable(factory) or isinstance(factory, str):
        return
    hint = "pass its class, or a function that makes it" if hasattr(factory, "step") else "pass a callable"
    raise InvalidEnvironment(
        f"a factory is a callable or a 'module:attr' string, got {type(factory).__name__}: {hint}"
        " (for an object that lives in this process already, use BranchManager.create(env))"
    )


def _named(name: str) -> str | Callable[..., Any]:
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise InvalidEnvironment(f"a factory's name is 'module:attr', such as 'mypkg.envs:WebShop'; got {name!r}")
    if module != "__main__":
        return name
    found: Any = sys.modules["__main__"]
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise InvalidEnvironment(f"__main__ has no {attribute!r}") from None
    return found  # type: ignore[no-any-return]


def _main_classes() -> dict[str, type]:
    """The data classes of `__main__`, which the other side could not find by name."""
    main = vars(sys.modules["__main__"])
    found = {}
    for value in list(main.values()):
        if isinstance(value, type) and value.__module__ == "__main__" and _is_data(value):
            try:
                cloudpickle.dumps(value)
            except Exception:
                continue  # it will arrive as a record instead
            found[f"__main__:{value.__qualname__}"] = value
    return found


def _is_data(cls: type) -> bool:
    named_tuple = issubclass(cls, tuple) and hasattr(cls, "_fields")
    return dataclasses.is_dataclass(cls) or named_tuple or issubclass(cls, enum.Enum)
