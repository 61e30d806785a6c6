"""The CUDA layer against a recording stand-in (``tests/cuda_stand_in.py``): there is no GPU here."""

import gc
import inspect
import itertools
import re

import numpy as np
import pytest

from specexport.contract.errors import BackendError
from specexport.contract.model import CacheLayer
from specexport.runtime.backends.cuda.api import Cuda, CudaGraph, CudaStream, OutOfDeviceMemoryError
from specexport.runtime.backends.cuda.cache import DeviceCache, NewRows
from specexport.runtime.backends.cuda.memory import Device, MemoryPlan, StagingBuffers, block_size
from tests.cuda_stand_in import FRESH, StandIn, real
from tests.null_cuda.bindings import NullRuntime


@pytest.fixture
def fake() -> StandIn:
    return StandIn()


@pytest.fixture
def cuda(fake: StandIn) -> Cuda:
    return Cuda(fake)


@pytest.fixture
def device(cuda: Cuda) -> Device:
    return Device.share(cuda, 0.9)


def _staged(device: Device, arrays: dict[str, np.ndarray]) -> tuple[StagingBuffers, object]:
    plan = MemoryPlan()
    plan.add("all", block_size(arrays))
    memory = plan.allocate(device, "a test")
    return StagingBuffers(device, arrays, memory["all"]), memory


@pytest.mark.parametrize("kind", [StandIn, NullRuntime])
def test_stand_ins_have_the_signatures_of_the_real_package(kind):
    """And so what is tested against them is called as the real calls are."""
    calls = [name for name in vars(kind) if name.startswith("cuda") and inspect.isfunction(vars(kind)[name])]
    assert len(calls) > 25
    for name in calls:
        declared = (getattr(real, name).__doc__ or "").strip().splitlines()[0]
        arguments = re.fullmatch(rf"{name}\((.*)\)", declared)
        assert arguments is not None, declared
        expected = [re.split(r"[ :]+", part.strip()) for part in arguments[1].split(",") if part.strip()]
        # "size_t count" and "kind: cudaMemcpyKind" alike
        pairs = zip(expected, arguments[1].split(","), strict=False)
        names = [part[0] if ":" in whole else part[-1] for part, whole in pairs]
        assert [n.lstrip("*") for n in names] == list(inspect.signature(getattr(kind, name)).parameters)[1:], name


def test_real_package_accepts_arguments_and_reports_no_driver():
    """On a machine without a GPU: the real calls, with arguments of the kinds we pass, and their real statuses."""
    status, count = real.cudaGetDeviceCount()
    if not int(status) and count:
        pytest.skip("there is a GPU here; python -m benchmarks.gpu tests on it")
    with pytest.raises(BackendError, match=r"no NVIDIA driver was found.*--backend onnxruntime|no GPU can be used"):
        Cuda.load()
    cuda = object.__new__(Cuda)
    cuda.bindings = real  # what Cuda.__init__ refuses to make without a device
    stream = object.__new__(CudaStream)
    stream._cuda, stream._rt, stream.handle = cuda, real, 16
    captured = CudaGraph(cuda, 16, 16)
    captured.close.detach()
    kinds = "no NVIDIA driver|no GPU|supports CUDA"
    for call in (
        lambda: cuda.allocate(64),
        lambda: cuda.call("cudaFree", 256),
        lambda: cuda.allocate_pinned(64),
        lambda: cuda.call("cudaFreeHost", 256),
        lambda: CudaStream(cuda),
        lambda: stream.synchronize(),
        lambda: stream.copy(256, 512, 8),
        lambda: stream.copy_rows(256, 8, 512, 8, 8, 1),
        lambda: stream.fill(256, 0, 8),
        lambda: stream.capture(lambda: None),
        captured.launch,
        lambda: cuda.call("cudaStreamEndCapture", 16),
        lambda: cuda.call("cudaGraphInstantiate", 16, 0),
        lambda: cuda.call("cudaGraphExecDestroy", 16),
        lambda: cuda.call("cudaEventCreateWithFlags", 0),
        lambda: cuda.call("cudaEventRecord", 16, 16),
        lambda: cuda.call("cudaEventSynchronize", 16),
        lambda: cuda.call("cudaEventElapsedTime", 16, 16),
        lambda: cuda.memory(),
    ):
        with pytest.raises(BackendError, match=kinds):
            call()
    stream._abandon_capture()


