"""Seconds the IR core takes to build, verify, print, clone, CSE and parse 10,000 and 100,000 ops, beside xDSL's.

`python bench/ir.py [--xdsl-large] [--no-xdsl]` writes bench/results/ir.{json,md} and fails when a bar is missed.
CPU seconds (time.process_time), best of `--repeat`. The cyclic collector runs as it would for a user; our own functions
pause it while they work, as wholestep.compile does while it builds. xDSL is measured with the collector off throughout.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from wholestep import ir  # noqa: E402
from wholestep.ir.passes import run_pipeline  # noqa: E402

BARS = {"build": 1.5, "verify": 0.6, "print": 1.5, "clone": 2.0, "parse": 8.0}  # CPU seconds at 100,000 ops
PHASES = ("forward", "backward", "update")
toy = ir.Dialect("toy", "A dialect shaped like the step dialect: pointwise ops, contractions, reductions, views.")


class Pointwise(ir.OpDef):
    """Two tensors of one type in, one out."""

    x = ir.Operand(ir.AnyTensor)
    y = ir.Operand(ir.AnyTensor)
    out = ir.Result(ir.AnyTensor)

    @staticmethod
    def infer(x: Any, y: Any) -> Any:
        if x is not y:
            raise ValueError("types differ")
        return x


@toy.op
class Add(Pointwise):
    """x + y."""

    commutative = True


@toy.op
class Mul(Pointwise):
    """x * y."""

    commutative = True


@toy.op
class Scale(ir.OpDef):
    """x * factor."""

    x = ir.Operand(ir.FloatTensor)
    factor = ir.Attr("float", "what to multiply by")
    out = ir.Result(ir.FloatTensor)

    @staticmethod
    def infer(x: Any, factor: float) -> Any:
        return x


@toy.op
class Contract(ir.OpDef):
    """A matrix product over named dimensions."""

    x = ir.Operand(ir.FloatTensor)
    y = ir.Operand(ir.FloatTensor)
    lhs = ir.Attr("ints", "contracted dimensions of x")
    rhs = ir.Attr("ints", "contracted dimensions of y")
    precision = ir.Attr("str", "how products are summed", choices=("default", "high"))
    out = ir.Result(ir.FloatTensor)

    @staticmethod
    def infer(x: Any, y: Any, lhs: tuple[int, ...], rhs: tuple[int, ...], precision: str) -> Any:
        kept = [d for i, d in enumerate(x.shape) if i not in lhs] + [d for i, d in enumerate(y.shape) if i not in rhs]
        return x.with_shape(tuple(kept))


@toy.op
class Reduce(ir.OpDef):
    """A reduction that keeps its dimensions."""

    x = ir.Operand(ir.FloatTensor)
    dims = ir.Attr("ints", "reduced dimensions")
    kind = ir.Attr("str", "what is computed", choices=("sum", "max", "mean"))
    out = ir.Result(ir.FloatTensor)

    @staticmethod
    def infer(x: Any, dims: tuple[int, ...], kind: str) -> Any:
        return x.with_shape(tuple(1 if i in dims else d for i, d in enumerate(x.shape)))


@toy.op
class Broadcast(ir.OpDef):
    """Repeats along dimensions of size one."""

    x = ir.Operand(ir.FloatTensor)
    shape = ir.Attr("ints", "the new shape")
    out = ir.Result(ir.FloatTensor)

    @staticmethod
    def infer(x: Any, shape: tuple[int, ...]) -> Any:
        return x.with_shape(shape)


def build(count: int) -> ir.Op:
    """A module whose one function has `count` ops: layers of contraction, normalisation and residual diamonds."""
    with ir.collector_paused():
        return _build(count)


def _build(count: int) -> ir.Op:
    width, tokens = 768, 1024
    activation, weight = ir.TensorType((tokens, width), ir.F32), ir.TensorType((width, width), ir.F32)
    root = ir.module()
    function = ir.add_function(root, "step", [activation, weight, weight], ["x", "w0", "w1"])
    block = function.regions[0].block
    x, w0, w1 = block.arguments
    builder = ir.Builder(block)
    for layer in range(count // 10):
        builder.phase = PHASES[layer * 30 // count]
        builder.loc = ir.Location(f"blocks.{layer}", "model.py", 40 + layer % 100)
        h = Contract.build(builder, x, w0 if layer % 2 else w1, lhs=(1,), rhs=(0,), precision="default").result
        mean = Reduce.build(builder, h, dims=(1,), kind="mean").result
        wide = Broadcast.build(builder, mean, shape=(tokens, width)).result
        negative = Scale.build(builder, wide, factor=-1.0).result
        centred = Add.build(builder, h, negative).result
        square = Mul.build(builder, centred, centred).result
        left = Scale.build(builder, square, factor=0.5).result
        right = Scale.build(builder, square, factor=1.0 + layer % 7).result
        diamond = Add.build(builder, left, right).result
        x = Add.build(builder, x, diamond).result
    ir.finish_function(function, [x])
    return root


class Clock:
    """CPU seconds of each action, best of some repeats."""

    def __init__(self, repeat: int):
        self.repeat = repeat
        self.seconds: dict[str, float] = {}

    def time(self, name: str, action: Callable[[], Any], repeat: int | None = None) -> Any:
        best = float("inf")
        for _ in range(repeat or self.repeat):
            gc.collect()
            start = time.process_time()
            result = action()
            best = min(best, time.process_time() - start)
        self.seconds[name] = best
        return result


def measure(count: int, repeat: int) -> dict[str, float]:
    clock = Clock(repeat)
    root = clock.time("build", lambda: build(count))
    clock.time("verify", lambda: ir.verify(root))
    text = clock.time("print", lambda: ir.print_module(root, locations=True))
    copy = clock.time("clone", root.clone)
    clock.time("cse", lambda: run_pipeline(copy, "cse"), 1)
    again = clock.time("parse", lambda: ir.parse(text, ir.Context([toy])))
    if ir.print_module(again, locations=True) != text:
        raise SystemExit("the parsed program prints differently")
    return clock.seconds


def measure_xdsl(count: int, text: str) -> dict[str, float]:
    """The same text in xDSL, its ops unregistered there.

    Unregistered ops have nothing to verify and never merge, so `verify` and `cse` run on what `build` makes instead.
    """
    from xdsl.context import Context
    from xdsl.dialects.builtin import Builtin
    from xdsl.dialects.func import Func
    from xdsl.parser import Parser
    from xdsl.printer import Printer
    from xdsl.transforms.common_subexpression_elimination import CommonSubexpressionElimination

    def fresh() -> Context:
        context = Context(allow_unregistered=True)
        context.load_dialect(Builtin)
        context.load_dialect(Func)
        return context

    clock = Clock(1)
    gc.disable()
    try:
        context = fresh()
        root = clock.time("parse", lambda: Parser(context, text).parse_module())
        clock.time("print", lambda: Printer(stream=StringIO(), print_generic_format=True).print_op(root))
        clock.time("clone", root.clone)
        own = clock.time("build", lambda: build_xdsl(count))
        clock.time("verify", own.verify)
        clock.time("cse", lambda: CommonSubexpressionElimination().apply(context, own))
    finally:
        gc.enable()
    return clock.seconds


def build_xdsl(count: int) -> Any:
    """A chain of as many registered ops, made by xDSL's own constructors."""
    from xdsl.dialects import arith
    from xdsl.dialects.builtin import FloatAttr, ModuleOp, f32

    x: Any = arith.ConstantOp(FloatAttr(1.0, f32))
    ops: list[Any] = [x]
    for _ in range(count):
        x = arith.AddfOp(x, x)
        ops.append(x)
    return ModuleOp(ops)


