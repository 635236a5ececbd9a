"""One process of several that train on nothing: run by test_processes.py.

python one_of_several.py FAULT COORDINATOR COUNT INDEX LIMITS(json)
"""

import json
import sys
import time

import jax
import numpy as np

from dataeff_jax import distributed

fault, coordinator, count, index, limits = sys.argv[1:]
index = int(index)
distributed.initialize(coordinator, num_processes=int(count), process_id=index)
with distributed.guard(**json.loads(limits)) as watch:
    watch.report(None, "compile")
    same = "a config" if fault != "disagree" else f"config of {index}"
    distributed.check_agreement(same, what="config")
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    shape = (jax.device_count(),)
    ones = jax.make_array_from_callback(
        shape, jax.NamedSharding(mesh, jax.P("data")), lambda i: np.ones(shape)[i]
    )
    add = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, "data"),
            mesh=mesh,
            in_specs=jax.P("data"),
            out_specs=jax.P(),
        )
    )
    steps = 8 if fault == "none" else 10**9
    for step in range(steps):
        if watch.stop_requested(step):
            print("stops before step", step)
            break
        watch.report(step, "data")
        if step == 3 and index == 1 and fault == "raise":
            raise LookupError("a bad record")
        if step == 3 and index == 1 and fault == "refuse":
            try:
                raise LookupError("a bad record")
            except LookupError:
                sys.exit(2)
        time.sleep(0.02)
        watch.report(step, "step")
        total = float(add(ones)[0])
        if step == 3:
            print("trains", flush=True)
    else:
        print("finished with", total)
