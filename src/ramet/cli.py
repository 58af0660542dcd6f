"""The `ramet` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ramet import __version__
from ramet.errors import RametError

__all__ = ["main"]

_INTERRUPTED = 130  # what a shell reports after Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: its arguments, without the program's name; those of the process by default.

    Returns:
        The exit status: 0 for success, 1 for failure, 130 after an interrupt. Wrong arguments exit with 2.
    """
    arguments = _parser().parse_args(argv)
    try:
        return _demo(arguments) if arguments.command == "demo" else _doctor()
    except KeyboardInterrupt:
        return _failed("interrupted", _INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except BaseExceptionGroup as group:
        return _failed(_one_line(_first(group)))
    except (RametError, ImportError, OSError) as error:
        return _failed(_one_line(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ramet", description="Checkpoint a live environment, fork it, step the copies."
    )
    parser.add_argument("--version", action="version", version=f"ramet {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    demo = commands.add_parser(
        "demo",
        help="land a lunar lander by forking the live simulator",
        description="Land a lunar lander by a beam search that forks the live simulator at every decision.",
    )
    demo.add_argument("--seed", type=natural_number, default=42, help="the seed of the episode (default: %(default)s)")
    demo.add_argument(
        "--width", type=positive_number, default=8, help="how many branches to keep (default: %(default)s)"
    )
    demo.add_argument("--plain", action="store_true", help="lines instead of a progress display")
    commands.add_parser(
        "doctor",
        help="what this machine allows, and what to change",
        description="Tell what this machine allows, and what to change. Exits with 0 if ramet can fork here.",
    )
    return parser


def _demo(arguments: argparse.Namespace) -> int:
    from ramet.demo import run

    landed = run(seed=arguments.seed, width=arguments.width, plain=arguments.plain or not sys.stdout.isatty())
    return 0 if landed else 1


def _doctor() -> int:
    from ramet.doctor import examine, report

    checks = list(examine())
    print(*report(checks), sep="\n")
    return 0 if all(check.status != "problem" for check in checks) else 1


def natural_number(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return number


def positive_number(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def _failed(text: str, status: int = 1) -> int:
    print(f"ramet: {text}", file=sys.stderr)
    return status


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, RametError) else f"{type(error).__name__}: {text}"
