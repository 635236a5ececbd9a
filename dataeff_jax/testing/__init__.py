"""Small problems and meshes that tests share."""

from dataeff_jax.testing._problems import mlp_batch, mlp_loss, mlp_params

__all__ = ["mlp_batch", "mlp_loss", "mlp_params"]
