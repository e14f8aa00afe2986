"""What goes wrong for the user's reasons, said in one sentence."""


class UserError(ValueError):
    """A mistake in what was given, not in the program: commands print its message alone and exit with status 1."""


class NotFinite(UserError):  # noqa: N818  (reads as what the training was)
    """A training whose loss or gradient was not finite: its learning rate may be too high, or its batch broken."""


def reason(error: BaseException) -> str:
    """The first line of an error's message, or the name of its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class Stopped(Exception):  # noqa: N818  (not an error: the run was asked to stop, and did)
    """A run that ended early because a signal asked it to, with everything saved.

    Args:
        signal_number: the signal received; commands exit with 128 plus it, as shells do.
    """

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number
