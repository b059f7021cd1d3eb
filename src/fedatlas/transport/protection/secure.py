"""Secure aggregation: the server learns the weighted sum of the sites' models, and no single model.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth. Practical secure aggregation for
privacy-preserving machine learning. CCS 2017, the protocol of figure 4 against a server that keeps to it.

Every pair of sites agrees on a mask that one adds and the other subtracts, and every site adds a mask of its own.
Of a site that is lost, the others reveal the key of its pairwise masks; of a site that answered, the seed of its
own mask; never both. One aggregation takes four calls:

    advertise                 at each site    two fresh public keys, and a digest of the seed of its own mask
    share                     at each site    shares of its key and its seed, sealed for every site
    pack, mask                at each site    the masked vector
    reveal                    at each site    what lifts the masks that are left in the sum
    ring_sum, unmask, unpack  at the server   the weighted mean

What `advertise` calls the secret is kept in the site's folder. `share`, `mask` and `reveal` write into it what they
have answered: it is stored before their answer is sent. Asked again the same question they give the same answer; any
other question is refused, for two answers together would lift a mask. With `reveal` the site's keys, its seed and the
shares of the others go: its answer alone is kept, until the next aggregation.

What holds. A server that keeps to the protocol, even one that shares all it sees with c sites, learns the sum over
the sites that are left, less the c, if at least two others are left and threshold > (K + c) / 2. The sum itself is
not protected (see `fedatlas.transport.protection.privacy`), nor what two sums of different sites differ by. A server that exchanges
public keys for its own is not held back: the keys are as authentic as what carried them, which is the server.

Primitives: X25519, HKDF-SHA256, ChaCha20 and ChaCha20-Poly1305 of `cryptography`, Shamir's scheme over GF(2^128) of
`pycryptodome`. All randomness is the operating system's.

Cost per site: K masks of 8 bytes an entry, made in pieces of 256 KB; measured on one core, 0.2 s for a mask of
84 million entries (0.7 GB). The server makes one mask for each site that is left and, for each lost site, one more for
each site that is left. A vector takes twice the bytes of a float32 model on the wire.

Shapes: K sites, N entries of the floating tensors of a model.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedatlas.core.errors import FedAtlasError, FederationError, SiteLost
from fedatlas.core.options import option, options
from fedatlas.core.tensors import Tensors, Tree

MAX_WEIGHT = 2**31 - 1
"""The largest weight of one site."""

_RANGE = 2**62
"""The sum of all sites stays within it, so that int64 cannot overflow."""
_PIECE = 1 << 18
_LABEL = b"fedatlas secure aggregation 1"


class SecureError(FedAtlasError):
    """A step of secure aggregation is refused: its answer would not be safe, or not be right."""


@options
class Secure:
    """Secure aggregation of the sites' models."""

    bits: int = option(24, "Binary digits after the point of what is summed.", ge=0, le=48)
    threshold: int | None = option(
        None, "Sites that must be left for a sum to be made; more than half, which is the default.", ge=2
    )


def threshold_of(choice: Secure, sites: int) -> int:
    """The sites that must be left out of `sites`: the smallest number above half, unless one is given.

    With half or fewer, a server could tell one half that a site was lost and the other that it was not, and
    learn its key from one and its seed from the other. Where c sites may side with the server, more than
    (sites + c) / 2 are needed.

    Raises FederationError if the number that is given is not above half of the sites, or above all of them.
    """
    if sites < 2:
        raise FederationError(
            f"secure aggregation: {sites} site; a sum hides nothing unless it has at least 2"
        )
    least = sites // 2 + 1
    threshold = choice.threshold or least
    if not least <= threshold <= sites:
        raise FederationError(
            f"secure aggregation: threshold is {threshold} for {sites} sites; allowed: {least} to {sites}"
        )
    return threshold


# ---------------------------------------------------------------------------------------------- fixed point


