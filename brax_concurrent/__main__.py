"""`python -m brax_concurrent` is the command `brax-concurrent`."""

from brax_concurrent.cli import command

if __name__ == "__main__":
    command()
