"""DeepSpeed's optimizer block of the 1-bit optimizers, read into ours.

References:
  https://www.deepspeed.ai/docs/config-json/#optimizer-parameters
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import optax

from dataeff_jax.optimizers import _onebit_adam, _onebit_lamb, _zero_one_adam

_NUMBER = (int, float)
_COMMON = {
    "lr": ("learning_rate", _NUMBER, 1e-3),
    "eps": ("eps", _NUMBER, 1e-8),
    "weight_decay": ("weight_decay", _NUMBER, 0.0),
}
_FREEZE = {"freeze_step": ("freeze_step", int, 100000)}
_KEYS = {
    "onebitadam": ("onebit_adam", _COMMON | _FREEZE),
    "onebitlamb": (
        "onebit_lamb",
        _COMMON
        | _FREEZE
        | {
            "max_coeff": ("max_coeff", _NUMBER, 10.0),
            "min_coeff": ("min_coeff", _NUMBER, 0.01),
            "coeff_beta": ("coeff_beta", _NUMBER, 0.9),
            "factor_max": ("factor_max", _NUMBER, 4.0),
            "factor_min": ("factor_min", _NUMBER, 0.5),
            "factor_threshold": ("factor_threshold", _NUMBER, 0.1),
        },
    ),
    "zerooneadam": (
        "zero_one_adam",
        _COMMON
        | {
            "var_freeze_step": ("var_freeze_step", int, 100000),
            "var_update_scaler": ("var_update_scaler", int, 16),
            "local_step_scaler": ("local_step_scaler", int, 32678),
            "local_step_clipper": ("local_step_clipper", int, 16),
        },
    ),
}
_BUILDERS = {
    "onebit_adam": _onebit_adam.onebit_adam,
    "onebit_lamb": _onebit_lamb.onebit_lamb,
    "zero_one_adam": _zero_one_adam.zero_one_adam,
}
# Keys without an equivalent: the values that mean nothing, and why others are refused.
_WITHOUT_MEANING = {
    "bias_correction": ((True, False), "is never applied by the original"),
    "cuda_aware": ((True, False), "chooses a transport; XLA has its own"),
    "comm_backend_name": (
        ("nccl", "mpi", "hccl", "compressed"),
        "chooses a transport; XLA has its own",
    ),
    "amsgrad": ((False,), "is not supported, by the original neither"),
    "eps_inside_sqrt": ((False,), "is ignored by the original; remove it"),
    "max_grad_norm": (
        (0, 0.0),
        "is refused by the original; use gradient_clipping beside the optimizer",
    ),
}


@dataclasses.dataclass(frozen=True)
class DeepSpeedOptimizer:
    """What an optimizer block says; made by :func:`read_deepspeed_optimizer`.

    Attributes:
      name: of the function in this package.
      kwargs: its arguments.
      dropped: keys that mean nothing here, with the reason.

    Example:
      >>> DeepSpeedOptimizer("onebit_adam", {"freeze_step": 5}, {}).name
      'onebit_adam'
    """

    name: str
    kwargs: dict[str, Any]
    dropped: dict[str, str]

    def build(self, **more: Any) -> optax.GradientTransformationExtraArgs:
        """Builds the optimizer, with more arguments or other values for some."""
        return _BUILDERS[self.name](**(self.kwargs | more))


def read_deepspeed_optimizer(
    block: Mapping[str, Any], *, gradient_clipping: float = 0.0
) -> DeepSpeedOptimizer:
    """Reads the ``optimizer`` block of a DeepSpeed configuration.

    ``OneBitAdam``, ``OneBitLamb`` and ``ZeroOneAdam`` are known. Every key is
    translated, dropped with a reason because it changes nothing, or named in the error.
    The original corrects no bias, so ``bias_correction="none"`` keeps the meaning of
    its learning rate; zero-variance coordinates are masked and small leaves excluded,
    as by default here (``parity="deepspeed"`` takes all of its conventions over).

    Args:
      block: ``{"type": ..., "params": {...}}``.
      gradient_clipping: the key of that name beside the block; 0 means none.

    Returns:
      Name and arguments of the optimizer.

    Raises:
      ValueError: with all problems of the block.

    Example:
      >>> params = {"lr": 4e-4, "freeze_step": 23000, "comm_backend_name": "nccl"}
      >>> found = read_deepspeed_optimizer({"type": "OneBitAdam", "params": params})
      >>> found.name, found.kwargs["learning_rate"], found.kwargs["freeze_step"]
      ('onebit_adam', 0.0004, 23000)
    """
    if not isinstance(block, Mapping):
        raise ValueError(f"the optimizer block must be an object, got {block!r}.")
    problems = [
        f"optimizer.{key} is unknown" for key in block.keys() - {"type", "params"}
    ]
    kind, params = block.get("type"), block.get("params", {})
    if str(kind).lower() not in _KEYS:
        problems.append(
            f"optimizer.type={kind!r} must be OneBitAdam, OneBitLamb or ZeroOneAdam"
        )
    if not isinstance(params, Mapping):
        problems.append(f"optimizer.params={params!r} must be an object")
    if problems:
        raise ValueError("; ".join(sorted(problems)) + ".")
    name, keys = _KEYS[str(kind).lower()]
    kwargs = _translated(params, keys, problems)
    dropped = _dropped(params, keys, problems)
    if gradient_clipping < 0:
        problems.append(f"gradient_clipping={gradient_clipping!r} must not be negative")
    if problems:
        raise ValueError("; ".join(sorted(problems)) + ".")
    if gradient_clipping:
        kwargs["max_grad_norm"] = gradient_clipping
    return DeepSpeedOptimizer(name, kwargs | {"bias_correction": "none"}, dropped)


def _translated(params, keys, problems) -> dict[str, Any]:
    """Arguments under our names."""
    kwargs = {}
    for key, (ours, types, default) in keys.items():
        value = params.get(key, default)
        if isinstance(value, bool) or not isinstance(value, types):
            problems.append(f"optimizer.params.{key}={value!r} must be a number")
        kwargs[ours] = value
    betas = params.get("betas", (0.9, 0.999))
    if (
        not isinstance(betas, list | tuple)
        or len(betas) != 2
        or not all(isinstance(b, _NUMBER) for b in betas)
    ):
        problems.append(f"optimizer.params.betas={betas!r} must be two numbers")
        return kwargs
    return kwargs | {"b1": betas[0], "b2": betas[1]}


def _dropped(params, keys, problems) -> dict[str, str]:
    """Keys that mean nothing here; others are problems."""
    dropped = {}
    for key in params.keys() - keys.keys() - {"betas"}:
        if key not in _WITHOUT_MEANING:
            problems.append(f"optimizer.params.{key} is unknown")
            continue
        allowed, reason = _WITHOUT_MEANING[key]
        if params[key] not in allowed:
            problems.append(f"optimizer.params.{key}={params[key]!r} {reason}")
        dropped[key] = reason
    return dropped
