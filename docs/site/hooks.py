"""For MkDocs: links to files outside of docs/ are shown as their names, since the site has no pages for them."""

import re

OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./(?!docs/)[^)]*\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Links that work in the repository become plain text on the site."""
    return OUTSIDE.sub(r"\1", markdown)
