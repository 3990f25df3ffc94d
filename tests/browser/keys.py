"""Partition keys that a page has to show as what they are: text."""

from __future__ import annotations

HOSTILE = {
    "markup": "</title><script>window.ran=1</script><img src=x onerror='window.ran=1'>",
    "quotes": "\"'`&quot;&#39; onmouseover='window.ran=1' onfocus=\"window.ran=1\" autofocus ",
    "template": "{{ 7 * 7 }}{% include 'base.html' %}${7*7}",
    "url": "javascript:window.ran=1",
    "long": "x" * 10_000,
    "long_emoji": "\N{PILE OF POO}" * 10_000,
    "family": "\N{MAN}\u200d\N{WOMAN}\u200d\N{GIRL}\U0001f3fe \u6f22\u5b57 \xdf",
    "right_to_left": "invoice\u202egpj.exe\u2067\u202d",
    "control": "a\x01b\tc\nd\re\x1b[31m\x7f\x85\u2028\u2029\ufeff",
    "combining": "Z" + "\u0351\u036b\u0343\u036a" * 50,
    "empty": "",
    "space": " ",
    "padded": "  padded  twice  ",
    "dot": ".",
    "dots": "..",
    "slash": "/",
    "slashes": "//../../etc/passwd",
    "backslash": "\\..\\",
    "percent": "%2e",
    "percent_slash": "%2F%00%",
    "query": "?a=b&key=c#d;e=f+g",
    "star": "*",
    "json": '["a", null, 7]',
    "null": "null",
}
