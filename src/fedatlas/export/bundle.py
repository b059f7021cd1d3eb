"""A MONAI bundle: configs, weights, and the scripts around the net."""

import json
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from fedatlas import __version__
from fedatlas.core.errors import FederationError
from fedatlas.export.source import extracted
from fedatlas.export.subject import Subject, program
from fedatlas.federation.file import net_options
from fedatlas.nets.unet import UNet, UNetModule

SCHEMA = (
    "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json"
)
TITLE = (
    "What this bundle does before and behind its net: the functions of FedAtlas %s (Apache-2.0) that it uses."
)
SCANS, IMAGES = (".nii", ".nii.gz"), (".png", ".jpg", ".jpeg", ".dcm", ".dicom")
SCAN_PACKAGES = {"nibabel": "5.2.0"}
IMAGE_PACKAGES = {"pillow": "10.0.0", "pydicom": "3.0.0"}
"""What bundles need beside MONAI, of images in DICOM pydicom: the least versions of pyproject.toml."""


def write_bundle(subject: Subject, folder: Path) -> dict[str, Any]:
    """Writes the bundle: configs/inference.json and metadata.json, models/, scripts/.

    The U-Net is MONAI's DynUNet, with models/model.pt; any other net is a program of torch.export, models/model.pt2. Both
    need MONAI and no FedAtlas. models/model.safetensors is for FedAtlas, see `Subject.save`. Raises FederationError
    for a net that torch.export cannot follow, and where the run was of pictures.
    """
    kinds = (subject.trained.inputs or {}).get("kinds", ["scan"])
    if not subject.whole and "scan" not in kinds:
        raise FederationError(
            f"{subject.trained.folder.path}: was trained on pictures, and a bundle reads scans in NIfTI; export onnx or safetensors"
        )
    for name in ("configs", "models", "scripts"):
        (folder / name).mkdir()
    dynunet = _dynunet(subject)
    free = True
    if dynunet is not None:
        arguments, weights = dynunet
        torch.save(weights, folder / "models" / "model.pt")
        definition: dict[str, Any] = {"_target_": "monai.networks.nets.DynUNet", **arguments}
        network = "$scripts.with_weights(@network_def, @bundle_root + '/models/model.pt').to(@device)"
    else:
        whole_slices = subject.options["windows"] == "whole"
        made, free = program(subject)
        if whole_slices and not free and not subject.whole:
            raise FederationError(
                f"net {subject.trained.federation.net['name']}: its program takes inputs of {list(subject.size)} alone, and the run "
                "predicts slices at once (evaluation.inference.windows: whole); export safetensors, which `fedatlas` reads"
            )
        torch.export.save(made, folder / "models" / "model.pt2")
        definition = {
            "_target_": "scripts.Program",
            "path": "$@bundle_root + '/models/model.pt2'",
            "device": "@device",
        }
        network = "@network_def"
    subject.save(folder / "models" / "model.safetensors")
    names, config = _of_images(subject) if subject.whole else _of_scans(subject)
    head = {
        "imports": ["$import torch", "$import scripts"],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/data'",
        "output_dir": "$@bundle_root + '/eval'",
        "anyway": False,
        "overwrite": False,
        "device": "$torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
        "network_def": definition,
        "network": network,
    }
    tail = {
        "run": [
            "$scripts.require_room(@datalist, @results, @overwrite)",
            "$scripts.run(@datalist, @preprocessing, @inferer, @network, @postprocessing)",
        ]
    }
    _write(folder / "configs" / "inference.json", head | config | tail)
    _write(folder / "configs" / "metadata.json", _metadata(subject))
    names = [*names, "files_of", "require_room", "run", "with_weights" if dynunet else "Program"]
    text = extracted("fedatlas.export.scripts", names, TITLE % __version__)
    (folder / "scripts" / "__init__.py").write_text(text, encoding="utf-8")
    return {"net": definition["_target_"], "free_sizes": free}


def _dynunet(subject: Subject) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
    """The arguments of MONAI's DynUNet and its weights; None for another net."""
    from monai.networks.nets.dynunet import DynUNet

    _, options = net_options(subject.trained.federation)
    if not isinstance(options, UNet):
        return None
    net = subject.net
    arguments = options.arguments(net.in_channels, net.classes, net.spatial_dims)
    theirs = DynUNet(**arguments)
    ours = UNetModule(theirs, net.in_channels, net.classes, list(net.divisor), options.filters[-1])
    ours.load_state_dict(subject.net.state_dict())  # of the very same blocks
    return arguments, theirs.state_dict()


