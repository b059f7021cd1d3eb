"""secure.py: the sum is exact, survives lost sites, and shows nothing of one site."""

import copy
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedatlas.core.errors import FederationError, SiteLost
from fedatlas.transport import wire
from fedatlas.transport.protection import secure
from fedatlas.transport.protection.secure import (
    Secure,
    SecureError,
    advertise,
    mask,
    pack,
    reveal,
    ring_sum,
    share,
    unmask,
    unpack,
)

pytest.importorskip("cryptography")
pytest.importorskip("Crypto")

CONTEXT = "run 7, round 2, call 0"


def model(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(40, 30, generator=rng) * scale,
        "count": torch.tensor(seed),
        "h": torch.randn(7, generator=rng).bfloat16(),
        "d": torch.randn(5, generator=rng).double(),
    }


def sent(tree: Any) -> Any:
    """What arrives when a tree is sent."""
    return wire.decode(wire.encode(tree))


class Party:
    """K sites and what the server holds of them, call by call."""

    def __init__(self, count: int, choice: Secure | None = None, context: str = CONTEXT) -> None:
        self.choice = choice or Secure()
        self.sites = [f"site-{i}" for i in range(count)]
        self.threshold = secure.threshold_of(self.choice, count)
        both = {site: advertise(site, context) for site in self.sites}
        self.secrets = {site: sent(secret) for site, (secret, _) in both.items()}
        self.publics = {site: sent(public) for site, (_, public) in both.items()}
        self.context = context
        self.vectors = {
            site: pack(model(i), 3 * i + 1, self.choice, sites=count) for i, site in enumerate(self.sites)
        }

    def share(self, lost: Iterable[str] = ()) -> "Party":
        """`lost`: who does not answer."""
        self.sharing = [site for site in self.sites if site not in lost]
        ciphertexts = {
            site: sent(share(self.secrets[site], self.publics, threshold=self.threshold))
            for site in self.sharing
        }
        self.secrets = sent(self.secrets)
        self.inbox = {
            site: {origin: ciphertexts[origin][site] for origin in self.sharing} for site in self.sharing
        }
        return self

    def mask(self, lost: Iterable[str] = ()) -> "Party":
        self.survivors = [site for site in self.sharing if site not in lost]
        self.dropped = [site for site in self.sharing if site in lost]
        # a site that is lost after it has masked does not differ, for the others, from one lost before
        every = {
            site: mask(self.secrets[site], self.inbox[site], self.vectors[site].clone())
            for site in self.sharing
        }
        self.secrets = sent(self.secrets)
        self.masked = {site: sent(every[site]) for site in self.survivors}
        return self

    def reveal(self, lost: Iterable[str] = ()) -> "Party":
        self.reveals = {
            site: sent(reveal(self.secrets[site], self.survivors, self.dropped))
            for site in self.survivors
            if site not in lost
        }
        return self

    def sum(self) -> Tensor:
        return unmask(
            ring_sum(self.masked.values()),
            self.reveals,
            self.publics,
            survivors=self.survivors,
            dropped=self.dropped,
            threshold=self.threshold,
            context=self.context,
        )

    def plain(self, sites: Iterable[str]) -> Tensor:
        return torch.stack([self.vectors[site] for site in sites]).sum(0)


# ------------------------------------------------------------------------------------------------- the sum


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_the_sum_is_the_plain_sum_of_the_packed_vectors(count: int) -> None:
    party = Party(count).share().mask().reveal()
    assert torch.equal(party.sum(), party.plain(party.sites))


@pytest.mark.parametrize(
    ("at_share", "at_mask", "at_reveal"),
    [
        ((), ("site-0",), ()),
        ((), ("site-4",), ()),
        ((), ("site-1", "site-3"), ()),
        (("site-2",), (), ()),
        ((), (), ("site-0", "site-3")),
        (("site-0",), ("site-2",), ()),
        (("site-4",), (), ("site-1",)),
        ((), ("site-2",), ("site-3",)),
    ],
)
def test_lost_sites_are_left_out_of_the_sum(at_share, at_mask, at_reveal) -> None:
    party = Party(5).share(at_share).mask(at_mask).reveal(at_reveal)
    left = [site for site in party.sites if site not in (*at_share, *at_mask)]
    assert torch.equal(party.sum(), party.plain(left))


