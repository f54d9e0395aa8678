"""A page in a headless browser."""

import html
import json
import re

_WATCH = """<script>
window.problems = [];
addEventListener("error", (event) => problems.push(String(event.message)), true);
addEventListener("securitypolicyviolation", (event) => problems.push("refused " + event.blockedURI));
</script>"""

# what stands in each line of each text, with its box; what is hidden has none
_MEASURE = """
function texts() {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (!node.data.trim() || ["SCRIPT", "STYLE"].includes(node.parentElement.tagName)) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects())
      if (box.width && box.height) found.push([node.data.trim(), box.left, box.top, box.right, box.bottom]);
  }
  return found;
}
"""


def look_at(run_chromium, page, file, script, *, width=1280, dark=False):
    """What ``script`` returns in the page, a function body in JavaScript; besides, what went wrong there.

    ``texts()`` gives what can be read, and where.
    """
    content = page.replace("<head>", f"<head>{_WATCH}", 1)
    report = f"""<script>
{_MEASURE}
addEventListener("load", () => {{
  const result = (() => {{ {script} }})();
  const loaded = performance.getEntriesByType("resource").map((entry) => entry.name);
  const report = document.body.appendChild(document.createElement("pre"));
  report.id = "report";
  report.textContent = JSON.stringify({{ result, loaded, problems }});
}});
</script>"""
    file.write_text(content.replace("</body>", f"{report}</body>"), encoding="utf-8")
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    done = run_chromium(file, f"--window-size={width},900", "--dump-dom", *scheme)
    found = re.search(r'<pre id="report">(.*?)</pre>', done, re.DOTALL)
    assert found, f"the page has not been loaded: {done[-500:]}"
    return json.loads(html.unescape(found[1]))


def overlapping(texts, tolerance=1.0):
    """Pairs of texts whose boxes share more than ``tolerance`` pixels both ways."""
    return [
        (a[0], b[0])
        for i, a in enumerate(texts)
        for b in texts[:i]
        if min(a[3], b[3]) - max(a[1], b[1]) > tolerance
        and min(a[4], b[4]) - max(a[2], b[2]) > tolerance
    ]
