"""What a model's generation_config.json says of how its tokens are drawn: the defaults of requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from longreach.api.schema.requests.sampling import SamplingFields
from longreach.engine.messages import Sampling
from longreach.errors import ModelFilesError, quoted

FILE = "generation_config.json"

# Fields of the file that are defaults here, under the names that requests have for them.
_TAKEN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# Fields that say nothing of how tokens are drawn, or that are looked at apart.
_OTHER_MATTERS = ("transformers_version", "do_sample", "use_cache", "cache_implementation", "trust_remote_code")


def sampling_defaults(directory: Path) -> tuple[Sampling, str]:
    """The defaults of a model directory, and a line for the log that names them.

    `do_sample: false` is temperature 0, and goes before a temperature. What the file does not name, or has as null, is
    OpenAI's default. Other fields of the file, such as `max_new_tokens`, are not used; the line names them.

    Raises:
        ModelFilesError: the file cannot be read, or a value is not one that a request may have.
    """
    path = directory / FILE
    if not path.is_file():
        return Sampling(), f"the model has no {FILE}: requests that name no temperature have 1"
    given = {name: value for name, value in _read(path).items() if value is not None}
    found = {name: _checked(path, name, given[name]) for name in _TAKEN if name in given}
    sample = given.get("do_sample")
    if not isinstance(sample, bool | None):
        raise _unusable(path, "do_sample", "give true or false", sample)
    if sample is False:
        found["temperature"] = 0.0
    if "top_k" in found:
        found["top_k"] = max(found["top_k"], 0)
    named = ", ".join(f"{name} {value:g}" for name, value in found.items()) or "none"
    unused = [name for name in given if name not in (*_TAKEN, *_OTHER_MATTERS) and not _names_tokens(name)]
    rest = f"; not used: {', '.join(unused)}" if unused else ""
    return Sampling(**found), f"sampling defaults of {FILE}: {named}{rest}"


def _read(path: Path) -> dict[str, Any]:
    try:
        contents = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFilesError(f"{path}: not valid JSON ({error}); {_CURE}") from error
    if not isinstance(contents, dict):
        raise ModelFilesError(f"{path}: expected a JSON object; {_CURE}")
    return contents


_CURE = "correct the file, or start with --generation-config openai"


def _checked(path: Path, name: str, value: object) -> Any:
    """The value, if a request may have it, too."""
    field = SamplingFields.model_fields[name]
    checked: Any = Annotated[field.annotation, field]  # pyright: ignore[reportInvalidTypeForm]
    checks: TypeAdapter[Any] = TypeAdapter(checked, config=ConfigDict(strict=True))
    try:
        return checks.validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise _unusable(path, name, f"{problem[0].lower()}{problem[1:]}", value) from None


def _unusable(path: Path, name: str, problem: str, value: object) -> ModelFilesError:
    return ModelFilesError(f"{path}: {name}: {problem}, got {quoted(value)}; {_CURE}")


def _names_tokens(name: str) -> bool:
    return name.startswith("_") or name.endswith("_token_id")
