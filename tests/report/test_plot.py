"""Plots of reports: ticks on every axis, whatever the values; and pages that hold what they were given."""

import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from report import html, plot
from report.plot import COLOURS, Axis, Line

Numbers = st.floats(1e-6, 1e9)


def ticks(points: list[tuple[float, float]], x: Axis, y: Axis) -> tuple[list[str], list[str]]:
    """The labels of the ticks of both axes, from the left and from below."""
    texts = list(ET.fromstring(plot.lines([Line("a", points)], x, y)).iter("text"))
    marks = [text for text in texts if re.fullmatch(r"-?[\d.e+-]+[kM]?", text.text or "")]
    across = [text for text in marks if text.get("text-anchor") == "middle"]
    up = [text for text in marks if text.get("text-anchor") == "end"]
    return [str(text.text) for text in across], [str(text.text) for text in up]


@given(st.lists(st.tuples(Numbers, Numbers), min_size=1, max_size=20), st.booleans(), st.booleans())
def test_every_axis_has_ticks_at_different_values(points: list[tuple[float, float]], log_x: bool, log_y: bool) -> None:
    for labels in ticks(points, Axis("x", log=log_x), Axis("y", log=log_y)):
        assert 3 <= len(labels) <= 11, labels
        assert len(set(labels)) == len(labels), labels


@pytest.mark.parametrize(("least", "greatest"), [(31.0, 33.5), (71.0, 420.0), (2.7, 51.0), (0.03, 300.0), (1e-5, 1e4)])
def test_logarithmic_axes_of_any_span_have_at_least_four_ticks(least: float, greatest: float) -> None:
    across, _ = ticks([(least, 1), (greatest, 2)], Axis("ms", log=True), Axis("y"))
    assert 4 <= len(across) <= 10, across


@given(st.integers(0, 500))
def test_whole_numbers_have_whole_ticks(most: int) -> None:
    across, _ = ticks([(0, 1), (most, 2)], Axis("layer", whole=True), Axis("y"))
    assert all("." not in label for label in across), across


def test_a_linear_axis_ends_at_a_tick_beyond_its_values() -> None:
    _, up = ticks([(0, 3), (10, 159)], Axis("x"), Axis("y"))
    assert up == ["0", "50", "100", "150", "200"]


def test_the_points_of_a_line_lie_between_the_axes() -> None:
    svg = plot.lines([Line("a", [(1, -5), (1000, 7)]), Line("b", [(10, 2)])], Axis("x", log=True), Axis("y"))
    found = [tuple(map(float, pair.split(","))) for pair in re.findall(r"[\d.]+,[\d.]+", svg)]
    assert len(found) == 2
    assert all(0 <= x <= 560 and 0 <= y <= 240 for x, y in found)
    # A line of a single point is a dot.
    assert 'class="f1"' in svg


def test_values_that_no_axis_can_hold_are_not_drawn_beyond_it() -> None:
    svg = plot.lines([Line("a", [(0, 1), (5, 2)])], Axis("x", log=True), Axis("y"))
    assert not any(math.isnan(float(number)) for number in re.findall(r"(?<=points=\")[\d.]+", svg))


def test_colours_are_those_of_both_themes() -> None:
    sheet = plot.colours()
    assert all(colour in sheet for colour in COLOURS)
    assert sheet.count("light-dark(") == 3 * len(COLOURS)


def test_a_document_escapes_what_it_is_given_and_embeds_the_result() -> None:
    body = [html.table(["<b>", "n"], [["!<i>", "+1"]]), html.facts(["a & b"]), html.card("<h>", "x", said="<s>")]
    page = html.document("<t>", "<below>", body, {"text": "</script>"})
    for tag in ("<b>", "<i>", "<s>", "<h>", "<t>", "<below>"):
        assert tag not in page
    assert '<td class="bad">&lt;i&gt;</td><td class="good">1</td>' in page
    assert page.count("</script>") == 1
    assert "a &amp; b" in page


def test_a_tick_at_the_corner_keeps_clear_of_the_other_axis() -> None:
    """The first tick of a logarithmic axis may lie on the left edge, next to the 0 of the other axis."""
    root = ET.fromstring(plot.lines([Line("a", [(50, 0), (500, 2)])], Axis("ms", log=True), Axis("y")))
    texts = {str(text.text): text for text in root.iter("text")}
    across, up = float(texts["50"].get("y") or 0), float(texts["0"].get("y") or 0)
    assert across - 12 > up, "12 pixels are the size of the font"
