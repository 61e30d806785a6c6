"""Loads a bundle on the null GPU and steps every method of it, for ``tests/test_gpu_dry_run.py``.

    python -m tests.null_cuda.dry_run BUNDLE SLOTS REPORT

It runs where ``install.environment`` says, with NULL_CUDA_LOG set, and writes what it found of the sessions as JSON:
``{"execution": "graph per step", "problems": []}``. What was called is in the log; see ``log``.
"""

import hashlib
import json
import shutil
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime

from specexport.contract.methods import method_name, method_type
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.backends.cuda.device_program import DeviceProgram
from specexport.runtime.request import complete
from specexport.runtime.speculative import PLAIN
from specexport.runtime.step import StepProgram
from tests.null_cuda.bindings import NullRuntime, install, speculate_always
from tests.streams import started

CUDA = "CUDAExecutionProvider"
STEPS = 8
GREEDY = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True)
SAMPLED = GREEDY.replace(temperature=0.9, top_p=0.95, top_k=40, seed=5)
SAMPLINGS = {"greedy": GREEDY, "sampled": SAMPLED}
PROMPT = [*[0] * 8, 5, 6, 7]
"""It ends in text, for drafts with another tokenizer, and null kernels go on with zeros, so that look-ups find some."""
TEXT_METHOD = "ngram"
"""It needs no graph, so every bundle has it: in most of them its chains are longer than what the device can decide."""
SPLIT = "the host takes the steps, as GPUs share the target"
_SHAPES = frozenset({"Shape", "Size"})


class Sessions:
    """What was found of onnxruntime's sessions.

    Attributes:
        problems: what is wrong with them.
    """

    def __init__(self, runtime: NullRuntime, bundle: Path) -> None:
        self.problems: list[str] = []
        self._bundle = bundle
        self._mark = runtime.mark
        self._kept = tempfile.TemporaryDirectory()

    def watch(self) -> None:
        """Looks at every session that is opened from here on."""
        sessions, plain = self, onnxruntime.InferenceSession

        class Session(plain):
            def __init__(self, path: Any, options: Any = None, **arguments: Any) -> None:
                options = options or onnxruntime.SessionOptions()
                self._file = sessions.name(path)
                optimized = sessions.beside(Path(path))
                options.optimized_model_filepath = str(optimized)
                options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
                sessions._mark(f"run {self._file} opening")
                try:
                    super().__init__(path, options, **arguments)
                finally:
                    sessions._mark("ran")
                sessions.opened(self._file, self, onnx.load(optimized, load_external_data=False))
                optimized.unlink()

            def io_binding(self) -> Any:
                return Binding(self)

            def run_with_iobinding(self, binding: Any, options: Any = None) -> Any:
                sessions._mark(f"run {self._file} {binding.digest}")
                try:
                    return super().run_with_iobinding(binding, options)
                finally:
                    sessions._mark("ran")

        onnxruntime.InferenceSession = Session

    def beside(self, path: Path) -> Path:
        """Where onnxruntime may write the graph that it made of a file: it wants the weights there too."""
        folder = Path(self._kept.name) / path.parent.name
        if not folder.exists():
            folder.mkdir()
            for weights in path.parent.glob("*.bin"):
                shutil.copy(weights, folder)
        return folder / path.name

    def name(self, path: Any) -> str:
        """A session's file in the bundle."""
        path = Path(path)
        return path.relative_to(self._bundle).as_posix() if path.is_relative_to(self._bundle) else path.name

    def opened(self, file: str, session: Any, optimized: onnx.ModelProto) -> None:
        """Looks at where a session's nodes run, and what became of them."""
        elsewhere = {
            node.name: node.op_type
            for part in session.get_provider_graph_assignment_info()
            if part.ep_name != CUDA
            for node in part.get_nodes()
        }
        of_shapes = shape_arithmetic(optimized.graph)
        away = {name: kind for name, kind in elsewhere.items() if name not in of_shapes}
        if away:
            kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(away.values()).items())
            self.problems.append(f"{file}: nodes on the CPU: {kinds} ({', '.join(sorted(away)[:3])})")
        if unfused := not_fused(optimized.graph):
            self.problems.append(
                f"{file}: {len(unfused)} of DequantizeLinear and MatMul are not MatMulNBits: {unfused[0]}"
            )
        copies = Counter(node.op_type for node in optimized.graph.node if node.op_type.startswith("Memcpy"))
        if copies:
            self.problems.append(f"{file}: {', '.join(f'{count} {kind}' for kind, count in copies.items())}")


class Binding(onnxruntime.IOBinding):
    """Remembers what is bound, so that runs over the same memory are known to be the same."""

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self._bound: dict[str, str] = {}
        self.digest = ""

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if not name.startswith("bind_"):
            return method

        def bind(kind: str, *arguments: Any, **named: Any) -> Any:
            values = [*arguments, *named.values()]
            self._bound[kind] = " ".join(str(v.data_ptr() if hasattr(v, "data_ptr") else v) for v in values)
            self.digest = hashlib.sha256(repr(sorted(self._bound.items())).encode()).hexdigest()[:16]
            return method(kind, *arguments, **named)

        return bind


