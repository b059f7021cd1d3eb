"""The processes of Flower:

    python -m fedatlas.transport.flower serve KIT      the server (Flower's SuperLink)
    python -m fedatlas.transport.flower attend KIT     a site's node

Needs the package flwr. Imports no torch.
"""

import logging
import signal
import sys
from pathlib import Path
from typing import Any

from fedatlas.core.errors import FedAtlasError
from fedatlas.transport.flower.engine import log_to

log = logging.getLogger("fedatlas")


class _Stop(BaseException):
    """This process was asked to end."""


def main() -> int:
    log_to(logging.StreamHandler())

    def stop(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise _Stop

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    role, kit = sys.argv[1], Path(sys.argv[2])
    try:
        if role == "serve":
            from fedatlas.transport.flower.server import serve

            return serve(kit)
        from fedatlas.transport.flower.node import attend

        return attend(kit)
    except _Stop:
        return 0
    except FedAtlasError as error:
        log.error("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
