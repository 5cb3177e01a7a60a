"""Define the errors that people meet: raised deep, shown once by `cli.app.main`, without a traceback."""


class ImagebuildError(Exception):
    """Describe a problem that the user can act on; `str(error)` says what is wrong and what to do."""

    exit_code = 1


class ConfigError(ImagebuildError):
    """Refuse a wrong input: matrix, component, lock, option or argument."""

    exit_code = 2


class NothingSelected(ImagebuildError):
    """Report that selectors match no target."""

    exit_code = 3


class CommandError(ImagebuildError):
    """Report that a program or server that we called failed, or is missing."""

    exit_code = 4


class Unreachable(CommandError):
    """Report that a server cannot be reached, or answered with something else than the file: a mirror may have it."""


class Absent(Unreachable):
    """Report that a server answered that it does not have the file."""


class ResultError(ImagebuildError):
    """Report a result or an answer that cannot be read."""

    exit_code = 5
