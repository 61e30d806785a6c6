"""The speculation of a request: its options, the choice of its method and tree, and a bundle's methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from specexport.contract.errors import BuildError, RequestError, SpecExportError
from specexport.contract.manifest import Manifest
from specexport.contract.methods import (
    Method,
    MethodOptions,
    TextMethod,
    for_bundle,
    method_name,
    method_type,
    options_type,
    read_method,
    text_methods,
    verified_widths,
    with_trees,
)
from specexport.contract.options import Options, option
from specexport.contract.tree import TokenTree
from specexport.contract.values import plain, shown, token_ids
from specexport.runtime.params import SamplingParams
from specexport.runtime.proposal import PLAIN_TREE

_speculation = partial(option, group="speculation")


class Speculative(Options, frozen=True, kw_only=True):
    """Options of a request's speculation; by default the engine's.

    Attributes:
        method: how to speculate: a method the bundle was built for, or one that needs no graph, such as ngram or
            suffix; auto for the default, in whose place steps may look draft tokens up in the text where that pays
            (default: the bundle's first).
        num_speculative_tokens: draft tokens a step, one of the numbers it was built for; 0 decodes plainly (default: as
            many as pay on this machine).
        hypothesis: the expected output, text or token ids, verified instead of a draft (default: none).
        hypothesis_entropy: the greatest entropy with which the hypothesis was written, in nats; for --entropy-threshold
            (default: unknown).
        options: the method's other keys, for a method that needs no graph; None for those it was opened with.
    """

    method: Annotated[str | None, _speculation("NAME")] = None
    num_speculative_tokens: Annotated[int | None, _speculation("K", ge=0)] = None
    hypothesis: Annotated[str | tuple[int, ...] | None, _speculation()] = None
    hypothesis_entropy: Annotated[float | None, _speculation("H", ge=0)] = None
    options: Annotated[MethodOptions | None, option(hidden=True, unchecked=True)] = None

    @classmethod
    def refusal(cls, message: str, name: str) -> RequestError:
        return RequestError(message, param=name)

    @classmethod
    def of(cls, value: SpeculativeLike | None) -> Speculative:
        """Converts a user's argument: the value itself, a mapping with its keys and the method's, or a method's name.

        Raises:
            RequestError: a key is not known, belongs to the build or the engine, or has a value of the wrong kind.
        """
        if value is None:
            return DEFAULT
        if isinstance(value, Speculative):
            return value
        if not isinstance(value, (str, Mapping)):
            raise RequestError(
                f"speculative is {shown(value)}; expected a method's name or a mapping", param="speculative"
            )
        mapping = {"method": value} if isinstance(value, str) else {key: plain(part) for key, part in value.items()}
        if mapping.get("method") == _AUTO:
            del mapping["method"]
        keys: dict[str, Any] = {key: mapping.pop(key) for key in _KEYS if key in mapping}
        if not isinstance(expected := keys.get("hypothesis"), (str, type(None))):
            keys["hypothesis"] = tuple(token_ids(expected, "hypothesis", "hypothesis"))
        return cls(**keys, options=_options(keys.get("method"), mapping) if mapping else None)

    @property
    def plain(self) -> bool:
        return self.num_speculative_tokens == 0


SpeculativeLike = Speculative | Mapping[str, Any] | str
"""The forms in which users may say how to speculate; see :meth:`Speculative.of`."""
_KEYS = tuple(key for key in Speculative.__struct_fields__ if key != "options")
_AUTO = "auto"
DEFAULT = Speculative()
PLAIN = Speculative(num_speculative_tokens=0)
"""Plain decoding, for comparison."""


def _options(name: object, keys: Mapping[str, Any]) -> MethodOptions:
    """The options of a method from the keys that a request may set."""
    if not isinstance(name, str):
        key = next(iter(keys))
        raise RequestError(
            f"speculative: {key!r} was given without a method; expected some of {', '.join(_KEYS)}",
            param=f"speculative.{key}",
        )
    try:
        kind = method_type(name)
        fixed = next((key for key in keys if kind.needs_graph or key == "trees" or key in kind.engine_keys), None)
        if fixed is not None:
            unknown = fixed not in options_type(kind).__struct_fields__
            fault = "is unknown" if unknown else "is set when the bundle is built or opened"
            raise RequestError(
                f"speculative: {fixed!r} of method {name!r} {fault}; a request may say {', '.join(_KEYS)}",
                param="speculative",
            )
        return read_method({"method": name, **keys}, "speculative")
    except SpecExportError as error:
        raise RequestError(str(error), param="speculative") from error


def choose(
    request: Speculative,
    methods: Mapping[str, Method],
    defaults: Sequence[str],
    params: SamplingParams,
    embedded: bool,
    free: bool,
) -> tuple[str | None, TokenTree]:
    """Chooses the method and tree of a request; None and a plain step's tree if it decodes plainly or none suits it.

    Args:
        request: how it speculates.
        methods: the engine's methods, by name.
        defaults: names of the methods for requests that name none, in order of preference.
        params: its sampling parameters.
        embedded: whether its prompt has embeddings.
        free: whether steps may verify smaller trees; then the method's largest tree is the default.

    Raises:
        RequestError: the bundle lacks the method or the tree, the method's model cannot read embeddings, or a
            hypothesis lacks its method or a method its hypothesis.
    """
    _check_hypothesis(request, methods, params)
    name = None if request.plain else _method_of(request, methods, defaults, embedded)
    return (None, PLAIN_TREE) if name is None else (name, _tree_of(request, methods[name].token_trees(), free))


def _method_of(
    request: Speculative, methods: Mapping[str, Method], defaults: Sequence[str], embedded: bool
) -> str | None:
    """The name of a request's method; None if it names none and none of the defaults suits it."""
    able = [name for name, method in methods.items() if not embedded or method.reads_embeddings]
    name = request.method
    if name is None and request.hypothesis is not None:
        name = next((name for name, method in methods.items() if method.takes_hypothesis), None)
        if name is None:
            raise RequestError("a hypothesis was given, but the bundle verifies no chains for one", param="hypothesis")
    elif name is None:
        name = next((name for name in defaults if name in able and not methods[name].takes_hypothesis), None)
        if name is None and request.num_speculative_tokens is None:
            return None
    if name is None:
        context = " after a prompt with embeddings" if embedded and methods else ""
        raise RequestError(
            f"num_speculative_tokens is {request.num_speculative_tokens}, but the bundle was built without a way to "
            f"speculate{context}; name one that needs no graph: {', '.join(able) or 'none is there'}",
            param="num_speculative_tokens",
        )
    if name not in methods:
        raise RequestError(
            f"method is {name!r}; the bundle has {', '.join(methods) or 'none'}; "
            "num_speculative_tokens 0 decodes plainly",
            param="method",
        )
    if name not in able:
        raise RequestError(
            f"method is {name!r}, whose model reads tokens alone, and the prompt has embeddings; leave it out or "
            f"choose one that needs no model, of which the bundle has {', '.join(able) or 'none'}",
            param="method",
        )
    return name


def _tree_of(request: Speculative, trees: Sequence[TokenTree], free: bool) -> TokenTree:
    """The tree with a request's number of draft tokens, or the default."""
    if request.num_speculative_tokens is None:
        return max(trees, key=len) if free else trees[0]
    tree = next((tree for tree in trees if len(tree) == request.num_speculative_tokens + 1), None)
    if tree is None:
        built = ", ".join(map(str, sorted(len(tree) - 1 for tree in trees)))
        raise RequestError(
            f"num_speculative_tokens is {request.num_speculative_tokens}; the bundle was built for {built}",
            param="num_speculative_tokens",
        )
    return tree


def _check_hypothesis(request: Speculative, methods: Mapping[str, Method], params: SamplingParams) -> None:
    """Checks a request's hypothesis against its other parameters."""
    takes = {name for name, method in methods.items() if method.takes_hypothesis}
    if request.hypothesis is not None:
        if request.plain:
            raise RequestError(
                "a hypothesis was given with num_speculative_tokens 0; give one of them", param="hypothesis"
            )
        if request.method is not None and request.method not in takes:
            raise RequestError(
                f"a hypothesis was given with method {request.method!r}; leave the method out", param="method"
            )
        return
    if request.method in takes:
        raise RequestError(f"method is {request.method!r}, but no hypothesis was given", param="method")
    if request.hypothesis_entropy is not None:
        raise RequestError("hypothesis_entropy was given without a hypothesis", param="hypothesis_entropy")
    if params.acceptance == "relaxed":
        raise RequestError(
            "acceptance is 'relaxed', but no hypothesis was given; it is for those alone", param="acceptance"
        )


def bypasses_model(params: SamplingParams, entropy: float | None) -> bool:
    """Whether a hypothesis is certain enough to become the output without the model (arXiv 2603.11243, stage 1).

    Not if the request needs the model, for log-probabilities or because it changes the logits.
    """
    gate = params.entropy_threshold if params.acceptance == "relaxed" else None
    scored = params.logprobs is not None or params.prompt_logprobs is not None
    model = scored or params.penalized or params.constrained
    return gate is not None and entropy is not None and entropy < gate and not model


def available_methods(manifest: Manifest, requested: Sequence[MethodOptions] = ()) -> tuple[Method, ...]:
    """The methods that work with a bundle: the ones it was built for, and all that need no graph.

    ``requested`` are options of methods that need no graph, in place of the bundle's or the defaults.
    """
    replacements: dict[str, TextMethod] = {}
    for method in requested:
        if not isinstance(method, TextMethod):
            raise BuildError(
                f"{method.name}: its options belong to the build, and the bundle is built; name it in a request, or "
                "build another bundle"
            )
        limit = max(verified_widths(manifest.target)) - 1
        if method.trees or max(method.sizes, default=0) > limit:
            raise BuildError(
                f"{method.name}: the bundle verifies chains of at most {limit} draft tokens; ask for those by "
                "num_speculative_tokens"
            )
        replacements[method.name] = method
    methods = {method.name: method for method in manifest.methods}
    for kind in text_methods():
        name = method_name(kind)
        if name in replacements or name not in methods:
            lookup = replacements.get(name, kind())
            if name in methods and not lookup.sizes:  # other options do not change the trees
                fitted = with_trees(lookup, methods[name].token_trees())
            else:
                fitted = for_bundle(lookup, manifest.target)
            if fitted.trees:
                methods[name] = fitted
    return tuple(methods.values())
