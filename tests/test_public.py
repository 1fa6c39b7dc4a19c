"""What `import brax_concurrent` offers: every name is there, is documented, and does what README says."""

import inspect
import re
import types
from pathlib import Path

import pytest

import brax_concurrent

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.parametrize("name", brax_concurrent.__all__)
def test_a_public_name_is_documented(name):
    public = getattr(brax_concurrent, name)
    members = vars(public).items() if inspect.isclass(public) else []
    documentable = (types.FunctionType, property, classmethod, staticmethod)
    named = {key: value for key, value in members if not key.startswith("_") and isinstance(value, documentable)}
    undocumented = [key for key, value in {name: public, **named}.items() if not inspect.getdoc(value)]
    assert undocumented == []


def test_readme_quickstart_runs(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    small = block.replace("num_envs=4096", "num_envs=4")
    assert small != block
    exec(compile(small, "<quickstart>", "exec"), {})
    assert capsys.readouterr().out.startswith("(4, ")
