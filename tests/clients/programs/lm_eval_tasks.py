"""lm-evaluation-harness: tasks of its three kinds, by the completions and the chat API."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from checks import MODEL, URL, check, run
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
    """The metrics of one task."""
    arguments = {"model": MODEL, "base_url": f"{URL}{endpoint}", "num_concurrent": 1, "max_retries": 1, **more}
    made: Any = simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=[task],
        task_manager=TaskManager(include_path=str(FOLDER)),
        apply_chat_template="chat" in model,
        bootstrap_iters=0,
        log_samples=False,
    )
    return made["results"][task]


TOKENIZERS = {
    "its own tokenizer": {"tokenizer_backend": "huggingface", "tokenizer": os.environ["LONGREACH_CLIENT_TOKENIZER"]},
    "`tokenizer_backend=remote`": {"tokenizer_backend": "remote"},
}
for name, tokenizer in TOKENIZERS.items():

    @check("completions", f"multiple choice, {name}")
    def _(tokenizer: Any = tokenizer) -> None:
        made = evaluate("local-completions", "/v1/completions", "pass_key_choice", **tokenizer)
        assert made["acc,none"] == 1.0, made

    @check("completions", f"perplexity, {name}")
    def _(tokenizer: Any = tokenizer) -> None:
        made = evaluate("local-completions", "/v1/completions", "pass_key_text", max_length=2048, **tokenizer)
        assert 1 < made["word_perplexity,none"] < 1e6, made


@check("chat", "generation")
def _() -> None:
    made = evaluate("local-chat-completions", "/v1/chat/completions", "pass_key_words")
    assert made["exact_match,number"] == 1.0, made


run()
