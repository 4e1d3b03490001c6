"""The package's description and links, which Hatch asks for when it builds the wheel.

An index of packages shows README without the other files of the repository. With the variable PROJECT_URL, the address of the repository
(the release workflow sets it), relative links and pictures lead there. Without it, links become plain text, and pictures are left out.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

# A picture with the caption that follows it, and a link to a file of the repository.
_PICTURE = re.compile(r"^!\[(?P<text>[^\]]*)\]\((?P<file>[^):#]+)\)\n(?:\n\*[^*]*\*\n)?\n", re.MULTILINE)
_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<file>(?!https?:|#)[^)]+)\)")


class ProjectPage(MetadataHookInterface):
    """Sets the fields `readme` and `urls`."""

    def update(self, metadata: dict[str, object]) -> None:
        url = os.environ.get("PROJECT_URL", "").rstrip("/")
        text = described((Path(self.root) / "README.md").read_text(encoding="utf-8"), url)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {"Source": url, "Issues": f"{url}/issues", "Changelog": f"{url}/blob/main/CHANGELOG.md"} if url else {}


def described(readme: str, url: str) -> str:
    """Returns README as an index shows it.

    Args:
        readme: its text.
        url: the repository's address, or "".
    """
    if not url:
        return _LINK.sub(r"\g<text>", _PICTURE.sub("", readme))
    pictures = re.sub(r"(!\[[^\]]*\])\((?!https?:)([^)]+)\)", rf"\1({url}/raw/main/\2)", readme)
    return _LINK.sub(lambda link: f"[{link['text']}]({url}/blob/main/{link['file']})", pictures)
