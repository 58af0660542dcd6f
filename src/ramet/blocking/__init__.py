"""The same API without `await`, for scripts and notebooks: blocking sockets, no event loop, no helper thread.

    from ramet.blocking import BranchManager, host

    with host(MyEnv) as env:
        state, info = env.reset(seed=42)
        with BranchManager.create(env) as mgr:
            mgr.checkpoint("start", state)
            with mgr.branch("start") as (branch, state):
                result = branch.step(state, "go left")

Under `direct` and `clone` a branch's environment is the object itself (or its copy), not a proxy.
"""

from __future__ import annotations

from ramet.blocking.branch import BranchEnvironment, host
from ramet.blocking.manager import BranchManager, Pair, Pairs

__all__ = ["BranchEnvironment", "BranchManager", "Pair", "Pairs", "host"]
