"""FedAvg.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas. Communication-efficient learning of deep networks from
decentralized data. AISTATS 2017.

Every site trains the global model on its own cases; the server takes the weighted mean. With the marginal loss
(or the masked loss, where classes overlap) it is the baseline for partial labels of all later papers.

All methods that average models build on it, so that the algorithm is their base class, `shared.averaging.Averaging`:
its `round` is the server of Algorithm 1, its `local_update` is ClientUpdate.

Differences from the paper: all sites take part in every round.
"""

from fedatlas.core.options import options
from fedatlas.methods.shared.averaging import Averaging
from fedatlas.methods.shared.swa import WithSWA


@options
class FedAvg(WithSWA, Averaging):
    """The mean of locally trained models, with a loss that respects missing labels (McMahan 2017)."""
