"""lm-evaluation-harness: tasks of its three kinds, by the completions and the chat API."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from checks import EMBEDDED, MODEL, SMOLLM2, URL, check, run
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

FOLDER = Path(tempfile.mkdtemp(prefix="longreach-client-"))
KEYS = ["48213", "77120", "31415", "90210"]
ROWS = [
    {
        "question": f"The pass key for the silver lantern is {key}. What is the pass key for the silver lantern?",
        "choices": KEYS,
        "answer": number,
        "key": key,
        "text": f"The pass key for the silver lantern is {key}. The keeper of the lantern walks along the river.",
    }
    for number, key in enumerate(KEYS)
]
(FOLDER / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
DATA = f"""\
dataset_path: json
dataset_kwargs:
  data_files:
    test: {FOLDER}/rows.jsonl
test_split: test
"""
TASKS = {
    "pass_key_choice": """\
output_type: multiple_choice
doc_to_text: "{{question}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}]
""",
    "pass_key_words": """\
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: key
generation_kwargs: {until: ["\\n"], max_gen_toks: 24}
filter_list: [{name: number, filter: [{function: regex, regex_pattern: "(\\\\d+)"}, {function: take_first}]}]
metric_list: [{metric: exact_match}]
""",
    "pass_key_text": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list: [{metric: word_perplexity}]
""",
}
for name, text in TASKS.items():
    (FOLDER / f"{name}.yaml").write_text(f"task: {name}\n{DATA}{text}")


def evaluate(model: str, endpoint: str, task: str, **more: Any) -> dict[str, Any]:
    """The metrics of one task, and under `samples` what was asked and answered."""
    arguments = {"model": MODEL, "base_url": f"{URL}{endpoint}", "num_concurrent": 1, "max_retries": 1, **more}
    made: Any = simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=[task],
        task_manager=TaskManager(include_path=str(FOLDER)),
        apply_chat_template="chat" in model,
        bootstrap_iters=0,
        log_samples=True,
    )
    return {**made["results"][task], "samples": made["samples"][task]}


TOKENIZERS = {
    "its own tokenizer": {"tokenizer_backend": "huggingface", "tokenizer": os.environ["LONGREACH_CLIENT_TOKENIZER"]},
    "`tokenizer_backend=remote`": {"tokenizer_backend": "remote"},
}
for name, tokenizer in TOKENIZERS.items():

    @check("completions", f"multiple choice, {name}", on=(EMBEDDED,))
    def _(tokenizer: Any = tokenizer) -> None:
        made = evaluate("local-completions", "/v1/completions", "pass_key_choice", **tokenizer)
        assert made["acc,none"] == 1.0, made

    @check("completions", f"perplexity, {name}", on=(EMBEDDED,))
    def _(tokenizer: Any = tokenizer) -> None:
        made = evaluate("local-completions", "/v1/completions", "pass_key_text", max_length=2048, **tokenizer)
        assert 1 < made["word_perplexity,none"] < 1e6, made


@check("chat", "generation", on=(EMBEDDED,))
def _() -> None:
    made = evaluate("local-chat-completions", "/v1/chat/completions", "pass_key_words")
    assert made["exact_match,number"] == 1.0, made


@check("chat", "generation up to a line's end", on=(SMOLLM2,))
def _() -> None:
    # This model talks about the pass key, and seldom tells it.
    made = evaluate("local-chat-completions", "/v1/chat/completions", "pass_key_words")
    answers = [text for sample in made["samples"] for [text] in sample["resps"]]
    assert len(answers) == len(ROWS), made
    assert all(text.strip() and "\n" not in text for text in answers), answers


def log_likelihood(model: Any, context: list[int], continuation: list[int]) -> float:
    """What transformers computes for the continuation of a context, in token ids."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([context + continuation[:-1]])).logits[0, -len(continuation) :]
    return logits.float().log_softmax(-1).gather(1, torch.tensor(continuation)[:, None]).sum().item()


@check("completions", "scores as transformers computes them", on=(SMOLLM2,))
def _() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = os.environ["LONGREACH_CLIENT_TOKENIZER"]
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    settings = {"tokenizer_backend": "huggingface", "tokenizer": folder, "max_length": 2048}

    choices = evaluate("local-completions", "/v1/completions", "pass_key_choice", **settings)
    assert choices["acc,none"] == 1.0, choices
    for sample in choices["samples"]:
        asked = tokenizer(f"{sample['doc']['question']}\nAnswer:", add_special_tokens=False).input_ids
        for key, told in zip(KEYS, sample["filtered_resps"], strict=True):
            own = log_likelihood(model, asked, tokenizer(f" {key}", add_special_tokens=False).input_ids)
            assert abs(float(told[0]) - own) < 0.02 * abs(own) + 0.05, (key, told, own)

    text = evaluate("local-completions", "/v1/completions", "pass_key_text", custom_prefix_token_id=0, **settings)
    own_sum = sum(
        log_likelihood(model, [0], tokenizer(row["text"], add_special_tokens=False).input_ids) for row in ROWS
    )
    own_perplexity = math.exp(-own_sum / sum(len(row["text"].split()) for row in ROWS))
    told_perplexity = text["word_perplexity,none"]
    assert abs(told_perplexity / own_perplexity - 1) < 0.02, (told_perplexity, own_perplexity)


run()