def test_a_vector_longer_than_a_piece_is_masked_throughout() -> None:
    party = Party(3)
    rng = torch.Generator().manual_seed(5)
    length = 2 * secure._PIECE // 8 + 17
    party.vectors = {site: torch.randint(-(2**40), 2**40, (length,), generator=rng) for site in party.sites}
    party.share().mask(["site-1"]).reveal()
    assert torch.equal(party.sum(), party.plain(["site-0", "site-2"]))
    for site, masked in party.masked.items():
        assert bool((masked != party.vectors[site]).all())


def test_too_few_sites_are_an_error_at_every_step() -> None:
    with pytest.raises(SiteLost, match="2 sites made shares, 3 are needed"):
        Party(5).share(["site-0", "site-1", "site-2"]).mask()
    party = Party(5).share().mask(["site-0", "site-1", "site-2"])
    with pytest.raises(SiteLost, match="2 sites are left, 3 are needed"):
        party.reveal()
    party = Party(5).share().mask().reveal(["site-0", "site-1", "site-2"])
    with pytest.raises(SiteLost, match="2 sites revealed their shares, 3 are needed"):
        party.sum()


# ------------------------------------------------------------------------------------- what the server sees


def uniform(vector: Tensor) -> float:
    """Chi-square of the bytes of a vector, 255 degrees of freedom, in standard deviations from its mean."""
    counts = np.bincount(vector.numpy().view(np.uint8), minlength=256)
    expected = counts.sum() / 256
    return float((((counts - expected) ** 2).sum() / expected - 255) / np.sqrt(2 * 255))


def test_one_masked_vector_looks_uniform_and_so_does_the_sum_before_it_is_unmasked() -> None:
    party = Party(3)
    party.vectors = {site: torch.arange(50_000) for site in party.sites}
    assert uniform(party.vectors["site-0"]) > 100
    party.share().mask()
    for vector in [*party.masked.values(), ring_sum(party.masked.values())]:
        assert abs(uniform(vector)) < 6


def test_with_one_site_lost_the_sum_needs_the_revealed_keys() -> None:
    party = Party(4).share().mask(["site-3"]).reveal()
    party.dropped = []
    wrong = party.sum()
    assert not torch.equal(wrong, party.plain(party.survivors))
    assert abs(uniform(wrong)) < 6
    with pytest.raises(SecureError, match="masks are left"):
        unpack(wrong, model(0), Secure(), sites=4)


@pytest.mark.parametrize("lost", ["", "site-0"])
def test_what_is_revealed_of_one_site_does_not_uncover_its_vector(lost: str) -> None:
    """Of site-0 the server learns the seed of its own mask, or the keys of its masks with others; each is taken
    off what site-0 sent, which in the second case came too late; what is left is still masked by the other."""
    party = Party(3)
    party.vectors = {site: torch.arange(50_000) for site in party.sites}
    late = party.share().mask().masked["site-0"].clone()
    party.survivors, party.dropped = [s for s in party.sites if s != lost], [lost] if lost else []
    party.masked = {site: party.masked[site] for site in party.survivors}
    seed, key = (secure._bytes(party.secrets["site-0"][name], 32, name) for name in ("seed", "mask"))
    party.reveal()
    parts = [
        (
            party.sites.index(site) + 1,
            secure._bytes(party.reveals[site]["keys" if lost else "seeds"]["site-0"], 32, "share"),
        )
        for site in party.survivors[:2]
    ]
    revealed, roster = secure._combine(parts), secure._Roster(party.publics, 2, CONTEXT)
    assert revealed == (key if lost else seed)
    own = [(secure._own_key(roster, "site-0", seed), False)]
    pairs = [(secure._pair_key(roster, "site-0", peer, key), False) for peer in party.sites[1:]]
    secure._add_masks(late.numpy().view(np.uint64), pairs if lost else own)
    assert abs(uniform(late)) < 6
    secure._add_masks(late.numpy().view(np.uint64), own if lost else pairs)
    assert torch.equal(late, party.vectors["site-0"])
    assert torch.equal(party.sum(), party.plain(party.survivors))


def test_two_aggregations_of_the_same_vector_differ() -> None:
    first, second = Party(2).share().mask(), Party(2).share().mask()
    assert not torch.equal(first.masked["site-0"], second.masked["site-0"])


def test_no_private_value_is_in_what_is_sent() -> None:
    party = Party(3).share().mask(["site-2"])
    names = ("seed", "seal", "mask")
    private = [secret[name].numpy().tobytes() for secret in party.secrets.values() for name in names]
    party.reveal()
    everything = b"".join(
        bytes(wire.encode(tree))
        for tree in (party.publics, *party.inbox.values(), party.masked, party.reveals)
    )
    assert not [value for value in private if value in everything]


