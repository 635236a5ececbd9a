"""The code in the docs runs as it is printed, from the installed packages alone."""

import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]


def code_of(page: str) -> str:
    return re.search(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)[1]


def test_the_loop_of_the_docs_trains_and_goes_on(tmp_path):
    script = tmp_path / "loop.py"
    script.write_text(code_of("docs/training_loop.md"))
    # Isolated (-I): neither the checkout nor `experiments` can be imported by chance.
    place = f"import sys; sys.path[:0] = {[str(tmp_path / 'installed')]!r}\n"
    script.write_text(place + script.read_text())
    (tmp_path / "installed").mkdir()
    for package in ("dataeff_jax", "pallas_kernels"):
        (tmp_path / "installed" / package).symlink_to(ROOT / package)

    def run():
        command = [sys.executable, "-I", str(script)]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.splitlines()

    first = run()
    losses = [float(line.split()[1]) for line in first[:3]]
    assert losses[0] > losses[1] > losses[2]
    assert run() == first[-1:], "the second run restores the last step and evaluates"


def test_the_loop_has_the_thirty_lines_that_the_page_promises():
    code = code_of("docs/training_loop.md").partition("import dataeff_jax as de\n")[2]
    assert "thirty lines" in (ROOT / "docs/training_loop.md").read_text()
    assert len([line for line in code.splitlines() if line.strip()]) <= 30


def test_the_compressed_optimizers_of_the_docs_train(tmp_path):
    page = (ROOT / "docs/compressed_optimizers.md").read_text()
    script = tmp_path / "compressed.py"
    script.write_text("\n".join(re.findall(r"```python\n(.*?)```", page, re.S)))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    lines = done.stdout.splitlines()
    for line in lines[:3]:
        before, after = line[14:].split(" -> ")
        assert float(after) < 0.6 * float(before)
    assert lines[3:] == [
        "29360128 917560",
        "['full', 'sync', 'sync', 'local']",
        "(8, 8, 1, 1, 512)",
        "onebit_adam 1.0",
    ]
