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


def run_blocks(page: str, tmp_path) -> list[str]:
    """What the blocks of a page print, run one after another in a new process."""
    code = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    script = tmp_path / "page.py"
    script.write_text("\n".join(code))
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    return done.stdout.splitlines()


def test_the_loop_of_the_docs_compiles_the_shapes_that_it_announced(tmp_path):
    steps, shapes, end = run_blocks("docs/training_loop.md", tmp_path)[-3:]
    num_steps, tokens = map(int, steps.split())
    assert 20_000 <= tokens < 20_000 + 8 * 64, "ends with the step that reaches them"
    assert shapes == "[(8, 16), (8, 32), (8, 64)]"
    assert end == f"{num_steps} True"


def test_the_page_about_curricula_prints_what_it_says(tmp_path):
    page = (ROOT / "docs/curriculum.md").read_text()
    printed = run_blocks("docs/curriculum.md", tmp_path)
    assert len(printed) == 4
    assert all(f"# {line}\n" in page for line in printed)


def test_the_compressed_optimizers_of_the_docs_train(tmp_path):
    lines = run_blocks("docs/compressed_optimizers.md", tmp_path)
    for line in lines[:3]:
        before, after = line[14:].split(" -> ")
        assert float(after) < 0.6 * float(before)
    assert lines[3:] == [
        "29360128 917560",
        "['full', 'sync', 'sync', 'local']",
        "(8, 8, 1, 1, 512)",
        "onebit_adam 1.0",
    ]
