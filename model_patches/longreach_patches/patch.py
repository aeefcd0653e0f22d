"""patch(model): make a Hugging Face causal language model compute attention with longreach's kernels.

Only this instance changes: its config names our attention function, each attention module carries the mask and the
backend it uses, and its norms run fused. For inference over KV pages, `fuse_layers` goes on to replace whole decoder
layers by few kernels. `undo()` puts everything back.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, cast

from longreach_kernels import Backend, resolve_backend
from torch import Tensor, nn
from transformers import PreTrainedModel

from longreach_patches import batch_invariant as invariance
from longreach_patches import experts, mixers, norms, rope
from longreach_patches.attention import LAYER_ATTRIBUTE, NAME, LayerAttention, register
from longreach_patches.cache.step import PagedStep
from longreach_patches.errors import UnsupportedModelError
from longreach_patches.families import (
    DeltaParts,
    LayerMask,
    attention_layers,
    family_of,
    layer_masks,
    layer_sources,
    rotary_layers,
)
from longreach_patches.fused import DeltaLayer, FusedLayer
from longreach_patches.layout import SINGLE, RankLayout
from longreach_patches.rank_heads import RankHeads
from longreach_patches.tensor_parallel import is_cut


class PatchedModel:
    """The handle of a patched model; also a context manager that undoes the patch on leaving.

    Attributes:
        model: the model that was patched, in place.
        masks: the mask of every layer that attends.
        backend: the kernels in use, with the reason they were chosen.
        batch_invariant: whether a token's results depend on what is computed along with it.
        fused_layers: what computes steps over KV pages in place of the model's own layers; empty if they do.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        modules: list[nn.Module],
        masks: tuple[LayerMask, ...],
        backend: Backend,
        fuse_norms: bool,
        batch_invariant: bool,
    ):
        self.model = model
        self.masks = masks
        self.backend = backend
        self.batch_invariant = batch_invariant
        self._modules = modules
        self._previous: str | None = model.config._attn_implementation
        for index, (module, mask) in enumerate(zip(modules, masks, strict=True)):
            setattr(module, LAYER_ATTRIBUTE, LayerAttention(index, mask, backend, batch_invariant))
        self._mixers = mixers.patch_mixers(model, backend.name)
        model.set_attn_implementation(NAME)
        self._norms = norms.fuse(model) if fuse_norms and not batch_invariant else []
        self._invariant = invariance.make_invariant(model, backend.name) if batch_invariant else []
        self._layers: list[nn.Module] = []
        self._previous_experts: str | None = None
        self.fused_layers: list[FusedLayer] = []

    def fuse_layers(self, layout: RankLayout = SINGLE) -> None:
        """Compute steps over KV pages (`paged_step`) with few kernels a layer; other calls stay as they are.

        Weights of projections that share an input are joined, and the model's own become views of them. They stay that
        after `undo`, with the same numbers. The model must not be trained or moved afterwards. If its weights are one
        rank's part, `layout` says whose sums have to be added, and calls without a `paged_step` are refused.

        Raises:
            UnsupportedModelError: the layers are not made as those of the supported families.
            ValueError: the model is patched to be batch invariant, and this is one rank of several.
        """
        self.spread_layers(layout)
        parts = family_of(self.model.config).parts
        if parts is None:
            raise UnsupportedModelError(
                f"layers of the family {self.model.config.model_type!r} are not fused; its own forward computes steps"
            )
        layers = list(cast("nn.ModuleList", self.model.base_model.layers))
        rotary = dict(zip(attention_layers(self.model.config), rotary_layers(self.model.config), strict=True))
        mixer = family_of(self.model.config).mixer
        for index, layer in enumerate(layers if not self._layers else ()):
            is_last = layer is layers[-1]
            if (turns := rotary.get(index)) is not None:
                fused = FusedLayer(layer, parts, layout, rotary=turns, is_last=is_last)
            else:
                assert isinstance(mixer, DeltaParts)
                fused = DeltaLayer(layer, parts, mixer.module, layout, is_last=is_last)
            layer.forward = functools.partial(_layer_forward, layer, fused)
            self._layers.append(layer)
            self.fused_layers.append(fused)

    def spread_layers(self, layout: RankLayout) -> None:
        """Let the model's own layers compute steps over KV pages, with our products of experts, for inference.

        On one of several ranks weights are cut already (`tensor_parallel.split_weights`), and calls without a
        `paged_step` are refused.

        Raises:
            UnsupportedModelError: its experts compute something that our products do not.
            ValueError: the model is patched to be batch invariant, and this is one rank of several.
        """
        if self._previous_experts is None:
            self._previous_experts = experts.use_experts(self.model, self.backend.name)
            mixers.arrange_weights(self._mixers, layout.context_size)
        if layout.size == 1:
            return
        if self.batch_invariant:
            invariance.check_ranks(layout)
        for module in self._modules:
            alone: LayerAttention = getattr(module, LAYER_ATTRIBUTE)
            setattr(module, LAYER_ATTRIBUTE, replace(alone, ranks=RankHeads(layout, is_cut(module))))
        mixers.spread_mixers(self._mixers, layout)

    @property
    def fused(self) -> bool:
        """Whether steps over KV pages are computed by few kernels a layer, and not by the model's own layers."""
        return bool(self._layers)

    @property
    def leaves_rows_out(self) -> bool:
        """Whether the last layer attends, and need not compute rows that nobody wants, whoever is in the step."""
        if not self.fused or self.batch_invariant:
            return False
        return attention_layers(self.model.config)[-1] == self.model.config.num_hidden_layers - 1

    @property
    def runs_own_modules(self) -> bool:
        """Whether modules of the model's own compute layers, which may wait for the host."""
        return not self.fused

    @property
    def expert_steps(self) -> list[int]:
        """Numbers of tokens of steps that take, between them, every kind of kernel that there is for experts; none in a
        model without."""
        return experts.steps_of_all_kinds(self.model)

    def undo(self) -> None:
        """Restore the attention the model had before. Calling it again changes nothing."""
        if self._previous is None:
            return
        self.model.set_attn_implementation(self._previous)
        for module in self._modules:
            delattr(module, LAYER_ATTRIBUTE)
        norms.restore(self._norms)
        invariance.restore(self._invariant)
        mixers.restore(self._mixers)
        experts.restore(self.model, self._previous_experts)
        self._previous_experts = None
        for layer in self._layers:
            del layer.forward
        self._layers, self.fused_layers = [], []
        self._previous = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()


