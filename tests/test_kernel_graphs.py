"""Operators that the kernels claim, in small graphs: the numbers are onnxruntime's, and what does not fit is said."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from specexport.contract.errors import BackendError
from specexport.runtime.backends.onnxruntime import kernels
from specexport.runtime.backends.onnxruntime.kernels import PackedWeights
from specexport.runtime.backends.onnxruntime.session import open_session
from tests.reference import plain_session

onnx = pytest.importorskip("onnx")

pytestmark = pytest.mark.skipif(not kernels.LIBRARY.is_file(), reason="the kernels are not compiled")

Arrays = dict[str, npt.NDArray[Any]]
RANDOM = np.random.default_rng(3)


def normal(*dims: int) -> npt.NDArray[np.float32]:
    return RANDOM.standard_normal(dims).astype(np.float32)


def integers(*numbers: int) -> npt.NDArray[np.int64]:
    return np.array(numbers, np.int64)


def unit(*dims: int) -> npt.NDArray[np.float32]:
    """Numbers between 0.1 and 1.1."""
    return np.asarray(RANDOM.random(dims) + 0.1, np.float32)


_MASK = np.tril(np.ones((3, 6), np.bool_), 2)
_ROTARY: Arrays = {"x": normal(2, 3, 4, 8), "c": normal(2, 4, 4), "s": normal(2, 4, 4)}
_UNARY = (
    *("Sigmoid", "Tanh", "Exp", "Erf", "Cos", "Sin", "Neg", "Abs", "Relu", "Softplus", "Floor", "Gelu", "Identity"),
    'Gelu<approximate="tanh">',
)
CASES: dict[str, tuple[str, Arrays, Arrays]] = {
    **{kind: (f"y = {kind}(x)", {"x": 3 * normal(2, 5, 7)}, {}) for kind in _UNARY},
    **{kind: (f"y = {kind}(x)", {"x": unit(3, 9)}, {}) for kind in ("Sqrt", "Reciprocal", "Log")},
    **{
        f"{kind} of {name}": (f"y = {kind}(x, z)", {"x": unit(2, 3, 5), "z": unit(*dims)}, {})
        for kind in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Pow")
        for name, dims in {"equals": (2, 3, 5), "a row": (5,), "a column": (3, 1), "a number": ()}.items()
    },
    "a constant on the left": ("y = Sub(k, x)", {"x": normal(2, 3)}, {"k": normal(3)}),
    "RMSNormalization": ("y = RMSNormalization<epsilon=0.01>(x, k)", {"x": normal(3, 20)}, {"k": normal(20)}),
    "LayerNormalization": ("y = LayerNormalization(x, k, b)", {"x": normal(3, 20)}, {"k": normal(20), "b": normal(20)}),
    "LayerNormalization without a bias": ("y = LayerNormalization(x, k)", {"x": normal(3, 5)}, {"k": normal(5)}),
    "Softmax": ("y = Softmax<axis=-1>(x)", {"x": 10 * normal(4, 13)}, {}),
    "RotaryEmbedding": ("y = RotaryEmbedding(x, c, s)", _ROTARY, {}),
    "RotaryEmbedding of neighbours": ("y = RotaryEmbedding<interleaved=1>(x, c, s)", _ROTARY, {}),
    "RotaryEmbedding of a part": (
        "y = RotaryEmbedding<rotary_embedding_dim=4>(x, c, s)",
        {"x": normal(2, 3, 4, 8), "c": normal(2, 4, 2), "s": normal(2, 4, 2)},
        {},
    ),
    "Attention": (
        "y = Attention(q, k, v, m)",
        {"q": normal(2, 4, 3, 8), "k": normal(2, 2, 6, 8), "v": normal(2, 2, 6, 8), "m": _MASK},
        {},
    ),
    "Attention with other values, a scale and a cap": (
        "y = Attention<scale=0.3, softcap=2.0>(q, k, v, m)",
        {"q": normal(1, 2, 3, 12), "k": normal(1, 2, 6, 12), "v": normal(1, 2, 6, 20), "m": _MASK},
        {},
    ),
    "TensorScatter": (
        "y = TensorScatter(x, u, w)",
        {"x": normal(2, 3, 6, 4), "u": normal(2, 3, 2, 4), "w": integers(1, 4)},
        {},
    ),
    "Gather": ("y = Gather(k, i)", {"i": np.array([[0, 3], [-1, 2]], np.int64)}, {"k": normal(4, 6)}),
    "GatherElements": (
        "y = GatherElements<axis=1>(x, i)",
        {"x": normal(2, 5, 3), "i": RANDOM.integers(0, 5, (2, 2, 3))},
        {},
    ),
    "MatMul of inputs": ("y = MatMul(x, z)", {"x": normal(2, 3, 4, 5), "z": normal(2, 3, 5, 6)}, {}),
    "MatMul of a weight": ("y = MatMul(x, k)", {"x": normal(2, 3, 50)}, {"k": normal(50, 70)}),
    "MatMul of no rows": ("y = MatMul(x, k)", {"x": normal(0, 50)}, {"k": normal(50, 7)}),
    "a gate": ("g = Sigmoid(x) h = Mul(x, g) y = Mul(h, z)", {"x": normal(3, 40), "z": normal(3, 40)}, {}),
    "a residual": ("p = MatMul(x, k) y = Add(z, p)", {"x": normal(3, 40), "z": normal(3, 24)}, {"k": normal(40, 24)}),
    "shapes": (
        "a = Reshape(x, d) b = Transpose<perm=[1,0,2]>(a) c = Unsqueeze(b, o) e = Squeeze(c, o) y = Mul(e, e)",
        {"x": normal(4, 6)},
        {"d": integers(4, 2, 3), "o": integers(1)},
    ),
    "parts": (
        "a, b = Split<axis=1, num_outputs=2>(x) c = Concat<axis=0>(b, a) d = Slice(c, f, l, o, t) y = Neg(d)",
        {"x": normal(4, 6)},
        {"f": integers(1), "l": integers(7), "o": integers(0), "t": integers(2)},
    ),
    "Expand": ("a = Expand(x, d) y = Neg(a)", {"x": normal(3, 1)}, {"d": integers(2, 3, 4)}),
    "Cast": ("a = Cast<to=1>(x) y = Neg(a)", {"x": np.array([[True, False]])}, {}),
    # Numbers of other types, which become floats at the end.
    **{
        f"{kind} of {name}": (f"a = {kind}(x, z) y = Cast<to=1>(a)", {"x": x, "z": z}, {})
        for kind in ("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal")
        for name, (x, z) in {
            "integers": (integers(1, 2, 3), np.array([[2], [3]])),
            "floats": (np.array([[1, 2, np.inf]], np.float32), np.array([[2], [1]], np.float32)),
        }.items()
    },
    **{
        f"{kind} of integers": (
            f"a = {kind}(x, z) y = Cast<to=1>(a)",
            {"x": integers(5, -2, 3), "z": np.array([[2], [-9]])},
            {},
        )
        for kind in ("Add", "Sub", "Mul", "Max", "Min")
    },
    **{
        kind: (f"a = {kind}(x, z) b = Not(a) y = Cast<to=1>(b)", {"x": _MASK[0, :4], "z": _MASK[:, 2:3]}, {})
        for kind in ("And", "Or")
    },
    "Neg of integers": ("a = Neg(x) y = Cast<to=1>(a)", {"x": np.array([[1, -2]])}, {}),
    "Clip": ("y = Clip(x, a, b)", {"x": normal(3, 4)}, {"a": np.float32(-0.5), "b": np.float32(0.5)}),
    "Clip of integers, above": ("a = Clip(x, , k) y = Cast<to=1>(a)", {"x": np.array([[1, 9]])}, {"k": np.int64(5)}),
    "Where": ("y = Where(m, x, k)", {"m": _MASK, "x": normal(2, 3, 6)}, {"k": normal(1)}),
    "Where of integers": (
        "a = Where(m, x, k) y = Cast<to=1>(a)",
        {"m": _MASK, "x": integers(*range(6))},
        {"k": integers(7)},
    ),
    "CumSum": ("y = CumSum(x, k)", {"x": normal(2, 3, 4)}, {"k": np.int64(1)}),
    "CumSum of integers": ("a = CumSum(x, k) y = Cast<to=1>(a)", {"x": np.array([[1, 2, 3]])}, {"k": integers(-1)}),
    **{
        f"TopK {name}": (
            f"v, i = TopK<largest={largest}>(x, k) j = Cast<to=1>(i) y = Concat<axis=0>(v, j)",
            {"x": np.round(3 * normal(3, size))},
            {"k": integers(count)},
        )
        for name, size, count, largest in (
            ("of all", 5, 5, 1),
            ("with ties", 40, 9, 1),
            ("of the smallest", 40, 9, 0),
            ("of many", 2000, 64, 1),
            ("of the smallest of many", 1999, 7, 0),
        )
    },
    **{
        f"{kind} of {size}": (f"y = {kind}<keepdims={keep}>(x, k)", {"x": unit(2, 3, size)}, {"k": integers(-1)})
        for kind in ("ReduceSum", "ReduceMax", "ReduceMin")
        for size, keep in ((5, 0), (70, 1))
    },
    "Shape": (
        "a = Shape<start=-2>(x) b = Range(i, n, j) c = Add(a, b) y = Cast<to=1>(c)",
        {"x": normal(2, 3, 4)},
        {"i": np.int64(9), "n": np.int64(4), "j": np.int64(-3)},
    ),
    "Gather of columns": ("y = Gather<axis=1>(x, i)", {"x": normal(2, 5, 3), "i": integers(4, 0, -2)}, {}),
    "Gather of one": (
        "a = Gather<axis=-1>(x, i) y = Unsqueeze(a, z)",
        {"x": normal(2, 5), "i": np.array(3)},
        {"z": integers(1)},
    ),
    "GatherND": ("y = GatherND(x, i)", {"x": normal(4, 5, 3), "i": np.array([[1, 4], [-1, 0]])}, {}),
    "GatherElements of integers": (
        "a = GatherElements<axis=-1>(x, i) y = Cast<to=1>(a)",
        {"x": np.array([[3, 5, 7]]), "i": np.array([[2, 0]])},
        {},
    ),
    "ScatterElements": (
        "y = ScatterElements<axis=2>(x, i, u)",
        {"x": normal(2, 2, 6), "i": np.array([[[0, 3], [-1, 2]]]), "u": normal(1, 2, 2)},
        {},
    ),
}


START = RANDOM.bit_generator.state


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same numbers, whichever ran before it."""
    RANDOM.bit_generator.state = START


