"""The model's tokenizer, without torch or transformers: `tokenizer.json` and what `tokenizer_config.json` adds."""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken

from longreach.errors import TokenizerError
from longreach.text.beginning import Beginning
from longreach.text.borders import Borders
from longreach.text.detokenizer import Detokenizer, TokenBytes
from longreach.text.files import model_file
from longreach.text.marks import GUARD, Marks, renamed, unguarded
from longreach.text.measure import Measure
from longreach.text.special_tokens import CONFIG, declared_tokens, read_object
from longreach.util.work_pool import done

# A piece has so many characters, and at most so many more up to the next place where it can end.
PIECE_CHARACTERS = 32 * 1024
MAX_STRETCH_CHARACTERS = 512 * 1024
_TOKENS_A_STEP = 4096  # of decoding


class TooManyTokensError(Exception):
    """A text has more tokens than it may have.

    Attributes:
        tokens: it has so many; at least so many unless `exact`.
        estimate: about so many, judged by its beginning; None where nothing of it was encoded.
    """

    def __init__(self, tokens: int, exact: bool = False, estimate: int | None = None) -> None:
        super().__init__(f"{tokens} tokens" if exact else f"at least {tokens} tokens")
        self.tokens = tokens
        self.exact = exact
        self.estimate = estimate


class UnbrokenTextError(Exception):
    """A text has a stretch of letters or digits that is too long to be encoded in one piece.

    Attributes:
        at: where it begins, in characters.
    """

    def __init__(self, at: int) -> None:
        super().__init__(
            f"from character {at} on there are more than {MAX_STRETCH_CHARACTERS} characters without a blank, a line's "
            "end or punctuation; put line breaks in"
        )
        self.at = at


