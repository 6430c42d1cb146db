"""The report in a real browser: what a reader sees, on a phone and on a desk, light and dark, and on paper.

The page is made of the project's own files, and of what they may hold one day: a forged receipt, one with a long name,
and rates beside stock. Screenshots lie in build/browser/.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from report import page, sources
from tests.browser.chromium import Browser
from tests.unit.test_report import changed, reseal, stock_file

ROOT = Path(__file__).resolve().parents[2]
SHOTS = ROOT / "build/browser"
WIDTHS = (360, 1280)
RECEIPT = ROOT / "evidence/mova-fp8-cut6-h200.json"

#: [text, ratio] of every text below WCAG 2.2 AA: 4.5, or 3 from 24 px (18.66 px bold) on
CONTRAST = """
(() => {
  const parse = c => { const n = c.match(/[\\d.]+/g).map(Number); return [n[0], n[1], n[2], n.length > 3 ? n[3] : 1]; };
  const over = (a, b) => [0, 1, 2].map(i => a[i] * a[3] + b[i] * (1 - a[3])).concat([1]);
  const linear = v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = c => .2126 * linear(c[0]) + .7152 * linear(c[1]) + .0722 * linear(c[2]);
  const behind = e => { const chain = []; for (; e; e = e.parentElement) chain.push(e);
    return chain.reverse().reduce((under, n) => over(parse(getComputedStyle(n).backgroundColor), under),
      matchMedia('(prefers-color-scheme: dark)').matches ? [0, 0, 0, 1] : [255, 255, 255, 1]); };
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let seen = 0;
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement, told = walker.currentNode.textContent.trim();
    if (!told || !e.checkVisibility()) continue;
    const style = getComputedStyle(e), svg = e instanceof SVGElement;
    let under = behind(svg ? e.closest('svg') : e);
    if (e.classList.contains('inside')) under = parse(getComputedStyle(e.previousElementSibling).fill);
    const [a, b] = [light(over(parse(svg ? style.fill : style.color), under)), light(under)].sort((x, y) => y - x);
    const ratio = (a + .05) / (b + .05), size = parseFloat(style.fontSize), bold = style.fontWeight >= 700;
    seen += 1;
    if (ratio < (size >= 24 || (bold && size >= 18.66) ? 3 : 4.5)) found.push([told.slice(0, 40), ratio]);
  }
  return {seen, found};
})()
"""
#: text of a plot that lies outside it or on other text
LABELS = """
[...document.querySelectorAll('svg.plot')].flatMap(plot => {
  const frame = plot.getBoundingClientRect(), texts = [...plot.querySelectorAll('text')];
  const boxes = texts.map(t => [t.textContent, t.getBoundingClientRect()]);
  const out = boxes.filter(([, b]) => b.left < frame.left - 1 || b.right > frame.right + 1 ||
    b.top < frame.top - 1 || b.bottom > frame.bottom + 1).map(([t]) => 'outside: ' + t);
  boxes.forEach(([t, a], i) => boxes.slice(i + 1).forEach(([u, b]) => {
    const across = a.left < b.right - 1 && b.left < a.right - 1, down = a.top < b.bottom - 3 && b.top < a.bottom - 3;
    if (across && down) out.push(t + ' on ' + u);
  }));
  return out.map(told => plot.getAttribute('aria-label').slice(0, 40) + ': ' + told);
})
"""


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """Chromium; tests/browser.sh installs it or says what is missing, which fails the tests."""
    done = subprocess.run([ROOT / "tests/browser.sh"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = Browser(done.stdout.strip(), tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


def deepen(statement) -> None:
    """What a run of all 61 layers of a model, with the cookbook's workload, puts into a receipt."""
    stages = statement["predicate"]["horizonImages"]["stages"]
    numerics, performance = stages["numerics"]["numbers"], stages["performance"]["numbers"]
    numerics["stream"] = [0.003 * 1.07**index for index in range(61)]
    numerics["layers"] = {name: (values * 11)[:61] for name, values in numerics["layers"].items()}
    loaded = performance["decode-64"] | {"requests": 256, "at_once": 64, "input_tokens": 8192, "output_tokens": 1024}
    alone = loaded | {"requests": 32, "at_once": 1}
    launches = ("launch-1", "launch-2")
    performance["cookbook"] = {name: {"at-once-1": alone, "at-once-64": loaded} for name in launches}
    reseal(statement)


@pytest.fixture(scope="session")
def report(tmp_path_factory) -> Path:
    """The page as a file."""
    folder = tmp_path_factory.mktemp("report")
    evidence, results = folder / "evidence", folder / "results"
    shutil.copytree(ROOT / "evidence", evidence)
    shutil.copytree(ROOT / "benchmarks/results", results)
    changed(RECEIPT, evidence / "forged.json", lambda raw: raw["predicate"].update(result="PASSED"))
    shutil.copy(RECEIPT, evidence / f"{'a-name-as-long-as-it-gets-' * 4}.json")
    stock_file(results / "stock.json")
    changed(RECEIPT, evidence / "deep.json", deepen)
    out = folder / "report.html"
    out.write_text(page.render(sources.read(evidence, results)))
    return out


@pytest.fixture(scope="session")
def taken() -> set[Path]:
    """Screenshots of this session; what an earlier one left is gone."""
    shutil.rmtree(SHOTS, ignore_errors=True)
    SHOTS.mkdir(parents=True)
    return set()


