"""From the command line's words to the suite `ruler-like`: which server, which tokens, which policies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longreach.bench.launch import described, is_url, served
from longreach.bench.policy_sweep import Policy, chosen
from longreach.bench.recall.client import Server
from longreach.bench.recall.run import tokenizer_of
from longreach.bench.recall.settings import EARLY, SETTINGS
from longreach.bench.recall.sweep import Report, Save, SweepPlan, sweep
from longreach.bench.recall.tokens import Count, by_file, by_server, has_file
from longreach.bench.summary import environment


def run(
    target: str | None,
    plan: SweepPlan,
    attention: Sequence[str] | None = None,
    *,
    tokenizer: str | None = None,
    concurrency: int = 1,
    flags: Sequence[str] = (),
    api_key: str | None = None,
    report: Report = print,
    save: Save | None = None,
) -> dict[str, Any]:
    """Measure a running server (`target` is its URL) or a model, which is served with `flags` for as long as it takes.

    Policies are those of `attention` beside dense, or `SETTINGS`. Tokens are counted by `tokenizer` (a directory or hub
    id), by the model's own file, or by the server's `/tokenize`. `save` is given the result after each setting.

    Raises:
        ValueError: there is no such server, model, tokenizer or policy, or a prompt cannot be made.
    """
    model: dict[str, Any] = {}

    def keep(result: dict[str, Any]) -> None:
        if save is not None:
            save(model | result)

    if target is None or not is_url(target):
        flags = ["--page-bounds", *flags]  # which budgets need
    with served(target, flags) as running:
        if running.start_s is not None:
            report(f"longreach: ready after {running.start_s:.1f} s")
        policies = [_relabelled(policy) for policy in chosen(running.url, attention or [], api_key)]
        if attention is None and policies[0].attention is not None:
            policies += [Policy(labelled(setting), setting) for setting in SETTINGS]
        name = Server(running.url, api_key=api_key).model
        model |= {"environment": environment(), "model": described(target) | {"served": name}}
        if target is not None and not is_url(target):
            model["model"]["name"] = Path(target).name
        result = sweep(
            lambda value: Server(running.url, value, api_key),
            policies,
            _counted(target, tokenizer, running.url, name, api_key),
            plan,
            concurrency=concurrency,
            report=report,
            save=keep,
        )
    return model | result


def labelled(attention: dict[str, Any]) -> str:
    """What tables call a setting: the policy's name, and its parameters; of a long list only how many and the last, and
    not where `dynamic` begins, if that is where it does in `SETTINGS`."""
    parts = [attention["policy"]]
    for name, value in attention.items():
        if isinstance(value, list) and len(value) > 2:
            value = f"({len(value)} up to {value[-1]})"
        if (name, value) != ("dense_below", EARLY) and name != "policy":
            parts.append(f"{name} {value}")
    return " ".join(parts)


def _relabelled(policy: Policy) -> Policy:
    return Policy(labelled(policy.attention), policy.attention) if isinstance(policy.attention, dict) else policy


def _counted(target: str | None, tokenizer: str | None, url: str, model: str, api_key: str | None) -> Count:
    if tokenizer is not None or target is None or has_file(target):
        return by_file(tokenizer_of(tokenizer or target))
    return by_server(url, model, api_key)
