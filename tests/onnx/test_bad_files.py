"""Files that are damaged, hostile or wrong: each is refused with a clear error, before it costs memory or time."""

from __future__ import annotations

import os

import pytest
import torch

onnx = pytest.importorskip("onnx")

from tests.onnx.graphs import model  # noqa: E402
from wholestep.onnx import (  # noqa: E402
    Limits,
    OnnxFileError,
    OnnxGraphError,
    OnnxLimitError,
    OnnxUnsupportedError,
    from_onnx,
    to_onnx,
)

ADD = "agraph (float[n, 3] x) => (float[n, 3] y) { y = Add(x, w) }"


def added(**tensors):
    return model(ADD, **(tensors or {"w": torch.arange(3.0)}))


def refused(source, message, error=OnnxFileError, **options):
    with pytest.raises(error, match=message):
        from_onnx(source, **options)(torch.zeros(2, 3))


# ---- the file --------------------------------------------------------------------------------------------------------


def test_a_truncated_file(tmp_path):
    proto = added()
    del proto.opset_import[1]  # a file without its last entry is a whole one
    whole = proto.SerializeToString()
    path = tmp_path / "cut.onnx"
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises((OnnxFileError, OnnxGraphError)):
            from_onnx(path)(torch.zeros(2, 3))


def test_what_is_no_model():
    refused(b"", "there is no graph in it")
    refused(b"hello, world, this is text", "not an ONNX model")
    refused(b"\x80\x04\x95 a pickle", "not an ONNX model")
    refused("nowhere.onnx", "is not a file")
    refused(7, "takes a path, bytes or a ModelProto, not a int")


def test_versions():
    proto = added()
    proto.ir_version = 99
    refused(proto, "has version 99 of the ONNX format; versions 3 to")
    newest = onnx.defs.onnx_opset_version()
    for opset in (0, -1):
        proto = added()
        proto.opset_import[0].version = opset
        refused(proto, f"the operator set ai.onnx has no version {opset}", OnnxGraphError)
    for opset in (newest + 1, 999):
        proto = added()
        proto.opset_import[0].version = opset
        refused(proto, f"the model uses opset {opset}; opsets 1 to {newest} can be read", OnnxUnsupportedError)
    proto = added()
    del proto.opset_import[:]
    refused(proto, "names no opset")


def test_graphs_that_are_none():
    proto = added()
    proto.graph.node[0].input[1] = "y"
    refused(proto, "no input, initializer or earlier node gives it; the graph has a cycle", OnnxGraphError)
    proto = added()
    proto.graph.node.append(proto.graph.node[0])
    refused(proto, "the name 'y' is given twice", OnnxGraphError)
    proto = added()
    proto.graph.initializer.append(proto.graph.initializer[0])
    refused(proto, "two have the name 'w'", OnnxGraphError)
    proto = added()
    del proto.graph.output[:]
    refused(proto, "no outputs", OnnxGraphError)
    proto = added()
    proto.graph.output[0].name = "z"
    refused(proto, "'z' is used, but no input", OnnxGraphError)


# ---- tensors ---------------------------------------------------------------------------------------------------------


def test_a_tensor_of_three_gigabytes_in_a_small_file():
    proto = added()
    proto.graph.initializer[0].dims[:] = [3 << 28]
    assert len(proto.SerializeToString()) < 1000
    refused(proto, "of shape .805306368. takes 3221225472 bytes, but the file holds 12")
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.float_data.extend([1.0])
    refused(proto, "has 805306368 numbers, but the file holds 1 in float_data")
    tensor.dims[:] = [-1]
    refused(proto, "negative dimension")
    tensor.dims[:] = [1 << 62, 1 << 62]
    refused(proto, "but the file holds 1")


def test_types_that_are_none():
    for kind in (0, 1000):
        proto = added()
        proto.graph.initializer[0].data_type = kind
        refused(proto, "tensors are not supported", OnnxUnsupportedError)


def test_numbers_that_claim_to_be_text():
    proto = added()
    proto.graph.initializer[0].data_type = onnx.TensorProto.STRING
    refused(proto, "the file holds 0 strings", OnnxFileError)


# ---- external data ---------------------------------------------------------------------------------------------------


def external(tmp_path, location="weights.bin", offset=0, length=12):
    proto = added()
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, str(value)
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    (folder / "m.onnx").write_bytes(proto.SerializeToString())
    return folder / "m.onnx"


def test_external_data_is_read_and_written_back(tmp_path):
    path = external(tmp_path, offset=4)
    (path.parent / "weights.bin").write_bytes(b"skip" + torch.arange(3.0).numpy().tobytes())
    module = from_onnx(path)
    assert module(torch.zeros(1, 3)).tolist() == [[0, 1, 2]]
    with torch.no_grad():
        module.w.add_(1)
    to_onnx(module, tmp_path / "new.onnx")
    assert from_onnx(tmp_path / "new.onnx")(torch.zeros(1, 3)).tolist() == [[1, 2, 3]]
    refused(onnx.load(path, load_external_data=False), "a model in memory has no folder")
    assert from_onnx(onnx.load(path, load_external_data=False), folder=path.parent).w.tolist() == [0, 1, 2]