@pytest.fixture(params=[(width, dark) for width in WIDTHS for dark in (False, True)], ids=str)
def shown(request, browser, report, taken) -> Browser:
    """The page in a window, with a screenshot for people."""
    width, dark = request.param
    browser.open(report, width, dark=dark)
    shot = SHOTS / f"report-{width}-{'dark' if dark else 'light'}.png"
    if shot not in taken:
        browser.screenshot(shot)
        assert shot.stat().st_size > 50_000
        taken.add(shot)
    browser.width, browser.dark = width, dark
    return browser


def test_nothing_is_wider_than_the_window(shown):
    assert shown.evaluate("document.documentElement.scrollWidth") == shown.evaluate("innerWidth") == shown.width
    wide = shown.evaluate(
        "[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll') && "
        "e.getBoundingClientRect().right > innerWidth + .5).map(e => e.tagName + ' ' + e.className)"
    )
    assert wide == []
    # With every table open, too.
    shown.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert shown.evaluate("document.documentElement.scrollWidth") == shown.width


def test_every_verdict_can_be_seen(shown):
    cells = shown.evaluate(
        "[...document.querySelectorAll('table.grid td')].map(td => { const v = td.querySelector('.verdict');"
        " const b = v ? v.getBoundingClientRect() : {}, c = td.getBoundingClientRect();"
        " return [v ? v.innerText : '', b.width, b.height, b.left >= c.left - 1 && b.right <= c.right + 1]; })"
    )
    assert len(cells) >= 40
    for words, width, height, inside in cells:
        assert re.fullmatch(r"(○ not-run|! WARNED|✓ PASSED|✕ FAILED|– unsupported)", words.replace("\n", " ")), words
        assert width > 40
        assert 12 < height < 40  # on one line
        assert inside, words


def test_plots_are_drawn_and_no_text_lies_on_another(shown):
    sizes = shown.evaluate(
        "[...document.querySelectorAll('svg.plot')].map(s => [s.getBoundingClientRect().width,"
        " s.getBoundingClientRect().height, s.querySelectorAll('polyline, .mark, .bar, .part').length])"
    )
    assert len(sizes) >= 15
    assert all(width > 250 and height > 40 and drawn for width, height, drawn in sizes), sizes
    assert shown.evaluate(LABELS) == []
    smallest = shown.evaluate(
        "Math.min(...[...document.querySelectorAll('svg.plot text')].map(t => 11 * t.getScreenCTM().a))"
    )
    assert smallest >= 9


def test_text_has_contrast(shown):
    shown.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    told = shown.evaluate(CONTRAST)
    assert told["seen"] > 500
    assert told["found"] == []


def test_light_and_dark_differ(shown):
    background = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 200) == shown.dark


def test_a_forged_receipt_is_refused_before_all_else(shown):
    words = shown.evaluate("document.querySelector('main').innerText").strip()
    assert words.startswith("Refused receipts")
    assert "forged.json" in words.split("Verdicts")[0]
    assert "✓ PASSED" not in shown.evaluate("document.querySelector('table.grid').innerText")


def test_links_lead_somewhere_and_ids_are_there_once(shown):
    assert shown.evaluate("[...document.links].filter(a => !document.querySelector(a.hash)).map(a => a.href)") == []
    ids = shown.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids)) > 4


def test_the_browser_tells_every_plot_and_table_by_name(shown):
    nodes = shown.call("Accessibility.getFullAXTree")["nodes"]
    names = {}
    for node in nodes:
        if not node["ignored"]:
            names.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    assert len(names["image"]) == shown.evaluate("document.querySelectorAll('svg.plot').length")
    assert all(len(name) > 20 for name in names["image"])
    assert names["heading"][0] == "Qualification report"


def test_nothing_is_fetched_and_nothing_is_complained_of(browser, report):
    browser.messages.clear()
    browser.open(report, 1280)
    requests = [event for event in browser.events if event.startswith("request ")]
    assert [one for one in requests if not one.startswith(("request file:", "request data:"))] == []
    assert any(one.endswith("report.html") for one in requests)
    assert browser.messages == []


def test_it_prints_with_the_tables_behind_the_plots(browser, report):
    browser.open(report, 1280)
    on_screen = browser.evaluate("document.body.innerText")
    browser.call("Emulation.setEmulatedMedia", media="print")
    on_paper = browser.evaluate("document.body.innerText")
    assert on_paper.count("tokens counted") > on_screen.count("tokens counted") == 0
    raw = browser.pdf()
    assert raw.startswith(b"%PDF-")
    assert 4 <= len(re.findall(rb"/Type /Page\b", raw)) <= 60


def test_these_tests_find_what_they_look_for(browser, tmp_path):
    """A page with each of the defects."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<body style='background:#fff'><p style='color:#bbb'>pale</p><div style='width:2000px'>wide</div>"
        "<svg class=plot aria-label='a plot' width=100 height=50><text x=90 y=20>outside it</text>"
        "<text x=5 y=20>one</text><text x=8 y=22>two</text></svg><script>console.error('told')</script>"
        "<img src='http://127.0.0.1:9/none.png'>"
    )
    browser.messages.clear()
    browser.open(bad, 360)
    assert browser.evaluate("document.documentElement.scrollWidth") > 360
    assert [words for words, _ in browser.evaluate(CONTRAST)["found"]] == ["pale"]
    assert browser.evaluate(LABELS) == ["a plot: outside: outside it", "a plot: one on two"]
    assert "['told']" in browser.messages
    assert "request http://127.0.0.1:9/none.png" in browser.events