def pack(model: Mapping[str, Tensor], weight: int, choice: Secure, *, sites: int) -> Tensor:
    """The weighted model in fixed point: int64 [1 + N], the weight, then round(weight · value · 2^bits).

    Floating tensors in the order of the model; integer and boolean ones are left out, see `unpack`. The mean that
    `unpack` makes of the sum of K vectors is off by at most K · 2^-(bits + 1) / (sum of the weights) before it is
    rounded to the tensor's dtype: every entry of a site is rounded once, by at most 1/2. (A float64 tensor is
    multiplied by its weight in float64 first.)

    sites: K, all that may take part; every entry must be within 2^62 / K, which excludes overflow.

    Raises FederationError, naming the tensor, for a value that is not finite or out of that range, and for a
    weight that is not an integer from 0 to MAX_WEIGHT.
    """
    if isinstance(weight, bool) or not isinstance(weight, int) or not 0 <= weight <= MAX_WEIGHT:
        raise FederationError(
            f"secure aggregation: the weight is {weight!r}; allowed: integers from 0 to {MAX_WEIGHT}"
        )
    floating = {name: tensor for name, tensor in model.items() if tensor.is_floating_point()}
    vector = torch.empty(1 + sum(tensor.numel() for tensor in floating.values()), dtype=torch.int64)
    vector[0] = weight
    begin = 1
    for name, tensor in floating.items():
        scaled = tensor.detach().to("cpu", torch.float64, copy=True).reshape(-1)
        scaled.mul_(weight).mul_(2.0**choice.bits).round_()
        low, high = (float(end) for end in scaled.aminmax()) if len(scaled) else (0.0, 0.0)
        if not max(-low, high) <= _RANGE // sites:  # also false for NaN
            raise FederationError(
                f"secure aggregation: {name} holds values from {low / 2.0**choice.bits:.3g} to"
                f" {high / 2.0**choice.bits:.3g} after its weight {weight}; allowed with {choice.bits} bits and"
                f" {sites} sites: finite, at most {_RANGE / sites / 2.0**choice.bits:.3g}. Lower bits, or find"
                " why the model grew"
            )
        vector[begin : begin + len(scaled)] = scaled
        begin += len(scaled)
    return vector


def unpack(total: Tensor, like: Mapping[str, Tensor], choice: Secure, *, sites: int) -> tuple[Tensors, int]:
    """The weighted mean from the sum of at most `sites` packed vectors, and the sum of their weights.

    like: the model that the sites were sent. Its integer and boolean tensors (counters) are kept as they are:
    a sum does not give the largest, and a counter tells how many steps a site took.

    Raises SecureError if the length differs or the weights cannot be right, as after a wrong unmasking;
    FederationError if they sum to zero.
    """
    length = 1 + sum(tensor.numel() for tensor in like.values() if tensor.is_floating_point())
    vector = _vector(total, "the sum")
    if len(vector) != length:
        raise SecureError(f"secure aggregation: the sum has {len(vector)} entries, the model needs {length}")
    weight = int(vector[0])
    if not 0 <= weight <= sites * MAX_WEIGHT:
        raise SecureError(
            f"secure aggregation: the weights sum to {weight}, which {sites} sites cannot give; masks are left"
            " in the sum, because the sites did not all use the same keys"
        )
    if weight == 0:
        raise FederationError(
            "secure aggregation: the weights of all sites sum to zero; at least one must be positive"
        )
    mean: Tensors = {}
    begin = 1
    for name, tensor in like.items():
        if not tensor.is_floating_point():
            mean[name] = tensor.clone()
            continue
        entries = total[begin : begin + tensor.numel()].double().div_(2.0**choice.bits).div_(weight)
        mean[name] = entries.reshape(tensor.shape).to(tensor.dtype)
        begin += tensor.numel()
    return mean, weight


# ------------------------------------------------------------------------------------------------- at a site


def advertise(site: str, context: str) -> tuple[dict[str, Tree], dict[str, Tree]]:
    """(secret, public) of one site for one aggregation. The secret stays at the site.

    context: what this aggregation is, as run, round and number of the call; the same at all sites. A masked vector
    or a share of another context is of no use in this one.
    """
    require_libraries()
    keys = {"seal": os.urandom(32), "mask": os.urandom(32)}
    seed = os.urandom(32)
    secret: dict[str, Tree] = {"site": site, "context": context, "seed": _tensor(seed)}
    secret |= {name: _tensor(key) for name, key in keys.items()}
    public: dict[str, Tree] = {name: _tensor(_public(key)) for name, key in keys.items()}
    return secret, public | {"digest": _tensor(_digest(seed))}


