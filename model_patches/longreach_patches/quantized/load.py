"""A quantised checkpoint's tensors into a model, module by module: each goes to its device, becomes a value there, and
is cut to its rank's part before the next one is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from longreach_kernels.linear import Weight, join_outputs
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from longreach_patches import wrapper
from longreach_patches.errors import ModelLoadError
from longreach_patches.quantized import kv_scales
from longreach_patches.quantized.files import ExpertTensors, Located, Tensors, is_zero, locate, roles_in
from longreach_patches.quantized.layouts import Layout
from longreach_patches.quantized.modules import QuantizedExperts, QuantizedLinear, is_experts
from longreach_patches.quantized.place import Placed, declared, place
from longreach_patches.quantized.scales import check_scales
from longreach_patches.quantized.scheme import Scheme

_BIAS = "bias"
_FLOATS = {"F64", "F32", "F16", "BF16"}


@dataclass
class Reading:
    """A model whose 16-bit tensors are there, and what its quantised modules are to be read from.

    Attributes:
        model: on the host; quantised modules are without numbers until `fill`.
        report: transformers', of missing and unexpected tensors.
        kv: scales of keys and values by layer, where the checkpoint has them.
    """

    model: PreTrainedModel
    report: dict[str, Any]
    kv: dict[int, tuple[Tensor, Tensor]]
    _tensors: Tensors
    _located: Located
    _placed: dict[str, Placed] = field(default_factory=dict)

    def fill(self, device: torch.device, cuts: Mapping[nn.Module, Callable[[], None]]) -> set[nn.Module]:
        """Read each quantised module to its device, and call the cut of it, if there is one; returns these modules.

        Raises:
            ModelLoadError: a tensor is missing, or of another dtype or shape; the message names file and module.
        """
        for name, placed in self._placed.items():
            module = placed.module
            if isinstance(module, QuantizedLinear):
                self._fill_linear(name, module, placed.layout, device)
            else:
                self._fill_experts(name, module, placed, device)
            if module in cuts:
                cuts[module]()
        return {placed.module for placed in self._placed.values()}

    def _fill_linear(self, name: str, module: QuantizedLinear, layout: Layout, device: torch.device) -> None:
        files = roles_in(layout.roles, self._located.modules.get(name, {}))
        found = {role: self._tensors.read(file).to(device) for role, file in files.items()}
        module.weight_value = self._value(name, layout, found, torch.Size(module.weight_value.shape), files)

    def _fill_experts(self, name: str, module: QuantizedExperts, placed: Placed, device: torch.device) -> None:
        own, layout = self._located.experts[name], placed.layout
        count, wide, channels = module.gate_up.shape
        if not own.apart:
            transposed = getattr(placed.own, "is_transposed", False)
            module.gate_up, module.down = (
                self._fused(f"{name}.{part}", own.fused.get(part, {}), layout, shape, device, transposed)
                for part, shape in (("gate_up_proj", module.gate_up.shape), ("down_proj", module.down.shape))
            )
            return
        if module.experts_value.interleaved:
            raise ModelLoadError(
                f"{self._tensors.directory}: {name}: the files have gates and what they gate apart, and this family "
                "has them by turns; separate experts are not read for it"
            )
        half = torch.Size((count, wide // 2, channels))
        gate, up, down = (
            self._stacked(f"{name}.{part}", own.apart.get(part, {}), layout, shape, device)
            for part, shape in (("gate", half), ("up", half), ("down", module.down.shape))
        )
        try:
            module.gate_up, module.down = join_outputs([gate, up]), down
        except ValueError as error:
            raise ModelLoadError(f"{self._tensors.directory}: {name}: {error}") from error

    def _fused(
        self,
        name: str,
        suffixes: Mapping[str, str],
        layout: Layout,
        shape: torch.Size,
        device: torch.device,
        transposed: bool,
    ) -> Weight:
        files = roles_in(layout.roles, suffixes)
        found = {role: self._tensors.read(file).to(device) for role, file in files.items()}
        # What transformers has transposed is so in 16 bits alone; MXFP4's blocks lie along the inputs.
        if transposed and "values" in found and found["values"].is_floating_point():
            found["values"] = found["values"].transpose(1, 2)
        return self._value(name, layout, found, shape, files)

    def _stacked(
        self,
        name: str,
        suffixes: Mapping[str, Mapping[int, str]],
        layout: Layout,
        shape: torch.Size,
        device: torch.device,
    ) -> Weight:
        files = roles_in(layout.roles, suffixes)
        found: dict[str, Tensor] = {}
        for role, by_number in files.items():
            if sorted(by_number) != list(range(shape[0])):
                missing = sorted({*range(shape[0])} - {*by_number}) or sorted(by_number)[-1:]
                raise ModelLoadError(
                    f"{self._tensors.directory}: {name}: the {role} of expert {missing[0]} do not match the "
                    f"{shape[0]} experts of config.json"
                )
            each = [self._tensors.read(by_number[index]) for index in range(shape[0])]
            if len({(tensor.shape, tensor.dtype) for tensor in each}) > 1:
                raise ModelLoadError(f"{self._tensors.directory}: {name}: the {role} of experts differ")
            found[role] = torch.stack(each).to(device)
        return self._value(name, layout, found, shape, {role: by[0] for role, by in files.items()})

    def _value(
        self, name: str, layout: Layout, found: Mapping[str, Tensor], shape: torch.Size, files: Mapping[str, Any]
    ) -> Weight:
        where = self._tensors.file_of(next(iter(files.values()))) if files else self._tensors.directory
        if missing := sorted(layout.roles.keys() - layout.optional - found.keys()):
            names = " or ".join(layout.roles[missing[0]])
            raise ModelLoadError(f"{where}: {name} has no {names}, which {layout.name} needs")
        try:
            weight = layout.read(found, shape)
        except torch.OutOfMemoryError:
            raise
        except (ValueError, RuntimeError) as error:  # of a format, or of tensors that cannot be reshaped
            raise ModelLoadError(f"{where}: {name} is not {layout.name}: {error}") from error
        try:
            check_scales(weight, self.model.dtype)
        except ValueError as error:
            raise ModelLoadError(f"{where}: {name}: {error}") from error
        return weight


def read(source: Path, config: PretrainedConfig, scheme: Scheme, dtype: torch.dtype, wrapped: bool) -> Reading:
    """Read what of a quantised checkpoint is in 16 bits, by transformers' loader, and find the rest.

    The files say which modules are quantised; the scheme says how.

    Args:
        source: the checkpoint's only safetensors file, or the index of several, checked already.
        wrapped: whether the files have parts beside the text model.

    Raises:
        ModelLoadError: sizes do not go with the scheme.
    """
    tensors = Tensors(source)
    with torch.device("meta"):
        empty: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    located = locate(tensors, empty, wrapped)
    choose = _in_files(declared(empty, scheme), scheme, tensors, located)
    placed: dict[str, Placed] = {}
    kind = _placing(type(empty), lambda model: placed.update(place(model, choose)))
    taken, kv = kv_scales.read(tensors, located.names)
    # Which modules are placed is known from a first model: what they take is not given to transformers' loader.
    for name, one in place(empty, choose).items():
        taken |= _taken(name, one, located)
        taken |= _needless_bias(name, one, located, tensors)
    rest = {name: tensors.read(name) for name in tensors if name not in taken}
    model, report = cast("Any", kind).from_pretrained(
        None,
        config=config,
        state_dict=rest,
        dtype=dtype,
        output_loading_info=True,
        key_mapping=wrapper.KEY_MAPPING if wrapped else None,
    )
    return Reading(model, report, kv, tensors, located, placed)


def _placing(kind: type[PreTrainedModel], prepare: Callable[[PreTrainedModel], None]) -> type[PreTrainedModel]:
    """A class whose objects are of `kind`, prepared before transformers' loader looks at their parameters."""

    def init(self: Any, config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:
        self.__class__ = kind
        kind.__init__(self, config, *args, **kwargs)
        prepare(self)

    return type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__})


