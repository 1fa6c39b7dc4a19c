"""The command `render`: a robot's motion as a film or a web page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brax_concurrent.cli.common import FAILED, OK, CommandError, add_place, at_least, refuse_path, seed, wrong_arguments

if TYPE_CHECKING:
    from brax_concurrent.envs import Env
    from brax_concurrent.training.rollout import Policy


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser's."""
    text = """Simulate one robot, under random actions or a trained policy, and show it: as a film, .mp4 or .gif, which
    needs the extra `render` and OpenGL, or as a web page, .html, which needs neither."""
    parser = subparsers.add_parser("render", help="a robot's motion as a film or a web page", description=text)
    parser.add_argument("target", help="a name that `brax-concurrent envs` lists, a folder of `train` or a policy")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="ends in .mp4, .gif or .html")
    parser.add_argument("--steps", type=at_least(1), default=200, metavar="N", help="control steps (default 200)")
    parser.add_argument("--seed", type=seed, default=0, help="of resets and actions (default 0)")
    for name, pixels in (("width", 640), ("height", 480)):
        help_text = f"of a film, pixels, even (default {pixels})"
        parser.add_argument(f"--{name}", type=at_least(2), default=pixels, metavar="N", help=help_text)
    parser.add_argument(
        "--camera",
        metavar="NAME",
        help="of the model's: films are seen through it (default: the first), pages begin with it",
    )
    parser.add_argument("--force", action="store_true", help="overwrite FILE if it exists")
    add_place(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Simulate and write the file; returns the exit code."""
    import jax

    from brax_concurrent.training.render import FORMATS, render
    from brax_concurrent.training.trajectory import trajectory

    out = arguments.out
    if out.suffix.lower() not in FORMATS:
        raise CommandError(f"--out: expected a name that ends in one of {', '.join(FORMATS)}, got {str(out)!r}", 2)
    if out.exists() and not (arguments.force and out.is_file()):
        raise CommandError(f"{out} exists; --force overwrites a file", FAILED)
    if not out.absolute().parent.is_dir():
        raise CommandError(f"cannot write {out}: there is no folder {out.parent}", FAILED)
    place = {name: getattr(arguments, name) for name in ("backend", "threads")}
    with wrong_arguments():
        env, policy, params = load_policy(arguments.target, **place)
        key = jax.random.key(arguments.seed)
    qpos, mocap_pos = trajectory(env, policy, params, key, arguments.steps)
    size = {"width": arguments.width, "height": arguments.height}
    try:
        with wrong_arguments():
            render(env.task, qpos, out, mocap_pos=mocap_pos, camera=arguments.camera, **size)
    except (ImportError, RuntimeError) as error:
        raise CommandError(str(error), FAILED) from error
    print(f"{out}: {arguments.steps} control steps of {env.name}, {arguments.steps * env.dt:.2f} s")
    return OK


def load_policy(target: str, **make_arguments: Any) -> tuple[Env, Policy, Any]:
    """What the argument `target` means: one environment, a policy for it and the policy's parameters.

    Args:
        target: a robot's name, for random actions; a run's folder or policy, for its own without noise.
        make_arguments: of `make`.

    Raises:
        CommandError: there is no such robot, and no policy there.
        TypeError, ValueError: as `make` says it.
    """
    from brax_concurrent.cli.evaluate import check_known, load_trained
    from brax_concurrent.cli.rollout import random_policy
    from brax_concurrent.envs import list_envs, make

    if target in (*list_envs(), "cheetah") or not Path(target).exists():
        refuse_path("render", target)
        env = make(target, 1, **make_arguments)
        return env, random_policy(env), None
    trained = load_trained(Path(target))
    check_known(trained)
    env = make(trained.robot, 1, **make_arguments)
    trained.check_fits(env.observation_size, env.action_size, trained.robot)
    return env, _without_noise, trained


def _without_noise(policy: Any, obs: Any, key: Any) -> tuple[Any, Any]:
    import jax.numpy as jnp

    return policy(obs), jnp.zeros(obs.shape[0])
