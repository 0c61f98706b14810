"""Check a built site: every link within it leads to a file and an anchor that are there, no page
loads anything from elsewhere, and, where Chromium is installed, nothing is wider than its page.

``python docs/check_site.py docs/_build``; the environment's CHROMIUM may name the browser and its
flags.
"""

from __future__ import annotations

import argparse
import html.parser
import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.parse

WIDTHS = (1280, 400)  # of a laptop's window and of a phone, in CSS pixels
TIMEOUT_S = 300

#: Opens each page in a frame and says on the console what reaches beyond its right edge without
#: standing in something that scrolls.
MEASURE = """<body><script>
const pages = PAGES, widths = WIDTHS;
let index = 0;
function next() {
  if (index == pages.length * widths.length) return console.log("DONE");
  const page = pages[index % pages.length];
  const width = widths[Math.floor(index++ / pages.length)];
  const frame = document.createElement("iframe");
  frame.style.width = width + "px";
  frame.style.height = "900px";
  frame.onload = () => setTimeout(() => {
    const inner = frame.contentWindow, wide = [];
    const scrolls = (e) => e && (["auto", "scroll", "hidden"].includes(
        inner.getComputedStyle(e).overflowX) || scrolls(e.parentElement));
    const root = inner.document.querySelector("article") || inner.document.body;
    for (const e of root.querySelectorAll("*"))
      if (e.getBoundingClientRect().right > width + 1 && !scrolls(e)) wide.push(e.tagName);
    if (wide.length || inner.document.documentElement.scrollWidth > width)
      console.log("WIDE " + page + " at " + width + " pixels: " + wide.slice(0, 3).join(" "));
    frame.remove();
    next();
  }, 50);
  frame.src = page;
  document.body.appendChild(frame);
}
next();
</script>"""


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


def dead_links(root: pathlib.Path) -> list[str]:
    """Links of the site in this folder that lead nowhere, and what pages load from elsewhere."""
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


def browser() -> list[str] | None:
    """The command of a headless Chromium, or None where there is none."""
    if named := os.environ.get("CHROMIUM"):
        return shlex.split(named)
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    return found and [found]


def too_wide(root: pathlib.Path, command: list[str]) -> list[str]:
    """Pages that have something wider than themselves, as a browser lays them out."""
    pages = sorted(
        file.relative_to(root).as_posix()
        for file in root.rglob("*.html")
        if "_static" not in file.parts and file.name not in ("genindex.html", "search.html")
    )
    text = MEASURE.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS))
    found, done = [], False
    # A browser's own processes may outlive it by a moment and still write into the profile.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        page = root / "measure.html"
        page.write_text(text, encoding="utf-8")
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-remote-fonts"]
        flags += ["--enable-logging=stderr", f"--user-data-dir={profile}"]
        flags += ["--allow-file-access-from-files", "--disable-web-security"]
        process = subprocess.Popen(
            [*command, *flags, "--remote-debugging-port=0", page.resolve().as_uri()],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

        def kill() -> None:
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(TIMEOUT_S, kill)
        timer.start()
        for line in process.stderr or ():
            if '"WIDE ' in line:
                found.append(line.split('"')[1].removeprefix("WIDE "))
            elif '"DONE"' in line:
                done = True
                break
        timer.cancel()
        kill()
        process.wait()
        page.unlink()
    return found if done else [*found, f"{command[0]} did not lay out all pages"]


def main() -> None:
    """Print the faults, and exit with 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=pathlib.Path, help="the folder that sphinx-build wrote")
    site = parser.parse_args().site
    found = dead_links(site)
    command = browser()
    if command is not None:
        found += too_wide(site, command)
    where = "" if command is None else f", and nothing is too wide at {WIDTHS} pixels"
    print("\n".join(found) or f"every link leads somewhere{where}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
