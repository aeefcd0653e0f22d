"""How the text of a flag or of an environment variable becomes a setting's value, and what is wrong with one.

These are the types and validators of the fields of `longreach.config.Settings`. What is no text passes through them.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import BeforeValidator, Field, Strict, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from longreach.allowed_hosts import Hosts
from longreach.errors import quoted
from longreach.policies.parse import policy_of
from longreach.policies.values import AttentionPolicy
from longreach.text.calls.formats import format_named

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_GGUF_OF_HUB = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}[:/][\w.-]{1,200}\.gguf", re.IGNORECASE)
# What lies in directories of other programs, which have no config.json.
_OTHER_FORMS = {
    "params.json": "the form of Meta's or Mistral's own code",
    "mlc-chat-config.json": "the form of MLC",
    "genai_config.json": "the form of ONNX Runtime",
    "*.onnx": "ONNX",
    "*.engine": "the form of TensorRT",
    "*.nemo": "the form of NeMo",
    "model_index.json": "the form of diffusers",
}
_ROPE_SCALING = re.compile(
    r"(?P<kind>yarn|dynamic|linear):(?P<factor>\d{1,4}(\.\d{1,6})?)(:(?P<original>[1-9]\d{0,7}[kKM]?))?"
)
_MODEL_NAME = re.compile(r"[A-Za-z0-9][\w./:@+-]{0,127}")
_MOST_NAMES = 32
_REVISION = re.compile(r"[A-Za-z0-9][\w./+-]{0,127}")
_IN_TEMPLATES = "{}\n"  # what no template is without, and few names of files have
_TOKEN_UNITS = {"": 1, "k": 1024, "M": 1024**2}
_TIME_UNITS = {"": 1, "ms": 1, "s": 1000}
_DECIMAL_UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTE_UNITS = {"": 1, **_DECIMAL_UNITS, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class Measure:
    """A parser of numbers with a unit, such as `128k` or `4GiB`; what is no string passes through."""

    def __init__(self, metavar: str, units: dict[str, int], example: str) -> None:
        self.metavar = metavar
        self._units = units
        self._factors = {unit.lower(): factor for unit, factor in units.items()}
        self._pattern = re.compile(rf"(\d{{1,15}})\s*({'|'.join(sorted(self._factors, reverse=True))})")
        self._example = example

    def __call__(self, value: object) -> object:
        """The number that a text stands for."""
        if not isinstance(value, str):
            return value
        match = self._pattern.fullmatch(value.strip().lower())
        if match is None:
            raise PydanticCustomError("measure", "give {example}", {"example": self._example})
        return int(match[1]) * self._factors[match[2]]

    def shown(self, value: int) -> str:
        """The number in the largest unit that leaves no fraction, so that it can be given back as it is shown."""
        fitting = (unit for unit in self._units if value and value % self._units[unit] == 0)
        unit = max(fitting, key=lambda unit: (self._units[unit], unit), default="")
        return f"{value // self._units[unit]}{unit}"


def or_auto(value: object) -> object:
    """None for the text `auto`."""
    return None if isinstance(value, str) and value.strip().lower() == "auto" else value


def number(value: object) -> object:
    """The number that a text stands for; a text that is no number stays, for the field's type to refuse."""
    if not isinstance(value, str):
        return value
    try:
        return float(value) if re.search(r"[.eE]", value) else int(value)
    except ValueError:
        return value


def check_policy(value: object) -> object:
    """A policy's text, unchanged if `parse_policy` can read it; `Settings.default_policy` does."""
    if isinstance(value, str):
        parse_policy(value)
    return value


