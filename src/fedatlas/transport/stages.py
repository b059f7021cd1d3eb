"""The stages of the pipeline that remember something from call to call: each with its end at the server and its end
at a site. `pipeline` puts them in order.

Shapes: K sites.
"""

import hashlib
import math
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedatlas.core.contract import Replies
from fedatlas.core.errors import FedAtlasError, WireError
from fedatlas.core.tensors import Tensors, Tree
from fedatlas.transport import wire
from fedatlas.transport.frames import shown
from fedatlas.transport.protection import compression, privacy, secure
from fedatlas.transport.protection.compression import Comm
from fedatlas.transport.protection.difference import apply, difference
from fedatlas.transport.protection.privacy import Privacy
from fedatlas.transport.protection.secure import Secure
from fedatlas.transport.store import read_whole, write_atomic
from fedatlas.transport.wire import Data


@dataclass(frozen=True)
class Payload:
    """The arguments of a call. sent: those for all sites, as they travel; held: the same as the sites hold them in the
    end; own: site -> further ones."""

    sent: dict[str, Any]
    held: dict[str, Any]
    own: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    def at(self, site: str) -> dict[str, Any]:
        """All arguments that a site's function is called with."""
        return self.held | self.own.get(site, {})

    def with_own(self, further: Mapping[str, dict[str, Any]]) -> "Payload":
        """The same with further arguments for the sites that are named."""
        return replace(self, own={site: self.own.get(site, {}) | more for site, more in further.items()})


_NAME = re.compile(r"[0-9a-f]{64}")


def _name_of(data: Data) -> str:
    return hashlib.sha256(data).hexdigest()


def _make_newest(path: Path) -> None:
    """Gives a file a later time than every other of its folder, also where the clock was set back."""
    others = [other.stat().st_mtime_ns for other in path.parent.glob("*.fa") if other != path]
    newest = max(others, default=0)
    if path.stat().st_mtime_ns <= newest:
        os.utime(path, ns=(newest + 1_000_000, newest + 1_000_000))


# ------------------------------------------------------------------------------ compression, from the server to a site
#
# Server and sites hold the same model, under a name that is its digest. In the place of the tensors of a model travels
#
#     {"whole": tensors, "as": name}                        a model to hold
#     {"held": name}                                        the very model that is held
#     {"held": name, "difference": compressed, "as": name}  a change of the model that is held, and the new one's name


class NotHeld(FedAtlasError):
    """A site does not hold the model that it was sent a change of; it must be sent whole."""


@dataclass
class HeldByAll:
    """The server's end: the model that the sites hold, which is what compression left of the method's."""

    comm: Comm
    model: Tensors | None = None
    name: str = ""
    stands_for: str = ""
    """The name of the method's model that `model` was made from."""

    def send(self, model: Tensors) -> dict[str, Any]:
        """The form in which a model is sent to all; `self.model` is then what they make of it."""
        exact = _name_of(wire.encode(model))  # type: ignore[arg-type]
        if self.model is None or list(self.model) != list(model):
            self._hold(model, exact)
            return self.whole()
        if exact == self.stands_for:
            return {"held": self.name}
        held, before = self.model, self.name
        packed = compression.compress(difference(model, held), self.comm.down, fraction=self.comm.fraction)
        self._hold(apply(held, compression.restore(packed, held)), exact)
        return {"held": before, "difference": packed, "as": self.name}

    def whole(self) -> dict[str, Any]:
        """The model that the sites hold, for a site that does not."""
        return {"whole": self.model, "as": self.name}

    def kept(self) -> dict[str, Tree]:
        """What `resume` goes on from, to be kept with a round; empty where the sites hold nothing."""
        return {} if self.model is None else {"model": dict(self.model), "stands_for": self.stands_for}

    def resume(self, kept: Mapping[str, Any]) -> None:
        """Goes on from what was kept."""
        if kept:
            self._hold(kept["model"], kept["stands_for"])

    def _hold(self, model: Tensors, stands_for: str) -> None:
        self.model = {name: tensor.clone() for name, tensor in model.items()}
        self.name, self.stands_for = _name_of(wire.encode(self.model)), stands_for  # type: ignore[arg-type]


