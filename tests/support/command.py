"""The command line, in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from hushfleet.aggregator.commands.main import build_app


def hushfleet(*words: object, answer: str = "") -> str:
    """Returns what a command prints, after its exit code if that is not 0. Raises what the command raises.

    :param answer: what a person types.
    """
    done = CliRunner().invoke(build_app(), [*map(str, words)], input=answer)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output if done.exit_code == 0 else f"exit code {done.exit_code}: {done.output}"
