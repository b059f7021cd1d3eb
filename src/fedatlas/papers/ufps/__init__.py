"""Figures of UFPS that show options which this method alone has."""

from fedatlas.compare.plan import Comparison
from fedatlas.federation.file import make_method
from fedatlas.methods.ufps import UFPS


def arms_of_ufps(comparison: Comparison) -> dict[str, UFPS]:
    """Arm -> its method, for the arms whose method is UFPS."""
    methods = {arm: make_method(comparison.federation(arm)) for arm in comparison.arms}
    return {arm: method for arm, method in methods.items() if isinstance(method, UFPS)}