@dataclass
class HeldHere:
    """A site's end. folder: keeps the two models that were used last."""

    site: str
    folder: Path

    def receive(self, sent: dict[str, Any]) -> Tensors:
        """The tensors of what `HeldByAll` sent. Raises NotHeld where the site lacks what it is a change of."""
        if "whole" in sent:
            self._hold(sent["as"], sent["whole"])
            return sent["whole"]
        if "held" not in sent:
            return sent
        model = self._held(sent["held"])
        if "difference" in sent:
            model = apply(model, compression.restore(sent["difference"], model))
            self._hold(sent["as"], model)
        return model

    def _hold(self, name: str, model: Tensors) -> None:
        data = wire.encode(model)  # type: ignore[arg-type]
        if _name_of(data) != name:
            raise NotHeld(f"site {self.site}: the model it was sent does not come out as the server's")
        write_atomic(self.folder / f"{name}.fa", data)
        _make_newest(self.folder / f"{name}.fa")
        files = sorted(self.folder.glob("*.fa"), key=lambda path: path.stat().st_mtime_ns)
        for old in files[:-2]:
            old.unlink()

    def _held(self, name: Any) -> Tensors:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise NotHeld(
                f"site {self.site}: asked for a model that it holds by {shown(name, 80)!r}; a model's name is the SHA-256 "
                "of its bytes in hex"
            )
        path = self.folder / f"{name}.fa"
        try:
            _make_newest(path)
            return wire.decode(read_whole(path), copy=False)  # type: ignore[return-value]
        except (OSError, FedAtlasError):
            raise NotHeld(f"site {self.site}: does not hold the model {name[:8]}") from None


# ------------------------------------------------------------------------------ compression, from a site to the server
#
# In the place of the tensors of a model travels {"difference": compressed}, of the model that the site received.

RESIDUAL = "exchange.residual."
"""With the name of a function, the key of a site's memory with what compression has left out of its answers so far."""


def compressed(
    function: str, model: Tensors, received: Tensors, comm: Comm, memory: dict[str, Tree]
) -> dict[str, Any]:
    """At a site: the form in which the model is sent that a function answers. memory: the site's, which keeps what compression leaves
    out."""
    key = RESIDUAL + function
    before: Any = memory.get(key) if comm.feedback else None
    packed, residual = compression.with_feedback(
        difference(model, received), before, comm.up, fraction=comm.fraction
    )
    if comm.feedback:
        memory[key] = residual  # type: ignore[assignment]
    return {"difference": packed}


def expanded(model: dict[str, Any], sent: Tensors, comm: Comm) -> Tensors:
    """At the server: the tensors of what `compressed` made. sent: the model that the site received.

    Raises WireError or NameMismatch for what `compressed` cannot have made.
    """
    packed = model["difference"]
    if not isinstance(packed, dict) or packed.get("kind") != comm.up:
        raise WireError(f"its model is not compressed by {comm.up}, as was agreed")
    return apply(sent, compression.restore(packed, sent))


# -------------------------------------------------------------------------------------------------------------- privacy


KEPT_REPLIES = 4
"""So many private answers does a site keep, to be sent again as they were."""


