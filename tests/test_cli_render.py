"""The command `render`, called as a function."""

import pytest

from brax_concurrent import cli

pytestmark = pytest.mark.xdist_group("cli")


def run(*arguments):
    return cli.main(["render", *(str(x) for x in arguments)])


def test_a_page(tmp_path, capsys):
    path = tmp_path / "run.html"
    small = ("halfcheetah", "--steps", 4, "--out", path)
    assert run(*small) == 0
    assert capsys.readouterr().out == f"{path}: 4 control steps of halfcheetah, 0.20 s\n"
    page = path.read_text()
    assert '"frames": 5' in page
    assert run(*small, "--seed", 1) == 1
    assert f"{path} exists; --force overwrites a file" in capsys.readouterr().err
    assert path.read_text() == page
    assert run(*small, "--force") == 0
    assert path.read_text() == page
    assert run(*small, "--force", "--seed", 1) == 0
    assert path.read_text() != page
    assert [each.name for each in tmp_path.iterdir()] == ["run.html"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["ant", "--out", "a.avi"], 2, "--out: expected a name that ends in one of .mp4, .gif, .html, got 'a.avi'"),
        (["ant", "--out", "no/a.gif"], 1, "cannot write no/a.gif: there is no folder no"),
        (["antt", "--out", "a.gif"], 2, "robot: there is no task 'antt'"),
        (["robot.xml", "--out", "a.gif"], 2, "robot: render takes the name of a robot"),
        (["halfcheetah", "--out", "a.gif", "--steps", "2", "--camera", "side"], 2, "camera: expected one of ['track']"),
        (["halfcheetah", "--out", "a.gif", "--steps", "2", "--width", "63"], 2, "width: expected an even number"),
    ],
)
def test_errors(arguments, code, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == code
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