def test_fewer_shares_than_the_threshold_say_nothing_of_the_secret() -> None:
    """Of any threshold - 1 shares, every secret is still possible: some last share makes it so."""
    parts = list(enumerate(secure._split(bytes(32), 3, 5), start=1))
    assert secure._combine(parts[:3]) == secure._combine(parts[2:]) == bytes(32)
    seen = {secure._combine([*parts[:2], (3, bytes([i]) * 32)]) for i in range(50)}
    assert len(seen) == 50


# ------------------------------------------------------------------------------------------------ refusals


def test_a_site_never_reveals_both_kinds_of_one_site() -> None:
    party = Party(4).share().mask()
    with pytest.raises(SecureError, match="exactly one list"):
        reveal(party.secrets["site-0"], party.sites, ["site-3"])
    first = reveal(party.secrets["site-0"], party.sites[:3], ["site-3"])
    assert sorted(first["seeds"]) == party.sites[:3] and list(first["keys"]) == ["site-3"]  # type: ignore
    with pytest.raises(SecureError, match="revealed before, for other survivors"):
        reveal(party.secrets["site-0"], party.sites, [])
    again = reveal(party.secrets["site-0"], ["site-2", "site-1", "site-0"], ["site-3"])
    assert wire.encode(again) == wire.encode(first)


def test_with_its_answer_a_site_forgets_its_keys() -> None:
    party = Party(3).share().mask()
    secret, seed = party.secrets["site-0"], party.secrets["site-0"]["seed"].numpy().tobytes()
    others = {bytes(value.numpy()[32:]) for name, value in secret["shares"].items()}
    reveal(secret, party.sites, [])
    assert set(secret) == {"site", "context", "revealed"}
    kept = bytes(wire.encode(secret))
    assert seed not in kept and not any(key in kept for key in others), (
        "of a survivor nobody may learn the key"
    )
    for again in (
        lambda: share(secret, party.publics, threshold=party.threshold),
        lambda: mask(secret, party.inbox["site-0"], party.vectors["site-0"].clone()),
    ):
        with pytest.raises(SecureError, match="site-0 refuses to answer: it has revealed its shares"):
            again()


@pytest.mark.parametrize(
    ("survivors", "dropped"),
    [
        (["site-0", "site-1"], []),
        (["site-1", "site-2"], ["site-0"]),
        (["site-0", "site-0", "site-1"], ["site-2"]),
        (["site-0", "site-1", "site-2", "mallory"], []),
    ],
)
def test_lists_that_do_not_fit_are_refused(survivors: list[str], dropped: list[str]) -> None:
    party = Party(3).share().mask()
    with pytest.raises(SecureError, match="exactly one list"):
        reveal(party.secrets["site-0"], survivors, dropped)


def test_nothing_is_revealed_before_a_vector_was_masked() -> None:
    party = Party(3).share()
    with pytest.raises(SecureError, match="has masked nothing yet"):
        reveal(party.secrets["site-0"], party.sites, [])


def test_a_secret_masks_one_vector_only() -> None:
    party = Party(3).share()
    secret, inbox, vector = party.secrets["site-0"], party.inbox["site-0"], party.vectors["site-0"]
    first = mask(secret, inbox, vector.clone())
    assert torch.equal(first, mask(secret, inbox, vector.clone()))
    with pytest.raises(SecureError, match="a vector was masked before"):
        mask(secret, inbox, vector + 1)
    del inbox["site-2"]
    with pytest.raises(SecureError, match="a vector was masked before"):
        mask(secret, inbox, vector.clone())


def test_shares_are_made_once() -> None:
    party = Party(4)
    secret = party.secrets["site-0"]
    first = share(secret, party.publics, threshold=3)
    assert wire.encode(share(secret, party.publics, threshold=3)) == wire.encode(first)
    with pytest.raises(SecureError, match="shares were made for other keys"):
        share(secret, party.publics, threshold=4)
    with pytest.raises(SecureError, match="shares were made for other keys"):
        share(secret, {**party.publics, "site-3": advertise("site-3", CONTEXT)[1]}, threshold=3)