def share(
    secret: dict[str, Tree], publics: Mapping[str, Tree], *, threshold: int, least: int = 2
) -> dict[str, Tree]:
    """{site: ciphertext}: the shares of this site's key and seed, sealed for each site, itself included.

    publics: what all K sites advertised, this one's included; their names are fixed from here on.
    threshold: of the K shares, how many restore a secret; see `threshold_of`.
    least: the fewest sites that this one agrees to be summed with, itself included.

    Raises FederationError for a threshold that is not above half, or fewer sites than `least`; SecureError if
    the public values are damaged, not distinct, or not what this site advertised.
    """
    require_libraries()
    site = _text(secret, "site")
    _require("revealed" not in secret, secret, "it has revealed its shares, and its keys are gone")
    require_enough(len(publics), threshold, "advertised their keys")
    roster = _Roster(publics, threshold, _text(secret, "context"))
    if len(roster.names) < least:
        raise FederationError(
            f"secure aggregation: {len(roster.names)} sites take part, {site} agreed to at least {least}"
        )
    own = publics.get(site)
    mine = {name: _public(_bytes(secret[name], 32, name)) for name in ("seal", "mask")}
    mine["digest"] = _digest(_bytes(secret["seed"], 32, "seed"))
    if not isinstance(own, dict) or any(_bytes(own[name], 32, name) != mine[name] for name in mine):
        raise SecureError(f"secure aggregation: the public keys of {site} are not those that it advertised")
    if "sent" in secret:
        same = secret["roster"] == roster.digest.hex()
        _require(same, secret, "shares were made for other keys or another threshold")
        return dict(_dict(secret["sent"], "sent"))
    seeds = _split(_bytes(secret["seed"], 32, "seed"), threshold, len(roster.names))
    keys = _split(_bytes(secret["mask"], 32, "mask"), threshold, len(roster.names))
    sealed: dict[str, Tree] = {}
    for peer, seed, key in zip(roster.names, seeds, keys, strict=True):
        sealed[peer] = _seal(secret, roster, peer, seed + key)
    secret |= {
        "publics": dict(publics),
        "threshold": threshold,
        "roster": roster.digest.hex(),
        "sent": sealed,
    }
    return dict(sealed)


def mask(secret: dict[str, Tree], ciphertexts: Mapping[str, Tree], vector: Tensor) -> Tensor:
    """The vector with its masks, int64 [1 + N]; `vector` itself is changed and returned.

    ciphertexts: {origin: what it sealed for this site} of the sites that answered `share`, this one included; the
    same origins at every site. A site that is not among them takes no part.

    Raises SiteLost if they are fewer than the threshold; SecureError for a ciphertext that was changed or is of
    another origin, site or context, and if another vector was masked with this secret before: the
    difference of the two would be seen.
    """
    require_libraries()
    _require("revealed" not in secret, secret, "it has revealed its shares, and its keys are gone")
    site, roster = _text(secret, "site"), _roster(secret)
    numbers = _vector(vector, "the vector")
    origins = sorted(ciphertexts)
    if site not in ciphertexts or not set(origins) <= set(roster.names):
        raise SecureError(
            f"secure aggregation: shares of {', '.join(origins) or 'nobody'} for {site}; allowed: its own and"
            f" those of {', '.join(roster.names)}"
        )
    require_enough(len(origins), roster.threshold, "made shares")
    shares = {origin: _open(secret, roster, origin, ciphertexts[origin]) for origin in origins}
    question = hashlib.sha256(numbers.view(np.uint8).data)
    question.update(_join(*(origin.encode() for origin in origins)))
    if "masked" in secret:
        same = secret["masked"] == question.hexdigest()
        _require(same, secret, "a vector was masked before, and this is another")
    secret["masked"] = question.hexdigest()
    secret["shares"] = {origin: _tensor(both) for origin, both in shares.items()}
    key = _bytes(secret["mask"], 32, "mask")
    streams = [(_own_key(roster, site, _bytes(secret["seed"], 32, "seed")), True)]
    streams += [(_pair_key(roster, site, peer, key), site < peer) for peer in origins if peer != site]
    _add_masks(numbers, streams)
    return vector


