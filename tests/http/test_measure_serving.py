"""scripts/measure_serving.py against a server that runs already."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure_serving.py"


def test_every_row_and_the_mixed_case_are_kept_with_the_run_that_they_are_of(server, engine, tmp_path):
    engine.step_s = 0.001
    path = tmp_path / "gpu.json"
    path.write_text('{"kernels": [1]}')
    rows = [
        "--rows",
        "1x4x8,2x4x8",
        "--mixed",
        "2x30@30",
        "--mixed-prompts",
        "3",
        "--time-limit-s",
        "60",
        "--vocab-size",
        "300",
    ]
    command = [sys.executable, SCRIPT, "--label", "x", "--base-url", server.url, "--results", path, *rows]
    # The streams of the mixed case ask for more than the server's context holds, and get what it does.
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "background: " in done.stderr and "other lengths than asked" in done.stderr
    content = json.loads(path.read_text())
    assert content["kernels"] == [1]
    assert [(row["max_concurrency"], row["num_prompts"], row["completed"]) for row in content["serve"]["x"]] == [
        (1, 30, 30),
        (2, 8, 8),
    ]
    (run,) = content["runs"].values()
    assert run["server"] == server.url
    assert {row["run"] for row in content["serve"]["x"]} == set(content["runs"])
