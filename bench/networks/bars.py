"""The bars that `wholestep bench --summary` judges: which ratios, over which networks, must be how low."""

from __future__ import annotations

from wholestep.bench.summary import BEST, UNPLANNED, Bar

from . import TWELVE

LARGE = tuple((name, "full") for name in TWELVE)
SMALL = (("gpt2", "few"), ("resnet50", "few"), ("bert_large", "few"))
TRANSFORMERS = tuple((name, "full") for name in ("gpt2", "bert_large", "llama", "vit"))
CONVOLUTIONAL = tuple(
    (name, "full")
    for name in ("resnet50", "wide_resnet50_2", "mobilenet_v2", "efficientnet_b0", "fcn_resnet50", "wavenet")
)
CPU = tuple((name, "cpu") for name in TWELVE)
Cases = tuple[tuple[str, str], ...]


def on_gpu(what: str, figure: str, cases: Cases, over: str, default: float, best: float) -> tuple[Bar, Bar]:
    """A bar against torch.compile as it is, and one against the best of all contenders."""
    return (
        Bar(what, "cuda", figure, cases, over, "compile", default),
        Bar(what, "cuda", figure, cases, over, BEST, best),
    )


BARS: tuple[Bar, ...] = (
    *on_gpu("step time, geometric mean of 12 at large batch", "ms", LARGE, "mean", 0.80, 0.88),
    *on_gpu("step time, worst of 12", "ms", LARGE, "worst", 1.00, 1.00),
    *on_gpu("step time, EfficientNet-B0 @ 256", "ms", (("efficientnet_b0", "full"),), "worst", 0.60, 0.65),
    *on_gpu("step time, ResNet-50 @ 256", "ms", (("resnet50", "full"),), "worst", 0.85, 0.90),
    *on_gpu("step time, GPT-2 124M @ 8x1024", "ms", (("gpt2", "full"),), "worst", 0.85, 0.90),
    *on_gpu("step time, small batch: the worst of 3", "ms", SMALL, "worst", 0.45, 0.85),
    *on_gpu("peak memory, geometric mean of 12", "peak_bytes", LARGE, "mean", 0.80, 0.85),
    *on_gpu("cold compile time, geometric mean of 12", "compile_seconds", LARGE, "mean", 0.60, 0.60),
    Bar("moved / bound, worst transformer", "cuda", "moved / bound", TRANSFORMERS, "worst", "", 1.5),
    Bar("moved / bound, worst convolutional network", "cuda", "moved / bound", CONVOLUTIONAL, "worst", "", 1.8),
    Bar("host time per step in a row, us, the worst", "cuda", "host_us_row", (*LARGE, *SMALL), "worst", "", 100),
    Bar("peak memory off plan, the worst", "cuda", UNPLANNED, (*LARGE, *SMALL), "worst", "", 0.01),
    Bar("step time, geometric mean of 12 small ones", "cpu", "ms", CPU, "mean", "compile", 0.90),
    Bar("step time, geometric mean of 12 small ones", "cpu", "ms", CPU, "mean", "eager", 0.80),
    Bar("step time, worst of 12 small ones", "cpu", "ms", CPU, "worst", BEST, 1.00),
)
