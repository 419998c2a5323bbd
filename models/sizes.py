"""Parameters and bytes of a run, computed from configs alone, and the device here.

No weight is loaded: models are built on torch's meta device. Names carry units; GB are 10**9 bytes. Docstrings tell
exact values from assumptions.
"""

import copy
import importlib.util
import platform
import re
import shutil
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.models.families import auto_class
from draftsmith.models.quantize import precision_name, quantized_bytes
from draftsmith.models.target import decoder_layers, device_name
from draftsmith.recipes.command.plan import PlanLines
from draftsmith.recipes.errors import UserError, first_line
from draftsmith.recipes.sections.target import TargetSection

if TYPE_CHECKING:
    from draftsmith.models.target_files import TargetFiles

# Dense bf16 operations per second, from the vendors' data sheets. The first matching name counts.
PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 5090": 209e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
# Bits of one weight where a quantised checkpoint stays quantised, its scales included.
BITS_BY_METHOD = {"mxfp4": 4.25, "fp8": 8.0, "fbgemm_fp8": 8.0, "gptq": 4.25, "awq": 4.25, "bitsandbytes": 4.5}


@dataclass(frozen=True)
class TargetSize:
    """The target's size by its config; the checkpoint itself is not read."""

    parameters: int  # shared ones (tied embeddings) once
    expert_parameters: int
    active_parameters: int  # read for one token: chosen experts only, no embeddings, no vision part
    weight_bytes: float
    weight_basis: str  # the source of weight_bytes, as text
    dtype: torch.dtype  # of activations
    eager_attention: bool  # materialises scores [heads, T, T]
    layer_parameters: tuple[int, ...] = ()  # of each decoder layer


def target_size(config: Any, section: TargetSection) -> TargetSize:
    """The target's size. Parameters are exact; bytes too, except the assumed bits per weight of quantised checkpoints.

    Args:
        config: from AutoConfig (the whole one of a multimodal model).
        section: its `model` is not read.
    """
    plain = copy.deepcopy(config)
    quantization = getattr(plain, "quantization_config", None)
    if quantization is not None:
        del plain.quantization_config
    try:
        with torch.device("meta"):
            model = auto_class(plain).from_config(plain, trust_remote_code=section.trust_remote_code)
    except (KeyError, TypeError) as error:  # such as a kind of rotary scaling that transformers does not know
        raise UserError(
            f"target.model: transformers cannot build a {config.model_type} by its config.json: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error
    text = config.get_text_config()
    named = dict(model.named_parameters())
    parameters = sum(p.numel() for p in named.values())
    experts = sum(p.numel() for name, p in named.items() if ".experts." in name)
    tables: Any = model.get_input_embeddings(), model.get_output_embeddings()
    embedding, head = (table.weight for table in tables)
    chosen = getattr(text, "num_experts_per_tok", None) or 0
    number = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None) or 0
    shared = sum({id(table): table.numel() for table in (embedding, head)}.values())
    of_text = {id(p) for p in (embedding, head, *model.get_decoder().parameters())}
    vision = sum(p.numel() for p in named.values() if id(p) not in of_text)  # runs once for each picture
    unread = experts - int(experts * (chosen / number if number else 0.0))
    dtype, layers, precision = torch_dtype(config, section.dtype), decoder_layers(model), section.quantization
    if precision is not None and not precision.fake:
        quantized, packed = quantized_bytes(layers, precision)
        weight_bytes = (parameters - quantized) * dtype.itemsize + packed
        basis = f"{precision_name(precision)} in the layers, {str(dtype).removeprefix('torch.')} elsewhere, exact"
    else:
        weight_bytes, basis = _weight_bytes(parameters, parameters - shared, dtype, quantization)
    return TargetSize(
        parameters=parameters,
        expert_parameters=experts,
        active_parameters=parameters - vision - shared - unread,
        weight_bytes=weight_bytes,
        weight_basis=basis,
        dtype=dtype,
        eager_attention=model.config._attn_implementation == "eager",
        layer_parameters=tuple(sum(p.numel() for p in layer.parameters()) for layer in layers),
    )


def shared_out(size: TargetSize, processes: int) -> TargetSize:
    """One process's share of a sharded target, with one layer gathered. Exact but for the buffers of collectives."""
    unit, layers = size.weight_bytes / size.parameters, size.layer_parameters
    held = size.parameters - sum(layers) * (1 - 1 / processes) + max(layers) * (processes > 1)
    basis = f"1/{processes} of the layers; whole, the one at work and what is no layer"
    return replace(size, weight_bytes=held * unit, weight_basis=basis)


