"""Tensor parallelism: splits a model among ranks, each of which computes a share of every layer.

As in Megatron-LM (Shoeybi et al. 2019), the first product of a pair keeps a share of its columns and the second the
same share of its rows, so that ranks synchronize once per pair, to sum their results. A family's ``tp_plan`` in
transformers lists the pairs.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import torch

from specexport.contract.errors import BuildError
from specexport.exporter.checkpoints.checkpoint import Checkpoint, plain_transformers
from specexport.exporter.checkpoints.parity import TOLERANCE
from specexport.exporter.checkpoints.quiet import failing_as, quiet
from specexport.exporter.checkpoints.stored import attach_stored, read_weights, stored_tensor
from specexport.graphs.ops import combine_by, join_of_ranks, sum_of_ranks


def _sum(_module: torch.nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
    """A forward hook of modules whose outputs the ranks sum."""
    return sum_of_ranks(output)


class _SplitEmbedding(torch.nn.Module):
    """``count`` rows of an embedding, from ``first``; a rank without a token's row contributes zeros."""

    def __init__(self, part: torch.nn.Module, first: int, count: int) -> None:
        super().__init__()
        self.part = part
        self.first = first
        self.count = count

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        local = ids - self.first
        in_part = (local >= 0) & (local < self.count)
        return sum_of_ranks(torch.where(in_part[..., None], self.part(torch.where(in_part, local, 0)), 0.0))


