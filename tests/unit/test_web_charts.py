"""Charts: what is drawn of numbers, and what is said of them."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from xml.etree import ElementTree

import pytest

from pydispatch.web.charts import Chart, Series, bar, draw, nice_ceiling, span_of, ticks_of

START = datetime(2026, 1, 1, 12, 0, tzinfo=timezone.utc)
SVG = "{http://www.w3.org/2000/svg}"


def chart(*series: Series, minutes: int = 4) -> Chart:
    times = [START + timedelta(minutes=n) for n in range(minutes)]
    return Chart("c", "Jobs <by> minute", "jobs", times, list(series))


def parts(drawn: str, tag: str, kind: str) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(drawn)
    return [e for e in root.iter(SVG + tag) if kind in e.attrib.get("class", "").split()]


@pytest.mark.parametrize(
    ("value", "ceiling"),
    [(0, 4), (3.2, 4), (4.1, 5), (5, 5), (7, 8), (9, 10), (11, 20), (450, 500), (1e9 + 1, 2e9)],
)
def test_the_top_of_an_axis_is_round_and_not_below_the_values(value, ceiling):
    assert nice_ceiling(value) == ceiling


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -5])
def test_an_axis_survives_what_is_no_count(value):
    assert nice_ceiling(value) == 4


def test_a_chart_has_a_title_a_description_and_labelled_axes():
    drawn = draw(chart(Series("waiting", [1, 2, 8, 3], area=True)))
    root = ElementTree.fromstring(drawn)
    assert root.attrib["role"] == "img"
    names = root.attrib["aria-labelledby"].split()
    assert [e.attrib["id"] for e in root if e.tag in (SVG + "title", SVG + "desc")] == names
    texts = [e.text for e in root.iter(SVG + "text")]
    assert texts[:5] == ["0", "2", "4", "6", "8"]
    assert "12:00" in texts
    assert "jobs" in texts
    (title,) = root.iter(SVG + "title")
    assert title.text == "Jobs <by> minute"
    (description,) = root.iter(SVG + "desc")
    assert description.text == "waiting: last 3, from 1 to 8 jobs."
    assert "style" not in drawn


def test_points_stand_where_their_values_are():
    drawn = draw(chart(Series("waiting", [0, 4, 2, 4])))
    (line,) = parts(drawn, "polyline", "s1")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    bottom, top = points[0][1], points[1][1]
    assert points[2][1] == pytest.approx((bottom + top) / 2, abs=0.1)
    grid = [float(e.attrib["y1"]) for e in parts(drawn, "line", "grid")]
    assert min(grid) == pytest.approx(top, abs=0.1)


def test_a_gap_breaks_the_line_and_a_lone_point_is_seen():
    drawn = draw(chart(Series("lag", [1, 2, None, 3])))
    assert len(parts(drawn, "polyline", "s1")) == 1
    assert len(parts(drawn, "circle", "dot")) == 1


def test_several_series_have_a_legend_and_differ_by_class():
    drawn = draw(chart(Series("waiting", [1, 2, 3, 4]), Series("in flight", [4, 3, 2, 1])))
    legend = [e.text for e in parts(drawn, "text", "legend")]
    assert legend == ["waiting", "in flight"]
    assert parts(drawn, "polyline", "s2")


def test_counts_are_columns_that_do_not_overlap():
    drawn = draw(chart(Series("admitted", [3, 0, 1, 2], steps=True)))
    columns = parts(drawn, "rect", "column")
    assert [float(e.attrib["height"]) > 0 for e in columns] == [True, False, True, True]
    ends = [float(e.attrib["x"]) + float(e.attrib["width"]) for e in columns]
    begins = [float(e.attrib["x"]) for e in columns]
    assert all(end <= begin for end, begin in zip(ends, begins[1:], strict=False))


def test_nothing_to_draw_is_said():
    assert "Nothing was recorded" in draw(chart(Series("lag", [None] * 4)))
    assert "Nothing was recorded" in draw(chart(minutes=0))
    assert not chart(Series("lag", [None] * 4)).table


def test_the_table_has_the_numbers_the_newest_first():
    table = chart(Series("a", [1, None, 3, 4]), Series("b", [None, None, 5, 6])).table
    assert [values for _, values in table] == [[4, 6], [3, 5], [1, None]]
    assert table[0][0] == START + timedelta(minutes=3)


@pytest.mark.parametrize("minutes", [1, 5, 59, 60, 600, 1440, 100_000])
def test_times_on_an_axis_are_round_and_few(minutes):
    ticks = ticks_of(START, START + timedelta(minutes=minutes))
    assert 1 <= len(ticks) <= 8
    assert all(tick.second == 0 for tick in ticks)


def test_a_span_ends_with_the_step_that_is_running():
    now = START + timedelta(minutes=7, seconds=42)
    times = span_of(now, timedelta(hours=1), timedelta(minutes=1))
    assert len(times) == 60
    assert times[-1] == START + timedelta(minutes=7)
    assert times[1] - times[0] == timedelta(minutes=1)


@pytest.mark.parametrize(
    ("used", "of", "kind", "width"),
    [
        (1, 4, "part", 25),
        (4, 4, "full", 100),
        (5, 4, "over", 100),
        (0, 0, "part", 0),
        (1, 0, "over", 100),
    ],
)
def test_a_bar_shows_the_part_and_marks_what_is_full(used, of, kind, width):
    drawn = bar(used, of, '1 "of" 4')
    assert f'class="{kind}"' in drawn
    found = re.search(rf'class="{kind}" width="([\d.]+)"', drawn)
    assert found
    assert float(found[1]) == width
    assert "1 &#34;of&#34; 4" in drawn


def test_a_share_that_is_no_limit_may_be_whole():
    assert 'class="part" width="100.0"' in bar(4, 4, "all of them", limit=False)