def save(path: Path, body: str, inputs: Arrays, constants: Arrays, ranks_alone: bool = False) -> Path:
    """A graph with the inputs' shapes, or with their ranks alone, and the output y."""
    types = {"float32": 1, "int64": 7, "bool": 9, "int8": 3}
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 24]> g () => () {{ {body} }}')
    for name, array in inputs.items():
        dims = [f"{name}{i}" for i in range(array.ndim)] if ranks_alone else array.shape
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, types[str(array.dtype)], dims))
    model.graph.output.append(onnx.helper.make_tensor_value_info("y", 1, None))
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in constants.items())
    onnx.save(model, path, save_as_external_data=True, location=f"{path.stem}.bin", size_threshold=128)
    return path


def beside_a_product(body: str, constants: Arrays, columns: int) -> tuple[str, Arrays]:
    """The same with a product behind it that changes nothing: what goes without products is left to onnxruntime."""
    return body.replace("y =", "z0 =") + " y = MatMul(z0, one)", constants | {"one": np.eye(columns, dtype=np.float32)}


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_onnxruntime_s(tmp_path, name):
    body, inputs, constants = CASES[name]
    path = save(tmp_path / "theirs.onnx", body, inputs, constants)
    theirs = plain_session(path)
    (expected,) = theirs.run(None, inputs)
    body, constants = beside_a_product(body, constants, expected.shape[-1])
    session = open_session(save(tmp_path / "ours.onnx", body, inputs, constants), 2, "native", "fp32")
    parts = session.get_provider_graph_assignment_info()
    assert "CPUExecutionProvider" not in {part.ep_name for part in parts if list(part.get_nodes())}
    (ours,) = session.run(None, inputs)
    assert ours.shape == expected.shape
    np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=2e-5)


