"""The core of the ONNX importer: what is a parameter, what is folded, functions, branches, loops, files, training."""

from __future__ import annotations

import copy
import io
import json
import warnings

import numpy as np
import pytest
import torch

onnx = pytest.importorskip("onnx")

import wholestep as ws  # noqa: E402
from tests.onnx.graphs import evaluated, expected, model  # noqa: E402
from wholestep.onnx import (  # noqa: E402
    DataDependentError,
    Limits,
    OnnxError,
    OnnxGraphError,
    OnnxLimitError,
    OnnxUnsupportedError,
    from_onnx,
    to_onnx,
)

LINEAR = "agraph (float[batch, 3] x) => (float[batch, 4] y) { y = Gemm <transB = 1> (x, fc__weight, fc__bias) }"


def linear():
    torch.manual_seed(0)
    return model(LINEAR, fc__weight=torch.randn(4, 3), fc__bias=torch.randn(4))


def same(proto, *inputs, **options):
    """Our results are those of another runtime."""
    out = from_onnx(proto, **options).eval()(*inputs)
    out = out if isinstance(out, tuple) else (out,)
    for mine, theirs in zip(out, expected(proto, *inputs), strict=True):
        torch.testing.assert_close(mine.detach(), theirs)


# ---- parameters ------------------------------------------------------------------------------------------------------


def test_parameters_have_the_names_of_the_file():
    module = from_onnx(linear())
    assert [n for n, _ in module.named_parameters()] == ["fc.weight", "fc.bias"]
    assert module.input_names == ["x"] and module.output_names == ["y"]


def test_names_that_no_module_can_have_become_readable_ones():
    body = "agraph (float[2] x) => (float[2] y) { a = Add(x, train) b = Add(a, p) c = Add(b, p__q) y = Add(c, p_2) }"
    proto = model(body, train=torch.ones(2), p=torch.ones(2), p__q=torch.ones(2), p_2=torch.ones(2))
    proto.graph.initializer[0].name = proto.graph.node[0].input[1] = "onnx::Add_7"
    names = [n for n, _ in from_onnx(proto).named_parameters()]
    assert len(names) == len(set(names)) == 4
    assert "onnx.Add_7" in names and "p" in names
    assert from_onnx(proto)(torch.zeros(2)).tolist() == [4, 4]


def test_single_numbers_and_whole_numbers_are_constants():
    body = "agraph (float[2, 3] x) => (float[3, 2] y) { a = Add(x, one) y = Reshape(a, shape) }"
    module = from_onnx(model(body, one=torch.tensor(1.0), shape=torch.tensor([3, 2])))
    assert not list(module.parameters()) and not list(module.buffers())
    chosen = from_onnx(model(body, one=torch.tensor(1.0), shape=torch.tensor([3, 2])), trainable=["one"])
    assert [n for n, _ in chosen.named_parameters()] == ["one"]


