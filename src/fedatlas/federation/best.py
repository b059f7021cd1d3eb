"""Which round of a run was the best, by its validation: of the global model, and of every site's local one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedatlas.core.contract import Method
from fedatlas.core.errors import RunFolderError
from fedatlas.core.tensors import to_tree
from fedatlas.evaluation.evaluate import selection_score
from fedatlas.transport import wire
from fedatlas.transport.rounds import RunFolder, read_json, to_json
from fedatlas.transport.store import read_whole, write_atomic

LACKING = "lacking"
"""In the log of a round: the sites that were lost in its validation."""


class Best:
    """The best complete round by the validation score, kept as models/best.fa with best.json beside it. Of two rounds
    whose validation lacks sites, that which lacks fewer is the better: a mean over other sites is another number."""

    def __init__(self, folder: RunFolder, weights: str, metric: str, first: int = 1) -> None:
        """first: the first round that counts."""
        self.folder, self.weights, self.metric, self.first = folder, weights, metric, first
        self.round, self.score, self.lacking = 0, -1.0, 0
        self.last_score: float | None = None
        """The score of the round seen last; None if none of its values was defined."""

    def see(self, number: int, rows: list[dict[str, Any]], lacking: Sequence[str] = ()) -> None:
        """Keeps the round if its score is the highest so far; of equal scores the first. lacking: the sites that were lost in
        its validation."""
        self.last_score = selection_score(rows, self.weights, self.metric) if rows else None
        if self._take(number, self.last_score, len(lacking)):
            self.folder.keep_model("best", number)
            write_atomic(self.folder.path / "best.json", to_json(self._kept()))

    def _take(self, number: int, score: float | None, lacking: int) -> bool:
        """Is this round better than the best so far? Then it is the best."""
        if score is None or number < self.first:
            return False
        if self.round and (-lacking, score) <= (-self.lacking, self.score):
            return False
        self.round, self.score, self.lacking = number, score, lacking
        return True

    def _kept(self) -> dict[str, Any]:
        about = {"round": self.round, "score": self.score}
        return about | {LACKING: self.lacking} if self.lacking else about

    def recover(self, latest: int) -> None:
        """After a resume at the end of round `latest`: what was seen so far, from the rounds on disk. A model that scored as high as the
        best of them or higher is kept: it may be of a round whose state was lost, and which is, or was, done again."""
        for log, rows in self.folder.records():
            score = selection_score(rows, self.weights, self.metric) if rows else None
            self._take(log["round"], score, len(log.get(LACKING, ())))
        path = self.folder.path / "best.json"
        kept = {LACKING: 0} | (read_json(path) if path.exists() else {"round": 0, "score": -1.0})
        if kept["round"] and (-kept[LACKING], kept["score"]) >= (-self.lacking, self.score):
            self.round, self.score, self.lacking = kept["round"], kept["score"], kept[LACKING]
        elif self.round:
            if self.round != latest:
                raise RunFolderError(
                    f"{path}: names round {kept['round']}, the rounds say {self.round}; the folder was changed by hand"
                )
            self.folder.keep_model("best", self.round)
            write_atomic(path, to_json(self._kept()))


class BestOfSites(Best):
    """The best models of a method whose sites choose for themselves (`Method.chosen_by_site`). models/best.fa holds the
    state with every site's model of its own best round; best.json lists these rounds, the last of them, and the mean of
    the scores. own: sees a round before this object does."""

    def __init__(self, folder: RunFolder, metric: str, method: Method, own: "BestLocals") -> None:
        super().__init__(folder, "classes", metric)
        self.method, self.own = method, own

    def see(self, number: int, rows: list[dict[str, Any]], lacking: Sequence[str] = ()) -> None:
        """Assembles the sites' best models so far; a site without a score takes part with its model of this round."""
        self.last_score = selection_score(rows, self.weights, self.metric) if rows else None
        if rows:
            self._assemble(number)

    def recover(self, latest: int) -> None:
        """After a resume: what was seen so far, with the state of the last round that was validated."""
        validated = [log["round"] for log, rows in self.folder.records() if rows]
        if validated and validated[-1] == latest:
            self._assemble(latest)
        elif self.own.best:
            self._summarise()

    def _assemble(self, number: int) -> None:
        if not self.own.best:
            return
        self._summarise()
        models = {}
        for site in self.own.best:
            kept: Any = wire.decode(
                read_whole(self.folder.path / "models" / "local" / f"{site}.fa"), copy=False
            )
            models[site] = kept["model"]
        state = self.folder.state(self.folder.rounds / f"{number:04d}" / "state.fa", self.method)
        state = replace(self.method.assembled(state, models), round=self.round)
        write_atomic(self.folder.path / "models" / "best.fa", wire.encode(to_tree(state)))
        chosen = {"round": self.round, "score": self.score, "sites": self.own.best}
        write_atomic(self.folder.path / "best.json", to_json(chosen))

    def _summarise(self) -> None:
        """Sets `round` and `score` from those of the sites."""
        self.round = max(kept["round"] for kept in self.own.best.values())
        self.score = float(np.mean([kept["score"] for kept in self.own.best.values()]))


class BestLocals:
    """Every site's local model of its best complete round by its own validation cases, kept as
    models/local/<site>.fa with models/local.json beside them. Of equal rounds the first."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.file = folder, folder.path / "models" / "local.json"
        self.best: dict[str, dict[str, Any]] = {}

    def see(self, number: int, scores: Mapping[str, float]) -> None:
        """scores: site -> that of its local model in this round."""
        better = {s: v for s, v in scores.items() if s not in self.best or v > self.best[s]["score"]}
        for site, score in better.items():
            self.best[site] = {"round": number, "score": score}
            self.folder.keep_local(site, number)
        if better:
            write_atomic(self.file, to_json(self.best))

    def recover(self) -> None:
        """After a resume: what was seen so far, from the rounds on disk. A model that scored as high as the best of them or higher is
        kept, as by `Best.recover`."""
        for log, _ in self.folder.records():
            for site, score in log.get("local", {}).items():
                if site not in self.best or score > self.best[site]["score"]:
                    self.best[site] = {"round": log["round"], "score": score}
        kept = read_json(self.file) if self.file.exists() else {}
        for site, best in kept.items():
            if site not in self.best or best["score"] >= self.best[site]["score"]:
                self.best[site] = best
        if kept == self.best:
            return
        for site, best in self.best.items():
            if kept.get(site) != best:
                try:
                    self.folder.keep_local(site, best["round"])
                except FileNotFoundError:
                    raise RunFolderError(
                        f"{self.file}: the best local model of site {site}, of round {best['round']}, is gone; the "
                        "folder was changed by hand"
                    ) from None
        write_atomic(self.file, to_json(self.best))
