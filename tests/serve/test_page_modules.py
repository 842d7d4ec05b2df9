"""The parts of the page that need no page: in node where it is there, else in the browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from draftsmith.serve.app import PAGE
from tests.serve.fake_server import MODULES, FakeServer

FILES = sorted({path.name for path in MODULES.glob("*.js")} - {"check.js", "main.js"})
IN_THE_BROWSER = """
    const [file, done] = arguments;
    Promise.all([import("/modules/check.js"), import(file)])
      .then(([check, { tests }]) => check.run(tests))
      .then(done, (error) => done({ count: 0, failures: [String(error)] }));
"""


@pytest.mark.parametrize("file", FILES)
def test_module(file: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        found = in_the_browser(file, request)
    else:
        shutil.copytree(PAGE, tmp_path / "page")
        shutil.copytree(MODULES, tmp_path / "modules")
        (tmp_path / "package.json").write_text('{"type": "module"}')
        command = [node, str(tmp_path / "modules" / "main.js"), f"./{file}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
    assert found["failures"] == []
    assert found["count"] > 0


def in_the_browser(file: str, request: pytest.FixtureRequest) -> Any:
    browser = request.getfixturevalue("browser")
    with FakeServer() as server:
        browser.get(server.url)
        return browser.execute_async_script(IN_THE_BROWSER, f"/modules/{file}")
