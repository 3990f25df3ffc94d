"""How values look on a page."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from decimal import Decimal

import pytest

from pydispatch.web import shown

NOW = datetime(2026, 1, 2, 12, 0, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", '<bdi class="key">plain</bdi>'),
        ("<b>&", '<bdi class="key">&lt;b&gt;&amp;</bdi>'),
        ("", '<span class="none">(empty)</span>'),
        (None, '<span class="none">none</span>'),
        ("a\u202eb", '<bdi class="key">a<span class="esc">\\u202e</span>b</bdi>'),
        ("a\nb", '<bdi class="key">a<span class="esc">\\n</span>b</bdi>'),
        (" a b ", '<bdi class="key"><span class="esc">␣</span>a b<span class="esc">␣</span></bdi>'),
        ("👩\u200d💻", '<bdi class="key">👩\u200d💻</bdi>'),
        ("a\u200db", '<bdi class="key">a<span class="esc">\\u200d</span>b</bdi>'),
    ],
)
def test_a_key_is_text_in_which_nothing_is_invisible(value, text):
    assert shown.key(value) == text


def test_a_long_key_is_cut_with_more_of_it_in_the_title():
    text = shown.key("x" * 10_000)
    assert f"{'x' * 63}…</bdi>" in text
    assert f'title="{"x" * 500}"' in text
    assert len(shown.key("x" * 10_000, None)) > 10_000


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "\N{EN DASH}"),
        (0, "0"),
        (1234567, "1,234,567"),
        (Decimal("2.50"), "2.5"),
        (Decimal(10), "10"),
        (0.0001, "0"),
        (True, "True"),
        ("text", "text"),
    ],
)
def test_numbers(value, text):
    assert shown.number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "\N{EN DASH}"),
        (0, "0 ms"),
        (0.25, "250 ms"),
        (1, "1.0 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (61, "1 min 1 s"),
        (3600, "1 h"),
        (7260, "2 h 1 min"),
        (90000, "1 d 1 h"),
        (-5, "-5.0 s"),
        (timedelta(minutes=5), "5 min"),
    ],
)
def test_durations(seconds, text):
    assert shown.duration(seconds) == text


@pytest.mark.parametrize(
    ("away", "text"),
    [(0, "now"), (-30, "30 s ago"), (90, "in 90 s"), (-600, "10 min ago"), (-90000, "25 h ago")],
)
def test_a_time_is_relative_with_the_exact_one_beside_it(away, text):
    moment = NOW + timedelta(seconds=away)
    drawn = shown.ago(moment, NOW)
    assert f">{text}</time>" in drawn
    assert f'title="{moment:%Y-%m-%d %H:%M:%S}.000 UTC"' in drawn
    assert f'datetime="{moment:%Y-%m-%dT%H:%M:%S}.000Z"' in drawn


def test_a_time_that_is_past_may_be_put_as_a_span():
    assert ">for 2 min</time>" in shown.ago(NOW - timedelta(seconds=130), NOW, form="for {}")
    assert ">for 2 min</time>" in shown.ago(NOW - timedelta(seconds=179), NOW, form="for {}")
    assert ">for less than 1 s</time>" in shown.ago(NOW, NOW, form="for {}")
    assert ">in 5 s</time>" in shown.ago(NOW + timedelta(seconds=5), NOW, form="for {}")


def test_times_without_end():
    utc = timezone.utc
    assert shown.ago(datetime.max.replace(tzinfo=utc), NOW) == "<span>no end</span>"
    assert shown.ago(datetime.min.replace(tzinfo=utc), NOW) == "<span>always</span>"
    assert "never" in shown.ago(None, NOW)


def test_numbers_of_a_gate_leave_out_what_is_no_number_to_read():
    numbers = {
        "next_token_at": "2026-01-02T12:00:00.5+00:00",
        "rate": 2.5,
        "a": None,
        "b": {},
        "c": True,
    }
    assert shown.numbers(numbers) == [
        ("next token at", "2026-01-02 12:00:00 UTC"),
        ("rate", "2.5"),
        ("c", "yes"),
    ]


def test_a_reason_is_put_in_words():
    assert shown.reason("throttle_empty") == "waits for its rate"
    assert shown.reason("limit_error: division by zero") == (
        "limit function failed: division by zero"
    )
    assert shown.reason("something_new") == "something new"
    assert shown.reason(None) == ""


def test_json_hides_nothing():
    assert shown.as_json({"a": "\u202e<b>"}) == '{\n  "a": "\\u202e<b>"\n}'