def test_external_constants_are_written_back_too(tmp_path):
    """In types that torch does not have, and in the attribute of a node."""
    body = "agraph (float[n, 4] x) => (float[n, 4] y) { k = Constant <value = float[4] {1.0}> () a = Add(x, k) c = Cast <to = 1> (q) y = Add(a, c) }"  # noqa: E501
    proto = model(body, opset=23)
    proto.ir_version = 11
    proto.graph.initializer.append(onnx.TensorProto(name="q", data_type=onnx.TensorProto.INT4, dims=[4]))
    constant = proto.graph.node[0].attribute[0].t
    del constant.float_data[:]
    for tensor, name, data in (
        (constant, "k.bin", torch.arange(4.0).numpy().tobytes()),
        (proto.graph.initializer[0], "q.bin", b"\x2d\x87"),
    ):
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=name)
        (tmp_path / name).write_bytes(data)
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    (tmp_path / "elsewhere").mkdir()
    module = from_onnx(tmp_path / "m.onnx")
    wanted = [[-3.0, 3.0, 9.0, -5.0]]  # 0 1 2 3 and -3 2 7 -8
    assert module(torch.zeros(1, 4)).tolist() == wanted
    to_onnx(module, tmp_path / "elsewhere" / "m.onnx")
    assert from_onnx(tmp_path / "elsewhere" / "m.onnx")(torch.zeros(1, 4)).tolist() == wanted


def test_external_data_that_is_missing_or_too_short(tmp_path):
    path = external(tmp_path)
    refused(path, "its external data file weights.bin is not there")
    (path.parent / "weights.bin").write_bytes(b"short")
    refused(path, "weights.bin has 5, of which it asks for 12 at 0")
    (path.parent / "weights.bin").write_bytes(bytes(100))
    refused(external(tmp_path, length=100), "takes 12 bytes")
    refused(external(tmp_path, offset=-4), "asks for 12 at -4")
    refused(external(tmp_path, offset="four"), "is not a number")
    refused(external(tmp_path, location=""), "has no file name")


def test_external_data_never_leaves_the_folder(tmp_path):
    secret = tmp_path / "secret.bin"
    secret.write_bytes(bytes(12))
    message = "leads outside of the model's folder"
    refused(external(tmp_path, "../secret.bin"), message)
    refused(external(tmp_path, "a/../../secret.bin"), message)
    refused(external(tmp_path, str(secret)), message)
    refused(external(tmp_path, "..\\secret.bin"), message)
    path = external(tmp_path, "link.bin")
    os.symlink(secret, path.parent / "link.bin")
    refused(path, message)
    path = external(tmp_path, "inner/secret.bin")
    os.symlink(tmp_path, path.parent / "inner")
    refused(path, message)


# ---- what a graph may ask for ----------------------------------------------------------------------------------------


def test_a_huge_constant_is_refused_before_it_is_made():
    body = "agraph (float[n, 3] x) => (float[m] y) { y = ConstantOfShape(s) }"
    refused(model(body, s=torch.tensor([10**12])), r"a tensor of shape \[1000000000000\]", OnnxLimitError)


def test_functions_that_call_each_other_many_times():
    functions = "".join(
        f'<domain: "local", opset_import: ["" : 18, "local" : 1]> F{i} (a) => (c) '
        f"{{ b = local.F{i + 1}(a) c = local.F{i + 1}(b) }}\n"
        for i in range(25)
    )
    last = '<domain: "local", opset_import: ["" : 18]> F25 (a) => (c) { c = Add(a, a) }'
    body = f"agraph (float[n, 3] x) => (float[n, 3] y) {{ y = local.F0(x) }}\n{functions}{last}"
    refused(model(body), "more than 500 nodes", OnnxLimitError, limits=Limits(nodes=500))


def test_constants_that_double_and_double():
    joined = "".join(f"c{i + 1} = Add(c{i}, d{i})\nd{i + 1} = Reshape(c{i + 1}, s)\n" for i in range(9))
    body = f"agraph (float[n, 3] x) => (float[n, 3] y) {{ {joined} y = Add(x, x) }}"
    tensors = {"c0": torch.ones(1 << 12, 1, dtype=torch.int64), "d0": torch.ones(1 << 12, 1, dtype=torch.int64)}
    limits = Limits(all_folded_bytes=1 << 17)
    refused(
        model(body, s=torch.tensor([-1, 1]), **tensors), "take more than 131072 bytes", OnnxLimitError, limits=limits
    )
