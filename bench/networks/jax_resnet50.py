"""ResNet-50 in plain JAX, from the weights of the PyTorch model, channels last, with BatchNorm's running averages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .jax_tree import Loss, Tree, of_torch

MOMENTUM = 0.1


def build(model: Any, precision: str) -> tuple[Tree, Tree, Loss]:
    """Parameters, running averages, and loss(parameters, averages, images, labels). Images: channels last."""
    low = jnp.bfloat16 if precision == "bf16" else jnp.float32
    config = model.config
    parameters = of_torch(model.named_parameters())
    averages = of_torch((name, b) for name, b in model.named_buffers() if b.is_floating_point())

    def loss(p: Tree, averages: Tree, images: Any, labels: Any) -> tuple[Any, Tree]:
        new: Tree = {}

        def convolved(x: Any, name: str, stride: int, relu: bool = True) -> Any:
            """A convolution with BatchNorm."""
            kernel = p[f"{name}.convolution.weight"].astype(low)
            around = [(kernel.shape[0] // 2,) * 2] * 2
            layout = ("NHWC", "HWIO", "NHWC")
            x = jax.lax.conv_general_dilated(x.astype(low), kernel, (stride,) * 2, around, dimension_numbers=layout)
            wide, name = x.astype(jnp.float32), f"{name}.normalization"
            middle = wide.mean((0, 1, 2))
            spread = jnp.square(wide).mean((0, 1, 2)) - jnp.square(middle)
            count = wide.size // wide.shape[-1]
            for key, value in (("running_mean", middle), ("running_var", spread * count / (count - 1))):
                old = averages[f"{name}.{key}"]
                new[f"{name}.{key}"] = old + MOMENTUM * (value - old)
            scale = p[f"{name}.weight"] * jax.lax.rsqrt(spread + 1e-5)
            y = ((wide - middle) * scale + p[f"{name}.bias"]).astype(low)
            return jax.nn.relu(y) if relu else y

        x = convolved(images, "resnet.embedder.embedder", 2)
        pool = ((0, 0), (1, 1), (1, 1), (0, 0))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), pool)
        for stage, depth in enumerate(config.depths):
            for layer in range(depth):
                name = f"resnet.encoder.stages.{stage}.layers.{layer}"
                stride = 2 if stage > 0 and layer == 0 else 1
                y = convolved(x, f"{name}.layer.0", 1)
                y = convolved(y, f"{name}.layer.1", stride)
                y = convolved(y, f"{name}.layer.2", 1, relu=False)
                short = x
                if f"{name}.shortcut.convolution.weight" in p:
                    short = convolved(x, f"{name}.shortcut", stride, relu=False)
                x = jax.nn.relu(y + short)
        x = x.astype(jnp.float32).mean((1, 2)).astype(low)
        logits = x @ p["classifier.1.weight"].astype(low).T + p["classifier.1.bias"].astype(low)
        chances = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.take_along_axis(chances, labels[:, None], axis=1).mean(), new

    return parameters, averages, loss
