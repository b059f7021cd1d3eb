"""What worker processes of tests open; in a module of its own, which they import in no time."""

import time
from collections.abc import Callable

from fedatlas.transport.frames import Question


def hanging(site: str) -> Callable[[Question], None]:
    """Answers for every site but one, for which it never does."""

    def answer(question: Question) -> None:
        while question.site == site:
            time.sleep(1)
        question.reply.write_text(question.site)

    return answer
