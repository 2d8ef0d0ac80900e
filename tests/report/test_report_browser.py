"""The page in a real browser: it draws, asks nothing, listens to mouse and keys, and its figures can be saved."""

from __future__ import annotations

import base64
import dataclasses
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

import numpy as np
import pytest
from browser import WHY_NOT, Browser, chromium
from report_case import HOSTILE, L, M, measured, small_model, small_problem

import foremoe
from foremoe.plan.text import static_load_MLG
from foremoe.report import write_report
from foremoe.workload.skew import skew

pytestmark = pytest.mark.skipif(chromium() is None, reason=WHY_NOT)

FIGURES = (
    "heat-removed", "heat-after", "bars", "arcs", "experts", "late", "parts", "links", "memory", "strategies",
    "gap", "planning",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    try:
        browser = Browser()
    except (RuntimeError, BrokenPipeError) as error:
        pytest.skip(f"{chromium()} does not start here ({error}): the report is not looked at in a browser")
    yield browser
    browser.close()


@pytest.fixture
def opened(browser, page) -> Browser:
    browser.dark(False)
    browser.resize(1366, 768)
    browser.open(page)
    return browser


def row_of(browser: Browser) -> int:
    return browser.js("state.row")


def bar_heights(browser: Browser) -> list[float]:
    return browser.js("[...document.querySelectorAll('#bars .after')].map((bar) => Number(bar.getAttribute('height')))")


def test_it_draws_without_complaint_and_without_a_request(opened, page):
    assert opened.js("document.body.dataset.ready") == "yes"
    assert opened.requests() == [page.resolve().as_uri()]
    assert opened.complaints() == []
    assert opened.js("document.querySelector('#trouble').hidden")
    for name in FIGURES:
        assert opened.js(f"document.querySelectorAll('#{name} svg *, #{name} canvas').length") > 0, name
    assert opened.js("document.querySelector('#heat-removed .cells').dataset.cells") == str(M * L)


def test_the_bar_of_the_shown_plan_is_marked(opened):
    bars = opened.js("[...document.querySelectorAll('#strategies svg rect')].map((bar) => bar.getAttribute('fill'))")
    planned, amount = opened.js("[LIGHT.planned, LIGHT.amount]")
    assert bars[-3:] == [amount, amount, planned]  # static, eplb-exact, foremoe


def test_loads_and_skews_are_the_plan_s(opened, case):
    assert np.allclose(opened.js("[...rows.before_N]"), skew(static_load_MLG(case.plan)).ravel(), rtol=1e-6)
    assert np.allclose(opened.js("[...rows.after_N]"), case.plan.skew_ML.ravel(), rtol=1e-6)
    assert np.allclose(opened.js("[...rows.gap_N]"), case.plan.load_gap_ML.ravel(), rtol=1e-6)
    for n in range(M * L):
        assert opened.js(f"[...rows.loads({n}).after_G]") == case.plan.load_NG[n].tolist()


def test_a_refused_connection_stays_refused(opened):
    assert opened.js("fetch('https://example.invalid/').then(() => 'sent', () => 'refused')") == "refused"
    image = "const i = new Image(); i.onerror = () => done('refused'); i.src = 'https://example.invalid/x.png';"
    assert opened.js(f"new Promise((done) => {{ {image} }})") == "refused"


def test_a_click_chooses_a_row_and_its_bars(opened, case):
    before = bar_heights(opened)
    target = (opened.js("state.row") + L + 1) % (M * L)
    m, l = divmod(target, L)  # noqa: E741
    box = opened.js("document.querySelector('#heat-after .cells').getBoundingClientRect().toJSON()")
    opened.click(box["left"] + (l + 0.5) * box["width"] / L, box["top"] + (m + 0.5) * box["height"] / M)
    assert row_of(opened) == target
    heights = np.array(bar_heights(opened))
    assert heights.tolist() != before and np.allclose(
        heights / heights.max(), case.plan.load_NG[target] / case.plan.load_NG[target].max()
    )
    assert opened.js("document.getElementById('choose-m').value") == str(m)
    assert opened.js("document.getElementById('choose-l').value") == str(l)
    used = int((case.plan.quota_NGS[target][:, case.plan.B :] > 0).sum())
    assert opened.js("document.querySelectorAll('#arcs .arc').length") == used
    assert opened.js("document.querySelectorAll('#replicas tbody tr').length") == used


def test_arrow_keys_choose_rows_and_stay_inside(opened):
    opened.js("choose(0); document.querySelector('#heat-removed svg').focus()")
    for key, row in (("ArrowRight", 1), ("ArrowDown", L + 1), ("ArrowLeft", L), ("ArrowLeft", L), ("ArrowUp", 0), ("ArrowUp", 0)):
        opened.press(key)
        assert row_of(opened) == row
    assert opened.complaints() == []


def test_numbers_and_ranks_choose_too(opened):
    opened.js(
        "(() => { const l = document.getElementById('choose-l'); l.value = '99'; l.dispatchEvent(new Event('change')); })()"
    )
    assert row_of(opened) % L == L - 1
    opened.js("document.getElementById('choose-worst').click(); document.querySelector('#bars svg').focus()")
    assert row_of(opened) == opened.js("rows.worst(rows.before_N)")
    opened.press("ArrowRight")
    assert opened.js("state.rank") == 0
    chain = opened.js("rows.chain(state.row, 0).size")
    assert opened.js("document.querySelectorAll('#replicas tbody tr').length") == chain
    opened.press("Escape")
    assert opened.js("state.rank") is None


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_can_be_saved(opened, name):
    text = opened.js(f"exported('{name}', 'svg').then((blob) => blob.text())")
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg" and len(list(root.iter())) > 5
    assert "var(" not in text and 'class="chosen"' not in text
    reader = "new Promise((done) => { const r = new FileReader(); r.onload = () => done(r.result); r.readAsDataURL(blob); })"
    data = base64.b64decode(opened.js(f"exported('{name}', 'png').then((blob) => {reader})").partition(",")[2])
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width = int.from_bytes(data[16:20], "big")
    assert width == 3 * int(float(root.get("width")))
    assert opened.complaints() == []


def test_labels_of_a_figure_do_not_overlap(opened):
    # Boxes of ink: the height of a line is the font's, and fonts differ from machine to machine.
    overlaps = """(() => {
      const bad = [], context = document.createElement('canvas').getContext('2d');
      const ink = (text) => {
        const box = text.getBoundingClientRect(), matrix = text.getScreenCTM(), style = getComputedStyle(text);
        if (matrix.b !== 0) return box;
        context.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
        const { actualBoundingBoxAscent: up, actualBoundingBoxDescent: down } = context.measureText(text.textContent);
        const start = text.getStartPositionOfChar(0), baseline = new DOMPoint(start.x, start.y).matrixTransform(matrix).y;
        return { left: box.left, right: box.right, top: baseline - up, bottom: baseline + down };
      };
      for (const figure of document.querySelectorAll('figure svg')) {
        const texts = [...figure.querySelectorAll('text')].filter((t) => t.getNumberOfChars());
        const boxes = texts.map((t) => [ink(t), t.textContent]);
        const frame = figure.getBoundingClientRect();
        boxes.forEach(([a, s], i) => {
          if (a.left < frame.left - 1 || a.right > frame.right + 1) bad.push(s + ' leaves its figure');
          for (const [b, t] of boxes.slice(i + 1))
            if (a.left < b.right - 2 && b.left < a.right - 2 && a.top < b.bottom && b.top < a.bottom)
              bad.push(s + ' | ' + t);
        });
      }
      return bad;
    })()"""
    for width in (390, 800, 1366, 1920):
        opened.resize(width, 768)
        opened.js("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert opened.js("document.documentElement.scrollWidth") <= width
        # On narrow windows labels may be tight, but the page is as wide as they are.
        if width > 1000:
            assert opened.js(overlaps) == []


def test_dark_scheme_is_drawn_dark_and_saved_light(opened):
    paper = "document.querySelector('#bars svg rect').getAttribute('fill')"
    light = opened.js(paper)
    opened.dark(True)
    opened.js("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert opened.js(paper) != light
    assert light in opened.js("exported('bars', 'svg').then((blob) => blob.text())")


def test_the_verdict_stands_on_top(opened):
    assert opened.js("document.getElementById('verdict').textContent").startswith("Update stage ")
    assert "counts of a test" in opened.js("document.getElementById('made').textContent")


def test_a_link_opens_the_row_that_was_chosen(opened, browser, page):
    opened.js("choose(5); chooseRank(2)")
    link = opened.js("document.getElementById('row-link').getAttribute('href')")
    assert link == opened.js("location.hash") == f"#row={5 // L},{5 % L}&rank=2"
    words = opened.js("document.getElementById('row-words').textContent")
    assert words.startswith(f"micro-step {5 // L}, layer {5 % L} (model layer {5 % L + 1}): ")
    opened.js("location.hash = '#row=2,3'; new Promise((done) => setTimeout(done, 50))")
    assert (row_of(opened), opened.js("state.rank")) == (2 * L + 3, None)
    opened.js("location.hash = '#row=99,0'; new Promise((done) => setTimeout(done, 50))")
    assert row_of(opened) == 2 * L + 3 and opened.complaints() == []


def test_tables_sort_and_are_saved_as_csv(opened):
    column = "[...document.querySelectorAll('#replicas tbody td:nth-child(4)')].map((cell) => cell.textContent)"
    quotas = lambda: [int(text.replace(",", "")) for text in opened.js(column)]  # noqa: E731
    head = "document.querySelectorAll('#replicas th')[3]"
    opened.js(f"{head}.querySelector('button').click()")
    assert quotas() == sorted(quotas(), reverse=True) and opened.js(f"{head}.getAttribute('aria-sort')") == "descending"
    opened.js(f"{head}.querySelector('button').click()")
    assert quotas() == sorted(quotas()) and len(quotas()) > 1
    opened.js("choose(state.row === 0 ? 1 : 0)")
    assert quotas() == sorted(quotas())
    heads, lines = "[{ heading: 'a', unit: 's' }, { heading: 'b' }]", "[[['1', 1.5], ['x', '=1']], [['-', null], ['y', 'y\"']]]"
    assert opened.js(f"csv({heads}, {lines})") == '"a (s)","b"\r\n1.5,"\'=1"\r\n"","y"""\r\n'


def test_exports_carry_title_and_case(opened):
    opened.js("choose(3)")
    root = ElementTree.fromstring(opened.js("exported('bars', 'svg').then((blob) => blob.text())"))
    texts = [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0].startswith("Load of every rank: micro-step 0, layer 3") and texts[1].startswith("tiny, update, 4 ranks")


def test_print_is_light_and_narrow(opened):
    opened.dark(True)
    opened.js("window.dispatchEvent(new Event('beforeprint'))")
    drawn = opened.js("['width', 'fill'].map((name) => document.querySelector('#bars svg rect').getAttribute(name))")
    assert drawn == ["700", "#ffffff"]
    opened.js("window.dispatchEvent(new Event('afterprint'))")
    assert opened.js("document.querySelector('#bars svg rect').getAttribute('fill')") != "#ffffff"


def test_many_ranks_get_a_matrix_of_nodes_and_even_rows_a_reason(browser, tmp_path):
    load_MLGE = np.random.default_rng(0).poisson(2000, (1, 2, 64, 64)).astype(np.int32)
    load_MLGE[0, 0, :, 5] *= 8
    load_MLGE[0, 1] = 1
    work = foremoe.Workload.from_counts(load_MLGE, num_topk=2, model=None)
    model = dataclasses.replace(small_model(), num_layers=2, first_moe_layer=0, num_experts=64)
    problem = foremoe.Problem.of(work, foremoe.Cluster.preset("8xh100", num_ranks=64), model=model, redundant=1)
    plan, _ = foremoe.Planner().plan(problem)
    write_report(tmp_path / "r.html", problem, plan)
    browser.dark(False)
    browser.resize(1366, 768)
    browser.open(tmp_path / "r.html")
    browser.js("choose(0)")
    assert browser.js("document.querySelectorAll('#arcs .cell').length") == 64
    titles = browser.js("[...document.querySelectorAll('#arcs .cell title')].map((title) => title.textContent)")
    shown = [int(title.partition(": ")[2].partition(" cop")[0]) for title in titles]
    assert sum(shown) == plan.num_replicas > 0
    browser.js("choose(1)")
    assert "ranks are evenly loaded" in browser.js("document.getElementById('replicas').textContent")
    assert browser.complaints() == []


def test_measured_waits_and_hostile_names(browser, tmp_path):
    problem = small_problem(HOSTILE)
    plan, _ = foremoe.Planner().plan(problem)
    rows = [{"solver": HOSTILE, "skew_mean": 1.0, "predicted_stage_s": 0.1, "note": HOSTILE}]
    write_report(tmp_path / "r.html", problem, plan, timelines=measured(plan), strategies=rows, source=HOSTILE)
    browser.open(tmp_path / "r.html")
    assert browser.js("document.body.dataset.ready") == "yes"
    assert browser.js("document.getElementById('title').textContent").startswith("</script><script>alert(1)")
    assert browser.js("document.querySelectorAll('body script').length") == browser.js("document.scripts.length")
    assert "waited 6.00 ms for copies" in browser.js("document.getElementById('verdict').textContent")
    assert browser.complaints() == [] and len(browser.requests()) == 1


def test_one_row_and_one_rank_make_a_page(browser, tmp_path):
    work = foremoe.Workload.from_counts(np.full((1, 1, 1, 8), 10), num_topk=2)
    model = foremoe.Model.preset("mixtral-8x7b")
    problem = foremoe.Problem.of(work, foremoe.Cluster.preset("8xh100", num_ranks=1), model=model, redundant=0)
    plan, report = foremoe.Planner().plan(problem)
    write_report(tmp_path / "r.html", problem, plan, planner_report=report)
    browser.open(tmp_path / "r.html")
    assert browser.js("document.body.dataset.ready") == "yes" and browser.complaints() == []


def test_an_old_browser_gets_a_sentence(browser, page, tmp_path):
    # The page's own policy forbids added scripts, so the missing piece is removed before it opens.
    added = browser.call("Page.addScriptToEvaluateOnNewDocument", source="delete window.DecompressionStream")
    try:
        browser.open(page)
        assert browser.js("document.body.dataset.ready") == "no"
        assert "DecompressionStream" in browser.js("document.getElementById('trouble').textContent")
        assert not browser.js("document.getElementById('trouble').hidden")
    finally:
        browser.call("Page.removeScriptToEvaluateOnNewDocument", identifier=added["identifier"])
