"""The execution provider of kernels/plugin.cc on the real onnxruntime, around a plain program."""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from specexport.runtime.backends.onnxruntime import kernels  # noqa: E402
from tests.reference import plain_session  # noqa: E402
from tests.threads import python  # noqa: E402

ROOT = Path(__file__).parent.parent
FLOAT = TensorProto.FLOAT
RANDOM = np.random.default_rng(0)
START = RANDOM.bit_generator.state


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, with the program of the tests instead of the kernels'."""
    build = runpy.run_path(str(ROOT / "kernels" / "build.py"))
    folder = tmp_path_factory.mktemp("plugin")
    sources = [ROOT / "kernels" / name for name in ("plugin.cc", "ort_graph.cc", "mapped_file.cc")]
    try:
        sources.append(ROOT / "kernels" / "tests" / "plain_program.cc")
        build["build"](folder / "plain.so", ROOT / "build" / "kernels", ["-O0"], sources)
    except build["CompilerError"] as error:
        pytest.skip(str(error))
    return folder / "plain.so"


@pytest.fixture(autouse=True)
def used(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "LIBRARY", plugin)
    RANDOM.bit_generator.state = START  # every test draws the same numbers, whichever ran before it


def values(names: str, *dims: int | str, kind: int = FLOAT) -> list[Any]:
    return [helper.make_tensor_value_info(name, kind, dims) for name in names.split()]


def save(path: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], **constants: Any) -> Path:
    """A model whose constants are in a file beside it."""
    stored = [
        array if isinstance(array, TensorProto) else numpy_helper.from_array(array, name)
        for name, array in constants.items()
    ]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path


def options(count: int, **settings: str) -> Any:
    result = ort.SessionOptions()
    result.intra_op_num_threads = count
    result.log_severity_level = 4
    assert kernels.add_kernels(result, count)
    for name, value in settings.items():
        result.add_session_config_entry(f"ep.specexport.{name}", value)
    return result


def both(path: Path, threads: int = 2, **inputs: npt.NDArray[Any]) -> None:
    """Compares with onnxruntime's own provider, which is kept from rounding activations to int8."""
    ours, theirs = ort.InferenceSession(str(path), options(threads)), plain_session(path)
    for output, other in zip(ours.run(None, inputs), theirs.run(None, inputs), strict=True):
        np.testing.assert_allclose(output, other, rtol=1e-4, atol=1e-3)


def normal(*dims: int) -> npt.NDArray[np.float32]:
    return RANDOM.standard_normal(dims).astype(np.float32)


@pytest.mark.parametrize("threads", [1, 3])
def test_groups_constants_and_bodies_of_loops(tmp_path, threads):
    int4 = RANDOM.integers(-8, 8, (64, 24)).astype(np.int8)
    packed = (int4.reshape(-1, 2) & 15) @ np.array([1, 16])
    weights = helper.make_tensor("weights", TensorProto.INT4, (64, 24), packed.astype(np.uint8).tobytes(), raw=True)
    body = helper.make_graph(
        [
            helper.make_node("Mul", ["state", "half"], ["scaled"], "ours, in a body/1"),
            helper.make_node("Add", ["scaled", "x"], ["next"], "ours, in a body/2"),
            helper.make_node("Identity", ["more"], ["again"]),
        ],
        "body",
        [*values("step", kind=TensorProto.INT64), *values("more", kind=TensorProto.BOOL), *values("state", "N", 64)],
        [*values("again", kind=TensorProto.BOOL), *values("next", "N", 64)],
    )
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["square"], "ours/1"),
        helper.make_node("Add", ["square", "half"], ["sum"], "ours/2"),
        helper.make_node("Loop", ["times", "", "sum"], ["last"], body=body),
        helper.make_node("DequantizeLinear", ["weights", "scales"], ["matrix"], "ours, too/1", axis=0, block_size=16),
        helper.make_node("MatMul", ["last", "matrix"], ["y"], "ours, too/2"),
        helper.make_node("MatMul", ["y", "large"], ["z"], "ours, large constants unread"),
    ]
    path = save(
        tmp_path / "model.onnx",
        nodes,
        values("x", "N", 64),
        [*values("z", "N", 24), *values("y", "N", 24)],
        half=np.array([0.5], np.float32),
        times=np.array(3),
        weights=weights,
        scales=normal(4, 24),
        large=normal(24, 24),
    )
    both(path, threads, x=normal(5, 64))


def test_an_output_that_is_bound_to_an_input_is_written_in_place(tmp_path):
    nodes = [helper.make_node("Add", ["past", "new"], ["present"], "ours")]
    path = save(tmp_path / "model.onnx", nodes, values("past new", "N"), values("present", "N"), unused=normal(1))
    session = ort.InferenceSession(str(path), options(1))
    cache, binding = ort.OrtValue.ortvalue_from_numpy(np.arange(4, dtype=np.float32)), session.io_binding()
    binding.bind_ortvalue_input("past", cache)
    binding.bind_cpu_input("new", np.ones(4, np.float32))
    binding.bind_ortvalue_output("present", cache)
    for _ in range(2):
        session.run_with_iobinding(binding)
    assert cache.numpy().tolist() == [2, 3, 4, 5]


def test_failures_are_reported_in_one_line(tmp_path):
    def model(kind: str) -> str:
        nodes = [helper.make_node(kind, ["x", "w"], ["y"], "ours")]
        return str(save(tmp_path / "model.onnx", nodes, values("x", 300), values("y", 300), w=normal(300)))

    session = ort.InferenceSession(model("Sub"), options(1))
    for _ in range(2):
        with pytest.raises(Exception, match=r"Message: the plain program has no Sub\Z"):
            session.run(None, {"x": normal(300)})
    with pytest.raises(Exception, match=r": refused with key 12\Z"):
        ort.InferenceSession(model("Add"), options(1, folder="refuse", key="12"))
    with pytest.raises(Exception, match=r"ep.specexport.threads is '2x'; expected a number of threads, 1 or more$"):
        ort.InferenceSession(model("Add"), options(1, threads="2x"), enable_fallback=0)


def test_a_file_of_weights_that_is_cut_short_is_named(tmp_path):
    nodes = [helper.make_node("Add", ["x", "w"], ["y"], "ours")]
    path = save(tmp_path / "model.onnx", nodes, values("x", 300), values("y", 300), w=normal(300))
    both(path, x=normal(300))
    weights = tmp_path / "weights.bin"
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(Exception, match=r"weights.bin"):
        ort.InferenceSession(str(path), options(1))
    weights.unlink()
    with pytest.raises(Exception, match=r"weights.bin"):
        ort.InferenceSession(str(path), options(1))


def test_weights_that_are_claimed_are_held_by_no_other(tmp_path):
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], "ours")]
    path = save(tmp_path / "model.onnx", nodes, values("x", "N", 4096), values("y", "N", 4096), w=normal(4096, 4096))
    held = "import sys; from pathlib import Path; import onnxruntime as ort\n"
    held += "from specexport.runtime.backends.onnxruntime import kernels\n"
    held += f"kernels.LIBRARY = Path({str(kernels.LIBRARY)!r}); options = ort.SessionOptions()\n"
    held += f"assert kernels.add_kernels(options, 1); session = ort.InferenceSession({str(path)!r}, options)\n"
    held += "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmRSS')))"
    assert int(python(held)) < 100_000, "kB, of which the weights would be 64 MiB, and as much again as they are read"
