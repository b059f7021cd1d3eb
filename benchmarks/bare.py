"""Starts the bare echo applications: their processes and their jobs, on kits of our adapters' own making."""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedatlas.federation.across import free_ports
from fedatlas.transport.deployment import Job, Launch
from fedatlas.transport.flower import engine as flower
from fedatlas.transport.nvflare import engine as nvflare

ROOT = Path(__file__).parents[1]


def launch_nvflare(folder: Path, party: str) -> Launch:
    """NVFLARE's own process, allowed to load the echo's classes and none of ours."""
    kit = folder / party
    launch = (nvflare.server_process if party == "server" else nvflare.site_process)(kit)
    path = kit / "engine" / "local" / "resources.json"
    resources = json.loads(path.read_text())
    resources["class_allow_list"] = [f"benchmarks.bare_nvflare.{name}" for name in ("Asker", "Echo")]
    path.write_text(json.dumps(resources))
    return replace(launch, env={**launch.env, "PYTHONPATH": str(ROOT)})


def submit_nvflare(folder: Path, sites: Sequence[str]) -> Job:
    """The job of our adapter with the echo's two classes in the place of ours; so sites ask as often for tasks."""
    with tempfile.TemporaryDirectory() as scratch:
        job = nvflare._job_folder(Path(scratch) / "bare", sites)
        for file in (job / "app" / "config").iterdir():
            text = file.read_text()
            for ours, bare in zip(nvflare.CLASSES, ("Asker", "Echo"), strict=True):
                text = text.replace(ours, f"benchmarks.bare_nvflare.{bare}")
            file.write_text(text)
        return nvflare._FlareJob(folder / "authority" / "admin", job, sites)


def launch_flower(folder: Path, party: str) -> Launch:
    """Our server process, which is Flower's SuperLink behind a gate; at a site, the stock SuperNode."""
    kit = folder / party
    launch = (flower.server_process if party == "server" else flower.site_process)(kit)
    if party == "server":
        return launch
    server, site = folder / "server" / "engine", kit / "engine"
    command = [str(Path(sys.executable).parent / "flower-supernode"), "--port", str(free_ports(1)[0])]
    command += ["--superlink", json.loads((site / "site.json").read_text())["server"]]
    command += ["--root-certificates", str(site / "ca.crt")]
    command += ["--auth-supernode-private-key", str(site / "site.key")]
    command += ["--ssl-certfile", str(server / "server.crt"), "--ssl-keyfile", str(server / "server.key")]
    command += ["--ssl-ca-certfile", str(site / "ca.crt")]
    return replace(launch, command=tuple(command))


def submit_flower(folder: Path, sites: Sequence[str]) -> Job:
    from fedatlas.transport.flower import compat

    code = Path(__file__).with_name("bare_flower.py").read_bytes()
    control = flower._Control(folder / "server")
    response = control.client.StartRun(compat.start_request("bare-echo", "benchmark", "echo", code, {}))
    return flower.FlowerJob(control, response.run_id)
