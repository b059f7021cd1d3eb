"""What a method may declare: by the names and kinds of its base class, and by no others."""

from collections.abc import Mapping
from typing import ClassVar

import pytest

from fedatlas import methods
from fedatlas.core.contract import Method, State, at_site, sends_of
from fedatlas.core.errors import FederationError
from fedatlas.core.options import option, options, own_first
from fedatlas.methods.fedopt import FedOpt
from fedatlas.methods.shared.averaging import Averaging


class Walk(Method):
    """The two functions that every method has."""

    def start(self, net, clients) -> State:
        return State({})

    def round(self, state, clients) -> State:
        return state


NAMES = [name for name in vars(Method) if not name.startswith("_")]


@pytest.mark.parametrize("name", NAMES)
def test_a_misspelt_declaration_is_an_error(name: str) -> None:
    wrong = f"{name}s"
    value = vars(Method)[name]
    with pytest.raises(TypeError, match=f"class Mine: `{wrong}` is not something.*did you mean `{name}`"):
        type("Mine", (Method,), {wrong: value})


def test_the_message_names_class_and_name() -> None:
    with pytest.raises(TypeError) as told:

        class Mine(Method):
            def exmaine(self, net, sites) -> list[str]:
                return []

    assert (
        str(told.value)
        == "class Mine: `exmaine` is not something that a method declares; did you mean `examine`?"
    )


def test_a_misspelt_class_variable_is_an_error_even_without_a_value() -> None:
    with pytest.raises(TypeError, match="did you mean `summed`"):
        type("Mine", (Method,), {"__annotations__": {"sumed": ClassVar[str]}})


def test_options_functions_at_sites_and_names_of_parents_are_free() -> None:
    @options
    class Mine(Walk):
        starts: int = option(1, "An option.")
        _round = 2

        @at_site
        def rounds(self, site) -> dict:
            return {}

        def local_objective(self) -> None: ...

    class Theirs(Mine):
        starts = 3

        def rounds(self, site) -> dict:
            return {}

    assert Mine().starts == 1 and Theirs.starts == 3 and list(Mine().functions()) == ["rounds"]


def test_a_declaration_of_another_kind_is_an_error() -> None:
    with pytest.raises(TypeError, match="class Mine: `sends` must be a value or a property, not a function"):
        type("Mine", (Method,), {"sends": lambda self: {}})
    with pytest.raises(TypeError, match="class Mine: `check` must be a function"):
        type("Mine", (Method,), {"check": True})


def test_values_properties_and_options_are_all_declarations() -> None:
    @options
    class Mine(Walk):
        state: ClassVar[type[State]] = State
        pooled: bool = option(False, "An option that decides.")

        @property
        def sends(self) -> Mapping[str, str]:
            return {"n": "cases"}

        @at_site
        def local_update(self, site) -> dict:
            return {}

    assert Mine(pooled=True).pooled and sends_of(Mine()) == {"local_update": {"n": "cases"}}  # type: ignore[call-arg]


def test_a_class_that_does_not_derive_is_told_to(monkeypatch) -> None:
    monkeypatch.setitem(methods.REGISTRY, "plain", "fedatlas.core.batch:Batch")
    with pytest.raises(
        FederationError, match=r"method plain: Batch .* does not derive from .*Method; write class"
    ):
        methods.get("plain")


@pytest.mark.parametrize("name", methods.names())
def test_every_method_derives(name: str) -> None:
    assert issubclass(methods.get(name), Method)


def test_a_class_tells_its_own_options_first() -> None:
    shared = ["aggregate_unlabelled_rows", "weights", "loss", "local"]
    assert own_first(Averaging) == shared
    assert own_first(FedOpt)[:2] == ["optimizer", "lr"] and own_first(FedOpt)[-1] == "local"
    assert FedOpt().weights == "equal" and Averaging().weights == "cases"  # type: ignore[call-arg]


def test_a_method_without_its_two_functions_is_not_made() -> None:
    class Half(Method):
        def start(self, net, clients) -> State:
            return State({})

    with pytest.raises(TypeError, match="abstract class Half .*round"):
        Half()  # type: ignore[abstract]


def test_models_that_sites_choose_must_be_put_together() -> None:
    class Own(Walk):
        chosen_by_site = True

    with pytest.raises(TypeError, match=r"class Own: `chosen_by_site` is true, so `assembled"):
        Own().assembled(State({}), {})
