"""What happens to a model between a method and the wire: compression, privacy, secure aggregation.

The same two halves on every engine, because an engine sees opaque bytes only. With all of it off, a model travels
as it is. In this order at a site: the update is clipped and gets its noise (`privacy`), then it is masked for the sum
(`secure`), or compressed as a difference to the model that the site received (`comm`). The method knows of none of it.

A model on its way is a dict with one of these keys in the place of the tensors' names:

    {"difference": …}                         from a site: `compression.compress` of what it changed
    {"held": id}                              to a site: the model it holds under that name
    {"held": id, "difference": …, "as": id}   to a site: a change of that model, and the new one's name
    {"whole": tensors, "as": id}              to a site: a model to hold

Shapes: K sites.
"""

import dataclasses
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from fedatlas.core.contract import Method, sends_of
from fedatlas.core.errors import FedAtlasError, FederationError, WireError
from fedatlas.core.tensors import Tensors, Tree
from fedatlas.transport import wire
from fedatlas.transport.protection import compression, privacy, secure
from fedatlas.transport.protection.compression import Comm
from fedatlas.transport.protection.privacy import Privacy
from fedatlas.transport.protection.secure import Secure
from fedatlas.transport.store import read_whole, write_atomic
from fedatlas.transport.wire import Data

PLAIN_ANSWER = {"model": "model", "n": "cases"}
EXTRA = "_exchange"
"""The key of a payload that is for this module and not for the method's function."""

BUILT_IN = {"secure_advertise": "public", "secure_share": "shares", "secure_reveal": "revealed"}
"""The steps of secure aggregation beside the masked answer: function -> kind of what it answers."""

RESIDUAL = "exchange.residual"
"""The key of a site's memory with what compression has left out so far."""


class NotHeld(FedAtlasError):
    """A site does not hold the model that it was sent a change of; it must be sent whole."""


@dataclass(frozen=True)
class Terms:
    """What a federation file says about its exchange. sites: K; weights: how a sum of models weighs them, None if
    the method needs each by itself; sending: the functions that answer with a model."""

    comm: Comm = dataclasses.field(default_factory=lambda: Comm())  # type: ignore[call-arg]
    privacy: Privacy | None = None
    secure: Secure | None = None
    sites: int = 1
    weights: str | None = None
    sending: frozenset[str] = frozenset()


def terms_of(
    method: Method, name: str, comm: Comm, private: Privacy | None, summed: Secure | None, sites: int
) -> Terms:
    """Raises FederationError where the method, or the rest of the file, does not go with what is asked."""
    weights: str | None = method.summed
    sends = sends_of(method)
    sending = frozenset(function for function, keys in sends.items() if "model" in keys.values())
    if private or summed:
        asked = "privacy" if private else "secure aggregation"
        if method.pooled:
            raise FederationError(
                f"method {name} trains on the union of all data; {asked} has no site to protect"
            )
        for function in sorted(sends):
            if sends[function] != PLAIN_ANSWER:
                other = ", ".join(key for key in sends[function] if key not in PLAIN_ANSWER)
                raise FederationError(
                    f"{asked}: method {name} answers {function} with {other or 'several models'} beside one model "
                    "and the number of cases, and that would not be protected; choose a method that averages models"
                )
    if comm.up != "none" and not sending:
        raise FederationError(
            f"comm.up is {comm.up}: method {name} answers with changes in a form of its own, which is not compressed "
            "again; use none"
        )
    if summed:
        if weights is None:
            raise FederationError(
                f"secure aggregation: method {name} needs the model of every site by itself, and secure aggregation "
                "shows the server their weighted sum only; choose a method that averages models"
            )
        if comm.up != "none":
            raise FederationError(
                f"comm.up is {comm.up}: what is masked for secure aggregation cannot be compressed; use none"
            )
        secure.threshold_of(summed, sites)
    if private:
        privacy.check(private, secure=summed is not None, equal_weights=weights == "equal")
    return Terms(comm, private, summed, sites, weights, sending)