@pytest.mark.parametrize("place", [0, 11, 12, 50, 91])
def test_a_ciphertext_that_was_changed_is_refused(place: int) -> None:
    party = Party(3).share()
    party.inbox["site-0"]["site-1"][place] ^= 1
    before = copy.deepcopy(party.secrets["site-0"])
    with pytest.raises(SecureError, match="shares of site-1 for site-0 do not open"):
        party.mask()
    assert wire.encode(before) == wire.encode(party.secrets["site-0"])


def test_a_ciphertext_of_another_site_or_context_is_refused() -> None:
    party, other = Party(3).share(), Party(3, context="run 7, round 3, call 0").share()
    swapped = {**party.inbox["site-0"], "site-1": party.inbox["site-0"]["site-2"]}
    foreign = {**party.inbox["site-0"], "site-1": party.inbox["site-2"]["site-1"]}
    late = {**party.inbox["site-0"], "site-1": other.inbox["site-0"]["site-1"]}
    short = {**party.inbox["site-0"], "site-1": torch.zeros(5, dtype=torch.uint8)}
    for inbox in (swapped, foreign, late):
        with pytest.raises(SecureError, match="do not open"):
            mask(party.secrets["site-0"], inbox, party.vectors["site-0"].clone())
    with pytest.raises(SecureError, match="expected 92 bytes"):
        mask(party.secrets["site-0"], short, party.vectors["site-0"].clone())


def test_the_context_changes_every_mask() -> None:
    party = Party(2)
    other = copy.deepcopy(party)
    other.context = "another"
    for secret in other.secrets.values():
        secret["context"] = "another"
    zero = torch.zeros(1000, dtype=torch.int64)
    for which in (party, other):
        which.vectors = {site: zero for site in which.sites}
        which.share().mask()
    assert (party.masked["site-0"] != other.masked["site-0"]).float().mean() > 0.99
    other.reveal().context = CONTEXT
    with pytest.raises(SecureError, match="masks are left"):
        unpack(other.sum(), {"w": torch.zeros(999)}, Secure(), sites=2)


def test_a_wrong_share_is_found_by_the_server() -> None:
    for lost in ([], ["site-3"]):
        party = Party(4).share().mask(lost).reveal()
        kind = "keys" if lost else "seeds"
        party.reveals["site-1"][kind]["site-3"][5] ^= 1
        with pytest.raises(SecureError, match="revealed of site-3 do not restore"):
            party.sum()


def test_public_keys_must_be_those_that_were_advertised() -> None:
    party = Party(3)
    secret = party.secrets["site-0"]
    for name in ("seal", "mask", "digest"):
        publics = copy.deepcopy(party.publics)
        publics["site-0"][name][3] ^= 1
        with pytest.raises(SecureError, match="not those that it advertised"):
            share(secret, publics, threshold=2)
    with pytest.raises(SecureError, match="not those that it advertised"):
        share(secret, {k: v for k, v in party.publics.items() if k != "site-0"}, threshold=2)
    with pytest.raises(SecureError, match="two public keys are equal"):
        share(secret, {**party.publics, "site-2": party.publics["site-1"]}, threshold=2)
    with pytest.raises(SecureError, match="site-1: mask: expected 32 bytes"):
        share(secret, {**party.publics, "site-1": {"seal": party.publics["site-1"]["seal"]}}, threshold=2)
    zero = {**party.publics["site-1"], "seal": torch.zeros(32, dtype=torch.uint8)}
    with pytest.raises(SecureError, match="public key of site-1 is not usable"):
        share(secret, {**party.publics, "site-1": zero}, threshold=2)
    with pytest.raises(FederationError, match="agreed to at least 4"):
        share(secret, party.publics, threshold=2, least=4)


@pytest.mark.parametrize(("sites", "least"), [(2, 2), (3, 2), (4, 3), (5, 3), (6, 4)])
def test_the_threshold_is_more_than_half(sites: int, least: int) -> None:
    assert secure.threshold_of(Secure(), sites) == least
    assert secure.threshold_of(Secure(threshold=sites), sites) == sites
    for wrong in {least - 1, sites + 1} - {1}:
        with pytest.raises(FederationError, match=f"allowed: {least} to {sites}"):
            secure.threshold_of(Secure(threshold=wrong), sites)


def test_a_low_threshold_is_refused_by_the_site_itself() -> None:
    party = Party(4)
    with pytest.raises(FederationError, match="allowed: 3 to 4"):
        share(party.secrets["site-0"], party.publics, threshold=2)
    with pytest.raises(SiteLost, match="1 site advertised their keys, 2 are needed"):
        share(party.secrets["site-0"], {"site-0": party.publics["site-0"]}, threshold=2)


