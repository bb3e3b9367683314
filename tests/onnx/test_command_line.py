"""`wholestep explain model.onnx`, and the batch that is made up for a file."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("onnx")

from tests.onnx.graphs import model
from wholestep.cli import main
from wholestep.onnx import OnnxError, example

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