@dataclass
class Releases:
    """A site's end of differential privacy. folder: keeps the number of releases, and the last replies as they were
    sent: a question that is asked again gets the very same reply, because a second one would tell more than the first.

    sites: K.
    """

    choice: Privacy
    sites: int
    folder: Path

    def protect(self, function: str, model: Tensors, received: Tensors) -> Tensors:
        """The model that is sent in the place of `model`: its change of `received` clipped and with noise."""
        private, norm = privacy.protect(model, received, self.choice, sites=self.sites)
        self.folder.mkdir(parents=True, exist_ok=True)
        # for people at the site; it never leaves
        with (self.folder / "norms.txt").open("a", encoding="utf-8") as file:
            file.write(f"{function} norm before clipping {norm:.6g}\n")
        return private

    def count(self) -> dict[str, float]:
        """Counts one more private update that is about to leave. Returns what is logged: the number of updates in this run, the
        series of the count, drawn by chance when it began, so that a count that began anew can be told, and a number
        drawn for this update, so that it can be told from another one to the same question."""
        path = self.folder / "releases.txt"
        kept = path.read_text(encoding="utf-8").split() if path.exists() else []
        count = 1 + int(kept[0]) if kept else 1
        series = int(kept[1]) if kept[1:] else secrets.randbelow(LARGEST_DRAWN)
        write_atomic(path, f"{count} {series}".encode())
        drawn = secrets.randbelow(LARGEST_DRAWN)
        return {"releases": float(count), SERIES: float(series), DRAWN: float(drawn)}

    def sent_before(self, round: int, call: int, mark: str) -> tuple[Data, Data] | None:
        """The reply that was sent to the question with this mark (a SHA-256 in hex) in this call, and the bytes of the
        site's memory that were kept with it; None: none was."""
        path = self._path(round, call)
        if not path.exists():
            return None
        data = read_whole(path)
        if bytes(data[:32]) != bytes.fromhex(mark):
            return None
        if data[32:40] == wire.MAGIC:  # an older version kept the reply alone
            return data[32:], b""
        end = 40 + int.from_bytes(data[32:40], "little")
        return data[40:end], data[end:]

    def keep(self, round: int, call: int, mark: str, reply: Data, memory: Data) -> None:
        """Keeps a reply for `sent_before`, and those that were written last before it, of whatever rounds: a run that
        is begun anew counts its rounds from 1 again. memory: the site's, as the call left it, which the reply names; it
        is kept beside it since the site may have forgotten it when the reply is sent again."""
        path = self._path(round, call)
        write_atomic(path, b"".join((bytes.fromhex(mark), len(reply).to_bytes(8, "little"), reply, memory)))
        _make_newest(path)
        others = [other for other in path.parent.glob("*.fa") if other != path]
        oldest_first = sorted(others, key=lambda other: (other.stat().st_mtime_ns, other.name))
        for old in oldest_first[: 1 - KEPT_REPLIES]:
            old.unlink()

    def _path(self, round: int, call: int) -> Path:
        return self.folder / "sent" / f"{round:06d}-{call:03d}.fa"


SERIES = "series"
"""The key of a log with the number that a site drew when it began to count its releases."""

DRAWN = "drawn"
"""The key of a log with a number that a site draws with each release: the very answer of then has the same."""

LARGEST_DRAWN = 2**53
"""Numbers that are drawn by chance are below it: a float holds them."""

RETRIES = 10_000
"""The most releases that a site is believed for each call so far: a question may be asked again until patience is over."""


def problem_of_releases(log: Mapping[str, Any], round: int, call: int) -> str | None:
    """At the server: what is wrong with the numbers that a site logs with a private answer to a call, of a round, both as
    `Question` counts them; None: nothing. An answer that an older version kept has no number that was drawn for it."""
    count, series, most = log.get("releases"), log.get(SERIES), RETRIES * (round + 1) * (call + 1)
    allowed = "under privacy it logs the number of its releases, their series and a number drawn for this one, and nothing else"
    numbers = (count, 1, math.inf), (series, 0, LARGEST_DRAWN), (log.get(DRAWN, 0.0), 0, LARGEST_DRAWN)
    for number, least, below in numbers:
        if type(number) is not float or not number.is_integer() or not least <= number < below:
            return allowed
    if set(log) - {DRAWN} != {"releases", SERIES}:
        return allowed
    return (
        f"{allowed}; it logs {count:g}, and believed are at most {most:,}" if count and count > most else None
    )


# ---------------------------------------------------------------------------------------------------------- secure sums
#
# A call whose answers are summed under masks becomes four, of which the third is the method's own (see `secure`):
#
#     secure_advertise    a site's public keys
#     secure_share        shares of its secrets, sealed for every site that advertised
#     the function        the masked model, {"masked": vector}
#     secure_reveal       what lifts the masks that are left in the sum

STEPS = {"secure_advertise": "public", "secure_share": "shares", "secure_reveal": "revealed"}
"""The steps beside the masked answer: function -> kind of what it answers."""

LIFTS_MASKS = "secure_reveal"
"""The one of `STEPS` without which nobody sees a sum."""

