"""An answer's Markdown on the page: what it becomes, that no text is code or takes long, and that streams end alike."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.api.conftest import LiveServer
from tests.server.playground.conftest import OpenPage

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (it is in the dev extra)")
from playwright.sync_api import expect

from tests.server.playground.pages import ask, finished

WHOLE = """async text => {
  const { markdown } = await import("/playground/markdown.js");
  const node = document.createElement("div");
  node.append(...markdown(text));
  return node.innerHTML;
}"""
PIECES = """async ([text, size]) => {
  const { Answer } = await import("/playground/answer.js");
  const answer = new Answer(document.createElement("div"));
  for (let i = 0; i < text.length; i += size) {
    answer.push(text.slice(i, i + size));
    answer.draw();
  }
  return answer.node.innerHTML;
}"""
# The deepest element, and how many there are. What takes time with the square of a length does not end here.
BOUNDS = """async text => {
  const { markdown } = await import("/playground/markdown.js");
  const nodes = markdown(text);
  const depth = node => { let n = 0; for (; node.parentElement; node = node.parentElement) n += 1; return n; };
  const all = nodes.flatMap(node => [node, ...node.querySelectorAll("*")]);
  const characters = nodes.reduce((sum, node) => sum + node.textContent.length, 0);
  return { depth: all.reduce((most, node) => Math.max(most, depth(node)), 0), elements: all.length, characters };
}"""
LINK = 'rel="noopener noreferrer nofollow" target="_blank"'
SAMPLE = """# One `head`

Words that are **strong**, *said*, ~~gone~~ and `co<de>`,
in two lines.
- one
- two **b**
  1. deep

     and a paragraph
- [x] done

7. seven
8. eight

| a | b |
|---|--:|
| 1 | x \\| y |

> quoted
lazy

