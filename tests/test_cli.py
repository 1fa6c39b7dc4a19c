"""The command line, called as a function; small sizes, and robots that compile fast."""

import copy
import dataclasses
import errno
import os
import re
import shlex
import subprocess
import sys

import jax
import numpy as np
import pytest

import brax_concurrent
from brax_concurrent import cli
from brax_concurrent.backends.native import DESC_ARENA_BYTES
from brax_concurrent.envs import check as checking
from brax_concurrent.envs import footprints, make

jax.config.update("jax_platforms", "cpu")

pytestmark = pytest.mark.xdist_group("cli")

SMALL = ["--num-envs", "40", "--steps", "60"]
PENDULUM = """
<mujoco model="pendulum">
  <option timestep="0.01"/>
  <worldbody>
    <geom type="plane" size="5 5 1"/>
    <body pos="0 0 0.5">
      <joint name="swing" axis="0 1 0" range="-60 60" limited="true"/>
      <geom type="capsule" fromto="0 0 0 0 0 -0.45" size="0.05"/>
    </body>
    <body pos="0.3 0 0.2"><freejoint/><geom type="sphere" size="0.1"/></body>
    <body pos="-0.3 0 0.2"><freejoint/><geom type="sphere" size="0.1"/></body>
  </worldbody>
  <actuator><motor joint="swing" ctrlrange="-1 1" ctrllimited="true"/></actuator>
</mujoco>
"""


@pytest.fixture
def pendulum(tmp_path):
    path = tmp_path / "pendulum.xml"
    path.write_text(PENDULUM)
    return str(path)


def run(*arguments):
    return cli.main([str(x) for x in arguments])


def usage_error(*arguments):
    """Exit code of what argparse itself refuses."""
    with pytest.raises(SystemExit) as stopped:
        run(*arguments)
    return stopped.value.code


# ---- the command


def test_module_runs_and_says_its_version():
    command = [sys.executable, "-m", "brax_concurrent", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"brax-concurrent {brax_concurrent.__version__}\n"


def test_help_has_examples_that_parse(capsys):
    assert usage_error("--help") == 0
    examples = re.findall(r"^  brax-concurrent (.*)", capsys.readouterr().out, re.MULTILINE)
    assert len(examples) >= 4
    for example in examples:
        cli._parser().parse_args(example.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "required: COMMAND"),
        (["roll"], "invalid choice: 'roll'"),
        (["rollout"], "required: robot"),
        (["rollout", "ant", "--num-envs", "0"], "--num-envs: expected a whole number of at least 1, got '0'"),
        (["rollout", "ant", "--steps", "1.5"], "--steps: expected a whole number of at least 1, got '1.5'"),
        (["rollout", "ant", "--threads", "-1"], "--threads: expected a whole number of at least 0, got '-1'"),
        (["rollout", "ant", "--backend", "tpu"], "invalid choice: 'tpu'"),
        (["check", "ant", "--dtype", "float16"], "invalid choice: 'float16'"),
        (["check", "ant", "--states", "none"], "--states: expected a whole number of at least 1, got 'none'"),
    ],
)
def test_wrong_options_are_refused(capsys, arguments, said):
    assert usage_error(*arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rollout", "antt"], "error: robot: there is no task 'antt'; did you mean 'ant'"),
        (["rollout", "ant", "--scheduler", "fifo"], "scheduler: expected one of"),
        (["check", "ant", "--backend", "cuda"], "backend: 'cuda' needs JAX on a CUDA GPU"),
        (["check", "humanoidd"], "did you mean 'humanoid'"),
        (["check-footprints", "robot.xml"], "error: robot: check-footprints takes the name of a robot that"),
        (["check", "no/such/robot.xml"], "error: robot: there is no file no/such/robot.xml"),
        (
            ["rollout", "my/robot.xml"],
            "error: robot: rollout takes the name of a robot that `brax-concurrent envs` lists",
        ),
    ],
)
def test_what_the_library_refuses_is_an_error_of_usage(capsys, arguments, said):
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("brax-concurrent: error: ")
    assert said in error


