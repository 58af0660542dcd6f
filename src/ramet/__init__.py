"""ramet: checkpoint a live environment, fork it, and step the copies from async code.

Names are imported when they are first used, so that the process of a branch never imports an event loop.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramet.branch import BranchEnvironment
    from ramet.errors import (
        BranchBusy,
        BranchClosed,
        BranchLimitError,
        BranchLost,
        CannotBranch,
        CannotReseed,
        EncodeError,
        EnvironmentFailed,
        ForeignState,
        ForkSafetyWarning,
        HandleWarning,
        HostFailed,
        InvalidEnvironment,
        ProtocolError,
        RametError,
        ReplayDiverged,
        StaleState,
        StepTimeout,
        UnknownCheckpoint,
    )
    from ramet.gather import Stacked
    from ramet.hosting import host
    from ramet.lineage import Lineage, Node
    from ramet.local import LocalEnvironment
    from ramet.manager import BranchManager, Pair
    from ramet.protocol.codec import Record
    from ramet.protocol.handles import Handle
    from ramet.types import (
        Action,
        AsyncEnvironment,
        Environment,
        EnvironmentConfig,
        EnvironmentSpec,
        Hidden,
        Seed,
        State,
        StateMetadata,
        StepResult,
        StrategyName,
        ToolCall,
    )

__version__ = "0.1.0"

_HOMES = {
    "ramet.branch": ("BranchEnvironment",),
    "ramet.errors": (
        "BranchBusy",
        "BranchClosed",
        "BranchLimitError",
        "BranchLost",
        "CannotBranch",
        "CannotReseed",
        "EncodeError",
        "EnvironmentFailed",
        "ForeignState",
        "ForkSafetyWarning",
        "HandleWarning",
        "HostFailed",
        "InvalidEnvironment",
        "ProtocolError",
        "RametError",
        "ReplayDiverged",
        "StaleState",
        "StepTimeout",
        "UnknownCheckpoint",
    ),
    "ramet.gather": ("Stacked",),
    "ramet.hosting": ("host",),
    "ramet.lineage": ("Lineage", "Node"),
    "ramet.local": ("LocalEnvironment",),
    "ramet.manager": ("BranchManager", "Pair"),
    "ramet.protocol.codec": ("Record",),
    "ramet.protocol.handles": ("Handle",),
    "ramet.types": (
        "Action",
        "AsyncEnvironment",
        "Environment",
        "EnvironmentConfig",
        "EnvironmentSpec",
        "Hidden",
        "Seed",
        "State",
        "StateMetadata",
        "StepResult",
        "StrategyName",
        "ToolCall",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Action",
    "AsyncEnvironment",
    "BranchBusy",
    "BranchClosed",
    "BranchEnvironment",
    "BranchLimitError",
    "BranchLost",
    "BranchManager",
    "CannotBranch",
    "CannotReseed",
    "EncodeError",
    "Environment",
    "EnvironmentConfig",
    "EnvironmentFailed",
    "EnvironmentSpec",
    "ForeignState",
    "ForkSafetyWarning",
    "Handle",
    "HandleWarning",
    "Hidden",
    "HostFailed",
    "InvalidEnvironment",
    "Lineage",
    "LocalEnvironment",
    "Node",
    "Pair",
    "ProtocolError",
    "RametError",
    "Record",
    "ReplayDiverged",
    "Seed",
    "Stacked",
    "StaleState",
    "State",
    "StateMetadata",
    "StepResult",
    "StepTimeout",
    "StrategyName",
    "ToolCall",
    "UnknownCheckpoint",
    "host",
]


def __getattr__(name: str) -> Any:
    try:
        home = _HOME_OF[name]
    except KeyError:
        raise AttributeError(f"module 'ramet' has no attribute {name!r}") from None
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