class _Splitter:
    """Splits a copy of a model's modules for one rank; see :func:`split`."""

    def __init__(self, model: Any, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        # The modules are copied, their tensors are shared.
        self.model = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
        self._shares: dict[tuple[int, int, bool], torch.nn.Parameter] = {}

    def share(self, parameter: Any, axis: int, packed: bool = False) -> torch.nn.Parameter:
        """This rank's slice of a parameter; ``packed`` parameters are two concatenated matrices, sliced separately."""
        shared = self._shares.get((id(parameter), axis, packed))
        if shared is not None:  # tied weights stay tied
            return shared

        def cut(numbers: torch.Tensor) -> torch.Tensor:
            halves = numbers.chunk(2, axis) if packed else (numbers,)
            return torch.cat([half.chunk(self.ranks, axis)[self.rank] for half in halves], axis)

        stored = stored_tensor(parameter)
        if stored is None:
            part = torch.nn.Parameter(cut(parameter.detach()), requires_grad=False)
        else:
            shape = torch.Size(cut(parameter.detach()).shape)
            stand_in = torch.full((), torch.nan).expand(shape)
            part = torch.nn.Parameter(stand_in, requires_grad=False)
            attach_stored(part, dataclasses.replace(stored, shape=tuple(shape), read=lambda: cut(stored.read())))
        self._shares[id(parameter), axis, packed] = part
        return part

    def require(self, count: int, name: str) -> None:
        if count % self.ranks:
            raise BuildError(f"it has {count} {name}; choose a number that divides them")

    def columns(self, module: Any, name: str) -> None:
        """Keeps a share of a product's columns: rows of a weight ``[N,K]``."""
        self.require(module.out_features, f"columns of {name}")
        module.weight = self.share(module.weight, 0)
        module.bias = module.bias if module.bias is None else self.share(module.bias, 0)
        module.out_features //= self.ranks

    def rows(self, module: Any, name: str) -> None:
        """Keeps a share of a product's rows; the ranks sum their results, and one of them adds the bias."""
        self.require(module.in_features, f"rows of {name}")
        module.weight = self.share(module.weight, 1)
        module.in_features //= self.ranks
        if module.bias is not None and self.rank:
            module.bias = torch.nn.Parameter(torch.zeros_like(module.bias), requires_grad=False)
        module.register_forward_hook(_sum)

    def experts(self, module: Any, name: str, plan: dict[str, str]) -> None:
        """Keeps a share of each expert's columns, like :meth:`columns`."""
        for key, parameter in list(module.named_parameters(recurse=False)):
            style = plan.get(key)
            if style not in ("packed_colwise", "colwise", "rowwise") or key.endswith("bias"):
                raise BuildError(f"its experts have {key}, which transformers has no plan to split")
            axis = (-1 if style == "rowwise" else -2) % parameter.dim()
            if module.is_transposed:
                axis = 2 * parameter.dim() - 3 - axis
            packed = style == "packed_colwise"
            self.require(parameter.shape[axis] // (2 if packed else 1), f"columns of {name}")
            setattr(module, key, self.share(parameter, axis, packed))
        module.register_forward_hook(_sum)


def split(model: Any, rank: int, ranks: int) -> Any:
    """A rank's share of a transformers causal LM, which shares the unsplit parts; the model itself is unchanged.

    Attention heads, the products of MLPs and experts, and, if their number is divisible, the rows of the embedding and
    of the head are split.
    """
    splitter = _Splitter(model, rank, ranks)
    rank_model = splitter.model
    embedding, head = rank_model.get_input_embeddings(), rank_model.get_output_embeddings()
    layers = {name: style for name, style in (model.tp_plan or {}).items() if ".*." in name}
    if not layers:
        raise BuildError("transformers has no plan to split it (base_model_tp_plan)")
    patterns = {re.compile(re.escape(name).replace(r"\*", r"\d+")): (name, style) for name, style in layers.items()}
    for name, module in rank_model.named_modules():
        split_kind = next((kind for pattern, kind in patterns.items() if pattern.fullmatch(name)), None)
        if split_kind is None or split_kind[1] in ("replicated_with_grad_allreduce", "replicate"):
            continue
        pattern, style = split_kind
        short = re.sub(r"^.*\.\d+\.", "", name)
        if style == "colwise" and isinstance(module, torch.nn.Linear):
            splitter.columns(module, short)
        elif style == "rowwise" and isinstance(module, torch.nn.Linear):
            splitter.rows(module, short)
        elif style == "moe_tp_experts":
            styles = {key.rpartition(".")[2]: of for key, of in layers.items() if key.startswith(f"{pattern}.")}
            splitter.experts(module, short, styles)
        else:
            raise BuildError(f"{short} is to be split in a way that is not supported ({style})")
    if embedding.weight.shape[0] % ranks == 0 and head.weight.shape[0] % ranks == 0:
        rows = embedding.weight.shape[0] // ranks
        embedding.weight = splitter.share(embedding.weight, 0)
        head.weight = splitter.share(head.weight, 0)
        if getattr(head, "bias", None) is not None:
            head.bias = splitter.share(head.bias, 0)
        rank_model.set_input_embeddings(_SplitEmbedding(embedding, rank * rows, rows))
        head.register_forward_hook(lambda _module, _args, part: join_of_ranks(part, ranks))
    return rank_model


def split_checkpoint(checkpoint: Checkpoint, rank: int, ranks: int) -> Checkpoint:
    """A rank's share of a loaded target; see :func:`split`."""
    prefix = _error_prefix(checkpoint, ranks)
    if checkpoint.states:
        raise BuildError(f"{prefix}it has layers without attention")
    if checkpoint.quantized_in:
        raise BuildError(f"{prefix}its matrices are quantized already ({checkpoint.quantized_in})")
    heads = {layer.heads for layer in checkpoint.cache}
    if uneven := sorted(count for count in heads if count % ranks):
        raise BuildError(f"{prefix}it has {uneven[0]} key/value heads; choose a number that divides them")
    cache = tuple(msgspec.structs.replace(layer, heads=layer.heads // ranks) for layer in checkpoint.cache)
    try:
        return dataclasses.replace(checkpoint, model=split(checkpoint.model, rank, ranks), cache=cache)
    except BuildError as error:
        raise BuildError(f"{prefix}{error}") from error


def _error_prefix(checkpoint: Checkpoint, ranks: int) -> str:
    return f"{checkpoint.source}: model family '{checkpoint.family}' cannot be split among {ranks} ranks: "


def require_split_parity(checkpoint: Checkpoint, ranks: int) -> None:
    """Compares the logits of a model with those of its ranks, each in a thread."""
    prefix = _error_prefix(checkpoint, ranks)
    generator = torch.Generator().manual_seed(0)
    vocab = min(checkpoint.vocab_size, checkpoint.input_vocab)
    ids = torch.randint(0, vocab, (1, 12), generator=generator)
    models = [split_checkpoint(checkpoint, rank, ranks).model for rank in range(ranks)]
    barrier, parts_by_rank = threading.Barrier(ranks), [torch.empty(0)] * ranks

    def logits(rank: int) -> torch.Tensor:
        def combine(part: torch.Tensor, join: bool) -> torch.Tensor:
            parts_by_rank[rank] = part
            barrier.wait()
            combined = torch.cat(parts_by_rank, -1) if join else torch.stack(parts_by_rank).sum(0)
            barrier.wait()
            return combined

        combine_by(combine)
        try:
            with torch.no_grad():
                return models[rank](ids, use_cache=False).logits.float()
        except BaseException:
            barrier.abort()
            raise

    with torch.no_grad(), quiet(), plain_transformers(checkpoint.model), read_weights(checkpoint.model):
        expected = checkpoint.model(ids, use_cache=False).logits.float()
    with quiet(), contextlib.ExitStack() as stack, ThreadPoolExecutor(ranks) as pool:
        for part in models:
            stack.enter_context(plain_transformers(part))
            stack.enter_context(read_weights(part))
        with failing_as(lambda error: f"{prefix}its ranks failed in transformers ({type(error).__name__}: {error})"):
            split_logits, *_ = pool.map(logits, range(ranks))
    worst = float((split_logits - expected).abs().max()) / max(1.0, float(expected.abs().max()))
    if not worst <= TOLERANCE:
        raise BuildError(
            f"{prefix}their logits are {worst:.2g} (relative) away from the whole model's, more than {TOLERANCE:g}"
        )