def parse_policy(text: str) -> AttentionPolicy:
    """A policy from JSON or from its short form, such as `window:4096:4`.

    Raises:
        PydanticCustomError: it is neither; names the parameter that is wrong.
    """
    value: object = text
    if text.lstrip().startswith("{"):
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise PydanticCustomError("attention", "not valid JSON: {error}", {"error": str(error)}) from None
    try:
        return policy_of(value).resolve()
    except ValidationError as error:
        problem = error.errors()[0]
        named = {"name": ".".join(map(str, problem["loc"])), "message": problem["msg"]}
        raise PydanticCustomError("attention", "`{name}` {message}", named) from None


def check_overrides(value: object) -> object:
    """The text of a JSON object, unchanged; `Settings.engine_config` reads it."""
    if isinstance(value, str):
        try:
            overrides = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise PydanticCustomError("overrides", "not valid JSON: {error}", {"error": str(error)}) from None
        if not isinstance(overrides, dict):
            raise PydanticCustomError("overrides", 'give a JSON object: {"vocab_size": 32000}')
    return value


def check_rope_scaling(value: object) -> object:
    """The text of a scaling, unchanged if `parse_rope_scaling` can read it; `Settings.engine_config` does."""
    if isinstance(value, str):
        parse_rope_scaling(value)
    return value


def parse_rope_scaling(text: str) -> dict[str, Any] | None:
    """The value of `rope_scaling` in config.json from JSON or from a short form; None for `none`, which is no scaling.

    Raises:
        PydanticCustomError: it is neither.
    """
    text = text.strip()
    if text.lower() == "none":
        return None
    if text.startswith("{"):
        check_overrides(text)
        return orjson.loads(text)
    match = _ROPE_SCALING.fullmatch(text)
    factor = 0.0 if match is None else float(match["factor"])
    if match is None or factor < 1 or (match["kind"] == "yarn") != (match["original"] is not None):
        raise PydanticCustomError(
            "rope_scaling",
            "give yarn:FACTOR:ORIGINAL (yarn:4:32768), dynamic:FACTOR, linear:FACTOR, none, or JSON as in config.json",
        )
    scaling: dict[str, Any] = {"rope_type": match["kind"], "factor": factor}
    if match["original"] is not None:
        scaling["original_max_position_embeddings"] = TypeAdapter(Tokens).validate_python(match["original"])
    return scaling


def layer_numbers(value: object) -> object:
    """The numbers of layers that a text such as `0,1,-1` lists."""
    if not isinstance(value, str):
        return value
    parts = [part.strip() for part in value.split(",") if part.strip()]
    if not all(re.fullmatch(r"-?\d{1,4}", part) for part in parts):
        raise PydanticCustomError("layers", "give numbers of layers with commas: 0,1,-1")
    return tuple(int(part) for part in parts)


def check_names(value: str) -> str:
    """A list of model names, unchanged if each can be one and none comes twice; `Settings.names` splits it."""
    names = value.split(",")
    if not all(_MODEL_NAME.fullmatch(name) for name in names):
        raise PydanticCustomError("names", "give names of at most 128 characters without spaces: owl,owl-latest")
    if len(names) > _MOST_NAMES:
        raise PydanticCustomError("names", "give at most {most} names", {"most": _MOST_NAMES})
    if len({*names}) < len(names):
        raise PydanticCustomError("names", "give each name once")
    return value


def check_revision(value: str) -> str:
    """A name that a branch, a tag or a commit can have, unchanged. It becomes a path of the hub's cache."""
    if _REVISION.fullmatch(value) is None or ".." in value or value.endswith("/"):
        raise PydanticCustomError("revision", "give a branch, a tag or a commit: main, v1.0, 8c1f6a0")
    return value


def check_tokenizer(value: str) -> str:
    """A directory that holds a tokenizer, or what can be a hub id, unchanged."""
    path = Path(value)
    if path.is_dir():
        if (path / "tokenizer.json").is_file():
            return value
        raise PydanticCustomError("tokenizer", "the directory has no tokenizer.json; give one that has, or a hub id")
    if path.is_file():
        raise PydanticCustomError("tokenizer", "this is a file; give the directory that holds it")
    if _HUB_ID.fullmatch(value) is None:
        raise PydanticCustomError("tokenizer", "there is no such directory, and it is no hub id (owner/name)")
    return value


