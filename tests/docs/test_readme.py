"""The code of the README runs as it stands."""

import contextlib
import io
import re
from pathlib import Path

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def test_ten_lines_train_dpcr_on_a_module_and_a_data_set_of_ones_own():
    (script,) = BLOCKS
    assert len([line for line in script.splitlines() if line.strip()]) <= 10
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(script, "README.md", "exec"), {"__name__": "readme"})
    rows = [re.findall(r"nan|[\d.]+", line) for line in printed.getvalue().splitlines()]
    assert [len(row) for row in rows] == [5] * 5
    last = [float(value) for value in rows[-1]]
    assert sum(last) / len(last) > 80, "chance is 10"
    assert all(value == "nan" for number, row in enumerate(rows) for value in row[number + 1 :])
