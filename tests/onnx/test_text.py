"""Text in ONNX models: known at import, computed by numpy, never part of the program."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator

import wholestep as ws
from wholestep.errors import InputError
from wholestep.onnx import Limits, OnnxError, OnnxFileError, OnnxGraphError, OnnxLimitError, OnnxUnsupportedError

from .graphs import model

MOVED = """g (string[2,3] x, string[3] y) => (string[6] joined, string[A,B] part, int64[2] shape, string[2,3] chosen) {
    flat = Reshape(x, six)
    joined = Identity(flat)
    turned = Transpose<perm=[1, 0]>(x)
    both = Concat<axis=1>(turned, turned)
    part = Gather<axis=1>(both, rows)
    shape = Shape(x)
    same = Equal(x, y)
    chosen = Where(same, x, word)
}"""
TRAINED = """g (float[N,3] x, string[W] words) => (float[N,4] y, string[V] big) {
    big = StringNormalizer<case_change_action="UPPER", is_case_sensitive=1, stopwords=["no"]>(words)
    same = Equal(big, word)
    ones = Cast<to=1>(same)
    count = ReduceSum<keepdims=0>(ones)
    h = MatMul(x, w)
    y = Add(h, count)
}"""


def trained():
    torch.manual_seed(0)
    return ws.from_onnx(model(TRAINED, 19, w=torch.randn(3, 4), word=np.array(["YES"], dtype=object)))


def test_text_is_moved_and_compared_as_the_evaluator_does():
    proto = model(MOVED, 21, six=np.array([6]), rows=np.array([3, 0, 1]), word=np.array("none", dtype=object))
    x = np.array([["a", "b", "c"], ["c", "b", ""]], dtype=object)
    y = np.array(["a", "b", "\u00e9"], dtype=object)
    got = ws.from_onnx(proto)(x, y)
    wanted = ReferenceEvaluator(proto).run(None, {"x": x, "y": y})
    for ours, theirs in zip(got, wanted, strict=True):
        assert np.array_equal(np.asarray(ours), theirs)


@pytest.mark.parametrize("change", ["NONE", "LOWER", "UPPER"])
@pytest.mark.parametrize("exact", [0, 1])
def test_words_are_left_out_and_cased_as_onnxruntime_does(change, exact):
    onnxruntime = pytest.importorskip("onnxruntime")
    proto = model(f'''g (string[C] x) => (string[D] z) {{ z = StringNormalizer<case_change_action="{change}",
        is_case_sensitive={exact}, locale="C", stopwords=["no", "Monday"]>(x) }}''')
    x = np.array(["Monday", "monday no", "no", "NO", "", "a b", " no", "Tuesday"], dtype=object)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    assert ws.from_onnx(proto)(x).tolist() == session.run(None, {"x": x})[0].tolist()


def test_numbers_that_come_of_text_follow_its_value():
    module, x = trained(), torch.ones(2, 3)
    y, big = module(x, np.array(["yes", "no", "Yes", "x"]))
    assert big.tolist() == ["YES", "YES", "X"]
    assert torch.allclose(y, x @ module.w + 2)
    y, big = module(x, ["no", "no"])
    assert big.tolist() == [""]
    assert torch.allclose(y, x @ module.w)
    big[0] = "changed"  # what is given is the caller's own
    assert module(x, ["no", "no"])[1].tolist() == [""]


def test_a_compiled_step_is_for_the_text_of_its_batch():
    def loss(module, x, words):
        return module(x, words)[0].square().mean()

    module, x = trained(), torch.ones(2, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    step = ws.compile(module, loss, optimizer, (x, ["yes", "a"]), level=0)
    wanted = (x @ module.w + 1).square().mean().item()
    assert step(x, ["yes", "a"]).item() == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(InputError, match="differs"):
        step(x, ["yes", "yes"])
    with pytest.raises(InputError, match="ndarray"):
        ws.compile(module, loss, optimizer, (x, np.array(["yes"])), level=0)


@pytest.mark.parametrize("bad", [torch.ones(2), np.array([1, 2]), ["a", ["b"]], 3, np.array([b"a"])])
def test_what_is_no_text_is_refused(bad):
    with pytest.raises(OnnxError, match="words holds text"):
        trained()(torch.ones(1, 3), bad)


def test_the_shape_of_text_is_checked():
    with pytest.raises(OnnxError, match="must have 1 dimensions"):
        trained()(torch.ones(1, 3), [["a"]])


def run(node, *inputs, limits=None):
    body = f"g ({', '.join(f'string[{shape}] {name}' for name, shape in inputs)}) => (string z) {{ z = {node} }}"
    words = [np.full([int(d) for d in shape.split(",")], "ab", dtype=object) for _, shape in inputs]
    return ws.from_onnx(model(body, 21), **({"limits": limits} if limits else {}))(*words)


def test_operators_that_do_not_take_text_here_say_so():
    with pytest.raises(OnnxUnsupportedError, match=r"SequenceConstruct.*not supported for text"):
        run("SequenceConstruct(x)", ("x", "2"))
    with pytest.raises(OnnxUnsupportedError, match="regular expressions"):
        run('RegexFullMatch<pattern="(a+)+b">(x)', ("x", "2"))
    with pytest.raises(OnnxUnsupportedError, match="locale 'tr_TR'"):
        run('StringNormalizer<case_change_action="UPPER", locale="tr_TR">(x)', ("x", "2"))
    with pytest.raises(OnnxGraphError, match=r"\[1, C\]"):
        run("StringNormalizer(x)", ("x", "2,2"))


def test_text_in_subgraphs():
    branches = "then_branch = t () => (string[2] a) { a = Identity(x) }, "
    branches += "else_branch = e () => (string[2] b) { b = Identity(y) }"
    body = f"g (string[2] x, string[2] y) => (string[2] z) {{ z = If<{branches}>(c) }}"
    assert ws.from_onnx(model(body, 21, c=np.array(False)))(["a", "b"], ["c", "d"]).tolist() == ["c", "d"]
    rounds = "body = r (int64 i, bool go) => (bool on, string[2] a) { on = Identity(go) a = Identity(x) }"
    body = f"g (string[2] x) => (string[3,2] z) {{ z = Loop<{rounds}>(n, c) }}"
    with pytest.raises(OnnxUnsupportedError, match="a body that gives text"):
        ws.from_onnx(model(body, 21, n=np.array(3), c=np.array(True)))(["a", "b"])


def test_text_that_would_depend_on_data_is_an_error():
    body = "g (bool[2] c, string[2] x) => (string[2] z) { z = Where(c, x, x) }"
    words = ["a", "b"]
    with pytest.raises(OnnxUnsupportedError, match="depends on the data"):
        ws.from_onnx(model(body, 21))(torch.tensor([True, False]), words)
    frozen = ws.from_onnx(model(body, 21), frozen_inputs=True)
    assert frozen(torch.tensor([True, False]), words).tolist() == words


def test_text_is_bounded_before_it_is_made():
    assert run("StringConcat(x, y)", ("x", "3,1"), ("y", "1,2")).tolist() == [["abab"] * 2] * 3
    with pytest.raises(OnnxLimitError, match="StringConcat"):
        run("StringConcat(x, y)", ("x", "3000,1"), ("y", "1,3000"))
    with pytest.raises(OnnxLimitError, match="input x"):
        run("Identity(x)", ("x", "100"), limits=Limits(folded_bytes=1000))


def test_a_damaged_tensor_of_text_is_refused():
    for strings, dims in ((["a"], [2]), ([b"\xff"], [1]), ([], [0, 1 << 62, 1 << 62])):
        proto = model("g (string[1] x) => (string[1] z) { z = Concat<axis=0>(x, t) }", 21)
        tensor = onnx.TensorProto(name="t", data_type=onnx.TensorProto.STRING, dims=dims)
        tensor.string_data.extend(s.encode() if isinstance(s, str) else s for s in strings)
        proto.graph.initializer.append(tensor)
        with pytest.raises(OnnxFileError, match="tensor t"):
            ws.from_onnx(proto)


def test_weights_of_n_grams():
    body = """g (string[2,4] x) => (float[2,3] z) { z = TfIdfVectorizer<mode="MODE", min_gram_length=1,
        max_gram_length=2, max_skip_count=1, ngram_counts=[0, 2], ngram_indexes=[0, 1, 2],
        pool_strings=["a", "b", "a", "b"], weights=[2.0, 3.0, 5.0]>(x) }"""
    x = np.array([["a", "b", "b", "a"], ["c", "a", "c", "b"]], dtype=object)
    for mode in ("TF", "IDF", "TFIDF"):
        proto = model(body.replace("MODE", mode), 21)
        (wanted,) = ReferenceEvaluator(proto).run(None, {"x": x})
        assert np.array_equal(ws.from_onnx(proto)(x).numpy(), wanted)


def test_constants_of_text_and_writing_a_model_with_some(tmp_path):
    proto = model('g (string[2] x) => (string[2] z) { c = Constant<value_string="!">() z = StringConcat(x, c) }', 21)
    module = ws.from_onnx(proto)
    assert module(["a", "b"]).tolist() == ["a!", "b!"]
    ws.to_onnx(module, tmp_path / "m.onnx")
    assert ws.from_onnx(tmp_path / "m.onnx")(["a", "b"]).tolist() == ["a!", "b!"]