def reveal(secret: dict[str, Tree], survivors: Sequence[str], dropped: Sequence[str]) -> dict[str, Tree]:
    """The shares that lift the masks: of every survivor its seed, of every dropped site its key.

    survivors: whose masked vectors are in the sum, this site among them; dropped: all others that made shares.

    What nobody may ask for any more, this site's keys and seed and what else it holds of the others, is taken out of the
    secret.

    Raises SiteLost if the survivors are fewer than the threshold; SecureError if a site is in both lists or
    in none, or if this site has answered for other lists before: it would have revealed both for one site.
    """
    require_libraries()
    site, left, lost = _text(secret, "site"), sorted(survivors), sorted(dropped)
    if "revealed" in secret:
        before = dict(_dict(secret["revealed"], "revealed"))
        same = [sorted(_dict(before[kind], kind)) for kind in ("seeds", "keys")] == [left, lost]
        _require(same, secret, "shares were revealed before, for other survivors")
        return before
    roster = _roster(secret)
    if "shares" not in secret:
        raise SecureError(f"secure aggregation: {site} is asked to reveal shares, but has masked nothing yet")
    shares = _dict(secret["shares"], "shares")
    if sorted(left + lost) != sorted(shares) or site not in left:
        raise SecureError(
            f"secure aggregation: survivors {', '.join(left) or 'none'} and dropped {', '.join(lost) or 'none'},"
            f" asked of {site}; every site of {', '.join(sorted(shares))} must be in exactly one list, and"
            f" {site} among the survivors"
        )
    require_enough(len(left), roster.threshold, "are left")
    both = {origin: _bytes(value, 64, "share") for origin, value in shares.items()}
    answer: dict[str, Tree] = {
        "seeds": {origin: _tensor(both[origin][:32]) for origin in left},
        "keys": {origin: _tensor(both[origin][32:]) for origin in lost},
    }
    kept: dict[str, Tree] = {"site": site, "context": _text(secret, "context"), "revealed": answer}
    secret.clear()
    secret.update(kept)
    return dict(answer)


# --------------------------------------------------------------------------------------------- at the server


def ring_sum(vectors: Iterable[Tensor]) -> Tensor:
    """The sum of int64 vectors modulo 2^64, read one at a time.

    Raises SecureError if they differ in length or are not int64 vectors, ValueError if there are none.
    """
    total: Tensor | None = None
    for vector in vectors:
        numbers = _vector(vector, "a masked vector")
        if total is None:
            total = vector.clone()
        elif len(total) != len(numbers):
            raise SecureError(
                f"secure aggregation: a masked vector has {len(numbers)} entries, another {len(total)}"
            )
        else:
            sums = _vector(total, "the sum")
            sums += numbers
    if total is None:
        raise ValueError("secure aggregation: no masked vector to sum")
    return total


def unmask(
    total: Tensor,
    reveals: Mapping[str, Tree],
    publics: Mapping[str, Tree],
    *,
    survivors: Sequence[str],
    dropped: Sequence[str],
    threshold: int,
    context: str,
) -> Tensor:
    """The sum of the survivors' packed vectors; `total`, the `ring_sum` of what they masked, is changed and returned.

    reveals: {site: what it answered to `reveal`}, of at least `threshold` survivors; further ones may be lost.

    Raises SiteLost if there are fewer, SecureError if what they revealed does not restore the seed or the key
    that a site advertised.
    """
    require_libraries()
    roster = _Roster(publics, threshold, context)
    left, lost = sorted(survivors), sorted(dropped)
    if len({*left, *lost}) != len(left) + len(lost) or not {*left, *lost} <= set(roster.names):
        raise SecureError(
            f"secure aggregation: survivors {left} and dropped {lost}; allowed: each site of {roster.names} at"
            " most once"
        )
    helpers = sorted(set(reveals) & set(left))
    require_enough(len(left), threshold, "are left")
    require_enough(len(helpers), threshold, "revealed their shares")
    helpers = helpers[:threshold]
    answers = {site: _dict(reveals[site], f"what {site} revealed") for site in helpers}

    def restored(kind: str, origin: str) -> bytes:
        parts = []
        for site in helpers:
            held = _dict(answers[site].get(kind), f"what {site} revealed")
            parts.append((roster.names.index(site) + 1, _bytes(held.get(origin), 32, f"the share of {site}")))
        return _combine(parts)

    streams = []
    for site in left:
        seed = restored("seeds", site)
        _require_restored(_digest(seed) == roster.value(site, "digest"), site, helpers)
        streams.append((_own_key(roster, site, seed), False))
    for site in lost:
        key = restored("keys", site)
        _require_restored(_public(key) == roster.value(site, "mask"), site, helpers)
        streams += [(_pair_key(roster, site, peer, key), site < peer) for peer in left]
    _add_masks(_vector(total, "the sum"), streams)
    return total


