"""What a saved step was made for (layers, parameters, loss, optimizer) in plain values, and the first difference.

Classes, settings (plain attributes of a layer, what a loss function has bound), modes, shapes, dtypes and the text of
`forward` are compared. What a program cannot show, such as a helper function that changed, `verify=True` finds.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import struct
import textwrap
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..capture.capture import named_state
from ..capture.structure import class_name, short, to_plain
from ..dialects.step import tensor_type
from ..errors import SavedStepError
from ..ir.types import Type
from ..training.optimizer_plan import OptimizerPlan

#: attributes of a layer that say where it came from, not what it computes
NOT_SETTINGS = ("training", "name_or_path")
CHANGED = "Try: ws.compile for this model, or load the step with the model it was saved with"


def model_fingerprint(model: nn.Module, loss_fn: Any) -> dict[str, Any]:
    """Layers by path, parameters and buffers by name, and the loss function."""
    parameters, buffers, aliases = named_state(model, loss_fn)
    devices = {t.device.type for t in (*parameters.values(), *buffers.values())}
    layers = {path or "(model)": layer_fingerprint(m) for path, m in model.named_modules()}
    if isinstance(loss_fn, nn.Module):
        for path, m in loss_fn.named_modules():
            layers[f"loss_fn.{path}" if path else "loss_fn"] = layer_fingerprint(m)
    return {
        "device": sorted(devices),
        "layers": layers,
        "parameters": {n: {"type": tensor_type(p).text, "trains": p.requires_grad} for n, p in parameters.items()},
        "buffers": {n: {"type": tensor_type(b).text} for n, b in buffers.items()},
        "tied": {path: name for path, name in aliases.items() if path.partition(".")[2] != name},
        "loss_fn": loss_fingerprint(loss_fn),
    }


def layer_fingerprint(module: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {"class": class_name(type(module)), "training": module.training}
    if not type(module).__module__.startswith("torch."):
        found["forward"] = source_hash(type(module).forward)
    for name, value in vars(module).items():
        if not name.startswith("_") and name not in NOT_SETTINGS and is_plain(value):
            found[f"setting {name}"] = plain(value)
    return found


def loss_fingerprint(loss_fn: Any) -> dict[str, Any]:
    if loss_fn is None or isinstance(loss_fn, nn.Module):
        return {"class": None if loss_fn is None else class_name(type(loss_fn))}
    if isinstance(loss_fn, functools.partial):
        bound = [*loss_fn.args, *(v for item in sorted(loss_fn.keywords.items()) for v in item)]
        inner = loss_fingerprint(loss_fn.func)
        return {**inner, "settings": [*inner.get("settings", ()), *(plain(v) for v in bound if is_plain(v))]}
    function = getattr(loss_fn, "__func__", loss_fn)
    if not isinstance(function, types.FunctionType):
        settings = [v for item in sorted(getattr(loss_fn, "__dict__", {}).items()) for v in item]
        call = source_hash(type(loss_fn).__call__)
        name = getattr(loss_fn, "__qualname__", type(loss_fn).__qualname__)
        return {"function": name, "code": call, "settings": [plain(v) for v in settings if is_plain(v)]}
    unbound = types.CellType()  # a name of an outer function that has no value yet
    settings = [cell.cell_contents for cell in function.__closure__ or () if cell != unbound]
    settings += function.__defaults__ or ()
    name, code = function.__qualname__, function.__code__
    # the text of a lambda is that of the whole line it stands on
    text = hashed(repr(code.co_names)) if name.endswith("<lambda>") else source_hash(function)
    return {"function": name, "code": text, "settings": [plain(v) for v in settings if is_plain(v)]}


def source_hash(function: Any) -> str | None:
    """A hash of a function's text; None where there is no text."""
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        return None
    return hashed(textwrap.dedent(text).strip())


def hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def optimizer_fingerprint(optimizer: torch.optim.Optimizer, plan: OptimizerPlan) -> dict[str, Any]:
    """The optimizer's class, which parameters are in which group, and what else its update's program depends on."""
    names = plan.names
    return {
        "class": class_name(type(optimizer)),
        "groups": [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups],
        "structure": plain(plan.structure()),
    }


def is_plain(value: Any) -> bool:
    """Whether a value can be a setting: numbers, short text, functions, and nestings of these."""
    if isinstance(value, tuple | list):
        return all(is_plain(v) for v in value)
    if isinstance(value, dict):
        return all(type(k) is str and is_plain(v) for k, v in value.items())
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        return True
    return value is None or type(value) in (bool, int, float, complex) or (type(value) is str and len(value) < 200)


def plain(value: Any) -> Any:
    """A hashable description in values that JSON knows."""
    if isinstance(value, tuple) and len(value) == 2 and value[0] == "float" and isinstance(value[1], bytes):
        return to_plain(struct.unpack("<d", value[1])[0])  # as `freeze` writes a float
    if isinstance(value, tuple | list):
        return [plain(v) for v in value]
    if isinstance(value, dict):
        return [[k, plain(v)] for k, v in value.items()]
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        return value.__name__
    if isinstance(value, Type):
        return value.text
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [plain(getattr(value, f.name)) for f in dataclasses.fields(value)]
    return to_plain(value)


# ---- comparing -------------------------------------------------------------------------------------------------------


