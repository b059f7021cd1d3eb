"""Writing an export: whole or not at all, with its model card."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedatlas.core.errors import FederationError
from fedatlas.core.options import not_known
from fedatlas.export.bundle import write_bundle
from fedatlas.export.card import EXPORTED, card
from fedatlas.export.subject import Subject, larger, program, subject
from fedatlas.federation.usable import Warn, silent

TOLERANCE = 1e-4
"""By how much outputs of an ONNX file may differ from those of the net."""

Result = dict[str, Any]


def export(
    path: Path,
    form: str,
    out: Path | None = None,
    *,
    model: str = "best",
    overwrite: bool = False,
    warn: Warn = silent,
) -> Result:
    """Writes the model of a run folder into a folder, with model_card.md, and returns what was written.

    form: bundle, onnx or safetensors. out: None: exports/<form> in the run folder. overwrite: replace an export that is
    there. Raises FederationError, RunFolderError as `Trained`; nothing is written then.
    """
    if form not in FORMS:
        raise not_known("--to: the form", form, FORMS)
    out = out or path / "exports" / form
    ours = _is_export(out)
    if out.exists() and not (overwrite and ours):
        offer = ", or replace it with --overwrite" if ours else "; it is no export, and is left as it is"
        raise FederationError(f"{out}: exists already; give another folder with -o{offer}")
    chosen = subject(path, model, warn)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".export-", dir=out.parent))
    except OSError as error:
        raise FederationError(
            f"-o {out}: cannot be written ({error.strerror or error}); give another folder"
        ) from None
    try:
        found = FORMS[form](chosen, temporary)
        (temporary / CARD).write_text(card(chosen, form, found, out), encoding="utf-8")
        os.chmod(temporary, 0o755)
        if out.exists():
            shutil.rmtree(out)
        os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    files = sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file())
    return {
        "out": str(out),
        "form": form,
        "model": model,
        "round": chosen.trained.round,
        "files": files,
    } | found


CARD = "model_card.md"


def write_safetensors(subject: Subject, folder: Path) -> Result:
    """model.safetensors: see `Subject.save`."""
    subject.save(folder / "model.safetensors")
    return {}


def write_onnx(subject: Subject, folder: Path) -> Result:
    """model.onnx: logits of the net, and labels.json beside it. What onnxruntime says is compared with the net.

    Raises FederationError where a package is missing, the net cannot be exported, or the two differ by more than TOLERANCE.
    """
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise FederationError(f"--to onnx: needs {', '.join(missing)}; pip install 'fedatlas[onnx]'")
    file = folder / "model.onnx"
    reason, free = "", True
    for free in (True, False):
        try:
            made, free = program(subject, patch_only=not free)
            apart = _as_onnx(subject, made, file, free)
            break
        except FederationError:
            raise
        except Exception as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            file.unlink(missing_ok=True)
    else:
        name = subject.trained.federation.net["name"]
        raise FederationError(f"net {name}: ONNX cannot hold it ({reason}); export a bundle, or safetensors")
    if not apart <= TOLERANCE:
        raise FederationError(
            f"net {subject.trained.federation.net['name']}: onnxruntime differs from the net by {apart:.2g}; allowed is {TOLERANCE:g}. "
            "Nothing was written; export a bundle, or safetensors"
        )
    (folder / "labels.json").write_text(
        json.dumps(subject.trained.space.to_plain(), indent=1) + "\n", encoding="utf-8"
    )
    return {"largest_difference": apart, "free_sizes": free}


def _as_onnx(subject: Subject, made: torch.export.ExportedProgram, file: Path, free: bool) -> float:
    """Writes the file. By how much outputs differ at most from those of the net, for one and for three inputs, and for
    another size where sizes are free."""
    import logging
    import warnings

    import onnx
    import onnxruntime

    for name in ("onnxscript", "torch.onnx"):  # they tell of packages that this net does not need
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        converted = torch.onnx.export(
            made, input_names=["image"], output_names=["logits"], dynamo=True, verbose=False, optimize=True
        )
    assert converted is not None
    converted.save(str(file), external_data=False)
    kept = onnx.load(file)
    for key, value in subject.facts().items():
        kept.metadata_props.add(key=key, value=value)
    onnx.checker.check_model(kept)
    onnx.save(kept, file)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    apart: list[float] = []
    with torch.inference_mode():
        for n, size in [(1, subject.size), (3, larger(subject) if free else subject.size)]:
            image = subject.example(n, size)
            (said,) = session.run(None, {session.get_inputs()[0].name: image.numpy()})
            apart.append(float(np.abs(np.asarray(said) - subject.net(image).numpy()).max()))
    return float(np.max(apart))  # NaN where one is; of Python's max it would be the other


def _is_export(folder: Path) -> bool:
    """Whether a folder was written by `export`, as its card says; not the link to one."""
    try:
        return not folder.is_symlink() and EXPORTED in (folder / CARD).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False


FORMS: dict[str, Callable[[Subject, Path], Result]] = {
    "bundle": write_bundle,
    "onnx": write_onnx,
    "safetensors": write_safetensors,
}
