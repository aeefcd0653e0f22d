"""A GGUF file as MODEL: which file it is, and the directory in Hugging Face format that stands for what it describes.

The directory has the config and the tokenizer that transformers makes of the file's metadata. The engine reads the
weights from the file itself.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from longreach import hub
from longreach.errors import ModelFilesError
from longreach.util.extras import has, missing
from longreach.util.safe_path import environment, module_command

_OF_HUB = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)[:/](?P<file>[\w.-]+\.gguf)", re.IGNORECASE)
_SUFFIX = ".gguf"
_PROJECTOR = "mmproj"  # of the parts for images, which are not served
_MOST_SHOWN = 8
# Words that llama.cpp cuts in a way of their own, where transformers would take GPT-2's.
_LIKE_GPT2 = (None, "gpt-2", "default")


def is_gguf(model: str) -> bool:
    """Whether a MODEL is a GGUF file by its name: one that is there, or one of the hub."""
    return model.lower().endswith(_SUFFIX) and (Path(model).is_file() or _OF_HUB.fullmatch(model) is not None)


def find(model: str, revision: str | None = None) -> Path | None:
    """The GGUF file that a MODEL is: the file itself, the only one of a directory without other weights, or
    `owner/name:FILE.gguf` of the hub, downloaded if it has to be. None for another model.

    Raises:
        ModelFilesError: a directory has several, the file cannot be had, or the extra is not installed.
    """
    path = Path(model)
    found = None
    if path.is_dir():
        found = _only_one(path)
    elif is_gguf(model):
        match = _OF_HUB.fullmatch(model)
        found = path if path.is_file() or match is None else hub.one_file(match["id"], match["file"], revision)
    if found is not None and not has("gguf"):
        raise ModelFilesError(f"{found}: to read GGUF, {missing('gguf', 'gguf')}")
    return found


def described(path: Path, tokenizer: bool = True, apart: bool = False) -> Path:
    """The directory with the config.json and, unless another `tokenizer` is served, the tokenizer of a GGUF file. It is
    made once a process, and removed at its end.

    Making it takes transformers; with `apart` another process does that, and this one does not import it.

    Raises:
        ModelFilesError: the file cannot be read, or describes something that is not served; the message says what.
    """
    directory = _scratch(str(path), tokenizer)
    if (directory / hub.CONFIG).is_file():
        return directory
    if not apart:
        try:
            write(path, directory, tokenizer)
        except ValueError as error:
            raise ModelFilesError(" ".join(str(error).split())) from error
        return directory
    command = module_command("longreach.gguf_source", str(path), str(directory), *(["tokenizer"] if tokenizer else []))
    ended = subprocess.run(command, capture_output=True, text=True, env=environment(os.environ), check=False)  # noqa: S603
    if ended.returncode != 0:
        raise ModelFilesError((ended.stderr.strip() or f"{path}: it cannot be read").splitlines()[-1])
    return directory


def dequantized(file: str, dtype: str, weight_bytes: int, quantization: str | None = None) -> str:
    """What is said of the weights of a GGUF file; `weight_bytes` are those of one device, and `quantization` what the
    weights become then."""
    taken, size = (f"{count / 2**30:.2f} GiB" for count in (weight_bytes, Path(file).stat().st_size))
    name = dtype.removeprefix("torch.") + ("" if quantization is None else f", then made {quantization}")
    return f"{file}: the weights are dequantized to {name}, {taken} on each device; the file has {size}"


def write(path: Path, directory: Path, tokenizer: bool) -> None:
    """Write what a GGUF file says of its config and tokenizer to a directory; config.json is the last.

    Raises:
        longreach_patches.PatchError, ValueError: it cannot be read, or describes something that is not served.
    """
    try:
        from longreach_patches import gguf_file
    except ImportError as error:  # parts of transformers that may move
        raise ValueError(f"{path}: this version of transformers has another reader of GGUF ({error})") from error
    config = gguf_file.config_of(path)
    if tokenizer:
        _write_tokenizer(path, directory)
    (directory / hub.CONFIG).write_text(json.dumps(config, indent=1), "utf-8")


def _write_tokenizer(path: Path, directory: Path) -> None:
    from transformers import AutoTokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    from transformers.integrations.gguf.reader import read_gguf_metadata

    metadata, _ = read_gguf_metadata(str(path))
    cut = metadata.get("tokenizer.ggml.pre")
    other = "give the tokenizer of the model that it was made from: --tokenizer PATH_OR_ID"
    if metadata.get("tokenizer.ggml.model") == "gpt2" and cut not in (*_LIKE_GPT2, *GGUF_PRE_TOKENIZER_SPLITS):
        raise ValueError(f"{path}: its tokenizer cuts texts by a rule that is not known, {cut!r}; {other}")
    try:
        AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name).save_pretrained(directory)
    except Exception as error:
        raise ValueError(f"{path}: no tokenizer can be made of it ({error}); {other}") from error


def _only_one(directory: Path) -> Path | None:
    try:
        names = sorted(directory.iterdir())
    except OSError as error:
        raise ModelFilesError(f"{directory}: the directory cannot be listed ({error})") from error
    if any(path.name.endswith((".safetensors", ".safetensors.index.json")) for path in names):
        return None
    files = [path for path in names if path.suffix.lower() == _SUFFIX]
    models = [path for path in files if _PROJECTOR not in path.name.lower()]
    if len(models) > 1:
        shown = ", ".join(path.name for path in models[:_MOST_SHOWN])
        more = f" and {len(models) - _MOST_SHOWN} more" if len(models) > _MOST_SHOWN else ""
        raise ModelFilesError(f"{directory}: there are several GGUF files; give one of them: {shown}{more}")
    return models[0] if models else None


@functools.cache
def _scratch(path: str, tokenizer: bool) -> Path:
    directory = Path(tempfile.mkdtemp(prefix="longreach-gguf-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def main() -> None:
    """Write the directory that the command line names; what is wrong is the last line of stderr."""
    file, directory, *tokenizer = sys.argv[1:]
    try:
        write(Path(file), Path(directory), bool(tokenizer))
    except Exception as error:  # noqa: BLE001 - told to the process that has asked
        sys.exit(" ".join(str(error).split()) or type(error).__name__)


if __name__ == "__main__":
    main()