FOR_STAGES = "_exchange"
"""The key of a payload that is for this module and not for the method's function."""


def secure_sum(
    ask: Callable[[str, Sequence[str], Payload], Replies],
    function: str,
    sites: Sequence[str],
    payload: Payload,
    choice: Secure,
    *,
    of: int,
    context: str,
) -> tuple[Tensors, int]:
    """At the server: the weighted mean of the models that sites answer, and the sum of their weights.

    ask: asks sites for an answer each, and gives those that can be used. of: K, all sites of the federation.
    context: names this attempt, and no other. Raises SiteLost where too few sites are left.
    """

    def step(name: str, asked: Sequence[str], arguments: dict[str, Any]) -> dict[str, Any]:
        given = {"context": context} | arguments
        replies = ask(name, asked, Payload(given, given))
        return {site: value["answer"] for site, value in replies}

    threshold = secure.threshold_of(choice, of)
    publics = step("secure_advertise", sites, {})
    secure.require_enough(len(publics), threshold, "advertised their keys")
    sealed = step("secure_share", sorted(publics), {"publics": publics})
    group = sorted(sealed)
    shares = {site: {peer: sealed[peer][site] for peer in group} for site in group}
    further = {site: {FOR_STAGES: {"context": context, "ciphertexts": shares[site]}} for site in group}
    masked = ask(function, group, payload.with_own(further))
    survivors = masked.sites
    dropped = [site for site in group if site not in survivors]
    reveals = step(LIFTS_MASKS, survivors, {"survivors": survivors, "dropped": dropped})
    total = secure.unmask(
        secure.ring_sum(masked.each("masked")),
        reveals,
        publics,
        survivors=survivors,
        dropped=dropped,
        threshold=threshold,
        context=context,
    )
    return secure.unpack(total, payload.held["model"], choice, sites=of)


@dataclass
class SumMember:
    """A site's end of secure sums. folder: keeps its secret of the present sum, written before an answer leaves.

    weighted: whether its model counts by its cases; sites: K.
    """

    site: str
    choice: Secure
    weighted: bool
    sites: int
    folder: Path

    def step(self, function: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one of `STEPS`."""
        context = str(arguments["context"])
        if function == "secure_advertise":
            for old in self.folder.glob("secret-*.fa"):
                old.unlink()
            secret, public = secure.advertise(self.site, context)
            write_atomic(self._path(context), wire.encode({"secret": secret}), secret=True)
            return {"answer": public}
        path, kept = self._kept(context)
        if function == "secure_share":
            threshold = secure.threshold_of(self.choice, self.sites)
            answer: Any = secure.share(kept["secret"], arguments["publics"], threshold=threshold)
        else:
            answer = secure.reveal(kept["secret"], arguments["survivors"], arguments["dropped"])
        write_atomic(path, wire.encode(kept), secret=True)
        return {"answer": answer}

    def masked(self, model: Tensors, n: int, for_stages: Any) -> dict[str, Tensor]:
        """What is sent in the place of an answer: its model, in fixed point under masks.

        n: the site's training cases. for_stages: what came under `FOR_STAGES` with the question. Raises SecureError
        where nothing came: the server wants the model in the open.
        """
        if not isinstance(for_stages, dict):
            raise secure.SecureError(
                f"site {self.site}: asked for its model in the open; it is sent masked only"
            )
        vector = secure.pack(model, n if self.weighted else 1, self.choice, sites=self.sites)
        path, kept = self._kept(str(for_stages["context"]))
        answer = secure.mask(kept["secret"], for_stages["ciphertexts"], vector)
        write_atomic(path, wire.encode(kept), secret=True)
        return {"masked": answer}

    def _path(self, context: str) -> Path:
        return self.folder / f"secret-{_name_of(context.encode())[:16]}.fa"

    def _kept(self, context: str) -> tuple[Path, dict[str, Any]]:
        """Where the secret of a sum is kept, and the file's content."""
        path = self._path(context)
        try:
            kept: Any = wire.decode(read_whole(path))
        except OSError:
            raise secure.SecureError(
                f"site {self.site}: it holds no keys for this aggregation; it was begun elsewhere, or has ended"
            ) from None
        return path, kept