# ---------------------------------------------------------------------------------------------- fixed point


@pytest.mark.parametrize("bits", [8, 16, 24])
@pytest.mark.parametrize("weights", [(1, 1, 1), (3, 0, 40), (120, 7, 61)])
def test_the_mean_is_within_the_stated_quantum(bits: int, weights: tuple[int, ...]) -> None:
    choice = Secure(bits=bits)
    models = [{"w": model(i)["w"].double()} for i in range(3)]
    total = ring_sum(
        pack(values, weight, choice, sites=3) for values, weight in zip(models, weights, strict=True)
    )
    mean, weight = unpack(total, models[0], choice, sites=3)
    exact = sum(values["w"] * w for values, w in zip(models, weights, strict=True)) / sum(weights)
    error = float((mean["w"] - exact).abs().max())
    bound = 3 * 2.0 ** -(bits + 1) / sum(weights)
    assert weight == sum(weights)
    assert 0.2 * bound < error <= bound + 1e-14


def test_the_bound_is_reached() -> None:
    """Entries that all fall half a step off, in the same direction."""
    values = {"w": torch.tensor([0.5 + 2.0**-5, -0.5 - 2.0**-5])}
    choice = Secure(bits=4)
    mean, _ = unpack(ring_sum([pack(values, 1, choice, sites=2)] * 2), values, choice, sites=2)
    assert (mean["w"] - values["w"]).abs().tolist() == [2 * 2.0**-5 / 2] * 2


def test_a_model_keeps_its_form_and_its_counters() -> None:
    like = model(9)
    total = ring_sum(pack(model(i), 1, Secure(), sites=3) for i in range(3))
    mean, _ = unpack(total, like, Secure(), sites=3)
    assert list(mean) == list(like)
    assert {n: (t.dtype, t.shape) for n, t in mean.items()} == {
        n: (t.dtype, t.shape) for n, t in like.items()
    }
    assert mean["count"].item() == 9 and mean["count"] is not like["count"]


def test_a_value_out_of_range_is_refused_by_name_and_the_largest_is_summed_exactly() -> None:
    choice = Secure(bits=24)
    largest = 2.0**62 / 4 / 2**24  # four sites
    for sign in (1, -1):
        values = {"fine": torch.ones(2), "head.bias": torch.tensor([0.0, sign * largest])}
        total = ring_sum([pack(values, 1, choice, sites=4)] * 4)
        mean, _ = unpack(total, values, choice, sites=4)
        assert torch.equal(mean["head.bias"], values["head.bias"])
        values["head.bias"] *= 1.001
        with pytest.raises(FederationError, match="head.bias holds values"):
            pack(values, 1, choice, sites=4)
        with pytest.raises(FederationError, match="head.bias holds values"):
            pack({"head.bias": values["head.bias"] / 2}, 3, choice, sites=4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_refused_by_name(bad: float) -> None:
    with pytest.raises(FederationError, match="enc.weight holds values"):
        pack({"enc.weight": torch.tensor([1.0, bad, 2.0])}, 1, Secure(), sites=2)


@pytest.mark.parametrize("weight", [-1, 1.5, True, 2**31])
def test_a_weight_is_an_integer(weight: Any) -> None:
    with pytest.raises(FederationError, match="the weight is"):
        pack(model(0), weight, Secure(), sites=2)


def test_sums_that_cannot_be_right_are_refused() -> None:
    vector = pack(model(0), 0, Secure(), sites=2)
    with pytest.raises(FederationError, match="weights of all sites sum to zero"):
        unpack(vector, model(0), Secure(), sites=2)
    vector[0] = -1
    with pytest.raises(SecureError, match="masks are left"):
        unpack(vector, model(0), Secure(), sites=2)
    with pytest.raises(SecureError, match="the model needs"):
        unpack(vector[:-1], model(0), Secure(), sites=2)
    with pytest.raises(SecureError, match=r"torch.float32 \[3\]"):
        ring_sum([torch.zeros(3)])
    with pytest.raises(SecureError, match="3 entries, another 4"):
        ring_sum([torch.zeros(4, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)])


def test_without_the_libraries_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "Crypto.Protocol.SecretSharing", None)
    with pytest.raises(FederationError, match=r"fedatlas\[secure\]"):
        advertise("site-0", CONTEXT)
