"""Steps of every kind that requests under attention policies can ask for, so that their kernels are there beforehand.

Nothing lists kernels here, either: the steps go through the functions that serve. There is a prompt and an answer under
each policy of `policies.values`, under each estimator and target of the dynamic one, and within a budget of keys. What
a model or a server refuses is left out. A few kernels are made for the longest context of a step, in factors of two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import numpy as np
import torch
from longreach_patches import NO_SLOT, KVPages, LoadedModel, StateStore

from longreach.engine.device.batch_builder import BatchBuilder
from longreach.engine.device.device_tables import DeviceTables
from longreach.engine.device.forward_pass import ForwardPass
from longreach.engine.device.policies.layer_masks import LayerPolicies
from longreach.engine.messages import Generate
from longreach.engine.requests.request import Request
from longreach.engine.requests.state_hold import StateSlots
from longreach.engine.requests.step_plan import Chunk, StepPlan
from longreach.engine.scheduling.limits import Limits
from longreach.policies.masks import mask_of
from longreach.policies.values import DENSE, POLICIES, Dynamic, RequestPolicy, Window
from longreach.sizes import TILE

_CHUNK = 2 * TILE  # tokens of a prompt
_SMALLEST_CONTEXT = 4096
_CROWD = 33  # answers side by side that one launch of the decode kernel takes in another form
_TARGETS: tuple[dict[str, Any], ...] = ({"recall": 0.9}, {"density": 0.5}, {"speedup": 2.0})
_BUDGET = 64
_FLOOR = 0.9


def kinds_of_policies() -> list[RequestPolicy]:
    """Every policy that a request may name, in each form that has kernels of its own, and dense attention first.

    Whether blocks of keys are near or far does not matter to kernels, nor how many there are.
    """
    estimators = get_args(get_type_hints(Dynamic, include_extras=True)["estimator"])[0]
    dynamic = [Dynamic(estimator=name, dense_below=0, **_TARGETS[0]) for name in get_args(estimators)]
    dynamic += [Dynamic(dense_below=0, **target) for target in _TARGETS[1:]]
    dynamic.append(Dynamic(dense_below=0, min_mass=_FLOOR, **_TARGETS[0]))
    budgets = [Dynamic(recall=1, decode_budget=_BUDGET, min_mass=floor) for floor in (None, _FLOOR)]
    others = [kind() for kind in POLICIES if kind not in (type(DENSE), Dynamic)]
    return [DENSE, Window(sinks=0), *others, *dynamic, *budgets]


class PolicySteps:
    """Steps over these pages and states, to which nothing is written; the model's layers have the masks of
    `policies`."""

    def __init__(
        self,
        loaded: LoadedModel,
        pages: KVPages,
        limits: Limits,
        policies: LayerPolicies,
        states: StateStore | None = None,
    ) -> None:
        self._limits = limits
        self._most = min(limits.max_model_len, pages.num_tokens)
        self._policies = policies
        self._has_states = states is not None
        strides = [group.stride for group in pages.shape.groups]
        size = pages.shape.page_size
        places = -(-limits.max_model_len // size)
        self._builder = BatchBuilder(limits.max_num_seqs, places, size, strides, tiling=policies.tiling)
        tables = DeviceTables(len(strides), limits.max_num_seqs, places, loaded.device)
        drawn = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=loaded.device)
        self._forward = ForwardPass(loaded, pages, drawn, tables, None, policies, None, states)

    def compute(self, *, all_contexts: bool) -> None:
        """Compute them: with the shortest contexts, or also, for kernels that are only compiled, with all others."""
        for policy in kinds_of_policies():
            if self._is_taken(policy) and _has_closed_form(policy):
                for plan in self._plans([self._answer(policy, min(_CHUNK, self._most - 1))]):
                    self._compute(plan)  # few, in another form than a crowd
        for context in self._contexts() if all_contexts else self._contexts()[:1]:
            chunks = self._chunks(context, is_shortest=context == self._contexts()[0])
            for plan in self._plans(chunks):
                self._compute(plan)
                self._compute(plan, all_rows=True)
        if self._forward.loaded.device.type == "cuda":
            torch.cuda.synchronize(self._forward.loaded.device)

    def _contexts(self) -> list[int]:
        """The longest that there can be, and below it whole tiles by factors of two."""
        contexts = [_SMALLEST_CONTEXT]
        while contexts[-1] < self._most:
            contexts.append(2 * contexts[-1])
        return [*contexts[:-1], self._most]

    def _chunks(self, context: int, *, is_shortest: bool) -> Iterator[Chunk]:
        """The first and the last chunk of a prompt of `context`, and tokens of answers, under each policy."""
        length = min(_CHUNK, context, self._limits.max_batched_tokens)
        for policy in kinds_of_policies():
            if not self._is_taken(policy) or not (is_shortest or policy.is_dynamic):
                continue
            if policy.chooses_tiles or not policy.is_dynamic:
                yield self._chunk(policy, context, context - length, length)
            if policy.answer_budget is not None:
                yield self._answer(policy, context - 1)
            elif not policy.is_dynamic:  # whose answers are dense
                yield self._chunk(policy, length, 0, length)  # many of whose queries are sampled
                for _ in range(_CROWD if _has_closed_form(policy) else 1):
                    yield self._answer(policy, min(_CHUNK, self._most - 1))

    def _is_taken(self, policy: RequestPolicy) -> bool:
        try:
            self._policies.check(_request(policy, 1))
        except ValueError:
            return False
        return True

    def _chunk(self, policy: RequestPolicy, prompt_tokens: int, start: int, length: int) -> Chunk:
        request = Request.of(_request(policy, prompt_tokens), seed=0)
        if start == prompt_tokens:
            request.tokens.append(0)
        request.computed = start
        state = StateSlots(NO_SLOT, NO_SLOT) if self._has_states else None
        return Chunk.of(request, length, batch_invariant=self._limits.batch_invariant, state=state)

    def _answer(self, policy: RequestPolicy, prompt_tokens: int) -> Chunk:
        return self._chunk(policy, prompt_tokens, prompt_tokens, 1)

    def _plans(self, chunks: Iterable[Chunk]) -> Iterator[StepPlan]:
        """The chunks in as few steps as the limits let them be."""
        step: list[Chunk] = []
        for chunk in chunks:
            tokens = sum(one.length for one in step) + chunk.length
            if step and (tokens > self._limits.max_batched_tokens or len(step) == self._limits.max_num_seqs):
                yield StepPlan.of(step)
                step = []
            chunk.request.seq_slot = len(step)
            step.append(chunk)
        if step:
            yield StepPlan.of(step)

    def _compute(self, plan: StepPlan, *, all_rows: bool = False) -> None:
        """Compute a step, which writes to no page; with `all_rows` the last layer leaves none out.

        A model may have only one layer that a policy changes.
        """
        self._forward.worth_leaving_out = math.inf if all_rows else ForwardPass.worth_leaving_out
        batch = self._builder.build(plan)
        other = None if batch.other_slots is None else np.full_like(batch.other_slots, -1)
        nowhere = replace(batch, slots=np.full_like(batch.slots, -1), other_slots=other)
        self._forward.logits(nowhere, plan)


def _has_closed_form(policy: RequestPolicy) -> bool:
    """Whether a policy has masks that kernels compute without lists."""
    return policy.has_mask and mask_of(policy).band is not None


def _request(policy: RequestPolicy, prompt_tokens: int) -> Generate:
    given: dict[str, Any] = {"attention": policy}
    return Generate(request_id="warm", prompt=[0] * prompt_tokens, max_tokens=2, **given)
