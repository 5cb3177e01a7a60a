"""Errors that people meet: raised deep, shown once by `cli.main`, without a traceback."""


class ImagebuildError(Exception):
    """A problem the user can act on; `str(error)` says what is wrong and what to do."""

    exit_code = 1


class ConfigError(ImagebuildError):
    """The input is wrong: matrix, component, lock, option or argument."""

    exit_code = 2


class NothingSelected(ImagebuildError):
    """The selectors match no target."""

    exit_code = 3


class CommandError(ImagebuildError):
    """A program we called failed, or is missing."""

    exit_code = 4


class Unreachable(CommandError):
    """Nobody answered, or not as a server does that has it: another machine or another time may have more luck."""


class Absent(Unreachable):
    """The server answered that it does not have what was asked for."""


class ResultError(ImagebuildError):
    """A program answered, but its answer could not be read."""

    exit_code = 5
