"""Fetch a source package from the Python package registry: python fetch.py FILE SHA256 FOLDER.

Not `pip download`: it would build the package for its metadata.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
import urllib.parse
import urllib.request
from pathlib import Path

INDEX = "https://pypi.org/simple/{}/"
JSON = "application/vnd.pypi.simple.v1+json"


def main() -> int:
    name, sha256, folder = sys.argv[1:]
    listing = urllib.request.Request(INDEX.format(name.rpartition("-")[0]), headers={"Accept": JSON})
    with urllib.request.urlopen(listing) as answer:
        base, files = answer.geturl(), json.load(answer)["files"]
    (url,) = (file["url"] for file in files if file["filename"] == name)
    with urllib.request.urlopen(urllib.parse.urljoin(base, url)) as answer:
        content = answer.read()
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        print(f"{name}: SHA-256 is {found}, expected {sha256}", file=sys.stderr)
        return 1
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        archive.extractall(Path(folder), filter="data")
    return 0


if __name__ == "__main__":
    sys.exit(main())