def check_fingerprints(saved: Any, model: Any, optimizer: Any, path: str) -> None:
    """Raises SavedStepError at the first thing that differs from the model and optimizer that are given."""
    if not isinstance(saved, dict) or not {"model", "optimizer"} <= set(saved):
        raise SavedStepError(f"{path}: it does not say which model and optimizer it was made for")
    for difference in model_differences(saved["model"], model):
        raise SavedStepError(f"{path} was saved for another model: {difference}.\n{CHANGED}")
    for difference in optimizer_differences(saved["optimizer"], optimizer):
        raise SavedStepError(
            f"{path} was saved for another optimizer: {difference}.\nTry: build the optimizer as it was (and load its "
            "checkpoint first), or ws.compile for this one"
        )


def model_differences(saved: Any, given: dict[str, Any]) -> Iterator[str]:
    if not isinstance(saved, dict) or set(saved) != set(given):
        yield f"it is described by {short(saved)}"
        return
    for part, word in (("layers", "layer"), ("parameters", "parameter"), ("buffers", "buffer")):
        yield from named_differences(word, saved[part], given[part])
    if saved["tied"] != given["tied"]:
        yield f"tied parameters are {short(given['tied'])} here and were {short(saved['tied'])}"
    if saved["device"] != given["device"]:
        yield f"it is on {', '.join(given['device'])} here and was on {short(saved['device'])}"
    yield from named_differences("the", {"loss function": saved["loss_fn"]}, {"loss function": given["loss_fn"]})


def check_constants(constants: dict[str, torch.Tensor], model: nn.Module, loss_fn: Any, path: str) -> None:
    """Tensors that layers keep as plain attributes are in the program: those of the model must be the same."""
    for name, tensor in constants.items():
        root, _, place = name.partition(".")
        owner = {"model": model, "loss_fn": loss_fn}.get(root)
        layer, _, attribute = place.rpartition(".")
        layers = dict(owner.named_modules()) if isinstance(owner, nn.Module) else {}
        now = vars(layers[layer]).get(attribute) if layer in layers else None
        if isinstance(now, torch.Tensor) and not torch.equal(now.detach().to(tensor.device), tensor):
            raise SavedStepError(
                f"{path} was saved for another model: the tensor {place} has other values here, and it is part of the "
                f"program, since it is no parameter and no buffer.\n{CHANGED}"
            )
        if isinstance(now, torch.Tensor) and now.device == tensor.device:
            constants[name] = now  # what is filled into it later is seen


def named_differences(word: str, saved: Any, given: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Differences between two tables of described things."""
    if not isinstance(saved, dict) or not all(isinstance(v, dict) for v in saved.values()):
        yield f"its {word}s are described by {short(saved)}"
        return
    for name, was in saved.items():
        if name not in given:
            yield f"{word} {name} is missing here"
            continue
        now = given[name]
        for key in dict.fromkeys((*was, *now)):
            if not same(key, was.get(key), now.get(key)):
                yield f"{word} {name}: {describe(key, was.get(key), now.get(key))}"
    for name in given:
        if name not in saved:
            yield f"{word} {name} was not there"


def same(key: str, was: Any, now: Any) -> bool:
    if key in ("forward", "code") and (was is None or now is None):
        return True  # without text there is nothing to compare
    if key == "class" and isinstance(was, str) and isinstance(now, str) and "__main__" in f"{was} {now}":
        return was.removeprefix("__main__.").endswith(now.removeprefix("__main__.")) or now.endswith(
            was.removeprefix("__main__.")
        )
    return was == now and type(was) is type(now)


def describe(key: str, was: Any, now: Any) -> str:
    if key in ("forward", "code"):
        return f"the text of its {'forward' if key == 'forward' else 'code'} has changed since"
    if key == "training":
        return "it is in eval mode here and was in train mode" if was else "it is in train mode here, was in eval mode"
    if key == "trains":
        return "it is frozen here and was trained" if was else "it is trained here and was frozen"
    return f"{key} is {short(now)} here and was {short(was)}"


def optimizer_differences(saved: Any, given: dict[str, Any]) -> Iterator[str]:
    if not isinstance(saved, dict) or set(saved) != set(given) or not isinstance(saved["groups"], list):
        yield f"it is described by {short(saved)}"
        return
    if not same("class", saved["class"], given["class"]):
        yield f"it is {given['class']} here and was {short(saved['class'])}"
    if len(saved["groups"]) != len(given["groups"]):
        yield f"it has {len(given['groups'])} param groups here and had {len(saved['groups'])}"
    for index, (was, now) in enumerate(zip(saved["groups"], given["groups"], strict=False)):
        if was != now:
            was = was if isinstance(was, list) else [was]
            changed = [n for n in now if n not in was] + [n for n in was if n not in now] or now
            yield f"parameter {short(changed[0])} is in another param group or at another place of group {index}"
    if saved["structure"] != given["structure"]:
        yield from structure_differences(saved["structure"], given["structure"], "")


def structure_differences(was: Any, now: Any, where: str) -> Iterator[str]:
    """The innermost differences, with the name of the option or state they belong to."""
    if has_names(was) and has_names(now) and was != now:
        before, after = dict(was), dict(now)
        for key in dict.fromkeys((*before, *after)):
            yield from structure_differences(before.get(key), after.get(key), f" {key}")
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for a, b in zip(was, now, strict=True):
            yield from structure_differences(a, b, where)
    elif was != now or type(was) is not type(now):
        yield f"its{where or ' options'} is {short(now)} here and was {short(was)}"


def has_names(value: Any) -> bool:
    """Whether a list is one of pairs of a name and a value."""
    return isinstance(value, list) and all(isinstance(v, list) and len(v) == 2 and isinstance(v[0], str) for v in value)