def _name_of(data: Data) -> str:
    return hashlib.sha256(data).hexdigest()


def _places(payload: Mapping[str, Any]) -> dict[str, Any] | None:
    """The dict under whose key "model" a payload carries the model that all get: the payload, or its only member
    to evaluate on the federation's grid. What is scored on the files' own grid is sent exactly."""
    if isinstance(payload.get("model"), dict):
        return payload  # type: ignore[return-value]
    members = payload.get("members")
    if isinstance(members, list) and len(members) == 1 and payload.get("grid") == "federation":
        return members[0]
    return None


# ---------------------------------------------------------------------------------------------------------- a site


class SiteExchange:
    """The site's half. folder: the site's private folder, which keeps all state across restarts."""

    def __init__(self, terms: Terms, name: str, folder: Path) -> None:
        self.terms, self.name, self.folder = terms, name, folder / "exchange"

    def receive(self, payload: dict[str, Any]) -> dict[str, Any]:
        """The payload with its model as tensors. Raises NotHeld where the site lacks what it is a change of."""
        place = _places(payload)
        if place is None or self.terms.comm.down == "none":
            return payload
        sent = place["model"]
        if "whole" in sent:
            model = sent["whole"]
            self._hold(sent["as"], model)
        elif "held" in sent:
            model = self._held(sent["held"])
            if "difference" in sent:
                model = compression.apply(model, compression.restore(sent["difference"], model))
                self._hold(sent["as"], model)
        else:
            return payload
        place["model"] = model
        return payload

    def _hold(self, name: str, model: Tensors) -> None:
        data = wire.encode(model)  # type: ignore[arg-type]
        if _name_of(data) != name:
            raise NotHeld(f"site {self.name}: the model it was sent does not come out as the server's")
        write_atomic(self.folder / "held" / f"{name}.fa", data)
        files = sorted((self.folder / "held").glob("*.fa"), key=lambda path: path.stat().st_mtime_ns)
        for old in files[:-2]:
            old.unlink()

    def _held(self, name: str) -> Tensors:
        try:
            return wire.decode(read_whole(self.folder / "held" / f"{name}.fa"), copy=False)  # type: ignore[return-value]
        except (OSError, FedAtlasError):
            raise NotHeld(f"site {self.name}: does not hold the model {name[:8]}") from None

    def send(
        self,
        function: str,
        value: dict[str, Any],
        received: Tensors | None,
        memory: dict[str, Tree],
        extra: Any,
    ) -> dict[str, Any]:
        """What is sent in the place of a method's answer. received: the model that the site was sent."""
        terms = self.terms
        if function not in terms.sending:
            return value
        if received is None and (terms.privacy or terms.secure):
            raise FederationError(
                f"privacy and secure aggregation protect a change of a model; {function} was sent none to change"
            )
        model: Tensors = value["model"]
        if terms.privacy:
            assert received is not None
            change = privacy.difference(model, received)
            change, norm = privacy.privatise(change, terms.privacy, sites=terms.sites)
            model = privacy.apply(received, change)
            with (self._made() / "norms.txt").open("a") as file:  # for people at the site; it never leaves
                file.write(f"{function} norm before clipping {norm:.6g}\n")
        if terms.secure:
            if not isinstance(extra, dict):
                raise secure.SecureError(
                    f"site {self.name}: asked for its model in the open; it is sent masked only"
                )
            return {"masked": self._masked(model, value["n"], extra)}
        if terms.comm.up != "none" and received is not None:
            difference = compression.difference(model, received)
            before: Any = memory.get(RESIDUAL) if terms.comm.feedback else None
            packed, residual = compression.with_feedback(
                difference, before, terms.comm.up, fraction=terms.comm.fraction
            )
            if terms.comm.feedback:
                memory[RESIDUAL] = residual  # type: ignore[assignment]
            return value | {"model": {"difference": packed}}
        return value | {"model": model}

    def _made(self) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder

    def _masked(self, model: Tensors, n: int, extra: Mapping[str, Any]) -> Tensor:
        assert self.terms.secure is not None
        weight = n if self.terms.weights == "cases" else 1
        vector = secure.pack(model, weight, self.terms.secure, sites=self.terms.sites)
        path, kept = self._secret(str(extra["context"]))
        masked = secure.mask(kept["secret"], extra["ciphertexts"], vector)
        write_atomic(path, wire.encode(kept))
        return masked

    def built_in(self, function: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """A step of secure aggregation. What it leaves behind is on disk before it is answered."""
        if self.terms.secure is None:
            raise secure.SecureError(f"site {self.name}: secure aggregation is not part of this federation")
        context = str(payload["context"])
        if function == "secure_advertise":
            for old in self.folder.glob("secret-*.fa"):
                old.unlink()
            secret, public = secure.advertise(self.name, context)
            write_atomic(self._path(context), wire.encode({"secret": secret}))
            return {"answer": public}
        path, kept = self._secret(context)
        if function == "secure_share":
            threshold = secure.threshold_of(self.terms.secure, self.terms.sites)
            answer: Any = secure.share(kept["secret"], payload["publics"], threshold=threshold)
        else:
            answer = secure.reveal(kept["secret"], payload["survivors"], payload["dropped"])
        write_atomic(path, wire.encode(kept))
        return {"answer": answer}

    def _path(self, context: str) -> Path:
        return self.folder / f"secret-{_name_of(context.encode())[:16]}.fa"

    def _secret(self, context: str) -> tuple[Path, dict[str, Any]]:
        path = self._path(context)
        try:
            kept: Any = wire.decode(read_whole(path))
        except OSError:
            raise secure.SecureError(
                f"site {self.name}: it holds no keys for this aggregation; it was begun elsewhere, or has ended"
            ) from None
        return path, kept

    # A question that is asked again gets the very same answer where a second one would tell more than the first.

    def replayed(self, function: str, round: int, call: int, question: str) -> Data | None:
        """The reply that was sent to this very question before; None if a new one is to be made."""
        if not self.terms.privacy or function not in self.terms.sending:
            return None
        path = self._sent(round, call)
        if not path.exists():
            return None
        data = read_whole(path)
        return data[32:] if bytes(data[:32]) == bytes.fromhex(question) else None

    def remember(self, function: str, round: int, call: int, question: str, reply: Data) -> None:
        """Keeps a reply for `replayed`, and counts it as a release."""
        if not self.terms.privacy or function not in self.terms.sending:
            return
        write_atomic(self._sent(round, call), bytes.fromhex(question) + reply)
        for old in sorted((self.folder / "sent").glob("*.fa"))[:-4]:
            old.unlink()

    def releases(self, *, more: int = 0) -> int:
        """How many private updates left this site in this run; `more`: are about to."""
        path = self._made() / "releases.txt"
        count = (int(path.read_text()) if path.exists() else 0) + more
        if more:
            write_atomic(path, str(count).encode())
        return count

    def _sent(self, round: int, call: int) -> Path:
        return self.folder / "sent" / f"{round:06d}-{call:03d}.fa"


# -------------------------------------------------------------------------------------------------------- the server


@dataclass
class ServerExchange:
    """The server's half. held: the model that sites hold, and its name, where what the server sends is compressed."""

    terms: Terms = field(default_factory=Terms)
    held: Tensors | None = None
    name: str = ""
    source: str = ""
    """The name of the exact model that `held` stands for."""

    def pack(self, payload: dict[str, Any]) -> tuple[dict[str, Any], Tensors | None]:
        """The wire payload for all sites, and the model that they will reconstruct from it."""
        place = _places(payload)
        if place is None:
            return payload, None
        model: Tensors = place["model"]
        if self.terms.comm.down == "none":
            return payload, model
        source = _name_of(wire.encode(model))  # type: ignore[arg-type]
        if self.held is None or list(self.held) != list(model):
            self._hold(model, source)
            sent: dict[str, Any] = {"whole": model, "as": self.name}
        elif source == self.source:
            sent = {"held": self.name}
        else:
            before = self.name
            difference = compression.compress(
                compression.difference(model, self.held),
                self.terms.comm.down,
                fraction=self.terms.comm.fraction,
            )
            self._hold(compression.apply(self.held, compression.restore(difference, self.held)), source)
            sent = {"held": before, "difference": difference, "as": self.name}
        assert self.held is not None
        return _with(payload, sent), self.held

    def holds(self, payload: dict[str, Any]) -> bool:
        """Was the model of this payload sent as one that sites hold?"""
        return self.held is not None and self.terms.comm.down != "none" and _places(payload) is not None

    def whole(self, payload: dict[str, Any]) -> dict[str, Any]:
        """The payload for a site that does not hold what the others do."""
        return _with(payload, {"whole": self.held, "as": self.name})

    def _hold(self, model: Tensors, source: str) -> None:
        self.held = {name: tensor.clone() for name, tensor in model.items()}
        self.name, self.source = _name_of(wire.encode(self.held)), source  # type: ignore[arg-type]

    def expand(self, value: dict[str, Any], sent: Tensors | None) -> bool:
        """Puts the tensors of a compressed model in its place, in an answer; False if there was none.

        sent: the model that the site received. Raises WireError or NameMismatch for what is not usable.
        """
        model = value.get("model")
        if not (isinstance(model, dict) and set(model) == {"difference"}) or sent is None:
            return False
        packed = model["difference"]
        if not isinstance(packed, dict) or packed.get("kind") != self.terms.comm.up:
            raise WireError(f"its model is not compressed by {self.terms.comm.up}, as was agreed")
        value["model"] = compression.apply(sent, compression.restore(packed, sent))
        return True

    def kinds(self, function: str, kinds: Mapping[str, str], payload: Mapping[str, Any]) -> dict[str, str]:
        """The kinds of what a site sends in the place of an answer of these kinds, see `egress.problem_of`."""
        if self.terms.secure and function in BUILT_IN:
            return {"answer": BUILT_IN[function]}
        if function not in self.terms.sending:
            return dict(kinds)
        if self.masks(function):
            return {"masked": "masked"}
        if self.terms.comm.up != "none" and isinstance(payload.get("model"), dict):
            return dict(kinds) | {"model": "compressed"}
        return dict(kinds)

    def problem_of_log(self, function: str, log: Mapping[str, Any]) -> str | None:
        """What is wrong with the numbers that come with an answer, as far as they are of privacy."""
        if self.terms.privacy is None or function not in self.terms.sending:
            return "it counts releases, which are of privacy" if "releases" in log else None
        count = log.get("releases")
        if set(log) == {"releases"} and type(count) is float and count.is_integer() and 1 <= count < 1 << 31:
            return None
        return "under privacy it logs the number of its releases, and nothing else"

    def masks(self, function: str) -> bool:
        """Is the answer to this function summed under masks?"""
        return self.terms.secure is not None and function in self.terms.sending

    def epsilon(self, releases: Sequence[int], answered: int) -> float | None:
        """ε so far, of the site with most releases; None without privacy."""
        private = self.terms.privacy
        if private is None or not releases:
            return None
        noise = privacy.noise_left(private, sites=self.terms.sites, left=min(answered, self.terms.sites))
        return privacy.epsilon(noise, max(releases), private.delta)


def _with(payload: dict[str, Any], sent: dict[str, Any]) -> dict[str, Any]:
    """The payload with its model in another form; the one given is not changed."""
    if isinstance(payload.get("model"), dict):
        return payload | {"model": sent}
    return payload | {"members": [payload["members"][0] | {"model": sent}]}


def new_context(run: str, round: int, call: int) -> str:
    """Names one attempt at one secure sum; no other has this name."""
    return f"{run}/{round}/{call}/{secrets.token_hex(8)}"