def shape_arithmetic(graph: onnx.GraphProto) -> set[str]:
    """Names of the nodes whose inputs follow from shapes and constants alone: onnxruntime computes them on the CPU."""
    known, names = {initializer.name for initializer in graph.initializer}, set()
    for node in graph.node:
        if node.op_type in _SHAPES or all(name in known for name in node.input if name):
            known.update(node.output)
            names.add(node.name)
    return names


def not_fused(graph: onnx.GraphProto) -> list[str]:
    """Names of the multiplications whose weight is dequantized in every run."""
    made_by = {name: node for node in graph.node for name in node.output}

    def dequantized(name: str) -> bool:
        node = made_by.get(name)
        if node is None or node.op_type not in ("DequantizeLinear", "Transpose", "Cast", "Reshape", "Identity"):
            return False
        return node.op_type == "DequantizeLinear" or dequantized(node.input[0])

    kinds = ("MatMul", "Gemm", "FusedMatMul")
    return [node.name for node in graph.node if node.op_type in kinds and any(map(dequantized, node.input[:2]))]


class DryRun:
    """Steps an engine.

    Attributes:
        asked: the way to step, ``medusa greedy``.
        problems: what failed.
        stepping: whether a step is running.
    """

    def __init__(self, runtime: NullRuntime, engine: Engine) -> None:
        self._engine = engine
        self.asked = ""
        self.stepping = False
        self.problems: list[str] = []
        for program in (DeviceProgram, StepProgram):
            self._mark_steps(runtime, program)

    def _mark_steps(self, runtime: NullRuntime, program: Any) -> None:
        step = program.step

        def marked(self: Any, views: Any) -> Any:
            if run.stepping:  # a program may leave a step to another one
                return step(self, views)
            run.stepping = True
            runtime.mark(f"step {run.asked}")
            try:
                return step(self, views)
            finally:
                runtime.mark("stepped")
                run.stepping = False

        run = self
        program.step = marked

    def all(self) -> None:
        """Every method, greedily and sampled; the default and plain decoding on another thread; what measuring runs."""
        built = [method_name(method) for method in self._engine.manifest.methods]
        for name in dict.fromkeys(("plain", *built, TEXT_METHOD)):
            # Where the host samples, texts of null logits repeat nothing that could be looked up.
            if not sum([self.way(name, sampling) for sampling in SAMPLINGS]) and name != "plain":
                self.problems.append(f"{name}: nothing was drafted")
        for name in dict.fromkeys(("plain", *built[:1])):
            for sampling in SAMPLINGS:
                other = threading.Thread(target=self.way, args=(name, sampling))
                other.start()
                other.join()
        self.asked = "calibration greedy"
        self._engine.calibrate(seconds=0.01)

    def way(self, name: str, sampling: str) -> int:
        """As many requests as there are slots, all of a method and a way to sample; how many tokens were drafted."""
        self.asked = f"{name} {sampling}"
        arguments: Any = PLAIN if name == "plain" else {"method": name}
        if name != "plain" and method_type(name).__name__ == "Hypothesis":
            arguments = {"hypothesis": [0] * STEPS}
        try:
            slots = range(self._engine.slots)
            params = [SAMPLINGS[sampling].replace(seed=slot) for slot in slots]
            streams = started(self._engine.stream([slot + 3, *PROMPT], params[slot], arguments) for slot in slots)
            done = [complete(stream) for stream in streams]
        except Exception as error:
            self.problems.append(f"{self.asked}: {type(error).__name__}: {error}")
            return 0
        return sum(completion.stats.drafted for completion in done)


def main(arguments: Sequence[str]) -> None:
    """Loads, steps and writes the report."""
    bundle, slots, report = Path(arguments[0]), int(arguments[1]), Path(arguments[2])
    # Other ranks are processes of their own, on such a GPU each; one log is one process's.
    start = "import os\nfrom tests.null_cuda.bindings import NullRuntime, install\n"
    start += "os.environ.pop('NULL_CUDA_LOG', None)\ninstall(NullRuntime())\n"
    (report.parent / "sitecustomize.py").write_text(start, encoding="utf-8")
    sys.path.insert(0, str(report.parent))
    onnxruntime.set_default_logger_severity(3)
    runtime = install(NullRuntime())
    speculate_always()
    sessions = Sessions(runtime, bundle)
    sessions.watch()
    document: dict[str, Any] = {"execution": "", "problems": sessions.problems}
    runtime.mark("load")
    try:
        engine = Engine.load(bundle, backend="onnxruntime-cuda", max_batch_size=slots, calibrate=False)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        sessions.problems.append(f"load: {type(error).__name__} at {where.name}: {error}")
    else:
        with engine:
            run = DryRun(runtime, engine)
            run.all()
            backend: Any = engine.backend
            sessions.problems += run.problems
            ranks = engine.manifest.target.ranks
            # A bundle that was built without methods has no graphs to decide with.
            document["execution"] = backend.execution if engine.manifest.program or ranks else "host"
            if backend.fallback != (SPLIT if ranks else ""):
                sessions.problems.append(f"falls back: {backend.fallback}")
    report.write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