def _in_files(
    declared: Callable[[str, nn.Module], Layout | None], scheme: Scheme, tensors: Tensors, located: Located
) -> Callable[[str, nn.Module], Layout | None]:
    """The layout of a module as its tensors show: lists in configs are often wrong, and files cannot be."""
    sole = scheme.groups[0].layout if len(scheme.groups) == 1 else None

    def choose(name: str, module: nn.Module) -> Layout | None:
        wanted = declared(name, module)
        if (layout := wanted or sole) is None or (wanted is None and len(layout.roles) == 1):
            return None
        own: Mapping[str, Any] = located.modules.get(name, {})
        if is_experts(module):
            found = located.experts.get(name)
            own = {} if found is None else found.apart.get("gate") or found.fused.get("gate_up_proj") or {}
        roles = roles_in(layout.roles, own)
        needed = [role for role in layout.roles if role not in layout.optional]
        if not roles or all(role not in roles for role in needed):
            return None
        if "values" in roles and len(needed) > 1:
            first = roles["values"]
            first = first if isinstance(first, str) else next(iter(first.values()))
            if tensors.dtype(first) in _FLOATS:
                return None
        return layout

    return choose


def _taken(name: str, placed: Placed, located: Located) -> set[str]:
    """The tensors of the files that a placed module is read from."""
    roles = placed.layout.roles
    if isinstance(placed.module, QuantizedLinear):
        return set(roles_in(roles, located.modules[name]).values())
    own: ExpertTensors = located.experts[name]
    taken = {file for suffixes in own.fused.values() for file in roles_in(roles, suffixes).values()}
    for suffixes in own.apart.values():
        taken |= {file for by_number in roles_in(roles, suffixes).values() for file in by_number.values()}
    return taken


def _needless_bias(name: str, placed: Placed, located: Located, tensors: Tensors) -> set[str]:
    """A bias of zeros that a quantiser has given to a module without one."""
    if not isinstance(placed.module, QuantizedLinear) or placed.module.bias is not None:
        return set()
    file = located.modules[name].get(_BIAS)
    return {file} if file is not None and is_zero(tensors.read(file)) else set()