def test_a_closed_pipe_is_no_traceback(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        monkeypatch.setattr(cli.envs, "run", lambda options: print("x", flush=True))
        assert run("envs") == 1


# ---- rollout


def test_rollout_saves_what_it_reports(tmp_path, capsys):
    path = tmp_path / "walk.npz"
    assert run("rollout", "walker2d", *SMALL, "--out", path) == 0
    output = capsys.readouterr()
    assert output.err == ""  # no terminal: no bar
    assert re.search(r"^compiled in [\d.]+ s", output.out, re.MULTILINE)
    with np.load(path) as file:
        saved = dict(file)
    shapes = {"obs": (17,), "final_obs": (17,), "action": (6,)}
    assert {name: value.shape for name, value in saved.items()} == {
        name: (60, 40, *shapes.get(name, ())) for name in cli.rollout._COLUMNS
    }
    assert f"will have {cli.rollout._bytes(sum(value.nbytes for value in saved.values()))}" in output.out
    assert np.abs(saved["action"]).max() <= 1
    np.testing.assert_allclose(saved["log_prob"], -6 * np.log(2), rtol=1e-6)
    returns, lengths = episodes(saved["reward"], saved["terminated"] | saved["truncated"])
    assert len(returns) > 40
    assert f"{len(returns)} episodes ended ({saved['terminated'].sum()} terminated)" in output.out
    assert f"mean return {np.mean(returns):.4g}, mean length {np.mean(lengths):.4g}" in output.out
    assert f"reward per step {saved['reward'].mean(dtype=float):.4g}" in output.out


def episodes(reward, done):
    """Returns and lengths, one environment after another."""
    returns, lengths = [], []
    for e in range(reward.shape[1]):
        begin = 0
        for end in np.flatnonzero(done[:, e]):
            returns.append(reward[begin : end + 1, e].sum(dtype=float))
            lengths.append(end + 1 - begin)
            begin = end + 1
    return returns, lengths


@pytest.mark.slow
def test_seeds_and_chunks(tmp_path, monkeypatch):
    def rollout(name, *options):
        assert run("rollout", "halfcheetah", "--num-envs", 3, "--steps", 7, "--out", tmp_path / name, *options) == 0
        with np.load(tmp_path / name) as file:
            return dict(file)

    first, same, other = rollout("a"), rollout("b", "--threads", 1), rollout("c", "--seed", 1)
    monkeypatch.setattr(cli.rollout, "_LONGEST_CHUNK", 4)
    chunked = rollout("d")
    for name, value in first.items():
        np.testing.assert_array_equal(value, same[name])
        assert name in ("log_prob", "terminated", "truncated") or not np.array_equal(value, other[name])
    assert len(chunked["obs"]) == 7
    np.testing.assert_array_equal(chunked["obs"][0], first["obs"][0])
    np.testing.assert_array_equal(chunked["obs"][4], chunked["final_obs"][3])  # the second chunk goes on from there


def test_progress_on_request(capsys):
    assert run("rollout", "halfcheetah", "--num-envs", 2, "--steps", 3, "--progress") == 0
    assert re.fullmatch(r"3 of 3 steps, [\d,]+ environment steps/s, 0 s left\n", capsys.readouterr().err)


def test_a_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with cli.rollout._Progress(4, 2, wanted=False) as progress:
        for done in (1, 2, 4):
            progress.show(done)
    bars = capsys.readouterr().err.split("\r")
    assert bars[-1].startswith(f"[{'=' * 30}] 4 of 4 steps")
    assert bars[-1].endswith("\n")


def test_a_file_is_not_overwritten_unasked(tmp_path, capsys):
    path = tmp_path / "old.npz"
    path.write_bytes(b"old")
    small = ["rollout", "halfcheetah", "--num-envs", 2, "--steps", 3, "--out", path]
    assert run(*small) == 1
    assert f"{path} exists; --force overwrites it" in capsys.readouterr().err
    assert path.read_bytes() == b"old"
    assert run(*small, "--force") == 0
    assert np.load(path)["reward"].shape == (3, 2)
    assert os.listdir(tmp_path) == ["old.npz"]


def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli.rollout, "_Rollout", None)  # the work
    arguments = ["rollout", "halfcheetah", "--num-envs", 2, "--steps", 3, "--out"]
    for path, said in [
        (tmp_path / "none" / "a.npz", f"there is no folder {tmp_path / 'none'}"),
        (tmp_path, "it is a folder"),
    ]:
        assert run(*arguments, path) == 1
        assert f"cannot write {path}: {said}" in capsys.readouterr().err
    monkeypatch.setattr(cli.rollout.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 10}))
    assert run(*arguments, tmp_path / "a.npz") == 1
    assert "its disk has 10 B left" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("problem", "code", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 1, "a.npz: No space left on device"),
        (KeyboardInterrupt(), 130, "interrupted; nothing was kept"),
    ],
)
def test_nothing_half_written_is_left(tmp_path, capsys, monkeypatch, problem, code, said):
    def save(file, **arrays):
        file.write(b"half")
        raise problem

    monkeypatch.setattr(np, "savez", save)
    assert run("rollout", "halfcheetah", "--num-envs", 2, "--steps", 3, "--out", tmp_path / "a.npz") == code
    assert said in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_ctrl_c_while_it_runs(tmp_path, capsys, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(cli.rollout._Rollout, "chunks", interrupted)
    assert run("rollout", "halfcheetah", "--num-envs", 2, "--steps", 3, "--out", tmp_path / "a.npz") == 130
    assert "interrupted" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


# ---- envs


def test_envs_is_a_table_of_what_is(capsys, monkeypatch):
    monkeypatch.setattr("brax_concurrent.envs.list_envs", lambda: ["halfcheetah"])
    monkeypatch.setattr(cli.envs, "_threads", lambda: 4)
    assert run("envs") == 0
    head, row, *_ = capsys.readouterr().out.splitlines()
    table = dict(zip(head.split(), row.split(), strict=True))
    env = make("halfcheetah", 1024)
    arena = int(env.program("control_step").desc[DESC_ARENA_BYTES])
    carried = 4 * (9 + 2 + 1 + 1 + 1 + 1)  # warm start, key, tick, elapsed, work, x position
    assert table == {
        "robot": "halfcheetah",
        "nq": "9",
        "nv": "9",
        "nu": "6",
        "obs": "17",
        "action": "6",
        "dt": "0.05",
        "frame_skip": "5",
        "integrator": "euler",
        "pairs": "8",
        "nconmax": "16",
        "state": f"{4 * (9 + 9 + 17 + 17 + 1 + 2 + 2 + 3) + 2}",
        "carried": f"{carried}",
        "arena": f"{arena:,}",
        "beyond": f"{carried + 4 * arena / 1024:,.0f}",
    }


def test_envs_says_what_takes_long(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("brax_concurrent.envs.list_envs", lambda: ["grasp"])
    monkeypatch.setenv("BRAX_CONCURRENT_CACHE", str(tmp_path))
    said = "tracing a control step of grasp to see what memory it needs"
    assert run("envs") == 0
    assert capsys.readouterr().err.count(said) == 1
    assert run("envs") == 0
    assert capsys.readouterr().err == ""


# ---- check


def test_check_of_a_users_robot(pendulum, capsys):
    assert run("check", pendulum, "--dtype", "float64", "--states", 40) == 0
    output = capsys.readouterr().out
    assert re.match(
        rf"{pendulum}, float64 on cpu, against MuJoCo 4\.\S+: 40 random states with \d\d contacts\n", output
    )
    rows = [line.split() for line in output.splitlines()[2:-2]]
    assert {"xpos", "qM", "qLD", "contact_dist", "contact_J", "limit_D", "qacc", "cfrc_ext", "qvel"} <= {
        r[0] for r in rows
    }
    assert {row[1] for row in rows} >= {"kinematics", "collision", "bias", "constraints", "solve", "step"}
    assert {row[-1] for row in rows} == {"ok"}
    assert output.endswith("\nagrees\n")


def test_check_says_what_is_missed(pendulum, capsys, monkeypatch):
    """MuJoCo is given other physics: its answers that depend on gravity are missed, and no others."""
    right = checking._converging

    def lighter(mj):
        mj = right(copy.copy(mj))
        mj.opt.gravity[2] = -9.8
        return mj

    monkeypatch.setattr(checking, "_converging", lighter)
    said = "missed: qfrc_bias, qfrc_smooth, qacc_smooth, qacc, qfrc_constraint"
    assert run("check", pendulum, "--states", 40, "--seed", 3) == 1
    *_, missed, why, command = capsys.readouterr().out.splitlines()
    assert missed.startswith(said)
    assert why.startswith("in single precision that may be rounding")
    again = shlex.split(command)
    assert again[0] == "brax-concurrent"
    assert run(*again[1:]) == 1  # here it is none
    output = capsys.readouterr().out
    assert re.match(rf"{pendulum}, float64 on cpu, .*: 40 random states", output)
    assert output.splitlines()[-1].startswith(said)


def test_contacts_that_differ_are_missed(pendulum, monkeypatch):
    right = checking._converging

    def wider(mj):
        mj = right(copy.copy(mj))
        mj.geom_margin[:] = 0.02
        return mj

    monkeypatch.setattr(checking, "_converging", wider)
    rows = {row.field: row for row in checking.check(pendulum, num_states=40).rows}
    assert rows["ncon"].worst >= 1
    assert rows["contact_pos"].worst == np.inf
    assert rows["qM"].ok


def test_an_unsupported_robot_is_refused(tmp_path, capsys):
    path = tmp_path / "box.xml"
    path.write_text('<mujoco><worldbody><body><freejoint/><geom type="box" size="1 1 1"/></body></worldbody></mujoco>')
    assert run("check", path) == 2
    error = capsys.readouterr().err
    assert f"of {path} uses 1 unsupported feature" in error
    assert "geom #0 type='box'" in error


def test_a_file_that_mujoco_refuses_is_called_what_was_typed(tmp_path, capsys):
    path = tmp_path / "bad.xml"
    path.write_text("<mujoco><wordbody/></mujoco>")
    assert run("check", path) == 2
    assert f"error: robot: MuJoCo cannot compile '{path}'" in capsys.readouterr().err


def test_states_with_too_many_contacts_are_left_out(pendulum, capsys, monkeypatch):
    original = checking.Simulator

    def narrow(model, num_envs, fields=(), **options):
        return original(model, num_envs, fields, **options | ({"nconmax": 1} if fields else {}))

    monkeypatch.setattr(checking, "Simulator", narrow)
    assert run("check", pendulum, "--states", 40, "--dtype", "float64") == 0
    assert re.search(r"\n\((\d+) more states were left out", capsys.readouterr().out)


def test_relative_errors():
    expected = np.array([[1.0, -2.0], [1e-6, 0.0], [0.0, 0.0]])
    found = expected + np.array([[0.2, 0.0], [2e-5, 0.0], [0.0, np.nan]])
    np.testing.assert_allclose(checking.relative_errors(found, expected), [0.1, 0.01, np.inf])
    np.testing.assert_allclose(checking.relative_errors(found, expected, size=4.0), [0.05, 5e-6, np.inf])
    assert checking.relative_errors(np.zeros((0, 3)), np.zeros((0, 3))).shape == (0,)


# ---- check-footprints


def test_footprints_of_a_robot(capsys):
    assert run("check-footprints", "grasp") == 0
    output = capsys.readouterr().out
    rows = [line.split() for line in output.splitlines()[2:] if not line.startswith("note: ")][:-1]
    assert {row[0] for row in rows} == {"reset_all", "control_step", "reset_where", "restart"}
    assert {row[-1] for row in rows} == {"ok"}
    assert ["control_step", "kinematics", "24", "ok"] in rows  # 4 substeps, 3 states, 2 tiles
    assert output.endswith("\nall kernels that ran keep to their footprints\n")


def test_a_lie_about_a_robot_is_named(capsys, monkeypatch):
    """Solve does not say that it reads qacc_warmstart."""
    right = footprints.tile_program

    def lying(env, kind):
        program = right(env, kind)
        (field,) = (f for f in program.layout.fields if f.name == "qacc_warmstart")
        hidden = range(field.start, field.stop)

        def without(footprint):
            def of_tile(tile):
                base = tile * program.layout.arena_bytes
                kept = []
                for s in footprint(tile).reads:
                    if s.buffer != -1 or not (s.start < base + hidden.stop and base + hidden.start < s.stop):
                        kept.append(s)
                        continue
                    kept.append(dataclasses.replace(s, stop=max(s.start, base + hidden.start)))
                    kept.append(dataclasses.replace(s, start=min(s.stop, base + hidden.stop)))
                return dataclasses.replace(footprint(tile), reads=tuple(kept))

            return of_tile

        ops = tuple(
            dataclasses.replace(op, kernel=dataclasses.replace(op.kernel, footprint=without(op.kernel.footprint)))
            if op.kernel.name == "solve"
            else op
            for op in program.ops
        )
        return dataclasses.replace(program, ops=ops)

    monkeypatch.setattr(footprints, "tile_program", lying)
    assert run("check-footprints", "grasp") == 1
    output = capsys.readouterr().out.splitlines()
    assert "VIOLATES" in next(line for line in output if line.split()[:2] == ["control_step", "solve"])
    (told,) = (line for line in output if line.startswith("violation: "))
    assert told.startswith("violation: control_step: kernel solve reads field qacc_warmstart, bytes [")
    assert output[-1] == "violations: 1"


@pytest.mark.slow
@pytest.mark.parametrize(("robot", "dtype"), [("cheetah", "float32"), ("ant", "float64"), ("grasp", "float32")])
def test_robots_agree(robot, dtype, capsys):
    assert run("check", robot, "--dtype", dtype, "--states", 100) == 0
    assert capsys.readouterr().out.endswith("agrees\n")


def test_an_interrupted_process_ends_at_once(monkeypatch):
    """Without taking down what threads of XLA's still use; not where main is called as a function."""
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    for code in (0, 1, 130):
        monkeypatch.setattr(cli, "main", lambda code=code: code)
        with pytest.raises(SystemExit) as stopped:
            cli.command()
        assert stopped.value.code == code
    assert ended == [130]


def test_ctrl_c_while_an_extension_starts(monkeypatch, capsys):
    """NumPy's, for example, which says ImportError."""

    def run(options):
        raise ImportError("numpy._core.multiarray failed to import") from KeyboardInterrupt()

    monkeypatch.setattr(cli.envs, "run", run)
    assert cli.main(["envs"]) == 130
    assert capsys.readouterr().err == "brax-concurrent: interrupted; nothing was kept\n"


def test_the_commands_are_told_without_jax():
    code = "import sys, brax_concurrent.cli as cli; cli._parser(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