# ------------------------------------------------------------------------------------------------ what is shared


class _Roster:
    """Who takes part, with which public keys, threshold and context; `digest` binds all of it to every key."""

    def __init__(self, publics: Mapping[str, Tree], threshold: int, context: str) -> None:
        self.names = sorted(publics)
        threshold_of(Secure(threshold=threshold), len(self.names))
        self.threshold = threshold
        self._values = {
            site: {
                name: _bytes(
                    _dict(publics[site], f"the public keys of {site}").get(name), 32, f"{site}: {name}"
                )
                for name in ("seal", "mask", "digest")
            }
            for site in self.names
        }
        every = [value for values in self._values.values() for value in values.values()]
        if len(set(every)) < len(every):
            raise SecureError("secure aggregation: two public keys are equal; each must be fresh")
        parts = [context.encode(), str(threshold).encode()]
        for site, values in self._values.items():
            parts += [site.encode(), *values.values()]
        self.digest = hashlib.sha256(_join(*parts)).digest()

    def value(self, site: str, name: str) -> bytes:
        return self._values[site][name]


def _roster(secret: Mapping[str, Tree]) -> _Roster:
    if "sent" not in secret:
        raise SecureError(
            f"secure aggregation: {_text(secret, 'site')} has made no shares yet; call share first"
        )
    threshold = secret["threshold"]
    assert isinstance(threshold, int)
    return _Roster(_dict(secret["publics"], "publics"), threshold, _text(secret, "context"))


def _join(*parts: bytes) -> bytes:
    """Parts as one text that no other parts give."""
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def _digest(seed: bytes) -> bytes:
    return hashlib.sha256(_join(_LABEL, b"digest", seed)).digest()


def _derive(roster: _Roster, secret: bytes, *info: str) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    about = _join(_LABEL, *(part.encode() for part in info))
    return HKDF(algorithm=SHA256(), length=32, salt=roster.digest, info=about).derive(secret)