def _of_scans(subject: Subject) -> tuple[list[str], dict[str, Any]]:
    """What scripts and the configuration hold of volumes."""
    space, shape = subject.trained.space, subject.plain["preprocessing"]
    compose = "monai.transforms.Compose"
    return ["ToGrid", "Windows", "FromGrid", "SaveLabels", "label_files"], {
        "datalist": f"$scripts.files_of(@dataset_dir, {SCANS}, {subject.trained.channels})",
        "results": "$scripts.label_files(@datalist, @output_dir)",
        "preprocessing": {
            "_target_": compose,
            "transforms": [
                {"_target_": "LoadImaged", "keys": "image", "reader": "NibabelReader"},
                {"_target_": "EnsureChannelFirstd", "keys": "image"},
                {
                    "_target_": "scripts.ToGrid",
                    "preprocessing": shape,
                    "channels": subject.trained.channels,
                    "classes": len(space),
                    "inputs": subject.trained.inputs,
                    "anyway": "@anyway",
                },
            ],
        },
        "inferer": {
            "_target_": "scripts.Windows",
            "patch": list(shape["patch"]),
            "context": shape["context"],
            "options": subject.options,
            "exclusive": space.exclusive,
            "divisor": list(subject.net.divisor),
            "classes": None if subject.classes is None else list(subject.classes),
        },
        "postprocessing": {
            "_target_": compose,
            "transforms": [
                {"_target_": "scripts.FromGrid", "exclusive": space.exclusive},
                {"_target_": "scripts.SaveLabels", "folder": "@output_dir", "exclusive": space.exclusive},
            ],
        },
    }


def _of_images(subject: Subject) -> tuple[list[str], dict[str, Any]]:
    """What scripts and the configuration hold of whole images."""
    trained = subject.trained
    limits = trained.thresholds()
    return ["ReadImage", "Findings", "FindingsTable", "findings_file"], {
        "datalist": f"$scripts.files_of(@dataset_dir, {IMAGES})",
        "results": "$[scripts.findings_file(@output_dir)]",
        "preprocessing": {
            "_target_": "scripts.ReadImage",
            "images": subject.plain["images"],
            "inputs": subject.trained.inputs,
            "anyway": "@anyway",
        },
        "inferer": {
            "_target_": "scripts.Findings",
            "classes": None if subject.classes is None else list(subject.classes),
        },
        "postprocessing": {
            "_target_": "scripts.FindingsTable",
            "folder": "@output_dir",
            "names": list(trained.space.names),
            "thresholds": [limits[name].value for name in trained.space.names],
        },
    }


def _metadata(subject: Subject) -> dict[str, Any]:
    import monai
    import numpy as np

    trained, net = subject.trained, subject.net
    axes = [f"{by}*n" if by > 1 else "n" for by in net.divisor]
    names = {str(c): name for c, name in enumerate(trained.space.names)}
    kind = "classification" if subject.whole else "segmentation"
    image = {
        "type": "image",
        "format": "hounsfield" if (subject.plain.get("preprocessing") or {}).get("window") else "magnitude",
        "num_channels": net.in_channels,
        "spatial_shape": list(subject.size) if subject.whole else axes,
        "dtype": "float32",
        "value_range": [],
        "is_patch_data": not subject.whole,
        "channel_def": {str(c): "image" for c in range(net.in_channels)},
    }
    pred = image | {
        "format": "classes" if subject.whole else "segmentation",
        "num_channels": net.classes,
        "spatial_shape": [1] if subject.whole else axes,
        "value_range": [0, 1],
        "channel_def": names,
    }
    return {
        "schema": SCHEMA,
        "version": "0.1.0",
        "changelog": {"0.1.0": f"exported by FedAtlas {__version__}"},
        "monai_version": monai.__version__,
        "pytorch_version": torch.__version__.partition("+")[0],
        "numpy_version": np.__version__,
        "required_packages_version": _packages(IMAGE_PACKAGES if subject.whole else SCAN_PACKAGES),
        "name": str(trained.federation.name),
        "task": f"Federated {kind} with partial labels",
        "description": f"{kind.capitalize()} of {', '.join(trained.space.names[trained.space.foreground.start :])}; see model_card.md",
        "authors": "see model_card.md",
        "copyright": "see model_card.md",
        "network_data_format": {"inputs": {"image": image}, "outputs": {"pred": pred}},
        "fedatlas": {key: _plain(value) for key, value in subject.facts().items()},
    }


def _packages(least: Mapping[str, str]) -> dict[str, str]:
    """package -> the version that is installed here, or else the least that FedAtlas takes."""
    found = dict(least)
    for name in least:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _write(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
