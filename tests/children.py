"""Scripts of tests that need a process of their own: as many devices as they say, or an environment."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def printed_by(script: Path, *args: str) -> str:
    """What a script prints, which imports what tests import; where it fails, its last words fail the test."""
    where = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, str(script), *args]
    done = subprocess.run(command, env=where, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def answer_of(script: Path, *args: str) -> Any:
    """The JSON in the last line that it prints."""
    return json.loads(printed_by(script, *args).splitlines()[-1])
