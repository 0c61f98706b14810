"""Check a built site: every link within it leads to a file and an anchor that are there, and no
page loads anything from elsewhere.

``python docs/check_links.py docs/_build``
"""

from __future__ import annotations

import argparse
import html.parser
import pathlib
import sys
import urllib.parse


class Page(html.parser.HTMLParser):
    """The anchors of a page, what it links to, and what it loads."""

    def __init__(self, file: pathlib.Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors.update(values[name] for name in ("id", "name") if name in values)
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif "src" in values:
            self.loaded.append(values["src"])
        elif tag == "link" and values.get("rel") == "stylesheet":
            self.loaded.append(values["href"])


def faults(root: pathlib.Path) -> list[str]:
    """What is wrong with the site in this folder, a line each."""
    files = (file for file in root.rglob("*.html") if "_static" not in file.parts)
    pages = {file.resolve(): Page(file) for file in files}
    found = [] if pages else [f"{root}: no pages"]
    for file, page in pages.items():
        name = file.relative_to(root.resolve())
        for link in [*page.links, *page.loaded]:
            url = urllib.parse.urlsplit(link)
            if url.scheme or url.netloc:
                if link in page.loaded and url.scheme != "data":
                    found.append(f"{name}: loads {link}")
                continue
            path = urllib.parse.unquote(url.path)
            target = (file.parent / path).resolve() if path else file
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                found.append(f"{name}: {link} is not there")
            elif url.fragment and target in pages:
                fragment = urllib.parse.unquote(url.fragment)
                if fragment not in pages[target].anchors:
                    found.append(f"{name}: {link} has no such anchor")
    return found


def main() -> None:
    """Print the faults, and exit with 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=pathlib.Path, help="the folder that sphinx-build wrote")
    found = faults(parser.parse_args().site)
    print("\n".join(found) or "every link leads somewhere")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