def test_errors_say_what_to_do(fake, monkeypatch):
    statuses = real.cudaError_t
    monkeypatch.setattr(fake, "cudaDriverGetVersion", lambda: (statuses.cudaSuccess, 12040), raising=False)
    for status, message in (
        (statuses.cudaErrorInsufficientDriver, r"supports CUDA 12\.4, but cuda-bindings is for 13\.0.*bindings==12"),
        (statuses.cudaErrorNoDevice, "CUDA_VISIBLE_DEVICES"),
    ):
        with monkeypatch.context() as patch, pytest.raises(BackendError, match=message):
            patch.setattr(fake, "cudaGetDeviceCount", lambda status=status: (status, None))
            Cuda(fake)
    cuda = Cuda(fake)
    assert str(cuda.device) == "Stand-in (compute capability 8.9)"
    with pytest.raises(OutOfDeviceMemoryError, match=r"no room for 2\.00 GiB: 1\.00 of 1\.00 GiB are free"):
        cuda.allocate(2 << 30)


def test_budget_counts_other_requests_tokens(cuda, fake):
    fake.cudaMalloc(512 << 20)
    device = Device.share(cuda, 0.75)
    assert device.budget.available == 256 << 20
    plan = MemoryPlan()
    plan.add("cache", 257 << 20)
    with pytest.raises(OutOfDeviceMemoryError) as refused:
        plan.allocate(device, "the target's cache")
    for part in ("the target's cache needs 0.25 GiB", "0.25 GiB are left", "75%", "0.50 GiB were taken by others"):
        assert part in str(refused.value)
    assert fake.used() == 512 << 20


def test_plan_takes_everything_at_once(device, fake):
    plan = MemoryPlan()
    for name, nbytes in (("a", 1000), ("b", 1), ("shared", 10), ("shared", 300), ("none", 0)):
        plan.add(name, nbytes)
    memory = plan.allocate(device, "a test")
    assert fake.calls.count("cudaMalloc") == 1
    regions = [memory[name] for name in ("a", "b", "shared")]
    assert all(region.address % 256 == 0 for region in regions)
    assert [region.nbytes for region in regions] == [1000, 1, 300]
    assert all(x.address + x.nbytes <= y.address for x, y in itertools.pairwise(regions))
    memory.close()
    memory.close()
    device.stream.close()
    assert fake.leaks == []


def test_nothing_outlives_its_last_reference(cuda, fake):
    def use() -> None:
        device = Device.share(cuda, 0.9)
        staged, memory = _staged(device, {"x": np.zeros(7)})
        stream = device.stream
        captured = stream.capture(staged.upload)
        captured.launch()
        stream.synchronize()
        assert memory is not None
        assert len(fake.leaks) == 4
        stream.close()
        stream.close()

    use()
    gc.collect()
    assert fake.leaks == []


def test_staged_arrays_travel_in_one_copy(device, fake):
    arrays = {"ids": np.arange(5), "mask": np.eye(3, dtype=np.bool_), "empty": np.zeros((0, 4), np.float32)}
    staged, memory = _staged(device, arrays)
    stream = device.stream
    fake.calls.clear()
    staged.upload()
    ids = staged.device["ids"]
    assert fake.array(ids.address, np.uint8, (8,)).tolist() == [FRESH] * 8  # not yet: nobody waited
    stream.synchronize()
    assert fake.calls == ["cudaMemcpyAsync", "cudaStreamSynchronize"]
    for name, array in arrays.items():
        tensor = staged.device[name]
        assert tensor.address % 256 == 0
        if array.size:
            np.testing.assert_array_equal(fake.array(tensor.address, tensor.dtype, tensor.shape), array)
    staged.host["ids"][:] = 0
    staged.download()
    stream.synchronize()
    assert staged.host["ids"].tolist() == [0, 1, 2, 3, 4]
    assert memory is not None


def test_stale_addresses_are_noticed(device):
    """Of the stand-in itself: what it is trusted to find, it finds."""
    staged, memory = _staged(device, {"x": np.arange(4)})
    stream = device.stream
    captured = stream.capture(staged.upload)
    memory.close()
    captured.launch()
    with pytest.raises(AssertionError, match="given back"):
        stream.synchronize()
    with pytest.raises(AssertionError, match="no allocation"):
        device.stream.copy(staged.device["x"].address - (1 << 40), staged.device["x"].address, 1)


LAYERS = (CacheLayer(heads=2, key_size=3, value_size=5), CacheLayer(heads=2, key_size=3, value_size=3))
SIZES = (8, 12, 20)
FED = 6


