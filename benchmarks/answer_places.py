"""How often the places that a server tells of an answer (`return_places`) hold the fact that was asked for.

    python benchmarks/answer_places.py URL --lengths 4096,16384 --prompts 4 [--form chat] [--out FILE]

A prompt is prose or documentation with twelve sentences of three kinds hidden in it: pass keys, where people keep
things, and capitals of invented provinces. Each is asked for in turn. `--form completion` ends the prompt with the
beginning of the sentence, as a base model can complete it; `question` with a question and `Answer:`, as the embedded
model reads it; `chat` asks a chat. Only answers that contain the fact count. A place is right if it overlaps the fact's
sentence. The first sentence of the answer that has the fact is looked at.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import random
import sys
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

_COLOURS = ["silver", "copper", "wooden", "yellow", "marble", "purple", "broken", "velvet", "golden", "crystal"]
_OBJECTS = ["lantern", "harbor", "engine", "orchard", "compass", "bridge", "piano", "castle", "ladder", "garden"]
_NAMES = ["Tom", "Maria", "Henry", "Alice", "Victor", "Sofia", "Oscar", "Nina", "George", "Clara"]
_THINGS = ["violin", "passport", "telescope", "camera", "umbrella", "diary", "chessboard", "kettle", "bicycle", "sword"]
_SPOTS = (
    "the attic of the old mill",
    "a box under the kitchen stairs",
    "the wardrobe on the third floor",
    "the shed behind the church",
    "a locker at the railway station",
    "the cellar of the bakery",
    "the tower of the school",
    "the boathouse by the lake",
)
_PROVINCES = [
    "Velmora",
    "Karstin",
    "Dunholm",
    "Osteria",
    "Brankley",
    "Tirvan",
    "Melloway",
    "Quenby",
    "Torrance",
    "Hallbrook",
]
_TOWNS = [
    "Harstead",
    "Linwick",
    "Aldermoor",
    "Northgate",
    "Winslow",
    "Castlebrook",
    "Fenmoor",
    "Riverside",
    "Stanmere",
    "Oldbury",
]
_OF_EACH = 4
_ROOM = 400  # tokens for facts, question and answer


class Fact(NamedTuple):
    """A hidden sentence, the value that is asked for at its end, and the question."""

    kind: str
    beginning: str
    value: str
    question: str

    @property
    def sentence(self) -> str:
        """As it is hidden."""
        return f"{self.beginning} {self.value}."


@dataclass
class Count:
    """Of the facts of one kind: asked for, found in the answer, and of these those with the right first place, a right
    place among the three, and no place at all."""

    asked: int = 0
    found: int = 0
    first: int = 0
    any: int = 0
    none: int = 0


def facts(rng: random.Random) -> list[Fact]:
    """Twelve facts in any order."""
    found = []
    for colour, what in zip(rng.sample(_COLOURS, _OF_EACH), rng.sample(_OBJECTS, _OF_EACH), strict=True):
        key = f"pass key for the {colour} {what}"
        found.append(Fact("key", f"The {key} is", str(rng.randint(10000, 99999)), f"What is the {key}?"))
    triples = (rng.sample(values, _OF_EACH) for values in (_NAMES, _THINGS, _SPOTS))
    for name, thing, spot in zip(*triples, strict=True):
        found.append(Fact("spot", f"{name} keeps the {thing} in", spot, f"Where does {name} keep the {thing}?"))
    for province, town in zip(rng.sample(_PROVINCES, _OF_EACH), rng.sample(_TOWNS, _OF_EACH), strict=True):
        capital = f"capital of the province of {province}"
        found.append(Fact("capital", f"The {capital} is the town of", town, f"What is the {capital}?"))
    rng.shuffle(found)
    return found


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer of a server."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{url} says {error.code}: {error.read().decode()}") from error


def document(url: str, model: str, hidden: list[Fact], length: int, rng: random.Random) -> str:
    """A text of about so many tokens with the facts in it, each a line of its own."""
    lines = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items())).split("\n")
    start = rng.randrange(len(lines))
    lines = (lines[start:] + lines[:start]) * (1 + length // 100_000)
    kept = lines[: length // 32]
    for _ in range(8):
        tokens = post(f"{url}/tokenize", {"model": model, "prompt": "\n".join(kept)})["count"]
        if tokens <= length - _ROOM and tokens > 0.97 * (length - _ROOM):
            break
        change = (length - _ROOM) / tokens
        kept = lines[: max(20, int(len(kept) * change * (0.9 if change > 1.2 else 0.985)))]
    for place, fact in zip(sorted(rng.sample(range(2, len(kept)), len(hidden)), reverse=True), hidden, strict=True):
        kept.insert(place, fact.sentence)
    return "\n".join(kept)


def ask(url: str, model: str, text: str, fact: Fact, form: str) -> tuple[str, list[dict[str, Any]], str]:
    """The answer, its places, and the text that their characters count in."""
    body: dict[str, Any] = {"model": model, "temperature": 0, "return_places": True}
    if form == "chat":
        content = f"{text}\n\n{fact.question}"
        messages = [{"role": "user", "content": content}]
        found = post(f"{url}/v1/chat/completions", body | {"messages": messages, "max_tokens": 40})
        return found["choices"][0]["message"]["content"] or "", found["usage"]["places"], content
    end = f"{fact.question}\nAnswer:" if form == "question" else fact.beginning
    prompt = f"{text}\n{end}"
    found = post(f"{url}/v1/completions", body | {"prompt": prompt, "max_tokens": 16, "stop": "\n"})
    return found["choices"][0]["text"], found["usage"]["places"], prompt


def judge(count: Count, answer: str, places: list[dict[str, Any]], text: str, fact: Fact) -> None:
    """Count one answer."""
    count.asked += 1
    if fact.value not in answer:
        return
    count.found += 1
    start = text.index(fact.sentence)
    end = start + len(fact.sentence)
    said = next((one for one in places if fact.value.split()[-1] in one["sentence"]), places[0] if places else None)
    right = []
    for place in [] if said is None else said["places"]:
        at = place["start"] if place["offset"] is None else place["offset"]
        right.append(at < end and start < at + place["end"] - place["start"])
    count.first += any(right[:1])
    count.any += any(right)
    count.none += not right
    if not any(right[:1]):
        print(f"missed: {fact.sentence!r} {answer!r} {said}", file=sys.stderr)


def measure(url: str, length: int, prompts: int, form: str) -> dict[str, Count]:
    """All kinds of facts at one length."""
    model = json.load(urllib.request.urlopen(f"{url}/v1/models"))["data"][0]["id"]
    counts: dict[str, Count] = {}
    for number in range(prompts):
        rng = random.Random(f"{length} {number} 11")
        hidden = facts(rng)
        text = document(url, model, hidden, length, rng)
        for fact in hidden:
            judge(counts.setdefault(fact.kind, Count()), *ask(url, model, text, fact, form), fact)
    return counts


def main() -> None:
    """Measure, print a table, and keep the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--lengths", default="4096")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--form", choices=("completion", "question", "chat"), default="completion")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    result = {}
    print("| tokens | kind | asked | found | first place right | one of three right | no place |")
    print("|---:|---|---:|---:|---:|---:|---:|", flush=True)
    for length in map(int, given.lengths.split(",")):
        counts = measure(given.url, length, given.prompts, given.form)
        for kind, count in counts.items():
            numbers = " | ".join(map(str, asdict(count).values()))
            print(f"| {length:,} | {kind} | {numbers} |", flush=True)
        result[length] = {kind: asdict(count) for kind, count in counts.items()}
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
