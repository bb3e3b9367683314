"""Mutates small ONNX files and imports each: `python -m tests.onnx.fuzz COUNT SEED` prints what became of them as JSON.

It runs in a process of its own whose memory is limited, with a clock on every file. An import must end in one of our
own errors or give what onnxruntime gives for the same file, where that is installed and takes it.
"""

from __future__ import annotations

import json
import math
import random
import resource
import signal
import sys
from collections import Counter
from importlib.util import find_spec
from typing import Any

import onnx
import torch

from tests.onnx.graphs import evaluated, expected, model
from wholestep.onnx import Limits, OnnxError, from_onnx
from wholestep.onnx.dtypes import dtype_of

SECONDS_PER_FILE = 10
ROOM = 2 << 30
LIMITS = Limits(nodes=3_000, rounds=50)


def seeds() -> list[bytes]:
    """The files that are mutated: each part of the importer is in one."""
    torch.manual_seed(0)
    return [
        m.SerializeToString()
        for m in (
            model(
                "agraph (float[n, 4] x) => (float[n, 3] y) { h = Gemm <transB = 1, alpha = 0.5> (x, w, b) "
                "y = Add(h, c) }",
                w=torch.randn(3, 4), b=torch.randn(3), c=torch.tensor(1.5),
            ),
            model(
                """agraph (float[2, 6] x) => (float[a, b] y) {
                    s = Shape(x)
                    t = Reshape(s, minus)
                    z = ConstantOfShape <value = float[1] {2.0}> (t)
                    r = Reshape(x, target)
                    w = Add(x, z)
                    y = Reshape(w, target)
                }""",
                minus=torch.tensor([-1]), target=torch.tensor([3, 4]),
            ),
            model(
                """agraph (float[2] x) => (float[2] y, float[k, 2] all) {
                    p = If (yes) <then_branch = a () => (float[2] u) { u = Add(x, one) },
                                  else_branch = b () => (float[2] v) { v = Add(x, x) }>
                    y, all = Loop (trips, yes, p) <body = b (int64 i, bool c, float[2] s)
                        => (bool d, float[2] t, float[2] u) { d = Identity(c) t = Add(s, x) u = Add(t, t) }>
                }""",
                yes=torch.tensor(True), one=torch.tensor(1.0), trips=torch.tensor(3),
            ),
            model(
                """agraph (float[5, 2] xs, float[2] x) => (float[2] y, float[5, 2] all) {
                    q = local.Twice(x)
                    y, all = Scan <num_scan_inputs = 1, body = b (float[2] s, float[2] v)
                        => (float[2] t, float[2] u) { t = Add(s, v) u = Add(t, t) }> (q, xs)
                }
                <domain: "local", opset_import: ["" : 18]>
                Twice (a) => (c) { c = Add(a, a) }""",
            ),
            model(
                """agraph (float[1, 2, 4, 4] x) => (float[a, b] y) {
                    c = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (x, w)
                    r = Relu(c)
                    m = MaxPool <kernel_shape = [2, 2]> (r)
                    s = Shape(m)
                    n = Slice(s, zero, one)
                    o = Concat <axis = 0> (n, minus)
                    f = Reshape(m, o)
                    t = Transpose <perm = [1, 0]> (f)
                    y = Softmax <axis = 0> (t)
                }""",
                w=torch.randn(3, 2, 3, 3), zero=torch.tensor([0]), one=torch.tensor([1]), minus=torch.tensor([-1]),
            ),
            model(
                """agraph (float[2, 3] x) => (float[a, b] y, float[c, d] z) {
                    r = Range(zero, three, one)
                    g = Gather <axis = 1> (x, r)
                    e = Expand(g, wide)
                    t = Tile(e, twice)
                    p = Pad(t, pads)
                    y = Clip(p, low)
                    h = OneHot(r, three, values)
                    z = MatMul(x, h)
                }""",
                zero=torch.tensor(0), three=torch.tensor(3), one=torch.tensor(1), wide=torch.tensor([2, 3]),
                twice=torch.tensor([2, 1]), pads=torch.tensor([0, 1, 1, 0]), low=torch.tensor(0.1),
                values=torch.tensor([0.5, 2.0]),
            ),
        )
    ]  # fmt: skip


NUMBERS = (0, 1, -1, 2, 7, 255, 10**6, 10**9, 10**12, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63))


def damaged(data: bytes, random_: random.Random) -> bytes:
    """Bytes changed, cut, doubled or joined."""
    raw = bytearray(data)
    for _ in range(random_.choice((1, 1, 1, 2, 4, 16))):
        place = random_.randrange(len(raw))
        kind = random_.randrange(5)
        if kind == 0:
            raw[place] ^= 1 << random_.randrange(8)
        elif kind == 1:
            raw[place] = random_.randrange(256)
        elif kind == 2:
            del raw[place : place + random_.randrange(1, 9)]
        elif kind == 3:
            raw[place:place] = raw[place : place + random_.randrange(1, 30)]
        else:
            del raw[place:]
        if not raw:
            return b""
    return bytes(raw)


