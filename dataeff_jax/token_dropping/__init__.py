"""Random layerwise token dropping: layers that see a random part of the tokens."""

from dataeff_jax.token_dropping._accounting import (
    deepspeed_layer_tokens,
    effective_tokens,
    layer_tokens,
)
from dataeff_jax.token_dropping._functional import ARGUMENT_KINDS, drop_tokens
from dataeff_jax.token_dropping._module import dropping_block, with_random_ltd
from dataeff_jax.token_dropping._sampling import sample_token_indices

__all__ = [
    "ARGUMENT_KINDS",
    "deepspeed_layer_tokens",
    "drop_tokens",
    "dropping_block",
    "effective_tokens",
    "layer_tokens",
    "sample_token_indices",
    "with_random_ltd",
]
