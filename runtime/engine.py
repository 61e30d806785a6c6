"""The engine: a loaded bundle that generates text for requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np

from specexport.contract.errors import BuildError, ContextLengthError, RequestError
from specexport.contract.manifest import GenerationRules, Manifest
from specexport.contract.methods import Method, MethodOptions, SpeculativeConfig, read_methods
from specexport.contract.tree import TokenTree
from specexport.contract.values import Progress, counted
from specexport.runtime.backend import DEFAULT_UTILIZATION, Backend, BackendOptions, Graph, open_backend
from specexport.runtime.bundle import Bundle
from specexport.runtime.constraint import Grammars
from specexport.runtime.logits import processors
from specexport.runtime.params import DEFAULT_MAX_TOKENS, SamplingParams, require_params
from specexport.runtime.prompt import EncodedPrompt, Prompt, PromptEncoder
from specexport.runtime.proposal import PLAIN_TREE, Opening, Proposer, SlotView, open_proposer
from specexport.runtime.request import Completion, Request, Stream, complete
from specexport.runtime.scheduler import Scheduler
from specexport.runtime.speculation.costs import CostCurve, Costs
from specexport.runtime.speculation.policy import MeasuredPolicy, SpeculationPolicy
from specexport.runtime.speculation.timing import MOST_NOISE, SECONDS, measure, stored_costs
from specexport.runtime.speculative import (
    DEFAULT,
    Speculative,
    SpeculativeLike,
    available_methods,
    bypasses_model,
    choose,
)
from specexport.runtime.text import TextStream

_WARM_UP_TOKENS = 32


class Engine:
    """Generates text from a bundle; create it with :meth:`load`.

    It has as many slots as the bundle's largest batch size, and runs that many requests together; others wait for a
    free slot. Its methods may be called from any thread, and a thread may have several streams. There is no background
    thread: a thread that reads a stream takes steps for all streams.

    Attributes:
        chat_template: the model's chat template; None if it has none.
        proposers: those of the methods, by name: the bundle's, the default first, then others that need no graph.
        encode: returns a prompt's tokens; see :meth:`~specexport.runtime.prompt.PromptEncoder.encode`.
        slots: number of requests that run together.
        costs: the costs of steps on this machine; None if each request speculates with its method's default.
    """

    def __init__(
        self,
        bundle: Bundle,
        backend: Backend,
        target: Graph,
        proposers: Mapping[str, Proposer],
        prefix_cache: bool = True,
        calibrate: bool = True,
        costs: CostCurve | None = None,
        max_model_len: int | None = None,
    ) -> None:
        self.manifest: Manifest = bundle.manifest
        self.max_model_len = max_model_len or self.manifest.max_seq_len
        self.tokenizer = bundle.tokenizer()
        self.chat_template = bundle.chat_template()
        self._encoder = PromptEncoder(self.manifest, self.tokenizer)
        self.encode = self._encoder.encode
        self._grammars = Grammars(
            self.tokenizer, self.manifest.target.vocab_size, self.manifest.tokenizer.eos_token_ids
        )
        self.backend = backend
        self._target = target
        self.slots = target.sizes[-1]
        self.proposers = dict(proposers)
        self._built = tuple(method.name for method in self.manifest.methods if method.name in proposers)
        self._program = program = backend.program(target, self.proposers)
        policy = SpeculationPolicy(self.manifest, self.proposers)
        if backend.execution != "host":  # on the host the first step takes 50 ms longer, and warming up six times that
            self._warm_up(Scheduler(program, policy, reuse=True))
        if costs is not None:
            self.costs: Costs | None = Costs(costs)
        else:
            self.costs = self._costs_here() if calibrate and self.proposers else None
        self._lookup: str | None = None
        if self.costs is not None:
            policy = MeasuredPolicy(self.manifest, self.proposers, self.costs, target.sizes)
            methods = self.methods.values()
            self._lookup = next((m.name for m in methods if not m.needs_graph and not m.takes_hypothesis), None)
        self._scheduler = Scheduler(program, policy, reuse=prefix_cache)

    @classmethod
    def load(
        cls,
        bundle: str | Path | Bundle,
        *,
        threads: int | None = None,
        check_hashes: bool = True,
        methods: SpeculativeConfig = (),
        max_batch_size: int | None = None,
        max_model_len: int | None = None,
        prefix_cache: bool = True,
        calibrate: bool = True,
        costs: CostCurve | None = None,
        cache_graphs: bool = True,
        backend: str | None = None,
        gpu_memory_utilization: float = DEFAULT_UTILIZATION,
    ) -> Engine:
        """Opens a bundle and loads its graphs.

        Options that are not described here are those of :class:`~specexport.options.EngineOptions`.

        Args:
            bundle: a folder written by ``specexport build``, or an opened bundle.
            methods: options of methods that need no graph, such as ``{"method": "suffix", "store_tokens": 100_000}``,
                in place of the bundle's or the defaults; see :func:`~specexport.contract.methods.read_methods`.
            max_batch_size: number of requests that run together, one of the bundle's batch sizes; None for its largest,
                on a GPU for the smallest that engines were compiled for (``compile --engine-batch-sizes``).
            prefix_cache: reuse the cache rows of an earlier text for a prompt that begins like it.
            costs: the costs of steps, instead of measuring them.

        Raises:
            BundleError: the bundle is incomplete, altered or too new.
            BackendError: its backend is not installed, refuses a graph, or has no device or too little memory.
            BuildError: a method's options are wrong, it needs a graph, or the bundle was built for fewer tokens.
            RequestError: the bundle was not built for the batch size.
        """
        opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle, check_hashes=check_hashes)
        manifest = opened.manifest
        if max_model_len is not None and max_model_len > manifest.max_seq_len:
            raise BuildError(
                f"max_model_len is {max_model_len}; expected at most {manifest.max_seq_len}, for which this bundle was "
                "built",
                param="max_model_len",
            )
        available = available_methods(manifest, read_methods(methods))
        running = open_backend(opened, BackendOptions(backend, threads, gpu_memory_utilization, cache_graphs))
        try:
            slots = running.default_slots if max_batch_size is None else max_batch_size
            if slots not in manifest.batch_sizes:
                built = ", ".join(map(str, manifest.batch_sizes))
                raise RequestError(
                    f"max_batch_size is {slots}; the bundle was built for {built} (build --max-batch-size)",
                    param="max_batch_size",
                )
            target = running.open(manifest.target, slots, manifest.target_signature.buffers)
            opening = Opening(opened, running, slots)
            proposers = {method.name: open_proposer(method, opening) for method in available}
            return cls(opened, running, target, proposers, prefix_cache, calibrate, costs, max_model_len)
        except BaseException:
            running.close()
            raise

    @property
    def methods(self) -> dict[str, Method]:
        return {name: proposer.method for name, proposer in self.proposers.items()}

    @property
    def inexact(self) -> str:
        """The reason why texts may differ from plain decoding's at nearly equally likely tokens; empty if exact."""
        return self.backend.inexact(self._target)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an engine cannot be pickled or copied; open the bundle in every process that uses it")

    def close(self) -> None:
        """Frees the models and their caches; later requests are refused.

        Streams that this thread started end, and requests that wait for a slot fail. Running requests of other threads
        finish first, so that the rest of their output can still be read.
        """
        self._scheduler.close()
        if hasattr(self, "_target"):
            del self._target, self._program
            self.proposers.clear()
            self.backend.close()

    def prepare_grammars(self) -> None:
        """Reads the tokenizer for schemas and grammars now, for which the first constrained output would wait."""
        self._grammars.prepare()

    def stall_reason(self, timeout: float) -> str | None:
        """The reason why requests make no progress, such as a turn longer than ``timeout`` seconds; None if they do."""
        return self._scheduler.stall_reason(timeout)

    def params(self, length: int | None = DEFAULT_MAX_TOKENS, **overrides: Any) -> SamplingParams:
        """The model's own sampling parameters, as its checkpoint states them, with some overridden.

        ``length`` is the greatest number of tokens if neither caller nor model sets it; None for as many as the context
        holds. Overrides replace the model's length limits: ``max_tokens`` its ``max_length``; ``min_tokens``, a smaller
        ``max_tokens``, a schema or a grammar, which ends the text, its ``min_length`` and ``min_tokens``.

        Raises:
            RequestError: a value is out of range; names the field.
        """
        model = msgspec.structs.asdict(self.manifest.generation)
        rules: GenerationRules = model["rules"]
        if "max_tokens" in overrides:
            rules = msgspec.structs.replace(rules, max_length=None)
        elif model["max_tokens"] is None:
            model["max_tokens"] = rules.max_length or length
        if "min_tokens" in overrides or any(overrides.get(name) is not None for name in ("json_schema", "grammar")):
            rules = msgspec.structs.replace(rules, min_length=0)
            model["min_tokens"] = 0
        max_tokens = overrides.get("max_tokens", model["max_tokens"])
        if isinstance(max_tokens, int):
            model["min_tokens"] = min(model["min_tokens"], max(0, max_tokens))
        return SamplingParams(**model | {"rules": rules} | overrides)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, speculative: SpeculativeLike | None = None
    ) -> Stream:
        """Starts a request; iterating the returned stream yields its text.

        Args:
            prompt: text, token ids, or an :class:`~specexport.runtime.prompt.EmbedsPrompt`, which holds embeddings.
                A draft model reads no embeddings: such a request takes the bundle's first method that can read them, or
                decodes plainly.
            params: None for the model's own, :meth:`params`.
            speculative: how to speculate: the name of a method, a mapping such as ``{"method": "ngram",
                "num_speculative_tokens": 4}`` or a :class:`~specexport.runtime.speculative.Speculative`; ``PLAIN``, or
                0 draft tokens, decodes plainly. None for the engine's default.

        Raises:
            RequestError: the prompt does not fit the context, the method or the tree was not built, the method's
                model cannot read the prompt's embeddings, or a hypothesis does not suit the method or is missing.
            ClosedError: the engine is closed.
        """
        self._scheduler.require_open()
        require_params(params)
        params = params or self.params()
        if params.n != 1:
            raise RequestError(f"n is {params.n}; a stream is one output: start several, or use LLM", param="n")
        encoded_prompt = self.encode(prompt)
        embedded = isinstance(encoded_prompt, EncodedPrompt)
        self._require_room(len(encoded_prompt), params)
        if params.prompt_logprobs is not None and embedded:
            raise RequestError(
                "prompt_logprobs is set, but the prompt has embeddings, which have none; leave it out",
                param="prompt_logprobs",
            )
        unset = (name for name in ("posterior_threshold", "posterior_alpha") if getattr(params, name) is None)
        params = params.replace(**{name: getattr(self.manifest.generation, name) for name in unset})
        options = Speculative.of(speculative)
        free = self.costs is not None
        defaults = self._built if self._lookup is None else (*self._built, self._lookup)
        chosen, tree = choose(options, self.methods, defaults, params, embedded, free)
        expected: Sequence[int] = ()
        if options.hypothesis is not None:
            expected = self._encoder.continuation(prompt, options.hypothesis)
        request = self._request(encoded_prompt, params, chosen, tree, expected, options.options)
        request.fixed = options.num_speculative_tokens is not None
        if options == DEFAULT and chosen not in (None, self._lookup):
            request.lookup = self._lookup
        request.bypass = options.hypothesis is not None and bypasses_model(params, options.hypothesis_entropy)
        return Stream(self._scheduler, request)

    def wait_for_end(self, streams: Sequence[Stream]) -> None:
        """Returns when one of several streams has ended; it takes steps for them meanwhile."""
        self._scheduler.wait_for(lambda: any(stream.ended for stream in streams))

    def _require_room(self, length: int, params: SamplingParams) -> None:
        """Refuses a prompt of ``length`` tokens if it leaves no room for an output."""
        limit, longest = self.max_model_len, params.rules.max_length
        if length + (params.max_tokens != 0) > limit:
            included = "" if params.max_tokens == 0 else ", output included"
            wider = "build with a larger --max-seq-len" if limit == self.manifest.max_seq_len else "raise max_model_len"
            raise ContextLengthError(
                f"the prompt has {counted(length, 'token')}, but the context holds {limit}{included}; shorten the "
                f"prompt or {wider}",
                param="prompt",
            )
        if longest is not None and length >= longest and params.max_tokens:
            raise RequestError(
                f"the prompt has {length} tokens, but the model's own max_length is {longest}, output included; "
                "shorten the prompt or set max_tokens",
                param="prompt",
            )

    def _request(
        self,
        prompt: list[int] | EncodedPrompt,
        params: SamplingParams,
        method: str | None,
        tree: TokenTree,
        hypothesis: Sequence[int] = (),
        options: MethodOptions | None = None,
    ) -> Request:
        embeddings = prompt if isinstance(prompt, EncodedPrompt) else None
        tokens = prompt if isinstance(prompt, list) else list(prompt.tokens)
        rules, vocab_size, longest = params.rules, self.manifest.target.vocab_size, self.max_model_len
        remaining = min(rules.max_length or longest, longest) - len(tokens)
        remaining = remaining if params.max_tokens is None else min(params.max_tokens, remaining)
        hypothesis = hypothesis[: max(0, remaining) + 1]  # reading it takes memory; one token more shows a cut
        view = SlotView(0, tokens, params, np.random.default_rng(params.seed), tree, hypothesis, method, options)
        view.embeddings = embeddings
        # A grammar ends the text by itself.
        min_tokens = 0 if params.constrained else max(params.min_tokens, rules.min_length - len(tokens))
        ends = tuple(params.stop_token_ids) + (() if params.ignore_eos else self.manifest.tokenizer.eos_token_ids)
        view.processors = processors(params, tokens, ends, vocab_size, min_tokens, remaining, self._grammars)
        text = TextStream(
            self.tokenizer,
            params.stop,
            stop_after=params.stop_after,
            before=tokens,
            min_tokens=min_tokens,
            skip_special_tokens=params.skip_special_tokens,
        )
        request = Request(view, text, remaining, ends)
        request.stats.execution = self.backend.execution
        return request

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, speculative: SpeculativeLike | None = None
    ) -> Completion:
        """Runs a request to its end; see :meth:`stream`."""
        return complete(self.stream(prompt, params, speculative))

    def _costs_here(self) -> Costs:
        """The costs of steps on this machine, stored earlier or measured now."""
        stored = stored_costs(self.manifest, self.backend, self.slots).load()
        return Costs(self.calibrate() if stored is None else stored, refined=True)

    def calibrate(self, seconds: float = SECONDS, progress: Progress | None = None) -> CostCurve:
        """Measures the costs of steps on this machine, in about ``seconds``, and stores them for later engines.

        They are not stored if the machine was too busy. Nothing else may use the engine meanwhile.
        """
        built = {
            name: self.proposers[name] for name in self._built if self._program.fuses or self.methods[name].needs_graph
        }
        costs = measure(self.manifest, self._program, self._target, built, seconds, progress)
        if costs.noise <= MOST_NOISE:
            stored_costs(self.manifest, self.backend, self.slots).save(costs)
        return costs

    def _warm_up(self, scheduler: Scheduler) -> None:
        """Runs a plain step and one of each method, so that the first request does not pay for buffers and pages."""
        # One token repeated, so that look-ups have matches, and long enough for the longest chain.
        start = self.encode([0] * max(2, min(_WARM_UP_TOKENS, self.manifest.max_seq_len - 2)))
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        trees = {name: self.methods[name].token_trees()[0] for name in self._built or list(self.methods)[:1]}
        for method, tree in ((None, PLAIN_TREE), *trees.items()):
            for _ in Stream(scheduler, self._request(list(start), params, method, tree, start)):
                pass
