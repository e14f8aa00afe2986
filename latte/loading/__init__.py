"""Reading what is on disk or on the hub: folders of runs, models with their tokenizers, pretrained models to extend."""

from latte.loading.gguf import GgufFile, read_gguf
from latte.loading.models import load, load_folder, load_model, model_weights
from latte.loading.packed import extended_model, quantize_new, use_blocks
from latte.loading.pretrained import Original, load_any, load_original, smollm2_file

__all__ = [
    "GgufFile",
    "Original",
    "extended_model",
    "load",
    "load_any",
    "load_folder",
    "load_model",
    "load_original",
    "model_weights",
    "quantize_new",
    "read_gguf",
    "smollm2_file",
    "use_blocks",
]