class Tokenizer:
    """Encodes prompts and makes detokenizers; loaded by `Tokenizer.load`.

    A beginning-of-sequence token is added where the model's own tokenizer adds one. Special tokens that are written in
    a text are read as such, unless they are broken by `marks.GUARD` or `parse_special` is false: then they are text.

    Attributes:
        marks: the special tokens.
        config: the contents of `tokenizer_config.json`, as far as there is one.
        added_ids: the ids of added tokens, special or not, by their texts.
        digest: of all that token ids depend on, in hex.
        around: the ids that stand before and behind a text; None where they are not known apart from it.
        borders: where a text can be cut; None where no cut is known to be safe.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any] | None = None) -> None:
        self.config = config or {}
        # A file saved while training may hold limits that would silently cut or fill up prompts.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._token_bytes = TokenBytes(backend)
        self._all_token_bytes = TokenBytes(backend, special=True)
        self.marks = Marks(token.content for token in backend.get_added_tokens_decoder().values() if token.special)
        self.added_ids = {token.content: id_ for id_, token in backend.get_added_tokens_decoder().items()}
        self.around = _around(backend)
        description = backend.to_str()
        self.digest = hashlib.sha256(description.encode()).hexdigest()
        described = json.loads(description)
        self.borders = Borders.of(backend, described)
        self._measure = Measure.of(described)
        self._plain: tuple[tokenizers.Tokenizer, dict[str, str], dict[int, int]] | None = None
        self._making_plain = threading.Lock()

    @classmethod
    def load(cls, model: str) -> Tokenizer:
        """Read the tokenizer of a model directory or hub id.

        Raises:
            TokenizerError: there is no fast tokenizer, it is broken, or its decoder cannot be streamed.
        """
        path = model_file(model, "tokenizer.json")
        if path is None:
            raise TokenizerError(
                f"{model} has no tokenizer.json; write one with "
                "transformers.AutoTokenizer.from_pretrained(MODEL).save_pretrained(MODEL)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise TokenizerError(f"the tokenizer of {model} cannot be read: {error}") from error
        config = read_object(model, CONFIG)
        _add_declared_tokens(backend, config)
        _mark_special(backend, declared_tokens(model))
        return cls(backend, config)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def id_limit(self) -> int:
        """One more than the largest token id; more than `vocab_size` where ids are left out."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def in_pieces(self) -> bool:
        """Whether long texts are encoded in pieces; some kinds of tokenizers have no safe places to cut at."""
        return self.borders is not None

    def token_id(self, token: str) -> int | None:
        """The id of a token's name, if it is one."""
        return self._backend.token_to_id(token)

    def is_special(self, token_id: int) -> bool:
        """Whether a token is special, so that answers mostly leave its text out."""
        return self._token_bytes.is_special(token_id)

    def special_ids(self, texts: Iterable[str]) -> dict[str, int]:
        """The ids of the special tokens that are written in `texts`, by how they are written."""
        found = {name: self._backend.token_to_id(name) for name in self.marks.within(texts)}
        return {name: token for name, token in found.items() if token is not None}

    def bad_words(self, words: Iterable[str]) -> list[list[int]]:
        """Token ids of words: as a text begins with them, and as they are written behind a blank.

        vLLM leaves the second out where it has another number of tokens, and so lets most words through.
        """
        found: list[list[int]] = []
        for word in words:
            bare, behind = (self.encode_here(blank + word.lstrip(" "), special=False) for blank in ("", " "))
            found.append(bare)
            if behind[-len(bare) :] != bare:  # else whoever writes it completes the first as well
                found.append(behind)
        return [ids for ids in found if ids]  # what has no token cannot be drawn

    def least_tokens(self, text: str) -> int:
        """No fewer tokens than these can stand for a text; 0 where nothing is known without encoding it."""
        return 0 if self._measure is None else self._measure.least_tokens(unguarded(text))

    def encode_here(self, text: str, special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a prompt, computed in the calling thread; see `encoding`."""
        return done(self.encoding(text, special, parse_special))

    def encoding(
        self,
        text: str,
        special: bool = True,
        parse_special: bool = True,
        most: int | None = None,
        beginning: Beginning | None = None,
    ) -> Generator[None, None, list[int]]:
        """Work that returns the token ids of a prompt, piece by piece, mostly without the GIL.

        Arguments:
            special: with the tokens that the model's tokenizer puts around a text.
            parse_special: special tokens that are written in the text are read as such.
            most: with more tokens than these it is given up.
            beginning: where the text begins so, only the rest of it is encoded.

        Raises:
            TooManyTokensError: it was given up.
            UnbrokenTextError: it cannot be cut into pieces of bearable size.
        """
        ids, known = array("i"), 0
        if beginning is not None and beginning.begins(text, special, parse_special):
            ids, known = beginning.ids[:], beginning.at
            yield
        of_rest = 1 - known / max(len(text), 1)
        for piece, read in self._pieces(text[known:], special, parse_special, goes_on=bool(ids)):
            ids.extend(piece)
            if most is not None and len(ids) > most:
                share = 1 - of_rest * (1 - read)
                raise TooManyTokensError(len(ids), read == 1, None if read == 1 else round(len(ids) / share))
            yield
        return ids.tolist()

    def _pieces(
        self, text: str, special: bool, parse_special: bool, goes_on: bool = False
    ) -> Iterator[tuple[list[int], float]]:
        """Token ids of pieces, and the share of the text that has been read: 1 with the last, and not before.

        A text that `goes_on` stands behind a cut.
        """
        borders, plain = self.borders, GUARD in text or not parse_special
        if plain and parse_special:
            text = self.marks.rename(text, self._plain_backend()[1])
        around = self.around if special else ([], [])
        if around is None:  # what stands around a text is not known apart from it
            yield self._encode(text, plain, special=True), 1.0
            return
        start, before = 0, [] if goes_on else around[0]
        while True:
            end = len(text)
            if borders is not None:
                found = borders.next(text, start, PIECE_CHARACTERS, PIECE_CHARACTERS + MAX_STRETCH_CHARACTERS)
                if found is None:
                    raise UnbrokenTextError(start + PIECE_CHARACTERS)
                end = found
            ids = self._encode(text[start:end], plain)
            last = end == len(text)
            yield [*before, *ids, *(around[1] if last else [])], 1.0 if last else end / len(text)
            if last:
                return
            start, before = borders.begin(text, end) if borders is not None else end, []

    def encode_part(self, text: str, parse_special: bool = True) -> list[int]:
        """Token ids of a part of a text, between two of its `borders`, without what stands around a text."""
        plain = GUARD in text or not parse_special
        if plain and parse_special:
            text = self.marks.rename(text, self._plain_backend()[1])
        return self._encode(text, plain)

    def _encode(self, text: str, plain: bool, special: bool = False) -> list[int]:
        backend, _, own = self._plain_backend() if plain else (self._backend, {}, {})
        # Not `encode`: it holds the GIL throughout, and keeps offsets that nobody reads.
        ids = backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return [own.get(token, token) for token in ids] if plain else ids

    def _plain_backend(self) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[int, int]]:
        with self._making_plain:  # made for the first text that needs it: it takes as much memory as the other
            if self._plain is None:
                self._plain = renamed(self._backend)
        return self._plain

    def detokenizer(self, special: bool = False) -> Detokenizer:
        """A detokenizer for one answer; `special`: special tokens have text, too."""
        return Detokenizer(self._all_token_bytes if special else self._token_bytes)

    def decoding(self, ids: Sequence[int]) -> Generator[None, None, str]:
        """Work for a `WorkPool` that returns the text of token ids, without special tokens."""
        detokenizer = self.detokenizer()
        pieces = []
        for start in range(0, len(ids), _TOKENS_A_STEP):
            pieces += map(detokenizer.push, ids[start : start + _TOKENS_A_STEP])
            yield
        return "".join(pieces) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for by itself; special tokens are their names."""
        return self._all_token_bytes[token_id]


def _around(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """The ids that the post-processor puts before and behind a text; None if it does something else."""
    bare, full = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
    for at in range(len(full) - len(bare) + 1):
        if full[at : at + len(bare)] == bare:
            return full[:at], full[at + len(bare) :]
    return None


def _add_declared_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Add the tokens that only `tokenizer_config.json` declares.

    As in transformers, its `add_bos_token` and `add_eos_token` do not count beside a `tokenizer.json`, whose
    post-processor says what surrounds a prompt.
    """
    for id_, token in _declared(config):
        if backend.token_to_id(token["content"]) is None:
            flags = {name: value for name, value in token.items() if isinstance(value, bool) and name != "special"}
            added = AddedToken(token["content"], **flags)
            (backend.add_special_tokens if token.get("special", False) else backend.add_tokens)([added])
        if backend.token_to_id(token["content"]) != id_:
            raise TokenizerError(f"tokenizer_config.json and tokenizer.json disagree about the token with id {id_}")


def _declared(config: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """The tokens of `added_tokens_decoder`, by their ids."""
    try:
        declared = sorted((int(id_), token) for id_, token in (config.get("added_tokens_decoder") or {}).items())
        if all(isinstance(token["content"], str) for _, token in declared):
            return declared
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(f"{CONFIG}: no readable added_tokens_decoder ({error})") from error
    raise TokenizerError(f"{CONFIG}: no readable added_tokens_decoder (a token's content is no text)")


def _mark_special(backend: tokenizers.Tokenizer, declared: list[str]) -> None:
    """Read tokens of the vocabulary as special where only the files beside `tokenizer.json` say that they are.

    transformers also gives new ids to declared tokens that are not in the vocabulary. The model has no embeddings for
    those, so their names stay plain text here.
    """
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in declared:
        if token not in added and backend.token_to_id(token) is not None:
            backend.add_special_tokens([AddedToken(token, special=True)])
