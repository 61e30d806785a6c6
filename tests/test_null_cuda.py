"""The null CUDA libraries keep CUDA's rules: what is given is done at a wait, and a capture refuses what it must."""

import contextlib
import ctypes
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import onnx.parser
import pytest

from specexport.contract.errors import BackendError
from specexport.runtime.backends.cuda.api import Cuda, CudaStream, OutOfDeviceMemoryError
from tests import test_gpu_dry_run
from tests.null_cuda import log
from tests.null_cuda.bindings import NullRuntime
from tests.null_cuda.dry_run import not_fused, shape_arithmetic
from tests.null_cuda.install import RUNTIME, UnavailableError, environment

pytestmark = pytest.mark.exporter  # it reads graphs

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def null(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NullRuntime, Path]]:
    """The library in this process, and its log."""
    try:
        folder = environment()["LD_LIBRARY_PATH"]
    except UnavailableError as error:
        pytest.skip(str(error))
    written = tmp_path_factory.mktemp("null") / "calls.log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NULL_CUDA_LOG", str(written))  # which it reads at its first call
        yield NullRuntime(f"{folder}/{RUNTIME}"), written


@pytest.fixture
def cuda(null: tuple[NullRuntime, Path]) -> Cuda:
    return Cuda(null[0])


@pytest.fixture
def read_report(null: tuple[NullRuntime, Path]) -> Callable[[], log.Report]:
    """Gives what the log says of the test so far."""
    runtime, written = null
    runtime.mark("load")

    def read() -> log.Report:
        runtime.mark("read")
        return log.reports(log.read(written))[-1]

    return read


@pytest.fixture
def stream(cuda: Cuda) -> Iterator[CudaStream]:
    cuda_stream = CudaStream(cuda)
    yield cuda_stream
    cuda_stream.close()


class Memory:
    """Pinned memory and device memory of four bytes, and what a copy of one to the other and back says."""

    def __init__(self, cuda: Cuda, stream: CudaStream) -> None:
        self._cuda, self._stream = cuda, stream
        self.given, self.device, self.seen = cuda.allocate_pinned(4), cuda.allocate(4), cuda.allocate_pinned(4)

    def write(self, text: bytes) -> None:
        ctypes.memmove(self.given, text, 4)

    def there_and_back(self) -> None:
        self._stream.copy(self.device, self.given, 4)
        self._stream.copy(self.seen, self.device, 4)

    def read(self) -> bytes:
        return ctypes.string_at(self.seen, 4)


@pytest.fixture
def memory(cuda: Cuda, stream: CudaStream) -> Memory:
    return Memory(cuda, stream)


def test_every_function_that_is_called_is_there():
    sources = [ROOT / "runtime/backends/cuda/api.py", *(ROOT / "benchmarks/gpu").glob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    called = set(re.findall(r'call\(\s*"(cuda\w+)"', text)) | set(re.findall(r"(?:_rt|bindings)\.(cuda\w+)", text))
    assert len(called) > 20
    assert [name for name in sorted(called) if not hasattr(NullRuntime, name)] == []


def test_work_is_done_when_it_is_waited_for(memory, stream):
    memory.write(b"one.")
    memory.there_and_back()
    assert memory.read() == bytes(4)
    memory.write(b"two.")  # too early, as a GPU may be slow
    stream.synchronize()
    assert memory.read() == b"two."


def test_pageable_memory_is_read_before_the_call_returns(cuda, memory, stream):
    text = ctypes.create_string_buffer(b"one.", 4)
    stream.copy(memory.device, ctypes.addressof(text), 4)
    text.raw = b"two."
    stream.copy(ctypes.addressof(text), memory.device, 4)
    assert text.raw == b"one."


def test_a_launched_graph_does_its_copies_and_fills_each_time(cuda, memory, stream):
    def work() -> None:
        memory.there_and_back()
        stream.fill(memory.device, 7, 4)
        stream.copy_rows(memory.seen + 1, 2, memory.device, 2, 1, 2)

    memory.write(b"one.")
    captured = stream.capture(work)
    stream.synchronize()
    assert memory.read() == bytes(4), "a capture does nothing"
    for text in (b"two.", b"six."):
        memory.write(text)
        captured.launch()
        stream.synchronize()
        assert memory.read() == bytes([text[0], 7, text[2], 7])
    captured.close()
    with pytest.raises(BackendError, match="cudaErrorInvalidValue"):
        captured.launch()


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("cuda.allocate(4)", "not allowed in a capture"),
        ("cuda.allocate_pinned(4)", "not allowed in a capture"),
        ('cuda.call("cudaFree", taken)', "not allowed in a capture"),
        ("stream.synchronize()", "waits in a capture"),
        ("other.synchronize()", "waits in a capture"),
        ("cuda.call('cudaEventSynchronize', event)", "waits in a capture"),
        ("stream.copy(taken, ctypes.addressof(here), 4)", "a captured copy of pageable memory"),
        ("stream._begin_capture()", "is being captured already"),
    ],
)
def test_a_capture_refuses(call, why, cuda, stream, read_report):
    """With the runtime's own status, and the capture is lost."""
    other, taken, here = CudaStream(cuda), cuda.allocate(4), ctypes.create_string_buffer(4)
    known = {"ctypes": ctypes, "cuda": cuda, "stream": stream, "other": other, "taken": taken, "here": here}
    known["event"] = cuda.call("cudaEventCreateWithFlags", 0)
    with pytest.raises(BackendError, match=r"cudaErrorStreamCapture|cudaErrorIllegalState"):
        stream.capture(lambda: eval(call, known))
    assert read_report().illegal[0].illegal == why
    stream.capture(lambda: stream.fill(taken, 0, 4)).close()  # usable as before