class Caches:
    """A cache on the device beside what it should hold: by layer and kind ``[B,Hkv,S,D]``."""

    def __init__(self, cuda: Cuda, fake: StandIn, batch: int, fed: int) -> None:
        device = Device.share(cuda, 0.9)
        self.fake, self.stream = fake, device.stream
        self.cache = DeviceCache(device, LAYERS, batch, np.dtype(np.float32), SIZES, fed)
        plan = MemoryPlan()
        self.cache.plan(plan)
        self.memory = plan.allocate(device, "a test")
        self.cache.place(self.memory)
        self.stream.synchronize()

    def arrays(self, *, new: int = 0) -> dict[str, np.ndarray]:
        self.stream.synchronize()
        slots = range(self.cache._batch)
        device_tensors = self.cache.new_rows(new, slots) if new else self.cache.tensors(self.cache.rows, slots)
        return {name: self.fake.array(t.address, t.dtype, t.shape) for name, t in device_tensors.items()}

    def write(self, arrays: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng(seed)
        for array in arrays.values():
            array[...] = random.standard_normal(array.shape)
        return {name: array.copy() for name, array in arrays.items()}


@pytest.fixture(params=[1, 3])
def caches(cuda: Cuda, fake: StandIn, request: pytest.FixtureRequest) -> Caches:
    return Caches(cuda, fake, request.param, FED)


def test_cache_starts_empty_and_grows_in_place(caches, fake):
    assert all((array == 0).all() for array in caches.arrays().values())
    before = caches.write(caches.arrays(), 0)
    allocations = len(fake.allocations)
    for old, size in itertools.pairwise(SIZES):
        caches.cache.resize(size)
        after = caches.arrays()
        for name, array in after.items():
            assert array.shape[2] == size
            np.testing.assert_array_equal(array[:, :, : SIZES[0]], before[name][:, :, : SIZES[0]], err_msg=f"{old}")
    assert caches.cache.nbytes == sum(array.nbytes for array in after.values())
    caches.cache.resize(SIZES[0])
    for name, array in caches.arrays().items():
        np.testing.assert_array_equal(array, before[name])
    assert len(fake.allocations) == allocations


@pytest.mark.parametrize("nodes", [[0], [0, 1, 2], [0, 2, 3, 5], [0, 1, 4], [0, 5], []])
def test_rows_of_a_path_are_put_together(caches, nodes):
    slot, past = 0 if caches.cache._batch == 1 else 1, 2
    before = caches.write(caches.arrays(), 1)
    caches.cache.move(slot, past, nodes, None)
    for name, array in caches.arrays().items():
        expected = before[name].copy()
        expected[slot, :, past : past + len(nodes)] = before[name][slot][:, [past + node for node in nodes]]
        np.testing.assert_array_equal(array[slot, :, : past + len(nodes)], expected[slot, :, : past + len(nodes)])
        others = [s for s in range(array.shape[0]) if s != slot]
        np.testing.assert_array_equal(array[others], before[name][others])


@pytest.mark.parametrize("nodes", [[0], [0, 1, 2], [0, 2, 3, 5], [0, 1, 4]])
def test_new_rows_are_copied_behind_the_old(caches, nodes):
    slot, past = caches.cache._batch - 1, 2
    before = caches.write(caches.arrays(), 2)
    new = caches.write(caches.arrays(new=FED), 3)
    caches.cache.move(slot, past, nodes, NewRows(FED, range(caches.cache._batch)))
    for name, array in caches.arrays().items():
        expected = before[name].copy()
        expected[slot, :, past : past + len(nodes)] = new[name][slot][:, nodes]
        np.testing.assert_array_equal(array, expected)


def test_rows_of_some_slots_alone(cuda, fake):
    """Windows of a cache, a run for one slot of three, and rows that one slot takes over from another."""
    caches = Caches(cuda, fake, 3, FED)
    before = caches.write(caches.arrays(), 4)
    for name, window in caches.cache.tensors(caches.cache.rows, range(1, 3)).items():
        np.testing.assert_array_equal(fake.array(window.address, window.dtype, window.shape), before[name][1:])
    alone = range(2, 3)
    rows = caches.cache.new_rows(FED, alone).items()
    new = {name: fake.array(tensor.address, tensor.dtype, tensor.shape) for name, tensor in rows}
    new = caches.write(new, 5)
    caches.cache.move(2, 1, [0, 2], NewRows(FED, alone))
    caches.cache.copy(2, 0, 3)
    for name, array in caches.arrays().items():
        expected = before[name].copy()
        expected[2, :, 1:3] = new[name][0][:, [0, 2]]
        expected[0, :, :3] = expected[2, :, :3]
        np.testing.assert_array_equal(array, expected)


def test_a_chain_lowered_natively_costs_nothing(caches, fake):
    fake.calls.clear()
    caches.cache.move(0, 2, [0, 1, 2, 3], None)
    assert fake.calls == []
