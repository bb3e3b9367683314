"""Prints as JSON what torch.compile sees of attention in the graphs of some networks, in a process of its own."""

from __future__ import annotations

import json
from typing import Any

import torch

from bench.networks import build


def graphs_of(name: str) -> list[list[tuple[bool, bool]]]:
    """Of two steps, per graph and attention: whether it has a mask, and whether it is causal."""
    found: list[list[tuple[bool, bool]]] = []

    def keep(module: torch.fx.GraphModule, _: Any) -> Any:
        calls = [node.kwargs for node in module.graph.nodes if "scaled_dot_product" in str(node.target)]
        found.append([(call["attn_mask"] is not None, bool(call["is_causal"])) for call in calls])
        return module.forward

    network = build(name, "tiny")
    compiled = torch.compile(network.loss_fn, backend=keep)
    for seed in range(2):
        compiled(network.model, *network.make_batch(seed, "cpu")).backward()
    return found


if __name__ == "__main__":
    print(json.dumps({name: graphs_of(name) for name in ("gpt2", "bert_large", "llama", "vit", "resnet50")}))
