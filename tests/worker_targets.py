"""What worker processes of tests open; in a module of its own, which they import."""

import sys
import weakref
from collections.abc import Callable

from fedatlas.transport.frames import Question


def telling(name: str) -> Callable[[Question], None]:
    """Answers with a name, and prints it."""

    def answer(question: Question) -> None:
        print(name, "prints", flush=True)
        question.reply.write_text(name)

    return answer


class Held:
    """What an opened target holds, as a site's data."""


_HELD: weakref.WeakSet[Held] = weakref.WeakSet()


def alone(name: str) -> Callable[[Question], None]:
    """Answers with how many others were still there when it was opened; warns, and prints what it does not flush."""
    others, held = len(_HELD), Held()
    _HELD.add(held)

    def answer(question: Question) -> None:
        assert held in _HELD
        print(name, "prints")
        print(name, "warns", file=sys.stderr, flush=True)
        question.reply.write_text(f"{others} others")

    return answer


def lacking(site: str) -> Callable[[Question], None]:
    """Cannot write the answer of one site, for want of room, and that of "none", for no reason."""

    def answer(question: Question) -> None:
        if question.site == site:
            raise OSError(28, "No space left on device")
        if question.site == "none":
            raise OSError
        question.reply.write_text(question.site)

    return answer