def machine() -> dict[str, str]:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next((line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line), cpu)
    return {"cpu": cpu, "python": platform.python_version(), "xdsl": version("xdsl"), "wholestep": "0.1.0"}


def table(results: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    ours, theirs = results["wholestep"], results.get("xdsl", {})
    large, small = ours["100000"], ours["10000"]
    big_xdsl = "100000" in theirs
    lines = [
        "| | 10,000 ops, s | 100,000 ops, s | bar, s | µs per op | growth (10 = linear) "
        "| xDSL 10,000, s | xDSL 100,000, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in large:
        bar = f"{BARS[name]}" if name in BARS else "-"
        x_small = f"{theirs['10000'][name]:.2f}" if "10000" in theirs else "-"
        x_large = f"{theirs['100000'][name]:.1f}" if big_xdsl else "-"
        lines.append(
            f"| {name} | {small[name]:.3f} | {large[name]:.2f} | {bar} | {large[name] * 10:.1f} "
            f"| {large[name] / small[name]:.1f} | {x_small} | {x_large} |"
        )
    return lines


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--no-xdsl", action="store_true", help="leave xDSL out")
    options.add_argument("--xdsl-large", action="store_true", help="xDSL at 100,000 ops as well: minutes")
    options.add_argument("--repeat", type=int, default=3)
    options.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    given = options.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {"wholestep": {}}
    for count in (10_000, 100_000):
        results["wholestep"][str(count)] = measure(count, given.repeat)
    if not given.no_xdsl:
        results["xdsl"] = {}
        for count in (10_000, 100_000) if given.xdsl_large else (10_000,):
            text = ir.print_module(build(count))
            results["xdsl"][str(count)] = measure_xdsl(count, text)
    missed = [name for name, bar in BARS.items() if results["wholestep"]["100000"][name] > bar]
    command = "python bench/ir.py" + "".join(f" {a}" for a in sys.argv[1:])
    report = {"command": command, "machine": machine(), "cpu_seconds": results, "bars": BARS, "missed": missed}
    facts = ", ".join(f"{key} {value}" for key, value in report["machine"].items())  # type: ignore[attr-defined]
    text = "\n".join(
        [
            "# Cost of the IR core",
            "",
            f"`{command}` on {facts}. CPU seconds, best of {given.repeat}; printing and parsing include locations.",
            "Ours pauses the cyclic garbage collector while it works; xDSL was measured with it off.",
            "xDSL parses, prints and clones the same program (ops unregistered); it builds, verifies and CSEs a chain",
            "of as many `arith.addf`.",
            "",
            *table(results),
            "",
            f"Missed: {', '.join(missed)}." if missed else "Every bar is met.",
            "",
        ]
    )
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "ir.json").write_text(json.dumps(report, indent=2) + "\n")
    (given.out / "ir.md").write_text(text)
    print(text)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