```python
print("**no**")
- no list
```
---
The end of [a link](https://a.example/x_(y)) and https://b.example/c.
"""


@pytest.fixture
def page(server: LiveServer, open_page: OpenPage) -> Any:
    return open_page(server.url)


def test_what_markdown_becomes(page: Any) -> None:
    for text, wanted in (
        ("# A *b*", '<h4 class="level-1">A <em>b</em></h4>'),
        ("a **b *c* d** e", "<p>a <strong>b <em>c</em> d</strong> e</p>"),
        ("2 * 3 * 4, a_b_c, **open", "<p>2 * 3 * 4, a_b_c, **open</p>"),
        ("`` a`b `` \\*c\\*", "<p><code>a`b</code> *c*</p>"),
        ("- a\n- b\n  - c", "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul>"),
        ("1. a\n\n2. b", "<ol><li><p>a</p></li><li><p>b</p></li></ol>"),
        ("3) a\nb", '<ol start="3"><li>a\nb</li></ol>'),
        ("> a\n> > b", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"),
        ("***", "<hr>"),
        ("[a](https://x.example/ 'T')", f'<p><a href="https://x.example/" {LINK}>a</a></p>'),
        ("(https://x.example/a).", f'<p>(<a href="https://x.example/a" {LINK}>https://x.example/a</a>).</p>'),
        ("![p](https://x.example/p.png)", f'<p><a href="https://x.example/p.png" {LINK}>p</a></p>'),
    ):
        assert page.evaluate(WHOLE, text) == wanted, text
    table = page.evaluate(WHOLE, "a | b\n:-: | --\n1 | 2 | 3\n4")
    assert '<th class="center" scope="col">a</th><th scope="col">b</th>' in table
    assert '<td class="center">1</td><td>2</td></tr>' in table
    code = page.evaluate(WHOLE, "```py\nif a < b:\n\n  c\n```\nafter")
    assert "<code>if a &lt; b:\n\n  c</code>" in code
    assert code.endswith("<p>after</p>")


def test_no_text_of_a_model_is_code(page: Any) -> None:
    for text in (
        "<img src=x onerror=alert(1)><script>alert(1)</script>",
        "[a](javascript:alert(1)) [b](JaVaScRiPt:alert(1)) [c](data:text/html,x) [d](//x.example) [e](java\tscript:x)",
        "<javascript:alert(1)> ![x](javascript:alert(1))",
        '[a](https://x.example/"onmouseover="alert(1))',
        '```"><img src=x onerror=alert(1)>\n</code></pre><img src=x onerror=alert(1)>',
        "| <b>a</b> |\n|---|\n| <svg onload=alert(1)> |",
    ):
        html = page.evaluate(WHOLE, text)
        made = page.evaluate(
            "html => { const t = document.createElement('template'); t.innerHTML = html; "
            "return [...t.content.querySelectorAll('*')].flatMap(n => [n.localName, "
            "...[...n.attributes].map(a => a.name + '=' + a.value)]) }",
            html,
        )
        assert not {"img", "script", "svg", "b"} & set(made), text
        assert not [part for part in made if part.startswith("on")], text
        assert all(part[5:].startswith("https://") for part in made if part.startswith("href=")), text


def test_hostile_lengths_and_depths_are_bounded(page: Any) -> None:
    n = 20_000
    markers = ("> ", "- ", "1. ", "- a\n", "- a\n\n", "~~~\n", "x\n", " ", "|")
    blocks = [part * n for part in markers]
    blocks += ["a | b\n- | -\n" + "|\n" * n, "|" * n + "\n" + "|-" * n, "~~~\n" + "x\n" * n, "\n" * n + " " * n + "x"]
    lines = (
        "*a **b ",
        "*",
        "**a ",
        "_a",
        "~~a",
        "[",
        "[a](",
        "![",
        "`",
        "\\",
        "<https://",
        "https://a.b/)",
        "<br",
        "a*b_c",
    )
    runs = "".join("`" * (i % 300 + 1) + "a" for i in range(600))
    for text in (
        *blocks,
        *((part * 99_000)[:99_000] for part in lines),
        runs,
        "*" * 49_000 + "a" + "*" * 49_000,
        "a " * 500_000,
    ):
        found = page.evaluate(BOUNDS, text)
        assert found["depth"] < 64, (text[:20], found)
        assert found["elements"] <= len(text), (text[:20], found)
        assert found["characters"] <= len(text), (text[:20], found)


def test_a_stream_ends_as_the_whole_does(page: Any) -> None:
    whole = page.evaluate(WHOLE, SAMPLE)
    for size in (1, 3, 40):
        assert page.evaluate(PIECES, [SAMPLE, size]) == whole


CHUNKS = (
    'data: {"choices":[{"delta":{"reasoning_content":"Let me see."}}]}\n\n'
    'data: {"choices":[{"delta":{"content":"Say `a`:\\n\\n```py\\nprint(1)\\n"}}],"usage":{"prompt_tokens":9,'
    '"completion_tokens":9,"prompt_tokens_details":{"cached_tokens":8}}}\n\n'
    "data: [DONE]\n\n"
)


def test_thoughts_are_folded_and_code_and_answers_are_copied(page: Any) -> None:
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=CHUNKS))
    turn = ask(page, "How?")
    finished(page)
    thinking = turn.locator(".thinking")
    expect(thinking.locator("summary")).to_contain_text("Thought for")
    expect(thinking.locator(".reasoning")).to_be_hidden()
    expect(thinking.locator(".reasoning")).to_have_text("Let me see.")
    expect(turn.locator(".first")).to_contain_text("8 of 9 tokens from the cache")
    for button, wanted in (
        (turn.get_by_role("button", name="Copy the code, py"), "print(1)\n"),
        (turn.get_by_role("button", name="Copy", exact=True), "Say `a`:\n\n```py\nprint(1)\n"),
    ):
        button.click()
        expect(page.locator("#announcer")).to_have_text("Copied")
        assert page.evaluate("() => navigator.clipboard.readText()") == wanted
        page.evaluate("() => { document.getElementById('announcer').textContent = '' }")