def test_refused_calls_break_the_capture(cuda, stream):
    def careless() -> None:
        with contextlib.suppress(BackendError):
            cuda.allocate(4)

    with pytest.raises(BackendError, match="cudaStreamEndCapture failed with cudaErrorStreamCaptureInvalidated"):
        stream.capture(careless)
    with pytest.raises(KeyError):
        stream.capture(lambda: {}["none"])
    stream.capture(lambda: None).close()  # usable as before


def test_other_threads_may_do_all_of_it(cuda, stream, read_report):
    def meanwhile() -> None:
        other = CudaStream(cuda)
        cuda.call("cudaFree", cuda.allocate(4))
        other.synchronize()

    with ThreadPoolExecutor(1) as pool:
        stream.capture(lambda: pool.submit(meanwhile).result()).close()
        stream._begin_capture()
        with pytest.raises(BackendError, match="cudaErrorStreamCaptureWrongThread"):
            pool.submit(cuda.call, "cudaStreamEndCapture", stream.handle).result()
        stream._abandon_capture()
    illegal = [call.illegal for call in read_report().illegal]
    assert illegal == ["another thread began its capture", "its capture is broken"]


def test_work_that_goes_past_the_capture_is_named(cuda, memory, stream, read_report):
    """CUDA allows it, and the graph lacks it."""
    other = CudaStream(cuda)
    stream.capture(lambda: other.fill(memory.device, 1, 4)).close()
    assert {call.illegal for call in read_report().illegal} == {"goes past the capture of this thread"}


def test_streams_join_a_capture_by_events_and_have_to_come_back(cuda, memory, stream):
    other, (forked, joined, outside) = CudaStream(cuda), (cuda.call("cudaEventCreateWithFlags", 0) for _ in range(3))

    def fork() -> None:
        cuda.call("cudaEventRecord", forked, stream.handle)
        cuda.call("cudaStreamWaitEvent", other.handle, forked, 0)
        other.fill(memory.seen, 3, 4)

    def fork_and_join() -> None:
        fork()
        cuda.call("cudaEventRecord", joined, other.handle)
        cuda.call("cudaStreamWaitEvent", stream.handle, joined, 0)

    stream.capture(fork_and_join).launch()
    stream.synchronize()
    assert memory.read() == bytes([3] * 4)
    with pytest.raises(BackendError, match="cudaErrorStreamCaptureUnjoined"):
        stream.capture(fork)
    cuda.call("cudaEventRecord", outside, other.handle)
    with pytest.raises(BackendError, match="cudaErrorStreamCaptureIsolation"):
        stream.capture(lambda: cuda.call("cudaStreamWaitEvent", stream.handle, outside, 0))


def test_out_of_bounds_accesses_are_named(cuda, memory, stream, read_report):
    stream.copy(memory.device, memory.given, 5)
    stream.synchronize()
    stream.copy_rows(memory.device, 1, memory.device, 1, 1, 4)
    stream.synchronize()
    illegal = [call.illegal for call in read_report().illegal]
    assert illegal == ["reaches behind an allocation", "copies between rows that overlap"]
    with pytest.raises(BackendError, match="cudaErrorInvalidValue"):
        cuda.call("cudaFree", memory.device + 4)


