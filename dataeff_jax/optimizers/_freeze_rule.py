"""When the variance has settled enough to be frozen."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax


def variance_norm(opt_state: optax.OptState, *, b2: float) -> jax.Array:
    """Sums the variance over all parameters, its bias corrected.

    Args:
      opt_state: of Adam, LAMB or the compressed optimizers, chains included.
      b2: decay of the variance.

    Returns:
      float32[]; 0 before the first update.

    Raises:
      ValueError: if the state has no ``nu`` with a count.

    Example:
      >>> tx, params = optax.adam(0.1), jnp.ones(2)
      >>> _, state = tx.update(params, tx.init(params), params)
      >>> round(variance_norm(state, b2=0.999).item(), 3)
      2.0
    """
    nus = optax.tree.get_all_with_path(opt_state, "nu")
    counts = optax.tree.get_all_with_path(
        opt_state, "nu_count"
    ) or optax.tree.get_all_with_path(opt_state, "count")
    if not nus or not counts:
        raise ValueError("the state has no nu with a count; give that of Adam or LAMB.")
    total = sum(jnp.sum(x) for x in jax.tree.leaves(nus[0][1]))
    weight = 1 - b2 ** counts[0][1].astype(jnp.float32)
    return jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1), 0.0)


class FreezeRule:
    """Says on which step the variance may be frozen: a rule instead of a number.

    Every ``delta = ceil(1 / (1 - b2))`` steps the variance's norm R is compared with
    that of delta steps ago; it has settled when ``min(R, 1 / R) >= threshold``, not
    before ``2 delta`` steps nor before the learning rate's warm-up has ended. With the
    bias corrected and both sides looked at, a variance that is still filling up, or
    falling, does not pass.

    Args:
      b2: decay of the variance.
      threshold: how close to 1 the ratio must be.
      warmup: steps of the learning rate's warm-up.

    Raises:
      ValueError: if b2 or threshold is not between 0 and 1.

    Example:
      >>> rule = FreezeRule(b2=0.5)
      >>> [rule.observe(step, norm) for step, norm in
      ...  [(2, 4.0), (4, 8.0), (6, 8.1), (8, 8.1)]]
      [False, False, True, True]
      >>> rule.freeze_step
      6
    """

    def __init__(self, *, b2: float, threshold: float = 0.96, warmup: int = 0):
        if not 0 < b2 < 1 or not 0 < threshold < 1:
            raise ValueError(
                f"b2={b2} and threshold={threshold} must be between 0 and 1."
            )
        self.delta = math.ceil(1 / (1 - b2) - 1e-9)
        self._threshold, self._warmup = threshold, warmup
        self._norms: dict[int, float] = {}
        self.freeze_step: int | None = None

    def due(self, step: int) -> bool:
        """Whether the norm after this many updates is asked for."""
        return self.freeze_step is None and step % self.delta == 0

    def observe(self, step: int, norm: float) -> bool:
        """Takes the norm (:func:`variance_norm`) after a number of updates.

        Args:
          step: updates done, a multiple of ``delta``.
          norm: of the variance.

        Returns:
          Whether the variance may be frozen from now on.
        """
        if self.freeze_step is not None:
            return True
        before = self._norms.get(step - self.delta)
        self._norms = {step: float(norm)}
        if before is None or step < max(2 * self.delta, self._warmup):
            return False
        ratio = float(norm) / before if before > 0 else 0.0
        if ratio > 0 and min(ratio, 1 / ratio) >= self._threshold:
            self.freeze_step = step
        return self.freeze_step is not None

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint must hold, in values that JSON can hold."""
        norms = [[step, norm] for step, norm in self._norms.items()]
        return {"freeze_step": self.freeze_step, "norms": norms}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from what :meth:`state` returned."""
        self.freeze_step = state["freeze_step"]
        self._norms = {int(step): float(norm) for step, norm in state["norms"]}