def torch_dtype(config: Any, dtype: str) -> torch.dtype:
    """The precision of loaded weights: as asked, else the config's, else float32."""
    return getattr(torch, dtype) if dtype != "auto" else named_dtype(config) or torch.float32


def named_dtype(config: Any) -> torch.dtype | None:
    """The precision that a config names, if any."""
    named = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return getattr(torch, named) if isinstance(named, str) else named


def _weight_bytes(parameters: int, in_layers: int, dtype: torch.dtype, quantization: Any) -> tuple[float, str]:
    plain = parameters * dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    if quantization is None:
        return plain, f"{name}, exact"
    settings = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = str(settings.get("quant_method", "unknown"))
    bits = settings.get("bits") or (8 if settings.get("load_in_8bit") else None) or BITS_BY_METHOD.get(method)
    if bits is None:
        return plain, f"{method} checkpoint, assumed to be dequantised to {name}"
    packed = in_layers * bits / 8 + (parameters - in_layers) * dtype.itemsize
    if method == "mxfp4" and not (torch.cuda.is_available() and importlib.util.find_spec("kernels")):
        return plain, f"MXFP4 dequantised to {name}: its kernels are not here (with them {gigabytes(packed)})"
    return packed, f"{method}, {bits:g} bits a weight in the layers assumed, {name} elsewhere"


def target_forward_bytes(config: Any, size: TargetSize, rows: int, tokens: int, captured_layers: int) -> float:
    """Peak of a pass over [rows, tokens] without gradients or weights: captured states, and one layer's attention or
    MLP, assumed to have all its intermediates alive at once."""
    places, unit, hidden = rows * tokens, size.dtype.itemsize, config.hidden_size
    shapes = attention_shapes(config)
    attention = max((4 * heads + 4 * groups) * head_dim for heads, groups, head_dim in shapes)
    # Eager attention returns its scores, so they outlive the MLP: two copies, the masked ones, and float32.
    heads = max(heads for heads, _, _ in shapes)
    scores = rows * heads * tokens**2 * (3 * unit + 4) if size.eager_attention else 0
    # GPT-2, OPT and others have no such key, and four times the hidden size.
    width = getattr(config, "intermediate_size", None) or 4 * hidden
    mlp = 3 * width
    if size.expert_parameters:
        width = getattr(config, "moe_intermediate_size", None) or width
        mlp = (6 * width + 2 * hidden) * (getattr(config, "num_experts_per_tok", None) or 1)
    residual = 4 * hidden
    return (2 * captured_layers * hidden + residual + max(attention, mlp)) * unit * places + scores


