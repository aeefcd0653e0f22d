"""vLLM's server for gpt-oss without a download: for completions, which need no chat encoding.

Python imports a module of this name at its start where this folder is in PYTHONPATH. For models of the type gpt_oss,
vLLM loads openai_harmony's encoding before it serves anything, and that fetches a vocabulary. Completions never use it.
"""

from __future__ import annotations

from typing import Any


class NoEncoding:
    """Stands for the encoding of chats: there are no stop tokens of its own, and nothing else can be asked of it."""

    def stop_tokens_for_assistant_actions(self) -> list[int]:
        """None."""
        return []


def leave_out(harmony: Any) -> None:
    """Have a module `openai_harmony` load no vocabulary."""
    harmony.load_harmony_encoding = lambda _: NoEncoding()


try:
    import openai_harmony
except ImportError:  # a vLLM without it loads nothing
    pass
else:
    leave_out(openai_harmony)