WRONG: dict[str, tuple[str, Arrays, Arrays, str]] = {
    "sizes that do not broadcast": ("y = Add(x, z)", {"x": normal(3), "z": normal(4)}, {}, "Add"),
    "a row of another depth": ("y = MatMul(x, k)", {"x": normal(2, 9)}, {"k": normal(10, 4)}, "MatMul|product"),
    "an index outside": ("y = Gather(k, i)", {"i": integers(4)}, {"k": normal(4, 4)}, "Gather reads outside"),
    "a write behind the cache": (
        "y = TensorScatter(x, u, w)",
        {"x": normal(1, 1, 6, 4), "u": normal(1, 1, 3, 4), "w": integers(4)},
        {},
        "TensorScatter writes outside",
    ),
    "keys of another size": (
        "y = Attention(q, k, v, m)",
        {"q": normal(1, 2, 3, 8), "k": normal(1, 2, 6, 9), "v": normal(1, 2, 6, 8), "m": _MASK},
        {},
        "Attention",
    ),
    "heads that are no multiple": (
        "y = Attention(q, k, v, m)",
        {"q": normal(1, 3, 3, 8), "k": normal(1, 2, 6, 8), "v": normal(1, 2, 6, 8), "m": _MASK},
        {},
        "Attention's heads",
    ),
    "more than there are": ("v, i = TopK(x, k) y = Neg(v)", {"x": normal(2, 3)}, {"k": integers(4)}, "TopK"),
    "a place outside": ("y = GatherND(x, i)", {"x": normal(2, 4)}, {"i": np.array([[2]])}, "GatherND reads outside"),
    "a write outside": (
        "y = ScatterElements<axis=1>(x, i, u)",
        {"x": normal(1, 4), "i": np.array([[4]]), "u": normal(1, 1)},
        {},
        "ScatterElements writes outside",
    ),
    "parts of other sizes": ("y = Concat<axis=0>(x, z)", {"x": normal(2, 3), "z": normal(2, 4)}, {}, "Concat"),
    "a shape of another size": ("a = Reshape(x, d) y = Neg(a)", {"x": normal(5)}, {"d": integers(2, 4)}, "Reshape"),
}


