"""What answers tell of their cost and progress."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from longreach.api.generation.attention_usage import attention_usage
from longreach.api.generation.text_stream import PlannedAnswer
from longreach.api.http.request_log import RequestRecord
from longreach.api.schema.answers.usage import CachedTokens, CacheUsage, PromptProgress, SentencePlaces, Usage
from longreach.api.schema.requests.sampling import ChoiceFields
from longreach.api.service.call import Call


def usage_of(record: RequestRecord) -> Usage:
    """What has been read and written so far."""
    prompt, output = record.prompt_tokens or 0, record.output_tokens
    cached = CachedTokens(record.cached_tokens)
    attention = attention_usage(record.attention, record.decode.values())
    return Usage(
        prompt,
        output,
        prompt + output,
        cached,
        attention,
        cache_usage(record),
        rope_usage(record),
        places_usage(record),
    )


def rope_usage(record: RequestRecord) -> float | msgspec.UnsetType:
    """The largest factor of its prompts' rotary tables, where the server has such."""
    return record.rope_factor or msgspec.UNSET


def cache_usage(record: RequestRecord) -> CacheUsage | msgspec.UnsetType:
    """What came from which cache, where that was asked for."""
    compared = record.compared
    if compared is None:
        return msgspec.UNSET
    cached, host, disk = record.cached_tokens, record.host_tokens, record.disk_tokens
    return CacheUsage(
        cached_tokens=cached,
        gpu=cached - host - disk,
        host=host,
        disk=disk,
        seen=compared.seen,
        parted=compared.parted,
    )


def places_usage(record: RequestRecord) -> list[SentencePlaces] | msgspec.UnsetType:
    """What of the prompts the answers attended to, in their order, where that was asked for."""
    if record.places is None:
        return msgspec.UNSET
    return [one for _, places in sorted(record.places.items()) for one in places]


class StreamExtras:
    """What chunks carry beside text, as the request's `stream_options` and `return_progress` say."""

    def __init__(self, call: Call[Any], planned: Sequence[PlannedAnswer]) -> None:
        fields: ChoiceFields = call.body
        options = fields.stream_options
        self.last_usage = options is not None and options.include_usage
        self._continuous = options is not None and options.continuous_usage_stats
        if options is not None and options.progress_comments:
            call.record.show_progress()
        self._progress = fields.return_progress
        self._record = call.record
        self._engine = call.engine
        self._reading = [answer.request.request_id for answer in planned if answer.leads]
        self._told = -1

    @property
    def usage(self) -> Usage | msgspec.UnsetType | None:
        """The `usage` of a chunk in mid-stream."""
        if self._continuous:
            return usage_of(self._record)
        return None if self.last_usage else msgspec.UNSET

    def new_progress(self) -> PromptProgress | None:
        """How far the prompts have been read, if that was asked for and is news."""
        done, total = self._record.computed_tokens, self._record.prompt_tokens or 0
        if not self._progress or done == self._told:
            return None
        self._told = done
        left = [self._engine.seconds_to_read(name) for name in self._reading]
        known = [seconds for seconds in left if seconds is not None]
        return PromptProgress(
            total=total,
            cache=self._record.cached_tokens,
            processed=done,
            time_ms=int((time.monotonic() - self._record.started) * 1000),
            eta_ms=0 if done == total else round(sum(known) * 1000) if known else None,
        )