def patch(
    model: PreTrainedModel, backend: str = "auto", *, fuse_norms: bool = True, batch_invariant: bool = False
) -> PatchedModel:
    """Patch `model` in place to use longreach's attention, and return the handle that can undo it.

    The patched model trains as before. transformers predicts each label from the row before it, so with left padding
    the first real token of a sequence is predicted from a padding row, where attention has no meaning: label that token
    -100, as padding is, or pad on the right. A config's `attention_dropout` means nothing in eval mode; a training step
    with it is refused.

    Args:
        model: a causal language model of a supported family, on its device and in its dtype.
        backend: "auto", or a name that `longreach_kernels.resolve_backend` knows; an explicit name never falls back.
        fuse_norms: whether to fuse the RMSNorms too. torch.compile does so itself, and without ours it can use one
            graph for all layers that share a mask.
        batch_invariant: whether a token's results are to have the same bits whatever is computed along with it, for
            inference. Over KV pages that holds as `longreach_kernels.paged_attention` says; of mixtures of experts
            once layers are fused.

    Raises:
        UnsupportedModelError: the family or a feature of its config is not supported, or the model is patched already.
        ValueError: the backend cannot run on the model's device or dtype, or is not batch invariant.
    """
    masks = layer_masks(model.config)
    modules = _attention_modules(model)
    _check_sources(modules, layer_sources(model.config))
    if any(hasattr(module, LAYER_ATTRIBUTE) for module in modules):
        raise UnsupportedModelError(
            "the model is patched already; call undo() on the first handle before patching again"
        )
    parameter = next(model.parameters())
    resolved = resolve_backend(backend, parameter.device, parameter.dtype)
    if batch_invariant:
        invariance.check_backend(resolved)
        invariance.check_modules(model)
    rope.check_frozen(model)
    register()
    return PatchedModel(model, modules, masks, resolved, fuse_norms, batch_invariant)


def _layer_forward(
    layer: nn.Module,
    fused: FusedLayer,
    hidden_states: Tensor,
    *args: Any,
    position_embeddings: Any = None,
    paged_step: PagedStep | None = None,
    **kwargs: Any,
) -> Tensor:
    if paged_step is not None and fused.in_use:
        return fused(hidden_states, position_embeddings, paged_step, kwargs.get("position_ids"))
    if paged_step is None and fused.is_part:
        raise UnsupportedModelError("a model that is split over ranks computes steps over KV pages only")
    if paged_step is not None:
        kwargs["paged_step"] = paged_step
    with fused.own_weights():
        return type(layer).forward(layer, hidden_states, *args, position_embeddings=position_embeddings, **kwargs)


def _attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that call the attention interface, first layer to last."""
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UnsupportedModelError(f"{type(model).__name__} has no list of decoder layers where one was expected")
    config = model.config
    if len(layers) != config.num_hidden_layers:
        raise UnsupportedModelError(
            f"expected {config.num_hidden_layers} layers in {type(model).__name__}, found {len(layers)}; "
            "pass the whole causal language model"
        )
    name, attending = family_of(config).attention, attention_layers(config)
    modules = [getattr(layers[index], name, None) for index in attending]
    if [getattr(module, "layer_idx", None) for module in modules] != list(attending):
        raise UnsupportedModelError(
            f"the attention modules of {type(model).__name__} do not number their layers as its config does"
        )
    return cast("list[nn.Module]", modules)


def _check_sources(modules: list[nn.Module], sources: tuple[int, ...]) -> None:
    """What a module says of sharing is held against the family's row: a wrong row is an error, not another model."""
    for index, (module, source) in enumerate(zip(modules, sources, strict=True)):
        if getattr(module, "is_kv_shared_layer", False) != (source != index):
            raise UnsupportedModelError(
                f"layer {index} reads the keys of layer {source} by its family's row, and its module says otherwise"
            )