@pytest.mark.parametrize("name", WRONG)
def test_inputs_that_do_not_fit_are_an_error_of_one_line(tmp_path, name):
    body, inputs, constants, message = WRONG[name]
    body, constants = beside_a_product(body, constants, 4)
    session = open_session(
        save(tmp_path / "model.onnx", body, inputs, constants, ranks_alone=True), 1, "native", "fp32"
    )
    with pytest.raises(Exception, match=message) as raised:  # onnxruntime's share no public base
        session.run(None, inputs)
    assert str(raised.value).strip().count("\n") == 0


def test_numbers_that_are_none_stay_in_their_row(tmp_path):
    weights = normal(64, 40)
    path = save(tmp_path / "model.onnx", "y = MatMul(x, k)", {"x": normal(3, 64)}, {"k": weights}, True)
    session = open_session(path, 1, "native", "fp32")
    x = normal(3, 64)
    (expected,) = session.run(None, {"x": x})
    x[1, 5] = np.nan
    (y,) = session.run(None, {"x": x})
    assert np.isnan(y[1]).all()
    np.testing.assert_array_equal(y[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("block", [16, 24, 32, 48, 128, 144])
def test_blocks_of_any_size_are_read(tmp_path, block):
    depth = 3 * block
    body = f"d = DequantizeLinear<axis=0, block_size={block}>(k, s) y = MatMul(x, d)"
    constants: Arrays = {"k": RANDOM.integers(-127, 128, (depth, 20)).astype(np.int8), "s": unit(3, 20) / 99}
    session = open_session(save(tmp_path / "model.onnx", body, {"x": normal(2, depth)}, constants), 1, "native", "int8")
    assert not kernels.not_claimed(session)
    x = normal(2, depth)
    (y,) = session.run(None, {"x": x})
    weights = constants["k"] * np.repeat(constants["s"], block, axis=0)
    np.testing.assert_allclose(y, x @ weights, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("sums_are_read", [False, True])
def test_offsets_of_weights_are_added(tmp_path, sums_are_read):
    body = f"""
        d = DequantizeLinear<axis=0, block_size=32>(k, s)
        blocks = Reshape(x, parts) column = MatMul(blocks, ones) sums = Reshape(column, rows)
        moved = MatMul(sums, o) product = MatMul(x, d) total = Add(product, moved)
        {"other = MatMul(sums, u) z = Add(r, other)" if sums_are_read else "z = Identity(r)"} y = Add(z, total)
    """
    constants: Arrays = {
        "k": RANDOM.integers(-127, 128, (96, 40)).astype(np.int8),
        "s": unit(3, 40) / 99,
        "o": normal(3, 40),
        "u": normal(3, 40),
        "ones": np.ones((32, 1), np.float32),
        "parts": integers(0, 0, 3, 32),
        "rows": integers(0, 0, 3),
    }
    x, r = normal(1, 70, 96), normal(1, 70, 40)
    path = save(tmp_path / "model.onnx", body, {"x": x, "r": r}, constants, ranks_alone=True)
    session = open_session(path, 2, "native", "int8")
    (y,) = session.run(None, {"x": x, "r": r})
    weights = constants["k"] * np.repeat(constants["s"], 32, axis=0) + np.repeat(constants["o"], 32, axis=0)
    expected = x @ weights + r + (x.reshape(1, 70, 3, 32).sum(-1) @ constants["u"] if sums_are_read else 0)
    np.testing.assert_allclose(y, expected, rtol=0.02, atol=0.05)
    for first, last in ((0, 1), (3, 8), (66, 70)):
        (some,) = session.run(None, {"x": x[:, first:last], "r": r[:, first:last]})
        np.testing.assert_array_equal(some, y[:, first:last])


@pytest.mark.parametrize("capped", [False, True])
def test_attention_in_two_parts_reads_only_what_is_seen(tmp_path, capped):
    bounded = "g = Div(scores, cap) h = Tanh(g) i = Mul(cap, h)" if capped else "i = Identity(scores)"
    body = f"""
        turned = Transpose<perm=[0, 1, 3, 2]>(k) a = MatMul(q, turned) b = Mul(a, factor)
        later = Transpose<perm=[0, 1, 3, 2]>(k2) c = MatMul(q, later) d = Mul(c, factor)
        scores = Concat<axis=-1>(b, d) bias = Where(m, zero, least) tiled = Concat<axis=2>(bias, bias)
        {bounded} biased = Add(i, tiled) p = Softmax<axis=-1>(biased) p1, p2 = Split<axis=3>(p, parts)
        e = MatMul(p1, v) f = MatMul(p2, v2) y = Add(e, f)
    """
    constants: Arrays = {
        "factor": np.array(0.3, np.float32),
        "cap": np.array(2.0, np.float32),
        "zero": np.array(0, np.float32),
        "least": np.array(np.finfo(np.float32).min / 2, np.float32),
        "parts": integers(30, 4),
    }
    mask = RANDOM.random((2, 1, 3, 34)) < 0.4
    mask[..., 0] = True
    cache = {"k": normal(2, 2, 30, 16), "v": normal(2, 2, 30, 16)}
    inputs = {"q": normal(2, 2, 6, 16), "k2": normal(2, 2, 4, 16), "v2": normal(2, 2, 4, 16), "m": mask}
    path = save(tmp_path / "model.onnx", body, inputs | cache, constants)
    (expected,) = plain_session(path).run(None, inputs | cache)
    hidden = ~mask.any((1, 2))[:, :30]
    assert hidden.any()
    for array in cache.values():
        array[np.broadcast_to(hidden[:, None, :, None], array.shape)] = np.nan
    body, constants = beside_a_product(body, constants, 16)
    session = open_session(save(tmp_path / "ours.onnx", body, inputs | cache, constants), 2, "native", "fp32")
    (y,) = session.run(None, inputs | cache)
    np.testing.assert_allclose(y, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("harm", ["cut", "empty", "longer", "header", "flags", "a folder"])
def test_packed_files_that_are_not_whole_are_written_again(tmp_path, harm):
    body = "d = DequantizeLinear<axis=0, block_size=32>(k, s) y = MatMul(x, d)"
    constants = {"k": RANDOM.integers(-127, 128, (1600, 700)).astype(np.int8), "s": unit(50, 700) / 99}
    path = save(tmp_path / "model.onnx", body, {"x": normal(2, 1600)}, constants)
    packed, x = PackedWeights(tmp_path / "packed", "key"), normal(2, 1600)
    (expected,) = open_session(path, 1, "native", "int8", packed=packed).run(None, {"x": x})
    (file,) = packed.folder.iterdir()
    whole = file.read_bytes()
    if harm == "a folder":
        file.unlink()
        file.mkdir()
    else:
        parts = {"cut": whole[:-100], "empty": b"", "longer": whole + b"x", "header": b"SPXPACK0" + whole[8:]}
        file.write_bytes(parts.get(harm, whole[:24] + bytes([whole[24] ^ 1]) + whole[25:]))
    (y,) = open_session(path, 1, "native", "int8", packed=packed).run(None, {"x": x})
    np.testing.assert_array_equal(y, expected)
    if harm != "a folder":
        assert file.read_bytes() == whole


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's list of mappings")
def test_packed_files_are_mapped_where_large_pages_can_be(tmp_path):
    body = "d = DequantizeLinear<axis=0, block_size=32>(k, s) y = MatMul(x, d)"
    constants = {"k": RANDOM.integers(-127, 128, (1600, 1400)).astype(np.int8), "s": unit(50, 1400) / 99}
    path = save(tmp_path / "model.onnx", body, {"x": normal(2, 1600)}, constants)
    packed = PackedWeights(tmp_path / "packed", "key")
    for _ in range(2):  # as it writes the file, and as it finds it
        session = open_session(path, 1, "native", "int8", packed=packed)
        (file,) = packed.folder.iterdir()
        (line,) = (line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(file)))
        first, last = (int(address, 16) for address in line.split()[0].split("-"))
        assert first % (2 << 20) == 0
        assert file.stat().st_size <= last - first < file.stat().st_size + os.sysconf("SC_PAGESIZE")
        del session


def test_an_unknown_instruction_set_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECEXPORT_ISA", "z80")
    path = save(tmp_path / "model.onnx", "y = MatMul(x, k)", {"x": normal(2, 60)}, {"k": normal(60, 50)})
    assert open_session(path, 1, "native", "fp32").run(None, {"x": normal(2, 60)})[0].shape == (2, 50)


def test_a_graph_that_is_none_is_refused(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"none")
    with pytest.raises(BackendError, match="onnxruntime refused the graph"):
        open_session(tmp_path / "model.onnx", 1, "native", "fp32")


def test_want_of_memory_is_said(tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("[ONNXRuntimeError] : 1 : FAIL : std::bad_alloc")

    monkeypatch.setattr("onnxruntime.InferenceSession", refuse)
    with pytest.raises(BackendError, match=r"std::bad_alloc; there is too little memory"):
        open_session(tmp_path / "model.onnx", 1, "native", "fp32")
    (tmp_path / "onnxruntime.py").write_text("raise ImportError('failed to map segment from shared object')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "onnxruntime")
    with pytest.raises(BackendError, match="onnxruntime is installed, but could not be loaded: failed to map"):
        open_session(tmp_path / "model.onnx", 1, "native", "fp32")
