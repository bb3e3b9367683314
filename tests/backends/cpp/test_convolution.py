"""Convolutions of the C++ provider against PyTorch's, in every part; which ones it takes, and which not."""

from __future__ import annotations

import pytest
import torch

from wholestep.backends import cpp
from wholestep.backends.cpp import convolution
from wholestep.backends.kernels import Spec
from wholestep.backends.made_up import neutral_inputs
from wholestep.backends.providers import Region, op_by_op
from wholestep.dialects.step import StepBuilder
from wholestep.dialects.strides import row_major
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.types import BF16

from .kernels import tensor

pytestmark = pytest.mark.skipif(bool(cpp.missing()), reason=cpp.missing())

#: image, kernel, stride, padding
DENSE = {
    "one pixel": ((3, 5, 4, 3), (7, 5, 1, 1), 1, 0),
    "one pixel, strided": ((2, 4, 7, 6), (3, 4, 1, 1), 2, 0),
    "windows": ((2, 3, 6, 7), (5, 3, 3, 3), 1, 1),
    "strided": ((2, 4, 9, 8), (6, 4, 3, 5), 2, 1),
    "more zeros than taps": ((2, 3, 3, 4), (4, 3, 2, 3), 2, 3),
    "no zeros": ((2, 3, 7, 5), (4, 3, 5, 4), 1, 0),
    "dilated": ((2, 3, 9, 8), (4, 3, 3, 2), 1, 1, 3),
    "dilated, strided": ((2, 3, 11, 10), (4, 3, 2, 3), 2, 2, 3),
    "a sequence": ((3, 5, 17), (6, 5, 3), 1, 1),
    "a sequence, one pixel": ((3, 5, 17), (6, 5, 1), 1, 0),
    "a sequence, dilated": ((3, 5, 17), (6, 5, 2), 1, 0, 4),
    "a sequence, strided": ((3, 5, 17), (6, 5, 4), 3, 2),
}
#: channels of blocks of 32, 16, 8 and 1
DEPTHWISE = {
    "few": ((3, 3, 6, 5), (3, 1, 3, 3), 1, 1),
    "every block": ((2, 61, 7, 6), (61, 1, 3, 5), 1, 2),
    "without one of 8": ((2, 50, 5, 4), (50, 1, 3, 3), 2, 1),
    "without one of 16": ((9, 41, 4, 5), (41, 1, 5, 5), 2, 2),
    "larger than the image": ((2, 40, 2, 2), (40, 1, 5, 5), 1, 2),
    "more zeros than taps": ((2, 8, 3, 4), (8, 1, 2, 3), 1, 4),
    "no zeros": ((2, 8, 9, 8), (8, 1, 3, 3), 2, 0),
    "a sequence": ((2, 43, 19), (43, 1, 5), 1, 2),
}
CASES = {**{f"dense {k}": v for k, v in DENSE.items()}, **{f"depthwise {k}": v for k, v in DEPTHWISE.items()}}


def region(part, image, weight, stride, padding, dilation=1, bias=False, e=None, lies=convolution.channels_last):
    """A convolution, or a gradient of one, as a region by itself."""
    kind = {} if e is None else {"e": e}
    sizes = [
        (n + 2 * padding - dilation * (k - 1) - 1) // stride + 1 for n, k in zip(image[2:], weight[2:], strict=True)
    ]
    output = (image[0], weight[0], *sizes)
    window = {"stride": stride, "padding": padding, "dilation": dilation}
    window = {name: (size,) * len(sizes) for name, size in window.items()}
    window["groups"] = image[1] // weight[1]
    shapes = {"forward": (image, weight), "input_grad": (output, weight), "weight_grad": (image, output)}[part]
    shapes += ((weight[0],),) if bias else ()
    function = add_function(module(), "k", [tensor(*s, **kind) for s in shapes])
    block = function.regions[0].block
    b = StepBuilder(block)
    if part == "forward":
        made = b.conv(*block.arguments, **window)
    elif part == "input_grad":
        made = b.conv_input_grad(*block.arguments, input_shape=image, **window)
    else:
        made = b.conv_weight_grad(*block.arguments, weight_shape=weight, **window)
    finish_function(function, [made])
    specs = [Spec(tuple(s), lies(s) if len(s) > 1 else row_major(s), torch.float32) for s in (*shapes, made.type.shape)]
    return Region(function, None, tuple(specs[:-1]), tuple(specs[-1:]), torch.device("cpu"))


