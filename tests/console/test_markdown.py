"""What models write becomes elements, never markup: the renderer alone, in the browser it is for."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from tests.console.conftest import watch
from tests.console.stub import Stub, serving

RENDER = """async (text) => {
  const { markdown } = await import("/console/markdown.js");
  const root = document.createElement("div");
  root.append(...markdown(text));
  return root.innerHTML;
}"""

GROW = """async (text) => {
  const { GrowingMarkdown, markdown } = await import("/console/markdown.js");
  const root = document.createElement("div"), whole = document.createElement("div");
  const growing = new GrowingMarkdown(root);
  for (let end = 1; end <= text.length; end += 1) growing.update(text.slice(0, end));
  whole.append(...markdown(text));
  return [root.innerHTML, whole.innerHTML];
}"""


@pytest.fixture(scope="module")
def page(browser: Browser) -> Any:
    faults: list[str] = []
    with serving(Stub()) as stub:
        context = browser.new_context()
        page = context.new_page()
        watch(page, stub.url, faults)
        page.goto(stub.url)
        yield page
        context.close()
    assert faults == []


def test_blocks(page: Page) -> None:
    cases = {
        "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
        "# Big #\n### Small": '<h3 class="h1">Big</h3><h5 class="h3">Small</h5>',
        "a\n---\nb": "<p>a</p><hr><p>b</p>",
        "> a\n> > b\n\nc": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>",
        "- a\n- b": '<ul class="tight"><li><p>a</p></li><li><p>b</p></li></ul>',
        "- a\n\n- b": "<ul><li><p>a</p></li><li><p>b</p></li></ul>",
        "3. a\n4. b": '<ol start="3" class="tight"><li><p>a</p></li><li><p>b</p></li></ol>',
        "1. a\n   - b\n   - c\n2. d": '<ol start="1" class="tight"><li><p>a</p><ul class="tight"><li><p>b</p></li>'
        "<li><p>c</p></li></ul></li><li><p>d</p></li></ol>",
        "- [x] a": '<ul class="tight"><li class="task"><p><input type="checkbox" disabled="" checked=""> a</p></li>'
        "</ul>",
        "text\n- a": '<p>text</p><ul class="tight"><li><p>a</p></li></ul>',
        "": "",
        "\n\n": "",
        "5 * 3 * 2": "<p>5 * 3 * 2</p>",
        "-5 degrees": "<p>-5 degrees</p>",
    }
    assert {text: page.evaluate(RENDER, text) for text in cases} == cases


def test_tables(page: Page) -> None:
    made = page.evaluate(RENDER, "| a | b \\| c |\n|:-:|--:|\n| `x` | 2 |\n| 3 |\n\nafter")
    assert '<th class="middle">a</th><th class="right">b | c</th>' in made
    assert '<td class="middle"><code>x</code></td><td class="right">2</td>' in made
    assert '<td class="middle">3</td><td class="right"></td>' in made
    assert made.endswith("<p>after</p>")
    assert page.evaluate(RENDER, "a | b\nc | d") == "<p>a | b<br>c | d</p>"


def test_code(page: Page) -> None:
    made = page.evaluate(RENDER, '```python\nif x:  # why\n    y = "<b>"\n```\nafter')
    assert '<span class="t-keyword">if</span> x:  <span class="t-comment"># why</span>\n    y = ' in made
    assert '<span class="t-string">"&lt;b&gt;"</span>' in made and made.endswith("<p>after</p>")
    assert "still open" in page.evaluate(RENDER, "~~~\nstill open")
    nested = page.evaluate(RENDER, "1. do\n   ```sh\n   ls -l\n     x\n   ```\n2. done")
    assert "ls -l\n  x</code>" in nested and nested.count("<li>") == 2
    assert "```js" in page.evaluate(RENDER, "````\n```js\n```\n````")


def test_inline(page: Page) -> None:
    cases = {
        "**a** *b* ***c*** ~~d~~": "<strong>a</strong> <em>b</em> <em><strong>c</strong></em> <del>d</del>",
        "**a *b* c**": "<strong>a <em>b</em> c</strong>",
        "snake_case_name and _em_": "snake_case_name and <em>em</em>",
        "**open": "**open",
        "a ** b": "a ** b",
        "`a *b*` ``c ` d``": "<code>a *b*</code> <code>c ` d</code>",
        "`open": "`open",
        r"\*a\* \(x_1\)": r"*a* \(x_1\)",
        "2 < 3 & 4": "2 &lt; 3 &amp; 4",
        "**中文**字": "<strong>中文</strong>字",
    }
    assert {text: page.evaluate(RENDER, text) for text in cases} == {k: f"<p>{v}</p>" for k, v in cases.items()}


def test_links_go_only_where_nothing_runs(page: Page) -> None:
    made = page.evaluate(
        RENDER, '[a *b*](https://example.org/x_(y) "t") https://example.org/z. <https://example.org/q>'
    )
    assert made.count('rel="noopener noreferrer nofollow"') == 3
    assert 'href="https://example.org/x_(y)"' in made and "a <em>b</em></a>" in made
    assert ">https://example.org/z</a>." in made
    for address in (
        "javascript:alert(1)",
        "JaVaScRiPt:alert(1)",
        "data:text/html,<script>alert(1)</script>",
        "vbscript:x",
        "file:///etc/passwd",
        "/relative",
        "java\tscript:alert(1)",
    ):
        made = page.evaluate(RENDER, f"[x]({address}) ![y]({address}) <{address}>")
        assert "href" not in made and "<img" not in made and "<script" not in made, address
    image = page.evaluate(RENDER, "![a cat](https://example.org/cat.png)")
    assert "<img" not in image and 'href="https://example.org/cat.png"' in image


ATTACKS = [
    "<script>window.pwned = 1</script>",
    '<img src=x onerror="window.pwned = 1">',
    "<svg onload=window.pwned=1>",
    "<iframe srcdoc='<script>parent.pwned=1</script>'>",
    "[a](javascript:window.pwned=1)",
    "```<img src=x onerror=window.pwned=1>\nx\n```",
    '```js" onmouseover="window.pwned=1\nx\n```',
    "| <img src=x onerror=window.pwned=1> |\n|---|\n| <b>x</b> |",
    "# <style>*{display:none}</style>",
    "- <a href=javascript:window.pwned=1>x</a>",
    "**<b onclick=window.pwned=1>x</b>**",
    '[x](https://example.org/"onmouseover="window.pwned=1)',
    "</p></div><script>window.pwned=1</script>",
    "&lt;script&gt;window.pwned=1&lt;/script&gt;",
]
HARMLESS = """async (text) => {
  const { markdown } = await import("/console/markdown.js");
  const root = document.createElement("div");
  root.append(...markdown(text));
  document.body.append(root);
  const known = new Set(("P BR H3 H4 H5 H6 HR BLOCKQUOTE UL OL LI INPUT DIV SPAN BUTTON SVG PATH PRE CODE TABLE THEAD "
    + "TBODY TR TH TD A EM STRONG DEL").split(" "));
  const faults = [];
  for (const element of root.querySelectorAll("*")) {
    if (!known.has(element.tagName.toUpperCase())) faults.push(element.tagName);
    for (const { name, value } of element.attributes) {
      const runs = name !== "title" && /^\\s*javascript:/i.test(value);
      if (name.startsWith("on") || name === "style" || name === "src" || runs) faults.push(name);
    }
    element.dispatchEvent(new Event("mouseover"));
    if (element.tagName !== "A" && element.tagName !== "BUTTON") element.dispatchEvent(new Event("click"));
  }
  await new Promise((done) => setTimeout(done, 5));
  root.remove();
  return [faults, window.pwned ?? null, root.textContent.length > 0];
}"""


@pytest.mark.parametrize("text", ATTACKS)
def test_markup_in_a_reply_stays_text(page: Page, text: str) -> None:
    assert page.evaluate(HARMLESS, text) == [[], None, True]


MIXED = (
    "# Title\n\nA **bold _and_ `code`** line\nwith https://example.org/a.\n\n1. one\n   - two\n\n   more\n2. three\n\n"
    "> quote\n> more\n\n```js\nlet a = 'x'; // c\n\n# not a title\n```\n\n| a | b |\n|---|---:|\n| 1 | 2 |\n\n***\n"
    "\nend *open"
)


def test_growing_is_the_same_as_whole(page: Page) -> None:
    grown, whole = page.evaluate(GROW, MIXED)
    assert grown == whole


def test_hostile_text_takes_no_time(page: Page) -> None:
    texts = [
        "*" * 20000,
        "[" * 20000,
        "`a" * 10000,
        "> " * 5000 + "x",
        "- " * 3000 + "x",
        "_a_ " * 5000,
        "|" * 5000,
        "![" * 9000,
        "**a " * 6000,
        "https://" * 3000,
        "\\" * 20000,
        "(" * 9000,
        "*a_b*" * 4000,
        " " * 20000 + "x",
    ]
    took = page.evaluate(
        """async (texts) => {
          const { markdown } = await import("/console/markdown.js");
          return texts.map((text) => { const t = performance.now(); markdown(text); return performance.now() - t; });
        }""",
        texts,
    )
    slow = {text[:8]: ms for text, ms in zip(texts, took, strict=True) if ms > 1000}
    assert slow == {}


def test_events_are_read_however_they_are_cut(page: Page) -> None:
    raw = ': hi\r\n\r\nevent: smoe\r\ndata: {"a":1}\r\n\r\ndata: x\ndata: y\n\ndata:z\r\rdata: no end'
    expected = [["smoe", '{"a":1}'], ["message", "x\ny"], ["message", "z"]]
    found = page.evaluate(
        """async (raw) => {
          const { EventParser } = await import("/console/sse.js");
          const read = (pieces) => {
            const parser = new EventParser();
            return pieces.flatMap((piece) => [...parser.feed(piece)]).map((e) => [e.event, e.data]);
          };
          const cuts = Array.from(raw, (_, at) => read([raw.slice(0, at), raw.slice(at)]));
          return [...cuts, read([...raw])];
        }""",
        raw,
    )
    assert all(each == expected for each in found)
