"""Our depthwise convolutions against cuDNN, on the layers of EfficientNet-B0 and MobileNetV2: checked, then timed.

Every configuration is compared with cuDNN in f32 before it is timed; times are medians of CUDA graph replays, in turns,
with the L2 cache flushed. `python bench/kernels_depthwise.py --out FILE.md` on a GPU; with `--around` kernels that also
do what stands around a convolution are compared with one kernel after the other. Without a GPU: `--compile` compiles
for sm_90 and counts registers and spills; `TRITON_INTERPRET=1 ... --dry` walks the same path at tiny sizes.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import triton

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.kernel_clock import as_graph, in_turns, publish  # noqa: E402
from wholestep.backends import depthwise as provider  # noqa: E402
from wholestep.backends.choose import empty, on_cpu, on_gpu  # noqa: E402
from wholestep.backends.generated import region_of  # noqa: E402
from wholestep.backends.kernels import Spec  # noqa: E402
from wholestep.backends.made_up import neutral_inputs  # noqa: E402
from wholestep.backends.providers import Region, Triton  # noqa: E402
from wholestep.backends.triton import depthwise  # noqa: E402
from wholestep.backends.triton.depthwise import Config  # noqa: E402
from wholestep.dialects.step import StepBuilder, torch_dtype  # noqa: E402
from wholestep.dialects.strides import row_major  # noqa: E402
from wholestep.ir.builtin import add_function, finish_function, module  # noqa: E402
from wholestep.ir.types import BF16, F32, TensorType  # noqa: E402

BATCH = 256
DTYPE = torch.bfloat16
PARTS = ("forward", "input_grad", "weight_grad")
#: share of the value that rounding to bf16 may change, and share of the largest value that the order of sums may
TOLERANCE = (2**-8, 1e-3)
#: what rounding its terms may change in a sum, as a share of their norm (each is rounded for itself)
SUMMED = 2**-6
ROUNDS = 15

#: kernel, stride of the first block, expansion, channels out, blocks
EFFICIENTNET_B0 = [
    (3, 1, 1, 16, 1), (3, 2, 6, 24, 2), (5, 2, 6, 40, 2), (3, 2, 6, 80, 3), (5, 1, 6, 112, 3), (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
]  # fmt: skip
MOBILENET_V2 = [
    (3, 1, 1, 16, 1), (3, 2, 6, 24, 2), (3, 2, 6, 32, 3), (3, 2, 6, 64, 4), (3, 1, 6, 96, 3), (3, 2, 6, 160, 3),
    (3, 1, 6, 320, 1),
]  # fmt: skip


@dataclass(frozen=True)
class Layer:
    channels: int
    size: int
    k: int
    stride: int
    batch: int = BATCH

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.channels, self.size, self.size

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return (
            self.batch,
            self.channels,
            *depthwise.output_size(self.size, self.size, self.kernel, self.stride, self.pad),
        )

    @property
    def kernel(self) -> tuple[int, int]:
        return self.k, self.k

    @property
    def pad(self) -> int:
        return self.k // 2

    @property
    def name(self) -> str:
        return f"{self.channels} @ {self.size}², {self.k}x{self.k}, stride {self.stride}"


def depthwise_layers(blocks: list[tuple[int, int, int, int, int]]) -> dict[Layer, int]:
    """The depthwise layers of a network at 224², and how often each occurs."""
    found: dict[Layer, int] = {}
    channels, size = 32, 112
    for k, first_stride, expansion, out, repeats in blocks:
        for block in range(repeats):
            stride = first_stride if block == 0 else 1
            layer = Layer(channels * expansion, size, k, stride)
            found[layer] = found.get(layer, 0) + 1
            channels, size = out, size // stride
    return found


NETWORKS = {"EfficientNet-B0": depthwise_layers(EFFICIENTNET_B0), "MobileNetV2": depthwise_layers(MOBILENET_V2)}
LAYERS = list(dict.fromkeys(layer for layers in NETWORKS.values() for layer in layers))


def candidates(part: str, layer: Layer) -> list[Config]:
    return depthwise.configs(part, layer.shape, layer.k, layer.stride, DTYPE)


# ------------------------------------------------------------------------------------------------------------- calls


@dataclass
class Tensors:
    """What one layer reads."""

    layer: Layer
    x: torch.Tensor
    w: torch.Tensor
    dy: torch.Tensor

    @classmethod
    def draw(cls, layer: Layer, device: str) -> Tensors:
        def normal(*shape: int) -> torch.Tensor:
            if device == "meta":
                return torch.empty(shape, dtype=DTYPE, device=device)
            return torch.randn(shape, device=device, generator=g).to(DTYPE)

        g = None if device == "meta" else torch.Generator(device=device).manual_seed(0)
        last = torch.channels_last
        x = normal(*layer.shape).contiguous(memory_format=last)
        dy = normal(*layer.out_shape).contiguous(memory_format=last)
        return cls(layer, x, normal(layer.channels, 1, *layer.kernel), dy)

    def ours(self, part: str, config: Config) -> tuple[Callable[[], None], list[torch.Tensor]]:
        """A call of our kernel, and the tensors it writes its results to."""
        how: dict[str, Any] = dict(stride=self.layer.stride, padding=self.layer.pad, config=config)
        if part == "input_grad":
            dx = torch.empty_like(self.x)
            return lambda: depthwise.input_grad(self.dy, self.w, dx, **how), [dx]
        if part == "weight_grad":
            dw = torch.empty_like(self.w)
            shape = depthwise.partials_shape(self.dy.shape, self.w.shape, config)
            partials = torch.empty(shape, dtype=torch.float32, device=self.x.device)
            return lambda: depthwise.weight_grad(self.x, self.dy, dw, partials, **how), [dw]
        y = torch.empty_like(self.dy)
        return lambda: depthwise.forward(self.x, self.w, y, **how), [y]

    def torchs(self, part: str, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        """The same by PyTorch, which asks cuDNN."""
        x, w, dy = (t.to(dtype) for t in (self.x, self.w, self.dy))
        s, p, c = [self.layer.stride] * 2, [self.layer.pad] * 2, self.layer.channels
        if part == "forward":
            return lambda: torch.ops.aten.convolution(x, w, None, s, p, [1, 1], False, [0, 0], c)
        mask = [part == "input_grad", part == "weight_grad", False]
        backward = torch.ops.aten.convolution_backward
        return lambda: backward(dy, x, w, [0], s, p, [1, 1], False, [0, 0], c, mask)[mask.index(True)]


def wrong(found: torch.Tensor, want: torch.Tensor, noise: torch.Tensor | None = None) -> str:
    """How a result differs from the exact one; "" if only by rounding, and by what the order of sums may change."""
    off = (found - want).abs()
    allowed = TOLERANCE[0] * want.abs() + (TOLERANCE[1] * want.abs().max() if noise is None else noise)
    if os.environ.get("TRITON_INTERPRET") == "1":
        allowed *= 2  # the interpreter cuts bf16 off instead of rounding
    excess = (off - allowed).max().item()
    return "" if excess <= 0 else f"differs by {off.max().item():.3g}, {excess:.3g} more than allowed"


# ---------------------------------------------------------------------------------------------------------- compiling


class Pretend:
    """A driver that only knows the target: kernels are compiled, never run."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def compile_for_sm90(part: str, layer: Layer, config: Config) -> dict[str, Any]:
    """Compiles into Triton's cache, under the key that a launch will look for; seconds, registers, spilled bytes."""
    from triton.compiler import ASTSource

    found: dict[str, Any] = {}

    def instead_of_launching(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        source = ASTSource(fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0])
        options = {name: compile[name] for name in ("num_warps", "num_stages")}
        begin = sum(os.times()[:4])  # of this process and of ptxas, however busy the machine is
        kernel = triton.compile(source, target=Pretend().get_current_target(), options=options)
        if fn.name != "finish_kernel":
            found.update(seconds=sum(os.times()[:4]) - begin, **usage(kernel.asm["cubin"]))
        return True

    triton.runtime.driver.set_active(Pretend())
    triton.knobs.runtime.jit_cache_hook = instead_of_launching
    Tensors.draw(layer, "meta").ours(part, config)[0]()
    return {"part": part, "layer": layer.name, "config": str(config), **found}


