"""The command `brax-concurrent`: robots rolled out, shown, checked, measured, traced, trained; networks inferred."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from brax_concurrent import __version__
from brax_concurrent.cli import (
    bench,
    check,
    check_footprints,
    envs,
    evaluate,
    infer,
    render,
    rollout,
    trace,
    train,
    tune,
)
from brax_concurrent.cli.common import FAILED, INTERRUPTED, CommandError

EXAMPLES = """\
examples:
  brax-concurrent envs
  brax-concurrent rollout ant --num-envs 256 --steps 1000
  brax-concurrent rollout humanoid --num-envs 64 --steps 200 --out humanoid.npz
  brax-concurrent render ant --out ant.html
  brax-concurrent check walker2d --dtype float64
  brax-concurrent check my_robot.xml
  brax-concurrent check-footprints ant
  brax-concurrent bench ant humanoid --num-envs 1024 4096
  brax-concurrent tune ant --num-envs 4096
  brax-concurrent trace ant --out trace.json
  brax-concurrent train halfcheetah --steps 3e6 --out runs/halfcheetah
  brax-concurrent evaluate runs/halfcheetah --in ours gymnasium --episodes 20
  brax-concurrent infer instanas --batch 1 --scheduler hw

exit codes: 0 done; 1 a check failed, a run broke off or a file could not be read or written; 2 wrong arguments;
130 interrupted (Ctrl-C)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code.

    Args:
        arguments: of the command line, without the program's name; None: sys.argv.
    """
    try:
        options = _parser().parse_args(arguments)
        return int(options.run(options))
    except CommandError as error:
        print(f"brax-concurrent: error: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        return _interrupted()
    except ImportError as error:  # which the start of an extension makes of Ctrl-C
        if not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        return _interrupted()
    except BrokenPipeError:  # whoever read the output, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:  # such as a full disk behind the output
        print(f"brax-concurrent: error: {error}", file=sys.stderr)
        return FAILED


def command() -> None:
    """Run the command and end the process with its exit code."""
    code = main()
    if code == INTERRUPTED:
        # XLA goes on compiling in a thread of its own, and crashes when what it uses is taken down before it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _interrupted() -> int:
    print("brax-concurrent: interrupted; nothing was kept", file=sys.stderr)
    return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "brax-concurrent",
        description="Robots for reinforcement learning: MuJoCo's physics in batches, as JAX functions.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"brax-concurrent {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (rollout, envs, render, check, check_footprints, bench, tune, trace, train, evaluate, infer):
        command.add_parser(subparsers)
    return parser