def _public(key: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(key).public_key().public_bytes_raw()


def _agree(key: bytes, public: bytes, peer: str) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    try:
        return X25519PrivateKey.from_private_bytes(key).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise SecureError(f"secure aggregation: the public key of {peer} is not usable") from None


def _pair_key(roster: _Roster, site: str, peer: str, key: bytes) -> bytes:
    """The key of the mask of two sites, from the key of one and the public key of the other."""
    return _derive(roster, _agree(key, roster.value(peer, "mask"), peer), "pair", *sorted((site, peer)))


def _own_key(roster: _Roster, site: str, seed: bytes) -> bytes:
    return _derive(roster, seed, "own", site)


def _sealing_key(secret: Mapping[str, Tree], roster: _Roster, origin: str, target: str) -> bytes:
    peer = target if _text(secret, "site") == origin else origin
    agreed = _agree(_bytes(secret["seal"], 32, "seal"), roster.value(peer, "seal"), peer)
    return _derive(roster, agreed, "seal", origin, target)


def _seal(secret: Mapping[str, Tree], roster: _Roster, target: str, plain: bytes) -> Tensor:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    origin, nonce = _text(secret, "site"), os.urandom(12)
    about = _join(roster.digest, origin.encode(), target.encode())
    cipher = ChaCha20Poly1305(_sealing_key(secret, roster, origin, target))
    return _tensor(nonce + cipher.encrypt(nonce, plain, about))


def _open(secret: Mapping[str, Tree], roster: _Roster, origin: str, ciphertext: Tree) -> bytes:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    target = _text(secret, "site")
    data = _bytes(ciphertext, 12 + 64 + 16, f"the shares of {origin} for {target}")
    about = _join(roster.digest, origin.encode(), target.encode())
    cipher = ChaCha20Poly1305(_sealing_key(secret, roster, origin, target))
    try:
        return cipher.decrypt(data[:12], data[12:], about)
    except InvalidTag:
        raise SecureError(
            f"secure aggregation: the shares of {origin} for {target} do not open; they were changed, or sealed"
            " for another site, other public keys or another context"
        ) from None


def _split(secret: bytes, threshold: int, sites: int) -> list[bytes]:
    """The shares of 32 bytes, in the order of the sites; two halves of 16 bytes, each with its own polynomial."""
    from Crypto.Protocol.SecretSharing import Shamir

    halves = [Shamir.split(threshold, sites, secret[begin : begin + 16], False) for begin in (0, 16)]
    return [first + second for (_, first), (_, second) in zip(*halves, strict=True)]


def _combine(parts: Sequence[tuple[int, bytes]]) -> bytes:
    """The secret from exactly threshold shares, each with its place, counted from 1."""
    from Crypto.Protocol.SecretSharing import Shamir

    return b"".join(
        Shamir.combine([(place, value[begin : begin + 16]) for place, value in parts], False)
        for begin in (0, 16)
    )


def _add_masks(vector: np.ndarray, streams: Sequence[tuple[bytes, bool]]) -> None:
    """Adds (or else subtracts) the ChaCha20 stream of each key, in place, modulo 2^64."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    # each key makes one stream, so the nonce may be constant
    sources = [
        (Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor(), positive) for key, positive in streams
    ]
    zeros = memoryview(bytes(_PIECE))
    piece = np.empty(_PIECE // 8, dtype="<u8")
    raw = piece.data.cast("B")
    for begin in range(0, len(vector), len(piece)):
        part = vector[begin : begin + len(piece)]
        for source, positive in sources:
            source.update_into(zeros[: 8 * len(part)], raw)
            if positive:
                part += piece[: len(part)]
            else:
                part -= piece[: len(part)]


# ----------------------------------------------------------------------------------------------------- checks


def require_libraries() -> None:
    """FederationError where a package of secure aggregation is missing."""
    try:
        import Crypto.Protocol.SecretSharing  # noqa: F401
        import cryptography.hazmat.primitives  # noqa: F401
    except ImportError:
        raise FederationError('secure aggregation needs pip install "fedatlas[secure]"') from None


def require_enough(count: int, threshold: int, what: str) -> None:
    """SiteLost where fewer sites did something than the sum needs."""
    if count < threshold:
        raise SiteLost(
            f"secure aggregation: {count} {'site' if count == 1 else 'sites'} {what}, {threshold} are needed; nothing can be summed without the"
            " others. Call them again, or start the round anew"
        )


def _require(right: bool, secret: Mapping[str, Tree], problem: str) -> None:
    if not right:
        raise SecureError(
            f"secure aggregation: {_text(secret, 'site')} refuses to answer: {problem}. Start a new aggregation"
        )


def _require_restored(right: bool, site: str, helpers: Sequence[str]) -> None:
    if not right:
        raise SecureError(
            f"secure aggregation: the shares that {', '.join(helpers)} revealed of {site} do not restore what it"
            " advertised; one of them is wrong, or they are of another aggregation"
        )


def _vector(tensor: Tree, what: str) -> np.ndarray:
    """An int64 vector as unsigned numbers that share its memory."""
    if (
        not isinstance(tensor, Tensor)
        or tensor.dtype != torch.int64
        or tensor.dim() != 1
        or not tensor.is_contiguous()
        or len(tensor) == 0
    ):
        got = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise SecureError(
            f"secure aggregation: {what} is {got}; allowed: a dense int64 vector with at least one entry"
        )
    return tensor.detach().numpy().view(np.uint64)


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes(value: Tree, length: int, what: str) -> bytes:
    if not isinstance(value, Tensor) or value.dtype != torch.uint8 or tuple(value.shape) != (length,):
        raise SecureError(f"secure aggregation: {what}: expected {length} bytes, as a uint8 tensor")
    return value.numpy().tobytes()


def _dict(value: Tree, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SecureError(f"secure aggregation: {what}: expected a dict, got {type(value).__name__}")
    return value


def _text(secret: Mapping[str, Tree], name: str) -> str:
    value = secret[name]
    assert isinstance(value, str)
    return value