def usage(cubin: bytes) -> dict[str, int]:
    """What cuobjdump, which comes with Triton, says about a kernel."""
    tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", text)
    if not found:
        raise RuntimeError(f"cuobjdump says nothing of registers:\n{text}")
    return {"registers": int(found[1]), "spilled": int(found[2]) + int(found[3])}


def compile_all(jobs: int) -> list[dict[str, Any]]:
    work = [(p, layer, c) for layer in LAYERS for p in PARTS for c in candidates(p, layer)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        return list(pool.map(compile_for_sm90, *zip(*work, strict=True), chunksize=4))


def compile_table(rows: list[dict[str, Any]]) -> str:
    spilling = [row for row in rows if row["spilled"]]
    lines = [
        f"{len(rows)} kernels for sm_90, {sum(r['seconds'] for r in rows):.0f} CPU seconds, the slowest "
        f"{max(r['seconds'] for r in rows):.1f} s; {len(spilling)} spill registers.",
        "",
        "| part | layer | configurations | CPU seconds, each | registers | spilled bytes |",
        "|---|---|---|---|---|---|",
    ]
    for part in PARTS:
        for layer in LAYERS:
            own = [r for r in rows if (r["part"], r["layer"]) == (part, layer.name)]
            spread = [f"{min(r[k] for r in own):.{d}f} to {max(r[k] for r in own):.{d}f}"
                      for k, d in (("seconds", 1), ("registers", 0), ("spilled", 0))]  # fmt: skip
            lines.append(f"| {part} | {layer.name} | {len(own)} | {' | '.join(spread)} |")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------- timing


def measure(layer: Layer, device: str, rounds: int) -> dict[str, Any]:
    """Every configuration of every part: checked, then timed beside PyTorch."""
    tensors = Tensors.draw(layer, device)
    calls: dict[tuple[str, Config | str], Callable[[], Any]] = {}
    faults: dict[str, str] = {}
    for part in PARTS:
        want = tensors.torchs(part, torch.float32)()
        for config in candidates(part, layer):
            call, results = tensors.ours(part, config)
            for tensor in results:
                tensor.fill_(float("nan"))
            call()
            fault = wrong(results[0], want)
            if fault:
                faults[f"{part} {config}"] = fault
            else:
                calls[part, config] = as_graph([call])
        del want
        calls[part, "torch"] = as_graph([tensors.torchs(part, DTYPE)])
    times = {name: us / 1000 for name, us in in_turns(calls, rounds).items()}
    found: dict[str, Any] = {"layer": layer.name, "faults": faults}
    for part in PARTS:
        own = {config: ms for (p, config), ms in times.items() if p == part and config != "torch"}
        best = min(own, key=lambda config: own[config]) if own else None
        found[part] = {"torch": times.get((part, "torch")), "best": short(best), "ours": own.get(best)}
        found[part]["first"] = own.get(candidates(part, layer)[0])
        found[part]["configs"] = {short(config): ms for config, ms in own.items()}
    return found


def short(config: Any) -> str:
    if config is None:
        return "none"
    return (
        f"{config.columns}x{config.rows}, vector {config.vector}, images {config.images}"
        f"{', prefetch' if config.prefetch else ''}"
    )


def figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def table(measured: dict[Layer, dict[str, Any]], networks: dict[str, dict[Layer, int]]) -> str:
    lines = ["| layer | " + " | ".join(f"{p}: cuDNN | ours | first guess" for p in PARTS) + " |"]
    lines += ["|---" * (1 + 3 * len(PARTS)) + "|"]
    columns = [(p, kind) for p in PARTS for kind in ("torch", "ours", "first")]
    for layer, found in measured.items():
        lines.append(f"| {layer.name} | " + " | ".join(figure(found[p][kind]) for p, kind in columns) + " |")
    for name, layers in networks.items():
        for title, weight in (("distinct layers", False), ("all layers", True)):
            sums = []
            for p, kind in columns:
                terms = [(measured[layer][p][kind], times if weight else 1) for layer, times in layers.items()]
                sums.append(None if any(ms is None for ms, _ in terms) else sum(ms * times for ms, times in terms))
            lines.append(f"| **{name}, {title}** | " + " | ".join(figure(s) for s in sums) + " |")
    lines += ["", "Winners (columns x rows of one walk):", "", "| layer | " + " | ".join(PARTS) + " |"]
    lines += ["|---" * 4 + "|"]
    for layer, found in measured.items():
        lines.append(f"| {layer.name} | " + " | ".join(found[p]["best"] for p in PARTS) + " |")
    faults = [f"- {f['layer']}: {key}: {why}" for f in measured.values() for key, why in f["faults"].items()]
    lines += ["", f"Configurations with wrong results (not timed): {len(faults)}", *faults]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------ with neighbours

AROUND = {"conv": "forward", "conv_weight_grad": "weight_grad", "conv_input_grad": "input_grad"}
#: of each, so many ways: the best guess, one kernel after the other, the next guess
WAYS = 3


def region(part: str, layer: Layer, alone: bool = False) -> Region:
    """As a network has it: BatchNorm and SiLU before the convolution, the sums of BatchNorm after it; in backward the
    image computed again for the kernel's gradient, and BatchNorm's sums over the gradient of the image."""
    image, weight, c = layer.shape, (layer.channels, 1, *layer.kernel), layer.channels
    how: dict[str, Any] = dict(
        stride=(layer.stride,) * 2, padding=(layer.pad,) * 2, dilation=(1, 1), groups=layer.channels
    )
    wide, channels = (0, 2, 3), TensorType((c,), F32)
    images = [TensorType(image, BF16), TensorType(weight, BF16), TensorType(layer.out_shape, BF16)]
    function = add_function(module(), "region", [*images, channels, channels, channels, channels])
    block = function.regions[0].block
    x, w, dz, *vectors = block.arguments
    b = StepBuilder(block, phase="forward")
    mean, rstd, scale, shift = (b.reshape(v, shape=(c, 1, 1)) for v in vectors)
    normal = b.mul(b.sub(b.cast_to(x, F32), mean), rstd)
    before = b.cast_to(b.add(b.mul(normal, scale), shift), BF16)
    y = x if alone else b.silu(before)
    if part == "conv":
        results = [b.conv(y, w, **how)]
        off = b.sub(b.cast_to(results[0], F32), mean)
        first, second = (b.mean(v, dims=wide) for v in (off, b.mul(off, off)))
        more = [b.add(vectors[0], first), b.rsqrt(b.add(b.maximum(b.sub(second, b.mul(first, first)), 0.0), 1e-5))]
    elif part == "conv_weight_grad":
        results, more = [b.conv_weight_grad(y, dz, weight_shape=weight, **how)], []
    else:
        results = [b.conv_input_grad(dz, w, input_shape=image, **how)]
        grad = b.cast_to(b.silu_grad(results[0], before), F32)
        more = [b.sum(v, dims=wide) for v in (grad, b.mul(grad, normal))]
    finish_function(function, results if alone else results + more)
    for op in reversed([op for op in block if not op.definition.terminator]):
        if not any(r.uses for r in op.results):
            op.erase()
    specs = []
    for argument in block.arguments:
        shape = argument.type.shape
        strides = provider.last(shape) if len(shape) == 4 else row_major(shape)
        specs.append(Spec(shape, strides, torch_dtype(argument.type.element)))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return region_of(function, None, specs, device)


def right(part: str, layer: Layer, inputs: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The results of a region by PyTorch, convolutions in f32 and sums in float64, and how noisy each is."""
    x, w, dz, *vectors = inputs
    mean, rstd, scale, shift = (v.reshape(-1, 1, 1) for v in vectors)
    normal, wide = (x.float() - mean) * rstd, (0, 2, 3)
    before = (normal * scale + shift).to(DTYPE)
    read = [t.float() for t in (torch.nn.functional.silu(before), w, dz)]
    image, squares = (Tensors(layer, *ts).torchs(AROUND[part], torch.float32)() for ts in (read, [t * t for t in read]))
    results = [(image, SUMMED * squares.abs().sqrt())]
    if part == "conv":
        off = image.to(DTYPE).double() - mean
        first, second = off.mean(wide), off.square().mean(wide)
        spread = (second - first.square()).clamp(min=0) + 1e-5
        noise = SUMMED * (second * first.numel() / off.numel()).sqrt()
        results += [(vectors[0] + first, noise), (spread.rsqrt(), 0 * noise)]
    elif part == "conv_input_grad":
        grad = torch.ops.aten.silu_backward(image.to(DTYPE), before).double()
        results += [(v.sum(wide), SUMMED * v.square().sum(wide).sqrt()) for v in (grad, grad * normal)]
    return results


def measure_around(layers: list[Layer]) -> list[dict[str, Any]]:
    """Every way of every part: compared with PyTorch, then timed; and the convolution alone."""
    regions = {(p, layer): region(p, layer) for layer in layers for p in AROUND}
    offered = {key: Triton().offers(r)[:WAYS] for key, r in regions.items()}
    plain = {key: Triton().offers(region(*key, alone=True))[0] for key in regions}
    built = Triton().build([o for key in regions for o in (*offered[key], plain[key])])
    found = []
    for (part, layer), r in regions.items():
        inputs = neutral_inputs(r, False)
        wanted = right(part, layer, inputs)
        row: dict[str, Any] = {"part": part, "layer": layer.name, "faults": {}, "around": {}}
        for offer in offered[part, layer]:
            run = built[offer.key]
            if isinstance(run, Exception):
                row["faults"][offer.name] = str(run)
                continue
            tensors = [empty(s, r.device).fill_(float("nan")) for s in (*r.results, *offer.scratch)]
            run(*inputs, *tensors)
            whys = [wrong(found, *w) for found, w in zip(tensors, wanted, strict=False)]
            if any(whys):
                row["faults"][offer.name] = "; ".join(f"result {i} {why}" for i, why in enumerate(whys) if why)
                continue
            ms = timed(run, [*inputs, *tensors])
            if offer.name == "depthwise apart":
                row["apart"] = ms
            else:
                row["around"][offer.name] = ms
        offer, run = plain[part, layer], built[plain[part, layer].key]
        if not isinstance(run, Exception):
            results = [empty(s, r.device) for s in (*region(part, layer, True).results, *offer.scratch)]
            row["alone"] = timed(run, [*inputs, *results])
        found.append(row)
    return found


def timed(run: Callable[..., Any], tensors: list[torch.Tensor]) -> float:
    """Milliseconds, as kernels are timed when a step is compiled."""

    def call() -> None:
        run(*tensors)

    return 1000 * (on_gpu(call, torch.device("cuda")) if torch.cuda.is_available() else on_cpu(call))


def around_table(rows: list[dict[str, Any]], layers: dict[Layer, int]) -> str:
    lines = ["| part | layer | around | apart | the convolution alone | way |", "|---" * 6 + "|"]
    sums: dict[str, list[float]] = {p: [0.0, 0.0, 0.0] for p in AROUND}
    times = {layer.name: count for layer, count in layers.items()}
    for row in rows:
        best = min(row["around"], key=row["around"].__getitem__, default=None)
        figures = [row["around"].get(best), row.get("apart"), row.get("alone")]
        texts = " | ".join(map(figure, figures))
        lines.append(f"| {row['part']} | {row['layer']} | {texts} | {best} |")
        for i, ms in enumerate(figures):
            sums[row["part"]][i] += times[row["layer"]] * (math.nan if ms is None else ms)
    for part, total in sums.items():
        lines.append(f"| {part} | **all layers** | " + " | ".join(map(figure, total)) + " | |")
    faults = [f"- {r['part']} {r['layer']}: {name}: {why}" for r in rows for name, why in r["faults"].items()]
    return "\n".join([*lines, "", f"Ways that are wrong or were not built: {len(faults)}", *faults])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, help="write the table here, and all figures beside it as .json")
    parser.add_argument("--compile", action="store_true", help="only compile, for sm_90; needs no GPU")
    parser.add_argument("--dry", action="store_true", help="tiny sizes; with TRITON_INTERPRET=1 on any machine")
    parser.add_argument("--around", action="store_true", help="with neighbours, EfficientNet-B0's layers")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile")
    options = parser.parse_args()
    begin = time.perf_counter()
    figures: Any
    if options.around:
        counted = {Layer(8, 6, 3, 1, 2): 1} if options.dry else NETWORKS["EfficientNet-B0"]
        figures = measure_around(list(counted))
        where = torch.cuda.get_device_name() if torch.cuda.is_available() else "A dry run on a CPU: times mean nothing"
        text = f"{where}; milliseconds; everything took {time.perf_counter() - begin:.0f} s.\n\n"
        text += around_table(figures, counted)
    elif options.compile:
        figures = compile_all(options.jobs)
        text = compile_table(figures)
    else:
        networks = NETWORKS
        if options.dry:
            tiny = {Layer(8, 6, 3, 1, 2): 1, Layer(4, 5, 5, 2, 2): 2}
            networks = {"tiny": tiny}
        else:
            compile_all(options.jobs)
        compiled = time.perf_counter() - begin
        cuda = torch.cuda.is_available()
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = False
        layers = dict.fromkeys(layer for layers in networks.values() for layer in layers)
        measured = {}
        for layer in layers:
            measured[layer] = measure(layer, "cuda" if cuda else "cpu", ROUNDS if cuda else 1)
            if cuda:
                torch.cuda.empty_cache()
        where = torch.cuda.get_device_name() if cuda else "A dry run on a CPU: the times mean nothing"
        text = (
            f"{where}; torch {torch.__version__}, Triton {triton.__version__}, batch {next(iter(layers)).batch}, bf16; "
            f"milliseconds, median of {ROUNDS if cuda else 1}, L2 flushed. Compiling took {compiled:.0f} s, everything "
            f"{time.perf_counter() - begin:.0f} s.\n\n{table(measured, networks)}"
        )
        figures = list(measured.values())
    publish(text, figures, options.out)
    wrong_ones = not options.compile and any(found["faults"] for found in figures)
    return 1 if wrong_ones else 0


if __name__ == "__main__":
    sys.exit(main())