def test_memory_ends(cuda):
    with pytest.raises(OutOfDeviceMemoryError, match="the GPU has no room"):
        cuda.allocate(1 << 50)
    free, _ = cuda.memory()
    cuda.call("cudaFree", cuda.allocate(1 << 20))
    assert cuda.memory()[0] == free


def test_launches_belong_to_the_graph_that_runs(cuda, read_report, null):
    """What the log is read for, on calls whose number is known."""
    runtime, stream = null[0], CudaStream(cuda)
    buffer = cuda.allocate(64)

    def run(file: str, count: int) -> None:
        runtime.mark(f"run {file} digest")
        for _ in range(count):
            stream.fill(buffer, 0, 64)
        runtime.mark("ran")

    def step() -> None:
        stream.copy(buffer, buffer + 32, 32)
        run("draft.onnx", 3)
        run("target.slots.onnx", 2)
        run("program/accept.m1.onnx", 4)
        run("program/commit.onnx", 1)

    captured = [stream.capture(step), stream.capture(step)]
    runtime.mark("step some way")
    captured[0].launch()
    stream.synchronize()
    runtime.mark("stepped")
    runtime.mark("step another way")
    step()
    stream.synchronize()
    cuda.call("cudaFree", cuda.allocate(4))
    run("program/accept.m1.onnx", 1)
    runtime.mark("stepped")
    report = read_report()
    once = {"draft": 3, "target": 2, "accept": 4, "commit": 1, "copies": 1}
    first, second = report.steps
    assert (first.way, first.graphs, dict(first.launches), first.waits, first.memory) == ("some way", 1, once, [], [])
    assert (second.graphs, dict(second.launches)) == (0, once | {"accept": 5})
    assert [call.call for call in second.waits] == ["cudaStreamSynchronize"]
    assert [call.call for call in second.memory] == ["cudaMalloc", "cudaFree"]
    assert len(report.captured_twice) == 1 and "target.slots.onnx" in report.captured_twice[0]
    assert not report.illegal and len(report.threads) == 1


def test_nodes_that_work_on_more_than_shapes_are_distinguished():
    graph = onnx.parser.parse_graph("""
        g (float[N, 4] x, int64[N] rows) => (float[N, 4] y, int64[1] last)
        <int64[1] one = {1}>
        {
            [of_x] sizes = Shape (x)
            [first] n = Slice (sizes, one, one)
            [more] wanted = Add (n, one)
            [grown] y = Expand (x, wanted)
            [found] last = Gather (rows, one)
        }
    """)
    assert shape_arithmetic(graph) == {"of_x", "first", "more"}


@pytest.mark.parametrize(
    ("way", "missed"), [("Transpose (w)", ["product"]), ("Identity (w)", ["product"]), ("Relu (w)", [])]
)
def test_multiplications_that_dequantize_in_every_run_are_found(way, missed):
    graph = onnx.parser.parse_graph(f"""
        g (float[1, 4] x, int64[1] row) => (float[1, 4] y, float[1, 4] looked_up)
        <int8[4, 4] q = {{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}}, float scale = {{1.0}}>
        {{
            [weight] w = DequantizeLinear (q, scale)
            [turned] v = {way}
            [product] y = MatMul (x, v)
            [row_of] looked_up = Gather (w, row)
        }}
    """)
    assert not_fused(graph) == missed


def test_exceeded_budgets_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(test_gpu_dry_run, "BUDGET", tmp_path / "budget.json")
    within = {"medusa greedy": [3, 90, 50, 10, 5, 1, 0]}
    (problem,) = test_gpu_dry_run.over_budget("some x1", within)
    assert "no budget is recorded" in problem
    test_gpu_dry_run.record("some x1", within)
    test_gpu_dry_run.record("other x4", {"plain sampled": [0] * 7})
    assert test_gpu_dry_run.over_budget("some x1", within) == []
    assert test_gpu_dry_run.over_budget("some x1", {"medusa greedy": [2, 91, 61, 10, 5, 1, 1]}) == [
        "medusa greedy: acceptance is 61 launches; expected at most 60",
        "medusa greedy: 91 target (budget 90), 61 accept (budget 50), 1 waits (budget 0)",
    ]