def check(it):
    assert convolution.takes(convolution.anchor(it))
    assert convolution.why_not(it) == ""
    offers = convolution.offers(it)
    assert len({o.key for o in offers}) == len(offers) == (1 if convolution.problem_of(it.ops[-1]).depthwise else 2)
    built = convolution.build(offers)
    inputs = neutral_inputs(it, positive=False)
    before = [x.clone() for x in inputs]
    (expected,) = op_by_op(it)(*inputs)
    for offer in offers:
        out = torch.empty_strided(it.results[0].shape, it.results[0].strides).fill_(7)
        scratch = [torch.full(s.shape, float("nan")) for s in offer.scratch]
        built[offer.key](*inputs, out, *scratch)
        torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5, msg=lambda m, o=offer: f"{o.name}: {m}")
        assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


@pytest.mark.parametrize("part", convolution.PARTS.values())
@pytest.mark.parametrize("name", CASES)
def test_is_as_by_pytorch(name, part):
    check(region(part, *CASES[name]))


@pytest.mark.parametrize("name", ["one pixel", "strided", "a sequence, dilated"])
def test_bias(name):
    check(region("forward", *DENSE[name], bias=True))


def test_chunks_do_not_depend_on_threads():
    it = region("weight_grad", *DEPTHWISE["without one of 16"])
    (offer,) = convolution.offers(it)
    assert offer.made.chunks == 9
    run = convolution.build([offer])[offer.key]
    inputs, found = neutral_inputs(it, positive=False), []
    threads = torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        out = torch.empty_strided(it.results[0].shape, it.results[0].strides)
        run(*inputs, out, *(torch.empty(s.shape) for s in offer.scratch))
        found.append(out)
    torch.set_num_threads(threads)
    assert torch.equal(*found)


def test_what_is_not_taken():
    def takes(*args, **more):
        return convolution.takes(convolution.anchor(region("forward", *args, **more)))

    assert not takes((2, 4, 5, 5), (6, 2, 3, 3), 1, 1), "groups of several channels"
    assert not takes((2, 4, 5, 5), (8, 1, 3, 3), 1, 1), "several outputs per channel"
    assert not takes((2, 4, 9, 9), (4, 1, 8, 8), 1, 1), "more taps than there is room for"
    assert not takes((2, 4, 5, 5), (4, 1, 3, 3), 1, 1, bias=True)
    assert not takes((2, 4, 5, 5), (6, 4, 3, 3), 1, 1, e=BF16)
    assert not takes((2, 4, 7, 7), (4, 1, 3, 3), 1, 1, dilation=2), "a dilated depthwise one"
    assert not takes((2, 4, 5, 5, 5), (6, 4, 3, 3, 3), 1, 1), "volumes"
    assert not takes((64, 64, 56, 56), (64, 64, 3, 3), 1, 1), "its windows would take 462 MB"
    it = region("forward", (2, 4, 5, 5), (6, 4, 3, 3), 1, 1, lies=row_major)
    assert convolution.why_not(it) == "a convolution whose operand is not channels-last"


def of_views(weights, make):
    """A convolution whose kernel is seen in a larger tensor, or otherwise than that is."""
    image, output = (2, 4, 5, 5), (2, 6, 5, 5)
    function = add_function(module(), "k", [tensor(*image), tensor(*weights)])
    block = function.regions[0].block
    x, w = block.arguments
    b = StepBuilder(block)
    finish_function(function, [b.conv(x, make(b, w), stride=(1, 1), padding=(0, 0), dilation=(1, 1))])
    specs = [
        Spec(image, convolution.channels_last(image), torch.float32),
        Spec(weights, row_major(weights), torch.float32),
    ]
    result = Spec(output, convolution.channels_last(output), torch.float32)
    return Region(function, None, tuple(specs), (result,), torch.device("cpu"))


def test_views_of_whole_tensors():
    """Such as kernels that a norm has made, row by row; parts begin elsewhere, and turned ones do not lie so."""
    check(of_views((1, 6, 4), lambda b, w: b.reshape(w, shape=(6, 4, 1, 1))))
    check(of_views((6, 4), lambda b, w: b.layout(b.reshape(w, shape=(6, 4, 1, 1)), order=(0, 2, 3, 1))))
    part = of_views((9, 4), lambda b, w: b.reshape(b.slice(w, dim=0, start=3, end=9), shape=(6, 4, 1, 1)))
    assert convolution.why_not(part) == "a convolution of a part of a tensor, or of what is no view"
    turned = of_views((4, 6), lambda b, w: b.reshape(b.transpose(w, order=(1, 0)), shape=(6, 4, 1, 1)))
    assert convolution.why_not(turned) == "a convolution whose operand is not channels-last"