def check_chat_template(value: str) -> str:
    """A file's name or a template's text, unchanged; `longreach.text.template_files` reads and tells them apart."""
    if not is_file(value) and not any(mark in value for mark in _IN_TEMPLATES):
        raise PydanticCustomError("chat_template", "there is no such file, and a template would have braces")
    return value


def check_call_format(value: str) -> str:
    """The name of a format of calls, unchanged if there is one."""
    try:
        format_named(value)
    except ValueError as error:
        raise PydanticCustomError("call_format", "{error}", {"error": str(error)}) from None
    return value


def is_file(value: str) -> bool:
    """Whether a text names a file that is there."""
    try:
        return Path(value).is_file()
    except (OSError, ValueError):  # a text too long for a name, or with a null byte
        return False


def check_hosts(value: str) -> str:
    """A list of hosts, unchanged if `Hosts.parse` can read it."""
    try:
        Hosts.parse(value)
    except ValueError as error:
        raise PydanticCustomError("hosts", "{error}", {"error": str(error)}) from None
    return value


def power_of_two(value: int) -> int:
    """The number itself, if it is a power of two."""
    if value & (value - 1):
        raise PydanticCustomError("power_of_two", "give a power of two")
    return value


# The types of settings. Values that do not come as text must have the right type already.
Whole = Annotated[int, Strict(), BeforeValidator(number)]
Real = Annotated[float, Strict(), BeforeValidator(number), Field(allow_inf_nan=False)]
Tokens = Annotated[int, Strict(), BeforeValidator(Measure("TOKENS", _TOKEN_UNITS, "32768, 128k or 1M (k is 1024)"))]
Milliseconds = Annotated[int, Strict(), BeforeValidator(Measure("TIME", _TIME_UNITS, "milliseconds: 50, 50ms or 1s"))]
Bytes = Annotated[int, Strict(), BeforeValidator(Measure("BYTES", _BYTE_UNITS, "bytes or 512MiB, 4GiB, 4GB, 2TB"))]


def parse_bytes(text: str, source: str) -> int:
    """A number of bytes from text such as 80GiB.

    Raises:
        ValueError: it is none, or not positive; names `source`.
    """
    try:
        value = TypeAdapter(Bytes).validate_python(text)
    except ValidationError as error:
        raise ValueError(f"{source}: {error.errors()[0]['msg']}, got {quoted(text)}") from None
    if value < 1:
        raise ValueError(f"{source}: give more than 0 bytes")
    return value


def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def model_problem(model: str | None, embedded: Path) -> str | None:
    """Why `model`, or without one the model in `embedded`, cannot be served, as far as name and folder tell."""
    path = embedded if model is None else Path(model)
    if path.is_dir():
        if (path / "config.json").is_file() or any(path.glob("*.gguf")):
            return None
        if (path / "adapter_config.json").is_file():
            return f"MODEL: the directory {quoted(model, 256)} holds an adapter; merge it into its model and save that"
        what = "the embedded model's folder" if model is None else f"MODEL: the directory {quoted(model, 256)}"
        other = next((f" (it is in {form})" for pattern, form in _OTHER_FORMS.items() if any(path.glob(pattern))), "")
        return f"{what} has no config.json{other}; give a directory in Hugging Face format"
    if model is None:
        return "MODEL: this build holds no embedded model; name a directory or a hub id"
    if path.is_file() and path.suffix.lower() == ".gguf":
        return None
    if path.exists():
        return f"MODEL: {quoted(model, 256)} is a file, and not GGUF; give the directory that holds it"
    if _HUB_ID.fullmatch(model) is None and _GGUF_OF_HUB.fullmatch(model) is None:
        return f"MODEL: there is no directory {quoted(model, 256)}, and it is no hub id (owner/name)"
    return None
