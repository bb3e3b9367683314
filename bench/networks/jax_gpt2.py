"""GPT-2 in plain JAX, from the weights of the PyTorch model, in the precision that autocast gives each operation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .jax_tree import Loss, Tree, of_torch


def layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    x = x.astype(jnp.float32)
    middle = x.mean(-1, keepdims=True)
    spread = jnp.square(x - middle).mean(-1, keepdims=True)
    return (x - middle) * jax.lax.rsqrt(spread + 1e-5) * weight + bias


def build(model: Any, precision: str) -> tuple[Tree, Tree, Loss]:
    """Parameters, no state beside them, and loss(parameters, state, ids)."""
    low = jnp.bfloat16 if precision == "bf16" else jnp.float32
    layers, heads = model.config.n_layer, model.config.n_head
    parameters = {k: v for k, v in of_torch(model.named_parameters()).items() if k != "lm_head.weight"}

    def dense(p: Tree, name: str, x: Any) -> Any:
        return x.astype(low) @ p[f"{name}.weight"].astype(low) + p[f"{name}.bias"].astype(low)

    def block(p: Tree, name: str, x: Any) -> Any:
        rows, length, width = x.shape
        h = layer_norm(x, p[f"{name}.ln_1.weight"], p[f"{name}.ln_1.bias"])
        parts = dense(p, f"{name}.attn.c_attn", h).reshape(rows, length, 3, heads, width // heads)
        way = "cudnn" if low == jnp.bfloat16 and jax.default_backend() == "gpu" else None
        h = jax.nn.dot_product_attention(*(parts[:, :, i] for i in range(3)), is_causal=True, implementation=way)
        x = x + dense(p, f"{name}.attn.c_proj", h.reshape(rows, length, width))
        h = layer_norm(x, p[f"{name}.ln_2.weight"], p[f"{name}.ln_2.bias"])
        h = jax.nn.gelu(dense(p, f"{name}.mlp.c_fc", h), approximate=True)
        return x + dense(p, f"{name}.mlp.c_proj", h)

    def loss(p: Tree, state: Tree, ids: Any) -> tuple[Any, Tree]:
        x = p["transformer.wte.weight"][ids] + p["transformer.wpe.weight"][: ids.shape[1]]
        for layer in range(layers):
            x = block(p, f"transformer.h.{layer}", x)
        x = layer_norm(x, p["transformer.ln_f.weight"], p["transformer.ln_f.bias"])
        logits = (x.astype(low) @ p["transformer.wte.weight"].astype(low).T)[:, :-1].astype(jnp.float32)
        right = jnp.take_along_axis(logits, ids[:, 1:, None], axis=-1)[..., 0]
        return (jax.nn.logsumexp(logits, axis=-1) - right).mean(), state

    return parameters, {}, loss
