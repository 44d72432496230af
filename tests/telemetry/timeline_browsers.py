"""Runs the script of a timeline's page and points at places in it: in V8 with a small DOM, and in Chromium."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import Any

from py_mini_racer import MiniRacer

Point = tuple[int, int, float]
"""Index of the view, rank, and moment as a part of the step's span."""

_HERE = Path(__file__).parent / "hover"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# the page has asked for its first frame before, so that it is drawn when this one comes
_IN_BROWSER = """
<script>
const refused = [];
document.addEventListener("securitypolicyviolation", (event) => refused.push(event.blockedURI));
window.onerror = (message) => refused.push(message);
%s
requestAnimationFrame(() => {
  const found = document.createElement("pre");
  found.id = "found";
  found.textContent = JSON.stringify({ ...probe(%s), refused });
  document.body.append(found);
});
</script>
"""


def point_in_v8(page: str, points: Sequence[Point], folder: Path) -> dict[str, Any]:
    """What the page shows at ``points``; its canvases and boxes are those of ``hover/small_dom.js``."""
    ((data,), (script,), (title,)) = (
        re.findall(pattern, page, re.DOTALL)
        for pattern in (r'id="data">(.*?)</script>', r"<script>\n(.*?)</script>", r"<title>(.*?)</title>")
    )
    dom = (_HERE / "small_dom.js").read_text()
    for name, text in (("PAGE_TITLE", unescape(title)), ("PAGE_DATA", data)):
        dom = dom.replace(name, json.dumps(text))
    context = MiniRacer()
    context.eval(f"{dom}\n{(_HERE / 'probe.js').read_text()}")
    context.eval(script)
    found: dict[str, Any] = json.loads(context.eval(f"runFrames(); JSON.stringify(probe({json.dumps(points)}))"))
    return {**found, "refused": []}


def point_in_chromium(page: str, points: Sequence[Point], folder: Path) -> dict[str, Any]:
    """What the page shows at ``points`` in the browser that is installed, which may resolve no name."""
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        raise FileNotFoundError(f"None of {', '.join(_BROWSERS)} is installed: apt-get install chromium")
    file = folder / "page.html"
    added = _IN_BROWSER % ((_HERE / "probe.js").read_text(), json.dumps(points))
    file.write_text(page.replace("</body>", f"{added}</body>"), encoding="utf-8")
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={folder / 'profile'}",
        "--window-size=1200,800",
        "--virtual-time-budget=5000",
        "--dump-dom",
        file.as_uri(),
    ]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    (text,) = re.findall(r'<pre id="found">(.*?)</pre>', printed, re.DOTALL)
    found: dict[str, Any] = json.loads(unescape(text))
    return found
