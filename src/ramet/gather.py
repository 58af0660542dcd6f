"""Step many branches in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ramet.branch import BranchEnvironment
from ramet.local import LocalEnvironment
from ramet.process.link import Link
from ramet.protocol.flows import Flow
from ramet.rounds import talk_all
from ramet.types import State, StepResult

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Stacked", "step_all"]

_Pair = tuple[BranchEnvironment | LocalEnvironment, State]


@dataclass(frozen=True, slots=True)
class Stacked:
    """The results of `step_all(..., stack=True)`, for n branches.

    Where a branch failed, its row holds zeros (NaN for the reward), and `errors` says why.

    Attributes:
        observations: shape (n, *observation shape).
        rewards: shape (n,), float64.
        terminated: shape (n,), bool.
        truncated: shape (n,), bool.
        errors: the exception of each branch that failed, by its position.
        results: what `step_all` gives without `stack`.
    """

    observations: np.ndarray[Any, Any]
    rewards: np.ndarray[Any, Any]
    terminated: np.ndarray[Any, Any]
    truncated: np.ndarray[Any, Any]
    errors: dict[int, Exception]
    results: list[StepResult | Exception]

    @classmethod
    def of(cls, results: list[StepResult | Exception]) -> Stacked:
        """Stack results; the observations must have one shape.

        Raises:
            ValueError: they have not.
        """
        import numpy as np

        errors = {i: result for i, result in enumerate(results) if isinstance(result, Exception)}
        good = {i: result for i, result in enumerate(results) if isinstance(result, StepResult)}
        seen = {i: np.asarray(result.next_state.observation) for i, result in good.items()}
        like = next(iter(seen.values()), np.zeros(0))
        rows = [seen.get(i, np.zeros_like(like)) for i in range(len(results))]

        def column(name: str, default: object) -> np.ndarray[Any, Any]:
            return np.array([getattr(good[i], name) if i in good else default for i in range(len(results))])

        return cls(
            np.stack(rows) if rows else like,
            column("reward", float("nan")).astype(float),
            column("terminated", False).astype(bool),
            column("truncated", False).astype(bool),
            errors,
            results,
        )


async def step_all(pairs: Sequence[_Pair], actions: Sequence[Any]) -> list[StepResult | Exception]:
    """See `BranchManager.step_all`."""
    if len(pairs) != len(actions):
        raise ValueError(f"{len(pairs)} branches need as many actions, got {len(actions)}")
    results: list[Any] = [None] * len(pairs)
    talks: list[tuple[Link, Flow[StepResult]]] = []
    places: list[int] = []
    for number, ((env, state), action) in enumerate(zip(pairs, actions, strict=True)):
        try:
            if isinstance(env, BranchEnvironment) and not env.shared:
                talks.append(env.step_flow(state, action))
                places.append(number)
            else:
                results[number] = await env.step(state, action)
        except Exception as error:
            results[number] = error
    stepped = [pairs[number][0] for number in places]
    try:
        outcomes = await talk_all(talks)
    except BaseException:
        for env in stepped:
            env.unsettle()  # type: ignore[union-attr]
        raise
    for number, env, outcome in zip(places, stepped, outcomes, strict=True):
        results[number] = env.absorb(outcome)  # type: ignore[union-attr]
    return results
