"""Tiny checkpoints quantized in the layouts that people publish, key by key, and what their matrices stand for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import GROUPED, make_checkpoint

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GROUP = 32
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
Tensors = dict[str, torch.Tensor]


def _words(values: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Unsigned integers packed into int32 along ``dim``; ``order[i]`` is the one in bits ``i * bits`` of each word."""
    each = 32 // bits
    moved = values.to(torch.int64).movedim(dim, -1)
    padded = torch.nn.functional.pad(moved, (0, -moved.shape[-1] % each))
    parts = padded.unflatten(-1, (-1, each))
    packed = torch.zeros(parts.shape[:-1], dtype=torch.int64)
    for place, source in enumerate(order or range(each)):
        packed |= parts[..., source] << (place * bits)
    signed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed)
    return signed.to(torch.int32).movedim(-1, dim).contiguous()


def _affine(weight: torch.Tensor, group: int, bits: int = 4, *, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """Unsigned integers ``[N,K]``, fp16 scales ``[N,K/group]``, zero points, and what they stand for."""
    blocks = weight.unflatten(1, (-1, group))
    top, half = (1 << bits) - 1, 1 << (bits - 1)
    if symmetric:
        scale, zero = blocks.abs().amax(-1) / half, torch.full(blocks.shape[:2], half)
    else:
        low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
        scale = (high - low) / top
        zero = (-low / scale).round().clamp(0, top)
    scale = scale.clamp(min=1e-5).half()
    integers = (blocks / scale.float()[..., None] + zero[..., None]).round().clamp(0, top)
    stands_for = (integers - zero[..., None]) * scale.float()[..., None]
    return integers.flatten(1).long(), scale, zero.long(), stands_for.flatten(1)


def awq(name: str, weight: torch.Tensor, stored: Tensors) -> torch.Tensor:
    integers, scale, zero, means = _affine(weight, GROUP, symmetric=False)
    stored[f"{name}.qweight"] = _words(integers.T, 4, 1, AWQ_ORDER)
    stored[f"{name}.qzeros"] = _words(zero.T, 4, 1, AWQ_ORDER)
    stored[f"{name}.scales"] = scale.T.contiguous()
    return means


def gptq(name: str, weight: torch.Tensor, stored: Tensors, *, bits: int = 4, ordered: bool = True) -> torch.Tensor:
    rows = torch.arange(weight.shape[1])
    order = rows if ordered else torch.randperm(len(rows), generator=torch.Generator().manual_seed(3))
    integers, scale, zero, _ = _affine(weight[:, order], GROUP, bits, symmetric=ordered)
    back = order.argsort()
    zero = zero.clamp(min=1)
    means = (integers - zero.repeat_interleave(GROUP, 1)) * scale.float().repeat_interleave(GROUP, 1)
    stored[f"{name}.qweight"] = _words(integers[:, back].T, bits, 0)
    stored[f"{name}.qzeros"] = _words(zero.T - 1, bits, 1)
    stored[f"{name}.scales"] = scale.T.contiguous()
    stored[f"{name}.g_idx"] = (back // GROUP).to(torch.int32)
    return means[:, back]


def packed(
    name: str, weight: torch.Tensor, to: Tensors, *, bits: int = 4, group: int | None = GROUP, symmetric: bool = True
) -> torch.Tensor:
    integers, scale, zero, _ = _affine(weight, group or weight.shape[1], bits, symmetric=symmetric)
    to[f"{name}.weight_packed"] = _words(integers, bits, 1)
    to[f"{name}.weight_scale"] = scale.bfloat16()
    to[f"{name}.weight_shape"] = torch.tensor(weight.shape)
    if not symmetric:
        to[f"{name}.weight_zero_point"] = _words(zero, bits, 0)
    wide = scale.bfloat16().float().repeat_interleave(group or weight.shape[1], 1)
    return (integers - zero.repeat_interleave(group or weight.shape[1], 1)) * wide


def bytes_by_output(name: str, weight: torch.Tensor, stored: Tensors, *, floating: bool) -> torch.Tensor:
    most = 448 if floating else 127
    scale = (weight.abs().amax(1, keepdim=True) / most).bfloat16()
    scaled = weight / scale.float()
    numbers = scaled.clamp(-448, 448).to(torch.float8_e4m3fn) if floating else scaled.round().clamp(-128, 127).char()
    stored |= {f"{name}.weight": numbers, f"{name}.weight_scale": scale}
    return numbers.float() * scale.float()


def fp8_blocks(
    name: str, weight: torch.Tensor, stored: Tensors, *, block: int = 32, scales: str = "weight_scale_inv"
) -> torch.Tensor:
    (n, k), size = weight.shape, (-(-weight.shape[0] // block), -(-weight.shape[1] // block))
    padded = torch.zeros(size[0] * block, size[1] * block)
    padded[:n, :k] = weight
    blocks = padded.unflatten(0, (size[0], block)).unflatten(2, (size[1], block))
    scale = blocks.abs().amax((1, 3)) / 448
    wide = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[:n, :k]
    numbers = (weight / wide).to(torch.float8_e4m3fn)
    stored |= {f"{name}.weight": numbers, f"{name}.{scales}": scale}
    return numbers.float() * wide


def _compressed(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "damp_percent": 0.01, "true_sequential": True}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
Quantize = Callable[[str, torch.Tensor, Tensors], torch.Tensor]
FORMATS: dict[str, tuple[dict[str, Any], Quantize]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq),
    "gptq": ({**_GPTQ, "desc_act": False, "sym": True, "checkpoint_format": "gptq"}, gptq),
    "gptq_act_order": ({**_GPTQ, "desc_act": True, "sym": False}, lambda *arguments: gptq(*arguments, ordered=False)),
    "gptq_int8": ({**_GPTQ, "bits": 8, "desc_act": False, "sym": True}, lambda *arguments: gptq(*arguments, bits=8)),
    "gptq_dynamic": (
        {**_GPTQ, "desc_act": False, "sym": True, "dynamic": {r"+:.*\.mlp\..*": {"bits": 8}, "-:lm_head": {}}},
        lambda name, *arguments: gptq(name, *arguments, bits=8 if ".mlp." in name else 4),
    ),
    "packed": (_compressed("pack-quantized", **_INT4, symmetric=True), packed),
    "packed_zeros": (
        _compressed("pack-quantized", **_INT4, symmetric=False),
        lambda *arguments: packed(*arguments, symmetric=False),
    ),
    "packed_channel": (
        _compressed("pack-quantized", num_bits=4, type="int", strategy="channel", symmetric=True),
        lambda *arguments: packed(*arguments, group=None),
    ),
    "int8": (
        _compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
        lambda *arguments: bytes_by_output(*arguments, floating=False),
    ),
    "float": (
        _compressed("float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True),
        lambda *arguments: bytes_by_output(*arguments, floating=True),
    ),
    "float_blocks": (
        _compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[40, 40]),
        lambda *arguments: fp8_blocks(*arguments, block=40, scales="weight_scale"),  # divides no size of the model
    ),
    "fp8": (
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "modules_to_not_convert": ["lm_head"],
        },
        fp8_blocks,
    ),
}


def make_quantized(folder: Path, layout: str, family: str = "llama", **overrides: Any) -> tuple[Path, Path]:
    """A checkpoint in a layout, and, beside it, the plain one in fp32 of the numbers that its matrices stand for."""
    quantization, quantize = FORMATS[layout]
    return _rewrite(folder, family, overrides, quantization, lambda plain, stored: _linear(plain, stored, quantize))


def make_mxfp4(folder: Path) -> tuple[Path, Path]:
    """A gpt-oss whose experts are MXFP4, and its plain twin."""
    sizes = {**GROUPED, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return _rewrite(folder, "gpt_oss", sizes, quantization, _experts)


def _rewrite(
    folder: Path, family: str, sizes: Any, quantization: Any, quantize: Callable[[Tensors, Tensors], None]
) -> tuple[Path, Path]:
    plain = make_checkpoint(folder / "plain", family, **sizes)
    quantized = make_checkpoint(folder / "quantized", family, **sizes)
    tensors = load_file(plain / "model.safetensors")
    stored: Tensors = {}
    quantize(tensors, stored)
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    config |= {"quantization_config": quantization, "dtype": "bfloat16"}
    (quantized / "config.json").write_text(json.dumps(config))
    return quantized, plain


def _linear(tensors: Tensors, stored: Tensors, quantize: Quantize) -> None:
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            tensors[name] = quantize(name.removesuffix(".weight"), tensor, stored)
        else:
            stored[name] = tensor.bfloat16()
            tensors[name] = tensor.bfloat16().float()


def _experts(tensors: Tensors, stored: Tensors) -> None:
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = tensor.bfloat16()
            tensors[name] = tensor.bfloat16().float()
            continue
        blocks = tensor.transpose(1, 2).unflatten(2, (-1, 32))  # [E,N,K/32,32]
        exponent = torch.floor(torch.log2(blocks.abs().amax(-1).clamp(min=1e-9))) - 2
        scaled = blocks / torch.exp2(exponent)[..., None]
        code = (scaled.abs()[..., None] - _E2M1).abs().argmin(-1)
        means = _E2M1[code] * scaled.sign() * torch.exp2(exponent)[..., None]
        code = (code + 8 * (scaled < 0)).to(torch.uint8)
        stored[f"{name}_blocks"] = code[..., 0::2] | (code[..., 1::2] << 4)
        stored[f"{name}_scales"] = (exponent + 127).to(torch.uint8)
        tensors[name] = means.flatten(2).transpose(1, 2).contiguous()
