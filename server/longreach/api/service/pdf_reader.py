"""PDFs of requests: each is read in a process of its own, which is ended when its time is up or nobody waits for it.

A client sends the PDF of a conversation again with each of its turns, so what was read lately is kept. Nobody learns
from the time of an answer that another key has sent the same file: what is kept is kept for its owner.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from dataclasses import dataclass, field, replace

from longreach.api.service.turns import TooManyWaitingError, Turns
from longreach.documents.pdf import CHILD_SECONDS, PdfText
from longreach.documents.pdf_process import PATIENCE, command, outcome
from longreach.errors import OverloadedError, UnavailableError
from longreach.util.child_answer import child_answer
from longreach.util.work_pool import WorkPool

log = logging.getLogger(__name__)

# PDFs that are read at once, those that may wait for it, and as many of one caller.
_AT_ONCE = 2
_MOST_WAITING = 32
_MOST_OF_ONE = 8
_KEPT_BYTES = 32 << 20  # of texts
_RETRY_AFTER_SHORTAGE = 2
_RETRY_AFTER_OTHERS = 10


@dataclass(frozen=True)
class _Question:
    """A PDF of an owner; two are the same by its digest."""

    owner: str
    digest: bytes
    most_bytes: int
    data: bytes = field(compare=False, repr=False)


class PdfReader:
    """Reads the PDFs of all requests. Callers take turns, each with one at a time. `pool` does what is long."""

    def __init__(self, pool: WorkPool) -> None:
        self._pool = pool  # for what would hold the event loop
        self._turns = Turns(self._read, slots=_AT_ONCE, waiting=_MOST_WAITING, waiting_of_one=_MOST_OF_ONE)
        self._kept: OrderedDict[_Question, PdfText] = OrderedDict()
        self._kept_bytes = 0

    async def read(self, data: bytes, most_bytes: int, *, owner: str, caller: str) -> PdfText:
        """The text of a PDF, of at most `most_bytes` in UTF-8. Cancelling this ends the process.

        Raises:
            PdfError: it cannot be read.
            OverloadedError: too many wait, or the machine is too busy.
            UnavailableError: no process can be started.
        """
        digest = await self._pool.call(lambda: hashlib.sha256(data).digest(), caller=caller)
        question = _Question(owner, digest, most_bytes, data)
        bare = replace(question, data=b"")
        if (known := self._kept.get(bare)) is not None:
            self._kept.move_to_end(bare)
            return known
        try:
            found = await self._turns.result(question, caller)
        except TooManyWaitingError:
            raise OverloadedError(
                "The server is busy: too many PDFs wait to be read.", _RETRY_AFTER_OTHERS, code="pdf_queue_full"
            ) from None
        if bare not in self._kept:
            self._kept[bare] = found
            self._kept_bytes += len(found.text)
        while self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popitem(last=False)[1].text)
        return found

    async def stop(self) -> None:
        """End the processes that read."""
        await self._turns.stop()

    async def _read(self, question: _Question) -> PdfText:
        try:
            answer = await child_answer(command(question.most_bytes), question.data, CHILD_SECONDS * PATIENCE)
        except TimeoutError:  # an OSError, too
            message = "The server is busy: the machine has no time to read a PDF."
            raise OverloadedError(message, _RETRY_AFTER_OTHERS, code="pdf_timeout") from None
        except OSError as error:
            log.error("no process can be started to read a PDF: %s", error.strerror or error)
            message = "No process can be started to read a PDF at this moment."
            raise UnavailableError(message, code="pdf_not_read", retry_after=_RETRY_AFTER_SHORTAGE) from None
        return await self._pool.call(outcome, answer.status, answer.output)