def changed(data: bytes, random_: random.Random) -> bytes:
    """A field of the message changed, so that the file still parses."""
    proto = onnx.ModelProto()
    proto.ParseFromString(data)
    for _ in range(random_.choice((1, 1, 2, 3))):
        change(proto.graph if random_.random() < 0.8 else proto, random_)
    return proto.SerializeToString()


def change(message: Any, random_: random.Random) -> None:
    fields = message.ListFields()
    if not fields:
        return
    field, value = random_.choice(fields)
    repeated = not isinstance(value, int | float | str | bytes) and hasattr(value, "__len__")
    if repeated:
        index = random_.randrange(len(value)) if len(value) else 0
        kind = random_.randrange(6)
        if len(value) and kind == 0:
            del value[index]
        elif len(value) and kind == 1:
            value.append(value[index])
        elif len(value) and kind == 2:
            value.insert(0, value[index])
        elif len(value) and hasattr(value[index], "ListFields"):
            change(value[index], random_)
        elif len(value):
            value[index] = other(value[index], random_)
    elif hasattr(value, "ListFields"):
        change(value, random_)
    else:
        try:
            setattr(message, field.name, other(value, random_))
        except ValueError:  # protobuf knows better: the number is too large for the field
            message.ClearField(field.name)


NAMES = (
    "Add",
    "Reshape",
    "Tile",
    "Expand",
    "Range",
    "Pad",
    "ConstantOfShape",
    "Mul",
    "Gather",
    "MatMul",
    "Loop",
    "x",
    "y",
    "",
)


def other(value: Any, random_: random.Random) -> Any:
    """Another value of the same kind."""
    if isinstance(value, str):
        return random_.choice(NAMES)
    if isinstance(value, bytes):
        return damaged(value, random_) if value else b"?"
    if isinstance(value, float):
        return random_.choice((0.0, -1.0, float("nan"), float("inf"), 1e30))
    number = random_.choice(NUMBERS)
    return max(-(2**31), min(number, 2**31 - 1)) if random_.random() < 0.5 else number


def inputs_of(module: Any) -> list[torch.Tensor]:
    """Inputs of the declared types; dimensions without a size are 2."""
    out = []
    for declared in module._graph.model.inputs:
        tensor = declared.type.tensor_type
        dtype = dtype_of(tensor.elem_type) or torch.float32
        sizes = [d.dim_value if d.WhichOneof("value") == "dim_value" else 2 for d in tensor.shape.dim]
        shape = [max(s, 0) for s in sizes]
        if math.prod(shape) > 1 << 16:
            out.append(torch.empty(shape if math.prod(shape) < 1 << 60 else [1 << 20], dtype=dtype, device="meta"))
            continue
        counted = torch.arange(math.prod(shape)).reshape(shape)
        out.append((counted / 7).to(dtype) if dtype.is_floating_point else counted.to(dtype))
    return out


def verdict(data: bytes) -> str:
    """What becomes of a file: the name of our error, "imported", or "as onnxruntime"; anything else escapes."""
    try:
        module = from_onnx(data, limits=LIMITS).eval()
        inputs = inputs_of(module)
        found = module._graph.specialise(inputs, False)
        room = sum(r.type.bytes for op in found.function.regions[0].block for r in op.results)
        if room > 1 << 22 or any(x.is_meta for x in inputs):
            return "imported"
        results = module(*inputs)
    except OnnxError as error:
        if "internal error" in str(error):
            raise
        return type(error).__name__
    results = results if isinstance(results, tuple) else (results,)
    if find_spec("onnxruntime") is None:
        return "imported"
    try:
        onnx.checker.check_model(data)
        wanted = expected(data, *inputs)
    except Exception:  # somebody else's judgement of a broken file
        return "imported"
    try:
        compare(results, wanted)
    except AssertionError:  # (it is wrong about a Scan whose body hands an input on)
        compare(results, evaluated(onnx.load_model_from_string(data), *inputs))
        return "as onnx.reference"
    return "as onnxruntime"


def compare(results: Any, wanted: list[torch.Tensor]) -> None:
    for mine, theirs in zip(results, wanted, strict=True):
        torch.testing.assert_close(mine.detach(), theirs, rtol=1e-4, atol=1e-5, equal_nan=True)


def main() -> None:
    count, seed = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    found = [verdict(data) for data in seeds()]
    assert all(v in ("as onnxruntime", "imported") for v in found), found
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    random_, files = random.Random(seed), seeds()
    seen: Counter[str] = Counter()
    for index in range(count):
        data = (changed if index % 4 else damaged)(random_.choice(files), random_)
        signal.alarm(SECONDS_PER_FILE)
        try:
            seen[verdict(data)] += 1
        except BaseException:
            print(f"file {index} of seed {seed}: {data!r}", file=sys.stderr)
            raise
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
