"""What a person at a terminal sees while a verb works."""

import sys
import time
from typing import Any

TITLES = {"dice": "Dice", "auroc": "AUROC"}


class Progress:
    """What a run tells a person: a line per round, and on a terminal what is going on inside it."""

    def __init__(self, rounds: int, out: Any) -> None:
        self.rounds, self.out = rounds, out
        self.began: float | None = None
        """When the present round began; None where that is not known yet."""
        self.durations: list[float] = []
        self.live = out.isatty()

    def tell(self, text: str) -> None:
        self._line(text)

    def site(self, site: str, function: str, log: dict[str, float], cost: dict[str, float]) -> None:
        from fedatlas.report.tables import main_loss

        if self.began is None:  # the first round of a run that goes on
            self.began = time.monotonic() - cost["seconds"]
        if self.live:
            main = main_loss(log)
            loss = f" loss {log[main]:.3f}" if main else ""
            self._transient(f"  {site}: {function}{loss}, {cost['seconds']:.1f} s")

    def passing(self, text: str) -> None:
        """What a terminal shows until the next line."""
        if self.live:
            self._transient(f"  {text.splitlines()[0]}")

    def round(self, record: Any, best: Any) -> None:
        from fedatlas.report.tables import main_loss

        if record.number == 0:
            self.began = time.monotonic()
            return
        now = time.monotonic()
        if self.began is not None:
            self.durations.append(now - self.began)
        self.began = now
        sites = record.log["sites"]
        main = main_loss(term for log in sites.values() for term in log)
        losses = "  ".join(f"{site} {log[main]:.3f}" for site, log in sorted(sites.items()) if main in log)
        which = "loss" if main in (None, "loss") else f"{main} loss"
        text = f"round {record.number:>{len(str(self.rounds))}}/{self.rounds}  {which} {losses}"
        if record.rows and best.round:
            score = f"{best.last_score:.3f}" if best.last_score is not None else "not defined"
            text += f"  validation {TITLES.get(best.metric, best.metric)} {score} (best {best.score:.3f} in round {best.round})"
        if recent := self.durations[-5:]:
            left = (self.rounds - record.number) * sum(recent) / len(recent)
            text += f"  {recent[-1]:.1f} s, {clock(left)} left"
        for site, reason in record.log["lost"].items():
            text += f"\n  lost {site}: {reason}"
        saved = {site: log["saved_seconds"] for site, log in sorted(sites.items()) if "saved_seconds" in log}
        if saved:
            took = clock(sum(saved.values()))
            text += f"\n  from the cache, not trained again: {', '.join(saved)} ({took} of training)"
        self._line(text)

    def _line(self, text: str) -> None:
        clear = "\r\x1b[2K" if self.live else ""
        print(f"{clear}{text}", file=self.out, flush=True)

    def _transient(self, text: str) -> None:
        print(f"\r\x1b[2K{text}", end="", file=self.out, flush=True)


class Counter:
    """What `predict`, `evaluate`, `describe`, `init` and `plan` show while they work, on stderr and only on a terminal: the case that is next, how
    many there are, and the time left."""

    def __init__(self, quiet: bool) -> None:
        self.out, self.live = sys.stderr, sys.stderr.isatty() and not quiet
        self.began: float | None = None

    def seen(self, done: int, total: int, name: str) -> None:
        """Before a case: how many are done, of how many. The first case tells nothing of the time left."""
        if not self.live:
            return
        if self.began is None:
            self.began = time.monotonic()
        left = (time.monotonic() - self.began) / done * (total - done) if done else None
        remaining = "" if left is None else f", {clock(left)} left"
        print(
            f"\r\x1b[2K  {min(done + 1, total)} of {total}{remaining}  {name}",
            end="",
            file=self.out,
            flush=True,
        )

    def show(self, text: str) -> None:
        """What is going on, until the next line."""
        if self.live:
            print(f"\r\x1b[2K  {text}", end="", file=self.out, flush=True)

    def __enter__(self) -> "Counter":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.live:
            print("\r\x1b[2K", end="", file=self.out, flush=True)


def clock(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