def test_tensors_that_an_exporter_has_merged_are_said():
    body = "agraph (float[n, 3] x) => (float[n, 3] y) { a = Add(x, zero) y = Add(a, zero) }"
    with pytest.warns(UserWarning, match="zero: one number everywhere, and taken by several nodes"):
        from_onnx(model(body, zero=torch.zeros(3)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_onnx(model(body, zero=torch.randn(3)))  # a tied weight
        from_onnx(linear())


def test_trainable_overrides_the_rule():
    module = from_onnx(linear(), trainable=["*.bias"])
    assert {n: p.requires_grad for n, p in module.named_parameters()} == {"fc.weight": False, "fc.bias": True}
    module = from_onnx(linear(), trainable=lambda name: "weight" in name)
    assert {n: p.requires_grad for n, p in module.named_parameters()} == {"fc.weight": True, "fc.bias": False}
    with pytest.raises(OnnxError, match=r"'head\.\*', but no initializer is called so; there are fc.weight, fc.bias"):
        from_onnx(linear(), trainable=["head.*"])


# ---- calls -----------------------------------------------------------------------------------------------------------


def test_a_call_is_the_graph_and_shapes_may_change():
    for rows in (1, 5):
        same(linear(), torch.randn(rows, 3))


def test_inputs_are_checked_against_the_graph():
    module = from_onnx(linear())
    with pytest.raises(OnnxError, match="dimension 1 of input x must be 3, not 4"):
        module(torch.zeros(2, 4))
    with pytest.raises(OnnxError, match=r"input x must be torch.float32, not torch.float64"):
        module(torch.zeros(2, 3, dtype=torch.float64))
    with pytest.raises(OnnxError, match="must have 2 dimensions"):
        module(torch.zeros(3))
    with pytest.raises(OnnxError, match="takes 1 inputs"):
        module(torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(OnnxError, match="called without x"):
        module()
    with pytest.raises(OnnxError, match="no input 'z'"):
        module(z=torch.zeros(2, 3))
    with pytest.raises(OnnxError, match="input x must be a tensor, not str"):
        module("text")
    with pytest.raises(OnnxError, match="input x is no array that torch can hold"):
        module(np.array(["text"]))
    assert module(np.zeros((2, 3), np.float32)).shape == (2, 4)
    assert module(x=torch.zeros(2, 3)).shape == (2, 4)


def test_one_symbolic_dimension_has_one_size():
    body = "agraph (float[n] x, float[n] z) => (float[n] y) { y = Add(x, z) }"
    with pytest.raises(OnnxError, match="is 3, but dimension 0 of x is 2, and the graph calls both 'n'"):
        from_onnx(model(body))(torch.zeros(2), torch.zeros(3))


def test_shape_arithmetic_is_folded():
    body = """agraph (float[a, b] x) => (float[c] y) {
        s = Shape(x)
        t = Add(s, s)
        u = Add(t, one)
        v = Shape(u)
        w = Reshape(x, minus)
        y = Add(w, z)
    }"""
    proto = model(body, one=torch.tensor([1]), minus=torch.tensor([-1]), z=torch.tensor([2.0]))
    module = from_onnx(proto)
    assert module(torch.zeros(2, 3)).tolist() == [2.0] * 6
    (found,) = module._graph._made.values()
    assert sorted(op.name for op in found.function.regions[0].block) == [
        "func.return", "step.add", "step.constant", "step.reshape",
    ]  # fmt: skip


def test_an_input_that_decides_about_shapes_can_be_frozen():
    body = "agraph (float[4] x, int64[2] s) => (float[a, b] y) { y = Reshape(x, s) }"
    x = torch.arange(4.0)
    with pytest.raises(DataDependentError, match="its shape depends on the data"):
        from_onnx(model(body))(x, torch.tensor([2, 2]))
    module = from_onnx(model(body), frozen_inputs=True)
    assert module(x, torch.tensor([2, 2])).tolist() == [[0, 1], [2, 3]]
    assert module(x, torch.tensor([4, 1])).shape == (4, 1)


def test_outputs_can_be_chosen():
    body = "agraph (float[2] x) => (float[2] y, float[2] loss) { y = Add(x, x) loss = Add(y, x) }"
    x = torch.ones(2)
    assert [t.tolist() for t in from_onnx(model(body))(x)] == [[2, 2], [3, 3]]
    assert from_onnx(model(body), outputs=["loss"])(x).tolist() == [3, 3]
    with pytest.raises(OnnxError, match="no output 'lost'; it has y, loss"):
        from_onnx(model(body), outputs=["lost"])


def test_outputs_share_no_memory():
    body = "agraph (float[2] x) => (float[2] y, float[2, 1] z) { y = Add(x, c) z = Reshape(x, s) }"
    module = from_onnx(model(body, c=torch.tensor(0.0), s=torch.tensor([2, 1])))
    x = torch.ones(2)
    y, z = module(x)
    z.zero_()
    assert x.tolist() == [1, 1] and y.tolist() == [1, 1]


def test_opsets_from_seven_to_the_newest():
    """The same network in each of them; the forms of its operators change on the way (axes, ratios, statistics)."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, 4)
    tensors = {"conv__weight": torch.randn(5, 3, 3, 3), "fc__weight": torch.randn(6, 20), "fc__bias": torch.randn(6)}
    tensors |= {f"bn__{n}": torch.rand(5) + 0.5 for n in ("weight", "bias", "mean", "var")}
    compared = []
    for opset in range(7, onnx.defs.onnx_opset_version() + 1):
        listed = opset >= 13
        axes = "(s, axes)" if listed else "<axes = [2, 3]> (s)"
        body = f"""agraph (float[n, 3, 4, 4] x) => (float[n, 6] y) {{
            c = Conv <kernel_shape = [3, 3]> (x, conv__weight)
            b = BatchNormalization (c, bn__weight, bn__bias, bn__mean, bn__var)
            r = Relu (b)
            d = Dropout (r)
            p = MaxPool <kernel_shape = [1, 1], strides = [1, 1]> (d)
            f = Flatten (p)
            g = Gemm <transB = 1> (f, fc__weight, fc__bias)
            u = Unsqueeze {"(g, axes)" if listed else "<axes = [2, 3]> (g)"}
            s = Softmax <axis = 1> (u)
            y = Squeeze {axes}
        }}"""
        proto = model(body, opset=opset, **tensors, **({"axes": torch.tensor([2, 3])} if listed else {}))
        ours = from_onnx(proto).eval()(x).detach()
        compared.append(ours)
        judge = expected if opset < 14 else evaluated  # neither of them knows all
        torch.testing.assert_close(ours, judge(proto, x)[0])
    for other in compared[1:]:
        torch.testing.assert_close(compared[0], other)


def test_quantise_and_dequantise():
    body = """agraph (float[n, 4] x) => (float[n, 4] y) {
        q = QuantizeLinear(x, scale, zero)
        d = DequantizeLinear(q, scale, zero)
        w = DequantizeLinear <axis = 1> (weight, scales)
        y = MatMul(d, w)
    }"""
    torch.manual_seed(0)
    proto = model(
        body, opset=19, scale=torch.tensor(0.05), zero=torch.tensor(3, dtype=torch.int8), scales=torch.rand(4),
        weight=torch.randint(-128, 127, (4, 4), dtype=torch.int8),
    )  # fmt: skip
    x = 4 * torch.randn(5, 4)  # some are out of range
    torch.testing.assert_close(from_onnx(proto)(x), evaluated(proto, x)[0])  # (onnxruntime's fused product saturates)


# ---- functions, branches, loops --------------------------------------------------------------------------------------


def test_a_cast_of_the_file_rounds_inside_of_kernels_too():
    there_and_back = model("g (float[N,4] x) => (float[N,4] y) { h = Cast<to=10>(x) y = Cast<to=1>(h) }", 19)
    function = ws.from_onnx(there_and_back)._graph.specialise([torch.randn(2, 4)], True).function
    assert [op.rounds for op in function.regions[0].block if op.name == "step.cast"] == [True, True]


def test_functions_of_the_file_are_inlined_with_their_attributes():
    body = """agraph (float[2, 3] x) => (float[2, 4] y) { y = local.Affine <scale = 2.0> (x, w) }
    <domain: "local", opset_import: ["" : 18]>
    Affine <scale> (a, b) => (c) { d = Gemm <alpha : float = @scale> (a, b) c = local.Twice(d) }
    <domain: "local", opset_import: ["" : 18]>
    Twice (a) => (c) { c = Add(a, a) }"""
    torch.manual_seed(0)
    proto = model(body, w=torch.randn(3, 4))
    for function in proto.functions:
        function.opset_import.append(onnx.helper.make_opsetid("local", 1))
    module = from_onnx(proto)
    x = torch.randn(2, 3)
    torch.testing.assert_close(module(x), 4 * x @ module.w)


def test_a_function_that_calls_itself_is_refused():
    body = """agraph (float[2] x) => (float[2] y) { y = local.F(x) }
    <domain: "local", opset_import: ["" : 18, "local" : 1]>
    F (a) => (c) { c = local.F(a) }"""
    with pytest.raises(OnnxGraphError, match="the function F calls itself"):
        from_onnx(model(body))(torch.zeros(2))


def test_if_with_a_known_condition():
    body = """agraph (float[n] x) => (float[n] y) {
        y = If (yes) <then_branch = a () => (float[n] p) { p = Add(x, one) },
                      else_branch = b () => (float[n] q) { q = local.Nothing(x) }>
    }"""
    proto = model(body, yes=torch.tensor(True), one=torch.tensor(1.0))
    assert from_onnx(proto)(torch.ones(3)).tolist() == [2, 2, 2]  # what is not taken is not looked at


def test_if_that_depends_on_the_data_is_refused():
    body = """agraph (float[n] x, bool c) => (float[n] y) {
        y = If (c) <then_branch = a () => (float[n] p) { p = Add(x, x) }, else_branch = b () => (float[n] q) { q = Add(x, x) }>
    }"""  # noqa: E501
    with pytest.raises(DataDependentError, match="its condition depends on the data"):
        from_onnx(model(body))(torch.ones(2), torch.tensor(True))


LOOP = """agraph (float[2] x) => (float[2] y, float[k, 2] all) {
    y, all = Loop (trips, yes, x) <body = b (int64 i, bool c, float[2] s) => (bool d, float[2] t, float[2] u) {
        d = And(c, c)
        t = Add(s, x)
        u = Add(t, t)
    }>
}"""


def test_loop_with_a_known_number_of_rounds_is_unrolled():
    proto = model(LOOP.replace("And(c, c)", "Identity(c)"), trips=torch.tensor(3), yes=torch.tensor(True))
    same(proto, torch.tensor([1.0, 2.0]))


def test_loop_of_a_billion_rounds_is_refused_at_once():
    proto = model(LOOP, trips=torch.tensor(10**9), yes=torch.tensor(True))
    with pytest.raises(OnnxLimitError, match="1000000000 rounds, and loops are unrolled: at most 2000"):
        from_onnx(proto)(torch.zeros(2))
    proto = model(LOOP.replace("And(c, c)", "Identity(c)"), trips=torch.tensor(3), yes=torch.tensor(True))
    with pytest.raises(OnnxLimitError, match="at most 2 are"):
        from_onnx(proto, limits=Limits(rounds=2))(torch.zeros(2))


def test_scan_runs_along_an_axis():
    body = """agraph (float[2] x, float[5, 2] xs) => (float[2] y, float[5, 2] all) {
        y, all = Scan <num_scan_inputs = 1, body = b (float[2] s, float[2] v) => (float[2] t, float[2] u) {
            t = Add(s, v)
            u = Add(t, t)
        }> (x, xs)
    }"""
    same(model(body), torch.ones(2), torch.randn(5, 2))


# ---- training --------------------------------------------------------------------------------------------------------


class Twin(torch.nn.Module):
    """The linear layer of LINEAR."""

    def __init__(self, module):
        super().__init__()
        self.fc = torch.nn.Linear(3, 4)
        self.load_state_dict({n: p.detach().clone() for n, p in module.named_parameters()})

    def forward(self, x):
        return self.fc(x)


def squares(model, x, target):
    return (model(x) - target).square().mean()


def test_eager_gradients_are_those_of_torch():
    module = from_onnx(linear())
    twin = Twin(module)
    x, target = torch.randn(5, 3, requires_grad=True), torch.randn(5, 4)
    squares(module, x, target).backward()
    mine, x.grad = x.grad, None
    squares(twin, x, target).backward()
    torch.testing.assert_close(mine, x.grad)
    for p, q in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("level", [0, 3])
def test_compiled_training_is_that_of_torch(level):
    module = from_onnx(linear())
    twin = Twin(module)
    mine, theirs = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (module, twin))
    x, target = torch.randn(5, 3), torch.randn(5, 4)
    step = ws.compile(module, squares, mine, (x, target), level=level)
    for _ in range(3):
        loss = step(x, target)
        theirs.zero_grad()
        wanted = squares(twin, x, target)
        wanted.backward()
        theirs.step()
        torch.testing.assert_close(loss.detach(), wanted.detach())
    for p, q in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


NORMALIZED = """agraph (float[n, 2, 4] x) => (float[n, 3, 4] y) {
    c = Conv <pads = [1, 1]> (x, conv__weight)
    y = BatchNormalization <momentum = 0.75> (c, bn__weight, bn__bias, bn__mean, bn__var)
}"""


def normalized():
    torch.manual_seed(0)
    return model(
        NORMALIZED, opset=15, conv__weight=torch.randn(3, 2, 3), bn__weight=torch.rand(3), bn__bias=torch.randn(3),
        bn__mean=torch.randn(3), bn__var=torch.rand(3) + 1,
    )  # fmt: skip


@pytest.mark.parametrize("compiled", [False, True])
def test_a_graph_exported_for_inference_trains_with_batch_statistics(compiled):
    module = from_onnx(normalized())
    assert [n for n, _ in module.named_buffers()] == ["bn.mean", "bn.var"]
    mean, var, x = module.bn.mean.clone(), module.bn.var.clone(), torch.randn(5, 2, 4)
    with torch.no_grad():
        inner = torch.nn.functional.conv1d(x, module.conv.weight, padding=1)
    batch = inner.mean((0, 2)), inner.var((0, 2), unbiased=False)
    wanted = torch.nn.functional.batch_norm(inner, None, None, module.bn.weight, module.bn.bias, training=True)
    if compiled:
        optimizer = torch.optim.SGD(module.parameters(), 0.0)
        step = ws.compile(module, lambda m, x: (m(x) - 1).square().mean(), optimizer, (x,), level=0)
        torch.testing.assert_close(step(x).detach(), (wanted - 1).square().mean().detach())
    else:
        out = module(x)
        torch.testing.assert_close(out, wanted)
        out.square().sum().backward()
        mine, module.bn.weight.grad = module.bn.weight.grad, None
        wanted.square().sum().backward()
        torch.testing.assert_close(mine, module.bn.weight.grad)
    torch.testing.assert_close(module.bn.mean, 0.75 * mean + 0.25 * batch[0])
    torch.testing.assert_close(module.bn.var, 0.75 * var + 0.25 * batch[1])


def test_evaluation_is_what_the_file_says(tmp_path):
    x = torch.randn(5, 2, 4)
    same(normalized(), x)
    module = from_onnx(normalized())
    module(x)
    to_onnx(module, tmp_path / "new.onnx")
    (out,) = expected(onnx.load(tmp_path / "new.onnx"), x)
    torch.testing.assert_close(module.eval()(x).detach(), out)


def test_merged_statistics_are_refused_in_training_alone():
    proto = normalized()
    proto.graph.node[1].input[3] = "bn.bias"  # as exporters do that keep one of two equal tensors
    module = from_onnx(proto)
    module.eval()(torch.randn(5, 2, 4))
    with pytest.raises(OnnxUnsupportedError, match="the exporter has merged tensors that were equal"):
        module.train()(torch.randn(5, 2, 4))


def test_dropout_drops_while_training():
    body = "agraph (float[n] x) => (float[n] y) { y = Dropout(x, ratio) }"
    module = from_onnx(model(body, ratio=torch.tensor(0.25)))
    x = torch.ones(1000, requires_grad=True)
    assert torch.equal(module.eval()(x), x)
    torch.manual_seed(1)
    first = module.train()(x)
    assert {round(v, 4) for v in first.tolist()} == {0.0, 1.3333} and 200 < int((first == 0).sum()) < 300
    first.sum().backward()
    assert torch.equal(x.grad, first.detach())  # backward has the same mask
    assert not torch.equal(module(x), first)
    torch.manual_seed(1)
    assert torch.equal(module(x), first)


LOSSES = {
    "SoftmaxCrossEntropyLoss": "loss, z = SoftmaxCrossEntropyLoss <ignore_index = 2> (y, t)",
    "NegativeLogLikelihoodLoss": "z = LogSoftmax(y) loss = NegativeLogLikelihoodLoss <ignore_index = 2> (z, t)",
}


@pytest.mark.parametrize("operator", LOSSES)
def test_a_loss_inside_the_graph(operator):
    body = f"""agraph (float[n, 3] x, int64[n] t) => (float loss, float[n, 4] z) {{
        y = Gemm <transB = 1> (x, fc__weight, fc__bias)
        {LOSSES[operator]}
    }}"""
    torch.manual_seed(0)
    proto = model(body, fc__weight=torch.randn(4, 3), fc__bias=torch.randn(4))
    module = from_onnx(proto, outputs=["loss"])
    twin = Twin(module)
    x, target = torch.randn(5, 3), torch.tensor([0, 1, 2, 3, 0])
    mine, theirs = (torch.optim.SGD(m.parameters(), 0.1) for m in (module, twin))
    step = ws.compile(module, None, mine, (x, target), level=0)
    for _ in range(3):
        wanted = torch.nn.functional.cross_entropy(twin(x), target, ignore_index=2)
        torch.testing.assert_close(step(x, target).detach(), wanted.detach())
        theirs.zero_grad()
        wanted.backward()
        theirs.step()


def test_a_compiled_step_takes_another_batch_size():
    module = from_onnx(linear())
    twin = Twin(module)
    mine, theirs = (torch.optim.SGD(m.parameters(), 0.1) for m in (module, twin))
    step = ws.compile(module, squares, mine, (torch.ones(2, 3), torch.ones(2, 4)), level=0, shapes="bucket")
    for rows in (2, 5, 2):
        x, target = torch.randn(rows, 3), torch.randn(rows, 4)
        theirs.zero_grad()
        wanted = squares(twin, x, target)
        wanted.backward()
        theirs.step()
        torch.testing.assert_close(step(x, target).detach(), wanted.detach())
    assert torch.allclose(module.fc.weight, twin.fc.weight)


def test_a_memory_budget_holds_for_a_graph_of_a_file():
    layers = "".join(f"m{i} = MatMul(h{i}, w{i})\ns{i} = Sigmoid(m{i})\nh{i + 1} = Mul(m{i}, s{i})\n" for i in range(6))
    body = f"agraph (float[n, 16] h0) => (float[n, 16] h6) {{ {layers} }}"
    torch.manual_seed(0)
    proto = model(body, **{f"w{i}": torch.randn(16, 16) / 4 for i in range(6)})
    x, losses, reports = torch.randn(256, 16), [], []
    for options in ({}, {"memory_budget": 0.8}):
        module = from_onnx(proto)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        step = ws.compile(module, lambda m, x: (m(x) - x).square().mean(), optimizer, (x,), **options)
        losses.append([step(x).item() for _ in range(3)])
        reports.append(json.loads(step.report(format="json"))["execution"]["peak"])
    torch.testing.assert_close(losses[0], losses[1])
    assert reports[1] <= 0.8 * reports[0]


def test_the_graph_is_imported_as_step_ops_of_its_nodes():
    module = from_onnx(linear())
    module._graph.model.proto.graph.node[0].name = "/fc/Gemm"
    step = ws.compile(module, squares, torch.optim.SGD(module.parameters(), 0.1), (torch.ones(2, 3), torch.ones(2, 4)))
    step(torch.ones(2, 3), torch.ones(2, 4))
    text = str(step.report())
    assert "onnx_call" not in text
    assert "fc.Gemm" in text


def test_copies_share_the_graph_and_have_their_own_parameters():
    module = from_onnx(linear())
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.fc.weight.zero_()
        other.fc.bias.zero_()
    assert not other(torch.ones(1, 3)).any() and module(torch.ones(1, 3)).any()


def test_a_module_can_be_pickled():
    module = from_onnx(linear())
    x = torch.randn(2, 3)
    out = module(x)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), out)


# ---- back to a file --------------------------------------------------------------------------------------------------


def test_trained_weights_go_back_into_the_graph(tmp_path):
    module = from_onnx(linear())
    x, target = torch.randn(5, 3), torch.randn(5, 4)
    step = ws.compile(module, squares, torch.optim.SGD(module.parameters(), 0.1), (x, target), level=0)
    step(x, target)
    path = tmp_path / "trained.onnx"
    to_onnx(step, path)
    onnx.checker.check_model(str(path))
    assert [p.name for p in tmp_path.iterdir()] == ["trained.onnx"]
    (out,) = expected(onnx.load(path), x)
    torch.testing.assert_close(out, module.eval()(x).detach())
    assert not torch.allclose(out, from_onnx(linear())(x).detach())


def test_large_weights_go_to_a_file_beside_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr("wholestep.onnx.api.MAX_INLINE", 10)
    proto = model("agraph (float[n, 400] x) => (float[n, 400] y) { y = Add(x, w) }", w=torch.randn(400))
    module = from_onnx(proto)
    to_onnx(module, tmp_path / "large.onnx")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["large.onnx", "large.onnx.data"]
    assert torch.equal(from_onnx(tmp_path / "large.onnx").w, module.w)
    with pytest.raises(OnnxError, match="which is there already"):
        to_onnx(module, tmp_path / "large.onnx")


def test_only_imported_models_are_written():
    with pytest.raises(OnnxError, match=r"torch.onnx.export for a torch module"):
        to_onnx(torch.nn.Linear(1, 1), "never.onnx")


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_an_unknown_operator_is_named_with_the_nearest_one():
    body = "agraph (float[2] x) => (float[2] y) { [the_node] y = Reshap(x, x) }"
    proto = model(body.replace("[the_node] ", ""))
    proto.graph.node[0].name = "the_node"
    with pytest.raises(OnnxUnsupportedError, match=r"Reshap node 'the_node'.*nearest supported one is Reshape"):
        from_onnx(proto)(torch.zeros(2))


@pytest.mark.parametrize("domain", ["ai.onnx.ml", "ai.onnx.preview.training"])
def test_other_domains_are_named(domain):
    proto = model("agraph (float[2] x) => (float[2] y) { y = Add(x, x) }")
    proto.graph.node[0].domain = domain
    with pytest.raises(OnnxUnsupportedError, match=f"the domain {domain} is not supported"):
        from_onnx(proto)(torch.zeros(2))


def test_nodes_are_checked_against_their_schema():
    def refused(body, message, **tensors):
        with pytest.raises(OnnxGraphError, match=message):
            from_onnx(model(body, **tensors))(torch.zeros(2, 2))

    head = "agraph (float[2, 2] x) => (float[2, 2] y) "
    refused(head + "{ y = Add(x) }", "it has 1 inputs, not 2 to 2")
    refused(head + "{ y = Gemm <beta = 1> (x, x) }", "attribute 'beta' is not of the kind FLOAT")
    refused(head + "{ y = Gemm <gamma = 1> (x, x) }", "attribute 'gamma', which version 13 does not know")
    refused(head + "{ y = Add(x, i) }", "different types, FLOAT and INT64", i=torch.tensor([1, 2]))
    refused(head + "{ y = Reshape(x, f) }", "its input shape is tensor\\(float\\)", f=torch.tensor([1.0]))
    refused(head + "{ y = Add(x, w) }", "do not broadcast", w=torch.ones(3))
    refused(head + "{ y = Reshape(x, s) }", r"cannot be reshaped", s=torch.tensor([3, -1]))
    refused(head + "{ y = Reshape(x, s) }", "the number of elements changes", s=torch.tensor([3]))
    refused(head + "{ y, z = Add(x, x) }", "it has 1 outputs, but 2 are named")
    refused(head + "{ y = Cast(x) }", "attribute 'to' is missing")