def attention_shapes(config: Any) -> list[tuple[int, int, int]]:
    """(query heads, key/value heads, head dimension) of each layer of a text config. Gemma 4's layers differ."""
    shapes = []
    for layer in config.per_layer_config:
        heads = layer.num_attention_heads
        groups = getattr(layer, "num_key_value_heads", None) or heads
        shapes.append((heads, groups, getattr(layer, "head_dim", None) or layer.hidden_size // heads))
    return shapes


def cache_bytes_per_token(config: Any, size: TargetSize) -> int:
    """Keys and values of one token in all layers, sliding ones too: the pool allocates them in full."""
    return sum(2 * groups * head_dim for _, groups, head_dim in attention_shapes(config)) * size.dtype.itemsize


def plan_decoding(
    plan: PlanLines,
    files: "TargetFiles",
    rows: int,
    tokens: int,
    of_drafter: int = 0,
    not_counted: Iterable[str] = ("activations",),
) -> None:
    """Adds the memory of decoding `rows` conversations side by side, up to `tokens` long, to a plan."""
    files.check_precision()
    size: Any = files.size
    texts = 1 if files.section.guidance is None else 2  # a guided target reads each with and without its caption
    cache = cache_bytes_per_token(files.text_config, size) * texts * rows * tokens
    parts = f"target {gigabytes(size.weight_bytes)} ({size.weight_basis})"
    parts += f", drafter {gigabytes(of_drafter)}" * bool(of_drafter)
    parts += f", keys and values {gigabytes(cache)} ({texts * rows:,} x {tokens:,} tokens)"
    parts += f"; not counted: {', '.join(not_counted)}"
    plan_memory(plan, size.weight_bytes + cache + of_drafter, parts, device_here(files.section.device))


def plan_memory(plan: PlanLines, total: float, text: str, device: "Device", basis: str = "") -> None:
    """Adds a line, and a problem if the device here has less memory."""
    here = f"{gigabytes(device.memory_bytes)} of the device here ({device.name})"
    plan.line("memory", f"at most {gigabytes(total)} of the {here}: {text}", basis)
    if total > device.memory_bytes:
        plan.problems.append(f"memory: {gigabytes(total)} do not fit the {here}")


def free_bytes(folder: Path) -> int:
    """Free bytes of the disk that holds or will hold `folder`."""
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    return shutil.disk_usage(there).free


def drafter_bytes(parameters: int, draft_vocab_size: int, vocab_size: int) -> int:
    """The drafter on disk without the header: parameters in float32, d2t (int64) and t2d (one byte)."""
    return 4 * parameters + 8 * draft_vocab_size + vocab_size


def checkpoint_bytes(parameters: int, draft_vocab_size: int, vocab_size: int) -> int:
    """A training checkpoint: the drafter and AdamW's two moments, without some 50 kB of state and headers."""
    return drafter_bytes(parameters, draft_vocab_size, vocab_size) + 2 * 4 * parameters


class Meter(TorchDispatchMode):
    """Counts bytes of all tensors created inside, real or fake, until their storage is freed: at the peak, and by kind
    (`kind` names a new tensor). Older tensors and a kernel's own workspace are not counted."""

    def __init__(self, kind: Callable[[torch.Tensor], str]):
        super().__init__()
        self.kind = kind
        self.peak_bytes = 0
        self.peak_by_kind: Counter[str] = Counter()
        self._live: Counter[str] = Counter()
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.lift_fresh.default:  # its argument is new, from `torch.tensor`
            for tensor in pytree.tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor):
                    self._meet(tensor, 0)  # if still unknown, from outside
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._meet(tensor, tensor.untyped_storage().nbytes())
        if (live := self._live.total()) > self.peak_bytes:
            self.peak_bytes, self.peak_by_kind = live, self._live.copy()
        return out

    def _meet(self, tensor: torch.Tensor, size_bytes: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        kind = self.kind(tensor)
        self._live[kind] += size_bytes
        weakref.finalize(storage, self._lose, key, kind, size_bytes)

    def _lose(self, key: int, kind: str, size_bytes: int) -> None:
        self._known.discard(key)
        self._live[kind] -= size_bytes


@dataclass(frozen=True)
class Device:
    """A device that a run may use."""

    name: str
    memory_bytes: int
    type: Literal["cpu", "cuda"]

    @property
    def peak_flops(self) -> float | None:
        """Dense bf16 operations per second; None for unknown devices."""
        return next((peak for name, peak in PEAK_FLOPS.items() if name in self.name), None)


def device_here(wanted: str = "auto") -> Device:
    """The device that `target.device` selects on this machine; any other than a CUDA one counts as the CPU."""
    device = torch.device(device_name(wanted))
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Device(properties.name, properties.total_memory, "cuda")
    memory, limit = psutil.virtual_memory().total, Path("/sys/fs/cgroup/memory.max")  # the container's, if smaller
    if limit.exists() and (text := limit.read_text().strip()).isdecimal():
        memory = min(memory, int(text))
    return Device(f"CPU, {_threads()}", memory, "cpu")


def hardware(device: torch.device) -> str:
    """The machine of `device`, as text for reports."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.+)$", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
    cpu = f"{found[1].strip() if found else platform.processor() or platform.machine()}, {_threads()}"
    return f"{torch.cuda.get_device_name(device)}; host {cpu}" if device.type == "cuda" else cpu


def _threads() -> str:
    count = torch.get_num_threads()
    return f"{count} thread{'s' * (count > 1)}"


def matmul_flops_per_second(rows: int, width: int, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """Measures the CPU with products [rows, width] x [width, width]."""
    left, right = torch.ones(rows, width, dtype=dtype), torch.ones(width, width, dtype=dtype)
    done, began = 0, time.perf_counter()
    while (passed := time.perf_counter() - began) < seconds or done < 2:
        torch.matmul(left, right)
        done += 1
    return 2.0 * rows * width * width * done / passed


def gigabytes(count: float) -> str:
    """12 MB, 1.3 GB, 142 GB."""
    if count < 1e9:
        return f"{count / 1e6:,.0f} MB" if count >= 10e6 else f"{count / 1e6:,.1f} MB"
    return f"{count / 1e9:,.0f} GB" if count >= 100e9 else f"{count / 1e9:,.1f} GB"


def duration(seconds: float) -> str:
    for unit, length in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:,.0f} seconds"
