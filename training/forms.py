"""How prompts end: the chat template, a bare question, an answer cue, or the beginning of the answer's sentence."""

FORMS = ("chat", "bare", "cue", "stem")
# (how the prompt ends, what stands between that and the value)
ENDINGS: dict[str, tuple[tuple[str, str], ...]] = {
    "chat": (("{q}", ""),),
    "bare": (("{q}", " "), ("{q}\n", ""), ("{q}\n", ""), ("{q}\n\n", "")),
    "cue": (
        ("{q}\nAnswer:", " "),
        ("{q}\nAnswer:", " "),
        ("{q} Answer:", " "),
        ("{q}\n\nAnswer:", " "),
        ("{q}\nAnswer: ", ""),
        ("{q}\nAnswer:\n", ""),
        ("Question: {q}\nAnswer:", " "),
        ("Question: {q}\n\nAnswer:", " "),
        ("Question: {q} Answer:", " "),
        ("Q: {q}\nA:", " "),
        ("Question: {q}\n", ""),
        ("User: {q}\nAssistant:", " "),
        ("### Question\n{q}\n### Answer\n", ""),
        ("{q}\nThe answer is", " "),
        ("{q}\nA:", " "),
    ),
    "stem": (
        ("{s}", " "),
        ("{s}", " "),
        ("{q} {s}", " "),
        ("{q} Answer: {s}", " "),
        ("{q}\nAnswer: {s}", " "),
        ("{q}\n{s}", " "),
    ),
}
SEPARATORS = ("\n", "\n", "\n\n", "\n\n", " ", "\n---\n", "\n\n---\n\n")
