"""What a run has consumed, counted exactly."""

import dataclasses
import operator
from typing import Any


@dataclasses.dataclass(frozen=True)
class Ledger:
    """Counts of a run so far, in Python integers, which do not overflow.

    Args:
      samples: rows drawn.
      tokens: tokens fed to the model; the clock of token schedules.
      layer_tokens: tokens that went through a block, summed over blocks.
      flops: floating point operations by the model's formula.

    Example:
      >>> ledger = Ledger(tokens=2_147_483_000)
      >>> ledger.add(samples=512, tokens=512 * 4096).tokens
      2149580152
    """

    samples: int = 0
    tokens: int = 0
    layer_tokens: int = 0
    flops: int = 0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            try:
                exact = operator.index(value)
            except TypeError:
                raise ValueError(
                    f"{field.name}={value!r} must be an integer; the ledger is exact."
                ) from None
            if exact < 0 or isinstance(value, bool):
                raise ValueError(f"{field.name}={value!r} must be a count, 0 or more.")
            object.__setattr__(self, field.name, exact)

    def add(
        self,
        *,
        samples: int = 0,
        tokens: int = 0,
        layer_tokens: int = 0,
        flops: int = 0,
    ) -> "Ledger":
        """Returns a ledger with these counts added."""
        step = Ledger(samples, tokens, layer_tokens, flops)
        return Ledger(
            **{
                field.name: getattr(self, field.name) + getattr(step, field.name)
                for field in dataclasses.fields(self)
            }
        )

    def to_json(self) -> dict[str, int]:
        """Returns the counts by name."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, counts: dict[str, Any]) -> "Ledger":
        """Reads what :meth:`to_json` wrote."""
        names = {field.name for field in dataclasses.fields(cls)}
        if set(counts) != names:
            raise ValueError(
                f"a ledger has the counts {sorted(names)}, but got {sorted(counts)}."
            )
        return cls(**counts)
