"""What worker processes of tests open; in a module of its own, which they import."""

from collections.abc import Callable

from fedatlas.transport.frames import Question


def telling(name: str) -> Callable[[Question], None]:
    """Answers with a name, and prints it."""

    def answer(question: Question) -> None:
        print(name, "prints", flush=True)
        question.reply.write_text(name)

    return answer
