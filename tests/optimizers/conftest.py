"""The compressed mean in float64, one device after the other, for the optimizers."""

import numpy as np
import pytest


class OneBitMean:
    """Error-compensated mean of arrays of one shape, as the paper has it.

    Device j averages the j-th of n equal parts of the flattened array, padded to a
    multiple of 8 n; each part has a scale, the root mean square of its own values.
    """

    def __init__(self, n, shape, *, compressed=True):
        self.n, self.shape, self.compressed = n, shape, compressed
        size = int(np.prod(shape))
        self.chunk = -(-size // (8 * n)) * 8
        self.worker, self.server = np.zeros((n, size)), np.zeros(size)

    def _compress(self, values, active):
        sent = np.zeros_like(values)
        for start in range(0, len(values), self.chunk):
            part = slice(start, start + self.chunk)
            on = active[part]
            if on.any():
                scale = np.sqrt((values[part][on] ** 2).mean())
                sent[part] = np.where(values[part] >= 0, scale, -scale) * on
        return sent

    def __call__(self, x, active=True):
        x = np.asarray(x, np.float64).reshape(self.n, -1)
        active = np.broadcast_to(active, self.shape).ravel()
        if not self.compressed or self.n == 1:
            return (x.mean(axis=0) * active).reshape(self.shape)
        put = (self.worker + x) * active
        sent = np.stack([self._compress(row, active) for row in put])
        self.worker = put - sent
        average = (sent.mean(axis=0) + self.server) * active
        mean = self._compress(average, active)
        self.server = average - mean
        return mean.reshape(self.shape)


@pytest.fixture
def one_bit_mean():
    return OneBitMean
