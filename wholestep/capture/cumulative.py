"""BatchNorm(momentum=None), whose running statistics are the mean over all batches so far, without reading its counter.

torch's layer makes a Python number of the counter, which is known only while a step runs. While a model is captured the
same layer takes the batch's own statistics and weighs them by a tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.nn.modules.batchnorm import _BatchNorm


@contextlib.contextmanager
def cumulative_statistics() -> Iterator[None]:
    """Layers of torch with momentum=None compute the weight of a batch as a tensor."""
    original = _BatchNorm.forward

    def batch_norm(self: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
        if (
            self.momentum is None
            and self.training
            and self.track_running_stats
            and self.num_batches_tracked is not None
        ):
            return _cumulative(self, x)
        return original(self, x)

    _BatchNorm.forward = batch_norm  # type: ignore[method-assign]
    try:
        yield
    finally:
        _BatchNorm.forward = original  # type: ignore[method-assign]


def _cumulative(layer: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
    layer._check_input_dim(x)
    assert layer.num_batches_tracked is not None and layer.running_mean is not None and layer.running_var is not None
    layer.num_batches_tracked.add_(1)
    share = 1.0 / layer.num_batches_tracked.double()
    # with a momentum of 1 they become the batch's own; they begin as the running ones, around which sums are exact
    mean, variance = layer.running_mean.clone(), layer.running_var.clone()
    y = F.batch_norm(x, mean, variance, layer.weight, layer.bias, True, 1.0, layer.eps)
    for running, new in ((layer.running_mean, mean), (layer.running_var, variance)):
        running.copy_(new * share + running * (1.0 - share))
    return y
