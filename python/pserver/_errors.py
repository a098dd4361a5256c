"""The exceptions of the package. Texts are the library's: what was found, what was expected."""


class Error(Exception):
    """A call failed. It may be repeated: no gradient is applied twice."""


class Refused(Error, ValueError):
    """The call has a fault; repeated, it fails again."""


class NotInitialised(Error):
    """The parameters are not initialised yet."""


class Timeout(Error, TimeoutError):
    """The call reached its deadline."""


class MissingTrainer(Error):
    """Servers waited for trainers and gave up."""

    ranks: list[int]
    """The ranks of these trainers."""

    def __init__(self, text: str, ranks: list[int]) -> None:
        super().__init__(text)
        self.ranks = ranks

    def __reduce__(self) -> tuple[type["MissingTrainer"], tuple[str, list[int]]]:
        return type(self), (str(self), self.ranks)


class ServerLost(Error, ConnectionError):
    """A server has refused connections for longer than calls wait for it."""


class Cancelled(Error):
    """The program cancelled the call, or closed its client."""
