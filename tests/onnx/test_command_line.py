"""`wholestep explain model.onnx`, `wholestep bench model.onnx`, and the batch that is made up for a file."""

from __future__ import annotations

import io
import json

import pytest
import torch

pytest.importorskip("onnx")

from tests.onnx.graphs import model
from wholestep.bench.race import Reference, verdict
from wholestep.bench.worker import serve
from wholestep.bench.workload import cases
from wholestep.cli import main
from wholestep.onnx import OnnxError, example
from wholestep.onnx.replay import Replay

BODY = """agraph (float[batch, seq, 3] x, int64[batch] i) => (float[batch, seq, 4] y) {
    h = Gather(table, i)
    s = Unsqueeze(h, one)
    a = Add(x, s)
    y = MatMul(a, w)
}"""


def proto():
    return model(BODY, table=torch.randn(5, 3), w=torch.randn(3, 4), one=torch.tensor([1]))


def test_a_batch_is_made_from_the_inputs_of_the_graph():
    _, _, (x, i) = example(proto())
    assert x.shape == (2, 16, 3) and i.tolist() and set(i.tolist()) <= {0, 1}
    network, loss_fn, batch = example(proto(), {"batch": 4, "seq": 5})
    assert [tuple(t.shape) for t in batch] == [(4, 5, 3), (4,)]
    torch.testing.assert_close(loss_fn(network, *batch), network(*batch).square().mean())
    with pytest.raises(OnnxError, match="no dimension is called length; the graph has batch, seq"):
        example(proto(), {"length": 4})


def test_explain(tmp_path, capsys):
    path = tmp_path / "m.onnx"
    path.write_bytes(proto().SerializeToString())
    assert main.main(["explain", str(path), "--bind", "batch=3", "--bind", "seq=2"]) == 0
    assert "AdamW updates 2 parameters" in capsys.readouterr().out
    assert main.main(["explain", str(path), "--bind", "batch"]) == 1
    assert "--bind takes NAME=SIZE" in capsys.readouterr().err
    path.write_bytes(b"no model")
    assert main.main(["explain", str(path)]) == 1
    assert "not an ONNX model" in capsys.readouterr().err


NORMALIZED = """agraph (float[batch, 3] x) => (float[batch, 4] y) {
    a = Gemm(x, w)
    b = BatchNormalization <momentum = 0.75> (a, scale, bias, mean, var)
    y = Tanh(b)
}"""


def normalized():
    torch.manual_seed(0)
    return model(
        NORMALIZED, opset=15, w=torch.randn(3, 4), scale=torch.rand(4), bias=torch.randn(4), mean=torch.randn(4),
        var=torch.rand(4) + 1,
    )  # fmt: skip


def test_the_rival_of_a_race_trains_by_autograd_of_torch_alone():
    ours, loss_fn, batch = example(normalized(), {"batch": 5})
    other, _, _ = example(normalized(), {"batch": 5})
    rival = Replay(other, batch)
    for network in (ours, rival):
        loss_fn(network, *batch).backward()
    for (name, p), q in zip(ours.named_parameters(), rival.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)
    torch.testing.assert_close(ours.var, other.var)
    out, seen = rival(*batch), set()
    nodes = [out.grad_fn]
    while nodes:
        node = nodes.pop()
        seen.add(node.name())
        nodes += [n for n, _ in node.next_functions if n is not None]
    assert "TanhBackward0" in seen and not any("onnx_call" in name for name in seen)
    with pytest.raises(OnnxError, match="made for the shapes"):
        rival(batch[0][:2])


def test_bench(tmp_path):
    """What the processes of `wholestep bench model.onnx --bind batch=8` do, here in this one."""
    path = tmp_path / "m.onnx"
    path.write_bytes(normalized().SerializeToString())
    assert [str(case) for case in cases([str(path)], "full")] == [str(path)]
    prepare, timing = {"do": "prepare", "steps": 3}, {"do": "time", "seconds": 0.001}
    found = {}
    for contender in ("wholestep", "eager"):
        begin = {"do": "begin", "contender": contender, "case": [str(path), ""], "precision": "fp32", "device": "cpu"}
        begin |= {"threads": 0, "networks": "", "bind": {"batch": 8}}
        answers = []
        serve(io.StringIO("\n".join(map(json.dumps, [begin, prepare, timing, {"do": "end"}]))), answers.append)
        _, found[contender], timed = answers
        assert timed["seconds"] > 0 and found[contender]["items"] == "batch of 8x3"
    losses = found["eager"]["losses"]
    assert len(set(losses)) == 3
    assert verdict(found["wholestep"]["losses"], Reference(losses, 1e-6))["status"] == "agrees"
