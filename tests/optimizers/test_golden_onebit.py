"""Trajectories of DeepSpeed's 1-bit optimizers, reproduced with its conventions."""

import pathlib

import numpy as np
import pytest

from dataeff_jax import optimizers, testing

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden" / "onebit"
# In the order of the recorded vectors, which is that of sorted names.
SHAPES = {"a_w": (7, 5), "b_b": (13,), "c_v": (16,)}
COMMON = {
    "b2": 0.99,
    "eps": 1e-8,
    "weight_decay": 0.01,
    "axis_name": "data",
    "parity": "deepspeed",
}
OPTIMIZERS = {
    "onebit_adam": lambda: optimizers.onebit_adam(0.02, freeze_step=10, **COMMON),
    "onebit_lamb": lambda: optimizers.onebit_lamb(0.02, freeze_step=10, **COMMON),
    "zero_one_adam": lambda: optimizers.zero_one_adam(
        0.02,
        var_freeze_step=10,
        var_update_scaler=2,
        local_step_scaler=4,
        local_step_clipper=4,
        **COMMON,
    ),
}


def tree_of(vector):
    ends = np.cumsum([int(np.prod(shape)) for shape in SHAPES.values()])[:-1]
    parts = np.split(vector, ends, axis=-1)
    return {
        name: part.reshape(*vector.shape[:-1], *shape)
        for (name, shape), part in zip(SHAPES.items(), parts, strict=True)
    }


def vector_of(tree):
    return np.concatenate(
        [tree[name].reshape(len(tree[name]), -1) for name in SHAPES], axis=1
    )


def started(tx, params, num_devices):
    """The state after the first call, in which the original does nothing but count."""
    _, (state,) = testing.feed_gradients(
        tx, params, [tree_of(np.zeros((num_devices, 64)))], num_devices=num_devices
    )

    def begin(node):
        if not hasattr(node, "feedback"):
            return node
        zeros = {name: np.zeros_like(x) for name, x in node.nu.items()}
        fields = {"mu": zeros, "nu": zeros}
        if hasattr(node, "coefficient"):
            fields |= {
                name: {k: np.zeros_like(v) for k, v in getattr(node, name).items()}
                for name in ("coefficient", "coefficient_count")
            }
        return node._replace(**fields)

    if hasattr(state, "feedback"):
        return begin(state)
    return tuple(begin(node) for node in state)


@pytest.mark.parametrize(
    "case",
    [
        "onebit_adam_fixed_W2",
        "onebit_adam_fixed_W4",
        "onebit_adam_quad_W2",
        "onebit_lamb_fixed_W2",
        "onebit_lamb_quad_W2",
        "onebit_lamb_quad_W4",
        "zero_one_adam_fixed_W2",
        "zero_one_adam_fixed_W4",
        "zero_one_adam_quad_W2",
    ],
)
def test_a_recorded_trajectory_is_reproduced(case):
    name, problem, workers = case.rsplit("_", 2)
    n = int(workers[1:])
    with np.load(GOLDEN / f"{case}.npz") as file:
        golden = dict(file)
    if problem == "fixed":
        data, gradient = [tree_of(golden["grads"][t]) for t in range(1, 30)], None
    else:
        scale = tree_of(np.broadcast_to(golden["a"], (n, 64)).copy())
        data = [
            (scale, tree_of(golden["c"]), tree_of(0.01 * golden["noise"][t]))
            for t in range(1, 30)
        ]

        def gradient(params, parts):
            return {
                k: parts[0][k] * (params[k] - parts[1][k]) + parts[2][k] for k in params
            }

    tx, params = OPTIMIZERS[name](), tree_of(golden["x0"])
    history, _ = testing.feed_gradients(
        tx,
        params,
        data,
        num_devices=n,
        gradient=gradient,
        state=started(tx, params, n),
    )
    for t, here in enumerate(history, start=1):
        # The tolerance that the recordings state: float32, sums in another order.
        np.testing.assert_allclose(
            vector_of(here), golden["params"][t], atol=2e-5, err_msg=f"call {t + 1}"
        )
