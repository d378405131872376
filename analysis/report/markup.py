"""Markup: elements of HTML, in which every text is escaped."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable
from typing import Any

VOID = ("meta", "input", "img", "br")


class Html(str):
    """A text that is HTML already; only `element`, `joined` and the readers of our own files make one."""

    __slots__ = ()


def element(tag: str, /, *children: str, **attributes: str | bool) -> Html:
    """Return an element; children that are not `Html` are texts, and are escaped, as attributes are.

    An underscore in an attribute's name becomes a dash, and one at its end is dropped (`class_`); True sets the name
    alone.
    """
    parts = [tag]
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            parts.append(key)
        elif value is not False:
            parts.append(f'{key}="{html.escape(value)}"')
    opened = f"<{' '.join(parts)}>"
    return Html(opened if tag in VOID else f"{opened}{joined(children)}</{tag}>")


def joined(children: Iterable[str]) -> Html:
    """Return the children one after another, texts escaped."""
    return Html("".join(child if isinstance(child, Html) else html.escape(child) for child in children))


def data_element(name: str, document: Any) -> Html:
    """Return a script element that holds data as JSON and that no text inside can end."""
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Html(f'<script type="application/json" id="{html.escape(name)}">{text}</script>')


def svg_image(svg: bytes, alt: str) -> Html:
    """Return a picture that is part of the page."""
    coded = base64.b64encode(svg).decode()
    return element("img", alt=alt, src=f"data:image/svg+xml;base64,{coded}")
